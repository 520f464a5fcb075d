"""One table for each kernel of attention: a case is a call, compared in float64 with what the definition says.

Errors are to be explained by rounding, element by element. Results are written into memory of NaN, and nothing beside
them is written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm._attention import mask_tiles
from bsrgemm._kernels.kernel import force_kernel

from ..devices import Device, Emulated
from .products import BF16, E4M3, F16, F32, F64, cases

__all__ = ["BF16", "E4M3", "F16", "F32", "F64", "cases"]

SIMT = "AttentionSimt"
#: A number that no result has, beyond the view that is written.
GUARD = 113.0
#: A byte of fp8 that is NaN.
NAN = 0x7F

# ------------------------------------------------------------------------------------------------- cases
#: Names of options of bands that tables have.
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
CLIMBS: dict[str, Callable[[np.random.Generator], Any]] = {
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
#: Masks of (queries, keys) in blocks.
MASKS: dict[str, Callable[[int, int, Any], BlockMask]] = {
    "full": lambda q, k, b: BlockMask.full(q, k, block=b, device="cuda"),
    "causal": lambda q, k, b: BlockMask.causal(q, k, block=b, device="cuda"),
    "top-left": lambda q, k, b: BlockMask.causal(q, k, align="top-left", block=b, device="cuda"),
    "window": lambda q, k, b: BlockMask.window(q, k, left=140, right=7, block=b, device="cuda"),
    "sinks": lambda q, k, b: BlockMask.sinks(q, k, count=5, block=b, device="cuda"),
    "prefix": lambda q, k, b: BlockMask.prefix(q, k, length=170, block=b, device="cuda"),
    "global": lambda q, k, b: BlockMask.global_tokens(q, k, tokens=[3, 4, 99], block=b, device="cuda"),
    "dilated": lambda q, k, b: BlockMask.dilated(q, k, count=30, dilation=5, block=b, device="cuda"),
    "random": lambda q, k, b: BlockMask.random(q, k, per_row=1 if b == 256 else 2, block=b, seed=1, device="cuda"),
    "random heads": lambda q, k, b: BlockMask.random(q, k, per_row=1, heads=(2, 2), block=b, seed=3, device="cuda"),
    "each head": lambda q, k, b: BlockMask.random(q, k, per_row=1, heads=(1, 2), block=b, device="cuda"),
    "inverse": lambda q, k, b: ~BlockMask.window(q, k, left=60, right=20, block=b, device="cuda"),
    "none": lambda q, k, b: ~BlockMask.full(q, k, block=b, device="cuda"),
    "elements": lambda q, k, b: by_elements(q, k, b, 0.3),
    "few elements": lambda q, k, b: by_elements(q, k, b, 0.003),
    "mixed": lambda q, k, b: mixed((1, 2), (q, k), b),
    "mixed batches": lambda q, k, b: mixed((2, 4), (q, k), b),
}
#: Lengths of sequences of queries, and of keys.
SEQUENCES: dict[str, tuple[list[int], list[int] | None]] = {
    "three": ([30, 0, 70], [70, 20, 50]),
    "alike": ([0, 5, 130, 700, 0, 64], None),
    "more keys": ([1, 128, 0, 129, 40], [300, 128, 50, 0, 515]),
    "one": ([257], None),
    "many": ([3, 1, 0, 2] * 25, [1, 4, 2, 0] * 25),
    "none of them long": ([0, 0, 7, 0], [9, 0, 3, 0]),
}
#: Where TMA and 16-byte copies cannot read.
BADLY = ("shifted", "columns", "every second column", "backwards", "odd rows")


@dataclass(frozen=True)
class Case:
    """A call of attention; operands are random."""

    #: queries and keys, or the name of one of SEQUENCES
    lengths: tuple[int, int] | str
    dims: tuple[int, int] = (64, 64)
    options: dict[str, Any] = field(default_factory=dict)
    dtype: np.dtype[Any] = F16
    out: np.dtype[Any] | None = None
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    #: the name of one of MASKS, and the sides of its blocks
    mask: str | None = None
    block: Any = 64
    #: how q, k, v and the result lie, see `laid`
    lie: tuple[str, str, str, str] = ("rows",) * 4
    layout: str = "bhsd"
    lse: bool = True
    #: shapes of q_scale, k_scale and v_scale for fp8; () for a number
    scales: tuple[tuple[int, ...] | None, ...] = ((), (), ())

    def __str__(self) -> str:
        said = [str(self.lengths), "x".join(map(str, self.dims)), str(self.dtype), *map(str, self.options.items())]
        said += [f"{self.mask} of {self.block}"] if self.mask else []
        said += [str(self.out)] if self.out else []
        said += [f"{self.batch} of {self.heads}"] if (self.batch, self.heads) != (1, (2, 1)) else []
        said += sorted({*self.lie} - {"rows"}) + ([] if self.layout == "bhsd" else [self.layout])
        said += [] if self.lse else ["no lse"]
        said += [f"scales {self.scales}"] if self.scales != ((), (), ()) else []
        return "-".join(said)


def mixed(heads: tuple[int, int], shape: tuple[int, int], block: Any) -> BlockMask:
    """Blocks that are empty, whole or random."""
    rng, block = np.random.default_rng(9), block if isinstance(block, tuple) else (block, block)
    grid = (*heads, *(-(-n // b) for n, b in zip(shape, block, strict=True)))
    fill = rng.choice([0.0, 0.0, 1.0, 1.0, 0.5, 0.05], grid).repeat(block[0], axis=2).repeat(block[1], axis=3)
    allowed = rng.random((*heads, *shape)) < fill[:, :, : shape[0], : shape[1]]
    return BlockMask.from_dense(allowed, block=block).to_device("cuda")


def by_elements(queries: int, keys: int, block: Any, density: float) -> BlockMask:
    """Random elements; the eighth query sees nothing."""
    dense = np.random.default_rng(9).random((queries, keys)) < density
    dense[7:8] = False
    return BlockMask.from_dense(dense, block=block).to_device("cuda")


def bounds_of(name: str) -> list[list[int]]:
    """Where the queries and the keys of each of the SEQUENCES begin, and where the last ones end."""
    lengths_q, lengths_k = SEQUENCES[name]
    return [np.cumsum([0, *x]).tolist() for x in (lengths_q, lengths_k or lengths_q)]


# ------------------------------------------------------------------------------------------------- operands
def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = F16, size: float = 1.0) -> Any:
    return (size * rng.standard_normal(shape, np.float32)).astype(dtype)


def operands(rng: np.random.Generator, case: Case) -> list[Any]:
    """q, k and v as (batch, heads, length, columns)."""
    lengths = case.lengths
    S_q, S_k = (x[-1] for x in bounds_of(lengths)) if isinstance(lengths, str) else lengths
    (D, D_v), (H, H_kv), B = case.dims, case.heads, case.batch
    return [random(rng, shape, case.dtype) for shape in ((B, H, S_q, D), (B, H_kv, S_k, D), (B, H_kv, S_k, D_v))]


def climbing(q: Any, k: Any) -> Iterator[Any]:
    """Set q and k so that maxima climb by far, from tile to tile or at once, and yield queries of which some do so.

    These are all of them, the first of each 16 rows, or the ninth. Kernels that walk keys from the last one on meet
    maxima that climb, too.
    """
    keys = k.shape[2]
    q[...] = np.sign(q[:, :1, :1])
    for ramp in (np.linspace(3, 0, keys), np.where(np.arange(keys) < keys // 2, 3, 0)):
        k[...] = np.sign(q[:, :1, :1]) * ramp[:, None]
        for rows in (slice(None), slice(0, None, 16), slice(8, None, 16)):
            some = (q * 0.01).astype(q.dtype)
            some[:, :, rows] = q[:, :, rows]
            yield some


def steps(q: Any, keys: int, heights: Any, scale: float = 8.0) -> Any:
    """Keys whose scores, for queries of ones, are a height for each stretch of as many; the last stretch is met first.

    Queries become ones and minus ones, by which keys are multiplied, so that all scores of a stretch are equal.
    """
    q[...] = np.sign(q[:, :1, :1].astype(F32)).astype(q.dtype)
    high = np.repeat(np.asarray(heights), -(-keys // len(heights)))[:keys, None]
    return (np.sign(q[:, :1, :1].astype(F32)) * high * scale / q.shape[3]).astype(q.dtype)


def laid(device: Device, x: Any, how: str) -> tuple[Any, Any]:
    """Values on the device as told, and the whole memory in which they lie; what is between them is 113."""
    cupy = device.cupy
    x = x.view(np.uint8) if x.dtype == E4M3 else x
    B, H, S, D = x.shape

    def room(*shape: int) -> Any:
        return cupy.full(shape, int(GUARD)).astype(x.dtype)

    if how == "rows":
        whole = room(*x.shape)
        view = whole
    elif how == "heads between rows":
        whole = room(B, S, H, D)
        view = whole.swapaxes(1, 2)
    elif how == "heads before batches":
        whole = room(H, B, S, D)
        view = whole.swapaxes(0, 1)
    elif how == "part":
        whole = room(B + 1, 2 * H, S + 70, D + 32)
        view = whole[1:, ::2, 32 : 32 + S, 16 : 16 + D]
    elif how == "fused":
        whole = room(B, S, 3, H, D)
        view = whole[:, :, 1].swapaxes(1, 2)
    elif how == "shifted":
        whole = room(x.size + 1)
        view = whole[1:].reshape(x.shape)
    elif how == "columns":
        whole = room(B, H, D, S)
        view = whole.swapaxes(2, 3)
    elif how == "every second column":
        whole = room(B, H, S, 2 * D)
        view = whole[..., ::2]
    elif how == "backwards":
        whole = room(*x.shape)
        view = whole[:, :, ::-1]
    elif how.startswith("pitch "):
        whole = room(B, S, H, int(how[6:]))
        view = whole[..., :D].swapaxes(1, 2)
    else:
        assert how == "odd rows"
        whole = room(B, H, S, D + 3)
        view = whole[..., :D]
    view[...] = device.asarray(x)
    return view, whole


def by_columns(v: Any, ends: Any = None) -> Any:
    """Values of fp8 as attention_sm90 reads them: 16 places of a sequence are its keys, or 0."""
    B, H, S, D = v.shape
    ends = [0, S] if ends is None else ends
    held = np.clip(ends, 0, S)
    begins = [-(-x // 16) + s for s, x in enumerate(held)]
    room = -(-S // 16) + (len(ends) - 1 if len(ends) > 2 else 0)
    out = np.zeros((B, H, D, 16 * room), np.uint8)
    for group in range(room):
        sequence = max(s for s in range(len(ends) - 1) if s == 0 or begins[s] <= group)
        first = held[sequence] + 16 * (group - begins[sequence])
        for at in range(16):
            key = first + 2 * (at // 4) + at % 4 + (6 if at % 4 > 1 else 0)
            if 0 <= key < held[sequence + 1]:
                out[..., 16 * group + at] = v[:, :, key]
    return out


# ------------------------------------------------------------------------------------------------- the definition
def seen_keys(
    S_q: int, S_k: int, causal: bool = False, window: Any = None, align: str = "bottom-right", mask: Any = None
) -> Any:
    """Booleans (queries, keys), or (batch, heads, queries, keys) with a mask of dense booleans."""
    place = np.arange(S_q)[:, None] + (S_k - S_q if align == "bottom-right" else 0)
    key = np.arange(S_k)[None]
    left, right = window or (-1, -1)
    seen = np.ones((S_q, S_k), bool)
    if causal:
        seen &= key <= place
    if left >= 0:
        seen &= key >= place - left
    if right >= 0:
        seen &= key <= place + right
    return seen if mask is None else seen & mask


def sequences_seen(q_bounds: list[int], k_bounds: list[int], **band: Any) -> Any:
    """Booleans (queries, keys): each sequence sees its own keys, as the band says."""
    seen = np.zeros((q_bounds[-1], k_bounds[-1]), bool)
    for (a, b), (c, d) in zip(itertools.pairwise(q_bounds), itertools.pairwise(k_bounds), strict=True):
        if a < b and c < d:
            seen[a:b, c:d] = seen_keys(b - a, d - c, **band)
    return seen


@dataclass
class Exact:
    """In float64, what errors are measured by."""

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
    """Attention by its definition; what a query does not see is not multiplied by 0 either."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scale = 1 / math.sqrt(max(1, q.shape[3])) if scale is None else scale
    with np.errstate(all="ignore"):
        scores = scale * (q @ k.swapaxes(2, 3))
        size = abs(scale) * (np.abs(q) @ np.abs(k).swapaxes(2, 3)) + (softcap or 0.0)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if seen.ndim == 4 and 1 < seen.shape[1] < q.shape[1]:
            seen = np.repeat(seen, q.shape[1] // seen.shape[1], axis=1)
        seen = np.broadcast_to(seen, scores.shape)
        some = seen.any(axis=3, keepdims=True)
        scores = np.where(seen, scores, -np.inf)
        top = np.where(some, scores.max(axis=3, keepdims=True, initial=-np.inf), 0)
        weights = np.where(seen, np.exp(scores - top), 0)
        total = np.where(some, weights.sum(axis=3, keepdims=True), 1)
        weights /= total
        finite = np.isfinite(weights).all() and np.isfinite(v).all()
        near = np.where(np.isfinite(v), v, 0)
        products = (weights @ v) if finite else np.where(seen[..., None], weights[..., None] * v[:, :, None], 0).sum(3)
        return Exact(
            out=np.where(some, products, 0),
            lse=np.where(some, np.log(total) + top, -np.inf)[..., 0],
            spread=weights @ np.abs(near),
            sigma=np.sqrt((weights * weights) @ (near * near)),
            top=weights.max(axis=3, keepdims=True, initial=0),
            count=seen.sum(axis=3, keepdims=True),
            reach=seen.astype(np.float64) @ np.abs(near),
            size=np.where(seen, size, 0).max(axis=3, initial=0),
        )


# ------------------------------------------------------------------------------------------------- allowed errors
def eps(dtype: Any) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def rounding(dtype: Any, out: Any) -> Any:
    """What the last rounding of results changes."""
    info = ml_dtypes.finfo(dtype)
    return float(info.eps) * np.abs(out) + float(info.smallest_subnormal)


def bounds(want: Exact, v: Any, D: int, dtype: Any, out_dtype: Any, on: str, exponentials: float) -> tuple[Any, Any]:
    """How far each result may be off, and each logarithm; `exponentials` of the card are that wrong."""
    n, unit = v.shape[2], eps(F64 if F64 in (dtype, out_dtype) else F32)
    most = float(np.abs(np.where(np.isfinite(v), v, 0)).max(initial=0))
    with np.errstate(all="ignore"):
        if on != SIMT:
            # Weights are rounded to the dtype, below 2**-14 to multiples of 2**-24; tensor cores truncate sums.
            wrong = eps(dtype) + 16 * unit * (want.size + 1 + n / 64)
            least = n * 2**-25 * most if dtype == F16 else 0.0
            lse = exponentials + 16 * unit * want.size + 4 * unit * np.abs(want.lse)
        else:
            wrong = 4 * unit * ((D + 4) * want.size + n + 8)
            least = float(np.finfo(F64 if unit < 1e-10 else F32).tiny) * n * most
            lse = wrong + 4 * unit * np.abs(want.lse)
        return wrong[..., None] * want.spread + least + rounding(out_dtype, want.out), lse


def score_bound(want: Exact) -> Any:
    """How far a row's scores of fp8 may be off.

    The tensor cores line up the 32 products of a step and the sum so far at the largest of them and cut each 13 bits
    below. Emulated on random numbers that costs up to 2**-11.8 of the sum of the absolute products.
    """
    return 2**-10 * want.size + 1e-5


def fp8_bound(want: Exact, dtype: Any, *, independent: bool = True) -> Any:
    """How far each result of fp8 may be off.

    1. The weights of keys are rounded to 3 bits of mantissa: each is off by up to 2**-4 / (1 + 2**-4) = 1/17 of itself.
    2. The highest weight is at least 2**5, and those below 2**-6 are rounded to multiples of 2**-9: each is off by up
       to 2**-15 of the highest.
    3. Scores are off (see `score_bound`), which their sum repeats.
    4. Sums of values are cut as scores are: each product of `count` by up to 2**-13 of the sum so far, which on the way
       is half of the last one.

    Where weights and values have nothing to do with each other (`independent`), errors of 1 and 3 add up as random
    numbers do: to 1/17 of `sigma` at most, of which 6 are allowed, and 4 follows the sum and not its absolute terms.
    """
    wrong, cut = score_bound(want)[..., None], 2**-14 * (want.count + 32)
    bound = (1 / 17 + np.expm1(2 * wrong) + cut) * want.spread + 2**-15 * want.top * want.reach
    if independent:
        likely = (6 / 17 + wrong) * want.sigma + cut * np.abs(want.out)
        bound = np.minimum(bound, likely + 2**-15 * want.top * want.reach)
    return bound + rounding(dtype, want.out) + 2e-7 * want.spread


def rms(x: Any, axis: Any = (2, 3)) -> Any:
    return np.sqrt((x * x).mean(axis=axis))


def assert_within(got: Any, want: Any, bound: Any, said: Any = "") -> None:
    """Finite where it should be, the same infinity or NaN elsewhere, and within the bound."""
    with np.errstate(all="ignore"):
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.where(finite, 0, got), np.where(finite, 0, want), str(said))
        error = np.where(finite, np.abs(got - want), 0)
        assert (error <= np.where(finite, bound, 0)).all(), (said, float(np.nanmax(error / bound)), got[error > bound])


