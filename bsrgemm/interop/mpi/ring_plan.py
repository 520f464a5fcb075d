"""How a sequence is spread over the ranks of a ring, and what each of them computes and receives for each source.

A sequence is cut into ``2 * size`` chunks, and rank r has chunks r and ``2 * size - 1 - r`` (zigzag): under a causal
mask every rank then has the same work. Queries see keys ``i - left`` to ``i + right``, and what a mask allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..._attention.checks import UNBOUNDED
from ..._attention.mask import BlockMask
from ..._attention.mask_ops import banded, selected, stored_columns
from ..._backend.base import Array, Backend, named
from ..._backend.registry import backend_of

Range = tuple[int, int]
#: Plans that are kept on one mask.
_MOST_PLANS = 16


class Ring(NamedTuple):
    """A sequence on several ranks: lengths of all queries and keys, ranks, and the unit in which chunks are cut."""

    queries: int
    keys: int
    size: int
    multiple: int
    #: query i, at position ``i + place`` among the keys, sees the keys from `left` before it to `right` after it
    left: int
    right: int
    place: int


class Call(NamedTuple):
    """One call of attention: queries among those of this rank, keys among those that came, and who sees whom."""

    queries: slice
    keys: slice
    #: keywords of `attention`: a window with its alignment, or a mask
    options: dict[str, Any] = {}  # noqa: RUF012  never written to


@dataclass
class Plan:
    """What one rank does: the keys that it needs, and its calls by the rank whose keys they read.

    ``needs[chunk]`` has the first key of a chunk that is needed and the one after the last, counted within the chunk;
    both are 0 if none is. The keys that come from another rank are those needed of its chunks, one after the other;
    the calls for a rank's own keys count all of these.
    """

    needs: np.ndarray[Any, Any]
    calls: list[list[Call]] = field(default_factory=list)


@lru_cache(maxsize=256)
def bounds(length: int, size: int, multiple: int) -> tuple[int, ...]:
    """The first position of each of the ``2 * size`` chunks, and the length at the end; multiples of `multiple`."""
    units = -(-length // multiple)
    return tuple(min(length, i * units // (2 * size) * multiple) for i in range(2 * size + 1))


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The numbers of the two chunks of a rank, in the order in which it has them."""
    return rank, 2 * size - 1 - rank


def ranges(length: int, rank: int, size: int, multiple: int) -> tuple[Range, Range]:
    """The positions of the two chunks of a rank."""
    cuts = bounds(length, size, multiple)
    first, last = chunks_of(rank, size)
    return (cuts[first], cuts[first + 1]), (cuts[last], cuts[last + 1])


def local_length(length: int, rank: int, size: int, multiple: int) -> int:
    """How many positions a rank has."""
    return sum(b - a for a, b in ranges(length, rank, size, multiple))


def parts_of(needs: np.ndarray[Any, Any], owner: int, ring: Ring) -> list[slice]:
    """Which keys of `owner`, counted among its own, a rank with these needs receives; neighbours are one slice."""
    found: list[slice] = []
    at = 0
    for chunk, (a, b) in zip(
        chunks_of(owner, ring.size), ranges(ring.keys, owner, ring.size, ring.multiple), strict=True
    ):
        first, last = (at + int(x) for x in needs[chunk])
        if found and found[-1].stop == first < last:
            found[-1] = slice(found[-1].start, last)
        elif first < last:
            found.append(slice(first, last))
        at += b - a
    return found


def plan_of(ring: Ring, rank: int, mask: BlockMask | None) -> Plan:
    """The plan of a rank. Plans are kept: those with a mask on the mask, whose lists for kernels are kept with it."""
    if mask is None:
        return _band_plan(ring, rank)
    plans: dict[Any, Plan] = mask.__dict__.setdefault("_plans", {})
    found = plans.get((ring, rank))
    if found is None:
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        found = plans[ring, rank] = _mask_plan(ring, rank, mask)
    return found


# ------------------------------------------------------------------------------------------ without a mask
@lru_cache(maxsize=256)
def _band_plan(ring: Ring, rank: int) -> Plan:
    own = ranges(ring.queries, rank, ring.size, ring.multiple)
    cuts = bounds(ring.keys, ring.size, ring.multiple)
    seen = [[_seen(ring, queries, keys) for queries in own] for keys in itertools.pairwise(cuts)]
    needs = np.zeros((2 * ring.size, 2), np.int64)
    for chunk, calls in enumerate(seen):
        some = [call.keys for call in calls if call is not None]
        if some:
            needs[chunk] = min(x.start for x in some), max(x.stop for x in some)
    found = Plan(needs)
    for source in range(ring.size):
        joined, before = [], 0
        for chunk in chunks_of(source, ring.size):
            first, last = _whole(cuts, chunk) if source == rank else needs[chunk].tolist()
            at = 0
            for call, (a, b) in zip(seen[chunk], own, strict=True):
                if call is not None:
                    keys = _shifted(call.keys, before - first)
                    joined.append(call._replace(queries=_shifted(call.queries, at), keys=keys))
                at += b - a
            before += last - first
        found.calls.append(_one_causal(ring, rank, source, own) or _joined(joined))
    return found


