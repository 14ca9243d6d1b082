"""FedEcho: uncertainty-aware distillation of stragglers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from afield.core.errors import InputError, within
from afield.core.keys import Stream, mix
from afield.core.protocols import Distiller
from afield.core.table import ClientTable, chunks
from afield.core.types import Receipt, ServerState, Update


@dataclass(slots=True, kw_only=True)
class FedEchoState(ServerState):
    total: Tensor
    clients: int
    held: int = 0
    logits: ClientTable | None = None  # every client's newest logits, made at the first update
    teacher: Tensor | None = None  # their running sum (float64)
    shape: tuple[int, ...] = ()
    heard: int = 0
    memory: dict[str, Any] = field(default_factory=dict)  # Adam's moments, where they are kept


@dataclass(frozen=True)
class FedEcho:
    """FedBuff, then distillation from the mean of every client's newest predictions on unlabelled data.

    Paper: FedEcho: Stragglers Can Contribute More: Uncertainty-Aware Distillation for Asynchronous Federated
        Learning (under review), algorithm 1, eqs 2-4.
    Rule: FedBuff's step; then `passes` over `samples` unlabelled examples, minimising alpha KL + (1 - alpha)
        cross-entropy against the teacher: the mean of all clients' newest logits; alpha grows with the
        teacher's uncertainty.
    When: some clients are very late and unlike, and the server has unlabelled examples of the kind:
        stragglers teach by predictions, which age better than parameters. Costs the server a forward pass per
        update and training per step.
    Differs: the teacher is a running sum and count, which is the same mean. Of a language model the logits of
        `top` tokens a place are kept, and one for all others: whole vocabularies per client do not fit.
    Parameters:
        size: updates per step
        lr: the server's rate in FedBuff's step
        samples: unlabelled examples that are predicted
        batch: of the distillation
        passes: over the samples, after every step
        rate: of Adam in the distillation; 0: FedBuff
        clip: bound of the gradient's norm in the distillation
        alpha_min: alpha where the teacher is certain
        alpha_max: alpha where the teacher knows nothing
        keep: whether Adam's state is carried from one distillation to the next
        top: tokens a place whose logits are kept, of a language model
    """

    size: int = 5
    lr: float = 1.0
    samples: int = 2000
    batch: int = 50
    passes: int = 1
    rate: float = 3e-6
    clip: float = 5.0
    alpha_min: float = 0.2
    alpha_max: float = 0.8
    keep: bool = False
    top: int = 64
    uses_base: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("size", "samples", "batch", "passes", "top"):
            within(name, getattr(self, name), 1, math.inf)
        within("lr", self.lr, 0, math.inf, above=True)
        within("rate", self.rate, 0, math.inf)
        within("clip", self.clip, 0, math.inf, above=True)
        within("alpha_min", self.alpha_min, 0, 1)
        within("alpha_max", self.alpha_max, 0, 1)
        if self.alpha_min > self.alpha_max:
            raise InputError(f"alpha_min = {self.alpha_min} is above alpha_max = {self.alpha_max}: lower it")

    def init(self, params: Tensor, clients: int) -> FedEchoState:
        return FedEchoState(params=params, total=torch.zeros_like(params), clients=clients)

    def receive(self, state: FedEchoState, update: Update) -> Receipt:
        assert update.base is not None
        staleness = state.version - update.task.version
        state.held += 1
        stepped = state.held == self.size
        for part in chunks(state.total):
            total = state.total[part].add_(update.model[part]).sub_(update.base[part])
            if stepped:
                state.params[part].add_(total, alpha=self.lr / self.size)
                total.zero_()
        if stepped:
            state.held = 0
            state.version += 1
        return Receipt.of(update, staleness, 1.0, stepped, state.version)

    def refine(self, state: FedEchoState, update: Update, distiller: Distiller) -> None:
        """Store what this client's model predicts; after a step, learn from what all of them predict."""
        logits = distiller.logits(update.model, update.statistics, self.samples)
        low, high = torch.aminmax(logits)
        if not math.isfinite(float(low)) or not math.isfinite(float(high)):
            return self._teach(state, distiller)  # a finite model may still predict Inf: it does not teach
        if state.logits is None or state.teacher is None:
            state.shape = tuple(logits.shape)
            state.logits = ClientTable.like(logits.flatten(), state.clients)
            state.teacher = torch.zeros(logits.numel(), dtype=torch.float64, device=logits.device)
        state.heard += not state.logits.has(update.task.client)
        for part, old, write in state.logits.exchange(update.task, state.seed, logits.flatten()):
            state.teacher[part].sub_(old).add_(write())
        self._teach(state, distiller)

    def _teach(self, state: FedEchoState, distiller: Distiller) -> None:
        if state.held or state.teacher is None:  # not after a step, or nothing to learn from yet
            return
        teacher = (state.teacher / state.heard).to(state.params.dtype).view(state.shape)
        key = mix(state.seed, state.version, Stream.DISTILL)
        distiller.distil(
            state.params, state.statistics, teacher, key, self, state.memory if self.keep else None
        )
