"""Operations on the arrays of matrices on a GPU, in one or two launches each: what `CupyBackend` calls.

Each function returns what the function of the same name in `structure` returns, which works with array functions alone.
New arrays are made by the class `cupy.ndarray` itself: `cupy.empty` does no more and takes the host 0.5 us longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from .._kernels import workspace
from .._kernels.element_types import element
from .._kernels.kernel import Kernel
from .._kernels.launch import Starter, contiguous, run
from ..dtypes import result_dtype
from .array_kernels import (
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
from .base import Array, Blocks, Csr, ListMaker, PatternFacts, Piece
from .index_arrays import plain_array
from .structure import INT32_MAX, index_dtype

_INT64, _BYTE = np.dtype(np.int64), np.dtype(np.uint8)


@lru_cache(maxsize=1024)
def _ready(device: int, make: Callable[..., Kernel], *key: Any) -> Starter:
    return Starter(make(*key))


def kernel(make: Callable[..., Kernel], *key: Any) -> Starter:
    """Return the kernel ``make(*key)`` on the current device; to describe it anew takes the host 20 us."""
    return _ready(cupy.cuda.runtime.getDevice(), make, *key)


def read(blocks: Blocks) -> Blocks:
    """Return the arrays as kernels read them: contiguous, with one dtype for both index arrays."""
    return Blocks(contiguous(blocks.data), *_index(blocks.indices, blocks.indptr))


def _index(indices: Array, indptr: Array) -> tuple[Array, Array]:
    indices, indptr = plain_array(indices), plain_array(indptr)  # to read the address of others counts as a write
    if indices.dtype != indptr.dtype:
        indices, indptr = indices.astype(_INT64, copy=False), indptr.astype(_INT64, copy=False)
    return contiguous(indices), contiguous(indptr)


# ------------------------------------------------------------------------------------------------ checks
def inspect(indices: Array, indptr: Array) -> PatternFacts:
    """Return what tells whether index arrays are valid, in order and without duplicates."""
    indices, indptr = _index(indices, indptr)
    entries, rows = len(indices), len(indptr) - 1
    check = kernel(CheckPattern, element(indices.dtype))
    grid = check.kernel.grid(max(entries, rows))
    _memory, partial, arrived = workspace.scratch(grid[0] * CheckPattern.partial_bytes, 1)  # until the launch returns
    check.start(
        grid, (), indices=indices.data.ptr, indptr=indptr.data.ptr, found=workspace.answer(), partial=partial,
        arrived=arrived, entries=entries, rows=rows,
    )  # fmt: skip
    first, stop, falls, low, high, unordered, repeated, longest = workspace.read_answer(8)  # synchronize!
    if not entries:
        low = high = 0
    return PatternFacts(first, stop, falls > 0, low, high, not unordered, not repeated, longest)


# ------------------------------------------------------------------------------------------- other formats
def to_csr(given: Blocks, block_cols: int, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """Return (data, indices, indptr) in CSR with every element of each stored block, in order, with duplicates."""
    blocks = read(given)
    values, columns = (cupy.ndarray(blocks.data.size, x) for x in (blocks.data.dtype, dtype))
    rows = cupy.ndarray((len(blocks.indptr) - 1) * blocks.data.shape[1] + 1, dtype)
    _start_elements("kCsr", blocks, blocks.data.shape, block_cols, Csr(values, columns, rows))
    return values, columns, rows


def to_coo(given: Blocks, block_cols: int, dtype: np.dtype[Any], copy: bool) -> tuple[Array, Array, Array]:
    """Return (data, row, col) of every stored element, in the order of `data`, which is copied if asked for."""
    blocks = read(given)
    rows, columns = (cupy.ndarray(blocks.data.size, dtype) for _ in range(2))
    values = cupy.ndarray(blocks.data.size, blocks.data.dtype) if copy else None
    _start_elements("kCoo", blocks, blocks.data.shape, block_cols, Csr(values, columns, rows))
    return blocks.data.reshape(-1) if values is None else values, rows, columns


#: The arrays that only some formats of `block_elements` have.
_NO_RUNS = dict.fromkeys(("runs", "found", "wrong", "arrived", "row_stride", "col_stride"), 0)


def _start_elements(
    format: str, blocks: Blocks, of: tuple[int, int, int], block_cols: int, listed: Csr, **places: int
) -> None:
    """Start `block_elements` with blocks of this shape, and a list: its values, columns, and rows or row pointers."""
    (data, indices, indptr), (values, columns, rows) = blocks, listed
    (n, R, C), elements = of, len(columns)
    tile, lines = BlockElements.tile(n * R * C), len(rows) if format in ("kCsr", "kFind") else 0
    if not n and not lines:
        return
    moves = data is not None and values is not None
    make = kernel(BlockElements.of, format, values.itemsize if moves else 1, element(indices.dtype),
                  element(columns.dtype))  # fmt: skip
    make.start(
        max(most_ctas(n * R * C, tile), (min(-(-lines // BlockElements.threads), BlockElements.ctas),)),
        (*blocks, *listed), data=data.data.ptr if moves else 0, indices=indices.data.ptr, indptr=indptr.data.ptr,
        values=values.data.ptr if moves else 0, rows=rows.data.ptr, columns=columns.data.ptr,
        block_rows=len(indptr) - 1, block_cols=block_cols, blocks=n, elements=elements, tile=tile, R=R, C=C,
        **(_NO_RUNS | places),
    )  # fmt: skip


def at_elements(x: Array) -> bool:
    """Whether all elements of an array lie at multiples of their size, where kernels can read and write them."""
    return not any(n % x.itemsize for n in (x.data.ptr, *x.strides))


def put_blocks(blocks: Blocks, out: Array) -> None:
    """Write blocks, no two of which have the same place, to their places in a dense matrix of any strides."""
    _start_dense("kPut", read(blocks), out)


def take_blocks(blocks: Blocks, X: Array) -> Array:
    """Return the elements of a dense matrix of any strides at the places of blocks, in the order of `data`."""
    indices, indptr = _index(blocks.indices, blocks.indptr)
    out = cupy.ndarray(blocks.data.shape, X.dtype)
    _start_dense("kTake", Blocks(out, indices, indptr), X)
    return out.reshape(-1)


def _start_dense(format: str, blocks: Blocks, X: Array) -> None:
    """Start `block_elements` with a dense matrix."""
    of = blocks.data.shape
    row_stride, col_stride = (n // X.itemsize for n in X.strides)
    none = blocks.indices[:0]
    dense = {"row_stride": row_stride, "col_stride": col_stride}
    _start_elements(format, blocks, of, X.shape[1] // of[2], Csr(X, none, none), **dense)


def blocks_of_csr(
    given: Csr, shape: tuple[int, int], blocksize: tuple[int, int], canonical: Callable[[], bool]
) -> Blocks | None:
    """Return a matrix in CSR as blocks, see `Backend.blocks_of_csr`; None if there is no kernel for it."""
    (M, N), (R, C) = shape, blocksize
    if len(given.indptr) != M + 1 or len(given.data) != len(given.indices):
        return None
    index = index_dtype(max(M, N, len(given.data)), given.indices, given.indptr)
    columns, pointers = (contiguous(x).astype(index, copy=False) for x in given[1:])
    csr = Csr(contiguous(given.data), columns, pointers)
    count = len(columns) // (R * C)
    if count * R * C == len(columns) and (M or not count):
        blocks = _full_blocks(csr, (M // R, N // C), (count, R, C))
        if blocks is not None:
            return blocks
    if CsrBlocks.most_rows < R or CsrBlocks.most_columns <= C or not canonical():
        return None
    indptr = cupy.ndarray(M // R + 1, index)
    total = _count_blocks(csr, shape, blocksize, indptr.data.ptr)
    cupy.cumsum(indptr, out=indptr)
    blocks = Blocks(cupy.ndarray((total, R, C), csr.data.dtype), cupy.ndarray(total, index), indptr)
    _runs, runs, _ = workspace.scratch(8 * total * R, 0)
    if total:
        places = {"indptr": indptr.data.ptr, "indices": blocks.indices.data.ptr, "runs": runs, "blocks": total}
        _start_blocks(True, csr, shape, blocksize, **places)
        _start_elements("kFill", blocks, (total, R, C), N // C, csr, runs=runs)
    return blocks


def _full_blocks(csr: Csr, block_shape: tuple[int, int], of: tuple[int, int, int]) -> Blocks | None:
    """Return the blocks of a matrix in CSR, of this shape, if all of them are full and its arrays valid; else None."""
    (rows, cols), index = block_shape, csr.indices.dtype
    blocks = Blocks(None, cupy.ndarray(of[0], index), cupy.ndarray(rows + 1, index))
    _, _, counters = workspace.scratch(0, 2)
    found = {"found": workspace.answer(), "wrong": counters, "arrived": counters + 4}
    _start_elements("kFind", blocks, of, cols, csr, **found)
    if workspace.read_answer(1)[0]:  # synchronize!
        return None
    blocks = blocks._replace(data=cupy.ndarray(of, csr.data.dtype))
    _start_elements("kFill", blocks, of, cols, csr)
    return blocks


def count_blocks(given: Csr, shape: tuple[int, int], blocksize: tuple[int, int]) -> int:
    """Return how many blocks the elements of a matrix in CSR are in."""
    return _count_blocks(Csr(given.data, *_index(*given[1:])), shape, blocksize, 0)


def _count_blocks(csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int], counts: int) -> int:
    """Return how many blocks there are, and write 0 and the number of each block row to an address that is not 0."""
    _, _, counters = workspace.scratch(0, 3)
    found = {"found": workspace.answer(), "total": counters, "arrived": counters + 8}
    _start_blocks(False, csr, shape, blocksize, counts=counts, **found)
    return workspace.read_answer(1)[0]  # synchronize!


#: The addresses that only one of the two passes has.
_NO_BLOCKS = dict.fromkeys(("counts", "indptr", "indices", "runs", "blocks", "found", "total", "arrived"), 0)


def _start_blocks(fill: bool, csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int], **places: int) -> None:
    """Start a pass over the block rows of a matrix in CSR."""
    (M, N), (R, C) = shape, blocksize
    make = kernel(CsrBlocks.of, fill, R, element(csr.indices.dtype))
    make.start(
        most_ctas(max(M, 1), R * CsrBlocks.threads // make.kernel.lanes), csr, columns=csr.indices.data.ptr,
        pointers=csr.indptr.data.ptr, block_rows=M // R, block_cols=N // C, elements=len(csr.indices), R=R, C=C,
        **(_NO_BLOCKS | places),
    )  # fmt: skip


# ---------------------------------------------------------------------------------- two patterns, some blocks
#: Results of at most so many bytes are allocated before it is known how many blocks they have, which saves a wait.
_AT_ONCE = 4 << 20
#: Bytes of counters that `combine_blocks` has: of CTAs, and of blocks.
_OF_BLOCKS = 8


def combine(name: str, a: Blocks, b: Blocks, same: bool, zeros: bool) -> Blocks | None:
    """Return an operation on the union of two patterns; None if there is no kernel for it.

    Blocks of zeros are left out, unless `zeros`.

    Waits for the GPU once, and for large results of different patterns twice.
    """
    dtype = a.data.dtype
    if b.data.dtype != dtype:
        dtype = result_dtype(dtype, b.data.dtype)
    _, R, C = a.data.shape
    if not combines(name, dtype) or max(len(a.indices) + len(b.indices), R * C) > INT32_MAX:
        return None
    a, b = read(a), read(b)
    index = a.indices.dtype if b.indices.dtype == a.indices.dtype else _INT64
    a, b = _cast(a, dtype, index), _cast(b, dtype, index)
    a_blocks, rows = len(a.data), len(a.indptr) - 1
    if same:
        _lists, left, right, count, most, indices = None, 0, 0, 0, len(a.indices), cupy.ndarray(len(a.indices), index)
    else:
        _lists, left, right, count, most, indices = _merged(a, b, R * C * dtype.itemsize)
    data, indptr = cupy.ndarray((most, R, C), combined_dtype(name, dtype)), cupy.ndarray(rows + 1, index)
    _memory, nonzero, counters = workspace.scratch(most, 4)
    combination, tile = kernel(combine_blocks, name, dtype, element(index)), CombineBlocks.tile(most, R * C)
    combination.start(
        max(most_ctas(most, tile), most_ctas(rows + 1, CombineBlocks.threads)), (),
        a=a.data.data.ptr, b=b.data.data.ptr, left=left, right=right, a_ptr=a.indptr.data.ptr, b_ptr=b.indptr.data.ptr,
        a_indices=a.indices.data.ptr if same else 0, data=data.data.ptr, indices=indices.data.ptr,
        indptr=indptr.data.ptr, nonzero=nonzero, found=workspace.answer(), nonzeros=counters + _OF_BLOCKS,
        arrived=counters, count=count, blocks=most, a_blocks=a_blocks, b_blocks=len(b.data), rows=rows,
        column_shift=0, block_shift=0, size=R * C, tile=tile, listed=not same, turned=0,
    )  # fmt: skip
    count, nonzeros = workspace.read_answer(2)  # synchronize!
    if count < most:
        data, indices = data[:count], indices[:count]
    if nonzeros < count and not zeros:
        return _selected(Blocks(data, indices, indptr), _Kept(nonzero, _BYTE, count, nonzeros))
    return Blocks(data.copy(), indices.copy(), indptr) if 2 * count < most else Blocks(data, indices, indptr)


def _cast(blocks: Blocks, dtype: np.dtype[Any], index: np.dtype[Any]) -> Blocks:
    data, indices, indptr = blocks
    if data.dtype == dtype and indices.dtype == index:
        return blocks
    return Blocks(*(x.astype(to, copy=False) for x, to in ((data, dtype), (indices, index), (indptr, index))))


def _merged(a: Blocks, b: Blocks, block_bytes: int) -> tuple[Any, int, int, int, int, Array]:
    """Find the union of two patterns: (memory, left, right, count, most, indices).

    There is room for `most` blocks. How many there are is written to the address `count`, and the block of either
    matrix, or -1, to those of `left` and `right`; these three lie in the memory.
    """
    dtype, rows = a.indices.dtype, len(a.indptr) - 1
    sizes = (len(a.indices), len(b.indices)) if rows else (0, 0)
    most, index = sum(sizes), element(dtype)
    tiles = max(1, -(-most // MergePatterns.tile))
    grid = most_ctas(tiles, 1)
    counts_memory, counts, arrived = workspace.scratch(8 * tiles + 8, 1)
    total = counts + 8 * tiles
    arrays = {
        "a": a.indices.data.ptr, "a_ptr": a.indptr.data.ptr, "b": b.indices.data.ptr, "b_ptr": b.indptr.data.ptr,
        "counts": counts, "arrived": arrived, "rows": rows, "a_blocks": sizes[0], "b_blocks": sizes[1],
    }  # fmt: skip
    exactly = most * block_bytes > _AT_ONCE
    counted = workspace.answer() if exactly else total
    kernel(MergePatterns, False, index).start(grid, (), left=0, right=0, indices=0, total=counted, **arrays)
    if exactly:
        (most,) = workspace.read_answer(1)  # synchronize!
    bytes_ = most * dtype.itemsize
    memory, left, _ = workspace.scratch(2 * bytes_, 0)
    indices, right = cupy.ndarray(most, dtype), left + bytes_
    kernel(MergePatterns, True, index).start(
        grid, (), left=left, right=right, indices=indices.data.ptr, total=total, **arrays
    )
    return (memory, counts_memory), left, right, 0 if exactly else total, most, indices


class _Kept:
    """The places of the numbers of a vector that are not zero; the caller may know how many there are."""

    def __init__(self, address: int, dtype: np.dtype[Any], n: int, total: int | None = None) -> None:
        self.n, self._dtype, self._tile = n, dtype, KeptPlaces.tile(n)
        tiles = max(1, -(-n // self._tile))
        self._grid = most_ctas(tiles, 1)
        self._memory, counts, arrived = workspace.scratch(8 * tiles + 8, 1)
        self._arrays = {"kept": address, "counts": counts, "arrived": arrived, "n": n, "tile": self._tile}
        self._start(False, "i32", 0, workspace.answer() if total is None else counts + 8 * tiles)
        if total is None:
            (total,) = workspace.read_answer(1)  # synchronize!
        self.total: int = total

    def _start(self, fill: bool, index: str, places: int, total: int) -> None:
        kernel(KeptPlaces.of, fill, self._dtype, index).start(
            self._grid, (), places=places, total=total, **self._arrays
        )

    def fill(self, places: int, dtype: np.dtype[Any]) -> None:
        """Write the places to an address."""
        self._start(True, element(dtype), places, 0)


def count_nonzero(x: Array) -> int:
    """Return how many elements of an array are not zero."""
    x = contiguous(x)
    return _Kept(x.data.ptr, x.dtype, x.size).total


def flatnonzero(x: Array) -> Array:
    """Return the places of the elements of an array that are not zero, in order."""
    x = contiguous(x)
    kept = _Kept(x.data.ptr, x.dtype, x.size)
    places = cupy.ndarray(kept.total, _INT64)
    kept.fill(places.data.ptr, _INT64)
    return places


def select_blocks(given: Blocks, keep: Array) -> Blocks:
    """Return the blocks for which a vector is not zero."""
    blocks, keep = read(given), contiguous(keep)
    n = min(len(keep), len(blocks.indices), len(blocks.data))
    return _selected(blocks, _Kept(keep.data.ptr, keep.dtype, n))


def _selected(blocks: Blocks, kept: _Kept) -> Blocks:
    """Return the blocks that are kept."""
    data, indices, indptr = blocks
    total, dtype = kept.total, indices.dtype
    _places, places, _ = workspace.scratch(total * dtype.itemsize, 0)
    kept.fill(places, dtype)
    _, R, C = data.shape
    out = Blocks(cupy.ndarray((total, R, C), data.dtype), cupy.ndarray(total, dtype), cupy.ndarray(len(indptr), dtype))
    to = out.data.data.ptr, out.indices.data.ptr, out.indptr.data.ptr
    _start_gather(blocks, places, to, (total, R * C), out, listed=1)
    return out


#: How `combine_blocks` copies blocks unless something else is said.
_AS_THEY_ARE = {"column_shift": 0, "block_shift": 0, "listed": 0, "turned": 0}


def turned(data: Array, order: Array) -> Array:
    """Return blocks in this order, each of them transposed."""
    data, order = contiguous(data), contiguous(order)
    n, R, C = data.shape
    out = cupy.ndarray((n, C, R), data.dtype)
    if n:
        gathering, tile = kernel(gather_blocks, data.itemsize, element(order.dtype)), CombineBlocks.tile(n, R * C)
        gathering.start(
            most_ctas(n, tile), (data, order, out), a=data.data.ptr, b=0, left=order.data.ptr, right=0, a_ptr=0,
            b_ptr=0, a_indices=0, data=out.data.ptr, indices=0, indptr=0, nonzero=0, found=0, nonzeros=0, arrived=0,
            count=0, blocks=n, a_blocks=n, b_blocks=0, rows=-1, size=R * C, tile=tile,
            **(_AS_THEY_ARE | {"turned": R}),
        )  # fmt: skip
    return out


def stack(pieces: Sequence[Piece], dtype: np.dtype[Any], index: np.dtype[Any]) -> Blocks:
    """Return copies of matrices one below the other, in these dtypes."""
    total, rows = sum(len(x.blocks.indices) for x in pieces), sum(len(x.blocks.indptr) - 1 for x in pieces)
    R, C = pieces[0].blocks.data.shape[1:]
    out = Blocks(cupy.ndarray((total, R, C), dtype), cupy.ndarray(total, index), cupy.ndarray(rows + 1, index))
    steps = R * C * dtype.itemsize, index.itemsize, index.itemsize
    places = [x.data.ptr for x in out]
    first = 0
    for given, left, begin in pieces:
        blocks = _cast(read(given), dtype, index)
        n = len(blocks.indices)
        shifts = {"column_shift": left, "block_shift": first - begin}
        _start_gather(blocks, 0, (places[0], places[1], places[2]), (n, R * C), out, **shifts)
        ahead = (n, n, len(blocks.indptr) - 1)
        places = [place + k * step for place, k, step in zip(places, ahead, steps, strict=True)]
        first += n
    return out


def _start_gather(
    blocks: Blocks, places: int, to: tuple[int, int, int], sizes: tuple[int, int], uses: tuple[Any, ...], **how: int
) -> None:
    """Start the copy of so many blocks of so many elements to the addresses of data, indices and indptr."""
    data, indices, indptr = blocks
    (n, size), rows = sizes, len(indptr) - 1
    size = size if n else 1  # a block that is not there may have more elements than the kernel can count
    gathering, tile = kernel(gather_blocks, data.itemsize, element(indptr.dtype)), CombineBlocks.tile(n, size)
    gathering.start(
        max(most_ctas(n, tile), most_ctas(rows + 1, CombineBlocks.threads)), (*blocks, *uses),
        a=data.data.ptr, b=0, left=places, right=0, a_ptr=indptr.data.ptr, b_ptr=0, a_indices=indices.data.ptr,
        data=to[0], indices=to[1], indptr=to[2], nonzero=0, found=0, nonzeros=0, arrived=0, count=0, blocks=n,
        a_blocks=len(data), b_blocks=0, rows=rows, size=size, tile=tile, **(_AS_THEY_ARE | how),
    )  # fmt: skip


def expand(indptr: Array, n: int) -> Array:
    """Return the row of each of n entries of a compressed index."""
    rows = cupy.ndarray(n, indptr.dtype)
    if n:
        config = Expand(element(indptr.dtype))
        run(config, config.grid(n), (contiguous(indptr), rows, np.int64(len(indptr) - 1), np.int64(n)))
    return rows


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
    out = cupy.ndarray(groups * (R if places is None else C), dtype)
    if not len(out):
        return out
    if places is None:
        entries, layout = len(indices), {"side": R, "width": C, "line_step": C, "step": 1, "length": block_cols * C}
    else:
        entries, layout = len(places), {"side": C, "width": R, "line_step": 1, "step": C, "length": block_rows * R}
    mean = entries * layout["width"] // groups
    reduction = kernel(choose_reduction, op, data.dtype, dtype, mean, element(starts.dtype))
    reduction.start(
        reduction.kernel.grid(len(out)), (data, places, starts, out), data=data.data.ptr,
        places=0 if places is None else places.data.ptr, starts=starts.data.ptr, out=out.data.ptr, groups=groups,
        entries=entries, blocks=len(data), only_stored=only_stored, **layout,
    )  # fmt: skip
    return out


# --------------------------------------------------------------------------------------------- diagonals
def diagonal(blocks: Blocks, k: int, count: int, canonical: bool) -> Array:
    """Return the elements ``A[i, i + k]``."""
    out = cupy.ndarray(count, blocks.data.dtype)
    _start_diagonal("kElements", read(blocks), k, count, out, canonical=canonical)
    return out


def diagonal_blocks(blocks: Blocks, count: int, canonical: bool, turned: bool) -> tuple[Array, Array]:
    """Return blocks (i, i), and whether each is stored."""
    out, stored = (
        cupy.ndarray((count, *blocks.data.shape[1:]), blocks.data.dtype),
        cupy.ndarray(count, np.dtype(np.bool_)),
    )
    _start_diagonal("kBlocks", read(blocks), 0, out.size, out, stored, canonical=canonical, turned=turned)
    return out, stored


def set_diagonal(blocks: Blocks, k: int, values: Array, count: int) -> bool:
    """Write a diagonal into blocks that lie together; False if one of them is not stored."""
    if not blocks.data.flags.c_contiguous:
        return False
    stored, missing = read(blocks), cupy.zeros((), np.uint64)
    _start_diagonal("kFind", stored, k, count, missing)
    if int(missing):  # synchronize!
        return False
    _start_diagonal("kSet", stored, k, count, contiguous(values), single=values.ndim == 0)
    return True


_NO_FLAGS = {"canonical": False, "turned": False, "single": False}


def _start_diagonal(
    operation: str, blocks: Blocks, k: int, count: int, out: Array, stored: Array | None = None, **flags: bool
) -> None:
    """Start `diagonal`; for kFind `out` is the number of blocks that are missing. Flags are false unless given."""
    if not count:
        return
    (data, indices, indptr), index = blocks, element(blocks.indices.dtype)
    if operation in ("kElements", "kBlocks"):
        found = kernel(Diagonal.reading, operation, data.dtype, index)
    else:
        found = kernel(Diagonal.moving, operation, data.itemsize if operation == "kSet" else 1, index)
    n, R, C = data.shape
    finds = operation == "kFind"
    found.start(
        most_ctas(count, Diagonal.threads), (*blocks, out, stored), data=data.data.ptr, indices=indices.data.ptr,
        indptr=indptr.data.ptr, out=0 if finds else out.data.ptr, stored=0 if stored is None else stored.data.ptr,
        missing=out.data.ptr if finds else 0, rows=len(indptr) - 1, blocks=min(n, len(indices)), count=count,
        below=max(-k, 0), above=max(k, 0), R=R, C=C, **(_NO_FLAGS | flags),
    )  # fmt: skip
