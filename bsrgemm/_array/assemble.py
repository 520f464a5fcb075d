"""Matrices put together: stacked, on a grid, along a diagonal, as a Kronecker product.

Where a block goes follows from how many blocks the rows before it have: nothing is sorted and nothing is dense. A line
marked ``# synchronize!`` waits for the GPU when the arrays live there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from .._backend import structure
from .._backend.base import Array, Backend, Blocks
from .._backend.registry import backend_of
from ..dtypes import BFLOAT16, check_dtype, result_dtype
from .base import BsrBase, check_shape
from .construct import parse
from .leaves import leaf


class _Place(NamedTuple):
    """An operand, what a message calls it, and its row and column in the grid."""

    name: str
    value: Any
    row: int
    column: int


class _Piece(NamedTuple):
    """The blocks of an operand, and the block column where they begin."""

    blocks: Blocks
    left: int


# -------------------------------------------------------------------------------------- stacking
def vstack(blocks: Iterable[Any], dtype: Any = None) -> Any:
    """Matrices below each other.

    Parameters
    ----------
    blocks : sequence of matrices
        All with as many columns and in the same place (CPU or GPU), at least one of them a `bsr_array` or `bsr_matrix`.
        Those have one block size. Matrices of other formats (scipy's on the CPU, cupyx's on the GPU) and dense 2-D
        arrays are converted to it.
    dtype : dtype, optional
        Element type of the result, cast as by ``astype``. By default NumPy's promotion of all of them.

    Returns
    -------
    bsr_array or bsr_matrix
        With arrays of its own. A `bsr_matrix` if no operand is a sparse array.

    See Also
    --------
    hstack, block_array, block_diag

    Notes
    -----
    Blocks are copied as they are stored: their order in a row, blocks of zeros and duplicates stay. Where all operands
    are known to be in canonical format the result is too.

    On the GPU the call waits for nothing where all operands are of this package and have the dtype of the result. It
    waits to convert other formats and dense arrays, to cast floats to integers, and to cast a matrix that is not known
    to be in canonical format: its duplicates are added up in its own dtype first.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.array([[1, 2, 0, 0], [0, 0, 3, 4]]), blocksize=(1, 2))
    >>> bg.vstack([A, np.array([[0, 0, 5, 6]])]).toarray()
    array([[1, 2, 0, 0],
           [0, 0, 3, 4],
           [0, 0, 5, 6]])
    """
    places = [_Place(f"blocks[{i}]", x, i, 0) for i, x in enumerate(_entries(blocks, "blocks"))]
    return _assembled("blocks", places, (len(places), 1), dtype)


def hstack(blocks: Iterable[Any], dtype: Any = None) -> Any:
    """Matrices beside each other.

    Parameters
    ----------
    blocks : sequence of matrices
        All with as many rows; otherwise as in `vstack`.
    dtype : dtype, optional
        Element type of the result, cast as by ``astype``. By default NumPy's promotion of all of them.

    Returns
    -------
    bsr_array or bsr_matrix
        With arrays of its own. A `bsr_matrix` if no operand is a sparse array.

    See Also
    --------
    vstack : says what is kept, and when a call waits for the GPU.
    block_array

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.eye(2), blocksize=(2, 2))
    >>> bg.hstack([A, 2 * A]).toarray()
    array([[1., 0., 2., 0.],
           [0., 1., 0., 2.]])
    """
    places = [_Place(f"blocks[{j}]", x, 0, j) for j, x in enumerate(_entries(blocks, "blocks"))]
    return _assembled("blocks", places, (1, len(places)), dtype)


def block_array(grid: Iterable[Iterable[Any]], dtype: Any = None) -> Any:
    """A matrix from a grid of matrices.

    Parameters
    ----------
    grid : rows of matrices
        Rows of one length. None stands for zeros. Matrices in a row of the grid have as many rows, those in a column
        of the grid as many columns; a row or column of None alone has none. Otherwise as in `vstack`.
    dtype : dtype, optional
        Element type of the result, cast as by ``astype``. By default NumPy's promotion of all of them.

    Returns
    -------
    bsr_array or bsr_matrix
        With arrays of its own. A `bsr_matrix` if no operand is a sparse array, as by ``scipy.sparse.bmat``.

    See Also
    --------
    vstack : says what is kept, and when a call waits for the GPU.
    hstack, block_diag

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.array([[1, 2], [3, 4]]), blocksize=(2, 1))
    >>> b = np.array([[5], [6]])
    >>> bg.block_array([[A, b], [None, -b]]).toarray()
    array([[ 1,  2,  5],
           [ 3,  4,  6],
           [ 0,  0, -5],
           [ 0,  0, -6]])
    """
    rows = [_entries(row, f"grid[{i}]") for i, row in enumerate(_entries(grid, "grid"))]
    for i, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"grid: wanted rows of one length, got {len(rows[0])} entries in grid[0] and {len(row)} in grid[{i}]"
            )
    places = [
        _Place(f"grid[{i}][{j}]", x, i, j) for i, row in enumerate(rows) for j, x in enumerate(row) if x is not None
    ]
    return _assembled("grid", places, (len(rows), len(rows[0]) if rows else 0), dtype)


def block_diag(mats: Iterable[Any], dtype: Any = None) -> Any:
    """Matrices along the diagonal, each below and to the right of the one before; zeros elsewhere.

    Parameters
    ----------
    mats : sequence of matrices
        Of any shapes; otherwise as in `vstack`.
    dtype : dtype, optional
        Element type of the result, cast as by ``astype``. By default NumPy's promotion of all of them.

    Returns
    -------
    bsr_array or bsr_matrix
        With arrays of its own. A `bsr_matrix` if no operand is a sparse array.

    See Also
    --------
    vstack : says what is kept, and when a call waits for the GPU.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.array([[1, 2]]), blocksize=(1, 2))
    >>> bg.block_diag([A, A + A]).toarray()
    array([[1, 2, 0, 0],
           [0, 0, 2, 4]])
    """
    places = [_Place(f"mats[{i}]", x, i, i) for i, x in enumerate(_entries(mats, "mats"))]
    return _assembled("mats", places, (len(places), len(places)), dtype)


def _entries(x: Any, name: str) -> list[Any]:
    """The entries of a sequence; a matrix is none, but an array of objects is."""
    backend = backend_of(x)
    if backend is None or (backend.is_dense(x) and x.dtype == np.object_ and x.ndim):
        try:
            return list(x)
        except TypeError:
            pass
    raise TypeError(f"{name}: wanted a sequence of matrices, got {type(x).__name__}")


def _assembled(what: str, places: Sequence[_Place], grid: tuple[int, int], dtype: Any) -> Any:
    """The matrix with each operand in its place; `places` go row by row, from left to right."""
    first = next((place for place in places if isinstance(place.value, BsrBase)), None)
    if first is None:
        got = ", ".join(type(place.value).__name__ for place in places) or "nothing"
        raise TypeError(f"{what}: wanted at least one bsr_array or bsr_matrix, got {got}")
    backend, blocksize = first.value._backend, first.value.blocksize
    places = [place._replace(value=_operand(first.value, place.value, place.name)) for place in places]
    for place in places:
        if isinstance(place.value, BsrBase) and place.value.blocksize != blocksize:
            raise ValueError(
                f"{what}: wanted one block size, got {blocksize} in {first.name} and {place.value.blocksize} in "
                f"{place.name}; convert one, for example {place.name}.tobsr({blocksize})"
            )
    heights = _sizes(places, grid[0], "row", 0)
    widths = _sizes(places, grid[1], "column", 1)
    shape = check_shape((sum(heights), sum(widths)), what)
    R, C = blocksize
    for place in places:
        M, N = place.value.shape
        if M % R or N % C:
            raise ValueError(
                f"{place.name}: shape {(M, N)} does not divide into blocks of {blocksize}, those of {first.name}"
            )
    wanted = _promoted(backend, places) if dtype is None else check_dtype(dtype, backend.dtypes)
    matrices = [_converted(first.value, place.value, blocksize, wanted) for place in places]
    lefts = list(accumulate((width // C for width in widths), initial=0))
    rows: list[list[_Piece]] = [[] for _ in heights]
    for place, matrix in zip(places, matrices, strict=True):
        rows[place.row].append(_Piece(matrix._validated, lefts[place.column]))
    canonical = all(matrix._known_canonical for matrix in matrices)
    return object.__new__(leaf(backend, _any_array(backend, places)))._set(
        _joined(backend, rows, shape, blocksize, wanted),
        shape,
        canonical=canonical or None,
        sorted_=canonical or all(matrix._has_sorted_indices for matrix in matrices) or None,
    )


def _joined(
    backend: Backend, rows: list[list[_Piece]], shape: tuple[int, int], blocksize: tuple[int, int], dtype: np.dtype[Any]
) -> Blocks:
    """The blocks of rows of pieces, each row of the result having those of the pieces from left to right."""
    xp = backend.xp
    pieces = [piece for row in rows for piece in row]
    total = sum(len(blocks.indices) for blocks, _ in pieces)
    index = structure.index_dtype(
        max(*shape, total), *(array for blocks, _ in pieces for array in (blocks.indices, blocks.indptr))
    )
    data, indices = xp.empty((total, *blocksize), dtype), xp.empty(total, index)
    starts = []
    first = 0  # where the blocks of a row of pieces begin
    for row in rows:
        if not row:
            continue
        indptrs = [blocks.indptr.astype(index, copy=False) for blocks, _ in row]
        free = sum(indptr[:-1] for indptr in indptrs) + first  # the next place that is free in each row
        starts.append(free)
        for (blocks, left), indptr in zip(row, indptrs, strict=True):
            n = len(blocks.indices)
            if len(row) == 1:
                where: Any = slice(first, first + n)
            else:
                shift = free - indptr[:-1]
                where = shift[backend.expand(indptr, n)] + xp.arange(n, dtype=index)
                free = free + xp.diff(indptr)
            if n:
                data[where] = blocks.data
                indices[where] = blocks.indices.astype(index, copy=False) + left
        first += sum(len(blocks.indices) for blocks, _ in row)
    return Blocks(data, indices, xp.concatenate([*starts, xp.full(1, total, index)]))


def _sizes(places: Sequence[_Place], count: int, what: str, axis: int) -> list[int]:
    """Rows in each row of the grid (axis 0) or columns in each of its columns (axis 1); 0 where all is None."""
    givers: list[_Place | None] = [None] * count
    for place in places:
        line = place.column if axis else place.row
        giver = givers[line] = givers[line] or place
        wanted, got = giver.value.shape[axis], place.value.shape[axis]
        if wanted != got:
            raise ValueError(f"{place.name}: wanted {wanted} {what}s, as {giver.name} has, got {got}")
    return [0 if giver is None else int(giver.value.shape[axis]) for giver in givers]


# -------------------------------------------------------------------------------------- operands
def _operand(A: BsrBase, x: Any, name: str) -> Any:
    """`x` as a sparse matrix or a dense 2-D array in the place of `A`; TypeError or ValueError otherwise."""
    operand = A._operand(x, name)
    if operand is None:
        raise TypeError(f"{name}: wanted a matrix or a dense 2-D array on {A._backend.name!r}, got {type(x).__name__}")
    check_dtype(operand.dtype, A._backend.dtypes, name)
    if operand.ndim != 2:
        raise ValueError(f"{name}: wanted 2 dimensions, got {operand.ndim} in shape {tuple(operand.shape)}")
    return operand


def _promoted(backend: Backend, places: Sequence[_Place]) -> np.dtype[Any]:
    """NumPy's promotion of all dtypes at once, which does not depend on their order; bfloat16 as `result_dtype`."""
    dtypes = [check_dtype(place.value.dtype, backend.dtypes) for place in places]
    if BFLOAT16 in dtypes:
        dtypes = [dtype for dtype in (result_dtype(BFLOAT16, d) for d in dtypes) if dtype != BFLOAT16]
    return check_dtype(np.result_type(*dtypes), backend.dtypes) if dtypes else BFLOAT16


