"""A line between a run and one of its actors: what is small goes there and back beside Ray's calls.

A call passes six of Ray's threads, on the same cores that train: with a model of 70 kB there and one back it takes
0.9 ms of CPU time.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import select
import socket
from collections import deque
from collections.abc import Sequence

Place = tuple[str, int, bytes]  # host, port, and the secret that a caller has to know

PATIENCE = 20  # seconds for a connection to be made
ROOM = 1 << 20  # bytes on their way, where the system allows so many


class Line:
    """Messages as bytes, in their order. An OSError where the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._late: deque[memoryview] = deque()  # posted, and not on its way yet
        self._sending = False
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def late(self) -> bool:
        """Whether there is something to send yet."""
        return bool(self._late)

    def send(self, message: bytes) -> None:
        self._end.sendall(_framed(message))

    def post(self, message: bytes) -> None:
        """Send without waiting: what the other end has no room for goes when `flush` is called again.

        So one end always comes back to listen, and the two cannot wait for each other.
        """
        self._late.append(memoryview(_framed(message)))
        self.flush()

    def flush(self) -> None:
        if self._sending:  # amid a message: something is collected, and posts that
            return
        self._sending = True
        try:
            while self._late:
                self._late[0] = self._late[0][self._end.send(self._late[0], socket.MSG_DONTWAIT) :]
                if not self._late[0]:
                    self._late.popleft()
        except BlockingIOError:
            pass
        finally:
            self._sending = False

    def receive(self) -> bytearray:
        return self.exactly(int.from_bytes(self.exactly(8), "little"))

    def exactly(self, size: int) -> bytearray:
        held = bytearray(size)
        rest = memoryview(held)
        while rest:
            count = self._end.recv_into(rest, 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError("the line was closed")
            rest = rest[count:]
        return held

    def close(self) -> None:
        self._end.close()


class Door:
    """Where one caller is waited for."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self.place: Place = host, self._server.getsockname()[1], secrets.token_bytes(32)

    def open(self) -> Line:
        """The line of the first who knows the secret; nothing else of anybody is read."""
        with self._server:
            while True:
                end, _ = self._server.accept()
                end.settimeout(PATIENCE)
                line = Line(end)
                with contextlib.suppress(OSError):
                    if hmac.compare_digest(line.exactly(len(self.place[2])), self.place[2]):
                        end.settimeout(None)
                        return line
                line.close()


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(8, "little") + message


def call(place: Place) -> Line:
    """A line to that door."""
    host, port, secret = place
    end = socket.create_connection((host, port), PATIENCE)
    end.settimeout(None)
    end.sendall(secret)
    return Line(end)


def wait(lines: Sequence[Line], patience: float | None) -> list[Line]:
    """Whom there is something of to receive; waits so long (None: for ever), and sends on what is late.

    May return earlier, where something was sent.
    """
    poll = select.poll()
    for line in lines:
        poll.register(line, select.POLLIN | (select.POLLOUT if line.late else 0))
    ends, heard = {line.fileno(): line for line in lines}, []
    for end, event in poll.poll(None if patience is None else math.ceil(patience * 1000)):
        if event & select.POLLOUT:
            with contextlib.suppress(OSError):  # it is heard of the next time
                ends[end].flush()
        if event & ~select.POLLOUT:
            heard.append(ends[end])
    return heard
