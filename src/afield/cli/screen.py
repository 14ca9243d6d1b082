"""Where the commands print."""

from __future__ import annotations

from rich.console import Console

WIDE = 120  # columns of a file or a pipe, which have no width of their own


def screen() -> Console:
    """Standard output."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    return console
