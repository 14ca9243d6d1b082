"""Shares from receipts alone, against the rules themselves run on unit vectors (core/linear.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import rows_of, tiny

from afield.runtimes.rows import Measurement
from afield.runtimes.service.shares import Shares, rule_of
from afield.strategies import STRATEGIES

RULES = {
    "fedasync": "mixed",
    "mr-asyncfl": "replaced",
    "twafl": "replaced",
    "rolling-fedavg": "replaced",
    "ace": "tabled",
    "mifa": "tabled",
    "fedavg": "rounds",
    "fedbuff": "summed",
    "asgd": "summed",
    "delay-adaptive-asgd": "summed",
}


@pytest.mark.parametrize("name", RULES)
def test_they_are_those_of_the_rule_itself(name: str, tmp_path: Path) -> None:
    chosen = tiny(name, measure={"versions": 1, "diagnose": True}, stop={"updates": 30})
    receipts, measured = rows_of(chosen, tmp_path / "run")
    exact = [json.loads(line) for line in (tmp_path / "run" / "diagnostics.jsonl").read_text().splitlines()]
    assert rule_of(STRATEGIES[name]) == RULES[name]
    shares = Shares(RULES[name], 5)
    # As they came: a measurement after the receipts that were before it.
    left, compared = list(receipts), 0
    for row, told in zip(measured, exact, strict=True):
        while left and len(receipts) - len(left) < row.updates:
            receipt = left.pop(0)
            shares.add(receipt.client, receipt.weight, receipt.stepped, receipt.version)
        shares.reached(row.version)
        found = shares.all()
        assert [found.get(client, 0.0) for client in range(5)] == pytest.approx(told["share"], abs=1e-9)
        compared += any(told["share"])
    assert compared > 3 and isinstance(measured[0], Measurement)


def test_two_updates_by_hand() -> None:
    shares = Shares("mixed", 3)
    shares.add(0, 0.5, True, 1)
    shares.add(2, 0.25, True, 2)
    assert shares.told(1) == {
        "rule": "mixed",
        "updates": 2,
        "clients": 2,
        "top": [[0, 0.375]],
        "rest": 0.25,
        "initial": 0.375,
    }


@given(
    st.sampled_from(["mixed", "replaced"]),
    st.lists(st.tuples(st.integers(0, 4), st.floats(0.01, 0.99)), min_size=1, max_size=200),
)
def test_they_sum_to_one(rule: str, rows: list[tuple[int, float]]) -> None:
    """Also after so many factors that a float would hold nothing of their product."""
    shares = Shares(rule, 5)
    for version, (client, weight) in enumerate(rows * 20, 1):
        shares.add(client, weight, True, version)
    told = shares.told(2)
    assert all(share >= 0 for share in shares.all().values())
    whole = sum(share for _, share in told["top"]) + told["rest"] + told["initial"]
    assert whole == pytest.approx(1.0, abs=1e-6)


def test_a_weight_of_one_leaves_nothing_of_the_others() -> None:
    for rule in ("mixed", "replaced"):
        shares = Shares(rule, 3)
        for version, (client, weight) in enumerate(((0, 0.4), (1, 1.0), (2, 0.25)), 1):
            shares.add(client, weight, True, version)
        assert {c: s for c, s in shares.all().items() if s} == {
            1: pytest.approx(0.75),
            2: pytest.approx(0.25),
        }
