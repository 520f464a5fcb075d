"""Paths that only the CPU takes, for speed: each gives what the plain code over dense arrays gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend.numpy_backend import HOST

LOOPS = HOST.loops


def random_matrix(rows: int, cols: int, block: tuple[int, int], seed: int, dtype: Any = np.float64) -> bg.bsr_array:
    """A matrix with empty rows, in which whole numbers from -3 to 3 repeat, so that extremes are met several times."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, cols)) < 0.6
    mask[rng.integers(rows)] = False
    r, c = np.nonzero(mask)
    data = rng.integers(-3, 4, (len(r), *block)).astype(dtype)
    return bg.bsr_array((data, (r, c)), shape=(rows * block[0], cols * block[1]))


# --------------------------------------------------------------------------------------- index arrays
@pytest.mark.parametrize("rows", [4, 40_000], ids=["few", "many"])
def test_columns_in_order_are_told_from_others(rows: int) -> None:
    each = np.tile(np.array([1, 4, 6], np.int32), rows)
    indptr = (np.arange(rows + 1) * 3).astype(np.int32)
    assert LOOPS.is_canonical(each, indptr)
    for place, column in ((1, 1), (1, 0), (2, 4), (len(each) - 1, 4), (len(each) - 2, 6)):
        wrong = each.copy()
        wrong[place] = column
        assert not LOOPS.is_canonical(wrong, indptr), (place, column)
    assert LOOPS.is_canonical(np.sort(each)[:1], np.array([0, 1], np.int32))


def test_empty_rows_between_many_others_do_not_count() -> None:
    columns = np.tile(np.arange(5, dtype=np.int32), 8000)
    bounds = np.arange(8001, dtype=np.int32) * 5
    empty_rows = np.concatenate([[0, 0], np.repeat(bounds[1:-1], 3), [bounds[-1]] * 4]).astype(np.int32)
    assert LOOPS.is_canonical(columns, empty_rows)
    assert not LOOPS.is_canonical(columns, np.delete(empty_rows, [5, 6, 7]))  # two rows became one, which falls
    assert not LOOPS.is_canonical(np.zeros(40_000, np.int32), empty_rows)


@pytest.mark.parametrize("size", [3, 3000], ids=["remembered", "too long to remember"])
def test_index_arrays_that_change_in_place_are_checked_again(size: int) -> None:
    A = bg.bsr_array((np.ones((size, 1, 1)), np.arange(size), np.arange(size + 1)), shape=(size, size))
    assert A.sum() == size
    A.indices[0] = size
    with pytest.raises(ValueError, match=f"column index values must be < {size}"):
        A.sum()
    A.indices[0] = -1
    with pytest.raises(ValueError, match="column index values must be >= 0"):
        A.max()
    A.indices[0], A.indptr[1] = 0, size + 7
    with pytest.raises(ValueError, match="non-decreasing"):
        A.sum(axis=1)
    A.indptr[1] = 1
    assert A.sum() == size


