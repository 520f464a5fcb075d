"""Cases of products: sparse times dense in every layout, sparse times sparse, sampled products, gradients, fp8."""

from __future__ import annotations

from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm.dtypes import BOOL, FLOAT8, HALF_DTYPES

from ..strategies import (
    INEXACT,
    Sample,
    eps,
    in_common_dtype,
    magnitude,
    product_bound,
    result_dtype,
    rounding,
    spreads_for,
    wide,
    widened,
)
from .case import Case, kind
from .samples import at_times_overlapping, bsr, flavour, here, operand, sample, values

#: Relative to the sum of the absolute products: what tensor cores keep of fp8 and of tf32 factors.
FP8, TF32 = 2**-10, 2**-9
#: alpha and beta by the kind of the result's dtype; other kinds are floats.
_FACTORS = {"c": ((0.5 - 2j, 1 + 1j), (1, 0)), "i": ((3, -2), (1, 1)), "u": ((3, 2), (1, 0)), "b": ((1, 1),)}


def problem(case: Case, **options: Any) -> tuple[Sample, np.dtype[Any], int, str]:
    """A matrix, the dtype and the number of columns of a dense operand, and how its values are spread."""
    a_dtype, b_dtype, block, widths = case.pick(case.pool.products)
    spread = case.pick(spreads_for(a_dtype, b_dtype))
    big = block[0] * block[1] > 300
    grid = (
        (case.number_from(1, 6), case.number_from(1, 6)) if big else (case.number_from(1, 20), case.number_from(1, 12))
    )
    a = sample(case, a_dtype, block, grid, spread=spread, most=16 if big else 60, **options)
    return a, b_dtype, int(case.pick(widths)), spread


def expected(a: Sample, x: np.ndarray[Any, Any], dtype: np.dtype[Any] | None = None) -> tuple[Any, Any]:
    """``a @ x`` for a vector or a matrix, and how far it may be off, in `dtype` or the promoted one."""
    dtype = result_dtype(a.dtype, x.dtype) if dtype is None else dtype
    dense, factor = in_common_dtype(a.dense, x, dtype)
    return dense @ factor, product_bound(a, x, dtype)


@kind("product.dense", 20)
def dense(case: Case) -> None:
    a, dtype, N, spread = problem(case)
    cls = flavour(case)
    A = bsr(case, a, cls)
    side = case.pick(("A @ B", "A @ B", "A.T @ B", "B @ A", "batch", "dot"))
    if side == "batch":
        x = operand(case, (3, a.shape[1], N), dtype, spread)
        got = bg.matmul(A, case.place.operand(x))
        want = [expected(a, x.values[i]) for i in range(3)]
        case.same(
            "batch", got, np.stack([w for w, _ in want]), np.stack([np.broadcast_to(b, w.shape) for w, b in want])
        )
        return
    b = a if side in ("A @ B", "dot") else a.T
    columns = () if N == 1 and case.chance(0.7) else (N,)
    x = operand(case, (b.shape[1], *columns), dtype, spread)
    X = case.place.operand(x)
    want, bound = expected(b, x.values)
    for _ in range(2):  # the second call takes what the first has prepared
        with at_times_overlapping(case):
            if side == "B @ A":
                turned = X.T if columns else X
                got = turned @ A if case.chance(0.5) else bg.matmul(turned, A)
                got = got.T if columns else got
            else:
                got = (A.T if side == "A.T @ B" else A) @ X if side != "dot" else A.dot(X)
        case.true("dtype", got.dtype == result_dtype(a.dtype, x.dtype))
        case.same(f"{side} {a.blocksize} {a.dtype} {dtype} N={N}", got, want, bound)


