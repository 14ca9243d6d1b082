"""Layers that depend on more than their input."""

from __future__ import annotations

import torch
from torch import nn

from afield.training.layers import BlockNorm, Moment


def test_the_norm_of_a_short_batch_is_that_of_its_examples() -> None:
    torch.manual_seed(0)
    for shape in ((6, 3), (6, 3, 5), (6, 3, 4, 2)):
        moment, there = Moment(alone=True), torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.bool)
        kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
        norm = kind(3).double()
        norm.weight.data.uniform_(0.5, 2)
        norm.bias.data.uniform_(-1, 1)
        own = BlockNorm(norm, "norm", moment)
        x = (torch.randn(shape, dtype=torch.float64) * 3 + 20).requires_grad_()
        gradient = torch.randn(shape, dtype=torch.float64) * there.view(-1, *[1] * (len(shape) - 1))
        wanted = torch.autograd.grad(norm(x[there]), [x, norm.weight, norm.bias], gradient[there])
        moment.begin(None, None, there)
        out = own(x)
        torch.testing.assert_close(out[there], norm(x[there]))
        for one, other in zip(
            torch.autograd.grad(out, [x, norm.weight, norm.bias], gradient), wanted, strict=True
        ):
            torch.testing.assert_close(one, other)
        mean, variance = moment.statistics["norm"]
        values = x[there].movedim(1, 0).flatten(1)
        torch.testing.assert_close(mean, values.mean(dim=1))
        torch.testing.assert_close(variance, values.var(dim=1))
