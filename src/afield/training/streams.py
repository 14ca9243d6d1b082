"""Local training of convolutional models on a GPU: several clients side by side, each on a stream of its own.

Stacked convolutions of models of millions of weights are slower than native ones; one model alone leaves a GPU idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from afield.training.cuda import GraphTrainer, Held, Step
from afield.training.deal import Deal
from afield.training.descent import Weights, descend
from afield.training.step import channels_last

# Clients side by side on an H200, ms per client step: ResNet-18 (batch 50) 1.11 with 4, 1.09 with 8, 1.06 with 16;
# a CNN of 28,000 weights (batch 20) 0.060 with 8, 0.043 with 16, 0.035 with 32, 0.033 with 48.
STREAMS, STREAMS_SMALL, SMALL = 16, 32, 1_000_000
STRIDE = 8
APART = 64  # elements: where a tensor begins in its lane's memory, for kernels that read many at once


@dataclass(slots=True)
class Lane:
    """The part of `Held` that is one lane's."""

    parameters: list[Tensor]
    sums: list[Tensor]
    weights: Weights
    corrections: list[Tensor]
    cleared: list[Tensor]  # zero at the start of a task; of one type, or each takes a launch


class StreamTrainer(GraphTrainer):
    """Clients side by side in lanes: each has weights, a stream and graphs of its own, and no lane waits for another,
    however unlike their numbers of steps and wherever a short batch comes.

    With channels_last the weights of convolutions lie in that order while they are trained.
    """

    convolves: ClassVar[bool] = False

    @property
    def capacity(self) -> int:
        return STREAMS_SMALL if self.layout.parameters < SMALL else STREAMS

    @property
    def _stride(self) -> int:
        """Steps in one launch at most: where they are short, launching them would take longer than they do."""
        return STRIDE if self.layout.parameters < SMALL else 1

    def _rooms(self, rows: int) -> list[Tensor]:
        """Views of one vector a lane, so that a task goes in and out by one launch, not by one for each tensor."""
        layout, device = self.layout, self.device
        starts = [0, *accumulate(-(-shape.numel() // APART) * APART for shape in layout.shapes)]
        self._inner = starts[self._count]

        def views(matrix: Tensor) -> list[Tensor]:
            cut = zip(starts, layout.shapes, strict=False)
            parts = [matrix[:, at : at + shape.numel()].view(len(matrix), *shape) for at, shape in cut]
            return [channels_last(part) if self._last and part.ndim == 5 else part for part in parts]

        places = torch.full((1, starts[-1]), -1, dtype=torch.int32, device=device)  # of a lane in a model
        for view, offset in zip(views(places), layout.offsets, strict=True):
            view.copy_(torch.arange(offset, offset + view.numel(), device=device).view(view.shape))
        taken = (places[0] >= 0).nonzero()[:, 0]
        self._back = torch.empty(layout.size, dtype=torch.int32, device=device)
        self._back[places[0, taken].long()] = taken.to(torch.int32)
        self._into = places[0, : self._inner].clamp(min=0)  # what fills the gaps is nobody's
        self._flat = torch.zeros(rows, starts[-1], dtype=layout.dtype, device=device)
        self._cut: dict[int, Lane] = {}
        return views(self._flat)

    def _mine(self, held: Held, number: int) -> Lane:
        """A lane's part; cut once, as a task would take a millisecond for it."""
        if number not in self._cut:
            weights, rest = held.weights.rows(number), self._flat[number, self._inner :]
            self._cut[number] = Lane(
                parameters=[tensor[number] for tensor in held.parameters],
                sums=[tensor[number] for tensor in held.sums],
                weights=weights,
                corrections=[tensor[number] for tensor in held.corrections],
                cleared=[*chain(*weights.moments), *([rest] if held.sums else [])],
            )
        return self._cut[number]

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

    def _train(self, deal: Deal) -> tuple[list[Tensor], Tensor]:
        held = self._hold(len(deal.counts))
        # each in memory of its own: one that arrives late would keep its whole block
        models = [torch.empty_like(self._back, dtype=self.layout.dtype) for _ in deal.bases]
        losses = torch.empty(len(deal), dtype=torch.float64, device=self.device)
        bent = any(correction is not None for correction in deal.corrections)
        shares, _ = self.weights(deal)
        short = deal.short(self.batch)
        steps = deal.steps
        strides = [self._strides([flags[row] for flags in short[:count]]) for row, count in enumerate(steps)]
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
                for lacking, length in strides[row]:
                    self._graph(lane, lacking, bent, length)()
                    yield
                self._end(held, lane, steps[row], models[row], losses[row])

        with torch.no_grad():
            for lane, rows in enumerate(mine):  # before the weights are there, as a capture trains
                for lacking, length in {stride for row in rows for stride in strides[row]}:
                    self._graph(lane, lacking, bent, length)
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

    def _strides(self, short: list[bool]) -> list[tuple[bool, int]]:
        """The steps of a task as launches: alike ones in powers of two, so that there are few graphs."""
        found = []
        for lacking, same in groupby(short):
            left = len(list(same))
            while left:
                length = min(self._stride, 1 << (left.bit_length() - 1))
                found.append((lacking, length))
                left -= length
        return found

    def _begin(self, held: Held, lane: int, deal: Deal, row: int, shares: Tensor | None, bent: bool) -> None:
        """Put a task into its lane."""
        mine = self._mine(held, lane)
        base = deal.bases[row].detach().to(self.device)
        torch.index_select(base, 0, self._into, out=self._flat[lane, : self._inner])
        if mine.weights.anchors:
            torch._foreach_copy_(mine.weights.anchors, mine.weights.moving)
        if bent:
            given = deal.corrections[row]
            if given is None:
                torch._foreach_zero_(mine.corrections)
            else:
                parts = self._moving(list(self.layout.views(given).values()))
                torch._foreach_copy_(mine.corrections, parts)
        steps = len(deal.counts)
        held.picks[:steps, lane] = deal.picks[:, row]
        if shares is not None:
            held.shares[:steps, lane] = shares[:, row]
        if self._draws:
            held.keys[lane] = deal.keys[row]
        held.losses[lane].zero_()
        held.step[lane].zero_()
        if mine.cleared:
            torch._foreach_zero_(mine.cleared)

    def _end(self, held: Held, lane: int, steps: int, model: Tensor, loss: Tensor) -> None:
        """Take the model out of its lane."""
        if held.sums:
            self._flat[lane, self._inner :].div_(float(steps))
        torch.index_select(self._flat[lane], 0, self._back, out=model)
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
        mine = self._mine(held, lane)
        found = tape(1, *self._halved(mine.parameters), inputs[0], targets[0], *more)
        moving = 0 if whole else len(self.facts.trainable)
        if not whole:
            weights = replace(mine.weights, corrections=mine.corrections if bent else [])
            gradients = self._widened(list(found[:moving]))
            descend(self.local, weights, gradients, lambda: held.scales.index_select(0, step)[0].unbind())
        held.losses[lane].add_(found[moving])  # by += it would be copied on to itself
        self._keep(mine.sums, list(found[moving + 1 :]), short)
        step += 1
