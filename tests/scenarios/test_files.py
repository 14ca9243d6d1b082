"""Readers take what is published (tiny files written here; the real ones where AFIELD_DATA has them)."""

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
from published import pixels, write_cifar10, write_cifar100, write_idx, write_mnist

from afield.core.errors import InputError
from afield.scenarios.images import CIFAR10, CIFAR100, MNIST, FashionMNIST

# ---- IDX


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
    assert "yann.lecun.com/exdb/mnist" in message
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
    write_idx(file, pixels(6, 28, 27), False)
    with pytest.raises(InputError, match="holds images of 28 x 27 pixels, not 28 x 28"):
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


WIDE = {
    b"data": np.zeros((2, 6144), dtype=np.uint8),
    b"labels": [1, 2, 3, 4],
}  # as many values as labels want
REALS = {b"data": np.zeros((2, 3072)), b"labels": [1, 2]}


@pytest.mark.parametrize(
    "content", [b"", b"garbage", *(pickle.dumps(x, protocol=2) for x in ({b"data": 3}, [1], WIDE, REALS))]
)
def test_damaged_cifar_batches_are_named(tmp_path: Path, content: bytes) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(InputError, match="test_batch is not a CIFAR batch"):
        CIFAR10(folder=str(tmp_path)).load(0)


def test_cifar100_and_its_missing_train_file(tmp_path: Path) -> None:
    write_cifar100(tmp_path / "cifar-100-python", "test")
    with pytest.raises(
        InputError, match=r"^train \(or train\.gz\) is not in .*cifar-100-python.*~kriz/cifar\.html"
    ):
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
