"""`matmul` beyond A @ B: batches of right-hand sides, the precision of float32, fp8 operands with their scales."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm._backend import numpy_backend
from bsrgemm._products import host as products_host
from bsrgemm._products.call import ProductCall
from bsrgemm._products.engine import ENGINES
from bsrgemm._products.matmul import _check_held, _default_precision
from bsrgemm.dtypes import BFLOAT16, FLOAT8

from ..strategies import (
    DTYPES,
    FLAVOURS,
    INEXACT,
    Operand,
    Place,
    Sample,
    assert_values,
    check_product,
    dense_operands,
    each_place,
    flavours,
    operands,
    product_bound,
    rounding,
    samples,
    seeds,
    spreads_for,
)

pytestmark = pytest.mark.fake

BATCHES = (0, 1, 2, 5)
WIDTHS = (0, 1, 3, 17)


# ------------------------------------------------------------------------------------------------- batches
@st.composite
def batches(draw: st.DrawFn) -> tuple[Sample, Operand, bool, bool]:
    """A matrix, a batch of operands for it, whether they stand on its left and whether it is transposed."""
    a_dtype, x_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    spreads = spreads_for(a_dtype, x_dtype)
    a = draw(samples(dtypes=(a_dtype,), spreads=spreads))
    left, transposed = draw(st.booleans()), draw(st.booleans())
    side = a.shape[0 if left != transposed else 1]
    batch, width = draw(st.sampled_from(BATCHES)), draw(st.sampled_from(WIDTHS))
    shape = (batch, width, side) if left else (batch, side, width)
    return a, draw(operands(shape, dtypes=(x_dtype,), spreads=spreads)), left, transposed


@each_place
@given(case=batches(), flavour=flavours)
def test_a_batch_is_multiplied_matrix_by_matrix(
    place: Place, case: tuple[Sample, Operand, bool, bool], flavour: type
) -> None:
    a, x, left, transposed = case
    A = place.bsr(a, flavour)
    A = A.T if transposed else A
    X = place.operand(x)
    seen = a.T if left != transposed else a  # what stands before the columns of X
    for result in (X @ A, bg.matmul(X, A)) if left else (A @ X, A.dot(X), bg.matmul(A, X)):
        assert result.ndim == 3 and len(result) == len(x.values)
        assert result.shape[2 if left else 1] == seen.shape[0]
        for k in range(len(x.values)):
            one, factor = (result[k].T, x.values[k].T) if left else (result[k], x.values[k])
            check_product(place, one, seen, factor)


@each_place
@given(data=st.data(), case=batches())
def test_a_batch_is_scaled_and_added_into_out_of_any_layout(
    place: Place, data: st.DataObject, case: tuple[Sample, Operand, bool, bool]
) -> None:
    a, x, left, transposed = case
    dtype = np.result_type(np.float32, *(np.float32 if d == BFLOAT16 else d for d in (a.dtype, x.dtype)))
    A = place.bsr(a).T if transposed else place.bsr(a)
    seen = a.T if left != transposed else a
    batch, width = len(x.values), x.values.shape[1 if left else 2]
    shape = (batch, width, seen.shape[0]) if left else (batch, seen.shape[0], width)
    before = data.draw(operands(shape, dtypes=(dtype,), spreads=("small",)))
    out = place.operand(before)
    operand = place.operand(x)
    returned = (
        bg.matmul(operand, A, out=out, alpha=2, beta=-1) if left else bg.matmul(A, operand, out=out, alpha=2, beta=-1)
    )
    assert returned is out
    got = place.dense(out)
    for k in range(batch):
        one, factor, old = (y[k].T if left else y[k] for y in (got, x.values, before.values))
        wide = np.complex128 if dtype.kind == "c" else np.float64
        expected = 2 * (seen.dense.astype(wide) @ factor.astype(wide)) - old
        bound = 2 * product_bound(seen, factor, dtype) + rounding(dtype, np.abs(expected) + np.abs(old), 4)
        assert_values(one, expected, bound)


@pytest.mark.parametrize("columns", [1, 7, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("transposed", [False, True])
def test_batches_multiplied_together_on_the_host_are_those_multiplied_apart(
    columns: int, dtype: str, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_host, "_PANEL_FLOPS", 0)
    monkeypatch.setattr(products_host, "_PANEL_WIDTH", 2)
    monkeypatch.setattr(products_host, "_BATCH_COLUMNS", columns)
    rng = np.random.default_rng(0)
    A = bg.bsr_array(rng.integers(-3, 4, (12, 20)).astype(dtype), blocksize=(3, 4))
    A = A.T if transposed else A
    X = rng.integers(-3, 4, (9, 3, A.shape[1])).astype(dtype).swapaxes(1, 2)
    np.testing.assert_array_equal(A @ X, np.stack([A @ x for x in X]))
    np.testing.assert_array_equal(X.swapaxes(1, 2) @ A.T, np.stack([x.T @ A.T for x in X]))


@each_place
def test_a_batch_may_be_one_matrix_many_times(place: Place) -> None:
    A = bg.bsr_array(place.put(np.arange(12.0).reshape(3, 4)), blocksize=(3, 2))
    X = place.xp.broadcast_to(place.put(np.ones((4, 2))), (5, 4, 2))
    expected = np.broadcast_to(np.arange(12.0).reshape(3, 4) @ np.ones((4, 2)), (5, 3, 2))
    assert_values(place.dense(A @ X), expected)


# ----------------------------------------------------------------------------------------------- precision
@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What a card is asked for, with CUPY_TF32 unset."""
    seen: list[Any] = []
    engine = ENGINES.of(Place("cuda").backend)
    multiply = engine.multiply_dense

    def spy(call: ProductCall) -> None:
        seen.append(call.tf32)
        multiply(call)

    monkeypatch.setattr(engine, "multiply_dense", spy)
    monkeypatch.delenv("CUPY_TF32", raising=False)
    _default_precision.cache_clear()
    yield seen
    _default_precision.cache_clear()


