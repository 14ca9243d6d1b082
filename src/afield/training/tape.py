"""A function of tensors as a flat list of tensor operations: recorded once, then run for any number of clients.

torch.func.vmap pays about 1 ms of Python a step for a small network, whatever the number of clients. The operations
that it ends in are the same every time, so they are written down once and run by themselves (digits MLP, 9 clients:
1.3 ms a step by vmap, 0.3 from the tape).
"""

from __future__ import annotations

import math
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Views that change nothing where shape, strides and type stay as they are.
IDLE = {
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
}
# The same operation by a shorter way from Python: 1 us a call less than through the operator's schema.
_SHORT: dict[Any, Callable[..., Any]] = {
    aten.bmm.default: torch.bmm,
    aten.baddbmm.default: torch.baddbmm,
    aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.relu.default: torch.relu,
    aten.mul.Tensor: torch.mul,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.neg.default: torch.neg,
    aten.view.default: Tensor.view,
    aten.transpose.int: torch.transpose,
    aten.sum.dim_IntList: torch.sum,
    aten._log_softmax.default: torch._log_softmax,
    aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
    aten.expand.default: Tensor.expand,
    aten.baddbmm_.default: Tensor.baddbmm_,
    aten.add_.Tensor: Tensor.add_,
}


# What they give is memory of their own.
_FRESH = {
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mm.default,
    aten.addmm.default,
    aten.add.Tensor,
}


def _threshold(gradient: Tensor, *rest: Any) -> Tensor:
    found: Tensor = aten.threshold_backward.grad_input(gradient, *rest, grad_input=gradient)
    return found


# The same over the first argument, which must be fresh and read by nobody else: its memory is in the cache.
_OVER: dict[Any, Callable[..., Any]] = {
    aten.relu.default: torch.relu_,
    aten.threshold_backward.default: _threshold,
}
_VIEWS = {aten.view.default, aten._unsafe_view.default}


class CannotRecord(Exception):  # noqa: N818 - a reason, not a mistake
    """Why a function is no flat list of operations."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the tape."""

    number: int


@dataclass(frozen=True, slots=True)
class Affine:
    """An integer that follows the number of clients: slope * width + offset."""

    slope: int
    offset: int


@dataclass(slots=True)
class Line:
    """One operation. `given` is what it gives: a tensor, or several (None: one that is no tensor)."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[Ref | None]
    several: bool
    idle: bool = False  # gives its first argument as it is
    shaped: tuple[bool, ...] = ()  # a sum or product in one type: which arguments have the result's shape


@dataclass(slots=True)
class Tape:
    inputs: list[Ref]
    lines: list[Line]
    outputs: list[Any]
    constants: dict[int, Tensor]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, inputs: Sequence[Tensor], constants: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: dict[int, int] = {}  # of the tensors that there are, by id
        self._named = count()
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        self.lines: list[Line] = []
        self.known = {id(value) for value in constants}
        self.constants: dict[int, Tensor] = {}
        self.inputs = [self._name(value) for value in inputs]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler: 3 s

    def _name(self, value: Tensor) -> Ref:
        key, number = id(value), next(self._named)
        # an id is given anew once its tensor is gone; to hold them all would take gigabytes for a language model
        self._alive[key] = weakref.ref(value, lambda _: self._forget(key))
        self.numbers[key] = number
        return Ref(number)

    def _forget(self, key: int) -> None:
        del self._alive[key], self.numbers[key]

    def ref(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in self.numbers:
                return Ref(self.numbers[id(value)])
            if id(value) not in self.known and value.ndim:
                raise CannotRecord(f"it uses a tensor of shape {tuple(value.shape)} that is no part of it")
            found = self._name(value)
            self.constants[found.number] = value
            return found
        if isinstance(value, (list, tuple)):
            return type(value)(self.ref(part) for part in value)
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CannotRecord(f"it draws random numbers ({func.name()})")
        if func is aten._local_scalar_dense.default or torch.Tag.dynamic_output_shape in func.tags:
            raise CannotRecord(f"what it does depends on the values ({func.name()})")
        plain = tuple(self.ref(value) for value in args)
        named = {key: self.ref(value) for key, value in (kwargs or {}).items()}
        changed = {
            self.ref(args[place]).number
            for place, argument in enumerate(func._schema.arguments[: len(args)])
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(args[place], Tensor)
        }
        if changed & self.constants.keys():
            raise CannotRecord(f"it changes a buffer of its own ({func.name()})")
        result = func(*args, **(kwargs or {}))
        several = isinstance(result, (list, tuple))
        parts = list(result) if several else [result]
        given = [
            (self.ref(part) if id(part) in self.numbers else self._name(part))
            if isinstance(part, Tensor)
            else None
            for part in parts
        ]
        first = args[0] if args and isinstance(args[0], Tensor) else None
        idle = first is not None and (
            (func in IDLE and _alike(first, result)) or (func is aten.mul.Scalar and args[1] == 1)
        )
        shaped: tuple[bool, ...] = ()
        if func in (aten.add.Tensor, aten.mul.Tensor) and all(
            isinstance(value, Tensor) and value.dtype == result.dtype for value in args
        ):
            shaped = tuple(value.shape == result.shape for value in args)
        self.lines.append(Line(func, plain, named, given, several, idle, shaped))
        return result


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.stride() == right.stride() and left.dtype == right.dtype


def record(function: Callable[..., Any], inputs: Sequence[Tensor], constants: Sequence[Tensor] = ()) -> Tape:
    """The operations of `function(*inputs)`, a tuple of tensors; `constants` are tensors that it may read."""
    recorder = _Recorder(inputs, constants)
    try:
        with recorder:
            outputs = function(*inputs)
    except CannotRecord:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CannotRecord(reason[0]) from error
    return Tape(
        recorder.inputs, recorder.lines, [recorder.ref(value) for value in outputs], recorder.constants
    )


def widened(tapes: dict[int, Tape]) -> Tape:
    """One tape for any width, from tapes at three widths: an integer that differs follows the width."""
    widths = list(tapes)
    first, *rest = tapes.values()

    def merge(parts: Sequence[Any]) -> Any:
        head = parts[0]
        if isinstance(head, (list, tuple)):
            if any(type(part) is not type(head) or len(part) != len(head) for part in parts):
                raise CannotRecord("its operations depend on the number of clients")
            return type(head)(merge(column) for column in zip(*parts, strict=True))
        if all(type(part) is type(head) and part == head for part in parts):
            return head
        if not all(type(part) is int for part in parts):
            raise CannotRecord("its operations depend on the number of clients")
        slope, left = divmod(parts[1] - head, widths[1] - widths[0])
        offset = head - slope * widths[0]
        if left or any(part != slope * width + offset for width, part in zip(widths, parts, strict=True)):
            raise CannotRecord(f"a size {head} does not grow with the number of clients")
        return Affine(slope, offset)

    shape = [(line.operation, tuple(line.kwargs), line.given) for line in first.lines]
    for tape in rest:
        if shape != [(line.operation, tuple(line.kwargs), line.given) for line in tape.lines]:
            raise CannotRecord("its operations depend on the number of clients")
    lines = [
        Line(
            same[0].operation,
            merge([line.args for line in same]),
            {key: merge([line.kwargs[key] for line in same]) for key in same[0].kwargs},
            same[0].given,
            same[0].several,
            all(line.idle for line in same),
            same[0].shaped,
        )
        for same in zip(*(tape.lines for tape in tapes.values()), strict=True)
    ]
    return Tape(first.inputs, lines, merge([tape.outputs for tape in tapes.values()]), first.constants)


def uses(tape: Tape) -> Counter[Ref]:
    """How often each tensor is read."""
    return Counter(
        [*(ref for line in tape.lines for ref in refs([line.args, line.kwargs])), *refs(tape.outputs)]
    )


def writes(line: Line) -> bool:
    """Whether it changes one of its arguments."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in line.operation._schema.arguments)


