"""What a report says of each label, computed once: numbers for the words, tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from afield.reports.clients import TENTH, Clients, Log
from afield.reports.curves import Floats, by_label
from afield.reports.load import LoadError, Run
from afield.reports.noise import Spread, spread_of
from afield.reports.tables import Comparison, Row, compare

TERMS = ("noise", "bias", "delay")


class Seen:
    """One run, its log read once and only when asked for."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def log(self) -> Log:
        return Log.of(self.run)

    @cached_property
    def clients(self) -> Clients:
        return Clients.of(self.run, self.log)

    @cached_property
    def per_class(self) -> list[float | None] | None:
        """Of the last evaluation."""
        rows = [row for row in self.run.metrics if row.get("per_class")]
        return rows[-1]["per_class"] if rows else None

    @cached_property
    def accuracies(self) -> Floats | None:
        return self.clients.accuracies(self.per_class)


@dataclass(frozen=True)
class Digest:
    """One label: means over its seeds. None: no seed has it."""

    row: Row
    seen: tuple[Seen, ...]
    bytes_to_target: Spread | None
    everyone: Spread | None  # the mean client's accuracy at the end, on its own mix of classes
    slowest: Spread | None  # the same of the slowest tenth
    worst: Spread | None  # of the tenth that is served worst
    behind: Spread | None  # slowest - everyone, seed by seed
    busiest: Spread | None  # the share of all used updates that the busiest tenth sent
    silent: Spread | None  # clients of whom no update was used
    terms: (
        dict[str, float] | None
    )  # noise, bias and delay: shares of their sum over the second half of the run

    @property
    def label(self) -> str:
        return self.row.label


@dataclass(frozen=True)
class Facts:
    """Everything that the words are made of."""

    comparison: Comparison
    digests: tuple[Digest, ...]
    mixed: dict[str, list[str]]  # labels whose runs differ in more than their seed, and in which keys


def facts_of(runs: Sequence[Run], target: float | None = None) -> Facts:
    if not runs:
        raise LoadError("there is no run to report")
    comparison = compare(runs, target)
    groups = by_label(runs)
    digests = [
        _digest(row, groups[row.label], comparison.target) for row in comparison.rows
    ]  # rows and groups have one order
    mixed = {label: keys for label, group in groups.items() if (keys := differences(group))}
    return Facts(comparison, tuple(digests), mixed)


def _digest(row: Row, runs: Sequence[Run], target: float | None) -> Digest:
    seen = tuple(Seen(run) for run in runs)
    served = [one for one in seen if one.accuracies is not None]
    heard = [one for one in seen if one.clients.received.sum()]
    return Digest(
        row,
        seen,
        bytes_to_target=spread_of(_bytes_to(run, target) for run in runs),
        everyone=spread_of(mean_of(one.accuracies) for one in served),
        slowest=spread_of(mean_of(_of_slowest(one)) for one in served),
        worst=spread_of(worst_of(one.accuracies) for one in served),
        behind=spread_of(_behind(one) for one in served),
        busiest=spread_of(_busiest(one.clients) for one in heard),
        silent=spread_of(int((one.clients.received == 0).sum()) for one in heard),
        terms=_terms(runs),
    )


def _bytes_to(run: Run, target: float | None) -> float | None:
    rows = run.series("accuracy")
    return next((row.get("bytes") for row in rows if target is not None and row["accuracy"] >= target), None)


def mean_of(values: Floats | None) -> float | None:
    known = values[np.isfinite(values)] if values is not None else np.empty(0)
    return float(known.mean()) if known.size else None


def worst_of(values: Floats | None) -> float | None:
    """The mean of the worst tenth, one client at the least."""
    known = np.sort(values[np.isfinite(values)]) if values is not None else np.empty(0)
    return float(known[: max(1, round(TENTH * known.size))].mean()) if known.size else None


def _of_slowest(one: Seen) -> Floats | None:
    return None if one.accuracies is None else one.accuracies[one.clients.slowest]


def _behind(one: Seen) -> float | None:
    slow, all_of_them = mean_of(_of_slowest(one)), mean_of(one.accuracies)
    return None if slow is None or all_of_them is None else slow - all_of_them


def _busiest(clients: Clients) -> float:
    most = np.sort(clients.received)[::-1][: max(1, round(TENTH * clients.count))]
    return float(most.sum() / clients.received.sum())


def _terms(runs: Sequence[Run]) -> dict[str, float] | None:
    """Over the second half, where the start's large gradients do not drown the rest."""
    sums = dict.fromkeys(TERMS, 0.0)
    for run in runs:
        rows = [row for row in run.metrics if all(isinstance(row.get(term), int | float) for term in TERMS)]
        for row in rows[len(rows) // 2 :]:
            for term in TERMS:
                sums[term] += row[term]
    total = sum(sums.values())
    return {term: value / total for term, value in sums.items()} if total > 0 else None


# -- settings ---------------------------------------------------------------------------------------


def flat(config: dict[str, object], before: str = "") -> dict[str, object]:
    """Nested tables as dotted keys."""
    found: dict[str, object] = {}
    for key, value in config.items():
        name = f"{before}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def differences(runs: Sequence[Run], besides: Sequence[str] = ("seed",)) -> list[str]:
    """The keys in which runs differ, in the order of their files."""
    configs = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key not in besides)
    return [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
