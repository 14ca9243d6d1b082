"""Every way to say no: its status, what it means, and what the client should do next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from afield.core.server import REFUSALS

# what to do next: "correct" the request and send it again, ask for a "new-task", "wait" and send the same again, or
# "stop" and ask the operator
MEANING: dict[str, tuple[int, str, str]] = {
    "no-token": (401, "stop", "no token: send Authorization: Bearer TOKEN"),
    "bad-token": (401, "stop", "this token is not valid (any more): ask the operator for a new one"),
    "not-yours": (403, "stop", "this client is not one that your token speaks for"),
    "not-operator": (403, "stop", "only an operator's token may do this"),
    "bad-request": (400, "correct", "the request has a part that cannot be read"),
    "not-found": (404, "correct", "there is nothing under this path: GET /openapi.json lists what there is"),
    "no-method": (405, "correct", "this path does not know that method: GET /openapi.json lists them"),
    "unknown-client": (404, "stop", REFUSALS["unknown-client"]),
    "no-model": (404, "correct", "this version is not held: take latest, or that of an open task"),
    "no-correction": (404, "correct", "this task has no correction: train without"),
    "never-leased": (404, "new-task", REFUSALS["never-leased"]),
    "closed": (410, "new-task", REFUSALS["closed"]),
    "expired": (
        410,
        "new-task",
        "the lease ran out before the update came: ask for a new task, send heartbeats",
    ),
    "given-back": (410, "new-task", "the task was given back"),
    "round-over": (410, "new-task", "the round closed without this update"),
    "too-stale": (410, "new-task", REFUSALS["too-stale"]),
    "too-slow": (408, "wait", "the body came too slowly"),
    "too-long": (413, "correct", "the body is longer than any update of this model"),
    "no-media": (415, "correct", "send application/vnd.safetensors or application/octet-stream"),
    "malformed": (422, "correct", "the body is not a safetensors file"),
    "wrong-tensors": (422, "correct", "the body does not hold the tensors of this model"),
    "wrong-length": (422, "correct", REFUSALS["wrong-length"]),
    "wrong-type": (422, "correct", REFUSALS["wrong-type"]),
    "not-finite": (422, "new-task", REFUSALS["not-finite"]),
    "too-large": (422, "new-task", "the update is further from its base than the server's bound"),
    "no-examples": (422, "correct", REFUSALS["no-examples"]),
    "no-steps": (422, "correct", REFUSALS["no-steps"]),
    "too-often": (429, "wait", "more requests than this client's limit"),
    "busy": (429, "wait", "the server has no room for this now"),
    "draining": (503, "wait", "the server is about to restart"),
    "storage": (503, "wait", "the server cannot write to its disk"),
    "failed": (500, "wait", "an error of the server's: it is in its log"),
}


@dataclass(eq=False)
class Refusal(Exception):  # noqa: N818 (a reply, not a fault)
    """A request that is answered by no."""

    reason: str
    detail: str = ""
    after: float | None = None  # seconds; for "wait"

    @property
    def status(self) -> int:
        return MEANING[self.reason][0]

    def table(self) -> dict[str, Any]:
        _, following, meaning = MEANING[self.reason]
        return {"error": self.reason, "message": self.detail or meaning, "next": following}

    def headers(self) -> dict[str, str]:
        status = self.status
        if status == 401:
            return {"WWW-Authenticate": 'Bearer realm="afield"'}
        if status in (429, 503, 408):
            return {"Retry-After": str(max(1, round(self.after if self.after is not None else 1.0)))}
        return {}
