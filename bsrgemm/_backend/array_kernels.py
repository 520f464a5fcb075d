"""Configurations of the two kernels that implement array primitives on the GPU.

`expand` finds the row of each entry of a compressed index, and `segment` reduces segments of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .._kernels.element_types import accumulator, element
from .._kernels.jit import MAX_GRID_X, KernelSpec
from ..dtypes import accumulator_dtype

OPERATIONS = {"add": "kAdd", "maximum": "kMaximum", "minimum": "kMinimum", "fmax": "kFmax", "fmin": "kFmin"}


@dataclass(frozen=True)
class Segment:
    """Configuration of the kernel that reduces segments of rows."""

    element: str
    acc: str
    operation: str
    lanes: int
    columns: int

    threads = 128

    def spec(self) -> KernelSpec:
        return KernelSpec(
            "segment.cu",
            "segment",
            (
                ("ELEMENT_A", self.element),
                ("ACCUMULATOR", self.acc),
                ("OPERATION", self.operation),
                ("LANES", self.lanes),
                ("COLUMNS", self.columns),
            ),
        )

    def grid(self, segments: int) -> tuple[int]:
        return (min(MAX_GRID_X, -(-segments // (self.threads // (self.lanes * self.columns)))),)


@dataclass(frozen=True)
class Expand:
    """Configuration of the kernel that writes the row of each entry of a compressed index."""

    index: str

    threads = 128
    entries = 8

    def spec(self) -> KernelSpec:
        return KernelSpec("expand.cu", "expand", (("INDEX", self.index),))

    def grid(self, entries: int) -> tuple[int]:
        return (min(MAX_GRID_X, -(-entries // (self.threads * self.entries))),)


@lru_cache(maxsize=1024)
def segment(dtype: np.dtype[Any], operation: str, average: int, width: int) -> Segment:
    """Choose the kernel for segments that have `average` rows of `width` values.

    A warp reduces each column of a segment of 32 rows or more; a single thread reduces a column of a shorter one.
    """
    lanes = 32 if average >= 32 else 1
    columns = 1 if lanes == 32 else min(32, 1 << (max(1, width) - 1).bit_length())
    acc = accumulator(dtype)[0] if operation == "add" else _ordered(dtype)
    return Segment(element(dtype), acc, OPERATIONS[operation], lanes, columns)


def _ordered(dtype: np.dtype[Any]) -> str:
    """Return the device type in which values of `dtype` are compared: float32 for 16-bit floats, else their own type.

    Unlike an accumulator it keeps the signedness of integers, which decides their order.
    """
    return "f32" if accumulator_dtype(dtype) != dtype else element(dtype)
