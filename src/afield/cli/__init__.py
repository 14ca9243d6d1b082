"""The command line. Each group of commands has its file; errors of the user's are one line and status 2."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, NoReturn

import click
import typer

import afield
from afield.cli import advise, catalogue, look, papers, run, serve, track, watch
from afield.core.errors import InputError
from afield.experiments.keep import StoppedError
from afield.reports.load import LoadError

INTERRUPTED = 130  # what typer gives for Ctrl-C
SHOWN = 200  # characters of what torch says of memory

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
app.command("resume")(run.resume)
app.command("compare")(run.compare)
app.command("report")(look.report)
app.command("figure")(look.figure)
app.command("reproduce")(papers.reproduce)
app.command("tune")(papers.tune)
app.command("advise")(advise.advise)
app.command("track")(track.track)
app.command("serve")(serve.serve)
app.command("join")(serve.join)
app.command("status")(serve.status)
app.command("promote")(serve.promote)
app.command("rollback")(serve.rollback)
app.add_typer(serve.tokens, name="token")
app.command("watch")(watch.watch)
app.command("list")(catalogue.catalogue)
app.command("doctor")(catalogue.doctor)


def main() -> None:
    """The command `afield`."""
    try:
        status = app(prog_name="afield", standalone_mode=False) or 0
    except click.ClickException as error:
        _stop(_usage(error), error.exit_code)
    except StoppedError as error:
        _stop(str(error), INTERRUPTED)
    except (InputError, LoadError, OSError) as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        _stop(str(error), 2)
    except (MemoryError, RuntimeError) as error:
        if not _of_memory(error) or logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        remedy = "make the model, the data, local.batch or runtime.block smaller, or use a larger machine"
        _stop(f"there is not enough memory ({str(error)[:SHOWN]}): {remedy}", 1)
    if status == INTERRUPTED:
        _stop("interrupted", status)
    sys.exit(status)


def _of_memory(error: Exception) -> bool:
    """Whether torch, or Python itself, could not have the memory it asked for."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "can't allocate memory" in said or "out of memory" in said


def _usage(error: click.ClickException) -> str:
    """What was wrong with the command itself. Empty where the help was printed in its place."""
    message = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{message}; see {context.command_path} --help" if message and context else message


def _stop(message: str, status: int) -> NoReturn:
    if message:
        print("afield:", " ".join(message.splitlines()), file=sys.stderr)
    sys.exit(status)
