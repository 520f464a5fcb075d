"""The Krylov methods against dense solutions, with one and several right-hand sides, and what stops them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as spla

import bsrgemm as bg
from bsrgemm import linalg

from .problems import hermitian, laplacian, lopsided, numbers

METHODS: dict[str, Callable[..., Any]] = {
    name: getattr(linalg, name) for name in ("cg", "minres", "bicgstab", "gmres", "fgmres")
}
SYMMETRIC = ("cg", "minres")
DTYPES = ("float32", "float64", "complex64", "complex128")


def matrix_for(method: str, n: int, dtype: Any = np.float64) -> Any:
    return hermitian(n, dtype) if method in SYMMETRIC else lopsided(n, dtype)


@pytest.fixture(autouse=True)
def told(request: pytest.FixtureRequest) -> Any:
    """A solver that fails must be expected to."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", linalg.SolverWarning)
        yield


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [None, 1, 3])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_the_solution_is_that_of_the_dense_system(
    method: str, dtype: str, columns: int | None, preconditioned: bool
) -> None:
    A = matrix_for(method, 40, dtype)
    b = numbers(40 if columns is None else (40, columns), dtype)
    M = linalg.block_jacobi(A) if preconditioned else None
    rtol = 1e-4 if dtype in ("float32", "complex64") else 1e-10
    x, info = METHODS[method](A, b, M=M, rtol=rtol)
    assert info == 0 and x.shape == b.shape and x.dtype == b.dtype
    left = np.linalg.norm(b - A.toarray() @ x, axis=0)
    assert (left <= 1.01 * rtol * np.linalg.norm(b, axis=0)).all()
    np.testing.assert_allclose(x, np.linalg.solve(A.toarray(), b), rtol=0, atol=20 * rtol * np.abs(x).max())


@pytest.mark.parametrize("method", METHODS)
def test_columns_do_not_disturb_each_other(method: str) -> None:
    """A column of zeros, one that is solved at once, and two of very different size."""
    A = matrix_for(method, 40)
    b = numbers((40, 4))
    b[:, 0], b[:, 1] = 0, A @ np.ones(40)
    b[:, 3] *= 1e-8
    x0 = np.zeros_like(b)
    x0[:, 1] = 1
    x, info = METHODS[method](A, b, x0, rtol=1e-10)
    assert info == 0
    assert not x[:, 0].any()
    np.testing.assert_allclose(x, np.linalg.solve(A.toarray(), b), rtol=1e-7)
    for column in range(4):
        alone, _ = METHODS[method](A, b[:, column], x0[:, column], rtol=1e-10)
        np.testing.assert_allclose(x[:, column], alone, rtol=1e-7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["scipy", "operator", "dense"])
