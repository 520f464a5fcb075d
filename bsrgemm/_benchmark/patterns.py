"""Where the blocks of a matrix are: even and uneven patterns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: The largest number of positions in a matrix for which a random subset is drawn by sorting all of them.
_MOST_PLACES = 1 << 24


@dataclass(frozen=True)
class Pattern:
    """Where the blocks are: block row i holds the columns indices[indptr[i] : indptr[i + 1]] of `columns`."""

    indptr: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any]
    columns: int

    @property
    def rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def blocks(self) -> int:
        return len(self.indices)

    @property
    def density(self) -> float:
        return self.blocks / (self.rows * self.columns)


def from_stored(stored: np.ndarray[Any, Any]) -> Pattern:
    """The pattern of a boolean matrix."""
    indptr = np.concatenate([[0], np.cumsum(stored.sum(axis=1))])
    return Pattern(indptr, np.nonzero(stored)[1], stored.shape[1])


def from_lengths(lengths: np.ndarray[Any, Any], columns: int) -> Pattern:
    """Rows of the given lengths at random distinct columns."""
    # The positions of the smallest of random numbers are a random subset.
    order = np.random.default_rng(0).random((len(lengths), columns)).argsort(axis=1).argsort(axis=1)
    return from_stored(order < lengths[:, None])


def even_lengths(rows: int, blocks: int) -> np.ndarray[Any, Any]:
    """Row lengths that add up to `blocks` and differ by at most one."""
    return blocks // rows + (np.arange(rows) < blocks % rows)


def uniform(rows: int, columns: int, each: float) -> Pattern:
    """The same number of blocks in every row, at random; in a large matrix one in each of as many strips."""
    count = min(columns, max(1, round(each)))
    if rows * columns <= _MOST_PLACES:
        return from_lengths(np.full(rows, count), columns)
    strips = np.arange(count + 1) * columns // count
    places = strips[:-1] + np.random.default_rng(0).random((rows, count)) * np.diff(strips)
    return Pattern(np.arange(rows + 1) * count, places.astype(np.int64).reshape(-1), columns)


def bernoulli(rows: int, columns: int, each: float) -> Pattern:
    """Each block present with the same probability."""
    return from_stored(np.random.default_rng(0).random((rows, columns)) < each / columns)


def zipf_lengths(rows: int, columns: int, blocks: int) -> np.ndarray[Any, Any]:
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


def power_law(rows: int, columns: int, each: float) -> Pattern:
    """Row lengths as 1 / rank, as many blocks as the uniform pattern, rows in random order."""
    lengths = zipf_lengths(rows, columns, rows * max(1, round(each)))
    return from_lengths(np.random.default_rng(1).permutation(lengths), columns)


def one_dense_row(rows: int, columns: int, each: float) -> Pattern:
    """The middle row full, the other blocks spread evenly."""
    lengths = even_lengths(rows - 1, max(0, rows * max(1, round(each)) - columns))
    return from_lengths(np.insert(lengths, rows // 2, columns), columns)


def arrowhead(rows: int, columns: int, each: float) -> Pattern:
    """First row, first column and diagonal."""
    stored = np.eye(rows, columns, dtype=bool)
    stored[0] = stored[:, 0] = True
    return from_stored(stored)


def banded(rows: int, columns: int, each: float) -> Pattern:
    """Consecutive blocks around the diagonal, the same number in every row."""
    width = min(columns, max(1, round(each)))
    first = np.clip(np.arange(rows) * columns // rows - width // 2, 0, columns - width)
    indices = (first[:, None] + np.arange(width)).reshape(-1)
    return Pattern(np.arange(rows + 1) * width, indices, columns)


def block_diagonal(rows: int, columns: int, each: float) -> Pattern:
    """Full squares of blocks along the diagonal."""
    side = max(1, round(each))
    return from_stored(np.arange(rows)[:, None] // side == np.arange(columns) // side)


def half_empty(rows: int, columns: int, each: float) -> Pattern:
    """Every other row empty, the rest with twice as many blocks."""
    lengths = np.where(np.arange(rows) % 2, 0, min(columns, 2 * max(1, round(each))))
    return from_lengths(lengths, columns)


PATTERNS: dict[str, Callable[[int, int, float], Pattern]] = {
    "uniform": uniform,
    "bernoulli": bernoulli,
    "power-law": power_law,
    "one dense row": one_dense_row,
    "arrowhead": arrowhead,
    "banded": banded,
    "block-diagonal": block_diagonal,
    "half empty": half_empty,
}


def pattern_of(kind: str, n: int, block: tuple[int, int], density: float) -> Pattern:
    """The pattern of an n x n matrix."""
    rows, columns = n // block[0], n // block[1]
    return PATTERNS[kind](rows, columns, density * columns)
