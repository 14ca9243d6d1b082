"""A short probe of a scenario: who takes part how often, how stale, how unlike, at what price in memory.

It moves the same clients on the same clock, but trains nothing: who arrives when, and how stale, does not depend on
what is learned.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from afield.core.flat import Layout
from afield.core.protocols import Strategy
from afield.core.types import LocalResult, Receipt, Scene, Task
from afield.experiments.config import Config
from afield.experiments.people import PROBES
from afield.experiments.run import dealt, load_data
from afield.runtimes.rows import Measurement
from afield.runtimes.simulate import assemble
from afield.runtimes.terms import Stop
from afield.scenarios.availability import Always
from afield.scenarios.data import ClientData, Dataset
from afield.scenarios.schedulers import Ticks
from afield.strategies import ASGD, FedAsync, FedAvg
from afield.training.models import build

EVENTS, EACH = 20_000, 40  # updates in a probe, and at the least per client: about a second
ROUNDS = 1_000  # rounds in a probe


@dataclass(frozen=True)
class Facts:
    """What was measured."""

    pace: str  # "arrival", "tick" or "round"
    clients: int
    concurrency: int
    parameters: int
    updates: int  # of the probe
    expected: int  # updates that the whole run would make
    participation: (
        float  # p_avg / p_min: mean over least number of participations; inf where someone never came
    )
    silent: int  # clients that never took part in the probe
    staleness: float | None  # mean over updates, in arrivals; None in rounds
    delay: float | None  # mean over clients of their mean staleness: the slow count as much as the fast
    stalest: int | None
    slowness: float  # duration of the slowest client's tasks over the fastest's, both means
    heterogeneity: float | None  # see `label_distance`; None where there are no labels to compare
    relabelled: float  # share of the affected labels that clients see differently (FedStale's sigma_g^2)
    unlabelled: bool
    table: int  # bytes of one float32 vector per client
    memory: int | None  # bytes free on this machine

    @property
    def unlike(self) -> float:
        """How unlike the clients are, 0 to 1; as unlike as can be where nothing is known."""
        return 1.0 if self.heterogeneity is None else max(self.heterogeneity, self.relabelled)

    @property
    def seen(self) -> str:
        return "unlike for all that is known" if self.heterogeneity is None else f"unlike ({self.unlike:.2f})"


class NullTrainer:
    """Gives everyone the same result: for a probe of the clock."""

    method = "null"

    def __init__(self, size: int, sizes: Sequence[int]) -> None:
        self.results = [LocalResult(torch.zeros(size), count, 1, 1.0, finite=True) for count in sizes]

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[LocalResult]:
        return [self.results[task.client] for task in tasks]


def measure(config: Config) -> Facts:
    scenario, seed = config.scenario, config.seed
    dataset, model, _ = load_data(config)
    parts, targets = dealt(config, dataset)
    data = ClientData(dataset.inputs, targets, parts)
    module = build(model, tuple(dataset.inputs.shape[1:]), dataset.classes, seed)
    pace = getattr(config.strategy, "pace", "arrival")
    receipts, time, rounds = _probe(config, data, pace)
    counts = [0] * scenario.clients
    stale: dict[int, list[int]] = {}
    for receipt in receipts:
        counts[receipt.client] += 1
        stale.setdefault(receipt.client, []).append(receipt.staleness)
    updates = len(receipts)
    free = pace != "round" and updates > 0
    layout = Layout.of(module)
    stop = config.stop
    per_version = updates / max(rounds, 1) * getattr(config.strategy, "size", 1)
    scales = [stop.updates, stop.versions and stop.versions * per_version]
    scales.append(stop.time and stop.time * updates / max(time, 1e-9))
    plan: Any = scenario.rounds if pace == "round" else scenario.scheduler
    chances = counts if pace != "round" or not always(config) else plan.participation(scenario.clients)
    return Facts(
        pace=pace,
        clients=scenario.clients,
        concurrency=plan.concurrency(scenario.clients),
        parameters=layout.parameters,
        updates=updates,
        expected=max(1, round(min(scale for scale in scales if scale is not None))),
        participation=statistics.fmean(chances) / min(chances) if min(chances) else math.inf,
        silent=counts.count(0),
        staleness=statistics.fmean(row.staleness for row in receipts) if free else None,
        delay=statistics.fmean(map(statistics.fmean, stale.values())) if free else None,
        stalest=max(row.staleness for row in receipts) if free else None,
        slowness=_slowness(config, data),
        heterogeneity=label_distance(data, dataset.classes) if dataset.loss == "cross-entropy" else None,
        relabelled=_relabelled(data, dataset),
        unlabelled=dataset.unlabelled is not None,
        table=4 * layout.parameters * scenario.clients,
        memory=free_memory(),
    )


def _probe(config: Config, data: ClientData, pace: str) -> tuple[list[Receipt], float, int]:
    """The receipts of a run that trains nothing, the time they took, and the versions they made."""
    scenario = config.scenario
    ticks = isinstance(scenario.scheduler, Ticks)
    rule: Any = FedAvg() if pace == "round" else ASGD(per="tick") if ticks else FedAsync()
    events = max(EVENTS, EACH * scenario.clients)
    stop = Stop(versions=ROUNDS) if pace == "round" else Stop(updates=events)
    simulator = assemble(
        cast(Strategy, rule),
        nn.Linear(1, 1, bias=False),
        data,
        stop=stop,
        delay=scenario.delay,
        availability=scenario.availability,
        scheduler=cast(Any, scenario.scheduler),
        rounds=cast(Any, scenario.rounds),
        local=config.local,
        manners=config.server,
        by=NullTrainer(1, data.sizes),
        seed=config.seed,
    )
    rows = [row for row in simulator.rows() if not isinstance(row, Measurement)]
    return [row for row in rows if not row.refused], simulator.now, simulator.server.version


def label_distance(data: ClientData, classes: int) -> float:
    """Mean total variation between a client's label mix and everyone's, beyond what chance gives.

    Half the sum of |share here - share among all|. Clients with few examples differ even where they were dealt out at
    random: by sum_k sqrt(2 p_k (1 - p_k) / (pi n)) / 2 on average, which is taken off.
    """
    mixes = torch.stack(
        [torch.bincount(data.targets[part], minlength=classes) for part in data.parts]
    ).double()
    total, sizes = mixes.sum(0) / mixes.sum(), mixes.sum(1)
    distance = (mixes / sizes[:, None] - total).abs().sum(1) / 2
    chance = (2 * total * (1 - total) / math.pi).sqrt().sum() / sizes.sqrt() / 2
    return max(0.0, float((distance - chance).mean()))


def _relabelled(data: ClientData, dataset: Dataset) -> float:
    """Of a client's examples of labels that it sees changed, the share that is; mean over the clients with any."""
    shares = []
    for part in data.parts:
        given, seen = dataset.targets[part], data.targets[part]
        changed = given != seen
        if bool(changed.any()):
            affected = torch.isin(given, given[changed])
            shares.append(float(changed.sum()) / float(affected.sum()))
    return statistics.fmean(shares) if shares else 0.0


def _slowness(config: Config, data: ClientData) -> float:
    work = [config.local.work(client, size) for client, size in enumerate(data.sizes)]
    duration = config.scenario.delay.bind(Scene(config.seed, data.sizes, work))
    means = [sum(duration(client, count) for count in range(PROBES)) for client in range(len(data.sizes))]
    return max(means) / min(means) if min(means) > 0 else 1.0


def free_memory() -> int | None:
    """Bytes of memory that a new process may have; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def always(config: Config) -> bool:
    """Whether who takes part is the scheduler's choice alone."""
    return (
        isinstance(config.scenario.availability, Always)
        and cast(Any, config.scenario.rounds).deadline is None
    )
