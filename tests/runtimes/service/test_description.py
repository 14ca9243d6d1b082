"""The OpenAPI description: schemathesis reads it, tries everything, and finds no error of the server's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from served import live
from tiny import tiny

from afield.runtimes.service.service import Terms

schemathesis = pytest.importorskip("schemathesis")


@pytest.mark.parametrize("examples", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_no_request_makes_the_server_fail(examples: int, tmp_path: Path) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as described

    checks = [
        not_a_server_error,
        described.status_code_conformance,
        described.content_type_conformance,
        described.response_schema_conformance,
    ]
    with live(tiny(), tmp_path / "run", terms=Terms(rate=1e6, burst=1e6, wait=0.05)) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        headers, client = {"Authorization": f"Bearer {server.token}"}, server.client(0)
        seen: dict[str, set[int]] = {}

        def tried(statuses: set[int]) -> Callable[[Any], None]:
            turns = itertools.count()

            def check(case: Any) -> None:
                if (
                    "{number}" in case.operation.path and next(turns) % 2
                ):  # a task that there is, its lease known
                    task = client.next_task()
                    assert task is not None
                    case.path_parameters["number"] = task.number
                    case.query = {**(case.query or {}), "lease": task.told["lease"]}
                reply = case.call(headers=headers, timeout=20)
                statuses.add(reply.status_code)
                case.validate_response(reply, checks=checks, headers=headers)

            return check

        for result in schema.get_all_operations():
            operation = result.ok()
            name = f"{operation.method.upper()} {operation.path}"
            if operation.path == "/v1/events":
                continue  # a stream has no end; test_operations reads it
            seen[name] = set()
            attempts = settings(
                max_examples=examples,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            attempts(given(case=operation.as_strategy())(tried(seen[name])))()
        paths = server.http().get("/openapi.json").json()["paths"]
        skipped = ("/v1/events", "/openapi.json")  # schemathesis leaves the description itself out
        assert set(seen) == {f"{m.upper()} {p}" for p, ms in paths.items() if p not in skipped for m in ms}
        assert {400, 404} & seen["PUT /v1/tasks/{number}/update"] and 422 in seen[
            "PUT /v1/tasks/{number}/update"
        ]
        assert server.client().status()["state"] == "serving"
