"""Random operands on the GPU, and anything in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

#: Elements that are generated or compared in float64 at a time
CHUNK = 1 << 26


@cache
def _generator() -> Any:
    import cupy

    return cupy.random.default_rng(0)


@cache
def _e4m3_values() -> Any:
    """The 256 values of float8_e4m3fn, by their code."""
    import cupy

    return cupy.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64))


@cache
def _e4m3_sample() -> Any:
    """Codes of standard normal numbers, to draw from."""
    import cupy

    numbers = np.random.default_rng(0).standard_normal(1 << 16).astype(ml_dtypes.float8_e4m3fn)
    return cupy.asarray(numbers.view(np.uint8))


def normal(shape: tuple[int, ...], dtype: str) -> Any:
    """Standard normal numbers on the GPU; "e4m3" gives their codes as uint8."""
    import cupy

    stored = {"bfloat16": ml_dtypes.bfloat16, "e4m3": np.uint8}.get(dtype, dtype)
    drawn = np.float64 if dtype == "float64" else np.float32
    result = cupy.empty(shape, stored)
    flat = result.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        if dtype == "e4m3":
            sample = _e4m3_sample()
            part[...] = sample[_generator().integers(0, sample.size, size=part.size)]
        else:
            part[...] = _generator().standard_normal(part.size, dtype=drawn).astype(stored)
    return result


def widen(x: Any) -> Any:
    """As float64; uint8 are codes of e4m3."""
    if x.dtype == np.uint8:
        return _e4m3_values()[x.astype(np.int64)]
    return (x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x).astype(np.float64)
