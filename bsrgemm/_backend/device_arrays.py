"""Operations on the arrays of matrices on a GPU, in one or two launches each: what `CupyBackend` calls.

Each function returns what the function of the same name in `structure` returns, which works with array functions alone.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from .._kernels import jit, workspace
from .._kernels.element_types import element
from .._kernels.kernel import Kernel
from .._kernels.launch import contiguous, run
from .array_kernels import (
    BLOCK_ELEMENTS,
    CHECK_PATTERN,
    DIAGONAL,
    MOVED,
    BlockElements,
    CheckPattern,
    Diagonal,
    most_ctas,
)  # fmt: skip
from .base import Array, Blocks, PatternFacts


def pointer(x: Array | None) -> int:
    """Return the address of an array, or a null pointer for None."""
    return 0 if x is None else x.data.ptr


def start(kernel: Kernel, grid: tuple[int, ...], argument: bytearray, uses: tuple[Array | None, ...]) -> None:
    """Start a kernel with one struct; `uses` are the arrays to which it points."""
    run(kernel, grid, (jit.argument(argument),), uses=uses)


def read(blocks: Blocks) -> Blocks:
    """Return the arrays as kernels read them: contiguous, with one dtype for both index arrays."""
    return Blocks(contiguous(blocks.data), *_index(blocks.indices, blocks.indptr))


def _index(indices: Array, indptr: Array) -> tuple[Array, Array]:
    if indices.dtype != indptr.dtype:
        index = np.result_type(indices.dtype, indptr.dtype)
        indices, indptr = indices.astype(index), indptr.astype(index)
    return contiguous(indices), contiguous(indptr)


# ------------------------------------------------------------------------------------------------ checks
def inspect(indices: Array, indptr: Array) -> PatternFacts:
    """Return what tells whether index arrays are valid, in order and without duplicates."""
    indices, indptr = _index(indices, indptr)
    entries, rows = len(indices), len(indptr) - 1
    kernel, found = CheckPattern(element(indices.dtype)), cupy.empty(7, np.int64)
    grid = kernel.grid(max(entries, rows))
    _memory, partial, arrived = workspace.scratch(grid[0] * kernel.partial_bytes, 1)  # held until the launch returns
    argument = CHECK_PATTERN.pack(
        indices=pointer(indices), indptr=pointer(indptr), found=pointer(found), partial=partial, arrived=arrived,
        entries=entries, rows=rows,
    )  # fmt: skip
    start(kernel, grid, argument, (indices, indptr, found))
    first, stop, falls, low, high, unordered, repeated = found.tolist()  # synchronize!
    if not entries:
        low = high = 0
    return PatternFacts(first, stop, falls > 0, low, high, not unordered, not repeated)


# ------------------------------------------------------------------------------------------- other formats
def to_csr(blocks: Blocks, block_cols: int, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """Return (data, indices, indptr) in CSR with every element of each stored block, in order, with duplicates."""
    values = cupy.empty(blocks.data.size, blocks.data.dtype)
    rows = cupy.empty((len(blocks.indptr) - 1) * blocks.data.shape[1] + 1, dtype)
    return values, _list_elements("kCsr", blocks, block_cols, values, rows), rows


def to_coo(blocks: Blocks, block_cols: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return (row, col) of every stored element, in the order of `data`."""
    rows = cupy.empty(blocks.data.size, dtype)
    return rows, _list_elements("kCoo", blocks, block_cols, None, rows)


def _list_elements(format: str, given: Blocks, block_cols: int, values: Array | None, rows: Array) -> Array:
    """Write the values and the rows, or row pointers, of all elements, and return their columns."""
    blocks = data, indices, indptr = read(given)
    _, R, C = data.shape
    columns = cupy.empty(data.size, rows.dtype)
    size = data.itemsize if format == "kCsr" else 1
    kernel = BlockElements(format, MOVED[size], element(indices.dtype), element(rows.dtype))
    argument = BLOCK_ELEMENTS.pack(
        data=pointer(data), indices=pointer(indices), indptr=pointer(indptr), values=pointer(values),
        rows=pointer(rows), columns=pointer(columns), block_rows=len(indptr) - 1, block_cols=block_cols,
        blocks=len(data), R=R, C=C,
    )  # fmt: skip
    if len(rows):
        start(kernel, most_ctas(max(data.size, len(rows)), kernel.tile), argument, (*blocks, values, rows, columns))
    return columns


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


def _start_diagonal(operation: str, blocks: Blocks, k: int, count: int, **more: Any) -> None:
    """Start `diagonal` with some of its further arrays, `out`, `stored` and `missing`, and of its flags."""
    if not count:
        return
    (data, indices, indptr), index = blocks, element(blocks.indices.dtype)
    if operation in ("kElements", "kBlocks"):
        kernel = Diagonal.reading(operation, data.dtype, index)
    else:
        kernel = Diagonal.moving(operation, data.itemsize if operation == "kSet" else 1, index)
    arrays = {name: more.get(name) for name in ("out", "stored", "missing")}
    argument = DIAGONAL.pack(
        data=pointer(data), indices=pointer(indices), indptr=pointer(indptr), rows=len(indptr) - 1,
        blocks=min(len(data), len(indices)), count=count, below=max(-k, 0), above=max(k, 0), R=data.shape[1],
        C=data.shape[2], **{name: pointer(x) for name, x in arrays.items()},
        **{name: bool(more.get(name)) for name in ("canonical", "turned", "single")},
    )  # fmt: skip
    start(kernel, most_ctas(count, kernel.threads), argument, (*blocks, *arrays.values()))