def refs(value: Any) -> list[Ref]:
    """The tensors in arguments, however deep."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [ref for part in value for ref in refs(part)] if isinstance(value, (list, tuple)) else []


def compiled(tape: Tape) -> Callable[..., tuple[Tensor, ...]]:
    """The tape as a Python function of (width, *inputs)."""
    names: dict[str, Any] = {}

    def text(value: Any) -> str:
        if isinstance(value, Ref):
            return f"c{value.number}" if value.number in tape.constants else f"t{value.number}"
        if isinstance(value, Affine):
            return f"{value.slope}*width+{value.offset}"
        if isinstance(value, (list, tuple)):
            inner = ", ".join(text(part) for part in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
        if (
            value is None
            or isinstance(value, (bool, int, str))
            or (isinstance(value, float) and math.isfinite(value))
        ):
            return repr(value)
        names[f"k{len(names)}"] = value
        return f"k{len(names) - 1}"

    # Libraries may lay out a result in another way than when it was recorded: where nothing is written to views, a
    # copy will do.
    free = not any(writes(line) and line.given for line in tape.lines)
    last = {ref: number for number, line in enumerate(tape.lines) for ref in refs([line.args, line.kwargs])}
    outputs = set(refs(tape.outputs))
    count, fresh = uses(tape), {line.given[0] for line in tape.lines if line.operation in _FRESH}
    rows = []
    for number, line in enumerate(tape.lines):
        function = _SHORT.get(line.operation, line.operation)
        if free and line.operation in _VIEWS:
            function = torch.reshape
        elif line.operation in _OVER and line.args[0] in fresh and count[line.args[0]] == 1:
            function = _OVER[line.operation]
        names[f"f{number}"] = function
        arguments = [text(value) for value in line.args]
        arguments += [f"{key}={text(value)}" for key, value in line.kwargs.items()]
        call = f"f{number}({', '.join(arguments)})"
        given = [text(ref) if ref is not None else "_" for ref in line.given]
        rows.append(
            f"    {', '.join(given)}{',' if line.several else ''} = {call}" if given else f"    {call}"
        )
        # what nobody reads any more is let go at once: its memory serves the next operation
        gone = {
            ref
            for ref in (*refs([line.args, line.kwargs]), *(ref for ref in line.given if ref is not None))
            if last.get(ref, number) == number and ref not in outputs and ref.number not in tape.constants
        }
        if gone:
            rows.append(f"    del {', '.join(sorted(text(ref) for ref in gone))}")
    names.update({f"c{number}": value for number, value in tape.constants.items()})
    heads = ", ".join(["width", *(text(ref) for ref in tape.inputs)])
    source = f"def run({heads}):\n" + "\n".join(rows) + f"\n    return {text(tuple(tape.outputs))}\n"
    exec(compile(source, "<tape>", "exec"), names)
    run: Callable[..., tuple[Tensor, ...]] = operator.itemgetter("run")(names)
    return run
