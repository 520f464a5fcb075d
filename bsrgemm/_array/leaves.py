"""A registry of the classes that hold data: for each backend one array class and one matrix class.

These classes also have products, so `bsrgemm/bsr.py` defines them, above this package. It registers them here, so that
the modules of this package can create a matrix without importing `bsrgemm/bsr.py`. A class that is missing for a
backend is created when it is first needed.
"""

from __future__ import annotations

from typing import Any

from .._backend.base import Backend

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
    base = _public[is_array]
    body = {
        "__doc__": f"`{base.__name__}` with {backend.xp.__name__} arrays.",
        "__module__": base.__module__,
        "__array_priority__": backend.array_priority,
        "_backend": backend,
    }
    made = type(f"{backend.name}_{base.__name__}", (base, *backend.bases(is_array)), body)
    return _leaves.setdefault((backend, is_array), made)
