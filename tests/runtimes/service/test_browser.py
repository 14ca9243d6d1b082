"""The page in a real browser: during a live run, in a replay, on a phone, with thousands of clients.

Screenshots go to the test's folder, or to $AFIELD_PICTURES.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browsed import Opened, command, contrasts, move, watched
from served import Process, until
from tiny import rows_of, tiny

from afield.core.types import Receipt
from afield.experiments.config import experiment, presets, read
from afield.experiments.folder import write_receipts
from afield.experiments.run import prepare, run

pytestmark = pytest.mark.slow
PHONE, DESKTOP = (390, 844), (1440, 900)
PAPER = {"light": "rgb(244, 246, 249)", "dark": "rgb(12, 16, 23)"}
CARDS = ("accuracy", "loss", "rate", "timeline", "staleness")


Open = Callable[..., Opened]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    contexts = []
    pictures = Path(os.environ.get("AFIELD_PICTURES", tmp_path / "pictures"))
    pictures.mkdir(parents=True, exist_ok=True)

    def open_it(url: str, size: tuple[int, int] = DESKTOP, scheme: str = "light", **options: Any) -> Opened:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, **options
        )
        contexts.append(context)
        found = Opened(context.new_page(), url.partition("/#")[0].rstrip("/"), pictures)

        def asked(request: Any) -> None:
            if not request.url.startswith(found.origin + "/"):
                found.elsewhere.append(request.url)

        found.page.on("request", asked)
        found.page.on("console", lambda message: found.complaints.append(message.text))
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.goto(url)
        return found

    yield open_it
    for context in contexts:
        context.close()


@contextmanager
def joined(server: Process, url: str, clients: str = "0-7") -> Iterator[None]:
    token = server.folder.with_name(server.folder.name + ".keys") / "operator.token"
    with command("join", url, "--token-file", str(token), "--clients", clients):
        yield


LIVE = (
    "default",
    "--strategy",
    "fedasync",
    "--port",
    "0",
    "--set",
    "measure.versions=5",
    "--set",
    "measure.time=0.5",
)


def test_a_live_run_moves_on_the_page(tmp_path: Path, opened: Open) -> None:
    with Process(tmp_path / "run", LIVE) as server:
        url = server.url
        found = opened(f"{url}/#token={server.token}")
        tab = found.page
        found.until("document.getElementById('state').textContent === 'serving'")
        assert tab.evaluate("location.href") == f"{url}/"  # the token is not left in the address
        with joined(server, url):
            found.until("document.querySelectorAll('#shares li').length >= 8")
            found.until(
                "/([1-9][0-9]|[4-9]) measurements/.test(document.getElementById('n-accuracy').textContent)"
            )
            before = {name: found.pixels(name) for name in CARDS}
            updates, accuracy = found.number("Updates"), tab.inner_text("#n-accuracy")
            assert updates > 0 and found.number("Version") > 0 and found.number("Accuracy") > 0
            assert all(found.colours(name) > 3 for name in CARDS)
            # Data moves, and so do the pixels.
            tab.evaluate("text => { window.before = text; }", accuracy)
            found.until("document.getElementById('n-accuracy').textContent !== window.before")
            until(lambda: found.number("Updates") > updates + 20)
            for name in CARDS:
                until(lambda name=name: found.pixels(name) != before[name])
            until(lambda: tab.locator("#timeline").get_attribute("aria-label").startswith("8 clients"))
            found.shot("live-light-1440")
            # The other theme, by the switch, and back.
            assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == PAPER["light"]
            light = found.pixels("accuracy")
            tab.click("#theme")
            assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == PAPER["dark"]
            until(lambda: found.pixels("accuracy") != light)
            found.shot("live-dark-1440")
            # A phone: one column, nothing to scroll sideways.
            tab.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
            found.until("document.getElementById('accuracy').getBoundingClientRect().width < 370")
            assert tab.evaluate("document.documentElement.scrollWidth") == PHONE[0]
            tab.evaluate("document.getElementById('timeline').scrollIntoView()")
            until(lambda: found.colours("timeline") > 3)
            found.shot("live-dark-390")
            tab.click("#theme")
            found.shot("live-light-390")
        found.clean()
        # Refused, by reason: an update that is none.
        import httpx

        headers = {"Authorization": f"Bearer {server.token}"}
        with httpx.Client(base_url=url, headers=headers) as http:
            task = http.post("/v1/tasks", params={"client": 9}).json()
            place = f"/v1/tasks/{task['number']}/update"
            query = {"lease": task["lease"], "examples": 1}
            sent = http.put(
                place, params=query, content=b"no", headers={"Content-Type": "application/octet-stream"}
            )
            assert sent.status_code == 422
        found.until("document.getElementById('refusals').textContent.includes('malformed')")
        found.clean()


def test_it_asks_for_a_token_and_comes_back_after_a_restart(tmp_path: Path, opened: Open) -> None:
    arguments = [*LIVE]
    with Process(tmp_path / "run", arguments) as server:
        url = server.url
        found = opened(url)
        tab = found.page
        tab.wait_for_selector("#ask:visible")
        assert tab.evaluate("document.activeElement.id") == "token"
        found.shot("token-light-1440")
        tab.fill("#token", "wrong")
        tab.keyboard.press("Enter")
        found.until("document.getElementById('wrong').textContent.includes('not valid')")
        tab.fill("#token", server.token)
        tab.keyboard.press("Enter")
        found.until("document.getElementById('state').textContent === 'serving'")
        with joined(server, url):
            until(lambda: found.number("Updates") >= 10)
        seen = found.number("Updates")
        server.kill()
        found.until("document.getElementById('state').textContent === 'reconnecting'")
        arguments[arguments.index("0")] = url.rpartition(":")[2]
    with Process(tmp_path / "run", arguments) as server:
        assert server.url == url
        found.until("document.getElementById('state').textContent === 'serving'")
        with joined(server, url):
            until(lambda: found.number("Updates") >= seen + 10)
        # Rows that were told again after the restart were not counted again.
        counted = tab.evaluate("document.getElementById('n-staleness').textContent")
        told = int(counted.split(" · ")[-1].removesuffix(" updates").replace(",", ""))
        rows = [r for r in told_rows(url, server.token) if r["kind"] == "receipt"]
        assert told <= len(rows)
        # A reload needs no token again; another tab does.
        tab.reload()
        found.until("document.getElementById('state').textContent === 'serving'")
    assert found.elsewhere == []
    assert not [text for text in found.complaints if not text.startswith("Failed to load resource")]


def test_what_privacy_costs_is_shown_where_it_is_on(tmp_path: Path, opened: Open) -> None:
    pytest.importorskip("dp_accounting")
    arguments = ("default", "--strategy", "fedbuff", "--set", "strategy.size=4", "--clip", "1.0", *LIVE[3:])
    with Process(tmp_path / "run", arguments) as server:
        found = opened(f"{server.url}/#token={server.token}", scheme="dark")
        with joined(server, server.url):
            found.until("document.getElementById('n-epsilon').textContent.includes('steps of one client')")
            until(lambda: found.number("Epsilon") > 5 and found.colours("epsilon") > 3)
            found.shot("privacy-dark-1440")
        found.clean()


def told_rows(url: str, token: str) -> list[dict[str, Any]]:
    import httpx

    reply = httpx.get(
        f"{url}/v1/history", headers={"Authorization": f"Bearer {token}"}, params={"limit": 20000}
    )
    rows: list[dict[str, Any]] = reply.json()["rows"]
    return rows


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("played") / "run"
    table = read(presets()["default"])
    (chosen,) = experiment(table, strategy="mr-asyncfl", settings=["stop.time=20"]).runs
    for _ in run(prepare(chosen), folder):
        pass
    return folder


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_finished_run_is_played(played: Path, opened: Open, scheme: str, size: tuple[int, int]) -> None:
    summary = [json.loads(line) for line in (played / "metrics.jsonl").read_text().splitlines()]
    with watched(played) as url:
        found = opened(url, size, scheme)
        tab = found.page
        found.until("document.getElementById('state').textContent === 'replay'")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == PAPER[scheme]
        first = found.number("Updates")
        until(lambda: found.number("Updates") > first)
        tab.click("#play")
        found.until("document.getElementById('state').textContent === 'paused'")
        paused = tab.input_value("#position")
        move(tab, "#position", 500)
        found.until("/^[0-9.]+ of/.test(document.getElementById('at').textContent)")
        until(lambda: tab.inner_text("#at").startswith("10 of 20"))
        middle = found.number("Updates")
        assert middle > first and tab.input_value("#position") != paused
        found.shot(f"replay-{scheme}-{size[0]}")
        move(tab, "#position", 100)
        until(lambda: 0 < found.number("Updates") < middle)  # back in time: everything is as it was
        move(tab, "#speed", 100)
        tab.click("#play")
        found.until("document.getElementById('state').textContent === 'finished'")
        until(lambda: found.number("Updates") == summary[-1]["updates"])
        assert found.number("Version") == summary[-1]["version"]
        assert found.number("Accuracy") == pytest.approx(100 * summary[-1]["accuracy"], abs=0.51)
        assert tab.evaluate("document.documentElement.scrollWidth") == size[0]
        found.clean()


def test_frames_without_any_room_do_no_harm(played: Path, opened: Open) -> None:
    with watched(played) as url:
        found = opened(url)
        tab = found.page
        found.until("document.getElementById('state').textContent === 'replay'")
        until(lambda: found.number("Updates") > 100)  # every chart has something to draw
        for style in ("display: none", "width: 12px", "height: 3px; overflow: hidden"):
            tab.evaluate("style => { document.getElementById('page').style = style; }", style)
            time = tab.inner_text("#at")
            tab.evaluate("time => { window.before = time; }", time)
            found.until("document.getElementById('at').textContent !== window.before")
        tab.evaluate("document.getElementById('page').style = ''")
        until(lambda: all(found.colours(name) > 3 for name in CARDS))
        found.clean()


def test_keys_and_labels_are_enough(played: Path, opened: Open) -> None:
    with watched(played) as url:
        found = opened(url, reduced_motion="reduce")  # no motion: it opens at the end, and does not play
        tab = found.page
        found.until("document.getElementById('state').textContent === 'finished'")
        nameless = tab.evaluate(
            """() => {
            const text = e => e.ariaLabel || e.labels?.length || e.textContent.trim();
            const named = e => text(e) || e.hasAttribute('aria-labelledby');
            return [...document.querySelectorAll('button, input, select, canvas, [tabindex]')]
                .filter(e => e.checkVisibility() && !named(e)).map(e => e.id); }"""
        )
        assert nameless == []
        tab.focus("#accuracy")
        note = tab.inner_text("#n-accuracy")
        tab.keyboard.press("ArrowLeft")
        until(lambda: "accuracy" in tab.inner_text("#n-accuracy") and tab.inner_text("#n-accuracy") != note)
        tab.focus("#play")
        tab.keyboard.press("Enter")
        found.until("document.getElementById('state').textContent === 'replay'")
        assert contrasts(tab) >= 4.5
        tab.click("#theme")
        assert contrasts(tab) >= 4.5
        found.clean()


def test_names_from_elsewhere_stay_text(tmp_path: Path, opened: Open) -> None:
    rows_of(tiny(), tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    evil = "<img src=x onerror=alert(1)>"
    config.write_text(config.read_text().replace('label = "tiny"', f'label = "{evil}"'))
    with watched(tmp_path / "run") as url:
        found = opened(url)
        found.until("document.getElementById('name').textContent.includes('onerror')")
        assert found.page.inner_text("#name") == evil and found.page.locator("#name img").count() == 0
        found.clean()


def test_thousands_of_clients_stay_fluid(tmp_path: Path, opened: Open) -> None:
    folder, clients, count = tmp_path / "run", 5000, 60_000
    rows_of(tiny(), folder)
    started = [(client % 97) / 97 for client in range(clients)]
    receipts = []
    for number in range(count):
        client = number % clients
        arrived = number / 1000 + 5.0
        stale = (client * 7 + number) % 23
        receipts.append(
            Receipt(
                number,
                client,
                max(0, number - stale),
                started[client],
                arrived,
                1,
                4,
                stale,
                0.1,
                True,
                number + 1,
            )
        )
        started[client] = arrived
    receipts.sort(key=lambda receipt: receipt.arrived)
    write_receipts(receipts, folder / "receipts" / "00000.parquet")
    metrics = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(metrics[0])  # before the first update: true of any run
    with watched(folder) as url:
        found = opened(url)
        tab = found.page
        found.until("document.getElementById('state').textContent === 'replay'")
        move(tab, "#position", 900)
        found.until("document.getElementById('state').textContent === 'paused'")
        # 0.9 of 64.999: those that arrived until 58.4991
        assert tab.inner_text("#at") == "58.5 of 65" and found.number("Updates") == 53_500
        until(lambda: tab.inner_text("#n-timeline").startswith("5,000 clients"))
        tab.click("#play")
        # Frames while it plays, each of the ways to look at it.
        for act in (lambda: None, lambda: tab.click("#fit"), lambda: tab.select_option("#window", "")):
            act()
            millis = tab.evaluate(
                """() => new Promise(done => { const begun = performance.now(); let n = 0;
                const step = () => ++n === 30 ? done((performance.now() - begun) / 30) : requestAnimationFrame(step);
                requestAnimationFrame(step); })"""
            )
            assert millis < 150  # of a browser without a graphics card, on a shared core
        tab.click("#play")
        found.shot("thousands-fitted-1440")
        tab.click("#fit")
        found.until("document.getElementById('scroller').scrollHeight > 30000")
        tab.evaluate("document.getElementById('scroller').scrollTop = 15000")
        found.shot("thousands-1440")
        drawn = int(tab.inner_text("#n-timeline").split(" · ")[1].split()[0].replace(",", ""))
        assert 0 < drawn < 5000  # only rows in view
        assert base64.b64decode(found.pixels("timeline").partition(",")[2])[:4] == b"\x89PNG"
        found.clean()
