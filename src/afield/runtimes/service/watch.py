"""For who looks on: what happened lately, and what happens, as it happens (server-sent events)."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from afield.runtimes.service.events import KEPT, Row

if TYPE_CHECKING:
    from afield.runtimes.service.entrance import Call

SILENCE = 15.0  # seconds after which a comment says that the connection lives


async def history(call: Call) -> Response:
    """Rows after a number, oldest first; at most `limit`, the newest."""
    after, limit = call.whole("after") or 0, call.whole("limit", 1, KEPT) or 1000
    rows = call.service.history.after(after, limit)
    return JSONResponse({"rows": [_table(row) for row in rows], "last": call.service.history.last})


async def events(call: Call) -> Response:
    """A stream of rows: `id` its number, `event` its kind, `data` its values. Goes on after Last-Event-ID."""
    last = call.request.headers.get("last-event-id", "")
    given = int(last) if last.isascii() and last.isdigit() and len(last) <= 16 else None
    after = call.whole("after") if given is None else given
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_stream(call, after), media_type="text/event-stream", headers=headers)


async def _stream(call: Call, after: int | None) -> AsyncIterator[bytes]:
    service = call.service
    at = service.history.last if after is None else after
    yield b": afield\n\n"
    while not service.desk.draining:
        rows = await service.history.news(at, SILENCE)
        if not rows:
            yield b": still here\n\n"
            continue
        at = rows[-1].number
        yield b"".join(_event(row) for row in rows)


def _event(row: Row) -> bytes:
    return f"id: {row.number}\nevent: {row.kind}\ndata: {json.dumps(clean(row.values))}\n\n".encode()


def _table(row: Row) -> dict[str, Any]:
    return {"id": row.number, "kind": row.kind, "values": clean(row.values)}


def clean(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON can hold it: numbers that are not finite are null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
