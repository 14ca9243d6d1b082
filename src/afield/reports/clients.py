"""One run by client: who is slow, who took part when, whose data the model fits. Aggregated, however long the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from afield.reports.curves import Floats
from afield.reports.load import Run

Ints = NDArray[np.int64]
ROWS = 100  # rows of a picture of clients: beyond, neighbours in speed share one
MOMENTS = 60  # columns of a picture over time
TENTH = 0.1


@dataclass(frozen=True)
class Log:
    """The columns of the receipts that pictures need, in the order of arrival."""

    client: Ints
    started: Floats
    arrived: Floats
    staleness: Ints
    weight: Floats
    used: NDArray[np.bool_]  # not refused

    @classmethod
    def of(cls, run: Run) -> Log:
        table = run.columns(["client", "started", "arrived", "staleness", "weight", "refused"])
        names = ("client", "started", "arrived", "staleness", "weight")
        columns: dict[str, Any] = {name: table[name].to_numpy() for name in names}
        return cls(**columns, used=pc.equal(table["refused"], "").to_numpy())


@dataclass(frozen=True)
class Clients:
    """The clients of a run. `order`: fastest first; those of whom nothing is known come last."""

    count: int
    duration: Floats  # of a task; NaN: unknown
    order: Ints
    received: Ints  # updates that were used
    labels: Floats | None  # clients x classes
    examples: Floats | None
    relabelled: bool  # labels mean different things to different clients

    @classmethod
    def of(cls, run: Run, log: Log) -> Clients:
        told = run.clients
        count = max(
            len(told.get("examples") or ()),
            int(run.summary.get("clients") or run.config.get("scenario", {}).get("clients") or 0),
            int(log.client.max(initial=-1)) + 1,
        )
        if told.get("duration"):
            duration = np.array(told["duration"], float)
        else:
            spent = np.bincount(log.client, log.arrived - log.started, minlength=count)
            with np.errstate(invalid="ignore"):
                duration = spent / np.bincount(log.client, minlength=count)
        received = np.bincount(log.client[log.used], minlength=count)
        labels = np.array(told["labels"], float) if told.get("labels") else None
        examples = np.array(told["examples"], float) if told.get("examples") else None
        order = np.argsort(duration, kind="stable")
        return cls(count, duration, order, received, labels, examples, bool(told.get("relabelled")))

    @property
    def rows(self) -> list[Ints]:
        """The clients in at most `ROWS` groups of neighbours in speed."""
        return [part for part in np.array_split(self.order, min(self.count, ROWS)) if len(part)]

    @property
    def slowest(self) -> Ints:
        """The slowest tenth of those whose speed is known, one client at the least."""
        known = self.order[: int(np.isfinite(self.duration).sum())]
        return known[len(known) - max(1, round(TENTH * len(known))) :] if len(known) else known

    def accuracies(self, per_class: list[float | None] | None) -> Floats | None:
        """Per client, the accuracy that the test set would show with that client's mix of classes.

        NaN for a client none of whose classes was tested; None where mixes or per-class accuracies are not known.
        """
        if self.labels is None or not per_class or self.labels.shape[1] != len(per_class) or self.relabelled:
            return None
        hits = np.array([np.nan if value is None else value for value in per_class])
        tested = np.isfinite(hits)
        weights = self.labels[:, tested]
        with np.errstate(invalid="ignore"):
            found: Floats = weights @ hits[tested] / weights.sum(axis=1)
        return found


def participation(clients: Clients, log: Log) -> tuple[Floats, Floats]:
    """Updates used per client (or per client of a row) and moment; the moments' right edges."""
    end = float(log.arrived.max(initial=0.0)) or 1.0
    edges = np.linspace(0, end, MOMENTS + 1)
    rows = clients.rows
    row_of = np.empty(clients.count, np.int64)
    for number, part in enumerate(rows):
        row_of[part] = number
    moment = np.minimum(np.searchsorted(edges, log.arrived[log.used], side="left") - 1, MOMENTS - 1)
    place = row_of[log.client[log.used]] * MOMENTS + np.maximum(moment, 0)
    found = np.bincount(place, minlength=len(rows) * MOMENTS).reshape(len(rows), MOMENTS).astype(float)
    return found / np.array([[len(part)] for part in rows]), edges[1:]


def shares(run: Run, clients: Clients) -> tuple[Floats, Floats] | None:
    """Each row's share of the model over the equal share, at the diagnosed moments; 1 is fair."""
    found = [row for row in run.diagnostics if sum(row.get("share") or ()) > 0]
    if not found or len(found[0]["share"]) != clients.count:
        return None
    picked = [found[i] for i in np.unique(np.linspace(0, len(found) - 1, MOMENTS).round().astype(int))]
    all_shares = np.array([row["share"] for row in picked], float)
    fair = all_shares / all_shares.sum(axis=1, keepdims=True) * clients.count
    by_row = np.stack([fair[:, part].mean(axis=1) for part in clients.rows])
    return by_row, np.array([row["time"] for row in picked], float)


@dataclass(frozen=True)
class Stretch:
    """A part of a run in full detail: whole tasks of some clients up to a moment."""

    shown: Ints  # clients, fastest first
    row: Ints  # of each task, its client's place in `shown`
    started: Floats
    arrived: Floats
    staleness: Ints
    used: NDArray[np.bool_]
    until: float
    whole: bool  # nothing was left out


def stretch(clients: Clients, log: Log, rows: int = 30, tasks: int = 3000) -> Stretch:
    """At most `rows` clients, evenly from fast to slow, for as long as they have at most `tasks` tasks."""
    heard = clients.order[np.bincount(log.client, minlength=clients.count)[clients.order] > 0]
    shown = heard[np.unique(np.linspace(0, max(len(heard) - 1, 0), rows).round().astype(int))[: len(heard)]]
    row_of = np.full(clients.count, -1)
    row_of[shown] = np.arange(len(shown))
    index = np.flatnonzero(row_of[log.client] >= 0)
    index = index[np.argsort(log.arrived[index], kind="stable")][:tasks]
    until = float(log.arrived[index].max(initial=0.0))
    whole = len(shown) == len(heard) and len(index) == len(log.client)
    return Stretch(
        shown,
        row_of[log.client[index]],
        log.started[index],
        log.arrived[index],
        log.staleness[index],
        log.used[index],
        until,
        whole,
    )
