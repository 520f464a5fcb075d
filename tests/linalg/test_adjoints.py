"""Preconditioners as others' solvers use them: with the conjugate transpose, for matrices that are not Hermitian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg as spla

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.interop import mpi

from ..interop.ranks import run
from .problems import numbers

DTYPES = ["float64", "complex128"]


def lopsided(nodes: int, block: int, dtype: Any) -> Any:
    """Blocks at random places, on both sides of the diagonal or on one, and a diagonal that is larger than its row."""
    rng = np.random.default_rng(nodes)
    mask = np.kron(rng.random((nodes, nodes)) < 0.15, np.ones((block, block)))
    dense = numbers((nodes * block, nodes * block), dtype) * mask
    dense += np.diag(abs(dense).sum(axis=1) + 1)
    return bg.bsr_array(dense, blocksize=(block, block))


MAKERS: dict[str, Callable[[Any], Any]] = {
    "block_jacobi": linalg.block_jacobi,
    "chebyshev": linalg.chebyshev,
    "block_ssor": lambda A: linalg.block_ssor(A, 1.3),
    "ilu0": linalg.ilu0,
    "ilu0, natural order": lambda A: linalg.ilu0(A, order="natural"),
    "V-cycle": lambda A: linalg.smoothed_aggregation(A, max_coarse=6),
    "W-cycle": lambda A: linalg.smoothed_aggregation(A, max_coarse=6, cycle="W", smoother="jacobi"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MAKERS)
def test_the_adjoint_is_the_conjugate_transpose(name: str, dtype: str) -> None:
    A = lopsided(14, 2, dtype)
    M = MAKERS[name](A)
    unit = np.eye(28, dtype=dtype)
    dense = M @ unit
    assert abs(dense - dense.conj().T).max() > 1e-3  # it is not Hermitian
    np.testing.assert_allclose(M.rmatmat(unit), dense.conj().T, atol=1e-13)
    np.testing.assert_allclose(M.rmatvec(unit[:, 3].copy()), dense.conj()[3], atol=1e-13)
    np.testing.assert_allclose(spla.aslinearoperator(M).H @ unit, dense.conj().T, atol=1e-13)


@pytest.mark.parametrize("name", ["block_jacobi", "chebyshev", "block_ssor", "ilu0"])
def test_solvers_that_need_the_adjoint_are_served(name: str) -> None:
    A, b = lopsided(30, 2, "float64"), numbers(60)
    x, info = spla.bicg(A, b, M=MAKERS[name](A), rtol=1e-10, maxiter=60)
    assert info == 0 and np.linalg.norm(b - A @ x) <= 1.1e-10 * np.linalg.norm(b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["block_jacobi", "chebyshev", "V-cycle", "W-cycle"])
def test_the_adjoint_over_ranks(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bsrgemm.interop.mpi import multigrid

    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 4)
    A = lopsided(14, 2, dtype)
    unit = np.eye(28, dtype=dtype)

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        M, part = MAKERS[name](D), D.scatter(unit)
        return D.gather(M @ part), D.gather(M.rmatmat(part))

    dense, adjoint = run(3, program)[0]
    np.testing.assert_allclose(adjoint, dense.conj().T, atol=1e-13)


def test_a_preconditioner_without_an_adjoint_says_so() -> None:
    class Users(linalg.Preconditioner):
        def _apply(self, r: Any) -> Any:
            return 0.5 * r

    M = Users()
    M._made_of(lopsided(3, 2, "float64"))
    np.testing.assert_array_equal(M @ np.ones(6), 0.5)
    with pytest.raises(NotImplementedError, match="rmatvec: Users has no conjugate transpose"):
        M.rmatvec(np.ones(6))
