"""The parts of smoothed aggregation: which nodes are strongly connected, aggregates of them, and their modes.

A node is a block row. All steps are array operations of the backend without randomness, so that the CPU and the GPU
make the same aggregates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._backend.base import Array, Backend, Blocks
from .._backend.registry import backend_of, foreign_backend

#: A mode is dropped in an aggregate if so small a share of it is left beside the other modes.
_DEPENDENT = 1e-10
#: Added to the key of a root, so that it is larger than any key that is undecided.
_ROOT = 1 << 62
#: The state of a node that is no root; its bits stay if those of `_ROOT` are added.
_OUT = -1
#: Rounds of the search for roots; each decides a constant share of the nodes.
_MOST_ROUNDS = 200
#: Connections of nodes, filled up to the most that a node has, over those that there are: more are not worth it.
_MOST_REPEATED = 2
#: The share of nodes below which those that are undecided are looked at alone.
_FEW = 0.3
#: Rounds before the host asks whether all nodes are decided; what is decided stays so.
_ROUNDS_AT_A_TIME = 2


def strong_connections(A: Any, theta: float) -> tuple[Array, Array, Array]:
    """Return the (indices, indptr) of the blocks with a norm above ``theta * sqrt(norm(A_ii) * norm(A_jj))``.

    Each node is connected with itself. The third array tells which nodes have a block that is not zero beside that on
    the diagonal; others, such as those that `constrain` has fixed, are solved for by the smoother alone.
    """
    backend: Backend = A._backend
    xp = backend.xp
    data, indices, indptr = A._canonical()
    row = backend.expand(indptr, len(indices))
    own = row == indices
    filled = (data.reshape(len(data), data.shape[1] * data.shape[2]) != 0).any(axis=1)
    if theta == 0:
        keep = own | filled
        if xp is np and keep.all():
            return indices, indptr.astype(np.int64), rows_with(xp, ~own if filled.all() else filled & ~own, indptr)
    else:
        size = xp.sqrt((abs(data) ** 2).sum(axis=(1, 2)))
        diagonal = xp.zeros(len(indptr) - 1, size.dtype)
        diagonal[row[own]] = size[own]
        root = xp.sqrt(diagonal)
        keep = own | (size > theta * root[row] * root[indices])
    return indices[keep], _counts(xp, keep)[indptr], rows_with(xp, filled & ~own, indptr)


def _counts(xp: Any, chosen: Array) -> Array:
    """How many are chosen before each place, and at the end."""
    counts = xp.zeros(len(chosen) + 1, np.int64)
    xp.cumsum(chosen, out=counts[1:])
    return counts


def rows_with(xp: Any, chosen: Array, indptr: Array) -> Array:
    """Whether one of the blocks of each block row is chosen."""
    counts: Array = _counts(xp, chosen)[indptr]
    return counts[1:] > counts[:-1]


def hashed(xp: Any, n: int, first: int = 0) -> Array:
    """Return a different 61-bit number for each of n nodes: 29 mixed bits of its index above the index itself."""
    index = xp.arange(first, first + n, dtype=np.uint64)
    mixed = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(35)).astype(np.int64) << 32) | index.astype(np.int64)


def aggregates(backend: Backend, indices: Array, indptr: Array, coupled: Array | None = None) -> tuple[Array, int]:
    """Return the number of the aggregate of each node, and how many aggregates there are.

    Nodes that are not coupled are in no aggregate, and have the number -1; by default all are.

    Roots are nodes of which no two have a common neighbour, as many as fit; an aggregate is a root with its neighbours.
    The gaps between them are filled in the same way: a node at least half of whose neighbours are in no aggregate may
    be the root of another one. All other nodes join the aggregate of a neighbour.
    """
    xp = backend.xp
    others, starts = indices.astype(np.int64), indptr[:-1].astype(np.int64)

    def segments(x: Array) -> Array:
        return backend.segment_reduce("maximum", x, others, starts)

    #: the maximum over a node's connections, among them the node itself
    highest = (_highest_by_places(others, indptr) if xp is np else None) or segments

    key = hashed(xp, len(starts))
    if coupled is None:
        coupled = xp.ones(len(starts), bool)
    root = _roots(xp, highest, xp.where(coupled, key, _OUT))
    number = xp.cumsum(root)  # from 1 on
    found = highest(xp.where(root, number, 0))
    free = (found == 0) & coupled
    around = backend.segment_reduce("add", free.astype(np.int32), others, starts)
    root = _roots(xp, highest, xp.where(free & (2 * around >= xp.diff(indptr)), key, _OUT), free)
    number = xp.where(root, number[-1] + xp.cumsum(root), 0)
    found = xp.where(free, highest(number), found)
    found = xp.where(found > 0, found, highest(found))
    last = xp.maximum(found.max(), 0)
    alone = (found == 0) & coupled
    found = xp.where(alone, last + xp.cumsum(alone), found)
    return found - 1, int(found.max())  # synchronize!


class _Places:
    """The maximum over the connections of nodes on the host.

    The first connections of all nodes, then the second ones, and so on: three times as fast as NumPy's reduction of
    segments, which are short. A node with fewer connections repeats its last one.

    Parameters
    ----------
    place : array (most, nodes)
        The connections of each node, in a column.
    """

    def __init__(self, place: Array) -> None:
        self._place = place

    def __call__(self, x: Array) -> Array:
        found, other = x.take(self._place[0]), np.empty(self._place.shape[1], x.dtype)
        for connections in self._place[1:]:
            np.maximum(found, x.take(connections, out=other, mode="clip"), out=found)
        return found

    def of(self, nodes: Array) -> _Places:
        """Return the maximum over the connections of these nodes alone."""
        return _Places(self._place.take(nodes, axis=1))

    def reached(self, n: int) -> Array:
        """Return the nodes, of n, that are connections."""
        found = np.zeros(n, bool)
        found[self._place] = True
        return np.flatnonzero(found)


def _highest_by_places(others: Array, indptr: Array) -> _Places | None:
    """The maximum over the connections of each node, or None if nodes have very different numbers of them."""
    lengths = np.diff(indptr)
    most = int(lengths.max())
    if most * len(lengths) > _MOST_REPEATED * len(others):
        return None
    place = indptr[:-1] + np.arange(most)[:, None]
    if most * len(lengths) > len(others):
        np.minimum(place, indptr[1:] - 1, out=place)
    return _Places(others.take(place))


def _roots(xp: Any, highest: Callable[[Array], Array], state: Array, inside: Array | None = None) -> Array:
    """Whether each node is a root: some of the able ones, no two with a common neighbour inside, as many as fit.

    The state of an able node is its key, and that of others `_OUT`. All nodes are inside by default.
    """
    if isinstance(highest, _Places):
        return _roots_by_places(highest, state, inside)
    for done in range(_MOST_ROUNDS):
        near = highest(state)
        near = highest(near if inside is None else xp.where(inside, near, 0))
        # the largest around is a root, also if it was one before; others near a root are out
        state = xp.where(near == state, state | _ROOT, xp.where(near < _ROOT, state, _OUT))
        ask = done % _ROUNDS_AT_A_TIME == _ROUNDS_AT_A_TIME - 1
        # without a sign, the states of roots and of those that are out are the largest
        if ask and int(state.view(np.uint64).min()) >= _ROOT:  # synchronize!
            break
    return state >= 0


def _roots_by_places(highest: _Places, state: Array, inside: Array | None) -> Array:
    """`_roots` on the host, where the nodes that are undecided are looked at alone as soon as they are few.

    What is decided stays so, so that the result is the same.
    """
    state, near, n = state.copy(), np.zeros(len(state), state.dtype), len(state)
    for done in range(_MOST_ROUNDS):
        if done % _ROUNDS_AT_A_TIME == 0:
            # without a sign, the states of roots and of those that are out are the largest
            open_, asked = np.flatnonzero(state.view(np.uint64) < _ROOT), None
            if not len(open_):
                break
            if len(open_) < _FEW * n:
                second = highest.of(open_)
                asked = second.reached(n)
                first = highest.of(asked)
        if asked is None:
            near = highest(state)
            top, own = highest(near if inside is None else np.where(inside, near, 0)), state
            state = np.where(top == own, own | _ROOT, np.where(top < _ROOT, own, _OUT))
        else:
            found = first(state)
            near[asked] = found if inside is None else np.where(inside[asked], found, 0)
            top, own = second(near), state[open_]
            state[open_] = np.where(top == own, own | _ROOT, np.where(top < _ROOT, own, _OUT))
    return state >= 0


def tentative(A: Any, number: Array, count: int, modes: Array) -> tuple[Any, Array]:
    """Return the prolongator whose columns span the modes in each aggregate, and the modes of the coarse level.

    In each aggregate the columns are made orthonormal, by Gram and Schmidt's method twice. A mode that depends on the
    others there gets a column of zeros. The rows of nodes without an aggregate have no block.
    """
    backend: Backend = A._backend
    xp = backend.xp
    n, R, m = A._block_shape[0], A.blocksize[0], modes.shape[1]
    inside = xp.flatnonzero(number >= 0)  # synchronize!
    if not len(inside):
        nothing = Blocks(xp.zeros((0, R, m), A.dtype), xp.zeros(0, A.indices.dtype), xp.zeros(n + 1, A.indices.dtype))
        return A._new(nothing, (A.shape[0], 0), canonical=True), xp.zeros((0, m), A.dtype)
    if xp is np and len(inside) == n:
        order, begins = backend.loops.by_column(number, np.array([0, n]), count)
        starts = R * begins[:-1]
    else:
        order = xp.argsort(number, kind="stable") if xp is np else xp.argsort(number)
        starts = R * xp.searchsorted(number[order], xp.arange(count))
    order = (R * order[:, None] + xp.arange(R)).reshape(-1)  # rows of A, aggregate by aggregate
    q = modes.reshape(n, R, m).astype(A.dtype)
    upper = xp.zeros((count, m, m), A.dtype)

    def inner(x: Array, y: Array) -> Array:
        """The inner products of columns x, (n, R, k), with the column y in each aggregate: (count, k)."""
        return backend.segment_reduce("add", (x.conj() * y).reshape(n * R, -1), order, starts)

    least = _DEPENDENT**2 * inner(q, q).real
    for j in range(m):
        column, before = q[:, :, j : j + 1], q[:, :, :j]
        for _ in range(2 if j else 0):
            part = inner(before, column)
            upper[:, :j, j] += part
            column -= (part[number][:, None] * before).sum(axis=2, keepdims=True)
        left = inner(column, column).real[:, 0]
        kept, size = left > least[:, j], xp.sqrt(left)
        upper[:, j, j] = xp.where(kept, size, 0)
        column *= xp.where(kept, 1 / xp.where(kept, size, 1), 0)[number][:, None, None]
    index = A.indices.dtype
    if len(inside) == n:
        blocks = Blocks(q, number.astype(index), xp.arange(n + 1, dtype=index))
    else:
        blocks = Blocks(q[inside], number[inside].astype(index), _counts(xp, number >= 0).astype(index))
    return A._new(blocks, (A.shape[0], count * m), canonical=True), upper.reshape(count * m, m)


def rigid_body_modes(coordinates: Any) -> Array:
    """Return the rigid-body modes of an elastic body: its translations and infinitesimal rotations.

    Parameters
    ----------
    coordinates : array (n, 2) or (n, 3)
        The positions of the nodes.

    Returns
    -------
    array (2 n, 3) or (3 n, 6)
        The displacements of the nodes, node after node, in a column for each mode. Rotations are about the centre of
        the nodes.

    Raises
    ------
    TypeError
        If `coordinates` is not an array of real numbers.
    ValueError
        If it does not have two or three columns.

    See Also
    --------
    smoothed_aggregation : takes them as `near_nullspace`.

    Examples
    --------
    >>> import numpy as np, bsrgemm as bg
    >>> bg.linalg.rigid_body_modes(np.array([[0.0, 0.0], [2.0, 2.0]]))
    array([[ 1.,  0.,  1.],
           [ 0.,  1., -1.],
           [ 1.,  0., -1.],
           [ 0.,  1.,  1.]])
    """
    backend = backend_of(coordinates) or foreign_backend(coordinates)
    if backend is None or not backend.is_dense(coordinates) or coordinates.dtype.kind not in "fiu":
        raise TypeError(f"coordinates: wanted a NumPy or CuPy array of real numbers, got {type(coordinates).__name__}")
    if coordinates.ndim != 2 or coordinates.shape[1] not in (2, 3):
        raise ValueError(f"coordinates: wanted shape (n, 2) or (n, 3), got {tuple(coordinates.shape)}")
    xp = backend.xp
    n, d = coordinates.shape
    dtype = coordinates.dtype if coordinates.dtype.kind == "f" else np.dtype(np.float64)
    x = coordinates.astype(dtype) - (coordinates.mean(axis=0, dtype=dtype) if n else 0)
    modes = xp.zeros((n, d, d + d * (d - 1) // 2), dtype)
    for i in range(d):
        modes[:, i, i] = 1
    for column, (i, j) in enumerate(((0, 1), (1, 2), (0, 2))[: d * (d - 1) // 2], start=d):
        modes[:, i, column], modes[:, j, column] = -x[:, j], x[:, i]
    return modes.reshape(n * d, modes.shape[2])
