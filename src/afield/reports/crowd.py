"""Pictures of clients in a report: who took part, whose model it is, what happened when, who is left behind."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from afield.reports.clients import Clients, participation, shares, stretch
from afield.reports.columns import short
from afield.reports.curves import Curve, Floats, by_label
from afield.reports.digest import Digest, Seen
from afield.reports.load import Run
from afield.reports.traces import Picture, View, line, lines, matrix, packed

SEQUENCE = "Viridis"
BANDS = (0, 1, 3, 10, 30, 100, 300, 1000)  # of staleness in the timeline
BAND_COLOURS = ("#440154", "#443983", "#31688e", "#21918c", "#35b779", "#90d743", "#fde725", "#fdae25")


def heat(x: Any, z: Floats, title: str, clients: Clients, told: str, **more: Any) -> dict[str, Any]:
    """Rows are clients by their numbers, or groups of neighbours in speed by their rank."""
    bar = {"title": {"text": title, "side": "right"}, "thickness": 12, "outlinewidth": 0}
    trace = {"type": "heatmap", "x": packed(x), "z": matrix(z), "colorscale": SEQUENCE, "colorbar": bar}
    if _alone(clients):
        trace["y"] = [str(part[0]) for part in clients.rows]
    who = "client" if _alone(clients) else "speed rank of the group"
    return {**trace, "hovertemplate": f"{told}<br>{who} %{{y}}<extra></extra>", **more}


def _alone(clients: Clients) -> bool:
    return len(clients.rows) == clients.count


def heat_maps(digests: Sequence[Digest]) -> list[Picture]:
    updates, share = [], []
    for digest in digests:
        seen = digest.seen[0]
        if not len(seen.log.client):
            continue
        layout = _by_speed(seen.clients, "virtual time")
        z, ends = participation(seen.clients, seen.log)
        width = ends[0] / 2
        hover = "time %{x:.3g}: %{z:.3g} updates per client"
        updates.append((digest.label, [heat(ends - width, z, "updates", seen.clients, hover)], layout))
        if (found := shares(seen.run, seen.clients)) is not None:
            z, times = found
            scale = {
                "zmin": 0,
                "zmax": 2,
                "colorscale": "RdBu",
            }  # 1 in the middle: plotly ignores zmid beside limits
            hover = "time %{x:.3g}: %{z:.2f} equal shares"
            share.append((digest.label, [heat(times, z, "shares", seen.clients, hover, **scale)], layout))
    lost = "No run here kept its receipts."
    seeds = _first_seed(digests)
    grouped = _grouped(digests)
    part = Picture(
        "participation",
        "Who took part, and when",
        updates,
        f"Used updates per client; the fastest client at the top.{grouped}{seeds}",
        tall=True,
        missing="" if updates else lost,
    )
    told = "Each client's share of the model over an equal share: 1 is fair, blue is less, red more (2 and up alike)."
    missing = "" if share else "Not recorded: run with --set measure.diagnose=true."
    return [part, Picture("shares", "Whose model it is", share, f"{told}{grouped}{seeds}", True, missing)]


def _first_seed(digests: Sequence[Digest]) -> str:
    return " The first seed of each label." if any(len(digest.seen) > 1 for digest in digests) else ""


def _grouped(digests: Sequence[Digest]) -> str:
    most = max(digest.seen[0].clients.count for digest in digests)
    rows = max(len(digest.seen[0].clients.rows) for digest in digests)
    return f" Aggregated: {most:,} clients in {rows} rows of neighbours in speed." if most > rows else ""


def _by_speed(clients: Clients, x: str) -> dict[str, Any]:
    y = {"title": {"text": "clients, fast to slow"}, "autorange": "reversed", "showgrid": False}
    return {"xaxis": {"title": {"text": x}}, "yaxis": y | ({"type": "category"} if _alone(clients) else {})}


def timeline(digests: Sequence[Digest]) -> Picture:
    """Tasks as bars from their start to their arrival."""
    views, partly = [], []
    for digest in digests:
        seen = digest.seen[0]
        if not len(seen.log.client):
            continue
        part = stretch(seen.clients, seen.log)
        traces = []
        bands = np.searchsorted(BANDS, part.staleness, side="right") - 1
        for number in np.unique(np.where(part.used, bands, -1)):
            chosen = (bands == number) & part.used if number >= 0 else ~part.used
            blank = np.full(int(chosen.sum()), np.nan)
            xs = np.stack([part.started[chosen], part.arrived[chosen], blank], axis=1).ravel()
            ys = np.stack([part.row[chosen], part.row[chosen], blank], axis=1).ravel()
            colour = BAND_COLOURS[number] if number >= 0 else "#D55E00"
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "x": packed(xs),
                    "y": packed(ys),
                    "name": _band_name(int(number)),
                    "line": {"width": 5, "color": colour},
                    "marker": {"size": 5, "symbol": "line-ns-open", "color": colour},
                    "hovertemplate": "%{x:.4g}<extra>%{fullData.name}</extra>",
                }
            )
        end = _first_look(part.arrived, part.row, part.until)
        layout = _by_speed(seen.clients, "virtual time")
        layout["yaxis"] |= {
            "tickvals": list(range(0, len(part.shown), max(1, len(part.shown) // 10))),
            "ticktext": [
                str(part.shown[i]) for i in range(0, len(part.shown), max(1, len(part.shown) // 10))
            ],
            "title": {"text": "client, fast to slow"},
            "range": [len(part.shown) - 0.5, -0.5],
        }
        for key in ("autorange", "type"):
            layout["yaxis"].pop(key, None)
        layout["xaxis"]["range"] = [0, end]
        layout["legend"] = {"title": {"text": "staleness"}}
        views.append((digest.label, traces, layout))
        if not part.whole:
            partly.append((len(part.shown), part.until))
    note = "A bar is one task. Drag to zoom, double-click for all of it."
    if partly:
        clients, until = max(count for count, _ in partly), min(end for _, end in partly)
        note += f" Not all is drawn: {clients} clients, evenly from fast to slow, at least up to time {short(until)}."
    note += _first_seed(digests)
    missing = "" if views else "No run here kept its receipts."
    return Picture("timeline", "Client timeline", views, note, tall=True, missing=missing)


def _band_name(number: int) -> str:
    if number < 0:
        return "refused"
    if number == len(BANDS) - 1:
        return f"{BANDS[-1]} or more"
    low, high = BANDS[number], BANDS[number + 1] - 1
    return str(low) if low == high else f"{low} to {high}"


def _first_look(arrived: Floats, row: Any, until: float) -> float:
    """Where a picture of all tasks would be solid, the first look is at about ten of a middle client."""
    if not len(row):
        return 1.0
    middle = np.sort(arrived[row == int(np.median(row))])
    return float(min(until, middle[min(9, len(middle) - 1)])) if len(middle) else until


def partition(digests: Sequence[Digest]) -> Picture:
    """Clients x classes, one picture per data set and seed that differ."""
    views: list[View] = []
    shown: list[Floats] = []
    for digest in digests:
        seen = digest.seen[0]
        labels = seen.clients.labels
        if labels is None or any(np.array_equal(labels, other) for other in shown):
            continue
        shown.append(labels)
        mix = np.stack([labels[part].mean(axis=0) for part in seen.clients.rows])
        hover = "class %{x}: %{z:.3g} examples"
        layout = _by_speed(seen.clients, "class")
        layout["xaxis"]["dtick"] = 1 if mix.shape[1] <= 20 else None
        trace = heat(np.arange(mix.shape[1]), mix, "examples", seen.clients, hover)
        views.append((digest.label, [trace], layout))
    if len(views) == 1:
        views = [("", views[0][1], views[0][2])]
    note = "Examples per client and class; the fastest client at the top." + _grouped(digests)
    note += _first_seed(digests) if views else ""
    missing = "" if views else "Not recorded: no classes, too many clients, or runs of an older afield."
    return Picture("partition", "Who has which data", views, note, tall=True, missing=missing)


# -- who is left behind ---------------------------------------------------------------------------------


def fairness(runs: Sequence[Run], digests: Sequence[Digest]) -> list[Picture]:
    return [_deciles(digests), _halves(runs), _classes(digests)]


def _deciles(digests: Sequence[Digest]) -> Picture:
    """Accuracy by speed, tenth by tenth."""
    traces = []
    for i, digest in enumerate(digests):
        curves_ = [found for seen in digest.seen if (found := _by_tenth(seen)) is not None]
        if curves_:
            marks = {"mode": "lines+markers", "marker": {"size": 7}}
            xs = np.arange(1, len(curves_[0]) + 1)
            traces.append(line(i, digest.label, xs, np.nanmean(curves_, axis=0), **marks))
    layout = {
        "xaxis": {"title": {"text": "tenth of the clients, fastest first"}, "dtick": 1},
        "yaxis": {"title": {"text": "accuracy on their mix"}, "tickformat": ".0%", "hoverformat": ".1%"},
        "hovermode": "x unified",
    }
    note = (
        "The test set, weighted to each client's own mix of classes, at the last evaluation; mean over seeds. "
        "A line that falls to the right serves slow clients worse."
    )
    missing = (
        "" if traces else "Needs per-class accuracy and clients.json (not there, or labels were changed)."
    )
    return Picture(
        "tenths", "Fast and slow clients", [("", traces, layout)] if traces else [], note, missing=missing
    )


def _by_tenth(seen: Seen) -> Floats | None:
    if seen.accuracies is None or seen.clients.count < 10:
        return None
    parts = np.array_split(seen.clients.order, 10)
    return np.array([np.nanmean(seen.accuracies[part]) for part in parts])


def _halves(runs: Sequence[Run]) -> Picture:
    def points(run: Run, group: str) -> Curve:
        found = [(row["time"], (row.get("groups") or {}).get(group)) for row in run.metrics]
        known = [(at, value) for at, value in found if value is not None]
        return np.array([at for at, _ in known], float), np.array([value for _, value in known], float)

    groups = by_label(runs)
    traces = []
    for group, dash in (("fast", "solid"), ("slow", "dot")):
        found = [(label, [points(run, group) for run in seeds]) for label, seeds in groups.items()]
        for trace in lines(found):
            if trace.get("fill"):
                continue
            trace["line"] = {**trace["line"], "dash": dash}
            trace["hovertemplate"] = f"%{{y:.1%}} ({group})"
            traces.append(trace | {"showlegend": group == "fast"})
    layout = {
        "xaxis": {"title": {"text": "virtual time"}},
        "yaxis": {"title": {"text": "accuracy on their mix"}, "tickformat": ".0%", "hoverformat": ".1%"},
    }
    missing = "" if traces else "Not recorded: no classes, or one client."
    note = "Accuracy on the data of the faster half of the clients (line) and of the slower half (dots)."
    return Picture(
        "halves",
        "Fast and slow halves over time",
        [("", traces, layout)] if traces else [],
        note,
        False,
        missing,
    )


def _classes(digests: Sequence[Digest]) -> Picture:
    names, rows = [], []
    for digest in digests:
        found = [seen.per_class for seen in digest.seen if seen.per_class]
        if found and len({len(one) for one in found}) == 1:
            names.append(html.escape(digest.label))
            as_numbers = np.array([[np.nan if v is None else v for v in one] for one in found], float)
            rows.append(as_numbers.mean(axis=0))
    same = [row for row in rows if len(row) == len(rows[0])]
    if not rows or len(same) < len(rows):
        return Picture(
            "classes", "Accuracy per class", [], missing="Not recorded, or other classes in each run."
        )
    z = np.stack(rows)
    bar = {"title": {"text": ""}, "thickness": 12, "tickformat": ".0%", "outlinewidth": 0}
    trace = {
        "type": "heatmap",
        "x": list(range(z.shape[1])),
        "y": names,
        "z": matrix(z),
        "colorscale": SEQUENCE,
        "colorbar": bar,
        "hovertemplate": "%{y}, class %{x}: %{z:.1%}<extra></extra>",
    }
    if z.shape[1] <= 12:
        trace |= {"texttemplate": "%{z:.0%}", "textfont": {"size": 11}}
    layout = {
        "xaxis": {"title": {"text": "class"}, "dtick": 1 if z.shape[1] <= 20 else None},
        "yaxis": {"autorange": "reversed"},
    }
    return Picture(
        "classes", "Accuracy per class", [("", [trace], layout)], "At the last evaluation, mean over seeds."
    )