def _whole(cuts: tuple[int, ...], chunk: int) -> Range:
    return 0, cuts[chunk + 1] - cuts[chunk]


def _seen(ring: Ring, queries: Range, keys: Range) -> Call | None:
    """The part of a rectangle of queries and keys outside of which nothing is seen, as a call; None if there is none.

    Within the part, the first query is at its first keys, so that `window` can say what is seen.
    """
    n, m = queries[1] - queries[0], keys[1] - keys[0]
    place = queries[0] + ring.place - keys[0]
    low, high = place - ring.left, place + ring.right  # query i sees keys i + low to i + high
    first_q, last_q = max(0, -high), min(n, m - low)
    first_k, last_k = max(0, low), min(m, n + high)
    if first_q >= last_q or first_k >= last_k:
        return None
    left, right = first_k - first_q - low, high - first_k + first_q
    left = -1 if left >= last_q - first_q - 1 else left
    right = -1 if right >= last_k - first_k - 1 else right
    options = {} if left == right == -1 else {"window": (left, right), "align": "top-left"}
    return Call(slice(first_q, last_q), slice(first_k, last_k), options)


def _one_causal(ring: Ring, rank: int, source: int, own: tuple[Range, Range]) -> list[Call] | None:
    """The keys of a rank's own chunks under a causal mask: causal in the order in which the rank has them, too."""
    if rank != source or ring.left < UNBOUNDED or ring.right or ring.queries != ring.keys:
        return None
    every = slice(0, sum(b - a for a, b in own))
    return [Call(every, every, {"causal": True})] if every.stop else []


def _joined(calls: list[Call]) -> list[Call]:
    """Calls in which everything is seen, joined to larger ones where they are neighbours."""
    found = list(calls)
    for i, a in enumerate(found):
        for j, b in enumerate(found[i + 1 :], i + 1):
            if a.options or b.options:
                continue
            if a.keys == b.keys and a.queries.stop == b.queries.start:
                both = Call(slice(a.queries.start, b.queries.stop), a.keys)
            elif a.queries == b.queries and a.keys.stop == b.keys.start:
                both = Call(a.queries, slice(a.keys.start, b.keys.stop))
            else:
                continue
            return _joined([*found[:i], both, *found[i + 1 : j], *found[j + 1 :]])
    return found


def _shifted(x: slice, by: int) -> slice:
    return slice(x.start + by, x.stop + by)


