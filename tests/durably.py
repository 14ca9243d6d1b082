"""A scripted life of a durable server: an act depends on nothing but its number and the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from playback import INPUTS, PARAMETERS, network, same
from torch import Tensor

from afield.core.keys import generator, uniform
from afield.core.server import Server
from afield.core.types import LocalResult, Receipt, Task, Update
from afield.store.live import Durable
from afield.training.distill import Distil

CLIENTS = 5
UPDATES = 24


def first_day(strategy: Any, clients: int = CLIENTS) -> Server:
    module = network()
    vector = torch.cat([p.detach().flatten() for p in module.parameters()] + [torch.zeros(3), torch.ones(3)])
    unlabelled = torch.randn(8, INPUTS, generator=generator(9))
    distiller = Distil(module, unlabelled) if hasattr(strategy, "refine") else None
    return Server(strategy, vector, clients, parameters=PARAMETERS, seed=3, distiller=distiller)


def durable(strategy: Any, folder: Path, **options: Any) -> Durable:
    return Durable(first_day(strategy), folder, **options)


def trained(server: Server, task: Task) -> Tensor:
    """A keyed stand-in for training: moves parameters at random, keeps variances positive."""
    base = server.base(task)
    move = torch.randn(base.shape, generator=generator(3, task.client, task.count), dtype=base.dtype)
    model = base + 0.3 * move
    model[PARAMETERS:] = move[PARAMETERS:].abs()
    correction = server.correction(task)
    if correction is not None:
        model[: server.parameters] -= 0.2 * correction
    return model


def acts_of(strategy: Any, updates: int, batch: int = 1) -> list[tuple[str, int]]:
    """(verb, client) until so many updates were sent: everyone trains all the time, or three in a round.

    `batch` updates, of different clients, come together.
    """
    acts: list[tuple[str, int]] = []
    pace = getattr(strategy, "pace", "arrival")
    group = batch if pace == "arrival" else 3
    if pace == "arrival":
        acts += [("checkout", client) for client in range(CLIENTS)]
    for first in range(0, updates, group):
        start = first if first < CLIENTS else int(uniform(2, first) * CLIENTS)  # everyone once: warm-ups end
        who = [(start + k) % CLIENTS for k in range(min(group, updates - first))]
        sent = [("submit", client) for client in who]
        asked = [("checkout", client) for client in who]
        acts += [*sent, *asked] if pace == "arrival" else [*asked, *sent, ("close", 0)]
    return acts


def live(
    door: Durable,
    acts: list[tuple[str, int]],
    told: Callable[[Receipt], None] | None = None,
    until: int | None = None,
    batch: int = 1,
    sends: Callable[[list[Update]], None] | None = None,
) -> None:
    """Go on from wherever the server stands; `told` is called where a client would get its receipt.

    Up to `batch` updates in a row are submitted together, after `sends` was called with them.
    """
    server, end = door.server, len(acts) if until is None else until
    while door.acts < end:
        verb, client = acts[door.acts]
        if verb == "checkout":
            door.checkout(client, float(door.acts))
        elif verb == "close":
            door.close_round()
        else:
            updates: list[Update] = []
            for k in range(door.acts, min(door.acts + batch, end)):
                verb, client = acts[k]
                if verb != "submit":
                    break
                task = next(lease.task for lease in server.leases.values() if lease.task.client == client)
                result = LocalResult(trained(server, task), examples=1 + client, steps=2, rate=0.1)
                updates.append(result.answer(task, float(k)))
            if sends is not None:
                sends(updates)
            for receipt in door.submit_all(updates):
                if told is not None:
                    told(receipt)


def equal(one: Server, two: Server) -> bool:
    """All that two servers hold, bit by bit."""
    first, second = one.picture(), two.picture()
    leases, others = list(first.pop("leases").values()), list(second.pop("leases").values())
    return (
        [lease.task for lease in leases] == [lease.task for lease in others]
        and all(torch.equal(a.base, b.base) for a, b in zip(leases, others, strict=True))
        and all(
            (a.correction is None and b.correction is None) or torch.equal(a.correction, b.correction)
            for a, b in zip(leases, others, strict=True)
        )
        and same(first, second)
    )


def whole(strategy: Any, folder: Path, updates: int = UPDATES) -> tuple[Server, list[Receipt]]:
    """A life without interruption."""
    receipts: list[Receipt] = []
    with durable(strategy, folder, every=1000) as door:
        live(door, acts_of(strategy, updates), receipts.append)
    return door.server, receipts


@contextmanager
def left(door: Durable) -> Iterator[Durable]:
    """As a crash leaves it: nothing is written at the end."""
    door.__enter__()
    try:
        yield door
    finally:
        door.leave()
