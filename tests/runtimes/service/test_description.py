"""The OpenAPI description: schemathesis reads it, tries everything, and finds no error of the server's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from served import live
from tiny import tiny

from afield.runtimes.service.service import Terms

schemathesis = pytest.importorskip("schemathesis")


@pytest.mark.parametrize("examples", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_no_request_makes_the_server_fail(examples: int, tmp_path: Path) -> None:
    from hypothesis import given

    with live(tiny(), tmp_path / "run", terms=Terms(rate=1e6, burst=1e6, wait=0.05)) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        tried = []
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path == "/v1/events":
                continue  # a stream has no end; test_operations reads it

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def check(case: object) -> None:
                headers = {"Authorization": f"Bearer {server.token}"}
                reply = case.call(headers=headers, timeout=20)  # type: ignore[attr-defined]
                assert reply.status_code < 500 or (
                    reply.status_code == 503 and reply.json()["error"] == "draining"
                )
                case.validate_response(reply, headers=headers)  # type: ignore[attr-defined]

            check()
            tried.append(f"{operation.method} {operation.path}")
        assert len(tried) == 18 - 1 + 1
        assert server.client().status()["state"] == "serving"
