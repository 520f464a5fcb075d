"""Reductions, diagonals, casts and functions of each element on random matrices.

Values are those of dense NumPy, formats those of scipy, as tests/strategies.py says.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16, BOOL

from ..strategies import (
    INEXACT,
    NUMBERS,
    Place,
    Sample,
    assert_values,
    dtypes,
    each_place,
    eps,
    flavours,
    magnitude,
    quietly,
    random_values,
    rounding,
    samples,
    seeds,
    smallest,
    wide,
    widened,
)

UFUNCS = (  # noqa: SIM905
    "sin tan arcsin arctan sinh tanh arcsinh arctanh rint sign expm1 log1p deg2rad rad2deg floor ceil trunc sqrt"
).split()


# ------------------------------------------------------------------------------------------ reductions
def line_shape(flavour: type, shape: tuple[int, int], axis: int | None) -> tuple[int, ...]:
    """The shape of a reduction over an axis: a vector, or a row or column for matrices. Over both: one element."""
    M, N = shape
    if axis is None:
        return () if flavour is bg.bsr_array else (1, 1)
    if flavour is bg.bsr_array:
        return (N,) if axis % 2 == 0 else (M,)
    return (1, N) if axis % 2 == 0 else (M, 1)


def assert_line(
    place: Place, a: Sample, flavour: type, axis: int | None, result: Any, expected: Any, bound: Any
) -> None:
    """A reduction of `a` over an axis, or over both to a number, has these values."""
    if axis is None:
        assert_values(place.number(result), expected, bound)
        return
    shape = line_shape(flavour, a.shape, axis)
    values = place.dense(result, matrix=flavour is bg.bsr_matrix)
    assert_values(values, expected.reshape(shape), np.reshape(bound, shape) if np.ndim(bound) else bound)


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
        assert_line(place, a, flavour, line, result, expected, bound)
        out = place.put(np.zeros(line_shape(flavour, a.shape, line), dtype))
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
    assert_line(place, a, flavour, axis, result, expected, bound)


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
