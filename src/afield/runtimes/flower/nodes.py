"""Which client a node is. Strategies know a fixed number of clients; nodes of a federation come and go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from afield.core.errors import InputError
from afield.store import files

NAME = "nodes.json"


@dataclass(slots=True)
class Nodes:
    """As many places as there are clients; each is one node's.

    A node that comes back is the client that it was. A new one takes a free place, else that of the node which left
    first; else it waits until one leaves.
    """

    places: int
    clients: dict[int, int] = field(default_factory=dict)  # node -> client
    online: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)  # said to be online, but they did not answer in time
    left: dict[int, None] = field(default_factory=dict)  # who is not there, first the one that left first
    waiting: set[int] = field(default_factory=set)

    def see(self, ids: Iterable[int]) -> tuple[list[int], list[int]]:
        """Who is connected now; gives who came and who left."""
        now = set(ids)
        self.lost &= now  # one that leaves the list and comes back has another chance
        self.waiting &= now
        gone = sorted(self.online - now)
        for node in gone:
            self._leave(node)
        came = [node for node in sorted(now - self.online - self.lost) if self._enter(node)]
        return came, gone

    def lose(self, node: int) -> None:
        """It did not answer in time: its place is free for another, until it answers after all."""
        self.lost.add(node)
        if node in self.online:
            self._leave(node)

    def find(self, node: int) -> None:
        self.lost.discard(node)

    def _enter(self, node: int) -> bool:
        if node not in self.clients:
            taken = set(self.clients.values())
            if len(taken) < self.places:
                client = next(place for place in range(self.places) if place not in taken)
            elif self.left:
                client = self.clients.pop(next(iter(self.left)))
                self.left.pop(next(iter(self.left)))
            else:
                self.waiting.add(node)
                return False
            self.clients[node] = client
        self.left.pop(node, None)
        self.waiting.discard(node)
        self.online.add(node)
        return True

    def _leave(self, node: int) -> None:
        self.online.discard(node)
        self.left[node] = None

    # -- on disk ----------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        text = json.dumps({"places": self.places, "clients": {str(k): v for k, v in self.clients.items()}})
        path = folder / NAME
        new = path.with_suffix(".new")
        with files.named(path, "write"):
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                files.write(fd, [text.encode()])
                files.sync(fd)
            finally:
                os.close(fd)
            files.rename(new, path)

    @classmethod
    def read(cls, folder: Path) -> Nodes | None:
        """Who was who when the folder was last written to, all of them absent; None where nothing is there."""
        path = folder / NAME
        if not path.exists():
            return None
        try:
            with files.named(path, "read"):
                found = json.loads(path.read_text())
            clients = {int(node): int(client) for node, client in found["clients"].items()}
            return cls(int(found["places"]), clients, left=dict.fromkeys(clients))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} cannot be read ({error}): restore it from a copy") from error
