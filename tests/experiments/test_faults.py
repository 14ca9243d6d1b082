"""What a run that is taken up cannot go on from: each ends in an error that says what to do, and harms nothing."""

from __future__ import annotations

import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stopping import outcome, stopped_after, whole
from tiny import tiny

from afield.core.errors import InputError
from afield.core.places import choose
from afield.core.table import ClientTable
from afield.experiments.config import Config
from afield.experiments.keep import Asking, stored
from afield.experiments.plan import read_plan
from afield.experiments.run import prepare, run

CHOSEN = tiny("ace", stop={"updates": 40}, runtime={"table": "disk"})


def stopped(folder: Path, chosen: Config = CHOSEN) -> Path:
    asking = Asking()
    assert stopped_after(run(prepare(chosen), folder, asking=asking), 20, asking)
    return folder


def again(folder: Path) -> Iterator[Any]:
    return run(prepare(stored(folder)), folder, again=True)


def newest(folder: Path) -> Path:
    return max((folder / "store").glob("*.snapshot"))


def edited(file: Path, pattern: str, text: str) -> None:
    changed, count = re.subn(pattern, text, file.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1
    file.write_text(changed)


def newer_snapshot(folder: Path) -> None:
    """As an afield would write it that has another format: the number, and the checksum over it."""
    import struct
    import zlib

    for file in (folder / "store").glob("*.snapshot"):
        found = bytearray(file.read_bytes())
        (length,) = struct.unpack_from("<Q", found, 16)
        struct.pack_into("<I", found, 8, 9)
        head = bytes(found[8:12] + found[16:24])
        struct.pack_into("<I", found, 12, zlib.crc32(bytes(found[24 : 24 + length]), zlib.crc32(head)))
        file.write_bytes(found)


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "newer config": (
        lambda f: edited(f / "config.toml", r"^format = 1", "format = 2\nnews = 1"),
        r"config.toml has format 2, this afield reads 1: update afield",
    ),
    "older config": (
        lambda f: edited(f / "config.toml", r"^format = 1", "format = 0"),
        r"config.toml has format 0, this afield reads 1: use the afield that wrote it",
    ),
    "no config": (lambda f: (f / "config.toml").unlink(), r"holds no run: it has no config.toml"),
    "half a config": (lambda f: (f / "config.toml").write_text("half"), r"config.toml is not TOML"),
    "other config": (
        lambda f: edited(f / "config.toml", r"^rate = 0.1", "rate = 0.2"),
        r"the snapshots in .*store had another config.toml .*: go on with what began the run",
    ),
    "newer snapshot": (newer_snapshot, r"snapshot has format 9, this afield reads 1: update afield"),
    "damaged snapshots": (
        lambda f: [file.write_bytes(b"x" * 900) for file in (f / "store").glob("*.snapshot")],
        r"no snapshot in .*store can be read: .*restore one from a copy",
    ),
    "short metrics": (
        lambda f: os.truncate(f / "metrics.jsonl", 10),
        r"metrics.jsonl has 10 bytes where its snapshot knows of \d+: restore it from a copy",
    ),
    "no rows": (
        lambda f: next((f / "store").glob("*.rows")).unlink(),
        r"rows: No such file or directory; put the run's own file back",
    ),
    "other rows": (
        lambda f: os.truncate(next((f / "store").glob("*.rows")), 5000),
        r"has \d rows, the snapshot names \d: put the run's own file back",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_and_the_rest_is_left_as_it_was(name: str, tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run")
    shutil.copytree(folder, tmp_path / "copy")
    harm, text = FAULTS[name]
    harm(folder)
    files = {path: path.stat().st_size for path in (folder / "store").glob("*.*s*")}
    with pytest.raises(InputError, match=text):
        list(again(folder))
    assert {path: path.stat().st_size for path in (folder / "store").glob("*.*s*")} == files
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "copy", folder)  # the remedy
    list(again(folder))
    assert outcome(folder) == whole(CHOSEN, tmp_path / "whole")


def test_a_damaged_snapshot_gives_way_to_the_one_before(tmp_path: Path) -> None:
    chosen = tiny("ace", stop={"updates": 40}, runtime={"table": "disk", "snapshots": {"versions": 2}})
    folder = stopped(tmp_path / "run", chosen)
    file = newest(folder)
    body = bytearray(file.read_bytes())
    body[-100] ^= 1
    file.write_bytes(body)
    list(again(folder))
    assert outcome(folder) == whole(chosen, tmp_path / "whole")


def test_a_run_folder_may_be_moved(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run").rename(tmp_path / "elsewhere")
    list(again(folder))
    assert outcome(folder) == whole(CHOSEN, tmp_path / "whole")


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    before = whole(CHOSEN, tmp_path / "run")
    with pytest.raises(InputError, match="run is finished: there is nothing to resume"):
        list(again(tmp_path / "run"))
    assert outcome(tmp_path / "run") == before


def test_other_code_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = stopped(tmp_path / "run")
    edited(folder / "environment.json", r'"torch": "[^"]*"', '"torch": "1.0"')
    with caplog.at_level(logging.WARNING, "afield"):
        list(again(folder))
    assert f"began with torch 1.0 and goes on with {torch.__version__.split('+')[0]}" in caplog.text


# -- other processes, and the disk ------------------------------------------------------------------------


def test_a_second_process_is_refused_and_the_lock_of_a_dead_one_is_taken_over(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run")
    rows = again(folder)
    next(rows)
    command = [sys.executable, "-m", "afield", "resume", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert f"is in use by process {os.getpid()} on {socket.gethostname()} (since " in ended.stderr
    rows.close()
    text = '{"pid": 1, "host": "gone", "started": "yesterday"}'  # as a process leaves it that was killed
    (folder / "store" / "owner.lock").write_text(text)
    list(again(folder))
    assert outcome(folder) == whole(CHOSEN, tmp_path / "whole")


@pytest.mark.parametrize("table", ["memory", "disk"])
def test_a_full_disk_ends_in_an_error_and_the_run_goes_on_when_there_is_room(
    table: str, tmp_path: Path
) -> None:
    """A limit on the size of files stands in for the full disk: it is met by another file each time."""
    options = {"table": table, "snapshots": {"versions": 2}}
    chosen = tiny("ace", stop={"updates": 40}, measure={"versions": 1}, runtime=options)
    expected, folder = whole(chosen, tmp_path / "whole"), tmp_path / "run"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = []
    for limit in (2000, 4000, 8000, 12_000, 20_000, 30_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            list(
                again(folder)
                if (folder / "config.toml").exists()
                else run(prepare(chosen), folder, again=True)
            )
        except InputError as error:
            said.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(said) >= 3
    for text in said:
        assert re.search(r"ulimit -f|limit on file sizes", text), text
    list(again(folder))
    assert outcome(folder) == expected


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run")
    shutil.rmtree(folder / "store")
    (folder / "store").write_text("a file")  # who is root may write to what is read-only
    with pytest.raises(InputError, match="a file stands where a folder should be: choose another folder"):
        list(again(folder))


# -- which kind of table ----------------------------------------------------------------------------------


def test_auto_is_the_disk_where_the_memory_is_small(caplog: pytest.LogCaptureFixture) -> None:
    small, large = torch.zeros(1000), torch.empty(2**20).expand(2**20)
    with caplog.at_level(logging.DEBUG, "afield"):
        assert choose("auto", ClientTable.like(small, 50)) == "memory"
        assert choose("auto", ClientTable.like(large, 2**24, "int8")) == "disk"
    first, second = caplog.messages
    assert first.startswith("table = memory: 50 rows of 1000 elements (float32) take 0.0 GiB, ")
    assert second.startswith("table = disk: 16777216 rows of 1048576 elements (int8) take 16448.0 GiB, ")


def test_a_plan_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text("format = 2\nnews = 1\n")
    with pytest.raises(InputError, match=r"experiment.toml has format 2, this afield reads 1: update afield"):
        read_plan(tmp_path)
    (tmp_path / "experiment.toml").write_text("format = 1\nruns = 3\n")
    with pytest.raises(InputError, match=r"experiment.toml is damaged"):
        read_plan(tmp_path)
