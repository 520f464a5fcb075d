"""gemm_sm90, the product on the tensor cores of Hopper, on the card against float64."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._kernels import forced_kernel
from bsrgemm._products import sm90_tiles
from bsrgemm.dtypes import BFLOAT16

from .marks import some_under_memcheck
from .product_cases import (  # noqa: F401  (fixtures)
    HALF,
    LAYOUTS,
    MEMCHECKED,
    Matrix,
    assert_close,
    dense,
    device,
    exact_product,
    nothing_is_small,
    pattern,
    served_by,
    strided,
    values,
)
from .repeats import delay, differing, on_streams

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["by rule", "128 rows"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are computed in tiles of 64 rows, or in tiles of 128 rows as large ones are."""
    if request.param == "128 rows":
        monkeypatch.setattr(sm90_tiles, "FEW_TILES", 0)


#: From shared memory with and without a tail; from registers, in one piece of memory or not.
SM90_BLOCKS = [
    *[(64, 64), (128, 128), (128, 64), (64, 16), (192, 48), (256, 80), (64, 112), (128, 256)],
    *[(16, 16), (32, 32), (16, 64), (32, 16), (48, 80), (96, 96), (80, 48), (32, 192)],
]


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16], ids=str)
@pytest.mark.parametrize("block", some_under_memcheck(SM90_BLOCKS, MEMCHECKED))
def test_tensor_core_product_is_right_for_blocks_widths_and_layouts(dtype, block, rng) -> None:
    import cupy

    dtype = np.dtype(dtype)
    for N, index, layout in [(16, np.int32, "C"), (72, np.int64, "F"), (256, np.int32, "F"), (520, np.int32, "C")]:
        A = pattern(rng, 5, 4, *block, dtype, index)
        B = values(rng, (A[3][1], N), dtype)
        want, size = exact_product(A, B)
        for out_dtype, order in [(dtype, "C"), (np.dtype(np.float32), "C"), (dtype, "F")]:
            out = cupy.full(want.shape, np.nan, np.float32, order=order).astype(out_dtype, order=order)
            dA = device(A)
            bg.matmul(dA, strided(B, layout), out=out)
            assert served_by(dA) or served_by(dA, "gemm_turned_sm90") or not len(A[1])  # nothing is stored
            assert_close(out.get(), want, size, 2 * A[3][1], np.float32)


@pytest.mark.parametrize("block", [(64, 64), (128, 128), (192, 48), (256, 80), (64, 112)], ids=str)
def test_tiles_of_128_rows_are_right_also_for_small_products(block, rng, monkeypatch) -> None:
    import cupy

    monkeypatch.setattr(sm90_tiles, "FEW_TILES", 0)
    for N, layout, order, transposed in itertools.product((72, 256, 520), "CF", "CF", (False, True)):
        A = pattern(rng, 5, 4, *block, HALF)
        B = values(rng, (A[3][0 if transposed else 1], N), HALF)
        want, size = exact_product(A, B, transposed)
        dA, out = device(A), cupy.full(want.shape, np.nan, HALF, order=order)
        bg.matmul(dA.T if transposed else dA, strided(B, layout), out=out)
        assert served_by(dA) or served_by(dA, "gemm_turned_sm90") or not len(A[1])
        assert_close(out.get(), want, size, 2 * sum(A[3]), np.float32)


@pytest.mark.parametrize("block", some_under_memcheck(SM90_BLOCKS, MEMCHECKED))
def test_tensor_core_product_with_the_transpose(block, rng) -> None:
    import cupy

    dtype = np.dtype(np.float16)
    for N, layout, order in [(64, "C", "C"), (200, "F", "F"), (256, "C", "F")]:
        A = pattern(rng, 6, 5, *block, dtype)
        B = values(rng, (A[3][0], N), dtype)
        want, size = exact_product(A, B, transposed=True)
        dA = device(A)
        out = cupy.full(want.shape, np.nan, dtype, order=order)
        bg.matmul(dA.T, strided(B, layout), out=out)
        assert served_by(dA)
        assert_close(out.get(), want, size, 2 * A[3][0], np.float32)
        other = cupy.asarray(np.ascontiguousarray(B.T)) @ dA  # (N, M) @ (M, K)
        assert_close(other.get(), want.T, size.T, 2 * A[3][0], np.float32)


