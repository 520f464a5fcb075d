"""Positions beyond 32 bits, in large matrices of few blocks, and the order of many blocks; host and a fake card."""

from __future__ import annotations

import functools
import operator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._array import convert
from bsrgemm._backend import loops
from bsrgemm._backend.numpy_backend import HOST

from .test_host_properties import each_device, index_dtypes, numpy_of, on

pytestmark = pytest.mark.fake

FAR = 2**32
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def far_to_the_right(block: tuple[int, int], device: str, values: Any = 1.0, rows: int = 1) -> tuple[Any, int]:
    """A matrix with one block in its last block row, in block column 2**32 / C, and the column at which it begins."""
    column = FAR // block[1] + 1
    shape = (rows * block[0], (column + 1) * block[1])
    A = bg.bsr_array((np.full((1, *block), values), ([rows - 1], [column])), shape=shape)
    return on(A, device), column * block[1]


# ----------------------------------------------------------------------------------- positions beyond 32 bits
@each_device
@pytest.mark.parametrize("block", [(1, 1), (1, 3), (2, 16), (3, 3)], ids=str)
def test_extremes_are_found_beyond_32_bits(block: tuple[int, int], device: str) -> None:
    A, column = far_to_the_right(block, device, rows=2)
    N = A.shape[1]
    first = block[0] * N + column
    assert A.argmax() == A.argmax(explicit=True) == A.argmin(explicit=True) == first
    assert (-A).argmin() == first and (-A).argmax() == 0
    for explicit in (False, True):
        found = numpy_of(A.argmax(axis=1, explicit=explicit))
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, [0] * block[0] + [column] * block[0])


@each_device
def test_rows_are_counted_in_64_bits_in_the_place_of_an_extreme(device: str) -> None:
    side = 2**17
    A = on(bg.bsr_array(([-1.0], ([side - 1], [5])), shape=(side, side), blocksize=(1, 1)), device)
    assert A.argmin() == A.argmax(explicit=True) == (side - 1) * side + 5


@each_device
@pytest.mark.parametrize("block", [(1, 1), (1, 3), (2, 3), (2, 2)], ids=str)
def test_a_diagonal_far_to_the_right_is_read_and_written(block: tuple[int, int], device: str) -> None:
    A, column = far_to_the_right(block, device)
    n = min(block)
    np.testing.assert_array_equal(numpy_of(A.diagonal(column)), np.ones(n))
    np.testing.assert_array_equal(numpy_of(A.diagonal(column + 1)), np.ones(min(block[0], block[1] - 1)))
    A.setdiag([5.0], k=column)
    np.testing.assert_array_equal(numpy_of(A.diagonal(column)), [5.0] + [1.0] * (n - 1))
    A.setdiag(7.0, k=3)
    assert numpy_of(A.diagonal(3)).tolist() == [7.0] * block[0]
    assert numpy_of(A.diagonal(3 - FAR)).size == 0


@each_device
def test_a_diagonal_far_below_is_read(device: str) -> None:
    """High blocks, because there is an index for every block row."""
    R, row = 2**18, 2**14 + 1
    data = np.zeros((1, R, 1), bool)
    data[0, 7] = True
    A = on(bg.bsr_array((data, ([row], [0])), shape=(R * (row + 1), 1)), device)
    assert numpy_of(A.diagonal(-(R * row + 7))).tolist() == [True]
    assert numpy_of(A.diagonal(-(R * row + 8))).tolist() == [False]


@each_device
def test_a_diagonal_of_many_blocks_is_set_where_it_is(device: str) -> None:
    side = 2**16 + 2
    A = on(bg.bsr_array((side, side), blocksize=(1, 1)), device)
    A.setdiag(3.0)
    np.testing.assert_array_equal(numpy_of(A.indices), np.arange(side))
    np.testing.assert_array_equal(numpy_of(A.indptr), np.arange(side + 1))
    assert (numpy_of(A.data) == 3).all()


def test_the_identity_may_begin_far_to_the_right() -> None:
    A = bg.eye(2, FAR + 2, k=FAR)
    assert A.indices.tolist() == [FAR, FAR + 1] and A.dtype == np.float64
    assert bg.eye(3, k=-5).nnz == bg.eye(3, k=5).nnz == bg.eye(0).nnz == 0


@each_device
@pytest.mark.parametrize("given", [np.int64, np.uint64])
def test_a_shape_beyond_32_bits_is_inferred(given: Any, device: str) -> None:
    col = np.array([FAR + 4], given)
    A = bg.bsr_array(([2.0], (np.array([0], given), col)), blocksize=(1, 1), device=device)
    B = bg.bsr_array((np.full((1, 1, 1), 2.0), (np.array([0], given), col)), device=device)
    C = bg.bsr_array((np.full((1, 1, 1), 2.0), col, np.array([0, 1], given)), device=device)
    for found in (A, B, C):
        assert found.shape == (1, FAR + 5)
        assert numpy_of(found.indices).tolist() == [FAR + 4]


@each_device
@pytest.mark.parametrize("given", [np.int8, np.uint8, np.int16, np.uint16, np.int32])
def test_narrow_indices_get_32_bits(given: Any, device: str) -> None:
    zero, two = np.array([0], given), np.array([0, 1], given)
    wide = {np.dtype(np.int64 if np.dtype(given).kind == "u" else np.int32)}
    assert index_dtypes(bg.bsr_array((np.ones((1, 1, 1)), (zero, zero)), device=device)) == wide
    assert index_dtypes(bg.bsr_array((np.ones((1, 1, 1)), zero, two), device=device)) == wide
    nothing: list[float] = []
    empty = bg.bsr_array((np.ones((0, 1, 1)), (nothing, nothing)), shape=(2, 2), device=device)
    assert index_dtypes(empty) == {np.dtype(np.int32)}
    floats = bg.bsr_array((np.ones((0, 1, 1)), np.zeros(0), two[:1].repeat(3)), shape=(2, 2), device=device)
    assert index_dtypes(floats) == wide


