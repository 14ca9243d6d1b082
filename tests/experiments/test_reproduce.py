"""Presets of papers: their cells, what is run and kept, and what the result says, on a preset of a second."""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tinypaper import TABLE, quiet, written

from afield.core.errors import InputError
from afield.experiments.codec import dumps, merge
from afield.experiments.paper import load_preset, preset
from afield.experiments.plan import read_plan
from afield.experiments.reproduce import carry_out, reproduce
from afield.experiments.tune import tune
from afield.reports.load import load
from afield.reports.noise import Spread
from afield.reports.tables import compare
from afield.training.models import MODELS, Mlp


def names(folder: Path) -> list[str]:
    return sorted(f"{p.parent.parent.name}/{p.parent.name}" for p in folder.glob("*/*/summary.json"))


def stamps(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/*/summary.json")}


# -- cells ----------------------------------------------------------------------------------------------


def test_cells_are_rows_by_columns_with_their_own_settings() -> None:
    cells = preset(TABLE).cells()
    assert [(cell.row, cell.column) for cell in cells] == [
        ("mixing", "even"),
        ("mixing", "uneven"),
        ("rolling", "even"),
        ("rolling", "uneven"),
        ("adding", "even"),
    ]
    configs = [cell.configs([0, 1]) for cell in cells]
    assert [[run.seed for run in runs] for runs in configs] == [[0, 1]] * 5
    assert [configs[2][0].strategy.decay, configs[3][0].strategy.decay] == [0.9, 0.7]  # type: ignore[attr-defined]
    assert [runs[0].scenario.partition.__class__.__name__ for runs in configs[:2]] == ["IID", "Dirichlet"]
    assert configs[3][0].label == "rolling, uneven"
    assert cells[3].folder == "rolling--uneven"


def test_scales_cut_down() -> None:
    made = preset(TABLE)
    assert (made.seeds("paper"), made.seeds("smoke"), made.seeds("small")) == ((0, 1), (3,), (0, 1))
    assert [(cell.row, cell.column) for cell in made.cells("small")] == [("mixing", "even")]
    runs = {cell.label: cell.configs([3])[0] for cell in made.cells("smoke")}
    assert {run.stop.updates for run in runs.values()} == {8}
    assert [label for label, run in runs.items() if run.local.rate == 0.1] == [
        "rolling, even",
        "rolling, uneven",
    ]


def test_only_restricts_the_axes_that_it_names() -> None:
    made = preset(TABLE)
    assert [cell.label for cell in made.cells(only=["uneven"])] == ["mixing, uneven", "rolling, uneven"]
    assert [cell.label for cell in made.cells(only=["rolling", "even"])] == ["rolling, even"]
    with pytest.raises(
        InputError, match="'roling' is no row, column or variant of tiny; did you mean 'rolling'"
    ):
        made.cells(only=["roling"])


def test_a_row_that_no_column_changes_is_run_once_and_shown_in_all(tmp_path: Path) -> None:
    rows = [
        {**entry, "alike": True} if entry["label"] == "mixing" else entry
        for entry in TABLE["rows"]
        if entry["label"] != "adding"
    ]
    made = preset({**TABLE, "rows": rows, "theirs": {}, "scales": {}})
    cells = made.cells()
    assert [cell.folder for cell in cells] == ["mixing", "mixing", "rolling--even", "rolling--uneven"]
    assert [cell.column for cell in cells] == ["even", "uneven"] * 2
    assert cells[0].configs([0]) == cells[1].configs([0])
    assert [cell.folder for cell in made.cells(only=["uneven", "mixing"])] == ["mixing"]
    carry_out(made, tmp_path / "out", scale="paper", seeds=[0], settings=["stop.updates=8"], say=quiet)
    assert names(tmp_path / "out") == ["mixing/seed-0", "rolling--even/seed-0", "rolling--uneven/seed-0"]
    (line,) = [
        text for text in (tmp_path / "out/result.md").read_text().splitlines() if text.startswith("| mixing ")
    ][:1]
    shown = [part.strip() for part in line.strip("|").split("|")][1:]
    assert shown[0] == shown[1] != ""
    with pytest.raises(InputError, match="columns: 'even' is alike = true: only rows can be"):
        preset({**TABLE, "rows": [], "theirs": {}, "columns": [{"label": "even", "alike": True}]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paper": {"kind": "pie"}}, "kind = 'pie' is not known"),
        ({"paper": {"wat": 1}}, "paper.wat"),
        ({"rows": [{"strategy": "asgd"}]}, r"rows\[0\] has no label"),
        ({"rows": [{"label": "a"}, {"label": "a"}]}, "two of rows are labelled 'a'"),
        ({"rows": 3}, r"rows is not an array of tables: write \[\[rows\]\]"),
        ({"theirs": {"mixin": [1, 2]}}, "theirs names the row 'mixin'; did you mean 'mixing'"),
        ({"theirs": {"mixing": [1]}}, "is not an array of 2, one per column"),
        ({"theirs": {"mixing": [1, [1, 2, 3]]}}, r"write a number, \[mean, std\], or \[\]"),
        ({"scales": {"tiny": {}}}, "scales = 'tiny' is not known"),
        ({"scales": {"smoke": {"stops": {}}}}, "scales.smoke.stops is not a key; did you mean 'stop'"),
        ({"scales": {"smoke": {"rows": {"mix": {}}}}}, "scales.smoke.rows names 'mix'"),
        ({"columns": [{"label": "even", "at": {"odd": {}}}]}, "'even' names 'odd'"),
        ({"grid": {"local.rate": 0.1}}, "grid.local.rate = 0.1 is not an array"),
    ],
)
def test_bad_presets_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    theirs = {} if "rows" in change or "columns" in change else TABLE["theirs"]
    rows = [] if "columns" in change else TABLE["rows"]
    with pytest.raises(InputError, match=f"^preset tiny: .*{message}"):
        preset(merge({**TABLE, "theirs": theirs, "rows": rows}, change))


def test_labels_that_make_one_folder() -> None:
    rows = [{"label": "a b"}, {"label": "a-b"}]
    with pytest.raises(InputError, match="tiny: 2 cells make the folder 'a-b--even'"):
        preset({**TABLE, "rows": rows, "theirs": {}, "scales": {}}).cells()


def test_names_that_are_no_preset() -> None:
    with pytest.raises(InputError, match=r"mr-asyncfl-table-3 is neither .* did you mean 'mr-asyncfl-table-"):
        load_preset("mr-asyncfl-table-3")
    with pytest.raises(InputError, match=r"default has no \[paper\] table"):
        load_preset("default")


# -- runs and results -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole tiny preset, run once."""
    folder = tmp_path_factory.mktemp("whole")
    return reproduce(written(folder), out=folder / "out", say=quiet)


def test_every_cell_and_seed_has_a_light_run_folder(made: Path) -> None:
    cells = ["adding--even", "mixing--even", "mixing--uneven", "rolling--even", "rolling--uneven"]
    assert names(made) == sorted(f"{cell}/seed-{seed}" for cell in cells for seed in (0, 1))
    assert not list(made.rglob("model.safetensors"))
    run = load(made / "mixing--even" / "seed-1")
    assert (run.label, run.seed, run.summary["updates"], run.summary["ended"]) == (
        "mixing, even",
        1,
        20,
        "updates",
    )


def test_the_summary_is_what_the_log_says(made: Path) -> None:
    run = load(made / "rolling--uneven" / "seed-0")
    log = run.receipts.to_pylist()
    assert run.summary["contributors"] == len({row["client"] for row in log})
    assert run.summary["staleness"] == pytest.approx(statistics.fmean(row["staleness"] for row in log))
    assert run.summary["bytes"] == sum(row["bytes"] for row in log)
    steps = sum(-(-row["examples"] // 8) for row in log)
    assert run.summary["steps"] == run.metrics[-1]["steps"] == steps
    assert run.summary["device"] == "cpu"
    # w, one row per heard client, w_0, a float64 sum, and stamps and sizes of 8 bytes a client
    width = 650
    rows = 4 * width * (1 + run.summary["contributors"] + 1) + 8 * width + 2 * 8 * 6
    assert run.summary["server_bytes"] == rows


def test_the_table_has_means_over_seeds_beside_theirs(made: Path) -> None:
    text = (made / "result.md").read_text()
    best = [
        100 * max(row["accuracy"] for row in load(made / "mixing--even" / f"seed-{seed}").metrics)
        for seed in (0, 1)
    ]
    ours = f"{statistics.fmean(best):.2f} ± {statistics.stdev(best):.2f}"
    assert f"| mixing | {ours} | 80.00 ± 1.00 |" in text
    assert "|  | even | paper | uneven | paper |" in text
    rolling = next(line for line in text.splitlines() if line.startswith("| rolling | "))
    assert rolling.split(" | ")[2] == "60.50"  # no deviation of theirs
    assert rolling.endswith(" | - |")  # and none at all in the second column
    assert "- Runs: 10; 5 of 5 cells have all of the seeds 0, 1" in text
    assert "Everything; we chose." in text
    for word in ("best accuracy (%)", "final accuracy (%)", "test loss", "training loss", "wall time (s)"):
        assert word in text
    assert "Stand-in" not in text


def test_the_csv_has_every_number(made: Path) -> None:
    with (made / "result.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["row"], row["column"], row["seeds"]) for row in rows][-1] == ("adding", "even", "2")
    for row in rows:
        runs = [load(made / f"{row['row']}--{row['column']}" / f"seed-{seed}") for seed in (0, 1)]
        losses = [run.metrics[-1]["train_loss"] for run in runs]
        assert float(row["train_loss"]) == pytest.approx(statistics.fmean(losses))
        assert float(row["train_loss_std"]) == pytest.approx(statistics.stdev(losses))
    assert (rows[0]["paper"], rows[0]["paper_std"], rows[1]["paper"]) == ("80.0", "1.0", "70.0")


def test_the_ranking_is_computed(made: Path) -> None:
    means = {}
    for row in ("mixing", "rolling", "adding"):
        runs = [load(made / f"{row}--even" / f"seed-{seed}") for seed in (0, 1)]
        means[row] = statistics.fmean(max(r["accuracy"] for r in run.metrics) for run in runs)
    order = sorted(means, key=lambda name: -means[name])
    text = (made / "result.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("- **even** (by best accuracy)"))
    assert f"Ours: {' > '.join(order)}." in line
    pairs = [("mixing", "rolling"), ("mixing", "adding"), ("rolling", "adding")]
    agree = sum(means[first] > means[second] for first, second in pairs)
    assert ("the same order" in line) if agree == 3 else (f"{agree} of 3 pairs agree" in line)
    assert "**uneven**" not in text.split("## Does")[1].split("##")[0]  # theirs has one method there


# -- going on ---------------------------------------------------------------------------------------------


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    name, out = written(tmp_path), tmp_path / "out"
    reproduce(name, scale="smoke", out=out, only=["mixing"], say=quiet)
    assert names(out) == ["mixing--even/seed-3", "mixing--uneven/seed-3"]
    text = (out / "result.md").read_text()
    assert "2 of 5 cells have all of the seeds 3" in text
    assert "| rolling | - | 60.50 | - | - |" in text
    before = stamps(out)

    stopped = out / "rolling--even" / "seed-3"  # as an interrupted run leaves it
    stopped.mkdir(parents=True)
    (stopped / "config.toml").write_text("half")
    said: list[str] = []
    reproduce(name, scale="smoke", out=out, seeds=[3, 4], only=["even"], say=said.append)
    assert said[0].startswith("tiny: 6 runs, 1 of them are there")
    assert [line.split("]")[0] for line in said[1:]] == [f"[{n}/5" for n in range(1, 6)]
    after = stamps(out)
    assert before.items() <= after.items()  # what was there is as it was
    assert len(after) == 2 + 5

    reproduce(name, scale="smoke", out=out, seeds=[3, 4], collect=True, say=quiet)
    assert stamps(out) == after
    # runs that were trained in another way fill the same table
    reproduce(name, scale="smoke", out=out, seeds=[3, 4], settings=["training.method=loop"], say=said.append)
    assert len(stamps(out)) == 2 * 5 and after.items() <= stamps(out).items()
    assert "--seeds 3,4`" in (out / "result.md").read_text()


def test_a_run_of_other_settings_is_refused(tmp_path: Path) -> None:
    name, out = written(tmp_path), tmp_path / "out"
    reproduce(name, scale="smoke", out=out, only=["mixing", "even"], say=quiet)
    with pytest.raises(
        InputError, match=r"seed-3 was run with local\.rate = 0\.2, which is 0\.3 now: choose another"
    ):
        reproduce(name, scale="smoke", out=out, settings=["local.rate=0.3"], say=quiet)
    with pytest.raises(InputError, match="seed-3 was run with"):
        reproduce(name, scale="paper", out=out, say=quiet)
    # threads, blocks and the way of training belong to the machine
    reproduce(name, scale="smoke", out=out, only=["mixing"], settings=["runtime.threads=2"], say=quiet)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    with pytest.raises(InputError, match="mine exists and holds no reproduction"):
        reproduce(name, scale="smoke", out=tmp_path / "mine", say=quiet)


def test_another_preset_in_the_folder_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    reproduce(written(tmp_path), scale="smoke", out=out, collect=True, say=quiet)
    with pytest.raises(InputError, match="out holds name 'tiny', not 'other'"):
        reproduce(written(tmp_path, name="other"), scale="smoke", out=out, say=quiet)


def test_together_gives_the_same(tmp_path: Path, made: Path) -> None:
    name = written(tmp_path, sweep={"together": True, "limit": 3})
    out = reproduce(name, out=tmp_path / "out", only=["mixing"], say=quiet)
    assert sorted(load(p.parent).summary["together"] for p in out.glob("*/*/summary.json")) == [1, 3, 3, 3]
    for cell in ("mixing--even", "mixing--uneven"):
        ours, alone = (load(folder / cell / "seed-1") for folder in (out, made))
        assert ours.receipts.equals(alone.receipts)


@pytest.mark.parametrize("together", [False, True])
def test_shares_fill_one_folder(tmp_path: Path, together: bool) -> None:
    name = written(tmp_path, sweep={"together": together, "limit": 2})
    whole, out = tmp_path / "whole", tmp_path / "out"
    reproduce(name, scale="smoke", out=whole, seeds=[3, 4], say=quiet)
    before: dict[Path, int] = {}
    for share in ((2, 3), (1, 3), (3, 3)):
        said: list[str] = []
        reproduce(name, scale="smoke", out=out, seeds=[3, 4], share=share, say=said.append)
        assert before.items() <= stamps(out).items() and len(before) < len(stamps(out))
        assert f"{len(stamps(out)) - len(before)} runs, 0 of them are there" in said[0]
        before = stamps(out)
    assert names(out) == names(whole)
    assert (out / "result.csv").read_text() != ""
    for place in names(out):
        assert load(out / place).receipts.equals(load(whole / place).receipts)
    assert not list(out.glob("store*"))


def test_a_share_may_begin_while_another_writes_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".plan.json.7-7.draft").write_text("{")
    reproduce(written(tmp_path), scale="smoke", out=out, collect=True, say=quiet)
    assert json.loads((out / "plan.json").read_text())["scale"] == "smoke"


