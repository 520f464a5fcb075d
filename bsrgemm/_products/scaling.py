"""Factors of block rows and block columns."""

from __future__ import annotations

import operator
from typing import Any, Self

import numpy as np

from .._array.convert import Conversions
from .._backend.base import Array
from ..dtypes import check_dtype, result_dtype
from .engine import ENGINES
from .matmul import for_product


class BlockScaling(Conversions):
    """Block rows and block columns times a factor for each."""

    def scale_block_rows(self, D: Any) -> Self:
        """``D[i] @ block`` for every block of block row i.

        Parameters
        ----------
        D : array of shape (n,), (n, R) or (n, R, R)
            For each of the n block rows, whose blocks have R rows: a number, the diagonal of a factor, or a factor.

        Returns
        -------
        bsr_array or bsr_matrix
            A new matrix with the same pattern, in the dtype to which NumPy promotes the two; 16-bit floats are summed
            in float32. Of a transpose that is not built yet it is another one.

        Notes
        -----
        The blocks are multiplied as they are stored. Only integers and booleans that become another dtype have their
        duplicates added up first.

        Examples
        --------
        Block-Jacobi scaling: the blocks on the diagonal become the identity.

        >>> import bsrgemm as bg, numpy as np
        >>> A = bg.bsr_array(np.array([[2.0, 1, 6, 0], [0, 1, 0, 0], [0, 0, 4, 0], [8, 0, 0, 8]]), blocksize=(2, 2))
        >>> A.scale_block_rows(A.inverse_block_diagonal().data).toarray()
        array([[1., 0., 3., 0.],
               [0., 1., 0., 0.],
               [0., 0., 1., 0.],
               [1., 0., 0., 1.]])
        >>> A.scale_block_rows([1, 10]).toarray()
        array([[ 2.,  1.,  6.,  0.],
               [ 0.,  1.,  0.,  0.],
               [ 0.,  0., 40.,  0.],
               [80.,  0.,  0., 80.]])
        """
        return self._scale_blocks(D, rows=True)

    def scale_block_cols(self, D: Any) -> Self:
        """``block @ D[j]`` for every block of block column j.

        Parameters
        ----------
        D : array of shape (n,), (n, C) or (n, C, C)
            For each of the n block columns, whose blocks have C columns: a number, the diagonal of a factor, or a
            factor.

        Returns
        -------
        bsr_array or bsr_matrix
            A new matrix with the same pattern, in the dtype to which NumPy promotes the two; 16-bit floats are summed
            in float32. Of a transpose that is not built yet it is another one.

        See Also
        --------
        scale_block_rows : the same from the left, with notes that hold for both.

        Examples
        --------
        >>> import bsrgemm as bg, numpy as np
        >>> A = bg.bsr_array(np.ones((2, 6)), blocksize=(2, 3))
        >>> A.scale_block_cols([[1, 2, 3], [4, 5, 6]]).toarray()
        array([[1., 2., 3., 4., 5., 6.],
               [1., 2., 3., 4., 5., 6.]])
        """
        return self._scale_blocks(D, rows=False)

    def _scale_blocks(self, D: Any, rows: bool) -> Self:
        factor = self._block_factor(D, rows)
        A, transposed = self._source()
        if not transposed:
            return A._times_factor(factor, rows)
        if factor.ndim == 3:
            factor = factor.transpose(0, 2, 1)
        return A._times_factor(factor, not rows)._transposed()

    def _block_factor(self, D: Any, rows: bool) -> Array:
        """D as an array of this backend, of a shape and a dtype that go with the block rows, or block columns."""
        factor = self._operand(D, "D")
        if factor is None or self._backend.is_sparse(factor):
            raise TypeError(f"D: wanted a dense array on {self._backend.name!r}, got {type(D).__name__}")
        dtype = check_dtype(factor.dtype, self._backend.dtypes, "D")
        if isinstance(factor, np.ndarray):
            factor = factor.view(np.ndarray)
        side = 0 if rows else 1
        n, length = self._block_shape[side], self.blocksize[side]
        if tuple(factor.shape) not in ((n,), (n, length), (n, length, length)):
            lines = "rows" if rows else "columns"
            raise ValueError(
                f"D: wanted shape {(n,)}, {(n, length)} or {(n, length, length)} for {n} block {lines} of {length} "
                f"{lines}, got {tuple(factor.shape)}"
            )
        return factor.astype(dtype, copy=False)

    def _times_factor(self, factor: Array, rows: bool) -> Self:
        backend, xp = self._backend, self._backend.xp
        dtype = result_dtype(self.dtype, factor.dtype)
        A = for_product(self, dtype)
        data, indices, indptr = A._validated
        line = backend.expand(indptr, len(indices)) if rows else indices
        if factor.ndim == 3:
            block = xp.arange(len(data), dtype=np.int64)
            line = line.astype(np.int64, copy=False)
            factors = (factor, line, data, block) if rows else (data, block, factor, line)
            return A._with_data(ENGINES.of(backend).pair_products(*factors, block, dtype))
        factor = (factor[:, None] if factor.ndim == 1 else factor)[line]
        factor = factor[:, :, None] if rows else factor[:, None, :]
        return A._with_data(operator.mul(*self._promoted(data, factor)))
