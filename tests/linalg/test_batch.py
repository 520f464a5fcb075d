"""Batches of matrices with one pattern: products, block Jacobi and conjugate gradients, on every backend."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._backend.base import Backend
from bsrgemm.linalg.systems import _preconditioner

from .problems import numbers, plate

pytestmark = pytest.mark.fake

DTYPES = ("float32", "float64", "complex64", "complex128")


@pytest.fixture(autouse=True)
def told() -> Any:
    """A solver that fails must be expected to."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", linalg.SolverWarning)
        yield


def systems(count: int = 5, dtype: str = "float64", n: int = 4) -> bg.bsr_batch:
    """Plates of n x n nodes, each on a bed of another stiffness: some are solved sooner than others."""
    A = plate(n)[0].astype(dtype)
    bed = bg.eye(A.shape[0], blocksize=A.blocksize, dtype=dtype)
    return bg.bsr_batch([A + bed * dtype_number(dtype, 10.0**k) for k in range(-2, count - 2)])


def dtype_number(dtype: str, value: float) -> Any:
    return np.dtype(dtype).type(value)


def there(backend: Backend, A: bg.bsr_batch) -> bg.bsr_batch:
    return A.to_device(backend.name)


# ------------------------------------------------------------------------------------------------- the class
def test_a_batch_is_its_matrices(backend: Backend) -> None:
    host = systems(3)
    A = there(backend, host)
    assert A.shape == (3, 32, 32) and len(A) == 3 and A.ndim == 3
    assert A.blocksize == (2, 2) and A.dtype == np.float64
    dense = backend.to_host(A.toarray())
    for k in (0, 1, 2, -1):
        np.testing.assert_array_equal(dense[k], backend.to_host(A[k].toarray()))
        np.testing.assert_array_equal(dense[k], host[k].toarray())
    whole = backend.to_host(A.tobsr().toarray())
    assert whole.shape == (96, 96)
    np.testing.assert_array_equal(whole[32:64, 32:64], dense[1])
    assert not whole[:32, 32:].any()
    assert (A is there(backend, A)) and f"on {backend.name!r}" in repr(A)
    np.testing.assert_array_equal(backend.to_host(A.indices), host.indices)
    np.testing.assert_array_equal(backend.to_host(A.indptr), host.indptr)


def test_data_is_shared_and_can_be_changed_in_place() -> None:
    A = systems(2)
    data = A.data.copy()
    B = bg.bsr_batch((data, A.indices, A.indptr), shape=A.shape[1:])
    assert B.data is data and np.shares_memory(B[1].data, data) and np.shares_memory(B.tobsr().data, data)
    data[1] *= 2
    x = numbers((2, 32))
    np.testing.assert_allclose((B @ x)[1], 2 * (A @ x)[1])
    copied = bg.bsr_batch((data, A.indices, A.indptr), shape=A.shape[1:], copy=True)
    assert not np.shares_memory(copied.data, data) and not np.shares_memory(B.copy().data, data)
    strided = bg.bsr_batch((np.asfortranarray(data), A.indices, A.indptr), shape=A.shape[1:])
    np.testing.assert_array_equal(strided @ x, B @ x)


def test_matrices_and_their_batch_do_not_change_each_others_patterns() -> None:
    A = systems(2)
    before = A.indices.copy()
    for taken in (A[0], A.tobsr()):
        taken.indices[:] = 0
    np.testing.assert_array_equal(A.indices, before)
    np.testing.assert_array_equal(A[0].toarray(), systems(2)[0].toarray())


def test_other_numbers_and_dtypes(backend: Backend) -> None:
    A = there(backend, systems(3))
    B = A.with_data(A.data * 2)
    np.testing.assert_array_equal(backend.to_host(B.toarray()), 2 * backend.to_host(A.toarray()))
    more = A.with_data(backend.xp.concatenate([A.data, A.data]))
    assert more.shape == (6, 32, 32)
    np.testing.assert_array_equal(backend.to_host(more[4].toarray()), backend.to_host(A[1].toarray()))
    narrow = A.astype("float32")
    assert narrow.dtype == np.float32 and narrow[0].dtype == np.float32 and A.dtype == np.float64
    assert A.with_data(narrow.data).dtype == np.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [None, 1, 3])
