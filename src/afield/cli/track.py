"""`afield track`: send run folders to trackers after the fact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afield.cli.screen import screen
from afield.core.errors import InputError
from afield.experiments.trackers import TRACKERS, Log, check
from afield.experiments.tracking import send
from afield.reports import load


def track(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    to: Annotated[list[str], typer.Option(help=f"{', '.join(TRACKERS)}; repeatable.")],
    project: Annotated[str, typer.Option(help="Project of wandb, experiment of mlflow.")] = Log.project,
    group: Annotated[str, typer.Option(help="Default: the folder that a run folder is in.")] = Log.group,
    uri: Annotated[str | None, typer.Option(help="Database or server of mlflow.")] = Log.uri,
    offline: Annotated[bool, typer.Option(help="wandb writes into the run folder.")] = Log.offline,
    patience: Annotated[float, typer.Option(help="Seconds to wait for a tracker.")] = Log.patience,
) -> None:
    """Send runs to trackers, whatever of them is missing there: none is told a row twice."""
    chosen = Log(tuple(to), project, group, uri, offline, patience)
    check(chosen)
    for run in load.find(runs):
        failed = send(run.folder, chosen)
        if failed:
            raise InputError(f"{run.folder} is not complete in {', '.join(failed)}: send it again")
        screen().print(
            f"{run.folder}: {len(run.metrics)} rows, {', '.join(to)}", highlight=False, markup=False
        )
