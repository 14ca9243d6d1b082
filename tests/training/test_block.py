"""Many clients at once: every fast trainer gives what the loop gives, for every option and any mix of clients."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.types import LocalResult, Task
from afield.scenarios.data import ClientData, ListedData
from afield.training import cuda
from afield.training.block import BlockTrainer
from afield.training.choose import Training, choose, trainer
from afield.training.cuda import GraphTrainer, bucket, uncollected
from afield.training.deal import joined
from afield.training.local import Local, LoopTrainer
from afield.training.models import MODELS, Point, build
from afield.training.streams import StreamTrainer
from afield.training.tape import CannotRecord

SEED = 5
SIZES = (37, 60, 20, 5, 8, 70)
MAKERS: dict[str, Any] = {
    "vmap": BlockTrainer,
    "graph": GraphTrainer,
    "streams": StreamTrainer,
    "streams-last": lambda *parts, **more: StreamTrainer(*parts, last=True, **more),
}


def pool(shape: tuple[int, ...] = (1, 8, 8), sizes: Sequence[int] = SIZES, classes: int = 4) -> ClientData:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(sum(sizes), *shape, generator=draw)
    targets = torch.randint(classes, (sum(sizes),), generator=draw)
    order = torch.randperm(sum(sizes), generator=draw)
    return ClientData(inputs, targets, list(order.split(list(sizes))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 4))


def cnn() -> nn.Module:
    """Convolutions, one strided; norms; a residual; dropout. No bias before batch norm: its gradient is 0."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Tanh(), nn.MaxPool2d(2), Residual(6)),
        *(nn.Conv2d(6, 4, 3, stride=2, padding=1), nn.Dropout(0.3), nn.Flatten(), nn.Linear(16, 4)),
    )


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm, self.group = nn.BatchNorm2d(channels, affine=False), nn.GroupNorm(2, channels)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.norm(self.group(self.inner(inputs)).tanh())


def frozen() -> nn.Module:
    module = mlp()
    module[1].weight.requires_grad_(False)
    return module


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(64, 4)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.second(self.first(inputs).tanh()).flatten(1))


class Skips(nn.Module):
    """One layer is read by its ReLU alone, the other also beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(inputs.flatten(1)).relu())
        return self.last(hidden.relu() + hidden)


def pools() -> nn.Module:
    """Convolutions that end in ReLU and max pooling: of many clients they go by training/convpool.py."""
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(3, 18, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(72, 4)),
    )


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "pools": pools,
    "frozen": frozen,
    "tied": Tied,
    "skips": Skips,
}
LOCALS = {
    "sgd": Local(epochs=2, batch=16),
    "one short batch": Local(batch=100),
    "momentum": Local(batch=16, momentum=0.9, weight_decay=0.01),
    "prox": Local(batch=16, prox=0.5, weight_decay=0.01),
    "adamw": Local(batch=16, optimiser="adamw", rate=0.002, weight_decay=0.1),
    "unequal steps": Local(batch=16, steps=(1, 7, 2, 3, 9, 4)),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]()


def work(module: nn.Module, bent: bool = False) -> tuple[list[Task], list[Tensor], list[Tensor | None]]:
    """One task of every client, and a second of client 0, from bases of their own."""
    draw, layout = torch.Generator().manual_seed(3), Layout.of(module)
    tasks = [Task(number, client, number, 0, 0.0) for number, client in enumerate((0, 1, 2, 3, 4, 5, 0))]
    bases = [layout.flatten(module) + 0.01 * torch.rand(layout.size, generator=draw) for _ in tasks]
    corrections = [0.1 * torch.randn(layout.parameters, generator=draw) if bent else None for _ in tasks]
    if bent:
        corrections[2] = None
    return tasks, bases, corrections


def same(found: Sequence[LocalResult], right: Sequence[LocalResult], near: float = 1e-5) -> None:
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one.model, other.model, rtol=near, atol=near)
        assert (one.examples, one.steps, one.rate) == (other.examples, other.steps, other.rate)
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-4)
        assert one.finite is True


@pytest.mark.parametrize("bent", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS.keys())
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("maker", MAKERS)
def test_every_option_as_in_the_loop(maker: str, module: str, local: Local, bent: bool) -> None:
    built, data = made(module), pool()
    tasks, bases, corrections = work(built, bent)
    before = [base.clone() for base in bases]
    right = LoopTrainer(built, data, local, SEED).train(tasks, bases, corrections)
    fast = MAKERS[maker](built, data, local, SEED, device="cpu")
    same(fast.train(tasks, bases, corrections), right)
    same(fast.train(tasks[4:], bases[4:], corrections[4:]), right[4:])  # fewer, after what was left behind
    assert all(torch.equal(one, other) for one, other in zip(before, bases, strict=True))


def test_images_that_take_much_room_are_trained_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    built, data, local = made("pools"), pool(), Local(batch=16)
    tasks, bases, corrections = work(built)
    right = LoopTrainer(built, data, local, SEED).train(tasks, bases, corrections)
    fast = GraphTrainer(built, data, local, SEED, device="cpu")
    assert fast.capacity == cuda.WIDEST
    monkeypatch.setattr(
        cuda, "IMAGES", 3 * 16 * 64 * 18 * 4
    )  # batch, pixels, the widest convolution, float32
    assert fast.capacity == 3
    same(fast.train(tasks, bases, corrections), right)


@pytest.mark.parametrize("maker", [name for name in MAKERS if name.startswith("streams")])
def test_a_late_result_of_a_stream_keeps_nothing_but_itself(maker: str) -> None:
    built = made("cnn")
    tasks, bases, corrections = work(built)
    for result in MAKERS[maker](built, pool(), Local(batch=16), SEED, device="cpu").train(
        tasks, bases, corrections
    ):
        assert result.model.untyped_storage().nbytes() == result.model.numel() * result.model.itemsize


@pytest.fixture
def exact() -> Iterator[None]:
    """No TF32: the CPU has none."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("bent", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS.keys())
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("maker", [name for name in MAKERS if name != "vmap"])
def test_every_option_on_a_gpu_as_in_the_loop_on_a_cpu(
    maker: str, module: str, local: Local, bent: bool
) -> None:
    built, data = made(module), pool()
    tasks, bases, corrections = work(built, bent)
    right = LoopTrainer(built, data, local, SEED).train(tasks, bases, corrections)
    fast = MAKERS[maker](built, data, local, SEED, device="cuda")
    there = ([base.cuda() for base in bases], [None if c is None else c.cuda() for c in corrections])
    for rows in (slice(0, 7), slice(4, 7), slice(0, 7)):  # the last time from graphs that are there
        found = fast.train(tasks[rows], there[0][rows], there[1][rows])
        same([replace(result, model=result.model.cpu()) for result in found], right[rows])


