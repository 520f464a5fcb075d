"""The class `bsr_batch`: many matrices with one pattern of blocks, ``Y[s] = A[s] @ X[s]``.

The batch is also one block-diagonal matrix, whose index arrays are made once; its data are those of the batch. A
product of the batch is one product with that matrix, by the kernels that serve all others.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from ._array.base import BsrBase, kind_of
from ._array.construct import check_cast
from ._backend.base import Array, Backend, Blocks
from ._backend.recording import recorded
from ._backend.registry import backend_of, host
from ._products.matmul import matmul
from ._products.sddmm import check_structure
from .bsr import bsr_array
from .dtypes import BOOL, check_dtype, common_dtype, is_float


class bsr_batch:
    """Many BSR matrices of one shape and one pattern of blocks, such as load cases, time steps or parameters.

    Parameters
    ----------
    arg1 : tuple or sequence of bsr_array
        - ``(data, indices, indptr)``: the arrays of the BSR format, of shapes (batch, blocks, R, C), (blocks,) and
          (M / R + 1,).
        - Matrices with the same blocks in the same order; their data are copied.
    shape : (M, N), optional
        The shape of each matrix. By default it is the smallest one that contains all indices.
    dtype : dtype, optional
        The dtype of the elements, by default that of `arg1`.
    copy : bool
        With False the batch shares `data` with `arg1` if it is contiguous and has the dtype.

    Raises
    ------
    TypeError
        If `arg1` is none of these, a dtype is not supported, or arrays are on different devices.
    ValueError
        If shapes do not fit each other, an index is out of range, or matrices differ in their blocks.

    See Also
    --------
    bsr_array : one matrix.
    linalg.cg : solves all systems of a batch together.
    linalg.block_jacobi : the preconditioner of a batch, a batch too.

    Notes
    -----
    `data` may be changed in place, `indices` and `indptr` may not: on the CPU they are read-only. Products run on the
    device of `data`; nothing is moved.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.array([[2.0, -1, 0, 0], [-1, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3]]), blocksize=(2, 2))
    >>> batch = bg.bsr_batch([A, 2 * A, 3 * A])
    >>> batch
    <bsr_batch of 3 matrices of shape (4, 4), float64, 2 blocks of 2 x 2 each, on 'cpu'>
    >>> batch @ np.ones((3, 4))
    array([[1., 1., 3., 3.],
           [2., 2., 6., 6.],
           [3., 3., 9., 9.]])
    >>> batch[2].toarray()[0]
    array([ 6., -3.,  0.,  0.])
    """

    #: The number of dimensions, which is always 3.
    ndim = 3
    # an array on the left asks this class first, which has no product from the right
    __array_ufunc__ = None
    __array_priority__ = 200
    _backend: Backend
    _pattern: Any
    _data: Array
    _whole: Any

    def __init__(self, arg1: Any, shape: Any = None, dtype: Any = None, copy: bool = False) -> None:
        if isinstance(arg1, tuple) and len(arg1) == 3 and not isinstance(arg1[0], BsrBase):
            data, indices, indptr = arg1
            backend = backend_of(data)
            if backend is None or not backend.is_dense(data):
                raise TypeError(f"data: wanted a NumPy or CuPy array, got {type(data).__name__}")
            if data.ndim != 4 or not len(data):
                raise ValueError(
                    f"data: wanted shape (batch, blocks, R, C) with one matrix at least, got {tuple(data.shape)}"
                )
            pattern = bsr_array((data[0], indices, indptr), shape=shape)
            if len(pattern.indices) != data.shape[1]:
                raise ValueError(f"data: wanted {len(pattern.indices)} blocks, as indptr says, got {data.shape[1]}")
        elif isinstance(arg1, Sequence) and len(arg1) and all(isinstance(A, BsrBase) for A in arg1):
            pattern, data = _stacked(arg1)
            if shape is not None and tuple(shape) != pattern.shape:
                raise ValueError(f"shape: wanted {pattern.shape}, that of the matrices, got {tuple(shape)}")
        else:
            raise TypeError(
                f"arg1: wanted (data, indices, indptr) or a sequence of bsr_array, got {_no_matrices(arg1)}; a batch "
                "has one pattern for all its matrices"
            )
        backend = pattern._backend
        wanted = pattern.dtype if dtype is None else check_dtype(dtype, backend.dtypes)
        pattern, data = _cast(pattern, data.astype(pattern.dtype, copy=copy), wanted)
        data = backend.xp.ascontiguousarray(data)
        pattern = pattern._with_data(data[0], copy=backend is host())
        if backend is host():  # a product has index arrays of its own, and would not see what is written into these
            pattern.indices.flags.writeable = pattern.indptr.flags.writeable = False
        self._set(pattern, data)

    def _set(self, pattern: Any, data: Array, whole: Any = None) -> Self:
        """Take over a pattern and contiguous data; `whole` is a block-diagonal matrix with the right index arrays."""
        self._backend, self._pattern, self._data = pattern._backend, pattern, data
        blocks = data.reshape(-1, *data.shape[2:])
        self._whole = _block_diagonal(pattern, len(data), blocks) if whole is None else whole._with_data(blocks, False)
        return self

    def _new(self, data: Array) -> Self:
        return object.__new__(type(self))._set(self._pattern, data, self._whole)

    # ------------------------------------------------------------------------------------------- description
    @property
    def shape(self) -> tuple[int, int, int]:
        """The number of matrices, and their rows and columns: (batch, M, N)."""
        return (len(self._data), *self._pattern.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        found: np.dtype[Any] = self._data.dtype
        return found

    @property
    def blocksize(self) -> tuple[int, int]:
        """The numbers of rows and columns of a block, (R, C)."""
        rows, columns = self._data.shape[2:]
        return rows, columns

    @property
    def data(self) -> Array:
        """The stored blocks, of shape (batch, blocks, R, C). They may be changed in place.

        Setting them replaces all numbers, as `with_data` does: ``A.data *= 2`` and ``A.data = other`` work. Matrices
        that were taken from the batch before keep the numbers that it had.
        """
        return self._data

    @data.setter
    def data(self, data: Array) -> None:
        if data is not self._data:
            other = self.with_data(data)
            self._set(other._pattern, other._data, other._whole)

    @property
    def indices(self) -> Array:
        """The block column of each stored block of a matrix, of shape (blocks,)."""
        return self._pattern.indices

    @property
    def indptr(self) -> Array:
        """The blocks of block row i are those from ``indptr[i]`` to ``indptr[i + 1] - 1``."""
        return self._pattern.indptr

    @property
    def device(self) -> Any:
        """The device of the data: "cpu" or a `cupy.cuda.Device`."""
        return self._backend.device_of(self._data)

    @property
    def nbytes(self) -> int:
        """The bytes of `data`, `indices` and `indptr`."""
        return int(self._data.nbytes + self.indices.nbytes + self.indptr.nbytes)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        batch, M, N = self.shape
        R, C = self.blocksize
        return (
            f"<bsr_batch of {batch} matrices of shape {(M, N)}, {self.dtype}, {len(self.indices)} blocks of {R} x {C} "
            f"each, on {self._backend.name!r}>"
        )

    def __getitem__(self, index: Any) -> bsr_array:
        """Return one matrix of the batch, which shares its data.

        Parameters
        ----------
        index : int
            The number of the matrix; negative ones count from the end.

        Returns
        -------
        bsr_array

        Raises
        ------
        TypeError
            If `index` is not an integer.
        IndexError
            If there is no such matrix.
        """
        try:
            place = operator.index(index)
        except TypeError:
            raise TypeError(f"index: wanted an integer, got {index!r}; a batch has no slices") from None
        if not -len(self) <= place < len(self):
            raise IndexError(f"index: wanted one from {-len(self)} to {len(self) - 1}, got {place}")
        found: bsr_array = self._pattern._with_data(self._data[place])
        return found

    # ------------------------------------------------------------------------------------------- conversion
    @recorded
    def with_data(self, data: Array) -> Self:
        """Return a batch with the same pattern and other numbers.

        Parameters
        ----------
        data : array (batch, blocks, R, C)
            The blocks, on the device of this batch. The number of matrices may differ. The batch shares a contiguous
            array.

        Returns
        -------
        bsr_batch

        Raises
        ------
        TypeError
            If `data` is not a dense array on the device of this batch.
        ValueError
            If its shape does not fit.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> batch = bg.bsr_batch([bg.eye(2, blocksize=(2, 2)), 3 * bg.eye(2, blocksize=(2, 2))])
        >>> batch.with_data(10 * batch.data)[1].toarray()
        array([[30.,  0.],
               [ 0., 30.]])
        """
        if not self._backend.is_dense(data):
            raise TypeError(f"data: wanted a dense array on {self._backend.name!r}, got {type(data).__name__}")
        wanted = self._data.shape[1:]
        if data.ndim != 4 or data.shape[1:] != wanted or not len(data):
            raise ValueError(f"data: wanted shape (batch, {', '.join(map(str, wanted))}), got {tuple(data.shape)}")
        if len(data) == len(self) and data.dtype == self.dtype:
            return self._new(self._backend.xp.ascontiguousarray(data))
        return type(self)((data, self.indices, self.indptr), shape=self._pattern.shape)

    @recorded
    def astype(self, dtype: Any) -> Self:
        """Return a copy of this batch with another dtype.

        Parameters
        ----------
        dtype : dtype
            The dtype of the elements.

        Returns
        -------
        bsr_batch

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> batch = bg.bsr_batch([bg.eye(2, blocksize=(2, 2)), 3 * bg.eye(2, blocksize=(2, 2))])
        >>> batch.astype("float32").dtype
        dtype('float32')
        """
        return type(self)((self._data, self.indices, self.indptr), self._pattern.shape, dtype, copy=True)

    @recorded
    def copy(self) -> Self:
        """Return a copy of this batch with data of its own.

        Returns
        -------
        bsr_batch

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> batch = bg.bsr_batch([bg.eye(2, blocksize=(2, 2)), 3 * bg.eye(2, blocksize=(2, 2))])
        >>> np.shares_memory(batch.copy().data, batch.data)
        False
        """
        return self._new(self._data.copy())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __reduce__(self) -> Any:
        # Pickled by itself, the block-diagonal matrix would get data of its own.
        _, indices, indptr = self._pattern._blocks
        return _restored, (type(self), self._data, indices, indptr, self._pattern.shape)

    def to_device(self, device: str) -> Self:
        """Move this batch to a device.

        Parameters
        ----------
        device : {"cpu", "cuda"}
            The device; "cuda" is the current CUDA device of CuPy.

        Returns
        -------
        bsr_batch
            This batch itself if it is on such a device already, otherwise a copy.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> batch = bg.bsr_batch([bg.eye(2, blocksize=(2, 2)), 3 * bg.eye(2, blocksize=(2, 2))])
        >>> batch.to_device("cpu") is batch
        True
        """
        whole = self._whole.to_device(device)
        if whole is self._whole:
            return self
        pattern = self._pattern.to_device(device)
        return object.__new__(type(self))._set(pattern, whole.data.reshape(self._data.shape), whole)

    def get(self) -> Self:
        """Return a copy of this batch on the CPU, like ``cupy.ndarray.get``.

        Returns
        -------
        bsr_batch
            A batch with NumPy arrays of its own.

        Notes
        -----
        Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> batch = bg.bsr_batch([bg.eye(2, blocksize=(2, 2)), 3 * bg.eye(2, blocksize=(2, 2))])
        >>> batch.get().device, batch.get() is batch
        ('cpu', False)
        """
        return self.copy() if self._backend is host() else self.to_device("cpu")

    @recorded
    def toarray(self) -> Array:
        """Return all matrices as a dense array.

        Returns
        -------
        array (batch, M, N)

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> batch = bg.bsr_batch([bg.eye(2, blocksize=(2, 2)), 3 * bg.eye(2, blocksize=(2, 2))])
        >>> batch.toarray().shape
        (2, 2, 2)
        """
        return self._backend.xp.stack([self[k].toarray() for k in range(len(self))])

    @recorded
    def tobsr(self) -> bsr_array:
        """Return the batch as one block-diagonal matrix, which shares its data.

        Returns
        -------
        bsr_array of shape (batch * M, batch * N)

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> batch = bg.bsr_batch([bg.eye(2, blocksize=(2, 2)), 3 * bg.eye(2, blocksize=(2, 2))])
        >>> batch.tobsr().diagonal()
        array([1., 1., 3., 3.])
        """
        found: bsr_array = self._whole._with_data(self._whole.data)
        return found

    # ------------------------------------------------------------------------------------------- products
    @recorded
    def __matmul__(self, X: Any) -> Array:
        """Return ``Y[s] = A[s] @ X[s]`` for all matrices of the batch.

        Parameters
        ----------
        X : array (batch, N) or (batch, N, k)
            A vector, or several, for each matrix, on the device of the batch.

        Returns
        -------
        array (batch, M) or (batch, M, k)

        Raises
        ------
        TypeError
            If `X` is not a dense array on the device of the batch.
        ValueError
            If its shape does not fit.
        """
        batch, M, N = self.shape
        if not self._backend.is_dense(X):
            raise TypeError(f"X: wanted a dense array on {self._backend.name!r}, got {type(X).__name__}")
        if X.ndim not in (2, 3) or X.shape[:2] != (batch, N):
            raise ValueError(f"X: wanted shape ({batch}, {N}) or ({batch}, {N}, k), got {tuple(X.shape)}")
        product = matmul(self._whole, X.reshape(batch * N, *X.shape[2:]))
        found: Array = product.reshape(batch, M, *X.shape[2:])
        return found


def _no_matrices(arg1: Any) -> str:
    """What came in place of matrices, for a message: the entry that is none of ours, if it is a list or a tuple."""
    if not isinstance(arg1, list | tuple):
        return kind_of(arg1)
    if not arg1:
        return f"an empty {type(arg1).__name__}"
    k, entry = next((k, x) for k, x in enumerate(arg1) if not isinstance(x, BsrBase))
    return f"a {type(arg1).__name__} with {kind_of(entry)} in arg1[{k}]"


def _stacked(matrices: Sequence[Any]) -> tuple[Any, Array]:
    """The pattern of matrices that have the same blocks, and their data as one array."""
    first = matrices[0]
    for k, A in enumerate(matrices[1:], 1):
        if A._backend is not first._backend:
            raise TypeError(f"arg1: wanted all on {first._backend.name!r}, got matrix {k} on {A._backend.name!r}")
        check_structure(A, first, f"arg1[{k}]", "arg1[0]", "; a batch has one pattern for all")
    dtype = common_dtype(A.dtype for A in matrices)
    if any(A.dtype != dtype for A in matrices) and first._has_duplicates:  # a cast may change their sum
        matrices = [A._new(A._canonical()) for A in matrices]
        first = matrices[0]
    data = first._backend.xp.stack([A.data.astype(dtype, copy=False) for A in matrices])
    pattern = bsr_array((data[0], first.indices, first.indptr), shape=first.shape)
    return pattern, data


def _cast(pattern: Any, data: Array, dtype: np.dtype[Any]) -> tuple[Any, Array]:
    """A pattern and data in another dtype.

    If the cast could change their sum, blocks that are stored twice are added up first, and the pattern is another one.
    """
    own = data.dtype
    if own == dtype:
        return pattern, data
    rounded = all(d.kind == "c" or is_float(d) for d in (own, dtype))
    if not rounded and pattern._has_duplicates:
        whole = _block_diagonal(pattern, len(data), data.reshape(-1, *data.shape[2:])).astype(dtype)
        count, rows = len(whole.indices) // len(data), pattern._block_shape[0]
        found = whole.data.reshape(len(data), count, *data.shape[2:])
        return whole._new(Blocks(found[0], whole.indices[:count], whole.indptr[: rows + 1]), pattern.shape), found
    check_cast(pattern._backend, data, dtype)
    if dtype == BOOL:
        return pattern, data != 0
    return pattern, (data.real if own.kind == "c" and dtype.kind != "c" else data).astype(dtype)


def _restored(cls: type[bsr_batch], data: Array, indices: Array, indptr: Array, shape: tuple[int, int]) -> bsr_batch:
    """A batch from its pickled arrays."""
    batch = object.__new__(cls)
    bsr_batch.__init__(batch, (data, indices, indptr), shape)
    return batch


def _block_diagonal(pattern: Any, batch: int, blocks: Array) -> Any:
    """The matrices of a batch along the diagonal of one matrix with these blocks."""
    xp = pattern._backend.xp
    count, (rows, columns) = len(pattern.indices), pattern._block_shape
    wide = batch * max(count, rows, columns) >= 2**31
    index = np.dtype(np.int64 if wide else pattern.indices.dtype)
    system = xp.arange(batch, dtype=index)[:, None]
    indices = (pattern.indices.astype(index, copy=False) + columns * system).reshape(-1)
    indptr = xp.full(batch * rows + 1, batch * count, index)
    indptr[:-1] = (pattern.indptr[:-1].astype(index, copy=False) + count * system).reshape(-1)
    M, N = pattern.shape
    flags = {"canonical": pattern._known_canonical or pattern._has_canonical_format}
    return pattern._new(
        Blocks(blocks, indices, indptr), (batch * M, batch * N), **flags, sorted_=pattern._has_sorted_indices
    )
