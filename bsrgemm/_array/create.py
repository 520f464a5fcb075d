"""Matrices from a rule: the identity, block diagonals, and random blocks. They are made on the host."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._backend import structure
from .._backend.base import Array, Backend, Blocks
from .._backend.registry import backend_of, by_name, foreign_backend, host
from ..dtypes import BFLOAT16, BOOL, FLOAT16, check_dtype, common_dtype
from .arrays import leaf
from .base import check_integer, check_shape
from .construct import _as_array, check_blocksize, check_cast

#: Random 16-bit floats are multiples of 2 to the power of minus this: they are exact, and never rounded up to 1.
_RANDOM_BITS = {FLOAT16: 11, BFLOAT16: 8}


def eye(
    m: int,
    n: int | None = None,
    *,
    k: int = 0,
    blocksize: tuple[int, int] = (1, 1),
    dtype: Any = np.float64,
    device: str | None = None,
) -> Any:
    """Return a matrix with ones on a diagonal and zeros elsewhere.

    Parameters
    ----------
    m, n : int
        The numbers of rows and columns; `n` is `m` by default.
    k : int
        The diagonal, counted in elements: element (i, i + k) is 1.
    blocksize : (R, C)
        The block size, which must divide the shape. Pass ``A.blocksize`` for a matrix that meets A.
    dtype : dtype
        The dtype of the elements.
    device : {"cpu", "cuda"}, optional
        The device of the matrix, by default "cpu".

    Returns
    -------
    bsr_array
        A matrix in canonical format. Only the blocks that the diagonal crosses are stored.

    Raises
    ------
    ValueError
        If a side is negative, `blocksize` does not divide the shape, or `device` is unknown.
    TypeError
        If a matrix cannot have the dtype, or `k` is not an integer.
    ImportError
        If `device` is "cuda" and CuPy cannot be imported.

    See Also
    --------
    diags : blocks on diagonals.

    Notes
    -----
    The matrix is made on the host. This is `scipy.sparse.eye_array` with a block size in place of a format.

    Examples
    --------
    >>> import bsrgemm as bg
    >>> bg.eye(4, k=1, blocksize=(2, 2), dtype=int).toarray()
    array([[0, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 0, 1],
           [0, 0, 0, 0]])
    """
    shape = check_shape((m, m if n is None else n), "m, n")
    R, C = check_blocksize(blocksize, shape)
    backend = host() if device is None else by_name(device)
    dtype = check_dtype(dtype, backend.dtypes)
    k = check_integer(k, "k")
    first = min(max(-k, 0), shape[0])
    count = max(min(shape[0] - first, shape[1] - first - k), 0)
    row = np.arange(first, first + count, dtype=np.int64)
    index = structure.index_dtype(max(*shape, 1))
    col = row + k if count else row
    blocks = structure.from_coo(host(), row, col, np.ones(count, dtype), shape, (R, C), index, unique=True)
    return _host_matrix(blocks, shape).to_device(backend.name)


def diags(
    blocks: Any, offsets: Any = 0, shape: tuple[int, int] | None = None, *, dtype: Any = None, device: str | None = None
) -> Any:
    """Return a matrix from its block diagonals.

    Parameters
    ----------
    blocks : array, or sequence of arrays
        The blocks of each diagonal, in an array of shape (n, R, C) from the top left to the bottom right. An array of
        shape (R, C), or (1, R, C), is repeated along its diagonal. All have the same R and C. As in
        `scipy.sparse.diags_array`, numbers and arrays of shape (n,) stand for blocks of 1 x 1.
    offsets : int, or sequence of ints
        For each diagonal its distance from the main diagonal, counted in blocks: block (i, i + offset). If `offsets` is
        an int, `blocks` is one array and not a sequence of them.
    shape : (M, N), optional
        The shape, in elements. By default there are as many block rows as block columns, enough for the first
        diagonal.
    dtype : dtype, optional
        The dtype of the elements, by default NumPy's promotion of the dtypes of all diagonals.
    device : {"cpu", "cuda"}, optional
        The device of the matrix, by default that of `blocks`.

    Returns
    -------
    bsr_array
        A matrix in canonical format. Every block of the diagonals is stored, even if it is zero.

    Raises
    ------
    ValueError
        If there are not as many diagonals as offsets, an offset is given twice or is outside the matrix, the length of
        a diagonal does not fit the shape, the block sizes differ or do not divide the shape, NaN or infinity would be
        cast to an integer, or `device` is unknown.
    TypeError
        If an offset is not an integer, a matrix cannot have the dtype, or the diagonals are on different devices.
    ImportError
        If `device` is "cuda" and CuPy cannot be imported.

    See Also
    --------
    bsr_array.block_diagonal : the blocks of the main diagonal.
    block_diag : puts matrices of any size on the diagonal.

    Notes
    -----
    If `blocks` is on the GPU, the call waits for the GPU only to cast floats to integers.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> D = np.arange(8.0).reshape(2, 2, 2)
    >>> bg.diags(D).toarray()
    array([[0., 1., 0., 0.],
           [2., 3., 0., 0.],
           [0., 0., 4., 5.],
           [0., 0., 6., 7.]])
    >>> bg.diags([D, -np.eye(2)], offsets=[0, 1]).toarray()
    array([[ 0.,  1., -1.,  0.],
           [ 2.,  3.,  0., -1.],
           [ 0.,  0.,  4.,  5.],
           [ 0.,  0.,  6.,  7.]])
    >>> bg.diags([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(3, 3)).toarray()
    array([[ 2., -1.,  0.],
           [-1.,  2., -1.],
           [ 0., -1.,  2.]])
    """
    places, diagonals = _offsets_and_diagonals(blocks, offsets)
    backend = _backend_of_all(diagonals, device)
    arrays = [_three_dimensional(_as_array(backend, x, f"blocks[{i}]"), i) for i, x in enumerate(diagonals)]
    R, C = check_blocksize(arrays[0].shape[1:])
    for i, x in enumerate(arrays):
        check_dtype(x.dtype, backend.dtypes, f"blocks[{i}]")
        if x.shape[1:] != (R, C):
            raise ValueError(f"blocks[{i}]: wanted blocks of {(R, C)}, as blocks[0] has, got {tuple(x.shape[1:])}")
    if shape is None:
        side = len(arrays[0]) + abs(places[0])
        shape = (side * R, side * C)
    M, N = check_shape(shape)
    check_blocksize((R, C), (M, N))
    rows, cols = M // R, N // C
    lengths = [min(rows + min(k, 0), cols - max(k, 0), rows, cols) for k in places]
    for i, (k, x, length) in enumerate(zip(places, arrays, lengths, strict=True)):
        if length <= 0:
            raise ValueError(f"offsets[{i}]: diagonal {k} is outside a matrix of {rows} x {cols} blocks")
        if len(x) not in (1, length):
            raise ValueError(f"blocks[{i}]: wanted {length} blocks (or 1) for the shape {(M, N)}, got {len(x)}")
    wanted = check_dtype(
        common_dtype(x.dtype for x in arrays) if dtype is None else dtype,
        backend.dtypes,
    )
    return _from_diagonals(backend, dict(zip(places, arrays, strict=True)), lengths, (M, N), wanted)


def _from_diagonals(
    backend: Backend, diagonals: dict[int, Array], lengths: Sequence[int], shape: tuple[int, int], dtype: np.dtype[Any]
) -> Any:
    """Return the matrix with these diagonals, by their offsets; a diagonal of one block is repeated."""
    R, C = next(iter(diagonals.values())).shape[1:]
    total = sum(lengths)
    row = np.concatenate([np.arange(n) - min(k, 0) for k, n in zip(diagonals, lengths, strict=True)])
    col = np.concatenate([np.arange(n) + max(k, 0) for k, n in zip(diagonals, lengths, strict=True)])
    order = np.lexsort((col, row))
    index = structure.index_dtype(max(*shape, total))
    indptr = np.searchsorted(row[order], np.arange(shape[0] // R + 1))
    data = backend.xp.empty((total, R, C), dtype)
    first = 0
    for x, n in zip(diagonals.values(), lengths, strict=True):
        check_cast(backend, x, dtype)
        data[first : first + n] = x.astype(dtype, copy=False)
        first += n
    data = data[backend.from_host(order)]
    arrays = (backend.from_host(x.astype(index)) for x in (col[order], indptr))
    return object.__new__(leaf(backend, True))._set(Blocks(data, *arrays), shape, canonical=True)


def _offsets_and_diagonals(blocks: Any, offsets: Any) -> tuple[list[int], list[Any]]:
    """Return the offsets, all different, and as many diagonals."""
    if isinstance(offsets, int | np.integer):
        return [check_integer(offsets, "offsets")], [blocks]
    try:
        places, diagonals = list(offsets), list(blocks)
    except TypeError:
        raise TypeError(
            f"blocks, offsets: wanted two sequences, or one array and an int, got {type(blocks).__name__} and "
            f"{type(offsets).__name__}"
        ) from None
    places = [check_integer(k, f"offsets[{i}]") for i, k in enumerate(places)]
    if len(places) != len(diagonals) or not places:
        raise ValueError(f"blocks, offsets: wanted as many of both, got {len(diagonals)} and {len(places)}")
    if len(set(places)) != len(places):
        raise ValueError(f"offsets: wanted each diagonal once, got {places}")
    return places, diagonals


def _backend_of_all(diagonals: Sequence[Any], device: str | None) -> Backend:
    if device is not None:
        return by_name(device)
    known = [backend_of(x) or foreign_backend(x) for x in diagonals if not isinstance(x, np.generic)]
    found = {backend for backend in known if backend is not None}
    if len(found) > 1:
        names = ", ".join(sorted(backend.name for backend in found))
        raise TypeError(f"blocks: the diagonals are on different devices ({names}); move them to one, or pass device=")
    return found.pop() if found else host()


def _three_dimensional(x: Array, i: int) -> Array:
    """Return the blocks of a diagonal in three dimensions: numbers are blocks of 1 x 1, and one block is repeated."""
    if x.ndim < 2:
        return x.reshape(-1, 1, 1)
    if x.ndim > 3:
        raise ValueError(f"blocks[{i}]: wanted shape (n, R, C), (R, C) or (n,), got {tuple(x.shape)}")
    return x if x.ndim == 3 else x[None]


def random(
    m: int,
    n: int,
    *,
    blocksize: tuple[int, int],
    density: float = 0.01,
    seed: Any = None,
    dtype: Any = np.float64,
    device: str | None = None,
) -> Any:
    """Return a matrix with random blocks at random places.

    Parameters
    ----------
    m, n : int
        The numbers of rows and columns.
    blocksize : (R, C)
        The block size, which must divide the shape.
    density : float
        The share of blocks that is stored, from 0 to 1. The number of blocks is rounded to the nearest integer.
    seed : int or numpy.random.Generator, optional
        A seed, which gives the same matrix on every device, or a generator to draw from. By default each call gives
        another matrix.
    dtype : dtype
        The dtype of the elements. Floats, and real and imaginary parts, are uniform in [0, 1); integers are uniform
        over their whole range, and booleans over both values.
    device : {"cpu", "cuda"}, optional
        The device of the matrix, by default "cpu".

    Returns
    -------
    bsr_array
        A matrix in canonical format.

    Raises
    ------
    ValueError
        If a side is negative, `blocksize` does not divide the shape, `density` is not from 0 to 1, or `device` is
        unknown.
    TypeError
        If a matrix cannot have the dtype, or `seed` is not a seed of NumPy.
    ImportError
        If `device` is "cuda" and CuPy cannot be imported.

    See Also
    --------
    BlockMask.random : random masks for attention.

    Notes
    -----
    Numbers are drawn on the host and copied to the device. Another version of NumPy may draw other numbers from the
    same seed.

    Examples
    --------
    >>> import bsrgemm as bg
    >>> A = bg.random(6, 9, blocksize=(2, 3), density=1 / 3, seed=0)
    >>> A.data.shape, A.density
    ((3, 2, 3), 0.3333333333333333)
    >>> (A != bg.random(6, 9, blocksize=(2, 3), density=1 / 3, seed=0)).nnz
    0
    """
    shape = check_shape((m, n), "m, n")
    R, C = check_blocksize(blocksize, shape)
    backend = host() if device is None else by_name(device)
    dtype = check_dtype(dtype, backend.dtypes)
    if isinstance(density, bool) or not isinstance(density, numbers.Real) or not 0 <= density <= 1:
        raise ValueError(f"density: wanted a number from 0 to 1, got {density!r}")
    rows, cols = shape[0] // R, shape[1] // C
    count = round(density * rows * cols)
    rng = _generator(seed)
    keys = np.sort(rng.choice(rows * cols, count, replace=False, shuffle=False)) if count else np.zeros(0, np.int64)
    index = structure.index_dtype(max(*shape, count, 1))
    data = _random_values(rng, (count, R, C), dtype)
    blocks = Blocks(data, *structure.keys_to_index(host(), keys, rows, cols, index))
    return _host_matrix(blocks, shape).to_device(backend.name)


def _generator(seed: Any) -> np.random.Generator:
    """Return what NumPy makes of a seed; the error for anything else names the argument."""
    wanted = f"seed: wanted an integer from 0 on, a numpy.random.Generator or None, got {seed!r}"
    if isinstance(seed, bool):
        raise TypeError(wanted)
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        raise type(error)(wanted) from None


def _random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if dtype == BOOL:
        return rng.integers(0, 2, shape, np.uint8).astype(BOOL)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype.type, endpoint=True)
    if dtype in _RANDOM_BITS:
        bits = _RANDOM_BITS[dtype]
        return (rng.integers(0, 2**bits, shape, np.uint16).astype(np.float32) / 2**bits).astype(dtype)
    if dtype.kind == "c":
        values = np.zeros(shape, dtype)
        part = values.real.dtype
        values.real, values.imag = _random_values(rng, shape, part), _random_values(rng, shape, part)
        return values
    if dtype.char in "fd":
        return rng.random(shape, dtype.type)
    values = np.zeros(shape, dtype)  # long doubles have bytes without a meaning, which are zero here and stay so
    values[...] = rng.random(shape)
    return values


def _host_matrix(blocks: Blocks, shape: tuple[int, int]) -> Any:
    return object.__new__(leaf(host(), True))._set(blocks, shape, canonical=True)
