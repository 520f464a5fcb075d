"""Pairs of blocks and entries of work lists are counted in 64 bits; see tests/array/test_counting."""

from __future__ import annotations

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products import engine, scaling, work_list
from bsrgemm._products.engine import ProductEngine
from bsrgemm._products.host import HostProducts

from ..array.test_counting import counting_in_64_bits, matrix


class Sorted(ProductEngine):
    """The products of the general engine, which a card falls back on."""

    pair_products = HostProducts.pair_products

    def multiply_dense(self, call: object) -> None: ...

    def overlapping(self, out: object, X: object, A: object) -> None: ...


def test_pairs_are_counted_in_64_bits() -> None:
    A = matrix()
    A.sum_duplicates()
    B = bg.bsr_array(np.arange(36.0).reshape(9, 4), blocksize=(3, 2))
    general = Sorted(HOST)
    indices, indptr = np.array([0, 1, 1], np.int32), np.array([0, 1, 1, 3], np.int32)
    X, Y = np.arange(24.0).reshape(6, 4), np.arange(16.0).reshape(4, 4)
    with counting_in_64_bits(engine):
        for index in (np.int64, np.int32):
            a, b = (x._blocks._replace(indices=x.indices.astype(index), indptr=x.indptr.astype(index)) for x in (A, B))
            found = general.multiply_sparse(a, b, 2, np.dtype("d"))
            product = bg.bsr_array(tuple(found), shape=(6, 4)).toarray()
            np.testing.assert_array_equal(product, A.toarray() @ B.toarray())
            assert all(x.dtype == np.int64 for x in general.product_pattern(a, b, 2)[:3])
        blocks = general.sampled(X, Y, indices, indptr, (2, 2), np.dtype("d"))
    whole = X @ Y
    for block, (i, j) in zip(blocks, ((0, 0), (2, 1), (2, 1)), strict=True):
        np.testing.assert_array_equal(block, whole[2 * i : 2 * i + 2, 2 * j : 2 * j + 2])
    assert not general.sampled(X[:, :0], Y[:0], indices, indptr, (2, 2), np.dtype("d")).any()


@pytest.mark.parametrize("per_row, per_group", [(1, 2), (2, 4), (1, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_work_lists_are_counted_in_64_bits(per_row: int, per_group: int, transposed: bool) -> None:
    indices, indptr = np.array([2, 0, 0, 1, 1], np.int32), np.array([0, 3, 3, 5], np.int32)
    pattern = work_list.Pattern(indices, indptr, 3, 3, transposed)
    with counting_in_64_bits(work_list):
        groups = work_list.merged(HOST, pattern, per_row, per_group, None)
        split = work_list.split(HOST, groups, work_list.Share(64, 4, 2))
    for made in (groups, split):
        arrays = [getattr(made, name) for name in made.__dataclass_fields__]
        assert all(x.dtype == np.int32 for x in arrays if isinstance(x, np.ndarray))  # as kernels read them


@pytest.mark.parametrize("rows", [False, True])
def test_scaled_blocks_are_counted_in_64_bits(rows: bool) -> None:
    A = bg.bsr_array(np.arange(24.0).reshape(4, 6), blocksize=(2, 3))
    factors = np.arange(2 * (4 if rows else 9.0)).reshape(2, *(2, 2) if rows else (3, 3))
    whole = np.zeros((4, 4) if rows else (6, 6))
    side = 2 if rows else 3
    for k in range(2):
        whole[k * side : (k + 1) * side, k * side : (k + 1) * side] = factors[k]
    with counting_in_64_bits(scaling):
        found = A.scale_block_rows(factors) if rows else A.scale_block_cols(factors)
    np.testing.assert_array_equal(found.toarray(), whole @ A.toarray() if rows else A.toarray() @ whole)
