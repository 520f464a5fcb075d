"""Products of two matrices in panels: ``A B``, for which rows of B travel, and ``P^H B``, for which rows of it do."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._backend.base import Array, Blocks
from .halo import Halo


def _rows_exchanged(halo: Halo, rows: Any, back: bool) -> tuple[Array, Array, Array]:
    """Exchange block rows: those that `rows` has come out at the ranks that need them, as data, indices and pointers.

    `rows` has one block row for each of ``halo.index``, and the result one for each ghost; with `back` it is the other
    way round.
    """
    xp = halo.backend.xp
    data, indices, indptr = rows._canonical()
    sends, receives = (halo.receives, halo.sends) if back else (halo.sends, halo.receives)
    count = len(halo.index) if back else halo.count
    lengths = xp.empty(count, np.int64)
    mine = (indptr[1:] - indptr[:-1]).astype(np.int64)
    halo.comm.exchange({r: mine[s] for r, s in sends.items()}, {r: lengths[s] for r, s in receives.items()}).wait()
    pointers = xp.zeros(count + 1, np.int64)
    xp.cumsum(lengths, out=pointers[1:])
    ends_here, ends_there = halo.backend.to_host(indptr), halo.backend.to_host(pointers)  # synchronize!
    found = []
    for array in (data, indices.astype(np.int64)):
        array = xp.ascontiguousarray(array)
        coming = xp.empty((int(ends_there[-1]), *array.shape[1:]), array.dtype)
        halo.comm.exchange(
            {r: array[ends_here[s.start] : ends_here[s.stop]] for r, s in sends.items()},
            {r: coming[ends_there[s.start] : ends_there[s.stop]] for r, s in receives.items()},
        ).wait()
        found.append(coming)
    return found[0], found[1], pointers


def product(A: Any, panel: Any) -> Any:
    """Return the panel of ``A B`` of this rank; `panel` is that of B, with all columns, whose rows are A's columns."""
    halo, ghost = A._halo, A.ghost_panel()
    data, indices, indptr = _rows_exchanged(halo, panel.select_blocks(rows=halo.index), back=False)
    found = A.interior @ panel
    if not halo.count:
        return found
    index = panel.indices.dtype
    R = panel.blocksize[0]
    rows = panel._new(
        Blocks(data, indices.astype(index), indptr.astype(index)), (halo.count * R, panel.shape[1]), canonical=True
    )
    return found + ghost @ rows


def transposed_product(P: Any, panel: Any) -> Any:
    """Return the panel of ``P^H B`` of this rank; `panel` is that of B, with all columns, whose rows are P's rows.

    What the ranks have for one block is stored in their order, this rank's own part first, and added when it is read.
    """
    halo, backend, xp = P._halo, P._backend, P._backend.xp
    own = P.interior.conj().T.copy() @ panel
    others = P.ghost_panel().conj().T.copy() @ panel
    data, indices, pointers = _rows_exchanged(halo, others, back=True)
    if not len(indices):
        return own
    mine = own._canonical()
    row = halo.index[backend.expand(pointers, len(indices))]
    whole = (
        xp.concatenate([mine.data, data]),
        (
            xp.concatenate([backend.expand(mine.indptr, len(mine.indices)).astype(np.int64), row.astype(np.int64)]),
            xp.concatenate([mine.indices.astype(np.int64), indices]),
        ),
    )
    return type(own)(whole, shape=own.shape)


def gathered(panel: Any, comm: Any) -> Any:
    """Return the whole matrix on every rank; `panel` has the block rows of this one, with all columns."""
    xp = panel._backend.xp
    data, indices, indptr = panel._canonical()
    lengths = xp.concatenate(comm.allgather((indptr[1:] - indptr[:-1]).astype(np.int64)))
    pointers = xp.zeros(len(lengths) + 1, np.int64)
    xp.cumsum(lengths, out=pointers[1:])
    arrays = [xp.concatenate(comm.allgather(x)) for x in (data, indices.astype(np.int64))]
    return type(panel)((*arrays, pointers), shape=(len(lengths) * panel.blocksize[0], panel.shape[1]))
