"""Lines: messages between two processes, and who is let in."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from afield.runtimes.line import Door, Line, call, wait


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    with ThreadPoolExecutor(1) as other:
        door = Door("127.0.0.1")
        there = other.submit(door.open)
        here = call(door.place)
        yield here, there.result()
        here.close()
        there.result().close()


def test_messages_come_as_they_were_sent(ends: tuple[Line, Line]) -> None:
    here, there = ends
    sent = [os.urandom(size) for size in (0, 1, 100, 70_000, 5_000_000)]
    with ThreadPoolExecutor(1) as other:
        for line, far in ((here, there), (there, here)):
            found = other.submit(lambda far=far: [far.receive() for _ in sent])
            for message in sent:
                line.send(message)
            assert found.result() == sent


def test_an_end_that_is_closed_is_told(ends: tuple[Line, Line]) -> None:
    here, there = ends
    here.send(b"last")
    here.close()
    assert there.receive() == b"last"
    with pytest.raises(ConnectionError):
        there.receive()
    with pytest.raises(OSError):
        there.send(bytes(100_000_000))


def test_who_posts_waits_for_nobody(ends: tuple[Line, Line]) -> None:
    """However much there is to say: the other end may be about to say as much."""
    here, there = ends
    asked, answered = [os.urandom(20_000_000), b"more"], os.urandom(20_000_000)
    assert wait([here], 0.0) == []
    for message in asked:
        here.post(message)
    assert here.late
    with ThreadPoolExecutor(1) as other:
        found = other.submit(lambda: (there.send(answered), there.receive(), there.receive()))
        while not wait([here], None):
            pass
        assert here.receive() == answered
        while here.late:
            wait([here], None)
        assert found.result()[1:] == tuple(asked)


def test_only_who_knows_the_secret_is_let_in() -> None:
    door = Door("127.0.0.1")
    host, port, secret = door.place
    with ThreadPoolExecutor(1) as other:
        there = other.submit(door.open)
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(bytes(len(secret)))
            assert stranger.recv(1) == b""
        with socket.create_connection((host, port)):
            pass
        here = call(door.place)
        here.send(b"hello")
        assert there.result().receive() == b"hello"
        with pytest.raises(OSError):  # the door is shut
            call(door.place)
        here.close()
        there.result().close()
