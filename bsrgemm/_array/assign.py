"""Assignment to stored blocks, and diagonals."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from .._backend import structure
from .._backend.base import Array, Blocks
from .._backend.registry import adopted, backend_of, elsewhere, foreign_backend, host, host_scalar
from . import assemble
from .base import check_integer
from .construct import check_cast, dense_of
from .select import INT64, Selection


class Assignment(Selection):
    """What is written into a matrix: windows, blocks that are added, and diagonals, which are read here too."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write a number, a dense array or a sparse matrix to stored blocks, in place.

        The slices must lie on block boundaries. Assignment does not change the pattern: a value other than zero at a
        position without a stored block raises ValueError. Duplicates of this matrix are added up first. Waits for the
        GPU.
        """
        top, bottom, left, right = self._window(key)
        R, C = self.blocksize
        shape = ((bottom - top) * R, (right - left) * C)
        xp = self._backend.xp
        self._make_canonical()
        (_, indices, indptr), own = self._blocks, self._in_rows(top, bottom)
        inside = (indices[own] >= left) & (indices[own] < right)
        where = self._backend.flatnonzero(inside) + own.start  # synchronize!
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
            assemble.as_numbers(self._placed(x, name), name)
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
        position = assemble.positions(backend, stored, row, col, self._block_shape[1])
        if check or (check is None and backend is host()):
            first = assemble.outside(backend, position, len(stored.indices))
            if first is not None:
                where = int(row[first]), int(col[first])  # synchronize!
                raise ValueError(
                    f"block_row, block_col: entry {first} is block {where}, which is not stored; the pattern does not "
                    "change. Store it first, or build the matrix from (blocks, (block_row, block_col))"
                )
        self._before_writing()
        if backend is host() and np.may_share_memory(values, self.data):
            values = values.copy()
        assemble.add(backend, self.data, values, position)
        return self

    def _placed(self, x: Any, name: str) -> Array:
        """Return block numbers as an array of this backend; those on the host are copied to the GPU."""
        source = backend_of(x) or foreign_backend(x)
        if source is self._backend and not isinstance(x, np.generic):
            return self._backend.adopt(x)
        if source is not None and source is not host():
            raise elsewhere(x, name, self._backend)
        array = np.asarray(x)
        return self._backend.from_host(array.astype(INT64) if not array.size else array)

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
        The call does not wait for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.arange(8.0).reshape(2, 4), blocksize=(1, 2))
        >>> A.diagonal(), A.diagonal(k=2)
        (array([0., 5.]), array([2., 7.]))
        """
        (M, N), k = self._shape, check_integer(k, "k")
        count = min(M + min(k, 0), N - max(k, 0))
        if count <= 0 or not -M < k < N:
            return self._backend.xp.empty(0, self.dtype)
        blocks = self._validated
        return self._backend.diagonal(blocks, N // blocks.data.shape[2], k, count, self._known_canonical)

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
        The call does not wait for the GPU.

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
        The values are written into `data` if all blocks of the diagonal are stored; otherwise the matrix gets new
        arrays.

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
        values = values if values.ndim == 0 else values[:n]
        blocks, block_cols = self._canonical(), self._block_shape[1]
        if blocks.data is not self.data or not getattr(self.data.flags, "writeable", True):
            self._hand_out()
            self._replace(blocks._replace(data=blocks.data.copy()))
            blocks = self._blocks
        elif values.ndim and backend.overlap(values, self.data):
            values = values.copy()
        self._before_writing()
        if not backend.set_diagonal(blocks, block_cols, k, values, n):
            (row, col), index = structure.diagonal_places(backend, k, n), blocks.indices.dtype
            R, C = self.blocksize
            keys = (row // R) * block_cols + col // C
            keys = keys[structure.first_of_runs(backend, keys)]  # synchronize!
            none = xp.zeros((len(keys), R, C), self.dtype)
            touched = Blocks(none, *structure.keys_to_index(backend, keys, M // R, block_cols, index))
            data, _, indices, indptr = structure.align(backend, blocks, touched, block_cols)
            blocks = Blocks(data, indices.astype(index, copy=False), indptr.astype(index, copy=False))
            backend.set_diagonal(blocks, block_cols, k, values, n)
            self._replace(blocks)
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
        kept = self._backend.flatnonzero(values)  # synchronize!
        if len(kept) == len(values) and self._backend.loops is not None:
            return self._backend.expand(indptr, len(values)), columns
        return self._backend.expand(indptr, len(values))[kept], columns[kept]
