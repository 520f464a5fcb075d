"""Random operands on either backend, anything in float64, and where the blocks of a matrix are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import scipy.sparse

#: Elements that are generated or compared in float64 at a time
CHUNK = 1 << 25
#: The dtype in which arrays of a kind of number are stored; "e4m3" is held as its codes.
_STORED: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "e4m3": np.uint8, "tf32": np.float32}
#: The largest number of positions in a matrix for which a random subset is drawn by sorting all of them
_MOST_PLACES = 1 << 24
#: Columns of a short block row of a band lie so near to the diagonal.
REACH = 2048

Array = np.ndarray[Any, Any]


def stored_dtype(kind: str) -> np.dtype[Any]:
    """The dtype of arrays of a kind of number.

    >>> stored_dtype("e4m3"), stored_dtype("float32")
    (dtype('uint8'), dtype('float32'))
    """
    return np.dtype(_STORED.get(kind, kind))


def module_of(x: Any) -> Any:
    """NumPy for its arrays, CuPy for all others."""
    if isinstance(x, np.ndarray):
        return np
    import cupy

    return cupy


@cache
def _generator(xp: Any) -> Any:
    return xp.random.default_rng(0)


def reseed() -> None:
    """Draw the same numbers again from now on."""
    _generator.cache_clear()


@cache
def _e4m3(xp: Any) -> tuple[Any, Any]:
    """The 256 values of float8_e4m3fn by their code, and codes of standard normal numbers to draw from."""
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    sample = np.random.default_rng(0).standard_normal(1 << 16).astype(ml_dtypes.float8_e4m3fn)
    return xp.asarray(values), xp.asarray(sample.view(np.uint8))


def normal(shape: tuple[int, ...], kind: str, xp: Any) -> Any:
    """Standard normal numbers; "e4m3" gives their codes as uint8.

    >>> normal((2, 3), "float16", np).dtype
    dtype('float16')
    """
    result = xp.empty(shape, stored_dtype(kind))
    flat = result.reshape(-1)
    drawn = np.float64 if kind == "float64" else np.float32
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        if kind == "e4m3":
            sample = _e4m3(xp)[1]
            part[...] = sample[_generator(xp).integers(0, sample.size, size=part.size)]
        elif kind.startswith("complex"):
            single = np.float32 if kind == "complex64" else np.float64
            part[...] = _generator(xp).standard_normal(2 * part.size, dtype=single).view(result.dtype)
        else:
            part[...] = _generator(xp).standard_normal(part.size, dtype=drawn).astype(result.dtype)
    return result


def widen(x: Any) -> Any:
    """As float64 or complex128; uint8 are codes of e4m3."""
    if x.dtype == np.uint8:
        return _e4m3(module_of(x))[0][x.astype(np.int64)]
    if x.dtype.kind == "c":
        return x.astype(np.complex128)
    return (x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x).astype(np.float64)


#: (columns, starts of the rows) of the blocks, row by row
Pattern = tuple[Array, Array]


def from_stored(stored: Array) -> Pattern:
    """The pattern of a boolean matrix."""
    return np.nonzero(stored)[1], np.concatenate([[0], np.cumsum(stored.sum(axis=1))])


def from_lengths(lengths: Array, columns: int) -> Pattern:
    """Rows of the given lengths at random distinct columns."""
    if len(lengths) * columns <= _MOST_PLACES:
        # The positions of the smallest of random numbers are a random subset.
        order = np.random.default_rng(0).random((len(lengths), columns)).argsort(axis=1).argsort(axis=1)
        return from_stored(order < lengths[:, None])
    if len(set(lengths.tolist())) > 1:
        raise ValueError(
            f"rows of different lengths: wanted at most {_MOST_PLACES} places, got {len(lengths) * columns}"
        )
    count = int(lengths[0])  # one in each of as many strips
    strips = np.arange(count + 1) * columns // count
    places = strips[:-1] + np.random.default_rng(0).random((len(lengths), count)) * np.diff(strips)
    return places.astype(np.int64).reshape(-1), np.arange(len(lengths) + 1) * count


def near_diagonal(lengths: Array, columns: int) -> Pattern:
    """Rows of the given lengths near the diagonal: different columns, at random, sorted.

    They lie within REACH of the diagonal, or among three times as many columns as the row has blocks, and wrap around.
    """
    rows = len(lengths)
    first = np.concatenate([[0], np.cumsum(lengths)])
    row = np.repeat(np.arange(rows), lengths)
    each = lengths[row]
    width = np.minimum(columns, np.maximum(2 * REACH + 1, 3 * each))
    # Draw sorted numbers from a range that is shorter by the number of blocks, then add 1 for each earlier block.
    drawn = np.sort(row + np.random.default_rng(0).random(len(row))) - row
    place = np.minimum((drawn * (width - each + 1)).astype(np.int64), width - each) + np.arange(len(row)) - first[row]
    column = (row * columns // rows - width // 2 + place) % columns
    return np.sort(row * columns + column) - row * columns, first


def even_lengths(rows: int, blocks: int) -> Array:
    """Row lengths that add up to `blocks` and differ by at most one."""
    return blocks // rows + (np.arange(rows) < blocks % rows)


def zipf_lengths(rows: int, columns: int, blocks: int) -> Array:
    """Row lengths scale / rank, at most `columns`, that add up to `blocks` exactly; longest first."""
    ranks = np.arange(1, rows + 1)
    low, high = 0.0, float(rows * columns)
    for _ in range(60):
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(scale / ranks, columns).astype(int).sum() <= blocks else (low, scale)
    lengths = np.minimum(low / ranks, columns).astype(int)
    short = np.flatnonzero(lengths < columns)[: blocks - lengths.sum()]
    lengths[short] += 1
    return lengths


def _shuffled(lengths: Array) -> Array:
    return np.random.default_rng(1).permutation(lengths)


def _one_long(rows: int, columns: int, each: int, long: int) -> Array:
    """The middle row long, the other blocks spread evenly."""
    return np.insert(even_lengths(rows - 1, max(0, rows * each - long)), rows // 2, long)


def _offset(rows: int, columns: int, each: int) -> Array:
    """How far a column lies from the first of consecutive ones around the diagonal."""
    first = np.clip(np.arange(rows) * columns // rows - each // 2, 0, columns - each)
    return np.arange(columns) - first[:, None]


#: Name -> (rows, columns, blocks of a row on average) -> pattern
PATTERNS: dict[str, Callable[[int, int, int], Pattern]] = {
    "uniform": lambda R, C, each: from_lengths(np.full(R, each), C),
    "bernoulli": lambda R, C, each: from_stored(np.random.default_rng(0).random((R, C)) < each / C),
    "power-law": lambda R, C, each: from_lengths(_shuffled(zipf_lengths(R, C, R * each)), C),
    "one dense row": lambda R, C, each: from_lengths(_one_long(R, C, each, C), C),
    "arrowhead": lambda R, C, each: from_stored(
        np.minimum(*np.ogrid[:R, :C]) * abs(np.subtract(*np.ogrid[:R, :C])) == 0
    ),
    "banded": lambda R, C, each: from_stored(_offset(R, C, each) == np.clip(_offset(R, C, each), 0, each - 1)),
    "block-diagonal": lambda R, C, each: from_stored(np.arange(R)[:, None] // each == np.arange(C) // each),
    "half empty": lambda R, C, each: from_lengths(np.where(np.arange(R) % 2, 0, min(C, 2 * each)), C),
    # as from finite elements
    "near diagonal": lambda R, C, each: near_diagonal(np.full(R, each), C),
    "one long row near the diagonal": lambda R, C, each: near_diagonal(_one_long(R, C, each, C // 3), C),
    "power law near the diagonal": lambda R, C, each: near_diagonal(_shuffled(zipf_lengths(R, C, R * each)), C),
    "power law near the diagonal, sorted": lambda R, C, each: near_diagonal(zipf_lengths(R, C, R * each), C),
    "mesh": lambda R, C, each: mesh(round(R ** (1 / 3)) - 1),
}


def mesh(cells: int) -> Pattern:
    """The nodes of cells x cells x cells hexahedra, with those that share a hexahedron."""
    side = cells + 1
    node, step = np.arange(side**3), np.arange(-1, 2)
    near = np.ones((len(node), 3, 3, 3), bool)
    for axis, place in enumerate((node // side**2, node // side % side, node % side)):
        there = (place[:, None] + step >= 0) & (place[:, None] + step < side)
        near &= there.reshape(-1, *(3 if axis == k else 1 for k in range(3)))
    offset = ((step[:, None, None] * side + step[:, None]) * side + step).reshape(-1)
    kept = near.reshape(-1, 27)
    return (node[:, None] + offset)[kept], np.concatenate([[0], np.cumsum(kept.sum(axis=1))])


def as_scipy(A: Any) -> scipy.sparse.bsr_array:
    """One of our matrices on the host, in the same arrays."""
    return scipy.sparse.bsr_array((A.data, A.indices, A.indptr), shape=A.shape)


def as_csr(A: Any) -> Any:
    """The CSR of SciPy or cupyx; its columns are sorted and different, which cupyx need not find out."""
    S = A.tocsr()
    S.has_canonical_format = True
    return S
