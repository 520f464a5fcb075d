"""How a sequence is spread over ranks: zigzag, two chunks for each rank, one from each end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._backend.base import Array, Backend
from ..._backend.names import named
from ..._backend.registry import backend_of
from .ring_plan import local_length, ranges


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
