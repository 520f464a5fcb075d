"""`sddmm` and `matmul_backward` on every backend, against dense NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend import numpy_backend
from bsrgemm._backend.registry import Backend
from bsrgemm._products import host as products_host

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    np.dtype(x) for x in ("bool", "int8", "uint16", "int64", "float16", BFLOAT16, "float32", "float64", "complex64")
]


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    drawn = rng.integers(-3, 4, shape) if np.dtype(dtype).kind in "biu" else rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        drawn = drawn + 1j * rng.standard_normal(shape)
    return drawn.astype(dtype)


def pattern_of(
    backend: Backend, rows: int, cols: int, block: tuple[int, int], density: float = 0.4, **more: Any
) -> Any:
    stored = np.random.default_rng(3).random((rows, cols)) < density
    i, j = np.nonzero(stored)
    values = np.full((len(i), *block), 7.0)  # not read
    A = bg.bsr_array((values, (i, j)), shape=(rows * block[0], cols * block[1]), **more)
    return A if backend.name == "cpu" else A.to_device(backend.name)


def dense(backend: Backend, A: Any) -> np.ndarray[Any, Any]:
    return A.toarray() if backend.name == "cpu" else A.get().toarray()


def mask(backend: Backend, A: Any) -> np.ndarray[Any, Any]:
    ones = A._with_data(backend.xp.ones(A.data.shape, np.float64))
    return dense(backend, ones) != 0


def exact(X: Any, Y: Any, where: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    wide = np.complex128 if dtype.kind == "c" else np.float64 if dtype.kind not in "biu" else np.int64
    if dtype == np.bool_:
        return np.where(where, (X.astype(int) @ Y.astype(int)) > 0, False)
    return np.where(where, X.astype(wide) @ Y.astype(wide), 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block", "K"), [((1, 1), 5), ((3, 2), 17), ((16, 8), 40), ((5, 7), 1)])
def test_the_blocks_are_those_of_the_dense_product(backend: Backend, dtype: np.dtype[Any], block: Any, K: int) -> None:
    P = pattern_of(backend, 6, 9, block)
    X, Y = numbers((6 * block[0], K), dtype), numbers((K, 9 * block[1]), dtype, 1)
    got = bg.sddmm(backend.from_host(X), backend.from_host(Y), P)
    assert got.dtype == dtype and got.blocksize == block and type(got) is type(P)
    want = exact(X, Y, mask(backend, P), dtype)
    if dtype.kind in "biu":
        np.testing.assert_array_equal(dense(backend, got), want.astype(dtype))  # sums wrap
    else:
        eps = {2: 4e-3 if dtype == np.float16 else 3e-2, 4: 1e-5, 8: 1e-5 if dtype.kind == "c" else 1e-13}
        scale = np.abs(X).astype(np.float64) @ np.abs(Y).astype(np.float64) + 1
        shown = dense(backend, got).astype(want.dtype)
        assert np.max(np.abs(shown - want) / scale) <= eps[dtype.itemsize]
    np.testing.assert_array_equal(backend.to_host(got.indices), backend.to_host(P.indices))


def test_strides_orders_and_mixed_dtypes(backend: Backend) -> None:
    P = pattern_of(backend, 4, 5, (4, 3))
    X, Y = numbers((16, 20), np.float32), numbers((15, 10), np.float64, 1)
    left, right = backend.from_host(X)[:, ::2], backend.from_host(Y).T
    got = bg.sddmm(left, right, P)
    assert got.dtype == np.float64
    np.testing.assert_allclose(
        dense(backend, got), np.where(mask(backend, P), X[:, ::2] @ Y.T, 0), rtol=1e-12, atol=1e-12
    )


def test_alpha_beta_out_and_out_dtype(backend: Backend) -> None:
    P = pattern_of(backend, 4, 5, (2, 3))
    X, Y = numbers((8, 6), np.float16), numbers((6, 15), np.float16, 1)
    a, b = backend.from_host(X), backend.from_host(Y)
    want = exact(X, Y, mask(backend, P), np.dtype(np.float16))
    single = bg.sddmm(a, b, P, out_dtype=np.float32, alpha=2)
    assert single.dtype == np.float32
    np.testing.assert_allclose(dense(backend, single), 2 * want, rtol=1e-5, atol=1e-5)
    out = P.astype(np.float32)
    before = dense(backend, out)
    assert bg.sddmm(a, b, P, alpha=-1, beta=0.5, out=out) is out
    np.testing.assert_allclose(dense(backend, out), 0.5 * before - want, rtol=1e-5, atol=1e-5)
    bg.sddmm(a, b, out, out=out)  # its own pattern
    np.testing.assert_allclose(dense(backend, out), want, rtol=1e-5, atol=1e-5)


def test_the_pattern_may_be_a_transpose(backend: Backend) -> None:
    P = pattern_of(backend, 4, 6, (2, 5))
    X, Y = numbers((30, 7), np.float64), numbers((7, 8), np.float64, 1)
    got = bg.sddmm(backend.from_host(X), backend.from_host(Y), P.T)
    assert got.shape == (30, 8) and got.blocksize == (5, 2)
    np.testing.assert_allclose(dense(backend, got), np.where(mask(backend, P).T, X @ Y, 0), rtol=1e-12, atol=1e-12)


def test_blocks_that_are_there_twice_are_computed_once(backend: Backend) -> None:
    indices, indptr = (
        backend.from_host(np.array([2, 0, 2, 1], np.int32)),
        backend.from_host(np.array([0, 3, 4], np.int32)),
    )
    P = bg.bsr_array((backend.xp.zeros((4, 2, 2)), indices, indptr), shape=(4, 6))
    X, Y = numbers((4, 3), np.float64), numbers((3, 6), np.float64, 1)
    where = np.kron([[1, 0, 1], [0, 1, 0]], np.ones((2, 2))) != 0
    got = bg.sddmm(backend.from_host(X), backend.from_host(Y), P)
    assert got.has_canonical_format and len(got.indices) == 3
    np.testing.assert_allclose(dense(backend, got), np.where(where, X @ Y, 0), rtol=1e-13, atol=1e-13)
    with pytest.raises(ValueError, match="pattern: holds a block twice"):
        bg.sddmm(backend.from_host(X), backend.from_host(Y), P, out=P)


@pytest.mark.parametrize(("rows", "cols", "K"), [(0, 3, 4), (3, 0, 4), (3, 3, 0)])
def test_nothing_is_fine(backend: Backend, rows: int, cols: int, K: int) -> None:
    P = pattern_of(backend, rows, cols, (2, 2), density=1.0)
    X, Y = backend.xp.ones((2 * rows, K)), backend.xp.ones((K, 2 * cols))
    got = bg.sddmm(X, Y, P)
    np.testing.assert_array_equal(dense(backend, got), np.zeros((2 * rows, 2 * cols)))
    assert len(got.indices) == rows * cols


def test_empty_rows_and_patterns(backend: Backend) -> None:
    P = pattern_of(backend, 5, 5, (2, 2), density=0.0)
    assert bg.sddmm(backend.xp.ones((10, 3)), backend.xp.ones((3, 10)), P).nnz == 0


def test_panels_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    P = pattern_of(numpy_backend.HOST, 12, 30, (8, 4), density=0.7)
    X, Y = numbers((96, 50), np.float32), numbers((50, 120), np.float32, 1)
    want = bg.sddmm(X, Y, P).data
    monkeypatch.setattr(products_host, "_PANEL_BYTES", 3 * 4 * 50 * 4)
    for name in ("_PANEL_SHARED", "_CALL_SHARED"):
        monkeypatch.setattr(products_host, name, 0)
    np.testing.assert_allclose(bg.sddmm(X, Y, P).data, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_gradients_are_those_of_the_dense_product(backend: Backend, dtype: str) -> None:
    A = pattern_of(backend, 4, 5, (3, 2)).astype(dtype)
    A = A._with_data(backend.from_host(numbers(A.data.shape, dtype, 5)))
    B, dC = numbers((10, 6), dtype, 6), numbers((12, 6), dtype, 7)
    dA, dB = bg.matmul_backward(backend.from_host(dC), A, backend.from_host(B))
    tolerance = 1e-4 if dtype == "float32" else 1e-12
    want = np.where(mask(backend, A), dC @ B.conj().T, 0)
    np.testing.assert_allclose(dense(backend, dA), want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(backend.to_host(dB), dense(backend, A).conj().T @ dC, rtol=tolerance, atol=tolerance)
    assert dA.blocksize == A.blocksize


def test_gradients_match_differences() -> None:
    A = pattern_of(numpy_backend.HOST, 2, 3, (2, 2), density=0.8)
    B, weights = numbers((6, 4), np.float64), numbers((4, 4), np.float64, 2)
    dA, _ = bg.matmul_backward(weights, A, B)
    step = 1e-6
    for p in range(len(A.data)):
        moved = A.copy()
        moved.data[p, 1, 0] += step
        change = ((moved @ B - A @ B) * weights).sum() / step
        assert dA.data[p, 1, 0] == pytest.approx(change, rel=1e-5, abs=1e-6)


P = bg.bsr_array(np.ones((4, 6)), blocksize=(2, 2))
EYE = bg.bsr_array(np.eye(4, 6), blocksize=(2, 2))
X, Y = np.ones((4, 3)), np.ones((3, 6))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: bg.sddmm(X, Y, P.toarray()), TypeError, "pattern: wanted a bsr_array or bsr_matrix, got ndarray"),
        (lambda: bg.sddmm(X, Y[:2], P), ValueError, r"X is \(4, 3\), Y is \(2, 6\), pattern is \(4, 6\)"),
        (lambda: bg.sddmm(X.T, Y, P), ValueError, "dimension mismatch"),
        (lambda: bg.sddmm(X[0], Y, P), ValueError, "X: wanted 2 dimensions, got 1"),
        (lambda: bg.sddmm(X, P, P), TypeError, "Y: wanted a dense array on 'cpu', got"),
        (lambda: bg.sddmm(X, Y, P, beta=1), ValueError, "beta: got 1 without an `out`"),
        (lambda: bg.sddmm(X, Y, P, alpha="2"), TypeError, "alpha: wanted a number, got str"),
        (lambda: bg.sddmm(X, Y, P, out=np.ones((4, 6))), TypeError, "out: wanted a bsr_array or bsr_matrix on 'cpu'"),
        (lambda: bg.sddmm(X, Y, P, out=P.astype("float32"), out_dtype="float64"), ValueError, "out: wanted dtype"),
        (lambda: bg.sddmm(X, Y, P, out=P.astype("int8")), TypeError, "out_dtype: int8 cannot hold"),
        (lambda: bg.sddmm(X, Y, P, out=P.tobsr((1, 2))), ValueError, "out: wanted the blocksize of the pattern"),
        (lambda: bg.sddmm(X, Y, P, out=EYE), ValueError, "out: wanted the blocks of the pattern, got other indices"),
        (lambda: bg.matmul_backward(X, X, Y), TypeError, "A: wanted a bsr_array or bsr_matrix, got ndarray"),
        (lambda: bg.matmul_backward(X, P, X), ValueError, "matmul_backward: dimension mismatch"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
