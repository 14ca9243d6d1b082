"""From a config to a live service, and its run folder, which goes on over restarts."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.server import Server
from afield.core.types import Receipt, Scene
from afield.experiments.config import Config, config, read
from afield.experiments.folder import check_new, environment, write_receipts, write_whole
from afield.experiments.keep import SHARE
from afield.experiments.own import own_evaluator, own_module
from afield.experiments.run import prepare
from afield.runtimes.rows import Measurement
from afield.runtimes.service.plans import plan_for
from afield.runtimes.service.privacy import Privacy, Private, secret
from afield.runtimes.service.service import Parts, Terms
from afield.runtimes.service.trust import Book, write_secret
from afield.scenarios.schedulers import Bernoulli, Cohort
from afield.store.files import named, sync_folder
from afield.store.live import Durable

log = logging.getLogger(__name__)
FLUSHED = 2000  # receipts per file; fewer than the store remembers, so that a crash leaves no gap


@dataclass(frozen=True)
class Keeping:
    """What the store is told: how safe, how much, how often."""

    fsync: str = "batch"
    keep: str = "needed"
    every: int = 1000
    seconds: float = 600.0
    share: float = SHARE  # of the time at most, for snapshots


@contextmanager
def opened(
    chosen: Config,
    folder: Path,
    keys: Path,
    *,
    name: str,
    terms: Terms = Terms(),
    keeping: Keeping = Keeping(),
    privacy: Privacy | None = None,
    own: str | None = None,
    test: Path | None = None,
) -> Iterator[Parts]:
    """The parts of a service over its folder; at the end a snapshot is written and the folder is let go."""
    if chosen.server.reply != "after":
        raise InputError(
            'server.reply = "before" is of simulations: a live client asks after its receipt; set "after"'
        )
    if test is not None and own is None:
        raise InputError("--test goes with --model: the experiment's own data has a test set")
    log = LiveFolder(folder, chosen, own, privacy)
    try:
        server, layout, scene, evaluator = _server(log.config, own, test)
        about = {"model": own or repr(log.config.model)}
        door = Durable(server, log.store, table=log.config.runtime.table, about=about, **vars(keeping))
        with door:
            log.catch_up(door.receipts)
            private = None
            if privacy is not None:
                private = Private(
                    privacy, server.strategy, layout, secret(keys / "privacy.key"), door.accepted
                )
            scenario: Any = log.config.scenario
            plan = plan_for(
                server.strategy,
                scenario.scheduler,
                scenario.rounds,
                scene,
                number=door.rounds,
                begun=door.begun,
                once=private is not None,
            )
            yield Parts(
                name=name,
                door=door,
                layout=layout,
                plan=plan,
                book=Book(keys / "tokens.json"),
                folder=folder,
                table={**log.config.table(), **({} if own is None else {"own": own})},
                terms=terms,
                evaluator=evaluator,
                measuring=log.config.measure,
                manners=log.config.server,
                private=private,
                founded=log.founded,
                row=log.row,
                measured=log.measured,
            )
    finally:
        log.close()


def _server(chosen: Config, own: str | None, test: Path | None = None) -> tuple[Server, Layout, Scene, Any]:
    """The server as on its first day, and what measures it."""
    if own is None:
        prepared = prepare(chosen)
        simulator = prepared.simulator
        return simulator.server, Layout.of(prepared.module), simulator.scene, simulator.evaluator
    module = own_module(own, chosen.seed)
    layout, scenario = Layout.of(module), chosen.scenario
    strategy: Any = chosen.strategy
    scene = Scene(chosen.seed, [1] * scenario.clients)
    rounds: Any = scenario.rounds
    in_rounds = getattr(strategy, "pace", "arrival") == "round" and isinstance(rounds, Bernoulli | Cohort)
    if hasattr(strategy, "fitted"):
        plan: Any = rounds if in_rounds else scenario.scheduler
        participation = rounds.participation(scenario.clients) if in_rounds else None
        strategy = strategy.fitted(plan.concurrency(scenario.clients), participation)
    server = Server(
        strategy,
        layout.flatten(module),
        scenario.clients,
        parameters=layout.parameters,
        seed=chosen.seed,
        max_staleness=chosen.server.max_staleness,
    )
    return server, layout, scene, None if test is None else own_evaluator(module, test)


def first_token(keys: Path) -> tuple[Path, bool]:
    """The operator's token, made at the first start; where it is, and whether it is new."""
    path, book = keys / "operator.token", Book(keys / "tokens.json")
    if book.holders:
        return path, False
    keys.mkdir(parents=True, exist_ok=True, mode=0o700)
    _, token = book.add(None, operator=True, note="made at the first start")
    write_secret(path, (token + "\n").encode())
    return path, True


