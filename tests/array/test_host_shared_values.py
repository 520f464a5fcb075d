"""Matrices that share their values, and batches: what is written into one of them, and what stays as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16

DENSE = np.kron(np.array([[1.0, 0, 2], [0, 3, 0]]), np.array([[1.0, 2], [3, 5]]))


def scale(A: Any) -> None:
    A *= 2


def divide(A: Any) -> None:
    A /= 2


def assign(A: Any) -> None:
    A[:2, :2] = 7.0


def assemble(A: Any) -> None:
    A.assemble(np.ones((1, 2, 2)), [0], [0])


def sample(A: Any) -> None:
    bg.sddmm(np.ones((4, 1)), np.ones((1, 6)), A, out=A)


@pytest.mark.parametrize("write", [scale, divide, assign, assemble, sample])
@pytest.mark.parametrize("cls", [bg.bsr_array, bg.bsr_matrix])
@pytest.mark.parametrize("first", [False, True], ids=["transpose, then share", "share, then transpose"])
@pytest.mark.parametrize("of_other", [False, True], ids=["write into one", "write into the other"])
def test_a_transpose_is_that_of_the_values_as_they_were_also_if_matrices_share_them(
    write: Callable[[Any], None], cls: type, first: bool, of_other: bool
) -> None:
    A = bg.bsr_array(DENSE, blocksize=(2, 2))
    T = None if first else A.T
    B = cls(A)
    assert B.data is A.data
    C = bg.bsr_array(B)
    T = A.T if T is None else T
    U = B.T
    write(C if of_other else A)
    assert (A.toarray() == C.toarray()).all() and (A.toarray() != DENSE).any()
    for X in (T, U):
        np.testing.assert_array_equal(X @ np.eye(4), DENSE.T)
        np.testing.assert_array_equal(X.toarray(), DENSE.T)


def test_a_copy_does_not_make_transposes_of_the_other_matrix_build_their_arrays() -> None:
    A = bg.bsr_array(DENSE, blocksize=(2, 2))
    T = A.T
    B = bg.bsr_array(A, copy=True)
    B *= 2
    assert T._origin is not None


# --------------------------------------------------------------------------------------------- batches
def batch(dtype: Any = np.float64) -> bg.bsr_batch:
    A = bg.bsr_array(DENSE, blocksize=(2, 2)).astype(dtype)
    return bg.bsr_batch([A, A + A, A])


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda A: pickle.loads(pickle.dumps(A)), bg.bsr_batch.copy])
@pytest.mark.parametrize("dtype", [np.float64, np.int16, BFLOAT16])
def test_products_of_a_copied_batch_see_what_is_written_into_its_data(
    way: Callable[[bg.bsr_batch], bg.bsr_batch], dtype: Any
) -> None:
    A = batch(dtype)
    B = way(A)
    X = np.ones((3, 6), dtype)
    assert B.shape == A.shape and B.dtype == A.dtype and B.blocksize == A.blocksize
    np.testing.assert_array_equal(B @ X, A @ X)
    before = A @ X
    B.data[...] = 1
    np.testing.assert_array_equal(B @ X, np.array([[4, 4, 2, 2]] * 3, dtype))
    np.testing.assert_array_equal(B.toarray()[0] @ X[0], (B @ X)[0])
    np.testing.assert_array_equal(A @ X, before)


def test_the_pattern_of_a_batch_is_its_own_and_cannot_be_written_to() -> None:
    """A product has index arrays of its own, so that a write would show in A[k] and not in A @ X."""
    indices, indptr = np.array([0, 2, 1]), np.array([0, 2, 3])
    A = bg.bsr_batch((np.ones((2, 3, 2, 2)), indices, indptr), shape=(4, 6))
    before = A.toarray()
    indices[:] = 0
    np.testing.assert_array_equal(A.toarray(), before)
    for array in (A.indices, A.indptr):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    one = A[0]
    one.indices[:] = 0  # a matrix of the batch has index arrays of its own
    np.testing.assert_array_equal(A.toarray(), before)


def test_a_batch_of_matrices_of_any_dtypes_has_their_common_dtype() -> None:
    A = bg.bsr_array(DENSE, blocksize=(2, 2))
    for first, second, wanted in (
        (np.float16, BFLOAT16, np.float32),
        (np.int32, BFLOAT16, np.float64),
        (np.int8, BFLOAT16, BFLOAT16),
        (np.float32, np.complex64, np.complex64),
    ):
        found = bg.bsr_batch([A.astype(first), A.astype(second)])
        assert found.dtype == wanted
        np.testing.assert_array_equal(found.toarray().astype(complex), [DENSE, DENSE])


TWICE = np.array([100, 100, 1], np.int8).reshape(3, 1, 1)


@pytest.mark.parametrize("dtype", [np.int32, np.float64, np.complex64, bool, BFLOAT16])
def test_a_cast_of_a_batch_gives_what_casts_of_its_matrices_give(dtype: Any) -> None:
    """Sums of int8 wrap: 100 + 100 is -56, and stays so."""
    A = bg.bsr_array((TWICE, [0, 0, 1], [0, 3]), shape=(1, 2))
    want = A.astype(dtype).toarray()
    given = (np.stack([TWICE, TWICE]), [0, 0, 1], [0, 3])
    for found in (
        bg.bsr_batch([A.copy(), A.copy()], dtype=dtype),
        bg.bsr_batch(given, shape=(1, 2), dtype=dtype),
        bg.bsr_batch(given, shape=(1, 2)).astype(dtype),
    ):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.toarray(), [want, want])
        np.testing.assert_array_equal((found @ np.ones((2, 2), dtype))[1], want @ np.ones(2, dtype))
        found.data[...] = 0
        assert not (found @ np.ones((2, 2), dtype)).any()


def test_matrices_of_different_dtypes_with_blocks_that_are_stored_twice_make_a_batch() -> None:
    A = bg.bsr_array((TWICE, [0, 0, 1], [0, 3]), shape=(1, 2))
    B = bg.bsr_array((TWICE.astype(np.float32), [0, 0, 1], [0, 3]), shape=(1, 2))
    for matrices in ([A.copy(), B], [B, A.copy()]):
        found = bg.bsr_batch(matrices)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.toarray(), [M.toarray() for M in matrices])


def test_every_matrix_of_a_batch_is_looked_at_before_a_cast() -> None:
    data = np.ones((2, 1, 1, 1))
    data[1] = np.nan
    for cast in (
        lambda: bg.bsr_batch((data, [0], [0, 1]), shape=(1, 1), dtype=np.int32),
        lambda: bg.bsr_batch((data, [0], [0, 1]), shape=(1, 1)).astype(np.int32),
        lambda: bg.bsr_batch([bg.bsr_array((x, [0], [0, 1]), shape=(1, 1)) for x in data], dtype=np.int32),
    ):
        with pytest.raises(ValueError, match="cannot cast NaN or infinity to int32"):
            cast()


def test_a_cast_of_a_complex_batch_keeps_the_real_parts_without_a_warning() -> None:
    data = np.full((2, 1, 1, 1), 3 + 4j)
    found = bg.bsr_batch((data, [0], [0, 1]), shape=(1, 1)).astype(np.float32)
    assert found.dtype == np.float32 and (found.data == 3).all()


# ------------------------------------------------------------------------------------------------- vjp
def test_vjp_takes_options_at_their_defaults_and_refuses_unknown_ones() -> None:
    A, x = bg.bsr_array(DENSE, blocksize=(2, 2)), np.ones((6, 1))
    y, pullback = bg.vjp(bg.matmul, A, x, beta=0, out=None)
    np.testing.assert_array_equal(pullback(y)[1], DENSE.T @ y)
    with pytest.raises(TypeError, match="scale: matmul has no such argument"):
        bg.vjp(bg.matmul, A, x, scale=None)
    with pytest.raises(TypeError, match="beta: has no gradient; call matmul without it"):
        bg.vjp(bg.matmul, A, x, beta=1)
