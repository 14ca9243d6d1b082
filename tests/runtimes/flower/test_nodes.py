"""Who is which client, whoever comes and goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from afield.core.errors import InputError
from afield.runtimes.flower.nodes import NAME, Nodes


def test_a_node_that_comes_back_is_the_client_it_was() -> None:
    nodes = Nodes(3)
    assert nodes.see([30, 10, 20]) == ([10, 20, 30], [])
    assert nodes.clients == {10: 0, 20: 1, 30: 2}
    assert nodes.see([10, 30]) == ([], [20])
    assert nodes.see([10, 20, 30]) == ([20], [])
    assert nodes.clients == {10: 0, 20: 1, 30: 2}


def test_a_newcomer_takes_the_place_of_the_first_that_left() -> None:
    nodes = Nodes(3)
    nodes.see([10, 20, 30])
    assert nodes.see([10, 20, 30, 40]) == ([], [])
    assert nodes.waiting == {40}
    nodes.see([20, 30])
    nodes.see([30])  # 10 left before 20 did
    assert nodes.see([30, 40]) == ([40], [])
    assert nodes.clients == {20: 1, 30: 2, 40: 0} and not nodes.waiting
    assert nodes.see([30, 40, 10]) == ([10], [])  # its place is taken: it is someone new
    assert nodes.clients == {30: 2, 40: 0, 10: 1}


def test_a_lost_node_gives_up_its_place_until_it_answers() -> None:
    nodes = Nodes(2)
    nodes.see([1, 2])
    nodes.lose(2)
    assert nodes.see([1, 2]) == ([], []) and nodes.online == {1}
    assert nodes.see([1, 2, 3]) == ([3], []) and nodes.clients == {1: 0, 3: 1}
    nodes.find(2)
    assert nodes.see([1, 2, 3]) == ([], []) and nodes.waiting == {2}
    assert nodes.see([1, 2]) == ([2], [3]) and nodes.clients == {1: 0, 2: 1}


@given(st.lists(st.tuples(st.sets(st.integers(0, 6)), st.integers(0, 6), st.booleans()), max_size=30))
def test_no_two_nodes_are_one_client(script: list[tuple[set[int], int, bool]]) -> None:
    nodes = Nodes(3)
    for ids, one, lose in script:
        nodes.see(ids)
        assert len(set(nodes.clients.values())) == len(nodes.clients) <= 3
        assert set(nodes.clients.values()) <= set(range(3))
        assert nodes.online <= ids and nodes.online <= set(nodes.clients)
        assert set(nodes.left) | nodes.online == set(nodes.clients)
        assert nodes.online | nodes.waiting | nodes.lost == ids
        assert not nodes.waiting or len(nodes.online) == 3
        (nodes.lose if lose and one in nodes.online else nodes.find)(one)


def test_they_are_remembered(tmp_path: Path) -> None:
    assert Nodes.read(tmp_path) is None
    nodes = Nodes(2)
    nodes.see([5, 2**63 + 1])
    nodes.write(tmp_path)
    found = Nodes.read(tmp_path)
    assert found is not None and (found.places, found.clients, found.online) == (2, nodes.clients, set())
    assert found.see([7]) == ([7], []) and found.clients[7] == 0  # the places of the absent are free
    (tmp_path / NAME).write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        Nodes.read(tmp_path)
