"""Random operands: BSR matrices with any pattern, and dense arrays as views of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16, HALF_DTYPES

from ..strategies import FLAVOURS, Operand, Sample, random_values
from .case import Case


def values(case: Case, shape: tuple[int, ...], dtype: np.dtype[Any], spread: str = "small") -> np.ndarray[Any, Any]:
    return random_values(case.rng, shape, dtype, spread)


def indices(case: Case, rows: int, cols: int, most: int, messy: bool) -> tuple[Any, Any]:
    """Row pointers and columns of up to `most` blocks, of which some come twice or unsorted if `messy`."""
    count = case.number_from(0, min(most, rows * cols))
    if case.chance(0.05):
        count = 0
    places = case.rng.choice(rows * cols, count, replace=False) if count else np.zeros(0, np.int64)
    if messy and count:
        places = np.concatenate([places, places[: case.number_from(0, count // 2)]])
        case.rng.shuffle(places)
    else:
        places = np.sort(places)
    row, col = np.divmod(places, max(cols, 1))
    order = np.argsort(row, kind="stable")
    index = np.int64 if case.chance(0.2) else np.int32
    return np.searchsorted(row[order], np.arange(rows + 1)).astype(index), col[order].astype(index)


def sample(
    case: Case,
    dtype: Any = None,
    block: tuple[int, int] | None = None,
    grid: tuple[int, int] | None = None,
    *,
    spread: str = "small",
    messy: bool | None = None,
    most: int = 30,
) -> Sample:
    """A BSR matrix of a few dozen blocks; if no dtype or block is given, one of the chapter's."""
    dtype = case.pick(case.pool.arrays) if dtype is None else dtype
    R, C = case.pick(case.pool.array_blocks) if block is None else block
    rows, cols = (case.number_from(1, 8), case.number_from(1, 8)) if grid is None else grid
    messy = case.chance(0.3) if messy is None else messy
    indptr, columns = indices(case, rows, cols, most, messy)
    data = values(case, (len(columns), R, C), dtype, spread)
    data[case.rng.random(len(columns)) < 0.1] = 0
    return Sample(data, columns, indptr, (rows * R, cols * C))


def like(case: Case, a: Sample, dtype: Any = None) -> Sample:
    """Another matrix of the shape and the blocks of `a`."""
    R, C = a.blocksize
    return sample(case, a.dtype if dtype is None else dtype, (R, C), (a.shape[0] // R, a.shape[1] // C))


def flavour(case: Case) -> type:
    return FLAVOURS[0] if case.chance(0.8) else FLAVOURS[1]


def bsr(case: Case, a: Sample, cls: type = bg.bsr_array) -> Any:
    """The sample here; sometimes in arrays that are views of longer ones, or known to be canonical."""
    if case.chance(0.7):
        return case.place.bsr(a, cls)
    put = case.place.put
    room = put(np.concatenate([a.data[:1], a.data, a.data[:1]])) if len(a.data) else put(a.data)
    data = room[1:-1] if len(a.data) else room
    A = cls((data, put(a.indices), put(a.indptr)), shape=a.shape)
    if case.chance(0.5):
        case.true("flag", A.has_canonical_format == a.is_canonical)
        case.true("flag", A.has_sorted_indices == a.is_sorted)
    return A


def operand(case: Case, shape: tuple[int, ...], dtype: np.dtype[Any], spread: str = "small") -> Operand:
    """A dense array: row by row, column by column, with gaps, or backwards."""
    steps = tuple(case.pick((1, 1, 2, 3, -1, -2)) for _ in shape) if case.chance(0.4) else (1,) * len(shape)
    full = tuple(max(n * abs(step) - (abs(step) - 1), 0) for n, step in zip(shape, steps, strict=True))
    turned = len(shape) > 1 and case.chance(0.3)
    base = values(case, full[::-1] if turned else full, dtype, spread)
    return Operand(base, turned, tuple(slice(None, None, step) for step in steps))


def here(case: Case, x: np.ndarray[Any, Any]) -> Any:
    return case.place.put(x)


@contextmanager
def at_times_overlapping(case: Case) -> Iterator[None]:
    """One time in four, kernels inside may begin before those in front have ended; what made the operands has ended."""
    if not case.chance(0.25):
        yield
        return
    if not case.place.is_host:
        import cupy

        cupy.cuda.get_current_stream().synchronize()
    with bg.overlapping():
        yield


def holds(case: Case, dtype: np.dtype[Any]) -> bool:
    """Do the classes of other formats hold this dtype here?"""
    return case.place.holds(dtype)


def plain(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Values that NumPy's functions take: bfloat16 as float32."""
    return x.astype(np.float32) if x.dtype == BFLOAT16 else x


def is_half(dtype: np.dtype[Any]) -> bool:
    return dtype in HALF_DTYPES


def refused(case: Case, error: type[Exception], call: Any) -> None:
    """The call has to raise this error."""
    case.checks += 1
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")
