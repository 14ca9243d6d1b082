"""One process owns a folder; who comes second is told who was first, and takes over from the dead."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from afield.core.errors import InputError
from afield.store.owner import Owner


def held_by_a_child(folder: Path) -> int:
    """Another process that has the folder, and sleeps until it is killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            Owner(folder).__enter__()
            os.write(writing, b"held")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 4) == b"held"
    os.close(reading)
    return pid


def test_the_second_is_told_the_process_and_host_of_the_first_and_takes_over_when_that_is_dead(
    tmp_path: Path,
) -> None:
    pid = held_by_a_child(tmp_path)
    try:
        expected = f"{tmp_path} is in use by process {pid} on {socket.gethostname()} (since "
        with pytest.raises(InputError, match=re.escape(expected)):
            Owner(tmp_path).__enter__()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with Owner(tmp_path), pytest.raises(InputError, match=f"in use by process {os.getpid()} on"):
        Owner(tmp_path).__enter__()
    with Owner(tmp_path):
        pass


def test_a_child_does_not_keep_the_folder_of_a_parent_that_is_gone(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with Owner(tmp_path):
        pid = os.fork()
        if pid == 0:
            os.write(writing, b"here")
            signal.pause()
            os._exit(1)
        assert os.read(reading, 4) == b"here"
    try:
        with Owner(tmp_path):  # the child lives, and has inherited what was open
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
