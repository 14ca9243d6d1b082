"""What seeds tell about noise: spreads, confidence intervals, and whether two means can be told apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# The 0.975 quantile of Student's t for 1, 2, ... 30 degrees of freedom: no need for scipy.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over the seeds of a label that have it."""

    mean: float
    std: float  # of the sample (n - 1); 0 for one seed
    count: int

    @property
    def margin(self) -> float | None:
        """Half the 95 % confidence interval of the mean (Student's t); None for one seed: its noise is unknown."""
        if self.count < 2:
            return None
        return student(self.count - 1) * self.std / math.sqrt(self.count)


def spread_of(values: Iterable[float | None]) -> Spread | None:
    present = [float(value) for value in values if value is not None]
    if not present:
        return None
    # statistics.stdev refuses what is not finite; a diverged seed makes the whole spread NaN.
    finite = all(math.isfinite(value) for value in present)
    std = (statistics.stdev(present) if finite else math.nan) if len(present) > 1 else 0.0
    return Spread(math.fsum(present) / len(present), std, len(present))


def student(freedom: float) -> float:
    """The 0.975 quantile of t; between whole degrees and beyond 30 the larger one: rather too wide than too sure."""
    whole = math.floor(freedom)
    return _STUDENT[min(max(whole, 1), len(_STUDENT)) - 1]


def apart(a: Spread, b: Spread) -> bool | None:
    """Whether two means differ beyond noise: Welch's t at 95 %. None where a label has one seed: nobody knows."""
    if min(a.count, b.count) < 2:
        return None
    own = [s.std**2 / s.count for s in (a, b)]
    error = math.sqrt(sum(own))
    if math.isnan(error) or math.isnan(a.mean - b.mean):
        return None
    if error == 0:
        return a.mean != b.mean
    freedom = sum(own) ** 2 / sum(part**2 / (s.count - 1) for part, s in zip(own, (a, b), strict=True))
    return abs(a.mean - b.mean) > student(freedom) * error


def ties_of(spreads: Sequence[Spread | None], best: int) -> set[int]:
    """Which others cannot be told from the best, where noise is known."""
    first = spreads[best]
    assert first is not None
    others = [(i, s) for i, s in enumerate(spreads) if i != best and s is not None]
    return {i for i, s in others if apart(first, s) is False}
