"""The first layer of several steps at once, on a CPU: one large product in place of many small ones.

Examples do not change from step to step, so with plain SGD a linear layer that reads them needs its weights W once
for several steps: after steps 1 .. s-1 its outputs are

    X_s W_s^T  =  X_s W^T - rate * sum over t < s of (X_s X_t^T) G_t

where X_t are the examples of step t and G_t the gradients of the layer's outputs, and at the end
W -= rate * sum of G_t^T X_t. X W^T, X X^T and that sum are products of all these steps' examples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from afield.core.processor import amd, capabilities

# X X^T is extra work, for n examples n / (2 * outputs) of the rest; of fewer weights calls cost more than that saves.
EXTRA, LARGE = 0.2, 50_000
SMALL = 1e30  # a change that takes nothing beyond the largest float32, whose last digit is 2e31


@dataclass(frozen=True, slots=True)
class First:
    """A step of plain SGD without its first layer: a function of (width, *parameters, outputs, targets).

    Outputs are that layer's, less its bias. It moves all parameters but the layer's weights, number `weight`, and
    gives the losses and the gradient of the outputs.
    """

    step: Callable[..., tuple[Tensor, ...]]
    weight: int
    rate: float

    def train(
        self,
        parameters: Sequence[Tensor],
        inputs: Tensor,
        targets: Tensor,
        batch: int,
        losses: Tensor,
        largest: float = math.inf,
    ) -> bool:
        """Steps of `batch` examples each, in order, in place; inputs are [clients, examples of all steps, ...].

        Gives whether the layer's weights are surely free of NaN and Inf: without a look at them, which would take
        longer than all but the products. No number of the examples may be larger than `largest`.
        """
        weights = parameters[self.weight]
        examples = inputs.flatten(2)
        rows, count, _ = examples.shape
        across = examples.new_empty(rows, weights.shape[1], count)
        with _fast():
            for some in _pieces(rows):  # weights first: oneDNN packs the smaller of the two (1.06 to 1.13)
                torch.bmm(weights[some], examples[some].mT, out=across[some])
        outputs = across.mT.contiguous()
        gradients = torch.empty_like(outputs)
        # what is not finite in the weights shows in the outputs of any example: 0 * NaN is NaN
        sound = math.isfinite(float(outputs[:, 0].sum()))
        for begin in range(0, count, batch):
            now = slice(begin, begin + batch)
            given = outputs[:, now]
            if begin:
                alike = torch.bmm(examples[:, now], examples[:, :begin].mT)
                given = torch.baddbmm(given, alike, gradients[:, :begin], alpha=-self.rate)
            loss, gradients[:, now] = self.step(rows, *parameters, given, targets[:, now])
            losses.add_(loss)
        with _fast():
            for some in _pieces(rows):
                weights[some].baddbmm_(gradients[some].mT, examples[some], alpha=-self.rate)
        low, high = torch.aminmax(gradients)
        return sound and self.rate * count * largest * max(-float(low), float(high)) < SMALL


def _fast() -> AbstractContextManager[None]:
    return _by_onednn() if available() else nullcontext()


def _pieces(rows: int) -> Iterator[slice]:
    """Rows that are multiplied at once, up to 8: oneDNN takes 1.2 ms to prepare for each number.

    In parts alike: 4 to 8 take as long a row as more do, one alone 2.4 times as long.
    """
    count = -(-rows // 8)
    return (slice(part * rows // count, (part + 1) * rows // count) for part in range(count))


def together(batch: int, outputs: int, inputs: int) -> int:
    """How many steps of such a layer go at once; 0: each for itself."""
    count = int(2 * EXTRA * outputs) // batch
    return count if outputs * inputs >= LARGE and count > 1 and available() else 0


def spans(widths: Sequence[int], short: Sequence[bool], most: int) -> Iterator[tuple[int, int]]:
    """From the first step on, (begin, end) of steps that go at once: of the same rows, and no short batch."""
    end = 0
    while True:
        begin = end
        while end < min(begin + most, len(widths)) and widths[end] == widths[begin] and not short[end]:
            end += 1
        if end < begin + 2:
            return
        yield begin, end


@functools.cache
def available() -> bool:
    """Whether oneDNN's float32 products are to be had, and MKL's leave half of the processor idle.

    MKL keeps to AVX2 on processors of other makers, oneDNN takes AVX-512 (two cores of a Zen 5: 237 and 497 GFLOP/s).
    torch asks oneDNN for products of float32 only where they may be computed in bfloat16. Processors with AMX would;
    others compute in float32, which is looked at here.
    """
    known = capabilities()
    if not amd() or not known.get("avx512_f") or known.get("amx_tile"):
        return False
    if not hasattr(torch.backends.mkldnn, "matmul"):  # before torch 2.9
        return False
    left, right = torch.linspace(-1, 1, 2 * 48 * 256).sin().view(2, 1, 48, 256)
    with _by_onednn():
        found = torch.bmm(left, right.mT)
    exact = torch.bmm(left.double(), right.double().mT)
    return bool((found - exact).norm() < 1e-5 * exact.norm())


@contextmanager
def _by_onednn() -> Iterator[None]:
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
