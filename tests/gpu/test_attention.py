"""The attention kernels against float64 on the card: odd lengths, every head dim, masks, garbage, poisoned outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm._attention.attention import attention
from bsrgemm.dtypes import BFLOAT16

pytestmark = pytest.mark.gpu

F16, F32, F64 = (np.dtype(x) for x in ("float16", "float32", "float64"))
SM90, SM80, SIMT = "attention_sm90", "attention_sm80", "attention_simt"
LENGTHS = (1, 63, 64, 127, 128, 129, 300, 515, 1000)
#: A number that no result has, beyond the view that is written.
GUARD = 113.0


def kernel(*names: str) -> Any:
    return pytest.mark.kernel(*names)


def some_under_memcheck(every: Any, some: Any) -> list[Any]:
    """Parameters of which a few, since they take ten times as long there, also run under memcheck."""
    return [pytest.param(x, id=str(x), marks=pytest.mark.sanitizer if x in some else ()) for x in every]


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """The plans that the calls of this test make."""
    from bsrgemm._attention import launch as attention_launch

    made: dict[Any, Any] = {}
    monkeypatch.setattr(attention_launch, "_plans", made)
    return made


@pytest.fixture(autouse=True)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small problems with the tiles of large ones ("many"), with the small tiles that they have ("few"), or by rule."""
    from bsrgemm._attention import heuristics as attention_heuristics
    from bsrgemm._attention import launch as attention_launch

    wanted = getattr(request, "param", "many")
    if wanted != "rule":
        monkeypatch.setattr(attention_heuristics, "_FEW_ROWS", 0 if wanted == "many" else 10**9)
        monkeypatch.setattr(attention_heuristics, "_FEW_KEYS", 0)
        monkeypatch.setattr(attention_heuristics, "SHORT_KEYS", 0)
        monkeypatch.setattr(attention_launch, "_FEW_BLOCKS", -1)
    return wanted


by_rule = pytest.mark.parametrize("shape", ["rule"], indirect=True)
both_shapes = pytest.mark.parametrize("shape", ["many", "few"], indirect=True)


def served_by(name: str) -> bool:
    """Did all calls so far run on that kernel? Cards that are no Hopper have the portable one in its place."""
    import cupy

    from bsrgemm._attention import launch as attention_launch

    names = {plan.config.spec().entry for plan in attention_launch._plans.values()}
    if name == SM90 and cupy.cuda.Device().compute_capability != "90":
        name = SM80
    return names == {name}


# ------------------------------------------------------------------------------------------------- reference
def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = F16, size: float = 1.0) -> Any:
    import cupy

    return cupy.asarray((size * rng.standard_normal(shape, np.float32)).astype(dtype))


def operands(
    rng: np.random.Generator,
    S_q: int,
    S_k: int,
    D: int = 128,
    D_v: int | None = None,
    *,
    B: int = 1,
    heads: tuple[int, int] = (2, 1),
    dtype: Any = F16,
) -> list[Any]:
    """q, k and v in "bhsd"."""
    shapes = ((B, heads[0], S_q, D), (B, heads[1], S_k, D), (B, heads[1], S_k, D if D_v is None else D_v))
    return [normal(rng, shape, dtype) for shape in shapes]


