"""The public classes `bsr_array` and `bsr_matrix`, and their subclasses whose data is in NumPy arrays."""

from __future__ import annotations

import inspect
import numbers
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from ._array.arithmetic import Arithmetic
from ._array.arrays import leaf, leaf_of, register_leaf, register_public
from ._array.assign import Assignment
from ._array.base import check_integer, check_shape
from ._array.blocks import BlockTools
from ._array.construct import check_block_elements, check_blocksize, find_backend, parse
from ._array.convert import full_shape
from ._array.reduce import Reductions
from ._backend import structure
from ._backend.base import Array, Backend, Blocks
from ._backend.registry import adopted, backend_of, by_name, foreign_backend, host
from ._products.matmul import Products
from ._products.scaling import BlockScaling
from .dtypes import check_dtype

_FORMS = """
    Parameters
    ----------
    arg1 : sparse matrix, dense array or tuple
        - A sparse matrix of scipy, cupyx or bsrgemm, a BSR tensor of torch, or a dense array of shape (M, N).
        - ``(M, N)``: a matrix of this shape without stored blocks.
        - ``(data, (row, col))``: elements of shape (n,) and their positions; those at the same position are added up.
        - ``(blocks, (block_row, block_col))``: blocks of shape (n, R, C) and their positions, in any order; duplicates
          are kept.
        - ``(data, indices, indptr)``: the arrays of the BSR format, of shapes (n, R, C), (n,) and (M / R + 1,).
    shape : (M, N), optional
        The shape. By default it is the smallest one that contains all indices.
    dtype : dtype, optional
        The dtype of the elements, by default that of `arg1`: bool, integers, float16, bfloat16, float32, float64,
        complex64 or complex128; on the CPU also NumPy's long double types.
    copy : bool
        With False the matrix may share arrays with `arg1`. On the GPU it shares index arrays only with a matrix of
        bsrgemm, since writes into others would go unseen.
    blocksize : (R, C), optional
        The block size, which must divide the shape. By default blocks that `arg1` has are kept; otherwise a small
        square block is guessed, as scipy does.
    maxprint : int, optional
        The largest number of elements that ``print`` shows, by default 50.
    device : {"cpu", "cuda"}, optional
        The device of the matrix, by default that of `arg1`.

    Raises
    ------
    ValueError
        If the shape, the block size and the arrays do not fit each other, an index is out of range, NaN or infinity
        would be cast to an integer, or `device` is unknown.
    TypeError
        If a matrix cannot have the dtype, or the arrays of `arg1` are on different devices.
    ImportError
        If `device` is "cuda" and CuPy cannot be imported.
    RuntimeError
        If `device` is "cuda" and CuPy finds no GPU.

    Notes
    -----
    A subclass works on every device. Results of its methods are of the subclass too, but its ``__init__`` is not called
    for them, and attributes that it adds are neither copied nor pickled. Functions such as `vstack` return the class
    itself.

    The index arrays of `arg1` are checked once; on the GPU this waits. A BSR matrix of bsrgemm is not checked again.
"""


