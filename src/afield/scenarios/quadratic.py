"""A problem with known gradients: one quadratic bowl per client."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from afield.core.errors import InputError
from afield.scenarios.dataset import Dataset


@dataclass(frozen=True)
class Quadratic:
    """Two clients with one quadratic bowl each, in two dimensions (FedStale section 3.1).

    An example is a row (a11, a12, a22, c1, c2): F(w) = 1/2 (w - c)^T A (w - c). The paper draws its
    bowls but gives no numbers; ours have their joint optimum at (-4/3, 2/3), the mean of the optima
    being (0, 0). More rows are more clients.
    """

    curvatures: tuple[tuple[float, ...], ...] = ((1.0, 0.0, 0.2), (0.2, 0.0, 1.0))
    optima: tuple[tuple[float, ...], ...] = ((-2.0, -1.0), (2.0, 1.0))
    keyed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.curvatures or len(self.curvatures) != len(self.optima):
            counts = f"{len(self.curvatures)} curvatures and {len(self.optima)} optima"
            raise InputError(f"{counts}; give one of each per client")
        for name, rows, width in (("curvatures", self.curvatures, 3), ("optima", self.optima, 2)):
            for number, row in enumerate(rows):
                if len(row) != width or not all(math.isfinite(value) for value in row):
                    raise InputError(f"{name}[{number}] = {row}; give {width} finite numbers")
        for number, (a11, a12, a22) in enumerate(self.curvatures):
            if a11 <= 0 or a11 * a22 <= a12 * a12:
                given = f"curvatures[{number}] = {(a11, a12, a22)}"
                raise InputError(f"{given} has no minimum; give a11 > 0 and a11 a22 > a12^2")

    def load(self, seed: int) -> Dataset:
        rows = torch.tensor([(*a, *c) for a, c in zip(self.curvatures, self.optima, strict=True)]).float()
        targets = torch.zeros(len(rows), dtype=torch.int64)
        return Dataset(rows, targets, rows.clone(), targets.clone(), classes=1, loss="value")

    def optimum(self) -> tuple[float, float]:
        """The minimiser of the clients' mean: (sum A)^-1 (sum A c), by Cramer's rule."""
        s11 = s12 = s22 = b1 = b2 = 0.0
        for (a11, a12, a22), (c1, c2) in zip(self.curvatures, self.optima, strict=True):
            s11, s12, s22 = s11 + a11, s12 + a12, s22 + a22
            b1, b2 = b1 + a11 * c1 + a12 * c2, b2 + a12 * c1 + a22 * c2
        determinant = s11 * s22 - s12 * s12
        return (s22 * b1 - s12 * b2) / determinant, (s11 * b2 - s12 * b1) / determinant
