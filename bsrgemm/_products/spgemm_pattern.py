"""Launches of cuda/spgemm_pattern.cu, which finds the pairs of blocks that ``BSR @ BSR`` multiplies."""

from __future__ import annotations

import cupy
import numpy as np

from .._backend import structure
from .._backend.base import Array, Blocks
from .._kernels import device, jit
from .._kernels.element_types import element
from .._kernels.launching import contiguous
from .arguments import BLOCK_PATTERN, SPGEMM_PATTERN
from .call import ProductPattern
from .configs import SpgemmPattern

#: Blocks, pairs and columns are numbered with 31 bits, so there must be fewer of each than this.
_MOST = 2**31
#: Bytes of shared memory that a CTA has without an explicit request, which is the limit for a CTA of more than one
#: warp, and the largest number of warps of a CTA.
_SHARED_BYTES, _WARPS = 48 << 10, 4


def product_pattern(a: Blocks, b: Blocks, block_cols: int) -> ProductPattern | None:
    """Return the pairs of blocks of ``A @ B`` and the pattern of the result. Waits twice for the GPU.

    The result is None if there are no pairs, if a size exceeds 31 bits, or if a block row of the result may have more
    blocks than fit into a hash table in shared memory.
    """
    rows = len(a.indptr) - 1
    if not rows or max(len(a.indices), len(b.indices), block_cols) >= _MOST:
        return None
    index = structure.index_dtype(0, *a[1:], *b[1:])
    patterns = [tuple(contiguous(x.astype(index, copy=False)) for x in matrix[1:]) for matrix in (a, b)]
    sides = [_packed(indices, indptr) for indices, indptr in patterns]
    before = cupy.zeros(rows + 2, np.int64)
    #: the arrays that the kernels write; one that is not allocated yet is passed as a null pointer
    arrays: dict[str, Array | None] = dict.fromkeys(("left", "right", "column", "start", "count", "indices", "starts"))
    arrays |= {"before": before, "most": before[-1:]}

    def start(entry: str, warps: int = _WARPS, table: tuple[int, int] = (0, 0), shared_bytes: int = 0) -> None:
        pointers = {name: 0 if x is None else x.data.ptr for name, x in arrays.items()}
        packed = SPGEMM_PATTERN.pack(
            a=sides[0], b=sides[1], columns=block_cols, slots=table[0], listed=table[1], **pointers
        )
        config = SpgemmPattern(entry, element(index))
        kernel = jit.load(config.spec(), jit.device_target())
        if shared_bytes > _SHARED_BYTES:
            kernel.max_dynamic_shared_size_bytes = shared_bytes
        kernel(config.grid(rows, warps), (32 * warps,), (jit.argument(packed),), shared_mem=shared_bytes)

    start("count_pairs")
    cupy.cumsum(before[:-1], out=before[:-1])
    pairs, most = before[-2:].tolist()  # synchronize!
    slots, listed = _table(min(most, block_cols))
    bytes_of_warp = 4 * (2 * slots + listed)
    if not 0 < pairs < _MOST or bytes_of_warp > device.shared_bytes_per_block():
        return None
    left, right, arrays["column"], arrays["start"] = (cupy.empty(pairs, np.int32) for _ in range(4))
    indptr = cupy.zeros(rows + 1, index)
    arrays |= {"left": left, "right": right, "count": indptr}
    warps = max(1, min(_WARPS, _SHARED_BYTES // bytes_of_warp))
    start("list_pairs", warps, (slots, listed), warps * bytes_of_warp)
    cupy.cumsum(indptr, out=indptr)
    blocks = int(indptr[-1])  # synchronize!
    indices, starts = cupy.empty(blocks, index), cupy.empty(blocks, np.int32)
    arrays |= {"indices": indices, "starts": starts}
    start("pack_columns")
    return ProductPattern(left, right, starts, indices, indptr)


def _packed(indices: Array, indptr: Array) -> bytearray:
    return BLOCK_PATTERN.pack(
        indices=indices.data.ptr, indptr=indptr.data.ptr, rows=len(indptr) - 1, blocks=len(indices)
    )


def _table(columns: int) -> tuple[int, int]:
    """Return the size of a hash table for so many columns, and the size of the array in which columns are sorted.

    Both are powers of two. At least a fifth of the hash table stays free.
    """
    return (_power(max(32, columns * 5 // 4 + 1)), _power(max(1, columns)))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
