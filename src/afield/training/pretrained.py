"""Pretrained networks and tokenisers from a local folder, by `transformers`; nothing is ever fetched.

The only place that imports `transformers` (extra `text`), and only when it is needed: it takes 4 s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from afield.core.errors import InputError

log = logging.getLogger("afield")


def transformers(name: str) -> Any:
    """The library, for the network of this name."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"{name} needs transformers, tokenizers and peft ({error}): pip install 'afield[text]'"
        ) from error
    return transformers


def from_folder(folder: str, load: Callable[..., Any], **more: Any) -> Any:
    """Whatever is wrong with a folder, the message names it."""
    try:
        return load(folder, local_files_only=True, **more)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"model.folder = {folder!r} cannot be read: {reason}; save the model there again"
        ) from error


def network(library: Any, folder: str, kind: Any, *, head: bool, **more: Any) -> nn.Module:
    """The network of a folder in float32. Without `head` it may lack what is on top of the body, to be learnt."""
    with _quiet(library):
        load = kind.from_pretrained
        made, told = from_folder(folder, load, dtype=torch.float32, output_loading_info=True, **more)
    body = f"{made.base_model_prefix}."
    lacking = sorted(name for name in told["missing_keys"] if head or name.startswith(body))
    above = [name for name in lacking if name.startswith(f"{body}pooler.")]
    if above and not head:  # many a BERT is saved without
        log.warning("model.folder = %r has no pooler: it starts at random", folder)
        lacking = [name for name in lacking if name not in above]
    if lacking:
        raise InputError(
            f"model.folder = {folder!r} lacks {len(lacking)} of the network's tensors, {lacking[0]} for one: "
            "save the whole model there"
        )
    found: nn.Module = made
    return found


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """No progress bar, no report on the head that is missing: what matters is said here."""
    told = library.utils.logging
    level, shown = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity_error()
    told.disable_progress_bar()
    try:
        yield
    finally:
        told.set_verbosity(level)
        if shown:
            told.enable_progress_bar()
