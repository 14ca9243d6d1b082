"""Local training, against plain torch loops over per-tensor optimisers written here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.keys import Stream, mix
from afield.core.types import LocalResult, Task
from afield.training.draws import APART, drawn, shuffled
from afield.training.local import Local, LoopTrainer, batches, check_fits, loss_function
from afield.training.models import Point, build

SEED = 11


class Rows:
    """Random rows and labels; sizes differ, client 3 has nothing."""

    sizes: Sequence[int] = (10, 7, 4, 0)

    def __init__(self, features: int = 3, classes: int = 4) -> None:
        words = torch.Generator().manual_seed(2)
        self.inputs = [torch.randn(size, features, generator=words) for size in self.sizes]
        self.targets = [torch.randint(classes, (size,), generator=words) for size in self.sizes]

    def batch(self, client: int, positions: Tensor) -> tuple[Any, Tensor]:
        return self.inputs[client][positions], self.targets[client][positions]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))


def task(client: int, count: int = 0, number: int = 0) -> Task:
    return Task(number=number, client=client, count=count, version=0, started=0.0)


def flat(module: nn.Module) -> Tensor:
    return Layout.of(module).flatten(module)


def trained(module: nn.Module, local: Local, client: int, **options: Any) -> LocalResult:
    correction = options.pop("correction", None)
    trainer = LoopTrainer(module, Rows(), local, SEED, **options)
    return trainer.train([task(client)], [flat(module)], [correction])[0]


def shuffle(size: int, client: int, epoch: int) -> list[int]:
    """The order of an epoch of the first task: sorted by a hash of 64 bits, in Python's own integers."""
    word = (1 << 64) - 1

    def signed(value: int) -> int:
        value &= word
        return value - (1 << 64) if value >> 63 else value

    key = signed((mix(SEED, client, 0, Stream.BATCHES) >> 1) + epoch * 0x1E3779B97F4A7C15)

    def rank(place: int) -> int:
        x = signed(signed((place ^ (key & 0x7FFFFFFFFFFF)) * 0x5851F42D4C957F2D) + (key >> 17))
        x = signed((x ^ ((x >> 29) & 0x7FFFFFFFF)) * 0x14057B7EF767814F)
        x = signed((x ^ ((x >> 32) & 0xFFFFFFFF)) * 0x5851F42D4C957F2D)
        return (x ^ ((x >> 31) & 0x1FFFFFFFF)) & 0x7FFFFFFFFFFFFFFF

    return sorted(range(size), key=rank)


def reference(
    module: nn.Module,
    client: int,
    make: Callable[[Any], torch.optim.Optimizer],
    epochs: int,
    batch: int,
    extra: Callable[[nn.Module], Tensor] | None = None,
) -> tuple[nn.Module, float]:
    """The usual loop: autograd's loss plus `extra`, an optimiser of many tensors."""
    module, data, losses = copy.deepcopy(module).train(), Rows(), []
    optimiser = make([p for p in module.parameters() if p.requires_grad])
    for epoch in range(epochs):
        order = torch.tensor(shuffle(len(data.inputs[client]), client, epoch))
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            loss = functional.cross_entropy(module(data.inputs[client][rows]), data.targets[client][rows])
            losses.append(loss.item())
            optimiser.zero_grad()
            (loss if extra is None else loss + extra(module)).backward()
            optimiser.step()
    return module, sum(losses) / len(losses)


# ---- the batches ----


def test_batches_cover_every_epoch_and_keep_the_short_one() -> None:
    given = batches(Local(epochs=2, batch=4), 0, 10, (SEED, 0, 0))
    assert [len(part) for part in given] == [4, 4, 2, 4, 4, 2]
    assert sorted(torch.cat(given[:3]).tolist()) == sorted(torch.cat(given[3:]).tolist()) == list(range(10))
    assert torch.cat(given[:3]).tolist() != torch.cat(given[3:]).tolist()
    assert torch.cat(given).tolist() == shuffle(10, 0, 0) + shuffle(10, 0, 1)


