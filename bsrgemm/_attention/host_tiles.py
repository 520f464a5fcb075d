"""Attention on the CPU: ``out[i] = sum_j softmax_j(s[i, j]) v[j]``, ``s[i, j] = scale * q[i] . k[j]``, over the keys j
that query i sees. Online softmax: a tile of queries is multiplied with one chunk of its keys at a time, by two products
of BLAS. Beside the operands there is one tile of scores for each thread, whatever the lengths; keys that no query of a
tile sees are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .._backend import threads
from .._backend.base import Array
from .mask import BlockMask
from .mask_base import FULL

#: Rows of a tile of scores, over all heads in it, and its columns: 1 MB in float32, which stays in the L2 cache.
_TILE_ROWS, _TILE_KEYS = 512, 512
#: Elements of K or V that are converted or gathered at a time; this limits the heads that share a tile.
_GATHERED = 1 << 20
#: A narrow band is cut into tiles of at most half its width, but of at least as many queries as BLAS needs to be fast.
_LEAST_QUERIES = 64
#: Element masks that are cached unpacked.
_KEPT_MASKS = 16
#: Scores from which on starting threads pays, and the largest number of threads: each has a tile of scores.
_SHARED, _MOST_THREADS = 1 << 19, 64


class Hole(NamedTuple):
    """A stretch of keys that some queries of a tile do not see, with what `hidden` needs to compute which."""

    #: number of the element mask, or `FULL`
    kind: int
    #: first query and key inside that mask
    i: int
    j: int
    rows: int
    columns: int
    #: ``j - i`` of the first key and query if the band cuts this stretch, otherwise None
    diagonal: int | None

    def split(self, n: int) -> tuple[Hole, Hole]:
        """The first `n` keys, and the keys after them."""
        diagonal = None if self.diagonal is None else self.diagonal + n
        rest = self._replace(j=self.j + n, columns=self.columns - n, diagonal=diagonal)
        return self._replace(columns=n), rest


class Piece(NamedTuple):
    """Keys `start` to `stop` - 1; every query of the tile sees them unless there is a `hole`."""

    start: int
    stop: int
    hole: Hole | None


@dataclass
class Chunk:
    """Keys that are multiplied together, and the columns of their scores that have holes."""

    keys: list[slice]
    holes: list[tuple[slice, Hole]]
    width: int = 0


@dataclass(frozen=True)
class Band:
    """Query i sees key j where ``low <= j - i <= high``."""

    low: int
    high: int

    def pieces(self, first: int, last: int, start: int, stop: int, hole: Hole) -> Iterator[Piece]:
        """The keys among `start` to `stop` - 1 that queries `first` to `last` - 1 see; `hole` has the element mask."""
        begin, end = max(start, first + self.low), min(stop, last + self.high)
        inner, outer = max(begin, last - 1 + self.low), min(end, first + self.high + 1)
        if inner >= outer:
            inner = outer = end
        for a, b, cut in ((begin, inner, True), (inner, outer, False), (outer, end, True)):
            if a >= b:
                continue
            if not cut and hole.kind == FULL:
                yield Piece(a, b, None)
            else:
                diagonal = a - first if cut else None
                yield Piece(a, b, hole._replace(j=a - start, columns=b - a, diagonal=diagonal))


@dataclass(slots=True)
class GroupedCall:
    """Arguments of attention whose query heads are grouped by the head of K and V that they read."""

    #: q is (B, H, G, S_q, D) and out is (B, H, G, S_q, D_v), of any strides
    q: Array
    #: (B, H, S_k, D) and (B, H, S_k, D_v)
    k: Array
    v: Array
    out: Array
    #: (B, H, G, S_q)
    lse: Array | None
    #: dtype of the sums
    acc: np.dtype[Any]
    scale: float
    softcap: float | None
    band: Band
    #: a mask on the host of shape (S_q, S_k), with patterns that fit B, H and G
    mask: BlockMask | None = None


def forward(call: GroupedCall) -> None:
    """Write the result, and the logarithms of the sums of the softmax if they are wanted."""
    q, k, v, out, lse, band, mask = call.q, call.k, call.v, call.out, call.lse, call.band, call.mask
    B, H, G, S_q, _ = q.shape
    if not B * H * G * S_q:
        return
    hidden = hidden_by(band, mask)
    S_k = k.shape[2]
    width = _TILE_KEYS if mask is not None else min(_TILE_KEYS, max(1, S_k))
    together = max(1, _GATHERED // (width * max(1, k.shape[3], v.shape[3])))
    jobs = [
        _Job(group, queries, b, h)
        for batches, heads, group, pattern in patterns(mask, B, H, G)
        for queries in query_tiles(band, mask, pattern, S_q, most_queries(group))
        for b, h in _shares(
            batches, heads, min(together, max(1, _TILE_ROWS // ((group.stop - group.start) * len(queries))))
        )
    ]
    work = np.cumsum([0, *(job.size * job.queries.keys(band, mask, S_k) for job in jobs)])

    def attend(first: int, last: int) -> None:
        """Compute some of the jobs; consecutive jobs often have the same queries."""
        tile = _Tile(call.acc, call.scale, call.softcap, hidden)
        queries, parts = None, []
        with np.errstate(all="ignore"):
            for job in jobs[first:last]:
                if job.queries is not queries:
                    queries = job.queries
                    parts = list(chunks(queries.pieces(band, mask, S_k)))
                where = (job.batches, job.heads, job.group, slice(queries.first, queries.last))
                total, logs = tile.attend(q[where], k[where[:2]], v[where[:2]], parts)
                out[where] = total
                if lse is not None:
                    lse[where] = logs

    on_threads(attend, work)


def on_threads(work: Callable[[int, int], None], starts: Array) -> None:
    """Call ``work(first, last)`` for ranges of units; unit i has ``starts[i + 1] - starts[i]`` scores."""
    threads.share(work, starts, most=_MOST_THREADS, worthwhile=int(starts[-1]) >= _SHARED, blas=True)


class _Job(NamedTuple):
    """A unit of work: a tile of queries in some heads."""

    group: slice
    queries: _Queries
    batches: slice
    heads: slice

    @property
    def size(self) -> int:
        """Number of rows of scores."""
        return math.prod(x.stop - x.start for x in (self.batches, self.heads, self.group)) * len(self.queries)


# ------------------------------------------------------------------------------------------------- who sees what
def patterns(mask: BlockMask | None, B: int, H: int, G: int) -> Iterator[tuple[slice, slice, slice, int]]:
    """(batches, heads of K, query heads of each, number of the pattern) that see the same keys."""
    per_batch, per_head = (1, 1) if mask is None else mask.heads
    for b in range(per_batch):
        batches = slice(b, b + 1) if per_batch > 1 else slice(0, B)
        for h in range(per_head):
            heads, group = slice(0, H), slice(0, G)
            if per_head > 1 and per_head == H:
                heads = slice(h, h + 1)
            elif per_head > 1:
                heads, group = slice(h // G, h // G + 1), slice(h % G, h % G + 1)
            yield batches, heads, group, b * per_head + h


@dataclass(frozen=True)
class _Queries:
    """Queries `first` to `last` - 1 of a pattern; with a mask all of them are in block row `row`."""

    first: int
    last: int
    pattern: int
    row: int

    def __len__(self) -> int:
        return self.last - self.first

    def pieces(self, band: Band, mask: BlockMask | None, S_k: int) -> Iterator[Piece]:
        """The pieces of keys that these queries see."""
        if mask is None:
            return band.pieces(self.first, self.last, 0, S_k, Hole(FULL, 0, 0, len(self), S_k, None))
        return _row_pieces(band, mask, self.pattern, self.row, self.first, self.last)

    def keys(self, band: Band, mask: BlockMask | None, S_k: int) -> int:
        """An estimate of the number of keys that these queries see together."""
        in_band = max(0, min(S_k, self.last + band.high) - max(0, self.first + band.low))
        if mask is None:
            return in_band
        at = self.pattern * -(-mask.shape[0] // mask.block[0]) + self.row
        return min(in_band, int(mask.indptr[at + 1] - mask.indptr[at]) * mask.block[1])


def most_queries(group: slice) -> int:
    """The largest number of queries in a tile of these heads."""
    return max(1, _TILE_ROWS // (group.stop - group.start))


def query_tiles(band: Band, mask: BlockMask | None, pattern: int, S_q: int, most: int) -> Iterator[_Queries]:
    """All queries, at most `most` at a time."""
    most = min(most, max(_LEAST_QUERIES, (band.high - band.low + 1) // 2))
    side = S_q if mask is None else mask.block[0]
    for row in range(-(-S_q // side)):
        end = min(S_q, (row + 1) * side)
        for first in range(row * side, end, most):
            yield _Queries(first, min(end, first + most), pattern, row)


def _row_pieces(band: Band, mask: BlockMask, pattern: int, row: int, first: int, last: int) -> Iterator[Piece]:
    """The keys that queries `first` to `last` - 1 of block row `row` see; neighbouring whole blocks are one piece."""
    (S_q, S_k), (side, width) = mask.shape, mask.block
    at = pattern * -(-S_q // side) + row
    stored = slice(int(mask.indptr[at]), int(mask.indptr[at + 1]))
    i = first - row * side
    start = stop = 0
    for column, kind in zip(mask.indices[stored].tolist(), mask.kinds[stored].tolist(), strict=True):
        begin, end = column * width, min(S_k, (column + 1) * width)
        if kind == FULL and begin == stop:
            stop = end
            continue
        yield from band.pieces(first, last, start, stop, Hole(FULL, 0, 0, last - first, 0, None))
        start = stop = end
        if kind == FULL:
            start = begin
        else:
            yield from band.pieces(first, last, begin, end, Hole(kind, i, 0, last - first, 0, None))
    yield from band.pieces(first, last, start, stop, Hole(FULL, 0, 0, last - first, 0, None))


def chunks(pieces: Iterator[Piece]) -> Iterator[Chunk]:
    """Join the pieces into chunks of `_TILE_KEYS` keys; neighbours become one slice."""
    chunk = Chunk([], [])
    for start, stop, hole in pieces:
        while start < stop:
            n = min(stop - start, _TILE_KEYS - chunk.width)
            if chunk.keys and chunk.keys[-1].stop == start:
                chunk.keys[-1] = slice(chunk.keys[-1].start, start + n)
            else:
                chunk.keys.append(slice(start, start + n))
            if hole is not None:
                here, hole = hole.split(n)
                chunk.holes.append((slice(chunk.width, chunk.width + n), here))
            chunk.width += n
            start += n
            if chunk.width == _TILE_KEYS:
                yield chunk
                chunk = Chunk([], [])
    if chunk.width:
        yield chunk


def hidden_by(band: Band, mask: BlockMask | None) -> Callable[[Hole], Array]:
    """A function from a hole to booleans (queries, keys): True where the query does not see the key."""

    @lru_cache(maxsize=_KEPT_MASKS)
    def hidden(hole: Hole) -> Array:
        _, i, j, rows, columns, diagonal = hole
        away = None
        if diagonal is not None:
            key, place = np.arange(columns), np.arange(rows)[:, None] - diagonal
            away = (key < place + band.low) | (key > place + band.high)
        if hole.kind == FULL:
            return away
        assert mask is not None
        masked = ~mask.elements(hole.kind)[i : i + rows, j : j + columns]
        return masked if away is None else masked | away

    return hidden


def _shares(batches: slice, heads: slice, count: int) -> Iterator[tuple[slice, slice]]:
    """Divide batches and heads into parts of at most `count` pairs of batch and head."""
    per_batch = min(count, max(1, heads.stop - heads.start))
    whole = per_batch >= heads.stop - heads.start
    per_tile = max(1, count // per_batch) if whole else 1
    for b in range(batches.start, batches.stop, per_tile):
        for h in range(heads.start, heads.stop, per_batch):
            yield slice(b, min(batches.stop, b + per_tile)), slice(h, min(heads.stop, h + per_batch))


# ------------------------------------------------------------------------------------------------- the arithmetic
class _Tile:
    """Attention of one tile of queries; the memory of the scores is used again for the next tile."""

    def __init__(
        self, acc: np.dtype[Any], scale: float, softcap: float | None, hidden: Callable[[Hole], Array]
    ) -> None:
        self.acc, self.hidden = acc, hidden
        self.scale = acc.type(scale)
        self.softcap = None if softcap is None else acc.type(softcap)
        self.memory = np.empty(0, acc)

    def attend(self, q: Array, k: Array, v: Array, chunks: list[Chunk]) -> tuple[Array, Array]:
        """``softmax(q @ k.T) @ v`` of shape (b, h, g, n, D_v) and the logarithms of the sums, (b, h, g, n).

        `q` is (b, h, g, n, D), `k` (b, h, S_k, D), `v` (b, h, S_k, D_v). The rows of a tile are those of the g heads,
        one head after the other.
        """
        b, h, g, n, D = q.shape
        rows, D_v = g * n, v.shape[3]
        queries = np.empty((b, h, rows, D), self.acc)
        queries.reshape(q.shape)[...] = q
        queries *= self.scale
        total = np.zeros((b, h, rows, D_v), self.acc)
        weight = np.zeros((b, h, rows, 1), self.acc)
        top = np.full((b, h, rows, 1), -np.inf, self.acc)
        seen = np.zeros(n, bool)
        for chunk in chunks:
            scores = self._scores(queries, gathered(k, chunk, self.acc))
            by_head = scores.reshape(b, h, g, n, chunk.width)
            for columns, hole in chunk.holes:
                np.copyto(by_head[..., columns], -np.inf, where=self.hidden(hole))
            higher = np.maximum(top, scores.max(axis=-1, keepdims=True))
            # A row without a key so far gets exp(-inf - 0) = 0 everywhere; exp(-inf - -inf) would be NaN.
            origin = np.where(higher == -np.inf, self.acc.type(0), higher)
            scores -= origin
            np.exp(scores, out=scores)
            fade = np.exp(top - origin)
            weight *= fade
            weight += scores.sum(axis=-1, keepdims=True)
            total *= fade
            total += self._weighted(scores, gathered(v, chunk, self.acc), chunk, (b, h, g, n))
            top = higher
            self._look(seen, chunk)
        logs = np.log(weight) + top
        # All scores of the keys seen are -inf: the softmax is 0 / 0 = NaN. An lse of -inf is only for queries without
        # keys.
        logs[weight == 0] = np.nan
        total /= weight
        total, logs = total.reshape(b, h, g, n, D_v), logs.reshape(b, h, g, n)
        if not seen.all():
            total[..., ~seen, :] = 0
            logs[..., ~seen] = -np.inf
        return total, logs

    def _scores(self, queries: Array, keys: Array) -> Array:
        shape = (*queries.shape[:3], keys.shape[2])
        size = int(np.prod(shape))
        if len(self.memory) < size:
            self.memory = np.empty(size, self.acc)
        scores = self.memory[:size].reshape(shape)
        np.matmul(queries, keys.swapaxes(-1, -2), out=scores)
        if self.softcap is not None:
            scores /= self.softcap
            np.tanh(scores, out=scores)
            scores *= self.softcap
        return scores

    def _weighted(self, weights: Array, v: Array, chunk: Chunk, shape: tuple[int, int, int, int]) -> Array:
        """``weights @ v``; a value that a query does not see adds 0 even if it is NaN or infinite (0 x Inf would be
        NaN).
        """
        lost = [
            (columns.start + int(j), ~self.hidden(hole)[:, j])
            for columns, hole in chunk.holes
            for j in np.flatnonzero(~np.isfinite(v[:, :, columns]).all(axis=(0, 1, 3)))
        ]
        if not lost:
            return np.matmul(weights, v)
        finite = v.copy()
        finite[:, :, [j for j, _ in lost]] = 0
        product = np.matmul(weights, finite)
        by_head, weights = product.reshape(*shape, -1), weights.reshape(*shape, -1)
        for j, sees in lost:
            by_head[..., sees, :] += weights[..., sees, j, None] * v[:, :, None, j, None]
        return product

    def _look(self, seen: Array, chunk: Chunk) -> None:
        """Mark the queries that have seen a key."""
        if sum(hole.columns for _, hole in chunk.holes) < chunk.width:
            seen[:] = True
        for _, hole in chunk.holes:
            if seen.all():
                return
            seen |= ~self.hidden(hole).all(axis=1)


def gathered(x: Array, chunk: Chunk, acc: np.dtype[Any]) -> Array:
    """The rows of K or V of a chunk, (b, h, width, D), as BLAS reads them: a view where the strides allow it, else a
    copy.
    """
    if len(chunk.keys) == 1:
        part = x[:, :, chunk.keys[0]]
        down, along = part.strides[2:]
        size = acc.itemsize
        direct = along == size and down >= size * part.shape[3] and down % size == 0
        if direct and part.dtype == acc and part.flags.aligned:
            return part
        return np.ascontiguousarray(part, acc)
    gathered = np.empty((*x.shape[:2], chunk.width, x.shape[3]), acc)
    at = 0
    for keys in chunk.keys:
        end = at + keys.stop - keys.start
        gathered[:, :, at:end] = x[:, :, keys]
        at = end
    return gathered
