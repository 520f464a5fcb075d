"""Sparse products in panels, whose patterns are found once: ``A B``, ``P^H B`` and their sums over ranks.

The first call of a product exchanges patterns and makes plans. Later calls, with operands of the same patterns,
exchange and compute numbers only, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._backend import structure
from ..._backend.base import Array, Blocks
from ..._products.spgemm import plan
from .halo import Halo


class _RowExchange:
    """Block rows that travel: the pattern of those that come is found once, and their blocks come with each call.

    A panel has one block row for each block column of this rank, and one comes for each ghost. With `back`, the panel
    has one for each ghost, and one comes for each of ``halo.index``.
    """

    def __init__(self, halo: Halo, panel: Any, back: bool) -> None:
        self._halo, xp = halo, halo.backend.xp
        self._sends, self._receives = (halo.receives, halo.sends) if back else (halo.sends, halo.receives)
        _, indices, indptr = panel._canonical()
        lengths = (indptr[1:] - indptr[:-1]).astype(np.int64)
        #: the blocks of the panel that are sent; None for all of them
        self._sent: Array | None = None
        if not back:
            first, lengths = indptr[:-1][halo.index].astype(np.int64), lengths[halo.index]
            pointers = _pointers(xp, lengths)
            row = halo.backend.expand(pointers, int(pointers[-1]))  # synchronize!
            self._sent = xp.arange(len(row)) + (first - pointers[:-1])[row]
            indices = indices[self._sent]
        pointers = _pointers(xp, self._exchanged(lengths, None, len(halo.index) if back else halo.count))
        #: on the host, where the block rows that go and those that come end
        self._ends = [halo.backend.to_host(x) for x in (_pointers(xp, lengths), pointers)]  # synchronize!
        self._count = int(self._ends[1][-1])
        #: block columns of the blocks that come, and where their block rows end
        self.indices = self._exchanged(indices, self._ends, self._count)
        self.indptr = pointers.astype(indices.dtype)

    def __call__(self, panel: Any) -> Array:
        """Return the blocks that come for a panel with the pattern of the first one."""
        data = panel._canonical().data
        return self._exchanged(data if self._sent is None else data[self._sent], self._ends, self._count)

    def parts(self, coming: Array) -> list[Array]:
        """Return the parts of an array of blocks that have come, by rank."""
        return [coming[_within(self._ends[1], rows)] for _, rows in sorted(self._receives.items())]

    def _exchanged(self, array: Array, ends: Any, count: int) -> Array:
        """Exchange an array with an element for each block row; for each block, if `ends` says where rows end."""
        xp, (here, there) = self._halo.backend.xp, ends or (None, None)
        array, coming = xp.ascontiguousarray(array), xp.empty((count, *array.shape[1:]), array.dtype)
        self._halo.comm.exchange(
            {rank: array[_within(here, rows)] for rank, rows in self._sends.items()},
            {rank: coming[_within(there, rows)] for rank, rows in self._receives.items()},
        ).wait()
        return coming


def _pointers(xp: Any, lengths: Array) -> Array:
    found = xp.zeros(len(lengths) + 1, np.int64)
    xp.cumsum(lengths, out=found[1:])
    return found


def _within(ends: Any, rows: slice) -> slice:
    return rows if ends is None else slice(int(ends[rows.start]), int(ends[rows.stop]))


class Sum:
    """The sum of blocks in several parts, in the order of the parts; no part has two blocks at one place.

    Every block that a part has is stored, also where the numbers of all parts cancel.

    Parameters
    ----------
    like : bsr_array
        A matrix of the shape and class of the sum.
    keys : sequence of arrays
        By part, the places of its blocks: ``block row * block columns + block column``.
    """

    def __init__(self, like: Any, keys: Sequence[Array]) -> None:
        xp, every = like._backend.xp, like._backend.xp.concatenate(keys)
        every = np.sort(every, kind="stable") if xp is np else xp.sort(every)  # on the host, ordered parts are merged
        union = every[structure.first_of_runs(like._backend, every)]  # synchronize!
        self._places = [xp.searchsorted(union, key) for key in keys]
        rows, cols = like._block_shape
        self._index = structure.keys_to_index(like._backend, union, rows, cols, like.indices.dtype)

    def __call__(self, like: Any, parts: Sequence[Array]) -> Any:
        """Return the sum of the blocks of all parts as a matrix of the shape and class of `like`."""
        count = len(self._index[0])
        if len(parts[0]) == count:
            data = parts[0].copy()
        else:
            data = like._backend.xp.zeros((count, *like.blocksize), like.dtype)
            data[self._places[0]] = parts[0]
        for place, part in zip(self._places[1:], parts[1:], strict=True):
            data[place] += part
        return like._new(Blocks(data, *self._index), canonical=True)


def keys_of(A: Any) -> Array:
    """Return the places of the blocks of a matrix, for a `Sum`."""
    _, indices, indptr = A._canonical()
    return structure.block_keys(A._backend, indices, indptr, A._block_shape[1])


class Product:
    """``A B`` for a matrix over ranks and a panel of B with all columns, whose rows are A's columns; a panel again."""

    _plans: Any = None
    _sum: Sum | None = None

    def __call__(self, A: Any, panel: Any) -> Any:
        """Return the product; all ranks call this together."""
        if self._plans is None:
            self._rows, self._plans = _RowExchange(A._halo, panel, back=False), [plan(A.interior, panel)]
        shape = (A._halo.count * panel.blocksize[0], panel.shape[1])
        there = panel._new(Blocks(self._rows(panel), self._rows.indices, self._rows.indptr), shape, canonical=True)
        found = self._plans[0](A.interior, panel)
        if not A._halo.count:
            return found
        ghost = A.ghost_panel()
        if self._sum is None:
            self._plans.append(plan(ghost, there))
        other = self._plans[1](ghost, there)
        if self._sum is None:
            self._sum = Sum(found, [keys_of(found), keys_of(other)])
        return self._sum(found, [found.data, other.data])


