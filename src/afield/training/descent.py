"""The local optimisers over lists of weights: SGD with momentum, AdamW, and what bends gradients.

The same for stacked weights (one row per client) and for one client's: torch's own take one model at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from afield.training.local import Local

Tensors = tuple[Tensor, ...] | list[Tensor]
BETAS, EPS = (0.9, 0.999), 1e-8  # torch.optim.AdamW's own


@dataclass(slots=True)
class Weights:
    """The trainable weights of some clients, and what their optimiser keeps beside them; lists by parameter."""

    moving: list[Tensor]
    anchors: list[Tensor] = field(default_factory=list)  # where the task started (prox)
    corrections: list[Tensor] = field(default_factory=list)  # added to every gradient
    moments: list[list[Tensor]] = field(default_factory=list)  # of the optimiser

    def rows(self, rows: int | slice) -> Weights:
        """The same of some clients."""

        def cut(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor[rows] for tensor in tensors]

        return Weights(
            cut(self.moving),
            cut(self.anchors),
            cut(self.corrections),
            [cut(moment) for moment in self.moments],
        )


def moments(local: Local, weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """What the optimiser keeps beside these weights: zeros at first."""
    count = 2 if local.optimiser == "adamw" else int(local.momentum > 0)
    return [[torch.zeros_like(weight) for weight in weights] for _ in range(count)]


def plain(local: Local) -> bool:
    """Whether a step is weights - rate * gradient and nothing else (corrections aside)."""
    return local.optimiser == "sgd" and not (local.momentum or local.prox or local.weight_decay)


def corrected(step: int) -> tuple[float, float]:
    """What AdamW divides its moments by at the step with this number (from 0)."""
    return 1 - BETAS[0] ** (step + 1), math.sqrt(1 - BETAS[1] ** (step + 1))


def descend(
    local: Local, weights: Weights, gradients: Tensors, scales: Callable[[], Sequence[float | Tensor]]
) -> None:
    """One step, in place. `scales`: see `corrected`; asked by AdamW alone, as on a GPU it takes a launch."""
    moving = weights.moving
    if weights.anchors:
        gradients = torch._foreach_add(gradients, moving, alpha=local.prox)
        torch._foreach_sub_(gradients, weights.anchors, alpha=local.prox)
    if weights.corrections:
        gradients = torch._foreach_add(gradients, weights.corrections)
    if local.optimiser == "adamw":
        first, second = weights.moments
        torch._foreach_mul_(moving, 1 - local.rate * local.weight_decay)
        torch._foreach_lerp_(first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - BETAS[1])
        root, (scale, deviation) = torch._foreach_sqrt(second), scales()
        torch._foreach_div_(root, deviation)
        torch._foreach_add_(root, EPS)
        change = torch._foreach_div(first, root)
        torch._foreach_mul_(change, local.rate / scale)
        torch._foreach_sub_(moving, change)
        return
    if local.weight_decay:
        gradients = torch._foreach_add(gradients, moving, alpha=local.weight_decay)
    if weights.moments:
        torch._foreach_mul_(weights.moments[0], local.momentum)
        torch._foreach_add_(weights.moments[0], gradients)
        gradients = weights.moments[0]
    torch._foreach_add_(moving, gradients, alpha=-local.rate)