def test_products_are_those_of_the_matrices(backend: Backend, dtype: str, columns: int | None) -> None:
    rng = np.random.default_rng(3)
    pattern = bg.random(12, 20, blocksize=(3, 4), density=0.5, seed=1)
    data = numbers((5, *pattern.data.shape), dtype)
    A = there(backend, bg.bsr_batch((data, pattern.indices, pattern.indptr), shape=pattern.shape))
    X = numbers((5, 20) if columns is None else (5, 20, columns), dtype, int(rng.integers(9)))
    Y = A @ backend.from_host(X)
    assert backend.is_dense(Y) and Y.dtype == dtype and Y.shape == (5, 12, *X.shape[2:])
    dense = np.stack([pattern._with_data(x).toarray() for x in data])
    want = np.einsum("smn,sn...->sm...", dense, X)
    np.testing.assert_allclose(
        backend.to_host(Y), want, rtol=0, atol=1e-4 if dtype in ("float32", "complex64") else 1e-12
    )


def test_operands_of_other_dtypes_and_layouts(backend: Backend) -> None:
    A = there(backend, systems(3, "float32"))
    X = numbers((2, 32, 3))
    turned = backend.from_host(X).transpose(2, 1, 0)
    found = backend.to_host(A @ turned)
    assert found.dtype == np.float64
    want = np.einsum("smn,snk->smk", backend.to_host(A.toarray()).astype(float), X.transpose(2, 1, 0))
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_blocks_that_are_stored_twice_count_twice() -> None:
    data = np.arange(1.0, 9).reshape(2, 4, 1, 1)
    A = bg.bsr_batch((data, [1, 0, 1, 0], [0, 3, 4]), shape=(2, 2))
    np.testing.assert_array_equal(A.toarray(), [[[2, 4], [4, 0]], [[6, 12], [8, 0]]])
    np.testing.assert_array_equal(A @ np.ones((2, 2)), [[6, 4], [18, 8]])


# ------------------------------------------------------------------------------------------------- block Jacobi
def test_block_jacobi_is_a_batch_of_inverses(backend: Backend) -> None:
    host = systems(3)
    M = linalg.block_jacobi(there(backend, host))
    assert isinstance(M, bg.bsr_batch) and M.shape == (3, 32, 32)
    r = numbers((3, 32, 2))
    found = backend.to_host(M @ backend.from_host(r))
    for k in range(3):
        np.testing.assert_allclose(found[k], linalg.block_jacobi(host[k]) @ r[k], rtol=1e-12)


def test_a_block_without_an_inverse_is_named_with_its_matrix(backend: Backend) -> None:
    host = systems(3)
    own = int(np.flatnonzero((host.indices == 5) & (np.repeat(np.arange(16), np.diff(host.indptr)) == 5))[0])
    host.data[2, own] = 0
    A = there(backend, host)
    with pytest.raises(ValueError, match="A: diagonal block 5 of matrix 2 is singular"):
        linalg.block_jacobi(A)


# ------------------------------------------------------------------------------------------------- cg
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [None, 2])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_every_system_is_solved(backend: Backend, dtype: str, columns: int | None, preconditioned: bool) -> None:
    A = there(backend, systems(5, dtype))
    b = numbers((5, 32) if columns is None else (5, 32, columns), dtype)
    rtol = 1e-4 if dtype in ("float32", "complex64") else 1e-10
    M = linalg.block_jacobi(A) if preconditioned else None
    x, info = linalg.cg(A, backend.from_host(b), M=M, rtol=rtol)
    assert backend.is_dense(x) and x.dtype == dtype and isinstance(info, np.ndarray)
    assert info.shape == (5, *b.shape[2:]) and not info.any()
    dense, found = backend.to_host(A.toarray()), backend.to_host(x)
    left = np.linalg.norm(b - np.einsum("smn,sn...->sm...", dense, found), axis=1)
    assert (left <= 1.01 * rtol * np.linalg.norm(b, axis=1)).all()


def test_systems_do_not_disturb_each_other(backend: Backend) -> None:
    """Each is what it is alone: one has no load, one is solved at the start, and one has a matrix of zeros."""
    host = systems(5)
    host.data[4] = 0
    A, b, x0 = there(backend, host), numbers((5, 32)), np.zeros((5, 32))
    b[1], x0[2] = 0, np.linalg.solve(host[2].toarray(), b[2])
    with pytest.warns(linalg.SolverWarning, match="1 of 5 systems are not solved; system 4: A is not positive"):
        x, info = linalg.cg(A, backend.from_host(b), backend.from_host(x0), rtol=1e-10)
    assert info.tolist() == [0, 0, 0, 0, -1]
    found = backend.to_host(x)
    assert not found[1].any() and np.isfinite(found).all()
    np.testing.assert_array_equal(found[2], x0[2])
    for k in (0, 3):
        alone, _ = linalg.cg(host[k], b[k], rtol=1e-10)
        np.testing.assert_allclose(found[k], alone, rtol=1e-9, atol=1e-12)


