"""Convolutions of many clients at once that end in ReLU and 2x2 max pooling: the layers of most small networks.

`conv_pool` and `conv_pool_back` are operations to torch, so that tapes hold them. Here they are spelt out in torch's
own ones, as a CPU runs them; on a GPU they are the kernels of training/kernels.py.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

MOST = 128  # channels of a convolution: a kernel keeps those of its windows in registers


@torch.library.custom_op("afield::conv_pool", mutates_args=())
def conv_pool(x: Tensor, weight: Tensor, bias: Tensor, padding: int, flat: bool) -> tuple[Tensor, Tensor]:
    """The largest of each window of 2x2, after the ReLU, and where it was: 0 to 3; 4 where the ReLU is off.

    x [rows, batch, high, wide, in], weight [rows, out, in, side, side], bias [rows, out]; what comes out is
    [rows, batch, high / 2, wide / 2, out], and where `flat` the largest are [rows, batch, out, high / 2, wide / 2].
    """
    if x.is_cuda:
        from afield.training import kernels

        return kernels.forward(x, weight, bias, padding, flat)
    rows = len(x)
    found = functional.conv2d(_images(x), weight.flatten(0, 1), bias.flatten(), padding=padding, groups=rows)
    windows = _windows(found.view(len(found), rows, -1, *found.shape[2:]).movedim(1, 0))
    where = windows.argmax(dim=-1, keepdim=True)
    best = windows.gather(-1, where)[..., 0]
    off = best <= 0
    code = where[..., 0].masked_fill(off, 4).movedim(2, -1).to(torch.uint8)
    best = best.masked_fill(off, 0.0)
    return (best if flat else best.movedim(2, -1)).contiguous(), code.contiguous()


@torch.library.custom_op("afield::conv_pool_back", mutates_args=())
def conv_pool_back(
    gradient: Tensor, code: Tensor, x: Tensor, weight: Tensor, padding: int, flat: bool, into: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (nothing where not `into`), weight and bias."""
    if x.is_cuda:
        from afield.training import kernels

        return kernels.backward(gradient, code, x, weight, padding, flat, into)
    rows, (high, wide) = len(x), code.shape[2:4]
    gradient = gradient.movedim(2, -1) if flat else gradient
    chosen = functional.one_hot(code.long(), 5)[..., :4] * gradient[..., None]  # [rows, batch, h, w, out, 4]
    dense = chosen.view(*chosen.shape[:5], 2, 2).permute(0, 1, 4, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)
    left = [side + 2 * padding - weight.shape[-1] + 1 for side in x.shape[2:4]]
    dense = functional.pad(dense, (0, left[1] - 2 * wide, 0, left[0] - 2 * high))
    into_images, into_weight, into_bias = torch.ops.aten.convolution_backward(
        dense.movedim(0, 1).flatten(1, 2).to(x.dtype),
        _images(x),
        weight.flatten(0, 1),
        [rows * weight.shape[1]],
        *([1, 1], [padding] * 2, [1, 1], False, [0, 0], rows, [into, True, True]),
    )
    images = x.new_empty(0)
    if into:
        by_row = into_images.view(x.shape[1], rows, x.shape[4], *x.shape[2:4])
        images = by_row.permute(1, 0, 3, 4, 2).contiguous()
    return images, into_weight.view(weight.shape), into_bias.view(weight.shape[:2])


def _images(x: Tensor) -> Tensor:
    """[rows, batch, high, wide, channels] as [batch, rows * channels, high, wide]."""
    return x.permute(1, 0, 4, 2, 3).flatten(1, 2)


