"""Products on the GPU: this engine chooses the launches that each product needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from .._backend import registry
from .._backend.base import Array, Blocks
from .._kernels.element_types import types
from .._kernels.launching import contiguous, run
from . import block_products, complex_gemm, heuristics, launch, spgemm_pattern
from .block_products import BlockLaunch
from .call import ProductCall, ProductPattern
from .engine import ProductEngine
from .launch import Launch
from .matrix_cache import PreparedLaunches, matrix_cache_of
from .transposed import transposed_copy

#: Work lists hold 32-bit integers, so sizes must be smaller than this.
_MOST_INT32 = 2**31


class CudaProducts(ProductEngine):
    """The engine for products of CuPy arrays."""

    def multiply_dense(self, call: ProductCall) -> Launch | None:
        with self.backend.recording(call):
            return self._multiply_dense(call)

    def _multiply_dense(self, call: ProductCall) -> Launch | None:
        A, B = call.matrix, call.B
        if call.transposed and max(len(A.indices), *A._shape) >= _MOST_INT32:
            call = replace(call, matrix=transposed_copy(A), transposed=False)
        if call.fp8 and launch.wants_columns(B):
            call = replace(call, B=_by_columns(B))
        if complex_gemm.serves(call):
            complex_gemm.product(call)
            return None
        started = launch.product(call)
        # a launch that reads a copy cannot be reused, since the copy is made again for every product
        return started if call.matrix is A and call.B is B else None

    def prepared(self, A: Any) -> PreparedLaunches:
        return PreparedLaunches(A)

    def overlapping(self, out: Array, X: Array, A: Any) -> int | None:
        memory, other = out.data.mem, X.data.mem  # arrays in different allocations cannot overlap
        first, last = memory.ptr, memory.ptr + memory.size
        if other.ptr >= last or first >= other.ptr + other.size:
            for start, stop in matrix_cache_of(A).extents:
                if start < last and first < stop:
                    break
            else:
                return None
        return super().overlapping(out, X, A)

    def product_pattern(self, a: Blocks, b: Blocks, block_cols: int) -> ProductPattern:
        found = spgemm_pattern.product_pattern(a, b, block_cols)
        return super().product_pattern(a, b, block_cols) if found is None else found

    def multiply_sparse(self, a: Blocks, b: Blocks, block_cols: int, dtype: np.dtype[Any]) -> Blocks:
        listing = spgemm_pattern.begin(a, b, block_cols)
        if listing is None:
            return super().multiply_sparse(a, b, block_cols, dtype)
        rows = len(a.indptr) - 1
        # the host prepares the products while the card lists the pairs
        prepared = block_products.pairs_launch(a.data, b.data, listing, dtype)
        found = listing.finish()
        if found is None:
            return super().multiply_sparse(a, b, block_cols, dtype)
        pairs, blocks = found
        if prepared is not None:
            data = prepared.of(blocks, pairs, rows).start((a.data, b.data))
        else:
            lists = listing.left[:pairs], listing.right[:pairs], listing.starts[:blocks]
            data = self.pair_products(a.data, lists[0], b.data, lists[1], lists[2], dtype, rows)
        return Blocks(data, *listing.index(blocks))

    def pair_products(
        self, a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any], rows: int = 0
    ) -> Array:
        with self.backend.recording(a, ia, b, ib, starts):
            found = block_products.pair_products(a, ia, b, ib, starts, dtype, rows)
        if found is not None:
            return found
        R, K = a.shape[1:]
        N = b.shape[2]
        out = cupy.empty((len(starts), R, N), dtype)
        if out.size:
            config = heuristics.spgemm_simt(types(a.dtype, b.dtype, dtype, dtype, ia.dtype), R, K, N)
            arrays = (contiguous(x) for x in (a, ia, b, ib, starts))
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
        tf32: bool = False,
    ) -> Array:
        if len(indices) and X.shape[1]:
            found = block_products.sampled(X, Y, indices, indptr, block, dtype, tf32)
            if found is not None:
                return found
        return super().sampled(X, Y, indices, indptr, block, dtype)

    def sampled_launch(
        self, X: Array, Y: Array, pattern: Any, dtype: np.dtype[Any], tf32: bool = False
    ) -> BlockLaunch | None:
        cache = matrix_cache_of(pattern)
        if cache.whole is None or not cache.blocks or not X.shape[1]:
            return None
        block, stored = pattern.blocksize, cache.pattern(pattern._shape[1] // pattern.blocksize[1], False)
        return block_products.sampled_launch(X, Y, stored, block, dtype, tf32, cache.remembered)


def _by_columns(B: Array) -> Array:
    """Return a column-major copy of a matrix, or of each matrix of a batch."""
    return cupy.asfortranarray(B) if B.ndim == 2 else cupy.asfortranarray(B.transpose(1, 2, 0)).transpose(2, 0, 1)


ENGINE = CudaProducts(registry.cuda())