def seen_keys(
    S_q: int,
    S_k: int,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    align: str = "bottom-right",
    mask: BlockMask | None = None,
    H_q: int = 1,
) -> Any:
    """Booleans (S_q, S_k), or (batch, heads, S_q, S_k), from the definitions."""
    import cupy

    place = cupy.arange(S_q)[:, None] + (S_k - S_q if align == "bottom-right" else 0)
    key = cupy.arange(S_k)[None]
    left, right = window or (-1, -1)
    seen = cupy.ones((S_q, S_k), bool)
    if causal:
        seen = seen & (key <= place)
    if left >= 0:
        seen = seen & (key >= place - left)
    if right >= 0:
        seen = seen & (key <= place + right)
    if mask is None:
        return seen
    dense = mask.to_dense()
    if dense.ndim == 4 and dense.shape[1] not in (1, H_q):
        dense = cupy.repeat(dense, H_q // dense.shape[1], axis=1)
    return seen & dense


@dataclass
class Expected:
    """In float64: the results, ``weights @ abs(v)``, and the largest sum of absolute products of a row's scores."""

    out: Any
    lse: Any
    spread: Any
    size: Any


def reference(q: Any, k: Any, v: Any, seen: Any, scale: float | None = None, softcap: float | None = None) -> Expected:
    import cupy

    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    G = q.shape[1] // k.shape[1]
    q = q.astype(np.float64)
    k, v = (cupy.repeat(x.astype(np.float64), G, axis=1) for x in (k, v))
    scores = scale * (q @ k.swapaxes(2, 3))
    size = abs(scale) * (cupy.abs(q) @ cupy.abs(k).swapaxes(2, 3))
    if softcap is not None:
        scores = softcap * cupy.tanh(scores / softcap)
        size = size + softcap
    seen = cupy.broadcast_to(seen, scores.shape)
    scores = cupy.where(seen, scores, -np.inf)
    top = scores.max(axis=3, keepdims=True)
    weights = cupy.where(seen, cupy.exp(scores - cupy.where(seen.any(axis=3, keepdims=True), top, 0)), 0)
    total = weights.sum(axis=3, keepdims=True)
    weights = weights / cupy.where(total == 0, 1, total)
    lse = cupy.where(total == 0, -np.inf, cupy.log(cupy.where(total == 0, 1, total)) + top)[..., 0]
    return Expected(weights @ v, lse, weights @ cupy.abs(v), cupy.where(seen, size, 0).max(axis=3))


def eps(dtype: Any) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def assert_near(out: Any, lse: Any, want: Expected, v: Any, D: int, dtype: Any, on: str) -> None:
    """Within what rounding explains; rows that see nothing are 0 and -inf."""
    import cupy

    n, unit = v.shape[2], eps(lse.dtype)
    most = float(cupy.abs(v.astype(np.float64)).max()) if v.size else 0.0
    if on != SIMT:
        # Weights are rounded to the dtype, below 2**-14 to multiples of 2**-24; tensor cores truncate sums.
        wrong = eps(dtype) + 16 * unit * (want.size + 1 + n / 64)
        least = n * 2**-25 * most if dtype == F16 else 0.0
        lse_bound = 2e-4 + 16 * unit * want.size + 4 * unit * cupy.abs(want.lse)
    else:
        wrong = 4 * unit * ((D + 4) * want.size + n + 8)
        least = float(np.finfo(lse.dtype).tiny) * n * most
        lse_bound = wrong + 4 * unit * cupy.abs(want.lse)
    info = ml_dtypes.finfo(out.dtype)
    bound = (
        wrong[..., None] * want.spread + least + float(info.eps) * cupy.abs(want.out) + float(info.smallest_subnormal)
    )
    nothing = want.lse == -np.inf
    got = out.astype(np.float64)
    error = cupy.abs(got - want.out)
    assert bool((error <= bound).all()), (float(cupy.nanmax(error / bound)), int(cupy.isnan(got).sum()))
    assert bool(((got == 0).all(axis=3) | ~nothing).all())
    assert bool(((lse == -np.inf) == nothing).all())
    lse_error = cupy.where(nothing, 0, cupy.abs(cupy.where(nothing, 0, lse) - cupy.where(nothing, 0, want.lse)))
    assert bool((lse_error <= cupy.where(nothing, 0, lse_bound)).all()), float(lse_error.max())


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    import cupy

    return cupy.full(shape, np.nan, np.float32).astype(dtype)


def untouched(x: Any) -> bool:
    return bool((x.astype(np.float32) == GUARD).all())


def turned(x: Any, layout: str) -> Any:
    return x if layout == "bhsd" else x.swapaxes(1, 2)


def check(q: Any, k: Any, v: Any, checksum: Any = None, *, on: str = SM90, out: Any = None, **options: Any) -> Any:
    """Attention of operands in "bhsd" into a poisoned result, compared with float64; the result in "bhsd"."""
    layout = options.get("layout", "bhsd")
    dtype = np.dtype(options.pop("out_dtype", None) or q.dtype)
    if out is None:
        out = turned(poisoned((*q.shape[:3], v.shape[3]), dtype), layout)
    given = (turned(x, layout) for x in (q, k, v))
    got, lse = attention(*given, out=out, return_lse=True, **options)
    assert got is out
    assert lse.dtype == (F64 if F64 in (q.dtype, out.dtype) else F32)
    assert served_by(on)
    if checksum is not None:
        checksum(out)
        checksum(lse)
    band = {name: options[name] for name in ("causal", "window", "align", "mask") if name in options}
    seen = seen_keys(q.shape[2], k.shape[2], H_q=q.shape[1], **band)
    want = reference(q, k, v, seen, options.get("scale"), options.get("softcap"))
    assert_near(turned(out, layout), lse, want, v, q.shape[3], q.dtype, on)
    return turned(out, layout)


# ------------------------------------------------------------------------------------------------- lengths and bands
BANDS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "align": "top-left"},
    {"window": (100, 3)},
    {"window": (0, 0)},
    {"window": (-1, 70)},
    {"window": (200, -1), "align": "top-left"},
    {"window": (40, -1), "causal": True},
]


@kernel(SM90)
@both_shapes
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("S", some_under_memcheck(LENGTHS, [129]))
def test_bands_are_right_at_odd_lengths(S, D, rng, checksum) -> None:
    q, k, v = operands(rng, S, S, D)
    for band in BANDS:
        check(q, k, v, checksum, **band)


@kernel(SM90)
@both_shapes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(300, 777), (777, 300), (1, 1000), (515, 64), (129, 128), (64, 515)], ids=str)
def test_queries_and_keys_of_different_lengths(lengths, D, rng, checksum) -> None:
    q, k, v = operands(rng, *lengths, D)
    for band in BANDS:
        check(q, k, v, checksum, **band)


@kernel(SM90)
@pytest.mark.parametrize("heads", some_under_memcheck([(32, 8), (28, 4), (96, 96), (8, 1), (3, 3)], [(8, 1)]))
def test_heads_share_keys(heads, rng, checksum) -> None:
    for D, B in ((64, 1), (128, 3)):
        q, k, v = operands(rng, 200, 200, D, B=B, heads=heads)
        check(q, k, v, checksum, causal=True)
        check(q, k, v, checksum, window=(30, 40))