def _operands(dtype: Any, other: Any = None) -> tuple[Any, Any]:
    place = Place("cuda")
    A = bg.bsr_array(place.put(np.eye(4, dtype=dtype)), blocksize=(2, 2))
    return A, place.put(np.ones((4, 3), other or dtype))


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_the_precision_asked_for_reaches_the_engine(asked: list[Any], dtype: str) -> None:
    A, X = _operands(dtype)
    for precision in (None, "float32", "tf32"):
        bg.matmul(A, X, precision=precision)
        bg.matmul(X.T, A, precision=precision)
        assert [asked.pop(), asked.pop()] == [precision == "tf32"] * 2
    A @ X
    assert asked.pop() is False


@pytest.mark.parametrize(("text", "wanted"), [("1", True), (" 2 ", True), ("0", False), ("-1", False), ("00", False)])
def test_the_environment_variable_of_cupy_decides_where_nothing_is_asked(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, text: str, wanted: bool
) -> None:
    monkeypatch.setenv("CUPY_TF32", text)
    A, X = _operands("float32")
    for product in (lambda: A @ X, lambda: A.T @ X, lambda: X.T @ A, lambda: bg.matmul(A, X)):
        product()
        assert asked.pop() == wanted
    bg.matmul(A, X, precision="float32")
    assert asked.pop() is False
    bg.matmul(*_operands("float16", "float32"))
    assert asked.pop() == wanted
    for dtypes in (("float64",), ("float16",), ("int8",), ("float32", "float64")):
        bg.matmul(*_operands(*dtypes))
        assert asked.pop() is False


