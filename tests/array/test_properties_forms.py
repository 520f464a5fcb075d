"""Construction, conversion, copies, slices and shapes on random matrices.

Values are those of dense NumPy, formats those of scipy, as tests/strategies.py says.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import Phase, assume, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

import bsrgemm as bg
from bsrgemm.dtypes import BOOL, HALF_DTYPES

from ..strategies import (
    DTYPES,
    Place,
    Sample,
    assert_form,
    assert_values,
    check_product,
    each_place,
    flavours,
    operands,
    samples,
    widened,
)


# -------------------------------------------------------------------------------- construction, formats
@each_place
@given(a=samples(spreads=("small", "wide", "special")), flavour=flavours, order=st.sampled_from((None, "C", "F")))
def test_toarray_gives_the_values_stored(place: Place, a: Sample, flavour: type, order: str | None) -> None:
    A = place.bsr(a, flavour)
    place.blocks(A, flavour)
    X = A.toarray(order=order)
    assert X.flags.f_contiguous if order == "F" else X.flags.c_contiguous
    assert_values(place.dense(X), a.dense, a.bound)
    assert_values(place.dense(A.todense(), matrix=flavour is bg.bsr_matrix), a.dense, a.bound)


@each_place
@given(data=st.data(), a=samples())
def test_toarray_fills_an_array_of_any_layout(place: Place, data: st.DataObject, a: Sample) -> None:
    out = place.operand(data.draw(operands(a.shape, dtypes=(a.dtype,))))
    assert place.bsr(a).toarray(out=out) is out
    assert_values(place.dense(out), a.dense, a.bound)


@each_place
@given(data=st.data(), a=samples(spreads=("small", "wide", "special")), flavour=flavours)
def test_a_dense_array_comes_back_from_its_blocks(place: Place, data: st.DataObject, a: Sample, flavour: type) -> None:
    layout = data.draw(operands(a.shape, dtypes=(a.dtype,), spreads=("small", "wide", "special")))
    X, expected = place.operand(layout), widened(layout.values)
    A = flavour(X, blocksize=a.blocksize)
    blocks = place.blocks(A, flavour)
    assert A.blocksize == a.blocksize and A.dtype == a.dtype and blocks.is_canonical
    assert_values(blocks.dense, expected)
    guessed = place.blocks(flavour(X), flavour)
    assert_values(guessed.dense, expected)
    if a.dtype not in HALF_DTYPES:
        assert guessed.blocksize == a.scipy(flavour).__class__(layout.values).blocksize


@each_place
@given(a=samples(), flavour=flavours)
def test_block_coo_gives_the_same_matrix_as_the_three_arrays(place: Place, a: Sample, flavour: type) -> None:
    shuffle = np.random.default_rng(len(a.data)).permutation(len(a.data))
    arrays = (place.put(x[shuffle]) for x in (a.data, a.block_rows, a.indices))
    blocks, row, col = arrays
    A = flavour((blocks, (row, col)), shape=a.shape)
    assert A.dtype == a.dtype and A.blocksize == a.blocksize and A.nnz == a.data.size
    assert_values(place.blocks(A, flavour).dense, a.dense, a.bound)


@each_place
@given(data=st.data(), a=samples(), flavour=flavours)
def test_elements_given_one_by_one_are_added_up(place: Place, data: st.DataObject, a: Sample, flavour: type) -> None:
    R, C = a.blocksize
    row = (a.block_rows[:, None, None] * R + np.arange(R)[:, None] + np.zeros(C, int)).reshape(-1)
    col = (a.indices[:, None, None] * C + np.zeros((R, 1), int) + np.arange(C)).reshape(-1)
    blocksize = data.draw(st.sampled_from((None, (1, 1), a.blocksize)))
    arrays = (place.put(a.data.reshape(-1)), (place.put(row), place.put(col)))
    A = flavour(arrays, shape=a.shape, blocksize=blocksize)
    blocks = place.blocks(A, flavour)
    assert A.dtype == a.dtype and blocks.is_canonical
    assert blocksize in (None, A.blocksize)
    assert_values(blocks.dense, a.dense, a.bound)


@each_place
@given(a=samples(spreads=("small", "wide", "special")), flavour=flavours)
def test_other_formats_hold_the_same_values_and_come_back(place: Place, a: Sample, flavour: type) -> None:
    A = place.bsr(a, flavour)
    for format in ("csr", "csc", "coo"):
        with place.refuses(a.dtype):
            S = getattr(A, f"to{format}")()
            H = place.foreign(S, format, flavour)
            assert H.dtype == a.dtype and A.asformat(format).format == format
            assert_values(H.toarray(), a.dense, a.bound)
            if format != "csc":
                assert S.nnz == A.nnz
            B = flavour(S, blocksize=a.blocksize)
            assert B.dtype == a.dtype and B.blocksize == a.blocksize
            assert_values(place.blocks(B, flavour).dense, a.dense, a.bound)
    assert A.asformat("bsr") is A and A.asformat(None) is A


@each_place
@given(a=samples(spreads=("small",), dtypes=(np.dtype("f"), np.dtype("d"), np.dtype("D"))), flavour=flavours)
def test_a_block_size_is_guessed_as_scipy_guesses_it(place: Place, a: Sample, flavour: type) -> None:
    S = a.scipy(flavour)
    for format in ("csr", "coo"):
        theirs = S.asformat(format)
        theirs.sum_duplicates()
        ours = flavour(place.sparse(format, theirs))
        assert_form(ours, theirs.tobsr())
        assert_values(place.blocks(ours, flavour).dense, a.dense, a.bound)


@given(a=samples(), flavour=flavours)
def test_lil_dok_and_dia_hold_the_same_values_on_the_host(a: Sample, flavour: type) -> None:
    place = Place("cpu")
    A = place.bsr(a, flavour)
    for format in ("lil", "dok", "dia"):
        with place.refuses(a.dtype):
            S = A.asformat(format)
            assert_values(place.foreign(S, format, flavour).toarray(), a.dense, a.bound)


@each_place
@given(data=st.data(), a=samples(spreads=("small", "wide", "special")), flavour=flavours)
def test_tobsr_changes_the_blocks_and_not_the_values(
    place: Place, data: st.DataObject, a: Sample, flavour: type
) -> None:
    A = place.bsr(a, flavour)
    sides = ([k for k in range(1, 18) if n % k == 0] for n in a.shape)
    blocksize = tuple(data.draw(st.sampled_from(side)) for side in sides)
    B = A.tobsr(blocksize)
    assert B.blocksize == blocksize and B.dtype == a.dtype and B.shape == a.shape
    assert_values(place.blocks(B, flavour).dense, a.dense, a.bound)
    assert A.tobsr() is A
    assert_values(place.blocks(A, flavour).dense, a.dense, a.bound)


@each_place
@given(a=samples(spreads=("small", "wide", "special")), flavour=flavours)
def test_transpose_is_sorted_bsr_with_transposed_blocks(place: Place, a: Sample, flavour: type) -> None:
    A = place.bsr(a, flavour)
    for B in (A.T, A.mT, A.transpose(), A.transpose(axes=(1, 0))):
        blocks = place.blocks(B, flavour)
        assert B.blocksize == a.blocksize[::-1] and B.dtype == a.dtype and blocks.is_sorted
        assert B.nnz == A.nnz
        assert_values(blocks.dense, a.dense.T, a.bound.T)
    assert_values(place.blocks(A.T.T, flavour).dense, a.dense, a.bound)


@each_place
@given(a=samples(spreads=("small", "wide", "special")))
def test_sorting_merging_and_dropping_zero_blocks_keep_the_values(place: Place, a: Sample) -> None:
    A = place.bsr(a)
    assert A.has_sorted_indices == a.is_sorted
    A.sort_indices()
    blocks = place.blocks(A)
    assert blocks.is_sorted and A.has_sorted_indices and len(blocks.data) == len(a.data)
    assert_values(blocks.dense, a.dense, a.bound)

    A = place.bsr(a)
    B = A.sorted_indices()
    assert place.blocks(B).is_sorted
    np.testing.assert_array_equal(place.dense(A.indices), a.indices)

    A.sum_duplicates()
    blocks = place.blocks(A)
    assert blocks.is_canonical and A.has_canonical_format and len(blocks.data) == len(np.unique(a.keys))
    assert_values(blocks.dense, a.dense, a.bound)

    A.eliminate_zeros()
    blocks = place.blocks(A)
    assert (blocks.data != 0).any(axis=(1, 2)).all()
    assert_values(blocks.dense, a.dense, a.bound)

    A = place.bsr(a)
    A.eliminate_zeros()
    blocks = place.blocks(A)
    assert len(blocks.data) == int((a.data != 0).any(axis=(1, 2)).sum())
    assert_values(blocks.dense, a.dense, a.bound)


@each_place
@given(a=samples(spreads=("small",)), spare=st.integers(0, 3))
def test_arrays_longer_than_the_last_pointer_are_cut(place: Place, a: Sample, spare: int) -> None:
    data = np.concatenate([a.data, np.ones((spare, *a.blocksize), a.dtype)])
    indices = np.concatenate([a.indices, np.zeros(spare, a.indices.dtype)])
    assume(a.shape[1] > 0 or spare == 0)
    A = bg.bsr_array(tuple(map(place.put, (data, indices, a.indptr))), shape=a.shape)
    A.check_format(full_check=True)
    A.prune()
    assert_values(place.blocks(A).dense, a.dense, a.bound)


# ------------------------------------------------------------------------------------ copies and shapes
@each_place
@given(a=samples(spreads=("small", "special")), flavour=flavours)
def test_copies_and_pickles_are_equal_and_apart(place: Place, a: Sample, flavour: type) -> None:
    A = place.bsr(a, flavour)
    twins = [A.copy(), copy.copy(A), copy.deepcopy(A)]
    twins += [pickle.loads(pickle.dumps(A, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for B in twins:
        assert type(B) is type(A) and B is not A
        for mine, other in ((A.data, B.data), (A.indices, B.indices), (A.indptr, B.indptr)):
            assert not place.xp.may_share_memory(mine, other)
        blocks = place.blocks(B, flavour)
        assert blocks.dtype == a.dtype
        np.testing.assert_array_equal(blocks.indices, a.indices)
        np.testing.assert_array_equal(blocks.indptr, a.indptr)
        assert_values(blocks.data, a.data)


@each_place
@given(a=samples(spreads=("small", "special")), flavour=flavours)
def test_get_brings_a_copy_to_the_host_and_to_device_takes_it_back(place: Place, a: Sample, flavour: type) -> None:
    A = place.bsr(a, flavour)
    H = A.get()
    here = Place("cpu")
    blocks = here.blocks(H, flavour)
    assert blocks.dtype == a.dtype and H.device == "cpu"
    assert_values(blocks.data, a.data)
    B = H.to_device(place.backend.name)
    assert type(B) is type(A)
    assert_values(place.blocks(B, flavour).data, a.data)
    assert A.to_device(place.backend.name) is A
    if place.is_host:
        assert not np.may_share_memory(H.data, A.data)


def windows(side: int, block: int) -> st.SearchStrategy[slice]:
    """Slices on block boundaries, with open ends and negative bounds."""

    def bounds(pair: tuple[int, int]) -> slice:
        low, high = (n * block for n in sorted(pair))
        if high == 0:
            return slice(low, 0)
        return slice(low or None, high - side if high < side else None)

    blocks = side // block
    return st.tuples(st.integers(0, blocks), st.integers(0, blocks)).map(bounds)


@each_place
@given(data=st.data(), a=samples(spreads=("small", "wide", "special")), flavour=flavours)
def test_an_aligned_slice_is_bsr_with_values_of_its_own(
    place: Place, data: st.DataObject, a: Sample, flavour: type
) -> None:
    A = place.bsr(a, flavour)
    rows, cols = (data.draw(windows(n, block)) for n, block in zip(a.shape, a.blocksize, strict=True))
    for key in ((rows, cols), (rows, slice(None)), rows, (Ellipsis, cols), (slice(None), cols)):
        B = A[key]
        blocks = place.blocks(B, flavour)
        assert B.dtype == a.dtype and B.blocksize == a.blocksize
        assert_values(blocks.dense, a.dense[key], a.bound[key])
    if B.nnz and a.dtype != BOOL:
        B.data[...] = 7
        assert_values(place.blocks(A, flavour).dense, a.dense, a.bound)


@each_place
@given(data=st.data(), a=samples(spreads=("small",)), flavour=flavours)
def test_assignment_writes_stored_blocks_only(place: Place, data: st.DataObject, a: Sample, flavour: type) -> None:
    A = place.bsr(a, flavour)
    key = tuple(data.draw(windows(n, block)) for n, block in zip(a.shape, a.blocksize, strict=True))
    shape = a.dense[key].shape
    x = data.draw(operands(shape, dtypes=(a.dtype,), spreads=("small", "special")))
    stored = a.layers[key] > 0
    value = np.where(stored, x.values, np.zeros((), a.dtype)).astype(a.dtype)
    A[key] = place.put(value)
    expected, bound = a.dense.copy(), a.bound.copy()
    expected[key], bound[key] = widened(value), 0.0
    assert_values(place.blocks(A, flavour).dense, expected, bound)
    A[key] = 0
    expected[key] = 0
    assert_values(place.blocks(A, flavour).dense, expected, bound)
    if not stored.all():
        with pytest.raises(ValueError, match="value"):
            A[key] = 1


@each_place
@given(data=st.data(), a=samples(spreads=("small", "special")), flavour=flavours)
def test_resize_cuts_and_pads_in_place(place: Place, data: st.DataObject, a: Sample, flavour: type) -> None:
    A = place.bsr(a, flavour)
    R, C = a.blocksize
    M, N = data.draw(st.integers(0, 8)) * R, data.draw(st.integers(0, 8)) * C
    assert (A.resize((M, N)) if data.draw(st.booleans()) else A.resize(M, N)) is None
    assert A.shape == (M, N) and A.blocksize == (R, C)
    expected, bound = np.zeros((M, N), a.dense.dtype), np.zeros((M, N))
    m, n = min(M, a.shape[0]), min(N, a.shape[1])
    expected[:m, :n], bound[:m, :n] = a.dense[:m, :n], a.bound[:m, :n]
    assert_values(place.blocks(A, flavour).dense, expected, bound)
    check_product(place, A @ place.put(np.zeros(N, a.dtype)), place.blocks(A), np.zeros(N, a.dtype))


@each_place
@given(
    data=st.data(),
    a=samples(spreads=("small", "special")),
    flavour=flavours,
    order=st.sampled_from(("C", "F")),
)
def test_reshape_is_coo_in_the_order_asked_for(
    place: Place, data: st.DataObject, a: Sample, flavour: type, order: str
) -> None:
    M, N = a.shape
    A = place.bsr(a, flavour)
    assert A.reshape(M, N, order=order) is A and A.reshape((M, N), order=order) is A
    assume(M * N > 0)
    rows = data.draw(st.sampled_from([k for k in range(1, 30) if M * N % k == 0 and k != M] or [1]))
    assume(rows != M)
    with place.refuses(a.dtype):
        B = A.reshape(rows, -1, order=order)
        H = place.foreign(B, "coo", flavour)
        bound = a.bound.reshape(rows, -1, order=order)
        assert_values(H.toarray(), a.dense.reshape(rows, -1, order=order), bound)


# ------------------------------------------------------------------------- names of the matrix interface
@each_place
@given(data=st.data(), a=samples(spreads=("small",), dtypes=(np.dtype("?"), np.dtype("d"), np.dtype("D"))))
def test_the_names_of_matrices_only_answer_as_scipys(place: Place, data: st.DataObject, a: Sample) -> None:
    assume(0 not in a.shape)
    A, S = place.bsr(a, bg.bsr_matrix), a.scipy(bg.bsr_matrix)
    M, N = a.shape
    i, j = data.draw(st.integers(-M, M - 1)), data.draw(st.integers(-N, N - 1))
    row = A.getrow(i)
    assert_form(row, S.getrow(i))
    assert_values(place.foreign(row, "csr", bg.bsr_matrix).toarray(), a.dense[[i]], a.bound[[i]])
    column = A.getcol(j)
    assert column.format == S.getcol(j).format and column.shape == (M, 1)
    assert_values(place.blocks(column, bg.bsr_matrix).dense, a.dense[:, [j]], a.bound[:, [j]])
    assert_values(place.blocks(A.getH(), bg.bsr_matrix).dense, a.dense.conj().T, a.bound.T)
    assert A.getnnz() == S.getnnz() and A.getformat() == "bsr" and A.get_shape() == A.shape
    assert A.getmaxprint() == S.getmaxprint() and A.asfptype().dtype == S.asfptype().dtype
    A.set_shape((1, M * N))
    assert A.shape == (1, M * N) and A.format == "bsr"
    assert_values(place.blocks(A, bg.bsr_matrix).dense, a.dense.reshape(1, -1), a.bound.reshape(1, -1))
    A.shape = (M, N)
    assert_values(place.blocks(A, bg.bsr_matrix).dense, a.dense, a.bound)
    assert not hasattr(place.bsr(a), "getrow")


# --------------------------------------------------------------------------------------- the strategies
PROMISED: dict[str, Callable[[Sample], bool]] = {
    "duplicates": lambda s: s.deepest > 2,
    "unsorted rows": lambda s: not s.is_sorted,
    "canonical": lambda s: s.is_canonical and len(s.data) > 3,
    "empty rows between full ones": lambda s: list(np.diff(s.indptr) > 0)[:3] == [True, False, True],
    "a block of zeros": lambda s: bool((s.data == 0).all(axis=(1, 2)).any()) and s.data.size > 20,
    "no rows": lambda s: s.shape[0] == 0 < s.shape[1],
    "no columns": lambda s: s.shape[1] == 0 < s.shape[0],
    "no blocks": lambda s: 0 not in s.shape and not len(s.data),
    "blocks 17 wide": lambda s: s.blocksize[1] == 17 and len(s.data) > 0,
    "blocks 17 high": lambda s: s.blocksize[0] == 17 and len(s.data) > 0,
    "rectangular blocks": lambda s: s.blocksize[0] not in (1, s.blocksize[1]) and len(s.data) > 0,
    "64-bit indices": lambda s: s.indices.dtype == np.int64 and len(s.data) > 0,
    "32-bit indices": lambda s: s.indices.dtype == np.int32 and len(s.data) > 0,
    **{f"{d} blocks": lambda s, d=d: s.dtype == d and len(s.data) > 0 for d in DTYPES},
}


def test_the_strategies_reach_what_they_promise() -> None:
    search = settings(max_examples=3000, deadline=None, database=None, phases=[Phase.generate])
    missing = set(PROMISED)

    def last_of_all(sample: Sample) -> bool:
        missing.difference_update([what for what in missing if PROMISED[what](sample)])
        return not missing

    with contextlib.suppress(NoSuchExample):
        find(samples(), last_of_all, settings=search)
    assert not missing
