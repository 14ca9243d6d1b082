"""Running it: health, metrics, history, events, promotion, drain, a second owner, the command line."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load
from served import Process, body_of, live, put, until
from tiny import tiny

from afield.core.errors import InputError
from afield.core.types import Receipt
from afield.experiments.join import by_config, by_own, take_part
from afield.experiments.serve import FLUSHED, LiveFolder
from afield.runtimes.service import tasks
from afield.runtimes.service.audit import Audit
from afield.runtimes.service.client import Client
from afield.runtimes.service.serve import Listen, bound
from afield.runtimes.service.service import Terms

NET = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
"""


def test_metrics_status_and_history(tmp_path: Path) -> None:
    with live(tiny(measure={"versions": 2}), tmp_path / "run") as server:
        http, client = server.http(), server.client(1)
        for task in client.tasks(4):
            task.submit(task.base, examples=2)
        task = client.next_task()
        assert task is not None
        put(http, task, b"no")
        until(
            lambda: [
                row
                for row in http.get("/v1/history").json()["rows"]
                if row["values"].get("version") == 4 and row["kind"] == "measurement"
            ]
        )
        text = http.get("/metrics").text
        for line in (
            "afield_updates_total 4.0",
            'afield_refusals_total{reason="malformed"} 1.0',
            "afield_version 4.0",
            "afield_tasks_open 1.0",
        ):
            assert line in text, line
        told = http.get("/v1/status").json()
        assert (told["version"], told["updates"], told["tasks"], told["state"]) == (4, 4, 1, "serving")
        rows = http.get("/v1/history").json()["rows"]
        kinds = [row["kind"] for row in rows]
        assert kinds.count("receipt") == 4 and kinds.count("task") == 5
        assert [row["id"] for row in rows] == sorted({row["id"] for row in rows})
        last = rows[-3]["id"]
        assert [row["id"] for row in http.get("/v1/history", params={"after": last}).json()["rows"]] == [
            rows[-2]["id"],
            rows[-1]["id"],
        ]
        accuracies = [row["values"]["accuracy"] for row in rows if row["kind"] == "measurement"]
        assert all(0 <= value <= 1 for value in accuracies)


def test_events_are_told_as_they_happen_and_go_on_after_the_last_one_seen(tmp_path: Path) -> None:
    with live(tiny(measure={"versions": 1000}), tmp_path / "run") as server:
        seen: list[tuple[int, str]] = []
        ready = threading.Event()

        def listen(after: int | None) -> None:
            headers = {} if after is None else {"Last-Event-ID": str(after)}
            with server.http().stream("GET", "/v1/events", headers=headers) as reply:
                assert reply.headers["content-type"].startswith("text/event-stream")
                number = 0
                for line in reply.iter_lines():
                    ready.set()
                    if line.startswith("id: "):
                        number = int(line[4:])
                    elif line.startswith("event: "):
                        seen.append((number, line[7:]))
                    elif line.startswith("data: "):
                        json.loads(line[6:])
                    if seen and seen[-1][1] == "receipt":
                        return

        thread = threading.Thread(target=listen, args=(None,), daemon=True)
        thread.start()
        assert ready.wait(20)
        for task in server.client(0).tasks(1):
            task.submit(task.base, examples=1)
        thread.join(20)
        assert [kind for _, kind in seen if kind != "measurement"] == ["task", "receipt"]
        task_at = seen[-2][0]
        seen.clear()
        listen(task_at)
        assert [kind for _, kind in seen] == ["receipt"]


