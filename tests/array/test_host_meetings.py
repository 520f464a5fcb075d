"""Matrices on the CPU that meet operands of all kinds: of scipy, of other dtypes, and of no numbers at all."""

from __future__ import annotations

import operator
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16, result_dtype

pytestmark = [
    pytest.mark.filterwarnings("ignore::scipy.sparse.SparseEfficiencyWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

DENSE = np.kron(np.array([[1.0, 0, -2], [0, 3, 0]]), np.array([[1.0, 2], [3, 4]]))
A = bg.bsr_array(DENSE, blocksize=(2, 2))
FORMATS = ("csr", "csc", "coo", "dia", "lil", "dok", "bsr")
#: Operands that are not numbers, for which NumPy has results of their dtype.
NOT_NUMBERS = {
    "objects": np.full(DENSE.shape, 2, object),
    "strings": np.full(DENSE.shape, "2"),
    "times": np.full(DENSE.shape, np.timedelta64(2, "s")),
}


# ------------------------------------------------------------------------------------ matrices of scipy
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 6), (4, 1), (4, 6), (1, 1)])
def test_matrices_of_scipy_are_multiplied_by_ours_where_shapes_broadcast(format: str, shape: tuple[int, int]) -> None:
    X = np.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
    S = getattr(sp, f"{format}_array")(X)
    np.testing.assert_array_equal((S * A).toarray(), X * DENSE)
    np.testing.assert_array_equal(S.multiply(A).toarray(), X * DENSE)


@pytest.mark.parametrize("format", FORMATS)
def test_shapes_that_do_not_broadcast_are_refused_by_scipy_with_its_own_error(format: str) -> None:
    S = getattr(sp, f"{format}_array")(np.ones((6, 4)))
    with pytest.raises(ValueError, match=r"inconsistent shapes|dimension mismatch"):
        S.multiply(A)


@pytest.mark.parametrize("format", ["csr", "csc", "lil", "dok"])
@pytest.mark.parametrize("place", [np.s_[1:5, 2:8], np.s_[[0, 2, 4, 7], 2:8], np.ix_([0, 1, 5, 6], [0, 1, 2, 3, 4, 8])])
def test_a_matrix_is_assigned_into_one_of_scipy(format: str, place: Any) -> None:
    S, D = getattr(sp, f"{format}_array")(np.eye(9)), np.eye(9)
    S[place] = A
    D[place] = DENSE
    np.testing.assert_array_equal(S.toarray(), D)


@pytest.mark.parametrize("blocksize", [None, (2, 1)])
def test_a_sparse_vector_is_refused_with_a_reason(blocksize: tuple[int, int] | None) -> None:
    with pytest.raises(ValueError, match="don't support 1D input"):
        bg.bsr_array(sp.coo_array(np.ones(4)), blocksize=blocksize)


# ------------------------------------------------------------------------------------ operands that are no numbers
@pytest.mark.parametrize("scalar", [Fraction(1, 2), np.timedelta64(2, "s"), ml_dtypes.float8_e4m3fn(1.5)], ids=str)
@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "bfloat16"])
@pytest.mark.parametrize("op", [operator.mul, operator.truediv, operator.pow, lambda A, x: A.maximum(x)])
def test_no_number_makes_a_matrix_of_a_dtype_that_no_matrix_has(
    scalar: Any, dtype: str, op: Callable[[Any, Any], Any]
) -> None:
    M = A.astype(BFLOAT16 if dtype == "bfloat16" else dtype)
    try:
        found = op(M, scalar)
    except (TypeError, NotImplementedError):
        return
    assert found.dtype in M._backend.dtypes


def test_the_error_for_such_a_number_says_what_to_pass() -> None:
    for M in (A, A.astype(BFLOAT16)):
        with pytest.raises(TypeError, match="with Fraction gives object, which a matrix cannot have; pass a float"):
            M * Fraction(1, 2)


