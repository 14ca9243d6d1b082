"""Texts as published: what is read, what is refused, and what an answer comes to."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from written import GROUPS, pair, problem, write_gsm8k, write_mathinstruct, write_mrpc, write_news

from afield.core.errors import InputError
from afield.scenarios.texts import GSM8K, MRPC, MathInstruct, Newsgroups, final_answer, matches

REAL = Path(os.environ.get("AFIELD_DATA", "/nowhere"))


def test_mrpc_is_read_as_it_stands(tmp_path: Path) -> None:
    found = MRPC(folder=str(write_mrpc(tmp_path)), unlabelled="test").load(0)
    assert found.rows == [pair(number)[1:] for number in range(24)]
    assert found.targets.tolist() == [1, 0] * 12
    assert found.test_rows == [pair(number)[1:] for number in range(50, 58)]
    assert found.unlabelled == [pair(number)[1:] for number in range(90, 100)]
    assert found.classes == 2 and found.answers is None


def test_mrpc_takes_glues_own_test_file_and_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = write_mrpc(tmp_path) / "MRPC"
    original = folder / "msr_paraphrase_test.txt"
    lines = original.read_text(encoding="utf-8-sig").splitlines()
    given = ["index" + lines[0][7:], *(f"{k}{line[1:]}" for k, line in enumerate(lines[1:], start=10))]
    (folder / "test.tsv").write_text("\n".join(given))
    original.unlink()
    assert MRPC(folder=str(folder), unlabelled="test").load(0).unlabelled == [
        pair(n)[1:] for n in range(90, 100)
    ]


def test_newsgroups_lose_what_gives_them_away(tmp_path: Path) -> None:
    root = str(write_news(tmp_path))
    found = Newsgroups(folder=root).load(0)
    assert found.classes == 3
    assert Counter(found.targets.tolist()) == {0: 6, 1: 6, 2: 6}
    assert found.rows[0] == ("The kettle and the leaves caf\xe9.\n",)
    assert len(found.test_rows) == 9
    whole = Newsgroups(folder=root, remove=()).load(0)
    assert whole.rows[0][0].startswith("From: someone@alt.tea\n") and "signature" in whole.rows[0][0]
    assert [label for label, _ in enumerate(GROUPS)] == sorted(set(whole.targets.tolist()))


@pytest.mark.parametrize("kept", [("headers",), ("footers",), ("quotes",), ("headers", "footers", "quotes")])
def test_removal_is_scikit_learns(tmp_path: Path, kept: tuple[str, ...]) -> None:
    from sklearn.datasets import _twenty_newsgroups as theirs

    texts = [
        "A: b\n\nbody\n-----\nme",
        "no header at all",
        "A: b\n\n\n\nIn article 3\n| quoted\nshe said: no\nfree wrote: x",
        "A: b\n\n>\n--\n\n",
        "",
    ]
    rules = {
        "headers": theirs.strip_newsgroup_header,
        "footers": theirs.strip_newsgroup_footer,
        "quotes": theirs.strip_newsgroup_quoting,
    }
    for split in ("train", "test"):
        folder = tmp_path / f"20news-bydate-{split}" / "one"
        folder.mkdir(parents=True)
        for number, text in enumerate(texts):
            (folder / str(number)).write_text(text)
    found = [row[0] for row in Newsgroups(folder=str(tmp_path), remove=kept).load(0).rows]
    expected = []
    for text in texts:
        for name in kept:
            text = rules[name](text)
        expected.append(text)
    assert found == expected


def test_gsm8k_has_questions_and_answers(tmp_path: Path) -> None:
    found = GSM8K(folder=str(write_gsm8k(tmp_path)), tests=4).load(0)
    assert list(zip([row[0] for row in found.rows], found.answers or [], strict=True)) == [
        problem(number) for number in range(24)
    ]
    assert found.test_answers == [problem(number)[1] for number in range(100, 104)]
    assert len(found.test_rows) == len(found.test_targets) == 4


@pytest.mark.parametrize("lines", [False, True])
def test_mathinstruct_is_dealt_by_source_and_measured_on_gsm8k(tmp_path: Path, lines: bool) -> None:
    file = write_mathinstruct(tmp_path) / "MathInstruct" / "MathInstruct.json"
    if lines:
        entries = json.loads(file.read_text())
        file.with_suffix(".jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        file.unlink()
    found = MathInstruct(folder=str(tmp_path)).load(0)
    assert found.targets.tolist() == [1, 0, 2] * 8  # aqua, gsm, numglue in alphabetical order
    assert found.test_rows == [(problem(number)[0],) for number in range(100, 106)]
    words = MathInstruct(folder=str(tmp_path), part="CoT").load(0)
    assert words.targets.tolist() == [1, 0] * 8
    with pytest.raises(InputError, match=r"part = 'poems' is in no source"):
        MathInstruct(folder=str(tmp_path), part="poems").load(0)


def test_held_out_texts_go_to_no_client(tmp_path: Path) -> None:
    source = GSM8K(folder=str(write_gsm8k(tmp_path)), held_out=5, limit=10)
    found = source.load(3)
    assert found.unlabelled is not None and found.answers is not None
    assert len(found.unlabelled) == 5 and len(found.rows) == len(found.answers) == len(found.targets) == 10
    assert not set(found.unlabelled) & set(found.rows)
    # each question still has its own answer
    known = dict(problem(number) for number in range(24))
    assert all(known[row[0]] == answer for row, answer in zip(found.rows, found.answers, strict=True))
    assert source.load(3).rows == found.rows != source.load(4).rows
    assert source.keyed and not GSM8K().keyed
    assert torch.equal(found.targets, torch.zeros(10, dtype=torch.int64))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": 24}, "held_out = 24 of 24 training texts; at most 23"),
        ({"held_out": 2, "unlabelled": "test"}, "name two unlabelled sets"),
        ({"unlabelled": "noise"}, "unlabelled = 'noise' is not known"),
        ({"tests": 0}, r"tests = 0 is outside \[1"),
    ],
)
def test_bad_shares(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = str(write_mrpc(tmp_path))
    with pytest.raises(InputError, match=message):
        MRPC(folder=folder, **settings).load(0)


@pytest.mark.parametrize(
    ("source", "file", "home"),
    [
        (MRPC, "MRPC/train.tsv", "gluebenchmark.com"),
        (Newsgroups, "20news-bydate/20news-bydate-train", "qwone.com"),
        (GSM8K, "gsm8k/train.jsonl", "github.com/openai/grade-school-math"),
        (MathInstruct, "MathInstruct/MathInstruct.json", "TIGER-Lab/MathInstruct"),
    ],
)
def test_a_missing_file_is_named_with_who_publishes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, file: str, home: str
) -> None:
    for given in (str(tmp_path), ""):
        monkeypatch.delenv("AFIELD_DATA", raising=False)
        with pytest.raises(InputError) as caught:
            source(folder=given).load(0)
        for part in (file, home, "AFIELD_DATA"):
            assert part in str(caught.value)
    assert "no data folder is set" in str(caught.value)


@pytest.mark.parametrize(
    ("write", "source", "file", "line", "damage", "message"),
    [
        (write_mrpc, MRPC, "MRPC/train.tsv", 3, "1\t2\t3\tonly one", "line 4 has 4 columns, not 5"),
        (write_mrpc, MRPC, "MRPC/dev.tsv", 1, "x\t2\t3\ta\tb", "line 2 has the label 'x', not 0 or 1"),
        (write_gsm8k, GSM8K, "gsm8k/train.jsonl", 6, '{"question": "a', "line 7 is not JSON"),
        (write_gsm8k, GSM8K, "gsm8k/test.jsonl", 0, '{"question": "a"}', "line 1 has no text 'answer'"),
        (write_gsm8k, GSM8K, "gsm8k/train.jsonl", 2, "[1]", "line 3 is not an object"),
        (
            write_gsm8k,
            GSM8K,
            "gsm8k/train.jsonl",
            0,
            '{"question": "a", "answer": "4"}',
            "line 1: its answer has no '####'",
        ),
        (write_mathinstruct, MathInstruct, "MathInstruct/MathInstruct.json", 4, "oops", "line 5 is not JSON"),
    ],
)
def test_a_damaged_line_is_named(
    tmp_path: Path, write: Any, source: Any, file: str, line: int, damage: str, message: str
) -> None:
    path = write(tmp_path) / file
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[line] = damage
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        source(folder=str(tmp_path)).load(0)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("2+2 = <<2+2=4>>4\n#### 4", "4"),
        ("#### 1,234", "1234"),
        ("#### $18.00", "18"),
        ("#### -5", "-5"),
        ("So the answer is $1,250.50.", "1250.5"),
        ("The answer is 3.0", "3"),
        ("The answer is 20%.", "20"),
        ("The answer is (B)", "b"),
        ("Thus \\boxed{42} it is", "42"),
        ("first 7, then 8 apples. Bye 2", "2"),
        ("it costs .5 in all", "0.5"),
        ("The answer is 3/4", "3/4"),
        ("#### 0.0", "0"),
        ("#### 1000", "1000"),
        ("no idea", ""),
        ("", ""),
    ],
)
def test_final_answers(text: str, end: str) -> None:
    assert final_answer(text) == end


def test_matching() -> None:
    assert matches("I think the answer is $1,000.0", "a b\n#### 1000")
    assert not matches("The answer is 10", "#### 1000")
    assert not matches("no idea", "nothing either")


@pytest.mark.skipif(not (REAL / "MRPC").is_dir(), reason="AFIELD_DATA has no MRPC")
def test_the_real_mrpc() -> None:
    found = MRPC(unlabelled="test").load(0)
    assert (len(found.rows), len(found.test_rows), len(found.unlabelled or [])) == (3668, 408, 1725)
    assert int(found.targets.sum()) == 2474  # paraphrases of GLUE's training split
    assert int(found.test_targets.sum()) == 279


@pytest.mark.skipif(not (REAL / "20news-bydate").is_dir(), reason="AFIELD_DATA has no 20news-bydate")
def test_the_real_newsgroups() -> None:
    found = Newsgroups().load(0)
    assert (len(found.rows), len(found.test_rows), found.classes) == (11314, 7532, 20)
    assert int((found.targets == 0).sum()) == 480  # alt.atheism
    assert not any(row[0].startswith("From:") for row in found.rows[:500])
