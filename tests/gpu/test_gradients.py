"""Gradients of products and sampled products on a card, beside those of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "float32", "float64", "complex128")
BLOCKS = ((3, 2), (16, 16), (64, 64))
#: How far a gradient may be from that of the host, relative to its largest element: both sum in float32 or better,
#: in different orders, and round to the dtype.
FAR = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-10, "complex128": 1e-10}


def numbers(shape: Any, dtype: str, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype.startswith("complex") else x).astype(dtype)


def matrix(dtype: str, block: tuple[int, int], turned: bool) -> Any:
    """A matrix of 6 x 8 blocks, half of them stored, or its transpose."""
    pattern = bg.random(6 * block[0], 8 * block[1], blocksize=block, density=0.5, seed=1)
    A = pattern._with_data(numbers(pattern.data.shape, dtype, 1))
    return A.T if turned else A


def there(x: Any) -> Any:
    """A matrix or an array on the card."""
    import cupy

    return x.to_device("cuda") if hasattr(x, "blocksize") else cupy.asarray(x)


def dense(x: Any) -> Any:
    """A matrix or an array as wide numbers on the host."""
    x = x.toarray() if hasattr(x, "blocksize") else x
    x = x.get() if hasattr(x, "get") else x
    return x.astype(complex if x.dtype.kind == "c" else float)


def compare(found: tuple[Any, ...], want: tuple[Any, ...], dtype: str) -> None:
    """Gradients of the card have the dtypes of those of the host, and their numbers up to rounding."""
    for got, wanted in zip(found, want, strict=True):
        assert got.dtype == wanted.dtype and type(got).__module__ != "numpy"
        np.testing.assert_allclose(
            dense(got), dense(wanted), rtol=0, atol=FAR[dtype] * max(1, abs(dense(wanted)).max())
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_products_with_a_dense_operand(dtype: str, block: Any, turned: bool, batch: Any, side: str) -> None:
    A = matrix(dtype, block, turned)
    M, K = A.shape
    operands: tuple[Any, Any] = (A, numbers((*batch, K, 5), dtype, 3))
    dC = numbers((*batch, M, 5), dtype, 2)
    if side == "right":
        operands, dC = (numbers((*batch, 5, M), dtype, 3), A), numbers((*batch, 5, K), dtype, 2)
    want = bg.matmul_backward(dC, *operands, alpha=2)
    found = bg.matmul_backward(there(dC), *map(there, operands), alpha=2)
    compare(found, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_two_sparse_operands(dtype: str, block: Any, turned: bool) -> None:
    A = matrix(dtype, block, turned)
    C = A @ A.T
    dC = C._with_data(numbers(C.data.shape, dtype, 9))
    want = bg.matmul_backward(dC, A, A.T, alpha=2)
    found = bg.matmul_backward(there(dC), there(A), there(A.T), alpha=2)
    compare(found, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_sampled_products(dtype: str, block: Any, turned: bool) -> None:
    pattern = matrix(dtype, block, turned)
    M, K = pattern.shape
    X, Y = numbers((M, 7), dtype, 4), numbers((7, K), dtype, 5)
    S = bg.sddmm(X, Y, pattern)
    dS = S._with_data(numbers(S.data.shape, dtype, 6))
    want = bg.sddmm_backward(dS, X, Y, pattern)
    found = bg.sddmm_backward(there(dS), there(X), there(Y), there(pattern))
    compare(found, want, dtype)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("function", ["matmul", "sddmm"])
def test_pullbacks(dtype: str, function: str) -> None:
    """`vjp` returns the result of the function, and gradients that can be asked for twice."""
    A = matrix(dtype, (16, 16), False)
    M, K = A.shape
    operands: tuple[Any, ...] = (A, numbers((K, 5), dtype, 3))
    if function == "sddmm":
        operands = (numbers((M, 7), dtype, 4), numbers((7, K), dtype, 5), A)
    want, pull = bg.vjp(getattr(bg, function), *operands, alpha=2)
    found, pull_there = bg.vjp(getattr(bg, function), *map(there, operands), alpha=2)
    compare((found,), (want,), dtype)
    gradient = want * 0.5
    for _ in range(2):
        compare(pull_there(there(gradient)), pull(gradient), dtype)
