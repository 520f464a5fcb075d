"""Rows and columns by index arrays that cover whole blocks, and blocks by number: in every backend against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm._array import select
from bsrgemm._backend import structure

from .. import fake_cupy
from ..strategies import DTYPES, FLAVOURS, Place, Sample, assert_values, each_place, random_values, samples

pytestmark = pytest.mark.fake

ROWS = np.array([4, 5, 0, 1, -2, -1, 4, 5])
COLS = np.array([3, 4, 5, 0, 1, 2, 12, 13, 14, 3, 4, 5])
MASK = np.repeat([True, False, True, True, False, False], 2)
COL_MASK = np.repeat([False, True, True, False, True], 3)


def sample(dtype: Any = np.float64, *, seed: int = 0) -> Sample:
    """12 x 15 in blocks of 2 x 3, half of them stored, in canonical format."""
    rng = np.random.default_rng(seed)
    stored = rng.random((6, 5)) < 0.5
    row, col = np.nonzero(stored)
    data = random_values(rng, (len(row), 2, 3), np.dtype(dtype))
    indptr = np.searchsorted(row, np.arange(7)).astype(np.int32)
    return Sample(data, col.astype(np.int32), indptr, (12, 15))


def matrix(place: Place, dtype: Any = np.float64, flavour: type = bg.bsr_array) -> tuple[Any, np.ndarray[Any, Any]]:
    s = sample(dtype)
    A = place.bsr(s, flavour)
    A.sum_duplicates()
    return A, s.dense


def put(place: Place, key: Any, here: bool) -> Any:
    """The arrays of a key as they are, or on the device of the matrix."""
    if isinstance(key, tuple):
        return tuple(put(place, part, here) for part in key)
    return place.put(key) if here and isinstance(key, np.ndarray) else key


KEYS = {
    "rows": ROWS,
    "rows and all columns": (ROWS, slice(None)),
    "columns": (slice(None), COLS),
    "an ellipsis and columns": (..., COLS),
    "rows and an ellipsis": (ROWS, ...),
    "rows and some columns": (ROWS, slice(3, 9)),
    "some rows and columns": (slice(2, 8), COLS),
    "an open mesh": np.ix_(ROWS, COLS),
    "an open mesh of booleans": np.ix_(MASK, COL_MASK),
    "a boolean for each row": MASK,
    "a boolean for each column": (slice(None), COL_MASK),
    "all false": np.zeros(12, bool),
    "no rows": ROWS[:0],
    "32-bit rows": ROWS.astype(np.int32),
    "unsigned rows": ROWS[:4].astype(np.uint64),
    "unsigned rows of 8 bits": ROWS[:4].astype(np.uint8),
}


@each_place
@pytest.mark.parametrize("here", [False, True], ids=["host index", "index here"])
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_index_arrays_select_what_numpy_selects(place: Place, key: Any, here: bool) -> None:
    A, dense = matrix(place)
    before = place.blocks(A)
    B = A[put(place, key, here)]
    assert type(B) is type(A) and B.blocksize == (2, 3)
    assert_values(place.dense(B.toarray()), dense[key])
    B.check_format()
    assert structure.is_sorted(B._backend, B.indices, B.indptr, strictly=True)
    B.data[...] = 0  # values of its own
    assert_values(place.blocks(A).data, before.data)


@each_place
@pytest.mark.parametrize("key", [[4, 5, 0, 1], range(2, 6), [], [True, True] * 3 + [False] * 6], ids=str)
def test_lists_and_ranges_are_index_arrays(place: Place, key: Any) -> None:
    A, dense = matrix(place)
    assert_values(place.dense(A[key].toarray()), dense[key])
    assert_values(place.dense(A[key, :].toarray()), dense[key, :])


@each_place
def test_rows_then_columns_eliminate_unknowns(place: Place) -> None:
    A, dense = matrix(place)
    assert_values(place.dense(A[ROWS][:, COLS].toarray()), dense[ROWS][:, COLS])
    assert_values(place.dense(A[MASK][:, ~COL_MASK].toarray()), dense[MASK][:, ~COL_MASK])
    assert_values(place.dense(A.T[COLS].toarray()), dense.T[COLS])


@each_place
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_class_can_be_selected_from(place: Place, flavour: type, dtype: np.dtype[Any]) -> None:
    A, dense = matrix(place, dtype, flavour)
    B = A[np.ix_(ROWS, COLS)]
    assert isinstance(B, flavour) and B.dtype == dtype
    assert_values(place.dense(B.toarray()), dense[np.ix_(ROWS, COLS)])


@each_place
@given(data=st.data())
def test_any_selection_of_any_matrix_is_that_of_its_dense_form(place: Place, data: st.DataObject) -> None:
    s = data.draw(samples(dtypes=[np.dtype(np.int32)]))
    A = place.bsr(s)
    sides, picks = (len(s.indptr) - 1, s.shape[1] // s.blocksize[1]), []
    for side in sides:
        numbers = st.lists(st.integers(-side, side - 1), max_size=8) if side else st.just([])
        picks.append(data.draw(st.one_of(st.none(), numbers, st.lists(st.booleans(), min_size=side, max_size=side))))
    B = A.select_blocks(*(None if pick is None else np.asarray(pick, bool if _bools(pick) else int) for pick in picks))
    dense = s.dense
    for axis, (pick, side, block) in enumerate(zip(picks, sides, s.blocksize, strict=True)):
        if pick is not None:
            numbers = np.arange(side)[np.asarray(pick, bool if _bools(pick) else int)]
            dense = np.take(dense, (numbers[:, None] * block + np.arange(block)).reshape(-1), axis=axis)
    assert_values(place.dense(B.toarray()), dense)
    B.check_format()
    if B._has_sorted_indices:
        assert structure.is_sorted(B._backend, B.indices, B.indptr, strictly=False)
    if B._known_canonical:
        assert structure.is_sorted(B._backend, B.indices, B.indptr, strictly=True)


def _bools(pick: list[Any]) -> bool:
    return bool(pick) and isinstance(pick[0], bool)


@each_place
def test_blocks_are_selected_by_number(place: Place) -> None:
    A, dense = matrix(place)
    tiles = dense.reshape(6, 2, 5, 3).transpose(0, 2, 1, 3)

    def expected(rows: Any, cols: Any) -> Any:
        chosen = tiles[rows][:, cols]
        return chosen.transpose(0, 2, 1, 3).reshape(2 * chosen.shape[0], 3 * chosen.shape[1])

    everything = slice(None)
    for rows, cols in (([3, -1, 3], [4, 0]), ([0], everything), (everything, [2, 2, -5])):
        B = A.select_blocks(
            None if rows is everything else rows, None if cols is everything else place.put(np.asarray(cols))
        )
        assert_values(place.dense(B.toarray()), expected(rows, cols))
    assert_values(place.dense(A.select_blocks(rows=4).toarray()), expected([4], everything))
    assert_values(place.dense(A.select_blocks(slice(None, None, -2)).toarray()), expected(everything, everything)[
        np.array([10, 11, 6, 7, 2, 3])])  # fmt: skip
    copy = A.select_blocks()
    assert copy.data is not A.data
    assert_values(place.dense(copy.toarray()), dense)


@each_place
def test_duplicates_and_unsorted_blocks_stay_as_they_are_stored(place: Place) -> None:
    data = np.arange(1.0, 5.0).reshape(4, 1, 1)
    s = Sample(data, np.array([2, 0, 2, 1], np.int32), np.array([0, 3, 4], np.int32), (2, 3))
    B = place.bsr(s).select_blocks(rows=[1, 0, 0])
    assert place.backend.to_host(B.indices).tolist() == [1, 2, 0, 2, 2, 0, 2]
    assert place.backend.to_host(B.data).ravel().tolist() == [4, 1, 2, 3, 1, 2, 3]
    assert not B.has_sorted_indices
    B = place.bsr(s).select_blocks(cols=[2, 1, 0])  # columns that fall are sorted; duplicates keep their order
    assert place.backend.to_host(B.indices).tolist() == [0, 0, 2, 1]
    assert place.backend.to_host(B.data).ravel().tolist() == [1, 3, 2, 4]
    assert B.has_sorted_indices and not B.has_canonical_format


WRONG = {
    "a part of a block": ([0], NotImplementedError, r"1 rows are no whole number of blocks of 2 .*A\.tocsr\(\)\[I\]"),
    "rows off the boundary": ([0, 1, 1, 2], NotImplementedError, r"entries 2 to 3 are the rows 1, 2; wanted one whole"),
    "rows in reverse": ([1, 0], NotImplementedError, "rows 1, 0; .*2 consecutive rows from a multiple of 2"),
    "a row twice": ([0, 0], NotImplementedError, r"rows 0, 0; .*A\.select_blocks"),
    "a row beyond the end": ([0, 1, 12, 13], IndexError, "row 12 is out of range for 12 rows"),
    "a row before the beginning": ([-14, -13], IndexError, "row -14 is out of range"),
    "columns off the boundary": ((slice(None), [1, 2, 3]), NotImplementedError, r"columns 1, 2, 3.*tocsr\(\)\[:, J\]"),
    "a column beyond the end": ((slice(None), [15, 16, 17]), IndexError, "column 15 is out of range for 15 columns"),
    "some booleans of a block": (np.arange(12) == 3, NotImplementedError, "1 of the 2 rows of block 1"),
    "too few booleans": (np.ones(6, bool), IndexError, "wanted 12 booleans, one for each row, got 6"),
    "a mask of elements": (np.ones((12, 15), bool), NotImplementedError, r"shape \(12, 15\)"),
    "single elements": (([0, 1], [0, 1]), NotImplementedError, r"np\.ix_\(I, J\).*A\.tocsr\(\)\[I, J\]"),
    "floats": (np.array([0.0, 1.0]), IndexError, "got dtype float64"),
    "a ragged list": ([[0], [0, 1]], IndexError, "ragged"),
    "a number beyond 64 bits": ([2**70, 2**70], IndexError, "dtype object"),
    "an unsigned number beyond 63 bits": (np.array([2**64 - 2, 2**64 - 1], np.uint64), IndexError, "out of range"),
}


@each_place
@pytest.mark.parametrize("here", [False, True], ids=["host index", "index here"])
@pytest.mark.parametrize(("key", "error", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_index_names_what_came_and_the_way_out(
    place: Place, key: Any, error: type[Exception], text: str, here: bool
) -> None:
    A, dense = matrix(place)
    with pytest.raises(error, match=text):
        A[put(place, key, here)]
    assert_values(place.dense(A.toarray()), dense)


@each_place
def test_wrong_block_numbers_name_the_argument(place: Place) -> None:
    A, _ = matrix(place)
    for options, text in (
        ({"rows": [6]}, "rows: block row 6 is out of range for 6 block rows"),
        ({"cols": place.put(np.array([0, -6]))}, "cols: block column -6 is out of range for 5"),
        ({"cols": [True]}, "cols: wanted 5 booleans, one for each block column, got 1"),
        ({"rows": "a"}, "rows: wanted integers or booleans"),
    ):
        with pytest.raises(IndexError, match=text):
            A.select_blocks(**options)
    empty = bg.bsr_array((0, 3), blocksize=(2, 3), device=place.name)
    with pytest.raises(IndexError, match="has none"):
        empty.select_blocks(rows=place.put(np.array([0])))
    assert empty.select_blocks(rows=[], cols=[0, 0]).shape == (0, 6)


def test_an_index_on_another_device_is_not_moved() -> None:
    A, _ = matrix(Place("cpu"))
    with pytest.raises(TypeError, match="index"):
        A[Place("cuda").put(ROWS)]


@pytest.mark.parametrize(
    ("key", "times"),
    [(ROWS, 1), ((slice(None), COLS), 1), (np.ix_(ROWS, COLS), 1), (MASK, 2)],
    ids=["rows", "columns", "both", "booleans"],
)
def test_a_selection_waits_once_and_once_more_for_booleans(key: Any, times: int) -> None:
    place = Place("cuda")
    A, _ = matrix(place)
    key = put(place, key, True)
    with fake_cupy.waits() as waited:
        A[key]
    assert len(waited) == times, waited


def test_sorted_orders_of_both_backends_agree() -> None:
    rng = np.random.default_rng(1)
    indptr = np.array([0, 3, 3, 9, 12], np.int32)
    column = rng.integers(0, 5, 12).astype(np.int32)
    row = np.repeat(np.arange(4, dtype=np.int32), np.diff(indptr))
    host, fake = Place("cpu"), Place("cuda")
    found = select._sorted_order(host.backend, column, indptr, row, 5)
    expected = select._sorted_order(fake.backend, *map(fake.put, (column, indptr, row)), 5)
    assert found.tolist() == expected.get().tolist() == np.lexsort([column, row]).tolist()


@pytest.fixture(scope="module")
def skfem() -> Any:
    return pytest.importorskip("skfem")


@pytest.fixture(scope="module")
def beam(skfem: Any) -> tuple[Any, Any]:
    from skfem.models.elasticity import lame_parameters, linear_elasticity

    basis = skfem.Basis(skfem.MeshTri().refined(2).with_defaults(), skfem.ElementVector(skfem.ElementTriP1()))
    return basis, linear_elasticity(*lame_parameters(1e3, 0.3)).assemble(basis)


def test_scikit_fem_condenses_whole_nodes(skfem: Any, beam: tuple[Any, Any]) -> None:
    basis, K = beam
    fixed, load, known = basis.get_dofs("left"), np.ones(K.shape[0]), np.zeros(K.shape[0])
    known[fixed.all()] = 0.01
    A = bg.bsr_array(K, blocksize=(2, 2))
    wanted, found = (skfem.condense(X, load, x=known, D=fixed) for X in (K, A))
    assert isinstance(found[0], bg.bsr_array) and found[0].blocksize == (2, 2)
    np.testing.assert_allclose(found[0].toarray(), wanted[0].toarray())
    np.testing.assert_allclose(found[1], wanted[1])
    np.testing.assert_allclose(skfem.solve(found[0].tocsc(), *found[1:]), skfem.solve(*wanted), atol=1e-12)
    mass = bg.bsr_matrix(K, blocksize=(2, 2))  # scikit-fem recognises a second matrix by scipy's spmatrix
    np.testing.assert_allclose(skfem.condense(A, mass, D=fixed)[1].toarray(), wanted[0].toarray())


def test_scikit_fem_is_told_the_way_out_for_a_part_of_a_node(skfem: Any, beam: tuple[Any, Any]) -> None:
    basis, K = beam
    fixed = basis.get_dofs("left").all("u^1")
    A = bg.bsr_array(K, blocksize=(2, 2))
    with pytest.raises(NotImplementedError, match=r"A\.tocsr\(\)\[I\]"):
        skfem.condense(A, np.ones(K.shape[0]), D=fixed)
    found = skfem.condense(A.tocsr(), np.ones(K.shape[0]), D=fixed)[0]
    np.testing.assert_allclose(found.toarray(), skfem.condense(K, np.ones(K.shape[0]), D=fixed)[0].toarray())
