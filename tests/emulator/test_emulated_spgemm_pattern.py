"""spgemm_pattern.cu on the CPU: which blocks of two matrices meet, beside what a sort of all pairs finds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from bsrgemm._backend.base import Blocks
from bsrgemm._kernels import device, workspace
from bsrgemm._products import spgemm_pattern
from bsrgemm._products.engine import ProductEngine
from bsrgemm._products.host import ENGINE

from . import emulator
from .emulator import guarded


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    """A read or a write beyond the end of an array ends the process."""
    with emulator.emulated(folder, guarded):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def pattern(rng: np.random.Generator, rows: int, cols: int, most: int, index: Any = np.int32) -> Blocks:
    """Rows of up to `most` blocks in any order, some of them twice."""
    lengths = rng.integers(0, most + 1, rows)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return Blocks(None, guarded(rng.integers(0, cols, indptr[-1]).astype(index)), guarded(indptr.astype(index)))


@pytest.fixture(params=["at once", "in steps"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Patterns are listed by one kernel, or by three."""
    with contextlib.ExitStack() as stack:
        if request.param == "in steps":
            stack.enter_context(patch.object(spgemm_pattern, "_MOST_ROOM", 0))
        yield request.param


def assert_met(a: Blocks, b: Blocks, cols: int) -> None:
    got, want = spgemm_pattern.product_pattern(a, b, cols), ProductEngine.product_pattern(ENGINE, a, b, cols)
    assert got is not None
    for name, mine, wanted in zip(got._fields, got, want, strict=True):
        np.testing.assert_array_equal(mine, wanted, err_msg=name)
    assert got.indices.dtype == got.indptr.dtype == want.indices.dtype


@pytest.mark.races
@pytest.mark.parametrize(
    ("rows", "inner", "cols", "most"), [(5, 7, 6, 4), (9, 40, 300, 12), (2, 50, 9, 70), (1, 3, 100_000, 40)]
)
def test_pairs_and_columns_are_those_of_a_sort(
    rows: int, inner: int, cols: int, most: int, way: str, rng: np.random.Generator
) -> None:
    assert_met(pattern(rng, rows, inner, most), pattern(rng, inner, cols, most), cols)


@pytest.mark.parametrize("most", [1, 2])
def test_rows_beyond_a_small_grid(most: int, way: str, rng: np.random.Generator) -> None:
    with emulator.few_ctas(most):
        assert_met(pattern(rng, 90, 30, 4), pattern(rng, 30, 40, 4), 40)


def test_wide_indices_of_either_matrix(way: str, rng: np.random.Generator) -> None:
    for index in ((np.int64, np.int32), (np.int32, np.int64)):
        assert_met(pattern(rng, 6, 5, 4, index[0]), pattern(rng, 5, 8, 4, index[1]), 8)


def test_rows_without_blocks_and_blocks_that_meet_none(way: str, rng: np.random.Generator) -> None:
    a = Blocks(None, guarded(np.array([1, 0, 2, 1], "i4")), guarded(np.array([0, 0, 2, 2, 4, 4], "i4")))
    b = Blocks(None, guarded(np.array([3, 1], "i4")), guarded(np.array([0, 0, 2, 2], "i4")))
    assert_met(a, b, 4)


def test_columns_out_of_range_meet_nothing_and_touch_nothing(way: str) -> None:
    a = Blocks(None, guarded(np.array([1, -3, 9, 0], "i4")), guarded(np.array([0, 3, 4], "i4")))
    b = Blocks(None, guarded(np.array([0, 7, 2, -1], "i4")), guarded(np.array([0, 2, 4], "i4")))
    found = spgemm_pattern.product_pattern(a, b, 3)
    assert found is not None
    assert found.indptr.tolist() == [0, 1, 2] and found.indices.tolist() == [2, 0]
    if way == "at once":
        assert found.left.tolist() == [0, 3] and found.right.tolist() == [2, 0] and found.starts.tolist() == [0, 1]
    else:
        assert found.left.tolist() == [0, -1, 3, -1] and found.right.tolist() == [2, -1, 0, -1]
        assert found.starts.tolist() == [0, 2]


