"""Tapes with fewer operations: what comes of them is what came of them before, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from afield.training.models import MnistCnn, build
from afield.training.rewrite import simplified
from afield.training.step import Steps
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


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1)])
@pytest.mark.parametrize("rectified", [False, True])
def test_a_bias_behind_pooling_gives_the_same(window: tuple[int, int, int], rectified: bool) -> None:
    """In float64, where no two sums of a window are equal."""

    def both(*values: Tensor) -> tuple[Tensor, ...]:
        inputs, kernels, bias, weights = values
        moving = [inputs, kernels, bias]
        for value in moving:
            value.requires_grad_()
        found = functional.conv2d(inputs, kernels, bias, padding=1)
        found = functional.max_pool2d(found.relu() if rectified else found, *window)
        return found.detach(), *torch.autograd.grad(found, moving, weights)

    draw = torch.Generator().manual_seed(3)
    shapes = [(4, 3, 9, 8), (5, 3, 3, 3), (5,)]
    values = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    pooled = functional.max_pool2d(functional.conv2d(*values, padding=1), *window)
    values.append(torch.randn(pooled.shape, generator=draw, dtype=torch.float64))
    tape = record(both, [value.clone() for value in values])
    late = simplified(tape, half=True)
    [convolution] = [line for line in late.lines if line.operation is torch.ops.aten.convolution.default]
    assert convolution.args[2] is None
    assert "add" not in {name.split(".")[0] for name in names(simplified(tape))}
    with torch.inference_mode():
        for right, found in zip(compiled(tape)(1, *values), compiled(late)(1, *values), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda c: functional.max_pool2d(c, 2).sum() + c.sum(),  # the sums are read elsewhere
        lambda c: c.relu().sum(),
        lambda c: functional.avg_pool2d(c, 2).sum(),
    ],
)
def test_other_biases_stay_where_they_are(function: Callable[[Tensor], Tensor]) -> None:
    def both(inputs: Tensor, kernels: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        moving = [inputs.requires_grad_(), kernels.requires_grad_(), bias.requires_grad_()]
        return torch.autograd.grad(function(functional.conv2d(*moving)), moving)

    draw = torch.Generator().manual_seed(4)
    tape = record(both, [torch.randn(shape, generator=draw) for shape in [(4, 3, 9, 8), (5, 3, 3, 3), (5,)]])
    assert names(simplified(tape, half=True)) == names(simplified(tape))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_a_step_in_bfloat16_is_spared(precision: str) -> None:
    """No bias is cast by itself, nor added before pooling; in float32 all is as torch has it."""
    inputs, targets = torch.zeros(8, 1, 28, 28), torch.zeros(8, dtype=torch.long)
    steps = Steps(build(MnistCnn(), (1, 28, 28), 10, 0), "cross-entropy", inputs, targets, 8, precision)
    steps.get(many=False, short=False)
    lines = steps._tapes[False, False].lines
    biases = [line.args[2] for line in lines if line.operation is torch.ops.aten.convolution.default]
    casts = [line for line in lines if line.operation is torch.ops.aten._to_copy.default]
    # of the images, the logits and their gradients
    assert ([bias is None for bias in biases], len(casts)) == (
        ([True, True], 3) if precision == "bfloat16" else ([False, False], 0)
    )


@pytest.mark.parametrize("again", [False, True])
def test_a_relu_is_written_over_a_sum_that_nobody_else_reads(again: bool) -> None:
    def function(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        total = left + right
        return (functional.relu(total), total * 2) if again else (functional.relu(total),)

    left, right = torch.randn(3, 4), torch.randn(4)
    step = compiled(record(function, [left.clone(), right.clone()]))
    given = left.clone(), right.clone()
    for found, wanted in zip(step(1, *given), function(left, right), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(given[0], left) and torch.equal(given[1], right)
