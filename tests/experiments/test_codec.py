"""The codec, on made-up dataclasses: what it reads, what it refuses and in which words, round trips."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar, Literal, Optional, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afield.core.errors import InputError, within
from afield.experiments.codec import assign, decode, dumps, encode, merge


class Curve(Protocol):
    """A registered kind. The codec never calls what it holds, so the made-up classes need no methods."""


class Wait(Protocol):
    """Another."""


@dataclass(frozen=True)
class Flat: ...


@dataclass(frozen=True)
class Power:
    power: float = 0.5
    offset: int = 1


@dataclass(frozen=True)
class Exponential:
    mean: float = 1.0

    def __post_init__(self) -> None:
        within("mean", self.mean, 0, math.inf)


@dataclass(frozen=True)
class Mixture:
    parts: tuple[Wait, ...] = (Exponential(),)  # registered things within a registered thing
    shares: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.shares):
            raise ValueError("give one share\nper part")


@dataclass(frozen=True)
class Mixing:
    alpha: float = 0.6
    weight: Curve = Power()
    kind: ClassVar[str] = "not a key of the table"

    def __post_init__(self) -> None:
        within("alpha", self.alpha, 0, 1, above=True)


@dataclass(frozen=True)
class Local:
    batch: int = 32
    rate: float = 0.1
    nesterov: bool = False
    method: Literal["sgd", "adamw"] = "sgd"
    steps: int | None = None
    epochs: Optional[int] = 1  # noqa: UP045 - the older spelling is supported too
    span: tuple[int, float] = (0, 1.0)
    layers: list[int] = field(default_factory=list)
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Whole:
    label: str
    clients: int
    wait: Wait
    mixing: Mixing = Mixing()
    local: Local = Local()
    ages: Mapping[int, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    second: Wait | None = None
    threshold: float | Literal["auto"] | tuple[int, ...] = "auto"
    variants: tuple[Local, ...] = ()
    limit: float | None = 3.0


REGISTRIES: dict[Any, Mapping[str, type]] = {
    Curve: {"flat": Flat, "power": Power},
    Wait: {"exponential": Exponential, "mixture": Mixture},
}
NEEDED = {"label": "run", "clients": 3, "wait": "exponential"}


def read(**table: Any) -> Whole:
    return decode(Whole, {**NEEDED, **table}, REGISTRIES)


def test_defaults_and_the_bare_name() -> None:
    assert read() == Whole(label="run", clients=3, wait=Exponential())


def test_every_kind_of_field() -> None:
    text = """
    label = "run"
    clients = 10
    limit = "none"
    threshold = [1, 2]
    wait = {name = "mixture", parts = ["exponential", {name = "exponential", mean = 4}], shares = [1, "inf"]}
    ages = {0 = 0.5, 7 = 1, -2 = 2.0}
    notes = {free = ["form", 1]}
    mixing = {alpha = 1, weight = {name = "power", power = -inf}}
    local = {nesterov = true, method = "adamw", steps = 5, span = [3, 4], layers = [1, 2], names = ["a"]}
    [[variants]]
    batch = 1
    [[variants]]
    """
    got = decode(Whole, tomllib.loads(text), REGISTRIES)
    wait = Mixture(parts=(Exponential(), Exponential(4.0)), shares=(1.0, math.inf))
    mixing = Mixing(alpha=1.0, weight=Power(power=-math.inf))
    local = Local(nesterov=True, method="adamw", steps=5, span=(3, 4.0), layers=[1, 2], names=("a",))
    ages, notes = {0: 0.5, 7: 1.0, -2: 2.0}, {"free": ["form", 1]}
    variants = (Local(batch=1), Local())
    assert got == Whole("run", 10, wait, mixing, local, ages, notes, None, (1, 2), variants, None)
    # Equal is not enough: 1 == 1.0 in Python, and a strategy may format or divide it.
    assert [type(x) for x in (got.mixing.alpha, got.ages[7], got.local.layers)] == [float, float, list]


def test_a_union_takes_its_first_fit() -> None:
    assert read(threshold=2).threshold == 2.0
    assert read(threshold="auto").threshold == "auto"
    assert read(second="mixture").second == Mixture()


def test_a_protocol_itself_can_be_decoded() -> None:
    wait = decode(Wait, {"name": "exponential", "mean": 2}, REGISTRIES)  # type: ignore[type-abstract]
    assert wait == Exponential(2.0)
    assert encode(wait, REGISTRIES, kind=Wait) == {"name": "exponential", "mean": 2.0}


REFUSALS = """
lable = "x" -> lable is not a key; did you mean 'label'?
wait = {name = "exponential", meen = 2} -> wait.meen is not a key of exponential; did you mean 'mean'?
mixing.weight = {name = "flat", a = 1} -> mixing.weight.a is not a key of flat, which has none
local.bach = 1 -> local.bach is not a key of local; did you mean 'batch'?
wait.name = "expo" -> wait.name = 'expo' is not known; choose from exponential, mixture
wait.name = "mixtrue" -> wait.name = 'mixtrue' is not known; did you mean 'mixture'?
wait = "mixtrue" -> wait = 'mixtrue' is not known; did you mean 'mixture'?
second = "mixtrue" -> second = 'mixtrue' is not known; did you mean 'mixture'?
wait.name = 3 -> wait.name = 3 is not known; choose from exponential, mixture
wait.mean = 2 -> wait.name is missing; choose from exponential, mixture
wait = 5 -> wait = 5 is not one of exponential, mixture, nor a table with its name
local.batch = "ten" -> local.batch = "ten" is not a whole number
local.batch = 3.0 -> local.batch = 3.0 is not a whole number
local.batch = true -> local.batch = true is not a whole number
local.rate = false -> local.rate = false is not a number
local.rate = "fast" -> local.rate = "fast" is not a number
local.nesterov = 1 -> local.nesterov = 1 is not true or false
local.method = "adam" -> local.method = 'adam' is not known; did you mean 'adamw'?
local.steps = "many" -> local.steps = "many" is not a whole number
local.span = [1] -> local.span = [1] has 1 entries, not 2
local.layers = [1, "b"] -> local.layers[1] = "b" is not a whole number
local.names = "ab" -> local.names = "ab" is not an array
local = 3 -> local = 3 is not a table
label = 3 -> label = 3 is not a string
ages.x = 1.0 -> ages.x: the key "x" is not a whole number
ages.07 = 1.0 -> ages.07: the key "07" is not a whole number
ages.3 = "a" -> ages.3 = "a" is not a number
ages = 3 -> ages = 3 is not a table
threshold = "no" -> threshold = "no" fits none of what it may be: a number; 'auto'; an array
threshold = [1, "b"] -> threshold[1] = "b" is not a whole number
variants = [{}, {batch = "b"}] -> variants[1].batch = "b" is not a whole number
mixing.alpha = 1.7 -> mixing.alpha = 1.7 is outside (0, 1]: lower it
wait = {name = "exponential", mean = -1} -> wait.mean = -1.0 is outside [0, inf]: raise it
second = {name = "exponential", mean = -1} -> second.mean = -1.0 is outside [0, inf]: raise it
wait = {name = "mixture", shares = []} -> wait: give one share per part
"""


@pytest.mark.parametrize("case", REFUSALS.strip().splitlines())
def test_a_refusal_is_one_line_that_starts_with_the_key(case: str) -> None:
    text, _, message = case.partition(" -> ")
    with pytest.raises(InputError) as caught:
        read(**tomllib.loads(text))
    assert str(caught.value) == message


def test_a_refused_value_is_shown_within_bounds() -> None:
    with pytest.raises(InputError) as caught:
        read(label=["x" * 999])
    assert str(caught.value) == f'label = ["{"x" * 55}... is not a string'
    with pytest.raises(InputError, match=r"^local\.rate has more digits than a number can hold$"):
        read(local={"rate": 10**400})


def test_a_missing_key_is_named_with_what_it_takes() -> None:
    with pytest.raises(InputError, match=r"^clients is missing; it takes a whole number$"):
        decode(Whole, {"label": "x"}, REGISTRIES)
    with pytest.raises(InputError, match=r"^wait is missing; it takes one of exponential, mixture$"):
        decode(Whole, {"label": "x", "clients": 1}, REGISTRIES)


def test_the_path_above_is_kept() -> None:
    with pytest.raises(InputError, match=r"^strategy\.alpha = 2\.0 is outside \(0, 1\]: lower it$"):
        decode(Mixing, {"alpha": 2}, REGISTRIES, "strategy")


def test_what_a_programmer_got_wrong() -> None:
    odd = make_dataclass("Odd", [("thing", complex)])
    with pytest.raises(TypeError, match=r"^thing: fields of the type .*complex.* are not supported$"):
        decode(odd, {"thing": 1}, {})
    clash = make_dataclass("Clash", [("name", str, "")])
    with pytest.raises(TypeError, match="Clash has a field `name`"):
        decode(Wait, {"name": "clash"}, {Wait: {"clash": clash}})  # type: ignore[type-abstract]
    with pytest.raises(InputError, match=r"^mixing\.weight = Odd.* is of no registered class"):
        encode(Whole("x", 1, Exponential(), Mixing(weight=odd(1))), REGISTRIES)
    unset = make_dataclass("Unset", [("word", str | None, "x")])
    with pytest.raises(InputError, match=r"^word = None cannot be written"):
        encode(unset(None), {})


def test_encode_is_complete_and_puts_the_name_first() -> None:
    table = encode(Whole("run", 3, Exponential(), limit=None), REGISTRIES)
    assert list(table) == [key for key in Whole.__dataclass_fields__ if key != "second"]
    assert list(table["wait"]) == ["name", "mean"]
    local = {"batch": 32, "rate": 0.1, "nesterov": False, "method": "sgd", "epochs": 1}
    arrays = {"span": [0, 1.0], "layers": [], "names": []}
    assert table.pop("wait") == {"name": "exponential", "mean": 1.0}
    assert table.pop("mixing") == {"alpha": 0.6, "weight": {"name": "power", "power": 0.5, "offset": 1}}
    assert table.pop("local") == {**local, **arrays}
    others = {"ages": {}, "notes": {}, "threshold": "auto", "variants": [], "limit": "none"}
    assert table == {"label": "run", "clients": 3, **others}


FLOATS = st.floats(allow_nan=False)
CURVES = st.one_of(st.just(Flat()), st.builds(Power, power=FLOATS, offset=st.integers()))
WAITS = st.recursive(
    st.builds(Exponential, mean=st.floats(0, 1e9)),
    lambda inner: st.lists(inner, max_size=3).map(lambda parts: Mixture(tuple(parts), (0.5,) * len(parts))),
    max_leaves=4,
)
LOCALS = st.builds(
    Local,
    batch=st.integers(),
    rate=FLOATS,
    nesterov=st.booleans(),
    method=st.sampled_from(["sgd", "adamw"]),
    steps=st.none() | st.integers(),
    epochs=st.none() | st.integers(),
    span=st.tuples(st.integers(), FLOATS),
    layers=st.lists(st.integers(), max_size=3),
    names=st.lists(st.text(), max_size=3).map(tuple),
)
WHOLES = st.builds(
    Whole,
    label=st.text(),
    clients=st.integers(),
    wait=WAITS,
    mixing=st.builds(Mixing, alpha=st.floats(0.01, 1), weight=CURVES),
    local=LOCALS,
    ages=st.dictionaries(st.integers(), FLOATS, max_size=3),
    notes=st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.booleans()), max_size=3),
    second=st.none() | WAITS,
    threshold=st.one_of(FLOATS, st.just("auto"), st.lists(st.integers(), max_size=2).map(tuple)),
    variants=st.lists(LOCALS, max_size=2).map(tuple),
    limit=st.none() | FLOATS,
)


@settings(max_examples=100, deadline=None)
@given(WHOLES)
def test_round_trip_through_a_file(whole: Whole) -> None:
    table = encode(whole, REGISTRIES)
    assert decode(Whole, table, REGISTRIES) == whole
    assert decode(Whole, tomllib.loads(dumps(table)), REGISTRIES) == whole


LEAVES = st.one_of(st.booleans(), st.integers(), FLOATS, st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_dumps_is_read_back_as_it_was(table: dict[str, Any]) -> None:
    assert tomllib.loads(dumps(table)) == table


def test_dumps_as_people_write_it() -> None:
    expected = """\
