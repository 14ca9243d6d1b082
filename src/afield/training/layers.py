"""Layers that depend on more than their input: dropout by key, batch norm of padded batches.

A private copy of the model gets them in place of torch's own. What they need comes by a `Moment`, one per copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from afield.core.errors import InputError
from afield.training.draws import APART, FURTHER, drawn


@dataclass(slots=True)
class Moment:
    """What the layers of one model need in one step of one client."""

    key: Tensor | None = None  # of the task
    step: Tensor | None = None
    present: Tensor | None = (
        None  # per example 1, or 0 for one that only fills the batch; None: all are there
    )
    alone: bool = False  # one client, not a row of many
    calls: int = 0  # of dropout in this step
    statistics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by name of the norm
    unbiased: dict[str, float] = field(
        default_factory=dict
    )  # n / (n - 1) of the n values of a channel in a full batch
    shares: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # see `weighed`

    def begin(self, key: Tensor | None, step: Tensor | None, present: Tensor | None = None) -> None:
        self.key, self.step, self.present, self.calls = key, step, present, 0
        self.statistics, self.shares = {}, {}

    def weighed(self, values: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        """With so many values of a channel in each example: what a value weighs in the mean, and n / (n - 1)."""
        if values not in self.shares:
            assert self.present is not None
            there = self.present.to(kind)
            count = (there.sum() * values).clamp(min=1)
            self.shares[values] = there / count, count / (count - 1).clamp(min=1)
        return self.shares[values]


class KeyedDropout(nn.Module):
    """nn.Dropout whose mask is a function of (task, step, call, element): the same on any device, in any block."""

    def __init__(self, p: float, moment: Moment) -> None:
        super().__init__()
        self.p, self.moment = p, moment

    def forward(self, inputs: Tensor) -> Tensor:
        moment = self.moment
        if not self.training or self.p == 0.0 or moment.key is None or moment.step is None:
            return inputs
        # Kept to 63 bits: from the fourth call on the product is more than torch takes as an integer.
        key = moment.key + moment.step * APART + (moment.calls * FURTHER & 0x7FFFFFFFFFFFFFFF)
        moment.calls += 1
        if self.p == 1.0:
            return inputs * 0.0
        place = torch.arange(inputs.numel(), device=inputs.device).view(inputs.shape)
        kept = (drawn(key, place) >> 39) >= round(self.p * 2**24)
        return inputs * kept * (1.0 / (1.0 - self.p))


class _Present(torch.autograd.Function):
    """Batch norm over the examples that are there, in few passes over its inputs. `each`: see Moment.weighed.

    What comes back to an example that only fills the batch is 0: sums over all are sums over those present.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, each: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What comes out, the mean and the variance."""
        kind, over = each.dtype, list(range(2, x.ndim))
        sums = x.sum(over, dtype=kind) if over else x.to(kind)
        squares = (torch.linalg.vector_norm(x, dim=over, dtype=kind) if over else sums).square()
        with torch.autocast(x.device.type, enabled=False):
            mean, raw = (torch.mm(each[None], values)[0] for values in (sums, squares))
        variance = torch.addcmul(raw, mean, mean, value=-1).clamp_(min=0)
        out = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]
        ctx.eps = eps
        ctx.save_for_backward(x, weight, mean, variance, each)
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, each = ctx.saved_tensors
        deviation = (variance + ctx.eps).rsqrt()
        # both pairs: a CPU reads the mean and the variance, a GPU the mean and the deviation
        _, slopes, sums = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, mean, variance, mean, deviation, False, ctx.eps, [False, True, True]
        )
        scale = weight * deviation
        tilt = scale * deviation * slopes

        def wide(values: Tensor) -> Tensor:
            return values.to(x.dtype).view(*values.shape, *(1,) * (x.ndim - 2))

        level, slant = torch.outer(each, tilt * mean - scale * sums), torch.outer(each, -tilt)
        into = torch.addcmul(torch.addcmul(wide(level), x, wide(slant)), gradient, wide(scale[None]))
        return into, slopes, sums, None, None


class BlockNorm(nn.Module):
    """Batch norm in training that leaves its buffers alone: the batch's statistics go to the moment."""

    def __init__(self, norm: _BatchNorm, name: str, moment: Moment) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.eps, self.name, self.moment, self.tracks = norm.eps, name, moment, norm.track_running_stats
        if norm.track_running_stats:  # only to keep their place in the model's vector
            self.register_buffer("running_mean", norm.running_mean)
            self.register_buffer("running_var", norm.running_var)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.name in self.moment.statistics:
            raise InputError(f"batch norm {self.name} is used twice in one pass")
        rest = math.prod(inputs.shape[2:])
        present = self.moment.present
        if present is None:
            return self._full(inputs, len(inputs) * rest)
        if self.moment.alone and self.weight is not None:
            return self._alone(inputs, rest)
        shape = (1, -1) + (1,) * (inputs.ndim - 2)
        share = present.view((-1,) + (1,) * (inputs.ndim - 1)).to(inputs.dtype)
        # 1 at the least: a row that is done, and idles in a graph, must not turn to NaN, which grouped convolutions
        # in bfloat16 carry over to their neighbours
        count = (present.sum() * rest).clamp(min=1)
        over = [0, *range(2, inputs.ndim)]
        mean = (inputs * share).sum(over) / count
        centred = inputs - mean.view(shape)
        squares = (centred * centred * share).sum(over)
        variance = squares / count
        self._tell(mean, squares / (count - 1).clamp(min=1))
        scaled = centred * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            scaled = scaled * self.weight.view(shape) + self.bias.view(shape)
        return scaled

    def _alone(self, inputs: Tensor, rest: int) -> Tensor:
        """A short batch of one client."""
        each, unbiased = self.moment.weighed(rest, self.weight.dtype)
        out: Tensor
        out, mean, variance = _Present.apply(inputs, self.weight, self.bias, each, self.eps)  # type: ignore[no-untyped-call]
        self._tell(mean, variance * unbiased)
        return out

    def _full(self, inputs: Tensor, count: int) -> Tensor:
        if not self.tracks:
            return functional.batch_norm(inputs, None, None, self.weight, self.bias, True, 0.0, self.eps)
        out: Tensor
        out, mean, deviation = torch.native_batch_norm(
            inputs, self.weight, self.bias, None, None, True, 0.0, self.eps
        )
        # what it hands out is 1 / sqrt(variance + eps): worked up for all norms at once (see `variances`)
        self._tell(mean, deviation)
        self.moment.unbiased[self.name] = count / (count - 1)
        return out

    def _tell(self, mean: Tensor, variance: Tensor) -> None:
        self.moment.statistics[self.name] = (mean.detach(), variance.detach())


