"""A place where data lives and work happens: the host (NumPy, SciPy) or the GPU (CuPy, cupyx).

A `Backend` names the array module, the sparse classes of the other formats and the few operations that have a code of
their own in each place. Everything else in the package is written once, over `backend.xp`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from . import structure
from .structure import Blocks, ProductPattern

#: An array of whichever module the backend uses.
Array = Any


@dataclass(slots=True)
class AttentionCall:
    """``out = softmax(scale * q @ k.T) @ v``, checked; all arrays (batch, heads, length, columns) of any strides."""

    q: Array
    k: Array
    v: Array
    out: Array
    #: the logarithms of the sums, (batch, heads, queries) in `acc`
    lse: Array | None
    #: what is computed in
    acc: np.dtype[Any]
    scale: float
    softcap: float | None
    #: the query at place i sees keys ``i - left`` to ``i + right``; `bottom_right`: the last one is at the last key
    left: int
    right: int
    bottom_right: bool
    #: a BlockMask
    mask: Any = None
    #: where sequences of different lengths begin among queries and keys, and the end of the last
    bounds: tuple[Array, Array] | None = None
    #: q, k and v are bytes of fp8; those of a head are multiplied by these, (batch, heads) in float32, where given
    fp8: bool = False
    scales: tuple[Array | None, Array | None, Array | None] = (None, None, None)
    #: a factor of the result
    value_scale: float = 1.0


class Backend(ABC):
    """One place where data lives and work happens."""

    #: "cpu" or "cuda"
    name: str
    #: how a message tells a user to bring an array here
    bring: str
    #: dtypes a matrix may have here
    dtypes: tuple[np.dtype[Any], ...]
    #: dtypes that the sparse classes of the other formats hold here
    foreign_dtypes: tuple[np.dtype[Any], ...]
    #: NumPy defers to us above its own arrays (0) and below nothing of ours
    array_priority: float

    @property
    @abstractmethod
    def xp(self) -> ModuleType:
        """NumPy, or a module with its interface."""

    @property
    @abstractmethod
    def sparse(self) -> ModuleType:
        """The module of the sparse classes: scipy.sparse or cupyx.scipy.sparse."""

    @abstractmethod
    def bases(self, is_array: bool) -> tuple[type, ...]:
        """The classes by which this backend's own library recognises a sparse array or matrix."""

    @abstractmethod
    def is_dense(self, x: Any) -> bool:
        """Is `x` an array of this backend's own module?"""

    @abstractmethod
    def is_sparse(self, x: Any) -> bool:
        """Is `x` a sparse array or matrix (ours included) that lives here?"""

    @abstractmethod
    def adopt(self, x: Any) -> Array | None:
        """`x` as an array of this backend without a copy, or None if its memory is elsewhere."""

    @abstractmethod
    def from_host(self, x: np.ndarray[Any, Any]) -> Array:
        """Copy a NumPy array here."""

    @abstractmethod
    def to_host(self, x: Array) -> np.ndarray[Any, Any]:
        """Copy an array of this backend to NumPy; waits for the work that produces it."""

    @abstractmethod
    def address(self, x: Array) -> int:
        """Where the first element of an array lies."""

    def extent(self, x: Array) -> tuple[int, int]:
        """The first byte that belongs to an array, and the first one behind it."""
        start = self.address(x)
        if x.flags.c_contiguous:
            return start, start + x.nbytes
        if not x.size:
            return start, start
        reach = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)]
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
        return start + low, start + high + x.itemsize

    def operand_extents(self, A: Any) -> tuple[tuple[int, int], ...]:
        """The extents of a matrix's data, indices and indptr."""
        return tuple(self.extent(x) for x in (A.data, A.indices, A.indptr))

    def overlapping(self, out: Array, X: Array, A: Any) -> int | None:
        """Which of X and a matrix's data, indices and indptr shares bytes with `out`, by its number."""
        first, last = self.extent(out)
        for number, (start, stop) in enumerate((self.extent(X), *self.operand_extents(A))):
            if start < last and first < stop:
                return number
        return None

    @abstractmethod
    def device_of(self, x: Array) -> Any:
        """What `A.device` answers."""

    @abstractmethod
    def expand(self, indptr: Array, n: int) -> Array:
        """The row of each of `n` entries: ``out[e] = i`` where ``indptr[i] <= e < indptr[i + 1]``."""

    @abstractmethod
    def segment_reduce(self, op: str, values: Array, order: Array | None, starts: Array) -> Array:
        """Reduce segments of rows in a fixed order.

        ``out[s] = op(values[order[k]] for k in starts[s] .. starts[s + 1] - 1)``, the last segment ending
        with `order` (or `values`). No segment is empty. `op` is "add", "maximum", "minimum", "fmax" or "fmin";
        "add" of booleans is "or", 16-bit floats are summed in float32 and rounded once.
        """

    @abstractmethod
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
    ) -> Any:
        """``out = alpha * (A @ B) + beta * out`` with a BSR `A` and dense `B`, `out` of any strides.

        `B` is (K, N) and `out` (M, N), or (batch, K, N) and (batch, M, N). Products are summed in `acc`. `out` is not
        read when `beta` is 0. `transposed`: the transpose of `A` is multiplied; `A` has the arrays that are read, and
        what is remembered on it serves the next call. `precision`: "tf32" allows it where `acc` is float32 or
        complex64, None and "float32" do not. `fp8`: the bytes of `A` and `B` are e4m3 numbers, duplicates included.
        Returns what `matmul` may start again for the same operands, if that is all it takes: a `launch.Launch`.
        """

    def transposed_copy(self, A: Any) -> Any:
        """The transpose of `A` in arrays of its own, for a kernel that cannot read `A` along its columns.

        Kept on `A` while that has the same arrays. Its values are taken anew each time: a user may have written some.
        """
        blocks, kept = A._blocks, A.__dict__.get("_transposed_copy")
        if kept is None or any(a is not b for a, b in zip(kept[0], blocks, strict=True)) or kept[1] != A._shape:
            order = self.xp.argsort(blocks.indices, kind="stable")  # as `structure.transpose` has it
            kept = A._transposed_copy = (blocks, A._shape, A._transpose_now(), order)
            return kept[2]
        _, _, T, order = kept
        T.data[...] = blocks.data[order].transpose(0, 2, 1)
        return T

    @abstractmethod
    def attention(self, call: AttentionCall) -> None:
        """Write the result of an attention, and the logarithms of its sums."""

    @abstractmethod
    def pair_products(
        self, a: Array, ia: Array, b: Array, ib: Array, starts: Array, dtype: np.dtype[Any], rows: int = 0
    ) -> Array:
        """``out[s] = sum of a[ia[k]] @ b[ib[k]] for k in starts[s] .. starts[s + 1] - 1`` in order.

        `rows`: the blocks of the result are those of so many block rows, one row behind the other; 0 if they are not.
        """

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
        """``out[p] = X[rows of block p] @ Y[:, columns of block p]``, (blocks, R, C) in `dtype`.

        `precision` is that of float32, where there is a choice.
        """
        xp, (R, C), n = self.xp, block, len(indices)
        K, rows, cols = X.shape[1], X.shape[0] // R, Y.shape[1] // C
        if not K:
            return xp.zeros((n, R, C), dtype)
        left = xp.ascontiguousarray(X).reshape(rows, R, K)
        right = xp.ascontiguousarray(Y.reshape(K, cols, C).transpose(1, 0, 2))
        at = (self.expand(indptr, n).astype(np.int64, copy=False), indices.astype(np.int64, copy=False))
        return self.pair_products(left, at[0], right, at[1], xp.arange(n, dtype=np.int64), dtype)

    def sound(self, blocks: Blocks, block_rows: int, block_cols: int) -> Blocks:
        """The blocks, if their index arrays can be believed; a user may have written to them since the last check.

        The host looks and raises ValueError. On the GPU a look would mean waiting: kernels clamp instead.
        """
        return blocks

    # A backend may do these in its own way; by default they are the functions of `structure`.
    def transpose(self, blocks: Blocks, block_cols: int) -> Blocks:
        """Blocks of the transposed matrix, sorted."""
        return structure.transpose(self, blocks, block_cols)

    def to_csr(self, blocks: Blocks, block_cols: int, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
        """(data, indices, indptr) in CSR with indices of `dtype`."""
        return structure.to_csr(self, blocks, dtype)

    def product_pattern(self, a: Blocks, b: Blocks, block_cols: int) -> ProductPattern:
        """Which blocks meet in ``A @ B`` with `block_cols` block columns."""
        return structure.product_pattern(self, a, b, block_cols)

    def multiply(self, a: Blocks, b: Blocks, block_cols: int, dtype: np.dtype[Any]) -> Blocks:
        """Blocks of ``A @ B`` with `block_cols` block columns, without duplicates."""
        return structure.multiply(self, a, b, block_cols, dtype)
