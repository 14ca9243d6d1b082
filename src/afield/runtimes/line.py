"""A line between a run and one of its actors: what is small goes there and back beside Ray's calls.

A call passes six of Ray's threads, on the same cores that train: with a model of 70 kB there and one back 0.9 ms of
CPU time, and more where training has emptied the caches.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
from typing import TypeVar

T = TypeVar("T")

Place = tuple[str, int, bytes]  # host, port, and the secret that a caller has to know

PATIENCE = 20  # seconds without a sign of the other machine
ROOM = 1 << 20  # bytes that a sender need not wait for, where the system allows so many


class Line:
    """Messages as bytes, in their order. An OSError where the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._early = bytearray()  # came while a reply was on its way
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is cut off says nothing
        for name, value in (
            ("TCP_KEEPIDLE", PATIENCE // 4),
            ("TCP_KEEPINTVL", PATIENCE // 4),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", PATIENCE * 1000),
        ):
            if hasattr(socket, name):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        self._end.sendall(_framed(message))

    def reply(self, message: bytes) -> None:
        """Send, and take in meanwhile what comes: else both ends could wait for the other to listen."""
        rest = memoryview(_framed(message))
        while rest:
            try:
                rest = rest[self._end.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                watch = select.poll()
                watch.register(self._end, select.POLLIN | select.POLLOUT)
                [(_, event)] = watch.poll()
                if event != select.POLLOUT:
                    self._early += self._some(self._end.recv(ROOM))

    def receive(self) -> bytearray:
        return self.exactly(int.from_bytes(self.exactly(8), "little"))

    def exactly(self, size: int) -> bytearray:
        held = bytearray(size)
        rest = memoryview(held)
        if self._early:
            known = self._early[:size]
            del self._early[:size]
            rest[: len(known)] = known
            rest = rest[len(known) :]
        while rest:
            rest = rest[self._some(self._end.recv_into(rest, 0, socket.MSG_WAITALL)) :]
        return held

    @staticmethod
    def _some(found: T) -> T:
        if not found:
            raise ConnectionError("the line was closed")
        return found

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
