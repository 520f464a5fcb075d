"""What batches return from their operations: its numbers, not its shape and dtype alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg

from .problems import hermitian, numbers


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex128], ids=lambda d: d.__name__)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_batch_with_other_data_multiplies_by_them(count: int, dtype: Any) -> None:
    A, x = bg.bsr_batch([hermitian(8)] * 2), np.ones((2, 8))
    before = A @ x
    data = numbers((count, *A.data.shape[1:]), dtype)
    B = A.with_data(data)
    dense = np.stack([hermitian(8)._with_data(one).toarray() for one in data])
    assert B.shape == (count, 8, 8) and B.dtype == dtype
    np.testing.assert_array_equal(B.toarray(), dense)
    for shape in ((count, 8), (count, 8, 3)):
        X = numbers(shape, dtype)
        want = np.einsum("bij,bj...->bi...", dense, X)
        np.testing.assert_allclose(B @ X, want, rtol=1e-4, atol=1e-4)
    whole = B.tobsr()
    assert whole.shape == (8 * count, 8 * count)
    np.testing.assert_array_equal(whole.toarray()[-8:, -8:], dense[-1])
    np.testing.assert_array_equal(A @ x, before)


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_inverse_blocks_of_a_batch_have_indices_as_wide_as_its_own(index: Any) -> None:
    A = hermitian(8)
    parts = A.data[None], A.indices.astype(index), A.indptr.astype(index)
    batch = bg.bsr_batch(parts, shape=A.shape)
    inverse = linalg.block_jacobi(batch)
    assert inverse.indices.dtype == inverse.indptr.dtype == batch.indices.dtype == index
    np.testing.assert_allclose(inverse.toarray()[0], A.inverse_block_diagonal().toarray())
