"""True gradients: against autograd in one pass, and against the trainer with full batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from afield.core.flat import Layout
from afield.core.types import Task
from afield.scenarios.data import ClientData
from afield.training import gradients
from afield.training.gradients import FullGradients
from afield.training.local import Local, LoopTrainer


def data() -> ClientData:
    draws = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(40, 6, generator=draws), torch.randint(0, 3, (40,), generator=draws)
    return ClientData(inputs, targets, [torch.arange(7), torch.arange(7, 40)])


def network(*inner: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), *inner, nn.Tanh(), nn.Linear(5, 3))


def whole(module: nn.Module) -> Tensor:
    return Layout.of(module).flatten(module)


def autograd(module: nn.Module, client: int) -> Tensor:
    inputs, targets = data().batch(client, torch.arange(data().sizes[client]))
    module.zero_grad()
    functional.cross_entropy(module(inputs), targets).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).double()


@pytest.mark.parametrize("client", [0, 1])
@pytest.mark.parametrize("chunk", [500, 4])
def test_a_gradient_is_that_of_all_the_data(monkeypatch: pytest.MonkeyPatch, client: int, chunk: int) -> None:
    monkeypatch.setattr(gradients, "CHUNK", chunk)
    module = network()
    full = FullGradients(module, data(), Local(batch=2, weight_decay=0.3), "cross-entropy")
    other = network(nn.Identity())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    expected = autograd(other, client) + 0.3 * whole(other).double()
    torch.testing.assert_close(full.at(client, whole(other)), expected, rtol=1e-5, atol=1e-6)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_dropout_is_off_and_no_stream_is_touched() -> None:
    full = FullGradients(network(nn.Dropout(0.5)), data(), Local(), "cross-entropy")
    before = torch.get_rng_state()
    found = full.at(1, whole(network()))
    torch.testing.assert_close(found, autograd(network(), 1), rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), before)


def test_batch_norm_sees_batches_of_the_client_s_size() -> None:
    module = network(nn.BatchNorm1d(5))
    full = FullGradients(module, data(), Local(batch=11), "cross-entropy")
    expected = torch.zeros(Layout.of(module).parameters, dtype=torch.float64)
    inputs, targets = data().batch(1, torch.arange(33))
    for start in (0, 11, 22):
        fresh = network(nn.BatchNorm1d(5)).train()
        part = slice(start, start + 11)
        functional.cross_entropy(fresh(inputs[part]), targets[part]).backward()
        expected += (
            torch.cat([p.grad.flatten() for p in fresh.parameters() if p.grad is not None]).double() / 3
        )
    torch.testing.assert_close(full.at(1, whole(module)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"prox": 0.5},
        {"momentum": 0.5, "prox": 1.0, "weight_decay": 0.1},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("steps", [1, 4])
def test_a_way_without_noise_is_the_trainer_with_full_batches(options: dict[str, Any], steps: int) -> None:
    module = network()
    local = Local(steps=steps, batch=100, rate=0.2, **options)
    base = whole(module)
    (result,) = LoopTrainer(module, data(), local, 0).train([Task(0, 1, 0, 0, 0.0)], [base], [None])
    found = FullGradients(module, data(), local, "cross-entropy").along(1, base, steps)
    torch.testing.assert_close(found.float(), (base - result.model) / (0.2 * steps), rtol=1e-4, atol=2e-6)
