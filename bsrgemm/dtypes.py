"""Which element types bsrgemm holds, how two of them combine, and what a sum of them is kept in."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from ml_dtypes import bfloat16 as _bfloat16
from ml_dtypes import float8_e4m3fn as _float8
from numpy.typing import DTypeLike

BFLOAT16 = np.dtype(_bfloat16)
FLOAT16 = np.dtype(np.float16)
BOOL = np.dtype(np.bool_)
UINT8 = np.dtype(np.uint8)
#: Read and multiplied, never held: a matrix of fp8 numbers is one of uint8.
FLOAT8 = np.dtype(_float8)
#: The number that each of the 256 bytes stands for, as fp8 (e4m3).
FP8_VALUES = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)

#: Every dtype that a matrix may hold on a GPU; the host also takes NumPy's long double types.
DEVICE_DTYPES: tuple[np.dtype[Any], ...] = (
    BOOL,
    *(np.dtype(c) for c in "bBhHiIlL"),
    FLOAT16,
    BFLOAT16,
    *(np.dtype(c) for c in "fdFD"),
)
HOST_DTYPES: tuple[np.dtype[Any], ...] = (*DEVICE_DTYPES, np.dtype("g"), np.dtype("G"))

#: 16-bit floats: stored, never summed in.
HALF_DTYPES = (FLOAT16, BFLOAT16)
#: What a product of fp8 numbers is delivered in.
FP8_RESULTS = (np.dtype(np.float32), *HALF_DTYPES)


def check_dtype(dtype: DTypeLike, supported: tuple[np.dtype[Any], ...], what: str = "dtype") -> np.dtype[Any]:
    """The dtype, in native byte order, if it is one of `supported`; TypeError otherwise."""
    return _check_dtype(np.dtype(dtype), supported, what)


@lru_cache(maxsize=256)
def _check_dtype(dtype: np.dtype[Any], supported: tuple[np.dtype[Any], ...], what: str) -> np.dtype[Any]:
    native = dtype if dtype == BFLOAT16 else dtype.newbyteorder("=")
    for known in supported:  # "long long" becomes "long" and the like
        if known == native:
            return known
    raise TypeError(f"{what}: does not support dtype {dtype}; wanted one of {', '.join(str(d) for d in supported)}")


@lru_cache(maxsize=1024)
def result_dtype(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """NumPy's promotion of two dtypes, completed for bfloat16.

    ml_dtypes leaves bfloat16 with float16 and with the wider integers undefined; here they follow
    the rule NumPy has for float16: the smallest float that holds the range of both.

    >>> result_dtype(np.dtype("float16"), np.dtype("float16"))
    dtype('float16')
    >>> result_dtype(BFLOAT16, np.dtype("float16"))
    dtype('float32')
    >>> result_dtype(BFLOAT16, np.dtype("int32"))
    dtype('float64')
    """
    if a == b:
        return a
    if BFLOAT16 not in (a, b):
        return np.result_type(a, b)
    other = b if a == BFLOAT16 else a
    if other == BOOL or (other.kind in "iu" and other.itemsize == 1):
        return BFLOAT16
    return np.result_type(np.float32, other)


@lru_cache(maxsize=256)
def accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which products that end in `dtype` are summed: float32 for the 16-bit floats."""
    return np.dtype(np.float32) if dtype in HALF_DTYPES else dtype


def is_float(dtype: np.dtype[Any]) -> bool:
    """True for real floating dtypes, bfloat16 (whose NumPy kind is 'V') included."""
    return dtype.kind == "f" or dtype == BFLOAT16


def scalar_result_dtype(dtype: np.dtype[Any], scalar: Any) -> np.dtype[Any]:
    """The dtype of ``array * scalar``: Python numbers are weak, NumPy scalars are not (NEP 50)."""
    if dtype != BFLOAT16:
        return np.result_type(dtype, scalar)
    if isinstance(scalar, (bool, int, float)) and not isinstance(scalar, np.generic):
        return BFLOAT16
    if isinstance(scalar, complex) and not isinstance(scalar, np.generic):
        return np.dtype(np.complex64)
    return result_dtype(dtype, scalar.dtype if hasattr(scalar, "dtype") else np.asarray(scalar).dtype)
