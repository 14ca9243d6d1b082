"""Figures for print: their size, their fonts, their data."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from folders import made

from afield.reports.load import LoadError, Run
from afield.reports.prints import COLUMN, FIGURES, PAGE, around, figure


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    labels = [[i, 10 - i] for i in range(10)]
    return [
        made(tmp_path / f"{name}{seed}", name, seed, labels=labels, senders=[*range(10)] * 3)
        for name in ("first", "second")
        for seed in (0, 1)
    ]


@pytest.mark.parametrize("kind", FIGURES)
def test_every_kind_in_every_format(kind: str, runs: list[Run], tmp_path: Path) -> None:
    for suffix, start in ((".pdf", b"%PDF"), (".svg", b"<?xml"), (".png", b"\x89PNG")):
        figure(runs, tmp_path / f"f{suffix}", kind, target=0.8)
        content = (tmp_path / f"f{suffix}").read_bytes()
        assert content.startswith(start)
        figure(runs, tmp_path / f"again{suffix}", kind, target=0.8)
        assert (tmp_path / f"again{suffix}").read_bytes() == content
    text = (tmp_path / "f.svg").read_text()
    if kind != "partition":
        assert ">first</text>" in text  # letters, not outlines
        assert ">second</text>" in text


def test_they_fit_a_column_or_the_page(runs: list[Run], tmp_path: Path) -> None:
    for wide, inches in ((False, COLUMN), (True, PAGE)):
        figure(runs, tmp_path / "f.png", wide=wide)
        width, _ = struct.unpack(">II", (tmp_path / "f.png").read_bytes()[16:24])
        assert width == int(inches * 300)


def test_bands() -> None:
    held = np.array([[1.0], [2.0], [3.0]])
    assert [float(edge[0]) for edge in around(held, "range")] == [1.0, 3.0]
    assert [float(edge[0]) for edge in around(held, "std")] == [1.0, 3.0]  # the sample's is 1
    half = 4.303 / 3**0.5
    assert [float(edge[0]) for edge in around(held, "interval")] == pytest.approx([2 - half, 2 + half])


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    bare = made(tmp_path / "x", senders=[])
    with pytest.raises(LoadError, match="has no update to draw"):
        figure([bare], tmp_path / "f.pdf", "staleness")
    with pytest.raises(LoadError, match="partition to draw"):
        figure([bare], tmp_path / "f.pdf", "partition")
    with pytest.raises(LoadError, match="no run to draw"):
        figure([], tmp_path / "f.pdf")
    for kind in ("heatmap", "timeline"):
        with pytest.raises(LoadError, match="has no update to draw"):
            figure([bare], tmp_path / "f.pdf", kind)
