"""Products and other operators with operands that do not fit, and `matmul` with bad options."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import scipy.sparse as sp

import bsrgemm as bg

from ...strategies import Place, Sample
from . import WRONG, Refused, assign, elsewhere, matrix, ones, read_only, zero_strides

OPERANDS = [
    Refused("A @ number", lambda p: matrix(p) @ 2, ValueError, "calar"),
    Refused("number @ A", lambda p: 2 @ matrix(p), ValueError, "calar"),
    Refused("A @ 0-d array", lambda p: matrix(p) @ p.put(2.0), ValueError, "calar"),
    Refused("A @ 4-D array", lambda p: matrix(p) @ ones(p, 1, 2, 6, 2), ValueError, "other: wanted 1, 2 or 3"),
    Refused("4-D array @ A", lambda p: ones(p, 1, 2, 2, 4) @ matrix(p), ValueError, "(1, 2, 2, 4)"),
    Refused("A @ batch of other height", lambda p: matrix(p) @ ones(p, 6, 5, 2), ValueError, "(6, 5, 2)"),
    Refused("batch of other width @ A", lambda p: ones(p, 4, 2, 5) @ matrix(p), ValueError, "(4, 2, 5)"),
    Refused("A.T @ array of other height", lambda p: matrix(p).T @ ones(p, 6, 2), ValueError, "(6, 4)"),
    Refused("array of other width @ A.T", lambda p: ones(p, 2, 4) @ matrix(p).T, ValueError, "(6, 4)"),
    Refused("A @ vector too short", lambda p: matrix(p) @ ones(p, 5), ValueError, "mismatch"),
    Refused("A @ vector too long", lambda p: matrix(p) @ ones(p, 7), ValueError, "mismatch"),
    Refused("A @ array of other height", lambda p: matrix(p) @ ones(p, 4, 6), ValueError, "mismatch"),
    Refused("vector @ A of other length", lambda p: ones(p, 6) @ matrix(p), ValueError, "mismatch"),
    Refused("array @ A of other width", lambda p: ones(p, 2, 6) @ matrix(p), ValueError, "mismatch"),
    Refused("A @ A of other height", lambda p: matrix(p) @ matrix(p), ValueError, "mismatch"),
    Refused(
        "A @ CSR of other height",
        lambda p: matrix(p) @ p.sparse("csr", sp.csr_array(np.eye(5))),
        ValueError,
        "mismatch",
    ),
    Refused("A.dot(vector too short)", lambda p: matrix(p).dot(ones(p, 5)), ValueError, "mismatch"),
    Refused("A @ nothing", lambda p: matrix(p) @ None, TypeError, "@"),
    Refused("A @ text", lambda p: matrix(p) @ "ab", WRONG, ""),
    Refused("A @ objects", lambda p: matrix(p) @ np.array([object()] * 6), TypeError, "other", backends="cpu"),
    Refused("A @ dates", lambda p: matrix(p) @ np.zeros(6, "datetime64[s]"), TypeError, "other", backends="cpu"),
    Refused("A + array of other shape", lambda p: matrix(p) + ones(p, 3, 6), ValueError, "shape"),
    Refused("A + A of other shape", lambda p: matrix(p) + matrix(p).T, ValueError, "shape"),
    Refused("A - A of other shape", lambda p: matrix(p) - matrix(p).T, ValueError, "shape"),
    Refused("A < A of other shape", lambda p: matrix(p) < matrix(p).T, ValueError, "shape"),
    Refused("A / A of other shape", lambda p: matrix(p) / matrix(p).T, ValueError, "shape"),
    Refused("A + number", lambda p: matrix(p) + 1, NotImplementedError, "scalar"),
    Refused("multiply by another shape", lambda p: matrix(p).multiply(ones(p, 3, 6)), ValueError, "shape"),
    Refused("multiply by a longer row", lambda p: matrix(p).multiply(ones(p, 7)), ValueError, "shape"),
    Refused(
        "multiply by a sparse matrix of another shape",
        lambda p: matrix(p).multiply(matrix(p).T),
        ValueError,
        "shape",
    ),
    Refused("maximum with another shape", lambda p: matrix(p).maximum(matrix(p).T), ValueError, "shape"),
    *(
        Refused(f"{name} of two backends", attempt, TypeError, text)
        for name, attempt, text in (
            ("A @ vector", lambda p: matrix(p) @ ones(elsewhere(p), 6), "other"),
            ("A @ array", lambda p: matrix(p) @ ones(elsewhere(p), 6, 2), "other"),
            ("A @ A", lambda p: matrix(p) @ matrix(elsewhere(p)).T, "other"),
            ("A @ CSR", lambda p: matrix(p) @ elsewhere(p).sparse("csr", sp.csr_array(np.eye(6))), "other"),
            ("array @ A", lambda p: ones(elsewhere(p), 2, 4) @ matrix(p), ""),
            ("A + array", lambda p: matrix(p) + ones(elsewhere(p), 4, 6), "other"),
            ("A - array", lambda p: matrix(p) - ones(elsewhere(p), 4, 6), "other"),
            ("A + A", lambda p: matrix(p) + matrix(elsewhere(p)), "other"),
            ("A.multiply(array)", lambda p: matrix(p).multiply(ones(elsewhere(p), 4, 6)), "other"),
            ("A.multiply(A)", lambda p: matrix(p).multiply(matrix(elsewhere(p))), "other"),
            ("A / array", lambda p: matrix(p) / ones(elsewhere(p), 4, 6), "other"),
            ("A == array", lambda p: matrix(p) == ones(elsewhere(p), 4, 6), "other"),
            ("A < A", lambda p: matrix(p) < matrix(elsewhere(p)), "other"),
            ("maximum", lambda p: matrix(p).maximum(ones(elsewhere(p), 4, 6)), "other"),
            ("matmul(A, B)", lambda p: bg.matmul(matrix(p), ones(elsewhere(p), 6)), "B"),
            ("matmul(B, A)", lambda p: bg.matmul(ones(elsewhere(p), 4), matrix(p)), "A"),
            (
                "matmul(out=)",
                lambda p: bg.matmul(matrix(p), ones(p, 6), out=ones(elsewhere(p), 4)),
                "out",
            ),
            ("toarray(out=)", lambda p: matrix(p).toarray(out=ones(elsewhere(p), 4, 6)), "out"),
            ("sum(out=)", lambda p: matrix(p).sum(axis=0, out=ones(elsewhere(p), 6)), "out"),
            (
                "assignment",
                lambda p: assign(matrix(p), (slice(2, 4), slice(0, 3)), ones(elsewhere(p), 2, 3)),
                "value",
            ),
        )
    ),
]


def single(place: Place, **options: Any) -> Any:
    return bg.matmul(matrix(place, np.float32), ones(place, 6, dtype=np.float32), **options)


def fp8(place: Place, **options: Any) -> Any:
    return bg.matmul(matrix(place, np.uint8), ones(place, 6, dtype=np.uint8), **options)


def float8(place: Place, **options: Any) -> Any:
    return bg.matmul(matrix(place, np.uint8), np.ones(6, ml_dtypes.float8_e4m3fn), **options)


MATMUL = [
    Refused("no sparse operand", lambda p: bg.matmul(ones(p, 4, 4), ones(p, 4)), TypeError, "A, B"),
    Refused("two numbers", lambda p: bg.matmul(1, 2), TypeError, "A, B"),
    Refused("a B of other height", lambda p: bg.matmul(matrix(p), ones(p, 5)), ValueError, "B"),
    Refused("an A of other width", lambda p: bg.matmul(ones(p, 2, 5), matrix(p)), ValueError, "A"),
    Refused("a B of 4 dimensions", lambda p: bg.matmul(matrix(p), ones(p, 1, 1, 6, 2)), ValueError, "B: wanted 1, 2"),
    Refused("an A of 4 dimensions", lambda p: bg.matmul(ones(p, 1, 1, 2, 4), matrix(p)), ValueError, "A: wanted 1, 2"),
    Refused("a batch of other height", lambda p: bg.matmul(matrix(p), ones(p, 6, 2, 2)), ValueError, "B is (6, 2, 2)"),
    Refused("a batch of other width", lambda p: bg.matmul(ones(p, 4, 2, 2), matrix(p)), ValueError, "A is (4, 2, 2)"),
    *(
        Refused(
            f"out of shape {shape} for a batch", attempt, ValueError, f"shape {wanted}, got float64 of shape {shape}"
        )
        for shape, wanted, attempt in (
            ((2, 4, 5), (3, 4, 5), lambda p: bg.matmul(matrix(p), ones(p, 3, 6, 5), out=ones(p, 2, 4, 5))),
            ((4, 5), (1, 4, 5), lambda p: bg.matmul(matrix(p), ones(p, 1, 6, 5), out=ones(p, 4, 5))),
            ((3, 6, 5), (3, 5, 6), lambda p: bg.matmul(ones(p, 3, 5, 4), matrix(p), out=ones(p, 3, 6, 5))),
        )
    ),
    Refused(
        "a precision there is not", lambda p: single(p, precision="tf16"), ValueError, "precision: wanted 'float32'"
    ),
    Refused("a precision that is a number", lambda p: single(p, precision=32), TypeError, "got 32"),
    Refused("a precision that is a dtype", lambda p: single(p, precision=np.float32), TypeError, "precision"),
    *(
        Refused(
            f"precision for {dtype} in {out_dtype}",
            lambda p, dtype=dtype, out_dtype=out_dtype: bg.matmul(
                matrix(p, dtype), ones(p, 6, dtype=dtype), precision="tf32", out_dtype=out_dtype
            ),
            ValueError,
            f"precision: 'tf32' is for products in float32 and complex64, got {dtype}",
        )
        for dtype, out_dtype in (
            ("float64", None),
            ("float16", None),
            ("float16", "float32"),
            ("int32", None),
            ("complex128", None),
            ("float32", "float64"),
        )
    ),
    Refused("precision for fp8", lambda p: fp8(p, scale_a=1, precision="tf32"), ValueError, "precision: 'tf32'"),
    *(
        Refused(f"{name} = {value!r}", lambda p, name=name, value=value: fp8(p, **{name: value}), TypeError, f"{name}:")
        for name in ("scale_a", "scale_b")
        for value in ("1", 1j, [1.0], np.ones(1), np.complex64(1))
    ),
    Refused(
        "a scale on a device", lambda p: fp8(p, scale_a=p.put(np.ones(()))), TypeError, "scale_a", backends="fake cuda"
    ),
    Refused(
        "a scale for an A of floats",
        lambda p: bg.matmul(matrix(p), ones(p, 6, dtype=np.uint8), scale_a=2),
        TypeError,
        "A: wanted fp8 numbers as uint8, since a scale is given, got float64",
    ),
    Refused(
        "a scale for a B of floats",
        lambda p: bg.matmul(matrix(p, np.uint8), ones(p, 6), scale_b=2),
        TypeError,
        "B: wanted fp8 numbers as uint8, since a scale is given, got float64",
    ),
    *(
        Refused(
            f"fp8 into {dtype}",
            lambda p, dtype=dtype: fp8(p, scale_a=2, out_dtype=dtype),
            TypeError,
            f"out_dtype: wanted float32, float16, bfloat16 for a product of fp8, got {dtype}",
        )
        for dtype in ("float64", "uint8", "complex64", "bool")
    ),
    Refused("fp8 without a scale", lambda p: float8(p), TypeError, "B: does not support dtype float8", backends="cpu"),
    Refused("a number as B", lambda p: bg.matmul(matrix(p), 3.0), WRONG, "B"),
    Refused(
        "out of other shape",
        lambda p: bg.matmul(matrix(p), ones(p, 6, 2), out=ones(p, 4, 3)),
        ValueError,
        "out",
    ),
    Refused("out of other rank", lambda p: bg.matmul(matrix(p), ones(p, 6, 1), out=ones(p, 4)), ValueError, "out"),
    Refused(
        "integer out for floats",
        lambda p: bg.matmul(matrix(p), ones(p, 6), out=ones(p, 4, dtype=int)),
        WRONG,
        "out",
    ),
    Refused(
        "out and out_dtype that disagree",
        lambda p: bg.matmul(matrix(p), ones(p, 6), out=ones(p, 4), out_dtype="complex128"),
        ValueError,
        "out",
    ),
    Refused("a list as out", lambda p: bg.matmul(matrix(p), ones(p, 6), out=[0.0] * 4), TypeError, "out"),
    Refused(
        "out that is read-only",
        lambda p: bg.matmul(matrix(p), ones(p, 6), out=read_only(np.ones(4))),
        ValueError,
        "out",
        backends="cpu",
    ),
    Refused(
        "out whose elements share memory",
        lambda p: bg.matmul(matrix(p), ones(p, 6, 2), out=zero_strides(p, (4, 2))),
        ValueError,
        "out",
    ),
    Refused("alpha that is complex", lambda p: bg.matmul(matrix(p), ones(p, 6), alpha=1j), TypeError, "alpha"),
    Refused(
        "alpha that is a fraction for integers",
        lambda p: bg.matmul(matrix(p, np.int32), ones(p, 6, dtype=np.int32), alpha=0.5),
        TypeError,
        "alpha",
    ),
    *(
        Refused(
            f"alpha = {value} for integers",
            lambda p, value=value: bg.matmul(matrix(p, np.int32), ones(p, 6, dtype=np.int32), alpha=value),
            WRONG,
            "alpha",
        )
        for value in (np.nan, np.inf, -np.inf)
    ),
    Refused(
        "alpha = 2 for booleans",
        lambda p: bg.matmul(matrix(p, bool), ones(p, 6, dtype=bool), alpha=2),
        TypeError,
        "alpha",
    ),
    Refused("alpha that is text", lambda p: bg.matmul(matrix(p), ones(p, 6), alpha="2"), TypeError, "alpha"),
    Refused("alpha that is nothing", lambda p: bg.matmul(matrix(p), ones(p, 6), alpha=None), TypeError, "alpha"),
    Refused(
        "alpha that is a vector",
        lambda p: bg.matmul(matrix(p), ones(p, 6), alpha=np.ones(2)),
        TypeError,
        "alpha",
    ),
    Refused("beta without out", lambda p: bg.matmul(matrix(p), ones(p, 6), beta=1), ValueError, "beta"),
    Refused(
        "beta that is complex",
        lambda p: bg.matmul(matrix(p), ones(p, 6), beta=1j, out=ones(p, 4)),
        TypeError,
        "beta",
    ),
    Refused(
        "beta that is a fraction for integers",
        lambda p: bg.matmul(matrix(p, np.int32), ones(p, 6, dtype=np.int32), beta=0.5, out=ones(p, 4, dtype=np.int32)),
        TypeError,
        "beta",
    ),
    *(
        Refused(
            f"{out_dtype} for a product of {dtype}",
            lambda p, dtype=dtype, out_dtype=out_dtype: bg.matmul(
                matrix(p, dtype), ones(p, 6, dtype=dtype), out_dtype=out_dtype
            ),
            TypeError,
            "out_dtype",
        )
        for dtype, out_dtype in (
            ("complex64", "float64"),
            ("float32", "int64"),
            ("int32", "bool"),
            ("int8", "uint8"),
            ("uint64", "int64"),
            ("float64", "object"),
            ("float64", "U3"),
        )
    ),
    Refused("an unknown out_dtype", lambda p: bg.matmul(matrix(p), ones(p, 6), out_dtype="no"), TypeError, "no"),
]


def overlapping(place: Place, shared: str, product: str) -> Any:
    """A product whose out shares memory with an operand."""
    square = Sample(np.ones((1, 4, 4)), np.zeros(1, np.int32), np.array([0, 1], np.int32), (4, 4))
    A = place.bsr(square)
    X = ones(place, 1, 4, 4) if "batch" in product else ones(place, 4, 4)
    out = {"X": X, "part of X": X[..., ::-1, :], "A.data": A.data[0]}[shared]
    out = out[None] if out.ndim < X.ndim else out
    T = A.T if "A.T" in product else A
    return bg.matmul(X, T, out=out) if product.startswith("X") else bg.matmul(T, X, out=out)


MATMUL += [
    Refused(
        f"out that overlaps {shared} in {product}",
        lambda p, shared=shared, product=product: overlapping(p, shared, product),
        ValueError,
        f"out: overlaps {name}",
    )
    for product, names in (
        *((product, ("B", "A.data")) for product in ("A @ X", "A.T @ X", "A @ batch X")),
        *((product, ("A", "B.data")) for product in ("X @ A", "X @ A.T", "X @ A, X a batch")),
    )
    for shared, name in (("X", names[0]), ("part of X", names[0]), ("A.data", names[1]))
]
