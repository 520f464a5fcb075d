"""Over rows, columns or everything: sum, mean, extremes and where they are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._backend import structure
from .._backend.base import Array, Blocks
from .._backend.registry import elsewhere
from ..dtypes import BFLOAT16, BOOL, HALF_DTYPES
from .convert import Conversions


def _axis(axis: Any) -> int | None:
    """0, 1 or None (everything); ValueError or TypeError for anything else."""
    if axis is None:
        return None
    if isinstance(axis, tuple):
        if len(axis) == 0:
            raise ValueError("axis: sparse does not accept 0D axis (). Either use toarray or pass None")
        if len({_axis(a) for a in axis}) != len(axis):
            raise ValueError(f"axis: duplicate value in {axis}")
        if len(axis) > 2:
            raise ValueError(f"axis: tuple has too many elements: {axis}")
        return None if len(axis) == 2 else _axis(axis[0])
    if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
        raise TypeError(f"axis must be an integer, a tuple or None, got {type(axis).__name__}")
    if not -2 <= axis <= 1:
        raise ValueError(f"axis out of range: got {axis}, wanted -2 .. 1 or None")
    return int(axis) % 2


def _sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What NumPy sums `dtype` in."""
    if dtype == BOOL or (dtype.kind == "i" and np.can_cast(dtype, np.int_)):
        return np.dtype(np.int_)
    if dtype.kind == "u" and np.can_cast(dtype, np.uint):
        return np.dtype(np.uint)
    return dtype


