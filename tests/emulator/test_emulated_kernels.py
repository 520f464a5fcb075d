"""The plain kernels as they are, launched as they are, on the CPU: what a card would compute, without one.

Kernels of the tensor cores have files of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from bsrgemm._backend import array_kernels, cupy_backend
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import element_types, workspace
from bsrgemm._products import configs
from bsrgemm._products import cuda as products_cuda
from bsrgemm.dtypes import BFLOAT16, FP8_VALUES, accumulator_dtype

from . import emulator
from .emulator import Array, guarded, put
from .forked import forked

DTYPES = [*(np.dtype(c) for c in ("?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16")), BFLOAT16]
F32 = np.dtype(np.float32)
FP8_ONE = 0x38  # the byte of 1 in fp8
LAYOUTS = ("C", "F", "gaps", "backwards")


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    with emulator.emulated(folder):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Small integers: their sums are exact in every dtype but int8, where they wrap as everywhere."""
    x = rng.integers(0 if dtype.kind in "?bu" else -4, 5, shape)
    return (x + 1j * rng.integers(-4, 5, shape)).astype(dtype) if dtype.kind == "c" else x.astype(dtype)


def lying(x: np.ndarray[Any, Any], layout: str) -> Array:
    """The same numbers in another memory layout, the gaps filled with others."""
    if layout == "C":
        return put(x)
    if layout == "F":
        return put(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2)
    wide = put(np.full((*x.shape[:-2], 2 * x.shape[-2] + 1, 3 * x.shape[-1] + 2), 77).astype(x.dtype))
    view = wide[..., 1::2, 2::3]
    if layout == "backwards":
        view = view[..., ::-1, ::-1]
    view[...] = x
    return view


class Matrix:
    """A BSR matrix of a few random blocks, some twice, with empty rows; and the same matrix dense."""

    def __init__(
        self,
        rng: np.random.Generator,
        R: int,
        K: int,
        dtype: np.dtype[Any],
        index: str = "i4",
        put: Callable[[Any], Array] = put,
        rows: int = 6,
    ) -> None:
        cols = 5
        row, col = np.nonzero(rng.random((rows, cols)) < 0.5)
        row, col = np.append(row, 2), np.append(col, 3)
        keep = (row != 0) & (row != rows - 1)
        order = np.argsort(row[keep], kind="stable")
        row, col = row[keep][order], col[keep][order]
        blocks = numbers(rng, (len(row), R, K), dtype)
        self.data, self.indices = put(blocks), put(col.astype(index))
        self.indptr = put(np.searchsorted(row, np.arange(rows + 1)).astype(index))
        self._shape = (rows * R, cols * K)
        wide = np.zeros((rows, cols, R, K), exact(dtype))
        np.add.at(wide, (row, col), blocks)
        self.dense = wide.swapaxes(1, 2).reshape(self._shape)


