"""Evaluation: numbers worked by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from afield.core.errors import InputError
from afield.core.flat import Layout
from afield.training.evaluate import Evaluate
from afield.training.models import MODELS, Point, build


def passing() -> nn.Module:
    """Outputs its inputs: a bias of zero and the identity."""
    module = nn.Linear(3, 3)
    with torch.no_grad():
        module.weight.copy_(torch.eye(3))
        module.bias.zero_()
    return module


# Scores of five examples; the largest decides. Labels: 0 0 0 1 1, of three classes.
SCORES = torch.tensor([[2.0, 0, 0], [2.0, 0, 0], [0, 2.0, 0], [0, 2.0, 0], [0, 0, 2.0]])
LABELS = torch.tensor([0, 0, 0, 1, 1])


def test_accuracies_and_loss_by_hand() -> None:
    module = passing()
    groups = {
        "even": torch.tensor([0.5, 0.5, 0.0]),
        "first": torch.tensor([3, 0, 0]),  # counts will do
        "partly absent": torch.tensor([0.25, 0.25, 0.5]),
        "absent": torch.tensor([0.0, 0.0, 1.0]),
    }
    vector = Layout.of(module).flatten(module)
    for batch in (1, 2, 5, 1000):
        found = Evaluate(module, SCORES, LABELS, 3, groups=groups, batch=batch)(vector)
        assert found["accuracy"] == 3 / 5
        assert found["per_class"] == [2 / 3, 1 / 2, None]
        assert found["groups"]["even"] == pytest.approx(7 / 12)
        assert found["groups"]["first"] == pytest.approx(2 / 3)
        assert found["groups"]["partly absent"] == pytest.approx(7 / 12)
        assert found["groups"]["absent"] is None
        # 3 right with e^2/(e^2+2), 2 wrong with 1/(e^2+2)
        total = math.log(math.exp(2) + 2)
        assert found["loss"] == pytest.approx(total - 3 * 2 / 5, abs=1e-6)
        json.dumps(found)


def test_the_vector_decides_and_the_module_is_left_alone() -> None:
    module = nn.Sequential(passing(), nn.BatchNorm1d(3), nn.Dropout(0.9))
    module.train()
    layout = Layout.of(module)
    before = layout.flatten(module)
    evaluate = Evaluate(module, SCORES, LABELS, 3)
    vector = before.clone()
    layout.views(vector)["1.running_mean"].copy_(torch.tensor([9.0, 0, 0]))  # pushes class 0 down
    assert evaluate(vector)["per_class"] == [0.0, 0.5, None]
    assert evaluate(before)["accuracy"] == 3 / 5
    assert evaluate(before) == evaluate(before)  # no dropout, statistics do not move
    assert module.training
    assert torch.equal(layout.flatten(module), before)
    assert evaluate(before)["groups"] == {}


def test_a_sibling_measures_alike_for_its_own_groups() -> None:
    module = passing()
    vector = Layout.of(module).flatten(module)
    first = Evaluate(module, SCORES, LABELS, 3, groups={"zeros": torch.tensor([1.0, 0, 0])})
    other = first.sibling({"ones": torch.tensor([0, 1.0, 0])})
    shifted = vector + torch.tensor([0.0] * 9 + [0.0, 5.0, 0.0])  # everything is a one
    assert first(vector)["groups"] == {"zeros": pytest.approx(2 / 3)}
    assert other(shifted)["groups"] == {"ones": 1.0}
    assert other(vector)["groups"] == {"ones": 0.5}
    assert {**first(shifted), "groups": 0} == {**other(shifted), "groups": 0}


def test_value_shows_the_point_and_no_accuracy() -> None:
    module = build(Point(), (5,), 1, 0)
    rows = torch.tensor([[1.0, 0, 1, 0, 0], [1.0, 0, 1, 3.0, 4.0]])
    evaluate = Evaluate(module, rows, torch.zeros(2), 1, loss="value", batch=1)
    assert evaluate(torch.tensor([0.0, 0.0])) == {"loss": 6.25, "params": [0.0, 0.0]}  # (0 + 25/2) / 2


def test_mse_has_a_loss_only() -> None:
    module = nn.Linear(1, 1)
    evaluate = Evaluate(module, torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 1.0]), 1, loss="mse")
    assert evaluate(torch.tensor([2.0, 0.0])) == {"loss": (1 + 9) / 2}


class Viewed(nn.Module):
    """Flattens by `view`, which memory in another order does not allow; `mixed`: by that order, whatever it is."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.images, self.last, self.mixed = nn.Conv2d(1, 2, 3), nn.Linear(2 * 6 * 6, 3), mixed

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.images(inputs)
        rows = len(seen)
        flat = seen.as_strided((rows, 72), (72, 1)) if self.mixed else seen.view(rows, -1)
        found: Tensor = self.last(flat)
        return found


@pytest.mark.parametrize("name", ["mnist-cnn", "cifar-cnn", "fedasync-cnn", "resnet18", "viewed", "mixed"])
def test_the_order_of_images_in_memory_changes_nothing(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    shape = {"mnist-cnn": (1, 28, 28), "fedasync-cnn": (3, 24, 24)}.get(name, (3, 32, 32))
    shape = (1, 8, 8) if name in ("viewed", "mixed") else shape
    torch.manual_seed(3)
    module = Viewed(name == "mixed") if name in ("viewed", "mixed") else build(MODELS[name](), shape, 3, 0)
    inputs = torch.randn(7, *shape, generator=draw)
    targets = torch.randint(3, (7,), generator=draw)
    vector = Layout.of(module).flatten(module)
    evaluate = Evaluate(module, inputs, targets, 3, batch=3)
    with torch.no_grad():
        outputs = module.eval()(inputs)
    found = evaluate(vector)
    assert found["accuracy"] == (outputs.argmax(dim=1) == targets).double().mean()
    assert found["loss"] == pytest.approx(float(functional.cross_entropy(outputs, targets)), rel=1e-5)
    last = evaluate._inputs.stride() == (inputs[0].numel(), 1, shape[0] * shape[2], shape[0])
    assert last is (name not in ("viewed", "mixed"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_counts_like_the_cpu() -> None:
    module = passing()
    vector = Layout.of(module).flatten(module)
    here, there = (
        dict(Evaluate(module, SCORES, LABELS, 3, batch=2, device=name)(vector)) for name in ("cpu", "cuda")
    )
    assert here.pop("loss") == pytest.approx(there.pop("loss"), abs=1e-6)
    assert here == there


def test_refusals() -> None:
    module = passing()
    with pytest.raises(InputError, match=r"labels run from 0 to 1, outside 0\.\.0: give classes = 2"):
        Evaluate(module, SCORES, LABELS, 1)
    with pytest.raises(InputError, match="5 inputs and 4 targets"):
        Evaluate(module, SCORES, LABELS[:4], 3)
    with pytest.raises(InputError, match="0 inputs"):
        Evaluate(module, SCORES[:0], LABELS[:0], 3)
    for mix in ([1.0, 1.0], [0.0, 0.0, 0.0], [1.0, -1.0, 1.0]):
        with pytest.raises(InputError, match="group 'slow'"):
            Evaluate(module, SCORES, LABELS, 3, groups={"slow": torch.tensor(mix)})
    with pytest.raises(InputError, match="loss = 'cross_entropy' is not known; did you mean 'cross-entropy'"):
        Evaluate(module, SCORES, LABELS, 3, loss="cross_entropy")
    with pytest.raises(InputError, match="not a model of 12 elements"):
        Evaluate(module, SCORES, LABELS, 3)(torch.zeros(9))
