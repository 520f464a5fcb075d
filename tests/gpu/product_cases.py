"""Matrices, layouts and bounds of errors for tests of the kernels of products on a card.

Seeds are fixed, so that a run repeats the last one; the property tests draw fresh inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm.dtypes import BOOL, HALF_DTYPES, result_dtype

Matrix = tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    if dtype == BOOL:
        return rng.random(shape) < 0.4
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(max(info.min, -50), min(info.max, 50), shape).astype(dtype)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape)).astype(dtype) if dtype.kind == "c" else x.astype(dtype)


def pattern(
    rng: np.random.Generator,
    rows: int,
    cols: int,
    R: int,
    C: int,
    dtype: Any,
    index: Any = np.int32,
    density: float = 0.4,
) -> Matrix:
    """Random blocks: unsorted, some twice, first and last block row empty."""
    stored = rng.random((rows, cols)) < density
    stored[[0, -1]] = False
    i, j = np.nonzero(stored)
    twice = rng.random(len(i)) < 0.1
    i, j = np.concatenate([i, i[twice]]), np.concatenate([j, j[twice]])
    order = np.lexsort((rng.random(len(i)), i))
    i, j = i[order], j[order]
    indptr = np.searchsorted(i, np.arange(rows + 1)).astype(index)
    return values(rng, (len(i), R, C), np.dtype(dtype)), j.astype(index), indptr, (rows * R, cols * C)


def dense(matrix: Matrix, dtype: Any) -> np.ndarray:
    data, indices, indptr, (M, N) = matrix
    R, C = data.shape[1:]
    out = np.zeros((M // R, N // C, R, C), dtype)
    rows = np.repeat(np.arange(M // R), np.diff(indptr))
    for k, (i, j) in enumerate(zip(rows, indices, strict=True)):
        if dtype == BOOL:
            out[i, j] |= data[k]
        else:
            out[i, j] += data[k].astype(dtype)
    return out.transpose(0, 2, 1, 3).reshape(M, N)


def exact_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype in which the reference is computed."""
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = result_dtype(dtype, other)
    if dtype == BOOL or dtype.kind in "iu":
        return dtype
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)


def assert_close(got: np.ndarray, want: np.ndarray, size: np.ndarray | float, terms: int, acc: Any) -> None:
    """|got - want| within the rounding of `terms` additions in `acc` and one rounding to the result's dtype."""
    if got.dtype == BOOL or got.dtype.kind in "iu":
        np.testing.assert_array_equal(got, want.astype(got.dtype))
        return
    from ml_dtypes import finfo

    eps_acc = float(finfo(np.dtype(acc)).eps)
    eps_out = float(finfo(got.dtype).eps)
    wide = got.astype(exact_dtype(got.dtype))
    assert not np.isnan(wide).any()
    bound = (terms + 4) * eps_acc * size + eps_out * np.abs(want) + np.finfo(np.float16).tiny
    assert (np.abs(wide - want) <= bound).all(), float(np.max(np.abs(wide - want) / bound))


def acc_of(dtype: np.dtype[Any]) -> Any:
    return np.float32 if dtype in HALF_DTYPES else dtype


def device(matrix: Matrix) -> Any:
    import cupy

    data, indices, indptr, shape = matrix
    return bg.bsr_array(tuple(cupy.asarray(x) for x in (data, indices, indptr)), shape=shape)


def strided(x: np.ndarray, layout: str) -> Any:
    """`x` on the card in another memory layout; the gaps are poisoned."""
    import cupy

    if layout == "C":
        return cupy.asarray(x)
    if layout == "F":
        return cupy.asarray(np.ascontiguousarray(x.T)).T
    wide = cupy.full((x.shape[0] * 2 + 1, x.shape[1] * 3 + 2), 113).astype(x.dtype)
    view = wide[1::2, 2::3][::-1] if layout == "reversed" else wide[1::2, 2::3]
    view[...] = cupy.asarray(x)
    return view


LAYOUTS = ["C", "F", "gaps", "reversed"]
HALF = np.dtype(np.float16)


def kernels_of(A: Any) -> list[Any]:
    """The kernels that products with this matrix were prepared for, as far as they copy no operand."""
    from bsrgemm._kernels.launch import Launch

    known = [found.value for found in A._memo.calls._found.values()]
    return [launch.kernel for launch in known if isinstance(launch, Launch)]


def exact_product(A: Matrix, B: np.ndarray, transposed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64 and the same of absolute values."""
    D = dense(A, np.dtype(np.float64))
    D = D.T if transposed else D
    wide = B.astype(np.float64)
    return D @ wide, np.abs(D) @ np.abs(wide)
