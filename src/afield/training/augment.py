"""Random crops and flips of training images, by key: done where a batch is put together, whoever trains on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from afield.core.errors import InputError
from afield.training.draws import APART, FURTHER, drawn

PADDING = 4  # zeros on every side before the crop; inputs are normalised, so the border has the mean colour
_SHIFTS = 2 * PADDING + 1


def check_images(inputs: Any) -> None:
    """Raise unless the inputs of a batch are images."""
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or not inputs.is_floating_point():
        what = f"shape {tuple(inputs.shape[1:])}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise InputError(
            f"local.augment = true, but inputs of {what} are no images (channels, height, width): leave it out"
        )


def moves(key: Tensor, step: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Shift down, shift right (0..8 each) and flip (0, 1) of every image of a batch: [*key.shape, batch] each.

    `key` is that of the tasks' dropout, whose calls count from 0 in every step: this is call -1.
    """
    place = torch.arange(batch, device=key.device)
    number = drawn((key + step * APART - FURTHER)[..., None], place) >> 20
    return number % _SHIFTS, number // _SHIFTS % _SHIFTS, number // _SHIFTS**2 % 2


def augmented(images: Tensor, key: Tensor, step: Tensor) -> Tensor:
    """Each image padded with zeros, cropped to its size at a random place, flipped left to right by a coin.

    `images` are [*key.shape, batch, channels, height, width]. One gather for all of them, no wait for the device.
    """
    *rows, batch, channels, height, width = images.shape
    down, right, flip = (move.view(-1, 1) for move in moves(key, step, batch))
    line = torch.arange(height, device=images.device) + down
    column = torch.arange(width, device=images.device)
    column = torch.where(flip > 0, width - 1 - column, column) + right
    place = line[:, :, None] * (width + 2 * PADDING) + column[:, None, :]
    padded = functional.pad(images.reshape(-1, channels, height, width), (PADDING,) * 4).flatten(2)
    found = padded.gather(2, place.view(-1, 1, height * width).expand(-1, channels, -1))
    return found.view(*rows, batch, channels, height, width)