@pytest.mark.parametrize("share", [(0, 3), (4, 3), (1, 0), (-1, -1)])
def test_a_share_that_is_none(tmp_path: Path, share: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"share -?\d/-?\d is none: give 1/[23] to [23]/[23]"):
        reproduce(written(tmp_path), scale="smoke", out=tmp_path / "out", share=share, say=quiet)
    assert not (tmp_path / "out").exists()


def test_the_data_folder_is_set_for_the_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFIELD_DATA", "before")
    name = written(tmp_path, scenario={"data": {"name": "mnist"}})
    with pytest.raises(InputError, match=f"train-images-idx3-ubyte .* is not in {tmp_path}"):
        reproduce(name, out=tmp_path / "out", data=tmp_path, say=quiet)
    with pytest.raises(InputError, match="--data nowhere is not a folder"):
        reproduce(name, data=Path("nowhere"), say=quiet)
    assert os.environ["AFIELD_DATA"] == "before"


def test_a_missing_file_is_told_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFIELD_DATA", raising=False)
    even, uneven = TABLE["columns"]
    lacking = merge(uneven, {"scenario": {"data": {"name": "mnist"}}})
    name, out, told = written(tmp_path, columns=[even, lacking]), tmp_path / "out", []
    with pytest.raises(InputError, match="train-images-idx3-ubyte is needed but no data folder is set"):
        reproduce(name, out=out, say=told.append)
    assert len(told) == 1  # how many runs there are to be
    assert not list(out.glob("*/seed-*"))
    reproduce(name, out=out, only=["even"], say=told.append)  # these need no file
    assert len(list(out.glob("*/seed-*"))) == 6


