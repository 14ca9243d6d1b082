"""What happened lately, for who watches: rows with rising numbers, kept in a ring."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from afield.core.types import Receipt, Task

KEPT = 20_000  # rows; a page that asks for more reads the run folder


@dataclass(frozen=True, slots=True)
class Row:
    """`kind`: task, receipt, refusal, ended (a task that was taken back), measurement, round, drain."""

    number: int
    kind: str
    values: Mapping[str, Any]


def values_of(row: Task | Receipt) -> dict[str, Any]:
    """Its fields by name; dataclasses.asdict, which copies deeply, takes ten times as long."""
    return dict(zip(row.__slots__, FIELDS[type(row)](row), strict=True))


FIELDS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    kind: attrgetter(*kind.__slots__) for kind in (Task, Receipt)
}


class History:
    """A ring of rows. Numbers begin at the clock's milliseconds, so that they rise over restarts too."""

    def __init__(self, kept: int = KEPT) -> None:
        self.rows: deque[Row] = deque(maxlen=kept)
        self.measured: deque[Row] = deque(maxlen=kept)  # rarer, so they reach further back
        self.last = int(time.time() * 1000)
        self._news = asyncio.Event()

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        self.last += 1
        row = Row(self.last, kind, values)
        (self.measured if kind == "measurement" else self.rows).append(row)
        self._news.set()
        self._news.clear()  # whoever waits now is woken

    def after(self, number: int, most: int = KEPT, first: bool = False) -> list[Row]:
        """The rows with higher numbers, oldest first: the newest `most` of them, or the first."""
        found = [*_newer(self.rows, number), *_newer(self.measured, number)]
        found.sort(key=lambda row: row.number)
        return found[:most] if first else found[-most:]

    async def news(self, after: int, seconds: float) -> list[Row]:
        """The rows after this one; waits for some, at most so long."""
        if self.last <= after:
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                return []
        return self.after(after)


def _newer(rows: deque[Row], number: int) -> list[Row]:
    newer = list(itertools.takewhile(lambda row: row.number > number, reversed(rows)))
    return newer[::-1]
