"""From a body to the fold: read, checked, made private, queued."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from afield.core.flat import finite
from afield.core.types import LocalResult, Receipt
from afield.runtimes.service.bodies import body_of, length_of
from afield.runtimes.service.refusals import Refusal
from afield.runtimes.service.tasks import Open
from afield.runtimes.service.wire import TYPE, BodyError

if TYPE_CHECKING:
    from afield.runtimes.service.entrance import Call
    from afield.runtimes.service.service import Service

QUICK = (
    2 * 2**20
)  # bytes: below, a body is looked at on the event loop (0.2 ms), above on a thread of its own
MEDIA = (TYPE, "application/octet-stream")
METRICS = 16  # numbers that a client may tell beside its update


async def update_of(service: Service, call: Call, found: Open) -> Receipt:
    """Take the update of an open task; a body that is no update is refused here."""
    request = call.request
    told = _told(call)
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media not in MEDIA:
        raise Refusal("no-media", f"content-type {media[:80]!r}: send {' or '.join(MEDIA)}")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "zstd"):
        raise Refusal("no-media", f"content-encoding {encoding[:80]!r}: send zstd or none")
    limit = service.wire.limit
    length = length_of(request, limit)
    # what is packed is twice there: as it came, and as it is
    async with service.room.taken(length + limit if encoding == "zstd" else length):
        body = await body_of(request, limit)
        service.metrics.received.inc(len(body))
        if len(body) <= QUICK and encoding == "identity" and service.private is None:
            model, good = _read(service, found, body, encoding)
        else:
            loop = asyncio.get_running_loop()
            model, good = await loop.run_in_executor(service.helpers, _read, service, found, body, encoding)
        result = LocalResult(model, told["examples"], told["steps"], told["rate"], told["metrics"], good)
        receipt = await service.desk.submit(result.answer(found.task, service.now()))
    if not receipt.refused:
        service.totals.learned(result.steps, result.metrics.get("loss"))
    return receipt


def _read(service: Service, found: Open, body: bytearray, encoding: str) -> tuple[Tensor, bool | None]:
    """The model that is to be folded, and whether it is finite; None where the fold has more time to look."""
    if encoding == "zstd":
        body = unpacked(body, service.wire.limit)
    base = found.model.vector
    try:
        model = service.wire.read(body).model(base)
    except BodyError as error:
        raise Refusal(error.reason, str(error)) from None
    bound = service.terms.norm
    if len(body) <= QUICK and bound is None and service.private is None:
        return model, None
    if not finite(model):
        return model, False
    if bound is not None and (norm := float(torch.dist(model, base))) > bound:
        raise Refusal("too-large", f"the update is {norm:.4g} from its base, at most {bound:g} is taken")
    if service.private is not None:
        model = service.private.applied(found.task, base, model)
    return model, True


def unpacked(body: bytearray, limit: int) -> bytearray:
    """A zstd body; one that would grow beyond the limit is refused before it does."""
    import zstandard

    try:
        size = zstandard.get_frame_parameters(bytes(body[:64])).content_size
        if not 0 < size <= limit:
            raise Refusal(
                "too-long", f"unpacked, the body has {size} bytes or does not say; at most {limit} are taken"
            )
        whole = bytearray(size)
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(bytes(body)) as reader:
            view, at = memoryview(whole), 0
            while at < size and (got := reader.readinto(view[at:])):
                at += got
            if at != size:
                raise Refusal("malformed", f"the body holds {at} of the {size} bytes that it speaks of")
    except zstandard.ZstdError:
        raise Refusal("malformed", "the body is not zstd") from None
    return whole


def _told(call: Call) -> dict[str, Any]:
    """What comes with the tensors, in the query."""
    examples, steps = call.whole("examples", 1), call.whole("steps", 1)
    if examples is None:
        raise Refusal("no-examples", "say by ?examples=NUMBER how many examples the update comes from")
    rate = call.number("rate", 0.0, math.inf)
    return {
        "examples": examples,
        "steps": 1 if steps is None else steps,
        "rate": 1.0 if rate is None else rate,
        "metrics": _metrics(call.request.query_params.get("metrics")),
    }


def _metrics(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
        whole = isinstance(found, dict) and len(found) <= METRICS
        if whole and all(type(value) in (int, float) and abs(value) < 1e300 for value in found.values()):
            return {str(name)[:40]: float(value) for name, value in found.items()}
    except (ValueError, RecursionError, OverflowError):
        pass
    raise Refusal(
        "bad-request", f'metrics is not a JSON object of at most {METRICS} numbers, such as {{"loss": 0.5}}'
    )
