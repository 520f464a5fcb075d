"""Names of element types in the CUDA sources, and their accumulator types."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ..dtypes import BFLOAT16, BOOL, accumulator_dtype

CUDA_NAMES = {
    BOOL: "boolean",
    np.dtype("i1"): "i8",
    np.dtype("u1"): "u8",
    np.dtype("i2"): "i16",
    np.dtype("u2"): "u16",
    np.dtype("i4"): "i32",
    np.dtype("u4"): "u32",
    np.dtype("i8"): "i64",
    np.dtype("u8"): "u64",
    np.dtype("f2"): "f16",
    BFLOAT16: "bf16",
    np.dtype("f4"): "f32",
    np.dtype("f8"): "f64",
    np.dtype("c8"): "c64",
    np.dtype("c16"): "c128",
}

#: Size of an element in bytes, by its CUDA name.
BYTES = {name: dtype.itemsize for dtype, name in CUDA_NAMES.items()} | {"e4m3": 1}


def element(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in cuda/common/types.cuh."""
    return CUDA_NAMES[dtype]


@lru_cache(maxsize=256)
def accumulator(dtype: np.dtype[Any]) -> tuple[str, np.dtype[Any]]:
    """Return the accumulator of `dtype`: its name in cuda/common/types.cuh and a NumPy dtype with the same bytes.

    Integers are summed modulo 2^32 or 2^64. The low bits of such a sum are the sum in the narrower type.
    """
    dtype = accumulator_dtype(dtype)
    if dtype.kind in "iu":
        dtype = np.dtype(np.uint32 if dtype.itemsize <= 4 else np.uint64)
    return element(dtype), dtype


@cache
def number(acc: str) -> np.dtype[Any]:
    """Return the NumPy dtype of an accumulator, given its CUDA name."""
    return next(dtype for dtype, name in CUDA_NAMES.items() if name == acc)


@dataclass(frozen=True)
class Types:
    """CUDA names of the types of a product: the two operands, the result, the accumulator and the index arrays."""

    a: str
    b: str
    c: str
    acc: str
    index: str = "i32"

    def of_one(self, name: str) -> bool:
        """Return whether operands, result and accumulator all have this type."""
        return self.a == self.b == self.c == self.acc == name


@lru_cache(maxsize=4096)
def types(a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], acc: np.dtype[Any], index: np.dtype[Any]) -> Types:
    return Types(element(a), element(b), element(c), accumulator(acc)[0], element(index))


def scaled(names: Types) -> Types:
    """Return the same types, except that both operands are fp8 numbers (e4m3)."""
    return replace(names, a="e4m3", b="e4m3")
