"""Pure functions over the arrays of a BSR matrix, ``(data, indices, indptr)``, and a `Backend`.

No function loops over rows in Python or uses a matrix class, and only `add_to_dense` writes to an argument. A line
marked ``# synchronize!`` waits for the GPU if the arrays are on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..dtypes import BFLOAT16, accumulator_dtype, result_dtype
from .base import Array, Backend, Blocks, Csr, ListMaker, PatternFacts

INT32_MAX = np.iinfo(np.int32).max
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


def index_dtype(maxval: int, *arrays: Array) -> np.dtype[Any]:
    """Return int32, or int64 if `maxval` does not fit into int32 or one of the index arrays is wider than 32 bits."""
    if maxval <= INT32_MAX:
        for a in arrays:
            if a.dtype.itemsize > 4:
                return _INT64
        return _INT32
    return _INT64


def block_keys(backend: Backend, indices: Array, indptr: Array, block_cols: int) -> Array:
    """Return one int64 per block that orders blocks by block row, then by block column."""
    rows = backend.expand(indptr, len(indices)).astype(np.int64, copy=False)
    return rows * max(block_cols, 1) + indices


def keys_to_index(
    backend: Backend, keys: Array, block_rows: int, block_cols: int, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Return (indices, indptr) of sorted, unique block keys; the inverse of `block_keys`."""
    xp = backend.xp
    bounds = xp.arange(block_rows + 1, dtype=np.int64) * max(block_cols, 1)
    indptr = xp.searchsorted(keys, bounds).astype(dtype, copy=False)
    return (keys % max(block_cols, 1)).astype(dtype, copy=False), indptr


def first_of_runs(backend: Backend, keys: Array) -> Array:
    """Return the positions at which a run of equal keys starts."""
    xp = backend.xp
    if not len(keys):
        return xp.zeros(0, np.int64)
    starts = xp.ones(len(keys), np.bool_)
    xp.not_equal(keys[1:], keys[:-1], out=starts[1:])
    return backend.flatnonzero(starts)  # synchronize!


# ---------------------------------------------------------------------------- order and duplicates
def is_sorted(backend: Backend, indices: Array, indptr: Array, *, strictly: bool) -> bool:
    """Tell whether the column indices of each row are in order; `strictly` also excludes duplicates."""
    if len(indices) < 2:
        return True
    rows = backend.expand(indptr, len(indices))
    bad = indices[1:] <= indices[:-1] if strictly else indices[1:] < indices[:-1]
    return not bool((bad & (rows[1:] == rows[:-1])).any())  # synchronize!


def has_duplicates(backend: Backend, indices: Array, indptr: Array, block_cols: int) -> bool:
    """Tell whether any block is stored more than once."""
    keys = backend.xp.sort(block_keys(backend, indices, indptr, block_cols))
    return bool((keys[1:] == keys[:-1]).any())  # synchronize!


def sort_blocks(backend: Backend, blocks: Blocks, block_cols: int) -> Blocks:
    """Sort the blocks of each row by column; duplicates keep their order."""
    order = backend.xp.argsort(block_keys(backend, blocks.indices, blocks.indptr, block_cols), kind="stable")
    return Blocks(blocks.data[order], blocks.indices[order], blocks.indptr)


def sum_duplicates(backend: Backend, blocks: Blocks, block_cols: int) -> Blocks:
    """Sort the blocks and add up blocks at the same position, in the order in which they are stored."""
    data, indices, indptr = blocks
    xp = backend.xp
    keys = block_keys(backend, indices, indptr, block_cols)
    order = xp.argsort(keys, kind="stable")
    keys = keys[order]
    starts = first_of_runs(backend, keys)
    summed = backend.segment_reduce("add", data, order, starts)
    return Blocks(summed, *keys_to_index(backend, keys[starts], len(indptr) - 1, block_cols, indices.dtype))


