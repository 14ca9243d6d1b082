"""TWAFL over 1,000 arrivals: the incremental sum is the sum over the table, however far its unit has faded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from afield.core.server import Server
from afield.core.types import Update
from afield.strategies import TWAFL
from afield.strategies.twafl import TINY

CLIENTS = 6
SIZE = 20
ARRIVALS = 1000


@pytest.mark.parametrize(
    ("decay", "form"), [(0.1, "power"), (0.5, "power"), (0.97, "power"), (2.0, "exp"), (400.0, "exp")]
)
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_global_model_is_the_faded_mean_of_the_table(decay: float, form: str, precision: str) -> None:
    draw = np.random.default_rng(3)
    strategy = TWAFL(decay=decay, form=form, precision=precision)
    server = Server(strategy, torch.from_numpy(draw.normal(size=SIZE)), CLIENTS)
    state: Any = server.state
    tasks = [server.checkout(client, 0.0) for client in range(CLIENTS)]
    stamps, units = np.zeros(CLIENTS), []
    for number in range(ARRIVALS):
        client = int(draw.choice(CLIENTS, p=[0.4, 0.3, 0.15, 0.1, 0.04, 0.01]))
        task = tasks[client]
        server.submit(Update(task, torch.from_numpy(draw.normal(size=SIZE)), None, 1))
        tasks[client] = server.checkout(client, 0.0)
        stamps[client] = task.version
        units.append(state.unit)
        if number % 37 == 0:
            ages = stamps.max() - stamps
            weights = decay**ages if form == "power" else np.exp(-decay * ages)
            rows = np.stack([state.table.row(j, torch.float64).numpy() for j in range(CLIENTS)])
            np.testing.assert_allclose(
                state.params.numpy(), weights @ rows / weights.sum(), rtol=0, atol=1e-12
            )
    assert min(units) >= TINY  # what fades is counted in a unit that never underflows ...
    assert (decay, form) == (0.97, "power") or units.count(1.0) > 1  # ... as it starts again from 1
