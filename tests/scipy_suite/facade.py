"""NumPy in, NumPy out, device in between: scipy's tests talk through it to a matrix that lives elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.sparse as sp
from scipy._lib._sparse import SparseABC
from scipy.sparse.tests import test_base as tb

from bsrgemm._backend.registry import Backend, by_name, host
from bsrgemm.bsr import leaf

from .point import SCIPY_CLASSES, Difference, point
from .test_scipy_bsr import DIFFERS, NONCANONICAL_DIFFERS

#: scipy's own mixin, by which two min/max tests decide whether to run (`point` widens the name they look up).
_EXTREMES = ("max", "min", "nanmax", "nanmin")
_MINMAX = next(c for c in sp.csr_array.__mro__ if c.__name__ == "_minmax_mixin")

_ARRAYS = ("data", "indices", "indptr")
_OPERATORS = (
    "add radd sub rsub mul rmul matmul rmatmul truediv rtruediv pow eq ne lt le gt ge "
    "iadd isub imul itruediv neg abs round bool len iter getitem setitem"
)
#: Methods whose first argument is an operand, where scipy takes a list for an array.
_OPERAND_METHODS = frozenset(("dot", "multiply", "maximum", "minimum"))
_NOT_HELD = re.compile(r"does not hold (\w+)")


class Facade(SparseABC, _MINMAX):  # type: ignore[misc, valid-type]
    """A matrix of ours in some backend, shown to scipy's tests as if it were on the host.

    Every argument is copied to the backend and every result back. An array that was handed out (`A.data`) is a
    live mirror: what a test writes into it reaches the device before the next call.
    """

    # No entries in __dict__: test_pickle compares those with `==`.
    __slots__ = ("_device", "_mirrors")
    __array_priority__ = 10.1
    __hash__ = None  # type: ignore[assignment]
    _backend: ClassVar[Backend]
    _is_array: ClassVar[bool]

    def __init__(self, arg1: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = _map(self._sent, args), _map(self._sent, kwargs)
        self._show(leaf(self._backend, self._is_array)(self._sent(arg1), *args, **kwargs))

    def _show(self, device: Any) -> Facade:
        object.__setattr__(self, "_device", device)
        object.__setattr__(self, "_mirrors", {})
        return self

    def _synced(self) -> Any:
        for name, mirror in self._mirrors.items():
            getattr(self._device, name)[...] = self._backend.from_host(mirror)
        return self._device

    # ------------------------------------------------------------------------------- there and back
    def _sent(self, x: Any) -> Any:
        """`x` on the device, if it is something that has a place there."""
        if isinstance(x, Facade):
            return x._synced()
        if sp.issparse(x):
            return self._sent_sparse(x)
        if isinstance(x, np.ndarray) and x.ndim and x.dtype != np.object_:
            return self._backend.from_host(np.asarray(x))
        return _map(self._sent, x) if isinstance(x, tuple) else x

    def _sent_sparse(self, x: Any) -> Any:
        """In the same format if the device has a class that holds it, otherwise as BSR of single elements."""
        is_array = isinstance(x, sp.sparray)
        if x.format not in ("bsr", "coo", "csr", "csc", "dia"):
            x = x.tocsr()
        if x.format != "bsr" and x.dtype in self._backend.foreign_dtypes:
            return getattr(self._backend.sparse, f"{x.format}_{'array' if is_array else 'matrix'}")(x)
        return leaf(self._backend, is_array)(x, blocksize=None if x.format == "bsr" or x.ndim != 2 else (1, 1))

    def _received(self, x: Any) -> Any:
        """`x` on the host."""
        if x is self._device:
            return self
        if isinstance(x, leaf(self._backend, True) | leaf(self._backend, False)):
            return object.__new__(facade(self._backend, x._is_array))._show(x)
        if self._backend.is_dense(x):
            host_array = self._backend.to_host(x)
            in_columns = x.flags.f_contiguous and not x.flags.c_contiguous  # which a copy to the host forgets
            return np.asfortranarray(host_array) if in_columns else host_array[()]
        if self._backend.is_sparse(x):
            return x.get()
        return _map(self._received, x) if isinstance(x, tuple) else x

    # ---------------------------------------------------------------------------------------- calls
    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in _OPERAND_METHODS or name.startswith("__"):
            args = tuple(np.asarray(x) if isinstance(x, list) else x for x in args)
        is_matrix = any(isinstance(x, np.matrix) for x in args)
        out = kwargs.get("out")
        args, kwargs = _map(self._sent, args), _map(self._sent, kwargs)
        if isinstance(out, np.ndarray):
            kwargs["out"] = self._backend.from_host(np.asarray(out))
        result = self._received(self._answer(name, args, kwargs))
        self._mirrors.clear()
        if isinstance(out, np.ndarray):
            out[...] = self._backend.to_host(kwargs["out"])
            return out
        # A device has no np.matrix: what scipy's matrices answer as one is 2-D there.
        if isinstance(result, np.ndarray) and (is_matrix or (not self._is_array and name != "toarray")):
            return result.view(np.matrix) if result.ndim == 2 else result
        return result

    def _answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The device's answer, or on the host what only the host's classes can hold.

        cupyx holds bool, float32, float64, complex64 and complex128 and has no LIL and DOK: our errors say
        which cast or copy to make. It is made here as a user would: cast on the device, convert, bring the
        result to the host and cast it back there; integers that float64 does not carry go to the host first.
        """
        device = self._synced()
        try:
            result = getattr(device, name)(*args, **kwargs)
            if name in _EXTREMES and device.dtype not in self._backend.foreign_dtypes and getattr(result, "ndim", 0):
                return getattr(device.get(), name)(*args, **kwargs)  # dense, since no COO of the device holds the dtype
            return result
        except TypeError as error:
            wanted = _NOT_HELD.search(str(error))
            if wanted is None:
                raise
            values = self._backend.to_host(device.data)
            with np.errstate(invalid="ignore"):
                exact = np.array_equal(values.astype(np.float64).astype(values.dtype), values)
            if not exact:
                return getattr(device.get(), name)(*_map(self._received, args), **_map(self._received, kwargs))
            result = self._received(getattr(device.astype(np.float64), name)(*args, **kwargs))
            return result.astype(wanted[1]) if np.dtype(wanted[1]) in host().foreign_dtypes else result
        except NotImplementedError as error:
            if "copy to the host" not in str(error):
                raise
            return getattr(device.get(), name)(*args, **kwargs)

    # ----------------------------------------------------------------------------------- attributes
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Facade.__slots__:
            raise AttributeError(name)
        if name in _ARRAYS:
            if name not in self._mirrors:
                self._mirrors[name] = self._backend.to_host(getattr(self._device, name))
            return self._mirrors[name]
        if callable(getattr(self._device, name)):
            return partial(self._call, name)
        try:
            return self._received(getattr(self._synced(), name))
        except AttributeError as error:  # raised inside a property, not for want of one
            raise RuntimeError(f"{name}: {error}") from error

    def __setattr__(self, name: str, value: Any) -> None:
        device = self._synced()
        self._mirrors.pop(name, None)
        setattr(device, name, self._sent(value))

    def __reduce__(self) -> Any:
        return _unpickled, (self._backend.name, self._is_array, self._synced())

    def __repr__(self) -> str:
        return repr(self._synced())

    def __str__(self) -> str:
        return str(self._synced())


