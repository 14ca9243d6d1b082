"""Every sentence of the paragraph: data that make it true, word for word, and data where it would be false."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from folders import made

from afield.reports.digest import facts_of
from afield.reports.load import Run
from afield.reports.words import SENTENCES, paragraph

Make = Callable[..., Run]
SLOW_CLASS = [[1, 0]] * 9 + [[0, 1]]  # the slowest of ten clients alone has class 1


@pytest.fixture
def run(tmp_path: Path) -> Make:
    numbers = iter(range(100))
    return lambda *arguments, **options: made(tmp_path / str(next(numbers)), *arguments, **options)


def reaching(run: Make, label: str, times: Sequence[float | None], **options: Any) -> list[Run]:
    """A seed per time at which 0.8 is reached (None: never): evaluations at 0, that time, and twice that."""
    return [
        run(label, seed, (0.1, 0.8, 0.9) if time else (0.1, 0.2, 0.3), every=time or 1.0, **options)
        for seed, time in enumerate(times)
    ]


def said(name: str, runs: Sequence[Run], target: float = 0.8) -> str | None:
    text = SENTENCES[name](facts_of(runs, target))
    assert (text in paragraph(facts_of(runs, target))) == (text is not None)
    return text


def test_all_sentences_are_tested() -> None:
    """By name: a sentence that is added needs its test here."""
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(SENTENCES) <= tests


def test_first_to_target(run: Make) -> None:
    quick, slow = reaching(run, "quick", [4.0]), reaching(run, "slow", [10.0])
    assert said("first_to_target", quick + slow) == (
        "quick was first to reach 80 %, in 40 % of slow's time (4 against 10 in virtual time)."
    )
    # Three seeds at 4 ± 1 against 10 ± 1: the half interval is 4.303 / sqrt(3) = 2.5; a third is a tie at 4.5.
    runs = [r for name, at in (("q", 4.0), ("s", 10.0)) for r in reaching(run, name, [at - 1, at, at + 1])]
    near = reaching(run, "near", [3.5, 4.5, 5.5])
    assert said("first_to_target", runs + near) == (
        "q reached 80 % in 40 % of s's time (4 ± 2.5 against 10 ± 2.5 in virtual time); "
        "near cannot be told apart from it over these seeds."
    )
    assert said("first_to_target", quick) is None  # nobody to compare with
    assert said("first_to_target", quick + reaching(run, "never", [None])) is None
    assert said("first_to_target", quick + reaching(run, "same", [4.0])) is None
    assert said("first_to_target", runs[:3] + near) is None  # all within noise
    # Reached in one of two seeds: its mean is over the lucky one.
    assert said("first_to_target", slow + reaching(run, "lucky", [1.0, None])) is None


def test_no_first(run: Make) -> None:
    a, b = reaching(run, "a", [3.0, 4.0, 5.0]), reaching(run, "b", [3.5, 4.5, 5.5])
    assert said("no_first", a + b) == "These seeds cannot tell who of a and b was first to reach 80 %."
    assert said("no_first", a + reaching(run, "c", [13.0, 14.0, 15.0])) is None
    assert said("no_first", a) is None
    assert said("no_first", a[:1] + reaching(run, "d", [9.0])) is None  # one seed each: a lead, perhaps luck


def test_never(run: Make) -> None:
    there, lost = reaching(run, "there", [2.0]), reaching(run, "lost", [None, None])
    some = reaching(run, "some", [2.0, None, None])
    assert said("never", there + lost) == "lost never reached 80 %."
    assert said("never", there + some) == "some reached 80 % in 1 of 3 seeds only."
    both = "lost never reached 80 %; some reached it in 1 of 3 seeds only."
    assert said("never", lost + some) == both
    assert said("never", there) is None


def test_best_at_the_end(run: Make) -> None:
    def ending(label: str, *finals: float) -> list[Run]:
        return [run(label, seed, (0.1, final)) for seed, final in enumerate(finals)]

    one = ending("a", 0.9) + ending("b", 0.85) + ending("c", 0.5)
    assert (
        said("best_at_the_end", one) == "At the end a had the best accuracy, 90.0 %, 5.0 points ahead of b."
    )
    # 0.02 apart with a standard deviation of 0.02: see test_tables for the same numbers by scipy.
    best, tie, worse = (
        ending("x", 0.82, 0.86, 0.84),
        ending("y", 0.80, 0.82, 0.84),
        ending("z", 0.2, 0.21, 0.22),
    )
    assert said("best_at_the_end", best + tie + worse) == (
        "At the end x had the best accuracy, 84.0 ± 5.0 %; y cannot be told apart from it over these seeds."
    )
    assert said("best_at_the_end", best + tie) == (
        "At the end none can be told apart from the best mean, 84.0 ± 5.0 %, over these seeds."
    )
    assert said("best_at_the_end", best) is None
    assert said("best_at_the_end", best + ending("nan", math.nan)) is None


def test_cheapest(run: Make) -> None:
    first = reaching(run, "first", [1.0], bytes_each=3000)
    frugal = reaching(run, "frugal", [5.0], bytes_each=1000)
    assert said("cheapest", first + frugal) == (
        "frugal needed the fewest bytes for it: first received 3.0 times as many."
    )
    assert said("cheapest", first + reaching(run, "greedy", [5.0], bytes_each=9000)) is None  # the first is
    assert said("cheapest", first + reaching(run, "same", [5.0], bytes_each=3000)) is None
    assert said("cheapest", first + reaching(run, "never", [None], bytes_each=1)) is None
    assert said("cheapest", first) is None


def served(run: Make, label: str, seed: int, fast: float, slow: float, **options: Any) -> Run:
    """Nine fast clients are right on `fast`, the slowest on `slow`: the mean client on 0.9 fast + 0.1 slow."""
    return run(label, seed, per_class=(fast, slow), labels=options.pop("labels", SLOW_CLASS), **options)


def test_left_behind(run: Make) -> None:
    bad, good = served(run, "bad", 0, 0.9, 0.4), served(run, "good", 0, 0.9, 0.9)
    # 0.9 * 0.9 + 0.1 * 0.4 = 0.85, which is 45 points above 0.4.
    assert said("left_behind", [good, bad]) == (
        "The slowest tenth of the clients lost 45.0 points under bad: its model is right on 40.0% of data like "
        "theirs, on 85.0% for the mean client."
    )
    assert said("left_behind", [good]) is None
    assert said("left_behind", [served(run, "better", 0, 0.5, 0.9)]) is None
    assert said("left_behind", [served(run, "near", 0, 0.9, 0.892)]) is None  # 0.72 points
    # -45, +18 points: the interval of the mean has both signs.
    assert said("left_behind", [bad, served(run, "bad", 1, 0.7, 0.9)]) is None
    assert said("left_behind", [served(run, "swap", 0, 0.9, 0.4, relabelled=True)]) is None
    # The same clients, but the one with class 1 is the fastest.
    turned = served(run, "turned", 0, 0.9, 0.4, duration=[*range(1, 10), 0])
    assert said("left_behind", [turned]) is None


def test_nobody_left_behind(run: Make) -> None:
    good = served(run, "good", 0, 0.9, 0.9)
    told = "Nobody left the slowest tenth of the clients a point or more behind the mean client."
    assert said("nobody_left_behind", [good]) == told
    assert said("nobody_left_behind", [good, served(run, "bad", 0, 0.9, 0.4)]) is None
    assert said("nobody_left_behind", [good, run("unknown")]) is None
    # 0.0 and +2.7 points on average 1.35, but the interval of two seeds reaches far below.
    assert said("nobody_left_behind", [good, served(run, "good", 1, 0.9, 0.93)]) is None


def test_busiest(run: Make) -> None:
    # Client 3 of ten sends 6 of 10 updates.
    busy = run("busy", senders=[3] * 6 + [0, 1, 2, 4])
    assert (
        said("busiest", [busy, run("even")]) == "Under busy a tenth of the clients sent 60 % of the updates."
    )
    assert said("busiest", [run("even")]) is None
    assert (
        said("busiest", [run("few", clients=3, senders=[0, 0, 1, 2])]) is None
    )  # a tenth of three is nobody
    # Its five others were refused, and everybody else's first was not.
    others = [client for client in range(10) if client != 3]
    assert said("busiest", [run("refused", senders=[3] * 6 + others, refused=range(1, 6))]) is None


def test_silent(run: Make) -> None:
    assert (
        said("silent", [run("some", senders=[0, 1, 2, 3]), run("all")])
        == "some used nothing from 6 of 10 clients."
    )
    assert said("silent", [run("all")]) is None
    assert said("silent", [run("late", refused=[9])]) == "late used nothing from 1 of 10 clients."
    assert said("silent", [run("no", senders=[])]) is None  # no receipts: nothing is known


def test_why_steps_err(run: Make) -> None:
    # Over the second half of three evaluations, the last two: noise 8 of 10.
    noisy = run("noisy", terms=[(0.0, 100.0, 0.0), (4.0, 0.5, 0.5), (4.0, 0.5, 0.5)])
    assert (
        said("why_steps_err", [noisy])
        == "Most of the error of the steps in the second half was noise for noisy (80 %)."
    )
    even = run("even", terms=[(1.0, 1.0, 1.0)] * 3)
    assert said("why_steps_err", [even, run("none")]) is None


def test_diverged(run: Make) -> None:
    assert said("diverged", [run("bad", loss=math.nan), run("good")]) == (
        "bad diverged: a loss or accuracy ended as no finite number."
    )
    assert said("diverged", [run("good")]) is None


def test_one_seed(run: Make) -> None:
    one, two = [run("a")], [run("b", 0), run("b", 1)]
    assert (
        said("one_seed", one + two)
        == "a was run with one seed, so nobody knows how much of a difference is luck."
    )
    assert said("one_seed", [*one, run("c")]) == (
        "Each was run with one seed, so nobody knows how much of a difference is luck."
    )
    assert said("one_seed", two) is None
    assert said("one_seed", one) is None  # there is no difference


def test_unfinished(run: Make) -> None:
    young = run("a", 1, finished=False)
    assert (
        said("unfinished", [run("a"), young]) == "1 of 2 runs is unfinished: these numbers may still change."
    )
    assert said("unfinished", [run("a")]) is None


def test_mixed_settings(run: Make) -> None:
    a, b = run("a", 0, settings="rate = 0.1"), run("a", 1, settings="rate = 0.2")
    told = "Runs labelled a differ in rate, so that their mean mixes settings."
    assert said("mixed_settings", [a, b]) == told
    assert (
        said("mixed_settings", [a, run("b", settings="rate = 0.2"), run("a", 1, settings="rate = 0.1")])
        is None
    )