@kind("product.options", 10)
def options(case: Case) -> None:
    a, dtype, N, spread = problem(case)
    A, result = bsr(case, a), result_dtype(a.dtype, dtype)
    columns = (N,) if N > 1 else ()
    x, old = operand(case, (a.shape[1], *columns), dtype, spread), operand(case, (a.shape[0], *columns), result)
    alpha, beta = case.pick(_FACTORS.get(result.kind, ((-0.5, 3), (1, 1), (2, 0))))
    X, out = case.place.operand(x), case.place.operand(old)
    product, bound = expected(a, x.values)
    kept, factor = widened(old.values), wide(result).type
    for _ in range(2):
        case.true("returns out", bg.matmul(A, X, out=out, alpha=alpha, beta=beta) is out)
        scaled = product if result == BOOL else factor(alpha) * product
        want = scaled + factor(beta) * kept if beta else scaled
        off: Any = 0.0
        if result in INEXACT:
            unit = eps(np.dtype(np.float32)) if result in HALF_DTYPES else eps(result)
            old_bound = abs(beta) * magnitude(kept) * unit
            off = abs(alpha) * np.asarray(bound) + 4 * old_bound + 4 * eps(result) * magnitude(want)
        case.same(f"matmul(out, alpha={alpha}, beta={beta})", out, want, off)
        kept = widened(case.host(out))
    if result in HALF_DTYPES:
        want, off = expected(a, x.values, np.dtype(np.float32))
        case.same("out_dtype=float32", bg.matmul(A, X, out_dtype=np.float32), want, off)
    if result.char in "fF" and a.dtype == dtype:
        got = bg.matmul(A, X, precision="tf32")
        want, off = expected(a, x.values)
        case.same("tf32", got, want, off + TF32 * (a.weight @ magnitude(x.values)))


