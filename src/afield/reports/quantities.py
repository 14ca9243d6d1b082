"""What a table of a paper may show of a run: one number per run, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from afield.reports.load import LoadError, Run
from afield.reports.tables import best_of, final_of


@dataclass(frozen=True, slots=True)
class Quantity:
    """How a number is read, in which unit it is shown, and which way is better (0: neither)."""

    title: str
    read: Callable[[Run], float | None]
    better: int = 0
    digits: int = 4  # significant ones; below 0: decimals


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _lowest(run: Run) -> float | None:
    values = [row["loss"] for row in run.series("loss") if not math.isnan(row["loss"])]
    return min(values, default=None)


def _told(key: str, size: float = 1.0) -> Callable[[Run], float | None]:
    """A number of the summary."""

    def read(run: Run) -> float | None:
        value: Any = run.summary.get(key)
        return None if value is None else value / size

    return read


def _wall(run: Run) -> float | None:
    """Seconds; runs that went together share theirs."""
    wall = run.summary.get("wall")
    return None if wall is None else wall / run.summary.get("together", 1)


def _each(count: str, wall: str) -> Callable[[Run], float | None]:
    """Seconds per one of those that the summary counts."""

    def read(run: Run) -> float | None:
        return run.summary[wall] / run.summary[count] if run.summary.get(count) else None

    return read


def _refused(run: Run) -> float | None:
    return float(sum(run.summary.get("refused", {}).values()))


QUANTITIES: dict[str, Quantity] = {
    "best": Quantity("best accuracy (%)", lambda run: _percent(best_of(run)), 1, -2),
    "final": Quantity("final accuracy (%)", lambda run: _percent(final_of(run, "accuracy")), 1, -2),
    "loss": Quantity("test loss", lambda run: final_of(run, "loss"), -1),
    "best_loss": Quantity("lowest test loss", _lowest, -1),
    "train_loss": Quantity("training loss", lambda run: final_of(run, "train_loss"), -1),
    "wall": Quantity("wall time (s)", _wall, 0, 3),
    "contributors": Quantity("clients that contributed", _told("contributors")),
    "clients": Quantity("clients", _told("clients")),
    "staleness": Quantity("mean staleness", _told("staleness"), 0, 3),
    "refused": Quantity("updates refused", _refused),
    "interrupted": Quantity("tasks interrupted", _told("interrupted")),
    "updates": Quantity("updates", _told("updates"), 0, 6),
    "versions": Quantity("versions", _told("versions"), 0, 6),
    "gradients": Quantity("gradients", _told("steps"), 0, 6),
    "megabytes": Quantity("MB received", _told("bytes", 1e6)),
    "distillation": Quantity("seconds per distillation", _each("distillations", "distil_wall"), -1, 3),
    "inference": Quantity("seconds per client's logits", _each("inferences", "infer_wall"), -1, 3),
    "checkpoints": Quantity("versions held at most", _told("versions_held"), -1),
    "server_memory": Quantity("server state (MB)", _told("server_bytes", 1e6), -1),
    "client_memory": Quantity("kept by a client (MB)", _told("client_bytes", 1e6), -1),
    "peak_memory": Quantity("GPU memory at most (MB)", _told("peak_bytes", 1e6), -1),
}
ALWAYS = ("best", "final", "loss", "train_loss", "wall")  # in every result


def quantity(name: str) -> Quantity:
    if name not in QUANTITIES:
        raise LoadError(f"{name!r} is no quantity: choose from {', '.join(QUANTITIES)}")
    return QUANTITIES[name]
