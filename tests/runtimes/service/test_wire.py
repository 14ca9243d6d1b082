"""Models on the wire: no copy where none is needed, every order and form read, everything else refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from afield.core.flat import Layout
from afield.runtimes.service.wire import SCALES, BodyError, Wire, framed, raw

NET = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
LAYOUT = Layout.of(NET)
WIRE = Wire(LAYOUT)
VECTOR = torch.arange(LAYOUT.size, dtype=torch.float32) / 7
BASE = torch.ones(LAYOUT.size)


def file(form: str = "full") -> bytearray:
    if form == "full":
        return bytearray(WIRE.heads["full"] + bytes(raw(VECTOR)))
    pieces, _ = WIRE.rounded(VECTOR, form)
    return bytearray(b"".join([WIRE.heads[form], *pieces]))


def test_our_own_order_is_read_without_a_copy_and_other_libraries_can_read_it() -> None:
    body = file()
    found = WIRE.read(body)
    assert torch.equal(found.vector, VECTOR) and not found.delta
    body[-1] ^= 0x40
    assert not torch.equal(found.vector, VECTOR)  # it is the body itself
    theirs = load(bytes(file()))
    views = LAYOUT.views(VECTOR)
    assert set(theirs) == set(views) and all(torch.equal(theirs[name], views[name]) for name in views)


def test_another_order_is_gathered() -> None:
    views = LAYOUT.views(VECTOR)
    shuffled = bytearray(save({name: views[name].clone() for name in sorted(views, reverse=True)}))
    assert torch.equal(WIRE.read(shuffled).vector, VECTOR)


def test_bf16_and_int8_are_differences_to_the_base() -> None:
    found = WIRE.read(file("bf16"))
    assert torch.equal(found.model(BASE), BASE + VECTOR.to(torch.bfloat16).float())
    found = WIRE.read(file("int8"))
    _, meant = WIRE.rounded(VECTOR, "int8")
    assert torch.equal(found.model(BASE), BASE + meant)
    for name, view in LAYOUT.views(VECTOR).items():
        step = float(view.abs().max()) / 127
        assert float((LAYOUT.views(meant)[name] - view).abs().max()) <= step / 2 * 1.001


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_error_feedback_loses_nothing_in_the_long_run(form: str) -> None:
    """What was sent adds up to what was meant to be sent, but for the last remainder."""
    generator = torch.Generator().manual_seed(1)
    left, sent, wanted = torch.zeros_like(VECTOR), torch.zeros_like(VECTOR), torch.zeros_like(VECTOR)
    for _ in range(50):
        delta = torch.randn(LAYOUT.size, generator=generator)
        wanted += delta
        _, meant = WIRE.rounded(delta + left, form)
        left = delta + left - meant
        sent += meant
    assert torch.allclose(sent + left, wanted, atol=1e-4)
    assert float(left.abs().max()) < 0.05  # and that is one rounding's error


def changed(**parts: object) -> bytearray:
    """The file with its header's parts replaced; None removes one."""
    body = file()
    start = 8 + int.from_bytes(body[:8], "little")
    head = {**json.loads(body[8:start]), **parts}
    return bytearray(framed({name: part for name, part in head.items() if part is not None}) + body[start:])


WHOLE = {"dtype": "F32", "shape": [5, 3], "data_offsets": [0, 60]}
CASES = {
    "empty": (bytearray(), "malformed"),
    "pickle": (bytearray(b"\x80\x04\x95" + bytes(400)), "malformed"),
    "zip": (bytearray(b"PK\x03\x04" + bytes(400)), "malformed"),
    "huge-header": (bytearray((2**60).to_bytes(8, "little") + bytes(400)), "malformed"),
    "deep": (bytearray(framed({"a": 1})[:8] + b"[" * 8), "malformed"),
    "list": (bytearray((8).to_bytes(8, "little") + b"[1,2,3] "), "malformed"),
    "missing": (changed(**{"0.weight": None}), "wrong-tensors"),
    "more": (changed(**{"more": WHOLE}), "wrong-tensors"),
    "shape": (changed(**{"0.weight": {**WHOLE, "shape": [3, 5]}}), "wrong-tensors"),
    "type": (changed(**{"0.weight": {**WHOLE, "dtype": "F64", "data_offsets": [0, 120]}}), "wrong-type"),
    "no-type": (changed(**{"0.weight": {**WHOLE, "dtype": "I64"}}), "malformed"),
    "overlap": (changed(**{"0.weight": {**WHOLE, "data_offsets": [4, 64]}}), "malformed"),
    "negative": (changed(**{"0.weight": {**WHOLE, "data_offsets": [-4, 56]}}), "malformed"),
    "floats": (changed(**{"0.weight": {**WHOLE, "data_offsets": [0.0, 60.0]}}), "malformed"),
    "short": (file()[:-4], "malformed"),
    "long": (file() + bytes(4), "malformed"),
    "content": (changed(__metadata__={"content": "gradient"}), "malformed"),
    "scales": (
        changed(
            **{SCALES: {"dtype": "F32", "shape": [len(WIRE.sizes)], "data_offsets": [0, 4 * len(WIRE.sizes)]}}
        ),
        "malformed",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_model_of_this_layout_is_refused_by_name(name: str) -> None:
    body, reason = CASES[name]
    with pytest.raises(BodyError) as caught:
        WIRE.read(body)
    assert caught.value.reason == reason


def test_a_model_in_another_type_is_refused() -> None:
    body = file("bf16")
    start = 8 + int.from_bytes(body[:8], "little")
    head = {**json.loads(body[8:start]), "__metadata__": {"content": "model"}}
    with pytest.raises(BodyError, match="holds differences") as caught:
        WIRE.read(bytearray(framed(head) + body[start:]))
    assert caught.value.reason == "wrong-type"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_body_does_anything_but_be_read_or_refused(data: st.DataObject) -> None:
    body = file(data.draw(st.sampled_from(["full", "bf16", "int8"])))
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, min(len(body), 700) - 1))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        found = WIRE.read(body)
    except BodyError:
        return
    assert found.vector.shape == (LAYOUT.size,) and found.vector.dtype == torch.float32


def test_the_limit_has_room_for_every_form() -> None:
    assert all(len(file(form)) <= WIRE.limit for form in ("full", "bf16", "int8"))
    assert WIRE.limit < WIRE.bytes + 20_000


def test_the_usual_head_is_read_as_any_other() -> None:
    wire = Wire(Layout.of(nn.Linear(3, 2)))
    vector = torch.arange(8, dtype=torch.float32)
    usual = wire.heads["full"] + bytes(raw(vector))
    other = wire.head("full", {"by": "another library"}) + bytes(raw(vector))
    for body in (usual, other):
        found = wire.read(bytearray(body))
        assert torch.equal(found.vector, vector) and not found.delta
    for damaged in (usual[:-4], usual + bytes(4), other[:-4]):
        with pytest.raises(BodyError):
            wire.read(bytearray(damaged))
