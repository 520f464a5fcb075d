"""One object for one product: what `matmul` has checked and an engine carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array
from .configs import Gemm


@dataclass(slots=True)
class ProductCall:
    """``out = alpha * (A @ B) + beta * out`` with a BSR `A` and dense `B` and `out` of any strides, checked.

    `B` is (K, N) and `out` (M, N), or (batch, K, N) and (batch, M, N). `out` is not read when `beta` is 0.
    """

    #: A, or the matrix whose transpose is multiplied; it has the arrays that are read, and keeps what serves the
    #: next call
    matrix: Any
    B: Array
    out: Array
    #: the dtype in which products are summed
    acc: np.dtype[Any]
    alpha: Any = 1
    beta: Any = 0
    transposed: bool = False
    #: float32 and complex64 may be rounded to tf32
    tf32: bool = False
    #: the bytes of A and B are e4m3 numbers
    fp8: bool = False
    #: one kernel among `heuristics.candidates`; None lets the rules choose
    config: Gemm | None = None
    #: B may be copied where that pays
    may_copy: bool = True

    @property
    def columns(self) -> int:
        """Columns of B and of the result."""
        return int(self.B.shape[-1])

    @property
    def batches(self) -> int:
        """Matrices in a batch, 1 without one."""
        return int(self.B.shape[0]) if self.B.ndim == 3 else 1


class ProductPattern(NamedTuple):
    """Which blocks meet in ``A @ B`` of two BSR matrices, and where the result has blocks.

    Pair k multiplies block ``left[k]`` of A with block ``right[k]`` of B. Pairs are grouped by blocks of the result:
    those of block s begin at ``starts[s]``, in the order of A's storage. `indices` and `indptr` are the result's.
    """

    left: Array
    right: Array
    starts: Array
    indices: Array
    indptr: Array
