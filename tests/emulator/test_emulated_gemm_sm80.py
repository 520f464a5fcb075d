"""gemm_sm80 as it is, launched as it is, on the CPU; see test_emulated_tensor_cores.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from bsrgemm._products import heuristics, matrix_cache
from bsrgemm.dtypes import BFLOAT16

from . import emulator
from .emulator import Array, guarded, put
from .test_emulated_tensor_cores import Matrix, laid_out

F16, F32, F64, I8, I32 = (np.dtype(x) for x in "efdbi")
MOST = float(np.finfo(F32).max)


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    with emulator.emulated(folder, arch="sm_80"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def multiply(A: Matrix, B: Array, out: Array, acc: Any, alpha: Any = 1, beta: Any = 0, **how: Any) -> None:
    plan = emulator.run_product(A, B, out, acc, alpha, beta, **how)
    assert plan.config.spec().entry == "gemm_sm80"


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "block", "columns", "orders", "how"),
    [
        (F16, F16, (32, 64), 72, "CC", {}),
        (F16, F32, (32, 48), 40, "FC", {"transposed": True}),
        (BFLOAT16, F32, (64, 64), 100, "CF", {}),
        (F32, F32, (32, 32), 72, "CC", {}),
        (F32, F32, (64, 48), 33, "FC", {"tf32": True}),
        (F64, F64, (16, 16), 72, "CC", {}),
        (F64, F64, (48, 32), 24, "FF", {"transposed": True}),
        (I8, I32, (32, 64), 48, "FC", {}),
        (F16, F16, (32, 80), 72, "CC", {}),  # the last stage along K has one step
        (F32, F32, (32, 40), 72, "FC", {}),
        (F64, F64, (16, 24), 24, "FC", {}),
    ],
    ids=str,
)
def test_products_are_exact(dtype, out_dtype, block, columns, orders, how, rng) -> None:
    A = Matrix(rng, block, dtype)
    dense = A.dense.T if how.get("transposed") else A.dense
    numbers = rng.integers(-2, 3, (dense.shape[1], columns)).astype(dtype)
    unit = 16 // numbers.itemsize  # lines of B begin at multiples of 16 bytes
    room = laid_out(np.zeros((-(-numbers.shape[0] // unit) * unit, -(-columns // unit) * unit), dtype), orders[0])
    B = room[: numbers.shape[0], :columns]
    B[...] = numbers
    before = rng.integers(-2, 3, (dense.shape[0], columns)).astype(out_dtype)
    acc = {F64: F64, I8: I32}.get(np.dtype(dtype), F32)
    want = dense @ numbers.astype(np.float64)
    for alpha, beta in ((1, 0), (2, -1)):
        out = laid_out(before, orders[1])
        multiply(A, B, out, acc, acc.type(alpha), acc.type(beta), **how)
        np.testing.assert_array_equal(np.asarray(out).astype(np.float64), alpha * want + beta * before)


@pytest.mark.parametrize(
    ("dtype", "block", "columns", "orders", "transposed"),
    [
        *((F16, (32, 80), 40, "CC", False), (F16, (32, 48), 136, "FC", True), (F32, (32, 40), 36, "CF", False)),
        *((F64, (16, 24), 26, "FC", False), (I8, (32, 64), 48, "CC", False), (F32, (64, 32), 132, "FF", True)),
    ],
    ids=str,
)
def test_nothing_is_read_or_written_beside_the_arrays(dtype, block, columns, orders, transposed, folder, rng) -> None:
    """There are several batches, and every block is stored, the last block column too."""

    def lying(x: Any, order: str, before: bool) -> Array:
        return guarded(x, before) if order == "C" else guarded(x.swapaxes(1, 2).copy(), before).swapaxes(1, 2)

    acc = {F64: F64, I8: I32}.get(np.dtype(dtype), F32)
    for before in (False, True):
        with emulator.emulated(folder, lambda x, before=before: guarded(x, before), arch="sm_80"):
            A = Matrix(rng, block, dtype, share=2.0)
            A.data, A.indices, A.indptr = (guarded(x, before) for x in (A.data, A.indices, A.indptr))
            dense = A.dense.T if transposed else A.dense
            B = lying(rng.integers(-2, 3, (2, dense.shape[1], columns)).astype(dtype), orders[0], before)
            out_dtype = I32 if dtype == I8 else dtype
            out = lying(rng.integers(-2, 3, (2, dense.shape[0], columns)).astype(out_dtype), orders[1], before)
            want = 2 * (dense @ np.asarray(B).astype(np.float64)) - np.asarray(out)
            multiply(A, B, out, acc, acc.type(2), acc.type(-1), transposed=transposed)
            np.testing.assert_array_equal(np.asarray(out).astype(np.float64), want)


@pytest.mark.parametrize(("block", "order"), [((32, 32), "C"), ((64, 40), "F")], ids=str)
def test_float32_keeps_24_bits_beside_infinity_nan_and_huge_numbers(order, block, rng) -> None:
    """Three products of tf32: exact where a sum meets none of these, and NaN or infinite where float64 says so."""
    A = Matrix(rng, block, F32, rows=2, cols=3, share=2.0)
    K = block[1]
    numbers = rng.integers(-(2**18), 2**18, (A._shape[1], 72)).astype(F32)
    exact = A.dense @ numbers.astype(np.float64)
    out = put(np.zeros((A._shape[0], 72), F32))
    multiply(A, laid_out(numbers, order), out, F32, F32.type(1), F32.type(0))
    np.testing.assert_array_equal(np.asarray(out), exact.astype(F32))
    for bad in (-np.inf, np.nan, 3e38, 3.4020e38, MOST, -MOST):
        spoiled = numbers.copy()
        spoiled[[3, K + 5, 2 * K + 7], [2, 33, 71]] = bad
        multiply(A, laid_out(spoiled, order), out, F32, F32.type(1), F32.type(0))
        want = np.zeros(out.shape)
        with np.errstate(all="ignore"):
            for i, c in zip(*np.nonzero(np.abs(A.blocks).max(axis=(2, 3)) > 0), strict=True):
                rows = slice(i * block[0], (i + 1) * block[0])
                want[rows] += A.blocks[i, c] @ spoiled[c * K : (c + 1) * K].astype(np.float64)
            want = want.astype(F32)
        np.testing.assert_allclose(np.asarray(out), want, rtol=1e-6)
        others = [n for n in range(72) if n not in (2, 33, 71)]
        np.testing.assert_array_equal(np.asarray(out)[:, others], exact[:, others])


def test_float32_of_any_size_is_what_float32_arithmetic_gives(rng) -> None:
    """Products just below overflow, though their factors round up; numbers that have no remainder in tf32."""
    A = Matrix(rng, (32, 32), F32, rows=2, cols=1, share=2.0)
    out = put(np.zeros((64, 72), F32))
    for left, right in ((2 - 2.0**-14, 2.0**127), (2.0**64 * (1 - 2.0**-24), 2.0**64 * (1 - 2.0**-23)), (1, MOST)):
        A.data[...] = np.diag(np.full(32, left, F32))
        multiply(A, put(np.full((32, 72), right, F32)), out, F32, F32.type(1), F32.type(0))
        want = F32.type(left) * F32.type(right)
        assert np.isfinite(want)
        np.testing.assert_array_equal(np.asarray(out)[:32], want)
    A.data[...] = rng.integers(-(2**5), 2**5, (32, 32))
    numbers = rng.integers(-(2**13), 2**13, (32, 72))
    for small in (2.0**-149, 2.0**-140, 2.0**-126, 2.0**-115):
        multiply(A, put((numbers * small).astype(F32)), out, F32, F32.type(1), F32.type(0))
        np.testing.assert_array_equal(np.asarray(out)[:32], ((A.data[0] @ numbers.astype(F64)) * small).astype(F32))
    spoiled = (numbers * 2.0**-149).astype(F32)
    spoiled[3, 5] = np.inf  # beside it are sums that do not meet it
    multiply(A, put(spoiled), out, F32, F32.type(1), F32.type(0))
    others = [n for n in range(72) if n != 5]
    np.testing.assert_array_equal(
        np.asarray(out)[:32, others], ((A.data[0] @ numbers.astype(F64)) * 2.0**-149).astype(F32)[:, others]
    )


@pytest.mark.parametrize("fill", [MOST, -MOST, 3.4017e38])
def test_the_largest_numbers_stay_finite_in_tf32(fill, rng) -> None:
    A = Matrix(rng, (32, 32), F32, rows=2, cols=1, share=2.0)
    A.data[...] = np.diag(np.full(32, 0.5))
    out = put(np.zeros((64, 72), F32))
    multiply(A, put(np.full((32, 72), fill, F32)), out, F32, F32.type(1), F32.type(0), tf32=True)
    np.testing.assert_allclose(np.asarray(out)[:32], fill / 2, rtol=0.73 * 2**-10)


@pytest.mark.parametrize("columns", [72, 264])
@pytest.mark.parametrize("orders", ["CC", "FC"])
def test_float64_in_blocks_of_64_rows_has_wide_tiles_of_one_row_tile(orders, columns, rng, monkeypatch) -> None:
    monkeypatch.setattr(heuristics, "_WIDE", 0)
    A = Matrix(rng, (64, 24), F64, rows=3)
    B = laid_out(rng.integers(-2, 3, (A._shape[1], columns)).astype(F64), orders[0])
    out = put(np.full((A._shape[0], columns), 7, F64))
    plan = emulator.run_product(A, B, out, F64, 1.0, 0.0)
    assert (plan.config.threads, plan.config.row_tiles) == ((512, 1) if columns > 128 else (256, 1))
    np.testing.assert_array_equal(np.asarray(out), A.dense @ np.asarray(B))


@pytest.mark.races
@pytest.mark.parametrize(
    ("dtype", "block", "order"),
    [(F16, (32, 64), "C"), (F16, (32, 32), "F"), (F16, (32, 32), "C"), (F64, (64, 24), "F")],
    ids=str,
)
def test_warps_that_go_ahead_of_others(dtype, block, order, rng) -> None:
    """Rows of very different lengths by one CTA, whose stages and indices come round again many times."""
    A = Matrix(rng, block, dtype, rows=6, cols=40, share=0.4)
    acc = F64 if dtype == F64 else F32
    B = laid_out(rng.integers(-2, 3, (A._shape[1], 72)).astype(dtype), order)
    out = put(np.full((A._shape[0], 72), 7, acc))
    with emulator.few_ctas(1):
        multiply(A, B, out, acc, acc.type(1), acc.type(0))
    np.testing.assert_array_equal(np.asarray(out), A.dense @ np.asarray(B).astype(np.float64))


@pytest.mark.parametrize("most", [1, 3])
def test_tiles_of_several_batches_for_few_ctas(most, rng) -> None:
    A = Matrix(rng, (32, 32), F16, rows=7)
    B = put(rng.integers(-2, 3, (3, A._shape[1], 200)).astype(F16))
    out = put(np.full((3, A._shape[0], 200), 7, F32))
    with emulator.few_ctas(most):
        multiply(A, B, out, F32, F32.type(1), F32.type(0))
    np.testing.assert_array_equal(np.asarray(out), A.dense @ np.asarray(B).astype(np.float64))


@pytest.mark.parametrize("first, pitch, batch", [(0, 128, 8192), (1, 128, 8192), (0, 129, 8256), (0, 128, 8193)])
def test_results_that_do_not_begin_at_multiples_of_a_vector(first, pitch, batch, rng) -> None:
    """Whole tiles of columns, in lines or batches of any length; nothing beside them is written."""
    A = Matrix(rng, (32, 32), F16, rows=2)
    B = put(rng.integers(-2, 3, (2, A._shape[1], 128)).astype(F16))
    room = put(np.full(2 * 8256 + 1, 7, F32))
    out = np.lib.stride_tricks.as_strided(room[first:], (2, 64, 128), [4 * n for n in (batch, pitch, 1)], True)
    multiply(A, B, out, F32, F32.type(1), F32.type(0))
    np.testing.assert_array_equal(np.asarray(out), A.dense @ np.asarray(B).astype(np.float64))
    out[...] = 7
    assert (room == 7).all()


def test_a_list_without_items_writes_nothing(rng) -> None:
    A = Matrix(rng, (32, 32), F16)
    out = put(np.full((A._shape[0], 40), 7, F32))
    made = matrix_cache.MatrixCache.whole_items

    def empty(*args: Any) -> Any:
        return replace(made(*args), count=put(np.zeros(1, np.int32)))

    with patch.object(matrix_cache.MatrixCache, "whole_items", empty):
        multiply(A, put(np.ones((A._shape[1], 40), F16)), out, F32, F32.type(1), F32.type(0))
    assert (out == 7).all()


@pytest.mark.races
def test_nan_spreads_only_through_stored_blocks(rng) -> None:
    A = Matrix(rng, (32, 32), F32)
    numbers = rng.integers(-2, 3, (A._shape[1], 48)).astype(F32)
    numbers[40, 7] = np.nan
    out = put(np.zeros((A._shape[0], 48), F32))
    multiply(A, put(numbers), out, F32, F32.type(1), F32.type(0))
    stored = np.abs(A.blocks[:, 1]).max(axis=(1, 2)) > 0
    wrong = np.zeros(out.shape, bool)
    wrong[np.repeat(stored, 32), 7] = True
    np.testing.assert_array_equal(np.isnan(np.asarray(out)), wrong)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1, -(2**31)])
def test_indices_that_were_spoiled_are_left_out_and_bounds_are_not_believed(bad, dtype, folder, rng) -> None:
    """Whatever is read or written outside of the arrays ends the process."""
    with emulator.emulated(folder, guarded, arch="sm_80"):
        A = Matrix(rng, (32, 32), dtype)
        A.data, A.indices, A.indptr = map(guarded, (A.data, A.indices, A.indptr))
        row = np.repeat(np.arange(4), np.diff(A.indptr))
        A.blocks[row[1::2], np.asarray(A.indices)[1::2]] = 0
        A.indices[1::2] = bad
        B = guarded(rng.integers(-2, 3, (A._shape[1], 72)).astype(dtype))
        out = guarded(np.full((A._shape[0], 72), np.nan, dtype))
        multiply(A, B, out, F32, F32.type(1), F32.type(0))
        np.testing.assert_array_equal(np.asarray(out).astype(np.float64), A.dense @ np.asarray(B).astype(np.float64))
        A.indptr[[1, 3]] = bad
        out[...] = np.nan
        multiply(A, B, out, F32, F32.type(1), F32.type(0))
        assert np.isfinite(out.astype(np.float64)).all()  # every row is written
