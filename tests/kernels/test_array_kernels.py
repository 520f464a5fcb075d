"""All that is promised of the kernels of arrays and patterns, and of spgemm_simt, which adds up pairs.

What a kernel returns is compared with the function of the same name in `structure`, on the host.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._backend import array_kernels, device_arrays, registry, structure
from bsrgemm._backend.base import Blocks, Csr, Piece
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products import cuda as products_cuda
from bsrgemm.dtypes import BFLOAT16

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


# ------------------------------------------------------------------------------- diagonal
#: Block rows of a pattern with duplicates, out of order, with empty rows and one long row.
_SCATTERED = ([0, 3, 3, 8, 9, 20], [2, 0, 2, 3, 1, 3, 0, 3, 4, *([1, 4, 3, 0, 4, 2, 4, 1, 4, 0, 3])])
#: One in canonical format.
_ORDERED = ([0, 3, 3, 5, 6, 11], [0, 2, 3, 1, 2, 5, 0, 1, 2, 3, 4])
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_BLOCKS = [(3, 3), (2, 3), (1, 1), (5, 2)]


def stored(
    rng: np.random.Generator, pattern: tuple[list[int], list[int]], blocksize: tuple[int, int], dtype: Any, index: Any
) -> Blocks:
    """Blocks of small whole numbers, among them NaN and -0.0, in a pattern on the host."""
    indptr, indices = pattern
    data = numbers(rng, (len(indices), *blocksize), np.dtype(dtype))
    if data.dtype.kind in "fc":
        data[::4, 0, 0], data[1::5, -1, -1] = np.nan, -0.0
    return Blocks(data, np.array(indices, index), np.array(indptr, index))


def on(device: Device, blocks: Blocks) -> Blocks:
    return Blocks(*map(device.asarray, blocks))


def same_bits(got: Any, want: Any, zeros: bool = True) -> None:
    """Equal dtypes, shapes and values; the sign of a zero counts if asked for, the bits of a NaN do not."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if got.dtype.kind == "c":
        parts = (np.ascontiguousarray(x).view(got.real.dtype) for x in (got, want))
        same_bits(*parts, zeros)
        return
    wide = [x.astype(np.float32) if x.dtype == BFLOAT16 else x for x in (got, want)]
    np.testing.assert_array_equal(*wide)
    if zeros and wide[0].dtype.kind == "f":
        np.testing.assert_array_equal(*(np.signbit(x) & (x == 0) for x in wide))


def spoiled(blocks: Blocks) -> Iterator[Blocks]:
    """The same blocks with index arrays that a user has overwritten."""
    for name, at, value in itertools.product(("indices", "indptr"), (0, 1, -1), (-9, 7, 2**31 - 1)):
        array = getattr(blocks, name).copy()
        array[at] = value
        yield blocks._replace(**{name: array})