@dataclass(frozen=True)
class Untrained(Mlp):
    """As a text model without its folder."""

    folder: str = ""

    @property
    def stand_in(self) -> bool:
        return not self.folder


def test_a_stand_in_must_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "untrained", Untrained)
    name = written(tmp_path, model={"name": "untrained", "hidden": [4]}, stop={"updates": 8})
    with pytest.raises(InputError, match=r"pretrained Untrained.*--set model\.folder=DIR, or .* --stand-in$"):
        reproduce(name, out=tmp_path / "a", say=quiet)
    few: dict[str, Any] = {"only": ["adding"], "say": quiet}
    asked = reproduce(name, out=tmp_path / "a", stand_in=True, seeds=[0], **few)
    assert "**Stand-in:**" in (asked / "result.md").read_text()
    assert "--stand-in" in (asked / "result.md").read_text()
    smoke = reproduce(name, scale="smoke", out=tmp_path / "b", **few)
    assert "**Stand-in:**" in (smoke / "result.md").read_text()
    given = reproduce(name, out=tmp_path / "c", seeds=[0], settings=["model.folder=here"], **few)
    assert "**Stand-in:**" not in (given / "result.md").read_text()


def test_a_run_that_diverges_ends_and_is_told(tmp_path: Path) -> None:
    name = written(tmp_path, local={"rate": 1e38})
    out = reproduce(name, out=tmp_path / "out", only=["mixing", "even"], seeds=[0], say=quiet)
    summary = json.loads((out / "mixing--even" / "seed-0" / "summary.json").read_text())
    assert summary["ended"] == "100 models in a row were not finite"
    assert summary["refused"]["not-finite"] >= 100
    assert "- Ended early: mixing, even, seed 0: 100 models in a row" in (out / "result.md").read_text()


