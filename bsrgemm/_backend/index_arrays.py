"""Index arrays of matrices on a device, which count the writes into them.

A list that is made from `indices` and `indptr` is valid until somebody writes into their memory. `IndexArray` is a
subclass of the array class of a device; its methods that write, and those of its views, give the memory another number.
A method that hands the memory to code that cannot be watched gives it the number NaN, which no list agrees with.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

#: The methods of NumPy's and CuPy's arrays that write into the array.
_WRITING = (
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__imatmul__", "__idiv__"),
    *("fill", "itemset", "partition", "put", "scatter_add", "scatter_max", "scatter_min", "set", "sort"),
    *("_scatter_op", "byteswap"),
)
#: Attributes that name the memory itself, or an array that does not count.
_HANDED_OUT = ("data", "base", "cstruct", "__cuda_array_interface__")
#: Methods with such a result.
_HANDING_OUT = ("__dlpack__", "toDlpack", "mdspan")

_numbers = itertools.count(1)
_lock = threading.Lock()


class Writes:
    """The number of the last write into an allocation; NaN, which differs from itself, once writes cannot be seen."""

    __slots__ = ("__weakref__", "number")

    def __init__(self) -> None:
        self.number: float = 0

    def note(self) -> None:
        """Take down that the memory was written to."""
        with _lock:
            if self.number == self.number:
                self.number = next(_numbers)

    def escape(self) -> None:
        """Take down that from now on the memory may be written to unseen."""
        with _lock:
            self.number = float("nan")


#: The `Writes` of arrays that are not watched: those of the host.
_UNWATCHED = Writes()


class SharedPattern:
    """What states of index arrays with equal values share, where that is known."""

    __slots__ = ("longest",)

    def __init__(self) -> None:
        #: the blocks of the longest block row; 0 if nobody has looked
        self.longest = 0


class Unwritten:
    """The state of the index arrays of a matrix, to tell later whether they were written to."""

    __slots__ = ("_first", "_first_number", "_second", "_second_number", "indices", "indptr", "lists", "pattern")

    def __init__(self, indices: Any, indptr: Any) -> None:
        self.pattern = SharedPattern()
        self.indices, self.indptr = indices, indptr
        #: what was made from the arrays, which is valid as long as this state holds
        self.lists: dict[Any, Any] = {}
        self._first, self._second = writes_of(indices), writes_of(indptr)
        self._first_number, self._second_number = self._first.number, self._second.number

    def holds(self) -> bool:
        """Tell whether nobody can have written into the arrays since."""
        return self._first.number == self._first_number and self._second.number == self._second_number

    def holds_for(self, A: Any) -> bool:
        """Tell whether the matrix still has these arrays, and nobody can have written into them since."""
        indices, indptr = A._index
        return (
            self.indices is indices
            and self.indptr is indptr
            and self._first.number == self._first_number
            and self._second.number == self._second_number
        )


class IndexArray:
    """The methods that an array class gets so that it counts writes; `watched_class` adds them to a class."""

    __slots__ = ()
    #: The array class without these methods.
    _plain_class: type[Any]
    _plain: Any
    _writes: Writes | None

    def __array_finalize__(self, source: Any) -> None:
        """Called for every view; a view of a watched array counts with it."""
        self._plain = None
        self._writes = getattr(source, "_writes", None)  # type: ignore[misc]

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """Called by element-wise functions and kernels of CuPy with this array among their positional arguments."""
        out = kwargs.get("out")
        outputs = (*args[kernel.nin :], *(out if isinstance(out, tuple) else (out,)))
        try:
            found = kernel(*map(_unwatched, args), **{name: _unwatched(x) for name, x in kwargs.items()})
        finally:
            _note(outputs)
        return tuple(map(_watched(outputs), found)) if isinstance(found, tuple) else _watched(outputs)(found)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().__array_ufunc__(ufunc, method, *inputs, **kwargs)  # type: ignore[misc]
        finally:
            _note((*(inputs if method == "at" else ()), *_flat(kwargs.get("out"))))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Called by NumPy's functions; which arguments they write into is not known."""
        try:
            return super().__array_function__(func, types, args, kwargs)  # type: ignore[misc]
        finally:
            _note((*_flat(args), *_flat(tuple(kwargs.values()))))

    def view(self, dtype: Any = None, type: Any = None) -> Any:
        """Return a view that counts too. A view of another class does not, so it ends the counting."""
        for wanted in (dtype, type):
            if (
                isinstance(wanted, _TYPE)
                and issubclass(wanted, self._plain_class)
                and not issubclass(wanted, IndexArray)
            ):
                writes_of(self).escape()
        given = {name: x for name, x in (("dtype", dtype), ("type", type)) if x is not None}
        return super().view(**given)  # type: ignore[misc]


