"""Pictures: that they are drawn in the asked-for form and size, and the arithmetic behind the lines."""

from __future__ import annotations

import ast
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afield.reports import plots
from afield.reports.curves import COLOURS, on_grid
from afield.reports.load import LoadError, Run
from afield.reports.plots import _colour, _dash, _gap, _moved_apart, accuracy, trajectories


def run(label: str, seed: int, key: str, values: list[Any], step: float = 1.0) -> Run:
    rows = [
        {
            "time": i * step,
            "wall": i * 0.1,
            "version": i,
            "updates": 10 * i,
            "bytes": 0,
            "loss": 1.0,
            key: value,
        }
        for i, value in enumerate(values)
    ]
    return Run(Path("nowhere"), label, seed, {}, rows, True)


def png_size(path: Path) -> tuple[int, int]:
    """Width and height stand in the first chunk, after eight bytes of signature and eight of its header."""
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


@pytest.mark.parametrize("x", ["time", "updates", "versions", "wall"])
def test_accuracy_as_png(tmp_path: Path, x: Any) -> None:
    runs = [run("a", 0, "accuracy", [0.1, 0.5, 0.8]), run("a", 1, "accuracy", [0.1, 0.6, 0.9], step=0.7)]
    accuracy([*runs, run("b", 0, "accuracy", [0.1, 0.3])], tmp_path / "new" / "a.png", x=x, target=0.85)
    assert png_size(tmp_path / "new" / "a.png") == (1050, 630)  # 7 by 4.2 inches at 150 dots


