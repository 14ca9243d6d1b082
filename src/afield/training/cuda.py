"""Local training of many clients on a GPU, by CUDA graphs: a step is one launch, whatever the number of operations.

Two ways. `GraphTrainer` trains stacked weights (small models: 100 clients cost little more than one). `StreamTrainer`
(training/streams.py) trains several clients side by side, each with its own weights and on its own stream. Both run
without graphs on a CPU, where the tests compare them with the loop.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from afield.core.protocols import Pool
from afield.training.block import BlockTrainer
from afield.training.deal import Deal
from afield.training.descent import Weights, corrected, descend, plain
from afield.training.local import Local

log = logging.getLogger("afield")

ROOM = 2**30  # bytes of stacked weights at once
IMAGES = 2**32  # bytes that the widest convolution would give for all rows, were nothing pooled
WIDEST = 256

Step = Callable[..., tuple[Tensor, ...]]


def bucket(width: int) -> int:
    """The width that a graph is captured at: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... (at most a third is idle)."""
    power = 1 << (width - 1).bit_length()
    return power * 3 // 4 if power > 2 and width <= power * 3 // 4 else power


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: a graph of another trainer, freed during a capture, would break it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Recorded:
    """A function without arguments as a CUDA graph; on a CPU, the function itself."""

    def __init__(
        self, function: Callable[[], None], device: torch.device, pool: Any, stream: Any = None
    ) -> None:
        """`stream`: where it is recorded. Graphs that run at one time need streams and pools of their own."""
        self._replay: Callable[[], None] = function
        if device.type == "cuda":
            here = torch.cuda.current_stream(device)
            side = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(here)
            with torch.cuda.stream(side):
                function()  # libraries set themselves up outside of the capture
            here.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with uncollected(), torch.cuda.graph(graph, pool=pool, stream=stream):
                function()
            self._replay = graph.replay

    def __call__(self) -> None:
        self._replay()


def recorded(function: Callable[[], None], device: torch.device, what: str) -> Callable[[], None]:
    """The function as one launch on a GPU, where the model allows it; else as it is, with a line in the log."""
    try:
        return Recorded(function, device, None)
    except RuntimeError as reason:
        log.warning("%s goes without a CUDA graph: %s", what, str(reason).splitlines()[0])
        return function


@dataclass(slots=True)
class Held:
    """The tensors that graphs read and write: always in the same place. Lists are by parameter or statistic."""

    parameters: list[Tensor]  # [rows, *shape]
    sums: list[Tensor]  # of statistics
    weights: Weights  # views of the trainable parameters, and what lies beside them
    corrections: list[Tensor]
    picks: Tensor  # [steps, rows, batch]
    shares: Tensor  # [steps, rows, batch]: what each example weighs
    keys: Tensor  # [rows]
    losses: Tensor  # [rows], sums
    step: Tensor  # [rows]: each row's; stacked rows all go by the first
    scales: Tensor  # [steps, 2]: see training.descent.corrected


class GraphTrainer(BlockTrainer):
    """Stacked weights, one graph per (width, short or not, corrected or not)."""

    method: ClassVar[str] = "graph"
    convolves: ClassVar[bool] = True

    def __init__(
        self,
        module: nn.Module,
        data: Pool,
        local: Local,
        seed: int,
        loss: str = "cross-entropy",
        device: torch.device | str = "cuda",
        precision: str = "float32",
        last: bool = False,
        compiling: bool = False,
    ) -> None:
        self._held: Held | None = None
        self._graphs: dict[tuple[int, bool, bool, int], Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle() if torch.device(device).type == "cuda" else None
        # stacked images have an order of their own; torch 2.11's group norms take nothing but the usual one
        norms = any(isinstance(part, nn.GroupNorm) for part in module.modules())
        last = last and not self.convolves and not norms
        self._compiling, self._proving, self._last = compiling, True, last
        super().__init__(module, data, local, seed, loss, device, precision, last)
        self._held, self._graphs, self._proving = None, {}, False  # the proof's were for its own settings

    @property
    def capacity(self) -> int:
        """Rows that are trained at once."""
        room = ROOM // (self.layout.size * self.layout.dtype.itemsize)
        return max(1, min(WIDEST, room, IMAGES // max(1, self._outputs)))

    @cached_property
    def _outputs(self) -> int:
        """Bytes that the widest convolution would give for a batch of the inputs' size; 0 without any."""
        deep = [part.out_channels for part in self._module.modules() if isinstance(part, nn.Conv2d)]
        pixels = self._inputs.shape[1:].numel() // self._inputs.shape[1] if deep else 0
        return max(deep, default=0) * self.batch * pixels * (2 if self.steps.half else 4)

    def _train(self, deal: Deal) -> tuple[Tensor | list[Tensor], Tensor]:
        models = torch.empty(len(deal), self.layout.size, dtype=self.layout.dtype, device=self.device)
        losses = torch.empty(len(deal), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for start in range(0, len(deal), self.capacity):
                part = slice(start, min(start + self.capacity, len(deal)))
                self._part(deal.part(range(part.start, part.stop)), models[part], losses[part])
        return models, losses

    def _part(self, deal: Deal, models: Tensor, losses: Tensor) -> None:
        held = self._hold(len(deal.counts))
        bent = any(correction is not None for correction in deal.corrections)
        shares, short = self.weights(deal)
        widths = deal.widths
        steps = [(min(bucket(rows), self.capacity), short[step]) for step, rows in enumerate(widths)]
        for width, lacking in dict.fromkeys(steps):  # before the weights are there, as a capture trains
            self._graph(width, lacking, bent)
        self._load(held, deal, shares)
        rows = len(deal)
        for step, key in enumerate(steps):
            self._graph(*key, bent)()
            left = widths[step + 1] if step + 1 < len(widths) else 0
            if left < rows:  # done: later steps may write to these rows
                self._unload(held, slice(left, rows), step + 1, models, losses)
                rows = left

    def _hold(self, least: int) -> Held:
        """The tensors for at least so many steps."""
        if self._held is None or len(self._held.picks) < least:
            # with room to spare: runs that share this engine may have larger clients, and graphs are captured anew
            most = max(
                [least, *(self.local.work(client, size) for client, size in enumerate(self.data.sizes))]
            )
            steps = 1 << (most - 1).bit_length()
            rows, layout, device = self.capacity, self.layout, self.device
            self._graphs.clear()

            def zeros(*shape: int, dtype: torch.dtype = layout.dtype) -> Tensor:
                return torch.zeros(*shape, dtype=dtype, device=device)

            tensors = self._rooms(rows)
            parameters = tensors[: self._count]
            self._held = Held(
                parameters=parameters,
                sums=tensors[self._count :],
                weights=self._beside(parameters),
                corrections=[torch.zeros_like(weight) for weight in self._moving(parameters)],
                picks=zeros(steps, rows, self.batch, dtype=torch.long),
                shares=zeros(steps, rows, self.batch),
                keys=zeros(rows, dtype=torch.long),
                losses=zeros(rows, dtype=torch.float64),
                step=zeros(rows, dtype=torch.long),
                scales=torch.tensor(
                    [corrected(step) for step in range(steps)], dtype=layout.dtype, device=device
                ),
            )
        return self._held

    def _rooms(self, rows: int) -> list[Tensor]:
        """Zeros for the stacked parameters and the sums of statistics."""
        layout = self.layout
        return [torch.zeros(rows, *shape, dtype=layout.dtype, device=self.device) for shape in layout.shapes]

    def _load(self, held: Held, deal: Deal, shares: Tensor | None) -> None:
        rows, steps = slice(len(deal)), slice(len(deal.counts))
        models = self.layout.views(torch.stack([base.detach() for base in deal.bases]))
        inside = [tensor[rows] for tensor in held.parameters]
        torch._foreach_copy_(inside, list(models.values())[: self._count])
        if held.weights.anchors:
            torch._foreach_copy_([a[rows] for a in held.weights.anchors], self._moving(inside))
        corrections = self._corrections(deal)
        if corrections is not None:
            given = self._moving(list(self.layout.views(corrections).values()))
            torch._foreach_copy_([c[rows] for c in held.corrections], given)
        held.picks[steps, rows] = deal.picks
        if shares is not None:
            held.shares[steps, rows] = shares
        if self._draws:
            held.keys[rows] = torch.tensor(deal.keys, device=self.device)
        for cleared in ([held.losses, held.step], held.sums, *held.weights.moments):
            if cleared:
                torch._foreach_zero_(cleared)

    def _unload(self, held: Held, rows: slice, steps: int, models: Tensor, losses: Tensor) -> None:
        if held.sums:
            torch._foreach_div_([part[rows] for part in held.sums], float(steps))
        inside = [tensor[rows] for tensor in (*held.parameters, *held.sums)]
        torch._foreach_copy_(list(self.layout.views(models[rows]).values()), inside)
        losses[rows] = held.losses[rows]

    def _graph(self, width: int, short: bool, bent: bool, steps: int = 1) -> Recorded:
        """So many steps in one launch."""
        if (width, short, bent, steps) not in self._graphs:
            held = self._held
            assert held is not None
            held.step.zero_()  # a capture makes its steps
            pool, stream = self._room_for(width)[::-1]
            whole = plain(self.local) and not bent and not self.steps.half
            rate = self.local.rate if whole else None
            tape = self._tape(short, rate)

            def function() -> None:
                for _ in range(steps):
                    self._body(held, tape, width, short, bent, whole)

            where = torch.device("cpu") if self._proving else self.device  # a graph would not pay there
            self._graphs[width, short, bent, steps] = Recorded(function, where, pool, stream)
        return self._graphs[width, short, bent, steps]

    def _tape(self, short: bool, rate: float | None) -> Step:
        return self.steps.get(many=True, short=short, rate=rate)

    def _room_for(self, width: int) -> tuple[Any, Any]:
        """The stream and the pool that a graph is recorded on."""
        return None, self._pool

    def _body(self, held: Held, tape: Step, width: int, short: bool, bent: bool, whole: bool) -> None:
        """One step of the first `width` rows; `whole`: the tape makes it by itself."""
        first = slice(width)
        more = [self._now(held.shares[:, first], held)] if short else []
        draw = [held.keys[first], held.step[:1].expand(width)]
        if self.facts.drops:
            more += draw
        examples = self._examples(self._now(held.picks[:, first], held), *draw)
        found = tape(width, *self._halved([p[first] for p in held.parameters]), *examples, *more)
        moving = 0 if whole else len(self.facts.trainable)
        if not whole:
            weights = held.weights.rows(first)
            weights.corrections = [part[first] for part in held.corrections] if bent else []
            gradients = list(found[:moving])
            if bent or not plain(self.local):  # what plain SGD adds may be of another type
                gradients = self._widened(gradients)
            descend(self.local, weights, gradients, lambda: self._now(held.scales, held).unbind())
        held.losses[first].add_(found[moving])  # by += it would be copied on to itself
        self._keep([part[first] for part in held.sums], list(found[moving + 1 :]), short)
        held.step += 1

    def _halved(self, parameters: list[Tensor]) -> list[Tensor]:
        """What a step takes in bfloat16, where that is the precision: one launch for all."""
        if not self.steps.half:
            return parameters
        names = self.layout.names[: self._count]
        chosen = [place for place, name in enumerate(names) if name in self.steps.halves]
        halves = [torch.empty_like(parameters[place], dtype=torch.bfloat16) for place in chosen]
        torch._foreach_copy_(halves, [parameters[place] for place in chosen])
        found = list(parameters)
        for place, half in zip(chosen, halves, strict=True):
            found[place] = half
        return found

    def _widened(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients in the type of the weights."""
        kind = self.layout.dtype
        narrow = [place for place, value in enumerate(gradients) if value.dtype != kind]
        if narrow:
            wide = [torch.empty_like(gradients[place], dtype=kind) for place in narrow]
            torch._foreach_copy_(wide, [gradients[place] for place in narrow])
            for place, value in zip(narrow, wide, strict=True):
                gradients[place] = value
        return gradients

    def _now(self, table: Tensor, held: Held) -> Tensor:
        """The row of a table of steps for this step."""
        return table.index_select(0, held.step[:1])[0]
