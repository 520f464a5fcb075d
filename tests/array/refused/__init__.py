"""Calls that must be refused, in tables by subject, and the matrices and arrays that they begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import bsrgemm as bg

from ...strategies import Place, Sample


def sample(dtype: Any = np.float64) -> Sample:
    """4 x 6 in blocks of 2 x 3: blocks at (0, 1), (1, 0), (1, 1); nothing at (0, 0)."""
    data = (np.arange(18).reshape(3, 2, 3) % 7 + 1).astype(dtype)
    return Sample(data, np.array([1, 0, 1], np.int32), np.array([0, 1, 3], np.int32), (4, 6))


def matrix(place: Place, dtype: Any = np.float64) -> Any:
    return place.bsr(sample(dtype))


def built(place: Place, flavour: type = bg.bsr_array, **changes: Any) -> Any:
    """The three-array form with some of its parts replaced."""
    s = sample()
    parts = {"data": s.data, "indices": s.indices, "indptr": s.indptr, "shape": s.shape} | changes
    shape = parts.pop("shape")
    options = {name: parts.pop(name) for name in list(parts) if name not in ("data", "indices", "indptr")}
    arrays = tuple(place.put(np.asarray(parts[name])) for name in ("data", "indices", "indptr"))
    return flavour(arrays, shape=shape, **options)


def elements(place: Place, values: Any, row: Any, col: Any, **options: Any) -> Any:
    """The form (data, (row, col))."""
    return bg.bsr_array(tuple((place.put(values), (place.put(row), place.put(col)))), **options)


def ones(place: Place, *shape: int, dtype: Any = np.float64) -> Any:
    return place.put(np.ones(shape, dtype))


def elsewhere(place: Place) -> Place:
    """Another backend than this one: the host, or a card."""
    return Place("cuda" if place.is_host else "cpu")


def assign(A: Any, key: Any, value: Any) -> None:
    A[key] = value


def zero_strides(place: Place, shape: tuple[int, ...]) -> Any:
    """A writeable array whose elements share memory."""
    if place.is_host:
        return np.lib.stride_tricks.as_strided(np.zeros(1), shape, (0,) * len(shape), writeable=True)
    return place.xp.broadcast_to(place.put(np.zeros(1)), shape)


def read_only(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x.flags.writeable = False
    return x


def corrupted(S: Any, name: str, at: int, value: int) -> Any:
    """A scipy matrix whose index array was written into after it was built."""
    getattr(S, name)[at] = value
    return S


@dataclass(frozen=True)
class Refused:
    """`attempt` raises `error` with `text` in its message; `backends` limits where that makes sense."""

    id: str
    attempt: Callable[[Place], Any]
    error: type[Exception] | tuple[type[Exception], ...]
    text: str
    backends: str = "cpu fake cuda"


WRONG = (ValueError, TypeError)
