"""Operations on the arrays of matrices on a GPU, in one or two launches each: what `CupyBackend` calls.

Each function returns what the function of the same name in `structure` returns, which works with array functions alone.
"""

from __future__ import annotations

import cupy
import numpy as np

from .._kernels import jit
from .._kernels.element_types import element
from .._kernels.kernel import Kernel
from .._kernels.launch import contiguous, run
from .array_kernels import DIAGONAL, Diagonal, most_ctas
from .base import Array, Blocks


def pointer(x: Array | None) -> int:
    """Return the address of an array, or a null pointer for None."""
    return 0 if x is None else x.data.ptr


def start(kernel: Kernel, grid: tuple[int, ...], argument: bytearray, uses: tuple[Array | None, ...]) -> None:
    """Start a kernel with one struct; `uses` are the arrays to which it points."""
    run(kernel, grid, (jit.argument(argument),), uses=uses)


def read(blocks: Blocks) -> Blocks:
    """Return the arrays as kernels read them: contiguous, with one dtype for both index arrays."""
    data, indices, indptr = map(contiguous, blocks)
    if indices.dtype != indptr.dtype:
        index = np.result_type(indices.dtype, indptr.dtype)
        indices, indptr = indices.astype(index), indptr.astype(index)
    return Blocks(data, indices, indptr)


# --------------------------------------------------------------------------------------------- diagonals
def diagonal(blocks: Blocks, k: int, count: int, canonical: bool) -> Array:
    """Return the elements ``A[i, i + k]``."""
    out = cupy.empty(count, blocks.data.dtype)
    _start_diagonal("kElements", read(blocks), k, count, out=out, canonical=canonical)
    return out


def diagonal_blocks(blocks: Blocks, count: int, canonical: bool, turned: bool) -> tuple[Array, Array]:
    """Return blocks (i, i), and whether each is stored."""
    out, stored = cupy.empty((count, *blocks.data.shape[1:]), blocks.data.dtype), cupy.empty(count, np.bool_)
    _start_diagonal("kBlocks", read(blocks), 0, out.size, out=out, stored=stored, canonical=canonical, turned=turned)
    return out, stored


def set_diagonal(blocks: Blocks, k: int, values: Array, count: int) -> bool:
    """Write a diagonal into blocks that lie together; False if one of them is not stored."""
    if not blocks.data.flags.c_contiguous:
        return False
    stored, missing = read(blocks), cupy.zeros((), np.uint64)
    _start_diagonal("kFind", stored, k, count, missing=missing)
    if int(missing):  # synchronize!
        return False
    _start_diagonal("kSet", stored, k, count, out=contiguous(values), single=values.ndim == 0)
    return True


def _start_diagonal(
    operation: str,
    blocks: Blocks,
    k: int,
    count: int,
    *,
    out: Array | None = None,
    stored: Array | None = None,
    missing: Array | None = None,
    canonical: bool = True,
    turned: bool = False,
    single: bool = False,
) -> None:
    if not count:
        return
    (data, indices, indptr), index = blocks, element(blocks.indices.dtype)
    if operation in ("kElements", "kBlocks"):
        kernel = Diagonal.reading(operation, data.dtype, index)
    else:
        kernel = Diagonal.moving(operation, data.itemsize if operation == "kSet" else 1, index)
    argument = DIAGONAL.pack(
        data=pointer(data), indices=pointer(indices), indptr=pointer(indptr), out=pointer(out),
        stored=pointer(stored), missing=pointer(missing), rows=len(indptr) - 1, blocks=min(len(data), len(indices)),
        count=count, below=max(-k, 0), above=max(k, 0), R=data.shape[1], C=data.shape[2], canonical=canonical,
        turned=turned, single=single,
    )  # fmt: skip
    start(kernel, most_ctas(count, kernel.threads), argument, (*blocks, out, stored, missing))
