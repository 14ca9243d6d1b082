"""The shapes that the rooms agree on. Nothing here is inherited from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from afield.core.types import LocalResult, Receipt, Scene, Task, Update


class Strategy(Protocol):
    """The server's rule: a frozen dataclass of hyper-parameters that is its own config.

    Where a paper needs more, a strategy also has: `close_round(state)` (steps at the end of a round or
    tick), `correction(state, client) -> Tensor` (added to each local gradient), `refine(state, update,
    distiller)` (after `receive`), and the class variables `pace` ("arrival", the default, "round" or
    "tick"), `gathers` ("buffer", the default, "newest" or "running": core/statistics.py), `pooled`
    (trains one client that has all the data) and `client_held` (clients send differences: core/held.py),
    and `fitted(concurrency, participation)`, which fills in what its config may leave open.
    """

    @property
    def uses_base(self) -> bool: ...  # needs the model the task started from

    @property
    def whole(self) -> bool: ...  # acts on parameters and statistics; else on parameters only

    def init(self, params: Tensor, clients: int) -> Any: ...

    def receive(self, state: Any, update: Update) -> Receipt: ...


class Trainer(Protocol):
    """Local training of any number of tasks at once; a result never depends on which others are in the call."""

    @property
    def method(self) -> str: ...  # how it is computed: a name for the run's config

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> Sequence[LocalResult]: ...


class Distiller(Protocol):
    """Network passes over the server's unlabelled set, for strategies that distil (FedEcho)."""

    def logits(self, params: Tensor, statistics: Tensor | None, samples: int) -> Tensor: ...

    def distil(
        self, params: Tensor, statistics: Tensor | None, teacher: Tensor, key: int, settings: Any, memory: Any
    ) -> None: ...


class Data(Protocol):
    """The clients' data."""

    @property
    def sizes(self) -> Sequence[int]: ...  # examples per client

    def batch(self, client: int, positions: Tensor) -> tuple[Any, Tensor]: ...  # inputs and targets


class Pool(Data, Protocol):
    """The clients' data as indices into one pool of tensors: what training many clients at once wants."""

    @property
    def inputs(self) -> Tensor: ...

    @property
    def targets(self) -> Tensor: ...

    @property
    def parts(self) -> Sequence[Tensor]: ...  # per client, its examples in the pool


class Delay(Protocol):
    """How long a task takes: bound to a scene, a pure function of (client, count)."""

    def bind(self, scene: Scene) -> Callable[[int, int], float]: ...


class Availability(Protocol):
    """Who is online: bound to a scene, a pure function of (client, now) -> (online, until when that holds)."""

    def bind(self, scene: Scene) -> Callable[[int, float], tuple[bool, float]]: ...


class Partition(Protocol):
    """Who has which data: index tensors, one per client, and the labels as the clients see them."""

    def split(self, labels: Tensor, clients: int, seed: int) -> tuple[list[Tensor], Tensor]: ...


class Dispatcher(Protocol):
    """A scheduler bound to a scene: which idle client starts next."""

    holds: bool  # a receipt with `hold` keeps its client waiting for the next version

    def ready(self, client: int) -> None: ...  # this client is idle

    def pick(self, running: int) -> int | None: ...  # who starts now, given how many are running

    def rest(self, client: int, count: int) -> float: ...  # its pause before it is idle again


class Scheduler(Protocol):
    """Who trains when, where updates are used as they arrive."""

    def bind(self, scene: Scene) -> Dispatcher: ...


class Evaluator(Protocol):
    """Measures a model (a whole vector). What is no dict is a mapping that may have to wait when it is read."""

    def __call__(self, model: Tensor) -> Mapping[str, Any]: ...


class Journal(Protocol):
    """Where accepted updates are made durable before they are folded."""

    def append(self, update: Update) -> None: ...