HALVED = [
    pytest.param(device, maker, module, marks=[pytest.mark.gpu] if device == "cuda" else [])
    for device in ("cpu", "cuda")
    for maker in ("graph", "streams", "streams-last")
    for module in MODULES
    # skips: one unit on the other side of its ReLU's kink, and a step is 20 % apart, in torch's own autocast too;
    # pools: likewise where another of a window is the largest (in bfloat16: test_convpool.py)
    # cnn by stacked convolutions: a CPU has none in bfloat16
    if module not in ("skips", "pools") and (device, maker, module) != ("cpu", "graph", "cnn")
]


@pytest.mark.parametrize(("device", "maker", "module"), HALVED)
def test_bfloat16_is_near(device: str, maker: str, module: str) -> None:
    built, data = made(module), pool()
    tasks, bases, corrections = work(built)
    local = Local(batch=16)
    right = LoopTrainer(built, data, local, SEED).train(tasks, bases, corrections)
    fast = MAKERS[maker](built, data, local, SEED, device=device, precision="bfloat16")
    found = fast.train(tasks, [base.to(device) for base in bases], corrections)
    for one, other, base in zip(found, right, bases, strict=True):
        moved = (other.model - base).norm()
        # 8 bits of mantissa: up to 0.02 on an H200
        assert float((one.model.cpu() - other.model).norm() / moved) < 0.05
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=0.05)


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_during_a_capture_and_collection_goes_on_as_before(collects: bool) -> None:
    if not collects:
        gc.disable()
    try:
        with suppress(ZeroDivisionError), uncollected():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() is collects
    finally:
        gc.enable()


@pytest.mark.gpu
def test_graphs_of_a_lost_trainer_do_not_break_a_capture() -> None:
    built, data = made("mlp"), pool()
    tasks, bases, corrections = work(built)
    there = [base.cuda() for base in bases]
    lost: Any = StreamTrainer(built, data, Local(batch=16), SEED, device="cuda")
    first = lost.train(tasks, there, corrections)
    lost.itself = lost  # only the garbage collector frees it
    often = gc.get_threshold()
    gc.collect()
    gc.set_threshold(5)
    try:
        del lost
        again = StreamTrainer(built, data, Local(batch=16), SEED, device="cuda")
        same(again.train(tasks, there, corrections), first)
    finally:
        gc.set_threshold(*often)


@pytest.mark.gpu
def test_a_compiled_step_is_the_same_step() -> None:
    built, data = made("cnn"), pool()
    tasks, bases, corrections = work(built)
    local, there = Local(batch=16), [base.cuda() for base in bases]
    plain, quick = (
        StreamTrainer(built, data, local, SEED, device="cuda", compiling=compiling)
        for compiling in (False, True)
    )
    same(quick.train(tasks, there, corrections), plain.train(tasks, there, corrections), 1e-3)


