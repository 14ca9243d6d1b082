"""`afield run`, `afield resume` and `afield compare`."""

from __future__ import annotations

import logging
import shlex
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from afield.cli.look import check_target
from afield.cli.progress import Progress
from afield.cli.screen import screen
from afield.core.errors import InputError
from afield.experiments.config import Experiment, experiment, presets, read
from afield.experiments.folder import STORE, check_new, slug
from afield.experiments.keep import clear, finished, stoppable
from afield.experiments.plan import read_plan, write_plan
from afield.experiments.run import prepare
from afield.experiments.run import run as run_one
from afield.experiments.spread import apart, run_spread
from afield.experiments.sweep import prepare_all, run_together
from afield.reports import columns, load, tables
from afield.scenarios.data import Quadratic

NEXT = """[bold]Try next[/bold]
  afield run --strategy fedstale              another algorithm (all: afield list)
  afield run --set scenario.delay.spread=0.3  clients more alike in speed
  afield run --set 'seeds=\\[0,1,2]'            means and spreads over seeds
  afield report {folder}
  afield compare {folder}"""

NUMBERS = "compare.csv"
PICTURES = (".png", ".pdf", ".svg")

log = logging.getLogger("afield")


def run(
    config: Annotated[str, typer.Argument(help="A TOML file or the name of a preset.")] = "default",
    strategy: Annotated[str | None, typer.Option(help="NAME, or FILE.py:CLASS of your own.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to make (default: runs/NAME-NNN).")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="One seed in place of the config's seeds.")] = None,
    engine: Annotated[
        Literal["here", "ray"],
        typer.Option(help="Where the runs go: here, or one by one over a Ray cluster."),
    ] = "here",
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
    chosen = apart(chosen) if engine == "ray" else chosen
    folder = out if out is not None else _free(Path("runs"), chosen.name)
    places = _check(chosen, folder)
    write_plan(chosen, folder, places)
    _run_all(chosen, folder, places, engine=engine)
    _show(chosen, folder, places)
    if config == "default" and strategy is None:
        screen().print(NEXT.format(folder=escape(str(folder))), highlight=False, soft_wrap=True)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of several.")],
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Say more; full tracebacks.")] = False,
) -> None:
    """Go on with what was stopped or killed: it ends with the same bits as if it had not been."""
    if verbose:
        logging.basicConfig(level=logging.DEBUG, format="%(message)s")
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
    chosen, places = read_plan(folder)
    if all(finished(place) for place in places) and (folder / NUMBERS).is_file():
        raise InputError(
            f"{folder} is finished, there is nothing to resume: afield compare {folder} shows it"
        )
    _run_all(chosen, folder, places, again=True)
    _show(chosen, folder, places)


def _show(chosen: Experiment, folder: Path, places: list[Path]) -> None:
    """The table of the finished runs, on the screen and in the folder, and their picture."""
    console = screen()
    runs = load.find(places)
    comparison = tables.compare(runs, chosen.target)
    console.print(columns.to_rich(comparison, console.width))
    numbers, picture = folder / NUMBERS, folder / f"{chosen.figure}.png"
    tables.to_csv(comparison, numbers)
    _draw(chosen, runs, picture)
    where = f"[bold]Picture[/bold] {escape(str(picture))}    [bold]numbers[/bold] {escape(str(numbers))}"
    console.print(where, highlight=False, soft_wrap=True)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    target: Annotated[float | None, typer.Option(help="Accuracy whose time is reported.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the numbers here.")] = None,
    latex: Annotated[
        bool, typer.Option("--latex", help="Print a LaTeX table (booktabs) and nothing else.")
    ] = False,
    png: Annotated[Path | None, typer.Option(help="Write the picture here (.png, .pdf, .svg).")] = None,
    diagnose: Annotated[
        Path | None, typer.Option(help="Write the picture of diagnosed runs here: why steps err.")
    ] = None,
    x: Annotated[
        Literal["time", "updates", "versions", "wall"], typer.Option(help="The picture's axis.")
    ] = "time",
) -> None:
    """Compare runs: mean +- std over seeds, at equal time, at equal updates, and time to a target.

    The best is marked *, what the noise over seeds cannot tell from it ~. Runs of one label that differ in more
    than their seed are rows of their own, named by their folders.
    """
    check_target(target)
    for option, picture in (("--png", png), ("--diagnose", diagnose)):
        if picture is not None and picture.suffix not in PICTURES:
            raise InputError(f"{option} {picture} is no kind of picture: let it end in {', '.join(PICTURES)}")
    found = load.find(runs)
    comparison = tables.compare(found, target)
    if latex:
        typer.echo(columns.to_latex(comparison), nl=False)
    else:
        console = screen()
        console.print(columns.to_rich(comparison, console.width))
    if csv is not None:
        tables.to_csv(comparison, csv)
    if png is not None:
        from afield.reports import plots

        plots.accuracy(found, png, x=x, target=comparison.target)
    if diagnose is not None:
        from afield.reports import diagnosis

        diagnosis.diagnosis(found, diagnose, x=x)


