"""The work list of a pattern: every block once, in the right slot, longest items first, long groups in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsrgemm._backend import registry
from bsrgemm._products import work_list
from bsrgemm._products.work_list import Groups, Items, Pattern, Share

HOST = registry.host()


@st.composite
def cases(draw: Any) -> tuple[Pattern, list[int], int, int, Groups]:
    """A pattern with duplicates in any order, and its slots in groups of some order."""
    rows, cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = np.sort(rng.integers(0, rows, draw(st.integers(0, 2 * rows * cols))))
    indices = rng.integers(0, cols, len(row)).astype(draw(st.sampled_from([np.int32, np.int64])))
    indptr = np.searchsorted(row, np.arange(rows + 1)).astype(indices.dtype)
    pattern = Pattern(indices, indptr, rows, cols, draw(st.booleans()))
    per_row, per_group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 8]))
    if per_group == 1:
        groups = work_list.single(HOST, pattern, per_row)
    else:
        padded = -(-pattern.shape[0] * per_row // per_group) * per_group
        order = rng.permutation(padded).astype(np.int32) if draw(st.booleans()) else None
        groups = work_list.merged(HOST, pattern, per_row, per_group, order)
    return pattern, row.tolist(), per_row, per_group, groups


def blocks_of(groups: Groups, items: Items) -> list[tuple[int, int, int]]:
    """(slot, column, block) of everything that the items do."""
    done = []
    for group, first, last, _ in items.items[: int(items.count[0])].tolist():
        for e in range(first, last):
            for s in range(groups.per_group):
                block = int(groups.blocks[e * groups.per_group + s])
                if block >= 0:
                    done.append((int(groups.row_tiles[group * groups.per_group + s]), int(groups.columns[e]), block))
    return sorted(done)


@given(cases(), st.integers(1, 5), st.integers(1, 20), st.sampled_from([16, 128, 512]))
def test_every_block_is_done_once_for_each_of_its_slots(case: Any, column_tiles: int, ctas: int, K: int) -> None:
    pattern, rows, per_row, _, groups = case
    want = sorted(
        (int(col if pattern.transposed else row) * per_row + sub, int(row if pattern.transposed else col), block)
        for block, (row, col) in enumerate(zip(rows, pattern.indices, strict=True))
        for sub in range(per_row)
    )
    assert {a.dtype for a in (groups.first, groups.last, groups.columns, groups.blocks, groups.row_tiles)} == {
        np.dtype(np.int32)
    }
    for items in (work_list.whole(HOST, groups), work_list.split(HOST, groups, Share(K, column_tiles, ctas))):
        assert blocks_of(groups, items) == want
        lengths = [last - first for _, first, last, _ in items.items[: int(items.count[0])].tolist()]
        assert lengths == sorted(lengths, reverse=True)
        assert items.items.dtype == np.int32 and items.items.flags.c_contiguous


@given(cases(), st.integers(1, 5), st.integers(1, 20))
def test_pieces_know_their_group_and_fit_the_room_made_for_them(case: Any, column_tiles: int, ctas: int) -> None:
    groups = case[-1]
    items = work_list.split(HOST, groups, Share(256, column_tiles, ctas))
    seen: dict[int, list[int]] = {}
    for group, _, _, piece in items.items[: int(items.count[0])].tolist():
        if piece >= 0:
            first_piece, pieces, first, last = items.splits[piece].tolist()
            assert piece < items.pieces == Share(256, column_tiles, ctas).most_pieces
            assert first_piece <= piece < first_piece + pieces
            assert (first, last) == (groups.first[group], groups.last[group])
            seen.setdefault(first_piece, []).append(piece)
    for first_piece, pieces in seen.items():
        assert sorted(pieces) == list(range(first_piece, first_piece + int(items.splits[first_piece, 1])))


def test_a_long_row_is_cut_to_a_fair_share() -> None:
    rows, cols = 20, 1000
    indptr = np.array([0, cols, *range(cols + 1, cols + rows)])
    indices = np.array([*range(cols), *range(rows - 1)])
    pattern = Pattern(indices, indptr, rows, cols, False)
    groups = work_list.single(HOST, pattern, 1)
    assert work_list.may_split(groups, pattern, Share(128, 1, 100))
    items = work_list.split(HOST, groups, Share(128, 1, 100))
    lengths = [last - first for _, first, last, _ in items.items[: int(items.count[0])].tolist()]
    assert max(lengths) <= 1.15 * len(indices) / 100 + 1
    assert not work_list.may_split(groups, pattern, Share(128, 64, 8))  # eight CTAs have work enough


@pytest.mark.parametrize("damage", [-1, 7, 2**31 - 1, -(2**31)])
def test_spoiled_index_arrays_name_no_block_or_column_outside(damage: int) -> None:
    rng = np.random.default_rng(0)
    row = np.sort(rng.integers(0, 6, 20))
    good = rng.integers(0, 7, 20).astype(np.int32), np.searchsorted(row, np.arange(7)).astype(np.int32)
    for spoiled in (0, 1):
        indices, indptr = (x.copy() for x in good)
        (indices, indptr)[spoiled][2] = damage
        straight = Pattern(indices, indptr, 6, 7, False)
        cases = [(straight, work_list.single(HOST, straight, 2))]
        if spoiled == 0:  # the host's own loops refuse a pointer that runs backwards
            for transposed in (False, True):
                pattern = Pattern(indices, indptr, 6, 7, transposed)
                cases += [
                    (pattern, work_list.merged(HOST, pattern, 2, 4)),
                    (pattern, work_list.single(HOST, pattern, 2)),
                ]
        for pattern, groups in cases:
            for items in (work_list.whole(HOST, groups), work_list.split(HOST, groups, Share(64, 2, 9))):
                rows, cols = pattern.shape
                for slot, column, block in blocks_of(groups, items):
                    assert 0 <= slot < 2 * rows and 0 <= column <= cols and 0 <= block < 20


def test_entries_come_by_column_with_duplicates_and_blocks_outside_on_their_own() -> None:
    indices, indptr = np.array([2, 2, 9, 0, 2, 1], np.int32), np.array([0, 3, 5, 6], np.int32)
    pattern = Pattern(indices, indptr, 3, 3, False)
    groups = work_list.merged(HOST, pattern, 1, 2, np.array([1, 0, 3, 2], np.int32))
    assert groups.row_tiles.tolist() == [1, 0, -1, 2]
    assert (groups.first.tolist(), groups.last.tolist()) == ([0, 3], [3, 4])
    assert groups.columns.tolist() == [0, 2, 2, 1, 3, 3]
    assert groups.blocks.reshape(-1, 2).tolist() == [[3, -1], [4, 0], [-1, 1], [-1, 5], [2, -1], [-1, -1]]
    assert work_list.whole(HOST, groups).items.tolist() == [[0, 0, 3, -1], [1, 3, 4, -1]]


@pytest.mark.parametrize(
    "per_group, per_row, entries, cols, share, split",
    [
        (1, 1, 1000, 12, Share(64, 1, 100), True),  # a fair share has int(11.5) entries
        (1, 1, 1000, 11, Share(64, 1, 100), False),
        (1, 2, 1000, 24, Share(64, 1, 100), True),  # both row tiles of a block row have all of its entries
        (1, 2, 1000, 23, Share(64, 1, 100), False),
        (2, 1, 4000, 12, Share(64, 1, 100), True),  # if both row tiles of a group have every entry
        (2, 1, 4000, 11, Share(64, 1, 100), False),
        (1, 1, 10, 9, Share(64, 1, 100), True),  # at least 512 columns of A, in blocks of 64
        (1, 1, 10, 8, Share(64, 1, 100), False),
        (1, 1, 10, 6, Share(100, 1, 100), False),
        (1, 1, 10, 7, Share(100, 1, 100), True),
        (1, 1, 1000, 10**6, Share(64, 201, 100), False),  # more column tiles than twice the CTAs
        (1, 1, 1000, 10**6, Share(64, 200, 100), True),
    ],
)
def test_a_group_may_be_cut_where_it_can_exceed_a_fair_share(
    per_group: int, per_row: int, entries: int, cols: int, share: Share, split: bool
) -> None:
    rows = 10
    count = rows * per_row // per_group
    groups = Groups(np.zeros(count + 1, np.int32), np.zeros(0), np.zeros(entries), np.zeros(0), per_group)
    pattern = Pattern(np.zeros(0), np.zeros(rows + 1), rows, cols, False)
    assert work_list.may_split(groups, pattern, share) == split
