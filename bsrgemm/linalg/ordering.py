"""Orders in which the nodes of a matrix can be solved for in groups: colours, and levels of a triangle.

A node is a block row. Nodes of a group do not depend on each other, so that a group is one product.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array, Backend, Blocks
from .._products.matmul import matmul
from .aggregation import hashed, stable_order


def colours(A: Any) -> tuple[Array, int]:
    """Return a colour for each node, such that connected nodes have different ones, and the number of colours.

    Round by round, the nodes whose mixed index is the largest among those of their neighbours that are left have their
    turn. They get the first colour that none of their neighbours has. The choice depends on the pattern alone.
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
    turn = xp.full(n, -1, np.int64)
    count = 0
    while bool((turn < 0).any()):  # synchronize!
        waiting = xp.where(turn < 0, key, -1)
        highest = backend.segment_reduce("maximum", waiting[other], None, starts)
        turn = xp.where((turn < 0) & (highest == key), count, turn)
        count += 1
    return _first_fit(backend, turn, count, other, starts)


def _first_fit(backend: Backend, turn: Array, turns: int, other: Array, starts: Array) -> tuple[Array, int]:
    """Return the first colour of each node that no neighbour has, one turn after the other, and the number of colours.

    Nodes of a turn are not connected. The neighbours of node i are in `other` from ``starts[i]`` on.
    """
    xp = backend.xp
    colour = xp.full(len(turn), -1, np.int64)
    length = xp.concatenate([starts[1:], xp.full(1, len(other), starts.dtype)]) - starts
    count = 0
    for nodes in by_number(backend, turn, turns):
        line, place = entries_of(xp, starts[nodes], length[nodes])
        near = other[place]
        taken = xp.zeros((len(nodes), count + 2), bool)  # the last column stands for neighbours without a colour
        taken[line, xp.where(colour[near] < 0, count + 1, colour[near])] = True
        taken[:, -1] = False
        colour[nodes] = xp.argmin(taken, axis=1)
        count = max(count, int(colour[nodes].max()) + 1)  # synchronize!
    return colour, count


def entries_of(xp: Any, starts: Array, lengths: Array) -> tuple[Array, Array]:
    """For rows with entries from ``starts[i]`` to ``starts[i] + lengths[i] - 1``: i and the place of each entry."""
    ends = xp.cumsum(lengths)
    every = xp.arange(int(ends[-1]))  # synchronize!
    row = xp.searchsorted(ends, every, side="right")
    return row, starts[row] + every - (ends - lengths)[row]


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
    order = stable_order(xp, number)
    bounds = backend.to_host(xp.searchsorted(number[order], xp.arange(count + 1)))  # synchronize!
    return [order[first:last] for first, last in itertools.pairwise(bounds.tolist())]


class Group(NamedTuple):
    """Unknowns that are solved for together. In the order of the groups they are neighbours."""

    first: int
    last: int
    #: their rows of ``D^-1 A`` for the unknowns before them and for those after them, or of A if there is an `inverse`;
    #: None where there are no blocks
    before: Any
    after: Any
    #: the inverses of their diagonal blocks, unless they were multiplied into the rows
    inverse: Any = None


class Groups(NamedTuple):
    """A matrix whose nodes are in the order of their groups."""

    #: ``D^-1``, whose columns are in the old order
    inverse: Any
    #: where each unknown of the old order is
    place: Array
    several: list[Group]

    def forwards(self, x: Array) -> None:
        """``x = (1 + L)^-1 x``, group by group, with L from ``D^-1 A = 1 + L + U``."""
        for group in self.several:
            if group.before is not None:
                _subtract(group.before, x[: group.first], x[group.first : group.last])

    def solve(self, b: Array) -> Array:
        """Return ``(D + L)^-1 b``; rows that were not multiplied ahead are divided after everything is subtracted."""
        if not self.several or self.several[0].inverse is None:
            x: Array = self.inverse @ b
            self.forwards(x)
            return x[self.place]
        x = b.copy()
        x[self.place] = b
        for group in self.several:
            own = x[group.first : group.last]
            if group.before is not None:
                own -= group.before @ x[: group.first]
            own[...] = group.inverse @ own
        return x[self.place]

    def backwards(self, x: Array) -> None:
        """``x = (1 + U)^-1 x``."""
        for group in reversed(self.several):
            if group.after is not None:
                _subtract(group.after, x[group.last :], x[group.first : group.last])

    def adjoint_backwards(self, x: Array) -> None:
        """``x = (1 + U)^-H x``."""
        for group in self.several:
            if group.after is not None:
                _subtract_adjoint(group.after, x[group.first : group.last], x[group.last :])

    def adjoint_forwards(self, x: Array) -> None:
        """``x = (1 + L)^-H x``."""
        for group in reversed(self.several):
            if group.before is not None:
                _subtract_adjoint(group.before, x[group.first : group.last], x[: group.first])