class Reductions(Conversions):
    """Reductions over rows, columns or everything."""

    # ---------------------------------------------------------------------------------- lines
    def _lines(self, axis: int) -> tuple[Blocks, int, int]:
        """Blocks whose rows are the lines along which `axis` is reduced: (blocks, lines, length)."""
        M, N = self._shape
        blocks = self._canonical()
        if axis == 1:
            return blocks, M, N
        return self._backend.transpose(blocks, self._block_shape[1]), N, M

    def _reduce_lines(self, op: str, blocks: Blocks, within: Array) -> tuple[Array, Array]:
        """Reduce (blocks, R) values over the blocks of each row: (rows that have any, (rows, R) values)."""
        xp = self._backend.xp
        filled = xp.flatnonzero(xp.diff(blocks.indptr) > 0)  # synchronize!
        values = self._backend.segment_reduce(op, within, None, blocks.indptr[filled])
        return filled, values

    def _dense_lines(self, blocks: Blocks, filled: Array, values: Array, lines: int) -> Array:
        """Values of the filled block rows spread over all lines, zero elsewhere."""
        R = blocks.data.shape[1]
        out = self._backend.xp.zeros((lines // R, R), values.dtype)
        out[filled] = values
        return out.reshape(-1)

    def _line_result(self, values: Array, axis: int) -> Array:
        """A vector in the shape that this class hands out."""
        return values

    # ---------------------------------------------------------------------------- sum and mean
    def sum(self, axis: Any = None, dtype: Any = None, out: Array | None = None) -> Any:
        """Sum of the elements over `axis` (0, 1 or None for all).

        16-bit floats are summed in float32 and rounded once. On the GPU the sum of everything is a 0-d array.
        """
        axis = _axis(axis)
        wanted = np.dtype(dtype) if dtype is not None else _sum_dtype(self.dtype)
        acc = np.dtype(np.float32) if wanted in HALF_DTYPES else wanted
        if axis is None:
            data = self._canonical().data
            total = self._cast_for_sum(data, acc).sum(dtype=acc).astype(wanted)
            return self._deliver(total, out, () if self._is_array else (1, 1))
        blocks, lines, _ = self._lines(axis)
        within = self._cast_for_sum(blocks.data, acc).sum(axis=2, dtype=acc)
        filled, values = self._reduce_lines("add", blocks, within)
        result = self._line_result(self._dense_lines(blocks, filled, values, lines).astype(wanted), axis)
        return self._deliver(result, out, tuple(result.shape))

    def _deliver(self, result: Any, out: Array | None, shape: tuple[int, ...]) -> Any:
        """`result`, or `out` with it inside."""
        if out is None:
            return result
        if not self._backend.is_dense(out):
            raise elsewhere(out, "out", self._backend)
        if tuple(out.shape) != shape:
            raise ValueError(
                f"out: output parameter has wrong dimensions, its shape {tuple(out.shape)} does not match {shape}"
            )
        out[...] = result
        return out

    @staticmethod
    def _cast_for_sum(data: Array, acc: np.dtype[Any]) -> Array:
        """`data` in a dtype whose sum in `acc` means the same in NumPy and CuPy: cast first, then added."""
        if data.dtype.kind == "c" and acc.kind != "c":
            data = data.real
        fractions_lost = data.dtype.kind == "f" and acc.kind in "biu"
        return data.astype(acc) if data.dtype == BFLOAT16 or fractions_lost else data

    def mean(self, axis: Any = None, dtype: Any = None, out: Array | None = None) -> Any:
        """Mean of the elements over `axis`; integers and booleans through float64."""
        line = _axis(axis)
        count = math.prod(self._shape) if line is None else self._shape[line]
        inner = np.dtype(np.float64) if self.dtype.kind in "biu" else self.dtype
        acc = np.dtype(np.float32) if inner in HALF_DTYPES else inner
        total = self.sum(axis=axis, dtype=acc) * acc.type(1.0 / count if count else np.nan)
        result = total.astype(dtype if dtype is not None else inner)
        everything = () if self._is_array else (1, 1)
        return self._deliver(result, out, everything if line is None else tuple(result.shape))

    # --------------------------------------------------------------------------------- extremes
    def _extreme_over(self, axis: Any, out: Any, name: str, explicit: bool) -> Any:
        if out is not None:
            raise ValueError("out: sparse min/max does not support an 'out' parameter.")
        line = _axis(axis)
        xp = self._backend.xp
        op = getattr(xp, name)
        if (0 in self._shape) if line is None else self._shape[line] == 0:
            raise ValueError("zero-size array to reduction operation")
        reduction = {"maximum": "max", "minimum": "min", "fmax": "nanmax", "fmin": "nanmin"}[name]
        if line is None:
            if not self.nnz:
                return self.dtype.type(0)
            data = self._canonical().data
            best = _narrow(getattr(xp, reduction)(_wide(data)), self.dtype)
            full = data.size == math.prod(self._shape)
            return best if explicit or full else _narrow(op(_wide(best), _wide(xp.zeros((), self.dtype))), self.dtype)
        blocks, lines, length = self._lines(line)
        C = blocks.data.shape[2]
        within = _wide(blocks.data)
        within = getattr(within, reduction)(axis=2) if name in ("maximum", "minimum") else _fold(op, within)
        filled, values = self._reduce_lines(name, blocks, within)
        if not explicit:
            partial = (xp.diff(blocks.indptr)[filled] * C < length)[:, None]
            values = xp.where(partial, op(values, values.dtype.type(0)), values)
        vector = _narrow(self._dense_lines(blocks, filled, values, lines), self.dtype)
        return self._sparse_vector(vector, line)

    def _sparse_vector(self, vector: Array, axis: int) -> Any:
        """A dense vector as COO: 1-D for bsr_array, a row or column for bsr_matrix."""
        (kept,) = self._backend.xp.nonzero(vector)  # synchronize!
        kept = kept.astype(structure.index_dtype(len(vector)), copy=False)
        values = vector[kept]
        if self._is_array:
            return self._foreign("coo", (values, (kept,)), (len(vector),), vector.dtype)
        zero = self._backend.xp.zeros_like(kept)
        coords, shape = ((zero, kept), (1, len(vector))) if axis == 0 else ((kept, zero), (len(vector), 1))
        return self._foreign("coo", (values, coords), shape, vector.dtype)

    def max(self, axis: Any = None, out: Any = None, *, explicit: bool = False) -> Any:
        """Largest element, or COO of the largest along `axis`; `explicit` leaves out what is not stored."""
        return self._extreme_over(axis, out, "maximum", explicit)

    def min(self, axis: Any = None, out: Any = None, *, explicit: bool = False) -> Any:
        """Smallest element, or COO of the smallest along `axis`; `explicit` leaves out what is not stored."""
        return self._extreme_over(axis, out, "minimum", explicit)

    def nanmax(self, axis: Any = None, out: Any = None, *, explicit: bool = False) -> Any:
        """Like `max`, without NaNs."""
        return self._extreme_over(axis, out, "fmax", explicit)

    def nanmin(self, axis: Any = None, out: Any = None, *, explicit: bool = False) -> Any:
        """Like `min`, without NaNs."""
        return self._extreme_over(axis, out, "fmin", explicit)

    def _where_extreme(self, axis: Any, out: Any, name: str, explicit: bool) -> Any:
        what = "argmax" if name == "maximum" else "argmin"
        if out is not None:
            raise ValueError(f"out: sparse {what} does not support an 'out' parameter.")
        line = _axis(axis)
        xp = self._backend.xp
        if line is None:
            if 0 in self._shape:
                raise ValueError(f"Cannot apply {what} to an empty matrix.")
            if explicit and not self.nnz:
                raise ValueError(f"Cannot apply {what} to zero matrix when explicit=True.")
            M, N = self._shape
            values, columns, indptr = self._elements()
            flat = self._backend.expand(indptr, len(values)).astype(np.int64) * N + columns
            ends = xp.asarray([0, len(values)], dtype=np.int64)
            return int(self._first_extreme(values, flat, ends, M * N, name, explicit)[0])  # synchronize!
        if self._shape[line] == 0:
            raise ValueError(f"Cannot apply {what} along a zero-sized dimension.")
        blocks, _, length = self._lines(line)
        values, columns, indptr = self._backend.to_csr(blocks, length // blocks.data.shape[2], np.dtype(np.int64))
        return self._line_result(self._first_extreme(values, columns, indptr, length, name, explicit), line)

    def _first_extreme(
        self, values: Array, columns: Array, indptr: Array, length: int, name: str, explicit: bool
    ) -> Array:
        """For each line of sorted CSR arrays the first column that holds the extreme; NaN wins, as in NumPy."""
        backend, xp = self._backend, self._backend.xp
        answer = xp.zeros(len(indptr) - 1, np.int64)
        count = xp.diff(indptr)
        filled = xp.flatnonzero(count > 0)  # synchronize!
        if not len(filled):
            return answer
        values = _wide(values)
        starts, count = indptr[filled], count[filled]
        line = backend.expand(xp.concatenate([starts, indptr[-1:]]), len(values))
        best = backend.segment_reduce(name, values, None, starts)
        hit = (values == best[line]) | ((values != values) & (best != best)[line])
        at = backend.segment_reduce("minimum", xp.where(hit, columns, length), None, starts)
        if not explicit:
            within = xp.arange(len(values), dtype=np.int64) - starts[line]
            gap = xp.where(columns != within, within, count[line])
            hole = backend.segment_reduce("minimum", gap, None, starts)  # first column that is not stored
            better = best < 0 if name == "maximum" else best > 0
            at = xp.where((count < length) & better, hole, at)
            at = xp.where((count < length) & (best == 0), xp.minimum(at, hole), at)
        answer[filled] = at
        return answer

    def argmax(self, axis: Any = None, out: Any = None, *, explicit: bool = False) -> Any:
        """Index of the first largest element, of all (flat) or along `axis`."""
        return self._where_extreme(axis, out, "maximum", explicit)

    def argmin(self, axis: Any = None, out: Any = None, *, explicit: bool = False) -> Any:
        """Index of the first smallest element, of all (flat) or along `axis`."""
        return self._where_extreme(axis, out, "minimum", explicit)

    def count_nonzero(self, axis: Any = None) -> Any:
        """Number of elements that are not zero, of all or along `axis`; duplicates are added up first."""
        line = _axis(axis)
        xp = self._backend.xp
        if line is None:
            return int(xp.count_nonzero(self._canonical().data != 0))  # synchronize!
        blocks, lines, _ = self._lines(line)
        within = (blocks.data != 0).sum(axis=2, dtype=np.int_)
        filled, values = self._reduce_lines("add", blocks, within)
        return self._dense_lines(blocks, filled, values, lines)


def _wide(x: Any) -> Any:
    """bfloat16 as float32, which orders it the same way."""
    return x.astype(np.float32) if x.dtype == BFLOAT16 else x


def _narrow(x: Any, dtype: np.dtype[Any]) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)


def _fold(op: Any, x: Array) -> Array:
    """Reduce the last axis with a binary function (array modules lack a quiet nanmax)."""
    best = x[..., 0]
    for k in range(1, x.shape[-1]):
        best = op(best, x[..., k])
    return best
