"""For who looks on: what happened lately, and what happens, as it happens (server-sent events)."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from afield.runtimes.service.entrance import whole
from afield.runtimes.service.events import KEPT, Row

if TYPE_CHECKING:
    from afield.runtimes.service.entrance import Call

Seen = Callable[[Row], bool]  # by who asks
SILENCE = 15.0  # seconds after which a comment says that the connection lives


class Told(Protocol):
    """Rows with rising numbers: of a live service (events.py), or of a run folder (recorded.py)."""

    @property
    def last(self) -> int: ...
    def after(self, number: int, most: int = ..., first: bool = ...) -> list[Row]: ...
    async def news(self, after: int, seconds: float) -> list[Row]: ...


async def history(call: Call) -> Response:
    """Rows after a number, oldest first; at most `limit`, the newest."""
    return listing(call.service.history, call.request, _seen_by(call))


async def events(call: Call) -> Response:
    """A stream of rows: `id` its number, `event` its kind, `data` its values. Goes on after Last-Event-ID."""
    return stream(call.service.history, call.request, lambda: not call.service.desk.draining, _seen_by(call))


def _seen_by(call: Call) -> Seen:
    """A client's tasks and receipts are its own business, and the operator's."""
    may = call.holder.may
    return lambda row: "client" not in row.values or may(row.values["client"])


async def shares(call: Call) -> Response:
    """Each client's share of the global model: the largest, and the rest."""
    return JSONResponse(call.service.shares.told())


def listing(told: Told, request: Request, seen: Seen | None = None) -> Response:
    """A page of rows; with `first` = 1 those that come first, so that who asks again and again sees them all."""
    after, limit = _query(request, "after") or 0, _query(request, "limit", 1, KEPT) or 1000
    first = bool(_query(request, "first", 0, 1))
    if seen is None:
        rows = told.after(after, limit, first)
    else:
        mine = [row for row in told.after(after, 2 * KEPT) if seen(row)]
        rows = mine[:limit] if first else mine[-limit:]
    return JSONResponse({"rows": [_table(row) for row in rows], "last": told.last})


def stream(
    told: Told, request: Request, going: Callable[[], bool], seen: Seen = lambda row: True
) -> Response:
    """The rows as they come, for as long as it is `going`."""
    last = request.headers.get("last-event-id", "")
    given = int(last) if last.isascii() and last.isdigit() and len(last) <= 16 else None
    after = _query(request, "after") if given is None else given
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        _stream(told, after, going, seen), media_type="text/event-stream", headers=headers
    )


async def _stream(
    told: Told, after: int | None, going: Callable[[], bool], seen: Seen
) -> AsyncIterator[bytes]:
    at = told.last if after is None else after
    yield b": afield\n\n"
    while going():
        rows = await told.news(at, SILENCE)
        if not rows:
            yield b": still here\n\n"
            continue
        at = rows[-1].number
        if shown := b"".join(_event(row) for row in rows if seen(row)):
            yield shown


def _query(request: Request, name: str, low: int = 0, high: int = 2**53) -> int | None:
    text = request.query_params.get(name)
    return None if text is None else whole(name, text, low, high)


def _event(row: Row) -> bytes:
    return f"id: {row.number}\nevent: {row.kind}\ndata: {json.dumps(clean(row.values))}\n\n".encode()


def _table(row: Row) -> dict[str, Any]:
    return {"id": row.number, "kind": row.kind, "values": clean(row.values)}


def clean(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON can hold it: numbers that are not finite are null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
