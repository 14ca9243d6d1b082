"""The ten-line use from Python, with real training."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import afield
from afield.core.flat import Layout
from afield.core.types import Receipt
from afield.runtimes.simulate import thread_count
from afield.scenarios.data import ClientData

CLIENTS = 6


def blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three Gaussian classes in five dimensions."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=draw)
    centres = 3 * torch.eye(3, 5)
    return centres[labels] + torch.randn(count, 5, generator=draw), labels


def clients() -> list[Dataset[Any]]:
    inputs, labels = blobs(40 * CLIENTS, 0)
    return [TensorDataset(inputs[i::CLIENTS], labels[i::CLIENTS]) for i in range(CLIENTS)]


def network(batch_norm: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        middle = [nn.BatchNorm1d(8)] if batch_norm else []
        return nn.Sequential(nn.Linear(5, 8), *middle, nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def run(strategy: Any, **options: Any) -> afield.Result:
    settings: dict[str, Any] = {
        "test": blobs(300, 1),
        "delay": afield.delays.Exponential(mean=1.0),
        "local": afield.Local(rate=0.1, batch=16),
        "updates": 60,
        "measure_versions": 10,
    }
    settings |= options
    return afield.simulate(
        strategy, settings.pop("model", network()), settings.pop("data", clients()), **settings
    )


def test_ten_lines_learn() -> None:
    result = run(afield.FedBuff(size=3))
    assert result.ended == "updates"
    assert len(result.receipts) == 60
    assert result.accuracy is not None and result.accuracy > 0.85
    assert result.metrics[0]["accuracy"] < 0.7
    assert result.metrics[-1]["version"] == 20
    # the module in the result is the model that was measured last
    inputs, labels = blobs(300, 1)
    result.model.eval()
    with torch.no_grad():
        assert float((result.model(inputs).argmax(1) == labels).float().mean()) == pytest.approx(
            result.accuracy
        )


def test_the_users_module_and_random_state_are_left_alone() -> None:
    module = network(batch_norm=True)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    result = run("fedasync", model=module)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not torch.equal(result.model.state_dict()["0.weight"], before["0.weight"])


def test_a_small_model_trains_on_one_thread_and_gives_the_others_back() -> None:
    """Threads are chosen by rule: several of them would fight over a model of a few weights, and change its bits."""
    seen = set()

    class Counting(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                seen.add(torch.get_num_threads())
            return super().forward(inputs)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run("fedasync", model=Counting(5, 3), updates=6, method="loop")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {1}
    assert thread_count(199_999) == 1
    assert thread_count(200_000) == os.cpu_count()
    assert thread_count(19_999, "vmap") == 1
    assert thread_count(20_000, "vmap") == os.cpu_count()


def _without(receipts: list[Receipt], name: str) -> list[Receipt]:
    return [replace(receipt, **{name: 0}) for receipt in receipts]


@pytest.mark.parametrize("method", ["loop", "vmap", "workers"])
@pytest.mark.parametrize("strategy", ["fedasync", "ace", "fedavg", "scaffold"])
def test_every_method_gives_the_same_log(strategy: str, method: str) -> None:
    options: dict[str, Any] = {"rounds": afield.schedulers.Cohort(4), "model": network(batch_norm=True)}
    right, found = run(strategy, method="loop", **options), run(strategy, method=method, **options)
    assert found.receipts == right.receipts
    layout = Layout.of(right.model)
    torch.testing.assert_close(layout.flatten(found.model), layout.flatten(right.model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("strategy", ["fedasync", "ace", "ca2fl", "fedavg", "scaffold", "fedac"])
def test_training_in_blocks_equals_training_one_by_one(strategy: str) -> None:
    built = {"ca2fl": afield.CA2FL(size=3), "fedac": afield.FedAC(size=3)}.get(strategy, strategy)
    options: dict[str, Any] = {"rounds": afield.schedulers.Cohort(4)}
    # FedAC divides by its second moment: it makes full steps of the rounding errors of a bias before batch norm
    normed = strategy != "fedac"
    whole = run(built, model=network(batch_norm=normed), **options)
    alone = run(built, model=network(batch_norm=normed), block=1, **options)
    # FedAC's weights are computed from the models, whose last bits depend on the width of a block
    weights = [[receipt.weight for receipt in result.receipts] for result in (alone, whole)]
    assert weights[0] == pytest.approx(weights[1], rel=1e-2)
    assert _without(alone.receipts, "weight") == _without(whole.receipts, "weight")
    if strategy != "fedac":
        assert weights[0] == weights[1]
    layout = Layout.of(whole.model)
    torch.testing.assert_close(layout.flatten(alone.model), layout.flatten(whole.model), rtol=0, atol=1e-5)


def test_one_seed_one_result() -> None:
    first, again, other = run("mr-asyncfl", seed=3), run("mr-asyncfl", seed=3), run("mr-asyncfl", seed=4)
    assert first.receipts == again.receipts
    layout = Layout.of(first.model)
    assert torch.equal(layout.flatten(first.model), layout.flatten(again.model))
    assert first.receipts != other.receipts
    drop = {"wall"}
    assert [{k: v for k, v in m.items() if k not in drop} for m in first.metrics] == [
        {k: v for k, v in m.items() if k not in drop} for m in again.metrics
    ]


def test_strategies_that_do_not_steer_the_schedule_see_one_arrival_trace() -> None:
    options: dict[str, Any] = {"scheduler": afield.schedulers.Concurrency(3)}

    def trace(strategy: Any) -> list[tuple[int, int, float, float]]:
        return [(r.number, r.client, r.started, r.arrived) for r in run(strategy, **options).receipts]

    first = trace("fedasync")
    for strategy in [
        "mr-asyncfl",
        "asgd",
        "twafl",
        afield.FedBuff(size=4),
        afield.CA2FL(size=2),
        afield.ACE(),
    ]:
        assert trace(strategy) == first


def test_any_data_set_works() -> None:
    class Lazy(Dataset[tuple[Tensor, int]]):
        def __init__(self, seed: int) -> None:
            self.inputs, self.labels = blobs(20, seed)

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return self.inputs[index], int(self.labels[index])

    lazy = [Lazy(seed) for seed in range(4)]
    pooled = [TensorDataset(item.inputs, item.labels) for item in lazy]
    first, second = run("fedasync", data=lazy, test=lazy[0]), run("fedasync", data=pooled, test=pooled[0])
    assert first.receipts == second.receipts
    assert first.metrics[-1]["accuracy"] == second.metrics[-1]["accuracy"]


def test_one_pool_with_parts_works() -> None:
    inputs, labels = blobs(60, 0)
    parts = [torch.arange(i, 60, 3) for i in range(3)]
    assert run("asgd", data=ClientData(inputs, labels, parts)).ended == "updates"


def test_sgd_pools_the_data() -> None:
    result = run("sgd", updates=20)
    assert {receipt.client for receipt in result.receipts} == {0}
    assert {receipt.examples for receipt in result.receipts} == {40 * CLIENTS}
    assert result.accuracy is not None and result.accuracy > 0.9


def test_delay_adaptive_takes_the_concurrency_as_threshold() -> None:
    """With 3 at a time and constant delays staleness is 2 at the most: nothing is scaled."""
    options: dict[str, Any] = {
        "scheduler": afield.schedulers.Concurrency(3),
        "delay": afield.delays.Constant(),
    }
    result = run(afield.DelayAdaptiveASGD(), **options)
    assert max(receipt.staleness for receipt in result.receipts) == 2
    assert {receipt.weight for receipt in result.receipts} == {1.0}
    capped = run(afield.DelayAdaptiveASGD(threshold=1), **options)
    assert {receipt.weight for receipt in capped.receipts if receipt.staleness == 2} == {0.5}


def test_known_participation_comes_from_the_scheduler() -> None:
    rounds = afield.schedulers.Bernoulli(p=(1.0, 0.5))
    result = run(afield.FedStale(p="known"), rounds=rounds)
    assert {(receipt.client < 3, receipt.weight) for receipt in result.receipts} == {
        (True, 1.0),
        (False, 2.0),
    }


def test_quantised_tables_still_learn() -> None:
    for strategy in [afield.ACE(lr=0.2, precision="int8"), afield.CA2FL(size=3, precision="bfloat16")]:
        result = run(strategy, updates=200)
        assert result.accuracy is not None and result.accuracy > 0.85


def test_bad_input_is_named() -> None:
    with pytest.raises(afield.InputError, match="2 outputs, but labels reach 2"):
        run("fedasync", model=nn.Linear(5, 2))
    with pytest.raises(afield.InputError, match="cannot take"):
        run("fedasync", model=nn.Linear(6, 3))
    with pytest.raises(afield.InputError, match="'fedbuf' is not known; did you mean 'fedbuff'"):
        run("fedbuf")
    with pytest.raises(afield.InputError, match="no end is set"):
        run("fedasync", updates=None)
    with pytest.raises(afield.InputError, match=r"alpha = 1.7 is outside \(0, 1\]"):
        afield.FedAsync(alpha=1.7)
    with pytest.raises(afield.InputError, match="client 1's data set"):
        run(
            "fedasync",
            data=[clients()[0], TensorDataset(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))],
        )
