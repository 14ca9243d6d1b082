"""A few examples of a pool, for a proof that trains them in two ways."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from afield.core.protocols import Pool


@dataclass(frozen=True)
class Few:
    """Some clients' parts of a pool."""

    inputs: Tensor
    targets: Tensor
    parts: list[Tensor]

    @property
    def sizes(self) -> list[int]:
        return [len(part) for part in self.parts]

    def batch(self, client: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        index = self.parts[client][positions]
        return self.inputs[index], self.targets[index]


def few(data: Pool, batch: int) -> Few:
    """Two clients with examples of the largest: two batches; one, and a short one where anybody has such."""
    sizes = data.sizes
    most = max(range(len(sizes)), key=lambda client: sizes[client])
    short = min((size for size in sizes if size % batch), default=0) % batch
    first = data.parts[most]
    return Few(data.inputs, data.targets, [first[: 2 * batch], first[: batch + short]])