class _BSR(Arithmetic, Assignment, Reductions, BlockTools, Products, BlockScaling):
    """The base of `bsr_array` and `bsr_matrix`: construction, moves between devices, and pickling."""

    __signature__: ClassVar[inspect.Signature]
    #: The class that a user names: `bsr_array`, `bsr_matrix` or a subclass of one.
    _general: ClassVar[type[Any]]
    #: The classes of a user's subclass, one for each backend.
    _own_leaves: ClassVar[dict[Backend, type[Any]]]
    #: Whether this is one of them.
    _of_subclass: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Editors and inspect.signature would show the parameters of __new__, which takes anything.
        _, *parameters = inspect.signature(cls.__init__).parameters.values()
        cls.__signature__ = inspect.Signature(parameters)
        if not hasattr(cls, "_backend"):
            cls._general, cls._own_leaves = cls, {}

    def __new__(cls, arg1: Any = None, *args: Any, **kwargs: Any) -> Self:
        if not hasattr(cls, "_backend"):  # the data decides about the backend
            return object.__new__(leaf_of(find_backend(arg1, kwargs.get("device")), cls))
        return object.__new__(cls)

    def __init__(
        self,
        arg1: Any,
        shape: Any = None,
        dtype: Any = None,
        copy: bool = False,
        blocksize: Any = None,
        *,
        maxprint: int | None = None,
        device: str | None = None,
    ) -> None:
        if self._of_subclass:  # its __init__ may have other arguments than those by which __new__ chose a backend
            self.__class__ = leaf_of(find_backend(arg1, device), self._general)
        if device is not None and by_name(device) is not self._backend:
            raise ValueError(
                f"device: wanted {self._backend.name!r} for {type(self).__name__}, got {device!r}; bsr_array takes both"
            )
        if maxprint is not None and check_integer(maxprint, "maxprint") < 0:
            raise ValueError(f"maxprint: wanted an integer from 0 on, got {maxprint!r}")
        parts = parse(self._backend, arg1, shape, dtype, copy, blocksize, self._is_array)
        flags: Any = {"canonical": parts.canonical, "longest": parts.longest}
        self._set(parts.blocks, parts.shape, maxprint=50 if maxprint is None else maxprint, **flags)
        if isinstance(arg1, _BSR) and arg1.data is self.data:
            self._transposes = arg1._readers()

    __init__.__qualname__ = "bsr_array.__init__"  # the name in messages of Python

    @property
    def nbytes(self) -> int:
        """The bytes of `data`, `indices` and `indptr`; for a transpose, those that they have when they are built."""
        data, indices, indptr = self._source()[0]._blocks
        return int(data.nbytes + indices.nbytes + (self._block_shape[0] + 1) * indptr.itemsize)

    # ------------------------------------------------------------------------------------- moving
    def _to(self, backend: Backend) -> Any:
        if backend is self._backend:
            return self
        check_dtype(self.dtype, backend.dtypes)
        check_block_elements(backend, self._blocks.data.shape)
        arrays = (backend.from_host(self._backend.to_host(a)) for a in self._blocks)
        canonical = self._kept_canonical
        if canonical is not False and backend.index_class is not None:  # a device trusts this, and waits to look
            canonical = self._is_canonical(self._validated) or None
        known = {"canonical": canonical, "sorted_": self._has_sorted_indices, "maxprint": self.maxprint}
        if backend.index_class is not None and self._blocks.indptr.size > 1:
            known["longest"] = int(np.diff(self._blocks.indptr).max())
        return object.__new__(leaf_of(backend, self._general))._set(Blocks(*arrays), self._shape, **known)

    def to_device(self, device: str, *, stream: Any = None) -> Any:
        """Move this matrix to a device, as in the array API standard.

        Parameters
        ----------
        device : {"cpu", "cuda"}
            The device; "cuda" is the current CUDA device of CuPy.
        stream : int or stream, optional
            The CUDA stream on which a copy to the GPU is enqueued, by default CuPy's current stream: a stream of CuPy,
            PyTorch or a library with ``__cuda_stream__``, or an integer as in DLPack, which is 1 for the default
            stream, 2 for that of each thread, or the address of a stream. For "cpu" it must be None; `get` takes a
            stream.

        Returns
        -------
        bsr_array or bsr_matrix
            This matrix itself if it is on such a device already, otherwise a copy.

        Raises
        ------
        ValueError
            If there is no device of this name, or `stream` is given for "cpu" or is no such integer.
        ImportError
            If `device` is "cuda" and CuPy cannot be imported.
        RuntimeError
            If `device` is "cuda" and CuPy finds no GPU.
        TypeError
            If a matrix on the GPU cannot have the dtype (long double), or `stream` is not a stream.

        Notes
        -----
        A copy to the CPU waits for the GPU. Work on another stream than `stream` must wait for `stream` before it reads
        the copy.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
        >>> A.to_device("cpu") is A
        True
        """
        backend = by_name(device)
        if stream is None:
            return self._to(backend)
        if backend is host():
            raise ValueError(f"stream: wanted None for device 'cpu', got {stream!r}; A.get(stream) copies on a stream")
        with _stream(backend, stream):
            return self._to(backend)

    def get(self, stream: Any = None) -> Any:
        """Return a copy of this matrix on the CPU, like ``cupy.ndarray.get``.

        Parameters
        ----------
        stream : cupy.cuda.Stream, optional
            The CUDA stream for the copy, by default the current one. It is ignored if this matrix is on the CPU.

        Returns
        -------
        bsr_array or bsr_matrix
            A matrix with NumPy arrays of its own.

        Notes
        -----
        Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
        >>> B = A.get()
        >>> B.device, B is A
        ('cpu', False)
        """
        backend = by_name("cpu")
        if backend is self._backend:
            return self.copy()
        if stream is None:
            return self._to(backend)
        with stream:
            return self._to(backend)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._backend is host():
            if self._of_subclass:  # pickle does not find the class by its name
                return _unpickled, (self._general,), self.__getstate__()
            return super().__reduce_ex__(max(2, protocol))
        return _move, (self.get(), self._backend.name)


