"""All that is promised of rearrange: copies in any order, with longer lines, of some matrices, and in parts of tf32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._kernels.rearrange import Form, Lie, Rearrange
from bsrgemm.dtypes import BFLOAT16

from ..devices import Device
from .products import F32, few_ctas

#: The largest number, which is rounded to the largest of 11 bits and not to infinity.
MOST = np.finfo(F32).max
SHAPES = [(64, 64), (1, 1), (8, 300), (129, 63), (3, 70, 66), (2, 70, 65)]


@pytest.fixture(autouse=True)
def hopper(device: Device) -> None:
    device.needs("sm_90a")


def copied(device: Device, x: np.ndarray[Any, Any], layout: str, parts: int) -> np.ndarray[Any, Any]:
    """The parts of a copy, as (..., parts, rows, columns)."""
    room = device.cupy.empty(parts * x.size, F32)
    B = device.lying(x, layout)
    batch = B if B.ndim == 3 else B[None]
    _, rows, columns = batch.shape
    lie = Lie(F32, batch.shape, (4 * parts * rows * columns, 4, 4 * rows))
    Rearrange.copying(batch, lie, form=Form(parts), part=rows * columns).start((B, room))
    shape = (*x.shape[:-2], parts, x.shape[-1], x.shape[-2])
    return device.asnumpy(room).reshape(shape).swapaxes(-1, -2)


@pytest.mark.sanitizer
@pytest.mark.parametrize("layout", ["C", "F", "gaps"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_is_rounded(shape: Any, layout: str, device: Device, rng: np.random.Generator) -> None:
    """To the nearest of 11 bits; NaN, infinity and numbers that have no more bits stay what they are."""
    for x in (rng.standard_normal(shape).astype(F32), rng.integers(-512, 512, shape).astype(F32)):
        few = x.reshape(-1)[:6]
        few[...] = np.array([0.0, np.inf, -np.inf, np.nan, MOST, -MOST], F32)[: len(few)]
        got = copied(device, x, layout, 1)[..., 0, :, :]
        assert not (np.ascontiguousarray(got).view(np.uint32) & 0x1FFF).any()
        rounds = np.isfinite(x) & ((np.round(x) != x) | (np.abs(x) == MOST))
        np.testing.assert_array_equal(got[~rounds], x[~rounds])
        assert (np.abs(got[rounds] - x[rounds]) <= 0.73 * 2**-10 * np.abs(x[rounds])).all()


@pytest.mark.sanitizer
@pytest.mark.parametrize("layout", ["C", "F", "gaps"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_parts_add_up_to_every_element(shape: Any, layout: str, device: Device, rng: np.random.Generator) -> None:
    """Also to the largest and the smallest numbers, infinity and NaN of any bits."""
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-30, 30, shape)).astype(F32)
    words = np.array([np.nan, np.inf, -np.inf, 0.0, 3.4028235e38, -3.4028235e38, 1e-45, -1e-40], F32).view(np.uint32)
    words = np.append(words, np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32))
    few = x.reshape(-1)[: len(words)]
    few[...] = words[: len(few)].view(F32)
    both = copied(device, x, layout, 2)
    assert not (np.ascontiguousarray(both[..., 0, :, :]).view(np.uint32) & 0x1FFF).any()
    np.testing.assert_array_equal(both.sum(axis=-3), x)
    finite = np.isfinite(x)
    assert (np.abs(both[..., 1, :, :][finite]) <= 2.0**-10 * np.abs(x[finite]) + 1e-38).all()


@pytest.mark.emulated
@pytest.mark.parametrize("parts", [1, 2])
def test_loops_go_on_beyond_a_small_grid(parts: int, device: Device, rng: np.random.Generator) -> None:
    x = rng.integers(-9, 9, (3, 200, 130)).astype(F32)
    with few_ctas(1):
        np.testing.assert_array_equal(copied(device, x, "C", parts)[..., 0, :, :], x)


def lined(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Random bytes, as elements of a dtype."""
    return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


@pytest.mark.before
@pytest.mark.races
@pytest.mark.sanitizer
@pytest.mark.parametrize("to_order", ["C", "F"])
@pytest.mark.parametrize("layout", ["C", "F", "gaps", "backwards"])
@pytest.mark.parametrize(
    ("shape", "more"),
    [((1, 3, 5), (0, 3)), ((2, 70, 65), (2, 7)), ((300, 6, 6), (0, 2)), ((3, 40, 33), (0, 0))],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "c16"])
