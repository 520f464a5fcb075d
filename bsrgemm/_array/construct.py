"""Conversion of constructor arguments to blocks in a backend: the forms that scipy accepts, and block-COO."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .._backend import structure
from .._backend.base import Array, Backend, Blocks, Csr, PatternFacts
from .._backend.index_arrays import plain_array
from .._backend.registry import adopted, backend_of, by_name, foreign_backend, host
from ..dtypes import BFLOAT16, check_dtype, is_float
from .base import BsrBase, check_integer, check_shape

#: A block size is guessed only if the elements fill more than this share of the blocks that it would store.
_FILL = 0.7
#: A block on a device has fewer elements than this.
_MOST_ELEMENTS = 2**31
_MISMATCH = "mismatching blocksize={} vs {} of the blocks in data; leave blocksize out, and convert the matrix by tobsr"


class Parts(NamedTuple):
    blocks: Blocks
    shape: tuple[int, int]
    canonical: bool | None
    #: the blocks of the longest block row; 0 if nobody has looked
    longest: int = 0


def _is_shape(x: Any) -> bool:
    return (
        isinstance(x, tuple)
        and len(x) == 2
        and all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in x)
    )


def find_backend(arg1: Any, device: str | None) -> Backend:
    """Return the backend called `device`; without it, the backend of the input, or the host for Python objects."""
    if device is not None:
        return by_name(device)
    tensor = _torch_bsr(arg1)
    if tensor is not None:
        arg1 = tensor[0]
    pieces = _flatten(arg1) if isinstance(arg1, tuple) else [arg1]
    arrays = [x for x in pieces if not isinstance(x, np.generic)]
    backends = {backend for x in arrays if (backend := backend_of(x) or foreign_backend(x)) is not None}
    if len(backends) > 1:
        raise TypeError(
            "arg1: the arrays of one matrix are on different devices ("
            + ", ".join(sorted(backend.name for backend in backends))
            + "); move them to one device, or pass device='cuda' or device='cpu'"
        )
    return backends.pop() if backends else host()


def _flatten(x: Any) -> list[Any]:
    if isinstance(x, tuple | list) and len(x) <= 3:
        return [leaf for part in x for leaf in _flatten(part)]
    return [x]


def _torch_bsr(x: Any) -> tuple[tuple[Any, Any, Any], tuple[int, int]] | None:
    """Return (data, indices, indptr) and the shape of a BSR tensor of torch, which is not imported; None for others.

    TypeError for the other sparse layouts of torch, and ValueError for a batch of matrices.
    """
    layout = str(getattr(x, "layout", ""))
    if not layout.startswith("torch.sparse_"):
        return None
    if layout != "torch.sparse_bsr":
        raise TypeError(f"arg1: wanted a dense or BSR tensor, got layout {layout}: pass x.to_sparse_bsr((R, C))")
    values, indices, indptr = x.values(), x.col_indices(), x.crow_indices()
    if len(x.shape) != 2 or len(values.shape) != 3:
        raise ValueError(
            f"arg1: wanted a BSR tensor of two dimensions with blocks of numbers, got shape {tuple(x.shape)} "
            f"with values of shape {tuple(values.shape)}: pass its matrices one by one"
        )
    return (values, indices, indptr), check_shape(tuple(int(n) for n in x.shape))


def check_blocksize(blocksize: Any, shape: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return `blocksize` as two ints; raise ValueError unless they are positive and divide `shape`."""
    try:
        sides = tuple(blocksize)
    except TypeError:
        raise TypeError(f"blocksize: cannot unpack non-iterable {blocksize!r}, wanted (R, C)") from None
    try:
        R, C = (check_integer(n, "blocksize") for n in sides)
    except (TypeError, ValueError):
        raise ValueError(f"invalid blocksize={blocksize!r}: wanted two positive integers") from None
    if R < 1 or C < 1:
        raise ValueError(f"invalid blocksize={blocksize!r}: wanted two positive integers")
    if shape is not None and (shape[0] % R or shape[1] % C):
        raise ValueError(
            f"blocksize {(R, C)} does not divide: shape must be multiple of blocksize, got {shape}. "
            f"{structure.way_to_divide(shape, (R, C))}"
        )
    return R, C


