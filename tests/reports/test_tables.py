"""Comparisons of run folders made by hand; every expected number is derived beside the runs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from rich.text import Text

from afield.reports.columns import short, sparklines, to_latex, to_rich
from afield.reports.load import RECEIPTS, Run, load
from afield.reports.noise import Spread, apart, spread_of, student
from afield.reports.tables import Comparison, compare, default_target, to_csv

Point = tuple[float, int, float | None, float]  # time, updates, accuracy, loss


def write(folder: Path, label: str, seed: int, points: Sequence[Point], staleness: Sequence[int] = ()) -> Run:
    """A finished run with these evaluations; a step at every second update; staleness -1: a refused update."""
    (folder / "receipts").mkdir(parents=True)
    (folder / "config.toml").write_text(f"label = {json.dumps(label)}\nseed = {seed}\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for time, updates, accuracy, loss in points:
            row: dict[str, Any] = {"time": time, "wall": time, "version": updates // 2, "updates": updates}
            row |= {"bytes": 0, "loss": loss} | ({} if accuracy is None else {"accuracy": accuracy})
            file.write(json.dumps(row) + "\n")
    columns: dict[str, Any] = {name: [0] * len(staleness) for name in RECEIPTS.names}
    columns |= {"staleness": list(staleness), "refused": ["stale" if s < 0 else "" for s in staleness]}
    columns |= {"stepped": [True] * len(staleness), "hold": [False] * len(staleness)}
    pq.write_table(pa.table(columns, schema=RECEIPTS), folder / "receipts" / "00000.parquet")
    (folder / "summary.json").write_text("{}")
    return load(folder)


def three_runs(tmp_path: Path) -> list[Run]:
    a0 = [(0.0, 0, 0.1, 2.3), (10.0, 20, 0.6, 1.0), (20.0, 40, 0.9, 0.5), (30.0, 60, 0.88, 0.6)]
    a1 = [(0.0, 0, 0.1, 2.3), (10.0, 20, 0.5, 1.2), (25.0, 50, 0.8, 0.8)]
    b0 = [(0.0, 0, 0.1, 2.3), (12.0, 60, 0.7, 0.9), (40.0, 200, 0.86, 0.4)]
    return [
        write(tmp_path / "a0", "a", 0, a0, staleness=[0, 1, 2, -1]),  # mean of the used ones: 1
        write(tmp_path / "b0", "b", 0, b0, staleness=[4]),
        write(tmp_path / "a1", "a", 1, a1, staleness=[2, 4]),  # mean 3
    ]


def spread(*values: float) -> Any:
    """By the definition of the sample's standard deviation, for one or two values."""
    std = abs(values[0] - values[-1]) / math.sqrt(2)  # sqrt(((x-m)^2 + (y-m)^2) / (2-1)), m the middle
    about: Any = pytest.approx
    return Spread(about(sum(values) / len(values)), about(std), len(values))


def test_numbers(tmp_path: Path) -> None:
    found = compare(three_runs(tmp_path), target=0.85)
    # Last evaluations at times 30, 25, 40 and updates 60, 50, 200.
    assert (found.target, found.time, found.updates) == (0.85, 25.0, 50)
    a, b = found.rows
    assert (a.label, a.runs, a.unfinished, b.label, b.runs) == ("a", 2, 0, "b", 1)
    assert a.final_accuracy == spread(0.88, 0.8)
    assert a.best_accuracy == spread(0.9, 0.8)
    assert a.final_loss == spread(0.6, 0.8)
    # At time 25: a0's evaluation at 20 (that at 30 is later), a1's at 25, b0's at 12.
    assert a.accuracy_at_time == spread(0.9, 0.8)
    assert a.loss_at_time == spread(0.5, 0.8)
    assert b.accuracy_at_time == spread(0.7)
    # At 50 updates: a0's evaluation at 40, a1's at 50; b0's only one so far is that of its start.
    assert a.accuracy_at_updates == spread(0.9, 0.8)
    assert b.accuracy_at_updates == spread(0.1)
    assert b.loss_at_updates == spread(2.3)
    # 0.85 is first reached by a0 at 20, never by a1, by b0 at 40.
    assert a.time_to_target == spread(20.0)
    assert b.time_to_target == spread(40.0)
    assert a.staleness == spread(1.0, 3.0)
    assert a.updates == spread(60, 50)
    assert a.versions == spread(30, 25)