def test_systems_that_are_solved_stay_as_they_are(backend: Backend) -> None:
    A, b = there(backend, systems(5)), numbers((5, 32))
    steps: list[Any] = []
    _, info = linalg.cg(A, backend.from_host(b), rtol=1e-8, callback=lambda x: steps.append(backend.to_host(x).copy()))
    assert not info.any()
    changes = (np.diff(np.stack(steps), axis=0) != 0).any(axis=2)  # by iteration and system
    lengths = 1 + changes.sum(axis=0)
    assert all(changes[: length - 1, k].all() for k, length in enumerate(lengths))
    assert lengths[0] == len(steps) and lengths[4] < lengths[2] < lengths[0]


def test_limits_are_told_for_each_system(backend: Backend) -> None:
    A, b = there(backend, systems(5)), numbers((5, 32, 2))
    with pytest.warns(linalg.SolverWarning, match=r"systems are not solved; system \d, column \d: not conv") as said:
        x, info = linalg.cg(A, backend.from_host(b), rtol=1e-6, maxiter=9)
    assert said[0].filename == __file__
    assert info.shape == (5, 2) and set(info.ravel().tolist()) == {0, 9} and not info[4].any() and info[0].all()
    with pytest.warns(linalg.SolverWarning):
        x, info = linalg.cg(A, backend.from_host(b), rtol=1e-6, maxiter=0)
    assert (info == 1).all() and not backend.to_host(x).any()


def test_one_preconditioner_may_serve_all_systems(backend: Backend) -> None:
    host = systems(4, n=8)
    A, b = there(backend, host), numbers((4, 128, 2))
    M = linalg.smoothed_aggregation(A[1], max_coarse=20)
    for side in (b, b[:, :, 0].copy()):
        x, info = linalg.cg(A, backend.from_host(side), M=M, rtol=1e-9)
        assert not info.any()
        want = np.stack([np.linalg.solve(host[k].toarray(), side[k]) for k in range(4)])
        np.testing.assert_allclose(backend.to_host(x), want, rtol=1e-6, atol=1e-8)
    alone = numbers((4, 128))
    found = backend.to_host(_preconditioner(M, A)(backend.from_host(alone)))
    for k in range(4):
        want = backend.to_host(M @ backend.from_host(alone[k]))
        np.testing.assert_allclose(found[k], want, rtol=1e-9, atol=1e-12)


def test_a_preconditioner_in_float32_serves_float64(backend: Backend) -> None:
    A, b = there(backend, systems(3)), numbers((3, 32))
    x, info = linalg.cg(A, backend.from_host(b), M=linalg.block_jacobi(A.astype("float32")), rtol=1e-11)
    assert not info.any() and x.dtype == np.float64


def test_nan_ends_its_own_system_alone() -> None:
    A, b = systems(3), numbers((3, 32))
    A.data[1, 4] = np.nan
    with pytest.warns(linalg.SolverWarning, match="1 of 3 systems are not solved; system 1: NaN or infinity"):
        x, info = linalg.cg(A, b, rtol=1e-9)
    assert info.tolist() == [0, -1, 0] and np.isfinite(x[[0, 2]]).all()