def test_a_machine_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    """Runs go where neither typer nor pyarrow is; the result is made elsewhere."""
    out = tmp_path / "out"
    name = written(tmp_path)
    lacking = ("typer", "click", "rich", "pyarrow", "safetensors", "matplotlib")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({lacking!r}))\n"
        "from pathlib import Path\n"
        "from afield.experiments.reproduce import reproduce\n"
        f"reproduce({name!r}, scale='smoke', out=Path({str(out)!r}), only=['adding'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "no pyarrow here: make the result elsewhere" in ended.stdout
    assert not (out / "result.md").exists()
    reproduce(name, scale="smoke", out=out, collect=True, say=quiet)
    assert "1 of 5 cells have all of the seeds 3" in (out / "result.md").read_text()
    run = load(out / "adding--even" / "seed-3")
    assert run.finished and run.receipts.num_rows == 0
    assert compare([run]).rows[0].staleness == Spread(run.summary["staleness"], 0.0, 1)


# -- grids --------------------------------------------------------------------------------------------------


def test_tune_names_the_best_of_a_grid(tmp_path: Path) -> None:
    name = written(tmp_path, grid={"local.rate": [0.001, 0.3]})
    folder, found = tune(name, scale="smoke", only=["mixing"], out=tmp_path / "out", say=quiet)
    finals = {}
    for rate in ("0.001", "0.3"):
        run = load(folder / f"mixing--even--local.rate={rate}" / "seed-3")
        finals[rate] = run.metrics[-1]["accuracy"]
    assert [best.setting for best in found] == ["mixing, even", "mixing, uneven"]
    assert found[0].choice == f"local.rate={max(finals, key=finals.__getitem__)}"
    assert found[0].mean == pytest.approx(100 * max(finals.values()))


