"""Minima and maxima, with and without their places, along rows and columns."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .._backend import structure
from .._backend.base import Array, Blocks
from .._backend.numpy_backend import SHORT
from ..dtypes import BFLOAT16
from .convert import Conversions


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

    def _line_result(self, values: Array, axis: int) -> Array:
        """Return a vector in the shape of this class: `bsr_matrix` overrides this to give a row or a column."""
        return values


class Candidates(NamedTuple):
    """Elements among which the first extreme one of each line is sought, in sorted order.

    They are all the elements of a matrix in CSR, or, of shape (blocks, R), the first extreme element of each row of
    each block.
    """

    values: Array
    #: Their columns in the matrix
    columns: Array
    #: The columns or block columns that are stored, and where each row or block row begins
    indices: Array
    indptr: Array
    #: Columns of the matrix for each of `indices`
    width: int


class Extremes(Lines):
    """Extremes of rows, columns or all elements, and their positions."""

    def _extreme_over(self, axis: Any, out: Any, name: str, explicit: bool) -> Any:
        if out is not None:
            raise ValueError("out: sparse min/max does not support an 'out' parameter.")
        line = axis_of(axis)
        xp = self._backend.xp
        op = getattr(xp, name)
        if (0 in self._shape) if line is None else self._shape[line] == 0:
            raise ValueError("zero-size array to reduction operation")
        if line is None:
            reduction = {"maximum": "max", "minimum": "min", "fmax": "nanmax", "fmin": "nanmin"}[name]
            if not self.nnz:
                return self.dtype.type(0)
            data = self._canonical().data
            flat = data if self._backend.loops is None else data.reshape(-1)
            best = _narrow(getattr(xp, reduction)(_wide(flat)), self.dtype)
            if explicit or data.size == math.prod(self._shape):
                return best
            return _narrow(op(_wide(best), _wide(self.dtype.type(0))), self.dtype)
        blocks = self._canonical()
        by_column = self._by_column(blocks, line)
        arguments = name, blocks, by_column, self._block_shape[1], self.dtype, explicit
        vector = self._backend.reduce_lines(*arguments)
        if self.dtype not in self._backend.foreign_dtypes:  # COO does not support it
            return self._line_result(vector, line)
        return self._sparse_vector(vector, line)

    def _sparse_vector(self, vector: Array, axis: int) -> Any:
        """Convert a dense vector to COO: one dimension for a `bsr_array`, a row or a column for a `bsr_matrix`."""
        kept = self._backend.flatnonzero(vector)  # synchronize!
        kept = kept.astype(structure.index_dtype(len(vector)), copy=False)
        values = vector[kept]
        if self._is_array:
            return self._foreign("coo", (values, (kept,)), (len(vector),), vector.dtype)
        zero = self._backend.xp.zeros_like(kept)
        coords, shape = ((zero, kept), (1, len(vector))) if axis == 0 else ((kept, zero), (len(vector), 1))
        return self._foreign("coo", (values, coords), shape, vector.dtype)

    def max(self, axis: Any = None, out: Any = None, *, explicit: bool = False) -> Any:
        """Find the largest element of the matrix, or of each column or row.

        Parameters
        ----------
        axis : {None, 0, 1} or tuple
            None reduces all elements, 0 each column and 1 each row. Negative axes and tuples are allowed as in scipy.
        out : None
            Present for compatibility with scipy; no other value is allowed.
        explicit : bool
            With True, only stored elements count. By default elements that are not stored count as zeros.

        Returns
        -------
        number, coo_array, coo_matrix or array
            A number for all elements; on the GPU a 0-d array, unless nothing is stored. With an axis, a COO vector of
            `scipy.sparse` or `cupyx.scipy.sparse`, of shape (N,) or (M,); for a `bsr_matrix` of shape (1, N) or (M, 1).
            If COO does not support the dtype (float16 and bfloat16, and integers on the GPU), a dense array of that
            shape, as `sum` returns it. The dtype is that of this matrix.

        Raises
        ------
        ValueError
            If there are no elements to compare, the axis is out of range, or `out` is given.
        TypeError
            If the axis is not an integer.

        Notes
        -----
        NaN wins, as in NumPy. Duplicates are added up first. With an axis the call waits for the GPU; without one it
        waits if the matrix is not yet known to be in canonical format.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[-1.0, -2, 0, 0], [0, 0, 3, 4]]), blocksize=(1, 2))
        >>> A.max(), A.max(axis=1).toarray()
        (np.float64(4.0), array([0., 4.]))
        >>> A.max(axis=1, explicit=True).toarray()
        array([-1.,  4.])
        >>> A.astype(np.float16).max(axis=1)
        array([0., 4.], dtype=float16)
        """
        return self._extreme_over(axis, out, "maximum", explicit)

    def min(self, axis: Any = None, out: Any = None, *, explicit: bool = False) -> Any:
        """Find the smallest element of the matrix, or of each column or row.

        Parameters
        ----------
        axis : {None, 0, 1} or tuple
            None reduces all elements, 0 each column and 1 each row. Negative axes and tuples are allowed as in scipy.
        out : None
            Present for compatibility with scipy; no other value is allowed.
        explicit : bool
            With True, only stored elements count. By default elements that are not stored count as zeros.

        Returns
        -------
        number, coo_array, coo_matrix or array
            A number for all elements; on the GPU a 0-d array, unless nothing is stored. With an axis, a COO vector of
            `scipy.sparse` or `cupyx.scipy.sparse`, of shape (N,) or (M,); for a `bsr_matrix` of shape (1, N) or (M, 1).
            If COO does not support the dtype (float16 and bfloat16, and integers on the GPU), a dense array of that
            shape, as `sum` returns it. The dtype is that of this matrix.

        Raises
        ------
        ValueError
            If there are no elements to compare, the axis is out of range, or `out` is given.
        TypeError
            If the axis is not an integer.

        Notes
        -----
        NaN wins, as in NumPy. Duplicates are added up first. With an axis the call waits for the GPU; without one it
        waits if the matrix is not yet known to be in canonical format.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[-1.0, -2, 0, 0], [0, 0, 3, 4]]), blocksize=(1, 2))
        >>> A.min(), A.min(axis=1).toarray()
        (np.float64(-2.0), array([-2.,  0.]))
        >>> A.min(axis=1, explicit=True).toarray()
        array([-2.,  3.])
        """
        return self._extreme_over(axis, out, "minimum", explicit)

    def nanmax(self, axis: Any = None, out: Any = None, *, explicit: bool = False) -> Any:
        """Find the largest element of the matrix, or of each column or row, and ignore NaN.

        Parameters
        ----------
        axis : {None, 0, 1} or tuple
            None reduces all elements, 0 each column and 1 each row. Negative axes and tuples are allowed as in scipy.
        out : None
            Present for compatibility with scipy; no other value is allowed.
        explicit : bool
            With True, only stored elements count. By default elements that are not stored count as zeros.

        Returns
        -------
        number, coo_array, coo_matrix or array
            A number for all elements; on the GPU a 0-d array, unless nothing is stored. With an axis, a COO vector of
            `scipy.sparse` or `cupyx.scipy.sparse`, of shape (N,) or (M,); for a `bsr_matrix` of shape (1, N) or (M, 1).
            If COO does not support the dtype (float16 and bfloat16, and integers on the GPU), a dense array of that
            shape, as `sum` returns it. The dtype is that of this matrix.

        Raises
        ------
        ValueError
            If there are no elements to compare, the axis is out of range, or `out` is given.
        TypeError
            If the axis is not an integer.

        Notes
        -----
        NaN is ignored unless all elements are NaN. Duplicates are added up first. With an axis the call waits for the
        GPU; without one it waits if the matrix is not yet known to be in canonical format.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[-1.0, np.nan, 0, 0], [0, 0, 3, 4]]), blocksize=(1, 2))
        >>> A.nanmax(), A.nanmax(axis=1).toarray()
        (np.float64(4.0), array([0., 4.]))
        """
        return self._extreme_over(axis, out, "fmax", explicit)

    def nanmin(self, axis: Any = None, out: Any = None, *, explicit: bool = False) -> Any:
        """Find the smallest element of the matrix, or of each column or row, and ignore NaN.

        Parameters
        ----------
        axis : {None, 0, 1} or tuple
            None reduces all elements, 0 each column and 1 each row. Negative axes and tuples are allowed as in scipy.
        out : None
            Present for compatibility with scipy; no other value is allowed.
        explicit : bool
            With True, only stored elements count. By default elements that are not stored count as zeros.

        Returns
        -------
        number, coo_array, coo_matrix or array
            A number for all elements; on the GPU a 0-d array, unless nothing is stored. With an axis, a COO vector of
            `scipy.sparse` or `cupyx.scipy.sparse`, of shape (N,) or (M,); for a `bsr_matrix` of shape (1, N) or (M, 1).
            If COO does not support the dtype (float16 and bfloat16, and integers on the GPU), a dense array of that
            shape, as `sum` returns it. The dtype is that of this matrix.

        Raises
        ------
        ValueError
            If there are no elements to compare, the axis is out of range, or `out` is given.
        TypeError
            If the axis is not an integer.

        Notes
        -----
        NaN is ignored unless all elements are NaN. Duplicates are added up first. With an axis the call waits for the
        GPU; without one it waits if the matrix is not yet known to be in canonical format.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[-1.0, np.nan, 0, 0], [0, 0, 3, 4]]), blocksize=(1, 2))
        >>> A.nanmin(), A.nanmin(axis=1).toarray()
        (np.float64(-1.0), array([-1.,  0.]))
        """
        return self._extreme_over(axis, out, "fmin", explicit)

    def _where_extreme(self, axis: Any, out: Any, name: str, explicit: bool) -> Any:
        what = "argmax" if name == "maximum" else "argmin"
        if out is not None:
            raise ValueError(f"out: sparse {what} does not support an 'out' parameter.")
        line = axis_of(axis)
        xp = self._backend.xp
        if line is None:
            if 0 in self._shape:
                raise ValueError(f"Cannot apply {what} to an empty matrix.")
            if explicit and not self.nnz:
                raise ValueError(f"Cannot apply {what} to zero matrix when explicit=True.")
            M, N = self._shape
            found = self._first_of_all(name, explicit)
            if found is not None:
                return found
            values, columns, indptr = self._elements()
            flat = self._backend.expand(indptr, len(values)).astype(np.int64) * N + columns
            ends = xp.asarray([0, len(values)])
            candidates = Candidates(values, flat, flat, ends, 1)
            return int(self._first_extreme(candidates, M * N, name, explicit)[0])  # synchronize!
        if self._shape[line] == 0:
            raise ValueError(f"Cannot apply {what} along a zero-sized dimension.")
        blocks, _, length = self._lines(line)
        if self._backend.loops is not None and blocks.data.shape[2] > SHORT:
            candidates = _of_blocks(blocks, name)
        else:
            values, columns, indptr = self._backend.to_csr(blocks, length // blocks.data.shape[2], np.dtype(np.int64))
            candidates = Candidates(values, columns, columns, indptr, 1)
        return self._line_result(self._first_extreme(candidates, length, name, explicit), line)

    def _first_of_all(self, name: str, explicit: bool) -> int | None:
        """Return the index of the first extreme element; None if an element that is not stored may come before it."""
        blocks = self._canonical()
        data = _wide(blocks.data)
        if self._backend.loops is None or not data.size:
            return None
        best = data.max() if name == "maximum" else data.min()
        beats_zero = best > 0 if name == "maximum" else best < 0
        nan = best != best
        if not (explicit or nan or beats_zero):
            return None
        at = np.flatnonzero(data != data if nan else data == best)
        _, R, C = data.shape
        block, within = np.divmod(at, R * C)
        row = (np.searchsorted(blocks.indptr, block, side="right") - 1) * R + within // C
        return int((row * self._shape[1] + blocks.indices[block].astype(np.int64) * C + within % C).min())

    def _first_extreme(self, found: Candidates, length: int, name: str, explicit: bool) -> Array:
        """Return the first column with the extreme value in each row; NaN wins, as in NumPy."""
        backend, xp = self._backend, self._backend.xp
        values, columns, indptr = _wide(found.values), found.columns, found.indptr
        answer = xp.zeros((len(indptr) - 1, *values.shape[1:]), np.int64)
        count = xp.diff(indptr)
        filled = self._backend.flatnonzero(count > 0)  # synchronize!
        if not len(filled):
            return answer.reshape(-1)
        starts, count = indptr[filled], count[filled]
        line = backend.expand(xp.concatenate([starts, indptr[-1:]]), len(values))
        best = backend.segment_reduce(name, values, None, starts)
        hit = (values == best[line]) | ((values != values) & (best != best)[line])
        at = backend.segment_reduce("minimum", xp.where(hit, columns, length), None, starts)
        if not explicit:
            within = xp.arange(len(values)) - starts[line]
            gap = xp.where(found.indices != within, within, count[line])
            hole = backend.segment_reduce("minimum", gap, None, starts)  # the first column that is not stored
            if values.ndim == 2:
                hole, count = hole[:, None] * found.width, count[:, None] * found.width
            better = best < 0 if name == "maximum" else best > 0
            at = xp.where((count < length) & better, hole, at)
            at = xp.where((count < length) & (best == 0), xp.minimum(at, hole), at)
        answer[filled] = at
        return answer.reshape(-1)

    def argmax(self, axis: Any = None, out: Any = None, *, explicit: bool = False) -> Any:
        """Find the index of the first largest element of the matrix, or of each column or row.

        Parameters
        ----------
        axis : {None, 0, 1} or tuple
            None searches all elements, 0 each column and 1 each row. Negative axes and tuples are allowed as in scipy.
        out : None
            Present for compatibility with scipy; no other value is allowed.
        explicit : bool
            With True, only stored elements count. By default elements that are not stored count as zeros.

        Returns
        -------
        int or array of int64
            For all elements, the index into the matrix flattened row by row. With an axis, one index per column or row:
            an array of shape (n,), for a `bsr_matrix` of shape (1, N) or (M, 1).

        Raises
        ------
        ValueError
            If there are no elements to compare, the axis is out of range, or `out` is given.
        TypeError
            If the axis is not an integer.

        Notes
        -----
        NaN wins, as in NumPy. Duplicates are added up first. Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[-1.0, -2, 0, 0], [0, 0, 3, 4]]), blocksize=(1, 2))
        >>> A.argmax(), A.argmax(axis=1)
        (7, array([2, 3]))
        """
        return self._where_extreme(axis, out, "maximum", explicit)

    def argmin(self, axis: Any = None, out: Any = None, *, explicit: bool = False) -> Any:
        """Find the index of the first smallest element of the matrix, or of each column or row.

        Parameters
        ----------
        axis : {None, 0, 1} or tuple
            None searches all elements, 0 each column and 1 each row. Negative axes and tuples are allowed as in scipy.
        out : None
            Present for compatibility with scipy; no other value is allowed.
        explicit : bool
            With True, only stored elements count. By default elements that are not stored count as zeros.

        Returns
        -------
        int or array of int64
            For all elements, the index into the matrix flattened row by row. With an axis, one index per column or row:
            an array of shape (n,), for a `bsr_matrix` of shape (1, N) or (M, 1).

        Raises
        ------
        ValueError
            If there are no elements to compare, the axis is out of range, or `out` is given.
        TypeError
            If the axis is not an integer.

        Notes
        -----
        NaN wins, as in NumPy. Duplicates are added up first. Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[-1.0, -2, 0, 0], [0, 0, 3, 4]]), blocksize=(1, 2))
        >>> A.argmin(), A.argmin(axis=1)
        (1, array([1, 0]))
        """
        return self._where_extreme(axis, out, "minimum", explicit)


def _of_blocks(blocks: Blocks, name: str) -> Candidates:
    """Return the first extreme element of each row of each block, on the host."""
    data, indices, indptr = blocks
    data, indices = _wide(data), indices.astype(np.int64, copy=False)
    at = data.argmax(axis=2) if name == "maximum" else data.argmin(axis=2)
    values = np.take_along_axis(data, at[:, :, None], axis=2)[:, :, 0]
    width = data.shape[2]
    return Candidates(values, indices[:, None] * width + at, indices, indptr, width)


def _wide(x: Any) -> Any:
    """Cast bfloat16 to float32, which has the same order; return all other dtypes as they are."""
    return x.astype(np.float32) if x.dtype == BFLOAT16 else x


def _narrow(x: Any, dtype: np.dtype[Any]) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)