class LiveFolder:
    """A run folder that is written to by one process after the other: the same files as a simulation's."""

    def __init__(self, path: Path, chosen: Config, own: str | None, privacy: Privacy | None) -> None:
        self.path, self.store = path, path / "store"
        self._book = path / "service.json"
        wanted = replace(chosen, runtime=replace(chosen.runtime, name="service"))
        if self._book.exists():
            self._continue(wanted, own, privacy)
        else:
            check_new(path)
            with named(path, "make"):
                (path / "receipts").mkdir(parents=True)
            self.config, self.founded = wanted, time.time()
            # the store cannot be opened again without these: on the disk before the first update is
            write_whole(path / "config.toml", wanted.toml())
            (path / "environment.json").write_text(
                json.dumps(environment(), indent=2) + "\n", encoding="utf-8"
            )
            # last: its presence says that the rest is there
            told = {"founded": self.founded, "own": own, "privacy": privacy and asdict(privacy)}
            write_whole(self._book, json.dumps(told) + "\n")
            sync_folder(path)
        self.measured = _measured(path / "metrics.jsonl")
        with named(path / "metrics.jsonl", "write"):
            _cut(path / "metrics.jsonl")
            self._metrics = (path / "metrics.jsonl").open("a", encoding="utf-8")
        self._rows: list[Receipt] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="receipts")  # never on the event loop
        self._waiting: deque[tuple[list[Receipt], Path]] = deque()  # for their files, in order
        self._files = len(list((path / "receipts").glob("*.parquet")))

    def _continue(self, wanted: Config, own: str | None, privacy: Privacy | None) -> None:
        try:
            told = json.loads(self._book.read_text(encoding="utf-8"))
            self.founded = float(told["founded"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self._book} cannot be read ({error}): restore it from a copy") from error
        self.config = config(read(self.path / "config.toml"))
        if told["own"] != own:
            raise InputError(f"{self.path} was begun with --model {told['own']}, not {own}: give the same")
        if told.get("privacy") != (privacy and asdict(privacy)):
            # without this, steps of before would be counted with a noise that they did not have
            raise InputError(f"{self.path} was begun with {_terms(told.get('privacy'))}: give the same")
        before, now = self.config.table(), wanted.table()
        for key in before:
            if before[key] != now.get(key) and key not in ("stop", "measure", "runtime", "label"):
                raise InputError(
                    f"{self.path} was begun with another {key}: leave CONFIG out to go on, or choose another --out"
                )
        self.config = replace(self.config, measure=wanted.measure)

    def catch_up(self, known: dict[int, Receipt]) -> None:
        """Receipts that a crash kept from their file: the store has them."""
        last = self._last()
        rows = list(known.values())
        numbers = [row.number for row in rows]
        if last is None:
            self._rows = rows
        elif last in numbers:
            self._rows = rows[numbers.index(last) + 1 :]

    def _last(self) -> int | None:
        """The number of the last receipt on the disk."""
        files = sorted((self.path / "receipts").glob("*.parquet"))
        if not files:
            return None
        from pyarrow import parquet

        for file in reversed(files):
            table = parquet.read_table(file, columns=["number", "refused"]).to_pylist()
            for row in reversed(table):
                if not row["refused"]:
                    return int(row["number"])
        return None

    def row(self, row: Receipt | Measurement) -> None:
        if isinstance(row, Measurement):
            self._metrics.write(json.dumps(row.row()) + "\n")
            self._metrics.flush()
            return
        self._rows.append(row)
        if len(self._rows) >= FLUSHED:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            path = self.path / "receipts" / f"{self._files:05d}.parquet"
            self._waiting.append((self._rows, path))
            self._writer.submit(self._write)
            self._files += 1
            self._rows = []

    def _write(self) -> None:
        """On the writer's thread: every file that waits; one that fails keeps its turn, so that there is no gap."""
        while self._waiting:
            rows, path = self._waiting[0]
            try:
                with named(path, "write"):
                    write_receipts(rows, path)
            except InputError as error:
                log.error("receipts wait for their file: %s", error)
                return
            self._waiting.popleft()

    def close(self) -> None:
        self._flush()
        self._writer.submit(self._write)
        self._writer.shutdown()
        left = [path for _, path in self._waiting]
        try:
            self._metrics.close()
        except OSError:
            left.append(self.path / "metrics.jsonl")
        if left:
            raise InputError(
                f"{left[0]} could not be written: make room, then start the service again; its store has what is "
                "missing"
            )


def _terms(privacy: Mapping[str, float] | None) -> str:
    if privacy is None:
        return "no differential privacy (no --clip)"
    return " ".join(f"--{name} {value:g}" for name, value in privacy.items())


def _cut(file: Path) -> None:
    """Take away a last line that a crash cut short: the next one would be written on to it."""
    if file.exists():
        whole = file.read_bytes().rfind(b"\n") + 1
        if whole < file.stat().st_size:
            os.truncate(file, whole)


def _measured(file: Path) -> list[dict[str, Any]]:
    """The measurements of the service's earlier lives; a line that a crash cut short is left out."""
    rows: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
