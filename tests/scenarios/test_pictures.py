"""Images without labels: STL-10's binary files, folders of PNG and JPEG."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from published import pixels, write_cifar10, write_mnist, write_stl10

from afield.core.errors import InputError
from afield.scenarios.files import pictures, stl10
from afield.scenarios.images import CIFAR10, MNIST

Image = pytest.importorskip("PIL.Image")

# ---- STL-10


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