def test_steps_go_on_through_epochs_and_override_them() -> None:
    by_epochs = batches(Local(epochs=3, batch=4), 0, 10, (SEED, 0, 0))
    by_steps = batches(Local(epochs=9, steps=7, batch=4), 0, 10, (SEED, 0, 0))
    assert len(by_steps) == 7
    assert all(torch.equal(a, b) for a, b in zip(by_epochs, by_steps, strict=False))


def test_shuffles_are_even() -> None:
    """Each of the 24 orders of 4 comes up about as often: chi squared of 23 degrees, 99.9 % below 49.7."""
    keys = torch.tensor([mix(number) >> 1 for number in range(4800)])
    orders = shuffled(keys, 1, torch.full_like(keys, 4), 4)[:, 0]
    counts = torch.unique(orders, dim=0, return_counts=True)[1].double()
    assert len(counts) == 24
    assert float(((counts - 200) ** 2 / 200).sum()) < 49.7


def test_batches_depend_on_every_word_of_the_key() -> None:
    local = Local(batch=50)
    orders = {
        tuple(batches(local, 0, 50, key)[0].tolist()) for key in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]
    }
    assert len(orders) == 4
    assert torch.equal(batches(local, 0, 50, (1, 0, 0))[0], batches(local, 0, 50, (1, 0, 0))[0])


def test_work() -> None:
    assert Local(epochs=3, batch=4).work(0, 10) == 9
    assert Local(steps=5).work(2, 10) == 5
    assert Local(steps=(5, 6, 7)).work(2, 10) == 7
    assert Local(steps=5).work(0, 0) == Local().work(0, 0) == 0
    with pytest.raises(InputError, match="steps has 3 numbers, but there is a client 3"):
        Local(steps=(5, 6, 7)).work(3, 10)


# ---- each rule against the usual loop ----


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({}, lambda weights: torch.optim.SGD(weights, lr=0.1)),
        ({"momentum": 0.9}, lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9)),
        ({"weight_decay": 0.3}, lambda weights: torch.optim.SGD(weights, lr=0.1, weight_decay=0.3)),
        (
            {"momentum": 0.5, "weight_decay": 0.3},
            lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.5, weight_decay=0.3),
        ),
        (
            {"optimiser": "adamw", "weight_decay": 0.2},
            lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.2),
        ),
    ],
)
@pytest.mark.parametrize("client", [0, 1])
def test_optimisers(options: dict[str, Any], make: Any, client: int) -> None:
    module = mlp()
    result = trained(module, Local(epochs=3, batch=4, rate=0.1, **options), client)
    expected, loss = reference(module, client, make, epochs=3, batch=4)
    torch.testing.assert_close(result.model, flat(expected), rtol=1e-5, atol=1e-6)
    assert result.metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert (result.examples, result.steps, result.rate) == (Rows.sizes[client], (9, 6)[client], 0.1)
    assert float((result.model - flat(module)).abs().max()) > 0.01


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1)


def test_prox_pulls_to_the_base() -> None:
    module = mlp()
    base = [parameter.detach().clone() for parameter in module.parameters()]

    def pull(now: nn.Module) -> Tensor:
        return sum(0.8 / 2 * (p - b).pow(2).sum() for p, b in zip(now.parameters(), base, strict=True))

    result = trained(module, Local(epochs=3, batch=4, rate=0.1, prox=0.8), 0)
    expected, loss = reference(module, 0, sgd, 3, 4, pull)
    torch.testing.assert_close(result.model, flat(expected), rtol=1e-5, atol=1e-6)
    assert result.metrics["loss"] == pytest.approx(loss, abs=1e-6)  # the loss of the data alone
    assert not torch.allclose(result.model, trained(module, Local(epochs=3, batch=4, rate=0.1), 0).model)


