"""Matrices of small blocks near the diagonal, as from finite elements; the same for SciPy and cupyx."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

import bsrgemm as bg

from ..random_data import normal

#: Columns of a short block row lie so near to the diagonal.
REACH = 2048


def banded(xp: Any, lengths: np.ndarray, columns: int) -> tuple[Any, Any]:
    """(indices, indptr) of block rows of the given lengths: different columns, at random, sorted.

    They lie within REACH of the diagonal, or among three times as many columns as the row has blocks, and wrap around.
    """
    rows = len(lengths)
    first = np.concatenate([[0], np.cumsum(lengths)])
    row = xp.asarray(np.repeat(np.arange(rows), lengths))
    each = xp.asarray(lengths)[row]
    width = xp.minimum(columns, xp.maximum(2 * REACH + 1, 3 * each))
    # Draw sorted numbers from a range that is shorter by the number of blocks, then add 1 for each earlier block.
    drawn = xp.sort(row + xp.random.default_rng(0).random(len(row))) - row
    place = xp.minimum((drawn * (width - each + 1)).astype(np.int64), width - each)
    place += xp.arange(len(row)) - xp.asarray(first)[row]
    column = (row * columns // rows - width // 2 + place) % columns
    indices = xp.sort(row * columns + column) - row * columns
    return indices.astype(np.int32), xp.asarray(first.astype(np.int32))


def banded_matrix(xp: Any, lengths: np.ndarray, block: tuple[int, int], dtype: str) -> Any:
    """A matrix of random blocks with as many block columns as block rows."""
    rows = len(lengths)
    indices, indptr = banded(xp, lengths, rows)
    data = normal((len(indices), *block), dtype, xp)
    return bg.bsr_array((data, indices, indptr), shape=(rows * block[0], rows * block[1]))


def as_scipy(A: Any) -> scipy.sparse.bsr_array:
    """One of our matrices on the host, in the same arrays."""
    return scipy.sparse.bsr_array((A.data, A.indices, A.indptr), shape=A.shape)


def as_csr(A: Any) -> Any:
    """The CSR of SciPy or cupyx; its columns are sorted and different, which cupyx need not find out."""
    S = A.tocsr()
    S.has_canonical_format = True
    return S
