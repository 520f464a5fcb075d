"""Options at the edge of what is allowed, what callbacks are told, and which matrices preconditioners refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg

MAKERS = [
    linalg.block_jacobi,
    linalg.block_ssor,
    linalg.chebyshev,
    linalg.ic0,
    linalg.ilu0,
    linalg.smoothed_aggregation,
]


def laplacian(n: int = 12, block: int = 2, dtype: Any = np.float64) -> Any:
    dense = 2 * np.eye(n, dtype=dtype) - np.eye(n, k=1, dtype=dtype) - np.eye(n, k=-1, dtype=dtype)
    return bg.bsr_array(dense, blocksize=(block, block))


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("A", "error", "message"),
    [
        (laplacian()[:8], ValueError, "wanted a square matrix, got shape"),
        (bg.bsr_array(np.eye(6), blocksize=(2, 3)), ValueError, "wanted square blocks"),
        (laplacian(dtype=np.int64), TypeError, "wanted float32, float64, complex64 or complex128, got int64"),
        (np.eye(4), TypeError, "wanted a bsr_array or bsr_matrix, got ndarray"),
    ],
    ids=["rows", "blocks", "integers", "dense"],
)
def test_preconditioners_refuse_other_matrices(make: Any, A: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(A)


def test_the_polynomial_of_degree_1_is_that_of_the_diagonal_blocks() -> None:
    A, r = laplacian(), np.arange(1.0, 13)
    found, diagonal = linalg.chebyshev(A, 1) @ r, linalg.block_jacobi(A) @ r
    np.testing.assert_allclose(found, diagonal * (found[0] / diagonal[0]), rtol=1e-12)
    assert found[0] / diagonal[0] > 0
    with pytest.raises(ValueError, match="degree: wanted an integer from 1 on, got 0"):
        linalg.chebyshev(A, 0)


@pytest.mark.parametrize("solve", [linalg.gmres, linalg.fgmres], ids=["gmres", "fgmres"])
def test_a_callback_is_told_the_largest_residual_of_all_columns(solve: Any) -> None:
    A, b = laplacian(), np.random.default_rng(3).standard_normal((12, 3)) * [1.0, 1e3, 1e-3]
    one_by_one: list[list[float]] = [[], [], []]
    together: list[float] = []
    for right, told in ((b, together), *zip(b.T, one_by_one, strict=True)):
        with pytest.warns(linalg.SolverWarning, match="not converged after 4 iterations"):
            solve(A, right, restart=4, maxiter=1, rtol=0, callback=told.append, callback_type="pr_norm")
    np.testing.assert_allclose(together, np.max(one_by_one, axis=0), rtol=1e-9)
    assert len(together) == 4 and (np.ptp(one_by_one, axis=0) > 0.01).all()
