"""From a product on the GPU to a launch: what is worth remembering of a matrix, and the kernel's one argument.

A call on a prepared matrix packs some twenty numbers and starts a kernel; everything else was looked up before.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import cupy
import numpy as np

from . import jit, tensormap, tuning
from .dtypes import HALF_DTYPES
from .home import Array

#: Of `Product` in cuda/bsr.cuh: alpha and beta, then pointers, sizes, strides, block sides and the flag.
_FIELDS = "5P8q3i"
_NUMBERS = {"f": "f", "d": "d", "F": "2f", "D": "2d", "I": "I", "L": "Q", "Q": "Q", "?": "?"}
#: Of a tensor map, in bytes.
_MOST_STRIDE = 2**40
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
    sm90: tuning.GemmSm90 | None = None


class Prepared:
    """A BSR matrix as kernels see it. Belongs to the three arrays it was made from.

    `whole` is the matrix's shape, or None if an array had to be copied to be read as one piece.
    """

    __slots__ = (
        *("_kept", "_order", "_ordered", "_plans", "extents", "half"),
        *("indices_dtype", "pointers", "shape", "sizes", "source", "whole"),
    )  # fmt: skip

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
        # Tensor maps count in 32 bits and start at multiples of 16 bytes.
        self.half = (
            bool(blocks)
            and data.dtype in HALF_DTYPES
            and max(blocks * R, *A._shape) < 2**31
            and self.pointers[0] % 16 == 0
        )
        self._order: Array | None = None
        self._ordered: Any = None
        self._plans: dict[Any, Plan] = {}

    def fits(self, A: Any) -> bool:
        """Are these still the shape and the arrays of the matrix, read where they are and not from a copy?"""
        data, indices, indptr = self.source
        return data is A.data and indices is A.indices and indptr is A.indptr and self.whole == A._shape

    def order(self) -> Array:
        """Block rows, longest first: found once, on the device. Any permutation gives the same result."""
        if self._order is None:
            lengths = cupy.diff(self._kept[2])
            self._order = cupy.argsort(-lengths).astype(np.int32)
            self._ordered = cupy.cuda.get_current_stream().record()
        elif self._ordered is not None:  # another stream must not run ahead of the sort
            if self._ordered.done:
                self._ordered = None
            else:
                cupy.cuda.get_current_stream().wait_event(self._ordered)
        return self._order

    def plan(self, B: Array, out: Array, acc: np.dtype[Any], overwrite: bool) -> Plan:
        """The kernel for these operands; `overwrite` says that `out` is not read."""
        key: tuple[Any, ...] = (B.dtype, out.dtype, acc, B.shape[1])
        if self.half:
            key = (*key, _order(B), overwrite and out.dtype == B.dtype and _order(out) == "C")
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._new_plan(*key)
        return plan

    def _new_plan(self, b: Any, c: Any, acc: np.dtype[Any], N: int, order: str = "", tma_store: bool = False) -> Plan:
        block_rows, R, C = self.shape
        names = tuning.types(self.source[0].dtype, b, c, acc, self.indices_dtype)
        number = tuning.accumulator(acc)[1]
        code = _NUMBERS[number.char]
        size = struct.calcsize(f"@{code}{code}{_FIELDS}")
        padding = -size % 16  # a struct's size is a multiple of its alignment, at most 16
        packing = struct.Struct(f"@{code}{code}{_FIELDS}{padding}x")
        argument = np.dtype([("opaque", "<u8", ((size + padding) // 8,))])
        arch = jit.device_target()
        if order and tuning.sm90_serves(arch, names, block_rows, R, C, N):
            sm90 = tuning.gemm_sm90(names, R, C, order == "F", tma_store)
            kernel = jit.load(sm90.spec(), arch)
            kernel.max_dynamic_shared_size_bytes = sm90.shared_bytes
            grid = (sm90.ctas(block_rows, R, N, _multiprocessors()),)
            return Plan(kernel, grid, (sm90.threads,), packing, argument, number.type, sm90)
        config = tuning.spmm(names, R, C, N)
        kernel = jit.load(config.spec(), arch)
        return Plan(kernel, config.grid(block_rows, R, N), (config.threads,), packing, argument, number.type)


def product(prepared: Prepared, B: Array, out: Array, acc: np.dtype[Any], alpha: Any, beta: Any) -> None:
    """Start ``out = alpha * A @ B + beta * out`` on CuPy's current stream."""
    plan = prepared.plan(B, out, acc, beta == 0)
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
        B.shape[1],
        b_row // b_size,
        b_col // b_size,
        c_row // c_size,
        c_col // c_size,
        *prepared.shape[1:],
        beta != 0,
    )
    argument = np.frombuffer(packed, plan.argument)
    if plan.sm90 is None:
        plan.kernel(plan.grid, plan.threads, (argument,))
    else:
        maps = _tensor_maps(plan.sm90, prepared, B, out)
        group = np.int32(plan.sm90.group(B.shape[0]))
        args = (*maps, argument, prepared.order(), group)
        plan.kernel(plan.grid, plan.threads, args, shared_mem=plan.sm90.shared_bytes)


def _tensor_maps(config: tuning.GemmSm90, prepared: Prepared, B: Array, out: Array) -> tuple[Any, Any, Any]:
    """How the copy engine sees A's blocks one below the other, B and the result."""
    dtype = str(prepared.source[0].dtype)
    _, R, C = prepared.shape
    K, N = B.shape
    side = config.tile_k
    a = tensormap.encode(
        prepared.pointers[0], dtype, (C, prepared.sizes[2] * R), (2 * C,), (side, config.tile_m), swizzle="128B"
    )
    if config.b_transposed:
        b = tensormap.encode(B.data.ptr, dtype, (K, N), (B.strides[1],), (side, config.tile_n), swizzle="128B")
    else:
        b = tensormap.encode(B.data.ptr, dtype, (N, K), (B.strides[0],), (64, side), swizzle="128B")
    if not config.tma_store:
        return a, b, b
    M = prepared.shape[0] * R
    return a, b, tensormap.encode(out.data.ptr, dtype, (N, M), (out.strides[0],), (64, 64), swizzle="128B")


def _order(x: Array) -> str:
    """ "C" or "F" for a matrix that the copy engine can read along rows or columns, otherwise nothing."""
    if x.data.ptr % 16 or x.itemsize != 2:
        return ""
    row, col = x.strides
    if col == 2 and row % 16 == 0 and 2 * x.shape[1] <= row < _MOST_STRIDE:
        return "C"
    if row == 2 and col % 16 == 0 and 2 * x.shape[0] <= col < _MOST_STRIDE:
        return "F"
    return ""


@cache
def _multiprocessors() -> int:
    """Of CuPy's current device; all devices of one architecture count alike."""
    return int(cupy.cuda.Device().attributes["MultiProcessorCount"])


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
