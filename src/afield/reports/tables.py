"""Runs side by side: one row per label, the mean over its seeds."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from afield.reports.curves import by_label, curve, held
from afield.reports.load import Run
from afield.reports.noise import Spread, spread_of

USUAL_TARGET = 0.85
SPARKS = 12  # points of a small curve


@dataclass(frozen=True, slots=True)
class Row:
    """One label. None: no seed of it has this quantity."""

    label: str
    runs: int
    unfinished: int
    final_accuracy: Spread | None
    best_accuracy: Spread | None
    final_loss: Spread | None
    accuracy_at_time: Spread | None
    accuracy_at_updates: Spread | None
    loss_at_time: Spread | None
    loss_at_updates: Spread | None
    time_to_target: Spread | None  # over the seeds that reached it; its count says how many did
    staleness: Spread | None
    updates: Spread | None
    versions: Spread | None
    curve: tuple[
        float, ...
    ] = ()  # accuracy, else loss: its mean at equal steps of time, up to the common one


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found, and the points at which it looked."""

    target: float | None  # None where nothing has an accuracy
    time: float  # the largest virtual time that all runs reached
    updates: int  # the smallest final number of updates
    rows: tuple[Row, ...]


def compare(runs: Sequence[Run], target: float | None = None) -> Comparison:
    """Runs grouped by label, in the order of their first appearance. `target`: an accuracy in [0, 1]."""
    evaluated = [run for run in runs if run.metrics]
    time = min((run.metrics[-1]["time"] for run in evaluated), default=0.0)
    updates = min((run.metrics[-1]["updates"] for run in evaluated), default=0)
    if target is None:
        target = default_target(runs)
    rows = tuple(_row(label, group, target, time, updates) for label, group in by_label(runs).items())
    return Comparison(target, time, updates, rows)


def default_target(runs: Iterable[Run]) -> float | None:
    """0.85 where some run reaches it, else 90 % of the best final accuracy in whole percents."""
    runs = list(runs)
    best = [value for run in runs if (value := best_of(run)) is not None]
    if not best:
        return None
    if max(best) >= USUAL_TARGET:
        return USUAL_TARGET
    # Diverged runs may end in NaN, which no maximum survives.
    ends = [final_of(run, "accuracy") for run in runs]
    finals = [value for value in ends if value is not None and not math.isnan(value)]
    return max(0.01, round(0.9 * max(finals, default=max(best)), 2))


def _row(label: str, runs: Sequence[Run], target: float | None, time: float, updates: int) -> Row:
    return Row(
        label=label,
        runs=len(runs),
        unfinished=sum(not run.finished for run in runs),
        final_accuracy=spread_of(final_of(run, "accuracy") for run in runs),
        best_accuracy=spread_of(best_of(run) for run in runs),
        final_loss=spread_of(final_of(run, "loss") for run in runs),
        accuracy_at_time=spread_of(_value_at(run, "accuracy", "time", time) for run in runs),
        accuracy_at_updates=spread_of(_value_at(run, "accuracy", "updates", updates) for run in runs),
        loss_at_time=spread_of(_value_at(run, "loss", "time", time) for run in runs),
        loss_at_updates=spread_of(_value_at(run, "loss", "updates", updates) for run in runs),
        time_to_target=spread_of(_time_to(run, target) for run in runs),
        staleness=spread_of(_mean_staleness(run) for run in runs),
        updates=spread_of(final_of(run, "updates") for run in runs),
        versions=spread_of(final_of(run, "version") for run in runs),
        curve=_small_curve(runs, "accuracy" if target is not None else "loss", time),
    )


def _small_curve(runs: Sequence[Run], key: str, time: float) -> tuple[float, ...]:
    curves = [found for run in runs if len((found := curve(run, "time", key))[0])]
    if not curves:
        return ()
    grid = np.linspace(0, time, SPARKS)
    return tuple(float(value) for value in np.mean([held(one, grid) for one in curves], axis=0))


def final_of(run: Run, key: str) -> float | None:
    rows = run.series(key)
    return rows[-1][key] if rows else None


def best_of(run: Run) -> float | None:
    values = [row["accuracy"] for row in run.series("accuracy") if not math.isnan(row["accuracy"])]
    return max(values, default=None)


def _value_at(run: Run, key: str, axis: str, limit: float) -> float | None:
    """The last evaluation at or before: what was known by then, nothing interpolated."""
    rows = [row for row in run.series(key) if row[axis] <= limit]
    return rows[-1][key] if rows else None


def _time_to(run: Run, target: float | None) -> float | None:
    if target is None:
        return None
    return next((row["time"] for row in run.series("accuracy") if row["accuracy"] >= target), None)


def _mean_staleness(run: Run) -> float | None:
    """Over the updates that were used: a refused one moved nothing."""
    if run.finished and not run.config.get("runtime", {}).get("receipts", True):
        told: float | None = run.summary.get("staleness")
        return told
    log = run.columns(["staleness", "refused"])
    used = log.filter(pc.equal(log["refused"], ""))
    mean: float | None = pc.mean(used["staleness"]).as_py()
    return mean


# -- as a file --------------------------------------------------------------------------------------

_SPREADS = tuple(name for name in Row.__slots__ if name not in ("label", "runs", "unfinished", "curve"))


def to_csv(comparison: Comparison, path: str | Path) -> None:
    """Every number in full precision. A quantity that no seed has, and the std of one seed, stay empty."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = ["label", "runs", "unfinished", "target", "equal_time", "equal_updates"]
    for name in _SPREADS:
        header += [name, f"{name}_std"]
    header.insert(header.index("time_to_target"), "reached_target")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        for row in comparison.rows:
            reached = row.time_to_target.count if row.time_to_target else 0
            line: dict[str, object] = {
                "label": row.label,
                "runs": row.runs,
                "unfinished": row.unfinished,
                "target": comparison.target,
                "equal_time": comparison.time,
                "equal_updates": comparison.updates,
                "reached_target": None if comparison.target is None else reached,
            }
            for name in _SPREADS:
                spread: Spread | None = getattr(row, name)
                if spread is not None:
                    line[name] = spread.mean
                    line[f"{name}_std"] = spread.std if spread.count > 1 else None
            writer.writerow(line)
