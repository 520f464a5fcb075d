"""Blocks added into a known pattern: in every backend against dense NumPy, in a fixed order, in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm._array import assemble
from bsrgemm.dtypes import BOOL

from .. import fake_cupy
from ..strategies import DTYPES, Place, Sample, assert_values, each_place, random_values, widened

pytestmark = pytest.mark.fake

ROW = np.array([2, 0, 2, 1, 2, 0, 2])
COL = np.array([1, 3, 1, 0, 2, 3, 1])


def pattern(place: Place, dtype: Any = np.float64, blocksize: tuple[int, int] = (2, 3)) -> Any:
    """3 x 4 blocks, of which (0, 0), (0, 3), (1, 0), (2, 1) and (2, 2) are stored, with values."""
    data = random_values(np.random.default_rng(1), (5, *blocksize), np.dtype(dtype))
    R, C = blocksize
    s = Sample(data, np.array([0, 3, 0, 1, 2], np.int32), np.array([0, 2, 3, 5], np.int32), (3 * R, 4 * C))
    A = place.bsr(s)
    A.sum_duplicates()
    return A


def blocks(count: int, dtype: Any = np.float64, blocksize: tuple[int, int] = (2, 3)) -> np.ndarray[Any, Any]:
    return random_values(np.random.default_rng(2), (count, *blocksize), np.dtype(dtype))


def added(dense: Any, given_blocks: Any, row: Any, col: Any) -> Any:
    out = widened(dense).copy()
    _, R, C = given_blocks.shape
    for block, i, j in zip(widened(given_blocks), row, col, strict=True):
        out[i * R : (i + 1) * R, j * C : (j + 1) * C] += block
    return out


@each_place
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("here", [False, True], ids=["host positions", "positions here"])
def test_blocks_are_added_at_their_positions(place: Place, dtype: np.dtype[Any], here: bool) -> None:
    A, B = pattern(place, dtype), blocks(7, dtype)
    data, indices, indptr = A.data, A.indices, A.indptr
    expected = added(place.dense(A.toarray()), B, ROW, COL)
    row, col = (place.put(x) if here else x.tolist() for x in (ROW, COL))
    assert A.assemble(place.put(B), row, col) is A
    assert A.data is data and A.indices is indices and A.indptr is indptr
    assert_values(place.dense(A.toarray()), expected.astype(bool) if dtype == BOOL else expected)


@each_place
@given(data=st.data())
def test_any_blocks_into_any_pattern_are_the_sum_of_both(place: Place, data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    blocksize = data.draw(st.sampled_from([(1, 1), (2, 3), (5, 4)]))
    stored = np.array(data.draw(st.lists(st.booleans(), min_size=rows * cols, max_size=rows * cols))).reshape(
        rows, cols
    )
    i, j = np.nonzero(stored)
    k = np.array(data.draw(st.lists(st.integers(0, max(len(i) - 1, 0)), max_size=20)) if len(i) else [], np.int64)
    index = data.draw(st.sampled_from([np.int32, np.int64]))
    s = Sample(
        blocks(len(i), np.int64, blocksize),
        j.astype(index),
        np.searchsorted(i, np.arange(rows + 1)).astype(index),
        (rows * blocksize[0], cols * blocksize[1]),
    )
    A, B = place.bsr(s), blocks(len(k), np.int64, blocksize)
    A.assemble(place.put(B), place.put(i[k]), j[k])
    assert_values(place.dense(A.toarray()), added(s.dense, B, i[k], j[k]))


@each_place
def test_the_order_of_additions_is_that_of_the_blocks(place: Place) -> None:
    """1e16 + 1 + 1 - 1e16 is 0 from left to right, and 2 in another order."""
    A = pattern(place, blocksize=(1, 1))
    A.data[...] = 0
    terms = np.array([1e16, 1.0, 1.0, -1e16]).reshape(-1, 1, 1)
    for order, expected in (([0, 1, 2, 3], 0.0), ([1, 2, 0, 3], 2.0)):
        A.data[...] = 0
        A.assemble(place.put(terms[order]), [2] * 4, [1] * 4)
        assert place.dense(A.toarray())[2, 1] == expected


@each_place
def test_the_result_has_the_same_bits_each_time_and_blocks_without_additions_keep_theirs(place: Place) -> None:
    rng = np.random.default_rng(3)
    row, col = np.tile(ROW, 40), np.tile(COL, 40)
    B = place.put(rng.normal(size=(280, 2, 3)).astype(np.float32))
    A = pattern(place, np.float32)
    A.data[...] = -0.0
    results = []
    for _ in range(3):
        C = A.copy()
        C.assemble(B, row, col)
        results.append(place.backend.to_host(C.data).tobytes())
    assert len(set(results)) == 1
    untouched = np.frombuffer(results[0], np.float32).reshape(5, 2, 3)[0]  # block (0, 0)
    assert not untouched.any()
    if place.name != "cuda":  # its sums begin with 0.0, which loses the sign of -0.0
        assert np.signbit(untouched).all()


@each_place
def test_a_block_that_is_not_stored_is_named_before_anything_is_added(place: Place) -> None:
    A = pattern(place)
    before = place.dense(A.toarray())
    for row, col, name in (
        ([2, 0, 1], [1, 3, 1], r"entry 2 is block \(1, 1\)"),
        ([2, -1], [1, 3], r"entry 1 is block \(-1, 3\)"),
        ([3], [0], r"entry 0 is block \(3, 0\)"),
        ([0], [4], r"entry 0 is block \(0, 4\)"),  # not block (1, 0), which comes after (0, 3)
        ([1], [-1], r"entry 0 is block \(1, -1\)"),
    ):
        with pytest.raises(ValueError, match=name + ", which is not stored"):
            A.assemble(place.put(blocks(len(row))), row, col, check=True)
        assert_values(place.dense(A.toarray()), before)
    if place.is_host:
        with pytest.raises(ValueError, match="not stored"):
            A.assemble(blocks(1), [1], [1])


@each_place
def test_without_the_check_blocks_that_are_not_stored_are_ignored(place: Place) -> None:
    A = pattern(place)
    B = blocks(6)
    expected = added(place.dense(A.toarray()), B[[0, 5]], [2, 2], [2, 1])
    A.assemble(place.put(B), [2, 1, -1, 3, 0, 2], [2, 1, 3, 0, 4, 1], check=False)
    assert_values(place.dense(A.toarray()), expected)


@each_place
def test_an_empty_pattern_and_no_blocks_are_no_special_cases(place: Place) -> None:
    empty = bg.bsr_array((4, 6), blocksize=(2, 3), device=place.name)
    none = place.put(blocks(0))
    assert empty.assemble(none, [], []).nnz == 0
    with pytest.raises(ValueError, match="not stored"):
        empty.assemble(place.put(blocks(1)), [0], [0], check=True)
    empty.assemble(place.put(blocks(1)), [0], [0], check=False)
    A = pattern(place)
    before = place.dense(A.toarray())
    assert_values(place.dense(A.assemble(none, [], []).toarray()), before)


@each_place
def test_duplicates_of_the_matrix_are_added_up_first(place: Place) -> None:
    s = Sample(np.ones((3, 1, 1)), np.array([1, 0, 1], np.int32), np.array([0, 3], np.int32), (1, 2))
    A = place.bsr(s)
    A.assemble(place.put(np.full((1, 1, 1), 5.0)), [0], [1])
    assert A.nnz == 2
    assert_values(place.dense(A.toarray()), [[1.0, 7.0]])


@each_place
def test_a_transpose_made_before_keeps_its_values(place: Place) -> None:
    A = pattern(place)
    T, before = A.T, place.dense(A.toarray()).T
    A.assemble(place.put(blocks(7)), ROW, COL)
    assert_values(place.dense(T.toarray()), before)
    built = A.T.assemble(place.put(blocks(1, blocksize=(3, 2))), [1], [2])  # a transpose of its own
    assert built.blocksize == (3, 2)


@each_place
def test_the_blocks_may_be_those_of_the_matrix(place: Place) -> None:
    A = pattern(place)
    own, dense = place.backend.to_host(A.data), place.dense(A.toarray())
    expected = added(dense, own, [0] * 5, [3] * 5)  # into the second block, which is also added itself
    A.assemble(A.data, [0] * 5, [3] * 5)
    assert_values(place.dense(A.toarray()), expected, 1e-12)


def test_nothing_is_written_after_the_end_of_the_values() -> None:
    A = pattern(Place("cpu"))
    memory = np.zeros((7, 2, 3))
    A.data = memory[:5]
    A.assemble(blocks(2), [1, 3], [1, 0], check=False)
    assert not memory.any()


def test_blocks_of_a_position_are_summed_in_order_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("cuda")
    A = pattern(place)
    seen: list[Any] = []
    reduce = place.backend.segment_reduce
    monkeypatch.setattr(place.backend, "segment_reduce", lambda *args: (seen.extend(args), reduce(*args))[1])
    k = np.random.default_rng(4).integers(0, 7, 1000)
    A.assemble(place.put(blocks(1000)), ROW[k], COL[k])
    order, starts = (x.get() for x in seen[2:])
    assert all((np.diff(part) > 0).all() for part in np.split(order, starts[1:]))


def test_arrays_that_are_not_contiguous_are_written_into() -> None:
    A = pattern(Place("cpu"))
    wide = np.zeros((5, 2, 6))
    A.data = wide[:, :, ::2]
    A.assemble(blocks(7), ROW, COL)
    assert_values(A.toarray(), added(np.zeros((6, 12)), blocks(7), ROW, COL))
    assert wide.any()


def test_wrong_arguments_are_named() -> None:
    A = pattern(Place("cpu"))
    for args, error, text in (
        ((blocks(2), [0], [0, 3]), ValueError, "one length, got 2, 1 and 2"),
        ((blocks(2, blocksize=(3, 2)), [0, 0], [0, 3]), ValueError, r"blocks: .*\(2, 3\), got \(2, 3, 2\)"),
        ((np.ones((2, 3)), [0], [0]), ValueError, "blocks: wanted shape"),
        ((blocks(1), [0.5], [0]), TypeError, "block_row: wanted integers"),
        ((blocks(1), [[0]], [0]), ValueError, "block_row: wanted 1-D"),
        ((blocks(1), [0], Place("cuda").put(np.array([0]))), TypeError, "block_col"),
        ((blocks(1) * 1j, [0], [0]), TypeError, "blocks: cannot keep complex"),
    ):
        with pytest.raises(error, match=text):
            A.assemble(*args)


def test_nothing_waits_and_the_pattern_is_not_sorted_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("cuda")
    A, arguments = pattern(place, np.float32), [place.put(x) for x in (blocks(7, np.float32), ROW, COL)]
    for owner, name in (
        (fake_cupy.xp, "sort"),
        (assemble.structure, "sum_duplicates"),
        (assemble.structure, "sort_blocks"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: pytest.fail(name))
    with fake_cupy.waits() as waited:
        A.assemble(*arguments)
    assert not waited
