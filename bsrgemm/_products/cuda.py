"""Products on the GPU: this engine finds the launches of each product, or prepares them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from .._backend import registry
from .._backend.base import Array, Blocks
from .._kernels import overlapping
from .._kernels.card import card
from .._kernels.element_types import types
from .._kernels.kernel import Kernel
from .._kernels.launch import Chain, Launch, contiguous, run
from . import pairs, sampled, sparse_dense, spgemm_pattern
from .block_products import SpgemmSimt
from .call import ProductCall, ProductPattern, order_of, order_of_result
from .engine import ProductEngine
from .operand import Kind, PreparedLaunches, operand_of, problem_of
from .prepared import choose
from .sampled import SampledLaunch
from .sampled_dense import SampledDense
from .transposed import transposed_copy

#: Work lists hold 32-bit integers, so sizes must be smaller than this.
_MOST_INT32 = 2**31


def prepared_for(call: ProductCall) -> Launch | Chain:
    """Return what carries out products of this kind, wherever B and the result lie."""
    operand = operand_of(call.matrix)
    problem = problem_of(operand, call, (order_of(call.B), order_of_result(call.out)))
    kernel = call.kernel or choose(problem, card())
    found: Launch | Chain = kernel.prepare(Kind(problem, operand, call.B, call.out), card())
    return found


def _on_cuda_cores(a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any]) -> Array:
    """Return what `pair_products` does, for any blocks and dtypes."""
    (R, K), N = a.shape[1:], b.shape[2]
    out = cupy.empty((len(starts), R, N), dtype)
    if out.size:
        kernel = SpgemmSimt.of(types(a.dtype, b.dtype, dtype, dtype, ia.dtype), R, K, N)
        arrays = (contiguous(x) for x in (a, ia, b, ib, starts))
        sizes = (np.int64(v) for v in (len(starts), len(ia), len(a), len(b)))
        run(kernel, kernel.grid(len(starts)), (*arrays, out, *sizes, np.int32(R), np.int32(K), np.int32(N)))
    return out


class CudaProducts(ProductEngine):
    """The engine for products of CuPy arrays."""

    def multiply_dense(self, call: ProductCall) -> Launch | Chain | None:
        A = call.matrix
        if call.transposed and max(len(A.indices), *A._shape) >= _MOST_INT32:  # the copy is made anew for every product
            with self.backend.recording(A):
                self.multiply_dense(replace(call, matrix=transposed_copy(A), transposed=False))
            return None
        B, out = call.B, call.out
        key = (
            A._shape, B.shape, B.strides, B.dtype, B.data.ptr % 16, out.shape, out.strides, out.dtype,
            out.data.ptr % 16, call.acc, call.beta == 0, call.transposed, call.tf32, call.fp8, Kernel.forced,
            overlapping.thread.active, cupy.cuda.runtime.getDevice(),
        )  # fmt: skip
        found: Launch | Chain = operand_of(A).calls.made(key, lambda: prepared_for(call))
        found.start((B, out), call.alpha, call.beta)
        return found

    def prepared(self, A: Any) -> PreparedLaunches:
        return PreparedLaunches(A)

    def overlapping(self, out: Array, X: Array, A: Any) -> int | None:
        # Where no bytes are between each other, none is compared. Adopted memory does not always say how large it is.
        first, last = self.backend.extent(out)
        if not any(start < last and first < stop for start, stop in (self.backend.extent(X), *operand_of(A).extents)):
            return None
        return super().overlapping(out, X, A)

    def product_pattern(self, a: Blocks, b: Blocks, block_cols: int) -> ProductPattern:
        found = spgemm_pattern.product_pattern(a, b, block_cols)
        return super().product_pattern(a, b, block_cols) if found is None else found

    def multiply_sparse(
        self, a: Blocks, b: Blocks, block_cols: int, dtype: np.dtype[Any], matrices: tuple[Any, Any] | None = None
    ) -> Blocks:
        operands = None if matrices is None else (operand_of(matrices[0]), operand_of(matrices[1]))
        whole = None if operands is None else sparse_dense.multiplied(*operands, block_cols, dtype)
        if whole is not None:
            return whole
        kept = None if operands is None else spgemm_pattern.KEPT.get(*operands, "listed")
        listing = kept or spgemm_pattern.begin(a, b, block_cols)
        if listing is None:
            return super().multiply_sparse(a, b, block_cols, dtype)
        rows = len(a.indptr) - 1
        # the host prepares the products while the card lists the pairs
        key = Kernel.forced, cupy.cuda.runtime.getDevice()
        prepared = listing.launches.get(key)
        if prepared is None:
            prepared = pairs.pairs_launch(a.data, b.data, listing.lists, dtype, listing.expected)
        found = listing.finish()
        if found is None:
            return super().multiply_sparse(a, b, block_cols, dtype)
        if operands is not None:
            spgemm_pattern.KEPT.add(*operands, "listed", listing)
        if listing.is_kept and prepared is not None:
            listing.launches[key] = prepared
        count, blocks = found
        if prepared is not None:
            data = prepared.start(a.data, b.data, blocks, count, rows)
        else:
            lists = listing.left[:count], listing.right[:count], listing.starts[:blocks]
            data = _on_cuda_cores(a.data, lists[0], b.data, lists[1], lists[2], dtype)
        return Blocks(data, *listing.index(blocks))

    def pair_products(
        self, a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any], rows: int = 0
    ) -> Array:
        with self.backend.recording(a, ia, b, ib, starts):
            found = pairs.pair_products(a, ia, b, ib, starts, dtype, rows)
        return _on_cuda_cores(a, ia, b, ib, starts, dtype) if found is None else found

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
        def launch(X: Any, Y: Any, block: tuple[int, int], dtype: np.dtype[Any]) -> SampledLaunch | None:
            return sampled.sampled_launch(X, Y, indices, indptr, block, dtype, tf32)

        if len(indices) and X.shape[1]:
            found = sampled.of_reals(X, Y, block, dtype, launch) or launch(X, Y, block, dtype)
            if found is not None:
                return found.start()
        return super().sampled(X, Y, indices, indptr, block, dtype)

    def sampled_launch(
        self, X: Array, Y: Array, pattern: Any, dtype: np.dtype[Any], tf32: bool = False
    ) -> SampledLaunch | None:
        operand = operand_of(pattern)
        if operand.whole is None or not operand.blocks or not X.shape[1]:
            return None
        _, indices, indptr = operand.arrays

        def launch(X: Any, Y: Any, block: tuple[int, int], dtype: np.dtype[Any]) -> SampledLaunch | None:
            dense = SampledDense.of(X, Y, operand, block, dtype, tf32)
            if dense.is_chosen(card()):
                return dense.prepare(X, Y, operand, card())
            return sampled.sampled_launch(X, Y, indices, indptr, block, dtype, tf32, operand.remembered)

        block = pattern.blocksize
        return sampled.of_reals(X, Y, block, dtype, launch) or launch(X, Y, block, dtype)


ENGINE = CudaProducts(registry.cuda())
