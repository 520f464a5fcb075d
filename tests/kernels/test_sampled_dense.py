"""All that is promised of sampled products that are computed as dense ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._products import block_products, sampled
from bsrgemm._products.sampled_dense import SampledDense

from ..devices import Device
from .products import BF16, C64, C128, F16, F32, F64, exact, numbers
from .test_block_products import pattern_of


@pytest.fixture(autouse=True)
def hopper(device: Device) -> None:
    device.needs("sm_90a")


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every sampled product be a dense one."""
    monkeypatch.setattr(SampledDense, "other_seconds", lambda self, card: np.inf)


@pytest.mark.sanitizer
@pytest.mark.parametrize("order", ["CC", "FC", "CF", "gaps"])
@pytest.mark.parametrize(
    ("dtype", "block", "K"),
    [(F16, (7, 9), 65), (BF16, (40, 24), 64), (F32, (3, 3), 130), (F64, (20, 50), 33), (C64, (5, 6), 31)],
    ids=str,
)
def test_blocks_of_a_dense_product_are_those_of_the_pattern(
    dtype: Any, block: tuple[int, int], K: int, order: str, device: Device, dense: None, rng: np.random.Generator
) -> None:
    (R, N), rows, columns = block, 6, 5
    there = rng.random((rows, columns)) < 0.5
    there[1], there[2, 2] = False, True
    pattern = pattern_of(there, block, dtype)
    X, Y = numbers(rng, (rows * R, K), dtype), numbers(rng, (K, columns * N), dtype)
    layouts = ("gaps", "gaps") if order == "gaps" else tuple(order)
    on = [device.lying(x, layout) for x, layout in zip((X, Y), layouts, strict=True)]
    M = pattern.on(device)
    full = (X.astype(exact(X.dtype)) @ Y.astype(exact(X.dtype))).astype(dtype)
    want = full.reshape(rows, R, columns, N).swapaxes(1, 2)[there.nonzero()]
    with device.kernels() as kernels:
        for _ in range(2):  # the second one is a known call
            np.testing.assert_array_equal(device.asnumpy(bg.sddmm(*on, M).data), want)
    assert kernels.count("rearrange") >= 2 and "spgemm_simt" not in kernels


def test_a_block_outside_of_the_matrix_is_zero(device: Device, dense: None, rng: np.random.Generator) -> None:
    pattern = pattern_of(np.ones((3, 4), bool), (5, 7), F32)
    M = pattern.on(device)
    X, Y = numbers(rng, (15, 20), F32), numbers(rng, (20, 28), F32)
    whole = device.asnumpy(bg.sddmm(device.asarray(X), device.asarray(Y), M).data)
    M.indices[[2, 9]] = device.asarray(np.array([-1, 2**30], np.int32))
    got = device.asnumpy(bg.sddmm(device.asarray(X), device.asarray(Y), M).data)
    whole[[2, 9]] = 0
    np.testing.assert_array_equal(got, whole)


def test_few_blocks_are_computed_by_themselves(device: Device, rng: np.random.Generator) -> None:
    """What is predicted to be faster is chosen: many odd blocks are a part of a dense product, a few are not."""
    said = {}
    for share in (1.0, 0.001):
        there = rng.random((200, 200)) < share
        there[0, 0] = True
        M = pattern_of(there, (5, 5), F16).on(device)
        X, Y = numbers(rng, (1000, 64), F16), numbers(rng, (64, 1000), F16)
        with device.kernels() as kernels:
            bg.sddmm(device.asarray(X), device.asarray(Y), M)
        said[share] = "block_products_sm90" in kernels
    assert said == {1.0: False, 0.001: True}


# ------------------------------------------------------------------------------- copies for the tensor cores
@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no product be a dense one, and let copies for the tensor cores always pay."""
    monkeypatch.setattr(SampledDense, "served", False)
    monkeypatch.setattr(sampled, "_pays", lambda *_: True)


@pytest.mark.sanitizer
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("layouts", ["CC", "FC", "CF", "FF", "gaps"])
@pytest.mark.parametrize(
    ("dtype", "block", "K"),
    [
        *((F16, (7, 9), 65), (BF16, (40, 24), 64), (F16, (64, 64), 3), (F32, (3, 3), 130), (F32, (48, 32), 5)),
        *((F64, (20, 50), 33), (F64, (16, 16), 1), (C64, (5, 6), 31), (C64, (16, 8), 16), (C128, (3, 17), 7)),
    ],
    ids=str,
)
def test_operands_are_copied_so_that_tensor_cores_can_read_them(
    dtype: Any,
    block: tuple[int, int],
    K: int,
    layouts: str,
    arch: str,
    device: Device,
    copied: None,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks and lines get zeros at their ends, and the result loses what they add."""
    if arch == "sm_80":
        monkeypatch.setattr(block_products.BlockProductsSm90, "of", lambda *_: None)
    (R, N), rows, columns = block, 5, 4
    there = rng.random((rows, columns)) < 0.5
    there[1], there[2, 2] = False, True
    M = pattern_of(there, block, dtype).on(device)
    X, Y = numbers(rng, (rows * R, K), dtype), numbers(rng, (K, columns * N), dtype)
    full = (X.astype(exact(X.dtype)) @ Y.astype(exact(X.dtype))).astype(dtype)
    want = full.reshape(rows, R, columns, N).swapaxes(1, 2)[there.nonzero()]
    lying = ("gaps", "gaps") if layouts == "gaps" else tuple(layouts)
    on = [device.lying(x, layout) for x, layout in zip((X, Y), lying, strict=True)]
    with device.kernels() as kernels:
        for _ in range(2):  # the second one is a known call
            np.testing.assert_array_equal(device.asnumpy(bg.sddmm(*on, M).data), want)
        np.testing.assert_array_equal(device.asnumpy(bg.sddmm(*on, M, alpha=2).data), 2 * want)
    assert "spgemm_simt" not in kernels and any(name.startswith("block_products") for name in kernels)


def test_an_infinity_stays_in_its_row_where_lines_are_longer(
    device: Device, copied: None, rng: np.random.Generator
) -> None:
    there = np.ones((2, 2), bool)
    M = pattern_of(there, (5, 7), F32).on(device)
    X, Y = numbers(rng, (10, 3), F32), np.ones((3, 14), F32)
    X[4, 2], X[7, 0] = np.inf, np.nan
    got = device.asnumpy(bg.sddmm(device.asarray(X), device.asarray(Y), M).todense())
    assert (~np.isfinite(got)).all(1).nonzero()[0].tolist() == [4, 7]
    assert (~np.isfinite(got)).any(1).nonzero()[0].tolist() == [4, 7]
