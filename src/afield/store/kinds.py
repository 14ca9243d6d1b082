"""Which dataclasses a file may hold: reading makes objects of these and of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from afield.core.errors import InputError
from afield.core.held import HeldDeltas
from afield.core.server import Lease
from afield.core.statistics import Gathering
from afield.core.table import ClientTable
from afield.core.types import LocalResult, Receipt, ServerState, Task, Update
from afield.core.versions import Versions

# A class whose fields are set as they were, or a function that makes the object from a mapping of its parts.
Kind = type | Callable[[Mapping[str, Any]], Any]

CORE: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        Task, Update, Receipt, LocalResult, ServerState, Lease, Versions, Gathering, ClientTable, HeldDeltas,
    )
}  # fmt: skip


def kinds_of(*values: Any) -> dict[str, Kind]:
    """CORE and every dataclass met in these values (such as a server's fresh state), by name."""
    found = dict(CORE)
    for value in values:
        _gather(value, found)
    return found


def _gather(value: Any, found: dict[str, Kind]) -> None:
    inner: Iterable[Any] = ()
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        if found.setdefault(kind.__name__, kind) is not kind:
            raise InputError(
                f"two classes named {kind.__name__} are in one state ({kind.__module__} and "
                f"{found[kind.__name__].__module__}): rename one"
            )
        inner = [getattr(value, column.name) for column in fields(value)]
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    for item in inner:
        _gather(item, found)