@kernel(SM90)
@by_rule
def test_more_tiles_than_multiprocessors_are_all_done(rng, checksum) -> None:
    q, k, v = operands(rng, 1000, 1000, 64, B=4, heads=(12, 4))  # 8 tiles of 48 heads
    check(q, k, v, checksum)
    check(q, k, v, checksum, causal=True)


# ------------------------------------------------------------------------------------------------- dims and dtypes
@kernel(SM90)
@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
@pytest.mark.parametrize("D", some_under_memcheck([64, 80, 96, 128, 192, 256, 72, 40, 8, 136, 248], [256]))
def test_head_dims(D, dtype, rng, checksum) -> None:
    q, k, v = operands(rng, 300, 300, D, dtype=dtype)
    check(q, k, v, checksum)
    check(q, k, v, checksum, causal=True)


@kernel(SM90)
@pytest.mark.parametrize(
    "dims",
    some_under_memcheck([(192, 128), (64, 128), (128, 64), (72, 56), (128, 256), (256, 64), (8, 200)], [(72, 56)]),
)
def test_values_of_another_dim(dims, rng, checksum) -> None:
    q, k, v = operands(rng, 260, 333, *dims)
    check(q, k, v, checksum)
    check(q, k, v, checksum, causal=True)


@kernel(SM90, SIMT)
@pytest.mark.parametrize("out_dtype", [F16, BFLOAT16, F32, F64], ids=str)
@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
def test_results_of_another_dtype(dtype, out_dtype, rng, checksum) -> None:
    on = SIMT if out_dtype == F64 else SM90
    q, k, v = operands(rng, 150, 210, 64, dtype=dtype)
    check(q, k, v, checksum, on=on, out_dtype=out_dtype, causal=True)
    asked = attention(q, k, v, out_dtype=out_dtype, causal=True)
    assert asked.dtype == out_dtype
    assert bool((asked.view(np.uint8) == check(q, k, v, on=on, out_dtype=out_dtype, causal=True).view(np.uint8)).all())


@kernel(SM90)
def test_the_result_is_the_same_with_and_without_lse(rng) -> None:
    q, k, v = operands(rng, 300, 400)
    out, _ = attention(q, k, v, causal=True, return_lse=True)
    assert bool((out == attention(q, k, v, causal=True)).all())


# ------------------------------------------------------------------------------------------------- memory layouts
def fused(rng: np.random.Generator, S: int, D: int) -> list[Any]:
    """q, k and v as they come out of one projection, (batch, length, 3, heads, head dim), as "bhsd" views."""
    x = normal(rng, (2, S, 3, 4, D))
    return [x[:, :, i].swapaxes(1, 2) for i in range(3)]


@kernel(SM90)
@pytest.mark.parametrize("D", [64, 128, pytest.param(80, marks=pytest.mark.sanitizer)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_and_views_that_the_copy_engine_can_read(layout, D, rng, checksum) -> None:
    import cupy

    for q, k, v in (
        [cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in operands(rng, 200, 260, D, B=2)],
        fused(rng, 200, D),
        [x[1:, ::2, 3:203] for x in operands(rng, 220, 220, D, B=3, heads=(4, 4))],
        [x[..., 8 : 8 + D] for x in operands(rng, 129, 200, D + 16)],
    ):
        check(q, k, v, checksum, layout=layout, causal=True)
    for q, k, v in ([x.swapaxes(0, 1) for x in operands(rng, 130, 140, D, B=3, heads=(2, 2))],):
        check(q, k, v, checksum, layout=layout)


def spoiled_strides(x: Any, how: str) -> Any:
    """The same values where the copy engine cannot read them; the gaps are poisoned."""
    import cupy

    B, H, S, D = x.shape
    if how == "shifted":
        room = poisoned((x.size + 1,), x.dtype)
        view = room[1:].reshape(x.shape)
    elif how == "columns":
        return cupy.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)
    elif how == "every second column":
        view = poisoned((B, H, S, 2 * D), x.dtype)[..., ::2]
    elif how == "backwards":
        view = poisoned((B, H, S, D), x.dtype)[:, :, ::-1]
    else:
        view = poisoned((B, H, S, D + 3), x.dtype)[..., :D]
    view[...] = x
    return view


@kernel(SIMT)
@pytest.mark.parametrize("dtype", [F16, BFLOAT16, F32, F64], ids=str)
@pytest.mark.parametrize(
    "how",
    ["shifted", "columns", "every second column", "backwards", "odd rows"],
)
def test_strides_that_nothing_but_the_plain_kernel_can_read(how, dtype, rng, checksum) -> None:
    q, k, v = operands(rng, 70, 90, 40, 24, dtype=dtype)
    for name in "qkv":
        given = [spoiled_strides(x, how) if name == n else x for n, x in zip("qkv", (q, k, v), strict=True)]
        check(*given, checksum, on=SIMT, causal=True)
    out = spoiled_strides(poisoned((1, 2, 70, 24), dtype), how)
    check(*(spoiled_strides(x, how) for x in (q, k, v)), checksum, on=SIMT, out=out)


@kernel(SM90)
def test_one_head_of_keys_spread_over_many_without_a_copy(rng) -> None:
    import cupy

    q, k, v = operands(rng, 130, 150, 64, heads=(4, 1))
    want = attention(q, k, v)
    spread = [cupy.broadcast_to(x, (1, 4, *x.shape[2:])) for x in (k, v)]  # a stride of 0
    got = attention(q, *spread)
    assert float(cupy.abs(got.astype(np.float32) - want.astype(np.float32)).max()) < 4e-3


@kernel(SM90, SIMT)
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
@kernel(SM90)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("D", some_under_memcheck([64, 72, 128, 256], [72]))
def test_nothing_beyond_out_is_written(D, layout, rng, plans) -> None:
    import cupy

    S = 190
    q, k, v = operands(rng, S, 200, D, B=2)
    for dtype, column in ((F16, 8), (F16, 1), (F32, 8), (BFLOAT16, 8)):
        shape = (2, 2, S + 70, D + 16) if layout == "bhsd" else (2, S + 70, 2, D + 16)
        room = cupy.full(shape, GUARD, np.float32).astype(dtype)
        rows = (slice(None),) * (2 if layout == "bhsd" else 1)
        for column_step in (1, -1):
            view = room[(*rows, slice(32, 32 + S), ..., slice(column, column + D))][..., ::column_step]
            view[...] = np.nan
            plans.clear()
            check(q, k, v, layout=layout, out=view, causal=True)
            (plan,) = plans.values()
            if hasattr(plan.config, "tiles"):
                assert plan.config.tiles == (dtype == F16 and column == 8 and column_step == 1)
            view[...] = GUARD
            assert untouched(room)


# ------------------------------------------------------------------------------------------------- scores
@kernel(SM90)
@both_shapes
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "how",
    [{"softcap": 20.0}, {"softcap": 0.5}, {"softcap": 5.0, "scale": -1.0}]
    + [{"scale": x} for x in (-0.2, 0.0, 0.69, 0.7, 1.5, 1e-30, 2e-38)],
    ids=str,
)
def test_softcap_and_any_scale(how, D, rng, checksum) -> None:
    q, k, v = operands(rng, 300, 400, D)
    for band in ({}, {"causal": True}, {"window": (90, 5)}):
        check(q, k, v, checksum, **how, **band)


