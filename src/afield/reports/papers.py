"""A paper's table or figure beside ours: result.md, result.csv and pictures, from plan.json and run folders."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afield.reports.load import LoadError, Run, load
from afield.reports.noise import Spread, spread_of
from afield.reports.quantities import ALWAYS, QUANTITIES, Quantity, quantity
from afield.reports.ranking import Number, Ranking, compare

NOTHING = "-"


@dataclass(frozen=True)
class Place:
    """One cell of the table: its finished runs, one per seed, and the paper's entry."""

    row: str
    column: str
    variant: str
    runs: list[Run]
    theirs: Number | None
    told: str = ""  # what the paper says there where that is no number: "2.2 to 3.5"

    def ours(self, name: str) -> Spread | None:
        return spread_of(quantity(name).read(run) for run in self.runs)

    def number(self, name: str) -> Number | None:
        found = self.ours(name)
        return None if found is None else Number(found.mean, found.std if found.count > 1 else None)

    @property
    def line(self) -> tuple[str, str]:
        return self.row, self.variant


@dataclass(frozen=True)
class Outcome:
    """A plan and all that was found of it."""

    plan: dict[str, Any]
    places: list[Place]

    @property
    def paper(self) -> dict[str, Any]:
        found: dict[str, Any] = self.plan["paper"]
        return found

    @property
    def metric(self) -> str:
        return str(self.paper["metric"])

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(place.column for place in self.places))

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(place.row for place in self.places))

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Rows, or rows and variants: what has a line of its own in a table or a figure."""
        return list(dict.fromkeys(place.line for place in self.places))

    @property
    def runs(self) -> list[Run]:
        return [run for place in self.places for run in place.runs]

    @property
    def chooses(self) -> bool:
        """A heat map of which variant is best."""
        return self.paper["kind"] == "heatmap" and any(self.plan["axes"]["variants"])

    def at(self, line: tuple[str, str], column: str) -> Place | None:
        return next((p for p in self.places if p.line == line and p.column == column), None)

    def chosen(self, row: str, column: str) -> str | None:
        """The variant with the best number."""
        sign = quantity(self.metric).better or 1
        found = [
            (sign * number.mean, place.variant)
            for place in self.places
            if (place.row, place.column) == (row, column)
            and (number := place.number(self.metric)) is not None
            and math.isfinite(number.mean)
        ]
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def their_choice(self, row: str, column: str) -> str | None:
        told = self.their_cell(row, column)
        return told.split()[0] if told else None

    def their_cell(self, row: str, column: str) -> str:
        """The paper's entry: a variant, and what it says of it."""
        entry = _entry(self.plan, row, column, "")
        return "" if entry is None or entry == [] else str(entry)

    def our_cell(self, row: str, column: str) -> str:
        """The best variant, and how far it is ahead of the first and of the last one: "0.5 (Δ0 0.3, Δ1 0.9)"."""
        best = self.chosen(row, column)
        if best is None:
            return ""
        measure, variants = quantity(self.metric), self.plan["axes"]["variants"]
        found = {variant: self.at((row, variant), column) for variant in (best, variants[0], variants[-1])}
        numbers = {variant: place.number(self.metric) for variant, place in found.items() if place}
        top = numbers[best]
        gains = [
            f"Δ{variant} {_digits(abs(top.mean - number.mean), measure.digits)}"
            for variant, number in numbers.items()
            if variant in (variants[0], variants[-1]) and top is not None and number is not None
        ]
        return f"{best} ({', '.join(sorted(gains))})" if gains else best


def write(folder: Path) -> Outcome:
    """result.md, result.csv and the pictures of the reproduction in this folder."""
    outcome = gather(folder)
    (folder / "result.md").write_text(markdown(outcome), encoding="utf-8")
    _to_csv(outcome, folder / "result.csv")
    if outcome.runs and outcome.paper["kind"] != "table":
        from afield.reports import figures  # here: importing matplotlib takes 0.3 s

        figures.draw(outcome, folder)
    return outcome


def gather(folder: Path) -> Outcome:
    """The plan of a folder, and its finished runs."""
    file = folder / "plan.json"
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{file} cannot be read: {error}") from error
    for name in (plan["paper"]["metric"], *plan["paper"]["extras"]):
        quantity(name)
    places = []
    for cell in plan["cells"]:
        seeds = sorted((folder / cell["folder"]).glob("seed-*"), key=lambda path: int(path.name[5:]))
        runs = [run for run in map(load, seeds) if run.finished]
        labels = (cell["row"], cell["column"], cell["variant"])
        entry = _entry(plan, *labels)
        places.append(Place(*labels, runs, _number(entry), entry if isinstance(entry, str) else ""))
    return Outcome(plan, places)


