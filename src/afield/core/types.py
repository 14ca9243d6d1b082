"""The nouns: what moves between clients, runtimes and the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor

if TYPE_CHECKING:
    from afield.core.statistics import Gathering

T = TypeVar("T")


def opened(kind: type[T]) -> type[T]:
    """A mutable twin of a frozen dataclass, for the few places that make one per event.

    An object that is made there and then told its true `__class__` is as frozen as any, for a third of the price: a
    frozen __init__ sets field by field through object.__setattr__ (a receipt: 1.65 us, this way 0.4).
    """
    columns = [(column.name, column.type) for column in fields(cast(Any, kind))]
    return make_dataclass(kind.__name__, columns, slots=True)


@dataclass(frozen=True, slots=True)
class Task:
    """ "Client, train from this version." """

    number: int  # rises over the whole run
    client: int
    count: int  # how many tasks this client had before
    version: int  # the version of its base
    started: float


OpenTask = opened(Task)


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
    finite: bool | None = None  # whether the model is free of NaN and Inf; None: nobody has looked

    @property
    def bytes(self) -> int:
        rest = self.statistics.nbytes if self.statistics is not None else 0
        return self.model.nbytes + rest


OpenUpdate = opened(Update)


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
        receipt = OpenReceipt(
            task.number,
            task.client,
            task.version,
            task.started,
            update.arrived,
            update.examples,
            update.bytes,
            staleness,
            weight,
            stepped,
            version,
            hold,
            refused,
        )
        receipt.__class__ = cls
        return receipt


OpenReceipt = opened(Receipt)


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
    finite: bool | None = None  # whether the model is free of NaN and Inf; None: nobody has looked

    def answer(self, task: Task, arrived: float, model: Tensor | None = None) -> Update:
        """This result as the update of `task` (`model`: what is sent where that is not the model itself)."""
        sent, known = (self.model, self.finite) if model is None else (model, None)
        update = OpenUpdate(
            task, sent, None, self.examples, self.steps, self.rate, arrived, self.metrics, None, None, known
        )
        update.__class__ = Update
        return update


@dataclass(frozen=True, slots=True)
class Scene:
    """The facts of a scenario that delays, availability and schedulers are bound to."""

    seed: int
    sizes: Sequence[int]  # examples per client
    work: Sequence[int] = ()  # local steps per task and client, where known

    @property
    def clients(self) -> int:
        return len(self.sizes)