def test_tune_takes_plain_experiments_and_several_keys(tmp_path: Path) -> None:
    table = {key: TABLE[key] for key in ("model", "local", "scenario", "measure", "stop")}
    table["variants"] = [{"strategy": {"name": "fedasync"}}, {"label": "mine", "strategy": {"name": "asgd"}}]
    (tmp_path / "plain.toml").write_text(dumps(table))
    grid = ["local.rate=0.01,0.2", "local.batch=4,8"]
    _, found = tune(str(tmp_path / "plain.toml"), grid, by="best", seeds=[0], out=tmp_path / "out", say=quiet)
    assert [best.setting for best in found] == ["fedasync", "mine"]
    assert len(names(tmp_path / "out")) == 8
    choices = {f"local.rate={rate}, local.batch={batch}" for rate in (0.01, 0.2) for batch in (4, 8)}
    assert {best.choice for best in found} <= choices


def test_a_grid_is_laid_over_the_settings(tmp_path: Path) -> None:
    """A column says what its runs had, also where a setting is about the same key or another strategy."""
    name = written(tmp_path)
    settings = ["local.rate=0.5", "strategy.name=fedbuff"]
    grid = ["local.rate=0.01,0.3", "strategy.size=2"]
    folder, _ = tune(
        name, grid, scale="smoke", only=["mixing", "even"], settings=settings, out=tmp_path / "out", say=quiet
    )
    for rate in (0.01, 0.3):
        run = load(folder / f"mixing--even--local.rate={rate}--strategy.size=2" / "seed-3")
        assert (run.config["local"]["rate"], run.config["strategy"]["size"]) == (rate, 2)
        assert run.config["strategy"]["name"] == "fedbuff"


