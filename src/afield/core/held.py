"""What a client keeps under ACE's algorithm a.5: its previous delta, committed when a receipt arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class HeldDeltas:
    """Clients send the difference to their previous delta, so the server needs no table.

    `prepare` gives what is sent (base + delta - previous delta; statistics go as they are); only `commit`, on
    a receipt that was not refused, makes the new delta the previous one: a lost or refused update changes
    nothing.
    """

    parameters: int  # how many elements of the vector are parameters
    previous: dict[int, Tensor] = field(default_factory=dict)
    sent: dict[int, Tensor] = field(default_factory=dict)

    def prepare(self, client: int, model: Tensor, base: Tensor) -> Tensor:
        count = self.parameters
        self.sent[client] = model[:count] - base[:count]
        message = model.clone()
        if client in self.previous:
            message[:count] -= self.previous[client]
        return message

    def commit(self, client: int) -> None:
        self.previous[client] = self.sent.pop(client)
