"""The page's files, the routes it asks, and `afield watch`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import httpx
import pytest
from served import SOON, live, until
from tiny import rows_of, tiny

from afield.core.errors import InputError
from afield.runtimes.service.replay import watch

FILES = {
    file.name: file.read_text()
    for file in (resources.files("afield.runtimes.service") / "page").iterdir()
    if file.name.rpartition(".")[2] in ("html", "js", "css", "svg")
}


@contextmanager
def watching(folder: Path) -> Iterator[tuple[httpx.Client, str]]:
    """`afield watch` on a thread; a client without token, and the token."""
    started, told = threading.Event(), []

    def ready(url: str, end: object) -> None:
        told.append((url, end))
        started.set()

    thread = threading.Thread(target=watch, args=(folder, 0, ready), daemon=True)
    thread.start()
    assert started.wait(SOON)
    url, end = told[0]
    address, _, token = url.partition("/#token=")
    with httpx.Client(base_url=address, timeout=SOON) as http:
        yield http, token
    end()
    thread.join(SOON)
    assert not thread.is_alive()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_the_files_are_open_and_everything_they_name_is_there(tmp_path: Path) -> None:
    with live(tiny(), tmp_path / "run") as server:
        http = server.http(token=None)
        first = http.get("/")
        assert first.text == FILES["index.html"] and first.headers["content-type"].startswith("text/html")
        for name, text in FILES.items():
            if name == "index.html":
                continue
            reply = http.get(f"/page/{name}")
            assert (reply.status_code, reply.text) == (200, text)
            assert reply.headers["x-content-type-options"] == "nosniff"
            again = http.get(f"/page/{name}", headers={"If-None-Match": reply.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        named = set(re.findall(r'(?:src|href)="/page/([^"]+)"', FILES["index.html"]))
        named |= {name for text in FILES.values() for name in re.findall(r'from "\./([^"]+)"', text)}
        assert named == set(FILES) - {"index.html"}
        policy = first.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        for path in ("/page/", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py", "/page/x.js"):
            assert http.get(path).status_code == 404
        assert http.post("/").status_code == 405
        for path in ("/v1/status", "/v1/shares", "/v1/history", "/v1/events"):
            assert http.get(path).status_code == 401


def test_nothing_in_the_files_runs_text_or_names_another_host() -> None:
    for name, text in FILES.items():
        plain = text.replace("http://www.w3.org/2000/svg", "")
        assert "://" not in plain, name
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert word not in text, (name, word)
        assert not re.search(r"<[^>]+\s(on\w+|style)=", text), name
    assert not re.search(r"<script(?![^>]*\ssrc=)", FILES["index.html"])


def test_the_live_routes_tell_what_the_page_shows(tmp_path: Path) -> None:
    with live(tiny("mr-asyncfl", strategy={"gamma": 0.5}), tmp_path / "run") as server:
        http = server.http()
        assert http.get("/v1/shares").json()["top"] == []
        for client in (1, 3):
            for task in server.client(client).tasks(1):
                task.submit(task.base, examples=2)
        # Five caches of 1/5; gamma = 1/2: c_1 = 0.6, then all but the new one are halved, c_3 = (0.2 / 2) / 2 + 1/2.
        told = http.get("/v1/shares").json()
        assert (told["rule"], told["updates"], told["clients"]) == ("replaced", 2, 2)
        assert told["top"] == [[3, pytest.approx(0.55)], [1, pytest.approx(0.3)]]
        assert told["initial"] == pytest.approx(0.15)
        rows = http.get("/v1/history").json()["rows"]
        first = http.get("/v1/history", params={"first": 1, "limit": 2}).json()["rows"]
        assert first == rows[:2]
        assert http.get("/v1/history", params={"first": 2}).status_code == 400


def test_after_a_restart_the_page_still_has_its_past(tmp_path: Path) -> None:
    chosen = tiny(measure={"versions": 1})

    def kinds(http: httpx.Client) -> list[tuple[str, object]]:
        rows = http.get("/v1/history").json()["rows"]
        keys = {"measurement": "version", "receipt": "number", "task": "number"}
        return [(row["kind"], row["values"][keys[row["kind"]]]) for row in rows if row["kind"] in keys]

    with live(chosen, tmp_path / "run") as server:
        for task in server.client(0).tasks(2):
            task.submit(task.base, examples=2)
        out = server.client(1).next_task()
        assert out is not None
        until(lambda: ("measurement", 2) in kinds(server.http()))
        shares = server.http().get("/v1/shares").json()
    with live(chosen, tmp_path / "run") as server:
        found = kinds(server.http())
        assert {("receipt", 0), ("receipt", 1), ("task", out.number), ("measurement", 2)} <= set(found)
        assert server.http().get("/v1/shares").json() == shares


def test_watch_wants_its_token_and_tells_the_run(tmp_path: Path) -> None:
    receipts, measured = rows_of(tiny(), tmp_path / "run")
    with watching(tmp_path / "run") as (http, token):
        assert http.get("/").text == FILES["index.html"]
        for path in ("/v1/status", "/v1/shares", "/v1/history", "/v1/events"):
            assert http.get(path).json()["error"] == "no-token"
            assert http.get(path, headers=bearer(token[:-1] + "!")).json()["error"] == "bad-token"
        status = http.get("/v1/status", headers=bearer(token)).json()
        assert (status["name"], status["state"], status["clients"]) == ("tiny", "finished", 5)
        rows, after = [], 0
        while True:
            query = {"first": 1, "limit": 10, "after": after}
            told = http.get("/v1/history", headers=bearer(token), params=query).json()
            if not told["rows"]:
                break
            rows.extend(told["rows"])
            after = rows[-1]["id"]
        kinds = [row["kind"] for row in rows]
        assert after == told["last"] == status["rows"]
        assert kinds.count("receipt") == kinds.count("task") == len(receipts)
        assert kinds.count("measurement") == len(measured)


def test_watch_follows_what_is_written_and_what_is_cut(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rows_of(tiny(), folder)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "summary.json").unlink()
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    with watching(folder) as (http, token):
        assert http.get("/v1/status", headers=bearer(token)).json()["state"] == "running"
        last = http.get("/v1/history", headers=bearer(token)).json()["last"]
        seen: list[str] = []
        with http.stream(
            "GET", "/v1/events", headers=bearer(token) | {"Last-Event-ID": str(last - 1)}
        ) as reply:
            for line in reply.iter_lines():
                if not line.startswith("event: "):
                    continue
                seen.append(line[7:])
                if len(seen) == 1:
                    with (folder / "metrics.jsonl").open("ab") as file:
                        file.write(lines[3])
                elif len(seen) == 2:
                    os.truncate(folder / "metrics.jsonl", len(lines[0]))
                elif seen[-1] == "receipt":
                    break
        assert seen[1:3] == ["measurement", "reset"]


def test_the_command_prints_where_and_refuses_what_is_not_one_run(tmp_path: Path) -> None:
    rows_of(tiny(), tmp_path / "two" / "a")
    rows_of(tiny(), tmp_path / "two" / "b")
    command = [sys.executable, "-m", "afield", "watch"]
    refused = subprocess.run([*command, str(tmp_path / "two")], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "holds 2 runs" in refused.stderr
    with subprocess.Popen(
        [*command, str(tmp_path / "two" / "a")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.fullmatch(r"watch at http://127\.0\.0\.1:\d+/#token=[\w-]{32}\n", line)
        process.terminate()
        assert process.wait(SOON) == 0


def test_only_a_folder_that_is_a_run_can_be_watched(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run folder"):
        watch(tmp_path, 0)
