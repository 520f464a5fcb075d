"""Products with up to 8 columns of 16-bit floats against float64 on the card."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16

from .test_kernels import LAYOUTS, assert_close, dense, device, kernel, pattern, strided, values

pytestmark = pytest.mark.gpu

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@kernel("gemm_few")
@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    "block",
    [(16, 32), pytest.param((32, 64), marks=pytest.mark.sanitizer), (48, 96), (64, 64), (128, 128), (160, 32)],
    ids=str,
)
def test_products_are_right_for_blocks_widths_and_layouts(block, dtype, rng: Any, checksum: Any) -> None:
    A = pattern(rng, 23, 17, *block, dtype)
    D = dense(A, np.dtype(np.float64))
    for N, layout, out_dtype in ((1, "C", dtype), (2, "F", F32), (5, "C", dtype), (8, "F", dtype), (8, "C", F32)):
        B = values(rng, (D.shape[1], N), dtype)
        out = strided(np.full((D.shape[0], N), 0.25).astype(out_dtype), layout)
        dA = device(A)
        bg.matmul(dA, strided(B, layout), out=out, alpha=2, beta=0.5)
        (plan,) = dA._matrix_cache.plans.values()
        assert plan.value.config.spec().entry == "gemm_few"
        checksum(out)
        wide = B.astype(float)
        assert_close(out.get(), 2 * (D @ wide) + 0.125, 2 * (np.abs(D) @ np.abs(wide)) + 1, 2 * D.shape[1], np.float32)


@kernel("gemm_few")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_indices_and_batches(layout: str, rng: Any, checksum: Any) -> None:
    import cupy

    for index in (np.int32, np.int64):
        A = pattern(rng, 19, 13, 32, 32, F16, index)
        D, dA = dense(A, np.dtype(np.float64)), device(A)
        B = values(rng, (D.shape[1], 7), F16)
        out = bg.matmul(dA, strided(B, layout))
        checksum(out)
        assert_close(out.get(), D @ B.astype(float), np.abs(D) @ np.abs(B).astype(float), D.shape[1], np.float32)
        x = values(rng, (D.shape[1],), F16)
        assert_close((dA @ cupy.asarray(x)).get(), D @ x.astype(float), np.abs(D) @ np.abs(x), D.shape[1], np.float32)
        several = values(rng, (3, D.shape[1], 4), F16)
        got = bg.matmul(dA, cupy.asarray(several))
        size = np.abs(D) @ np.abs(several).astype(float)
        assert_close(got.get(), D @ several.astype(float), size, D.shape[1], np.float32)


@kernel("gemm_few")
@pytest.mark.sanitizer
def test_nan_and_spoiled_indices_reach_no_other_rows(rng: Any) -> None:
    import cupy

    data, indices, indptr, shape = pattern(rng, 20, 15, 16, 64, F16)
    spoiled = rng.integers(0, len(indices), 5)
    data[spoiled] = np.nan
    indices[spoiled] = [-1, 15, 2**31 - 1, -(2**31), 16]
    B = values(rng, (shape[1], 3), F16)
    B[70] = np.nan
    believed = np.delete(np.arange(len(indices)), spoiled)
    rows = np.repeat(np.arange(20), np.diff(indptr))[believed]
    A = device((data, np.clip(indices, 0, 14), indptr, shape))
    A.indices[...] = cupy.asarray(indices)
    got = bg.matmul(A, cupy.asarray(B)).get()
    meets = np.isin(np.arange(20), rows[indices[believed] == 1])
    assert meets.any() and not meets.all()
    assert np.array_equal(np.isnan(got).reshape(20, -1).all(axis=1), meets)
    assert not np.isnan(got.reshape(20, -1)[~meets]).any()


@kernel("gemm_few")
def test_results_repeat_bit_by_bit(rng: Any) -> None:
    import cupy

    A = device(pattern(rng, 64, 300, 64, 64, F16))
    B = cupy.asarray(values(rng, (A.shape[1], 4), F16))
    first = bg.matmul(A, B)
    for _ in range(100):
        assert bool((bg.matmul(A, B) == first).all())
