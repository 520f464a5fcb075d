"""Solvers on a device that is not the host: nothing is moved, and results are those of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg

from .. import fake_device
from .problems import hermitian, laplacian, lopsided, numbers, plate


@pytest.fixture
def fake() -> Any:
    return fake_device.install()


def there(fake: Any, A: Any) -> Any:
    """A matrix with the same blocks on the fake device."""
    return A.to_device(fake.name)


@pytest.mark.parametrize("method", ["cg", "minres", "bicgstab", "gmres", "fgmres"])
def test_methods_give_what_they_give_on_the_host(fake: Any, method: str) -> None:
    A, b = (hermitian(20) if method in ("cg", "minres") else lopsided(20)), numbers((20, 2))
    solve = getattr(linalg, method)
    want, _ = solve(A, b, M=linalg.block_jacobi(A), rtol=1e-9)
    B = there(fake, A)
    x, info = solve(B, fake.from_host(b), M=linalg.block_jacobi(B), rtol=1e-9)
    assert info == 0 and fake.is_dense(x)
    np.testing.assert_allclose(fake.to_host(x), want, rtol=1e-7, atol=1e-9)


def test_multigrid_makes_the_same_hierarchy(fake: Any) -> None:
    A, place = plate(16)
    modes, b = linalg.rigid_body_modes(place), numbers(A.shape[0])
    M = linalg.smoothed_aggregation(A, modes, max_coarse=50)
    B = there(fake, A)
    N = linalg.smoothed_aggregation(B, linalg.rigid_body_modes(fake.from_host(place)), max_coarse=50)
    assert M.report() == N.report()
    for x, y in zip(M.levels, N.levels, strict=True):
        np.testing.assert_array_equal(x.indices, fake.to_host(y.indices))
        np.testing.assert_allclose(x.data, fake.to_host(y.data), atol=1e-9)
    want, _ = linalg.cg(A, b, M=M, rtol=1e-9)
    x, info = linalg.cg(B, fake.from_host(b), M=N, rtol=1e-9)
    assert info == 0
    np.testing.assert_allclose(fake.to_host(x), want, rtol=1e-6, atol=1e-9)
    N.refresh(B * 2)
    y, info = linalg.cg(B * 2, fake.from_host(b), M=N, rtol=1e-9)
    np.testing.assert_allclose(2 * fake.to_host(y), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["chebyshev", "block_ssor", "ilu0", "ic0"])
def test_preconditioners_give_what_they_give_on_the_host(fake: Any, name: str) -> None:
    A, _ = plate(6)
    r = numbers((A.shape[0], 2))
    want = getattr(linalg, name)(A) @ r
    got = getattr(linalg, name)(there(fake, A)) @ fake.from_host(r)
    np.testing.assert_allclose(fake.to_host(got), want, rtol=1e-9, atol=1e-12)


def test_triangles_are_solved_as_on_the_host(fake: Any) -> None:
    dense = np.kron(np.tril(numbers((6, 6))), np.ones((2, 2))) + 9 * np.eye(12)
    L, b = bg.bsr_array(dense, blocksize=(2, 2)), numbers((12, 2))
    got = linalg.spsolve_triangular(there(fake, L), fake.from_host(b))
    np.testing.assert_allclose(fake.to_host(got), linalg.spsolve_triangular(L, b))


def test_constraints_are_those_of_the_host(fake: Any) -> None:
    A, b = laplacian(6, 2), numbers((12, 2))
    C, f = linalg.constrain(A, b, [0, 5], [1.0, 2.0])
    D, g = linalg.constrain(there(fake, A), fake.from_host(b), [0, 5], [1.0, 2.0])
    np.testing.assert_allclose(fake.to_host(D.toarray()), C.toarray())
    np.testing.assert_allclose(fake.to_host(g), f)


def test_nothing_is_moved(fake: Any) -> None:
    A, b = hermitian(8), np.ones(8)
    B = there(fake, A)
    with pytest.raises(TypeError, match="A: wanted it on 'cpu', where b is, got one on 'fake': nothing is moved"):
        linalg.cg(B, b)
    with pytest.raises(TypeError, match="M: wanted it on 'cpu', where b is, got one on 'fake'"):
        linalg.cg(A, b, M=linalg.block_jacobi(B))
    with pytest.raises(TypeError, match="r: wanted a dense array on 'fake', got ndarray"):
        linalg.block_jacobi(B) @ b
    with pytest.raises(TypeError, match="near_nullspace: wanted a dense array on 'fake'"):
        linalg.smoothed_aggregation(B, np.ones((8, 1)))
    with pytest.raises(TypeError, match="A: spsolve works on the CPU, and nothing is moved"):
        linalg.spsolve(B, b)
    assert bg.linalg is linalg