def _subtract(side: Any, x: Array, out: Array) -> None:
    """``out -= side x``; on the host a result of its own costs less than the checks of `out`."""
    if isinstance(x, np.ndarray):
        out -= side @ x
    else:
        matmul(side, x, out=out, alpha=-1, beta=1)


def _subtract_adjoint(side: Any, x: Array, out: Array) -> None:
    """``out -= side^H x``; no transpose is made."""
    if x.dtype.kind == "c":
        out -= (side.T @ x.conj()).conj()
    else:
        _subtract(side.T, x, out)


def groups(A: Any, number: Array, count: int, inverse: Array, ahead: bool = True) -> Groups:
    """Return the rows of A in the order of the numbers of their groups, multiplied by the inverses of its diagonal.

    With ``ahead=False`` the inverses stay beside the rows.
    """
    backend: Backend = A._backend
    xp, R = backend.xp, A.blocksize[0]
    data, indices, indptr = A._canonical()
    n, kind = len(indptr) - 1, indptr.dtype
    row = backend.expand(indptr, len(indices))
    order = stable_order(xp, number)
    place = xp.empty(n, np.int64)
    place[order] = xp.arange(n)
    bounds = xp.searchsorted(number[order], xp.arange(count + 1))
    sides = []
    for chosen in (number[indices] < number[row], number[indices] > number[row]):
        own = xp.flatnonzero(chosen)  # synchronize!
        own = own[xp.argsort(place[row[own]] * np.int64(n) + place[indices[own]])]
        begin = xp.searchsorted(place[row[own]], xp.arange(n + 1)).astype(kind)
        values = inverse[row[own]] @ data[own] if ahead else data[own]
        blocks = Blocks(values, place[indices[own]].astype(kind), begin)
        sides.append((blocks, backend.to_host(begin[bounds]).tolist()))  # synchronize!
    edges = backend.to_host(bounds).tolist()  # synchronize!
    several = []
    for k, nodes in enumerate(itertools.pairwise(edges)):
        before, after = (
            _rows(A, side, nodes, (starts[k], starts[k + 1]), columns)
            for (side, starts), columns in zip(sides, ((0, nodes[0]), (nodes[1], n)), strict=True)
        )
        pivots = None if ahead else _pivots(A, inverse[order[nodes[0] : nodes[1]]])
        several.append(Group(nodes[0] * R, nodes[1] * R, before, after, pivots))
    diagonal = Blocks(inverse[order], order.astype(kind), xp.arange(n + 1, dtype=kind))
    unknowns = (place[:, None] * R + xp.arange(R)).reshape(-1)
    return Groups(A._new(diagonal, canonical=True), unknowns, several)


def _rows(A: Any, side: Blocks, nodes: tuple[int, int], blocks: tuple[int, int], columns: tuple[int, int]) -> Any:
    """Some block rows of one side of a matrix with some of its block columns; None if they have no blocks."""
    (first, last), (begin, end), R = nodes, blocks, A.blocksize[0]
    if begin == end:
        return None
    own = Blocks(side.data[begin:end], side.indices[begin:end] - columns[0], side.indptr[first : last + 1] - begin)
    return A._new(own, ((last - first) * R, (columns[1] - columns[0]) * R), canonical=True)


def _pivots(A: Any, inverse: Array) -> Any:
    """A block-diagonal matrix of these inverses."""
    n, kind = len(inverse), A.indptr.dtype
    own = Blocks(inverse, A._backend.xp.arange(n, dtype=kind), A._backend.xp.arange(n + 1, dtype=kind))
    return A._new(own, (n * A.blocksize[0], n * A.blocksize[0]), canonical=True)
