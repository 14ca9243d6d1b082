"""Who may do what: tokens (hashed at rest), client certificates, and limits on how often.

A token is 256 random bits, so one SHA-256 of it is safe to keep; nothing slower is needed. The book is a JSON file of
mode 0600 beside the run folder, never in it; a running server reads it again when it changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from afield.core.errors import InputError
from afield.store.files import whole

PREFIX = "afield"
LOOKED = 1.0  # seconds between two looks at the book's file


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a token or a certificate. `clients`: those it may act for; None: all of them."""

    id: str
    kind: str  # "token" or "certificate"
    hash: str  # SHA-256 of the token, or of the certificate
    clients: tuple[int, ...] | None
    operator: bool = False  # may also promote, roll back and see everyone's tasks
    note: str = ""
    made: str = ""
    revoked: str = ""

    def may(self, client: int) -> bool:
        return self.clients is None or client in self.clients

    @property
    def only(self) -> int | None:
        """The client it speaks for, where there is just one."""
        return self.clients[0] if self.clients is not None and len(self.clients) == 1 else None


class Book:
    """The holders, in a file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.clock = path, clock
        self.holders: dict[str, Holder] = {}
        self._seen: tuple[int, int, int] | None = None
        self._next = 0.0
        if path.exists():
            self._read()

    # -- looking up -------------------------------------------------------------------------------------------

    def token(self, token: str) -> Holder | None:
        """The holder of a token that is valid now."""
        self._look()
        prefix, _, rest = token.partition("_")
        name, _, secret = rest.partition("_")
        found = self.holders.get(name)
        wanted = found.hash if found is not None and found.kind == "token" else ""
        right = hmac.compare_digest(hashed(token.encode()), wanted)  # also where there is none: the same time
        if not right or found is None or found.revoked or prefix != PREFIX or not secret:
            return None
        return found

    def certificate(self, der: bytes) -> Holder | None:
        self._look()
        wanted = hashed(der)
        for found in self.holders.values():
            if found.kind == "certificate" and found.hash == wanted and not found.revoked:
                return found
        return None

    # -- changing ---------------------------------------------------------------------------------------------

    def add(
        self,
        clients: Iterable[int] | None,
        *,
        operator: bool = False,
        note: str = "",
        certificate: bytes | None = None,
    ) -> tuple[Holder, str]:
        """A new holder, and its token: the only time that it can be seen. For a certificate (DER) there is none."""
        name, made = secrets.token_hex(4), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        token = "" if certificate is not None else f"{PREFIX}_{name}_{secrets.token_urlsafe(32)}"
        kind = "token" if certificate is None else "certificate"
        print_ = hashed(token.encode() if certificate is None else certificate)
        chosen = None if clients is None else tuple(sorted(set(clients)))
        holder = Holder(name, kind, print_, chosen, operator, note, made)
        with self._alone():
            self.holders[name] = holder
            self._write()
        return holder, token

    def revoke(self, name: str) -> Holder:
        self._read()
        if name not in self.holders:
            raise InputError(f"no token has the id {name!r}: afield token list shows them")
        with self._alone():
            found = self.holders[name]
            if not found.revoked:
                found = replace(found, revoked=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
                self.holders[name] = found
                self._write()
        return found

    def rotate(self, name: str) -> tuple[Holder, str]:
        """A new token in place of this one, which ends."""
        old = self.revoke(name)
        if old.kind != "token":
            raise InputError(
                f"{name} is a certificate: add the new one with afield token add --certificate FILE"
            )
        return self.add(old.clients, operator=old.operator, note=old.note)

    # -- the file ---------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The book as it is now, which nobody else changes meanwhile: a token or a revocation would be lost."""
        path = self.path.with_suffix(".lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise InputError(f"{path} cannot be written ({error.strerror}): choose another --keys") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._read()
            yield
        finally:
            os.close(fd)

    def _look(self) -> None:
        now = self.clock()
        if now < self._next:
            return
        self._next = now + LOOKED
        if self._mark() != self._seen:
            self._read()

    def _mark(self) -> tuple[int, int, int] | None:
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> None:
        self._seen = self._mark()
        if self._seen is None:
            self.holders = {}
            return
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))["holders"]
            found = [Holder(**{**row, "clients": _tuple(row["clients"])}) for row in rows]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.path} cannot be read as a book of tokens ({error}): restore it"
            ) from error
        self.holders = {holder.id: holder for holder in found}

    def _write(self) -> None:
        text = json.dumps({"holders": [asdict(holder) for holder in self.holders.values()]}, indent=1)
        write_secret(self.path, text.encode())
        self._seen = self._mark()


def write_secret(path: Path, data: bytes) -> None:
    """Replace a file that only its owner may read; it is there whole or not at all."""
    try:
        whole(path, data, mode=0o600)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}): make room, or choose another --keys; it is as it was"
        ) from error


def hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _tuple(clients: list[int] | None) -> tuple[int, ...] | None:
    return None if clients is None else tuple(int(client) for client in clients)


class Rates:
    """A bucket of requests per key, filled at `rate` per second up to `burst`."""

    MOST = 100_000  # keys; beyond, the fullest are forgotten, which costs them nothing

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst, self.clock = rate, burst, clock
        self._buckets: dict[object, tuple[float, float]] = {}  # key: tokens left, when

    def wait(self, key: object, cost: float = 1.0) -> float:
        """Take one; 0 where there was one, else the seconds until there is."""
        now = self.clock()
        left, when = self._buckets.get(key, (self.burst, now))
        left = min(self.burst, left + (now - when) * self.rate)
        if left < cost:
            self._buckets[key] = (left, now)
            return (cost - left) / self.rate
        self._buckets[key] = (left - cost, now)
        if len(self._buckets) > self.MOST:
            self._forget(now)
        return 0.0

    def empty(self, key: object) -> float:
        """Seconds until there is one again, taking none."""
        left, when = self._buckets.get(key, (self.burst, 0.0))
        left = min(self.burst, left + (self.clock() - when) * self.rate)
        return max(0.0, (1.0 - left) / self.rate)

    def _forget(self, now: float) -> None:
        full = [
            k for k, (left, when) in self._buckets.items() if left + (now - when) * self.rate >= self.burst
        ]
        for key in full or list(self._buckets)[: self.MOST // 2]:
            del self._buckets[key]
