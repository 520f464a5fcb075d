"""Right-hand sides at the edges of what norms can measure, signatures of scipy's functions, and stalled recurrences."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg as spla

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.interop import mpi
from bsrgemm.linalg.operators import stalled, worst_ratio

from ..interop.ranks import run
from .problems import hermitian, laplacian, numbers

METHODS: dict[str, Any] = {name: getattr(linalg, name) for name in ("cg", "minres", "bicgstab", "gmres", "fgmres")}


@pytest.fixture(autouse=True)
def told() -> Any:
    """A solver that fails must be expected to."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", linalg.SolverWarning)
        warnings.simplefilter("error", np.exceptions.ComplexWarning)
        yield


@pytest.mark.parametrize("name", ["cg", "minres", "bicgstab", "gmres", "lobpcg"])
def test_keywords_and_defaults_are_those_of_scipy(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (linalg, spla))
    for key, parameter in theirs.items():
        assert key in ours and ours[key].default == parameter.default, key
        assert ours[key].kind == parameter.kind, key
    assert set(ours) - set(theirs) <= {"atol"}


# ------------------------------------------------------------------------------------------------- right-hand sides
@pytest.mark.parametrize("method", METHODS)
def test_the_solution_for_zeros_is_zero_wherever_it_starts(method: str) -> None:
    A, b = hermitian(12), numbers(12)
    calls: list[Any] = []
    x, info = METHODS[method](A, 0 * b, b, callback=calls.append)
    assert info == 0 and not x.any() and not calls
    B = np.stack([b, 0 * b, 2 * b], axis=1)
    X, info = METHODS[method](A, B, numbers((12, 3)), rtol=1e-9)
    assert info == 0 and not X[:, 1].any()
    np.testing.assert_allclose(A @ X, B, atol=1e-7)


