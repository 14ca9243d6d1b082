"""Models on the wire: safetensors files whose data is the flat vector itself, in the layout's order.

A body in that order and in the model's own type is read without a copy. Any other order (libraries sort by name) is
gathered. A body says by the metadata `content` whether it holds the trained model or, as bfloat16 and int8 always do,
its difference to the task's base; int8 comes with `afield.scales`, one factor per tensor in the layout's order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from afield.core.flat import Layout

TYPE = "application/vnd.safetensors"
FORMS = {"full": None, "bf16": torch.bfloat16, "int8": torch.int8}
NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
}
TYPES = {name: dtype for dtype, name in NAMES.items()}
SCALES = "afield.scales"
CONTENTS = ("model", "delta")
SPARE = 4096  # bytes of header that a client may add to what is needed (its own metadata)
ROUND = 127.0


class BodyError(ValueError):
    """A body that is not what it should be: `reason` is the refusal's name."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def refuse(reason: str, message: str) -> NoReturn:
    raise BodyError(reason, message)


@dataclass(frozen=True, slots=True)
class Body:
    """A vector as it was sent: values, and whether they are a model or the difference to its base."""

    vector: Tensor
    delta: bool

    def model(self, base: Tensor) -> Tensor:
        """The trained model; `base` is only read."""
        return torch.add(base, self.vector) if self.delta else self.vector


