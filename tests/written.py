"""Small files in the layouts in which text sets are published."""

from __future__ import annotations

import json
from pathlib import Path

NAMES = ("Ann", "Bob", "Cid", "Dot")
THINGS = ("apples", "books", "coins")
GROUPS = {
    "alt.tea": ("kettle", "leaves", "cup"),
    "rec.go": ("board", "stones", "eyes"),
    "sci.fog": ("dew", "drops", "haze"),
}


def pair(number: int) -> tuple[int, str, str]:
    """A paraphrase where the number is even."""
    name, other = NAMES[number % 4], NAMES[(number + 1) % 4]
    said = f"{name} bought {number} {THINGS[number % 3]} ."
    return (
        (1, said, f"It was {name} who bought {number} .")
        if number % 2 == 0
        else (0, said, f'{other} "sold" a car .')
    )


def write_mrpc(root: Path, train: int = 24, dev: int = 8, test: int = 10) -> Path:
    folder = root / "MRPC"
    folder.mkdir(parents=True)
    for name, first, count in (
        ("train.tsv", 0, train),
        ("dev.tsv", 50, dev),
        ("msr_paraphrase_test.txt", 90, test),
    ):
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for number in range(first, first + count):
            label, left, right = pair(number)
            lines.append(f"{label}\t{number}\t{number + 1}\t{left}\t{right}")
        mark = "\ufeff" if name.startswith("msr") else ""  # as the original files have it
        (folder / name).write_text(mark + "\r\n".join(lines) + "\r\n", encoding="utf-8", newline="")
    return root


def write_news(root: Path, train: int = 6, test: int = 3) -> Path:
    for split, count in (("train", train), ("test", test)):
        for group, words in GROUPS.items():
            folder = root / "20news-bydate" / f"20news-bydate-{split}" / group
            folder.mkdir(parents=True)
            for number in range(count):
                text = (
                    f"From: someone@{group}\nSubject: Re: {words[0]}\n\nIn article <1>, ann writes:\n> I like it\n"
                    f"The {words[number % 3]} and the {words[(number + 1) % 3]} caf\xe9.\n\n--\nmy signature\n"
                )
                (folder / str(1000 + number)).write_bytes(text.encode("latin1"))
    return root


def problem(number: int) -> tuple[str, str]:
    a, b = number % 7 + 1, number % 5 + 1
    asked = f"{NAMES[number % 4]} has {a} {THINGS[number % 3]} and gets {b} more. How many?"
    return asked, f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"


def write_gsm8k(root: Path, train: int = 24, test: int = 6) -> Path:
    folder = root / "gsm8k"
    folder.mkdir(parents=True)
    for split, first, count in (("train", 0, train), ("test", 100, test)):
        rows = (problem(number) for number in range(first, first + count))
        lines = [json.dumps({"question": asked, "answer": answer}) for asked, answer in rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def write_mathinstruct(root: Path, count: int = 24) -> Path:
    """With GSM8K's test set beside it, on which it is measured."""
    write_gsm8k(root)
    folder = root / "MathInstruct"
    folder.mkdir(parents=True)
    entries = []
    for number in range(count):
        asked, answer = problem(number)
        source = ("data/CoT/gsm_rft.json", "data/CoT/aqua_rat.json", "data/PoT/numglue.json")[number % 3]
        entries.append(
            {
                "source": source,
                "output": f"We add. The answer is {answer.rpartition(' ')[2]}",
                "instruction": asked,
            }
        )
    (folder / "MathInstruct.json").write_text(json.dumps(entries, indent=2), encoding="utf-8")
    return root
