"""The host's compiled loops by themselves: numbers, index types, limits, and what they refuse."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from bsrgemm._backend import loops
from bsrgemm._backend.base import Blocks, Csr
from bsrgemm._backend.loops import HostLoops
from bsrgemm.dtypes import BFLOAT16

LOOPS = HostLoops()
INDEX = [np.dtype(np.int32), np.dtype(np.int64)]
HALVES = [np.dtype(np.float16), BFLOAT16]


def blocks(dtype: Any = "d", index: Any = np.int32, R: int = 2, C: int = 3, seed: int = 0) -> Blocks:
    """Four block rows, one of them empty, of three block columns, in canonical format."""
    data = np.random.default_rng(seed).integers(-4, 5, (6, R, C))
    indices, indptr = ([0, 2, 0, 1, 2, 1], [0, 2, 2, 5, 6]) if not seed else ([1, 2, 0, 2, 0, 1], [0, 1, 2, 4, 6])
    return Blocks(data.astype(dtype), np.array(indices, index), np.array(indptr, index))


def dense(x: Blocks, cols: int = 3) -> np.ndarray[Any, Any]:
    _, R, C = x.data.shape
    out = np.zeros(((len(x.indptr) - 1) * R, cols * C), x.data.dtype)
    for i in range(len(x.indptr) - 1):
        for p in range(x.indptr[i], x.indptr[i + 1]):
            j = x.indices[p]
            out[i * R : (i + 1) * R, j * C : (j + 1) * C] += x.data[p]
    return out


# ------------------------------------------------------------------------------------------------ two matrices
OPERATIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "ne": np.not_equal,
    "lt": np.less,
    "gt": np.greater,
}


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtypes", [("d", "d"), ("f", "d"), ("b", "h")])
@pytest.mark.parametrize("index", [("i", "i"), ("i", "l"), ("l", "i")])
def test_two_matrices_are_combined_on_the_union_of_their_patterns(op: str, dtypes: Any, index: Any) -> None:
    a, b = blocks(dtypes[0], index[0]), blocks(dtypes[1], index[1], seed=1)
    found = LOOPS.combine(op, a, b, 3)
    assert found is not None
    want = OPERATIONS[op](dense(a), dense(b))
    np.testing.assert_array_equal(dense(found), want)
    assert found.data.dtype == want.dtype
    assert found.indices.dtype == found.indptr.dtype == (np.int32 if index == ("i", "i") else np.int64)
    assert len(found.data) == len(found.indices) == found.indptr[-1] and found.data.any(axis=(1, 2)).all()


def test_nothing_is_combined_that_the_loops_do_not_know() -> None:
    for op, dtype in (("eq", "d"), ("true_divide", "d"), ("add", "?"), ("add", "e"), ("add", BFLOAT16)):
        assert LOOPS.combine(op, blocks(dtype), blocks(dtype, seed=1), 3) is None
    assert LOOPS.combine("add", blocks("d"), blocks("?", seed=1), 3) is None
    assert LOOPS.combine("add", blocks("e"), blocks("d", seed=1), 3) is None


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_extremes_with_nan_are_left_to_numpy_and_other_operations_are_not(side: int, value: float) -> None:
    pair = [blocks("d"), blocks("d", seed=1)]
    pair[side].data[3, 1, 2] = value
    for op in OPERATIONS:
        assert (LOOPS.combine(op, *pair, 3) is None) == (op in ("maximum", "minimum"))
    assert LOOPS.combine("maximum", blocks("l"), blocks("l", seed=1), 3) is not None


def test_a_result_of_few_blocks_does_not_hold_the_memory_of_many() -> None:
    a = blocks("d")
    for op, few in (("sub", True), ("add", False)):
        found = LOOPS.combine(op, a, a._replace(data=a.data.copy()), 3)
        assert (found.data.base is None) == few == (found.indices.base is None)
        assert len(found.data) == (0 if few else 6)
    other = Blocks(a.data.copy(), a.indices, a.indptr)
    other.data[:3] += 1
    found = LOOPS.combine("ne", a, other, 3)  # 3 of 12 blocks; from 6 on they are a part of the whole
    assert found.data.base is None and len(found.data) == 3
    other.data[...] += 9
    assert LOOPS.combine("ne", a, other, 3).data.base is not None


# ------------------------------------------------------------------------------------------------ sums and extremes
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("index", INDEX, ids=str)
@pytest.mark.parametrize("dtype", ["d", "f", "F", "b", "L"])
def test_blocks_of_a_line_are_added(axis: int, index: Any, dtype: str) -> None:
    x = blocks(dtype, index)
    found = LOOPS.add_blocks(x, 3, axis)
    row = np.repeat(np.arange(4), np.diff(x.indptr))
    want = np.zeros((4 if axis else 3, 2, 3), dtype)
    np.add.at(want, row if axis else x.indices, x.data)
    np.testing.assert_array_equal(found, want)
    assert found.dtype == x.data.dtype


@pytest.mark.parametrize("axis", [0, 1])
def test_lines_of_which_most_are_empty_are_not_added_by_loops(axis: int) -> None:
    x = blocks()
    lines = 3 if axis == 0 else 4
    for least, served in ((lines - 4 * 6, True), (lines - 4 * 6 - 1, False)):
        with patch.object(loops, "_LEAST_LINES", least):
            assert (LOOPS.add_blocks(x, 3, axis) is not None) == served
    for dtype in ("?", "e", BFLOAT16):
        assert LOOPS.add_blocks(blocks(dtype), 3, axis) is None


@pytest.mark.parametrize("block", [(1, 1), (1, 4), (4, 1), (2, 3), (7, 2), (8, 2), (3, 9)], ids=str)
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("chunk", [1, 20, 1 << 16])
def test_one_axis_of_small_blocks_is_reduced(block: tuple[int, int], axis: int, chunk: int) -> None:
    data = np.random.default_rng(1).integers(0, 9, (11, *block)).astype("f")
    with patch.object(loops, "_CHUNK", chunk):
        for op in (np.add, np.maximum):
            found = LOOPS.fold(op, data, axis)
            np.testing.assert_array_equal(found, op.reduce(data, axis=axis))
            assert found.dtype == data.dtype
    assert LOOPS.fold(np.add, data[:0], axis).shape == op.reduce(data[:0], axis=axis).shape


@pytest.mark.parametrize("axis, calls", [(1, [(3,)] * 3 + [(2,)]), (2, [(3, 2), (3, 2), (3, 2), (2, 2)])])
def test_small_blocks_are_reduced_a_few_at_a_time(axis: int, calls: list[Any]) -> None:
    """Three blocks of 2 x 3 have at most 20 elements; along a column few lines are reduced one by one."""
    taken: list[Any] = []

    def add(a: Any, b: Any, out: Any) -> None:
        taken.append(a.shape)
        np.add(a, b, out=out)

    with patch.object(loops, "_CHUNK", 20):
        LOOPS.fold(add, np.ones((11, 2, 3)), axis)
        lines, length = (3, 2) if axis == 1 else (2, 3)
        steps = [shape for shape in calls for _ in range((length - 1) * (lines if axis == 1 else 1))]
        assert taken == steps
        taken.clear()
        LOOPS.fold(add, np.ones((3, 2, 8)), 1)  # eight lines are reduced together
        assert taken == [(1, 8)] * 3


def test_large_blocks_of_each_row_are_reduced_to_one() -> None:
    data = np.random.default_rng(1).standard_normal((7, 2, 3)).astype("f")
    found = LOOPS.merge_rows(np.maximum, data, np.array([0, 1, 4]))
    np.testing.assert_array_equal(found, [data[:1].max(axis=0), data[1:4].max(axis=0), data[4:].max(axis=0)])
    assert found.dtype == data.dtype


# ------------------------------------------------------------------------------------------------ places
@pytest.mark.parametrize("index", INDEX, ids=str)
def test_places_by_column(index: Any) -> None:
    x = blocks(index=index)
    order, begins = LOOPS.by_column(x.indices, x.indptr, 4)
    assert order.tolist() == [0, 2, 3, 5, 1, 4] and begins.tolist() == [0, 2, 4, 6, 6]
    assert order.dtype == begins.dtype == index


@pytest.mark.parametrize("index", INDEX, ids=str)
def test_places_of_blocks_are_found_and_others_are_not(index: Any) -> None:
    x = blocks(index=index)
    row, col = np.divmod(np.arange(12), 3)
    found = LOOPS.positions(x, 3, row, col)
    assert found.tolist() == [0, -1, 1, -1, -1, -1, 2, 3, 4, -1, 5, -1] and found.dtype == index
    assert LOOPS.positions(x, 3, row[:0], col[:0]).shape == (0,)


@pytest.mark.parametrize("index", INDEX, ids=str)
def test_blocks_are_added_at_places_in_order(index: Any) -> None:
    data = np.zeros((4, 2, 3), "f")
    some = np.random.default_rng(0).integers(1, 9, (5, 2, 3)).astype("f")
    place = np.array([3, 0, 3, 1, 0], index)
    assert LOOPS.add_at(data, some, place)
    want = np.zeros_like(data)
    np.add.at(want, place, some)
    np.testing.assert_array_equal(data, want)
    assert LOOPS.add_at(data, some.transpose(0, 2, 1).copy().transpose(0, 2, 1), place)
    np.testing.assert_array_equal(data, 2 * want)


def test_blocks_are_not_added_where_no_loop_can() -> None:
    some, place = np.ones((1, 2, 2)), np.array([0])
    read_only = np.zeros((2, 2, 2))
    read_only.flags.writeable = False
    strided = np.zeros((4, 2, 2))[::2]
    for data in (
        read_only,
        strided,
        np.zeros((2, 2, 2), bool),
        np.zeros((2, 2, 2), "e"),
        np.zeros((2, 2, 2), BFLOAT16),
    ):
        assert not LOOPS.add_at(data, some.astype(data.dtype), place) and not data.any()


# ------------------------------------------------------------------------------------------------ diagonals
@pytest.mark.parametrize("k", range(-9, 8))
def test_diagonals_beside_the_main_one(k: int) -> None:
    x = blocks(R=2, C=2)
    whole = dense(x)
    found = LOOPS.diagonal_beside(x, (4, 3), k)
    want = [whole[r, r + k] if 0 <= r + k < 6 else 0 for r in range(8)]
    assert found.tolist() == want and found.dtype == whole.dtype


@pytest.mark.parametrize("block", [(1, 1), (2, 2), (3, 3), (2, 3), (5, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("index", INDEX, ids=str)
def test_every_diagonal_stays_within_its_arrays(block: tuple[int, int], index: Any) -> None:
    """SciPy's loop adds to what it is given, so that zeros around it would show a write elsewhere."""
    x = blocks(index=index, R=block[0], C=block[1])
    whole, margin = dense(x), 16
    M, N = whole.shape
    surrounded = np.full(x.data.size + 2 * margin, np.nan)
    data = surrounded[margin:-margin].reshape(x.data.shape)
    data[...] = x.data
    for k in range(1 - M, N):
        want = whole.diagonal(k)
        given = np.zeros(len(want) + 2 * margin)
        with patch.object(loops.np, "zeros", lambda n, dtype, given=given: given[margin : margin + n]):
            found = LOOPS.diagonal(x._replace(data=data), (M, N), k)
        np.testing.assert_array_equal(found, want)
        assert not given[:margin].any() and not given[margin + len(want) :].any()


