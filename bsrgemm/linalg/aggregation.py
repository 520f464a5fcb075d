"""The parts of smoothed aggregation: which nodes are strongly connected, aggregates of them, and their modes.

A node is a block row. All steps are array operations of the backend without randomness, so that the CPU and the GPU
make the same aggregates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._backend.base import Array, Backend, Blocks, named
from .._backend.registry import backend_of, foreign_backend
from .operators import as_array

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
#: Nodes of which the host looks at all connections before it goes on: what it reads and writes stays in the cache.
_NODES_AT_A_TIME = 1 << 14
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
    if xp is np and theta == 0 and data.size == len(data) == np.count_nonzero(data):
        return indices, indptr.astype(np.int64), _with_others(indices, indptr)
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


def _with_others(indices: Array, indptr: Array) -> Array:
    """Whether each block row has a block beside that on the diagonal; none is stored twice."""
    lengths = np.diff(indptr)
    found = lengths > 1
    single = np.flatnonzero(lengths == 1)
    found[single] = indices[indptr[single]] != single
    return found


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


def stable_order(xp: Any, number: Array) -> Array:
    """Return the order that sorts, in which equal numbers stay in theirs; CuPy's sort always is so."""
    order: Array = xp.argsort(number, kind="stable") if xp is np else xp.argsort(number)
    return order


def aggregates(backend: Backend, indices: Array, indptr: Array, coupled: Array | None = None) -> tuple[Array, int]:
    """Return the number of the aggregate of each node, and how many aggregates there are.

    Nodes that are not coupled are in no aggregate, and have the number -1; by default all are.

    Roots are nodes of which no two have a common neighbour, as many as fit; an aggregate is a root with its neighbours.
    The gaps between them are filled in the same way: a node at least half of whose neighbours are in no aggregate may
    be the root of another one. All other nodes join the aggregate of a neighbour.
    """
    xp = backend.xp
    highest = (_highest_by_places(indices, indptr) if xp is np else None) or _Segments(backend, indices, indptr)
    key = hashed(xp, len(indptr) - 1)
    if coupled is None:
        coupled = xp.ones(len(key), bool)
    root = _roots(xp, highest, xp.where(coupled, key, _OUT))
    number = xp.cumsum(root)  # from 1 on
    found = highest(xp.where(root, number, 0))
    free = (found == 0) & coupled
    around = highest.count(free)
    root = _roots(xp, highest, xp.where(free & (2 * around >= xp.diff(indptr)), key, _OUT), free)
    number = xp.where(root, number[-1] + xp.cumsum(root), 0)
    found = highest.where(free, number, found)
    found = highest.where(found <= 0, found, found)
    last = xp.maximum(found.max(), 0)
    alone = (found == 0) & coupled
    found = xp.where(alone, last + xp.cumsum(alone), found)
    return found - 1, int(found.max())  # synchronize!


class _Segments:
    """The maximum over the connections of each node, among them the node itself: ``highest(x)``."""

    def __init__(self, backend: Backend, indices: Array, indptr: Array) -> None:
        self._backend, self._others, self._starts = backend, indices.astype(np.int64), indptr[:-1].astype(np.int64)

    def __call__(self, x: Array) -> Array:
        return self._backend.segment_reduce("maximum", x, self._others, self._starts)

    def where(self, chosen: Array, x: Array, otherwise: Array) -> Array:
        """Return the maximum of x where a node is chosen, and what it has otherwise elsewhere."""
        found: Array = self._backend.xp.where(chosen, self(x), otherwise)
        return found

    def count(self, marked: Array) -> Array:
        """Return how many connections of each node that is marked are marked, too; elsewhere any number."""
        return self._backend.segment_reduce("add", marked.astype(np.int32), self._others, self._starts)