def select_blocks(backend: Backend, blocks: Blocks, keep: Array) -> Blocks:
    """Return the blocks for which a vector is not zero."""
    xp = backend.xp
    keep = keep if keep.dtype == np.bool_ else keep != 0
    kept = xp.flatnonzero(keep)  # synchronize!
    before = xp.concatenate([xp.zeros(1, np.int64), xp.cumsum(keep, dtype=np.int64)])
    indptr = before[blocks.indptr].astype(blocks.indptr.dtype, copy=False)
    return Blocks(blocks.data[kept], blocks.indices[kept], indptr)


def nonzero_blocks(backend: Backend, data: Array) -> Array:
    """Tell for each block whether it has an element other than zero; NaN counts as one."""
    return (data != 0).any(axis=(1, 2))


# -------------------------------------------------------------------------------- transpose, slices
# ---------------------------------------------------------------------------- rows and columns
def by_column(backend: Backend, indices: Array, block_cols: int) -> tuple[Array, Array]:
    """Return the positions of the blocks sorted by block column, and where each block column begins among them."""
    xp = backend.xp
    order = xp.argsort(indices, kind="stable")
    return order, xp.searchsorted(indices[order], xp.arange(block_cols + 1, dtype=indices.dtype))


def reduce_lines(
    backend: Backend,
    op: str,
    blocks: Blocks,
    by_column: ListMaker | None,
    block_cols: int,
    dtype: np.dtype[Any],
    only_stored: bool = False,
) -> Array:
    """Reduce the elements of each row, or of each column if `by_column` makes the list of their blocks."""
    xp, axis = backend.xp, 1 if by_column is None else 0
    data = blocks.data.astype(np.float32) if blocks.data.dtype == BFLOAT16 else blocks.data
    acc = accumulator_dtype(dtype) if op in ("add", "count") else data.dtype
    if op == "count":
        within = (data != 0).sum(axis=1 + axis, dtype=acc)
    elif op == "add":
        within = data.sum(axis=1 + axis, dtype=acc)
    else:
        within = fold(backend, op, data, 1 + axis)
    order, begins = (None, blocks.indptr) if by_column is None else by_column()
    count = xp.diff(begins)
    filled = xp.flatnonzero(count > 0)  # synchronize!
    values = backend.segment_reduce("add" if op == "count" else op, within, order, begins[filled])
    side, width = data.shape[2 - axis], data.shape[1 + axis]
    if op not in ("add", "count") and not only_stored:
        length = block_cols * width if axis == 1 else (len(blocks.indptr) - 1) * width
        with_zero = getattr(xp, op)(values, values.dtype.type(0))
        values = xp.where((count[filled] * width < length)[:, None], with_zero, values)
    out = xp.zeros((len(count), side), values.dtype)
    out[filled] = values
    return out.reshape(-1).astype(dtype, copy=False)


def fold(backend: Backend, op: str, data: Array, axis: int) -> Array:
    """Reduce one axis of the blocks with ``maximum``, ``minimum``, ``fmax`` or ``fmin``."""
    if op in ("maximum", "minimum"):
        return getattr(data, op[:3])(axis=axis)
    values = data if axis == 2 else data.swapaxes(1, 2)
    best, function = values[..., 0], getattr(backend.xp, op)
    for k in range(1, values.shape[-1]):  # numpy.nanmax warns if all values are NaN
        best = function(best, values[..., k])
    return best


# ----------------------------------------------------------------------------------- diagonals
def diagonal(backend: Backend, blocks: Blocks, block_cols: int, k: int, count: int, canonical: bool) -> Array:
    """Return the `count` elements ``A[i, i + k]`` that lie in the matrix."""
    if not canonical and not backend.is_sorted(blocks.indices, blocks.indptr, strictly=True):
        blocks = sum_duplicates(backend, blocks, block_cols)
    data, indices, indptr = blocks
    xp, (_, R, C) = backend.xp, data.shape
    out = xp.zeros(count, data.dtype)
    rows = backend.expand(indptr, len(indices)).astype(np.int64, copy=False)
    shift = indices.astype(np.int64, copy=False) * C - rows * R
    crossing = xp.flatnonzero((shift - (R - 1) <= k) & (k <= shift + C - 1))  # synchronize!
    r, c = xp.arange(R)[:, None], xp.arange(C)
    on = shift[crossing][:, None, None] + (c - r) == k
    place = xp.broadcast_to(rows[crossing][:, None, None] * R + r, on.shape) + min(k, 0)
    out[place[on]] = data[crossing][on]  # synchronize!
    return out


