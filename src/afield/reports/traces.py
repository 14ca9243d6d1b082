"""The pictures of a report as plotly draws them: plain data, so that nothing here needs plotly."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from afield.reports import curves
from afield.reports.curves import AXES, Curve, Floats, by_label, curve, on_grid
from afield.reports.digest import TERMS, Digest, Facts
from afield.reports.load import Run

COLOURS = (*curves.COLOURS[:6], "#8C8C8C")  # black cannot be seen on a dark page
DASHES = ("solid", "dash", "dot", "dashdot")
POINTS = 300  # of a line: a page is narrower than that many differences
FLOOR = 1e-10  # rounding alone; lower would leave no room for what matters

View = tuple[str, list[dict[str, Any]], dict[str, Any]]  # its name, traces, layout


@dataclass(frozen=True)
class Picture:
    """One plot: what it shows, what to know about it, and its views, of which one is seen at a time."""

    name: str
    title: str
    views: list[View]
    note: str = ""
    tall: bool = False
    missing: str = ""  # why there is nothing to see


def packed(values: Any, kind: str = "f4") -> Any:
    """Numbers as plotly.js reads them: short ones as a list, others as base64 (a third of the text's size)."""
    array = np.asarray(values, float)
    if array.size < 24:
        return [
            None if not math.isfinite(value) else float(f"{value:.7g}") for value in array.ravel().tolist()
        ]
    told = {"dtype": kind, "bdata": base64.b64encode(array.astype(f"<{kind}").tobytes()).decode()}
    if array.ndim == 2:
        told["shape"] = f"{array.shape[0]}, {array.shape[1]}"
    return told


def matrix(values: Floats) -> Any:
    """Rows and columns: nested lists where that is short, since a list of a few numbers has no shape."""
    if values.size < 24:
        return [[None if not math.isfinite(value) else float(value) for value in row] for row in values]
    return packed(values)


def line(i: int, label: str, xs: Any, ys: Any, **more: Any) -> dict[str, Any]:
    style = {"color": COLOURS[i % 7], "dash": DASHES[i // 7 % 4], "width": 2}
    trace = {"type": "scatter", "mode": "lines", "name": html.escape(label), "x": packed(xs), "y": packed(ys)}
    return {**trace, "line": style, "legendgroup": str(i), **more}


def band(i: int, xs: Floats, low: Floats, high: Floats) -> dict[str, Any]:
    red, green, blue = (int(COLOURS[i % 7][k : k + 2], 16) for k in (1, 3, 5))
    return {
        "type": "scatter",
        "x": packed(np.concatenate([xs, xs[::-1]])),
        "y": packed(np.concatenate([high, low[::-1]])),
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},0.18)",
        "line": {"width": 0},
        "mode": "lines",
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": str(i),
    }


def thinned(grid: Floats, values: Floats) -> tuple[Floats, Floats]:
    """At most `POINTS` of the points, first and last among them."""
    if len(grid) <= POINTS:
        return grid, values
    keep = np.unique(np.linspace(0, len(grid) - 1, POINTS).round().astype(int))
    return grid[keep], values[:, keep]


def lines(groups: Sequence[tuple[str, list[Curve]]], **more: Any) -> list[dict[str, Any]]:
    """A line per label, the mean of its seeds, over the band of their range."""
    traces = []
    for i, (label, seeds) in enumerate(groups):
        seeds = [one for one in seeds if len(one[0])]
        if not seeds:
            continue
        grid, held = thinned(*on_grid(seeds))
        if len(seeds) > 1:
            traces.append(band(i, grid, held.min(axis=0), held.max(axis=0)))
        traces.append(line(i, label, grid, held.mean(axis=0), **more))
    return traces


def progress(runs: Sequence[Run], key: str, title: str, target: float | None = None) -> Picture:
    """A metric against every axis."""
    percent = key == "accuracy"
    views: list[View] = []
    groups = by_label(runs)
    values = [row[key] for run in runs for row in run.series(key) if math.isfinite(row[key])]
    logarithmic = not percent and values and min(values) > 0 and max(values) > 30 * min(values)
    for x, name in AXES.values():
        traces = lines([(label, [curve(run, x, key) for run in group]) for label, group in groups.items()])
        if not traces:
            continue
        layout: dict[str, Any] = {
            "xaxis": {"title": {"text": name}},
            "yaxis": {"title": {"text": title.lower()}, "tickformat": ".0%" if percent else None},
            "hovermode": "x unified",
        }
        if logarithmic:
            layout["yaxis"]["type"] = "log"
        if percent:
            layout["yaxis"]["hoverformat"] = ".1%"
        if percent and target is not None:
            layout["shapes"] = [
                {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target}
                | {"line": {"dash": "dot", "width": 1, "color": "#888"}}
            ]
        views.append((name, traces, layout))
    seeds = max(len(group) for group in groups.values())
    note = "Mean of the seeds; the band is their range. " if seeds > 1 else ""
    where = f"{key}-plot" if key != "accuracy" else "accuracy"
    return Picture(where, title, views, f"{note}Click a name to hide its line, twice to see it alone.")


def times_to_any(facts: Facts) -> Picture:
    """For every accuracy, when it was first reached: no target is privileged."""
    grid = np.linspace(0.01, 1, 100)
    traces = []
    for i, digest in enumerate(facts.digests):
        times = np.stack([_first_times(seen.run, grid) for seen in digest.seen])
        known = np.isfinite(times).all(axis=0)
        if known.any():
            low, high = times.min(axis=0)[known], times.max(axis=0)[known]
            mean = times[:, known].mean(axis=0)
            if len(times) > 1:
                sides = {"x": packed(np.concatenate([high, low[::-1]]))}
                around = np.concatenate([grid[known], grid[known][::-1]])
                traces.append({**band(i, grid[known], low, high), **sides, "y": packed(around)})
            traces.append(line(i, digest.label, mean, grid[known]))
    layout = {
        "xaxis": {"title": {"text": "virtual time until first reached"}},
        "yaxis": {"title": {"text": "test accuracy"}, "tickformat": ".0%", "hoverformat": ".0%"},
    }
    note = "Further left is faster. A line ends at the accuracy that not every seed reached."
    return Picture("times", "Time to any accuracy", [("", traces, layout)] if traces else [], note)


def _first_times(run: Run, grid: Floats) -> Floats:
    time, accuracy = curve(run, "time", "accuracy")
    if not len(time):
        return np.full(len(grid), np.nan)
    highest = np.maximum.accumulate(np.nan_to_num(accuracy, nan=-1.0))
    place = np.searchsorted(highest, grid, side="left")
    return np.where(place < len(time), time[np.minimum(place, len(time) - 1)], np.nan)


def staleness(digests: Iterable[Digest]) -> Picture:
    """How stale the used updates were, seeds together."""
    boxes, density, means, tails, peaks = [], [], [], [], []
    for i, digest in enumerate(digests):
        logs = [seen.log for seen in digest.seen]
        found = np.concatenate([log.staleness[log.used] for log in logs])
        if not len(found):
            continue
        weight = np.concatenate([log.weight[log.used] for log in logs])
        boxes.append(_box(i, digest.label, found))
        edges = _edges(int(found.max()))
        place = np.searchsorted(edges, found, side="right") - 1
        counts = np.bincount(place, minlength=len(edges))
        width = edges[1] - edges[0] if len(edges) > 1 else 1.0
        centre = edges + (width - 1) / 2
        share = counts / len(found) / width
        # A label with one bin is a spike that would flatten all others.
        spike = {"mode": "markers"} if len(edges) == 1 else {}
        stepped = {"color": COLOURS[i % 7], "dash": DASHES[i // 7 % 4], "width": 2, "shape": "hvh"}
        density.append(line(i, digest.label, centre, share, line=stepped, **spike))
        tails.append(float(np.quantile(found, 0.99)))
        peaks.append(0.0 if spike else float(share.max()))
        seen_here = counts > 0
        mean = np.bincount(place, weight, minlength=len(edges))[seen_here] / counts[seen_here]
        marks = {"mode": "lines+markers", "marker": {"size": 5}}
        means.append(line(i, digest.label, centre[seen_here], mean, **marks))
    if not boxes:
        return Picture("staleness", "Staleness", [], missing="No run here kept its receipts.")
    x = {"title": {"text": "staleness (versions)"}, "rangemode": "tozero"}
    share_axis = {
        "title": {"text": "share of updates per version"},
        "tickformat": ".0%",
        "hoverformat": ".2%",
    }
    near = {**share_axis, "range": [0, 1.1 * (max(peaks) or 1)]}
    far = {**share_axis, "tickformat": "~r", "type": "log"}
    views: list[View] = [
        ("quantiles", boxes, {"xaxis": x, "yaxis": {"autorange": "reversed"}, "showlegend": False}),
        ("distribution", density, {"xaxis": {**x, "range": [-0.5, max(1.0, *tails)]}, "yaxis": near}),
        ("logarithmic", density, {"xaxis": x, "yaxis": far}),
        ("weight given", means, {"xaxis": x, "yaxis": {"title": {"text": "mean weight"}}}),
    ]
    note = "Versions between the model that an update started from and the one it met. Refused updates do not count. "
    return Picture(
        "staleness", "Staleness of updates", views, note + "Boxes: quartiles; whiskers: 5 % and 95 %."
    )


def _box(i: int, label: str, values: Any) -> dict[str, Any]:
    low, first, middle, third, high = (float(q) for q in np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95)))
    box = {"q1": [first], "median": [middle], "q3": [third], "lowerfence": [low], "upperfence": [high]}
    told = {"type": "box", "orientation": "h", "name": html.escape(label), "y": [html.escape(label)]}
    return {**told, **box, "mean": [float(np.mean(values))], "marker": {"color": COLOURS[i % 7]}}


def _edges(most: int) -> Floats:
    """The left ends of at most about 60 bins of whole numbers."""
    return np.arange(0, most + 1, max(1, math.ceil((most + 1) / 60)), dtype=float)


# -- why steps err ----------------------------------------------------------------------------------------


def errors(runs: Sequence[Run]) -> list[Picture]:
    """Noise, bias and delay; drift; the effective number of clients."""
    groups = by_label(runs)
    titles = {
        "noise": "noise |u - E u|²",
        "bias": "bias |E u - stale mean|²",
        "delay": "delay |stale mean - true|²",
    }

    def views(keys: Iterable[tuple[str, str]], points: Callable[[Run, str], Curve], log: bool) -> list[View]:
        found = []
        for key, title in keys:
            traces = lines([(label, [points(run, key) for run in seeds]) for label, seeds in groups.items()])
            y = {"title": {"text": title}, "type": "log" if log else "linear", "exponentformat": "power"}
            if traces:
                found.append((key, traces, {"xaxis": {"title": {"text": "virtual time"}}, "yaxis": y}))
        return found

    def floored(run: Run, key: str) -> Curve:
        xs, ys = curve(run, "time", key)
        return xs, np.maximum(ys, FLOOR)

    split = views([(term, titles[term]) for term in TERMS], floored, log=True)
    note = (
        "Three parts of each step's error (ACE, section 3.3). Rules that are not linear in deltas have none."
    )
    rest = views(
        [("drift", "mean |w - base| over clients")], lambda run, key: curve(run, "time", key), log=False
    )
    rest += views([("clients that count", "1 / Σ share²")], lambda run, _: _effective(run), log=False)
    missing = "Not recorded: run with --set measure.diagnose=true."
    return [
        Picture("terms", "Why steps err", split, note, missing="" if split else missing),
        Picture("drift", "Drift, and how many clients count", rest, missing="" if rest else missing),
    ]


def _effective(run: Run) -> Curve:
    """As many equal shares would spread the model as widely (Kish)."""
    found = []
    for row in run.diagnostics:
        share = np.array(row.get("share", ()), float)
        if share.sum() > 0:
            found.append((row["time"], float(share.sum() ** 2 / np.square(share).sum())))
    return np.array([at for at, _ in found], float), np.array([value for _, value in found], float)
