"""`afield advise`: which algorithm suits a scenario, why, and what is not known."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from afield.cli.screen import screen
from afield.experiments.advise import Advice
from afield.experiments.advise import advise as advise_for
from afield.experiments.config import experiment, presets, read
from afield.experiments.probe import Facts


def advise(
    config: Annotated[str, typer.Argument(help="A TOML file or the name of a preset.")] = "default",
    strategy: Annotated[
        str | None, typer.Option(help="Whose pace to advise for: arrivals or rounds (the first variant's).")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Recommend an algorithm: probes the scenario's clock and data, trains nothing."""
    table = read(presets().get(config, Path(config)))
    chosen = experiment(table, strategy=strategy, settings=settings or ())
    advice = advise_for(chosen.runs[0])
    if as_json:
        print(json.dumps(_plain(advice), indent=2))
    else:
        _show(advice)


def _plain(advice: Advice) -> dict[str, Any]:
    """What JSON can hold: an infinite ratio is null."""
    facts = {k: None if v == math.inf else v for k, v in asdict(advice.facts).items()}
    recommended = [asdict(entry) | {"toml": entry.toml} for entry in advice.recommended]
    return {"facts": facts, "recommended": recommended, "unknown": list(advice.unknown)}


def _show(advice: Advice) -> None:
    console = screen()
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, title="Measured", title_justify="left", show_header=False
    )
    for name, value in _measured(advice.facts):
        table.add_row(name, value)
    console.print(table)
    first, *others = advice.recommended
    console.print(f"\n[bold]Recommended: {first.strategy['name']}[/bold]", highlight=False)
    console.print(f"{escape(first.reason)}. [dim]{escape(first.paper)}[/dim]\n", highlight=False)
    console.print(escape(first.toml), highlight=False)
    if others:
        console.print("[bold]Worth a try[/bold]")
    for entry in others:
        inline = ", ".join(f"{key} = {json.dumps(value)}" for key, value in entry.strategy.items())
        console.print(escape(f"strategy = {{ {inline} }}"), highlight=False, soft_wrap=True)
        console.print(f"  {escape(entry.reason)}. [dim]{escape(entry.paper)}[/dim]", highlight=False)
    console.print("\n[bold]Not known[/bold]")
    for note in advice.unknown:
        console.print(f"- {escape(note)}", highlight=False)


def _measured(facts: Facts) -> list[tuple[str, str]]:
    rare = (
        f"{facts.participation:.2f}"
        if facts.participation < math.inf
        else f"{facts.silent} clients never came"
    )
    rows = [
        ("clients", f"{facts.clients:,}, of whom {facts.concurrency:,} train at a time"),
        ("participation p_avg / p_min", rare),
        ("slowest over fastest client", f"{facts.slowness:.1f}"),
    ]
    if facts.staleness is not None and facts.delay is not None:
        spread = (
            f"{facts.staleness:.1f} over updates, {facts.delay:.1f} over clients, at most {facts.stalest}"
        )
        rows.append(("staleness in arrivals, mean", spread))
    unlike = "unknown" if facts.heterogeneity is None else f"{facts.heterogeneity:.2f} beyond chance (0 to 1)"
    rows.append(("distance of label mixes", unlike))
    if facts.relabelled:
        rows.append(("labels seen differently", f"{facts.relabelled:.2f}"))
    memory = "unknown" if facts.memory is None else _size(facts.memory)
    table = f"{_size(facts.table)} (int8 {_size(facts.table // 4)}), free {memory}"
    return [*rows, ("a vector per client", table), ("probed", f"{facts.updates:,} updates, nothing trained")]


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"
