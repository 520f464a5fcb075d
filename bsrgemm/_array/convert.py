"""To other formats, other block sizes, other dtypes, dense, and back."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np

from .._backend import structure
from .._backend.base import Array
from .._backend.registry import host
from ..dtypes import BOOL, check_dtype
from .base import BsrBase
from .construct import Parts, check_blocksize, check_cast, from_sparse, reblock

_INDEX64 = np.dtype(np.int64)
_FORMATS = ("bsr", "csr", "csc", "coo", "dia", "lil", "dok", "array", "dense")


class Conversions(BsrBase):
    """Conversions, and what other parts of the class ask of them."""

    # ------------------------------------------------------------------------------ other formats
    def _other_class(self, format: str) -> Any:
        """The class of another format in this backend's sparse module; TypeError if it cannot hold us."""
        name = f"{format}_{'array' if self._is_array else 'matrix'}"
        cls = getattr(self._backend.sparse, name, None)
        if cls is None:
            raise NotImplementedError(
                f"to{format}: {self._backend.sparse.__name__} has no {name}; copy to the host: A.get().to{format}()"
            )
        return cls

    def _foreign(self, format: str, arrays: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A matrix of another format around `arrays`."""
        if dtype not in self._backend.foreign_dtypes:
            wider = "float32" if dtype.itemsize <= 2 else "float64"
            elsewhere = "" if self._backend is host() else ", or copy to the host: A.get()"
            raise TypeError(
                f"{format}: {self._backend.sparse.__name__} does not hold {dtype}; "
                f"cast first, for example A.astype('{wider}'){elsewhere}"
            )
        return self._other_class(format)(arrays, shape=shape)

    def _element_index(self, *maxvals: int) -> np.dtype[Any]:
        return structure.index_dtype(max(*self._shape, *maxvals, 0), self.indices, self.indptr)

    def tocoo(self, copy: bool = True) -> Any:
        """Coordinate format: every element of every stored block. ``copy=False`` shares the values."""
        row, col = structure.to_coo(self._backend, self._validated, structure.index_dtype(max(*self._shape, 0)))
        values = self.data.reshape(-1)
        return self._foreign("coo", (values.copy() if copy else values, (row, col)), self._shape, self.dtype)

    def tocsr(self, copy: bool = False) -> Any:
        """Compressed Sparse Row format, with arrays of its own."""
        values, columns, indptr = self._backend.to_csr(
            self._validated, self._block_shape[1], self._element_index(self.nnz)
        )
        if self.blocksize[0] == 1:  # storage order is row order: the values are still ours
            values = values.copy()
        return self._foreign("csr", (values, columns, indptr), self._shape, self.dtype)

    def tocsc(self, copy: bool = False) -> Any:
        """Compressed Sparse Column format."""
        return self.tocsr().tocsc()

    def todia(self, copy: bool = False) -> Any:
        """DIAgonal format."""
        xp = self._backend.xp
        values, columns, indptr = self._elements()
        shift = columns.astype(np.int64, copy=False) - self._backend.expand(indptr, len(values))
        offsets = xp.sort(shift)
        offsets = offsets[structure.first_of_runs(self._backend, offsets)]
        data = xp.zeros((len(offsets), self._shape[1]), self.dtype)
        data[xp.searchsorted(offsets, shift), columns] = values
        offsets = offsets.astype(structure.index_dtype(max(*self._shape, 0)), copy=False)
        return self._foreign("dia", (data, offsets), self._shape, self.dtype)

    def tolil(self, copy: bool = False) -> Any:
        """List of Lists format (host only)."""
        self._other_class("lil")
        return self.tocsr().tolil()

    def todok(self, copy: bool = False) -> Any:
        """Dictionary Of Keys format (host only)."""
        self._other_class("dok")
        return self.tocoo(copy=False).todok()

    def tobsr(self, blocksize: tuple[int, int] | None = None, copy: bool = False) -> Self:
        """This matrix, or the same in blocks of another size."""
        blocksize = self.blocksize if blocksize is None else check_blocksize(blocksize, self._shape)
        if blocksize == self.blocksize:
            return self.copy() if copy else self
        parts = reblock(self._backend, Parts(self._validated, self._shape, self.has_canonical_format), blocksize)
        return self._new(parts.blocks, canonical=True)

    def asformat(self, format: str | None, copy: bool = False) -> Any:
        """This matrix in the format named "bsr", "csr", "coo"..."""
        if format is None or format == "bsr":
            return self.copy() if copy else self
        if format not in _FORMATS:
            raise ValueError(f"format: {format!r} is unknown, wanted one of {', '.join(_FORMATS)}")
        convert = getattr(self, f"to{format}")
        return convert() if format in ("array", "dense") else convert(copy=copy)

    # --------------------------------------------------------------------------------------- dense
    def toarray(self, order: str | None = None, out: Array | None = None) -> Array:
        """A dense array with the same values.

        Parameters
        ----------
        order : {'C', 'F'}, optional
            Memory order of the result; not together with `out`.
        out : array, optional
            Array of the same shape, dtype and backend to write into.
        """
        xp = self._backend.xp
        if out is None:
            out = xp.zeros(self._shape, self.dtype, order=order or "C")
        else:
            if order is not None:
                raise ValueError("order cannot be specified if out is not None")
            if not self._backend.is_dense(out):
                raise TypeError(f"out: wanted an array on {self._backend.name!r}, got {type(out).__name__}")
            if tuple(out.shape) != self._shape or out.dtype != self.dtype:
                raise ValueError(
                    f"out: array must be same dtype and shape as sparse array: wanted {self.dtype} {self._shape}, "
                    f"got {out.dtype} {tuple(out.shape)}"
                )
            out[...] = 0
        view = out.view(np.ndarray) if isinstance(out, np.ndarray) else out
        structure.add_to_dense(self._backend, self._canonical(), view)
        return out

    def todense(self, order: str | None = None, out: Array | None = None) -> Array:
        """`toarray`, as an ndarray (bsr_array) or np.matrix (bsr_matrix on the host)."""
        return self._container(self.toarray(order=order, out=out))

    def _container(self, x: Array) -> Array:
        """Dense results in the form that this class hands out."""
        return x

    # ----------------------------------------------------------------------------- dtype, values
    def astype(self, dtype: Any, casting: Any = "unsafe", copy: bool = True) -> Self:
        """The same matrix in another dtype. Duplicates are added up before the cast."""
        wanted = check_dtype(dtype, self._backend.dtypes)
        if wanted == self.dtype:
            return self.copy() if copy else self
        if not np.can_cast(self.dtype, wanted, casting):
            raise TypeError(f"dtype: cannot cast from {self.dtype} to {wanted} according to the rule {casting!r}")
        self.sum_duplicates()
        check_cast(self._backend, self.data, wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
            data = self.data != 0 if wanted == BOOL else self._real_if(wanted).astype(wanted)
        return self._with_data(data)

    def _real_if(self, wanted: np.dtype[Any]) -> Array:
        return self.data.real if self.dtype.kind == "c" and wanted.kind != "c" else self.data

    @property
    def real(self) -> Self:
        """Real part."""
        return self._with_data(self.data.real if self.dtype.kind == "c" else self.data.copy())

    @property
    def imag(self) -> Self:
        """Imaginary part."""
        return self._with_data(self.data.imag if self.dtype.kind == "c" else self._backend.xp.zeros_like(self.data))

    def conjugate(self, copy: bool = True) -> Self:
        """Complex conjugate."""
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

    # ------------------------------------------------------------------------------------- shape
    def transpose(self, axes: tuple[int, int] | None = None, copy: bool = False) -> Self:
        """Rows and columns exchanged: BSR with blocks (C, R), sorted.

        Nothing is copied yet: products with dense arrays read this matrix as it lies, and the transpose builds
        arrays of its own when one of them is first asked for or assigned.

        Parameters
        ----------
        axes : (1, 0), optional
            The one permutation there is.
        copy : bool
            Build the arrays now.

        Returns
        -------
        bsr_array or bsr_matrix

        Notes
        -----
        Until its arrays are built the transpose takes its values from the arrays that this matrix had when it was
        transposed. What is written into ``A.data[...]`` meanwhile, or by another matrix that shares that array,
        shows in it; what this matrix's own operators and methods change (``A *= 2``, ``A[:2] = 0``, sorting, a new
        ``A.data``) does not. The transpose of a transpose that is not built yet shares the arrays of the first matrix.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.arange(8.0).reshape(2, 4), blocksize=(1, 2))
        >>> A.T @ np.array([1.0, 1.0])
        array([ 4.,  6.,  8., 10.])
        >>> A.T.blocksize, A.T.T.data is A.data
        ((2, 1), True)
        """
        if axes is not None and axes != (1, 0):
            raise ValueError(f"axes: swapping dimensions is the only logical permutation, got {axes!r}")
        T = self._transposed()
        return T.copy() if copy else T

    @property
    def T(self) -> Self:
        """Transpose; nothing is copied until its arrays are asked for. See `transpose`."""
        return self._transposed()

    @property
    def mT(self) -> Self:
        """Matrix transpose; the same as `T`."""
        return self._transposed()

    @property
    def H(self) -> Self:
        """Conjugate transpose; nothing is copied for real dtypes until its arrays are asked for."""
        return (self.conjugate() if self.dtype.kind == "c" else self)._transposed()

    def reshape(self, *shape: Any, order: str = "C", copy: bool = False) -> Any:
        """Another shape with the same elements: this matrix if it is the same, otherwise COO."""
        if order not in ("C", "F"):
            raise ValueError(f"order: wanted 'C' or 'F', got {order!r}")
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int | np.integer) else shape
        M, N = self._shape
        wanted = full_shape(tuple(wanted), M * N)
        if not self._is_array and len(wanted) != 2:
            raise ValueError(f"shape: matrix must have 2 dimensions, got {wanted}")
        if wanted == self._shape:
            return self.copy() if copy else self
        index = structure.index_dtype(max(*wanted, 0))
        coords = tuple(x.astype(index, copy=False) for x in self._coords_in(wanted, order))
        values = self.data.reshape(-1)
        return self._foreign("coo", (values.copy() if copy else values, coords), wanted, self.dtype)

    def _coords_in(self, shape: tuple[int, ...], order: str) -> tuple[Array, ...]:
        """Coordinates of every stored element in a matrix of another shape."""
        M, N = self._shape
        row, col = structure.to_coo(self._backend, self._validated, _INDEX64)
        return _unravel(row * N + col if order == "C" else col * M + row, shape, order)

    def _elements(self) -> tuple[Array, Array, Array]:
        """Sorted CSR arrays without duplicates: (values, columns, indptr)."""
        blocks = self._canonical()
        return self._backend.to_csr(blocks, self._block_shape[1], self._element_index(blocks.data.size))

    def _csr_where(self, keep: Array, values: Array, columns: Array, indptr: Array) -> Any:
        """CSR of the elements where `keep` is true."""
        xp = self._backend.xp
        kept = xp.flatnonzero(keep)  # synchronize!
        before = xp.concatenate([xp.zeros(1, indptr.dtype), xp.cumsum(keep, dtype=indptr.dtype)])
        return self._foreign("csr", (values[kept], columns[kept], before[indptr]), self._shape, values.dtype)

    def _from_full(self, X: Array, blocksize: tuple[int, int]) -> Self:
        """A matrix of this class from a dense array of the same backend."""
        index = structure.index_dtype(max(*X.shape, 1))
        return self._new(structure.from_dense(self._backend, X, blocksize, index), tuple(X.shape), canonical=True)

    def _coerce(self, other: Any) -> Self:
        """Another sparse matrix of this backend and shape, in this matrix's blocks, without duplicates."""
        if not isinstance(other, BsrBase):
            parts = from_sparse(self._backend, other, None, False, self.blocksize)
            return self._new(parts.blocks, parts.shape, canonical=parts.canonical)
        same = other if isinstance(other, type(self)) else self._new(other._blocks, other._shape)
        return same.tobsr(self.blocksize)


