"""The life of a task over real sockets: leases, receipts, refusals that tell what to do, rounds, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from durably import durable
from safetensors.torch import load, save
from served import SOON, body_of, live, put, until
from tiny import tiny

from afield.core.types import Receipt
from afield.experiments.serve import Keeping
from afield.runtimes.service import bodies
from afield.runtimes.service.client import RemoteTask
from afield.runtimes.service.fold import Act, Batch, BrokenError, Fold
from afield.runtimes.service.service import Terms
from afield.runtimes.service.wire import TYPE
from afield.strategies import FedBuff


def ask(client: Any) -> RemoteTask:
    task = client.next_task()
    assert task is not None
    return task


def refusal(reply: httpx.Response, status: int, reason: str, following: str) -> None:
    told = reply.json()
    assert (reply.status_code, told["error"], told["next"]) == (status, reason, following), told
    assert told["message"]


def test_an_update_counts_once_however_often_it_is_sent_also_after_a_restart(tmp_path: Path) -> None:
    with live(tiny(), tmp_path / "run") as server:
        http, task = server.http(), ask(server.client(2))
        first = put(http, task, body_of(task))
        assert first.status_code == 200 and first.json()["repeated"] is False and first.json()["version"] == 1
        again = put(http, task, body_of(task, 9.0))  # even with another model
        assert again.json() == {**first.json(), "repeated": True}
        asked = http.get(f"/v1/tasks/{task.number}/receipt")
        assert asked.json() == again.json()
        other = ask(server.client(3))
        version, vector = server.client().model("latest")
    with live(tiny(), tmp_path / "run") as server:
        http = server.http()
        assert put(http, task, body_of(task)).json() == {**first.json(), "repeated": True}
        found, now = server.client().model("latest")
        assert found == version and torch.equal(now, vector)
        assert put(http, other, body_of(other)).json()["version"] == 2  # the lease is there still
        assert ask(server.client(2)).count == 1


def test_twins_that_arrive_together_share_one_receipt(tmp_path: Path) -> None:
    with live(tiny(), tmp_path / "run") as server:
        task = ask(server.client(0))
        body = body_of(task)
        clients = [server.http() for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda http: put(http, task, body), clients))
        assert {reply.status_code for reply in replies} == {200}
        assert len({reply.json()["arrived"] for reply in replies}) == 1
        assert server.client().status()["updates"] == 1


def test_who_asks_again_is_given_the_same_task(tmp_path: Path) -> None:
    with live(tiny(), tmp_path / "run") as server:
        assert ask(server.client(1)).told["lease"] == ask(server.client(1)).told["lease"]


def test_a_lease_that_runs_out_gives_its_slot_back(tmp_path: Path) -> None:
    one = tiny(scenario={"scheduler": {"name": "concurrency", "limit": 1}})
    with live(one, tmp_path / "run", terms=Terms(lease=0.3)) as server:
        task = ask(server.client(0))
        other = ask(server.client(1))  # waits until the first has lost its lease
        assert other.client == 1
        http = server.http()
        refusal(put(http, task, body_of(task)), 410, "expired", "new-task")
        refusal(http.delete(f"/v1/tasks/{task.number}", params={"lease": "x"}), 410, "expired", "new-task")
        assert http.get("/v1/status").json()["ended"]["expired"] >= 1  # the other's may have ended, too
        assert 'afield_tasks_ended_total{reason="expired"} ' in http.get("/metrics").text
    audit = [json.loads(line) for line in (tmp_path / "run" / "audit.jsonl").read_text().splitlines()]
    ended = [(row["client"], row["number"], row["why"]) for row in audit if row["act"] == "ended"]
    assert ended[0] == (0, task.number, "expired")


def test_heartbeats_keep_a_lease_and_tell_at_once_that_a_task_has_ended(tmp_path: Path) -> None:
    with live(tiny(), tmp_path / "run", terms=Terms(lease=2.0)) as server:
        http, task = server.http(), ask(server.client(0))
        with task:  # the SDK's own
            until(lambda: server.parts.door.server.counts.get(0) == 1)
            began = server.client().status()["now"]
            until(lambda: server.client().status()["now"] > began + 4.0)
            assert put(http, task, body_of(task)).status_code == 200
            task._answered.set()
            task.receipt = Receipt(0, 0, 0, 0, 0, 1, 1, 0, 0, False, 1)
        task = ask(server.client(0))
        lease = {"lease": task.told["lease"]}
        with ThreadPoolExecutor(1) as pool:
            path = f"/v1/tasks/{task.number}/heartbeat"
            waiting = pool.submit(lambda: http.post(path, params={**lease, "wait": 15}))
            assert server.http().delete(f"/v1/tasks/{task.number}", params=lease).status_code == 204
            refusal(waiting.result(10), 410, "given-back", "new-task")


def test_a_client_that_stops_waiting_is_not_given_a_task(tmp_path: Path) -> None:
    one = tiny(scenario={"scheduler": {"name": "concurrency", "limit": 1}})
    with live(one, tmp_path / "run") as server:
        task = ask(server.client(0))
        with pytest.raises(httpx.ReadTimeout):
            server.http().post("/v1/tasks", params={"client": 1, "wait": 30}, timeout=0.3)
        until(lambda: server.client().status()["waiting"] == 0)
        assert put(server.http(), task, body_of(task)).status_code == 200
        assert ask(server.client(2)).client == 2


def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    with live(tiny(server={"max_staleness": 1}), tmp_path / "run", terms=Terms(norm=5.0)) as server:
        http, task = server.http(), ask(server.client(0))
        bad = task.base.clone()
        bad[3] = float("nan")
        head, path = task.owner.wire.heads["full"], f"/v1/tasks/{task.number}/update"
        lease = {"lease": task.told["lease"], "examples": 1}
        sent = {"Content-Type": TYPE}
        body = body_of(task)
        refusal(put(http, task, head + bytes(bad.numpy())), 422, "not-finite", "new-task")
        refusal(put(http, task, body_of(task, 1.0)), 422, "too-large", "new-task")
        refusal(put(http, task, b"\x80\x04pickle"), 422, "malformed", "correct")
        refusal(put(http, task, save({"x": bad})), 422, "wrong-tensors", "correct")
        refusal(put(http, task, body, examples=0), 400, "bad-request", "correct")
        refusal(
            http.put(path, params={"lease": task.told["lease"]}, content=body, headers=sent),
            422,
            "no-examples",
            "correct",
        )
        refusal(put(http, task, body, rate=0), 422, "no-steps", "correct")
        refusal(put(http, task, body, metrics="[1]"), 400, "bad-request", "correct")
        refusal(
            http.put(path, params=lease, content=body, headers={"Content-Type": "text/plain"}),
            415,
            "no-media",
            "correct",
        )
        refusal(put(http, task, body + bytes(10**6)), 413, "too-long", "correct")
        chunks = iter([body, bytes(10**6)])  # no content-length
        refusal(http.put(path, params=lease, content=chunks, headers=sent), 413, "too-long", "correct")
        refusal(
            http.put(path, params={**lease, "lease": "no"}, content=body, headers=sent),
            404,
            "never-leased",
            "new-task",
        )
        refusal(
            http.put("/v1/tasks/99/update", params=lease, content=body, headers=sent),
            404,
            "never-leased",
            "new-task",
        )
        refusal(http.get("/v1/models/99"), 404, "no-model", "correct")
        refusal(http.post("/v1/tasks", params={"client": 5}), 404, "unknown-client", "stop")
        refusal(http.post("/v1/tasks"), 400, "bad-request", "correct")
        refusal(
            http.get(f"/v1/tasks/{task.number}/correction", params=lease), 404, "no-correction", "correct"
        )
        refusal(http.get("/v1/nothing"), 404, "not-found", "correct")
        refusal(http.post("/v1/status"), 405, "no-method", "correct")
        assert server.client().status()["version"] == 0  # nothing of all this changed anything
        assert put(http, task, body).status_code == 200
        stale = ask(server.client(1))
        for client in (2, 3):
            other = ask(server.client(client))
            assert put(http, other, body_of(other)).status_code == 200
        refusal(put(http, stale, body_of(stale)), 410, "too-stale", "new-task")
        assert ask(server.client(1)).version == 3
        counted = http.get("/v1/status").json()["refusals"]
        assert counted["malformed"] == 1 and counted["too-long"] == 2 and counted["not-finite"] >= 1


def test_too_much_is_told_to_come_again_later(tmp_path: Path) -> None:
    with live(tiny(), tmp_path / "run", terms=Terms(rate=0.5, burst=3)) as server:
        clients = server.parts.door.server.clients
        http = server.http()
        replies = [http.get("/v1/status") for _ in range(3 * clients + 1)]
        assert [reply.status_code for reply in replies[:-1]] == [200] * (3 * clients)
        refusal(replies[-1], 429, "too-often", "wait")
        assert int(replies[-1].headers["retry-after"]) >= 1


def test_when_there_is_no_room_for_bodies_who_comes_waits_and_is_then_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "PATIENCE", 0.2)
    with live(tiny(), tmp_path / "run", terms=Terms(buffer=1, rate=1e6, burst=1e6)) as server:
        http, task = server.http(), ask(server.client(0))
        limit = task.owner.wire.limit
        head = (
            f"PUT /v1/tasks/{task.number}/update?lease={task.told['lease']}&examples=1 HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {server.token}\r\nContent-Type: {TYPE}\r\nContent-Length: {limit}\r\n\r\nabc"
        )
        place = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with contextlib.ExitStack() as stack:  # uploads that have begun and do not go on
            for _ in range(2**20 // limit):
                stack.enter_context(socket.create_connection(place, 20)).sendall(head.encode())
            until(lambda: free(http) < limit)
            reply = put(http, task, body_of(task) + bytes(limit - len(body_of(task))))
            refusal(reply, 429, "busy", "wait")
            assert int(reply.headers["retry-after"]) >= 1
        until(lambda: free(http) == 2**20)
        assert put(http, task, body_of(task)).status_code == 200


def free(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("afield_room_free_bytes ")).split()[1])


def test_a_version_is_downloaded_once(tmp_path: Path) -> None:
    buffered = tiny("fedbuff")
    with live(buffered, tmp_path / "run") as server:
        client, size = server.client(0), None
        for task in client.tasks(4):
            size = size or client.received
            task.submit(task.base + 0.5, examples=1)
        assert client.received == 2 * size  # versions 0 and 1: four tasks, three updates per version
        http = server.http()
        reply = http.get("/v1/models/1")
        same = http.get("/v1/models/1", headers={"If-None-Match": reply.headers["etag"]})
        assert same.status_code == 304 and not same.content
        assert (
            http.get("/v1/models/latest", headers={"If-None-Match": reply.headers["etag"]}).status_code == 304
        )
        assert http.get("/v1/models/1", headers={"If-None-Match": '"other"'}).content == reply.content
        read = load(reply.content)
        flat = torch.cat([read[name].reshape(-1) for name in client.layout.names])
        assert torch.equal(flat, server.client().model("latest")[1])


@pytest.mark.parametrize("transport", ["bf16", "int8"])
@pytest.mark.parametrize("zstd", [False, True])
def test_rounded_transport_feeds_its_error_back(transport: str, zstd: bool, tmp_path: Path) -> None:
    rule = {"strategy": {"name": "fedasync", "alpha": 1.0}}
    with live(tiny(**rule), tmp_path / "run") as server:
        exact = server.client(0).model("latest")[1].double()
        client, generator = server.client(0, transport=transport, zstd=zstd), torch.Generator().manual_seed(3)
        plain = server.client(0)
        for task in client.tasks(12):
            delta = torch.randn(len(task.base), generator=generator) * 0.01
            assert not task.submit(task.base + delta, examples=1).refused
            exact += delta
        got = plain.model("latest")[1].double()
        left = client.memory.pasts[0].kept["left"].double()
        assert (
            float((got + left - exact).abs().max()) < 1e-5
        )  # but for what waits to be sent, nothing is lost
        assert client.sent < 12 * plain.received * 0.6


def test_zstd_bombs_are_not_unpacked(tmp_path: Path) -> None:
    import zstandard

    with live(tiny(), tmp_path / "run") as server:
        http, task = server.http(), ask(server.client(0))
        packed = {"Content-Type": TYPE, "Content-Encoding": "zstd"}
        query = {"lease": task.told["lease"], "examples": 1}
        for body, reason in (
            (zstandard.compress(bytes(10**9 // 4)), "too-long"),
            (zstandard.compress(body_of(task))[:-9], "malformed"),
            (b"not zstd at all", "malformed"),
        ):
            told = http.put(
                f"/v1/tasks/{task.number}/update", params=query, content=body, headers=packed
            ).json()
            assert told["error"] == reason
        reply = http.put(
            f"/v1/tasks/{task.number}/update",
            params=query,
            content=zstandard.compress(body_of(task)),
            headers=packed,
        )
        assert reply.status_code == 200


def of_rounds(clients: int, **parts: float) -> Any:
    """FedAvg among so many clients; a round begins when all of them ask, or `idle` seconds after the first."""
    rounds = {"name": "cohort", "size": clients, "idle": 1000.0, "deadline": 1000.0, **parts}
    return tiny("fedavg", scenario={"rounds": rounds, "clients": clients})


def test_a_round_closes_when_complete(tmp_path: Path) -> None:
    with live(of_rounds(3), tmp_path / "run") as server:
        with ThreadPoolExecutor(3) as pool:
            tasks = list(pool.map(lambda n: ask(server.client(n)), range(3)))
        for task in tasks:
            assert put(server.http(), task, body_of(task)).status_code == 200
        until(lambda: server.client().status()["version"] == 1)


def test_a_round_closes_at_its_deadline(tmp_path: Path) -> None:
    with live(of_rounds(2, deadline=4.0), tmp_path / "run") as server:
        with ThreadPoolExecutor(2) as pool:
            late, quick = list(pool.map(lambda n: ask(server.client(n)), range(2)))
        http = server.http()
        assert put(http, quick, body_of(quick)).status_code == 200
        until(lambda: server.client().status()["version"] == 1)
        refusal(put(http, late, body_of(late)), 410, "round-over", "new-task")


def test_a_round_begins_without_those_who_do_not_ask(tmp_path: Path) -> None:
    with live(of_rounds(3, idle=0.2), tmp_path / "run") as server:
        task = ask(server.client(1))
        assert put(server.http(), task, body_of(task)).status_code == 200
        until(lambda: server.client().status()["version"] == 1)


def test_a_round_goes_on_after_a_restart(tmp_path: Path) -> None:
    rounds = {"name": "cohort", "size": 2, "idle": 100.0}
    chosen = tiny("fedavg", scenario={"rounds": rounds, "clients": 2})
    with live(chosen, tmp_path / "run") as server:
        with ThreadPoolExecutor(2) as pool:
            one, two = list(pool.map(lambda n: ask(server.client(n)), (0, 1)))
        assert put(server.http(), one, body_of(one)).status_code == 200
    with live(chosen, tmp_path / "run") as server:
        assert put(server.http(), two, body_of(two)).status_code == 200
        until(lambda: server.client().status()["version"] == 1)


def test_clients_notice_nothing_of_a_restart_but_a_pause(tmp_path: Path) -> None:
    """The SDK waits out the time without a server; its lease, its task and its receipts are still there."""
    from afield.runtimes.service.serve import Listen

    done: list[Receipt] = []

    def work(url: str, token: str) -> None:
        from afield.runtimes.service.client import Client

        with Client(url, token, client=0, wait=1.0, patience=60.0) as client:
            done.extend(task.submit(task.base + 0.25, examples=1) for task in client.tasks(30))

    with live(tiny(), tmp_path / "run") as server:
        port = int(server.url.rpartition(":")[2])
        thread = threading.Thread(target=work, args=(server.url, server.token), daemon=True)
        thread.start()
        until(lambda: len(done) >= 5)
    with live(tiny(), tmp_path / "run", listen=Listen(port=port)) as server:
        thread.join(60)
        assert server.client().status()["version"] == 30
    assert [receipt.version for receipt in done] == list(range(1, 31))


def test_the_folder_is_as_a_simulations(tmp_path: Path) -> None:
    from afield.reports import load as reports

    with live(tiny(measure={"versions": 2}), tmp_path / "run", keeping=Keeping(every=3)) as server:
        client = server.client(1)
        for task in client.tasks(7):
            task.submit(task.base, examples=4)
        until(lambda: server.client().status()["accuracy"] is not None)
    runs = reports.find([tmp_path / "run"])
    assert len(runs) == 1
    import pyarrow.parquet as parquet

    numbers = [
        n
        for file in sorted((tmp_path / "run" / "receipts").glob("*"))
        for n in parquet.read_table(file)["number"].to_pylist()
    ]
    assert numbers == list(range(7))


def test_what_was_done_is_answered_though_telling_of_it_fails(tmp_path: Path) -> None:
    async def asked() -> int:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: seen.append(told["exception"]))
        with durable(FedBuff(size=3), tmp_path) as door:
            fold = Fold(door, told=failing, ended=str)
            fold.start()
            task = await asyncio.wait_for(fold.put(Act.CHECKOUT, (1, 0.0)), SOON)
            await fold.stop()
        return task.task.client

    def failing(batch: Batch) -> None:
        raise BrokenError("the journal")

    seen: list[BaseException] = []
    assert asyncio.run(asked()) == 1
    assert [str(one) for one in seen] == ["the journal"]
