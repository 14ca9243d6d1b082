"""The command line. Each group of commands has its file; errors of the user's are one line and status 2."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

import afield
from afield.cli import catalogue, run
from afield.core.errors import InputError
from afield.reports.load import LoadError

app = typer.Typer(
    help="Asynchronous federated learning: compare algorithms in an exact simulation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"afield {afield.__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("run")(run.run)
app.command("compare")(run.compare)
app.command("list")(catalogue.catalogue)
app.command("doctor")(catalogue.doctor)


def main() -> None:
    try:
        app()
    except (InputError, LoadError) as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        print(f"afield: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("afield: interrupted", file=sys.stderr)
        sys.exit(130)
