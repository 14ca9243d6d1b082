"""Answers of a language model to the test questions, scored by what they come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Answers:
    """Called with a module that has `generate`: the share of questions that it answers rightly, as "accuracy"."""

    prompts: Sequence[Sequence[int]]
    right: Sequence[str]
    decode: Callable[[Sequence[int]], str]
    matches: Callable[[str, str], bool]  # (given, right)
    batch: int = 32

    def __call__(self, module: nn.Module) -> dict[str, Any]:
        # Questions of like length go together: less to fill up.
        order = sorted(range(len(self.prompts)), key=lambda number: len(self.prompts[number]))
        hits = 0
        with torch.no_grad():
            for start in range(0, len(order), self.batch):
                part = order[start : start + self.batch]
                said = module.generate([self.prompts[number] for number in part])  # type: ignore[operator]
                for number, ids in zip(part, said, strict=True):
                    hits += self.matches(self.decode(ids), self.right[number])
        return {"accuracy": hits / len(self.prompts)}
