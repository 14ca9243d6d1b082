"""Triton kernels of stacked convolutions that end in ReLU and 2x2 max pooling (training/convpool.py).

Every client has weights of its own, so a library takes launches for each of them, and writes what pooling throws
away. Here one launch serves all clients, and of four outputs only the largest is written, with a number from 0 to 3
for where it was (4: the ReLU is off). Images lie as [rows, batch, high, wide, channels]; what comes out, and its
gradient, as [rows, batch, channels, high, wide] where it is `flat`.

The sizes of tiles are about the best of some 180 on an H200. In us per client and step, for the second layer of
`mnist-cnn` (32 to 64 channels, 3x3, 14x14, batch 128, bfloat16; 0.93 GFLOP each): forward 2.6 (3.7 position by
position), images 3.6, and 1.1 to spread their gradients (9.8 where each tap looked up where a window has its own).

Sizes: B batch, H and W of the images, C channels in, D channels out, S side of a kernel, P padding; high and wide of
what comes out; BM, BN and BK of the tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

OFF = tl.constexpr(4)
PARTS = 4  # of the windows, each summed by itself: enough programs where there are few clients


@triton.jit
def _window(m, high: tl.constexpr, wide: tl.constexpr):
    """Of a place by its number in the batch: its image, row and column."""
    rest = m % (high * wide)
    return m // (high * wide), rest // wide, rest % wide


@triton.jit
def _place(m, n, high: tl.constexpr, wide: tl.constexpr, D: tl.constexpr, flat: tl.constexpr):
    """Where a window's channel is among those of a client."""
    if flat:
        pixels: tl.constexpr = high * wide
        return (m // pixels * (D * pixels) + m % pixels)[:, None] + n[None, :] * pixels
    else:
        return m[:, None] * D + n[None, :]


@triton.jit
def _patch(
    x, image, top, left, inside, k, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, S: tl.constexpr
):
    """What kernels that begin at (top, left) lie upon: [places, k], k by channels, then columns, then rows."""
    tap = k // C
    down, right = top[:, None] + (tap // S)[None, :], left[:, None] + (tap % S)[None, :]
    there = inside[:, None] & (down >= 0) & (down < H) & (right >= 0) & (right < W)
    there &= (k < S * S * C)[None, :]
    return tl.load(
        x + ((image[:, None] * H + down) * W + right) * C + (k % C)[None, :], mask=there, other=0.0
    )


@triton.jit
def _larger(best, where, found, at: tl.constexpr):
    better = (found > best) | (found != found)  # the first of equals, and NaN, as torch has it
    return tl.where(better, found, best), tl.where(better, at, where)


@triton.jit
def _forward(
    x, kernels, bias, y, code,
    B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, high: tl.constexpr, wide: tl.constexpr, flat: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """The largest of each window, with the bias and the ReLU."""
    K: tl.constexpr = S * S * C
    row = tl.program_id(1).to(tl.int64)
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    inside = m < B * high * wide
    image, i, j = _window(m, high, wide)
    top, left = 2 * i - P, 2 * j - P
    x += row * (B * H * W * C)
    kernels += row * (K * D)
    a = tl.zeros([BM, BN], tl.float32)
    b = tl.zeros([BM, BN], tl.float32)
    c = tl.zeros([BM, BN], tl.float32)
    d = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        part = tl.load(
            kernels + k[:, None] * D + n[None, :], mask=(k < K)[:, None] & (n < D)[None, :], other=0.0
        )
        a = tl.dot(_patch(x, image, top, left, inside, k, H, W, C, S), part, a, input_precision=exact)
        b = tl.dot(_patch(x, image, top, left + 1, inside, k, H, W, C, S), part, b, input_precision=exact)
        c = tl.dot(_patch(x, image, top + 1, left, inside, k, H, W, C, S), part, c, input_precision=exact)
        d = tl.dot(_patch(x, image, top + 1, left + 1, inside, k, H, W, C, S), part, d, input_precision=exact)
    best, where = _larger(a, tl.zeros([BM, BN], tl.int32), b, 1)
    best, where = _larger(best, where, c, 2)
    best, where = _larger(best, where, d, 3)
    best += tl.load(bias + row * D + n, mask=n < D, other=0.0).to(tl.float32)[None, :]
    off = best <= 0
    y += row * (B * high * wide * D)
    code += row * (B * high * wide * D)
    kept = inside[:, None] & (n < D)[None, :]
    best = tl.where(off, 0.0, best).to(y.dtype.element_ty)
    tl.store(y + _place(m, n, high, wide, D, flat), best, mask=kept)
    tl.store(code + m[:, None] * D + n[None, :], tl.where(off, OFF, where).to(tl.uint8), mask=kept)


@triton.jit
def _spread(
    gradient, code, dense,
    B: tl.constexpr, D: tl.constexpr, high: tl.constexpr, wide: tl.constexpr, flat: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradients of all four of each window, three of them 0: [images, 2 high, 2 wide, channels]."""
    M: tl.constexpr = B * high * wide
    row = tl.program_id(1).to(tl.int64)
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    kept = (m < M)[:, None] & (n < D)[None, :]
    slope = tl.load(gradient + row * (M * D) + _place(m, n, high, wide, D, flat), mask=kept, other=0.0)
    where = tl.load(code + row * (M * D) + m[:, None] * D + n[None, :], mask=kept, other=OFF).to(tl.int32)
    first = row * (4 * M) + (m // wide) * (4 * wide) + 2 * (m % wide)  # two lines for one of windows
    for at in tl.static_range(4):
        pixel = first + at // 2 * (2 * wide) + at % 2
        tl.store(dense + pixel[:, None] * D + n[None, :], tl.where(where == at, slope, 0.0), mask=kept)


@triton.jit
def _into(
    dense, kernels, into,
    B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """The gradient of the images: a convolution of the spread gradients by the kernels, taps in reverse."""
    K: tl.constexpr = S * S * D
    row = tl.program_id(1).to(tl.int64)
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    inside = m < B * H * W
    image, i, j = _window(m, H, W)
    top, left = i + P - S + 1, j + P - S + 1
    dense += row * (4 * B * high * wide * D)
    kernels += row * (K * C)
    found = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        slope = _patch(dense, image, top, left, inside, k, 2 * high, 2 * wide, D, S)
        part = tl.load(
            kernels + k[:, None] * C + n[None, :], mask=(k < K)[:, None] & (n < C)[None, :], other=0.0
        )
        found = tl.dot(slope, part, found, input_precision=exact)
    place = row * (B * H * W * C) + m[:, None] * C + n[None, :]
    tl.store(into + place, found.to(into.dtype.element_ty), mask=inside[:, None] & (n < C)[None, :])


@triton.jit
def _weights(
    gradient, code, x, sums,
    B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, high: tl.constexpr, wide: tl.constexpr, spread: tl.constexpr, parts: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """The gradient of the kernels [k, channels out] over a part of all places, and below it that of the bias.

    `spread`: the gradient is spread, and a place is a pixel; else a place is a window with a code.
    """
    K: tl.constexpr = S * S * C
    M: tl.constexpr = B * high * wide * (4 if spread else 1)
    row = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    k, n = tl.program_id(0) * BK + tl.arange(0, BK), tl.arange(0, BN)
    x += row * (B * H * W * C)
    gradient += row * (M * D)
    code += row * (M * D)
    found = tl.zeros([BK, BN], tl.float32)
    for turn in range(0, (M + parts * BM - 1) // (parts * BM)):
        m = (turn * parts + part) * BM + tl.arange(0, BM)
        inside = m < M
        place, there = m[:, None] * D + n[None, :], inside[:, None] & (n < D)[None, :]
        slope = tl.load(gradient + place, mask=there, other=0.0)
        if spread:
            image, i, j = _window(m, 2 * high, 2 * wide)
            patch = _patch(x, image, i - P, j - P, inside, k, H, W, C, S)
            patch = tl.where((k == K)[None, :], 1.0, patch).to(patch.dtype)  # the bias: as if it saw a 1
            found = tl.dot(tl.trans(patch), slope, found, input_precision=exact)
        else:
            image, i, j = _window(m, high, wide)
            where = tl.load(code + place, mask=there, other=OFF).to(tl.int32)
            for at in tl.static_range(4):
                patch = _patch(x, image, 2 * i + at // 2 - P, 2 * j + at % 2 - P, inside, k, H, W, C, S)
                patch = tl.where((k == K)[None, :], 1.0, patch).to(patch.dtype)
                chosen = tl.where(where == at, slope, 0.0).to(patch.dtype)
                found = tl.dot(tl.trans(patch), chosen, found, input_precision=exact)
    place = (row * parts + part) * ((K + 1) * D) + k[:, None] * D + n[None, :]
    tl.store(sums + place, found, mask=(k <= K)[:, None] & (n < D)[None, :])


def _tile(number: int, most: int = 1 << 30) -> int:
    """A power of two of at least 16, as products of tiles want it."""
    return min(most, max(16, 1 << (number - 1).bit_length()))


def _warps(channels: int) -> int:
    """So many that what a program has found of its tile stays in registers."""
    return 4 if channels <= 64 else 8


def _stages(kind: torch.dtype) -> int:
    """Tiles on their way at once: so many that the shared memory of a small GPU (100 kB) holds them."""
    return 3 if kind.itemsize == 2 else 2


def _exact(kind: torch.dtype) -> str:
    """TF32 where convolutions may have it."""
    return "tf32" if kind is not torch.float32 or torch.backends.cudnn.allow_tf32 else "ieee"


def _sizes(x: Tensor, weight: Tensor, padding: int) -> tuple[int, ...]:
    """batch, high, wide, channels in, channels out, side, padding, windows down and across."""
    _, batch, high, wide, channels = x.shape
    side = weight.shape[3]
    windows = ((length + 2 * padding - side + 1) // 2 for length in (high, wide))
    return batch, high, wide, channels, weight.shape[1], side, padding, *windows


def forward(x: Tensor, weight: Tensor, bias: Tensor, padding: int, flat: bool) -> tuple[Tensor, Tensor]:
    """See convpool.conv_pool."""
    rows, sizes, exact, stages = len(x), _sizes(x, weight, padding), _exact(x.dtype), _stages(x.dtype)
    batch, _, _, channels, out, side, _, high, wide = sizes
    kernels = weight.permute(0, 3, 4, 2, 1).contiguous()
    code = torch.empty(rows, batch, high, wide, out, dtype=torch.uint8, device=x.device)
    shape = (rows, batch, out, high, wide) if flat else code.shape
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    tiles = 64, _tile(out), _tile(side * side * channels, 32)
    _forward[triton.cdiv(batch * high * wide, tiles[0]), rows](
        x, kernels, bias, y, code, *sizes, flat, *tiles, exact, num_warps=_warps(out), num_stages=stages
    )
    return y, code


def backward(
    gradient: Tensor, code: Tensor, x: Tensor, weight: Tensor, padding: int, flat: bool, into: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See convpool.conv_pool_back."""
    rows, sizes, exact, stages = len(x), _sizes(x, weight, padding), _exact(x.dtype), _stages(x.dtype)
    batch, down, across, channels, out, side, _, high, wide = sizes
    images, spread = x.new_empty(0), into or flat
    if spread:
        dense = torch.empty(rows, batch, 2 * high, 2 * wide, out, dtype=gradient.dtype, device=x.device)
        grid = triton.cdiv(batch * high * wide, 32), rows
        _spread[grid](gradient, code, dense, batch, out, high, wide, flat, 32, _tile(out))
        gradient = dense
    if into:
        images, flipped = torch.empty_like(x), weight.flip(3, 4).permute(0, 3, 4, 1, 2).contiguous()
        tiles = 128, _tile(channels), _tile(side * side * out, 32)
        _into[triton.cdiv(batch * down * across, tiles[0]), rows](
            gradient, flipped, images, *sizes, *tiles, exact, num_warps=_warps(channels), num_stages=stages
        )
    count = side * side * channels
    sums = torch.empty(rows, PARTS, count + 1, out, dtype=torch.float32, device=x.device)
    tiles = 64, _tile(out), _tile(count + 1, 64)
    _weights[triton.cdiv(count + 1, tiles[2]), PARTS, rows](
        gradient,
        code,
        x,
        sums,
        *sizes,
        spread,
        PARTS,
        *tiles,
        exact,
        num_warps=_warps(out),
        num_stages=stages,
    )
    both = sums.sum(dim=1)
    kernels = both[:, :count].view(rows, side, side, channels, out).permute(0, 4, 3, 1, 2)
    return images, kernels.to(weight.dtype).contiguous(), both[:, count].contiguous()