def test_a_target_counts_from_the_first_evaluation_at_or_above(tmp_path: Path) -> None:
    runs = three_runs(tmp_path)
    assert [row.time_to_target for row in compare(runs, 0.6).rows] == [spread(10.0, 25.0), spread(12.0)]
    assert [row.time_to_target for row in compare(runs, 0.95).rows] == [None, None]


def test_the_default_target(tmp_path: Path) -> None:
    runs = three_runs(tmp_path)
    assert compare(runs).target == 0.85
    # Without a0 and b0 nothing reaches 0.85: 90 % of 0.8.
    assert default_target(runs[2:]) == 0.72
    # 90 % of 0.777 is 0.6993; the best on the way, 0.84, does not count.
    late = write(tmp_path / "c", "c", 0, [(1.0, 1, 0.84, 1.0), (2.0, 2, 0.777, 1.0)])
    assert default_target([late]) == 0.7
    assert default_target([write(tmp_path / "d", "d", 0, [(1.0, 1, None, 1.0)])]) is None


def test_a_run_without_evaluations_holds_nobody_back(tmp_path: Path) -> None:
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "config.toml").write_text('label = "young"\nseed = 0\n')
    found = compare([*three_runs(tmp_path), load(tmp_path / "young")])
    assert (found.time, found.updates) == (25.0, 50)
    young = found.rows[-1]
    assert (young.runs, young.unfinished, young.final_accuracy, young.staleness) == (1, 1, None, None)
    assert "1 of 4 runs unfinished" in shown(found)


def test_diverged_seeds_do_not_break_the_table(tmp_path: Path) -> None:
    good = write(tmp_path / "g", "x", 0, [(1.0, 1, 0.5, 1.0)])
    bad = write(tmp_path / "b", "x", 1, [(1.0, 1, 0.1, math.nan)])
    (row,) = compare([good, bad]).rows
    assert row.final_loss is not None
    assert math.isnan(row.final_loss.mean)
    assert "nan" in shown(compare([good, bad]))


