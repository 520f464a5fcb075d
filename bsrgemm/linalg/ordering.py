"""Orders in which the nodes of a matrix can be solved for in groups: colours, and levels of a triangle.

A node is a block row. Nodes of a group do not depend on each other, so that a group is one product.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array, Backend, Blocks
from .aggregation import hashed


def colours(A: Any) -> tuple[Array, int]:
    """Return a colour for each node, such that connected nodes have different ones, and the number of colours.

    Round by round, the nodes whose mixed index is the largest among their neighbours without a colour get the next one.
    The choice depends on the pattern alone.
    """
    backend: Backend = A._backend
    xp = backend.xp
    _, indices, indptr = A._canonical()
    n = len(indptr) - 1
    row = backend.expand(indptr, len(indices))
    # Both directions of a connection count, also where only one of them is stored.
    ends = xp.concatenate([row, indices, xp.arange(n)]), xp.concatenate([indices, row, xp.arange(n)])
    order = xp.argsort(ends[0])
    starts = xp.searchsorted(ends[0][order], xp.arange(n))
    other = ends[1][order]
    key = hashed(xp, n)
    colour = xp.full(n, -1, np.int64)
    count = 0
    while bool((colour < 0).any()):  # synchronize!
        waiting = xp.where(colour < 0, key, -1)
        highest = backend.segment_reduce("maximum", waiting[other], None, starts)
        colour = xp.where((colour < 0) & (highest == key), count, colour)
        count += 1
    return colour, count


def levels(A: Any, lower: bool = True) -> tuple[Array, int]:
    """Return for each node the length of the longest chain of connected nodes before it, and the number of lengths.

    Before it are the nodes with a smaller index, or with a larger one if `lower` is False. Solving for one level after
    the other is solving for the nodes in their order.
    """
    backend: Backend = A._backend
    xp = backend.xp
    _, indices, indptr = A._canonical()
    n = len(indptr) - 1
    row = backend.expand(indptr, len(indices))
    apart = xp.flatnonzero(indices != row)  # synchronize!
    low, high = xp.minimum(row, indices)[apart], xp.maximum(row, indices)[apart]
    if not lower:
        low, high = high, low
    if xp is np:
        level = _levels_in_order(low, high, n, lower)
        return level, int(level.max()) + 1 if n else 0
    # Each node has an entry of its own, so that none is left out.
    ends = xp.concatenate([high, xp.arange(n)])
    order = xp.argsort(ends)
    starts = xp.searchsorted(ends[order], xp.arange(n))
    source = xp.concatenate([low, xp.arange(n)])[order]
    step = xp.concatenate([xp.ones(len(low), np.int64), xp.zeros(n, np.int64)])[order]
    level = xp.zeros(n, np.int64)
    while True:
        longer = backend.segment_reduce("maximum", level[source] + step, None, starts)
        if not bool((longer != level).any()):  # synchronize!
            return level, int(level.max()) + 1 if n else 0
        level = longer


def _levels_in_order(low: Array, high: Array, n: int, lower: bool) -> Array:
    """The levels of connections from `low` to `high`, on the host: one after the other, in the order of their ends.

    Rounds over all connections, as on a GPU, would take as many as there are levels: n rounds for a chain.
    """
    level = [0] * n
    order = np.argsort(high if lower else -high, kind="stable")
    for before, after in zip(low[order].tolist(), high[order].tolist(), strict=True):
        if level[before] >= level[after]:
            level[after] = level[before] + 1
    return np.array(level, np.int64)


def by_number(backend: Backend, number: Array, count: int) -> list[Array]:
    """The places of each number from 0 to ``count - 1``, in ascending order."""
    xp = backend.xp
    order = xp.argsort(number, kind="stable") if xp is np else xp.argsort(number)
    bounds = backend.to_host(xp.searchsorted(number[order], xp.arange(count + 1)))  # synchronize!
    return [order[first:last] for first, last in itertools.pairwise(bounds.tolist())]


class Group(NamedTuple):
    """Nodes that are solved for together."""

    #: the unknowns of the nodes, (nodes, R)
    unknowns: Array
    #: their rows of the matrix without the diagonal blocks, for the nodes before them and those after them
    before: Any
    after: Any
    #: the inverses of their diagonal blocks, (nodes, R, R)
    inverse: Array


def groups(A: Any, number: Array, count: int, inverse: Array) -> list[Group]:
    """Return the nodes by the number of their group, with the rows of A that couple them to other groups."""
    backend: Backend = A._backend
    xp, R = backend.xp, A.blocksize[0]
    data, indices, indptr = A._canonical()
    row = backend.expand(indptr, len(indices))
    sides = (number[indices] < number[row], number[indices] > number[row])
    nodes_of = by_number(backend, number, count)
    blocks_of = by_number(backend, number[row], count)
    place = xp.zeros(len(number), np.int64)
    found = []
    for nodes, own in zip(nodes_of, blocks_of, strict=True):
        place[nodes] = xp.arange(len(nodes))
        parts = []
        for side in sides:
            chosen = own[side[own]]  # synchronize!
            bounds = xp.searchsorted(place[row[chosen]], xp.arange(len(nodes) + 1)).astype(indptr.dtype)
            blocks = Blocks(data[chosen], indices[chosen], bounds)
            parts.append(A._new(blocks, (len(nodes) * R, A.shape[1]), canonical=True))
        found.append(Group(nodes[:, None] * R + xp.arange(R), parts[0], parts[1], inverse[nodes]))
    return found


def solve(group: Group, r: Array, x: Array, side: Any) -> None:
    """``x = inverse @ (r - side @ x)`` for the unknowns of a group, in place; r and x are (n, k)."""
    nodes, R = group.unknowns.shape
    rest = (r[group.unknowns.reshape(-1)] - side @ x).reshape(nodes, R, -1)
    x[group.unknowns.reshape(-1)] = (group.inverse @ rest).reshape(nodes * R, -1)