# ---------------------------------------------------------------------------------------- reductions
@pytest.mark.parametrize("block", [(1, 1), (2, 3), (3, 2), (9, 5), (5, 9), (16, 14), (40, 40)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_extremes_and_their_places_are_those_of_the_dense_array(block: tuple[int, int], axis: int) -> None:
    for seed in range(6):
        A = random_matrix(5, 4, block, seed)
        if seed % 2:
            A.data[..., 0, -1] = np.nan
        if seed > 3:
            A.data[...] = -abs(A.data) - 1
        dense = A.toarray()
        for name in ("maximum", "minimum", "fmax", "fmin"):
            method = {"maximum": A.max, "minimum": A.min, "fmax": A.nanmax, "fmin": A.nanmin}[name]
            wanted = getattr(np, name).reduce(dense, axis=axis)
            np.testing.assert_array_equal(method(axis=axis).toarray(), wanted, err_msg=name)
        for name in ("argmax", "argmin"):
            found = getattr(A, name)(axis=axis)
            np.testing.assert_array_equal(found, getattr(np, name)(dense, axis=axis), err_msg=name)
            stored = np.where(pattern(A), dense, np.nan)
            lines = ~np.isnan(stored).all(axis=axis)
            if not np.isnan(A.data).any() and lines.any():
                explicit = getattr(A, name)(axis=axis, explicit=True)
                kept = stored[:, lines] if axis == 0 else stored[lines]
                np.testing.assert_array_equal(explicit[lines], getattr(np, f"nan{name}")(kept, axis=axis))


def pattern(A: bg.bsr_array) -> np.ndarray[Any, Any]:
    """Where elements are stored."""
    ones = bg.bsr_array((np.ones_like(A.data), A.indices, A.indptr), shape=A.shape)
    return ones.toarray() == 1


@pytest.mark.parametrize("dtype", ["float32", "complex128", "int16", "bool"])
@pytest.mark.parametrize("block", [(2, 3), (20, 20)], ids=str)
def test_sums_of_duplicates_are_those_of_the_dense_array(dtype: str, block: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    data = rng.integers(0, 3, (9, *block)).astype(dtype)
    A = bg.bsr_array((data, [0, 0, 2, 1, 1, 1, 2, 0, 2], [0, 3, 3, 9]), shape=(3 * block[0], 3 * block[1]))
    dense = A.toarray()
    for axis in (None, 0, 1):
        np.testing.assert_array_equal(A.sum(axis=axis), dense.sum(axis=axis))
    assert A.count_nonzero() == np.count_nonzero(dense)


def test_the_blocks_of_long_rows_are_reduced_in_pieces() -> None:
    rng = np.random.default_rng(5)
    for block, axis in (((3, 4), 1), ((3, 4), 2), ((9, 4), 2), ((4, 9), 1), ((1, 3), 1), ((3, 1), 2)):
        data = rng.standard_normal((20_011, *block))
        np.testing.assert_array_equal(LOOPS.fold(np.maximum, data, axis), data.max(axis=axis))


# ---------------------------------------------------------------------------------------- diagonals
@pytest.mark.parametrize("side", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(4, 4), (2, 5), (5, 2)], ids=str)
def test_every_diagonal_is_that_of_the_dense_array(side: int, shape: tuple[int, int]) -> None:
    A = random_matrix(*shape, (side, side), side)
    dense = A.toarray()
    for k in range(-A.shape[0] - 1, A.shape[1] + 2):
        np.testing.assert_array_equal(A.diagonal(k), dense.diagonal(k) if -A.shape[0] < k < A.shape[1] else [])


@pytest.mark.parametrize("block", [(3, 3), (2, 4), (3, 1)], ids=str)
def test_a_diagonal_is_set_in_blocks_that_are_stored_and_in_others(block: tuple[int, int]) -> None:
    for seed in range(4):
        A = random_matrix(4, 4, block, seed)
        if seed == 0:  # every block is stored
            A = bg.bsr_array((np.ones((16, *block)), np.tile(np.arange(4), 4), np.arange(5) * 4), shape=A.shape)
        for k in range(-A.shape[0] + 1, A.shape[1]):
            B, dense = A.copy(), A.toarray()
            n = len(dense.diagonal(k))
            values = np.arange(1.0, n + 1)
            B.setdiag(values, k=k)
            rows = np.arange(n) - min(k, 0)
            dense[rows, rows + k] = values
            np.testing.assert_array_equal(B.toarray(), dense)
            np.testing.assert_array_equal(A.toarray(), A.copy().toarray())


# --------------------------------------------------------------------------------------- arithmetic
@pytest.mark.parametrize("divisor", [2, -4.0, 0.125, 3.0, 2.0**-80, 2.0**80, 6, np.float32(2), 0.0])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int32"])
def test_quotients_are_those_of_numpy_to_the_last_bit(divisor: Any, dtype: str) -> None:
    rng = np.random.default_rng(1)
    A = random_matrix(3, 3, (2, 2), 1, dtype)
    if A.dtype.kind == "f":
        A.data[...] = rng.standard_normal(A.data.shape) * 10.0 ** rng.integers(-30, 30, A.data.shape)
    with np.errstate(all="ignore"):
        found, wanted = (A / divisor).data, A.data / divisor
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("block", [(2, 2), (12, 12)], ids=str)
@pytest.mark.parametrize(
    "dtypes", [("float64", "float64"), ("int8", "float32"), ("float32", "complex64"), ("bool", "bool")]
)
def test_sums_with_dense_arrays_are_those_of_numpy(block: tuple[int, int], dtypes: tuple[str, str]) -> None:
    A = random_matrix(4, 3, block, 2, dtypes[0])
    rng = np.random.default_rng(0)
    for shape in (A.shape, (1, A.shape[1]), (A.shape[0], 1), (A.shape[1],)):
        other = np.asfortranarray(rng.integers(0, 5, shape).astype(dtypes[1]))
        before = other.copy()
        for found, wanted in ((A + other, A.toarray() + other), (other + A, other + A.toarray())):
            assert found.dtype == wanted.dtype and type(found) is np.ndarray
            np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(other, before)
    duplicates = bg.bsr_array((np.ones((2, *block)), [1, 1], [0, 2]), shape=(block[0], 2 * block[1]))
    np.testing.assert_array_equal(duplicates + np.ones(duplicates.shape), duplicates.toarray() + 1)


@pytest.mark.parametrize("fill", [1.0, 0.0])
def test_elements_that_are_not_zero_are_found(fill: float) -> None:
    A = random_matrix(4, 3, (3, 2), 7)
    A.data[A.data == 0] = fill
    for found, wanted in zip(A.nonzero(), A.toarray().nonzero(), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_reshape_counts_beyond_32_bits() -> None:
    A = bg.bsr_array((np.ones((1, 1, 4)), ([2**16 - 1], [2**15 - 1])), shape=(2**16, 2**17))
    found = A.reshape(2**17, 2**16)
    row, col = found.coords
    assert (row[-1], col[-1]) == (2**17 - 1, 2**16 - 1)


# ---------------------------------------------------------------------------------------- columns
@pytest.mark.parametrize("block", [(3, 5), (4, 4), (16, 1), (1, 16), (5, 6)], ids=str)
def test_columns_are_those_of_scipy_however_they_are_found(block: tuple[int, int]) -> None:
    A = random_matrix(5, 4, block, 7)
    B = bg.bsr_array((A.data, A.indices[::-1].copy(), A.indptr), shape=A.shape)  # neither sorted nor unique
    for matrix in (A, B, A.T):
        found, want = matrix.tocsc(), matrix.tocsr().tocsc()
        assert found.format == "csc" and found.dtype == A.dtype
        for name in ("data", "indices", "indptr"):
            np.testing.assert_array_equal(getattr(found, name), getattr(want, name))
        found.data[:] = 0
        assert matrix.data.any()


def test_a_diagonal_whose_blocks_are_stored_is_written_into_the_data() -> None:
    blocks = np.arange(12.0).reshape(3, 2, 2)
    A = bg.bsr_array((blocks, np.arange(3), np.arange(4)), shape=(6, 6))
    data, T = A.data, A.T
    before = A.toarray()
    A.setdiag(A.data.reshape(-1)[:6])  # a view of what is written to
    assert A.data is data
    np.testing.assert_array_equal(A.diagonal(), np.arange(6.0))
    np.testing.assert_array_equal(T.toarray(), before.T)
    read_only = np.arange(12.0).reshape(3, 2, 2)
    read_only.flags.writeable = False
    B = bg.bsr_array((read_only, np.arange(3), np.arange(4)), shape=(6, 6))
    B.setdiag(7.0)
    np.testing.assert_array_equal(B.diagonal(), np.full(6, 7.0))
    np.testing.assert_array_equal(read_only.reshape(-1), np.arange(12.0))
    twice = bg.bsr_array((np.ones((4, 2, 2)), [0, 0, 1, 2], [0, 2, 3, 4]), shape=(6, 6))
    twice.setdiag(5.0)
    assert twice.has_canonical_format and len(twice.data) == 3
    np.testing.assert_array_equal(twice.toarray()[:2, :2], [[5.0, 2.0], [2.0, 5.0]])
