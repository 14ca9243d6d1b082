"""A run that was stopped and taken up ends with the same bits as one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
from playback import BATTERY, tabled
from stopping import SCENES, in_pieces, of_battery, of_scene, whole

CASES = [(name, "memory") for name in BATTERY]
CASES += [(name, "disk") for name, strategy in BATTERY.items() if tabled(strategy)]


@pytest.mark.parametrize(("name", "table"), CASES)
def test_every_strategy_goes_on_with_the_same_bits(name: str, table: str, tmp_path: Path) -> None:
    chosen = of_battery(name, runtime={"table": table})
    found, stops = in_pieces(chosen, tmp_path / "pieces", 13)
    assert stops >= 3
    assert found == whole(chosen, tmp_path / "whole")
    assert not (tmp_path / "pieces" / "store").exists()


@pytest.mark.parametrize("length", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCENES)
def test_every_flow_and_manner_goes_on_with_the_same_bits(name: str, length: int, tmp_path: Path) -> None:
    chosen = of_scene(name)
    found, stops = in_pieces(chosen, tmp_path / "pieces", length)
    assert stops >= 2
    assert found == whole(chosen, tmp_path / "whole")
