"""Flower: every strategy that steps on arrival, for unmodified ClientApps, in simulation and in deployment.

The only place that imports `flwr` (the extra `flower`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from afield.core.errors import InputError, within
from afield.core.protocols import Strategy
from afield.core.types import Receipt

try:
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result
    from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
except ImportError as error:
    raise ImportError(f"flwr is missing or too old ({error}): pip install 'afield[flower]'") from error

from afield.runtimes.flower.loop import Run
from afield.runtimes.simulate import threads
from afield.training.pages import keep_pages

__all__ = ["AsyncStrategy"]

log = logging.getLogger("flwr")  # Flower's own: its runs show what is written there

Aggregate = Callable[[list[RecordDict], str], MetricRecord]


class AsyncStrategy:
    """In the place of a Flower strategy: `start` has its signature, and ClientApps stay as they are.

    A round is `round_size` updates (by default `concurrency`: the work of a synchronous round with that many nodes);
    after each, the model is evaluated. `clients` is how many nodes can take part at a time (by default those that are
    there at the start): a strategy with a memory has a place for each, and a newcomer takes that of one who left.
    `deadline` (by default Flower's `timeout`) is how long a node may take; a later answer is dropped. With `store`,
    every update is in that folder before it is used; `resume` goes on from such a folder, or begins one.
    """

    def __init__(
        self,
        strategy: Strategy,
        concurrency: int = 16,
        *,
        round_size: int | None = None,
        clients: int | None = None,
        min_available_nodes: int = 2,
        fraction_evaluate: float = 1.0,
        deadline: float | None = None,
        max_staleness: int | None = None,
        seed: int = 0,
        store: Path | str | None = None,
        resume: Path | str | None = None,
        fsync: str = "batch",
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Aggregate = aggregate_metricrecords,
        evaluate_metrics_aggr_fn: Aggregate = aggregate_metricrecords,
        drain: float = 90.0,
        poll: float = 0.25,
    ) -> None:
        for name, value in (("concurrency", concurrency), ("min_available_nodes", min_available_nodes)):
            within(name, value, 1, math.inf)
        for name, count in (("round_size", round_size), ("clients", clients)):
            if count is not None:
                within(name, count, 1, math.inf)
        within("fraction_evaluate", fraction_evaluate, 0, 1)
        if deadline is not None:
            within("deadline", deadline, 0, math.inf, above=True)
        within("drain", drain, 0, math.inf)
        within("poll", poll, 0, math.inf, above=True)
        _check(strategy)
        if store is not None and resume is not None and Path(store) != Path(resume):
            raise InputError(f"store = {store} and resume = {resume} are two folders: give one of them")
        self.strategy = strategy
        self.concurrency = concurrency
        self.round_size = round_size or concurrency
        self.clients = clients
        self.min_available_nodes = min_available_nodes
        self.fraction_evaluate = fraction_evaluate
        self.deadline = deadline
        self.max_staleness = max_staleness
        self.seed = seed
        self.folder = None if store is resume is None else Path(store or resume or "")
        self.resuming = resume is not None
        self.fsync = fsync
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn
        self.drain = drain
        self.poll = poll
        self.receipts: list[Receipt] = []  # the log of the last `start`

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train for so many rounds; gives the model and the metrics of each round."""
        within("num_rounds", num_rounds, 0, math.inf)
        within("timeout", timeout, 0, math.inf, above=True)
        begun = time.monotonic()
        self.receipts = []
        keep_pages()  # vectors and messages of 1 M weights are 4 MB each, and new for every update
        with ExitStack() as stack:
            run = Run(self, grid, num_rounds, self.deadline or timeout, evaluate_fn)
            run.train_config, run.evaluate_config = dict(train_config or {}), dict(evaluate_config or {})
            run.open(initial_arrays, stack)
            with threads(1):  # beside nodes that train, two took 14.9 ms a message of 1 M weights, one 8.7
                run.loop()
        log.info(
            "%s: %d updates, version %d, in %.1f s",
            self.strategy, run.accepted, run.server.version, time.monotonic() - begun,
        )  # fmt: skip
        return run.result


def _check(strategy: Strategy) -> None:
    """Only what a ClientApp that knows nothing of us can answer."""
    name, pace = type(strategy).__name__, getattr(strategy, "pace", "arrival")
    if pace != "arrival":
        raise InputError(f"{name} steps once per {pace}, not per arrival: use Flower's own strategies")
    if hasattr(strategy, "correction"):
        raise InputError(f"{name} corrects the gradients of its clients, which a ClientApp does not do")
    if getattr(strategy, "client_held", False):
        raise InputError(f"{name} has clients that keep their last delta: set held = 'server'")
    if getattr(strategy, "pooled", False):
        raise InputError(f"{name} trains on the data of all clients, which no node has: use another")
    if hasattr(strategy, "refine"):
        raise InputError(f"{name} distils on unlabelled data of the server: it runs in simulations only")
