"""Products with up to 8 columns of 16-bit floats against float64 on the card."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16

from .product_cases import LAYOUTS, assert_close, dense, device, pattern, strided, values
from .repeats import differing

pytestmark = pytest.mark.gpu

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    "block",
    [(16, 32), pytest.param((32, 64), marks=pytest.mark.sanitizer), (48, 96), (64, 64), (128, 128), (160, 32)],
    ids=str,
)
def test_products_are_right_for_blocks_widths_and_layouts(block, dtype, rng: Any) -> None:
    A = pattern(rng, 23, 17, *block, dtype)
    D = dense(A, np.dtype(np.float64))
    for N, layout, out_dtype in ((1, "C", dtype), (2, "F", F32), (5, "C", dtype), (8, "F", dtype), (8, "C", F32)):
        B = values(rng, (D.shape[1], N), dtype)
        out = strided(np.full((D.shape[0], N), 0.25).astype(out_dtype), layout)
        dA = device(A)
        bg.matmul(dA, strided(B, layout), out=out, alpha=2, beta=0.5)
        (plan,) = dA._matrix_cache.plans.values()
        assert plan.value.config.spec().entry == "gemm_few"
        wide = B.astype(float)
        assert_close(out.get(), 2 * (D @ wide) + 0.125, 2 * (np.abs(D) @ np.abs(wide)) + 1, 2 * D.shape[1], np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_indices_and_batches(layout: str, rng: Any) -> None:
    import cupy

    for index in (np.int32, np.int64):
        A = pattern(rng, 19, 13, 32, 32, F16, index)
        D, dA = dense(A, np.dtype(np.float64)), device(A)
        B = values(rng, (D.shape[1], 7), F16)
        out = bg.matmul(dA, strided(B, layout))
        assert_close(out.get(), D @ B.astype(float), np.abs(D) @ np.abs(B).astype(float), D.shape[1], np.float32)
        x = values(rng, (D.shape[1],), F16)
        assert_close((dA @ cupy.asarray(x)).get(), D @ x.astype(float), np.abs(D) @ np.abs(x), D.shape[1], np.float32)
        several = values(rng, (3, D.shape[1], 4), F16)
        got = bg.matmul(dA, cupy.asarray(several))
        size = np.abs(D) @ np.abs(several).astype(float)
        assert_close(got.get(), D @ several.astype(float), size, D.shape[1], np.float32)


@pytest.mark.sanitizer
def test_nan_reaches_the_rows_that_meet_it_and_no_others(rng: Any) -> None:
    import cupy

    A = pattern(rng, 20, 15, 16, 64, F16)
    B = values(rng, (A[3][1], 3), F16)
    B[70] = np.nan
    got = np.isnan(bg.matmul(device(A), cupy.asarray(B)).get()).reshape(20, -1)
    meets = np.isin(np.arange(20), np.repeat(np.arange(20), np.diff(A[2]))[A[1] == 1])
    assert meets.any() and not meets.all()
    assert got[meets].all() and not got[~meets].any()


@pytest.mark.sanitizer
def test_indices_overwritten_after_construction_touch_no_foreign_memory(rng: Any) -> None:
    import cupy

    A = device(pattern(rng, 20, 15, 16, 64, F16))
    B = cupy.asarray(values(rng, (A.shape[1], 3), F16))
    for bad in (-1, 15, 2**31 - 1, -(2**31)):
        A.indices[[0, 7, -1]] = bad
        bg.matmul(A, B)
    A.indptr[[2, 5]] = 2**31 - 1
    bg.matmul(A, B)
    cupy.cuda.Device().synchronize()


def test_results_repeat_bit_by_bit(rng: Any) -> None:
    import cupy

    A = device(pattern(rng, 64, 300, 64, 64, F16))
    B = cupy.asarray(values(rng, (A.shape[1], 4), F16))
    assert differing(lambda: bg.matmul(A, B), bg.matmul(A, B), 100) == 0
