"""The GPU home: CuPy arrays, cupyx's sparse classes, our kernels."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import cupy
import cupyx.scipy.sparse
import numpy as np
from cupyx.scipy.sparse import _base as cupyx_base

from . import jit, tuning
from .dtypes import DEVICE_DTYPES
from .homes import Array, Home

_NO_ORDER = np.uintp(0)


class CudaHome(Home):
    """Data in the memory of a GPU."""

    name = "cuda"
    bring = "Bring it to the GPU with cupy.asarray(x), or the matrix to the CPU with A.get()."
    dtypes = DEVICE_DTYPES
    foreign_dtypes = tuple(np.dtype(c) for c in "?fdFD")
    array_priority = 101

    @property
    def xp(self) -> ModuleType:
        return cupy

    @property
    def sparse(self) -> ModuleType:
        return cupyx.scipy.sparse

    def bases(self, is_array: bool) -> tuple[type, ...]:
        return (cupyx_base._spbase, cupyx_base.sparray if is_array else cupyx_base.spmatrix)

    def is_dense(self, x: Any) -> bool:
        return isinstance(x, cupy.ndarray)

    def is_sparse(self, x: Any) -> bool:
        return isinstance(x, cupyx_base._spbase)

    def adopt(self, x: Any) -> Array | None:
        if isinstance(x, cupy.ndarray):
            return x
        if getattr(x, "__cuda_array_interface__", None) is not None:
            return cupy.asarray(x)
        try:
            return cupy.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError):
            return None

    def from_host(self, x: np.ndarray[Any, Any]) -> Array:
        return cupy.asarray(x)

    def to_host(self, x: Array) -> np.ndarray[Any, Any]:
        return x.get(order="A")

    def address(self, x: Array) -> int:
        return x.data.ptr

    def device_of(self, x: Array) -> Any:
        return x.device

    # ------------------------------------------------------------------------------------ kernels
    def expand(self, indptr: Array, n: int) -> Array:
        out = cupy.empty(n, indptr.dtype)
        if n:
            config = tuning.Expand(tuning.element(indptr.dtype))
            args = (_flat(indptr), out, np.int64(len(indptr) - 1), np.int64(n))
            _launch(config, config.grid(n), args)
        return out

    def segment_reduce(self, op: str, values: Array, order: Array | None, starts: Array) -> Array:
        rows = len(values)
        segments = len(starts)
        width = int(np.prod(values.shape[1:]))
        out = cupy.empty((segments, *values.shape[1:]), values.dtype)
        if not out.size:
            return out
        entries = rows if order is None else len(order)
        config = tuning.segment(values.dtype, op, entries // segments, width)
        args = (
            _flat(values),
            _NO_ORDER if order is None else _flat(order.astype(np.int64, copy=False)),
            _flat(starts.astype(np.int64, copy=False)),
            out,
            *(np.int64(v) for v in (segments, entries, rows, width)),
        )
        _launch(config, config.grid(segments), args)
        return out

    def spmm(self, A: Any, B: Array, out: Array, acc: np.dtype[Any], alpha: Any, beta: Any) -> None:
        data, indices, indptr = A.data, A.indices, A.indptr
        blocks, R, C = data.shape
        N = B.shape[1]
        if indices.dtype != indptr.dtype:
            indptr = indptr.astype(indices.dtype)
        config, kernel, number = _product_kernel(
            data.dtype, B.dtype, out.dtype, acc, indices.dtype, R, C, N, jit.device_target()
        )
        block_rows = len(indptr) - 1
        b_row, b_col = B.strides
        c_row, c_col = out.strides
        i64, i32 = np.int64, np.int32
        head = (
            _flat(data),
            _flat(indices),
            _flat(indptr),
            B,
            out,
            i64(block_rows),
            i64(A._shape[1] // C),
            i64(blocks),
            i32(R),
            i32(C),
        )
        tail = (_number(number, alpha), _number(number, beta), i32(beta != 0))
        b_size, c_size = B.itemsize, out.itemsize
        steps: tuple[Any, ...]
        if N == 1:
            steps = (i64(b_row // b_size), i64(c_row // c_size))
        else:
            steps = (i64(N), *map(i64, (b_row // b_size, b_col // b_size, c_row // c_size, c_col // c_size)))
        kernel(config.grid(block_rows, R, N), (config.threads,), (*head, *steps, *tail))

    def pair_products(self, a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any]) -> Array:
        R, K = a.shape[1:]
        N = b.shape[2]
        out = cupy.empty((len(starts), R, N), dtype)
        if out.size:
            config = tuning.pairs(tuning.types(a.dtype, b.dtype, dtype, dtype, np.dtype(np.int64)), R * N)
            arrays = (_flat(x) for x in (a, ia, b, ib, starts))
            sizes = (np.int64(v) for v in (len(starts), len(ia), len(a), len(b)))
            args = (*arrays, out, *sizes, np.int32(R), np.int32(K), np.int32(N))
            _launch(config, config.grid(len(starts)), args)
        return out


@lru_cache(maxsize=4096)
def _product_kernel(
    a: np.dtype[Any],
    b: np.dtype[Any],
    c: np.dtype[Any],
    acc: np.dtype[Any],
    index: np.dtype[Any],
    R: int,
    C: int,
    N: int,
    arch: str,
) -> tuple[tuning.GemmSimt | tuning.Spmv, Any, Any]:
    """Config, loaded kernel and the scalar type of alpha and beta."""
    config = tuning.spmm(tuning.types(a, b, c, acc, index), R, C, N)
    return config, jit.load(config.spec(), arch), tuning.accumulator(acc)[1].type


def _launch(config: tuning.Config, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Run a kernel on CuPy's current device and stream."""
    jit.load(config.spec(), jit.device_target())(grid, (config.threads,), args)


def _flat(x: Array) -> Array:
    """Kernels read these arrays as one piece of memory."""
    return x if x.flags.c_contiguous else cupy.ascontiguousarray(x)


def _number(kind: Any, x: Any) -> Any:
    """alpha or beta as a kernel argument; negative integers wrap as the sums do."""
    if issubclass(kind, np.unsignedinteger):
        return kind(int(x) % (1 << 8 * kind().itemsize))
    return kind(x)