def test_a_grid_of_arrays(tmp_path: Path) -> None:
    name = written(tmp_path, model={"name": "mlp", "hidden": [4]})
    _, found = tune(
        name,
        ["model.hidden=[4],[3, 3]", "scenario.partition=iid,dirichlet"],
        scale="smoke",
        only=["mixing", "even"],
        out=tmp_path / "out",
        say=quiet,
    )
    assert len(names(tmp_path / "out")) == 4
    assert found[0].choice == ", ".join(found[0].settings)
    assert [text.partition("=")[0] for text in found[0].settings] == ["model.hidden", "scenario.partition"]


@pytest.mark.parametrize("key", ["seed", "seeds", "label", "name", "target"])
def test_a_grid_of_what_is_no_setting_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(InputError, match=f"the grid has '{key}', which is no setting to try"):
        tune(written(tmp_path), [f"{key}=1,2"], out=tmp_path / "out", say=quiet)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("setting", ["seed=7", "seeds=[5, 6]"])
def test_seeds_are_no_setting(tmp_path: Path, setting: str) -> None:
    """They made runs of other seeds than their folders say, or fewer of them than were looked for."""
    with pytest.raises(InputError, match="the seeds of a table are given by --seeds"):
        reproduce(written(tmp_path), settings=[setting], out=tmp_path / "out", say=quiet)
    with pytest.raises(InputError, match="the seeds of a table are given by --seeds"):
        tune(written(tmp_path), ["local.rate=1"], settings=[setting], out=tmp_path / "out", say=quiet)
    assert not (tmp_path / "out").exists()


def test_tune_goes_by_the_seed_of_a_plain_experiment(tmp_path: Path) -> None:
    table = {key: TABLE[key] for key in ("model", "local", "scenario", "measure", "stop")}
    (tmp_path / "plain.toml").write_text(dumps({"seed": 5, **table}))
    tune(str(tmp_path / "plain.toml"), ["local.rate=0.1"], out=tmp_path / "out", say=quiet)
    assert load(tmp_path / "out" / "local.rate=0.1" / "seed-5").seed == 5


