"""Which algorithm suits a scenario: measured in a short probe, judged by the papers' own guidelines.

Every recommendation carries its reason and the paper behind it; what neither the probe nor a paper can tell is listed
as unknown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from afield.experiments.codec import Table, dumps
from afield.experiments.config import Config
from afield.experiments.probe import Facts, always, measure

ALIKE = 0.1  # ours: below, clients count as alike; Dirichlet(5) over 10 classes has 0.13, Dirichlet(10) 0.08
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


def advise(config: Config) -> Advice:
    """Measure, then judge."""
    facts = measure(config)
    rule = _for_rounds if facts.pace == "round" else _for_arrivals
    return Advice(facts, tuple(rule(facts, config)), _unknown(facts, config))


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
    sure = always(config)
    p: Table = {"p": "known"} if sure else {}  # who is offline makes the scheduler's probabilities untrue
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
    beta = _beta(unlike, ratio, known=sure)
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
