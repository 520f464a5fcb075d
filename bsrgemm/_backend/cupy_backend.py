"""The GPU backend: CuPy arrays, cupyx's sparse classes, our kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import cupy
import cupyx.scipy.sparse
import numpy as np
from cupyx.scipy.sparse import _base as cupyx_base

from .._attention import launch as attention_launch
from .._kernels import workspace
from .._products import block_products, complex_gemm, configs, heuristics, launch, spgemm_pattern
from .._products.matrix_cache import flat, prepare, run
from ..dtypes import DEVICE_DTYPES
from .base import Array, AttentionCall, Backend
from .structure import Blocks, ProductPattern

_NO_ORDER = np.uintp(0)
#: Work lists count in 32 bits.
_MOST_INT32 = 2**31


class CupyBackend(Backend):
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
            config = configs.Expand(configs.element(indptr.dtype))
            args = (flat(indptr), out, np.int64(len(indptr) - 1), np.int64(n))
            run(config, config.grid(n), args)
        return out

    def segment_reduce(self, op: str, values: Array, order: Array | None, starts: Array) -> Array:
        rows = len(values)
        segments = len(starts)
        width = int(np.prod(values.shape[1:]))
        out = cupy.empty((segments, *values.shape[1:]), values.dtype)
        if not out.size:
            return out
        entries = rows if order is None else len(order)
        config = heuristics.segment(values.dtype, op, entries // segments, width)
        args = (
            flat(values),
            _NO_ORDER if order is None else flat(order.astype(np.int64, copy=False)),
            flat(starts.astype(np.int64, copy=False)),
            out,
            *(np.int64(v) for v in (segments, entries, rows, width)),
        )
        run(config, config.grid(segments), args)
        return out

    def overlapping(self, out: Array, X: Array, A: Any) -> int | None:
        memory, other = out.data.mem, X.data.mem  # allocations of their own share nothing
        first, last = memory.ptr, memory.ptr + memory.size
        if other.ptr >= last or first >= other.ptr + other.size:
            for start, stop in self.operand_extents(A):
                if start < last and first < stop:
                    break
            else:
                return None
        return super().overlapping(out, X, A)

    def operand_extents(self, A: Any) -> tuple[tuple[int, int], ...]:
        return prepare(self, A).extents

    def spmm(
        self,
        A: Any,
        B: Array,
        out: Array,
        acc: np.dtype[Any],
        alpha: Any,
        beta: Any,
        *,
        transposed: bool = False,
        precision: str | None = None,
        fp8: bool = False,
    ) -> launch.Launch | None:
        operands = A, B
        if transposed and max(len(A.indices), *A._shape) >= _MOST_INT32:
            A, transposed = self.transposed_copy(A), False
        if fp8 and launch.wants_columns(B):
            B = workspace.retain_for_graph(lambda: _by_columns(B))
        tf32 = precision == "tf32"
        if complex_gemm.serves(A, B, out, acc, transposed):
            workspace.retain_for_graph(
                lambda: complex_gemm.product(self, A, B, out, alpha, beta, transposed=transposed, tf32=tf32)
            )
            return None
        prepared = prepare(self, A)
        started = launch.product(
            prepared, A._shape, B, out, acc, alpha, beta, transposed=transposed, tf32=tf32, fp8=fp8, copies=not fp8
        )  # fmt: skip
        return started if A is operands[0] and B is operands[1] else None  # copies are made for every product

    def attention(self, call: AttentionCall) -> None:
        attention_launch.forward(self, call)

    def product_pattern(self, a: Blocks, b: Blocks, block_cols: int) -> ProductPattern:
        found = spgemm_pattern.product_pattern(a, b, block_cols)
        return super().product_pattern(a, b, block_cols) if found is None else found

    def pair_products(
        self, a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any], rows: int = 0
    ) -> Array:
        found = block_products.pair_products(a, ia, b, ib, starts, dtype, rows)
        if found is not None:
            return found
        R, K = a.shape[1:]
        N = b.shape[2]
        out = cupy.empty((len(starts), R, N), dtype)
        if out.size:
            config = heuristics.spgemm_simt(configs.types(a.dtype, b.dtype, dtype, dtype, ia.dtype), R, K, N)
            arrays = (flat(x) for x in (a, ia, b, ib, starts))
            sizes = (np.int64(v) for v in (len(starts), len(ia), len(a), len(b)))
            args = (*arrays, out, *sizes, np.int32(R), np.int32(K), np.int32(N))
            run(config, config.grid(len(starts)), args)
        return out

    def sampled(
        self,
        X: Array,
        Y: Array,
        indices: Array,
        indptr: Array,
        block: tuple[int, int],
        dtype: np.dtype[Any],
        precision: str | None = None,
    ) -> Array:
        if len(indices) and X.shape[1]:
            found = block_products.sampled(X, Y, indices, indptr, block, dtype, tf32=precision == "tf32")
            if found is not None:
                return found
        return super().sampled(X, Y, indices, indptr, block, dtype)


def _by_columns(B: Array) -> Array:
    """A matrix, or each of a batch, in columns."""
    return cupy.asfortranarray(B) if B.ndim == 2 else cupy.asfortranarray(B.transpose(1, 2, 0)).transpose(2, 0, 1)
