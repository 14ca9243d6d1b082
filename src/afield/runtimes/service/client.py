"""The SDK: ask for tasks, train however you like, send the result. Any interruption is waited out.

with afield.Client("https://host:8443", token=...) as client:
    for task in client.tasks():
        task.load_into(net); train(net); task.submit(net, examples=n)
"""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from afield.core.errors import InputError, one_of
from afield.core.flat import Layout
from afield.runtimes.service.memory import Memory
from afield.runtimes.service.remote import RemoteTask, ServerError
from afield.runtimes.service.wire import FORMS, BodyError, Wire, parsed

__all__ = ["Client", "RemoteTask", "ServerError"]
KEPT = 2  # versions that are kept, so that none is downloaded twice in a row
LONGEST = 30.0  # seconds between two attempts


class Client:
    """One client of a federation, or the operator. Not thread-safe, but for heartbeats, which it sends by itself.

    `client`: which one, where the token speaks for several. `ca`: the authority that signed the server's certificate;
    `certificate`: (cert, key) files of your own, for mutual TLS. `transport`: "full", or differences as "bf16" or
    "int8"; what rounding leaves out is added to the next update (error feedback). `patience`: seconds without a reply
    after which it gives up (never, where None). `keep`: a folder for what must outlive this process where a client
    sends differences to what it sent before (ACE with held = "client") or rounded ones.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        client: int | None = None,
        ca: str | Path | None = None,
        certificate: tuple[str | Path, str | Path] | None = None,
        transport: str = "full",
        zstd: bool = False,
        wait: float = 25.0,
        patience: float | None = None,
        keep: str | Path | None = None,
    ) -> None:
        one_of("transport", transport, FORMS)
        if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
            raise InputError("the token is not one line of ASCII: give what afield token add printed")
        self.url, self.client, self.transport, self.zstd = url.rstrip("/"), client, transport, zstd
        self.wait, self.patience = wait, patience
        self._http = _http(self.url, token, ca, certificate, wait)
        self._about: dict[str, Any] | None = None
        self._models: dict[int, Tensor] = {}
        self._tags: dict[int, str] = {}  # their ETags
        self._keep = None if keep is None else Path(keep)
        self.received = self.sent = 0  # bytes of models and updates
        self._stopping = threading.Event()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stopping.set()
        self._http.close()

    def stop(self) -> None:
        """From another thread: `tasks` ends after the task at hand."""
        self._stopping.set()

    # -- what there is ----------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """The experiment: its model, its config, the terms."""
        if self._about is None:
            self._about = self._table(self.request("GET", "/v1/run"))
        return self._about

    def _table(self, reply: Any) -> dict[str, Any]:
        """What a reply tells; another web server may be at that address."""
        try:
            found: dict[str, Any] = reply.json()
        except ValueError:
            raise InputError(
                f"{reply.url} answered {reply.text[:40]!r}, which is not afield's: check the address"
            ) from None
        return found

    @cached_property
    def layout(self) -> Layout:
        model = self.about()["model"]
        names = tuple(tensor["name"] for tensor in model["tensors"])
        shapes = tuple(torch.Size(tensor["shape"]) for tensor in model["tensors"])
        offsets, at = [], 0
        for shape in shapes:
            offsets.append(at)
            at += shape.numel()
        inside = model["parameters"]
        return Layout(names, shapes, tuple(offsets), inside, at - inside, getattr(torch, model["dtype"]))

    def status(self) -> dict[str, Any]:
        return self._table(self.request("GET", "/v1/status"))

    def model(self, version: int | str = "latest") -> tuple[int, Tensor]:
        """A model by its version, "latest" or "promoted": its version and its vector."""
        if isinstance(version, int) and version in self._models:
            return version, self._models[version]
        form = "full" if self.transport == "full" else "bf16"
        newest = max(self._models, default=None)
        headers = {"Accept-Encoding": "zstd" if self.zstd else "identity"}
        if not isinstance(version, int) and newest is not None:
            headers["If-None-Match"] = self._tags[newest]
        query = {} if form == "full" else {"form": form}
        reply = self.request("GET", f"/v1/models/{version}", params=query, headers=headers)
        if reply.status_code == 304 and newest is not None:
            return newest, self._models[newest]
        number, body = int(reply.headers["afield-version"]), bytearray(reply.content)
        self.received += len(body)
        self._models[number] = self._vector(body)
        self._tags[number] = reply.headers["etag"]
        while len(self._models) > KEPT:
            del self._models[min(self._models)]
        return number, self._models[number]

    def _vector(self, body: bytearray) -> Tensor:
        wire, (head, start) = self.wire, parsed(body, len(body))
        kind = next(entry["dtype"] for name, entry in head.items() if name != "__metadata__")
        if kind == "BF16":  # a rounded model: the vector's order is ours, the server wrote it
            return torch.frombuffer(body, dtype=torch.bfloat16, offset=start).to(wire.layout.dtype)
        try:
            return wire.read(body).vector
        except BodyError as error:
            raise InputError(f"{self.url} sent a model that cannot be read: {error}") from error

    @cached_property
    def wire(self) -> Wire:
        return Wire(self.layout)

    # -- tasks ------------------------------------------------------------------------------------------------

    def tasks(self, most: int | None = None) -> Iterator[RemoteTask]:
        """One task after the other, for ever (or `most`); a task that was not answered is given back."""
        done = 0
        while not self._stopping.is_set() and (most is None or done < most):
            found = self.next_task()
            if found is None:
                continue
            with found:
                yield found
            done += 1

    def next_task(self) -> RemoteTask | None:
        """Ask once, and wait as long as `wait`; None where there was none."""
        query: dict[str, Any] = {"wait": self.wait}
        if self.client is not None:
            query["client"] = self.client
        reply = self.request("POST", "/v1/tasks", params=query)
        if reply.status_code == 204:
            return None
        told = self._table(reply)
        try:
            version, base = self.model(told["version"])
        except ServerError as error:
            if error.reason == "no-model":
                return None  # the task was taken back in the meantime
            raise
        assert version == told["version"]
        if told["held"] or self.transport != "full":
            self.memory.settle(told["client"], told["counted"], needed=told["held"])
        correction = None
        if told["corrected"]:
            path = f"/v1/tasks/{told['number']}/correction"
            body = bytearray(self.request("GET", path, params={"lease": told["lease"]}).content)
            start = 8 + int.from_bytes(body[:8], "little")
            correction = torch.frombuffer(body, dtype=base.dtype, offset=start)
        return RemoteTask(self, told, base, correction)

    @cached_property
    def memory(self) -> Memory:
        return Memory(self._keep, self.about()["run"])

    # -- requests ---------------------------------------------------------------------------------------------

    def request(self, method: str, path: str, **parts: Any) -> Any:
        """The reply; what passes (a restart, a full queue, a cut connection) is waited out, with growing pauses."""
        import httpx

        began, pause = time.monotonic(), 0.1
        while True:
            try:
                reply = self._http.request(method, self.url + path, **parts)
            except httpx.TransportError as error:
                if isinstance(error, httpx.UnsupportedProtocol) or "CERTIFICATE" in str(error).upper():
                    raise InputError(
                        f"{self.url}: {error}; check the address, and --ca for its authority"
                    ) from error
                told, problem = None, str(error) or type(error).__name__
            else:
                if reply.status_code < 400:
                    return reply
                told, problem = _refused(reply)
            if self.patience is not None and time.monotonic() - began > self.patience:
                raise InputError(
                    f"{self.url} did not answer {method} {path} in {self.patience:g} s: {problem}"
                )
            pause = min(LONGEST, pause * 2)
            wait = pause * random.uniform(0.5, 1.0) if told is None else max(told, pause * random.random())
            if self._stopping.wait(wait):
                raise InputError(f"stopped while waiting for {self.url}: {problem}")


def _refused(reply: Any) -> tuple[float | None, str]:
    """How long to wait before the same request is sent again; raises where that would not help."""
    try:
        told = reply.json()
        reason, following, message = told["error"], told["next"], told["message"]
    except (ValueError, KeyError, TypeError):
        following = "wait" if reply.status_code >= 500 or reply.status_code in (408, 429) else "stop"
        reason, message = f"status-{reply.status_code}", reply.text[:200]
    if following != "wait":
        raise ServerError(reply.status_code, reason, following, message)
    after = reply.headers.get("retry-after", "")
    return (min(LONGEST, float(after)) if after.isdigit() else None), f"{reason}: {message}"


def _http(
    url: str,
    token: str | None,
    ca: str | Path | None,
    certificate: tuple[str | Path, str | Path] | None,
    wait: float,
) -> Any:
    try:
        import httpx
    except ImportError:
        raise InputError("the client needs the package httpx: pip install 'afield[join]'") from None
    verify: Any = True
    if url.startswith("https:"):
        try:
            verify = ssl.create_default_context(cafile=None if ca is None else str(ca))
            if certificate is not None:
                verify.load_cert_chain(*certificate)
        except (OSError, ssl.SSLError) as error:
            raise InputError(
                f"{ca or ''} {certificate or ''} cannot be used: {error}; give PEM files"
            ) from error
    headers = (
        {"User-Agent": "afield"}
        if token is None
        else {"User-Agent": "afield", "Authorization": f"Bearer {token}"}
    )
    timeout = httpx.Timeout(60.0, read=wait + 60.0)
    return httpx.Client(headers=headers, verify=verify, http2=_speaks_http2(), timeout=timeout)


def _speaks_http2() -> bool:
    try:
        import h2  # noqa: F401
    except ImportError:
        return False
    return True
