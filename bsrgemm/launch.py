"""From a product on the GPU to a launch: what is worth remembering of a matrix, and the kernel's one argument.

A call on a prepared matrix packs some twenty numbers and starts a kernel; everything else was looked up before.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from . import jit, tuning
from .homes import Array

#: Of `Product` in cuda/bsr.cuh: alpha and beta, then pointers, sizes, strides, block sides and the flag.
_FIELDS = "5P8q3i"
_NUMBERS = {"f": "f", "d": "d", "F": "2f", "D": "2d", "I": "I", "L": "Q", "Q": "Q", "?": "?"}
#: Different widths and dtypes of B remembered per matrix.
_MOST_PLANS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel with its launch shape, for one matrix and one kind of right-hand side."""

    kernel: Any
    grid: tuple[int, ...]
    threads: tuple[int]
    layout: struct.Struct
    argument: np.dtype[Any]
    number: Any


class Prepared:
    """A BSR matrix as kernels see it. Belongs to the three arrays it was made from.

    `whole` is the matrix's shape, or None if an array had to be copied to be read as one piece.
    """

    __slots__ = ("_kept", "_plans", "extents", "indices_dtype", "pointers", "shape", "sizes", "source", "whole")

    def __init__(self, A: Any, extent: Any) -> None:
        data, indices, indptr = self.source = (A.data, A.indices, A.indptr)
        if indices.dtype != indptr.dtype:
            indptr = indptr.astype(indices.dtype)
        self._kept = tuple(flat(x) for x in (data, indices, indptr))
        blocks, R, C = data.shape
        self.shape = (len(indptr) - 1, R, C)
        self.indices_dtype = indices.dtype
        self.pointers = tuple(x.data.ptr for x in self._kept)
        self.sizes = (len(indptr) - 1, A._shape[1] // C, blocks)
        self.extents = tuple(extent(x) for x in self.source)
        self.whole = A._shape if all(a is b for a, b in zip(self._kept, self.source, strict=True)) else None
        self._plans: dict[Any, Plan] = {}

    def fits(self, A: Any) -> bool:
        """Are these still the shape and the arrays of the matrix, read where they are and not from a copy?"""
        data, indices, indptr = self.source
        return data is A.data and indices is A.indices and indptr is A.indptr and self.whole == A._shape

    def plan(self, b: np.dtype[Any], c: np.dtype[Any], acc: np.dtype[Any], N: int) -> Plan:
        key = (b, c, acc, N)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._new_plan(b, c, acc, N)
        return plan

    def _new_plan(self, b: np.dtype[Any], c: np.dtype[Any], acc: np.dtype[Any], N: int) -> Plan:
        block_rows, R, C = self.shape
        names = tuning.types(self.source[0].dtype, b, c, acc, self.indices_dtype)
        config = tuning.spmm(names, R, C, N)
        number = tuning.accumulator(acc)[1]
        code = _NUMBERS[number.char]
        size = struct.calcsize(f"@{code}{code}{_FIELDS}")
        padding = -size % 16  # a struct's size is a multiple of its alignment, at most 16
        return Plan(
            jit.load(config.spec(), jit.device_target()),
            config.grid(block_rows, R, N),
            (config.threads,),
            struct.Struct(f"@{code}{code}{_FIELDS}{padding}x"),
            np.dtype([("opaque", "<u8", ((size + padding) // 8,))]),
            number.type,
        )


def product(prepared: Prepared, B: Array, out: Array, acc: np.dtype[Any], alpha: Any, beta: Any) -> None:
    """Start ``out = alpha * A @ B + beta * out`` on CuPy's current stream."""
    N = B.shape[1]
    plan = prepared.plan(B.dtype, out.dtype, acc, N)
    b_row, b_col = B.strides
    c_row, c_col = out.strides
    b_size, c_size = B.itemsize, out.itemsize
    packed = plan.layout.pack(
        *_words(plan.number, alpha),
        *_words(plan.number, beta),
        *prepared.pointers,
        B.data.ptr,
        out.data.ptr,
        *prepared.sizes,
        N,
        b_row // b_size,
        b_col // b_size,
        c_row // c_size,
        c_col // c_size,
        *prepared.shape[1:],
        beta != 0,
    )
    plan.kernel(plan.grid, plan.threads, (np.frombuffer(packed, plan.argument),))


def run(config: tuning.Config, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Start a kernel with separate arguments on CuPy's current device and stream."""
    jit.load(config.spec(), jit.device_target())(grid, (config.threads,), args)


def flat(x: Array) -> Array:
    """Kernels read these arrays as one piece of memory."""
    return x if x.flags.c_contiguous else cupy.ascontiguousarray(x)


def _words(kind: Any, x: Any) -> tuple[Any, ...]:
    """alpha or beta as the numbers that are packed for it; negative integers wrap as the sums do."""
    if issubclass(kind, np.floating):
        return (x,)
    if issubclass(kind, np.complexfloating):
        return (x.real, x.imag)
    if issubclass(kind, np.unsignedinteger):
        return (int(x) % (1 << 8 * kind().itemsize),)
    return (bool(x),)