def _check(chosen: Experiment, folder: Path) -> list[Path]:
    """Where each run goes. Bad input ends here, before a folder is made or the first run has used up its time."""
    check_new(folder)
    if any(config.runtime.name == "service" for config in chosen.runs):
        raise InputError("runtime.name = 'service' is served: afield serve CONFIG; or set it to 'simulator'")
    if chosen.figure == "trajectories" and not isinstance(chosen.runs[0].scenario.data, Quadratic):
        raise InputError("figure = 'trajectories' draws the data 'quadratic' only: use figure = 'accuracy'")
    if len(chosen.runs) == 1:
        places = [folder]
    else:
        places = [folder / f"{slug(config.label)}-{config.seed}" for config in chosen.runs]
    for place, config in zip(places, chosen.runs, strict=True):
        if places.count(place) > 1:
            raise InputError(f"label {config.label!r} makes the same folder name as another: choose another")
        if config.seed == chosen.seeds[0]:
            prepare(config)
    return places


def _run_all(
    chosen: Experiment, folder: Path, places: list[Path], again: bool = False, engine: str = "here"
) -> None:
    with stoppable(f"afield resume {shlex.quote(str(folder))}") as asking, Progress(chosen.runs) as progress:
        if engine == "ray":
            with closing(run_spread(chosen.runs, places, asking)) as ends:
                for number, ended in ends:
                    progress.done(chosen.runs[number], ended)
            return
        if chosen.sweep.together and len(places) > 1:
            if all(finished(place) for place in places):
                clear(folder / STORE)
                return
            runs = prepare_all(chosen.runs)
            with closing(run_together(runs, places, folder / STORE, again=again, asking=asking)) as numbered:
                for number, row in numbered:
                    progress.show(chosen.runs[number], row)
            for prepared, config in zip(runs, chosen.runs, strict=True):
                progress.done(config, prepared.simulator.ended or "time")
            return
        for config, place in zip(chosen.runs, places, strict=True):
            if finished(place):
                clear(place / STORE)
                progress.done(config, "time")
                continue
            prepared = prepare(config)
            runtime, method = prepared.config.runtime, prepared.config.training.method
            text = "%s: trained by %s, %s threads, blocks of at most %s"
            log.info(text, config.label, method, runtime.threads, runtime.block)
            with closing(run_one(prepared, place, again=again, asking=asking)) as rows:
                for row in rows:
                    progress.show(config, row)
            progress.done(config, prepared.simulator.ended)


def _draw(chosen: Experiment, runs: list[load.Run], picture: Path) -> None:
    from afield.reports import plots  # here: importing matplotlib takes 0.3 s

    problem = chosen.runs[0].scenario.data
    if chosen.figure == "trajectories" and isinstance(problem, Quadratic):
        matrices = [((a, b), (b, d)) for a, b, d in problem.curvatures]
        plots.trajectories(runs, picture, matrices, problem.optima, problem.optimum())
    else:
        plots.accuracy(runs, picture, target=chosen.target)
    if any(config.measure.diagnose for config in chosen.runs):
        from afield.reports import diagnosis

        diagnosis.diagnosis(runs, picture.with_name("diagnosis.png"))


def _free(parent: Path, name: str) -> Path:
    """The first of NAME-001, NAME-002, ... that is not there."""
    number = 1
    while (folder := parent / f"{slug(name)}-{number:03d}").exists():
        number += 1
    return folder
