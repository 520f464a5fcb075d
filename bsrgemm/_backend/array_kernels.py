"""The kernels behind two array primitives on the GPU: rows of the entries of an index, and reductions of segments."""

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
    """Reductions over segments of rows."""

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
    """Rows of the entries of a compressed index."""

    index: str

    threads = 128
    entries = 8

    def spec(self) -> KernelSpec:
        return KernelSpec("expand.cu", "expand", (("INDEX", self.index),))

    def grid(self, entries: int) -> tuple[int]:
        return (min(MAX_GRID_X, -(-entries // (self.threads * self.entries))),)


@lru_cache(maxsize=1024)
def segment(dtype: np.dtype[Any], operation: str, average: int, width: int) -> Segment:
    """The kernel for segments of `average` rows of `width`: a warp for long ones, a thread for short ones."""
    lanes = 32 if average >= 32 else 1
    columns = 1 if lanes == 32 else min(32, 1 << (max(1, width) - 1).bit_length())
    acc = accumulator(dtype)[0] if operation == "add" else _ordered(dtype)
    return Segment(element(dtype), acc, OPERATIONS[operation], lanes, columns)


def _ordered(dtype: np.dtype[Any]) -> str:
    """A type in which the values of `dtype` are compared: its own sign must survive."""
    return "f32" if accumulator_dtype(dtype) != dtype else element(dtype)
