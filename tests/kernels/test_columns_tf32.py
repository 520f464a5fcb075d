"""All that is promised of columns_tf32: copies of B by columns, rounded to tf32 or in two parts that add up to B."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._products.prepared import ColumnsTf32

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
    ColumnsTf32(parts).launch(B).start((B, room))
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
