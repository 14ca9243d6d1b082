"""The command as a process of its own: plain lines in a pipe, live bars on a terminal, Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

from afield.reports import load

SMALL = ("--set", "stop.time=2", "--set", "local.epochs=1")
RUN = ("run", "--strategy", "fedasync", *SMALL)
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def environment(**more: str) -> dict[str, str]:
    forced = (
        "FORCE_COLOR",
        "NO_COLOR",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
        "COLUMNS",
        "LINES",
        "AFIELD_DATA",
    )
    return {key: value for key, value in os.environ.items() if key not in forced} | more


def piped(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "afield", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=100)


class Terminal:
    """The command on a terminal of 80 columns."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "afield", *arguments],
            cwd=folder,
            env=environment(TERM="xterm-256color"),
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        self.shown = ""

    def read(self, until: str = "") -> None:
        """Read on to the first sight of `until`, else to the end."""
        while not until or until not in self.shown:
            try:
                piece = os.read(self._master, 65536)
            except OSError:  # Linux says so when the other end is closed
                piece = b""
            if not piece:
                return
            self.shown += piece.decode(errors="replace")

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)  # what the terminal sends for Ctrl-C

    def end(self) -> int:
        self.read()
        os.close(self._master)
        return self._process.wait(timeout=100)


def test_in_a_pipe_there_are_plain_lines(tmp_path: Path) -> None:
    ended = piped(tmp_path, "run", *SMALL)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\x1b" not in ended.stdout
    assert "\r" not in ended.stdout
    assert all(len(line) <= 100 for line in ended.stdout.splitlines())
    for label in ("fedasync", "fedbuff", "mr-asyncfl", "ace", "fedavg"):
        found = re.findall(rf"^{label} +(\d+) %  t ", ended.stdout, re.MULTILINE)
        shares = [int(share) for share in found]
        assert shares == sorted(set(shares))
        assert shares[-1] == 100
        assert len(shares) <= 5
    assert re.search(r"version \d+ \(\d+/s\)  staleness [\d.]+  accuracy [\d.]+ %", ended.stdout)
    assert (tmp_path / "runs" / "default-001" / "accuracy.png").is_file()


def test_bad_input_is_one_line_without_a_traceback_unless_asked_for(tmp_path: Path) -> None:
    wrong = ("run", "--strategy", "fedbuf")
    ended = piped(tmp_path, *wrong)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "afield: strategy.name = 'fedbuf' is not known; did you mean 'fedbuff'?\n"
    loud = piped(tmp_path, *wrong, "-v")
    assert loud.returncode != 0
    assert "Traceback" in loud.stderr
    assert list(tmp_path.iterdir()) == []


def test_on_a_terminal_live_bars_show_and_end_cleanly(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, *RUN)
    assert terminal.end() == 0
    shown = terminal.shown
    assert shown.count(HIDE) == shown.count(SHOW) == 1  # the cursor is given back
    bars, after = shown.split(SHOW)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", bars.rstrip().splitlines()[-1].split("\r")[-1]).strip()
    assert re.fullmatch(
        r"fedasync ━{10} 100% t 2\.0  v \d+ \(\d+/s\)  stale [\d.]+  acc [\d.]+ % 00:00", last
    )
    assert len(last) <= 80
    assert "Picture" in after
    assert "Traceback" not in shown


def test_ctrl_c_ends_a_run_in_one_line_and_keeps_what_was_done(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, *RUN, "--set", "stop.time=1e6")
    terminal.read(until="acc ")
    terminal.interrupt()
    assert terminal.end() == 130
    last = terminal.shown.replace("\r\n", "\n").rstrip().rpartition(SHOW)[2]
    assert last == "afield: stopped, all is saved; go on by: afield resume runs/default-001"
    assert "Traceback" not in terminal.shown
    (found,) = load.find([tmp_path / "runs"])
    assert not found.finished
    assert found.metrics[0]["version"] == 0
    assert found.receipts.num_rows >= 0
