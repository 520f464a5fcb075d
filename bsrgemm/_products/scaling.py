"""Methods that multiply the block rows or the block columns of a matrix by factors."""

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
    """The methods `scale_block_rows` and `scale_block_cols` of BSR matrices."""

    def scale_block_rows(self, D: Any) -> Self:
        """Return the matrix with every block of block row i multiplied by ``D[i]`` from the left.

        Parameters
        ----------
        D : array of shape (n,), (n, R) or (n, R, R)
            A factor for each of the n block rows, whose blocks have R rows: a number, the diagonal of a matrix, or a
            matrix. It is on the same device as this matrix and has a dtype that BSR matrices support.

        Returns
        -------
        bsr_array or bsr_matrix
            A new matrix with the same pattern, in the dtype to which NumPy promotes both dtypes. 16-bit floats are
            summed in float32. If this matrix is a transpose whose arrays are not built yet, so is the result.

        Raises
        ------
        TypeError
            If `D` is not a dense array on the same device as this matrix, or has a dtype that is not supported.
        ValueError
            If `D` has none of the shapes above.

        Notes
        -----
        The blocks are multiplied as they are stored, and duplicate blocks stay. Duplicates are summed first only if
        this matrix holds integers or booleans and the result has another dtype; the search for them waits for the GPU,
        unless the matrix is known to be in canonical format. In all other cases the call does not wait for the GPU.

        Examples
        --------
        Block-Jacobi scaling turns the blocks on the diagonal into identity matrices:

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
        """Return the matrix with every block of block column j multiplied by ``D[j]`` from the right.

        Parameters
        ----------
        D : array of shape (n,), (n, C) or (n, C, C)
            A factor for each of the n block columns, whose blocks have C columns: a number, the diagonal of a matrix,
            or a matrix. It is on the same device as this matrix and has a dtype that BSR matrices support.

        Returns
        -------
        bsr_array or bsr_matrix
            A new matrix with the same pattern, in the dtype to which NumPy promotes both dtypes. 16-bit floats are
            summed in float32. If this matrix is a transpose whose arrays are not built yet, so is the result.

        Raises
        ------
        TypeError
            If `D` is not a dense array on the same device as this matrix, or has a dtype that is not supported.
        ValueError
            If `D` has none of the shapes above.

        See Also
        --------
        scale_block_rows : multiplication from the left. Its notes, on duplicates and waiting, hold for both methods.

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
        """Return D as an array of this backend, after checking that its shape and dtype suit the blocks."""
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
        single = factor.ndim == 3 and data.shape[1:] == (1, 1) and data.dtype == factor.dtype
        if single and xp is np and dtype.char in "fdFD":
            products = factor.reshape(-1).take(line) * data.reshape(-1)
            products += 0  # a sum of products has no -0
            return A._with_data(products.reshape(-1, 1, 1))
        if factor.ndim == 3:
            block = xp.arange(len(data), dtype=np.int64)
            line = line.astype(np.int64, copy=False)
            factors = (factor, line, data, block) if rows else (data, block, factor, line)
            return A._with_data(ENGINES.of(backend).pair_products(*factors, block, dtype))
        factor = (factor[:, None] if factor.ndim == 1 else factor)[line]
        factor = factor[:, :, None] if rows else factor[:, None, :]
        return A._with_data(operator.mul(*self._promoted(data, factor)))
