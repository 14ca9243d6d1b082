"""`afield watch`: a run, as it was or as it goes, on a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afield.core.errors import InputError
from afield.reports import load


def watch(
    run: Annotated[Path, typer.Argument(help="A run folder: finished, or still written to.")],
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 0,
) -> None:
    """Play a finished run on a page, or follow one that runs; open the address that is printed."""
    folder = only(run)
    try:
        from afield.runtimes.service.replay import watch as show
    except ImportError as error:
        raise InputError(f"watch needs {error.name}: pip install 'afield[serve]'") from error
    show(folder, port, lambda url, _: print(f"watch at {url}", flush=True))


def only(path: Path) -> Path:
    """The one run at or below a path."""
    found = [run.folder for run in load.find([path])]
    if len(found) > 1:
        names = ", ".join(str(folder) for folder in found[:6])
        raise InputError(f"{path} holds {len(found)} runs ({names}, ...): name one of them")
    return found[0]
