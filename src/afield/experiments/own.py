"""A network and examples of the user's own: FILE.py:CLASS, and a folder with two arrays."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from afield.core.errors import InputError
from afield.core.keys import Stream, mix
from afield.experiments.config import load_module
from afield.training.evaluate import Evaluate
from afield.training.local import check_fits


def own_module(name: str, seed: int) -> nn.Module:
    """A network of the user's: FILE.py:CLASS, made without arguments. This runs the file: name what you trust."""
    kind = load_module(name)
    state = torch.default_generator.get_state()
    try:
        torch.default_generator.manual_seed(mix(seed, Stream.MODEL) >> 1)
        module = kind()
    except Exception as error:
        raise InputError(
            f"{name} cannot be made: {type(error).__name__}: {error}; it takes no arguments"
        ) from error
    finally:
        torch.default_generator.set_state(state)
    if not isinstance(module, nn.Module):
        raise InputError(f"{name} is not a torch.nn.Module: give FILE.py:CLASS of one")
    return module


def own_data(folder: Path) -> tuple[Tensor, Tensor]:
    """inputs.npy and targets.npy: arrays of equal length; integers as targets are classes."""
    import numpy as np

    found = []
    for name in ("inputs.npy", "targets.npy"):
        try:
            found.append(torch.from_numpy(np.load(folder / name, allow_pickle=False)))
        except (OSError, ValueError) as error:
            raise InputError(
                f"{folder / name} cannot be read ({error}): save an array there with numpy.save"
            ) from error
    inputs, targets = found
    if len(inputs) != len(targets) or not len(inputs):
        raise InputError(
            f"{folder} has {len(inputs)} inputs and {len(targets)} targets: give as many, and some"
        )
    return inputs.float(), targets.long() if not targets.is_floating_point() else targets


def own_evaluator(module: nn.Module, folder: Path) -> Evaluate:
    """Measures models of this network on the examples of a folder."""
    inputs, targets = own_data(folder)
    if targets.is_floating_point():
        raise InputError(f"{folder / 'targets.npy'} holds no classes but {targets.dtype}: save integers")
    if int(targets.min()) < 0:
        raise InputError(f"{folder / 'targets.npy'} has a class {int(targets.min())}: they begin at 0")
    classes = int(targets.max()) + 1
    check_fits(module, inputs[:1], classes)
    return Evaluate(module, inputs, targets, classes)
