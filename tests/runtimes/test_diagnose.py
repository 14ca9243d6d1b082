"""Noise, bias and delay against their definitions, computed here from the receipts and the models, in float64."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import rows_of, tiny
from torch import nn

from afield.core.errors import InputError
from afield.experiments.run import prepare
from afield.runtimes import diagnose
from afield.runtimes.rows import Measurement
from afield.runtimes.simulate import Result, simulate
from afield.scenarios.data import ClientData
from afield.scenarios.delays import LogNormal
from afield.strategies import ACE, ACED, ASGD, CA2FL, STRATEGIES, DelayAdaptiveASGD, FedBuff
from afield.training.local import Local
from afield.training.models import Point

CLIENTS, EACH = 5, 3  # clients, and bowls of each: a batch is one of them, so there is noise
RATE = 0.05
TERMS = ("noise", "bias", "delay", "error", "gradient")
RULES: dict[str, Any] = {
    "asgd": ASGD(lr=0.5),
    "delay-adaptive-asgd": DelayAdaptiveASGD(lr=0.5, threshold=2),
    "fedbuff": FedBuff(size=3),
    "ca2fl": CA2FL(size=3, lr=0.4),
    "ace": ACE(lr=0.3),
    "ace int8": ACE(lr=0.3, precision="int8"),
    "ace client": ACE(lr=0.3, held="client"),
    "aced": ACED(lr=0.3, max_delay=3),
}


def bowls() -> np.ndarray[Any, Any]:
    """Rows (a11, a12, a22, c1, c2), unlike from client to client and within each."""
    draws = np.random.default_rng(0)
    rows = np.zeros((CLIENTS * EACH, 5))
    rows[:, 0], rows[:, 2] = draws.uniform(0.5, 1.5, (2, len(rows)))
    rows[:, 1] = draws.uniform(-0.3, 0.3, len(rows))
    rows[:, 3:] = np.repeat(draws.normal(0, 3, (CLIENTS, 2)), EACH, 0) + draws.normal(0, 1, (len(rows), 2))
    return rows.astype(np.float32).astype(np.float64)


def gradient(client: int, w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of the mean of a client's bowls 1/2 (w - c)'A(w - c)."""
    parts = bowls()[EACH * client : EACH * (client + 1)]
    return np.mean([np.array([[a, b], [b, d]]) @ (w - (c1, c2)) for a, b, d, c1, c2 in parts], axis=0)


def along(client: int, w: np.ndarray[Any, Any], steps: int) -> np.ndarray[Any, Any]:
    """The mean gradient on the way of `steps` steps without noise."""
    total = np.zeros(2)
    for _ in range(steps):
        found = gradient(client, w)
        total, w = total + found, w - RATE * found
    return total / steps


def simulated(rule: Any, steps: int, **more: Any) -> Result:
    rows = torch.from_numpy(bowls()).float()
    parts = list(torch.arange(len(rows)).split(EACH))
    data = ClientData(rows, torch.zeros(len(rows), dtype=torch.int64), parts)
    options: dict[str, Any] = {
        "test": (rows, data.targets),
        "loss": "value",
        "updates": 40,
        "measure_versions": 1,
        "delay": LogNormal(sigma=1.0),
        "local": Local(steps=steps, batch=1, rate=RATE),
        "diagnose": True,
    }
    return simulate(rule, Point((4.0, -4.0)).build((5,), 1), data, **(options | more))


Part = tuple[int, int, float]  # client, version of its base, weight in the step


def parts_of(name: str, fresh: list[Any], cached: dict[int, int], active: dict[int, int]) -> list[Part]:
    """What a step is made of by the papers' rules: the arrivals since the last step, the newest before them.

    Written out a second time, without the strategies' code. `active` has the stamps of ACED before the step.
    """
    newest = cached | {row.client: row.base for row in fresh}
    last = fresh[-1]
    if name in ("asgd", "delay-adaptive-asgd"):
        return [(last.client, last.base, 1.0)]
    if name == "fedbuff":
        return [(row.client, row.base, 1 / 3) for row in fresh]
    if name.startswith("ace") and name != "aced":
        return [(client, base, 1 / CLIENTS) for client, base in newest.items()]
    if name == "aced":
        version = last.version - 1
        counted = [client for client in newest if version == 0 or version - active[client] <= 3]
        return [(client, newest[client], 1 / len(counted)) for client in counted]
    distinct = {row.client: row.base for row in fresh}
    parts = [(client, base, 1 / CLIENTS) for client, base in cached.items()]
    parts += [(client, base, 1 / len(distinct)) for client, base in distinct.items()]
    return parts + [(client, cached[client], -1 / len(distinct)) for client in distinct if client in cached]