def assert_near(got: Any, lse: Any, want: Exact, bound: Any, lse_bound: Any, out_dtype: Any) -> None:
    """Within what rounding explains; rows that see nothing are 0 and -inf."""
    assert got.dtype == out_dtype and got.shape == want.out.shape
    wide = got.astype(np.float64)
    assert (wide[want.count[..., 0] == 0] == 0).all()
    assert_within(wide, want.out, bound, "out")
    if lse is not None:
        assert_within(lse.astype(np.float64), want.lse, lse_bound, "lse")


def assert_random_errors(got: Any, lse: Any, want: Exact, out_dtype: Any, varied: bool) -> None:
    """All errors of a head of fp8 together: emulated, 0.028 of sigma.

    Few rows, or weights that are alike, may have the worst luck with those that count.
    """
    error = np.abs(got.astype(np.float64) - want.out)
    most = 0.045 if varied and got.shape[2] >= 64 else 1 / 17
    cut = 2**-14 * (want.count + 32) * want.out
    allowed = most * rms(want.sigma) + rms(cut) + eps(out_dtype) * rms(want.out) + 1e-12
    smallest = float(ml_dtypes.finfo(out_dtype).smallest_subnormal)
    assert (rms(error) <= allowed + smallest).all(), float((rms(error) / allowed).max())
    if lse is not None:
        off = np.abs(np.where(want.count[..., 0] == 0, 0, lse - np.where(want.count[..., 0] == 0, 0, want.lse)))
        assert (rms(off, 2) <= 3e-4 * rms(want.size, 2) + 1e-5).all(), float((rms(off, 2) / rms(want.size, 2)).max())


