"""Which algorithm suits a scenario: measured in a short probe, judged by the papers' own guidelines.

The probe moves the same clients on the same clock, but trains nothing: who arrives when, and how stale, does not
depend on what is learned. Every recommendation carries its reason and the paper behind it; what neither the probe
nor a paper can tell is listed as unknown.
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
from afield.experiments.codec import Table, dumps
from afield.experiments.config import Config
from afield.experiments.run import PROBES, load_data
from afield.runtimes.simulate import assemble
from afield.runtimes.simulator import Measurement
from afield.runtimes.terms import Stop
from afield.scenarios.availability import Always
from afield.scenarios.data import ClientData, Dataset
from afield.scenarios.schedulers import Ticks
from afield.strategies import ASGD, FedAsync, FedAvg
from afield.training.models import build

EVENTS, EACH = 20_000, 40  # updates in a probe, and at the least per client: about a second
ROUNDS = 1_000  # rounds in a probe
ALIKE = 0.1  # heterogeneity below which clients count as alike; Dirichlet(10) with 10 classes has about 0.1
EVEN = 3.0  # FedStale section 5.2: participation counts as even below p_avg = 3 p_min ...
UNEVEN = 25.0  # ... and as very uneven from 25 p_min on
MILD = 10.0  # FedEcho table 1: its slow clients take 10 times (mild) to 40 times (large) as long as the fast
# FedStale figure 5 (sigma_g^2 = 0.6): p_avg / p_min -> the best beta, p known and p estimated
BETAS = (
    (1.5, 1.0, 1.0),
    (3, 0.8, 0.8),
    (5.5, 0.8, 0.5),
    (10.5, 0.5, 0.5),
    (25.5, 0.5, 0.2),
    (50.5, 0.5, 0.2),
)
GRID = (0.0, 0.2, 0.5, 0.8, 1.0)  # FedStale's values of beta


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


@dataclass(frozen=True)
class Recommendation:
    """A strategy for the config, why, and who says so."""

    strategy: Table
    reason: str
    paper: str

    @property
    def toml(self) -> str:
        return dumps({"strategy": self.strategy})


@dataclass(frozen=True)
class Advice:
    facts: Facts
    recommended: tuple[Recommendation, ...]  # the first is the advice, the others are worth a try
    unknown: tuple[str, ...]


class NullTrainer:
    """Gives everyone the same result: for a probe of the clock."""

    method = "null"

    def __init__(self, size: int, sizes: Sequence[int]) -> None:
        self.results = [LocalResult(torch.zeros(size), count, 1, 1.0, finite=True) for count in sizes]

    def train(
        self, tasks: Sequence[Task], bases: Sequence[Tensor], corrections: Sequence[Tensor | None]
    ) -> list[LocalResult]:
        return [self.results[task.client] for task in tasks]


def advise(config: Config) -> Advice:
    """Measure, then judge."""
    facts = measure(config)
    rule = _for_rounds if facts.pace == "round" else _for_arrivals
    return Advice(facts, tuple(rule(facts, config)), _unknown(facts, config))


# -- the probe ----------------------------------------------------------------------------------------------------


def measure(config: Config) -> Facts:
    scenario, seed = config.scenario, config.seed
    dataset = load_data(config)
    parts, targets = scenario.partition.split(dataset.targets, scenario.clients, seed)
    data = ClientData(dataset.inputs, targets, parts)
    module = build(config.model, tuple(dataset.inputs.shape[1:]), dataset.classes, seed)
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
    chances = counts if pace != "round" or not _always(config) else plan.participation(scenario.clients)
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


def _always(config: Config) -> bool:
    """Whether who takes part is the scheduler's choice alone."""
    return (
        isinstance(config.scenario.availability, Always)
        and cast(Any, config.scenario.rounds).deadline is None
    )


# -- the judgement ------------------------------------------------------------------------------------------------


