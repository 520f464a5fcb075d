"""Products of two BSR matrices with constant patterns: pairs of blocks are found once, values are multiplied often."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._array.base import BsrBase, kind_of, no_bsr
from .._backend.base import Array, Backend, Blocks
from .._backend.index_arrays import Unwritten
from .._backend.recording import recorded
from ..dtypes import result_dtype
from .call import UnlistedPattern
from .engine import ENGINES
from .matmul import check_result_blocks, for_product

_NAMES = ("A", "B")


class _Structure(NamedTuple):
    """The structure of an operand when the plan was made, and copies of its index arrays, to which nobody writes."""

    shape: tuple[int, int]
    blocksize: tuple[int, int]
    indices: Array
    indptr: Array
    copies: tuple[Array, Array]
    unwritten: Unwritten


class ProductPlan:
    """The pairs of blocks that ``A @ B`` multiplies, for all matrices with the patterns of `A` and `B`.

    Use the function `plan` to make one. It checks the operands first, which this constructor does not.

    Parameters
    ----------
    A, B : bsr_array or bsr_matrix of shapes (M, K) and (K, N)
        Two matrices on the same device. The blocks of `B` have as many rows as those of `A` have columns.

    Attributes
    ----------
    shape, blocksize : tuple of int
        Shape and block size of the result.
    blocks, pairs : int
        Number of blocks of the result, and number of products of two blocks of which they are the sums.

    Raises
    ------
    ValueError
        On the CPU, if the index arrays of `A` or `B` are not valid.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.kron(np.ones((2, 3)), np.eye(2)), blocksize=(2, 2))
    >>> product = bg.plan(A, A.T)
    >>> product.shape, product.blocksize, product.blocks, product.pairs
    ((4, 4), (2, 2), 4, 12)
    >>> product(A, A.T).toarray()[0]
    array([3., 0., 3., 0.])
    """

    #: Whether the blocks of a block row of the result are sorted.
    _in_order = True

    def __init__(self, A: BsrBase, B: BsrBase) -> None:
        self._backend, self._structures = A._backend, tuple(_structure(x) for x in (A, B))
        a, b = A._validated, B._validated
        if not _counts_writes(self._backend):  # a user may write into the arrays of A and B
            a, b = (Blocks(x.data, *kept.copies) for x, kept in zip((a, b), self._structures, strict=True))
        self._pattern = ENGINES.of(self._backend).planned_pattern(a, b, B._block_shape[1], self._in_order)
        self._share_index()
        self.shape, self.blocksize = (A._shape[0], B._shape[1]), (A.blocksize[0], B.blocksize[1])
        self.blocks, self.pairs = len(self._pattern.indices), self._pattern.pairs

    def _share_index(self) -> None:
        """Make the index arrays that results share: copies of those of the plan, since a user may write into them."""
        self._shared = tuple(self._backend.watched(x.copy()) for x in (self._pattern.indices, self._pattern.indptr))
        self._shared_unwritten = Unwritten(*self._shared)

    def __repr__(self) -> str:
        return f"<ProductPlan of shape {self.shape}: {self.blocks} blocks {self.blocksize} from {self.pairs} products>"

    @recorded
    def __call__(self, A: Any, B: Any) -> Any:
        """Return ``A @ B`` for two matrices with the patterns of the plan and any values.

        Parameters
        ----------
        A, B : bsr_array or bsr_matrix of shapes (M, K) and (K, N)
            Matrices with the shape, the block size and the index arrays of those that the plan was made from. Their
            dtypes may be different.

        Returns
        -------
        bsr_array or bsr_matrix of shape (M, N)
            The product in canonical format and in the dtype to which NumPy promotes both dtypes. All results of a plan
            share their index arrays, until somebody writes into them.

        Raises
        ------
        TypeError
            If `A` or `B` is not a BSR matrix on the device of the plan.
        ValueError
            If the shape, block size or index arrays of `A` or `B` differ from those of the plan, or if a matrix of
            integers or booleans stores a block twice and the result has another dtype.

        Notes
        -----
        The call does not wait for the GPU if `A` and `B` share the index arrays that the plan was made from, and nobody
        has written into them. Otherwise it waits to compare the arrays. It also waits to search for duplicates in a
        matrix of integers or booleans that is not known to be in canonical format, if the result has another dtype.

        Examples
        --------
        >>> import numpy as np, bsrgemm as bg
        >>> A = bg.bsr_array(np.diag([1.0, 2.0, 3.0, 4.0]), blocksize=(2, 2))
        >>> square = bg.plan(A, A)
        >>> A.data *= 10
        >>> square(A, A).diagonal()
        array([ 100.,  400.,  900., 1600.])
        """
        for name, x, wanted in zip(_NAMES, (A, B), self._structures, strict=True):
            _check(name, x, self._backend, wanted)
        dtype = result_dtype(A.dtype, B.dtype)
        for name, x in zip(_NAMES, (A, B), strict=True):
            if for_product(x, dtype) is not x:
                raise ValueError(f"{name}: holds a block twice, in {x.dtype}; call {name}.sum_duplicates() first")
        pattern, cols = self._pattern, self.shape[1] // self.blocksize[1]
        data = ENGINES.of(self._backend).multiply_planned(A._blocks, B._blocks, pattern, cols, dtype)
        if not _same(self._backend, self._shared, (pattern.indices, pattern.indptr), self._shared_unwritten):
            self._share_index()
        canonical = None if isinstance(pattern, UnlistedPattern) and pattern.order is None else True
        return A._new(Blocks(data, *self._shared), self.shape, canonical=canonical)


class FactorPlan(ProductPlan):
    """A plan for a product that is the right factor of another one, which does not depend on the order of its blocks.

    On the CPU, results have the blocks of a block row in the order in which a loop finds them; the sort would take as
    long as half of the product. Values are float32, float64, complex64 or complex128.
    """

    _in_order = False


def plan(A: Any, B: Any) -> ProductPlan:
    """Return a plan for many products ``A @ B`` of matrices whose values change and whose patterns do not.

    Parameters
    ----------
    A, B : bsr_array or bsr_matrix of shapes (M, K) and (K, N)
        Two matrices on the same device. The blocks of `B` have as many rows as those of `A` have columns. Only their
        patterns are read.

    Returns
    -------
    ProductPlan
        An object that returns the product of two matrices with these patterns when it is called with them.

    Raises
    ------
    TypeError
        If `A` or `B` is not a BSR matrix, or if they are on different devices.
    ValueError
        If the shapes or the block sizes do not agree, or if blocks of the result are too large for the device.

    Notes
    -----
    Making a plan waits for the GPU once or twice, as ``A @ B`` does. A call of the plan does not wait, if the matrices
    share the index arrays that the plan was made from. For each product of two blocks, the plan takes 8 bytes of memory
    on the GPU, or 16 bytes if the result has a block row with too many blocks for a hash table in shared memory. On the
    CPU it takes 16 bytes for blocks that are large enough to be multiplied by BLAS, and nothing for others. The plan
    keeps the index arrays of `A` and `B`, with copies of them and of those of the result. The result has every block
    that the patterns allow, even if its values cancel out to zero.

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
            raise TypeError(f"{name}: wanted a bsr_array or bsr_matrix, got {no_bsr(x, name)}")
    if A._backend is not B._backend:
        raise TypeError(f"B: wanted a matrix on {A._backend.name!r}, as A is, got one on {B._backend.name!r}")
    if A._shape[1] != B._shape[0]:
        raise ValueError(f"plan: dimension mismatch: A is {A._shape}, B is {B._shape}")
    if A.blocksize[1] != B.blocksize[0]:
        raise ValueError(
            f"B: wanted blocks of {A.blocksize[1]} rows, as A's have columns, got {B.blocksize}; convert one, for "
            f"example B.tobsr(({A.blocksize[1]}, {B.blocksize[1]}))"
        )
    check_result_blocks(A._backend, A._blocks.data, B._blocks.data)
    return ProductPlan(A, B)