def _entry(plan: Mapping[str, Any], row: str, column: str, variant: str) -> Any:
    """The paper's entry for a cell, as the preset has it."""
    given = plan["theirs"].get(row or "all")
    if isinstance(given, Mapping):
        given = given.get(variant)
    elif variant:
        return None  # an entry of the whole cell: which variant is best there
    return None if given is None else given[plan["axes"]["columns"].index(column)]


def _number(entry: Any) -> Number | None:
    if entry is None or entry == [] or isinstance(entry, str):
        return None
    return Number(*entry) if isinstance(entry, list) else Number(entry)


# -- the text -----------------------------------------------------------------------------------------


def markdown(outcome: Outcome) -> str:
    """The whole result."""
    plan, paper = outcome.plan, outcome.paper
    parts = [f"# {plan['name']}: {paper['what']}", paper["about"], f"Paper: {paper['citation']}."]
    if plan["stand_in"]:
        parts.append(
            "**Stand-in:** no pretrained model was given; a small untrained one of the same class ran in its place."
        )
    if plan["scale"] != "paper":
        parts.append(f"**Scale {plan['scale']}:** cut down; the paper's numbers are those of its own scale.")
    parts += ["\n".join(_facts(outcome)), *_tables(outcome), *_rankings(outcome)]
    parts += ["## All measurements", _everything(outcome)]
    for title, key in (("What the paper leaves open, and what was chosen", "open"), ("Notes", "notes")):
        if paper[key]:
            parts += [f"## {title}", "\n".join(f"- {line}" for line in paper[key])]
    return "\n\n".join(parts) + "\n"


def _facts(outcome: Outcome) -> Iterator[str]:
    runs = outcome.runs
    seeds = sorted({run.seed for run in runs})
    full = sum(len(place.runs) == len(seeds) for place in outcome.places)
    devices = sorted({str(run.summary.get("device", "cpu")) for run in runs})
    wall = sum(QUANTITIES["wall"].read(run) or 0.0 for run in runs)
    yield f"- Command: `{outcome.plan['command']} --seeds {','.join(map(str, seeds))}`"
    yield f"- Runs: {len(runs)}; {full} of {len(outcome.places)} cells have all of the seeds {_listed(seeds)}"
    yield f"- Device: {', '.join(devices) or NOTHING}; wall time of all runs: {_clock(wall)}"
    early = [r for r in runs if r.summary.get("ended") not in ("time", "updates", "versions", "accuracy")]
    for run in early:
        yield f"- Ended early: {run.label}, seed {run.seed}: {run.summary.get('ended')}"


def _tables(outcome: Outcome) -> Iterator[str]:
    """The paper's own layout, ours and theirs side by side."""
    if outcome.chooses:
        yield f"## {outcome.paper['what']}: the variant with the best {quantity(outcome.metric).title}"
        yield _choices(outcome)
        return
    measure = quantity(outcome.metric)
    known = any(place.theirs or place.told for place in outcome.places)
    beside = "ours and the paper's" if known else "the paper gives a figure only, no numbers"
    yield f"## {outcome.paper['what']}: {measure.title} ({beside})"
    columns = outcome.columns
    header = [_corner(outcome)]
    for column in columns:
        header += [column or "ours", "paper"] if known else [column or "ours"]
    lines = []
    for line in outcome.lines:
        cells = [_name(line)]
        for column in columns:
            place = outcome.at(line, column)
            cells.append(NOTHING if place is None else _shown(place.ours(outcome.metric), measure))
            if known:
                cells.append(NOTHING if place is None else place.told or _quoted(place.theirs, measure))
        lines.append(cells)
    yield _grid(header, lines)


def _choices(outcome: Outcome) -> str:
    known = bool(outcome.plan["theirs"])
    lines, same, asked = [], 0, 0
    counts: Counter[str] = Counter()
    for row in outcome.rows:
        cells = [row]
        for column in outcome.columns:
            ours, theirs = outcome.chosen(row, column), outcome.their_choice(row, column)
            beside = f"; paper {outcome.their_cell(row, column)}" if theirs else ""
            cells.append((outcome.our_cell(row, column) or NOTHING) + beside)
            counts.update([ours] if ours else [])
            asked += bool(ours and theirs)
            same += bool(ours and theirs and _alike(ours, theirs))
        lines.append(cells)
    text = _grid([_corner(outcome), *outcome.columns], lines)
    shares = [f"{variant} in {counts[variant]}" for variant in outcome.plan["axes"]["variants"]]
    text += f"\n\nBest, of {counts.total()} cells: {', '.join(shares)}."
    return f"{text} {same} of {asked} cells choose as the paper does." if known else text