label = "a \\"b\\"\\n\\u007f"
limit = inf
low = -inf
mixed = [{a = 1}, 2, [{"b c" = true}]]

[scenario]
clients = 3

[scenario.delay]
name = "constant"
value = 1.0

[only.inner]
x = 1

[none]

[[rows]]
a = 1

[rows.sub]
b = 2

[[rows]]
"""
    assert dumps(tomllib.loads(expected)) == expected
    assert math.isnan(tomllib.loads(dumps({"x": math.nan}))["x"])
    assert dumps({}) == "\n"
    with pytest.raises(TypeError, match=r"None has no TOML form"):
        dumps({"x": None})


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("a.b=5", {"a": {"b": 5, "c": [1]}}),
        ("a.c = [2, 3]", {"a": {"c": [2, 3]}}),
        ("d.mean=5", {"d": {"name": "exponential", "mean": 5}}),
        ("e.offset=3", {"e": {"name": "power", "offset": 3}}),
        ("e.name=flat", {"e": {"name": "flat"}}),
        ("e.name=power", {}),
        ("e=flat", {"e": "flat"}),
    ],
)
def test_assign_changes_one_key_of_a_copy(text: str, changed: dict[str, Any]) -> None:
    table: dict[str, Any] = {"a": {"c": [1]}, "d": "exponential", "e": {"name": "power", "offset": 2}}
    assert assign(table, text) == {**table, **changed}
    assert table == {"a": {"c": [1]}, "d": "exponential", "e": {"name": "power", "offset": 2}}


def test_assign_reads_a_toml_value_or_else_a_string() -> None:
    numbers = {"5": 5, "-1e-3": -0.001, "inf": math.inf, "true": True, "[1, 2]": [1, 2]}
    strings = {'"5"': "5", "fedbuff": "fedbuff", "a=b": "a=b", "": "", "#3": "#3"}
    no_toml_here = {"2024-01-31": "2024-01-31", "5\nother = 6": "5\nother = 6"}
    table = {'{name = "power", offset = 2}': {"name": "power", "offset": 2}}
    read_as = {**numbers, **strings, **no_toml_here, **table}
    assert {text: assign({}, f"x.y={text}")["x"]["y"] for text in read_as} == read_as
    assert assign({}, 'ages."a.b"=1') == {"ages": {"a.b": 1}}


@pytest.mark.parametrize("text", ["scenario.clients", "=5", "a..b=5", "#=5"])
def test_assign_shows_the_form(text: str) -> None:
    with pytest.raises(InputError, match=r"^'.*' is not .*; write for example scenario\.delay\.mean=5$"):
        assign({}, text)


def test_assign_refuses_a_key_below_a_value() -> None:
    with pytest.raises(InputError, match=r"^n = 3 is not a table; it has no key 'x'$"):
        assign({"n": 3}, "n.x.y=5")
    with pytest.raises(InputError, match=r"^a\.n = \[1\] is not a table; it has no key 'x'$"):
        assign({"a": {"n": [1]}}, "a.n.x=5")


def test_merge() -> None:
    table = {"seed": 1, "local": {"rate": 0.1, "batch": 32}, "rows": [1, 2], "wait": "exponential"}
    merged = merge(
        table, {"seed": 2, "local": {"rate": 0.5, "new": {"x": 1}}, "rows": [], "wait": {"mean": 3}}
    )
    local = {"rate": 0.5, "batch": 32, "new": {"x": 1}}
    assert merged == {"seed": 2, "local": local, "rows": [], "wait": {"name": "exponential", "mean": 3}}
    assert merge(merged, {"wait": {"mean": 4}})["wait"] == {"name": "exponential", "mean": 4}


def test_merge_never_mixes_the_keys_of_two_classes() -> None:
    table = {"wait": {"name": "exponential", "mean": 2.0}}
    other = {"wait": {"name": "mixture", "shares": []}}
    assert merge(table, other) == other
    assert merge(table, {"wait": "mixture"}) == {"wait": {"name": "mixture"}}
    assert merge(table, {"wait": {"name": "exponential"}}) == table
    assert merge(table, {"wait": "exponential"}) == table
    assert merge({"wait": "exponential"}, other) == other
    assert merge({"ages": {"1": 0.5}}, {"ages": "auto"}) == {"ages": "auto"}


def test_merge_shares_nothing() -> None:
    table, overrides = {"a": {"x": [1]}}, {"b": {"y": [2]}}
    merged = merge(table, overrides)
    merged["a"]["x"].append(9)
    merged["b"]["y"].append(9)
    assert (table, overrides) == ({"a": {"x": [1]}}, {"b": {"y": [2]}})
