"""Benchmarks still run, and end in the line that docs/performance.md is made from. How fast is not asked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["events", "fold", "scale", "training"])
def test_a_quick_look_ends_in_a_line_of_json(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["benchmark"] == name