@kernel(SIMT)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_softcap_and_any_scale_on_the_plain_cores(dtype, rng, checksum) -> None:
    q, k, v = operands(rng, 60, 80, 24, dtype=dtype)
    for how in ({"softcap": 20.0}, {"softcap": 0.5, "scale": 3.0}, {"scale": -0.7}, {"scale": 0.0}, {"scale": 5.0}):
        check(q, k, v, checksum, on=SIMT, causal=True, **how)


def rounded_weights_error(q: Any, k: Any, v: Any, seen: Any, scale: float, want: Any) -> float:
    """The largest error of a softmax in float32 whose weights are rounded to the dtype before they meet the values."""
    import cupy

    G = q.shape[1] // k.shape[1]
    wide = [x.astype(np.float32) for x in (q, *(cupy.repeat(x.astype(np.float32), G, axis=1) for x in (k, v)))]
    scores = cupy.where(seen, (wide[0] @ wide[1].swapaxes(2, 3)) * np.float32(scale), -np.inf)
    weights = cupy.where(seen, cupy.exp(scores - scores.max(axis=3, keepdims=True)), np.float32(0))
    out = weights.astype(q.dtype).astype(np.float32) @ wide[2] / weights.sum(axis=3, keepdims=True)
    return float(cupy.abs(out.astype(q.dtype).astype(np.float64) - want).max())


#: What is added to the scores of 1500 keys.
CLIMBS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "a rising ramp": lambda rng: np.linspace(0, 300, 1500),
    "a falling ramp": lambda rng: np.linspace(300, 0, 1500),
    "a slow ramp": lambda rng: np.linspace(0, 60, 1500),
    "steps of 9 a tile": lambda rng: np.arange(1500) // 128 * 9.0,
    "steps of 20 a tile": lambda rng: np.arange(1500) // 64 * 20.0,
    "one huge key at the end": lambda rng: np.append(np.zeros(1499), 1e4),
    "one huge key at the start": lambda rng: np.append(1e4, np.zeros(1499)),
    "a few huge keys": lambda rng: np.where(rng.random(1500) < 0.01, rng.uniform(0, 1e4, 1500), 0),
    "from -1e4 to 1e4": lambda rng: rng.uniform(-1e4, 1e4, 1500),
    "very low": lambda rng: np.full(1500, -1e4),
    "nothing": lambda rng: np.zeros(1500),
}


@kernel(SM90)
@both_shapes
@pytest.mark.parametrize(("dtype", "D"), [(F16, 64), (F16, 128), (F16, 256), (BFLOAT16, 128)], ids=str)
@pytest.mark.parametrize("climb", CLIMBS)
def test_maxima_that_climb_are_as_exact_as_any(climb, D, dtype, rng, checksum) -> None:
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
                checksum(out)
                seen = seen_keys(300, 1500, **band)
                want = reference(q, k, v, seen, scale).out
                error = float(cupy.abs(out.astype(np.float64) - want).max())
                simple = rounded_weights_error(q, k, v, seen, scale, want)
                assert error <= 2.05 * eps(dtype) + 1.5 * simple, (band, scale, error, simple)


