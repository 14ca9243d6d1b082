"""The files of the page: open to all, since they hold nothing; what they show wants a token."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FIRST = "index.html"
KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing but what this server itself sends is run, read, shown or asked for; nobody may put the page into a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for each time, sent once: see the ETag
}


def pages() -> list[Route]:
    """A route per file; the first of them is at / too."""
    folder = resources.files(__package__) / "page"
    routes = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        kind = KINDS.get(file.name.rpartition(".")[2])
        if kind is None:
            continue
        path = "/" if file.name == FIRST else f"/page/{file.name}"
        routes.append(Route(path, _sender(file.read_bytes(), kind), methods=["GET"]))
    return routes


def _sender(body: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{hashlib.blake2s(body, digest_size=8).hexdigest()}"'
    headers = {**HEADERS, "ETag": tag}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=kind, headers=headers)

    return send
