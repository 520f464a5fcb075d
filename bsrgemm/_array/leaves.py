"""The classes that hold data: for each backend one of arrays and one of matrices, made when first needed.

They stand above this room, since they have products; whoever defines them registers them here, so that what lies below
can make a matrix without an import upwards.
"""

from __future__ import annotations

from typing import Any

from .._backend.base import Backend

_public: dict[bool, type[Any]] = {}
_leaves: dict[tuple[Backend, bool], type[Any]] = {}


def register_public(cls: type[Any]) -> type[Any]:
    """A class decorator for the class that users name, which has everything but a backend."""
    _public[cls._is_array] = cls
    return cls


def register_leaf(cls: type[Any]) -> type[Any]:
    """A class decorator for a class with the arrays of one backend."""
    _leaves[cls._backend, cls._is_array] = cls
    return cls


def leaf(backend: Backend, is_array: bool) -> type[Any]:
    """The class whose data lives in `backend`."""
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
