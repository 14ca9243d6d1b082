"""The Triton kernels against their definition, on a CPU, by Triton's interpreter: run by test_convpool.py.

A process of its own: what Triton compiles is decided when it is imported.
"""

from __future__ import annotations

import itertools
import sys

import torch

from afield.training import kernels
from afield.training.convpool import conv_pool, conv_pool_back

# rows, batch, high, wide, channels in, channels out, side, padding
SIZES = [
    (2, 3, 8, 8, 1, 4, 3, 1),
    (2, 2, 9, 7, 3, 5, 3, 0),
    (3, 2, 6, 6, 4, 20, 5, 2),
    (1, 9, 6, 6, 16, 32, 3, 1),
]


def main() -> None:
    draw = torch.Generator().manual_seed(1)
    torch.backends.cudnn.allow_tf32 = False
    for sizes, flat, into in itertools.product(SIZES, (False, True), (False, True)):
        rows, batch, high, wide, channels, out, side, padding = sizes
        x = torch.randn(rows, batch, high, wide, channels, generator=draw)
        weight = torch.randn(rows, out, channels, side, side, generator=draw)
        bias = torch.randn(rows, out, generator=draw)
        right, code = conv_pool(x, weight, bias, padding, flat)
        found, chosen = kernels.forward(x, weight, bias, padding, flat)
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
        assert torch.equal(code, chosen)
        slope = torch.randn(right.shape, generator=draw)
        wanted = conv_pool_back(slope, code, x, weight, padding, flat, into)
        given = kernels.backward(slope, code, x, weight, padding, flat, into)
        for one, other in zip(given, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, torch.nan, 0.0]]).view(1, 2, 2, 2, 1)
    found, chosen = kernels.forward(x, torch.ones(1, 1, 1, 1, 1), torch.ones(1, 1), 0, False)
    assert chosen.flatten().tolist() == [0, 2]
    assert found[0, 0].item() == 1.0
    assert found[0, 1].isnan().all()
    sys.stdout.write(f"{len(SIZES)} sizes agree\n")


main()
