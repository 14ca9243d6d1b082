"""One torch thread for every test: with two, small tests took ten times as long on a loaded machine."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module")  # its event loop is in nobody else's way afterwards
def browser() -> Iterator[Any]:
    """Debian's chromium, without a window."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next((found for name in names if (found := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("no chromium is installed")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as play:
        # Tests may run as root in a container, where chromium's sandbox does not start.
        started = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()
