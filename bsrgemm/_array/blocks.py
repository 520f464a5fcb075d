"""The blocks on the diagonal as small dense matrices, and their inverses."""

from __future__ import annotations

from contextlib import suppress
from typing import Self

import numpy as np

from .._backend.base import Array, Blocks
from ..dtypes import accumulator_dtype
from .convert import Conversions


class BlockTools(Conversions):
    """Methods for the blocks on the diagonal, which solvers and preconditioners use."""

    # ---------------------------------------------------------------------------------- diagonal
    def block_diagonal(self) -> Array:
        """Return the blocks on the diagonal of a matrix with square blocks.

        Returns
        -------
        array of shape (n, R, R)
            ``out[i]`` is block (i, i), in the dtype of this matrix; it is zero if that block is not stored.
            Duplicates are added up. n is the smaller of the numbers of block rows and block columns.

        Raises
        ------
        ValueError
            If the blocks are not square.

        Notes
        -----
        The call does not wait for the GPU. For a transpose the arrays of the original matrix are read.

        Examples
        --------
        >>> import bsrgemm as bg, numpy as np
        >>> A = bg.bsr_array(np.arange(16.0).reshape(4, 4), blocksize=(2, 2))
        >>> A.block_diagonal()
        array([[[ 0.,  1.],
                [ 4.,  5.]],
        <BLANKLINE>
               [[10., 11.],
                [14., 15.]]])
        """
        return self._diagonal_blocks("block_diagonal")[0]

    def _diagonal_blocks(self, what: str) -> tuple[Array, Array]:
        """Return the blocks on the diagonal, and for each of them whether it is stored."""
        R, C = self.blocksize
        if R != C:
            raise ValueError(f"{what}: wanted square blocks, got blocksize={(R, C)}")
        A, transposed = self._source()
        return self._backend.diagonal_blocks(A._validated, min(self._block_shape), A._known_canonical, transposed)

    def inverse_block_diagonal(self) -> Self:
        """Invert the blocks on the diagonal; the block-diagonal result is the block-Jacobi preconditioner.

        Returns
        -------
        bsr_array or bsr_matrix
            A matrix of the same class on the same device, with the shape of the transpose. Integers and booleans give
            float64. 16-bit floats are inverted in float32 and rounded, which may overflow.

        Raises
        ------
        ValueError
            If the blocks are not square.
        TypeError
            If the dtype is a long double, which NumPy cannot invert.
        numpy.linalg.LinAlgError
            If a block is missing or singular; the message names the index of the first one. A block counts as singular
            if a pivot of its LU decomposition is exactly 0, as in `numpy.linalg.inv`, or if all its elements are finite
            and its inverse is not. A block with NaN has an inverse with NaN and raises no error.

        Notes
        -----
        Waits for the GPU, because singular blocks could not be reported otherwise.

        Examples
        --------
        >>> import bsrgemm as bg, numpy as np
        >>> A = bg.bsr_array(np.array([[2.0, 1, 0, 7], [0, 1, 0, 0], [0, 0, 4, 0], [5, 0, 0, 8]]), blocksize=(2, 2))
        >>> A.inverse_block_diagonal().toarray()
        array([[ 0.5  , -0.5  ,  0.   ,  0.   ],
               [ 0.   ,  1.   ,  0.   ,  0.   ],
               [ 0.   ,  0.   ,  0.25 ,  0.   ],
               [ 0.   ,  0.   ,  0.   ,  0.125]])
        >>> A[:2, 2:].inverse_block_diagonal()
        Traceback (most recent call last):
            ...
        numpy.linalg.LinAlgError: inverse_block_diagonal: diagonal block 0 is singular
        """
        return self._inverse_of_diagonal("inverse_block_diagonal")

    def _inverse_of_diagonal(self, what: str, finite: bool = False) -> Self:
        """Invert the blocks on the diagonal; with `finite`, a block with NaN or infinity raises ValueError."""
        own = self.dtype
        if own.char in "gG":
            raise TypeError(f"{what}: {own} cannot be inverted; cast first, for example A.astype('float64')")
        dtype = np.dtype(np.float64) if own.kind in "biu" else own
        diagonal, stored = self._diagonal_blocks(what)
        diagonal = diagonal.astype(accumulator_dtype(dtype), copy=False)
        xp = self._backend.xp
        inverse = None
        with np.errstate(all="ignore"), suppress(np.linalg.LinAlgError):
            if xp is np:
                single = diagonal.shape[1] == 1 and diagonal.dtype.kind == "f" and bool(diagonal.all())
                inverse = 1 / diagonal if single else np.linalg.inv(diagonal)
        if inverse is None:
            # numpy.linalg.inv raises without the index of the block, and cupy.linalg.inv does not raise. The sign of
            # the determinant is 0 if a pivot of the same LU decomposition is 0.
            with np.errstate(all="ignore"):
                sign, _ = xp.linalg.slogdet(diagonal)
            first = self._first(sign == 0)
            if first is not None:
                state = "singular" if bool(stored[first]) else "missing: no block is stored there"  # synchronize!
                raise np.linalg.LinAlgError(f"{what}: diagonal block {first} is {state}")
            with np.errstate(all="ignore"):
                inverse = xp.linalg.inv(diagonal)
        given = xp.isfinite(diagonal).all(axis=(1, 2))
        wrong = given & ~xp.isfinite(inverse).all(axis=(1, 2))
        first = self._first(wrong | ~given if finite else wrong)
        if first is not None and not bool(given[first]):  # synchronize!
            raise ValueError(f"{what}: wanted finite numbers, got NaN or infinity in diagonal block {first}")
        if first is not None:
            raise np.linalg.LinAlgError(
                f"{what}: diagonal block {first} is singular in {diagonal.dtype}: its inverse is not finite"
            )
        index = self._source()[0].indices.dtype
        indptr = xp.minimum(xp.arange(self._block_shape[1] + 1, dtype=index), len(inverse))
        blocks = Blocks(inverse.astype(dtype, copy=False), xp.arange(len(inverse), dtype=index), indptr)
        return self._new(blocks, self._shape[::-1], canonical=True)

    def _first(self, found: Array) -> int | None:
        """Return the first index at which a boolean vector is true, or None."""
        places = self._backend.flatnonzero(found)  # synchronize!
        return int(places[0]) if len(places) else None