def full_shape(shape: tuple[Any, ...], size: int) -> tuple[int, ...]:
    """`shape` with a single -1 replaced; ValueError if it does not hold `size` elements."""
    try:
        sides = [int(n.__index__()) for n in shape]
    except (AttributeError, TypeError):
        raise TypeError(f"shape: wanted integers, got {shape!r}") from None
    unknown = [k for k, n in enumerate(sides) if n < 0]
    if len(unknown) > 1:
        raise ValueError("can only specify one unknown dimension")
    if unknown:
        known = int(np.prod([n for n in sides if n >= 0], dtype=object)) if len(sides) > 1 else 1
        if known == 0 or size % known:
            raise ValueError(f"cannot reshape array of size {size} into shape {shape}")
        sides[unknown[0]] = size // known
    if not sides or int(np.prod(sides, dtype=object)) != size:
        raise ValueError(f"cannot reshape array of size {size} into shape {tuple(sides)}")
    return tuple(sides)


def _unravel(flat: Array, shape: tuple[int, ...], order: str) -> tuple[Array, ...]:
    """Coordinates of flat indices."""
    coords = []
    sides = shape if order == "F" else shape[::-1]
    for side in sides:
        coords.append(flat % max(side, 1))
        flat = flat // max(side, 1)
    return tuple(coords if order == "F" else coords[::-1])