@register_public
class bsr_array(_BSR):
    __doc__ = (
        """Block Sparse Row array on the CPU (NumPy) or the GPU (CuPy), with scipy's interface.
"""
        + _FORMS
        + """
    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> blocks = np.arange(8.0).reshape(2, 2, 2)
    >>> A = bg.bsr_array((blocks, ([0, 1], [1, 0])), shape=(4, 4))
    >>> A.toarray()
    array([[0., 0., 0., 1.],
           [0., 0., 2., 3.],
           [4., 5., 0., 0.],
           [6., 7., 0., 0.]])
    >>> A @ np.ones(4)
    array([ 1.,  5.,  9., 13.])
    >>> (A @ A).blocksize, A[:2, 2:].toarray().sum()
    ((2, 2), np.float64(6.0))
    """
    )
    _is_array = True


@register_public
class bsr_matrix(_BSR):
    __doc__ = (
        """Block Sparse Row matrix: `bsr_array` with the older matrix interface of scipy.

    ``*`` is the matrix product and ``**`` the matrix power; dense results have two dimensions (np.matrix on the CPU).
    New code should use `bsr_array`.
"""
        + _FORMS
        + """
    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_matrix(np.array([[0.0, 1], [1, 0]]), blocksize=(1, 1))
    >>> (A * A).toarray()
    array([[1., 0.],
           [0., 1.]])
    >>> A.sum(axis=0)
    matrix([[1., 1.]])
    """
    )
    _is_array = False

    def __mul__(self, other: Any) -> Any:
        return self._mul_scalar(other) if self._is_scalar(other) else self._matmul(other)

    def __rmul__(self, other: Any) -> Any:
        return self._mul_scalar(other) if self._is_scalar(other) else self.__rmatmul__(other)

    def __pow__(self, n: Any) -> Any:
        M, N = self._shape
        if M != N:
            raise TypeError(f"matrix power: matrix is not square: {self._shape}")
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
            raise ValueError(f"matrix power: exponent must be >= 0 and an integer, got {n!r}")
        if n == 0:
            return self._identity()
        result = None
        square = self
        while n:
            if n & 1:
                result = square if result is None else result @ square
            n >>= 1
            square = square @ square if n else square
        return result if result is not self else self.copy()

    def _identity(self) -> Self:
        eye = self._new(Blocks(self.data[:0], self.indices[:0], self.indptr * 0))
        eye.setdiag(1)
        return eye

    def _container(self, x: Array) -> Array:
        return np.asmatrix(x) if isinstance(x, np.ndarray) else x

    def _line_result(self, values: Array, axis: int) -> Array:
        return self._container(values.reshape(1, -1) if axis == 0 else values.reshape(-1, 1))

    # ------------------------------------------------------------------ names of the matrix interface
    def set_shape(self, shape: Any) -> None:
        """Change the shape in place, keeping the order of the elements row by row.

        Parameters
        ----------
        shape : (M, N)
            The new shape, with the same number of elements. One side may be -1.

        Raises
        ------
        ValueError
            If the shape does not have as many elements as this matrix.
        TypeError
            If the shape is not made of integers.

        Notes
        -----
        A change of shape turns the blocks into blocks of 1 x 1, in canonical format. Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_matrix(np.arange(4.0).reshape(2, 2), blocksize=(2, 2))
        >>> A.set_shape((1, 4))
        >>> A.toarray()
        array([[0., 1., 2., 3.]])
        """
        M, N = full_shape(tuple(shape), self._shape[0] * self._shape[1])
        if self._shape == (M, N):
            return
        row, col = self._coords_in((M, N), "C")
        index = structure.index_dtype(max(M, N, self.nnz))
        values = self.data.reshape(-1)
        blocks = structure.from_coo(self._backend, row, col, values, (M, N), (1, 1), index)
        self._set(blocks, (M, N), canonical=True, maxprint=self.maxprint)

    def get_shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns.

        Returns
        -------
        (int, int)

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> bg.bsr_matrix((4, 6), blocksize=(2, 2)).get_shape()
        (4, 6)
        """
        return self._shape

    shape = property(get_shape, set_shape, doc="Rows and columns.")

    def getnnz(self, axis: int | None = None) -> int:
        """Return the number of stored elements; every element of a stored block counts, even if it is zero.

        Parameters
        ----------
        axis : None
            Present for compatibility with scipy; no other value is supported.

        Returns
        -------
        int

        Raises
        ------
        NotImplementedError
            If `axis` is given. `count_nonzero` accepts an axis and counts the elements that are not zero.

        Notes
        -----
        The call does not wait for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> bg.bsr_matrix(np.eye(4), blocksize=(2, 2)).getnnz()
        8
        """
        return self._getnnz(axis)

    def getformat(self) -> str:
        """Return the name of the format, which is always 'bsr'.

        Returns
        -------
        str

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> bg.bsr_matrix(np.eye(4), blocksize=(2, 2)).getformat()
        'bsr'
        """
        return self.format

    def getmaxprint(self) -> int:
        """Return the largest number of elements that ``print`` shows.

        Returns
        -------
        int

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> bg.bsr_matrix(np.eye(4), blocksize=(2, 2)).getmaxprint()
        50
        """
        return self.maxprint

    def asfptype(self) -> Self:
        """Cast the elements to a floating dtype.

        Returns
        -------
        bsr_matrix
            This matrix itself if its dtype is float32, float64, complex64 or complex128. Otherwise a copy in the first
            of these dtypes to which NumPy casts safely.

        Raises
        ------
        TypeError
            If there is no such dtype (long double).

        Notes
        -----
        A change of dtype waits for the GPU if the matrix is not yet known to be in canonical format.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> bg.bsr_matrix(np.eye(4, dtype=np.int8), blocksize=(2, 2)).asfptype().dtype
        dtype('float32')
        """
        return self._asfptype()

    def getH(self) -> Self:
        """Return the conjugate transpose.

        Returns
        -------
        bsr_matrix
            A matrix of shape (N, M). If the dtype is real, nothing is copied until its arrays are read; see
            `transpose`.

        Notes
        -----
        The call does not wait for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> bg.bsr_matrix(np.array([[1j, 2]]), blocksize=(1, 2)).getH().toarray()
        array([[0.-1.j],
               [2.+0.j]])
        """
        return self.H

    def getrow(self, i: int) -> Any:
        """Return one row as a CSR matrix.

        Parameters
        ----------
        i : int
            The index of the row. A negative index counts from the end.

        Returns
        -------
        csr_matrix of shape (1, N)
            A matrix of `scipy.sparse` on the CPU, of `cupyx.scipy.sparse` on the GPU.

        Raises
        ------
        IndexError
            If there is no such row.
        TypeError
            If CSR does not support the dtype; see `tocsr`.

        Notes
        -----
        The whole matrix is converted to CSR first. Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> bg.bsr_matrix(np.arange(4.0).reshape(2, 2), blocksize=(2, 2)).getrow(-1).toarray()
        array([[2., 3.]])
        """
        return self.tocsr()[_position(i, self._shape[0]), :]

    def getcol(self, j: int) -> Self:
        """Return one column as a BSR matrix.

        Parameters
        ----------
        j : int
            The index of the column. A negative index counts from the end.

        Returns
        -------
        bsr_matrix of shape (M, 1)
            A matrix in blocks of (R, 1), on the same device.

        Raises
        ------
        IndexError
            If there is no such column.

        Notes
        -----
        Waits for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> bg.bsr_matrix(np.arange(4.0).reshape(2, 2), blocksize=(2, 2)).getcol(1).toarray()
        array([[1.],
               [3.]])
        """
        j = _position(j, self._shape[1])
        C = self.blocksize[1]
        first = j - j % C
        block = self[:, first : first + C]
        column = block.data[:, :, j - first : j - first + 1]
        blocks = Blocks(self._backend.xp.ascontiguousarray(column), block.indices, block.indptr)
        return self._new(blocks, (self._shape[0], 1), canonical=block._known_canonical or None)


def _position(i: int, n: int) -> int:
    if not -n <= i < n:
        raise IndexError(f"index out of bounds: {i} of {n}")
    return i % n


def _move(A: Any, device: str) -> Any:
    return A.to_device(device)


def _unpickled(cls: type[Any]) -> Any:
    return object.__new__(leaf_of(host(), cls))


class _ExternalStream(NamedTuple):
    """A CUDA stream of another library, for the protocol by which CuPy takes it."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.address)