# ------------------------------------------------------------------------------------------------- calls
def attend(device: Device, kernel: str | None, case: Case, some: list[Any], **more: Any) -> tuple[Any, Any]:
    """(out, lse) of a call by a kernel, (batch, heads, queries, columns) on the host; nothing beside it is written."""
    names = "q_scale", "k_scale", "v_scale"
    out_dtype = case.out or (F32 if case.dtype == E4M3 else case.dtype)
    lies = [laid(device, x, how)[0] for x, how in zip(some, case.lie[:3], strict=True)]
    out, whole = laid(device, np.full((*some[0].shape[:3], some[2].shape[3]), np.nan).astype(out_dtype), case.lie[3])
    result, options = out, {**case.options, **more}
    if isinstance(case.lengths, str):
        lies, result = [x[0].swapaxes(0, 1) for x in lies], out[0].swapaxes(0, 1)
        options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds_of(case.lengths), strict=True))
    elif case.layout == "bshd":
        lies, result = [x.swapaxes(1, 2) for x in lies], out.swapaxes(1, 2)
    if case.mask is not None and "mask" not in options:
        options["mask"] = MASKS[case.mask](some[0].shape[2], some[1].shape[2], case.block)
    if case.dtype == E4M3:
        options |= {n: x if np.ndim(x) == 0 else device.asarray(x) for n, x in zip(names, scales_of(case), strict=True)}
    before = [device.asnumpy(x) for x in lies]
    forced = force_kernel(kernel) if kernel else patch.dict({})
    with forced:
        got = bg.attention(*lies, out=result, return_lse=case.lse, layout=case.layout, **options)
    assert (got[0] if case.lse else got) is result
    found = device.asnumpy(out).copy(), device.asnumpy(got[1]) if case.lse else None
    out[...] = GUARD
    assert (device.asnumpy(whole).astype(np.float64) == GUARD).all(), "something beside the result was written"
    for x, y in zip(lies, before, strict=True):
        np.testing.assert_array_equal(device.asnumpy(x).view(np.uint8), y.view(np.uint8))
    return found[0], None if found[1] is None else found[1].reshape(*found[0].shape[:3])