READERS = ("bert", "distilbert", "causal-lm")  # need a tokeniser first: test_text.py


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("point", "resnet18", *READERS)])
def test_the_models_of_the_papers(name: str) -> None:
    shape = {"linear": (6,), "mlp": (6,)}.get(name, (3, 16, 16))
    module, data = build(MODELS[name](), shape, 4, 0), pool(shape, (9, 16, 8))
    tasks = [Task(number, number, 0, 0, 0.0) for number in range(3)]
    bases = [Layout.of(module).flatten(module)] * 3
    local = Local(batch=8, rate=0.01)
    right = LoopTrainer(module, data, local, SEED).train(tasks, bases, [None] * 3)
    same(BlockTrainer(module, data, local, SEED).train(tasks, bases, [None] * 3), right, 1e-4)
    same(StreamTrainer(module, data, local, SEED, device="cpu").train(tasks, bases, [None] * 3), right, 1e-4)


@pytest.mark.parametrize("loss", ["mse", "value"])
@pytest.mark.parametrize("maker", MAKERS)
def test_other_losses(maker: str, loss: str) -> None:
    draw = torch.Generator().manual_seed(0)
    if loss == "value":
        rows = torch.tensor(
            [[1.0, 0.0, 0.2, -2.0, -1.0], [0.2, 0.0, 1.0, 2.0, 1.0], [1.0, 0.0, 1.0, 0.0, 1.0]]
        )
        module, data = (
            build(Point(), (5,), 1, 0),
            ClientData(rows, torch.zeros(3), list(torch.arange(3).split([1, 2]))),
        )
    else:
        module = nn.Linear(3, 1)
        inputs, targets = torch.randn(13, 3, generator=draw), torch.randn(13, generator=draw)
        data = ClientData(inputs, targets, list(torch.arange(13).split([6, 7])))
    tasks, bases = [Task(0, 0, 0, 0, 0.0), Task(1, 1, 0, 0, 0.0)], [Layout.of(module).flatten(module)] * 2
    local = Local(batch=4, steps=3)
    right = LoopTrainer(module, data, local, SEED, loss).train(tasks, bases, [None] * 2)
    same(MAKERS[maker](module, data, local, SEED, loss, device="cpu").train(tasks, bases, [None] * 2), right)


def test_a_block_larger_than_there_are_streams() -> None:
    built, data = made("cnn"), pool()
    tasks = [Task(number, number % 6, number, 0, 0.0) for number in range(21)]
    bases = [Layout.of(built).flatten(built)] * 21
    local = Local(batch=16)
    right = LoopTrainer(built, data, local, SEED).train(tasks, bases, [None] * 21)
    same(StreamTrainer(built, data, local, SEED, device="cpu").train(tasks, bases, [None] * 21), right)


def test_a_block_larger_than_the_caches() -> None:
    torch.manual_seed(0)
    built = nn.Sequential(nn.Flatten(), nn.Linear(64, 10_000), nn.ReLU(), nn.Linear(10_000, 4))
    data, local = pool(), Local(batch=16, steps=(1, 2, 1, 1, 2, 3), rate=0.001)
    tasks, bases, corrections = work(built)
    fast = BlockTrainer(built, data, local, SEED)
    right = LoopTrainer(built, data, local, SEED).train(tasks, bases, corrections)
    same(fast.train(tasks, bases, corrections), right)
    assert max(len(part) for part in fast._room) == 4


def test_a_trainer_gives_its_memory_back_at_once() -> None:
    built, data = made("mlp"), pool()
    tasks, bases, corrections = work(built)
    fast = BlockTrainer(built, data, Local(batch=16), SEED)
    fast.train(tasks, bases, corrections)
    room = weakref.ref(fast._room[0])
    other = fast.sibling(data, SEED + 1)
    assert other.engine is fast and other.sibling(data, SEED + 2).engine is fast
    gc.disable()  # which would come some time later
    try:
        del fast, other
        assert room() is None
    finally:
        gc.enable()


def test_deals_of_several_runs_train_as_one() -> None:
    built, data = made("cnn"), pool()
    tasks, bases, corrections = work(built)
    local = Local(batch=16, steps=(1, 2, 3, 4, 5, 6))
    several = [BlockTrainer(built, data, local, seed) for seed in (1, 2)]
    deals = [one.deal(tasks, bases, corrections) for one in several]
    right = [result for one in several for result in one.train(tasks, bases, corrections)]
    same(several[0].run(joined(deals)), right)


def test_results_do_not_depend_on_company() -> None:
    built, data = made("mlp"), pool()
    tasks, bases, corrections = work(built)
    fast = BlockTrainer(built, data, Local(batch=16), SEED)
    together = fast.train(tasks, bases, corrections)
    alone = [fast.train([t], [b], [c])[0] for t, b, c in zip(tasks, bases, corrections, strict=True)]
    same(alone, together, 1e-6)


