"""Advice where the papers' own guidelines give the answer, and that what is advised runs."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import TINY

from afield.experiments import advise, probe
from afield.experiments.codec import merge
from afield.experiments.config import Config, config, experiment, presets, read
from afield.experiments.probe import Facts, label_distance, measure
from afield.experiments.run import prepare
from afield.runtimes.rows import Measurement
from afield.scenarios.data import ClientData

IID = {"name": "iid"}
SKEWED = {"name": "dirichlet", "alpha": 0.1}
EVEN: dict[str, Any] = {
    "delay": {"name": "uniform"},
    "data": {"name": "digits", "held_out": 0, "limit": 1200},
}
UNEVEN: dict[str, Any] = {
    "delay": {"name": "speeds", "spread": 1.2},
    "data": {"name": "digits", "held_out": 0, "limit": 1200},
}


def scene(name: str, partition: Any, changes: Any, /, **more: Any) -> Config:
    scenario = {"clients": 20, "partition": partition, "rounds": {"name": "cohort", "size": 5}}
    table = merge(TINY, {"strategy": {"name": name}, "scenario": merge(scenario, changes)})
    return config(merge(table, more))


def names(chosen: Config) -> list[str]:
    return [entry.strategy["name"] for entry in advise.advise(chosen).recommended]


def settings(chosen: Config, name: str) -> dict[str, Any]:
    return next(
        entry.strategy for entry in advise.advise(chosen).recommended if entry.strategy["name"] == name
    )


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "EVENTS", 4000)


def test_alike_and_even_clients_need_nothing_but_a_buffer() -> None:
    chosen = scene("asgd", IID, EVEN)
    facts = measure(chosen)
    assert (facts.silent, facts.participation < 1.3) == (0, True)
    assert facts.heterogeneity is not None and facts.heterogeneity < advise.ALIKE
    assert names(chosen)[0] == "fedbuff"
    assert settings(chosen, "fedbuff")["size"] == 10


def test_a_buffer_is_no_larger_than_half_of_those_that_train() -> None:
    few = {**EVEN, "scheduler": {"name": "concurrency", "limit": 6}}
    assert settings(scene("asgd", IID, few), "fedbuff")["size"] == 3


def test_unlike_clients_that_come_equally_often_get_ace() -> None:
    chosen = scene("asgd", SKEWED, EVEN)
    assert names(chosen)[0] == "ace"
    assert settings(chosen, "ace")["lr"] == pytest.approx(1 / 20)


def test_unlike_clients_of_whom_some_are_rare_get_aced_with_twice_the_mean_delay() -> None:
    chosen = scene("asgd", SKEWED, UNEVEN)
    facts = measure(chosen)
    assert facts.participation > 3 and facts.delay is not None and facts.staleness is not None
    assert (
        facts.delay > facts.staleness == pytest.approx(19, abs=0.5)
    )  # 20 always busy; most updates are fast ones
    assert names(chosen)[:2] == ["aced", "ace"]
    assert settings(chosen, "aced")["max_delay"] == round(2 * facts.delay)


def test_slow_clients_teach_where_there_is_unlabelled_data() -> None:
    held = merge(UNEVEN, {"data": {"held_out": 50}})
    assert measure(scene("asgd", SKEWED, held)).slowness > 10
    assert names(scene("asgd", SKEWED, held))[0] == "fedecho"
    unknown = " ".join(advise.advise(scene("asgd", SKEWED, UNEVEN)).unknown)
    assert "unlabelled data" in unknown and "fedecho" not in names(scene("asgd", SKEWED, UNEVEN))


def test_gamma_is_the_theorem_s() -> None:
    for updates, gamma in ((1000, 0.82), (10_000, 0.9)):
        chosen = scene("asgd", IID, EVEN, stop={"updates": updates})
        assert settings(chosen, "mr-asyncfl")["gamma"] == pytest.approx(gamma, abs=0.005)


def test_ticks_get_rules_that_step_by_ticks() -> None:
    ticks = {**EVEN, "scheduler": {"name": "ticks"}}
    assert advise.advise(scene("asgd", SKEWED, ticks, strategy={"per": "tick"})).recommended[0].strategy == {
        "name": "ace",
        "lr": 1.0,
        "per": "tick",
    }
    assert names(scene("asgd", IID, ticks, strategy={"per": "tick"})) == ["asgd"]


def rounds(p: float, share: float, **more: Any) -> Config:
    """FedStale's experiment: half of the clients always take part, the others with p, a share of labels swapped."""
    swap = {"name": "label-swap", "share": share}
    changes = {
        "data": {"name": "digits", "held_out": 0, "limit": 1200},
        "rounds": {"name": "bernoulli", "p": [1.0, p]},
        **more,
    }
    base = merge(TINY, {"strategy": {"name": "fedavg"}, "scenario": {"clients": 24}})
    base["scenario"] = {
        key: value for key, value in base["scenario"].items() if key not in ("rounds", "partition")
    }
    return config(merge(base, {"scenario": merge({"partition": swap}, changes)}))