def _for_arrivals(facts: Facts, config: Config) -> list[Recommendation]:
    """Updates used as they arrive. Unlike clients: everyone must count; else the simplest rule that averages."""
    alike = facts.unlike < ALIKE
    uneven = facts.participation >= EVEN
    step = "tick" if facts.pace == "tick" else "arrival"
    found = []
    if facts.pace != "tick" and facts.unlabelled and not alike and facts.slowness >= MILD:
        found.append(_fedecho(facts))
    if alike:
        found.append(_buffered(facts) if step == "arrival" else _plain_ticks(facts))
        if step == "arrival" and (facts.stalest or 0) > facts.concurrency:
            found.append(_delay_adaptive(facts))
    elif step == "tick" or not (uneven or facts.silent):
        found.append(_ace(facts, step))
    else:
        found += [_aced(facts), _ace(facts, step)]
    if step == "arrival":
        found.append(_mr_asyncfl(facts))
        if not alike:
            found.append(_buffered(facts))
    return found


def _buffered(facts: Facts) -> Recommendation:
    size = max(1, min(10, facts.concurrency // 2))
    bias = "clients are alike, so who takes part biases nothing"
    if facts.unlike >= ALIKE:
        bias = "the plain baseline, drawn to whoever comes more often"
    reason = (
        f"averages {size} updates a step without a table: {bias}. "
        f"Size: the paper's 10, but no more than half of the {facts.concurrency} that train at a time"
    )
    return Recommendation({"name": "fedbuff", "size": size}, reason, "FedBuff (Nguyen et al. 2022)")


def _plain_ticks(facts: Facts) -> Recommendation:
    return Recommendation(
        {"name": "asgd", "per": "tick"},
        "clients are alike: the mean of whoever is due biases nothing",
        "ACE, section 4 (the bias of ASGD grows with heterogeneity)",
    )


def _delay_adaptive(facts: Facts) -> Recommendation:
    reason = (
        f"some updates are staler ({facts.stalest}) than the {facts.concurrency} that train at a time: their steps "
        "shrink. lr is ours: one task of everyone in flight together moves as far as one round"
    )
    table = {"name": "delay-adaptive-asgd", "lr": _rounded(1 / facts.concurrency)}
    return Recommendation(table, reason, "Koloskova et al. 2022, eq. 11")


def _ace(facts: Facts, step: str) -> Recommendation:
    table: Table = {"name": "ace", "lr": _rounded(1 / facts.clients), **_stored(facts, held=True)}
    if step == "tick":
        table |= {"per": "tick", "lr": 1.0}
    reason = (
        f"clients are {facts.seen}: the mean of everyone's newest update has no participation bias. "
        "lr is ours: N steps together move as far as one round"
    )
    return Recommendation(table, reason, "ACE, section 3.3")


def _aced(facts: Facts) -> Recommendation:
    delay = max(1, round(2 * (facts.delay or 0)))
    table = {"name": "aced", "lr": _rounded(1 / facts.clients), "max_delay": float(delay), **_stored(facts)}
    who = (
        f"{facts.silent} clients never came" if facts.silent else f"p_avg / p_min = {facts.participation:.1f}"
    )
    reason = (
        f"clients are {facts.seen} and some rare ({who}): everyone counts, but "
        f"nobody for longer than max_delay, twice the mean delay of {facts.delay or 0:.1f} versions"
    )
    return Recommendation(table, reason, "ACE, section 5 and appendix D (tau_algo = 2 beta)")


def _mr_asyncfl(facts: Facts) -> Recommendation:
    gamma = round(1 - facts.expected**-0.25, 2)
    reason = (
        f"keeps only each client's newest model in the global one; gamma = 1 - T^(-1/4) with T = {facts.expected:,} "
        "updates (0.82 at the paper's T = 1,000, where 0.8 was the best of four)"
    )
    table = {"name": "mr-asyncfl", "gamma": min(max(gamma, 0.1), 0.99), **_stored(facts)}
    return Recommendation(table, reason, "MR.AsyncFL, theorem 1 and figure 2")


def _fedecho(facts: Facts) -> Recommendation:
    size = max(1, min(5, facts.concurrency // 2))
    reason = (
        f"the slowest take {facts.slowness:.0f} times as long as the fastest, and there is unlabelled data: they "
        "teach by predictions, which age less than parameters"
    )
    return Recommendation({"name": "fedecho", "size": size}, reason, "FedEcho, tables 1 to 3")


def _for_rounds(facts: Facts, config: Config) -> list[Recommendation]:
    """FedStale: more weight to stale updates the more unlike the data (guideline A), less the rarer some are (B)."""
    unlike, ratio = facts.unlike, facts.participation
    always = _always(config)
    p: Table = {"p": "known"} if always else {}  # who is offline makes the scheduler's probabilities untrue
    paper = "FedStale (Rodio, Neglia 2024), guidelines A and B, section 5.2"
    known = "unknown" if facts.heterogeneity is None else f"{unlike:.2f}"
    shown = f"p_avg / p_min = {ratio:.1f}, heterogeneity {known}"
    if unlike < ALIKE and ratio < EVEN:
        return [
            Recommendation({"name": "fedavg"}, f"{shown}: clients are alike and come equally often", paper),
            Recommendation({"name": "u-fedavg", **p}, "the same with unbiased weights", paper),
        ]
    if unlike < 0.2 and ratio >= UNEVEN:
        reason = f"{shown}: with clients alike and some very rare, stale updates only add noise (beta 0)"
        return [Recommendation({"name": "u-fedavg", **p}, reason, paper)]
    beta = _beta(unlike, ratio, known=always)
    reason = f"{shown}: beta by figure 5" + (", a step less for data this alike (A)" if unlike < 0.2 else "")
    table: Table = {"name": "fedvarp"} if beta == 1 else {"name": "fedstale", "beta": beta}
    found = [Recommendation({**table, **p, **_stored(facts)}, reason, paper)]
    if beta != 0.5:
        robust = {"name": "fedstale", "beta": 0.5, **p, **_stored(facts)}
        found.append(Recommendation(robust, "untuned, robust up to p_avg = 25 p_min", "FedStale, figure 4"))
    return found


def _beta(unlike: float, ratio: float, known: bool) -> float:
    """Figure 5's column that is nearest by ratio; one value of the grid less where data are nearly alike."""
    capped = min(ratio, BETAS[-1][0])
    row = min(BETAS, key=lambda row: abs(math.log(row[0] / capped)))
    beta = row[1] if known else row[2]
    return beta if unlike >= 0.2 else GRID[max(GRID.index(beta) - 1, 1)]


def _stored(facts: Facts, held: bool = False) -> Table:
    """How a table of N vectors fits into half of the free memory; where int8 does not, clients may hold their own."""
    if facts.memory is None or facts.table <= facts.memory / 2:
        return {}
    if held and facts.table / 4 > facts.memory / 2:
        return {"held": "client"}
    return {"precision": "int8"}


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def _unknown(facts: Facts, config: Config) -> tuple[str, ...]:
    notes = [
        "the noise of the gradients: with much of it, larger buffers and fewer stale updates",
        "the best local rate and server lr: tune them for each algorithm",
        "unlike inputs under like labels, and the quality of labels: only label mixes were compared",
    ]
    if facts.heterogeneity is None:
        notes.append("how unlike the clients are: there are no classes to compare; they are taken as unlike")
    if facts.silent:
        notes.append(f"{facts.silent} of {facts.clients} clients never took part: whether they ever would")
    if facts.unlabelled is False and facts.slowness >= MILD:
        notes.append(
            "whether there is unlabelled data to distil from (scenario.data.unlabelled): try fedecho then"
        )
    if facts.memory is not None and facts.table / 4 > facts.memory / 2:
        notes.append(
            "how much memory the machine of the run has: a table of all clients does not fit this one"
        )
    return tuple(notes)
