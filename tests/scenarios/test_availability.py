"""`until` is exactly when the answer changes, and answers do not depend on what was asked before."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afield.core.errors import InputError
from afield.core.types import Scene
from afield.scenarios.availability import AVAILABILITIES, Always, Bernoulli, Diurnal, Dropout, OnOff, Trace

SCENE = Scene(seed=5, sizes=[1] * 20)
CHANGING = [
    Bernoulli(),
    Bernoulli(p=0.9, period=0.1),
    Bernoulli(p=0.05, period=7.3),
    OnOff(),
    OnOff(on=0.3, off=4.0),
    Diurnal(),
    Diurnal(day=0.7, hours=0.1, spread=0.0),
    Diurnal(day=86400.0, hours=86399.0, spread=0.5),
]


@settings(max_examples=150, deadline=None)
@given(
    availability=st.sampled_from([*CHANGING, Always(), Dropout(), Dropout(share=0.3, at=0.0, back=40.0)]),
    client=st.integers(0, 19),
    now=st.floats(0, 500),
    part=st.floats(0, 1, exclude_max=True),
)
def test_until_is_when_the_answer_changes_and_not_before(
    availability: Any, client: int, now: float, part: float
) -> None:
    presence = availability.bind(SCENE)
    online, until = presence(client, now)
    assert until > now
    if until == math.inf:
        assert presence(client, now + 1e6) == (online, math.inf)
        return
    inside = now + part * (until - now)
    if inside < until:
        assert presence(client, inside) == (online, until)
    assert presence(client, math.nextafter(until, -math.inf)) == (online, until)
    assert presence(client, until)[0] is not online


@pytest.mark.parametrize("availability", CHANGING)
def test_a_walk_from_change_to_change_alternates(availability: Any) -> None:
    presence = availability.bind(SCENE)
    for client in range(3):
        now, last = 0.0, None
        for _ in range(300):
            online, until = presence(client, now)
            assert online is not last
            assert until > now
            now, last = until, online


@settings(max_examples=50, deadline=None)
@given(
    availability=st.sampled_from(CHANGING),
    asked=st.lists(st.tuples(st.integers(0, 19), st.floats(0, 300)), min_size=1, max_size=20),
)
def test_answers_do_not_depend_on_the_order_of_the_questions(
    availability: Any, asked: list[tuple[int, float]]
) -> None:
    presence = availability.bind(SCENE)
    forward = {question: presence(*question) for question in asked}
    other = availability.bind(SCENE)
    backward = {question: other(*question) for question in sorted(asked, key=lambda q: -q[1])}
    assert forward == backward
    assert {question: presence(*question) for question in asked} == forward


@pytest.mark.parametrize("availability", [Bernoulli(), OnOff(), Diurnal()])
def test_clients_and_seeds_are_told_apart(availability: Any) -> None:
    def profile(seed: int, client: int) -> list[bool]:
        presence = availability.bind(Scene(seed=seed, sizes=[1] * 20))
        return [presence(client, float(now))[0] for now in range(200)]

    assert profile(0, 0) != profile(0, 1)
    assert profile(0, 0) != profile(1, 0)
    assert profile(0, 0) == profile(0, 0)


def test_always() -> None:
    assert Always().bind(SCENE)(3, 1e9) == (True, math.inf)


@pytest.mark.parametrize("p", [0.5, 0.8, 0.03])
def test_bernoulli_slots_are_independent_with_probability_p(p: float) -> None:
    presence = Bernoulli(p=p, period=2.0).bind(SCENE)
    slots = [presence(client, 2.0 * k + 1.0)[0] for client in range(20) for k in range(500)]
    assert sum(slots) / len(slots) == pytest.approx(p, abs=0.02)  # standard error at most 0.005
    pairs = list(itertools.pairwise(slots))
    both = sum(a and b for a, b in pairs) / len(pairs)
    assert both == pytest.approx(p * p, abs=0.02)
    first = [Bernoulli(p=p).bind(Scene(seed=s, sizes=[1]))(0, 0.0)[0] for s in range(2000)]
    assert sum(first) / 2000 == pytest.approx(p, abs=0.05)


def test_bernoulli_changes_at_the_ends_of_slots() -> None:
    presence = Bernoulli(p=0.5, period=0.1).bind(SCENE)
    now = 0.0
    for _ in range(500):
        now = presence(0, now)[1]
        assert now == round(now / 0.1) * 0.1


@pytest.mark.parametrize(("p", "online"), [(0.0, False), (1.0, True)])
def test_bernoulli_without_chance_never_changes(p: float, online: bool) -> None:
    assert Bernoulli(p=p).bind(SCENE)(0, 3.0) == (online, math.inf)


def test_bernoulli_answers_at_once_however_rare_a_change_is() -> None:
    for p in (1e-12, 1 - 1e-12, 1e-300):
        online, until = Bernoulli(p=p).bind(SCENE)(0, 0.0)
        assert online is (p > 0.5)
        assert 1e6 < until < math.inf


def test_on_off_has_its_means_and_starts_in_equilibrium() -> None:
    presence = OnOff(on=10.0, off=5.0).bind(SCENE)
    lengths: dict[bool, list[float]] = {True: [], False: []}
    for client in range(20):
        _, now = presence(client, 0.0)
        for _ in range(200):
            online, until = presence(client, now)
            lengths[online].append(until - now)
            now = until
    assert sum(lengths[True]) / 2000 == pytest.approx(10.0, rel=0.1)  # standard error 2.2 %
    assert sum(lengths[False]) / 2000 == pytest.approx(5.0, rel=0.1)
    many = OnOff(on=10.0, off=5.0).bind(Scene(seed=0, sizes=[1] * 3000))
    for now in (0.0, 1.0, 30.0):
        share = sum(many(client, now)[0] for client in range(3000)) / 3000
        assert share == pytest.approx(2 / 3, abs=0.04)


def test_on_off_moves_on_where_stretches_are_below_the_clocks_resolution() -> None:
    # Beside 1e17 a second is lost to rounding; asked there, the walk would not end without care.
    presence = OnOff(on=1e17, off=1e-3).bind(SCENE)
    now = 0.0
    for _ in range(20):
        _, until = presence(0, now)
        assert until > now
        now = until


def test_time_must_be_finite() -> None:
    for now in (math.inf, math.nan):
        with pytest.raises(InputError, match="ask at a finite time"):
            OnOff().bind(SCENE)(0, now)


def test_diurnal_is_a_window_a_day() -> None:
    presence = Diurnal(day=24.0, hours=8.0, spread=0.0).bind(SCENE)
    assert presence(0, 0.0) == (True, 8.0)
    assert presence(1, 7.5) == (True, 8.0)
    assert presence(2, 8.0) == (False, 24.0)
    assert presence(2, 49.0) == (True, 56.0)
    assert Diurnal(hours=24.0).bind(SCENE)(0, 5.0) == (True, math.inf)


def test_diurnal_windows_are_spread_over_part_of_the_day() -> None:
    scene = Scene(seed=0, sizes=[1] * 2000)

    def online_at(spread: float, now: float) -> float:
        presence = Diurnal(spread=spread).bind(scene)
        return sum(presence(client, now)[0] for client in range(2000)) / 2000

    for now in (100.0, 107.0, 115.0):
        assert online_at(1.0, now) == pytest.approx(1 / 3, abs=0.05)
    # Begins within the first 6 of 24 hours: all are online between 6 and 8, none from 14 on.
    assert online_at(0.25, 48 + 7.0) == 1.0
    assert online_at(0.25, 48 + 14.5) == 0.0


@pytest.mark.parametrize(("share", "clients"), [(0.5, 20), (0.33, 10), (0.0, 7), (1.0, 7), (0.5, 5)])
def test_dropout_is_exact(share: float, clients: int) -> None:
    presence = Dropout(share=share, at=100.0).bind(Scene(seed=1, sizes=[1] * clients))
    assert all(presence(client, 99.9)[0] for client in range(clients))
    gone = [client for client in range(clients) if not presence(client, 100.0)[0]]
    assert len(gone) == round(share * clients)
    for client in range(clients):
        if client in gone:
            assert presence(client, 0.0) == (True, 100.0)
            assert presence(client, 1e9) == (False, math.inf)
        else:
            assert presence(client, 0.0) == (True, math.inf)


def test_dropout_with_a_return() -> None:
    presence = Dropout(share=1.0, at=10.0, back=30.0).bind(SCENE)
    assert presence(0, 0.0) == (True, 10.0)
    assert presence(0, 10.0) == (False, 30.0)
    assert presence(0, 30.0) == (True, math.inf)


def test_who_drops_out_depends_on_the_seed() -> None:
    gone = [
        [Dropout().bind(Scene(seed=seed, sizes=[1] * 20))(client, 200.0)[0] for client in range(20)]
        for seed in (0, 1)
    ]
    assert gone[0] != gone[1]


# ---- traces


def test_a_trace_says_who_is_online(tmp_path: Path) -> None:
    file = tmp_path / "presence.csv"
    file.write_text("client,on,off\n0,20,30\n0,0,10\n0,5,12\n0,12,15\n1,3,inf\n", encoding="utf-8")
    presence = Trace(file=str(file)).bind(Scene(seed=0, sizes=[1, 1, 1]))
    assert presence(0, 0.0) == (True, 15.0)  # 0-10, 5-12 and 12-15 are one stretch
    assert presence(0, 12.0) == (True, 15.0)
    assert presence(0, 15.0) == (False, 20.0)
    assert presence(0, 20.0) == (True, 30.0)
    assert presence(0, 30.0) == (False, math.inf)
    assert presence(1, 0.0) == (False, 3.0)
    assert presence(1, 3.0) == (True, math.inf)
    assert presence(2, 0.0) == (False, math.inf)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=12))
def test_a_trace_is_the_union_of_its_rows(
    rows: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("trace") / "presence.csv"
    file.write_text("client,on,off\n" + "".join(f"0,{on},{on + length}\n" for on, length in rows))
    presence = Trace(file=str(file)).bind(Scene(seed=0, sizes=[1]))
    expected = [any(on <= now < on + length for on, length in rows) for now in range(45)]
    assert [presence(0, float(now))[0] for now in range(45)] == expected
    for now in range(44):
        online, until = presence(0, float(now))
        changes = [later for later in range(now, 45) if expected[later] is not online]
        assert until == (changes[0] if changes else math.inf)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,on,off\n0,5,5\n", r"line 2: on 5\.0 and off 5\.0; on must be finite and before off"),
        ("client,on,off\n0,nan,5\n", r"line 2: on nan"),
        ("client,on,off\n0,1,2\n3,1,2\n", r"line 3: client 3 is unknown"),
        ("client,on,off\n0,1\n", r"line 2: '0,1,None' is not a row of numbers client,on,off"),
        ("client,from,to\n0,1,2\n", r"line 1: no column 'on'"),
    ],
)
def test_bad_traces_are_refused_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "presence.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        Trace(file=str(file)).bind(Scene(seed=0, sizes=[1, 1]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bernoulli(p=1.1), r"p = 1\.1 is outside \[0, 1\]"),
        (lambda: Bernoulli(period=0.0), r"period = 0\.0 is outside"),
        (lambda: OnOff(on=0.0), r"on = 0\.0 is outside \(0, inf\)"),
        (lambda: OnOff(off=math.inf), r"off = inf is outside"),
        (lambda: Diurnal(hours=25.0), r"hours = 25\.0 is outside \(0, 24\]"),
        (lambda: Diurnal(spread=2.0), r"spread = 2\.0 is outside"),
        (lambda: Dropout(share=-0.1), r"share = -0\.1 is outside"),
        (lambda: Dropout(at=10.0, back=10.0), r"back = 10\.0 is outside \(10, inf\)"),
        (lambda: Trace().bind(SCENE), r"names no trace"),
    ],
)
def test_bad_fields_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_every_availability_is_registered_and_has_a_line_to_show() -> None:
    assert set(AVAILABILITIES) == {"always", "bernoulli", "on-off", "diurnal", "dropout", "trace"}
    for config in AVAILABILITIES.values():
        assert config.__doc__
        assert eval(repr(config()), {config.__name__: config}) == config()
