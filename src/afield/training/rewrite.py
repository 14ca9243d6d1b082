"""The same tape with fewer operations: what changes nothing or is not used goes, and neighbours become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afield.training.tape import IDLE, Line, Ref, Tape, aten, refs, uses, writes

_SPREAD = {*IDLE, aten.unsqueeze.default}  # of ones: ones


def simplified(tape: Tape, half: bool = False) -> Tape:
    """The same without what changes nothing, a bias folded into its product, and nothing that nobody uses.

    `half`: of a step in bfloat16, which is near the one in float32 and no more.
    """
    stand_in: dict[Ref, Ref] = {}
    made: dict[Ref, Line] = {}
    lines: list[Line] = []
    ones: set[Ref] = set()  # autograd begins with them
    pure = not any(writes(line) for line in tape.lines)
    for line in tape.lines:
        args, kwargs = _replaced(line.args, stand_in), _replaced(line.kwargs, stand_in)
        line = Line(line.operation, args, kwargs, line.given, line.several, line.idle, line.shaped)
        given = line.given[0] if line.given else None
        # a product with 1 is a copy: it stays where anything is written to
        if line.idle and given is not None and (pure or line.operation in IDLE):
            stand_in[given] = args[0]
            continue
        if pure and given is not None:
            if line.operation is aten.ones_like.default or (line.operation in _SPREAD and args[0] in ones):
                ones.add(given)
            if line.operation is aten.mul.Tensor and line.shaped[1:] == (True,) and args[0] in ones:
                stand_in[given] = args[1]
                continue
        if line.operation is aten.transpose.int and given is not None and args[0] in made:
            before = made[args[0]]
            if before.operation is aten.transpose.int and before.args[1:] == args[1:]:
                stand_in[given] = before.args[0]
                continue
        if given is not None and not writes(line):
            made[given] = line
        lines.append(line)
    tape = Tape(tape.inputs, lines, _replaced(tape.outputs, stand_in), tape.constants)
    tape = _used(_upright(_used(tape)))
    if pure:
        tape = _pooled_first(tape)
    return _used(_biased(_biased_late(tape) if pure and half else tape))


def _readers(tape: Tape) -> dict[Ref, list[Line]]:
    found: dict[Ref, list[Line]] = {}
    for line in tape.lines:
        for ref in refs([line.args, line.kwargs]):
            found.setdefault(ref, []).append(line)
    return found


def _pooled_first(tape: Tape) -> Tape:
    """Max pooling of a ReLU as the ReLU of max pooling: the same bits both ways, and far fewer of them (a CNN: 1.04).

    Where the largest of a window is not positive, both give 0 and hand back 0; else it is the same one.
    """
    readers, told, free = _readers(tape), set(refs(tape.outputs)), _free(tape)
    kinds = [
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.threshold_backward.default,
    ]
    instead: dict[int, list[Line]] = {}  # of a line
    for line in tape.lines:
        relu = line.given[0] if line.operation is aten.relu.default else None
        if relu is None or relu in told or len(readers.get(relu, ())) != 3:
            continue
        pool, back, mask = readers[relu]
        if [pool.operation, back.operation, mask.operation] != kinds:
            continue
        [large] = back.given
        if back.args[1] != relu or mask.args != (large, relu, 0):
            continue
        if large is None or large in told or len(readers[large]) != 1:
            continue
        source, (least, places) = line.args[0], pool.given
        highest, gradient = Ref(free), Ref(free + 1)
        free += 2
        instead[id(line)] = instead[id(mask)] = []
        instead[id(pool)] = [
            Line(pool.operation, (source, *pool.args[1:]), pool.kwargs, [highest, places], True),
            Line(line.operation, (highest,), {}, [least], False),
        ]
        instead[id(back)] = [
            Line(mask.operation, (back.args[0], least, 0), {}, [gradient], False),
            Line(back.operation, (gradient, source, *back.args[2:]), back.kwargs, mask.given, False),
        ]
    lines = [one for line in tape.lines for one in instead.get(id(line), [line])]
    return Tape(tape.inputs, lines, tape.outputs, tape.constants)


def _biased_late(tape: Tape) -> Tape:
    """A convolution's bias added behind max pooling, to a quarter of the numbers; its gradient sums as few.

    The largest of a window stays so. But where the bias makes two equal, the gradient goes to the first of them, and
    here to the larger: for steps in bfloat16 alone.
    """
    readers, told, free = _readers(tape), set(refs(tape.outputs)), _free(tape)
    pooling = [aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default]
    instead: dict[int, list[Line]] = {}
    for line in tape.lines:
        if line.operation is not aten.convolution.default or not isinstance(line.args[2], Ref):
            continue
        [found] = line.given
        if found is None or found in told or [r.operation for r in readers.get(found, ())] != pooling:
            continue
        pool, back = readers[found]
        [gradient] = back.given
        if back.args[1] != found or gradient is None or gradient in told or len(readers[gradient]) != 1:
            continue
        [last] = readers[gradient]
        if last.operation is not aten.convolution_backward.default or last.args[0] != gradient:
            continue
        sizes, (*wanted, biased) = last.args[3], last.args[10]
        if not biased or len(sizes) != 1 or not isinstance(sizes[0], int):  # of many clients: by their number
            continue
        (least, places), (into, kernels, bias) = pool.given, last.given
        highest, wide = Ref(free), Ref(free + 1)
        free += 2
        instead[id(line)] = [_with(line, (*line.args[:2], None, *line.args[3:]))]
        instead[id(pool)] = [
            _with(pool, pool.args, [highest, places]),
            Line(aten.view.default, (line.args[2], [sizes[0], 1, 1]), {}, [wide], False),
            Line(aten.add.Tensor, (highest, wide), {}, [least], False),
        ]
        instead[id(back)] = [Line(aten.sum.dim_IntList, (back.args[0], [0, 2, 3]), {}, [bias], False), back]
        instead[id(last)] = [_with(last, (*last.args[:10], [*wanted, False]), [into, kernels, None])]
    lines = [one for line in tape.lines for one in instead.get(id(line), [line])]
    return Tape(tape.inputs, lines, tape.outputs, tape.constants)


def _with(line: Line, args: tuple[Any, ...], given: list[Ref | None] | None = None) -> Line:
    return Line(line.operation, args, line.kwargs, line.given if given is None else given, line.several)


def _upright(tape: Tape) -> Tape:
    """(a b)^T as b^T a^T: a gradient in the layout of its weights, not across it (4 times as fast to subtract)."""
    count = uses(tape)
    flip = (aten.transpose.int, (1, 2))
    made, free = {line.given[0]: line for line in tape.lines if line.given}, _free(tape)
    lines: list[Line] = []
    for line in tape.lines:
        product = made.get(line.args[0]) if (line.operation, line.args[1:]) == flip else None
        if product is not None and product.operation is aten.bmm.default and count[line.args[0]] == 1:
            flipped: list[Ref] = []
            for factor in reversed(product.args):
                source = made.get(factor)
                if source is not None and (source.operation, source.args[1:]) == flip:
                    flipped.append(source.args[0])
                else:
                    flipped.append(Ref(free))
                    lines.append(Line(aten.transpose.int, (factor, 1, 2), {}, [Ref(free)], False))
                    free += 1
            line = Line(aten.bmm.default, tuple(flipped), {}, line.given, False)
        lines.append(line)
    return Tape(tape.inputs, lines, tape.outputs, tape.constants)


def descending(tape: Tape, weights: Sequence[Ref], rate: float) -> Tape:
    """The tape with `weights -= rate * gradient` at its end; its first outputs, the gradients, are dropped.

    A gradient that is a product is subtracted as it is made: it is never written (MLP, 9 clients: 1.2 times as fast).
    """
    count = uses(tape)
    products = {line.given[0]: line for line in tape.lines if line.operation is aten.bmm.default}
    lines, steps = list(tape.lines), []
    for weight, gradient in zip(weights, tape.outputs[: len(weights)], strict=True):
        product = products.get(gradient)
        if product is not None and count[gradient] == 1:
            lines.remove(product)
            steps.append(Line(aten.baddbmm_.default, (weight, *product.args), {"alpha": -rate}, [], False))
        else:
            steps.append(Line(aten.add_.Tensor, (weight, gradient), {"alpha": -rate}, [], False))
    return Tape(tape.inputs, lines + steps, tape.outputs[len(weights) :], tape.constants)


def apart(tape: Tape, examples: Ref) -> tuple[Tape, int] | None:
    """A step of `descending` without the linear layer that reads the examples, and which input is its weights.

    It takes the layer's outputs, less the bias, in place of the examples, and gives their gradient behind the loss;
    the weights stay as they are. None: other operations read the examples, or these weights.
    """
    readers = _readers(tape)
    flat, reading = examples, readers.get(examples, [])
    if len(reading) == 1 and reading[0].operation in IDLE and reading[0].given[0]:  # flattened
        flat = reading[0].given[0]
        reading = readers.get(flat, [])
    if len(reading) != 2 or reading[1].operation is not aten.baddbmm_.default:
        return None
    product, move = reading
    if product.operation not in (aten.bmm.default, aten.baddbmm.default) or product.kwargs:
        return None
    flip = (aten.transpose.int, (1, 2))
    flips = {line.given[0]: line.args[0] for line in tape.lines if (line.operation, line.args[1:]) == flip}
    (*bias, left, right), (weight, gradient, other) = product.args, move.args
    # x W^T and W -= rate G^T x
    if left != flat or other != flat or flips.get(right) != weight or gradient not in flips:
        return None
    if weight not in tape.inputs or len(readers[weight]) != 2 or len(readers[right]) != 1:
        return None
    kind = aten.add.Tensor if bias else aten.alias.default
    instead = Line(kind, (examples, *bias), {}, product.given, False)
    lines = [instead if line is product else line for line in tape.lines if line is not move]
    found = Tape(tape.inputs, lines, [*tape.outputs, flips[gradient]], tape.constants)
    return _used(found), tape.inputs.index(weight)


def _biased(tape: Tape) -> Tape:
    """bmm, then add: one operation instead of two."""
    count = uses(tape)
    products = {line.given[0]: line for line in tape.lines if line.operation is aten.bmm.default}
    for line in tape.lines:
        if line.operation is aten.add.Tensor and line.shaped and not line.kwargs:
            for place in (0, 1):
                product = line.args[place]
                if line.shaped[place] and product in products and count[product] == 1:
                    line.operation = aten.baddbmm.default
                    line.args = (line.args[1 - place], *products[product].args)
                    break
    return tape


def _free(tape: Tape) -> int:
    """A number that no tensor of the tape has, nor any above it."""
    return 1 + max(ref.number for ref in (*tape.inputs, *(r for line in tape.lines for r in line.given if r)))


def _used(tape: Tape) -> Tape:
    wanted = set(refs(tape.outputs))
    kept = []
    for line in reversed(tape.lines):
        if writes(line) or any(ref in wanted for ref in line.given if ref is not None):
            wanted.update(refs([line.args, line.kwargs]))
            kept.append(line)
    return Tape(tape.inputs, kept[::-1], tape.outputs, tape.constants)


def _replaced(value: Any, by: dict[Ref, Ref]) -> Any:
    if isinstance(value, Ref):
        return by.get(value, value)
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(part, by) for part in value)
    if isinstance(value, dict):
        return {key: _replaced(part, by) for key, part in value.items()}
    return value