def test_diagonals_that_no_loop_supports_are_left_to_others() -> None:
    for dtype in ("?", *HALVES):
        assert LOOPS.diagonal(blocks(dtype), (8, 9), 0) is None
    one = Blocks(np.ones((1, 1, 1)), np.array([5]), np.array([0, 1]))
    assert LOOPS.diagonal(one, (1, 2**31 - 1), 5).tolist() == [1]  # type: ignore[union-attr]
    assert LOOPS.diagonal(one, (1, 2**31), 5) is LOOPS.diagonal(one, (2**31, 1), 0) is None


# ------------------------------------------------------------------------------------------------ sums
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("piece", [1, 2, 5, 1000])
def test_blocks_are_added_up_in_pieces(axis: int, piece: int) -> None:
    rng = np.random.default_rng(0)
    for lengths in ([2, 0, 3, 1], [0, 0, 4], [7, 0], [1, 1, 1, 1], [0, 6, 0, 0]):
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        n = int(indptr[-1])
        data, indices = rng.integers(-9, 9, (n, 2, 3)).astype(float), rng.integers(0, 4, n).astype(np.int32)
        want = np.zeros((4 if axis == 0 else len(lengths), 2, 3))
        np.add.at(want, indices if axis == 0 else np.repeat(np.arange(len(lengths)), lengths), data)
        with patch.object(loops, "_PIECE", piece):
            found = LOOPS.add_blocks(Blocks(data, indices, indptr), 4, axis)
        np.testing.assert_array_equal(found, want)


