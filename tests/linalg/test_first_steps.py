"""What a new user passes: lists, booleans, columns, matrices without rows, masked arrays, operands that are none."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.dtypes import BFLOAT16

from .problems import hermitian, numbers

N = 12
SOLVERS = [linalg.cg, linalg.minres, linalg.bicgstab, linalg.gmres, linalg.fgmres]
BY_NAME = {"ids": lambda x: getattr(x, "__name__", None)}


class Marked(bg.bsr_array):
    """A subclass of a user."""


def solved(A: Any, b: Any, x: Any) -> None:
    np.testing.assert_allclose(A.toarray() @ np.asarray(x), np.asarray(b, x.dtype), rtol=0, atol=1e-8)


RIGHT_HAND_SIDES: dict[str, Any] = {
    "list": list(range(N)),
    "tuple": tuple(range(N)),
    "list of rows": [[k, 1.0] for k in range(N)],
    "booleans": np.arange(N) > 3,
    "integers": np.arange(N),
    "half": np.arange(N, dtype=np.float16),
    "column": np.arange(1.0, N + 1)[:, None],
    "by columns": np.asfortranarray(numbers((N, 3))),
    "every second": numbers(2 * N)[::2],
    "backwards": numbers(N)[::-1],
    "read-only": np.broadcast_to(1.0, (N,)),
    "other bytes": np.arange(N, dtype=">f8"),
    "zeros": np.zeros(N),
    "no columns": np.zeros((N, 0)),
    "a matrix of NumPy": np.asmatrix(np.arange(N)).T,
    "nothing masked": np.ma.array(np.arange(1.0, N + 1)),
}


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("kind", RIGHT_HAND_SIDES)
@pytest.mark.parametrize("solve", [*SOLVERS, linalg.spsolve], **BY_NAME)
def test_right_hand_sides_of_all_kinds_are_solved(solve: Any, kind: str) -> None:
    A, b = hermitian(N), RIGHT_HAND_SIDES[kind]
    found = solve(A, b) if solve is linalg.spsolve else solve(A, b, rtol=1e-12)
    x = found if solve is linalg.spsolve else found[0]
    assert solve is linalg.spsolve or found[1] == 0
    assert type(x) is np.ndarray and x.shape == np.shape(b) and x.dtype == np.float64
    solved(A, b, x)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("kind", RIGHT_HAND_SIDES)
def test_triangles_and_constraints_take_the_same_right_hand_sides(kind: str) -> None:
    A, b = hermitian(N), RIGHT_HAND_SIDES[kind]
    lower = bg.bsr_array(np.tril(A.toarray()), blocksize=(2, 2))
    x = linalg.spsolve_triangular(lower, b)
    assert type(x) is np.ndarray and x.shape == np.shape(b)
    solved(lower, b, x)
    fixed, load = linalg.constrain(A, b, [0], 2.0)
    assert type(load) is np.ndarray and load.shape == np.shape(b)
    np.testing.assert_allclose(np.linalg.solve(fixed.toarray(), load)[0], np.full(np.shape(b)[1:], 2.0))


@pytest.mark.parametrize("solve", SOLVERS, **BY_NAME)
def test_bfloat16_is_solved_in_wider_numbers(solve: Any) -> None:
    A, b = hermitian(N), np.arange(N).astype(BFLOAT16)
    for matrix, dtype in ((A, np.float64), (A.astype(BFLOAT16), np.float32), (A.astype(np.float16), np.float32)):
        x, info = solve(matrix, b, rtol=1e-5)
        assert info == 0 and x.dtype == dtype
        np.testing.assert_allclose(A.toarray() @ x, np.arange(N), atol=1e-3)


@pytest.mark.parametrize("solve", SOLVERS, **BY_NAME)
def test_a_start_may_be_a_list_and_zeros_have_the_solution_0(solve: Any) -> None:
    A, b = hermitian(N), numbers(N)
    exact = np.linalg.solve(A.toarray(), b)
    x, info = solve(A, b, x0=exact.tolist(), maxiter=0)
    assert info == 0 and (x == exact).all()
    x, info = solve(A, 0 * b, x0=exact.tolist())
    assert info == 0 and not x.any()
    for x0, message in (
        ([1.0], "x0: wanted an array"),
        (["a"] * N, "x0: wanted numbers, got"),
        ([[1], [2, 3]], "x0: "),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            solve(A, b, x0=x0)


@pytest.mark.parametrize("solve", SOLVERS, **BY_NAME)
def test_no_iterations_are_told(solve: Any) -> None:
    with pytest.warns(linalg.SolverWarning, match="not converged after 0 iterations"):
        x, info = solve(hermitian(N), np.ones(N), maxiter=0)
    assert info == 1 and not x.any()


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("solve", SOLVERS, **BY_NAME)
def test_the_smallest_matrices_are_solved(solve: Any, size: int) -> None:
    A = bg.bsr_array(2 * np.eye(size), blocksize=(1, 1))
    for M in (None, linalg.block_jacobi(A), linalg.smoothed_aggregation(A), linalg.ilu0(A)):
        for shape in ((size,), (size, 3)):
            x, info = solve(A, np.ones(shape), M=M, x0=np.zeros(shape))
            assert info == 0 and x.shape == shape and (abs(x - 0.5) < 1e-12).all()


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_a_batch_takes_plain_arrays_and_may_have_no_rows() -> None:
    A = hermitian(N)
    batch = bg.bsr_batch([A, 2 * A])
    b = np.ma.array([[1.0] * N, [2.0] * N])  # nothing is masked
    x, info = linalg.cg(batch, b, x0=np.asmatrix(0 * b), rtol=1e-12)
    assert type(x) is np.ndarray
    assert (info == 0).all()
    np.testing.assert_allclose(x[0], np.linalg.solve(A.toarray(), np.ones(N)))
    np.testing.assert_allclose(x[1], x[0])
    empty = bg.bsr_batch([bg.bsr_array((0, 0), blocksize=(2, 2))] * 2)
    x, info = linalg.cg(empty, np.zeros((2, 0)))
    assert x.shape == (2, 0) and info.tolist() == [0, 0]
    with pytest.raises(TypeError, match="b: wanted numbers, got object"):
        linalg.cg(batch, np.ones((2, N), object))


MASKED = np.ma.array(np.arange(1.0, N + 1), mask=np.arange(N) > 9)


@pytest.mark.parametrize("solve", [*SOLVERS, linalg.spsolve, linalg.spsolve_triangular], **BY_NAME)
def test_masked_elements_are_refused(solve: Any) -> None:
    """Norms leave them out: a wrong x would be called a solution."""
    A = bg.bsr_array(3 * np.eye(N), blocksize=(2, 2))
    with pytest.raises(ValueError, match=r"b: wanted a number everywhere, got masked elements; b.filled\(0\)"):
        solve(A, MASKED)
    if solve in SOLVERS:
        with pytest.raises(ValueError, match="x0: wanted a number everywhere, got masked elements"):
            solve(A, np.ones(N), x0=MASKED)


def test_masked_elements_are_refused_elsewhere() -> None:
    A = bg.bsr_array(3 * np.eye(N), blocksize=(2, 2))
    with pytest.raises(ValueError, match="r: wanted a number everywhere"):
        linalg.block_jacobi(A) @ MASKED
    with pytest.raises(ValueError, match="b: wanted a number everywhere"):
        linalg.cg(bg.bsr_batch([A]), MASKED[None])
    with pytest.raises(ValueError, match="b: wanted a number everywhere"):
        linalg.constrain(A, MASKED, [0])
    with pytest.raises(ValueError, match="near_nullspace: wanted a number everywhere"):
        linalg.smoothed_aggregation(A, MASKED)
    with pytest.raises(ValueError, match="coordinates: wanted a number everywhere"):
        linalg.rigid_body_modes(MASKED.reshape(6, 2))


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        linalg.block_jacobi,
        linalg.chebyshev,
        linalg.block_ssor,
        linalg.ilu0,
        linalg.ic0,
        linalg.smoothed_aggregation,
    ],
    **BY_NAME,
)
def test_preconditioners_take_a_matrix_of_numpy_as_an_array(make: Any) -> None:
    M, r = make(hermitian(N)), np.arange(1.0, N + 1)
    found = M @ np.asmatrix(r).T
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found[:, 0], M @ r)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_modes_and_coordinates_may_be_matrices_of_numpy() -> None:
    points = np.random.default_rng(0).random((5, 3))
    np.testing.assert_array_equal(linalg.rigid_body_modes(np.asmatrix(points)), linalg.rigid_body_modes(points))
    A, modes = hermitian(600), np.ones((600, 1))
    found, want = (linalg.smoothed_aggregation(A, B, max_coarse=50) for B in (np.asmatrix(modes), modes))
    np.testing.assert_array_equal(found @ np.ones(600), want @ np.ones(600))
    with pytest.raises(TypeError, match="near_nullspace: wanted numbers, got object"):
        linalg.smoothed_aggregation(A, modes.astype(object))
    with pytest.raises(TypeError, match="coordinates: wanted a NumPy or CuPy array of real numbers, got complex128"):
        linalg.rigid_body_modes(points * 1j)
    with pytest.raises(ValueError, match=r"X: wanted an array \(n, k\) of numbers, got float64 of shape \(600, 0\)"):
        linalg.lobpcg(A, np.zeros((600, 0)))


@pytest.mark.parametrize("spoiled", [np.nan, np.inf])
@pytest.mark.parametrize("make", [linalg.block_ssor, linalg.ilu0, linalg.ic0], **BY_NAME)
def test_triangles_of_numbers_that_are_not_finite_are_refused(make: Any, spoiled: float) -> None:
    for k in (0, 1, -1, -2):
        A = hermitian(N)
        A.data[k, 0, 0] = spoiled
        for matrix in (A, A.T):
            with pytest.raises(ValueError, match="A: wanted finite numbers, got NaN or infinity"):
                make(matrix)


@pytest.mark.parametrize("solve", [*SOLVERS, linalg.lobpcg], **BY_NAME)
def test_operands_that_are_no_matrices_are_refused_by_their_type(solve: Any) -> None:
    A, b = hermitian(N), np.ones((N, 1))
    for operand, end in (([[1.0]], "list; bsr_array.%s. makes one"), (None, "NoneType$"), ("jacobi", "str$")):
        with pytest.raises(TypeError, match="A: wanted a matrix or a linear operator, got " + end.replace("%s", "A")):
            solve(operand, b)
        if operand is not None:
            with pytest.raises(
                TypeError, match="M: wanted a matrix or a linear operator, got " + end.replace("%s", "M")
            ):
                solve(A, b, M=operand)
    if solve is not linalg.lobpcg:  # which takes functions
        with pytest.raises(TypeError, match=r"got function; scipy.sparse.linalg.LinearOperator makes one"):
            solve(A, b, M=lambda r: r)


@pytest.mark.parametrize("solve", SOLVERS, **BY_NAME)
def test_matrices_of_all_kinds_give_the_same_solution(solve: Any) -> None:
    A, b = hermitian(N), numbers(N)
    dense = A.toarray()
    want = solve(A, b, rtol=1e-10)[0]
    kinds = [
        bg.bsr_matrix(A),
        Marked(dense, blocksize=(2, 2)),
        A.T,
        A.T.T,
        A.tobsr((3, 4)),
        sp.csr_array(dense),
        sp.csc_matrix(dense),
        sp.bsr_array(dense),
        dense,
        scipy.sparse.linalg.aslinearoperator(dense),
        A.astype(np.int64),
        A.astype(np.float32),
    ]
    for matrix in kinds:
        x, info = solve(matrix, b, rtol=1e-10)
        assert info == 0 and x.dtype == np.float64
        np.testing.assert_allclose(x, want, atol=1e-8)


@pytest.mark.parametrize("solve", SOLVERS, **BY_NAME)
def test_an_error_of_a_callback_goes_to_the_caller_and_the_next_solve_is_whole(solve: Any) -> None:
    A, b = hermitian(N), numbers(N)
    M = linalg.block_jacobi(A)

    def stop(x: Any) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        solve(A, b, M=M, callback=stop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, info = solve(A, b, M=M, rtol=1e-12)
    assert info == 0
    solved(A, b, x)
