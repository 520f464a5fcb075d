"""Matrices that are not Hermitian, in methods for those that are: a failure is told, and never a wrong x returned."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg

from .problems import hermitian, laplacian, numbers

N = 120
CHAIN = 2 * np.eye(N) - np.eye(N, k=1) - np.eye(N, k=-1)
TURN = np.eye(N, k=1) - np.eye(N, k=-1)
MATRICES = {
    "shifted by an imaginary number": CHAIN + 0.3j * np.eye(N),
    "complex symmetric": CHAIN + 0.5j * abs(TURN),
    "turned": (1 + 1j) * CHAIN,
    "imaginary": 1j * CHAIN,
    "convection": CHAIN + 0.9 * TURN,
    "mostly skew": CHAIN + 5 * TURN,
    "a triangle": 2 * np.eye(N) - np.eye(N, k=1),
    "negative": -CHAIN,
}
PRECONDITIONERS: dict[str, Any] = {
    "none": lambda A: None,
    "block_jacobi": linalg.block_jacobi,
    "chebyshev": linalg.chebyshev,
    "block_ssor": linalg.block_ssor,
    "ilu0": linalg.ilu0,
    "smoothed_aggregation": lambda A: linalg.smoothed_aggregation(A, max_coarse=20),
}
#: The solvers, each with what it calls about 60 iterations: GMRES counts restarts of 20.
SOLVERS = {linalg.cg: 60, linalg.minres: 60, linalg.bicgstab: 60, linalg.gmres: 3, linalg.fgmres: 3}


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
@pytest.mark.parametrize("name", MATRICES)
def test_info_is_0_only_for_a_solution_and_all_else_is_told(name: str, preconditioner: str) -> None:
    A = bg.bsr_array(MATRICES[name], blocksize=(2, 2))
    if preconditioner == "smoothed_aggregation" and name in ("imaginary", "negative"):
        with pytest.raises(ValueError, match="A: wanted a positive diagonal, as a positive definite matrix has, got"):
            PRECONDITIONERS[preconditioner](A)
        return
    M = PRECONDITIONERS[preconditioner](A)
    b = numbers(N, A.dtype)
    for solve, maxiter in SOLVERS.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            x, info = solve(A, b, M=M, rtol=1e-6, maxiter=maxiter)
        left = np.linalg.norm(b - MATRICES[name] @ x) / np.linalg.norm(b)
        if info == 0:
            assert left <= 1.001e-6 and not told, solve.__name__
        else:
            assert [warning.category for warning in told] == [linalg.SolverWarning], solve.__name__


@pytest.mark.parametrize("name", [name for name in MATRICES if name != "negative"])
def test_incomplete_cholesky_refuses_a_matrix_that_is_not_hermitian(name: str) -> None:
    with pytest.raises(ValueError, match="A: wanted a Hermitian matrix"):
        linalg.ic0(bg.bsr_array(MATRICES[name], blocksize=(2, 2)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("name", ["shifted by an imaginary number", "imaginary", "convection", "mostly skew"])
def test_conjugate_gradients_name_a_matrix_that_is_not_hermitian(name: str, k: int | None, dtype: Any) -> None:
    dense = MATRICES[name].astype(np.result_type(dtype, np.complex64 if MATRICES[name].dtype.kind == "c" else dtype))
    A, b = bg.bsr_array(dense, blocksize=(2, 2)), numbers(N if k is None else (N, k), dtype)
    assert A.dtype.itemsize in (np.dtype(dtype).itemsize, 2 * np.dtype(dtype).itemsize)
    for M in (None, linalg.block_jacobi(A)):
        with pytest.warns(linalg.SolverWarning, match="A is not Hermitian, and cg is for matrices that are; try gmres"):
            _, info = linalg.cg(A, b, M=M, maxiter=N)
        assert info != 0


def nearly_singular(dtype: Any) -> Any:
    """Free ends: constants are mapped to 0 but for a little."""
    dense = CHAIN + np.diag([-1.0 + 1e-5, *[0.0] * (N - 2), -1.0])
    return bg.bsr_array(dense.astype(dtype), blocksize=(2, 2))


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize(
    "make",
    [
        lambda d: -laplacian(60, 2, d),
        lambda d: laplacian(60, 2, d) - bg.eye(N, blocksize=(2, 2), dtype=d),
        nearly_singular,
    ],
    ids=["negative", "indefinite", "nearly singular"],
)
def test_other_failures_are_not_blamed_on_symmetry(make: Any, dtype: Any) -> None:
    A = make(dtype)
    for b in (np.ones(N, dtype), numbers(N, dtype), np.arange(N, dtype=dtype)):
        for solve in (linalg.cg, linalg.minres):
            for most in (1, 3, 40):
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    solve(A, b, rtol=1e-30, maxiter=most)
                assert told and not any("Hermitian" in str(warning.message) for warning in told)


def test_too_few_iterations_cost_no_product_more() -> None:
    A = hermitian(40)
    made = []

    class Counted:
        shape, dtype = A.shape, A.dtype

        def __matmul__(self, x: Any) -> Any:
            made.append(1)
            return A @ x

    with pytest.warns(linalg.SolverWarning, match="not converged after 2 iterations"):
        linalg.cg(Counted(), numbers(40), rtol=1e-12, maxiter=2)
    assert len(made) == 3  # two iterations, and the residual after them


def test_eigenvalues_of_a_matrix_that_is_not_hermitian_come_with_a_warning() -> None:
    A = bg.bsr_array(np.diag(np.arange(1.0, 101)) + np.triu(numbers((100, 100)), 1), blocksize=(2, 2))
    with pytest.warns(UserWarning, match="Exited"):
        linalg.lobpcg(A, numbers((100, 3)), largest=False, maxiter=60, tol=1e-6)


@pytest.mark.parametrize("name", ["shifted by an imaginary number", "a triangle"])
def test_multigrid_serves_gmres_where_the_hermitian_part_outweighs_the_rest(name: str) -> None:
    A = bg.bsr_array(MATRICES[name], blocksize=(2, 2))
    x, info = linalg.gmres(A, numbers(N), M=PRECONDITIONERS["smoothed_aggregation"](A), rtol=1e-8)
    assert info == 0
    np.testing.assert_allclose(MATRICES[name] @ x, numbers(N), atol=1e-6)
