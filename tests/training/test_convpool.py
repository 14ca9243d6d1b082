"""Convolutions with ReLU and max pooling of many clients at once: what torch's own layers give, client by client."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from afield.scenarios.data import ClientData
from afield.training.choose import Training, graphs
from afield.training.convpool import ConvPool, conv_pool, conv_pool_back, poolings
from afield.training.cuda import GraphTrainer
from afield.training.local import Local
from afield.training.models import Mlp, MnistCnn, ResNet18, build
from afield.training.streams import StreamTrainer

# rows, batch, high, wide, channels in, channels out, side, padding
SIZES = [
    (2, 3, 8, 8, 1, 4, 3, 1),
    (2, 2, 9, 7, 3, 5, 3, 0),  # a line and a column that no window has
    (3, 2, 6, 6, 4, 20, 5, 2),
    (2, 2, 7, 7, 16, 32, 3, 1),
    (2, 70, 14, 14, 32, 64, 3, 1),
    (3, 20, 12, 12, 16, 32, 5, 0),
    (2, 8, 10, 10, 16, 128, 3, 1),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}  # how far a GPU may be off: 1.4e-6 and 1.9e-3 on an H200


def drawn(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Images [rows, batch, channels, high, wide], kernels and biases."""
    rows, batch, high, wide, into, out, side, _ = sizes
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(rows, batch, into, high, wide, generator=draw)
    weight = torch.randn(rows, out, into, side, side, generator=draw) / (side * into**0.5)
    return images, weight, 0.5 * torch.randn(rows, out, generator=draw)


