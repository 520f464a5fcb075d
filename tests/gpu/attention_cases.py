"""Operands, bands, masks and sequences for tests of attention on a card, and the reference in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bsrgemm import BlockMask
from bsrgemm._attention.attention import attention
from bsrgemm.dtypes import BFLOAT16

from .marks import on_hopper

F16, F32, F64 = (np.dtype(x) for x in ("float16", "float32", "float64"))
SM90, SM80, SIMT = "attention_sm90", "attention_sm80", "attention_simt"
LENGTHS = (1, 63, 64, 127, 128, 129, 300, 515, 1000)
#: A number that no result has, beyond the view that is written.
GUARD = 113.0
#: fp8 numbers are bytes; this one is NaN.
U8, NAN = np.dtype(np.uint8), 0x7F


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


def kernels_used() -> set[str]:
    """The kernels of all calls so far."""
    from bsrgemm._attention import launch as attention_launch

    return {plan.config.spec().entry for plan in attention_launch._plans.values()}


def served_by(name: str) -> bool:
    """Did all calls so far run on that kernel? Other cards than Hopper have the portable one in its place."""
    return kernels_used() == {SM80 if name == SM90 and not on_hopper() else name}


# ------------------------------------------------------------------------------------------------- reference
def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = F16, size: float = 1.0) -> Any:
    import cupy

    return cupy.asarray((size * rng.standard_normal(shape, np.float32)).astype(dtype))


def operand_shapes(
    S_q: int, S_k: int, D: int = 128, D_v: int | None = None, *, B: int = 1, heads: tuple[int, int] = (2, 1)
) -> tuple[tuple[int, ...], ...]:
    """Those of q, k and v in "bhsd"."""
    return (B, heads[0], S_q, D), (B, heads[1], S_k, D), (B, heads[1], S_k, D if D_v is None else D_v)


def operands(rng: np.random.Generator, *sizes: int, dtype: Any = F16, **how: Any) -> list[Any]:
    """q, k and v in "bhsd", of the sizes of `operand_shapes`."""
    return [normal(rng, shape, dtype) for shape in operand_shapes(*sizes, **how)]


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


@dataclass
class Softmax:
    """In float64, for each query and key: its weight, whether it is seen, and the sum of its absolute products."""

    weights: Any
    seen: Any
    size: Any
    #: for each query
    lse: Any


def softmax(q: Any, k: Any, seen: Any, scale: float | None, softcap: float | None) -> Softmax:
    """The weights of float64 operands in "bhsd" that have the same heads."""
    import cupy

    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
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
    lse = cupy.where(some, cupy.log(total) + top, -np.inf)[..., 0]
    return Softmax(weights / total, seen, size, lse)


def reference(q: Any, k: Any, v: Any, seen: Any, scale: float | None = None, softcap: float | None = None) -> Expected:
    import cupy

    G = q.shape[1] // k.shape[1]
    k, v = (cupy.repeat(x.astype(np.float64), G, axis=1) for x in (k, v))
    found = softmax(q.astype(np.float64), k, seen, scale, softcap)
    size = cupy.where(found.seen, found.size + (softcap or 0.0), 0).max(axis=3)
    return Expected(found.weights @ v, found.lse, found.weights @ cupy.abs(v), size)


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
    """Memory full of NaN; bytes hold that of fp8."""
    import cupy

    return cupy.full(shape, NAN, U8) if dtype == U8 else cupy.full(shape, np.nan, np.float32).astype(dtype)


def untouched(x: Any) -> bool:
    return bool((x.astype(np.float32) == GUARD).all())


def turned(x: Any, layout: str) -> Any:
    return x if layout == "bhsd" else x.swapaxes(1, 2)


def attend(q: Any, k: Any, v: Any, out: Any, out_dtype: Any, layout: str = "bhsd", **options: Any) -> tuple[Any, Any]:
    """Attention of operands in "bhsd" into `out` or a poisoned result: (out, lse), both in "bhsd"."""
    if out is None:
        out = turned(poisoned((*q.shape[:3], v.shape[3]), np.dtype(out_dtype)), layout)
    given = (turned(x, layout) for x in (q, k, v))
    got, lse = attention(*given, out=out, return_lse=True, layout=layout, **options)
    assert got is out
    return turned(out, layout), lse


def seen_by(q: Any, k: Any, **options: Any) -> Any:
    """The keys that each query sees, by the options of the call."""
    band = {name: options[name] for name in ("causal", "window", "align", "mask") if name in options}
    return seen_keys(q.shape[2], k.shape[2], H_q=q.shape[1], **band)


def check(
    q: Any, k: Any, v: Any, *, on: str = SM90, out: Any = None, out_dtype: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Attention of operands in "bhsd" into a poisoned result, compared with float64; the result in "bhsd"."""
    out, lse = attend(q, k, v, out, q.dtype if out_dtype is None else out_dtype, **options)
    assert lse.dtype == (F64 if F64 in (q.dtype, out.dtype) else F32)
    assert served_by(on)
    want = reference(q, k, v, seen_by(q, k, **options), options.get("scale"), options.get("softcap"))
    assert_near(out, lse, want, v, q.shape[3], q.dtype, on)
    return out


