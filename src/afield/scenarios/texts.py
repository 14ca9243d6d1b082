"""Texts as published: sentence pairs and posts with labels, questions with worked answers.

Files are read from `folder`, else from the folder named by the environment variable AFIELD_DATA. Nothing here knows
tokens: the model that reads a text brings its own tokeniser (docs/decisions/0006-text.md).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from afield.core.errors import InputError, one_of, within
from afield.core.keys import Stream, generator

Row = tuple[str, ...]  # one text, or a pair
Parts = tuple[list[Row], list[str], Tensor]  # rows, their answers (none: labels only), labels or sources


@dataclass(frozen=True, eq=False)
class Texts:
    """A loaded set of texts; a model's tokeniser makes tensors of it.

    `targets` are labels. Where a text is to be answered, `answers` says how and `targets` is where each came from:
    something to deal by.
    """

    rows: list[Row]
    targets: Tensor
    test_rows: list[Row]
    test_targets: Tensor
    classes: int
    unlabelled: list[Row] | None = None  # what the server may distil from
    answers: list[str] | None = None
    test_answers: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class _Share:
    """How much of the texts is used, and what the server has without labels."""

    folder: str = ""
    held_out: int = 0  # so many training texts go to no client: they are the unlabelled set
    unlabelled: str = ""  # "" or "test": the test texts, without labels or answers
    limit: int | None = None  # at most so many training texts (a keyed choice)
    tests: int | None = None  # at most so many test texts, the first ones

    def __post_init__(self) -> None:
        within("held_out", self.held_out, 0, math.inf, below=True)
        for name in ("limit", "tests"):
            if getattr(self, name) is not None:
                within(name, getattr(self, name), 1, math.inf, below=True)
        one_of("unlabelled", self.unlabelled, ("", "test"))
        if self.held_out and self.unlabelled:
            both = f"held_out = {self.held_out} and unlabelled = {self.unlabelled!r}"
            raise InputError(f"{both} name two unlabelled sets; leave one out")

    @property
    def keyed(self) -> bool:
        """Whether the texts depend on the seed (who gets which of them always does)."""
        return bool(self.held_out or self.limit is not None)

    def cut(self, train: Parts, test: Parts, classes: int, seed: int, other: list[Row] | None) -> Texts:
        """`other`: the unlabelled set of `unlabelled = "test"`."""
        rows, answers, targets = train
        total, held = len(rows), None
        if self.held_out >= total:
            raise InputError(
                f"held_out = {self.held_out} of {total} training texts; at most {total - 1} can be"
            )
        if self.held_out or self.limit is not None:
            order = torch.randperm(total, generator=generator(seed, Stream.DATA))
            kept = order[self.held_out :][: self.limit].sort().values
            held = [rows[k] for k in order[: self.held_out].tolist()]
            rows, targets = [rows[k] for k in kept.tolist()], targets[kept]
            answers = [answers[k] for k in kept.tolist()] if answers else []
        return Texts(
            rows,
            targets,
            test[0][: self.tests],
            test[2][: self.tests],
            classes,
            (other if self.unlabelled else held) or None,
            answers or None,
            test[1][: self.tests] or None,
        )


@dataclass(frozen=True)
class MRPC(_Share):
    """5,801 sentence pairs from the news, paraphrases or not (GLUE's split: train.tsv, measured on dev.tsv).

    `unlabelled = "test"` is the published test set without its labels, as FedEcho distils from (appendix A.1.2).
    """

    home: ClassVar[str] = "gluebenchmark.com/tasks (MRPC)"

    def load(self, seed: int) -> Texts:
        train, test = (_pairs(_find(self, f"MRPC/{name}.tsv")) for name in ("train", "dev"))
        other = None
        if self.unlabelled:
            other = _pairs(_find(self, "MRPC/msr_paraphrase_test.txt", "MRPC/test.tsv"), labels=False)[0]
        return self.cut(train, test, 2, seed, other)


@dataclass(frozen=True)
class Newsgroups(_Share):
    """18,846 posts to 20 newsgroups, split by date (folders 20news-bydate-train and 20news-bydate-test).

    `remove`: what is taken out first, as scikit-learn does it and most work on BERT has it: the headers name the
    group's habits, footers and quotes its people. Give [] for the posts as they are.
    """

    remove: tuple[str, ...] = ("headers", "footers", "quotes")
    home: ClassVar[str] = "qwone.com/~jason/20Newsgroups (20news-bydate.tar.gz)"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.remove:
            one_of("remove", name, _REMOVALS)

    def load(self, seed: int) -> Texts:
        places = [
            _find(self, f"20news-bydate/20news-bydate-{split}", kind="folder") for split in ("train", "test")
        ]
        groups = sorted(entry.name for entry in places[0].iterdir() if entry.is_dir())
        train, test = (self._posts(place, groups) for place in places)
        return self.cut(train, test, len(groups), seed, test[0])

    def _posts(self, place: Path, groups: Sequence[str]) -> Parts:
        rows: list[Row] = []
        labels = []
        for label, group in enumerate(groups):
            if not (place / group).is_dir():
                raise InputError(f"{place} has no folder {group}; fetch the set again from {self.home}")
            for file in sorted((place / group).iterdir()):
                text = file.read_text(encoding="latin1")
                for name in ("headers", "footers", "quotes"):
                    text = _REMOVALS[name](text) if name in self.remove else text
                rows.append((text,))
                labels.append(label)
        if not rows:
            raise InputError(f"{place} holds no posts; fetch the set again from {self.home}")
        return rows, [], torch.tensor(labels)


@dataclass(frozen=True)
class GSM8K(_Share):
    """8,792 word problems of grade-school mathematics with worked answers (train.jsonl, test.jsonl)."""

    home: ClassVar[str] = "github.com/openai/grade-school-math (grade_school_math/data)"

    def load(self, seed: int) -> Texts:
        train, test = (_gsm8k(_find(self, f"gsm8k/{split}.jsonl")) for split in ("train", "test"))
        return self.cut(train, test, 1, seed, test[0])


@dataclass(frozen=True)
class MathInstruct(_Share):
    """262,000 mathematical instructions with answers; measured on the test set of GSM8K (FedEcho, table 5).

    `part` keeps the sources that contain it ("CoT": answers in words, "PoT": as programs, which nobody runs here).
    Partitions deal by source.
    """

    part: str = ""
    home: ClassVar[str] = "huggingface.co/datasets/TIGER-Lab/MathInstruct"

    def load(self, seed: int) -> Texts:
        path = _find(self, "MathInstruct/MathInstruct.json", "MathInstruct/MathInstruct.jsonl")
        found = [
            (
                _field(entry, "instruction", where),
                _field(entry, "output", where),
                str(entry.get("source", "")),
            )
            for where, entry in _entries(path)
        ]
        found = [entry for entry in found if self.part in entry[2]]
        if not found:
            raise InputError(
                f"part = {self.part!r} is in no source of {path}; leave it out, or give CoT or PoT"
            )
        sources = {name: k for k, name in enumerate(sorted({source for _, _, source in found}))}
        targets = torch.tensor([sources[source] for _, _, source in found])
        rows: list[Row] = [(question,) for question, _, _ in found]
        train = rows, [answer for _, answer, _ in found], targets
        test = _gsm8k(_find(GSM8K(folder=self.folder), "gsm8k/test.jsonl"))
        return self.cut(train, test, len(sources), seed, test[0])


def matches(given: str, right: str) -> bool:
    """Whether two worked answers come to the same end."""
    end = final_answer(given)
    return end != "" and end == final_answer(right)


def final_answer(text: str) -> str:
    """What an answer comes to: after "####", else after "the answer is", else in a box, else its last number.

    Numbers are written in one way: no commas, no $, no ".0" at the end. "" where there is none.
    """
    for pattern in _ENDS:
        if found := pattern.findall(text):
            return _plain(found[-1])
    return ""


_NUMBER = r"-?\$?\s?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_ENDS = [
    re.compile(r"####\s*(.+)"),
    re.compile(r"(?i)the (?:final )?answer is:?\s*(.+)"),
    re.compile(r"\\boxed\{([^{}]*)\}"),
    re.compile(f"({_NUMBER})"),
]


def _plain(end: str) -> str:
    number = re.match(rf"\W*?({_NUMBER})%?(?![\w/^])", end)
    if number is None:
        return end.strip(" .$()").casefold()
    digits = re.sub(r"[,$\s]", "", number.group(1))
    try:
        value = Decimal(digits)
    except InvalidOperation:  # such as --5
        return digits
    return f"{value.normalize() + 0:f}"  # + 0: minus zero is zero


def _find(share: Any, *names: str, kind: str = "file") -> Path:
    """The first of these in the data folder, or without its own folder's name; the error says who publishes it."""
    root = share.folder or os.environ.get("AFIELD_DATA", "")
    remedy = (
        f"it is published at {share.home}; give its folder by --set scenario.data.folder=DIR or AFIELD_DATA"
    )
    if not root:
        raise InputError(f"{names[0]} is needed but no data folder is set; {remedy}")
    places = [Path(root) / place for name in names for place in (name, name.partition("/")[2])]
    for place in places:
        if place.is_dir() if kind == "folder" else place.is_file():
            return place
    looked = " nor ".join(str(place) for place in places)
    raise InputError(f"the {kind} {names[0]} is missing (no {looked}); {remedy}")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines that are not empty, with where they are."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); fetch it again") from error
    # By "\n" alone: texts hold other characters that Python takes for the end of a line.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", line.rstrip("\r")


