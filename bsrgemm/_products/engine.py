"""The interface of the engines that compute products, and the table that maps each backend to its engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np

from .._backend import structure
from .._backend.base import Array, Backend, Blocks, EngineTable
from .._backend.index_arrays import writes_of
from .call import ProductCall, ProductPattern, UnlistedPattern


class Prepared:
    """The state of a matrix for products: while it holds, the same products with the matrix make the same launches.

    It keeps nothing of the matrix alive.
    """

    def __init__(self, A: Any) -> None:
        source, self._transposed = A._source()
        self._shape, self._sides = source._shape, source.data.shape
        self._data, *self._index = (reference(x) for x in (source.data, *source._index))
        self._writes = [writes_of(x).number for x in source._index]

    def holds_for(self, A: Any) -> bool:
        """Tell whether a matrix has this shape and these arrays, and nobody has written into its index arrays."""
        source, transposed = A._source()
        index = source._index
        return (
            transposed == self._transposed
            and source._shape == self._shape
            and source.data is self._data()
            and source.data.shape == self._sides
            and all(x is y() for x, y in zip(index, self._index, strict=True))
            and all(writes_of(x).number == n for x, n in zip(index, self._writes, strict=True))
        )


def reference(x: Any) -> Callable[[], Any]:
    """Return a weak reference to an object, or a strong one if its class has no weak ones."""
    try:
        return ref(x)
    except TypeError:
        return lambda: x


class ProductEngine(ABC):
    """Products of the arrays of one backend. Methods that are not abstract use only the backend's array module."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @abstractmethod
    def multiply_dense(self, call: ProductCall) -> Any:
        """Carry out a product with a dense operand.

        The result can be started again for operands of the same kind, or is None if that is not possible.
        """

    def quick(self, A: Any, x: Array) -> Array | None:
        """Return ``A @ x`` if the operands are small and plain, so that checks would take most of the time.

        None means that the product has to go the usual way.
        """
        return None

    def prepared(self, A: Any) -> Prepared:
        """Return the state of a matrix, on which the launches of its products depend."""
        return Prepared(A)

    def overlapping(self, out: Array, X: Array, A: Any) -> int | None:
        """Return the number of the first array that shares bytes with `out`, or None if none does.

        Number 0 is `X`; 1, 2 and 3 are `data`, `indices` and `indptr` of `A`.
        """
        arrays = (X, A.data, A.indices, A.indptr)
        return next((number for number, array in enumerate(arrays) if self.backend.overlap(out, array)), None)

    @abstractmethod
    def pair_products(
        self, a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any], rows: int = 0
    ) -> Array:
        """Return ``out[s] = sum of a[ia[k]] @ b[ib[k]] for k in starts[s] .. starts[s + 1] - 1``, added in order of k.

        `rows` is the number of block rows of the result if its blocks are sorted by block row, otherwise 0.
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
        """Return ``out[p] = X[rows of block p] @ Y[:, columns of block p]``, of shape (blocks, R, C) and this `dtype`.

        `tf32` allows an engine to round float32 factors to tf32.
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

    def sampled_launch(self, X: Array, Y: Array, pattern: Any, dtype: np.dtype[Any], tf32: bool = False) -> Any:
        """Return what starts `sampled` with the blocks of a matrix, or None if that is not possible.

        It is a `sampled.SampledLaunch`, which is to be started again if it is `lasting`.
        """
        return None

    def product_pattern(self, a: Blocks, b: Blocks, block_cols: int) -> ProductPattern:
        """Return the pairs of blocks that ``A @ B`` with `block_cols` block columns multiplies; sorts all pairs."""
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

    def planned_pattern(
        self, a: Blocks, b: Blocks, block_cols: int, in_order: bool = True
    ) -> ProductPattern | UnlistedPattern:
        """Return what `multiply_planned` needs of `product_pattern`.

        Unless the blocks of a block row have to be `in_order`, they may have any order that is the same each time.
        """
        return self.product_pattern(a, b, block_cols)

    def multiply_sparse(
        self, a: Blocks, b: Blocks, block_cols: int, dtype: np.dtype[Any], matrices: tuple[Any, Any] | None = None
    ) -> Blocks:
        """Return the blocks of ``A @ B`` with `block_cols` block columns, sorted and without duplicates.

        What is known of their patterns may be kept with the `matrices`, if these have these blocks.
        """
        left, right, starts, *index = self.product_pattern(a, b, block_cols)
        return Blocks(self.pair_products(a.data, left, b.data, right, starts, dtype, len(a.indptr) - 1), *index)

    def multiply_planned(self, a: Blocks, b: Blocks, pattern: Any, cols: int, dtype: np.dtype[Any]) -> Array:
        """Return the values of ``A @ B`` with `cols` block columns, in the order of a pattern that was found before."""
        left, right, starts, _, indptr = pattern
        return self.pair_products(a.data, left, b.data, right, starts, dtype, len(indptr) - 1)


ENGINES: EngineTable[ProductEngine] = EngineTable(__package__, cpu="host", cuda="cuda")
