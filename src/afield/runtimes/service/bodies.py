"""Bodies: read as they come, into a bounded amount of memory, within a time that their length allows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from afield.runtimes.service.refusals import Refusal

SLOWEST = 64 * 1024  # bytes per second, after
GRACE = 20.0  # seconds
PATIENCE = 5.0  # seconds that who finds no room waits


class Room:
    """Bytes that updates may take from their first byte to their receipt; who finds none waits a while, in order."""

    def __init__(self, bytes: int, most: int = 4096) -> None:
        self.bytes, self.free = bytes, bytes
        self.most = most
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        if size > self.bytes:
            raise Refusal(
                "too-long", f"{size} bytes are more than the {self.bytes} that all updates may take"
            )
        if self._queue or self.free < size:
            await self._wait(size)
        else:
            self.free -= size
        try:
            yield
        finally:
            self.free += size
            self._admit()

    async def _wait(self, size: int) -> None:
        if len(self._queue) >= self.most:
            raise Refusal("busy", after=PATIENCE)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        try:
            async with asyncio.timeout(PATIENCE):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.free += size  # it came just then
            else:
                turn.cancel()
            self._admit()
            if isinstance(error, TimeoutError):
                raise Refusal("busy", after=1.0 + PATIENCE * len(self._queue) / self.most) from None
            raise

    def _admit(self) -> None:
        while self._queue and (self._queue[0][1].done() or self._queue[0][0] <= self.free):
            size, turn = self._queue.popleft()
            if not turn.done():
                self.free -= size
                turn.set_result(None)


def length_of(request: Request, limit: int) -> int:
    """What the client says that it sends; where it does not (chunked), as much as there may be."""
    text = request.headers.get("content-length")
    if text is None:
        return limit
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise Refusal("bad-request", f"content-length {text[:40]!r} is not a number")
    if int(text) > limit:
        raise Refusal("too-long", f"the body has {int(text)} bytes, an update of this model at most {limit}")
    return int(text)


async def body_of(request: Request, limit: int) -> bytearray:
    """The whole body, which must keep coming at a fair speed."""
    length = length_of(request, limit)
    known = "content-length" in request.headers
    connection = request.scope["state"].get("connection")  # of HTTP/1.1: see protocol.py
    seconds = GRACE + length / SLOWEST
    try:
        async with asyncio.timeout(seconds):
            if not known or connection is None or not connection.reads(request.scope):
                return await _gathered(request, length, known)
            body = bytearray(length)
            if await connection.fill(memoryview(body)) < length:
                raise ConnectionAbortedError
            return body
    except TimeoutError:
        raise Refusal("too-slow", f"the {length} bytes did not come in {seconds:.0f} s") from None


async def _gathered(request: Request, length: int, known: bool) -> bytearray:
    """A body in the pieces in which it comes; where its length is not known, `length` is the most."""
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ConnectionAbortedError
        chunk = message.get("body", b"")
        if len(body) + len(chunk) > length:
            raise Refusal("too-long", f"the body has more than {length} bytes")
        body += chunk
        if not message.get("more_body", False):
            break
    if known and len(body) != length:
        raise Refusal("bad-request", f"the body has {len(body)} bytes, its content-length says {length}")
    return body
