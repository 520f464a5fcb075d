"""All that is promised of the kernels of single arrays, expand and segment, and of spgemm_simt, which adds up pairs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._backend import array_kernels, registry
from bsrgemm._products import cuda as products_cuda

from ..devices import Device
from .products import F64, exact, few_ctas, numbers
from .test_plain_products import DTYPES


@pytest.fixture(autouse=True)
def any_card(device: Device) -> None:
    device.needs("sm_75")


# ------------------------------------------------------------------------------- expand
@pytest.mark.before
@pytest.mark.parametrize("index", ["i4", "i8"])
def test_rows_of_entries(index: str, device: Device) -> None:
    lengths = np.array([0, 3, 0, 0, 20, 1, 0])
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(index)
    got = registry.cuda().expand(device.asarray(indptr), 24)
    np.testing.assert_array_equal(device.asnumpy(got), np.repeat(np.arange(7), lengths))


# ------------------------------------------------------------------------------- segment
def reduced(device: Device, operation: str, values: Any, order: Any, starts: Any) -> np.ndarray[Any, Any]:
    arrays = [None if x is None else device.asarray(x) for x in (values, order, starts)]
    return device.asnumpy(registry.cuda().segment_reduce(operation, *arrays))


@pytest.mark.before
@pytest.mark.parametrize("dtype", [np.dtype(c) for c in ("i4", "f4", "c16")], ids=str)
@pytest.mark.parametrize("operation", list(array_kernels.OPERATIONS))
def test_reductions_of_segments(operation: str, dtype: np.dtype[Any], device: Device, rng: np.random.Generator) -> None:
    values, order = numbers(rng, (9, 4), dtype), rng.permutation(np.repeat(np.arange(9), 2))
    if dtype.kind != "i":
        values[[2, 5], [1, 3]] = np.nan
    for rows, chosen, starts in ((values, None, [0, 1, 7]), (values[order], order, [0, 1, 12])):
        got = reduced(device, operation, values, chosen, np.array(starts))
        np.testing.assert_array_equal(got, getattr(np, operation).reduceat(rows, starts, axis=0))


@pytest.mark.parametrize("dtype", [np.dtype(c) for c in ("i4", "f4", "c16")], ids=str)
@pytest.mark.parametrize("operation", list(array_kernels.OPERATIONS))
def test_long_segments_are_reduced_by_many_lanes(
    operation: str, dtype: np.dtype[Any], device: Device, rng: np.random.Generator
) -> None:
    """Segments of fewer and of more rows than a warp has lanes. A lane without a row, and a row that is outside, count
    for nothing."""
    starts = np.array([0, 1, 3, 40, 41, 170])
    values = (100 + numbers(rng, (235, 3), dtype)).astype(dtype)  # a lane that has no row must not say 0
    if operation in ("maximum", "fmax"):
        values = -values
    if dtype.kind != "i":
        values[[20, 41, 180], [1, 2, 0]] = np.nan
    order = rng.permutation(235)
    assert array_kernels.segment(dtype, operation, 235 // len(starts), 3).lanes == 32
    reduce = getattr(np, operation).reduceat
    for rows, chosen in ((values, None), (values[order], order)):
        np.testing.assert_array_equal(reduced(device, operation, values, chosen, starts), reduce(rows, starts, axis=0))
    spoiled = order.copy()
    spoiled[[3, 50, 234]] = [-1, 235, 2**40]
    kept = np.delete(spoiled, [3, 50, 234])
    got = reduced(device, operation, values, spoiled, starts)
    np.testing.assert_array_equal(got, reduce(values[kept], np.array([0, 1, 3, 39, 40, 168]), axis=0))


# ------------------------------------------------------------------------------- spgemm_simt
def pairs(device: Device, *arrays: Any) -> np.ndarray[Any, Any]:
    """The sums of products of pairs of blocks, by segment."""
    *lists, dtype = arrays
    return device.asnumpy(products_cuda.ENGINE.pair_products(*map(device.asarray, lists), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_pairs_of_blocks(dtype: np.dtype[Any], device: Device, rng: np.random.Generator) -> None:
    a, b = numbers(rng, (5, 3, 4), dtype), numbers(rng, (6, 4, 2), dtype)
    ia, ib, starts = rng.integers(0, 5, 11), rng.integers(0, 6, 11), np.array([0, 3, 3, 9])
    got = pairs(device, a, ia, b, ib, starts, dtype)
    each = a.astype(exact(dtype))[ia] @ b.astype(exact(dtype))[ib]
    for s, (first, last) in enumerate(itertools.pairwise((*starts, 11))):
        np.testing.assert_array_equal(got[s], each[first:last].sum(axis=0).astype(dtype))


@pytest.mark.before
@pytest.mark.sanitizer
@pytest.mark.parametrize("shape", [(3, 4, 2), (5, 2, 7)], ids=str)
def test_lists_of_pairs_are_read_no_further_than_they_go(
    shape: tuple[int, int, int], device: Device, rng: np.random.Generator
) -> None:
    """Segments without pairs at both ends, bounds and pairs that were spoiled."""
    R, K, N = shape
    a, b = numbers(rng, (5, R, K), F64), numbers(rng, (6, K, N), F64)
    for starts in ([0, 0, 3, 11, 11], [4], [-9, 2, 2**40, 5], [11]):
        ia, ib = rng.integers(-1, 6, 11), rng.integers(-1, 7, 11)
        got = pairs(device, a, ia, b, ib, np.array(starts), F64)
        for s, (first, last) in enumerate(itertools.pairwise(np.clip([*starts, 11], 0, 11))):
            want = np.zeros((R, N))
            for p, q in zip(ia[first:last], ib[first:last], strict=True):
                if 0 <= p < 5 and 0 <= q < 6:
                    want += a[p] @ b[q]
            np.testing.assert_array_equal(got[s], want)


@pytest.mark.emulated
@pytest.mark.parametrize("most", [1, 2])
def test_loops_go_on_beyond_a_small_grid(most: int, device: Device, rng: np.random.Generator) -> None:
    with few_ctas(most):
        a, b, lists = numbers(rng, (5, 3, 4), F64), numbers(rng, (6, 4, 2), F64), rng.integers(0, 5, (2, 400))
        got = pairs(device, a, lists[0], b, lists[1], np.arange(400), F64)
        np.testing.assert_array_equal(got, a[lists[0]] @ b[lists[1]])
        values, starts = numbers(rng, (900, 35), F64), np.arange(0, 900, 3)
        got = reduced(device, "add", values, None, starts)
        np.testing.assert_array_equal(got, np.add.reduceat(values, starts, axis=0))
        lengths = rng.integers(0, 9, 2000)
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        got = device.asnumpy(registry.cuda().expand(device.asarray(bounds), int(bounds[-1])))
        np.testing.assert_array_equal(got, np.repeat(np.arange(2000), lengths))