def test_promotion_and_the_way_back(tmp_path: Path) -> None:
    with live(tiny(measure={"versions": 1}), tmp_path / "run") as server:
        http, client = server.http(), server.client(0)
        assert http.get("/v1/models/promoted").json()["error"] == "no-model"
        models = []
        for task in client.tasks(3):
            models.append(task.base)
            task.submit(task.base + 1, examples=1)
        until(lambda: http.get("/v1/status").json()["accuracy"] is not None)
        until(lambda: (tmp_path / "run" / "models" / f"{3:012d}.safetensors").exists())
        assert http.post("/v1/promote").json() == {"promoted": 3, "history": [3]}
        first = http.get("/v1/models/promoted")
        assert first.headers["afield-version"] == "3"
        for task in client.tasks(1):
            task.submit(task.base + 1, examples=1)
        assert http.post("/v1/promote", params={"version": 4}).json()["history"] == [3, 4]
        assert http.post("/v1/promote", params={"version": 77}).json()["error"] == "no-model"
        assert http.get("/v1/models/promoted").headers["afield-version"] == "4"
        assert http.post("/v1/rollback").json() == {"promoted": 3, "history": [3]}
        assert http.get("/v1/models/promoted").content == first.content
        assert http.post("/v1/rollback").json()["error"] == "no-model"
    with live(tiny(measure={"versions": 1}), tmp_path / "run") as server:
        again, wanted = load(server.http().get("/v1/models/promoted").content), load(first.content)
        assert set(again) == set(wanted) and all(torch.equal(again[name], wanted[name]) for name in wanted)
    lines = [json.loads(line) for line in (tmp_path / "run" / "audit.jsonl").read_text().splitlines()]
    acts = [line["act"] for line in lines]
    assert acts.count("update") == 4 and acts.count("promote") == 2 and acts.count("rollback") == 1
    assert all(line["who"] for line in lines if line["act"] == "update")


def test_a_drain_answers_who_waits_and_takes_no_more(tmp_path: Path) -> None:
    one = tiny(scenario={"scheduler": {"name": "concurrency", "limit": 1}})
    with live(one, tmp_path / "run") as server:
        task = server.client(0).next_task()
        assert task is not None
        replies: list[httpx.Response] = []
        waiting = threading.Thread(
            target=lambda: replies.append(server.http().post("/v1/tasks", params={"client": 1, "wait": 30}))
        )
        waiting.start()
        until(lambda: server.client().status()["waiting"] == 1)
        server.end()
        waiting.join(20)
        assert replies[0].status_code == 503 and replies[0].json()["error"] == "draining"
        assert int(replies[0].headers["retry-after"]) >= 1


def test_a_second_owner_and_another_config_are_refused(tmp_path: Path) -> None:
    with (
        live(tiny(), tmp_path / "run"),
        pytest.raises(InputError, match="is in use by process"),
        live(tiny(), tmp_path / "run"),
    ):
        pass
    with (
        pytest.raises(InputError, match="begun with another strategy"),
        live(tiny("fedbuff"), tmp_path / "run"),
    ):
        pass
    with (
        pytest.raises(InputError, match="ticks are of virtual time"),
        live(
            tiny(
                "fedbuff",
                strategy={"name": "fedbuff", "per": "tick", "size": 3},
                scenario={"scheduler": "ticks"},
            ),
            tmp_path / "other",
        ),
    ):
        pass


def test_a_network_of_ones_own_is_measured_on_examples_of_ones_own(tmp_path: Path) -> None:
    import numpy as np

    (tmp_path / "my.py").write_text(NET)
    net, folder = f"{tmp_path / 'my.py'}:Net", tmp_path / "test"
    folder.mkdir()
    inputs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "targets.npy", np.arange(50) % 3)
    with live(tiny(measure={"versions": 1}), tmp_path / "run", own=net, test=folder) as server:
        client = server.client(0)
        task = next(client.tasks(1))
        module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        task.load_into(module)
        task.submit(module, examples=1)
        found = float((module(torch.from_numpy(inputs)).argmax(1) == torch.arange(50) % 3).double().mean())
        assert until(lambda: client.status()["accuracy"]) == pytest.approx(found)
    np.save(folder / "targets.npy", np.arange(50) % 4)
    with (
        pytest.raises(InputError, match="the model gives 3 outputs, but labels reach 3"),
        live(tiny(), tmp_path / "four", own=net, test=folder),
    ):
        pass
    with (
        pytest.raises(InputError, match="--test goes with --model"),
        live(tiny(), tmp_path / "x", test=folder),
    ):
        pass


def test_a_client_in_another_language_needs_http_and_safetensors_only(tmp_path: Path) -> None:
    """Nothing of afield on the client's side: names in another order, as the library writes them."""
    from safetensors.torch import save

    with live(tiny(), tmp_path / "run") as server:
        http = server.http()
        task = http.post("/v1/tasks", params={"client": 3}).json()
        model = load(http.get(f"/v1/models/{task['version']}").content)
        trained = save({name: value + 0.5 for name, value in reversed(model.items())})
        reply = http.put(
            f"/v1/tasks/{task['number']}/update",
            params={"lease": task["lease"], "examples": 12},
            content=trained,
            headers={"Content-Type": "application/octet-stream"},
        )
        assert reply.json()["version"] == 1
        now = load(http.get("/v1/models/latest").content)
        assert not any(torch.equal(now[name], model[name]) for name in model)


