"""Products of blocks of 48, 80, 96 or 160 rows, computed as their transpose, against float64 on the card."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import matmul
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._kernels import forced_kernel
from bsrgemm._products import configs
from bsrgemm.dtypes import BFLOAT16

from .product_cases import assert_close, device, exact_product, pattern, served_by, values
from .repeats import delay, differing

pytestmark = pytest.mark.gpu

F16 = np.dtype(np.float16)
TURNED = "gemm_turned_sm90"
BLOCKS = [(96, 96), (160, 160), (80, 80), (80, 16), (48, 48), (96, 32), (240, 112), (288, 64)]


@pytest.fixture(autouse=True)
def turned(hopper: None) -> Iterator[None]:
    """By the rules, small products have another kernel."""
    with forced_kernel.force_kernel("GemmTurnedSm90"):
        yield


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
@pytest.mark.parametrize("block", [pytest.param((48, 80), marks=pytest.mark.sanitizer), *BLOCKS], ids=str)
def test_products_are_right_for_blocks_and_widths(block, dtype, rng: Any) -> None:
    import cupy

    for N, index in ((136, np.int32), (256, np.int64), (1528, np.int32)):
        A = pattern(rng, 7, 6, *block, dtype, index)
        B = values(rng, (A[3][1], N), dtype)
        want, size = exact_product(A, B)
        dA = device(A)
        out = cupy.full(want.shape, np.nan, np.float32).astype(dtype)
        bg.matmul(dA, cupy.asarray(B), out=out, alpha=2)
        assert served_by(dA, TURNED)
        assert_close(out.get(), 2 * want, 2 * size, 2 * A[3][1], np.float32)


def test_batches_pieces_and_empty_rows(rng: Any) -> None:
    import cupy

    A = pattern(rng, 3, 90, 96, 96, F16)
    B = values(rng, (2, A[3][1], 200), F16)
    dA = device(A)
    got = bg.matmul(dA, cupy.asarray(B))
    assert served_by(dA, TURNED)
    for i in range(2):
        want, size = exact_product(A, B[i])
        assert_close(got[i].get(), want, size, 2 * A[3][1], np.float32)
    none = bg.bsr_array((dA.data[:1], dA.indices[:1], cupy.asarray([0, 0, 0, 1], np.int32)), shape=dA.shape)
    assert not bool((none @ cupy.asarray(B[0]))[: 2 * 96].any())


@pytest.mark.parametrize("block", [(48, 80), (96, 96)], ids=str)
def test_nan_and_infinity_spread_only_through_stored_blocks(block, rng: Any) -> None:
    import cupy

    A = pattern(rng, 9, 8, *block, F16)
    B = values(rng, (A[3][1], 264), F16)
    B[3 * block[1] + 5, 7], B[3 * block[1] + 9, 260] = np.nan, np.inf
    dA = device(A)
    got = np.isfinite((dA @ cupy.asarray(B)).get().astype(np.float32))
    assert served_by(dA, TURNED)
    rows = np.repeat([3 in A[1][A[2][i] : A[2][i + 1]] for i in range(9)], block[0])
    assert not got[rows, 7].any() and not got[rows, 260].any()
    assert got[~rows].all() and np.delete(got, (7, 260), axis=1).all()


@pytest.mark.parametrize("block", [(96, 96), (80, 80), (48, 80), (160, 32)], ids=str)
def test_the_pipeline_survives_delays_and_poisoned_stages(block, rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    A = pattern(rng, 30, 20, *block, F16)
    B = cupy.asarray(values(rng, (A[3][1], 1528), F16))
    calm = device(A) @ B
    delay(configs.GemmTurnedSm90, monkeypatch)
    dA = device(A)
    assert differing(lambda: dA @ B, calm, 20) == 0


def test_repeats_are_equal_bit_by_bit(rng: Any) -> None:
    import cupy

    for block in ((48, 80), (160, 160)):
        A = device(pattern(rng, 40, 30, *block, F16))
        B = cupy.asarray(values(rng, (A.shape[1], 1528), F16))
        assert differing(partial(matmul, A, B), A @ B, 200) == 0
