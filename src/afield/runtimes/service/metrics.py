"""What Prometheus reads at /metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """One registry per service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self.updates = Counter("afield_updates", "Updates that were folded", **own)
        self.refusals = Counter("afield_refusals", "Requests that were refused, by reason", ["reason"], **own)
        self.tasks = Counter("afield_tasks", "Tasks that were handed out", **own)
        self.ended = Counter("afield_tasks_ended", "Tasks that were taken back, by reason", ["reason"], **own)
        self.received = Counter("afield_received_bytes", "Bytes of updates", **own)
        self.sent = Counter("afield_sent_bytes", "Bytes of models", **own)
        self.staleness = Histogram(
            "afield_staleness",
            "Versions between base and arrival",
            buckets=(0, 1, 2, 5, 10, 20, 50, 100, 200),
            **own,
        )
        self.folds = Histogram("afield_fold_seconds", "One batch: sync and fold", buckets=SECONDS, **own)
        self.requests = Histogram(
            "afield_request_seconds",
            "Time to the reply, by route and status",
            ["route", "status"],
            buckets=SECONDS,
            **own,
        )
        self.accuracy = Gauge("afield_accuracy", "The last measured accuracy", **own)
        self.loss = Gauge("afield_loss", "The last measured loss", **own)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A value that is looked up when it is asked for."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def text(self) -> bytes:
        return generate_latest(self.registry)
