"""What a run's summary says of memory and of distillation, beside what can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny import rows_of, tiny

from afield.core.table import ClientTable
from afield.core.types import ServerState
from afield.experiments.costs import size_of
from afield.reports.load import load
from afield.reports.quantities import quantity

WEIGHTS = 650  # of a linear model of 64 inputs and 10 classes


def summary(folder: Path, name: str, /, **changes: Any) -> dict[str, Any]:
    rows_of(tiny(name, **changes), folder)
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_tensors_are_counted_once_wherever_they_are() -> None:
    vector = torch.zeros(10)
    table = ClientTable.like(vector, 3, "int8")
    table.rows[1], table.scales[1] = torch.zeros(10, dtype=torch.int8), torch.zeros(1)
    assert size_of(ServerState(params=vector)) == 40
    assert size_of([vector, {"again": vector}, (table,)]) == 40 + 10 + 4


def test_a_table_is_the_servers_or_the_clients(tmp_path: Path) -> None:
    server = summary(tmp_path / "a", "ace", strategy={"held": "server"})
    client = summary(tmp_path / "b", "ace", strategy={"held": "client"})
    assert (server["client_bytes"], client["client_bytes"]) == (0, 4 * WEIGHTS)
    assert server["contributors"] == client["contributors"] == 5
    assert server["server_bytes"] - client["server_bytes"] == 5 * 4 * WEIGHTS


def test_versions_held_are_those_in_flight(tmp_path: Path) -> None:
    found = summary(tmp_path / "a", "fedasync", scenario={"scheduler": {"name": "concurrency", "limit": 2}})
    assert 1 <= found["versions_held"] <= 2
    rounds = summary(tmp_path / "b", "fedavg", stop={"updates": 9})
    assert rounds["versions_held"] == 1  # all participants of a round have one base


def test_distillations_are_timed(tmp_path: Path) -> None:
    changes = {"samples": 20, "batch": 10}
    found = summary(tmp_path / "a", "fedecho", strategy=changes)
    assert found["distillations"] == found["versions"] == 20 // 3
    assert found["inferences"] == found["updates"] == 20
    assert 0 < found["distil_wall"] < found["distil_wall"] + found["infer_wall"] < found["wall"]
    run = load(tmp_path / "a")
    assert quantity("distillation").read(run) == found["distil_wall"] / 6
    assert quantity("inference").read(run) == found["infer_wall"] / 20
    assert "distillations" not in summary(tmp_path / "b", "fedbuff")


def test_a_model_and_a_log_may_be_left_out(tmp_path: Path) -> None:
    summary(tmp_path / "a", "fedasync", runtime={"model": False, "receipts": False})
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["clients.json", "config.toml", "environment.json", "metrics.jsonl", "summary.json"]


def test_interrupted_tasks_are_counted(tmp_path: Path) -> None:
    bound = {"max_staleness": 2, "stale": "restart"}
    found = summary(tmp_path / "a", "fedasync", server=bound)
    log = load(tmp_path / "a").receipts["number"].to_pylist()
    # task numbers rise by one: those that never arrived were interrupted, but for the four still in flight
    assert found["interrupted"] > 0
    assert max(log) + 1 - len(log) <= found["interrupted"] + 4
    assert summary(tmp_path / "b", "fedasync")["interrupted"] == 0
