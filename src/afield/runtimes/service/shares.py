"""Whose model it is: each client's share of the global model, kept up with O(1) per receipt.

A receipt tells the weight of its update. What that means depends on the rule:

- "mixed" (FedAsync): w <- (1 - a) w + a model. A client's share is the sum over its models of a times the product of
  (1 - a) since; what is left is the initial model's.
- "replaced" (MR.AsyncFL, TWAFL, Rolling FedAvg): w is a mean of every client's newest model, and the receipt tells
  the coefficient of the one that came. The others keep their proportions, so each is multiplied by
  (1 - new) / (1 - old); clients that were not heard yet stand for the initial model, in equal parts.
- "tabled" (ACE, MIFA, FedStale, ...): every step adds every client's newest delta with the same weight. A share is in
  proportion to the number of steps since the client was heard for the first time.
- "rounds" (FedAvg): the weights of one round are parts of one; shares are sums of these over the rounds.
- "summed" (FedBuff, ASGD and whatever else): a share is the part of all weight so far that came from the client.

The first two are exact. The others say how much of all that was ever applied came from whom; they are exact where
steps are as described (core/linear.py finds the same by running the rule on unit vectors, at O(clients) per receipt).
"""

from __future__ import annotations

import heapq
from typing import Any

TINY = 1e-200  # below: the scale is folded into the parts
TOP = 12  # clients that are told by name


def rule_of(strategy: Any) -> str:
    """Which of the five; of a strategy or its class."""
    newest = getattr(strategy, "gathers", "buffer") == "newest"
    if getattr(strategy, "linear", "") == "models":
        return "replaced" if newest else "mixed"
    if newest:
        return "tabled"
    return "rounds" if getattr(strategy, "pace", "") == "round" else "summed"


class Shares:
    """The shares of one run; receipts are given in the order of their arrival."""

    def __init__(self, rule: str, clients: int) -> None:
        self.rule, self.clients = rule, clients
        self.updates = 0
        self.version = 0
        self._parts: dict[int, float] = {}  # times _scale: shares, or what they are in proportion to
        self._scale = 1.0
        self._initial = 1.0  # likewise, of the initial model
        self._round: list[tuple[int, float]] = []

    def add(self, client: int, weight: float, stepped: bool, version: int) -> None:
        """One receipt of an update that was accepted."""
        self.updates += 1
        self.reached(version)
        if self.rule == "mixed":
            self._shrink(1.0 - weight)  # which may make new parts
            self._parts[client] = self._parts.get(client, 0.0) + weight / self._scale
        elif self.rule == "replaced":
            self._replace(client, weight)
        elif self.rule == "tabled":
            # it counts from the next step on, or from the one that it made
            self._parts.setdefault(client, float(version - stepped))
        elif self.rule == "rounds":
            self._round.append((client, abs(weight)))
        else:
            self._parts[client] = self._parts.get(client, 0.0) + abs(weight)

    def reached(self, version: int) -> None:
        """The server is at this version: a round before it is over."""
        if version > self.version:
            self.version = version
            self._close()

    def _shrink(self, factor: float) -> None:
        """Multiply every share."""
        self._scale *= factor
        if self._scale < TINY:
            self._parts = {c: found for c, part in self._parts.items() if (found := part * self._scale) > 0}
            self._initial *= self._scale
            self._scale = 1.0

    def _replace(self, client: int, weight: float) -> None:
        parts = self._parts
        if client in parts:
            old = parts.pop(client) * self._scale
        else:
            old = self._initial * self._scale / (self.clients - len(parts))
            self._initial -= old / self._scale
        self._shrink((1.0 - weight) / (1.0 - old) if old < 1.0 else 0.0)
        self._parts[client] = weight / self._scale

    def _close(self) -> None:
        total = sum(weight for _, weight in self._round)
        for client, weight in self._round:
            self._parts[client] = self._parts.get(client, 0.0) + (weight / total if total else 0.0)
        self._round.clear()

    def all(self) -> dict[int, float]:
        """The share of every client that was heard; with what is the initial model's they sum to one."""
        if self.rule in ("mixed", "replaced"):
            return {client: part * self._scale for client, part in self._parts.items()}
        if self.rule == "tabled":
            found = {client: self.version - first for client, first in self._parts.items()}
        else:
            found = self._parts
        total = sum(found.values())
        return {client: part / total for client, part in found.items()} if total else {}

    def told(self, top: int = TOP) -> dict[str, Any]:
        """For a page: the largest, and the rest together."""
        found = self.all()
        largest = heapq.nsmallest(top, found.items(), key=lambda item: (-item[1], item[0]))
        initial = self._initial * self._scale if self.rule in ("mixed", "replaced") else None
        shown = sum(share for _, share in largest)
        return {
            "rule": self.rule,
            "updates": self.updates,
            "clients": len(found),
            "top": [[client, share] for client, share in largest],
            "rest": max(0.0, sum(found.values()) - shown),
            "initial": initial,
        }
