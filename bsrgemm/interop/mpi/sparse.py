"""What panels of other ranks are needed for: the halo of a panel, and sparse products whose patterns are found once.

The halo is the block columns that other ranks have, and who sends which of them to whom; its lists are made once for a
pattern. The first call of ``A B``, of ``P^H B`` or of a sum over ranks exchanges patterns and makes plans. Later calls,
with operands of the same patterns, exchange and compute numbers only, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._backend import structure
from ..._backend.base import Array, Backend, Blocks
from ..._products.spgemm import plan
from ..communicator import Communicator, Exchange


def exchanged(comm: Communicator, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Send ``parts[r]`` to rank r and return what each rank has sent to this one; arrays of one dtype on the host.

    Every rank learns all lengths, so this is for setting up.
    """
    lengths = comm.allgather(np.array([[len(part) for part in parts]], np.int64))
    found = [np.empty(int(lengths[rank][0, comm.rank]), parts[0].dtype) for rank in range(comm.size)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    comm.exchange({r: np.ascontiguousarray(parts[r]) for r in others}, {r: found[r] for r in others}).wait()
    found[comm.rank] = parts[comm.rank]
    return found


def _slices(lengths: list[int]) -> dict[int, slice]:
    """By rank, where its part of the concatenation is; ranks without one are left out."""
    ends = np.cumsum([0, *lengths]).tolist()
    return {rank: slice(ends[rank], ends[rank + 1]) for rank, length in enumerate(lengths) if length}


@dataclass(frozen=True)
class Halo:
    """Which block columns of this rank others need, and which of others this rank needs."""

    comm: Communicator
    backend: Backend
    #: Elements of a block column.
    width: int
    #: The block columns of this rank that are sent, from 0 on: those for the lowest rank first.
    index: Array
    #: By rank, the places in `index`.
    sends: dict[int, slice]
    #: By rank, the places among the ghosts.
    receives: dict[int, slice]
    #: How many block columns this rank needs from others.
    count: int

    @classmethod
    def of(cls, comm: Communicator, backend: Backend, width: int, starts: np.ndarray, ghosts: np.ndarray) -> Halo:
        """Make the lists, on all ranks together.

        Parameters
        ----------
        comm, backend, width
            As the fields.
        starts : array (size + 1,)
            The block columns of rank r are those from ``starts[r]`` to ``starts[r + 1] - 1``.
        ghosts : array
            The block columns of others that this rank needs, ascending.
        """
        bounds = np.searchsorted(ghosts, starts)
        wanted = [ghosts[bounds[r] : bounds[r + 1]].astype(np.int64) for r in range(comm.size)]
        asked = exchanged(comm, wanted)
        index = np.concatenate(asked) - starts[comm.rank]
        return cls(
            comm,
            backend,
            width,
            backend.from_host(index),
            _slices([len(part) for part in asked]),
            _slices([len(part) for part in wanted]),
            len(ghosts),
        )

    def fetch(self, x: Array) -> tuple[Exchange, Array]:
        """Start to bring the ghosts of x, (n * width,) or (n * width, k); the second array is filled after a wait."""
        width, xp = self.width, self.backend.xp
        # NumPy keeps the order of x in memory, which may be that of Fortran.
        packed = xp.ascontiguousarray(x.reshape(len(x) // width, width, *x.shape[1:])[self.index])
        ghosts = xp.empty((self.count, width, *x.shape[1:]), x.dtype)
        under_way = self.comm.exchange(
            {rank: packed[part] for rank, part in self.sends.items()},
            {rank: ghosts[part] for rank, part in self.receives.items()},
        )
        return under_way, ghosts.reshape(self.count * width, *x.shape[1:])

    def give_back(self, ghosts: Array) -> tuple[Exchange, Array]:
        """Start to send numbers of the ghosts to their ranks; the second array, one part for each of `index`, comes."""
        width, xp = self.width, self.backend.xp
        packed = xp.ascontiguousarray(ghosts).reshape(self.count, width, *ghosts.shape[1:])
        coming = xp.empty((len(self.index), width, *ghosts.shape[1:]), ghosts.dtype)
        under_way = self.comm.exchange(
            {rank: packed[part] for rank, part in self.receives.items()},
            {rank: coming[part] for rank, part in self.sends.items()},
        )
        return under_way, coming

    def refuse(self, back: bool = False) -> None:
        """Let the ranks that wait for this one know that nothing will come: no `fetch`, or no `give_back`."""
        self.comm.refuse(*((self.receives, self.sends) if back else (self.sends, self.receives)))

    def bytes(self, itemsize: int, columns: int = 1) -> int:
        """What this rank receives for one product with so many columns."""
        return self.count * self.width * itemsize * columns


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