def test_a_correction_is_added_to_every_gradient() -> None:
    module = mlp()
    correction = torch.linspace(-1, 1, Layout.of(module).parameters)

    def lean(now: nn.Module) -> Tensor:
        return torch.dot(torch.cat([p.reshape(-1) for p in now.parameters()]), correction)

    result = trained(module, Local(epochs=2, batch=4, rate=0.1), 0, correction=correction)
    expected, _ = reference(module, 0, sgd, 2, 4, lean)
    torch.testing.assert_close(result.model, flat(expected), rtol=1e-5, atol=1e-6)
    assert torch.equal(correction, torch.linspace(-1, 1, len(correction)))


def test_two_steps_on_a_quadratic_by_hand() -> None:
    class Quadratics:
        sizes = (1,)

        def batch(self, client: int, positions: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tensor([[2.0, 0.0, 4.0, 1.0, 1.0]]), torch.zeros(1)

    module = build(Point(start=(0.0, 0.0)), (5,), 1, 0)
    local = Local(steps=2, rate=0.125, momentum=0.5, prox=1.0)
    base = torch.tensor([2.0, 3.0])  # the base counts, not the module's own start
    result = LoopTrainer(module, Quadratics(), local, 0, loss="value").train([task(0)], [base], [None])[0]
    # A = diag(2, 4), c = (1, 1). Step 1: g = (2, 8), w = (2, 3) - g/8 = (1.75, 2), v = (2, 8).
    # Step 2: g = (1.5, 4) + prox (-.25, -1) = (1.25, 3), v = (1, 4) + g = (2.25, 7), w = (1.46875, 1.125).
    assert result.model.tolist() == [1.46875, 1.125]
    # Losses: 1/2 (2*1 + 4*4) = 9 and 1/2 (2*.5625 + 4*1) = 2.5625.
    assert result.metrics["loss"] == (9 + 2.5625) / 2


# ---- frozen and tied parameters ----


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"optimiser": "adamw"}])
def test_frozen_parameters_never_move(options: dict[str, Any]) -> None:
    module = mlp()
    module[0].bias.requires_grad_(False)  # in the middle: two runs of trainable weights
    correction = torch.ones(Layout.of(module).parameters)
    local = Local(epochs=2, batch=4, rate=0.1, weight_decay=0.3, prox=0.2, **options)
    result = trained(module, local, 0, correction=correction)
    views = Layout.of(module).views(result.model)
    assert torch.equal(views["0.bias"], module[0].bias)
    for name in ("0.weight", "2.weight", "2.bias"):
        assert not torch.isclose(views[name], module.get_parameter(name)).any()


def test_frozen_parameters_leave_the_others_as_the_usual_loop_does() -> None:
    module = mlp()
    module[0].bias.requires_grad_(False)
    result = trained(module, Local(epochs=2, batch=4, rate=0.1, weight_decay=0.3), 0)
    expected, _ = reference(module, 0, lambda w: torch.optim.SGD(w, lr=0.1, weight_decay=0.3), 2, 4)
    torch.testing.assert_close(result.model, flat(expected), rtol=1e-5, atol=1e-6)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(InputError, match="0 parameters of the model have requires_grad"):
        LoopTrainer(mlp().requires_grad_(False), Rows(), Local(), SEED)


def test_tied_parameters_get_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 4)
            self.two.weight = self.one.weight

        def forward(self, rows: Tensor) -> Tensor:
            return self.out(self.two(torch.tanh(self.one(rows))))

    torch.manual_seed(0)
    module = Tied()
    result = trained(module, Local(epochs=2, batch=4, rate=0.1), 0)
    expected, _ = reference(module, 0, sgd, 2, 4)
    torch.testing.assert_close(result.model, flat(expected), rtol=1e-5, atol=1e-6)


# ---- statistics ----