# ------------------------------------------------------------------------------------------------ order
@pytest.mark.parametrize("many", [0, 10**9], ids=["by NumPy", "by a loop"])
def test_order_is_told_by_numpy_as_by_the_loop(many: int) -> None:
    rng = np.random.default_rng(0)
    told = set()
    with patch.object(loops, "_MANY", many):
        for _ in range(300):
            lengths = rng.integers(0, 4, rng.integers(1, 5))
            indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            rows = [rng.integers(0, 6, n) for n in lengths]
            if rng.random() < 0.7:
                rows = [np.unique(row) for row in rows]
                indptr = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int32)
            indices = np.concatenate(rows).astype(np.int32)
            if not len(indices):
                continue
            want = all((row[1:] > row[:-1]).all() for row in rows)
            told.add(want)
            assert LOOPS.is_canonical(indices, indptr) == want, (indices, indptr)
    assert told == {True, False}


# ------------------------------------------------------------------------------------------------ formats
@pytest.mark.parametrize("kept, few", [([0, 2], True), ([0, 2, 4], False)])
def test_zeros_are_left_out_and_their_memory_is_given_back(kept: list[int], few: bool) -> None:
    data = np.zeros(6)
    data[kept] = np.arange(1.0, len(kept) + 1)
    found = LOOPS.without_zeros(Csr(data, np.arange(6, dtype=np.int32), np.array([0, 3, 6], np.int32)), 6)
    assert found.data.tolist() == list(range(1, len(kept) + 1)) and found.indices.tolist() == kept
    assert found.indptr.tolist() == [0, 2, len(kept)]
    assert (found.data.base is None) == few == (found.indices.base is None)


