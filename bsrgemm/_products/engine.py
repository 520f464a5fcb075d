"""What an engine of products must do, and which engine serves which backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from .._backend import structure
from .._backend.base import Array, Backend, Blocks
from .._backend.engines import EngineTable
from .call import ProductCall, ProductPattern


class ProductEngine(ABC):
    """Products on the arrays of one backend. What is not abstract here is written over the array module."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @abstractmethod
    def multiply_dense(self, call: ProductCall) -> Any:
        """Carry out a product with a dense operand.

        Returns what `matmul` may start again for the same operands, a `launch.Launch`, or None if there is no such
        thing.
        """

    def overlapping(self, out: Array, X: Array, A: Any) -> int | None:
        """Which of `X` and the data, indices and indptr of `A` shares bytes with `out`: its number, or None."""
        first, last = self.backend.extent(out)
        for number, array in enumerate((X, A.data, A.indices, A.indptr)):
            start, stop = self.backend.extent(array)
            if start < last and first < stop:
                return number
        return None

    @abstractmethod
    def pair_products(
        self, a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any], rows: int = 0
    ) -> Array:
        """``out[s] = sum of a[ia[k]] @ b[ib[k]] for k in starts[s] .. starts[s + 1] - 1`` in order.

        `rows` is the number of block rows of the result where its blocks come row after row, otherwise 0.
        """

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
        """``out[p] = X[rows of block p] @ Y[:, columns of block p]``, (blocks, R, C) in `dtype`.

        `tf32` allows float32 factors to be rounded, where an engine has that choice.
        """
        xp, (R, C), n = self.backend.xp, block, len(indices)
        K, rows, cols = X.shape[1], X.shape[0] // R, Y.shape[1] // C
        if not K:
            return xp.zeros((n, R, C), dtype)
        left = xp.ascontiguousarray(X).reshape(rows, R, K)
        right = xp.ascontiguousarray(Y.reshape(K, cols, C).transpose(1, 0, 2))
        row = self.backend.expand(indptr, n).astype(np.int64, copy=False)
        col = indices.astype(np.int64, copy=False)
        return self.pair_products(left, row, right, col, xp.arange(n, dtype=np.int64), dtype)

    def product_pattern(self, a: Blocks, b: Blocks, block_cols: int) -> ProductPattern:
        """Which blocks meet in ``A @ B`` with `block_cols` block columns, by sorting all pairs."""
        backend, xp = self.backend, self.backend.xp
        a_rows = backend.expand(a.indptr, len(a.indices)).astype(np.int64, copy=False)
        first = b.indptr[a.indices].astype(np.int64, copy=False)
        count = b.indptr[a.indices + 1].astype(np.int64, copy=False) - first
        offsets = xp.concatenate([xp.zeros(1, np.int64), xp.cumsum(count, dtype=np.int64)])
        total = int(offsets[-1])  # synchronize!
        left = backend.expand(offsets, total)
        right = first[left] + (xp.arange(total, dtype=np.int64) - offsets[left])
        keys = a_rows[left] * max(block_cols, 1) + b.indices[right]
        order = xp.argsort(keys, kind="stable")
        keys = keys[order]
        starts = structure.first_of_runs(backend, keys)
        index = structure.index_dtype(len(starts), a.indices, b.indices)
        found = structure.keys_to_index(backend, keys[starts], len(a.indptr) - 1, block_cols, index)
        return ProductPattern(left[order], right[order], starts, *found)

    def multiply_sparse(self, a: Blocks, b: Blocks, block_cols: int, dtype: np.dtype[Any]) -> Blocks:
        """Blocks of ``A @ B`` with `block_cols` block columns, sorted and without duplicates."""
        left, right, starts, *index = self.product_pattern(a, b, block_cols)
        return Blocks(self.pair_products(a.data, left, b.data, right, starts, dtype, len(a.indptr) - 1), *index)


ENGINES: EngineTable[ProductEngine] = EngineTable(__package__, cpu="host", cuda="cuda")