@pytest.mark.parametrize("N", some_under_memcheck([2, 3, 7, 8, 15, 17, 33, 101, 260, 1001], [7, 33]))
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32), (48, 80), (16, 16)], ids=str)
def test_any_number_of_columns_runs_on_the_tensor_cores(block, N, rng, nothing_is_small) -> None:  # noqa: F811
    import cupy

    A = pattern(rng, 5, 4, *block, HALF)
    B = values(rng, (A[3][1], N), HALF)
    want, size = exact_product(A, B)
    for out_dtype, layout, beta in itertools.product(("float16", "float32"), LAYOUTS, (0, 0.5)):
        dA, out = device(A), cupy.full(want.shape, 0.25, out_dtype)
        with forced_kernel.force_kernel("GemmSm90"):  # up to 8 columns have a kernel of their own
            bg.matmul(dA, strided(B, layout), out=out, beta=beta)
        assert served_by(dA)
        assert_close(out.get(), want + 0.25 * beta, size + 0.25, 2 * A[3][1], np.float32)
    batch = values(rng, (3, A[3][1], N), HALF)
    got = device(A) @ cupy.asarray(batch)
    for one, B in zip(got.get(), batch, strict=True):
        assert_close(one, *exact_product(A, B), 2 * A[3][1], np.float32)


@pytest.mark.sanitizer
def test_tensor_core_product_scales_and_adds(rng) -> None:
    import cupy

    for dtype, out_dtype, block in itertools.product(
        ["float16", BFLOAT16], ["own", "float32"], [(128, 32), (64, 64), (32, 32)]
    ):
        dtype = np.dtype(dtype)
        out_dtype = dtype if out_dtype == "own" else np.dtype(out_dtype)
        A = pattern(rng, 4, 3, *block, dtype)
        B, old = values(rng, (A[3][1], 100), dtype), values(rng, (A[3][0], 100), out_dtype)
        exact, size = exact_product(A, B)
        for alpha, beta in [(0.5, 0), (1, 1), (-2, 0.25)]:
            out = cupy.asarray(old)
            dA = device(A)
            bg.matmul(dA, cupy.asarray(B[:, :96].copy()), out=out[:, :96], alpha=alpha, beta=beta)
            want = alpha * exact + beta * old.astype(np.float64)
            weight = abs(alpha) * size + abs(beta) * np.abs(old.astype(np.float64))
            assert_close(out.get()[:, :96], want[:, :96], weight[:, :96], 2 * A[3][1], np.float32)
            np.testing.assert_array_equal(out.get()[:, 96:], old[:, 96:])  # nothing beyond the view is written


@pytest.mark.sanitizer
@pytest.mark.parametrize("block", [(64, 64), (32, 32), (16, 16)], ids=str)
def test_tensor_core_product_reads_nothing_outside_with_spoiled_indices(block, rng) -> None:
    import cupy

    good = pattern(rng, 6, 5, *block, "float16")
    B = cupy.asarray(values(rng, (good[3][1], 64), np.dtype("float16")))
    for damage in (-1, 5, 2**31 - 1, -(2**31)):
        for transposed in (False, True):
            A = device(good)  # spoiled before its work list is made
            X = cupy.asarray(values(rng, (good[3][0], 64), np.dtype("float16"))) if transposed else B
            A.indices[:3] = damage
            assert bool(cupy.isfinite((A.T if transposed else A) @ X).all())
            A = device(good)
            A.indptr[2] = damage
            assert bool(cupy.isfinite((A.T if transposed else A) @ X).all())
        A = device(good)  # and after
        A @ B
        A.indices[:3] = damage
        A.indptr[2] = damage
        assert bool(cupy.isfinite(A @ B).all())


@pytest.mark.parametrize(
    "block", some_under_memcheck([(64, 48), (128, 128), (64, 64), (32, 32), (16, 16), (48, 80)], MEMCHECKED)
)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_tensor_core_product_spreads_nan_only_through_stored_blocks(block, bad, rng) -> None:
    import cupy

    A = pattern(rng, 9, 6, *block, "float16")
    B = values(rng, (A[3][1], 64), np.dtype("float16"))
    B[block[1] + 3, 5:9] = bad  # in block column 1; a tile of K reaches into it from block column 0
    with np.errstate(invalid="ignore"):
        stored = dense(A, np.dtype(np.float64))
        present = np.zeros((9, 6), bool)
        present[np.repeat(np.arange(9), np.diff(A[2])), A[1]] = True
        want, size = np.zeros((A[3][0], 64)), np.zeros((A[3][0], 64))
        R, C = block
        for i, j in zip(*np.nonzero(present), strict=True):
            left, right = stored[i * R : (i + 1) * R, j * C : (j + 1) * C], B[j * C : (j + 1) * C].astype(np.float64)
            want[i * R : (i + 1) * R] += left @ right
            size[i * R : (i + 1) * R] += np.abs(left) @ np.abs(right)
    for alpha, beta, order in [(1, 0, "C"), (1, 0, "F"), (2, -1, "C")]:
        old = values(rng, want.shape, np.dtype("float16"))
        out = cupy.asarray(old, order=order)
        bg.matmul(device(A), cupy.asarray(B), out=out, alpha=alpha, beta=beta)
        whole = alpha * want + (beta * old if beta else 0)
        weight = alpha * size + abs(beta) * np.abs(old.astype(np.float64))
        got, finite = out.get(), np.isfinite(whole)
        np.testing.assert_array_equal(np.isfinite(got.astype(np.float64)), finite)
        assert_close(got[finite], whole[finite], weight[finite], 2 * A[3][1], np.float32)