def scales_of(case: Case) -> list[Any]:
    """The scales of heads, or numbers."""
    rng = np.random.default_rng(8)
    numbers = (0.5, 2.0, 3.0)
    return [
        x if not shape else rng.uniform(0.3, 3.0, shape).astype(F32)
        for x, shape in zip(numbers, case.scales, strict=True)
    ]


def wide(case: Case, some: list[Any]) -> list[Any]:
    """What operands stand for in float64: with the scales of fp8."""
    found = [x.astype(np.float64) for x in some]
    if case.dtype == E4M3:
        scales = [np.asarray(x, np.float64) for x in scales_of(case)]
        found = [
            x * (s if s.ndim == 0 else np.broadcast_to(s, x.shape[:2])[..., None, None])
            for x, s in zip(found, scales, strict=True)
        ]
    return found


def seen_by(device: Device, case: Case, some: list[Any], mask: Any = None) -> Any:
    """The keys that queries see, from the definitions."""
    band = {name: x for name, x in case.options.items() if name in ("causal", "window", "align")}
    if isinstance(case.lengths, str):
        return sequences_seen(*bounds_of(case.lengths), **band)
    if mask is None and case.mask is not None:
        mask = MASKS[case.mask](some[0].shape[2], some[1].shape[2], case.block)
    dense = None if mask is None else device.asnumpy(mask.to_dense())
    return seen_keys(some[0].shape[2], some[1].shape[2], mask=dense, **band)


