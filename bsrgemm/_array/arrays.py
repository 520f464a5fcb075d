"""The classes that hold data, and the arrays of a BSR matrix: how they are built, replaced and copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self
from weakref import WeakValueDictionary

import numpy as np

from .._backend.base import Array, Backend, Blocks, ListMaker, named
from .._backend.index_arrays import Unwritten, plain_array
from .._backend.recording import recorded
from .._backend.registry import backend_of, host
from ..dtypes import check_dtype

_public: dict[bool, type[Any]] = {}
_leaves: dict[tuple[Backend, bool], type[Any]] = {}


def register_public(cls: type[Any]) -> type[Any]:
    """Register a public class, `bsr_array` or `bsr_matrix`, which has no backend yet; a class decorator."""
    _public[cls._is_array] = cls
    return cls


def register_leaf(cls: type[Any]) -> type[Any]:
    """Register a class whose data lives in one backend; a class decorator."""
    _leaves[cls._backend, cls._is_array] = cls
    return cls


def leaf(backend: Backend, is_array: bool) -> type[Any]:
    """Return the array class (`is_array`) or the matrix class whose data lives in `backend`."""
    found = _leaves.get((backend, is_array))
    if found is not None:
        return found
    return _leaves.setdefault((backend, is_array), _made(backend, _public[is_array], {}))


def leaf_of(backend: Backend, cls: type[Any]) -> type[Any]:
    """Return the class whose data lives in `backend` for `bsr_array`, `bsr_matrix` or a user's subclass of one."""
    if cls is _public[cls._is_array]:
        return leaf(backend, cls._is_array)
    found: type[Any] | None = cls._own_leaves.get(backend)
    return found or cls._own_leaves.setdefault(backend, _made(backend, cls, {"_of_subclass": True}))


def _made(backend: Backend, base: type[Any], body: dict[str, Any]) -> type[Any]:
    """Make a subclass of `base` whose data lives in `backend`."""
    if backend.records:
        body = body | {name: recorded(method) for name, method in _methods(base)}
    body = body | {
        "__doc__": f"`{base.__name__}` with {backend.xp.__name__} arrays.",
        "__module__": base.__module__,
        "__array_priority__": backend.array_priority,
        "_backend": backend,
    }
    return type(f"{backend.name}_{base.__name__}", (base, *backend.bases(base._is_array)), body)


def _methods(base: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the methods that a user calls, the operators among them.

    Products with a dense operand are left out: they are short, and their engine keeps what they use. So is
    `sum_duplicates`, which waits whenever it has something to do.
    """
    for name in dir(base):
        found = getattr(base, name)
        operator = name.startswith("__") and not hasattr(object, name)
        public = operator or not name.startswith("_")
        if isinstance(found, FunctionType) and public and name not in ("__matmul__", "__rmatmul__", "sum_duplicates"):
            yield name, found


_FIELDS = frozenset(Blocks._fields)
_INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


class Origin(NamedTuple):
    """The source of a transpose that has no arrays yet: a matrix, and its arrays and flags when it was transposed."""

    matrix: Any
    blocks: Blocks
    shape: tuple[int, int]
    was_canonical: bool | None
    sorted_: bool | None
    #: When the matrix was known to be in canonical format; None on the host.
    canonical_since: Unwritten | None
    #: The index arrays, if nobody has read them.
    unread: Unwritten | None

    @property
    def canonical(self) -> bool | None:
        """Whether the matrix is known to be in canonical format still."""
        return self.was_canonical if self.canonical_since is None or self.canonical_since.holds() else None

    def unchanged(self) -> bool:
        """Tell whether the matrix still has these arrays and this shape."""
        A, (data, indices, indptr) = self.matrix, self.blocks
        index = A._index
        return A.data is data and index[0] is indices and index[1] is indptr and A._shape == self.shape


class _Stored:
    """A descriptor for `data`, `indices` or `indptr`, one of the three arrays of a matrix.

    A transpose has no arrays until one of them is read; reading it through this descriptor builds all three. A matrix
    that the library has made on a device has no index arrays for users until one of them is read. An array that a
    matrix has already is in the `__dict__` of the matrix, where Python finds it without this descriptor.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: BlockArrays | None, owner: type) -> Any:
        if instance is None:
            return self
        instance._build()
        instance._hand_out()
        try:
            return instance.__dict__[self.name]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}") from None