def by_definition(name: str, rule: Any, result: Result, steps: int) -> list[dict[str, float]]:
    """The terms of every step."""
    models = {row["version"]: np.array(row["params"]) for row in result.metrics}
    found: list[dict[str, float]] = []
    fresh: list[Any] = []
    cached: dict[int, int] = {}
    stamps: dict[int, int] = {}
    for row in result.receipts:
        fresh.append(row)
        if not row.stepped:
            continue
        newest = cached | {arrived.client: arrived.base for arrived in fresh}
        parts = parts_of(name, fresh, cached, stamps)
        w = models[row.version - 1]
        rate = row.weight if name == "delay-adaptive-asgd" else rule.lr
        u = (w - models[row.version]) / (rate * RATE * steps)
        expected = sum(weight * along(client, models[base], steps) for client, base, weight in parts)
        stale = np.mean([gradient(c, models[newest.get(c, 0)]) for c in range(CLIENTS)], axis=0)
        true = np.mean([gradient(c, w) for c in range(CLIENTS)], axis=0)
        terms = (u - expected, expected - stale, stale - true, u - true, true)
        found.append({key: float(term @ term) for key, term in zip(TERMS, terms, strict=True)})
        for arrived in fresh:
            stamps[arrived.client] = row.version
        cached, fresh = newest, []
    return found


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_the_terms_are_their_definitions(name: str, steps: int) -> None:
    rule = RULES[name]
    result = simulated(rule, steps)
    expected = by_definition(name, rule, result, steps)
    # a version measured a second time, some arrivals later, says the same of its step
    told = list({row["version"]: row for row in result.metrics if row["version"] > 0}.values())
    assert len(told) == len(expected) >= 12
    assert max(row.staleness for row in result.receipts) > 1
    for row, terms in zip(told, expected, strict=True):
        for key, value in terms.items():
            # the models are float32: 4 elements of 5e-7 over the rate of the step, 0.05 * 0.3
            assert row[key] == pytest.approx(value, rel=1e-3, abs=1e-7), (key, row["version"])
        assert row["remainder"] < 1e-24  # u - grad F = noise + bias + delay, as vectors


def test_ace_has_no_bias_and_asgd_has() -> None:
    ace, asgd = (simulated(RULES[name], 1).metrics[-20:] for name in ("ace", "asgd"))
    assert all(row["bias"] < 1e-24 * row["gradient"] for row in ace)
    assert all(row["delay"] > 1e-6 for row in ace)  # though its bases are stale
    assert np.mean([row["bias"] for row in asgd]) > np.mean([row["gradient"] for row in asgd])


def test_one_local_step_over_all_the_data_has_no_noise() -> None:
    result = simulated(ASGD(lr=0.5), 1, local=Local(steps=1, batch=EACH, rate=RATE))
    assert all(row["noise"] < 1e-7 for row in result.metrics if row["version"])
    noisy = simulated(ASGD(lr=0.5), 1)
    assert np.mean([row["noise"] for row in noisy.metrics if row["version"]]) > 0.1


def test_unequal_local_steps_are_bias() -> None:
    """ACE weighs everyone alike, but who takes more steps moves the model further."""
    rows = simulated(ACE(lr=0.3), 1, local=Local(steps=(1, 1, 1, 1, 4), batch=EACH, rate=RATE)).metrics
    assert all(row["bias"] > 1e-3 for row in rows if row["version"])
    assert all(row["noise"] < 1e-6 for row in rows if row["version"])


