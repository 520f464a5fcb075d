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