def exact(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype in which small integers are added up as they are in `dtype`."""
    return (
        dtype if dtype.kind in "iu" else np.dtype("c16" if dtype.kind == "c" else "i8" if dtype.kind == "b" else "f8")
    )


def multiply(A: Matrix, B: Array, out: Array, alpha: Any = 1, beta: Any = 0, transposed: bool = False) -> str:
    """out = alpha * A @ B + beta * out by the plain cores; the kernel that did it."""
    acc = accumulator_dtype(A.data.dtype)
    return emulator.run_product(A, B, out, acc, alpha, beta, transposed=transposed).config.spec().entry


def assert_product(A: Matrix, B: Array, out: Array, alpha: Any = 1, beta: Any = 0, transposed: bool = False) -> str:
    dense = A.dense.T if transposed else A.dense
    dtype = out.dtype
    with np.errstate(over="ignore"):
        want = alpha * (dense @ np.asarray(B).astype(dense.dtype)) + beta * np.asarray(out).astype(dense.dtype)
    entry = multiply(A, B, out, alpha, beta, transposed)
    np.testing.assert_array_equal(out.get(), want.astype(bool) if dtype.kind == "b" else want.astype(dtype))
    return entry


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 5, 40])
def test_products_of_every_dtype(N: int, dtype: np.dtype[Any], rng: np.random.Generator) -> None:
    A = Matrix(rng, 3, 2, dtype)
    entry = assert_product(A, put(numbers(rng, (A._shape[1], N), dtype)), put(numbers(rng, (A._shape[0], N), dtype)))
    assert entry == ("spmv_small" if N == 1 else "spmm")


@pytest.mark.parametrize(
    ("N", "R", "kernel"), [(1, 4, "spmv_small"), (1, 64, "spmv"), (5, 4, "spmm"), (40, 64, "gemm_simt")]
)
def test_every_number_of_fp8_is_read(N: int, R: int, kernel: str) -> None:
    """Bytes of A times 1, and 1 times bytes of B; each row and each column has a single number, so NaN stays alone."""
    each, one = np.arange(256, dtype=np.uint8), FP8_ONE
    indices, indptr = put(np.zeros(256 // R, np.int32)), put(np.arange(256 // R + 1, dtype=np.int32))
    A = SimpleNamespace(data=put(each.reshape(-1, R, 1)), indices=indices, indptr=indptr, _shape=(256, 1))
    out = put(np.full((256, N), 7, F32))
    run = emulator.run_product(A, put(np.full((1, N), one, np.uint8)), out, F32, fp8=True)
    assert run.config.spec().entry == kernel
    np.testing.assert_array_equal(out.get(), np.repeat(FP8_VALUES[:, None], N, axis=1))
    data = put(np.full((1, R, 1), one, np.uint8))
    A = SimpleNamespace(data=data, indices=indices[:1], indptr=indptr[:2], _shape=(R, 1))
    for some in np.array_split(each, -(-256 // N)):
        out = put(np.full((R, len(some)), 7, F32))
        emulator.run_product(A, put(some[None]), out, F32, fp8=True)
        np.testing.assert_array_equal(out.get(), np.broadcast_to(FP8_VALUES[some], out.shape))


@pytest.mark.parametrize("block", [(1, 1), (4, 3), (8, 8), (9, 4), (17, 13), (16, 16), (24, 32)], ids=str)
@pytest.mark.parametrize("N", [1, 7])
def test_products_with_blocks_of_every_kind_and_their_transposes(
    N: int, block: tuple[int, int], rng: np.random.Generator
) -> None:
    dtype = np.dtype(np.float64)
    for index, transposed in itertools.product(("i4", "i8"), (False, True)):
        A = Matrix(rng, *block, dtype, index)
        K, M = A._shape if transposed else A._shape[::-1]
        assert_product(A, put(numbers(rng, (K, N), dtype)), put(numbers(rng, (M, N), dtype)), 2, 0, transposed)


@pytest.mark.parametrize("N", [1, 6])
def test_layouts_alpha_beta_and_batches(N: int, rng: np.random.Generator) -> None:
    dtype = np.dtype(np.float32)
    A = Matrix(rng, 3, 4, dtype)
    for of_b, of_out, beta in itertools.product(LAYOUTS, LAYOUTS, (0, -2)):
        B, out = (lying(numbers(rng, (n, N), dtype), how) for n, how in ((A._shape[1], of_b), (A._shape[0], of_out)))
        assert_product(A, B, out, 3, beta)
    batch, out = (lying(numbers(rng, (3, n, N), dtype), how) for n, how in ((A._shape[1], "gaps"), (A._shape[0], "C")))
    want = 2 * (A.dense @ np.asarray(batch)) - out.get()
    multiply(A, batch, out, 2, -1)
    np.testing.assert_array_equal(out.get(), want)


@pytest.mark.races
@pytest.mark.parametrize("block", [(2, 2), (3, 3), (1, 1)], ids=str)
def test_long_rows_are_added_up_piece_by_piece(block: tuple[int, int], rng: np.random.Generator) -> None:
    lengths = np.array([0, 3000, 2, 1024, 0, 1025, 7])
    for index, beta in itertools.product(("i4", "i8"), (0, 2)):
        col = rng.integers(0, 5, lengths.sum())
        A = Matrix(rng, *block, np.dtype(np.float64))
        data = numbers(rng, (len(col), *block), np.dtype(np.float64))
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(index)
        A.data, A.indices, A.indptr = put(data), put(col.astype(index)), put(indptr)
        A._shape = (7 * block[0], 5 * block[1])
        wide = np.zeros((7, 5, *block))
        np.add.at(wide, (np.repeat(np.arange(7), lengths), col), data)
        A.dense = wide.swapaxes(1, 2).reshape(A._shape)
        x, y = (put(numbers(rng, (n, 1), np.dtype(np.float64))) for n in A._shape[::-1])
        assert assert_product(A, x, y, 1, beta) == "spmv_small"
        assert not any(counters.any() for counters in workspace._zeroed.values())


@pytest.mark.parametrize("block", [(3, 3), (1, 2), (5, 4)], ids=str)
@pytest.mark.parametrize("most", [1, 3])
def test_ctas_take_turns_at_rows_of_the_transpose(block: tuple[int, int], most: int, rng: np.random.Generator) -> None:
    """Columns of none, of few and of more than 512 blocks; blocks of up to 100 bytes are computed by turns."""
    f64, lengths = np.dtype(np.float64), rng.integers(0, 4, 1100)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype("i4")
    col = rng.choice(7, indptr[-1], p=[0.6, 0.1, 0, 0.1, 0.1, 0.05, 0.05]).astype("i4")
    data = numbers(rng, (indptr[-1], *block), f64)
    A = SimpleNamespace(data=put(data), indices=put(col), indptr=put(indptr), _shape=(1100 * block[0], 7 * block[1]))
    x, out = numbers(rng, (A._shape[0], 1), f64), put(np.ones((A._shape[1], 1)))
    with emulator.few_ctas(most):
        config = emulator.run_product(A, put(x), out, f64, 2, 3, transposed=True).config
    assert config.spec().entry == "spmv_small" and config.eager == (block != (5, 4)) and not config.in_chunks
    want = 2 * (scipy.sparse.bsr_array((data, col, indptr), shape=A._shape).T @ x) + 3
    np.testing.assert_array_equal(out.get(), want)


@pytest.mark.races
def test_pieces_of_long_rows_whose_rows_several_lanes_have(rng: np.random.Generator) -> None:
    """The warp that adds the pieces up finds what all lanes of the others wrote."""
    f64, block, lengths = np.dtype(np.float64), (4, 4), np.array([3, 900, 1])
    names = element_types.types(f64, f64, f64, f64, np.dtype("i4"))
    config = configs.SpmvSmall(names, *block, 16, 4, 2, 2, False, threads=128, at_least=1, x_adjacent=True)
    data, col = numbers(rng, (904, *block), f64), rng.integers(0, 5, 904).astype("i4")
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype("i4")
    A = SimpleNamespace(data=put(data), indices=put(col), indptr=put(indptr), _shape=(12, 20))
    x, out = numbers(rng, (20, 1), f64), put(np.zeros((12, 1)))
    emulator.run_product(A, put(x), out, f64, config=config)
    np.testing.assert_array_equal(out.get(), scipy.sparse.bsr_array((data, col, indptr), shape=A._shape) @ x)


@pytest.mark.parametrize("at_once", [2, 4])
@pytest.mark.parametrize(
    ("block", "lanes", "together", "how"),
    [
        ((3, 3), (4, 1, 3), 1, {"in_chunks": True, "eager": True}),
        ((2, 3), (8, 1, 3), 2, {"in_chunks": True, "eager": True}),
        ((3, 3), (4, 3, 1), 2, {"in_chunks": False, "eager": True}),
        ((3, 2), (2, 1, 2), 3, {"in_chunks": True, "eager": False}),
        ((2, 2), (4, 1, 2), 1, {"in_chunks": False, "eager": False, "x_adjacent": False}),
    ],
    ids=str,
)
def test_rows_under_way_together_change_nothing(
    at_once: int, block: tuple[int, int], lanes: tuple[int, int, int], together: int, how: dict[str, Any],
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """Rows of none, of one, of many and of too many blocks, in numbers that no group of lanes divides: bit for bit."""
    f64 = np.dtype(np.float64)
    names = element_types.types(f64, f64, f64, f64, np.dtype("i4"))
    how = {"threads": 64, "at_least": 1, "x_adjacent": True} | how
    config = configs.SpmvSmall(names, *block, *lanes, together, **how)
    some = ([1] * 45, [0] * 3, rng.integers(0, 9, 83), [1, 0, 300, 2, 256, 0, 257, 1])
    for lengths in map(np.asarray, some):
        rows, cols = len(lengths), 7
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        data, col = rng.standard_normal((indptr[-1], *block)), rng.integers(0, cols, indptr[-1])
        x, before = rng.standard_normal(cols * block[1]), rng.standard_normal(rows * block[0])
        A = SimpleNamespace(data=put(data), indices=put(col.astype("i4")), indptr=put(indptr.astype("i4")))
        A._shape = (rows * block[0], cols * block[1])
        results = []
        for chosen in (config, replace(config, rows_together=at_once)):
            out = put(before[:, None])
            emulator.run_product(A, put(x[:, None]), out, f64, 2, -1, config=chosen)
            results.append(out.get()[:, 0])
        want = 2 * (scipy.sparse.bsr_array((data, col, indptr), shape=A._shape) @ x) - before
        np.testing.assert_allclose(results[0], want, rtol=1e-12, atol=1e-11)
        np.testing.assert_array_equal(results[1], results[0])


def test_nothing_is_written_beside_the_result(rng: np.random.Generator) -> None:
    dtype = np.dtype(np.float64)
    A = Matrix(rng, 3, 2, dtype)
    for N in (1, 5):
        room = put(np.full((A._shape[0] + 2, N + 2), 7.0))
        assert_product(A, put(numbers(rng, (A._shape[1], N), dtype)), room[1:-1, 1:-1])
        room[1:-1, 1:-1] = 7
        assert (room == 7).all()


def read_nothing_else(folder: Path) -> None:
    """Products of operands at whose ends, or beginnings, the process would end."""
    rng = np.random.default_rng(8)
    for before in (False, True):

        def put(x: Any, before: bool = before) -> Array:
            return emulator.guarded(x, before)

        with emulator.emulated(folder, put):
            for block, N, transposed in itertools.product(((3, 2), (9, 4), (16, 16)), (1, 5, 40), (False, True)):
                dtype = np.dtype(np.float64)
                A = Matrix(rng, *block, dtype, put=put)
                K, M = A._shape if transposed else A._shape[::-1]
                assert_product(A, put(numbers(rng, (K, N), dtype)), put(np.zeros((M, N))), 1, 0, transposed)


def test_nothing_is_read_beside_the_operands(folder: Path) -> None:
    status, said = forked(lambda: read_nothing_else(folder))
    assert status == 0, f"ended with {status}\n{said}"


def believed(A: Matrix, R: int, K: int) -> np.ndarray[Any, Any]:
    """The dense matrix of index arrays of which only what lies inside is believed."""
    rows, cols, blocks = A._shape[0] // R, A._shape[1] // K, np.asarray(A.data)
    wide = np.zeros((rows, cols, R, K))
    for i in range(rows):
        for p in range(max(int(A.indptr[i]), 0), min(int(A.indptr[i + 1]), len(blocks))):
            if 0 <= A.indices[p] < cols:
                wide[i, A.indices[p]] += blocks[p]
    return wide.swapaxes(1, 2).reshape(A._shape)


@pytest.mark.parametrize(
    ("block", "N", "entry"),
    [((3, 2), 1, "spmv_small"), ((3, 2), 4, "spmm"), ((17, 13), 1, "spmv"), ((24, 32), 1, "spmv"),
     ((17, 13), 5, "gemm_simt"), ((24, 32), 40, "gemm_simt")],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("which", ["indices", "indptr"])
def test_index_arrays_that_were_spoiled_are_believed_where_they_are_inside(
    which: str, block: tuple[int, int], N: int, entry: str, folder: Path, rng: np.random.Generator
) -> None:
    """Whatever is read or written outside of the arrays ends the process."""
    dtype = np.dtype(np.float64)
    with emulator.emulated(folder, guarded):
        for bad, index in itertools.product((-1, 5, 2**31 - 1, -(2**31)), ("i4", "i8")):
            A = Matrix(rng, *block, dtype, index, put=guarded)
            if which == "indices":
                A.indices[[2, -1]] = bad
            else:
                A.indptr[[2, 4]] = bad
            A.dense = believed(A, *block)
            M, K = A._shape
            B, out = (guarded(numbers(rng, (n, N), dtype)) for n in (K, M))
            assert assert_product(A, B, out, 1, 2) == entry
            A.indptr[-1] = bad
            A.dense = believed(A, *block)
            assert_product(A, B, out, 1, 0)


def test_nan_reaches_the_rows_that_meet_it_and_no_others(rng: np.random.Generator) -> None:
    A = Matrix(rng, 2, 3, np.dtype(np.float64))
    for N in (1, 4):
        B = put(numbers(rng, (A._shape[1], N), np.dtype(np.float64)))
        B[4] = np.nan
        out = put(np.zeros((A._shape[0], N)))
        multiply(A, B, out)
        blocks = abs(A.dense).reshape(6, 2, 5, 3).sum(axis=(1, 3)) > 0
        meets = np.repeat(blocks[:, 4 // 3], 2)
        assert (np.isnan(out.get()).all(axis=1) == meets).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_pairs_of_blocks(dtype: np.dtype[Any], rng: np.random.Generator) -> None:
    a, b = numbers(rng, (5, 3, 4), dtype), numbers(rng, (6, 4, 2), dtype)
    ia, ib = rng.integers(0, 5, 11), rng.integers(0, 6, 11)
    starts = np.array([0, 3, 3, 9])
    got = products_cuda.ENGINE.pair_products(*map(put, (a, ia, b, ib, starts)), dtype)
    each = a.astype(exact(dtype))[ia] @ b.astype(exact(dtype))[ib]
    for s, (first, last) in enumerate(itertools.pairwise((*starts, 11))):
        want = each[first:last].sum(axis=0, dtype=exact(dtype))
        np.testing.assert_array_equal(got[s], want.astype(bool) if dtype.kind == "b" else want.astype(dtype))


@pytest.mark.parametrize("shape", [(3, 4, 2), (5, 2, 7)], ids=str)
def test_lists_of_pairs_are_read_no_further_than_they_go(shape: tuple[int, int, int], folder: Path, rng: Any) -> None:
    """Segments without pairs at both ends, bounds and pairs that were spoiled; lists end where the process would."""
    (R, K, N), dtype = shape, np.dtype(np.float64)
    for before in (False, True):

        def put(x: Any, before: bool = before) -> Array:
            return guarded(x, before)

        with emulator.emulated(folder, put):
            a, b = numbers(rng, (5, R, K), dtype), numbers(rng, (6, K, N), dtype)
            for starts in ([0, 0, 3, 11, 11], [4], [-9, 2, 2**40, 5], [11]):
                ia, ib = rng.integers(-1, 6, 11), rng.integers(-1, 7, 11)
                got = products_cuda.ENGINE.pair_products(*map(put, (a, ia, b, ib, np.array(starts))), dtype)
                for s, (first, last) in enumerate(itertools.pairwise(np.clip([*starts, 11], 0, 11))):
                    want = np.zeros((R, N))
                    for p, q in zip(ia[first:last], ib[first:last], strict=True):
                        if 0 <= p < 5 and 0 <= q < 6:
                            want += a[p] @ b[q]
                    np.testing.assert_array_equal(got[s], want)


@pytest.mark.parametrize("N", [1, 6])
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_sums_are_rounded_to_nearest_even(dtype: np.dtype[Any], N: int) -> None:
    """Products of two numbers of 8 bits have up to 16: many are ties. Some overflow, some vanish, some are NaN."""
    few = [1.0, 255, 129, 131, 193, 1.5, -1.0078125, 3.0, 257, 1e-4, 6e-8, -65504, 1e30, 1e-38, 3.3e38, np.inf, np.nan]
    with np.errstate(over="ignore"):
        x = np.array([*few, *np.arange(128, 256), *np.arange(-31, 32) / 7]).astype(dtype)
        y = np.array(few[: N if N > 1 else 1] if N > 1 else [131.0]).astype(dtype)
    for column in (y, y[::-1] * dtype.type(129)):
        A = SimpleNamespace(data=put(x[:, None, None]), indices=put(np.zeros(len(x), "i4")))
        A.indptr, A._shape = put(np.arange(len(x) + 1, dtype="i4")), (len(x), 1)
        out = put(np.zeros((len(x), N), dtype))
        emulator.run_product(A, put(column[None]), out, np.dtype(np.float32))
        with np.errstate(all="ignore"):
            want = (x.astype(np.float32)[:, None] * column.astype(np.float32)).astype(dtype)
        assert (np.isnan(want) == np.isnan(np.asarray(out))).all()
        there = ~np.isnan(want)
        np.testing.assert_array_equal(np.asarray(out)[there].view(np.uint16), want[there].view(np.uint16))


@pytest.mark.parametrize("dtype", [np.dtype(c) for c in ("i4", "f4", "c16")], ids=str)
@pytest.mark.parametrize("operation", list(array_kernels.OPERATIONS))
def test_reductions_of_segments(operation: str, dtype: np.dtype[Any], folder: Path, rng: Any) -> None:
    ufunc = getattr(np, operation)
    values, order, starts = (
        numbers(rng, (9, 4), dtype),
        rng.permutation(np.repeat(np.arange(9), 2)),
        np.array([0, 1, 12]),
    )
    if dtype.kind != "i":
        values[[2, 5], [1, 3]] = np.nan
    for chosen in (None, order):
        rows = values if chosen is None else values[chosen]
        first = starts if chosen is not None else np.array([0, 1, 7])
        with emulator.emulated(folder, guarded):
            got = cupy_backend.CupyBackend.segment_reduce(
                HOST, operation, guarded(values), None if chosen is None else guarded(chosen), guarded(first)
            )
        np.testing.assert_array_equal(got.get(), ufunc.reduceat(rows, first, axis=0))


@pytest.mark.parametrize("dtype", [np.dtype(c) for c in ("i4", "f4", "c16")], ids=str)
@pytest.mark.parametrize("operation", list(array_kernels.OPERATIONS))
def test_long_segments_are_reduced_by_many_lanes(
    operation: str, dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    """Segments of fewer and of more rows than a warp has lanes; a lane without a row counts for nothing."""
    starts = np.array([0, 1, 3, 40, 41, 170])
    values = (100 + numbers(rng, (235, 3), dtype)).astype(dtype)  # a lane that has no row must not say 0
    if operation in ("maximum", "fmax"):
        values = -values
    if dtype.kind != "i":
        values[[20, 41, 180], [1, 2, 0]] = np.nan
    order = rng.permutation(235)
    assert array_kernels.segment(dtype, operation, 235 // len(starts), 3).lanes == 32
    for chosen in (None, order):
        rows = values if chosen is None else values[chosen]
        got = cupy_backend.CupyBackend.segment_reduce(
            HOST, operation, guarded(values), None if chosen is None else guarded(chosen), guarded(starts)
        )
        np.testing.assert_array_equal(got.get(), getattr(np, operation).reduceat(rows, starts, axis=0))
    spoiled = order.copy()
    spoiled[[3, 50, 234]] = [-1, 235, 2**40]
    kept = np.delete(spoiled, [3, 50, 234])
    got = cupy_backend.CupyBackend.segment_reduce(HOST, operation, guarded(values), guarded(spoiled), guarded(starts))
    want = getattr(np, operation).reduceat(values[kept], np.array([0, 1, 3, 39, 40, 168]), axis=0)
    np.testing.assert_array_equal(got.get(), want)


@pytest.mark.parametrize("most", [1, 2])
def test_loops_go_on_beyond_a_small_grid(most: int, rng: np.random.Generator) -> None:
    f64 = np.dtype(np.float64)
    with emulator.few_ctas(most):
        for block, N, entry in (
            ((2, 3), 70, "spmm"),
            ((17, 9), 1, "spmv"),
            ((40, 5), 1, "spmv"),
            ((17, 13), 70, "gemm_simt"),
        ):
            A = Matrix(rng, *block, f64, rows=37)
            B, out = (put(numbers(rng, (3, n, N), f64)) for n in A._shape[::-1])
            want = 2 * (A.dense @ np.asarray(B)) - np.asarray(out)
            assert multiply(A, B, out, 2, -1) == entry
            np.testing.assert_array_equal(out.get(), want)
        a, b, pairs = numbers(rng, (5, 3, 4), f64), numbers(rng, (6, 4, 2), f64), rng.integers(0, 5, (2, 400))
        got = products_cuda.ENGINE.pair_products(*map(put, (a, pairs[0], b, pairs[1], np.arange(400))), f64)
        np.testing.assert_array_equal(got, a[pairs[0]] @ b[pairs[1]])
        values = numbers(rng, (900, 35), f64)
        got = cupy_backend.CupyBackend.segment_reduce(HOST, "add", put(values), None, put(np.arange(0, 900, 3)))
        np.testing.assert_array_equal(got, np.add.reduceat(values, np.arange(0, 900, 3), axis=0))
        lengths = rng.integers(0, 9, 2000)
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        got = cupy_backend.CupyBackend.expand(HOST, put(bounds), int(bounds[-1]))
        np.testing.assert_array_equal(got, np.repeat(np.arange(2000), lengths))


@pytest.mark.parametrize("index", ["i4", "i8"])
def test_rows_of_entries(index: str, rng: np.random.Generator) -> None:
    lengths = np.array([0, 3, 0, 0, 20, 1, 0])
    indptr = put(np.concatenate([[0], np.cumsum(lengths)]).astype(index))
    got = cupy_backend.CupyBackend.expand(HOST, indptr, 24)
    assert got.get().tolist() == np.repeat(np.arange(7), lengths).tolist()