@pytest.mark.parametrize("kind", NOT_NUMBERS)
@pytest.mark.parametrize(
    "op",
    [
        operator.add,
        operator.sub,
        lambda A, X: X + A,
        lambda A, X: A.multiply(X),
        lambda A, X: A.maximum(X),
        lambda A, X: A.copy().__setitem__(slice(None), X),
        lambda A, X: A.copy().setdiag(X[0]),
    ],
)
def test_dense_operands_that_are_no_numbers_are_refused(kind: str, op: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(TypeError, match="wanted numbers, got"):
        op(A, NOT_NUMBERS[kind])


# ---------------------------------------------------------------------------------------------- indices
def test_an_empty_index_is_the_whole_matrix() -> None:
    np.testing.assert_array_equal(A[()].toarray(), DENSE)
    B = A.copy()
    B[()] = 2 * DENSE
    np.testing.assert_array_equal(B.toarray(), 2 * DENSE)


def test_a_sparse_index_is_refused_with_the_way_out() -> None:
    for select in (lambda x: A[x], lambda x: A[:, x], lambda x: A.select_blocks(rows=x)):
        with pytest.raises(NotImplementedError, match=r"got a sparse csr_array; use A.tocsr\(\)"):
            select(sp.csr_array(DENSE > 0))


def test_a_column_that_is_chosen_twice_does_not_pass_for_sorted() -> None:
    """The copies of a block that is stored twice are in the order of the blocks: 0 1 0 1."""
    twice = bg.bsr_array((np.ones((2, 1, 1)), [0, 0], [0, 2]), shape=(1, 2))
    assert twice.has_sorted_indices
    found = twice.select_blocks(cols=[0, 0])
    assert not found.has_sorted_indices and not found.has_canonical_format
    found.sort_indices()
    assert found.indices.tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(found.toarray(), [[2, 2]])


# --------------------------------------------------------------------------------- matrices without elements
def test_diagonals_of_matrices_without_rows_or_columns_read_no_memory_beside_the_arrays() -> None:
    """SciPy's loop reads a block row that is not there, so the test runs in a process of its own."""
    program = """
import numpy as np, bsrgemm as bg
for R in (1, 2, 5, 64):
    for shape in ((0, 12 * R), (12 * R, 0), (0, 0)):
        for _ in range(200):
            A = bg.bsr_array((shape[0], shape[1]), blocksize=(R, R))
            for k in (-2 * R, -1, 0, 1, 2, 2 * R):
                assert A.diagonal(k).shape == (0,) and A.trace(k) == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-500:]


# ----------------------------------------------------------------------------------------------- dtypes
def test_sampled_products_of_swapped_bytes_are_in_native_order() -> None:
    X, Y = np.arange(4.0).reshape(4, 1).astype(">f4"), np.arange(6.0).reshape(1, 6).astype(">f4")
    S = bg.sddmm(X, Y, A)
    assert S.dtype == np.float32 and S.data.dtype.isnative
    np.testing.assert_array_equal(S.toarray(), np.where(A.toarray() != 0, X @ Y, 0))
    dA, dB = bg.matmul_backward(np.ones((4, 2), ">f8"), A, np.ones((6, 2), ">f8"))
    assert dA.data.dtype.isnative and dB.dtype.isnative
    for char in "hHiIlLefdFD":
        swapped = np.dtype(char).newbyteorder(">")
        assert result_dtype(swapped, swapped).isnative and result_dtype(swapped, swapped) == np.dtype(char)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int8", "int64"])
def test_factors_of_sampled_products_of_integers_wrap(dtype: str) -> None:
    X, Y = np.ones((4, 1), dtype), np.ones((1, 6), dtype)
    minus = bg.sddmm(X, Y, A, alpha=-1)
    assert minus.dtype == dtype and minus.toarray()[0, 0] == -np.ones(1, dtype)[0]
    out = bg.sddmm(X, Y, A)
    bg.sddmm(X, Y, A, alpha=0, beta=-1, out=out)
    np.testing.assert_array_equal(out.toarray(), minus.toarray())


def test_the_promotion_of_many_dtypes_does_not_depend_on_their_order() -> None:
    u8, i8 = (np.ones((1, 1, 1), x) for x in ("uint8", "int8"))
    bf = np.ones((1, 1, 1), BFLOAT16)
    for blocks in ([u8, i8, bf], [bf, u8, i8], [i8, bf, u8]):
        assert bg.diags(blocks, [0, 1, 2], shape=(3, 3)).dtype == BFLOAT16
        matrices = [bg.bsr_array((x, [0], [0, 1]), shape=(1, 1)) for x in blocks]
        assert bg.vstack(matrices).dtype == bg.bsr_batch(matrices).dtype == BFLOAT16


def test_only_real_parts_decide_about_a_cast_that_keeps_only_them() -> None:
    M = bg.bsr_array(np.array([[complex(2, np.nan), 0]]), blocksize=(1, 2))
    np.testing.assert_array_equal(M.astype(np.int32).toarray(), [[2, 0]])
    with pytest.raises(ValueError, match="cannot cast NaN or infinity to int32"):
        (M * np.nan).astype(np.int32)


def test_means_of_long_doubles_have_all_their_digits() -> None:
    M = bg.bsr_array(np.ones((3, 3), np.longdouble), blocksize=(3, 3))
    M.data[0, 0, 0] = 2
    third = np.longdouble(4) / np.longdouble(3)
    assert abs(M.mean(axis=1)[0] - third) <= np.finfo(np.longdouble).eps * third


def test_booleans_to_a_large_power() -> None:
    M = A.astype(bool)
    assert (M**3).dtype == np.int8
    np.testing.assert_array_equal((M**300).toarray(), M.toarray().astype(int))


# ----------------------------------------------------------------------------------- the guess of a block
def test_elements_at_the_same_position_count_once_where_a_block_is_guessed() -> None:
    row, col = np.zeros(40, np.int64), np.zeros(40, np.int64)
    row[0], col[0] = 5, 5
    for dtype in ("float64", "float16"):
        M = bg.bsr_array((np.ones(40, dtype), (row, col)), shape=(6, 6))
        assert M.blocksize == (1, 1) == sp.bsr_array((np.ones(40), (row, col)), shape=(6, 6)).blocksize
    S = sp.coo_array((np.ones(40), (row, col)), shape=(6, 6))
    assert bg.bsr_array(S).blocksize == (1, 1)


# ------------------------------------------------------------------------------------------ dense input
def test_a_dense_array_in_swapped_bytes_gives_a_matrix_in_native_order() -> None:
    M = bg.from_dense(DENSE.astype(">f8"), (2, 2))
    assert M.dtype == np.float64 and M.data.dtype.isnative
    np.testing.assert_array_equal(M.tocsr().toarray(), DENSE)
    with pytest.raises(TypeError, match="X: does not support dtype <U1"):
        bg.from_dense(np.array([["a", "b"]]), (1, 2))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_the_smallest_integer_is_above_a_threshold(dtype: str) -> None:
    X = np.array([[np.iinfo(dtype).min, 3, -5, 5, 6, 0]], dtype)
    np.testing.assert_array_equal(bg.from_dense(X, (1, 1), threshold=5).toarray(), [[X[0, 0], 0, 0, 0, 6, 0]])


@pytest.mark.parametrize("subclass", [np.ma.MaskedArray, np.memmap], ids=["masked", "memmap"])
def test_matrices_have_plain_arrays_also_if_they_are_made_of_others(subclass: Any, tmp_path: Any) -> None:
    blocks = np.ones((3, 2, 2))
    if subclass is np.memmap:
        given = np.memmap(tmp_path / "blocks", blocks.dtype, "w+", shape=blocks.shape)
        given[...] = blocks
    else:
        given = np.ma.masked_array(blocks)
    index = np.array([0, 1, 2])
    for M in (
        bg.bsr_array((given, (index * 0, index)), shape=(2, 6)),
        bg.bsr_array((given, index, np.array([0, 3])), shape=(2, 6)),
        bg.bsr_array(given.reshape(6, 2), blocksize=(2, 2)),
        bg.bsr_array((given.reshape(-1), (np.arange(12) % 2, np.arange(12) // 2)), shape=(2, 6), blocksize=(2, 2)),
    ):
        assert all(type(x) is np.ndarray for x in (M.data, M.indices, M.indptr, M.toarray(), (M * 2).data))
        assert M.sum() == 12
