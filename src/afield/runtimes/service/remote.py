"""A task as its client holds it: the model that it starts from, heartbeats, and the way back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.types import Receipt
from afield.runtimes.service.wire import TYPE, raw

if TYPE_CHECKING:
    from afield.runtimes.service.client import Client

PIECE = 1 << 18
COLUMNS = [column.name for column in fields(Receipt)]


class ServerError(InputError):
    """The server said no, and trying again would not help."""

    def __init__(self, status: int, reason: str, following: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.status, self.reason, self.next = status, reason, following


class RemoteTask:
    """A task of this client, with the model that it starts from. While it is held, heartbeats keep its lease."""

    def __init__(
        self, owner: Client, told: Mapping[str, Any], base: Tensor, correction: Tensor | None
    ) -> None:
        self.owner, self.told = owner, told
        self.number: int = told["number"]
        self.client: int = told["client"]
        self.count: int = told["count"]
        self.version: int = told["version"]
        self.started: float = told["started"]
        self.base, self.correction = base, correction
        self.receipt: Receipt | None = None
        self.ended = ""  # why it was taken back, once it was
        self._answered = threading.Event()
        self._heart = threading.Thread(target=self._beat, name=f"task {self.number}", daemon=True)

    def __enter__(self) -> RemoteTask:
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answered.set()
        if self.receipt is None and not self.ended:
            with suppress(InputError):
                self.give_back()

    def load_into(self, module: nn.Module) -> None:
        """The model that this task starts from."""
        layout = self.fits(module)
        layout.load(self.base.to(layout.dtype), module)

    def fits(self, module: nn.Module) -> Layout:
        """The module's layout, which must be the server's: one of as many numbers may mean others by them."""
        layout, wanted = Layout.of(module), self.owner.layout
        if (layout.names, layout.shapes) != (wanted.names, wanted.shapes):
            other = next(
                (n for n, m in zip(wanted.names, layout.names, strict=False) if n != m),
                "their number or shapes",
            )
            raise InputError(
                f"{type(module).__name__} is not the server's model: they differ at {other}; give the network that "
                "the service was begun with"
            )
        return layout

    def submit(
        self,
        model: nn.Module | Tensor,
        *,
        examples: int,
        steps: int = 1,
        rate: float = 1.0,
        metrics: Mapping[str, float] | None = None,
    ) -> Receipt:
        """Send the trained model. A receipt with `refused` says why it did not count; the next task makes it good."""
        vector = model if isinstance(model, Tensor) else self.owner.layout.flatten(model)
        vector = vector.detach().cpu().contiguous()
        pieces = self._packed(vector)
        query = {"lease": self.told["lease"], "examples": examples, "steps": steps, "rate": rate}
        if metrics:
            query["metrics"] = json.dumps(dict(metrics))
        headers = {"Content-Type": TYPE, "Content-Length": str(sum(len(piece) for piece in pieces))}
        if self.owner.zstd:
            headers["Content-Encoding"] = "zstd"
        self._answered.set()
        try:
            reply = self.owner.request(
                "PUT",
                f"/v1/tasks/{self.number}/update",
                params=query,
                headers=headers,
                content=_Pieces(pieces),
            )
        except ServerError as error:
            if error.next != "new-task":
                raise
            self.ended = error.reason
            return self._refusal(error.reason, vector, examples)
        self.owner.sent += int(headers["Content-Length"])
        told = reply.json()
        self.receipt = Receipt(**{name: told[name] for name in COLUMNS})
        if self._remembers:
            self.owner.memory.commit(self.client, self.told["lease"])
        return self.receipt

    @property
    def _remembers(self) -> bool:
        return bool(self.told["held"]) or self.owner.transport != "full"

    def _packed(self, vector: Tensor) -> list[bytes | memoryview]:
        """The body: the model, or what is sent in its place."""
        wire, form = self.owner.wire, self.owner.transport
        pieces: list[bytes | memoryview]
        if not self._remembers:
            pieces = [wire.heads["full"], raw(vector)]
        else:
            memory, lease = self.owner.memory, self.told["lease"]
            first = memory.again(self.client, lease)
            vector = vector.clone() if first is None else first  # theirs may change while it is on its way
            past = memory.pasts[self.client].kept
            noted, message = {"model": vector}, vector
            if self.told["held"]:
                count = self.owner.layout.parameters
                noted["previous"] = vector[:count] - self.base[:count]
                if "previous" in past:
                    message = vector.clone()
                    message[:count] -= past["previous"]
            if form == "full":
                pieces = [wire.heads["full"], raw(message)]
            else:
                delta = message - self.base
                if "left" in past:
                    delta += past["left"]
                rounded, meant = wire.rounded(delta, form)
                pieces, noted["left"] = [wire.heads[form], *rounded], delta - meant
            memory.note(self.client, lease, noted)
        if self.owner.zstd:
            import zstandard

            press = zstandard.ZstdCompressor(level=1).compressobj(size=sum(len(piece) for piece in pieces))
            pieces = [b"".join([*(press.compress(piece) for piece in pieces), press.flush()])]
        return pieces

    def _refusal(self, reason: str, vector: Tensor, examples: int) -> Receipt:
        return Receipt(
            self.number, self.client, self.version, self.started, 0.0, examples, vector.nbytes, 0, 0.0, False,
            self.version, refused=reason,
        )  # fmt: skip

    def give_back(self) -> None:
        """Nothing will come of it: let another client have its slot."""
        self._answered.set()
        with suppress(ServerError):
            self.owner.request("DELETE", f"/v1/tasks/{self.number}", params={"lease": self.told["lease"]})

    def _beat(self) -> None:
        """Renew the lease every third of it, until the task is answered or taken back."""
        pause = max(0.05, self.told["seconds"] / 3)
        while not self._answered.wait(pause):
            try:
                self.owner.request(
                    "POST", f"/v1/tasks/{self.number}/heartbeat", params={"lease": self.told["lease"]}
                )
            except ServerError as error:
                self.ended = error.reason
                return
            except (InputError, RuntimeError):
                return  # the client was closed


class _Pieces:
    """A body that can be sent again; httpx wants an iterable of bytes."""

    def __init__(self, pieces: list[bytes | memoryview]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            for start in range(0, len(piece), PIECE):
                yield bytes(piece[start : start + PIECE])