def _converted(A: BsrBase, x: Any, blocksize: tuple[int, int], dtype: np.dtype[Any]) -> Any:
    """`x` in blocks of this size and in this dtype; duplicates are added up before a cast."""
    if not isinstance(x, BsrBase):
        parts = parse(A._backend, x, None, None, False, blocksize, A._is_array)  # synchronize!
        x = A._new(parts.blocks, parts.shape, canonical=parts.canonical)
    if x.dtype == dtype:
        return x
    return x._new(x._canonical(), canonical=True).astype(dtype)  # synchronize!


def _any_array(backend: Backend, places: Sequence[_Place]) -> bool:
    """Is one of the operands a sparse array, and not a sparse matrix?"""
    return any(isinstance(place.value, backend.sparse.sparray) for place in places)


# ------------------------------------------------------------------------------ Kronecker products
def kron(A: Any, B: Any) -> Any:
    """The Kronecker product: `B` once for each element of `A`, multiplied by it.

    Parameters
    ----------
    A, B : matrices
        In the same place (CPU or GPU), at least one of them a `bsr_array` or `bsr_matrix`. The other one may be of
        another format (scipy's on the CPU, cupyx's on the GPU), which counts as blocks of 1 x 1, or a dense 2-D array.

    Returns
    -------
    bsr_array or bsr_matrix
        In canonical format, in NumPy's promotion of the two dtypes; a `bsr_matrix` if no operand is a sparse array.

        - A dense `B` of p x q: the pattern of `A`, in blocks of (R p) x (C q), where `A` has blocks of R x C.
        - A sparse `B`: the block size of `B`. Every stored element of `A`, zero or not, gives all stored blocks of
          `B`; of a dense `A` those elements that are not zero.

    See Also
    --------
    block_diag

    Notes
    -----
    The pattern depends on the patterns alone. Zeros inside the blocks of `A` give blocks of zeros;
    ``A.tobsr((1, 1))`` and its ``eliminate_zeros()`` before, or ``eliminate_zeros()`` of the result, drop them.
    To keep the pattern of `A` with a sparse `B`, give ``B.toarray()``.

    Duplicates are added up first. On the GPU the call waits for that where a matrix is not known to be in canonical
    format, and to convert other formats and a dense `A`.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> A = bg.bsr_array(np.array([[0, 2], [5, 0]]), blocksize=(1, 1))
    >>> K = bg.kron(A, np.array([[1, 2], [3, 4]]))
    >>> K.toarray()
    array([[ 0,  0,  2,  4],
           [ 0,  0,  6,  8],
           [ 5, 10,  0,  0],
           [15, 20,  0,  0]])
    >>> K.blocksize, bg.kron(np.eye(3), K).blocksize
    ((2, 2), (2, 2))
    """
    ours = A if isinstance(A, BsrBase) else B
    if not isinstance(ours, BsrBase):
        raise TypeError(
            f"A, B: wanted a bsr_array or bsr_matrix among the operands, got {type(A).__name__} and {type(B).__name__}"
        )
    backend = ours._backend
    places = [_Place(name, _operand(ours, x, name), 0, 0) for name, x in (("A", A), ("B", B))]
    A, B = (place.value for place in places)
    (M, N), (P, Q) = A.shape, B.shape
    shape = check_shape((M * P, N * Q), "A, B")
    dtype = _promoted(backend, places)
    a = _canonical_in(ours, A, dtype)
    if backend.is_sparse(B):
        b = _canonical_in(ours, B, dtype)
        blocks = _kron_sparse(backend, a._validated, b._validated, (a._block_shape[1], b._block_shape[1]), shape)
    else:
        blocks = _kron_dense(backend, a._validated, backend.xp.asarray(B, dtype), shape)
    return object.__new__(leaf(backend, _any_array(backend, places)))._set(blocks, shape, canonical=True, sorted_=True)