@kernel(SM90)
@pytest.mark.parametrize("D", some_under_memcheck([64, 128, 256], [64]))
def test_large_inputs_and_constant_rows(D, rng, checksum) -> None:
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
        checksum(out)
        want = reference(x, y, v, seen).out
        error = float(cupy.abs(out.astype(np.float64) - want).max())
        assert error <= 2e-3 + 1.5 * rounded_weights_error(x, y, v, seen, scale, want), change


@kernel(SM90)
def test_values_that_fill_float16_do_not_overflow_on_the_way(rng) -> None:
    import cupy

    q, k = cupy.zeros((1, 1, 130, 64), F16), cupy.zeros((1, 1, 3000, 64), F16)
    assert bool((attention(q, k, cupy.full((1, 1, 3000, 64), 65504, F16)) == 65504).all())


# ------------------------------------------------------------------------------------------------- masks
MASKS: dict[str, Callable[[int, int, Any], BlockMask]] = {
    "full": lambda q, k, b: BlockMask.full(q, k, block=b, device="cuda"),
    "causal": lambda q, k, b: BlockMask.causal(q, k, block=b, device="cuda"),
    "top-left": lambda q, k, b: BlockMask.causal(q, k, align="top-left", block=b, device="cuda"),
    "window": lambda q, k, b: BlockMask.window(q, k, left=140, right=7, block=b, device="cuda"),
    "sinks": lambda q, k, b: BlockMask.sinks(q, k, count=5, block=b, device="cuda"),
    "prefix": lambda q, k, b: BlockMask.prefix(q, k, length=170, block=b, device="cuda"),
    "global": lambda q, k, b: BlockMask.global_tokens(q, k, tokens=[3, 4, 99], block=b, device="cuda"),
    "dilated": lambda q, k, b: BlockMask.dilated(q, k, count=30, dilation=5, block=b, device="cuda"),
    "random": lambda q, k, b: BlockMask.random(q, k, per_row=1 if b == 256 else 2, block=b, device="cuda"),
    "random heads": lambda q, k, b: BlockMask.random(q, k, per_row=1, heads=(2, 4), block=b, device="cuda"),
    "inverse": lambda q, k, b: ~BlockMask.window(q, k, left=60, right=20, block=b, device="cuda"),
    "none": lambda q, k, b: ~BlockMask.full(q, k, block=b, device="cuda"),
}


