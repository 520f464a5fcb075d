"""kron against scipy and dense NumPy, in every place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16, HALF_DTYPES, result_dtype

from ..strategies import Place, Sample, assert_values, each_place, operands, random_values, samples, wide
from .assembling import FORMATS, SMALL, each_blocksize, random_sample, three, values
from .random_matrices import each_dtype, each_flavour


@each_place
@each_dtype
@each_blocksize
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (4, 1), (1, 5)], ids=str)
def test_kron_with_a_dense_matrix_keeps_the_pattern(
    place: Place, shape: tuple[int, int], blocksize: tuple[int, int], dtype: np.dtype[Any]
) -> None:
    (R, C), (P, Q) = blocksize, shape
    a = random_sample((3, 4), blocksize, dtype, canonical=True)
    x = random_values(np.random.default_rng(5), shape, dtype, "small")
    result = bg.kron(place.bsr(a), place.put(x))
    assert result.blocksize == (R * P, C * Q) and result.dtype == dtype and result._known_canonical
    blocks = place.blocks(result)
    assert_values(blocks.indices, a.indices)
    assert_values(blocks.indptr, a.indptr)
    assert_values(blocks.dense, np.kron(a.dense, x.astype(wide(dtype))))


@each_place
@each_dtype
@pytest.mark.parametrize("a_block", [(1, 1), (2, 3), (5, 1)], ids=str)
@pytest.mark.parametrize("b_block", [(1, 1), (3, 2), (1, 4)], ids=str)
def test_kron_of_two_sparse_matrices_has_the_blocks_of_the_second(
    place: Place, a_block: tuple[int, int], b_block: tuple[int, int], dtype: np.dtype[Any]
) -> None:
    a, b = random_sample((2, 3), a_block, dtype, seed=1), random_sample((3, 2), b_block, dtype, seed=2)
    result = bg.kron(place.bsr(a), place.bsr(b))
    assert result.blocksize == b_block and result.dtype == dtype and result._known_canonical
    assert result.nnz == a.merged().data.size * b.merged().data.size
    expected = np.kron(a.dense, b.dense)
    assert_values(values(place, result), expected)
    if dtype not in HALF_DTYPES:
        reference = sp.kron(a.scipy(), b.scipy())
        assert result.shape == reference.shape and result.dtype == reference.dtype
        assert_values(values(place, result), reference.toarray())


@each_place
@given(
    a=samples(spreads=SMALL),
    b=st.one_of(
        samples(spreads=SMALL),
        st.tuples(st.integers(0, 4), st.integers(0, 4)).flatmap(lambda shape: operands(shape, spreads=SMALL)),
    ),
    first=st.booleans(),
    lazy=st.booleans(),
)
def test_kron_is_that_of_numpy(place: Place, a: Sample, b: Any, first: bool, lazy: bool) -> None:
    """Any two dtypes and blocks, either one first, unsorted, duplicates, transposes; dense in any layout."""
    A = place.bsr(a.T).T if lazy else place.bsr(a)
    B, b_dense = (place.bsr(b), b.dense) if isinstance(b, Sample) else (place.operand(b), b.values)
    dtype = result_dtype(a.dtype, b.dtype)
    (M, N), (P, Q) = a.shape, b_dense.shape
    result = bg.kron(A, B) if first else bg.kron(B, A)
    pair = [x.astype(wide(dtype)) for x in (a.dense, b_dense)]
    expected = np.kron(*(pair if first else reversed(pair)))  # type: ignore[call-overload]
    assert result.dtype == dtype and result.shape == (M * P, N * Q)
    assert result._known_canonical and result.has_sorted_indices
    # One rounding of an exact product, also where duplicates make numbers too long for a 16-bit float.
    assert_values(values(place, result), expected.astype(dtype).astype(wide(dtype)))


@each_place
@pytest.mark.parametrize("format", FORMATS)
def test_kron_takes_other_formats_as_blocks_of_one_element(place: Place, format: str) -> None:
    a = random_sample()
    x = np.array([[0.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
    S = place.sparse(format, sp.csr_array(x))
    for result, expected, blocksize, nnz in (
        (bg.kron(place.bsr(a), S), np.kron(a.dense, x), (1, 1), a.data.size * 2),
        (bg.kron(S, place.bsr(a)), np.kron(x, a.dense), (2, 3), a.data.size * 2),
        (bg.kron(place.put(x), place.bsr(a)), np.kron(x, a.dense), (2, 3), a.data.size * 2),
    ):
        assert result.blocksize == blocksize and result.nnz == nnz
        assert_values(values(place, result), expected)


@each_place
def test_kron_keeps_the_zeros_that_are_stored(place: Place) -> None:
    A = bg.bsr_array(place.put(np.eye(4)), blocksize=(2, 2))
    B = place.bsr(random_sample((2, 2), (3, 3), canonical=True))
    assert bg.kron(A, B).nnz == 8 * B.nnz
    narrow = A.tobsr((1, 1))
    narrow.eliminate_zeros()
    assert bg.kron(narrow, B).nnz == 4 * B.nnz


@each_place
def test_kron_rounds_an_exact_product_once_and_wraps_integers(place: Place) -> None:
    for dtype in ("float16", BFLOAT16, "float32", "int8", "uint16", "int64"):
        x = random_values(np.random.default_rng(7), (4, 6), np.dtype(dtype), "wide")
        A = bg.bsr_array(place.put(x), blocksize=(2, 3))
        exact = np.multiply.outer(x.astype(wide(x.dtype)), x.astype(wide(x.dtype))).transpose(0, 2, 1, 3)
        expected = exact.reshape(16, 36).astype(x.dtype)
        for B in (place.put(x), A):
            result = place.blocks(bg.kron(A, B))
            np.testing.assert_array_equal(result.dense, expected.astype(result.dense.dtype))


@each_place
@each_dtype
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0)], ids=str)
def test_kron_with_a_matrix_without_elements(place: Place, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    A = place.bsr(random_sample((2, 3), (2, 3), dtype))
    (M, N), (P, Q) = A.shape, shape
    dense = place.put(np.zeros(shape, dtype))
    sparse = bg.bsr_array(shape, dtype=dtype, device=place.backend.name)
    for result in (bg.kron(A, dense), bg.kron(dense, A), bg.kron(A, sparse), bg.kron(sparse, A)):
        assert result.shape == (M * P, N * Q) and result.nnz == 0 and result.dtype == dtype
        values(place, result)
    none = bg.bsr_array(A.shape, dtype=dtype, blocksize=(2, 3), device=place.backend.name)
    result = bg.kron(none, place.put(np.ones((2, 2), dtype)))
    assert result.shape == (2 * M, 2 * N) and result.nnz == 0 and result.blocksize == (4, 6)
    values(place, result)


@each_place
@each_flavour
def test_kron_is_a_matrix_only_where_no_operand_is_an_array(place: Place, flavour: type) -> None:
    s = three()[0]
    A, dense = place.bsr(s, flavour), place.put(np.ones((2, 2)))
    csr_array = place.sparse("csr", sp.csr_array(np.eye(2)))
    csr_matrix = place.sparse("csr", sp.csr_matrix(np.eye(2)))
    for operands_ in ((A, dense), (dense, A), (A, A), (A, csr_matrix), (csr_matrix, A)):
        values(place, bg.kron(*operands_), flavour)
    for operands_ in ((A, csr_array), (csr_array, A), (A, place.bsr(s)), (place.bsr(s), A)):
        values(place, bg.kron(*operands_), bg.bsr_array)
