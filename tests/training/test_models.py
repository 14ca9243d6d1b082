"""Models: sizes of the papers' networks, deterministic starts, adaptation to shapes."""

from __future__ import annotations

import pytest
import torch

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.training.models import MODELS, FedAsyncCnn, Linear, Mlp, Point, ResNet18, build


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters", "statistics"),
    [
        ("linear", (1, 28, 28), 10, 7_850, 0),  # 784*10 + 10
        ("mlp", (1, 28, 28), 10, 50_890, 0),  # 785*64 + 65*10
        ("mnist-cnn", (1, 28, 28), 10, 421_642, 0),
        ("cifar-cnn", (3, 32, 32), 10, 3_353_034, 0),
        ("fedasync-cnn", (3, 24, 24), 10, 2_625_866, 768),  # means and variances of 64+64+128+128 channels
        ("resnet18", (3, 32, 32), 10, 11_173_962, 9_600),
        ("point", (5,), 1, 2, 0),
    ],
)
def test_sizes(name: str, shape: tuple[int, ...], classes: int, parameters: int, statistics: int) -> None:
    module = build(MODELS[name](), shape, classes, seed=0)
    layout = Layout.of(module)
    assert (layout.parameters, layout.statistics) == (parameters, statistics)


@pytest.mark.parametrize("name", ["linear", "mlp", "mnist-cnn", "cifar-cnn", "fedasync-cnn", "resnet18"])
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 19, 22)])
def test_every_image_model_adapts_to_channels_and_size(name: str, shape: tuple[int, ...]) -> None:
    module = build(MODELS[name](), shape, 7, seed=0).eval()
    with torch.no_grad():
        assert module(torch.zeros(2, *shape)).shape == (2, 7)


def test_group_norm_has_no_statistics_and_the_same_weights() -> None:
    batch, group = (Layout.of(build(ResNet18(norm=norm), (3, 32, 32), 10, 0)) for norm in ("batch", "group"))
    assert group.statistics == 0
    assert group.parameters == batch.parameters


def test_the_start_is_a_function_of_the_seed_and_leaves_the_global_stream_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    vectors = []
    for seed in (1, 1, 2):
        module = build(Mlp(hidden=(8,)), (4,), 3, seed)
        vectors.append(Layout.of(module).flatten(module))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])


def test_mlp_without_hidden_layers_is_linear() -> None:
    one, two = (Layout.of(build(model, (4,), 3, 0)) for model in (Mlp(hidden=()), Linear()))
    assert one == two


def test_fedasync_starts_from_xavier_with_zero_biases() -> None:
    module = build(FedAsyncCnn(), (3, 24, 24), 10, 0)
    bound = (6 / (9 * 3 + 9 * 64)) ** 0.5  # sqrt(6 / (fan in + fan out)) of the first convolution
    assert 0.95 * bound < module[0].weight.detach().abs().max() <= bound
    assert not module[0].bias.any()


def test_point_is_a_quadratic() -> None:
    module = build(Point(start=(1.0, 2.0)), (5,), 1, 0)
    rows = torch.tensor([[2.0, 0.5, 3.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0, 2.0]])
    # 1/2 (1,2) [[2, .5], [.5, 3]] (1,2)' = 1/2 (2 + 2*.5*2 + 3*4) = 8; the second row's centre is the point
    outputs = module(rows)
    assert outputs.tolist() == [8.0, 0.0]
    outputs[0].backward()
    assert module.point.grad.tolist() == [3.0, 6.5]  # A (w - c) = (2 + 1, .5 + 6)
    assert build(Point(), (5,), 1, 0).point.tolist() == [-10.0, -10.0]


def test_refusals() -> None:
    with pytest.raises(InputError, match=r"mnist-cnn wants images .* \(784,\): choose linear or mlp"):
        build(MODELS["mnist-cnn"](), (784,), 10, 0)
    with pytest.raises(InputError, match="16x16 or more, not 8x8"):
        build(MODELS["cifar-cnn"](), (3, 8, 8), 10, 0)
    with pytest.raises(InputError, match="examples have shape"):
        build(Point(), (2,), 1, 0)
    with pytest.raises(InputError, match="3 numbers"):
        Point(start=(1.0, 2.0, 3.0))
    with pytest.raises(InputError, match="did you mean 'group'"):
        ResNet18(norm="groups")
    with pytest.raises(InputError, match="groups = 3 does not divide 64"):
        ResNet18(norm="group", groups=3)
    with pytest.raises(InputError, match="hidden = 0"):
        Mlp(hidden=(0,))
    with pytest.raises(InputError, match="dropout = 1"):
        FedAsyncCnn(dropout=1.0)
    with pytest.raises(InputError, match="classes = 0"):
        build(Linear(), (2,), 0, 0)
