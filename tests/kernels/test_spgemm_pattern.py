"""All that is promised of spgemm_pattern: which blocks of two matrices meet, as a sort of all pairs finds them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._backend.base import Blocks
from bsrgemm._kernels import workspace
from bsrgemm._kernels.card import Card
from bsrgemm._products import spgemm_pattern
from bsrgemm._products.engine import ProductEngine
from bsrgemm._products.host import ENGINE

from ..devices import Device
from .products import few_ctas


@pytest.fixture(autouse=True)
def any_card(device: Device) -> None:
    device.needs("sm_75")


@pytest.fixture(params=["at once", "in steps"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Patterns are listed by one kernel, or by three."""
    if request.param == "in steps":
        monkeypatch.setattr(spgemm_pattern, "_MOST_ROOM", 0)
    return str(request.param)


def pattern(rng: np.random.Generator, rows: int, cols: int, most: int, index: Any = np.int32) -> Blocks:
    """Rows of up to `most` blocks in any order, some of them twice."""
    lengths = rng.integers(0, most + 1, rows)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return Blocks(None, rng.integers(0, cols, indptr[-1]).astype(index), indptr.astype(index))


def blocks(indices: Any, indptr: Any) -> Blocks:
    return Blocks(None, np.array(indices, "i4"), np.array(indptr, "i4"))


def on(device: Device, x: Blocks) -> Blocks:
    return Blocks(None, device.asarray(x.indices), device.asarray(x.indptr))


def listed(device: Device, a: Blocks, b: Blocks, cols: int) -> Any:
    """What the kernels find, on the host; None if they leave it to a sort."""
    found = spgemm_pattern.product_pattern(on(device, a), on(device, b), cols)
    return None if found is None else type(found)(*map(device.asnumpy, found))


def assert_met(device: Device, a: Blocks, b: Blocks, cols: int) -> None:
    got, want = listed(device, a, b, cols), ProductEngine.product_pattern(ENGINE, a, b, cols)
    assert got is not None
    for name, mine, wanted in zip(got._fields, got, want, strict=True):
        np.testing.assert_array_equal(mine, wanted, err_msg=name)
    assert got.indices.dtype == got.indptr.dtype == want.indices.dtype


@pytest.mark.races
@pytest.mark.parametrize(
    ("rows", "inner", "cols", "most"),
    [
        *((5, 7, 6, 4), (9, 40, 300, 12), (2, 50, 9, 70), (1, 3, 100_000, 40)),
        *(
            pytest.param(*sizes, marks=pytest.mark.large)
            for sizes in ((1000, 800, 70_000, 40), (7, 2000, 100_000, 90), (3000, 3000, 3000, 70), (300, 300, 300, 200))
        ),
    ],
)
def test_pairs_and_columns_are_those_of_a_sort(
    rows: int, inner: int, cols: int, most: int, way: str, device: Device, rng: np.random.Generator
) -> None:
    assert_met(device, pattern(rng, rows, inner, most), pattern(rng, inner, cols, most), cols)


@pytest.mark.emulated
@pytest.mark.parametrize("most", [1, 2])
def test_rows_beyond_a_small_grid(most: int, way: str, device: Device, rng: np.random.Generator) -> None:
    with few_ctas(most):
        assert_met(device, pattern(rng, 90, 30, 4), pattern(rng, 30, 40, 4), 40)


def test_wide_indices_of_either_matrix(way: str, device: Device, rng: np.random.Generator) -> None:
    for index in ((np.int64, np.int32), (np.int32, np.int64)):
        assert_met(device, pattern(rng, 6, 5, 4, index[0]), pattern(rng, 5, 8, 4, index[1]), 8)


def test_rows_without_blocks_and_blocks_that_meet_none(way: str, device: Device) -> None:
    assert_met(device, blocks([1, 0, 2, 1], [0, 0, 2, 2, 4, 4]), blocks([3, 1], [0, 0, 2, 2]), 4)


