"""Lives of durable servers, each ended by SIGKILL and begun again until all updates are in; prints what was lost.

    python tests/crashing.py KILLS [SEED] [FOLDER] [careless]

"careless" has servers that acknowledge before they sync, to see that this is noticed.

One process imports torch and forks a child per life. How a life ends is drawn: killed by the parent after a while
("timer"); by itself before the n-th act on a file ("act"), in the middle of it ("inside": a part of a write is done,
or another thread kills while the call runs), or there with a loss of power ("power": what was not synced is cut,
zeroed or kept at random, names that were not synced are undone, removed files come back).

Two files stand for the memory of the clients: what they sent, and the receipts that they got.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from durably import acts_of, durable, equal, live
from playback import BATTERY, SIZE, tabled

from afield.core.server import Server
from afield.core.types import Receipt, Task, Update
from afield.store import files
from afield.store.journal import Journal
from afield.store.live import Durable

NAMES = [name for name in BATTERY if name != "ace client"]  # there the clients have a memory of their own
UPDATES = 36
ENDS = ("timer", "act", "inside", "power")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


class Disk:
    """Watches every act on files, ends the life at the n-th, and knows what a loss of power would take."""

    def __init__(self, folder: Path, end: str, at: int, seed: int) -> None:
        self.folder, self.end, self.left, self.draw = folder, end, at, random.Random(seed)
        self.loose: dict[int, list[tuple[int, int]]] = {}  # inode -> ranges that were written and not synced
        self.names: list[Callable[[], None]] = []  # what undoes the changes of names that were not synced
        self.done: Callable[[], None] | None = None  # what is known once the act before has returned
        self.trash = folder.with_name(f"{folder.name}.trash")
        self.pwrite, self.fsync = os.pwrite, os.fsync

    def watch(self) -> None:
        """The store's own acts, and those of rows in core, which has no such hook."""
        files.before = self.before

        def pwrite(fd: int, data: Any, offset: int) -> int:
            self.before("pwrite", fd, (data, offset))
            return self.pwrite(fd, data, offset)

        def fsync(fd: int) -> None:
            if not os.path.isdir(f"/proc/self/fd/{fd}"):
                self.before("fsync", fd, ())
            self.fsync(fd)

        os.pwrite, os.fsync = pwrite, fsync  # type: ignore[assignment]

    def before(self, act: str, fd: int, what: Sequence[Any]) -> None:
        if self.done is not None:
            self.done()
            self.done = None
        self.left -= 1
        if self.left <= 0 and self.end != "timer":
            self.stop(act, fd, what)
        if act in ("write", "pwrite"):
            start = what[1] if act == "pwrite" else os.lseek(fd, 0, os.SEEK_CUR)
            length = len(what[0]) if act == "pwrite" else sum(memoryview(piece).nbytes for piece in what)
            self.loose.setdefault(os.fstat(fd).st_ino, []).append((start, length))
        elif act == "fsync":
            inode = os.fstat(fd).st_ino
            self.done = lambda: self.loose.pop(inode, None) and None
        elif act == "fsync-folder":
            self.done = self.names.clear
        elif act == "rename":
            old, new = what
            self.names.append(lambda: os.replace(new, old))
        elif act == "remove":
            (path,) = what
            self.trash.mkdir(exist_ok=True)
            if path.exists():
                copy = self.trash / path.name
                copy.unlink(missing_ok=True)
                os.link(path, copy)
                self.names.append(lambda: os.replace(copy, path))

    def stop(self, act: str, fd: int, what: Sequence[Any]) -> None:
        if self.end != "act":
            if act == "write":
                data = b"".join(bytes(memoryview(piece).cast("B")) for piece in what)
                start = os.lseek(fd, 0, os.SEEK_CUR)
                self.pwrite(fd, data[: self.draw.randrange(len(data) + 1)], start)
                self.loose.setdefault(os.fstat(fd).st_ino, []).append((start, len(data)))
            elif act == "pwrite":
                self.pwrite(fd, what[0][: self.draw.randrange(len(what[0]) + 1)], what[1])
            elif self.end == "inside":  # the call releases the lock that the other thread waits for
                wait = self.draw.choice([0.0, 1e-5, 1e-4, 1e-3])
                threading.Thread(target=lambda: (time.sleep(wait), die()), daemon=True).start()
                return
        if self.end == "power":
            self.power()
        die()

    def power(self) -> None:
        for undo in reversed(self.names):
            if self.draw.random() < 0.5:
                break  # names change in order: what is undone is the last of them
            undo()
        there = {path.stat().st_ino: path for path in self.folder.iterdir()}
        for inode, ranges in self.loose.items():
            path = there.get(inode)
            if path is None:
                continue
            size = path.stat().st_size
            if path.suffix == ".rows":
                with path.open("r+b") as file:
                    for start, length in ranges:
                        if self.draw.random() < 0.5:
                            file.seek(start)
                            file.write(bytes(length))
                continue
            first = min(start for start, _ in ranges)
            keep = self.draw.randint(min(first, size), size)
            os.truncate(path, keep)
            if self.draw.random() < 0.3:  # the length was written, the data were not
                os.truncate(path, size)


