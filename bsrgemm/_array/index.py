"""Access by position: slices along block boundaries, assignment to stored blocks, diagonals."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from .._backend import structure
from .._backend.base import Array, Blocks
from .._backend.registry import adopted, backend_of, elsewhere, foreign_backend, host_scalar
from .construct import check_cast
from .convert import Conversions

_INDEX64 = np.dtype(np.int64)


class Indexing(Conversions):
    """Slices along block boundaries, assignment, and diagonals."""

    def _window(self, key: Any) -> tuple[int, int, int, int]:
        """Return the block rows and columns that a pair of slices selects: (top, bottom, left, right), without ends."""
        pair = key if isinstance(key, tuple) else (key,)
        if sum(part is Ellipsis for part in pair) > 1:
            raise IndexError("an index can only have a single ellipsis ('...')")
        pair = tuple(slice(None) if part is Ellipsis else part for part in pair)
        if len(pair) > 2:
            raise IndexError(f"index: wanted at most two slices, got {len(pair)} parts")
        bounds = []
        for part, side, block in zip((*pair, slice(None))[:2], self._shape, self.blocksize, strict=True):
            if not isinstance(part, slice):
                raise NotImplementedError(
                    f"index: BSR takes slices along block boundaries, got {type(part).__name__}; "
                    "use A.tocsr() for single elements"
                )
            start, stop, step = part.indices(side)
            stop = max(start, stop)
            if step != 1 or start % block or (stop % block and stop != side):
                raise NotImplementedError(
                    f"index: {start}:{stop}:{step} does not lie on the block boundaries, multiples of {block}"
                    + structure.way_to_slice(start, stop, step, block, side)
                )
            bounds += [start // block, -(-stop // block)]
        return bounds[0], bounds[1], bounds[2], bounds[3]

    def _in_window(self, window: tuple[int, int, int, int]) -> tuple[int, int, Array]:
        """Return the range of the blocks in the rows of the window, and which of them are in its columns."""
        top, bottom, left, right = window
        first, last = (int(v) for v in self._backend.to_host(self.indptr[[top, bottom]]))  # synchronize!
        columns = self.indices[first:last]
        return first, last, (columns >= left) & (columns < right)

    def __getitem__(self, key: Any) -> Self:
        """Return the sub-matrix of one or two slices along block boundaries, as BSR with values of its own.

        A slice that does not begin and end on a block boundary, a step other than 1 and single elements raise
        NotImplementedError; use ``A.tocsr()`` for those. Waits for the GPU.
        """
        window = top, bottom, left, right = self._window(key)
        first, last, inside = self._in_window(window)
        rows = Blocks(self.data[first:last], self.indices[first:last], self.indptr[top : bottom + 1] - self.indptr[top])
        data, indices, indptr = structure.select_blocks(self._backend, rows, inside)
        R, C = self.blocksize
        indices = (indices - left).astype(indices.dtype, copy=False)
        return self._new(
            Blocks(data, indices, indptr),
            ((bottom - top) * R, (right - left) * C),
            canonical=self._known_canonical or None,
            sorted_=self._has_sorted_indices or None,
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write a number, a dense array or a sparse matrix to stored blocks, in place.

        The slices must lie on block boundaries. Assignment does not change the pattern: a value other than zero at a
        position without a stored block raises ValueError. Duplicates of this matrix are added up first. Waits for the
        GPU.
        """
        window = top, bottom, left, right = self._window(key)
        R, C = self.blocksize
        shape = ((bottom - top) * R, (right - left) * C)
        xp = self._backend.xp
        self.sum_duplicates()
        first, _, inside = self._in_window(window)
        where = xp.flatnonzero(inside) + first  # synchronize!
        rows = self._backend.expand(self.indptr, len(self.indices))[where] - top
        cols = self.indices[where] - left
        value = self._assignable(value, "value")
        try:
            full = xp.broadcast_to(value, shape)
        except ValueError:
            raise ValueError(f"value: shape {tuple(value.shape)} does not fit the window {shape}") from None
        tiles = full.reshape(bottom - top, R, right - left, C).transpose(0, 2, 1, 3)
        stored = xp.zeros(tiles.shape[:2], np.bool_)
        stored[rows, cols] = True
        if bool(((tiles != 0).any(axis=(2, 3)) & ~stored).any()):  # synchronize!
            raise ValueError("value: not zero where no block is stored; assignment does not add blocks")
        self._before_writing()
        self.data[where] = tiles[rows, cols]

    def _assignable(self, value: Any, name: str) -> Array:
        """Convert `value` to an array of this backend and dtype; raise if more than precision would be lost."""
        backend = backend_of(value) or foreign_backend(value)
        if backend is not None and backend is not self._backend and not host_scalar(value):
            raise elsewhere(value, name, self._backend)
        if self._backend.is_sparse(value):
            value = value.toarray()
        elif backend is self._backend and not isinstance(value, np.generic):
            value = adopted(self._backend, value, name)
        else:
            value = np.asarray(value)
            if value.dtype.kind not in "biufcV":
                raise TypeError(f"{name}: wanted numbers, got {value.dtype}")
            value = self._backend.from_host(value)
        if value.dtype.kind == "c" and self.dtype.kind != "c":
            raise TypeError(f"{name}: cannot keep complex values in a matrix of {self.dtype}")
        check_cast(self._backend, value, self.dtype, name)
        return value.astype(self.dtype)

    def __iter__(self) -> Any:
        raise NotImplementedError("iteration over single rows is not implemented for BSR; use A.tocsr()")

    # ---------------------------------------------------------------------------------- diagonal
    def diagonal(self, k: int = 0) -> Array:
        """Return a diagonal as a dense vector; duplicates are added up.

        Parameters
        ----------
        k : int
            Which diagonal: 0 is the main one, k > 0 lies above it and k < 0 below it. The elements are A[i, i + k].

        Returns
        -------
        array of shape (n,)
            In the dtype of this matrix. n is the length of the diagonal, which is 0 for one outside of the matrix.

        Notes
        -----
        Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.arange(8.0).reshape(2, 4), blocksize=(1, 2))
        >>> A.diagonal(), A.diagonal(k=2)
        (array([0., 5.]), array([2., 7.]))
        """
        xp = self._backend.xp
        M, N = self._shape
        if k <= -M or k >= N:
            return xp.empty(0, self.dtype)
        out = xp.zeros(min(M + min(k, 0), N - max(k, 0)), self.dtype)
        loops, (R, C) = self._backend.loops, self.blocksize
        if loops is not None and loops.diagonal(self._validated, self._shape, k, out):
            return out
        blocks = self._canonical()
        rows = self._backend.expand(blocks.indptr, len(blocks.indices)).astype(np.int64, copy=False)
        shift = blocks.indices.astype(np.int64, copy=False) * C - rows * R
        crossing = xp.flatnonzero((shift - (R - 1) <= k) & (k <= shift + C - 1))  # synchronize!
        r, c = xp.arange(R, dtype=np.int64)[:, None], xp.arange(C, dtype=np.int64)
        on = shift[crossing][:, None, None] + (c - r) == k
        place = xp.broadcast_to(rows[crossing][:, None, None] * R + r, on.shape) + min(k, 0)
        out[place[on]] = blocks.data[crossing][on]  # synchronize!
        return out

    def trace(self, offset: int = 0) -> Any:
        """Return the sum of a diagonal.

        Parameters
        ----------
        offset : int
            Which diagonal, as `k` of `diagonal`.

        Returns
        -------
        number
            A NumPy scalar on the CPU, a 0-d array on the GPU, in the dtype in which NumPy sums.

        Notes
        -----
        Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.arange(8.0).reshape(2, 4), blocksize=(1, 2))
        >>> A.trace(), A.trace(offset=1)
        (np.float64(5.0), np.float64(7.0))
        """
        return self.diagonal(k=offset).sum()

    def setdiag(self, values: Any, k: int = 0) -> None:
        """Set a diagonal in place, and store the blocks that it crosses.

        Parameters
        ----------
        values : number or array_like of shape (n,)
            One number for the whole diagonal, or its first n values. The rest of a longer diagonal stays as it is;
            values beyond its end are ignored.
        k : int
            Which diagonal: 0 is the main one, k > 0 lies above it and k < 0 below it.

        Raises
        ------
        ValueError
            If the diagonal lies outside of the matrix, `values` has more than one dimension, or NaN or infinity would
            be cast to an integer.
        TypeError
            If `values` are complex and the matrix is real, are not numbers, or are arrays on another device.

        Notes
        -----
        The values are cast to the dtype of this matrix. Duplicates of this matrix are added up. Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array((2, 4), blocksize=(2, 2))
        >>> A.setdiag([1, 2], k=1)
        >>> A.toarray()
        array([[0., 1., 0., 0.],
               [0., 0., 2., 0.]])
        """
        M, N = self._shape
        if (k > 0 and k >= N) or (k < 0 and -k >= M):
            raise ValueError(f"k exceeds array dimensions: k={k} of shape {self._shape}")
        backend, xp = self._backend, self._backend.xp
        values = self._assignable(values, "values")
        n = min(M + min(k, 0), N - max(k, 0))
        if values.ndim > 1:
            raise ValueError(f"values: wanted a number or a vector, got {values.ndim} dimensions")
        n = n if values.ndim == 0 else min(n, len(values))
        if n <= 0:
            return
        values = xp.broadcast_to(values, (n,)) if values.ndim == 0 else values[:n]
        step = xp.arange(n, dtype=np.int64)
        row, col = step - min(k, 0), step + max(k, 0)
        touched = structure.from_coo(
            backend, row, col, xp.ones(n, self.dtype), self._shape, self.blocksize, self.indices.dtype, unique=True
        )
        data, _, indices, indptr = structure.align(backend, self._canonical(), touched, self._block_shape[1])
        R, C = self.blocksize
        keys = structure.block_keys(backend, indices, indptr, self._block_shape[1])
        block = xp.searchsorted(keys, (row // R) * self._block_shape[1] + col // C)
        data[block, row % R, col % C] = values
        index = self.indices.dtype
        self._replace(Blocks(data, indices.astype(index, copy=False), indptr.astype(index, copy=False)))
        self.has_canonical_format = True

    def nonzero(self) -> tuple[Array, Array]:
        """Return the positions of the elements that are not zero, row by row.

        Returns
        -------
        row, col : arrays of shape (n,)
            Integer indices, on the device of this matrix. Duplicates are added up first.

        Notes
        -----
        Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, 2, 0, 0], [0, 0, 0, 3]]), blocksize=(1, 2))
        >>> row, col = A.nonzero()
        >>> row.tolist(), col.tolist()
        ([0, 0, 1], [0, 1, 3])
        """
        values, columns, indptr = self._elements()
        kept = self._backend.xp.flatnonzero(values != 0)  # synchronize!
        return self._backend.expand(indptr, len(values))[kept], columns[kept]
