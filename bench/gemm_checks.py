"""Operands of the products that bench/gemm.py measures, and how far a result is from float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm._benchmark.patterns import Pattern
from bsrgemm._benchmark.random_data import CHUNK, normal, widen
from bsrgemm._benchmark.timing import Call

#: Largest |C - A B| over the norm of A's row (B is standard normal), by what the product is computed in. Rounding a
#: result of 5.5 standard deviations to 16 bits gives 2.7e-3 or 2.1e-2; a missing 16-column slice of 2000 gives 0.4.
TOLERANCE = {"float16": 5e-3, "bfloat16": 4e-2, "e4m3": 5e-2, "float32": 1e-4, "tf32": 1.5e-2, "float64": 1e-11}


def sparse_operand(pattern: Pattern, block: tuple[int, int], dtype: str) -> Any:
    """A bsr_array with random blocks in the given places."""
    import cupy

    arrays = (normal((pattern.blocks, *block), dtype), cupy.asarray(pattern.indices), cupy.asarray(pattern.indptr))
    return bg.bsr_array(
        (arrays[0], *(x.astype(np.int32) for x in arrays[1:])),
        shape=(pattern.rows * block[0], pattern.columns * block[1]),
    )


@lru_cache(maxsize=1)
def right_operand(K: int, N: int, dtype: str) -> Any:
    """B, kept for the next case of the same shape. Column-major for e4m3, which the tensor cores want so."""
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


def checked(call: Call, error: Callable[[Any], float], kind: str) -> Call:
    """The call, if its result is right; ValueError otherwise."""
    off = error(call())
    if not off <= TOLERANCE[kind]:
        raise ValueError(f"wrong result: off by {off:.1e}, allowed {TOLERANCE[kind]:.1e}")
    return call
