"""Conversion to other formats, block sizes and shapes, and to dense arrays."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from .._backend import structure
from .._backend.base import Array, Blocks
from .._backend.registry import host, target
from .base import BsrBase
from .construct import Parts, check_block_elements, check_blocksize, from_sparse, reblock
from .elements import Elements

_INDEX64 = np.dtype(np.int64)
_FORMATS = ("bsr", "csr", "csc", "coo", "dia", "lil", "dok", "array", "dense")
#: Blocks from this many elements on are transposed as blocks, which is faster than element by element.
_TURNED = 9


class Conversions(Elements):
    """Conversion methods of the matrix classes, and helpers for the other parts of these classes."""

    # ------------------------------------------------------------------------------ other formats
    def _other_class(self, format: str) -> Any:
        """Return the class of another format in this backend's sparse module; NotImplementedError if it has none."""
        name = f"{format}_{'array' if self._is_array else 'matrix'}"
        cls = getattr(self._backend.sparse, name, None)
        if cls is None:
            raise NotImplementedError(
                f"to{format}: {self._backend.sparse.__name__} has no {name}; copy to the host: A.get().to{format}()"
            )
        return cls

    def _check_foreign(self, format: str, dtype: np.dtype[Any]) -> None:
        """Raise TypeError if matrices of another format cannot have this dtype."""
        if dtype not in self._backend.foreign_dtypes:
            wider = "float32" if dtype.itemsize <= 2 else "float64"
            elsewhere = "" if self._backend is host() else ", or copy to the host: A.get()"
            raise TypeError(
                f"{format}: {self._backend.sparse.__name__} does not hold {dtype}; "
                f"cast first, for example A.astype('{wider}'){elsewhere}"
            )

    def _foreign(self, format: str, arrays: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Create a matrix of another format from `arrays`; raise TypeError if that format cannot have this dtype."""
        self._check_foreign(format, dtype)
        cls = self._other_class(format)
        return cls(arrays, shape=shape) if format == "dia" else self._backend.foreign(cls, arrays, shape)

    def _element_index(self, *maxvals: int) -> np.dtype[Any]:
        return structure.index_dtype(max(*self._shape, *maxvals, 0), *self._index)

    def tocoo(self, copy: bool = True) -> Any:
        """Convert to coordinate (COO) format, with every element of every stored block.

        Parameters
        ----------
        copy : bool
            With False the result shares its values with this matrix where that is possible.

        Returns
        -------
        coo_array or coo_matrix
            A matrix of `scipy.sparse` on the CPU, of `cupyx.scipy.sparse` on the GPU, in the dtype of this matrix.
            Zeros inside stored blocks and duplicates are kept.

        Raises
        ------
        TypeError
            If the other library does not support the dtype: float16 and bfloat16 anywhere, and integers on the GPU.

        Notes
        -----
        The call does not wait for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, 2, 0, 0], [0, 0, 0, 3]]), blocksize=(1, 2))
        >>> S = A.tocoo()
        >>> S.row.tolist(), S.col.tolist(), S.data.tolist()
        ([0, 0, 1, 1], [0, 1, 2, 3], [1.0, 2.0, 0.0, 3.0])
        """
        index = structure.index_dtype(max(*self._shape, 0))
        self._check_foreign("coo", self.dtype)
        values, row, col = self._backend.to_coo(self._validated, self._block_shape[1], index, copy)
        return self._foreign("coo", (values, (row, col)), self._shape, self.dtype)

    def tocsr(self, copy: bool = False) -> Any:
        """Convert to Compressed Sparse Row (CSR) format, with every element of every stored block.

        Parameters
        ----------
        copy : bool
            Present for compatibility with scipy. The result never shares arrays with this matrix.

        Returns
        -------
        csr_array or csr_matrix
            A matrix of `scipy.sparse` on the CPU, of `cupyx.scipy.sparse` on the GPU, in the dtype of this matrix.
            Zeros inside stored blocks and duplicates are kept.

        Raises
        ------
        TypeError
            If the other library does not support the dtype: float16 and bfloat16 anywhere, and integers on the GPU.

        Notes
        -----
        The call does not wait for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, 2, 0, 0], [0, 0, 0, 3]]), blocksize=(1, 2))
        >>> S = A.tocsr()
        >>> S.format, S.indptr.tolist(), S.indices.tolist()
        ('csr', [0, 2, 4], [0, 1, 2, 3])
        """
        values, columns, indptr = self._backend.to_csr(
            self._validated, self._block_shape[1], self._element_index(self.nnz)
        )
        return self._foreign("csr", (values, columns, indptr), self._shape, self.dtype)

    def tocsc(self, copy: bool = False) -> Any:
        """Convert to Compressed Sparse Column (CSC) format, with every element of every stored block.

        Parameters
        ----------
        copy : bool
            Present for compatibility with scipy. The result never shares arrays with this matrix.

        Returns
        -------
        csc_array or csc_matrix
            A matrix of `scipy.sparse` on the CPU, of `cupyx.scipy.sparse` on the GPU, in the dtype of this matrix.

        Raises
        ------
        TypeError
            If the other library does not support the dtype: float16 and bfloat16 anywhere, and integers on the GPU.

        Notes
        -----
        The call does not wait for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, 2, 0, 0], [0, 0, 0, 3]]), blocksize=(1, 2))
        >>> S = A.tocsc()
        >>> S.format, S.indptr.tolist(), S.indices.tolist()
        ('csc', [0, 1, 2, 3, 4], [0, 0, 1, 1])
        """
        backend, dtype = self._backend, self.dtype
        self._check_foreign("csc", dtype)
        if backend.loops is not None:
            blocks = self._validated
            (M, N), (_, R, C) = self._shape, blocks.data.shape
            if R * C >= _TURNED and self._is_canonical(blocks):
                turned = backend.to_csr(backend.transpose(blocks, N // C), M // R, self._element_index(self.nnz))
                return self._foreign("csc", turned, self._shape, dtype)
        return self.tocsr().tocsc()

    def todia(self, copy: bool = False) -> Any:
        """Convert to diagonal (DIA) format.

        Parameters
        ----------
        copy : bool
            Present for compatibility with scipy. The result never shares arrays with this matrix.

        Returns
        -------
        dia_array or dia_matrix
            A matrix of `scipy.sparse` on the CPU, of `cupyx.scipy.sparse` on the GPU, in the dtype of this matrix.
            It has every diagonal that a stored block crosses. Duplicates are added up.

        Raises
        ------
        TypeError
            If the other library does not support the dtype: float16 and bfloat16 anywhere, and integers on the GPU.

        Notes
        -----
        Waits for the GPU, which has to count the diagonals. The result takes memory for (diagonals, N) elements.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, 2, 0, 0], [0, 0, 0, 3]]), blocksize=(1, 2))
        >>> A.todia().offsets.tolist()
        [0, 1, 2]
        """
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
        """Convert to List of Lists (LIL) format, on the CPU only.

        Parameters
        ----------
        copy : bool
            Present for compatibility with scipy. The result never shares arrays with this matrix.

        Returns
        -------
        scipy.sparse.lil_array or scipy.sparse.lil_matrix

        Raises
        ------
        NotImplementedError
            If this matrix is on the GPU: cupyx has no such format. Use ``A.get().tolil()``.
        TypeError
            If scipy does not support the dtype (float16 and bfloat16).

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, 2, 0, 0], [0, 0, 0, 3]]), blocksize=(1, 2))
        >>> A.tolil().rows.tolist()
        [[0, 1], [2, 3]]
        """
        self._other_class("lil")
        self._check_foreign("lil", self.dtype)
        return self.tocsr().tolil()

    def todok(self, copy: bool = False) -> Any:
        """Convert to Dictionary Of Keys (DOK) format, on the CPU only.

        Parameters
        ----------
        copy : bool
            Present for compatibility with scipy. The result never shares arrays with this matrix.

        Returns
        -------
        scipy.sparse.dok_array or scipy.sparse.dok_matrix

        Raises
        ------
        NotImplementedError
            If this matrix is on the GPU: cupyx has no such format. Use ``A.get().todok()``.
        TypeError
            If scipy does not support the dtype (float16 and bfloat16).

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.array([[1.0, 2, 0, 0], [0, 0, 0, 3]]), blocksize=(1, 2))
        >>> print(A.todok()[1, 3])
        3.0
        """
        self._other_class("dok")
        self._check_foreign("dok", self.dtype)
        return self.tocoo(copy=False).todok()

    def tobsr(self, blocksize: tuple[int, int] | None = None, copy: bool = False) -> Self:
        """Return this matrix, or the same matrix in blocks of another size.

        Parameters
        ----------
        blocksize : (R, C), optional
            The new block size, which must divide the shape. By default it stays as it is.
        copy : bool
            Whether to copy the arrays if the block size stays as it is.

        Returns
        -------
        bsr_array or bsr_matrix
            This matrix itself if the block size stays as it is and `copy` is False. Otherwise a matrix with arrays of
            its own; in new blocks it is in canonical format (sorted, without duplicates).

        Raises
        ------
        ValueError
            If `blocksize` is not a pair of positive integers that divides the shape.

        Notes
        -----
        Zeros inside the old blocks count as stored, so that a new block may consist of zeros; `eliminate_zeros` drops
        such blocks. A change of the block size waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.arange(8.0).reshape(2, 4), blocksize=(1, 2))
        >>> A.tobsr((2, 2)).data.shape
        (2, 2, 2)
        >>> A.tobsr() is A
        True
        """
        blocksize = self.blocksize if blocksize is None else check_blocksize(blocksize, self._shape)
        if blocksize == self.blocksize:
            return self.copy() if copy else self
        blocks = self._validated
        check_block_elements(self._backend, (len(blocks.data), *blocksize))
        parts = reblock(self._backend, Parts(blocks, self._shape, self._is_canonical(blocks)), blocksize)
        return self._new_own(parts.blocks, canonical=True)

    def asformat(self, format: str | None, copy: bool = False) -> Any:
        """Convert to the format of a given name.

        Parameters
        ----------
        format : {"bsr", "csr", "csc", "coo", "dia", "lil", "dok", "array", "dense"} or None
            The name of the format. "array" and "dense" call `toarray` and `todense`; None means "bsr".
        copy : bool
            Passed on to the method of that format, except for "array" and "dense", which always copy.

        Returns
        -------
        sparse or dense matrix
            This matrix itself for "bsr" without `copy`.

        Raises
        ------
        ValueError
            If `format` is not one of these names.
        NotImplementedError, TypeError
            As raised by the method of the format, for example `tocsr`.

        Notes
        -----
        On the GPU every conversion to a sparse format other than BSR waits.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
        >>> A.asformat("csr").format, A.asformat("bsr") is A
        ('csr', True)
        """
        if format is None or (isinstance(format, str) and format == "bsr"):
            return self.copy() if copy else self
        if not isinstance(format, str) or format not in _FORMATS:
            raise ValueError(f"format: {format!r} is unknown, wanted one of {', '.join(_FORMATS)}")
        convert = getattr(self, f"to{format}")
        return convert() if format in ("array", "dense") else convert(copy=copy)

    # --------------------------------------------------------------------------------------- dense
    def toarray(self, order: str | None = None, out: Array | None = None) -> Array:
        """Convert to a dense array; duplicates are added up.

        Parameters
        ----------
        order : {'C', 'F'}, optional
            Memory order of the result. It cannot be given together with `out`.
        out : array of shape (M, N), optional
            Array to write the result to, in the dtype and on the device of this matrix.

        Returns
        -------
        array of shape (M, N)
            `out` if it was given, otherwise a new NumPy or CuPy array in the dtype of this matrix.

        Raises
        ------
        ValueError
            If both `order` and `out` are given, or if `out` has another shape or dtype.
        TypeError
            If `out` is not an array on the device of this matrix.

        Notes
        -----
        On the GPU the call waits if the matrix is not yet known to be in canonical format.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array((np.ones((1, 2, 2)), ([0], [1])), shape=(2, 4))
        >>> A.toarray()
        array([[0., 0., 1., 1.],
               [0., 0., 1., 1.]])
        """
        backend = self._backend
        if order is not None and (not isinstance(order, str) or order not in ("C", "F")):
            raise ValueError(f"order: wanted 'C', 'F' or None, got {order!r}")
        if out is None:
            view = out = backend.xp.zeros(self._shape, self.dtype, order=order or "C")
        else:
            if order is not None:
                raise ValueError("order cannot be specified if out is not None")
            view = target(backend, out, "out")
            if tuple(view.shape) != self._shape or view.dtype != self.dtype:
                raise ValueError(
                    f"out: array must be same dtype and shape as sparse array: wanted {self.dtype} {self._shape}, "
                    f"got {view.dtype} {tuple(view.shape)}"
                )
            view[...] = 0
            view = view.view(np.ndarray) if isinstance(view, np.ndarray) else view
        loops = backend.loops
        if loops is not None:
            blocks = self._validated
            _, R, C = blocks.data.shape
            if loops.small_block >= R * C and loops.add_to_dense(blocks, view, zero=True):
                return out
        backend.put_blocks(self._canonical(), view)
        return out

    def todense(self, order: str | None = None, out: Array | None = None) -> Array:
        """Convert to a dense array, or to an `np.matrix` if this is a `bsr_matrix` on the CPU.

        Parameters
        ----------
        order : {'C', 'F'}, optional
            Memory order of the result. It cannot be given together with `out`.
        out : array of shape (M, N), optional
            Array to write the result to, in the dtype and on the device of this matrix.

        Returns
        -------
        array or numpy.matrix, of shape (M, N)

        Raises
        ------
        ValueError, TypeError
            As raised by `toarray`.

        Notes
        -----
        On the GPU the call waits if the matrix is not yet known to be in canonical format.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> bg.bsr_matrix(np.eye(2), blocksize=(2, 2)).todense()
        matrix([[1., 0.],
                [0., 1.]])
        """
        return self._container(self.toarray(order=order, out=out))

    def _container(self, x: Array) -> Array:
        """Return a dense result in the container of this class: `bsr_matrix` overrides this to give an np.matrix."""
        return x

    # ------------------------------------------------------------------------------------- shape
    def reshape(self, *shape: Any, order: str = "C", copy: bool = False) -> Any:
        """Give the elements another shape; a change of shape returns a matrix in COO format.

        Parameters
        ----------
        *shape : int or tuple of int
            The new shape, as separate integers or as one tuple. A single -1 is computed from the number of elements. A
            `bsr_array` may get any number of dimensions that COO supports, a `bsr_matrix` always has two.
        order : {'C', 'F'}
            The order in which elements are read and written: by rows ('C') or by columns ('F').
        copy : bool
            With False this matrix itself is returned if it has that shape already, and the values are shared otherwise
            where that is possible.

        Returns
        -------
        bsr_array, bsr_matrix, coo_array or coo_matrix
            BSR if the shape stays as it is, otherwise COO of `scipy.sparse` or `cupyx.scipy.sparse`.

        Raises
        ------
        ValueError
            If the shape does not have as many elements as this matrix, or `order` is unknown.
        TypeError
            If the shape is not made of integers, or COO does not support the dtype; see `tocoo`.

        Notes
        -----
        On the GPU a change of shape waits, because cupyx checks the index arrays.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.arange(8.0).reshape(2, 4), blocksize=(1, 2))
        >>> A.reshape(4, -1).toarray()
        array([[0., 1.],
               [2., 3.],
               [4., 5.],
               [6., 7.]])
        """
        if not isinstance(order, str) or order not in ("C", "F"):
            raise ValueError(f"order: wanted 'C' or 'F', got {order!r}")
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int | np.integer) else shape
        M, N = self._shape
        try:
            wanted = tuple(wanted)
        except TypeError:
            raise TypeError(f"shape: wanted integers, got {wanted!r}") from None
        wanted = full_shape(wanted, M * N)
        if not self._is_array and len(wanted) != 2:
            raise ValueError(f"shape: matrix must have 2 dimensions, got {wanted}")
        if wanted == self._shape:
            return self.copy() if copy else self
        index = structure.index_dtype(max(*wanted, 0))
        coords = tuple(x.astype(index, copy=False) for x in self._coords_in(wanted, order))
        values = self.data.reshape(-1)
        return self._foreign("coo", (values.copy() if copy else values, coords), wanted, self.dtype)

    def _coords_in(self, shape: tuple[int, ...], order: str) -> tuple[Array, ...]:
        """Return the coordinates that every stored element has in a matrix of another shape."""
        M, N = self._shape
        on_host = self._backend.loops is not None
        index = structure.index_dtype(M * N) if on_host else _INDEX64
        _, row, col = self._backend.to_coo(self._validated, self._block_shape[1], index)
        return _unravel(row * N + col if order == "C" else col * M + row, shape, order)

    def _elements(self) -> tuple[Array, Array, Array]:
        """Return sorted CSR arrays without duplicates: (values, columns, indptr)."""
        blocks = self._canonical()
        return self._backend.to_csr(blocks, self._block_shape[1], self._element_index(blocks.data.size))

    def _csr_where(self, keep: Array, values: Array, columns: Array, indptr: Array) -> Any:
        """Return a CSR matrix of the elements for which `keep` is true."""
        self._check_foreign("csr", values.dtype)
        elements = Blocks(values.reshape(-1, 1, 1), columns, indptr)  # CSR has blocks of one element
        data, columns, indptr = self._backend.select_blocks(elements, keep)  # synchronize!
        return self._foreign("csr", (data.reshape(-1), columns, indptr), self._shape, values.dtype)

    def _from_full(self, X: Array, blocksize: tuple[int, int]) -> Self:
        """Create a matrix of this class from a dense array of the same backend."""
        index = structure.index_dtype(max(*X.shape, 1))
        return self._new(structure.from_dense(self._backend, X, blocksize, index), tuple(X.shape), canonical=True)

    def _coerce(self, other: Any) -> Self:
        """Convert another sparse matrix of this backend and shape to the class and the block size of this matrix."""
        if not isinstance(other, BsrBase):
            parts = from_sparse(self._backend, other, None, False, self.blocksize)
            return self._new(parts.blocks, parts.shape, canonical=parts.canonical)
        same = other if isinstance(other, type(self)) else self._new(other._blocks, other._shape)
        return same.tobsr(self.blocksize)


def full_shape(shape: tuple[Any, ...], size: int) -> tuple[int, ...]:
    """Return `shape` with a single -1 replaced; raise ValueError unless it has `size` elements."""
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
    """Return the coordinates of flat indices."""
    coords = []
    sides = shape if order == "F" else shape[::-1]
    for side in sides[:-1]:
        rest = flat // max(side, 1)
        coords.append(flat - rest * max(side, 1))
        flat = rest
    coords.append(flat)
    return tuple(coords if order == "F" else coords[::-1])
