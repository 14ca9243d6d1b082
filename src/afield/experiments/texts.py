"""Where texts meet the model that reads them: the data's rows, the model's tokens, one data set of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from afield.core.errors import InputError
from afield.scenarios.data import Dataset
from afield.scenarios.texts import Texts, matches
from afield.training.generate import Answers
from afield.training.models import Model

More = Callable[[nn.Module], dict[str, Any]]


def tokenised(texts: Texts, config: Any) -> tuple[Dataset, Model, More | None]:
    """The texts as tensors, the model that takes them, and what evaluation measures beside the loss."""
    if not hasattr(config, "reader"):
        raise InputError(
            "the data is texts, which this model cannot read: choose bert, distilbert or causal-lm"
        )
    if config.answers != (texts.answers is not None):
        wants = "causal-lm" if texts.answers is not None else "bert or distilbert"
        held = "answers" if texts.answers is not None else "labels"
        raise InputError(
            f"the texts come with {held}, which {type(config).__name__} cannot give: choose {wants}"
        )
    if texts.answers is None or texts.test_answers is None:
        return _labelled(texts, config)
    reader = config.reader(
        text for pair in zip(texts.rows, texts.answers, strict=True) for text in (*pair[0], pair[1])
    )
    inputs, targets = reader.complete(texts.rows, texts.answers)
    test_inputs, test_targets = reader.complete(texts.test_rows, texts.test_answers)
    dataset = Dataset(
        inputs,
        targets,
        test_inputs,
        test_targets,
        1,
        None if texts.unlabelled is None else reader.questions(texts.unlabelled),
        loss="tokens",
        sources=texts.targets,
    )
    return (
        dataset,
        reader,
        Answers(reader.prompts(texts.test_rows), texts.test_answers, reader.decode, matches),
    )


def _labelled(texts: Texts, config: Any) -> tuple[Dataset, Model, None]:
    reader = config.reader(text for row in texts.rows for text in row)
    sets = [texts.rows, texts.test_rows, *([] if texts.unlabelled is None else [texts.unlabelled])]
    inputs, test_inputs, *rest = reader.encode(*sets)
    dataset = Dataset(
        inputs, texts.targets, test_inputs, texts.test_targets, texts.classes, rest[0] if rest else None
    )
    return dataset, reader, None