@pytest.mark.parametrize("dtype", INDEX, ids=str)
@pytest.mark.parametrize("block", [(1, 1), (2, 3), (40, 30), (3, 1)], ids=str)
def test_rows_and_columns_of_elements(dtype: Any, block: tuple[int, int]) -> None:
    x = blocks(R=block[0], C=block[1])
    row, col = LOOPS.to_coo(x, dtype)
    assert row.dtype == col.dtype == dtype
    whole = np.zeros((4 * block[0], 3 * block[1]))
    whole[row, col] = x.data.ravel()
    np.testing.assert_array_equal(whole, dense(x))
    i = np.repeat(np.arange(4), np.diff(x.indptr))
    want = i[:, None, None] * block[0] + np.arange(block[0])[:, None] + np.zeros(block[1], int)
    np.testing.assert_array_equal(row, want.ravel())


def test_every_base_is_added_to_every_number() -> None:
    for n, width in ((0, 3), (1, 1), (7, 5), (600, 1), (513, 2), (3, 600), (1100, 1)):
        base, within = np.arange(n) * 10_000, np.arange(width)
        np.testing.assert_array_equal(loops._spread(base, within), (base[:, None] + within).ravel())


def test_loops_over_csr_need_memory_for_columns() -> None:
    with patch.object(loops, "_LEAST_LINES", 10):
        assert LOOPS.fits((42, 3), 2) and LOOPS.fits((3, 42), 2)
        assert not LOOPS.fits((43, 3), 2) and not LOOPS.fits((3, 43), 2)