#: What holds the same matrix in smaller blocks.
_SMALLER = "smaller blocks hold the same matrix: A.tobsr(blocksize=...) on the CPU, or blocksize= for a dense array"


def check_block_elements(
    backend: Backend, shape: tuple[int, ...], name: str = "blocksize", way_out: str = _SMALLER
) -> None:
    """Raise ValueError for blocks that are too large for a device: its kernels count the elements of one by 31 bits.

    `shape` is that of the blocks, (count, R, C). Whoever makes larger blocks than those of its operands calls this.
    """
    count, R, C = shape
    if backend is not host() and count and R * C >= _MOST_ELEMENTS:
        raise ValueError(
            f"{name}: got {(R, C)} on device {backend.name!r}, whose blocks have fewer than 2**31 elements; {way_out}"
        )


def parse(backend: Backend, arg1: Any, shape: Any, dtype: Any, copy: bool, blocksize: Any, is_array: bool) -> Parts:
    """Return the blocks that the arguments of a constructor describe, in `backend`."""
    if dtype is not None:
        dtype = check_dtype(dtype, backend.dtypes)
    if shape is not None:
        shape = check_shape(shape)
    source = backend_of(arg1)
    tensor = _torch_bsr(arg1) if source is None else None
    if tensor is not None:
        arg1, shape = tensor[0], shape if shape is not None else tensor[1]
    if source is not None and source.is_sparse(arg1):
        parts = from_sparse(backend, arg1, dtype, copy, blocksize)
    elif _is_shape(arg1):
        parts = _empty(backend, check_shape(arg1), dtype, blocksize)
    elif isinstance(arg1, tuple):
        parts = _from_tuple(backend, arg1, shape, dtype, copy, blocksize, is_array)
    else:
        parts = _from_dense(backend, arg1, dtype, blocksize, is_array)
    if shape is not None and shape != parts.shape:
        if shape[0] != parts.shape[0]:
            raise ValueError(f"shape: wanted {parts.shape[0]} rows, as arg1 has, got {shape}")
        parts = parts._replace(shape=shape)
        structure.check_arrays(*parts.blocks, shape)
        structure.check_values(
            backend, parts.blocks.indices, parts.blocks.indptr, shape[1] // parts.blocks.data.shape[2]
        )
    check_block_elements(backend, parts.blocks.data.shape)
    return parts


def _cast(backend: Backend, data: Array, dtype: np.dtype[Any] | None) -> Array:
    """Cast `data` to `dtype`, by default its own; raise TypeError if a matrix of this backend cannot have that."""
    wanted = dtype if dtype is not None else check_dtype(data.dtype, backend.dtypes, "data")
    if wanted == data.dtype:
        return data
    check_cast(backend, data, wanted)
    return data.astype(wanted)


def check_cast(backend: Backend, data: Array, wanted: np.dtype[Any], what: str = "dtype") -> None:
    """Raise ValueError if a cast to `wanted` would turn NaN or infinity into an integer."""
    if wanted.kind not in "iu" or not (data.dtype.kind == "c" or is_float(data.dtype)) or not data.size:
        return
    data = data.astype(np.float32) if data.dtype == BFLOAT16 else data.real  # a cast keeps nothing of imaginary parts
    if not bool(backend.xp.isfinite(data).all()):  # synchronize!
        raise ValueError(f"{what}: cannot cast NaN or infinity to {wanted}")