@pytest.mark.parametrize(("suffix", "start"), [("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_the_suffix_says_the_format(tmp_path: Path, suffix: str, start: bytes) -> None:
    accuracy([run("a", 0, "accuracy", [0.1, 0.5])], tmp_path / f"a.{suffix}")
    assert (tmp_path / f"a.{suffix}").read_bytes().startswith(start)


def test_the_picture_names_its_lines_and_axes(tmp_path: Path) -> None:
    runs = [run("ours & theirs", seed, "accuracy", [0.1, 0.5]) for seed in range(3)]
    accuracy(runs, tmp_path / "a.svg", target=0.4)
    text = (tmp_path / "a.svg").read_text()
    # Glyphs are drawn as paths; the words stand beside them as comments.
    for words in ("ours &amp; theirs", "virtual time", "test accuracy", "target 40%", "range over 3 seeds"):
        assert f"<!-- {'mean and ' if 'range' in words else ''}{words} -->" in text


@pytest.mark.parametrize("values", [[3.0, 1.0, 1e-3], [0.5, 0.0, 0.4], [1.0, float("nan"), float("inf")]])
def test_loss_where_there_is_no_accuracy(tmp_path: Path, values: list[float]) -> None:
    accuracy([run("a", 0, "loss", values), run("b", 0, "loss", [2.0, 1.0])], tmp_path / "a.svg")
    assert "<!-- test loss -->" in (tmp_path / "a.svg").read_text()


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    one = run("a", 0, "accuracy", [0.1])
    with pytest.raises(ValueError, match="x = 'day' is not known; choose from time, updates, versions, wall"):
        accuracy([one], tmp_path / "a.png", x="day")  # type: ignore[arg-type]
    with pytest.raises(LoadError, match="there is no run to draw"):
        accuracy([], tmp_path / "a.png")
    with pytest.raises(LoadError, match=r"metrics\.jsonl has no 'accuracy' to draw"):
        accuracy([one, run("b", 0, "loss", [1.0])], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_curves_hold_their_value_until_their_next_point() -> None:
    first = (np.array([0.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]))
    second = (np.array([1.0, 3.0, 9.0]), np.array([10.0, 20.0, 30.0]))
    grid, held = on_grid([first, second])
    # Both have a value from 1 (the second's start) to 4 (the first's end), and points at 1, 2, 3, 4.
    assert grid.tolist() == [1, 2, 3, 4]
    assert held.tolist() == [[1, 2, 2, 3], [10, 10, 20, 20]]


def test_a_seed_that_ended_before_another_began() -> None:
    grid, held = on_grid([(np.array([0.0, 1.0]), np.array([5.0, 6.0])), (np.array([2.0]), np.array([7.0]))])
    assert (grid.tolist(), held.tolist()) == ([1.0], [[6.0], [7.0]])


def test_names_are_moved_apart_as_little_as_may_be() -> None:
    assert _moved_apart([0.2, 0.8, 0.5], 0.1) == pytest.approx([0.2, 0.8, 0.5])
    # Two at one height part by half a gap each; the order of three is kept; none leaves [0, 1].
    assert _moved_apart([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    assert _moved_apart([0.52, 0.5, 0.51], 0.1) == pytest.approx([0.61, 0.41, 0.51])
    assert _moved_apart([1.0, 1.0], 0.1) == pytest.approx([0.9, 1.0])
    assert _moved_apart([0.0] * 3, 0.5) == pytest.approx([0.0, 0.5, 1.0])


def test_no_two_of_28_lines_look_the_same() -> None:
    assert len({(_colour(i), str(_dash(i))) for i in range(4 * len(COLOURS))}) == 28


# Two clients: F_1 = 1/2 (2 x^2 + y^2) about (0, 0), F_2 = 1/2 (x^2 + y^2) about (3, 2). The gradient of their
# sum, (2x + x - 3, y + y - 2), is zero at (1, 1).
CURVATURES = [[2.0, 1.0], 1.0]
OPTIMA = [(0.0, 0.0), (3.0, 2.0)]
OPTIMUM = (1.0, 1.0)


def test_the_gap_to_the_optimum() -> None:
    matrices, centres = [np.diag([2.0, 1.0]), np.eye(2)], [np.zeros(2), np.array([3.0, 2.0])]
    points = np.array([[0.0, 0.0], [1.0, 1.0]])
    # At 0 the mean is (0 + (9 + 4)/2) / 2 = 3.25; at (1, 1) it is ((2 + 1)/2 + (4 + 1)/2) / 2 = 2.
    assert _gap(points, matrices, centres, np.ones(2)).tolist() == pytest.approx([1.25, 1e-16])
    with pytest.raises(ValueError, match=r"optimum = \[0\.0, 0\.0\] is not the minimum"):
        _gap(points, matrices, centres, np.zeros(2))


def test_trajectories(tmp_path: Path) -> None:
    ways = [[[-5.0, -5.0], [0.0, 1.0], [1.0, 1.0]], [[-5.0, -5.0], [400.0, -900.0], [0.5, 1.0]]]
    runs = [run(label, seed, "params", way) for label, way in zip("ab", ways, strict=True) for seed in (0, 1)]
    trajectories(runs, tmp_path / "t.png", CURVATURES, OPTIMA, OPTIMUM)
    assert png_size(tmp_path / "t.png") == (1500, 690)
    trajectories(runs[::2], tmp_path / "t.svg", [np.diag([2.0, 1.0]), np.eye(2)], OPTIMA, OPTIMUM)
    text = (tmp_path / "t.svg").read_text()
    for words in ("client 1", "client 2", "optimum", "start", "round", "loss above the optimum"):
        assert f"<!-- {words} -->" in text


def test_trajectories_need_the_plane(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"metrics\.jsonl has no 'params' to draw"):
        trajectories([run("a", 0, "loss", [1.0])], tmp_path / "t.png", CURVATURES, OPTIMA, OPTIMUM)
    with pytest.raises(LoadError, match="'params' are not two numbers a row"):
        trajectories([run("a", 0, "params", [[1.0]])], tmp_path / "t.png", CURVATURES, OPTIMA, OPTIMUM)


def test_what_reports_import() -> None:
    """Run folders are all they know, and matplotlib is where pictures are made, without its global state."""
    for file in Path(plots.__file__).parent.glob("*.py"):
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        assert not [name for name in names if name.startswith("torch") or "pyplot" in name]
        assert not [name for name in names if name.startswith("afield.") and ".reports." not in name]
        draws = file.name in ("plots.py", "figures.py", "prints.py")
        assert draws or not [name for name in names if name.startswith("matplotlib")]
        assert file.name == "page.py" or not [name for name in names if name.startswith("plotly")]