def check(
    device: Device, kernel: str | None, case: Case, some: list[Any], *, mask: Any = None, independent: bool = True,
    varied: bool = True,
) -> Any:  # fmt: skip
    """A call by a kernel, compared with the definition in float64; the result."""
    out, lse = attend(device, kernel, case, some, **({} if mask is None else {"mask": mask}))
    real = wide(case, some)
    want = exact(*real, seen_by(device, case, some, mask), case.options.get("scale"), case.options.get("softcap"))
    out_dtype = case.out or (F32 if case.dtype == E4M3 else case.dtype)
    emulated = isinstance(device, Emulated)
    if case.dtype == E4M3 and kernel != SIMT:
        with np.errstate(all="ignore"):
            lse_bound = score_bound(want) + 1e-4 + 4e-7 * np.abs(want.lse)
            if emulated:  # its sums are not cut
                lse_bound = np.minimum(lse_bound, 1e-3 + 1e-5 * np.abs(want.lse))
        assert_near(out, lse, want, fp8_bound(want, out_dtype, independent=independent), lse_bound, out_dtype)
        if independent and out.size:
            assert_random_errors(out, lse, want, out_dtype, varied)
    else:
        dtype = F32 if case.dtype == E4M3 else case.dtype
        exponentials = 2e-5 if emulated else 2e-4
        limits = bounds(want, real[2], some[0].shape[3], dtype, out_dtype, kernel or "", exponentials)
        assert_near(out, lse, want, *limits, out_dtype)
    return out


