"""The first layer of several steps at once: what comes of them is what comes of one step after the other."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn

from afield.core.flat import Layout
from afield.core.types import Task
from afield.scenarios.data import ClientData
from afield.training.block import BlockTrainer
from afield.training.first import available, spans, together
from afield.training.local import Local, LoopTrainer
from afield.training.step import Steps

RATE, BATCH, CLASSES = 0.05, 5, 4


class Twice(nn.Module):
    """Reads the examples in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).tanh() + inputs)


class Tied(nn.Module):
    """Its first weights are used again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(self.first(inputs).tanh()))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    module[0].weight.requires_grad_(False)
    return module


WITH: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, CLASSES)),
        (1, 3, 4),
    ),
    "no bias": (
        lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, CLASSES)),
        (6,),
    ),
    "one layer": (lambda: nn.Linear(6, CLASSES), (6,)),
    "three layers": (
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES, bias=False)
        ),
        (6,),
    ),
    "a norm of each example": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES)),
        (6,),
    ),
}
WITHOUT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "examples read twice": (Twice, (6,)),
    "weights read twice": (Tied, (6,)),
    "frozen weights": (frozen, (6,)),
    "another operation first": (
        lambda: nn.Sequential(nn.Tanh(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES)),
        (6,),
    ),
    "a convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(12, CLASSES)),
        (1, 3, 4),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)),
        (6,),
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)), (6,)),
}


def steps_of(module: nn.Module, shape: tuple[int, ...]) -> Steps:
    return Steps(module, "cross-entropy", torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long), BATCH)


@pytest.mark.parametrize("rows", [1, 3, 9])  # 9: in two pieces
@pytest.mark.parametrize("name", WITH)
def test_several_steps_at_once_are_steps_one_after_the_other(name: str, rows: int) -> None:
    make, shape = WITH[name]
    torch.manual_seed(0)
    module = make()
    steps, count = steps_of(module, shape), 4
    inputs = torch.randn(rows, count * BATCH, *shape)
    targets = steps.targets(torch.randint(CLASSES, (rows * count * BATCH,))).view(
        rows, count * BATCH, CLASSES
    )
    right = [p.detach() + 0.1 * torch.randn(rows, *p.shape) for p in module.parameters()]
    found = [p.clone() for p in right]
    losses, sums = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    step = steps.get(many=True, short=False, rate=RATE)
    for begin in range(0, count * BATCH, BATCH):
        now = slice(begin, begin + BATCH)
        sums += step(rows, *right, inputs[:, now].contiguous(), targets[:, now].contiguous())[0]
    first = steps.first(RATE)
    assert first is not None
    first.train(found, inputs, targets, BATCH, losses)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses, sums, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", WITHOUT)
def test_models_without_such_a_layer_are_left_as_they_are(name: str) -> None:
    make, shape = WITHOUT[name]
    assert steps_of(make(), shape).first(RATE) is None


@pytest.mark.parametrize(
    "local", [Local(batch=BATCH), Local(epochs=2, batch=BATCH), Local(steps=7, batch=BATCH)]
)
def test_a_block_of_unlike_clients_as_in_the_loop(local: Local) -> None:
    make, shape = WITH["mlp"]
    torch.manual_seed(0)
    module, sizes = make(), (20, 20, 13, 5, 31, 20, 2)
    inputs, targets = torch.randn(sum(sizes), *shape), torch.randint(CLASSES, (sum(sizes),))
    data = ClientData(inputs, targets, list(torch.arange(sum(sizes)).split(list(sizes))))
    layout = Layout.of(module)
    bases = [layout.flatten(module) + 0.1 * torch.randn(layout.size) for _ in sizes]
    fast, loop = BlockTrainer(module, data, local, 3), LoopTrainer(module, data, local, 3)
    fast._several = 3  # whatever this machine is
    for clients in (range(len(sizes)), (0, 1, 5), (2, 3)):
        tasks = [Task(number, client, 0, 0, 0.0) for number, client in enumerate(clients)]
        given = [bases[client] for client in clients], [None] * len(tasks)
        for one, other in zip(fast.train(tasks, *given), loop.train(tasks, *given), strict=True):
            torch.testing.assert_close(one.model, other.model, rtol=1e-5, atol=1e-6)
            assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-5)
            assert one.steps == other.steps


@settings(max_examples=60, deadline=None)
@given(
    some.integers(0, 2),
    some.integers(0, 7),
    some.integers(0, 11),
    some.sampled_from([math.nan, math.inf, -math.inf, 3.4028e38, -3.4028e38, 1e20, 0.0]),
    some.sampled_from([0.0, 1.0, 1e15, 1e30]),
)
def test_weights_that_are_called_sound_are(row: int, out: int, into: int, value: float, scale: float) -> None:
    make, shape = WITH["mlp"]
    torch.manual_seed(0)
    module = make()
    first = steps_of(module, shape).first(RATE)
    assert first is not None
    inputs = torch.randn(3, 2 * BATCH, *shape)
    inputs[:, :, 0, 0] = 0.0  # an example that is blind to a weight tells of it all the same
    inputs *= scale
    parameters = [p.detach() + torch.zeros(3, *p.shape) for p in module.parameters()]
    parameters[first.weight][row, out, into] = value
    targets = torch.full((3, 2 * BATCH, CLASSES), -0.25 / BATCH)
    largest = float(inputs.abs().max())
    sound = first.train(parameters, inputs, targets, BATCH, torch.zeros(3), largest)
    finite = bool(parameters[first.weight].isfinite().all())
    assert finite or not sound
    if abs(value) < 1 and scale in (0.0, 1.0):
        assert sound  # no look is needed in the usual case


def test_one_broken_model_of_a_block_is_named() -> None:
    make, shape = WITH["mlp"]
    torch.manual_seed(0)
    module, sizes = make(), (20, 20, 20, 20)
    inputs, targets = torch.randn(80, *shape), torch.randint(CLASSES, (80,))
    data = ClientData(inputs, targets, list(torch.arange(80).split(list(sizes))))
    base = Layout.of(module).flatten(module)
    fast = BlockTrainer(module, data, Local(batch=BATCH), 3)
    fast._several = 4
    tasks = [Task(number, number, 0, 0, 0.0) for number in range(4)]
    for place in (0, base.numel() - 1):  # in the first layer, and in the last
        broken = base.clone()
        broken[place] = math.nan
        found = fast.train(tasks, [base, broken, base, base], [None] * 4)
        assert [result.finite for result in found] == [True, False, True, True]


@settings(max_examples=200, deadline=None)
@given(some.lists(some.tuples(some.integers(1, 3), some.booleans()), max_size=12), some.integers(2, 4))
def test_spans_are_the_longest_from_the_first_step_on(steps: list[tuple[int, bool]], most: int) -> None:
    widths, short = [width for width, _ in steps], [lacking for _, lacking in steps]
    last = 0
    for begin, end in spans(widths, short, most):
        assert (begin, 2 <= end - begin <= most) == (last, True)
        assert len(set(widths[begin:end])) == 1 and not any(short[begin:end])
        last = end
    rest = list(zip(widths[last:], short[last:], strict=True))[:2]
    assert (
        len(rest) < 2 or rest[0][0] != rest[1][0] or rest[0][1] or rest[1][1]
    )  # no two are left that could go


def test_layers_that_are_worth_it() -> None:
    assert together(20, 200, 784) == (4 if available() else 0)
    assert together(64, 200, 784) == 0  # one step's examples are many already
    assert together(5, 16, 64) == 0  # few weights


def test_float32_stays_float32_and_torch_is_as_it_was() -> None:
    before = torch.get_float32_matmul_precision()
    make, shape = WITH["mlp"]
    first = steps_of(make(), shape).first(RATE)
    assert first is not None
    torch.manual_seed(0)
    examples = torch.randn(2, 2 * BATCH, *shape)
    parameters = [torch.randn(2, *p.shape) for p in make().parameters()]
    exact = [p.double() for p in parameters]
    targets = torch.full((2, 2 * BATCH, CLASSES), -0.25 / BATCH)
    first.train(parameters, examples, targets, BATCH, torch.zeros(2))
    first.train(exact, examples.double(), targets.double(), BATCH, torch.zeros(2, dtype=torch.float64))
    for one, other in zip(parameters, exact, strict=True):
        assert (one - other).norm() < 1e-6 * other.norm()
    assert torch.get_float32_matmul_precision() == before
