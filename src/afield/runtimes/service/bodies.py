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
    body = bytearray(length if known else 0)
    at = 0
    try:
        async with asyncio.timeout(GRACE + length / SLOWEST):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionAbortedError
                chunk = message.get("body", b"")
                if at + len(chunk) > length:
                    raise Refusal("too-long", f"the body has more than {length} bytes")
                if known:
                    body[at : at + len(chunk)] = chunk
                else:
                    body += chunk
                at += len(chunk)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise Refusal(
            "too-slow", f"{at} of {length} bytes came in {GRACE + length / SLOWEST:.0f} s"
        ) from None
    if known and at != length:
        raise Refusal("bad-request", f"the body has {at} bytes, its content-length says {length}")
    return body
