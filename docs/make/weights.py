"""What every client weighs over time under a strategy, found by running it, and drawn as SVG.

One trace for all: ten clients, each 1.35 times as slow as the one before, train on digits for real. Where a rule
is linear, its own code then runs again on unit vectors (core/linear.py) and gives the weights; else they are those of
the receipts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import afield
from afield.core.linear import ClientWeights, TaskWeights, weights_of
from afield.core.types import Receipt, Scene, Task, Update
from afield.scenarios.data import Digits
from afield.strategies import STRATEGIES

CLIENTS = 10
FASTEST, RATIO = 0.5, 1.35  # what a task takes: of the first client, and how much longer of the next
SPAN, ROUNDS_SPAN = 24.0, 72.0  # a round lasts as long as its slowest participant
SMALL = {
    "size": 4,
    "samples": 40,
    "batch": 20,
    "rate": 1e-3,
    "p": "known",
}  # where a strategy has such a parameter
Moment = tuple[float, list[float]]  # when, and what each client weighs from then on


@dataclass(frozen=True)
class Ladder:
    """Client i takes FASTEST * RATIO^i for a task."""

    def bind(self, scene: Scene) -> Callable[[int, int], float]:
        return lambda client, count: FASTEST * RATIO**client


@dataclass(frozen=True)
class Picture:
    """What all clients weigh over time: in the model, or in the newest step."""

    of: str  # "model" or "step"
    span: float
    moments: list[Moment]

    def between(self, start: float, end: float) -> list[float]:
        """The mean over the moments of a stretch; where it has none, what the last one before left."""
        inside = [found for when, found in self.moments if start <= when < end]
        before = [found for when, found in self.moments if when < start]
        rows = inside or before[-1:] or [[0.0] * CLIENTS]
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    def overall(self) -> list[float]:
        """Each client's part of all weight: of all steps, or of the model in the mean over time."""
        total = [0.0] * CLIENTS
        ends = [*(when for when, _ in self.moments[1:]), self.span]
        for (when, found), end in zip(self.moments, ends, strict=True):
            for client, weight in enumerate(found):
                total[client] += abs(weight) * (1.0 if self.of == "step" else end - when)
        mass = sum(total)
        return [value / mass if mass else 0.0 for value in total]


