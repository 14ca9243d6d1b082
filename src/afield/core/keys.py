"""Keyed randomness: every draw is a pure function of integers, never of a shared stream (law 2).

An integer hash costs about 0.5 us a word in Python; a numpy generator per task costs twenty times that. Where the
first words are always the same, their hash is kept: draw(b, after=mix(a)) equals draw(a, b), for the price of b.
"""

from __future__ import annotations

import enum
import math

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15


class Stream(enum.IntEnum):
    """What a draw is for; keeps draws with equal seeds, clients and counts apart."""

    BATCHES = 1
    DROPOUT = 2
    SPEED = 3
    DELAY = 4
    PAUSE = 5
    PICK = 6
    PRESENCE = 7
    PARTITION = 8
    QUANTISE = 9
    STALENESS = 10
    PARTICIPATION = 11
    DISTILL = 12
    MODEL = 13
    DATA = 14
    LABELS = 15


def mix(*words: int, after: int = _START) -> int:
    """A 64-bit hash of integers (splitmix64's finaliser, once per word)."""
    state = after
    for word in words:
        state = (state ^ (word & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 30)) * 0x94D049BB133111EB & _MASK
        state = (state ^ (state >> 27)) + 0x9E3779B97F4A7C15 & _MASK
        state ^= state >> 31
    return state


def stream_key(seed: int, stream: Stream) -> int:
    """What the draws of one stream come after, hashed once per run."""
    return mix(mix(seed, stream))


def uniform(*words: int, after: int = _START) -> float:
    """A draw from [0, 1)."""
    return (mix(*words, after=after) >> 11) * 2.0**-53


def normal(*words: int, after: int = _START) -> float:
    """A standard normal draw (Box-Muller on two keyed uniforms)."""
    key = mix(*words, after=after)
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(0, after=key)))
    return radius * math.cos(2.0 * math.pi * uniform(1, after=key))


def exponential(*words: int, after: int = _START) -> float:
    """A draw from the exponential distribution with mean 1."""
    return -math.log(1.0 - (mix(*words, after=after) >> 11) * 2.0**-53)


def generator(*words: int) -> torch.Generator:
    """A CPU generator seeded by the key, for torch functions that want one (permutations)."""
    return torch.Generator().manual_seed(mix(*words) >> 1)


def noise(key: int, start: int, length: int, device: torch.device) -> Tensor:
    """Uniforms in [0, 1) for elements start .. start + length: the same bits on every device."""
    low, high = key & 0x7FFFFFFF, (key >> 32) & 0x7FFFFFFF
    x = torch.arange(start, start + length, dtype=torch.int64, device=device)
    x = (x ^ low) * 0x5851F42D4C957F2D + high  # int64 wraps around, as a hash wants
    x = (x ^ ((x >> 29) & 0x7FFFFFFFF)) * 0x14057B7EF767814F
    x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * 0x5851F42D4C957F2D
    return ((x >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24
