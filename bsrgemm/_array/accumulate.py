"""Addition of blocks into a pattern that is known: ``data[e] += blocks[k]`` for every k whose position is block e.

Blocks are added in the order in which they are given, so results are the same bit by bit each time. The pattern is not
sorted; on the GPU the positions of the given blocks are, and nothing waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._backend import structure
from .._backend.base import Array, Backend, Blocks

INT64 = np.dtype(np.int64)


def positions(backend: Backend, blocks: Blocks, row: Array, col: Array, block_cols: int) -> Array:
    """Return the position of each block in a matrix in canonical format; for one that is not stored, their number."""
    xp = backend.xp
    _, indices, indptr = blocks
    stored = len(indices)
    inside = (row >= 0) & (row < len(indptr) - 1) & (col >= 0) & (col < block_cols)
    if not stored or not len(row):
        return xp.full(len(row), stored, INT64)
    if backend.loops is not None:
        row, col = xp.where(inside, row, 0), xp.where(inside, col, 0)
        found = backend.loops.positions(blocks, block_cols, row, col)
        return xp.where(inside & (found >= 0), found, stored)
    keys = structure.block_keys(backend, indices, indptr, block_cols)
    wanted = row.astype(INT64, copy=False) * max(block_cols, 1) + col
    found = xp.minimum(xp.searchsorted(keys, wanted), stored - 1)
    return xp.where(inside & (xp.take(keys, found) == wanted), found, stored)


def add(backend: Backend, data: Array, blocks: Array, position: Array) -> None:
    """Add blocks at their positions in `data`, in place and in order; positions at or after its end are ignored.

    Each stored block is the first term of a sum of its own, so no sum is empty, and their number is known without a
    wait. A last sum takes up the blocks that are ignored.
    """
    if not len(blocks) or not len(data):
        return
    xp = backend.xp
    stored, given = len(data), len(blocks)
    if backend.loops is not None:
        inside = position < stored
        if not inside.all():
            blocks, position, given = blocks[inside], position[inside], int(inside.sum())
        if backend.loops.add_at(data, blocks, position):
            return
    by_position = xp.argsort(position, kind="stable")
    position = xp.take(position, by_position)
    number = xp.arange(stored + 1, dtype=INT64)
    starts = number + xp.searchsorted(position, number)
    order = xp.empty(stored + 1 + given, INT64)
    order[starts] = number
    order[xp.arange(given) + position + 1] = by_position + (stored + 1)
    terms = xp.concatenate([data, xp.zeros((1, *data.shape[1:]), data.dtype), blocks])
    data[...] = backend.segment_reduce("add", terms, order, starts)[:stored]


def outside(backend: Backend, position: Array, stored: int) -> int | None:
    """Return the number of the first block that is not stored, or None. Waits for the GPU."""
    xp = backend.xp
    if not len(position):
        return None
    out = position >= stored
    first = int(xp.argmax(out))  # synchronize!
    return first if bool(out[first]) else None  # synchronize!


def as_numbers(x: Any, name: str) -> Array:
    """Return 1-D integers as they are; raise TypeError or ValueError for anything else."""
    if x.ndim != 1:
        raise ValueError(f"{name}: wanted 1-D integers, got shape {tuple(x.shape)}")
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name}: wanted integers, got dtype {x.dtype}")
    return x.astype(INT64) if x.dtype.kind == "u" else x
