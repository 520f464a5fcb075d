"""Index dtypes, the order of sums, and values that are written in place: what the structure of a matrix promises."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend.registry import Backend

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def matrix(
    backend: Backend, data: Any, indices: Any, indptr: Any, shape: tuple[int, int], index: Any = np.int32
) -> Any:
    A = bg.bsr_array((np.asarray(data), np.asarray(indices, index), np.asarray(indptr, index)), shape=shape)
    assert A.indices.dtype == index
    return A if backend.name == "cpu" else A.to_device(backend.name)


def back(backend: Backend, A: Any) -> Any:
    return A if backend.name == "cpu" else A.get()


# ------------------------------------------------------------------------------------------- index dtypes
@pytest.mark.parametrize("left", [np.int32, np.int64])
@pytest.mark.parametrize("right", [np.int32, np.int64])
def test_a_sum_has_the_wider_index_dtype_of_its_operands(left: Any, right: Any, backend: Backend) -> None:
    A = matrix(backend, np.ones((2, 2, 2)), [0, 1], [0, 1, 2], (4, 4), left)
    B = matrix(backend, np.ones((1, 2, 2)), [1], [0, 1, 1], (4, 4), right)
    wider = max(np.dtype(left), np.dtype(right), key=lambda x: x.itemsize)
    for C in (A + B, A - B, A * B):
        C = back(backend, C)
        assert C.indices.dtype == C.indptr.dtype == wider
    np.testing.assert_array_equal(
        back(backend, A + B).toarray(), back(backend, A).toarray() + back(backend, B).toarray()
    )


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("left", [np.int32, np.int64])
@pytest.mark.parametrize("right", [np.int32, np.int64])
def test_a_kronecker_product_has_the_wider_index_dtype(left: Any, right: Any, dense: bool, backend: Backend) -> None:
    A = matrix(backend, np.ones((1, 1, 1)), [1], [0, 1, 1], (2, 2), left)
    B = matrix(backend, np.ones((1, 1, 1)), [0], [0, 1], (1, 1), right)
    K = back(backend, bg.kron(A, B.toarray() if dense else B))
    wider = left if dense else max(np.dtype(left), np.dtype(right), key=lambda x: x.itemsize)
    assert K.indices.dtype == K.indptr.dtype == wider


@pytest.mark.parametrize("swapped", [False, True])
def test_columns_of_a_kronecker_product_beyond_31_bits_are_right(swapped: bool, backend: Backend) -> None:
    """Operands with indices of 32 bits, whose product needs 64."""
    A = matrix(backend, np.full((1, 1, 1), 3.0), [(1 << 17) - 1], [0, 1], (1, 1 << 17))
    B = matrix(backend, np.full((1, 1, 1), 5.0), [(1 << 16) - 2], [0, 1], (1, 1 << 16))
    first, second = (B, A) if swapped else (A, B)
    K = back(backend, bg.kron(first, second))
    column = int(back(backend, first).indices[0]) * second.shape[1] + int(back(backend, second).indices[0])
    assert K.indices.dtype == K.indptr.dtype == np.int64
    assert K.shape == (1, 1 << 33) and K.indices.tolist() == [column] and K.data.ravel().tolist() == [15.0]


def test_a_kronecker_product_with_a_dense_matrix_counts_its_elements_in_64_bits(backend: Backend) -> None:
    A = matrix(backend, np.full((1, 1, 1), 3.0), [7], [0, 1], (1, 1 << 30))
    X = backend.from_host(np.array([[1.0, 2.0, 4.0, 8.0]]))
    K = back(backend, bg.kron(A, X))
    assert K.indices.dtype == K.indptr.dtype == np.int64 and K.shape == (1, 1 << 32)
    assert K.data.ravel().tolist() == [3.0, 6.0, 12.0, 24.0] and K.indices.tolist() == [7]


# ------------------------------------------------------------------------------------------ duplicates
#: Places of which each holds four values.
PLACES = 100


def shuffled_duplicates() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Four values of different size for each place, mixed: another order of the sums rounds otherwise."""
    rng = np.random.default_rng(5)
    column = rng.permutation(np.repeat(np.arange(PLACES), 4))
    large = rng.random(4 * PLACES) < 0.5
    return np.where(large, rng.choice([1e17, -1e17], 4 * PLACES), rng.standard_normal(4 * PLACES)), column


def in_order(values: Any, column: Any) -> list[list[float]]:
    """The sums of all places, from the first value on; and as NumPy may do it, the first and the sum of the others."""
    terms = [values[column == j].tolist() for j in range(PLACES)]
    return [[((a + b) + c) + d for a, b, c, d in terms], [a + ((b + c) + d) for a, b, c, d in terms]]


def check_order(found: list[float], values: Any, column: Any) -> None:
    assert found in in_order(values, column)
    assert found not in in_order(values[::-1], column[::-1])


def test_blocks_stored_several_times_are_added_in_the_order_of_storage(backend: Backend) -> None:
    values, column = shuffled_duplicates()
    A = matrix(backend, values[:, None, None], column, [0, 4 * PLACES], (1, PLACES))
    A.sum_duplicates()
    check_order(back(backend, A).data.ravel().tolist(), values, column)
    assert back(backend, A).indices.tolist() == list(range(PLACES))