@pytest.mark.before
@pytest.mark.parametrize("index", [_INT32, _INT64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocksize", _BLOCKS, ids=str)
def test_diagonals(
    blocksize: tuple[int, int], dtype: Any, index: Any, device: Device, rng: np.random.Generator
) -> None:
    (R, C), cuda = blocksize, registry.cuda()
    for pattern, canonical in ((_SCATTERED, False), (_ORDERED, True), (_ORDERED, False)):
        blocks = stored(rng, pattern, blocksize, dtype, index)
        there = on(device, blocks)
        for k in (0, 1, -1, 2 * C, -3 * R, 6 * C - 1, 1 - 5 * R):
            count = min(5 * R + min(k, 0), 6 * C - max(k, 0))
            want = structure.diagonal(HOST, blocks, 6, k, count, canonical)
            same_bits(device.asnumpy(cuda.diagonal(there, 6, k, count, canonical)), want)
        for turned in (False, R == C):
            got = cuda.diagonal_blocks(there, 5, canonical, turned)
            for one, other in zip(got, structure.diagonal_blocks(HOST, blocks, 5, turned), strict=True):
                same_bits(device.asnumpy(one), other)


@pytest.mark.before
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_diagonals_are_set_if_all_their_blocks_are_stored(dtype: Any, device: Device, rng: np.random.Generator) -> None:
    blocks, cuda = stored(rng, _ORDERED, (2, 2), dtype, _INT32), registry.cuda()
    for k, count in ((0, 10), (0, 2), (0, 8), (-2, 4), (-1, 4), (7, 1), (4, 2)):
        for values in (numbers(rng, (count,), np.dtype(dtype)), np.ones((), dtype)):
            there, want = on(device, blocks), blocks._replace(data=blocks.data.copy())
            done = HOST.set_diagonal(want, 6, k, values, count)
            assert cuda.set_diagonal(there, 6, k, device.asarray(values), count) == done
            same_bits(device.asnumpy(there.data), want.data)


@pytest.mark.before
@pytest.mark.sanitizer
def test_diagonals_of_spoiled_indices_stay_inside(device: Device, rng: np.random.Generator) -> None:
    cuda, value = registry.cuda(), device.asarray(np.ones(()))
    for blocks in spoiled(stored(rng, _ORDERED, (2, 2), F64, _INT32)):
        there = on(device, blocks)
        for k, canonical in itertools.product((0, 3, -9), (False, True)):
            cuda.diagonal(there, 6, k, 10 - abs(k), canonical)
            cuda.diagonal_blocks(there, 5, canonical, True)
            cuda.set_diagonal(there, 6, k, value, 10 - abs(k))
    device.synchronize()


# ------------------------------------------------------------------------------- check_pattern
def random_pattern(rng: np.random.Generator, rows: int, columns: int, in_order: bool) -> tuple[list[int], list[int]]:
    lengths = rng.integers(0, columns + 1, rows) * rng.integers(0, 2, rows)
    lengths[rng.integers(rows)] += 0 if in_order else 300
    each = [rng.choice(columns, n, replace=False) if in_order else rng.integers(0, columns, n) for n in lengths]
    indices = np.concatenate([np.sort(x) if in_order or rng.random() < 0.9 else x for x in each])
    return [0, *np.cumsum(lengths).tolist()], indices.astype(int).tolist()


@pytest.mark.before
@pytest.mark.parametrize("index", [_INT32, _INT64], ids=str)
def test_what_is_known_of_index_arrays(index: Any, device: Device, rng: np.random.Generator) -> None:
    some = [_SCATTERED, _ORDERED, ([0], []), ([0, 0, 0], []), ([0, 1], [5]), ([2, 1, 0, 3], [4, -1, 2, 7])]
    some += [random_pattern(rng, int(rng.integers(1, 900)), 9, bool(k % 2)) for k in range(6)]
    for indptr, indices in some:
        arrays = np.array(indices, index), np.array(indptr, index)
        got, want = registry.cuda().inspect(*map(device.asarray, arrays)), structure.inspect(HOST, *arrays)
        assert got[:5] == want[:5]
        if not want.falls and want.start == 0 and want.stop <= len(indices):
            used = arrays[0][: want.stop]
            assert got.in_order == structure.is_sorted(HOST, used, arrays[1], strictly=False)
            assert got.canonical == structure.is_sorted(HOST, used, arrays[1], strictly=True)
            assert got.longest == max([0, *np.diff(arrays[1])])


# ------------------------------------------------------------------------------- reduce_lines
@pytest.mark.before
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", [*array_kernels.OPERATIONS, "count"])
def test_rows_and_columns_are_reduced(
    operation: str, dtype: Any, axis: int, device: Device, rng: np.random.Generator
) -> None:
    """Sums of whole numbers are exact in any order; what is not stored is 0, or does not count."""
    long = [0, 40, 40, 41], [*range(40), 7]
    for (pattern, columns), blocksize in itertools.product(
        ((_ORDERED, 6), (long, 40), (([0, 0], []), 6)), ((3, 3), (2, 5), (1, 1), (1, 40), (33, 2))
    ):
        blocks = stored(rng, pattern, blocksize, dtype, _INT32)
        if operation == "add" and blocks.data.dtype.kind in "fc":
            blocks = blocks._replace(data=np.where(np.isnan(blocks.data), 1, blocks.data).astype(dtype))
        there, cuda = on(device, blocks), registry.cuda()
        host_lists = None if axis else partial(structure.by_column, HOST, blocks.indices, columns)
        lists = None if axis else partial(cuda.by_column, there.indices, there.indptr, columns)
        for out, only_stored in itertools.product(array_kernels.reduced_dtypes(operation, dtype), (False, True)):
            want = structure.reduce_lines(HOST, operation, blocks, host_lists, columns, out, only_stored)
            got = cuda.reduce_lines(operation, there, lists, columns, out, only_stored)
            same_bits(device.asnumpy(got), want, zeros=False)  # which of -0 and 0 is larger, NumPy leaves open


def test_sums_of_negative_zeros_are_zero(device: Device) -> None:
    blocks = on(device, Blocks(-np.zeros((2, 2, 2)), np.array([0, 1]), np.array([0, 2])))
    assert not np.signbit(device.asnumpy(registry.cuda().reduce_lines("add", blocks, None, 2, F64))).any()


@pytest.mark.before
@pytest.mark.sanitizer
def test_lines_of_spoiled_indices_stay_inside(device: Device, rng: np.random.Generator) -> None:
    cuda = registry.cuda()
    for blocks in spoiled(stored(rng, _ORDERED, (2, 2), F64, _INT32)):
        there = on(device, blocks)
        cuda.reduce_lines("add", there, None, 6, F64)
        for order, starts in (([0, 1, -5, 2**31 - 1, 3], [0, 2, 9, -4, 5]), ([3], [5, 0])):
            arrays = [device.asarray(np.array(x, np.int32)) for x in (order, starts)]
            cuda.reduce_lines("maximum", there, lambda arrays=arrays: arrays, 6, F64)
    device.synchronize()


def test_sums_of_rows_and_columns_have_the_same_bits_every_time(device: Device, rng: np.random.Generator) -> None:
    blocks = stored(rng, _ORDERED, (3, 3), F64, _INT32)
    blocks = on(device, blocks._replace(data=rng.standard_normal(blocks.data.shape)))
    cuda = registry.cuda()
    for lists in (None, partial(cuda.by_column, blocks.indices, blocks.indptr, 6)):
        first, again = (device.asnumpy(cuda.reduce_lines("add", blocks, lists, 6, F64)) for _ in range(2))
        assert first.tobytes() == again.tobytes()


# ------------------------------------------------------------------------- merge_patterns, combine_blocks, kept_places
_OPERATIONS = {name: getattr(operator, name, None) or getattr(np, name) for name in array_kernels.COMBINATIONS}


def canonical_pattern(rng: np.random.Generator, rows: int, columns: int) -> tuple[list[int], list[int]]:
    return random_pattern(rng, rows, columns, True)


def close_to(blocks: Blocks, rng: np.random.Generator) -> Blocks:
    """Equal blocks in the same pattern, but for every third one: a difference has blocks of zeros."""
    data = blocks.data.copy()
    data[::3] = numbers(rng, data[::3].shape, data.dtype)
    return blocks._replace(data=data)


def check_combined(device: Device, name: str, a: Blocks, b: Blocks, same: bool) -> None:
    with np.errstate(all="ignore"):
        want = structure.combine(HOST, _OPERATIONS[name], a, b, 3000)
    got = registry.cuda().combine(_OPERATIONS[name], on(device, a), on(device, b), 3000, same)
    for one, other in zip(got, want, strict=True):
        same_bits(device.asnumpy(one), other, zeros=name not in ("maximum", "minimum"))


@pytest.mark.before
@pytest.mark.parametrize("index", [_INT32, _INT64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(array_kernels.COMBINATIONS))
def test_two_matrices_are_combined(name: str, dtype: Any, index: Any, device: Device, rng: np.random.Generator) -> None:
    if not array_kernels.combines(name, dtype):
        pytest.skip("array functions do this")
    for blocksize in ((3, 2), (1, 1), (20, 30)):
        a, b = (stored(rng, canonical_pattern(rng, 30, 9), blocksize, dtype, index) for _ in range(2))
        check_combined(device, name, a, b, False)
        check_combined(device, name, a, close_to(a, rng), True)


@pytest.mark.before
@pytest.mark.parametrize("at_once", [True, False])
def test_patterns_of_any_rows_are_merged(
    at_once: bool, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long rows, runs of empty ones, nothing at all, and several CTAs."""
    monkeypatch.setattr(device_arrays, "_AT_ONCE", 1 << 40 if at_once else -1)
    long = [0, *[3000] * 40, 3001], [*range(3000), 7]
    wide = [0] * 20 + [1500, 1500, 1501], [*range(0, 3000, 2), 7]
    short = [0] * 10 + [1] * 32, [11]
    each = [long, (wide[0] + [1501] * 19, wide[1]), short, ([0] * 42, [])]
    for one, other in itertools.product(each, repeat=2):
        a, b = (stored(rng, pattern, (1, 1), F64, _INT32) for pattern in (one, other))
        check_combined(device, "add", a, b, False)
    for _ in range(4):
        a, b = (stored(rng, canonical_pattern(rng, 300, 40), (2, 2), F64, _INT32) for _ in range(2))
        check_combined(device, "sub", a, b, False)
    none = Blocks(np.zeros((0, 2, 2)), np.zeros(0, np.int32), np.zeros(1, np.int32))
    check_combined(device, "add", none, none, False)


@pytest.mark.before
@pytest.mark.parametrize("dtype", [np.dtype(c) for c in "beidD"], ids=str)
def test_some_blocks_are_selected(dtype: Any, device: Device, rng: np.random.Generator) -> None:
    for (rows, columns), blocksize in itertools.product(((40, 9), (900, 30), (1, 0)), ((3, 2), (1, 1))):
        blocks = stored(rng, canonical_pattern(rng, rows, columns), blocksize, dtype, _INT32)
        for share in (0, 0.5, 1):
            keep = rng.random(len(blocks.indices)) < share
            want = structure.select_blocks(HOST, blocks, keep)
            got = registry.cuda().select_blocks(on(device, blocks), device.asarray(keep))
            for one, other in zip(got, want, strict=True):
                same_bits(device.asnumpy(one), other)


@pytest.mark.before
@pytest.mark.parametrize("tiles", [2, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_are_not_zero(
    dtype: Any, tiles: int, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN is none, and -0.0 is; tiles of any length; arrays of two dimensions, and with strides."""
    monkeypatch.setattr(array_kernels.KeptPlaces, "tiles", tiles)
    for n in (0, 1, 2047, 2049, 9000):
        x = numbers(rng, (n,), np.dtype(dtype))
        x[rng.random(n) < 0.5] = 0
        if x.dtype.kind in "fc":
            x[::7], x[1::9] = np.nan, -0.0
        there, want = device.asarray(x), np.flatnonzero(x != 0)
        assert registry.cuda().count_nonzero(there) == len(want)
        np.testing.assert_array_equal(device.asnumpy(registry.cuda().flatnonzero(there)), want)
    np.testing.assert_array_equal(device.asnumpy(registry.cuda().flatnonzero(there[::2])), np.flatnonzero(x[::2] != 0))
    assert registry.cuda().count_nonzero(there.reshape(90, 100).T) == len(want)


@pytest.mark.before
@pytest.mark.sanitizer
def test_spoiled_patterns_are_combined_inside_their_arrays(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, cuda = stored(rng, _ORDERED, (2, 2), F64, _INT32), registry.cuda()
    for blocks, at_once in itertools.product(spoiled(good), (0, 1 << 40)):
        monkeypatch.setattr(device_arrays, "_AT_ONCE", at_once)
        pair = on(device, blocks), on(device, good)
        for a, b in (pair, pair[::-1], (pair[0], pair[0])):
            for same in (False, True):
                cuda.combine(operator.add, a, b, 6, same)
        cuda.select_blocks(pair[0], device.asarray(rng.random(11) < 0.5))
    device.synchronize()


# ------------------------------------------------------------------------------- public calls
def matrix_of(device: Device, blocks: Blocks, columns: int) -> Any:
    (_, R, C), rows = blocks.data.shape, len(blocks.indptr) - 1
    return bg.bsr_array(tuple(on(device, blocks)), shape=(rows * R, columns * C))


@pytest.mark.parametrize(
    "call",
    [lambda A: A.sum(0), lambda A: A.sum(1), lambda A: A.diagonal(1), lambda A: A.block_diagonal()],
    ids=["sum(0)", "sum(1)", "diagonal", "block_diagonal"],
)
def test_calls_that_do_not_wait_can_be_captured(call: Any, device: Device, rng: np.random.Generator) -> None:
    """The graph computes with the values that the matrix has when it runs."""
    A = matrix_of(device, stored(rng, _ORDERED, (2, 2), F64, _INT32), 6)
    A.data[...] = 1
    call(A)
    results: list[Any] = []
    graph = device.captured(lambda: results.append(call(A)))
    for factor in (1, 3):
        A.data[...] = factor
        graph.launch()
        device.synchronize()
        want = call(matrix_of(device, Blocks(np.full((11, 2, 2), float(factor)), *map(np.array, _ORDERED[::-1])), 6))
        np.testing.assert_array_equal(device.asnumpy(results[0]), device.asnumpy(want))


def launched(device: Device, call: Any) -> list[str]:
    """The names of the kernels of this library that a call launches."""
    before = len(device.card.launches)  # type: ignore[attr-defined]
    call()
    return [x.entry for x in device.card.launches[before:]]  # type: ignore[attr-defined]


@pytest.mark.emulated
def test_each_operation_has_one_launch_or_few(device: Device, rng: np.random.Generator) -> None:
    """Nothing is sorted or searched by array functions; a copy is known to have the same pattern."""
    A, B = (matrix_of(device, stored(rng, canonical_pattern(rng, 30, 9), (2, 2), F64, _INT32), 9) for _ in range(2))
    same, union = ["combine_blocks"], ["merge_patterns", "merge_patterns", "combine_blocks"]
    A.data[...], B.data[...] = 1, 2
    for call, want in (
        (lambda: A + A.copy(), same),
        (lambda: A.multiply(A * 2), same),
        (lambda: A + B, union),
        (lambda: B - A, union),
        (lambda: A.sum(1), ["reduce_lines"]),
        (lambda: A.diagonal(), ["diagonal"]),
        (lambda: A.to_device("cuda").tocsr(), ["block_elements"]),
        (lambda: bg.bsr_array((A.data, A.indices, A.indptr), shape=A.shape), ["check_pattern"]),
        (lambda: A[:20], ["combine_blocks"]),
        (lambda: bg.vstack([A, B]), ["combine_blocks", "combine_blocks"]),
        (lambda: bg.block_diag([A, B]), ["combine_blocks", "combine_blocks"]),
        (lambda: A != B, [*union, "block_elements", "kept_places", "kept_places", "combine_blocks"]),
        (lambda: A * 2, []),
        (lambda: A.setdiag(1), ["diagonal"]),
    ):
        assert launched(device, call)[: len(want) or None] == want


@pytest.mark.before
@pytest.mark.parametrize("dtype", [np.dtype(c) for c in "beidD"], ids=str)
def test_matrices_are_stacked(dtype: Any, device: Device, rng: np.random.Generator) -> None:
    """Columns and row pointers move along; index arrays become as wide as the widest."""
    for blocksize, wide in itertools.product(((3, 2), (1, 1), (40, 30)), (False, True)):
        indices = (_INT32, _INT64 if wide else _INT32, _INT32)
        pieces = [
            stored(rng, canonical_pattern(rng, rows, 9), blocksize, dtype, index)
            for rows, index in zip((12, 1, 5), indices, strict=True)
        ]
        index = np.result_type(*indices)
        moved = [(blocks, 9 * n) for n, blocks in enumerate(pieces)]
        got = registry.cuda().stack([Piece(on(device, x), left) for x, left in moved], np.dtype(dtype), index)
        assert got is not None
        want = (
            np.concatenate([x.data for x in pieces]),
            np.concatenate([x.indices + left for x, left in moved]).astype(index),
            np.concatenate([[0], np.cumsum(np.concatenate([np.diff(x.indptr) for x in pieces]))]).astype(index),
        )
        for one, other in zip(got, want, strict=True):
            same_bits(device.asnumpy(one), other)
        some = pieces[0]
        begin, end = int(some.indptr[4]), int(some.indptr[9])
        rows = Blocks(some.data[begin:end], some.indices[begin:end], some.indptr[4:10])
        got = registry.cuda().stack([Piece(on(device, rows), 0, begin)], np.dtype(dtype), _INT32)
        assert got is not None
        for one, other in zip(got, (*rows[:2], rows.indptr - rows.indptr[0]), strict=True):
            same_bits(device.asnumpy(one), other)


def test_a_copy_whose_indices_were_written_to_has_another_pattern(device: Device, rng: np.random.Generator) -> None:
    A = matrix_of(device, Blocks(np.ones((2, 1, 1)), np.array([0, 2]), np.array([0, 1, 2])), 3)
    B = A.copy()
    B.indices[0] = 1
    np.testing.assert_array_equal(device.asnumpy((A + B).toarray()), [[1, 1, 0], [0, 0, 2]])
    A.indices[1] = 0
    np.testing.assert_array_equal(device.asnumpy((A + A).toarray()), [[2, 0, 0], [2, 0, 0]])


@pytest.mark.before
@pytest.mark.parametrize("dtype", [np.dtype(c) for c in "beidD"], ids=str)
def test_blocks_are_transposed(dtype: Any, device: Device, rng: np.random.Generator) -> None:
    for pattern, blocksize in itertools.product((_SCATTERED, _ORDERED, ([0, 0], [])), (*_BLOCKS, (40, 70))):
        blocks = stored(rng, pattern, blocksize, dtype, _INT32)
        got, want = registry.cuda().transpose(on(device, blocks), 6), HOST.transpose(blocks, 6)
        for one, other in zip(got, want, strict=True):
            same_bits(device.asnumpy(one), other)


@pytest.mark.emulated
@pytest.mark.parametrize("most", [1, 2])
def test_operations_on_matrices_go_on_beyond_a_small_grid(most: int, device: Device, rng: np.random.Generator) -> None:
    cuda = registry.cuda()
    a, b = (stored(rng, canonical_pattern(rng, 900, 30), (3, 2), F64, _INT32) for _ in range(2))
    a = a._replace(data=numbers(rng, a.data.shape, F64))
    there, keep = on(device, a), rng.random(len(a.indices)) < 0.5
    csr = Csr(*HOST.to_csr(a, 3000, _INT32))
    row = np.repeat(np.arange(2700), np.diff(csr.indptr))
    with few_ctas(most):
        check_combined(device, "sub", a, b, False)
        pairs: list[tuple[Any, Any]] = [
            (cuda.diagonal(there, 3000, 1, 2699, True), structure.diagonal(HOST, a, 3000, 1, 2699, True)),
            (cuda.reduce_lines("add", there, None, 3000, F64), structure.reduce_lines(HOST, "add", a, None, 3000, F64)),
            *zip(cuda.to_csr(there, 3000, _INT32), csr, strict=True),
            *zip(cuda.select_blocks(there, device.asarray(keep)), structure.select_blocks(HOST, a, keep), strict=True),
            *zip(
                cuda.blocks_of_csr(Csr(*map(device.asarray, csr)), (2700, 6000), (3, 2), lambda: True),
                structure.from_coo(HOST, row, csr.indices, csr.data, (2700, 6000), (3, 2), _INT32),
                strict=True,
            ),
        ]
        for one, other in pairs:
            same_bits(device.asnumpy(one), other, zeros=False)
        facts = cuda.inspect(there.indices, there.indptr)
        assert facts[:5] == structure.inspect(HOST, *a[1:])[:5] and facts.canonical
