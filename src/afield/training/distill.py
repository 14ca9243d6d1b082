"""FedEcho's distillation: the network passes over the server's unlabelled set (eqs 2-4 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from afield.core.errors import InputError
from afield.core.flat import own_copy
from afield.core.keys import generator
from afield.training.cuda import recorded

# Of the unlabelled set at once; fixed, so that equal models have equal logits to the bit. Few on a CPU, where large
# activations are fresh pages every time.
_ROWS = {"cpu": 100, "cuda": 500}
_TEXTS = 8  # the same of texts, whose outputs are a number per token of the vocabulary and place


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


def echo_loss(
    student: Tensor, teacher: Tensor, alpha_min: float, alpha_max: float, outside: int = 0
) -> Tensor:
    """alpha KL(teacher || student) + (1 - alpha) CE(student, argmax teacher), both means over the batch.

    alpha runs from alpha_min (the teacher is sure) to alpha_max (its entropy is log C, the most there is).
    `outside`: so many classes share the last column. They count as equally likely, and as nobody's label.
    """
    columns = teacher.shape[-1]
    classes = columns - 1 + outside if outside else columns
    teacher = teacher.detach().reshape(-1, columns)
    student = student.reshape(-1, columns)
    expected = functional.log_softmax(teacher, dim=1)
    entropy = torch.special.entr(expected.exp()).sum(dim=1).mean()
    if outside:
        entropy = entropy + expected[:, -1].exp().mean() * math.log(outside)
        teacher = teacher[:, :-1]
    entropy = entropy / math.log(classes)
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

    Of a language model, whose logits for a whole vocabulary do not fit, a place of a text has `top` + 1 numbers: the
    logits of the `top` tokens that the model given here (the initial one) finds likeliest there, and one for the
    rest, the logarithm of the sum of its exponentials. All clients' have the same tokens, so that their mean is that
    of the paper over a vocabulary whose rare words are one; with `top` the whole vocabulary it is the paper's own.
    """

    def __init__(
        self,
        module: nn.Module,
        unlabelled: Tensor,
        device: torch.device | str = "cpu",
        top: int = 64,
        precision: str = "float32",
        channels_last: bool = False,
    ) -> None:
        """`precision` and `channels_last` as in training (training/choose.py); a CPU ignores them."""
        self._module, self._layout, self._work = own_copy(module, device)
        self._module.eval()
        self._unlabelled = unlabelled.to(device)
        if channels_last and unlabelled.ndim == 4 and self._work.is_cuda:
            self._unlabelled = self._unlabelled.contiguous(memory_format=torch.channels_last)
        self._half = precision == "bfloat16" and self._work.is_cuda
        self._gradient = torch.zeros_like(self._work[: self._layout.parameters])
        views = self._layout.views(self._gradient)
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                parameter.grad = views[name]  # backward adds into it, in place
        self._weights = nn.Parameter(self._work[: self._layout.parameters])
        self._weights.grad = self._gradient
        self._known: tuple[Any, ...] = ()  # what the launch was recorded for
        self._launch: Callable[[], None] | None = None
        self._looks: dict[int, Callable[[], Tensor]] = {}  # by samples
        self._rows = _ROWS.get(self._unlabelled.device.type, 500)
        self._choices: Tensor | None = None  # [rows, places, top]: tokens
        self._there: Tensor | None = None  # [rows, places]: not there to fill up
        self._outside = 0  # tokens of the vocabulary that are no choice
        with torch.no_grad():
            self._choose(top)

    def _choose(self, top: int) -> None:
        """Settle of which tokens a language model's logits are kept."""
        probe = self._module(self._unlabelled[:1])
        if probe.ndim != 3:
            return
        self._rows, vocabulary = _TEXTS, probe.shape[-1]
        kept = min(top, vocabulary)
        parts = torch.split(self._unlabelled, self._rows)
        self._choices = torch.cat([self._module(part).topk(kept, dim=-1).indices for part in parts])
        self._outside = vocabulary - kept
        self._there = self._unlabelled != getattr(self._module, "pad", -1)

    def _given(self, rows: slice | Tensor) -> Tensor:
        """The module's outputs for some of the unlabelled set, in the form that is kept."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self._half):
            outputs: Tensor = self._module(self._unlabelled[rows])
        outputs = outputs.to(self._layout.dtype)
        if self._choices is None or self._there is None:
            return outputs
        choices, there = self._choices[rows], self._there[rows]
        found = outputs.gather(-1, choices)
        if self._outside:
            rest = outputs.scatter(-1, choices, -math.inf).logsumexp(dim=-1, keepdim=True)
            found = torch.cat([found, rest], dim=-1)
        return found * there[..., None]

    def logits(self, params: Tensor, statistics: Tensor | None, samples: int) -> Tensor:
        """The model's outputs on the first `samples` of the unlabelled set (or all it has).

        [rows, classes]; of a language model [rows, places, top + 1], zeros at places that only fill up.
        """
        total = min(samples, len(self._unlabelled))
        self._take(params, statistics)
        if total not in self._looks:
            self._looks[total] = self._look(total)
        return self._looks[total]().to(params.device)

    def _look(self, total: int) -> Callable[[], Tensor]:
        """The outputs for the first examples; one launch on a GPU if the model allows it."""

        def look() -> Tensor:
            with torch.no_grad():
                starts = range(0, total, self._rows)
                return torch.cat([self._given(slice(n, min(n + self._rows, total))) for n in starts])

        if not self._work.is_cuda or self._there is not None:
            return look
        seen = torch.empty(0)

        def keep() -> None:
            nonlocal seen
            seen = look()

        launch = recorded(keep, self._work.device, "inference")

        def launched() -> Tensor:
            launch()
            return seen.clone()  # the next launch writes to the same memory

        return launched

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
        step = self._step(settings, teacher)
        self._take(params, statistics)
        self._start(memory)
        for turn in range(settings.passes):
            order = torch.randperm(len(teacher), generator=generator(key, turn))
            for positions in torch.split(order.to(self._unlabelled.device), settings.batch):
                step(positions)
        params.copy_(self._weights.detach())
        if memory is not None and self._weights in self._adam.state:
            state = self._adam.state[self._weights]
            memory["m"], memory["v"] = (
                state[name].to(params.device, copy=True) for name in ("exp_avg", "exp_avg_sq")
            )
            memory["steps"] = int(state["step"])

    def _step(self, settings: Settings, teacher: Tensor) -> Callable[[Tensor], None]:
        """One step for the examples at some positions; a whole batch is one launch on a GPU if the model allows it.

        A launch reads and writes always the same memory; it is recorded before the model is there, as that trains.
        """
        names = ("batch", "rate", "clip", "alpha_min", "alpha_max")
        known = (tuple(getattr(settings, name) for name in names), teacher.shape)
        if known != self._known:
            self._known, self._teacher = known, torch.empty_like(teacher, device=self._work.device)
            adam = torch.optim.Adam([self._weights], lr=settings.rate, capturable=self._work.is_cuda)
            self._adam, self._launch = adam, None
        self._teacher.copy_(teacher)
        whole = self._there is None and self._work.is_cuda and len(teacher) >= settings.batch
        if whole and self._launch is None:
            place = torch.arange(settings.batch, device=self._work.device)
            self._place, alone = place, partial(self._move, settings, place)
            self._launch = recorded(alone, self._work.device, "distillation")

        def step(positions: Tensor) -> None:
            if self._launch is not None and len(positions) == settings.batch:
                self._place.copy_(positions)
                self._launch()
            else:
                self._move(settings, positions)

        return step

    def _move(self, settings: Settings, positions: Tensor) -> None:
        with torch.enable_grad():
            self._gradient.zero_()
            student, target = self._given(positions), self._teacher[positions]
            if self._there is not None:
                student, target = (part[self._there[positions]] for part in (student, target))
            loss = echo_loss(student, target, settings.alpha_min, settings.alpha_max, self._outside)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_([self._weights], settings.clip)
            self._adam.step()

    def _start(self, memory: Mapping[str, Any] | None) -> None:
        """Set Adam's moments: to zero, or to what the last distillation left."""
        state = self._adam.state[self._weights]
        if not state:
            step = torch.zeros((), device=self._work.device if self._work.is_cuda else "cpu")
            state.update(
                step=step,
                exp_avg=torch.zeros_like(self._weights),
                exp_avg_sq=torch.zeros_like(self._weights),
            )
        for name, key in (("step", "steps"), ("exp_avg", "m"), ("exp_avg_sq", "v")):
            if not memory:
                state[name].zero_()
            elif key == "steps":
                state[name].fill_(float(memory[key]))
            else:
                state[name].copy_(memory[key])

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