def test_elements_given_several_times_are_added_in_the_order_given() -> None:
    values, column = shuffled_duplicates()
    A = bg.bsr_array((values, (np.zeros(4 * PLACES, int), column)), shape=(1, PLACES), blocksize=(1, PLACES))
    check_order(A.data.ravel().tolist(), values, column)


def test_sorting_keeps_the_order_of_blocks_at_the_same_place(backend: Backend) -> None:
    _, column = shuffled_duplicates()
    number = np.arange(4.0 * PLACES)
    A = matrix(backend, number[:, None, None], column, [0, 4 * PLACES], (1, PLACES))
    A.sort_indices()
    A = back(backend, A)
    np.testing.assert_array_equal(A.data.ravel(), number[np.argsort(column, kind="stable")])
    np.testing.assert_array_equal(A.indices, np.sort(column))


@pytest.mark.parametrize("flavour", [bg.bsr_array, bg.bsr_matrix])
def test_a_column_with_blocks_stored_twice_meets_a_row_as_the_sum_of_both(flavour: Any) -> None:
    """100 + 100 is -56 in int8; a product in int32 that took the column for free of duplicates would say 200."""
    column = flavour((np.full((2, 2, 1), 100, np.int8), np.array([0, 0]), np.array([0, 2])), shape=(2, 1))
    row = flavour((np.full((1, 1, 1), 1, np.int32), np.array([1]), np.array([0, 1])), shape=(1, 3))
    product = row.multiply(column)
    np.testing.assert_array_equal(product.toarray(), [[0, -56, 0], [0, -56, 0]])
    assert product.dtype == np.int32


# -------------------------------------------------------------------------------------------- in place
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int64])
def test_integers_are_not_divided_in_place(dtype: Any, backend: Backend) -> None:
    A = matrix(backend, np.full((1, 2, 2), 6, dtype), [0], [0, 1], (2, 2))
    with pytest.raises(TypeError, match="cannot keep"):
        A /= 2
    assert (back(backend, A).data == 6).all() and A.dtype == dtype


@pytest.mark.parametrize(("dtype", "factor"), [(np.int32, 1.5), (np.float32, 2j), (np.float64, np.complex64(2))])
def test_a_factor_of_another_kind_is_refused_in_place(dtype: Any, factor: Any, backend: Backend) -> None:
    A = matrix(backend, np.full((1, 2, 2), 6).astype(dtype), [0], [0, 1], (2, 2))
    with pytest.raises(TypeError, match="cannot keep"):
        A *= factor
    assert (back(backend, A).data.astype(np.float64) == 6).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64, BFLOAT16])
def test_numbers_of_the_same_kind_are_scaled_in_place(dtype: Any, backend: Backend) -> None:
    A = matrix(backend, np.full((1, 2, 2), 6).astype(dtype), [0], [0, 1], (2, 2))
    data = A.data
    A *= 2
    A /= 4
    assert A.data is data and A.dtype == dtype and (back(backend, A).data.astype(np.complex128) == 3).all()


# ------------------------------------------------------------------------------------------- the ends of arrays
def test_prune_keeps_every_block_and_cuts_what_lies_after_the_last(backend: Backend) -> None:
    A = matrix(backend, np.arange(8.0).reshape(2, 2, 2), [1, 0], [0, 1, 2], (4, 4))
    dense = back(backend, A).toarray()
    A.data = backend.from_host(np.concatenate([back(backend, A).data, np.full((3, 2, 2), 9.0)]))
    A.indices = backend.from_host(np.array([1, 0, 1, 1, 1], np.int32))
    A.prune()
    assert len(A.data) == len(A.indices) == 2
    A.check_format()
    np.testing.assert_array_equal(back(backend, A).toarray(), dense)


def test_an_array_that_toarray_is_given_holds_nothing_of_before(backend: Backend) -> None:
    A = matrix(backend, np.ones((1, 2, 2)), [1], [0, 1, 1], (4, 4))
    out = backend.from_host(np.full((4, 4), 7.0))
    assert A.toarray(out=out) is out
    wanted = np.zeros((4, 4))
    wanted[:2, 2:] = 1
    np.testing.assert_array_equal(backend.to_host(out), wanted)


def test_rows_of_a_transpose_are_in_order_whatever_the_number_of_blocks(backend: Backend) -> None:
    column = np.random.default_rng(6).integers(0, 3, 400)
    A = matrix(backend, np.arange(400.0)[:, None, None], column, np.arange(401), (400, 3))
    T = back(backend, A.T.copy())
    assert T.indices.tolist() == [i for j in range(3) for i in np.nonzero(column == j)[0].tolist()]
    assert T.data.ravel().tolist() == T.indices.tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32"])
def test_a_complex_factor_in_place_is_refused_by_a_real_matrix(dtype: str) -> None:
    """The imaginary part of the products would be lost; bfloat16 refuses as the other dtypes do."""
    from bsrgemm.dtypes import BFLOAT16

    A = bg.bsr_array(np.eye(4), blocksize=(2, 2)).astype(BFLOAT16 if dtype == "bfloat16" else dtype)
    before = A.toarray().astype(np.float64)
    with pytest.raises(TypeError):
        A *= 1j
    with pytest.raises(TypeError):
        A /= 1j
    np.testing.assert_array_equal(A.toarray().astype(np.float64), before)
