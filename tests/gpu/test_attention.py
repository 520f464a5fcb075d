"""The attention kernels against float64 on the card: odd lengths, every head dim, poisoned outputs, bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bsrgemm import BlockMask
from bsrgemm._attention.attention import attention
from bsrgemm.dtypes import BFLOAT16

from .attention_cases import (  # noqa: F401  (fixtures)
    BAD_STRIDES,
    BANDS,
    CLIMBS,
    F16,
    F32,
    F64,
    LENGTHS,
    MASKS,
    SIMT,
    SM90,
    Refusal,
    assert_refused,
    both_shapes,
    by_rule,
    check,
    check_nothing_beyond_out_is_written,
    each_refusal,
    eps,
    normal,
    operands,
    plans,
    poisoned,
    reference,
    seen_keys,
    served_by,
    shape,
    spoiled_strides,
)
from .marks import some_under_memcheck

pytestmark = pytest.mark.gpu


# ------------------------------------------------------------------------------------------------- lengths and bands
@both_shapes
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("S", some_under_memcheck(LENGTHS, [129]))
def test_bands_are_right_at_odd_lengths(S, D, rng) -> None:
    q, k, v = operands(rng, S, S, D)
    for band in BANDS:
        check(q, k, v, **band)


@both_shapes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(300, 777), (777, 300), (1, 1000), (515, 64), (129, 128), (64, 515)], ids=str)
def test_queries_and_keys_of_different_lengths(lengths, D, rng) -> None:
    q, k, v = operands(rng, *lengths, D)
    for band in BANDS:
        check(q, k, v, **band)


@pytest.mark.parametrize("heads", some_under_memcheck([(32, 8), (28, 4), (96, 96), (8, 1), (3, 3)], [(8, 1)]))
def test_heads_share_keys(heads, rng) -> None:
    for D, B in ((64, 1), (128, 3)):
        q, k, v = operands(rng, 200, 200, D, B=B, heads=heads)
        check(q, k, v, causal=True)
        check(q, k, v, window=(30, 40))


@by_rule
def test_more_tiles_than_multiprocessors_are_all_done(rng) -> None:
    q, k, v = operands(rng, 1000, 1000, 64, B=4, heads=(12, 4))  # 8 tiles of 48 heads
    check(q, k, v)
    check(q, k, v, causal=True)


# ------------------------------------------------------------------------------------------------- dims and dtypes
@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
@pytest.mark.parametrize("D", some_under_memcheck([64, 80, 96, 128, 192, 256, 72, 40, 8, 136, 248], [256]))
def test_head_dims(D, dtype, rng) -> None:
    q, k, v = operands(rng, 300, 300, D, dtype=dtype)
    check(q, k, v)
    check(q, k, v, causal=True)


@pytest.mark.parametrize(
    "dims",
    some_under_memcheck([(192, 128), (64, 128), (128, 64), (72, 56), (128, 256), (256, 64), (8, 200)], [(72, 56)]),
)
def test_values_of_another_dim(dims, rng) -> None:
    q, k, v = operands(rng, 260, 333, *dims)
    check(q, k, v)
    check(q, k, v, causal=True)


@pytest.mark.parametrize("out_dtype", [F16, BFLOAT16, F32, F64], ids=str)
@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
def test_results_of_another_dtype(dtype, out_dtype, rng) -> None:
    on = SIMT if out_dtype == F64 else SM90
    q, k, v = operands(rng, 150, 210, 64, dtype=dtype)
    check(q, k, v, on=on, out_dtype=out_dtype, causal=True)
    asked = attention(q, k, v, out_dtype=out_dtype, causal=True)
    assert asked.dtype == out_dtype
    assert bool((asked.view(np.uint8) == check(q, k, v, on=on, out_dtype=out_dtype, causal=True).view(np.uint8)).all())


def test_the_result_is_the_same_with_and_without_lse(rng) -> None:
    q, k, v = operands(rng, 300, 400)
    out, _ = attention(q, k, v, causal=True, return_lse=True)
    assert bool((out == attention(q, k, v, causal=True)).all())


# ------------------------------------------------------------------------------------------------- memory layouts
def fused(rng: np.random.Generator, S: int, D: int) -> list[Any]:
    """q, k and v as they come out of one projection, (batch, length, 3, heads, head dim), as "bhsd" views."""
    x = normal(rng, (2, S, 3, 4, D))
    return [x[:, :, i].swapaxes(1, 2) for i in range(3)]


@pytest.mark.parametrize("D", [64, 128, pytest.param(80, marks=pytest.mark.sanitizer)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_and_views_that_the_copy_engine_can_read(layout, D, rng) -> None:
    import cupy

    for q, k, v in (
        [cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in operands(rng, 200, 260, D, B=2)],
        fused(rng, 200, D),
        [x[1:, ::2, 3:203] for x in operands(rng, 220, 220, D, B=3, heads=(4, 4))],
        [x[..., 8 : 8 + D] for x in operands(rng, 129, 200, D + 16)],
    ):
        check(q, k, v, layout=layout, causal=True)
    q, k, v = (x.swapaxes(0, 1) for x in operands(rng, 130, 140, D, B=3, heads=(2, 2)))
    check(q, k, v, layout=layout)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16, F32, F64], ids=str)
@pytest.mark.parametrize("how", BAD_STRIDES)
def test_strides_that_nothing_but_the_plain_kernel_can_read(how, dtype, rng) -> None:
    q, k, v = operands(rng, 70, 90, 40, 24, dtype=dtype)
    for name in "qkv":
        given = [spoiled_strides(x, how) if name == n else x for n, x in zip("qkv", (q, k, v), strict=True)]
        check(*given, on=SIMT, causal=True)
    out = spoiled_strides(poisoned((1, 2, 70, 24), dtype), how)
    check(*(spoiled_strides(x, how) for x in (q, k, v)), on=SIMT, out=out)


def test_one_head_of_keys_spread_over_many_without_a_copy(rng) -> None:
    import cupy

    q, k, v = operands(rng, 130, 150, 64, heads=(4, 1))
    want = attention(q, k, v)
    spread = [cupy.broadcast_to(x, (1, 4, *x.shape[2:])) for x in (k, v)]  # a stride of 0
    got = attention(q, *spread)
    assert float(cupy.abs(got.astype(np.float32) - want.astype(np.float32)).max()) < 4e-3


def test_more_than_2_to_31_elements_between_heads(rng) -> None:
    import cupy

    room = cupy.empty((2, (1 << 24) + 8, 128), F16)
    for dims, on in ((slice(None), SM90), (slice(1, 65), SIMT)):
        k, v = room[None, :, -200:, dims], room[None, :, :200, dims]
        for x in (k, v):
            x[...] = normal(rng, x.shape)
        q = normal(rng, (1, 4, 130, k.shape[3]))
        out = attention(q, k, v, causal=True)
        want = reference(q, k, v, seen_keys(130, 200, causal=True))
        assert float(cupy.abs(out.astype(np.float64) - want.out).max()) < 4e-3, on


# ------------------------------------------------------------------------------------------------- out
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("D", some_under_memcheck([64, 72, 128, 256], [72]))
def test_nothing_beyond_out_is_written(D, layout, rng, plans) -> None:  # noqa: F811
    check_nothing_beyond_out_is_written(operands(rng, 190, 200, D, B=2), layout, check, plans, in_tiles=(F16,))


# ------------------------------------------------------------------------------------------------- scores
@both_shapes
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "how",
    [{"softcap": 20.0}, {"softcap": 0.5}, {"softcap": 5.0, "scale": -1.0}]
    + [{"scale": x} for x in (-0.2, 0.0, 0.69, 0.7, 1.5, 1e-30, 2e-38)],
    ids=str,
)
def test_softcap_and_any_scale(how, D, rng) -> None:
    q, k, v = operands(rng, 300, 400, D)
    for band in ({}, {"causal": True}, {"window": (90, 5)}):
        check(q, k, v, **how, **band)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_softcap_and_any_scale_on_the_plain_cores(dtype, rng) -> None:
    q, k, v = operands(rng, 60, 80, 24, dtype=dtype)
    for how in ({"softcap": 20.0}, {"softcap": 0.5, "scale": 3.0}, {"scale": -0.7}, {"scale": 0.0}, {"scale": 5.0}):
        check(q, k, v, on=SIMT, causal=True, **how)


def rounded_weights_error(q: Any, k: Any, v: Any, seen: Any, scale: float, want: Any) -> float:
    """The largest error of a softmax in float32 whose weights are rounded to the dtype before they meet the values."""
    import cupy

    G = q.shape[1] // k.shape[1]
    wide = [x.astype(np.float32) for x in (q, *(cupy.repeat(x.astype(np.float32), G, axis=1) for x in (k, v)))]
    scores = cupy.where(seen, (wide[0] @ wide[1].swapaxes(2, 3)) * np.float32(scale), -np.inf)
    weights = cupy.where(seen, cupy.exp(scores - scores.max(axis=3, keepdims=True)), np.float32(0))
    out = weights.astype(q.dtype).astype(np.float32) @ wide[2] / weights.sum(axis=3, keepdims=True)
    return float(cupy.abs(out.astype(q.dtype).astype(np.float64) - want).max())


@both_shapes
@pytest.mark.parametrize(("dtype", "D"), [(F16, 64), (F16, 128), (F16, 256), (BFLOAT16, 128)], ids=str)
@pytest.mark.parametrize("climb", CLIMBS)
def test_maxima_that_climb_are_as_exact_as_any(climb, D, dtype, rng) -> None:
    import cupy

    q, _, v = operands(rng, 300, 1500, D, heads=(2, 2), dtype=dtype)
    k = normal(rng, (1, 2, 1500, D), dtype, 1 / math.sqrt(D))
    k[..., 0] = cupy.asarray(CLIMBS[climb](rng).astype(dtype))
    q[..., 0] = 1
    for rows in ("alike", "different"):
        if rows == "different":  # every third query goes down where the others go up, and some do nothing
            q[:, :, ::3, 0] = -1
            q[:, :, ::7, 0] = 0
        for band in ({}, {"causal": True}, {"window": (400, 0)}):
            for scale in (0.5, 1.0):  # with the scale in the exponent, and before it
                out = attention(q, k, v, scale=scale, **band)
                assert served_by(SM90)
                seen = seen_keys(300, 1500, **band)
                want = reference(q, k, v, seen, scale).out
                error = float(cupy.abs(out.astype(np.float64) - want).max())
                simple = rounded_weights_error(q, k, v, seen, scale, want)
                assert error <= 2.05 * eps(dtype) + 1.5 * simple, (band, scale, error, simple)


@pytest.mark.parametrize("D", some_under_memcheck([64, 128, 256], [64]))
def test_large_inputs_and_constant_rows(D, rng) -> None:
    import cupy

    q, k, v = operands(rng, 600, 1000, D, heads=(2, 2))
    seen = seen_keys(600, 1000)
    for change in ("queries x 16", "keys x 16", "constant"):
        x, y = q.copy(), k.copy()
        if change == "constant":
            x[...], y[...] = 3, 1
        else:
            (x if change == "queries x 16" else y)[...] *= 16
        scale = 1 / math.sqrt(D)
        out = attention(x, y, v)
        want = reference(x, y, v, seen).out
        error = float(cupy.abs(out.astype(np.float64) - want).max())
        assert error <= 2e-3 + 1.5 * rounded_weights_error(x, y, v, seen, scale, want), change


def test_values_that_fill_float16_do_not_overflow_on_the_way(rng) -> None:
    import cupy

    q, k = cupy.zeros((1, 1, 130, 64), F16), cupy.zeros((1, 1, 3000, 64), F16)
    assert bool((attention(q, k, cupy.full((1, 1, 3000, 64), 65504, F16)) == 65504).all())


# ------------------------------------------------------------------------------------------------- the plain kernel
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize(
    "dims", some_under_memcheck([(1, 1), (8, 8), (33, 20), (64, 64), (128, 300), (270, 5)], [(33, 20)])
)
def test_wide_dtypes_of_any_dims(dims, dtype, rng) -> None:
    q, k, v = operands(rng, 130, 170, *dims, B=2, heads=(4, 2), dtype=dtype)
    for band in BANDS:
        check(q, k, v, on=SIMT, **band)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
@pytest.mark.parametrize("dims", [(20, 24), (300, 64), (64, 264), (1, 1), (67, 3)], ids=str)
def test_dims_that_the_tensor_cores_do_not_take(dims, dtype, rng) -> None:
    q, k, v = operands(rng, 130, 170, *dims, dtype=dtype)
    check(q, k, v, on=SIMT, causal=True)
    check(q, k, v, on=SIMT, out_dtype=F32)


@pytest.mark.parametrize("block", [16, (48, 80), 128, 256], ids=str)
@pytest.mark.parametrize("name", ["causal", "global", "dilated", "random heads", "none"])
def test_masks_on_the_plain_cores(name, block, rng) -> None:
    q, k, v = operands(rng, 201, 230, 24, B=2, heads=(4, 2), dtype=F32)
    mask = MASKS[name](201, 230, block)
    check(q, k, v, on=SIMT, mask=mask)
    check(q, k, v, on=SIMT, mask=mask, causal=True, window=(50, -1))


# ------------------------------------------------------------------------------------------------- bad input
def attempt(**changes: Any) -> Any:
    """A good call with some of its arguments replaced."""
    import cupy

    good = {"q": (2, 4, 5, 64), "k": (2, 2, 7, 64), "v": (2, 2, 7, 64)}
    arguments = {name: cupy.zeros(shape, F16) for name, shape in good.items()} | changes  # noqa: F811
    return attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def zeros(*shape: int, dtype: Any = F16) -> Any:  # noqa: F811
    import cupy

    return cupy.zeros(shape, dtype)


def packed(**changes: Any) -> Any:
    bounds = {"cu_seqlens_q": zeros(3, dtype=int), "cu_seqlens_k": zeros(3, dtype=int)}
    return attempt(**{"q": zeros(5, 4, 64), "k": zeros(7, 2, 64), "v": zeros(7, 2, 64), **bounds, **changes})


def small_mask(q: int = 5, k: int = 7, heads: tuple[int, int] = (1, 1), device: str = "cuda") -> BlockMask:
    return BlockMask.random(q, k, per_row=1, heads=heads, block=16, device=device)


REFUSED: list[Refusal] = [
    (
        lambda: attempt(k=np.zeros((2, 2, 7, 64), F16)),
        TypeError,
        "k: wanted a dense array on 'cuda', where q is, got numpy",
    ),
    (
        lambda: attempt(q=np.zeros((2, 4, 5, 64), F16)),
        TypeError,
        "k: wanted a dense array on 'cpu', where q is, got cupy",
    ),
    (lambda: attempt(v=[0.0]), TypeError, "v: wanted a dense array on 'cuda'"),
    (lambda: attempt(out=np.zeros((2, 4, 5, 64), F16)), TypeError, "out: wanted a dense array on 'cuda'"),
    (lambda: attempt(mask=small_mask(device="cpu")), TypeError, "mask.to_device('cuda') brings it there"),
    (lambda: attempt(mask=zeros(5, 7, dtype=bool)), TypeError, "mask: wanted a BlockMask"),
    (lambda: attempt(mask=small_mask(7, 5)), ValueError, "mask: wanted shape (5, 7)"),
    (lambda: attempt(mask=small_mask(heads=(1, 3))), ValueError, "along the heads, got 3"),
    (lambda: attempt(k=zeros(2, 2, 7, 72)), ValueError, "k: wanted head dim 64 as q has, got 72"),
    (lambda: attempt(v=zeros(2, 2, 6, 64)), ValueError, "v: wanted length 7 as k has, got 6"),
    (lambda: attempt(q=zeros(2, 5, 5, 64)), ValueError, "k: wanted a number of heads that divides the 5 of q"),
    (lambda: attempt(k=zeros(2, 2, 7, 64, dtype=F32)), TypeError, "k: wanted float16 as q has, got float32"),
    (lambda: attempt(q=zeros(2, 4, 5, 64, dtype=int)), TypeError, "q: does not support dtype int64"),
    (lambda: attempt(out=zeros(2, 4, 5, 72)), ValueError, "out: wanted float16 of shape (2, 4, 5, 64)"),
    (lambda: attempt(window=(1, -2)), ValueError, "window: wanted two integers"),
    (lambda: attempt(scale=math.nan), ValueError, "scale: wanted a finite number"),
    (lambda: packed(cu_seqlens_k=zeros(2, dtype=int)), ValueError, "cu_seqlens_k: wanted 3 numbers"),
    (lambda: packed(cu_seqlens_q=zeros(3)), TypeError, "cu_seqlens_q: wanted integers, got dtype float16"),
    (lambda: packed(cu_seqlens_q=[0, 2, 4]), ValueError, "cu_seqlens_q: wanted 5, the length of q"),
    (
        lambda: packed(cu_seqlens_q=zeros(1, dtype=int), cu_seqlens_k=zeros(1, dtype=int)),
        ValueError,
        "cu_seqlens_q: wanted",
    ),
    (lambda: packed(mask=small_mask()), ValueError, "mask: got one together with cu_seqlens_q"),
]


@each_refusal(REFUSED)
def test_bad_input_is_refused_before_anything_is_launched(call, error, text, monkeypatch) -> None:
    assert_refused(call, error, text, monkeypatch)


def test_the_good_calls_that_bad_ones_are_made_from_are_good() -> None:
    assert attempt(mask=small_mask(heads=(2, 4))).shape == (2, 4, 5, 64)
    assert packed().shape == (5, 4, 64)
    assert served_by(SM90)


def test_out_that_overlaps_an_operand_is_refused(rng) -> None:
    q, k, v = operands(rng, 64, 64, 64, heads=(2, 2))
    for name, x in (("q", q), ("k", k), ("v", v)):
        with pytest.raises(ValueError, match=f"out: overlaps {name}"):
            attention(q, k, v, out=x)
