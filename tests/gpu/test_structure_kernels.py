"""The kernels that read patterns and not values, and sums of segments, on the card beside their references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bsrgemm._backend import registry
from bsrgemm.dtypes import BOOL, DEVICE_DTYPES

from .marks import some_under_memcheck
from .product_cases import acc_of, assert_close, exact_dtype, values

pytestmark = pytest.mark.gpu

SANITIZED_DTYPES = [np.dtype(name) for name in ("bool", "int8", "float16", "complex128")]


# ------------------------------------------------------------------------------------- segments and rows
@pytest.mark.parametrize("dtype", some_under_memcheck(DEVICE_DTYPES, SANITIZED_DTYPES))
@pytest.mark.parametrize("op", ["add", "maximum", "minimum", "fmax", "fmin"])
def test_segments_reduce_like_numpy(dtype, op, rng) -> None:
    import cupy

    for width, lengths in [(1, [1, 2, 1]), (5, [3, 1, 4]), (40, [1, 1]), (3, [100, 33, 1]), (1, [5000])]:
        x = values(rng, (sum(lengths), width), dtype)
        if np.dtype(dtype).kind in "fc":
            x[rng.random(x.shape) < 0.05] = np.nan if op != "add" else 1
        order = rng.permutation(len(x))
        starts = np.cumsum([0, *lengths[:-1]])
        host, cuda = registry.host(), registry.cuda()
        for permutation in (None, order):
            want = host.segment_reduce(op, x, permutation, starts)
            moved = None if permutation is None else cupy.asarray(permutation)
            got = cuda.segment_reduce(op, cupy.asarray(x), moved, cupy.asarray(starts))
            if op != "add" or got.dtype == BOOL or np.dtype(dtype).kind in "iu":
                np.testing.assert_array_equal(got.get(), want)
            else:
                wide = x.astype(exact_dtype(np.dtype(dtype)))
                exact = host.segment_reduce("add", wide, permutation, starts)
                size = host.segment_reduce("add", np.abs(wide), permutation, starts)
                assert_close(got.get(), exact, size, max(lengths), acc_of(np.dtype(dtype)))


@pytest.mark.sanitizer
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_expand_names_the_row_of_every_entry(index, rng) -> None:
    import cupy

    for counts in ([0, 0, 3], [5], [1] * 700, [0, 9000, 0, 1], list(rng.integers(0, 4, 5000))):
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(index)
        got = registry.cuda().expand(cupy.asarray(indptr), int(indptr[-1]))
        np.testing.assert_array_equal(got.get(), np.repeat(np.arange(len(counts)), counts))


@pytest.mark.parametrize("per_group", [2, 4, 8])
@pytest.mark.parametrize(
    ("rows", "cols"), [(128, 128), pytest.param(37, 5, marks=pytest.mark.sanitizer), (1300, 70), (512, 40)]
)
def test_matched_rows_share_more_columns_than_neighbours(per_group, rows, cols, rng) -> None:
    import cupy

    from bsrgemm._products import lists, work_list

    stored = rng.random((rows, cols)) < 0.22
    i, j = np.nonzero(stored)
    indptr = cupy.asarray(np.searchsorted(i, np.arange(rows + 1)).astype(np.int32))
    pattern_ = work_list.Pattern(cupy.asarray(j.astype(np.int32)), indptr, rows, cols, False)
    order = lists.matched(pattern_, 1, per_group)
    padded = -(-rows // per_group) * per_group
    np.testing.assert_array_equal(np.sort(order.get()), np.arange(padded))

    def entries(order: np.ndarray) -> int:
        full = np.zeros((padded, cols), bool)
        full[:rows] = stored
        return int(full[order].reshape(-1, per_group, cols).any(axis=1).sum())

    assert entries(order.get()) < 0.99 * entries(np.arange(padded))
    assert bool((order == lists.matched(pattern_, 1, per_group)).all())


# ----------------------------------------------------------------------------------------- work lists
def assert_same_work_list(pattern_: Any, per_row: int, per_group: int, order: Any) -> Any:
    """That of work_list.cu, beside the one made of CuPy's functions."""
    from bsrgemm._products import lists, work_list

    got = lists.merged(pattern_, per_row, per_group, order)
    want = work_list.merged(registry.cuda(), pattern_, per_row, per_group, order)
    items, wanted = lists.items(got), work_list.whole(registry.cuda(), want)
    assert got.per_group == want.per_group and items.pieces == wanted.pieces
    for name in ("bounds", "columns", "blocks", "row_tiles"):
        np.testing.assert_array_equal(getattr(got, name).get(), getattr(want, name).get(), err_msg=name)
    for name in ("items", "count", "splits"):
        np.testing.assert_array_equal(getattr(items, name).get(), getattr(wanted, name).get(), err_msg=name)
    return got, items


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(("per_row", "per_group"), [(1, 2), (1, 8), (2, 4), (3, 8)])
@pytest.mark.parametrize(
    ("rows", "cols", "density"),
    [pytest.param(13, 7, 0.4, marks=pytest.mark.sanitizer), (300, 500, 0.3), (1, 3000, 0.9), (5000, 3, 0.001)],
)
def test_work_lists_are_those_of_the_reference(rows, cols, density, per_row, per_group, index, rng) -> None:
    """Empty rows, duplicates, columns in any order."""
    import cupy

    from bsrgemm._products import lists, work_list

    stored = rng.random((rows, cols)) < density
    stored[rows // 2 : rows // 2 + 1000 : 2, : cols // 2] = False
    i, j = np.nonzero(stored)
    twice = rng.random(len(i)) < 0.1
    i, j = np.concatenate([i, i[twice]]), np.concatenate([j, j[twice]])
    by = np.lexsort((rng.random(len(i)), i))
    indices, indptr = j[by].astype(index), np.searchsorted(i[by], np.arange(rows + 1)).astype(index)
    for transposed in (False, True):
        pattern_ = work_list.Pattern(cupy.asarray(indices), cupy.asarray(indptr), rows, cols, transposed)
        padded = -(-pattern_.shape[0] * per_row // per_group) * per_group
        orders = [None, cupy.asarray(rng.permutation(padded).astype(np.int32))]
        orders.append(lists.matched(pattern_, per_row, per_group))
        for order in orders:
            assert_same_work_list(pattern_, per_row, per_group, order)


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("damage", [-1, 7, 2**31 - 1, pytest.param(-(2**31), marks=pytest.mark.sanitizer)])
def test_work_lists_of_spoiled_index_arrays_name_nothing_outside(damage, index, rng) -> None:
    import cupy

    from bsrgemm._products import lists, work_list

    row = np.sort(rng.integers(0, 60, 2000))
    good = rng.integers(0, 70, 2000).astype(index), np.searchsorted(row, np.arange(61)).astype(index)
    for spoiled, at in ((0, [2, 900, 1999]), (1, [2, 30]), (1, [0]), (1, [60])):
        arrays = [x.copy() for x in good]
        arrays[spoiled][at] = damage
        for transposed in (False, True):
            pattern_ = work_list.Pattern(*map(cupy.asarray, arrays), 60, 70, transposed)
            order = lists.matched(pattern_, 2, 4)
            np.testing.assert_array_equal(np.sort(order.get()), np.arange(order.size))
            groups, _ = assert_same_work_list(pattern_, 2, 4, order)
            assert int(groups.columns.min()) >= 0 and int(groups.columns.max()) <= pattern_.shape[1]
            assert int(groups.blocks.min()) >= -1 and int(groups.blocks.max()) < 2000


def test_a_million_blocks_are_listed_as_by_the_reference(rng) -> None:
    """Many tiles, each of several rounds, and sums over all of them."""
    import cupy

    from bsrgemm._products import lists, work_list

    side, per_row = 4096, 244
    indices = cupy.asarray(rng.integers(0, side, side * per_row).astype(np.int32))
    indptr = cupy.arange(0, side * per_row + 1, per_row, dtype=np.int32)
    for slots, per_group in ((1, 2), (2, 4), (1, 8)):
        pattern_ = work_list.Pattern(indices, indptr, side, side, False)
        assert_same_work_list(pattern_, slots, per_group, lists.matched(pattern_, slots, per_group))
