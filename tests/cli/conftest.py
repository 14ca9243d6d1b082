"""The command in this process, in an empty folder, with its exit status and what it printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from afield.cli import main


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, a wide plain terminal, no data folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("AFIELD_DATA", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def afield(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`afield ARGUMENTS...`, without the seconds that a new process takes."""

    def command(*arguments: str | Path) -> Ended:
        monkeypatch.setattr("sys.argv", ["afield", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        status = ended.value.code
        assert isinstance(status, int)
        return Ended(status, *capsys.readouterr())

    return command
