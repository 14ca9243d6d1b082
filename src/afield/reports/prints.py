"""Figures for print: the widths and font sizes of a two-column paper, so that nothing is scaled when it is set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from afield.reports.clients import participation, shares, stretch
from afield.reports.columns import short
from afield.reports.curves import COLOURS, Axis, Floats, axis, by_label, curve, on_grid
from afield.reports.digest import Seen
from afield.reports.load import LoadError, Run
from afield.reports.noise import student
from afield.reports.plots import DASHES

COLUMN, PAGE = 3.35, 6.9  # inches: a column, and the page, of ICML, NeurIPS-like, IEEE and ACM layouts
STYLE: dict[Any, Any] = {
    "font.family": "serif",
    "font.serif": ["Times New Roman", "Nimbus Roman", "TeX Gyre Termes", "STIXGeneral", "DejaVu Serif"],
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,  # TrueType: what submission systems ask for
    "svg.fonttype": "none",
    "svg.hashsalt": "afield",  # the same runs give the same file
    "savefig.dpi": 300,
}
BANDS = {"std": "standard deviation", "interval": "95 % interval", "range": "range"}


@dataclass(frozen=True)
class Wanted:
    """How a figure is to look."""

    x: Axis = "time"
    wide: bool = False
    band: str = "std"
    target: float | None = None

    @property
    def width(self) -> float:
        return PAGE if self.wide else COLUMN


def figure(
    runs: Sequence[Run],
    path: str | Path,
    kind: str = "accuracy",
    *,
    x: Axis = "time",
    wide: bool = False,
    band: str = "std",
    target: float | None = None,
) -> None:
    """One figure of these runs."""
    if not runs:
        raise LoadError("there is no run to draw")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        made = FIGURES[kind](runs, Wanted(x, wide, band, target))
        # Without the date two figures of the same runs are the same file.
        undated: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
        made.savefig(path, metadata=undated.get(path.suffix))


def _canvas(width: float, height: float, panels: int = 1, **more: Any) -> tuple[Figure, list[Axes]]:
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    axes = made.subplots(1, panels, squeeze=False, **more)[0]
    return made, list(axes)


def _look(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i // len(COLOURS) % len(DASHES)]}


def _legend(made: Figure, labels: Sequence[str], wide: bool) -> None:
    keys = [Line2D([], [], linewidth=1.2, **_look(i)) for i in range(len(labels))]
    columns = min(len(labels), 6 if wide else 3)
    made.legend(
        keys, list(labels), loc="outside upper center", ncols=columns, frameon=False, handlelength=1.6
    )


def around(held: Floats, band: str) -> tuple[Floats, Floats]:
    """The lower and upper edge of the band over seeds (rows)."""
    mean, count = held.mean(axis=0), len(held)
    if band == "range":
        return held.min(axis=0), held.max(axis=0)
    half = held.std(axis=0, ddof=1)
    if band == "interval":
        half = half * student(count - 1) / math.sqrt(count)
    return mean - half, mean + half


def _curves(key: str) -> Callable[[Sequence[Run], Wanted], Figure]:
    def draw(runs: Sequence[Run], wanted: Wanted) -> Figure:
        x, title = axis(wanted.x)
        groups = by_label(runs)
        made, (axes,) = _canvas(wanted.width, 0.68 * COLUMN)
        for i, (label, group) in enumerate(groups.items()):
            seeds = [found for run in group if len((found := curve(run, x, key))[0])]
            if not seeds:
                raise LoadError(f"{label} has no {key!r} to draw")
            grid, held = on_grid(seeds)
            axes.plot(grid, held.mean(axis=0), linewidth=1.1, zorder=3, **_look(i))
            if len(seeds) > 1:
                low, high = around(held, wanted.band)
                axes.fill_between(grid, low, high, color=_look(i)["color"], alpha=0.18, linewidth=0, zorder=2)
        axes.set_xlabel(title)
        axes.set_ylabel(f"test {key}")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value) if value else "0"))
        axes.margins(x=0)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.4)
        if key == "accuracy":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_ylim(max(axes.get_ylim()[0], 0), min(axes.get_ylim()[1], 1))
            if wanted.target is not None:
                axes.axhline(wanted.target, color="#777777", linewidth=0.6, linestyle=(0, (4, 3)), zorder=1)
        elif axes.dataLim.intervaly[0] > 0 and np.divide(*axes.dataLim.intervaly[::-1]) > 30:
            axes.set_yscale("log")
        _legend(made, list(groups), wanted.wide)
        return made

    return draw


def _firsts(runs: Sequence[Run]) -> list[Seen]:
    """The first seed of each label."""
    found = [Seen(group[0]) for group in by_label(runs).values()]
    for seen in found:
        if not len(seen.log.client):
            raise LoadError(f"{seen.run.folder / 'receipts'} has no update to draw")
    return found


def _staleness(runs: Sequence[Run], wanted: Wanted) -> Figure:
    """The share of updates that are at most so stale."""
    groups = by_label(runs)
    made, (axes,) = _canvas(wanted.width, 0.68 * COLUMN)
    most = 1.0
    for i, group in enumerate(groups.values()):
        logs = [Seen(run).log for run in group]
        found = np.concatenate([log.staleness[log.used] for log in logs])
        if not len(found):
            raise LoadError(f"{group[0].folder / 'receipts'} has no update to draw")
        values, counts = np.unique(found, return_counts=True)
        share = counts.cumsum() / len(found)
        axes.step(np.append(values, 1e9), np.append(share, 1), where="post", linewidth=1.1, **_look(i))
        most = max(most, float(np.quantile(found, 0.995)))
    # Linear to 10, then logarithmic: 0 must be on it, and a few are a hundred times as stale as most.
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(0, most)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value) if value else "0"))
    axes.set_ylim(0, 1.01)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.4)
    axes.set_xlabel("staleness (versions)")
    axes.set_ylabel("updates at most so stale")
    _legend(made, list(groups), wanted.wide)
    return made


def _heatmap(runs: Sequence[Run], wanted: Wanted) -> Figure:
    """Share of the model per client over time where diagnosed, else used updates; the first seed of each label."""
    firsts = _firsts(runs)
    owned = [shares(seen.run, seen.clients) for seen in firsts]
    by_share = all(found is not None for found in owned)
    width = max(wanted.width, min(PAGE, 1.35 * len(firsts)))
    made, panels = _canvas(width, 0.7 * COLUMN, len(firsts), sharey=True)
    drawn = [
        found if by_share and found else participation(s.clients, s.log)
        for found, s in zip(owned, firsts, strict=True)
    ]
    most = max(float(z.max()) for z, _ in drawn) or 1.0
    limits: dict[str, Any] = {
        "vmin": 0,
        "vmax": 2 if by_share else most,
        "cmap": "RdBu_r" if by_share else "viridis",
    }
    for axes, seen, (z, times) in zip(panels, firsts, drawn, strict=True):
        picture = axes.imshow(
            z,
            aspect="auto",
            interpolation="nearest",
            extent=(0, float(times[-1]) or 1.0, len(z), 0),
            **limits,
        )
        axes.set_title(seen.run.label, fontsize=8)
        axes.set_xlabel("virtual time")
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("clients, fast to slow")
    bar = made.colorbar(picture, ax=panels, pad=0.01, extend="max" if by_share and most > 2 else "neither")
    bar.set_label("share of the model / equal share" if by_share else "updates used", fontsize=7)
    bar.outline.set_visible(False)
    return made


def _timeline(runs: Sequence[Run], wanted: Wanted) -> Figure:
    """Tasks as bars, coloured by staleness; the first seed of each label, from its start."""
    firsts = _firsts(runs)
    width = max(wanted.width, min(PAGE, 1.35 * len(firsts)))
    made, panels = _canvas(width, 0.75 * COLUMN, len(firsts), sharey=True)
    parts = [stretch(seen.clients, seen.log, rows=16, tasks=4000) for seen in firsts]
    end = min((part.until for part in parts), default=1.0)
    # So long that the slowest client shown is seen twice, and no longer: a fast one is a solid line otherwise.
    longest = max(float((part.arrived - part.started).max(initial=0.0)) for part in parts)
    end = min(end, 2.2 * longest) or 1.0
    most = max(float(part.staleness[part.started < end].max(initial=1)) for part in parts)
    norm = LogNorm(1, max(most + 1, 2))
    for axes, seen, part in zip(panels, firsts, parts, strict=True):
        near = part.started < end
        ends = zip(part.started[near], part.arrived[near], part.row[near], strict=True)
        bars = LineCollection(
            [[(start, row), (stop, row)] for start, stop, row in ends], cmap="viridis", norm=norm
        )
        bars.set_array(part.staleness[near] + 1)
        bars.set(linewidth=3, capstyle="butt")
        axes.add_collection(bars)
        starts = part.started[near]
        axes.plot(starts, part.row[near], "|", color="white", markersize=4, markeredgewidth=0.5)
        axes.set_xlim(0, end)
        axes.set_ylim(len(part.shown) - 0.5, -0.5)
        axes.set_yticks([])
        axes.set_title(seen.run.label, fontsize=8)
        axes.set_xlabel("virtual time")
        axes.xaxis.set_major_locator(MaxNLocator(3))
    panels[0].set_ylabel("clients, fast to slow")
    bar = made.colorbar(bars, ax=panels, pad=0.01)
    bar.set_label("staleness + 1", fontsize=7)
    bar.outline.set_visible(False)
    return made


def _partition(runs: Sequence[Run], wanted: Wanted) -> Figure:
    """Clients x classes as dots whose area is the number of examples."""
    seen = next((one for one in map(Seen, runs) if one.clients.labels is not None), None)
    if seen is None or seen.clients.labels is None:
        raise LoadError("no run here has a partition to draw (clients.json with labels): run it again")
    clients = seen.clients
    shown = clients.order[np.unique(np.linspace(0, clients.count - 1, 60).round().astype(int))]
    labels = seen.clients.labels[shown]
    made, (axes,) = _canvas(wanted.width, 0.62 * COLUMN)
    column, row = np.meshgrid(np.arange(len(shown)), np.arange(labels.shape[1]), indexing="ij")
    room = (wanted.width * 60 / len(shown)) ** 2
    areas = labels / max(labels.max(), 1) * min(room, 60)
    axes.scatter(column.ravel(), row.ravel(), s=areas.ravel(), color=COLOURS[0], linewidth=0, clip_on=False)
    axes.set_xlabel(
        "client, fast to slow" + (f" ({len(shown)} of {clients.count})" if len(shown) < clients.count else "")
    )
    axes.set_ylabel("class")
    axes.yaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.margins(x=0.02, y=0.06)
    return made


FIGURES: dict[str, Callable[[Sequence[Run], Wanted], Figure]] = {
    "accuracy": _curves("accuracy"),
    "loss": _curves("loss"),
    "staleness": _staleness,
    "heatmap": _heatmap,
    "timeline": _timeline,
    "partition": _partition,
}