def _pairs(path: Path, labels: bool = True) -> Parts:
    rows: list[Row] = []
    found = []
    for where, line in list(_lines(path))[1:]:
        cells = line.split("\t")
        if len(cells) != 5:
            raise InputError(
                f"{where} has {len(cells)} columns, not 5 (a label, two ids, two texts); fetch it again"
            )
        if labels and cells[0] not in ("0", "1"):
            raise InputError(f"{where} has the label {cells[0]!r}, not 0 or 1; fetch it again")
        rows.append((cells[3], cells[4]))
        found.append(int(cells[0]) if labels else 0)
    if not rows:
        raise InputError(f"{path} holds no pairs; fetch it again")
    return rows, [], torch.tensor(found)


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, or of one JSON array, with where they are."""
    lines = list(_lines(path))
    if lines and lines[0][1].lstrip().startswith("["):
        try:
            whole = json.loads("\n".join(line for _, line in lines))
        except json.JSONDecodeError as error:
            raise InputError(
                f"{path}, line {error.lineno} is not JSON ({error.msg}); fetch it again"
            ) from error
        found = [(f"{path}, entry {number}", entry) for number, entry in enumerate(whole, start=1)]
    else:
        found = [(where, _json(where, line)) for where, line in lines]
    for where, entry in found:
        if not isinstance(entry, dict):
            raise InputError(f"{where} is not an object of names and texts; fetch it again")
        yield where, entry


def _json(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error.msg}); fetch it again") from error


def _field(entry: dict[str, Any], name: str, where: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        raise InputError(
            f"{where} has no text {name!r} (it has {', '.join(entry) or 'nothing'}); fetch it again"
        )
    return value


def _gsm8k(path: Path) -> Parts:
    rows: list[Row] = []
    answers = []
    for where, entry in _entries(path):
        rows.append((_field(entry, "question", where),))
        answers.append(_field(entry, "answer", where))
        if "####" not in answers[-1]:
            raise InputError(f"{where}: its answer has no '####' before the final number; fetch it again")
    if not rows:
        raise InputError(f"{path} holds no questions; fetch it again")
    return rows, answers, torch.zeros(len(rows), dtype=torch.int64)


_QUOTE = re.compile(r"(writes in|writes:|wrote:|says:|said:|^In article|^Quoted from|^\||^>)")


def _without_headers(text: str) -> str:
    return text.partition("\n\n")[2]


def _without_quotes(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not _QUOTE.search(line))


def _without_footer(text: str) -> str:
    """Without what follows the last line that is blank or all dashes, unless that line is the first."""
    lines = text.strip().split("\n")
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].strip().strip("-") == "":
            return "\n".join(lines[:number]) if number > 0 else text
    return text


_REMOVALS = {"headers": _without_headers, "footers": _without_footer, "quotes": _without_quotes}
