"""Attention of fp8 on the card, against float64 on the numbers that its bytes and scales stand for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bsrgemm import BlockMask
from bsrgemm._attention.attention import attention
from bsrgemm.dtypes import BFLOAT16, FLOAT8

from .attention_cases import (  # noqa: F401  (fixtures)
    BANDS,
    CLIMBS,
    F16,
    F32,
    F64,
    GUARD,
    MASKS,
    SEQUENCES,
    SIMT,
    SM90,
    Expected,
    assert_near,
    both_shapes,
    by_rule,
    plans,
    poisoned,
    random_mask,
    seen_keys,
    sequences_seen,
    shape,
    some_under_memcheck,
    turned,
    untouched,
)

VALUES = "attention_values"
pytestmark = pytest.mark.gpu
on_tensor_cores = pytest.mark.kernel(SM90, VALUES)
on_plain_cores = pytest.mark.kernel(SIMT)
U8 = np.dtype(np.uint8)
NAN = 0x7F
SOME_BANDS = [{}, {"causal": True}, {"window": (100, 3)}]


def served_by(name: str) -> bool:
    """Did all calls so far run on that kernel? Cards that are no Hopper cannot tell."""
    import cupy

    from bsrgemm._attention import launch as attention_launch

    names = {plan.config.spec().entry for plan in attention_launch._plans.values()}
    return names == {name} or cupy.cuda.Device().compute_capability != "90"


# ------------------------------------------------------------------------------------------------- operands
def fp8(x: np.ndarray) -> Any:
    """The bytes of the nearest fp8 numbers, on the card."""
    import cupy

    return cupy.asarray(np.ascontiguousarray(x, np.float32).astype(FLOAT8).view(np.uint8))


def normal(rng: np.random.Generator, sizes: tuple[int, ...]) -> Any:
    return fp8(rng.standard_normal(sizes, np.float32))


def operands(
    rng: np.random.Generator,
    S_q: int,
    S_k: int,
    D: int = 128,
    D_v: int | None = None,
    *,
    B: int = 1,
    heads: tuple[int, int] = (2, 1),
) -> list[Any]:
    """q, k and v in "bhsd"."""
    shapes = ((B, heads[0], S_q, D), (B, heads[1], S_k, D), (B, heads[1], S_k, D if D_v is None else D_v))
    return [normal(rng, sizes) for sizes in shapes]


@cache
def _numbers() -> Any:
    import cupy

    return cupy.asarray(np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float64))


def widened(x: Any, scale: Any = None) -> Any:
    """Bytes in "bhsd" as float64, times the scale of each head."""
    import cupy

    wide = _numbers()[x.astype(np.int32)]
    if scale is None:
        return wide
    scale = cupy.asarray(scale, np.float64)
    return wide * (scale if scale.ndim == 0 else cupy.broadcast_to(scale, x.shape[:2])[:, :, None, None])


# ------------------------------------------------------------------------------------------------- reference
@dataclass
class Exact:
    """In float64, what `fp8_bound` wants to know of each element or row."""

    out: Any
    lse: Any
    #: ``weights @ abs(v)``, and the root of ``weights**2 @ v**2``
    spread: Any
    sigma: Any
    #: the highest weight of a row, the keys that it sees, and the sum of their abs(v)
    top: Any
    count: Any
    reach: Any
    #: the largest sum of absolute products of a row's scores
    size: Any


def exact(q: Any, k: Any, v: Any, seen: Any, scale: float | None = None, softcap: float | None = None) -> Exact:
    """Attention of float64 operands in "bhsd"."""
    import cupy

    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    k, v = (cupy.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = scale * (q @ k.swapaxes(2, 3))
    size = abs(scale) * (cupy.abs(q) @ cupy.abs(k).swapaxes(2, 3))
    if softcap is not None:
        scores = softcap * cupy.tanh(scores / softcap)
    seen = cupy.broadcast_to(seen, scores.shape)
    scores = cupy.where(seen, scores, -np.inf)
    some = seen.any(axis=3, keepdims=True)
    top = cupy.where(some, scores.max(axis=3, keepdims=True), 0)
    weights = cupy.where(seen, cupy.exp(scores - top), 0)
    total = cupy.where(some, weights.sum(axis=3, keepdims=True), 1)
    weights = weights / total
    return Exact(
        out=weights @ v,
        lse=cupy.where(some, cupy.log(total) + top, -np.inf)[..., 0],
        spread=weights @ cupy.abs(v),
        sigma=cupy.sqrt((weights * weights) @ (v * v)),
        top=weights.max(axis=3, keepdims=True),
        count=seen.sum(axis=3, keepdims=True),
        reach=seen.astype(np.float64) @ cupy.abs(v),
        size=cupy.where(seen, size, 0).max(axis=3),
    )


def score_bound(want: Exact) -> Any:
    """How far a row's scores may be off.

    The tensor cores line up the 32 products of a step and the sum so far at the largest of them and cut each 13 bits
    below. Emulated on random numbers that costs up to 2**-11.8 of the sum of the absolute products.
    """
    return 2**-10 * want.size + 1e-5


def fp8_bound(want: Exact, dtype: Any, *, independent: bool = True) -> Any:
    """How far each element may be off.

    1. The weights of keys are rounded to 3 bits of mantissa: each is off by up to 2**-4 / (1 + 2**-4) = 1/17 of itself.
    2. The highest weight is at least 2**5, and those below 2**-6 are rounded to multiples of 2**-9: each is off by up
       to 2**-15 of the highest.
    3. Scores are off (see `score_bound`), which their sum repeats.
    4. Sums of values are cut as scores are: each product of `count` by up to 2**-13 of the sum so far, which on the way
       is half of the last one.

    Where weights and values have nothing to do with each other (`independent`), errors of 1 and 3 add up as random
    numbers do: to 1/17 of `sigma` at most, of which 6 are allowed, and 4 follows the sum and not its absolute terms.
    """
    import cupy

    wrong, cut = score_bound(want)[..., None], 2**-14 * (want.count + 32)
    bound = (1 / 17 + cupy.expm1(2 * wrong) + cut) * want.spread + 2**-15 * want.top * want.reach
    if independent:
        likely = (6 / 17 + wrong) * want.sigma + cut * cupy.abs(want.out)
        bound = cupy.minimum(bound, likely + 2**-15 * want.top * want.reach)
    info = ml_dtypes.finfo(dtype)
    return bound + float(info.eps) * cupy.abs(want.out) + float(info.smallest_subnormal) + 2e-7 * want.spread


def rms(x: Any, axis: Any = (2, 3)) -> Any:
    import cupy

    return cupy.sqrt((x * x).mean(axis=axis))


def assert_close(out: Any, lse: Any, want: Exact, *, independent: bool = True, varied: bool = True) -> None:
    """Within what rounding explains, each element and all of a head; rows that see nothing are 0 and -inf."""
    import cupy

    nothing = want.lse == -np.inf
    got = out.astype(np.float64)
    assert bool((got == 0).all(axis=3)[nothing].all())
    assert bool(((lse == -np.inf) == nothing).all())
    error, bound = cupy.abs(got - want.out), fp8_bound(want, out.dtype, independent=independent)
    assert bool((error <= bound).all()), (float(cupy.nanmax(error / bound)), int(cupy.isnan(got).sum()))
    lse_error = cupy.abs(cupy.where(nothing, 0, lse) - cupy.where(nothing, 0, want.lse))
    lse_bound = score_bound(want) + 1e-4 + 4e-7 * cupy.abs(cupy.where(nothing, 0, want.lse))
    assert bool((lse_error <= lse_bound).all()), (float(lse_error.max()), float((lse_error / lse_bound).max()))
    if independent and out.size:
        # Emulated: 0.028 of sigma. Few rows, or weights that are alike, may have the worst luck with those that count.
        most = 0.045 if varied and out.shape[2] >= 64 else 1 / 17
        cut = 2**-14 * (want.count + 32) * want.out
        allowed = most * rms(want.sigma) + rms(cut) + float(ml_dtypes.finfo(out.dtype).eps) * rms(want.out) + 1e-12
        smallest = float(ml_dtypes.finfo(out.dtype).smallest_subnormal)
        assert bool((rms(error) <= allowed + smallest).all()), float((rms(error) / allowed).max())
        off = rms(lse_error, 2)
        assert bool((off <= 3e-4 * rms(want.size, 2) + 1e-5).all()), float((off / rms(want.size, 2)).max())


SCALES: dict[str, Any] = {"q_scale": 1.0}


def check(
    q: Any,
    k: Any,
    v: Any,
    checksum: Any = None,
    *,
    on: str = SM90,
    scales: dict[str, Any] | None = None,
    out: Any = None,
    out_dtype: Any = None,
    independent: bool = True,
    varied: bool = True,
    **options: Any,
) -> Any:
    """Attention of bytes in "bhsd" into a poisoned result, compared with float64; the result in "bhsd"."""
    scales = SCALES if scales is None else scales
    layout = options.get("layout", "bhsd")
    if out is None:
        out = turned(poisoned((*q.shape[:3], v.shape[3]), F32 if out_dtype is None else out_dtype), layout)
    given = (turned(x, layout) for x in (q, k, v))
    got, lse = attention(*given, out=out, return_lse=True, **scales, **options)
    assert got is out and lse.dtype == F32
    assert served_by(on)
    if checksum is not None:
        checksum(out)
        checksum(lse)
    band = {name: options[name] for name in ("causal", "window", "align", "mask") if name in options}
    seen = seen_keys(q.shape[2], k.shape[2], H_q=q.shape[1], **band)
    wide = [widened(x, scales.get(f"{name}_scale")) for name, x in zip("qkv", (q, k, v), strict=True)]
    want = exact(*wide, seen, options.get("scale"), options.get("softcap"))
    if on == SIMT:
        assert_plain(turned(out, layout), lse, want, wide[2], q.shape[3])
    else:
        assert_close(turned(out, layout), lse, want, independent=independent, varied=varied)
    return turned(out, layout)


def assert_plain(out: Any, lse: Any, want: Exact, v: Any, D: int) -> None:
    """The plain cores compute in float32 throughout."""
    assert_near(out, lse, Expected(want.out, want.lse, want.spread, want.size), v, D, F32, SIMT)


# ------------------------------------------------------------------------------------------------- lengths and bands
@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("S", some_under_memcheck([1, 15, 17, 127, 129, 300, 1000], [129]))
def test_fp8_bands_at_odd_lengths(S, D, rng, checksum) -> None:
    q, k, v = operands(rng, S, S, D)
    for band in BANDS:
        check(q, k, v, checksum, **band)


@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(300, 777), (777, 300), (1, 1000), (515, 15), (129, 128), (17, 515)], ids=str)
def test_fp8_queries_and_keys_of_different_lengths(lengths, D, rng, checksum) -> None:
    q, k, v = operands(rng, *lengths, D)
    for band in BANDS:
        check(q, k, v, checksum, **band)


@on_tensor_cores
@pytest.mark.parametrize("heads", some_under_memcheck([(32, 8), (28, 4), (8, 1), (3, 3)], [(8, 1)]))
def test_fp8_heads_share_keys(heads, rng, checksum) -> None:
    for D, B in ((64, 1), (128, 3)):
        q, k, v = operands(rng, 200, 200, D, B=B, heads=heads)
        check(q, k, v, checksum, causal=True)
        check(q, k, v, checksum, window=(30, 40))


@on_tensor_cores
@by_rule
def test_fp8_more_tiles_than_multiprocessors_are_all_done(rng, checksum) -> None:
    q, k, v = operands(rng, 1000, 1000, 64, B=4, heads=(12, 4))
    check(q, k, v, checksum)
    check(q, k, v, checksum, causal=True)


@on_tensor_cores
def test_fp8_more_heads_than_a_grid_has_places_beside_each_other(rng) -> None:
    q, k, v = operands(rng, 1, 5, 64, heads=(70_000, 70_000))
    check(q, k, v)


# ------------------------------------------------------------------------------------------------- dims and dtypes
@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("D", some_under_memcheck([16, 48, 64, 80, 96, 112, 128, 144, 192, 208, 256], [256]))
def test_fp8_head_dims(D, rng, checksum) -> None:
    q, k, v = operands(rng, 300, 300, D)
    check(q, k, v, checksum)
    check(q, k, v, checksum, causal=True, out_dtype=F16)


#: Of queries and keys, and of values.
DIMS = [
    *((64, 80), (96, 80), (128, 80), (128, 64), (64, 128), (96, 128), (192, 128), (128, 192), (128, 256), (256, 64)),
    *((192, 256), (16, 208), (256, 16)),
]


@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("dims", some_under_memcheck(DIMS, [(96, 80)]))
def test_fp8_values_of_another_dim(dims, rng, checksum) -> None:
    q, k, v = operands(rng, 260, 333, *dims)
    check(q, k, v, checksum)
    check(q, k, v, checksum, causal=True, out_dtype=BFLOAT16)


@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("out_dtype", [F16, BFLOAT16, F32], ids=str)
def test_fp8_results_of_each_dtype(out_dtype, rng, checksum) -> None:
    q, k, v = operands(rng, 150, 210, 64)
    result = check(q, k, v, checksum, out_dtype=out_dtype, causal=True)
    asked = attention(q, k, v, out_dtype=out_dtype, causal=True, **SCALES)
    assert asked.dtype == out_dtype
    assert bool((asked.view(np.uint8) == result.view(np.uint8)).all())
    if out_dtype == F32:
        assert attention(q, k, v, v_scale=1).dtype == F32


@on_tensor_cores
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("D", some_under_memcheck([64, 80, 128, 256], [80]))
def test_fp8_nothing_beyond_out_is_written(D, layout, rng, plans) -> None:  # noqa: F811
    import cupy

    S = 190
    q, k, v = operands(rng, S, 200, D, B=2)
    for dtype, column in ((F16, 8), (F16, 1), (F32, 8), (BFLOAT16, 8)):
        room_shape = (2, 2, S + 70, D + 16) if layout == "bhsd" else (2, S + 70, 2, D + 16)
        room = cupy.full(room_shape, GUARD, np.float32).astype(dtype)
        rows = (slice(None),) * (2 if layout == "bhsd" else 1)
        for step in (1, -1):
            view = room[(*rows, slice(32, 32 + S), ..., slice(column, column + D))][..., ::step]
            view[...] = np.nan
            plans.clear()
            check(q, k, v, layout=layout, out=view, causal=True)
            (plan,) = plans.values()
            if hasattr(plan.config, "tiles"):
                assert plan.config.tiles == (dtype in (F16, BFLOAT16) and column == 8 and step == 1)
            view[...] = GUARD
            assert untouched(room)


# ------------------------------------------------------------------------------------------------- scales
def scale_array(rng: np.random.Generator, sizes: tuple[int, ...], low: float = 0.3, high: float = 3.0) -> Any:
    import cupy

    return cupy.asarray(rng.uniform(low, high, sizes).astype(np.float32))


@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("D", some_under_memcheck([64, 128, 256], [128]))
def test_fp8_scales_of_heads(D, rng, checksum) -> None:
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
            check(q, k, v, checksum, scales=scales, **options)


@on_tensor_cores
def test_fp8_tiny_and_huge_scales(rng, checksum) -> None:
    import cupy

    q, k, v = operands(rng, 200, 300, 64, heads=(4, 4))
    scales = {
        "q_scale": [1e-6, 1e4, 1.0, 1e4],
        "k_scale": [1e6, 1e-4, 1.0, 1e-4],
        "v_scale": [1e4, 1e-6, 1e4, 1e-30],
    }
    arrays = {name: cupy.asarray(x, np.float32) for name, x in scales.items()}
    check(q, k, v, checksum, scales=arrays)
    check(q, k, v, checksum, scales=arrays, causal=True, out_dtype=BFLOAT16)
    # Scores that differ by hardly anything: the mean of what is seen.
    tiny = {"q_scale": cupy.full(4, 1e-6, np.float32), "k_scale": 1e-6}
    check(q, k, v, checksum, scales=tiny)
    check(q, k, v, checksum, scales={"q_scale": 1e-30, "k_scale": 1e-30}, causal=True)


@on_tensor_cores
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


@on_tensor_cores
def test_fp8_scales_as_numbers_and_as_arrays_are_the_same(rng) -> None:
    import cupy

    q, k, v = operands(rng, 200, 300, heads=(4, 2))
    numbers = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 4.0}
    want = attention(q, k, v, **numbers)
    for heads in ((4, 2, 2), ((1, 4), (1, 2), (1, 2))):
        arrays = {name: cupy.full(n, x, np.float32) for (name, x), n in zip(numbers.items(), heads, strict=True)}
        assert float(cupy.abs(attention(q, k, v, **arrays) - want).max()) <= 1e-5


@on_tensor_cores
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
        spoiled[1, 1:2] = True if name == "q_scale" else spoiled[1, 1:2]
        if name != "q_scale":
            spoiled[1, G : 2 * G] = True
        nan = cupy.isnan(out.astype(np.float32)).get()
        assert nan[spoiled][:, 50:].all()  # the queries before see no keys
        assert (out.astype(np.float32).get()[:, :, :50] == 0).all()
        assert not nan[~spoiled].any()
        if out_dtype == F32:
            np.testing.assert_array_equal(out.get()[~spoiled], good.get()[~spoiled])


# ------------------------------------------------------------------------------------------------- scores
@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    "how",
    [{"softcap": 20.0}, {"softcap": 0.5}, {"softcap": 5.0, "scale": -1.0}]
    + [{"scale": x} for x in (-0.2, 0.0, 0.7, 1.5, 1e-30)],
    ids=str,
)
def test_fp8_softcap_and_any_scale(how, D, rng, checksum) -> None:
    q, k, v = operands(rng, 300, 400, D)
    for band in ({}, {"causal": True}, {"window": (90, 5)}):
        check(q, k, v, checksum, **how, **band)


@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("climb", CLIMBS)
def test_fp8_maxima_that_climb(climb, D, rng, checksum) -> None:
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
                check(q, k, v, checksum, scale=scale, varied=False, **band)


@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("climb", ["a rising ramp", "a slow ramp", "steps of 9 a tile"])
def test_fp8_maxima_that_climb_beside_others(climb, rng, checksum) -> None:
    q, k, v = (x.get() for x in operands(rng, 300, 1500, 64, heads=(2, 2)))
    k[..., 0] = (CLIMBS[climb](rng) / 30).astype(np.float32).astype(FLOAT8).view(np.uint8)
    q[..., 0] = np.float32(4).astype(FLOAT8).view(np.uint8)
    import cupy

    for band in SOME_BANDS:
        check(*map(cupy.asarray, (q, k, v)), checksum, scale=0.5, varied=False, **band)


@on_tensor_cores
@pytest.mark.parametrize("D", [64, 128, 256])
def test_fp8_constant_rows_are_exact(D) -> None:
    """Weights that are all the same are powers of two, and so are the values: sums of up to 2**13 of them are exact."""
    import cupy

    q, k = (fp8(np.ones((1, 2, n, D))) for n in (130, 1000))
    for value in (1.0, -0.5, 256.0):
        out, lse = attention(q, k, fp8(np.full((1, 2, 1000, D), value)), v_scale=1.0, return_lse=True)
        np.testing.assert_allclose(out.get(), value, 1e-6)
        np.testing.assert_allclose(lse.get(), math.sqrt(D) + math.log(1000), 1e-5)
    assert served_by(SM90)
    assert bool(cupy.isfinite(out).all())


@on_tensor_cores
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
@on_tensor_cores
@pytest.mark.parametrize("D", [64, 128, pytest.param(80, marks=pytest.mark.sanitizer)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_fp8_layouts_and_views_that_the_copy_engine_can_read(layout, D, rng, checksum) -> None:
    import cupy

    fused = normal(rng, (2, 200, 3, 4, D))
    for q, k, v in (
        [cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in operands(rng, 200, 260, D, B=2)],
        [fused[:, :, i].swapaxes(1, 2) for i in range(3)],
        [x[1:, ::2, 3:203] for x in operands(rng, 220, 220, D, B=3, heads=(4, 4))],
        [x[..., 16 : 16 + D] for x in operands(rng, 129, 200, D + 32)],
        [x[..., 16 : 16 + D - 8] for x in operands(rng, 129, 200, D + 32)],  # columns that are no multiple of 16
        [x[..., : D - 15] for x in operands(rng, 129, 200, D)],
    ):
        check(q, k, v, checksum, layout=layout, causal=True)
        check(q, k, v, checksum, layout=layout, out_dtype=F16)
    q, k, v = (x.swapaxes(0, 1) for x in operands(rng, 130, 140, D, B=3, heads=(2, 2)))
    check(q, k, v, checksum, layout=layout)


def spoiled_strides(x: Any, how: str) -> Any:
    """The same bytes where the copy engine cannot read them; the gaps are no numbers."""
    import cupy

    B, H, S, D = x.shape
    if how == "shifted":
        view = cupy.full(x.size + 1, NAN, U8)[1:].reshape(x.shape)
    elif how == "columns":
        return cupy.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)
    elif how == "every second column":
        view = cupy.full((B, H, S, 2 * D), NAN, U8)[..., ::2]
    elif how == "backwards":
        view = cupy.full((B, H, S, D), NAN, U8)[:, :, ::-1]
    else:
        view = cupy.full((B, H, S, D + 3), NAN, U8)[..., :D]
    view[...] = x
    return view


@pytest.mark.kernel(SM90)
@pytest.mark.parametrize("how", ["shifted", "columns", "every second column", "backwards", "odd rows"])
def test_fp8_strides_that_the_copy_engine_cannot_read_are_copied(how, rng, checksum) -> None:
    q, k, v = operands(rng, 70, 90, 48, 32)
    scales = {"q_scale": scale_array(rng, (2,)), "k_scale": 2.0, "v_scale": scale_array(rng, (1, 1))}
    for name in "qkv":
        given = [spoiled_strides(x, how) if name == n else x for n, x in zip("qkv", (q, k, v), strict=True)]
        check(*given, checksum, on=SM90, scales=scales, causal=True)
    for dtype in (F16, BFLOAT16, F32):
        check(*(spoiled_strides(x, how) for x in (q, k, v)), checksum, on=SM90, scales=scales, out_dtype=dtype)


@on_plain_cores
@pytest.mark.parametrize("dims", some_under_memcheck([(300, 64), (64, 264)], [(64, 264)]))
def test_fp8_dims_that_the_tensor_cores_do_not_take(dims, rng, checksum) -> None:
    q, k, v = operands(rng, 130, 170, *dims, B=2, heads=(4, 2))
    for options in ({}, {"causal": True}, {"softcap": 5.0}, {"scale": -0.3}):
        check(q, k, v, checksum, on=SIMT, scales={"v_scale": scale_array(rng, (2, 2))}, **options)


@on_tensor_cores
@pytest.mark.parametrize("dims", some_under_memcheck([(20, 24), (1, 1), (33, 20), (67, 3)], [(33, 20)]))
def test_fp8_rows_that_do_not_begin_at_multiples_of_16_bytes_are_copied(dims, rng, checksum) -> None:
    q, k, v = operands(rng, 130, 170, *dims, B=2, heads=(4, 2))
    for options in ({}, {"causal": True}, {"softcap": 5.0}, {"scale": -0.3}):
        check(q, k, v, checksum, scales={"v_scale": scale_array(rng, (2, 2))}, **options)


@on_tensor_cores
def test_fp8_one_head_of_keys_spread_over_many(rng) -> None:
    import cupy

    q, k, v = operands(rng, 130, 150, 64, heads=(4, 1))
    spread = [cupy.broadcast_to(x, (1, 4, *x.shape[2:])) for x in (k, v)]  # a stride of 0
    got = attention(q, *spread, q_scale=1.0)
    want = exact(*map(widened, (q, k, v)), seen_keys(130, 150))
    assert bool((cupy.abs(got - want.out) <= fp8_bound(want, F32)).all())


@on_tensor_cores
def test_fp8_more_than_2_to_31_elements_between_heads(rng) -> None:
    import cupy

    room = cupy.empty((2, (1 << 24) + 8, 128), U8)
    k, v = room[None, :, -200:], room[None, :, :200]
    for x in (k, v):
        x[...] = normal(rng, x.shape)
    q = normal(rng, (1, 4, 130, 128))
    check(q, k, v, causal=True)


# ------------------------------------------------------------------------------------------------- values by columns
def by_columns(v: np.ndarray) -> np.ndarray:
    """Values (batch, heads, keys, columns) as the kernel wants them, from the definition."""
    B, H, S, D = v.shape
    room = np.zeros((B, H, -(-S // 16) * 16, D), np.uint8)
    room[:, :, :S] = v
    t, i = np.divmod(np.arange(16), 4)
    places = 2 * t + i + np.where(i > 1, 6, 0)
    return room.reshape(B, H, -1, 16, D)[:, :, :, places].reshape(room.shape).swapaxes(2, 3)


@pytest.mark.kernel(VALUES)
@pytest.mark.parametrize("D", some_under_memcheck([16, 64, 80, 120, 256], [80]))
@pytest.mark.parametrize("S", [1, 17, 128, 1000])
def test_fp8_values_lie_with_their_keys_side_by_side(S, D, rng, checksum) -> None:
    import cupy

    from bsrgemm._attention import launch as attention_launch

    wide = cupy.asarray(rng.integers(0, 256, (2, 6, S + 3, 272), dtype=np.uint8))
    for v in (cupy.ascontiguousarray(wide[:, :, :S, :D]), wide[:, ::2, 1 : S + 1, 16 : 16 + D]):
        if not attention_launch._mappable(v):
            continue
        found = attention_launch._by_columns(v, None)
        checksum(found)
        np.testing.assert_array_equal(found.get(), by_columns(v.get()))


# ------------------------------------------------------------------------------------------------- masks
@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("block", [16, (48, 80), 128], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_fp8_constructors_of_masks(name, block, rng, checksum) -> None:
    for S_q, S_k, D in ((333, 401, 128), (260, 130, 256)):
        q, k, v = operands(rng, S_q, S_k, D, B=2, heads=(4, 2))
        mask = MASKS[name](S_q, S_k, block)
        check(q, k, v, checksum, mask=mask)
        check(q, k, v, checksum, mask=mask, window=(100, 30), align="top-left", out_dtype=F16)


@on_tensor_cores
@by_rule
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("block", some_under_memcheck([32, 64, 128], [64]))
def test_fp8_sparse_masks_by_rule(block, D, rng, checksum) -> None:
    """Few small blocks have tiles of 64 keys."""
    q, k, v = operands(rng, 700, 900, D, heads=(4, 2))
    mask = BlockMask.random(700, 900, per_row=3, heads=(1, 4), block=block, device="cuda")
    for options in ({}, {"causal": True}, {"softcap": 10.0}, {"scale": -0.1}):
        check(q, k, v, checksum, mask=mask, **options)


@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("heads", some_under_memcheck([(1, 1), (2, 1), (1, 2), (1, 4), (2, 2), (2, 4)], [(2, 4)]))
def test_fp8_patterns_per_batch_and_head(heads, rng, checksum) -> None:
    q, k, v = operands(rng, 200, 270, 64, B=2, heads=(4, 2))
    scales = {"q_scale": scale_array(rng, (2, 4)), "v_scale": scale_array(rng, (2, 2))}
    for block in ((16, 16), (128, 128), (64, 96), (32, 32)):
        mask = random_mask(rng, heads, (200, 270), block)
        check(q, k, v, checksum, scales=scales, mask=mask)
        check(q, k, v, checksum, scales=scales, mask=mask, window=(60, 60))


@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("density", [0.5, 0.01, 0.0005])
def test_fp8_masks_by_elements_with_rows_that_see_nothing(density, rng, checksum) -> None:
    import cupy

    q, k, v = operands(rng, 515, 700)
    for block in (32, 64, 128):
        mask = BlockMask.from_dense(cupy.asarray(rng.random((515, 700)) < density), block=block)
        for options in ({}, {"causal": True}, {"scale": -0.1}, {"softcap": 5.0}):
            check(q, k, v, checksum, mask=mask, **options)


@on_tensor_cores
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
@on_tensor_cores
@both_shapes
@pytest.mark.sanitizer
@pytest.mark.parametrize("D", [64, 256, 33])
def test_fp8_rows_that_see_nothing_are_zero_whatever_the_operands_hold(D) -> None:
    import cupy

    q, k, v = (cupy.full((1, 2, n, D), NAN, U8) for n in (300, 100, 100))
    for options in ({}, {"scale": -1.0}, {"softcap": 2.0}):
        out, lse = attention(q, k, v, causal=True, return_lse=True, q_scale=1.0, **options)
        assert bool((out[:, :, :200] == 0).all()) and bool((lse[:, :, :200] == -np.inf).all())
        assert bool(cupy.isnan(out[:, :, 200:]).all()) and bool(cupy.isnan(lse[:, :, 200:]).all())
    nobody = ~BlockMask.full(300, 100, device="cuda")
    out, lse = attention(q, k, v, mask=nobody, return_lse=True, q_scale=1.0)
    assert bool((out == 0).all()) and bool((lse == -np.inf).all())


@on_plain_cores
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
@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("D", [80, 128, 33])
@pytest.mark.parametrize("how", ["full", "causal", "window", "mask", "blocks"])
def test_fp8_nan_reaches_the_queries_that_see_it_and_no_others(how, D, rng) -> None:
    import cupy

    S_q, S_k = 200, 260
    mask = {
        "mask": lambda: BlockMask.from_dense(cupy.asarray(rng.random((S_q, S_k)) < 0.3), block=64),
        "blocks": lambda: BlockMask.random(S_q, S_k, per_row=3, block=32, device="cuda"),
    }.get(how, lambda: None)()
    options = {"causal": how == "causal", "window": (20, 30) if how == "window" else None, "mask": mask}
    seen = seen_keys(S_q, S_k, **options)
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


@on_tensor_cores
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
@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("name", some_under_memcheck(SEQUENCES, ["more keys"]))
def test_fp8_each_sequence_sees_its_own_keys(name, rng, checksum) -> None:
    import cupy

    lengths_q, lengths_k = SEQUENCES[name]
    q_bounds, k_bounds = (np.cumsum([0, *x]).tolist() for x in (lengths_q, lengths_k or lengths_q))
    scales = {"q_scale": scale_array(rng, (4,)), "k_scale": 0.5, "v_scale": scale_array(rng, (1, 2))}
    for D, D_v in ((64, 64), (192, 128)):
        q = normal(rng, (q_bounds[-1], 4, D))
        k, v = (normal(rng, (k_bounds[-1], 2, d)) for d in (D, D_v))
        turned_ = [x[None].swapaxes(1, 2) for x in (q, k, v)]
        wide = [widened(x, scales[f"{n}_scale"]) for n, x in zip("qkv", turned_, strict=True)]
        for band in ({}, {"causal": True}, {"window": (30, 9)}):
            want = exact(*wide, sequences_seen(q_bounds, k_bounds, **band))
            for where in (list, lambda x: cupy.asarray(x, dtype=np.int32)):
                room = cupy.full((q_bounds[-1] + 150, 4, D_v), GUARD, np.float32)
                out = room[70 : 70 + q_bounds[-1]]
                out[...] = np.nan
                bounds = {"cu_seqlens_q": where(q_bounds), "cu_seqlens_k": where(k_bounds)}
                _, lse = attention(q, k, v, out=out, return_lse=True, **bounds, **scales, **band)
                assert served_by(SM90)
                checksum(out)
                assert_close(out[None].swapaxes(1, 2), lse[None], want, varied=False)
                assert untouched(room[:70]) and untouched(room[70 + q_bounds[-1] :])


# ------------------------------------------------------------------------------------------------- repeats and streams
def differing(call: Callable[[], Any], first: Any, times: int) -> int:
    """In how many bytes the results of so many calls differ from the first one."""
    import cupy

    count = cupy.zeros((), np.int64)
    for _ in range(times):
        count += (call().view(np.uint8) != first.view(np.uint8)).sum()
    return int(count)


@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("how", ["full", "causal", "mask", "nan"])
@pytest.mark.parametrize("out_dtype", [F16], ids=str)
def test_fp8_results_repeat_bit_by_bit(out_dtype, how, D, rng) -> None:
    q, k, v = operands(rng, 1000, 1000, D, B=2, heads=(8, 4))
    options: dict[str, Any] = {"causal": how in ("causal", "nan"), "out_dtype": out_dtype}
    options |= {"q_scale": scale_array(rng, (2, 8)), "k_scale": 0.5, "v_scale": scale_array(rng, (4,))}
    if how == "mask":
        options["mask"] = random_mask(rng, (1, 8), (1000, 1000), (64, 64))
    if how == "nan":  # rows that are done again, by chance before this tile or that
        v[:, ::3, 900] = NAN
        k[:, 1::3, 950] = NAN
    first = attention(q, k, v, **options)
    assert served_by(SM90)
    assert differing(lambda: attention(q, k, v, **options), first, 200) == 0


@on_tensor_cores
def test_fp8_the_result_is_the_same_with_and_without_lse(rng) -> None:
    q, k, v = operands(rng, 300, 400)
    out, _ = attention(q, k, v, causal=True, return_lse=True, v_scale=0.5)
    assert bool((out == attention(q, k, v, causal=True, v_scale=0.5)).all())


@on_tensor_cores
@both_shapes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("how", ["full", "causal", "climbing", "mask", "nan"])
def test_fp8_pipeline_survives_delays(how, D, rng, monkeypatch) -> None:
    from bsrgemm._attention import heuristics as attention_heuristics
    from bsrgemm._attention import launch as attention_launch
    from bsrgemm._kernels import jit

    q, k, v = operands(rng, 700, 700, D, B=2, heads=(40, 8))
    options: dict[str, Any] = {"causal": how in ("causal", "nan"), "q_scale": scale_array(rng, (2, 40))}
    if how == "climbing":
        climbs = rng.standard_normal(k.shape, np.float32) * np.linspace(0, 20, 700, dtype=np.float32)[:, None]
        k = fp8(climbs)
    if how == "mask":
        options["mask"] = random_mask(rng, (1, 40), (700, 700), (64, 64))
    if how == "nan":
        v[:, ::3, 333] = NAN
    calm = attention(q, k, v, **options)
    plain = attention_heuristics.AttentionSm90.spec

    def stressed(config: Any) -> Any:
        spec = plain(config)
        return jit.KernelSpec(spec.source, spec.entry, (*spec.defines, ("STRESS", 1)))

    monkeypatch.setattr(attention_heuristics.AttentionSm90, "spec", stressed)
    monkeypatch.setattr(attention_launch, "_plans", {})
    assert differing(lambda: attention(q, k, v, **options), calm, 10) == 0


@on_tensor_cores
@by_rule
def test_fp8_several_streams_at_once(rng) -> None:
    import cupy

    q, k, v = operands(rng, 1000, 1000, heads=(8, 8))
    others = operands(rng, 1000, 1000, heads=(8, 8))
    scales = {"q_scale": scale_array(rng, (8,)), "v_scale": 2.0}
    want = [attention(*x, causal=True, **scales) for x in ((q, k, v), others)]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    results: list[Any] = []
    for _ in range(40):
        for stream in streams:
            with stream:
                results.append([attention(*x, causal=True, **scales) for x in ((q, k, v), others)])
    cupy.cuda.Device().synchronize()
    assert all(bool((x == y).all()) for pair in results for x, y in zip(pair, want, strict=True))


@on_tensor_cores
@by_rule
@pytest.mark.parametrize("how", ["causal", "mask", "sequences"])
def test_fp8_a_call_can_be_captured_in_a_graph_with_other_work_in_between(how, rng) -> None:
    import cupy

    q, k, v = operands(rng, 500, 500, heads=(4, 2))
    options: dict[str, Any] = {"causal": True, "q_scale": scale_array(rng, (4,)), "v_scale": scale_array(rng, (2,))}
    if how == "mask":
        options["mask"] = random_mask(rng, (1, 4), (500, 500), (64, 64))
    if how == "sequences":
        q, k, v = (cupy.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
        options |= {name: cupy.asarray([0, 100, 100, 500], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    want = attention(q, k, v, **options)
    out = cupy.empty_like(want)
    again = [normal(rng, x.shape) for x in (q, k, v)]
    want_again = attention(*again, **options)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attention(q, k, v, out=out, **options)
        stream.synchronize()
        stream.begin_capture()
        attention(q, k, v, out=out, **options)
        graph = stream.end_capture()
        # What the call took and gave back during the capture now belongs to others, and the graph must not write there.
        others = [cupy.full(n, 7, np.int8) for n in (64, 600, 1100, 5000, 128 * 512, 2 * 128 * 512) for _ in range(40)]
        for _ in range(3):
            out.fill(np.nan)
            graph.launch()
            attention(*again, **options)
        stream.synchronize()
        assert bool((out == want).all())
        for x, y in zip((q, k, v), again, strict=True):  # the graph reads what is there when it runs
            x[...] = y
        graph.launch()
        stream.synchronize()
        assert bool((out == want_again).all())
        assert all(bool((x == 7).all()) for x in others)


# ------------------------------------------------------------------------------------------------- bad input
def zeros(*sizes: int, dtype: Any = U8) -> Any:
    import cupy

    return cupy.zeros(sizes, dtype)


def attempt(**changes: Any) -> Any:
    """A good call with some of its arguments replaced."""
    arguments = {"q": zeros(2, 4, 5, 64), "k": zeros(2, 2, 7, 64), "v": zeros(2, 2, 7, 64), "q_scale": 1.0} | changes
    return attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
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


@on_tensor_cores
@pytest.mark.parametrize(("call", "error", "text"), REFUSED, ids=[f"{n}: {r[2]}" for n, r in enumerate(REFUSED)])
def test_fp8_bad_input_is_refused_before_anything_is_launched(call, error, text, monkeypatch) -> None:
    from bsrgemm._attention import launch as attention_launch

    def launched(*call: Any) -> None:
        raise AssertionError("a kernel would have run")

    monkeypatch.setattr(attention_launch, "forward", launched)
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)


@on_tensor_cores
def test_fp8_the_good_call_that_bad_ones_are_made_from_is_good() -> None:
    assert attempt().shape == (2, 4, 5, 64)
    assert served_by(SM90)
