"""ClientTable: what is stored, what is handed out, and the int8 quantiser as a random variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afield.core.errors import InputError
from afield.core.keys import mix, noise
from afield.core.processor import amd
from afield.core.server import Server
from afield.core.table import (
    BLOCK,
    CHUNK_AMD,
    PRECISIONS,
    ClientTable,
    Wide,
    advance,
    chunks,
    dequantise,
    quantise,
)
from afield.core.table import CHUNK as PIECE
from afield.core.types import Task, Update
from afield.strategies import ACE, FedAsync, Scaffold

CHUNK = (CHUNK_AMD if amd() else PIECE) * torch.get_num_threads()
SIZES = [1, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1]
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
fixed = settings(derandomize=True, deadline=None, max_examples=60)


def task(client: int, count: int = 0) -> Task:
    return Task(number=0, client=client, count=count, version=0, started=0.0)


def vector(size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def put(
    table: ClientTable, client: int, value: Tensor, minus: Tensor | None = None, count: int = 0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Exchange a row; the old and the new one as they were handed out, chunk by chunk."""
    old, new = torch.full_like(value, torch.nan), torch.full_like(value, torch.nan)
    for part, before, write in table.exchange(task(client, count), seed, value, minus):
        old[part] = before
        new[part] = write()
    return old, new


# -- what every precision promises --------------------------------------------------------------------------------


@every_precision
@pytest.mark.parametrize("size", SIZES)
def test_old_and_new_are_what_the_row_says_before_and_after(size: int, precision: str) -> None:
    table = ClientTable.like(vector(size), 3, precision)
    before = table.row(1)
    assert torch.equal(before, torch.zeros(size))
    for count in range(3):
        old, new = put(table, 1, vector(size, 1 + count), vector(size, 9), count)
        assert torch.equal(old, before)
        assert torch.equal(new, table.row(1))
        error = (new - (vector(size, 1 + count) - vector(size, 9))).abs()
        assert float(error.max()) <= {"float32": 0.0, "bfloat16": 2**-8 * 8, "int8": 8 / 127}[precision]
        before = new
    assert [table.has(client) for client in range(3)] == [False, True, False]


@every_precision
def test_parts_cover_the_row_once_and_fit_the_blocks(precision: str) -> None:
    table = ClientTable.like(vector(2 * CHUNK + 5), 1, precision)
    value = torch.zeros(2 * CHUNK + 5)
    parts = [(part.start, part.stop) for part, _, _ in table.exchange(task(0), 0, value)]
    assert parts == [(0, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK + 5)]
    assert parts == [(part.start, part.stop) for part in chunks(value)]
    assert PIECE % BLOCK == CHUNK_AMD % BLOCK == 0  # no block straddles two passes


@every_precision
def test_a_running_sum_of_what_is_handed_out_never_leaves_the_table(precision: str) -> None:
    table = ClientTable.like(vector(100), 4, precision)
    total = torch.zeros(100, dtype=torch.float64)
    for count in range(200):
        client = int(mix(5, count) % 4)
        for part, old, write in table.exchange(task(client, count), 0, vector(100, count)):
            total[part].sub_(old).add_(write())
    rows = sum(table.row(client, torch.float64) for client in range(4))
    torch.testing.assert_close(total, rows, rtol=0, atol=1e-13)


@every_precision
def test_rows_never_written_read_as_the_initial_vector(precision: str) -> None:
    initial = vector(1500, 3)
    table = ClientTable.like(initial, 3, precision, initial=initial.clone())
    assert torch.equal(table.row(2), initial)  # as it is, not rounded
    assert table.row(2, torch.float64).dtype == torch.float64
    assert torch.equal(table.row(2, torch.float64), initial.double())
    old, _ = put(table, 2, vector(1500, 4))
    assert torch.equal(old, initial)
    assert torch.equal(table.row(1), initial)
    table.row(1).zero_()  # a copy
    assert torch.equal(table.row(1), initial)
    table.row(2).zero_()
    assert float(table.row(2).abs().max()) > 0


@every_precision
def test_rows_do_not_touch_each_other(precision: str) -> None:
    table = ClientTable.like(vector(1025), 5, precision)
    kept = [put(table, client, vector(1025, client))[1] for client in (0, 2, 4)]
    put(table, 2, vector(1025, 8), count=1)
    put(table, 3, vector(1025, 9))
    assert torch.equal(table.row(0), kept[0])
    assert torch.equal(table.row(4), kept[2])
    assert not table.has(1)


