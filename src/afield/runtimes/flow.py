"""What a simulation asks of whoever decides who starts when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from afield.core.types import Receipt, Task

if TYPE_CHECKING:
    from afield.runtimes.simulator import Simulator


class Flow:
    """Decides who starts when: free-running, by ticks, by sampled staleness, or in rounds."""

    def begin(self, sim: Simulator) -> None:
        raise NotImplementedError

    def freed(self, sim: Simulator, client: int, count: int, hold: bool) -> None:
        """A client's task is over: it may train again."""

    def settled(self, sim: Simulator, task: Task, receipt: Receipt | None) -> None:
        """An arrival was dealt with (None: the task was aborted)."""

    def stepped(self, sim: Simulator) -> None:
        """The version rose."""

    def woke(self, sim: Simulator, client: int) -> None:
        """A WAKE event that was set for this client."""

    def closed(self, sim: Simulator, mark: int) -> None:
        """A CLOSE event that the flow had set."""
