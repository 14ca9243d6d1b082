"""Servers killed by SIGKILL again and again: nothing acknowledged is lost or counts twice, the bits are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]


def crashed(kills: int, seed: int, folder: Path, *how: str) -> dict[str, int]:
    found = subprocess.run(
        [sys.executable, str(HERE / "crashing.py"), str(kills), str(seed), str(folder), *how],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    counts: dict[str, int] = json.loads(found.stdout)
    print(", ".join(f"{name}: {number}" for name, number in counts.items()), found.stderr)
    return counts


@pytest.mark.slow
def test_nothing_that_was_acknowledged_is_lost_or_counts_twice(tmp_path: Path) -> None:
    counts = crashed(300, 0, tmp_path)
    assert counts["kills"] >= 300
    assert counts["strategies"] >= 15
    assert min(counts["with tables"].values()) > 50  # type: ignore[attr-defined]
    assert min(counts[end] for end in ("timer", "act", "inside", "power")) > 20
    assert counts["acknowledged"] == counts["servers"] * 36
    for wrong in ("lost", "twice", "wrong receipts", "other models", "failed"):
        assert counts.get(wrong, 0) == 0, wrong


@pytest.mark.slow
def test_the_harness_notices_a_server_that_acknowledges_before_it_syncs(tmp_path: Path) -> None:
    assert crashed(20, 0, tmp_path, "careless")["lost"] > 3