def shown(comparison: Comparison, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(to_rich(comparison, width))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.strip("\n")


def test_the_table_on_the_screen(tmp_path: Path) -> None:
    lines = [line.split() for line in shown(compare(three_runs(tmp_path), 0.85)).splitlines()]
    assert [" ".join(words) for words in lines[:3]] == [
        "acc % acc %",
        "final best final at time at 50 time stale- up- ver- accuracy",
        "label runs acc % acc % loss 25 updates to 85 % ness dates sions to 25",
    ]
    # Standard deviations of two values: half their distance times sqrt(2), as 0.08 -> 0.0566.
    # The small curves, at 0, 25/11, 50/11, ...: a's mean is 0.1, 0.55 from 10 on, 0.7 from 20 on, 0.85 at 25;
    # b's 0.1, and 0.7 from 12 on. Eighths of the range of 0.1 to 0.85: (0.55 - 0.1) / 0.75 * 8 = 4.8, and 6.4.
    a = "a 2 84.0±5.7 85.0±7.1 0.7±0.14 85.0±7.1* 85.0±7.1* 20 1/2 2 55 27.5 ▁▁▁▁▁▅▅▅▅▇▇█"
    b = "b 1 86.0* 86.0* 0.4* 70.0 10.0 40* 4 200 100 ▁▁▁▁▁▁▇▇▇▇▇▇"
    assert [" ".join(words) for words in lines[4:6]] == [a, b]


def test_a_narrow_screen_has_fewer_columns_and_whole_labels(tmp_path: Path) -> None:
    found = compare(three_runs(tmp_path), 0.85)
    # Widths: label 1, then 4, 9, 9, 9, 9, 9, 7 (20 1/2 and its mark), 6, 5, 5, 12 and one space before each: 96.
    assert "█" in shown(found, 96)
    narrow = shown(found, 95)
    assert "█" not in narrow  # the first to go
    assert "loss" in narrow
    narrow = shown(found, 82)  # 13 less are 83
    assert "loss" not in narrow
    assert "sions" in narrow
    least = shown(found, 34)  # 1 + 5 + 10 + 10 + 8
    rows = [line.split() for line in least.splitlines()]
    assert [row[:2] for row in rows if row[-1] in ("1/2", "40*")] == [["a", "2"], ["b", "1"]]
    assert "ness" not in least
    assert all(len(line) <= 82 for line in narrow.splitlines())


def bold(comparison: Comparison) -> list[list[str]]:
    """The bold cells, row by row."""
    columns = to_rich(comparison).columns
    rows = zip(*(column.cells for column in columns), strict=True)
    return [[cell.plain for cell in row if isinstance(cell, Text) and cell.style == "bold"] for row in rows]


def test_the_best_of_a_column_is_bold(tmp_path: Path) -> None:
    runs = three_runs(tmp_path)
    # b is first in final and best accuracy, in loss, and in time: all of its seeds reached the target, but one
    # of two of a's, earlier though that one was.
    assert bold(compare(runs, 0.85)) == [["85.0±7.1*", "85.0±7.1*"], ["86.0*", "86.0*", "0.4*", "40*"]]
    assert bold(compare(runs[:1], 0.85)) == [[]]


def of(*values: float) -> Spread:
    found = spread_of(values)
    assert found is not None
    return found


def test_what_noise_tells_apart() -> None:
    # scipy.stats.ttest_ind(equal_var=False) gives p = 0.288 for the first two and p = 0.006 for the second.
    near, far = of(0.80, 0.82, 0.84), of(0.82, 0.86, 0.84)
    assert apart(near, far) is False
    assert apart(near, of(0.90, 0.92, 0.91)) is True
    assert apart(near, of(0.9)) is None  # one seed
    assert apart(of(1.0, math.nan), of(2.0, 3.0)) is None
    assert (apart(of(4.0, 4.0), of(4.0, 4.0)), apart(of(4.0, 4.0), of(5.0, 5.0))) == (False, True)
    # The 95 % interval of three values with std s: 4.303 s / sqrt(3).
    assert near.margin == pytest.approx(4.303 * 0.02 / math.sqrt(3))
    assert of(0.9).margin is None
    assert [student(f) for f in (0.5, 1, 2.9, 30, 1000)] == [12.706, 12.706, 4.303, 2.042, 2.042]


def test_ties_are_marked_where_noise_is_known(tmp_path: Path) -> None:
    finals = {"best": (0.82, 0.86, 0.84), "tie": (0.80, 0.82, 0.84), "worse": (0.60, 0.61, 0.62)}
    runs = []
    for label, values in finals.items():
        for seed, value in enumerate(values):
            points = [(0.0, 0, 0.1, 2.0), (1.0, 1, value, 1.0)]
            runs.append(write(tmp_path / f"{label}{seed}", label, seed, points, [0]))
    lines = [" ".join(line.split()) for line in shown(compare(runs, 0.8)).splitlines()]
    assert [line.split()[2] for line in lines[4:7]] == ["84.0±2.0*", "82.0±2.0~", "61.0±1.0"]
    assert "~ within noise of it (Welch's t over seeds, 95 %)" in lines[7]
    one = shown(compare(runs[::3], 0.8))
    assert "~" not in one
    assert "one seed: its noise is unknown" in one
    text = to_latex(compare(runs, 0.8))
    assert r"\textbf{84.0 \(\pm\) 2.0}" in text
    assert r"\underline{82.0 \(\pm\) 2.0}" in text
    assert r"worse & 61.0 \(\pm\) 1.0" in text
    assert "Mean and standard deviation over 3 seeds. Bold: the best; underlined" in text
    assert text.count(r"\\") == 1 + len(finals)
    columns = text.partition(r"\begin{tabular}{")[2].partition("}")[0]
    assert {line.count("&") for line in text.splitlines() if line.endswith(r"\\")} == {len(columns) - 1}


def test_latex_escapes_what_it_must(tmp_path: Path) -> None:
    run = write(tmp_path / "x", r"50%_of {a}\b & $c", 0, [(1.0, 1, 0.5, 1.0)])
    assert r"    50\%\_of \{a\}\textbackslash{}b \& \$c & 50.0 &" in to_latex(compare([run], 0.8))


def test_sparklines_share_a_scale() -> None:
    # Seven of eight steps: 0.7 / 0.8 * 8 = 7; not finite: unknown.
    assert sparklines([(0.0, 0.1, 0.2), (0.8, math.nan)]) == ["▁▂▃", "█?"]
    assert sparklines([(1.0, 1.0), ()]) == ["▁▁", ""]


def test_never(tmp_path: Path) -> None:
    text = shown(compare(three_runs(tmp_path), 0.95))
    assert text.count("never") == 2
    assert "to 95 %" in text


def test_losses_only(tmp_path: Path) -> None:
    runs = [
        write(tmp_path / "a", "a", 0, [(0.0, 0, None, 4.0), (5.0, 5, None, 1.5e-7)], staleness=[0]),
        write(tmp_path / "b", "b", 0, [(0.0, 0, None, 4.0), (6.0, 4, None, 0.25)], staleness=[0]),
    ]
    found = compare(runs)
    assert (found.target, found.time, found.updates) == (None, 5.0, 4)
    text = shown(found)
    assert "acc" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    # At time 5 b has only its start; at 4 updates a has only its start.
    assert lines[4:6] == ["a 1 1.5e-07* 1.5e-07* 4 0 5 2 ███████████▁", "b 1 0.25 4 0.25* 0 4 2 ████████████"]
    assert bold(found) == [["1.5e-07*", "1.5e-07*"], ["0.25*"]]


def test_it_fits_a_hundred_columns(tmp_path: Path) -> None:
    runs = []
    for seed in range(3):
        points = [(0.0, 0, 0.1, 2.3), (123456.0 + 9999 * seed, 2345678, 0.87 + 0.051 * seed, 0.1234 + seed)]
        runs.append(write(tmp_path / f"x{seed}", "delay-adaptive-asgd [b]", seed, points, [12345]))
        runs.append(write(tmp_path / f"y{seed}", "fedbuff", seed, points[:1] + points, [0]))
    text = shown(compare(runs))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert "…" not in text
    assert "\nfedbuff  " in text  # long names wrap, but not to shreds
    assert "3/3" in text
    assert "[b]" in text  # not taken for markup


def test_csv_has_every_digit(tmp_path: Path) -> None:
    to_csv(compare(three_runs(tmp_path), 0.85), tmp_path / "new" / "table.csv")
    with (tmp_path / "new" / "table.csv").open(newline="") as file:
        a, b = csv.DictReader(file)
    assert [a[key] for key in ("label", "runs", "target", "equal_time")] == ["a", "2", "0.85", "25.0"]
    assert (a["equal_updates"], a["unfinished"]) == ("50", "0")
    assert float(a["final_loss_std"]) == pytest.approx(0.2 / math.sqrt(2), abs=1e-15)
    assert (a["reached_target"], a["time_to_target"], a["time_to_target_std"]) == ("1", "20.0", "")
    assert (b["final_accuracy"], b["final_accuracy_std"], b["staleness"]) == ("0.86", "", "4.0")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (0.12345, "0.123"), (99.96, "100"), (999.6, "1000"), (9876.0, "9876"), (12345.0, "12.3k")],
)
def test_short_numbers(number: float, text: str) -> None:
    assert short(number) == text