def assigned(backend: Backend, name: str, value: Any) -> Array:
    """Return what a user assigns to `data`, `indices` or `indptr` as an array that a matrix of `backend` can have.

    Whether the three fit each other is seen when they are used: they are assigned one after the other.
    """
    if backend is host() and isinstance(value, list | tuple):
        try:
            value = np.asarray(value)
        except ValueError:
            raise ValueError(f"{name}: wanted numbers in rows of one length, got {named(value)} of others") from None
        if not value.size and name != "data":
            value = value.astype(np.int32)
    if not backend.is_dense(value):
        way_out = f"; {backend.bring}" if backend_of(value) is not None else ""
        raise TypeError(f"{name}: wanted an array on {backend.name!r}, got {named(value)}{way_out}")
    wanted = "(blocks, R, C)" if name == "data" else f"({'blocks' if name == 'indices' else 'block rows + 1'},)"
    if value.ndim != (3 if name == "data" else 1):
        raise ValueError(f"{name}: wanted shape {wanted}, got {tuple(value.shape)}")
    if name == "data":
        return value.astype(check_dtype(value.dtype, backend.dtypes, "data"), copy=False)
    if value.dtype.kind not in "iu":
        raise TypeError(f"{name}: wanted integers, got {value.dtype}")
    if value.dtype in _INDEX_DTYPES:
        return value
    small = np.can_cast(value.dtype, np.int32)
    return value.astype(np.int32 if small else np.int64)


