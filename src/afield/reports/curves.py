"""What every picture of runs shares, whatever draws it: axes, colours, curves of several seeds on one grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from afield.reports.load import Run

Floats = NDArray[np.float64]
Curve = tuple[Floats, Floats]

# Okabe and Ito (2008), told apart with any kind of colour vision; their yellow is left out, which
# cannot be seen as a thin line on white. Beyond seven labels the dash pattern changes as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GRID_POINTS = 400  # about one per two pixels of a 7 inch picture

Axis = Literal["time", "updates", "versions", "wall", "bytes"]
AXES: dict[str, tuple[str, str]] = {
    "time": ("time", "virtual time"),
    "updates": ("updates", "accepted updates"),
    "versions": ("version", "version"),
    "wall": ("wall", "wall time (s)"),
    "bytes": ("bytes", "bytes received"),
}


def axis(x: Axis) -> tuple[str, str]:
    """The key of a row that an axis shows, and its title."""
    if x not in AXES:
        raise ValueError(f"x = {x!r} is not known; choose from {', '.join(AXES)}")
    return AXES[x]


def by_label(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs by label, in the order of their first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def curve(run: Run, x: str, y: str) -> Curve:
    rows = [row for row in run.series(y) if isinstance(row.get(x), int | float)]
    return np.array([row[x] for row in rows], float), np.array([row[y] for row in rows], float)


def on_grid(curves: Sequence[Curve]) -> tuple[Floats, Floats]:
    """Several curves (rows) on one grid; each holds its value until its next point.

    Only where every curve has a value: a mean over other seeds further on would jump for no reason.
    """
    start = max(xs[0] for xs, _ in curves)
    stop = min(xs[-1] for xs, _ in curves)
    grid = np.unique(np.concatenate([xs for xs, _ in curves]))
    grid = grid[(start <= grid) & (grid <= stop)]
    if grid.size == 0:  # one seed ends before another starts
        grid = np.array([stop])
    if len(curves) > 1 and grid.size > GRID_POINTS:
        grid = np.linspace(start, stop, GRID_POINTS)
    return grid, np.stack([held(one, grid) for one in curves])


def held(one: Curve, grid: Floats) -> Floats:
    """A curve at other places: the value at the last point at or before; its first before that."""
    xs, ys = one
    return ys[np.maximum(np.searchsorted(xs, grid, side="right") - 1, 0)]
