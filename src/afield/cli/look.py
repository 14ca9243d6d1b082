"""`afield report` and `afield figure`: runs to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from afield.cli.screen import screen
from afield.core.errors import InputError
from afield.reports import load

RunsArgument = Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")]
TargetOption = Annotated[float | None, typer.Option(help="Accuracy whose time is reported.")]
Kind = Literal["accuracy", "loss", "staleness", "heatmap", "timeline", "partition"]
PICTURES = (".pdf", ".svg", ".png")


def report(
    runs: RunsArgument,
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write.")] = Path("report.html"),
    target: TargetOption = None,
    title: Annotated[str, typer.Option(help="The heading (default: the labels).")] = "",
) -> None:
    """One page that explains which algorithm won, why, and at whose cost; opens in any browser, offline."""
    from afield.reports import page

    check_target(target)
    if out.suffix not in (".html", ".htm"):
        raise InputError(f"--out {out} is no page: let it end in .html")
    page.write(load.find(runs), out, target, title)
    screen().print(f"[bold]Report[/bold] {out}", highlight=False, soft_wrap=True)


def figure(
    runs: RunsArgument,
    out: Annotated[Path, typer.Option("-o", "--out", help="The picture to write (.pdf, .svg, .png).")],
    kind: Annotated[Kind, typer.Option(help="What it shows.")] = "accuracy",
    x: Annotated[
        Literal["time", "updates", "versions", "wall", "bytes"],
        typer.Option(help="The axis of accuracy and loss."),
    ] = "time",
    wide: Annotated[bool, typer.Option("--wide", help="Over both columns of the page.")] = False,
    band: Annotated[
        Literal["std", "interval", "range"], typer.Option(help="Around the mean over seeds.")
    ] = "std",
    target: TargetOption = None,
) -> None:
    """A figure for a two-column paper: its fonts, its width, colours that anybody can tell apart."""
    from afield.reports import prints

    if target is not None:
        check_target(target)
    if out.suffix not in PICTURES:
        raise InputError(f"--out {out} is no kind of picture: let it end in {', '.join(PICTURES)}")
    prints.figure(load.find(runs), out, kind, x=x, wide=wide, band=band, target=target)
    screen().print(f"[bold]Figure[/bold] {out}", highlight=False, soft_wrap=True)


def check_target(target: float | None) -> None:
    if target is not None and not 0 < target <= 1:
        raise InputError(f"--target {target} is outside (0, 1]: give a share, such as 0.85")
