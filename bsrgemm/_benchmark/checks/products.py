"""Operands of the products that the sections measure, and how far a result is from float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

import bsrgemm as bg

from ..patterns import Pattern
from ..random_data import CHUNK, module_of, normal, widen

#: Elements of a matrix in float64 at a time
EXACT_CHUNK = 1 << 25
#: Largest |C - A B| over the norm of A's row (B is standard normal), by what the product is computed in. Rounding a
#: result of 5.5 standard deviations to 16 bits gives 2.7e-3 or 2.1e-2; a missing 16-column slice of 2000 gives 0.4.
TOLERANCE = {"float16": 5e-3, "bfloat16": 4e-2, "e4m3": 5e-2, "float32": 1e-4, "tf32": 1.5e-2, "float64": 1e-11}


def sparse_operand(pattern: Pattern, block: tuple[int, int], dtype: str) -> Any:
    """A bsr_array with random blocks at the given positions."""
    import cupy

    arrays = (normal((pattern.blocks, *block), dtype), cupy.asarray(pattern.indices), cupy.asarray(pattern.indptr))
    return bg.bsr_array(
        (arrays[0], *(x.astype(np.int32) for x in arrays[1:])),
        shape=(pattern.rows * block[0], pattern.columns * block[1]),
    )


@lru_cache(maxsize=1)
def right_operand(K: int, N: int, dtype: str) -> Any:
    """B, kept for the next case of the same shape. Column-major for e4m3, as the tensor cores need it."""
    return normal((N, K), dtype).T if dtype == "e4m3" else normal((K, N), dtype)


@lru_cache(maxsize=1)
def dense_operand(M: int, K: int, dtype: str) -> Any:
    """A dense random A for cuBLAS: zeros draw less power and would flatter it."""
    return normal((M, K), dtype)


def dense_rows(A: Any, pattern: Pattern, rows: Sequence[int]) -> Any:
    """Some block rows of A as one dense float64 matrix, made without bsrgemm."""
    import cupy

    R, C = A.blocksize
    result = cupy.zeros((len(rows), R, pattern.columns, C), np.float64)
    for place, i in enumerate(rows):
        own = slice(int(pattern.indptr[i]), int(pattern.indptr[i + 1]))
        if own.start == own.stop:
            continue
        result[place][:, cupy.asarray(pattern.indices[own])] = widen(A.data[own]).transpose(1, 0, 2)
    return result.reshape(len(rows) * R, pattern.columns * C)


def ends(pattern: Pattern, R: int) -> list[int]:
    """The block rows to check: at least two, and 128 rows, at either end."""
    each = min(max(2, 128 // R), pattern.rows)
    return sorted({*range(each), *range(pattern.rows - each, pattern.rows)})


def element_rows(blocks: Sequence[int], R: int) -> Any:
    """The rows of elements of some block rows."""
    import cupy

    return cupy.asarray((np.array(blocks)[:, None] * R + np.arange(R)).reshape(-1))


def deviation(rows: Any, B: Any, got: Any) -> float:
    """Largest |got - rows B| over the norm of its row; rows are float64. NaN if anything is."""
    import cupy

    norms = cupy.sqrt((rows * rows).sum(axis=1))
    norms[norms == 0] = 1
    step = max(1, CHUNK // B.shape[0])
    worst = []
    for start in range(0, B.shape[1], step):
        part = slice(start, start + step)
        errors = cupy.abs(rows @ widen(B[:, part]) - widen(got[:, part])).max(axis=1) / norms
        worst.append(float(errors.max()))
    return float(np.max(worst))


def deviation_at_ends(A: Any, pattern: Pattern, B: Any, got: Any) -> float:
    """The deviation of A B in its first and last block rows."""
    blocks = ends(pattern, A.blocksize[0])
    return deviation(dense_rows(A, pattern, blocks), B, got[element_rows(blocks, A.blocksize[0])])


# -------------------------------------------------------------------- all rows, at the price of a vector
def block_rows(A: Any) -> Any:
    """The block row of each block."""
    xp = module_of(A.data)
    return xp.searchsorted(A.indptr, xp.arange(len(A.indices), dtype=A.indptr.dtype), side="right") - 1


def exact(A: Any, x: Any, transposed: bool = False) -> Any:
    """A x or A.T x for a vector, in float64."""
    xp, (R, C) = module_of(A.data), A.blocksize
    data, source, target, blocks = A.data, A.indices, block_rows(A), A.shape[0] // R
    if transposed:
        data, source, target, blocks = data.transpose(0, 2, 1), target, source, A.shape[1] // C
    height, width = data.shape[1:]
    pieces = widen(x).reshape(-1, width)
    result = xp.zeros((blocks, height))
    step = max(1, EXACT_CHUNK // width)
    for start in range(0, len(data), step):
        own = slice(start, start + step)
        near = pieces[source[own]]
        for r in range(height):
            sums = (widen(data[own, r]) * near).sum(axis=1)
            result[:, r] += xp.bincount(target[own], sums, minlength=blocks)
    return result.reshape(-1)


def vector_deviation(A: Any, X: Any, got: Any, transposed: bool = False) -> float:
    """Largest |got - A X| over the root of the number of terms, which are standard normal. NaN if anything is.

    The columns of a matrix X are added up with random signs: all rows at the price of a vector.
    """
    xp, (R, C) = module_of(A.data), A.blocksize
    X, got = with_signs(X), with_signs(got)
    target, height, width = (A.indices, C, R) if transposed else (block_rows(A), R, C)
    terms = width * xp.bincount(target, minlength=len(got) // height)
    off = xp.abs(got - exact(A, X, transposed)).reshape(-1, height).max(axis=1)
    return float((off / xp.sqrt(xp.maximum(terms, 1))).max())


def dense_deviation(A: Any, B: Any, got: Any) -> float:
    """The same for a dense A."""
    xp, x = module_of(A), with_signs(B)
    step = max(1, EXACT_CHUNK // A.shape[1])
    want = xp.concatenate([widen(A[i : i + step]) @ x for i in range(0, len(A), step)])
    return float(xp.abs(with_signs(got) - want).max()) / A.shape[1] ** 0.5


def with_signs(X: Any) -> Any:
    """A vector in float64, or the columns of a matrix added up with random signs, over the root of their number."""
    if X.ndim == 1:
        return widen(X)
    xp, N = module_of(X), X.shape[1]
    signs = xp.asarray(np.random.default_rng(1).choice([-1.0, 1.0], N)) / N**0.5
    step = max(1, EXACT_CHUNK // N)
    return xp.concatenate([widen(X[i : i + step]) @ signs for i in range(0, len(X), step)])