def run(device: Device, kernel: str | None, case: Case, some: list[Any]) -> tuple[Any, Any]:
    """(out, lse) of a call in float64."""
    out, lse = attend(device, kernel, case, some)
    return out.astype(np.float64), lse.astype(np.float64)


# ------------------------------------------------------------------------------------------------- promises of several
def check_nan_reaches_those_who_see_it(device: Device, kernel: str, case: Case, rng: np.random.Generator) -> None:
    """NaN and infinity in q, k or v reach the queries that see them and no others, which stay exact."""
    for where, bad in itertools.product(("q", "k", "v", "all of k", "all of v"), (np.nan, np.inf, -np.inf)):
        if case.dtype == E4M3 and np.isinf(bad):
            continue
        some = operands(rng, case)
        x = some["qkv".index(where[-1])]
        if where.startswith("all"):
            x[:, :, x.shape[2] * 3 // 5 :] = bad
        else:
            for place in rng.integers(0, x.shape[2], 3):
                x[:, :, place, rng.integers(x.shape[3])] = bad
        out, lse = run(device, kernel, case, some)
        want = exact(*wide(case, some), seen_by(device, case, some), case.options.get("scale"))
        off = 4 * eps(F16) if case.dtype != BF16 else 4 * eps(BF16)
        if case.dtype == E4M3:
            finite = [np.where(np.isnan(x), 0, x) for x in wide(case, some)]
            off = fp8_bound(exact(*finite, seen_by(device, case, some)), F32)
        assert_within(out, want.out, off, (where, bad))
        assert_within(lse, want.lse, 2e-2 if case.dtype == E4M3 else off, (where, bad))


def check_garbage_behind_the_diagonal(device: Device, kernel: str, bad: float, rng: np.random.Generator) -> None:
    """Keys and values that are not finite change nothing for the queries before them, and reach all others."""
    case = Case((300, 300), options={"causal": True})
    q, k, v = operands(rng, case)
    want = exact(q, k, v, seen_keys(300, 300, causal=True))
    limit, _ = bounds(want, v, 64, F16, F16, kernel, 2e-4)
    k[:, :, 171:] = v[:, :, 171:] = bad
    out, _ = run(device, kernel, case, [q, k, v])
    assert_within(out[:, :, :171], want.out[:, :, :171], limit[:, :, :171])
    assert not np.isfinite(out[:, :, 171:]).any()


def check_rows_that_see_nothing(device: Device, kernel: str, dtype: Any, D: int = 64, **options: Any) -> None:
    """300 queries over 100 keys, which all are NaN: rows that see a key are NaN, and the others 0."""
    case = Case((300, 100), (D, D), {"causal": True, **options}, dtype, heads=(2, 2))
    some = [np.full(x.shape, np.nan).astype(dtype) for x in operands(np.random.default_rng(1), case)]
    out, lse = run(device, kernel, case, some)
    assert (out[:, :, :200] == 0).all() and np.isneginf(lse[:, :, :200]).all()
    assert np.isnan(out[:, :, 200:]).all() and np.isnan(lse[:, :, 200:]).all()
    out, lse = run(device, kernel, Case((300, 100), (D, D), options, dtype, heads=(2, 2), mask="none"), some)
    assert (out == 0).all() and np.isneginf(lse).all()


def check_scores_of_minus_infinity(device: Device, kernel: str, rng: np.random.Generator) -> None:
    """A query whose keys all have no weight has no softmax; where it sees one more key, that one counts."""
    case = Case((100, 100), options={"causal": True})
    q, k, v = operands(rng, case)
    q[..., 0], k[:, :, :50, 0] = -1, np.inf
    want = exact(q, k, v, seen_keys(100, 100, causal=True))
    assert np.isnan(want.out[:, :, :50]).all() and np.isfinite(want.out[:, :, 50:]).all()
    out, lse = run(device, kernel, case, [q, k, v])
    np.testing.assert_allclose(out, want.out, rtol=0, atol=2e-3 * np.abs(v.astype(float)).max())
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(want.lse))


