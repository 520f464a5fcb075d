"""vstack, hstack, block_array and block_diag against scipy and dense NumPy, in every place."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm.dtypes import HALF_DTYPES

from .. import fake_cupy
from ..strategies import DTYPES, Place, Sample, assert_values, blocksizes, each_place, quietly, samples, wide
from .assembling import (
    FORMATS,
    FUNCTIONS,
    SMALL,
    each_blocksize,
    each_function,
    promotion,
    random_sample,
    three,
    values,
)
from .random_matrices import HERE, each_dtype

pytestmark = pytest.mark.fake


# ----------------------------------------------------------------------------- values, blocks and dtypes
@each_place
@each_function
@each_blocksize
@each_dtype
def test_results_are_those_of_numpy(place: Place, name: str, blocksize: tuple[int, int], dtype: np.dtype[Any]) -> None:
    ours, theirs, dense = FUNCTIONS[name]
    parts = three(blocksize, dtype, duplicates=2)
    result = ours([place.bsr(s) for s in parts])
    assert result.dtype == dtype and result.blocksize == blocksize
    assert_values(values(place, result), dense([s.dense for s in parts]))
    if dtype not in HALF_DTYPES:
        reference = theirs([s.scipy() for s in parts])
        assert result.shape == reference.shape and result.dtype == reference.dtype
        assert_values(values(place, result), reference.toarray())


@dataclass(frozen=True)
class Grid:
    """Rows of samples and None, and which of them are handed over as the transpose of a transpose."""

    rows: list[list[Sample | None]]
    lazy: list[list[bool]]
    blocksize: tuple[int, int]
    heights: list[int]
    widths: list[int]

    def entries(self) -> list[Sample]:
        return [s for row in self.rows for s in row if s is not None]

    def dense(self) -> np.ndarray[Any, Any]:
        """What it means: in the dtype of each entry, then cast to that of all."""
        dtype = wide(promotion([s.dtype for s in self.entries()]))
        rows = [
            [
                np.zeros((h, w), dtype) if s is None else s.dense.astype(dtype)
                for s, w in zip(row, self.widths, strict=True)
            ]
            for row, h in zip(self.rows, self.heights, strict=True)
        ]
        return np.vstack([np.hstack(row) for row in rows])

    def at(self, place: Place) -> list[list[Any]]:
        def matrix(s: Sample | None, lazy: bool) -> Any:
            if s is None:
                return None
            return place.bsr(s.T).T if lazy else place.bsr(s)

        return [list(map(matrix, row, lazy)) for row, lazy in zip(self.rows, self.lazy, strict=True)]


@st.composite
def grids_of_samples(draw: st.DrawFn) -> Grid:
    R, C = blocksize = draw(blocksizes)
    heights = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    widths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    present = [[draw(st.integers(0, 3)) > 0 for _ in widths] for _ in heights]
    present[draw(st.integers(0, len(heights) - 1))][draw(st.integers(0, len(widths) - 1))] = True
    dtypes = draw(st.sampled_from([DTYPES, (draw(st.sampled_from(DTYPES)),)]))
    rows: list[list[Sample | None]] = [
        [
            draw(samples(dtypes=dtypes, grid=(h, w), blocksize=blocksize, spreads=SMALL)) if there else None
            for w, there in zip(widths, line, strict=True)
        ]
        for h, line in zip(heights, present, strict=True)
    ]
    lazy = [[draw(st.booleans()) for _ in widths] for _ in heights]
    heights = [h * R if any(line) else 0 for h, line in zip(heights, present, strict=True)]
    widths = [w * C if any(line) else 0 for w, line in zip(widths, zip(*present, strict=True), strict=True)]
    return Grid(rows, lazy, blocksize, heights, widths)


@each_place
@given(grid=grids_of_samples())
def test_any_grid_is_put_together(place: Place, grid: Grid) -> None:
    """Any block and pattern, None anywhere, mixed dtypes and index dtypes, unsorted, duplicates, transposes."""
    given_ = grid.at(place)
    result = bg.block_array(given_)
    assert result.dtype == promotion([s.dtype for s in grid.entries()])
    assert result.blocksize == grid.blocksize and result.shape == (sum(grid.heights), sum(grid.widths))
    entries = [A for row in given_ for A in row if A is not None]
    wide_index = any(A.indices.dtype == np.int64 for A in entries)
    assert result.indices.dtype == (np.int64 if wide_index else np.int32)
    assert_values(values(place, result), grid.dense())
    if all(A.dtype == result.dtype for A in entries):
        assert result.nnz == sum(A.nnz for A in entries)  # nothing is added up or dropped
    if all(A.has_canonical_format for A in entries):
        assert result.has_canonical_format


@each_place
@given(
    data=st.data(), blocksize=blocksizes, count=st.integers(1, 5), side=st.integers(0, 4), dtype=st.sampled_from(DTYPES)
)
def test_stacks_are_grids_of_one_line(
    place: Place, data: st.DataObject, blocksize: tuple[int, int], count: int, side: int, dtype: np.dtype[Any]
) -> None:
    across = data.draw(st.booleans())
    others = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    parts = [
        data.draw(samples(dtypes=(dtype,), grid=(side, n) if across else (n, side), blocksize=blocksize, spreads=SMALL))
        for n in others
    ]
    stack, dense = (bg.hstack, np.hstack) if across else (bg.vstack, np.vstack)
    assert_values(values(place, stack([place.bsr(s) for s in parts])), dense([s.dense for s in parts]))
    diagonal = values(place, bg.block_diag([place.bsr(s) for s in parts]))
    assert_values(diagonal, scipy.linalg.block_diag(*(s.dense for s in parts)))


@each_place
def test_blocks_keep_their_order_and_are_not_summed(place: Place) -> None:
    """Row 0 of the result: the two blocks of A as they are stored, then those of B."""
    a = Sample(np.arange(1.0, 4).reshape(3, 1, 1), np.array([1, 0, 1]), np.array([0, 2, 3]), (2, 2))
    b = Sample(np.arange(5.0, 8).reshape(3, 1, 1), np.array([0, 0, 2]), np.array([0, 1, 3]), (2, 3))
    result = place.blocks(bg.hstack([place.bsr(a), place.bsr(b)]))
    assert result.data.ravel().tolist() == [1, 2, 5, 3, 6, 7]
    assert result.indices.tolist() == [1, 0, 2, 1, 2, 4] and result.indptr.tolist() == [0, 3, 6]
    below = place.blocks(bg.vstack([place.bsr(a), place.bsr(a)]))
    assert below.data.ravel().tolist() == [1, 2, 3, 1, 2, 3]
    assert below.indices.tolist() == [1, 0, 1] * 2 and below.indptr.tolist() == [0, 2, 3, 5, 6]


@each_place
@each_function
@pytest.mark.parametrize("dtypes", list(itertools.product(map(np.dtype, "?bLefD"), repeat=2)), ids=str)
def test_mixed_dtypes_promote_as_in_numpy(place: Place, name: str, dtypes: tuple[Any, Any]) -> None:
    ours, _, dense = FUNCTIONS[name]
    parts = [random_sample((3, 3), (2, 3), d, seed=k) for k, d in enumerate((dtypes[0], dtypes[1], dtypes[0]))]
    result = ours([place.bsr(s) for s in parts])
    assert result.dtype == np.result_type(*dtypes)
    assert_values(values(place, result), dense([s.dense.astype(wide(result.dtype)) for s in parts]))


@pytest.mark.parametrize(
    "names, expected",
    [
        (("bfloat16",), "bfloat16"),
        (("bfloat16", "bool", "int8", "uint8"), "bfloat16"),
        (("bfloat16", "float16"), "float32"),
        (("bfloat16", "int8", "float16"), "float32"),
        (("bfloat16", "int16"), "float32"),
        (("bfloat16", "int32", "int8"), "float64"),
        (("bfloat16", "int16", "complex64"), "complex64"),
        (("int16", "uint16", "float32"), "float32"),
        (("int8", "uint8", "float16"), "float16"),
        (("int64", "uint64"), "float64"),
    ],
    ids=str,
)
@each_place
def test_the_promoted_dtype_does_not_depend_on_the_order(place: Place, names: tuple[str, ...], expected: str) -> None:
    matrices = [place.bsr(random_sample(dtype=np.dtype(name))) for name in names]
    for order in itertools.permutations(matrices):
        assert bg.vstack(order).dtype == np.dtype(expected)


@each_place
@each_function
@each_dtype
def test_dtype_asks_for_another(place: Place, name: str, dtype: np.dtype[Any]) -> None:
    ours, _, dense = FUNCTIONS[name]
    for own in ("int8", "float32", "complex64"):
        parts = [random_sample((3, 3), (2, 3), own, seed=seed, duplicates=2) for seed in (1, 2, 3)]
        if dtype.kind == "u" and own != "int8":  # what a negative float becomes, each processor has its own view of
            for part in parts:
                part.data[...] = abs(part.data)
        result = ours([place.bsr(s) for s in parts], dtype=dtype)
        assert result.dtype == dtype
        with quietly():
            expected = [np.asarray(s.dense).astype(own).astype(dtype) for s in parts]
        assert_values(values(place, result), dense([x.astype(wide(dtype)) for x in expected]))


@each_place
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8"])
def test_duplicates_are_added_up_in_their_own_dtype_before_a_cast(place: Place, dtype: str) -> None:
    """True and True make True, 100 and 100 make -56: a wider result must not see the two apart."""
    data = np.full((2, 1, 2), True if dtype == "bool" else 100, dtype)
    a = Sample(data, np.array([0, 0], np.int32), np.array([0, 2], np.int32), (1, 2))
    other = bg.bsr_array(place.put(np.ones((1, 2))), blocksize=(1, 2))
    A = place.bsr(a)
    results = [bg.vstack([A, other]), bg.vstack([A], dtype="int64"), bg.kron(A, place.put(np.ones((1, 1))))]
    for result in results:
        assert_values(values(place, result)[:1], a.dense)
    assert A.nnz == 4 and not A.has_canonical_format  # the operand keeps them


@each_place
def test_what_was_put_together_multiplies(place: Place) -> None:
    s = random_sample((3, 3), (2, 2), duplicates=2)
    A = place.bsr(s)
    x = np.arange(24.0).reshape(12, 2) % 5
    result = bg.block_array([[A, A.T], [None, A]]) @ place.put(x)
    dense = np.block([[s.dense, s.dense.T], [np.zeros_like(s.dense), s.dense]])
    assert_values(place.dense(result), dense @ x)
    assert_values(place.dense(bg.kron(A, place.put(np.eye(2))) @ place.put(x)), np.kron(s.dense, np.eye(2)) @ x)


# ------------------------------------------------------------------------------------------- operands
@each_place
@each_function
@pytest.mark.parametrize("kind", [*FORMATS, "dense", "fortran", "strided"])
def test_other_formats_and_dense_arrays_are_converted_to_our_blocks(place: Place, name: str, kind: str) -> None:
    ours, _, dense = FUNCTIONS[name]
    parts = three()
    x: Any = np.asarray(parts[1].dense)
    if kind in FORMATS:
        other = place.sparse(kind, sp.coo_array(x))
    elif kind == "dense":
        other = place.put(x)
    elif kind == "fortran":
        other = place.put(np.ascontiguousarray(x.T)).T
    else:
        other = place.put(np.repeat(x, 2, axis=1))[:, ::2]
    for first in (0, 1):  # ours before or after the other
        given_ = [place.bsr(s) for s in parts]
        given_[first] = other
        expected = [s.dense for s in parts]
        expected[first] = x
        result = ours(given_)
        assert result.blocksize == (2, 3)
        assert_values(values(place, result), dense(expected))


@each_function
@pytest.mark.parametrize("kind", ["dia", "lil", "dok", "bsr 1x1", "bsr 2x3", "bsr 6x9", "np.matrix", "list", "dlpack"])
def test_the_host_takes_all_that_numpy_and_scipy_have(name: str, kind: str) -> None:
    class Foreign:
        """An array of another library."""

        def __init__(self, x: np.ndarray[Any, Any]) -> None:
            self.x = x

        def __dlpack__(self, **how: Any) -> Any:
            return self.x.__dlpack__(**how)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.x.__dlpack_device__()

    ours, _, dense = FUNCTIONS[name]
    parts = three()
    x = parts[1].dense
    if kind.startswith("bsr"):
        R, C = map(int, kind.removeprefix("bsr ").split("x"))
        other: Any = sp.bsr_array(x, blocksize=(R, C))
    elif kind in ("dia", "lil", "dok"):
        other = sp.coo_array(x).asformat(kind)
    else:
        other = {"np.matrix": np.asmatrix, "list": np.ndarray.tolist, "dlpack": Foreign}[kind](x)
    result = ours([HERE.bsr(parts[0]), other, HERE.bsr(parts[2])])
    assert_values(values(HERE, result), dense([s.dense for s in parts]))
    assert_values(values(HERE, bg.kron(HERE.bsr(parts[0]), other)), np.kron(parts[0].dense, x))
    assert_values(values(HERE, bg.kron(other, HERE.bsr(parts[0]))), np.kron(x, parts[0].dense))


@each_place
@each_function
def test_duplicates_of_other_formats_are_added_up(place: Place, name: str) -> None:
    ours, _, dense = FUNCTIONS[name]
    parts = three()
    row, col = np.array([5, 0, 5, 5]), np.array([8, 1, 8, 0])
    C = sp.coo_array((np.array([1.0, 2.0, 3.0, 4.0]), (row, col)), shape=(6, 9))
    result = ours([place.bsr(parts[0]), place.sparse("coo", C), place.bsr(parts[2])])
    assert_values(values(place, result), dense([parts[0].dense, C.toarray(), parts[2].dense]))


@each_place
@each_function
def test_transposes_that_are_not_built_work_and_become_canonical(place: Place, name: str) -> None:
    ours, _, dense = FUNCTIONS[name]
    parts = three(canonical=True)
    A = [place.bsr(s) for s in parts]
    for X in A:
        X.sum_duplicates()  # now known to be canonical
    result = ours([X.T for X in A])
    assert result.blocksize == (3, 2) and result._known_canonical
    assert_values(values(place, result), dense([s.dense.T for s in parts]))


@each_place
@each_function
def test_rows_of_objects_generators_and_tuples_are_sequences(place: Place, name: str) -> None:
    if name == "block_array":
        A = place.bsr(random_sample())
        grid = np.empty((1, 2), object)
        grid[0, 0], grid[0, 1] = A, A
        rows: list[Any] = [grid, ((A, A),), ((X for X in (A, A)) for _ in range(1))]
        for given_ in rows:
            assert bg.block_array(given_).shape == (6, 24)
        return
    function = FUNCTIONS[name][0]
    A = place.bsr(random_sample())
    objects = np.empty(2, object)
    objects[:] = [A, A]
    shape = function([A, A]).shape
    for given_ in (objects, (A, A), (X for X in (A, A))):
        assert function(given_).shape == shape


@each_place
@each_function
def test_int64_indices_stay(place: Place, name: str) -> None:
    ours, _, dense = FUNCTIONS[name]
    parts = three()
    parts[2] = Sample(parts[2].data, *(x.astype(np.int64) for x in (parts[2].indices, parts[2].indptr)), parts[2].shape)
    result = ours([place.bsr(s) for s in parts])
    assert result.indices.dtype == result.indptr.dtype == np.int64
    assert_values(values(place, result), dense([s.dense for s in parts]))
    assert bg.kron(place.bsr(parts[2]), place.bsr(parts[0])).indices.dtype == np.int64
    assert bg.kron(place.bsr(parts[0]), place.bsr(parts[2])).indices.dtype == np.int64
    assert bg.kron(place.bsr(parts[0]), place.bsr(parts[0])).indices.dtype == np.int32


@each_place
def test_indices_widen_where_the_result_needs_it(place: Place) -> None:
    """Two matrices with int32 indices whose columns together are more than 2^31."""
    wide_one = bg.bsr_array((4, 2**30), blocksize=(2, 2**10), device=place.backend.name)
    assert wide_one.indices.dtype == np.int32
    at = place.put(np.array([1], np.int32)), place.put(np.array([2**20 - 1], np.int32))
    block = bg.bsr_array((place.put(np.ones((1, 2, 2**10))), at), shape=(4, 2**30))
    assert block.indices.dtype == np.int32
    result = bg.hstack([wide_one, wide_one, block])
    assert result.indices.dtype == np.int64 and result.shape == (4, 3 * 2**30)
    assert place.backend.to_host(result.indices).tolist() == [3 * 2**20 - 1]
    row = place.put(np.array([[0.0, 0.0, 5.0]]))
    assert bg.kron(block, row).indices.dtype == np.int64
    product = bg.kron(row, block)
    assert product.indices.dtype == np.int64
    assert place.backend.to_host(product.indices).tolist() == [3 * 2**20 - 1]


# ------------------------------------------------------------------------------------- empty matrices
@each_place
@each_dtype
@each_blocksize
def test_matrices_without_blocks_rows_or_columns(
    place: Place, blocksize: tuple[int, int], dtype: np.dtype[Any]
) -> None:
    R, C = blocksize

    def empty(rows: int, cols: int) -> Any:
        return bg.bsr_array((rows * R, cols * C), dtype=dtype, blocksize=blocksize, device=place.backend.name)

    for result, shape in (
        (bg.vstack([empty(0, 2), empty(3, 2)]), (3, 2)),
        (bg.vstack([empty(0, 0)]), (0, 0)),
        (bg.hstack([empty(2, 0), empty(2, 3), empty(2, 0)]), (2, 3)),
        (bg.block_diag([empty(0, 2), empty(1, 0), empty(2, 2)]), (3, 4)),
        (bg.block_array([[empty(1, 2), None], [None, None]]), (1, 2)),
        (bg.block_array([[None, None, None], [None, empty(0, 3), None]]), (0, 3)),
    ):
        assert result.shape == (shape[0] * R, shape[1] * C) and result.nnz == 0
        assert result.dtype == dtype and result.blocksize == blocksize and result.has_canonical_format
        assert not values(place, result).any()
    s = random_sample((2, 3), blocksize, dtype)
    result = bg.block_array([[None, None, None], [empty(2, 1), None, place.bsr(s)], [None, None, None]])
    assert_values(values(place, result), np.hstack([np.zeros((2 * R, C), s.dense.dtype), s.dense]))


@each_place
def test_lines_of_none_alone_have_no_size(place: Place) -> None:
    s = random_sample()
    A = place.bsr(s)
    grid: list[list[Any]] = [[None, A, None], [None, None, None], [None, None, A]]
    reference = sp.block_array([[None if X is None else s.scipy() for X in row] for row in grid])
    result = bg.block_array(grid)
    assert result.shape == reference.shape
    assert_values(values(place, result), reference.toarray())


# ----------------------------------------------------------------------------- types, flags and memory
@each_place
@each_function
def test_the_result_is_a_matrix_only_where_no_operand_is_an_array(place: Place, name: str) -> None:
    ours = FUNCTIONS[name][0]
    s = three()[0]
    array, matrix = place.bsr(s), place.bsr(s, bg.bsr_matrix)
    csr_array = place.sparse("csr", sp.csr_array(s.dense))
    csr_matrix = place.sparse("csr", sp.csr_matrix(s.dense))
    dense = place.put(s.dense)
    for operands_, flavour in (
        ([array, array, array], bg.bsr_array),
        ([matrix, matrix, matrix], bg.bsr_matrix),
        ([matrix, array, matrix], bg.bsr_array),
        ([matrix, csr_matrix, dense], bg.bsr_matrix),
        ([matrix, csr_array, dense], bg.bsr_array),
        ([array, csr_matrix, csr_matrix], bg.bsr_array),
        ([dense, dense, matrix], bg.bsr_matrix),
    ):
        result = ours(operands_)
        values(place, result, flavour)
        assert type(result) is type(array if flavour is bg.bsr_array else matrix)
        if name != "block_array":  # scipy's is an array whatever it is given; bmat is as ours
            given_ = [X.get() if not place.is_host and hasattr(X, "get") else X for X in operands_]
            reference = FUNCTIONS[name][1](given_)
            assert isinstance(reference, sp.sparray) == (flavour is bg.bsr_array)


@each_place
@each_function
def test_flags_are_known_without_a_look(place: Place, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = FUNCTIONS[name][0]
    canonical = [place.bsr(s) for s in three(canonical=True)]
    ordered, unknown = ([place.bsr(s) for s in three(canonical=True)] for _ in range(2))
    for A in (*ordered, *unknown):
        A.indices[...] = A.indices.copy()  # a constructor may have looked at them; now nothing is known
    for A, B in zip(canonical, ordered, strict=True):
        A.sum_duplicates()
        assert B.has_sorted_indices
    monkeypatch.setattr(type(canonical[0]._backend), "is_sorted", None)  # a look
    result = ours(canonical)
    assert result.has_canonical_format and result.has_sorted_indices
    result = ours(ordered)
    assert result.has_sorted_indices and result._has_canonical_format is None and not result._known_canonical
    result = ours([*canonical[:2], unknown[2]])
    assert result._has_canonical_format is None and result._has_sorted_indices is None


@each_place
@each_function
def test_nothing_is_shared_and_operands_stay_as_they_are(place: Place, name: str) -> None:
    ours = FUNCTIONS[name][0]
    parts = [*three(duplicates=2)[:2], three(canonical=True)[2]]
    A = [place.bsr(s) for s in parts]
    before = [(X.data, X.indices, X.indptr) for X in A]
    results = [ours(A), ours(A, dtype="complex128"), bg.vstack(A[:1])]
    for X in A:
        results += [bg.kron(X, place.put(np.ones((1, 1)))), bg.kron(place.put(np.ones((1, 1))), X)]
    for result in results:
        for array in (result.data, result.indices, result.indptr):
            array[...] = 0
    for X, arrays, s in zip(A, before, parts, strict=True):
        assert X.data is arrays[0] and X.indices is arrays[1] and X.indptr is arrays[2]
        assert_values(place.blocks(X).data, s.data)
        assert_values(place.blocks(X).indices, s.indices)


def on_a_card(**how: Any) -> list[Any]:
    """Matrices on a card that are known to be canonical where they are."""
    A = [Place("cuda").bsr(s) for s in three(**how)]
    for X in A:
        X.has_canonical_format  # noqa: B018 - found out once
    return A


@pytest.mark.parametrize("lazy", [False, True], ids=["built", "transposed"])
def test_our_matrices_of_one_dtype_are_put_together_without_waiting(lazy: bool) -> None:
    place = Place("cuda")
    unknown = [place.bsr(s) for s in three(duplicates=2)]
    canonical, float32 = on_a_card(canonical=True), on_a_card(canonical=True, dtype="float32")
    dense = place.put(np.ones((2, 2)))
    with fake_cupy.waits() as waited:
        for ours, _, _ in FUNCTIONS.values():
            ours([X.T if lazy else X for X in unknown])
            ours([X.T if lazy else X for X in (*canonical[:2], float32[0])])
        bg.kron(canonical[0], dense)
        bg.kron(canonical[0], float32[1])
        assert not waited
        bool(unknown[0].indptr[0])
    assert waited
