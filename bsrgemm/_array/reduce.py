"""Reductions over rows, columns or all elements: sum, mean and count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._backend.base import Array, Blocks
from .._backend.registry import target
from ..dtypes import BFLOAT16, BOOL, HALF_DTYPES, check_dtype
from .extremes import Extremes
from .lines import SHORT, axis_of

_INT32_MAX = np.iinfo(np.int32).max


def _sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that NumPy gives to a sum of `dtype`."""
    if dtype == BOOL or (dtype.kind == "i" and np.can_cast(dtype, np.int_)):
        return np.dtype(np.int_)
    if dtype.kind == "u" and np.can_cast(dtype, np.uint):
        return np.dtype(np.uint)
    return dtype


class Reductions(Extremes):
    """Reductions over rows, columns or all elements."""

    # ---------------------------------------------------------------------------- sum and mean
    def sum(self, axis: Any = None, dtype: Any = None, out: Array | None = None) -> Any:
        """Add up the elements of the matrix, or of each column or row.

        Parameters
        ----------
        axis : {None, 0, 1} or tuple
            None adds up all elements, 0 each column and 1 each row. Negative axes and tuples are allowed as in scipy.
        dtype : dtype, optional
            The dtype of the result, in which the sum is accumulated. By default it is NumPy's: 64-bit integers for
            narrower integers and booleans, otherwise the dtype of this matrix.
        out : array, optional
            Array to write the result to, on the device of this matrix and in the shape of the result.

        Returns
        -------
        number or array
            For all elements, a NumPy scalar on the CPU and a 0-d array on the GPU. With an axis, an array of shape (N,)
            or (M,); for a `bsr_matrix` of shape (1, N) or (M, 1).

        Raises
        ------
        ValueError
            If the axis is out of range, or `out` has another shape.
        TypeError
            If the axis is not an integer, or `out` is not an array on the device of this matrix.

        Notes
        -----
        16-bit floats are summed in float32 and rounded once. With an axis the call waits for the GPU; without one it
        waits if the matrix is not yet known to be in canonical format.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1, 2, 0, 0], [0, 0, 3, 4]]), blocksize=(1, 2))
        >>> A.sum(), A.sum(axis=1)
        (np.int64(10), array([3, 7]))
        """
        axis = axis_of(axis)
        wanted = check_dtype(dtype, self._backend.dtypes) if dtype is not None else _sum_dtype(self.dtype)
        acc = np.dtype(np.float32) if wanted in HALF_DTYPES else wanted
        if axis is None:
            data = self._summands.data
            total = self._cast_for_sum(data, acc).sum(dtype=acc).astype(wanted)
            return self._deliver(total, out, () if self._is_array else (1, 1))
        result = self._line_result(self._sum_lines(axis, acc).astype(wanted, copy=False), axis)
        return self._deliver(result, out, tuple(result.shape))

    @property
    def _summands(self) -> Blocks:
        """The blocks of a sum: of floats on the host, duplicates need not be added up first."""
        floats = self.dtype.char in "fdFD" and self._backend.loops is not None
        return self._validated if floats else self._canonical()

    def _sum_lines(self, axis: int, acc: np.dtype[Any]) -> Array:
        """Add up each column (axis 0) or row (axis 1) in `acc`."""
        loops = self._backend.loops
        if loops is not None:
            blocks = self._summands
            data = self._cast_for_sum(blocks.data, acc).astype(acc, copy=False)
            sums = loops.add_blocks(blocks._replace(data=data), self._block_shape[1], axis)
            if sums is not None:
                short = sums.shape[1 + axis] <= SHORT
                lines = loops.fold(np.add, sums, 1 + axis) if short else sums.sum(axis=1 + axis)
                return lines.reshape(-1)
        blocks, lines, _ = self._lines(axis)
        within = self._cast_for_sum(blocks.data, acc).sum(axis=2, dtype=acc)
        filled, values = self._reduce_lines("add", blocks, within)
        return self._dense_lines(blocks, filled, values, lines)

    def _deliver(self, result: Any, out: Array | None, shape: tuple[int, ...]) -> Any:
        """Return `result`, or write it to `out` and return `out`."""
        if out is None:
            return result
        array = target(self._backend, out, "out")
        if tuple(array.shape) != shape:
            raise ValueError(
                f"out: output parameter has wrong dimensions, its shape {tuple(array.shape)} does not match {shape}"
            )
        array[...] = result
        return out

    @staticmethod
    def _cast_for_sum(data: Array, acc: np.dtype[Any]) -> Array:
        """Cast `data` before a sum in `acc` where NumPy and CuPy would otherwise cast at different times.

        bfloat16 and floats that are summed as integers are cast before they are added. Complex numbers that are summed
        as real ones lose their imaginary part.
        """
        if data.dtype.kind == "c" and acc.kind != "c":
            data = data.real
        fractions_lost = data.dtype.kind == "f" and acc.kind in "biu"
        return data.astype(acc) if data.dtype == BFLOAT16 or fractions_lost else data

    def mean(self, axis: Any = None, dtype: Any = None, out: Array | None = None) -> Any:
        """Compute the mean of the elements of the matrix, or of each column or row.

        Parameters
        ----------
        axis : {None, 0, 1} or tuple
            None averages all elements, 0 each column and 1 each row. Negative axes and tuples are allowed as in scipy.
        dtype : dtype, optional
            The dtype of the result: by default float64 for integers and booleans, otherwise that of this matrix.
        out : array, optional
            Array to write the result to, on the device of this matrix and in the shape of the result.

        Returns
        -------
        number or array
            For all elements, a NumPy scalar on the CPU and a 0-d array on the GPU. With an axis, an array of shape (N,)
            or (M,); for a `bsr_matrix` of shape (1, N) or (M, 1). The mean of no elements is NaN.

        Raises
        ------
        ValueError
            If the axis is out of range, or `out` has another shape.
        TypeError
            If the axis is not an integer, or `out` is not an array on the device of this matrix.

        Notes
        -----
        Elements that are not stored count as zeros. Integers and booleans are summed in float64, 16-bit floats in
        float32. With an axis the call waits for the GPU; without one it waits if the matrix is not yet known to be in
        canonical format.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1, 2, 0, 0], [0, 0, 3, 4]]), blocksize=(1, 2))
        >>> A.mean(), A.mean(axis=1)
        (np.float64(1.25), array([0.75, 1.75]))
        """
        line = axis_of(axis)
        if dtype is not None:
            dtype = check_dtype(dtype, self._backend.dtypes)
        count = math.prod(self._shape) if line is None else self._shape[line]
        inner = np.dtype(np.float64) if self.dtype.kind in "biu" else self.dtype
        acc = np.dtype(np.float32) if inner in HALF_DTYPES else inner
        one = np.longdouble(1) if acc.char in "gG" else 1.0  # a quotient of Python would have the digits of a double
        total = self.sum(axis=axis, dtype=acc) * acc.type(one / count if count else np.nan)
        result = total.astype(dtype if dtype is not None else inner)
        everything = () if self._is_array else (1, 1)
        return self._deliver(result, out, everything if line is None else tuple(result.shape))

    def count_nonzero(self, axis: Any = None) -> Any:
        """Count the elements that are not zero, in the matrix or in each column or row.

        Parameters
        ----------
        axis : {None, 0, 1} or tuple
            None counts all elements, 0 each column and 1 each row. Negative axes and tuples are allowed as in scipy.

        Returns
        -------
        int or array of int64
            A Python int for all elements; with an axis an array of shape (N,) or (M,).

        Raises
        ------
        ValueError, TypeError
            If the axis is out of range or not an integer.

        Notes
        -----
        Duplicates are added up first. NaN counts as not zero. Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, 0, 0, 0], [0, 0, 3, 4]]), blocksize=(1, 2))
        >>> A.count_nonzero(), A.count_nonzero(axis=1), A.nnz
        (3, array([1, 2]), 4)
        """
        line = axis_of(axis)
        xp = self._backend.xp
        if line is None:
            data = self._canonical().data
            if self._backend.loops is not None and data.dtype != BFLOAT16:
                return int(np.count_nonzero(data))
            return int(xp.count_nonzero(data != 0))  # synchronize!
        if self._backend.loops is not None:
            blocks = self._canonical()
            stored = (blocks.data != 0).astype(np.int32 if max(self._shape) < _INT32_MAX else np.int64)
            sums = self._backend.loops.add_blocks(blocks._replace(data=stored), self._block_shape[1], line)
            if sums is not None:
                return sums.sum(axis=1 + line).reshape(-1)
        blocks, lines, _ = self._lines(line)
        within = (blocks.data != 0).sum(axis=2)
        filled, values = self._reduce_lines("add", blocks, within)
        return self._dense_lines(blocks, filled, values, lines)