def check_garbage_behind_the_diagonal(rng: np.random.Generator, bad: float, on: str) -> None:
    """Keys and values that are not finite change nothing for the queries before them, and reach all others."""
    import cupy

    q, k, v = operands(rng, 300, 300, 64)
    want = reference(q, k, v, seen_keys(300, 300, causal=True))
    k[:, :, 171:] = v[:, :, 171:] = bad
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    head = Expected(*(x[:, :, :171] for x in (want.out, want.lse, want.spread, want.size)))
    assert_near(out[:, :, :171], lse[:, :, :171], head, v[:, :, :171], 64, F16, on)
    assert not bool(cupy.isfinite(out[:, :, 171:]).any())


def check_rows_that_see_nothing(q: Any, k: Any, v: Any, **options: Any) -> None:
    """300 queries over 100 keys, which all are NaN: rows that see a key are NaN, and the others 0."""
    import cupy

    out, lse = attention(q, k, v, causal=True, return_lse=True, **options)
    assert bool((out[:, :, :200] == 0).all()) and bool((lse[:, :, :200] == -np.inf).all())
    assert bool(cupy.isnan(out[:, :, 200:]).all()) and bool(cupy.isnan(lse[:, :, 200:]).all())
    nobody = ~BlockMask.full(300, 100, device="cuda")
    out, lse = attention(q, k, v, mask=nobody, return_lse=True, **options)
    assert bool((out == 0).all()) and bool((lse == -np.inf).all())


# ------------------------------------------------------------------------------------------------- memory
BAD_STRIDES = ["shifted", "columns", "every second column", "backwards", "odd rows"]


def spoiled_strides(x: Any, how: str) -> Any:
    """The same values where the copy engine cannot read them; the gaps are poisoned."""
    import cupy

    B, H, S, D = x.shape
    if how == "shifted":
        view = poisoned((x.size + 1,), x.dtype)[1:].reshape(x.shape)
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


def check_nothing_beyond_out_is_written(
    some: list[Any], layout: str, check: Callable[..., Any], plans: dict[Any, Any], in_tiles: tuple[Any, ...]
) -> None:
    """Results inside of larger arrays; those of the dtypes `in_tiles` that lie well are written tile by tile."""
    import cupy

    B, H, S, _ = some[0].shape
    D = some[2].shape[3]
    for dtype, column in ((F16, 8), (F16, 1), (F32, 8), (BFLOAT16, 8)):
        shape = (B, H, S + 70, D + 16) if layout == "bhsd" else (B, S + 70, H, D + 16)
        room = cupy.full(shape, GUARD, np.float32).astype(dtype)
        rows = (slice(None),) * (2 if layout == "bhsd" else 1)
        for step in (1, -1):
            view = room[(*rows, slice(32, 32 + S), ..., slice(column, column + D))][..., ::step]
            view[...] = np.nan
            plans.clear()
            check(*some, layout=layout, out=view, causal=True)
            (plan,) = plans.values()
            if hasattr(plan.config, "tiles"):
                assert plan.config.tiles == (dtype in in_tiles and column == 8 and step == 1)
            view[...] = GUARD
            assert untouched(room)


