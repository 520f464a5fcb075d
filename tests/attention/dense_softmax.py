"""Problems of attention, drawn at random, and a dense softmax in float64 over the keys that a query sees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from bsrgemm import BlockMask
from bsrgemm._attention import host_tiles
from bsrgemm._attention.attention import attention
from bsrgemm.dtypes import BFLOAT16

from .. import fake_cupy

Array = np.ndarray[Any, Any]
F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
DTYPES = (F16, BFLOAT16, F32, F64)
#: Tiles (rows, keys, least queries, gathered elements): the real ones, and some that small problems do not fit into.
TILES = ((512, 512, 64, 1 << 20), (8, 5, 2, 1 << 20), (3, 1, 1, 1), (16, 16, 16, 64), (40, 24, 1, 1000))


@contextmanager
def tiles(sizes: tuple[int, int, int, int]) -> Iterator[None]:
    names = ("_TILE_ROWS", "_TILE_KEYS", "_LEAST_QUERIES", "_GATHERED")
    with mock.patch.multiple(host_tiles, **dict(zip(names, sizes, strict=True))):
        yield


def eps(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def seen_keys(
    S_q: int, S_k: int, causal: bool = False, window: tuple[int, int] | None = None, align: str = "bottom-right"
) -> Array:
    """Booleans (S_q, S_k) from the definitions."""
    place = np.arange(S_q)[:, None] + (S_k - S_q if align == "bottom-right" else 0)
    key = np.arange(S_k)
    left, right = window or (-1, -1)
    seen = np.ones((S_q, S_k), bool)
    if causal:
        seen &= key <= place
    if left >= 0:
        seen &= key >= place - left
    if right >= 0:
        seen &= key <= place + right
    return seen


def mask_for_heads(mask: BlockMask, H_q: int) -> Array:
    """The mask as booleans (B or 1, H_q or 1, S_q, S_k)."""
    dense = mask.to_dense()
    if dense.ndim == 2:
        return dense[None, None]
    return dense if dense.shape[1] in (1, H_q) else np.repeat(dense, H_q // dense.shape[1], axis=1)


@dataclass
class Expected:
    out: Array
    lse: Array
    out_bound: Array
    lse_bound: Array


def reference(q: Array, k: Array, v: Array, seen: Array, scale: float, softcap: float | None, acc: Any) -> Expected:
    """Dense softmax of "bhsd" operands in float64, and how far a computation in `acc` may be from it."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    G = q.shape[1] // max(1, k.shape[1])
    k, v = np.repeat(k, G, axis=1), np.repeat(v, G, axis=1)
    seen = np.broadcast_to(seen, (*q.shape[:3], k.shape[2]))
    with np.errstate(all="ignore"):
        s = scale * (q @ k.swapaxes(2, 3))
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        s = np.where(seen, s, -np.inf)
        top = s.max(axis=3, keepdims=True, initial=-np.inf)
        p = np.where(seen, np.exp(s - top), 0)  # NaN where `top` is infinite and the key is seen
        weight = p.sum(axis=3, keepdims=True)
        p = np.where(seen, p / weight, 0)
        finite = np.isfinite(v).all()
        out = p @ v if finite else np.where(seen[..., None], p[..., None] * v[:, :, None], 0).sum(axis=3)
        lse = (top + np.log(weight))[..., 0]
        empty = ~seen.any(axis=3)
        lse[empty] = -np.inf
        # Rounded: D products of a score, its place under the maximum, S_k sums; the rest is a margin for NumPy's exp.
        finite = [np.nan_to_num(x, nan=0, posinf=0, neginf=0) for x in (q, k, v)]
        size = abs(scale) * (abs(finite[0]) @ abs(finite[1]).swapaxes(2, 3))
        size = np.where(seen, size, 0).max(axis=3, initial=0)
        if softcap is not None:
            size += softcap
        unit, n = eps(acc), k.shape[2]
        wrong = 4 * unit * ((q.shape[3] + 4) * size + n + 8)
        spread = np.nan_to_num(p, nan=0) @ abs(finite[2])
        least = float(np.finfo(acc).tiny) * n * (1 + abs(finite[2]).max(initial=0))
        out_bound = np.minimum(wrong, 2.0)[..., None] * spread + least
        return Expected(out, lse, out_bound, wrong + unit * abs(np.nan_to_num(lse, neginf=0)))


