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
    begun, (reading, writing) = os.pipe(), os.pipe()
    parent = os.fork()
    if parent == 0:  # takes the folder, leaves a child behind, and dies
        with Owner(tmp_path):
            if os.fork() == 0:
                os.close(writing)
                os.write(begun[1], b"%d" % os.getpid())
                os.read(reading, 1)  # until the test closes its end
            os._exit(0)
    assert os.waitpid(parent, 0)[1] == 0
    child = int(os.read(begun[0], 20))  # it lives, and has inherited what was open
    try:
        with Owner(tmp_path):
            os.kill(child, 0)
    finally:
        for end in (reading, writing, *begun):
            os.close(end)


def test_what_is_let_go_is_free_at_once_whoever_has_it_open(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    with owner:
        other = os.dup(owner.fd)  # as a child has it until its fork is complete
    with Owner(tmp_path):
        os.close(other)
