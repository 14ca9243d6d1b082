"""ClientTable: one vector per client, and the one-pass exchange of a row that keeps sums exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from afield.core.errors import one_of, within
from afield.core.keys import Stream, mix, noise
from afield.core.types import Task

PRECISIONS = ("float32", "bfloat16", "int8")
BLOCK = 1024  # elements that share one int8 scale: 8.03 bits an element
CHUNK = 128 * BLOCK  # elements per pass: 512 KB of float32 stay in the second-level cache


@dataclass(slots=True)
class ClientTable:
    """One row per client. Rows never written read as `initial` (None: zeros) and cost no memory.

    "float32" stores rows in the type of the parameters (float64 where a test runs in float64), "bfloat16"
    and "int8" (per-block symmetric, stochastic rounding, unbiased) store less. Whatever is stored is what
    `exchange` hands out, as the new row now and as the old one later, so a running sum never drifts from
    the table.
    """

    precision: str
    rows: Tensor
    scales: Tensor | None  # int8 only: one per block
    written: Tensor
    initial: Tensor | None

    @classmethod
    def like(
        cls, vector: Tensor, clients: int, precision: str = "float32", initial: Tensor | None = None
    ) -> ClientTable:
        one_of("precision", precision, PRECISIONS)
        within("clients", clients, 1, float("inf"))
        width, device = vector.numel(), vector.device
        kind = {"float32": vector.dtype, "bfloat16": torch.bfloat16, "int8": torch.int8}[precision]
        # empty, not zeros: the system hands out pages only when a row is written
        rows = torch.empty(clients, width, dtype=kind, device=device)
        blocks = -(-width // BLOCK)
        scales = torch.empty(clients, blocks, device=device) if precision == "int8" else None
        return cls(
            precision=precision,
            rows=rows,
            scales=scales,
            written=torch.zeros(clients, dtype=torch.bool),
            initial=initial,
        )

    def __len__(self) -> int:
        return self.rows.shape[0]

    def has(self, client: int) -> bool:
        """Whether this client's row was ever written."""
        return bool(self.written[client])

    def exchange(
        self, task: Task, seed: int, value: Tensor, minus: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Replace the row of the task's client by `value - minus`, a cache-sized chunk at a time.

        Yields (chunk, old, new) as stored, to be folded before the next chunk and not kept or written to.
        """
        client = task.client
        first = not self.has(client)
        key = mix(seed, client, task.count, Stream.QUANTISE) if self.precision == "int8" else 0
        width = self.rows.shape[1]
        for start in range(0, width, CHUNK):
            part = slice(start, min(start + CHUNK, width))
            fresh = value[part] if minus is None else value[part] - minus[part]
            old = self._initial(part, fresh) if first else self._decode(client, part, fresh.dtype)
            if self.rows.dtype == fresh.dtype:
                yield part, old, fresh
                self.rows[client, part] = fresh  # after the fold: `old` is a view of the row
            else:
                new = self._encode(client, part, fresh, key)
                yield part, old, new
        self.written[client] = True

    def row(self, client: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A copy of one row as stored."""
        whole = slice(0, self.rows.shape[1])
        if not self.has(client):
            unwritten = self._initial(whole, torch.empty(0, dtype=dtype, device=self.rows.device))
            return unwritten.to(dtype, copy=True)
        return self._decode(client, whole, dtype).clone()

    def _initial(self, part: slice, like: Tensor) -> Tensor:
        if self.initial is not None:
            return self.initial[part]
        return torch.zeros(part.stop - part.start, dtype=like.dtype, device=like.device)

    def _decode(self, client: int, part: slice, dtype: torch.dtype) -> Tensor:
        stored = self.rows[client, part]
        if self.scales is None:
            return stored.to(dtype)
        scale = self.scales[client, part.start // BLOCK : -(-part.stop // BLOCK)]
        return dequantise(stored, scale).to(dtype)

    def _encode(self, client: int, part: slice, fresh: Tensor, key: int) -> Tensor:
        if self.scales is None:
            self.rows[client, part] = fresh
            return self.rows[client, part].to(fresh.dtype)
        draws = noise(key, part.start, fresh.numel(), fresh.device)
        codes, scale = quantise(fresh, draws)
        self.rows[client, part] = codes
        self.scales[client, part.start // BLOCK : -(-part.stop // BLOCK)] = scale
        return dequantise(codes, scale).to(fresh.dtype)


def quantise(values: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes and a float32 scale per block: floor(x / scale), plus 1 where the draw is below the rest.

    Unbiased, also at the extremes (max / scale is the integer 127), and keeps 0 exact.
    """
    count = values.numel()
    pad = -count % BLOCK
    blocks = functional.pad(values.to(torch.float32), (0, pad)).view(-1, BLOCK)
    chance = functional.pad(draws, (0, pad)).view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1) / 127
    level = blocks / scale.where(scale > 0, 1.0).unsqueeze(1)
    low = level.floor()
    codes = (low + (chance < level - low)).clamp_(-127, 127)
    return codes.to(torch.int8).view(-1)[:count], scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    count = codes.numel()
    blocks = functional.pad(codes.to(torch.float32), (0, -count % BLOCK)).view(-1, BLOCK)
    return (blocks * scale.unsqueeze(1)).view(-1)[:count]
