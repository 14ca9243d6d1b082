"""A browser's view of the page, for tests: what it shows, and what it did that it should not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Opened:
    """A page, and what it did that it should not."""

    page: Any
    origin: str
    pictures: Path
    elsewhere: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def until(self, condition: str, seconds: float = 60.0) -> None:
        """A function, since the page's own policy forbids to evaluate text."""
        try:
            self.page.wait_for_function(f"() => {condition}", timeout=1000 * seconds)
        except Exception:
            self.shot("failed")
            raise

    def tile(self, name: str) -> str:
        return str(
            self.page.locator("#tiles > div", has=self.page.get_by_text(name, exact=True))
            .locator("dd")
            .inner_text()
        )

    def number(self, name: str) -> float:
        return float(self.tile(name).replace(",", "").replace(" %", "").replace("\u2013", "nan"))

    def pixels(self, canvas: str) -> str:
        return str(self.page.evaluate(f"document.getElementById('{canvas}').toDataURL()"))

    def colours(self, canvas: str) -> int:
        """How many colours a canvas shows: one that is empty has one."""
        count = """id => { const from = document.getElementById(id), copy = document.createElement('canvas');
            [copy.width, copy.height] = [from.width, from.height];
            const context = copy.getContext('2d', { willReadFrequently: true });
            context.drawImage(from, 0, 0);
            const data = context.getImageData(0, 0, copy.width, copy.height).data;
            return new Set(new Uint32Array(data.buffer)).size; }"""
        return int(self.page.evaluate(count, canvas))

    def shot(self, name: str) -> None:
        self.page.screenshot(path=self.pictures / f"{name}.png", full_page=True)

    def clean(self) -> None:
        assert (self.elsewhere, self.complaints) == ([], [])


def move(tab: Any, slider: str, value: float) -> None:
    tab.evaluate(
        "([id, to]) => { const e = document.querySelector(id); e.value = to; e.dispatchEvent(new Event('input')); }",
        [slider, str(value)],
    )


def contrasts(tab: Any) -> float:
    """The least contrast of soft and plain text to its ground, by WCAG."""
    least: float = tab.evaluate(
        """() => {
        const lum = (text) => { const [r, g, b] = text.match(/[0-9.]+/g).map(Number).map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
            if (!c.endsWith(', 0)')) return c; } return 'rgb(255, 255, 255)'; };
        const texts = [...document.querySelectorAll('h1, h2, p, dt, dd, li, button, label, select')]
            .filter(e => e.checkVisibility() && e.textContent.trim());
        return Math.min(...texts.map(e => ratio(lum(getComputedStyle(e).color), lum(ground(e))))); }"""
    )
    return least


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "afield", *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def watched(folder: Path) -> Iterator[str]:
    with command("watch", str(folder)) as process:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("watch at ").strip()