# ------------------------------------------------------------------------------------------------- bad input
Refusal = tuple[Callable[[], Any], type[Exception], str]


def each_refusal(refused: list[Refusal]) -> Any:
    names = [f"{n}: {text}" for n, (_, _, text) in enumerate(refused)]
    return pytest.mark.parametrize(("call", "error", "text"), refused, ids=names)


def assert_refused(call: Callable[[], Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call raises an error that says `text`, and launches nothing."""
    from bsrgemm._attention import launch as attention_launch

    def launched(*call: Any) -> None:
        raise AssertionError("a kernel would have run")

    monkeypatch.setattr(attention_launch, "forward", launched)
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)


# ------------------------------------------------------------------------------------------------- bands and climbs
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


def random_mask(
    rng: np.random.Generator, heads: tuple[int, int], shape: tuple[int, int], block: tuple[int, int]
) -> BlockMask:
    """Blocks that are empty, whole or random."""
    import cupy

    grid = (*heads, *(-(-n // b) for n, b in zip(shape, block, strict=True)))
    fill = rng.choice([0.0, 0.0, 1.0, 1.0, 0.5, 0.05], grid).repeat(block[0], axis=2).repeat(block[1], axis=3)
    allowed = rng.random((*heads, *shape)) < fill[:, :, : shape[0], : shape[1]]
    return BlockMask.from_dense(cupy.asarray(allowed), block=block)


def some_keys(how: str, rng: np.random.Generator, S_q: int, S_k: int) -> tuple[dict[str, Any], Any]:
    """Options by which queries see all keys, some of them by a rule, or some by a mask; and the keys that they see."""
    import cupy

    mask = {
        "mask": lambda: BlockMask.from_dense(cupy.asarray(rng.random((S_q, S_k)) < 0.3), block=64),
        "blocks": lambda: BlockMask.random(S_q, S_k, per_row=3, block=32, device="cuda"),
    }.get(how, lambda: None)()
    options = {"causal": how == "causal", "window": (20, 30) if how == "window" else None, "mask": mask}
    return options, seen_keys(S_q, S_k, **options)


# ------------------------------------------------------------------------------------------------- sequences
def bounds_of(name: str) -> list[list[int]]:
    """Where the queries and the keys of each of the SEQUENCES begin, and where the last ones end."""
    lengths_q, lengths_k = SEQUENCES[name]
    return [np.cumsum([0, *x]).tolist() for x in (lengths_q, lengths_k or lengths_q)]


def packed(some: list[Any], ends: list[int], dtype: Any = np.int64) -> tuple[list[Any], dict[str, Any]]:
    """The first batch of operands in "bhsd" as sequences that end there, and the options that say so."""
    import cupy

    bounds = {name: cupy.asarray([0, *ends], dtype) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return [cupy.ascontiguousarray(x[0].swapaxes(0, 1)) for x in some], bounds


def seen_in_part(
    how: str, rng: np.random.Generator, some: list[Any], ends: list[int], dtype: Any = np.int64
) -> tuple[list[Any], dict[str, Any]]:
    """Operands and options of a call: those of a random mask, of sequences that end there, or else none."""
    if how == "sequences":
        return packed(some, ends, dtype)
    heads, shape = (1, some[0].shape[1]), (some[0].shape[2], some[1].shape[2])
    return some, {"mask": random_mask(rng, heads, shape, (64, 64))} if how == "mask" else {}


def attend_between_guards(q: Any, k: Any, v: Any, dtype: Any, **options: Any) -> tuple[Any, Any]:
    """Attention of sequences into poisoned rows of a larger array, of which no others are written: (out, lse)."""
    import cupy

    room = cupy.full((len(q) + 150, q.shape[1], v.shape[2]), GUARD, np.float32).astype(dtype)
    out = room[70 : 70 + len(q)]
    out[...] = np.nan
    _, lse = attention(q, k, v, out=out, return_lse=True, **options)
    assert untouched(room[:70]) and untouched(room[70 + len(q) :])
    return out, lse


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
