"""Sums, means and norms along rows and columns."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from .._backend.base import Array, Blocks
from .._backend.loops import real_parts
from .._backend.registry import target
from ..dtypes import BFLOAT16, BOOL, HALF_DTYPES, accumulator_dtype, check_dtype
from .base import BsrBase, no_bsr
from .extremes import Extremes, axis_of

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
        16-bit floats are summed in float32 and rounded once. On the GPU the call waits if the matrix is not yet known
        to be in canonical format.

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
            total = self._cast_for_sum(data, acc).sum(dtype=acc).astype(wanted, copy=False)
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
        blocks = self._summands
        by_column = self._by_column(blocks, axis)
        blocks = blocks._replace(data=self._cast_for_sum(blocks.data, acc))
        return self._backend.reduce_lines("add", blocks, by_column, self._block_shape[1], acc)

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
        float32. On the GPU the call waits if the matrix is not yet known to be in canonical format.

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
        if line is None:
            return self._backend.count_nonzero(self._canonical().data)  # synchronize!
        blocks = self._canonical()
        by_column = self._by_column(blocks, line)
        few = self._backend.loops is not None and max(self._shape) < _INT32_MAX
        dtype = np.dtype(np.int32 if few else np.int64)
        counts = self._backend.reduce_lines("count", blocks, by_column, self._block_shape[1], dtype)
        return counts.astype(np.int64, copy=False)


_FROBENIUS = (None, "fro", "f")


def norm(A: Any, ord: Any = None, axis: Any = None) -> Any:
    """Compute the norm of a BSR matrix, or of each row or column, as `scipy.sparse.linalg.norm` does.

    Parameters
    ----------
    A : bsr_array or bsr_matrix
        The matrix. Its duplicates are added up in a copy; `A` itself does not change. For a transpose the arrays of the
        original matrix are read.
    ord : {None, 'fro', 1, -1, inf, -inf}, or 0 or a number > 0 with an axis
        Which norm to compute; see the table below.
    axis : {None, 0, 1, (0, 1), (1, 0)}, optional
        With None or (0, 1) the norm of the matrix is computed, with (1, 0) that of its transpose, with 0 the norm of
        each column, and with 1 the norm of each row.

    Returns
    -------
    number or array
        For the matrix, a NumPy scalar on the CPU and a 0-d array on the GPU. With one axis, an array of shape (N,) or
        (M,). Integers give integers for norms that are sums or extremes, and float64 for norms that are roots. 16-bit
        floats are summed in float32 and rounded once, to their own dtype.

    Raises
    ------
    TypeError
        If `A` is not a `bsr_array` or `bsr_matrix`, or `axis` is not made of integers.
    ValueError
        If `ord` or `axis` is not one of those above, or there are no elements to compare.
    NotImplementedError
        If `ord` is 2 or -2 for a matrix, because these norms need singular values.

    Notes
    -----
    ==========  ====================  =====================
    ord         of a matrix           of a row or column
    ==========  ====================  =====================
    None        Frobenius             sqrt(sum(abs(x)**2))
    'fro'       Frobenius             -
    inf         largest row sum       max(abs(x))
    -inf        smallest row sum      min(abs(x))
    1           largest column sum    sum(abs(x))
    -1          smallest column sum   -
    0           -                     sum(x != 0)
    p > 0       -                     sum(abs(x)**p)**(1/p)
    ==========  ====================  =====================

    Waits for the GPU. Only the Frobenius norm of a matrix that is known to be in canonical format does not wait.

    Examples
    --------
    >>> import bsrgemm as bg, numpy as np
    >>> A = bg.bsr_array(np.array([[3.0, -4, 0, 0], [0, 0, 0, 12]]), blocksize=(1, 2))
    >>> bg.norm(A), bg.norm(A, 1), bg.norm(A, np.inf)
    (np.float64(13.0), np.float64(12.0), np.float64(12.0))
    >>> bg.norm(A, axis=1), bg.norm(A, 1, axis=0)
    (array([ 5., 12.]), array([ 3.,  4.,  0., 12.]))
    """
    if not isinstance(A, BsrBase):
        raise TypeError(f"A: wanted a bsr_array or bsr_matrix, got {no_bsr(A, 'A')}")
    if isinstance(ord, bool):
        raise ValueError(f"ord: wanted a number, None or 'fro', got {ord!r}")
    axes = _axes(axis)
    source, transposed = A._source()
    if transposed:
        axes = tuple(1 - a for a in axes)
    return _matrix_norm(source, ord, axes) if len(axes) == 2 else _line_norms(source, ord, axes[0])


def _axes(axis: Any) -> tuple[int, ...]:
    """Return one or two axes, each 0 or 1; raise TypeError or ValueError for anything else."""
    if axis is None:
        return 0, 1
    axes = axis if isinstance(axis, tuple) else (axis,)
    for a in axes:
        if not isinstance(a, int | np.integer) or isinstance(a, bool):
            raise TypeError(f"axis: wanted None, an integer or a tuple of integers, got {axis!r}")
    if not 1 <= len(axes) <= 2 or not all(-2 <= a <= 1 for a in axes):
        raise ValueError(f"axis: wanted None, one axis or two, each -2 .. 1, got {axis!r}")
    axes = tuple(int(a) % 2 for a in axes)
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis: the same axis twice in {axis!r}")
    return axes


def _is(ord: Any, *orders: float) -> bool:
    return isinstance(ord, numbers.Real) and ord in orders


# ---------------------------------------------------------------------------------------- the matrix
def _matrix_norm(A: BsrBase, ord: Any, axes: tuple[int, ...]) -> Any:
    xp = A._backend.xp
    if ord is None or (isinstance(ord, str) and ord in _FROBENIUS):
        data = A._canonical().data
        if A._backend.loops is not None and data.dtype.char in "fdFD":
            flat = real_parts(data.reshape(-1))
            return xp.sqrt(xp.vdot(flat, flat).real).astype(_root_dtype(A.dtype), copy=False)
        return xp.sqrt(_squares(data).sum()).astype(_root_dtype(A.dtype), copy=False)
    if _is(ord, 2, -2):
        raise NotImplementedError(
            f"ord: {ord!r} of a matrix needs its singular values; "
            f"{A._backend.sparse.__name__}.linalg.svds(A, k=1) finds the largest"
        )
    if not _is(ord, 1, -1, math.inf, -math.inf):
        raise ValueError(f"ord: wanted None, 'fro', 1, -1, inf or -inf for a matrix, got {ord!r}")
    along = axes[1] if math.isinf(ord) else axes[0]
    if not A._shape[1 - along]:
        raise ValueError(f"A: no {'row' if along else 'column'} to take the norm of in shape {A._shape}")
    sums = _line_sums(A, along)
    return (sums.max() if ord > 0 else sums.min()).astype(_real(_sum_dtype(A.dtype)))


# ----------------------------------------------------------------------------------- rows and columns
def _line_norms(A: BsrBase, ord: Any, axis: int) -> Array:
    """Compute the norms of the columns (axis 0) or rows (axis 1)."""
    xp = A._backend.xp
    if _is(ord, math.inf, -math.inf):
        return _line_extremes(A, axis, ord > 0)
    if _is(ord, 1):
        return _line_sums(A, axis).astype(_real(_sum_dtype(A.dtype)), copy=False)
    blocks = A._canonical()
    if _is(ord, 0):
        return _sum_over_lines(A, blocks, axis, blocks.data != 0, np.dtype(np.int_))
    if ord is None or _is(ord, 2):
        values = _squares(blocks.data)
        return xp.sqrt(_sum_over_lines(A, blocks, axis, values, values.dtype)).astype(_root_dtype(A.dtype), copy=False)
    p = float(ord) if isinstance(ord, numbers.Real) else 0.0
    if not p > 0:
        raise ValueError(f"ord: wanted None, 0, a number > 0, inf or -inf for rows or columns, got {ord!r}")
    values = abs(_for_root(blocks.data)) ** p
    sums = _sum_over_lines(A, blocks, axis, values, values.dtype)
    return (sums ** (1 / p)).astype(_root_dtype(A.dtype), copy=False)


def _line_sums(A: BsrBase, axis: int) -> Array:
    """Return the sums of absolute values of the columns (axis 0) or rows (axis 1), in the dtype of the accumulator."""
    blocks = A._canonical()
    dtype = _sum_dtype(A.dtype)
    data = blocks.data
    if data.dtype.kind != "c":  # cast before abs: abs(-128) does not fit into int8
        data = data.astype(accumulator_dtype(dtype), copy=False)
    values = abs(data)
    return _sum_over_lines(A, blocks, axis, values, values.dtype)


def _sum_over_lines(A: BsrBase, blocks: Blocks, axis: int, values: Array, dtype: np.dtype[Any]) -> Array:
    if A._backend.loops is not None:
        stored = blocks._replace(data=values.astype(dtype, copy=False))
        sums = A._backend.loops.add_blocks(stored, A._block_shape[1], axis)
        if sums is not None:
            return sums.sum(axis=1 + axis).reshape(-1)
    by_column = A._by_column(blocks, axis)
    return A._backend.reduce_lines("add", blocks._replace(data=values), by_column, A._block_shape[1], dtype)


def _line_extremes(A: BsrBase, axis: int, largest: bool) -> Array:
    """Return the largest or smallest absolute value of each column or row; elements that are not stored are 0."""
    if not A._shape[axis]:
        raise ValueError(f"A: {'columns' if axis == 0 else 'rows'} of shape {A._shape} have no elements to compare")
    blocks = A._canonical()
    data = blocks.data.astype(np.float32) if A.dtype == BFLOAT16 else blocks.data
    values = data if A.dtype == BOOL else abs(data)
    by_column = A._by_column(blocks, axis)
    blocks = blocks._replace(data=values)
    name = "maximum" if largest else "minimum"
    best = A._backend.reduce_lines(name, blocks, by_column, A._block_shape[1], values.dtype)
    return best.astype(_real(A.dtype), copy=False)


# -------------------------------------------------------------------------------------------- dtypes
def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the absolute values of `dtype`."""
    return np.zeros((), dtype).real.dtype if dtype.kind == "c" else dtype


def _root_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a norm that is a root: float64 for integers and booleans."""
    return np.dtype(np.float64) if dtype.kind in "biu" else _real(dtype)


def _for_root(data: Array) -> Array:
    """Cast values to the dtype in which their powers are summed."""
    if data.dtype.kind == "c":
        return data
    return data.astype(accumulator_dtype(_root_dtype(data.dtype)), copy=False)


def _squares(data: Array) -> Array:
    """Compute ``abs(x)**2``."""
    x = _for_root(data)
    return x.real * x.real + x.imag * x.imag if x.dtype.kind == "c" else x * x