def _stream(backend: Backend, stream: Any) -> AbstractContextManager[Any]:
    """Return a stream of CuPy for a stream of any library, or for an integer with the meaning that DLPack gives it."""
    cuda = backend.xp.cuda
    if hasattr(stream, "__enter__") and hasattr(stream, "ptr"):
        return stream
    address = stream
    if hasattr(stream, "__cuda_stream__"):
        _, address = stream.__cuda_stream__()
    elif hasattr(stream, "cuda_stream"):  # of PyTorch
        address = stream.cuda_stream
    if isinstance(address, bool) or not isinstance(address, int | np.integer):
        raise TypeError(f"stream: wanted a CUDA stream, an integer or None, got {type(stream).__name__}")
    if address == 1 or (address == 0 and address is not stream):  # as an address, 0 is the default stream
        return cuda.Stream.null
    if address == 2:
        return cuda.Stream.ptds
    if address < 1:
        raise ValueError(f"stream: wanted 1, 2 or the address of a CUDA stream, got {stream!r}")
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_ExternalStream(int(address)))
    return cuda.ExternalStream(int(address))  # an older CuPy


@register_leaf
class host_bsr_array(bsr_array, *host().bases(True)):  # type: ignore[misc]
    """`bsr_array` with NumPy arrays."""

    _backend = host()
    __array_priority__ = _backend.array_priority


