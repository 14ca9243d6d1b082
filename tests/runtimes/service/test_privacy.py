"""Differential privacy: what is clipped, how much noise there is, what it costs, where its key is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from served import live, until
from tiny import tiny
from torch import nn

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.core.types import Task
from afield.runtimes.service.privacy import Privacy, Private, epsilon, secret
from afield.strategies import ACE, FedBuff

pytest.importorskip("dp_accounting")
LAYOUT = Layout.of(nn.Linear(400, 500))
KEY = bytes(range(32))


def task(number: int) -> Task:
    return Task(number, 0, 0, 0, 0.0)


def test_an_update_is_clipped_and_the_noise_of_a_whole_buffer_has_the_right_size() -> None:
    private = Private(Privacy(clip=2.0, noise=1.5), FedBuff(size=4), LAYOUT, KEY)
    base = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(1))
    far = base + 0.1  # a norm of 0.1 sqrt(P), far beyond the clip
    total = sum((private.applied(task(k), base, far) - base).double() for k in range(4))
    assert isinstance(total, torch.Tensor)
    noise = total - 4 * 2.0 / math.sqrt(LAYOUT.size)
    assert float(noise.std()) == pytest.approx(1.5 * 2.0, rel=0.01)
    assert abs(float(noise.mean())) < 5 * 3.0 / math.sqrt(LAYOUT.size)
    kurtosis = float(((noise / noise.std()) ** 4).mean())
    assert kurtosis == pytest.approx(3.0, abs=0.1)
    near = base + 1e-4  # within the clip: left as it is
    got = (private.applied(task(9), base, near) - base).double()
    same = (private.applied(task(9), base, base) - base).double()
    assert float((got - same - 1e-4).abs().max()) < 1e-6


def test_the_noise_is_a_function_of_the_key_and_the_task() -> None:
    base = torch.zeros(LAYOUT.size)
    settings = Privacy()
    one, two = (Private(settings, FedBuff(), LAYOUT, key) for key in (KEY, KEY[::-1]))
    first = one.applied(task(1), base, base)
    assert torch.equal(first, one.applied(task(1), base, base))
    for other in (one.applied(task(2), base, base), two.applied(task(1), base, base)):
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 0.02


def test_epsilon_is_that_of_composed_gaussians() -> None:
    """Checked against the bound by hand: the least over alpha of T alpha / (2 z^2) + log(1/delta) / (alpha - 1)."""
    noise, steps, delta = 2.0, 25, 1e-5
    crude = min(
        steps * a / (2 * noise**2) + math.log(1 / delta) / (a - 1)
        for a in (1 + k / 100 for k in range(1, 3000))
    )
    assert 0.8 * crude < epsilon(noise, steps, delta) <= crude * 1.001
    assert epsilon(noise, 0, delta) == 0.0
    assert epsilon(noise, 26, delta) > epsilon(noise, 25, delta) > epsilon(2 * noise, 25, delta)


def test_it_is_refused_where_its_promise_would_not_hold() -> None:
    from afield.strategies.staleness import Polynomial

    with pytest.raises(InputError, match="privacy is for fedbuff"):
        Private(Privacy(), ACE(), LAYOUT, KEY)
    with pytest.raises(InputError, match="constant"):
        Private(Privacy(), FedBuff(weight=Polynomial()), LAYOUT, KEY)
    norm = Layout.of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(InputError, match="statistics"):
        Private(Privacy(), FedBuff(), norm, KEY)


def test_the_key_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "privacy.key"
    key = secret(path)
    assert len(key) == 32 and secret(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(InputError, match="others may read it"):
        secret(path)


def test_a_private_service_counts_each_client_once_per_step_and_shows_what_it_cost(tmp_path: Path) -> None:
    chosen = tiny("fedbuff", measure={"versions": 1})
    settings = Privacy(clip=1.0, noise=4.0)
    with live(chosen, tmp_path / "run", privacy=settings) as server:
        http = server.http()
        for client in (0, 1):
            for task in server.client(client).tasks(1):
                assert not task.submit(task.base + 1, examples=1).refused
        # it waits for the next version
        assert http.post("/v1/tasks", params={"client": 0, "wait": 0.1}).status_code == 204
        assert http.get("/v1/status").json()["privacy"]["steps"] == 1
    with live(chosen, tmp_path / "run", privacy=settings) as server:
        http = server.http()
        assert (
            http.post("/v1/tasks", params={"client": 0, "wait": 0.1}).status_code == 204
        )  # after a restart too
        for task in server.client(2).tasks(1):
            task.submit(task.base + 1, examples=1)
        for task in server.client(0).tasks(1):
            assert task.version == 1
            task.submit(task.base + 1, examples=1)
        told = http.get("/v1/status").json()["privacy"]
        assert told["steps"] == 2 and told["epsilon"] == pytest.approx(epsilon(4.0, 2, 1e-5))
        until(lambda: [row for row in http.get("/v1/history").json()["rows"] if row["values"].get("epsilon")])
        assert f"afield_epsilon {told['epsilon']}" in http.get("/metrics").text
    assert not list((tmp_path / "run").rglob("*.key"))
    assert (tmp_path / "run.keys" / "privacy.key").exists()
