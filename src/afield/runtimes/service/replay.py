"""The same page over a run folder: a finished run is played, a running one followed. For this machine alone."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from afield.runtimes.service.entrance import refused
from afield.runtimes.service.recorded import Recorded
from afield.runtimes.service.refusals import Refusal
from afield.runtimes.service.serve import Listen, Serving, Started, bound, config_of, until_ended
from afield.runtimes.service.static import pages
from afield.runtimes.service.watch import clean, listing, stream


def app_of(recorded: Recorded, token: str, going: Callable[[], bool]) -> Starlette:
    """The routes that the page asks for; each wants the token, since others may use this machine too."""

    def route(path: str, answer: Callable[[Request], Response]) -> Route:
        async def guarded(request: Request) -> Response:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            try:
                if not given or kind.lower() != "bearer":
                    raise Refusal("no-token")
                if not hmac.compare_digest(given.strip().encode(), token.encode()):
                    raise Refusal(
                        "bad-token", "this token is not the one that afield watch told at its start"
                    )
                return answer(request)
            except Refusal as refusal:
                return refused(refusal)

        return Route(path, guarded, methods=["GET"])

    return Starlette(
        routes=[
            *pages(),
            route("/v1/status", lambda request: JSONResponse(clean(recorded.status()))),
            route("/v1/shares", lambda request: JSONResponse(recorded.shares.told())),
            route("/v1/history", lambda request: listing(recorded, request)),
            route("/v1/events", lambda request: stream(recorded, request, going)),
        ]
    )


def watch(folder: Path, port: int, started: Started = lambda url, end: None) -> None:
    """Serve the page of a run folder on loopback until Ctrl-C; `started` is told its address, token and all."""
    recorded, token = Recorded(folder), secrets.token_urlsafe(24)
    listen = Listen(port=port)
    listening = bound(listen)

    async def main() -> None:
        server: Serving
        app = app_of(recorded, token, lambda: not server.should_exit)
        server = Serving(config_of(app, drain=1, lifespan="off"))
        url = f"http://{listen.host}:{listening.getsockname()[1]}/#token={token}"
        await until_ended(server, listening, url, started)

    asyncio.run(main())
