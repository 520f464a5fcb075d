"""Sums, element-wise products, quotients, comparisons and the dtypes of results on random matrices.

Values are those of dense NumPy, formats those of scipy, as tests/strategies.py says.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

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
    each_place,
    eps,
    flavours,
    in_common_dtype,
    magnitude,
    operands,
    quietly,
    random_values,
    result_dtype,
    rounding,
    samples,
    twins,
    wide,
    widened,
)

COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
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


@dataclass
class Pair:
    """Two samples as matrices at a place, and their elements in the dtype of a result."""

    place: Place
    a: Sample
    b: Sample
    flavour: type

    def __post_init__(self) -> None:
        self.dtype = result_dtype(self.a.dtype, self.b.dtype)
        self.A, self.B = (self.place.bsr(x, self.flavour) for x in (self.a, self.b))
        self.x, self.y = in_common_dtype(self.a.dense, self.b.dense, self.dtype)

    def assert_result(self, result: Any, theirs: Callable[[Any, Any], Any]) -> None:
        """It has the dtype of a result, the blocks of the first matrix, and the form that scipy's result has."""
        assert result.dtype == self.dtype and result.blocksize == self.a.blocksize
        if 0 not in self.a.shape:
            assert_form(result, theirs(self.a.scipy(self.flavour), self.b.scipy(self.flavour)))


# ------------------------------------------------------------------------------------ sums and products
@each_place
@given(case=twins(spreads=("small", "wide")), flavour=flavours)
def test_sum_and_difference_are_bsr_in_the_first_blocks(
    place: Place, case: tuple[Sample, Sample], flavour: type
) -> None:
    a, b = case
    pair = Pair(place, a, b, flavour)
    dtype, A, B = pair.dtype, pair.A, pair.B
    additions = a.layers + b.layers + 4
    weight = np.maximum(a.weight, 0) + b.weight
    # A float that came from an integer or a narrower float is rounded once more.
    bound = rounding(dtype, weight, additions) + a.bound + b.bound if dtype in INEXACT else 0.0
    for op in (operator.add, operator.sub):
        if op is operator.sub and dtype == BOOL:
            continue  # NumPy has no difference of booleans either
        result = op(A, B)
        pair.assert_result(result, op)
        blocks = place.blocks(result, flavour)
        assert blocks.is_canonical
        assert_values(blocks.dense, op(pair.x, pair.y), bound)
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
    pair = Pair(place, *case, flavour)
    with quietly():
        expected = pair.x * pair.y
        bound = product_of_elements_bound(*case, pair.dtype)
        result = pair.A.multiply(pair.B)
        pair.assert_result(result, lambda a, b: a.multiply(b))
        assert_values(place.blocks(result, flavour).dense, expected, bound)
        if flavour is bg.bsr_array:
            assert_values(place.blocks(pair.A * pair.B, flavour).dense, expected, bound)


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
    pair = Pair(place, a, b, flavour)
    expected, bound = pair.x * pair.y, product_of_elements_bound(a, b, pair.dtype)
    theirs = a.scipy(flavour).multiply(b.scipy(flavour))
    if theirs.format == "bsr":
        result = pair.A.multiply(pair.B)
        assert_values(place.blocks(result, flavour).dense, expected, bound)
        assert_form(result, theirs)
        assert result.dtype == pair.dtype
        return
    with place.refuses(pair.dtype):
        result = pair.A.multiply(pair.B)
        assert result.dtype == pair.dtype
        assert_values(place.foreign(result, theirs.format, flavour).toarray(), expected, bound)


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
    pair = Pair(place, *(x.merged() for x in case), flavour)
    with quietly():
        result, expected = op(pair.A, pair.B), op(pair.x, pair.y)
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
    pair = Pair(place, *(x.merged() for x in case), flavour)
    expected = getattr(np, name)(pair.x, pair.y)
    with quietly(), place.refuses(pair.dtype):
        result = getattr(pair.A, name)(pair.B)
        assert result.dtype == pair.dtype
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