def fp8(case: Case, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random numbers of fp8 in float32."""
    return case.rng.standard_normal(shape, np.float32).astype(FLOAT8).astype(np.float32)


@kind("product.fp8", 4)
def product_fp8(case: Case) -> None:
    a, _, N, _ = problem(case)
    data = fp8(case, a.data.shape)
    exact = Sample(data, a.indices, a.indptr, a.shape)
    stored = Sample(data.astype(FLOAT8).view(np.uint8), a.indices, a.indptr, a.shape)
    A = bsr(case, stored)
    b = fp8(case, (a.shape[1], N))
    B = here(case, b.astype(FLOAT8).view(np.uint8))
    if case.chance(0.5):
        B = here(case, np.ascontiguousarray(b.astype(FLOAT8).view(np.uint8).T)).T
    dtype = case.pick((np.dtype(np.float32), np.dtype(np.float16)))
    got = bg.matmul(A, B, scale_a=2.0, scale_b=0.5, out_dtype=dtype)
    size = exact.weight @ magnitude(b)
    bound = rounding(dtype, size, int(exact.layers.sum(axis=1).max(initial=0)) + 8) + FP8 * size
    case.true("dtype", got.dtype == dtype)
    case.same(f"fp8 {a.blocksize} N={N}", got, exact.dense @ b.astype(np.float64), bound)


@kind("product.sparse", 8)
def sparse(case: Case) -> None:
    a_dtype, _, (R, K), _ = case.pick(case.pool.products)
    C = case.pick((K, R))
    rows, inner, cols = (case.number_from(1, 6) for _ in range(3))
    spread = case.pick(spreads_for(a_dtype))
    a = sample(case, a_dtype, (R, K), (rows, inner), spread=spread)
    b = sample(case, a_dtype, (K, C), (inner, cols), spread=spread)
    A, B = bsr(case, a), bsr(case, b)
    want = a.dense @ b.dense
    bound: Any = 0.0
    if a_dtype in INEXACT:
        additions = int(a.layers.sum(axis=1).max(initial=0)) * max(1, b.deepest) + 8
        bound = rounding(a_dtype, a.weight @ b.weight, additions) + a.bound @ b.weight + a.weight @ b.bound
    case.same_matrix(f"A @ B {(R, K, C)} {a_dtype}", A @ B, want, bound)
    square = bg.plan(A, B)
    case.true("text", "ProductPlan" in repr(square))
    case.same_matrix("plan", square(A, B), want, bound)
    A.data[...] = A.data.copy()
    case.same_matrix("plan again", bg.matmul(A, B) if case.chance(0.5) else square(A, B), want, bound)
    if R == K and rows == inner:
        case.same_matrix("A @ A", A @ A, *_square(a))
        M = bsr(case, a, bg.bsr_matrix)
        case.same_matrix("M ** 2", M**2, *_square(a))


def _square(a: Sample) -> tuple[Any, Any]:
    if a.dtype not in INEXACT:
        return a.dense @ a.dense, 0.0
    additions = int(a.layers.sum(axis=1).max(initial=0)) * max(1, a.deepest) + 8
    bound = rounding(a.dtype, a.weight @ a.weight, additions) + a.bound @ a.weight + a.weight @ a.bound
    return a.dense @ a.dense, bound


@kind("product.sampled", 6)
def sampled(case: Case) -> None:
    a_dtype, _, block, _ = case.pick(case.pool.products)
    p = sample(case, a_dtype, block, (case.number_from(1, 5), case.number_from(1, 5)), messy=False, most=12)
    P, K = bsr(case, p), case.pick((1, 5, 16, 32))
    dtype = a_dtype if a_dtype != BOOL else np.dtype(np.float32)
    x, y = operand(case, (p.shape[0], K), dtype), operand(case, (K, p.shape[1]), dtype)
    X, Y = case.place.operand(x), case.place.operand(y)
    full = widened(x.values) @ widened(y.values)
    want = np.where(p.layers > 0, full, np.zeros((), full.dtype))
    size = magnitude(x.values) @ magnitude(y.values)
    bound = rounding(dtype, size, K + 8) if dtype in INEXACT else 0.0
    got = bg.sddmm(X, Y, P)
    case.same_matrix(f"sddmm {block} {dtype} K={K}", got, want, bound)
    if dtype in INEXACT:
        bg.sddmm(X, Y, P, alpha=2, beta=1, out=got)
        case.same_matrix("sddmm(alpha, beta, out)", got, 3 * want, 4 * bound + 6 * eps(dtype) * size)
    dC = operand(case, (p.shape[0], K), dtype)
    dA, dB = bg.matmul_backward(case.place.operand(dC), P.astype(dtype), case.place.operand(_columns(y, case)))
    b = p.T
    grad, off = b.dense.conj().astype(wide(dtype)) @ widened(dC.values), 0.0
    if dtype in INEXACT:
        off = rounding(dtype, b.weight @ magnitude(dC.values), int(b.layers.sum(axis=1).max(initial=0)) + 8)
    case.same("matmul_backward: dB", dB, grad, off)
    full = widened(dC.values) @ widened(y.values).conj()
    want = np.where(p.layers > 0, full, np.zeros((), full.dtype))
    size = magnitude(dC.values) @ magnitude(y.values)
    case.same_matrix("matmul_backward: dA", dA, want, rounding(dtype, size, K + 8) if dtype in INEXACT else 0.0)


def _columns(y: Any, case: Case) -> Any:
    """The operand y (K, n) as the dense operand (n, K) of the product whose gradient is computed."""
    from ..strategies import Operand

    return Operand(np.ascontiguousarray(y.values.T), False, (slice(None), slice(None)))


@kind("product.values", 2)
def special_values(case: Case) -> None:
    """NaN and infinity spread through stored blocks only, and memory that `out` held before does not matter."""
    a_dtype, _, block, _ = case.pick(case.pool.products)
    if a_dtype not in INEXACT or a_dtype.kind == "c":
        return
    a = sample(case, a_dtype, block, (4, 4), messy=False, most=8)
    x = values(case, (a.shape[1],), a_dtype)
    at = case.number_from(0, a.shape[1] - 1)
    x[at] = np.nan
    out = here(case, np.full(a.shape[0], np.nan, a_dtype))
    bg.matmul(bsr(case, a), here(case, x), out=out)
    touched = a.layers[:, at] > 0
    got = np.isnan(case.host(out).astype(np.float64))
    case.same("rows with NaN", got, touched)
