"""AsyncStrategy over a federation in this process, with Flower's own types and ClientApps."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from localgrid import LocalGrid, drifting, model, record

import afield
from afield.core.errors import InputError
from afield.runtimes.flower import AsyncStrategy
from afield.runtimes.flower.arrays import Arrays

SPEED = {101: 1, 102: 2, 103: 5}  # node -> pulls until it has answered
STRATEGIES = {
    "fedasync": afield.FedAsync(),
    "fedbuff": afield.FedBuff(size=3),
    "mr-asyncfl": afield.MRAsyncFL(gamma=0.8),
    "ace": afield.ACE(lr=0.5),
}


def named(arrays: ArrayRecord) -> dict[str, Any]:
    return {name: array.numpy() for name, array in arrays.items()}


def vector(arrays: ArrayRecord) -> torch.Tensor:
    layout = Arrays.of(named(arrays))
    return layout.vector(named(arrays))


def asynchronous(strategy: Any, **options: Any) -> AsyncStrategy:
    return AsyncStrategy(strategy, **{"concurrency": 3, "poll": 0.01, **options})


def folded(rule: Any, receipts: list[afield.Receipt], log: list[tuple[Message, Message]]) -> torch.Tensor:
    """What nodes were sent and what they answered, folded by the bare rule in the order of the receipts."""
    state = rule.init(vector(model()), 3)
    versions = {0: vector(model())}
    for receipt, (ask, reply) in zip(receipts, log, strict=True):
        base, answer = vector(ask.content["arrays"]), vector(reply.content["arrays"])
        assert torch.equal(base, versions[receipt.base])
        task = afield.Task(receipt.number, receipt.client, 0, receipt.base, 0.0)
        examples = int(reply.content["metrics"]["num-examples"])
        twin = rule.receive(state, afield.Update(task, answer, base, examples))
        assert (twin.weight, twin.staleness, twin.version) == (
            receipt.weight,
            receipt.staleness,
            receipt.version,
        )
        assert (receipt.examples, receipt.refused) == (examples, "")
        versions[state.version] = state.params.clone()
    return state.params


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_model_is_the_fold_of_what_the_nodes_sent(name: str) -> None:
    grid = LocalGrid(drifting(), SPEED)
    strategy = asynchronous(STRATEGIES[name], fraction_evaluate=0)
    result = strategy.start(grid, model(), num_rounds=5)
    assert [receipt.client for receipt in strategy.receipts] == [
        ask.metadata.dst_node_id - 101 for ask, _ in grid.log
    ]
    assert len(strategy.receipts) == 15 and max(receipt.staleness for receipt in strategy.receipts) > 0
    assert torch.equal(vector(result.arrays), folded(STRATEGIES[name], strategy.receipts, grid.log))


def test_fedasync_by_hand() -> None:
    """w <- (1 - a) w + a m with a = 0.6 (1 + staleness)^-0.5, in float64."""
    grid = LocalGrid(drifting(), SPEED)
    rule = afield.FedAsync(alpha=0.6, weight=afield.staleness.Polynomial(0.5))
    strategy = asynchronous(rule, fraction_evaluate=0)
    result = strategy.start(grid, model(), num_rounds=4)
    value, seen = vector(model()).double(), [vector(model())]
    for message, reply in grid.log:
        base = vector(message.content["arrays"])
        version = max(k for k, one in enumerate(seen) if torch.allclose(one.float(), base, atol=1e-6))
        share = 0.6 * (1 + len(seen) - 1 - version) ** -0.5
        value = (1 - share) * value + share * vector(reply.content["arrays"]).double()
        seen.append(value)
    assert torch.allclose(vector(result.arrays).double(), value, atol=1e-5)


def test_the_concurrency_is_kept_and_nothing_is_left() -> None:
    grid = LocalGrid(drifting(), {node: 1 + node % 4 for node in range(100, 110)})
    strategy = asynchronous(afield.FedAsync(), concurrency=6, fraction_evaluate=0)
    strategy.start(grid, model(), num_rounds=5)
    left = 30
    assert len(strategy.receipts) == left == grid.pushed  # no task was in vain
    for busy, replies in zip(grid.busy, grid.replies, strict=True):
        assert busy == min(6, left)
        left -= replies
    assert left == 0 and not grid.open


def test_rounds_are_measured_by_nodes_and_here() -> None:
    grid = LocalGrid(drifting(), SPEED)
    seen: dict[int, torch.Tensor] = {}

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        seen[number] = vector(arrays)
        return MetricRecord({"sum": float(seen[number].sum())})

    strategy = asynchronous(
        afield.MRAsyncFL(), round_size=4, drain=0
    )  # evaluations are waited for all the same
    configs = {"train_config": ConfigRecord({"lr": 0.5}), "evaluate_config": ConfigRecord({"top": 5})}
    result = strategy.start(grid, model(), num_rounds=3, evaluate_fn=evaluate, **configs)
    assert list(seen) == [0, 1, 2, 3] == list(result.evaluate_metrics_serverapp)
    assert torch.equal(seen[3], vector(result.arrays))
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    replies = [(ask, reply) for ask, reply in grid.log if ask.metadata.message_type == "train"]
    for number in (1, 2, 3):
        mine = [reply.content["metrics"] for _, reply in replies[4 * number - 4 : 4 * number]]
        weight = sum(one["num-examples"] for one in mine)
        expected = sum(one["num-examples"] * one["loss"] for one in mine) / weight
        assert result.train_metrics_clientapp[number]["loss"] == pytest.approx(expected)
    # of the last round everyone evaluates: parts 1, 2, 3 with weights 2, 3, 4
    last = result.evaluate_metrics_clientapp[3]
    assert last["part"] == pytest.approx((1 * 2 + 2 * 3 + 3 * 4) / 9)
    assert last["total"] == pytest.approx(float(seen[3].sum()), rel=1e-5)
    for ask, _ in grid.log:
        config = ask.content["config"]
        assert config["lr" if ask.metadata.message_type == "train" else "top"] in (0.5, 5)
        assert ask.metadata.group_id == str(config["server-round"])
    rounds = [ask.content["config"]["server-round"] for ask, _ in replies]
    assert rounds[0] == 1 and set(rounds) == {1, 2, 3}


def test_statistics_and_whole_numbers_travel() -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    grid = LocalGrid(drifting(), SPEED)
    strategy = asynchronous(afield.FedBuff(size=3), fraction_evaluate=0)
    result = strategy.start(grid, ArrayRecord(network.state_dict()), num_rounds=1)
    before, after = named(ArrayRecord(network.state_dict())), named(result.arrays)
    replies = [named(reply.content["arrays"]) for _, reply in grid.log]
    assert after["1.num_batches_tracked"] == 1  # as the last reply has it
    for name in ("0.weight", "1.running_mean", "1.running_var"):
        expected = before[name] + np.mean([reply[name] - before[name] for reply in replies], axis=0)
        assert np.allclose(after[name], expected, atol=1e-6)


def test_a_node_that_vanishes_and_one_that_comes(caplog: pytest.LogCaptureFixture) -> None:
    grid = LocalGrid(drifting(), {101: 1, 102: 1, 103: 1})
    strategy = asynchronous(afield.ACE(lr=0.5), deadline=30, fraction_evaluate=0)

    def swap() -> None:
        del grid.speed[103]
        grid.speed[104] = 1

    grid.script[3] = swap
    with caplog.at_level(logging.INFO, "flwr"):
        strategy.start(grid, model(), num_rounds=6)
    assert len(strategy.receipts) == 18
    assert "node 103 (client 2) left" in caplog.text and "node 104 is client 2" in caplog.text
    nodes = [ask.metadata.dst_node_id for ask, reply in grid.log if not reply.has_error()]
    assert set(nodes) == {101, 102, 103, 104} and 103 not in nodes[nodes.index(104) :]


def test_a_silent_node_is_replaced_after_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """It is said to be online all the time, as a SuperNode that was killed is for a minute."""
    grid = LocalGrid(drifting(), {101: 1, 102: 1, 103: 1, 104: 1}, silent=[103])
    strategy = asynchronous(afield.MRAsyncFL(), clients=3, deadline=0.05, drain=0.2, fraction_evaluate=0)
    with caplog.at_level(logging.INFO, "flwr"):
        strategy.start(grid, model(), num_rounds=200)
    assert len(strategy.receipts) == 600
    assert "node 103 did not answer within 0.05 s" in caplog.text
    assert "node 104 waits: all 3 places are taken" in caplog.text and "node 104 is client 2" in caplog.text
    assert {receipt.client for receipt in strategy.receipts[-30:]} == {0, 1, 2}
    assert "1 messages were never answered, by nodes [103]" in caplog.text


def test_a_late_answer_is_dropped_and_its_node_works_again() -> None:
    grid = LocalGrid(drifting(), {101: 1, 102: 1, 103: 1}, silent=[103])
    strategy = asynchronous(afield.FedAsync(), deadline=0.05, fraction_evaluate=0)
    asked: list[int] = []

    def evaluate(number: int, arrays: ArrayRecord) -> None:
        asked.append(number)
        if number == 150:
            grid.silent.clear()

    strategy.start(grid, model(), num_rounds=300, evaluate_fn=evaluate)
    answers = [ask for ask, _ in grid.log if ask.metadata.dst_node_id == 103]
    mine = [receipt for receipt in strategy.receipts if receipt.client == 2]
    assert len(strategy.receipts) == 900 and not grid.open
    assert len(answers) == len(mine) + 1 > 1  # all but the late one were used


def test_errors_rest_a_node_and_only_errors_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    app, healthy = ClientApp(), drifting()
    broken = {103: 2}  # how often it still fails

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if broken.get(context.node_id, 0) > 0:
            broken[context.node_id] -= 1
            raise ValueError("out of memory")
        return healthy(message, context)

    monkeypatch.setattr("afield.runtimes.flower.loop.REST", 0.01)
    grid = LocalGrid(app, {101: 1, 102: 1, 103: 1})
    strategy = asynchronous(afield.FedAsync(), fraction_evaluate=0)
    strategy.start(grid, model(), num_rounds=100)
    assert len(strategy.receipts) == 300 and grid.pushed == 302
    assert any(receipt.client == 2 for receipt in strategy.receipts)
    broken.update({101: 99, 102: 99, 103: 99})
    with pytest.raises(RuntimeError, match=r"9 tasks failed in a row, the last on node 10\d: out of memory"):
        strategy.start(LocalGrid(app, {101: 1, 102: 1, 103: 1}), model(), num_rounds=1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"arrays": record({"w": np.full((3, 4), np.nan, np.float32), "b": np.zeros(4, np.float32)})},
            "not-finite",
        ),
        ({"arrays": record({"w": np.zeros((3, 4), np.float32)})}, "b is missing"),
        ({"metrics": MetricRecord({"loss": 1.0})}, "num-examples = None"),
        ({"metrics": MetricRecord({"num-examples": 0})}, "no-examples"),
        ({"more": record({"w": np.zeros(1)})}, "2 ArrayRecords"),
    ],
)
def test_a_bad_reply_counts_as_a_failure(
    change: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, healthy = ClientApp(), drifting()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply = healthy(message, context)
        return Message(RecordDict({**reply.content, **change}), reply_to=message)

    monkeypatch.setattr("afield.runtimes.flower.loop.REST", 0.01)
    strategy = asynchronous(afield.FedAsync())
    with pytest.raises(RuntimeError, match=why):
        strategy.start(LocalGrid(app, {101: 1, 102: 1}), model(), num_rounds=1)
    assert all(receipt.refused for receipt in strategy.receipts)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_that_was_cut_off_goes_on_with_every_update(name: str, tmp_path: Path) -> None:
    """It ends in the middle by an error; what was accepted before is part of the final model, bit by bit."""

    class CutOffError(Exception):
        pass

    def cut(number: int, arrays: ArrayRecord) -> None:
        if number == 2:
            raise CutOffError

    rule = STRATEGIES[name]
    first = LocalGrid(drifting(), SPEED)
    one = asynchronous(rule, store=tmp_path / "run", fraction_evaluate=0)
    with pytest.raises(CutOffError):
        one.start(first, model(), num_rounds=5, evaluate_fn=cut)
    before = one.receipts
    assert len(before) == 6
    with pytest.raises(InputError, match="holds a run"):
        one.start(LocalGrid(drifting(), SPEED), model(), num_rounds=5)
    two = asynchronous(rule, resume=tmp_path / "run", fraction_evaluate=0)
    second = LocalGrid(drifting(), SPEED)
    rounds: list[int] = []
    result = two.start(second, model(), num_rounds=5, evaluate_fn=lambda number, _: rounds.append(number))
    assert rounds == [2, 3, 4, 5] and len(two.receipts) == 9
    assert min(receipt.number for receipt in two.receipts) > max(receipt.number for receipt in before)
    expected = folded(rule, before + two.receipts, first.log[:6] + second.log)
    assert torch.equal(vector(result.arrays), expected)
    again = asynchronous(rule, resume=tmp_path / "run", fraction_evaluate=0)  # all rounds are done
    idle = LocalGrid(drifting(), SPEED)
    assert torch.equal(vector(again.start(idle, model(), num_rounds=5).arrays), expected)
    assert idle.pushed == 0


def test_what_cannot_work_is_refused_at_once(tmp_path: Path) -> None:
    for strategy, why in (
        (afield.FedAvg(), "steps once per round"),
        (afield.ACE(per="tick"), "steps once per tick"),
        (afield.FedAC(), "corrects the gradients"),
        (afield.ACE(held="client"), "keep their last delta"),
        (afield.FedEcho(), "unlabelled data"),
        (afield.SGD(), "data of all clients"),
    ):
        with pytest.raises(InputError, match=why):
            AsyncStrategy(strategy)
    with pytest.raises(InputError, match="concurrency = 0"):
        AsyncStrategy(afield.FedAsync(), concurrency=0)
    with pytest.raises(InputError, match="two folders"):
        AsyncStrategy(afield.FedAsync(), store=tmp_path / "a", resume=tmp_path / "b")
    run = asynchronous(afield.FedAsync(), store=tmp_path / "run", fraction_evaluate=0)
    run.start(LocalGrid(drifting(), SPEED), model(), num_rounds=1)
    other = asynchronous(afield.FedAsync(), resume=tmp_path / "run", clients=7)
    with pytest.raises(InputError, match="clients = 7, but"):
        other.start(LocalGrid(drifting(), SPEED), model(), num_rounds=1)
