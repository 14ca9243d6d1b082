"""Every example goes to exactly one client, nobody is empty, and the skew is what its name says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afield.core.errors import InputError
from afield.scenarios.partition import (
    IID,
    PARTITIONS,
    Dirichlet,
    LabelSwap,
    OnePerClient,
    QuantitySkew,
    Shards,
)


def balanced(examples: int, classes: int = 10) -> Tensor:
    return torch.arange(examples) % classes


def classes_held(parts: list[Tensor], labels: Tensor) -> list[int]:
    return [len(torch.unique(labels[part])) for part in parts]


SPLITTERS: list[Any] = [
    IID(),
    Dirichlet(alpha=0.3),
    Dirichlet(alpha=0.01),
    Dirichlet(alpha=100.0),
    Shards(per_client=1),
    QuantitySkew(alpha=0.1),
    LabelSwap(share=0.7),
]


@settings(max_examples=60, deadline=None)
@given(
    partition=st.sampled_from(SPLITTERS),
    labels=st.lists(st.integers(0, 4), min_size=30, max_size=120),
    clients=st.integers(1, 30),
    seed=st.integers(0, 2**40),
)
def test_each_example_has_one_owner_and_each_client_an_example(
    partition: Any, labels: list[int], clients: int, seed: int
) -> None:
    given_labels = torch.tensor([0, 1, *labels])  # both labels of the swapped pair occur
    before = given_labels.clone()
    parts, seen = partition.split(given_labels, clients, seed)
    assert len(parts) == clients
    assert torch.cat(parts).sort().values.tolist() == list(range(len(given_labels)))
    assert min(len(part) for part in parts) >= 1
    assert all(part.dtype == torch.int64 for part in parts)
    assert torch.equal(given_labels, before)
    assert seen.shape == given_labels.shape
    again, seen_again = partition.split(given_labels, clients, seed)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert torch.equal(seen, seen_again)


@pytest.mark.parametrize("partition", SPLITTERS)
def test_another_seed_is_another_split(partition: Any) -> None:
    labels = balanced(200)
    first, _ = partition.split(labels, 8, 0)
    second, _ = partition.split(labels, 8, 1)
    assert any(a.tolist() != b.tolist() for a, b in zip(first, second, strict=True))


def test_iid_sizes_differ_by_at_most_one() -> None:
    parts, labels = IID().split(balanced(1003), 10, 0)
    assert sorted(len(part) for part in parts) == [100] * 7 + [101] * 3
    # 100 of 1000 at random: 10 per class, standard deviation 2.8
    assert all(int(torch.bincount(labels[part], minlength=10).min()) >= 1 for part in parts)


@pytest.mark.parametrize("alpha", [1000.0, 1.0, 0.1, 0.01])
def test_dirichlet_shares_have_the_right_second_moment(alpha: float) -> None:
    # A class's shares of n clients have E[sum of squares] = (1 + alpha) / (1 + n alpha): 0.05 is even,
    # 1 is all with one client. 400 classes; a standard deviation of at most 0.25 gives an error of 0.0125.
    labels, clients, squares = balanced(10_000), 20, []
    for seed in range(40):
        parts, _ = Dirichlet(alpha=alpha).split(labels, clients, seed)
        shares = torch.stack([torch.bincount(labels[part], minlength=10) for part in parts]) / 1000
        squares.append((shares**2).sum(0).mean().item())
    expected = (1 + alpha) / (1 + clients * alpha)
    assert sum(squares) / len(squares) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("alpha", [0.01, 1e-4])
def test_dirichlet_ends_where_nearly_everyone_is_empty(alpha: float) -> None:
    parts, _ = Dirichlet(alpha=alpha, minimum=5).split(balanced(5000), 100, 0)
    sizes = [len(part) for part in parts]
    assert min(sizes) == 5
    assert sum(sizes) == 5000
    assert max(sizes) > 300


def test_the_minimum_may_use_every_example() -> None:
    parts, _ = Dirichlet(alpha=0.05, minimum=7).split(balanced(70), 10, 1)
    assert [len(part) for part in parts] == [7] * 10


def test_lifting_takes_from_the_largest_only() -> None:
    labels = balanced(1000)
    drawn, _ = Dirichlet(alpha=0.05, minimum=1).split(labels, 10, 5)
    lifted, _ = Dirichlet(alpha=0.05, minimum=20).split(labels, 10, 5)
    assert min(len(part) for part in drawn) < 20
    largest_after = max(len(part) for part in lifted)
    for before, after in zip(drawn, lifted, strict=True):
        if 20 <= len(before) < largest_after:
            assert before.tolist() == after.tolist()  # neither in need nor among the largest: untouched


def test_shards_give_few_labels_to_each() -> None:
    labels = balanced(1000)
    parts, _ = Shards(per_client=2).split(labels, 10, 0)
    assert {len(part) for part in parts} == {100}
    assert max(classes_held(parts, labels)) <= 2  # 20 shards of 50 in 10 classes of 100: no shard is mixed
    many, _ = Shards(per_client=20).split(labels, 10, 0)
    assert min(classes_held(many, labels)) >= 6


def test_quantity_skew_skews_sizes_and_not_labels() -> None:
    labels = balanced(20_000)
    parts, _ = QuantitySkew(alpha=0.3, minimum=10).split(labels, 20, 2)
    sizes = sorted(len(part) for part in parts)
    assert sizes[0] >= 10
    assert sizes[-1] > 5 * sizes[10]
    for part in parts:
        if len(part) > 1000:
            shares = torch.bincount(labels[part], minlength=10) / len(part)
            assert (shares - 0.1).abs().max() < 0.04  # standard deviation below 0.0095
    even, _ = QuantitySkew(alpha=1e5).split(labels, 20, 2)
    assert max(len(part) for part in even) < 1100


@pytest.mark.parametrize("share", [0.0, 0.29, 0.5, 1.0])
def test_label_swap_exchanges_one_pair_in_the_second_half(share: float) -> None:
    labels = balanced(2400)
    parts, swapped = LabelSwap(share=share, pair=(3, 5)).split(labels, 6, 0)
    plain, _ = IID().split(labels, 6, 0)
    assert all(torch.equal(a, b) for a, b in zip(parts, plain, strict=True))
    for client, part in enumerate(parts):
        old, new = labels[part], swapped[part]
        if client < 3:
            assert torch.equal(old, new)
            continue
        others = (old != 3) & (old != 5)
        assert torch.equal(old[others], new[others])
        for here, there in ((3, 5), (5, 3)):
            had = int((old == here).sum())
            gone = int(((old == here) & (new == there)).sum())
            assert gone == int(share * had + 1e-9)
            assert int(((old == here) & (new == here)).sum()) == had - gone


def test_label_swap_counts_exactly() -> None:
    # 100 examples of each label in the one client of the second half; 0.29 * 100 is 28.999999999999996.
    labels = torch.tensor([0, 1]).repeat(200)
    parts, swapped = LabelSwap(share=0.29).split(labels, 2, 0)
    mine = labels[parts[1]]
    changed = int((swapped[parts[1]] != mine).sum())
    expected = sum(int(0.29 * int((mine == label).sum()) + 1e-9) for label in (0, 1))
    assert changed == expected
    assert int((swapped != labels).sum()) == expected


def test_label_swap_chooses_of_its_others() -> None:
    labels, swap = balanced(120), LabelSwap(share=1.0, pair=(3, 5))
    parts, swapped = swap.split(labels, 2, 0)
    others = swap.others(labels)
    assert torch.equal(swapped[parts[1]], others[parts[1]])
    assert set(zip(labels.tolist(), others.tolist(), strict=True)) == {
        (label, {3: 5, 5: 3}.get(label, label)) for label in labels.tolist()
    }


def test_label_swap_needs_two_labels_that_occur() -> None:
    with pytest.raises(InputError, match=r"pair = \(2, 2\) is not two different labels"):
        LabelSwap(pair=(2, 2))
    with pytest.raises(InputError, match=r"pair = \(0, 12\): no example has label 12; .*\(0 to 9\)"):
        LabelSwap(pair=(0, 12)).split(balanced(100), 2, 0)


def test_one_per_client() -> None:
    parts, labels = OnePerClient().split(torch.zeros(3, dtype=torch.int64), 3, 9)
    assert [part.tolist() for part in parts] == [[0], [1], [2]]
    assert labels.tolist() == [0, 0, 0]
    with pytest.raises(InputError, match="4 clients for 3 examples; set clients to 3"):
        OnePerClient().split(torch.zeros(3), 4, 0)


@pytest.mark.parametrize(
    ("partition", "clients", "message"),
    [
        (IID(), 21, r"clients = 21 need 21 examples and there are 20; have at most 20 clients, or more data"),
        (
            Dirichlet(minimum=5),
            5,
            r"clients = 5 with minimum = 5 need 25 examples and there are 20; .*4 clients",
        ),
        (QuantitySkew(minimum=5), 5, r"or a smaller minimum"),
        (Shards(per_client=3), 7, r"per_client = 3 need 21 examples"),
        (LabelSwap(), 21, r"clients = 21 need 21"),
        (IID(), 0, r"clients = 0 is outside"),
    ],
)
def test_too_few_examples_are_refused_with_numbers(partition: Any, clients: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition.split(balanced(20), clients, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dirichlet(alpha=0), r"alpha = 0 is outside"),
        (lambda: Dirichlet(minimum=0), r"minimum = 0 is outside"),
        (lambda: QuantitySkew(alpha=-1.0), r"alpha = -1\.0 is outside"),
        (lambda: Shards(per_client=0), r"per_client = 0 is outside"),
        (lambda: LabelSwap(share=1.2), r"share = 1\.2 is outside \[0, 1\]"),
    ],
)
def test_bad_fields_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_splitting_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    for partition in SPLITTERS:
        partition.split(balanced(100), 5, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_every_partition_is_registered_and_has_a_line_to_show() -> None:
    assert set(PARTITIONS) == {"iid", "dirichlet", "shards", "quantity-skew", "label-swap", "one-per-client"}
    for config in PARTITIONS.values():
        assert config.__doc__
        assert eval(repr(config()), {config.__name__: config}) == config()