class _Delegated:
    """An attribute that the device answers although a base class of the facade defines it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Facade | None, owner: type) -> Any:
        return self if instance is None else instance.__getattr__(self.name)

    def __set__(self, instance: Facade, value: Any) -> None:
        Facade.__setattr__(instance, self.name, value)


def _map(function: Callable[[Any], Any], items: Any) -> Any:
    if isinstance(items, dict):
        return {key: function(value) for key, value in items.items()}
    return tuple(function(item) for item in items)


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Facade, *args: Any) -> Any:
        return self._call(name, *args)

    return method


for _name in _OPERATORS.split():
    setattr(Facade, f"__{_name}__", _operator(f"__{_name}__"))


@cache
def facade(backend: Backend, is_array: bool) -> type[Facade]:
    """The facade of `bsr_array` or `bsr_matrix` in `backend`."""
    mark = sp.sparray if is_array else sp.spmatrix
    own = {f"__{name}__" for name in _OPERATORS.split()} | {"__class_getitem__"}
    inherited = {name for base in (mark, _MINMAX) for name in dir(base) if not name.startswith("_")}
    body: dict[str, Any] = {name: _Delegated(name) for name in inherited}
    body |= {name: getattr(Facade, name) for name in own & set(dir(Facade))}
    body |= {"_backend": backend, "_is_array": is_array, "__slots__": (), "__module__": __name__}
    name = f"{backend.name}_facade_{'array' if is_array else 'matrix'}"
    return type(name, (Facade, mark), body)


def _unpickled(device: str, is_array: bool, matrix: Any) -> Facade:
    return object.__new__(facade(by_name(device), is_array))._show(matrix)


# ------------------------------------------------------------------------- scipy's suite on a device
def _shares_memory(scipy_check: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """scipy's check looks for NumPy arrays in `__dict__`; ours asks the arrays on the device."""

    def check(A: Any, B: Any) -> bool:
        if not (isinstance(A, Facade) and isinstance(B, Facade)):
            return scipy_check(A, B)
        a, b = ([getattr(X._synced(), name) for name in _ARRAYS] for X in (A, B))
        return any(A._backend.xp.may_share_memory(x, y) for x in a for y in b)

    return check


@contextmanager
def device_suite(backend: Backend) -> Iterator[None]:
    """scipy's test module narrowed to the dtypes of `backend`, for as long as it is asked."""
    held = [dtype for dtype in tb.supported_dtypes if np.dtype(dtype) in backend.dtypes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tb, "supported_dtypes", held)
        patch.setattr(tb, "sparse_may_share_memory", _shares_memory(tb.sparse_may_share_memory))
        yield


def point_at(
    backend: Backend,
    prefix: str,
    module: str,
    differs: Mapping[str, Difference] | None = None,
    array_differs: Mapping[str, Difference] | None = None,
    dtypes: frozenset[np.dtype[Any]] | None = None,
) -> dict[str, type]:
    """scipy's four BSR test classes on our classes in `backend`, with `dtypes` or with all that it holds.

    Beyond what differs on the host, `differs` names what differs here, `array_differs` for bsr_array alone.
    """
    classes = {}
    with device_suite(backend):  # scipy's shared matrices, one for each dtype, are built here
        for test_class in SCIPY_CLASSES:
            name = f"{prefix}{test_class.__name__.removeprefix('Test')}"
            is_array = "Matrix" not in name
            reasons = DIFFERS | (NONCANONICAL_DIFFERS if "NonCanonical" in name else {})
            reasons |= (differs or {}) | ((array_differs or {}) if is_array else {})
            classes[name] = point(test_class, name, facade(backend, is_array), reasons, module, dtypes)
    return classes