def _alike(ours: str, theirs: str) -> bool:
    try:
        return math.isclose(float(ours), float(theirs))
    except ValueError:
        return ours == theirs


def _rankings(outcome: Outcome) -> Iterator[str]:
    """Whether the order of the methods agrees, column by column."""
    names = ["best", "final"] if outcome.metric in ("best", "final") else [outcome.metric]
    names.sort(key=lambda name: name != outcome.metric)
    lines = []
    for name in names:
        for where, found in rankings(outcome, name):
            prefix = f"**{where}** " if where else ""
            what = f"by {quantity(name).title.removesuffix(' (%)')}"
            lines.append(f"- {prefix}({what}): {found.sentence()}. Ours: {found.ours}.")
            if found.ours != found.theirs:
                lines[-1] += f" Paper: {found.theirs}."
    if not lines:
        return
    yield "## Does the ranking agree?"
    counts = {len(place.runs) for place in outcome.places if place.runs}
    if counts == {1}:
        lines.append("- One seed only: our own noise is not known and counted as none.")
    yield "\n".join(lines)


def rankings(outcome: Outcome, name: str) -> Iterator[tuple[str, Ranking]]:
    """Per setting (everything but the method), how our order of the methods compares with theirs."""
    groups: dict[str, list[Place]] = {}
    for place in outcome.places:
        where = ", ".join(part for part in (place.row if place.variant else "", place.column) if part)
        groups.setdefault(where, []).append(place)
    for where, places in groups.items():
        ours = {p.variant or p.row: number for p in places if (number := p.number(name)) is not None}
        theirs = {p.variant or p.row: p.theirs for p in places if p.theirs is not None}
        found = compare(ours, theirs, quantity(outcome.metric).better)
        if found is not None:
            yield where, found


def _everything(outcome: Outcome) -> str:
    names = list(dict.fromkeys([*ALWAYS, outcome.metric, *outcome.paper["extras"]]))
    names = [name for name in names if any(place.ours(name) for place in outcome.places)]
    axes = [axis for axis in ("row", "column", "variant") if any(getattr(p, axis) for p in outcome.places)]
    measured = [place for place in outcome.places if place.runs]
    lines = []
    for place in measured:
        cells = [getattr(place, axis) for axis in axes]
        cells += [str(len(place.runs)), *(_shown(place.ours(name), quantity(name)) for name in names)]
        lines.append(cells)
    text = _grid([*axes, "seeds", *(quantity(name).title for name in names)], lines)
    missing = len(outcome.places) - len(measured)
    left = f"{missing} of {len(outcome.places)} cells have not been run. " if missing else ""
    return (
        f"{text}\n\n{left}Mean +- standard deviation over seeds. Training loss: the mean that the clients reported "
        "while training since the evaluation before the last. Final: the last evaluation; best: the best of all."
    )


def _corner(outcome: Outcome) -> str:
    return "" if any(row for row, _ in outcome.lines) else "setting"


def _name(line: tuple[str, str]) -> str:
    return ", ".join(part for part in line if part) or "ours"


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds)) or "(none)"


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _shown(found: Spread | None, measure: Quantity) -> str:
    if found is None:
        return NOTHING
    text = _digits(found.mean, measure.digits)
    return f"{text} ± {_digits(found.std, measure.digits)}" if found.count > 1 else text


def _quoted(number: Number | None, measure: Quantity) -> str:
    if number is None:
        return NOTHING
    text = _digits(number.mean, measure.digits)
    return text if number.std is None else f"{text} ± {_digits(number.std, measure.digits)}"


def _digits(value: float, digits: int) -> str:
    return f"{value:.{-digits}f}" if digits < 0 else f"{value:.{digits}g}"


def _grid(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)


def _to_csv(outcome: Outcome, path: Path) -> None:
    """One line per cell, every quantity that some run has, in full precision."""
    names = [name for name in QUANTITIES if any(place.ours(name) for place in outcome.places)]
    header = ["row", "column", "variant", "seeds"]
    header += [key for name in names for key in (name, f"{name}_std")] + ["paper", "paper_std"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for place in outcome.places:
            cells: list[Any] = [place.row, place.column, place.variant, len(place.runs)]
            for name in names:
                number = place.number(name)
                cells += [None, None] if number is None else [number.mean, number.std]
            theirs = place.theirs
            writer.writerow([*cells, *((None, None) if theirs is None else (theirs.mean, theirs.std))])
