"""Flat vectors: order, views, ties, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from afield.core.errors import InputError
from afield.core.flat import Layout, own_copy


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def test_order_is_parameters_then_float_buffers() -> None:
    layout = Layout.of(network())
    assert layout.names == (
        *("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"),
        *("1.running_mean", "1.running_var"),
    )
    assert layout.offsets == (0, 12, 16, 20, 24, 32, 34, 38)
    assert (layout.parameters, layout.statistics, layout.size) == (34, 8, 42)  # 12+4+4+4+8+2, then 4+4


def test_flatten_copies_and_load_writes() -> None:
    module = network()
    layout = Layout.of(module)
    vector = layout.flatten(module)
    expected = torch.cat(
        [*(p.detach().reshape(-1) for p in module.parameters()), torch.zeros(4), torch.ones(4)]
    )
    assert torch.equal(vector, expected)
    before = module[0].weight.detach().clone()
    vector.zero_()
    assert torch.equal(module[0].weight, before)  # a copy
    new = torch.arange(42.0)
    layout.load(new, module)
    assert torch.equal(module[0].weight, torch.arange(12.0).view(4, 3))
    assert torch.equal(module[1].running_var, torch.arange(38.0, 42.0))
    assert torch.equal(layout.flatten(module), new)
    new.zero_()
    assert module[0].bias[0] == 12  # load copied, too


def test_attach_shares_memory_both_ways() -> None:
    module = network()
    layout = Layout.of(module)
    weight = module[0].weight
    vector = torch.arange(42.0)
    layout.attach(vector, module)
    assert module[0].weight is weight  # the same Parameter object
    assert torch.equal(weight, torch.arange(12.0).view(4, 3))
    vector[0] = -7
    assert weight[0, 0] == -7
    with torch.no_grad():
        module[1].running_mean.fill_(5)
        weight[3, 2] = 9
    assert vector[34:38].tolist() == [5, 5, 5, 5]
    assert vector[11] == 9
    assert module[1].num_batches_tracked.dtype == torch.long  # left out, left alone


def test_a_forward_pass_of_attached_batch_norms_writes_into_the_vector() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.BatchNorm1d(2, momentum=None))
    layout = Layout.of(module)
    vector = layout.flatten(module)
    layout.attach(vector, module)
    module(torch.tensor([[1.0, 2.0], [3.0, 6.0]])).sum().backward()
    assert vector[8:10].tolist() == [2.0, 4.0]


def test_views_serve_functional_call_and_autograd() -> None:
    module = network().eval()
    layout = Layout.of(module)
    vector = layout.flatten(module)
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.func.functional_call(module, layout.views(vector), (inputs,)), module(inputs))
    views = layout.views(vector)
    assert all(
        view.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr() for view in views.values()
    )
    traced = vector.clone().requires_grad_()
    torch.func.functional_call(module, layout.views(traced), (inputs,)).sum().backward()
    module(inputs).sum().backward()
    assert traced.grad is not None
    assert torch.equal(traced.grad[:34], torch.cat([p.grad.reshape(-1) for p in module.parameters()]))


def test_views_of_gradients_and_of_stacked_models() -> None:
    layout = Layout.of(network())
    gradient = layout.views(torch.arange(34.0))
    assert list(gradient) == list(layout.names[:6])
    assert gradient["3.bias"].tolist() == [32, 33]
    rows = torch.arange(84.0).view(2, 42)
    stacked = layout.views(rows)
    assert stacked["0.weight"].shape == (2, 4, 3)
    assert stacked["1.running_var"].tolist() == [[38, 39, 40, 41], [80, 81, 82, 83]]
    stacked["0.weight"][1, 0, 0] = -1
    assert rows[1, 0] == -1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.two = nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight


def test_tied_parameters_count_once_and_stay_tied() -> None:
    module, layout, vector = own_copy(Tied())
    assert (layout.names, layout.size) == (("one.weight",), 9)
    assert module.one.weight is module.two.weight
    vector.fill_(2)
    assert module.two.weight.sum() == 18


def test_frozen_parameters_and_only_saved_buffers_are_part_of_the_vector() -> None:
    module = nn.Linear(2, 1)
    module.weight.requires_grad_(False)
    module.register_buffer("mask", torch.ones(7), persistent=False)
    module.register_buffer("count", torch.zeros(3, dtype=torch.long))
    module.register_buffer("scale", torch.ones(5))
    assert Layout.of(module).names == ("weight", "bias", "scale")


def test_own_copy_leaves_the_module_alone() -> None:
    module = network()
    before = Layout.of(module).flatten(module)
    own, layout, vector = own_copy(module)
    vector.zero_()
    assert torch.equal(layout.flatten(module), before)
    assert not layout.flatten(own).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_recurrent_weights_stay_in_the_vector() -> None:
    own, _, vector = own_copy(nn.LSTM(2, 3), "cuda")
    own.flatten_parameters()  # on CUDA, torch's own would re-pack the weights elsewhere
    own(torch.zeros(1, 1, 2, device="cuda"))
    vector.fill_(0.25)
    assert all(bool((parameter == 0.25).all()) for parameter in own.parameters())


def test_float64_keeps_its_type() -> None:
    _, layout, vector = own_copy(network().double())
    assert layout.dtype == vector.dtype == torch.float64


def test_refusals_name_the_trouble() -> None:
    with pytest.raises(InputError, match="ReLU has 0 parameters"):
        Layout.of(nn.ReLU())
    mixed = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())
    with pytest.raises(InputError, match=r"0\.weight is torch\.float32 but 1\.weight is torch\.float64"):
        Layout.of(mixed)
    statistics = nn.Sequential(nn.Linear(1, 1).bfloat16(), nn.BatchNorm1d(1, affine=False))
    with pytest.raises(InputError, match="running_mean"):
        Layout.of(statistics)
    with pytest.raises(InputError, match="no shape yet"):
        Layout.of(nn.LazyLinear(3))
    module = network()
    layout = Layout.of(module)
    for vector in (torch.zeros(41), torch.zeros(34), torch.zeros(2, 42)):
        with pytest.raises(InputError, match="not a model of 42 elements"):
            layout.attach(vector, module)
        with pytest.raises(InputError, match="not a model of 42 elements"):
            layout.load(vector, module)
    with pytest.raises(InputError, match="not a model of 42"):
        layout.views(torch.zeros(35))
    with pytest.raises(InputError, match=r"torch\.float64"):
        layout.attach(torch.zeros(42, dtype=torch.float64), module)
    with pytest.raises(InputError, match="does not have this layout"):
        layout.flatten(nn.Linear(3, 4))
