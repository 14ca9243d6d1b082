"""Random crops and flips: by key, alike in every way of training, and in training only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import afield
from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.keys import Stream, mix
from afield.core.types import LocalResult, Task
from afield.scenarios.data import ClientData, ListedData
from afield.training.augment import PADDING, augmented, moves
from afield.training.block import BlockTrainer
from afield.training.choose import Training, trainer
from afield.training.cuda import GraphTrainer
from afield.training.deal import joined
from afield.training.local import Local, LoopTrainer
from afield.training.streams import StreamTrainer
from afield.training.workers import WorkersTrainer

SEED = 9
SIZES = (37, 20, 5, 48)
LOCALS = {
    "sgd": Local(epochs=2, batch=16, augment=True),
    "momentum, unequal steps": Local(batch=16, momentum=0.9, steps=(1, 4, 2, 3), augment=True),
}
MAKERS: dict[str, Any] = {
    "vmap": BlockTrainer,
    "graph": GraphTrainer,
    "streams": StreamTrainer,
    "streams-last": lambda *parts, **more: StreamTrainer(*parts, last=True, **more),
}


def by_hand(image: list[list[float]], down: int, right: int, flip: int) -> list[list[float]]:
    """One channel: pad, cut out, turn round, in plain Python."""
    height, width = len(image), len(image[0])
    empty = [0.0] * (width + 2 * PADDING)
    padded = [list(empty) for _ in range(PADDING)]
    padded += [[0.0] * PADDING + row + [0.0] * PADDING for row in image]
    padded += [list(empty) for _ in range(PADDING)]
    cut = [row[right : right + width] for row in padded[down : down + height]]
    return [row[::-1] for row in cut] if flip else cut


def pool(shape: tuple[int, ...] = (2, 9, 8)) -> ClientData:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(sum(SIZES), *shape, generator=draw)
    targets = torch.randint(4, (sum(SIZES),), generator=draw)
    return ClientData(inputs, targets, list(torch.randperm(sum(SIZES), generator=draw).split(list(SIZES))))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.Tanh(), nn.Linear(8, 4))


def cnn() -> nn.Module:
    """With dropout, which draws from the same key."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(0.3)),
        *(nn.Flatten(), nn.Linear(168, 4)),
    )


def work(module: nn.Module) -> tuple[list[Task], list[Tensor], list[None]]:
    layout, draw = Layout.of(module), torch.Generator().manual_seed(3)
    tasks = [Task(number, client, number, 0, 0.0) for number, client in enumerate((0, 1, 2, 3, 0))]
    bases = [layout.flatten(module) + 0.01 * torch.rand(layout.size, generator=draw) for _ in tasks]
    return tasks, bases, [None] * len(tasks)


def same(found: Sequence[LocalResult], right: Sequence[LocalResult]) -> None:
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one.model.cpu(), other.model, rtol=1e-5, atol=1e-5)
        assert (one.examples, one.steps) == (other.examples, other.steps)
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-4)


# ---- what is done to an image


def test_crops_and_flips_by_hand() -> None:
    images = torch.arange(1.0, 1 + 30 * 2 * 5 * 7).view(30, 2, 5, 7)
    key, step = torch.tensor(mix(1, 2, 3) >> 1), torch.tensor(4)
    found = augmented(images, key, step)
    down, right, flip = (move.tolist() for move in moves(key, step, 30))
    for number, image in enumerate(images.tolist()):
        expected = [by_hand(channel, down[number], right[number], flip[number]) for channel in image]
        assert found[number].tolist() == expected
    assert set(flip) == {0, 1} and max(down) > PADDING > min(down)


