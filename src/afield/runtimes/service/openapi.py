"""The description at /openapi.json: all that a client in another language needs, beside safetensors."""

from __future__ import annotations

from typing import Any

from afield.runtimes.service.refusals import MEANING
from afield.runtimes.service.wire import TYPE

JSON = "application/json"
LARGEST = 2**53
NUMBER = {"type": "integer", "minimum": 0, "maximum": LARGEST}
UPDATE = (
    "Send the update. May be sent any number of times: it counts once, each reply is the first receipt. The body is "
    "a safetensors file with every tensor of the model, in its type (metadata content = model or delta), or the "
    "difference to the base as BF16, or as I8 with afield.scales."
)
SECONDS = {"type": "number", "minimum": 0, "maximum": 3600}


def description(limit: int) -> dict[str, Any]:
    number = parameter("number", "path", NUMBER, "The task's number.", True)
    lease = parameter("lease", "query", {"type": "string"}, "As the task told it.", True)
    client = parameter("client", "query", NUMBER, "Which client; needed where the token speaks for several.")
    wait = parameter("wait", "query", SECONDS, "How long to wait for an answer, in seconds.")
    task, receipt = reply("The task.", "Task"), reply("What was done with the update.", "Receipt")
    file = {
        "description": "A safetensors file.",
        "content": {TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
    free, nothing = reply("What there is.", "Anything"), {"description": "Nothing (now)."}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "afield",
            "version": "1",
            "description": "Ask for a task, download the model of its version, train, send the trained model. "
            "Every refusal names its reason (`error`) and what to do `next`.",
        },
        "security": [{"token": []}],
        "paths": {
            "/healthz": {"get": open_to_all("Whether the process lives.", {"200": free})},
            "/readyz": {
                "get": open_to_all(
                    "Whether it takes requests.", {"200": free, "503": reply("Not now.", "Refusal")}
                )
            },
            "/openapi.json": {"get": open_to_all("This description.", {"200": free})},
            "/metrics": {"get": operation("For Prometheus.", {"200": {"description": "Its text format."}})},
            "/v1/run": {"get": operation("The experiment: model, config, terms.", {"200": free})},
            "/v1/tasks": {
                "get": operation("Your open tasks.", {"200": free}),
                "post": operation(
                    "Ask for a task. Who has one already is given the same again; 204 says: none yet, ask again.",
                    {"200": task, "204": nothing, **refusals(400, 404, 503)},
                    client,
                    wait,
                ),
            },
            "/v1/tasks/{number}": {
                "delete": operation(
                    "Give a task back.", {"204": nothing, **refusals(400, 404, 410)}, number, lease
                )
            },
            "/v1/tasks/{number}/heartbeat": {
                "post": operation(
                    "Renew the lease. With `wait` the answer comes when that is over, or when the task has ended.",
                    {"200": task, **refusals(400, 404, 410)},
                    number,
                    lease,
                    wait,
                )
            },
            "/v1/tasks/{number}/update": {
                "put": {
                    **operation(
                        UPDATE,
                        {"200": receipt, **refusals(400, 404, 408, 410, 413, 415, 422, 503)},
                        number,
                        lease,
                        parameter(
                            "examples",
                            "query",
                            {**NUMBER, "minimum": 1},
                            "How many examples it comes from.",
                            True,
                        ),
                        parameter("steps", "query", {**NUMBER, "minimum": 1}, "Local steps (1)."),
                        parameter(
                            "rate",
                            "query",
                            {"type": "number", "exclusiveMinimum": 0},
                            "Local learning rate (1).",
                        ),
                        parameter(
                            "metrics",
                            "query",
                            {"type": "string"},
                            'JSON object of numbers, such as {"loss": 0.5}.',
                        ),
                    ),
                    "requestBody": {
                        "required": True,
                        "description": f"At most {limit} bytes; may be packed (Content-Encoding: zstd).",
                        "content": {
                            kind: {"schema": {"type": "string", "format": "binary"}}
                            for kind in (TYPE, "application/octet-stream")
                        },
                    },
                }
            },
            "/v1/tasks/{number}/receipt": {
                "get": operation(
                    "The receipt; 204 while the task is open.",
                    {"200": receipt, "204": nothing, **refusals(400, 404, 410)},
                    number,
                    lease,
                )
            },
            "/v1/tasks/{number}/correction": {
                "get": operation(
                    "What to add to every gradient, where the task is `corrected`.",
                    {"200": file, **refusals(400, 404, 410)},
                    number,
                    lease,
                )
            },
            "/v1/models/{version}": {
                "get": operation(
                    "A model: of an open task's version, latest, promoted, or a version that is kept. A version "
                    "never changes: keep it by its ETag.",
                    {"200": file, "304": nothing, **refusals(400, 404)},
                    parameter(
                        "version",
                        "path",
                        {"type": "string", "pattern": "^([0-9]{1,16}|latest|promoted)$"},
                        "",
                        True,
                    ),
                    parameter("form", "query", {"enum": ["full", "bf16"]}, "bf16: rounded, half the bytes."),
                )
            },
            "/v1/status": {"get": operation("How it goes.", {"200": free})},
            "/v1/history": {
                "get": operation(
                    "What happened lately.",
                    {"200": free, **refusals(400)},
                    parameter("after", "query", NUMBER, "Only rows with a higher id."),
                    parameter(
                        "limit",
                        "query",
                        {"type": "integer", "minimum": 1, "maximum": 20000},
                        "At most so many, the newest.",
                    ),
                )
            },
            "/v1/events": {
                "get": operation(
                    "The same as it happens: server-sent events.",
                    {
                        "200": {"description": "A stream.", "content": {"text/event-stream": {}}},
                        **refusals(400),
                    },
                    parameter("after", "query", NUMBER, "Begin after this id."),
                )
            },
            "/v1/promote": {
                "post": operation(
                    "Operators: make a version (the newest, if none is given) the promoted one.",
                    {"200": free, **refusals(400, 404)},
                    parameter("version", "query", NUMBER, "Which."),
                )
            },
            "/v1/rollback": {
                "post": operation(
                    "Operators: back to what was promoted before.", {"200": free, **refusals(404)}
                )
            },
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Anything": {"type": "object"},
                "Refusal": {
                    "type": "object",
                    "required": ["error", "message", "next"],
                    "properties": {
                        "error": {"enum": list(MEANING)},
                        "message": {"type": "string"},
                        "next": {"enum": ["correct", "new-task", "wait", "stop"]},
                    },
                },
                "Task": {
                    "type": "object",
                    "required": [
                        "number",
                        "client",
                        "count",
                        "version",
                        "started",
                        "lease",
                        "seconds",
                        "corrected",
                        "held",
                    ],
                    "properties": {
                        **dict.fromkeys(("number", "client", "count", "version"), NUMBER),
                        "started": {"type": "number"},
                        "lease": {"type": "string"},
                        "seconds": {"type": "number", "description": "Until the lease runs out."},
                        "corrected": {"type": "boolean"},
                        "held": {
                            "type": "boolean",
                            "description": "Send base + delta - your previous delta.",
                        },
                    },
                },
                "Receipt": {
                    "type": "object",
                    "required": [
                        "number",
                        "client",
                        "base",
                        "staleness",
                        "weight",
                        "stepped",
                        "version",
                        "hold",
                        "repeated",
                    ],
                    "properties": {
                        **dict.fromkeys(("number", "client", "base", "version"), NUMBER),
                        **dict.fromkeys(("examples", "bytes", "staleness"), NUMBER),
                        **{name: {"type": "number"} for name in ("started", "arrived", "weight")},
                        **{name: {"type": "boolean"} for name in ("stepped", "hold", "repeated")},
                        "refused": {"const": ""},
                    },
                },
            },
        },
    }


def operation(summary: str, replies: dict[str, Any], *parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": summary,
        "parameters": list(parameters),
        "responses": {**replies, **refusals(401, 403, 429)},
    }


def open_to_all(summary: str, replies: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "security": [], "responses": replies}


def parameter(
    name: str, where: str, schema: dict[str, Any], text: str, required: bool = False
) -> dict[str, Any]:
    return {"name": name, "in": where, "required": required, "schema": schema, "description": text}


def reply(text: str, name: str) -> dict[str, Any]:
    return {"description": text, "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}}


def refusals(*codes: int) -> dict[str, Any]:
    """The replies that these statuses stand for, with the reasons that have them."""
    found = {}
    for code in codes:
        reasons = ", ".join(reason for reason, (status, _, _) in MEANING.items() if status == code)
        found[str(code)] = reply(reasons, "Refusal")
    return found