def test_words_of_any_size_are_copied_in_any_order(
    dtype: str, shape: Any, more: Any, layout: str, to_order: str, device: Device, rng: np.random.Generator
) -> None:
    """What a copy has beyond the matrix is zero, and nothing else is written."""
    x = lined(rng, shape, dtype)
    n, high, wide = shape[0], shape[1] + more[0], shape[2] + more[1]
    size = x.itemsize
    room = device.asarray(lined(rng, (n * high * wide + 4,), dtype))
    before = device.asnumpy(room)
    steps = (wide * size, size) if to_order == "C" else (size, high * size)
    to = Lie(x.dtype, (n, high, wide), (high * wide * size, *steps))
    given = device.lying(x, layout)
    Rearrange.copying(given, to).start((given, room))
    got = device.asnumpy(room)
    want = np.zeros((n, high, wide), x.dtype)
    want[:, : shape[1], : shape[2]] = x
    flat = np.ascontiguousarray(want if to_order == "C" else want.swapaxes(1, 2)).reshape(-1)
    assert got[: flat.size].tobytes() == flat.tobytes()
    assert got[flat.size :].tobytes() == before[flat.size :].tobytes()


@pytest.mark.before
@pytest.mark.parametrize("shape", [(7, 6, 4), (7, 80, 70)], ids=str)
def test_matrices_come_from_their_places(shape: Any, device: Device, rng: np.random.Generator) -> None:
    """A place that is none is a matrix of zeros."""
    x = lined(rng, shape, "u4")
    places = np.array([3, 0, 6, -1, 7, 2**30, 2, 2, -(2**31)], np.int32)
    n, rows, columns = len(places), shape[1], shape[2]
    room = device.cupy.empty((n, columns, rows), np.uint32)
    to = Lie(x.dtype, (n, rows, columns), (4 * rows * columns, 4, 4 * rows))
    given, where = device.asarray(x), device.asarray(places)
    Rearrange.copying(given, to, places=where).start((given, room))
    want = np.stack([x[i].T if 0 <= i < len(x) else np.zeros((columns, rows), x.dtype) for i in places])
    np.testing.assert_array_equal(device.asnumpy(room), want)


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", ["F16", "BF16"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 16, 16), (3, 5, 7), (1, 70, 256), (40, 3, 12)], ids=str)
def test_fp8_is_widened_exactly(shape: Any, order: str, name: str, device: Device, rng: np.random.Generator) -> None:
    """Every byte, also subnormal numbers and NaN, into lines of whole 16 bytes that end with zeros."""
    x = rng.integers(0, 256, shape).astype(np.uint8)
    x.reshape(-1)[: min(x.size, 256)] = np.arange(256, dtype=np.uint8)[: x.size]
    batches, rows, columns = shape
    wide = BFLOAT16 if name == "BF16" else np.dtype(np.float16)
    pitch = -(-columns // 8) * 8
    given = device.asarray(np.ascontiguousarray(x if order == "C" else x.swapaxes(1, 2)))
    given = given if order == "C" else given.swapaxes(1, 2)
    room = device.asarray(np.full((batches, rows, pitch), 3, wide))
    to = Lie.in_order(wide, (batches, rows, pitch))
    Rearrange.copying(given, to, form=Form[name]).start((given, room))
    got, want = device.asnumpy(room), x.view(ml_dtypes.float8_e4m3fn).astype(wide)
    np.testing.assert_array_equal(got[..., :columns].astype(np.float64), want.astype(np.float64))
    assert not got[..., columns:].astype(np.float64).any()


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("layout", ["C", "F", "gaps"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 33), (2, 5, 7), (3, 70, 40)], ids=str)
def test_a_complex_number_is_written_with_i_times_it(
    shape: Any, layout: str, dtype: Any, device: Device, rng: np.random.Generator
) -> None:
    """In the next row of real numbers; infinity, NaN and the signs of zeros stay apart."""
    x = (rng.integers(-3, 4, shape) + 1j * rng.integers(-3, 4, shape)).astype(dtype)
    x.reshape(-1)[0] = complex(np.inf, np.nan)
    B = device.lying(x, layout)
    batch = B if B.ndim == 3 else B[None]
    batches, rows, columns = batch.shape
    size = x.itemsize
    room = device.cupy.empty(2 * batches * rows * columns, dtype)
    to = Lie(x.dtype, batch.shape, (2 * rows * columns * size, 2 * columns * size, size))
    Rearrange.copying(batch, to, form=Form.TIMES_I, part=columns).start((B, room))
    got = device.asnumpy(room).reshape(batches, rows, 2, columns)
    want = np.stack([x, x], axis=-2).reshape(got.shape)
    turned = np.empty_like(want[:, :, 1])
    turned.real, turned.imag = -want[:, :, 1].imag, want[:, :, 1].real
    want[:, :, 1] = turned
    np.testing.assert_array_equal(got.view(x.real.dtype), want.view(x.real.dtype))
