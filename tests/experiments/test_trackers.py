"""Trackers: the real packages are written to, then read back and compared with the run folder."""

from __future__ import annotations

import csv
import json
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stopping import in_pieces
from tiny import rows_of, tiny

from afield.cli import main
from afield.core.errors import InputError
from afield.experiments.config import experiment
from afield.experiments.run import prepare
from afield.experiments.sweep import prepare_all, run_together
from afield.experiments.trackers import TRACKERS, Log, flat
from afield.experiments.tracking import Trackers, send

ALL = tuple(TRACKERS)
SKIPPED = {"noise": None, "text": "x", "flag": True}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that told every tracker."""
    for name in ALL:
        pytest.importorskip(TRACKERS[name].package)
    place = tmp_path_factory.mktemp("trackers") / "sweep" / "fedasync-0"
    rows_of(tiny(log=settings(place)), place)
    return place


def settings(place: Path) -> dict[str, Any]:
    return {"to": list(ALL), "uri": f"sqlite:///{place.parent.parent}/mlflow.db", "offline": True}


def rows_in(place: Path) -> list[dict[str, float]]:
    lines = (place / "metrics.jsonl").read_text().splitlines()
    return [dict(flat(json.loads(line))) for line in lines]


# -- reading back -------------------------------------------------------------------------------------------


def of_csv(place: Path) -> list[dict[str, float]]:
    with (place / "metrics.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def of_tensorboard(place: Path) -> list[dict[str, float]]:
    """By step, which is unique in these runs: a scalar that was written twice is there twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(place / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    rows: dict[int, dict[str, float]] = {}
    for name in found.Tags()["scalars"]:
        if not name.startswith("summary/"):
            for event in found.Scalars(name):
                assert name not in rows.setdefault(event.step, {})
                rows[event.step][name] = event.value
    return [rows[step] for step in sorted(rows)]


def of_wandb(place: Path) -> list[dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for record in wandb_records(place):
        if record.WhichOneof("record_type") == "history":
            assert record.history.step.num not in found
            items = {named(item): json.loads(item.value_json) for item in record.history.item}
            found[record.history.step.num] = {k: v for k, v in items.items() if not k.startswith("_")}
    assert list(found) == list(range(len(found)))
    return list(found.values())


def wandb_records(place: Path) -> Iterator[Any]:
    """The records of all offline sessions, in LevelDB's log format: blocks of 32 kB, records in parts."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(place.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = file.read_bytes(), 7, b""
        assert data[:4] == b":W&B"
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            whole += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last part
                record = wandb_internal_pb2.Record()
                record.ParseFromString(whole)
                yield record
                whole = b""


def named(item: Any) -> str:
    return str(item.key or ".".join(item.nested_key))


def of_mlflow(place: Path) -> list[dict[str, float]]:
    client, run = mlflow_run(place)
    rows: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        if not name.startswith("summary."):
            for metric in client.get_metric_history(run.info.run_id, name):
                assert name not in rows.setdefault(metric.step, {})
                rows[metric.step][name] = metric.value
    return [rows[step] for step in sorted(rows)]


def mlflow_run(place: Path) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{place.parent.parent}/mlflow.db")
    known = json.loads((place / "trackers.json").read_text())["mlflow"]
    return client, client.get_run(known["id"])


READERS = {"csv": of_csv, "tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}


# -- what they were told ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_row_is_there_once(ran: Path, name: str) -> None:
    rows = rows_in(ran)
    assert len(rows) == 6  # versions 0, 4, ..., 20
    assert "per_class.9" in rows[0] and "groups.slow" in rows[0]
    # the event files of TensorBoard hold float32
    assert READERS[name](ran) == [
        pytest.approx(row, rel=1e-6 if name == "tensorboard" else 0) for row in rows
    ]


def test_mlflow_knows_config_group_and_summary(ran: Path) -> None:
    _, run = mlflow_run(ran)
    assert run.info.run_name == "fedasync-0"
    assert run.info.status == "FINISHED"
    assert run.data.tags["group"] == "sweep"
    assert run.data.params["strategy.name"] == "fedasync"
    assert run.data.params["scenario.delay.sigma"] == "0.8"
    summary = json.loads((ran / "summary.json").read_text())
    assert run.data.metrics["summary.contributors"] == summary["contributors"]
    assert run.data.tags["ended"] == summary["ended"] == "updates"


def test_wandb_knows_config_group_and_summary(ran: Path) -> None:
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for record in wandb_records(ran):
        if record.WhichOneof("record_type") == "run":
            assert (record.run.project, record.run.run_group) == ("afield", "sweep")
            assert record.run.display_name == "fedasync-0"
            config |= {named(item): json.loads(item.value_json) for item in record.run.config.update}
        elif record.WhichOneof("record_type") == "summary":
            summary |= {named(item): json.loads(item.value_json) for item in record.summary.update}
    assert config["strategy"]["name"] == "fedasync"
    assert config["scenario"]["delay"]["sigma"] == 0.8
    assert summary["summary.ended"] == "updates"
    assert summary["summary.updates"] == 20


def test_tensorboard_knows_config_and_summary(ran: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(ran / "tensorboard"))
    found.Reload()
    (text,) = found.Tensors("config/text_summary")
    assert 'name = "fedasync"' in text.tensor_proto.string_val[0].decode()
    (updates,) = found.Scalars("summary/updates")
    assert (updates.value, updates.step) == (20, 20)
    assert "_hparams_/session_start_info" in found.summary_metadata


# -- stopped, taken up, sent later --------------------------------------------------------------------------


def test_a_run_that_goes_on_tells_nothing_twice(ran: Path, tmp_path: Path) -> None:
    """Killed after row 5 with a snapshot at row 3: the folder is cut there, and rows 3 and 4 come again."""
    place = tmp_path / "sweep" / "fedasync-0"
    place.mkdir(parents=True)
    text = (ran / "config.toml").read_text()
    log = Log(**{**settings(place), "to": ALL})
    lines = (ran / "metrics.jsonl").read_text().splitlines(keepends=True)
    summary = json.loads((ran / "summary.json").read_text())
    for start, stop in ((0, 5), (3, 6)):
        metrics = place / "metrics.jsonl"
        metrics.write_text("".join(lines[:start]))
        told = Trackers(place, text, log)
        told.open()
        for line in lines[start:stop]:
            with metrics.open("a") as file:
                file.write(line)
            told.row(json.loads(line))
        assert told.close(summary if stop == 6 else None) == []
        assert mlflow_run(place)[1].info.status == ("FINISHED" if stop == 6 else "KILLED")
    for name, read in READERS.items():
        expected = [pytest.approx(row, rel=1e-6) for row in rows_in(ran)]
        assert read(place) == expected, name
    client, run = mlflow_run(place)
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_a_run_that_is_stopped_and_resumed_is_one_run_everywhere(ran: Path, tmp_path: Path) -> None:
    place = tmp_path / "sweep" / "fedasync-0"
    _, stops = in_pieces(tiny(log=settings(place)), place, 7)
    assert stops >= 2
    for name, read in READERS.items():
        assert read(place) == [pytest.approx(row, rel=1e-6) for row in rows_in(place)], name
    client, run = mlflow_run(place)
    assert len(client.search_runs([run.info.experiment_id])) == 1
    assert [{**row, "wall": 0} for row in rows_in(place)] == [{**row, "wall": 0} for row in rows_in(ran)]


def test_an_unreachable_server_costs_no_run_and_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as free:  # a port that nobody listens on
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
    place = tmp_path / "sweep" / "run"
    rows_of(tiny(log={"to": ["mlflow", "csv"], "uri": uri}), place)
    assert (place / "summary.json").is_file()
    assert of_csv(place) == rows_in(place)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "afield"]
    assert warning.startswith("mlflow was dropped: ")
    assert f"afield track {place} --to mlflow" in warning
    store = f"sqlite:///{tmp_path}/mlflow.db"
    command = ["afield", "track", str(tmp_path / "sweep"), "--to", "mlflow", "--uri", store]
    for _ in range(2):  # the second finds nothing to send
        monkeypatch.setattr("sys.argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        assert of_mlflow(place) == rows_in(place)
        client, run = mlflow_run(place)
        assert len(client.get_metric_history(run.info.run_id, "summary.updates")) == 1


def test_another_store_is_another_run(ran: Path, tmp_path: Path) -> None:
    place = tmp_path / "sweep" / "fedasync-0"
    shutil.copytree(ran, place)
    _, first = mlflow_run(ran)
    with (place / "metrics.jsonl").open("a") as file:
        file.write('{"time": 9')  # as a kill may leave it
    assert send(place, Log(to=("mlflow",), uri=f"sqlite:///{tmp_path}/mlflow.db")) == []
    _, second = mlflow_run(place)
    assert second.info.run_id != first.info.run_id
    assert of_mlflow(place) == rows_in(ran)


def test_a_server_that_never_answers_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        uri = f"http://127.0.0.1:{mute.getsockname()[1]}"
        for name in ("run", "next"):
            rows_of(tiny(log={"to": ["mlflow"], "uri": uri, "patience": 0.1}), tmp_path / name)
            assert (tmp_path / name / "summary.json").is_file()
    assert "mlflow was dropped: did not answer within 0.1 s" in caplog.text
    assert f"mlflow is not told of {tmp_path / 'next'}: it did not answer before" in caplog.text


def test_a_tracker_that_fails_midway_is_dropped_alone(
    ran: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """metrics.csv cannot be written once a folder stands in its place."""
    place = tmp_path / "run"
    place.mkdir()
    (place / "metrics.csv").mkdir()
    for name in ("config.toml", "metrics.jsonl", "summary.json"):
        shutil.copy(ran / name, place)
    assert send(place, Log(to=("csv", "tensorboard"))) == ["csv"]
    assert "csv was dropped: IsADirectoryError" in caplog.text
    assert len(of_tensorboard(place)) == 6


def test_the_runs_of_a_sweep_are_one_group(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    store = f"sqlite:///{tmp_path}/mlflow.db"
    table = tiny(log={"to": ["mlflow", "csv"], "uri": store}).table()
    del table["seed"]
    chosen = experiment({**table, "seeds": [0, 1]})
    places = [tmp_path / "sweep" / f"tiny-{seed}" for seed in (0, 1)]
    for _ in run_together(prepare_all(chosen.runs), places):
        pass
    client = MlflowClient(tracking_uri=store)
    (number,) = [e.experiment_id for e in client.search_experiments() if e.name == "afield"]
    runs = client.search_runs([number], filter_string="tags.group = 'sweep'")
    assert {run.info.run_name for run in runs} == {"tiny-0", "tiny-1"}
    assert {run.data.params["seed"] for run in runs} == {"0", "1"}
    for place in places:
        assert of_mlflow(place) == of_csv(place) == rows_in(place)


# -- what cannot be used ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_ends_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)  # what Python does where an import is blocked
    with pytest.raises(InputError, match=rf"'{name}', and its package is not installed .*afield\[{name}\]"):
        prepare(tiny(log={"to": [name], "offline": True}))
    with pytest.raises(InputError, match="not installed"):
        Trackers(tmp_path / "run", f'[log]\nto = ["{name}"]\noffline = true\n')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": ["tensorbord"]}, "did you mean 'tensorboard'"),
        ({"to": ["csv", "csv"]}, "names 'csv' twice"),
        ({"to": "csv"}, "log.to"),
        (
            {"uri": "file:///tmp/x"},
            "is a folder, which mlflow refuses: give a server, or a database as 'sqlite:///mlflow.db'",
        ),
        ({"uri": "mlruns"}, "is a folder"),
        ({"patience": -1.0}, "patience = -1.0 is outside"),
        ({"project": ""}, "project is empty"),
        ({"where": "x"}, "log.where"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny(log=changes)


def test_wandb_without_a_key_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(InputError, match=r"no key here: wandb login, or log\.offline = true"):
        prepare(tiny(log={"to": ["wandb"]}))
    prepare(tiny(log={"to": ["wandb"], "offline": True}))


def test_only_numbers_are_flat_unless_all_is_asked_for() -> None:
    row = {"a": 1, "b": {"c": 2.5, **SKIPPED}, "d": [3, None, [4]]}
    assert dict(flat(row)) == {"a": 1, "b.c": 2.5, "d.0": 3, "d.2.0": 4}
    assert dict(flat(row, every=True)) == {
        **{"a": 1, "b.c": 2.5, "b.text": "x", "b.flag": True},
        "d": "[3, None, [4]]",
    }