def test_batch_norm_statistics_are_the_mean_over_the_batches() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))  # statistics of the inputs themselves
    layout, data, local = Layout.of(module), Rows(), Local(epochs=2, batch=4, rate=0.1)
    trainer = LoopTrainer(module, data, local, SEED)
    base = flat(module)
    layout.views(base)["0.running_mean"].fill_(100)  # what the base had does not count
    seen = [data.inputs[0][rows] for rows in batches(local, 0, 10, (SEED, 0, 0))]
    for result in trainer.train([task(0), task(0)], [base, base], [None, None]):  # also the second time
        views = layout.views(result.model)
        torch.testing.assert_close(views["0.running_mean"], torch.stack([b.mean(0) for b in seen]).mean(0))
        torch.testing.assert_close(views["0.running_var"], torch.stack([b.var(0) for b in seen]).mean(0))


def test_batch_norm_weights_follow_the_usual_loop() -> None:
    module = normed()
    for part in (module[1], module[4]):
        part.momentum = None
    result = trained(module, Local(epochs=2, batch=5, rate=0.1), 0)
    expected, _ = reference(module, 0, sgd, 2, 5)
    torch.testing.assert_close(result.model, flat(expected), rtol=1e-5, atol=1e-6)


def test_instance_norm_statistics_are_the_mean_over_the_batches() -> None:
    module = nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten(), nn.Linear(3, 4)
    )
    layout, data, local = Layout.of(module), Rows(), Local(epochs=2, batch=4, rate=0.1)
    result = LoopTrainer(module, data, local, SEED).train([task(0)], [flat(module)], [None])[0]
    means = [data.inputs[0][rows].mean() for rows in batches(local, 0, 10, (SEED, 0, 0))]
    torch.testing.assert_close(layout.views(result.model)["1.running_mean"], torch.stack(means).mean()[None])


def test_a_client_without_data_returns_its_base() -> None:
    module = normed()
    base = torch.arange(float(Layout.of(module).size))
    result = LoopTrainer(module, Rows(), Local(), SEED).train([task(3)], [base], [None])[0]
    assert torch.equal(result.model, base)
    assert (result.examples, result.steps, result.metrics) == (0, 0, {})
    assert result.model.data_ptr() != base.data_ptr()


def test_buffers_that_a_module_binds_anew_count_and_start_anew() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)
            self.register_buffer("seen", torch.zeros(1))
            self.register_buffer("turns", torch.zeros(1, dtype=torch.long))
            self.seen: Tensor
            self.turns: Tensor

        def forward(self, rows: Tensor) -> Tensor:
            self.seen = self.seen + len(rows)
            self.turns += 1
            return self.linear(rows) / float(self.turns)

    module = Counting()
    trainer = LoopTrainer(module, Rows(), Local(batch=4), SEED)
    base = flat(module)
    base[-1] = 1000
    one, two = trainer.train([task(0), task(0)], [base, base], [None, None])
    assert float(one.model[-1]) == 1010
    assert torch.equal(one.model, two.model)  # `turns` began at 0 both times


# ---- a result depends on (base, correction, data, task) alone ----


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))


@pytest.mark.parametrize("options", [{"momentum": 0.9, "prox": 0.1}, {"optimiser": "adamw"}])
def test_bits_do_not_depend_on_order_or_company(options: dict[str, Any]) -> None:
    module, local = dropping(), Local(epochs=2, batch=4, rate=0.1, **options)
    words = torch.Generator().manual_seed(3)
    tasks = [task(0), task(1), task(2, count=4), task(0, count=1)]
    bases = [flat(module) + 0.01 * torch.rand(Layout.of(module).size, generator=words) for _ in tasks]
    first = torch.rand(Layout.of(module).parameters, generator=words)
    corrections = [first, None, None, first]
    trainer = LoopTrainer(module, Rows(), local, SEED)
    together = trainer.train(tasks, bases, corrections)
    backwards = trainer.train(tasks[::-1], bases[::-1], corrections[::-1])[::-1]
    torch.manual_seed(12345)
    for position, one in enumerate(tasks):
        fresh = LoopTrainer(module, Rows(), local, SEED)
        alone = fresh.train([one], [bases[position]], [corrections[position]])[0]
        for other in (together[position], backwards[position]):
            assert torch.equal(alone.model, other.model)
            assert alone.metrics == other.metrics


