"""Every code block of the documentation, run page by page as a reader would."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pages import pages

from afield.cli import main
from afield.experiments.config import experiment

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
SKETCHES = ("design.md",)  # shows classes without their bodies
BLOCK = re.compile(r'^```(\w*)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
NOT_RUN = (
    "make",
    "source",
    "pip",
    "tensorboard",
    "mlflow",
    "wandb",
)  # what sets up or shows, and needs more than us
# Written by hand, and longest first so that two processes share them well.
WRITTEN = sorted(
    (path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")),
    key=lambda name: (name != "reproduce.md", name != "tutorial.md", name),
)


def small(arguments: list[str]) -> list[str]:
    """The same command, on less: few updates, made data, the CPU."""
    kept: list[str] = []
    for before, word in zip(["", *arguments], arguments, strict=False):
        if word not in ("--data", "--device", "--scale") and before not in ("--data", "--device", "--scale"):
            kept.append(word)
    if kept[1] in ("run", "tune"):
        kept += ["--set", "stop.updates=12"]
    if kept[1] == "run":
        kept += ["--set", "seeds=[0]"]
    if kept[1] == "tune" and kept[2].endswith(".toml"):
        return kept
    return [*kept, "--scale", "smoke"] if kept[1] in ("reproduce", "tune") and len(kept) > 2 else kept


def commands(body: str) -> Iterator[list[str]]:
    for line in body.splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] not in NOT_RUN:
            assert words[0] == "afield", f"{line!r} is neither run nor known as not to be run"
            yield words


def press(folder: Path) -> None:
    """Ctrl-C, once a run in this folder has begun."""
    while not list(folder.glob("*/metrics.jsonl")):
        time.sleep(0.001)
    signal.raise_signal(signal.SIGINT)


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that is known by its name: dataclasses look theirs up."""
    made = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def run_blocks(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run what a page shows; the number of blocks that were run, written or read."""
    monkeypatch.chdir(folder)
    shutil.copytree(ROOT / "examples", folder / "examples")
    page = module("page", monkeypatch)
    done = 0
    for language, title, body in BLOCK.findall(text):
        assert language in ("python", "sh", "toml", "text"), f"a block is of no known language: {body[:80]!r}"
        done += language != "text"
        if title:
            Path(title).write_text(body, encoding="utf-8")
        if language == "toml":
            table = tomllib.loads(body)
            if "paper" not in table:  # those are read by the command that follows
                assert experiment(table).runs
        elif language == "python":
            own = module(title, monkeypatch) if title else page  # what has a title is a file by itself
            exec(compile(body, title or "page", "exec"), own.__dict__)
        elif language == "sh":
            for words in commands(body):
                monkeypatch.setattr("sys.argv", small(words))
                stopped = "press Ctrl-C" in body
                if stopped:
                    threading.Thread(target=press, args=(Path(words[-1]),), daemon=True).start()
                with pytest.raises(SystemExit) as ended:
                    main()
                assert ended.value.code == (130 if stopped else 0), words
    return done


@pytest.mark.slow
@pytest.mark.parametrize("page", WRITTEN)
def test_a_page(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AFIELD_DATA", raising=False)
    text = (DOCS / page).read_text(encoding="utf-8")
    shown = len(re.findall(r"^```\w", text, re.MULTILINE)) - len(re.findall(r"^```text", text, re.MULTILINE))
    if page in SKETCHES:
        assert shown
        return
    assert run_blocks(text, tmp_path, monkeypatch) == shown
    said = capsys.readouterr().err
    assert ("stopped, all is saved" in said) if "press Ctrl-C" in text else (said == "")


@pytest.mark.slow
def test_the_generated_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (page, text) in enumerate(pages()):
        place = tmp_path / str(number)
        place.mkdir()
        done = run_blocks(text, place, monkeypatch)
        strategy = page.startswith("strategies/") and not page.endswith("index.md")
        assert done == strategy, page  # each strategy's has a command to try


def test_small_keeps_the_command() -> None:
    line = "afield reproduce x --data DIR --only TWAFL --seeds 3,4 --device cuda"
    assert small(shlex.split(line)) == shlex.split(
        "afield reproduce x --only TWAFL --seeds 3,4 --scale smoke"
    )
    assert small(["afield", "list"]) == ["afield", "list"]


def test_an_unknown_command_or_language_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="neither run nor known"):
        list(commands("curl example\n"))
    with pytest.raises(AssertionError, match="of no known language"):
        run_blocks("```\nx\n```\n", tmp_path, monkeypatch)
