"""All that is promised of work_list, row_shares and row_matching: lists, number by number those of work_list.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._backend import registry
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products import lists, work_list
from bsrgemm._products.work_list import Groups, Items, Pattern, Share

from ..devices import Device
from ..products.row_shares import long_rows, shares


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
    return assert_groups(device, got, want)


def assert_groups(device: Device, got: Groups, want: Groups) -> Groups:
    names = ("bounds", "columns", "blocks", "row_tiles")
    found = Groups(*(device.asnumpy(getattr(got, name)) for name in names), got.per_group, got.alike)
    for name in names:
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name), err_msg=name)
        assert getattr(found, name).dtype == getattr(want, name).dtype
    assert (got.per_group, got.alike, got.count) == (want.per_group, want.alike, want.count)
    return found


def assert_items(device: Device, got: Groups, want: Groups, share: Share | None = None) -> Items:
    """The items on the host, which are those of the reference as far as there are any."""
    mine = lists.items(got, share)
    wanted = work_list.whole(HOST, want) if share is None else work_list.split(HOST, want, share)
    assert mine is not None and mine.pieces == wanted.pieces
    count = int(wanted.count[0])
    found = Items(*(device.asnumpy(getattr(mine, name)) for name in ("items", "count", "splits")), mine.pieces)
    np.testing.assert_array_equal(found.count, wanted.count)
    np.testing.assert_array_equal(found.items[:count], wanted.items[:count])
    np.testing.assert_array_equal(found.splits, wanted.splits[: mine.pieces])
    assert found.items.dtype == found.count.dtype == found.splits.dtype == np.int32
    return found


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
    for transposed in (False, True):
        assert lists.single(Pattern(*some, 2**31 - 1, transposed), 1) is None
        assert lists.single(Pattern(*some, 4, transposed), 2**31) is None
    nothing = device.asarray(np.zeros(0, np.int32))
    assert lists.single(Pattern(nothing, device.asarray(np.zeros(5, np.int32)), 4, 4, False), 1) is None
    empty = Groups(device.asarray(np.zeros(1, np.int32)), nothing, nothing, nothing, 1)
    assert lists.items(empty) is None and lists.items(empty, Share(64, 1, 9)) is None


def groups_between(bounds: Any, alike: int = 1) -> Groups:
    """Groups of which nothing but the bounds is read."""
    bounds = np.asarray(bounds, np.int32)
    return Groups(bounds, *[bounds[:0]] * 3, 1, alike)


def test_items_come_longest_first_and_those_that_run_backwards_last(device: Device) -> None:
    want = groups_between([0, 5, 9, 3, 9, 9, 2**31 - 1, 0, 2**31 - 1])
    got = replace(want, bounds=device.asarray(want.bounds))
    for share in (None, Share(64, 1, 9), Share(512, 2, 40)):
        assert_items(device, got, want, share)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("rows", "cols", "blocks", "per_row"),
    [
        (1, 1, 1, 1),
        (9, 7, 40, 1),
        (30, 40, 300, 3),
        (700, 3, 90, 2),
        (3, 700, 2500, 1),
        pytest.param(4000, 3000, 400_000, 2, marks=pytest.mark.large),
    ],
)
def test_groups_of_one_row_tile_have_the_blocks_of_its_row(
    rows: int, cols: int, blocks: int, per_row: int, index: Any, transposed: bool, device: Device,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    pattern = random_pattern(rng, rows, cols, blocks, transposed, index)
    got, want = lists.single(on(device, pattern), per_row), work_list.single(HOST, pattern, per_row)
    assert got is not None
    assert_groups(device, got, want)
    for share in (None, Share(64, 1, 9), Share(512, 2, 40)):
        assert_items(device, got, want, share)


@pytest.mark.before
@pytest.mark.sanitizer
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 1, -(2**31)])
def test_spoiled_rows_name_nothing_outside(
    bad: int, index: Any, transposed: bool, device: Device, rng: np.random.Generator
) -> None:
    bad = bad << 20 if index is np.int64 else bad  # whose lower half is harmless
    backend: Any = Reference(device)
    for spoiled in ("indices", "indptr", "first", "last"):
        pattern = random_pattern(rng, 6, 7, 60, transposed, index)
        if spoiled == "indices":
            pattern.indices[[2, 9, 59]] = bad
        else:
            pattern.indptr[{"indptr": [2, 4], "first": 0, "last": -1}[spoiled]] = bad
        got, want = lists.single(on(device, pattern), 2), work_list.single(backend, pattern, 2)
        assert got is not None
        found = assert_groups(device, got, want)
        assert found.bounds.min() >= 0 and found.bounds.max() <= len(pattern.indices)
        for share in (None, Share(512, 1, 30)):
            items = assert_items(device, got, want, share).items
            assert items[:, :3].min() >= 0 and items[:, 1:3].max() <= len(pattern.indices)


@pytest.mark.races
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [
        *([3], [0, 0, 0], [2000], [1, 2000, 1], [0, 500, 500, 3, 500, 0]),
        *([7] * 300, [*range(290)], [10] * 256 + [9000] + [0] * 20),
    ],
    ids=lambda x: f"{len(x)} rows of {max(x)}",
)
def test_items_are_those_of_the_reference_by_one_cta_and_by_several(
    lengths: list[int], many: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long groups are cut into pieces, equally long items keep the order of their groups."""
    if many:
        monkeypatch.setattr(lists.WorkListKernel, "most_sorted", 0)
        monkeypatch.setattr(lists.WorkListKernel, "tiles", lambda self, n: (-(-n // 100), 100))
    for alike in (1, 3):
        want = groups_between(np.cumsum([0, *lengths]), alike)
        got = replace(want, bounds=device.asarray(want.bounds))
        for share in (None, Share(64, 1, 9), Share(512, 1, 132), Share(128, 7, 40)):
            assert_items(device, got, want, share)


def test_as_many_items_as_one_cta_sorts_and_one_more(device: Device, rng: np.random.Generator) -> None:
    most, share = lists.WorkListKernel.most_sorted, Share(512, 1, 60)
    for rows in (most - share.most_pieces, most - share.most_pieces + 1):
        want = groups_between(np.append(0, np.cumsum(rng.integers(0, 9, rows))))
        assert_items(device, replace(want, bounds=device.asarray(want.bounds)), want, share)


# ------------------------------------------------------------------------------------------------- rows
def assert_rows(device: Device, indptr: Any, blocks: int, longest: int, piece: int, count: int) -> None:
    got, bounds = lists.row_shares(device.asarray(indptr), blocks, longest, piece, count)
    want = long_rows(indptr, blocks, longest, piece)
    pieces = int(want.count[0])
    assert got.bound == want.bound
    for name, wanted in (("count", want.count), ("pieces", want.pieces[:pieces]), ("parents", want.parents[:pieces])):
        found = device.asnumpy(getattr(got, name))
        np.testing.assert_array_equal(found[: len(wanted)], wanted, err_msg=name)
        assert found.dtype == np.int32
    assert (bounds is None) == (count == 0)
    if bounds is not None:
        np.testing.assert_array_equal(device.asnumpy(bounds), shares(indptr, longest, count))


@pytest.mark.races
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(
    "lengths",
    [
        *([0], [40], [0, 0, 0, 0], [40, 1, 0, 3, 2, 7, 1, 5], [8] * 20, [9] * 20, [0] * 900 + [300] + [2] * 2000),
        pytest.param([3, 700, 0, 27] * 100_000, marks=pytest.mark.large),
    ],
    ids=lambda x: f"{len(x)} rows of {max(x)}",
)
def test_long_rows_are_cut_and_all_rows_are_shared(lengths: list[int], index: Any, device: Device) -> None:
    indptr = np.append(0, np.cumsum(lengths)).astype(index)
    for longest, piece, count in ((8, 8, 1), (8, 20, 7), (256, 512, 0), (2, 3, 132)):
        assert_rows(device, indptr, int(indptr[-1]), longest, piece, count)


@pytest.mark.before
@pytest.mark.sanitizer
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 1, -(2**31)])
def test_spoiled_rows_are_shared_in_order(bad: int, index: Any, device: Device) -> None:
    good = np.append(0, np.cumsum([3, 22, 0, 8, 17, 1, 0, 2])).astype(index)
    for places in ([0], [2, 4], [1, 2, 3], [-1], [*range(0, 9, 2)], [*range(9)]):
        indptr = good.copy()
        indptr[places] = bad
        assert_rows(device, indptr, int(good[-1]), 8, 10, 5)


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
