"""Loaders read what is published (tiny files written here; the real ones where AFIELD_DATA has them)."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from afield.core.errors import InputError
from afield.scenarios.data import (
    CIFAR10,
    CIFAR100,
    DATA,
    MNIST,
    NOISE,
    ClientData,
    Dataset,
    Digits,
    FashionMNIST,
    ListedData,
    Quadratic,
    client_data,
    pooled,
)


def same(a: Dataset, b: Dataset) -> bool:
    return (
        torch.equal(a.inputs, b.inputs)
        and torch.equal(a.targets, b.targets)
        and torch.equal(a.test_inputs, b.test_inputs)
        and torch.equal(a.test_targets, b.test_targets)
    )


def pixels(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


# ---- IDX


def write_idx(path: Path, values: np.ndarray, zipped: bool) -> None:
    raw = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if zipped:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw))
    else:
        path.write_bytes(raw)


def write_mnist(folder: Path, zipped: bool = False) -> tuple[np.ndarray, np.ndarray]:
    images, labels = pixels(6, 28, 28), np.array([3, 1, 4, 1, 5, 9], dtype=np.uint8)
    for split, count in (("train", 6), ("t10k", 4)):
        write_idx(folder / f"{split}-images-idx3-ubyte", images[:count], zipped)
        write_idx(folder / f"{split}-labels-idx1-ubyte", labels[:count], zipped)
    return images, labels


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", ["", "MNIST/raw"])
def test_mnist_is_read_and_normalised(tmp_path: Path, zipped: bool, place: str) -> None:
    images, labels = write_mnist(tmp_path / place, zipped)
    data = MNIST(folder=str(tmp_path)).load(0)
    assert data.inputs.shape == (6, 1, 28, 28)
    assert data.inputs.dtype == torch.float32
    assert data.targets.dtype == torch.int64
    assert data.targets.tolist() == labels.tolist()
    expected = (images[2, 5, 7] / 255 - 0.1307) / 0.3081
    assert data.inputs[2, 0, 5, 7].item() == pytest.approx(expected, abs=1e-6)
    assert data.test_targets.tolist() == [3, 1, 4, 1]
    assert data.classes == 10
    assert data.unlabelled is None


def test_fashion_mnist_reads_its_own_folder_and_not_mnist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    monkeypatch.setenv("AFIELD_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"FashionMNIST.raw"):
        FashionMNIST().load(0)
    images, _ = write_mnist(tmp_path / "FashionMNIST" / "raw")
    data = FashionMNIST().load(0)
    assert data.inputs[0, 0, 0, 0].item() == pytest.approx((images[0, 0, 0] / 255 - 0.286) / 0.353, abs=1e-6)


def test_a_folder_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "here")
    monkeypatch.setenv("AFIELD_DATA", str(tmp_path / "nowhere"))
    assert len(MNIST(folder=str(tmp_path / "here")).load(0).targets) == 6
    with pytest.raises(InputError, match="nowhere"):
        MNIST().load(0)


@pytest.mark.parametrize("config", [MNIST(), FashionMNIST(), CIFAR10(), CIFAR100()])
def test_without_a_folder_the_message_says_how_to_give_one(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AFIELD_DATA", raising=False)
    with pytest.raises(InputError, match=r"no data folder is set; .*scenario\.data\.folder=DIR.*AFIELD_DATA"):
        config.load(0)


def test_a_missing_file_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        MNIST(folder=str(tmp_path)).load(0)
    message = str(caught.value)
    assert "train-images-idx3-ubyte" in message
    assert str(tmp_path / "MNIST" / "raw") in message
    assert "scenario.data.folder=DIR" in message


def test_damaged_idx_files_are_named(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte"
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte holds 4699 of 4704 values"):
        MNIST(folder=str(tmp_path)).load(0)
    file.write_bytes(b"<html>")
    with pytest.raises(InputError, match="is not an IDX file"):
        MNIST(folder=str(tmp_path)).load(0)
    file.unlink()
    file.with_name(file.name + ".gz").write_bytes(gzip.compress(whole)[:40])
    with pytest.raises(InputError, match="cannot be read"):
        MNIST(folder=str(tmp_path)).load(0)


def test_labels_must_match_the_images(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(5, dtype=np.uint8), False)
    with pytest.raises(InputError, match="5 labels for 6 images"):
        MNIST(folder=str(tmp_path)).load(0)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.full(6, 26, dtype=np.uint8), False)
    with pytest.raises(InputError, match=r"outside 0\.\.9"):
        MNIST(folder=str(tmp_path)).load(0)


# ---- CIFAR


def write_cifar10(folder: Path, per_batch: int = 3) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    rows = pixels(6 * per_batch, 3072)
    for k, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        mine = slice(k * per_batch, (k + 1) * per_batch)
        content = {b"data": rows[mine], b"labels": [k] * per_batch, b"batch_label": b"x"}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return rows


def write_cifar100(folder: Path, *names: str) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    rows = pixels(4, 3072)
    for name in names:
        content = {"data": rows, "fine_labels": [0, 99, 50, 7], "coarse_labels": [0, 1, 2, 3]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return rows


def python2_batch(rows: np.ndarray, labels: list[int]) -> bytes:
    """The bytes that Python 2's cPickle wrote for the published batches: 8-bit strings, numpy.core."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes((len(value),)) + value

    count, width = rows.shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\nt" + text(b"b") + b"tR"
        b"(I1\n(I%d\nI%d\ntcnumpy\ndtype\n(" % (count, width) + text(b"u1") + b"I0\nI1\ntR"
        b"(I3\n" + text(b"|") + b"NNNI-1\nI-1\nI0\ntbI00\n"
        b"T" + struct.pack("<i", rows.size) + rows.tobytes() + b"tb"
    )
    numbers = b"](" + b"".join(b"I%d\n" % label for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


@pytest.mark.parametrize("place", ["", "cifar-10-batches-py"])
def test_cifar10_is_read_and_normalised(tmp_path: Path, place: str) -> None:
    rows = write_cifar10(tmp_path / place)
    data = CIFAR10(folder=str(tmp_path)).load(0)
    assert data.inputs.shape == (15, 3, 32, 32)
    assert data.targets.tolist() == [k for k in range(5) for _ in range(3)]
    assert data.test_targets.tolist() == [5, 5, 5]
    # A row is the red plane, then green, then blue, each 32 rows of 32.
    green = rows[4, 1024 + 32 * 9 + 17]
    assert data.inputs[4, 1, 9, 17].item() == pytest.approx((green / 255 - 0.4822) / 0.1994, abs=1e-6)
    blue = rows[15, 2048]
    assert data.test_inputs[0, 2, 0, 0].item() == pytest.approx((blue / 255 - 0.4465) / 0.2010, abs=1e-6)


def test_cifar_batches_as_python_2_wrote_them(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    rows = pixels(2, 3072)
    (tmp_path / "data_batch_1").write_bytes(python2_batch(rows, [7, 2]))
    data = CIFAR10(folder=str(tmp_path)).load(0)
    assert data.targets[:3].tolist() == [7, 2, 1]
    assert data.inputs[1, 0, 0, 3].item() == pytest.approx((rows[1, 3] / 255 - 0.4914) / 0.2023, abs=1e-6)


class _Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("owned",)


def test_a_pickle_that_asks_for_more_than_arrays_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar10(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_batch_2").write_bytes(pickle.dumps({b"data": _Evil()}, protocol=2))
    with pytest.raises(InputError, match=r"data_batch_2 is not a CIFAR batch .*asks for \w+\.mkdir"):
        CIFAR10(folder=str(tmp_path)).load(0)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({b"data": 3}), pickle.dumps([1])])
def test_damaged_cifar_batches_are_named(tmp_path: Path, content: bytes) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(InputError, match="test_batch is not a CIFAR batch"):
        CIFAR10(folder=str(tmp_path)).load(0)


def test_cifar100_and_its_missing_train_file(tmp_path: Path) -> None:
    write_cifar100(tmp_path / "cifar-100-python", "test")
    with pytest.raises(InputError, match=r"^train \(or train\.gz\) is not in .*cifar-100-python"):
        CIFAR100(folder=str(tmp_path)).load(0)
    write_cifar100(tmp_path / "cifar-100-python", "train", "test")
    data = CIFAR100(folder=str(tmp_path)).load(0)
    assert data.targets.tolist() == [0, 99, 50, 7]
    assert data.classes == 100


def test_the_other_cifar_test_set_as_unlabelled(tmp_path: Path) -> None:
    ten = write_cifar10(tmp_path / "cifar-10-batches-py")
    hundred = write_cifar100(tmp_path / "cifar-100-python", "test")  # no train file: none is needed
    data = CIFAR10(folder=str(tmp_path), unlabelled="cifar100-test").load(0)
    assert data.unlabelled is not None
    assert data.unlabelled.shape == (4, 3, 32, 32)
    first = (hundred[0, 0] / 255 - 0.4914) / 0.2023
    assert data.unlabelled[0, 0, 0, 0].item() == pytest.approx(first, abs=1e-6)
    write_cifar100(tmp_path / "cifar-100-python", "train")
    data = CIFAR100(folder=str(tmp_path), unlabelled="cifar10-test").load(0)
    assert data.unlabelled is not None
    assert data.unlabelled.shape == (3, 3, 32, 32)
    first = (ten[15, 0] / 255 - 0.4914) / 0.2023
    assert data.unlabelled[0, 0, 0, 0].item() == pytest.approx(first, abs=1e-6)


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
    texts = {"mrpc", "newsgroups", "gsm8k", "mathinstruct"}
    assert set(DATA) == {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "quadratic"} | texts
    for config in DATA.values():
        assert config.__doc__
        assert config() == config()
        assert eval(repr(config()), {config.__name__: config}) == config()


# ---- the real files


def real(*parts: str) -> str:
    root = os.environ.get("AFIELD_DATA", "")
    if not root or not Path(root, *parts).exists():
        pytest.skip(f"AFIELD_DATA has no {'/'.join(parts)}")
    return root


def test_the_real_mnist() -> None:
    data = MNIST(folder=real("MNIST", "raw")).load(0)
    assert data.inputs.shape == (60000, 1, 28, 28)
    assert data.test_inputs.shape == (10000, 1, 28, 28)
    assert data.targets[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert abs(data.inputs.mean().item()) < 1e-3
    assert abs(data.inputs.std().item() - 1) < 1e-3


def test_the_real_cifar10_with_cifar100_unlabelled() -> None:
    root = real("cifar-10-batches-py")
    real("cifar-100-python", "test")
    data = CIFAR10(folder=root, unlabelled="cifar100-test", limit=2000).load(0)
    assert data.inputs.shape == (2000, 3, 32, 32)
    assert data.test_inputs.shape == (10000, 3, 32, 32)
    assert torch.bincount(data.test_targets).tolist() == [1000] * 10
    assert data.test_inputs.mean((0, 2, 3)).abs().max().item() < 0.05
    assert data.unlabelled is not None
    assert data.unlabelled.shape == (10000, 3, 32, 32)
