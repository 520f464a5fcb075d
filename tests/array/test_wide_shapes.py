"""Matrices with more rows, columns, elements or blocks than 32 or 64 bits count, on any backend."""

from __future__ import annotations

from typing import Any

import numpy as np

import bsrgemm as bg

from ..strategies import Place, assert_values, each_place
from .refused import elements

INT64 = np.iinfo(np.int64)
# ------------------------------------------------------------------------------------- very large shapes
WIDE = 2**33


def wide_matrix(place: Place) -> Any:
    """4 x 2**33 in blocks of 2 x 2, three of them stored: column indices need 64 bits."""
    data = np.arange(1.0, 13.0).reshape(3, 2, 2)
    return elements(place, data, [0, 1, 1], [WIDE // 2 - 1, 5, WIDE // 2 - 2], shape=(4, WIDE))


@each_place
def test_indices_are_64_bit_where_the_shape_needs_it(place: Place) -> None:
    A = wide_matrix(place)
    blocks = place.blocks(A)
    assert blocks.indices.dtype == np.int64
    np.testing.assert_array_equal(blocks.indices, [WIDE // 2 - 1, 5, WIDE // 2 - 2])
    assert A.shape == (4, WIDE) and A.nnz == 12 and 0 < A.density < 1e-9
    assert bg.bsr_array((4, WIDE), blocksize=(2, 2), device=place.backend.name).indices.dtype == np.int64
    kept = np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8]), np.array([9, 10, 11, 12])
    for B in (A.copy(), A + A - A, A * 1.0, A.astype("float64"), A.get().to_device(place.backend.name)):
        blocks = place.blocks(B)
        assert blocks.indices.dtype == np.int64
        assert sorted(blocks.data.reshape(-1, 4).tolist()) == [x.tolist() for x in kept]


@each_place
def test_wide_matrices_reduce_slice_and_reshape(place: Place) -> None:
    A = wide_matrix(place)
    rows = np.array([1 + 2, 3 + 4, 5 + 6 + 9 + 10, 7 + 8 + 11 + 12], float)
    assert_values(place.dense(A.sum(axis=1)), rows)
    assert float(place.number(A.sum())) == 78 and float(place.number(A.max())) == 12
    assert A.count_nonzero() == 12
    row, col = (place.dense(x) for x in A.nonzero())
    assert_values(row, np.repeat([0, 1, 2, 3], [2, 2, 4, 4]))
    assert_values(col[:4], [WIDE - 2, WIDE - 1, WIDE - 2, WIDE - 1])
    assert_values(place.dense(A.argmax(axis=1)), [WIDE - 1, WIDE - 1, WIDE - 3, WIDE - 3])
    assert int(A.argmax()) == 3 * WIDE + WIDE - 3
    assert_values(place.dense(A[:, WIDE - 4 :].toarray()), [[0, 0, 1, 2], [0, 0, 3, 4], [9, 10, 0, 0], [11, 12, 0, 0]])
    assert_values(place.dense(A[2:, 10:12].toarray()), [[5, 6], [7, 8]])
    A[2:, 10:12] = 0
    assert float(place.number(A.sum())) == 52
    B = A.tobsr((1, 2))
    assert B.blocksize == (1, 2) and float(place.number(B.sum())) == 52
    assert_values(place.dense(A.diagonal(k=WIDE - 2)), [1, 4])
    A.setdiag([7.0], k=WIDE - 1)
    assert float(place.number(A.sum())) == 52 - 2 + 7
    A.resize(2, 20)
    assert A.shape == (2, 20) and A.nnz == 0


@each_place
def test_wide_matrices_convert(place: Place) -> None:
    A = wide_matrix(place)
    S = place.foreign(A.tocoo(), "coo")
    assert S.shape == (4, WIDE) and int(S.col.max()) == WIDE - 1 and S.nnz == 12
    assert float(S.sum()) == 78
    S = place.foreign(A.tocsr(), "csr")
    assert int(S.indices.max()) == WIDE - 1 and S.indptr.tolist() == [0, 2, 4, 8, 12]
    B = bg.bsr_array(A.tocsr(), blocksize=(2, 2))
    assert sorted(place.blocks(B).indices.tolist()) == [5, WIDE // 2 - 2, WIDE // 2 - 1]
    T = place.foreign(A.reshape(2, 2 * WIDE), "coo")
    assert int(T.col.max()) == 2 * WIDE - 1


@each_place
def test_a_matrix_of_two_to_the_62_elements_transposes(place: Place) -> None:
    side, block = 2**31, 2**9
    data = np.zeros((2, block, block), np.int8)
    data[0, 3, 5], data[1, 7, 9] = 1, 2
    last = side // block - 1
    A = elements(place, data, [0, last], [last, 0], shape=(side, side))
    assert place.dense(A.indices).dtype == np.int64 and A.shape == (side, side)
    T = A.T
    assert_values(place.dense(T.indices), [last, 0])
    B = T.astype("float32")
    S = place.foreign(B.tocoo(), "coo")
    at = np.flatnonzero(S.data)
    assert_values(S.row[at], [9, side - block + 5])
    assert_values(S.col[at], [side - block + 7, 3])
    assert int(place.number(A.trace(offset=side - block + 2))) == 1
    C = A + T
    assert int(place.number(C.sum())) == 6 and C.blocksize == (block, block)


@each_place
def test_more_elements_than_int64_counts_are_refused_or_kept_apart(place: Place) -> None:
    shape = (8, INT64.max)
    # Flat positions 2 * N + 5 and 3 agree modulo 2**64.
    try:
        A = elements(place, [1.0, 2.0], [0, 2], [3, 5], shape=shape, blocksize=(2, 1))
    except (ValueError, OverflowError) as refused:
        assert "shape" in str(refused)
    else:
        blocks = place.blocks(A)
        assert_values(blocks.indices, [3, 5])
        assert_values(blocks.indptr, [0, 1, 2, 2, 2])
        assert_values(blocks.data.reshape(2, 2), [[1.0, 0.0], [2.0, 0.0]])
        assert_values(place.dense(A.sum(axis=1)), [1.0, 0, 2.0, 0, 0, 0, 0, 0])


@each_place
def test_more_blocks_than_int64_counts_are_refused_or_kept_apart(place: Place) -> None:
    columns = INT64.max
    try:
        A = elements(place, np.ones((2, 1, 1)), [0, 2], [3, 5], shape=(8, columns))
        A = A + A
    except (ValueError, OverflowError) as refused:
        assert "shape" in str(refused)
    else:
        blocks = place.blocks(A)
        assert_values(blocks.indices, [3, 5])
        assert_values(blocks.indptr, [0, 1, 1, 2, 2, 2, 2, 2, 2])
        assert_values(blocks.data.reshape(2), [2.0, 2.0])


@each_place
def test_blocks_that_no_kernel_could_count_are_none_where_none_are_stored(place: Place) -> None:
    """Operations on patterns take the size of a block, whose elements need 64 bits here."""
    shape, blocksize = (2**17, 2**17), (2**17, 2**17)
    A = bg.bsr_array(shape, blocksize=blocksize, dtype="float32", device=place.backend.name)
    for B in (A + A, A.maximum(A), A.select_blocks(rows=[0]), A.T, bg.vstack([A, A])[: shape[0]]):
        assert B.shape == shape and B.nnz == 0
