"""Runs side by side: one row per label, the mean over its seeds."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
from rich import box
from rich.table import Table
from rich.text import Text

from afield.reports.load import Run

USUAL_TARGET = 0.85
NOTHING = "-"
LABEL = 20  # characters of a label that are never given up to other columns


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over the seeds of a label that have it."""

    mean: float
    std: float  # of the sample (n - 1); 0 for one seed
    count: int


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
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    rows = tuple(_row(label, group, target, time, updates) for label, group in groups.items())
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
    )


def spread_of(values: Iterable[float | None]) -> Spread | None:
    present = [float(value) for value in values if value is not None]
    if not present:
        return None
    # statistics.stdev refuses what is not finite; a diverged seed makes the whole spread NaN.
    finite = all(math.isfinite(value) for value in present)
    std = (statistics.stdev(present) if finite else math.nan) if len(present) > 1 else 0.0
    return Spread(math.fsum(present) / len(present), std, len(present))


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


# -- as a table on the screen ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cells: list[str]
    ranks: list[float]  # smaller is better; infinite never wins; NaN takes no part
    spare: int = 0  # on a narrow screen columns are left out in this order; those of 0 never

    @property
    def width(self) -> int:
        return max(len(line) for line in (*self.title.split("\n"), *self.cells))


def to_rich(comparison: Comparison, width: int = 100) -> Table:
    """The comparison in `width` columns, where they are enough for the main ones; the best value is bold."""
    rows = comparison.rows
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    label = max((len(row.label) for row in rows), default=0)
    table.add_column("label", overflow="fold", min_width=min(label, LABEL))
    columns = _columns(comparison)
    spares = sorted((column for column in columns if column.spare), key=lambda column: column.spare)
    while spares and min(label, LABEL) + sum(1 + column.width for column in columns) > width:
        columns.remove(spares.pop(0))
    for column in columns:
        # Only the label may wrap: half a number is worse than none.
        table.add_column(column.title, justify="right", no_wrap=True)
    best = [_best_rows(column.ranks) for column in columns]
    for i, row in enumerate(rows):
        cells = [
            Text(column.cells[i], style="bold" if i in best[j] else "") for j, column in enumerate(columns)
        ]
        table.add_row(Text(row.label), *cells)
    unfinished = sum(row.unfinished for row in rows)
    if unfinished:
        table.caption = f"{unfinished} of {sum(row.runs for row in rows)} runs unfinished"
    return table


def _columns(comparison: Comparison) -> list[_Column]:
    rows = comparison.rows
    time, updates = _short(comparison.time), _short(comparison.updates)
    columns = [_Column("runs", [str(row.runs) for row in rows], [math.nan] * len(rows))]
    accurate = any(row.final_accuracy for row in rows)
    if accurate:
        columns.append(_accuracies("final\nacc %", [row.final_accuracy for row in rows]))
        columns.append(_accuracies("best\nacc %", [row.best_accuracy for row in rows], spare=2))
    columns.append(_losses("final\nloss", [row.final_loss for row in rows], spare=1 if accurate else 0))
    if accurate:
        at_time = [row.accuracy_at_time for row in rows]
        at_updates = [row.accuracy_at_updates for row in rows]
        columns.append(_accuracies(f"acc %\nat time\n{time}", at_time))
        columns.append(_accuracies(f"acc %\nat {updates}\nupdates", at_updates, spare=6))
        columns.append(_times(comparison))
    else:
        columns.append(_losses(f"loss\nat time\n{time}", [row.loss_at_time for row in rows]))
        columns.append(
            _losses(f"loss\nat {updates}\nupdates", [row.loss_at_updates for row in rows], spare=6)
        )
    columns.append(_plain("stale-\nness", [row.staleness for row in rows], spare=5))
    columns.append(_plain("up-\ndates", [row.updates for row in rows], spare=4))
    columns.append(_plain("ver-\nsions", [row.versions for row in rows], spare=3))
    return columns


def _accuracies(title: str, spreads: list[Spread | None], spare: int = 0) -> _Column:
    cells = [
        NOTHING if s is None else _with_std(s, f"{s.mean:.1%}"[:-1], f"{s.std:.1%}"[:-1]) for s in spreads
    ]
    return _Column(title, cells, [_rank(s, -1) for s in spreads], spare)


def _losses(title: str, spreads: list[Spread | None], spare: int = 0) -> _Column:
    cells = [NOTHING if s is None else _with_std(s, f"{s.mean:.3g}", f"{s.std:.2g}") for s in spreads]
    return _Column(title, cells, [_rank(s, 1) for s in spreads], spare)


def _plain(title: str, spreads: list[Spread | None], spare: int) -> _Column:
    """Facts about a run that are neither good nor bad: the mean, and nothing bold."""
    cells = [NOTHING if s is None else _short(s.mean) for s in spreads]
    return _Column(title, cells, [math.nan] * len(spreads), spare)


def _times(comparison: Comparison) -> _Column:
    cells, ranks = [], []
    most = max(
        (row.time_to_target.count / row.runs for row in comparison.rows if row.time_to_target), default=0
    )
    for row in comparison.rows:
        spread = row.time_to_target
        if spread is None:
            cells.append(NOTHING if row.final_accuracy is None else "never")
        elif row.runs == 1:
            cells.append(_short(spread.mean))
        else:
            cells.append(
                f"{_with_std(spread, _short(spread.mean), _short(spread.std, 2))} {spread.count}/{row.runs}"
            )
        # A mean over the few seeds that made it does not beat one over all of them.
        fair = spread is not None and spread.count / row.runs == most
        ranks.append(_rank(spread, 1) if fair else math.inf)
    return _Column(f"time\nto {100 * (comparison.target or 0):.4g} %", cells, ranks)


def _with_std(spread: Spread, mean: str, std: str) -> str:
    return f"{mean}±{std}" if spread.count > 1 else mean


def _rank(spread: Spread | None, sign: int) -> float:
    if spread is None:
        return math.nan
    return math.inf if math.isnan(spread.mean) else sign * spread.mean


def _best_rows(ranks: Sequence[float]) -> set[int]:
    """The rows with the best value; none where there is nothing to compare."""
    taking_part = [rank for rank in ranks if not math.isnan(rank)]
    if len(taking_part) < 2 or min(taking_part) == math.inf:
        return set()
    return {i for i, rank in enumerate(ranks) if rank == min(taking_part)}


def _short(number: float, digits: int = 3) -> str:
    """A number in five characters or so: 0.123, 12.3, 1234, 12.3k, 1.23M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Four digits are as short as three and a suffix, and exact.
        if abs(number) >= (1e4 if suffix == "k" and digits > 2 else size):
            return f"{float(f'{number / size:.{digits}g}'):g}{suffix}"
    return f"{number:.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:.{digits}g}"


# -- as a file --------------------------------------------------------------------------------------

_SPREADS = tuple(name for name in Row.__slots__ if name not in ("label", "runs", "unfinished"))


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
