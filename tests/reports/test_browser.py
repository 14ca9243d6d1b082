"""Reports in a real browser, from a file: nothing is fetched, nothing complains, everything answers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from afield.experiments.config import experiment, presets, read
from afield.experiments.run import prepare, run
from afield.reports import load, page

pytestmark = pytest.mark.slow
PHONE, DESKTOP = (390, 844), (1440, 900)


@dataclass
class Opened:
    """A page, and what it did that it should not."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def tab(self, name: str) -> None:
        self.page.click(f"nav button[data-tab={name}]")
        self.until(f"!document.getElementById('{name}').hidden")

    def until(self, condition: str) -> None:
        """Wait until something is true; a function, since the page's own policy forbids to evaluate text."""
        self.page.wait_for_function(f"() => {condition}")


Open = Callable[..., Opened]


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    contexts = []

    def open_it(file: Path, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> Opened:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        contexts.append(context)
        found = Opened(context.new_page())
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("console", lambda message: found.complaints.append(message.text))
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.goto(file.as_uri())
        found.page.wait_for_selector("#plot-accuracy .main-svg")
        return found

    yield open_it
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the default race, shorter, and diagnosed so that every section has its pictures."""
    root = tmp_path_factory.mktemp("default")
    settings = ["stop.time=8", "measure.diagnose=true", "measure.time=1"]
    for config in experiment(read(presets()["default"]), settings=settings).runs:
        for _ in run(prepare(config), root / config.label):
            pass
    page.write(load.find([root]), root / "report.html")
    return root / "report.html"


def drawn(tab: Any, name: str, attribute: str) -> Any:
    """Something of a plot as plotly has it."""
    return tab.evaluate(f"document.getElementById('plot-{name}').{attribute}")


def test_it_opens_from_a_file_and_answers(default: Path, opened: Open) -> None:
    found = opened(default)
    tab = found.page
    assert tab.title() == "ace · fedasync · fedavg · fedbuff · mr-asyncfl"
    assert "ahead of" in tab.inner_text(".words") or "told apart" in tab.inner_text(".words")
    # Plotly's own bar would offer to send the data to its makers.
    buttons = tab.evaluate("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)")
    assert "Zoom" in buttons
    assert not [title for title in buttons if "share" in title.lower() or "cloud" in title.lower()]
    # A click on a name in the legend hides its line.
    shown = "data.filter(t => t.mode === 'lines' && t.visible !== 'legendonly').length"
    assert drawn(tab, "accuracy", shown) == 5
    tab.locator("#plot-accuracy .legendtoggle").first.click()
    found.until(f"document.getElementById('plot-accuracy').{shown} === 4")
    # A drag over the plot zooms into it.
    before = drawn(tab, "accuracy", "layout.xaxis.range")
    box = tab.locator("#plot-accuracy .nsewdrag").bounding_box()
    tab.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.5 * box["height"])
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"], steps=5)
    tab.mouse.up()
    found.until("document.getElementById('plot-accuracy').layout.xaxis.range[0] > 1")
    after = drawn(tab, "accuracy", "layout.xaxis.range")
    assert after[1] - after[0] == pytest.approx(0.3 * (before[1] - before[0]), rel=0.1)
    # Another axis for the same lines.
    tab.click("#views-accuracy button:has-text('bytes received')")
    found.until("document.getElementById('plot-accuracy').layout.xaxis.title.text === 'bytes received'")
    for name in ("progress", "staleness", "clients", "fairness", "errors", "data", "settings", "overview"):
        found.tab(name)
        found.until(
            f"[...document.querySelectorAll('#{name} .plot')].every(plot => plot.querySelector('.main-svg'))"
        )
        assert tab.locator("main > section:visible").count() == 1
    assert "not recorded" not in tab.content().lower()
    assert tab.evaluate("document.querySelectorAll('.plot').length") >= 13
    assert (found.requests, found.complaints) == ([default.as_uri()], [])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(default: Path, opened: Open, scheme: str) -> None:
    found = opened(default, PHONE, scheme)
    colour = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colour == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
    for name in ("overview", "progress", "staleness", "clients", "fairness", "errors", "data", "settings"):
        found.tab(name)
        assert (
            found.page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
        )  # no sideways scrolling
    found.page.click("#theme")
    assert found.page.evaluate("getComputedStyle(document.body).backgroundColor") != colour
    assert (found.requests, found.complaints) == ([default.as_uri()], [])


def test_a_million_receipts_still_open(tmp_path: Path, opened: Open) -> None:
    written = benchmark().write_run(tmp_path / "long", "long", 0, 1_000_000, 100_000, 1000)
    page.write(load.find([written]), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 15e6
    found = opened(tmp_path / "report.html")
    found.tab("clients")
    found.page.wait_for_selector("#plot-participation .main-svg")
    text = found.page.inner_text("#clients")
    assert "Aggregated: 100,000 clients in 100 rows of neighbours in speed." in text
    assert "Not all is drawn" in text
    assert found.complaints == []


def benchmark() -> ModuleType:
    """benchmarks/report.py, which knows how to write long runs."""
    file = Path(__file__).parents[2] / "benchmarks" / "report.py"
    spec = importlib.util.spec_from_file_location("benchmark_report", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
