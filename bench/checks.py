"""How far a result is from float64, computed without bsrgemm, and how far it may be: right is an error up to 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .data import CHUNK, module_of, widen


class Allowed(NamedTuple):
    """The largest error of a product, of attention, and of gradients."""

    product: float
    attention: float
    gradients: float


#: By kind of number.
#: Products: |C x - A (B x)| for a vector x of signs, over the norms of A's row and of x (B is standard normal): a few
#: times what rounding explains; an element that is missing gives 1 / sqrt(columns). Attention: of an element over
#: max(1, its size); rounding costs 5e-4 and 4e-3, rounding the weights as much again. Weights of fp8 are rounded by up
#: to a sixteenth, and where a query sees few keys nothing averages that out. Gradients: over the largest value of all.
TOLERANCE: dict[str, Allowed] = {
    "float16": Allowed(2e-3, 4e-3, 2e-3),
    "bfloat16": Allowed(1.6e-2, 3e-2, 1.5e-2),
    "e4m3": Allowed(2e-2, 2e-1, 0.0),
    "float32": Allowed(1e-5, 1e-5, 1e-5),
    "tf32": Allowed(6e-3, 0.0, 0.0),
    "float64": Allowed(1e-12, 1e-13, 1e-12),
}


def block_rows(A: Any) -> Any:
    """The block row of each block."""
    xp = module_of(A.data)
    return xp.searchsorted(A.indptr, xp.arange(len(A.indices), dtype=A.indptr.dtype), side="right") - 1


def exact(A: Any, x: Any, transposed: bool = False) -> Any:
    """A x or A.T x for a vector, in float64."""
    xp, (R, C) = module_of(A.data), A.blocksize
    data, source, target, blocks = A.data, A.indices, block_rows(A), A.shape[0] // R
    if transposed:
        data, source, target, blocks = data.transpose(0, 2, 1), target, source, A.shape[1] // C
    height, width = data.shape[1:]
    pieces = widen(x).reshape(-1, width)
    result = xp.zeros((blocks, height))
    step = max(1, CHUNK // width)
    for start in range(0, len(data), step):
        own = slice(start, start + step)
        near = pieces[source[own]]
        for r in range(height):
            sums = (widen(data[own, r]) * near).sum(axis=1)
            result[:, r] += xp.bincount(target[own], sums, minlength=blocks)
    return result.reshape(-1)


def product_error(A: Any, X: Any, got: Any, transposed: bool = False) -> float:
    """Largest |got - A X| over the root of the number of terms, which are standard normal. NaN if anything is.

    The columns of a matrix X are added up with random signs: all rows at the price of a vector.
    """
    xp, (R, C) = module_of(A.data), A.blocksize
    x, got = with_signs(X), with_signs(got)
    target, height, width = (A.indices, C, R) if transposed else (block_rows(A), R, C)
    terms = width * xp.bincount(target, minlength=len(got) // height)
    off = xp.abs(got - exact(A, x, transposed)).reshape(-1, height).max(axis=1)
    return float((off / xp.sqrt(xp.maximum(terms, 1))).max())


def dense_error(A: Any, B: Any, got: Any) -> float:
    """The same for a dense A."""
    xp, x = module_of(A), with_signs(B)
    step = max(1, CHUNK // A.shape[1])
    want = xp.concatenate([widen(A[i : i + step]) @ x for i in range(0, len(A), step)])
    return float(xp.abs(with_signs(got) - want).max()) / A.shape[1] ** 0.5


def square_error(A: Any, C: Any) -> float:
    """How far C is from A A, for C of bsrgemm, of scipy or of cupyx: C s over the terms of a row, for signs s."""
    xp = module_of(A.data)
    s = signs(A.shape[1], xp)
    got = exact(C, s) if hasattr(C, "blocksize") and not type(C).__module__.startswith("scipy") else C @ s
    terms = A.nnz / A.shape[0]
    return float(xp.abs(got - exact(A, exact(A, s))).max()) / terms


def signs(count: int, xp: Any) -> Any:
    """A vector of random signs, in float64."""
    return xp.asarray(np.random.default_rng(1).choice([-1.0, 1.0], count))


def with_signs(X: Any) -> Any:
    """A vector in float64, or the columns of a matrix added up with random signs, over the root of their number."""
    if X.ndim == 1:
        return widen(X)
    xp, N = module_of(X), X.shape[1]
    s = signs(N, xp) / N**0.5
    step = max(1, CHUNK // N)
    return xp.concatenate([widen(X[i : i + step]) @ s for i in range(0, len(X), step)])


@dataclass(frozen=True)
class Seen:
    """Which keys the queries of `heads` heads may see: `window` keys up to their own, those of a mask, or all.

    It comes from lengths and lists of blocks, not from bsrgemm's masks of elements.
    """

    heads: int
    causal: bool = False
    window: int | None = None
    mask: Any = None

    def grid(self, b: int, h: int) -> Any:
        """The blocks of a head that are stored, as booleans on the host."""
        (B, H), (bq, bk) = self.mask.heads, self.mask.block
        rows, columns = (-(-n // size) for n, size in zip(self.mask.shape, (bq, bk), strict=True))
        first, indices = (x if isinstance(x, np.ndarray) else x.get() for x in (self.mask.indptr, self.mask.indices))
        pattern = b % B * H + h // (self.heads // H)
        first = first[pattern * rows : (pattern + 1) * rows + 1]
        found = np.zeros((rows, columns), bool)
        found[np.repeat(np.arange(rows), np.diff(first)), indices[first[0] : first[-1]]] = True
        return found

    def __call__(self, b: int, h: int, query: Any, key: Any) -> Any:
        """Whether queries see keys, for two arrays of positions that are broadcast."""
        xp = module_of(query)
        seen = (query >= 0) & (key >= 0)
        if self.causal or self.window is not None:
            seen = seen & (key <= query)
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.mask is not None:
            bq, bk = self.mask.block
            seen = seen & xp.asarray(self.grid(b, h))[query // bq, key // bk]
        return seen


def exact_attention(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """softmax(q k^T / sqrt(D)) v in float64, for some queries of one head; zeros where a query sees nothing."""
    xp = module_of(q)
    scores = xp.where(seen, widen(q) @ widen(k).T / q.shape[-1] ** 0.5, -np.inf)
    weights = xp.exp(scores - xp.maximum(scores.max(axis=1, keepdims=True), np.finfo(np.float64).min))
    total = weights.sum(axis=1, keepdims=True)
    return weights @ widen(v) / xp.where(total == 0, 1, total)


def checked_places(S: int, each: int = 32) -> np.ndarray[Any, Any]:
    """Positions at both ends of a sequence, and across its middle.

    >>> checked_places(9, each=2).tolist()
    [0, 1, 3, 4, 7, 8]
    """
    each = min(each, S)
    starts = sorted({0, max(0, S // 2 - each // 2), S - each})
    return np.unique(np.concatenate([np.arange(start, start + each) for start in starts]))


@dataclass
class Reference:
    """The expected results of some queries in float64, computed once for our result and those of all peers."""

    places: Any
    heads: list[tuple[int, int]]
    values: list[Any]

    @classmethod
    def of(cls, seen: Seen, q: Any, k: Any, v: Any, *, whole: bool = False) -> Reference:
        """Expect some queries of the first and the last head, or all queries and heads (`whole`)."""
        xp, (B, H, S, _), group = module_of(q), q.shape, q.shape[1] // k.shape[1]
        places = xp.asarray(np.arange(S) if whole else checked_places(S))
        heads = [(b, h) for b in range(B) for h in range(H)] if whole else sorted({(0, 0), (B - 1, H - 1)})
        found = cls(places, heads, [])
        key = xp.arange(k.shape[2])
        for b, h in heads:
            allowed = seen(b, h, places[:, None], key[None])
            found.values.append(exact_attention(q[b, h][places], k[b, h // group], v[b, h // group], allowed))
        return found

    def error(self, got: Any) -> float:
        """Largest error of an element over max(1, its size). NaN if anything is."""
        off = []
        for (b, h), want in zip(self.heads, self.values, strict=True):
            xp = module_of(want)
            off.append(float((xp.abs(widen(got[b, h][self.places]) - want) / xp.maximum(xp.abs(want), 1)).max()))
        return float(np.max(off))


def exact_gradients(q: Any, k: Any, v: Any, dout: Any, causal: bool) -> list[Any]:
    """dq, dk and dv in float64, with all scores of a head at a time, from q, k, v and dO alone."""
    xp, scale = module_of(q), q.shape[3] ** -0.5
    found = [xp.empty(q.shape) for _ in range(3)]
    for head in range(q.shape[1]):
        q_, k_, v_, dout_ = (widen(y[0, head]) for y in (q, k, v, dout))
        scores = scale * (q_ @ k_.T)
        if causal:
            scores = xp.where(xp.tri(len(q_), dtype=bool), scores, -np.inf)
        p = xp.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        dp = dout_ @ v_.T
        ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
        for result, part in zip(found, (scale * ds @ k_, scale * ds.T @ q_, p.T @ dout_), strict=True):
            result[0, head] = part
    return found


def gradients_error(x: Any, seen: Seen, softcap: float | None, got: Sequence[Any]) -> float:
    """The largest error in dq of some queries and in dk and dv of some keys, each over its largest value.

    `x` has q, k, v, dout and what attention returned for them, out and lse. The last KV head is looked at.
    """
    xp, S = module_of(x.q), x.q.shape[2]
    places = xp.asarray(np.sort(np.random.default_rng(1).choice(S, min(S, 64), replace=False)))
    batch, kv, group = len(x.q) - 1, x.k.shape[1] - 1, x.q.shape[1] // x.k.shape[1]
    every, scale = xp.arange(S), x.q.shape[3] ** -0.5
    k, v = (widen(y[batch, kv]) for y in (x.k, x.v))
    dk, dv = 0.0, 0.0
    worst = []
    for head in range(kv * group, (kv + 1) * group):
        q, dout, out = (widen(y[batch, head]) for y in (x.q, x.dout, x.out))
        lse, delta = widen(x.lse[batch, head])[:, None], (dout * out).sum(axis=1)[:, None]

        def weights(rows: Any, columns: Any, of: Any = (head, q, dout, lse, delta)) -> tuple[Any, Any]:
            """p and ds of some queries and keys."""
            head, q, dout, lse, delta = of
            scores, slopes = scale * q[rows] @ k[columns].T, 1.0
            if softcap is not None:
                bent = xp.tanh(scores / softcap)
                scores, slopes = softcap * bent, 1 - bent * bent
            allowed = seen(batch, head, rows[:, None], columns[None])
            p = xp.where(allowed, xp.exp(scores - lse[rows]), 0)
            return p, p * (dout[rows] @ v[columns].T - delta[rows]) * slopes

        worst.append(_difference(got[0][batch, head][places], scale * weights(places, every)[1] @ k))
        p, ds = weights(every, places)
        dk, dv = dk + scale * ds.T @ q, dv + p.T @ dout
    worst += [_difference(got[i][batch, kv][places], want) for i, want in ((1, dk), (2, dv))]
    return float(np.max(worst))


def _difference(x: Any, y: Any) -> float:
    return float(abs(widen(x) - y).max() / abs(y).max())
