"""Attention of fp8 on the card, against float64 on the numbers that its bytes and scales stand for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bsrgemm._attention.attention import attention
from bsrgemm.dtypes import BFLOAT16, FLOAT8

from .attention_cases import (  # noqa: F401  (fixtures)
    BAD_STRIDES,
    BANDS,
    CLIMBS,
    F16,
    F32,
    F64,
    SIMT,
    SM90,
    U8,
    Refusal,
    assert_refused,
    both_shapes,
    by_rule,
    check_nothing_beyond_out_is_written,
    each_refusal,
    plans,
    seen_keys,
    shape,
    spoiled_strides,
)
from .attention_fp8_cases import (
    SCALES,
    SOME_BANDS,
    by_columns,
    check,
    exact,
    fp8,
    fp8_bound,
    normal,
    operands,
    scale_array,
    served_by,
    widened,
)
from .marks import some_under_memcheck

pytestmark = pytest.mark.gpu


# ------------------------------------------------------------------------------------------------- lengths and bands
@both_shapes
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("S", some_under_memcheck([1, 15, 17, 127, 129, 300, 1000], [129]))
def test_fp8_bands_at_odd_lengths(S, D, rng) -> None:
    q, k, v = operands(rng, S, S, D)
    for band in BANDS:
        check(q, k, v, **band)


@both_shapes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(300, 777), (777, 300), (1, 1000), (515, 15), (129, 128), (17, 515)], ids=str)
def test_fp8_queries_and_keys_of_different_lengths(lengths, D, rng) -> None:
    q, k, v = operands(rng, *lengths, D)
    for band in BANDS:
        check(q, k, v, **band)


@pytest.mark.parametrize("heads", some_under_memcheck([(32, 8), (28, 4), (8, 1), (3, 3)], [(8, 1)]))
def test_fp8_heads_share_keys(heads, rng) -> None:
    for D, B in ((64, 1), (128, 3)):
        q, k, v = operands(rng, 200, 200, D, B=B, heads=heads)
        check(q, k, v, causal=True)
        check(q, k, v, window=(30, 40))


@by_rule
def test_fp8_more_tiles_than_multiprocessors_are_all_done(rng) -> None:
    q, k, v = operands(rng, 1000, 1000, 64, B=4, heads=(12, 4))
    check(q, k, v)
    check(q, k, v, causal=True)


def test_fp8_more_heads_than_a_grid_has_places_beside_each_other(rng) -> None:
    q, k, v = operands(rng, 1, 5, 64, heads=(70_000, 70_000))
    check(q, k, v)


# ------------------------------------------------------------------------------------------------- dims and dtypes
@both_shapes
@pytest.mark.parametrize("D", some_under_memcheck([16, 48, 64, 80, 96, 112, 128, 144, 192, 208, 256], [256]))
def test_fp8_head_dims(D, rng) -> None:
    q, k, v = operands(rng, 300, 300, D)
    check(q, k, v)
    check(q, k, v, causal=True, out_dtype=F16)


#: Head dims of queries and keys, and of values.
DIMS = [
    *((64, 80), (96, 80), (128, 80), (128, 64), (64, 128), (96, 128), (192, 128), (128, 192), (128, 256), (256, 64)),
    *((192, 256), (16, 208), (256, 16)),
]


@both_shapes
@pytest.mark.parametrize("dims", some_under_memcheck(DIMS, [(96, 80)]))
def test_fp8_values_of_another_dim(dims, rng) -> None:
    q, k, v = operands(rng, 260, 333, *dims)
    check(q, k, v)
    check(q, k, v, causal=True, out_dtype=BFLOAT16)


@both_shapes
@pytest.mark.parametrize("out_dtype", [F16, BFLOAT16, F32], ids=str)
def test_fp8_results_of_each_dtype(out_dtype, rng) -> None:
    q, k, v = operands(rng, 150, 210, 64)
    result = check(q, k, v, out_dtype=out_dtype, causal=True)
    asked = attention(q, k, v, out_dtype=out_dtype, causal=True, **SCALES)
    assert asked.dtype == out_dtype
    assert bool((asked.view(np.uint8) == result.view(np.uint8)).all())
    if out_dtype == F32:
        assert attention(q, k, v, v_scale=1).dtype == F32


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("D", some_under_memcheck([64, 80, 128, 256], [80]))
def test_fp8_nothing_beyond_out_is_written(D, layout, rng, plans) -> None:  # noqa: F811
    some = operands(rng, 190, 200, D, B=2)
    check_nothing_beyond_out_is_written(some, layout, check, plans, in_tiles=(F16, BFLOAT16))


# ------------------------------------------------------------------------------------------------- scales
@both_shapes
@pytest.mark.parametrize("D", some_under_memcheck([64, 128, 256], [128]))
def test_fp8_scales_of_heads(D, rng) -> None:
    B, H, H_kv = 3, 6, 2
    q, k, v = operands(rng, 140, 200, D, B=B, heads=(H, H_kv))
    for scales in (
        {"q_scale": 2.0, "k_scale": 0.25, "v_scale": 30.0},
        {"k_scale": np.float32(0.5)},
        {"v_scale": 1e-6},
        {"q_scale": scale_array(rng, (H,))},
        {"k_scale": scale_array(rng, (H_kv,))},
        {"v_scale": scale_array(rng, (H_kv,))},
        {"q_scale": scale_array(rng, (B, H)), "k_scale": 1.5, "v_scale": scale_array(rng, (H_kv,))},
        {"q_scale": scale_array(rng, (B, H)), "k_scale": scale_array(rng, (B, H_kv)), "v_scale": 0.7},
        {"v_scale": scale_array(rng, (B, H_kv), 1e-3, 1e3)},
        {"q_scale": scale_array(rng, (H, B)).T, "v_scale": scale_array(rng, (2 * H_kv,))[::2]},
    ):
        for options in ({}, {"causal": True}, {"softcap": 3.0}, {"scale": -0.1}):
            check(q, k, v, scales=scales, **options)


def test_fp8_tiny_and_huge_scales(rng) -> None:
    import cupy

    q, k, v = operands(rng, 200, 300, 64, heads=(4, 4))
    scales = {
        "q_scale": [1e-6, 1e4, 1.0, 1e4],
        "k_scale": [1e6, 1e-4, 1.0, 1e-4],
        "v_scale": [1e4, 1e-6, 1e4, 1e-30],
    }
    arrays = {name: cupy.asarray(x, np.float32) for name, x in scales.items()}
    check(q, k, v, scales=arrays)
    check(q, k, v, scales=arrays, causal=True, out_dtype=BFLOAT16)
    # Scores that differ by hardly anything: the mean of what is seen.
    tiny = {"q_scale": cupy.full(4, 1e-6, np.float32), "k_scale": 1e-6}
    check(q, k, v, scales=tiny)
    check(q, k, v, scales={"q_scale": 1e-30, "k_scale": 1e-30}, causal=True)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_fp8_huge_scores_choose_one_key(D, rng) -> None:
    import cupy

    q, k, v = (x.get() for x in operands(rng, 130, 260, D, heads=(2, 2)))
    k[...] = 0
    k[..., 0] = rng.permuted(np.broadcast_to(np.arange(260) % 120, (1, 2, 260)), axis=2)  # bytes in rising order
    q[...] = 0
    q[..., 0] = np.float32(1).astype(FLOAT8).view(np.uint8)
    highest = cupy.asarray(k[..., 0].astype(int) == 119)
    for arrays in (False, True):
        one = cupy.full(2, 1e4, np.float32) if arrays else 1e4
        out, lse = attention(*map(cupy.asarray, (q, k, v)), q_scale=one, k_scale=one, v_scale=3.0, return_lse=True)
        assert served_by(SM90)
        picked = (highest[..., None] * widened(cupy.asarray(v))).sum(axis=2) / highest.sum(axis=2)[..., None]
        np.testing.assert_allclose(out.get(), 3 * np.broadcast_to(picked[:, :, None].get(), out.shape), 1e-6, 1e-6)
        top = 1e8 / math.sqrt(D) * float(np.uint8(119).view(FLOAT8).astype(np.float64))
        np.testing.assert_allclose(lse.get(), np.full(lse.shape, top), 1e-5)


def test_fp8_scales_as_numbers_and_as_arrays_are_the_same(rng) -> None:
    import cupy

    q, k, v = operands(rng, 200, 300, heads=(4, 2))
    numbers = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 4.0}
    want = attention(q, k, v, **numbers)
    for heads in ((4, 2, 2), ((1, 4), (1, 2), (1, 2))):
        arrays = {name: cupy.full(n, x, np.float32) for (name, x), n in zip(numbers.items(), heads, strict=True)}
        assert float(cupy.abs(attention(q, k, v, **arrays) - want).max()) <= 1e-5


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, -np.inf])
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_fp8_scales_that_are_not_above_0_spoil_their_head_alone(name, bad, rng) -> None:
    import cupy

    B, H, H_kv, G = 2, 4, 2, 2
    q, k, v = operands(rng, 200, 150, 64, B=B, heads=(H, H_kv))
    scale = cupy.ones((B, H if name == "q_scale" else H_kv), np.float32)
    good = attention(q, k, v, causal=True, **{name: scale})
    scale[1, 1] = bad
    for out_dtype in (F32, F16):
        out = attention(q, k, v, causal=True, out_dtype=out_dtype, **{name: scale})
        spoiled = np.zeros((B, H), bool)
        spoiled[1, slice(1, 2) if name == "q_scale" else slice(G, 2 * G)] = True
        nan = cupy.isnan(out.astype(np.float32)).get()
        assert nan[spoiled][:, 50:].all()  # the queries before see no keys
        assert (out.astype(np.float32).get()[:, :, :50] == 0).all()
        assert not nan[~spoiled].any()
        if out_dtype == F32:
            np.testing.assert_array_equal(out.get()[~spoiled], good.get()[~spoiled])


# ------------------------------------------------------------------------------------------------- scores
@both_shapes
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    "how",
    [{"softcap": 20.0}, {"softcap": 0.5}, {"softcap": 5.0, "scale": -1.0}]
    + [{"scale": x} for x in (-0.2, 0.0, 0.7, 1.5, 1e-30)],
    ids=str,
)
def test_fp8_softcap_and_any_scale(how, D, rng) -> None:
    q, k, v = operands(rng, 300, 400, D)
    for band in ({}, {"causal": True}, {"window": (90, 5)}):
        check(q, k, v, **how, **band)


@both_shapes
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("climb", CLIMBS)
def test_fp8_maxima_that_climb(climb, D, rng) -> None:
    """One column of keys alone is not 0: scores are exact, and what is left is how weights follow the maximum."""
    q, _, v = operands(rng, 300, 1500, D, heads=(2, 2))
    climbs = CLIMBS[climb](rng)
    if abs(climbs).max() > 448:
        climbs = climbs * (448 / abs(climbs).max())
    keys = np.zeros((1, 2, 1500, D))
    keys[..., 0] = climbs
    k = fp8(keys)
    one = int(np.float32(1).astype(FLOAT8).view(np.uint8))
    q[..., 0] = one
    for rows in ("alike", "different"):
        if rows == "different":  # every third query goes down where the others go up, and some do nothing
            q[:, :, ::3, 0] = one | 0x80
            q[:, :, ::7, 0] = 0
        for band in ({}, {"causal": True}, {"window": (400, 0)}):
            for scale in (0.05, 0.5, 2.0):
                check(q, k, v, scale=scale, varied=False, **band)


@both_shapes
@pytest.mark.parametrize("climb", ["a rising ramp", "a slow ramp", "steps of 9 a tile"])
def test_fp8_maxima_that_climb_beside_others(climb, rng) -> None:
    import cupy

    q, k, v = (x.get() for x in operands(rng, 300, 1500, 64, heads=(2, 2)))
    k[..., 0] = (CLIMBS[climb](rng) / 30).astype(np.float32).astype(FLOAT8).view(np.uint8)
    q[..., 0] = np.float32(4).astype(FLOAT8).view(np.uint8)
    for band in SOME_BANDS:
        check(*map(cupy.asarray, (q, k, v)), scale=0.5, varied=False, **band)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_fp8_constant_rows_are_exact(D) -> None:
    """Weights that are all the same are powers of two, and so are the values: sums of up to 2**13 of them are exact."""
    q, k = (fp8(np.ones((1, 2, n, D))) for n in (130, 1000))
    for value in (1.0, -0.5, 256.0):
        out, lse = attention(q, k, fp8(np.full((1, 2, 1000, D), value)), v_scale=1.0, return_lse=True)
        np.testing.assert_allclose(out.get(), value, 1e-6)
        np.testing.assert_allclose(lse.get(), math.sqrt(D) + math.log(1000), 1e-5)
    assert served_by(SM90)


@pytest.mark.parametrize("S", [300, 1000, 4000, 16384])
def test_fp8_sums_of_many_values_of_one_sign_lose_little(S, rng) -> None:
    """The tensor cores keep 13 bits of sums: added up there to the end, a quarter of those of 16384 keys is lost."""
    import cupy

    q, k = (normal(rng, (1, 2, n, 64)) for n in (128, S))
    v = fp8(np.abs(rng.standard_normal((1, 2, S, 64), np.float32)) + 0.5)
    got = attention(q, k, v, v_scale=1.0).astype(np.float64)
    want = exact(*map(widened, (q, k, v)), seen_keys(128, S)).out
    lost = 1 - float((got * want).sum() / (want * want).sum())
    assert abs(lost) <= 0.025, lost
    assert float(cupy.abs(got / want - 1).max()) <= 0.06


# ------------------------------------------------------------------------------------------------- memory layouts
@pytest.mark.parametrize("D", [64, 128, pytest.param(80, marks=pytest.mark.sanitizer)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_fp8_layouts_and_views_that_the_copy_engine_can_read(layout, D, rng) -> None:
    import cupy

    fused = normal(rng, (2, 200, 3, 4, D))
    for q, k, v in (
        [cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in operands(rng, 200, 260, D, B=2)],
        [fused[:, :, i].swapaxes(1, 2) for i in range(3)],
        [x[1:, ::2, 3:203] for x in operands(rng, 220, 220, D, B=3, heads=(4, 4))],
        [x[..., 16 : 16 + D] for x in operands(rng, 129, 200, D + 32)],
        [x[..., 16 : 16 + D - 8] for x in operands(rng, 129, 200, D + 32)],  # columns that are not a multiple of 16
        [x[..., : D - 15] for x in operands(rng, 129, 200, D)],
    ):
        check(q, k, v, layout=layout, causal=True)
        check(q, k, v, layout=layout, out_dtype=F16)
    q, k, v = (x.swapaxes(0, 1) for x in operands(rng, 130, 140, D, B=3, heads=(2, 2)))
    check(q, k, v, layout=layout)


@pytest.mark.parametrize("how", BAD_STRIDES)
def test_fp8_strides_that_the_copy_engine_cannot_read_are_copied(how, rng) -> None:
    q, k, v = operands(rng, 70, 90, 48, 32)
    scales = {"q_scale": scale_array(rng, (2,)), "k_scale": 2.0, "v_scale": scale_array(rng, (1, 1))}
    for name in "qkv":
        given = [spoiled_strides(x, how) if name == n else x for n, x in zip("qkv", (q, k, v), strict=True)]
        check(*given, on=SM90, scales=scales, causal=True)
    for dtype in (F16, BFLOAT16, F32):
        check(*(spoiled_strides(x, how) for x in (q, k, v)), on=SM90, scales=scales, out_dtype=dtype)


@pytest.mark.parametrize("dims", some_under_memcheck([(300, 64), (64, 264)], [(64, 264)]))
def test_fp8_dims_that_the_tensor_cores_do_not_take(dims, rng) -> None:
    q, k, v = operands(rng, 130, 170, *dims, B=2, heads=(4, 2))
    for options in ({}, {"causal": True}, {"softcap": 5.0}, {"scale": -0.3}):
        check(q, k, v, on=SIMT, scales={"v_scale": scale_array(rng, (2, 2))}, **options)


@pytest.mark.parametrize("dims", some_under_memcheck([(20, 24), (1, 1), (33, 20), (67, 3)], [(33, 20)]))
def test_fp8_rows_that_do_not_begin_at_multiples_of_16_bytes_are_copied(dims, rng) -> None:
    q, k, v = operands(rng, 130, 170, *dims, B=2, heads=(4, 2))
    for options in ({}, {"causal": True}, {"softcap": 5.0}, {"scale": -0.3}):
        check(q, k, v, scales={"v_scale": scale_array(rng, (2, 2))}, **options)


def test_fp8_one_head_of_keys_spread_over_many(rng) -> None:
    import cupy

    q, k, v = operands(rng, 130, 150, 64, heads=(4, 1))
    spread = [cupy.broadcast_to(x, (1, 4, *x.shape[2:])) for x in (k, v)]  # a stride of 0
    got = attention(q, *spread, q_scale=1.0)
    want = exact(*map(widened, (q, k, v)), seen_keys(130, 150))
    assert bool((cupy.abs(got - want.out) <= fp8_bound(want, F32)).all())


def test_fp8_more_than_2_to_31_elements_between_heads(rng) -> None:
    import cupy

    room = cupy.empty((2, (1 << 24) + 8, 128), U8)
    k, v = room[None, :, -200:], room[None, :, :200]
    for x in (k, v):
        x[...] = normal(rng, x.shape)
    q = normal(rng, (1, 4, 130, 128))
    check(q, k, v, causal=True)


# ------------------------------------------------------------------------------------------------- values by columns
@pytest.mark.parametrize("D", some_under_memcheck([16, 64, 80, 120, 256], [80]))
@pytest.mark.parametrize("S", [1, 17, 128, 1000])
def test_fp8_values_lie_with_their_keys_side_by_side(S, D, rng) -> None:
    import cupy

    from bsrgemm._attention import launch as attention_launch

    wide = cupy.asarray(rng.integers(0, 256, (2, 6, S + 3, 272), dtype=np.uint8))
    whole, part = cupy.ascontiguousarray(wide[:, :, :S, :D]), wide[:, ::2, 1 : S + 1, 16 : 16 + D]
    for v in (whole, part) if D % 16 == 0 else (part,):  # rows begin at multiples of 16 bytes
        found = attention_launch._by_columns(v, None)
        np.testing.assert_array_equal(found.get(), by_columns(v.get()))


# ------------------------------------------------------------------------------------------------- bad input
def zeros(*sizes: int, dtype: Any = U8) -> Any:
    import cupy

    return cupy.zeros(sizes, dtype)


def attempt(**changes: Any) -> Any:
    """A good call with some of its arguments replaced."""
    arguments = {"q": zeros(2, 4, 5, 64), "k": zeros(2, 2, 7, 64), "v": zeros(2, 2, 7, 64), "q_scale": 1.0} | changes
    return attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


REFUSED: list[Refusal] = [
    (lambda: attempt(q_scale=None), TypeError, "q: does not support dtype uint8"),
    (lambda: attempt(q=zeros(2, 4, 5, 64, dtype=F16)), TypeError, "q: wanted fp8 numbers as uint8"),
    (lambda: attempt(k=zeros(2, 2, 7, 64, dtype=F16)), TypeError, "k: wanted fp8 numbers as uint8"),
    (lambda: attempt(v=zeros(2, 2, 7, 64, dtype=np.int8)), TypeError, "v: wanted fp8 numbers as uint8"),
    (lambda: attempt(q_scale=np.ones(4, np.float32)), TypeError, "q_scale: wanted a number or a dense array on 'cuda'"),
    (lambda: attempt(k_scale=np.ones((2, 2), np.float32)), TypeError, "k_scale: wanted a number or a dense array"),
    (lambda: attempt(q_scale=zeros(2, dtype=F32)), ValueError, "q_scale: wanted a number or float32 of shape (4,)"),
    (lambda: attempt(v_scale=zeros(4, dtype=F32)), ValueError, "v_scale: wanted a number or float32 of shape (2,)"),
    (lambda: attempt(k_scale=zeros(1, 2, dtype=F32)), ValueError, "or (2, 2), got float32 of shape (1, 2)"),
    (lambda: attempt(q_scale=zeros(4, dtype=F64)), ValueError, "got float64 of shape (4,)"),
    (lambda: attempt(q_scale=0.0), ValueError, "q_scale: wanted a finite number above 0"),
    (lambda: attempt(k_scale=math.nan), ValueError, "k_scale: wanted a finite number above 0"),
    (lambda: attempt(v_scale="1"), TypeError, "v_scale: wanted a finite number above 0"),
    (lambda: attempt(out_dtype=F64), TypeError, "out_dtype: does not support dtype float64"),
    (lambda: attempt(out=zeros(2, 4, 5, 64, dtype=F64)), TypeError, "out: does not support dtype float64"),
    (lambda: attempt(out=zeros(2, 4, 5, 64)), TypeError, "out: does not support dtype uint8"),
]


@each_refusal(REFUSED)
def test_fp8_bad_input_is_refused_before_anything_is_launched(call, error, text, monkeypatch) -> None:
    assert_refused(call, error, text, monkeypatch)


def test_fp8_the_good_call_that_bad_ones_are_made_from_is_good() -> None:
    assert attempt().shape == (2, 4, 5, 64)
    assert served_by(SM90)
