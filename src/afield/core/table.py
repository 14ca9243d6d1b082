"""One pass over cache-sized chunks, and ClientTable: one vector per client, exchanged in such a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from afield.core.errors import one_of, within
from afield.core.keys import Stream, mix, noise
from afield.core.processor import amd
from afield.core.rows import RowFile, aligned
from afield.core.types import Task

PRECISIONS = ("float32", "bfloat16", "int8")
BLOCK = 1024  # elements that share one int8 scale: 8.03 bits an element
# Elements per thread and chunk: the 1.5 MB that an exchange touches of them stay in a core's second-level cache
# (a Xeon: twice as many took 1.2 times as long). AMD's third-level cache is near enough, and fewer calls count more
# (a Zen 5: 48 took 1.3 to 1.5 times as long). A GPU has no such cache to keep: long chunks, few launches.
CHUNK, CHUNK_AMD = 48 * BLOCK, 320 * BLOCK
LAUNCH = 8192 * BLOCK
WHOLE = 384 * BLOCK  # likewise: a vector that the third-level cache holds as it is

# A chunk of a row as stored, and the call that puts the new row in its place and gives that.
Exchange = tuple[slice, Tensor, Callable[[], Tensor]]


def chunks(vector: Tensor) -> Iterator[slice]:
    """The parts of a vector in order, each as long as torch's threads can keep in their caches."""
    length, width = _length(vector), vector.numel()
    for start in range(0, width, length):
        yield slice(start, min(start + length, width))