def assert_near(actual: Array, expected: Array, bound: Array) -> None:
    """Equal where not finite, otherwise within the bound and the rounding of the result's own dtype."""
    info = ml_dtypes.finfo(actual.dtype)
    assert actual.shape == expected.shape
    values = actual.astype(np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(values[~finite], expected[~finite])
    with np.errstate(invalid="ignore"):
        allowed = bound + float(info.eps) * abs(expected) + float(info.smallest_subnormal)
        wrong = finite & ~(abs(values - expected) <= allowed)
    assert not wrong.any(), (values[wrong][:5], expected[wrong][:5], np.broadcast_to(bound, values.shape)[wrong][:5])


@dataclass
class Problem:
    """Operands in "bhsd", and the keywords of a call."""

    q: Array
    k: Array
    v: Array
    options: dict[str, Any] = field(default_factory=dict)
    tile: tuple[int, int, int, int] = TILES[0]

    def seen(self) -> Array:
        """Booleans (B or 1, H_q or 1, S_q, S_k)."""
        (_, H_q, S_q, _), S_k, o = self.q.shape, self.k.shape[2], self.options
        seen = seen_keys(S_q, S_k, o.get("causal", False), o.get("window"), o.get("align", "bottom-right"))
        return seen[None, None] if o.get("mask") is None else seen & mask_for_heads(o["mask"], H_q)

    def expected(self) -> Expected:
        scale, D = self.options.get("scale"), self.q.shape[3]
        scale = (1 / math.sqrt(D) if D else 1.0) if scale is None else scale
        return reference(self.q, self.k, self.v, self.seen(), scale, self.options.get("softcap"), self.dtypes()[1])

    def dtypes(self) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """That of the result, and the one that is computed in."""
        wanted = self.options.get("out_dtype")
        dtype = self.q.dtype if wanted is None else wanted
        return dtype, F64 if F64 in (self.q.dtype, dtype) else F32

    def check(self) -> None:
        options = self.options
        turn = options.get("layout") == "bshd"
        q, k, v = (x.swapaxes(1, 2) if turn else x for x in (self.q, self.k, self.v))
        with tiles(self.tile):
            out, lse = attention(q, k, v, return_lse=True, **options)
        expected = self.expected()
        assert (out.dtype, lse.dtype) == self.dtypes()
        assert_near(out.swapaxes(1, 2) if turn else out, expected.out, expected.out_bound)
        assert_near(lse, expected.lse, expected.lse_bound)


# ------------------------------------------------------------------------------------------------- drawing problems
def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def strided(x: Array, how: str) -> Array:
    """The same values, lying otherwise."""
    if how == "turned":
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    if how == "columns":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if how == "every second":
        spaced = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        spaced[..., ::2] = x
        return spaced[..., ::2]
    if how == "reversed":
        return np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]
    return x


def random_mask(rng: np.random.Generator, heads: tuple[int, int], S_q: int, S_k: int, block: tuple[int, int]) -> Any:
    """Blocks that are empty, whole or random, of 16 x 16 at least."""
    grid = (*heads, -(-S_q // block[0]), -(-S_k // block[1]))
    fill = np.repeat(np.repeat(rng.choice([0.0, 0.0, 1.0, 1.0, 0.5, 0.1], grid), block[0], axis=2), block[1], axis=3)
    allowed = rng.random((*heads, S_q, S_k)) < fill[:, :, :S_q, :S_k]
    return BlockMask.from_dense(allowed, block=block)


@st.composite
def problems(draw: st.DrawFn, masks: bool | None = None, dtypes: tuple[Any, ...] = DTYPES) -> Problem:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    B, H, G = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 4)))
    lengths = st.one_of(st.integers(1, 20), st.integers(1, 90))
    S_q, S_k = draw(lengths), draw(lengths)
    D, D_v = draw(st.sampled_from((1, 3, 8, 17))), draw(st.sampled_from((1, 2, 8, 13)))
    dtype = draw(st.sampled_from(dtypes))
    how = st.sampled_from(("plain", "turned", "columns", "every second", "reversed"))
    shapes = ((B, H * G, S_q, D), (B, H, S_k, D), (B, H, S_k, D_v))
    q, k, v = (strided(normal(rng, shape, dtype), draw(how)) for shape in shapes)
    side = st.one_of(st.just(-1), st.integers(0, 8), st.integers(0, 200))
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.tuples(side, side))),
        "align": draw(st.sampled_from(("bottom-right", "top-left"))),
        "layout": draw(st.sampled_from(("bhsd", "bshd"))),
        "scale": draw(st.sampled_from((None, 0.5, 0.0, -1.25))),
        "softcap": draw(st.sampled_from((None, None, 0.7, 30))),
        "out_dtype": draw(st.sampled_from((None, None, None, *DTYPES))),
    }
    if draw(st.booleans()) if masks is None else masks:
        heads = (draw(st.sampled_from((1, B))), draw(st.sampled_from((1, H, H * G))))
        block = draw(st.sampled_from(((16, 16), (32, 16), (16, 48), (128, 64))))
        options["mask"] = random_mask(rng, heads, S_q, S_k, block)
    return Problem(q, k, v, options, draw(st.sampled_from(TILES)))


# ------------------------------------------------------------------------------------------------- zeros
def zeros(*shape: int, dtype: Any = F32) -> Array:
    return np.zeros(shape, dtype)


def there(*shape: int, dtype: Any = F32) -> Any:
    return fake_cupy.backend().from_host(zeros(*shape, dtype=dtype))