@pytest.mark.parametrize("variants", [3, [3], []])
def test_tune_wants_variants_that_are_tables(tmp_path: Path, variants: object) -> None:
    (tmp_path / "plain.toml").write_text(dumps({"variants": variants}))
    with pytest.raises(InputError, match="variants is not an array of tables"):
        tune(str(tmp_path / "plain.toml"), ["local.rate=0.1"], out=tmp_path / "out", say=quiet)


@pytest.mark.parametrize("grid", ["local.rate", "=1,2", "local.rate="])
def test_tune_wants_a_grid(tmp_path: Path, grid: str) -> None:
    with pytest.raises(InputError, match=r"tiny.toml has no \[grid\]: give one by --set-grid"):
        tune(written(tmp_path), say=quiet)
    with pytest.raises(InputError, match=r"is not KEY=V1,V2,\.\.\.: write for example"):
        tune(written(tmp_path), [grid], say=quiet)


# -- damage -------------------------------------------------------------------------------------------------


def test_a_label_of_dots_stays_in_its_folder(tmp_path: Path) -> None:
    table = {key: value for key, value in TABLE.items() if key not in ("theirs", "scales", "columns")}
    (tmp_path / "dots.toml").write_text(dumps(table | {"rows": [{"label": ".."}]}))
    reproduce(str(tmp_path / "dots.toml"), seeds=[0], out=tmp_path / "out", say=quiet)
    assert load(tmp_path / "out" / "run" / "seed-0").label == ".."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dots.toml", "out"]


@pytest.mark.parametrize("left", ["", '{"name": "ti', "3"])
def test_a_plan_that_was_cut_short_is_written_again(tmp_path: Path, left: str) -> None:
    """A disk that was full when the plan was written; what was run is there."""
    name, out = written(tmp_path), tmp_path / "out"
    reproduce(name, scale="smoke", only=["mixing"], out=out, say=quiet)
    whole = (out / "plan.json").read_bytes()
    (out / "plan.json").write_text(left)
    with pytest.raises(InputError, match="holds a reproduction, which goes on by: the command that began it"):
        read_plan(out)
    said: list[str] = []
    reproduce(name, scale="smoke", only=["mixing"], out=out, say=said.append)
    assert said[0].startswith("tiny: 2 runs, 2 of them are there")
    assert (out / "plan.json").read_bytes() == whole
    assert not list(out.glob(".*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"theirs": 3}, "theirs = 3 is not a table"),
        ({"scales": 3}, "scales = 3 is not a table"),
        ({"scales": {"smoke": 3}}, r"scales\.smoke = 3 is not a table"),
        (
            {"scales": {"smoke": {"only": "mixing"}}},
            r"scales\.smoke\.only = 'mixing' is not an array of labels",
        ),
        ({"scales": {"smoke": {"rows": 3}}}, r"scales\.smoke\.rows = 3 is not a table"),
        ({"scales": {"smoke": {"rows": {"mixing": 3}}}}, r"scales\.smoke\.rows\.mixing = 3 is not a table"),
        ({"scales": {"smoke": {"sweep": 3}}}, r"scales\.smoke\.sweep = 3 is not a table"),
        ({"grid": 3}, "grid = 3 is not a table"),
        ({"sweep": True}, "sweep = True is not a table"),
        ({"rows": [{"label": "mixing", "at": 3}]}, r"rows\[0\]\.at = 3 is not a table"),
        ({"rows": [{"label": "mixing", "at": {"even": 3}}]}, r"rows\[0\]\.at\.even = 3 is not a table"),
        (
            {"rows": [{"label": "mixing", "only": "even"}]},
            r"rows\[0\]\.only = 'even' is not an array of labels",
        ),
    ],
)
def test_parts_of_the_wrong_shape_are_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^preset tiny: {message}"):
        preset({**TABLE, **changes})