def _canonical_in(ours: BsrBase, x: Any, dtype: np.dtype[Any]) -> Any:
    """`x` in a dtype, without duplicates; what is not one of our matrices is in blocks of 1 x 1."""
    x = _converted(ours, x, (1, 1), dtype)
    return x._new(x._canonical(), canonical=True)  # synchronize!


def _kron_dense(backend: Backend, a: Blocks, X: Array, shape: tuple[int, int]) -> Blocks:
    """``out[k] = kron(a[k], X)``."""
    xp = backend.xp
    (n, R, C), (P, Q) = a.data.shape, X.shape
    index = structure.index_dtype(max(*shape, n), a.indices, a.indptr)
    if not X.size:  # blocks hold at least one element: here is none
        R, C = R * max(P, 1), C * max(Q, 1)
        return Blocks(xp.empty((0, R, C), X.dtype), xp.empty(0, index), xp.zeros(shape[0] // R + 1, index))
    data = xp.empty((n, R, P, C, Q), X.dtype)
    xp.multiply(a.data[:, :, None, :, None], X[:, None, :], out=data)
    # Not the arrays of A: what is written into those shall not show here.
    return Blocks(data.reshape(n, R * P, C * Q), a.indices.astype(index), a.indptr.astype(index))


def _kron_sparse(backend: Backend, a: Blocks, b: Blocks, block_cols: tuple[int, int], shape: tuple[int, int]) -> Blocks:
    """A block ``a[i, j] * b[r, c]`` for each element of A and each block of B, sorted: by i, r, j and c."""
    xp = backend.xp
    b_rows, b_count = len(b.indptr) - 1, len(b.indices)
    total = a.data.size * b_count
    index = structure.index_dtype(max(*shape, total), a.indices, a.indptr, b.indices, b.indptr)
    values, columns, a_indptr = backend.to_csr(a, block_cols[0], index)
    b_indptr, b_indices = (x.astype(index, copy=False) for x in (b.indptr, b.indices))
    a_counts, b_counts = xp.diff(a_indptr), xp.diff(b_indptr)
    # The rows of A before i have all of B for each element, and row i has B's rows before r.
    starts = (a_indptr[:-1] * b_count)[:, None] + a_counts[:, None] * b_indptr[:-1]
    indptr = xp.concatenate([starts.reshape(-1), xp.full(1, total, index)])
    rows = backend.expand(indptr, total)
    i, r = rows // max(b_rows, 1), rows % max(b_rows, 1)
    k = xp.arange(total, dtype=index) - indptr[rows]
    element, block = a_indptr[i] + k // b_counts[r], b_indptr[r] + k % b_counts[r]
    data = b.data[block]
    data *= values[element][:, None, None]
    return Blocks(data, columns[element] * block_cols[1] + b_indices[block], indptr)
