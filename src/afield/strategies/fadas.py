"""FADAS (Wang et al., ICML 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import within
from afield.core.table import chunks
from afield.core.types import Receipt, ServerState, Update


@dataclass(slots=True, kw_only=True)
class FADASState(ServerState):
    total: Tensor
    first: Tensor
    second: Tensor
    largest: Tensor
    held: int = 0
    stalest: int = 0


@dataclass(frozen=True)
class FADAS:
    """AMSGrad on the mean of a buffer; smaller steps for stale buffers.

    Paper: Wang, Wang, Lu, Chen: FADAS: Towards Federated Adaptive Asynchronous Optimization (ICML 2024).
    Rule: at `size` arrivals, d their mean delta: m <- b1 m + (1-b1) d, v <- b2 v + (1-b2) d^2, v^ <- max(v^,
        v), w <- w + lr m / (sqrt(v^) + eps). Above `delay_threshold` the rate is lr / (largest staleness in
        the buffer).
    When: models that like Adam (transformers), or where the scale of updates varies. Every parameter moves by
        about `lr` a step, so that rate must be tuned, and is far below 1.
    Differs: bias correction as in the authors' code (the paper has none: `bias_correction = false`); the rate
        above the threshold as in their code too: the paper's min(lr, 1 / staleness) never bites at their
        rates.
    Parameters:
        size: updates per step
        lr: the server's rate
        beta1: of the first moment
        beta2: of the second moment
        eps: added to the root of the second moment
        delay_threshold: largest staleness in a buffer that leaves the rate alone; left out: always
        bias_correction: whether moments are corrected for starting at zero
    """

    size: int = 5
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    delay_threshold: int | None = None
    bias_correction: bool = True
    uses_base: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        within("size", self.size, 1, math.inf)
        within("lr", self.lr, 0, math.inf, above=True)
        within("beta1", self.beta1, 0, 1, below=True)
        within("beta2", self.beta2, 0, 1, below=True)
        within("eps", self.eps, 0, math.inf, above=True)
        if self.delay_threshold is not None:
            within("delay_threshold", self.delay_threshold, 0, math.inf)

    def init(self, params: Tensor, clients: int) -> FADASState:
        total, first, second, largest = (torch.zeros_like(params) for _ in range(4))
        return FADASState(params=params, total=total, first=first, second=second, largest=largest)

    def receive(self, state: FADASState, update: Update) -> Receipt:
        assert update.base is not None
        staleness = state.version - update.task.version
        state.held += 1
        state.stalest = max(state.stalest, staleness)
        stepped = state.held == self.size
        for part in chunks(state.total):
            state.total[part].add_(update.model[part]).sub_(update.base[part])
            if stepped:
                self._step(state, part)
        if stepped:
            state.held = state.stalest = 0
            state.version += 1
        return Receipt.of(update, staleness, 1.0, stepped, state.version)

    def _step(self, state: FADASState, part: slice) -> None:
        delta = state.total[part].div_(self.size)
        first, largest = state.first[part], state.largest[part]
        first.lerp_(delta, 1.0 - self.beta1)
        second = state.second[part].mul_(self.beta2).addcmul_(delta, delta, value=1.0 - self.beta2)
        torch.maximum(largest, second, out=largest)
        rate = self.lr
        if self.delay_threshold is not None and state.stalest > self.delay_threshold:
            rate /= state.stalest
        scale = largest.sqrt()
        if self.bias_correction:
            step = state.version + 1
            rate /= 1.0 - self.beta1**step
            scale.div_(math.sqrt(1.0 - self.beta2**step))
        state.params[part].addcdiv_(first, scale.add_(self.eps), value=rate)
        delta.zero_()
