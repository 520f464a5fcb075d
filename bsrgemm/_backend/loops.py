"""SciPy's compiled loops over the arrays of matrices on the CPU, where array functions of NumPy would be slower.

Each function returns what the generic code over `structure` returns, or None if no loop supports the dtype. The index
arrays are valid: `NumpyBackend.validated` has checked them.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, ClassVar

import numpy as np
from scipy.sparse import _sparsetools

from ..dtypes import BOOL, HALF_DTYPES
from .base import Array, Blocks, Csr

INT32_MAX = np.iinfo(np.int32).max
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
#: Elements that are processed at a time where several passes are made over them: they stay in the cache.
_CHUNK = 1 << 17
#: Blocks that are added up at a time.
_PIECE = 1 << 16
#: Rows or columns for which memory is allocated in any case, however few elements there are.
_LEAST_LINES = 1 << 20
#: Indices from this number on are compared by NumPy.
_MANY = 1 << 14
#: Blocks of fewer lines than this are reduced line by line.
_FEW_LINES = 8
#: Rows of blocks from this many elements on are added to a dense array faster by the row than by the element.
_LONG_ROW = 8
#: Where the elements of a matrix lie in a dense array is remembered for matrices of at most this many elements.
_TINY = 1024


class HostLoops:
    """The loops for arrays of NumPy."""

    #: Blocks of at most this many elements are added to a dense array of zeros faster than NumPy copies them there.
    small_block = 64

    #: For each operation, SciPy's loop and the dtype of the result; None is that of the operands.
    _COMBINED: ClassVar[dict[str, tuple[str, Any]]] = {
        "add": ("plus", None),
        "sub": ("minus", None),
        "mul": ("elmul", None),
        "maximum": ("maximum", None),
        "minimum": ("minimum", None),
        "ne": ("ne", BOOL),
        "lt": ("lt", BOOL),
        "gt": ("gt", BOOL),
    }

    def combine(self, op: str, a: Blocks, b: Blocks, block_cols: int) -> Blocks | None:
        """Return ``op(a, b)`` on the union of two patterns, without blocks in which all elements are zero.

        Both matrices are in canonical format.
        """
        loop, result = self._COMBINED.get(op, (None, None))
        if loop is None or not {a.data.dtype, b.data.dtype}.isdisjoint(_NO_ARITHMETIC):
            return None
        dtype = np.result_type(a.data.dtype, b.data.dtype)
        if op in ("maximum", "minimum") and not (_without_nan(a.data) and _without_nan(b.data)):
            return None  # SciPy's loops lose NaN, which NumPy keeps
        count, rows = len(a.data) + len(b.data), len(a.indptr) - 1
        R, C = a.data.shape[1:]
        index = _index(count, a.indices, b.indices)
        indptr, indices = np.empty(rows + 1, index), np.empty(count, index)
        data = np.empty((count, R, C), result or dtype)
        operands = [
            x for m in (a, b) for x in (*_as(index, m.indptr, m.indices), m.data.astype(dtype, copy=False).reshape(-1))
        ]
        getattr(_sparsetools, f"bsr_{loop}_bsr")(
            rows, block_cols, R, C, *operands, indptr, indices, data.reshape(-1)
        )  # fmt: skip
        used = int(indptr[-1])
        if used < count // 2:  # do not hold memory that is not used
            return Blocks(data[:used].copy(), indices[:used].copy(), indptr)
        return Blocks(data[:used], indices[:used], indptr)

    # ------------------------------------------------------------------------------------ reductions
    def add_blocks(self, blocks: Blocks, block_cols: int, axis: int) -> Array | None:
        """Return the sums of the blocks of each block row (axis 1) or block column (axis 0): shape (lines, R, C)."""
        data, indices, indptr = blocks
        n, R, C = data.shape
        lines = len(indptr) - 1 if axis == 1 else block_cols
        if data.dtype in _NO_ARITHMETIC or lines > _LEAST_LINES + 4 * n:  # most lines are empty
            return None
        out = np.zeros((lines, R, C), data.dtype)
        values, sums = real_parts(np.ascontiguousarray(data)), real_parts(out)
        width = R * values.shape[2]
        if axis == 0:
            each = np.arange(n + 1, dtype=indices.dtype)
            factors = np.ones(n, values.dtype)
            _sparsetools.csc_matvecs(block_cols, n, width, each, indices, factors, values, sums)
            return out
        cuts, most = [0, lines], n
        if n > _PIECE:  # the factors and the numbers of the blocks stay in the cache
            cuts = np.unique(np.searchsorted(indptr, np.arange(0, n + _PIECE, _PIECE), side="right") - 1).tolist()
            most = int(np.diff(indptr[cuts]).max())
        each, factors = np.arange(most, dtype=indptr.dtype), np.ones(most, values.dtype)
        for first, last in itertools.pairwise(cuts):
            starts = indptr[first : last + 1]
            some = values[starts[0] : starts[-1]]
            starts = starts - starts[0] if first else starts
            _sparsetools.csr_matvecs(
                last - first, len(some), width, starts, each, factors, some, sums[first:last]
            )  # fmt: skip
        return out

    def fold(self, op: Any, data: Array, axis: int) -> Array:
        """Reduce one of the two axes of small blocks with a function of two arrays: ``op.reduce(data, axis=axis)``.

        NumPy's own reduction calls the function for each of the short rows.
        """
        values = data if axis == 2 else data.swapaxes(1, 2)
        n, lines, length = values.shape
        if length == 1:
            return values[:, :, 0]
        few = axis == 1 and lines < _FEW_LINES
        out = np.empty((lines, n), data.dtype).T if few else np.empty((n, lines), data.dtype)
        step = max(1, _CHUNK // max(1, lines * length))
        for first in range(0, n, step):
            some, here = values[first : first + step], out[first : first + step]
            # The function runs along the blocks, which are many, where the lines of a block are few.
            for line in range(lines) if few else (slice(None),):
                to = here[:, line]
                op(some[:, line, 0], some[:, line, 1], out=to)
                for k in range(2, length):
                    op(to, some[:, line, k], out=to)
        return out

    def merge_rows(self, op: Any, data: Array, starts: Array) -> Array:
        """Reduce the large blocks of each block row, which begin at `starts`, to one block; no row is empty."""
        out = np.empty((len(starts), *data.shape[1:]), data.dtype)
        bounds = [*starts.tolist(), len(data)]
        for k, to in enumerate(out):
            op.reduce(data[bounds[k] : bounds[k + 1]], axis=0, out=to)
        return out

    def by_column(self, indices: Array, indptr: Array, block_cols: int) -> tuple[Array, Array]:
        """Return the positions of the blocks sorted by block column, and where each block column begins among them."""
        n = len(indices)
        order, rows = np.empty(n, indices.dtype), np.empty(n, indices.dtype)
        begins = np.empty(block_cols + 1, indptr.dtype)
        positions = np.arange(n, dtype=indices.dtype)
        _sparsetools.csr_tocsc(len(indptr) - 1, block_cols, indptr, indices, positions, begins, rows, order)
        return order, begins

    def positions(self, blocks: Blocks, block_cols: int, row: Array, col: Array) -> Array:
        """Return the position of each block (row, col) in a matrix in canonical format; -1 if it is not stored."""
        return self._sampled(blocks, block_cols, row, col)[0]

    def unique_positions(self, blocks: Blocks, block_cols: int, row: Array, col: Array) -> Array | None:
        """Return the same for any matrix, or None if one of these blocks is stored twice."""
        found, twice = self._sampled(blocks, block_cols, row, col)
        return None if twice else found

    def _sampled(self, blocks: Blocks, block_cols: int, row: Array, col: Array) -> tuple[Array, bool]:
        rows, n = len(blocks.indptr) - 1, len(row)
        index = _index(max(n, rows, block_cols), blocks.indices)
        found = np.full(n, -1, index)
        arrays = _as(index, blocks.indptr, blocks.indices, row, col)
        twice = _sparsetools.csr_sample_offsets(rows, block_cols, *arrays[:2], n, *arrays[2:], found)
        return found, bool(twice)

    def add_at(self, data: Array, blocks: Array, position: Array) -> bool:
        """Compute ``data[position[k]] += blocks[k]`` for each k in order; False if no loop supports the arrays."""
        if data.dtype in _NO_ARITHMETIC or not (data.flags.c_contiguous and data.flags.writeable):
            return False
        if blocks.dtype != data.dtype:  # the loop reads both by the same number of words
            return False
        n, index = len(blocks), _index(len(blocks), position)
        each, position = np.arange(n + 1, dtype=index), np.ascontiguousarray(position, index)
        values, sums = real_parts(np.ascontiguousarray(blocks)), real_parts(data)
        factors, width = np.ones(n, values.dtype), sums[0].size
        _sparsetools.csc_matvecs(
            len(data), n, width, each, position, factors, values.reshape(-1), sums.reshape(-1)
        )  # fmt: skip
        return True

    def diagonal(self, blocks: Blocks, shape: tuple[int, int], k: int) -> Array | None:
        """Return the diagonal ``A[i, i + k]``, which lies in the matrix; None if no loop supports the dtype or k.

        SciPy's loop takes k as a number of the dtype of the indices.
        """
        data, indices, indptr = blocks
        (M, N), (_, R, C) = shape, data.shape
        if data.dtype in _NO_ARITHMETIC or M > INT32_MAX or N > INT32_MAX:
            return None
        out = np.zeros(min(M, N - k) if k > 0 else min(M + k, N), data.dtype)
        if not out.size:  # SciPy's loop would read the bounds of a block row of a matrix without rows
            return out
        _sparsetools.bsr_diagonal(k, M // R, N // C, R, C, indptr, indices, data, out)
        return out

    def diagonal_beside(self, blocks: Blocks, block_shape: tuple[int, int], k: int) -> Array:
        """Return ``A[r, r + k]`` for all rows r of a matrix with square blocks in canonical format, 0 outside of it.

        A block row meets the diagonal in two blocks at most, and in all block rows at the same place of a block.
        """
        data, (rows, cols) = blocks.data, block_shape
        side = data.shape[1]
        out = np.zeros((rows, side), data.dtype)
        first, below = divmod(k, side)
        for away, shift in ((first, below), (first + 1, below - side)):
            low, high = max(0, -away), min(rows, cols - away)
            if low >= high or abs(shift) == side:
                continue
            row = np.arange(low, high)
            at = self.positions(blocks, cols, row, row + away)
            stored = np.flatnonzero(at >= 0)
            values = data.diagonal(shift, axis1=1, axis2=2)[at[stored]]
            begin = max(0, -shift)
            out[low + stored, begin : begin + values.shape[1]] = values
        return out.reshape(-1)

    def is_canonical(self, indices: Array, indptr: Array) -> bool:
        """Tell whether the columns of each row are in order, without duplicates."""
        if len(indices) < _MANY:
            return bool(_sparsetools.csr_has_canonical_format(len(indptr) - 1, indptr, indices))
        rising = indices[1:] > indices[:-1]
        begins = indptr[1:-1].astype(np.intp)
        begins = begins[(begins > 0) & (begins < len(indices))] if len(begins) else begins
        if len(begins):  # of rows that are empty, the one that follows begins at the same place
            begins = begins[np.append(True, begins[1:] > begins[:-1])]
        falls = len(rising) - int(np.count_nonzero(rising))
        return falls == len(begins) - int(np.count_nonzero(rising.take(begins - 1)))

    def without_zeros(self, csr: Csr, columns: int) -> Csr:
        """Return a matrix in CSR without elements that are zero; its arrays are overwritten."""
        data, indices, indptr = csr
        _sparsetools.csr_eliminate_zeros(len(indptr) - 1, columns, indptr, indices, data)
        used = int(indptr[-1])
        if used < len(data) // 2:  # do not hold memory that is not used
            return Csr(data[:used].copy(), indices[:used].copy(), indptr)
        return Csr(data[:used], indices[:used], indptr)

    # -------------------------------------------------------------------------------------- formats
    def to_coo(self, blocks: Blocks, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        """Return (row, col) of every stored element, in the order of `data`."""
        data, indices, indptr = blocks
        _, R, C = data.shape
        rows = np.repeat(np.arange(0, (len(indptr) - 1) * R, R, dtype=dtype), np.diff(indptr))
        within_row = np.repeat(np.arange(R, dtype=dtype), C)
        within_col = np.tile(np.arange(C, dtype=dtype), R)
        return _spread(rows, within_row), _spread(indices.astype(dtype, copy=False) * dtype.type(C), within_col)

    def fits(self, shape: tuple[int, int], elements: int) -> bool:
        """Tell whether the loops over a matrix in CSR need little memory: they have a word for each column."""
        return max(shape) <= _LEAST_LINES + 16 * elements

    def add_to_dense(self, blocks: Blocks, out: Array, zero: bool = False) -> bool:
        """Add blocks to a dense array, which is `zero` or not; False for strides or dtypes that no loop supports."""
        data, indices, indptr = blocks
        (M, N), (_, R, C) = out.shape, data.shape
        if not out.flags.c_contiguous or data.dtype in _HALF or data.dtype != out.dtype:
            return False
        if C >= _LONG_ROW:
            self._add_rows_to_dense(blocks, out)
            return True
        n, index = data.size, indices.dtype
        if n <= _TINY and indptr.dtype == index:
            places = _places_in_dense(indices.tobytes(), indptr.tobytes(), index, R, C, N)
            if places is not None:
                if zero:
                    out.put(places, data)
                    np.add(out, out.dtype.type(0), out=out)  # -0 becomes 0, as in a sum
                else:
                    flat = out.reshape(-1)
                    flat[places] += data.reshape(-1)
                return True
        if index != _INT32 or indptr.dtype != _INT32 or n > INT32_MAX or N > INT32_MAX:
            index = _index(max(n, N), indices, indptr)
            indptr, indices = _as(index, indptr, indices)
        values, columns, starts = np.empty(n, data.dtype), np.empty(n, index), np.empty(M + 1, index)
        _sparsetools.bsr_tocsr(M // R, N // C, R, C, indptr, indices, data, starts, columns, values)
        _sparsetools.csr_todense(M, N, starts, columns, values, out)
        return True

    def _add_rows_to_dense(self, blocks: Blocks, out: Array) -> None:
        """Add the rows of blocks, each of which is contiguous in the dense array too."""
        data, indices, indptr = blocks
        n, R, C = data.shape
        block_cols = out.shape[1] // C
        index = _index(max(out.size // C, n * R), indices)
        first = np.repeat(np.arange(0, len(indptr) - 1) * (R * block_cols), np.diff(indptr)) + indices
        target = (first[:, None] + np.arange(R) * block_cols).astype(index, copy=False)
        values, sums = real_parts(np.ascontiguousarray(data)), real_parts(out)
        each, factors = np.arange(n * R + 1, dtype=index), np.ones(n * R, values.dtype)
        _sparsetools.csc_matvecs(out.size // C, n * R, values.shape[2], each, target, factors, values, sums)

    def csr_of_coo(self, row: Array, col: Array, values: Array, shape: tuple[int, int]) -> Csr:
        """Return elements by rows, in the order in which they are given within a row; duplicates are kept."""
        index = _index(max(*shape, len(values)), row, col)
        n = len(values)
        indptr, indices, data = np.empty(shape[0] + 1, index), np.empty(n, index), np.empty(n, values.dtype)
        _sparsetools.coo_tocsr(*shape, n, *_as(index, row, col), _movable(values), indptr, indices, _movable(data))
        return Csr(data, indices, indptr)

    def blocks_of_csr(
        self, csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int], unique: bool
    ) -> Blocks | None:
        """Return the blocks of a matrix in CSR, in canonical format; duplicates are added up in order.

        With `unique` the caller promises that there are no duplicates.
        """
        values = csr.data
        if values.dtype in HALF_DTYPES and not unique:
            return None
        (M, N), (R, C) = shape, blocksize
        index = _index(max(*shape, len(values)), csr.indices, csr.indptr)
        indptr, indices = _as(index, csr.indptr, csr.indices)
        count = self.count_blocks(Csr(values, indices, indptr), shape, blocksize)
        new_indptr, new_indices = np.empty(M // R + 1, index), np.empty(count, index)
        data = np.zeros((count, R, C), values.dtype)
        _sparsetools.csr_tobsr(
            M, N, R, C, indptr, indices, _movable(values), new_indptr, new_indices, _movable(data)
        )  # fmt: skip
        if not self.is_canonical(new_indices, new_indptr):
            ordered = np.empty(count, index)
            ordered[...] = np.arange(count)
            sorted_indices = new_indices.copy()
            _sparsetools.csr_sort_indices(M // R, new_indptr, sorted_indices, ordered)
            new_indices, data = sorted_indices, data[ordered]
        return Blocks(data, new_indices, new_indptr)

    def count_blocks(self, csr: Csr, shape: tuple[int, int], blocksize: tuple[int, int]) -> int:
        """Return the number of blocks that have an element of a matrix in CSR; see `fits`."""
        return int(_sparsetools.csr_count_blocks(*shape, *blocksize, csr.indptr, csr.indices))


#: SciPy's loops have no 16-bit floats, and they add booleans where NumPy refuses some operations.
_HALF = frozenset(HALF_DTYPES)
_NO_ARITHMETIC = _HALF | {BOOL}


@functools.lru_cache(maxsize=128)
def _places_in_dense(
    indices: bytes, indptr: bytes, dtype: np.dtype[Any], R: int, C: int, columns: int
) -> Array | None:  # fmt: skip
    """Return the place of each element in a flattened dense array; None if a block is stored twice."""
    column, starts = np.frombuffer(indices, dtype), np.frombuffer(indptr, dtype)
    row = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    first = row * (R * columns) + column * C
    if len(np.unique(first)) < len(first):
        return None
    within = np.arange(R)[:, None] * columns + np.arange(C)
    places: Array = (first[:, None, None] + within).reshape(-1)
    return places


def real_parts(x: Array) -> Array:
    """Return contiguous complex numbers as pairs of real ones, in the same memory, and other numbers as they are.

    Sums are the same. A complex factor of 1 would make NaN of an infinite number.
    """
    return x.view(x.real.dtype) if x.dtype.kind == "c" else x


def _without_nan(data: Array) -> bool:
    """Tell whether there is no NaN; the sum of all elements says so, if it is a number."""
    return data.dtype.kind not in "fc" or bool(np.isfinite(data.sum()))


def _index(most: int, *arrays: Array) -> np.dtype[Any]:
    for a in arrays:
        if a.dtype.itemsize > 4:
            return _INT64
    return _INT64 if most > INT32_MAX else _INT32


def _as(index: np.dtype[Any], *arrays: Array) -> list[Array]:
    return [np.ascontiguousarray(a, index) for a in arrays]


def _movable(x: Array) -> Array:
    """Return a flat view that loops can copy; 16-bit floats are viewed as integers of 16 bits."""
    return np.ascontiguousarray(x.view(np.uint16) if x.dtype in HALF_DTYPES else x).reshape(-1)


def _spread(base: Array, within: Array) -> Array:
    """Return ``base[i] + within[j]`` for all i and j, flattened; rows are added many at a time."""
    n, width = len(base), len(within)
    out = np.repeat(base, width)
    together = max(1, 512 // max(1, width))
    whole = n // together * together * width
    pattern = np.tile(within, together)
    head = out[:whole].reshape(-1, max(1, together * width))
    head += pattern
    tail = out[whole:]
    tail += pattern[: len(tail)]
    return out
