"""A server that survives its process: every act is journalled before it is done, and snapshots bound the replay."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from afield.core.errors import InputError, one_of, within
from afield.core.server import Server
from afield.core.types import Receipt, Task, Update
from afield.store.journal import SEGMENT, Journal
from afield.store.kinds import Kind, kinds_of
from afield.store.owner import Owner
from afield.store.snapshot import Snapshots

log = logging.getLogger(__name__)


class Durable:
    """The door of a live server. On entering, the folder's newest snapshot is read and the journal is replayed.

    The server is given as it would be on its first day. `every` updates or `seconds`, whichever comes first, there is
    a snapshot; segments that no kept snapshot needs are then dropped, unless keep = "all". What is returned by
    `submit` is on the disk (levels "update" and "batch"): it may be acknowledged.
    """

    def __init__(
        self,
        server: Server,
        folder: Path | str,
        *,
        fsync: str = "update",
        keep: str = "needed",
        every: int = 1000,
        seconds: float = 600.0,
        generations: int = 2,
        segment: int = SEGMENT,
        kinds: Mapping[str, Kind] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        one_of("keep", keep, ("needed", "all"))
        within("every", every, 1, math.inf)
        within("seconds", seconds, 0, math.inf, above=True)
        self.server, self.folder = server, Path(folder)
        self.keep, self.every, self.seconds = keep, every, seconds
        self.owner = Owner(self.folder)
        chosen = {**kinds_of(server.state), **(kinds or {})}
        # everything of the server that was settled before the first update: replay under another gives another model
        self.about = {
            "strategy": repr(server.strategy),
            "clients": server.clients,
            "elements": server.size,
            "parameters": server.parameters,
            "dtype": str(server.state.params.dtype),
            "seed": server.state.seed,
            "max_staleness": server.max_staleness,
            **(about or {}),
        }
        self._options: dict[str, Any] = {"fsync": fsync, "segment": segment}
        self._chosen, self._generations = chosen, generations
        self.acts = 0  # checkouts, updates, cancels and ends of rounds since the first day
        self.replayed: list[Receipt] = []  # of the updates that came after the snapshot this began from
        self._since, self._last = 0, time.monotonic()
        self._half = False  # an act that was begun and not ended: the state in memory is of no use any more

    # -- opening ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Durable:
        with ExitStack() as stack:
            stack.enter_context(self.owner)
            self.journal = Journal(self.folder, **self._options)
            stack.callback(self.journal.close)
            self.snapshots = Snapshots(self.folder, self._chosen, self._generations)
            device = self.server.state.params.device
            found = self.snapshots.newest(device, self._check)
            if found is None:
                self._found()
            else:
                picture, mark, generation = found
                self.server.restore(picture)
                self.acts = mark["acts"]
                for number, value in self.journal.replay(mark["journal"], device):
                    self._redo(number, value)
                self._since = len(self.replayed)
                log.info(
                    "%s: from generation %d, version %d, %d updates replayed",
                    self.folder, generation, self.server.version, len(self.replayed),
                )  # fmt: skip
            stack.pop_all()
        return self

    def _found(self) -> None:
        """The first day: a snapshot of it, so that replay never depends on how the model was initialised."""
        there = self.journal.segments()
        if there not in ([], [1]) or any(True for _ in self.journal.replay()):
            raise InputError(
                f"{self.folder} has a journal but no snapshot to begin from: restore one from a copy, or "
                "choose an empty folder"
            )
        self.snapshot()

    def _check(self, mark: Mapping[str, Any]) -> None:
        stored = mark.get("about", {})
        for name in {**stored, **self.about}:
            one, two = stored.get(name), self.about.get(name)
            if one != two:
                raise InputError(
                    f"{self.folder} is of a server with {name} = {one}, not {two}: give what it was begun with, or "
                    "choose another folder"
                )

    def _redo(self, number: int, value: Any) -> None:
        self.acts += 1
        if isinstance(value, Update):
            self.replayed.append(self.server.submit(value))
            return
        try:
            self._do(value)
        except InputError:
            log.debug("record %d was refused when it was new, too", number)

    # -- the verbs --------------------------------------------------------------------------------------------

    def checkout(self, client: int, now: float, version: int | None = None) -> Task:
        """A task. It is journalled, but not synced: the update that answers it is."""
        task: Task = self._act({"act": "checkout", "client": client, "now": now, "version": version})
        return task

    def cancel(self, task: Task) -> None:
        """Take a task back; one that was answered or cancelled before stays so."""
        if task.number in self.server.leases:
            self._act({"act": "cancel", "task": task.number})

    def close_round(self) -> int:
        if not hasattr(self.server.strategy, "close_round"):
            raise InputError(f"{type(self.server.strategy).__name__} has no rounds to close")
        version: int = self._act({"act": "close"})
        self.journal.commit()
        self._snapshot_when_due()
        return version

    def submit(self, update: Update) -> Receipt:
        return self.submit_all([update])[0]

    def submit_all(self, updates: Sequence[Update]) -> list[Receipt]:
        """Updates that arrived together share one sync, before the first of them is folded (level "batch")."""
        self._sound()
        server = self.server
        refused = {k: server.submit(one) for k, one in enumerate(updates) if server.refusal(one)}
        good = [replace(one, finite=True) for k, one in enumerate(updates) if k not in refused]
        self.journal.extend(good)
        with self._acting():
            folded = [
                server.submit(one) for one in good
            ]  # twice the same in one batch: the second is refused here
        self.acts += len(good)
        self._since += len(good)
        self._snapshot_when_due()
        rest = iter(folded)
        return [refused[k] if k in refused else next(rest) for k in range(len(updates))]

    def _act(self, value: dict[str, Any]) -> Any:
        self._sound()
        self.journal.write(value)
        self.acts += 1
        return self._do(value)

    def _do(self, value: Mapping[str, Any]) -> Any:
        server, act = self.server, value["act"]
        if act == "checkout":
            return server.checkout(value["client"], value["now"], value["version"])
        with self._acting():
            if act == "cancel":
                return server.cancel(server.leases[value["task"]].task)
            return server.close_round()

    # -- snapshots --------------------------------------------------------------------------------------------

    def snapshot(self) -> int:
        """Write one now; gives its generation."""
        self._sound()
        self._since, self._last = 0, time.monotonic()
        mark = {"journal": self.journal.rotate(), "acts": self.acts, "about": self.about}
        generation = self.snapshots.write(self.server.picture(), mark)
        if self.keep != "all" and self.snapshots.oldest is not None:
            self.journal.drop(self.snapshots.oldest[1]["journal"] + 1)
        return generation

    def _snapshot_when_due(self) -> None:
        if self._since < self.every and time.monotonic() - self._last < self.seconds:
            return
        try:
            self.snapshot()
        except (
            InputError
        ) as error:  # nothing is lost: the journal has it all, and the caller has an answer to give
            log.error("no snapshot, the journal grows on: %s", error)

    def _sound(self) -> None:
        if self._half:
            raise InputError(
                f"an update was interrupted while it was folded: start the server of {self.folder} again, it is in "
                "the journal"
            )

    @contextmanager
    def _acting(self) -> Iterator[None]:
        self._half = True
        yield
        self._half = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._half and self._since:
                self.snapshot()  # the next start has nothing to replay
        finally:
            self.journal.close()
            self.owner.free()
