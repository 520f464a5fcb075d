"""The element types that a matrix may hold, the promotion of two of them, and the dtype in which they are summed."""

from __future__ import annotations

from collections.abc import Iterable
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
#: Products accept fp8 operands, but no matrix has this dtype: a matrix of fp8 numbers stores their bytes as uint8.
FLOAT8 = np.dtype(_float8)
#: ``FP8_VALUES[b]`` is the number that the byte b encodes in fp8 (e4m3), in float32.
FP8_VALUES = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)

#: Every dtype that a matrix may have on a GPU; matrices on the host may also have NumPy's long double types.
DEVICE_DTYPES: tuple[np.dtype[Any], ...] = (
    BOOL,
    *(np.dtype(c) for c in "bBhHiIlL"),
    FLOAT16,
    BFLOAT16,
    *(np.dtype(c) for c in "fdFD"),
)
HOST_DTYPES: tuple[np.dtype[Any], ...] = (*DEVICE_DTYPES, np.dtype("g"), np.dtype("G"))

#: The 16-bit floats. Matrices store them; sums of them are accumulated in float32.
HALF_DTYPES = (FLOAT16, BFLOAT16)
#: The dtypes that the result of an fp8 product may have.
FP8_RESULTS = (np.dtype(np.float32), *HALF_DTYPES)


def check_dtype(dtype: DTypeLike, supported: tuple[np.dtype[Any], ...], what: str = "dtype") -> np.dtype[Any]:
    """Return `dtype` in native byte order if it is one of `supported`; raise TypeError otherwise.

    The error message begins with `what`, the name of the argument.
    """
    return _check_dtype(as_dtype(dtype, what), supported, what)


def as_dtype(dtype: DTypeLike, what: str = "dtype") -> np.dtype[Any]:
    """Return ``np.dtype(dtype)``; the TypeError for what is no dtype begins with `what`, the name of the argument."""
    try:
        return np.dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(f"{what}: wanted a dtype, such as np.float32 or its name, got {dtype!r}") from None


@lru_cache(maxsize=256)
def _check_dtype(dtype: np.dtype[Any], supported: tuple[np.dtype[Any], ...], what: str) -> np.dtype[Any]:
    native = dtype if dtype == BFLOAT16 else dtype.newbyteorder("=")
    for known in supported:  # equal dtypes with different names, such as "long long" and "long", become one
        if known == native:
            return known
    fp8 = "; matmul takes fp8 as bytes, x.view('uint8'), with a scale" if dtype == FLOAT8 else ""
    raise TypeError(f"{what}: does not support dtype {dtype}; wanted one of {', '.join(map(str, supported))}{fp8}")


@lru_cache(maxsize=1024)
def result_dtype(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """Promote two dtypes as NumPy does, and define the cases of bfloat16 that ml_dtypes leaves undefined.

    Those cases are bfloat16 with float16 and bfloat16 with integers of more than 8 bits. They follow the rule that
    NumPy has for float16: the result is the smallest float that holds the range of both.

    >>> result_dtype(np.dtype("float16"), np.dtype("float16"))
    dtype('float16')
    >>> result_dtype(BFLOAT16, np.dtype("float16"))
    dtype('float32')
    >>> result_dtype(BFLOAT16, np.dtype("int32"))
    dtype('float64')

    The result is in native byte order:

    >>> result_dtype(np.dtype(">f8"), np.dtype(">f8"))
    dtype('float64')
    """
    if a == b:
        return a if a.isnative else a.newbyteorder("=")
    if BFLOAT16 not in (a, b):
        return np.result_type(a, b)
    other = b if a == BFLOAT16 else a
    if other == BOOL or (other.kind in "iu" and other.itemsize == 1):
        return BFLOAT16
    return np.result_type(np.float32, other)


def common_dtype(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """Promote any number of dtypes, in an order that makes no difference.

    >>> common_dtype([np.dtype("uint8"), np.dtype("int8"), BFLOAT16])
    dtype(bfloat16)
    """
    given = list(dtypes)
    if BFLOAT16 in given:
        given = [dtype for dtype in (result_dtype(BFLOAT16, d) for d in given) if dtype != BFLOAT16]
    return np.result_type(*given) if given else BFLOAT16


@lru_cache(maxsize=256)
def accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a result of `dtype` is accumulated: float32 for 16-bit floats, otherwise `dtype`."""
    return np.dtype(np.float32) if dtype in HALF_DTYPES else dtype


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return True for real floating dtypes, including bfloat16, whose NumPy kind is 'V'."""
    return dtype.kind == "f" or dtype == BFLOAT16


def number_of(dtype: np.dtype[Any], x: Any) -> Any:
    """Return a Python number as a scalar of `dtype`; integers wrap around, as sums of them do.

    >>> number_of(np.dtype(np.uint8), -1)
    np.uint8(255)
    """
    if dtype.kind not in "iu":
        return dtype.type(x)
    return np.array(int(x) % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)[()]


def scalar_result_dtype(dtype: np.dtype[Any], scalar: Any) -> np.dtype[Any]:
    """Return the dtype of ``array * scalar`` by NEP 50.

    A Python number takes the dtype of the array where it can; a NumPy scalar takes part in the promotion.
    """
    if dtype != BFLOAT16:
        numpy_knows = getattr(scalar, "dtype", dtype) != BFLOAT16
        return np.result_type(dtype, scalar) if numpy_knows else result_dtype(dtype, BFLOAT16)
    if isinstance(scalar, (bool, int, float)) and not isinstance(scalar, np.generic):
        return BFLOAT16
    if isinstance(scalar, complex) and not isinstance(scalar, np.generic):
        return np.dtype(np.complex64)
    return result_dtype(dtype, scalar.dtype if hasattr(scalar, "dtype") else np.asarray(scalar).dtype)
