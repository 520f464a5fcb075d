"""Dense and sparse products and powers on random matrices.

Values are those of dense NumPy, formats those of scipy, as tests/strategies.py says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16, BOOL, HALF_DTYPES

from ..strategies import (
    COMPLEX,
    DTYPES,
    FLOATS,
    INEXACT,
    Operand,
    Place,
    Sample,
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
    result_dtype,
    rounding,
    samples,
    spreads_for,
    wide,
    widened,
)


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
