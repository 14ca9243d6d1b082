"""Bad input: one line on stderr that names value, bound and remedy; status 2; nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import TINY

from afield.experiments.codec import dumps, merge

Command = Callable[..., Any]
SET = "--set"


def refused(ended: Any, message: str) -> None:
    assert ended.status == 2
    assert ended.out == ""
    assert ended.err.endswith("\n")
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("afield: ")
    assert "Traceback" not in ended.err
    assert message in ended.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # keys and names
        ([SET, "scenario.dely.mean=3"], "scenario.dely is not a key of scenario; did you mean 'delay'?"),
        ([SET, "tagret=0.5"], "tagret is not a key; did you mean 'target'?"),
        (
            [SET, "strategy.sise=3", "--strategy", "fedbuff"],
            "strategy.sise is not a key of fedbuff; did you mean",
        ),
        (["--strategy", "fedbuf"], "'fedbuf' is not known; did you mean 'fedbuff'?"),
        (["--strategy", "zzz"], "'zzz' is not known; choose from fedasync, mr-asyncfl, twafl,"),
        ([SET, "scenario.partition=dirichle"], "'dirichle' is not known; did you mean 'dirichlet'?"),
        (["defalt"], "defalt is neither a file nor a preset; did you mean 'default'?"),
        # values and their bounds
        (
            ["--strategy", "fedasync", SET, "strategy.alpha=2"],
            "strategy.alpha = 2.0 is outside (0, 1]: lower it",
        ),
        ([SET, "local.rate=nan"], "local.rate = nan is outside (0, inf): give a number"),
        ([SET, "stop.time=-1"], "stop.time = -1.0 is outside (0, inf): raise it"),
        ([SET, "scenario.clients=many"], 'scenario.clients = "many" is not a whole number'),
        ([SET, "target=85"], "target = 85.0 is outside (0, 1]: lower it"),
        (["--seed", "-1"], "seed = -1 is outside"),
        (
            [SET, "runtime.threads=99999999999"],
            "runtime.threads = 99999999999 is outside [1, 4096]: lower it",
        ),
        (
            [SET, "scenario.rounds={name='bernoulli', p=[]}"],
            "scenario.rounds.p is empty: give 1 value, or one per equal block of clients",
        ),
        # things that do not fit together
        ([SET, "scenario.clients=2000"], "need 2000 examples and there are 1288; have at most 1288 clients"),
        ([SET, "scenario.clients=20"], "rounds.size = 25 is above the 20 clients there are: lower it"),
        ([SET, "model=mnist-cnn"], "but examples have shape (64,): choose linear or mlp"),
        ([SET, "model=point"], "point wants rows (a11, a12, a22, c1, c2), but examples have shape (64,)"),
        (["fedstale-figure1", SET, "model=linear"], "the loss 'value' wants one number per example"),
        (
            [SET, "scenario.scheduler=ticks"],
            "the scheduler is Ticks: set per = 'tick', or use another scheduler",
        ),
        (
            ["--strategy", "fedecho", SET, "scenario.data.held_out=0"],
            "FedEcho distils: it needs unlabelled data",
        ),
        (
            [SET, "seeds=[0,0]"],
            "two runs are labelled 'fedasync' with seed 0: give each variant its own label",
        ),
        # data
        (
            [SET, "scenario.data=mnist"],
            "MNIST/raw/train-images-idx3-ubyte is needed but no data folder is set",
        ),
        (
            [SET, "scenario.data=cifar10", SET, "scenario.data.folder=nowhere"],
            "data_batch_1 (or data_batch_1.gz) is not in nowhere/cifar-10-batches-py and nowhere; it is "
            "published at www.cs.toronto.edu/~kriz/cifar.html; give its folder",
        ),
        (
            [SET, "scenario.delay.name=trace", SET, "scenario.delay.file=x.csv"],
            "file = 'x.csv' cannot be read",
        ),
        # the form of the command
        ([SET, "foo"], "'foo' is not KEY=VALUE; write for example scenario.delay.mean=5"),
        ([SET, "=3"], "'=3' is not KEY=VALUE"),
        (["--seed", "abc"], "'abc' is not a valid integer; see afield run --help"),
        (["--nope"], "; see afield run --help"),
        (["a.toml", "b.toml"], "; see afield run --help"),
        (["--strategy", "my.py:Mine"], "strategy file my.py is not there: give FILE.py:CLASS"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_run(afield: Command, here: Path, arguments: list[str], message: str) -> None:
    refused(afield("run", *arguments, "--out", "new"), message)
    assert list(here.iterdir()) == []


def test_files(afield: Command, here: Path) -> None:
    refused(afield("run", "none.toml"), "none.toml is neither a file nor a preset; choose from ace-")
    refused(afield("run", "."), ". cannot be read: Is a directory; give a TOML file or a preset")
    (here / "bad.toml").write_text("[stop\ntime = 3\n")
    refused(afield("run", "bad.toml"), "bad.toml is not TOML: ")
    assert [path.name for path in here.iterdir()] == ["bad.toml"]


def test_a_folder_that_exists_is_left_alone(afield: Command, here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "notes.txt").write_text("hours of work")
    remedy = "exists and is never overwritten: choose another --out, or remove it"
    refused(afield("run", "--out", "mine"), f"mine {remedy}")
    refused(afield("run", "--out", "mine/notes.txt"), f"mine/notes.txt {remedy}")
    refused(
        afield("run", "--strategy", "asgd", "--out", "mine/notes.txt/deeper"),
        "cannot be made: Not a directory",
    )
    assert (here / "mine" / "notes.txt").read_text() == "hours of work"
    assert len(list(here.rglob("*"))) == 2


def test_a_bad_variant_stops_the_good_ones_before_it(afield: Command, here: Path) -> None:
    """Nobody wants to hear after an hour that the last of five algorithms cannot run."""
    late = {"label": "late", "strategy": {"name": "fedavg"}, "scenario": {"rounds": {"size": 6}}}
    (here / "race.toml").write_text(dumps(TINY | {"variants": [{"label": "good"}, late]}))
    refused(afield("run", "race.toml"), "rounds.size = 6 is above the 5 clients there are: lower it")
    assert [path.name for path in here.iterdir()] == ["race.toml"]


def test_labels_that_make_one_folder_name(afield: Command, here: Path) -> None:
    twins = [{"label": "a/b"}, {"label": "a b"}]
    (here / "race.toml").write_text(dumps(merge(TINY, {"variants": twins})))
    refused(afield("run", "race.toml"), "label 'a/b' makes the same folder name as another: choose another")
    assert [path.name for path in here.iterdir()] == ["race.toml"]


def test_files_of_the_user_s_own(afield: Command, here: Path) -> None:
    (here / "my.py").write_text("class Mine: ...\n")
    refused(
        afield("run", "--strategy", "my.py:Mine"), "my.py:Mine is not a dataclass: a strategy is a frozen"
    )
    refused(afield("run", "--strategy", "my.py:Mime"), "my.py has no class 'Mime'; did you mean 'Mine'?")
    (here / "my.py").write_text("import nowhere\n\nraise 1\n")
    refused(
        afield("run", "--strategy", "my.py:Mine"), "my.py cannot be imported: ModuleNotFoundError: No module"
    )


def test_too_little_memory_is_told_in_a_line(afield: Command, here: Path) -> None:
    """Status 1, not 2: the input may be right for another machine."""
    (here / "mine.py").write_text(
        "from dataclasses import dataclass\nimport torch\nfrom afield import FedAsync\n\n"
        "@dataclass(frozen=True)\nclass Large(FedAsync):\n"
        "    def init(self, params, clients):\n        return torch.empty(2**50)\n"
    )
    ended = afield("run", "--strategy", "mine.py:Large")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith("afield: there is not enough memory (")
    assert ended.err.endswith("runtime.block smaller, or use a larger machine\n")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'RUNS...'; see afield compare --help"),
        (("nowhere",), "nowhere is not a folder"),
        ((".",), ". holds no run: no config.toml in it"),
        ((".", "--target", "85"), "--target 85.0 is outside (0, 1]: give a share, such as 0.85"),
        ((".", "--target", "nan"), "--target nan is outside (0, 1]"),
        ((".", "--png", "x.doc"), "--png x.doc is no kind of picture: let it end in .png, .pdf, .svg"),
        ((".", "--x", "weeks"), "'weeks' is not one of 'time', 'updates', 'versions', 'wall'; see afield"),
    ],
)
def test_compare(afield: Command, here: Path, arguments: tuple[str, ...], message: str) -> None:
    refused(afield("compare", *arguments), message)
    assert list(here.iterdir()) == []


def test_compare_a_broken_run(afield: Command, here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "config.toml").write_text("label = 3")
    refused(afield("compare", "run"), "run/config.toml has no 'label' that is a string")


def test_commands(afield: Command) -> None:
    refused(afield("rnu"), "rnu")
    refused(afield("list", "strategy"), "'strategy' is no kind of thing; did you mean 'strategies'?")
    refused(afield("list", "zzz"), "choose from strategies, staleness, data, partitions, delays")
