"""Random matrices of chosen grids and blocks for tests of the surface, and marks that such tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..strategies import DTYPES, FLAVOURS, Place, Sample, random_values

each_flavour = pytest.mark.parametrize("flavour", FLAVOURS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HERE = Place("cpu")


def random_sample(
    grid: tuple[int, int],
    blocksize: tuple[int, int],
    dtype: Any = np.float64,
    *,
    seed: int = 0,
    density: float = 0.5,
    spread: str = "wide",
    duplicates: int = 0,
) -> Sample:
    """A matrix with about `density` of its blocks stored, `duplicates` of them once more, rows unsorted."""
    rng = np.random.default_rng(seed)
    (rows, cols), (R, C) = grid, blocksize
    places = np.flatnonzero(rng.random(rows * cols) < density)
    if len(places):
        places = np.concatenate([places, rng.choice(places, duplicates)])
    places = rng.permutation(places)
    row, col = np.divmod(places, max(cols, 1))
    order = np.argsort(row, kind="stable")
    indptr = np.searchsorted(row[order], np.arange(rows + 1)).astype(np.int32)
    data = random_values(rng, (len(places), R, C), np.dtype(dtype), spread)
    return Sample(data, col[order].astype(np.int32), indptr, (rows * R, cols * C))
