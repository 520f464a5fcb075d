"""Attention of fp8 on the card: masks, rows without keys, NaN, sequences of different lengths."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bsrgemm import BlockMask
from bsrgemm._attention.attention import attention

from .attention_cases import (  # noqa: F401  (fixtures)
    F16,
    F32,
    MASKS,
    NAN,
    SEQUENCES,
    SM90,
    U8,
    attend_between_guards,
    both_shapes,
    bounds_of,
    by_rule,
    check_rows_that_see_nothing,
    plans,
    poisoned,
    random_mask,
    seen_keys,
    sequences_seen,
    shape,
    some_keys,
)
from .attention_fp8_cases import (
    assert_close,
    check,
    exact,
    fp8,
    fp8_bound,
    normal,
    operands,
    scale_array,
    score_bound,
    served_by,
    widened,
)
from .marks import some_under_memcheck

pytestmark = pytest.mark.gpu


# ------------------------------------------------------------------------------------------------- masks
@both_shapes
@pytest.mark.parametrize("block", [16, (48, 80), 128], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_fp8_constructors_of_masks(name, block, rng) -> None:
    for S_q, S_k, D in ((333, 401, 128), (260, 130, 256)):
        q, k, v = operands(rng, S_q, S_k, D, B=2, heads=(4, 2))
        mask = MASKS[name](S_q, S_k, block)
        check(q, k, v, mask=mask)
        check(q, k, v, mask=mask, window=(100, 30), align="top-left", out_dtype=F16)


@by_rule
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("block", some_under_memcheck([32, 64, 128], [64]))
def test_fp8_sparse_masks_by_rule(block, D, rng) -> None:
    """Few small blocks have tiles of 64 keys."""
    q, k, v = operands(rng, 700, 900, D, heads=(4, 2))
    mask = BlockMask.random(700, 900, per_row=3, heads=(1, 4), block=block, device="cuda")
    for options in ({}, {"causal": True}, {"softcap": 10.0}, {"scale": -0.1}):
        check(q, k, v, mask=mask, **options)


@both_shapes
@pytest.mark.parametrize("heads", some_under_memcheck([(1, 1), (2, 1), (1, 2), (1, 4), (2, 2), (2, 4)], [(2, 4)]))
def test_fp8_patterns_per_batch_and_head(heads, rng) -> None:
    q, k, v = operands(rng, 200, 270, 64, B=2, heads=(4, 2))
    scales = {"q_scale": scale_array(rng, (2, 4)), "v_scale": scale_array(rng, (2, 2))}
    for block in ((16, 16), (128, 128), (64, 96), (32, 32)):
        mask = random_mask(rng, heads, (200, 270), block)
        check(q, k, v, scales=scales, mask=mask)
        check(q, k, v, scales=scales, mask=mask, window=(60, 60))


@both_shapes
@pytest.mark.parametrize("density", [0.5, 0.01, 0.0005])
def test_fp8_masks_by_elements_with_rows_that_see_nothing(density, rng) -> None:
    import cupy

    q, k, v = operands(rng, 515, 700)
    for block in (32, 64, 128):
        mask = BlockMask.from_dense(cupy.asarray(rng.random((515, 700)) < density), block=block)
        for options in ({}, {"causal": True}, {"scale": -0.1}, {"softcap": 5.0}):
            check(q, k, v, mask=mask, **options)


@pytest.mark.sanitizer
def test_fp8_masks_spoiled_after_construction_touch_no_foreign_memory(rng) -> None:
    import cupy

    q, k, v = operands(rng, 200, 333, heads=(2, 2))
    good = random_mask(rng, (1, 2), (200, 333), (64, 64))
    arrays = [x.get() for x in (good.indptr, good.indices, good.kinds, good.bits)]
    for name, damage in itertools.product(("indptr", "indices", "kinds"), (-1, 2**31 - 1)):
        mask = BlockMask(good._backend, good.shape, good.block, good.heads, *map(cupy.asarray, arrays))
        attention(q, k, v, mask=mask, q_scale=1.0)
        getattr(mask, name)[1:4] = damage
        assert bool(cupy.isfinite(attention(q, k, v, mask=mask, q_scale=1.0)).all())
    check(q, k, v, mask=good)


# ------------------------------------------------------------------------------------------------- rows without keys
@both_shapes
@pytest.mark.sanitizer
@pytest.mark.parametrize("D", [64, 256, 33])
def test_fp8_rows_that_see_nothing_are_zero_whatever_the_operands_hold(D) -> None:
    q, k, v = (poisoned((1, 2, n, D), U8) for n in (300, 100, 100))
    for options in ({}, {"scale": -1.0}, {"softcap": 2.0}):
        check_rows_that_see_nothing(q, k, v, q_scale=1.0, **options)


@pytest.mark.parametrize("zero", ["B", "H", "S_q", "S_k", "D", "D_v"])
def test_fp8_sizes_of_zero(zero) -> None:
    n = {"B": 2, "H": 2, "S_q": 5, "S_k": 7, "D": 16, "D_v": 16} | {zero: 0}
    q, k, v = (
        fp8(np.ones(sizes))
        for sizes in (
            (n["B"], 2 * n["H"], n["S_q"], n["D"]),
            (n["B"], n["H"], n["S_k"], n["D"]),
            (n["B"], n["H"], n["S_k"], n["D_v"]),
        )
    )
    out, lse = attention(q, k, v, return_lse=True, v_scale=2.0)
    assert out.shape == (*q.shape[:3], n["D_v"]) and out.dtype == F32
    np.testing.assert_allclose(out.get(), 0.0 if zero == "S_k" else 2.0, rtol=1e-6)
    want = -np.inf if zero == "S_k" else math.log(7) + math.sqrt(n["D"])
    np.testing.assert_allclose(lse.get(), np.full(q.shape[:3], want), rtol=1e-5)


# ------------------------------------------------------------------------------------------------- NaN
@both_shapes
@pytest.mark.parametrize("D", [80, 128, 33])
@pytest.mark.parametrize("how", ["full", "causal", "window", "mask", "blocks"])
def test_fp8_nan_reaches_the_queries_that_see_it_and_no_others(how, D, rng) -> None:
    import cupy

    S_q, S_k = 200, 260
    options, seen = some_keys(how, rng, S_q, S_k)
    q, k, v = operands(rng, S_q, S_k, D)
    want = exact(*map(widened, (q, k, v)), seen)
    places = [int(x) for x in rng.integers(0, S_q, 3)]
    for which, byte in itertools.product(("q", "k", "v", "all of k", "all of v"), (NAN, NAN | 0x80)):
        x, y, z = q.copy(), k.copy(), v.copy()
        spoiled = cupy.zeros((1, 2, S_q, D), bool)
        columns = [int(c) for c in rng.integers(0, D, 3)]
        if which == "q":
            x[:, :, places, columns] = byte
            spoiled[:, :, places] = seen[places].any(axis=1)[:, None]
        elif which == "k":
            y[:, :, places, columns] = byte
            spoiled[:, :, seen[:, places].any(axis=1)] = True
        elif which == "v":
            for place, column in zip(places, columns, strict=True):
                z[:, :, place, column] = byte
                spoiled[:, :, seen[:, place], column] = True
        else:
            (y if which == "all of k" else z)[:, :, 150:] = byte
            spoiled[:, :, seen[:, 150:].any(axis=1)] = True
        out, lse = attention(x, y, z, return_lse=True, k_scale=1.0, **options)
        assert bool((cupy.isnan(out) == spoiled).all()), (which, byte)
        lse_spoiled = spoiled.any(axis=3) & (which not in ("v", "all of v"))
        assert bool((cupy.isnan(lse) == lse_spoiled).all()), (which, byte)
        # What does not see it is as exact as ever.
        error = cupy.where(spoiled, 0, cupy.abs(cupy.where(spoiled, 0, out) - want.out))
        assert bool((error <= fp8_bound(want, F32)).all()), (which, byte)
        fine = ~lse_spoiled & (want.lse > -np.inf)
        assert bool((cupy.abs(lse - want.lse)[fine] <= (score_bound(want) + 1e-4)[fine]).all()), (which, byte)
        assert bool((lse[want.lse == -np.inf] == -np.inf).all())
    assert served_by(SM90)


@pytest.mark.sanitizer
def test_fp8_garbage_behind_the_diagonal_changes_nothing_before_it(rng) -> None:
    import cupy

    q, k, v = operands(rng, 300, 300, 64)
    clean, clean_lse = attention(q, k, v, causal=True, return_lse=True, q_scale=1.0)
    want = exact(*map(widened, (q, k, v)), seen_keys(300, 300, causal=True))
    k[:, :, 257:] = v[:, :, 257:] = NAN
    out, lse = attention(q, k, v, causal=True, return_lse=True, q_scale=1.0)
    assert bool((cupy.abs(out - want.out) <= fp8_bound(want, F32))[:, :, :257].all())
    assert bool((out[:, :, :64] == clean[:, :, :64]).all())  # tiles of keys that have none of it
    assert float(cupy.abs(lse - clean_lse)[:, :, :257].max()) < 1e-2
    assert bool(cupy.isnan(out[:, :, 257:]).all())


# ------------------------------------------------------------------------------------------------- sequences
@both_shapes
@pytest.mark.parametrize("name", some_under_memcheck(SEQUENCES, ["more keys"]))
def test_fp8_each_sequence_sees_its_own_keys(name, rng) -> None:
    import cupy

    q_bounds, k_bounds = bounds_of(name)
    scales = {"q_scale": scale_array(rng, (4,)), "k_scale": 0.5, "v_scale": scale_array(rng, (1, 2))}
    for D, D_v in ((64, 64), (192, 128)):
        q = normal(rng, (q_bounds[-1], 4, D))
        k, v = (normal(rng, (k_bounds[-1], 2, d)) for d in (D, D_v))
        turned_ = [x[None].swapaxes(1, 2) for x in (q, k, v)]
        wide = [widened(x, scales[f"{n}_scale"]) for n, x in zip("qkv", turned_, strict=True)]
        for band in ({}, {"causal": True}, {"window": (30, 9)}):
            want = exact(*wide, sequences_seen(q_bounds, k_bounds, **band))
            for where in (list, lambda x: cupy.asarray(x, dtype=np.int32)):
                bounds = {"cu_seqlens_q": where(q_bounds), "cu_seqlens_k": where(k_bounds)}
                out, lse = attend_between_guards(q, k, v, F32, **bounds, **scales, **band)
                assert served_by(SM90)
                assert_close(out[None].swapaxes(1, 2), lse[None], want, varied=False)