def test_what_is_not_finite_is_said_per_task() -> None:
    built, data = made("mlp"), pool()
    tasks, bases, corrections = work(built)
    bases[1] = bases[1].clone().fill_(torch.inf)
    found = BlockTrainer(built, data, Local(batch=16), SEED).train(tasks, bases, corrections)
    assert [result.finite for result in found] == [True, False, True, True, True, True, True]


def test_torchs_own_stream_and_the_module_are_left_alone() -> None:
    built, data = made("cnn"), pool()
    tasks, bases, corrections = work(built)
    state, values = torch.get_rng_state(), {k: v.clone() for k, v in built.state_dict().items()}
    BlockTrainer(built, data, Local(batch=16), SEED).train(tasks, bases, corrections)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(values[name], value) for name, value in built.state_dict().items())


# -- what it cannot take -------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.inner(inputs.flatten(1))
        return found * 2 if found.sum() > 0 else found


class Mixes(Branches):
    """An example's outputs depend on the others in its batch, which a filled-up batch would change."""

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.inner(inputs.flatten(1))
        return found - 10 * found.mean(dim=0)


class Draws(Branches):
    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.dropout(self.inner(inputs.flatten(1)), 0.5, self.training)


class Remembers(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.inner(inputs.flatten(1))
        self.seen.add_(found.detach().sum(dim=0))
        return found


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a branch on values": (Branches, "data-dependent|depends on the values|data_dependent"),
    "examples that mix": (Mixes, "do not train alone"),
    "its own random numbers": (Draws, "random"),
    "a buffer of its own": (Remembers, "seen"),
    "statistics of another kind": (
        lambda: nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(), nn.Linear(64, 4)),
        "InstanceNorm2d",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_recorded_is_trained_by_the_loop(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = REFUSED[case]
    module, data = make(), pool()
    with pytest.raises(CannotRecord, match=f"(?i){reason}"):
        BlockTrainer(module, data, Local(batch=16), SEED)
    with caplog.at_level(logging.WARNING, "afield"):
        found = trainer(module, data, Local(batch=16), SEED, training=Training("vmap"))
    assert found.method == "loop"
    assert len(caplog.records) == 1 and "it trains by the loop" in caplog.text


def test_data_that_is_no_pool_is_trained_by_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    rows = torch.utils.data.TensorDataset(torch.randn(9, 1, 8, 8), torch.zeros(9, dtype=torch.long))
    found = trainer(mlp(), ListedData([rows]), Local(), SEED)
    assert found.method == "loop" and "pool" in caplog.text


def test_a_batch_of_one_example_and_batch_norm_over_rows() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4))
    with pytest.raises(CannotRecord, match="one example"):
        BlockTrainer(module, pool(sizes=(17, 16)), Local(batch=16), SEED)


def test_a_base_of_another_size_names_client_and_task() -> None:
    fast = BlockTrainer(made("mlp"), pool(), Local(batch=16), SEED)
    with pytest.raises(InputError, match=r"client 3, task 8.*not a model"):
        fast.train([Task(8, 3, 0, 0, 0.0)], [torch.zeros(5)], [None])


# -- which method --------------------------------------------------------------------------------------------


def test_the_rule_goes_by_model_and_device() -> None:
    assert choose(mlp(), "cpu", cores=2) == "vmap"
    assert choose(cnn(), "cpu", cores=2) == "workers"
    assert choose(cnn(), "cpu", cores=1) == "loop"
    assert choose(cnn(), "cuda") == choose(mlp(), "cuda") == "graph"


@pytest.mark.parametrize(
    ("training", "device", "message"),
    [
        (Training("graph"), "cpu", "needs a GPU"),
        (Training("workers"), "cuda", "for CPUs"),
    ],
)
def test_a_method_that_the_device_has_not(training: Training, device: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        trainer(mlp(), pool(), Local(), SEED, device=device, training=training)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "vmpa"}, "vmap"),
        ({"precision": "float16"}, "bfloat16"),
        ({"method": "loop", "precision": "bfloat16"}, "for method = 'graph'"),
        ({"method": "vmap", "channels_last": True}, "for method = 'graph'"),
    ],
)
def test_settings_that_mean_nothing(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Training(**wrong)


def test_widths_of_graphs() -> None:
    assert [bucket(width) for width in (1, 2, 3, 4, 5, 6, 7, 9, 13, 100)] == [
        1,
        2,
        3,
        4,
        6,
        6,
        8,
        12,
        16,
        128,
    ]
    assert all(width <= bucket(width) < 1.5 * width + 1 for width in range(1, 300))