def test_a_dropped_update_makes_no_step_to_explain() -> None:
    rule = DelayAdaptiveASGD(lr=0.5, threshold=1, rule="drop")
    result = simulated(rule, 1)
    for receipt in result.receipts:
        row = result.metrics[receipt.version]
        assert (row["noise"] is None) == (receipt.weight == 0.0)
    assert {row["noise"] is None for row in result.metrics} == {True, False}


def test_drift_and_what_was_received_by_client() -> None:
    result = simulated(ASGD(lr=0.5), 1)
    models = {row["version"]: np.array(row["params"]) for row in result.metrics}
    counts, bases = [0] * CLIENTS, [0] * CLIENTS
    for receipt, row in zip(result.receipts, result.clients[1:], strict=True):
        counts[receipt.client] += 1
        bases[receipt.client] = receipt.version  # everyone always busy: its next task starts from the newest
        now = models[row["version"]]
        assert row["received"] == counts
        assert row["drift"] == pytest.approx([np.linalg.norm(now - models[v]) for v in bases], abs=1e-5)
        assert row["share"] == pytest.approx([count / sum(counts) for count in counts])
    assert result.metrics[-1]["drift"] == pytest.approx(np.mean(result.clients[-1]["drift"]))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_diagnosed_run_is_the_same_run(tmp_path: Path, name: str) -> None:
    plain, _ = rows_of(tiny(name), tmp_path / "plain")
    noted, measured = rows_of(tiny(name, measure={"diagnose": True}), tmp_path / "noted")
    assert plain == noted
    one, two = (load_file(tmp_path / place / "model.safetensors") for place in ("plain", "noted"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    explained = getattr(STRATEGIES[name], "linear", "") == "deltas"
    assert (measured[-1].values["bias"] is not None) == explained
    assert ("share" in (measured[-1].clients or {})) == hasattr(STRATEGIES[name], "linear")
    assert not (tmp_path / "plain" / "diagnostics.jsonl").exists()
    lines = (tmp_path / "noted" / "diagnostics.jsonl").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == [row.version for row in measured]


def test_batch_norm_and_dropout_are_left_as_they_are() -> None:
    changes = {
        "model": {"name": "fedasync-cnn"},
        "scenario": {"data": {"name": "digits", "limit": 40, "image": True, "held_out": 0}},
        "stop": {"updates": 6},
    }
    logs = []
    for on in (False, True):
        zeros = {"strategy": {"name": "ace", "warmup": "zeros"}, "measure": {"versions": 3, "diagnose": on}}
        simulator = prepare(tiny("ace", **changes, **zeros)).simulator
        rows = list(simulator.rows())
        receipts = [asdict(row) for row in rows if not isinstance(row, Measurement)]
        logs.append((receipts, simulator.server.model()))
    assert logs[0][0] == logs[1][0]
    assert torch.equal(logs[0][1], logs[1][1])
    assert isinstance(rows[-1], Measurement) and 0 < rows[-1].values["noise"] < float("inf")


def test_adamw_is_not_explained() -> None:
    rows = list(
        prepare(tiny("ace", local={"optimiser": "adamw"}, measure={"diagnose": True})).simulator.rows()
    )
    last = rows[-1]
    assert isinstance(last, Measurement) and last.clients is not None
    assert [last.values[key] for key in diagnose.TERMS] == [None] * 6
    assert sum(last.clients["share"]) == pytest.approx(1)


def test_more_models_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "ROOM", 5 * 650 * 4)  # the models of five clients and nothing else
    with pytest.raises(
        InputError, match=r"measure\.diagnose = true keeps a model per client.*set it to false"
    ):
        prepare(tiny("ace", measure={"diagnose": True}))


def test_frozen_parameters_do_not_move() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    module[0].weight.requires_grad_(False)
    rows = torch.from_numpy(bowls()).float()
    data = ClientData(
        rows, torch.zeros(len(rows), dtype=torch.int64), list(torch.arange(len(rows)).split(EACH))
    )
    result = simulate(
        ACE(lr=0.3),
        module,
        data,
        loss="mse",
        updates=20,
        measure_versions=4,
        diagnose=True,
        local=Local(steps=1, batch=EACH, rate=RATE),
    )
    assert result.metrics[-1]["noise"] < 1e-9  # its move and its expectation agree: both zero where frozen
