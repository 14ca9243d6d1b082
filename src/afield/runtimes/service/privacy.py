"""Client-level differential privacy for FedBuff: clip, add Gaussian noise, count what it costs.

Every update is clipped to `clip` (L2 norm of its difference to the base) and gets its share of the noise before it is
journalled: `size` shares make the noise of one step, of standard deviation noise * clip on the sum. So a replay needs
no secret, and what is on the disk is as private as what was released. A client counts at most once per step (it waits
for the next version), and its cost is the composition of the steps that it took part in; no amplification by sampling
is claimed, since nobody samples. The epsilon shown is that of the client with the most steps.

The server is trusted: it sees each update before the noise. Noise is of floating-point numbers, which leak a little
more than the theory says (Mironov 2012); metrics and the number of examples are the operator's, not the model's.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afield.core.errors import InputError, within
from afield.core.flat import Layout
from afield.core.types import Task
from afield.runtimes.rows import Measurement
from afield.runtimes.service.trust import write_secret
from afield.strategies import FedBuff
from afield.strategies.staleness import Constant

CHUNK = 1 << 20  # elements that one keyed stream is drawn for
KEY = 32


@dataclass(frozen=True)
class Privacy:
    """`noise` is the multiplier: the standard deviation of a step's noise in units of `clip`."""

    clip: float = 1.0
    noise: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        within("clip", self.clip, 0, math.inf, above=True, below=True)
        within("noise", self.noise, 0, math.inf, above=True, below=True)
        within("delta", self.delta, 0, 1, above=True, below=True)


class Private:
    """Makes updates private, and keeps the account."""

    def __init__(
        self,
        settings: Privacy,
        strategy: Any,
        layout: Layout,
        key: bytes,
        counts: Mapping[int, int] | None = None,
    ) -> None:
        if not isinstance(strategy, FedBuff):
            raise InputError(
                f"privacy is for fedbuff, whose steps are sums of clipped updates, not {type(strategy).__name__}"
            )
        if not isinstance(strategy.weight, Constant):
            raise InputError(
                "privacy needs strategy.weight = 'constant': weights that differ would scale the noise too"
            )
        if layout.statistics:
            raise InputError(
                f"the model has {layout.statistics} normalisation statistics, which are not clipped: use a model "
                "without (GroupNorm in place of BatchNorm)"
            )
        _accountant()  # fail now, not at the first update
        self.settings, self.key = settings, key
        self.share = settings.noise * settings.clip / math.sqrt(strategy.size)
        self.counts = Counter(counts or {})

    def applied(self, task: Task, base: Tensor, model: Tensor) -> Tensor:
        """What is journalled in place of the model that was sent."""
        delta = model - base
        norm = float(delta.double().norm())
        if norm > self.settings.clip:
            delta.mul_(self.settings.clip / norm)
        for start in range(0, len(delta), CHUNK):
            part = delta[start : start + CHUNK]
            part.add_(self._noise(task.number, start, len(part)).to(part.dtype), alpha=self.share)
        return delta.add_(base)

    def _noise(self, number: int, start: int, length: int) -> Tensor:
        """Standard normal draws: Box-Muller on the bits of SHAKE-256 of (key, task, place)."""
        words = b"".join(value.to_bytes(8, "little") for value in (number, start))
        half = (length + 1) // 2
        bits = hashlib.shake_256(self.key + words).digest(16 * half)
        whole = (torch.frombuffer(bytearray(bits), dtype=torch.int64) >> 11) & ((1 << 53) - 1)
        uniform = whole.double().mul_(2.0**-53)
        radius = (-2.0 * torch.log1p(-uniform[:half])).sqrt_()
        angle = uniform[half:].mul_(2.0 * math.pi)
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[:length]

    def count(self, client: int) -> None:
        self.counts[client] += 1

    def spent(self) -> dict[str, Any]:
        most = max(self.counts.values(), default=0)
        settings = self.settings
        return {
            "epsilon": epsilon(settings.noise, most, settings.delta),
            "delta": settings.delta,
            "clip": settings.clip,
            "noise": settings.noise,
            "steps": most,
        }

    def noted(self, row: Measurement) -> Measurement:
        spent = {"epsilon": self.spent()["epsilon"], "delta": self.settings.delta}
        return replace(row, values={**row.values, **spent})


@lru_cache(maxsize=1024)
def epsilon(noise: float, steps: int, delta: float) -> float:
    """Of so many Gaussian mechanisms with this multiplier, one after the other."""
    if steps == 0:
        return 0.0
    dp, rdp = _accountant()
    account = rdp.RdpAccountant()
    account.compose(dp.GaussianDpEvent(noise), steps)
    return float(account.get_epsilon(delta))


def _accountant() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise InputError("privacy needs the package dp-accounting: pip install 'afield[serve]'") from None
    return dp_accounting, rdp


def secret(path: Path) -> bytes:
    """The key of a file that only its owner may read; made where there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_secret(path, os.urandom(KEY))
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise InputError(f"{path} has the mode {mode:o}, others may read it: chmod 600 it, and ask who has")
    key = path.read_bytes()
    if len(key) != KEY:
        raise InputError(
            f"{path} has {len(key)} bytes, a key has {KEY}: restore it, or remove it to begin anew"
        )
    return key
