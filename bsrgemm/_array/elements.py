"""The elements cast to another dtype, conjugated or transposed: their pattern stays, or is transposed too."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from .._backend.base import Array
from ..dtypes import BOOL, check_dtype
from .base import BsrBase
from .construct import check_cast


class Elements(BsrBase):
    """Methods of the matrix classes that keep the blocks: dtypes, parts of complex numbers, and the transpose."""

    # ----------------------------------------------------------------------------- dtype, values
    def astype(self, dtype: Any, casting: Any = "unsafe", copy: bool = True) -> Self:
        """Cast the elements to another dtype.

        Parameters
        ----------
        dtype : dtype
            The new dtype; see `bsr_array` for the dtypes that a matrix may have.
        casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}
            Which casts are allowed, as in `numpy.can_cast`.
        copy : bool
            With False this matrix itself is returned if it has that dtype already.

        Returns
        -------
        bsr_array or bsr_matrix
            The same pattern with arrays of its own. Complex numbers lose their imaginary part in a cast to real ones.

        Raises
        ------
        TypeError
            If a matrix cannot have this dtype, or if `casting` does not allow the cast.
        ValueError
            If NaN or infinity would be cast to an integer.

        Notes
        -----
        A change of dtype first adds up the duplicates of this matrix, in place. On the GPU this waits if the matrix is
        not yet known to be in canonical format. A cast from floats to integers always waits.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.5, 2.5]]), blocksize=(1, 2))
        >>> A.astype("int32").toarray()
        array([[1, 2]], dtype=int32)
        """
        wanted = check_dtype(dtype, self._backend.dtypes)
        if wanted == self.dtype:
            return self.copy() if copy else self
        if not np.can_cast(self.dtype, wanted, casting):
            raise TypeError(f"dtype: cannot cast from {self.dtype} to {wanted} according to the rule {casting!r}")
        self._make_canonical()
        check_cast(self._backend, self.data, wanted)
        return self._with_data(self.data != 0 if wanted == BOOL else self._real_if(wanted).astype(wanted))

    def _real_if(self, wanted: np.dtype[Any]) -> Array:
        return self.data.real if self.dtype.kind == "c" and wanted.kind != "c" else self.data

    @property
    def real(self) -> Self:
        """The real part, as a matrix with the same pattern and arrays of its own."""
        return self._with_data(self.data.real.copy() if self.dtype.kind == "c" else self.data.copy())

    @property
    def imag(self) -> Self:
        """The imaginary part, as a matrix with the same pattern and arrays of its own; zeros if the dtype is real."""
        xp = self._backend.xp
        return self._with_data(self.data.imag.copy() if self.dtype.kind == "c" else xp.zeros_like(self.data))

    def conjugate(self, copy: bool = True) -> Self:
        """Return the complex conjugate.

        Parameters
        ----------
        copy : bool
            With False a real matrix returns itself, and a complex one shares its index arrays with the result.

        Returns
        -------
        bsr_array or bsr_matrix

        Notes
        -----
        The call does not wait for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1 + 2j, 3]]), blocksize=(1, 2))
        >>> A.conjugate().toarray()
        array([[1.-2.j, 3.+0.j]])
        """
        if self.dtype.kind == "c":
            return self._with_data(self.data.conj(), copy=copy)
        return self.copy() if copy else self

    conj = conjugate

    def _asfptype(self) -> Self:
        if self.dtype.char in "fdFD":
            return self
        for char in "fdFD":
            if np.can_cast(self.dtype, char):
                return self.astype(char)
        raise TypeError(f"cannot upcast [{self.dtype}] to a floating point format")

    # --------------------------------------------------------------------------------- transpose
    def transpose(self, axes: tuple[int, int] | None = None, copy: bool = False) -> Self:
        """Return the transpose, of shape (N, M), with blocks of (C, R) and sorted indices.

        The transpose does not copy anything at first. Products with dense arrays read the arrays of this matrix, and
        the transpose builds arrays of its own when one of them is first read or assigned.

        Parameters
        ----------
        axes : (1, 0), optional
            The order of the axes. No other value is allowed.
        copy : bool
            Whether to build the arrays of the transpose immediately.

        Returns
        -------
        bsr_array or bsr_matrix

        Raises
        ------
        ValueError
            If `axes` is given and is not (1, 0).

        Notes
        -----
        Until its arrays are built, the transpose reads its values from the arrays that this matrix had when it was
        transposed. If you write to ``A.data[...]`` in the meantime, or another matrix that shares this array changes
        it, the transpose changes too. It does not change if an operator or method of this matrix does (``A *= 2``,
        ``A[:2] = 0``, sorting, an assignment to ``A.data``). The transpose of a transpose that is not built yet shares
        the arrays of the first matrix. The call does not wait for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.arange(8.0).reshape(2, 4), blocksize=(1, 2))
        >>> A.T @ np.array([1.0, 1.0])
        array([ 4.,  6.,  8., 10.])
        >>> A.T.blocksize, A.T.T.data is A.data
        ((2, 1), True)
        """
        if axes is not None and (np.ndim(axes) != 1 or tuple(axes) != (1, 0)):
            raise ValueError(f"axes: swapping dimensions is the only logical permutation, got {axes!r}")
        T = self._transposed()
        return T.copy() if copy else T

    @property
    def T(self) -> Self:
        """The transpose. Nothing is copied until its arrays are read; see `transpose`."""
        return self._transposed()

    @property
    def mT(self) -> Self:
        """The matrix transpose, which is the same as `T`."""
        return self._transposed()

    @property
    def H(self) -> Self:
        """The conjugate transpose. If the dtype is real, nothing is copied until its arrays are read."""
        return (self.conjugate() if self.dtype.kind == "c" else self)._transposed()
