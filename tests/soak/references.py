"""Attention in float64 over the keys that each query sees, and how far a kernel may be from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Exact:
    """The results, ``weights @ abs(v)``, the largest sum of absolute products of a row's scores, and the keys."""

    out: Array
    lse: Array
    spread: Array
    size: Array
    keys: int
    largest: float


def seen_keys(S_q: int, S_k: int, options: dict[str, Any]) -> Array:
    """Booleans (S_q, S_k) from the definitions of `causal`, `window` and `align`."""
    place = np.arange(S_q)[:, None] + (S_k - S_q if options.get("align", "bottom-right") == "bottom-right" else 0)
    key = np.arange(S_k)
    left, right = options.get("window") or (-1, -1)
    seen = np.ones((S_q, S_k), bool)
    if options.get("causal"):
        seen &= key <= place
    if left >= 0:
        seen &= key >= place - left
    if right >= 0:
        seen &= key <= place + right
    return seen


def exact(q: Array, k: Array, v: Array, seen: Array, scale: float | None, softcap: float | None) -> Exact:
    """Attention of operands (batch, heads, length, dim); `seen` is broadcast to (batch, heads, queries, keys)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = 1 / np.sqrt(q.shape[3]) if scale is None else scale
    seen = np.broadcast_to(seen, (*q.shape[:3], k.shape[2]))
    scores = scale * (q @ k.swapaxes(2, 3))
    size = abs(scale) * (abs(q) @ abs(k).swapaxes(2, 3))
    if softcap is not None:
        scores, size = softcap * np.tanh(scores / softcap), size + softcap
    some = seen.any(axis=3, keepdims=True)
    top = np.where(some, np.where(seen, scores, -np.inf).max(axis=3, keepdims=True, initial=-np.inf), 0)
    weights = np.where(seen, np.exp(np.where(seen, scores, 0) - top), 0)
    total = np.where(some, weights.sum(axis=3, keepdims=True), 1)
    weights /= total
    lse = np.where(some, np.log(total) + top, -np.inf)[..., 0]
    size = np.where(seen, size, 0).max(axis=3, initial=0)
    return Exact(weights @ v, lse, weights @ abs(v), size, k.shape[2], float(abs(v).max(initial=0)))


def bounds(want: Exact, dtype: np.dtype[Any], acc: np.dtype[Any], D: int, card: bool) -> tuple[Array, Array]:
    """How far the result and the logarithms may be off.

    D products of a score, its place below the maximum, and the sums over the keys are rounded in `acc`. On a card the
    weights may also be rounded to the dtype, below 2**-14 to multiples of 2**-24, and tensor cores truncate sums.
    """
    unit, n = float(ml_dtypes.finfo(acc).eps), want.keys
    wrong = 4 * unit * ((D + 4) * want.size + n + 8)
    least = float(np.finfo(acc).tiny) * n * (1 + want.largest)
    lse = wrong + 4 * unit * np.abs(np.where(np.isfinite(want.lse), want.lse, 0))
    if card and dtype.itemsize == 2:
        wrong = wrong + float(ml_dtypes.finfo(dtype).eps) + 16 * unit * (want.size + 1 + n / 64)
        least += n * 2**-25 * want.largest
        lse = lse + 2e-4 + 16 * unit * want.size
    return np.minimum(wrong, 2.0)[..., None] * want.spread + least, lse


def fp8_bounds(want: Exact, card: bool) -> tuple[Array, Array]:
    """As `bounds`, for operands in fp8: on a card the weights are rounded to 3 bits of mantissa.

    Scores are off by up to 2**-10 of their absolute products; sums are cut 13 bits below, `keys` times.
    """
    if not card:
        return bounds(want, np.dtype(np.float32), np.dtype(np.float32), 256, False)
    wrong = 2**-10 * want.size + 1e-5
    share = 1 / 17 + np.expm1(2 * wrong) + 2**-14 * (want.keys + 32)
    least = 2**-15 * want.keys * want.largest
    lse = wrong + 1e-4 + 4e-7 * np.abs(np.where(np.isfinite(want.lse), want.lse, 0))
    return share[..., None] * want.spread + least, lse
