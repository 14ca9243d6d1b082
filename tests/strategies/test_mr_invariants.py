"""MR.AsyncFL over 10,000 arrivals in float32: what eqs 4 and 13 promise still holds, whatever the table stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from afield.core.server import Server
from afield.core.types import Update
from afield.strategies import MRAsyncFL

CLIENTS = 30
SIZE = 50
ARRIVALS = 10_000
EVERY = 250
# Every arrival multiplies old error by gamma and adds three roundings of numbers below about 1 (2^-24 = 6e-8 each),
# as often up as down: about sqrt(3 / (1 - gamma^2)) * 6e-8, which is 2e-7 for 0.8 and 6e-7 for 0.98.
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("precision", "gamma"), [("float32", 0.8), ("float32", 0.98), ("bfloat16", 0.8), ("int8", 0.8)]
)
def test_the_global_model_is_the_mixture_of_what_is_stored(precision: str, gamma: float) -> None:
    draw = np.random.default_rng(7)
    chances = 0.9 ** np.arange(CLIENTS)  # the last is 21 times as rare as the first
    who = draw.choice(CLIENTS, size=ARRIVALS, p=chances / chances.sum())
    sent = torch.from_numpy(draw.normal(size=(ARRIVALS, SIZE)).astype(np.float32)).clamp(-4, 4)
    strategy = MRAsyncFL(gamma=gamma, precision=precision)
    server = Server(strategy, torch.from_numpy(draw.normal(size=SIZE).astype(np.float32)), CLIENTS)
    state: Any = server.state
    c = np.full(CLIENTS, 1 / CLIENTS)  # eq. 12, for everyone at every arrival
    worst = 0.0
    for number, client in enumerate(who.tolist()):
        server.submit(Update(server.checkout(client, 0.0), sent[number], None, 1))
        c *= gamma
        c[client] += 1 - gamma
        if number % EVERY == EVERY - 1:
            now = np.array([strategy.coefficient(state, j) for j in range(CLIENTS)])
            np.testing.assert_allclose(now, c, rtol=1e-9)
            assert abs(now.sum() - 1) <= TOLERANCE  # (13)
            stored = np.stack([state.table.row(j, torch.float64).numpy() for j in range(CLIENTS)])
            worst = max(worst, float(np.abs(c @ stored - state.params.double().numpy()).max()))  # (4), (11)
            assert worst <= TOLERANCE
    assert server.version == ARRIVALS
    assert set(who.tolist()) == set(range(CLIENTS))
    # not vacuous: what is stored is not what was sent, and the bound does not come from everything being small
    last = sent[np.flatnonzero(who == 0)[-1]]
    exact = torch.equal(state.table.row(0), last)
    assert exact == (precision == "float32")
    assert state.params.abs().max() > 0.1


def test_clients_not_yet_heard_hold_the_initial_model_exactly() -> None:
    """Their rows were never written, so nothing was rounded: also below float32 the mixture starts exact."""
    for precision in ("float32", "bfloat16", "int8"):
        initial = torch.linspace(-1.3, 1.7, SIZE)
        server = Server(MRAsyncFL(precision=precision), initial, CLIENTS)
        state: Any = server.state
        for client in range(3):
            server.submit(Update(server.checkout(client, 0.0), initial + 0.1 * client, None, 1))
        for client in range(3, CLIENTS):
            assert torch.equal(state.table.row(client), initial)
        c = [server.strategy.coefficient(state, j) for j in range(CLIENTS)]  # type: ignore[attr-defined]
        mixed = sum(c[j] * state.table.row(j, torch.float64) for j in range(CLIENTS))
        torch.testing.assert_close(state.params.double(), mixed, rtol=0, atol=1e-6)
