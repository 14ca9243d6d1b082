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
        layout = Layout.of(module)
        wanted = self.owner.layout
        if (layout.names, layout.shapes) != (wanted.names, wanted.shapes):
            other = next(
                (n for n, m in zip(wanted.names, layout.names, strict=False) if n != m),
                "their number or shapes",
            )
            raise InputError(f"{type(module).__name__} is not the server's model: they differ at {other}")
        layout.load(self.base.to(layout.dtype), module)

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
        held = self.owner.held() if self.told["held"] else None
        if held is not None:
            vector = held.prepare(self.client, vector, self.base)
        pieces, left = self._packed(vector)
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
        if held is not None:
            held.commit(self.client)
        if left is not None:
            self.owner._left[self.client] = left
        return self.receipt

    def _packed(self, vector: Tensor) -> tuple[list[bytes | memoryview], Tensor | None]:
        """The body, and what rounding leaves out of it."""
        wire, form = self.owner.wire, self.owner.transport
        pieces: list[bytes | memoryview]
        left = None
        if form == "full":
            pieces = [wire.heads["full"], raw(vector)]
        else:
            delta = vector - self.base
            if self.client in self.owner._left:
                delta += self.owner._left[self.client]
            rounded, meant = wire.rounded(delta, form)
            pieces, left = [wire.heads[form], *rounded], delta - meant
        if self.owner.zstd:
            import zstandard

            press = zstandard.ZstdCompressor(level=1).compressobj(size=sum(len(piece) for piece in pieces))
            pieces = [b"".join([*(press.compress(piece) for piece in pieces), press.flush()])]
        return pieces, left

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