@pytest.mark.parametrize("dtype", ["d", "?", "F", "h"])
@pytest.mark.parametrize("index", INDEX, ids=str)
def test_small_blocks_are_added_to_a_dense_array(dtype: str, index: Any) -> None:
    x = blocks(dtype, index)
    out = np.zeros((8, 9), dtype)
    assert LOOPS.add_to_dense(x, out)
    np.testing.assert_array_equal(out, dense(x))


@pytest.mark.parametrize("tiny", [0, 10**6], ids=["by SciPy", "by places"])
@pytest.mark.parametrize("block", [(2, 3), (3, 7), (3, 8), (1, 9), (8, 1)], ids=str)
@pytest.mark.parametrize("index", INDEX, ids=str)
@pytest.mark.parametrize("twice", [False, True])
def test_blocks_are_added_to_what_is_in_a_dense_array(
    tiny: int, block: tuple[int, int], index: Any, twice: bool
) -> None:
    for dtype in ("d", "i", "?", "F"):
        x = blocks(dtype, index, *block)
        if twice:
            x = x._replace(indices=np.array([0, 0, 1, 2, 2, 1], index))
        out = np.arange(dense(x).size).reshape(dense(x).shape).astype(dtype)
        want = out + dense(x)
        empty = np.zeros_like(out)
        with patch.object(loops, "_TINY", tiny):
            assert LOOPS.add_to_dense(x, out) and LOOPS.add_to_dense(x, empty, zero=True)
        np.testing.assert_array_equal(out, want)
        np.testing.assert_array_equal(empty, dense(x))


def test_the_places_of_tiny_matrices_are_those_of_the_present_indices() -> None:
    x = blocks()
    for wanted in (x, x._replace(indices=x.indices[::-1].copy()), blocks(index=np.int64), blocks(C=4), x):
        out = np.zeros(dense(wanted).shape)
        assert LOOPS.add_to_dense(wanted, out)
        np.testing.assert_array_equal(out, dense(wanted))


def test_blocks_are_not_added_to_a_dense_array_that_no_loop_can_write() -> None:
    assert not LOOPS.add_to_dense(blocks(), np.zeros((9, 8)).T)
    for dtype in HALVES:
        assert not LOOPS.add_to_dense(blocks(dtype), np.zeros((8, 9), dtype))


@pytest.mark.parametrize("dtype", ["d", "?", *HALVES], ids=str)
@pytest.mark.parametrize("index", ["i", "l"])
def test_elements_become_rows_and_blocks(dtype: Any, index: str) -> None:
    row, col = np.array([3, 0, 5, 3, 0], index), np.array([1, 7, 0, 0, 2], index)
    values = np.arange(1, 6).astype(dtype)
    csr = LOOPS.csr_of_coo(row, col, values, (6, 8))
    assert csr.indptr.tolist() == [0, 2, 2, 2, 4, 4, 5] and csr.indices.tolist() == [7, 2, 1, 0, 0]
    assert csr.data.tolist() == values[[1, 4, 0, 3, 2]].tolist() and csr.data.dtype == values.dtype
    assert csr.indptr.dtype == csr.indices.dtype == np.dtype(index)
    assert LOOPS.count_blocks(csr, (6, 8), (2, 4)) == 4
    found = LOOPS.blocks_of_csr(csr, (6, 8), (2, 4), unique=True)
    assert found.indices.tolist() == [0, 1, 0, 0] and found.indptr.tolist() == [0, 2, 3, 4]
    assert found.indices.dtype == found.indptr.dtype == np.dtype(index) and found.data.dtype == values.dtype
    want = np.zeros((6, 8), dtype)
    want[row, col] = values
    np.testing.assert_array_equal(dense(found, 2).astype("d"), want.astype("d"))


def test_duplicates_of_halves_are_not_added_by_loops() -> None:
    for dtype in (*HALVES, np.dtype("d")):
        csr = Csr(np.ones(2, dtype), np.array([1, 1], np.int32), np.array([0, 2, 2], np.int32))
        found = LOOPS.blocks_of_csr(csr, (2, 2), (2, 2), unique=False)
        assert (found is None) == (dtype in HALVES)
        if found is not None:
            assert found.data.tolist() == [[[0, 2], [0, 0]]]


