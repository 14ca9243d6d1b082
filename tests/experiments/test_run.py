"""Configs end to end: every strategy, the same bits from the same seed, one arrival trace for all."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import rows_of, tiny

from afield.core.errors import InputError
from afield.experiments.config import Config, experiment, presets, read
from afield.experiments.run import prepare, run
from afield.reports import load
from afield.runtimes.rows import Measurement
from afield.strategies import STRATEGIES

# Strategies that let every client go on at once (ace holds clients back while it warms up; fedavg has rounds).
SAME_TRACE = ("fedasync", "fedbuff", "mr-asyncfl", "asgd")


def log(chosen: Config) -> list[Any]:
    """The run without its wall time."""
    rows = list(prepare(chosen).simulator.rows())
    return [asdict(row) | {"wall": 0} for row in rows]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_runs_and_repeats_to_the_bit(tmp_path: Path, name: str) -> None:
    chosen = tiny(name)
    receipts, measured = rows_of(chosen, tmp_path / "a")
    again, _ = rows_of(chosen, tmp_path / "b")
    assert receipts == again
    assert len(receipts) >= 20
    assert not any(row.refused for row in receipts)
    assert measured[-1].version > 0
    assert 0 <= measured[-1].values["accuracy"] <= 1
    first, second = (load_file(tmp_path / place / "model.safetensors") for place in ("a", "b"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    other, _ = rows_of(tiny(name, seed=1), tmp_path / "c")
    third = load_file(tmp_path / "c" / "model.safetensors")
    assert other != receipts
    assert any(not torch.equal(first[key], third[key]) for key in first)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_runs_on_the_default_experiment(name: str) -> None:
    """`afield run --strategy NAME` needs no other option."""
    (chosen,) = experiment(read(presets()["default"]), strategy=name, settings=["stop.updates=12"]).runs
    rows = list(prepare(chosen).simulator.rows())
    assert sum(not isinstance(row, Measurement) for row in rows) >= 1


@pytest.mark.parametrize(
    "scheduler",
    [
        {"name": "all"},
        {"name": "concurrency", "limit": 3},
        {"name": "check-in", "pause": 0.5},
        {"name": "check-in", "pause": 0.5, "limit": 2},
    ],
    ids=lambda scheduler: " ".join(map(str, scheduler.values())),
)
@pytest.mark.parametrize("availability", ["always", "on-off"])
def test_all_strategies_face_the_identical_arrival_trace(
    scheduler: dict[str, Any], availability: str
) -> None:
    scenario = {"scheduler": scheduler, "availability": {"name": availability}}
    traces = {}
    for name in SAME_TRACE:
        rows = prepare(tiny(name, scenario=scenario, stop={"updates": 40})).simulator.rows()
        receipts = [row for row in rows if not isinstance(row, Measurement)]
        traces[name] = [(row.client, row.started, row.arrived) for row in receipts]
    assert len(traces["fedasync"]) == 40
    assert len({client for client, _, _ in traces["fedasync"]}) == 5
    assert all(trace == traces["fedasync"] for trace in traces.values())


def test_the_trace_does_not_depend_on_the_model_or_the_rate() -> None:
    logs = []
    for changes in ({}, {"model": {"name": "mlp"}}, {"local": {"rate": 0.5}}):
        rows = log(tiny(**changes))
        logs.append([(row["client"], row["started"], row["arrived"]) for row in rows if "client" in row])
    assert logs[0] == logs[1] == logs[2]


def test_other_blocks_and_threads_give_the_same_log() -> None:
    whole = log(tiny())
    for runtime in ({"block": 1}, {"block": 3}, {"threads": 2}):
        rows = log(tiny(runtime=runtime))
        assert [row for row in rows if "client" in row] == [row for row in whole if "client" in row]
        ends = [row["values"]["loss"] for row in (rows[-1], whole[-1])]
        assert ends[0] == pytest.approx(ends[1], abs=1e-5)


@pytest.mark.parametrize("name", ["mr-asyncfl", "ace", "ca2fl", "scaffold", "fedecho"])
def test_tables_on_disk_give_the_same_run_and_leave_nothing(tmp_path: Path, name: str) -> None:
    for table in ("memory", "disk"):
        chosen = tiny(name, runtime={"table": table}, stop={"updates": 30})
        prepared = prepare(chosen)
        rows = run(prepared, tmp_path / table)
        taken = [next(rows) for _ in range(10)]
        assert len(list((tmp_path / table).glob("store/*.rows"))) == (table == "disk")
        taken += list(rows)
        assert not (tmp_path / table / "store").exists()
        assert tomllib.loads((tmp_path / table / "config.toml").read_text())["runtime"]["table"] == table
        summary = json.loads((tmp_path / table / "summary.json").read_text())
        assert (summary["file_bytes"] > 0) == (table == "disk")
        if table == "memory":
            expected = [row for row in taken if not isinstance(row, Measurement)]
        else:
            assert [row for row in taken if not isinstance(row, Measurement)] == expected
    first, second = (load_file(tmp_path / table / "model.safetensors") for table in ("memory", "disk"))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_table_is_chosen_by_rule() -> None:
    assert Config().runtime.table == "auto"
    assert prepare(tiny("ace")).config.runtime.table == "memory"
    assert prepare(tiny("ace", runtime={"table": "disk"})).config.runtime.table == "disk"
    with pytest.raises(InputError, match=r"runtime\.table = 'disc' is not known; did you mean 'disk'"):
        tiny("ace", runtime={"table": "disc"})


def test_threads_are_put_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    rows = run(prepare(tiny(runtime={"threads": before + 1})), tmp_path / "run")
    next(rows)
    assert torch.get_num_threads() == before + 1
    rows.close()
    assert torch.get_num_threads() == before


def test_faster_and_slower_clients_are_measured_apart(tmp_path: Path) -> None:
    _, measured = rows_of(tiny(stop={"updates": 60}), tmp_path / "run")
    assert all(row.values["groups"].keys() == {"fast", "slow"} for row in measured)
    last = measured[-1].values
    assert last["groups"]["fast"] != last["groups"]["slow"]
    assert load.load(tmp_path / "run").metrics[-1]["groups"] == last["groups"]


def test_one_client_has_no_groups() -> None:
    rows = list(prepare(tiny(scenario={"clients": 1}, stop={"updates": 2})).simulator.rows())
    assert isinstance(rows[0], Measurement)
    assert rows[0].values["groups"] == {}


def test_training_helps(tmp_path: Path) -> None:
    _, measured = rows_of(tiny(stop={"updates": 100}), tmp_path / "run")
    assert measured[-1].values["accuracy"] > measured[0].values["accuracy"] + 0.3
    assert measured[-1].values["loss"] < measured[0].values["loss"]


@pytest.mark.parametrize(
    ("stop", "ended"),
    [
        ({"updates": 7}, "updates"),
        ({"versions": 7}, "versions"),
        ({"time": 2.0}, "time"),
        ({"time": 90.0, "accuracy": 0.3}, "accuracy"),
    ],
)
def test_what_ends_a_run(stop: dict[str, Any], ended: str) -> None:
    chosen = tiny(stop={"updates": 100_000} | stop)
    prepared = prepare(chosen)
    rows = list(prepared.simulator.rows())
    assert prepared.simulator.ended == ended
    last = rows[-1]
    assert isinstance(last, Measurement)
    assert last.updates == last.version == 7 or ended in ("time", "accuracy")
    assert last.time == 2.0 or ended != "time"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scenario": {"clients": 61}},
            r"clients = 61 .* need 61 examples and there are 60; have at most 60",
        ),
        ({"model": {"name": "mnist-cnn"}}, r"mnist-cnn wants images .* shape \(64,\): choose linear or mlp"),
        ({"model": {"name": "point"}}, r"point wants rows .* examples have shape \(64,\)"),
        (
            {"strategy": {"name": "fedbuff", "size": 6}},
            r"strategy\.size = 6 is above the 5 clients.* lower it",
        ),
        (
            {"scenario": {"scheduler": {"name": "concurrency", "limit": 6}}},
            r"scheduler\.limit = 6 is above the 5 clients there are: lower it",
        ),
        (
            {"strategy": {"name": "fedavg"}, "scenario": {"rounds": {"size": 6}}},
            r"rounds\.size = 6 is above the 5 clients there are: lower it",
        ),
        (
            {"strategy": {"name": "fedavg"}, "scenario": {"rounds": {"name": "bernoulli", "p": [0.1, 0.2]}}},
            r"rounds\.p has 2 values, which do not divide 5 clients into equal blocks: give 1 value",
        ),
        ({"local": {"steps": [1, 2]}}, r"steps has 2 numbers, but there is a client 2: give one per client"),
        ({"scenario": {"delay": {"name": "trace"}}}, r"file = '' names no trace; give a CSV file"),
        (
            {"strategy": {"name": "asgd", "per": "tick"}},
            r"ASGD steps once per tick, .*use the scheduler 'ticks'",
        ),
        (
            {"strategy": {"name": "fedecho"}, "scenario": {"data": {"held_out": 0}}},
            r"FedEcho distils: it needs",
        ),
        (
            {"scenario": {"data": {"name": "mnist", "folder": "/nowhere"}}},
            r"train-images-idx3-ubyte .* is not in /nowhere/MNIST/raw and /nowhere; it is published at yann",
        ),
    ],
)
def test_bad_input_ends_before_anything_runs(changes: dict[str, Any], message: str) -> None:
    name = changes.get("strategy", {}).get("name", "fedasync")
    with pytest.raises(InputError, match=message) as caught:
        prepare(tiny(name, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(
        InputError, match=r"runtime\.device = 'cuda', but torch sees no CUDA device: use device"
    ):
        prepare(tiny(runtime={"device": "cuda"}))
