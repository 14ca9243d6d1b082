"""Local training of one client after another by a tape: what a process of one thread does fastest on a CPU.

And what is best for a language model that fills the caches by itself (choose.py).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from afield.core.errors import InputError
from afield.core.protocols import Data
from afield.core.types import LocalResult, Task
from afield.training.block import BlockTrainer
from afield.training.deal import Deal
from afield.training.descent import corrected, descend, plain
from afield.training.layers import pooled
from afield.training.local import Local, LoopTrainer, told
from afield.training.step import channels_last
from afield.training.tape import CannotRecord

log = logging.getLogger("afield")


class AloneTrainer(BlockTrainer):
    """Trains one task after another by one client's tape, images and kernels in channels-last memory.

    Without autograd, and in that order of memory, where pooling is quick, one thread makes more steps than the loop:
    1.35 times as many for a CNN of two 5x5 convolutions, 1.2 for the papers' CNNs. Models with norms are left to the
    loop: torch sums up batch norm's statistics in float32 in that order, a hundred times as roughly, and group norm
    does not take it.
    """

    def __init__(
        self, module: nn.Module, data: Data, local: Local, seed: int, loss: str = "cross-entropy"
    ) -> None:
        if any(isinstance(part, (_NormBase, nn.GroupNorm)) for part in module.modules()):
            raise CannotRecord("it has norms")
        super().__init__(module, data, local, seed, loss, last=True)  # type: ignore[arg-type]

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[LocalResult]:
        """One result per task, in order."""
        found: list[LocalResult] = []
        for task, base, correction in zip(tasks, bases, corrections, strict=True):
            with told(task):
                self._check_fits(base, correction)
                found += super().train([task], [base], [correction])
        return found

    def _check_fits(self, base: Tensor, correction: Tensor | None) -> None:
        size, count = self.layout.size, self.layout.parameters
        if base.shape != (size,):
            raise InputError(f"a base of shape {tuple(base.shape)} is not a model of {size} elements")
        if correction is not None and correction.shape != (count,):
            raise InputError(f"a correction of shape {tuple(correction.shape)} does not fit P = {count}")

    @cached_property
    def _place(self) -> list[Tensor]:
        """Where the parameters of a model are trained; without norms there is nothing else."""
        blank = [torch.empty(shape, dtype=self.layout.dtype) for shape in self.layout.shapes]
        return [channels_last(part) if part.ndim == 4 else part for part in blank]

    def _train(self, deal: Deal) -> tuple[Tensor, Tensor]:
        models = torch.empty(len(deal), self.layout.size, dtype=self.layout.dtype)
        losses = torch.zeros(len(deal), dtype=torch.float64)
        for row, steps in enumerate(deal.steps):
            self._task(deal, row, steps, models[row], losses[row])
        return models, losses

    def _task(self, deal: Deal, row: int, steps: int, model: Tensor, loss: Tensor) -> None:
        parameters, correction = self._place, deal.corrections[row]
        torch._foreach_copy_(parameters, list(self.layout.views(deal.bases[row].detach()).values()))
        held = self._beside(parameters)
        if correction is not None:
            held.corrections = self._moving(list(self.layout.views(correction.detach()).values()))
        rate = self.local.rate if plain(self.local) and correction is None else None
        moving = 0 if rate is not None else len(self.facts.trainable)
        weights, short = self.weights(deal)
        key = torch.tensor(deal.keys[row : row + 1])
        with torch.inference_mode():
            for step in range(steps):
                draw = [key, torch.full_like(key, step)] if self._draws else []
                more = [weights[step, row]] if short[step] and weights is not None else []
                if self.facts.drops:
                    more += [part[0] for part in draw]
                inputs, targets = self._examples(deal.picks[step, row : row + 1], *draw)
                tape = self.steps.get(many=False, short=short[step], rate=rate)
                found = tape(1, *parameters, inputs[0], targets[0], *more)
                if rate is None:
                    descend(self.local, held, list(found[:moving]), partial(corrected, step))
                loss.add_(found[moving])
            torch._foreach_copy_(list(self.layout.views(model).values()), parameters)


def alone(
    module: nn.Module, data: Data, local: Local, seed: int, loss: str = "cross-entropy"
) -> AloneTrainer | LoopTrainer:
    """The trainer of a process that has one thread: by tape, where the model allows it."""
    try:
        return AloneTrainer(module, data, local, seed, loss)
    except CannotRecord as reason:
        log.info("this model is trained by autograd, not by tape: %s", reason)
        return LoopTrainer(pooled(copy.deepcopy(module)), data, local, seed, loss)
