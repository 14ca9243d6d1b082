"""`afield run` and `afield compare`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from afield.cli.progress import Progress
from afield.core.errors import InputError
from afield.experiments.config import Experiment, experiment, presets, read
from afield.experiments.folder import new_folder
from afield.experiments.run import prepare
from afield.experiments.run import run as run_one
from afield.reports import load, plots, tables
from afield.scenarios.data import Quadratic

NEXT = """[bold]Try next[/bold]
  afield run --strategy fedstale              another algorithm on the same clients (afield list)
  afield run --set scenario.delay.spread=0.3  clients more alike in speed
  afield run --set seeds=\\[0,1,2]             means and spreads over seeds
  afield compare {folder}"""

log = logging.getLogger("afield")


def run(
    config: Annotated[str, typer.Argument(help="A TOML file or the name of a preset.")] = "default",
    strategy: Annotated[str | None, typer.Option(help="NAME, or FILE.py:CLASS of your own.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to make (default: runs/NAME-NNN).")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="One seed in place of the config's seeds.")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Say more; full tracebacks.")] = False,
) -> None:
    """Simulate: with no argument, five algorithms race on the same 50 clients."""
    if verbose:
        logging.basicConfig(level=logging.DEBUG, format="%(message)s")
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
    known = presets()
    table = read(known.get(config, Path(config)))
    table.setdefault("name", Path(config).stem)
    chosen = experiment(table, strategy=strategy, seed=seed, settings=settings or ())
    folder = out if out is not None else _free(Path("runs"), chosen.name)
    new_folder(folder)
    folders = _run_all(chosen, folder)
    console = Console()
    runs = load.find(folders)
    console.print(tables.to_rich(tables.compare(runs, chosen.target)))
    tables.to_csv(tables.compare(runs, chosen.target), folder / "compare.csv")
    picture = folder / f"{chosen.figure}.png"
    _draw(chosen, runs, picture)
    console.print(
        f"[bold]Picture[/bold] {picture}    [bold]numbers[/bold] {folder / 'compare.csv'}", soft_wrap=True
    )
    if config == "default":
        console.print(NEXT.format(folder=folder), highlight=False)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    target: Annotated[float | None, typer.Option(help="Accuracy whose time is reported.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the numbers here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the picture here (.png, .pdf, .svg).")] = None,
    x: Annotated[
        Literal["time", "updates", "versions", "wall"], typer.Option(help="The picture's axis.")
    ] = "time",
) -> None:
    """Compare runs: mean +- std over seeds, at equal time, at equal updates, and time to a target."""
    if target is not None and not 0 < target <= 1:
        raise InputError(f"--target {target} is outside (0, 1]: give a share, such as 0.85")
    found = load.find(runs)
    comparison = tables.compare(found, target)
    Console().print(tables.to_rich(comparison))
    if csv is not None:
        tables.to_csv(comparison, csv)
    if png is not None:
        plots.accuracy(found, png, x=x, target=comparison.target)


def _run_all(chosen: Experiment, folder: Path) -> list[Path]:
    single = len(chosen.runs) == 1
    folders = []
    with Progress(chosen.runs) as progress:
        for config in chosen.runs:
            place = folder if single else folder / f"{_slug(config.label)}-{config.seed}"
            prepared = prepare(config)
            runtime = prepared.config.runtime
            log.info("%s: %s threads, blocks of at most %s", config.label, runtime.threads, runtime.block)
            for row in run_one(prepared, place):
                progress.show(config, row)
            progress.done(config, prepared.simulator.ended)
            folders.append(place)
    return folders


def _draw(chosen: Experiment, runs: list[load.Run], picture: Path) -> None:
    problem = chosen.runs[0].scenario.data
    if chosen.figure == "trajectories" and isinstance(problem, Quadratic):
        matrices = [((a, b), (b, d)) for a, b, d in problem.curvatures]
        plots.trajectories(runs, picture, matrices, problem.optima, problem.optimum())
    else:
        plots.accuracy(runs, picture, target=chosen.target)


def _free(parent: Path, name: str) -> Path:
    """The first of NAME-001, NAME-002, ... that is not there."""
    number = 1
    while (folder := parent / f"{_slug(name)}-{number:03d}").exists():
        number += 1
    return folder


def _slug(label: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_.=" else "-" for letter in label) or "run"