@pytest.mark.parametrize(
    ("p", "share", "name", "beta"),
    [  # section 5.2's three zones, and figure 5's row (sigma_g^2 = 0.6)
        (0.5, 0.0, "fedavg", None),
        (0.5, 0.6, "fedvarp", None),
        (0.2, 0.6, "fedstale", 0.8),
        (0.1, 0.6, "fedstale", 0.8),
        (0.05, 0.6, "fedstale", 0.5),
        (0.02, 0.6, "fedstale", 0.5),
        (0.01, 0.6, "fedstale", 0.5),
        (0.02, 0.0, "u-fedavg", None),
        (0.002, 0.0, "u-fedavg", None),
    ],
)
def test_fedstale_s_zones(p: float, share: float, name: str, beta: float | None) -> None:
    chosen = rounds(p, share)
    facts = measure(chosen)
    assert facts.participation == pytest.approx((1 + p) / 2 / p)
    assert facts.relabelled == pytest.approx(share, abs=0.15)  # whole examples, rounded down
    first = advise.advise(chosen).recommended[0].strategy
    assert (first["name"], first.get("beta"), first["name"] == "fedavg" or first["p"]) == (
        name,
        beta,
        True if name == "fedavg" else "known",
    )


def test_beta_falls_with_rarer_clients_and_rises_with_unlike_data() -> None:
    """Guidelines B and A, for known and for estimated probabilities."""
    ratios, unlikes = (1.2, 3, 6, 10, 24, 50, math.inf), (0.1, 0.19, 0.2, 0.5, 1.0)
    for known in (True, False):
        table = [[advise._beta(unlike, ratio, known) for ratio in ratios] for unlike in unlikes]
        assert all(row == sorted(row, reverse=True) for row in table)
        assert all(list(column) == sorted(column) for column in zip(*table, strict=True))
    assert advise._beta(0.6, 25.5, True) > advise._beta(0.6, 25.5, False)  # figure 5


def test_probabilities_are_estimated_where_clients_go_offline() -> None:
    first = advise.advise(rounds(0.1, 0.6, availability={"name": "on-off"})).recommended[0].strategy
    assert first["name"] == "fedstale" and "p" not in first


def facts_with(memory: int | None, table: int) -> Facts:
    return replace(measure(scene("asgd", SKEWED, EVEN)), memory=memory, table=table)


def test_a_table_fits_or_is_rounded_or_is_held_by_the_clients() -> None:
    for memory, expected in (
        (None, {}),
        (1000, {}),
        (999, {"precision": "int8"}),
        (250, {"precision": "int8"}),
        (249, {"held": "client"}),
    ):
        facts = facts_with(memory, 500)
        assert advise._stored(facts, held=True) == expected
    assert advise._stored(facts, held=False) == {"precision": "int8"}
    assert "does not fit" in " ".join(advise._unknown(facts, scene("asgd", SKEWED, EVEN)))


def test_the_distance_of_label_mixes() -> None:
    targets = torch.arange(4).repeat_interleave(1000)
    apart = ClientData(targets, targets, list(torch.arange(4000).split(1000)))
    # one label each: 3/4 from everyone's mix, less what chance gives: 4 sqrt(2 3/16 / (1000 pi)) / 2
    chance = 2 * math.sqrt(2 * 3 / 16 / (1000 * math.pi))
    assert label_distance(apart, 4) == pytest.approx(0.75 - chance)
    order = torch.randperm(4000, generator=torch.Generator().manual_seed(0))
    dealt = ClientData(targets, targets, list(order.split(20)))
    assert label_distance(dealt, 4) < 0.01  # 200 clients of 20 examples differ, but by chance alone


def test_without_classes_clients_count_as_unlike() -> None:
    read_in = experiment(read(presets()["fedstale-figure1"]), strategy="fedavg", seed=0)
    advice = advise.advise(read_in.runs[0])
    assert advice.facts.heterogeneity is None
    assert advice.recommended[0].strategy == {"name": "fedstale", "beta": 0.5, "p": "known"}
    assert any("no classes" in note for note in advice.unknown)


@pytest.mark.parametrize(
    "chosen",
    [
        scene("asgd", IID, EVEN),
        scene("asgd", SKEWED, UNEVEN),
        scene("asgd", SKEWED, merge(UNEVEN, {"data": {"held_out": 50}})),
        scene("asgd", SKEWED, {**EVEN, "scheduler": {"name": "ticks"}}, strategy={"per": "tick"}),
        rounds(0.5, 0.0),
        rounds(0.05, 0.6),
    ],
    ids=["alike", "rare", "unlabelled", "ticks", "rounds", "rare rounds"],
)
def test_whatever_is_advised_decodes_and_runs(chosen: Config) -> None:
    for entry in advise.advise(chosen).recommended:
        assert entry.reason and entry.paper
        pasted = tomllib.loads(entry.toml)
        table = {key: value for key, value in chosen.table().items() if key != "strategy"}
        ready = config({**table, **pasted, "stop": {"updates": 30}})
        rows = list(prepare(ready).simulator.rows())
        assert isinstance(rows[-1], Measurement) and rows[-1].version > 0
        assert not any(row.refused for row in rows if not isinstance(row, Measurement))
