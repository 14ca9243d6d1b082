"""The documentation site: what is made from the code says what the code does, and nothing comes from elsewhere."""

from __future__ import annotations

import re
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import weights
from pages import described

from afield.strategies import STRATEGIES

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_docstring_has_every_part_and_every_parameter(name: str) -> None:
    told = described(STRATEGIES[name])
    for part in (told.summary, told.paper, told.rule, told.when, told.differs):
        assert len(part) > 15
    assert list(told.parameters) == [field.name for field in fields(STRATEGIES[name])]
    assert all(told.parameters.values())


def test_a_docstring_without_a_part_is_refused() -> None:
    class Short:
        """One line.

        Paper: none.
        """

    with pytest.raises(ValueError, match="Short has no Rule, When, Differs, Parameters"):
        described(Short)


def test_the_weights_are_what_the_rules_say() -> None:
    """The fastest client finishes every 0.5, the slowest every 7.4: 48 and 3 updates within 24."""
    _, ace = weights.picture("ace").moments[-1]
    assert ace == pytest.approx([0.1] * 10)  # 1/N each
    assert weights.picture("ace").overall() == pytest.approx([0.1] * 10)
    for _, buffered in weights.picture("fedbuff").moments:
        assert sum(buffered) == pytest.approx(1.0)
        assert all(4 * share == pytest.approx(round(4 * share)) for share in buffered)  # of 4 updates
    asgd, adaptive = weights.picture("asgd").overall(), weights.picture("delay-adaptive-asgd").overall()
    assert asgd[0] / asgd[9] == pytest.approx(47 / 3, abs=1.1)  # how often they came (the last of 48 ends it)
    assert adaptive[9] < asgd[9] / 2  # over 50 versions late, threshold 10
    for name in ("fedasync", "mr-asyncfl", "twafl", "rolling-fedavg"):
        for _, shares in weights.picture(name).moments:
            assert min(shares) >= 0 and sum(shares) <= 1 + 1e-9
    assert weights.picture("sgd").overall() == [1.0] + [0.0] * 9


def test_rounds_have_five_of_ten() -> None:
    for _, shares in weights.picture("u-fedavg").moments:
        assert sorted(shares) == pytest.approx([0.0] * 5 + [1 / 10 / 0.5] * 5)  # 1/N, divided by p = 1/2


@pytest.mark.parametrize("name", ["ace", "fedavg", "fedac"])
def test_the_picture_is_one_row_a_client(name: str) -> None:
    drawn = weights.svg(weights.picture(name))
    root = ElementTree.fromstring(drawn)
    texts = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text.endswith(" s")][:2] == ["0.5 s", "0.7 s"]
    assert len([text for text in texts if text.endswith(" %")]) == 10
    assert "\n\n" not in drawn  # markdown would end the block there


class Fetched(HTMLParser):
    """What a browser would load by itself, and where links within the site lead."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.loaded.append(str(values["src"]))
        if tag == "link" and values.get("href"):
            self.loaded.append(str(values["href"]))
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    build = pytest.importorskip("mkdocs.commands.build")
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build.build(config)  # a warning ends it
    made = sorted(tmp_path.rglob("*.html"))
    assert len(made) > 40
    for file in made:
        page = Fetched()
        page.feed(file.read_text(encoding="utf-8"))
        for address in page.loaded:
            assert not re.match(r"(https?:)?//", address), f"{file.name} loads {address}"
            root = tmp_path if address.startswith("/") else file.parent  # 404.html may be shown from anywhere
            assert (root / address.partition("?")[0].lstrip("/")).exists(), f"{file.name} loads {address}"
    for file in tmp_path.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", file.read_text(encoding="utf-8")), (
            file.name
        )
    for name in STRATEGIES:
        assert "<svg" in (tmp_path / "strategies" / f"{name}.html").read_text(encoding="utf-8")
