"""spmm with blocks that it stages, and spmm_f64, on the CPU: blocks that come through shared memory, a chunk ahead.

A copy of the emulator is there only when it has been waited for, so that a wait too few gives numbers that are wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import emulator
from .emulator import Array, put
from .forked import forked
from .test_emulated_kernels import Matrix, assert_product, multiply, numbers

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
BLOCKS = [(1, 1), (2, 3), (3, 3), (4, 4), (5, 4), (6, 6), (7, 5), (9, 11), (8, 2), (15, 16), (17, 5), (40, 12)]


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    with emulator.emulated(folder, arch="sm_80"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def entry_of(block: tuple[int, int], dtype: np.dtype[Any]) -> str:
    return "spmm_f64" if dtype == F64 and block[0] >= 6 else "spmm"


@pytest.mark.parametrize(
    ("block", "dtype"), [*((b, F64) for b in BLOCKS), *((b, F32) for b in BLOCKS[1:10:3])], ids=str
)
def test_products_with_blocks_of_every_kind(
    block: tuple[int, int], dtype: np.dtype[Any], rng: np.random.Generator
) -> None:
    for N, beta in ((4, 0), (20, -2)):
        A = Matrix(rng, *block, dtype)
        M, K = A._shape
        B, out = put(numbers(rng, (K, N), dtype)), put(numbers(rng, (M, N), dtype))
        assert assert_product(A, B, out, 3, beta) == entry_of(block, dtype)


@pytest.mark.parametrize("block", [(3, 3), (6, 6)], ids=str)
def test_wide_indices_and_more_columns_than_a_tile(block: tuple[int, int], rng: np.random.Generator) -> None:
    A = Matrix(rng, *block, F64, "i8")
    M, K = A._shape
    for N in (2, 34):
        assert assert_product(A, put(numbers(rng, (K, N), F64)), put(np.zeros((M, N)))) == entry_of(block, F64)


@pytest.mark.parametrize("block", [(2, 2), (6, 6), (9, 9)], ids=str)
def test_rows_of_many_chunks(block: tuple[int, int], rng: np.random.Generator) -> None:
    lengths = np.array([0, 90, 2, 28, 0, 29, 7, 0])
    col = rng.integers(0, 5, lengths.sum())
    A = Matrix(rng, *block, F64)
    data = numbers(rng, (len(col), *block), F64)
    A.data, A.indices = put(data), put(col.astype("i4"))
    A.indptr = put(np.concatenate([[0], np.cumsum(lengths)]).astype("i4"))
    A._shape = (8 * block[0], 5 * block[1])
    wide = np.zeros((8, 5, *block))
    np.add.at(wide, (np.repeat(np.arange(8), lengths), col), data)
    A.dense = wide.swapaxes(1, 2).reshape(A._shape)
    M, K = A._shape
    assert_product(A, put(numbers(rng, (K, 16), F64)), put(numbers(rng, (M, 16), F64)), 1, 1)


@pytest.mark.races
def test_batches(rng: np.random.Generator) -> None:
    for block in ((3, 2), (8, 8)):
        A = Matrix(rng, *block, F64)
        B, out = (put(numbers(rng, (3, n, 4), F64)) for n in A._shape[::-1])
        want = 2 * (A.dense @ np.asarray(B)) - out.get()
        assert multiply(A, B, out, 2, -1) == entry_of(block, F64)
        np.testing.assert_array_equal(out.get(), want)


@pytest.mark.parametrize("block", [(3, 2), (8, 8)], ids=str)
def test_what_a_result_held_before_is_not_read(block: tuple[int, int], rng: np.random.Generator) -> None:
    A = Matrix(rng, *block, F64)
    B, out = put(numbers(rng, (A._shape[1], 4), F64)), put(np.full((A._shape[0], 4), np.nan))
    assert multiply(A, B, out) == entry_of(block, F64)
    np.testing.assert_array_equal(out.get(), A.dense @ np.asarray(B))


@pytest.mark.parametrize(("block", "entry"), [((3, 3), "spmm"), ((6, 6), "spmm")], ids=str)
def test_columns_beside_an_odd_number_of_them_stay_as_they_are(block, entry, rng: np.random.Generator) -> None:
    A = Matrix(rng, *block, F64)
    M, K = A._shape
    wide, room = put(np.full((K, 8), np.nan)), put(np.full((M, 8), 7.0))
    wide[:, :5] = numbers(rng, (K, 5), F64)
    assert assert_product(A, wide[:, :5], room[:, :5]) == entry
    assert (room[:, 5:] == 7).all()


def test_what_lies_otherwise_is_left_to_spmm(rng: np.random.Generator) -> None:
    A = Matrix(rng, 3, 3, F64)
    for transposed, order in ((True, "C"), (False, "F")):
        K, M = A._shape if transposed else A._shape[::-1]
        B = put(np.asarray(numbers(rng, (K, 4), F64), order=order))
        B = B if order == "C" else put(np.ascontiguousarray(np.asarray(B).T)).T
        assert assert_product(A, B, put(np.zeros((M, 4))), 1, 0, transposed) == "spmm"


@pytest.mark.parametrize("block", [(3, 2), (7, 5)], ids=str)
def test_indices_that_were_spoiled_are_left_out(block: tuple[int, int], rng: np.random.Generator) -> None:
    for index, bad in (("i4", -1), ("i4", 2**31 - 1), ("i8", 5), ("i8", 2**32)):
        A = Matrix(rng, *block, F64, index)
        A.indices[2] = bad
        A.data[2] = np.nan  # what is left out is not met at all
        good = np.arange(len(A.indices)) != 2
        row = np.repeat(np.arange(6), np.diff(A.indptr))
        wide = np.zeros((6, 5, *block))
        np.add.at(wide, (row[good], np.asarray(A.indices)[good]), np.asarray(A.data)[good])
        A.dense = wide.swapaxes(1, 2).reshape(A._shape)
        M, K = A._shape
        assert_product(A, put(numbers(rng, (K, 16), F64)), put(np.zeros((M, 16))))


@pytest.mark.parametrize("block", [(2, 3), (6, 3), (9, 9)], ids=str)
def test_nan_reaches_the_rows_that_meet_it_and_no_others(block: tuple[int, int], rng: np.random.Generator) -> None:
    R, K = block
    A = Matrix(rng, R, K, F64)
    for bad in (np.nan, np.inf):
        B = put(numbers(rng, (A._shape[1], 10), F64))
        B[K + 1, 3] = bad
        out = put(np.zeros((A._shape[0], 10)))
        multiply(A, B, out)
        blocks = abs(A.dense).reshape(6, R, 5, K).sum(axis=(1, 3)) > 0
        assert not np.isfinite(out.get()[np.repeat(blocks[:, 1], R), 3]).any()
        np.testing.assert_array_equal(np.isfinite(np.delete(out.get(), 3, axis=1)), True)
        assert np.isfinite(out.get()[~np.repeat(blocks[:, 1], R)]).all()


def read_nothing_else(folder: Path) -> None:
    """Products of operands at whose ends, or beginnings, the process would end."""
    rng = np.random.default_rng(8)
    for before in (False, True):

        def put(x: Any, before: bool = before) -> Array:
            """An array that may end at no multiple of 16 bytes, and begins at one."""
            x = np.asarray(x)
            return emulator.put(x) if not before and x.nbytes % 16 else emulator.guarded(x, before)

        with emulator.emulated(folder, put, arch="sm_80"):
            for block, N in itertools.product(((3, 3), (5, 7), (9, 4)), (4, 20)):
                for dtype in (F32, F64):
                    A = Matrix(rng, *block, dtype, put=put)
                    M, K = A._shape
                    assert_product(A, put(numbers(rng, (K, N), dtype)), put(np.zeros((M, N), dtype)))


def test_nothing_is_read_beside_the_operands(folder: Path) -> None:
    status, said = forked(lambda: read_nothing_else(folder))
    assert status == 0, f"ended with {status}\n{said}"