class TransposedProduct:
    """``P^H B`` for a matrix over ranks and a panel of B with all columns, whose rows are P's rows; a panel again.

    What other ranks have for a block is added to the part of this rank, in their order.
    """

    _plans: Any = None
    _sum: Sum | None = None

    def __call__(self, P: Any, panel: Any) -> Any:
        """Return the product; all ranks call this together."""
        inside, outside = (x.conj().T.copy() for x in (P.interior, P.ghost_panel()))
        if self._plans is None:
            self._plans = plan(inside, panel), plan(outside, panel)
        own, others = self._plans[0](inside, panel), self._plans[1](outside, panel)
        if self._sum is None:
            self._rows = rows = _RowExchange(P._halo, others, back=True)
            row = P._halo.index[P._backend.expand(rows.indptr, len(rows.indices))]
            self._sum = Sum(own, [keys_of(own), *rows.parts(row * own._block_shape[1] + rows.indices)])
        return self._sum(own, [own.data, *self._rows.parts(self._rows(others))])


class Gathering:
    """The whole matrix on every rank, of panels that have the block rows of a rank with all columns."""

    _index: Any = None

    def __call__(self, panel: Any, comm: Any) -> Any:
        """Return the matrix; all ranks call this together."""
        xp = panel._backend.xp
        data, indices, indptr = panel._canonical()
        whole = xp.concatenate(comm.allgather(data))
        if self._index is None:
            lengths = xp.concatenate(comm.allgather((indptr[1:] - indptr[:-1]).astype(np.int64)))
            self._index = xp.concatenate(comm.allgather(indices)), _pointers(xp, lengths).astype(indices.dtype)
        rows = (len(self._index[1]) - 1) * panel.blocksize[0]
        return panel._new(Blocks(whole, *self._index), (rows, panel.shape[1]), canonical=True)