def resident() -> int:
    """Bytes of memory that this process really has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's account of memory")
def test_rows_never_written_cost_nothing() -> None:
    size, clients = 100_000, 10**8  # 40 TB of float32: more than a system promises, not only more than it has
    before = resident()
    table = ClientTable.like(torch.empty(size), clients)
    put(table, 7, vector(size))
    put(table, 12345678, vector(size))
    for client in (0, 99, clients - 1):
        table.row(client)
    assert resident() - before < 64 * 2**20
    assert len(table) == clients
    assert [client for client in (0, 7, 99, 12345678) if table.has(client)] == [7, 12345678]


def test_float64_passes_through() -> None:
    value = vector(1025, dtype=torch.float64)
    table = ClientTable.like(value, 2, "float32")
    _, new = put(table, 1, value, vector(1025, 1, torch.float64))
    assert new.dtype == torch.float64
    assert torch.equal(new, value - vector(1025, 1, torch.float64))
    assert torch.equal(table.row(1, torch.float64), new)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(InputError, match="precision"):
        ClientTable.like(vector(3), 2, "int4")
    with pytest.raises(InputError, match="clients"):
        ClientTable.like(vector(3), 0)


@pytest.mark.parametrize("strategy", [ACE(precision="int8"), ACE(precision="bfloat16"), ACE(), Scaffold()])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_never_enters(strategy: Any, bad: float) -> None:
    """The guard is the server's: the table is not even asked."""
    server = Server(strategy, torch.zeros(2000), 3)
    state: Any = server.state
    leased = server.checkout(1, 0.0)
    model = torch.zeros(2000)
    model[1500] = bad
    assert server.submit(Update(leased, model, None, 1)).refused == "not-finite"
    assert not state.table.rows
    assert server.submit(Update(leased, torch.ones(2000), None, 1)).refused == ""
    assert state.table.has(1) and torch.isfinite(state.table.row(1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_finite_enters_whatever_its_sum(dtype: torch.dtype) -> None:
    server = Server(FedAsync(), torch.zeros(2000, dtype=dtype), 3)
    model = torch.full((2000,), torch.finfo(dtype).max, dtype=dtype)
    assert torch.isinf(model.sum())
    assert server.submit(Update(server.checkout(1, 0.0), model, None, 1)).refused == ""
    model[::2] *= -1
    model[7] = torch.nan
    assert server.submit(Update(server.checkout(1, 0.0), model, None, 1)).refused == "not-finite"


# -- passes over chunks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sum_takes_chunks_as_torch_would(size: int, dtype: torch.dtype) -> None:
    """Bit for bit what mixed operations over whole vectors give, without their temporaries."""
    one, other, total = vector(size).to(dtype), vector(size, 1).to(dtype), vector(size, 2, torch.float64)
    kept = one.clone()
    expected = total.clone().add_(one, alpha=0.7).sub_(other, alpha=0.2)
    wide = Wide(total, one)
    for part in chunks(total):
        total[part].add_(wide(one[part]), alpha=0.7).sub_(wide(other[part]), alpha=0.2)
    assert torch.equal(total, expected)
    assert torch.equal(one, kept)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sum_moves_the_parameters_to_their_last_place(size: int, dtype: torch.dtype) -> None:
    """Half a last place each for the sum as rounded, the step's factor and the parameters."""
    params, total = vector(size).to(dtype), vector(size, 1, torch.float64)
    exact, kept = params.double() + 0.3 * total, total.clone()
    advance(params, total, 0.3)
    bound = torch.finfo(dtype).eps / 2 * (2 * 0.3 * total.abs() + exact.abs()) * (1 + 1e-2)
    assert ((params.double() - exact).abs() <= bound + (1e-15 if dtype == torch.float64 else 0)).all()
    assert torch.equal(total, kept)


def test_a_row_is_handed_out_as_stored_until_it_is_exchanged() -> None:
    size = CHUNK + 3
    for precision in PRECISIONS:
        table = ClientTable.like(vector(size), 2, precision)
        _, new = put(table, 0, vector(size, 1))
        for part in chunks(new):
            assert torch.equal(table.stored(0, part, torch.float32), new[part])
            assert torch.equal(table.stored(0, part, torch.float64), new[part].double())
            assert not table.stored(1, part, torch.float32).any()


# -- bfloat16 -----------------------------------------------------------------------------------------------------


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper 16 bits of a float32, rounded to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return kept.astype(np.uint32).view(np.float32)


def test_bfloat16_rounds_to_the_nearest() -> None:
    value = torch.cat([vector(3000), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0, 1e30, -1e-30])])
    table = ClientTable.like(value, 1, "bfloat16")
    _, new = put(table, 0, value)
    assert new.dtype == torch.float32
    np.testing.assert_array_equal(new.numpy(), nearest_bfloat16(value.numpy()))
    assert new[3000:3002].tolist() == [1.0, 1 + 4 * 2**-8]  # ties, to even
    assert float(((new - value).abs() / value.abs().clamp_min(1e-38)).max()) <= 2**-8


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_that_is_bfloat16_itself(precision: str) -> None:
    """Nothing is rounded, and the old row is handed out before the new one takes its place."""
    first, second = vector(1025, 1).bfloat16(), vector(1025, 2).bfloat16()
    table = ClientTable.like(first, 1, precision)
    put(table, 0, first)
    old, new = put(table, 0, second)
    assert torch.equal(old, first)
    assert torch.equal(new, second)
    assert torch.equal(table.row(0, torch.bfloat16), second)