def test_the_places_of_blocks_are_64_bit_numbers() -> None:
    A, column = far_to_the_right((1, 1), "cpu")
    for matrix in (A, A.T):
        row, col = matrix._places()
        assert {row.dtype, col.dtype} == {np.dtype(np.int64)}
        assert (int(row[0]), int(col[0])) in ((0, column), (column, 0))


def test_blocks_far_from_each_other_are_counted_apart() -> None:
    """In 32 bits their numbers would be the same, and blocks of 2 x 2 would seem to be filled."""
    side = 2**17
    row, col = np.array([0, 0, side, side]), np.array([0, 1, 0, 1])
    for device in ("cpu", "cuda"):
        A = bg.bsr_array((np.ones(4), (row, col)), shape=(side + 2, side), device=device)
        assert A.blocksize == (1, 1)


def test_diagonals_far_to_the_right_have_their_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    N = 2**31 + 8  # elements of one byte; memory that stays zero is not taken
    A = bg.bsr_array((np.ones((1, 1, 2), bool), ([0], [N // 2 - 2])), shape=(1, N))
    monkeypatch.setattr(convert.Conversions, "_foreign", lambda self, format, arrays, shape, dtype: arrays)
    data, offsets = A.todia()
    assert data.shape == (2, N) and offsets.tolist() == [N - 4, N - 3]
    assert data[:, N - 5 : N - 2].tolist() == [[False, True, False], [False, False, True]]


@each_device
def test_elements_that_are_kept_have_the_index_dtype_of_the_others(device: str) -> None:
    A, column = far_to_the_right((1, 2), device)
    A.data[0, 0, 1] = 0
    for S in (A.maximum(0), A > 0.5):
        S = S.get() if device == "cuda" else S
        assert S.indices.tolist() == [column] and S.nnz == 1


# ----------------------------------------------------------------------------------- the order of many blocks
@each_device
def test_columns_that_are_chosen_often_stay_in_order(device: str) -> None:
    """NumPy's default sort keeps the order of up to 16 numbers alone."""
    A = on(bg.bsr_array(np.arange(1.0, 7).reshape(2, 3), blocksize=(1, 1)), device)
    cols = np.sort(np.random.default_rng(0).integers(0, 3, 300))
    B = A.select_blocks(cols=cols)
    np.testing.assert_array_equal(numpy_of(B.indices), np.tile(np.arange(300), 2))
    np.testing.assert_array_equal(numpy_of(B), numpy_of(A)[:, cols])
    mixed = np.random.default_rng(1).permutation(cols)
    np.testing.assert_array_equal(numpy_of(A.select_blocks(cols=mixed)), numpy_of(A)[:, mixed])


@each_device
@pytest.mark.parametrize("loop", [True, False], ids=["loops", "sorts"])
def test_duplicates_keep_their_order_when_columns_are_exchanged(
    device: str, loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not loop:
        monkeypatch.setattr(loops, "_LEAST_LINES", -(10**6))
    col = np.random.default_rng(2).integers(0, 2, 200)
    A = on(bg.bsr_array((np.arange(200.0).reshape(-1, 1, 1), col, [0, 200]), shape=(1, 2)), device)
    B = A.select_blocks(cols=[1, 0])
    want = np.concatenate([np.flatnonzero(col == 1), np.flatnonzero(col == 0)])
    np.testing.assert_array_equal(numpy_of(B.data).reshape(-1), want)


@each_device
def test_blocks_of_a_row_keep_the_order_in_which_they_are_given(device: str) -> None:
    rng = np.random.default_rng(3)
    row, col = rng.integers(0, 3, 200), rng.integers(0, 4, 200)
    A = bg.bsr_array((np.arange(200.0).reshape(-1, 1, 1), (row, col)), shape=(3, 4), device=device)
    order = np.argsort(row, kind="stable")
    np.testing.assert_array_equal(numpy_of(A.data).reshape(-1), order)
    np.testing.assert_array_equal(numpy_of(A.indices), col[order])


@pytest.mark.parametrize("dtype", [np.float64, np.float16, BFLOAT16])
def test_blocks_are_added_in_order_however_many_there_are(dtype: Any) -> None:
    """Large numbers swallow small ones, so that another order gives another sum."""
    large, small = {8: (2.0**60, 1.0), 2: (2.0**14, 2.0**-14)}[np.dtype(dtype).itemsize]
    rng = np.random.default_rng(0)
    signs = rng.permutation(np.tile([large, -large], 60))
    values = np.stack([signs, rng.integers(1, 9, 120) * small], axis=1).astype(dtype).reshape(-1, 1, 1)
    A = bg.bsr_array((np.zeros((2, 1, 1), dtype), [0, 1], [0, 2]), shape=(1, 2))
    at = np.zeros(len(values), int)
    A.assemble(values, at, at + 1)
    if dtype is np.float64:
        want = functools.reduce(operator.add, values.reshape(-1).tolist())  # sum corrects itself since Python 3.12
    else:
        want = HOST.segment_reduce("add", np.concatenate([A.data[:1], values]), None, np.array([0]))[0, 0, 0]
    assert A.data.reshape(-1).tolist() == [0, want] and want != 0
