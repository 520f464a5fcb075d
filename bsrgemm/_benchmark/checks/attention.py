"""How far an attention is from softmax(q k^T / sqrt(D)) v in float64, in a few tiles of queries.

What a query may see is computed here from lengths and lists of blocks, without bsrgemm's own masks of elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bsrgemm import BlockMask

from ..peers.attention import as_array
from ..random_data import module_of, widen

#: Queries of a tile that is checked
_CHECKED = 32
#: Largest error of an element over max(1, its size). Rounding costs 5e-4 and 4e-3, rounding the weights as much again.
#: Weights of fp8 are rounded by up to a sixteenth, and where a query sees few keys nothing averages that out.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "e4m3": 2e-1, "float32": 1e-5, "float64": 1e-13}


@dataclass(frozen=True)
class Seen:
    """Which keys the queries of `heads` heads may see: `window` keys up to their own, those of a mask, or all."""

    heads: int
    causal: bool = False
    window: int | None = None
    mask: BlockMask | None = None

    def rows(self, length: int, b: int, h: int, queries: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The keys of some queries of one head, (queries, keys)."""
        key = np.arange(length)
        seen = np.ones((len(queries), length), bool)
        if self.causal or self.window is not None:
            seen &= key <= queries[:, None]
        if self.window is not None:
            seen &= key > queries[:, None] - self.window
        if self.mask is not None:
            (B, H), (bq, bk) = self.mask.heads, self.mask.block
            pattern = b % B * H + h // (self.heads // H)
            arrays = (self.mask.indptr, self.mask.indices)
            first, indices = (x if isinstance(x, np.ndarray) else x.get() for x in arrays)
            for place, row in enumerate(pattern * -(-length // bq) + queries // bq):
                stored = np.zeros(-(-length // bk), bool)
                stored[indices[first[row] : first[row + 1]]] = True
                seen[place] &= stored[key // bk]
        return seen


def exact(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """softmax(q k^T / sqrt(D)) v in float64, for some queries of one head."""
    xp = module_of(q)
    scores = widen(q) @ widen(k).T / q.shape[-1] ** 0.5
    scores = xp.where(xp.asarray(seen), scores, -np.inf)
    weights = xp.exp(scores - xp.maximum(scores.max(axis=1, keepdims=True), np.finfo(np.float64).min))
    total = weights.sum(axis=1, keepdims=True)
    return weights @ widen(v) / xp.where(total == 0, 1, total)


def deviation(got: Any, want: Any) -> float:
    """Largest error of an element over max(1, its size). NaN if anything is."""
    xp = module_of(want)
    return float((xp.abs(widen(got) - want) / xp.maximum(xp.abs(want), 1)).max())


def checked_tiles(S: int) -> list[slice]:
    """Queries at both ends, and across the middle.

    >>> checked_tiles(100)
    [slice(0, 32, None), slice(34, 66, None), slice(68, 100, None)]
    """
    each = min(_CHECKED, S)
    starts = sorted({0, max(0, S // 2 - each // 2), S - each})
    return [slice(start, start + each) for start in starts]


@dataclass
class Reference:
    """The expected results of some queries in float64, computed once for our result and those of all peers."""

    tiles: list[slice]
    heads: list[tuple[int, int]]
    values: list[Any]

    @classmethod
    def of(cls, seen: Seen, q: Any, k: Any, v: Any, *, whole: bool = False) -> Reference:
        """Expect some tiles of the first and the last head, or all queries and heads (`whole`)."""
        B, H, S, _ = q.shape
        group = H // k.shape[1]
        found = cls(checked_tiles(S), sorted({(0, 0), (B - 1, H - 1)}), [])
        if whole:
            found = cls([slice(0, S)], [(b, h) for b in range(B) for h in range(H)], [])
        queries = np.concatenate([np.arange(tile.start, tile.stop) for tile in found.tiles])
        for b, h in found.heads:
            allowed = seen.rows(k.shape[2], b, h, queries)
            found.values.append(exact(found.picked(q[b, h]), k[b, h // group], v[b, h // group], allowed))
        return found

    def picked(self, x: Any) -> Any:
        """The rows of the tiles, in float64."""
        return module_of(x).concatenate([widen(x[tile]) for tile in self.tiles])

    def error(self, result: Any) -> float:
        got = as_array(result)
        pairs = zip(self.heads, self.values, strict=True)
        return float(np.max([deviation(self.picked(got[b, h]), want) for (b, h), want in pairs]))