def life(name: str, folder: Path, options: dict[str, Any], batch: int, disk: Disk) -> None:
    """One child: restart, let clients ask again for what they were not told, go on."""
    strategy = BATTERY[name]
    sent, heard = folder.with_suffix(".sent"), folder.with_suffix(".heard")
    if disk.end != "timer":
        disk.watch()
    log = os.open(heard, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    out = os.open(sent, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def told(receipt: Receipt) -> None:
        os.write(log, (json.dumps(astuple(receipt)) + "\n").encode())

    def sends(updates: list[Update]) -> None:
        os.write(out, "".join(json.dumps(astuple(one.task)) + "\n" for one in updates).encode())

    door = durable(strategy, folder, **options)
    door.open()
    known = receipts_in(heard)
    for number, receipt in known.items():  # before anyone sends again what the server should have
        if door.receipt(number) != receipt:
            with folder.with_suffix(".lost").open("a") as file:
                file.write(f"{number} {options} {disk.end}\n")
    for row in lines(sent):
        task = Task(*row)
        if door.task(task.number) == task:
            continue  # its update is not in: it comes again below
        again = Update(task, torch.zeros(SIZE), None, 1)  # who has the receipt does not look at the model
        receipt = door.submit(again)
        if task.number in known:
            if receipt != known[task.number]:
                told(replace(receipt, refused=f"was {known[task.number]}"))
        elif not receipt.refused:
            told(receipt)
            known[task.number] = receipt
        else:  # the task went with the power, since nobody had answered it: it is asked for again below
            assert receipt.refused == "never-leased" and options["fsync"] != "off", receipt
    live(door, acts_of(strategy, UPDATES, batch), told, batch=batch, sends=sends)
    door.close()
    os._exit(0)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def receipts_in(path: Path) -> dict[int, Receipt]:
    found: dict[int, Receipt] = {}
    for row in lines(path):
        receipt = Receipt(*row)
        if receipt.refused or receipt.number not in found:
            found[receipt.number] = receipt
    return found


def reference(name: str, folder: Path, batch: int) -> tuple[Server, list[Receipt], int]:
    """The same life without an end."""
    receipts: list[Receipt] = []
    acts = acts_of(BATTERY[name], UPDATES, batch)
    with durable(BATTERY[name], folder, table="memory", fsync="off", every=10**6) as door:
        live(door, acts, receipts.append, batch=batch)
    return door.server, receipts, len(acts)


def campaign(name: str, table: str, kills: int, seed: int, folder: Path) -> Counter[str]:
    """One server, killed so often at least, and all that is wrong with it at the end."""
    draw, count = random.Random(f"{seed} {name} {table}"), Counter[str]()
    while count["kills"] < kills:
        one = folder / f"{count['servers']}"
        batch = draw.choice([1, 2, 3])
        level = draw.choice(["update", "batch", "batch", "off"])
        options = {
            "table": table,
            "fsync": level,
            "keep": draw.choice(["needed", "all"]),
            "every": draw.choice([3, 5, 8]),
            "segment": draw.choice([1500, 10**6]),
            "generations": draw.choice([1, 2]),
        }
        ends = ENDS[:3] if level == "off" else ENDS  # nothing is promised at "off" where power fails
        longest = 0.05
        while True:
            end, seconds = draw.choice(ends), draw.random()
            disk = Disk(one, end, 1 + int(draw.random() ** 2 * 90), draw.randrange(2**32))
            sys.stdout.flush()
            began = time.monotonic()
            pid = os.fork()
            if pid == 0:
                try:
                    life(name, one, options, batch, disk)
                except BaseException as error:
                    sys.stderr.write(f"{name}, {table}, {options}, {end}: {type(error).__name__}: {error}\n")
                    sys.stderr.flush()
                    os._exit(3)
            if end == "timer":
                time.sleep(seconds * longest)
                os.kill(pid, signal.SIGKILL)  # not waited for: it is there, if only as what remains of it
            _, status = os.waitpid(pid, 0)
            longest = max(longest, min(0.4, time.monotonic() - began))
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                count["kills"] += 1
                count[end] += 1
                continue
            if not os.WIFEXITED(status) or os.WEXITSTATUS(status) != 0:
                count["failed"] += 1
            break
        count.update(judged(name, one, options, batch))
        count["servers"] += 1
        shutil.rmtree(one, ignore_errors=True)
    return count


def judged(name: str, folder: Path, options: dict[str, Any], batch: int) -> Counter[str]:
    """What the clients were told, against the folder as it is now and a life without kills."""
    server, receipts, acts = reference(name, folder.with_suffix(".whole"), batch)
    heard = receipts_in(folder.with_suffix(".heard"))
    door: Durable = durable(BATTERY[name], folder, **options)
    door.open()
    door.leave()
    count = Counter[str](acknowledged=len(heard))
    count["lost"] = sum(door.receipt(number) != receipt for number, receipt in heard.items())
    if (lost := folder.with_suffix(".lost")).exists():
        count["lost"] += len(lost.read_text().splitlines())
    count["wrong receipts"] = sum(heard.get(one.number) != one for one in receipts)
    count["twice"] = max(0, door.acts - acts)
    if options["keep"] == "all":
        found = Counter(v.task.number for _, v in Journal(folder).replay() if isinstance(v, Update))
        count["twice"] += sum(found.values()) - len(found)
        count["lost"] += len(heard.keys() - found.keys())
    count["other models"] = int(not equal(door.server, server))
    return count


def main(kills: int, seed: int, folders: Sequence[Path]) -> dict[str, Any]:
    torch.set_num_threads(1)
    combinations = [
        (n, t) for n in NAMES for t in (("memory", "disk") if tabled(BATTERY[n]) else ("memory",))
    ]
    total, by_table, names = Counter[str](), Counter[str](), set()
    for k, (name, table) in enumerate(combinations):
        wanted = (k + 1) * kills // len(combinations) - k * kills // len(combinations)
        place = folders[k % len(folders)] / f"{k}"
        place.mkdir(parents=True)
        count = campaign(name, table, max(1, wanted), seed, place)
        total.update(count)
        if tabled(BATTERY[name]):
            by_table[table] += count["kills"]
        names.add(type(BATTERY[name]).__name__)
        shutil.rmtree(place)
    return {**total, "strategies": len(names), "with tables": by_table}


if __name__ == "__main__":
    import logging
    import tempfile

    logging.disable(logging.ERROR)
    given = [*sys.argv[1:], *[None] * 4][:4]
    if given[3] == "careless":
        ENDS, NAMES = ("power",), ["fedasync", "mr-asyncfl"]
        Journal.commit = lambda journal: None  # type: ignore[method-assign]
    # three of four in memory: a kill leaves what was written there too, and a sync takes no time
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else given[2]
    with tempfile.TemporaryDirectory(dir=given[2]) as one, tempfile.TemporaryDirectory(dir=memory) as two:
        found = main(int(given[0] or 200), int(given[1] or 0), [Path(one), *[Path(two)] * 3])
    print(json.dumps(found))