class _Places:
    """What `_Segments` does, on the host.

    The first connections of some nodes, then the second ones, and so on: five times as fast as NumPy's reduction of
    segments, which are short. A node with fewer connections repeats its last one.

    Parameters
    ----------
    place : array (most, nodes)
        The connections of each node, in a column.
    lengths : array (nodes,)
        How many connections each node has.
    """

    def __init__(self, place: Array, lengths: Array) -> None:
        self._place, self._lengths = place, lengths
        self._chosen: tuple[Array, Array, _Places] | None = None

    def __call__(self, x: Array) -> Array:
        n = self._place.shape[1]
        found, spare = np.empty(n, x.dtype), np.empty(min(n, _NODES_AT_A_TIME), x.dtype)
        for first in range(0, n, _NODES_AT_A_TIME):
            some = slice(first, first + _NODES_AT_A_TIME)
            here = found[some]
            x.take(self._place[0, some], out=here, mode="clip")
            other = spare[: len(here)]
            for connections in self._place[1:, some]:
                np.maximum(here, x.take(connections, out=other, mode="clip"), out=here)
        return found

    def where(self, chosen: Array, x: Array, otherwise: Array) -> Array:
        """Return the maximum of x where a node is chosen, and what it has otherwise elsewhere."""
        nodes, some = self.at(chosen)
        found = otherwise.copy()
        found[nodes] = some(x)
        return found

    def count(self, marked: Array) -> Array:
        """Return how many connections of each node that is marked are marked, too; elsewhere any number."""
        nodes, some = self.at(marked)
        counts, found = np.zeros(len(nodes), np.int32), np.zeros(len(marked), np.int32)
        for k, connections in enumerate(some._place):
            counts += marked.take(connections) & (some._lengths > k)
        found[nodes] = counts
        return found

    def at(self, chosen: Array) -> tuple[Array, _Places]:
        """Return the nodes that are chosen, and the same for them alone; the last answer is kept for the same array."""
        if self._chosen is None or self._chosen[0] is not chosen:
            nodes = np.flatnonzero(chosen)
            self._chosen = chosen, nodes, self.of(nodes)
        return self._chosen[1:]

    def of(self, nodes: Array) -> _Places:
        """Return the same for these nodes alone."""
        return _Places(self._place.take(nodes, axis=1), self._lengths.take(nodes))

    def reached(self, n: int) -> Array:
        """Return the nodes, of n, that are connections."""
        found = np.zeros(n, bool)
        found[self._place] = True
        return np.flatnonzero(found)


def _highest_by_places(indices: Array, indptr: Array) -> _Places | None:
    """The maximum over the connections of each node, or None if nodes have very different numbers of them."""
    lengths = np.diff(indptr)
    n, most = len(lengths), int(lengths.max())
    if most * n > _MOST_REPEATED * len(indices):
        return None
    place = np.empty((most, n), indices.dtype)
    for first in range(0, n, _NODES_AT_A_TIME):
        some = slice(first, first + _NODES_AT_A_TIME)
        at, last = indptr[:-1][some].astype(np.intp), indptr[1:][some] - 1
        for connections in place[:, some]:
            indices.take(np.minimum(at, last), out=connections, mode="clip")
            at += 1
    return _Places(place, lengths)


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
    """`_roots` on the host: two rounds are one, and undecided nodes are looked at alone as soon as they are few.

    What is decided stays so, and after a round that has found roots the next one finds none: it takes out the nodes
    near them, for which bytes do in place of keys. So the result is the same.
    """
    state, n = state.copy(), len(state)
    near, marked = np.zeros(n, state.dtype), np.zeros(n, np.uint8)
    asked: Any = slice(None)
    first = second = highest
    if inside is not None:  # what others see is 0, and stays so
        asked, first = highest.at(inside)
    for done in range(_MOST_ROUNDS // 2):
        # without a sign, the states of roots and of those that are out are the largest
        open_: Any = np.flatnonzero(state.view(np.uint64) < _ROOT)
        if not len(open_):
            break
        few = len(open_) < _FEW * n
        if few or inside is not None:
            second = highest.of(open_)
        else:
            open_ = slice(None)
        if few and (done or inside is None):
            asked = second.reached(n)
            asked = asked if inside is None else asked[inside[asked]]
            first = highest.of(asked)
        near[asked] = first(state)
        own = state[open_]
        own = np.where(second(near) == own, own | _ROOT, own)
        state[open_] = own
        marked[asked] = first((state >= _ROOT).view(np.uint8))
        state[open_] = np.where((second(marked) == 0) | (own >= _ROOT), own, _OUT)
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
        order = stable_order(xp, number)
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
    coordinates = as_array(coordinates, "coordinates")
    backend = backend_of(coordinates) or foreign_backend(coordinates)
    if backend is None or not backend.is_dense(coordinates):
        raise TypeError(f"coordinates: wanted a NumPy or CuPy array of real numbers, got {named(coordinates)}")
    if coordinates.dtype.kind not in "fiu":
        raise TypeError(f"coordinates: wanted a NumPy or CuPy array of real numbers, got {coordinates.dtype}")
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
