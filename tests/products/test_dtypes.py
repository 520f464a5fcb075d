"""Which dtypes there are, what two of them are promoted to, and in which one they are summed."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2

from bsrgemm import dtypes
from bsrgemm.dtypes import BFLOAT16, FLOAT8, FLOAT16

from .. import fake_cupy

pytestmark = pytest.mark.fake

ON_DEVICE = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128"
)


def named(text: str) -> list[np.dtype[Any]]:
    return [BFLOAT16 if name == "bfloat16" else np.dtype(name) for name in text.split()]


def test_the_dtypes_of_matrices_are_these() -> None:
    assert list(dtypes.DEVICE_DTYPES) == named(ON_DEVICE)
    assert list(dtypes.HOST_DTYPES) == [*named(ON_DEVICE), np.dtype(np.longdouble), np.dtype(np.clongdouble)]
    assert (np.dtype("float16"), np.dtype(bfloat16)) == dtypes.HALF_DTYPES
    assert (np.dtype("float32"), np.dtype("float16"), np.dtype(bfloat16)) == dtypes.FP8_RESULTS
    assert (np.dtype(bool), np.dtype("u1")) == (dtypes.BOOL, dtypes.UINT8) and np.dtype(float8_e4m3fn) == FLOAT8


def test_every_byte_stands_for_its_number_in_fp8() -> None:
    assert dtypes.FP8_VALUES.dtype == np.float32
    np.testing.assert_array_equal(dtypes.FP8_VALUES, np.arange(256).astype("u1").view(float8_e4m3fn).astype("f4"))
    assert dtypes.FP8_VALUES[[0, 0x38, 0x7E, 0xC0]].tolist() == [0, 1, 448, -2] and np.isnan(dtypes.FP8_VALUES[0x7F])


def test_a_dtype_is_taken_in_the_byte_order_of_the_machine() -> None:
    for known in dtypes.DEVICE_DTYPES:
        assert dtypes.check_dtype(known, dtypes.DEVICE_DTYPES) is known
        if known != BFLOAT16:
            assert dtypes.check_dtype(known.newbyteorder(), dtypes.DEVICE_DTYPES) is known
    for twin in ("q", "Q", "longlong", int):
        assert dtypes.check_dtype(twin, dtypes.DEVICE_DTYPES).char in "lL"
    for wrong in ("g", "G", "O", "U3", "M8[s]", float8_e4m3fn):
        with pytest.raises(TypeError, match=r"^factor: does not support dtype .*; wanted one of bool, int8, "):
            dtypes.check_dtype(wrong, dtypes.DEVICE_DTYPES, "factor")
    with pytest.raises(TypeError, match=r"^dtype: does not support dtype float64; wanted one of float32, bfloat16$"):
        dtypes.check_dtype("d", (np.dtype("f"), BFLOAT16))


def test_fp8_in_place_of_a_dtype_is_refused_with_what_takes_it() -> None:
    message = r"^data: does not support dtype float8_e4m3fn; wanted .*; matmul takes fp8 as bytes, .* with a scale$"
    with pytest.raises(TypeError, match=message):
        dtypes.check_dtype(float8_e4m3fn, dtypes.HOST_DTYPES, "data")
    with pytest.raises(TypeError, match=r"complex256$|complex128$|clongdouble$"):
        dtypes.check_dtype(float8_e5m2, dtypes.HOST_DTYPES, "data")


def test_bfloat16_is_promoted_as_float16_is() -> None:
    """Only the other 16-bit float, and integers of one byte, differ in what the result must hold."""
    others = named(ON_DEVICE)
    for a, b in product(others, others):
        found = dtypes.result_dtype(a, b)
        assert found == dtypes.result_dtype(b, a)
        if BFLOAT16 not in (a, b):
            assert found == np.result_type(a, b)
    for other in others:
        want = {"bool": "bfloat16", "int8": "bfloat16", "uint8": "bfloat16", "bfloat16": "bfloat16"}
        wide = {"int16": "float32", "uint16": "float32", "float16": "float32"}
        integers = dict.fromkeys(("int32", "uint32", "int64", "uint64"), "float64")
        name = {**want, **wide, **integers}.get(str(other), str(other))
        assert str(dtypes.result_dtype(BFLOAT16, other)) == name


def test_only_16_bit_floats_are_summed_in_another_dtype() -> None:
    for dtype in dtypes.HOST_DTYPES:
        want = np.dtype("f") if dtype in (FLOAT16, BFLOAT16) else dtype
        assert dtypes.accumulator_dtype(dtype) == want
        assert dtypes.is_float(dtype) == (str(dtype).startswith(("float", "bfloat")) or dtype.char == "g")


@pytest.mark.parametrize(
    "scalar, want",
    [
        *((x, "bfloat16") for x in (True, 3, 2.5, np.int8(3), np.uint8(3), np.bool_(True), bfloat16(1))),
        *((x, "float32") for x in (np.float16(1), np.float32(1), np.int16(1))),
        *((x, "float64") for x in (np.float64(1), np.int32(1), np.array(1.0))),
        *((x, "complex64") for x in (1j, np.complex64(1))),
        (np.complex128(1), "complex128"),
    ],
    ids=lambda x: f"{type(x).__name__} {x}",
)
def test_a_number_of_python_takes_the_dtype_of_a_bfloat16_array_and_a_scalar_of_numpy_does_not(
    scalar: Any, want: str
) -> None:
    assert str(dtypes.scalar_result_dtype(BFLOAT16, scalar)) == want
    if want != "bfloat16" or isinstance(scalar, bool | int | float):
        assert dtypes.scalar_result_dtype(FLOAT16, scalar) == np.result_type(FLOAT16, scalar)


def test_a_number_on_a_device_is_asked_for_its_dtype_alone() -> None:
    x = fake_cupy.xp.asarray(np.float64(1))
    assert dtypes.scalar_result_dtype(BFLOAT16, x) == np.float64