def test_the_centre_without_a_flip_is_the_image_itself() -> None:
    images = torch.randn(400, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    key, step = torch.tensor(77), torch.tensor(0)
    down, right, flip = moves(key, step, 400)
    centred = (down == PADDING) & (right == PADDING)
    found = augmented(images, key, step)
    assert (centred & (flip == 0)).any() and (centred & (flip == 1)).any()
    for number in centred.nonzero().flatten().tolist():
        image = images[number].flip(-1) if flip[number] else images[number]
        assert torch.equal(found[number], image)


def test_moves_are_uniform_and_independent() -> None:
    keys = torch.arange(500) * 977 + 5
    down, right, flip = moves(keys, torch.full_like(keys, 3), 60)
    table = torch.bincount((down * 18 + right * 2 + flip).flatten(), minlength=162).double()
    assert len(table) == 162
    expected = 30_000 / 162
    # chi-square of 161 degrees of freedom: mean 161, deviation 18
    assert float(((table - expected) ** 2 / expected).sum()) < 161 + 5 * 18
    other = moves(keys, torch.full_like(keys, 4), 60)[0]
    assert abs(float((down == other).double().mean()) - 1 / 9) < 0.01  # the next step draws anew


def test_many_rows_are_each_row_alone() -> None:
    images = torch.randn(3, 6, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    keys, step = torch.tensor([5, 2**62 + 11, 5]), torch.tensor([1000, 2, 3])
    together = augmented(images, keys, step)
    for row in range(3):
        assert torch.equal(together[row], augmented(images[row], keys[row], step[row]))


# ---- every way of training


class Seen(nn.Module):
    """Remembers what it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(144, 4), []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(inputs.detach().clone())
        found: Tensor = self.inner(inputs.flatten(1))
        return found


def test_the_loop_trains_on_images_moved_by_seed_client_count_step_and_place() -> None:
    module, data = Seen(), pool()
    local = LOCALS["sgd"]
    loop = LoopTrainer(module, data, local, SEED)
    plain = LoopTrainer(Seen(), data, replace(local, augment=False), SEED)
    task, base = Task(7, 1, 3, 0, 0.0), Layout.of(module).flatten(module)
    loop.train([task], [base], [None])
    plain.train([task], [base], [None])
    key = torch.tensor(mix(SEED, 1, 3, Stream.DROPOUT) >> 1)
    shown, given = loop._module.seen, plain._module.seen
    assert len(shown) == len(given) == 4
    for step, (batch, images) in enumerate(zip(shown, given, strict=True)):
        down, right, flip = (move.tolist() for move in moves(key, torch.tensor(step), len(images)))
        for place, image in enumerate(images.tolist()):
            expected = [by_hand(channel, down[place], right[place], flip[place]) for channel in image]
            assert batch[place].tolist() == expected


@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS.keys())
@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("maker", MAKERS)
def test_every_way_as_in_the_loop(maker: str, make: Any, local: Local) -> None:
    module, data = make(), pool()
    tasks, bases, none = work(module)
    right = LoopTrainer(module, data, local, SEED).train(tasks, bases, none)
    plain = LoopTrainer(module, data, replace(local, augment=False), SEED).train(tasks, bases, none)
    assert float((right[0].model - plain[0].model).abs().max()) > 1e-3
    fast = MAKERS[maker](module, data, local, SEED, device="cpu")
    same(fast.train(tasks, bases, none), right)
    same(fast.train(tasks[2:], bases[2:], none[2:]), right[2:])


@pytest.mark.parametrize("make", [mlp, cnn])
def test_workers_as_in_the_loop(make: Any) -> None:
    module, data, local = make(), pool(), LOCALS["sgd"]
    tasks, bases, none = work(module)
    right = LoopTrainer(module, data, local, SEED).train(tasks, bases, none)
    with WorkersTrainer(module, data, local, SEED, workers=2) as fast:
        same(fast.train(tasks, bases, none), right)


def test_listed_data_as_pooled_data() -> None:
    module, data, local = cnn(), pool(), LOCALS["sgd"]
    tasks, bases, none = work(module)
    listed = ListedData([TensorDataset(data.inputs[part], data.targets[part]) for part in data.parts])
    right = LoopTrainer(module, data, local, SEED).train(tasks, bases, none)
    found = LoopTrainer(module, listed, local, SEED).train(tasks, bases, none)
    assert all(torch.equal(one.model, other.model) for one, other in zip(found, right, strict=True))


def test_runs_with_two_seeds_train_together() -> None:
    module, data, local = cnn(), pool(), LOCALS["sgd"]
    tasks, bases, none = work(module)
    several = [BlockTrainer(module, data, local, seed) for seed in (1, 2)]
    right = [r for seed in (1, 2) for r in LoopTrainer(module, data, local, seed).train(tasks, bases, none)]
    same(several[0].run(joined([one.deal(tasks, bases, none) for one in several])), right)


@pytest.fixture
def exact() -> Iterator[None]:
    """No TF32: the CPU has none."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS.keys())
@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("maker", ["loop", "graph", "streams", "streams-last"])
def test_every_way_on_a_gpu_as_in_the_loop_on_a_cpu(maker: str, make: Any, local: Local) -> None:
    module, data = make(), pool()
    tasks, bases, none = work(module)
    right = LoopTrainer(module, data, local, SEED).train(tasks, bases, none)
    kind = LoopTrainer if maker == "loop" else MAKERS[maker]
    fast = kind(module, data, local, SEED, device="cuda")
    there = [base.cuda() for base in bases]
    for rows in (slice(0, 5), slice(2, 5), slice(0, 5)):  # the last time from graphs that are there
        same(fast.train(tasks[rows], there[rows], none[rows]), right[rows])


# ---- and nowhere else


def test_measuring_and_distilling_see_the_images_as_they_are() -> None:
    """Black training images stay black wherever they are cut, so that only test and unlabelled ones could differ."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (60,), generator=draw)
    clients = [TensorDataset(torch.zeros(20, 2, 9, 8), labels[k::3]) for k in range(3)]
    test, unlabelled = (torch.randn(50, 2, 9, 8, generator=draw) for _ in range(2))
    one, other = (
        afield.simulate(
            afield.FedEcho(size=2, rate=0.01),
            mlp(),
            clients,
            test=(test, torch.randint(4, (50,), generator=torch.Generator().manual_seed(1))),
            unlabelled=unlabelled,
            local=Local(batch=8, augment=augment),
            updates=12,
            measure_versions=1,
        )
        for augment in (False, True)
    )
    assert len(one.metrics) > 4
    rows = [[{k: v for k, v in row.items() if k != "wall"} for row in run.metrics] for run in (one, other)]
    assert rows[0] == rows[1]
    layout = Layout.of(one.model)
    assert torch.equal(layout.flatten(one.model), layout.flatten(other.model))


@pytest.mark.parametrize("method", ["loop", "vmap", "workers"])
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(6, 5), r"inputs of shape \(5,\) are no images"),
        (torch.zeros(6, 1, 5, 5).long(), "no images"),
    ],
)
def test_what_is_no_image_is_refused_before_the_first_task(method: str, inputs: Tensor, message: str) -> None:
    data = ClientData(inputs, torch.zeros(6, dtype=torch.long), [torch.arange(6)])
    module = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0].numel(), 2))
    if not inputs.is_floating_point():
        module = nn.Sequential(nn.Flatten(), nn.Embedding(3, 2), nn.Flatten(), nn.Linear(50, 2))
    with pytest.raises(InputError, match=message):
        trainer(module, data, Local(augment=True), SEED, training=Training(method))
