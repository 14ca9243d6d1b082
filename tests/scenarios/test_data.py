"""Clients' data, the digits, the quadratic, and what all sources share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from afield.core.errors import InputError
from afield.scenarios.data import DATA, ClientData, ListedData, client_data, pooled
from afield.scenarios.dataset import NOISE, Dataset
from afield.scenarios.images import Digits
from afield.scenarios.quadratic import Quadratic


def same(a: Dataset, b: Dataset) -> bool:
    return (
        torch.equal(a.inputs, b.inputs)
        and torch.equal(a.targets, b.targets)
        and torch.equal(a.test_inputs, b.test_inputs)
        and torch.equal(a.test_targets, b.test_targets)
    )


# ---- digits, and what all published sets share


def test_digits_have_one_test_set_for_all_seeds() -> None:
    a, b = Digits().load(0), Digits().load(1)
    assert same(a, b)
    assert a.inputs.shape == (1438, 64)  # 1797 - round(0.2 * 1797)
    assert a.test_inputs.shape == (359, 64)
    assert a.inputs.min() == 0
    assert a.inputs.max() == 1
    assert sorted(torch.unique(a.test_targets).tolist()) == list(range(10))
    image = Digits(image=True).load(0)
    assert image.inputs.shape == (1438, 1, 8, 8)
    assert torch.equal(image.inputs.flatten(1), a.inputs)


def test_held_out_examples_go_to_no_client() -> None:
    everything, cut = Digits().load(0), Digits(held_out=100).load(0)
    assert cut.unlabelled is not None
    assert cut.unlabelled.shape == (100, 64)
    assert len(cut.targets) == 1338
    together = torch.cat([cut.inputs, cut.unlabelled])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, everything.inputs.tolist()))
    assert torch.equal(cut.test_inputs, everything.test_inputs)


def test_limit_is_a_keyed_choice_of_examples_with_their_labels() -> None:
    everything = Digits().load(0)
    a, again, b = Digits(limit=50).load(0), Digits(limit=50).load(0), Digits(limit=50).load(1)
    assert len(a.targets) == 50
    assert same(a, again)
    assert not torch.equal(a.inputs, b.inputs)
    label_of = dict(zip(map(tuple, everything.inputs.tolist()), everything.targets.tolist(), strict=True))
    assert [label_of[tuple(row)] for row in a.inputs.tolist()] == a.targets.tolist()
    assert same(Digits(limit=10**6).load(0), everything)
    both = Digits(limit=50, held_out=20).load(0)
    assert both.unlabelled is not None
    assert (len(both.targets), len(both.unlabelled)) == (50, 20)


def test_noise_and_test_inputs_as_unlabelled() -> None:
    a, again, b = (Digits(image=True, unlabelled="noise").load(seed).unlabelled for seed in (0, 0, 1))
    assert a is not None
    assert again is not None
    assert b is not None
    assert a.shape == (NOISE, 1, 8, 8)
    assert abs(a.mean().item()) < 0.02  # 128,000 standard normals: standard error 0.003
    assert abs(a.std().item() - 1) < 0.02
    assert torch.equal(a, again)
    assert not torch.equal(a, b)
    test = Digits(unlabelled="test").load(0)
    assert test.unlabelled is not None
    assert torch.equal(test.unlabelled, test.test_inputs)


def test_loading_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    Digits(unlabelled="noise", limit=10).load(3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"test": 0.0}, r"test = 0\.0 is outside \(0, 1\)"),
        ({"held_out": -1}, r"held_out = -1 is outside"),
        ({"limit": 0}, r"limit = 0 is outside"),
        ({"unlabelled": "nois"}, r"did you mean 'noise'\?"),
        ({"unlabelled": "cifar100-test"}, r"unlabelled = 'cifar100-test' is not known"),
        ({"unlabelled": "noise", "held_out": 5}, r"two unlabelled sets; leave one out"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Digits(**fields)


def test_holding_out_everything_is_refused() -> None:
    with pytest.raises(InputError, match="held_out = 1438 of 1438 training examples; at most 1437"):
        Digits(held_out=1438).load(0)


# ---- the quadratic


def test_the_quadratic_rows_and_optimum() -> None:
    config = Quadratic()
    data = config.load(0)
    assert data.loss == "value"
    assert data.classes == 1
    assert data.targets.tolist() == [0, 0]
    assert data.inputs.tolist()[0] == pytest.approx([1.0, 0.0, 0.2, -2.0, -1.0])
    assert torch.equal(data.inputs, data.test_inputs)
    # x: (1 * -2 + 0.2 * 2) / 1.2, y: (0.2 * -1 + 1 * 1) / 1.2
    assert config.optimum() == pytest.approx((-4 / 3, 2 / 3))


def test_the_gradient_vanishes_at_the_optimum_of_skewed_bowls() -> None:
    config = Quadratic(curvatures=((2, 1, 3), (1, -0.5, 1), (4, 0, 0.1)), optima=((1, 2), (-3, 0), (0.5, -7)))
    w1, w2 = config.optimum()
    gradient = [0.0, 0.0]
    for a11, a12, a22, c1, c2 in config.load(0).inputs.double().tolist():
        gradient[0] += a11 * (w1 - c1) + a12 * (w2 - c2)
        gradient[1] += a12 * (w1 - c1) + a22 * (w2 - c2)
    assert gradient == pytest.approx([0, 0], abs=1e-5)


@pytest.mark.parametrize(
    ("curvatures", "optima", "message"),
    [
        (((1, 2, 1),), ((0, 0),), r"curvatures\[0\] = \(1, 2, 1\) has no minimum"),
        (((1, 0, 1),), ((0, 0), (1, 1)), "1 curvatures and 2 optima"),
        (((1, 0, 1),), ((0,),), r"optima\[0\] = \(0,\); give 2 finite numbers"),
        (((1, 0),), ((0, 0),), r"curvatures\[0\] = \(1, 0\); give 3"),
        ((), (), "0 curvatures and 0 optima"),
    ],
)
def test_bad_bowls_are_refused(curvatures: Any, optima: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Quadratic(curvatures=curvatures, optima=optima)


# ---- the clients' view


def test_client_data_gives_a_client_its_own_examples() -> None:
    inputs, targets = torch.arange(12.0).view(6, 2), torch.arange(6)
    data = ClientData(inputs, targets, [torch.tensor([4, 0, 5]), torch.tensor([1, 2, 3])])
    assert data.sizes == [3, 3]
    x, y = data.batch(0, torch.tensor([2, 1]))
    assert y.tolist() == [5, 0]
    assert x.tolist() == [[10, 11], [0, 1]]


def test_tensor_datasets_become_one_pool() -> None:
    first = TensorDataset(torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 2]))
    second = TensorDataset(torch.arange(6.0, 10.0).view(2, 2), torch.tensor([3, 4]))
    data = client_data([first, second])
    assert isinstance(data, ClientData)
    assert data.sizes == [3, 2]
    x, y = data.batch(1, torch.tensor([1, 0]))
    assert (x.tolist(), y.tolist()) == ([[8, 9], [6, 7]], [4, 3])
    assert pooled(data).sizes == [5]
    assert pooled(data).batch(0, torch.arange(5))[1].tolist() == [0, 1, 2, 3, 4]


class _Words(TorchDataset[Any]):
    """Examples with a dictionary of inputs, as language models have."""

    def __init__(self, start: int, count: int) -> None:
        self.start, self.count = start, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], int]:
        return {"tokens": torch.tensor([self.start + index, 7])}, (self.start + index) % 2


def test_any_dataset_is_listed_and_pooled() -> None:
    data = client_data([_Words(0, 3), _Words(10, 1), _Words(20, 2)])
    assert isinstance(data, ListedData)
    assert data.sizes == [3, 1, 2]
    x, y = data.batch(2, torch.tensor([1, 0]))
    assert x["tokens"].tolist() == [[21, 7], [20, 7]]
    assert y.tolist() == [1, 0]
    whole = pooled(data)
    assert whole.sizes == [6]
    x, y = whole.batch(0, torch.arange(6))
    assert x["tokens"][:, 0].tolist() == [0, 1, 2, 10, 20, 21]
    assert y.tolist() == [0, 1, 0, 0, 0, 1]


def test_unlike_tensors_are_listed_not_pooled() -> None:
    wide = TensorDataset(torch.zeros(2, 5), torch.zeros(2))
    slim = TensorDataset(torch.zeros(2, 3), torch.zeros(2))
    assert isinstance(client_data([wide, slim]), ListedData)


def test_datasets_that_cannot_be_used_are_named() -> None:
    empty = TensorDataset(torch.zeros(0, 2), torch.zeros(0))
    full = TensorDataset(torch.zeros(3, 2), torch.zeros(3))
    with pytest.raises(InputError, match="client 1's data set has no length or no examples"):
        client_data([full, empty])
    with pytest.raises(InputError, match="give one per client"):
        client_data([])
    triples = TensorDataset(torch.zeros(3, 2), torch.zeros(3), torch.zeros(3))
    with pytest.raises(InputError, match="client 0's examples are not pairs"):
        client_data([triples]).batch(0, torch.tensor([0]))


def test_every_config_is_registered_and_has_a_line_to_show() -> None:
    texts = {"mrpc", "newsgroups", "gsm8k", "mathinstruct", "synthetic-texts"}
    images = {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "synthetic"}
    assert set(DATA) == {*images, *texts, "quadratic"}
    for config in DATA.values():
        assert config.__doc__
        assert config() == config()
        assert eval(repr(config()), {config.__name__: config}) == config()
