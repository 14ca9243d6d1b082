"""An experiment that runs in a tenth of a second, and ways to read what it left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from afield.experiments.codec import merge
from afield.experiments.config import Config, config
from afield.experiments.run import prepare, run
from afield.runtimes.rows import Measurement

TINY: dict[str, Any] = {
    "label": "tiny",
    "strategy": {"name": "fedasync"},
    "model": {"name": "linear"},
    "local": {"epochs": 1, "batch": 8, "rate": 0.1},
    "scenario": {
        "clients": 5,
        "data": {"name": "digits", "limit": 60, "held_out": 20},
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "delay": {"name": "lognormal", "sigma": 0.8},
        "rounds": {"name": "cohort", "size": 3},
    },
    "measure": {"versions": 4},
    "stop": {"updates": 20},
}
# Where five clients are fewer than the default asks for.
SIZES = {name: {"size": 3} for name in ("fedbuff", "ca2fl", "fadas", "fedac", "fedecho")}


def tiny(name: str = "fedasync", /, **changes: Any) -> Config:
    """The tiny run of a strategy by its name."""
    rule = {"strategy": {"name": name, **SIZES.get(name, {})}}
    return config(merge(merge(TINY, rule), changes))


def rows_of(chosen: Config, folder: Path) -> tuple[list[Any], list[Measurement]]:
    """Run into the folder; the receipts and the measurements as the simulator gave them."""
    rows = list(run(prepare(chosen), folder))
    measured = [row for row in rows if isinstance(row, Measurement)]
    return [row for row in rows if not isinstance(row, Measurement)], measured
