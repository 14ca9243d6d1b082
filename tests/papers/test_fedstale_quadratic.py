"""FedStale, section 3.1: two quadratic clients of which one takes part 100 times as often as the other."""

from __future__ import annotations

import math

import pytest
import torch

from afield.experiments.config import experiment, presets, read
from afield.experiments.run import prepare
from afield.runtimes.rows import Measurement
from afield.scenarios.data import Quadratic

SHORTER = ["local.rate=0.002", "stop.versions=2400", "measure.versions=20"]


@pytest.mark.parametrize("label", ["FedAvg", "FedVARP", "FedStale (0.8)"])
def test_every_unbiased_rule_reaches_the_optimum(label: str) -> None:
    runs = experiment(read(presets()["fedstale-figure1"]), seed=0, settings=SHORTER).runs
    (config,) = [run for run in runs if run.label == label]
    problem = config.scenario.data
    assert isinstance(problem, Quadratic)
    rows = [row for row in prepare(config).simulator.rows() if isinstance(row, Measurement)]
    points = torch.tensor([row.values["params"] for row in rows])
    optimum = torch.tensor(problem.optimum())
    # the optimum, from its definition: the gradients of both clients cancel there
    gradient = torch.zeros(2)
    for (a, b, d), centre in zip(problem.curvatures, problem.optima, strict=True):
        gradient += torch.tensor([[a, b], [b, d]]) @ (optimum - torch.tensor(centre))
    assert float(gradient.norm()) < 1e-6
    start = float((points[0] - optimum).norm())
    late = points[len(points) // 2 :]
    # the rules are unbiased: their trajectories centre on the optimum, FedAvg's with the largest spread
    assert start == pytest.approx(math.dist((-10, -10), problem.optimum()), rel=1e-6)
    assert float((late.mean(0) - optimum).norm()) < 0.02 * start
    spread = float((late - optimum).norm(dim=1).mean())
    assert spread < {"FedAvg": 0.05, "FedVARP": 0.01, "FedStale (0.8)": 0.02}[label] * start


def test_plain_fedavg_is_drawn_to_the_client_that_comes_more_often() -> None:
    """Without the division by p the average of the participants is biased: the contrast that eq. 5 mends."""
    runs = experiment(read(presets()["fedstale-figure1"]), strategy="fedavg", settings=SHORTER).runs
    rows = [row for row in prepare(runs[0]).simulator.rows() if isinstance(row, Measurement)]
    end = rows[-1].values["params"]
    problem = runs[0].scenario.data
    assert isinstance(problem, Quadratic)
    assert math.dist(end, problem.optima[0]) < 0.25 * math.dist(end, problem.optimum())
