"""Keyed draws: pinned by their definition, and the same whether their first words were hashed before or not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afield.core.keys import Stream, exponential, mix, normal, stream_key, uniform

WORDS = st.lists(st.integers(-(2**70), 2**70), max_size=6)
GOLDEN = 0x9E3779B97F4A7C15


def plain(words: list[int]) -> int:
    """splitmix64's finaliser over each word in turn, in arithmetic modulo 2^64."""
    state = GOLDEN
    for word in words:
        z = (state ^ word % 2**64) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z // 2**30) * 0x94D049BB133111EB % 2**64
        z = ((z ^ z // 2**27) + GOLDEN) % 2**64
        state = z ^ z // 2**31
    return state


@given(words=WORDS)
def test_draws_are_what_they_were(words: list[int]) -> None:
    assert mix(*words) == plain(words)
    assert uniform(*words) == plain(words) // 2**11 / 2**53
    assert exponential(*words) == -math.log(1 - uniform(*words))
    radius = math.sqrt(-2 * math.log(1 - uniform(*words, 0)))
    assert normal(*words) == radius * math.cos(2 * math.pi * uniform(*words, 1))


@pytest.mark.parametrize("draw", [mix, uniform, normal, exponential])
@given(first=WORDS, rest=WORDS)
def test_first_words_may_be_hashed_before(
    draw: Callable[..., float], first: list[int], rest: list[int]
) -> None:
    assert draw(*rest, after=mix(*first)) == draw(*first, *rest)


def test_a_stream_is_a_word_of_its_own() -> None:
    assert mix(5, after=stream_key(7, Stream.DELAY)) == mix(mix(7, Stream.DELAY), 5)