@pytest.mark.parametrize("damage", [-5, 9, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("before", [False, True])
def test_index_arrays_that_were_spoiled_touch_nothing_outside(
    damage: int, before: bool, way: str, folder: Path, rng: np.random.Generator
) -> None:
    """What was not spoiled is found as before: rows and columns out of range have no pairs, bounds are clamped."""

    def put(x: Any) -> Any:
        return guarded(x, before)

    with emulator.emulated(folder, put):
        for which in range(4):
            arrays = [
                np.array(x, "i4") for x in ([1, 0, 2, 1, 0], [0, 2, 3, 5], [3, 1, 0, 2, 1, 0], [0, 2, 3, 6])
            ]  # indices and bounds of a, of b
            arrays[which][1] = damage
            a_indices, a_bounds, b_indices, b_bounds = arrays
            met: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for i in range(3):
                for p in range(max(0, a_bounds[i]), min(5, a_bounds[i + 1])):
                    r = a_indices[p]
                    for q in range(max(0, b_bounds[r]), min(6, b_bounds[r + 1])) if 0 <= r < 3 else ():
                        if 0 <= b_indices[q] < 4:
                            met.setdefault((i, int(b_indices[q])), []).append((p, q))
            found = spgemm_pattern.product_pattern(
                Blocks(None, *map(put, arrays[:2])), Blocks(None, *map(put, arrays[2:])), 4
            )
            assert found is not None
            rows = np.repeat(np.arange(3), np.diff(found.indptr))
            assert list(zip(rows.tolist(), found.indices.tolist(), strict=True)) == sorted(met)
            for n, place in enumerate(sorted(met)):
                first = int(found.starts[n])
                pairs = zip(found.left[first:].tolist(), found.right[first:].tolist(), strict=True)
                assert [next(pairs) for _ in met[place]] == met[place]


def test_nothing_meets(rng: np.random.Generator) -> None:
    empty = Blocks(None, guarded(np.zeros(0, "i4")), guarded(np.zeros(4, "i4")))
    assert spgemm_pattern.product_pattern(empty, empty, 3) is None
    assert spgemm_pattern.product_pattern(Blocks(None, empty.indices, guarded(np.zeros(1, "i4"))), empty, 3) is None


def test_rows_with_more_columns_than_a_table_are_left_to_the_sort(rng: np.random.Generator) -> None:
    a, b = pattern(rng, 3, 30, 20), pattern(rng, 30, 500, 20)
    assert_met(a, b, 500)
    with (
        patch.object(device, "shared_bytes_per_block", lambda: 1024),
        patch.object(spgemm_pattern, "_MOST_COLUMNS", 499),
    ):
        assert spgemm_pattern.product_pattern(a, b, 500) is None


def test_more_pairs_than_a_matrix_without_duplicates_has_are_listed_in_steps(rng: np.random.Generator) -> None:
    """All blocks of B twice: the lists have memory for half of the pairs."""
    a = Blocks(None, guarded(np.array([0, 1, 0], "i4")), guarded(np.array([0, 2, 3], "i4")))
    b = Blocks(None, guarded(np.array([0, 1, 2] * 4, "i4")), guarded(np.array([0, 6, 12], "i4")))
    listing = spgemm_pattern.begin(a, b, 3)
    assert listing is not None and listing.finish() is None
    assert_met(a, b, 3)
    fits = spgemm_pattern.begin(a, Blocks(None, guarded(b.indices[:6]), guarded(b.indptr // 2)), 3)
    assert fits is not None and fits.finish() == (9, 6)


def test_counters_are_left_at_zero(rng: np.random.Generator) -> None:
    for _ in range(3):
        assert spgemm_pattern.begin(pattern(rng, 40, 9, 5), pattern(rng, 9, 12, 5), 12) is not None
        (counters,) = workspace._zeroed.values()
        assert not counters.any()


def test_indices_are_copied_only_if_most_of_their_memory_is_unused() -> None:
    few = Blocks(None, guarded(np.array([0, 0, 0], "i4")), guarded(np.array([0, 1, 2, 3], "i4")))
    for columns, is_copy in ((3, True), (1, False)):
        b = Blocks(None, guarded(np.array([0], "i4")), guarded(np.array([0, 1], "i4")))
        listing = spgemm_pattern.begin(few, Blocks(None, guarded(np.repeat(b.indices, columns)), b.indptr), columns)
        assert listing is not None and listing.finish() == (3, 3)
        indices, indptr = listing.index(3)
        assert indices.tolist() == [0, 0, 0] and indptr.tolist() == [0, 1, 2, 3]
        assert np.shares_memory(indices, listing.indices) != is_copy


OF_ROW, OF_ALL, MOST = 1 << 62, 1 << 63, 2**31 - 1


def listed_from(a: Blocks, b: Blocks, cols: int, sums: list[int]) -> spgemm_pattern.Listing:
    """What `list_at_once` lists where other CTAs have claimed the first rows and left these sums."""
    kept = guarded(np.zeros(2 * len(a.indptr), np.int32))
    kept[0] = len(sums)
    kept[2 : 2 + 2 * len(sums)].view(np.uint64)[...] = sums
    with patch.object(workspace, "counters", lambda n: kept):
        listing = spgemm_pattern.begin(a, b, cols)
    assert listing is not None and not kept.any()
    return listing


@pytest.mark.parametrize("known", [[0], [0, 5], [0, 37], [0, 38], [0, 69], [0, 6, 45]], ids=str)
def test_a_row_adds_up_what_rows_before_it_have_said(known: list[int], rng: np.random.Generator) -> None:
    """Rows that know only their own sum are added, 32 at a time, back to the nearest row that knows all before it."""
    a, b = pattern(rng, 75, 9, 5), pattern(rng, 9, 12, 5)
    want, done = spgemm_pattern.product_pattern(a, b, 12), 70
    assert want is not None
    ends = np.append(want.starts, len(want.left))[want.indptr]  # pairs before each row
    sums = []
    for i in range(done):
        pairs, columns = (int(x[i + 1] - (0 if i in known else x[i])) for x in (ends, want.indptr))
        word = (OF_ALL if i in known else OF_ROW) | pairs << 31 | columns
        if i == max(known) - 1:
            word = OF_ROW | MOST << 31 | MOST  # what lies before the nearest row that knows all does not count
        sums.append(word if i >= max(known) - 1 else 0)  # nor is it waited for
    listing = listed_from(a, b, 12, sums)
    pairs, blocks = int(ends[done]), int(want.indptr[done])
    assert listing.finish() == (len(want.left), len(want.indices))
    np.testing.assert_array_equal(listing.indptr[done + 1 :], want.indptr[done + 1 :])
    for mine, wanted, first in (
        (listing.left, want.left, pairs),
        (listing.right, want.right, pairs),
        (listing.starts, want.starts, blocks),
        (listing.indices, want.indices, blocks),
    ):
        np.testing.assert_array_equal(mine[first : len(wanted)], wanted[first:])


@pytest.mark.parametrize(("pairs", "columns"), [(MOST - 1, 3), (MOST, 3), (3, MOST - 1), (MOST, MOST)])
def test_sums_stay_where_31_bits_end(pairs: int, columns: int, rng: np.random.Generator) -> None:
    a, b = pattern(rng, 20, 9, 5), pattern(rng, 9, 12, 5)
    a.indptr[4:] = np.arange(4, 21)  # every row has a block, and meets some
    a.indices[:] = int(np.diff(b.indptr).argmax())
    own = int(np.diff(b.indptr).max()) * 16, len(set(b.indices[slice(*b.indptr[a.indices[0] :][:2])].tolist())) * 16
    listing = listed_from(a, b, 12, [OF_ALL | pairs << 31 | columns] * 4)
    assert listing._totals.tolist() == [min(MOST, pairs + own[0]), min(MOST, columns + own[1])]
    assert listing.finish() is None