def test_dropout_differs_by_task_and_seed() -> None:
    module, local = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 4)), Local(batch=10)
    base = flat(module)

    def model(seed: int, count: int) -> Tensor:
        return LoopTrainer(module, Rows(), local, seed).train([task(0, count)], [base], [None])[0].model

    # One batch of all rows: only the dropout can make a difference beyond rounding.
    assert not torch.allclose(model(1, 0), model(1, 1), atol=1e-4)
    assert not torch.allclose(model(1, 0), model(2, 0), atol=1e-4)
    assert torch.equal(model(1, 0), model(1, 0))


def test_global_randomness_the_module_and_the_bases_are_left_alone() -> None:
    module = dropping().eval()
    before, state = flat(module), copy.deepcopy(module.state_dict())
    base = before.clone()
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    trainer = LoopTrainer(module, Rows(), Local(batch=4), SEED)
    trainer.train([task(0), task(1)], [base, base], [None, None])
    with pytest.raises(RuntimeError):
        trainer.train([task(9)], [base], [None])
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(base, before)
    assert not module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert module[1].momentum == 0.1


def test_results_are_not_views_of_the_work_vector() -> None:
    module = mlp()
    trainer = LoopTrainer(module, Rows(), Local(), SEED)
    one, two = trainer.train([task(0), task(1)], [flat(module)] * 2, [None, None])
    kept = one.model.clone()
    two.model.zero_()
    trainer.train([task(2)], [flat(module)], [None])
    assert torch.equal(one.model, kept)


def test_training_inside_no_grad_and_with_float64_bases() -> None:
    module = mlp()
    plain = trained(module, Local(batch=4), 0).model
    with torch.no_grad():
        assert torch.equal(trained(module, Local(batch=4), 0).model, plain)
    asking = LoopTrainer(module, Rows(), Local(batch=4), SEED)
    for _ in range(2):  # a base that wants a gradient gets none, and leaves no graph behind
        result = asking.train([task(0)], [flat(module).requires_grad_()], [None])[0].model
        assert torch.equal(result, plain)
        assert not result.requires_grad
    wide = LoopTrainer(module, Rows(), Local(batch=4), SEED).train(
        [task(0)], [flat(module).double()], [None]
    )[0]
    assert wide.model.dtype == torch.float64
    assert torch.equal(wide.model.float(), plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    ("make", "options"),
    # AdamW without batch norm: a bias in front of one has gradient 0, whose rounding Adam blows up to full steps.
    [(normed, {"momentum": 0.9, "prox": 0.1}), (mlp, {"optimiser": "adamw"})],
)
def test_cuda_gives_the_cpu_result_and_leaves_its_stream_alone(make: Any, options: dict[str, Any]) -> None:
    module, loose, local = make(), dropping(), Local(epochs=2, batch=5, rate=0.01, **options)
    tasks, bases = [task(0), task(2)], [flat(module)] * 2
    corrections = [torch.full((Layout.of(module).parameters,), 0.01), None]
    torch.cuda.manual_seed(4)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(4)
    there = LoopTrainer(module, Rows(), local, SEED, device="cuda").train(tasks, bases, corrections)
    dropped = LoopTrainer(loose, Rows(), local, SEED, device="cuda")
    same = [dropped.train([task(0)], [flat(loose).cuda()], [None])[0].model for _ in range(2)]
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert torch.equal(*same)
    assert same[0].is_cuda  # where its base was
    here = LoopTrainer(module, Rows(), local, SEED).train(tasks, bases, corrections)
    for one, two in zip(here, there, strict=True):
        torch.testing.assert_close(one.model, two.model, rtol=1e-3, atol=1e-4)
        assert one.metrics["loss"] == pytest.approx(two.metrics["loss"], abs=1e-4)


# ---- losses and failures ----


def test_losses_by_hand() -> None:
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1])
    assert float(loss_function("mse")(outputs, targets)) == 2.5  # (1 + 4) / 2: no broadcast to 2x2
    assert float(loss_function("value")(outputs, targets)) == 2.0
    even = loss_function("cross-entropy")(torch.zeros(2, 4), targets)
    assert float(even) == pytest.approx(1.3862943611)  # log 4
    with pytest.raises(InputError, match="loss = 'mae' is not known"):
        loss_function("mae")


