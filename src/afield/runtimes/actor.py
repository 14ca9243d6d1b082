"""What trains inside a process of a cluster: an actor that holds data and engines of the runs it works for."""

from __future__ import annotations

import contextlib
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from afield.core.flat import Layout
from afield.core.protocols import Data, Trainer
from afield.core.types import Task
from afield.runtimes.line import Door, Line, Place
from afield.scenarios.data import ClientData
from afield.training.alone import alone
from afield.training.choose import Training, trainer
from afield.training.local import Local
from afield.training.pages import keep_pages

INLINE = 100_000  # bytes: a larger vector goes through the object store

Answer = tuple[Any, int, int, float, dict[str, float]] | Exception  # the model's bytes, and the account of it


@dataclass(frozen=True)
class Kit:
    """All that the tasks of a run have in common; put into the object store once."""

    module: nn.Module
    data: Any  # packed
    local: Local
    seed: int
    loss: str
    device: str
    training: Training

    def trainer(self) -> Trainer:
        data = unpacked(self.data)
        if self.training.method == "workers":  # an actor is such a worker
            return alone(self.module, data, self.local, self.seed, self.loss)
        return trainer(self.module, data, self.local, self.seed, self.loss, self.device, self.training)


class Actor:
    """Trains tasks of every run that it was given the kit of; ends with the process that started it."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        keep_pages()
        self._engines: dict[str, tuple[Trainer, torch.dtype] | Exception] = {}
        self._line: Door | Line | None = None

    def hello(self, address: Callable[[], str] | None) -> tuple[int, Place | None]:
        """Its process, and where it can be called by line: at its node's address, if that is one of this machine."""
        with contextlib.suppress(OSError):
            if address is not None:
                self._line = door = Door(address())
                return os.getpid(), door.place
        return os.getpid(), None

    def load(self, key: str, kit: Kit) -> None:
        """Once per run, before all else: a reference in every call would cost more than the call."""
        try:
            self._engines[key] = kit.trainer(), Layout.of(kit.module).dtype
        except Exception as error:
            self._engines[key] = _told(error)

    def forget(self, key: str) -> None:
        self._engines.pop(key, None)

    def method(self, key: str) -> str | Exception:
        """How tasks of this run are trained here, or why they cannot be."""
        engine = self._engines[key]
        return engine if isinstance(engine, Exception) else engine[0].method

    def train(
        self, key: str, tasks: list[Task], places: list[tuple[int, int | None]], *lent: Any
    ) -> list[Answer]:
        """An answer per task; `places` tells which of the vectors lent are its base and its correction."""
        found = self._engines[key]
        if isinstance(found, Exception):
            return [found for _ in tasks]
        engine, dtype = found
        vectors = [to_tensor(part, dtype) for part in lent]
        bases = [vectors[base] for base, _ in places]
        corrections = [None if other is None else vectors[other] for _, other in places]
        return self._answers(engine, tasks, bases, corrections)

    def serve(self) -> None:
        """Train what comes by line, until nothing comes: one call, and in its turn as any other.

        So tasks are trained by the thread that calls are: another one has an arena of its own for its memory, which
        glibc keeps less of (batches of 500 images took 19 % longer).
        """
        if isinstance(self._line, Door):
            self._line = self._line.open()
        assert self._line is not None
        try:
            while message := self._line.receive():
                key, *given = pickle.loads(message)
                if given:
                    self._line.send(pickle.dumps(self.train(key, *given), pickle.HIGHEST_PROTOCOL))
                else:
                    self.forget(key)
        except BaseException:
            self._line.close()  # it is not served any more: whoever waits for an answer is to know
            raise

    def _answers(
        self, engine: Trainer, tasks: list[Task], bases: list[Tensor], corrections: list[Tensor | None]
    ) -> list[Answer]:
        try:
            results = engine.train(tasks, bases, corrections)
        except Exception as error:
            if len(tasks) == 1:
                return [_told(error)]
            # only who asks for the task that failed is told so
            alone = zip(tasks, bases, corrections, strict=True)
            return [answer for t, b, c in alone for answer in self._answers(engine, [t], [b], [c])]
        return [(to_bytes(r.model), r.examples, r.steps, r.rate, dict(r.metrics)) for r in results]


def packed(data: Data) -> Any:
    """The clients' data as arrays, which the actors of a node share in its object store; else as it is."""
    if not isinstance(data, ClientData):
        return data
    tensors = data.inputs, data.targets, torch.cat(data.parts)
    return [(to_bytes(tensor), tensor.dtype, tensor.shape) for tensor in tensors], data.sizes


def unpacked(data: Any) -> Data:
    if not isinstance(data, tuple):
        return data  # type: ignore[no-any-return]
    inputs, targets, index = (to_tensor(held, dtype).view(shape) for held, dtype, shape in data[0])
    return ClientData(inputs, targets, list(torch.split(index, data[1])))


def to_bytes(tensor: Tensor) -> Any:
    """A tensor as an array of bytes, which Ray moves without a copy, whatever its type."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def to_tensor(held: Any, dtype: torch.dtype) -> Tensor:
    """The vector that these bytes are. It lies in the object store: nobody may write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.frombuffer(held, dtype=dtype)


def _told(error: Exception) -> Exception:
    error.add_note(traceback.format_exc())  # of its cause too, which does not travel
    return error
