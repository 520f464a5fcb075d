"""Which blocks meet in a product of two sparse matrices on the GPU: launches of cuda/spgemm_pattern.cu."""

from __future__ import annotations

import struct
from functools import cache

import cupy
import numpy as np

from .._backend import structure
from .._backend.base import Array
from .._backend.structure import Blocks, ProductPattern
from .._kernels import jit
from . import configs
from .matrix_cache import flat

#: `ProductPattern` of cuda/spgemm_pattern.cu.
_LAYOUT = struct.Struct("@2P2q2P2qq9P2i")
#: Blocks, pairs and columns are counted in 31 bits.
_MOST = 2**31
#: Shared memory of a CTA with more than one warp, and warps of a CTA.
_SHARED_BYTES, _WARPS = 48 << 10, 4


def product_pattern(a: Blocks, b: Blocks, block_cols: int) -> ProductPattern | None:
    """The pairs of ``A @ B``, or None if there are none, or more columns in a row than a table holds."""
    rows = len(a.indptr) - 1
    if not rows or max(len(a.indices), len(b.indices), block_cols) >= _MOST:
        return None
    index = structure.index_dtype(0, *a[1:], *b[1:])
    patterns = [tuple(flat(x.astype(index, copy=False)) for x in matrix[1:]) for matrix in (a, b)]
    sizes = [(len(indptr) - 1, len(indices)) for indices, indptr in patterns]
    before = cupy.zeros(rows + 2, np.int64)
    made: list[Array | None] = [before, before[-1:], *[None] * 7]

    def start(entry: str, warps: int = _WARPS, table: tuple[int, int] = (0, 0), shared_bytes: int = 0) -> None:
        sides = (
            value
            for arrays, counts in zip(patterns, sizes, strict=True)
            for value in (*(x.data.ptr for x in arrays), *counts)
        )
        packed = _LAYOUT.pack(*sides, block_cols, *(0 if x is None else x.data.ptr for x in made), *table)
        config = configs.SpgemmPattern(entry, configs.element(index))
        kernel = jit.load(config.spec(), jit.device_target())
        if shared_bytes > _SHARED_BYTES:
            kernel.max_dynamic_shared_size_bytes = shared_bytes
        kernel(config.grid(rows, warps), (32 * warps,), (jit.argument(packed),), shared_mem=shared_bytes)

    start("count_pairs")
    cupy.cumsum(before[:-1], out=before[:-1])
    pairs, most = before[-2:].tolist()  # synchronize!
    slots, listed = _table(min(most, block_cols))
    bytes_of_warp = 4 * (2 * slots + listed)
    if not 0 < pairs < _MOST or bytes_of_warp > _room():
        return None
    left, right, *_ = made[2:6] = [cupy.empty(pairs, np.int32) for _ in range(4)]
    indptr = made[6] = cupy.zeros(rows + 1, index)
    warps = max(1, min(_WARPS, _SHARED_BYTES // bytes_of_warp))
    start("list_pairs", warps, (slots, listed), warps * bytes_of_warp)
    cupy.cumsum(indptr, out=indptr)
    blocks = int(indptr[-1])  # synchronize!
    indices, starts = made[7:] = cupy.empty(blocks, index), cupy.empty(blocks, np.int32)
    start("pack_columns")
    return ProductPattern(left, right, starts, indices, indptr)


def _table(columns: int) -> tuple[int, int]:
    """Slots for so many columns, a fifth of them free, and places where columns are sorted."""
    return (_power(max(32, columns * 5 // 4 + 1)), _power(max(1, columns)))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


@cache
def _room() -> int:
    """Shared memory that a CTA may ask for."""
    return int(cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])
