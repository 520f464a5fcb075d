"""BsrBase of two sparse matrices whose patterns stay: which blocks meet is found once, the numbers come many times."""

from __future__ import annotations

from typing import Any

from .._array.base import BsrBase
from .._backend.base import Blocks
from ..dtypes import result_dtype
from .engine import ENGINES
from .matmul import for_product

_NAMES = ("A", "B")


class ProductPlan:
    """Which blocks meet in ``A @ B``, of two matrices with one structure: made by `plan`.

    Attributes
    ----------
    shape, blocksize : tuple of int
        Of the result.
    blocks, pairs : int
        Blocks of the result, and products of blocks that they are sums of.
    """

    def __init__(self, A: BsrBase, B: BsrBase) -> None:
        self._backend, self._structures = A._backend, tuple(_structure(x) for x in (A, B))
        a, b = A._validated, B._validated
        self._pattern = ENGINES.of(self._backend).product_pattern(a, b, B._block_shape[1])
        self.shape, self.blocksize = (A._shape[0], B._shape[1]), (A.blocksize[0], B.blocksize[1])
        self.blocks, self.pairs = len(self._pattern.starts), len(self._pattern.left)

    def __repr__(self) -> str:
        return f"<ProductPlan of shape {self.shape}: {self.blocks} blocks {self.blocksize} from {self.pairs} products>"

    def __call__(self, A: Any, B: Any) -> Any:
        """``A @ B``, for two matrices with the structure that was planned for and any values.

        Parameters
        ----------
        A, B : bsr_array or bsr_matrix
            With the shape, the block size and the index arrays of those that the plan was made from. On the GPU the
            call waits only to compare index arrays, if they are not the very same.

        Returns
        -------
        bsr_array or bsr_matrix
            The product in canonical format. All results of a plan share their index arrays.
        """
        for name, x, wanted in zip(_NAMES, (A, B), self._structures, strict=True):
            _check(name, x, self._backend, wanted)
        dtype = result_dtype(A.dtype, B.dtype)
        for name, x in zip(_NAMES, (A, B), strict=True):
            if for_product(x, dtype) is not x:
                raise ValueError(f"{name}: holds a block twice, in {x.dtype}; call {name}.sum_duplicates() first")
        left, right, starts, *index = self._pattern
        engine = ENGINES.of(self._backend)
        data = engine.pair_products(A.data, left, B.data, right, starts, dtype, len(index[1]) - 1)
        return A._new(Blocks(data, *index), self.shape, canonical=True)


def plan(A: Any, B: Any) -> ProductPlan:
    """Which blocks meet in ``A @ B``: for many products of matrices whose values change and whose patterns do not.

    Parameters
    ----------
    A, B : bsr_array or bsr_matrix
        In the same place. The columns of A's blocks are as many as the rows of B's.

    Returns
    -------
    ProductPlan
        Called with two such matrices it gives their product.

    Notes
    -----
    Making a plan waits for the GPU twice, as ``A @ B`` does; calling it does not. The plan takes 8 bytes of memory for
    each product of two blocks, on the CPU 16, and keeps the index arrays of A and B. The result has all blocks that the
    patterns meet in, also where values cancel out.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.kron(np.eye(3), np.ones((2, 2))), blocksize=(2, 2))
    >>> square = bg.plan(A, A)
    >>> square
    <ProductPlan of shape (6, 6): 3 blocks (2, 2) from 3 products>
    >>> A.data *= 2
    >>> np.allclose(square(A, A).toarray(), A.toarray() @ A.toarray())
    True
    """
    for name, x in zip(_NAMES, (A, B), strict=True):
        if not isinstance(x, BsrBase):
            raise TypeError(f"{name}: wanted a bsr_array or bsr_matrix, got {type(x).__name__}")
    if A._backend is not B._backend:
        raise TypeError(f"B: wanted a matrix on {A._backend.name!r}, as A is, got one on {B._backend.name!r}")
    if A._shape[1] != B._shape[0]:
        raise ValueError(f"plan: dimension mismatch: A is {A._shape}, B is {B._shape}")
    if A.blocksize[1] != B.blocksize[0]:
        raise ValueError(
            f"B: wanted blocks of {A.blocksize[1]} rows, as A's have columns, got {B.blocksize}; convert one, for "
            f"example B.tobsr(({A.blocksize[1]}, {B.blocksize[1]}))"
        )
    return ProductPlan(A, B)


def _structure(x: BsrBase) -> tuple[tuple[int, int], tuple[int, int], Any, Any]:
    return x._shape, x.blocksize, x._blocks.indices, x._blocks.indptr


def _check(name: str, x: Any, backend: Any, wanted: tuple[Any, ...]) -> None:
    """An error unless `x` has the structure that was planned for."""
    if not isinstance(x, BsrBase) or x._backend is not backend:
        raise TypeError(f"{name}: wanted a bsr_array or bsr_matrix on {backend.name!r}, got {type(x).__name__}")
    found = _structure(x)
    for what, mine, theirs in zip(("shape", "blocksize"), found, wanted, strict=False):
        if mine != theirs:
            raise ValueError(f"{name}: wanted the {what} of the plan, {theirs}, got {mine}")
    for what, mine, theirs in zip(("indices", "indptr"), found[2:], wanted[2:], strict=True):
        if mine is not theirs and (len(mine) != len(theirs) or not bool((mine == theirs).all())):  # synchronize!
            raise ValueError(f"{name}: wanted the blocks of the plan, got other {what}")