class Wire:
    """Reads and writes the models of one layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.sizes = [shape.numel() for shape in layout.shapes]
        self.bytes = layout.size * layout.dtype.itemsize
        self.heads = {form: self.head(form) for form in FORMS}
        # the largest body there is reason to read: the model in its own type, and a header as long as any could be
        self.limit = self.bytes + 2 * len(self.heads["int8"]) + SPARE

    def head(self, form: str = "full", extra: Mapping[str, str] | None = None) -> bytes:
        """The start of a file, up to where the vector begins."""
        dtype = FORMS[form] or self.layout.dtype
        content = "model" if form == "full" else "delta"
        head: dict[str, Any] = {"__metadata__": {"content": content, **(extra or {})}}
        at = 0
        for name, shape, count in zip(self.layout.names, self.layout.shapes, self.sizes, strict=True):
            end = at + count * dtype.itemsize
            head[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            at = end
        if form == "int8":
            # the factors come last but must be aligned: the format takes care of that for who writes them first
            head[SCALES] = {
                "dtype": "F32",
                "shape": [len(self.sizes)],
                "data_offsets": [at, at + 4 * len(self.sizes)],
            }
        return framed(head)

    def rounded(self, vector: Tensor, form: str) -> tuple[list[memoryview], Tensor]:
        """A difference as it is sent in this form: its pieces after the head, and the values that they stand for."""
        if form == "bf16":
            sent = vector.to(torch.bfloat16)
            return [raw(sent)], sent.to(vector.dtype)
        scales = torch.empty(len(self.sizes), dtype=torch.float32)
        sent = torch.empty(len(vector), dtype=torch.int8)
        meant = torch.empty_like(vector)
        for k, (offset, count) in enumerate(zip(self.layout.offsets, self.sizes, strict=True)):
            part = vector[offset : offset + count]
            largest = float(part.abs().max()) if count else 0.0
            scales[k] = scale = largest / ROUND if largest / ROUND > 0.0 else 1.0
            scale = float(scales[k])
            sent[offset : offset + count] = (part / scale).round_().clamp_(-ROUND, ROUND)
            torch.mul(sent[offset : offset + count], scale, out=meant[offset : offset + count])
        return [raw(sent), raw(scales)], meant

    def read(self, body: bytearray | memoryview) -> Body:
        """What a body holds; anything but a model of this layout is refused by name."""
        usual = self.heads["full"]
        if len(body) == len(usual) + self.bytes and bytes(body[: len(usual)]) == usual:  # nothing to parse
            return Body(self._vector(body, len(usual), self.layout.dtype), False)
        head, start = parsed(body, self.limit - self.bytes)
        metadata = head.pop("__metadata__", {})
        content = metadata.get("content", "model") if isinstance(metadata, dict) else None
        if content not in CONTENTS:
            refuse("malformed", f"metadata.content is {content!r}: write model or delta")
        scales = head.pop(SCALES, None)
        places = self._places(head, scales, len(body) - start)
        dtype = TYPES[next(iter(places.values()))[0]]
        vector = self._gathered(body, start, places, dtype)
        if dtype == self.layout.dtype:
            return Body(vector, content == "delta")
        if content != "delta":
            refuse(
                "wrong-type",
                f"a model is sent as {NAMES[self.layout.dtype]}; {NAMES[dtype]} holds differences",
            )
        if dtype == torch.int8:
            return Body(self._scaled(body, start, vector, scales), True)
        return Body(vector.to(self.layout.dtype), True)

    def _places(self, head: dict[str, Any], scales: Any, room: int) -> dict[str, tuple[str, int]]:
        """Of each tensor its type and where its bytes begin; they must fill the body, and be this layout's."""
        if missing := [name for name in self.layout.names if name not in head]:
            refuse("wrong-tensors", f"tensor {missing[0]!r} is missing: send every tensor of the model")
        if len(head) > len(self.sizes):
            other = next(name for name in head if name not in set(self.layout.names))
            refuse("wrong-tensors", f"tensor {other[:80]!r} is not of this model: leave it out")
        entries = [
            (name, head[name], list(shape))
            for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)
        ]
        if scales is not None:
            entries.append((SCALES, scales, [len(self.sizes)]))
        kinds, spans, places = set(), [], {}
        for name, entry, shape in entries:
            kind, begin, end = _entry(name, entry, shape)
            spans.append((begin, end))
            if name == SCALES:
                if kind != "F32":
                    refuse("wrong-type", f"{SCALES} is {kind}: send F32")
            else:
                kinds.add(kind)
                places[name] = (kind, begin)
        allowed = {NAMES[self.layout.dtype], "BF16", "I8"}
        if len(kinds) != 1 or not kinds <= allowed:
            refuse(
                "wrong-type",
                f"tensors of type {', '.join(sorted(kinds))}: send all as one of {', '.join(sorted(allowed))}",
            )
        if (kinds == {"I8"}) != (scales is not None):
            refuse("malformed", f"I8 comes with {SCALES}, other types without")
        at = 0
        for begin, end in sorted(spans):
            if begin != at:
                refuse(
                    "malformed",
                    f"data has a gap or an overlap at byte {min(begin, at)}: tensors must lie side by side",
                )
            at = end
        if at != room:
            refuse("malformed", f"the data has {room} bytes, its header speaks of {at}")
        return places

    def _gathered(
        self, body: Any, start: int, places: dict[str, tuple[str, int]], dtype: torch.dtype
    ) -> Tensor:
        width = dtype.itemsize
        straight = all(
            places[name][1] == offset * width or not count
            for name, offset, count in zip(self.layout.names, self.layout.offsets, self.sizes, strict=True)
        )
        if straight and start % width == 0:
            return self._vector(body, start, dtype)
        vector = torch.empty(self.layout.size, dtype=dtype)
        out, view = raw(vector), memoryview(body)
        for name, offset, count in zip(self.layout.names, self.layout.offsets, self.sizes, strict=True):
            begin = start + places[name][1]
            out[offset * width : (offset + count) * width] = view[begin : begin + count * width]
        return vector

    def _vector(self, body: Any, start: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(body, dtype=dtype, count=self.layout.size, offset=start)

    def _scaled(self, body: Any, start: int, vector: Tensor, scales: Any) -> Tensor:
        begin, end = scales["data_offsets"]
        factors = torch.frombuffer(
            bytearray(memoryview(body)[start + begin : start + end]), dtype=torch.float32
        )
        whole = torch.empty(self.layout.size, dtype=self.layout.dtype)
        for offset, count, factor in zip(self.layout.offsets, self.sizes, factors.tolist(), strict=True):
            torch.mul(vector[offset : offset + count], factor, out=whole[offset : offset + count])
        return whole


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous vector; no copy."""
    array: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def framed(head: Mapping[str, Any]) -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parsed(body: bytearray | memoryview | bytes, most: int) -> tuple[dict[str, Any], int]:
    """A file's header, and where its data begins."""
    view = memoryview(body)
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or not 2 <= length <= min(most, len(view) - 8):
        refuse("malformed", "this is not a safetensors file: send one (pickles are never read)")
    try:
        head = json.loads(bytes(view[8 : 8 + length]))
    except (ValueError, RecursionError):
        refuse("malformed", "the header is not JSON: send a safetensors file")
    if not isinstance(head, dict):
        refuse("malformed", "the header is not a JSON object: send a safetensors file")
    return head, 8 + length


def _entry(name: str, entry: Any, shape: list[int]) -> tuple[str, int, int]:
    """Type, begin and end of one tensor, of just this shape."""
    try:
        kind, found, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        width = TYPES[kind].itemsize
        whole = all(type(number) is int for number in (begin, end, *found))
    except (TypeError, ValueError, KeyError):
        refuse("malformed", f"tensor {name!r} needs a dtype of {', '.join(TYPES)}, a shape and data_offsets")
    if found != shape:
        refuse("wrong-tensors", f"tensor {name!r} has the shape {str(found)[:80]}, the model's is {shape}")
    if not whole or begin < 0 or end - begin != math.prod(shape) * width:
        refuse("malformed", f"tensor {name!r} of {kind} {shape} does not take the bytes {begin} to {end}")
    return kind, begin, end
