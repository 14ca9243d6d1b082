"""Tapes with fewer operations: what comes of them is what came of them before, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from afield.training.rewrite import simplified
from afield.training.tape import Tape, compiled, record


def gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def both(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        values.requires_grad_()
        found = function(values)
        (back,) = torch.autograd.grad(found, [values], weights)
        return found.detach(), back

    return both


def names(tape: Tape) -> list[str]:
    return [line.operation.name().split("::")[1] for line in tape.lines]


def images(seed: int) -> Tensor:
    """Few values, so that windows have several largest ones, zeros among them, and some that are no numbers."""
    draw = torch.Generator().manual_seed(seed)
    found = torch.randint(-3, 3, (4, 3, 9, 8), generator=draw).float()
    found[0, 0, 4, 4], found[1, 1, 2, 3], found[2, 2, 0, 0] = float("nan"), float("inf"), -0.0
    return found.contiguous(memory_format=torch.channels_last) if seed % 2 else found


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 0)])
def test_pooling_before_a_relu_gives_the_same_bits(window: tuple[int, int, int]) -> None:
    size, stride, padding = window

    def function(values: Tensor) -> Tensor:
        return functional.max_pool2d(functional.relu(values), size, stride, padding)

    for seed in range(6):
        values = images(seed)
        weights = torch.randn(function(values).shape, generator=torch.Generator().manual_seed(seed))
        tape = record(gradient(function), [values.clone(), weights])
        before = [name for name in names(tape) if name != "detach"]
        assert before[:2] == ["relu", "max_pool2d_with_indices"]
        short = simplified(tape)
        assert names(short) == [
            "max_pool2d_with_indices",
            "relu",
            "threshold_backward",
            "max_pool2d_with_indices_backward",
        ]
        with torch.inference_mode():
            for right, found in zip(
                compiled(tape)(1, values, weights), compiled(short)(1, values, weights), strict=True
            ):
                assert torch.equal(right.view(torch.int32), found.view(torch.int32))
                assert right.stride() == found.stride()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.max_pool2d(y := functional.relu(x), 2).sum() + y.square().sum(),
        lambda x: (functional.max_pool2d(y := functional.relu(x), 2) + functional.max_pool2d(-y, 2)).sum(),
        lambda x: functional.max_pool2d(functional.leaky_relu(x), 2).sum(),
        lambda x: functional.relu(functional.max_pool2d(x, 2)).sum(),
        lambda x: ((y := functional.relu(x)).exp() + y.sigmoid()).sum(),
    ],
)
def test_other_uses_of_a_relu_stay(function: Callable[[Tensor], Tensor]) -> None:
    values, weights = images(2).nan_to_num(1.0), torch.ones(())
    tape = record(gradient(function), [values.clone(), weights])
    short = simplified(tape)
    kinds = ("relu", "leaky_relu", "max_pool2d_with_indices")
    assert [n for n in names(short) if n in kinds] == [n for n in names(tape) if n in kinds]
    with torch.inference_mode():
        for right, found in zip(
            compiled(tape)(1, values, weights), compiled(short)(1, values, weights), strict=True
        ):
            assert torch.equal(right, found)
