"""The page as a file: whole, without a network, with what was asked for; and the numbers behind its pictures."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import made

from afield.reports import page
from afield.reports.clients import Clients, Log, participation, shares, stretch
from afield.reports.digest import Seen, differences, facts_of
from afield.reports.load import LoadError
from afield.reports.traces import packed, progress, times_to_any


def pictures(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="pictures">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    told: dict[str, Any] = json.loads(found[1], parse_constant=pytest.fail)  # NaN is no JSON to a browser
    return told


def unpacked(values: Any) -> list[float | None]:
    if isinstance(values, list):
        return values
    found: list[float | None] = np.frombuffer(
        base64.b64decode(values["bdata"]), f"<{values['dtype']}"
    ).tolist()
    return found


def test_a_page_is_whole(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"{name}{seed}", name, seed) for name in ("a", "b") for seed in (0, 1)]
    page.write(runs, tmp_path / "new" / "page.html", 0.8, "A title & more")
    text = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert "<h1>A title &amp; more</h1>" in text
    assert not re.findall(r"@[a-z]+@", text)
    own = text.replace(page._plotly(), "")
    assert not re.findall(r"https?://|src=|url\(|@import", own)  # nothing is fetched
    assert "default-src 'none'" in own  # nor could be
    tabs = re.findall(r'data-tab="([a-z]+)"', own)
    assert tabs == re.findall(r'<section id="([a-z]+)"', own)
    assert len(tabs) == 8
    # Every plot that the page has a place for is told, and the other way round.
    assert set(pictures(own)) == set(re.findall(r'id="plot-([a-z_-]+)"', own))
    assert "2 labels, 4 runs (2 seeds each) · 10 clients" in own
    assert f"afield run {runs[0].folder / 'config.toml'}" in own


def test_labels_cannot_break_out(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    text = page.page([made(tmp_path / "x", evil), made(tmp_path / "y", "b")], 0.8)
    assert evil not in text
    assert (
        pictures(text)["accuracy"]["views"][0][1][0]["name"]
        == "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;"
    )


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    text = page.page([made(tmp_path / "x", accuracy=(0.1, math.nan), senders=[], loss=math.inf)])
    assert text.count("No run here kept its receipts.") == 3
    assert "run with --set measure.diagnose=true" in text
    assert "None but labels and seeds." in text
    assert "Not recorded: no classes" in text
    pictures(text)


def test_without_plotly_there_is_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(LoadError, match=r"pip install 'afield\[report\]'"):
        page.page([made(tmp_path / "x")])


def test_lines_are_means_and_bands_ranges(tmp_path: Path) -> None:
    runs = [made(tmp_path / "0", "a", 0, (0.1, 0.5)), made(tmp_path / "1", "a", 1, (0.3, 0.9))]
    drawn = progress(runs, "accuracy", "Accuracy", 0.8)
    assert [name for name, _, _ in drawn.views] == [
        "virtual time", "accepted updates", "version", "wall time (s)", "bytes received"
    ]  # fmt: skip
    band, mean = drawn.views[0][1]
    assert unpacked(mean["y"]) == pytest.approx([0.2, 0.7])
    assert unpacked(band["y"]) == pytest.approx([0.3, 0.9, 0.5, 0.1])  # over it, and back below
    assert unpacked(drawn.views[4][1][1]["x"]) == [0.0, 1000.0]
    ((_, traces, _),) = times_to_any(facts_of(runs, 0.8)).views
    # 0.1 to 0.5 percent by percent; 0.5 is the most that both reach: one at once at 1.
    line = traces[1]
    assert unpacked(line["y"])[-1] == pytest.approx(0.5)
    assert unpacked(line["x"])[-1] == 1.0
    at = [round(value or 0, 2) for value in unpacked(line["y"])].index(0.2)
    assert unpacked(line["x"])[at] == 0.5  # 1 and 0


def test_numbers_are_packed_as_plotly_reads_them() -> None:
    assert packed([1.0, math.nan]) == [1.0, None]
    values = np.linspace(0, 1, 60).reshape(3, 20)
    told = packed(values)
    assert (told["dtype"], told["shape"]) == ("f4", "3, 20")
    assert np.allclose(np.frombuffer(base64.b64decode(told["bdata"]), "<f4").reshape(3, 20), values)


def test_clients_by_speed(tmp_path: Path) -> None:
    # Receipt i of client c takes 1 + c: without clients.json that is its duration; client 3 was not heard of.
    run = made(tmp_path / "x", clients=4, senders=[2, 0, 1, 0, 2, 2], refused=[4])
    log = Log.of(run)
    clients = Clients.of(run, log)
    assert clients.duration[:3].tolist() == [1.0, 2.0, 3.0]
    assert clients.order.tolist() == [0, 1, 2, 3]
    assert clients.received.tolist() == [2, 1, 2, 0]
    assert clients.slowest.tolist() == [2]
    z, ends = participation(clients, log)
    assert z.sum(axis=1).tolist() == [2, 1, 2, 0]
    # Arrivals at 3, 2, 4, 4, (7), 8 of 8 in 60 moments: client 0 came at 2 and 4.
    assert np.flatnonzero(z[0]).tolist() == [math.ceil(2 / 8 * 60) - 1, math.ceil(4 / 8 * 60) - 1]
    assert ends[-1] == 8.0
    part = stretch(clients, log, rows=2)
    assert part.shown.tolist() == [0, 2]
    assert part.arrived.tolist() == [2.0, 3.0, 4.0, 7.0, 8.0]
    assert (part.row.tolist(), part.used.tolist()) == ([0, 1, 0, 1, 1], [True, True, True, False, True])
    assert not part.whole
    assert stretch(clients, log).whole


def test_many_clients_share_rows(tmp_path: Path) -> None:
    run = made(tmp_path / "x", clients=1000, senders=list(range(1000)), share=[1.0] * 500 + [3.0] * 500)
    seen = Seen(run)
    assert [len(part) for part in seen.clients.rows] == [10] * 100
    z, _ = participation(seen.clients, seen.log)
    assert z.shape == (100, 60)
    assert z.sum(axis=1) == pytest.approx(np.ones(100))  # one update per client
    found = shares(run, seen.clients)
    assert found is not None
    assert found[0][:, 0] == pytest.approx([0.5] * 50 + [1.5] * 50)  # 1 and 3 against a mean of 2
    assert "Aggregated: 1,000 clients in 100 rows of neighbours in speed." in page.page([run])


def test_accuracy_on_a_clients_own_mix(tmp_path: Path) -> None:
    run = made(
        tmp_path / "x", clients=3, per_class=(1.0, 0.5, None), labels=[[3, 1, 7], [0, 2, 0], [0, 0, 9]]
    )
    found = Seen(run).accuracies
    assert found is not None
    # 3 of class 0 and 1 of class 1 that are tested: (3 + 0.5) / 4; nothing of the last one's is tested.
    assert found[:2].tolist() == [0.875, 0.5]
    assert math.isnan(found[2])


def test_differences_of_settings(tmp_path: Path) -> None:
    a = made(tmp_path / "a", "a", settings="[local]\nrate = 0.1\nepochs = 2")
    b = made(tmp_path / "b", "b", 3, settings="[local]\nrate = 0.2\nepochs = 2\n[strategy]\nsize = 5")
    assert differences([a, b], besides=("seed", "label")) == ["local.rate", "strategy.size"]
    text = page.page([a, b])
    row = '<td class="">local.rate</td><td class="left">0.1</td><td class="left">0.2</td>'
    assert row in text
    assert '<td class="">strategy.size</td><td class="left">-</td><td class="left">5</td>' in text
