"""Matrices made of others, and values added to the blocks of a pattern."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from .._backend import structure
from .._backend.base import Array, Backend, Blocks, Piece
from .._backend.registry import backend_of
from ..dtypes import check_dtype, common_dtype
from .arrays import leaf
from .base import BsrBase, check_shape, kind_of
from .construct import check_block_elements, parse

INT64 = np.dtype(np.int64)


def positions(backend: Backend, blocks: Blocks, row: Array, col: Array, block_cols: int) -> Array:
    """Return the position of each block in a matrix in canonical format; for one that is not stored, their number."""
    xp = backend.xp
    _, indices, indptr = blocks
    stored = len(indices)
    inside = (row >= 0) & (row < len(indptr) - 1) & (col >= 0) & (col < block_cols)
    if not stored or not len(row):
        return xp.full(len(row), stored, INT64)
    if backend.loops is not None:
        row, col = xp.where(inside, row, 0), xp.where(inside, col, 0)
        found = backend.loops.positions(blocks, block_cols, row, col)
        return xp.where(inside & (found >= 0), found, stored)
    keys = structure.block_keys(backend, indices, indptr, block_cols)
    wanted = row.astype(INT64, copy=False) * max(block_cols, 1) + col
    found = xp.minimum(xp.searchsorted(keys, wanted), stored - 1)
    return xp.where(inside & (xp.take(keys, found) == wanted), found, stored)


def add(backend: Backend, data: Array, blocks: Array, position: Array) -> None:
    """Add blocks at their positions in `data`, in place and in order; positions at or after its end are ignored.

    Each stored block is the first term of a sum of its own, so no sum is empty, and their number is known without a
    wait. A last sum takes up the blocks that are ignored.
    """
    if not len(blocks) or not len(data):
        return
    xp = backend.xp
    stored, given = len(data), len(blocks)
    if backend.loops is not None:
        inside = position < stored
        if not inside.all():
            blocks, position, given = blocks[inside], position[inside], int(inside.sum())
        if backend.loops.add_at(data, blocks, position):
            return
    by_position = xp.argsort(position, kind="stable")
    position = xp.take(position, by_position)
    number = xp.arange(stored + 1, dtype=INT64)
    starts = number + xp.searchsorted(position, number)
    order = xp.empty(stored + 1 + given, INT64)
    order[starts] = number
    order[xp.arange(given) + position + 1] = by_position + (stored + 1)
    terms = xp.concatenate([data, xp.zeros((1, *data.shape[1:]), data.dtype), blocks])
    data[...] = backend.segment_reduce("add", terms, order, starts)[:stored]


def outside(backend: Backend, position: Array, stored: int) -> int | None:
    """Return the number of the first block that is not stored, or None. Waits for the GPU."""
    xp = backend.xp
    if not len(position):
        return None
    out = position >= stored
    first = int(xp.argmax(out))  # synchronize!
    return first if bool(out[first]) else None  # synchronize!


def as_numbers(x: Any, name: str) -> Array:
    """Return 1-D integers as they are; raise TypeError or ValueError for anything else."""
    if x.ndim != 1:
        raise ValueError(f"{name}: wanted 1-D integers, got shape {tuple(x.shape)}")
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name}: wanted integers, got dtype {x.dtype}")
    return x.astype(INT64) if x.dtype.kind == "u" else x


class _Place(NamedTuple):
    """An operand, its name for error messages, and its row and column in the grid."""

    name: str
    value: Any
    row: int
    column: int


# -------------------------------------------------------------------------------------- stacking
def vstack(blocks: Iterable[Any], dtype: Any = None) -> Any:
    """Stack matrices vertically, each below the one before.

    Parameters
    ----------
    blocks : sequence of matrices
        The operands have the same number of columns and are on the same device, and at least one of them is a
        `bsr_array` or `bsr_matrix`. Those must have the same block size. Matrices of other formats (of scipy on the
        CPU, of cupyx on the GPU) and dense 2-D arrays are converted to it.
    dtype : dtype, optional
        The dtype of the result, to which `astype` casts the operands. By default NumPy's promotion of all dtypes.

    Returns
    -------
    bsr_array or bsr_matrix
        A matrix with arrays of its own; a `bsr_matrix` if no operand is a sparse array.

    Raises
    ------
    TypeError
        If no operand is a `bsr_array` or `bsr_matrix`, an operand is not a matrix or is on another device, or the
        result cannot have the dtype.
    ValueError
        If the shapes do not fit, or if two `bsr_array` or `bsr_matrix` operands have different block sizes.

    See Also
    --------
    hstack, block_array, block_diag

    Notes
    -----
    Blocks are copied as they are stored: their order within a row, blocks of zeros and duplicates are kept. If all
    operands are known to be in canonical format, the result is too.

    The call does not wait for the GPU if all operands are `bsr_array` or `bsr_matrix` and have the dtype of the result.
    It waits to convert other formats and dense arrays, to cast floats to integers, and to cast a matrix that is not
    known to be in canonical format, because its duplicates are added up in its own dtype first.

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
    """Stack matrices horizontally, each to the right of the one before.

    Parameters
    ----------
    blocks : sequence of matrices
        The operands have the same number of rows. The other conditions are those of `vstack`.
    dtype : dtype, optional
        The dtype of the result, to which `astype` casts the operands. By default NumPy's promotion of all dtypes.

    Returns
    -------
    bsr_array or bsr_matrix
        A matrix with arrays of its own; a `bsr_matrix` if no operand is a sparse array.

    Raises
    ------
    TypeError
        If no operand is a `bsr_array` or `bsr_matrix`, an operand is not a matrix or is on another device, or the
        result cannot have the dtype.
    ValueError
        If the shapes do not fit, or if two `bsr_array` or `bsr_matrix` operands have different block sizes.

    See Also
    --------
    vstack : describes what is kept, and when a call waits for the GPU.
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
    """Assemble a matrix from a grid of matrices.

    Parameters
    ----------
    grid : sequence of sequences of matrices
        The rows of the grid, all of the same length. None stands for zeros. The matrices in a row of the grid have the
        same number of rows, those in a column of the grid the same number of columns. A row of the grid with None only
        adds no rows to the result, and a column with None only adds no columns. The other conditions are those of
        `vstack`.
    dtype : dtype, optional
        The dtype of the result, to which `astype` casts the operands. By default NumPy's promotion of all dtypes.

    Returns
    -------
    bsr_array or bsr_matrix
        A matrix with arrays of its own; a `bsr_matrix` if no operand is a sparse array, as in ``scipy.sparse.bmat``.

    Raises
    ------
    TypeError
        If no operand is a `bsr_array` or `bsr_matrix`, an operand is not a matrix or is on another device, or the
        result cannot have the dtype.
    ValueError
        If the shapes do not fit, or if two `bsr_array` or `bsr_matrix` operands have different block sizes.

    See Also
    --------
    vstack : describes what is kept, and when a call waits for the GPU.
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
    """Put matrices on the diagonal, each below and to the right of the one before, and zeros elsewhere.

    Parameters
    ----------
    mats : sequence of matrices
        The operands may have any shapes. The other conditions are those of `vstack`.
    dtype : dtype, optional
        The dtype of the result, to which `astype` casts the operands. By default NumPy's promotion of all dtypes.

    Returns
    -------
    bsr_array or bsr_matrix
        A matrix with arrays of its own; a `bsr_matrix` if no operand is a sparse array.

    Raises
    ------
    TypeError
        If no operand is a `bsr_array` or `bsr_matrix`, an operand is not a matrix or is on another device, or the
        result cannot have the dtype.
    ValueError
        If the shapes do not fit, or if two `bsr_array` or `bsr_matrix` operands have different block sizes.

    See Also
    --------
    vstack : describes what is kept, and when a call waits for the GPU.

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
    """Return the entries of a sequence; raise TypeError for a matrix. An array of objects counts as a sequence."""
    backend = backend_of(x)
    if backend is None or (backend.is_dense(x) and x.dtype == np.object_ and x.ndim):
        try:
            return list(x)
        except TypeError:
            pass
    raise TypeError(f"{name}: wanted a sequence of matrices, got {type(x).__name__}")


def _assembled(what: str, places: Sequence[_Place], grid: tuple[int, int], dtype: Any) -> Any:
    """Assemble the operands at their positions in the grid; `places` are in order, row by row from left to right."""
    first = next((place for place in places if isinstance(place.value, BsrBase)), None)
    if first is None:
        got = ", ".join(kind_of(place.value) for place in places) or "nothing"
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
    rows: list[list[Piece]] = [[] for _ in heights]
    for place, matrix in zip(places, matrices, strict=True):
        rows[place.row].append(Piece(matrix._validated, lefts[place.column]))
    canonical = all(matrix._known_canonical for matrix in matrices)
    blocks = _joined(backend, rows, shape, blocksize, wanted)
    sorted_ = all(matrix._has_sorted_indices for matrix in matrices) or None
    maker = object.__new__(leaf(backend, _any_array(backend, places)))
    return maker._new_own(blocks, shape, canonical=canonical or None, sorted_=sorted_)


def _joined(
    backend: Backend, rows: list[list[Piece]], shape: tuple[int, int], blocksize: tuple[int, int], dtype: np.dtype[Any]
) -> Blocks:
    """Join the blocks of the pieces; each block row of the result has those of its pieces, from left to right."""
    xp = backend.xp
    pieces = [piece for row in rows for piece in row]
    total = sum(len(blocks.indices) for blocks, *_ in pieces)
    index = structure.index_dtype(
        max(*shape, total), *(array for blocks, *_ in pieces for array in (blocks.indices, blocks.indptr))
    )
    if pieces and all(len(row) <= 1 for row in rows):
        found = backend.stack(pieces, dtype, index)
        if found is not None:
            return found
    data, indices = xp.empty((total, *blocksize), dtype), xp.empty(total, index)
    starts = []
    first = 0  # the number of blocks in the rows of pieces before this one
    for row in rows:
        if not row:
            continue
        indptrs = [blocks.indptr.astype(index, copy=False) for blocks, *_ in row]
        free = sum(indptr[:-1] for indptr in indptrs) + first  # the next free position in each block row
        starts.append(free)
        for (blocks, left, _), indptr in zip(row, indptrs, strict=True):
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
        first += sum(len(blocks.indices) for blocks, *_ in row)
    return Blocks(data, indices, xp.concatenate([*starts, xp.full(1, total, index)]))


def _sizes(places: Sequence[_Place], count: int, what: str, axis: int) -> list[int]:
    """Return the number of rows of each row of the grid (axis 0), or of columns of each column (axis 1).

    It is 0 if a row or column of the grid has None only. Operands that do not fit raise ValueError.
    """
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
    """Return `x` as a sparse matrix or a dense 2-D array in the backend of `A`; else raise TypeError or ValueError."""
    operand = A._operand(x, name)
    if operand is None:
        raise TypeError(f"{name}: wanted a matrix or a dense 2-D array on {A._backend.name!r}, got {type(x).__name__}")
    check_dtype(operand.dtype, A._backend.dtypes, name)
    if operand.ndim != 2:
        raise ValueError(f"{name}: wanted 2 dimensions, got {operand.ndim} in shape {tuple(operand.shape)}")
    return operand


def _promoted(backend: Backend, places: Sequence[_Place]) -> np.dtype[Any]:
    """Promote all dtypes at once as NumPy does, independently of their order; `result_dtype` promotes bfloat16."""
    found = common_dtype(check_dtype(place.value.dtype, backend.dtypes) for place in places)
    return check_dtype(found, backend.dtypes)


def _converted(A: BsrBase, x: Any, blocksize: tuple[int, int], dtype: np.dtype[Any]) -> Any:
    """Convert `x` to this dtype, after adding up duplicates, and other formats to BSR in blocks of `blocksize`."""
    if not isinstance(x, BsrBase):
        parts = parse(A._backend, x, None, None, False, blocksize, A._is_array)  # synchronize!
        x = A._new(parts.blocks, parts.shape, canonical=parts.canonical)
    if x.dtype == dtype:
        return x
    return x._new(x._canonical(), canonical=True).astype(dtype)  # synchronize!


def _any_array(backend: Backend, places: Sequence[_Place]) -> bool:
    """Tell whether one of the operands is a sparse array (and not a sparse matrix)."""
    return any(isinstance(place.value, backend.sparse.sparray) for place in places)


# ------------------------------------------------------------------------------ Kronecker products
def kron(A: Any, B: Any) -> Any:
    """Compute the Kronecker product, in which each element of `A` is replaced by its product with `B`.

    Parameters
    ----------
    A, B : matrices
        Two operands on the same device, of shapes (M, N) and (P, Q). At least one of them is a `bsr_array` or
        `bsr_matrix`. The other one may be a dense 2-D array or have another format (of scipy on the CPU, of cupyx on
        the GPU), which counts as BSR in blocks of 1 x 1.

    Returns
    -------
    bsr_array or bsr_matrix
        A matrix of shape (M P, N Q) in canonical format, in NumPy's promotion of the two dtypes; a `bsr_matrix` if no
        operand is a sparse array.

        - If `B` is dense, the result has the pattern of `A` and blocks of (R P) x (C Q), where `A` has blocks of R x C.
        - If `B` is sparse, the result has the block size of `B`. Every stored element of a sparse `A`, even if it is
          zero, gives all stored blocks of `B`; so does every nonzero element of a dense `A`.

    Raises
    ------
    TypeError
        If neither operand is a `bsr_array` or `bsr_matrix`, or one is not a matrix or is on another device.
    ValueError
        If an operand does not have two dimensions, or if the result has more elements than a 64-bit integer can count.

    See Also
    --------
    block_diag

    Notes
    -----
    The pattern of the result depends on the two patterns only. Zeros inside the blocks of `A` give blocks of zeros. To
    avoid them, convert `A` with ``tobsr((1, 1))`` and call its ``eliminate_zeros()``, or call ``eliminate_zeros()`` of
    the result. To keep the pattern of `A` with a sparse `B`, pass ``B.toarray()``.

    Duplicates are added up first. The call waits for the GPU if a matrix is not known to be in canonical format, and to
    convert other formats and a dense `A`.

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
        raise TypeError(f"A, B: wanted a bsr_array or bsr_matrix among the operands, got {kind_of(A)} and {kind_of(B)}")
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
    return object.__new__(leaf(backend, _any_array(backend, places)))._set(blocks, shape, canonical=True)


