"""What trains inside a process of a cluster: an actor that holds data and engines of the runs it works for."""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from afield.core.flat import Layout
from afield.core.protocols import Data, Trainer
from afield.core.types import Task
from afield.scenarios.data import ClientData
from afield.training.choose import Training, trainer
from afield.training.lane import alone
from afield.training.local import Local
from afield.training.pages import keep_pages

INLINE = 100_000  # bytes: a smaller vector travels with its call, as Ray's own small objects do

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

    def process(self) -> int:
        return os.getpid()

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

    def train(self, head: bytes, *lent: Any) -> list[Any]:
        """An answer per task, packed where it is small; see `called` for what is given."""
        key, tasks, places = pickle.loads(head)
        found = self._engines[key]
        if isinstance(found, Exception):
            return [found for _ in tasks]
        engine, dtype = found
        vectors = [to_tensor(part, dtype) for part in lent]
        bases = [vectors[base] for base, _ in places]
        corrections = [None if other is None else vectors[other] for _, other in places]
        return [_sent(answer) for answer in self._answers(engine, tasks, bases, corrections)]

    def train_one(self, head: bytes, *lent: Any) -> Any:
        """The same for a single task, as what one reference stands for."""
        return self.train(head, *lent)[0]

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


def called(key: str, tasks: list[Task], places: list[tuple[int, int | None]]) -> bytes:
    """What a call says; `places` tells which of the vectors after it are a task's base and its correction.

    As bytes, as small models are, too: Ray sends those as they are, and its own way to pickle is a third of what a
    call costs (1.25 ms of CPU time with a model there and one back, this way 0.8, both ends together).
    """
    return pickle.dumps((key, tasks, places), pickle.HIGHEST_PROTOCOL)


def _sent(answer: Answer) -> Any:
    """As bytes where that is quicker: of a large model, which goes through the store, it would be one more copy."""
    if isinstance(answer, Exception) or answer[0].nbytes > INLINE:
        return answer
    return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)


def received(answer: Any) -> Answer:
    """What was sent."""
    found: Answer = pickle.loads(answer) if isinstance(answer, bytes) else answer
    return found


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
