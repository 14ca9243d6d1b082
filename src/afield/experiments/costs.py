"""What a run did and cost, added up while it goes: the small summary that a run folder ends with."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from afield.core.places import tables
from afield.core.protocols import Distiller
from afield.core.types import Receipt
from afield.runtimes.simulator import Simulator


class Timed:
    """A distiller with a stop-watch."""

    def __init__(self, inner: Distiller) -> None:
        self._inner = inner
        self.count = 0
        self.seconds = 0.0
        self.asked = 0  # models whose logits were wanted
        self.asking = 0.0  # seconds

    def logits(self, params: Tensor, *arguments: Any) -> Tensor:
        _settle(params)
        began = time.perf_counter()
        found = self._inner.logits(params, *arguments)
        _settle(params)
        self.asking += time.perf_counter() - began
        self.asked += 1
        return found

    def distil(self, params: Tensor, *arguments: Any) -> None:
        _settle(params)
        began = time.perf_counter()
        self._inner.distil(params, *arguments)
        _settle(params)
        self.seconds += time.perf_counter() - began
        self.count += 1

    def told(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("count", "seconds", "asked", "asking")}


def _settle(tensor: Tensor) -> None:
    """A GPU works behind the clock's back."""
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


class Tally:
    """Adds up the receipts of one run."""

    _CHANGES = ("_staleness", "_refused", "_held")

    def __init__(self, simulator: Simulator, together: int = 1) -> None:
        self._simulator = simulator
        self._together = together
        self._began = time.perf_counter()
        self._clients: set[int] = set()
        self._staleness = 0
        self._refused: dict[str, int] = {}
        self._held = 0

    def add(self, receipt: Receipt) -> None:
        self._held = max(self._held, len(self._simulator.server.versions.models))
        if receipt.refused:
            self._refused[receipt.refused] = self._refused.get(receipt.refused, 0) + 1
        else:
            self._clients.add(receipt.client)
            self._staleness += receipt.staleness

    def picture(self) -> dict[str, Any]:
        """What was added up so far, for a snapshot."""
        found = {name: getattr(self, name) for name in self._CHANGES}
        found |= {"clients": torch.tensor(sorted(self._clients)), "wall": self._wall()}
        distiller = self._simulator.server.distiller
        return found | ({"distiller": dict(distiller.told())} if isinstance(distiller, Timed) else {})

    def restore(self, found: Mapping[str, Any]) -> None:
        for name in self._CHANGES:
            setattr(self, name, found[name])
        self._clients = set(found["clients"].tolist())
        self._began = time.perf_counter() - found["wall"]
        distiller = self._simulator.server.distiller
        if isinstance(distiller, Timed):
            for name, value in found["distiller"].items():
                setattr(distiller, name, value)

    def _wall(self) -> float:
        return time.perf_counter() - self._began

    def summary(self) -> dict[str, Any]:
        simulator = self._simulator
        server, device = simulator.server, simulator.server.state.params.device
        cuda = device.type == "cuda"
        found: dict[str, Any] = {
            "ended": simulator.ended,
            "wall": self._wall(),  # of all that went together
            "together": self._together,
            "updates": simulator.updates,
            "versions": server.version,
            "steps": simulator.steps_done,
            "bytes": simulator.bytes,
            "clients": server.clients,
            "contributors": len(self._clients),  # clients of whom at least one update was accepted
            "staleness": self._staleness / simulator.updates if simulator.updates else None,
            "refused": self._refused,
            "interrupted": simulator.interrupted,
            "versions_held": self._held,  # the most versions kept at one time for tasks in flight
            "server_bytes": size_of(server.state),  # the strategy's state at the end, in memory ...
            "file_bytes": sum(table.in_file for _, table in tables(server.state)),  # ... and rows on disk
            "client_bytes": _largest(simulator.held.previous if simulator.held else {}),
            "device": torch.cuda.get_device_name(device) if cuda else "cpu",
            "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        }
        if isinstance(server.distiller, Timed):
            found |= {"distillations": server.distiller.count, "distil_wall": server.distiller.seconds}
            found |= {"inferences": server.distiller.asked, "infer_wall": server.distiller.asking}
        return found


def size_of(thing: Any) -> int:
    """Bytes of all tensors within, each once."""
    seen: dict[int, int] = {}
    _gather(thing, seen)
    return sum(seen.values())


def _gather(thing: Any, seen: dict[int, int]) -> None:
    if isinstance(thing, Tensor):
        seen[thing.data_ptr()] = max(thing.nbytes, seen.get(thing.data_ptr(), 0))
        return
    inner: Iterable[Any] = ()
    if is_dataclass(thing):
        inner = (getattr(thing, column.name) for column in fields(thing))
    elif isinstance(thing, Mapping):
        inner = thing.values()
    elif isinstance(thing, list | tuple):
        inner = thing
    for part in inner:
        _gather(part, seen)


def _largest(held: Mapping[int, Tensor]) -> int:
    """What one client keeps between its tasks, the largest of them."""
    return max((vector.nbytes for vector in held.values()), default=0)