def diagonal_blocks(backend: Backend, blocks: Blocks, count: int, turned: bool) -> tuple[Array, Array]:
    """Return blocks (i, i), transposed if `turned`, and whether each is stored."""
    (data, indices, indptr), xp = blocks, backend.xp
    rows = backend.expand(indptr, len(indices))
    on = xp.flatnonzero(rows == indices)  # synchronize!
    rows = rows[on]
    starts = first_of_runs(backend, rows)
    rows = rows[starts]
    out, stored = xp.zeros((count, *data.shape[1:]), data.dtype), xp.zeros(count, np.bool_)
    out[rows] = backend.segment_reduce("add", data, on, starts)
    stored[rows] = True
    return (xp.ascontiguousarray(out.transpose(0, 2, 1)) if turned else out), stored


def diagonal_places(backend: Backend, k: int, count: int) -> tuple[Array, Array]:
    """Return the rows and the columns of the first `count` elements of a diagonal."""
    step = backend.xp.arange(count, dtype=np.int64)
    return step - min(k, 0), step + max(k, 0)


# ------------------------------------------------------------------------------- other formats
def csr_of_coo(backend: Backend, row: Array, col: Array, values: Array, shape: tuple[int, int], *, unique: bool) -> Csr:
    """Return elements by rows, in order; those at the same position are added up in order, unless all are `unique`."""
    xp = backend.xp
    keys = row.astype(np.int64, copy=False) * max(shape[1], 1) + col
    if not backend.is_sorted(keys, xp.asarray(np.array([0, len(keys)])), strictly=True):  # synchronize!
        order = xp.argsort(keys, kind="stable")
        keys = keys[order]
        if unique:
            values = values[order]
        else:
            starts = first_of_runs(backend, keys)
            keys, values = keys[starts], backend.segment_reduce("add", values, order, starts)
    index = index_dtype(max(*shape, len(row)), row, col)
    return Csr(values, *keys_to_index(backend, keys, *shape, index))


