"""The arrays of a mask, and how blocks become these arrays: what all parts of `BlockMask` share.

The code is written over ``backend.xp``; lines that wait for the GPU are marked ``# synchronize!``.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np

from .._backend import registry, structure
from .._backend.base import Array, Backend
from .mask_bits import FULL, NOTHING, counts_of, distinct, inside_of, no_bits, whole_kinds
from .mask_grid import Grid, check_stored
from .mask_intervals import BlockRows, Line, lines

_INT32 = np.dtype(np.int32)


class Limits(NamedTuple):
    """The largest sizes that the host computes, because a few small calls on the host take less time than on a GPU.

    `words` is the number of words and combinations of element masks, `blocks` the number of blocks that are listed.
    """

    words: int
    blocks: int


class MaskBase(ABC):
    """The arrays of a mask; `BlockMask` says what they hold."""

    def __init__(
        self,
        backend: Backend,
        shape: tuple[int, int],
        block: tuple[int, int],
        heads: tuple[int, int],
        indptr: Array,
        indices: Array,
        kinds: Array,
        bits: Array,
    ) -> None:
        """Wrap arrays without checks; the class methods build masks from checked arguments."""
        self._backend = backend
        self.shape, self.block, self.heads = shape, block, heads
        self.indptr, self.indices, self.kinds, self.bits = indptr, indices, kinds, bits

    @classmethod
    @abstractmethod
    def _limits(cls) -> Limits:
        """The largest sizes that the host computes."""

    @property
    def _grid(self) -> Grid:
        return Grid(self.shape[0], self.shape[1], self.block, self._backend.name)

    def _rows(self) -> Array:
        """The block row of every stored block, counted through all patterns."""
        return self._backend.expand(self.indptr.astype(np.int64), len(self.indices))

    def _keys(self) -> Array:
        """``block row * block columns + block column`` of every stored block, in ascending order."""
        return structure.block_keys(self._backend, self.indices, self.indptr, self._grid.counts[1])

    @classmethod
    def _from_lines(cls, grid: Grid, low: Line, high: Line, queries: tuple[int, int] | None = None) -> Self:
        """Queries ``queries[0]`` to ``queries[1] - 1``, or all, see keys `low` to `high` - 1."""
        return cls._from_rows(grid, lines(grid.shape, grid.block, low, high, queries))

    @classmethod
    def _from_rows(cls, grid: Grid, stored: BlockRows) -> Self:
        """A mask from rows of blocks that the host has computed. Nothing waits for the GPU."""
        backend, xp = grid.backend, grid.backend.xp
        total = int(stored.starts[-1])
        check_stored(total, grid.block)
        shifts = stored.first - stored.starts[:-1]
        if total <= cls._limits().blocks:
            shapes = (stored.starts.shape, (total,), (total,), stored.bits.shape)
            flat = np.empty(sum(map(math.prod, shapes)), _INT32)
            indptr, indices, kinds, bits = _cut(flat, shapes)
            indptr[...], kinds[...], bits[...] = stored.starts, FULL, stored.bits.view(_INT32)
            np.add(
                np.arange(total, dtype=_INT32), np.repeat(shifts.astype(_INT32), np.diff(stored.starts)), out=indices
            )
            kinds[stored.positions] = stored.kinds
            if backend is not registry.host():
                indptr, indices, kinds, bits = _cut(backend.from_host(flat), shapes)
            return cls(backend, grid.shape, grid.block, (1, 1), indptr, indices, kinds, bits.view(np.uint32))
        arrays = (stored.starts, shifts, stored.positions, stored.kinds, stored.bits.view(_INT32))
        moved = backend.from_host(np.concatenate([x.reshape(-1) for x in arrays], dtype=_INT32, casting="unsafe"))
        indptr, shifts, positions, some, bits = _cut(moved, [x.shape for x in arrays])
        indices = xp.arange(total, dtype=_INT32) + shifts[backend.expand(indptr, total)]
        kinds = xp.full(total, FULL, _INT32)
        kinds[positions] = some
        return cls(backend, grid.shape, grid.block, (1, 1), indptr, indices, kinds, bits.view(np.uint32))

    @classmethod
    def _from_whole(cls, grid: Grid, heads: tuple[int, int], indptr: Array, indices: Array) -> Self:
        """A mask of whole blocks, which may come in any order and several times."""
        xp, (rows, cols) = grid.backend.xp, grid.counts
        key = xp.unique(structure.block_keys(grid.backend, indices, indptr, cols))  # synchronize!
        check_stored(len(key), grid.block)
        indices, indptr = structure.keys_to_index(grid.backend, key, heads[0] * heads[1] * rows, cols, _INT32)
        kinds = whole_kinds(xp, len(key))
        return cls(grid.backend, grid.shape, grid.block, heads, indptr, indices, kinds, no_bits(xp, grid.block))

    @classmethod
    def _from_masks(cls, grid: Grid, heads: tuple[int, int], key: Array, bits: Array) -> Self:
        """A mask of blocks whose keys (see `_keys`) ascend; each block has an element mask in `bits`."""
        code = grid.backend.xp.arange(len(bits))
        return cls._from_codes(grid, heads, key, code, max(1, len(bits)), [bits], lambda xp, code, bits: bits[code])

    @classmethod
    def _from_codes(
        cls,
        grid: Grid,
        heads: tuple[int, int],
        key: Array,
        code: Array,
        bound: int,
        sources: Sequence[Array],
        elements: Callable[..., Array],
    ) -> Self:
        """A mask of blocks whose keys (see `_keys`) ascend; blocks with the same code have the same element mask.

        Codes are below `bound`. ``elements(xp, codes, *sources)`` computes the element masks of codes; elements that it
        allows beyond the last query or key are cleared. Blocks that allow nothing are left out, and equal masks are
        stored once.
        """
        backend, xp = grid.backend, grid.backend.xp
        (S_q, S_k), (bq, bk), (rows, cols) = grid.shape, grid.block, grid.counts
        if S_k % bk:
            code = code + (key % cols == cols - 1) * bound
        if S_q % bq:
            code = code + (key % (rows * cols) >= (rows - 1) * cols) * (2 * bound)
        few = 4 * bound + sum(x.size for x in sources) <= cls._limits().words
        at = np if few else xp
        if few:
            flags = xp.zeros(4 * bound, np.uint32)
            flags[code] = 1
            moved = backend.to_host(xp.concatenate([flags, *(x.reshape(-1) for x in sources)]))  # synchronize!
            flags, *parts = np.split(moved, np.cumsum([4 * bound, *(x.size for x in sources)])[:-1])
            used = np.flatnonzero(flags)
            sources = [part.reshape(x.shape) for part, x in zip(parts, sources, strict=True)]
        else:
            used, code = xp.unique(code, return_inverse=True)  # synchronize!
        inside = inside_of(at, grid.shape, grid.block)
        bits = elements(at, used % bound, *sources) & inside[used // bound]
        counts = counts_of(at, bits)
        whole = counts == counts_of(at, inside)[used // bound]
        part = at.flatnonzero((counts > 0) & ~whole)  # synchronize!
        table = at.where(whole, FULL, NOTHING).astype(_INT32)
        chosen, table[part] = distinct(at, bits[part])
        bits = bits[part[chosen]]
        dropped = bool((table == NOTHING).any())  # synchronize!
        if few:
            kinds_of = np.zeros(4 * bound, _INT32)
            kinds_of[used] = table
            table, bits = backend.from_host(kinds_of), backend.from_host(bits)
        kinds = table[code.reshape(-1)]
        if dropped:
            kept = xp.flatnonzero(kinds != NOTHING)  # synchronize!
            key, kinds = key[kept], kinds[kept]
        check_stored(len(key), grid.block)
        if not len(bits):
            kinds = whole_kinds(xp, len(key))
        indices, indptr = structure.keys_to_index(backend, key, heads[0] * heads[1] * rows, cols, _INT32)
        return cls(backend, grid.shape, grid.block, heads, indptr, indices, kinds, bits)


def _cut(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Split a flat array into arrays of these shapes, which follow each other in it."""
    sizes = [math.prod(shape) for shape in shapes]
    ends = itertools.accumulate(sizes)
    return [flat[end - n : end].reshape(shape) for shape, n, end in zip(shapes, sizes, ends, strict=True)]
