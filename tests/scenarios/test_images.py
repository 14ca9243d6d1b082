"""What image sources share: crop, normalisation, unlabelled sets; and the synthetic one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published import write_cifar10

import afield
from afield.core.errors import InputError
from afield.experiments.config import config
from afield.experiments.run import prepare
from afield.runtimes.rows import Measurement
from afield.scenarios.data import ClientData
from afield.scenarios.images import CIFAR10, Synthetic
from afield.training.local import Local
from afield.training.models import MODELS, build

# ---- crop and normalisation


def test_fedasyncs_images_crop_the_middle_and_subtract_the_mean_image(tmp_path: Path) -> None:
    rows = write_cifar10(tmp_path, 4).astype(np.float64)
    images = rows.reshape(-1, 3, 32, 32)[:, :, 4:28, 4:28]  # rows and columns 4..27
    data = CIFAR10(folder=str(tmp_path), crop=24, normal="mean-image").load(0)
    mean = images[:20].mean(axis=0)
    assert data.inputs.shape == (20, 3, 24, 24)
    np.testing.assert_allclose(data.inputs.numpy(), (images[:20] - mean) / 128, atol=1e-6)
    np.testing.assert_allclose(data.test_inputs.numpy(), (images[20:] - mean) / 128, atol=1e-6)


def test_the_mean_image_is_of_the_whole_training_set_whatever_is_cut(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    whole = CIFAR10(folder=str(tmp_path), normal="mean-image").load(0)
    cut = CIFAR10(folder=str(tmp_path), normal="mean-image", limit=5, held_out=3).load(7)
    assert torch.equal(cut.test_inputs, whole.test_inputs)
    known = {tuple(row) for row in whole.inputs.flatten(1).tolist()}
    assert cut.unlabelled is not None
    assert {tuple(row) for row in cut.inputs.flatten(1).tolist()} < known
    assert {tuple(row) for row in cut.unlabelled.flatten(1).tolist()} < known


def test_a_crop_by_channels_is_the_middle_of_the_whole(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    whole = CIFAR10(folder=str(tmp_path)).load(0)
    for crop, start in ((24, 4), (31, 0), (32, 0), (1, 15)):
        cut = CIFAR10(folder=str(tmp_path), crop=crop, unlabelled="noise").load(0)
        middle = slice(start, start + crop)
        assert torch.equal(cut.inputs, whole.inputs[:, :, middle, middle])
        assert torch.equal(cut.test_inputs, whole.test_inputs[:, :, middle, middle])
        assert cut.unlabelled is not None
        assert cut.unlabelled.shape[1:] == (3, crop, crop)
    with pytest.raises(InputError, match=r"crop = 33 of images of 32 x 32 pixels; at most 32"):
        CIFAR10(folder=str(tmp_path), crop=33).load(0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"crop": 0}, r"crop = 0 is outside \[1"),
        ({"normal": "channel"}, r"did you mean 'channels'\?"),
        ({"unlabelled_limit": 0}, r"unlabelled_limit = 0 is outside"),
        ({"unlabelled": "folder:"}, r"did you mean 'folder:DIR'\?"),
        ({"unlabelled": "stl"}, r"did you mean 'stl10'\?"),
        ({"unlabelled": "folder:x", "held_out": 2}, r"two unlabelled sets"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CIFAR10(**fields)


def test_the_real_cifar10_as_fedasync_has_it() -> None:
    root = os.environ.get("AFIELD_DATA", "")
    if not root or not Path(root, "cifar-10-batches-py").exists():
        pytest.skip("AFIELD_DATA has no cifar-10-batches-py")
    data = CIFAR10(folder=root, crop=24, normal="mean-image").load(0)
    assert data.inputs.shape == (50000, 3, 24, 24)
    assert data.test_inputs.shape == (10000, 3, 24, 24)
    assert data.inputs.mean(dim=0).abs().max().item() < 1e-5
    assert data.inputs.std().item() == pytest.approx(61.4 / 128, abs=0.01)  # 61.4 of 256 levels, measured
    plain = CIFAR10(folder=root).load(0)
    shift = torch.tensor([0.2023, 0.1994, 0.2010]).view(3, 1, 1) * 255
    one, two = (plain.inputs[at, :, 4:28, 4:28] * shift for at in (0, 49999))
    torch.testing.assert_close((data.inputs[0] - data.inputs[49999]) * 128, one - two, rtol=0, atol=1e-3)


# ---- made on the fly


def test_synthetic_images_are_reproducible_and_do_not_depend_on_the_run() -> None:
    source = Synthetic(shape=(3, 12, 10), classes=7, train=70, test=21)
    one, again, other = source.load(0), source.load(5), Synthetic((3, 12, 10), 7, 70, 21, draw=1).load(0)
    assert not source.keyed
    assert torch.equal(one.inputs, again.inputs) and torch.equal(one.test_inputs, again.test_inputs)
    assert torch.equal(one.targets, again.targets)
    assert not torch.equal(one.inputs, other.inputs)
    assert one.inputs.shape == (70, 3, 12, 10)
    assert one.test_inputs.shape == (21, 3, 12, 10)
    assert torch.bincount(one.targets).tolist() == [10] * 7
    assert torch.bincount(one.test_targets).tolist() == [3] * 7
    assert one.classes == 7


def test_without_noise_an_image_is_its_class_and_symmetric() -> None:
    data = Synthetic(noise=0.0, train=40, classes=4, test=8).load(0)
    for label in range(4):
        mine = data.inputs[data.targets == label]
        assert torch.equal(mine, mine[:1].expand_as(mine))
        assert torch.equal(data.test_inputs[data.test_targets == label], mine[:2])
        torch.testing.assert_close(mine, mine.flip(-1), rtol=0, atol=0.05)  # a level of 256 is 0.025
        # mean square 1 where nothing is cut off at black or white
        assert mine[0].square().mean().item() == pytest.approx(1, abs=0.1)
    assert len({tuple(image.flatten().tolist()) for image in data.inputs}) == 4


def test_synthetic_images_take_what_the_published_ones_take(tmp_path: Path) -> None:
    small = {"train": 60, "test": 20}
    held = Synthetic(held_out=20, limit=30, **small).load(1)
    assert held.unlabelled is not None
    assert (len(held.targets), len(held.unlabelled)) == (30, 20)
    cut = Synthetic(crop=24, normal="mean-image", unlabelled="unlike", unlabelled_limit=33, **small).load(0)
    assert cut.inputs.shape == (60, 3, 24, 24)
    assert cut.inputs.mean(dim=0).abs().max().item() < 1e-5
    assert cut.unlabelled is not None
    assert cut.unlabelled.shape == (33, 3, 24, 24)
    noise = Synthetic(unlabelled="noise", **small).load(0).unlabelled
    assert noise is not None
    assert noise.shape[1:] == (3, 32, 32)
    test = Synthetic(unlabelled="test", **small).load(0)
    assert test.unlabelled is test.test_inputs


def test_unlike_images_are_of_other_classes() -> None:
    data = Synthetic(noise=0.0, train=20, test=10, unlabelled="unlike", unlabelled_limit=10).load(0)
    assert data.unlabelled is not None
    known = {tuple(image.flatten().tolist()) for image in data.inputs}
    other = {tuple(image.flatten().tolist()) for image in data.unlabelled}
    assert len(known) == len(other) == 10
    assert not known & other


@pytest.mark.parametrize(
    ("name", "shape", "classes", "augment"),
    [
        ("mlp", (3, 32, 32), 10, False),
        ("mlp", (1, 28, 28), 10, True),
        ("mlp", (3, 32, 32), 100, False),
        ("cifar-cnn", (3, 16, 16), 4, True),
    ],
)
def test_synthetic_images_can_be_learnt(
    name: str, shape: tuple[int, int, int], classes: int, augment: bool
) -> None:
    data = Synthetic(shape=shape, classes=classes, train=1000, test=500).load(0)
    result = afield.simulate(
        "fedavg",
        build(MODELS[name](), shape, classes, 0),
        ClientData(data.inputs, data.targets, list(torch.arange(1000).split(100))),
        test=(data.test_inputs, data.test_targets),
        rounds=afield.schedulers.Cohort(5),
        local=Local(batch=20, steps=5, augment=augment),
        versions=15,
        method="loop",
    )
    assert result.accuracy is not None
    assert result.accuracy > 0.7  # measured: 1.0, 0.90, 0.85, 0.96; chance is 0.25 at the most


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shape": (3, 0, 4)}, r"shape = 0 is outside"),
        ({"classes": 1}, r"classes = 1 is outside \[2, 256\]"),
        ({"train": 0}, r"train = 0 is outside"),
        ({"noise": -1.0}, r"noise = -1\.0 is outside"),
        ({"noise": float("inf")}, r"noise = inf is outside"),
        ({"unlabelled": "cifar100-test"}, r"unlabelled = 'cifar100-test' is not known"),
    ],
)
def test_bad_synthetic_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Synthetic(**fields)


def test_a_run_on_synthetic_images_from_its_table() -> None:
    source = {"name": "synthetic", "shape": [3, 16, 16], "train": 80, "test": 40, "crop": 12, "held_out": 20}
    made = config(
        {
            "strategy": {"name": "fedecho", "size": 2, "samples": 20},
            "model": {"name": "mlp", "hidden": [8]},
            "local": {"batch": 8, "augment": True},
            "scenario": {"clients": 4, "data": source},
            "stop": {"updates": 6},
        }
    )
    assert made.table()["scenario"]["data"]["shape"] == [3, 16, 16]
    assert made.table()["local"]["augment"] is True
    rows = list(prepare(made).simulator.rows())
    assert len([row for row in rows if not isinstance(row, Measurement)]) == 6
