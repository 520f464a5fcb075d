"""Access by position: slices and index arrays of whole blocks, assignment to stored blocks, diagonals."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from .._backend import structure
from .._backend.base import Array, Blocks
from .._backend.registry import adopted, backend_of, elsewhere, foreign_backend, host, host_scalar
from . import accumulate
from .base import check_integer
from .construct import check_cast, dense_of
from .convert import Conversions
from .select import Axis, chosen, gather, is_index

_INDEX64 = np.dtype(np.int64)


class Indexing(Conversions):
    """Slices and index arrays of whole blocks, assignment, and diagonals."""

    def _pair(self, key: Any) -> tuple[Any, Any]:
        """Return the indices of rows and of columns that a key consists of."""
        pair = key if isinstance(key, tuple) else (key,)
        if sum(part is Ellipsis for part in pair) > 1:
            raise IndexError("an index can only have a single ellipsis ('...')")
        if len(pair) > 2 and not (len(pair) == 3 and any(part is Ellipsis for part in pair)):
            raise IndexError(f"index: wanted at most two parts, for rows and columns, got {len(pair)}")
        if any(part is Ellipsis for part in pair):
            at = next(k for k, part in enumerate(pair) if part is Ellipsis)
            pair = (*pair[:at], *[slice(None)] * (3 - len(pair)), *pair[at + 1 :])
        rows, cols = (*pair, slice(None), slice(None))[:2]
        return rows, cols

    def _window(self, key: Any) -> tuple[int, int, int, int]:
        """Return the block rows and columns that a pair of slices selects: (top, bottom, left, right), without ends."""
        (top, bottom), (left, right) = (self._range(part, axis) for axis, part in enumerate(self._pair(key)))
        return top, bottom, left, right

    def _range(self, part: Any, axis: int) -> tuple[int, int]:
        """Return the first block of a slice and the one after its last block, along an axis."""
        side, block = self._shape[axis], self.blocksize[axis]
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
        return start // block, -(-stop // block)

    def _in_window(self, window: tuple[int, int, int, int]) -> tuple[int, int, Array]:
        """Return the range of the blocks in the rows of the window, and which of them are in its columns."""
        top, bottom, left, right = window
        _, indices, indptr = self._blocks
        first, last = (int(v) for v in self._backend.to_host(indptr[[top, bottom]]))  # synchronize!
        columns = indices[first:last]
        return first, last, (columns >= left) & (columns < right)

    def __getitem__(self, key: Any) -> Self:
        """Return the sub-matrix of slices or index arrays that cover whole blocks, as BSR with values of its own.

        Slices begin and end on block boundaries. An array or a list of integers or booleans selects rows or columns in
        groups, each of which is one whole block in order: ``A[I]``, ``A[:, J]``, ``A[I, :]``, ``A[np.ix_(I, J)]``.
        Blocks may come in any order and several times. Everything else raises NotImplementedError, for which
        ``A.tocsr()`` is the way out, or IndexError if it is out of range. Waits for the GPU once, and once more for
        each boolean array on the GPU.
        """
        parts = self._pair(key)
        if any(is_index(part) for part in parts):
            return self._at(parts)
        window = top, bottom, left, right = self._window(key)
        first, last, inside = self._in_window(window)
        data, indices, indptr = self._blocks
        rows = Blocks(data[first:last], indices[first:last], indptr[top : bottom + 1] - indptr[top])
        data, indices, indptr = structure.select_blocks(self._backend, rows, inside)
        R, C = self.blocksize
        indices = (indices - left).astype(indices.dtype, copy=False)
        return self._new(
            Blocks(data, indices, indptr),
            ((bottom - top) * R, (right - left) * C),
            canonical=self._known_canonical or None,
            sorted_=self._has_sorted_indices or None,
        )

    def _at(self, parts: tuple[Any, Any]) -> Self:
        """Return the blocks of rows and columns, at least one of which is an index array."""
        if all(is_index(part) for part in parts):
            rows, cols = (part if hasattr(part, "ndim") else np.asarray(part) for part in parts)
            if rows.ndim != 2 or cols.ndim != 2 or rows.shape[1] != 1 or cols.shape[0] != 1:
                raise NotImplementedError(
                    f"index: two index arrays of shapes {tuple(rows.shape)} and {tuple(cols.shape)} select single "
                    "elements; use A[np.ix_(I, J)] or A[I][:, J] for rows and columns, and A.tocsr()[I, J] for elements"
                )
            parts = rows.reshape(-1), cols.reshape(-1)
        indices = []
        for number, (part, name) in enumerate(zip(parts, ("row", "column"), strict=True)):
            axis = Axis("index", name, self._block_shape[number], self.blocksize[number])
            if is_index(part):
                indices.append((part, axis))
            else:
                start, stop = self._range(part, number)
                everything = (start, stop) == (0, axis.blocks)
                indices.append((None if everything else slice(start, stop), axis._replace(block=1)))
        return self._selected(*indices)

    def _selected(self, rows: tuple[Any, Axis], cols: tuple[Any, Axis]) -> Self:
        """Return the blocks in some block rows and block columns; an index of None selects all."""
        backend = self._backend
        picks = [None if index is None else chosen(backend, index, axis) for index, axis in (rows, cols)]
        blocks, was_sorted = gather(backend, self._validated, picks[0], picks[1], (rows[1], cols[1]))
        sides = [
            size if pick is None else len(pick.numbers) * block
            for size, pick, block in zip(self._shape, picks, self.blocksize, strict=True)
        ]
        canonical = self._known_canonical or None
        # A column that is chosen twice puts copies of a block that is stored twice out of order.
        kept = self._has_sorted_indices and (picks[1] is None or picks[1].increasing or canonical)
        return self._new(blocks, (sides[0], sides[1]), canonical=canonical, sorted_=was_sorted or kept or None)

    def select_blocks(self, rows: Any = None, cols: Any = None) -> Self:
        """Return the sub-matrix of some block rows and block columns, in the order in which they are named.

        Parameters
        ----------
        rows, cols : integers, booleans or slice, optional
            The numbers of block rows and of block columns: an array, a list, or one number. Negative ones count from
            the end, and a number may come several times. Booleans, one for each block row or block column, select those
            that are true. By default all are selected.

        Returns
        -------
        bsr_array or bsr_matrix
            A matrix of the same class with values of its own. Block (i, j) of it is block ``(rows[i], cols[j])`` of
            this matrix.

        Raises
        ------
        IndexError
            If a number is out of range, or if the number of booleans is wrong.
        TypeError
            If the matrix is on the CPU and an index is on the GPU.

        Notes
        -----
        Duplicates are kept. If the matrix is known to be in canonical format, the result is too.

        The index arrays may be on the host or on the device of the matrix. The call waits for the GPU once, to allocate
        the result, and once more for each boolean array that is on the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.arange(16).reshape(4, 4), blocksize=(2, 2))
        >>> A.select_blocks(rows=[1, 0], cols=[-1]).toarray()
        array([[10, 11],
               [14, 15],
               [ 2,  3],
               [ 6,  7]])
        >>> A.select_blocks(cols=[False, True]).shape
        (4, 2)
        """
        row_axis, col_axis = (
            Axis(argument, f"block {name}", count, 1)
            for argument, name, count in zip(("rows", "cols"), ("row", "column"), self._block_shape, strict=True)
        )
        if rows is None and cols is None:
            return self.copy()
        return self._selected((rows, row_axis), (cols, col_axis))

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
        self._make_canonical()
        first, _, inside = self._in_window(window)
        where = xp.flatnonzero(inside) + first  # synchronize!
        _, indices, indptr = self._blocks
        rows = self._backend.expand(indptr, len(indices))[where] - top
        cols = indices[where] - left
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
            value = dense_of(self._backend, value)
        elif backend is self._backend and not isinstance(value, np.generic):
            value = adopted(self._backend, value, name)
        else:
            value = np.asarray(value)
        if value.dtype.kind not in "biufcV":  # a cast would make numbers of strings and times
            raise TypeError(f"{name}: wanted numbers, got {value.dtype}")
        if not self._backend.is_dense(value):
            value = self._backend.from_host(value)
        if value.dtype.kind == "c" and self.dtype.kind != "c":
            raise TypeError(f"{name}: cannot keep complex values in a matrix of {self.dtype}")
        check_cast(self._backend, value, self.dtype, name)
        return value.astype(self.dtype, copy=False)

    def assemble(self, blocks: Any, block_row: Any, block_col: Any, *, check: bool | None = None) -> Self:
        """Add blocks to the stored blocks at their positions, in place; the pattern does not change.

        Parameters
        ----------
        blocks : array_like of shape (n, R, C)
            The blocks to add. They are cast to the dtype of this matrix.
        block_row, block_col : array_like of int, of shape (n,)
            The block row and the block column of each block. Several blocks may have the same position.
        check : bool, optional
            Whether to raise an error if a block is not stored in this matrix, before anything is added. On the GPU this
            waits. By default the CPU checks and the GPU does not. Without the check such blocks are ignored.

        Returns
        -------
        bsr_array or bsr_matrix
            This matrix.

        Raises
        ------
        ValueError
            If the shapes do not fit, if a position is not stored (see `check`), or if NaN or infinity would be cast to
            an integer.
        TypeError
            If the positions are not integers, the blocks are complex and the matrix is real, or an array is on another
            device.

        See Also
        --------
        bsr_array : makes a matrix of ``(blocks, (block_row, block_col))``, with the pattern that they have.

        Notes
        -----
        Use it to fill a matrix again and again, in finite elements or in each step in time: set ``A.data[...] = 0``
        first. The blocks of a position are added in the order in which they are given, so the result is the same bit by
        bit each time. 16-bit floats are summed in float32 and rounded once.

        The pattern is not sorted if the matrix is known to be in canonical format; otherwise its duplicates are added
        up first, which waits for the GPU. Apart from that, from `check`, and from a cast of floats to integers, the
        call does not wait. Positions may be on the host or on the device of the matrix.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> line = np.arange(3)  # three elements of a bar, between nodes 0, 1, 2 and 3
        >>> nodes = np.stack([line, line + 1], axis=1)
        >>> row, col = np.repeat(nodes, 2, axis=1).ravel(), np.tile(nodes, 2).ravel()
        >>> stiffness = np.tile([1.0, -1.0, -1.0, 1.0], 3).reshape(-1, 1, 1)
        >>> A = bg.bsr_array((stiffness, (row, col)), shape=(4, 4))
        >>> A.sum_duplicates()
        >>> A.data[...] = 0
        >>> A.assemble(10 * stiffness, row, col).toarray()
        array([[ 10., -10.,   0.,   0.],
               [-10.,  20., -10.,   0.],
               [  0., -10.,  20., -10.],
               [  0.,   0., -10.,  10.]])
        """
        backend = self._backend
        values = self._assignable(blocks, "blocks")
        row, col = (
            accumulate.as_numbers(self._placed(x, name), name)
            for x, name in ((block_row, "block_row"), (block_col, "block_col"))
        )
        if tuple(values.shape[1:]) != self.blocksize or values.ndim != 3:
            raise ValueError(
                f"blocks: wanted shape (n, R, C) with blocks of {self.blocksize}, got {tuple(values.shape)}"
            )
        if not len(values) == len(row) == len(col):
            raise ValueError(
                f"blocks, block_row, block_col: wanted one length, got {len(values)}, {len(row)} and {len(col)}"
            )
        self._make_canonical()
        stored = self._validated
        position = accumulate.positions(backend, stored, row, col, self._block_shape[1])
        if check or (check is None and backend is host()):
            first = accumulate.outside(backend, position, len(stored.indices))
            if first is not None:
                where = int(row[first]), int(col[first])  # synchronize!
                raise ValueError(
                    f"block_row, block_col: entry {first} is block {where}, which is not stored; the pattern does not "
                    "change. Store it first, or build the matrix from (blocks, (block_row, block_col))"
                )
        self._before_writing()
        if backend is host() and np.may_share_memory(values, self.data):
            values = values.copy()
        accumulate.add(backend, self.data, values, position)
        return self

    def _placed(self, x: Any, name: str) -> Array:
        """Return block numbers as an array of this backend; those on the host are copied to the GPU."""
        source = backend_of(x) or foreign_backend(x)
        if source is self._backend and not isinstance(x, np.generic):
            return self._backend.adopt(x)
        if source is not None and source is not host():
            raise elsewhere(x, name, self._backend)
        array = np.asarray(x)
        return self._backend.from_host(array.astype(_INDEX64) if not array.size else array)

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
        M, N = self._shape
        k = check_integer(k, "k")
        loops = self._backend.loops
        if loops is not None and -M < k < N:
            found: Array | None = loops.diagonal(self._validated, self._shape, k)
            if found is not None:
                return found
        xp = self._backend.xp
        if k <= -M or k >= N:
            return xp.empty(0, self.dtype)
        out = xp.zeros(min(M + min(k, 0), N - max(k, 0)), self.dtype)
        blocks, (R, C) = self._canonical(), self.blocksize
        if loops is not None and R == C:
            beside: Array = loops.diagonal_beside(blocks, self._block_shape, k)
            return beside[max(0, -k) :][: len(out)]
        rows = self._backend.expand(blocks.indptr, len(blocks.indices)).astype(np.int64, copy=False)
        shift = blocks.indices.astype(np.int64, copy=False) * C - rows * R
        crossing = xp.flatnonzero((shift - (R - 1) <= k) & (k <= shift + C - 1))  # synchronize!
        r, c = xp.arange(R)[:, None], xp.arange(C)
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
        return self.diagonal(k=check_integer(offset, "offset")).sum()

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
        On the CPU the values are written into `data`, if all blocks of the diagonal are stored; otherwise the matrix
        gets new arrays.

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
        k = check_integer(k, "k")
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
        R, C = self.blocksize
        wanted = (row // R) * self._block_shape[1] + col // C
        if backend.loops is not None:
            blocks = self._canonical()
            crossed = structure.first_of_runs(backend, wanted)
            at = backend.loops.positions(blocks, self._block_shape[1], row[crossed] // R, col[crossed] // C)
            if bool((at >= 0).all()):  # all blocks on the diagonal are stored
                block = np.repeat(at, np.diff(crossed, append=n))
                if blocks.data is not self.data or not self.data.flags.writeable:
                    self._replace(blocks._replace(data=blocks.data.copy()))
                elif np.may_share_memory(values, self.data):
                    values = values.copy()
                self._before_writing()
                self.data[block, row % R, col % C] = values
                self.has_canonical_format = True
                return
        touched = structure.from_coo(
            backend, row, col, xp.ones(n, self.dtype), self._shape, self.blocksize, self.indices.dtype, unique=True
        )
        data, _, indices, indptr = structure.align(backend, self._canonical(), touched, self._block_shape[1])
        keys = structure.block_keys(backend, indices, indptr, self._block_shape[1])
        block = xp.searchsorted(keys, wanted)
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
        if len(kept) == len(values) and self._backend.loops is not None:
            return self._backend.expand(indptr, len(values)), columns
        return self._backend.expand(indptr, len(values))[kept], columns[kept]
