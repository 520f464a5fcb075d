"""What is known of the largest eigenvalue of D A: polynomials and smoothers have to be positive definite by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.linalg import smoothers

from .problems import hermitian, laplacian, plate


def sparse_square(seed: int, n: int = 6) -> Any:
    """A random sparse matrix times its transpose, with eigenvalues from 0.01 on."""
    rng = np.random.default_rng(seed)
    B = rng.standard_normal((n, n)) * (rng.random((n, n)) < 0.3)
    return B @ B.T + 0.01 * np.eye(n)


def chain_beside_a_triangle(n: int) -> Any:
    """D A has eigenvalues up to 2 on a chain of n nodes, and 2.6 on three nodes beside it."""
    triangle = 2 * (0.2 * np.eye(3) + 0.8 * np.ones((3, 3)))
    chain = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    return bg.bsr_array(sp.block_diag([chain, triangle]), blocksize=(1, 1))


def dense(M: Any) -> Any:
    return M @ np.eye(M.shape[0])


def least_eigenvalue(M: Any) -> float:
    full = dense(M)
    np.testing.assert_allclose(full, full.conj().T, atol=1e-12 * abs(full).max())
    return float(np.linalg.eigvalsh((full + full.conj().T) / 2)[0])


def exact(A: Any, D: Any) -> float:
    return float(np.linalg.eigvals(D.toarray() @ A.toarray()).real.max())


#: Seeds for which fifteen steps of a power iteration do not see the largest eigenvalue.
@pytest.mark.parametrize("seed", [428, 4519, *range(20)])
def test_polynomials_are_positive_definite_for_sparse_squares(seed: int) -> None:
    A = bg.bsr_array(sparse_square(seed), blocksize=(1, 1))
    for make in (
        *(lambda degree=degree: linalg.chebyshev(A, degree) for degree in (1, 2, 3, 4, 6)),
        lambda: linalg.chebyshev(A, 2, low=0.01, high=0.5),
        lambda: linalg.smoothed_aggregation(A, max_coarse=1),
        lambda: linalg.smoothed_aggregation(A, max_coarse=1, degree=3),
        lambda: linalg.smoothed_aggregation(A, max_coarse=1, smoother="jacobi", degree=1),
    ):
        M = make()
        assert least_eigenvalue(M) > 0
        assert linalg.cg(A, np.ones(6), M=M)[1] == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_few_nodes_with_a_larger_eigenvalue_are_seen_beside_many_others(dtype: str) -> None:
    A = chain_beside_a_triangle(30_000).astype(dtype)
    found = smoothers.spectrum(A, smoothers.inverse_blocks(A))
    assert found.largest == pytest.approx(2.6, rel=1e-3) and 2.6 <= found.bound < 3
    e = np.zeros(30_003, dtype)
    e[-3:] = 1
    for M in (linalg.chebyshev(A, 2), linalg.chebyshev(A, 4), linalg.smoothed_aggregation(A)):
        assert e @ (M @ e) > 0


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_scale_of_unknowns_hides_no_eigenvalue(scale: float) -> None:
    A = chain_beside_a_triangle(2000)
    factors = np.where(np.arange(2003) < 2000, 1, scale)
    A = A.scale_block_rows(factors).scale_block_cols(factors)
    found = smoothers.spectrum(A, smoothers.inverse_blocks(A))
    assert found.largest == pytest.approx(2.6, rel=1e-3) and 2.6 <= found.bound < 3


def test_the_bound_holds_and_is_near() -> None:
    rng = np.random.default_rng(0)
    for _ in range(150):
        n = int(rng.integers(1, 30))
        A = bg.bsr_array(sparse_square(int(rng.integers(1 << 30)), 2 * n), blocksize=(2, 2))
        D = smoothers.inverse_blocks(A)
        found, want = smoothers.spectrum(A, D), exact(A, D)
        assert found.largest <= want * (1 + 1e-9) and want <= found.bound * (1 + 1e-9)
        assert found.bound < 1.6 * want
    for A in (plate(40)[0], laplacian(3000), hermitian(4000, "complex128"), laplacian(900, 3).astype("float32")):
        found = smoothers.spectrum(A, smoothers.inverse_blocks(A))
        assert found.largest < found.bound < 1.3 * found.largest


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_the_spectrum_is_that_of_lanczos_method(dtype: str) -> None:
    steps = 8
    A = hermitian(60, dtype)
    D = smoothers.inverse_blocks(A)
    root = np.linalg.cholesky(D.toarray())
    C = root.conj().T @ A.toarray() @ root
    first = A @ (np.sqrt(D.diagonal().real) * smoothers._mixed_vector(A))
    v = root.conj().T @ first
    size = np.linalg.norm(v)
    basis, beside = [v / size], []
    for _ in range(steps):
        v = C @ basis[-1]
        for _ in range(2):
            for w in basis:
                v = v - w * np.vdot(w, v)
        beside.append(np.linalg.norm(v))
        basis.append(v / beside[-1])
    V = np.stack(basis[:steps], axis=1)
    values = np.linalg.eigvalsh(V.conj().T @ C @ V)
    found = smoothers.spectrum(A, D, steps + 1)
    assert found.largest == pytest.approx(values[-1], rel=1e-9)
    share = 1e-6 / 2 * values[-1] / (np.sqrt(2) * size)
    assert np.prod(found.bound - values) * share == pytest.approx(np.prod(beside), rel=1e-4)


def test_matrices_with_few_eigenvalues() -> None:
    A = bg.bsr_array(1e29 * np.eye(4), blocksize=(2, 2))
    assert smoothers.spectrum(A, bg.eye(4, blocksize=(2, 2))) == pytest.approx((1e29, 1e29))
    nothing = bg.bsr_array((0, 0), blocksize=(2, 2), dtype=np.float64)
    assert smoothers.spectrum(nothing, nothing) == (1, 1)
    zeros = bg.bsr_array((np.zeros((1, 2, 2)), [0], [0, 1]))
    assert smoothers.spectrum(zeros, bg.eye(2, blocksize=(2, 2))) == (1, 1)
    ring = bg.bsr_array(2 * np.eye(8) - np.roll(np.eye(8), 1, 0) - np.roll(np.eye(8), -1, 0), blocksize=(1, 1))
    assert smoothers.spectrum(ring, smoothers.inverse_blocks(ring)) == pytest.approx((2, 2), rel=1e-6)  # singular
    with pytest.raises(ValueError, match="A: wanted finite numbers, got NaN or infinity, or numbers whose squares ov"):
        smoothers.spectrum(bg.bsr_array(np.array([[1e200, 1], [1, 1e200]])), bg.eye(2, blocksize=(2, 2)))


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_smoothers_reduce_all_residuals_although_their_own_bounds_are_too_low(degree: int) -> None:
    A = hermitian(12)
    D = smoothers.inverse_blocks(A)
    for smoother in (smoothers.Chebyshev(A, D, degree, 0.15, 0.3), smoothers.Jacobi(A, D, 5.0, degree)):
        left = np.eye(12) - A.toarray() @ np.stack([smoother.improve(e, None) for e in np.eye(12)], axis=1)
        assert abs(np.linalg.eigvals(left)).max() < 1


def test_the_read_of_a_spectrum_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    A, reads = hermitian(40), []
    D, to_host = smoothers.inverse_blocks(A), type(A._backend).to_host

    def counted(backend: Any, x: Any) -> Any:
        reads.append(x.shape)
        return to_host(backend, x)

    monkeypatch.setattr(type(A._backend), "to_host", counted)
    smoothers.spectrum(A, D)
    assert reads == [(39,)]  # r D r of 20 steps, and p A p of those that lead to another one


def test_a_polynomial_of_an_odd_degree_keeps_its_upper_end() -> None:
    A = laplacian(3000)
    odd, even = (linalg.chebyshev(A, degree)._chebyshev for degree in (3, 4))  # type: ignore[attr-defined]
    assert odd.high == 1.1 < even.high < 1.3