def uneven(rng: np.random.Generator, kind: str, rows: int, cols: int, block: tuple[int, int]) -> Matrix:
    """Patterns whose rows differ in length."""
    stored = np.zeros((rows, cols), bool)
    if kind == "one dense row":
        stored[rows // 2] = True
        stored[np.arange(rows), np.arange(rows) % cols] = True
    elif kind == "arrowhead":
        stored[0] = stored[:, 0] = True
        stored[np.arange(rows), np.arange(rows) % cols] = True
    elif kind == "power law":
        for i, length in enumerate((cols / np.arange(1, rows + 1)).astype(int)):
            stored[i, rng.choice(cols, length, replace=False)] = True
    elif kind == "banded":
        stored = np.abs(np.arange(rows)[:, None] - np.arange(cols)) < 3
    elif kind == "one full row":
        stored[1] = True
    i, j = np.nonzero(stored)
    indptr = np.searchsorted(i, np.arange(rows + 1)).astype(np.int32)
    R, C = block
    return values(rng, (len(i), R, C), np.dtype(np.float16)), j.astype(np.int32), indptr, (rows * R, cols * C)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32), (16, 16)], ids=str)
@pytest.mark.parametrize("kind", ["one dense row", "arrowhead", "power law", "banded", "one full row"])
def test_uneven_rows_come_in_pieces_and_repeat_bit_by_bit(kind, block, rng) -> None:
    import cupy

    def product(A: Any, B: np.ndarray) -> Any:
        return A @ cupy.asarray(B)

    A = uneven(rng, kind, 12, 4096 // block[1], block)
    cut = False
    for N in (64, 256, 1000):
        B = values(rng, (A[3][1], N), np.dtype(np.float16))
        dA = device(A)
        got = product(dA, B)
        cut |= any(made.value.scratch.floats > 0 for made in dA._matrix_cache.plans.values())
        want, size = exact_product(A, B)
        assert_close(got.get(), want, size, 2 * A[3][1], np.float32)
        assert differing(partial(product, dA, B), got, 100) == 0
    assert cut


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("block", [(64, 64), (128, 128), (32, 32), (16, 16), (48, 80)], ids=str)
def test_tensor_core_product_repeats_bit_by_bit(block, rng) -> None:
    import cupy

    A = device(pattern(rng, 30, 20, *block, "float16"))
    B = cupy.asarray(values(rng, (A.shape[1], 1000), np.dtype("float16")))
    assert differing(lambda: A @ B, A @ B, 1000) == 0


def test_two_streams_share_a_matrix(rng) -> None:
    import cupy

    A = device(pattern(rng, 40, 30, 64, 64, "float16"))
    B = cupy.asarray(values(rng, (A.shape[1], 512), np.dtype("float16")))
    want = device((A.data.get(), A.indices.get(), A.indptr.get(), A.shape)) @ B
    assert all(bool((x == want).all()) for x in on_streams(lambda: A @ B, 50))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("block", [(64, 64), (128, 80), (256, 128), (32, 32), (16, 16), (48, 80)], ids=str)
@pytest.mark.parametrize("N", [64, 1000])
def test_tensor_core_pipeline_survives_delays_and_poisoned_slots(block, N, rng, monkeypatch) -> None:
    import cupy

    from bsrgemm._products import configs

    A = pattern(rng, 30, 20, *block, "float16")
    B = cupy.asarray(values(rng, (A[3][1], N), np.dtype("float16")))
    calm = device(A) @ B
    delay(configs.GemmSm90, monkeypatch)
    dA = device(A)
    assert differing(lambda: dA @ B, calm, 20) == 0


def test_operands_that_lie_badly_are_multiplied_all_the_same(rng) -> None:
    import cupy

    for block in [(64, 64), (16, 16)]:
        A = pattern(rng, 3, 3, *block, "float16")
        B = values(rng, (A[3][1], 45), np.dtype("float16"))  # rows of 90 bytes
        want, size = exact_product(A, B)
        room = cupy.zeros(B.size + 8, np.float16)
        data = cupy.zeros(A[0].size + 8, np.float16)
        for shift in (0, 1, 3):
            moved = room[shift : shift + B.size].reshape(B.shape)
            moved[...] = cupy.asarray(B)
            assert_close((device(A) @ moved).get(), want, size, 2 * A[3][1], np.float32)
            blocks = data[shift : shift + A[0].size].reshape(A[0].shape)
            blocks[...] = cupy.asarray(A[0])
            dA = bg.bsr_array((blocks, cupy.asarray(A[1]), cupy.asarray(A[2])), shape=A[3])
            assert dA.data.data.ptr == blocks.data.ptr
            assert_close((dA @ cupy.asarray(B)).get(), want, size, 2 * A[3][1], np.float32)