def plain(images: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    """Client by client, by torch's layers."""
    each = zip(images, weight, bias, strict=True)
    return torch.stack(
        [functional.max_pool2d(functional.conv2d(i, w, b, padding=padding).relu(), 2) for i, w, b in each]
    )


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """No TF32: the CPU has none."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_are_those_of_torchs_layers(sizes: tuple[int, ...], flat: bool) -> None:
    leaves = [part.requires_grad_() for part in drawn(sizes)]
    right = plain(*leaves, sizes[-1])
    slope = torch.randn(right.shape, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad(right, leaves, slope)
    images, weight, bias = (part.detach().requires_grad_() for part in leaves)
    found, code = conv_pool(images.permute(0, 1, 3, 4, 2).contiguous(), weight, bias, sizes[-1], flat)
    assert int(code.max()) == 4  # some ReLU is off
    found = found if flat else found.permute(0, 1, 4, 2, 3)
    near = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found, right, **near)
    given = torch.autograd.grad(found, [images, weight, bias], slope)
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, other, **near)


def test_the_kernels_are_the_definition_by_tritons_interpreter() -> None:
    script = Path(__file__).with_name("interpreted.py")
    told = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=told, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == "4 sizes agree\n", done.stderr


class Last(nn.Module):
    """Something that a stack of clients does not take."""

    def forward(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("device", DEVICES)
def test_small_networks_train_stacked_and_others_side_by_side(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    draw = torch.Generator().manual_seed(0)
    images, labels = torch.randn(12, 1, 28, 28, generator=draw), torch.randint(10, (12,), generator=draw)
    data = ClientData(images, labels, list(torch.arange(12).split(6)))

    def kind(module: nn.Module) -> type:
        return type(graphs(module, data, Local(batch=3), 0, "cross-entropy", device, Training()))

    small = build(MnistCnn(), (1, 28, 28), 10, 0)
    assert kind(small) is kind(build(Mlp(), (1, 28, 28), 10, 0)) is GraphTrainer
    assert kind(build(ResNet18(), (1, 28, 28), 10, 0)) is StreamTrainer
    assert not caplog.records
    assert kind(nn.Sequential(Last(), *small)) is StreamTrainer
    assert "trained client by client, on streams" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_kernels_of_a_gpu_are_the_definition(
    sizes: tuple[int, ...], flat: bool, into: bool, kind: torch.dtype
) -> None:
    """Their gradients for the same choices: of two nearly equal ones a GPU may take the other."""
    images, weight, bias = drawn(sizes)
    x, w = images.permute(0, 1, 3, 4, 2).contiguous().to(kind), weight.to(kind)
    right, code = conv_pool(x.float(), w.float(), bias, sizes[-1], flat)
    slope = torch.randn(right.shape, generator=torch.Generator().manual_seed(2)).to(kind)
    back = (sizes[-1], flat, into)
    wanted = (right, *conv_pool_back(slope.float(), code, x.float(), w.float(), *back))
    given, chosen = conv_pool(x.cuda(), w.cuda(), bias.cuda(), sizes[-1], flat)
    found = (given, *conv_pool_back(slope.cuda(), code.cuda(), x.cuda(), w.cuda(), *back))
    assert float((chosen.cpu() != code).float().mean()) < KINDS[kind]
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert float((one.cpu().float() - other).norm()) <= KINDS[kind] * float(other.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_of_equals_has_the_gradient_and_nan_is_not_lost(device: str) -> None:
    x = torch.zeros(1, 2, 2, 2, 1)
    x[0, 1, 1, 0, 0] = torch.nan
    weight, bias = torch.ones(1, 1, 1, 1, 1), torch.ones(1, 1)
    found, code = conv_pool(x.to(device), weight.to(device), bias.to(device), 0, False)
    assert found.flatten().tolist() == [1.0, pytest.approx(torch.nan, nan_ok=True)]
    assert code.flatten().tolist() == [0, 2]


CONV, RELU, POOL = nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2)


@pytest.mark.parametrize(
    "layers",
    [
        (CONV, POOL, RELU),
        (CONV, nn.Tanh(), POOL),
        (CONV, RELU, nn.MaxPool2d(3)),
        (CONV, RELU, nn.MaxPool2d(2, stride=1)),
        (CONV, RELU, nn.MaxPool2d(2, ceil_mode=True)),
        (nn.Conv2d(2, 4, 3, stride=2), RELU, POOL),
        (nn.Conv2d(2, 4, 3, dilation=2), RELU, POOL),
        (nn.Conv2d(2, 4, 3, groups=2), RELU, POOL),
        (nn.Conv2d(2, 4, 3, bias=False), RELU, POOL),
        (nn.Conv2d(2, 4, 3, padding=(0, 1)), RELU, POOL),
        (nn.Conv2d(2, 4, 3, padding="same"), RELU, POOL),
        (nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), RELU, POOL),
        (nn.Conv2d(2, 4, (3, 1)), RELU, POOL),
        (nn.Conv2d(2, 200, 3), RELU, POOL),
        (nn.Conv2d(2, 4, 3).double(), RELU, POOL),
    ],
)
def test_what_is_another_layer_is_left_as_it_is(layers: tuple[nn.Module, ...]) -> None:
    assert poolings(nn.Sequential(*layers)) == []
    whole = nn.Sequential(CONV, RELU, POOL, *layers)
    assert [place for _, place in poolings(whole)] == [0]


def test_a_layer_that_somebody_looks_at_stays() -> None:
    relu = nn.ReLU()
    relu.register_forward_hook(lambda *_: None)
    assert poolings(nn.Sequential(CONV, relu, POOL)) == []


@pytest.mark.parametrize("place", [0, 1, 2])
def test_wherever_vmap_keeps_the_clients(place: int) -> None:
    images, weight, bias = drawn(SIZES[1])
    conv = nn.Conv2d(3, 5, 3)
    layer = ConvPool(conv, flat=False)

    def one(client: Tensor, kernels: Tensor, biases: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": kernels, "bias": biases}, (client,))

    found = torch.func.vmap(one, in_dims=(place, 0, 0))(images.movedim(0, place), weight, bias)
    torch.testing.assert_close(found, plain(images, weight, bias, 0), rtol=1e-4, atol=1e-4)