def test_a_batch_solves_zeros_wherever_it_starts() -> None:
    batch = bg.bsr_batch([hermitian(12), 2 * hermitian(12)])
    for shape in ((2, 12), (2, 12, 3)):
        b, x0 = numbers(shape), numbers(shape, seed=1)
        b[1] = 0
        x, info = linalg.cg(batch, b, x0, rtol=1e-9)
        assert not info.any() and not x[1].any()
        np.testing.assert_allclose(batch @ x, b, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_squares_that_underflow_or_overflow_are_told(dtype: str) -> None:
    """The norm of such a vector is 0, and 0 would pass for its solution; or infinity, though its numbers are finite."""
    A, b = hermitian(8, dtype), np.ones(8, dtype)
    batch = bg.bsr_batch([A, A])
    limits = np.finfo(dtype)
    for factor, text in ((float(limits.tiny) ** 0.6, "underflow"), (float(limits.max) ** 0.6, "overflow")):
        wrong = (b * factor).astype(dtype)
        for solve in METHODS.values():
            with pytest.raises(ValueError, match=f"b: its squares {text} in {dtype}; scale b"):
                solve(A, wrong)
            with pytest.raises(ValueError, match=f"b: its squares {text}"):
                solve(A, np.stack([b, wrong], axis=1))
        with pytest.raises(ValueError, match=f"b: its squares {text}"):
            linalg.cg(batch, np.stack([b, wrong]))
    tiny = (b * float(limits.tiny) ** 0.6).astype(dtype)
    assert linalg.cg(A, tiny, atol=1e-3)[1] == 0  # nothing is to be done
    with pytest.raises(ValueError, match="b: wanted finite numbers, got NaN or infinity"):
        linalg.cg(A, np.where(np.arange(8) == 3, np.inf, b).astype(dtype))


def test_all_ranks_tell_what_the_numbers_of_one_are() -> None:
    A = hermitian(24)

    def program(comm: Any) -> None:
        D = mpi.partition(A, comm)
        b = np.zeros(len(D.rows))
        if comm.rank == 1:
            b[:] = 1e-200
        with pytest.raises(ValueError, match="b: its squares underflow in float64"):
            linalg.cg(D, b)
        with pytest.raises(ValueError, match="b: wanted finite numbers"):
            linalg.cg(D, b * np.inf if comm.rank == 1 else b)
        x, info = linalg.cg(D, 0 * b, np.ones(len(b)))
        assert info == 0 and not x.any()

    run(3, program)


@pytest.mark.parametrize("method", METHODS)
def test_matrices_of_numpy_are_taken_for_arrays(method: str) -> None:
    A, b = hermitian(8), numbers(8)
    want = np.linalg.solve(A.toarray(), b)
    dense, eye = np.asmatrix(A.toarray()), np.asmatrix(np.eye(8))
    x, info = METHODS[method](dense, b, rtol=1e-10, M=eye)
    assert info == 0 and type(x) is np.ndarray
    np.testing.assert_allclose(x, want)
    column, info = METHODS[method](A, np.asmatrix(b).T, rtol=1e-10)
    assert info == 0 and type(column) is np.ndarray and column.shape == (8, 1)
    np.testing.assert_allclose(column[:, 0], want)


@pytest.mark.parametrize("method", METHODS)
def test_a_complex_preconditioner_makes_the_system_complex(method: str) -> None:
    """No part of its results is dropped."""
    A, b = hermitian(10), numbers(10)
    turned = np.diag(np.exp(1j * np.arange(10)))
    M = turned @ np.linalg.inv(A.toarray()) @ turned.conj().T  # Hermitian, positive definite and complex
    x, info = METHODS[method](A, b, M=M, rtol=1e-9)
    assert info == 0 and x.dtype == np.complex128
    np.testing.assert_allclose(A @ x, b, atol=1e-7)
    assert METHODS[method](A.astype("float32"), b.astype("float32"), M=M, rtol=1e-3)[0].dtype == np.complex64


# ------------------------------------------------------------------------------------------------- minres
def test_minres_shifts_the_diagonal() -> None:
    A, b = hermitian(30), numbers((30, 2))
    x, info = linalg.minres(A, b, shift=3.3, rtol=1e-10)
    assert info == 0
    np.testing.assert_allclose(x, np.linalg.solve(A.toarray() - 3.3 * np.eye(30), b), rtol=1e-6, atol=1e-8)
    want, info = spla.minres(A.toarray(), b[:, 0], shift=3.3, rtol=1e-12)
    np.testing.assert_allclose(x[:, 0], want, rtol=1e-6, atol=1e-8)
    for wrong in (1j, np.nan, "1", True):
        with pytest.raises(ValueError, match="shift: wanted a finite real number"):
            linalg.minres(A, b, shift=wrong)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_minres_finds_operands_that_are_not_hermitian(dtype: str) -> None:
    A, b = hermitian(20, dtype), numbers(20, dtype)
    assert linalg.minres(A, b, M=linalg.block_jacobi(A), check=True)[1] == 0
    lopsided = (np.eye(20) + np.eye(20, k=1)).astype(dtype)
    with pytest.raises(ValueError, match="A: wanted a Hermitian matrix"):
        linalg.minres(lopsided, b, check=True)
    with pytest.raises(ValueError, match="M: wanted a Hermitian matrix"):
        linalg.minres(A, b, M=lopsided, check=True)


def test_minres_shows_its_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    A, b = hermitian(20), numbers(20)
    calls: list[Any] = []
    linalg.minres(A, b, callback=calls.append, show=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(calls) > 3
    assert lines[1].startswith("minres: iteration 2, norm of the residual ")
    linalg.minres(A, b)
    assert not capsys.readouterr().out


def test_a_recurrence_that_stalls_starts_again_from_the_true_residual() -> None:
    """Far from the solution, the first residual has rounding errors that are larger than what is wanted."""
    A = laplacian(20, 2, "float32")
    b, x0 = numbers(40, "float32"), 1e5 * numbers(40, "float32", seed=1)
    x, info = linalg.minres(A, b, x0, rtol=1e-4)
    assert info == 0
    np.testing.assert_allclose(A @ x, b, atol=1e-2)


@pytest.mark.parametrize(
    ("left", "want"),
    [
        ([1e9, *[10.0] * 11], True),
        ([1e9, *[10.0] * 4], False),  # too few iterations
        ([1e9, *[0.5] * 11], False),  # solved
        ([1e7, *[10.0] * 11], False),  # rounding does not explain it
        ([1e9, *(10.0 * 0.9**k for k in range(12))], False),  # it goes on
        ([np.inf, *[np.inf] * 12], False),
        ([np.nan] * 12, False),
    ],
)
def test_recurrences_stall_at_their_rounding_errors(left: list[float], want: bool) -> None:
    assert stalled(left, 1e-9) is want


def test_a_residual_of_zero_is_not_too_large() -> None:
    with np.errstate(all="ignore"):
        assert worst_ratio(np.array([0.0, 3.0]), np.array([0.0, 2.0])) == 1.5
        assert worst_ratio(np.array([1.0, 3.0]), np.array([0.0, 2.0])) == np.inf


# ------------------------------------------------------------------------------------------------- several columns
@pytest.mark.parametrize("method", ["cg", "minres", "bicgstab"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_columns_that_are_solved_stay_as_they_are(method: str, dtype: str) -> None:
    """An eigenvector is solved at once, and its recurrence would go on with rounding errors for hundreds of steps."""
    n = 400
    A = laplacian(n, 1, dtype)
    k = np.arange(1, n + 1)
    easy = np.sin(np.pi * k * 7 / (n + 1))
    b = np.stack([easy, numbers(n), 1e8 * easy, easy + np.sin(np.pi * k * 3 / (n + 1))], axis=1).astype(dtype)
    seen: list[Any] = []
    x, info = METHODS[method](A, b, rtol=1e-3, callback=lambda x: seen.append(x[:, [0, 2]].copy()))
    assert info == 0 and len(seen) > 50
    left = np.linalg.norm(b - A @ x, axis=0) / np.linalg.norm(b, axis=0)
    assert (left <= 1.01e-3).all()
    first = next(
        i for i, y in enumerate(seen) if np.linalg.norm(b[:, [0, 2]] - A @ y) <= 5e-4 * np.linalg.norm(b[:, 2])
    )
    assert first < 20 and all(y.tobytes() == seen[first + 1].tobytes() for y in seen[first + 1 :])


@pytest.mark.parametrize("method", ["gmres", "fgmres"])
@pytest.mark.parametrize("columns", [None, 2])
def test_restarts_that_bring_nothing_end(method: str, columns: int | None) -> None:
    """A singular matrix, and a right-hand side without a solution: 10 n restarts would be made, all in vain."""
    dense = 2 * np.eye(40) - np.eye(40, k=1) - np.eye(40, k=-1)
    dense[0, 0] = dense[-1, -1] = 1
    A = bg.bsr_array(dense, blocksize=(2, 2))
    b = np.ones(40 if columns is None else (40, columns))
    b[:3] = 7
    if columns is not None:
        b[:, 1] = dense @ np.arange(40.0)  # this one has a solution
    with pytest.warns(linalg.SolverWarning, match="iterations, of which the last 4 restarts brought nothing") as said:
        x, info = getattr(linalg, method)(A, b, restart=15, rtol=1e-10)
    assert len(said) == 1 and 60 <= info < 40 * 15
    if columns is not None:
        np.testing.assert_allclose(dense @ x[:, 1], b[:, 1], atol=1e-7)


def test_slow_restarts_go_on() -> None:
    """Restarts of 2 bring little, but something: that is no reason to end."""
    A = bg.bsr_array(2 * np.eye(60) - np.eye(60, k=1) - np.eye(60, k=-1), blocksize=(2, 2))
    x, info = linalg.gmres(A, np.ones(60), restart=2, maxiter=20_000, rtol=1e-6)
    assert info == 0
    np.testing.assert_allclose(A @ x, 1, atol=1e-4)