def test_other_matrices_and_preconditioners_are_taken(method: str, kind: str) -> None:
    A, b = matrix_for(method, 40), numbers(40)
    other: Any = {"scipy": A.tocsr(), "operator": spla.aslinearoperator(A.tocsr()), "dense": A.toarray()}[kind]
    M = sp.diags_array(1 / A.diagonal())
    if kind == "operator":
        M = spla.aslinearoperator(M)
    x, info = METHODS[method](other, b, M=M, rtol=1e-10)
    assert info == 0
    np.testing.assert_allclose(A @ x, b, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_it_starts_where_it_is_told_and_leaves_its_operands_alone(method: str) -> None:
    A, b = matrix_for(method, 40), numbers(40)
    solution = np.linalg.solve(A.toarray(), b)
    x0, before = solution.copy(), (b.copy(), A.toarray())
    steps: list[Any] = []
    x, info = METHODS[method](A, b, x0, rtol=1e-6, callback=steps.append)
    assert info == 0 and not steps
    np.testing.assert_array_equal(x, x0)
    x, info = METHODS[method](A, b, x0 + 1, rtol=1e-6)
    assert info == 0
    np.testing.assert_array_equal(x0, solution)
    np.testing.assert_array_equal(b, before[0])
    np.testing.assert_array_equal(A.toarray(), before[1])


@pytest.mark.parametrize("method", METHODS)
def test_the_number_of_iterations_is_that_of_the_callback_and_is_limited(method: str) -> None:
    A, b = matrix_for(method, 40), numbers(40)
    steps: list[Any] = []
    options: dict[str, Any] = {"maxiter": 1, "restart": 3} if "gmres" in method else {"maxiter": 3}
    with pytest.warns(linalg.SolverWarning, match=rf"{method}: not converged after 3 iterations: the norm of"):
        _, info = METHODS[method](A, b, rtol=1e-12, callback=steps.append, **options)
    assert info == len(steps) == 3


def test_callbacks_of_gmres_get_the_norm_or_the_solution() -> None:
    A, b = lopsided(40), numbers(40)
    norms: list[float] = []
    x, _ = linalg.gmres(A, b, rtol=1e-8, restart=40, callback=norms.append)
    assert all(a >= b for a, b in itertools.pairwise(norms)) and norms[-1] <= 1e-8
    assert norms[-1] == pytest.approx(np.linalg.norm(b - A @ x) / np.linalg.norm(b), rel=1e-3)
    found: list[Any] = []
    x, _ = linalg.gmres(A, b, rtol=1e-8, restart=7, callback=found.append, callback_type="x")
    assert len(found) > 1
    np.testing.assert_array_equal(found[-1], x)


def test_cg_needs_as_many_iterations_as_scipys() -> None:
    A, b = laplacian(60, 2), numbers(120)
    ours: list[Any] = []
    theirs: list[Any] = []
    x, _ = linalg.cg(A, b, rtol=1e-10, callback=ours.append)
    y, _ = spla.cg(A.tocsr(), b, rtol=1e-10, callback=theirs.append)
    assert abs(len(ours) - len(theirs)) <= 1
    np.testing.assert_allclose(x, y, rtol=1e-6)


def test_gmres_finds_the_least_residual() -> None:
    """After k steps the residual is that of the best vector in the Krylov space."""
    A, b = lopsided(12), numbers(12)
    dense = A.toarray()
    for k in (1, 3, 6):
        with pytest.warns(linalg.SolverWarning):
            x, _ = linalg.gmres(A, b, rtol=0, restart=k, maxiter=1)
        space = np.stack([np.linalg.matrix_power(dense, i) @ b for i in range(k)], axis=1)
        best = np.linalg.lstsq(dense @ space, b, rcond=None)[0]
        want = np.linalg.norm(b - dense @ space @ best)
        assert np.linalg.norm(b - dense @ x) == pytest.approx(want, rel=1e-6)


def test_fgmres_takes_a_preconditioner_that_changes() -> None:
    A, b = lopsided(40), numbers(40)
    calls = []

    class Changing:
        shape = (40, 40)

        def __matmul__(self, r: Any) -> Any:
            calls.append(1)
            return r / (2 + len(calls) % 3)

    x, info = linalg.fgmres(A, b, M=Changing(), rtol=1e-9)
    assert info == 0 and calls
    np.testing.assert_allclose(A @ x, b, atol=1e-7)


@pytest.mark.parametrize("method", ["cg", "minres", "gmres"])
def test_a_preconditioner_in_float32_serves_a_system_in_float64(method: str) -> None:
    A, b = hermitian(40), numbers(40)
    counts = []
    for M in (linalg.block_jacobi(A), linalg.block_jacobi(A.astype("float32"))):
        steps: list[Any] = []
        x, info = METHODS[method](A, b, M=M, rtol=1e-12, callback=steps.append)
        assert info == 0 and x.dtype == np.float64
        counts.append(len(steps))
    assert abs(counts[0] - counts[1]) <= 1


@pytest.mark.parametrize("make", [linalg.block_jacobi, linalg.chebyshev, linalg.ilu0, linalg.smoothed_aggregation])
def test_a_real_preconditioner_serves_complex_right_hand_sides(make: Callable[[Any], Any]) -> None:
    A, b = laplacian(20, 2), numbers((40, 2), "complex128")
    M = make(A)
    np.testing.assert_allclose(M @ b, (M @ b.real) + 1j * (M @ b.imag))
    x, info = linalg.cg(A, b, M=M, rtol=1e-10)
    assert info == 0
    np.testing.assert_allclose(A @ x, b, atol=1e-7)


def test_preconditioners_do_not_cut_off_what_the_vector_cannot_hold() -> None:
    A = bg.bsr_array(np.diag([2.0, 4, 8, 16]), blocksize=(2, 2))
    found = linalg.block_jacobi(A) @ np.ones(4, int)
    np.testing.assert_array_equal(found, [0.5, 0.25, 0.125, 0.0625])
    turned = linalg.block_jacobi(A * 1j) @ np.ones(4)
    np.testing.assert_array_equal(turned, [-0.5j, -0.25j, -0.125j, -0.0625j])
    assert (linalg.block_jacobi(A) @ np.ones(4, np.float32)).dtype == np.float32


@pytest.mark.parametrize("method", METHODS)
def test_a_warning_names_the_line_that_called_the_solver(method: str) -> None:
    with pytest.warns(linalg.SolverWarning) as said:
        METHODS[method](matrix_for(method, 40), numbers(40), rtol=1e-12, maxiter=1)
    assert said[0].filename == __file__


def test_a_solver_may_be_the_preconditioner_of_another_one() -> None:
    A, b = laplacian(20, 2), numbers(40)

    class Inner:
        shape = A.shape

        def __matmul__(self, r: Any) -> Any:
            return linalg.cg(A, r, rtol=1e-2)[0]

    x, info = linalg.fgmres(A, b, M=Inner(), rtol=1e-9)
    assert info == 0
    np.testing.assert_allclose(A @ x, b, atol=1e-7)


# ------------------------------------------------------------------------------------------------- failures
def test_an_indefinite_matrix_is_told() -> None:
    A = bg.bsr_array(np.diag([1.0, 2.0, -3.0, 4.0]), blocksize=(2, 2))
    with pytest.warns(linalg.SolverWarning, match="cg: A is not positive definite; stopped after"):
        _, info = linalg.cg(A, np.ones(4), rtol=1e-10)
    assert info == -1
    x, info = linalg.minres(A, np.ones(4), rtol=1e-10)
    assert info == 0
    np.testing.assert_allclose(A @ x, 1)


@pytest.mark.parametrize("method", SYMMETRIC)
def test_an_indefinite_preconditioner_is_told(method: str) -> None:
    A = hermitian(8)
    with pytest.warns(linalg.SolverWarning, match="M is not positive definite"):
        _, info = METHODS[method](A, numbers(8), M=-np.eye(8))
    assert info == -1


@pytest.mark.parametrize("method", METHODS)
def test_a_singular_matrix_does_not_pass_for_solved(method: str) -> None:
    A = bg.bsr_array(np.diag([1.0, 2.0, 0.0, 4.0]), blocksize=(2, 2))
    with pytest.warns(linalg.SolverWarning):
        _, info = METHODS[method](A, np.ones(4), rtol=1e-8, maxiter=50)
    assert info != 0


@pytest.mark.parametrize("method", METHODS)
def test_a_matrix_with_nan_is_told(method: str) -> None:
    A = hermitian(8)
    A.data[0, 0, 0] = np.nan
    with pytest.warns(linalg.SolverWarning, match="NaN or infinity has appeared"):
        _, info = METHODS[method](A, numbers(8), maxiter=30)
    assert info == -1


def test_the_worst_column_is_named() -> None:
    A, b = laplacian(40), np.zeros((40, 3))
    b[:, 1] = 1
    with pytest.warns(linalg.SolverWarning, match="not converged after 2 iterations in column 1"):
        linalg.cg(A, b, rtol=1e-10, maxiter=2)


def test_a_breakdown_of_bicgstab_is_left_by_starting_again() -> None:
    """The first shadow residual is orthogonal to A times itself."""
    A = bg.bsr_array(np.array([[0.0, 1], [-1, 0]]), blocksize=(2, 2))
    with pytest.warns(linalg.SolverWarning, match="a factor of the recurrence is 0"):
        _, info = linalg.bicgstab(A, np.array([1.0, 0.0]))
    assert info == -1


A, b = hermitian(8), np.ones(8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: linalg.cg(A, ["a"] * 8), TypeError, "b: wanted numbers, got <U1"),
        (lambda: linalg.cg(A, [[1.0], [1.0, 2.0]]), ValueError, "b: wanted numbers in rows of one length, got a list"),
        (lambda: linalg.cg(A, {1.0}), TypeError, "b: wanted a NumPy or CuPy array, got set"),
        (lambda: linalg.cg(A, A), TypeError, "b: wanted a dense array"),
        (lambda: linalg.cg(A, np.ones((8, 1, 1))), ValueError, r"b: wanted shape \(n,\) or \(n, k\)"),
        (lambda: linalg.cg(A, np.ones(0)), ValueError, r"A: wanted shape \(0, 0\), as b has 0 rows, got \(8, 8\)"),
        (lambda: linalg.cg(A, np.ones(8, object)), TypeError, "b: wanted numbers, got object"),
        (lambda: linalg.cg(A, np.ones(9)), ValueError, r"A: wanted shape \(9, 9\), as b has 9 rows, got \(8, 8\)"),
        (lambda: linalg.cg(3, b), TypeError, "A: wanted a matrix or a linear operator, got int"),
        (lambda: linalg.cg(A, b * np.nan), ValueError, "b: wanted finite numbers, got NaN or infinity"),
        (lambda: linalg.cg(A, b, np.ones(7)), ValueError, r"x0: wanted an array of shape \(8,\)"),
        (lambda: linalg.cg(A, b, "Mb"), ValueError, "x0: wanted an array of shape"),
        (lambda: linalg.cg(A, b, rtol=-1), ValueError, "rtol: wanted a finite number from 0 on, got -1"),
        (lambda: linalg.cg(A, b, atol=np.inf), ValueError, "atol: wanted a finite number"),
        (lambda: linalg.cg(A, b, maxiter=2.5), ValueError, "maxiter: wanted an integer from 0 on"),
        (lambda: linalg.cg(A, b, M=np.eye(7)), ValueError, "M: wanted shape"),
        (lambda: linalg.cg(A.astype("longdouble"), b), TypeError, "A, b: wanted float32"),
        (lambda: linalg.gmres(A, b, restart=0), ValueError, "restart: wanted an integer from 1 on"),
        (lambda: linalg.gmres(A, b, callback_type="legacy"), ValueError, "callback_type: wanted 'pr_norm' or 'x'"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_integers_are_solved_in_float64() -> None:
    x, info = linalg.cg(hermitian(8), np.arange(8))
    assert info == 0 and x.dtype == np.float64


# ------------------------------------------------------------------------------------------------- others' solvers
def test_eigenvalues_and_direct_solutions() -> None:
    A = hermitian(40)
    want = np.linalg.eigvalsh(A.toarray())
    values, _ = linalg.lobpcg(A, numbers((40, 3)), M=linalg.block_jacobi(A), largest=False, tol=1e-9, maxiter=200)
    np.testing.assert_allclose(np.sort(values), want[:3], rtol=1e-6)
    np.testing.assert_allclose(np.sort(spla.eigsh(A, k=3, return_eigenvectors=False)), want[-3:], rtol=1e-6)
    np.testing.assert_allclose(np.sort(spla.svds(A, k=2, return_singular_vectors=False)), want[-2:], rtol=1e-6)
    for shape in (40, (40, 3)):
        b = numbers(shape)
        np.testing.assert_allclose(linalg.spsolve(A, b), np.linalg.solve(A.toarray(), b))
    with pytest.raises(TypeError, match="X: wanted a NumPy or CuPy array, got list"):
        linalg.lobpcg(A, [[1.0]])
    with pytest.raises(TypeError, match="A: wanted a bsr_array"):
        linalg.spsolve(A.toarray(), b)
    with pytest.raises(ValueError, match="A: wanted a square matrix"):
        linalg.spsolve(A[:2], b)
    with pytest.raises(ValueError, match=r"b: wanted a dense array \(40,\)"):
        linalg.spsolve(A, np.ones(3))
    with pytest.raises(RuntimeError, match="singular"):
        linalg.spsolve(bg.bsr_array((4, 4), blocksize=(2, 2), dtype=float), np.ones(4))


@pytest.mark.parametrize("make", [linalg.block_jacobi, linalg.chebyshev])
def test_preconditioners_serve_scipys_solvers(make: Callable[[Any], Any]) -> None:
    A, b = laplacian(40, 2), numbers(80)
    M = make(A)
    for solve in (spla.cg, spla.gmres, spla.bicgstab):
        x, info = solve(A, b, M=M, rtol=1e-8)
        assert info == 0
        np.testing.assert_allclose(A @ x, b, atol=1e-5)


@pytest.mark.parametrize("make", [linalg.block_jacobi, linalg.chebyshev])
def test_preconditioners_are_linear_symmetric_and_positive(make: Callable[[Any], Any]) -> None:
    A = laplacian(20, 2)
    M = make(A) @ np.eye(40)
    np.testing.assert_allclose(M, M.T, atol=1e-12)
    assert np.linalg.eigvalsh(M).min() > 0
    x = numbers(40)
    np.testing.assert_allclose(make(A) @ x, M @ x, atol=1e-12)
    np.testing.assert_allclose(make(A)(x), M @ x, atol=1e-12)
    np.testing.assert_allclose(make(A).rmatvec(x), M.T @ x, atol=1e-12)


def test_chebyshev_of_a_higher_degree_needs_fewer_iterations() -> None:
    A, b = laplacian(80, 2), numbers(160)
    counts = []
    for M in (linalg.block_jacobi(A), *(linalg.chebyshev(A, degree) for degree in (2, 4, 8))):
        steps: list[Any] = []
        assert linalg.cg(A, b, M=M, rtol=1e-8, callback=steps.append)[1] == 0
        counts.append(len(steps))
    assert counts == sorted(counts, reverse=True) and counts[-1] < counts[0] / 3


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: linalg.block_jacobi(A.toarray()), TypeError, "A: wanted a bsr_array or bsr_matrix, got ndarray"),
        (lambda: linalg.block_jacobi(A[:4]), ValueError, "A: wanted a square matrix"),
        (lambda: linalg.block_jacobi(A.tobsr((4, 2))), ValueError, "A: wanted square blocks"),
        (lambda: linalg.block_jacobi(A.astype("float16")), TypeError, "A: wanted float32, float64"),
        (lambda: linalg.block_jacobi(A * 0), ValueError, "A: diagonal block 0 is singular"),
        (lambda: linalg.chebyshev(A, 0), ValueError, "degree: wanted an integer from 1 on, got 0"),
        (lambda: linalg.chebyshev(A, low=2), ValueError, "low, high: wanted 0 < low < high"),
        (lambda: linalg.block_jacobi(A) @ np.ones(7), ValueError, r"r: wanted shape \(8,\) or \(8, k\), got \(7,\)"),
        (lambda: linalg.block_jacobi(A) @ {1.0}, TypeError, "r: wanted a dense array on 'cpu', got a set"),
    ],
)  # fmt: skip
def test_bad_matrices_are_named(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
