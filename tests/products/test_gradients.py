"""Gradients of products: every kind of operand against dense NumPy, and against differences."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg

ATOL = {"float16": 2e-2, "bfloat16": 2e-1, "float32": 1e-4, "float64": 1e-12, "complex128": 1e-12}


def numbers(shape: tuple[int, ...], dtype: Any = "float64", seed: int = 0) -> Any:
    rng = np.random.default_rng([seed, *shape])
    found = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        return (found + 1j * rng.standard_normal(shape)).astype(dtype)
    return found.astype(dtype)


def matrix(shape: tuple[int, int], blocksize: tuple[int, int], dtype: Any = "float64", seed: int = 0) -> bg.bsr_array:
    pattern = bg.random(*shape, blocksize=blocksize, density=0.6, seed=seed)
    return pattern._with_data(numbers(pattern.data.shape, dtype, seed))


def stored(A: Any) -> Any:
    ones = bg.bsr_array((np.ones(A.data.shape), A.indices, A.indptr), shape=A.shape)
    return ones.toarray() != 0


def adjoint(x: Any) -> Any:
    return x.conj().swapaxes(-1, -2)


def wide(x: Any) -> Any:
    return x if x.dtype.kind == "c" else x.astype(np.float64)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64", "complex128"], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_with_a_dense_operand_on_either_side(dtype: Any, turned: bool, batch: tuple[int, ...]) -> None:
    A = matrix((6, 8), (3, 2), dtype, 1)
    if turned:
        A = A.T
    M, K = A.shape
    B, dC = numbers((*batch, K, 5), dtype, 2), numbers((*batch, M, 5), dtype, 3)
    dA, dB = bg.matmul_backward(dC, A, B)
    X, dY = numbers((*batch, 5, M), dtype, 4), numbers((*batch, 5, K), dtype, 5)
    dX, dA2 = bg.matmul_backward(dY, X, A)
    dense, at = wide(A.toarray()), stored(A)
    sums = lambda x: x.sum(axis=0) if batch else x  # noqa: E731
    close = {"rtol": 0, "atol": ATOL[np.dtype(dtype).name]}
    np.testing.assert_allclose(wide(dA.toarray()), np.where(at, sums(wide(dC) @ adjoint(wide(B))), 0), **close)
    np.testing.assert_allclose(wide(dB), adjoint(dense) @ wide(dC), **close)
    np.testing.assert_allclose(wide(dX), wide(dY) @ adjoint(dense), **close)
    np.testing.assert_allclose(wide(dA2.toarray()), np.where(at, sums(adjoint(wide(X)) @ wide(dY)), 0), **close)
    for gradient in (dA, dA2):
        assert (gradient.dtype, gradient.blocksize, gradient.shape) == (np.dtype(dtype), A.blocksize, A.shape)
        np.testing.assert_array_equal(stored(gradient), at)
    assert dB.dtype == dX.dtype == np.dtype(dtype)


def test_sums_over_a_batch_are_rounded_once() -> None:
    A = bg.eye(2, blocksize=(2, 2), dtype="float16")
    B, dC = np.ones((4096, 2, 1), "float16"), np.ones((4096, 2, 1), "float16")
    dA, _ = bg.matmul_backward(dC, A, B)
    np.testing.assert_array_equal(dA.toarray(), np.full((2, 2), 4096))  # sums in float16 end at 2048


def test_an_empty_batch_gives_zeros_at_the_blocks() -> None:
    A = matrix((6, 8), (3, 2))
    dA, dB = bg.matmul_backward(np.ones((0, 6, 5)), A, np.ones((0, 8, 5)))
    assert dB.shape == (0, 8, 5) and len(dA.data) == len(A.data) and not dA.data.any()


@pytest.mark.parametrize("turned", [False, True])
def test_vectors(turned: bool) -> None:
    A = matrix((6, 8), (3, 2), seed=1)
    A = A.T if turned else A
    M, K = A.shape
    x, dy = numbers((K,)), numbers((M,), seed=1)
    dA, dx = bg.matmul_backward(dy, A, x)
    np.testing.assert_allclose(dA.toarray(), np.where(stored(A), np.outer(dy, x), 0))
    np.testing.assert_allclose(dx, A.toarray().T @ dy)
    dw, dA = bg.matmul_backward(x, dy, A)
    np.testing.assert_allclose(dA.toarray(), np.where(stored(A), np.outer(dy, x), 0))
    np.testing.assert_allclose(dw, A.toarray() @ x)


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_two_sparse_operands(turned: tuple[bool, bool], dtype: str) -> None:
    A = matrix((4, 6), (2, 3), dtype, 1) if not turned[0] else matrix((6, 4), (3, 2), dtype, 1).T
    B = matrix((6, 8), (3, 4), dtype, 2) if not turned[1] else matrix((8, 6), (4, 3), dtype, 2).T
    C = A @ B
    dC = C._with_data(numbers(C.data.shape, dtype, 3))
    dA, dB = bg.matmul_backward(dC, A, B, alpha=2)
    np.testing.assert_allclose(dA.toarray(), np.where(stored(A), 2 * dC.toarray() @ adjoint(B.toarray()), 0))
    np.testing.assert_allclose(dB.toarray(), np.where(stored(B), 2 * adjoint(A.toarray()) @ dC.toarray(), 0))
    assert (dA.blocksize, dB.blocksize) == (A.blocksize, B.blocksize)


def test_two_sparse_operands_without_a_common_block() -> None:
    A = bg.bsr_array((np.ones((1, 2, 2)), ([0], [0])), shape=(4, 4))
    B = bg.bsr_array((np.ones((1, 2, 2)), ([1], [1])), shape=(4, 4))
    dA, dB = bg.matmul_backward(bg.bsr_array((4, 4), blocksize=(2, 2)), A, B)
    assert len(dA.data) == len(dB.data) == 1 and not dA.data.any() and not dB.data.any()
    nothing = bg.bsr_array((4, 4), blocksize=(2, 2))
    dA, dB = bg.matmul_backward(B, nothing, B)
    assert dA.nnz == 0 and not dB.data.any()


def test_a_gradient_outside_of_the_pattern_of_the_product_is_used_too() -> None:
    A, B = bg.eye(4, blocksize=(2, 2)), bg.eye(4, blocksize=(2, 2))
    dC = bg.bsr_array(numbers((4, 4)), blocksize=(2, 2))
    dA, _ = bg.matmul_backward(dC, A, B)
    np.testing.assert_array_equal(dA.toarray(), np.where(stored(A), dC.toarray(), 0))


def test_blocks_that_are_stored_twice_have_one_gradient() -> None:
    twice = bg.bsr_array((np.ones((2, 2, 2)), np.array([0, 0]), np.array([0, 2])), shape=(2, 4))
    dC, B = numbers((2, 3)), numbers((4, 3), seed=1)
    for X, dY in ((B, dC), (np.stack([B, B]), np.stack([dC, dC]))):
        dA, _ = bg.matmul_backward(dY, twice, X)
        want = (dC @ B.T)[:, :2] * (1 if X.ndim == 2 else 2)
        assert len(dA.data) == 1
        np.testing.assert_allclose(dA.toarray()[:, :2], want)
    dA, _ = bg.matmul_backward(
        bg.bsr_array(dC[:, :2], blocksize=(2, 2)), twice, bg.bsr_array(B[:, :2], blocksize=(2, 2))
    )
    assert len(dA.data) == 1


@pytest.mark.parametrize("alpha", [3, -0.5, 1 + 2j])
def test_a_factor_is_conjugated(alpha: complex) -> None:
    dtype = "complex128" if isinstance(alpha, complex) else "float64"
    A, B, dC = matrix((6, 8), (3, 2), dtype), numbers((8, 5), dtype), numbers((6, 5), dtype, 1)
    once = bg.matmul_backward(dC, A, B)
    scaled = bg.matmul_backward(dC, A, B, alpha=alpha)
    for x, y in zip(once, scaled, strict=True):
        x, y = (z.toarray() if hasattr(z, "toarray") else z for z in (x, y))
        np.testing.assert_allclose(y, np.conj(alpha) * x)


def test_the_gradient_of_a_real_operand_is_real() -> None:
    A, B = matrix((6, 8), (3, 2)), numbers((8, 5), "complex128")
    dC = numbers((6, 5), "complex128", 1)
    dA, dB = bg.matmul_backward(dC, A, B)
    assert (dA.dtype, dB.dtype) == (np.float64, np.complex128)
    np.testing.assert_allclose(dA.toarray(), np.where(stored(A), (dC @ adjoint(B)).real, 0))
    dX, dA = bg.matmul_backward(numbers((5, 8), "complex128"), numbers((5, 6)), matrix((6, 8), (3, 2), "complex128"))
    assert (dX.dtype, dA.dtype) == (np.float64, np.complex128)


@pytest.mark.parametrize("kind", ["dense", "sparse", "left", "batch"])
def test_gradients_match_differences(kind: str) -> None:
    A = matrix((6, 8), (3, 2), seed=7)
    B: Any = {
        "dense": numbers((8, 5)),
        "sparse": matrix((8, 4), (2, 2), seed=8),
        "left": numbers((5, 6)),
        "batch": numbers((2, 8, 5)),
    }[kind]
    operands = [B, A] if kind == "left" else [A, B]
    weights = bg.matmul(*operands)
    if kind == "sparse":
        weights = weights._with_data(numbers(weights.data.shape, seed=9))
    else:
        weights = numbers(weights.shape, seed=9)

    def loss() -> float:
        C = bg.matmul(*operands)
        return float((C.multiply(weights)).sum() if kind == "sparse" else (C * weights).sum())

    gradients = bg.matmul_backward(weights, *operands)
    for operand, gradient in zip(operands, gradients, strict=True):
        values, found = (x.data if hasattr(x, "toarray") else x for x in (operand, gradient))
        for place in [(0,) * values.ndim, tuple(n - 1 for n in values.shape)]:
            before, values[place] = values[place], values[place] + 0.5
            above = loss()
            values[place] -= 1.0
            below = loss()
            values[place] = before
            assert found[place] == pytest.approx(above - below, rel=1e-9, abs=1e-9)


# ------------------------------------------------------------------------------------------------- sddmm
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize("turned", [False, True])
def test_gradients_of_sampled_products(dtype: str, turned: bool) -> None:
    pattern = matrix((6, 8), (3, 2))
    pattern = pattern.T if turned else pattern
    M, N = pattern.shape
    X, Y = numbers((M, 4), dtype), numbers((4, N), dtype, 1)
    S = bg.sddmm(X, Y, pattern, alpha=3)
    dS = bg.sddmm(numbers((M, 4), dtype, 3), numbers((4, N), dtype, 4), pattern)
    assert (dS._origin is not None) == turned  # a transpose that is not built
    dX, dY = bg.sddmm_backward(dS, X, Y, pattern, alpha=3)
    dense = dS.toarray()
    np.testing.assert_allclose(dX, 3 * dense @ adjoint(Y), atol=ATOL[dtype])
    np.testing.assert_allclose(dY, 3 * adjoint(X) @ dense, atol=ATOL[dtype])
    assert dX.dtype == dY.dtype == S.dtype


def test_sampled_products_with_a_transpose_on_one_side_only() -> None:
    pattern = matrix((6, 8), (3, 2))
    X, Y = numbers((8, 4)), numbers((4, 6), seed=1)
    dS = bg.sddmm(X, Y, pattern.T).copy()
    dX, _ = bg.sddmm_backward(dS, X, Y, pattern.T)
    np.testing.assert_allclose(dX, dS.toarray() @ Y.T)


def test_a_pattern_with_duplicates_has_its_blocks_once() -> None:
    twice = bg.bsr_array((np.ones((2, 2, 2)), np.array([0, 0]), np.array([0, 2])), shape=(2, 4))
    X, Y = numbers((2, 3)), numbers((3, 4))
    S = bg.sddmm(X, Y, twice)
    dX, _ = bg.sddmm_backward(S, X, Y, twice)
    np.testing.assert_allclose(dX, S.toarray() @ Y.T)


def test_the_gradient_of_a_real_factor_is_real() -> None:
    pattern = matrix((6, 8), (3, 2))
    X, Y = numbers((6, 4)), numbers((4, 8), "complex128")
    dS = bg.sddmm(X, Y, pattern)
    dX, dY = bg.sddmm_backward(dS, X, Y, pattern)
    assert (dX.dtype, dY.dtype) == (np.float64, np.complex128)
    np.testing.assert_allclose(dX, (dS.toarray() @ adjoint(Y)).real)


# ------------------------------------------------------------------------------------------------- vjp
def test_pullbacks_return_the_gradients() -> None:
    A, B, dC = matrix((6, 8), (3, 2)), numbers((8, 5)), numbers((6, 5), seed=1)
    C, pullback = bg.vjp(bg.matmul, A, B, alpha=2)
    np.testing.assert_array_equal(C, bg.matmul(A, B, alpha=2))
    dA, dB = pullback(dC)
    want = bg.matmul_backward(dC, A, B, alpha=2)
    np.testing.assert_array_equal(dA.toarray(), want[0].toarray())
    np.testing.assert_array_equal(dB, want[1])
    X, Y = numbers((6, 4)), numbers((4, 8))
    S, pullback = bg.vjp(bg.sddmm, X, Y, A, alpha=2)
    np.testing.assert_array_equal(S.toarray(), bg.sddmm(X, Y, A, alpha=2).toarray())
    for x, y in zip(pullback(S), bg.sddmm_backward(S, X, Y, A, alpha=2), strict=True):
        np.testing.assert_array_equal(x, y)
    C, pullback = bg.vjp(bg.matmul, A, A.T)
    assert [g.shape for g in pullback(C)] == [A.shape, A.T.shape]


def test_pullbacks_of_attention() -> None:
    q, k, v, dout = (numbers((1, 2, 9, 4), seed=s) for s in range(4))
    out, pullback = bg.vjp(bg.attention, q, k, v, causal=True)
    whole, lse = bg.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(out, whole)
    for x, y in zip(pullback(dout), bg.attention_backward(dout, q, k, v, whole, lse, causal=True), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(TypeError, match="dlse: wanted None"):
        pullback(dout, lse)
    (_, sums), pullback = bg.vjp(bg.attention, q, k, v, return_lse=True)
    want = bg.attention_backward(dout, q, k, v, *bg.attention(q, k, v, return_lse=True), dlse=sums)
    for x, y in zip(pullback(dout, sums), want, strict=True):
        np.testing.assert_array_equal(x, y)


A, B = matrix((6, 8), (3, 2)), np.ones((8, 5))
OTHER = bg.bsr_array(np.eye(6, 8), blocksize=(3, 2))
X, Y, Q = np.ones((6, 4)), np.ones((4, 8)), np.ones((1, 1, 4, 8))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: bg.matmul_backward(X, X, Y), TypeError, "A: wanted a bsr_array or bsr_matrix, got ndarray"),
        (lambda: bg.matmul_backward(np.ones((6, 4)), A, B), ValueError, r"dC is \(6, 4\), A is \(6, 8\), B"),
        (lambda: bg.matmul_backward(np.ones((5, 6)), np.ones((5, 6)), A), ValueError, r"A is \(5, 6\), B is \(6, 8\)"),
        (lambda: bg.matmul_backward(np.ones((6, 5)), A, np.ones((7, 5))), ValueError, "dimension mismatch"),
        (lambda: bg.matmul_backward(np.ones(6), A, B), ValueError, "dimension mismatch"),
        (lambda: bg.matmul_backward(A, A, B), TypeError, "dC: wanted a dense array"),
        (lambda: bg.matmul_backward(np.ones((6, 5)), A, B, alpha="2"), TypeError, "alpha: wanted a number, got str"),
        (lambda: bg.matmul_backward(np.ones((6, 6)), A, A.T), TypeError, "dC: wanted a bsr_array or bsr_matrix, since"),
        (lambda: bg.matmul_backward(A @ A.T, A, A), ValueError, "dimension mismatch"),
        (lambda: bg.matmul_backward(A, A, A.T), ValueError, "dimension mismatch"),
        (lambda: bg.matmul_backward((A @ A.T).tobsr((1, 1)), A, A.T), ValueError, r"blocksize of A @ B, \(3, 3\), got"),
        (lambda: bg.sddmm_backward(X, X, Y, A), TypeError, "dS: wanted a bsr_array"),
        (lambda: bg.sddmm_backward(A, X, Y, X), TypeError, "pattern: wanted a bsr_array"),
        (lambda: bg.sddmm_backward(A, Y, Y, A), ValueError, "sddmm_backward: dimension mismatch"),
        (lambda: bg.sddmm_backward(A, X, X, A), ValueError, "sddmm_backward: dimension mismatch"),
        (lambda: bg.sddmm_backward(A.tobsr((1, 2)), X, Y, A), ValueError, "dS: wanted the blocksize of the pattern"),
        (lambda: bg.sddmm_backward(A.T, X, Y, A), ValueError, "dS: wanted the shape of the pattern"),
        (lambda: bg.sddmm_backward(OTHER, X, Y, A), ValueError, "dS: wanted the blocks of the pattern"),
        (lambda: bg.vjp(np.matmul, X, Y), TypeError, "function: wanted matmul, sddmm, attention or merge_states of"),
        (lambda: bg.vjp(bg.matmul, A, B, out=np.ones((6, 5))), TypeError, "out: has no gradient; call matmul without"),
        (lambda: bg.vjp(bg.sddmm, X, Y, A, out_dtype="float32"), TypeError, "out_dtype: has no gradient"),
        (lambda: bg.vjp(bg.attention, Q, Q, Q, v_scale=2.0), TypeError, "v_scale: has no gradient; call attention"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
