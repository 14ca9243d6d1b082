"""What the README shows is what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import afield
from afield.experiments.config import presets

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_ten_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    code = BLOCKS[0]
    assert (
        len([line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))])
        <= 10
    )
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert re.fullmatch(r"\d\d\.\d% after 600 updates\n", printed)
    assert names["result"].accuracy > 0.85


def test_the_own_strategy_is_the_example() -> None:
    example = (ROOT / "examples" / "own_strategy.py").read_text(encoding="utf-8")
    shown = BLOCKS[1].strip()
    assert shown.startswith("@dataclass(frozen=True)")
    assert shown in example


def test_every_algorithm_is_in_the_table() -> None:
    keys = {
        key
        for row in re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)
        for key in re.findall(r"`(.*?)`", row)
    }
    assert keys == set(afield.STRATEGIES)


def test_presets_files_and_pages_named_are_there() -> None:
    assert "fedstale-figure1" in presets()
    for path in [
        *re.findall(r"\]\(((?!http)[^)]+)\)", README),
        "examples/compare.toml",
        "examples/own_strategy.py",
    ]:
        assert (ROOT / path).exists(), path