def _canonical_in(ours: BsrBase, x: Any, dtype: np.dtype[Any]) -> Any:
    """Convert `x` to BSR in this dtype without duplicates; other formats get blocks of 1 x 1."""
    x = _converted(ours, x, (1, 1), dtype)
    return x._new(x._canonical(), canonical=True)  # synchronize!


def _kron_dense(backend: Backend, a: Blocks, X: Array, shape: tuple[int, int]) -> Blocks:
    """Compute ``out[k] = kron(a[k], X)``."""
    xp = backend.xp
    (n, R, C), (P, Q) = a.data.shape, X.shape
    index = structure.index_dtype(max(*shape, n), a.indices, a.indptr)
    if not X.size:  # a block must have at least one element, so none is stored
        R, C = R * max(P, 1), C * max(Q, 1)
        return Blocks(xp.empty((0, R, C), X.dtype), xp.empty(0, index), xp.zeros(shape[0] // R + 1, index))
    check_block_elements(backend, (n, R * P, C * Q), "blocksize of the result", "take A in smaller blocks, or B as BSR")
    data = xp.empty((n, R, P, C, Q), X.dtype)
    xp.multiply(a.data[:, :, None, :, None], X[:, None, :], out=data)
    # The index arrays are copied, so that the result does not change when A does.
    return Blocks(data.reshape(n, R * P, C * Q), a.indices.astype(index), a.indptr.astype(index))


def _kron_sparse(backend: Backend, a: Blocks, b: Blocks, block_cols: tuple[int, int], shape: tuple[int, int]) -> Blocks:
    """Compute a block ``a[i, j] * b[r, c]`` for each element of A and each block of B, sorted by i, r, j and c."""
    xp = backend.xp
    b_rows, b_count = len(b.indptr) - 1, len(b.indices)
    total = a.data.size * b_count
    index = structure.index_dtype(max(*shape, total), a.indices, a.indptr, b.indices, b.indptr)
    values, columns, a_indptr = backend.to_csr(a, block_cols[0], index)
    b_indptr, b_indices = (x.astype(index, copy=False) for x in (b.indptr, b.indices))
    a_counts, b_counts = xp.diff(a_indptr), xp.diff(b_indptr)
    # Each element in the rows of A before i gives all blocks of B, and each element in row i those in the rows of B
    # before r.
    starts = (a_indptr[:-1] * b_count)[:, None] + a_counts[:, None] * b_indptr[:-1]
    indptr = xp.concatenate([starts.reshape(-1), xp.full(1, total, index)])
    rows = backend.expand(indptr, total)
    i, r = rows // max(b_rows, 1), rows % max(b_rows, 1)
    k = xp.arange(total, dtype=index) - indptr[rows]
    element, block = a_indptr[i] + k // b_counts[r], b_indptr[r] + k % b_counts[r]
    data = b.data[block]
    data *= values[element][:, None, None]
    return Blocks(data, columns[element] * block_cols[1] + b_indices[block], indptr)
