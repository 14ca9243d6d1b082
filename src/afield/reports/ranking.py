"""Whether two tables put methods into the same order, and what is noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Number:
    """A mean and its standard deviation over seeds (None: not told, or one seed)."""

    mean: float
    std: float | None = None


@dataclass(frozen=True, slots=True)
class Ranking:
    """How the orders of two columns compare, pair by pair."""

    ours: str  # best first: "a > b = c"
    theirs: str
    pairs: int
    agree: int
    ties: int  # pairs that are equal on either side count for neither
    clear: int  # pairs that both sides set apart by more than their noise
    clear_agree: int
    against: tuple[tuple[str, str], ...]  # clear pairs in which we disagree: better in the paper, better here

    @property
    def tau(self) -> float:
        """Kendall's: 1 is the same order, -1 the reverse."""
        return (2 * self.agree + self.ties - self.pairs) / self.pairs

    def sentence(self) -> str:
        if self.agree == self.pairs:
            return "the same order"
        known = f"{self.agree} of {self.pairs} pairs agree (tau {self.tau:.2f})"
        if self.against:
            names = "; ".join(f"{first} over {second}" for first, second in self.against)
            return f"another order: {known}; here the other way round beyond noise: {names}"
        if self.clear:
            return f"the same order outside noise: {known}, all {self.clear} that both set apart do"
        return f"undecided: {known}, none is set apart beyond noise on both sides"


def compare(ours: Mapping[str, Number], theirs: Mapping[str, Number], better: int) -> Ranking | None:
    """Compare the methods that both have; None where these are fewer than two."""
    common = [name for name in theirs if name in ours and math.isfinite(ours[name].mean)]
    if len(common) < 2 or not better:
        return None
    agree = ties = clear = clear_agree = 0
    against = []
    for a, b in itertools.combinations(common, 2):
        here = better * (ours[a].mean - ours[b].mean)
        there = better * (theirs[a].mean - theirs[b].mean)
        same = here * there > 0
        agree += same
        ties += here * there == 0
        if abs(here) > _noise(ours[a], ours[b]) and abs(there) > _noise(theirs[a], theirs[b]):
            clear += 1
            clear_agree += same
            if not same:
                against.append((a, b) if there > 0 else (b, a))
    if ties == len(common) * (len(common) - 1) // 2:
        return None  # one number of the paper for all: there is no order to compare
    return Ranking(
        ours=_order({name: ours[name].mean for name in common}, better),
        theirs=_order({name: theirs[name].mean for name in common}, better),
        pairs=len(common) * (len(common) - 1) // 2,
        agree=agree,
        ties=ties,
        clear=clear,
        clear_agree=clear_agree,
        against=tuple(against),
    )


def _noise(a: Number, b: Number) -> float:
    """The standard deviation of the difference, as far as it is known."""
    return math.hypot(a.std or 0.0, b.std or 0.0)


def _order(means: Mapping[str, float], better: int) -> str:
    names = sorted(means, key=lambda name: -better * means[name])
    text = names[0]
    for before, name in itertools.pairwise(names):
        text += f" {'=' if means[before] == means[name] else '>'} {name}"
    return text