@cache
def picture(name: str) -> Picture:
    """The picture of a strategy by its name."""
    strategy = STRATEGIES[name]()
    known = {field.name for field in fields(strategy)}
    strategy = replace(strategy, **{key: value for key, value in SMALL.items() if key in known})
    rounds = getattr(strategy, "pace", "arrival") == "round"
    cohort = afield.schedulers.Cohort(size=CLIENTS // 2)
    span = ROUNDS_SPAN if rounds else SPAN
    receipts = _simulated(strategy, cohort, span)
    if hasattr(strategy, "fitted"):
        strategy = strategy.fitted(CLIENTS, cohort.participation(CLIENTS))
    weights = weights_of(strategy, CLIENTS)
    if weights is None:
        return Picture("step", span, list(_told(receipts, rounds)))
    of = "model" if isinstance(weights, ClientWeights) else "step"
    return Picture(of, span, list(_replayed(weights, receipts)))


def _simulated(strategy: Any, cohort: Any, span: float) -> list[Receipt]:
    data = Digits(limit=400, held_out=50).load(0)
    parts, _ = afield.partition.Dirichlet(alpha=0.5).split(data.targets, CLIENTS, 0)
    torch.manual_seed(0)
    return afield.simulate(
        strategy,
        nn.Linear(64, 10),
        [TensorDataset(data.inputs[part].flatten(1), data.targets[part]) for part in parts],
        delay=Ladder(),
        rounds=cohort,
        local=afield.Local(epochs=1, rate=0.1),
        unlabelled=None if data.unlabelled is None else data.unlabelled.flatten(1),
        time=span,
    ).receipts


def _replayed(weights: TaskWeights | ClientWeights, receipts: list[Receipt]) -> Iterator[Moment]:
    """The rule's own code, fed with unit vectors in the order of the log."""
    owners = {}
    blank = torch.zeros(1, dtype=torch.float64)
    last = 0.0
    for receipt in receipts:
        while (
            weights.state.version < receipt.version - receipt.stepped
        ):  # a round ended with the arrival before
            weights.close_round()
            yield last, _shares(weights, owners)
        owners[receipt.number] = receipt.client
        task = Task(receipt.number, receipt.client, 0, receipt.base, receipt.started)
        weights.receive(
            Update(task, blank, blank, receipt.examples, 1, 1.0, arrived=receipt.arrived, metrics={})
        )
        last = receipt.arrived
        if receipt.stepped:
            yield last, _shares(weights, owners)


def _shares(weights: TaskWeights | ClientWeights, owners: Mapping[int, int]) -> list[float]:
    if isinstance(weights, ClientWeights):
        return weights.shares()
    total = [0.0] * CLIENTS
    for number, weight in weights.step.items():
        total[owners[number]] += weight
    return total


def _told(receipts: list[Receipt], rounds: bool) -> Iterator[Moment]:
    """What the receipts of a step say that each update weighed in it."""
    held: list[Receipt] = []
    for number, receipt in enumerate(receipts):
        held.append(receipt)
        after = receipts[number + 1].version if number + 1 < len(receipts) else receipt.version
        if receipt.stepped or (rounds and after > receipt.version):
            total = [0.0] * CLIENTS
            for one in held:
                total[one.client] += one.weight / sum(part.weight for part in held)
            yield receipt.arrived, total
            held = []


# -- the drawing --------------------------------------------------------------------------------------------

COLUMNS = 144
LEFT, TOP, CELL, ROW, BAR = 62, 26, 4, 17, 90


def svg(found: Picture) -> str:
    """One row a client, the fastest on top; the darker, the more it weighs. Bars: over the whole span."""
    step = found.span / COLUMNS
    grid = [found.between(column * step, (column + 1) * step) for column in range(COLUMNS)]
    peak = max(max(map(abs, shares)) for shares in grid) or 1.0
    overall = found.overall()
    right = LEFT + COLUMNS * CELL + 12
    width, height = right + BAR + 40, TOP + CLIENTS * ROW + 42
    title = "weight in the newest step" if found.of == "step" else "share of the model"
    parts = [
        f'<svg class="weights" viewBox="0 0 {width} {height}" role="img" font-size="11" fill="currentColor" '
        f'aria-label="share of each client in the {found.of} over time" xmlns="http://www.w3.org/2000/svg">',
        f'<text x="{LEFT - 8}" y="16" text-anchor="end">a task</text>',
        f'<text x="{LEFT}" y="16">{title}</text>',
        f'<text x="{right}" y="16">overall</text>',
    ]
    for client in range(CLIENTS):
        y = TOP + client * ROW
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{FASTEST * RATIO**client:.1f} s</text>'
        )
        for start, length, share in _runs([shares[client] for shares in grid]):
            opacity = (abs(share) / peak) ** 0.5
            if opacity > 0.02:
                colour = "#3f51b5" if share > 0 else "#c62828"
                parts.append(
                    f'<rect x="{LEFT + start * CELL}" y="{y}" width="{length * CELL}" height="{ROW - 2}" '
                    f'fill="{colour}" fill-opacity="{opacity:.2f}"/>'
                )
        bar = BAR * overall[client] / max(*overall, 1e-9)
        parts.append(
            f'<rect x="{right}" y="{y + 2}" width="{bar:.1f}" height="{ROW - 6}" fill="#ef8a17"/>'
            f'<text x="{right + bar + 4:.1f}" y="{y + 12}">{100 * overall[client]:.0f} %</text>'
        )
    bottom = TOP + CLIENTS * ROW
    parts.append(
        f'<rect x="{LEFT}" y="{TOP}" width="{COLUMNS * CELL}" height="{CLIENTS * ROW - 2}" fill="none" '
        'stroke="currentColor" stroke-opacity="0.3"/>'
    )
    for tick in range(7):
        x = LEFT + COLUMNS * CELL * tick / 6
        parts.append(
            f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="middle">{found.span * tick / 6:g}</text>'
        )
    parts.append(
        f'<text x="{LEFT + COLUMNS * CELL / 2}" y="{bottom + 30}" text-anchor="middle">virtual time</text>'
    )
    parts.append(f'<text x="{right}" y="{bottom + 14}">darkest: {peak:.2g}</text></svg>')
    return "".join(parts)


def _runs(values: list[float]) -> Iterator[tuple[int, int, float]]:
    """Stretches of one value: (start, length, value)."""
    start = 0
    for number in range(1, len(values) + 1):
        if number == len(values) or abs(values[number] - values[start]) > 1e-4:
            yield start, number - start, values[start]
            start = number