def from_coo(
    backend: Backend,
    row: Array,
    col: Array,
    values: Array,
    shape: tuple[int, int],
    blocksize: tuple[int, int],
    dtype: np.dtype[Any],
    *,
    unique: bool = False,
) -> Blocks:
    """Return the blocks of the elements ``(row, col, value)``; elements at the same position are added up in order.

    With `unique` the caller promises that no two elements have the same position, which saves a sort of all elements.
    """
    xp = backend.xp
    (M, N), (R, C) = shape, blocksize
    block_rows, block_cols = M // R, N // C
    row, col = row.astype(np.int64, copy=False), col.astype(np.int64, copy=False)
    if not unique and len(row) > 1:
        element = row * N + col
        if not bool((element[1:] > element[:-1]).all()):  # synchronize!
            order = xp.argsort(element, kind="stable")
            starts = first_of_runs(backend, element[order])
            values = backend.segment_reduce("add", values, order, starts)
            kept = order[starts]
            row, col = row[kept], col[kept]
    block = (row // R) * max(block_cols, 1) + col // C
    # Neighbouring elements mostly belong to the same block, so runs of them are sorted instead of single elements.
    keys = xp.sort(block[first_of_runs(backend, block)])
    keys = keys[first_of_runs(backend, keys)]
    place = xp.searchsorted(keys, block) * (R * C) + (row % R) * C + col % C
    data = xp.zeros(len(keys) * R * C, values.dtype)
    data[place] = values
    return Blocks(data.reshape(-1, R, C), *keys_to_index(backend, keys, block_rows, block_cols, dtype))


def from_dense(
    backend: Backend, X: Array, blocksize: tuple[int, int], dtype: np.dtype[Any], keep: Array | None = None
) -> Blocks:
    """Return the blocks of a dense array for which `keep` (block_rows, block_cols) is true.

    By default these are the blocks with an element other than zero.
    """
    xp = backend.xp
    (M, N), (R, C) = X.shape, blocksize
    tiles = X.reshape(M // R, R, N // C, C).transpose(0, 2, 1, 3)
    if keep is None:
        keep = (tiles != 0).any(axis=(2, 3))
    keys = backend.flatnonzero(keep)  # synchronize!
    i = keys // max(N // C, 1)
    data = xp.ascontiguousarray(tiles[i, keys - i * (N // C)])
    return Blocks(data, *keys_to_index(backend, keys, M // R, N // C, dtype))


def add_to_dense(backend: Backend, blocks: Blocks, out: Array) -> None:
    """Write the blocks, which must have no duplicates, to their positions in `out`, which may have any strides."""
    data, indices, indptr = blocks
    (M, N), (R, C) = out.shape, data.shape[1:]
    if not len(data):
        return
    tiles = out.reshape(M // R, R, N // C, C).transpose(0, 2, 1, 3)
    tiles[backend.expand(indptr, len(indices)), indices] = data


# ------------------------------------------------------------------------------- element-wise
def align(backend: Backend, a: Blocks, b: Blocks, block_cols: int) -> tuple[Array, Array, Array, Array]:
    """Return two matrices on the union of their patterns: (data_a, data_b, indices, indptr).

    Neither matrix may have duplicates. A block that one of them does not store is zero there.
    """
    xp = backend.xp
    key_a = block_keys(backend, a.indices, a.indptr, block_cols)
    key_b = block_keys(backend, b.indices, b.indptr, block_cols)
    keys = xp.sort(xp.concatenate([key_a, key_b]))
    keys = keys[first_of_runs(backend, keys)]
    spread = []
    for key, data in ((key_a, a.data), (key_b, b.data)):
        wide = xp.zeros((len(keys), *data.shape[1:]), data.dtype)
        wide[xp.searchsorted(keys, key)] = data
        spread.append(wide)
    dtype = index_dtype(len(keys), a.indices, b.indices)
    return (*spread, *keys_to_index(backend, keys, len(a.indptr) - 1, block_cols, dtype))


def combine(backend: Backend, op: Callable[[Array, Array], Array], a: Blocks, b: Blocks, block_cols: int) -> Blocks:
    """Return ``op(a, b)`` on the union of two patterns, without blocks in which all elements are zero."""
    left, right, indices, indptr = align(backend, a, b, block_cols)
    if BFLOAT16 in (left.dtype, right.dtype) and left.dtype != right.dtype:  # NumPy promotes all others by itself
        dtype = result_dtype(left.dtype, right.dtype)
        left, right = left.astype(dtype), right.astype(dtype)
    data = op(left, right)
    return select_blocks(backend, Blocks(data, indices, indptr), nonzero_blocks(backend, data))


# -------------------------------------------------------------------------------------- checks
def way_to_divide(shape: tuple[int, int], blocksize: tuple[int, int]) -> str:
    """Say what to do where a block size does not divide a shape.

    >>> way_to_divide((10, 12), (4, 4))
    'Take blocks of (2, 4), which divide it, or pad the matrix with zeros to (12, 12).'
    """
    smaller, padded = [], []
    for n, b in zip(shape, blocksize, strict=True):
        smaller.append(next(d for d in range(min(b, n) or 1, 0, -1) if n % d == 0))
        padded.append(-(-n // b) * b)
    return f"Take blocks of {tuple(smaller)}, which divide it, or pad the matrix with zeros to {tuple(padded)}."


def way_to_slice(start: int, stop: int, step: int, block: int, side: int) -> str:
    """Say what to do where a slice of `side` rows or columns does not lie on the boundaries of blocks.

    >>> way_to_slice(3, 8, 1, 4, 12)
    '; slice 0:8, or use A.tocsr()[3:8] for single rows and columns'
    """
    asked = f"{start}:{stop}" if step == 1 else f"{start}:{stop}:{step}"
    whole = f"slice {start // block * block}:{min(-(-stop // block) * block, side)}, or " if step == 1 else ""
    return f"; {whole}use A.tocsr()[{asked}] for single rows and columns"


def check_arrays(data: Array, indices: Array, indptr: Array, shape: tuple[int, int]) -> None:
    """Raise ValueError unless the sizes of the three arrays fit each other and `shape`; no value is read."""
    if data.ndim != 3:
        raise ValueError(f"data: BSR data must be 3-dimensional (blocks, R, C), got shape={tuple(data.shape)}")
    if indices.ndim != 1 or indptr.ndim != 1:
        raise ValueError(f"indices and indptr should be 1-D, got {indices.ndim}-D indices and {indptr.ndim}-D indptr")
    (M, N), (R, C) = shape, data.shape[1:]
    if not R or not C:
        raise ValueError(f"data: a block must hold at least one element, got blocksize={(R, C)}")
    if M % R or N % C:
        raise ValueError(
            f"shape must be multiple of blocksize, got shape={shape} and blocksize={(R, C)}. "
            f"{way_to_divide(shape, (R, C))}"
        )
    if len(indptr) != M // R + 1:
        raise ValueError(
            f"indptr: index pointer size {len(indptr)} should be {M // R + 1}: "
            f"one more than the {M // R} block rows of shape={shape}"
        )
    if len(indices) != len(data):
        raise ValueError(
            f"indices and data should have the same size, got {len(indices)} indices and {len(data)} blocks"
        )


def inspect(backend: Backend, indices: Array, indptr: Array) -> PatternFacts:
    """Return what tells whether index arrays are valid: five values, which are copied to the host together."""
    xp = backend.xp
    edge = xp.zeros(1, np.int64)
    # A difference could overflow, and pass for a rise.
    fall = (indptr[1:] < indptr[:-1]).any() if len(indptr) > 1 else edge[0]
    used = indices[: len(indices)]
    low, high = (used.min(), used.max()) if len(used) else (edge[0], edge[0])
    parts = [xp.asarray(v).astype(np.int64).reshape(1) for v in (indptr[0], indptr[-1], fall, low, high)]
    start, stop, fall, low, high = (int(v) for v in backend.to_host(xp.concatenate(parts)))  # synchronize!
    return PatternFacts(start, stop, bool(fall), low, high)


def check_values(backend: Backend, indices: Array, indptr: Array, block_cols: int, what: str = "column") -> int:
    """Return the number of blocks; raise ValueError unless the index arrays are valid. See `checked`."""
    return checked(backend, indices, indptr, block_cols, what).stop


def checked(backend: Backend, indices: Array, indptr: Array, block_cols: int, what: str = "column") -> PatternFacts:
    """Return what is known of index arrays; raise ValueError unless they are valid.

    `indptr` must start at 0, never decrease and end at or before the end of `indices`; `indices` must be in range.
    Messages call the indices `what`. Waits for the GPU once.
    """
    facts = backend.inspect(indices, indptr)
    if facts.start != 0:
        raise ValueError(f"indptr: index pointer should start with 0, got {facts.start}")
    if facts.falls:
        raise ValueError("indptr: index pointer values must form a non-decreasing sequence")
    count = len(indices)
    if facts.stop > count:
        raise ValueError(f"indptr: last value {facts.stop} should be at most the size of indices and data, {count}")
    if count and facts.high >= block_cols:
        raise ValueError(f"indices: {what} index values must be < {block_cols} (now max {facts.high})")
    if count and facts.low < 0:
        raise ValueError(f"indices: {what} index values must be >= 0 (now min {facts.low})")
    return facts
