"""The format: everything comes back as it was, equal values are equal bytes, and nothing unknown is made."""

from __future__ import annotations

import math
import struct
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afield.core.errors import InputError
from afield.core.types import Task
from afield.store.kinds import CORE, kinds_of
from afield.store.pack import ALIGN, DTYPES, PREAMBLE, DamagedError, Packed, crc32, pack, unpack


@dataclass(slots=True)
class Inner:
    vector: torch.Tensor
    counts: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outer:
    inner: Inner
    note: str


KINDS = {**CORE, "Inner": Inner, "Outer": Outer}


def joined(packed: Packed) -> bytes:
    return b"".join(bytes(piece) for piece in packed.pieces)


def back(value: Any) -> Any:
    return unpack(joined(pack(value, KINDS)), KINDS)[0]


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(), inner, max_size=4)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5))
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(plain)
def test_every_plain_value_comes_back_and_equal_values_are_equal_bytes(value: Any) -> None:
    again = back(value)
    assert again == value
    assert repr(again) == repr(value)  # types, order of keys, signs of zeros
    assert joined(pack(again, KINDS)) == joined(pack(value, KINDS))


def test_sets_are_equal_bytes_whatever_their_order() -> None:
    one, two = {"b", "a", 3}, {3, "a", "b"}
    assert joined(pack(one, KINDS)) == joined(pack(two, KINDS))
    assert back(one) == one
    assert back(frozenset({1})) == frozenset({1})


@pytest.mark.parametrize(
    "bits", [0x7FF8000000000001, 0xFFF0000000000000, 0x7FF0000000000000, 0x7FF0000000000123]
)
def test_floats_keep_their_bits(bits: int) -> None:
    value = struct.unpack("<d", struct.pack("<Q", bits))[0]
    assert struct.pack("<d", back(value)) == struct.pack("<Q", bits)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)])
def test_tensors_of_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randint(0, 2, shape).to(dtype)
    again = back([value])[0]
    assert (again.dtype, again.shape) == (dtype, value.shape)
    assert torch.equal(again, value)


def test_nan_bits_of_tensors_and_strided_views() -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32)
    assert torch.equal(back(bits.view(torch.float32)).view(torch.int32), bits)
    table = torch.arange(12.0).view(3, 4)
    assert torch.equal(back(table.t()), table.t())
    assert torch.equal(back(table[:, 1]), table[:, 1])


def test_one_tensor_object_stays_one_and_two_equal_ones_stay_two() -> None:
    shared, twin = torch.ones(4), torch.ones(4)
    value = back({"a": shared, "b": [shared, twin], "c": Outer(Inner(shared), "x")})
    assert value["a"] is value["b"][0] is value["c"].inner.vector
    assert value["b"][1] is not value["a"]
    value["a"].fill_(2)
    assert value["b"][1].tolist() == [1.0] * 4


def test_dataclasses_with_and_without_slots() -> None:
    value = Outer(Inner(torch.arange(3), {7: math.inf, -1: 0.5}), "note")
    again = back(value)
    assert (type(again), type(again.inner), again.note) == (Outer, Inner, "note")
    assert list(again.inner.counts.items()) == [(7, math.inf), (-1, 0.5)]
    task = Task(3, 1, 0, 9, 0.1)
    assert back({"t": task})["t"] == task


def test_tensors_are_aligned() -> None:
    packed = pack([torch.ones(3), torch.ones(100), torch.ones(1)], KINDS)
    assert packed.start % ALIGN == 0
    assert [spot.offset % ALIGN for spot in packed.spots] == [0, 0, 0]
    data = joined(packed)
    spot = packed.spots[1]
    there = torch.frombuffer(
        bytearray(data), dtype=torch.float32, offset=packed.start + spot.offset, count=100
    )
    assert torch.equal(there, torch.ones(100))


def test_only_registered_classes_are_made() -> None:
    data = joined(pack(Inner(torch.ones(1)), KINDS))
    with pytest.raises(InputError, match="holds a Inner, which this reader does not know"):
        unpack(data, CORE)
    with pytest.raises(InputError, match=r"state\.a is a Inner that no reader knows"):
        pack({"a": Inner(torch.ones(1))}, CORE)
    with pytest.raises(InputError, match=r"state\.a is a object, which cannot be stored"):
        pack({"a": object()}, KINDS)
    with pytest.raises(InputError, match=r"other fields \(count\)"):
        unpack(joined(pack(Task(1, 1, 1, 1, 1.0), CORE)), {"Task": _WithoutCount})
    with pytest.raises(InputError, match="two classes named Task"):
        kinds_of(_Twin.Task(1))


@dataclass
class _WithoutCount:
    number: int
    client: int
    version: int
    started: float


class _Twin:
    @dataclass
    class Task:
        number: int


def test_a_kind_may_be_a_function_of_the_picture() -> None:
    class Counter:
        def __init__(self, count: int, folder: str) -> None:
            self.count, self.folder = count, folder

        def picture(self, generation: int) -> dict[str, Any]:
            return {"count": self.count, "generation": generation}

    kinds: dict[str, Any] = {"Counter": lambda parts: Counter(parts["count"] + parts["generation"], "here")}
    packed = pack([Counter(5, "there")], kinds, generation=3)
    again = unpack(joined(packed), kinds)[0][0]
    assert (again.count, again.folder) == (8, "here")
    assert [type(one) for one in packed.pictured] == [Counter]


def test_the_format_of_a_newer_afield_is_named() -> None:
    import zlib

    data = bytearray(joined(pack({"a": 1}, KINDS)))
    data[8:12] = struct.pack("<I", 2)
    length = struct.unpack("<Q", data[16:24])[0]
    text = bytes(data[PREAMBLE.size : PREAMBLE.size + length])
    data[12:16] = struct.pack("<I", zlib.crc32(text, zlib.crc32(bytes(data[8:12] + data[16:24]))))
    with pytest.raises(InputError, match="has format 2, this afield reads 1: update afield"):
        unpack(data, KINDS)


def test_every_flipped_bit_and_every_cut_is_found_or_harmless() -> None:
    """Exhaustive for one small file: padding may differ, nothing else."""
    value = {"a": torch.arange(5.0), "b": [1, "x"]}
    data = joined(pack(value, KINDS))
    for position in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[position] ^= 1 << bit
            try:
                again = unpack(bad, KINDS)[0]
            except DamagedError:
                continue
            assert again["b"] == value["b"] and torch.equal(again["a"], value["a"])
    for length in range(len(data)):
        with pytest.raises(DamagedError):
            unpack(data[:length], KINDS)


def test_sums_are_those_of_zlib() -> None:
    """Whichever package makes them: a folder can be read where the other one is not."""
    body = torch.randn(50_001).view(torch.uint8).numpy()
    for part in (body[:0], body[:7], body):
        assert crc32(part) == zlib.crc32(part)
        assert crc32(part, 12345) == zlib.crc32(part, 12345)
