"""The nouns: what moves between clients, runtimes and the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from afield.core.statistics import Gathering


@dataclass(frozen=True, slots=True)
class Task:
    """ "Client, train from this version." """

    number: int  # rises over the whole run
    client: int
    count: int  # how many tasks this client had before
    version: int  # the version of its base
    started: float


@dataclass(frozen=True, slots=True)
class Update:
    """What comes back. Tensors are borrowed: valid during the call only."""

    task: Task
    model: Tensor  # the trained model: the whole vector, or its parameters where `statistics` holds the rest
    base: Tensor | None  # the model the task started from, where the strategy uses it
    examples: int
    steps: int = 1
    rate: float = 1.0
    arrived: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    statistics: Tensor | None = None  # the trained normalisation statistics, where they are kept apart
    correction: Tensor | None = None  # the vector that was added to every local gradient

    @property
    def bytes(self) -> int:
        rest = self.statistics.nbytes if self.statistics is not None else 0
        return self.model.nbytes + rest


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the server did with one update: one row of the log."""

    number: int
    client: int
    base: int  # the version it started from
    started: float
    arrived: float
    examples: int
    bytes: int
    staleness: int
    weight: float
    stepped: bool
    version: int  # after this update
    hold: bool = False  # its client waits for the next version
    refused: str = ""  # why nothing was done with it

    @classmethod
    def of(
        cls,
        update: Update,
        staleness: int,
        weight: float,
        stepped: bool,
        version: int,
        hold: bool = False,
        refused: str = "",
    ) -> Receipt:
        task = update.task
        return cls(
            number=task.number,
            client=task.client,
            base=task.version,
            started=task.started,
            arrived=update.arrived,
            examples=update.examples,
            bytes=update.bytes,
            staleness=staleness,
            weight=weight,
            stepped=stepped,
            version=version,
            hold=hold,
            refused=refused,
        )


@dataclass(slots=True, kw_only=True)
class ServerState:
    """Everything of the server that changes; a strategy subclasses it to add buffers."""

    params: Tensor
    statistics: Tensor | None = None  # moved by the server, at a step only (see core/statistics.py)
    gathering: Gathering | None = None
    # clients whose newest update does not count at this step; the arriving one may be among them: it counts from
    # the next step on
    lapsed: list[int] = field(default_factory=list)
    seed: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class LocalResult:
    """What one client's training gives: a whole vector, and what it took."""

    model: Tensor
    examples: int
    steps: int
    rate: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def answer(self, task: Task, arrived: float, model: Tensor | None = None) -> Update:
        """This result as the update of `task` (`model`: what is sent where that is not the model itself)."""
        return Update(
            task=task,
            model=self.model if model is None else model,
            base=None,
            examples=self.examples,
            steps=self.steps,
            rate=self.rate,
            arrived=arrived,
            metrics=self.metrics,
        )


@dataclass(frozen=True, slots=True)
class Scene:
    """The facts of a scenario that delays, availability and schedulers are bound to."""

    seed: int
    sizes: Sequence[int]  # examples per client
    work: Sequence[int] = ()  # local steps per task and client, where known

    @property
    def clients(self) -> int:
        return len(self.sizes)
