"""Local training of convolutional models on a GPU: several clients side by side, each on a stream of its own.

Stacked convolutions of models of millions of weights are slower than native ones; one model alone leaves a GPU idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from afield.training.cuda import GraphTrainer, Held, Step
from afield.training.deal import Deal
from afield.training.descent import descend
from afield.training.step import channels_last

# Clients side by side on an H200, ms per client step: ResNet-18 (batch 50) 1.11 with 4, 1.09 with 8, 1.06 with 16;
# a CNN of 28,000 weights (batch 20) 0.060 with 8, 0.043 with 16, 0.035 with 32, 0.033 with 48.
STREAMS, STREAMS_SMALL, SMALL = 16, 32, 1_000_000


class StreamTrainer(GraphTrainer):
    """Clients side by side in lanes: each has weights, a stream and graphs of its own, and no lane waits for another,
    however unlike their numbers of steps and wherever a short batch comes.

    With channels_last the weights of convolutions lie in that order while they are trained.
    """

    @property
    def capacity(self) -> int:
        return STREAMS_SMALL if self.layout.parameters < SMALL else STREAMS

    def _placed(self, tensor: Tensor) -> Tensor:
        return channels_last(tensor) if self._last and tensor.ndim == 5 else tensor

    def _tape(self, short: bool, rate: float | None) -> Step:
        tape = self.steps.get(many=False, short=short, rate=rate)
        return torch.compile(tape, dynamic=False) if self._compiling and not self._proving else tape

    @cached_property
    def _lanes(self) -> list[tuple[Any, Any]]:
        """A stream and a pool of memory each; None on a CPU."""
        if self.device.type != "cuda":
            return [(None, None)] * self.capacity
        return [
            (torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle())  # type: ignore[no-untyped-call]
            for _ in range(self.capacity)
        ]

    def _room_for(self, width: int) -> tuple[Any, Any]:
        return self._lanes[width]

    def _train(self, deal: Deal) -> tuple[Tensor, Tensor]:
        models = torch.empty(len(deal), self.layout.size, dtype=self.layout.dtype, device=self.device)
        losses = torch.empty(len(deal), dtype=torch.float64, device=self.device)
        held = self._hold(len(deal.counts))
        bent = any(correction is not None for correction in deal.corrections)
        shares, _ = self.weights(deal)
        short: list[list[bool]] = ((deal.counts > 0) & (deal.counts < self.batch)).tolist()
        steps = deal.steps
        mine: list[list[int]] = [[] for _ in range(min(self.capacity, len(deal)))]
        load = [0] * len(mine)
        for row in range(len(deal)):  # the longest first, each to the lane with the least to do
            lane = load.index(min(load))
            mine[lane].append(row)
            load[lane] += steps[row]

        def walk(lane: int) -> Iterator[None]:
            """A lane's launches, one by one."""
            for row in mine[lane]:
                self._begin(held, lane, deal, row, shares, bent)
                for step in range(steps[row]):
                    self._graph(lane, short[step][row], bent)()
                    yield
                self._end(held, lane, steps[row], models[row], losses[row])

        with torch.no_grad():
            for lane, rows in enumerate(mine):  # before the weights are there, as a capture trains
                for lacking in {short[step][row] for row in rows for step in range(steps[row])}:
                    self._graph(lane, lacking, bent)
            streams = [stream for stream, _ in self._lanes[: len(mine)] if stream is not None]
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream(self.device))
            walks = {lane: walk(lane) for lane in range(len(mine))}
            while walks:  # in turns: a queue that is full would keep the other lanes waiting
                for lane, launches in list(walks.items()):
                    with torch.cuda.stream(self._lanes[lane][0]):  # nothing where it is None
                        if next(launches, walks) is walks:
                            del walks[lane]
            for stream in streams:
                torch.cuda.current_stream(self.device).wait_stream(stream)
        return models, losses

    def _begin(self, held: Held, lane: int, deal: Deal, row: int, shares: Tensor | None, bent: bool) -> None:
        """Put a task into its lane."""
        inside = [tensor[lane] for tensor in held.parameters]
        torch._foreach_copy_(
            inside, list(self.layout.views(deal.bases[row].detach()).values())[: self._count]
        )
        if held.weights.anchors:
            torch._foreach_copy_([anchor[lane] for anchor in held.weights.anchors], self._moving(inside))
        if bent:
            given = deal.corrections[row]
            if given is None:
                torch._foreach_zero_([correction[lane] for correction in held.corrections])
            else:
                parts = self._moving(list(self.layout.views(given).values()))
                torch._foreach_copy_([correction[lane] for correction in held.corrections], parts)
        steps = len(deal.counts)
        held.picks[:steps, lane] = deal.picks[:, row]
        if shares is not None:
            held.shares[:steps, lane] = shares[:, row]
        if self._draws:
            held.keys[lane] = deal.keys[row]
        cleared = [
            held.losses,
            held.step,
            *held.sums,
            *(part for parts in held.weights.moments for part in parts),
        ]
        torch._foreach_zero_([tensor[lane] for tensor in cleared])

    def _end(self, held: Held, lane: int, steps: int, model: Tensor, loss: Tensor) -> None:
        """Take the model out of its lane."""
        sums = [part[lane] for part in held.sums]
        if sums:
            torch._foreach_div_(sums, float(steps))
        inside = [*(tensor[lane] for tensor in held.parameters), *sums]
        torch._foreach_copy_(list(self.layout.views(model).values()), inside)
        loss.copy_(held.losses[lane])

    def _body(self, held: Held, tape: Step, width: int, short: bool, bent: bool, whole: bool) -> None:
        """One step of the lane `width`."""
        lane = width
        step = held.step[lane : lane + 1]
        here = slice(lane, lane + 1)
        inputs, targets = self._examples(held.picks[:, here].index_select(0, step)[0], held.keys[here], step)
        more = [held.shares[:, lane].index_select(0, step)[0]] if short else []
        if self.facts.drops:
            more += [held.keys[lane], step[0]]
        parameters = [p[lane] for p in held.parameters]
        found = tape(1, *self._halved(parameters), inputs[0], targets[0], *more)
        moving = 0 if whole else len(self.facts.trainable)
        if not whole:
            weights = held.weights.rows(lane)
            weights.corrections = [part[lane] for part in held.corrections] if bent else []
            first, second = held.scales.index_select(0, step)[0].unbind()
            descend(self.local, weights, self._widened(list(found[:moving])), (first, second))
        held.losses[lane] += found[moving]
        self._keep([part[lane] for part in held.sums], list(found[moving + 1 :]), short)
        step += 1
