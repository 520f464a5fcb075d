"""Products of small blocks with one vector and with few columns on the card, against float64."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

import bsrgemm as bg

from .marks import some_under_memcheck
from .product_cases import acc_of, assert_close, dense, device, exact_dtype, pattern, values
from .repeats import differing

pytestmark = pytest.mark.gpu

SMALL_BLOCKS = [*((n, n) for n in range(1, 17)), (2, 3), (3, 2), (1, 16), (16, 1), (13, 11), (6, 16), (5, 8)]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "complex128"])
@pytest.mark.parametrize("block", some_under_memcheck(SMALL_BLOCKS, [(3, 3), (13, 11)]))
def test_small_blocks_by_one_vector_and_by_few_columns(block, dtype, rng) -> None:
    import cupy

    dtype = np.dtype(dtype)
    exact = exact_dtype(dtype)
    for index, transposed, N in itertools.product((np.int32, np.int64), (False, True), (1, 2, 5, 16, 48, 64, 100)):
        A = pattern(rng, 37, 29, *block, dtype, index, 0.3)
        D = dense(A, exact)
        D = D.T if transposed else D
        B = values(rng, (D.shape[1], N), dtype)
        dA = device(A)
        out = cupy.full((D.shape[0], N), 0.25, dtype)
        bg.matmul(dA.T if transposed else dA, cupy.asarray(B), out=out, alpha=2, beta=0.5)
        wide = B.astype(exact)
        assert_close(
            out.get(), 2 * (D @ wide) + 0.125, 2 * (np.abs(D) @ np.abs(wide)) + 1, 2 * D.shape[1], acc_of(dtype)
        )


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64", "int32"])
@pytest.mark.parametrize("block", some_under_memcheck([(1, 1), (2, 2), (3, 3), (2, 4), (5, 2), (4, 4)], [(3, 3)]))
def test_transposes_whose_columns_differ_in_length(block, dtype, rng) -> None:
    """Columns of none, of a few, and of more than 512 blocks, which are cut; CTAs take turns at the smallest blocks."""
    import cupy

    dtype, rows, cols = np.dtype(dtype), 3000, 2500
    R, K = block
    col = np.minimum((rng.pareto(0.7, 40_000) * 20).astype(np.int64), cols - 1)
    row = np.sort(rng.integers(0, rows, len(col)))
    indptr = np.searchsorted(row, np.arange(rows + 1)).astype(np.int32)
    data = values(rng, (len(col), *block), dtype)
    A = device((data, col.astype(np.int32), indptr, (rows * R, cols * K)))
    x = values(rng, (rows * R,), dtype)
    got = A.T @ cupy.asarray(x)
    exact = exact_dtype(dtype)
    products = np.einsum("brk,br->bk", data.astype(exact), x.reshape(rows, R)[row].astype(exact))
    sizes = np.einsum("brk,br->bk", np.abs(data).astype(float), np.abs(x.reshape(rows, R)[row]).astype(float))
    want, size = np.zeros((cols, K), exact), np.zeros((cols, K))
    np.add.at(want, col, products)
    np.add.at(size, col, sizes)
    most = R * int(np.bincount(col).max())
    assert most > 512 * R
    assert_close(got.get(), want.reshape(-1), size.reshape(-1), most, acc_of(dtype))
    assert differing(lambda: A.T @ cupy.asarray(x), got, 3) == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize(
    "block",
    some_under_memcheck([(1, 1), (2, 2), (3, 3), (2, 3), (6, 3), (4, 4), (6, 6), (7, 7), (8, 8), (16, 16)], [(6, 3)]),
)
def test_rows_of_one_length_by_one_vector(block, dtype, rng) -> None:
    """The fewer blocks a row has, the fewer lanes share it: 1000 rows and one, so that some lanes have none."""
    import cupy

    dtype, rows, cols = np.dtype(dtype), 1001, 40
    R, K = block
    for length in (1, 2, 3, 5, 9, 14, 18, 27):
        col = np.argsort(rng.random((rows, cols)), axis=1)[:, :length].astype(np.int32)
        data = values(rng, (rows * length, *block), dtype)
        arrays = (data, col.reshape(-1), np.arange(0, rows * length + 1, length, dtype=np.int32))
        A = bg.bsr_array(tuple(map(cupy.asarray, arrays)), shape=(rows * R, cols * K))
        x = values(rng, (cols * K,), dtype)
        got = A @ cupy.asarray(x)
        parts = x.astype(float).reshape(cols, K)[col.reshape(-1)]
        want = np.einsum("prk,pk->pr", data.astype(float), parts).reshape(rows, length, R).sum(axis=1)
        size = np.einsum("prk,pk->pr", abs(data.astype(float)), abs(parts)).reshape(rows, length, R).sum(axis=1)
        assert_close(got.get(), want.reshape(-1), size.reshape(-1), length * K, acc_of(dtype))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "block", some_under_memcheck([(2, 2), (3, 3), (2, 3), (3, 2), (4, 4), (6, 3), (8, 8)], [(2, 3)])
)
def test_short_rows_of_different_lengths(block, dtype, rng) -> None:
    """Several rows under way at once: empty ones, one of 300 blocks among them, and bounds that are rubbish."""
    import cupy

    dtype, cols, (R, K) = np.dtype(dtype), 40, block
    for index, most in itertools.product((np.int32, np.int64), (1, 2, 5)):
        lengths = rng.integers(0, most + 1, 1003)
        lengths[17] = 300
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(index)
        col = rng.integers(0, cols, indptr[-1]).astype(index)
        data, x = values(rng, (len(col), *block), dtype), values(rng, (cols * K,), dtype)
        A = bg.bsr_array(tuple(map(cupy.asarray, (data, col, indptr))), shape=(len(lengths) * R, cols * K))
        got = A @ cupy.asarray(x)
        parts, row = x.astype(float).reshape(cols, K)[col], np.repeat(np.arange(len(lengths)), lengths)
        want, size = np.zeros((2, len(lengths), R))
        np.add.at(want, row, np.einsum("prk,pk->pr", data.astype(float), parts))
        np.add.at(size, row, np.einsum("prk,pk->pr", abs(data.astype(float)), abs(parts)))
        assert_close(got.get(), want.reshape(-1), size.reshape(-1), 300 * K, acc_of(dtype))
        for damage in (-1, len(col), 2**31 - 1, -(2**31), *((2**32 + 3, -(2**40)) if index == np.int64 else ())):
            A.indptr[100:103] = damage
            assert bool(cupy.isfinite(A @ cupy.asarray(x)).all())


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("block", [(1, 1), (2, 3), (3, 3), (4, 4), (5, 5), (6, 6), (7, 3), (9, 9), (15, 16)], ids=str)
def test_blocks_that_come_through_shared_memory(block, dtype, rng) -> None:
    """Rows of many chunks, of none and of a part of one; more rows than warps; batches; every call the same bits."""
    import cupy

    dtype = np.dtype(dtype)
    R, K = block
    lengths = np.array([0, 3000, 2, 28, 0, 29, 7, 500, *rng.integers(0, 30, 700 if R < 6 else 100), 0])
    cols = 90
    col = rng.integers(0, cols, lengths.sum())
    data = values(rng, (len(col), *block), dtype)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    row = np.repeat(np.arange(len(lengths)), lengths)
    wide = np.zeros((2, len(lengths), cols, R, K))
    np.add.at(wide[0], (row, col), data)
    np.add.at(wide[1], (row, col), np.abs(data))
    D, size = (x.swapaxes(1, 2).reshape(len(lengths) * R, cols * K) for x in wide)
    for index, shape in ((np.int32, (2,)), (np.int64, (16,)), (np.int32, (34,)), (np.int32, (3, 8))):
        arrays = (data, col.astype(index), indptr.astype(index))
        A = bg.bsr_array(tuple(map(cupy.asarray, arrays)), shape=D.shape)
        B = values(rng, (*shape[:-1], D.shape[1], shape[-1]), dtype)
        dB = cupy.asarray(B)
        got = bg.matmul(A, dB)
        (plan,) = A._matrix_cache.plans.values()
        config, aligned = plan.value.config, shape[-1] * dtype.itemsize % 16 == 0
        tensor_cores = R >= 6 and dtype == np.float64 and aligned
        assert config.spec().entry == ("spmm_f64" if tensor_cores else "spmm")
        assert tensor_cores or config.staged == aligned
        assert_close(got.get(), D @ B.astype(float), size @ np.abs(B).astype(float), 3000 * K, dtype)
        assert differing(partial(bg.matmul, A, dB), got, 100) == 0


@pytest.mark.parametrize(
    ("block", "dtype", "entry"),
    [
        *((b, "float64", "spmm_f64") for b in ((16, 16), (17, 5), (20, 20), (32, 32), (40, 100), (64, 64), (128, 128))),
        ((16, 16), "float32", "spmm"),
        ((16, 3), "float32", "spmm"),
    ],
    ids=str,
)
def test_few_columns_read_blocks_once_whatever_their_size(block, dtype, entry, rng) -> None:
    """Tiles of the tensor cores meet the columns of all their rows: they are for more columns."""
    import cupy

    dtype = np.dtype(dtype)
    A = pattern(rng, 37, 29, *block, dtype, density=0.3)
    D = dense(A, np.dtype(np.float64))
    for N in (2, 16, 34, 64):
        B = values(rng, (D.shape[1], N), dtype)
        dA, out = device(A), cupy.full((D.shape[0], N), 0.25, dtype)
        bg.matmul(dA, cupy.asarray(B), out=out, alpha=2, beta=0.5)
        (plan,) = dA._matrix_cache.plans.values()
        config = plan.value.config
        assert N * dtype.itemsize % 16 or (config.spec().entry == entry and getattr(config, "staged", True))
        wide = B.astype(float)
        assert_close(out.get(), 2 * (D @ wide) + 0.125, 2 * (np.abs(D) @ np.abs(wide)) + 1, 2 * D.shape[1], dtype)


@pytest.mark.sanitizer
@pytest.mark.parametrize("block", [(3, 3), (6, 6), (9, 7), (40, 20)], ids=str)
def test_rows_take_nothing_from_blocks_that_they_lack(block, rng) -> None:
    """NaN and Inf of B where a row has no block, and of blocks whose column is out of range, in chunks with gaps."""
    import cupy

    R, K = block
    A = pattern(rng, 40, 30, R, K, np.dtype(np.float64), density=0.3)
    data, indices, indptr, shape = A
    B = values(rng, (shape[1], 16), np.dtype(np.float64))
    B[7 * K : 8 * K] = np.nan
    B[11 * K] = np.inf
    indices = indices.copy()
    spoiled = rng.integers(0, len(indices), 5)
    data = data.copy()
    data[spoiled] = np.nan
    indices[spoiled] = [-1, 30, 2**31 - 1, -(2**31), 31]
    dA = bg.bsr_array(tuple(map(cupy.asarray, (data, np.zeros_like(indices), indptr))), shape=shape)
    dA.indices[...] = cupy.asarray(indices)
    got = (dA @ cupy.asarray(B)).get()
    row = np.repeat(np.arange(40), np.diff(indptr))
    good = (indices >= 0) & (indices < 30)
    want = np.zeros((40, R, 16))
    with np.errstate(invalid="ignore"):
        np.add.at(want, row[good], data[good] @ B.reshape(30, K, 16)[indices[good]])
    want = want.reshape(-1, 16)
    assert (np.isfinite(got) == np.isfinite(want)).all()
    sound = np.isfinite(want)
    np.testing.assert_allclose(got[sound], want[sound], rtol=1e-12, atol=1e-12)


@pytest.mark.sanitizer
@pytest.mark.parametrize("block", [(1, 1), (2, 2), (3, 3), (8, 8), (16, 16)], ids=str)
def test_long_rows_are_added_up_piece_by_piece(block, rng) -> None:
    import cupy

    lengths = np.array([0, 100_000, 2, 256, 0, 257, 1025, 7, 5000, *[3] * 500])
    col = rng.integers(0, 5000, lengths.sum()).astype(np.int32)
    data = values(rng, (len(col), *block), np.dtype(np.float64))
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    A = bg.bsr_array(tuple(map(cupy.asarray, (data, col, indptr))), shape=(len(lengths) * block[0], 5000 * block[1]))
    x = values(rng, (5000 * block[1],), np.dtype(np.float64))
    got = A @ cupy.asarray(x)
    terms = np.einsum("prk,pk->pr", data, x.reshape(5000, -1)[col])
    size = np.einsum("prk,pk->pr", np.abs(data), np.abs(x).reshape(5000, -1)[col])
    row = np.repeat(np.arange(len(lengths)), lengths)
    want, bound = np.zeros((2, len(lengths), block[0]))
    np.add.at(want, row, terms)
    np.add.at(bound, row, size)
    assert_close(got.get(), want.reshape(-1), bound.reshape(-1), int(lengths.max()) * block[1], np.float64)
    assert differing(lambda: A @ cupy.asarray(x), got, 20) == 0
