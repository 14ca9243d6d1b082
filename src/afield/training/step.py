"""One local step of many clients (or of one) as a tape: weights and a batch each in, gradients and losses out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from afield.core.flat import Layout
from afield.training.convpool import convpooled
from afield.training.first import First
from afield.training.layers import BlockNorm, KeyedDropout, Moment, keyed, normed, variances
from afield.training.local import guesses
from afield.training.rewrite import apart, descending, simplified
from afield.training.tape import CannotRecord, Tape, compiled, record, widened

WIDTHS = (2, 3, 5)  # a tape for any width comes from tapes at these
MOST_CLASSES = 1024  # above, targets are not spread out to one number per class


@dataclass(frozen=True)
class Facts:
    """What a model is to its steps."""

    layout: Layout
    trainable: tuple[str, ...]
    norms: tuple[str, ...]  # batch norms that keep statistics, by name
    eps: tuple[float, ...]  # of each
    drops: bool  # has dropout
    classes: int | None  # targets are one number per class (0 but for the right one); None: as they come


class Steps:
    """The tapes of one model: of `many` clients at once or of one, with `short` (filled-up) batches or without.

    A tape is a function of (width, *parameters, inputs, targets, [weights], [keys, step]) that gives
    (*gradients, loss, *statistics); of many clients, each has one row per client. With `rate` it makes the step of
    plain SGD itself, in place, and gives no gradients. Statistics are means and variances of the norms, in turn; of
    full batches they still have to go through `variances`. Where targets are one number per class, it is minus
    1 / batch size for the right one. `weights` come with short batches: what each example weighs in the mean, 0 for
    those that only fill the batch.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: str,
        inputs: Tensor,
        targets: Tensor,
        batch: int,
        precision: str = "float32",
        channels_last: bool = False,
        convolves: bool = False,
    ) -> None:
        """`inputs` and `targets`: a few examples, for their shapes; `batch`: of a full step.

        `convolves`: convolutions of many clients go by training/convpool.py, where that knows how.
        """
        self._moment = Moment()
        own = copy.deepcopy(module).to(inputs.device).train()
        self._module = normed(keyed(convpooled(own) if convolves else own, self._moment), self._moment)
        layout = Layout.of(module)
        self._check(layout)
        parameters = dict(self._module.named_parameters())
        parts = dict(self._module.named_modules())
        self._loss, self._batch = loss, batch
        self.half, self._last = precision == "bfloat16", channels_last
        self.halves = _halves(self._module, convolves)
        self._constants = [*self._module.buffers()]
        self._inputs, self._targets = inputs[:1], targets[:1]
        norms = {name: part for name, part in parts.items() if isinstance(part, BlockNorm) and part.tracks}
        self.facts = Facts(
            layout,
            tuple(name for name, parameter in parameters.items() if parameter.requires_grad),
            tuple(norms),
            tuple(norm.eps for norm in norms.values()),
            any(isinstance(part, KeyedDropout) for part in parts.values()),
            self._classes(),
        )
        self._tapes: dict[tuple[bool, bool], Tape] = {}
        self._firsts: dict[float, First | None] = {}
        self._made: dict[tuple[bool, bool, float | None], Callable[..., tuple[Tensor, ...]]] = {}

    def get(self, *, many: bool, short: bool, rate: float | None = None) -> Callable[..., tuple[Tensor, ...]]:
        """The function of such a step; recorded when it is first asked for."""
        key = (many, short, rate)
        if key not in self._made:
            if (many, short) not in self._tapes:
                self._tapes[many, short] = simplified(self._record(many, short), self.half)
            tape = self._tapes[many, short]
            if rate is not None:
                names = list(self._parameters())
                tape = descending(
                    tape, [tape.inputs[names.index(name)] for name in self.facts.trainable], rate
                )
            self._made[key] = compiled(tape)
        return self._made[key]

    def first(self, rate: float) -> First | None:
        """The step of plain SGD of many clients without its first layer, where that one is linear."""
        if rate not in self._firsts:
            self.get(many=True, short=False, rate=rate)
            tape, names = self._tapes[True, False], list(self._parameters())
            weights = [tape.inputs[names.index(name)] for name in self.facts.trainable]
            found = apart(descending(tape, weights, rate), tape.inputs[len(names)])
            usual = not self.facts.norms and not self.facts.drops
            self._firsts[rate] = First(compiled(found[0]), found[1], rate) if found and usual else None
        return self._firsts[rate]

    def variances(self, found: list[Tensor]) -> None:
        """What the norms told of full batches as means and variances, in place."""
        if found:
            variances(found, list(self.facts.eps), [self._moment.unbiased[name] for name in self.facts.norms])

    def targets(self, labels: Tensor) -> Tensor:
        """The targets of all examples in the form that tapes take."""
        if self.facts.classes is None:
            return labels
        return functional.one_hot(labels, self.facts.classes).to(self.facts.layout.dtype) / -self._batch

    def _record(self, many: bool, short: bool) -> Tape:
        def tape(width: int) -> Tape:
            rows = (width,) if many else ()
            return record(self._gradient(many, short), self._arguments(rows, short), self._constants)

        cast = torch.autocast(self._inputs.device.type, torch.bfloat16, enabled=self.half)
        with torch.inference_mode(False), torch.enable_grad(), cast:
            return widened({width: tape(width) for width in WIDTHS}) if many else tape(1)

    def _arguments(self, rows: tuple[int, ...], short: bool) -> list[Tensor]:
        """Stand-ins for what a tape is called with: only shapes, strides and types count."""
        kind, device = self.facts.layout.dtype, self._inputs.device

        def filled(one: Tensor) -> Tensor:
            return one.expand(*rows, self._batch, *one.shape[1:]).clone()

        # unlike values: norms of equal ones divide by zero, which some operations refuse
        own = torch.Generator().manual_seed(0)  # torch's own stream is the user's
        values = [
            torch.rand(*rows, *p.shape, dtype=kind, generator=own).to(device)
            for p in self._parameters().values()
        ]
        if self._last and not rows:
            values = [channels_last(v) if v.ndim == 4 else v for v in values]
        if self.half:
            named = zip(self._parameters(), values, strict=True)
            values = [v.to(torch.bfloat16) if name in self.halves else v for name, v in named]
        values += [filled(self._inputs), filled(self.targets(self._targets))]
        if short:
            values.append(torch.full((*rows, self._batch), 1.0 / self._batch, dtype=kind, device=device))
        if self.facts.drops:
            values.append(torch.ones(rows, dtype=torch.long, device=device))
            values.append(torch.ones(rows, dtype=torch.long, device=device))
        return values

    def _parameters(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self._module.named_parameters()}

    def _gradient(self, many: bool, short: bool) -> Callable[..., tuple[Tensor, ...]]:
        facts, moment = self.facts, self._moment
        names = list(self._parameters())

        def forward(*values: Tensor) -> tuple[Tensor, ...]:
            inputs, targets, *more = values[len(names) :]
            weights = more.pop(0) if short else None
            key, step = more if facts.drops else (None, None)
            moment.begin(key, step, None if weights is None else weights > 0)
            moment.alone = not many
            if self._last and inputs.ndim == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            outputs = functional_call(self._module, dict(zip(names, values, strict=False)), (inputs,))
            value = self._value(outputs.to(facts.layout.dtype), targets, weights)
            return value, *(part for name in facts.norms for part in self._told(name))

        def gradient(*values: Tensor) -> tuple[Tensor, ...]:
            # Autograd over vmap: clients share nothing, so each one's gradients are those of the sum.
            # (torch.func.grad imports torch's compiler, 3 s.)
            moving = [value for name, value in zip(names, values, strict=False) if name in facts.trainable]
            for value in moving:
                value.requires_grad_()
            losses, *found = vmap(forward)(*values) if many else forward(*values)
            ones = torch.ones_like(losses)
            gradients = torch.autograd.grad(losses, moving, ones, materialize_grads=True)
            return (*gradients, losses.detach(), *found)

        return gradient

    def _told(self, name: str) -> tuple[Tensor, Tensor]:
        if name not in self._moment.statistics:
            raise CannotRecord(f"its batch norm {name} is not used in every pass")
        return self._moment.statistics[name]

    def _value(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """The mean loss; with weights, their sum of products with each example's loss."""
        if self.facts.classes is not None:
            wrong = functional.log_softmax(outputs, dim=-1) * targets
            return wrong.sum() if weights is None else (wrong.sum(dim=-1) * weights).sum() * self._batch
        if self._loss == "tokens":
            sums, tokens = guesses(outputs, targets)
            if weights is not None:
                sums, tokens = sums * (weights > 0), tokens * (weights > 0)
            return sums.sum() / tokens.sum().clamp(min=1)
        each = _each(self._loss, outputs, targets)
        return each.mean() if weights is None else (each * weights).sum()

    def _classes(self) -> int | None:
        """How many classes the model tells apart, where its targets can be spread out."""
        if self._loss != "cross-entropy":
            return None
        inputs = self._inputs.expand(2, *self._inputs.shape[1:])  # two: batch norm wants more than one
        ones = torch.ones((), dtype=torch.long, device=inputs.device)
        self._moment.begin(ones, ones)
        with torch.no_grad():
            outputs = self._module(inputs)
        if outputs.ndim == 2 and outputs.shape[1] <= MOST_CLASSES and self._targets.ndim == 1:
            return int(outputs.shape[1])
        return None

    def _check(self, layout: Layout) -> None:
        kept = {name for name, _ in self._module.named_buffers()}
        known = {
            f"{name}.{buffer}" if name else buffer
            for name, part in self._module.named_modules()
            if isinstance(part, BlockNorm)
            for buffer in ("running_mean", "running_var")
        }
        for name, part in self._module.named_modules():
            if isinstance(part, _NormBase) and part.track_running_stats:
                raise CannotRecord(
                    f"{name} ({type(part).__name__}) keeps statistics of another kind than batch norm's"
                )
        for name in layout.names:
            if name in kept and name not in known:
                raise CannotRecord(f"it keeps {name}, which only its own code knows how to update")
        for name, part in self._module.named_modules():
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks:
                raise CannotRecord(f"{name or 'the model'} has hooks")


def _halves(module: nn.Module, stacked: bool) -> frozenset[str]:
    """What a step in bfloat16 takes in that type: weights, and the biases of convolutions and linear layers.

    Autocast would cast each by a launch of its own, and its gradient back by another. Norms keep float32, and stacked
    convolutions the biases: torch 2.11's vmap takes them for another type than the images'.
    """
    kinds = (nn.Linear,) if stacked else (nn.Linear, _ConvNd)
    biases = {
        f"{name}.bias" if name else "bias" for name, part in module.named_modules() if isinstance(part, kinds)
    }
    return frozenset(n for n, p in module.named_parameters() if p.ndim > 1 or n in biases)


def channels_last(kernels: Tensor) -> Tensor:
    """Room for kernels (the last four dimensions) in channels-last order, of whatever values.

    By hand: torch leaves one channel, or kernels of 1x1, in the order they are in, and a tape goes by strides.
    """
    *rows, out, into, high, wide = kernels.shape
    return kernels.reshape(*rows, out, high, wide, into).movedim(-1, -3)


def _each(loss: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each example."""
    if loss == "cross-entropy":
        each = functional.cross_entropy(outputs, targets, reduction="none")
        return each.flatten(1).mean(dim=1) if each.ndim > 1 else each
    if loss == "mse":
        each = (outputs.reshape(targets.shape) - targets.to(outputs.dtype)).square()
        return each.flatten(1).mean(dim=1) if each.ndim > 1 else each
    if outputs.ndim != 1 or len(outputs) != len(targets):
        raise CannotRecord(f"its values have the shape {tuple(outputs.shape)}, not one per example")
    return outputs
