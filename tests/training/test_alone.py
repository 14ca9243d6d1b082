"""One client after another by tape: the loop's models up to rounding, a process's bits, the loop where it must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.types import LocalResult, Task
from afield.scenarios.data import ClientData
from afield.training.alone import AloneTrainer, alone
from afield.training.block import BlockTrainer
from afield.training.choose import Training, trainer
from afield.training.local import Local, LoopTrainer
from afield.training.tape import CannotRecord
from afield.training.workers import WorkersTrainer

SEED = 5
SIZES = (8, 7, 13, 4)  # of batches of 4: full ones, short ones
Block = tuple[list[Task], list[Tensor], list[Tensor | None]]


def pool() -> ClientData:
    words = torch.Generator().manual_seed(2)
    inputs = torch.randn(sum(SIZES), 2, 9, 9, generator=words)
    targets = torch.randint(3, (sum(SIZES),), generator=words)
    return ClientData(inputs, targets, list(torch.arange(sum(SIZES)).split(SIZES)))


def cnn(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3), *more
    return nn.Sequential(*first, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))


def block(module: nn.Module, corrected: bool = False) -> Block:
    """Two tasks of every client; a correction is there for every other one."""
    layout, words = Layout.of(module), torch.Generator().manual_seed(3)
    tasks = [Task(10 + at, at % 4, at // 4, 0, 0.0) for at in range(8)]
    bases = [layout.flatten(module) + 0.01 * torch.rand(layout.size, generator=words) for _ in tasks]
    pulls = [0.1 * torch.rand(layout.parameters, generator=words) for _ in tasks]
    return tasks, bases, [pull if corrected and at % 2 else None for at, pull in enumerate(pulls)]


def close(one: Sequence[LocalResult], two: Sequence[LocalResult]) -> None:
    for a, b in zip(one, two, strict=True):
        assert torch.allclose(a.model, b.model, rtol=1e-5, atol=1e-6)
        assert (a.examples, a.steps, a.rate) == (b.examples, b.steps, b.rate)
        assert a.metrics == pytest.approx(b.metrics, rel=1e-5)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "epochs": 2},
        {"weight_decay": 0.3, "prox": 0.1},
        {"optimiser": "adamw", "weight_decay": 0.1},
        {"augment": True},
        {"steps": (1, 5, 2, 3)},
    ],
)
def test_models_are_those_of_the_loop(options: dict[str, Any], corrected: bool, dropout: bool) -> None:
    module = cnn(nn.Dropout(0.5)) if dropout else cnn()
    local = Local(**{"batch": 4, "rate": 0.05, **options})
    trainer, given = AloneTrainer(module, pool(), local, SEED), block(module, corrected)
    expected = LoopTrainer(module, pool(), local, SEED).train(*given)
    close(trainer.train(*given), expected)
    close(trainer.train(*given), expected)  # nothing is left of the tasks before


def test_frozen_weights_stay() -> None:
    module = cnn()
    module[0].requires_grad_(False)
    given, local = block(module), Local(batch=4)
    found = alone(module, pool(), local, SEED).train(*given)
    close(found, LoopTrainer(module, pool(), local, SEED).train(*given))
    still = Layout.of(module).views(found[0].model)["0.weight"]
    assert torch.equal(still, Layout.of(module).views(given[1][0])["0.weight"])


def test_workers_give_the_same_bits() -> None:
    if torch.accelerator.is_available():
        pytest.skip("torch forks no process that can train once autograd has run beside a GPU: hide it")
    module, local = cnn(), Local(batch=4, momentum=0.5)
    given = block(module, corrected=True)
    expected = AloneTrainer(module, pool(), local, SEED).train(*given)
    with WorkersTrainer(module, pool(), local, SEED, workers=2) as trainer:
        found = trainer.train(*given)
    assert all(torch.equal(a.model, b.model) for a, b in zip(found, expected, strict=True))
    assert [a.metrics for a in found] == [b.metrics for b in expected]


class Viewed(nn.Module):
    """Flattens by `view`, which images in channels-last memory do not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.last = nn.Conv2d(2, 4, 3), nn.Linear(4 * 49, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(self.images(inputs).view(len(inputs), -1))
        return found


@pytest.mark.parametrize("module", [cnn(nn.BatchNorm2d(8)), cnn(nn.GroupNorm(2, 8)), Viewed()])
def test_other_models_are_trained_by_the_loop_to_the_bit(module: nn.Module) -> None:
    given, local = block(module), Local(batch=4)
    with pytest.raises(CannotRecord):
        AloneTrainer(module, pool(), local, SEED)
    found = alone(module, pool(), local, SEED)
    assert isinstance(found, LoopTrainer)
    expected = LoopTrainer(module, pool(), local, SEED).train(*given)
    assert all(torch.equal(a.model, b.model) for a, b in zip(found.train(*given), expected, strict=True))


class Bag(nn.Module):
    """The mean of the words' vectors, with dropout, then a linear layer."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.drop, self.last = nn.Embedding(words, 64), nn.Dropout(0.2), nn.Linear(64, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.last(self.drop(self.words(ids)).mean(dim=1))
        return found


@pytest.mark.parametrize(("words", "kind"), [(100, BlockTrainer), (50_000, AloneTrainer)])
def test_a_language_model_that_fills_the_caches_goes_one_by_one(words: int, kind: type[BlockTrainer]) -> None:
    torch.manual_seed(1)
    module, images = Bag(words), pool()
    ids = torch.randint(words, (sum(SIZES), 6))
    data = ClientData(ids, images.targets, images.parts)
    for method in ("auto", "vmap"):  # "vmap": as the config of a run that is taken up names it
        found = trainer(module, data, Local(batch=4, optimiser="adamw"), SEED, training=Training(method))
        assert type(found) is kind
        assert found.method == "vmap"
        given = block(module)
        loop = LoopTrainer(module, data, Local(batch=4, optimiser="adamw"), SEED)
        close(found.train(*given), loop.train(*given))


def test_failures_name_the_task_as_the_loop_does() -> None:
    module, local = cnn(), Local(batch=4)
    tasks, bases, none = block(module)
    for given in (
        ([tasks[1]], [torch.zeros(3)], [None]),
        ([tasks[1]], [bases[1]], [torch.zeros(3)]),
        ([Task(3, 9, 0, 0, 0.0)], [bases[1]], [None]),
    ):
        with pytest.raises((InputError, RuntimeError)) as expected:
            LoopTrainer(module, pool(), local, SEED).train(*given)
        with pytest.raises(type(expected.value)) as found:
            AloneTrainer(module, pool(), local, SEED).train(*given)
        assert str(found.value) == str(expected.value)
    with pytest.raises(ValueError, match="shorter"):
        AloneTrainer(module, pool(), local, SEED).train(tasks, bases[:1], none)
