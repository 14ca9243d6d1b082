"""Runs that go together: the same logs and models as one after the other, from common blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from afield.experiments.config import Experiment, experiment
from afield.experiments.run import prepare, run
from afield.experiments.sweep import prepare_all, run_together
from afield.reports.load import find

TABLE: dict[str, Any] = {
    "seeds": [0, 1],
    "sweep": {"together": True},
    "model": {"name": "mlp", "hidden": [16]},
    "local": {"batch": 16, "rate": 0.2},
    "scenario": {"clients": 8, "delay": {"name": "exponential"}, "rounds": {"name": "cohort", "size": 3}},
    "stop": {"updates": 30},
    "measure": {"versions": 5},
    "variants": [
        {"strategy": {"name": "fedasync"}},
        {"strategy": {"name": "fedavg"}},
        {"label": "other rate", "strategy": {"name": "fedasync"}, "local": {"rate": 0.1}},
        {"label": "by the loop", "strategy": {"name": "fedbuff", "size": 2}, "training": {"method": "loop"}},
    ],
}


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
