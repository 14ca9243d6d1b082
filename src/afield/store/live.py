"""A server that survives its process: every act is journalled before it is done, and snapshots bound the replay.

    with Durable(server, folder, fsync="batch", table="auto") as door:      # or door.open() ... door.close()
        task = door.checkout(client, now)          # journalled, not synced: a lost task is asked for again
        receipt = door.submit(update)              # on the disk, then folded: it may be acknowledged
        receipts = door.submit_all(updates)        # group commit: all appended, one sync, all folded
        door.cancel(task); door.close_round()
        door.tend()                                # a snapshot if one is due; door.snapshot(): now
        door.task(number), door.receipt(number)    # what was handed out and not answered; what was answered

Give the server as it would be on its first day; a folder that has a life already makes it go on from there, bit by
bit. Not thread-safe: a service has one thread that drains a queue into `submit_all` and then acknowledges.

An update that was accepted before gets its first receipt again, also after a restart: the last `remember` receipts
are kept. Older ones, and updates of tasks that were cancelled, are refused as "closed". A refused update is not
journalled and changes nothing. An InputError from `submit_all` means that none of these updates was acknowledged;
after one that speaks of starting again, nothing more is taken until the folder is opened anew: whatever reached the
journal is folded then, once, and has its receipt.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

from afield.core.errors import InputError, one_of, within
from afield.core.places import KINDS, tables
from afield.core.server import Server
from afield.core.types import Receipt, Task, Update
from afield.store.journal import SEGMENT, Journal
from afield.store.kinds import Kind, kinds_of
from afield.store.owner import Owner
from afield.store.snapshot import Snapshots

log = logging.getLogger(__name__)
COLUMNS = [column.name for column in fields(Receipt)]


@cache
def _version() -> str:
    try:
        return version("afield")
    except PackageNotFoundError:  # run from a source tree
        return "0"


class Durable:
    """The door of a live server (see above).

    `fsync`: "update", "batch" or "off" (docs/decisions/0007-store.md). `table`: "auto", "memory" or "disk". There is
    a snapshot every `every` updates or `seconds`, whichever comes first, but all of them take at most the part
    `share` of the time; segments of the journal that no kept snapshot needs are then dropped, unless keep = "all".
    `about` names what else must be the same for as long as the folder lives, such as the model's name.
    """

    def __init__(
        self,
        server: Server,
        folder: Path | str,
        *,
        fsync: str = "batch",
        table: str = "auto",
        keep: str = "needed",
        every: int = 1000,
        seconds: float = 600.0,
        share: float = 1.0,
        remember: int = 10_000,
        generations: int = 2,
        segment: int = SEGMENT,
        kinds: Mapping[str, Kind] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        one_of("table", table, KINDS)
        one_of("keep", keep, ("needed", "all"))
        within("every", every, 1, math.inf)
        within("seconds", seconds, 0, math.inf, above=True)
        within("share", share, 0, 1, above=True)
        within("remember", remember, 0, math.inf)
        self.server, self.folder = server, Path(folder)
        self.table, self.keep, self.every, self.seconds, self.remember = table, keep, every, seconds, remember
        self.share, self._took = share, 0.0  # seconds of the last snapshot
        # everything of the server that was settled before the first update: replay under another gives another model
        settled = {
            "strategy": repr(server.strategy),
            "clients": server.clients,
            "elements": server.size,
            "parameters": server.parameters,
            "dtype": str(server.state.params.dtype),
            "seed": server.state.seed,
            "max_staleness": server.max_staleness,
            **(about or {}),
        }
        self.about: dict[str, Any] = json.loads(json.dumps(settled))  # as it is read again: lists for tuples
        self.owner = Owner(self.folder)
        self._journal = {"fsync": fsync, "segment": segment}
        self._snapshots = ({**kinds_of(server.state), **(kinds or {})}, generations)
        self.acts = 0  # checkouts, updates, cancels and ends of rounds since the first day
        self.receipts: dict[int, Receipt] = {}  # of the last updates, by the number of their task
        self.accepted: dict[int, int] = {}  # updates that were folded since the first day, per client
        self.rounds = 0  # that were closed since the first day
        self.begun = False  # whether a task was handed out since the last of them closed
        self.replayed: list[Receipt] = []  # of the updates that came after the snapshot this began from
        self._since, self._last = 0, time.monotonic()
        self._stopped = ""  # why the state in memory is of no use any more

    # -- opening and closing ----------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the folder: its newest snapshot and what the journal has beyond it, or a first day."""
        with ExitStack() as stack:
            stack.enter_context(self.owner)
            self.journal = Journal(self.folder, **self._journal)  # type: ignore[arg-type]
            stack.callback(self.journal.close)
            self.snapshots = Snapshots(self.folder, *self._snapshots)
            device = self.server.state.params.device
            found = self.snapshots.newest(device, self._check)
            if found is None:
                self._found()
            else:
                self._continue(*found)
            stack.pop_all()

    def close(self) -> None:
        """A last snapshot, so that the next start has nothing to replay; then let go of the folder."""
        try:
            if self._since and not self._stopped:
                self.snapshot()
        finally:
            self.leave()

    def leave(self) -> None:
        """Let go of the folder as it is: what a crash does."""
        self.journal.close()
        self.owner.free()

    def __enter__(self) -> Durable:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.leave()

    def _found(self) -> None:
        """The first day: a snapshot of it, so that replay never depends on how the model was initialised."""
        there = self.journal.segments()
        if there not in ([], [1]) or any(True for _ in self.journal.replay()):
            raise InputError(
                f"{self.folder} has a journal but no snapshot to begin from: restore one from a copy, or "
                "choose an empty folder"
            )
        self.server.keep_tables(self.table, self.folder)
        self.snapshot()

    def _continue(self, picture: Mapping[str, Any], mark: Mapping[str, Any], generation: int) -> None:
        self.server.restore(picture["server"])
        self.server.keep_tables(self.table, self.folder, generation)
        self._pin(generation)
        self.acts = mark["acts"]
        self.receipts = {row[0]: Receipt(*row) for row in picture["receipts"]}
        self.accepted, self.rounds, self.begun = picture["accepted"], mark["rounds"], mark["begun"]
        other = mark["afield"] if mark["afield"] != _version() else ""
        for number, value in self.journal.replay(mark["journal"], self.server.state.params.device):
            if other:
                raise InputError(
                    f"{self.folder} was left by afield {other} with updates in its journal, which {_version()} may "
                    f"fold in another way: open and close it once with afield {other}"
                )
            self._redo(number, value)
        self._since = len(self.replayed)
        log.info(
            "%s: from generation %d, version %d, %d updates replayed",
            self.folder, generation, self.server.version, len(self.replayed),
        )  # fmt: skip
        if other:
            self.snapshot()  # what is journalled from here on is this version's

    def _check(self, mark: Mapping[str, Any]) -> None:
        stored, written = mark.get("about", {}), mark.get("afield", "")
        if _order(written) > _order(_version()):
            raise InputError(
                f"{self.folder} was written by afield {written}, which is newer than {_version()}: update afield"
            )
        for name in {**stored, **self.about}:
            one, two = stored.get(name), self.about.get(name)
            if one != two:
                raise InputError(
                    f"{self.folder} is of a server with {name} = {one}, not {two}: give what it was begun with, or "
                    "choose another folder"
                )

    def _pin(self, generation: int) -> None:
        """Older generations may be needed yet: the slots of their rows are not free."""
        for older in self.snapshots.generations():
            files = {name: table.file for name, table in tables(self.server.state) if table.file is not None}
            if older >= generation or not files:
                continue
            try:
                then = self.snapshots.peek(older)["server"]["state"]
            except InputError:
                continue  # no use to anyone
            for name, table in tables(then):
                file = files.get(name)
                if file is not None and file.at is not None and table.file is not None:
                    for slot in table.file.slots.values():
                        file.at.pins.setdefault(slot, older)
                    file.settled(0)

    def _redo(self, number: int, value: Any) -> None:
        """An act of the journal. It was done, or was about to be: that it fails now is no reason to leave it out."""
        try:
            if isinstance(value, Update):
                self.replayed.append(self._fold(value))
            else:
                self._do(value)
        except Exception as error:
            raise InputError(
                f"record {number} of {self.folder} cannot be done again ({error}): nothing was changed there; "
                "remove the cause, then start again"
            ) from error
        self.acts += 1

    # -- the verbs --------------------------------------------------------------------------------------------

    def checkout(self, client: int, now: float, version: int | None = None) -> Task:
        """Hand out a task. It is journalled, but not synced: the update that answers it is."""
        server = self.server
        if not 0 <= client < server.clients or version not in (None, server.version, *server.versions.models):
            return server.checkout(client, now, version)  # it says what is wrong, and changes nothing
        task: Task = self._act({"act": "checkout", "client": client, "now": now, "version": version})
        return task

    def cancel(self, task: Task) -> None:
        """Take a task back; one that was answered or cancelled before stays so."""
        if self.task(task.number) == task:
            self._act({"act": "cancel", "task": task.number})

    def close_round(self) -> int:
        """End a round or tick; durable when this returns. Gives the new version."""
        if not hasattr(self.server.strategy, "close_round"):
            raise InputError(f"{type(self.server.strategy).__name__} has no rounds to close")
        self.tend()
        version: int = self._act({"act": "close"}, commit=True)
        return version

    def submit(self, update: Update) -> Receipt:
        return self.submit_all([update])[0]

    def submit_all(self, updates: Sequence[Update]) -> list[Receipt]:
        """Updates that arrived together: all of them journalled, one sync (level "batch"), all folded, in order."""
        self.tend()
        self._sound()
        answers: list[Receipt | None] = [self._known(one) for one in updates]
        first: dict[int, int] = {}  # task -> which update of the batch answers it
        for k, one in enumerate(updates):
            if answers[k] is None and self.server.refusal(one):
                answers[k] = self.server.submit(one)
            elif answers[k] is None:
                first.setdefault(one.task.number, k)
        chosen = {k: replace(updates[k], finite=True) for k in first.values()}
        if chosen:
            self.journal.extend(list(chosen.values()))
            for k, one in chosen.items():
                with self._acting():
                    answers[k] = self._fold(one)
                self.acts += 1
                self._since += 1
        twins = [
            answers[first[one.task.number]] if answers[k] is None else answers[k]
            for k, one in enumerate(updates)
        ]
        return [answer for answer in twins if answer is not None]

    def task(self, number: int) -> Task | None:
        """The task of this number, where it was handed out and not answered or cancelled yet."""
        lease = self.server.leases.get(number)
        return None if lease is None else lease.task

    def receipt(self, number: int) -> Receipt | None:
        """What the update of the task of this number was given, where it was accepted and is remembered."""
        return self.receipts.get(number)

    def _known(self, update: Update) -> Receipt | None:
        found, task = self.receipts.get(update.task.number), update.task
        if found is not None and (found.client, found.base, found.started) == (
            task.client, task.version, task.started,
        ):  # fmt: skip
            return found
        return None

    def _fold(self, update: Update) -> Receipt:
        receipt = self.server.submit(update)
        if not receipt.refused:
            self.receipts[receipt.number] = receipt
            self.accepted[receipt.client] = self.accepted.get(receipt.client, 0) + 1
            if len(self.receipts) > self.remember:
                del self.receipts[next(iter(self.receipts))]
        return receipt

    def _act(self, value: dict[str, Any], commit: bool = False) -> Any:
        self._sound()
        self.journal.write(value)
        if commit:
            self.journal.commit()
        with self._acting():
            done = self._do(value)
        self.acts += 1
        return done

    def _do(self, value: Mapping[str, Any]) -> Any:
        server, act = self.server, value["act"]
        if act == "checkout":
            self.begun = True
            return server.checkout(value["client"], value["now"], value["version"])
        if act == "cancel":
            return server.cancel(server.leases[value["task"]].task)
        self.rounds += 1
        self.begun = False
        return server.close_round()

    # -- snapshots --------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """A snapshot if one is due. The verbs do this before they begin; a service also does when it is idle."""
        passed = time.monotonic() - self._last
        due = self._since >= self.every or passed >= self.seconds
        if not self._since or not due or passed < self._took / self.share - self._took:
            return
        try:
            self.snapshot()
        except InputError as error:  # nothing is lost: the journal has it all
            if self._stopped:
                raise
            log.error("no snapshot, the journal grows on: %s", error)

    def snapshot(self) -> int:
        """Write one now; gives its generation."""
        self._sound()
        self._since, self._last = 0, time.monotonic()
        mark = {
            "journal": self.journal.rotate(),
            "acts": self.acts,
            "rounds": self.rounds,
            "begun": self.begun,
            "about": self.about,
            "afield": _version(),
        }
        rows = [[getattr(receipt, name) for name in COLUMNS] for receipt in self.receipts.values()]
        try:
            picture = {"server": self.server.picture(), "receipts": rows, "accepted": self.accepted}
            generation = self.snapshots.write(picture, mark)
        except InputError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO:
                # rows of a table may be lost that the next sync would call written
                self._stopped = str(error)
            raise
        if self.keep != "all" and self.snapshots.oldest is not None:
            self.journal.drop(self.snapshots.oldest[1]["journal"] + 1)
        self._took, self._last = time.monotonic() - self._last, time.monotonic()
        return generation

    @property
    def broken(self) -> str:
        """Why nothing more is taken until the folder is opened anew; empty where all is well."""
        return self._stopped or self.journal.broken

    def _sound(self) -> None:
        if self._stopped:
            raise InputError(
                f"{self._stopped}: start the server of {self.folder} again; its journal has what came"
            )

    @contextmanager
    def _acting(self) -> Iterator[None]:
        self._stopped = "an act was interrupted half-way"
        yield
        self._stopped = ""


def _order(text: str) -> list[int]:
    """A version's numbers, to compare."""
    return [int(part) for part in text.split(".") if part.isdecimal()]
