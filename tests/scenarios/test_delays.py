"""Durations are positive, keyed, and distributed as their names say."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afield.core.errors import InputError
from afield.core.types import Scene
from afield.scenarios.delays import (
    DELAYS,
    RANGES,
    Categories,
    Constant,
    Exponential,
    ExponentialMix,
    LogNormal,
    Speeds,
    Trace,
    Uniform,
    Work,
)

SCENE = Scene(seed=1, sizes=[10 * (k + 1) for k in range(50)], work=[k + 1 for k in range(50)])
DRAWN = [
    Constant(),
    Uniform(),
    Exponential(),
    ExponentialMix(),
    LogNormal(sigma=10.0),
    Speeds(),
    Work(spread=0.5, noise=0.5),
    Categories(),
    Categories(level="mild"),
]


def draws(delay: Any, scene: Scene, client: int, count: int = 4000) -> list[float]:
    duration = delay.bind(scene)
    return [duration(client, k) for k in range(count)]


@settings(max_examples=100, deadline=None)
@given(
    delay=st.sampled_from(DRAWN),
    seed=st.integers(0, 2**40),
    client=st.integers(0, 49),
    count=st.integers(0, 10**6),
)
def test_a_duration_is_positive_and_depends_on_seed_client_and_count_only(
    delay: Any, seed: int, client: int, count: int
) -> None:
    scene = Scene(seed=seed, sizes=SCENE.sizes, work=SCENE.work)
    duration = delay.bind(scene)
    value = duration(client, count)
    assert 0 < value < math.inf
    duration((client + 1) % 50, count)  # a draw in between changes nothing
    assert duration(client, count) == value
    assert delay.bind(scene)(client, count) == value


@pytest.mark.parametrize("delay", DRAWN[1:])
def test_seeds_clients_and_counts_are_told_apart(delay: Any) -> None:
    duration = delay.bind(SCENE)
    base = duration(3, 7)
    assert duration(3, 8) != base
    assert duration(4, 7) != base
    assert delay.bind(Scene(seed=2, sizes=SCENE.sizes, work=SCENE.work))(3, 7) != base


def test_constant() -> None:
    assert {Constant(value=2.5).bind(SCENE)(c, k) for c in range(3) for k in range(3)} == {2.5}


def test_uniform_fills_its_range() -> None:
    values = draws(Uniform(low=2.0, high=6.0), SCENE, 0)
    assert 2.0 <= min(values) < 2.01
    assert 5.99 < max(values) < 6.0
    assert statistics.fmean(values) == pytest.approx(4.0, abs=0.08)  # standard error 0.018
    assert draws(Uniform(low=3.0, high=3.0), SCENE, 0, 3) == [3.0] * 3


def test_exponential_has_its_mean_and_tail() -> None:
    values = draws(Exponential(mean=5.0), SCENE, 0)
    assert statistics.fmean(values) == pytest.approx(5.0, rel=0.08)
    assert sum(v > 10.0 for v in values) / len(values) == pytest.approx(math.exp(-2), abs=0.025)


def test_lognormal_has_its_median_and_sigma() -> None:
    logs = [math.log(v) for v in draws(LogNormal(median=3.0, sigma=0.8), SCENE, 0)]
    assert statistics.median(logs) == pytest.approx(math.log(3.0), abs=0.07)
    assert statistics.pstdev(logs) == pytest.approx(0.8, rel=0.06)


def test_speeds_differ_between_clients_more_than_within() -> None:
    scene = Scene(seed=4, sizes=[1] * 400)
    duration = Speeds(median=2.0, spread=0.7, noise=0.05).bind(scene)
    logs = [[math.log(duration(client, k)) for k in range(20)] for client in range(400)]
    means = [statistics.fmean(own) for own in logs]
    assert statistics.fmean(means) == pytest.approx(math.log(2.0), abs=0.15)
    assert statistics.pstdev(means) == pytest.approx(0.7, rel=0.15)
    within = [statistics.stdev(own) for own in logs]
    assert statistics.fmean(within) == pytest.approx(0.05, rel=0.1)
    still = Speeds(spread=0.7, noise=0.0).bind(scene)
    assert {still(5, k) for k in range(10)} == {still(5, 0)}


def test_work_is_proportional_to_steps_else_to_examples() -> None:
    work = Work(seconds_per_step=0.5)
    assert work.bind(Scene(seed=0, sizes=[100, 7], work=[4, 12]))(1, 0) == 6.0
    assert work.bind(Scene(seed=0, sizes=[100, 7]))(1, 0) == 3.5
    assert work.bind(Scene(seed=0, sizes=[5], work=[0]))(0, 0) == 0.5  # never 0 seconds
    with pytest.raises(InputError, match="work is known of 1 clients and there are 2"):
        work.bind(Scene(seed=0, sizes=[5, 6], work=[1]))


def test_the_exponential_mix_has_exactly_its_share_of_slow_clients() -> None:
    scene = Scene(seed=3, sizes=[1] * 40)
    duration = ExponentialMix(fast=0.5, slow=50.0, slow_share=0.2).bind(scene)
    means = [statistics.fmean(duration(client, k) for k in range(300)) for client in range(40)]
    slow = [mean for mean in means if mean > 10]
    assert len(slow) == 8
    assert statistics.fmean(slow) == pytest.approx(50.0, rel=0.1)
    assert statistics.fmean(mean for mean in means if mean <= 10) == pytest.approx(0.5, rel=0.1)
    other = ExponentialMix(fast=0.5, slow=50.0, slow_share=0.2).bind(Scene(seed=9, sizes=[1] * 40))
    assert [statistics.fmean(other(c, k) for k in range(300)) > 10 for c in range(40)] != [
        m > 10 for m in means
    ]


# ---- FedEcho's categories


@pytest.mark.parametrize("level", ["large", "mild"])
def test_categories_draw_from_the_papers_table(level: str) -> None:
    delay = Categories(level=level)
    duration, found = delay.bind(SCENE), delay.categories(SCENE)
    assert (found.count(0), found.count(1), found.count(2)) == (30, 15, 5)
    for client, category in enumerate(found):
        low, high = RANGES[level][category]
        values = [duration(client, k) for k in range(50)]
        assert 10 * low <= min(values)
        assert max(values) < 10 * high
        assert max(values) - min(values) > 0.7 * 10 * (high - low)
    assert RANGES["large"][2] == (50.0, 80.0)
    assert RANGES["mild"][2] == (10.0, 20.0)


@settings(max_examples=50, deadline=None)
@given(
    clients=st.integers(1, 200), share=st.floats(0, 0.5), gamma=st.floats(0, 100), seed=st.integers(0, 999)
)
def test_no_more_than_the_share_is_long(clients: int, share: float, gamma: float, seed: int) -> None:
    scene = Scene(seed=seed, sizes=[(7 * k) % 13 + 1 for k in range(clients)])
    found = Categories(long_share=share, gamma=gamma).categories(scene)
    long = found.count(2)
    assert long <= share * clients + 1e-6
    assert long > share * clients - 1


def test_a_small_gamma_ties_the_category_to_the_size() -> None:
    by_size = Categories(gamma=0.0).categories(SCENE)
    assert by_size == [0] * 30 + [1] * 15 + [2] * 5  # sizes rise with the client's number

    def mean_rank_of_long(gamma: float) -> float:
        ranks = []
        for seed in range(40):
            found = Categories(gamma=gamma).categories(Scene(seed=seed, sizes=SCENE.sizes))
            ranks += [client for client, category in enumerate(found) if category == 2]
        return statistics.fmean(ranks)

    ranks = [mean_rank_of_long(gamma) for gamma in (0.0, 0.3, 1.0, 1000.0)]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] == 47.0
    assert ranks[-1] == pytest.approx(24.5, abs=4)  # 200 uniform draws of 0..49: standard error 1


def test_equal_sizes_leave_the_category_to_the_seed() -> None:
    a, b = (Categories(gamma=0.0).categories(Scene(seed=seed, sizes=[5] * 50)) for seed in (0, 1))
    assert a != b
    assert sorted(a) == sorted(b)


# ---- traces


def test_a_trace_is_used_in_turn_and_wraps_around(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("client,duration,note\n1,10\n0,1.5,x\n\n1,20\n1,30\n", encoding="utf-8")
    duration = Trace(file=str(file)).bind(Scene(seed=0, sizes=[1, 1]))
    assert [duration(1, k) for k in range(5)] == [10, 20, 30, 10, 20]
    assert [duration(0, k) for k in range(2)] == [1.5, 1.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,duration\n0,1\n7,1\n", r"line 3: client 7 is unknown; there are clients 0\.\.1"),
        ("client,duration\n0,1\n-1,1\n", r"line 3: client -1 is unknown"),
        ("client,duration\n0,1\n1,soon\n", r"line 3: '1,soon' is not a row of numbers client,duration"),
        ("client,duration\n0,1\n1\n", r"line 3: '1,None' is not"),
        ("client,duration\n\n0,0\n", r"line 3: duration 0\.0 is outside \(0, inf\)"),
        ("client,duration\n0,nan\n", r"line 2: duration nan is outside"),
        ("client,duration\n0,1\n", r"client 1 has no row"),
        ("client,seconds\n0,1\n", r"line 1: no column 'duration'; the header must be client,duration"),
        ("", r"line 1: no column 'client'"),
    ],
)
def test_bad_traces_are_refused_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        Trace(file=str(file)).bind(Scene(seed=0, sizes=[1, 1]))


def test_a_trace_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names no trace"):
        Trace().bind(SCENE)
    with pytest.raises(InputError, match="cannot be read"):
        Trace(file=str(tmp_path / "none.csv")).bind(SCENE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(value=0.0), r"value = 0\.0 is outside \(0, inf\)"),
        (lambda: Constant(value=math.inf), r"value = inf is outside"),
        (lambda: Uniform(low=0.0), r"low = 0\.0 is outside"),
        (lambda: Uniform(low=2.0, high=1.0), r"high = 1\.0 is outside \[2, inf\)"),
        (lambda: Exponential(mean=-1.0), r"mean = -1\.0"),
        (lambda: ExponentialMix(slow_share=1.5), r"slow_share = 1\.5 is outside \[0, 1\]"),
        (lambda: LogNormal(sigma=-0.1), r"sigma = -0\.1 is outside"),
        (lambda: Speeds(spread=11.0), r"spread = 11\.0 is outside \[0, 10\]"),
        (lambda: Work(seconds_per_step=0), r"seconds_per_step = 0 is outside"),
        (lambda: Categories(level="huge"), r"level = 'huge' is not known"),
        (lambda: Categories(level="larg"), r"did you mean 'large'\?"),
        (lambda: Categories(gamma=math.inf), r"gamma = inf is outside"),
        (lambda: Categories(long_share=0.5, medium_share=0.6), r"medium_share = 0\.6 is outside \[0, 0\.5\]"),
    ],
)
def test_bad_fields_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_every_delay_is_registered_and_has_a_line_to_show() -> None:
    assert set(DELAYS) == {
        *("constant", "uniform", "exponential", "exponential-mix", "lognormal"),
        *("speeds", "work", "categories", "trace"),
    }
    for config in DELAYS.values():
        assert config.__doc__
        assert eval(repr(config()), {config.__name__: config}) == config()
