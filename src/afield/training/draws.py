"""Draws by key as tensors: the same numbers on every device, for one task or for many at once."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Integers = TypeVar("Integers", Tensor, "np.ndarray[Any, Any]")

# Odd numbers of 63 bits (torch's integers are signed): the streams of steps, epochs and layers start far apart.
APART, FURTHER = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
_FIRST, _SECOND = 0x5851F42D4C957F2D, 0x14057B7EF767814F
_LAST = 0x7FFFFFFFFFFFFFFF  # the largest


def drawn(key: Integers, place: Integers) -> Integers:
    """Integers of 63 bits, a hash of key and place (each of 64-bit integers; they are broadcast)."""
    mixed = (place ^ (key & 0x7FFFFFFFFFFF)) * _FIRST + (key >> 17)  # int64 wraps around, as a hash wants
    mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * _SECOND
    mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * _FIRST
    found: Integers = (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) & _LAST
    return found


def shuffled(keys: Tensor, epochs: int, sizes: Tensor | None, most: int) -> Tensor:
    """[keys, epochs, most]: for each key and epoch the numbers 0 .. size - 1 in a random order, then the rest.

    `sizes` is on the device of `keys`; `most` is the largest of them (None: all have it).
    """
    if keys.is_cpu:  # by numpy, whose calls cost less (9 tasks of 60 examples: half the time)
        places = np.arange(most)
        ranks = drawn((keys.numpy()[:, None] + np.arange(epochs) * APART)[..., None], places)
        if sizes is not None:
            ranks = np.where(places < sizes.numpy()[:, None, None], ranks, _LAST)
        return torch.from_numpy(ranks.argsort(axis=-1, kind="stable"))
    place = torch.arange(most, device=keys.device)
    turn = torch.arange(epochs, device=keys.device) * APART
    rank = drawn((keys[:, None] + turn)[..., None], place)
    if sizes is not None:
        rank = torch.where(place < sizes[:, None, None], rank, _LAST)
    return rank.sort(dim=-1, stable=True).indices
