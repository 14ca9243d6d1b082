"""Local training of many clients at once, over stacked weights. Equal to training/local.py up to rounding."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from afield.core.errors import InputError
from afield.core.flat import finite
from afield.core.keys import Stream, mix
from afield.core.protocols import Pool
from afield.core.types import LocalResult, Task
from afield.training.augment import augmented
from afield.training.deal import Deal, Picks
from afield.training.descent import Weights, corrected, descend, moments, plain
from afield.training.few import few
from afield.training.first import spans, together
from afield.training.local import Local, LoopTrainer
from afield.training.pages import keep_pages
from afield.training.step import Steps
from afield.training.tape import CannotRecord

LARGE = 50_000  # weights: from here on a model is worth a copy of its own
# Bytes of weights that a CPU's caches hold well: 50 MLPs of 159,000 weights took 1.15 times as long in one stack as
# in three, 50 of 795,000 1.1 times as long as four at a time, four of 2.7 million 1.15 times as long as one by one.
CACHED = 12 * 2**20
Models = Tensor | list[Tensor] | Iterator[Tensor]
NEAR = 1e-3  # how close the first block must come to the loop, relative to what training changed


class BlockTrainer:
    """Trains a block of tasks by one tape over stacked weights, every row with its own number of steps.

    Raises CannotRecord where the model is no flat list of operations, or where a first small block does not come out
    as in the loop (a model that mixes examples, say): such models are trained by the loop.
    """

    method: ClassVar[str] = "vmap"
    convolves: ClassVar[bool] = False  # by training/convpool.py, where it can

    def __init__(
        self,
        module: nn.Module,
        data: Pool,
        local: Local,
        seed: int,
        loss: str = "cross-entropy",
        device: torch.device | str = "cpu",
        precision: str = "float32",
        last: bool = False,
    ) -> None:
        if not all(isinstance(getattr(data, part, None), Tensor) for part in ("inputs", "targets")):
            raise CannotRecord("the clients' data is not one pool of tensors")
        self._whose: BlockTrainer | None = None  # not itself: its memory would wait for the garbage collector
        self._room: list[Tensor] = []  # stacked tensors of the widest block so far
        self.data, self.local, self.seed, self.device = data, local, seed, torch.device(device)
        keep_pages()
        self.batch = min(local.batch, max(data.sizes))
        self._module, self._loss = module, loss
        self._near = NEAR if precision == "float32" else 100 * NEAR
        self._inputs, labels = data.inputs.to(self.device), data.targets.to(self.device)
        self._seats = self._inputs[:0]  # on a CPU, for the examples of a step
        self.steps = Steps(module, loss, self._inputs, labels, self.batch, precision, last, self.convolves)
        self.facts = self.steps.facts
        self.layout = self.facts.layout
        self._check(labels)
        self._targets = self.steps.targets(labels)
        self._prove()

    @property
    def engine(self) -> BlockTrainer:
        """Whose buffers and tapes this trainer works with: deals of trainers with one engine may be joined."""
        return self._whose or self

    def sibling(self, data: Pool, seed: int) -> BlockTrainer:
        """The same for another run: other clients' shares of the same pool, another seed."""
        if data.inputs is not self.data.inputs:
            raise InputError(
                "the clients' data is another pool of tensors: such runs cannot be trained together"
            )
        other = copy.copy(self)
        other._whose = self.engine
        other.data, other.seed = data, seed
        other.__dict__.pop("_picks", None)
        return other

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[LocalResult]:
        """One result per task, in order."""
        return self.engine.run(self.deal(tasks, bases, corrections))

    def deal(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> Deal:
        """The tasks in what their training depends on: those of several runs may be trained together."""
        for task, base in zip(tasks, bases, strict=True):
            if base.shape != (self.layout.size,):
                raise InputError(
                    f"training failed (client {task.client}, task {task.number}): a base of shape "
                    f"{tuple(base.shape)} is not a model of {self.layout.size} elements"
                )
        picks, counts = self._picks.of(tasks)
        sizes, keys = [self.data.sizes[task.client] for task in tasks], [0] * len(tasks)
        if self._draws:
            keys = [mix(self.seed, task.client, task.count, Stream.DROPOUT) >> 1 for task in tasks]
        return Deal(list(bases), list(corrections), picks, counts, sizes, keys)

    def run(self, deal: Deal) -> list[LocalResult]:
        """One result per row, in order."""
        steps = deal.steps
        # so that the rows at work are the first ones
        ranks = sorted(range(len(deal)), key=lambda row: -steps[row])
        results: list[LocalResult] = [None] * len(deal)  # type: ignore[list-item]
        for rows in self._parts(ranks):
            looked = self._looked(*self._train(deal.part(rows)))
            for row, (model, loss, fine) in zip(rows, looked, strict=True):
                metrics = {"loss": loss / steps[row]} if steps[row] else {}
                results[row] = LocalResult(model, deal.sizes[row], steps[row], self.local.rate, metrics, fine)
        return results

    def _parts(self, rows: list[int]) -> Iterator[list[int]]:
        """Rows to be trained at once: as many as the caches of a CPU hold, in parts alike."""
        most = len(rows)
        if self.device.type == "cpu":
            most = max(1, CACHED // (self.layout.size * self.layout.dtype.itemsize))
        count = -(-len(rows) // most)
        for part in range(count):
            yield rows[part * len(rows) // count : (part + 1) * len(rows) // count]

    def _looked(
        self, models: Models, losses: Tensor, sound: bool = False
    ) -> Iterator[tuple[Tensor, float, bool]]:
        """Each model, the sum of its losses, and whether it is free of NaN and Inf; `sound`: all of them are."""
        if isinstance(models, list):  # on a GPU, each in memory of its own: one wait for all (see `finite`)
            totals = torch.stack([model.sum() for model in models])
            sums, summed = torch.stack([losses, totals.isfinite().double()]).tolist()
            for model, loss, fine in zip(models, sums, summed, strict=True):
                yield model, loss, bool(fine) or finite(model)
        elif not isinstance(models, Tensor):
            for model, loss in zip(models, losses.tolist(), strict=True):
                yield model, loss, sound or finite(model)  # while it is in the cache
        elif models.is_cpu:  # where extremes by row take 7 times as long as those of all
            whole = finite(models)
            for model, loss in zip(models.unbind(), losses.tolist(), strict=True):
                yield model, loss, whole or finite(model)
        else:  # one look, as each makes a GPU wait
            low, high = torch.aminmax(models, dim=1)
            sums, within = torch.stack([losses, (low.isfinite() & high.isfinite()).double()]).tolist()
            for model, loss, fine in zip(models.unbind(), sums, within, strict=True):
                yield model, loss, bool(fine)

    @cached_property
    def _picks(self) -> Picks:
        return Picks(self.data, self.local, self.batch, self.seed, self.device)

    def _train(self, deal: Deal) -> tuple[Models, Tensor] | tuple[Models, Tensor, bool]:
        """The trained models, one row each, and the sums of their losses; rows with more steps come first.

        And, where that is known, whether all models are free of NaN and Inf.
        """
        tensors, corrections = self._stacked(deal), self._corrections(deal)
        losses = torch.zeros(len(deal), dtype=torch.float64, device=self.device)
        rate = self.local.rate if plain(self.local) and corrections is None else None
        done, sure = 0, None
        with torch.inference_mode():
            if rate is not None and self._several:
                done, sure = self._at_once(deal, tensors, losses)
            if done < len(deal.counts):
                self._by_steps(deal, tensors, losses, done, rate, corrections)
        flat = [part.view(len(deal), -1) for part in tensors]
        if self.layout.size < LARGE:
            return torch.cat(flat, dim=1), losses
        # each in memory of its own: a late arrival would keep its whole block, and the caches turn over
        models = map(torch.cat, zip(*(part.unbind() for part in flat), strict=True))
        if sure is not None:
            del flat[sure]
        return models, losses, sure is not None and all(map(finite, flat))

    def _by_steps(
        self,
        deal: Deal,
        tensors: list[Tensor],
        losses: Tensor,
        done: int,
        rate: float | None,
        corrections: Tensor | None,
    ) -> None:
        """One step after another, from the one with this number on; with a rate tapes make the step themselves."""
        parameters, sums = tensors[: self._count], tensors[self._count :]
        held = self._beside(parameters)
        if corrections is not None:
            held.corrections = self._moving(list(self.layout.views(corrections).values()))
        keys = torch.tensor(deal.keys, device=self.device)
        weights, short = self.weights(deal)
        width, moving = 0, 0 if rate is not None else len(self.facts.trainable)
        for step, rows in enumerate(deal.widths[done:], done):
            if rows != width:
                width, first, sum_of = rows, slice(rows), losses[:rows]
                given, kept = [p[first] for p in parameters], [s[first] for s in sums]
                now = held.rows(first)
            tape = self.steps.get(many=True, short=short[step], rate=rate)
            more = [weights[step, :rows]] if short[step] and weights is not None else []
            draw = [keys[:rows], torch.full_like(keys[:rows], step)] if self._draws else []
            if self.facts.drops:
                more += draw
            found = tape(rows, *given, *self._examples(deal.picks[step, :rows], *draw), *more)
            if rate is None:
                descend(self.local, now, list(found[:moving]), partial(corrected, step))
            sum_of.add_(found[moving])
            self._keep(kept, list(found[moving + 1 :]), short[step])
        if sums:
            torch._foreach_div_(sums, [self._done(deal).view(-1, *[1] * (s.ndim - 1)) for s in sums])

    def _at_once(self, deal: Deal, parameters: list[Tensor], losses: Tensor) -> tuple[int, int | None]:
        """Train the first steps several at a time, where rows are alike.

        Gives how many; and, if these were all, the number of the tensor that is surely free of NaN and Inf now.
        """
        first, widths, short = self.steps.first(self.local.rate), deal.widths, deal.short(self.batch)
        assert first is not None
        done, sound = 0, widths[-1] == len(deal)
        for begin, done in spans(widths, list(map(any, short)), self._several):
            rows = widths[begin]
            picks = deal.picks[begin:done, :rows].transpose(0, 1).reshape(rows, -1)
            given = [parameter[:rows] for parameter in parameters]
            fine = first.train(given, *self._examples(picks), self.batch, losses[:rows], self._largest)
            sound = sound and fine
        return done, first.weight if sound and done == len(widths) else None

    @cached_property
    def _largest(self) -> float:
        """The largest number of the examples, its sign aside."""
        low, high = torch.aminmax(self._inputs)
        return max(-float(low), float(high))

    @cached_property
    def _several(self) -> int:
        """How many steps of plain SGD go at once (training/first.py); 0: each for itself."""
        first = None if self._draws or self.device.type != "cpu" else self.steps.first(self.local.rate)
        return 0 if first is None else together(self.batch, *self.layout.shapes[first.weight])

    def _stacked(self, deal: Deal) -> list[Tensor]:
        """The bases as stacked parameters, then zeros for the sums of statistics; always in the same memory."""
        layout, rows = self.layout, len(deal)
        lengths = [shape.numel() for shape in layout.shapes]
        bases = list(zip(*(torch.split(base.detach(), lengths) for base in deal.bases), strict=True))
        found = []
        for number, (shape, start) in enumerate(zip(layout.shapes, layout.offsets, strict=True)):
            if number == len(self._room) or len(self._room[number]) < rows:
                fresh = torch.empty(rows, *shape, dtype=layout.dtype, device=self.device)
                self._room[number:] = [fresh, *self._room[number + 1 :]]
            part = self._room[number][:rows]
            if start < layout.parameters:
                torch.stack(bases[number], out=part.view(rows, -1))
            else:
                part.zero_()
            found.append(part)
        return found

    def _beside(self, parameters: list[Tensor]) -> Weights:
        """The trainable ones of stacked parameters, with what the optimiser needs at the start of a task."""
        moving = self._moving(parameters)
        anchors = [weight.clone() for weight in moving] if self.local.prox else []
        return Weights(moving, anchors, [], moments(self.local, moving))

    def _moving(self, parameters: list[Tensor]) -> list[Tensor]:
        named = zip(self.layout.names, parameters, strict=False)
        return [value for name, value in named if name in self.facts.trainable]

    def _done(self, deal: Deal) -> Tensor:
        """Steps per row."""
        return torch.tensor(deal.steps, dtype=self.layout.dtype, device=self.device)

    @property
    def _draws(self) -> bool:
        """Whether tasks draw random numbers in their steps, and so need a key."""
        return self.facts.drops or self.local.augment

    @cached_property
    def _count(self) -> int:
        """Tensors of the layout that are parameters."""
        return sum(start < self.layout.parameters for start in self.layout.offsets)

    def weights(self, deal: Deal) -> tuple[Tensor | None, list[bool]]:
        """What each example weighs in the mean of its batch, and at which steps a batch is short (None: at none)."""
        short = list(map(any, deal.short(self.batch)))
        if not any(short):
            return None, short
        counts = torch.from_numpy(deal.counts)
        filled = torch.arange(self.batch) < counts[..., None]
        return (filled.to(self.layout.dtype) / counts.clamp(min=1)[..., None]).to(self.device), short

    def _examples(self, picks: Tensor, *draw: Tensor) -> tuple[Tensor, Tensor]:
        """The batches of a step; `draw` is (key, step) of each row, where anything is drawn."""
        flat, shape = picks.reshape(-1), self._inputs.shape[1:]
        seats = None
        if self.device.type == "cpu":  # always in the same memory: megabytes of fresh pages are dear
            if len(self._seats) < len(flat):
                self._seats = self._inputs.new_empty(len(flat), *shape)
            seats = self._seats[: len(flat)]
        inputs = torch.index_select(self._inputs, 0, flat, out=seats).view(*picks.shape, *shape)
        if self.local.augment:
            inputs = augmented(inputs, *draw)
        return inputs, self._targets.index_select(0, flat).view(*picks.shape, *self._targets.shape[1:])

    def _keep(self, sums: list[Tensor], statistics: list[Tensor], short: bool) -> None:
        """Add up batch norm's statistics: a task ends with their mean over its batches."""
        if statistics:
            if not short:
                self.steps.variances(statistics)
            torch._foreach_add_(sums, statistics)

    def _corrections(self, deal: Deal) -> Tensor | None:
        if all(correction is None for correction in deal.corrections):
            return None
        found = torch.zeros(len(deal), self.layout.parameters, dtype=self.layout.dtype, device=self.device)
        for row, correction in enumerate(deal.corrections):
            if correction is not None:
                found[row] = correction
        return found

    def _check(self, labels: Tensor) -> None:
        """Raise where the loop would train, or fail, in another way."""
        if self.facts.classes is not None:
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= self.facts.classes:
                raise CannotRecord(
                    f"labels run from {low} to {high}, outside the model's 0..{self.facts.classes - 1}"
                )
        if min(self.data.sizes) == 0:
            raise CannotRecord("a client has no examples")
        smallest = min(size % self.batch or self.batch for size in self.data.sizes)
        if smallest == 1 and any(isinstance(part, nn.BatchNorm1d) for part in self._module.modules()):
            raise CannotRecord("a batch of one example, which batch norm may not take")

    def _prove(self) -> None:
        """Train two clients for two steps in both ways, a short batch among them; the numbers must agree.

        Two, of few examples: in bfloat16 a ResNet's thirty steps are far from those in float32, and both are right.
        """
        mine, data = self.local, self.data
        self.data = few(data, self.batch)
        self.local = Local(steps=2, batch=mine.batch, rate=0.01, augment=mine.augment)
        self.__dict__.pop("_picks", None)
        tasks = [Task(client, client, 0, 0, 0.0) for client in range(2)]
        loop = LoopTrainer(self._module, self.data, self.local, self.seed, self._loss, self.device)
        base = self.layout.flatten(self._module).to(self.device)
        with torch.backends.cudnn.flags(allow_tf32=False):  # which would tell both apart
            right = loop.train(tasks, [base] * 2, [None] * 2)
            try:
                found = self.train(tasks, [base] * 2, [None] * 2)
            except RuntimeError as error:  # an operation that wants another order of memory, say
                raise CannotRecord(str(error).splitlines()[0]) from error
        self.local, self.data = mine, data
        self.__dict__.pop("_picks", None)
        for one, other in zip(right, found, strict=True):
            change = float((one.model - base).abs().max())
            apart = float((one.model - other.model).abs().max())
            if not apart <= self._near * change + 1e-5:
                raise CannotRecord(
                    f"its clients do not train alone: a block differs from the loop by {apart:.1e}"
                )