def parts(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The chunks of several vectors side by side; what fits into a few is handed out as it is, unsliced (1 us each).

    A fold of FedBuff of 250,000 elements on one thread: 0.10 ms whole, 0.16 ms in six chunks.
    """
    few = WHOLE * torch.get_num_threads() if vectors[0].is_cpu else 8 * LAUNCH
    if vectors[0].numel() <= few:
        yield vectors
        return
    for part in chunks(vectors[0]):
        yield tuple(vector[part] for vector in vectors)


def _length(vector: Tensor) -> int:
    if not vector.is_cpu:
        return LAUNCH
    return (CHUNK_AMD if amd() else CHUNK) * torch.get_num_threads()


class Wide:
    """Casts chunks from the type of the parameters to that of a (float64) sum: each cast overwrites the last.

    torch's CPU kernels cast mixed operands through temporaries of their own: for 11.2 M elements float64 +=
    float32 took 3 times as long as this way, float32 += float64 10 times.
    """

    def __init__(self, total: Tensor, params: Tensor) -> None:
        self.length = min(_length(total), total.numel())
        self.room = total.new_empty(self.length)
        self.needed = total.is_cpu and total.dtype != params.dtype
        # not the same memory: each thread's half of it would lie in another one's cache (4 % of a fold of ACE's)
        self.narrow = params.new_empty(self.length if self.needed else 0)

    def __call__(self, chunk: Tensor) -> Tensor:
        return self.blank(chunk).copy_(chunk) if self.needed else chunk

    def blank(self, chunk: Tensor) -> Tensor:
        """The buffer, as long as this chunk, with anything in it."""
        count = chunk.numel()
        return self.room if count == self.length else self.room[:count]

    def add(self, params: Tensor, total: Tensor, alpha: float) -> None:
        """A chunk of params += alpha total. The total is rounded to the type of params; the sum itself is not."""
        if self.needed:
            total = self.narrow[: params.numel()].copy_(total)
        params.add_(total, alpha=alpha)


def advance(params: Tensor, total: Tensor, alpha: float) -> None:
    """params += alpha total, a (float64) sum."""
    wide = Wide(total, params)
    for part in chunks(params):
        wide.add(params[part], total[part], alpha)


@dataclass(slots=True)
class ClientTable:
    """One row per client. Rows never written read as `initial` (None: zeros) and take no memory.

    "float32" stores rows in the type of the parameters (float64 where a test runs in float64), "bfloat16"
    and "int8" (per-block symmetric, stochastic rounding, unbiased) store less. Whatever is stored is what
    `exchange` hands out, as the new row now and as the old one later, so a running sum never drifts from
    the table.
    """

    precision: str
    clients: int
    width: int
    blank: Tensor  # no elements: the type and the device of a row
    initial: Tensor | None
    rows: dict[int, Tensor] = field(default_factory=dict)  # those written and in memory
    scales: dict[int, Tensor] = field(default_factory=dict)  # int8 only: one per block
    file: RowFile | None = None  # where the rows are if not in memory (core/places.py)
    # rows change by torch's own operations only, which it counts: a snapshot leaves out those that did not
    steady: ClassVar[bool] = True

    @classmethod
    def like(
        cls, vector: Tensor, clients: int, precision: str = "float32", initial: Tensor | None = None
    ) -> ClientTable:
        one_of("precision", precision, PRECISIONS)
        within("clients", clients, 1, float("inf"))
        kind = {"float32": vector.dtype, "bfloat16": torch.bfloat16, "int8": torch.int8}[precision]
        blank = vector.new_empty(0, dtype=kind)
        return cls(precision=precision, clients=clients, width=vector.numel(), blank=blank, initial=initial)

    def __len__(self) -> int:
        return self.clients

    @property
    def length(self) -> int:
        """Bytes that a row takes in a file."""
        return aligned(self._scales_from + 4 * self._blocks)

    @property
    def in_file(self) -> int:
        """Bytes of the rows that are in a file now."""
        return 0 if self.file is None else len(self.file.slots) * self.length

    def has(self, client: int) -> bool:
        """Whether this client's row was ever written."""
        return client in (self.rows if self.file is None else self.file.slots)

    def exchange(
        self, task: Task, seed: int, value: Tensor, minus: Tensor | None = None
    ) -> Iterator[Exchange]:
        """Replace the row of the task's client by `value - minus`, in place, a cache-sized chunk at a time.

        Yields (chunk, old, write): `old` is to be used before `write()`, which gives the new one, to be used
        before the next chunk. Both are as stored, and not to be written to.
        """
        client = task.client
        row, scales = self._found(client, "old")
        in_place = row is not None and row.dtype == value.dtype
        place, marks = self._room() if row is None or self.file is not None else (row, scales)
        key = mix(seed, client, task.count, Stream.QUANTISE) if marks is not None else 0
        for part in chunks(value):
            mark = None if marks is None else marks[_blocks(part)]
            less = None if minus is None else minus[part]
            write = partial(_write, place[part], mark, value[part], less, key, part.start)
            old = row[part] if in_place and row is not None else self._read(row, scales, part, value.dtype)
            yield part, old, write
        self._keep(client, place, marks)

    def stored(self, client: int, part: slice, dtype: torch.dtype) -> Tensor:
        """A part of a row (from a block's start) as stored: borrowed, and until the next exchange only.

        Of rows in a file one is at hand beside that of an exchange: read a row's parts in turn.
        """
        return self._read(*self._found(client, "other"), part, dtype)

    def row(self, client: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A copy of one row as stored."""
        return self.stored(client, slice(0, self.width), dtype).clone()

    # -- rows in a file ---------------------------------------------------------------------------------------

    def move(self, file: RowFile) -> None:
        """Let the rows be in this file, which has none yet."""
        for client in sorted(self.rows):
            self._file(file, client, self.rows[client], self.scales.get(client))
        self.file = file
        self.rows.clear()
        self.scales.clear()

    @property
    def _blocks(self) -> int:
        return -(-self.width // BLOCK) if self.precision == "int8" else 0

    @property
    def _scales_from(self) -> int:
        return aligned(self.width * self.blank.itemsize)

    def _split(self, memory: Tensor) -> tuple[Tensor, Tensor | None]:
        """A row and its scales, views of a file's bytes."""
        row = memory[: self.width * self.blank.itemsize].view(self.blank.dtype)
        if not self._blocks:
            return row, None
        return row, memory[self._scales_from : self._scales_from + 4 * self._blocks].view(torch.float32)

    def _found(self, client: int, use: str) -> tuple[Tensor | None, Tensor | None]:
        """A row as it is, and its scales; `use` names the memory that a row from a file takes."""
        if self.file is None:
            return self.rows.get(client), self.scales.get(client)
        memory = self.file.read(client, use)
        if memory is None:
            return None, None
        row, scales = self._split(memory)
        return row.to(self.blank.device), None if scales is None else scales.to(self.blank.device)

    def _room(self) -> tuple[Tensor, Tensor | None]:
        """Memory for a row to come."""
        if self.file is not None:
            self.file.reserve()
            if self.blank.is_cpu:
                return self._split(self.file.blank())
        scales = self.blank.new_empty(self._blocks, dtype=torch.float32) if self._blocks else None
        return self.blank.new_empty(self.width), scales

    def _keep(self, client: int, row: Tensor, scales: Tensor | None) -> None:
        if self.file is not None:
            return self._file(self.file, client, row, scales)
        self.rows[client] = row
        if scales is not None:
            self.scales[client] = scales

    def _file(self, file: RowFile, client: int, row: Tensor, scales: Tensor | None) -> None:
        place, marks = self._split(file.blank())
        if place.data_ptr() != row.data_ptr():
            place.copy_(row)
            if marks is not None and scales is not None:
                marks.copy_(scales)
        file.write(client)

    def _read(self, row: Tensor | None, scales: Tensor | None, part: slice, dtype: torch.dtype) -> Tensor:
        if row is None:
            if self.initial is not None:
                return self.initial[part].to(dtype)
            return self.blank.new_zeros(part.stop - part.start, dtype=dtype)
        if scales is None:
            return row[part].to(dtype)
        return dequantise(row[part], scales[_blocks(part)]).to(dtype)


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _write(
    row: Tensor, scales: Tensor | None, value: Tensor, minus: Tensor | None, key: int, start: int
) -> Tensor:
    """row <- value - minus, these elements from `start` on; what is stored of it."""
    if scales is None and row.dtype == value.dtype:
        return row.copy_(value) if minus is None else torch.sub(value, minus, out=row)
    fresh = value if minus is None else value - minus
    if scales is None:
        return row.copy_(fresh).to(fresh.dtype)
    codes, scale = quantise(fresh, noise(key, start, fresh.numel(), fresh.device))
    row.copy_(codes)
    scales.copy_(scale)
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
