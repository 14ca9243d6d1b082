"""Where the tables of a state are: in memory or in files, by rule or by wish.

The bits are the same either way, so the choice may depend on the machine.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from afield.core.errors import one_of
from afield.core.rows import RowFile
from afield.core.table import ClientTable

KINDS = ("auto", "memory", "disk")
SHARE = 0.5  # of the memory that is free, for tables: the rest is for models in flight and their training

log = logging.getLogger("afield")


def tables(state: Any, name: str = "") -> Iterator[tuple[str, ClientTable]]:
    """Every table of a state, by name."""
    if isinstance(state, ClientTable):
        yield name, state
    elif is_dataclass(state):
        for column in fields(state):
            yield from tables(getattr(state, column.name), f"{name}-{column.name}".lstrip("-"))


def choose(kind: str, state: Any) -> str:
    """Memory or disk: "auto" is the disk where the rows of all clients exceed half of the free memory."""
    one_of("table", kind, KINDS)
    found = [table for _, table in tables(state)]
    if kind != "auto" or not found:
        return "memory" if kind == "auto" else kind
    need, free = sum(map(size, found)), free_memory(found[0].blank.device)
    chosen = "disk" if need > SHARE * free else "memory"
    most = max(found, key=size)
    log.log(
        logging.WARNING if chosen == "disk" else logging.DEBUG,
        "table = %s: %d rows of %d elements (%s) take %.1f GiB, %.1f GiB of memory are free",
        *(chosen, most.clients, most.width, most.precision, need / 2**30, free / 2**30),
    )
    return chosen


def size(table: ClientTable) -> int:
    """Bytes that a table takes once all clients were heard."""
    return table.clients * table.length


def place(state: Any, kind: str, folder: Path | None = None, generation: int = 0) -> None:
    """Let the tables be of this kind. Those that came from the snapshot of this number find their files again."""
    for name, table in tables(state):
        if table.file is None and kind == "disk":
            where = folder or Path(tempfile.gettempdir())
            if size(table) > free_disk(where):
                log.warning(
                    "table = disk: %s has %.1f GiB free, the rows of all %d clients take %.1f",
                    *(where, free_disk(where) / 2**30, table.clients, size(table) / 2**30),
                )
            table.move(RowFile(f"{name}.rows", table.length, folder=folder))
        elif table.file is not None and table.file.at is None:
            table.file.folder = folder
            if table.file.slots:
                table.file.open(generation)


def free_memory(device: torch.device) -> int:
    """Bytes that a table could take: of the device, or of the machine and the group that this process is in."""
    if device.type == "cuda":  # with what torch keeps of it for later tensors
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    bounds = [_available(), _group()]
    return min(bound for bound in bounds if bound is not None)


def free_disk(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # no Linux: half of what there is


def _group() -> int | None:
    """What a container's limit leaves; None where there is no limit."""
    folder = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int((folder / limit).read_text()) - int((folder / used).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return None
