"""Weights found by running a rule on unit vectors, against what the rule does to real updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from playback import BATTERY, PARAMETERS, Play, play
from torch import Tensor

from afield.core.errors import InputError
from afield.core.linear import ClientWeights, TaskWeights, weights_of
from afield.core.server import Server
from afield.core.types import LocalResult, Update
from afield.strategies import ASGD, FedAsync, FedBuff, MRAsyncFL

CLIENTS, BEATS = 5, 90
LINEAR = {name: rule for name, rule in BATTERY.items() if getattr(rule, "linear", "") == "deltas"}
MIXING = {name: rule for name, rule in BATTERY.items() if getattr(rule, "linear", "") == "models"}


def exact(rule: Any) -> Any:
    """Without the rounding of a table, which the weights do not know of."""
    return replace(rule, precision="float32") if hasattr(rule, "precision") else rule


class Followed:
    """A play in float64 whose every step is compared with the weighted sum of the deltas that were sent."""

    def __init__(self, rule: Any) -> None:
        self.play: Play = play(exact(rule), CLIENTS, dtype=torch.float64)
        self.weights = weights_of(rule, CLIENTS)
        assert isinstance(self.weights, TaskWeights)
        self.deltas: dict[int, Tensor] = {}
        self.steps = 0
        server = self.play.server
        self.submit, self.close = server.submit, server.close_round
        server.submit, server.close_round = self._submit, self._close  # type: ignore[method-assign]

    def _submit(self, update: Update) -> Any:
        server, client = self.play.server, update.task.client
        held = self.play.held.sent.get(client)  # what a client that sends differences really did
        delta = held if held is not None else update.model - server.base(update.task)
        self.deltas[update.task.number] = delta[:PARAMETERS].clone()
        before = server.state.params.clone()
        receipt = self.submit(update)
        self.weights.receive(update)
        if receipt.stepped:
            self._compare(before)
        return receipt

    def _close(self) -> int:
        before, version = self.play.server.state.params.clone(), self.play.server.version
        self.close()
        self.weights.close_round()
        if self.play.server.version > version:
            self._compare(before)
        return self.play.server.version

    def _compare(self, before: Tensor) -> None:
        move = self.play.server.state.params - before
        told = torch.zeros_like(move)
        for number, weight in self.weights.step.items():
            told += weight * self.deltas[number]
        torch.testing.assert_close(told, move, rtol=0, atol=1e-9)
        self.steps += bool(self.weights.step)


@pytest.mark.parametrize("name", LINEAR)
def test_the_weights_of_a_step_make_up_its_move(name: str) -> None:
    followed = Followed(LINEAR[name])
    followed.play.run(BEATS)
    assert followed.steps >= BEATS // (8 if name.endswith("tick") else 4)  # a tick may be without a step
    # what was replaced and used up is forgotten: everyone's newest is left, and what a buffer holds
    buffer = 3
    assert len(followed.weights.columns) <= CLIENTS + buffer
    assert len(followed.weights.columns) + len(followed.weights.free) == len(followed.weights.blank)


def test_which_rules_are_linear() -> None:
    known = {"fadas": None, "fedac": None, "fedecho": None, "scaffold": None, "sgd": None}
    for name, rule in BATTERY.items():
        found = weights_of(rule, CLIENTS)
        kind = TaskWeights if name in LINEAR else ClientWeights if name in MIXING else type(None)
        assert type(found) is kind
        assert (found is None) == (name in known)


def test_shares_of_deltas_are_shares_of_all_that_was_applied() -> None:
    followed = Followed(FedBuff(size=3))
    clients = [receipt.client for receipt in followed.play.run(30)]
    assert followed.weights.shares() == pytest.approx([clients.count(c) / 30 for c in range(CLIENTS)])


@pytest.mark.parametrize("name", MIXING)
def test_the_model_is_the_shares_of_the_models_that_were_sent(name: str) -> None:
    """Each client always sends the same model, so the global one is sum_i c_i model_i + c initial."""
    rule = exact(MIXING[name])
    models = torch.randn(CLIENTS + 1, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    server = Server(rule, models[-1], CLIENTS)
    weights = weights_of(rule, CLIENTS)
    assert isinstance(weights, ClientWeights)
    tasks = {client: server.checkout(client, 0.0) for client in range(CLIENTS)}
    for beat in range(60):
        client = beat % 3 if beat % 7 else beat % CLIENTS
        result = LocalResult(models[client], examples=1 + client, steps=1, rate=1.0)
        update = result.answer(tasks[client], float(beat))
        assert not server.submit(update).refused
        weights.receive(update)
        tasks[client] = server.checkout(client, float(beat))
        shares = torch.tensor(weights.shares(), dtype=torch.float64)
        assert float(shares.min()) >= 0
        rest = 1 - float(shares.sum())
        torch.testing.assert_close(server.state.params, shares @ models[:-1] + rest * models[-1])


def test_shares_under_fedasync_and_mr_asyncfl_by_hand() -> None:
    """FedAsync: a (1 - a)^age over all a client's models. MR.AsyncFL: c <- gamma c, the arriving one + 1 - gamma."""
    order = [0, 1, 0, 2, 0]
    mixing, replacing = weights_of(FedAsync(alpha=0.25), 3), weights_of(MRAsyncFL(gamma=0.75), 3)
    rule = MRAsyncFL(gamma=0.75)
    server = Server(rule, torch.zeros(2), 3)
    coefficients = [1 / 3] * 3
    for client in order:
        task = server.checkout(client, 0.0)
        update = LocalResult(torch.ones(2), 1, 1, 1.0).answer(task, 1.0)
        assert mixing is not None and replacing is not None
        mixing.receive(update)
        replacing.receive(update)
        server.submit(update)
        coefficients = [0.75 * c + (0.25 if i == client else 0.0) for i, c in enumerate(coefficients)]
    expected = [0.0] * 3
    for age, client in enumerate(reversed(order)):
        expected[client] += 0.25 * 0.75**age
    assert mixing is not None and mixing.shares() == pytest.approx(expected, abs=1e-12)
    assert replacing is not None and replacing.shares() == pytest.approx(coefficients, abs=1e-12)
    assert [rule.coefficient(server.state, i) for i in range(3)] == pytest.approx(coefficients)  # type: ignore[arg-type]


def test_more_updates_at_once_than_there_is_room_for() -> None:
    class Hoarder(ASGD):
        """Holds every delta and never steps."""

        def receive(self, state: Any, update: Update) -> Any:
            state.total.add_(update.model)
            return replace(ASGD.receive(self, state, update), stepped=False)

    server = Server(ASGD(), torch.zeros(2), 2)
    weights = TaskWeights(Hoarder(per="tick"), 2)
    updates = [LocalResult(torch.ones(2), 1, 1, 1.0).answer(server.checkout(0, 0.0), 1.0) for _ in range(13)]
    for update in updates[:12]:
        weights.receive(update)
    with pytest.raises(InputError, match=r"more than 12 updates count at once in Hoarder.*set it to false"):
        weights.receive(updates[12])
