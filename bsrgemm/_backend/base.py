"""What an array module must offer, on the host (NumPy, SciPy) or on the GPU (CuPy, cupyx), and no more.

A `Backend` names the array module, the sparse classes of the other formats and the few array primitives that have a
code of their own in each place. Everything else in the package is written once, over `backend.xp`. Products and
attention have engines of their own, found by `engines.EngineTable`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

#: An array of whichever module the backend uses.
Array = Any


class Blocks(NamedTuple):
    """The three arrays of a BSR matrix: data (nblocks, R, C), indices (nblocks,), indptr (rows + 1,)."""

    data: Any
    indices: Any
    indptr: Any


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
        """The address of the first byte of an array, and the address after its last byte."""
        start = self.address(x)
        if x.flags.c_contiguous:
            return start, start + x.nbytes
        if not x.size:
            return start, start
        reach = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)]
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
        return start + low, start + high + x.itemsize

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
    def validated(self, blocks: Blocks, block_rows: int, block_cols: int) -> Blocks:
        """The blocks, if their index arrays can be believed; a user may have written to them since the last check.

        The host checks and raises ValueError. The GPU would have to synchronise for that: its kernels clamp instead.
        """

    @abstractmethod
    def transpose(self, blocks: Blocks, block_cols: int) -> Blocks:
        """Blocks of the transposed matrix, sorted, each block transposed."""

    @abstractmethod
    def to_csr(self, blocks: Blocks, block_cols: int, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
        """(data, indices, indptr) in CSR with indices of `dtype`: every element of a stored block, in order."""
