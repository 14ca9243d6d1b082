"""From a path to its endpoint by one look into a table. What is not in it goes to starlette, as do mistakes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from afield.runtimes.service.entrance import refused
from afield.runtimes.service.refusals import Refusal

log = logging.getLogger(__name__)
Answer = Callable[[Request], Awaitable[Response]]


class Straight:
    """An ASGI application before another, with its own routes: /v1/noun, /v1/noun/{name}, /v1/noun/{name}/word.

    Starlette tries one route after the other, within three layers that look after errors.
    """

    def __init__(self, routes: Iterable[Route], rest: ASGIApp) -> None:
        self.rest = rest
        self.table: dict[tuple[str, ...], tuple[Answer, str]] = {}
        for route in routes:
            parts, name = shape(route.path)
            for method in route.methods or ():
                self.table[(method, *parts)] = (route.endpoint, name.strip("{}"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.rest(scope, receive, send)
        parts, value = shape(scope["path"])
        found = self.table.get((scope["method"], *parts))
        if found is None or (len(parts) > 3 and not value):
            return await self.rest(scope, receive, send)
        answer, name = found
        scope["path_params"] = {name: value}
        try:
            reply = await answer(Request(scope, receive, send))
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            reply = refused(Refusal("failed"))
        return await reply(scope, receive, send)


def shape(path: str) -> tuple[list[str], str]:
    """The parts of a path, and what stands in the place of its name."""
    parts, value = path.split("/"), ""
    if len(parts) > 3:
        value, parts[3] = parts[3], "{}"
    return parts, value
