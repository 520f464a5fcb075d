"""The gradients of attention on the CPU. With the weights ``p[i, j] = exp(s[i, j] - lse[i])``:

    dv[j] = sum_i p[i, j] dout[i]
    ds[i, j] = p[i, j] (dout[i] . v[j] - delta[i])
    dq[i] = scale * sum_j ds[i, j] k[j]          dk[j] = scale * sum_i ds[i, j] q[i]

A tile of queries is multiplied with one chunk of its keys at a time, as in `host_tiles`, by five products of BLAS. A
head of keys belongs to one thread, which adds up its gradients tile after tile: results do not depend on the number of
threads. Beside the operands there are two tiles of scores and the sums of dk and dv of one head for each thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array
from .host_tiles import Band, Chunk, Hole, chunks, gathered, hidden_by, most_queries, on_threads, patterns, query_tiles
from .mask import BlockMask


@dataclass(slots=True)
class GroupedBackward:
    """Arguments of the gradients of attention whose query heads are grouped by the head of K and V that they read."""

    #: q and dq are (B, H, G, S_q, D), dout is (B, H, G, S_q, D_v), of any strides
    q: Array
    #: k and dk are (B, H, S_k, D), v and dv are (B, H, S_k, D_v)
    k: Array
    v: Array
    dout: Array
    #: logarithms of the sums of exp(score), and what is subtracted from ``dout . v``: (B, H, G, S_q) in `acc`
    lse: Array
    delta: Array
    dq: Array
    dk: Array
    dv: Array
    #: dtype of the sums
    acc: np.dtype[Any]
    scale: float
    softcap: float | None
    band: Band
    #: a mask on the host of shape (S_q, S_k), with patterns that fit B, H and G
    mask: BlockMask | None = None


class _Unit(NamedTuple):
    """A head of keys of one batch, with the query heads that read it and the patterns of these."""

    batch: int
    head: int
    groups: list[tuple[slice, int]]


def backward(call: GroupedBackward) -> None:
    """Write dq, dk and dv."""
    B, H, G, S_q, _ = call.q.shape
    S_k = call.k.shape[2]
    if not B * H * G * S_q:
        call.dk[...], call.dv[...] = 0, 0
        return
    units = list(_units(call.mask, B, H, G))
    keys = [sum(_scores(call, group, pattern) for group, pattern in unit.groups) for unit in units]
    work = np.cumsum([0, *(1 + n for n in keys)])

    def differentiate(first: int, last: int) -> None:
        tile = _Tile(call, hidden_by(call.band, call.mask))
        with np.errstate(all="ignore"):
            for batch, head, groups in units[first:last]:
                dk = np.zeros((S_k, call.k.shape[3]), call.acc)
                dv = np.zeros((S_k, call.v.shape[3]), call.acc)
                for group, pattern in groups:
                    for queries in query_tiles(call.band, call.mask, pattern, S_q, most_queries(group)):
                        parts = list(chunks(queries.pieces(call.band, call.mask, S_k)))
                        tile.add((batch, head, group, slice(queries.first, queries.last)), parts, dk, dv)
                call.dk[batch, head], call.dv[batch, head] = dk, dv

    on_threads(differentiate, work)


def _scores(call: GroupedBackward, group: slice, pattern: int) -> int:
    """An estimate of the number of scores of some heads."""
    tiles = query_tiles(call.band, call.mask, pattern, call.q.shape[3], most_queries(group))
    count = sum(len(tile) * tile.keys(call.band, call.mask, call.k.shape[2]) for tile in tiles)
    return (group.stop - group.start) * count


def _units(mask: BlockMask | None, B: int, H: int, G: int) -> Iterator[_Unit]:
    """All heads of keys, each with the query heads that read it, by their patterns."""
    found: dict[tuple[int, int], list[tuple[slice, int]]] = {(b, h): [] for b in range(B) for h in range(H)}
    for batches, heads, group, pattern in patterns(mask, B, H, G):
        for b in range(batches.start, batches.stop):
            for h in range(heads.start, heads.stop):
                found[b, h].append((group, pattern))
    return (_Unit(b, h, groups) for (b, h), groups in found.items())


class _Tile:
    """The gradients of one tile of queries with one chunk of keys after the other."""

    def __init__(self, call: GroupedBackward, hidden: Callable[[Hole], Array]) -> None:
        self.call, self.hidden = call, hidden
        self.memory = [np.empty(0, call.acc) for _ in range(3)]

    def add(self, where: tuple[int, int, slice, slice], parts: list[Chunk], dk: Array, dv: Array) -> None:
        """Write dq of a tile, and add what it contributes to the gradients of its head of keys."""
        call = self.call
        acc, head = call.acc, where[:2]
        g, n, D = call.q[where].shape
        rows = g * n
        scale = acc.type(call.scale)
        q = np.ascontiguousarray(call.q[where].reshape(rows, D), acc) * scale
        dout = np.ascontiguousarray(call.dout[where].reshape(rows, -1), acc)
        # A query that sees no key has -inf here; exp(score - inf) is 0 for all of its scores.
        lse = np.array(call.lse[where].reshape(rows, 1), acc)
        lse[lse == -np.inf] = np.inf
        delta = np.ascontiguousarray(call.delta[where].reshape(rows, 1), acc)
        dq = np.zeros((rows, D), acc)
        k, v = (x[head][None, None] for x in (call.k, call.v))
        for chunk in parts:
            keys, values = gathered(k, chunk, acc)[0, 0], gathered(v, chunk, acc)[0, 0]
            p, ds, slope = (self._matrix(i, rows, chunk.width) for i in range(3))
            np.matmul(q, keys.T, out=p)
            if call.softcap is not None:
                p /= acc.type(call.softcap)
                np.tanh(p, out=p)
                np.multiply(p, p, out=slope)
                np.subtract(1, slope, out=slope)
                p *= acc.type(call.softcap)
            p -= lse
            np.exp(p, out=p)
            np.matmul(dout, values.T, out=ds)
            ds -= delta
            ds *= p
            if call.softcap is not None:
                ds *= slope
            sight = _Sight(chunk, self.hidden, g, n)
            sight.hide(p)
            sight.hide(ds)
            dq += sight.over_keys(ds, keys)
            _scatter(dk, chunk, sight.over_queries(ds, q))
            _scatter(dv, chunk, sight.over_queries(p, dout))
        dq *= scale
        call.dq[where] = dq.reshape(g, n, D)

    def _matrix(self, number: int, rows: int, columns: int) -> Array:
        """Memory for one of the three matrices of a tile, which is used again for the next tile."""
        if len(self.memory[number]) < rows * columns:
            self.memory[number] = np.empty(rows * columns, self.call.acc)
        return self.memory[number][: rows * columns].reshape(rows, columns)


class _Sight:
    """Which queries of a tile see which keys of a chunk; the rows of a tile are those of g heads, one after the other.

    A product with something that is not finite must not reach those that do not see it: 0 x Inf would be NaN there.
    """

    def __init__(self, chunk: Chunk, hidden: Callable[[Hole], Array], g: int, n: int) -> None:
        self.chunk, self.hidden, self.shape = chunk, hidden, (g, n)

    def hide(self, weights: Array) -> None:
        """Set the weights to 0 where a query does not see a key, whatever they are."""
        by_head = weights.reshape(*self.shape, -1)
        for columns, hole in self.chunk.holes:
            np.copyto(by_head[..., columns], 0, where=self.hidden(hole))

    def over_keys(self, weights: Array, keys: Array) -> Array:
        """``weights @ keys``, of shape (rows, D)."""
        return self._product(weights, keys, self._lost(~np.isfinite(keys).all(axis=1), along=1))

    def over_queries(self, weights: Array, queries: Array) -> Array:
        """``weights.T @ queries``, of shape (keys, D)."""
        lost = self._lost(~np.isfinite(queries).all(axis=1).reshape(self.shape), along=0)
        return self._product(weights.T, queries, lost)

    def _lost(self, broken: Array, along: int) -> list[tuple[int, Array]]:
        """The rows of a factor that are not finite and not seen by all, and by whom each of them is seen."""
        if not self.chunk.holes or not broken.any():
            return []
        g, n = self.shape
        sees = np.ones((n, self.chunk.width), bool)
        for columns, hole in self.chunk.holes:
            sees[:, columns] &= ~self.hidden(hole)
        if along == 1:
            return [(int(j), np.tile(sees[:, j], g)) for j in np.flatnonzero(broken)]
        return [(int(h * n + i), sees[i]) for h, i in zip(*np.nonzero(broken), strict=True)]

    def _product(self, weights: Array, factor: Array, lost: list[tuple[int, Array]]) -> Array:
        if not lost:
            return np.matmul(weights, factor)
        finite = factor.copy()
        finite[[i for i, _ in lost]] = 0
        found = np.matmul(weights, finite)
        for i, sees in lost:
            found[sees] += weights[sees, i, None] * factor[i]
        return found


def _scatter(total: Array, chunk: Chunk, part: Array) -> None:
    """Add the rows of a chunk to those of its keys."""
    at = 0
    for keys in chunk.keys:
        end = at + keys.stop - keys.start
        total[keys] += part[at:end]
        at = end


def delta_of(dout: Array, out: Array, acc: np.dtype[Any]) -> Array:
    """The sums of ``dout * out`` over the columns, in the dtype of the sums, one head after the other."""
    found = np.empty(dout.shape[:-1], acc)
    with np.errstate(all="ignore"):
        for head in np.ndindex(found.shape[:2]):
            found[head] = np.einsum("nd,nd->n", dout[head].astype(acc, copy=False), out[head].astype(acc, copy=False))
    return found
