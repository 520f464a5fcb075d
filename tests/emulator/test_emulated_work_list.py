"""work_list.cu and row_matching.cu on the CPU: work lists, number by number those of work_list.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsrgemm._backend import array_kernels
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import element_types, launching
from bsrgemm._products import configs, matrix_cache, row_matching, work_list, work_list_launch
from bsrgemm._products.work_list import Groups, Pattern

from . import emulator
from .emulator import guarded, put


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    """A read or a write beyond the end of an array ends the process."""
    with emulator.emulated(folder, guarded):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


class Backend:
    """Arrays of NumPy; rows of entries as cuda/expand.cu finds them, whatever indptr holds."""

    xp = np

    @staticmethod
    def expand(indptr: Any, n: int) -> Any:
        out, config = put(np.empty(n, indptr.dtype)), array_kernels.Expand(element_types.element(indptr.dtype))
        if n:
            launching.run(config, config.grid(n), (put(indptr), out, np.int64(len(indptr) - 1), np.int64(n)))
        return out


def random_pattern(
    rng: np.random.Generator, rows: int, cols: int, blocks: int, transposed: bool = False, index: Any = np.int32
) -> Pattern:
    """Blocks in any order, some of them twice, and empty rows."""
    row = np.sort(rng.integers(0, rows, blocks) // 3 * 3)
    indptr = np.searchsorted(row, np.arange(rows + 1)).astype(index)
    indices = rng.integers(0, cols, blocks).astype(index)
    return Pattern(guarded(indices), guarded(indptr), rows, cols, transposed)


def assert_listed(pattern: Pattern, per_row: int, per_group: int, order: Any = None, backend: Any = HOST) -> Groups:
    got = work_list_launch.merged(pattern, per_row, per_group, None if order is None else guarded(order))
    want = work_list.merged(backend, pattern, per_row, per_group, order)
    assert got is not None and got.per_group == want.per_group
    assert_items(got, want)
    for name in ("first", "last", "columns", "blocks", "row_tiles"):
        mine, wanted = getattr(got, name), getattr(want, name)
        np.testing.assert_array_equal(mine, wanted, err_msg=name)
        assert mine.dtype == wanted.dtype
    return got


def assert_items(got: Groups, want: Groups) -> None:
    mine, wanted = work_list_launch.whole(got), work_list.whole(HOST, want)
    assert mine is not None and mine.pieces == wanted.pieces == 0
    for name in ("items", "count", "splits"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(wanted, name), err_msg=name)
        assert getattr(mine, name).dtype == np.int32


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("rows", "cols", "blocks", "per_row", "per_group"),
    [
        (1, 1, 1, 1, 2),
        (9, 7, 40, 1, 2),
        (9, 7, 90, 3, 4),
        (30, 40, 300, 2, 8),
        (5, 3, 60, 1, 8),
        (40, 50, 2500, 2, 4),
        (7, 9, 50, 2, 3),
    ],
)
def test_entries_are_those_of_the_reference(
    rows: int, cols: int, blocks: int, per_row: int, per_group: int, index: Any, transposed: bool, rng
) -> None:
    pattern = random_pattern(rng, rows, cols, blocks, transposed, index)
    padded = -(-pattern.shape[0] * per_row // per_group) * per_group
    assert_listed(pattern, per_row, per_group)
    assert_listed(pattern, per_row, per_group, rng.permutation(padded).astype(np.int32))


def test_duplicates_have_entries_of_their_own() -> None:
    pattern = Pattern(put(np.array([2, 2, 0, 2, 0], "i4")), put(np.array([0, 2, 5], "i4")), 2, 3, False)
    groups = assert_listed(pattern, 1, 2)
    assert groups.columns.tolist() == [0, 0, 2, 2, 3]
    assert groups.blocks.reshape(-1, 2).tolist() == [[-1, 2], [-1, 4], [0, -1], [1, 3], [-1, -1]]
    assert (groups.first.tolist(), groups.last.tolist()) == ([0], [4])


@pytest.mark.parametrize("place", [0, 1500, 2998])
def test_many_empty_groups_begin_where_the_next_one_does(place: int) -> None:
    """Empty rows before, between and after the rows with blocks."""
    rows = 3000
    indptr = np.zeros(rows + 1, np.int32)
    indptr[place + 1 :] += 3
    indptr[min(place + 700, rows) :] += 2
    pattern = Pattern(guarded(np.array([4, 1, 1, 0, 4], "i4")), guarded(indptr), rows, 5, False)
    assert_listed(pattern, 1, 2)


@pytest.mark.races
def test_keys_of_several_tiles(rng: np.random.Generator) -> None:
    """An entry may begin in one tile and end in the next, and all of a tile may be one duplicate."""
    pattern = random_pattern(rng, 12, 4, 5000)
    assert configs.WorkListKernel().tiles(5001)[0] > 4
    assert_listed(pattern, 1, 4)
    same = Pattern(put(np.zeros(3000, "i4")), put(np.array([0, 3000], "i4")), 1, 2, False)
    assert_listed(same, 1, 2)


def test_keys_that_end_where_a_tile_does() -> None:
    """Behind them lies the end of the last group, in a tile of its own."""
    config = configs.WorkListKernel()
    blocks = config.tiles(1)[1]
    assert config.tiles(blocks + 1)[0] == 2
    pattern = Pattern(
        put(np.arange(blocks, dtype="i4")), put(np.array([0, blocks, blocks, blocks], "i4")), 3, blocks, False
    )
    assert_listed(pattern, 1, 2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("damage", [-1, 7, 2**31 - 1, -(2**31)])
def test_spoiled_index_arrays_name_nothing_outside(damage: int, index: Any, transposed: bool, rng) -> None:
    for spoiled in ("indices", "indptr", "first", "last", "both"):
        pattern = random_pattern(rng, 6, 7, 60, transposed, index)
        if spoiled in ("indices", "both"):
            pattern.indices[[2, 9, 59]] = damage
        if spoiled in ("indptr", "both"):
            pattern.indptr[[2, 4]] = damage
        if spoiled == "first":
            pattern.indptr[0] = damage
        if spoiled == "last":
            pattern.indptr[-1] = damage
        order = row_matching.matched(pattern, 2, 4)
        assert sorted(order.tolist()) == list(range(len(order)))
        assert_listed(pattern, 2, 4, np.array(order, subok=False), Backend)


def test_nothing_in_front_of_arrays_is_touched(folder: Path, rng: np.random.Generator) -> None:
    with emulator.emulated(folder, lambda x: guarded(x, before=True)):
        for transposed in (False, True):
            pattern = random_pattern(rng, 6, 7, 60, transposed)
            spoiled = [guarded(x, before=True) for x in (pattern.indices, pattern.indptr)]
            spoiled[0][[0, 30]], spoiled[1][[0, 3]] = -1, -5
            assert_listed(Pattern(*spoiled, 6, 7, transposed), 2, 4, backend=Backend)


def test_a_matrix_without_rows_has_no_block_inside() -> None:
    pattern = Pattern(put(np.array([0, 1], "i4")), put(np.zeros(1, "i4")), 0, 2, True)
    groups = assert_listed(pattern, 1, 2, backend=Backend)
    assert groups.first.tolist() == groups.last.tolist() == [0]


def test_what_keys_cannot_hold_is_left_to_the_reference() -> None:
    none = Pattern(put(np.zeros(0, "i4")), put(np.zeros(5, "i4")), 4, 4, False)
    assert work_list_launch.merged(none, 1, 2) is None
    some = (put(np.zeros(4, "i8")), put(np.array([0, 4], "i8")), 1)
    assert work_list_launch.merged(Pattern(*some, 2**31, False), 1, 2) is None
    assert work_list_launch.merged(Pattern(*some, 2**31, True), 1, 2) is None
    assert work_list_launch.merged(Pattern(*some, 4, False), 2**29, 2) is None
    nothing = np.zeros(0, np.int32)
    assert work_list_launch.whole(Groups(nothing, nothing, nothing, nothing, nothing, 1)) is None


def test_items_come_longest_first_and_those_that_run_backwards_last() -> None:
    first, last = (put(np.array(x, np.int32)) for x in ([0, 5, 9, 3, 9, 2**31 - 1, 0], [5, 9, 3, 9, 9, 0, 2**31 - 1]))
    groups = Groups(first, last, first, first, first, 1)
    assert_items(groups, groups)


@pytest.mark.parametrize("per_group", [2, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_matched_slots_read_the_index_as_it_is(per_group: int, transposed: bool, rng: np.random.Generator) -> None:
    """Rows with the same columns, far from each other, share a group."""
    kinds = 4
    rows, cols = kinds * per_group, 40
    mine = np.arange(rows) % kinds
    row = np.repeat(np.arange(rows), cols // kinds)
    col = np.concatenate([rng.permutation(np.arange(k, cols, kinds)) for k in mine])
    if transposed:
        by = np.argsort(col, kind="stable")
        stored = (row[by], np.searchsorted(col[by], np.arange(cols + 1)), cols, rows)
    else:
        stored = (col, np.searchsorted(row, np.arange(rows + 1)), rows, cols)
    indices, indptr = (guarded(x.astype(np.int32)) for x in stored[:2])
    pattern = Pattern(indices, indptr, *stored[2:], transposed)
    order = row_matching.matched(pattern, 1, per_group)
    assert sorted(order.tolist()) == list(range(rows))
    assert (mine[order].reshape(kinds, per_group) == mine[order][::per_group, None]).all()
    assert_listed(pattern, 1, per_group, np.array(order, subok=False))


@pytest.mark.races
def test_rows_are_matched_by_all_of_their_columns() -> None:
    """Patterns are counted 1024 columns at a time; rows differ in the last columns, or in the first ones."""
    rows, cols, kinds = 8, 2100, 4
    mine = np.arange(rows) % kinds
    for differ in (2060, 0):
        everywhere = [5, 700, 1030, 1500, 2049]
        col = np.concatenate([sorted([*everywhere, *range(differ + 10 * k + 6, differ + 10 * k + 15)]) for k in mine])
        indptr = np.arange(rows + 1) * 14
        pattern = Pattern(*(guarded(x.astype(np.int64)) for x in (col, indptr)), rows, cols, False)
        order = row_matching.matched(pattern, 1, 2)
        assert sorted(order.tolist()) == list(range(rows))
        assert (mine[order].reshape(kinds, 2) == mine[order][::2, None]).all()


@pytest.mark.races
@pytest.mark.parametrize("transposed", [False, True])
def test_a_matrix_has_the_lists_of_the_reference(transposed: bool, rng: np.random.Generator) -> None:
    pattern = random_pattern(rng, 20, 11, 130, index=np.int64)

    class Matrix:
        data, indices, indptr = put(np.ones((130, 2, 2))), pattern.indices, pattern.indptr
        _shape, _backend = (40, 22), HOST

    ready = matrix_cache.MatrixCache(Matrix)
    used = ready.pattern(11, transposed)
    got = ready.groups(used, 2, 4)
    order = np.array(row_matching.matched(used, 2, 4), subok=False)
    want = work_list.merged(HOST, used, 2, 4, order)
    for name in ("first", "last", "columns", "blocks", "row_tiles"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    np.testing.assert_array_equal(ready.whole_items(used, 2, 4).items, work_list.whole(HOST, want).items)