def test_an_environment_variable_that_is_no_number_is_named(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_TF32", "yes")
    with pytest.raises(ValueError, match=r"CUPY_TF32: .* got 'yes'"):
        bg.matmul(*_operands("float32"))
    bg.matmul(*_operands("float64"))


def test_a_dtype_that_one_home_holds_is_refused_by_another() -> None:
    long_double, fake = np.dtype("g"), Place("cuda").backend
    for _ in range(2):
        _check_held(long_double, numpy_backend.HOST, "B")
        with pytest.raises(TypeError, match="B: does not support dtype"):
            _check_held(long_double, fake, "B")
    with pytest.raises(TypeError, match="other: does not support dtype"):
        _check_held(long_double, fake, "other")


@given(data=st.data(), a=samples(dtypes=(np.dtype(np.float32), np.dtype(np.complex64))))
def test_the_host_computes_in_float32_whatever_is_asked(data: st.DataObject, a: Sample) -> None:
    place = Place("cpu")
    x = data.draw(dense_operands(a.shape[1], dtypes=(a.dtype,)))
    result = bg.matmul(place.bsr(a), x.values, precision="tf32")
    check_product(place, result, a, x.values)
    np.testing.assert_array_equal(result, bg.matmul(place.bsr(a), x.values, precision="float32"))


# ------------------------------------------------------------------------------------------------------ fp8
#: Bytes of numbers up to 2, so that sums fit float16.
SMALL_BYTES = np.array([b for b in range(256) if b & 0x7F <= 0x40], np.uint8)


def decoded(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@each_place
@given(
    data=st.data(),
    a=samples(dtypes=(np.dtype(np.uint8),)),
    seed=seeds,
    dtype=st.sampled_from((None, np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)),
    scales=st.sampled_from(((2, None), (None, 0.5), (np.float32(0.25), np.int8(3)), (1, 1), (np.array(2.0), True))),
    alpha=st.sampled_from((1, -0.5, np.float16(2))),
    kind=st.sampled_from(("A @ X", "A.T @ X", "X @ A", "A @ x", "batch")),
)
def test_fp8_products_are_scaled_and_summed_in_float32(
    place: Place, data: st.DataObject, a: Sample, seed: int, dtype: Any, scales: Any, alpha: Any, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    a = replace(a, data=rng.choice(SMALL_BYTES, a.data.shape))
    meant = Sample(decoded(a.data), a.indices, a.indptr, a.shape)
    seen = meant.T if kind in ("A.T @ X", "X @ A") else meant
    K, width = seen.shape[1], data.draw(st.sampled_from(WIDTHS))
    shape = {"A @ x": (K,), "batch": (2, K, width)}.get(kind, (K, width))
    x = rng.choice(SMALL_BYTES, shape)
    A = place.bsr(a).T if kind == "A.T @ X" else place.bsr(a)
    options: dict[str, Any] = {"scale_a": scales[0], "scale_b": scales[1], "alpha": alpha}
    factor = float(scales[0] or 1) * float(scales[1] or 1) * float(alpha)
    call = (place.put(x.T), A) if kind == "X @ A" else (A, place.put(x))
    result = bg.matmul(*call, out_dtype=dtype, **options)
    delivered = np.dtype(np.float32) if dtype is None else dtype
    assert result.dtype == delivered
    got = place.dense(result)
    got = got.T if kind == "X @ A" else got
    expected = factor * (seen.dense @ decoded(x).astype(np.float64))
    weight = abs(factor) * (seen.weight @ np.abs(decoded(x)).astype(np.float64))
    additions = int(seen.layers.sum(axis=1).max(initial=0)) + 8
    assert_values(got, expected, rounding(delivered, weight, additions))
    out = place.put(np.ones(result.shape, delivered))
    assert bg.matmul(*call, out=out, beta=3, **options) is out
    got = place.dense(out)
    got = got.T if kind == "X @ A" else got
    assert_values(got, expected + 3, rounding(delivered, weight + 3, additions + 2))


@each_place
@pytest.mark.parametrize("panel_flops", [0, 1 << 30], ids=["panels", "loops"])
@pytest.mark.parametrize("loop_bytes", [1, 1 << 20])
def test_every_byte_means_the_number_that_ml_dtypes_says(
    place: Place, panel_flops: int, loop_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_host, "_PANEL_FLOPS", panel_flops)
    monkeypatch.setattr(products_host, "_LOOP_BYTES", loop_bytes)
    numbers = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    values = np.concatenate([numbers, numbers[:2]]).reshape(16, 16)
    one = np.float32(1).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    identity = (np.eye(16) * one).astype(np.uint8)
    A = bg.bsr_array(place.put(values), blocksize=(4, 2))
    for product in (
        bg.matmul(A, place.put(identity), scale_a=1),
        bg.matmul(A.T, place.put(identity), scale_a=1).T,
        bg.matmul(place.put(identity), A, scale_b=1),
    ):
        np.testing.assert_array_equal(place.dense(product), decoded(values))


@each_place
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nan_bytes_spread_through_stored_blocks_only(place: Place, byte: int, dtype: str) -> None:
    """Blocks at (0, 0) and (1, 1) of two by two."""
    data = np.full((2, 2, 2), 0x38, np.uint8)
    data[1, 0, 0] = byte
    A = place.bsr(Sample(data, np.array([0, 1], np.int32), np.array([0, 1, 2], np.int32), (4, 4)))
    X = np.full((4, 3), 0x38, np.uint8)
    wrong = np.isnan(place.dense(bg.matmul(A, place.put(X), scale_a=1, out_dtype=dtype)).astype(np.float32))
    np.testing.assert_array_equal(wrong.any(axis=1), [False, False, True, False])
    X[0, 1] = byte
    wrong = np.isnan(place.dense(bg.matmul(A, place.put(X), scale_a=1, out_dtype=dtype)).astype(np.float32))
    np.testing.assert_array_equal(wrong[:2], [[False, True, False]] * 2)


@each_place
def test_bytes_stored_twice_are_added_as_the_numbers_they_are(place: Place) -> None:
    data = np.array([[[0x38]], [[0x40]]], np.uint8)  # 1 and 2
    A = place.bsr(Sample(data, np.zeros(2, np.int32), np.array([0, 2], np.int32), (1, 1)))
    assert place.dense(bg.matmul(A, place.put(np.array([0x40], np.uint8)), scale_b=1)).tolist() == [6.0]


def test_arrays_that_name_their_fp8_dtype_are_operands_on_the_host() -> None:
    rng = np.random.default_rng(0)
    values = rng.choice(SMALL_BYTES, (6, 8))
    A = bg.bsr_array(rng.choice(SMALL_BYTES, (4, 6)), blocksize=(2, 3))
    for x in (values, values[:, ::2], np.asfortranarray(values), values[::-1]):
        named = x.view(FLOAT8)
        np.testing.assert_array_equal(bg.matmul(A, named, scale_a=2), bg.matmul(A, x, scale_a=2))
        np.testing.assert_array_equal(bg.matmul(named.T, A.T, scale_a=2), bg.matmul(x.T, A.T, scale_a=2))


def test_an_fp8_matrix_is_not_decoded_at_once_on_the_host() -> None:
    n, block = 1024, 16
    rng = np.random.default_rng(0)
    A = bg.bsr_array(rng.choice(SMALL_BYTES, (n, n)), blocksize=(block, block))
    X = rng.choice(SMALL_BYTES, (n, 64))
    for product in (lambda: bg.matmul(A, X, scale_a=1), lambda: bg.matmul(A.T, X, scale_a=1)):
        tracemalloc.start()
        try:
            product()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2 * A.data.nbytes  # in float32 it would be 4


@each_place
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", INEXACT, ids=str)
def test_a_batch_without_matrices_or_columns_or_rows_is_fine(place: Place, flavour: type, dtype: Any) -> None:
    for shape in ((4, 6), (0, 6), (4, 0)):
        A = flavour(place.put(np.ones(shape, dtype)), blocksize=(2, 3))
        for batch, width in ((0, 3), (2, 0), (2, 3)):
            X = place.put(np.ones((batch, shape[1], width), dtype))
            assert_values(place.dense(A @ X).astype(np.complex64), np.full((batch, shape[0], width), shape[1]))
            Y = place.put(np.ones((batch, width, shape[0]), dtype))
            assert_values(place.dense(Y @ A).astype(np.complex64), np.full((batch, width, shape[1]), shape[0]))
