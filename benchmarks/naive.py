"""The loop that anybody writes: one client after another, in plain torch. What speed is measured against."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.protocols import Data
from afield.core.types import LocalResult, Task
from afield.training.local import Local, batches, loss_function, placed


class NaiveTrainer:
    """A new optimiser per task; for each batch zero_grad, forward, loss, backward, step; torch's own threads.

    It takes the batches that every trainer takes, so its event log is the same and its models are too, up to
    rounding (dropout excepted: it draws from torch's stream). Batches are indexed out of tensors at hand, which is
    kinder than the usual DataLoader: that one collates example by example.
    """

    method = "naive"

    def __init__(
        self,
        module: nn.Module,
        data: Data,
        local: Local,
        seed: int,
        loss: str = "cross-entropy",
        device: torch.device | str = "cpu",
    ) -> None:
        if local.prox:
            raise InputError(f"prox = {local.prox}, but the naive loop has no proximal term: leave it at 0")
        self.data, self.local, self.seed = data, local, seed
        self.device = torch.device(device)
        self.module = copy.deepcopy(module).to(self.device).train()
        self._loss = loss_function(loss)
        self._layout = Layout.of(self.module)
        saved = self.module.state_dict()
        self._tensors = [saved[name] for name in self._layout.names]
        self._norms = [part for part in self.module.modules() if isinstance(part, _BatchNorm)]

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[LocalResult]:
        """One result per task, in order."""
        if any(correction is not None for correction in corrections):
            raise InputError(
                "a correction, but the naive loop adds none: choose a strategy without corrections"
            )
        return [self._task(task, base) for task, base in zip(tasks, bases, strict=True)]

    def _task(self, task: Task, base: Tensor) -> LocalResult:
        self.module.load_state_dict(self._layout.views(base), strict=False)  # counters are no part of a model
        optimiser = self.local.over(list(self.module.parameters()))
        size = self.data.sizes[task.client]
        losses = []
        key_words = (self.seed, task.client, task.count)
        for step, positions in enumerate(batches(self.local, task.client, size, key_words)):
            inputs, targets = self.data.batch(task.client, positions)
            for norm in self._norms:
                norm.momentum = 1 / (
                    step + 1
                )  # the plain mean over a task's batches: what afield means by it
            optimiser.zero_grad()
            loss = self._loss(self.module(placed(inputs, self.device)), placed(targets, self.device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            losses.append(loss.detach())
        model = torch.cat([tensor.reshape(-1) for tensor in self._tensors]).to(base.device)
        mean = float(torch.stack(losses).double().mean())
        return LocalResult(model, size, len(losses), self.local.rate, {"loss": mean})