# ------------------------------------------------------------------------------------------ with a mask
def _mask_plan(ring: Ring, rank: int, mask: BlockMask) -> Plan:
    """The rows of the mask that belong to a rank, cut by columns for each source."""
    own = ranges(ring.queries, rank, ring.size, ring.multiple)
    cuts = bounds(ring.keys, ring.size, ring.multiple)
    every = [(0, ring.keys)]
    rows: list[tuple[slice, BlockMask]] = []
    if ring.left >= UNBOUNDED and ring.right >= UNBOUNDED:
        rows.append((slice(0, sum(b - a for a, b in own)), selected(mask, own, every)))
    else:
        at = 0
        for a, b in own:  # the two chunks are at different positions of the band
            part = banded(selected(mask, [(a, b)], every), a + ring.place, ring.left, ring.right)
            rows.append((slice(at, at + b - a), part))
            at += b - a
    block = mask.block[1]
    needs = np.zeros((2 * ring.size, 2), np.int64)
    present = np.zeros(-(-ring.keys // block), bool)
    for _, part in rows:
        present |= stored_columns(part)
    for chunk, (a, b) in enumerate(itertools.pairwise(cuts)):
        stored = np.flatnonzero(present[a // block : -(-b // block)]) * block
        if len(stored):
            needs[chunk] = stored[0], min(int(stored[-1]) + block, b - a)
    found = Plan(needs)
    for source in range(ring.size):
        kept = [
            (chunk, *(_whole(cuts, chunk) if source == rank else needs[chunk].tolist()))
            for chunk in chunks_of(source, ring.size)
        ]
        cols = [(cuts[chunk] + a, cuts[chunk] + b) for chunk, a, b in kept if a < b]
        keys = slice(0, sum(b - a for a, b in cols))
        pieces = [(queries, selected(part, [(0, part.shape[0])], cols)) for queries, part in rows]
        found.calls.append([Call(queries, keys, {"mask": part}) for queries, part in pieces if not part.is_empty])
    return found


# ------------------------------------------------------------------------------------------ spreading arrays
def zigzag_positions(length: int, rank: int, size: int, *, multiple: int = 1) -> np.ndarray[Any, Any]:
    """Return the positions of a sequence that a rank has: two of ``2 * size`` chunks, one from each end.

    Parameters
    ----------
    length : int
        Length of the sequence.
    rank, size : int
        The rank, from 0 to ``size - 1``, and the number of ranks.
    multiple : int
        Chunks begin at multiples of this number; take the block of a mask. By default chunks may begin anywhere.

    Returns
    -------
    array of int64
        The positions in the order in which the rank has them, for example for rotary embeddings.

    Raises
    ------
    ValueError
        If a number is out of range.

    Notes
    -----
    Rank r has chunks r and ``2 * size - 1 - r``. Under a causal mask the first chunks see few keys and the last ones
    many, so that every rank has about the same work.

    Examples
    --------
    >>> from bsrgemm.interop import mpi
    >>> [mpi.zigzag_positions(8, rank, 2).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    check_split(length, rank, size, multiple)
    return np.concatenate([np.arange(a, b) for a, b in ranges(length, rank, size, multiple)])


def zigzag_split(x: Array, rank: int, size: int, *, axis: int = -2, multiple: int = 1) -> Array:
    """Return the part of an array that a rank has: see `zigzag_positions`.

    Parameters
    ----------
    x : array
        The whole array, NumPy or CuPy.
    rank, size : int
        The rank, from 0 to ``size - 1``, and the number of ranks.
    axis : int
        The dimension of the sequence. The default is that of (batch, heads, length, head dim).
    multiple : int
        Chunks begin at multiples of this number.

    Returns
    -------
    array
        A copy of the two chunks of the rank, one after the other along `axis`.

    Raises
    ------
    TypeError
        If `x` is not an array.
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from bsrgemm.interop import mpi
    >>> mpi.zigzag_split(np.arange(8), 1, 2, axis=0)
    array([2, 3, 4, 5])
    """
    xp = _module(x, "x")
    axis = _axis(x, axis)
    check_split(x.shape[axis], rank, size, multiple)
    length = local_length(x.shape[axis], rank, size, multiple)
    found = xp.empty((*x.shape[:axis], length, *x.shape[axis + 1 :]), x.dtype)
    before = (slice(None),) * axis
    at = 0
    for a, b in ranges(x.shape[axis], rank, size, multiple):
        found[*before, at : at + b - a] = x[*before, a:b]
        at += b - a
    return found


def zigzag_join(parts: Sequence[Array], *, axis: int = -2, multiple: int = 1) -> Array:
    """Return the whole array from the parts of all ranks, the inverse of `zigzag_split`.

    Parameters
    ----------
    parts : sequence of array
        The parts by rank.
    axis, multiple : int
        As they were given to `zigzag_split`.

    Returns
    -------
    array
        The whole array.

    Raises
    ------
    TypeError
        If a part is not an array.
    ValueError
        If the parts are not those of one array, or a number is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from bsrgemm.interop import mpi
    >>> parts = [mpi.zigzag_split(np.arange(7), rank, 3, axis=0) for rank in range(3)]
    >>> mpi.zigzag_join(parts, axis=0)
    array([0, 1, 2, 3, 4, 5, 6])
    """
    if not len(parts):
        raise ValueError("parts: wanted those of at least one rank, got none")
    first, size = parts[0], len(parts)
    xp = _module(first, "parts[0]")
    axis = _axis(first, axis)
    length = sum(x.shape[axis] for x in parts)
    check_split(length, 0, size, multiple)
    found = xp.empty((*first.shape[:axis], length, *first.shape[axis + 1 :]), first.dtype)
    before = (slice(None),) * axis
    for rank, x in enumerate(parts):
        wanted = (*first.shape[:axis], local_length(length, rank, size, multiple), *first.shape[axis + 1 :])
        if tuple(x.shape) != wanted or x.dtype != first.dtype:
            raise ValueError(
                f"parts[{rank}]: wanted {first.dtype} of shape {wanted}, of {length} positions on {size} ranks with "
                f"multiple={multiple}, got {x.dtype} of shape {tuple(x.shape)}"
            )
        at = 0
        for a, b in ranges(length, rank, size, multiple):
            found[*before, a:b] = x[*before, at : at + b - a]
            at += b - a
    return found


def check_split(length: Any, rank: Any, size: Any, multiple: Any) -> None:
    for name, x, least in (("length", length, 0), ("size", size, 1), ("rank", rank, 0), ("multiple", multiple, 1)):
        if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < least:
            raise ValueError(f"{name}: wanted an integer from {least} on, got {x!r}")
    if rank >= size:
        raise ValueError(f"rank: wanted 0 to {size - 1}, got {rank}")


def _module(x: Any, name: str) -> Any:
    backend: Backend | None = backend_of(x)
    if backend is None or not backend.is_dense(x):
        raise TypeError(f"{name}: wanted a NumPy or CuPy array, got {named(x)}")
    return backend.xp


def _axis(x: Array, axis: Any) -> int:
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis: wanted an integer from {-x.ndim} to {x.ndim - 1}, got {axis!r}")
    return int(axis) % x.ndim
