"""HTTP/2 for uvicorn, which has none: the frames are the package h2's, the streams become ASGI calls.

What a client sends is acknowledged when the application has taken it, so that a slow one is felt by its sender; what
it is sent waits for its window. Limits: streams at a time, size of a head, time without a stream, and resets (a
client that opens streams only to cancel them).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import urllib.parse
from collections import deque
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
from h2.settings import SettingCodes
from uvicorn.config import Config
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

log = logging.getLogger(__name__)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAMS = 100
WINDOW = 2**20
HEAD_BYTES = 32 * 1024
FIRST = 10.0  # seconds until the first stream
IDLE = 75.0  # seconds without a stream
UNREAD = 4 * WINDOW  # bytes of ours that may wait for who does not read them, but goes on asking for more
RESETS = 200  # more than this and than the streams that were answered: an attack


class Stream:
    """One request and its reply."""

    def __init__(self, connection: Http2, number: int, scope: dict[str, Any]) -> None:
        self.connection, self.number, self.scope = connection, number, scope
        self.chunks: deque[tuple[bytes, int]] = deque()
        self.complete = False  # the request
        self.gone = False
        self.started = self.answered = False
        self.news = asyncio.Event()  # a chunk, an end
        self.open = asyncio.Event()  # the window, or the transport, has room again

    async def run(self) -> None:
        app: Any = self.connection.config.loaded_app
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            log.exception("the application failed")
        if not self.answered:
            self.connection.reset(self)
        self.connection.finished(self)

    async def receive(self) -> dict[str, Any]:
        while not self.chunks and not self.complete and not self.gone and not self.answered:
            self.news.clear()
            await self.news.wait()
        if self.chunks:
            chunk, cost = self.chunks.popleft()
            self.connection.taken(self, cost)
            return {
                "type": "http.request",
                "body": chunk,
                "more_body": bool(self.chunks) or not self.complete,
            }
        if self.complete and not self.gone and not self.scope.get("afield.ended"):
            self.scope["afield.ended"] = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while not self.gone and not self.answered:
            self.news.clear()
            await self.news.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self.connection.head(self, message)
            self.started = True
        elif message["type"] == "http.response.body":
            await self._body(memoryview(message.get("body", b"")), not message.get("more_body", False))

    async def _body(self, data: memoryview, last: bool) -> None:
        while len(data) and self.scope["method"] != "HEAD":
            room = self.connection.room(self)
            if self.gone:
                return
            if room <= 0:
                self.open.clear()
                await self.open.wait()
                continue
            self.connection.data(self, bytes(data[:room]))
            data = data[room:]
        if last:
            self.answered = True
            self.connection.data(self, b"", end=True)
            self.news.set()


class Http2(asyncio.Protocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        certificate: bytes | None,
    ) -> None:
        self.config, self.server_state, self.app_state = config, server_state, app_state
        self.loop, self.certificate = loop, certificate
        self.streams: dict[int, Stream] = {}
        self.resets = self.served = 0
        self.writable = True
        self.ending = False
        self.timer: asyncio.TimerHandle | None = None

    # -- asyncio's side ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.server_state.connections.add(self)  # type: ignore[arg-type]
        self.server, self.client = get_local_addr(transport), get_remote_addr(transport)
        self.secured = transport.get_extra_info("ssl_object") is not None
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding=None)
        )
        self.h2.initiate_connection()
        self.h2.update_settings(
            {
                SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS,
                SettingCodes.INITIAL_WINDOW_SIZE: WINDOW,
                SettingCodes.MAX_HEADER_LIST_SIZE: HEAD_BYTES,
            }
        )
        self.h2.decoder.max_header_list_size = HEAD_BYTES
        self.h2.increment_flow_control_window(16 * WINDOW - 65535)
        self.flush()
        self._rest(FIRST)

    def data_received(self, data: bytes) -> None:
        try:
            for start in range(
                0, len(data), HEAD_BYTES
            ):  # so that the size of a head is seen before it is decoded
                for event in self.h2.receive_data(data[start : start + HEAD_BYTES]):
                    self._event(event)
                parts = getattr(self.h2.incoming_buffer, "_headers_buffer", ())
                if sum(len(part.data) for part in parts) > HEAD_BYTES:
                    raise h2.exceptions.DenialOfServiceError("a head of more than the bound")
        except h2.exceptions.ProtocolError:
            self.flush()
            self.transport.close()
            return
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.connections.discard(self)
        if self.timer is not None:
            self.timer.cancel()
        for stream in list(self.streams.values()):
            self._leave(stream)

    def eof_received(self) -> None:
        pass

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        for stream in self.streams.values():
            stream.open.set()

    def shutdown(self) -> None:
        """uvicorn is about to end: no new streams; the connection ends with its last one."""
        self.ending = True
        self.h2.close_connection(last_stream_id=self.h2.highest_inbound_stream_id)
        self.flush()
        if not self.streams:
            self.transport.close()

    # -- what comes in ----------------------------------------------------------------------------------------

    def _event(self, event: h2.events.Event) -> None:
        number = getattr(event, "stream_id", None)
        stream = self.streams.get(number) if number is not None else None
        if isinstance(event, h2.events.RequestReceived):
            self._begin(event)
        elif isinstance(event, h2.events.DataReceived):
            if stream is None or stream.answered:
                with contextlib.suppress(h2.exceptions.ProtocolError):
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            else:
                stream.chunks.append((event.data, event.flow_controlled_length))
                stream.news.set()
        elif isinstance(event, h2.events.StreamEnded):
            if stream is not None:
                stream.complete = True
                stream.news.set()
        elif isinstance(event, h2.events.StreamReset):
            self.resets += 1
            if stream is not None:
                self._leave(stream)
            if self.resets > max(RESETS, self.served):
                self.h2.close_connection(error_code=h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
                self.flush()
                self.transport.close()
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            for one in [stream] if stream is not None else self.streams.values():
                one.open.set()
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.transport.close()

    def _begin(self, event: h2.events.RequestReceived) -> None:
        special, headers = {}, []
        for name, value in event.headers:
            if name.startswith(b":"):
                special[name] = bytes(value)
            else:
                headers.append((bytes(name), bytes(value)))
        if b":authority" in special:
            headers.insert(0, (b"host", special[b":authority"]))
        raw, _, query = special.get(b":path", b"/").partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "2",
            "server": self.server,
            "client": self.client,
            "scheme": "https" if self.secured else "http",
            "method": special.get(b":method", b"GET").decode("ascii", "replace"),
            "root_path": "",
            "path": urllib.parse.unquote(raw.decode("ascii", "replace")),
            "raw_path": raw,
            "query_string": query,
            "headers": headers,
            "state": {**self.app_state, "certificate": self.certificate},
        }
        stream = Stream(self, event.stream_id, scope)
        self.streams[event.stream_id] = stream
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        task = self.loop.create_task(stream.run())
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    def _leave(self, stream: Stream) -> None:
        stream.gone = True
        stream.news.set()
        stream.open.set()

    # -- what goes out ----------------------------------------------------------------------------------------

    def flush(self) -> None:
        if (data := self.h2.data_to_send()) and not self.transport.is_closing():
            self.transport.write(data)
            if self.transport.get_write_buffer_size() > UNREAD:
                self.transport.abort()

    def head(self, stream: Stream, message: dict[str, Any]) -> None:
        headers = [(b":status", str(message["status"]).encode())]
        headers += [(k.lower(), v) for k, v in self.server_state.default_headers]
        headers += [
            (k.lower(), v)
            for k, v in message.get("headers", [])
            if k.lower() not in (b"connection", b"transfer-encoding")
        ]
        try:
            self.h2.send_headers(stream.number, headers)
        except h2.exceptions.ProtocolError:
            self._leave(stream)
        self.flush()

    def room(self, stream: Stream) -> int:
        """Bytes that may be sent now."""
        if not self.writable or stream.gone:
            return 0
        try:
            window = self.h2.local_flow_control_window(stream.number)
        except h2.exceptions.ProtocolError:
            self._leave(stream)
            return 0
        return min(window, self.h2.max_outbound_frame_size)

    def data(self, stream: Stream, data: bytes, end: bool = False) -> None:
        try:
            self.h2.send_data(stream.number, data, end_stream=end)
        except h2.exceptions.ProtocolError:
            self._leave(stream)
        self.flush()

    def taken(self, stream: Stream, cost: int) -> None:
        """The application has taken so many bytes of the body: the client may send as many more."""
        if cost and not self.transport.is_closing():
            try:
                self.h2.acknowledge_received_data(cost, stream.number)
            except h2.exceptions.ProtocolError:
                return
            self.flush()

    def reset(self, stream: Stream) -> None:
        if not stream.gone and not self.transport.is_closing():
            try:
                self.h2.reset_stream(stream.number, h2.errors.ErrorCodes.INTERNAL_ERROR)
            except h2.exceptions.ProtocolError:
                return
            self.flush()

    def finished(self, stream: Stream) -> None:
        self.served += stream.answered
        self.server_state.total_requests += 1
        self.streams.pop(stream.number, None)
        for _, cost in stream.chunks:  # what nobody wanted counts no more against the connection
            self.taken(stream, cost)
        if not stream.complete and not stream.gone and stream.answered:
            self._stop_sending(stream)
        if not self.streams:
            if self.ending:
                self.transport.close()
            else:
                self._rest()

    def _stop_sending(self, stream: Stream) -> None:
        """The reply came before the body's end: the rest is not wanted."""
        try:
            self.h2.reset_stream(stream.number, h2.errors.ErrorCodes.NO_ERROR)
        except h2.exceptions.ProtocolError:
            return
        self.flush()

    def _rest(self, seconds: float = IDLE) -> None:
        if self.timer is None:
            self.timer = self.loop.call_later(seconds, self.transport.close)
