"""The picture of diagnosed runs: why steps err, how far clients lag behind, whose model it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

from afield.reports import plots
from afield.reports.load import LoadError, Run

Points = list[tuple[float, float]]
TERMS = {
    "noise": "noise: |u - E u|²",
    "bias": "bias: |E u - stale mean gradient|²",
    "delay": "delay: |stale mean - true gradient|²",
}
FLOOR = 1e-10  # a term below is drawn there: ACE's bias is rounding alone, and would leave no room for the others


def diagnosis(runs: Sequence[Run], path: str | Path, x: plots.Axis = "time") -> None:
    """ACE's three terms, the drift of the clients' bases, the effective number of clients, accuracy by group.

    A label without a quantity has no line in its panel: mixing rules have no noise, bias and delay.
    """
    key, title = plots.axis(x)
    groups = _diagnosed(runs)
    figure, panels = plots.canvas(6, (11.0, 6.4), rows=2)
    for panel, (term, name) in zip(panels, TERMS.items(), strict=False):
        _lines(panel, groups, partial(_term, x=key, key=term))
        panel.set_title(name, fontsize=9, color=plots.INK, loc="left")
        if panel.lines:
            panel.set_yscale("log")
    _lines(panels[3], groups, partial(_term, x=key, key="drift", floor=0.0))
    panels[3].set_title("drift: mean |w - base| over clients", fontsize=9, color=plots.INK, loc="left")
    _lines(panels[4], groups, partial(_effective, x=key))
    panels[4].set_title("effective number of clients: 1 / Σ share²", fontsize=9, color=plots.INK, loc="left")
    for group, dash in (("fast", "-"), ("slow", (0, (1.5, 1.2)))):
        _lines(panels[5], groups, partial(_accuracy, x=key, group=group), dash)
    panels[5].set_title(
        "accuracy: fast half (line), slow half (dots)", fontsize=9, color=plots.INK, loc="left"
    )
    panels[5].yaxis.set_major_formatter(PercentFormatter(1.0))
    for panel in panels:
        panel.set_xmargin(0)
        panel.set_xlabel(title)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        if not panel.lines:
            panel.text(0.5, 0.5, "not recorded", transform=panel.transAxes, ha="center", color=plots.INK)
    keys = [Line2D([], [], color=plots.colour(i), linestyle=plots.dash(i)) for i in range(len(groups))]
    figure.legend(keys, list(groups), loc="outside upper center", ncols=min(len(groups), 6), frameon=False)
    plots.save(figure, path)


def diagnosed(runs: Sequence[Run]) -> list[Run]:
    """Those that recorded something to draw."""
    return [run for run in runs if run.diagnostics]


def _diagnosed(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in diagnosed(runs):
        groups.setdefault(run.label, []).append(run)
    if not groups:
        raise LoadError(
            "none of the runs was diagnosed: run them with --set measure.diagnose=true to have something to draw"
        )
    return groups


def _lines(
    panel: Axes, groups: dict[str, list[Run]], points: Callable[[Run], Points], dash: Any = None
) -> None:
    """The mean over seeds, one line per label."""
    for i, group in enumerate(groups.values()):
        curves = [np.array(found, float).T for run in group if (found := points(run))]
        if curves:
            grid, held = plots.on_grid([(xs, ys) for xs, ys in curves])
            style = plots.dash(i) if dash is None else dash
            panel.plot(grid, held.mean(axis=0), color=plots.colour(i), linestyle=style, linewidth=1.3)


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
