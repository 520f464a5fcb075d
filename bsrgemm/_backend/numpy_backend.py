"""The CPU backend: NumPy arrays, SciPy's sparse classes, and SciPy's compiled loops where they avoid a sort."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import scipy.sparse
from scipy._lib._sparse import SparseABC
from scipy.sparse import _sparsetools

from ..dtypes import BFLOAT16, BOOL, HALF_DTYPES, HOST_DTYPES, accumulator_dtype
from . import dlpack, structure
from .base import Array, Backend, Blocks, Csr, ListMaker, PatternFacts
from .loops import HostLoops

#: Blocks of at most this many elements along an axis are reduced one element after the other.
SHORT = 12
#: Blocks of a block row are compared with each other first if they have this many elements.
_LARGE = 1024
#: Rows of at most this many elements are reduced column by column.
_SHORT = 16
#: The results of checks of index arrays with at most this many elements are remembered, for so many patterns.
_FEW, _PATTERNS = 2048, 128
#: Index arrays with at most this many elements are hashed faster than they are compared with the last ones.
_VERY_FEW = 128
#: The values with which index arrays were last found to be valid, and the number of block columns. The key is the
#: identity of the arrays, which others may have later; it is the values that decide.
_last_valid: dict[tuple[int, int], tuple[bytes, bytes, np.dtype[Any], int]] = {}


class NumpyBackend(Backend):
    """The backend for arrays in main memory."""

    name = "cpu"
    bring = "Bring it to the CPU with .get(), or the matrix to the GPU with A.to_device('cuda')."
    dtypes = HOST_DTYPES
    foreign_dtypes = tuple(d for d in HOST_DTYPES if d not in HALF_DTYPES)
    array_priority = 10.1
    loops = HostLoops()

    def __reduce__(self) -> str:
        """Copies and pickles are the one backend again."""
        return "HOST"

    @property
    def xp(self) -> ModuleType:
        return np

    @property
    def sparse(self) -> ModuleType:
        return scipy.sparse

    def bases(self, is_array: bool) -> tuple[type, ...]:
        return (SparseABC, scipy.sparse.sparray if is_array else scipy.sparse.spmatrix)

    def is_dense(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def is_sparse(self, x: Any) -> bool:
        return scipy.sparse.issparse(x)

    def adopt(self, x: Any, writes: bool = False) -> Array | None:
        if isinstance(x, np.ndarray):
            return x
        return dlpack.read(x, np.from_dlpack, writes=writes) if dlpack.device_kind(x) in dlpack.ON_HOST else None

    def from_host(self, x: np.ndarray[Any, Any]) -> Array:
        return x.copy()

    def to_host(self, x: Array) -> np.ndarray[Any, Any]:
        return np.array(x)

    def address(self, x: Array) -> int:
        return x.__array_interface__["data"][0]

    def device_of(self, x: Array) -> str:
        return "cpu"

    def expand(self, indptr: Array, n: int) -> Array:
        rows = np.arange(len(indptr) - 1, dtype=indptr.dtype)
        return np.repeat(rows, np.diff(indptr))[:n]

    def segment_reduce(self, op: str, values: Array, order: Array | None, starts: Array) -> Array:
        if not len(starts):
            return np.empty((0, *values.shape[1:]), values.dtype)
        if order is not None:
            order = order.astype(np.intp, copy=False)
        dtype = None
        if op == "add":
            op = "logical_or" if values.dtype == BOOL else "add"
            dtype = None if values.dtype == BOOL else accumulator_dtype(values.dtype)
        reduceat = getattr(np, op).reduceat
        width = math.prod(values.shape[1:])
        if values.ndim == 1 or width > _SHORT:
            values = values if order is None else values.take(order, axis=0)
            return reduceat(values, starts, axis=0, dtype=dtype).astype(values.dtype, copy=False)
        out = np.empty((len(starts), width), values.dtype)
        flat = values.reshape(len(values), width)
        for k in range(width):  # NumPy would call the function for each short row
            column = flat[:, k] if order is None else flat[:, k].take(order)
            out[:, k] = reduceat(column, starts, dtype=dtype)
        return out.reshape(len(starts), *values.shape[1:])

    def validated(self, blocks: Blocks, block_rows: int, block_cols: int) -> Blocks:
        data, indices, indptr = blocks
        sides = data.shape
        fit = len(sides) == 3 and indices.shape == (sides[0],) and indptr.shape == (block_rows + 1,)
        if not fit or not sides[1] or not sides[2]:
            R, C = sides[1:] if len(sides) == 3 else (1, 1)
            structure.check_arrays(data, indices, indptr, (block_rows * R, block_cols * C))
        if indices.dtype != indptr.dtype:
            index = np.result_type(indices.dtype, indptr.dtype)
            indices, indptr = indices.astype(index), indptr.astype(index)
        data, indices, indptr = np.ascontiguousarray(data), np.ascontiguousarray(indices), np.ascontiguousarray(indptr)
        if not _valid(indices, indptr, block_cols):
            structure.check_values(self, indices, indptr, block_cols)
            raise ValueError(f"indptr: last value {indptr[-1]} should be the number of blocks, {len(indices)}")
        if data is blocks[0] and indices is blocks[1] and indptr is blocks[2]:
            return blocks
        return Blocks(data, indices, indptr)

    def inspect(self, indices: Array, indptr: Array) -> PatternFacts:
        return structure.inspect(self, indices, indptr)

    # ------------------------------------------------- SciPy's compiled loops instead of sorts
    def is_sorted(self, indices: Array, indptr: Array, *, strictly: bool) -> bool:
        if strictly and len(indices) > 1 and indices.dtype == indptr.dtype:
            return bool(self.loops.is_canonical(indices, indptr))
        return structure.is_sorted(self, indices, indptr, strictly=strictly)

    def combine(
        self, op: Callable[[Any, Any], Any], a: Blocks, b: Blocks, block_cols: int, same: bool, zeros: bool = False
    ) -> Blocks:
        found = self.loops.combine(op.__name__, a, b, block_cols)
        return structure.combine(self, op, a, b, block_cols) if found is None else found

    def select_blocks(self, blocks: Blocks, keep: Array) -> Blocks:
        return structure.select_blocks(self, blocks, keep)

    def blocks_of_csr(
        self, csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int], canonical: Callable[[], bool]
    ) -> Blocks | None:
        return self.loops.blocks_of_csr(csr, shape, blocksize, canonical())

    def count_blocks(self, csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int]) -> int:
        return self.loops.count_blocks(csr, shape, blocksize)

    def put_blocks(self, blocks: Blocks, out: Array) -> None:
        structure.add_to_dense(self, blocks, out)

    def take_blocks(self, blocks: Blocks, X: Array) -> Array:
        (_, R, C), (M, N) = blocks.data.shape, X.shape
        tiles = X.reshape(M // R, R, N // C, C).transpose(0, 2, 1, 3)
        found: Array = tiles[self.expand(blocks.indptr, len(blocks.indices)), blocks.indices].reshape(-1)
        return found

    def by_column(self, indices: Array, indptr: Array, block_cols: int) -> tuple[Array, Array]:
        found: tuple[Array, Array] = self.loops.by_column(indices, indptr, block_cols)
        return found

    def reduce_lines(
        self,
        op: str,
        blocks: Blocks,
        by_column: ListMaker | None,
        block_cols: int,
        dtype: np.dtype[Any],
        only_stored: bool = False,
    ) -> Array:
        axis, data = 1 if by_column is None else 0, blocks.data
        if op in ("add", "count"):
            stored = data != 0 if op == "count" else data
            sums = self.loops.add_blocks(blocks._replace(data=stored.astype(dtype, copy=False)), block_cols, axis)
            if sums is None:
                return structure.reduce_lines(self, op, blocks, by_column, block_cols, dtype, only_stored)
            short = sums.shape[1 + axis] <= SHORT
            return (self.loops.fold(np.add, sums, 1 + axis) if short else sums.sum(axis=1 + axis)).reshape(-1)
        function, (_, R, C) = getattr(np, op), data.shape
        data = data.astype(np.float32) if data.dtype == BFLOAT16 else data
        order, begins = (None, blocks.indptr) if by_column is None else by_column()
        count = np.diff(begins)
        filled = np.flatnonzero(count > 0)
        if axis == 1 and R * C >= _LARGE:
            values = self._folded(op, self.loops.merge_rows(function, data, begins[filled]), 2)
        else:
            values = self.segment_reduce(op, self._folded(op, data, 1 + axis), order, begins[filled])
        if not only_stored:
            width, length = (C, block_cols * C) if axis == 1 else (R, (len(blocks.indptr) - 1) * R)
            partial = count[filled] * width < length
            with_zero = function(values, values.dtype.type(0))
            values = with_zero if partial.all() else np.where(partial[:, None], with_zero, values)
        if len(filled) < len(count):
            spread = np.zeros((len(count), R if axis == 1 else C), values.dtype)
            spread[filled] = values
            values = spread
        return values.reshape(-1).astype(dtype, copy=False)

    def _folded(self, op: str, data: Array, axis: int) -> Array:
        """Reduce one axis of the blocks to their extremes."""
        if data.shape[axis] <= SHORT:
            found: Array = self.loops.fold(getattr(np, op), data, axis)
            return found
        return structure.fold(self, op, data, axis)

    def to_coo(
        self, blocks: Blocks, block_cols: int, dtype: np.dtype[Any], copy: bool = False
    ) -> tuple[Array, Array, Array]:
        values = blocks.data.reshape(-1)
        return (values.copy() if copy else values, *self.loops.to_coo(blocks, dtype))

    def diagonal(self, blocks: Blocks, block_cols: int, k: int, count: int, canonical: bool) -> Array:
        (_, R, C), block_rows = blocks.data.shape, len(blocks.indptr) - 1
        found: Array | None = self.loops.diagonal(blocks, (block_rows * R, block_cols * C), k)
        if found is not None:
            return found
        if R != C:
            return structure.diagonal(self, blocks, block_cols, k, count, False)
        if not self.loops.is_canonical(blocks.indices, blocks.indptr):
            blocks = structure.sum_duplicates(self, blocks, block_cols)
        beside: Array = self.loops.diagonal_beside(blocks, (block_rows, block_cols), k)
        return beside[max(0, -k) :][:count]

    def diagonal_blocks(self, blocks: Blocks, count: int, canonical: bool, turned: bool) -> tuple[Array, Array]:
        data, indices, _ = blocks
        every = np.arange(count, dtype=indices.dtype)
        place = self.loops.unique_positions(blocks, max(count, 1), every, every) if count else None
        if place is None:
            return structure.diagonal_blocks(self, blocks, count, turned)
        stored, out = place >= 0, np.zeros((count, *data.shape[1:]), data.dtype)
        out[stored] = data[place[stored]]
        return (np.ascontiguousarray(out.transpose(0, 2, 1)) if turned else out), stored

    def set_diagonal(self, blocks: Blocks, block_cols: int, k: int, values: Array, count: int) -> bool:
        row, col = structure.diagonal_places(self, k, count)
        _, R, C = blocks.data.shape
        crossed = structure.first_of_runs(self, (row // R) * block_cols + col // C)
        at = self.loops.positions(blocks, block_cols, row[crossed] // R, col[crossed] // C)
        if bool((at < 0).any()):
            return False
        blocks.data[np.repeat(at, np.diff(crossed, append=count)), row % R, col % C] = values
        return True

    def transpose(self, blocks: Blocks, block_cols: int, by_column: Any = None) -> Blocks:
        data, indices, indptr = self.validated(blocks, len(blocks.indptr) - 1, block_cols)
        n, R, C = data.shape
        out = np.empty((n, C, R), data.dtype)
        new_indices, new_indptr = np.empty(n, indices.dtype), np.empty(block_cols + 1, indptr.dtype)
        _sparsetools.bsr_transpose(
            len(indptr) - 1,
            block_cols,
            R,
            C,
            indptr,
            indices,
            as_movable(data),
            new_indptr,
            new_indices,
            as_movable(out),
        )
        return Blocks(out, new_indices, new_indptr)

    def to_csr(self, blocks: Blocks, block_cols: int, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
        data, indices, indptr = self.validated(blocks, len(blocks.indptr) - 1, block_cols)
        (_, R, C), rows = data.shape, len(indptr) - 1
        values = np.empty(data.size, data.dtype)
        new_indices, new_indptr = np.empty(data.size, dtype), np.empty(rows * R + 1, dtype)
        indptr, indices = indptr.astype(dtype, copy=False), indices.astype(dtype, copy=False)
        _sparsetools.bsr_tocsr(
            rows, block_cols, R, C, indptr, indices, as_movable(data), new_indptr, new_indices, as_movable(values)
        )
        return values, new_indices, new_indptr


def _valid(indices: Array, indptr: Array, block_cols: int) -> bool:
    """Tell whether the indices are in range, and `indptr` climbs from 0 to their number."""
    count = len(indices) + len(indptr)
    if count > _FEW:
        return _in_order(indices, indptr, block_cols)
    values = indices.tobytes(), indptr.tobytes(), indices.dtype, block_cols
    if count <= _VERY_FEW:
        return _few_valid(*values)
    # The same arrays mostly have the same values again, and to compare these is faster than to hash them.
    key = id(indices), id(indptr)
    if _last_valid.get(key) == values:
        return True
    if not _few_valid(*values):
        return False
    if len(_last_valid) >= _PATTERNS:
        _last_valid.clear()
    _last_valid[key] = values
    return True


@functools.lru_cache(maxsize=_PATTERNS)
def _few_valid(indices: bytes, indptr: bytes, dtype: np.dtype[Any], block_cols: int) -> bool:
    """Answer for few indices, whose values are the key: a dictionary is faster than calls of NumPy."""
    return _in_order(np.frombuffer(indices, dtype), np.frombuffer(indptr, dtype), block_cols)


def _in_order(indices: Array, indptr: Array, block_cols: int) -> bool:
    unsigned = indices.view(f"u{indices.itemsize}")  # a negative index becomes a very large one
    in_range = not len(indices) or bool(unsigned.max() < block_cols)
    ends = indptr[0] == 0 and indptr[-1] == len(indices)
    return in_range and bool(ends) and not bool((indptr[1:] < indptr[:-1]).any())


def as_movable(x: Array) -> Array:
    """Return a flat view that SciPy's compiled loops can copy; 16-bit floats are viewed as integers of 16 bits."""
    return (x.view(np.uint16) if x.dtype in HALF_DTYPES else x).reshape(-1)


HOST = NumpyBackend()
