"""Runs that are stopped and taken up, the scenes that they are stopped in, and all that they leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playback import BATTERY
from tiny import tiny

from afield.core.protocols import Strategy
from afield.experiments.codec import encode, merge
from afield.experiments.config import REGISTRIES, Config, experiment
from afield.experiments.keep import Asking, StoppedError, stored
from afield.experiments.run import prepare, run
from afield.experiments.sweep import prepare_all, run_together

WALL = ("wall", "distil_wall", "infer_wall")  # what the clock decides


def of_battery(name: str, **changes: Any) -> Config:
    """A small run of a row of the battery, under what its pace needs."""
    strategy: Any = BATTERY[name]
    rule = encode(strategy, REGISTRIES, Strategy)
    pace = getattr(strategy, "pace", "arrival")
    if pace == "tick":
        changes = {"scenario": {"scheduler": {"name": "ticks"}}} | changes
    return tiny(rule.pop("name"), **{"strategy": rule, "stop": {"updates": 40}, **changes})


def outcome(folder: Path) -> dict[str, bytes | list[Any]]:
    """Every file of a finished run, without what the clock decides."""
    found: dict[str, bytes | list[Any]] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if name == "environment.json":
            continue
        if file.suffix in (".json", ".jsonl"):
            text = file.read_text(encoding="utf-8")
            rows = [json.loads(text)] if file.suffix == ".json" else list(map(json.loads, text.splitlines()))
            found[name] = [{key: value for key, value in row.items() if key not in WALL} for row in rows]
        else:
            found[name] = file.read_bytes()
    return found


def whole(chosen: Config, folder: Path) -> dict[str, Any]:
    list(run(prepare(chosen), folder))
    return outcome(folder)


def stopped_after(rows: Any, count: int, asking: Asking) -> bool:
    """Take so many rows, ask to stop; whether the run was stopped before its end."""
    try:
        for number, _ in enumerate(rows, start=1):
            asking.asked = number >= count
    except StoppedError:
        return True
    return False


def in_pieces(chosen: Config, folder: Path, length: int) -> tuple[dict[str, Any], int]:
    """Stopped after every so many rows and taken up by a new simulator, until it is done; and how many stops."""
    stops, asking = 0, Asking()
    rows = run(prepare(chosen), folder, asking=asking)
    while stopped_after(rows, length, asking):
        stops += 1
        asking = Asking()
        rows = run(prepare(stored(folder)), folder, again=True, asking=asking)
    return outcome(folder), stops


SCENES: dict[str, dict[str, Any]] = {
    "all": {},
    "concurrency": {"scenario": {"scheduler": {"name": "concurrency", "limit": 3}}},
    "check-in": {"scenario": {"scheduler": {"name": "check-in", "pause": 0.5, "limit": 3}}},
    "sampled": {"scenario": {"scheduler": {"name": "sampled-staleness", "max": 3}}},
    "ticks": {"scenario": {"scheduler": {"name": "ticks"}}, "strategy": {"name": "asgd", "per": "tick"}},
    "ticks limited": {
        "scenario": {"scheduler": {"name": "ticks", "limit": 3}},
        "strategy": {"name": "fedbuff", "per": "tick", "size": 2},
    },
    "cohort": {"strategy": {"name": "fedavg"}},
    "deadline": {
        "strategy": {"name": "fedstale"},
        "scenario": {"rounds": {"name": "bernoulli", "p": 0.6, "deadline": 1.5}},
    },
    "on-off abort": {
        "scenario": {"availability": {"name": "on-off", "on": 2.0, "off": 0.5}},
        "server": {"offline": "abort"},
    },
    "restart": {"server": {"max_staleness": 2, "stale": "restart"}},
    "drop": {"server": {"max_staleness": 2, "stale": "drop"}},
    "before": {"server": {"reply": "before"}},
    "held by clients": {"strategy": {"name": "ace", "held": "client"}},
    "hold": {"strategy": {"name": "fedbuff", "size": 3}},
    "by time": {"measure": {"time": 0.3}, "stop": {"time": 6.0}},
    "accuracy": {"stop": {"updates": 400, "accuracy": 0.4}},
    "loop": {"training": {"method": "loop"}},
    "workers": {"training": {"method": "workers"}},
    "workers, rows in files": {
        "training": {"method": "workers"},
        "strategy": {"name": "mr-asyncfl"},
        "runtime": {"table": "disk", "block": 3},
    },
    "block of 2": {"runtime": {"block": 2}},
    "block of 1": {"runtime": {"block": 1}},
    "in files": {"strategy": {"name": "mr-asyncfl"}, "runtime": {"table": "disk"}},
    "int8": {"strategy": {"name": "ca2fl", "size": 2, "precision": "int8"}},
    "diagnosed": {"strategy": {"name": "ace"}, "measure": {"versions": 3, "diagnose": True}},
    "diagnosed buffer": {
        "strategy": {"name": "fedbuff", "size": 3},
        "measure": {"versions": 2, "diagnose": True},
    },
    "diagnosed models": {"strategy": {"name": "mr-asyncfl"}, "measure": {"versions": 3, "diagnose": True}},
    "no receipts": {"runtime": {"receipts": False}},
}


def of_scene(name: str, **changes: Any) -> Config:
    table = {"stop": {"updates": 40}} | SCENES[name] | changes
    return tiny(table.get("strategy", {}).get("name", "fedasync"), **table)


TABLE: dict[str, Any] = {
    "seeds": [0, 1],
    "sweep": {"together": True},
    "model": {"name": "mlp", "hidden": [16]},
    "local": {"batch": 16, "rate": 0.2},
    "scenario": {"clients": 8, "delay": {"name": "exponential"}, "rounds": {"name": "cohort", "size": 3}},
    "stop": {"updates": 30},
    "measure": {"versions": 5},
    "variants": [
        {"strategy": {"name": "fedasync"}},
        {"strategy": {"name": "fedavg"}},
        {"label": "other rate", "strategy": {"name": "fedasync"}, "local": {"rate": 0.1}},
        {"label": "by the loop", "strategy": {"name": "fedbuff", "size": 2}, "training": {"method": "loop"}},
    ],
}
RUNS = experiment(
    merge(TABLE, {"seeds": [0]})
    | {
        "variants": [
            *TABLE["variants"],
            {
                "label": "by the tape",
                "strategy": {"name": "ca2fl", "size": 2},
                "training": {"method": "vmap"},
            },
            {"label": "rows in a file", "strategy": {"name": "ace"}, "runtime": {"table": "disk"}},
        ]
    }
).runs


def places(folder: Path) -> list[Path]:
    return [folder / str(number) for number in range(len(RUNS))]


def together(folder: Path, runs: tuple[Config, ...], again: bool, asking: Asking | None = None) -> Any:
    return run_together(prepare_all(runs), places(folder), again=again, asking=asking)
