"""Who comes in: the sender of a request is known before anything else is read; what is refused is refused by name."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from afield.core.errors import InputError
from afield.core.types import Receipt
from afield.runtimes.service.bodies import GRACE, SLOWEST
from afield.runtimes.service.fold import BrokenError, FullError
from afield.runtimes.service.refusals import Refusal
from afield.runtimes.service.service import Service
from afield.runtimes.service.tasks import Open
from afield.runtimes.service.trust import Holder

log = logging.getLogger(__name__)
LARGEST = 2**53  # of numbers in JSON and in paths


class Call:
    """A request whose sender is known."""

    def __init__(self, service: Service, request: Request, holder: Holder) -> None:
        self.service, self.request, self.holder = service, request, holder

    def whole(self, name: str, low: int = 0, high: int = LARGEST) -> int | None:
        """A whole number of the query."""
        text = self.request.query_params.get(name)
        return None if text is None else whole(name, text, low, high)

    def number(self, name: str, low: float, high: float) -> float | None:
        text = self.request.query_params.get(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise Refusal("bad-request", f"{name} = {text[:40]!r} is not a number in [{low:g}, {high:g}]")
        return value

    def client(self) -> int:
        """The client that is spoken for: the token's own, or the one named in the query."""
        client = self.whole("client")
        if client is None:
            client = self.holder.only
        if client is None:
            raise Refusal("bad-request", "your token speaks for several clients: say which by ?client=NUMBER")
        return self.mine(client)

    def mine(self, client: int) -> int:
        if not self.holder.may(client):
            raise Refusal("not-yours", f"client {client} is not one that your token speaks for")
        clients = self.service.parts.door.server.clients
        if client >= clients:
            raise Refusal("unknown-client", f"client {client} is unknown: clients are 0 .. {clients - 1}")
        return client

    def path(self, name: str = "number") -> int:
        return whole(name, self.request.path_params[name], 0, LARGEST)

    def task(self) -> Open:
        """The open task of the path, if it is one of the sender's; else why it is not open."""
        desk, number = self.service.desk, self.path()
        found = desk.open.get(number)
        lease = self.request.query_params.get("lease")
        if found is not None:
            self.mine(found.task.client)
            if lease != found.lease:
                raise Refusal("never-leased", f"lease = {str(lease)[:40]!r} is not that of task {number}")
            return found
        if number in desk.endings:
            raise Refusal(desk.endings[number])
        raise Refusal("closed" if number < desk.issued else "never-leased")

    def receipt(self) -> Receipt | None:
        """What the task of the path was answered with before."""
        found = self.service.desk.receipts.get(self.path())
        if found is not None:
            self.mine(found.client)
        return found


def whole(name: str, text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 16 or not low <= int(text) <= high:
        raise Refusal("bad-request", f"{name} = {text[:40]!r} is not a whole number from {low} to {high}")
    return int(text)


Endpoint = Callable[[Call], Awaitable[Response]]


def holder_of(service: Service, request: Request) -> Holder:
    """Who sends this; a stranger is refused, and an address that sends many wrong tokens has to wait."""
    address = request.client.host if request.client is not None else ""
    given = request.headers.get("authorization", "")
    certificate = request.scope.get("state", {}).get("certificate")
    if given:
        kind, _, token = given.partition(" ")
        found = service.book.token(token.strip()) if kind.lower() == "bearer" else None
    else:
        found = service.book.certificate(certificate) if certificate is not None else None
    if found is None:
        # only now: who has a token is not kept out by strangers behind the same proxy
        if (pause := service.strangers.empty(address)) > 0:
            raise Refusal("too-often", "too many wrong tokens came from this address", after=pause)
        service.strangers.wait(address)
        service.audit.note("stranger", address=address, path=request.url.path[:200])
        raise Refusal("bad-token" if given or certificate is not None else "no-token")
    clients = service.parts.door.server.clients if found.clients is None else max(1, len(found.clients))
    if pause := service.rates.wait(found.id, 1.0 / clients):  # who speaks for many has the limit of as many
        raise Refusal("too-often", after=pause)
    return found


def guarded(
    service: Service, endpoint: Endpoint, operator: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    route = endpoint.__name__

    async def answer(request: Request) -> Response:
        began = time.perf_counter()
        if (connection := request.scope["state"].get("connection")) is not None:
            connection.leftover = GRACE + service.wire.limit / SLOWEST  # as long as a body of ours may take
        reply = await safely(service, request, lambda: _admitted(service, request, endpoint, operator))
        service.metrics.requests.labels(route, reply.status_code).observe(time.perf_counter() - began)
        return reply

    return answer


async def _admitted(service: Service, request: Request, endpoint: Endpoint, operator: bool) -> Response:
    holder = holder_of(service, request)
    if operator and not holder.operator:
        raise Refusal("not-operator")
    return await endpoint(Call(service, request, holder))


async def safely(service: Service, request: Request, work: Callable[[], Awaitable[Response]]) -> Response:
    """The reply, or the refusal that a failure means."""
    try:
        return await work()
    except Refusal as error:
        refusal = error
    except FullError:
        refusal = Refusal("busy", after=2.0)
    except BrokenError as error:
        refusal = Refusal("storage", str(error), after=5.0)
    except InputError as error:  # the disk is full, say
        log.error("%s %s: %s", request.method, request.url.path, error)
        refusal = Refusal("storage", after=5.0)
    except ConnectionAbortedError:
        return Response(status_code=400)  # nobody will read it
    service.totals.refuse(refusal.reason)
    service.metrics.refusals.labels(refusal.reason).inc()
    if refusal.reason in ("not-yours", "not-operator"):
        service.audit.note("refused", reason=refusal.reason, path=request.url.path[:200])
    return refused(refusal)


def refused(refusal: Refusal) -> Response:
    return JSONResponse(refusal.table(), refusal.status, refusal.headers())
