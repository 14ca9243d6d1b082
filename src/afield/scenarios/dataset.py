"""A loaded data set, and how a source cuts it: how much the clients get, what the server has without labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from afield.core.errors import InputError, one_of, within
from afield.core.keys import Stream, generator

NOISE = 2000  # Gaussian inputs of `unlabelled = "noise"`: as many as FedEcho distils from
Labelled = tuple[Tensor, Tensor]  # inputs as stored, int64 targets


@dataclass(frozen=True, eq=False)
class Dataset:
    """A loaded data set: float32 inputs (images NCHW), int64 targets."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    classes: int
    unlabelled: Tensor | None = None  # inputs that the server may distil from
    loss: str = "cross-entropy"  # "value": the model's output is the loss itself; "tokens": targets per token
    sources: Tensor | None = None  # what partitions deal by, where targets are no labels


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How much of a training set the clients get, and what the server has without labels."""

    held_out: int = 0  # so many training examples go to no client: their inputs are the unlabelled set
    unlabelled: str = ""  # "", "noise" (Gaussian inputs), "test" (the test inputs) or one of `others`
    limit: int | None = None  # at most so many training examples (a keyed choice), for quick runs
    others: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        within("held_out", self.held_out, 0, math.inf, below=True)
        if self.limit is not None:
            within("limit", self.limit, 1, math.inf, below=True)
        self._check_unlabelled()
        if self.held_out and self.unlabelled:
            both = f"held_out = {self.held_out} and unlabelled = {self.unlabelled!r}"
            raise InputError(f"{both} name two unlabelled sets; leave one out")

    def _check_unlabelled(self) -> None:
        one_of("unlabelled", self.unlabelled, ("", "noise", "test", *self.others))

    @property
    def keyed(self) -> bool:
        """Whether the data depends on the seed (who gets which part of it always does)."""
        return bool(self.held_out or self.limit is not None or self.unlabelled == "noise")


def assemble(
    cut: Cut,
    seed: int,
    train: Labelled,
    test: Labelled,
    classes: int,
    normalise: Callable[[Tensor], Tensor],
    other: Callable[[], Tensor] | None = None,
) -> Dataset:
    """Cut first, normalise last: four bytes a value are spent on what is kept only."""
    inputs, targets = train
    test_inputs = normalise(test[0])
    total, unlabelled = len(targets), None
    if cut.held_out >= total:
        raise InputError(
            f"held_out = {cut.held_out} of {total} training examples; at most {total - 1} can be"
        )
    if cut.held_out or (cut.limit is not None and cut.limit < total):
        order = torch.randperm(total, generator=generator(seed, Stream.DATA))
        stop = total if cut.limit is None else min(total, cut.held_out + cut.limit)
        if cut.held_out:
            unlabelled = normalise(inputs[order[: cut.held_out]])
        kept = order[cut.held_out : stop].sort().values
        inputs, targets = inputs[kept], targets[kept]
    if cut.unlabelled == "noise":
        unlabelled = torch.randn(NOISE, *test_inputs.shape[1:], generator=generator(seed, Stream.DATA, 1))
    elif cut.unlabelled == "test":
        unlabelled = test_inputs
    elif cut.unlabelled and other is not None:
        unlabelled = normalise(other())
    return Dataset(normalise(inputs), targets, test_inputs, test[1], classes, unlabelled)