# ------------------------------------------------------------------------------------------------ index types
def test_indices_are_wide_where_a_number_or_an_array_is() -> None:
    narrow, wide = np.zeros(1, np.int32), np.zeros(1, np.int64)
    assert loops._index(2**31 - 1, narrow, narrow) == np.int32 == loops._index(0)
    assert loops._index(2**31, narrow) == np.int64 == loops._index(2**31)
    assert loops._index(1, narrow, wide) == np.int64 == loops._index(1, wide, narrow)


def test_the_largest_number_decides_the_width_of_indices() -> None:
    asked: list[int] = []
    real = loops._index

    def noting(most: int, *arrays: Any) -> Any:
        asked.append(most)
        return real(most, *arrays)

    x = blocks()
    with patch.object(loops, "_index", noting), patch.object(loops, "_TINY", 0):
        LOOPS.combine("add", x, blocks(seed=1), 3)
        LOOPS.positions(x, 3, np.zeros(2, int), np.zeros(2, int))
        LOOPS.positions(x, 9, np.zeros(2, int), np.zeros(2, int))
        LOOPS.positions(x, 3, np.zeros(7, int), np.zeros(7, int))
        LOOPS.add_to_dense(blocks(index=np.int64), np.zeros((8, 9)))
        LOOPS.add_to_dense(Blocks(x.data[:1], x.indices[:1], np.array([0, 1])), np.zeros((2, 9)))
        LOOPS.add_to_dense(blocks(R=1, C=8), np.zeros((4, 24)))
        LOOPS.add_to_dense(Blocks(np.ones((9, 5, 8)), np.zeros(9, int), np.array([0, 9])), np.zeros((5, 8)))
        LOOPS.csr_of_coo(np.zeros(2, int), np.zeros(2, int), np.ones(2), (6, 8))
        LOOPS.csr_of_coo(np.zeros(9, int), np.zeros(9, int), np.ones(9), (9, 4))
        csr = Csr(np.ones(2), np.array([0, 1]), np.array([0, 2, 2]))
        LOOPS.blocks_of_csr(csr, (2, 8), (1, 4), True)
    assert asked == [12, 4, 9, 7, 36, 9, 12, 45, 8, 9, 8]


@pytest.mark.parametrize("dtype", ["F", "D"])
@pytest.mark.parametrize("C", [3, 16])
def test_an_infinite_complex_number_is_added_as_it_is(C: int, dtype: str) -> None:
    """A factor of 1 would make NaN of the part that is finite."""
    x = blocks(dtype, C=C)
    x.data[[0, 3], 1, 2] = complex(-np.inf, 1.5), complex(2, np.inf)
    want = dense(x)
    out = np.zeros(want.shape, dtype)
    assert LOOPS.add_to_dense(x, out)
    np.testing.assert_array_equal(out, want)
    for axis in (0, 1):
        sums = LOOPS.add_blocks(x, 3, axis)
        assert sums is not None
        folded = want.reshape(4, 2, 3, C).sum(axis=0 if axis == 0 else 2)
        np.testing.assert_array_equal(sums, folded.swapaxes(0, 1) if axis == 0 else folded)
    data = np.zeros((4, 2, C), dtype)
    assert LOOPS.add_at(data, x.data, np.array([3, 0, 0, 1, 2, 1]))
    sums = np.zeros((4, 2, C), dtype)
    np.add.at(sums, [3, 0, 0, 1, 2, 1], x.data)
    np.testing.assert_array_equal(data, sums)


def test_blocks_of_another_dtype_are_left_to_numpy() -> None:
    for C in (3, 16):
        x = blocks("d", C=C)
        out, data = np.zeros((8, 3 * C), "D"), np.zeros((4, 2, C), "D")
        assert not LOOPS.add_to_dense(x, out) and not LOOPS.add_at(data, x.data, np.array([3, 0, 0, 1, 2, 1]))
        assert not out.any() and not data.any()
