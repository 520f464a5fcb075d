"""Cases of arithmetic and reductions on matrices, against NumPy on the dense values."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16, BOOL

from ..strategies import INEXACT, eps, magnitude, rounding, smallest, wide, widened
from .case import Case, kind
from .samples import bsr, flavour, here, holds, like, operand, plain, refused, sample, values

_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_UFUNCS = (
    *("sin", "tan", "arcsin", "arctan", "sinh", "tanh", "arcsinh", "arctanh", "rint", "sign", "expm1"),
    *("log1p", "deg2rad", "rad2deg", "floor", "ceil", "trunc", "sqrt"),
)


def _sum_bound(a: Any, b: Any) -> Any:
    if a.dtype not in INEXACT:
        return 0.0
    return rounding(a.dtype, a.weight + b.weight, a.layers + b.layers + 4) + a.bound + b.bound


@kind("array.add", 2)
def add(case: Case) -> None:
    a = sample(case)
    b, cls = like(case, a), flavour(case)
    A, B = bsr(case, a, cls), bsr(case, b, cls)
    bound = _sum_bound(a, b)
    case.same_matrix("A + B", A + B, a.dense + b.dense, bound)
    if a.dtype != BOOL:
        case.same_matrix("A - B", A - B, a.dense - b.dense, bound)
    C = A.copy()
    C += B
    case.same_matrix("A += B", C, a.dense + b.dense, bound)
    x = operand(case, a.shape, a.dtype)
    X, other = case.place.operand(x), widened(x.values)
    bound = rounding(a.dtype, a.weight + magnitude(x.values), a.layers + 4) + a.bound if a.dtype in INEXACT else 0.0
    case.same("A + X", A + X, a.dense + other, bound)
    case.same("X + A", X + A, a.dense + other, bound)
    if a.dtype != BOOL:
        C -= B
        case.same("A - X", A - X, a.dense - other, bound)
        case.same("X - A", X - A, other - a.dense, bound)
    case.same_matrix("A afterwards", A, a.dense, a.bound)


@kind("array.multiply")
def multiply(case: Case) -> None:
    a = sample(case)
    b, cls = like(case, a), flavour(case)
    A, B = bsr(case, a, cls), bsr(case, b, cls)
    bound: Any = 0.0
    if a.dtype in INEXACT:
        bound = rounding(a.dtype, a.weight * b.weight, a.layers + b.layers + 4)
        bound = bound + a.bound * b.weight + a.weight * b.bound
    case.same_matrix("A.multiply(B)", A.multiply(B), a.dense * b.dense, bound)
    if cls is bg.bsr_array:
        case.same_matrix("A * B", A * B, a.dense * b.dense, bound)
    if holds(case, a.dtype) and a.dense.size > 1:
        x = operand(case, a.shape, a.dtype)
        S = A.multiply(case.place.operand(x))
        bound = 0.0
        if a.dtype in INEXACT:
            bound = rounding(a.dtype, a.weight * magnitude(x.values), a.layers + 4) + a.bound * magnitude(x.values)
        got = (S if case.place.is_host else S.get()).toarray()
        case.same("A.multiply(X)", got, a.dense * widened(x.values), bound)


@kind("array.scale")
def scale(case: Case) -> None:
    a = sample(case)
    A = bsr(case, a)
    if a.dtype == BOOL:
        case.same_matrix("A * True", A * True, a.dense)
        return
    bound = rounding(a.dtype, 3 * a.weight, a.layers + 2) + 3 * a.bound if a.dtype in INEXACT else 0.0
    three = a.dense * wide(a.dtype).type(3)
    case.same_matrix("A * 3", A * 3, three, bound)
    case.same_matrix("3 * A", 3 * A, three, bound)
    case.same_matrix("-A", -A, -a.dense, a.bound)
    case.same_matrix("abs(A)", abs(A), abs(a.dense), a.bound + 2 * eps(a.dtype) * magnitude(a.dense))
    if a.dtype in INEXACT:
        half = a.dense / 2
        case.same_matrix("A / 2", A / 2, half, bound)
        A *= 4
        A /= 2
        case.same_matrix("A *= 4, A /= 2", A, 2 * a.dense, bound)
        case.same_matrix("round(A)", round(bsr(case, a.merged())), np.around(plain(a.merged().dense)))


@kind("array.quotient", 0.5)
def quotient(case: Case) -> None:
    a = sample(case)
    if a.dtype not in INEXACT or a.dtype.kind == "c":
        return
    b = like(case, a)
    A, B = bsr(case, a), bsr(case, b)
    refused(case, TypeError, lambda: 1 / A)
    exact = a.dense / b.dense
    if a.is_canonical and b.is_canonical:
        case.same("A / B", A / B, exact, np.nan_to_num(rounding(a.dtype, magnitude(exact), 4), nan=0, posinf=0))
    x = values(case, a.shape, a.dtype)
    x[x == 0] = 1
    if holds(case, a.dtype) and a.dense.size > 1:
        S = A / here(case, x)
        off = rounding(a.dtype, a.weight / magnitude(x), a.layers + 4) + a.bound / magnitude(x)
        case.same("A / X", (S if case.place.is_host else S.get()).toarray(), a.dense / widened(x), off)


@kind("array.compare")
def compare(case: Case) -> None:
    a = sample(case, messy=False)
    A = bsr(case, a)
    op = case.pick(_COMPARISONS[:2] if a.dtype.kind == "c" else _COMPARISONS)
    x = operand(case, a.shape, a.dtype)
    case.same(f"{op.__name__} X", op(A, case.place.operand(x)), op(a.dense, widened(x.values)))
    if a.dtype.kind != "c":
        b = like(case, a)
        if b.is_canonical:
            S = op(A, bsr(case, b))
            case.same(f"{op.__name__} B", (S if case.place.is_host else S.get()).toarray(), op(a.dense, b.dense))
        name = case.pick(("maximum", "minimum"))
        if b.is_canonical and holds(case, a.dtype):
            S = getattr(A, name)(bsr(case, b))
            got = (S if case.place.is_host else S.get()).toarray()
            case.same(name, got, getattr(np, name)(a.dense, b.dense))


@kind("array.functions")
def functions(case: Case) -> None:
    a = sample(case).merged()
    A, inner = bsr(case, a), plain(a.data)
    name = case.pick(_UFUNCS)
    try:
        expected = getattr(np, name)(inner)
    except TypeError:  # NumPy has no such loop: sign of bool, floor of complex
        return
    dtype = BFLOAT16 if a.dtype == BFLOAT16 else expected.dtype
    bound = 8 * eps(dtype) * np.where(np.isfinite(expected), magnitude(expected), 0) + smallest(dtype)
    result = getattr(A, name)()
    case.true(f"{name}: dtype", result.dtype == dtype)
    case.same(name, result.data, widened(expected), bound)
    if a.dtype != BOOL:
        n = case.pick((1, 2, 3))
        expected = inner**n
        bound = 8 * eps(a.dtype) * magnitude(expected)
        case.same(f"power({n})", A.power(n).data, widened(expected), bound)
        case.same(f"A ** {n}", (A**n).data, widened(expected), bound)


@kind("array.sum", 2)
def sums(case: Case) -> None:
    a, cls = sample(case), flavour(case)
    A, axis = bsr(case, a, cls), case.pick((None, 0, 1, -1, -2))
    dtype = a.dtype if a.dtype == BFLOAT16 else np.zeros(1, a.dtype).sum().dtype
    bound = rounding(dtype, a.weight.sum(axis=axis), a.layers.sum(axis=axis) + 8) if dtype in INEXACT else 0.0
    want = np.asarray(a.dense.sum(axis=axis))
    got = case.host(A.sum(axis=axis))
    case.true("sum: dtype", got.dtype == dtype)
    case.same(f"sum({axis})", got.reshape(want.shape), want, bound)
    dtype = np.dtype(np.float64) if a.dtype.kind in "biu" else a.dtype
    count = a.dense.size if axis is None else a.shape[axis]
    want = np.asarray(a.dense.astype(wide(dtype)).sum(axis=axis) / count)
    bound = rounding(dtype, a.weight.sum(axis=axis) / count, a.layers.sum(axis=axis) + 8)
    case.same(f"mean({axis})", case.host(A.mean(axis=axis)).reshape(want.shape), want, bound)


@kind("array.extremes")
def extremes(case: Case) -> None:
    a = sample(case, spread=case.pick(("small", "special"))).merged()
    A, axis = bsr(case, a), case.pick((None, 0, 1))
    names = ("argmin", "argmax") if a.dtype.kind == "c" else ("min", "max", "nanmin", "nanmax", "argmin", "argmax")
    name = case.pick(names)
    want = np.asarray(getattr(np, name)(a.dense, axis=axis))
    got = getattr(A, name)(axis=axis)
    if not case.place.backend.is_dense(got) and hasattr(got, "toarray"):
        got = (got if case.place.is_host else got.get()).toarray()
    case.same(f"{name}({axis})", case.host(got).reshape(want.shape), want)


@kind("array.count")
def count(case: Case) -> None:
    a = sample(case).merged()
    A = bsr(case, a)
    row, col = A.nonzero()
    case.same("nonzero", np.stack([case.host(row), case.host(col)]), np.stack(a.dense.nonzero()))
    case.same("count_nonzero", A.count_nonzero(), np.count_nonzero(a.dense))
    axis = case.pick((0, 1))
    got = case.host(A.count_nonzero(axis=axis)).reshape(-1)
    case.same(f"count_nonzero({axis})", got, np.count_nonzero(a.dense, axis=axis))


@kind("array.norm")
def norms(case: Case) -> None:
    a = sample(case).merged()
    if a.dtype.kind in "iub":
        a = type(a)(abs(a.data) if a.dtype != BOOL else a.data, a.indices, a.indptr, a.shape)
    A, size = bsr(case, a), magnitude(a.dense)
    axis = case.pick((None, 0, 1))
    order = case.pick((None, 1, np.inf, -np.inf) if axis is None else (None, 1, np.inf, 2, 0))
    if axis is None:
        ways = {None: lambda: np.sqrt((size**2).sum()), 1: lambda: size.sum(0).max()}
        ways |= {np.inf: lambda: size.sum(1).max(), -np.inf: lambda: size.sum(1).min()}
        want = ways[order]()
    else:
        want = np.linalg.norm(size, 2 if order is None else order, axis=axis)
    dtype = a.dtype if a.dtype in INEXACT else np.dtype(np.float64)
    bound = 8 * (size.size + 8) * eps(np.dtype(np.float32) if dtype.itemsize == 2 else dtype) * want
    got = case.host(bg.norm(A, order, axis=axis))
    case.same(f"norm({order}, {axis})", got, want, bound + 4 * eps(dtype) * want + 1e-30)
