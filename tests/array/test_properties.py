"""Every operation of the surface on random matrices: values against dense NumPy, formats against scipy.

Values are exact for integers, bool and single floats, and within a bound made of the dtype's eps and of the
absolute values summed otherwise. scipy tells the format, block size and flavour of a result, not its values:
it is wrong in bsr_matrix.sum, nonzero, astype(bool) and setdiag.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, assume, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16, BOOL, HALF_DTYPES, scalar_result_dtype

from ..strategies import (
    COMPLEX,
    DTYPES,
    FLOATS,
    INEXACT,
    INTEGERS,
    NUMBERS,
    REAL_DTYPES,
    Operand,
    Place,
    Sample,
    assert_form,
    assert_values,
    blocksizes,
    check_product,
    dense_operands,
    dtypes,
    each_place,
    eps,
    flavours,
    in_common_dtype,
    magnitude,
    operands,
    products,
    quietly,
    random_values,
    result_dtype,
    rounding,
    samples,
    seeds,
    smallest,
    spreads_for,
    wide,
    widened,
)

COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
UFUNCS = (  # noqa: SIM905
    "sin tan arcsin arctan sinh tanh arcsinh arctanh rint sign expm1 log1p deg2rad rad2deg floor ceil trunc sqrt"
).split()
#: Python numbers are weak, NumPy's are not.
SCALARS = (
    0,
    1,
    3,
    2.5,
    -0.5,
    1.5 - 2j,
    np.float32(1.5),
    np.float64(0.25),
    np.int8(2),
    np.complex64(2j),
    True,
)


@st.composite
def twins(draw: st.DrawFn, *, spreads: tuple[str, ...] = ("small",), **options: Any) -> tuple[Sample, Sample]:
    """Two matrices of one shape; the block of the second is the same or any that divides."""
    a = draw(samples(spreads=spreads, **options))
    if draw(st.booleans()):
        blocksize = a.blocksize
    else:
        (M, N) = a.shape
        sides = ([k for k in range(1, 18) if n % k == 0] for n in (M, N))
        blocksize = tuple(draw(st.sampled_from(side)) for side in sides)  # type: ignore[assignment]
    grid = (a.shape[0] // blocksize[0], a.shape[1] // blocksize[1])
    b = draw(samples(blocksize=blocksize, grid=grid, spreads=spreads, **options))
    return a, b


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


# --------------------------------------------------------------------------------------- dense products
@each_place
@given(case=products(), flavour=flavours)
def test_sparse_times_dense(place: Place, case: tuple[Sample, Operand], flavour: type) -> None:
    a, x = case
    A, X = place.bsr(a, flavour), place.operand(x)
    check_product(place, A @ X, a, x.values)
    check_product(place, A.dot(X), a, x.values)
    check_product(place, bg.matmul(A, X), a, x.values)
    if flavour is bg.bsr_matrix:
        check_product(place, A * X, a, x.values)


@each_place
@given(case=products(first=False), flavour=flavours)
def test_dense_times_sparse(place: Place, case: tuple[Sample, Operand], flavour: type) -> None:
    a, x = case
    A, X = place.bsr(a, flavour), place.operand(x)
    dtype = result_dtype(a.dtype, x.dtype)
    factor, dense = in_common_dtype(x.values, a.dense, dtype)
    additions = int(a.layers.sum(axis=0).max(initial=0)) + 8
    bound: Any = 0.0
    if dtype in INEXACT:
        bound = rounding(dtype, magnitude(x.values) @ a.weight, additions) + magnitude(x.values) @ a.bound
    for result in (X @ A, bg.matmul(X, A)):
        assert result.dtype == dtype
        assert_values(place.dense(result), factor @ dense, bound)


@each_place
@given(case=products(first=False), flavour=flavours)
def test_transposed_times_dense(place: Place, case: tuple[Sample, Operand], flavour: type) -> None:
    a, x = case
    A = place.bsr(a, flavour)
    X = place.operand(x).T
    dtype = result_dtype(a.dtype, x.dtype)
    dense, factor = in_common_dtype(a.dense.T, x.values.T, dtype)
    additions = int(a.layers.sum(axis=0).max(initial=0)) + 8
    bound: Any = 0.0
    if dtype in INEXACT:
        size = magnitude(x.values.T)
        bound = rounding(dtype, a.weight.T @ size, additions) + a.bound.T @ size
    result = A.T @ X
    assert result.dtype == dtype
    assert_values(place.dense(result), dense @ factor, bound)


@given(case=products(), flavour=flavours)
def test_lists_and_np_matrix_are_operands_on_the_host(case: tuple[Sample, Operand], flavour: type) -> None:
    place = Place("cpu")
    a, x = case
    assume(x.values.ndim == 2 and x.dtype != BFLOAT16)
    A = place.bsr(a, flavour)
    check_product(place, A @ np.asmatrix(x.values), a, x.values, matrix=flavour is bg.bsr_matrix)
    assume(x.values.size)
    check_product(place, A @ x.values.tolist(), a, np.asarray(x.values.tolist()))


@st.composite
def scaled_products(draw: st.DrawFn) -> tuple[Sample, Operand, np.dtype[Any], Any, Any]:
    """A product with an output dtype that can hold it and factors that the dtype can carry."""
    a_dtype, x_dtype = draw(dtypes), draw(dtypes)
    promoted = result_dtype(a_dtype, x_dtype)
    ranks = ["b", "i", "f", "c"]
    rank = {"u": "i", "V": "f"}.get(promoted.kind, promoted.kind)
    wider = [
        d
        for d in DTYPES
        if ranks.index({"u": "i", "V": "f"}.get(d.kind, d.kind)) > ranks.index(rank)
        or d == promoted
        or (d.kind == promoted.kind and d.kind in "iufc")
        or (rank == "f" and d in FLOATS)
    ]
    dtype = draw(st.sampled_from(wider))
    spreads = spreads_for(a_dtype, x_dtype, dtype)
    if dtype in HALF_DTYPES:
        spreads = ("small",)
    a = draw(samples(dtypes=(a_dtype,), spreads=spreads))
    x = draw(dense_operands(a.shape[1], dtypes=(x_dtype,), spreads=spreads))
    factors: tuple[Any, ...] = (0, 1)
    if dtype != BOOL:
        factors += (2, 3) if dtype.kind == "u" else (2, -1, np.int64(-3))
    if dtype in INEXACT:
        factors += (0.5, np.float32(-1.25))
    if dtype in COMPLEX:
        factors += (1.5j, np.complex64(1 - 1j))
    return a, x, dtype, draw(st.sampled_from(factors)), draw(st.sampled_from(factors))


@each_place
@given(data=st.data(), case=scaled_products())
def test_matmul_scales_adds_and_delivers_the_dtype_asked_for(
    place: Place, data: st.DataObject, case: tuple[Sample, Operand, np.dtype[Any], Any, Any]
) -> None:
    a, x, dtype, alpha, beta = case
    A, X = place.bsr(a), place.operand(x)
    shape = (a.shape[0], *x.values.shape[1:])
    before = data.draw(operands(shape, dtypes=(dtype,), spreads=("small",)))
    inner = result_dtype(result_dtype(a.dtype, x.dtype), dtype)
    with quietly():
        dense, factor = in_common_dtype(a.dense, x.values, inner)
        number = wide(inner).type
        product = dense @ factor
        old = before.values.astype(wide(inner))
        if inner == BOOL:
            scaled, expected = product & bool(alpha), (product & bool(alpha)) | (old & bool(beta))
        else:
            scaled = product * np.asarray(alpha).astype(number)
            expected = scaled + old * np.asarray(beta).astype(number)
        if dtype.kind in "iu":
            scaled, expected = scaled.astype(dtype), expected.astype(dtype)
    bound: Any = 0.0
    old_bound: Any = 0.0
    if dtype in INEXACT:
        additions = int(a.layers.sum(axis=1).max(initial=0)) + 12
        weight = abs(alpha) * (a.weight @ magnitude(x.values))
        merging = abs(alpha) * (a.bound @ magnitude(x.values))
        # The sum is rounded in `inner` and delivered in `dtype`; the wider eps of the two bounds both.
        coarse = max((inner, dtype), key=eps)
        bound = rounding(coarse, weight, additions) + merging
        old_bound = rounding(coarse, weight + abs(beta) * magnitude(before.values), additions) + merging
    result = bg.matmul(A, X, alpha=alpha, out_dtype=dtype)
    assert result.dtype == dtype
    assert_values(place.dense(result), scaled, bound)
    out = place.operand(before)
    assert bg.matmul(A, X, alpha=alpha, beta=beta, out=out) is out
    assert_values(place.dense(out), expected, old_bound)


@each_place
@given(data=st.data(), a=samples(dtypes=INEXACT))
def test_out_is_not_read_when_beta_is_zero(place: Place, data: st.DataObject, a: Sample) -> None:
    x = data.draw(dense_operands(a.shape[1], dtypes=(a.dtype,)))
    out = place.put(np.full((a.shape[0], *x.values.shape[1:]), np.nan, a.dtype))
    bg.matmul(place.bsr(a), place.operand(x), out=out)
    check_product(place, out, a, x.values)


@each_place
@given(data=st.data(), case=products(first=False))
def test_matmul_writes_dense_times_sparse_into_out(
    place: Place, data: st.DataObject, case: tuple[Sample, Operand]
) -> None:
    a, x = case
    dtype = result_dtype(a.dtype, x.dtype)
    assume(dtype in INEXACT)
    before = data.draw(operands((*x.values.shape[:-1], a.shape[1]), dtypes=(dtype,), spreads=("small",)))
    out = place.operand(before)
    assert bg.matmul(place.operand(x), place.bsr(a), out=out, alpha=2, beta=-1) is out
    factor, dense = in_common_dtype(x.values, a.dense, dtype)
    additions = int(a.layers.sum(axis=0).max(initial=0)) + 12
    weight = 2 * (magnitude(x.values) @ a.weight) + magnitude(before.values)
    bound = rounding(dtype, weight, additions) + 2 * (magnitude(x.values) @ a.bound)
    assert_values(place.dense(out), 2 * (factor @ dense) - widened(before.values), bound)


# -------------------------------------------------------------------------------------- sparse products
@st.composite
def chains(draw: st.DrawFn, b_dtypes: tuple[np.dtype[Any], ...] = DTYPES) -> tuple[Sample, Sample]:
    """Two matrices that can be multiplied; their inner blocks agree or not."""
    a_dtype, b_dtype = draw(dtypes), draw(st.sampled_from(b_dtypes))
    spreads = spreads_for(a_dtype, b_dtype)
    a = draw(samples(dtypes=(a_dtype,), spreads=spreads))
    inner = draw(st.sampled_from([k for k in range(1, 18) if a.shape[1] % k == 0]))
    if draw(st.booleans()):
        inner = a.blocksize[1]
    blocksize = (inner, draw(blocksizes)[1])
    grid = (a.shape[1] // inner, draw(st.integers(0, 6)))
    return a, draw(samples(dtypes=(b_dtype,), spreads=spreads, blocksize=blocksize, grid=grid))


def sparse_product(a: Sample, b: Sample) -> tuple[np.dtype[Any], Any, Any]:
    """(dtype, values, bound) of ``a @ b``."""
    dtype = result_dtype(a.dtype, b.dtype)
    x, y = in_common_dtype(a.dense, b.dense, dtype)
    if dtype.kind in "biu":
        return dtype, x @ y, 0.0
    additions = int(a.layers.sum(axis=1).max(initial=0)) * max(b.deepest, 1) + 8
    merging = a.bound @ b.weight + a.weight @ b.bound  # duplicates may be added up in their own dtype first
    return dtype, x @ y, rounding(dtype, a.weight @ b.weight, additions) + merging


@each_place
@given(case=chains(), flavour=flavours)
def test_sparse_times_sparse_is_bsr_with_the_outer_blocks(
    place: Place, case: tuple[Sample, Sample], flavour: type
) -> None:
    a, b = case
    dtype, expected, bound = sparse_product(a, b)
    A, B = place.bsr(a, flavour), place.bsr(b, flavour)
    for result in (A @ B, A.dot(B)) if flavour is bg.bsr_array else (A @ B, A * B):
        blocks = place.blocks(result, flavour)
        assert result.dtype == dtype and result.blocksize == (a.blocksize[0], b.blocksize[1])
        assert len(np.unique(blocks.keys)) == len(blocks.keys)
        assert_values(blocks.dense, expected, bound)


@each_place
@given(
    case=chains(b_dtypes=tuple(np.dtype(c) for c in "?fdFD")),
    flavour=flavours,
    format=st.sampled_from(("csr", "csc", "coo")),
)
def test_bsr_times_another_format_is_bsr_with_blocks_one_wide(
    place: Place, case: tuple[Sample, Sample], flavour: type, format: str
) -> None:
    a, b = case
    assume(b.deepest <= 1)  # scipy adds duplicates up in its own order when it leaves BSR
    dtype, expected, bound = sparse_product(a, b)
    result = place.bsr(a, flavour) @ place.sparse(format, b.scipy(flavour))
    blocks = place.blocks(result, flavour)
    assert result.dtype == dtype and result.blocksize == (a.blocksize[0], 1)
    assert_values(blocks.dense, expected, bound)


@each_place
@given(a=samples(spreads=("small",), dtypes=tuple(np.dtype(c) for c in "ilfdFD")), n=st.integers(0, 3))
def test_the_power_of_a_matrix_is_a_repeated_product(place: Place, a: Sample, n: int) -> None:
    square = Sample(a.data[:, : min(a.blocksize), : min(a.blocksize)], a.indices, a.indptr, (0, 0))
    side = min(len(a.indptr) - 1, a.shape[1] // a.blocksize[1])
    keep = (square.block_rows < side) & (square.indices < side)
    R = min(a.blocksize)
    rows = square.block_rows[keep]
    s = Sample(
        square.data[keep],
        square.indices[keep],
        np.searchsorted(rows, np.arange(side + 1)).astype(a.indptr.dtype),
        (side * R, side * R),
    )
    A = place.bsr(s, bg.bsr_matrix)
    result = A**n
    expected, weight = np.linalg.matrix_power(s.dense, n), np.linalg.matrix_power(s.weight, n)
    assert result.dtype == s.dtype and result.shape == s.shape
    additions = (int(s.layers.sum(axis=1).max(initial=0)) + 8) * 3
    assert_values(place.blocks(result, bg.bsr_matrix).dense, expected, rounding(s.dtype, weight, additions))


# ------------------------------------------------------------------------------------ sums and products
@each_place
@given(case=twins(spreads=("small", "wide")), flavour=flavours)
def test_sum_and_difference_are_bsr_in_the_first_blocks(
    place: Place, case: tuple[Sample, Sample], flavour: type
) -> None:
    a, b = case
    dtype = result_dtype(a.dtype, b.dtype)
    A, B = place.bsr(a, flavour), place.bsr(b, flavour)
    x, y = in_common_dtype(a.dense, b.dense, dtype)
    additions = a.layers + b.layers + 4
    weight = np.maximum(a.weight, 0) + b.weight
    # A float that came from an integer or a narrower float is rounded once more.
    bound = rounding(dtype, weight, additions) + a.bound + b.bound if dtype in INEXACT else 0.0
    for op in (operator.add, operator.sub):
        if op is operator.sub and dtype == BOOL:
            continue  # NumPy has no difference of booleans either
        result = op(A, B)
        assert result.dtype == dtype and result.blocksize == a.blocksize
        if 0 not in a.shape:
            assert_form(result, op(a.scipy(flavour), b.scipy(flavour)))
        blocks = place.blocks(result, flavour)
        assert blocks.is_canonical
        assert_values(blocks.dense, op(x, y), bound)
    assert_values(place.blocks(A, flavour).dense, a.dense, a.bound)
    assert_values(place.blocks(B, flavour).dense, b.dense, b.bound)


@each_place
@given(data=st.data(), a=samples(spreads=("small",)), flavour=flavours)
def test_sum_with_a_dense_array_is_dense(place: Place, data: st.DataObject, a: Sample, flavour: type) -> None:
    A = place.bsr(a, flavour)
    x = data.draw(operands(a.shape, spreads=("small",)))
    X = place.operand(x)
    dtype = result_dtype(a.dtype, x.dtype)
    dense, other = in_common_dtype(a.dense, x.values, dtype)
    bound = rounding(dtype, a.weight + magnitude(x.values), a.layers + 4) + a.bound if dtype in INEXACT else 0.0
    matrix = flavour is bg.bsr_matrix
    results = [(A + X, dense + other), (X + A, dense + other)]
    if dtype != BOOL:
        results += [(A - X, dense - other), (X - A, other - dense)]
    for result, expected in results:
        assert result.dtype == dtype
        assert_values(place.dense(result, matrix=matrix), expected, bound)
    assert_values(place.blocks(A + 0, flavour).dense, a.dense, a.bound)
    with pytest.raises(NotImplementedError):
        A + 1


def product_of_elements_bound(a: Sample, b: Sample, dtype: np.dtype[Any]) -> Any:
    """Error bound of ``a * b`` element by element, duplicates added up in their own dtype first."""
    if dtype not in INEXACT:
        return 0.0
    merging = a.bound * b.weight + a.weight * b.bound
    return rounding(dtype, a.weight * b.weight, a.layers + b.layers + 4) + merging


@each_place
@given(case=twins(spreads=("small", "special")), flavour=flavours)
def test_the_element_wise_product_is_bsr_in_the_first_blocks(
    place: Place, case: tuple[Sample, Sample], flavour: type
) -> None:
    a, b = case
    dtype = result_dtype(a.dtype, b.dtype)
    A, B = place.bsr(a, flavour), place.bsr(b, flavour)
    x, y = in_common_dtype(a.dense, b.dense, dtype)
    with quietly():
        expected = x * y
        bound = product_of_elements_bound(a, b, dtype)
        result = A.multiply(B)
        if 0 not in a.shape:
            assert_form(result, a.scipy(flavour).multiply(b.scipy(flavour)))
        assert result.dtype == dtype and result.blocksize == a.blocksize
        assert_values(place.blocks(result, flavour).dense, expected, bound)
        if flavour is bg.bsr_array:
            assert_values(place.blocks(A * B, flavour).dense, expected, bound)


@each_place
@given(data=st.data(), a=samples(spreads=("small",)), flavour=flavours)
def test_the_element_wise_product_with_a_dense_array_is_coo(
    place: Place, data: st.DataObject, a: Sample, flavour: type
) -> None:
    A = place.bsr(a, flavour)
    M, N = a.shape
    assume(M * N > 1 and 0 not in a.shape)
    shape = data.draw(st.sampled_from(((M, N), (1, N), (M, 1), (N,))))
    x = data.draw(operands(shape, spreads=("small",)))
    dtype = result_dtype(a.dtype, x.dtype)
    dense, other = in_common_dtype(a.dense, x.values, dtype)
    expected = dense * other
    bound: Any = 0.0
    if dtype in INEXACT:
        size = magnitude(x.values)
        bound = rounding(dtype, a.weight * size, a.layers + 4) + a.bound * size
    if np.prod(shape) == 1:
        result = A.multiply(place.operand(x))
        assert_values(place.blocks(result, flavour).dense, expected, bound)
        return
    with place.refuses(dtype):
        result = A.multiply(place.operand(x))
        theirs = a.scipy(flavour).multiply(x.values.astype(np.float64) if x.dtype in HALF_DTYPES else x.values)
        assert result.format == theirs.format and result.shape == theirs.shape
        assert result.dtype == dtype
        assert_values(place.foreign(result, "coo", flavour).toarray(), expected, bound)


@each_place
@given(data=st.data(), a=samples(spreads=("small",)), flavour=flavours, along=st.sampled_from((0, 1)))
def test_the_element_wise_product_with_a_sparse_row_or_column(
    place: Place, data: st.DataObject, a: Sample, flavour: type, along: int
) -> None:
    M, N = a.shape
    assume(M > 1 and N > 1)
    grid = (1, N) if along == 0 else (M, 1)
    b = data.draw(samples(blocksize=(1, 1), grid=grid, spreads=("small",)))
    dtype = result_dtype(a.dtype, b.dtype)
    x, y = in_common_dtype(a.dense, b.dense, dtype)
    bound = product_of_elements_bound(a, b, dtype)
    theirs = a.scipy(flavour).multiply(b.scipy(flavour))
    A, B = place.bsr(a, flavour), place.bsr(b, flavour)
    if theirs.format == "bsr":
        result = A.multiply(B)
        assert_values(place.blocks(result, flavour).dense, x * y, bound)
        assert_form(result, theirs)
        assert result.dtype == dtype
        return
    with place.refuses(dtype):
        result = A.multiply(B)
        assert result.dtype == dtype
        assert_values(place.foreign(result, theirs.format, flavour).toarray(), x * y, bound)


@each_place
@given(a=samples(spreads=("small", "wide"), duplicates=False), flavour=flavours, s=st.sampled_from(SCALARS))
def test_scaling_is_numpys_on_every_stored_value(place: Place, a: Sample, flavour: type, s: Any) -> None:
    A = place.bsr(a, flavour)
    with quietly():
        data = a.data.astype(np.float32) if a.dtype == BFLOAT16 else a.data
        dtype = scalar_result_dtype(a.dtype, s)
        expected = (data * s).astype(dtype)
        for result in (A * s, s * A, A.multiply(s)):
            blocks = place.blocks(result, flavour)
            assert result.dtype == dtype and result.blocksize == a.blocksize
            assert_values(blocks.data, expected, eps(dtype) * magnitude(expected))
        assume(s != 0)
        quotient = data / s
        result = A / s
        wanted = quotient.dtype if a.dtype != BFLOAT16 else dtype
        assert result.dtype == wanted
        bound = 2 * eps(wanted) * magnitude(quotient)
        assert_values(place.blocks(result, flavour).data, quotient.astype(wanted), bound)


@each_place
@given(a=samples(spreads=("small",)), flavour=flavours, s=st.sampled_from((2, 3, True, 0.5)))
def test_scaling_with_duplicates_scales_the_values(place: Place, a: Sample, flavour: type, s: Any) -> None:
    dtype = scalar_result_dtype(a.dtype, s)
    result = place.bsr(a, flavour) * s
    assert result.dtype == dtype
    expected = a.dense.astype(wide(dtype)) * wide(dtype).type(s)
    bound = rounding(dtype, a.weight * s, a.layers + 2) + a.bound * s if dtype in INEXACT else 0.0
    assert_values(place.blocks(result, flavour).dense, expected, bound)


@each_place
@given(a=samples(spreads=("small",), dtypes=NUMBERS, duplicates=False))
def test_scaling_in_place_keeps_the_arrays(place: Place, a: Sample) -> None:
    A = place.bsr(a)
    data = A.data
    A *= 2
    assert A.data is data
    assert_values(place.blocks(A).data, (a.data * a.dtype.type(2)).astype(a.dtype))
    if a.dtype in INEXACT:
        A /= 2
        assert A.data is data
        assert_values(place.blocks(A).data, a.data)


@each_place
@given(data=st.data(), a=samples(spreads=("small",), dtypes=INEXACT), flavour=flavours)
def test_quotients_are_scipys_forms_with_numpys_values(
    place: Place, data: st.DataObject, a: Sample, flavour: type
) -> None:
    b = data.draw(
        samples(
            blocksize=a.blocksize,
            grid=(len(a.indptr) - 1, a.shape[1] // a.blocksize[1]),
            dtypes=(a.dtype,),
            spreads=("small",),
        )
    )
    A, B = place.bsr(a, flavour), place.bsr(b, flavour)
    with quietly():
        result = A / B
        assert result.dtype == a.dtype
        exact = a.dense / b.dense
        off = rounding(a.dtype, magnitude(exact), 4)
        got = place.dense(result, matrix=flavour is bg.bsr_matrix)
        if a.dtype.kind == "c":  # which infinities or NaNs a complex number over zero has, C++ libraries leave open
            by_zero = b.dense == 0
            assert not np.isfinite(got[by_zero]).any()
            got = np.where(by_zero, exact, got)
        assert_values(got, exact, np.where(off == off, off, 0))


@each_place
@given(data=st.data(), a=samples(spreads=("small",), dtypes=INEXACT), flavour=flavours)
def test_the_quotient_by_a_dense_array_is_coo(place: Place, data: st.DataObject, a: Sample, flavour: type) -> None:
    M, N = a.shape
    assume(M * N > 1)
    x = data.draw(operands((M, N), dtypes=(a.dtype,), spreads=("small",)))
    base = np.where(x.base == 0, np.ones((), a.dtype), x.base).astype(a.dtype)
    divisor = Operand(base, x.transposed, x.key)
    exact = a.dense / widened(divisor.values)
    with place.refuses(a.dtype):
        result = place.bsr(a, flavour) / place.operand(divisor)
        assert result.dtype == a.dtype
        # It is a product with 1 / x, as in scipy: two roundings.
        bound = rounding(a.dtype, a.weight / magnitude(divisor.values), a.layers + 8)
        assert_values(place.foreign(result, "coo", flavour).toarray(), exact, bound)


# ----------------------------------------------------------------------------------------- comparisons
@each_place
@given(
    case=twins(spreads=("small", "special"), dtypes=REAL_DTYPES),
    flavour=flavours,
    op=st.sampled_from(COMPARISONS),
)
def test_comparing_two_matrices_gives_csr_of_booleans(
    place: Place, case: tuple[Sample, Sample], flavour: type, op: Any
) -> None:
    a, b = (x.merged() for x in case)
    A, B = place.bsr(a, flavour), place.bsr(b, flavour)
    with quietly():
        result = op(A, B)
        expected = op(*in_common_dtype(a.dense, b.dense, result_dtype(a.dtype, b.dtype)))
    H = place.foreign(result, "csr", flavour)
    assert H.dtype == np.bool_
    assert_values(H.toarray(), expected)


@each_place
@given(
    a=samples(spreads=("small", "special"), dtypes=REAL_DTYPES),
    flavour=flavours,
    op=st.sampled_from(COMPARISONS),
    s=st.sampled_from((0, 1, 2, -1, 0.5, np.nan, np.inf, -np.inf)),
)
def test_comparing_with_a_number_gives_csr_of_booleans(place: Place, a: Sample, flavour: type, op: Any, s: Any) -> None:
    a = a.merged()
    with quietly():
        result = op(place.bsr(a, flavour), s)
        expected = op(a.dense, s)
    assert result.dtype == np.bool_
    if not np.isnan(s):
        assert_values(place.foreign(result, "csr", flavour).toarray(), expected)
    else:
        H = result if place.is_host else result.get()
        assert_values(H.toarray(), expected)


@each_place
@given(
    data=st.data(),
    a=samples(spreads=("small", "special"), dtypes=REAL_DTYPES),
    op=st.sampled_from(COMPARISONS),
)
def test_comparing_with_a_dense_array_is_dense(place: Place, data: st.DataObject, a: Sample, op: Any) -> None:
    a = a.merged()
    x = data.draw(operands(a.shape, dtypes=(a.dtype,), spreads=("small", "special")))
    for flavour in (bg.bsr_array, bg.bsr_matrix):
        with quietly():
            result = op(place.bsr(a, flavour), place.operand(x))
            expected = op(a.dense, widened(x.values))
        assert result.dtype == np.bool_
        assert_values(place.dense(result, matrix=flavour is bg.bsr_matrix), expected)


@each_place
@given(
    case=twins(spreads=("small", "special"), dtypes=REAL_DTYPES),
    flavour=flavours,
    name=st.sampled_from(("maximum", "minimum")),
)
def test_extremes_of_two_matrices_are_csr(place: Place, case: tuple[Sample, Sample], flavour: type, name: str) -> None:
    a, b = (x.merged() for x in case)
    A, B = place.bsr(a, flavour), place.bsr(b, flavour)
    dtype = result_dtype(a.dtype, b.dtype)
    expected = getattr(np, name)(*in_common_dtype(a.dense, b.dense, dtype))
    with quietly(), place.refuses(dtype):
        result = getattr(A, name)(B)
        assert result.dtype == dtype
        assert_values(place.foreign(result, "csr", flavour).toarray(), expected)


@each_place
@given(
    data=st.data(),
    a=samples(spreads=("small", "special"), dtypes=REAL_DTYPES),
    flavour=flavours,
    name=st.sampled_from(("maximum", "minimum")),
)
def test_extremes_with_a_number_or_a_dense_array(
    place: Place, data: st.DataObject, a: Sample, flavour: type, name: str
) -> None:
    a = a.merged()
    A = place.bsr(a, flavour)
    s = data.draw(st.sampled_from((0, 1) if a.dtype.kind in "bu" else (0, 1, -1)))
    dtype = scalar_result_dtype(a.dtype, s)
    stays_sparse = s <= 0 if name == "maximum" else s >= 0
    with quietly():
        expected = getattr(np, name)(a.dense, wide(dtype).type(s) if dtype != BOOL else s)
        if stays_sparse:
            with place.refuses(dtype):
                result = getattr(A, name)(s)
                assert result.dtype == dtype
                assert_values(place.foreign(result, "csr", flavour).toarray(), expected)
        else:
            result = getattr(A, name)(s)
            assert result.dtype == dtype
            assert_values(place.blocks(result, flavour).dense, expected)
        x = data.draw(operands(a.shape, dtypes=(a.dtype,), spreads=("small", "special")))
        dense = getattr(A, name)(place.operand(x))
        assert dense.dtype == a.dtype
        assert_values(
            place.dense(dense, matrix=flavour is bg.bsr_matrix),
            getattr(np, name)(a.dense, widened(x.values)),
        )


# ------------------------------------------------------------------------------------------ reductions
def line_shape(flavour: type, shape: tuple[int, int], axis: int) -> tuple[int, ...]:
    """The shape of a reduction over an axis: a vector, or a row or column for matrices."""
    M, N = shape
    if flavour is bg.bsr_array:
        return (N,) if axis % 2 == 0 else (M,)
    return (1, N) if axis % 2 == 0 else (M, 1)


@each_place
@given(a=samples(), flavour=flavours, axis=st.sampled_from((None, 0, 1, -1, -2, (0, 1))))
def test_sum_adds_the_elements_in_numpys_dtype(place: Place, a: Sample, flavour: type, axis: Any) -> None:
    A = place.bsr(a, flavour)
    line = None if axis in (None, (0, 1)) else axis
    dtype = a.dtype if a.dtype == BFLOAT16 else np.zeros(1, a.dtype).sum().dtype
    with quietly():
        result = A.sum(axis=axis)
        expected = a.dense.sum(axis=line)
        weight, additions = a.weight.sum(axis=line), a.layers.sum(axis=line) + 8
        bound = rounding(dtype, weight, additions) if dtype in INEXACT else 0.0
        assert result.dtype == dtype
        if line is None:
            assert_values(place.number(result), expected, bound)
        else:
            shape = line_shape(flavour, a.shape, line)
            values = place.dense(result, matrix=flavour is bg.bsr_matrix)
            assert_values(values, expected.reshape(shape), np.reshape(bound, shape) if np.ndim(bound) else bound)
        out = place.put(np.zeros(shape if line is not None else () if flavour is bg.bsr_array else (1, 1), dtype))
        assert A.sum(axis=axis, out=out) is out
        assert_values(place.dense(out).reshape(np.shape(expected)), expected, bound)


@each_place
@given(a=samples(spreads=("small",)), flavour=flavours, axis=st.sampled_from((None, 0, 1, -1)))
def test_sum_and_mean_take_a_dtype(place: Place, a: Sample, flavour: type, axis: Any) -> None:
    A = place.bsr(a, flavour)
    dtype = np.dtype(np.complex128 if a.dtype.kind == "c" else np.float64)
    with quietly():
        expected = a.dense.astype(dtype).sum(axis=axis)
        bound = rounding(dtype, a.weight.sum(axis=axis), a.layers.sum(axis=axis) + 8)
        bound = bound + np.where(a.layers > 1, a.bound, 0).sum(axis=axis)
        result = A.sum(axis=axis, dtype=dtype)
    assert result.dtype == dtype
    H = place.number(result) if axis is None else place.dense(result, matrix=flavour is bg.bsr_matrix)
    assert_values(H.reshape(expected.shape), expected, bound)


@each_place
@given(a=samples(), flavour=flavours, axis=st.sampled_from((None, 0, 1, -1, -2)))
def test_mean_divides_by_all_elements(place: Place, a: Sample, flavour: type, axis: Any) -> None:
    assume(0 not in a.shape)
    A = place.bsr(a, flavour)
    dtype = np.dtype(np.float64) if a.dtype.kind in "biu" else a.dtype
    count = a.dense.size if axis is None else a.shape[axis]
    with quietly():
        result = A.mean(axis=axis)
        expected = a.dense.astype(wide(dtype)).sum(axis=axis) / count
        bound = rounding(dtype, a.weight.sum(axis=axis) / count, a.layers.sum(axis=axis) + 8)
    assert result.dtype == dtype
    if axis is None:
        assert_values(place.number(result), expected, bound)
    else:
        shape = line_shape(flavour, a.shape, axis)
        values = place.dense(result, matrix=flavour is bg.bsr_matrix)
        assert_values(values, expected.reshape(shape), bound.reshape(shape))


@each_place
@given(
    a=samples(spreads=("small", "wide", "special")),
    flavour=flavours,
    axis=st.sampled_from((None, 0, 1, -1, -2)),
    name=st.sampled_from(("min", "max", "nanmin", "nanmax")),
)
def test_extremes_count_what_is_not_stored_as_zero(
    place: Place, a: Sample, flavour: type, axis: Any, name: str
) -> None:
    assume(0 not in a.shape)
    a = a.merged()
    A = place.bsr(a, flavour)
    with quietly():
        expected = getattr(np, name)(a.dense, axis=axis)
        if axis is None:
            result = getattr(A, name)()
            assert result.dtype == a.dtype
            assert_values(place.number(result), expected)
            return
        result = getattr(A, name)(axis=axis)
        assert result.dtype == a.dtype
        if place.holds(a.dtype):
            values = place.foreign(result, "coo", flavour).toarray()
        else:
            values = place.dense(result, matrix=flavour is bg.bsr_matrix)
        assert_values(values, expected.reshape(line_shape(flavour, a.shape, axis)))


@each_place
@given(
    a=samples(spreads=("small", "special"), dtypes=tuple(np.dtype(c) for c in "?fdFD")),
    axis=st.sampled_from((None, 0, 1)),
    name=st.sampled_from(("min", "max")),
)
def test_explicit_extremes_look_at_stored_values_only(place: Place, a: Sample, axis: Any, name: str) -> None:
    assume(len(a.data) and a.dtype.kind != "c")
    a = a.merged()
    A = place.bsr(a)
    limit = np.inf if name == "min" else -np.inf
    stored = np.where(a.layers > 0, a.dense.astype(np.float64), limit)
    with quietly():
        expected = getattr(np, name)(stored, axis=axis)
        expected = np.where((a.layers > 0).any(axis=axis), expected, 0)
        result = getattr(A, name)(axis=axis, explicit=True)
    if axis is None:
        assert_values(place.number(result), expected)
    else:
        assert_values(place.foreign(result, "coo").toarray(), expected)


@each_place
@given(
    a=samples(spreads=("small", "wide", "special")),
    flavour=flavours,
    axis=st.sampled_from((None, 0, 1, -1, -2)),
    name=st.sampled_from(("argmin", "argmax")),
)
def test_the_place_of_an_extreme_is_numpys(place: Place, a: Sample, flavour: type, axis: Any, name: str) -> None:
    assume(0 not in a.shape)
    a = a.merged()
    A = place.bsr(a, flavour)
    with quietly():
        expected = getattr(np, name)(a.dense, axis=axis)
        result = getattr(A, name)(axis=axis)
    if axis is None:
        assert int(place.number(result)) == int(expected)
    else:
        values = place.dense(result, matrix=flavour is bg.bsr_matrix)
        assert_values(values, expected.reshape(line_shape(flavour, a.shape, axis)))


@each_place
@given(a=samples(spreads=("small", "wide", "special")), flavour=flavours)
def test_nonzero_elements_are_found_and_counted(place: Place, a: Sample, flavour: type) -> None:
    a = Sample(a.data, a.indices, a.indptr, a.shape)
    A = place.bsr(a, flavour)
    if a.deepest > 1 and a.dtype in INEXACT:
        a = place.blocks(A).merged()
    row, col = A.nonzero()
    found = np.stack([place.dense(row), place.dense(col)])
    assert_values(found, np.stack(a.dense.nonzero()))
    assert int(A.count_nonzero()) == np.count_nonzero(a.dense)
    for axis in (0, 1, -1):
        counted = place.dense(A.count_nonzero(axis=axis)).reshape(-1)
        assert_values(counted, np.count_nonzero(a.dense, axis=axis))


# ------------------------------------------------------------------------------------------- diagonals
@each_place
@given(a=samples(spreads=("small", "wide", "special")), flavour=flavours, k=st.integers(-60, 60))
def test_diagonal_and_trace_follow_numpy(place: Place, a: Sample, flavour: type, k: int) -> None:
    M, N = a.shape
    if M and N:
        k = k % (M + N - 1) - (M - 1)
    A = place.bsr(a, flavour)
    expected = a.dense.diagonal(k) if M and N else np.zeros(0)
    result = A.diagonal(k=k)
    assert result.dtype == a.dtype
    assert_values(place.dense(result), expected, a.bound.diagonal(k) if M and N else 0.0)
    assert A.diagonal(k=N).shape == A.diagonal(k=-M).shape == (0,)
    with quietly():
        trace = A.trace(offset=k)
        dtype = a.dtype if a.dtype == BFLOAT16 else np.zeros(1, a.dtype).sum().dtype
        if M and N and dtype.kind in "biu":
            assert_values(place.number(trace), expected.sum())
        elif M and N:
            bound = rounding(a.dtype, a.weight.diagonal(k).sum(), int(a.layers.diagonal(k).sum()) + 8)
            coarse = eps(a.dtype) * a.weight.diagonal(k).sum() * (len(expected) + 8)
            assert_values(place.number(trace), expected.sum(), max(bound, coarse))


@each_place
@given(data=st.data(), a=samples(spreads=("small", "special")), flavour=flavours, k=st.integers(-60, 60))
def test_setdiag_writes_the_diagonal_and_nothing_else(
    place: Place, data: st.DataObject, a: Sample, flavour: type, k: int
) -> None:
    M, N = a.shape
    assume(M and N)
    k = k % (M + N - 1) - (M - 1)
    A = place.bsr(a, flavour)
    long = min(M + min(k, 0), N - max(k, 0))
    values = random_values(
        np.random.default_rng(data.draw(seeds)), (data.draw(st.integers(0, long + 2)),), a.dtype, "small"
    )
    A.setdiag(place.put(values), k=k)
    expected, bound = a.dense.copy(), a.bound.copy()
    n = min(long, len(values))
    at = (np.arange(n) - min(k, 0), np.arange(n) + max(k, 0))
    expected[at], bound[at] = widened(values)[:n], 0.0
    assert A.dtype == a.dtype and A.blocksize == a.blocksize
    assert_values(place.blocks(A, flavour).dense, expected, bound)
    number = True if a.dtype == BOOL else 2
    A.setdiag(number, k=k)
    at = (np.arange(long) - min(k, 0), np.arange(long) + max(k, 0))
    expected[at], bound[at] = number, 0.0
    assert_values(place.blocks(A, flavour).dense, expected, bound)


# ----------------------------------------------------------------------------------- values and dtypes
@each_place
@given(a=samples(spreads=("small",)), flavour=flavours, dtype=dtypes)
def test_astype_casts_the_values_that_the_matrix_has(
    place: Place, a: Sample, flavour: type, dtype: np.dtype[Any]
) -> None:
    if dtype.kind == "u" or (dtype.kind in "iu" and a.deepest > 1):
        a = Sample(np.abs(a.data) if a.dtype != BOOL else a.data, a.indices, a.indptr, a.shape)
    A = place.bsr(a, flavour)
    with quietly():
        result = A.astype(dtype)
        exact = a.dense.astype(a.dtype)  # what the matrix holds, duplicates added up
        expected = widened(
            exact.real.astype(dtype)
            if a.dtype.kind == "c" and dtype.kind != "c" and dtype != BOOL
            else exact.astype(dtype)
        )
    assert result.dtype == dtype and result.blocksize == a.blocksize
    # "small" values and their sums over 20 duplicates are exact in every float but the 16-bit ones.
    bound = a.bound + rounding(dtype, a.weight, a.layers + 1) if dtype in INEXACT else 0.0
    bound = np.where(a.layers > 1, bound, 0.0)
    assert_values(place.blocks(result, flavour).dense, expected, bound)
    assert_values(place.blocks(A, flavour).dense, a.dense, a.bound)


@each_place
@given(a=samples(dtypes=NUMBERS, spreads=("small",), duplicates=False), flavour=flavours)
def test_cancelling_duplicates_are_false_as_booleans(place: Place, a: Sample, flavour: type) -> None:
    twice = Sample(
        np.concatenate([a.data, (-a.data.astype(wide(a.dtype))).astype(a.dtype)]),
        np.concatenate([a.indices, a.indices]),
        a.indptr * 2,
        a.shape,
    )
    rows = np.concatenate([a.block_rows, a.block_rows])
    order = np.argsort(rows, kind="stable")
    twice = Sample(twice.data[order], twice.indices[order], twice.indptr, a.shape)
    A = place.bsr(twice, flavour)
    result = A.astype(bool)
    assert not place.blocks(result, flavour).dense.any()
    assert int(A.count_nonzero()) == 0 and len(A.nonzero()[0]) == 0


@each_place
@given(a=samples(spreads=("small", "wide")), flavour=flavours)
def test_sign_changes_and_parts_keep_the_structure(place: Place, a: Sample, flavour: type) -> None:
    A = place.bsr(a, flavour)
    with quietly():
        for result, expected in (
            (A.conj(), a.dense.conj()),
            (A.conjugate(), a.dense.conj()),
            (A.real, a.dense.real),
            (A.imag, a.dense.imag),
        ):
            assert result.blocksize == a.blocksize
            assert_values(place.blocks(result, flavour).dense, expected, a.bound)
        if a.dtype == BOOL:
            with pytest.raises(NotImplementedError):
                operator.neg(A)
        else:
            assert (-A).dtype == a.dtype
            assert_values(place.blocks(-A, flavour).dense, -a.dense, a.bound)
        magnitudes = place.blocks(abs(A), flavour)
        assert magnitudes.dtype == np.abs(np.zeros(1, a.dtype)).dtype
        expected = np.abs(a.dense)
        off = a.bound + (2 * eps(a.dtype) * magnitude(a.dense) if a.dtype.kind == "c" else 0.0)
        assert_values(magnitudes.dense, expected, off)
    for result in (A.real, A.imag):
        assert result.dtype == (a.dtype if a.dtype == BFLOAT16 else np.zeros(1, a.dtype).real.dtype)


@each_place
@given(a=samples(dtypes=INEXACT, duplicates=False), flavour=flavours, digits=st.integers(0, 2))
def test_round_rounds_every_value(place: Place, a: Sample, flavour: type, digits: int) -> None:
    a = a.merged()
    result = round(place.bsr(a, flavour), digits)
    assert result.dtype == a.dtype and result.blocksize == a.blocksize
    inner = a.data.astype(np.float32) if a.dtype == BFLOAT16 else a.data
    expected = np.around(inner, digits).astype(a.dtype)
    # A value half way in a wider type may go either way in a narrower one: one unit of the last digit kept.
    bound = 2 * eps(a.dtype) * (magnitude(a.data) + 1)
    assert_values(place.blocks(result, flavour).data, expected, bound)


@each_place
@given(a=samples(dtypes=NUMBERS, spreads=("small",)), n=st.sampled_from((1, 2, 3, 2.0, 0.5)))
def test_power_is_taken_of_every_element(place: Place, a: Sample, n: Any) -> None:
    a = a.merged()
    if n == 0.5:
        a = Sample(np.abs(a.data).astype(a.dtype), a.indices, a.indptr, a.shape)
    A = place.bsr(a)
    inner = a.data.astype(np.float32) if a.dtype == BFLOAT16 else a.data
    with quietly():
        expected = inner**n
        result = A.power(n)
        also = A**n
    dtype = BFLOAT16 if a.dtype == BFLOAT16 else expected.dtype
    assert result.dtype == also.dtype == dtype
    bound = 8 * eps(dtype) * magnitude(expected)
    assert_values(place.blocks(result).data, expected, bound)
    assert_values(place.blocks(also).data, expected, bound)
    with pytest.raises(NotImplementedError):
        A.power(0)


@each_place
@given(a=samples(spreads=("small",)), flavour=flavours, name=st.sampled_from(UFUNCS))
def test_functions_that_keep_zero_are_taken_of_every_element(place: Place, a: Sample, flavour: type, name: str) -> None:
    a = a.merged()
    function = getattr(np, name)
    inner = a.data.astype(np.float32) if a.dtype == BFLOAT16 else a.data
    A = place.bsr(a, flavour)
    with quietly():
        try:
            expected = function(inner)
        except TypeError:  # NumPy has no such loop (sign of bool, floor of complex)
            with pytest.raises((TypeError, ValueError)):
                getattr(A, name)()
            return
        result = getattr(A, name)()
    dtype = BFLOAT16 if a.dtype == BFLOAT16 else expected.dtype
    assert result.dtype == dtype and result.blocksize == a.blocksize
    bound = 8 * eps(dtype) * np.where(np.isfinite(expected), magnitude(expected), 0) + smallest(dtype)
    assert_values(place.blocks(result, flavour).data, expected, bound)


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


# ---------------------------------------------------------------------------------- promotion of dtypes
@each_place
@pytest.mark.parametrize("b_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("a_dtype", DTYPES, ids=str)
def test_results_have_the_promoted_dtype(place: Place, a_dtype: np.dtype[Any], b_dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(0)
    indices, indptr = np.array([1, 0], np.int32), np.array([0, 1, 2], np.int32)
    a, b = (Sample(random_values(rng, (2, 2, 2), d), indices, indptr, (4, 4)) for d in (a_dtype, b_dtype))
    A, B, X = place.bsr(a), place.bsr(b), place.put(b.dense.astype(b_dtype))
    wanted = result_dtype(a_dtype, b_dtype)
    results = [A @ X, X.T @ A, A @ B, A + B, A.multiply(B), A + X]
    if not {a_dtype, b_dtype} & set(INTEGERS + FLOATS + COMPLEX):
        assert wanted == BOOL
    if wanted != BOOL:
        results += [A - B, A - X]
    assert [r.dtype for r in results] == [wanted] * len(results)
