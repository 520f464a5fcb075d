"""NaN, infinity, empty matrices and contradictions: told, and never turned into a solution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.interop import mpi
from bsrgemm.linalg.smoothers import inverse_blocks

from .problems import hermitian, laplacian, numbers

EMPTY = bg.bsr_array((0, 0), blocksize=(2, 2), dtype=float)


def spoiled(n: int, number: float, block: int = 2) -> Any:
    dense = laplacian(n // block, block).toarray()
    dense[3, 3] = number
    return bg.bsr_array(dense, blocksize=(block, block))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [8, 200])
def test_set_ups_name_numbers_that_are_not_finite(n: int, number: float) -> None:
    A = spoiled(n, number)
    for make in (linalg.chebyshev, lambda A: linalg.smoothed_aggregation(A, max_coarse=20)):
        with pytest.raises(ValueError, match="A: wanted finite numbers, got NaN or infinity"):
            make(A)
    M = linalg.smoothed_aggregation(laplacian(n // 2, 2), max_coarse=20)
    before = M @ np.ones(n)
    with pytest.raises(ValueError, match="A: wanted finite numbers, got NaN or infinity"):
        M.refresh(A)
    np.testing.assert_array_equal(M @ np.ones(n), before)  # it stays as it was


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_direct_solutions_name_numbers_that_are_not_finite(number: float) -> None:
    A, b = spoiled(8, number), np.ones(8)
    triangle = bg.bsr_array(np.tril(A.toarray()), blocksize=(2, 2))
    for call in (lambda: linalg.spsolve(A, b), lambda: linalg.spsolve_triangular(triangle, b)):
        with pytest.raises(ValueError, match="A: wanted finite numbers, got NaN or infinity"):
            call()


def test_a_singular_matrix_is_named_by_spsolve() -> None:
    A = bg.bsr_array(np.diag([1.0, 2, 0, 4]), blocksize=(2, 2))
    with pytest.raises(RuntimeError, match="A: wanted a matrix that is not singular; SuperLU"):
        linalg.spsolve(A, np.ones(4))
    with pytest.raises(RuntimeError, match="A: singular, or too badly conditioned for float32: the solution overflows"):
        linalg.spsolve(bg.bsr_array(np.diag([1e-30, 1, 1, 1]).astype("f"), blocksize=(2, 2)), np.full(4, 1e30, "f"))


def test_right_hand_sides_elsewhere_have_a_wrong_type_and_others_a_wrong_value() -> None:
    A = hermitian(8)
    for solve in (linalg.spsolve, linalg.spsolve_triangular, lambda A, b: linalg.constrain(A, b, [0])):
        with pytest.raises(TypeError, match=r"b: wanted a dense array \(8,\) or \(8, k\) on 'cpu', where A is, got a"):
            solve(A, {1.0})
        with pytest.raises(ValueError, match=r"b: wanted a dense array \(8,\) or \(8, k\) on 'cpu', got \(7,\)"):
            solve(A, np.ones(7))
        with pytest.raises(TypeError, match="b: wanted numbers, got object"):
            solve(A, np.array([None] * 8))


def test_constraints_keep_complex_values_and_refuse_what_contradicts_itself() -> None:
    A, b = hermitian(8), numbers(8)
    C, f = linalg.constrain(A, b, [2, 5], [1j, 2.0])
    assert C.dtype == np.float64 and f.dtype == np.complex128
    np.testing.assert_allclose(np.linalg.solve(C.toarray(), f)[[2, 5]], [1j, 2.0])
    assert linalg.constrain(A.astype("f"), b.astype("f"), [2], 1j)[1].dtype == np.complex64
    C, f = linalg.constrain(A, b, [2, 2], [1.0, 1.0])
    np.testing.assert_allclose(np.linalg.solve(C.toarray(), f)[2], 1.0)
    for columns in (b, np.stack([b, b], axis=1)):
        with pytest.raises(ValueError, match="dofs: wanted one value for each unknown, got an unknown twice"):
            linalg.constrain(A, columns, [2, 2], [1.0, 2.0])
    with pytest.raises(ValueError, match="values: wanted finite numbers, got NaN or infinity"):
        linalg.constrain(A, b, [2], np.nan)
    with pytest.raises(TypeError, match="values: wanted numbers, got <U1"):
        linalg.constrain(A, b, [2], "x")


def test_empty_matrices_have_preconditioners() -> None:
    makers = (linalg.block_jacobi, linalg.chebyshev, linalg.block_ssor, linalg.ilu0, linalg.ic0)
    for make in (*makers, linalg.smoothed_aggregation):
        assert (make(EMPTY) @ np.zeros(0)).shape == (0,)
    assert linalg.spsolve(EMPTY, np.zeros(0)).shape == (0,)
    assert linalg.rigid_body_modes(np.zeros((0, 3))).shape == (0, 6)


@pytest.mark.parametrize("options", [{"high": np.inf}, {"low": "a"}, {"low": np.nan}, {"low": 2.0}])
def test_intervals_of_chebyshev_are_finite(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="low, high: wanted 0 < low < high, both finite"):
        linalg.chebyshev(hermitian(8), **options)


def test_nan_is_named_beside_singular_blocks() -> None:
    """The pseudo-inverse of a coarse level's blocks does not converge for it."""
    blocks = np.stack([np.zeros((2, 2)), np.eye(2), np.full((2, 2), np.nan)])
    A = bg.bsr_array((blocks, np.arange(3), np.arange(4)), shape=(6, 6))
    with pytest.raises(ValueError, match="A: wanted finite numbers, got NaN or infinity"):
        inverse_blocks(A, singular=True)
    with pytest.raises(ValueError, match="A: diagonal block 0 is singular"):
        inverse_blocks(A)
    blocks[2] = 2 * np.eye(2)
    np.testing.assert_array_equal(inverse_blocks(A._with_data(blocks), True).toarray(), np.diag([0, 0, 1, 1, 0.5, 0.5]))


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("beside", [0.0, 1.0], ids=["singular", "regular"])
@pytest.mark.parametrize("size", [1, 2])
def test_diagonal_blocks_that_are_not_finite_are_told(fake: Any, size: int, beside: float, number: float) -> None:
    """Also where pseudo-inverses are allowed: that of infinity would be 0 or NaN."""
    blocks = np.stack([beside * np.eye(size), np.eye(size), np.eye(size)])
    blocks[1:, 0, 0] = number
    host = bg.bsr_array((blocks, np.arange(3), np.arange(4)), shape=(3 * size, 3 * size))
    fine = bg.eye(3 * size, blocksize=(size, size))
    words = "A: wanted finite numbers, got NaN or infinity in diagonal block 1"
    for A, B in ((host, fine), (host.to_device(fake.name), fine.to_device(fake.name))):
        with pytest.raises(ValueError, match=words):
            inverse_blocks(A, singular=True)
        if beside:
            for make in (linalg.block_jacobi, linalg.chebyshev, linalg.block_ssor):
                with pytest.raises(ValueError, match=words):
                    make(A)
            with pytest.raises(ValueError, match=f"{words} of matrix 1"):
                linalg.block_jacobi(bg.bsr_batch([B, A]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype, tiny", [("float64", 1e-310), ("float32", 1e-40), ("complex128", 1e-310)])
@pytest.mark.parametrize("coupled", [False, True])
def test_pivots_whose_inverses_overflow_are_refused(dtype: str, tiny: float, coupled: bool) -> None:
    small = np.array([[2, 1], [1, 2]]) * tiny
    for dense, block in ((np.diag([tiny, 1]), 1), (small, 2), (np.kron(np.diag([1, 1]), small), 2)):
        if coupled and block == 1:
            dense = dense + np.array([[0, 1], [1, 0]])
        A = bg.bsr_array(dense.astype(dtype), blocksize=(block, block))
        for make in (linalg.ilu0, linalg.ic0, linalg.block_ssor, linalg.block_jacobi, linalg.chebyshev):
            with pytest.raises(ValueError, match=r"A: (diagonal|pivot) block [01] is singular in .* is not finite"):
                make(A)
        with pytest.raises(ValueError, match=r"A: the inverse of diagonal block 0 is not finite in .*; scale A up"):
            inverse_blocks(bg.bsr_array(np.full((2, 2), tiny, dtype), blocksize=(2, 2)), singular=True)
        with pytest.raises(ValueError, match=r"A: the inverse of the coarsest matrix is not finite in .*; scale A up"):
            linalg.smoothed_aggregation(bg.bsr_array(small.astype(dtype), blocksize=(2, 2)))
        with pytest.raises(
            ValueError, match=r"diagonal block 0 of matrix 1 is singular in .*: its inverse is not finite"
        ):
            linalg.block_jacobi(
                bg.bsr_batch([bg.bsr_array(x.astype(dtype), blocksize=(2, 2)) for x in (np.eye(2), small)])
            )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [linalg.ilu0, linalg.ic0, linalg.block_ssor])
def test_rows_that_overflow_when_their_pivots_divide_them_are_refused(make: Any) -> None:
    A = bg.bsr_array(np.array([[1e-300, 1e10, 0], [1e10, 1, 0], [0, 0, 1]]), blocksize=(1, 1))
    with pytest.raises(ValueError, match=r"A: (pivot block 1 is singular in|its rows overflow in float64)"):
        make(A)
    dense = np.array([[1e-300, 0, 1e10], [0, 1, 0], [0, 0, 1]])
    with pytest.raises(
        ValueError, match="A: its rows overflow in float64, divided by their pivot blocks; shift the di"
    ):
        (linalg.ilu0 if make is linalg.ic0 else make)(bg.bsr_array(dense, blocksize=(1, 1)))


@pytest.mark.parametrize("max_coarse", [4, 500])
def test_diagonals_of_matrices_that_are_not_definite_are_refused(max_coarse: int) -> None:
    A = laplacian(60, 2)
    _, indices, indptr = A._blocks
    row = np.repeat(np.arange(60), np.diff(indptr))
    keep = ~((row == indices) & (row == 7))
    missing = bg.bsr_array((A.data[keep], (row[keep], indices[keep])), shape=A.shape)
    zero, complex_ = A.copy(), -A.astype("complex128")
    zero.setdiag(np.where(np.arange(120) == 33, 0, A.diagonal()))
    M = linalg.smoothed_aggregation(A, max_coarse=max_coarse)
    before = M @ np.ones(120)
    for B, words in (
        (missing, "A: diagonal block 7 is missing: no block is stored there"),
        (-A, r"A: wanted a positive diagonal, as a positive definite matrix has, got -2.6 in row 0; for a negative"),
        (complex_, r"A: wanted a positive diagonal, as a positive definite matrix has, got -2.6"),
        (zero, "A: wanted a positive diagonal, as a positive definite matrix has, got 0 in row 33; for a negative def"),
    ):
        for make in (lambda B: B, mpi.partition):
            with pytest.raises(ValueError, match=words):
                linalg.smoothed_aggregation(make(B), max_coarse=max_coarse)
    for B in (-A, zero):
        with pytest.raises(ValueError, match="A: wanted a positive diagonal"):
            M.refresh(B)
    np.testing.assert_array_equal(M @ np.ones(120), before)
