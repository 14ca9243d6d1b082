"""What diagnosed runs show: why steps err, how far clients lag behind, whose model it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from afield.reports.curves import Axis, Curve, axis
from afield.reports.load import LoadError, Run
from afield.reports.plots import Panel, panels

Points = list[tuple[float, float]]
TERMS = {
    "noise": "noise: |u - E u|²",
    "bias": "bias: |E u - stale mean gradient|²",
    "delay": "delay: |stale mean - true gradient|²",
}
FLOOR = (
    1e-10  # a term below is drawn there: ACE's bias is rounding alone, and would leave no room for the others
)


def diagnosis(runs: Sequence[Run], path: str | Path, x: Axis = "time") -> None:
    """ACE's three terms, the drift of the clients' bases, the effective number of clients, accuracy by group.

    A label without a quantity has no line in its panel: mixing rules have no noise, bias and delay.
    """
    key, _ = axis(x)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.diagnostics:
            groups.setdefault(run.label, []).append(run)
    if not groups:
        raise LoadError("none of the runs was diagnosed: run them again with --set measure.diagnose=true")
    terms = [
        Panel(name, [_curves(groups, partial(_term, x=key, key=term))], log=True)
        for term, name in TERMS.items()
    ]
    drift = _curves(groups, partial(_term, x=key, key="drift", floor=0.0))
    halves = [_curves(groups, partial(_accuracy, x=key, group=group)) for group in ("fast", "slow")]
    rest = [
        Panel("drift: mean |w - base| over clients", [drift]),
        Panel("effective number of clients: 1 / Σ share²", [_curves(groups, partial(_effective, x=key))]),
        Panel("accuracy: fast half (line), slow half (dots)", halves, percent=True),
    ]
    panels(list(groups), [*terms, *rest], path, x)


def _curves(groups: dict[str, list[Run]], points: Callable[[Run], Points]) -> list[list[Curve]]:
    """Per label, the curves of its seeds that have any point."""
    found = [[points(run) for run in group] for group in groups.values()]
    return [[(c[0], c[1]) for seed in seeds if seed for c in [np.array(seed, float).T]] for seeds in found]


def _term(run: Run, x: str, key: str, floor: float = FLOOR) -> Points:
    return [(row[x], max(row[key], floor)) for row in run.series(key)]


def _accuracy(run: Run, x: str, group: str) -> Points:
    found = ((row[x], (row.get("groups") or {}).get(group)) for row in run.metrics)
    return [(at, value) for at, value in found if value is not None]


def _effective(run: Run, x: str) -> Points:
    """As many equal shares would spread the model as widely (Kish); where nothing was heard yet, no point."""
    points = []
    for row, found in zip(run.metrics, run.diagnostics, strict=False):
        shares = np.array(found.get("share", ()), float)
        if shares.sum() > 0:
            points.append((row[x], float(shares.sum() ** 2 / np.square(shares).sum())))
    return points