def test_columns_out_of_range_meet_nothing_and_touch_nothing(way: str, device: Device) -> None:
    found = listed(device, blocks([1, -3, 9, 0], [0, 3, 4]), blocks([0, 7, 2, -1], [0, 2, 4]), 3)
    assert found.indptr.tolist() == [0, 1, 2] and found.indices.tolist() == [2, 0]
    if way == "at once":
        assert found.left.tolist() == [0, 3] and found.right.tolist() == [2, 0] and found.starts.tolist() == [0, 1]
    else:
        assert found.left.tolist() == [0, -1, 3, -1] and found.right.tolist() == [2, -1, 0, -1]
        assert found.starts.tolist() == [0, 2]


@pytest.mark.before
@pytest.mark.sanitizer
@pytest.mark.parametrize("bad", [-5, 9, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("which", range(4))
def test_index_arrays_that_were_spoiled_touch_nothing_outside(which: int, bad: int, way: str, device: Device) -> None:
    """What was not spoiled is found as before: rows and columns out of range have no pairs, bounds are clamped."""
    arrays = [np.array(x, "i4") for x in ([1, 0, 2, 1, 0], [0, 2, 3, 5], [3, 1, 0, 2, 1, 0], [0, 2, 3, 6])]
    arrays[which][1] = bad
    a_indices, a_bounds, b_indices, b_bounds = arrays
    met: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i in range(3):
        for p in range(max(0, a_bounds[i]), min(5, a_bounds[i + 1])):
            r = a_indices[p]
            for q in range(max(0, b_bounds[r]), min(6, b_bounds[r + 1])) if 0 <= r < 3 else ():
                if 0 <= b_indices[q] < 4:
                    met.setdefault((i, int(b_indices[q])), []).append((p, q))
    found = listed(device, Blocks(None, *arrays[:2]), Blocks(None, *arrays[2:]), 4)
    rows = np.repeat(np.arange(3), np.diff(found.indptr))
    assert list(zip(rows.tolist(), found.indices.tolist(), strict=True)) == sorted(met)
    for n, place in enumerate(sorted(met)):
        first = int(found.starts[n])
        pairs = zip(found.left[first:].tolist(), found.right[first:].tolist(), strict=True)
        assert [next(pairs) for _ in met[place]] == met[place]


def test_nothing_meets(device: Device) -> None:
    empty = blocks([], [0, 0, 0, 0])
    assert listed(device, empty, empty, 3) is None
    assert listed(device, blocks([], [0]), empty, 3) is None


def test_rows_with_more_columns_than_a_table_are_left_to_the_sort(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pattern(rng, 3, 30, 20), pattern(rng, 30, 500, 20)
    assert_met(device, a, b, 500)
    monkeypatch.setattr(spgemm_pattern, "card", lambda: Card(device.arch, 1, shared_bytes=1024))
    monkeypatch.setattr(spgemm_pattern, "_MOST_COLUMNS", 499)
    assert listed(device, a, b, 500) is None


def test_more_pairs_than_a_matrix_without_duplicates_has_are_listed_in_steps(device: Device) -> None:
    """All blocks of B twice: the lists have memory for half of the pairs."""
    a, b = blocks([0, 1, 0], [0, 2, 3]), blocks([0, 1, 2] * 4, [0, 6, 12])
    listing = spgemm_pattern.begin(on(device, a), on(device, b), 3)
    assert listing is not None and listing.finish() is None
    assert_met(device, a, b, 3)
    fits = spgemm_pattern.begin(on(device, a), on(device, Blocks(None, b.indices[:6], b.indptr // 2)), 3)
    assert fits is not None and fits.finish() == (9, 6)


def test_indices_are_copied_only_if_most_of_their_memory_is_unused(device: Device) -> None:
    few = on(device, blocks([0, 0, 0], [0, 1, 2, 3]))
    for columns, is_copy in ((3, True), (1, False)):
        listing = spgemm_pattern.begin(few, on(device, blocks([0] * columns, [0, 1])), columns)
        assert listing is not None and listing.finish() == (3, 3)
        indices, indptr = (device.asnumpy(x) for x in listing.index(3))
        assert indices.tolist() == [0, 0, 0] and indptr.tolist() == [0, 1, 2, 3]
        assert device.cupy.may_share_memory(listing.index(3)[0], listing.indices) != is_copy


# ------------------------------------------------------------------------------- what CTAs say to each other
OF_ROW, OF_ALL, MOST = 1 << 62, 1 << 63, 2**31 - 1


def listed_from(device: Device, a: Blocks, b: Blocks, cols: int, sums: list[int]) -> spgemm_pattern.Listing:
    """What `list_at_once` lists where other CTAs have claimed the first rows and left these sums."""
    words = np.zeros(len(a.indptr), np.uint64)
    words[0] = len(sums)
    words[1 : 1 + len(sums)] = np.array(sums, np.uint64)
    kept = device.asarray(words.view(np.int32))
    with patch.object(workspace, "counters", lambda n: kept):
        listing = spgemm_pattern.begin(on(device, a), on(device, b), cols)
    assert listing is not None and not device.asnumpy(kept).any()
    return listing


@pytest.mark.parametrize("known", [[0], [0, 5], [0, 37], [0, 38], [0, 69], [0, 6, 45]], ids=str)
def test_a_row_adds_up_what_rows_before_it_have_said(
    known: list[int], device: Device, rng: np.random.Generator
) -> None:
    """Rows that know only their own sum are added, 32 at a time, back to the nearest row that knows all before it."""
    a, b = pattern(rng, 75, 9, 5), pattern(rng, 9, 12, 5)
    want, done = listed(device, a, b, 12), 70
    ends = np.append(want.starts, len(want.left))[want.indptr]  # pairs before each row
    sums = []
    for i in range(done):
        pairs, columns = (int(x[i + 1] - (0 if i in known else x[i])) for x in (ends, want.indptr))
        word = (OF_ALL if i in known else OF_ROW) | pairs << 31 | columns
        if i == max(known) - 1:
            word = OF_ROW | MOST << 31 | MOST  # what lies before the nearest row that knows all does not count
        sums.append(word if i >= max(known) - 1 else 0)  # nor is it waited for
    listing = listed_from(device, a, b, 12, sums)
    pairs, first_block = int(ends[done]), int(want.indptr[done])
    assert listing.finish() == (len(want.left), len(want.indices))
    np.testing.assert_array_equal(device.asnumpy(listing.indptr)[done + 1 :], want.indptr[done + 1 :])
    for mine, wanted, first in (
        (listing.left, want.left, pairs),
        (listing.right, want.right, pairs),
        (listing.starts, want.starts, first_block),
        (listing.indices, want.indices, first_block),
    ):
        np.testing.assert_array_equal(device.asnumpy(mine)[first : len(wanted)], wanted[first:])


@pytest.mark.parametrize(("pairs", "columns"), [(MOST - 1, 3), (MOST, 3), (3, MOST - 1), (MOST, MOST)])
def test_sums_stay_where_31_bits_end(pairs: int, columns: int, device: Device, rng: np.random.Generator) -> None:
    a, b = pattern(rng, 20, 9, 5), pattern(rng, 9, 12, 5)
    a.indptr[4:] = np.arange(4, 21)  # every row has a block, and meets some
    a = Blocks(None, np.full(len(a.indices), int(np.diff(b.indptr).argmax()), "i4"), a.indptr)
    own = int(np.diff(b.indptr).max()) * 16, len(set(b.indices[slice(*b.indptr[a.indices[0] :][:2])].tolist())) * 16
    listing = listed_from(device, a, b, 12, [OF_ALL | pairs << 31 | columns] * 4)
    assert workspace.read_answer(2) == [min(MOST, pairs + own[0]), min(MOST, columns + own[1])]
    assert listing.finish() is None
