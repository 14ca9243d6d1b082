"""The routes. Every one under /v1 wants a token; what is refused is refused by name (refusals.py)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from afield.core.errors import InputError
from afield.core.types import Task
from afield.runtimes.service.downloads import model_of
from afield.runtimes.service.entrance import Call, Endpoint, guarded, refused
from afield.runtimes.service.events import values_of
from afield.runtimes.service.metrics import CONTENT_TYPE_LATEST
from afield.runtimes.service.openapi import description
from afield.runtimes.service.refusals import Refusal
from afield.runtimes.service.service import Service
from afield.runtimes.service.static import pages
from afield.runtimes.service.straight import Straight
from afield.runtimes.service.tasks import Open
from afield.runtimes.service.uploads import update_of
from afield.runtimes.service.watch import events, history, shares

WAIT = 25.0  # seconds that who asks for a task waits where it does not say


# -- the work of clients --------------------------------------------------------------------------------------


def told(service: Service, found: Open) -> dict[str, Any]:
    """A task as its client sees it."""
    left = max(0.0, found.deadline - service.fold.loop.time())
    return {
        **values_of(found.task),
        "lease": found.lease,
        "seconds": round(left, 3),
        "corrected": found.correction is not None,
        "held": bool(getattr(service.parts.door.server.strategy, "client_held", False)),
        "counted": service.parts.door.accepted.get(found.task.client, 0),
    }


async def checkout(call: Call) -> Response:
    service = call.service
    desk, client = service.desk, call.client()
    patience = call.number("wait", 0.0, 3600.0)
    patience = min(WAIT if patience is None else patience, service.terms.wait)
    found = desk.current(client)
    if found is None:
        if desk.draining:
            raise Refusal("draining", after=3.0)
        found = await _turn(call, client, patience)
        if found is None:
            if desk.draining:
                raise Refusal("draining", after=3.0)
            return Response(status_code=204, headers={"Retry-After": "0"})
        service.metrics.tasks.inc()
        service.audit.note(
            "task", who=call.holder.id, client=client, number=found.task.number, version=found.task.version
        )
    desk.touch(found)
    return JSONResponse(told(service, found))


async def _turn(call: Call, client: int, patience: float) -> Open | None:
    """Wait for a task, as long as the client is there and patient."""
    desk = call.service.desk
    place = desk.ask(client)
    try:
        if not place.done():
            await _first(call.request, place, patience)
        return place.result() if place.done() else None
    finally:
        desk.leave(client, place)


async def _first(request: Request, place: asyncio.Future[Any], patience: float) -> None:
    """Until there is an answer, the time is up, or the sender has gone."""
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((place, gone), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def submit(call: Call) -> Response:
    service, started = call.service, time.monotonic()
    if (first := call.receipt()) is not None:
        return JSONResponse({**values_of(first), "repeated": True})
    found = call.task()
    found.busy += 1
    try:
        receipt = await update_of(service, call, found)
    finally:
        found.busy -= 1
        service.desk.touch(found)
    if receipt.refused:
        if (first := call.receipt()) is not None:  # its twin was faster
            return JSONResponse({**values_of(first), "repeated": True})
        _noted(service, call, found.task, receipt.refused, started)
        if receipt.refused == "too-stale":
            await service.desk.take_back(found, "too-stale")
        raise Refusal(service.desk.endings.get(receipt.number, receipt.refused))
    _noted(service, call, found.task, "", started)
    return JSONResponse({**values_of(receipt), "repeated": False})


def _noted(service: Service, call: Call, task: Task, refused: str, started: float) -> None:
    took = round(time.monotonic() - started, 6)
    service.audit.note(
        "update", who=call.holder.id, client=task.client, number=task.number, refused=refused, seconds=took
    )


async def heartbeat(call: Call) -> Response:
    """A sign of life that waits: it is answered at once when the task has ended, so that training can stop."""
    service, found = call.service, call.task()
    patience = min(call.number("wait", 0.0, 3600.0) or 0.0, service.terms.wait)
    service.desk.touch(found)
    if patience:
        found.busy += 1
        ended = asyncio.ensure_future(found.ended.wait())
        try:
            await _first(call.request, ended, patience)
        finally:
            ended.cancel()
            found.busy -= 1
            service.desk.touch(found)
    return JSONResponse(told(service, call.task()))


async def give_back(call: Call) -> Response:
    service, found = call.service, call.task()
    await service.desk.take_back(found, "given-back")
    service.audit.note("give-back", who=call.holder.id, client=found.task.client, number=found.task.number)
    return Response(status_code=204)


async def receipt_of(call: Call) -> Response:
    if (first := call.receipt()) is None:
        call.task()
        return Response(status_code=204, headers={"Retry-After": "1"})  # open still
    return JSONResponse({**values_of(first), "repeated": True})


async def tasks(call: Call) -> Response:
    """The open tasks of the sender's clients."""
    service = call.service
    mine = [found for found in service.desk.open.values() if call.holder.may(found.task.client)]
    return JSONResponse({"tasks": [told(service, found) for found in mine[:1000]], "all": len(mine)})


