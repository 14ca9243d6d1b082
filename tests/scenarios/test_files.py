"""Readers take what is published (tiny files written here; the real ones where AFIELD_DATA has them)."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from afield.core.errors import InputError
from afield.scenarios.files import pictures, stl10
from afield.scenarios.images import CIFAR10, CIFAR100, MNIST, FashionMNIST


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


# ---- STL-10


def write_stl10(folder: Path, count: int = 5, name: str = "unlabeled_X.bin") -> np.ndarray:
    """Images [count, 3, 96, 96] as published: each colour column by column."""
    folder.mkdir(parents=True, exist_ok=True)
    images = pixels(count, 3, 96, 96)
    (folder / name).write_bytes(images.transpose(0, 1, 3, 2).tobytes())
    return images


@pytest.mark.parametrize("zipped", [False, True])
def test_stl10_is_read_by_columns_and_averaged_over_areas(tmp_path: Path, zipped: bool) -> None:
    images = write_stl10(tmp_path / "stl10_binary")
    file = tmp_path / "stl10_binary" / "unlabeled_X.bin"
    if zipped:
        file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    found = stl10("unlabeled_X.bin", str(tmp_path), 4, (32, 32))
    assert found.shape == (4, 3, 32, 32)  # the first four of five
    means = images[:4].astype(np.float64).reshape(4, 3, 32, 3, 32, 3).mean(axis=(3, 5))
    assert np.abs(found.numpy() - means).max() <= 0.5 + 1e-4
    exact = stl10("unlabeled_X.bin", str(tmp_path), 5, (96, 96))
    assert np.array_equal(exact.numpy(), images)


def test_stl10_as_the_unlabelled_set_of_cifar10(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    images = write_stl10(tmp_path, 3, "train_X.bin")
    data = CIFAR10(folder=str(tmp_path), unlabelled="stl10-train", crop=24).load(0)
    assert data.unlabelled is not None
    assert data.unlabelled.shape == (3, 3, 24, 24)
    # The pixel at row 0, column 1 after the crop is (4, 5) of 32 x 32, rows 12..14 and columns 15..17 of 96 x 96.
    mean = round(float(images[2, 1, 12:15, 15:18].mean()))
    assert data.unlabelled[2, 1, 0, 1].item() == pytest.approx((mean / 255 - 0.4822) / 0.1994, abs=1e-5)
    with pytest.raises(
        InputError, match=r"unlabeled_X\.bin .*is not in .*stl10_binary.*cs\.stanford\.edu/~acoates/stl10"
    ):
        CIFAR10(folder=str(tmp_path), unlabelled="stl10").load(0)


def test_a_cut_off_stl10_file_is_named(tmp_path: Path) -> None:
    write_stl10(tmp_path)
    file = tmp_path / "unlabeled_X.bin"
    whole = file.read_bytes()
    for content in (whole[:-1], whole[:100], b""):  # the first is whole as far as it is read
        file.write_bytes(content)
        with pytest.raises(
            InputError, match=rf"unlabeled_X\.bin holds {len(content)} bytes, not a multiple of 27648"
        ):
            stl10("unlabeled_X.bin", str(tmp_path), 2, (32, 32))


# ---- folders of images


def test_a_folder_of_images_is_resized_and_shuffled_alike(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"class{number // 6}").mkdir(exist_ok=True)
        colour = (20 * number, 100, 255 - 20 * number)
        Image.new("RGB", (40, 24), colour).save(tmp_path / f"class{number // 6}" / f"{number:02}.png")
    (tmp_path / "notes.txt").write_text("not an image")
    found = pictures(str(tmp_path), "", 100, (3, 8, 8))
    assert found.shape == (12, 3, 8, 8)
    assert found.dtype == torch.uint8
    reds = found[:, 0, 0, 0].tolist()
    assert sorted(reds) == [20 * number for number in range(12)]
    assert {red // 120 for red in reds[:6]} == {0, 1}  # the first ones are of both classes
    for image in found:  # one colour all over, with its own blue
        assert image.flatten(1).unique(dim=1).shape == (3, 1)
        assert image[2, 0, 0] == 255 - image[0, 0, 0]
    assert torch.equal(pictures(str(tmp_path), "", 5, (3, 8, 8)), found[:5])


def test_resizing_averages_over_areas_and_grey_is_one_channel(tmp_path: Path) -> None:
    image = pixels(1, 6, 9)[0]
    Image.fromarray(image).save(tmp_path / "one.png")
    means = image.astype(np.float64).reshape(2, 3, 3, 3).mean(axis=(1, 3))
    grey = pictures(str(tmp_path), "", 1, (1, 2, 3))
    assert np.abs(grey[0, 0].numpy() - means).max() <= 1
    colours = pictures(str(tmp_path), "", 1, (3, 2, 3))
    assert torch.equal(colours, grey.expand(1, 3, 2, 3))


def test_images_of_a_folder_as_unlabelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "samples").mkdir()
    Image.new("RGB", (64, 64), (10, 20, 30)).save(tmp_path / "samples" / "a.png")
    Image.new("RGB", (64, 64), (10, 20, 30)).save(tmp_path / "samples" / "b.JPG", quality=100)
    inside = CIFAR10(folder=str(tmp_path), unlabelled="folder:samples").load(0)  # in the data folder
    assert inside.unlabelled is not None
    assert inside.unlabelled.shape == (2, 3, 32, 32)
    expected = [
        (value / 255 - m) / s
        for value, m, s in zip((10, 20, 30), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), strict=True)
    ]
    for image in inside.unlabelled:
        assert image.mean(dim=(1, 2)).tolist() == pytest.approx(expected, abs=0.05)  # JPEG is not exact
    path = CIFAR10(
        folder=str(tmp_path), unlabelled=f"folder:{tmp_path / 'samples'}", unlabelled_limit=1
    ).load(0)
    assert path.unlabelled is not None
    assert torch.equal(path.unlabelled, inside.unlabelled[:1])
    monkeypatch.setenv("AFIELD_DATA", str(tmp_path))
    assert CIFAR10(unlabelled="folder:samples").load(0).unlabelled is not None


def test_mnist_takes_images_in_grey(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "samples").mkdir()
    Image.new("RGB", (30, 50), (200, 200, 200)).save(tmp_path / "samples" / "a.png")
    data = MNIST(folder=str(tmp_path), unlabelled="folder:samples").load(0)
    assert data.unlabelled is not None
    grey = torch.full((1, 1, 28, 28), (200 / 255 - 0.1307) / 0.3081)
    torch.testing.assert_close(data.unlabelled, grey)
    with pytest.raises(InputError, match="'stl10' is not known"):
        MNIST(unlabelled="stl10")  # three colours


def test_folders_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="folder of images nowhere is neither here nor in the data folder"):
        pictures("nowhere", str(tmp_path), 5, (3, 8, 8))
    (tmp_path / "notes.txt").write_text("not an image")
    with pytest.raises(InputError, match=r"holds no images \(\.png, \.jpg, \.jpeg\)"):
        pictures(str(tmp_path), "", 5, (3, 8, 8))
    Image.new("RGB", (30, 30)).save(tmp_path / "good.png")
    with pytest.raises(InputError, match="1 or 3 channels, the data has 2"):
        pictures(str(tmp_path), "", 5, (2, 8, 8))
    whole = (tmp_path / "good.png").read_bytes()
    for content in (b"", b"<html>", whole[:50]):
        (tmp_path / "bad.png").write_bytes(content)
        with pytest.raises(InputError, match=r"bad\.png is not an image that can be read .*; remove it"):
            pictures(str(tmp_path), "", 5, (3, 8, 8))
    monkeypatch.setitem(sys.modules, "PIL", None)  # as where it is not installed
    with pytest.raises(InputError, match=r"pip install 'afield\[images\]'"):
        pictures(str(tmp_path), "", 5, (3, 8, 8))


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
