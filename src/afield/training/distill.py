"""FedEcho's distillation: the network passes over the server's unlabelled set (eqs 2-4 of the paper)."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from afield.core.errors import InputError
from afield.core.flat import own_copy
from afield.core.keys import generator

# Of the unlabelled set at once; fixed, so that equal models have equal logits to the bit. Few on a CPU, where large
# activations are fresh pages every time.
_ROWS = {"cpu": 100, "cuda": 500}


class Settings(Protocol):
    """What a strategy that distils says about it."""

    @property
    def passes(self) -> int: ...

    @property
    def batch(self) -> int: ...

    @property
    def rate(self) -> float: ...

    @property
    def clip(self) -> float: ...

    @property
    def alpha_min(self) -> float: ...

    @property
    def alpha_max(self) -> float: ...


def echo_loss(student: Tensor, teacher: Tensor, alpha_min: float, alpha_max: float) -> Tensor:
    """alpha KL(teacher || student) + (1 - alpha) CE(student, argmax teacher), both means over the batch.

    alpha runs from alpha_min (the teacher is sure) to alpha_max (its entropy is log C, the most there is).
    """
    classes = teacher.shape[-1]
    teacher = teacher.detach().reshape(-1, classes)
    student = student.reshape(-1, classes)
    expected = functional.log_softmax(teacher, dim=1)
    entropy = torch.special.entr(expected.exp()).sum(dim=1).mean() / math.log(classes)
    alpha = entropy * alpha_max + (1 - entropy) * alpha_min
    given = functional.log_softmax(student, dim=1)
    soft = functional.kl_div(given, expected, reduction="batchmean", log_target=True)
    hard = functional.nll_loss(given, teacher.argmax(dim=1))
    loss: Tensor = alpha * soft + (1 - alpha) * hard
    return loss


class Distil:
    """Logits of a model on the unlabelled set, and a model's steps towards a teacher's logits.

    The module is a private copy in eval mode: normalisation uses the statistics given, which stay as they
    are, and dropout is off.
    """

    def __init__(self, module: nn.Module, unlabelled: Tensor, device: torch.device | str = "cpu") -> None:
        self._module, self._layout, self._work = own_copy(module, device)
        self._module.eval()
        self._unlabelled = unlabelled.to(device)
        self._gradient = torch.zeros_like(self._work[: self._layout.parameters])
        views = self._layout.views(self._gradient)
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                parameter.grad = views[name]  # backward adds into it, in place

    def logits(self, params: Tensor, statistics: Tensor | None, samples: int) -> Tensor:
        """The model's outputs on the first `samples` of the unlabelled set (or all it has), [rows, classes]."""
        rows = self._unlabelled[:samples]
        self._take(params, statistics)
        with torch.no_grad():
            outputs = [self._module(part) for part in torch.split(rows, _ROWS.get(rows.device.type, 500))]
        return torch.cat(outputs).to(params.device)

    def distil(
        self,
        params: Tensor,
        statistics: Tensor | None,
        teacher: Tensor,
        key: int,
        settings: Settings,
        memory: dict[str, Any] | None,
    ) -> None:
        """Move `params`, in place, by passes * ceil(samples / batch) steps of Adam on clipped gradients.

        `teacher` holds the logits of the first samples; `key` fixes the batches' order. `memory` carries
        Adam's moments from one distillation to the next: an empty dict at first, then "m", "v" and "steps".
        """
        rows = self._unlabelled[: len(teacher)]
        self._take(params, statistics)
        teacher = teacher.to(self._work)
        weights = nn.Parameter(self._work[: self._layout.parameters])
        weights.grad = self._gradient
        adam = torch.optim.Adam([weights], lr=settings.rate, betas=(0.9, 0.999), eps=1e-8)
        if memory:
            adam.state[weights] = {
                "step": torch.tensor(float(memory["steps"])),
                "exp_avg": memory["m"].to(self._work),
                "exp_avg_sq": memory["v"].to(self._work),
            }
        with torch.enable_grad():
            for turn in range(settings.passes):
                order = torch.randperm(len(teacher), generator=generator(key, turn))
                for positions in torch.split(order.to(rows.device), settings.batch):
                    self._gradient.zero_()
                    student = self._module(rows[positions])
                    loss = echo_loss(student, teacher[positions], settings.alpha_min, settings.alpha_max)
                    loss.backward()  # type: ignore[no-untyped-call]
                    nn.utils.clip_grad_norm_([weights], settings.clip)
                    adam.step()
        params.copy_(weights.detach())
        if memory is not None and weights in adam.state:
            state = adam.state[weights]
            memory["m"], memory["v"] = (
                state["exp_avg"].to(params.device),
                state["exp_avg_sq"].to(params.device),
            )
            memory["steps"] = int(state["step"])

    def _take(self, params: Tensor, statistics: Tensor | None) -> None:
        """Load a model that comes in two parts."""
        held = 0 if statistics is None else len(statistics)
        if len(params) != self._layout.parameters or held != self._layout.statistics:
            raise InputError(
                f"{len(params)} parameters and {held} statistics are not a model of "
                f"{self._layout.parameters} and {self._layout.statistics}"
            )
        self._work[: len(params)].copy_(params)
        if statistics is not None:
            self._work[len(params) :].copy_(statistics)