def _windows(found: Tensor) -> Tensor:
    """[..., high, wide] as [..., high / 2, wide / 2, 4]; what is left over at the ends goes."""
    high, wide = (side // 2 for side in found.shape[-2:])
    even = found[..., : 2 * high, : 2 * wide].reshape(*found.shape[:-2], high, 2, wide, 2)
    return even.transpose(-3, -2).flatten(-2)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.padding, ctx.flat = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, code = ctx.saved_tensors
    into = ctx.needs_input_grad[0]
    images, *rest = conv_pool_back(gradient.contiguous(), code, x, weight, ctx.padding, ctx.flat, into)
    return images if into else None, *rest, None, None


conv_pool.register_autograd(_backward, setup_context=_setup)


class _Stacked(torch.autograd.Function):
    """What vmap calls for the rows of all clients."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, padding: int, flat: bool) -> Tensor:
        raise NotImplementedError("of many clients only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        padding: int,
        flat: bool,
    ) -> tuple[Tensor, int]:
        stacks = []
        for part, dim in zip((x, weight, bias), dims, strict=False):
            assert dim is not None, "every client has its own images and weights"
            stacks.append(part.movedim(dim, 0))
        images, weight, bias = stacks
        images = images.permute(0, 1, 3, 4, 2).to(weight.dtype).contiguous()
        found: Tensor = conv_pool(images, weight, bias, padding, flat)[0]
        return found if flat else found.permute(0, 1, 4, 2, 3), 0


class ConvPool(nn.Module):
    """A convolution, its ReLU and its max pooling as one layer, under the convolution's name.

    `flat`: what comes out is flattened next, so that it is written in the order that a linear layer reads.
    """

    def __init__(self, convolution: nn.Conv2d, flat: bool) -> None:
        super().__init__()
        self.flat = flat
        self.weight, self.bias = convolution.weight, convolution.bias
        self.padding = int(convolution.padding[0])

    def forward(self, inputs: Tensor) -> Tensor:
        if torch._C._functorch.is_batchedtensor(inputs):
            found: Tensor = _Stacked.apply(inputs, self.weight, self.bias, self.padding, self.flat)  # type: ignore[no-untyped-call]
            return found
        return functional.max_pool2d(
            functional.conv2d(inputs, self.weight, self.bias, padding=self.padding).relu(), 2
        )


def convpooled(module: nn.Module) -> nn.Module:
    """The module (a private copy) with every convolution of `poolings` as one layer with what follows it."""
    for sequence, place in poolings(module):
        flat = place + 3 < len(sequence) and isinstance(sequence[place + 3], nn.Flatten)
        sequence[place] = ConvPool(sequence[place], flat)  # type: ignore[arg-type]
        sequence[place + 1], sequence[place + 2] = nn.Identity(), nn.Identity()
    return module


def poolings(module: nn.Module) -> list[tuple[nn.Sequential, int]]:
    """Where a plain convolution is followed by a ReLU and by 2x2 max pooling."""
    return [
        (part, place)
        for part in module.modules()
        if type(part) is nn.Sequential
        for place in range(len(part) - 2)
        if _pools(part[place], part[place + 1], part[place + 2])
    ]


def _pools(convolution: nn.Module, relu: nn.Module, pool: nn.Module) -> bool:
    if type(convolution) is not nn.Conv2d or type(relu) is not nn.ReLU or type(pool) is not nn.MaxPool2d:
        return False
    if any(part._forward_hooks or part._forward_pre_hooks for part in (convolution, relu, pool)):
        return False  # somebody wants to see what is between them
    first, second = convolution.kernel_size
    plain = (
        first == second
        and convolution.stride == convolution.dilation == (1, 1)
        and convolution.groups == 1
        and convolution.bias is not None
        and convolution.padding_mode == "zeros"
        and isinstance(convolution.padding, tuple)
        and len(set(convolution.padding)) == 1
        and convolution.weight.dtype is torch.float32
        and max(convolution.in_channels, convolution.out_channels) <= MOST
    )
    windows = {2, (2, 2)}
    return (
        plain
        and pool.kernel_size in windows
        and pool.stride in windows
        and pool.padding in {0, (0, 0)}
        and pool.dilation in {1, (1, 1)}
        and not pool.ceil_mode
        and not pool.return_indices
    )


def stackable(module: nn.Module) -> bool:
    """Whether every convolution is one of `poolings`, and Triton is there to train them stacked on a GPU."""
    convolutions = [part for part in module.modules() if isinstance(part, _ConvNd)]
    return len(poolings(module)) == len(convolutions) > 0 and importlib.util.find_spec("triton") is not None
