"""Texts made on the fly: alike in every run, learnable, and with answers that are right."""

from __future__ import annotations

from typing import Any

import pytest

from afield.core.errors import InputError
from afield.scenarios.phrases import SyntheticTexts
from afield.scenarios.texts import final_answer


def test_texts_do_not_depend_on_the_seed() -> None:
    first, again = SyntheticTexts().load(0), SyntheticTexts().load(7)
    other = SyntheticTexts(draw=1).load(0)
    assert first.rows == again.rows and first.test_rows == again.test_rows
    assert first.rows != other.rows
    assert (len(first.rows), len(first.test_rows)) == (200, 40)
    assert first.targets.tolist() == [0, 1] * 100


def test_a_paraphrase_is_of_the_same_one() -> None:
    found = SyntheticTexts().load(0)
    assert found.answers is None
    for (left, right), label in zip(found.rows, found.targets.tolist(), strict=True):
        assert (left.split()[0] in right.split()) == bool(label)


def test_posts_of_a_class_have_its_words() -> None:
    found = SyntheticTexts(what="posts", classes=5).load(0)
    for (post,), label in zip(found.rows, found.targets.tolist(), strict=True):
        words = [word for word in post.replace(".", "").split() if word.startswith("word")]
        assert all(word[4] == str(label) for word in words)


def test_sums_are_right_and_deal_by_source() -> None:
    found = SyntheticTexts(what="sums", classes=3, held_out=20, unlabelled="").load(0)
    assert len(found.rows) == 180 and found.unlabelled is not None and len(found.unlabelled) == 20
    assert found.answers is not None and found.test_answers is not None
    for (asked,), answer, source in zip(found.rows, found.answers, found.targets.tolist(), strict=True):
        a, b = (int(word) for word in asked.split() if word.isdigit())
        assert final_answer(answer) == str(a + b)
        assert asked.endswith(f"town {source}?")


@pytest.mark.parametrize(
    "wrong", [{"what": "poems"}, {"classes": 3}, {"train": 0}, {"what": "posts", "classes": 1}]
)
def test_what_cannot_be_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        SyntheticTexts(**wrong)
