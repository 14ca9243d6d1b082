"""One self-contained page of runs: words, tables and plots, with no need of a network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from afield.reports.columns import Column, columns_of, notes, short
from afield.reports.crowd import fairness, heat_maps, partition, timeline
from afield.reports.curves import by_label
from afield.reports.digest import Digest, Facts, differences, facts_of, flat
from afield.reports.load import LoadError, Run
from afield.reports.noise import Spread, ties_of
from afield.reports.traces import Picture, errors, progress, staleness, times_to_any
from afield.reports.words import paragraph

RUNS_TOLD = 200  # whole configs in the page; beyond, of the first seed of each label


def write(runs: Sequence[Run], path: str | Path, target: float | None = None, title: str = "") -> None:
    """The page of these runs."""
    path = Path(path)
    text = page(runs, target, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def page(runs: Sequence[Run], target: float | None = None, title: str = "") -> str:
    script = _plotly()  # first: whoever lacks it should not wait for the rest
    facts = facts_of(runs, target)
    digests = facts.digests
    goal = facts.comparison.target
    losses = [progress(runs, "loss", "Test loss"), progress(runs, "train_loss", "Training loss")]
    accuracy = progress(runs, "accuracy", "Test accuracy", goal)
    progressed = [picture for picture in [accuracy, *losses] if picture.views]
    times = times_to_any(facts)
    parts: list[tuple[str, str, list[str | Picture]]] = [
        ("overview", "Overview", [_words(facts), _ranking(facts), *progressed[:1]]),
        ("progress", "Progress", [_times(facts), *([times] if times.views else []), *progressed[1:]]),
        ("staleness", "Staleness", [staleness(digests)]),
        ("clients", "Clients", [*heat_maps(digests), timeline(digests)]),
        ("fairness", "Left behind", [_behind(digests), *fairness(runs, digests)]),
        ("errors", "Why steps err", list(errors(runs))),
        ("data", "Data", [partition(digests)]),
        ("settings", "Settings", [_settings(runs), _again(runs)]),
    ]
    pictures = {p.name: p for _, _, inside in parts for p in inside if isinstance(p, Picture)}
    tabs = "".join(
        f'<button type="button" role="tab" data-tab="{name}" aria-selected="false">{text}</button>'
        for name, text, _ in parts
    )
    sections = "".join(
        f'<section id="{name}" role="tabpanel" hidden>{"".join(map(_shown, inside))}</section>'
        for name, _, inside in parts
    )
    told = {name: {"views": picture.views} for name, picture in pictures.items() if picture.views}
    filled = {
        "title": html.escape(title or " · ".join(by_label(runs))),
        "facts": _facts(runs, facts),
        "tabs": tabs,
        "sections": sections,
        "footer": _footer(runs),
        "css": _web("page.css"),
        "js": _web("page.js"),
        # "</script>" in a label must not end the script.
        "pictures": json.dumps(told, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "plotly": script,
    }
    first, *rest = _web("page.html").split("@")
    pieces = [first]
    for place, piece in enumerate(rest):
        pieces.append(filled[piece] if place % 2 == 0 else piece)
    return "".join(pieces)


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs  # the one place that imports it
    except ImportError:
        raise LoadError("a report needs plotly: pip install 'afield[report]'") from None
    script: str = get_plotlyjs()
    return script


def _web(name: str) -> str:
    return (resources.files("afield.reports") / "web" / name).read_text(encoding="utf-8")


def _shown(part: str | Picture) -> str:
    if isinstance(part, str):
        return part
    note = f'<p class="note">{html.escape(part.note)}</p>' if part.note and part.views else ""
    if not part.views:
        return (
            f'<div class="card"><h2>{html.escape(part.title)}</h2><p class="missing">{part.missing}</p></div>'
        )
    tall = " tall" if part.tall else ""
    return (
        f'<div class="card"><h2>{html.escape(part.title)}</h2><div class="views" id="views-{part.name}"></div>'
        f'<div class="plot{tall}" id="plot-{part.name}"></div>{note}</div>'
    )


def _card(title: str, inside: str, note: str = "") -> str:
    told = f'<p class="note">{note}</p>' if note else ""
    return f'<div class="card"><h2>{html.escape(title)}</h2>{inside}{told}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]], side: str = "") -> str:
    """Cells are (text, class)."""
    top = "".join(f'<th class="{side}">{html.escape(text)}</th>' for text in head)
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{html.escape(text)}</td>' for text, kind in row) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


# -- the parts ------------------------------------------------------------------------------------------


def _facts(runs: Sequence[Run], facts: Facts) -> str:
    """What was run, in a line."""
    first = runs[0]
    scenario = first.config.get("scenario", {})
    data = {str(run.config.get("scenario", {}).get("data", {}).get("name", "")) for run in runs} - {""}
    clients = {digest.seen[0].clients.count for digest in facts.digests}
    seeds = {row.runs for row in facts.comparison.rows}
    parts = [
        f"{len(facts.digests)} label{'s' * (len(facts.digests) > 1)}, {len(runs)} run{'s' * (len(runs) > 1)}"
        f" ({_span(seeds)} seed{'s' * (max(seeds) > 1)} each)",
        f"{_span(clients)} clients",
        *([f"data: {', '.join(sorted(data))}"] if data else []),
    ]
    for key, name in (("partition", "partition"), ("delay", "delays"), ("availability", "availability")):
        values = {run.config.get("scenario", {}).get(key, {}).get("name") for run in runs} - {None}
        if len(values) == 1 and scenario:
            parts.append(f"{name}: {values.pop()}")
    return html.escape(" · ".join(parts))


def _span(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _words(facts: Facts) -> str:
    sentences = paragraph(facts) or ["There is nothing here yet that could be said in words."]
    return f'<div class="words"><p>{" ".join(map(html.escape, sentences))}</p></div>'


def _ranking(facts: Facts) -> str:
    columns = [column for column in columns_of(facts.comparison) if not column.picture]
    head = ["", *(column.title.replace("-\n", "") for column in columns)]
    rows = [
        [(row.label, ""), *((column.cells[i], _kind(column, i)) for column in columns)]
        for i, row in enumerate(facts.comparison.rows)
    ]
    told = ['<span class="key best">best</span>']
    if any(column.ties for column in columns):
        told.append('<span class="key tie">within noise of it</span> (Welch\'s t over seeds, 95 %).')
    if any(row.runs > 1 for row in facts.comparison.rows):
        told.append("Mean ± standard deviation over seeds.")
    told += [
        f"{note[0].upper()}{html.escape(note[1:])}."
        for note in notes(facts.comparison, columns)
        if note[0] not in "*~"
    ]
    return _card("Side by side", _table(head, rows), " ".join(told))


def _kind(column: Column, row: int) -> str:
    return "best" if row in column.best else "tie" if row in column.ties else ""


def _times(facts: Facts) -> str:
    """Time to target, with 95 % confidence intervals over seeds."""
    target = facts.comparison.target
    if target is None:
        return _card("Time to target", '<p class="missing">No run here has an accuracy.</p>')
    spreads = [digest.row.time_to_target for digest in facts.digests]
    whole = [
        i for i, d in enumerate(facts.digests) if (s := spreads[i]) is not None and s.count == d.row.runs
    ]
    best = min(whole, key=lambda i: _mean(spreads[i]), default=None)
    ties = ties_of(spreads, best) & set(whole) if best is not None else set()
    rows = []
    for i, digest in enumerate(facts.digests):
        spread = spreads[i]
        count = spread.count if spread else 0
        kind = "best" if i == best and len(whole) > 1 else "tie" if i in ties else ""
        ratio = (
            "-"
            if spread is None or best is None or not _mean(spreads[best])
            else f"{spread.mean / _mean(spreads[best]):.2f}"
        )
        rows.append(
            [
                (digest.label, ""),
                (f"{count} of {digest.row.runs}", ""),
                ("never" if spread is None else short(spread.mean), kind),
                (_interval(spread), ""),
                (ratio, ""),
                (_interval_of_bytes(digest.bytes_to_target), ""),
            ]
        )
    head = ["", "seeds that reached it", "time", "95 % interval", "over the fastest", "MB received by then"]
    note = "Over the seeds that reached it; the interval of the mean by Student's t. One seed has none."
    return _card(f"Time to {100 * target:.4g} %", _table(head, rows), note)


def _mean(spread: Spread | None) -> float:
    assert spread is not None
    return spread.mean


def _interval(spread: Spread | None) -> str:
    if spread is None or spread.margin is None:
        return "-"
    return f"{short(max(0.0, spread.mean - spread.margin))} to {short(spread.mean + spread.margin)}"


def _interval_of_bytes(spread: Spread | None) -> str:
    return "-" if spread is None else short(spread.mean / 1e6)


def _behind(digests: Sequence[Digest]) -> str:
    def told(spread: Spread | None, sign: str = "") -> str:
        if spread is None:
            return "-"
        margin = "" if spread.margin is None else f" ± {100 * spread.margin:.1f}"
        return f"{100 * spread.mean:{sign}.1f}{margin}"

    rows = [
        [
            (digest.label, ""),
            (told(digest.everyone), ""),
            (told(digest.slowest), ""),
            (told(digest.behind, "+"), ""),
            (told(digest.worst), ""),
            ("-" if digest.busiest is None else f"{100 * digest.busiest.mean:.0f} %", ""),
            ("-" if digest.silent is None else short(digest.silent.mean), ""),
        ]
        for digest in digests
    ]
    head = ["", "mean client %", "slowest tenth %", "difference", "worst tenth %", "updates of busiest tenth"]
    note = (
        "Accuracy on each client's own mix of classes (the test set, weighted), at the last evaluation; "
        "± is the 95 % interval over seeds."
    )
    return _card("Who is left behind", _table([*head, "clients never used"], rows), note)


def _settings(runs: Sequence[Run]) -> str:
    """The keys in which labels differ."""
    groups = by_label(runs)
    keys = differences(runs, besides=("seed", "label"))
    if not keys:
        return _card("Differences in settings", '<p class="missing">None but labels and seeds.</p>')
    configs = {label: [flat(run.config) for run in group] for label, group in groups.items()}
    rows = []
    for key in keys:
        cells = []
        for found in configs.values():
            values = dict.fromkeys(_value(config, key) for config in found)
            cells.append((" | ".join(values), "left"))
        rows.append([(key, ""), *cells])
    note = "Every key in which the runs differ, besides label and seed; a bar separates values of one label."
    return _card("Differences in settings", _table(["", *groups], rows, "left"), note)


def _value(config: dict[str, Any], key: str) -> str:
    return json.dumps(config[key]) if key in config else "-"


def _again(runs: Sequence[Run]) -> str:
    """How each line can be made again: the command, and the whole config."""
    groups = by_label(runs)
    told = runs if len(runs) <= RUNS_TOLD else [group[0] for group in groups.values()]
    inside = []
    for run in told:
        config = run.folder / "config.toml"
        packages = run.environment.get("packages", {})
        versions = [f"{name} {packages[name]}" for name in ("afield", "torch", "numpy") if packages.get(name)]
        command = " ".join(run.environment.get("command", ()))
        lines = [
            f"<summary><code>afield run {html.escape(str(config))}</code></summary>",
            f'<p class="note">{html.escape(run.label)}, seed {run.seed}'
            + (f"; made by <code>{html.escape(command)}</code>" if command else "")
            + (f"; with {html.escape(', '.join(versions))}" if versions else "")
            + (f", Python {html.escape(str(run.environment.get('python')))}" if versions else "")
            + "</p>",
            f"<pre>{html.escape(config.read_text(encoding='utf-8'))}</pre>",
        ]
        inside.append(f"<details>{''.join(lines)}</details>")
    left = (
        ""
        if len(told) == len(runs)
        else f" Shown for the first seed of each label ({len(runs)} runs in all)."
    )
    note = (
        "The config holds every default, so the command gives the same event log; the same bits on the same "
        f"machine and torch.{left}"
    )
    return _card("How to make each line again", "".join(inside), note)


def _footer(runs: Sequence[Run]) -> str:
    made = {str(run.environment.get("packages", {}).get("afield")) for run in runs} - {"None"}
    version = f" {', '.join(sorted(made))}" if made else ""
    receipts = sum(int(run.metrics[-1]["updates"]) if run.metrics else 0 for run in runs)
    return html.escape(f"afield{version} · {len(runs)} runs · {receipts:,} updates · needs no network")
