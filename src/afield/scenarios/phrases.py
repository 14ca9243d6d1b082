"""Tiny texts made on the fly, where there are no files: pairs, posts and sums, as published sets have them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from afield.core.errors import one_of, within
from afield.core.keys import Stream, generator
from afield.scenarios.texts import Parts, Row, Texts, _Share

NAMES = ("Ann", "Bob", "Cid", "Dot", "Eve", "Fay")
VERBS = (("bought", "paid for"), ("saw", "noticed"), ("lost", "mislaid"), ("sold", "gave away"))
THINGS = ("apples", "books", "coins", "lamps", "maps", "pears")
FILLERS = ("and", "the", "of", "with", "near", "some", "a", "old")


@dataclass(frozen=True)
class SyntheticTexts(_Share):
    """`what` is "pairs" (paraphrases or not, as MRPC), "posts" (each class has words of its own, as 20 Newsgroups) or
    "sums" (questions with worked answers, as GSM8K, from as many sources as there are classes).

    `draw` chooses the texts; as with published sets they do not depend on the run's seed.
    """

    what: str = "pairs"
    classes: int = 2  # of posts; sources of sums; pairs have two
    train: int = 200
    test: int = 40
    draw: int = 0

    def __post_init__(self) -> None:
        one_of("what", self.what, ("pairs", "posts", "sums"))
        within("classes", self.classes, 2, 2 if self.what == "pairs" else 100)
        for name in ("train", "test"):
            within(name, getattr(self, name), 1, math.inf, below=True)
        within("draw", self.draw, 0, 2**63, below=True)
        super().__post_init__()

    def load(self, seed: int) -> Texts:
        train, test, other = (self._made(count, k) for k, count in enumerate((self.train, *[self.test] * 2)))
        return self.cut(train, test, self.classes, seed, other[0])

    def _made(self, count: int, word: int) -> Parts:
        """Texts whose classes take turns."""
        own = generator(self.draw, Stream.DATA, word)
        draws = torch.randint(2**31, (count, 16), generator=own).tolist()
        labels = [number % self.classes for number in range(count)]
        made = [self._one(label, drawn) for label, drawn in zip(labels, draws, strict=True)]
        answers = [answer for _, answer in made if answer]
        return [row for row, _ in made], answers, torch.tensor(labels)

    def _one(self, label: int, drawn: list[int]) -> tuple[Row, str]:
        name, other = NAMES[drawn[0] % 6], NAMES[(drawn[0] + 1 + drawn[1] % 5) % 6]
        thing, (verb, alike) = THINGS[drawn[2] % 6], VERBS[drawn[3] % 4]
        if self.what == "pairs":
            said = f"{name} {verb} {drawn[4] % 9 + 2} {thing} ."
            if label:
                return (said, f"It was {name} who {alike} {drawn[4] % 9 + 2} {thing} ."), ""
            return (said, f"{other} {VERBS[(drawn[3] + 1) % 4][1]} the {THINGS[(drawn[2] + 1) % 6]} ."), ""
        if self.what == "posts":
            words = [FILLERS[k % 8] if k % 2 else f"word{label}{'abcd'[k // 2 % 4]}" for k in drawn[5:15]]
            return (f"{name} says: {' '.join(words)}.",), ""
        a, b = drawn[5] % 9 + 1, drawn[6] % 9 + 1
        asked = f"{name} has {a} {thing} and gets {b} more. How many in town {label}?"
        return (asked,), f"{a} + {b} = {a + b}\n#### {a + b}"
