"""Who has which data: every example goes to exactly one client, and no client is empty."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from afield.core.errors import InputError, within
from afield.core.keys import Stream, generator, mix

Split = tuple[list[Tensor], Tensor]  # one index tensor per client, and the labels as the clients see them


def _enough(examples: int, clients: int, each: int = 1, name: str = "") -> None:
    within("clients", clients, 1, math.inf, below=True)
    if examples < clients * each:
        need = f"clients = {clients}{f' with {name} = {each}' if name else ''} need {clients * each} examples"
        smaller = f" or a smaller {name}" if name else ""
        raise InputError(
            f"{need} and there are {examples}; have at most {examples // each} clients{smaller}, or more data"
        )


def _shuffled(count: int, *key: int) -> Tensor:
    return torch.randperm(count, generator=generator(*key))


def _even(examples: int, clients: int, seed: int) -> list[Tensor]:
    """A shuffled split whose sizes differ by at most one."""
    _enough(examples, clients)
    order = _shuffled(examples, seed, Stream.PARTITION)
    return [part.sort().values for part in order.tensor_split(clients)]


def _dirichlet(alpha: float, length: int, *key: int) -> Tensor:
    """Shares from a symmetric Dirichlet distribution, in float64.

    A gamma variate of shape alpha is one of shape alpha + 1 times u^(1/alpha) (Marsaglia and Tsang
    2000). In logarithms: u^(1/alpha) underflows from alpha = 0.01 on, and could leave shares of 0/0.
    """
    source = generator(*key)
    d = alpha + 2 / 3
    c = 1 / math.sqrt(9 * d)
    logs = torch.full((length,), math.nan, dtype=torch.float64)
    while bool((missing := logs.isnan()).any()):  # accepts 95 % and more of the draws in each turn
        x = torch.randn(length, generator=source, dtype=torch.float64)
        u = 1 - torch.rand(length, generator=source, dtype=torch.float64)
        v = (1 + c * x) ** 3
        accepted = missing & (v > 0) & (u.log() < 0.5 * x * x + d - d * v + d * v.clamp_min(1e-300).log())
        logs = torch.where(accepted, (d * v).clamp_min(1e-300).log(), logs)
    u = 1 - torch.rand(length, generator=source, dtype=torch.float64)
    return torch.softmax(logs + u.log() / alpha, 0)


def _deal(order: Tensor, shares: Tensor) -> tuple[Tensor, ...]:
    """Cut `order` into pieces of these shares."""
    ends = (shares.cumsum(0)[:-1] * len(order)).round().to(torch.int64)
    return order.tensor_split(ends)


def _lift(parts: list[list[int]], minimum: int, seed: int) -> list[Tensor]:
    """Give every client `minimum` examples, each taken at random from whoever has most at that moment.

    Drawing again until the minimum holds may take for ever at small alpha; this takes at most
    `minimum` moves per client.
    """
    richest = [(-len(part), client) for client, part in enumerate(parts)]
    heapq.heapify(richest)
    moves = 0
    for part in parts:
        while len(part) < minimum:
            # Somebody has more than the minimum, since the mean is no less: it is never a client in need.
            size, donor = richest[0]
            giving = parts[donor]
            at = mix(seed, Stream.PARTITION, 1, moves) % len(giving)
            giving[at], giving[-1] = giving[-1], giving[at]
            part.append(giving.pop())
            heapq.heapreplace(richest, (size + 1, donor))
            moves += 1
    return [torch.tensor(part, dtype=torch.int64).sort().values for part in parts]


@dataclass(frozen=True)
class IID:
    """Shuffled and dealt out evenly."""

    def split(self, labels: Tensor, clients: int, seed: int) -> Split:
        return _even(len(labels), clients, seed), labels


@dataclass(frozen=True)
class Dirichlet:
    """Each class is dealt out by shares drawn from Dirichlet(alpha): small alpha, unlike clients.

    Drawn once; clients with fewer than `minimum` examples then get some of those who have most.
    """

    alpha: float = 0.3
    minimum: int = 1

    def __post_init__(self) -> None:
        within("alpha", self.alpha, 1e-4, 1e6)
        within("minimum", self.minimum, 1, math.inf, below=True)

    def split(self, labels: Tensor, clients: int, seed: int) -> Split:
        _enough(len(labels), clients, self.minimum, "minimum")
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label in torch.unique(labels).tolist():
            members = (labels == label).nonzero().flatten()
            order = members[_shuffled(len(members), seed, Stream.PARTITION, 2, label)]
            shares = _dirichlet(self.alpha, clients, seed, Stream.PARTITION, 3, label)
            for part, piece in zip(parts, _deal(order, shares), strict=True):
                part.extend(piece.tolist())
        return _lift(parts, self.minimum, seed), labels


@dataclass(frozen=True)
class Shards:
    """Sorted by label, cut into equal shards, `per_client` shards to each (McMahan et al. 2017)."""

    per_client: int = 2

    def __post_init__(self) -> None:
        within("per_client", self.per_client, 1, math.inf, below=True)

    def split(self, labels: Tensor, clients: int, seed: int) -> Split:
        _enough(len(labels), clients, self.per_client, "per_client")
        order = _shuffled(len(labels), seed, Stream.PARTITION)
        shards = order[labels[order].sort(stable=True).indices].tensor_split(clients * self.per_client)
        dealt = _shuffled(len(shards), seed, Stream.PARTITION, 4).view(clients, self.per_client)
        return [torch.cat([shards[k] for k in row]).sort().values for row in dealt.tolist()], labels


@dataclass(frozen=True)
class QuantitySkew:
    """Sizes from Dirichlet(alpha) over the clients, labels alike everywhere."""

    alpha: float = 0.5
    minimum: int = 1

    def __post_init__(self) -> None:
        within("alpha", self.alpha, 1e-4, 1e6)
        within("minimum", self.minimum, 1, math.inf, below=True)

    def split(self, labels: Tensor, clients: int, seed: int) -> Split:
        _enough(len(labels), clients, self.minimum, "minimum")
        order = _shuffled(len(labels), seed, Stream.PARTITION)
        shares = _dirichlet(self.alpha, clients, seed, Stream.PARTITION, 5)
        return _lift([piece.tolist() for piece in _deal(order, shares)], self.minimum, seed), labels


@dataclass(frozen=True)
class LabelSwap:
    """Split as `iid`; the second half of the clients has a share of one pair of labels exchanged (FedStale).

    Rodio and Neglia 2024, section 5: the second half is the group that participates rarely. Each of its
    clients exchanges int(share * count) of its examples of either label, as the authors' first code
    did; unlike that code, the first half keeps its labels, as the paper says. The test set is not touched.
    """

    share: float = 0.5
    pair: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        within("share", self.share, 0, 1)
        if len(self.pair) != 2 or self.pair[0] == self.pair[1] or min(self.pair) < 0:
            raise InputError(f"pair = {self.pair} is not two different labels; give for example (0, 1)")

    def split(self, labels: Tensor, clients: int, seed: int) -> Split:
        missing = [label for label in self.pair if not bool((labels == label).any())]
        if missing:
            raise InputError(
                f"pair = {self.pair}: no example has label {missing[0]}; choose two that occur "
                f"(0 to {int(labels.max()) if len(labels) else 0})"
            )
        parts, swapped = _even(len(labels), clients, seed), labels.clone()
        for client in range(clients // 2, clients):
            for old, new in (self.pair, self.pair[::-1]):
                members = parts[client][labels[parts[client]] == old]
                chosen = _shuffled(len(members), seed, Stream.LABELS, client, old)
                # The nudge keeps 0.29 * 100 = 28.999999999999996 from losing an example.
                swapped[members[chosen[: int(self.share * len(members) + 1e-9)]]] = new
        return parts, swapped

    def others(self, labels: Tensor) -> Tensor:
        """The labels if every example of the pair were relabelled: of these, `split` chooses."""
        first, second = self.pair
        found = torch.where(labels == first, second, labels)
        return torch.where(labels == second, first, found)


@dataclass(frozen=True)
class OnePerClient:
    """Example i belongs to client i (for `quadratic`)."""

    def split(self, labels: Tensor, clients: int, seed: int) -> Split:
        if clients != len(labels) or not clients:
            raise InputError(f"{clients} clients for {len(labels)} examples; set clients to {len(labels)}")
        return list(torch.arange(clients).tensor_split(clients)), labels


PARTITIONS = {
    "iid": IID,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "quantity-skew": QuantitySkew,
    "label-swap": LabelSwap,
    "one-per-client": OnePerClient,
}
