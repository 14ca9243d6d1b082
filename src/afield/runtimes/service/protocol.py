"""HTTP/1.1 with limits that uvicorn does not have: on the size of a head, and on the time that it may take.

Who asks its connection for it (scope["state"]) has a body read from the socket straight into its place. Where the
client speaks HTTP/2 (by ALPN, or by its preface on a plain connection) http2.py takes over.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from afield.runtimes.service.http2 import PREFACE, Http2

HEAD_BYTES = 32 * 1024
HEADERS = 100
HEAD_SECONDS = 10.0


class Http(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.heading, self.head_bytes = True, 0
        self.begun: bytes | None = b""  # as long as it is not known which protocol it is
        self.leftover = HEAD_SECONDS  # that the rest of a body may take whose request was answered
        self.certificate = certificate_of(transport)
        self.timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_SECONDS, self._slow)
        secured = transport.get_extra_info("ssl_object")
        if secured is not None and secured.selected_alpn_protocol() == "h2":
            self._hand_over(b"")

    def data_received(self, data: bytes) -> None:
        if self.begun is not None:
            data = self.begun + data
            if data[: len(PREFACE)] == PREFACE:
                return self._hand_over(data)
            if PREFACE.startswith(data):  # PUT and POST begin with a P too
                self.begun = data
                return None
            self.begun = None
        if self.heading and self.timer is None:
            self.timer = self.loop.call_later(HEAD_SECONDS, self._slow)
        before, self.ends = self.heading, 0
        super().data_received(data)
        if before and self.heading and not self.ends and self.parser is not None:  # all of it was head
            self.head_bytes += len(data)
            if self.head_bytes > HEAD_BYTES:
                self._refuse(431)
        return None

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > HEADERS:
            self._refuse(431)

    def on_headers_complete(self) -> None:
        self._rest()
        self.ends += 1
        self.heading, self.head_bytes, self.leftover = False, 0, HEAD_SECONDS
        if self.transport.is_closing():
            return
        self.scope["state"].update(certificate=self.certificate, connection=self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.heading and self.cycle.response_complete and not self.transport.is_closing():
            self._rest()
            self.timer = self.loop.call_later(self.leftover, self.transport.close)

    def on_message_complete(self) -> None:
        self._rest()
        self.heading, self.head_bytes = True, 0
        if self.cycle is not None:
            super().on_message_complete()

    def reads(self, scope: Any) -> bool:
        """Whether the body that comes now is of this request: the next one may have been sent already."""
        return self.cycle is not None and self.cycle.scope is scope

    async def fill(self, place: memoryview) -> int:
        """Read a body of known length into its place; gives how much of it came: less where the client has gone."""
        cycle = self.cycle
        at = len(cycle.body)  # came with the head
        place[:at], cycle.body = cycle.body, bytearray()
        if cycle.waiting_for_100_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        if at == len(place) or self.transport.is_closing():
            return at
        filling = Filling(self, place[at:])
        self.read_by(filling)
        try:
            await filling.ended
        finally:
            if filling.at < len(filling.place) and not self.transport.is_closing():  # not wanted any more
                self.read_by(self)
                super().data_received(bytes(filling.place[: filling.at]))
        return at + filling.at

    def read_by(self, protocol: asyncio.BaseProtocol) -> None:
        """Have what comes from here on go to this one."""
        self.transport.pause_reading()
        self.transport.set_protocol(protocol)
        self.transport.resume_reading()
        self.flow.read_paused = False

    def filled(self) -> None:
        """The body went past the parser: what comes next is a new request."""
        self.read_by(self)
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def _rest(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _slow(self) -> None:
        self.timer = None
        self._refuse(408)

    def _refuse(self, status: int) -> None:
        if not self.transport.is_closing():
            self.transport.write(STATUS_LINE[status] + b"connection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    def _hand_over(self, data: bytes) -> None:
        self._rest()
        self.connections.discard(self)
        other = Http2(self.config, self.server_state, self.app_state, self.loop, self.certificate)
        self.transport.set_protocol(other)
        other.connection_made(self.transport)
        if data:
            other.data_received(data)


class Filling(asyncio.BufferedProtocol):
    """Stands in for a connection's protocol while a body comes, which goes from the socket to where it is wanted.

    Otherwise it is copied five times on its way, and the application is woken for every piece of it.
    """

    def __init__(self, http: Http, place: memoryview) -> None:
        self.http, self.place, self.at = http, place, 0
        self.ended: asyncio.Future[None] = http.loop.create_future()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.place[self.at :]  # and no further: what follows is another request

    def buffer_updated(self, nbytes: int) -> None:
        self.at += nbytes
        if self.at == len(self.place):
            self.http.filled()
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.http.connection_lost(exc)
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def eof_received(self) -> None:
        self.http.eof_received()

    def pause_writing(self) -> None:
        self.http.pause_writing()

    def resume_writing(self) -> None:
        self.http.resume_writing()


def certificate_of(transport: asyncio.BaseTransport) -> bytes | None:
    """The certificate that the client proved to have, where it was asked for one."""
    secured: Any = transport.get_extra_info("ssl_object")
    return None if secured is None else secured.getpeercert(binary_form=True)