@register_leaf
class host_bsr_matrix(bsr_matrix, *host().bases(False)):  # type: ignore[misc]
    """`bsr_matrix` with NumPy arrays."""

    _backend = host()
    __array_priority__ = _backend.array_priority


def from_dense(X: Any, blocksize: tuple[int, int], threshold: float = 0, *, device: str | None = None) -> Any:
    """Convert a dense array to BSR and keep only the blocks with an element above a threshold.

    Parameters
    ----------
    X : array of shape (M, N)
        A dense array of NumPy or CuPy, of another library with DLPack or the CUDA array interface, or nested lists.
    blocksize : (R, C)
        The block size, which must divide the shape.
    threshold : float
        A block is stored if the absolute value of one of its elements is larger than this, or if one is NaN.
    device : {"cpu", "cuda"}, optional
        The device of the matrix, by default that of `X`.

    Returns
    -------
    bsr_array
        A matrix in canonical format, in the dtype of `X`.

    Raises
    ------
    TypeError
        If `X` is sparse, or if a matrix cannot have its dtype.
    ValueError
        If `X` does not have two dimensions, `blocksize` does not divide its shape, or `threshold` is negative or NaN.

    Notes
    -----
    Waits for the GPU if `X` is on the GPU, because the number of stored blocks must be known.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> X = np.array([[5.0, 0.0, 0.1, 0.0], [0.0, 5.0, 0.0, 0.1]])
    >>> bg.from_dense(X, (2, 2), threshold=1).toarray()
    array([[5., 0., 0., 0.],
           [0., 5., 0., 0.]])
    """
    source = backend_of(X) or foreign_backend(X) or host()
    if source.is_sparse(X):
        raise TypeError(f"X: wanted a dense 2-D array, got the sparse {type(X).__name__}")
    array = adopted(source, X, "X") if not isinstance(X, list | tuple) else np.asarray(X)
    if array is None or array.ndim != 2:
        raise ValueError(f"X: wanted a dense 2-D array, got {type(X).__name__}")
    if isinstance(threshold, bool) or not isinstance(threshold, numbers.Real) or not threshold >= 0:
        raise ValueError(f"threshold: wanted a number >= 0, got {threshold!r}")
    M, N = check_shape(array.shape)
    R, C = check_blocksize(blocksize, (M, N))
    array = array.astype(check_dtype(array.dtype, source.dtypes, "X"), copy=False)
    tiles = array.reshape(M // R, R, N // C, C)
    # The magnitude of the smallest integer of a dtype does not fit into it.
    small = (tiles <= threshold) & (tiles >= -threshold) if array.dtype.kind == "i" else abs(tiles) <= threshold
    keep = ~small.all(axis=(1, 3))
    empty = leaf(source, True)((0, 0), dtype=array.dtype)
    blocks = structure.from_dense(source, array, (R, C), structure.index_dtype(max(M, N, 1)), keep)
    A = empty._new(blocks, (M, N), canonical=True)
    return A if device is None else A.to_device(device)


def get_array_module(*args: Any) -> Any:
    """Return the array module of the arguments, like ``cupy.get_array_module``, also for matrices of this package.

    Parameters
    ----------
    *args : object
        Dense arrays, sparse matrices or any other objects.

    Returns
    -------
    module
        `cupy` if one of the arguments is on the GPU, otherwise `numpy`.

    Notes
    -----
    The call does not wait for the GPU.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> bg.get_array_module(bg.bsr_array(np.eye(4), blocksize=(2, 2))).__name__
    'numpy'
    """
    for x in args:
        backend = backend_of(x)
        if backend is not None and backend is not host():
            return backend.xp
    return np