class BlockArrays:
    """The arrays of a matrix, written once for all backends over ``self._backend.xp``.

    A transpose begins as an `Origin` without arrays of its own. Products read the arrays of the origin, and `data`,
    `indices` and `indptr` of the transpose are built when one of them is read.

    A matrix that the library makes on a device has index arrays that are `_unread`: nobody else has them, so that
    matrices with one pattern share them. It has copies of them instead from when a user reads `indices` or `indptr`.
    """

    _backend: ClassVar[Backend]
    #: The stored blocks, of shape (blocks, R, C), block row by block row.
    data: Array = _Stored()
    #: The block column of each stored block, of shape (blocks,), in int32 or int64.
    indices: Array = _Stored()
    #: The blocks of block row i are those from ``indptr[i]`` to ``indptr[i + 1] - 1``; shape (block rows + 1,).
    indptr: Array = _Stored()
    _origin: Origin | None = None
    _unread: Unwritten | None = None
    #: the unread arrays whose copies this matrix has, and the state of these copies
    _handed_out: tuple[Unwritten, Unwritten] | None = None
    #: Transposes that may still read the arrays of this matrix, by id. Matrices that are made of one another and share
    #: their values share this dictionary.
    _transposes: WeakValueDictionary[int, Any] | None = None
    _shape: tuple[int, int]
    maxprint: int
    _has_sorted_indices: bool | None
    _has_canonical_format: bool | None
    #: An index array that is known to be in canonical format; it tells nothing once `indices` is another array.
    _canonical_indices: Array | None
    #: On a device, the state of the index arrays when they were known to be in canonical format.
    _canonical_since: Unwritten | None = None
    #: On a device, the state of the index arrays from which lists were made, with these lists.
    _lists: Unwritten | None = None

    # ------------------------------------------------------------------------------- building
    def _set(
        self,
        blocks: Blocks,
        shape: tuple[int, int],
        *,
        canonical: bool | None = None,
        sorted_: bool | None = None,
        maxprint: int = 50,
        longest: int = 0,
    ) -> Self:
        self._replace(blocks)
        own = self.__dict__  # `__setattr__` would take longer
        own["_shape"], own["maxprint"] = shape, maxprint
        own["_has_canonical_format"] = None if canonical else canonical
        own["_has_sorted_indices"] = sorted_
        own["_canonical_indices"] = self.indices if canonical else None
        if canonical:
            self._note_canonical()
            if self._canonical_since is not None:
                self._canonical_since.pattern.longest = longest
        return self

    def _replace(self, blocks: Blocks) -> None:
        """Set the three arrays without a copy; arrays that others may write to do not belong here."""
        backend = self._backend
        if backend.index_class is None:
            own = self.__dict__
            own["data"], own["indices"], own["indptr"] = blocks
        else:
            known = self._canonical_since is not None and self._canonical_since.holds_for(self)
            data, indices, indptr = blocks
            self._store(data, backend.watched(indices), backend.watched(indptr))
            if known:
                self._note_canonical()

    def _store(self, data: Array, indices: Array, indptr: Array) -> None:
        """Set the three arrays, which are known to be of the right kind."""
        own = self.__dict__
        own["data"], own["indices"], own["indptr"] = data, indices, indptr
        own.pop("_unread", None)
        own.pop("_handed_out", None)

    def _hand_out(self) -> None:
        """Give this matrix index arrays that a user may have, instead of those that are unread."""
        unread, backend = self._unread, self._backend
        if unread is None:
            return
        if backend.is_recording():  # the copies would be made when the graph runs, and be read before
            raise RuntimeError(
                "indices, indptr: they are copied when they are read for the first time, which cannot be in a CUDA "
                "graph; read A.indices once before the capture"
            )
        canonical = self._canonical_since is not None  # unread arrays stay as they are
        self._store(self.data, *(backend.watched(x.copy()) for x in (unread.indices, unread.indptr)))
        self.__dict__["_handed_out"] = unread, Unwritten(self.indices, self.indptr)
        self._canonical_since = None
        if canonical:
            self._canonical_indices = self.indices
            self._canonical_since = self._state()
            self._canonical_since.pattern = unread.pattern

    if not TYPE_CHECKING:  # a checker would take every name for an attribute

        def __setattr__(self, name: str, value: Any) -> None:
            if name in _FIELDS and value is not self.__dict__.get(name, self):
                if name != "data":
                    self._hand_out()
                value = assigned(self._backend, name, value)
            object.__setattr__(self, name, value)

    def _note_canonical(self) -> None:
        """Take down that the index arrays are in canonical format now."""
        if self._backend.index_class is not None:
            before, self._canonical_since = self._canonical_since, self._state()
            if before is not None and before.holds_for(self):
                self._canonical_since.pattern = before.pattern

    def _has_pattern_of(self, other: BlockArrays) -> bool:
        """Tell whether two matrices on a device are known to have the same pattern, in canonical format."""
        a, b = self._canonical_since, other._canonical_since
        if a is None or b is None or a.pattern is not b.pattern:
            return False
        return a.holds_for(self) and b.holds_for(other)

    def _note_pattern_of(self, other: BlockArrays) -> None:
        """Take down that this new matrix has the pattern of another one, as far as both are in canonical format."""
        a, b = self._canonical_since, other._canonical_since
        if a is not None and b is not None:
            a.pattern = b.pattern

    def _take_over(self) -> None:
        """On a device, replace index arrays that a user has assigned by copies; writes into theirs would go unseen."""
        backend = self._backend
        cls = backend.index_class
        if cls is None or self._unread is not None or (type(self.indices) is cls and type(self.indptr) is cls):
            return
        if backend.is_recording():  # the copies would be made when the graph runs, and be read before
            raise RuntimeError(
                "indices, indptr: new arrays were assigned, and are copied when the matrix is used for the first time, "
                "which cannot be in a CUDA graph; use the matrix once, for example in A @ x, before the capture"
            )
        self._store(self.data, *(backend.watched(backend.own(x)) for x in (self.indices, self.indptr)))

    def _new(self, blocks: Blocks, shape: tuple[int, int] | None = None, **flags: bool | None) -> Self:
        """Create a matrix of the same class from arrays that are known to be valid, without copying them."""
        return object.__new__(type(self))._set(blocks, self._shape if shape is None else shape, **flags)  # type: ignore[arg-type]

    def _new_unread(
        self,
        data: Array,
        index: Unwritten,
        shape: tuple[int, int] | None = None,
        *,
        canonical: bool | None = None,
        sorted_: bool | None = None,
    ) -> Self:
        """Create a matrix of the same class on a device, with index arrays that nobody else has."""
        found = object.__new__(type(self))
        own = found.__dict__
        own["data"], own["_unread"], own["maxprint"] = data, index, 50
        own["_shape"] = self._shape if shape is None else shape
        own["_has_canonical_format"], own["_has_sorted_indices"] = None if canonical else canonical, sorted_
        own["_canonical_indices"] = index.indices if canonical else None
        own["_canonical_since"] = index if canonical else None
        return found

    def _new_own(self, blocks: Blocks, shape: tuple[int, int] | None = None, **flags: bool | None) -> Self:
        """Do what `_new` does, for index arrays that were made for this matrix alone."""
        if self._backend.index_class is None:
            return self._new(blocks, shape, **flags)
        return self._new_unread(blocks.data, Unwritten(blocks.indices, blocks.indptr), shape, **flags)

    def _with_data(self, data: Array, copy: bool = True) -> Self:
        """Create a matrix with the same pattern and other values; `copy` tells whether to copy the index arrays."""
        flags: Any = {"canonical": self._kept_canonical, "sorted_": self._has_sorted_indices}
        if self._unread is not None or (copy and self._backend.index_class is not None):
            found = self._new_unread(data, self._unread_copies(), **flags)
        else:
            self._take_over()
            index = (x.copy() if copy else x for x in (self.indices, self.indptr))
            found = self._new(Blocks(data, *index), **flags)
        found._note_pattern_of(self)
        return found

    def _unread_copies(self) -> Unwritten:
        """Return the index arrays if they are unread, otherwise copies, which matrices with this pattern share."""
        if self._unread is not None:
            return self._unread

        def copies() -> Unwritten:
            _, indices, indptr = self._blocks
            return Unwritten(indices.copy(), indptr.copy())

        found: Unwritten = self._listed("copies", copies)
        return found

    @property
    def _was_unread(self) -> Unwritten | None:
        """The unread arrays of this matrix, or those of which it has copies that nobody wrote into."""
        if self._unread is not None or self._handed_out is None:
            return self._unread
        unread, copies = self._handed_out
        return unread if copies.holds_for(self) else None

    @property
    def _index(self) -> tuple[Array, Array]:
        """The index arrays, as the matrix keeps them."""
        unread = self._unread
        return (self.indices, self.indptr) if unread is None else (unread.indices, unread.indptr)

    def _state(self) -> Unwritten:
        """Return the state of the index arrays, to tell later whether they were written to."""
        self._take_over()
        return self._unread or Unwritten(self.indices, self.indptr)

    @property
    def _blocks(self) -> Blocks:
        """The three arrays, for computations. On a device writes into these index arrays are not counted."""
        unread = self._unread
        if unread is not None:
            return Blocks(self.data, unread.indices, unread.indptr)
        if self._backend.index_class is None:
            return Blocks(self.data, self.indices, self.indptr)
        self._take_over()
        return Blocks(self.data, plain_array(self.indices), plain_array(self.indptr))

    def copy(self) -> Self:
        """Return a copy of this matrix with arrays of its own.

        Returns
        -------
        bsr_array or bsr_matrix
            A matrix of the same class, on the same device.

        Notes
        -----
        The copy of a transpose is built immediately. The call does not wait for the GPU.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.eye(2), blocksize=(2, 2))
        >>> B = A.copy()
        >>> B *= 5
        >>> A.toarray()
        array([[1., 0.],
               [0., 1.]])
        """
        if self._origin is not None:
            A, transposed = self._source()
            if transposed:
                return A._transpose_now()
        return self._with_data(self.data.copy())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    # ------------------------------------------------------------------------------ transposes
    def _transposed(self) -> Self:
        """Return the transpose, whose arrays are built when they are first read."""
        if self._origin is not None:
            A, transposed = self._source()
            if transposed:
                back = self._of_origin(self._origin)
                back._transposes = A._transposes
                return back
        T = object.__new__(type(self))
        own = T.__dict__
        own["_shape"], own["maxprint"] = self._shape[::-1], 50
        own["_has_canonical_format"] = own["_canonical_indices"] = None
        own["_has_sorted_indices"] = True
        self._take_over()
        flags = self._known_canonical or None, self._has_sorted_indices, self._canonical_since, self._unread
        own["_origin"] = Origin(self, Blocks(self.data, *self._index), self._shape, *flags)
        self._readers()[id(T)] = T
        return T

    def _of_origin(self, origin: Origin) -> Self:
        """Return a matrix with the arrays of which this is the transpose."""
        flags = {"canonical": origin.canonical, "sorted_": origin.sorted_}
        if origin.unread is not None:
            return self._new_unread(origin.blocks.data, origin.unread, origin.shape, **flags)
        return self._new(origin.blocks, origin.shape, **flags)

    def _readers(self) -> WeakValueDictionary[int, Any]:
        """Return the transposes that may still read the arrays of this matrix, and of all that share its values."""
        found = self._transposes
        if found is None:  # setdefault is atomic, so two threads get the same dictionary
            found = self.__dict__.setdefault("_transposes", WeakValueDictionary())
        return found

    def _transpose_now(self) -> Self:
        """Build the transpose with arrays of its own."""
        (M, N), backend, stored = self._shape, self._backend, self._validated
        flags: Any = {"sorted_": True, "canonical": self._known_canonical or None}
        lists = self._by_column(stored, 0)
        if backend.index_class is None or lists is None:
            return self._new(backend.transpose(stored, self._block_shape[1], lists), (N, M), **flags)
        by_column, key = lists(), ("transposed", self._block_shape[1])
        index = self._listed(key, lambda: Unwritten(*backend.transposed_index(stored, by_column)))
        return self._new_unread(backend.turned(stored.data, by_column[0]), index, (N, M), **flags)

    def _source(self) -> tuple[Self, bool]:
        """Return a matrix that has arrays, and whether this matrix is the transpose of it."""
        origin = self._origin
        if origin is None:
            return self, False
        if not self.__dict__.keys().isdisjoint(Blocks._fields):  # a user has assigned an array; it takes precedence
            self._build()
            return self, False
        if not origin.unchanged():
            A = self._of_origin(origin)
            A._transposes = origin.matrix._transposes
            self._origin = origin = origin._replace(matrix=A)
        return origin.matrix, True

    def _build(self) -> None:
        """Give a transpose arrays of its own; arrays that a user has assigned to it are kept."""
        origin = self._origin
        if origin is None:
            return
        data, indices, indptr = origin.blocks
        (M, N), (_, R, C) = origin.shape, data.shape
        source = Blocks(data, plain_array(indices), plain_array(indptr))
        data, indices, indptr = self._backend.transpose(self._backend.validated(source, M // R, N // C), N // C)
        blocks = Blocks(data, self._backend.watched(indices), self._backend.watched(indptr))
        for name, array in zip(Blocks._fields, blocks, strict=True):
            self.__dict__.setdefault(name, array)
        if origin.canonical:
            self._canonical_indices = blocks.indices
            self._note_canonical()
        self._origin = None

    def _by_column(self, blocks: Blocks, axis: int) -> ListMaker | None:
        """Return what makes the list of the blocks of this matrix by block column; None for axis 1.

        On a device the list is kept until somebody writes into the index arrays.
        """
        backend = self._backend
        if axis == 1:
            return None

        def make() -> tuple[Array, Array]:
            return backend.by_column(blocks.indices, blocks.indptr, self._block_shape[1])

        own = backend.index_class is not None and blocks.indices is plain_array(self._index[0])
        return (lambda: self._listed(self._block_shape[1], make)) if own else make

    def _listed(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made from the index arrays on a device; it is made again once somebody writes into these.

        Matrices that share unread index arrays share it.
        """
        if self._lists is None or not self._lists.holds_for(self):
            self._lists = self._state()
        return self._backend.kept(self._lists.lists, key, make)

    def _before_writing(self) -> None:
        """Build all transposes that still read the values of this matrix, which are about to change in place."""
        if self._transposes is not None:
            for T in list(self._transposes.values()):
                T._build()
            self._transposes.clear()

    # ----------------------------------------------------------------------------- what is known
    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns, (M, N)."""
        return self._shape

    @property
    def _shape_as_2d(self) -> tuple[int, int]:
        """The shape, which matrices of scipy read from the other operand of a product, and from a value to assign."""
        return self._shape

    @property
    def blocksize(self) -> tuple[int, int]:
        """The numbers of rows and columns of a block, (R, C)."""
        if self._origin is not None:
            A, transposed = self._source()
            return tuple(A.data.shape[:0:-1] if transposed else A.data.shape[1:])
        return tuple(self.data.shape[1:])

    @property
    def _block_shape(self) -> tuple[int, int]:
        """The numbers of block rows and block columns."""
        (M, N), (R, C) = self._shape, self.blocksize
        return M // R, N // C

    @property
    def _known_canonical(self) -> bool:
        """Whether the matrix is known to be in canonical format, without a check of the indices."""
        if self._canonical_since is not None and not self._canonical_since.holds_for(self):
            return False
        if self._has_canonical_format is not None:
            return self._has_canonical_format
        return self._index[0] is self._canonical_indices

    @property
    def _kept_canonical(self) -> bool | None:
        """What is known about the canonical format of a matrix with the same index arrays."""
        if self._canonical_since is not None and not self._canonical_since.holds_for(self):
            return None
        return self._known_canonical or self._has_canonical_format

    @property
    def _validated(self) -> Blocks:
        """The blocks, checked on the host but not on the GPU, where a check would synchronise."""
        blocks = self._blocks
        if self._backend.index_class is not None:
            return blocks
        (M, N), (_, R, C) = self._shape, blocks[0].shape
        return self._backend.validated(blocks, M // R, N // C)
