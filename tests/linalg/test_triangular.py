"""Colours and levels, incomplete decompositions against dense ones on the same pattern, and triangular solutions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.linalg import ordering

from .problems import hermitian, laplacian, lopsided, numbers, plate


def grid(n: int, block: int = 1) -> Any:
    line = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    inner = np.eye(block) + 0.2 * np.ones((block, block))
    return bg.bsr_array(np.kron(np.kron(line, np.eye(n)) + np.kron(np.eye(n), line), inner), blocksize=(block, block))


def iterations(A: Any, b: Any, M: Any) -> int:
    steps: list[Any] = []
    assert linalg.cg(A, b, M=M, rtol=1e-8, callback=steps.append)[1] == 0
    return len(steps)


# ------------------------------------------------------------------------------------------------- orders
@pytest.mark.parametrize("A", [grid(9), grid(6, 2), laplacian(20), plate(6)[0], lopsided(12)], ids=str)
def test_connected_nodes_have_different_colours(A: Any) -> None:
    colour, count = ordering.colours(A)
    row = np.repeat(np.arange(len(A.indptr) - 1), np.diff(A.indptr))
    other = row != A.indices
    assert (colour[row[other]] != colour[A.indices[other]]).all()
    assert set(colour.tolist()) == set(range(count))
    assert count <= 3 * np.diff(A.indptr).max()
    np.testing.assert_array_equal(colour, ordering.colours(A)[0])


def test_a_connection_that_is_stored_once_counts_for_both_ends() -> None:
    A = bg.bsr_array(np.eye(6) + np.eye(6, k=1), blocksize=(1, 1))
    colour, _ = ordering.colours(A)
    assert (colour[1:] != colour[:-1]).all()


@pytest.mark.parametrize("lower", [True, False])
def test_levels_are_the_longest_chains(lower: bool) -> None:
    rng = np.random.default_rng(3)
    dense = np.where(rng.random((14, 14)) < 0.25, 1.0, 0)
    dense = (np.tril(dense, -1) if lower else np.triu(dense, 1)) + np.eye(14)
    A = bg.bsr_array(dense, blocksize=(1, 1))
    level, count = ordering.levels(A, lower)
    want = np.zeros(14, int)
    for i in range(14) if lower else reversed(range(14)):
        before = [j for j in np.flatnonzero(dense[i]) if j != i]
        want[i] = max((want[j] + 1 for j in before), default=0)
    np.testing.assert_array_equal(level, want)
    assert count == want.max() + 1


# ------------------------------------------------------------------------------------------------- SSOR
@pytest.mark.parametrize("omega", [0.6, 1.0, 1.7])
def test_ssor_is_the_product_of_its_triangles(omega: float) -> None:
    A = grid(5, 2)
    M = linalg.block_ssor(A, omega)
    colour, count = ordering.colours(A)
    assert M.groups == count
    order = np.argsort(colour, kind="stable")
    lines = (order[:, None] * 2 + np.arange(2)).ravel()
    dense = A.toarray()[np.ix_(lines, lines)]
    diagonal = np.kron(np.eye(25), np.ones((2, 2))) * dense
    lower = np.tril(dense) * (np.kron(np.eye(25), np.ones((2, 2))) == 0)
    upper = np.triu(dense) * (np.kron(np.eye(25), np.ones((2, 2))) == 0)
    want = (diagonal + omega * lower) @ np.linalg.inv(diagonal) @ (diagonal + omega * upper) / (omega * (2 - omega))
    got = (M @ np.eye(50))[np.ix_(lines, lines)]
    np.testing.assert_allclose(got @ want, np.eye(50), atol=1e-12)


@pytest.mark.parametrize("make", [linalg.block_ssor, linalg.ilu0, linalg.ic0])
def test_preconditioners_of_a_symmetric_matrix_are_symmetric_and_better_than_jacobi(make: Any) -> None:
    A, _ = plate(12)
    M, b = make(A), numbers(A.shape[0])
    dense = M @ np.eye(A.shape[0])
    np.testing.assert_allclose(dense, dense.T, atol=1e-12 * abs(dense).max())
    assert np.linalg.eigvalsh((dense + dense.T) / 2).min() > 0
    np.testing.assert_allclose(M @ b, dense @ b, atol=1e-12 * abs(dense).max())
    assert iterations(A, b, M) < iterations(A, b, linalg.block_jacobi(A))


# ------------------------------------------------------------------------------------------------- ILU(0)
def incomplete(dense: Any, stored: Any) -> Any:
    """The product of the factors of the incomplete LU decomposition on a pattern, by its definition."""
    n = len(dense)
    a = np.where(stored, dense, 0)
    for i in range(n):
        for k in range(i):
            if stored[i, k]:
                a[i, k] /= a[k, k]
                for j in range(k + 1, n):
                    if stored[i, j]:
                        a[i, j] -= a[i, k] * a[k, j]
    return (np.tril(a, -1) + np.eye(n)) @ np.triu(a)


@pytest.mark.parametrize("kind", ["symmetric", "lopsided", "one-sided"])
@pytest.mark.parametrize("how", ["colours", "natural"])
def test_ilu0_is_that_of_the_elements_in_its_order(kind: str, how: str) -> None:
    A = grid(5) if kind == "symmetric" else lopsided(24).tobsr((1, 1))
    if kind == "one-sided":  # connections that are stored in one direction
        A = bg.bsr_array(A.toarray() + 0.3 * np.eye(24, k=3) + 0.2 * np.eye(24, k=-5), blocksize=(1, 1))
    A.eliminate_zeros()
    colour, _ = ordering.colours(A)
    order = np.argsort(colour, kind="stable") if how == "colours" else np.arange(len(colour))
    dense = A.toarray()[np.ix_(order, order)]
    want = incomplete(dense, dense != 0)
    got = (linalg.ilu0(A, order=how) @ np.eye(len(dense)))[np.ix_(order, order)]
    np.testing.assert_allclose(got @ want, np.eye(len(dense)), atol=1e-9)
    assert (kind == "lopsided" and how == "natural") or not np.allclose(want, dense)  # some fill was dropped


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_a_decomposition_without_fill_is_exact(dtype: str) -> None:
    dense = numbers((12, 12), dtype) + 8 * np.eye(12)
    A = bg.bsr_array(dense, blocksize=(3, 3))
    b = numbers((12, 2), dtype, 1)
    atol = 1e-4 if dtype in ("float32", "complex64") else 1e-12
    np.testing.assert_allclose(A.toarray() @ (linalg.ilu0(A) @ b), b, atol=atol)
    H = bg.bsr_array(dense @ dense.conj().T, blocksize=(3, 3))
    np.testing.assert_allclose(H.toarray() @ (linalg.ic0(H) @ b), b, atol=10 * atol)


def test_ilu0_serves_solvers_for_matrices_that_are_not_symmetric() -> None:
    A, b = lopsided(60), numbers((60, 2))
    M = linalg.ilu0(A)
    for solve in (linalg.bicgstab, linalg.gmres):
        x, info = solve(A, b, M=M, rtol=1e-10)
        assert info == 0
        np.testing.assert_allclose(A @ x, b, atol=1e-8)


def test_the_natural_order_takes_fewer_iterations_on_a_plate() -> None:
    A, _ = plate(14)
    b = numbers(A.shape[0])
    assert iterations(A, b, linalg.ic0(A, order="natural")) < iterations(A, b, linalg.ic0(A))
    assert iterations(A, b, linalg.block_ssor(A, order="natural")) < iterations(A, b, linalg.block_ssor(A))


# ------------------------------------------------------------------------------------------------- triangles
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_triangular_systems(lower: bool, unit: bool, columns: int | None, dtype: str) -> None:
    rng = np.random.default_rng(5)
    stored = np.kron(rng.random((7, 7)) < 0.5, np.ones((2, 2)))
    stored = np.tril(np.kron(np.tril(np.ones((7, 7)), -1), np.ones((2, 2))) * stored)
    identity = np.kron(np.eye(7), np.ones((2, 2)))
    dense = numbers((14, 14), dtype) * stored + (numbers((14, 14), dtype, 1) + 4 * np.eye(14)) * identity
    A = bg.bsr_array((dense if lower else dense.T).astype(dtype), blocksize=(2, 2))
    b = numbers(14 if columns is None else (14, columns), dtype, 2)
    x = linalg.spsolve_triangular(A, b, lower, unit)
    whole = A.toarray()
    if unit:
        whole = np.where(identity == 1, np.eye(14), whole)
    assert x.shape == b.shape and x.dtype == b.dtype
    np.testing.assert_allclose(x, np.linalg.solve(whole, b), rtol=1e-3 if dtype == "float32" else 1e-10)


def test_a_chain_is_solved_one_node_after_the_other() -> None:
    A = bg.bsr_array(sp.csr_array(np.eye(30) - np.eye(30, k=-1)), blocksize=(1, 1))
    np.testing.assert_allclose(linalg.spsolve_triangular(A, np.ones(30)), np.arange(1, 31))


A, L = hermitian(8), bg.bsr_array(np.kron(np.tril(np.ones((2, 2))), np.eye(2)), blocksize=(2, 2))
HOLED = bg.bsr_array(np.kron(np.array([[1.0, 1], [1, 0]]), np.eye(2)), blocksize=(2, 2))
INDEFINITE = bg.bsr_array(np.diag([1.0, 2.0, -3.0, 4.0]), blocksize=(2, 2))
SINGULAR = bg.bsr_array(np.kron(np.ones((2, 2)), np.eye(2)), blocksize=(2, 2))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: linalg.block_ssor(A, 2), ValueError, "omega: wanted a number above 0 and below 2, got 2"),
        (lambda: linalg.ilu0(A, order="random"), ValueError, "order: wanted 'colours' or 'natural', got 'random'"),
        (lambda: linalg.block_ssor(A.toarray()), TypeError, "A: wanted a bsr_array"),
        (lambda: linalg.block_ssor(HOLED), ValueError, "A: diagonal block 1 is missing"),
        (lambda: linalg.ilu0(HOLED), ValueError, "A: diagonal block 1 is missing"),
        (lambda: linalg.ilu0(SINGULAR), ValueError, "A: pivot block [01] is singular; try a shift of the diagonal"),
        (lambda: linalg.ic0(lopsided(8)), ValueError, "A: wanted a Hermitian matrix, got one that differs"),
        (lambda: linalg.ic0(INDEFINITE), ValueError, "A: pivot block 1 is not positive definite"),
        (lambda: linalg.spsolve_triangular(A, np.ones(8)), ValueError, "A: wanted no blocks above the diagonal"),
        (lambda: linalg.spsolve_triangular(L, np.ones(4), False), ValueError, "A: wanted no blocks below the diagonal"),
        (lambda: linalg.spsolve_triangular(L, np.ones(5)), ValueError, r"b: wanted a dense array \(4,\) or \(4, k\)"),
        (lambda: linalg.spsolve_triangular(L * 0, np.ones(4)), ValueError, "A: diagonal block 0 is singular"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
