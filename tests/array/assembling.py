"""What tests of vstack, hstack, block_array, block_diag and kron share: the functions, their references, samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16

from ..strategies import Place, Sample, random_values

each_blocksize = pytest.mark.parametrize("blocksize", [(1, 1), (2, 3), (5, 1), (1, 7), (16, 16)], ids=str)
SMALL = ("small",)  # sums and casts of these are exact in every dtype

#: By name: ours, scipy's, and NumPy's of dense arrays, each of a list of three matrices of one shape.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "vstack": (bg.vstack, sp.vstack, np.vstack),
    "hstack": (bg.hstack, sp.hstack, np.hstack),
    "block_diag": (bg.block_diag, sp.block_diag, lambda xs: scipy.linalg.block_diag(*xs)),
    "block_array": (
        lambda xs, **how: bg.block_array([[xs[0], None, xs[1]], [None, xs[2], None]], **how),
        lambda xs, **how: sp.block_array([[xs[0], None, xs[1]], [None, xs[2], None]], **how),
        lambda xs: np.block(
            [[xs[0], np.zeros_like(xs[0]), xs[1]], [np.zeros_like(xs[2]), xs[2], np.zeros_like(xs[2])]]
        ),
    ),
}
FORMATS = ("coo", "csr", "csc")
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def random_sample(
    grid: tuple[int, int] = (3, 4),
    blocksize: tuple[int, int] = (2, 3),
    dtype: Any = np.float64,
    *,
    seed: int = 0,
    duplicates: int = 0,
    canonical: bool = False,
    index: Any = np.int32,
) -> Sample:
    """About half of the blocks, `duplicates` of them once more, rows unsorted unless `canonical`."""
    rng = np.random.default_rng(seed)
    (rows, cols), (R, C) = grid, blocksize
    places = np.flatnonzero(rng.random(rows * cols) < 0.6)
    if not canonical:
        places = rng.permutation(np.concatenate([places, rng.choice(places, duplicates)]) if len(places) else places)
    row, col = np.divmod(places, max(cols, 1))
    order = np.argsort(row, kind="stable")
    indptr = np.searchsorted(row[order], np.arange(rows + 1)).astype(index)
    data = random_values(rng, (len(places), R, C), np.dtype(dtype), "small")
    return Sample(data, col[order].astype(index), indptr, (rows * R, cols * C))


def three(blocksize: tuple[int, int] = (2, 3), dtype: Any = np.float64, **how: Any) -> list[Sample]:
    """Three matrices of one shape."""
    return [random_sample((3, 3), blocksize, dtype, seed=seed, **how) for seed in (1, 2, 3)]


def values(place: Place, result: Any, flavour: type = bg.bsr_array) -> np.ndarray[Any, Any]:
    """The values of a result, after everything that its arrays and flags promise has been checked."""
    return place.blocks(result, flavour).dense


def promotion(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """NumPy's for all at once; bfloat16 holds what float16 would, and counts as float32 beside anything else."""
    if BFLOAT16 not in dtypes:
        return np.result_type(*dtypes)
    if all(d in (BFLOAT16, np.bool_, np.int8, np.uint8) for d in dtypes):
        return BFLOAT16
    return np.result_type(np.float32, *(d for d in dtypes if d != BFLOAT16))
