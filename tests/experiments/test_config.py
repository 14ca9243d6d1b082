"""Tables to runs: variants, seeds, labels, --set, --strategy, a user's own class, and what is refused."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tiny import TINY

from afield.core.errors import InputError
from afield.experiments.codec import dumps
from afield.experiments.config import (
    REGISTRIES,
    Config,
    Experiment,
    config,
    experiment,
    load_class,
    presets,
    read,
)
from afield.scenarios.delays import Exponential, Speeds
from afield.strategies import FedAsync, FedAvg, FedBuff
from afield.strategies.staleness import Polynomial

RACE: dict[str, Any] = {
    "name": "race",
    "target": 0.8,
    "seeds": [0, 1],
    "stop": {"time": 5.0},
    "strategy": {"name": "fedbuff", "size": 4},
    "variants": [
        {"strategy": {"lr": 0.5}},
        {"label": "mixing", "strategy": {"name": "fedasync", "alpha": 0.3}, "stop": {"time": 7.0}},
    ],
}
MINE = '''
from dataclasses import dataclass
from typing import ClassVar
from afield import Receipt, ServerState

@dataclass(frozen=True)
class Mine:
    """A rule of my own."""
    alpha: float = 0.5
    uses_base: ClassVar[bool] = False
    whole: ClassVar[bool] = True

    def init(self, params, clients):
        return ServerState(params=params)

    def receive(self, state, update):
        state.params.lerp_(update.model, self.alpha)
        state.version += 1
        return Receipt.of(update, state.version - 1 - update.task.version, self.alpha, True, state.version)
'''


def labels(group: Experiment) -> list[tuple[str, int]]:
    return [(run.label, run.seed) for run in group.runs]


# -- variants, seeds, labels ----------------------------------------------------------------------------


def test_every_variant_runs_with_every_seed() -> None:
    group = experiment(RACE)
    assert (group.name, group.target, group.seeds) == ("race", 0.8, (0, 1))
    assert labels(group) == [("fedbuff", 0), ("fedbuff", 1), ("mixing", 0), ("mixing", 1)]
    assert group.runs[0].strategy == FedBuff(size=4, lr=0.5)  # laid over the shared table
    assert group.runs[3].strategy == FedAsync(alpha=0.3)  # another name: nothing of the shared one is left
    assert [run.stop.time for run in group.runs] == [5.0, 5.0, 7.0, 7.0]


def test_an_empty_table_is_one_run_of_defaults() -> None:
    group = experiment({})
    assert group.runs == (Config(label="fedbuff"),)
    assert (group.name, group.figure, group.target, group.seeds) == ("experiment", "accuracy", None, (0,))


def test_the_table_given_is_left_as_it_was() -> None:
    before = dumps(RACE)
    experiment(RACE, strategy="fedavg", settings=["stop.time=1", "seeds=[4]", "strategy.lr=0.1"])
    assert dumps(RACE) == before


def test_two_runs_of_one_label_and_seed_are_refused() -> None:
    with pytest.raises(InputError, match=r"labelled 'fedbuff' with seed 0: give each variant its own label"):
        experiment({"variants": [{"local": {"rate": 0.1}}, {"local": {"rate": 0.2}}]})
    with pytest.raises(InputError, match=r"labelled 'fedbuff' with seed 3"):
        experiment({"seeds": [3, 3]})


@pytest.mark.parametrize("wrong", [{}, [], ["fedavg"], {"strategy": "fedavg"}, 3])
def test_variants_must_be_an_array_of_tables(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"variants is not an array of tables: write \[\[variants\]\]"):
        experiment({"variants": wrong})


def test_what_belongs_to_all_variants_is_refused_in_one() -> None:
    for key, value in (("seed", 4), ("seeds", [4]), ("target", 0.5)):
        with pytest.raises(InputError, match=rf"^variants\[1\]\.{key} is for all variants: write it above"):
            experiment({"variants": [{}, {"label": "other", key: value}]})


# -- seeds, --set and --strategy ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "options", "seeds"),
    [
        ({"seed": 5}, {}, (5,)),
        ({"seed": 5, "seeds": [1, 2]}, {}, (1, 2)),
        ({"seeds": [1, 2]}, {"settings": ["seeds=[7]"]}, (7,)),
        ({"seeds": [1, 2]}, {"settings": ["seed=7"]}, (7,)),
        ({"seed": 5}, {"settings": ["seeds=[7, 8]"]}, (7, 8)),
        ({"seeds": [1, 2]}, {"settings": ["seeds=[7]"], "seed": 9}, (9,)),
    ],
)
def test_where_the_seeds_come_from(
    table: dict[str, Any], options: dict[str, Any], seeds: tuple[int, ...]
) -> None:
    group = experiment(table, **options)
    assert group.seeds == seeds
    assert tuple(run.seed for run in group.runs) == seeds


def test_settings_win_over_table_and_variants_and_the_last_one_wins() -> None:
    group = experiment(
        RACE, settings=["stop.time=1", "stop.time=2", "target=0.9", "name=mine", "local.rate=1"]
    )
    assert (group.name, group.target) == ("mine", 0.9)
    assert [run.stop.time for run in group.runs] == [2.0] * 4
    assert {run.local.rate for run in group.runs} == {1.0}


def test_a_setting_may_choose_another_class_and_then_its_parameters() -> None:
    settings = ["scenario.delay.name=exponential", "scenario.delay.mean=5"]
    assert {run.scenario.delay for run in experiment(RACE, settings=settings).runs} == {Exponential(mean=5.0)}
    nested = ["strategy.weight=polynomial", "strategy.weight.a=0.25"]
    (run,) = experiment({}, settings=nested).runs
    assert run.strategy == FedBuff(weight=Polynomial(a=0.25))


def test_parameters_of_a_default_need_no_name() -> None:
    (run,) = experiment({"scenario": {"clients": 9}}, settings=["scenario.delay.spread=0.3"]).runs
    assert run.scenario.delay == Speeds(spread=0.3)
    assert run.scenario.clients == 9
    (run,) = experiment({"scenario": {"delay": {"spread": 0.3}}, "model": {"hidden": [8, 8]}}).runs
    assert run.scenario.delay == Speeds(spread=0.3)
    assert run.model.hidden == (8, 8)  # type: ignore[attr-defined]


def test_a_strategy_takes_the_place_of_all_variants() -> None:
    (first, second) = experiment(RACE, strategy="fedavg").runs
    assert (first.label, second.label) == ("fedavg", "fedavg")
    assert first.strategy == FedAvg()
    # one that is among the variants keeps what that variant says
    kept = experiment(RACE, strategy="fedasync")
    assert labels(kept) == [("mixing", 0), ("mixing", 1)]
    assert kept.runs[0].strategy == FedAsync(alpha=0.3)
    (run,) = experiment(RACE, strategy="fedasync", seed=0, settings=["strategy.alpha=0.9"]).runs
    assert run.strategy == FedAsync(alpha=0.9)


def test_a_label_goes_with_the_strategy_that_it_named() -> None:
    table = {"label": "slow mixing", "strategy": {"name": "fedasync", "alpha": 0.1}}
    assert labels(experiment(table, strategy="fedasync")) == [("slow mixing", 0)]
    assert labels(experiment(table, strategy="fedavg")) == [("fedavg", 0)]
    assert labels(experiment(table, strategy="fedavg", settings=["label=mine"])) == [("mine", 0)]


# -- what is written is what is read --------------------------------------------------------------------


def test_every_preset_decodes_and_round_trips() -> None:
    assert "default" in presets()
    plain = [table for path in presets().values() if "paper" not in (table := read(path))]
    for table in plain:
        for run in experiment(table).runs:
            assert config(tomllib.loads(run.toml())) == run


@pytest.mark.parametrize("kind", REGISTRIES, ids=lambda kind: kind.__name__)
def test_everything_that_a_config_can_name_round_trips(kind: Any) -> None:
    where = {
        "Strategy": "strategy",
        "Staleness": "strategy.weight",
        "Model": "model",
        "Source": "scenario.data",
        "Partition": "scenario.partition",
        "Delay": "scenario.delay",
        "Availability": "scenario.availability",
        "AnyScheduler": "scenario.scheduler",
        "AnyRounds": "scenario.rounds",
    }[kind.__name__]
    for name in REGISTRIES[kind]:
        (run,) = experiment(TINY, settings=[f"{where}={name}"]).runs
        assert config(tomllib.loads(run.toml())) == run


def test_a_run_can_be_repeated_from_its_config(tmp_path: Path) -> None:
    (run,) = experiment(RACE, strategy="fedasync", seed=3).runs
    (tmp_path / "config.toml").write_text(run.toml())
    again = experiment(read(tmp_path / "config.toml"))
    assert again.runs == (run,)
    assert again.seeds == (3,)


def test_the_complete_config_holds_every_default() -> None:
    table = tomllib.loads(Config().toml())
    assert table["format"] == 1
    assert table["scenario"]["delay"] == {"name": "speeds", "median": 1.0, "spread": 0.5, "noise": 0.1}
    assert table["server"] == {"stale": "drop", "reply": "after", "offline": "pause"}


# -- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"tagret": 0.5}, r"^tagret is not a key; did you mean 'target'\?$"),
        ({"varients": []}, r"^varients is not a key; did you mean 'variants'\?$"),
        ({"scenario": {"dely": {}}}, r"^scenario\.dely is not a key of scenario; did you mean 'delay'\?$"),
        ({"strategy": {"sise": 3}}, r"^strategy\.sise is not a key of fedbuff; did you mean 'size'\?$"),
        ({"strategy": "fedbuf"}, r"^strategy(\.name)? = 'fedbuf' is not known; did you mean 'fedbuff'\?$"),
        (
            {"strategy": {"name": "fedasync", "alpha": 2}},
            r"^strategy\.alpha = 2\.0 is outside \(0, 1\]: lower",
        ),
        (
            {"variants": [{"stratgy": {}}]},
            r"^variants\[0\]\.stratgy is not a key; did you mean 'strategy'\?$",
        ),
        ({"format": 2}, r"^format = 2 is not 1, the one this version of afield reads$"),
        ({"seeds": []}, r"^seeds is empty: give at least one"),
        ({"seeds": 3}, r"^seeds = 3 is not an array$"),
        ({"seed": -1}, r"^seed = -1 is outside \[0, .*\]: raise it$"),
        ({"target": 85}, r"^target = 85\.0 is outside \(0, 1\]: lower it$"),
        ({"figure": "acuracy"}, r"^figure = 'acuracy' is not known; did you mean 'accuracy'\?$"),
        ({"stop": {}}, r"^stop: no end is set: give updates, versions or time"),
        ({"runtime": {"threads": 0}}, r"^runtime\.threads = 0 is outside \[1, 4096\]: raise it$"),
        ({"scenario": {"clients": 0}}, r"^scenario\.clients = 0 is outside \[1, inf\]: raise it$"),
    ],
)
def test_bad_tables(table: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        experiment(table)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tagret=0.5", r"^tagret is not a key; did you mean 'target'\?$"),
        ("variants=[]", r"^variants is not a key; choose from format, label, .*, sweep$"),
        ("target.x=3", r"^target = 0\.8 is not a table; it has no key 'x'$"),
        ("seed=x", r'^seeds\[0\] = "x" is not a whole number$'),
        ("stop", r"^'stop' is not KEY=VALUE; write for example scenario\.delay\.mean=5$"),
        ("=3", r"^'=3' is not KEY=VALUE"),
        ("stop..time=3", r"^'stop\.\.time' is not a key"),
    ],
)
def test_bad_settings(setting: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        experiment(RACE, settings=[setting])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"^defalt is neither a file nor a preset; did you mean 'default'\?$"
    ):
        read(Path("defalt"))
    with pytest.raises(InputError, match=r"cannot be read: Is a directory; give a TOML file or a preset$"):
        read(tmp_path)
    for content in (b"stop = [", b"\xff\xfe"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(InputError, match=r"bad\.toml is not TOML: .*; correct it there$") as caught:
            read(tmp_path / "bad.toml")
        assert "\n" not in str(caught.value)


# -- a strategy of the user's own -----------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "my.py").write_text(MINE)
    return f"{tmp_path}/my.py:Mine"


def test_a_class_from_a_file(mine: str) -> None:
    (run,) = experiment(TINY | {"label": "own"}, strategy=mine, settings=["strategy.alpha=0.25"]).runs
    assert type(run.strategy).__name__ == "Mine"
    assert run.strategy.alpha == 0.25  # type: ignore[attr-defined]
    table = tomllib.loads(run.toml())
    assert table["strategy"] == {"name": mine, "alpha": 0.25}
    assert config(table) == run
    assert load_class(mine) is type(run.strategy)


def test_its_label_is_the_name_of_the_class(mine: str) -> None:
    (run,) = experiment({}, strategy=mine).runs
    assert run.label == "Mine"


def test_two_files_of_one_name_are_two_classes(tmp_path: Path, mine: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "my.py").write_text(MINE.replace("0.5", "0.75"))
    variants = [{"label": "a", "strategy": mine}, {"label": "b", "strategy": f"{tmp_path}/other/my.py:Mine"}]
    first, second = experiment({"variants": variants}).runs
    assert (first.strategy.alpha, second.strategy.alpha) == (0.5, 0.75)  # type: ignore[attr-defined]
    assert [config(tomllib.loads(run.toml())) for run in (first, second)] == [first, second]


def test_a_file_that_was_changed_is_read_again(tmp_path: Path, mine: str) -> None:
    assert load_class(mine)().alpha == 0.5
    (tmp_path / "my.py").write_text(MINE.replace("0.5", "0.75"))
    os.utime(tmp_path / "my.py", ns=(1, 1))
    assert load_class(mine)().alpha == 0.75


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "my.py:Mine", r"^strategy file .*my\.py is not there: give FILE\.py:CLASS$"),
        (MINE, "my.py:Mime", r"my\.py has no class 'Mime'; did you mean 'Mine'\?$"),
        (MINE, "my.py:Zebra", r"my\.py has no class 'Zebra'; choose from Mine$"),
        (MINE, "my.py:", r"my\.py has no class ''; choose from Mine$"),
        (
            MINE.replace("@dataclass(frozen=True)", ""),
            "my.py:Mine",
            r":Mine is not a dataclass: a strategy is",
        ),
        (
            MINE.replace("def receive", "def take"),
            "my.py:Mine",
            r":Mine has no 'receive': a strategy is a frozen",
        ),
        (
            MINE.replace("whole: C", "part: C"),
            "my.py:Mine",
            r":Mine has no 'whole': .*uses_base, whole, init",
        ),
        ("import nowhere_at_all", "my.py:Mine", r"cannot be imported: ModuleNotFoundError: No module named"),
        ("def f(:", "my.py:Mine", r"cannot be imported: SyntaxError: .*line 1\); correct it there$"),
        (
            "raise ValueError('a\\nb')",
            "my.py:Mine",
            r"cannot be imported: ValueError: a b; correct it there$",
        ),
        (MINE.replace("float = 0.5", "complex = 1j"), "my.py:Mine", r"cannot be made: TypeError: .*complex"),
        (
            MINE.replace("from typing import ClassVar", "").replace(
                "\n", "from __future__ import annotations\n", 1
            ),
            "my.py:Mine",
            r"cannot be made: NameError: name 'ClassVar' is not defined",
        ),
    ],
)
def test_bad_files(tmp_path: Path, content: str | None, name: str, message: str) -> None:
    if content is not None:
        (tmp_path / "my.py").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        experiment({}, strategy=f"{tmp_path}/{name}")
    assert "\n" not in str(caught.value)


def test_its_parameters_are_checked_like_any_other(mine: str) -> None:
    with pytest.raises(InputError, match=r"^strategy\.alhpa is not a key of .*; did you mean 'alpha'\?$"):
        experiment({}, strategy=mine, settings=["strategy.alhpa=1"])
    with pytest.raises(InputError, match=r'^strategy\.alpha = "high" is not a number$'):
        experiment({}, strategy=mine, settings=["strategy.alpha=high"])