def _empty(backend: Backend, shape: tuple[int, int], dtype: Any, blocksize: Any) -> Parts:
    R, C = check_blocksize((1, 1) if blocksize is None else blocksize, shape)
    dtype = np.dtype(np.float64) if dtype is None else dtype
    index = structure.index_dtype(max(shape[0] // R, shape[1] // C, R, C))
    xp = backend.xp
    blocks = Blocks(xp.zeros((0, R, C), dtype), xp.zeros(0, index), xp.zeros(shape[0] // R + 1, index))
    return Parts(blocks, shape, True)


# -------------------------------------------------------------------------------------- sparse input
def from_sparse(backend: Backend, S: Any, dtype: Any, copy: bool, blocksize: Any) -> Parts:
    source = backend_of(S)
    assert source is not None
    if S.ndim != 2:
        raise ValueError(f"BSR arrays don't support {S.ndim}D input. Use 2D")
    if blocksize is not None:
        blocksize = check_blocksize(blocksize, S.shape)
    if S.format == "bsr":
        if isinstance(S, BsrBase):
            S._take_over()
        blocks = Blocks(*(_bring(backend, source, a, copy) for a in (S.data, S.indices, S.indptr)))
        canonical = (getattr(S, "_known_canonical", False) and S._is_canonical(S._validated)) or None
        shape = check_shape(S.shape)
        if not isinstance(S, BsrBase):
            structure.check_arrays(*blocks, shape)
            structure.check_values(backend, blocks.indices, blocks.indptr, shape[1] // blocks.data.shape[2])
        parts = Parts(blocks._replace(data=_cast(backend, blocks.data, dtype)), shape, canonical)
        if blocksize in (None, tuple(blocks.data.shape[1:])):
            return parts
        return reblock(backend, parts, blocksize)
    given = S
    check = cache(lambda: _check_indices(source, given))
    if S.format != "csr" or source is not backend:
        check()
    if S.format == "coo":
        row, col, values = (_bring(backend, source, a, False) for a in (S.row, S.col, S.data))
        return _from_elements(
            backend, row, col, _cast(backend, values, dtype), S.shape, blocksize, bool(S.has_canonical_format)
        )
    S = S.asformat("csr")

    def has_no_duplicates() -> bool:
        facts = check()
        known = facts.canonical if facts is not None and S is given else None
        return bool(S.has_canonical_format if known is None else known)

    indptr, col, values = (_bring(backend, source, a, False) for a in (S.indptr, S.indices, S.data))
    values, shape = _cast(backend, values, dtype), check_shape(S.shape)
    found = _from_csr(backend, Csr(values, col, indptr), shape, blocksize, has_no_duplicates)
    if found is not None:
        return found
    unique = has_no_duplicates()
    return _from_elements(backend, backend.expand(indptr, len(col)), col, values, shape, blocksize, unique)


def dense_of(backend: Backend, S: Any) -> Array:
    """Return a sparse matrix of the backend as a dense array; raise ValueError if its index arrays are not valid."""
    if not isinstance(S, BsrBase):
        _check_indices(backend, S)
    return S.toarray()


def _check_indices(backend: Backend, S: Any) -> PatternFacts | None:
    """Raise ValueError unless the arrays of a matrix of SciPy or CuPy are valid, which its own loops do not check.

    Returns what is known of compressed ones.
    """
    if S.format == "bsr":
        structure.check_arrays(S.data, S.indices, S.indptr, check_shape(S.shape))
        return structure.checked(backend, S.indices, S.indptr, S.shape[1] // S.data.shape[2])
    if S.format in ("csr", "csc"):
        lines, others = S.shape[::-1] if S.format == "csc" else (1, *S.shape)[-2:]
        if len(S.indptr) != lines + 1 or len(S.data) != len(S.indices):
            raise ValueError(
                f"wanted an indptr of {lines + 1} and as much data as indices for {S.format} of shape={S.shape}, got "
                f"{len(S.indptr)}, {len(S.data)} and {len(S.indices)}"
            )
        return structure.checked(backend, S.indices, S.indptr, others, "row" if S.format == "csc" else "column")
    if S.format == "coo":
        row = S.row if S.ndim == 2 else backend.xp.zeros_like(S.col)
        _coo_shape(backend, row, S.col, len(S.data), (1, *S.shape)[-2:], (1, 1))
    return None


def _bring(backend: Backend, source: Backend, a: Array, copy: bool) -> Array:
    if backend is source:
        return a.copy() if copy else a
    return backend.from_host(source.to_host(a))


def _from_elements(
    backend: Backend, row: Array, col: Array, values: Array, shape: tuple[int, int], blocksize: Any, unique: bool
) -> Parts:
    if host().loops.fits(shape, len(values)):
        if backend.loops is None:
            csr, unique = structure.csr_of_coo(backend, row, col, values, shape, unique=unique), True
        else:
            csr = backend.loops.csr_of_coo(row, col, values, shape)
        if blocksize is None and not unique:  # scipy adds up elements at the same position before it guesses
            blocksize = _guess(shape, len(values), lambda side: backend.count_blocks(csr, shape, (side, side)), False)
        found = _from_csr(backend, csr, shape, blocksize, lambda: unique)
        if found is not None:
            return found
    if blocksize is None:
        blocksize = guess_blocksize(backend, row, col, shape, unique)
    index = structure.index_dtype(max(*shape, len(values)), row, col)
    blocks = structure.from_coo(backend, row, col, values, shape, blocksize, index, unique=unique)
    return Parts(blocks, shape, True)


def _from_csr(
    backend: Backend, csr: Csr, shape: tuple[int, int], blocksize: Any, canonical: Callable[[], bool]
) -> Parts | None:
    """Return the blocks of a matrix in CSR, or None if there is no code for it; see `Backend.blocks_of_csr`."""
    if not host().loops.fits(shape, len(csr.data)):
        return None
    if blocksize is None:
        if not canonical() and backend.loops is None:
            return None
        # Elements that are stored twice count once: they are in one block.
        blocksize = _best_side(shape, len(csr.data), lambda side: backend.count_blocks(csr, shape, (side, side)))
    blocks = backend.blocks_of_csr(csr, shape, blocksize, canonical)
    return None if blocks is None else Parts(blocks, shape, True)


def reblock(backend: Backend, parts: Parts, blocksize: tuple[int, int]) -> Parts:
    """Convert a matrix to blocks of another size.

    Every element of an old block counts as stored, even if it is zero, so a new block may consist of zeros.
    """
    R, C = check_blocksize(blocksize, parts.shape)
    parts = parts._replace(blocks=Blocks(*map(plain_array, parts.blocks)))
    canonical, cols = bool(parts.canonical), parts.shape[1] // parts.blocks.data.shape[2]
    index = structure.index_dtype(max(*parts.shape, parts.blocks.data.size), parts.blocks.indices)
    if host().loops.fits(parts.shape, parts.blocks.data.size):
        csr = Csr(*backend.to_csr(parts.blocks, cols, index))
        if (R, C) == (1, 1) and canonical:  # blocks of one element are CSR
            return Parts(Blocks(csr.data.reshape(-1, 1, 1), csr.indices, csr.indptr), parts.shape, True)
        found = _from_csr(backend, csr, parts.shape, (R, C), lambda: canonical)
        if found is not None:
            return found
    values, row, col = backend.to_coo(parts.blocks, cols, index)
    blocks = structure.from_coo(backend, row, col, values, parts.shape, (R, C), index, unique=canonical)
    return Parts(blocks, parts.shape, True)


def guess_blocksize(
    backend: Backend, row: Array, col: Array, shape: tuple[int, int], unique: bool = True
) -> tuple[int, int]:
    """Guess a square block as scipy does: the largest side of 1, 2, 3, 4 and 6 whose blocks the elements fill well.

    Blocks are filled well if more than 70 % of their elements are stored, on average. If blocks of side 2 and blocks of
    side 3 are both filled to more than 85 %, the answer is 6 or, if those are not filled well, 3. Elements that are not
    `unique` count once at each position.
    """

    def count(side: int) -> int:
        keys = (row // side).astype(np.int64) * (shape[1] // side) + col // side
        return len(structure.first_of_runs(backend, backend.xp.sort(keys)))

    return _guess(shape, len(row), count, unique)


def _guess(shape: tuple[int, int], elements: int, count: Callable[[int], int], unique: bool) -> tuple[int, int]:
    """Return `_best_side` for elements of which several may have the same position, unless they are `unique`."""
    side = _best_side(shape, elements, count)
    if unique or side == (1, 1):  # fewer elements fill no larger blocks
        return side
    return _best_side(shape, count(1), count)


def _best_side(shape: tuple[int, int], elements: int, count: Callable[[int], int]) -> tuple[int, int]:
    """Return the block size that `guess_blocksize` chooses; `count` tells how many blocks of a side there would be."""

    def fill(side: int) -> float:
        if shape[0] % side or shape[1] % side:
            return 0.0
        return elements / (count(side) * side * side)

    if not elements:
        return (1, 1)
    two, three = fill(2), fill(3)
    if min(two, three) > (1 + _FILL) / 2:
        return (6, 6) if fill(6) > _FILL else (3, 3)
    for side, filled in ((4, fill(4)), (3, three), (2, two)):
        if filled > _FILL:
            return (side, side)
    return (1, 1)


# --------------------------------------------------------------------------------------- array input
def _as_array(backend: Backend, x: Any, what: str) -> Array:
    """Return `x` as an array of `backend`, copied between the host and the GPU if necessary."""
    source = backend_of(x) or foreign_backend(x)
    if source is backend and source is not host() and source.is_dense(x):
        return x
    if source is backend:
        array = adopted(backend, x, what)
        if type(array) is np.ndarray:
            return array
        if array is not None:  # a matrix has plain arrays, not those of a subclass of NumPy's
            return np.asarray(array) if backend is host() else array
    if source is None or source is host():
        array = np.asarray(adopted(host(), x, what) if source is not None and not isinstance(x, np.generic) else x)
        if array.dtype == np.object_:
            raise ValueError(f"{what}: unrecognized constructor input of type {type(x).__name__}")
        return array if backend is host() else backend.from_host(array)
    return backend.from_host(source.to_host(adopted(source, x, what)))


def _from_dense(backend: Backend, D: Any, dtype: Any, blocksize: Any, is_array: bool) -> Parts:
    if is_array and np.isscalar(D):
        raise ValueError("arg1: bsr_array does not support instantiation from a scalar")
    X = _as_array(backend, D, "arg1")
    X = X.view(np.ndarray) if isinstance(X, np.matrix) else X
    if X.ndim != 2:
        if is_array or X.ndim > 2:
            raise ValueError(f"BSR arrays don't support {X.ndim}D input. Use 2D")
        X = backend.xp.atleast_2d(X)
    X = _cast(backend, X, dtype)
    if blocksize is None:
        places = backend.flatnonzero(X)  # synchronize!
        (M, N), index = X.shape, structure.index_dtype(max(*X.shape, len(places)))
        csr = Csr(places, *structure.keys_to_index(backend, places, M, N, index))
        blocksize = _best_side((M, N), len(places), lambda side: backend.count_blocks(csr, (M, N), (side, side)))
    blocksize = check_blocksize(blocksize, X.shape)
    index = structure.index_dtype(max(*X.shape, 1))
    return Parts(structure.from_dense(backend, X, blocksize, index), tuple(X.shape), True)


def _from_tuple(
    backend: Backend, arg1: tuple[Any, ...], shape: Any, dtype: Any, copy: bool, blocksize: Any, is_array: bool
) -> Parts:
    if len(arg1) == 3:
        return _from_bsr_arrays(backend, arg1, shape, dtype, copy, blocksize, is_array)
    if len(arg1) != 2:
        raise ValueError(f"arg1: unrecognized constructor usage: a tuple of {len(arg1)} parts, wanted 2 or 3")
    data, coords = arg1
    try:
        row, col = coords
    except (TypeError, ValueError):
        raise TypeError("arg1: wanted (data, (row, col)), (data, indices, indptr) or (M, N)") from None
    data = _cast(backend, _as_array(backend, data, "data"), dtype)
    row = _index_array(_as_array(backend, row, "row"), "row")
    col = _index_array(_as_array(backend, col, "col"), "col")
    if data.ndim == 3:
        return _from_block_coo(backend, data, row, col, shape, blocksize)
    data = data.reshape(-1) if data.ndim == 0 else data
    if data.ndim != 1:
        raise ValueError(f"data: wanted 1-D elements or 3-D blocks, got {data.ndim}-D")
    shape = _coo_shape(backend, row, col, len(data), shape, (1, 1))
    if blocksize is not None:
        blocksize = check_blocksize(blocksize, shape)
    return _from_elements(backend, row, col, data, shape, blocksize, unique=False)


def _from_block_coo(backend: Backend, data: Array, row: Array, col: Array, shape: Any, blocksize: Any) -> Parts:
    """Return the blocks given at (block_row, block_col) in any order; duplicates are kept, as in the BSR form."""
    R, C = check_blocksize(data.shape[1:])
    if blocksize is not None and check_blocksize(blocksize) != (R, C):
        raise ValueError(_MISMATCH.format(blocksize, (R, C)))
    shape = _coo_shape(backend, row, col, len(data), shape, (R, C))
    check_blocksize((R, C), shape)
    index = structure.index_dtype(max(shape[0] // R, shape[1] // C, len(data)), row, col)
    order = backend.xp.argsort(row, kind="stable")
    bounds = backend.xp.arange(shape[0] // R + 1, dtype=row.dtype)
    indptr = backend.xp.searchsorted(row[order], bounds).astype(index, copy=False)
    return Parts(Blocks(data[order], col[order].astype(index, copy=False), indptr), shape, None)


def _coo_shape(
    backend: Backend, row: Array, col: Array, n: int, shape: Any, blocksize: tuple[int, int]
) -> tuple[int, int]:
    """Return `shape`, or the smallest shape that contains all coordinates; raise ValueError for one outside of it."""
    if not (row.ndim == col.ndim == 1 and len(row) == len(col) == n):
        raise ValueError(f"row, col and data must have one length, got {tuple(row.shape)}, {tuple(col.shape)} and {n}")
    if not n:
        if shape is None:
            raise ValueError("shape: cannot infer dimensions from zero sized index arrays")
        return shape
    R, C = blocksize
    (low_row, high_row), (low_col, high_col) = (
        (facts.low, facts.high)
        for facts in (backend.inspect(x, x[:1]) for x in (row, col))  # synchronize!
    )
    if low_row < 0 or low_col < 0:
        raise ValueError(f"negative row or column index found: row {low_row}, column {low_col}")
    if shape is None:
        return ((high_row + 1) * R, (high_col + 1) * C)
    for name, high, side, block in (("row", high_row, shape[0], R), ("column", high_col, shape[1], C)):
        if high >= side // block:
            of = "" if blocksize == (1, 1) else f"; blocks of {R} x {C} are counted, not single {name}s"
            raise ValueError(f"{name} index {high} exceeds matrix dimension {side // block} (shape={shape}){of}")
    return shape


def _index_array(x: Array, what: str) -> Array:
    if x.dtype.kind == "u":
        x = x.astype(np.int64)
    if x.dtype.kind != "i":
        if x.size:
            raise ValueError(f"{what}: wanted integer indices, got dtype {x.dtype}")
        x = x.astype(np.int32)
    return x if x.dtype.itemsize >= 4 else x.astype(np.int32)


def _own_index(backend: Backend, x: Array, dtype: np.dtype[Any], copied: bool) -> Array:
    """Return an index array in `dtype`; on a device not that of the user, since writes into it would go unseen."""
    return x.astype(dtype) if x.dtype != dtype else x if copied else backend.own(x)


def _from_bsr_arrays(
    backend: Backend, arg1: tuple[Any, ...], shape: Any, dtype: Any, copy: bool, blocksize: Any, is_array: bool
) -> Parts:
    data, indices, indptr = (_as_array(backend, x, n) for x, n in zip(arg1, ("data", "indices", "indptr"), strict=True))
    if data.ndim != 3:
        raise ValueError(f"data: BSR data must be 3-dimensional, got shape={tuple(data.shape)}")
    if blocksize is not None and check_blocksize(blocksize) != tuple(data.shape[1:]):
        raise ValueError(_MISMATCH.format(blocksize, tuple(data.shape[1:])))
    indices, indptr = _index_array(indices, "indices"), _index_array(indptr, "indptr")
    if copy:
        data, indices, indptr = data.copy(), indices.copy(), indptr.copy()
    data = backend.xp.ascontiguousarray(_cast(backend, data, dtype))
    R, C = data.shape[1:]
    if not len(indptr):
        raise ValueError("indptr: wanted one entry more than block rows, got none")
    if shape is None:
        if not len(indices):
            raise ValueError("shape: unable to infer matrix dimensions without indices")
        cols = int(indices.max()) + 1  # synchronize!
        shape = ((len(indptr) - 1) * R, cols * C)
    largest = max(*shape, R, C, len(indices))
    index = structure.index_dtype(largest, indices, indptr)
    if not is_array and index.itemsize > 4 and largest <= structure.INT32_MAX:
        index = np.dtype(np.int32)  # like scipy's, bsr_matrix narrows int64 indices if int32 is enough
    structure.check_arrays(data, indices, indptr, shape)
    facts = structure.checked(backend, indices, indptr, shape[1] // C)
    indices, indptr = (_own_index(backend, x, index, copy) for x in (indices, indptr))
    if facts.stop < len(indices):
        data, indices = data[: facts.stop], indices[: facts.stop]
    return Parts(Blocks(data, indices, indptr), shape, facts.canonical or None, facts.longest)
