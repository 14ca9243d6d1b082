"""Short ways: a body read from the socket into its place, a path found by one look. Nobody sees a difference."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from served import Live, body_of, live, put, until
from tiny import tiny

from afield.runtimes.service.client import RemoteTask

LAST = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with live(tiny(), tmp_path_factory.mktemp("straight") / "run") as found:
        yield found


@contextmanager
def connected(server: Live) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as raw:
        yield raw


def task_of(server: Live, client: int) -> tuple[RemoteTask, bytes]:
    task = server.client(client).next_task()
    assert task is not None
    return task, body_of(task)


def head_of(server: Live, task: RemoteTask, length: int, *more: str) -> bytes:
    lines = [
        f"PUT /v1/tasks/{task.number}/update?lease={task.told['lease']}&examples=1 HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {server.token}",
        "Content-Type: application/octet-stream",
        f"Content-Length: {length}",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def rest_of(raw: socket.socket) -> list[dict[str, Any]]:
    """The replies' bodies, up to the end of the connection."""
    text = b"".join(iter(lambda: raw.recv(65536), b""))
    return [json.loads(part.partition(b"\r\n\r\n")[2]) for part in text.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("cuts", [(), (0,), (1,), (100, 200), (-1,)])
def test_a_body_in_pieces_and_a_request_right_behind_it(cuts: tuple[int, ...], server: Live) -> None:
    task, body = task_of(server, 0)
    places = [0, *(cut % len(body) for cut in cuts), len(body)]
    pieces = [body[start:end] for start, end in pairwise(places)]
    with connected(server) as raw:
        raw.sendall(head_of(server, task, len(body)) + (b"" if cuts else body + LAST))
        for piece in pieces if cuts else ():
            assert server.http().get("/v1/status").status_code == 200  # the server has read what came so far
            raw.sendall(piece + (LAST if piece is pieces[-1] else b""))
        receipt, health = rest_of(raw)
    assert receipt["number"] == task.number and not receipt["refused"] and health == {"healthy": True}
    folded = server.parts.door.receipts[task.number]
    assert folded.bytes == len(body) - len(task.owner.wire.heads["full"])


def test_it_is_asked_for_where_the_client_waits_for_that(server: Live) -> None:
    task, body = task_of(server, 1)
    with connected(server) as raw:
        raw.sendall(head_of(server, task, len(body), "Expect: 100-continue"))
        assert raw.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(body + LAST)
        assert rest_of(raw)[0]["number"] == task.number


def test_who_leaves_half_way_may_come_again(server: Live) -> None:
    task, body = task_of(server, 2)
    with connected(server) as raw:
        raw.sendall(head_of(server, task, len(body)) + body[:50])
        assert server.http().get("/v1/status").status_code == 200
    assert put(server.http(), task, body).status_code == 200


def test_a_body_that_came_too_late_is_passed_over(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from afield.runtimes.service import bodies

    task, body = task_of(server, 3)
    with monkeypatch.context() as change, connected(server) as raw:
        change.setattr(bodies, "GRACE", 0.2)
        change.setattr(bodies, "SLOWEST", 10**9)
        raw.sendall(head_of(server, task, len(body)) + body[:50])
        reply = raw.recv(65536)
        assert reply.split(b" ")[1] == b"408"
        raw.sendall(body[50:] + LAST)
        assert rest_of(raw) == [{"healthy": True}]
    assert put(server.http(), task, body).status_code == 200


def test_a_body_has_one_length(server: Live) -> None:
    task, body = task_of(server, 4)
    with connected(server) as raw:
        raw.sendall(head_of(server, task, len(body), "Transfer-Encoding: chunked") + body)
        assert raw.recv(65536).split(b" ")[1] == b"400"
    assert put(server.http(), task, body).status_code == 200


def test_paths_that_are_not_in_the_table_are_starlettes(server: Live) -> None:
    http = server.http()
    for method, path, code, reason in (
        ("POST", "/v1/status", 405, "no-method"),
        ("DELETE", "/v1/tasks/", 405, "no-method"),
        ("PUT", "/v1/tasks//update", 404, "not-found"),
        ("GET", "/v1/tasks/0/update/more", 404, "not-found"),
        ("GET", "/v2/status", 404, "not-found"),
    ):
        reply = http.request(method, path, follow_redirects=True)
        assert (reply.status_code, reply.json()["error"]) == (code, reason), path
    assert http.head("/v1/status").status_code == 200


def test_an_error_of_the_servers_own_is_told_as_one(tmp_path: Path) -> None:
    with live(tiny(), tmp_path / "run") as server:
        server.parts.table = {"config": object()}  # which JSON cannot hold
        reply = server.http().get("/v1/run")
        assert (reply.status_code, reply.json()["error"]) == (500, "failed")
        until(lambda: server.http().get("/v1/status").status_code == 200)
