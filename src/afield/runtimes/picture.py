"""A simulation as a value that can be stored, and back: all of it that changes while it runs.

What configs and seeds give (data, delays, strategy, trainer) is made anew. Results that are still being computed are
not waited for: their tasks are trained again, which is exact (law 2). A block that is wanted is kept as the list of
its tasks, so that it is trained as the same block, to the same bits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from afield.core.types import LocalResult
from afield.runtimes.diagnose import Held, ObservedServer, Step, Watch
from afield.runtimes.simulator import Event, Simulator
from afield.runtimes.terms import Since
from afield.store.kinds import Kind, kinds_of

PLAIN = (
    "now", "updates", "steps_done", "bytes", "interrupted", "broken", "sequence", "measured", "ended", "told",
    "since", "flow", "held",
)  # fmt: skip


def kinds(sim: Simulator) -> dict[str, Kind]:
    """The classes that a picture of this simulation may hold; also those of the strategy's own file."""
    found = kinds_of(sim.server.state, sim.flow)
    own = vars(sys.modules[type(sim.server.strategy).__module__])
    known = [kind for kind in own.values() if isinstance(kind, type) and is_dataclass(kind)]
    for kind in (Since, Watch, Held, Step, *known):
        found.setdefault(kind.__name__, kind)
    return found


def picture(sim: Simulator) -> dict[str, Any]:
    """To be taken at a row, or before a block; borrowed: it holds the very objects that the run goes on with."""
    if not sim.still:
        raise RuntimeError("a simulation is pictured while it runs, and when no row is left to hand out")
    if getattr(sim.trainer, "stacked", False):  # trained again, they would be another block, to other bits
        sim.results = {n: one if isinstance(one, LocalResult) else one() for n, one in sim.results.items()}
    done = {number: result for number, result in sim.results.items() if isinstance(result, LocalResult)}
    return {name: getattr(sim, name) for name in PLAIN} | {
        "heap": _columns(sim.heap),
        "near": _columns(sim.near),
        "results": done,
        "asked": [*sim.asked, *(number for number in sim.results if number not in done)],
        "wall": time.perf_counter() - sim.began,
        "server": sim.server.picture(),
        "notes": sim.server.notes() if isinstance(sim.server, ObservedServer) else None,
    }


def restore(sim: Simulator, found: Mapping[str, Any]) -> None:
    """Put a simulation that was made from the same config where the picture was taken."""
    sim.server.restore(found["server"])
    if isinstance(sim.server, ObservedServer):
        sim.server.take(found["notes"])
    for name in PLAIN:
        setattr(sim, name, found[name])
    sim.heap, sim.near = _events(found["heap"]), _events(found["near"])
    sim.results, sim.asked = dict(found["results"]), found["asked"]
    sim.flights = {number: lease.task for number, lease in sim.server.leases.items()}
    sim.began = time.perf_counter() - found["wall"]
    sim.begun = True


def _columns(events: list[Event]) -> tuple[Tensor, Tensor]:
    """A heap as times and whole numbers, in its own order."""
    times = torch.tensor([event[0] for event in events], dtype=torch.float64)
    return times, torch.tensor([event[1:] for event in events], dtype=torch.int64).reshape(-1, 4)


def _events(columns: tuple[Tensor, Tensor]) -> list[Event]:
    times, rest = columns
    return [(when, *row) for when, row in zip(times.tolist(), rest.tolist(), strict=True)]
