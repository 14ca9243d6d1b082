"""Runs that go together: the same logs and models as one after the other, from common blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stopping import TABLE

from afield.experiments.config import Experiment, experiment
from afield.experiments.run import prepare, run
from afield.experiments.sweep import prepare_all, run_together
from afield.reports.load import find


@pytest.fixture(scope="module")
def chosen() -> Experiment:
    return experiment(TABLE)


def test_together_as_alone(chosen: Experiment, tmp_path: Path) -> None:
    names = [f"{config.label}-{config.seed}" for config in chosen.runs]
    for config, name in zip(chosen.runs, names, strict=True):
        list(run(prepare(config), tmp_path / "alone" / name))
    places = [tmp_path / "together" / name for name in names]
    rows = list(run_together(prepare_all(chosen.runs), places))
    assert {number for number, _ in rows} == set(range(len(names)))
    for name in names:
        alone, together = (find([tmp_path / kind / name])[0] for kind in ("alone", "together"))
        assert together.receipts.equals(alone.receipts)
        assert [m["accuracy"] for m in together.metrics] == pytest.approx(
            [m["accuracy"] for m in alone.metrics], abs=0.01
        )
        models = [load_file(tmp_path / kind / name / "model.safetensors") for kind in ("alone", "together")]
        for key, value in models[0].items():
            torch.testing.assert_close(models[1][key], value, rtol=0, atol=1e-4)


def test_runs_that_agree_share_one_engine(chosen: Experiment) -> None:
    runs = prepare_all(chosen.runs)
    engines: dict[int, list[str]] = {}
    for prepared in runs:
        trainer = prepared.simulator.trainer
        engines.setdefault(id(getattr(trainer, "engine", trainer)), []).append(prepared.config.label)
    # two strategies times two seeds; the other rate twice; and two loops, which share nothing
    assert sorted(map(sorted, engines.values())) == [
        ["by the loop"],
        ["by the loop"],
        ["fedasync", "fedasync", "fedavg", "fedavg"],
        ["other rate", "other rate"],
    ]


def test_blocks_are_common(chosen: Experiment, tmp_path: Path) -> None:
    """Counts the calls of the engine: fewer than the runs make alone."""
    several = [config for config in chosen.runs if config.label == "fedasync"]
    blocks: dict[str, list[int]] = {"alone": [], "together": []}
    for kind, groups in (("alone", [[several[0]], [several[1]]]), ("together", [several])):
        for number, group in enumerate(groups):
            runs = prepare_all(group)
            engine = runs[0].simulator.trainer.engine
            inner = engine._train

            def counted(deal: Any, inner: Any = inner, kind: str = kind) -> Any:
                blocks[kind].append(len(deal))
                return inner(deal)

            engine._train = counted
            list(run_together(runs, [tmp_path / kind / f"{number}-{place}" for place in range(len(group))]))
    assert sum(blocks["together"]) == sum(blocks["alone"])
    assert len(blocks["together"]) < 0.7 * len(blocks["alone"])


SWAPPED: dict[str, Any] = {
    "seeds": [0, 1],
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"batch": 16, "rate": 0.2, "steps": 2},
    "scenario": {
        "clients": 4,
        "data": {"name": "digits"},
        "delay": {"name": "constant"},
        "rounds": {"name": "bernoulli", "p": [1.0, 0.5]},
    },
    "strategy": {"name": "fedstale", "p": "known"},
    "measure": {"versions": 3},
    "variants": [
        {
            "label": f"{share} {versions}",
            "scenario": {"partition": {"name": "label-swap", "share": share}},
            "stop": {"versions": versions},
        }
        for share, versions in ((0.0, 3), (0.5, 6), (1.0, 9))
    ],
}


def test_runs_with_other_labels_share_one_pool_and_one_test_set(tmp_path: Path) -> None:
    chosen = experiment(SWAPPED)
    runs = prepare_all(chosen.runs)
    trainers = [prepared.simulator.trainer for prepared in runs]
    assert len({id(trainer.engine) for trainer in trainers}) == 1
    assert len({id(prepared.simulator.evaluator._inputs) for prepared in runs}) == 1
    for config, prepared in zip(chosen.runs, runs, strict=True):  # the same examples in the same order
        alone = prepare(config).simulator.trainer.data
        mine = prepared.simulator.trainer.data
        for client in range(4):
            every = torch.arange(alone.sizes[client])
            for one, other in zip(alone.batch(client, every), mine.batch(client, every), strict=True):
                assert torch.equal(one, other)
    list(run_together(runs, [tmp_path / "together" / str(number) for number in range(len(runs))]))
    for number, config in enumerate(chosen.runs):
        list(run(prepare(config), tmp_path / "alone" / str(number)))
        alone, together = (find([tmp_path / kind / str(number)])[0] for kind in ("alone", "together"))
        assert together.receipts.equals(alone.receipts)
        for one, other in zip(alone.metrics, together.metrics, strict=True):
            assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)


def test_a_run_that_ends_early_is_complete_at_once(tmp_path: Path) -> None:
    chosen = experiment(SWAPPED | {"seeds": [0]})
    places = [tmp_path / str(number) for number in range(3)]
    rows = run_together(prepare_all(chosen.runs), places)
    for number, row in rows:
        if (number, getattr(row, "version", 0)) == (2, 8):
            break
    rows.close()  # as by an interrupt
    assert [(place / "summary.json").is_file() for place in places] == [True, True, False]


def test_sgd_goes_with_the_others_on_all_data() -> None:
    variants = [
        {"strategy": {"name": "fedavg"}},
        {"strategy": {"name": "sgd"}},
        {"strategy": {"name": "fedasync"}},
    ]
    runs = prepare_all(experiment({**TABLE, "seeds": [0], "variants": variants}).runs)
    clients = [len(prepared.simulator.trainer.data.sizes) for prepared in runs]
    assert clients == [8, 1, 8]


@pytest.mark.parametrize(("seconds", "snapshots"), [("inf", 0), (1000.0, 1)])
def test_snapshots_every_so_often_or_never(seconds: str | float, snapshots: int, tmp_path: Path) -> None:
    table = {**SWAPPED, "seeds": [0], "runtime": {"snapshots": {"seconds": float(seconds)}}}
    rows = run_together(prepare_all(experiment(table).runs), [tmp_path / str(n) for n in range(3)])
    for _ in range(20):
        next(rows)
    assert len(list((tmp_path / "store").glob("*.snapshot"))) == snapshots
    rows.close()
