"""Orders of methods, compared pair by pair."""

from __future__ import annotations

import math

import pytest
from scipy.stats import kendalltau

from afield.reports.ranking import Number, Ranking, compare

THEIRS = {"a": Number(80.0, 1.0), "b": Number(78.0, 2.0), "c": Number(60.0, 1.0), "d": Number(50.0)}


def ranked(**means: float) -> Ranking:
    found = compare({name: Number(mean, 0.5) for name, mean in means.items()}, THEIRS, better=1)
    assert found is not None
    return found


def test_the_same_order() -> None:
    found = ranked(a=9.0, b=8.0, c=7.0, d=6.0)
    assert (found.pairs, found.agree, found.tau, found.sentence()) == (6, 6, 1.0, "the same order")
    assert found.ours == found.theirs == "a > b > c > d"


def test_a_swap_within_their_noise() -> None:
    found = ranked(a=8.0, b=9.0, c=7.0, d=6.0)
    # a and b are 2 apart in the paper and sqrt(1 + 4) is more: the other five pairs are clear on both sides
    assert (found.agree, found.clear, found.clear_agree, found.against) == (5, 5, 5, ())
    assert found.sentence() == (
        "the same order outside noise: 5 of 6 pairs agree (tau 0.67), all 5 that both set apart do"
    )
    assert found.ours == "b > a > c > d"


def test_a_swap_beyond_noise_is_named() -> None:
    found = ranked(a=9.0, b=6.0, c=7.0, d=6.0)
    assert found.against == (("b", "c"),)
    assert "another order: 4 of 6 pairs agree" in found.sentence()
    assert found.sentence().endswith("here the other way round beyond noise: b over c")
    assert found.ours == "a > c > b = d"


def test_a_difference_within_our_noise_says_nothing() -> None:
    ours = {"a": Number(7.0, 1.0), "c": Number(7.5, 1.0)}
    found = compare(ours, THEIRS, better=1)
    assert found is not None
    assert (found.pairs, found.agree, found.clear) == (1, 0, 0)
    assert found.sentence().startswith("undecided: 0 of 1 pairs agree (tau -1.00)")


@pytest.mark.parametrize("means", [(1, 2, 3, 4), (2, 1, 4, 3), (4, 1, 3, 2), (3, 4, 1, 2)])
def test_tau_is_kendalls(means: tuple[int, ...]) -> None:
    found = ranked(**dict(zip("abcd", map(float, means), strict=True)))
    expected = kendalltau(means, [THEIRS[name].mean for name in "abcd"]).statistic
    assert found.tau == pytest.approx(expected)


def test_smaller_may_be_better() -> None:
    found = compare({"a": Number(1.0), "c": Number(2.0)}, THEIRS, better=-1)
    assert found is not None
    assert (found.agree, found.ours, found.theirs) == (0, "a > c", "c > a")


def test_where_there_is_nothing_to_compare() -> None:
    assert compare({"a": Number(1.0)}, THEIRS, better=1) is None
    assert compare({"a": Number(1.0), "b": Number(math.nan)}, THEIRS, better=1) is None
    assert compare({"a": Number(1.0), "b": Number(2.0)}, THEIRS, better=0) is None
    assert (
        compare({"a": Number(1.0), "b": Number(2.0)}, {"a": Number(3.0), "b": Number(3.0)}, better=1) is None
    )