def check_one_weight_is_one(
    device: Device, kernel: str, dtype: Any, rng: np.random.Generator, halves: bool, out: Any = None
) -> None:
    """A huge maximum is rounded, and the largest weight is not 1; its error cancels out."""
    case = Case((64, 130), dtype=dtype, heads=(1, 1), out=out)
    q, k, v = operands(rng, case)
    q, k = (60 * q).astype(dtype), (60 * k).astype(dtype)
    parts = ([], np.arange(64) % 16 >= 8, np.arange(64) % 16 < 8) if halves else ([],)
    for small in parts:  # the other half of the rows has small ones
        some = q.copy()
        some[0, 0, small] = 0
        got, _ = run(device, kernel, case, [some, k, v])
        scores = some[0, 0].astype(float) @ k[0, 0].astype(float).T / 8
        first, second = np.sort(scores, axis=1)[:, -1], np.sort(scores, axis=1)[:, -2]
        clear = first - second > 40
        assert clear.sum() > 18 and first[clear].min() > 2000
        want = v[0, 0, scores.argmax(axis=1)[clear]].astype(float)
        np.testing.assert_allclose(got[0, 0, clear], want, rtol=2e-6 if out == F32 else 0)


def check_spoiled_masks(device: Device, kernel: str, dtype: Any, D: int, bad: int, rng: np.random.Generator) -> None:
    """Whatever is read or written outside of the arrays ends the process; rows of other tiles are as they were."""
    case = Case((70, 200), (D, D), dtype=dtype, heads=(1, 1), mask="elements", block=16)
    some, make = operands(rng, case), mask_tiles.tiles
    good, _ = run(device, kernel, case, some)
    for name in ("first", "columns", "parts", "kinds", "order"):

        def spoiled(*args: Any, name: str = name) -> Any:
            found = make(*args)
            x = getattr(found, name)
            x[1 if name == "first" else 0] = bad
            x[1 if name == "first" else -1] = bad
            return found

        options = {"window": (180, 100)} if name == "columns" else {}
        with patch.object(mask_tiles, "tiles", spoiled):
            out, _ = run(device, kernel, Case(**{**vars(case), "options": options}), some)
        if name == "kinds":
            same = [np.array_equal(x, y) for x, y in zip(out[0, 0], good[0, 0], strict=True)]
            assert 16 <= sum(same) < 70