@kernel(SM90)
@both_shapes
@pytest.mark.parametrize("block", [16, 32, (48, 80), 64, 128, (256, 64), 256], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_constructors_of_masks(name, block, rng, checksum) -> None:
    for S_q, S_k, D in ((333, 401, 128), (260, 130, 256)):
        q, k, v = operands(rng, S_q, S_k, D, B=2, heads=(4, 2))
        mask = MASKS[name](S_q, S_k, block)
        check(q, k, v, checksum, mask=mask)
        check(q, k, v, checksum, mask=mask, causal=True)
        check(q, k, v, checksum, mask=mask, window=(100, 30), align="top-left")


def random_mask(
    rng: np.random.Generator, heads: tuple[int, int], shape: tuple[int, int], block: tuple[int, int]
) -> BlockMask:
    """Blocks that are empty, whole or random."""
    import cupy

    grid = (*heads, *(-(-n // b) for n, b in zip(shape, block, strict=True)))
    fill = rng.choice([0.0, 0.0, 1.0, 1.0, 0.5, 0.05], grid).repeat(block[0], axis=2).repeat(block[1], axis=3)
    allowed = rng.random((*heads, *shape)) < fill[:, :, : shape[0], : shape[1]]
    return BlockMask.from_dense(cupy.asarray(allowed), block=block)


@kernel(SM90, SIMT)
@both_shapes
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("heads", some_under_memcheck([(1, 1), (2, 1), (1, 2), (1, 4), (2, 2), (2, 4)], [(2, 4)]))
def test_patterns_per_batch_and_head(heads, dtype, rng, checksum) -> None:
    on = SM90 if dtype == F16 else SIMT
    q, k, v = operands(rng, 200, 270, 64, B=2, heads=(4, 2), dtype=dtype)
    for block in ((16, 16), (128, 128), (64, 96), (240, 160)):
        mask = random_mask(rng, heads, (200, 270), block)
        check(q, k, v, checksum, on=on, mask=mask)
        check(q, k, v, checksum, on=on, mask=mask, window=(60, 60))


@kernel(SM90)
@both_shapes
@pytest.mark.parametrize("density", [0.5, 0.01, 0.0005])
def test_masks_by_elements_with_rows_that_see_nothing(density, rng, checksum) -> None:
    import cupy

    q, k, v = operands(rng, 515, 700)
    for block in (16, 64, 128, 256):
        mask = BlockMask.from_dense(cupy.asarray(rng.random((515, 700)) < density), block=block)
        for options in ({}, {"causal": True}, {"scale": -0.1}, {"softcap": 5.0}):
            check(q, k, v, checksum, mask=mask, **options)


@kernel(SM90)
def test_masks_from_bsr_from_indices_stacked_and_combined(rng, checksum) -> None:
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
        check(q, k, v, checksum, mask=mask)
        check(q, k, v, checksum, mask=mask, causal=True)


@kernel(SM90)
def test_one_mask_serves_several_head_dims_and_is_taken_apart_once(rng, plans) -> None:
    mask = BlockMask.window(300, left=99, right=0, block=64, device="cuda")
    for D in (64, 256, 128, 256):
        check(*operands(rng, 300, 300, D), mask=mask)
    assert set(mask.__dict__["_tiles"]) == {(plan.config.tile_q, plan.config.tile_k) for plan in plans.values()}


@kernel(SM90, SIMT)
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
@kernel(SM90, SIMT)
@both_shapes
@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_rows_that_see_nothing_are_zero_whatever_the_operands_hold(dtype, rng) -> None:
    import cupy

    q, k, v = (cupy.full((1, 2, n, 64), np.nan, dtype) for n in (300, 100, 100))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert bool((out[:, :, :200] == 0).all()) and bool((lse[:, :, :200] == -np.inf).all())
    assert bool(cupy.isnan(out[:, :, 200:]).all()) and bool(cupy.isnan(lse[:, :, 200:]).all())
    nobody = ~BlockMask.full(300, 100, device="cuda")
    out, lse = attention(q, k, v, mask=nobody, return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -np.inf).all())


@kernel(SIMT)
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


@kernel(SM90, SIMT)
@pytest.mark.parametrize("D", [64, 80])
@pytest.mark.parametrize("dtype", [F16, BFLOAT16, F32], ids=str)
@pytest.mark.parametrize("how", ["full", "causal", "window", "mask", "blocks"])
def test_nan_and_infinity_reach_the_queries_that_see_them_and_no_others(how, dtype, D, rng) -> None:
    import cupy

    S_q, S_k = 200, 260
    mask = {
        "mask": lambda: BlockMask.from_dense(cupy.asarray(rng.random((S_q, S_k)) < 0.3), block=64),
        "blocks": lambda: BlockMask.random(S_q, S_k, per_row=3, block=32, device="cuda"),
    }.get(how, lambda: None)()
    options = {"causal": how == "causal", "window": (20, 30) if how == "window" else None, "mask": mask}
    seen = seen_keys(S_q, S_k, **options)
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


@kernel(SM90)
@pytest.mark.sanitizer
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_garbage_behind_the_diagonal_changes_nothing_before_it(bad, rng) -> None:
    import cupy

    q, k, v = operands(rng, 300, 300, 64)
    want = reference(q, k, v, seen_keys(300, 300, causal=True))
    k[:, :, 171:] = v[:, :, 171:] = bad
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    head = Expected(*(x[:, :, :171] for x in (want.out, want.lse, want.spread, want.size)))
    assert_near(out[:, :, :171], lse[:, :, :171], head, v[:, :, :171], 64, F16, SM90)
    assert not bool(cupy.isfinite(out[:, :, 171:]).any())


@kernel(SM90)
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
def sequences_seen(q_bounds: list[int], k_bounds: list[int], **band: Any) -> Any:
    """Booleans (queries, keys): each sequence sees its own keys, as the band says."""
    import cupy

    seen = cupy.zeros((q_bounds[-1], k_bounds[-1]), bool)
    for (a, b), (c, d) in zip(itertools.pairwise(q_bounds), itertools.pairwise(k_bounds), strict=True):
        if a < b and c < d:
            seen[a:b, c:d] = seen_keys(b - a, d - c, **band)
    return seen


SEQUENCES = {
    "alike": ([0, 5, 130, 700, 0, 64], None),
    "more keys": ([1, 128, 0, 129, 40], [300, 128, 50, 0, 515]),
    "one": ([257], None),
    "many": ([3, 1, 0, 2] * 25, [1, 4, 2, 0] * 25),
    "none of them long": ([0, 0, 7, 0], [9, 0, 3, 0]),
}


@kernel(SM90, SIMT)
@pytest.mark.parametrize("dtype", [F16, BFLOAT16, F32], ids=str)
@pytest.mark.parametrize("name", some_under_memcheck(SEQUENCES, ["more keys"]))
def test_each_sequence_sees_its_own_keys(name, dtype, rng, checksum) -> None:
    import cupy

    on = SIMT if dtype == F32 else SM90
    lengths_q, lengths_k = SEQUENCES[name]
    q_bounds, k_bounds = (np.cumsum([0, *x]).tolist() for x in (lengths_q, lengths_k or lengths_q))
    for D, D_v in ((64, 64), (128, 128), (192, 128)) if dtype == F16 else ((64, 64),):
        q = normal(rng, (q_bounds[-1], 4, D), dtype)
        k, v = (normal(rng, (k_bounds[-1], 2, d), dtype) for d in (D, D_v))
        for band in ({}, {"causal": True}, {"window": (30, 9)}, {"causal": True, "align": "top-left"}):
            want = reference(*(x[None].swapaxes(1, 2) for x in (q, k, v)), sequences_seen(q_bounds, k_bounds, **band))
            for where in (list, np.array, cupy.asarray, lambda x: cupy.asarray(x, dtype=np.int32)):
                room = cupy.full((q_bounds[-1] + 150, 4, D_v), GUARD, np.float32).astype(dtype)
                out = room[70 : 70 + q_bounds[-1]]
                out[...] = np.nan
                bounds = {"cu_seqlens_q": where(q_bounds), "cu_seqlens_k": where(k_bounds)}
                _, lse = attention(q, k, v, out=out, return_lse=True, **bounds, **band)
                assert served_by(on)
                checksum(out)
                turned_v = v[None].swapaxes(1, 2)
                assert_near(out[None].swapaxes(1, 2), lse[None], want, turned_v, D, dtype, on)
                assert untouched(room[:70]) and untouched(room[70 + q_bounds[-1] :])


@kernel(SM90, SIMT)
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


# ------------------------------------------------------------------------------------------------- the plain kernel
@kernel(SIMT)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize(
    "dims", some_under_memcheck([(1, 1), (8, 8), (33, 20), (64, 64), (128, 300), (270, 5)], [(33, 20)])
)
def test_wide_dtypes_of_any_dims(dims, dtype, rng, checksum) -> None:
    q, k, v = operands(rng, 130, 170, *dims, B=2, heads=(4, 2), dtype=dtype)
    for band in BANDS:
        check(q, k, v, checksum, on=SIMT, **band)


@kernel(SIMT)
@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
@pytest.mark.parametrize("dims", [(20, 24), (300, 64), (64, 264), (1, 1), (67, 3)], ids=str)
def test_dims_that_the_tensor_cores_do_not_take(dims, dtype, rng, checksum) -> None:
    q, k, v = operands(rng, 130, 170, *dims, dtype=dtype)
    check(q, k, v, checksum, on=SIMT, causal=True)
    check(q, k, v, checksum, on=SIMT, out_dtype=F32)


@kernel(SIMT)
@pytest.mark.parametrize("block", [16, (48, 80), 128, 256], ids=str)
@pytest.mark.parametrize("name", ["causal", "global", "dilated", "random heads", "none"])
def test_masks_on_the_plain_cores(name, block, rng, checksum) -> None:
    q, k, v = operands(rng, 201, 230, 24, B=2, heads=(4, 2), dtype=F32)
    mask = MASKS[name](201, 230, block)
    check(q, k, v, checksum, on=SIMT, mask=mask)
    check(q, k, v, checksum, on=SIMT, mask=mask, causal=True, window=(50, -1))


# ------------------------------------------------------------------------------------------------- repeats and streams
def differing(call: Callable[[], Any], first: Any, times: int) -> int:
    """In how many elements the results of so many calls differ from the first one, bit by bit."""
    import cupy

    count = cupy.zeros((), np.int64)
    for _ in range(times):
        count += (call().view(np.uint16) != first.view(np.uint16)).sum()
    return int(count)


@kernel(SM90)
@both_shapes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("how", ["full", "causal", "mask", "sequences"])
def test_results_repeat_bit_by_bit(how, D, rng) -> None:
    import cupy

    q, k, v = operands(rng, 1000, 1000, D, B=2, heads=(8, 4))
    options: dict[str, Any] = {"causal": how == "causal"}
    if how == "mask":
        options["mask"] = random_mask(rng, (1, 8), (1000, 1000), (64, 64))
    if how == "sequences":
        q, k, v = (cupy.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
        options |= {name: cupy.asarray([0, 100, 100, 515, 1000]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    first = attention(q, k, v, **options)
    assert served_by(SM90)
    assert differing(lambda: attention(q, k, v, **options), first, 1000 if how != "sequences" else 200) == 0


@kernel(SM90)
@both_shapes
@pytest.mark.parametrize("D", [64, 128])
def test_results_repeat_bit_by_bit_beside_rows_that_are_done_again(D, rng) -> None:
    q, k, v = operands(rng, 1000, 1000, D, B=2, heads=(8, 8))
    v[:, ::3, 500] = np.inf  # some tiles of some heads, by chance before this tile or that
    k[:, 1::3, 700] = np.nan
    first = attention(q, k, v, causal=True)
    assert differing(lambda: attention(q, k, v, causal=True), first, 300) == 0


@kernel(SIMT)
def test_plain_results_repeat_bit_by_bit(rng) -> None:
    q, k, v = operands(rng, 200, 200, 33, dtype=F32)
    first = attention(q, k, v, causal=True)
    assert differing(lambda: attention(q, k, v, causal=True), first, 100) == 0


@kernel(SM90)
@both_shapes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("how", ["full", "causal", "climbing", "mask", "nan", "sequences"])
def test_pipeline_survives_delays(how, D, rng, monkeypatch) -> None:
    import cupy

    from bsrgemm._attention import heuristics as attention_heuristics
    from bsrgemm._attention import launch as attention_launch
    from bsrgemm._kernels import jit

    q, k, v = operands(rng, 700, 700, D, B=2, heads=(40, 8))
    options: dict[str, Any] = {"causal": how in ("causal", "nan")}
    if how == "climbing":
        k *= cupy.linspace(0, 20, 700).astype(F16)[:, None]
    if how == "mask":
        options["mask"] = random_mask(rng, (1, 40), (700, 700), (64, 64))
    if how == "nan":
        v[:, ::3, 333] = np.nan
    if how == "sequences":
        q, k, v = (cupy.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
        options |= {name: cupy.asarray([0, 100, 100, 515, 700]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    calm = attention(q, k, v, **options)
    plain = attention_heuristics.AttentionSm90.spec

    def stressed(config: Any) -> Any:
        spec = plain(config)
        return jit.KernelSpec(spec.source, spec.entry, (*spec.defines, ("STRESS", 1)))

    monkeypatch.setattr(attention_heuristics.AttentionSm90, "spec", stressed)
    monkeypatch.setattr(attention_launch, "_plans", {})
    assert differing(lambda: attention(q, k, v, **options), calm, 10) == 0


@kernel(SM90)
@by_rule
def test_several_streams_share_a_mask(rng) -> None:
    import cupy

    q, k, v = operands(rng, 1000, 1000, heads=(8, 8))
    mask = random_mask(rng, (1, 8), (1000, 1000), (64, 64))
    alone = BlockMask(
        mask._backend, mask.shape, mask.block, mask.heads, mask.indptr, mask.indices, mask.kinds, mask.bits
    )
    want = [attention(q, k, v, causal=True), attention(q, k, v, mask=alone)]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    results: list[Any] = []
    for _ in range(40):
        for stream in streams:
            with stream:
                results.append((attention(q, k, v, causal=True), attention(q, k, v, mask=mask)))
    cupy.cuda.Device().synchronize()
    assert all(bool((x == y).all()) for pair in results for x, y in zip(pair, want, strict=True))


@kernel(SM90, SIMT)
@by_rule
@pytest.mark.parametrize("how", ["causal", "mask", "sequences", "plain cores"])
def test_a_call_can_be_captured_in_a_graph_and_runs_on_the_current_stream(how, rng) -> None:
    import cupy

    q, k, v = operands(rng, 500, 500, heads=(4, 2), dtype=F32 if how == "plain cores" else F16)
    options: dict[str, Any] = {"causal": True}
    if how == "mask":
        options["mask"] = random_mask(rng, (1, 4), (500, 500), (64, 64))
    if how == "sequences":
        q, k, v = (cupy.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
        options |= {name: cupy.asarray([0, 100, 100, 500], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    want = attention(q, k, v, **options)
    out = cupy.empty_like(want)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attention(q, k, v, out=out, **options)
        stream.synchronize()
        stream.begin_capture()
        attention(q, k, v, out=out, **options)
        graph = stream.end_capture()
        # What the call took and gave back during the capture now belongs to others, and the graph must not write there.
        others = [cupy.full(n, 7, np.int8) for n in (64, 600, 1100, 5000) for _ in range(40)]
        for _ in range(3):
            out.fill(np.nan)
            graph.launch()
        stream.synchronize()
        assert bool((out == want).all())
        assert all(bool((x == 7).all()) for x in others)


# ------------------------------------------------------------------------------------------------- bad input
def attempt(**changes: Any) -> Any:
    """A good call with some of its arguments replaced."""
    import cupy

    good = {"q": (2, 4, 5, 64), "k": (2, 2, 7, 64), "v": (2, 2, 7, 64)}
    arguments = {name: cupy.zeros(shape, F16) for name, shape in good.items()} | changes
    return attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def zeros(*shape: int, dtype: Any = F16) -> Any:
    import cupy

    return cupy.zeros(shape, dtype)


def packed(**changes: Any) -> Any:
    bounds = {"cu_seqlens_q": zeros(3, dtype=int), "cu_seqlens_k": zeros(3, dtype=int)}
    return attempt(**{"q": zeros(5, 4, 64), "k": zeros(7, 2, 64), "v": zeros(7, 2, 64), **bounds, **changes})


def small_mask(q: int = 5, k: int = 7, heads: tuple[int, int] = (1, 1), device: str = "cuda") -> BlockMask:
    return BlockMask.random(q, k, per_row=1, heads=heads, block=16, device=device)


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
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


@kernel(SM90, SIMT)
@pytest.mark.parametrize(("call", "error", "text"), REFUSED, ids=[f"{n}: {r[2]}" for n, r in enumerate(REFUSED)])
def test_bad_input_is_refused_before_anything_is_launched(call, error, text, monkeypatch) -> None:
    from bsrgemm._attention import launch as attention_launch

    def launched(*call: Any) -> None:
        raise AssertionError("a kernel would have run")

    monkeypatch.setattr(attention_launch, "forward", launched)
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)


@kernel(SM90)
def test_the_good_calls_that_bad_ones_are_made_from_are_good() -> None:
    assert attempt(mask=small_mask(heads=(2, 4))).shape == (2, 4, 5, 64)
    assert packed().shape == (5, 4, 64)
    assert served_by(SM90)


@kernel(SM90)
def test_out_that_overlaps_an_operand_is_refused(rng) -> None:
    q, k, v = operands(rng, 64, 64, 64, heads=(2, 2))
    for name, x in (("q", q), ("k", k), ("v", v)):
        with pytest.raises(ValueError, match=f"out: overlaps {name}"):
            attention(q, k, v, out=x)
