"""Evaluation by the nodes, between their tasks: nobody waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, MetricRecord, RecordDict

log = logging.getLogger("flwr")


@dataclass(slots=True)
class Open:
    """One round's model, until all who were asked have answered."""

    arrays: ArrayRecord
    waiting: set[int]
    replies: list[RecordDict] = field(default_factory=list)


@dataclass(slots=True)
class Evaluations:
    """Who is to evaluate which round's model, and what they found."""

    key: str  # the metric that holds the number of examples
    aggregate: Callable[[list[RecordDict], str], MetricRecord]
    results: dict[int, MetricRecord]
    asked: dict[int, int] = field(default_factory=dict)  # node -> the round that is its next
    open: dict[int, Open] = field(default_factory=dict)

    def ask(self, number: int, arrays: ArrayRecord, nodes: Iterable[int]) -> None:
        """Have these nodes evaluate, once they are idle. One that has not come to an earlier round skips that."""
        chosen = set(nodes)
        for node in chosen:
            self.skip(node)
        if chosen:
            self.open[number] = Open(arrays, chosen)
            self.asked.update(dict.fromkeys(sorted(chosen), number))

    def skip(self, node: int) -> None:
        if node in self.asked:
            self.settle(node, self.asked.pop(node))

    def settle(self, node: int, number: int, content: RecordDict | None = None) -> None:
        """It has answered, or never will."""
        one = self.open[number]
        one.waiting.discard(node)
        if content is not None:
            records = list(content.metric_records.values())
            if len(records) == 1 and isinstance(records[0].get(self.key), (int, float)):
                one.replies.append(RecordDict({"metrics": records[0]}))
            else:
                log.warning("node %d evaluated without one MetricRecord that has %s", node, self.key)
        if not one.waiting:
            self.close(number)

    def close(self, number: int) -> None:
        replies = self.open.pop(number).replies
        if replies:
            self.results[number] = self.aggregate(replies, self.key)
            log.info("[ROUND %d] evaluated by %d nodes: %s", number, len(replies), self.results[number])
