"""Run folders made by hand, and what `load` and `find` make of them, whole and broken."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from afield.core.types import Receipt
from afield.reports.load import RECEIPTS, LoadError, find, load

ROW: dict[str, Any] = {"time": 0.0, "wall": 0.1, "version": 0, "updates": 0, "bytes": 0, "loss": 2.3}


def receipt(number: int, staleness: int = 0, refused: str = "") -> dict[str, Any]:
    whole = {"number": number, "client": 1, "base": 0, "examples": 10, "bytes": 8, "version": number}
    parts = {"started": 0.0, "arrived": 1.0, "weight": 0.5, "stepped": True, "hold": False}
    return {**whole, **parts, "staleness": staleness, "refused": refused}


def write(folder: Path, label: str = "fedbuff", seed: int = 0, finished: bool = True) -> Path:
    """A whole run of two evaluations and three receipts in two parts."""
    (folder / "receipts").mkdir(parents=True)
    (folder / "config.toml").write_text(f'label = "{label}"\nseed = {seed}\n[strategy]\nname = "fedbuff"\n')
    lines = [json.dumps(ROW), json.dumps({**ROW, "time": 5.0, "updates": 3, "accuracy": 0.5})]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    parts = [[receipt(0), receipt(1, staleness=2)], [receipt(2, refused="stale")]]
    for i, rows in enumerate(parts):
        table = pa.Table.from_pylist(rows, schema=RECEIPTS)
        pq.write_table(table, folder / "receipts" / f"{i:05d}.parquet")
    if finished:
        (folder / "summary.json").write_text("{}")
    return folder


def test_the_columns_are_the_receipts_fields() -> None:
    assert RECEIPTS.names == [field.name for field in dataclasses.fields(Receipt)]


def test_a_whole_run(tmp_path: Path) -> None:
    run = load(write(tmp_path / "a", label="ours", seed=3))
    assert (run.folder, run.label, run.seed, run.finished) == (tmp_path / "a", "ours", 3, True)
    assert run.config == {"label": "ours", "seed": 3, "strategy": {"name": "fedbuff"}}
    assert [row["time"] for row in run.metrics] == [0.0, 5.0]
    assert [row["time"] for row in run.series("accuracy")] == [5.0]
    assert run.receipts.column_names == RECEIPTS.names
    assert run.receipts["number"].to_pylist() == [0, 1, 2]
    assert run.receipts["refused"].to_pylist() == ["", "", "stale"]
    assert run.columns(["staleness"]).to_pydict() == {"staleness": [0, 2, 0]}


def test_receipts_are_read_only_when_asked_for(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / "receipts" / "00001.parquet").write_bytes(b"not parquet")
    run = load(folder)
    with pytest.raises(LoadError, match=r"00001\.parquet cannot be read"):
        _ = run.receipts


def test_a_part_without_a_column(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    pq.write_table(pa.table({"number": [3]}), folder / "receipts" / "00002.parquet")
    with pytest.raises(LoadError, match=r"00002\.parquet has no column 'client'"):
        _ = load(folder).receipts


def test_an_unfinished_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"time": 9.0, "wa')  # the writer was stopped here
    run = load(folder)
    assert not run.finished
    assert [row["time"] for row in run.metrics] == [0.0, 5.0]


def test_a_run_stopped_before_anything_was_written(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('label = "x"\nseed = 1\n')
    run = load(tmp_path)
    assert (run.finished, run.metrics, run.receipts.num_rows) == (False, [], 0)
    assert run.receipts.schema == RECEIPTS


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.toml", None, "config.toml is missing"),
        ("config.toml", "label = ", "config.toml cannot be read"),
        ("config.toml", "seed = 1", "config.toml has no 'label' that is a string"),
        ("config.toml", 'label = "a"\nseed = "one"', "config.toml has no 'seed' that is a whole number"),
        ("summary.json", "{", "summary.json cannot be read"),
        ("summary.json", "[]", "summary.json is not a JSON object"),
        ("metrics.jsonl", None, "metrics.jsonl is missing"),
        ("metrics.jsonl", '{"time": 1', "metrics.jsonl, line 1 is not JSON"),
        ("metrics.jsonl", f"{json.dumps(ROW)}\n[1]\n", "metrics.jsonl, line 2 is not a JSON object"),
        ("metrics.jsonl", '{"time": 1, "wall": 1, "version": 1}', "line 1 has no number 'updates'"),
    ],
)
def test_a_broken_run_names_its_file(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    folder = write(tmp_path / "a")
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(LoadError) as caught:
        load(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_finished_run_without_receipts(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    for part in (folder / "receipts").iterdir():
        part.unlink()
    with pytest.raises(LoadError, match=r"receipts has no \*\.parquet file"):
        _ = load(folder).receipts


def test_find_goes_two_folders_down_and_takes_each_run_once(tmp_path: Path) -> None:
    for name in ("sweep/a/seed-10", "sweep/a/seed-2", "sweep/b", "other", "deep/1/2/3"):
        write(tmp_path / name)
    write(tmp_path / "other" / "within")  # a run folder is not searched for others

    def names(*paths: str) -> list[str]:
        return [run.folder.relative_to(tmp_path).as_posix() for run in find(tmp_path / p for p in paths)]

    assert names("sweep") == ["sweep/a/seed-2", "sweep/a/seed-10", "sweep/b"]
    assert names("other", "sweep/b", "sweep") == ["other", "sweep/b", "sweep/a/seed-2", "sweep/a/seed-10"]
    with pytest.raises(LoadError, match=r"deep holds no run: no config\.toml in it, nor up to 2 folders"):
        names("deep")
    with pytest.raises(LoadError, match="nowhere is not a folder"):
        names("other", "nowhere")


def test_runs_of_an_experiment_keep_its_order(tmp_path: Path) -> None:
    for name in ("a-0", "b-0", "c-0", "extra"):
        write(tmp_path / name, name)
    file = tmp_path / "experiment.toml"
    file.write_text("".join(f'[[runs]]\nfolder = "{name}"\n' for name in ("c-0", "a-0", "gone-0", "b-0")))
    assert [run.label for run in find([tmp_path])] == ["c-0", "a-0", "b-0", "extra"]
    for broken in ("not toml", "runs = 3", "[[runs]]\n", '[[runs]]\nfolder = ""\n'):
        file.write_text(broken)
        assert [run.label for run in find([tmp_path])] == ["a-0", "b-0", "c-0", "extra"]


def test_runs_of_one_label_that_are_not_its_seeds_are_told_apart(tmp_path: Path) -> None:
    """A mean over other settings, or over one run twice, is no mean over seeds."""
    for seed in (0, 1):
        write(tmp_path / "old" / f"seed-{seed}", label="mixing", seed=seed)
        write(tmp_path / "new" / f"seed-{seed}", label="mixing", seed=seed)
        write(tmp_path / "new" / f"other-{seed}", label="other", seed=seed)
        with (tmp_path / "new" / f"seed-{seed}" / "config.toml").open("a") as file:
            file.write("size = 3\n")
    labels = [run.label for run in find([tmp_path])]
    assert labels == ["other", "other", "mixing (new)", "mixing (new)", "mixing (old)", "mixing (old)"]
    assert {run.label for run in find([tmp_path / "new"])} == {"other", "mixing"}
    # the same settings: the same seed twice is one run twice, others are more seeds
    write(tmp_path / "more" / "one", label="mixing", seed=1)
    write(tmp_path / "more" / "two", label="mixing", seed=2)
    again = find([tmp_path / "old" / "seed-1", tmp_path / "more" / "one"])
    assert [run.label for run in again] == ["mixing (old)", "mixing (more)"]
    assert {run.label for run in find([tmp_path / "old", tmp_path / "more" / "two"])} == {"mixing"}


def test_single_runs_of_one_label_are_named_by_their_folders(tmp_path: Path) -> None:
    for name, rate in (("race-001", 0.1), ("race-002", 0.2)):
        with (write(tmp_path / name) / "config.toml").open("a") as file:
            file.write(f"[local]\nrate = {rate}\n")
        (tmp_path / name / "experiment.toml").write_text("format = 1\n")
    assert [run.label for run in find([tmp_path])] == ["fedbuff (race-001)", "fedbuff (race-002)"]


def test_what_a_machine_decides_does_not_tell_seeds_apart(tmp_path: Path) -> None:
    for seed, (threads, method) in enumerate(((1, "vmap"), (2, "workers"))):
        with (write(tmp_path / f"seed-{seed}", seed=seed) / "config.toml").open("a") as file:
            file.write(f'[runtime]\nthreads = {threads}\n[training]\nmethod = "{method}"\n')
    assert {run.label for run in find([tmp_path])} == {"fedbuff"}
