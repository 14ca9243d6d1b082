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

from afield.core.errors import InputError
from afield.core.server import Lease, Server
from afield.core.types import LocalResult, Task
from afield.runtimes.diagnose import Held, ObservedServer, Step, Watch
from afield.runtimes.simulator import Event, Simulator, Since
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
    if not sim.begun or sim.late:
        raise RuntimeError("a simulation is pictured once it has begun, and when no row is left to hand out")
    done = {number: result for number, result in sim.results.items() if isinstance(result, LocalResult)}
    return {name: getattr(sim, name) for name in PLAIN} | {
        "heap": _columns(sim.heap),
        "near": _columns(sim.near),
        "results": done,
        "asked": [*sim.asked, *(number for number in sim.results if number not in done)],
        "wall": time.perf_counter() - sim.began,
        "server": _server(sim.server),
    }


def restore(sim: Simulator, found: Mapping[str, Any]) -> None:
    """Put a simulation that was made from the same config where the picture was taken."""
    _restore_server(sim.server, found["server"])
    for name in PLAIN:
        setattr(sim, name, found[name])
    sim.heap, sim.near = _events(found["heap"]), _events(found["near"])
    sim.results, sim.asked = dict(found["results"]), found["asked"]
    sim.flights = {number: lease.task for number, lease in sim.server.leases.items()}
    sim.began = time.perf_counter() - found["wall"]
    sim.begun = True


def _server(server: Server) -> dict[str, Any]:
    """Columns, not objects: there may be a million clients."""
    leases = list(server.leases.values())
    tasks = [lease.task for lease in leases]
    found = {
        "state": server.state,
        "tasks": torch.tensor([(t.number, t.client, t.count, t.version) for t in tasks]).reshape(-1, 4),
        "started": torch.tensor([task.started for task in tasks], dtype=torch.float64),
        "bases": dict(server.versions.models),
        "corrections": {
            lease.task.number: lease.correction for lease in leases if lease.correction is not None
        },
        "counts": torch.tensor([list(server.counts), list(server.counts.values())], dtype=torch.int64),
        "issued": server.issued,
    }
    return found | ({"notes": server.notes()} if isinstance(server, ObservedServer) else {})


def _restore_server(server: Server, found: Mapping[str, Any]) -> None:
    fresh, state = server.state, found["state"]
    if type(state) is not type(fresh) or state.params.shape != fresh.params.shape:
        raise InputError(
            f"the snapshot holds a {type(state).__name__} of {state.params.numel()} parameters, this run a "
            f"{type(fresh).__name__} of {fresh.params.numel()}: use the strategy and the model that it was taken with"
        )
    server.state = state
    server.issued = found["issued"]
    server.counts = dict(zip(*found["counts"].tolist(), strict=True))
    for row, started in zip(found["tasks"].tolist(), found["started"].tolist(), strict=True):
        task = Task(*row, started)
        base = found["bases"][task.version]
        server.versions.models[task.version] = base
        server.versions.leases[task.version] = server.versions.leases.get(task.version, 0) + 1
        server.leases[task.number] = Lease(task, base, found["corrections"].get(task.number))
    if isinstance(server, ObservedServer):
        server.take(found["notes"])


def _columns(events: list[Event]) -> tuple[Tensor, Tensor]:
    """A heap as times and whole numbers, in its own order."""
    times = torch.tensor([event[0] for event in events], dtype=torch.float64)
    return times, torch.tensor([event[1:] for event in events], dtype=torch.int64).reshape(-1, 4)


def _events(columns: tuple[Tensor, Tensor]) -> list[Event]:
    times, rest = columns
    return [(when, *row) for when, row in zip(times.tolist(), rest.tolist(), strict=True)]
