"""A run folder: what is in it, in which order, and that nothing is ever written over."""

from __future__ import annotations

import json
import os
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from tiny import rows_of, tiny

from afield.core.errors import InputError
from afield.core.types import Receipt
from afield.experiments import folder as folders
from afield.experiments.config import config
from afield.experiments.folder import RunFolder, check_new, environment, new_folder, write_whole
from afield.experiments.run import prepare, run
from afield.reports import load

ROW = Receipt(0, 3, 0, 0.0, 1.5, 7, 40, 0, 0.6, True, 1)


def test_what_a_finished_run_leaves(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "run"
    receipts, measured = rows_of(tiny("fedbuff"), place)
    assert sorted(path.name for path in place.iterdir()) == [
        "clients.json",
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "model.safetensors",
        "receipts",
        "summary.json",
    ]
    assert [path.name for path in (place / "receipts").iterdir()] == ["00000.parquet"]
    found = load.load(place)
    assert found.finished
    assert (found.label, found.seed) == ("tiny", 0)
    assert found.receipts.schema == load.RECEIPTS
    assert [tuple(row.values()) for row in found.receipts.to_pylist()] == [astuple(row) for row in receipts]
    assert found.metrics == [row.row() for row in measured]
    assert found.metrics[0]["time"] == 0.0
    assert found.metrics[-1]["updates"] == len(receipts) == 20


def test_the_config_is_complete_and_says_what_a_rule_chose(tmp_path: Path) -> None:
    chosen = tiny()
    rows_of(chosen, tmp_path / "run")
    written = config(tomllib.loads((tmp_path / "run" / "config.toml").read_text()))
    assert written.runtime.threads == 1  # 650 parameters: a second thread would cost more than it gives
    assert written.runtime.block == 256
    assert written.training.method == "vmap"
    assert replace(written, runtime=chosen.runtime, training=chosen.training) == chosen


def test_the_model_loads_into_its_module(tmp_path: Path) -> None:
    chosen = tiny(model={"name": "mlp", "hidden": [4]})
    prepared = prepare(chosen)
    for _ in run(prepared, tmp_path / "run"):
        pass
    fresh = prepare(chosen).module
    fresh.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    vector = torch.cat([value.flatten() for value in fresh.state_dict().values()])
    assert torch.equal(vector, prepared.simulator.server.model())


def test_a_model_with_normalisation_statistics(tmp_path: Path) -> None:
    """Batch norm's statistics are part of the model, its integer counter is saved with it."""
    model = {"name": "fedasync-cnn", "dropout": 0.0}
    small = {"data": {"image": True, "limit": 15}}
    chosen = tiny("fedbuff", model=model, scenario=small, stop={"updates": 3}, runtime={"threads": 1})
    rows_of(chosen, tmp_path / "run")
    state = load_file(tmp_path / "run" / "model.safetensors")
    before = prepare(chosen).module.state_dict()
    assert state.keys() == before.keys()
    moved = [name for name in state if "running_mean" in name and not torch.equal(state[name], before[name])]
    assert len(moved) == 4


def test_the_environment_tells_versions_and_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hunter2-hunter2")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "bin" / "afield"), "run", "--seed", "1"])
    RunFolder(tmp_path / "run", "").close(None)
    text = (tmp_path / "run" / "environment.json").read_text()
    told = json.loads(text)
    assert told == environment()
    assert told.keys() == {"python", "platform", "cores", "packages", "cuda", "command"}
    assert told["command"] == ["afield", "run", "--seed", "1"]
    assert told["packages"]["torch"] == torch.__version__
    for private in ("hunter2", str(tmp_path), os.path.expanduser("~/")):
        assert private not in text


@pytest.mark.parametrize("content", ["file", "folder"])
def test_nothing_is_written_over(tmp_path: Path, content: str) -> None:
    place = tmp_path / "run"
    if content == "file":
        place.write_text("mine")
    else:
        place.mkdir()
        (place / "notes.txt").write_text("mine")
    for attempt in (check_new, new_folder, lambda path: RunFolder(path, "")):
        with pytest.raises(
            InputError, match=r"run exists and is never overwritten: choose another --out, or"
        ):
            attempt(place)
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(
        ["run", "notes.txt"][: 1 + place.is_dir()]
    )


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    for _ in range(2):
        new_folder(tmp_path / "a")
        assert list((tmp_path / "a").iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"run cannot be made: Not a directory; choose another --out$"):
        new_folder(tmp_path / "file" / "run")


def test_an_unfinished_run_has_no_model_but_all_its_receipts(tmp_path: Path) -> None:
    rows = run(prepare(tiny()), tmp_path / "run")
    seen = [next(rows) for _ in range(12)]
    rows.close()
    found = load.load(tmp_path / "run")
    assert not found.finished
    assert found.receipts.num_rows + len(found.metrics) == len(seen)
    assert found.receipts.num_rows == sum(isinstance(row, Receipt) for row in seen)


def test_a_run_that_fails_has_no_model(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(
        "import dataclasses\n"
        "import afield\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Broken(afield.FedAsync):\n"
        "    def receive(self, state, update):\n"
        "        if state.version == 6:\n"
        "            raise ZeroDivisionError('a mistake of mine')\n"
        "        return super().receive(state, update)\n"
    )
    chosen = tiny(f"{tmp_path / 'my.py'}:Broken")
    with pytest.raises(ZeroDivisionError, match="a mistake of mine"):
        rows_of(chosen, tmp_path / "run")
    found = load.load(tmp_path / "run")
    assert not found.finished
    assert found.receipts.num_rows == 6
    assert [row["version"] for row in found.metrics] == [0, 4]


def test_metrics_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    rows = run(prepare(tiny()), tmp_path / "run")
    next(rows)
    assert len(load.load(tmp_path / "run").metrics) == 1
    rows.close()


@pytest.mark.parametrize(("count", "files"), [(0, [0]), (1, [1]), (3, [3]), (4, [3, 1]), (7, [3, 3, 1])])
def test_receipts_are_split_into_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, files: list[int]
) -> None:
    monkeypatch.setattr(folders, "ROWS", 3)
    written = RunFolder(tmp_path / "run", 'label = "a"\nseed = 0\n')
    rows = [replace(ROW, number=number) for number in range(count)]
    for row in rows:
        written.receipt(row)
    written.close(torch.nn.Linear(1, 1), {})
    parts = sorted((tmp_path / "run" / "receipts").iterdir())
    assert [path.name for path in parts] == [f"{number:05d}.parquet" for number in range(len(files))]
    assert [parquet.read_metadata(path).num_rows for path in parts] == files
    found = load.load(tmp_path / "run").receipts
    assert found.schema == load.RECEIPTS
    assert [tuple(row.values()) for row in found.to_pylist()] == [astuple(row) for row in rows]


def test_a_file_that_several_write_is_whole_at_any_moment(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    texts = [json.dumps([number] * 2000 * (number + 1)) for number in range(4)]
    write_whole(file, texts[0], alone=False)

    def often(text: str) -> None:
        for _ in range(50):
            write_whole(file, text, alone=False)

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(often, text) for text in texts]
        seen = {file.read_text()}
        while not all(writer.done() for writer in writers):
            seen.add(file.read_text())
    for writer in writers:
        writer.result()
    assert seen <= set(texts)
    assert [part.name for part in tmp_path.iterdir()] == ["plan.json"]
