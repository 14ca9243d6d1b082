"""The loop of one Flower run: tasks go out, answers come in, everyone is kept busy."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from afield.core.errors import InputError
from afield.core.server import Server
from afield.core.types import Task, Update
from afield.runtimes.flower.arrays import Arrays, opened, packed
from afield.runtimes.flower.evaluation import Evaluations
from afield.runtimes.flower.nodes import Nodes
from afield.runtimes.simulate import threads
from afield.store import files
from afield.store.live import Durable

if TYPE_CHECKING:
    from afield.runtimes.flower import AsyncStrategy

log = logging.getLogger("flwr")

LOOK = 1.0  # seconds between two looks at who is connected
SHORT = 0.005  # seconds between two pulls right after a reply; then more, up to `poll`:
SHARE = 0.25  # of the time since then: the most that a reply lies there, beside what it took
REST = 60.0  # seconds that a node rests at the most after it failed; after the first time, one
LIFE = 12 * 3600.0  # Flower's default for how long a message is kept


@dataclass(slots=True)
class Flight:
    """A message that was not answered yet."""

    node: int
    due: float
    task: Task | None = None  # of one that trains
    round: int = 0  # of one that evaluates
    late: bool = False  # its task was cancelled: an answer will be dropped


class Run:
    """One call of `start`."""

    def __init__(
        self,
        of: AsyncStrategy,
        grid: Grid,
        rounds: int,
        deadline: float,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> None:
        self.of, self.grid, self.deadline, self.evaluate_fn = of, grid, deadline, evaluate_fn
        self.rounds, self.total = rounds, rounds * of.round_size
        self.train_config: dict[str, Any] = {}
        self.evaluate_config: dict[str, Any] = {}
        self.result = Result()
        self.evaluations = Evaluations(
            of.weighted_by_key, of.evaluate_metrics_aggr_fn, self.result.evaluate_metrics_clientapp
        )
        self.accepted = 0
        self.flights: dict[str, Flight] = {}
        self.resting: dict[int, tuple[float, int]] = {}  # node -> until when, failures in a row
        self.held: dict[int, int] = {}  # node -> the version that it waits to see passed
        self.failures = 0  # since the last update that was accepted
        self.metrics: list[RecordDict] = []  # of this round's updates
        self.choice = random.Random(of.seed)
        self.threads = torch.get_num_threads()  # for the user's own evaluation
        self.looked = -math.inf
        self.record: tuple[int, ArrayRecord] | None = None  # the newest version as it is sent

    # -- begin ------------------------------------------------------------------------------------------------

    def open(self, initial: ArrayRecord, stack: ExitStack) -> None:
        """Wait for the nodes; the server as it was left, or as on its first day."""
        of, folder = self.of, self.of.folder
        named = opened(initial)
        self.layout = Arrays.of(named)
        self.whole = self.layout.whole(named)
        known = None if folder is None else Nodes.read(folder)
        if known is not None and not of.resuming:
            raise InputError(f"{folder} holds a run: go on with resume = {str(folder)!r}, or choose another")
        connected = self._wait()
        self.nodes = known or Nodes(of.clients or len(connected))
        if of.clients not in (None, self.nodes.places):
            raise InputError(
                f"clients = {of.clients}, but {folder} is of a run with {self.nodes.places}: give that number"
            )
        strategy: Any = of.strategy
        if hasattr(strategy, "fitted"):
            strategy = strategy.fitted(min(of.concurrency, self.nodes.places), None)
        self.server = Server(
            strategy,
            self.layout.vector(named),
            self.nodes.places,
            parameters=self.layout.parameters,
            seed=of.seed,
            max_staleness=of.max_staleness,
        )
        self.durable: Durable | None = None
        if folder is not None:
            files.make(folder)
            self.nodes.write(folder)
            self.durable = stack.enter_context(Durable(self.server, folder, fsync=of.fsync))
            self.accepted = sum(self.durable.accepted.values())
            for lease in list(self.server.leases.values()):  # their messages went down with the old run
                self.durable.cancel(lease.task)
        self.door: Server | Durable = self.durable or self.server
        self._see(connected)
        if self.accepted:
            log.info("resumed at update %d, version %d", self.accepted, self.server.version)
        self._evaluate_here()

    def _wait(self) -> list[int]:
        """Who is connected, as soon as they are enough."""
        said = -math.inf
        while len(ids := list(self.grid.get_node_ids())) < self.of.min_available_nodes:
            if time.monotonic() - said > 10:
                said = time.monotonic()
                log.info("waiting for nodes: %d of %d are connected", len(ids), self.of.min_available_nodes)
            time.sleep(self.of.poll)
        return ids

    # -- the loop ---------------------------------------------------------------------------------------------

    def loop(self) -> None:
        """Keep everyone busy until the last update is in and nobody owes an answer."""
        heard, until = time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            if now - self.looked > LOOK:
                self._see(self.grid.get_node_ids())
            self._expire(now)
            self._fill(now)
            if self.accepted < self.total or self._owed():
                until = now + self.of.drain
            elif not self.flights or now > until:
                break
            replies = list(self.grid.pull_messages(list(self.flights))) if self.flights else []
            if replies:
                self._take(replies)
                heard = time.monotonic()
            else:
                time.sleep(min(max(SHORT, SHARE * (time.monotonic() - heard)), self.of.poll))
        for number in list(self.evaluations.open):
            self.evaluations.close(number)
        if self.flights:
            nodes = sorted({flight.node for flight in self.flights.values()})
            log.warning("%d messages were never answered, by nodes %s", len(self.flights), nodes)
        self.result.arrays = self._arrays()

    def _owed(self) -> bool:
        """Whether an answer is to come that will be used."""
        return bool(self.evaluations.asked) or not all(flight.late for flight in self.flights.values())

    def _see(self, ids: Iterable[int]) -> None:
        self.looked = time.monotonic()
        nodes, waiting = self.nodes, set(self.nodes.waiting)
        before = dict(nodes.clients)
        came, left = nodes.see(ids)
        for node in came:
            log.info("node %d is client %d", node, nodes.clients[node])
        for node in left:
            log.warning("node %d (client %d) left", node, before[node])
            self.held.pop(node, None)
            self.evaluations.skip(node)
        for node in sorted(nodes.waiting - waiting):
            log.warning("node %d waits: all %d places are taken (see clients)", node, nodes.places)
        if self.of.folder is not None and before != nodes.clients:
            nodes.write(self.of.folder)

    def _expire(self, now: float) -> None:
        for flight in self.flights.values():
            if flight.due > now or flight.late:
                continue
            log.warning("node %d did not answer within %g s", flight.node, self.deadline)
            flight.late = True
            self.nodes.lose(flight.node)
            self.looked = -math.inf  # one that waits for a place may have it
            self.evaluations.skip(flight.node)
            if flight.task is not None:
                self.door.cancel(flight.task)
            else:
                self.evaluations.settle(flight.node, flight.round)

    def _fill(self, now: float) -> None:
        """Idle nodes evaluate if they were asked to, else train while there is room."""
        busy = {flight.node for flight in self.flights.values()}
        for node in [node for node in self.evaluations.asked if node not in busy]:
            self._send_evaluation(node, now)
            busy.add(node)
        flying = sum(flight.task is not None and not flight.late for flight in self.flights.values())
        room = min(self.of.concurrency, self.total - self.accepted) - flying
        if room <= 0:
            return
        idle = sorted(node for node in self.nodes.online if node not in busy)
        ready = [node for node in idle if self.resting.get(node, (0.0, 0))[0] <= now]
        free = [node for node in ready if self.held.get(node, -1) < self.server.version]
        if not free and not flying and len(ready) == len(idle) == len(self.nodes.online):
            free = ready  # only those who hold are left to raise the version
        for node in self.choice.sample(free, min(room, len(free))):
            self._send_task(node, now)

    def _send_evaluation(self, node: int, now: float) -> None:
        number = self.evaluations.asked.pop(node)
        config = {**self.evaluate_config, "server-round": number}
        message = self._message(node, MessageType.EVALUATE, self.evaluations.open[number].arrays, config)
        if not self._push(message, Flight(node, now + self.deadline, round=number)):
            self.evaluations.settle(node, number)

    def _send_task(self, node: int, now: float) -> None:
        task = self.door.checkout(self.nodes.clients[node], time.time())
        self.held.pop(node, None)
        config = {**self.train_config, "server-round": self.accepted // self.of.round_size + 1}
        message = self._message(node, MessageType.TRAIN, self._arrays(self.server.base(task)), config)
        if not self._push(message, Flight(node, now + self.deadline, task)):
            self.door.cancel(task)
            self._failed(node, "the message was not taken")

    def _message(self, node: int, kind: str, arrays: ArrayRecord, config: dict[str, Any]) -> Message:
        content = RecordDict(
            {self.of.arrayrecord_key: arrays, self.of.configrecord_key: ConfigRecord(config)}
        )
        # longer than the deadline: only an answer, however late, tells that the node is free again
        life = max(LIFE, 2 * self.deadline)
        group = str(config["server-round"])
        return Message(content, dst_node_id=node, message_type=kind, ttl=life, group_id=group)

    def _push(self, message: Message, flight: Flight) -> bool:
        # one by one: of several, not every grid says which were not taken
        for number in self.grid.push_messages([message]):
            if number:
                self.flights[number] = flight
                return True
        return False

    # -- answers ----------------------------------------------------------------------------------------------

    def _take(self, replies: Sequence[Message]) -> None:
        arrived = time.time()
        good: list[tuple[int, Update, RecordDict]] = []
        for reply in replies:
            flight = self.flights.pop(reply.metadata.reply_to_message_id, None)
            if flight is None:
                continue
            self.nodes.find(flight.node)
            if reply.has_error():
                self._error(flight, str(reply.error.reason or f"error {reply.error.code}"))
            elif flight.late:
                log.warning("node %d answered too late: dropped", flight.node)
                self.looked = -math.inf  # from now on it gets tasks again
            elif flight.task is None:
                self.evaluations.settle(flight.node, flight.round, reply.content)
            else:
                try:
                    good.append(
                        (flight.node, self._update(flight.task, reply.content, arrived), reply.content)
                    )
                except InputError as error:
                    self.door.cancel(flight.task)
                    self._failed(flight.node, str(error))
        while good:
            # a round ends with its last update, not with the last of those that came together
            left = self.of.round_size - self.accepted % self.of.round_size
            self._submit(good[:left])
            good = good[left:]

    def _submit(self, good: Sequence[tuple[int, Update, RecordDict]]) -> None:
        updates = [update for _, update, _ in good]
        if self.durable is not None:
            receipts = self.durable.submit_all(updates)
        else:
            receipts = [self.server.submit(update) for update in updates]
        self.of.receipts += receipts
        for (node, update, content), receipt in zip(good, receipts, strict=True):
            if receipt.refused:
                self.door.cancel(update.task)
                if receipt.refused != "too-stale":
                    self._failed(node, f"its update was refused: {receipt.refused}")
                continue
            self.accepted += 1
            self.failures = 0
            self.resting.pop(node, None)
            if receipt.hold:
                self.held[node] = receipt.version
            if self.whole:
                (record,) = content.array_records.values()
                self.whole = {name: record[name].numpy() for name in self.whole}
            (metrics,) = content.metric_records.values()
            self.metrics.append(RecordDict({"metrics": metrics}))
            if self.accepted % self.of.round_size == 0:
                self._close_round()

    def _update(self, task: Task, content: RecordDict, arrived: float) -> Update:
        key = self.of.weighted_by_key
        records, metrics = list(content.array_records.values()), list(content.metric_records.values())
        if len(records) != 1 or len(metrics) != 1:
            raise InputError(
                f"its reply has {len(records)} ArrayRecords and {len(metrics)} MetricRecords: send one of each"
            )
        examples = metrics[0].get(key)
        if not isinstance(examples, (int, float)) or not math.isfinite(examples):
            raise InputError(f"its reply has {key} = {examples}: send how many examples it trained on")
        model = self.layout.vector(opened(records[0]))
        scalars = {name: float(value) for name, value in metrics[0].items() if not isinstance(value, list)}
        return Update(task, model, None, int(examples), arrived=arrived, metrics=scalars)

    def _error(self, flight: Flight, reason: str) -> None:
        self._see(self.grid.get_node_ids())
        if flight.task is None:
            log.warning("node %d did not evaluate: %s", flight.node, reason)
            if not flight.late:
                self.evaluations.settle(flight.node, flight.round)
            return
        if not flight.late:
            self.door.cancel(flight.task)
        if flight.node in self.nodes.online:
            self._failed(flight.node, reason)
        else:
            log.warning("node %d is gone: %s", flight.node, reason)

    def _failed(self, node: int, reason: str) -> None:
        """It rests, longer each time. A federation that only fails is not worth waiting for."""
        times = self.resting.get(node, (0.0, 0))[1] + 1
        rest = min(2.0 ** (times - 1), REST)
        self.resting[node] = (time.monotonic() + rest, times)
        self.failures += 1
        log.warning("node %d failed, for %g s it gets no task: %s", node, rest, reason)
        if self.failures >= 3 * self.nodes.places:
            raise RuntimeError(f"{self.failures} tasks failed in a row, the last on node {node}: {reason}")

    # -- rounds -----------------------------------------------------------------------------------------------

    def _close_round(self) -> None:
        number = self.accepted // self.of.round_size
        metrics = self.of.train_metrics_aggr_fn(self.metrics, self.of.weighted_by_key)
        self.metrics = []
        self.result.train_metrics_clientapp[number] = metrics
        log.info("[ROUND %d/%d] version %d: %s", number, self.rounds, self.server.version, metrics)
        online = sorted(self.nodes.online)
        count = math.ceil(self.of.fraction_evaluate * len(online))
        self.evaluations.ask(number, self._arrays(), self.choice.sample(online, count))
        self._evaluate_here()

    def _evaluate_here(self) -> None:
        if self.evaluate_fn is None:
            return
        number = self.accepted // self.of.round_size
        with threads(self.threads):
            metrics = self.evaluate_fn(number, self._arrays())
        if metrics is not None:
            self.result.evaluate_metrics_serverapp[number] = metrics
            log.info("[ROUND %d] evaluated here: %s", number, metrics)

    def _arrays(self, vector: Tensor | None = None) -> ArrayRecord:
        """The newest version. One record serves all messages of one version."""
        version = self.server.version
        if self.record is None or self.record[0] != version:
            vector = self.server.model() if vector is None else vector
            self.record = version, packed(self.layout.arrays(vector, self.whole))
        return self.record[1]
