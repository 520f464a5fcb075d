"""Random operands on either backend, and anything in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

#: Elements that are generated or compared in float64 at a time
CHUNK = 1 << 26
#: The dtype in which arrays of a kind of number are stored; "e4m3" is held as its codes.
_STORED: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "e4m3": np.uint8, "tf32": np.float32}


def stored_dtype(kind: str) -> np.dtype[Any]:
    """The dtype of arrays of a kind of number.

    >>> stored_dtype("e4m3"), stored_dtype("float32")
    (dtype('uint8'), dtype('float32'))
    """
    return np.dtype(_STORED.get(kind, kind))


def module_of(x: Any) -> Any:
    """NumPy for its arrays, CuPy for all others."""
    if isinstance(x, np.ndarray):
        return np
    import cupy

    return cupy


@cache
def _generator(xp: Any) -> Any:
    return xp.random.default_rng(0)


@cache
def _e4m3_values(xp: Any) -> Any:
    """The 256 values of float8_e4m3fn, by their code."""
    return xp.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64))


@cache
def _e4m3_sample(xp: Any) -> Any:
    """Codes of standard normal numbers, to draw from."""
    numbers = np.random.default_rng(0).standard_normal(1 << 16).astype(ml_dtypes.float8_e4m3fn)
    return xp.asarray(numbers.view(np.uint8))


def normal(shape: tuple[int, ...], kind: str, xp: Any = None) -> Any:
    """Standard normal numbers, on the GPU by default; "e4m3" gives their codes as uint8.

    >>> normal((2, 3), "float16", np).dtype
    dtype('float16')
    """
    if xp is None:
        import cupy

        xp = cupy
    drawn = np.float64 if kind == "float64" else np.float32
    result = xp.empty(shape, stored_dtype(kind))
    flat = result.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        if kind == "e4m3":
            sample = _e4m3_sample(xp)
            part[...] = sample[_generator(xp).integers(0, sample.size, size=part.size)]
        else:
            part[...] = _generator(xp).standard_normal(part.size, dtype=drawn).astype(result.dtype)
    return result


def widen(x: Any) -> Any:
    """As float64; uint8 are codes of e4m3."""
    if x.dtype == np.uint8:
        return _e4m3_values(module_of(x))[x.astype(np.int64)]
    return (x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x).astype(np.float64)
