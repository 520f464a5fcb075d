"""gemm_sm80, the product on the tensor cores of Ampere and newer, on the card against float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._kernels import forced_kernel
from bsrgemm.dtypes import BFLOAT16, HALF_DTYPES

from .marks import some_under_memcheck
from .product_cases import (  # noqa: F401  (fixtures)
    MEMCHECKED,
    acc_of,
    assert_close,
    dense,
    device,
    exact_dtype,
    exact_product,
    nothing_is_small,
    pattern,
    served_by,
    strided,
    values,
)
from .repeats import differing

pytestmark = pytest.mark.gpu

SM80 = [
    ("float16", "float16", None),
    ("float16", "float32", None),
    (BFLOAT16, BFLOAT16, None),
    ("float32", "float32", None),
    ("float32", "float32", "tf32"),
    ("float64", "float64", None),
    ("int8", "int32", None),
]


def on_sm80() -> Any:
    """Inside, products run on gemm_sm80, also where gemm_sm90 would be faster."""
    return forced_kernel.force_kernel("GemmSm80")


@pytest.mark.parametrize(("dtype", "out_dtype", "precision"), SM80, ids=str)
@pytest.mark.parametrize(
    "block", some_under_memcheck([(128, 128), (64, 96), (32, 32), (16, 64), (48, 160)], MEMCHECKED)
)
def test_portable_product_is_right_for_dtypes_blocks_and_layouts(dtype, out_dtype, precision, block, rng) -> None:
    import cupy

    dtype, out_dtype = np.dtype(dtype), np.dtype(out_dtype)
    exact = exact_dtype(out_dtype)
    for N, layout, transposed, (alpha, beta) in [
        (16, "C", False, (1, 0)),
        (208, "F", False, (2, 0)),
        (130, "C", True, (1, -1)),
        (144, "F", True, (1, 0)),
    ]:
        A = pattern(rng, 6, 5, *(block[::-1] if transposed else block), dtype)
        M, K = A[3][::-1] if transposed else A[3]
        pitch = -(-N * dtype.itemsize // 16) * 16 // dtype.itemsize  # rows start at multiples of 16 bytes
        B = values(rng, (K, pitch), dtype)[:, :N]
        D = dense(A, exact)
        D = D.T if transposed else D
        old = values(rng, (M, N), out_dtype)
        want = alpha * (D @ B.astype(exact)) + beta * old.astype(exact)
        size = 0.0 if exact.kind == "i" else abs(alpha) * np.abs(D) @ np.abs(B.astype(exact)) + abs(beta * old)
        dA, out = device(A), cupy.asarray(old)
        room = cupy.zeros((K, pitch), dtype)
        room[:, :N] = cupy.asarray(np.ascontiguousarray(B))
        X = room[:, :N] if layout == "C" else strided(np.ascontiguousarray(B), "F")
        with on_sm80():
            bg.matmul(dA.T if transposed else dA, X, out=out, alpha=alpha, beta=beta, precision=precision)
            assert served_by(dA, "gemm_sm80") or dtype.kind == "i"  # whose duplicates are added up in another matrix
        if precision == "tf32":
            assert (np.abs(out.get() - want) <= 2**-10 * size + 1e-6).all()
        else:
            assert_close(out.get(), want, size, 2 * K, np.float32 if dtype in HALF_DTYPES else out_dtype)


@pytest.mark.parametrize("N", [2, 5, 15, 33, 101])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_any_number_of_columns_runs_on_the_portable_kernel(dtype, N, rng, nothing_is_small) -> None:  # noqa: F811
    import cupy

    A = pattern(rng, 5, 4, 32, 32, np.dtype(dtype))
    B = values(rng, (A[3][1], N), np.dtype(dtype))
    want, size = exact_product(A, B)
    with on_sm80():
        dA = device(A)
        out = dA @ cupy.asarray(B)
        assert served_by(dA, "gemm_sm80")
    assert_close(out.get(), want, size, 2 * A[3][1], acc_of(np.dtype(dtype)))


@pytest.mark.parametrize(("dtype", "out_dtype", "precision"), SM80, ids=str)
def test_portable_product_repeats_and_keeps_nan_to_stored_blocks(dtype, out_dtype, precision, rng) -> None:
    import cupy

    dtype = np.dtype(dtype)
    for block in [(128, 64), (32, 32), (16, 32)]:
        A = pattern(rng, 20, 12, *block, dtype)
        B = values(rng, (A[3][1], 400), dtype)
        if dtype.kind != "i":
            B[block[1] + 3, 7] = np.inf
            B[block[1] + 3, 9] = np.nan
        dA, X = device(A), cupy.asarray(B)
        with on_sm80():
            product = partial(bg.matmul, dA, X, out_dtype=np.dtype(out_dtype), precision=precision)
            first = product()
            assert differing(product, first, 300) == 0
        touched = np.zeros(20, bool)
        rows = np.repeat(np.arange(20), np.diff(A[2]))
        touched[rows[A[1] == 1]] = dtype.kind != "i"
        got = first.get().astype(np.float64)
        assert not np.isfinite(got[:, 9].reshape(20, -1)[touched]).any()
        assert not np.isfinite(got[:, 7].reshape(20, -1)[touched]).any()
        got[:, [7, 9]] = 0
        assert np.isfinite(got).all()
        untouched = first.get().astype(np.float64)[:, [7, 9]].reshape(20, -1)[~touched]
        assert np.isfinite(untouched).all()


def test_infinity_in_float32_stays_infinity(rng) -> None:
    import cupy

    A = pattern(rng, 3, 3, 32, 32, np.float32)
    B = np.abs(values(rng, (96, 32), np.dtype(np.float32)))
    A = (np.abs(A[0]) + 1, *A[1:])
    B[40, 3] = np.inf
    got = (device(A) @ cupy.asarray(B)).get()
    rows = np.repeat(np.arange(3), np.diff(A[2]))
    touched = np.isin(np.arange(3), rows[A[1] == 1])
    np.testing.assert_array_equal(np.isposinf(got[:, 3]), np.repeat(touched, 32))


def test_float32_is_as_accurate_as_cublas(rng) -> None:
    import cupy

    n = 2048
    A = device(pattern(rng, n // 32, n // 32, 32, 32, np.float32, density=0.5))
    B = cupy.asarray(values(rng, (n, n), np.dtype(np.float32)))
    D = A.toarray()
    exact = D.astype(np.float64) @ B.astype(np.float64)
    size = cupy.abs(D).astype(np.float64) @ cupy.abs(B).astype(np.float64)
    size[size == 0] = 1  # empty rows
    ours = float((cupy.abs(A @ B - exact) / size).max())
    theirs = float((cupy.abs(D @ B - exact) / size).max())
    assert 0 < ours <= 2 * theirs


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_products_go_through_real_ones(dtype, rng) -> None:
    import cupy

    dtype = np.dtype(dtype)
    for block, transposed, (alpha, beta) in [
        ((32, 32), False, (1, 0)),
        ((16, 48), False, (2 - 1j, 0)),
        ((48, 16), True, (1, 0.5j)),
    ]:
        A = pattern(rng, 6, 5, *block, dtype)
        M, K = A[3][::-1] if transposed else A[3]
        B, old = values(rng, (K, 100), dtype), values(rng, (M, 100), dtype)
        D = dense(A, np.dtype(np.complex128))
        D = D.T if transposed else D
        dA, out = device(A), cupy.asarray(old)
        bg.matmul(dA.T if transposed else dA, cupy.asarray(B), out=out, alpha=alpha, beta=beta)
        want = alpha * (D @ B) + beta * old
        size = abs(alpha) * np.abs(D) @ np.abs(B) + np.abs(beta * old)
        assert dA._matrix_cache.wide
        assert_close(out.get(), want, size, 4 * K, dtype)
        dA.data *= 2  # values are read anew
        bg.matmul(dA.T if transposed else dA, cupy.asarray(B), out=out)
        assert_close(out.get(), 2 * (D @ B), 2 * size, 4 * K, dtype)
