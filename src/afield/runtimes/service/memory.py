"""What a client must remember from one task to the next, though a receipt may be lost and its process may end.

`previous` is its delta that is in the model, where it sends differences (ACE's algorithm a.5); `left` is what
rounding left out of what it sent (error feedback). Both change when an update counts. Its receipt says so; where that
was lost, the next task does: with it the server tells how many updates of this client count.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from afield.core.errors import InputError


@dataclass
class Past:
    """Of one client. `sent` is on its way: whether it counts is not known yet."""

    counted: int = 0  # updates that count
    lease: str = ""  # of the task that `sent` answers, or that was answered last
    kept: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[str, Tensor] | None = None


class Memory:
    """In a folder, if there is one, for the process that comes after; `run` tells one service's from another's."""

    def __init__(self, folder: Path | None, run: str) -> None:
        self.folder, self.run = folder, run
        self.pasts: dict[int, Past] = {}

    def settle(self, client: int, counted: int, needed: bool) -> Past:
        """Before a task: so many updates of this client count. Where they are `needed`, we must know them all."""
        past = self.pasts[client] if client in self.pasts else self._read(client)
        self.pasts[client] = past
        if past.sent is not None and counted == past.counted + 1:
            self._commit(client, past)
        elif counted != past.counted:
            if needed:
                raise InputError(
                    f"{counted} updates of client {client} are in the model, but {past.counted} are remembered "
                    "here: it sends differences to what it sent before, so go on with the same keep folder (--keep)"
                )
            past.counted, past.kept, past.sent = counted, {}, None
        return past

    def again(self, client: int, lease: str) -> Tensor | None:
        """The model that was sent for this task already: it may have arrived, so no other may follow."""
        past = self.pasts[client]
        return past.sent["model"] if past.sent is not None and past.lease == lease else None

    def note(self, client: int, lease: str, sent: dict[str, Tensor]) -> None:
        """Before it is sent."""
        past = self.pasts[client]
        if past.sent is None and past.lease == lease:
            return  # it counts already; the server will say so
        past.lease, past.sent = lease, sent
        self._write(client, past)

    def commit(self, client: int, lease: str) -> None:
        """On its receipt."""
        past = self.pasts[client]
        if past.sent is not None and past.lease == lease:
            self._commit(client, past)

    def _commit(self, client: int, past: Past) -> None:
        assert past.sent is not None
        past.kept = {name: value for name, value in past.sent.items() if name != "model"}
        past.counted, past.sent = past.counted + 1, None
        self._write(client, past)

    # -- the file ---------------------------------------------------------------------------------------------

    def _path(self, client: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.run}-{client}.safetensors"

    def _write(self, client: int, past: Past) -> None:
        if self.folder is None:
            return
        path = self._path(client)
        draft = path.with_suffix(".draft")
        tensors = {f"kept.{name}": value for name, value in past.kept.items()}
        tensors |= {f"sent.{name}": value for name, value in (past.sent or {}).items()}
        told = {"counted": str(past.counted), "lease": past.lease, "sent": str(int(past.sent is not None))}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({name: value.contiguous() for name, value in tensors.items()}, draft, told)
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(draft, path)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{path} cannot be written ({error}): make room, or choose another keep folder"
            ) from error

    def _read(self, client: int) -> Past:
        if self.folder is None or not self._path(client).exists():
            return Past()
        try:
            with safe_open(self._path(client), "pt") as file:
                told: dict[str, Any] = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            parts = {
                part: {
                    name.removeprefix(f"{part}."): value
                    for name, value in tensors.items()
                    if name.startswith(f"{part}.")
                }
                for part in ("kept", "sent")
            }
            sent = parts["sent"] if told["sent"] == "1" else None
            return Past(int(told["counted"]), told["lease"], parts["kept"], sent)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self._path(client)} cannot be read ({error}): restore it, or join as another client"
            ) from error
