"""A federation in one process: an implementation of Flower's Grid that runs a ClientApp when a reply is pulled.

Time is counted in pulls: a node's reply is there `speed[node]` pulls after its message was pushed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

try:  # since 1.3x a message can only be made inside a task
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0
except ImportError:
    pass

GONE = 5  # Flower's code of an error: the node is not there


@dataclass
class Sent:
    message: Message
    due: int


class LocalGrid(Grid):  # type: ignore[misc]
    def __init__(self, app: ClientApp, speed: Mapping[int, int], silent: Iterable[int] = ()) -> None:
        self.app, self.speed, self.silent = app, dict(speed), set(silent)  # silent: they never answer
        self.contexts: dict[int, Context] = {}
        self.open: dict[str, Sent] = {}
        self.pulls = self.pushed = 0
        self.busy: list[int] = []  # per pull, how many messages were open ...
        self.replies: list[int] = []  # ... and how many of them were answered
        self.log: list[
            tuple[Message, Message]
        ] = []  # every message and its reply, in the order of the replies
        self.script: dict[int, Callable[[], None]] = {}  # what happens before which pull

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return list(self.speed)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self.pushed += 1
            ids.append(f"message-{self.pushed}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            node = message.metadata.dst_node_id
            self.open[ids[-1]] = Sent(message, self.pulls + self.speed.get(node, 1))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = list(message_ids)
        assert set(wanted) == set(self.open), "every open message is asked for, and no other"
        self.pulls += 1
        self.script.pop(self.pulls, lambda: None)()
        self.busy.append(len(self.open))
        found = [reply for number in wanted if (reply := self._reply(number)) is not None]
        self.replies.append(len(found))
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        ids = self.push_messages(messages)
        replies: list[Message] = []
        while self.open:
            replies += self.pull_messages([number for number in ids if number in self.open])
        return replies

    def _reply(self, number: str) -> Message | None:
        sent = self.open[number]
        message, node = sent.message, sent.message.metadata.dst_node_id
        if node not in self.speed:
            reply = Message(Error(code=GONE, reason="node unavailable"), reply_to=message)
        elif node in self.silent or sent.due > self.pulls:
            return None
        else:
            config = {"partition-id": node % 100}
            context = self.contexts.setdefault(node, Context(1, node, config, RecordDict(), {}))
            try:
                reply = self.app(message, context)
            except Exception as error:
                reply = Message(Error(code=2, reason=str(error)), reply_to=message)
        del self.open[number]
        self.log.append((message, reply))
        return reply


def drifting(scale: float = 0.1) -> ClientApp:
    """Moves every weight by an amount of its own per node and per task, so that no two updates are equal."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        part = int(context.node_config["partition-id"])
        times = context.state.setdefault("times", MetricRecord({"n": 0}))
        times["n"] += 1
        rng = np.random.default_rng([part, times["n"]])
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        for name, array in arrays.items():
            if array.dtype.kind == "f":
                arrays[name] = (array + scale * rng.standard_normal(array.shape)).astype(array.dtype)
            else:
                arrays[name] = array + 1
        metrics = MetricRecord({"num-examples": 10 + part, "loss": float(part)})
        return Message(RecordDict({"arrays": record(arrays), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        part = int(context.node_config["partition-id"])
        total = float(sum(array.numpy().sum() for array in message.content["arrays"].values()))
        metrics = MetricRecord({"num-examples": 1 + part, "part": float(part), "total": total})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def record(arrays: Mapping[str, np.ndarray[Any, Any]]) -> ArrayRecord:
    from flwr.app import Array

    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def model() -> ArrayRecord:
    rng = np.random.default_rng(0)
    return record({"w": rng.standard_normal((3, 4)).astype(np.float32), "b": np.zeros(4, np.float32)})
