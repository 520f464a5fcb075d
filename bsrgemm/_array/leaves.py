"""A registry of the classes that hold data: for each backend one array class and one matrix class.

A subclass that a user writes of `bsr_array` or `bsr_matrix` gets such classes of its own.

These classes also have products, so `bsrgemm/bsr.py` defines them, above this package. It registers them here, so that
the modules of this package can create a matrix without importing `bsrgemm/bsr.py`. A class that is missing for a
backend is created when it is first needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from .._backend.base import Backend
from .._backend.recording import recorded

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

    Products with a dense operand are left out: they are short, and their engine keeps what they use.
    """
    for name in dir(base):
        found = getattr(base, name)
        operator = name.startswith("__") and not hasattr(object, name)
        public = operator or not name.startswith("_")
        if isinstance(found, FunctionType) and public and name not in ("__matmul__", "__rmatmul__"):
            yield name, found
