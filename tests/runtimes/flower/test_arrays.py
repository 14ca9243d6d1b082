"""Named arrays become one vector, and the same arrays again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord

from afield.core.errors import InputError
from afield.runtimes.flower.arrays import Arrays, opened, packed


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))


def test_statistics_follow_the_parameters_and_whole_numbers_stay_out() -> None:
    named = {name: tensor.numpy() for name, tensor in network().state_dict().items()}
    layout = Arrays.of(named)
    assert (layout.size, layout.parameters) == (8 + 4 + 6 + 4, 8 + 4 + 6)
    vector = layout.vector(named)
    parameters = torch.cat([p.detach().flatten() for p in network().parameters()])
    assert torch.equal(vector[:18], parameters)
    assert vector[18:].tolist() == [0, 0, 1, 1]  # running mean, running variance
    assert list(layout.whole(named)) == ["1.num_batches_tracked"]
    back = layout.arrays(vector, {"1.num_batches_tracked": np.array(7)})
    assert list(back) == list(named)
    assert back["1.num_batches_tracked"] == 7
    for name in layout.places:
        assert np.array_equal(back[name], named[name]) and back[name].dtype == named[name].dtype


@pytest.mark.parametrize(
    ("types", "inside"),
    [(("float16",), "float32"), (("float16", "float32"), "float32"), (("float32", "float64"), "float64")],
)
def test_each_array_keeps_its_type(types: tuple[str, ...], inside: str) -> None:
    named = {name: np.arange(3).astype(name) for name in types} | {"scalar": np.array(0.5, types[0])}
    layout = Arrays.of(named)
    vector = layout.vector(named)
    assert str(vector.dtype) == f"torch.{inside}"
    for name, array in layout.arrays(vector, {}).items():
        assert array.dtype == named[name].dtype and array.shape == named[name].shape
        assert np.array_equal(array, named[name])


def test_what_does_not_fit_is_named() -> None:
    named = {"w": np.zeros((2, 3), np.float32), "n": np.zeros(1, np.int64)}
    layout = Arrays.of(named)
    with pytest.raises(InputError, match="w is missing"):
        layout.vector({"n": named["n"]})
    with pytest.raises(InputError, match="more was not asked for"):
        layout.vector(named | {"more": named["w"]})
    with pytest.raises(InputError, match=r"shape \(3, 2\), not float32 of \(2, 3\)"):
        layout.vector(named | {"w": np.zeros((3, 2), np.float32)})
    with pytest.raises(InputError, match="int64"):
        layout.vector(named | {"w": np.zeros((2, 3), np.int64)})
    for bad, why in (({"n": named["n"]}, "none of floats"), ({"w": np.zeros(1, complex)}, "none of floats")):
        with pytest.raises(InputError, match=why):
            Arrays.of(bad)


def test_bytes_are_those_of_flower() -> None:
    rng = np.random.default_rng(0)
    named = {
        "matrix": rng.standard_normal((3, 5)).astype(np.float32),
        "columns first": np.asfortranarray(rng.standard_normal((3, 5))),
        "scalar": np.array(7),
        "empty": np.zeros((0, 2), np.float16),
    }
    theirs = ArrayRecord({name: Array(array) for name, array in named.items()})
    for name, array in opened(theirs).items():
        assert array.dtype == named[name].dtype and np.array_equal(array, named[name])
    for name, mine in packed(named).items():
        assert np.array_equal(mine.numpy(), named[name]) and mine.numpy().shape == named[name].shape
        if name != "columns first":  # goes out by rows
            assert (mine.data, mine.dtype, mine.shape) == (
                theirs[name].data,
                theirs[name].dtype,
                theirs[name].shape,
            )
