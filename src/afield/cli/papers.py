"""`afield reproduce` and `afield tune`: tables and figures of papers, and their grids."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table

from afield.cli.screen import screen
from afield.core.errors import InputError
from afield.experiments.paper import load_preset, papers
from afield.experiments.reproduce import reproduce as run_preset
from afield.experiments.tune import tune as run_grid

Scale = Literal["smoke", "small", "paper"]
ScaleOption = Annotated[
    Scale, typer.Option(help="How much of it: made data in seconds, minutes, or as published.")
]
SeedsOption = Annotated[str | None, typer.Option(metavar="0,1,2", help="In place of the preset's seeds.")]
OutOption = Annotated[
    Path | None, typer.Option(help="The folder (default: runs/NAME-SCALE); goes on where it stopped.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda.")]
DataOption = Annotated[Path | None, typer.Option(help="The folder of the data sets (as AFIELD_DATA).")]
StandInOption = Annotated[
    bool, typer.Option("--stand-in", help="A small untrained model where no folder is given.")
]
OnlyOption = Annotated[
    list[str] | None, typer.Option(metavar="LABEL", help="Run these rows, columns; repeatable.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; repeatable.")
]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="Say more; full tracebacks.")]


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="A preset, or a TOML file; none: lists the presets.")
    ] = None,
    scale: ScaleOption = "paper",
    seeds: SeedsOption = None,
    out: OutOption = None,
    device: DeviceOption = None,
    data: DataOption = None,
    stand_in: StandInOption = False,
    only: OnlyOption = None,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Every N-th run from the I-th on; N processes do all, in one folder."
        ),
    ] = None,
    settings: SetOption = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Run nothing; make the result of what is there.")
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """A table or figure of a paper, ours and theirs side by side."""
    _loudness(verbose)
    if name is None:
        _list()
        return
    folder = run_preset(
        name,
        scale=scale,
        seeds=_numbers(seeds),
        out=out,
        device=device,
        data=data,
        stand_in=stand_in,
        only=only or (),
        share=_share(share),
        settings=settings or (),
        collect=collect,
        say=typer.echo,
    )
    console = screen()
    console.print(Markdown((folder / "result.md").read_text(encoding="utf-8")))
    console.print(f"[bold]Result[/bold] {escape(str(folder / 'result.md'))}", highlight=False, soft_wrap=True)


def tune(
    name: Annotated[str, typer.Argument(help="A TOML file or a preset.")],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--set-grid", metavar="KEY=V1,V2,...", help="Values to try (default: its [grid]); repeatable."
        ),
    ] = None,
    by: Annotated[Literal["final", "best"], typer.Option(help="Which accuracy decides.")] = "final",
    scale: ScaleOption = "paper",
    seeds: SeedsOption = None,
    out: OutOption = None,
    device: DeviceOption = None,
    data: DataOption = None,
    stand_in: StandInOption = False,
    only: OnlyOption = None,
    settings: SetOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Try every value of a grid, and name the best for each row."""
    _loudness(verbose)
    folder, found = run_grid(
        name,
        grid or (),
        by=by,
        scale=scale,
        seeds=_numbers(seeds),
        out=out,
        device=device,
        data=data,
        stand_in=stand_in,
        only=only or (),
        settings=settings or (),
        say=typer.echo,
    )
    console = screen()
    console.print(Markdown((folder / "result.md").read_text(encoding="utf-8")))
    for best in found:
        where = f"{best.setting}: " if best.setting else ""
        if best.choice is None:
            typer.echo(f"{where}no run gave an accuracy")
            continue
        words = " ".join(f"--set {shlex.quote(text)}" for text in best.settings)
        typer.echo(f"{where}best by {by} accuracy ({best.mean:.2f} %): {words}")


def _list() -> None:
    """The presets, one table per paper."""
    by_paper: dict[str, list[str]] = {}
    for name in papers():
        by_paper.setdefault(load_preset(name).paper.citation, []).append(name)
    console = screen()
    for citation, names in by_paper.items():
        table = Table(
            title=escape(citation), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False
        )
        for title in ("preset", "what", "cost at paper scale"):
            table.add_column(title, overflow="fold", no_wrap=title == "preset")
        for name in names:
            paper = load_preset(name).paper
            table.add_row(name, escape(f"{paper.what}: {paper.about}"), escape(paper.cost))
        console.print(table)
        console.print()


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"--seeds {text!r} is not a list of whole numbers: write for example 0,1,2"
        ) from None
    if len(set(found)) < len(found) or min(found) < 0:
        raise InputError(f"--seeds {text!r}: give different seeds, 0 or above")
    return found


def _share(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    first, _, last = text.partition("/")
    try:
        return int(first), int(last)
    except ValueError:
        raise InputError(f"--share {text!r} is no share: write for example 1/3, 2/3 and 3/3") from None


def _loudness(verbose: bool) -> None:
    if verbose:
        logging.basicConfig(level=logging.DEBUG, format="%(message)s")
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