@pytest.mark.slow
def test_a_full_disk_passes_and_leaves_nothing_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Leases end, acts are noted and versions are promoted again as soon as there is room."""
    monkeypatch.setattr(tasks, "RETRY", 0.05)
    folder = tmp_path / "run"
    with live(tiny(), folder, terms=Terms(lease=0.5)) as server:
        http = server.http()
        http.get("/v1/status")
        until(lambda: (folder / "models" / "000000000000.safetensors").exists())
        task = server.client(0).next_task()
        assert task is not None and put(http, task, body_of(task)).status_code == 200
        began = time.monotonic()
        assert server.client(1).next_task() is not None  # it will not be heard of again
        with no_room():
            reply = http.post("/v1/promote")
            assert (reply.status_code, reply.json()["error"]) == (503, "storage")
            until(lambda: "audit.jsonl cannot be written" in caplog.text)  # the service has ticked
            until(lambda: time.monotonic() > began + 1.0)  # the lease has ended
            assert http.get("/v1/status").json()["tasks"] == 1
        until(lambda: http.get("/v1/status").json()["ended"] == {"expired": 1})
        assert http.post("/v1/promote").json()["promoted"] == 1
        until(lambda: '"promote"' in (folder / "audit.jsonl").read_text())


def test_an_audit_log_that_was_turned_over_is_its_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Audit, "MOST", 10)
    audit = Audit(tmp_path / "audit.jsonl")
    audit.note("one")
    audit.flush()
    audit.note("two")
    audit.close()
    files = sorted(tmp_path.iterdir())
    assert [json.loads(file.read_text())["act"] for file in files] == ["one", "two"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


@contextmanager
def no_room() -> Iterator[None]:
    """No file can grow, as on a full disk; but sockets go on."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_a_kill_cut_short_does_not_stop_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def some(count: int) -> None:
        with live(tiny(), folder) as server:
            for _ in range(count):
                task = server.client(0).next_task()
                assert task is not None and put(server.http(), task, body_of(task)).status_code == 200
            until(lambda: server.http().get("/v1/status").json()["accuracy"] is not None)

    some(4)
    metrics, receipts = folder / "metrics.jsonl", folder / "receipts"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join(lines)[:-5])
    (receipts / "00000.parquet").rename(receipts / "00000.draft")  # killed before it had its name
    some(5)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(rows) > len(lines) - 1
    assert parquet.read_table(receipts)["number"].to_pylist() == list(range(9))


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot make .*: .*choose another folder"):
        LiveFolder(tmp_path / "file" / "run", tiny(), None, None)


def test_receipts_wait_for_room_and_have_no_gap(tmp_path: Path) -> None:
    def receipt(number: int) -> Receipt:
        return Receipt(number, 0, 0, 0.0, 1.0, 1, 8, 0, 1.0, True, number)

    log = LiveFolder(tmp_path / "run", tiny(), None, None)
    with no_room():
        for number in range(FLUSHED):
            log.row(receipt(number))
        log._writer.submit(int).result()  # it has tried
    for number in range(FLUSHED, 2 * FLUSHED):
        log.row(receipt(number))
    log.close()
    files = sorted((tmp_path / "run" / "receipts").iterdir())
    assert [file.name for file in files] == ["00000.parquet", "00001.parquet"]
    assert parquet.read_table(files[0])["number"].to_pylist() == list(range(FLUSHED))