# -- what there is to know ------------------------------------------------------------------------------------


async def about(call: Call) -> Response:
    service = call.service
    layout, server = service.wire.layout, service.parts.door.server
    model = {
        "elements": layout.size,
        "parameters": layout.parameters,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "tensors": [{"name": n, "shape": list(s)} for n, s in zip(layout.names, layout.shapes, strict=True)],
        "limit": service.wire.limit,
    }
    terms = {"lease": service.terms.lease, "wait": service.terms.wait, "rate": service.terms.rate}
    return JSONResponse(
        {
            "name": service.name,
            "run": service.tag,
            "clients": server.clients,
            "yours": call.holder.clients if call.holder.clients is None else list(call.holder.clients),
            "version": service.fold.version,
            "model": model,
            "terms": terms,
            "config": service.parts.table,
        }
    )


async def status(call: Call) -> Response:
    return JSONResponse(call.service.status())


async def promote(call: Call) -> Response:
    service = call.service
    wanted = call.whole("version")
    kept = service.kept
    version, vector = (None, None)
    if wanted is None or wanted == service.fold.version:
        version, vector = await service.newest()
    elif (found := service.desk.shelf.get(wanted)) is not None:
        version, vector = found.version, found.vector
    loop = asyncio.get_running_loop()
    if vector is not None and version is not None:
        await loop.run_in_executor(service.measurer, kept.keep, version, vector)
    else:
        version = wanted
    assert version is not None
    try:
        await loop.run_in_executor(service.measurer, kept.promote, version)
    except InputError as error:
        if isinstance(error.__cause__, OSError):
            raise  # the disk is full, say
        raise Refusal("no-model", str(error)) from None
    service.audit.note("promote", who=call.holder.id, version=version)
    return JSONResponse({"promoted": kept.promoted, "history": kept.history})


async def roll_back(call: Call) -> Response:
    service = call.service
    try:
        await asyncio.get_running_loop().run_in_executor(service.measurer, service.kept.roll_back)
    except InputError as error:
        if isinstance(error.__cause__, OSError):
            raise
        raise Refusal("no-model", str(error)) from None
    service.audit.note("rollback", who=call.holder.id, version=service.kept.promoted)
    return JSONResponse({"promoted": service.kept.promoted, "history": service.kept.history})


async def metrics(call: Call) -> Response:
    return Response(call.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


# -- all of it -----------------------------------------------------------------------------------------------


def app_of(service: Service) -> ASGIApp:
    """The ASGI application; `service` is started and stopped by who serves it (serve.py)."""

    async def healthy(request: Request) -> Response:
        return JSONResponse({"healthy": True})

    async def ready(request: Request) -> Response:
        if service.desk.draining or service.fold.broken:
            return refused(Refusal("draining" if service.desk.draining else "storage"))
        return JSONResponse({"ready": True})

    text = json.dumps(description(service.wire.limit)).encode()

    async def openapi(request: Request) -> Response:
        return Response(text, media_type="application/json")

    def route(path: str, method: str, endpoint: Endpoint, operator: bool = False) -> Route:
        return Route(path, guarded(service, endpoint, operator), methods=[method])

    def wrong(request: Request, error: Exception) -> Response:
        code = error.status_code if isinstance(error, HTTPException) else 500
        reason = {404: "not-found", 405: "no-method"}.get(code, "bad-request" if code < 500 else "failed")
        reply = refused(Refusal(reason))
        if isinstance(error, HTTPException) and error.headers:
            reply.headers.update(error.headers)
        return reply

    routes = [
        route("/metrics", "GET", metrics),
        route("/v1/run", "GET", about),
        route("/v1/tasks", "POST", checkout),
        route("/v1/tasks", "GET", tasks),
        route("/v1/tasks/{number}", "DELETE", give_back),
        route("/v1/tasks/{number}/heartbeat", "POST", heartbeat),
        route("/v1/tasks/{number}/update", "PUT", submit),
        route("/v1/tasks/{number}/receipt", "GET", receipt_of),
        route("/v1/tasks/{number}/correction", "GET", model_of),
        route("/v1/models/{version}", "GET", model_of),
        route("/v1/status", "GET", status),
        route("/v1/history", "GET", history),
        route("/v1/events", "GET", events),
        route("/v1/shares", "GET", shares),
        route("/v1/promote", "POST", promote, operator=True),
        route("/v1/rollback", "POST", roll_back, operator=True),
    ]
    rest = Starlette(
        routes=[
            *pages(),
            Route("/healthz", healthy, methods=["GET"]),
            Route("/readyz", ready, methods=["GET"]),
            Route("/openapi.json", openapi, methods=["GET"]),
            *routes,  # for who uses a wrong method
        ],
        exception_handlers={HTTPException: wrong, Exception: wrong},
        lifespan=_life(service),
    )
    return Straight(routes, rest)


def _life(service: Service) -> Callable[[Starlette], Any]:
    @asynccontextmanager
    async def life(app: Starlette) -> Any:
        service.start()
        yield
        await service.stop()

    return life