def variances(found: list[Tensor], eps: list[float], unbiased: list[float]) -> None:
    """Turn what norms tell of full batches (mean, deviation, ...) into means and unbiased variances, in place."""
    deviations = found[1::2]
    torch._foreach_pow_(deviations, -2)
    torch._foreach_sub_(deviations, eps)
    torch._foreach_mul_(deviations, unbiased)


class _Pooling(torch.autograd.Function):
    """Max pooling, forward by channels-last memory: the same values, and the same choice among equals."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, *how: Any) -> Tensor:
        last = inputs.contiguous(memory_format=torch.channels_last)
        found, places = torch.ops.aten.max_pool2d_with_indices(last, *how)
        ctx.how = how
        ctx.save_for_backward(inputs, places.contiguous())
        pooled: Tensor = found.contiguous()
        return pooled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, places = ctx.saved_tensors
        back = torch.ops.aten.max_pool2d_with_indices_backward(
            gradient.contiguous(), inputs, *ctx.how, places
        )
        return back, *(None for _ in ctx.how)


class QuickPool(nn.Module):
    """nn.MaxPool2d on a CPU, where torch's own forward pass was 40 % of a step of a small CNN.

    By channels-last memory it wins from 16 channels on, is even at 6 and loses at 3.
    """

    LEAST: ClassVar[int] = 16

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.pool = pool
        pairs = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
        self.how = (*([v, v] if isinstance(v, int) else list(v) for v in pairs), pool.ceil_mode)

    def forward(self, inputs: Tensor) -> Tensor:
        plain = (
            inputs.ndim != 4 or inputs.shape[1] < self.LEAST or not inputs.is_contiguous() or inputs.is_cuda
        )
        found: Tensor = self.pool(inputs) if plain else _Pooling.apply(inputs, *self.how)  # type: ignore[no-untyped-call]
        return found


def pooled(module: nn.Module) -> nn.Module:
    """The module (a private copy) with max pooling that is quick on a CPU; its bits are the same."""

    def exchange(part: nn.Module, _: str) -> nn.Module:
        quick = isinstance(part, nn.MaxPool2d) and type(part) is nn.MaxPool2d and not part.return_indices
        return QuickPool(part) if quick else part  # type: ignore[arg-type]

    return _exchanged(module, exchange)


def keyed(module: nn.Module, moment: Moment) -> nn.Module:
    """The module (a private copy) with every nn.Dropout drawing by key."""
    return _exchanged(
        module, lambda part, _: KeyedDropout(part.p, moment) if type(part) is nn.Dropout else part
    )


def normed(module: nn.Module, moment: Moment) -> nn.Module:
    """The module (a private copy) with every batch norm telling its statistics to the moment."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

    def exchange(part: nn.Module, name: str) -> nn.Module:
        return BlockNorm(part, name, moment) if isinstance(part, kinds) and type(part) in kinds else part

    return _exchanged(module, exchange)


def _exchanged(module: nn.Module, by: Callable[[nn.Module, str], nn.Module]) -> nn.Module:
    new = {part: by(part, name) for name, part in module.named_modules()}
    for part, other in new.items():
        if other is not part:
            other.train(part.training)
        for name, child in part._modules.items():
            if child is not None:
                part._modules[name] = new[child]
    return new[module]