def _structure(x: BsrBase) -> _Structure:
    _, indices, indptr = x._blocks
    unwritten = x._state()
    return _Structure(x._shape, x.blocksize, indices, indptr, (indices.copy(), indptr.copy()), unwritten)


def _check(name: str, x: Any, backend: Backend, wanted: _Structure) -> None:
    """Raise TypeError or ValueError unless `x` has the structure of the plan."""
    if not isinstance(x, BsrBase) or x._backend is not backend:
        raise TypeError(f"{name}: wanted a bsr_array or bsr_matrix on {backend.name!r}, got {kind_of(x)}")
    for what, mine, theirs in (("shape", x._shape, wanted.shape), ("blocksize", x.blocksize, wanted.blocksize)):
        if mine != theirs:
            raise ValueError(f"{name}: wanted the {what} of the plan, {theirs}, got {mine}")
    _, indices, indptr = x._blocks
    same = indices is wanted.indices and indptr is wanted.indptr
    if same and _counts_writes(backend) and wanted.unwritten.holds():
        return
    for what, mine, theirs in zip(("indices", "indptr"), (indices, indptr), wanted.copies, strict=True):
        if not _equal(mine, theirs):
            raise ValueError(f"{name}: wanted the blocks of the plan, got other {what}")


def _counts_writes(backend: Backend) -> bool:
    return backend.index_class is not None


def _same(backend: Backend, arrays: tuple[Array, ...], copies: tuple[Array, ...], unwritten: Unwritten) -> bool:
    """Tell whether arrays still are what their copies are; on the GPU, whether nobody can have written into them."""
    if _counts_writes(backend):
        return unwritten.holds()
    return all(_equal(a, b) for a, b in zip(arrays, copies, strict=True))


def _equal(a: Array, b: Array) -> bool:
    return len(a) == len(b) and bool((a == b).all())  # synchronize!