def test_a_failure_names_client_and_task() -> None:
    module = nn.Linear(5, 4)  # rows have 3 features
    trainer = LoopTrainer(module, Rows(), Local(), SEED)
    with pytest.raises(RuntimeError, match=r"training failed \(client 2, task 17\): .*shapes") as caught:
        trainer.train([task(2, number=17)], [flat(module)], [None])
    assert caught.value.__cause__ is not None


def test_misfits_are_input_errors() -> None:
    module = mlp()
    trainer = LoopTrainer(module, Rows(), Local(), SEED)
    with pytest.raises(InputError, match=r"client 0, task 5\): a base of shape \(3,\) is not a model of 68"):
        trainer.train([task(0, number=5)], [torch.zeros(3)], [None])
    with pytest.raises(InputError, match=r"a correction of shape \(2,\) does not fit P = 68"):
        trainer.train([task(0)], [flat(module)], [torch.zeros(2)])


def test_a_loss_that_is_not_finite_is_no_error() -> None:
    module = mlp()
    result = LoopTrainer(module, Rows(), Local(), SEED).train(
        [task(0), task(0)], [flat(module) * float("nan"), flat(module)], [None, None]
    )
    assert result[0].metrics["loss"] != result[0].metrics["loss"]
    assert bool(result[1].model.isfinite().all())  # and the next task does not inherit it


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs = 0 is outside"),
        ({"steps": 0}, "steps = 0"),
        ({"steps": (3, -1)}, "steps = -1"),
        ({"steps": ()}, "is empty"),
        ({"batch": 0}, "batch = 0"),
        ({"rate": 0.0}, "rate = 0"),
        ({"rate": float("nan")}, "rate = nan"),
        ({"momentum": 1.0}, r"momentum = 1.0 is outside \[0, 1\)"),
        ({"weight_decay": -1.0}, "weight_decay = -1"),
        ({"prox": -0.1}, "prox = -0.1"),
        ({"optimiser": "adam"}, "did you mean 'adamw'"),
        ({"optimiser": "adamw", "momentum": 0.9}, "momentum = 0.9 means nothing to adamw"),
    ],
)
def test_settings_out_of_bounds(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Local(**wrong)


def test_check_fits() -> None:
    module = dropping()
    before = copy.deepcopy(module.state_dict())
    rows = torch.zeros(6, 3)
    check_fits(module, rows, 4, "cross-entropy")
    with pytest.raises(
        InputError, match=r"the model gives 4 outputs, but labels reach 99: give its last layer 100 outputs"
    ):
        check_fits(module, rows, 100, "cross-entropy")
    with pytest.raises(InputError, match=r"cannot take inputs of shape \(7,\): .*; choose") as caught:
        check_fits(module, torch.zeros(6, 7), 4, "cross-entropy")
    assert "\n" not in str(caught.value)
    point = build(Point(), (5,), 1, 0)
    check_fits(point, torch.zeros(1, 5), 1, "value")
    with pytest.raises(InputError, match="one number per example"):
        check_fits(module, rows, 1, "value")
    with pytest.raises(InputError, match="set loss = 'value'"):
        check_fits(point, torch.zeros(1, 5), 1, "cross-entropy")
    assert module.training
    assert module[1].training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_orders_go_by_the_same_numbers_whoever_computes_them() -> None:
    keys, sizes, place = torch.tensor([5, 2**62 + 1, 2**63 - 1]), torch.tensor([7, 3, 9]), torch.arange(9)
    ranks = drawn((keys[:, None] + torch.arange(2) * APART)[..., None], place)  # as on a GPU
    ranks = torch.where(place < sizes[:, None, None], ranks, 2**63 - 1)
    assert torch.equal(shuffled(keys, 2, sizes, 9), ranks.sort(dim=-1, stable=True).indices)
