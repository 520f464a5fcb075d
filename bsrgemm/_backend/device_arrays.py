"""Operations on the arrays of matrices on a GPU, in one or two launches each: what `CupyBackend` calls.

Each function returns what the function of the same name in `structure` returns, which works with array functions alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from .._kernels import graphs, jit, workspace
from .._kernels.element_types import element
from .._kernels.kernel import Kernel
from .._kernels.launch import contiguous, loaded, run
from ..dtypes import result_dtype
from .array_kernels import (
    BLOCK_ELEMENTS,
    CHECK_PATTERN,
    COMBINE_BLOCKS,
    CSR_BLOCKS,
    DIAGONAL,
    KEPT_PLACES,
    MERGE_PATTERNS,
    MOVED,
    REDUCE_LINES,
    BlockElements,
    CheckPattern,
    CombineBlocks,
    CsrBlocks,
    Diagonal,
    Expand,
    KeptPlaces,
    MergePatterns,
    combine_blocks,
    combined_dtype,
    combines,
    gather_blocks,
    most_ctas,
    reduced_dtypes,
)
from .array_kernels import reduce_lines as choose_reduction
from .base import Array, Blocks, Csr, ListMaker, PatternFacts
from .index_arrays import plain_array
from .structure import INT32_MAX, index_dtype


def pointer(x: Array | None) -> int:
    """Return the address of an array, or a null pointer for None."""
    return 0 if x is None else x.data.ptr


@lru_cache(maxsize=256)
def _function(kernel: Kernel, device: int) -> Any:
    """Return the function of a kernel on a device: to describe what is compiled takes the host 20 us."""
    return loaded(kernel)


def start(kernel: Kernel, grid: tuple[int, ...], argument: bytearray, uses: tuple[Array | None, ...]) -> None:
    """Start a kernel with one struct; `uses` are the arrays to which it points."""
    function = _function(kernel, cupy.cuda.runtime.getDevice())
    if graphs.is_capturing():
        graphs.keep(*uses)
    function(grid, (kernel.threads,), (jit.argument(argument),))


def read(blocks: Blocks) -> Blocks:
    """Return the arrays as kernels read them: contiguous, with one dtype for both index arrays."""
    return Blocks(contiguous(blocks.data), *_index(blocks.indices, blocks.indptr))


def _index(indices: Array, indptr: Array) -> tuple[Array, Array]:
    indices, indptr = plain_array(indices), plain_array(indptr)  # to read the address of others counts as a write
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


def blocks_of_csr(csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int], unique: bool) -> Blocks | None:
    """Return a valid matrix in CSR, whose rows are in order, as blocks; None if there is no kernel for it."""
    (M, N), (R, C), dtype = shape, blocksize, csr.data.dtype
    if dtype.char not in "?fdFD" or CsrBlocks.most_rows < R:
        return None
    index = index_dtype(max(M, N, len(csr.data)), csr.indices, csr.indptr)
    values, columns, pointers = (contiguous(x) for x in csr)
    columns, pointers = columns.astype(index, copy=False), pointers.astype(index, copy=False)
    indptr = cupy.zeros(M // R + 1, index)
    arrays = {"values": values, "columns": columns, "pointers": pointers}
    sizes = {"block_rows": M // R, "block_cols": N // C, "elements": len(columns), "R": R, "C": C, "unique": unique}

    def start_pass(kernel: CsrBlocks, **written: Array | None) -> None:
        places = {name: pointer(written.get(name)) for name in ("counts", "indptr", "indices", "data")}
        read_only = {name: pointer(x) for name, x in arrays.items()}
        blocks = len(written["data"]) if kernel.fill else 0  # type: ignore[arg-type]
        argument = CSR_BLOCKS.pack(**read_only, **places, **sizes, blocks=blocks)
        uses = (*arrays.values(), *written.values())
        start(kernel, most_ctas(M // R, kernel.threads // kernel.lanes), argument, uses)

    if M:
        counts = indptr[1:]
        start_pass(CsrBlocks.of(None, R, element(index)), counts=counts)
        cupy.cumsum(counts, out=counts)
    total = int(indptr[-1])  # synchronize!
    indices, data = cupy.empty(total, index), cupy.zeros((total, R, C), dtype)
    if total:
        start_pass(CsrBlocks.of(dtype, R, element(index)), indptr=indptr, indices=indices, data=data)
    return Blocks(data, indices, indptr)


# ---------------------------------------------------------------------------------- two patterns, some blocks
#: Results of at most so many bytes are allocated before it is known how many blocks they have, which saves a wait.
_AT_ONCE = 4 << 20


def combine(name: str, a: Blocks, b: Blocks, same: bool) -> Blocks | None:
    """Return an operation on the union of two patterns, without blocks of zeros; None if there is no kernel for it.

    Waits for the GPU once, and for large results of different patterns twice.
    """
    dtype = result_dtype(a.data.dtype, b.data.dtype)
    if not combines(name, dtype) or len(a.indices) + len(b.indices) > INT32_MAX:
        return None
    a, b = (read(x._replace(data=x.data.astype(dtype, copy=False))) for x in (a, b))
    wanted = index_dtype(0, a.indices, b.indices)
    a, b = (Blocks(x.data, x.indices.astype(wanted, copy=False), x.indptr.astype(wanted, copy=False)) for x in (a, b))
    shape, found = a.data.shape[1:], cupy.zeros(2, np.int64)
    if same:
        lists, most = (None, None, cupy.empty(len(a.indices), wanted)), len(a.indices)
    else:
        lists, most = _merged(a, b, shape[0] * shape[1] * dtype.itemsize, found)
    left, right, indices = lists
    data = cupy.empty((most, *shape), combined_dtype(name, dtype))
    nonzero, indptr = cupy.empty(most, np.bool_), cupy.empty(len(a.indptr), wanted)
    arrays = {
        "a": a.data, "b": b.data, "left": left, "right": right, "a_ptr": a.indptr, "b_ptr": b.indptr,
        "a_indices": a.indices if same else None, "data": data, "indices": indices, "indptr": indptr,
        "nonzero": nonzero, "nonzeros": found[1:], "count": None if same else found,
    }  # fmt: skip
    _start_combination(combine_blocks(name, dtype, element(wanted)), arrays, len(b.data))
    count, nonzeros = found.tolist()  # synchronize!
    count = most if same else count
    blocks = Blocks(data[:count], indices[:count], indptr)
    if nonzeros < count:
        return select_blocks(blocks, nonzero[:count], nonzeros)
    return Blocks(data[:count].copy(), indices[:count].copy(), indptr) if 2 * count < most else blocks


def _merged(a: Blocks, b: Blocks, block_bytes: int, found: Array) -> tuple[tuple[Array, Array, Array], int]:
    """Return (left, right, indices) of the union of two patterns, and the number of blocks for which there is room.

    The number of blocks that there are is written to `found`.
    """
    index, rows = a.indices.dtype, len(a.indptr) - 1
    sizes = (len(a.indices), len(b.indices)) if rows else (0, 0)
    most, tile = sum(sizes), MergePatterns.tile
    tiles = max(1, -(-most // tile))
    counts, arrived = cupy.empty(tiles, np.int64), workspace.counters(1)
    arrays = {"a": a.indices, "a_ptr": a.indptr, "b": b.indices, "b_ptr": b.indptr, "counts": counts, "total": found}
    fields = {"arrived": pointer(arrived), "rows": rows, "a_blocks": sizes[0], "b_blocks": sizes[1]}
    lists: tuple[Any, ...] = (None, None, None)
    for fill in (False, True):
        if fill:
            most = int(found[0]) if most * block_bytes > _AT_ONCE else most  # synchronize!
            lists = tuple(cupy.empty(most, index) for _ in range(3))
        arrays |= dict(zip(("left", "right", "indices"), lists, strict=True))
        argument = MERGE_PATTERNS.pack(**{key: pointer(x) for key, x in arrays.items()}, **fields)
        uses = (*arrays.values(), arrived)
        start(MergePatterns(fill, element(index)), most_ctas(tiles, 1), argument, uses)
    return lists, most


def _start_combination(kernel: CombineBlocks, arrays: dict[str, Array | None], b_blocks: int, turned: int = 0) -> None:
    data, indptr, a = arrays["data"], arrays["indptr"], arrays["a"]
    assert data is not None and indptr is not None and a is not None
    size = data.shape[1] * data.shape[2]
    tile = kernel.tile(size)
    argument = COMBINE_BLOCKS.pack(
        **{name: pointer(x) for name, x in arrays.items()}, blocks=len(data), a_blocks=len(a), b_blocks=b_blocks,
        rows=len(indptr) - 1, size=size, tile=tile, listed=arrays["left"] is not None and not turned,
        turned=turned,
    )  # fmt: skip
    grid = max(most_ctas(len(data), tile), most_ctas(len(indptr), kernel.threads))
    start(kernel, grid, argument, tuple(arrays.values()))


def select_blocks(given: Blocks, keep: Array, total: int | None = None) -> Blocks:
    """Return the blocks for which the boolean array `keep` is true; how many these are, the caller may know."""
    data, indices, indptr = read(given)
    index, found, n = indices.dtype, cupy.empty(1, np.int64), min(len(keep), len(indices), len(data))
    tiles = max(1, -(-n // KeptPlaces.tile))
    counts, arrived, kept = cupy.empty(tiles, np.int64), workspace.counters(1), contiguous(keep)
    places = None
    for fill in (False, True):
        if fill:
            total = int(found[0]) if total is None else total  # synchronize!
            places = cupy.empty(total, index)
        argument = KEPT_PLACES.pack(
            kept=pointer(kept), places=pointer(places), counts=pointer(counts), total=pointer(found),
            arrived=pointer(arrived), n=n,
        )  # fmt: skip
        uses = (kept, places, counts, found, arrived)
        start(KeptPlaces(fill, element(index)), most_ctas(tiles, 1), argument, uses)
    assert total is not None
    out = Blocks(cupy.empty((total, *data.shape[1:]), data.dtype), cupy.empty(total, index), cupy.empty_like(indptr))
    _gather(Blocks(data, indices, indptr), places, out)
    return out


def transpose(given: Blocks, by_column: tuple[Array, Array]) -> Blocks:
    """Return the blocks of the transposed matrix, given the list of its blocks by block column."""
    data, indices, indptr = read(given)
    order, begins = (x.astype(indices.dtype, copy=False) for x in by_column)
    (n, R, C), rows = data.shape, cupy.empty_like(indices)
    if n:
        kernel = Expand(element(indices.dtype))
        run(kernel, kernel.grid(n), (indptr, rows, np.int64(len(indptr) - 1), np.int64(n)))
    out = Blocks(cupy.empty((n, C, R), data.dtype), cupy.empty(n, indices.dtype), cupy.empty_like(begins))
    _gather(Blocks(data, rows, begins), order, out, R)
    return out


def _gather(blocks: Blocks, places: Array | None, out: Blocks, turned: int = 0) -> None:
    """Copy the blocks at some places; those with so many rows that are `turned` become their transposes."""
    arrays = {
        "a": blocks.data, "b": None, "left": places, "right": None, "a_ptr": blocks.indptr, "b_ptr": None,
        "a_indices": blocks.indices, "data": out.data, "indices": out.indices, "indptr": out.indptr, "nonzero": None,
        "nonzeros": None, "count": None,
    }  # fmt: skip
    _start_combination(gather_blocks(out.data.itemsize, element(out.indptr.dtype)), arrays, 0, turned)


# ------------------------------------------------------------------------------------- rows and columns
def reduce_lines(
    op: str,
    given: Blocks,
    by_column: ListMaker | None,
    block_cols: int,
    dtype: np.dtype[Any],
    only_stored: bool,
) -> Array:
    """Reduce the elements of each row, or of each column if `by_column` makes the list of their blocks."""
    if dtype not in reduced_dtypes(op, given.data.dtype):
        given = given._replace(data=given.data.astype(dtype))
    data, indices, indptr = read(given)
    _, R, C = data.shape
    places, starts = (None, indptr) if by_column is None else _index(*by_column())
    block_rows, groups = len(indptr) - 1, len(starts) - 1
    out = cupy.empty(groups * (R if places is None else C), dtype)
    if not len(out):
        return out
    if places is None:
        layout = {"side": R, "width": C, "line_step": C, "step": 1, "length": block_cols * C}
    else:
        layout = {"side": C, "width": R, "line_step": 1, "step": C, "length": block_rows * R}
    entries = len(indices) if places is None else len(places)
    kernel = choose_reduction(op, data.dtype, dtype, entries * layout["width"] // max(groups, 1), element(starts.dtype))
    argument = REDUCE_LINES.pack(
        data=pointer(data), places=pointer(places), starts=pointer(starts), out=pointer(out), groups=groups,
        entries=entries, blocks=len(data), only_stored=only_stored, **layout,
    )  # fmt: skip
    start(kernel, kernel.grid(len(out)), argument, (data, places, starts, out))
    return out


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