# ------------------------------------------------------------------------------------------------- bad input
def _bad() -> list[Any]:
    A = systems(2)
    parts, b = (A.data, A.indices, A.indptr), np.ones((2, 32))
    wide = bg.random(4, 6, blocksize=(2, 2), density=1, seed=0)
    other = bg.bsr_batch([wide, wide])
    return [
        (lambda: bg.bsr_batch(np.eye(4)), TypeError, "arg1: wanted .data, indices, indptr. or a sequence of bsr_array"),
        (lambda: bg.bsr_batch([]), TypeError, "arg1: wanted"),
        (lambda: bg.bsr_batch([wide, wide.toarray()]), TypeError, "arg1: wanted"),
        (lambda: bg.bsr_batch([wide, A[0]]), ValueError, r"arg1\[1\]: wanted the shape of arg1\[0\], "),
        (lambda: bg.bsr_batch([A[0], bg.eye(32, blocksize=(2, 2))]), ValueError, r"arg1\[1\]: wanted the blocks of"),
        (lambda: bg.bsr_batch([wide], shape=(4, 4)), ValueError, r"shape: wanted \(4, 6\)"),
        (lambda: bg.bsr_batch((A.data[0], *parts[1:])), ValueError, r"data: wanted shape \(batch, blocks, R, C\)"),
        (lambda: bg.bsr_batch((A.data[:0], *parts[1:])), ValueError, "with one matrix at least"),
        (lambda: bg.bsr_batch(([[[[1.0]]]], [0], [0, 1])), TypeError, "data: wanted a NumPy or CuPy array, got list"),
        (lambda: bg.bsr_batch((A.data, [0], A.indptr)), ValueError, "indices"),
        (lambda: bg.bsr_batch(parts, shape=(4, 4)), ValueError, "indptr"),
        (lambda: A[2], IndexError, "index: wanted one from -2 to 1, got 2"),
        (lambda: A[0:1], TypeError, "index: wanted an integer"),
        (lambda: A @ np.ones(32), ValueError, r"X: wanted shape \(2, 32\) or \(2, 32, k\), got \(32,\)"),
        (lambda: A @ np.ones((3, 32)), ValueError, "X: wanted shape"),
        (lambda: A @ [[1.0]], TypeError, "X: wanted a dense array on 'cpu', got list"),
        (lambda: np.ones((2, 32)) @ A, TypeError, "unsupported operand"),
        (lambda: A.with_data(A.data[:, :3]), ValueError, r"data: wanted shape \(batch, "),
        (lambda: A.with_data([1]), TypeError, "data: wanted a dense array on 'cpu', got list"),
        (lambda: linalg.cg(other, np.ones((2, 6))), ValueError, r"A: wanted square matrices, got shape \(2, 4, 6\)"),
        (lambda: linalg.cg(A, np.ones(32)), ValueError, r"b: wanted shape \(2, 32\) or"),
        (lambda: linalg.cg(A, {1.0}), TypeError, "b: wanted a dense array on 'cpu', where A is, got a set"),
        (lambda: linalg.cg(A, np.full((2, 32), np.nan)), ValueError, "b: wanted finite numbers"),
        (lambda: linalg.cg(A, b, np.ones(32)), ValueError, r"x0: wanted an array of shape \(2, 32\)"),
        (lambda: linalg.cg(A, b, rtol=-1), ValueError, "rtol: wanted a finite number"),
        (lambda: linalg.cg(A, b, maxiter=1.5), ValueError, "maxiter: wanted an integer"),
        (lambda: linalg.cg(A, b, M=np.eye(3)), ValueError, r"M: wanted shape \(2, 32, 32\), or \(32, 32\) for all"),
        (
            lambda: linalg.cg(A[0], b[0], M=A),
            TypeError,
            "M: wanted a matrix or a linear .* for cg, got bsr_batch",
        ),
        (
            lambda: linalg.minres(A, b[0]),
            TypeError,
            "A: wanted a matrix or a linear .* for minres, got bsr_batch",
        ),
        (lambda: linalg.block_jacobi(other), ValueError, "A: wanted a square matrix"),
        (lambda: linalg.chebyshev(A), TypeError, "A: wanted a bsr_array or bsr_matrix, got bsr_batch"),
    ]


@pytest.mark.parametrize("case", range(len(_bad())))
def test_bad_input_is_named(case: int) -> None:
    call, error, text = _bad()[case]
    with pytest.raises(error, match=text):
        call()


def test_nothing_is_moved() -> None:

    A, b = systems(2), np.ones((2, 32))
    B = A.to_device("cuda")
    with pytest.raises(TypeError, match="b: wanted a dense array on 'cuda', where A is, got numpy ndarray"):
        linalg.cg(B, b)
    with pytest.raises(TypeError, match="M: wanted it on 'cpu', where A is, got one on 'cuda': nothing is moved"):
        linalg.cg(A, b, M=linalg.block_jacobi(B))
    with pytest.raises(TypeError, match="arg1: wanted all on 'cpu', got matrix 1 on 'cuda'"):
        bg.bsr_batch([A[0], B[0]])