def check_spoiled_bounds(device: Device, kernel: str, dtype: Any, bad: int, rng: np.random.Generator) -> None:
    """Bounds on a card are not checked: other rows are written as ever, and none of others."""
    case = Case("three", dtype=dtype, heads=(2, 1))
    q, k, v = (
        device.asarray((x.view(np.uint8) if dtype == E4M3 else x)[0].swapaxes(0, 1)) for x in operands(rng, case)
    )
    options: dict[str, Any] = {"q_scale": 1.0} if dtype == E4M3 else {}
    for which in range(2):
        ends = [device.asarray(np.array(x, np.int32)) for x in bounds_of("three")]
        ends[which][1] = bad
        out, whole = laid(device, np.full((1, 2, 100, 64), np.nan, F32).astype(F32 if dtype == E4M3 else dtype), "part")
        with force_kernel(kernel):
            bg.attention(q, k, v, out=out[0].swapaxes(0, 1), cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], **options)
        found = device.asnumpy(out).astype(float)
        out[...] = GUARD
        assert (device.asnumpy(whole).astype(float) == GUARD).all()
        assert np.isfinite(found[:, :, 30:]).all() or which == 0


def moved(found: mask_tiles.Tiles, device: Any) -> mask_tiles.Tiles:
    """The same lists, where the kinds of the blocks in a tile begin at number 2^31 and later."""
    assert found.parts is not None
    size, entries = found.parts_q * found.parts_k, len(found.columns)
    before = math.ceil(2**31 / size)
    columns, kinds = device.untouched(before + entries), device.untouched((before + entries) * size)
    columns[:entries], kinds[before * size :] = found.columns, found.kinds
    parts = device.cupy.where(found.parts < 0, found.parts, found.parts + np.int32(before))
    return found._replace(columns=columns, parts=parts, kinds=kinds)


def check_kinds_beyond_2_to_31(device: Any, kernel: str, dtype: Any, D: int, rng: np.random.Generator) -> None:
    """A mask of so many blocks that the numbers of their kinds need 64 bits; little of its memory is ever touched."""
    case = Case((200, 200), (D, D), dtype=dtype, heads=(1, 1), mask="elements", block=16)
    some, make = operands(rng, case), mask_tiles.tiles

    def attend() -> None:
        with patch.object(mask_tiles, "tiles", lambda *args: moved(make(*args), device)):
            check(device, kernel, case, some)

    device.safely(attend)


@contextmanager
def forbidden(device: Any, *calls: str) -> Iterator[None]:
    """Inside, kernels that are new on an emulated card end the process where they would make one of these calls."""
    from ..emulator import emulator

    loaded: set[str] = set()

    def forbidding(spec: Any) -> Any:
        loaded.add(spec.source)
        return emulator.load(spec, emulator.builds(), calls)

    with patch.object(device.card, "emulated", forbidding):
        yield
    missing = [call for call in calls if all(call not in emulator._sources(source)[source] for source in loaded)]
    assert not missing, f"no kernel that was loaded has {missing}"


bad_numbers = pytest.mark.parametrize("bad", [-1, 3, 1000, 2**31 - 1, -(2**31)])
