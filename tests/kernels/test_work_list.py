"""All that is promised of work_list and row_matching: work lists, number by number those of work_list.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._backend import registry
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products import lists, work_list
from bsrgemm._products.work_list import Groups, Pattern

from ..devices import Device


@pytest.fixture(autouse=True)
def any_card(device: Device) -> None:
    device.needs("sm_75")


def random_pattern(
    rng: np.random.Generator, rows: int, cols: int, blocks: int, transposed: bool = False, index: Any = np.int32
) -> Pattern:
    """Blocks in any order, some of them twice, and empty rows."""
    row = np.sort(rng.integers(0, rows, blocks) // 3 * 3)
    indptr = np.searchsorted(row, np.arange(rows + 1)).astype(index)
    return Pattern(rng.integers(0, cols, blocks).astype(index), indptr, rows, cols, transposed)


def pattern_of(indices: Any, indptr: Any, cols: int, transposed: bool = False) -> Pattern:
    indices, indptr = np.asarray(indices, "i4"), np.asarray(indptr, "i4")
    return Pattern(indices, indptr, len(indptr) - 1, cols, transposed)


def on(device: Device, x: Pattern) -> Pattern:
    return replace(x, indices=device.asarray(x.indices), indptr=device.asarray(x.indptr))


class Reference:
    """Arrays of NumPy; rows of entries as cuda/expand.cu finds them, whatever indptr holds."""

    xp = np

    def __init__(self, device: Device) -> None:
        self.device = device

    def expand(self, indptr: Any, n: int) -> Any:
        return self.device.asnumpy(registry.cuda().expand(self.device.asarray(indptr), n))


def assert_listed(
    device: Device, pattern: Pattern, per_row: int, per_group: int, order: Any = None, spoiled: bool = False
) -> Groups:
    """The groups on the host, which are those of the reference, and so are their items."""
    placed = None if order is None else device.asarray(order)
    got = lists.merged(on(device, pattern), per_row, per_group, placed)
    backend: Any = Reference(device) if spoiled else HOST
    want = work_list.merged(backend, pattern, per_row, per_group, order)
    assert got is not None and got.per_group == want.per_group
    assert_items(device, got, want)
    names = ("first", "last", "columns", "blocks", "row_tiles")
    found = Groups(*(device.asnumpy(getattr(got, name)) for name in names), per_group)
    for name in names:
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name), err_msg=name)
        assert getattr(found, name).dtype == getattr(want, name).dtype
    return found


def assert_items(device: Device, got: Groups, want: Groups) -> None:
    mine, wanted = lists.whole(got), work_list.whole(HOST, want)
    assert mine is not None and mine.pieces == wanted.pieces == 0
    for name in ("items", "count", "splits"):
        np.testing.assert_array_equal(device.asnumpy(getattr(mine, name)), getattr(wanted, name), err_msg=name)
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
        pytest.param(4000, 3000, 400_000, 2, 8, marks=pytest.mark.large),
    ],
)
def test_entries_are_those_of_the_reference(
    rows: int, cols: int, blocks: int, per_row: int, per_group: int, index: Any, transposed: bool, device: Device,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    pattern = random_pattern(rng, rows, cols, blocks, transposed, index)
    padded = -(-pattern.shape[0] * per_row // per_group) * per_group
    assert_listed(device, pattern, per_row, per_group)
    assert_listed(device, pattern, per_row, per_group, rng.permutation(padded).astype(np.int32))


def test_duplicates_have_entries_of_their_own(device: Device) -> None:
    groups = assert_listed(device, pattern_of([2, 2, 0, 2, 0], [0, 2, 5], 3), 1, 2)
    assert groups.columns.tolist() == [0, 0, 2, 2, 3]
    assert groups.blocks.reshape(-1, 2).tolist() == [[-1, 2], [-1, 4], [0, -1], [1, 3], [-1, -1]]
    assert (groups.first.tolist(), groups.last.tolist()) == ([0], [4])


@pytest.mark.parametrize("place", [0, 1500, 2998])
def test_many_empty_groups_begin_where_the_next_one_does(place: int, device: Device) -> None:
    """Empty rows before, between and after the rows with blocks."""
    rows = 3000
    indptr = np.zeros(rows + 1, np.int32)
    indptr[place + 1 :] += 3
    indptr[min(place + 700, rows) :] += 2
    assert_listed(device, pattern_of([4, 1, 1, 0, 4], indptr, 5), 1, 2)


@pytest.mark.races
def test_keys_of_several_tiles(device: Device, rng: np.random.Generator) -> None:
    """An entry may begin in one tile and end in the next, and all of a tile may be one duplicate."""
    assert lists.WorkListKernel().tiles(5001)[0] > 4
    assert_listed(device, random_pattern(rng, 12, 4, 5000), 1, 4)
    assert_listed(device, pattern_of(np.zeros(3000), [0, 3000], 2), 1, 2)


def test_keys_that_end_where_a_tile_does(device: Device) -> None:
    """Behind them lies the end of the last group, in a tile of its own."""
    config = lists.WorkListKernel()
    blocks = config.tiles(1)[1]
    assert config.tiles(blocks + 1)[0] == 2
    assert_listed(device, pattern_of(np.arange(blocks), [0, blocks, blocks, blocks], blocks), 1, 2)


@pytest.mark.before
@pytest.mark.sanitizer
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 1, -(2**31)])
def test_spoiled_index_arrays_name_nothing_outside(
    bad: int, index: Any, transposed: bool, device: Device, rng: np.random.Generator
) -> None:
    for spoiled in ("indices", "indptr", "first", "last", "both"):
        pattern = random_pattern(rng, 6, 7, 60, transposed, index)
        if spoiled in ("indices", "both"):
            pattern.indices[[2, 9, 59]] = bad
        if spoiled in ("indptr", "both"):
            pattern.indptr[[2, 4]] = bad
        if spoiled == "first":
            pattern.indptr[0] = bad
        if spoiled == "last":
            pattern.indptr[-1] = bad
        order = device.asnumpy(lists.matched(on(device, pattern), 2, 4))
        assert sorted(order.tolist()) == list(range(len(order)))
        assert_listed(device, pattern, 2, 4, order, spoiled=True)


def test_a_matrix_without_rows_has_no_block_inside(device: Device) -> None:
    groups = assert_listed(device, pattern_of([0, 1], [0], 2, True), 1, 2, spoiled=True)
    assert groups.first.tolist() == groups.last.tolist() == [0]


def test_what_keys_cannot_hold_is_left_to_the_reference(device: Device) -> None:
    assert lists.merged(on(device, pattern_of([], [0] * 5, 4)), 1, 2) is None
    some = (device.asarray(np.zeros(4, "i8")), device.asarray(np.array([0, 4], "i8")), 1)
    assert lists.merged(Pattern(*some, 2**31, False), 1, 2) is None
    assert lists.merged(Pattern(*some, 2**31, True), 1, 2) is None
    assert lists.merged(Pattern(*some, 4, False), 2**29, 2) is None
    nothing = device.asarray(np.zeros(0, np.int32))
    assert lists.whole(Groups(nothing, nothing, nothing, nothing, nothing, 1)) is None


def test_items_come_longest_first_and_those_that_run_backwards_last(device: Device) -> None:
    bounds = np.array([[0, 5, 9, 3, 9, 2**31 - 1, 0], [5, 9, 3, 9, 9, 0, 2**31 - 1]], np.int32)
    want = Groups(*bounds, *[bounds[0]] * 3, 1)
    first, last = map(device.asarray, bounds)
    assert_items(device, Groups(first, last, first, first, first, 1), want)


@pytest.mark.parametrize("per_group", [2, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_matched_slots_read_the_index_as_it_is(
    per_group: int, transposed: bool, device: Device, rng: np.random.Generator
) -> None:
    """Rows with the same columns, far from each other, share a group."""
    kinds = 4
    rows, cols = kinds * per_group, 40
    mine = np.arange(rows) % kinds
    row = np.repeat(np.arange(rows), cols // kinds)
    col = np.concatenate([rng.permutation(np.arange(k, cols, kinds)) for k in mine])
    if transposed:
        by = np.argsort(col, kind="stable")
        pattern = pattern_of(row[by], np.searchsorted(col[by], np.arange(cols + 1)), rows, True)
    else:
        pattern = pattern_of(col, np.searchsorted(row, np.arange(rows + 1)), cols)
    order = device.asnumpy(lists.matched(on(device, pattern), 1, per_group))
    assert sorted(order.tolist()) == list(range(rows))
    assert (mine[order].reshape(kinds, per_group) == mine[order][::per_group, None]).all()
    assert_listed(device, pattern, 1, per_group, order)


@pytest.mark.races
def test_rows_are_matched_by_all_of_their_columns(device: Device) -> None:
    """Patterns are counted 1024 columns at a time; rows differ in the last columns, or in the first ones."""
    rows, cols, kinds = 8, 2100, 4
    mine = np.arange(rows) % kinds
    for differ in (2060, 0):
        everywhere = [5, 700, 1030, 1500, 2049]
        col = np.concatenate([sorted([*everywhere, *range(differ + 10 * k + 6, differ + 10 * k + 15)]) for k in mine])
        pattern = Pattern(col.astype("i8"), np.arange(rows + 1) * 14, rows, cols, False)
        order = device.asnumpy(lists.matched(on(device, pattern), 1, 2))
        assert sorted(order.tolist()) == list(range(rows))
        assert (mine[order].reshape(kinds, 2) == mine[order][::2, None]).all()
