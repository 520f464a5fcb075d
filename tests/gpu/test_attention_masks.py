"""The attention kernels on the card: masks, rows without keys, NaN and infinity, sequences of different lengths."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm._attention.attention import attention
from bsrgemm.dtypes import BFLOAT16

from .attention_cases import (  # noqa: F401  (fixtures)
    F16,
    F32,
    GUARD,
    MASKS,
    SEQUENCES,
    SIMT,
    SM90,
    assert_near,
    attend_between_guards,
    both_shapes,
    bounds_of,
    check,
    check_garbage_behind_the_diagonal,
    check_rows_that_see_nothing,
    eps,
    normal,
    operands,
    plans,
    poisoned,
    random_mask,
    reference,
    sequences_seen,
    served_by,
    shape,
    some_keys,
    untouched,
)
from .marks import some_under_memcheck

pytestmark = pytest.mark.gpu


# ------------------------------------------------------------------------------------------------- masks
@both_shapes
@pytest.mark.parametrize("block", [16, 32, (48, 80), 64, 128, (256, 64), 256], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_constructors_of_masks(name, block, rng) -> None:
    for S_q, S_k, D in ((333, 401, 128), (260, 130, 256)):
        q, k, v = operands(rng, S_q, S_k, D, B=2, heads=(4, 2))
        mask = MASKS[name](S_q, S_k, block)
        check(q, k, v, mask=mask)
        check(q, k, v, mask=mask, causal=True)
        check(q, k, v, mask=mask, window=(100, 30), align="top-left")


@both_shapes
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("heads", some_under_memcheck([(1, 1), (2, 1), (1, 2), (1, 4), (2, 2), (2, 4)], [(2, 4)]))
def test_patterns_per_batch_and_head(heads, dtype, rng) -> None:
    on = SM90 if dtype == F16 else SIMT
    q, k, v = operands(rng, 200, 270, 64, B=2, heads=(4, 2), dtype=dtype)
    for block in ((16, 16), (128, 128), (64, 96), (240, 160)):
        mask = random_mask(rng, heads, (200, 270), block)
        check(q, k, v, on=on, mask=mask)
        check(q, k, v, on=on, mask=mask, window=(60, 60))


@both_shapes
@pytest.mark.parametrize("density", [0.5, 0.01, 0.0005])
def test_masks_by_elements_with_rows_that_see_nothing(density, rng) -> None:
    import cupy

    q, k, v = operands(rng, 515, 700)
    for block in (16, 64, 128, 256):
        mask = BlockMask.from_dense(cupy.asarray(rng.random((515, 700)) < density), block=block)
        for options in ({}, {"causal": True}, {"scale": -0.1}, {"softcap": 5.0}):
            check(q, k, v, mask=mask, **options)


def test_masks_from_bsr_from_indices_stacked_and_combined(rng) -> None:
    import cupy

    S, block = 512, (64, 32)
    q, k, v = operands(rng, S, S, heads=(2, 2))
    i, j = np.nonzero(rng.random((S // 64, S // 32)) < 0.4)
    indptr, indices = np.searchsorted(i, np.arange(S // 64 + 1)).astype(np.int32), j.astype(np.int32)
    elements = cupy.asarray(rng.random((len(i), *block)) < 0.7)
    A = bg.bsr_array((elements, cupy.asarray(indices), cupy.asarray(indptr)), shape=(S, S))
    by_elements = BlockMask.from_bsr(A)
    whole = BlockMask.from_block_indices(cupy.asarray(indptr), cupy.asarray(indices), shape=(S, S), block=block)
    documents = BlockMask.documents([0, 100, 101, 300, S], block=block, device="cuda")
    for mask in (
        by_elements,
        whole,
        documents,
        documents & whole,
        documents | by_elements,
        BlockMask.stack([whole, documents]),
    ):
        check(q, k, v, mask=mask)
        check(q, k, v, mask=mask, causal=True)


def test_one_mask_serves_several_head_dims_and_is_taken_apart_once(rng, plans) -> None:  # noqa: F811
    mask = BlockMask.window(300, left=99, right=0, block=64, device="cuda")
    for D in (64, 256, 128, 256):
        check(*operands(rng, 300, 300, D), mask=mask)
    assert set(mask.__dict__["_tiles"]) == {(plan.config.tile_q, plan.config.tile_k) for plan in plans.values()}


@pytest.mark.parametrize("block", some_under_memcheck([(128, 128), (64, 64), (48, 80)], [(128, 128), (48, 80)]))
@pytest.mark.parametrize(("dtype", "D"), [(F16, 128), (F16, 256), (F32, 16)], ids=str)
def test_masks_spoiled_after_construction_touch_no_foreign_memory(dtype, D, block, rng) -> None:
    import cupy

    q, k, v = operands(rng, 200, 333, D, heads=(2, 2), dtype=dtype)
    good = random_mask(rng, (1, 2), (200, 333), block)
    arrays = [x.get() for x in (good.indptr, good.indices, good.kinds, good.bits)]
    for name, damage in itertools.product(("indptr", "indices", "kinds"), (-1, 7, 2**31 - 1, -(2**31))):
        for warm in (False, True):
            mask = BlockMask(good._backend, good.shape, good.block, good.heads, *map(cupy.asarray, arrays))
            if warm:
                attention(q, k, v, mask=mask)
            getattr(mask, name)[1:4] = damage
            for band in ({}, {"causal": True}):
                assert bool(cupy.isfinite(attention(q, k, v, mask=mask, **band)).all())
    check(q, k, v, on=SM90 if dtype == F16 else SIMT, mask=good)


# ------------------------------------------------------------------------------------------------- rows without keys
@both_shapes
@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_rows_that_see_nothing_are_zero_whatever_the_operands_hold(dtype) -> None:
    check_rows_that_see_nothing(*(poisoned((1, 2, n, 64), dtype) for n in (300, 100, 100)))


@pytest.mark.parametrize("zero", ["B", "H", "S_q", "S_k", "D", "D_v"])
def test_sizes_of_zero(zero) -> None:
    import cupy

    n = {"B": 2, "H": 2, "S_q": 5, "S_k": 7, "D": 8, "D_v": 8} | {zero: 0}
    for dtype in (F16, F32):
        q = cupy.ones((n["B"], 2 * n["H"], n["S_q"], n["D"]), dtype)
        k = cupy.ones((n["B"], n["H"], n["S_k"], n["D"]), dtype)
        v = cupy.ones((n["B"], n["H"], n["S_k"], n["D_v"]), dtype)
        out, lse = attention(q, k, v, return_lse=True)
        assert out.shape == (*q.shape[:3], n["D_v"])
        assert bool((out == (zero != "S_k")).all())
        want = -np.inf if zero == "S_k" else math.log(7) + (0 if zero == "D" else math.sqrt(8))
        np.testing.assert_allclose(lse.get(), np.full(q.shape[:3], want), rtol=1e-5)


# ------------------------------------------------------------------------------------------------- NaN and infinity
def with_garbage(q: Any, k: Any, v: Any, seen: Any) -> tuple[Any, Any]:
    """(out, lse) in float64, where what is not seen is not multiplied by zero either."""
    import cupy

    G = q.shape[1] // k.shape[1]
    q, k, v = q.astype(np.float64), *(cupy.repeat(x.astype(np.float64), G, axis=1) for x in (k, v))
    seen = cupy.broadcast_to(seen, (*q.shape[:3], k.shape[2]))
    scores = cupy.where(seen, q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3]), -np.inf)
    some = seen.any(axis=3, keepdims=True)
    top = cupy.where(cupy.isnan(scores).any(axis=3, keepdims=True), np.nan, scores.max(axis=3, keepdims=True))
    weights = cupy.where(seen, cupy.exp(scores - top), 0)
    total = weights.sum(axis=3, keepdims=True)
    products = cupy.where(seen[..., None], (weights / total)[..., None] * v[:, :, None], 0).sum(axis=3)
    return cupy.where(some, products, 0), cupy.where(some, cupy.log(total) + top, -np.inf)[..., 0]


@pytest.mark.parametrize("D", [64, 80])
@pytest.mark.parametrize("dtype", [F16, BFLOAT16, F32], ids=str)
@pytest.mark.parametrize("how", ["full", "causal", "window", "mask", "blocks"])
def test_nan_and_infinity_reach_the_queries_that_see_them_and_no_others(how, dtype, D, rng) -> None:
    import cupy

    S_q, S_k = 200, 260
    options, seen = some_keys(how, rng, S_q, S_k)
    for values, bad in itertools.product(("k", "v", "q", "all of k", "all of v"), (np.nan, np.inf, -np.inf)):
        q, k, v = operands(rng, S_q, S_k, D, dtype=dtype)
        if values == "all of k":
            k[:, :, 150:] = bad
        elif values == "all of v":
            v[:, :, 150:] = bad
        else:
            x = {"k": k, "v": v, "q": q}[values]
            for place in rng.integers(0, x.shape[2], 3):
                x[:, :, int(place), int(rng.integers(D))] = bad
        out, lse = attention(q, k, v, return_lse=True, **options)
        with np.errstate(all="ignore"):
            want, want_lse = with_garbage(q, k, v, seen)
        for got, expected in ((out.astype(np.float64), want), (lse.astype(np.float64), want_lse)):
            finite = cupy.isfinite(expected)
            assert bool((cupy.isfinite(got) == finite).all()), (values, bad)
            infinite = cupy.isinf(expected)
            assert bool((cupy.where(infinite, got, 0) == cupy.where(infinite, expected, 0)).all()), (values, bad)
            error = cupy.abs(cupy.where(finite, got, 0) - cupy.where(finite, expected, 0))
            assert float(error.max()) <= 4 * eps(BFLOAT16 if dtype == BFLOAT16 else F16), (values, bad)


@pytest.mark.sanitizer
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_garbage_behind_the_diagonal_changes_nothing_before_it(bad, rng) -> None:
    check_garbage_behind_the_diagonal(rng, bad, SM90)


@both_shapes
def test_keys_that_score_minus_infinity_weigh_nothing(rng) -> None:
    import cupy

    q, k, v = (cupy.abs(x) + F16.type(0.1) for x in operands(rng, 140, 300, 64, heads=(2, 2)))
    k[:, :, :290] = -np.inf
    out, lse = attention(q, k, v, return_lse=True)
    want = reference(q, k[:, :, 290:], v[:, :, 290:], cupy.ones((140, 10), bool))
    assert float(cupy.abs(out.astype(np.float64) - want.out).max()) < 4e-3
    assert float(cupy.abs(lse - want.lse).max()) < 1e-3
    k[...] = -np.inf
    out, lse = attention(q, k, v, return_lse=True)
    assert bool(cupy.isnan(out).all()) and bool(cupy.isnan(lse).all())  # -inf would say that there are no keys


# ------------------------------------------------------------------------------------------------- sequences
@pytest.mark.parametrize("dtype", [F16, BFLOAT16, F32], ids=str)
@pytest.mark.parametrize("name", some_under_memcheck(SEQUENCES, ["more keys"]))
def test_each_sequence_sees_its_own_keys(name, dtype, rng) -> None:
    import cupy

    on = SIMT if dtype == F32 else SM90
    q_bounds, k_bounds = bounds_of(name)
    for D, D_v in ((64, 64), (128, 128), (192, 128)) if dtype == F16 else ((64, 64),):
        q = normal(rng, (q_bounds[-1], 4, D), dtype)
        k, v = (normal(rng, (k_bounds[-1], 2, d), dtype) for d in (D, D_v))
        for band in ({}, {"causal": True}, {"window": (30, 9)}, {"causal": True, "align": "top-left"}):
            want = reference(*(x[None].swapaxes(1, 2) for x in (q, k, v)), sequences_seen(q_bounds, k_bounds, **band))
            for where in (list, np.array, cupy.asarray, lambda x: cupy.asarray(x, dtype=np.int32)):
                bounds = {"cu_seqlens_q": where(q_bounds), "cu_seqlens_k": where(k_bounds)}
                out, lse = attend_between_guards(q, k, v, dtype, **bounds, **band)
                assert served_by(on)
                turned_v = v[None].swapaxes(1, 2)
                assert_near(out[None].swapaxes(1, 2), lse[None], want, turned_v, D, dtype, on)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_bounds_that_are_garbage_touch_no_foreign_memory(dtype, rng) -> None:
    import cupy

    q, k, v = (normal(rng, (300, h, 64), dtype) for h in (2, 1, 1))
    room = cupy.full((500, 2, 64), GUARD, dtype)
    top = 2**31 - 1
    garbage = [
        [0, 100, 300],
        [5, 3, 900],
        [0, top, -top - 1],
        [-7, -7, -7],
        [top, 0, top],
        [300, 0, 300],
        [0, 301, 302],
    ]
    for a, b in itertools.product(garbage, repeat=2):
        bounds = {"cu_seqlens_q": cupy.asarray(a, dtype=np.int32), "cu_seqlens_k": cupy.asarray(b, dtype=np.int32)}
        _, lse = attention(q, k, v, causal=True, out=room[100:400], return_lse=True, **bounds)
        assert lse.shape == (2, 300)
        assert untouched(room[:100]) and untouched(room[400:])
        assert bool(cupy.isfinite(room).all())
    check(*(x[None].swapaxes(1, 2) for x in (q, k, v)), on=SM90 if dtype == F16 else SIMT)
