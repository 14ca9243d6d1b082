"""The same simulation on a CUDA device: the same event log, and the same model to float error."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import afield
from afield.core.flat import Layout
from afield.scenarios.data import ClientData
from afield.scenarios.images import Synthetic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def run(name: str, device: str, precision: str | None = None) -> afield.Result:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (240,), generator=draw)
    inputs = 3 * torch.eye(3, 5)[labels] + torch.randn(240, 5, generator=draw)
    clients = [TensorDataset(inputs[i:200:5], labels[i:200:5]) for i in range(5)]
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    options = {"size": 3} if name in ("fedbuff", "ca2fl", "fadas", "fedac", "fedecho") else {}
    more = {"precision": precision} if precision else {}
    return afield.simulate(
        afield.STRATEGIES[name](**options, **more),
        module,
        clients,
        test=(inputs[200:], labels[200:]),
        unlabelled=inputs[200:] if name == "fedecho" else None,
        delay=afield.delays.Exponential(),
        rounds=afield.schedulers.Cohort(3),
        local=afield.Local(rate=0.05, batch=16),
        updates=40,
        device=device,
    )


@pytest.mark.parametrize("name", afield.STRATEGIES)
def test_cuda_equals_cpu(name: str) -> None:
    here, there = run(name, "cpu"), run(name, "cuda")
    drop = {"weight"}  # FedAC's cosines are sums over the vector
    fields = [f for f in afield.Receipt.__dataclass_fields__ if f not in drop]
    assert [[getattr(r, f) for f in fields] for r in here.receipts] == [
        [getattr(r, f) for f in fields] for r in there.receipts
    ]
    layout = Layout.of(here.model)
    torch.testing.assert_close(layout.flatten(there.model), layout.flatten(here.model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_augmented_images_on_cuda(kind: str) -> None:
    data = Synthetic(shape=(3, 12, 12), classes=4, train=200, test=40).load(0)
    convolution = [nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Dropout(0.2)] if kind == "cnn" else []

    def run(device: str) -> afield.Result:
        torch.manual_seed(1)
        module = nn.Sequential(*convolution, nn.Flatten(), nn.Linear(600 if convolution else 432, 4))
        return afield.simulate(
            afield.FedBuff(size=3),
            module,
            ClientData(data.inputs, data.targets, list(torch.arange(200).split([30, 50, 25, 55, 40]))),
            test=(data.test_inputs, data.test_targets),
            delay=afield.delays.Exponential(),
            local=afield.Local(rate=0.05, batch=16, augment=True),
            updates=40,
            device=device,
        )

    with torch.backends.cudnn.flags(allow_tf32=False):
        here, there = run("cpu"), run("cuda")
    assert here.receipts == there.receipts
    layout = Layout.of(here.model)
    torch.testing.assert_close(layout.flatten(there.model), layout.flatten(here.model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_small_tables_on_cuda(precision: str) -> None:
    here, there = run("ca2fl", "cpu", precision), run("ca2fl", "cuda", precision)
    layout = Layout.of(here.model)
    torch.testing.assert_close(layout.flatten(there.model), layout.flatten(here.model), rtol=2e-2, atol=2e-2)
