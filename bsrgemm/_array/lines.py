"""Lines of a matrix, its rows or columns: which axis a reduction is over, and reductions over the blocks of a line."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._backend.base import Array, Blocks
from .convert import Conversions

#: Blocks of at most this many elements along an axis are reduced one element after the other.
SHORT = 12


def axis_of(axis: Any) -> int | None:
    """Return the axis as 0, 1 or None (all elements); raise ValueError or TypeError for anything else."""
    if axis is None:
        return None
    if isinstance(axis, tuple):
        if len(axis) == 0:
            raise ValueError("axis: sparse does not accept 0D axis (). Either use toarray or pass None")
        if len({axis_of(a) for a in axis}) != len(axis):
            raise ValueError(f"axis: duplicate value in {axis}")
        if len(axis) > 2:
            raise ValueError(f"axis: tuple has too many elements: {axis}")
        return None if len(axis) == 2 else axis_of(axis[0])
    if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
        raise TypeError(f"axis must be an integer, a tuple or None, got {type(axis).__name__}")
    if not -2 <= axis <= 1:
        raise ValueError(f"axis out of range: got {axis}, wanted -2 .. 1 or None")
    return int(axis) % 2


class Lines(Conversions):
    """What reductions over rows or columns have in common."""

    def _lines(self, axis: int) -> tuple[Blocks, int, int]:
        """Return blocks whose rows are the lines that a reduction over `axis` combines: (blocks, lines, length).

        These are the blocks of this matrix for axis 1 and those of its transpose for axis 0.
        """
        M, N = self._shape
        blocks = self._canonical()
        if axis == 1:
            return blocks, M, N
        return self._backend.transpose(blocks, self._block_shape[1]), N, M

    def _reduce_lines(self, op: str, blocks: Blocks, within: Array) -> tuple[Array, Array]:
        """Reduce values of shape (blocks, R) over the blocks of each block row.

        Returns the block rows that have blocks, and their values of shape (rows, R).
        """
        xp = self._backend.xp
        filled = xp.flatnonzero(xp.diff(blocks.indptr) > 0)  # synchronize!
        values = self._backend.segment_reduce(op, within, None, blocks.indptr[filled])
        return filled, values

    def _dense_lines(self, blocks: Blocks, filled: Array, values: Array, lines: int) -> Array:
        """Return a vector over all lines with the values of the filled block rows and zeros elsewhere."""
        R = blocks.data.shape[1]
        out = self._backend.xp.zeros((lines // R, R), values.dtype)
        out[filled] = values
        return out.reshape(-1)

    def _line_result(self, values: Array, axis: int) -> Array:
        """Return a vector in the shape of this class: `bsr_matrix` overrides this to give a row or a column."""
        return values
