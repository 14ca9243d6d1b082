"""From a service to a socket: TLS, signals, a drain that loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from afield.core.errors import InputError
from afield.runtimes.service.app import app_of
from afield.runtimes.service.protocol import Http
from afield.runtimes.service.service import Parts, Service

log = logging.getLogger(__name__)
Started = Callable[[str, Callable[[], None]], None]
GOODBYE = 0.5  # seconds between the close of a connection and its end
DRAIN = 20.0  # seconds that running requests have when it is time to end


@dataclass(frozen=True)
class Listen:
    """Where to listen, and with what keys."""

    host: str = "127.0.0.1"
    port: int = 8443
    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None  # whoever comes must have a certificate of this authority
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.cert is None and (self.key is not None or self.client_ca is not None):
            raise InputError("--key and --client-ca belong to a certificate: give --cert FILE too")
        if self.cert is None and not self.insecure and not loopback(self.host):
            raise InputError(
                f"--host {self.host} is reached from elsewhere, and without TLS tokens and models could be read on "
                "the way: give --cert and --key, or say --insecure"
            )

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.cert is None else 'https'}://{host}:{self.port}"

    def context(self) -> ssl.SSLContext | None:
        if self.cert is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2", "http/1.1"])
        try:
            context.load_cert_chain(self.cert, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(path) for path in (self.cert, self.key, self.client_ca) if path is not None)
            raise InputError(f"{files}: no certificate and key that fit ({error}); give PEM files") from error
        return context


def loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Serving(uvicorn.Server):
    """uvicorn, told to end: the desk closes first, so that who waits for a task is answered at once."""

    service: Service | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self.service is not None:
            self.service.fold.loop.call_soon_threadsafe(self.service.drain)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        hanging_up = asyncio.ensure_future(self._hang_up())
        try:
            await super().shutdown(sockets)
        finally:
            hanging_up.cancel()

    async def _hang_up(self) -> None:
        """TLS waits 30 s for the other side's goodbye, but who idles does not read ours: end what was closed."""
        before: set[object] = set()
        while True:
            await asyncio.sleep(GOODBYE)
            closing = {one for one in self.server_state.connections if one.transport.is_closing()}
            for one in closing & before:
                if not one.transport.get_write_buffer_size():
                    one.transport.abort()
            before = set(closing)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again at the end: the command ends by itself, with status 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def config_of(app: Any, drain: int, **more: Any) -> uvicorn.Config:
    """What all servers here have in common; `drain`: seconds that requests have at the end."""
    return uvicorn.Config(
        app,
        http=Http,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who a client says that it is, is nothing to the audit log
        timeout_graceful_shutdown=drain,
        **more,
    )


async def until_ended(server: Serving, listening: socket.socket, url: str, started: Started) -> None:
    """Serve, and tell the address, and a function that ends it as SIGTERM does, once it answers."""
    task = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not task.done():
        await asyncio.sleep(0.005)
    if server.started:
        started(url, lambda: server.handle_exit(signal.SIGTERM, None))
    await task


def serve(parts: Parts, listen: Listen, started: Started = lambda url, end: None) -> str:
    """Serve until SIGTERM or Ctrl-C; gives why it ended otherwise ("" where it was told to).

    `started` is told the address, and a function that ends it all as SIGTERM does, from any thread.
    """
    listening = bound(listen)
    why: list[str] = []

    async def main() -> None:
        server: Serving

        def ended(reason: str) -> None:
            why.append(reason)
            server.should_exit = True

        service = Service(parts, ended)
        app = app_of(service)
        config = config_of(app, int(DRAIN), lifespan="on", timeout_keep_alive=75, backlog=4096)
        config.load()
        config.ssl = listen.context()
        server = Serving(config)
        server.service = service
        url = f"{listen.url.rpartition(':')[0]}:{listening.getsockname()[1]}"
        await until_ended(server, listening, url, started)

    with _quick_interpreter(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main())
    return why[0] if why else ""


@contextlib.contextmanager
def _quick_interpreter() -> Iterator[None]:
    """The interpreter set up for a fold beside an event loop; as it was before in the end."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    # The fold lets go of the interpreter at every write, sum and tensor operation, and may wait this long to have it
    # back. A thousand clients, updates a second: 5 ms (the default) and 0.5 ms in turn 139 and 147, 120 and 131, 108
    # and 124, 113 and 134; 0.5 ms 282 and 291, then 0.1 ms 289 and 299.
    sys.setswitchinterval(0.0001)
    # Requests leave no cycles behind, but every 700 objects torch's own were gone through for some: the event loop
    # took 2.5 ms an update, and takes 1.8 without.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        gc.unfreeze()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def bound(listen: Listen) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((listen.host, listen.port))
    except OSError as error:
        made.close()
        # a name that nobody knows, or an address that is not this machine's
        elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        other = "--host: an address of this machine, or 0.0.0.0 for all" if elsewhere else "--port"
        raise InputError(
            f"{listen.host}:{listen.port} cannot be listened on ({error.strerror}): choose another {other}"
        ) from error
    made.setblocking(False)
    return made
