"""What mkdocs calls while it builds: adds the pages made from the code, and lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pages
import torch
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from afield.strategies import STRATEGIES


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    torch.set_num_threads(1)  # small models, run for the pictures
    decisions = sorted(Path(config.docs_dir, "decisions").glob("*.md"))
    _section(config, "Strategies").extend(
        ["strategies/index.md", *({name: f"strategies/{name}.md"} for name in STRATEGIES)]
    )
    _section(config, "Decisions").extend(f"decisions/{path.name}" for path in decisions)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in pages.pages():
        files.append(File.generated(config, path, content=text))
    return files


def _section(config: MkDocsConfig, title: str) -> list[Any]:
    """The list under a title of the nav, at any depth."""
    waiting: list[Any] = [config.nav]
    while waiting:
        part = waiting.pop()
        for entry in part or ():
            if isinstance(entry, dict):
                for name, inner in entry.items():
                    if name == title:
                        found: list[Any] = inner
                        return found
                    if isinstance(inner, list):
                        waiting.append(inner)
    raise KeyError(f"nav has no section {title!r}")