_TYPE = type


def _writing(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = plain_array(self)
        try:
            found = getattr(plain, name)(*map(_unwatched, args), **{key: _unwatched(x) for key, x in kwargs.items()})
        finally:
            writes_of(self).note()
        return self if found is plain else found

    method.__name__ = name
    return method


def _handed_out(name: str) -> property:
    def read(self: Any) -> Any:
        writes_of(self).escape()
        return getattr(plain_array(self), name)

    return property(read)


def _handing_out(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        writes_of(self).escape()
        return getattr(plain_array(self), name)(*args, **kwargs)

    method.__name__ = name
    return method


def watched_class(array: type[Any], allocation: Callable[[Any], Hashable]) -> type[Any]:
    """Return a subclass of an array class that counts writes; `allocation` names the memory of an array, None for none.

    The class has CuPy's protocol for subclasses: ``x.view(type=cls)`` and `__array_finalize__`.
    """
    body: dict[str, Any] = {
        "__slots__": ("_plain", "_writes"),
        "__module__": array.__module__,  # by which others recognise an array of the module
        "__doc__": "An index array of a matrix, which counts the writes into it.",
        "_plain_class": array,
        "_allocation": staticmethod(allocation),
        "_by_allocation": WeakValueDictionary(),
    }
    body |= {name: _writing(name) for name in _WRITING if hasattr(array, name)}
    body |= {name: _handed_out(name) for name in _HANDED_OUT if hasattr(array, name)}
    body |= {name: _handing_out(name) for name in _HANDING_OUT if hasattr(array, name)}
    return type("IndexArray", (IndexArray, array), body)


def watched(cls: type[Any], x: Any) -> Any:
    """Return an array as one of a class that `watched_class` made; all arrays of the same memory count together."""
    if isinstance(x, cls) or not isinstance(x, cls._plain_class):
        return x
    found = x.view(type=cls)
    found._plain = x
    return found


def unshared(cls: type[Any], x: Any) -> Any:
    """Return a copy of an array that is not of such a class, so that nobody can write into it unseen."""
    return x if isinstance(x, cls) or not isinstance(x, cls._plain_class) else x.copy()


def plain_array(x: Any) -> Any:
    """Return an array of the same memory that does not count, which nobody outside of the package may get."""
    if not isinstance(x, IndexArray):
        return x
    if x._plain is None:
        x._plain = x._plain_class.view(x, type=x._plain_class)
    return x._plain


def writes_of(x: Any) -> Writes:
    """Return the `Writes` of the memory of an array; those of an array that is not watched never change."""
    if not isinstance(x, IndexArray):
        return _UNWATCHED
    if x._writes is None:
        cls: Any = type(x)
        key = cls._allocation(plain_array(x))
        with _lock:
            found = None if key is None else cls._by_allocation.get(key)
            if found is None:
                found = Writes()
                if key is not None:
                    cls._by_allocation[key] = found
        x._writes = found  # type: ignore[misc]
    return x._writes


def _unwatched(x: Any) -> Any:
    return tuple(map(plain_array, x)) if isinstance(x, tuple) else plain_array(x)


def _watched(arrays: Iterable[Any]) -> Callable[[Any], Any]:
    """Return a function that maps the plain array of one of `arrays` to that array, and anything else to itself."""
    by_plain = {id(x._plain): x for x in arrays if isinstance(x, IndexArray)}
    return lambda x: by_plain.get(id(x), x)


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, tuple | list):
        for part in x:
            yield from _flat(part)
    else:
        yield x


def _note(arrays: Iterable[Any]) -> None:
    for x in arrays:
        if isinstance(x, IndexArray):
            writes_of(x).note()
