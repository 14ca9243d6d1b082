"""Models and corrections as they are sent: straight from the vector, by version, each with its ETag."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from afield.core.flat import Layout
from afield.runtimes.service import bodies
from afield.runtimes.service.refusals import Refusal
from afield.runtimes.service.tasks import Shelved
from afield.runtimes.service.wire import TYPE, framed, raw

if TYPE_CHECKING:
    from afield.runtimes.service.entrance import Call
    from afield.runtimes.service.service import Service

PIECE = 1 << 18  # bytes handed to the transport at once: it may have to copy what it cannot send yet


class Pieces(Response):
    """A body in pieces that lie in memory already. Who reads too slowly is left: else it would hold them for ever."""

    def __init__(
        self, pieces: Sequence[bytes | memoryview], headers: dict[str, str], keep: Any = None
    ) -> None:
        super().__init__(None, 200, {**headers, "content-type": TYPE})
        self.pieces, self.keep = pieces, keep  # `keep`: what the pieces are views of
        self.headers["content-length"] = str(sum(len(piece) for piece in pieces))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = int(self.headers["content-length"])
        try:
            async with asyncio.timeout(bodies.GRACE + length / bodies.SLOWEST):
                await self._sent(send)
        except TimeoutError:  # a stream of HTTP/2 that ends without its last piece is reset
            if (connection := scope["state"].get("connection")) is not None:
                connection.transport.abort()
                await asyncio.sleep(0)

    async def _sent(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for piece in self.pieces:
            for start in range(0, len(piece), PIECE):
                await send(
                    {"type": "http.response.body", "body": piece[start : start + PIECE], "more_body": True}
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def model_of(call: Call) -> Response:
    """A version's model (or a task's correction)."""
    if "number" in call.request.path_params:
        return _correction(call)
    service, request = call.service, call.request
    form = request.query_params.get("form", "full")
    if form not in ("full", "bf16"):
        raise Refusal("bad-request", f"form = {form[:40]!r} is not full or bf16")
    found = await _found(call, request.path_params["version"])
    packed = "zstd" in request.headers.get("accept-encoding", "")
    tag = f'"{service.tag}-{found.version}-{form}{"-zstd" if packed else ""}"'
    headers = {
        "ETag": tag,
        "Cache-Control": "private, max-age=31536000, immutable",
        "Afield-Version": str(found.version),
    }
    if not request.path_params["version"].isdigit():
        headers["Cache-Control"] = "private, no-cache"
    if tag in [one.strip() for one in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    if packed:
        headers["Content-Encoding"] = "zstd"
    pieces = await pieces_of(service, found, form, packed)
    service.metrics.sent.inc(sum(len(piece) for piece in pieces))
    return Pieces(pieces, headers, found)


async def _found(call: Call, name: str) -> Shelved:
    service = call.service
    if name == "latest":
        return service.desk.shelf.put(*await service.newest())
    if name == "promoted":
        if service.kept.promoted is None:
            raise Refusal("no-model", "no version was promoted yet: take latest")
        version = service.kept.promoted
    elif name.isascii() and name.isdigit() and len(name) <= 16:
        version = int(name)
    else:
        raise Refusal("bad-request", f"version {name[:40]!r} is not a number, latest or promoted")
    found = service.desk.shelf.get(version)
    if found is None and version == service.fold.version:
        found = service.desk.shelf.put(*await service.newest())
    if found is None and service.kept.path(version).exists():
        loop = asyncio.get_running_loop()
        found = service.desk.shelf.put(
            version, await loop.run_in_executor(service.measurer, service.kept.read, version)
        )
    if found is None or found.version != version:
        raise Refusal("no-model")
    return found


async def pieces_of(service: Service, found: Shelved, form: str, packed: bool) -> list[bytes | memoryview]:
    """The file in this form; what had to be computed for it is remembered with the model."""
    if form == "full" and not packed:
        return [service.wire.heads["full"], raw(found.vector)]
    key = f"{form} {packed}"
    if key not in found.made:
        made = asyncio.get_running_loop().run_in_executor(
            service.helpers, _made, service, found, form, packed
        )
        found.made[key] = asyncio.ensure_future(made)  # others who ask meanwhile wait for the same
    try:
        pieces: list[bytes | memoryview] = await asyncio.shield(found.made[key])
        return pieces
    except BaseException:
        found.made.pop(key, None)
        raise


def _made(service: Service, found: Shelved, form: str, packed: bool) -> list[bytes | memoryview]:
    vector = found.vector if form == "full" else found.vector.to(torch.bfloat16)
    head = service.wire.heads["full"] if form == "full" else service.wire.head("bf16", {"content": "model"})
    if not packed:
        return [head, raw(vector)]
    import zstandard

    size = len(head) + vector.nbytes
    press = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    return [b"".join((press.compress(head), press.compress(raw(vector)), press.flush()))]


def _correction(call: Call) -> Response:
    """The vector that is added to every local gradient: the parameters, named as in the model."""
    found = call.task()
    if found.correction is None:
        raise Refusal("no-correction")
    return Pieces([parameters_head(call.service.wire.layout), raw(found.correction.contiguous())], {}, found)


def parameters_head(layout: Layout) -> bytes:
    head: dict[str, Any] = {"__metadata__": {"content": "correction"}}
    for name, shape, offset in zip(layout.names, layout.shapes, layout.offsets, strict=True):
        if offset + shape.numel() <= layout.parameters:
            width = layout.dtype.itemsize
            place = [offset * width, (offset + shape.numel()) * width]
            head[name] = {
                "dtype": "F32" if width == 4 else "F64",
                "shape": list(shape),
                "data_offsets": place,
            }
    return framed(head)
