"""Recording a tape: it holds no tensor that the function has let go, and takes none for another."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from afield.training.tape import compiled, record

LENGTH = 200


def chain(value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Many sums and a gradient through them; a tensor that is let go leaves its id to a later one."""
    weight.requires_grad_()
    for number in range(LENGTH):
        value = value + number
        if number % 50 == 0:
            value = (value * weight).tanh()
    (back,) = torch.autograd.grad(value.sum(), [weight])
    return value.detach(), back


def test_what_is_let_go_is_not_held() -> None:
    """They were all held once: a BERT of 22 million weights took 21 GB to record."""
    made: list[weakref.ref[Tensor]] = []
    most = 0

    def function(value: Tensor) -> tuple[Tensor]:
        nonlocal most
        for _ in range(LENGTH):
            value = value + 1
            made.append(weakref.ref(value))
            most = max(most, sum(ref() is not None for ref in made))
        return (value,)

    tape = record(function, [torch.zeros(3)])
    assert len(tape.lines) == LENGTH
    assert len({line.given[0] for line in tape.lines}) == LENGTH
    assert most <= 2


def test_ids_that_are_given_again_are_not_mistaken() -> None:
    draw = torch.Generator().manual_seed(0)
    value, weight = torch.randn(5, generator=draw), torch.randn(5, generator=draw)
    step = compiled(record(chain, [value.clone(), weight.clone()]))
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        value, weight = torch.randn(5, generator=draw), torch.randn(5, generator=draw)
        for found, right in zip(step(1, value, weight), chain(value, weight.clone()), strict=True):
            assert torch.equal(found, right)
