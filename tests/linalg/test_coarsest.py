"""The inverse of the coarsest matrix of a hierarchy: what is too small to be inverted is left out."""

from __future__ import annotations

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm.linalg import multigrid


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("scale", [1.0, 2.0**40])
def test_a_matrix_that_is_singular_but_for_roundings_has_a_pseudo_inverse(scale, dtype) -> None:
    """Cholesky's factor of it exists: its last pivot is the last bit of an element."""
    eps = float(np.finfo(dtype).eps)
    dense = scale * np.array([[1, 1, 0], [1, 1 + eps, 0], [0, 0, 2]], dtype)
    assert np.linalg.cholesky(dense)[1, 1] > 0
    found = multigrid._pseudo_inverse(bg.bsr_array(dense, blocksize=(1, 1)))
    want = np.array([[0.25, 0.25, 0], [0.25, 0.25, 0], [0, 0, 0.5]]) / scale
    np.testing.assert_allclose(found, want, rtol=8 * eps, atol=8 * eps / scale)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.float64])
def test_a_matrix_that_is_far_from_singular_is_inverted_and_rows_of_zeros_stay(dtype) -> None:
    dense = np.diag(np.array([3, 0, 5e-3, 2], dtype)) + np.eye(4, k=3, dtype=dtype) + np.eye(4, k=-3, dtype=dtype)
    found = multigrid._pseudo_inverse(bg.bsr_array(dense, blocksize=(2, 2)))
    np.testing.assert_allclose(found, np.linalg.pinv(dense.astype(np.complex128)), rtol=1e-5, atol=1e-6)