# -- int8 ---------------------------------------------------------------------------------------------------------


def scales(values: Tensor) -> Tensor:
    """max|x| / 127 of every element's block."""
    whole = [part.abs().max().expand(len(part)) for part in torch.split(values, BLOCK)]
    return torch.cat(whole) / 127


finite = st.floats(-1e6, 1e6, width=32, allow_subnormal=False).map(lambda x: x if abs(x) > 1e-30 else 0.0)


@fixed
@given(
    st.lists(finite, min_size=1, max_size=40), st.integers(0, 2 * BLOCK), st.integers(0, 5), st.integers(0)
)
def test_int8_stays_within_one_level_and_keeps_zeros(
    values: list[float], zeros: int, client: int, count: int
) -> None:
    """Any numbers, anywhere among blocks of zeros."""
    value = torch.cat([torch.zeros(zeros), torch.tensor(values), torch.zeros(zeros // 3)])
    table = ClientTable.like(value, 6, "int8")
    _, new = put(table, client, value, count=count)
    step = scales(value)
    assert ((new - value).abs() <= step * (1 + 1e-5)).all()
    assert (new[value == 0] == 0).all()
    assert (table.rows[client].to(torch.int16).abs() <= 127).all()
    assert torch.isfinite(new).all()
    extreme = value.abs() == step * 127
    torch.testing.assert_close(new[extreme], value[extreme], rtol=1e-6, atol=0)


@fixed
@given(st.integers(1, 60), st.integers(-40, 40), st.integers(0, 1000))
def test_int8_scales_with_the_values(size: int, power: int, seed: int) -> None:
    """Twice the values, twice what is stored: powers of two change nothing but the exponent."""
    value, draws = vector(size, seed), torch.rand(size, generator=torch.Generator().manual_seed(seed))
    codes, scale = quantise(value, draws)
    scaled, larger = quantise(value * 2.0**power, draws)
    assert torch.equal(codes, scaled)
    assert torch.equal(scale * 2.0**power, larger)


def test_int8_blocks_have_their_own_scale() -> None:
    """A large value coarsens its own block of 1024 and no other, also across the passes of CHUNK elements."""
    value = vector(CHUNK + 2 * BLOCK)
    value[CHUNK - 1] = 1e4
    table = ClientTable.like(value, 1, "int8")
    _, new = put(table, 0, value)
    step = scales(value)
    error = (new - value).abs()
    assert (error <= step * (1 + 1e-5)).all()
    assert float(error[CHUNK - BLOCK : CHUNK].max()) > 1.0
    assert float(error[: CHUNK - BLOCK].max()) < 0.05
    assert float(error[CHUNK:].max()) < 0.05
    assert table.scales[0].shape == (CHUNK // BLOCK + 2,)
    assert table.rows[0].nbytes + table.scales[0].nbytes == len(value) + 4 * (CHUNK // BLOCK + 2)


def test_int8_draws_go_on_from_one_pass_to_the_next() -> None:
    """The same numbers in both halves are not rounded alike."""
    half = vector(CHUNK)
    table = ClientTable.like(torch.cat([half, half]), 1, "int8")
    _, new = put(table, 0, torch.cat([half, half]))
    assert 0.25 < float((new[:CHUNK] != new[CHUNK:]).double().mean()) < 0.42


def test_int8_of_the_same_task_is_the_same_bits() -> None:
    value = vector(5000)

    def stored(seed: int = 1, client: int = 2, count: int = 3, before: int = 0) -> Tensor:
        table = ClientTable.like(value, 4, "int8")
        for earlier in range(before):
            put(table, client, vector(5000, 50 + earlier), count=earlier, seed=seed)
            put(table, 0, vector(5000, 90 + earlier), count=earlier, seed=seed)
        return put(table, client, value, count=count, seed=seed)[1]

    once = stored()
    assert torch.equal(once, stored())
    assert torch.equal(once, stored(before=3))  # whatever came before
    for other in (stored(seed=2), stored(client=1), stored(count=4)):
        # an element that lies f between two levels goes another way with probability 2 f (1 - f): a third of them
        share = float((other != once).double().mean())
        assert 0.25 < share < 0.42


def test_int8_is_unbiased() -> None:
    """Over 4,000 tasks the mean of what is stored is the value, to the five sigma that its variance allows.

    An element f of a level above the lower one is stored with variance s^2 f (1 - f).
    """
    size, tasks = 2 * BLOCK + 10, 4000
    value = vector(size)
    value[100:110] = 0
    table = ClientTable.like(value, 1, "int8")
    step, exact = scales(value).double(), value.double()
    total, square = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    together = torch.zeros(size - 1, dtype=torch.float64)
    for count in range(tasks):
        _, new = put(table, 0, value, count=count, seed=11)
        error = (new.double() - exact) / step
        total += error
        square += error**2
        together += error[1:] * error[:-1]
    level = exact / step
    share = level - level.floor()
    variance = share * (1 - share)
    sure = variance < 1e-4
    assert sure.sum() >= 12  # the zeros, and each block's largest
    loose = ~sure
    z = total[loose] / (variance[loose] * tasks).sqrt()
    assert float(z.abs().max()) < 5  # one in 1.7 million beyond, of 2,000
    assert 0.9 < float(z.square().mean()) < 1.1
    spread = square[loose] / tasks / variance[loose]
    assert float((spread - 1).abs().mean()) < 0.1
    # neighbours err independently: the mean product of their errors has variance v_1 v_2 / tasks
    pairs = variance[1:] * variance[:-1]
    far = pairs > 1e-4
    y = together[far] / (pairs[far] * tasks).sqrt()
    assert float(y.abs().max()) < 5
    assert 0.85 < float(y.square().mean()) < 1.15


def test_draws_are_uniform_and_do_not_depend_on_where_a_pass_begins() -> None:
    key = mix(3, 1, 4)
    whole = noise(key, 0, 50_000, torch.device("cpu"))
    assert torch.equal(whole[20_000:30_000], noise(key, 20_000, 10_000, torch.device("cpu")))
    assert float(whole.min()) >= 0 and float(whole.max()) < 1
    counts = torch.histc(whole, 50, 0, 1)
    chi = float(((counts - 1000) ** 2 / 1000).sum())  # mean 49, standard deviation 9.9
    assert 15 < chi < 100
    other = noise(mix(3, 1, 5), 0, 50_000, torch.device("cpu"))
    for shifted in (whole.roll(1), whole.roll(2), whole.roll(BLOCK), other):
        correlation = float(torch.corrcoef(torch.stack([whole, shifted]))[0, 1])
        assert abs(correlation) < 5 / 50_000**0.5


def test_dequantise_is_the_code_times_its_blocks_scale() -> None:
    codes = torch.arange(-127, 128, dtype=torch.int8).repeat(5)[:1030]
    values = dequantise(codes, torch.tensor([0.5, 2.0]))
    assert torch.equal(values[:1024], codes[:1024].float() * 0.5)
    assert torch.equal(values[1024:], codes[1024:].float() * 2.0)
