"""The object that describes one product: `matmul` checks and creates it, and an engine carries it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._backend.base import Array

if TYPE_CHECKING:  # the configs of kernels take time to import, and work on the CPU needs none
    from .configs import Gemm


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
    #: the kernel to use, one of `heuristics.candidates`; None lets the rules choose
    config: Gemm | None = None
    #: whether B may be copied if the product is faster with the copy
    may_copy: bool = True
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
