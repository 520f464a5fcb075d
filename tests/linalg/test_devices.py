"""Solvers on a device that is not the host: nothing is moved, and results are those of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._backend.registry import by_name
from bsrgemm.linalg.operators import column_sums

from .. import fake_cupy
from .problems import hermitian, laplacian, lopsided, numbers, plate

pytestmark = pytest.mark.fake

#: The model of CuPy's arrays, and a card where there is one.
DEVICES = [pytest.param("cuda", id="cuda"), pytest.param("cuda", id="cupy", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    """The backend of the device."""
    return fake_cupy.backend() if request.param == "cuda" else by_name(request.param)


def there(device: Any, A: Any) -> Any:
    """A matrix with the same blocks on the device."""
    return A.to_device(device.name)


METHODS = ("cg", "minres", "bicgstab", "gmres", "fgmres")


def matrix_for(method: str, n: int, dtype: Any = np.float64) -> Any:
    return hermitian(n, dtype) if method in ("cg", "minres") else lopsided(n, dtype)


@pytest.mark.parametrize("method", METHODS)
def test_methods_give_what_they_give_on_the_host(device: Any, method: str) -> None:
    A, b = matrix_for(method, 20), numbers((20, 2))
    solve = getattr(linalg, method)
    want, _ = solve(A, b, M=linalg.block_jacobi(A), rtol=1e-9)
    B = there(device, A)
    x, info = solve(B, device.from_host(b), M=linalg.block_jacobi(B), rtol=1e-9)
    assert info == 0 and device.is_dense(x)
    np.testing.assert_allclose(device.to_host(x), want, rtol=1e-7, atol=1e-9)


def right_hand_sides(columns: int | None, dtype: str) -> tuple[Any, Any]:
    """Right-hand sides and vectors to start from."""
    shape = 40 if columns is None else (40, columns)
    return numbers(shape, dtype, 1), numbers(shape, dtype, 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("columns", [None, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_starts_callbacks_and_columns_are_those_of_the_host(
    device: Any, method: str, columns: int | None, dtype: str
) -> None:
    """The same number of iterations from x0, but for one that rounding decides, and the same x at each of them."""
    A, (b, x0) = matrix_for(method, 40, dtype), right_hand_sides(columns, dtype)
    kept = x0.copy()
    solve, rtol = getattr(linalg, method), 1e-4 if dtype == "float32" else 1e-9
    options: dict[str, Any] = {"rtol": rtol}
    if "gmres" in method:
        options |= {"restart": 7, "callback_type": "x"}
    steps: list[Any] = []
    want, _ = solve(A, b, x0, callback=lambda x: steps.append(x.copy()), **options)
    start = device.from_host(x0)
    found: list[Any] = []
    x, info = solve(
        there(device, A), device.from_host(b), start, callback=lambda x: found.append(device.to_host(x)), **options
    )
    assert info == 0 and x.dtype == b.dtype and x.shape == b.shape and device.is_dense(x)
    assert abs(len(found) - len(steps)) <= 1 and len(found) > 1
    np.testing.assert_array_equal(found[-1], device.to_host(x))
    for got, wanted in zip(found[:3], steps[:3], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=(1e-3 if dtype == "float32" else 1e-8) * abs(want).max())
    np.testing.assert_allclose(device.to_host(x), want, rtol=0, atol=100 * rtol * abs(want).max())
    np.testing.assert_array_equal(device.to_host(start), kept)


@pytest.mark.parametrize("method", METHODS)
def test_limits_and_failures_are_told_as_on_the_host(device: Any, method: str) -> None:
    A, b = matrix_for(method, 40), numbers((40, 2))
    options: dict[str, Any] = {"maxiter": 1, "restart": 3} if "gmres" in method else {"maxiter": 3}
    said, infos, found = [], [], []
    for matrix, side in ((A, b), (there(device, A), device.from_host(b))):
        with pytest.warns(linalg.SolverWarning) as warned:
            x, info = getattr(linalg, method)(matrix, side, rtol=1e-12, **options)
        said.append(str(warned[0].message).partition(":")[0])
        infos.append(info)
        found.append(x)
    assert infos == [3, 3] and said == [method, method]
    np.testing.assert_allclose(device.to_host(found[1]), found[0], rtol=1e-8, atol=1e-10)


def test_an_indefinite_matrix_is_told(device: Any) -> None:
    A = there(device, bg.bsr_array(np.diag([1.0, 2.0, -3.0, 4.0]), blocksize=(2, 2)))
    with pytest.warns(linalg.SolverWarning, match="cg: A is not positive definite; stopped after"):
        _, info = linalg.cg(A, device.from_host(np.ones(4)), rtol=1e-10)
    assert info == -1


def test_multigrid_makes_the_same_hierarchy(device: Any) -> None:
    A, place = plate(16)
    modes, b = linalg.rigid_body_modes(place), numbers(A.shape[0])
    M = linalg.smoothed_aggregation(A, modes, max_coarse=50)
    B = there(device, A)
    N = linalg.smoothed_aggregation(B, linalg.rigid_body_modes(device.from_host(place)), max_coarse=50)
    assert M.report() == N.report()
    for x, y in zip(M.levels, N.levels, strict=True):
        np.testing.assert_array_equal(x.indices, device.to_host(y.indices))
        np.testing.assert_allclose(x.data, device.to_host(y.data), atol=1e-9)
    want, _ = linalg.cg(A, b, M=M, rtol=1e-9)
    x, info = linalg.cg(B, device.from_host(b), M=N, rtol=1e-9)
    assert info == 0
    np.testing.assert_allclose(device.to_host(x), want, rtol=1e-6, atol=1e-9)
    N.refresh(B * 2)
    y, info = linalg.cg(B * 2, device.from_host(b), M=N, rtol=1e-9)
    np.testing.assert_allclose(2 * device.to_host(y), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["chebyshev", "block_ssor", "ilu0", "ic0"])
def test_preconditioners_give_what_they_give_on_the_host(device: Any, name: str) -> None:
    A, _ = plate(6)
    r = numbers((A.shape[0], 2))
    want = getattr(linalg, name)(A) @ r
    got = getattr(linalg, name)(there(device, A)) @ device.from_host(r)
    np.testing.assert_allclose(device.to_host(got), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [1, 16 * 512 - 1, 16 * 512, 16 * 512 + 1, 20_000])
@pytest.mark.parametrize("columns", [None, 1, 3])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_long_columns_are_summed(device: Any, n: int, columns: int | None, dtype: str) -> None:
    x = numbers(n if columns is None else (n, columns), dtype)
    found = device.to_host(column_sums(device.from_host(x)))
    assert found.shape == x.shape[1:] and found.dtype == dtype
    np.testing.assert_allclose(found, x.sum(axis=0), rtol=1e-12, atol=1e-11)
    np.testing.assert_array_equal(found, device.to_host(column_sums(device.from_host(x))))


def test_triangles_are_solved_as_on_the_host(device: Any) -> None:
    dense = np.kron(np.tril(numbers((6, 6))), np.ones((2, 2))) + 9 * np.eye(12)
    L, b = bg.bsr_array(dense, blocksize=(2, 2)), numbers((12, 2))
    got = linalg.spsolve_triangular(there(device, L), device.from_host(b))
    np.testing.assert_allclose(device.to_host(got), linalg.spsolve_triangular(L, b))


def test_constraints_are_those_of_the_host(device: Any) -> None:
    A, b = laplacian(6, 2), numbers((12, 2))
    C, f = linalg.constrain(A, b, [0, 5], [1.0, 2.0])
    D, g = linalg.constrain(there(device, A), device.from_host(b), [0, 5], [1.0, 2.0])
    np.testing.assert_allclose(device.to_host(D.toarray()), C.toarray())
    np.testing.assert_allclose(device.to_host(g), f)


def test_nothing_is_moved(device: Any) -> None:
    A, b, name = hermitian(8), np.ones(8), repr(device.name)
    B = there(device, A)
    with pytest.raises(TypeError, match=f"A: wanted it on 'cpu', where b is, got one on {name}: nothing is moved"):
        linalg.cg(B, b)
    with pytest.raises(TypeError, match=f"M: wanted it on 'cpu', where b is, got one on {name}"):
        linalg.cg(A, b, M=linalg.block_jacobi(B))
    with pytest.raises(TypeError, match=f"r: wanted a dense array on {name}, got numpy ndarray"):
        linalg.block_jacobi(B) @ b
    with pytest.raises(TypeError, match=f"near_nullspace: wanted a dense array on {name}"):
        linalg.smoothed_aggregation(B, np.ones((8, 1)))
    with pytest.raises(TypeError, match="A: spsolve works on the CPU, and nothing is moved"):
        linalg.spsolve(B, b)
    assert bg.linalg is linalg