def test_a_clock_that_was_set_back_does_not_turn_time_round(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with live(tiny(), folder) as server:
        task = server.client(0).next_task()
        assert task is not None
    told = json.loads((folder / "service.json").read_text())
    (folder / "service.json").write_text(json.dumps({**told, "founded": told["founded"] + 3600}))
    with live(tiny(), folder) as server:
        receipt = put(server.http(), task, body_of(task)).json()
    assert receipt["arrived"] >= receipt["started"]
    (folder / "service.json").write_text("")  # as a power cut may leave what was not synced
    with pytest.raises(InputError, match=r"service\.json cannot be read .* restore it"), live(tiny(), folder):
        pass


def test_a_server_cannot_name_a_file_that_its_clients_run(tmp_path: Path) -> None:
    trace, file = tmp_path / "trace", tmp_path / "mine.py"
    file.write_text(f"open({str(trace)!r}, 'w')\nclass Rule: pass\n")
    by_config({**tiny().table(), "strategy": {"name": f"{file}:Rule"}})
    assert not trace.exists()


def test_another_network_of_as_many_numbers_is_not_trained(tmp_path: Path) -> None:
    import numpy as np

    (tmp_path / "my.py").write_text(
        NET + "class Other(nn.Linear):\n    def __init__(self): super().__init__(66, 1)\n"
    )
    np.save(tmp_path / "inputs.npy", np.zeros((8, 66), "float32"))
    np.save(tmp_path / "targets.npy", np.zeros(8, "int64"))
    with live(tiny(), tmp_path / "run", own=f"{tmp_path / 'my.py'}:Net") as server:
        client = server.client(0)
        assert client.layout.size == 67
        train = by_own(client.about()["config"], f"{tmp_path / 'my.py'}:Other", tmp_path)
        with pytest.raises(InputError, match=r"Other is not the server's model: they differ at 0\.weight"):
            take_part(client, train, most=1)
        assert server.http().get("/v1/status").json()["updates"] == 0


def test_an_address_or_a_token_that_cannot_be_right_is_named(tmp_path: Path) -> None:
    for token in ("two\nlines", "caf\u00e9", " "):
        with pytest.raises(InputError, match="afield token add"):
            Client("http://127.0.0.1:1", token)
    with live(tiny(), tmp_path / "run") as server:
        client = Client(server.url + "/page/page.css?", "x")
        with client, pytest.raises(InputError, match="check the address"):
            client.about()


def test_the_command_line_from_end_to_end(tmp_path: Path) -> None:
    """serve, token, join with a network and data of one's own, status, promote; SIGTERM; SIGKILL; and on again."""
    import numpy as np

    (tmp_path / "my.py").write_text(NET)
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(60, 4)).astype("float32")
    np.save(tmp_path / "inputs.npy", inputs)
    np.save(tmp_path / "targets.npy", (inputs[:, 0] > 0).astype("int64") + (inputs[:, 1] > 0))
    net, out = f"{tmp_path / 'my.py'}:Net", tmp_path / "run"
    arguments = [
        "--port",
        "0",
        "--model",
        net,
        "--set",
        "scenario.clients=4",
        "--set",
        "strategy.size=2",
        "--strategy",
        "fedbuff",
    ]

    def afield(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "afield", *words], capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with Process(out, arguments) as process:
        url = process.url
        token = afield("token", "add", "--out", str(out), "--clients", "0-3").strip()
        told = afield(
            "join",
            url,
            "--token",
            token,
            "--clients",
            "0-3",
            "--model",
            net,
            "--data",
            str(tmp_path),
            "--tasks",
            "5",
        )
        assert told == "20 updates were accepted\n"
        operator = ["--token-file", str(tmp_path / "run.keys" / "operator.token")]
        assert "version  10" in afield("status", url, *operator)
        assert afield("promote", url, *operator) == "promoted: version 10\n"
        assert process.terminate() == 0
    with Process(out, arguments) as process:
        with Client(process.url, process.token, client=1, patience=30.0) as client:
            assert client.status()["version"] == 10
            task = client.next_task()
            assert task is not None
        process.kill()
    with (
        Process(out, arguments) as process,
        httpx.Client(base_url=process.url, headers={"Authorization": f"Bearer {process.token}"}) as http,
    ):
        assert put(http, task, body_of(task)).json()["number"] == task.number


@pytest.mark.parametrize(("host", "remedy"), [("203.0.113.9", "--host"), ("127.0.0.1", "--port")])
def test_an_address_that_cannot_be_listened_on(host: str, remedy: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = Listen(host=host, port=taken.getsockname()[1], insecure=True)
        with pytest.raises(InputError, match=rf"cannot be listened on \(.*\): choose another {remedy}"):
            bound(listen)
