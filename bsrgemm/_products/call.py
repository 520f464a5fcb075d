"""What describes a product: `ProductCall`, which `matmul` checks and an engine carries out; on the GPU its `Problem`,
which decides the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array
from .._kernels.element_types import Types
from .._kernels.kernel import Kernel


@dataclass(slots=True)
class ProductCall:
    """The product ``out = alpha * (A @ B) + beta * out`` of a BSR matrix `A` and a dense `B`, with checked arguments.

    `B` has shape (K, N) and `out` (M, N), or (batch, K, N) and (batch, M, N). Both may have any strides. `out` is not
    read when `beta` is 0.
    """

    #: A itself, or the matrix whose transpose is A if `transposed`; its arrays are read, and the results of
    #: preparations for later calls are stored on it
    matrix: Any
    B: Array
    out: Array
    #: the dtype in which products are summed
    acc: np.dtype[Any]
    alpha: Any = 1
    beta: Any = 0
    transposed: bool = False
    #: whether factors in float32 and complex64 may be rounded to tf32
    tf32: bool = False
    #: whether the bytes of A and B are fp8 numbers (e4m3)
    fp8: bool = False
    #: the kernel to use, one of `choice.variants`; without it predicted times choose
    kernel: Kernel | None = None
    #: for float32: 2 if B is a copy in two parts of tf32, of which `B` is the first
    parts: int = 1

    @property
    def columns(self) -> int:
        """The number of columns of B and of the result."""
        return int(self.B.shape[-1])

    @property
    def batches(self) -> int:
        """The number of matrices in the batch, or 1 if there is no batch."""
        return int(self.B.shape[0]) if self.B.ndim == 3 else 1


@dataclass(frozen=True)
class Problem:
    """The properties of a product that decide its kernel.

    If the product is with the transpose of a stored matrix, R, K and the counts are those of the transpose.
    """

    arch: str
    types: Types
    R: int
    K: int
    N: int
    batches: int
    block_rows: int
    block_cols: int
    blocks: int
    transposed: bool
    #: "C" or "F" for operands whose rows or columns TMA can read, otherwise "" (see `order_of`)
    b_order: str
    #: the same, or "rows" for a complex result whose rows are contiguous at any address (see `order_of_result`)
    c_order: str
    #: whether C is only written, because beta is 0
    overwrite: bool
    #: whether the data of A starts at a multiple of 16 bytes
    aligned: bool
    #: for float32: whether factors may be rounded to tf32
    tf32: bool = False
    #: for float32: 2 if B is given in two parts of tf32, for Hopper's tensor cores
    parts: int = 1
    #: elements from one line of a block to the next in a copy of the blocks; 0 for blocks as they are stored
    line: int = 0
    #: whether the matrix is a copy of a transpose, which was not stored by rows
    turned: bool = False
    #: how many times as long as the mean the longest block row is (see `unevenness`)
    uneven: int = 1

    @property
    def lines(self) -> int:
        """The elements from one line of a stored block to the next."""
        return self.line or (self.R if self.transposed else self.K)


def unevenness(longest: int, blocks: int, rows: int) -> int:
    """Return about how many times as long as the mean the longest block row is: a power of two, 1 for usual patterns.

    Rows of blocks at random differ by a few roots of their mean, which is no other problem.

    >>> [unevenness(longest, 1000, 100) for longest in (0, 10, 26, 27, 100, 1000)]
    [1, 1, 1, 2, 8, 64]
    """
    mean = max(1.0, blocks / max(1, rows))
    return 1 << (int(longest / mean).bit_length() - 1) if longest > mean + 4 * math.sqrt(mean) + 4 else 1


#: Copies of operands, filled matrices, and dense products of which blocks are taken have at most so many bytes.
MOST_BYTES = 4 << 30
#: Limits of strides in bytes: between matrices of a batch (a limit of tensor maps), and between rows, which the kernels
#: for few columns hold in 32 bits.
_MOST_STRIDE, _MOST_PITCH = 2**40, 2**32


def order_of(x: Array) -> str:
    """Return "C" or "F" for matrices that TMA can read along rows or along columns, otherwise ""."""
    strides = x.strides
    if x.data.ptr % 16 or (len(strides) == 3 and x.shape[0] > 1 and not 0 < strides[0] < _MOST_STRIDE):
        return ""
    if len(strides) == 3 and strides[0] % 16:
        return ""
    size = x.itemsize
    row, col = strides[-2:]
    rows, cols = x.shape[-2:]
    if cols == 1 and row == size:
        return "F"  # with a single column, the stride between columns does not matter
    if col == size and row % 16 == 0 and size * cols <= row < _MOST_PITCH:
        return "C"
    if row == size and col % 16 == 0 and size * rows <= col < _MOST_PITCH:
        return "F"
    return ""


def order_of_result(x: Array) -> str:
    """Return what `order_of` does, or "rows" for a complex array whose rows are contiguous at any address."""
    rows = x.dtype.kind == "c" and x.strides[-1] == x.itemsize
    return order_of(x) or ("rows" if rows else "")


class ProductPattern(NamedTuple):
    """The pairs of blocks that ``A @ B`` of two BSR matrices multiplies, and the sparsity pattern of the result.

    Pair k multiplies block ``left[k]`` of A by block ``right[k]`` of B. Pairs are grouped by the block of the result to
    which they contribute: the pairs of block s begin at ``starts[s]`` and are in the order in which A is stored.
    `indices` and `indptr` are the index arrays of the result.
    """

    left: Array
    right: Array
    starts: Array
    indices: Array
    indptr: Array

    @property
    def pairs(self) -> int:
        """The number of pairs."""
        return len(self.left)


class UnlistedPattern:
    """A `ProductPattern` whose pairs are listed when somebody asks for them.

    Parameters
    ----------
    indices, indptr : array
        The index arrays of the result.
    pairs : int
        The number of pairs.
    listed : callable
        ``listed()`` returns the whole pattern.
    order : array, optional
        The position of each block in the order in which a loop over single elements finds them; None if the blocks are
        in that order.
    """

    def __init__(
        self, indices: Array, indptr: Array, pairs: int, listed: Callable[[], ProductPattern], order: Array | None
    ) -> None:
        self.indices, self.indptr, self.pairs, self._listed, self.order = indices, indptr, pairs, listed, order

    @cached_property
    def _whole(self) -> ProductPattern:
        return self._listed()

    def __iter__(self) -> Iterator[Array]:
        return iter(self._whole)
