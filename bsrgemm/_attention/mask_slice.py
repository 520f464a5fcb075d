"""A rectangle of a mask as a mask: ``mask[q0:q1, k0:k1]``, and blocks chosen by several ranges of rows and columns.

A mask stores what each block allows, so that a block keeps its elements wherever it goes: causal masks, windows and all
others stay exact, although the positions of queries and keys change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from .mask_base import MaskBase
from .mask_bits import FULL, whole_kinds
from .mask_grid import Grid
from .mask_intervals import Line

_INT32 = np.dtype(np.int32)
#: Ranges of queries or keys, in ascending order; each begins at a block, and ends at one or at the end of the mask.
Ranges = Sequence[tuple[int, int]]

Mask = TypeVar("Mask", bound=MaskBase)


class _Side(NamedTuple):
    """One side of a mask: its name in messages, its length and the length of a block."""

    name: str
    length: int
    block: int


class Rectangles(MaskBase):
    """Slices of masks. They wait for the GPU if the mask is on one."""

    @property
    def is_empty(self) -> bool:
        """Whether the mask allows nothing, for no batch and head. Known without work, and without waiting for the GPU.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> mask = bg.BlockMask.causal(64, block=16, device="cpu")
        >>> mask[:32, 32:].is_empty, mask[32:, :32].is_empty
        (True, False)
        """
        return not len(self.indices)

    def __getitem__(self, key: Any) -> Self:
        """``mask[q0:q1, k0:k1]`` is the mask of these queries and keys; ``mask[batches, heads, q0:q1, k0:k1]`` chooses
        patterns too. Waits for the GPU.

        Both ends of a slice are multiples of the block, or the end of the mask. Along the batch and the heads, slices
        and integers are taken, which keep the dimension; one pattern that serves all stays.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> mask = bg.BlockMask.window(64, left=20, right=0, block=16, device="cpu")
        >>> mask[32:, 16:48]
        <BlockMask 32 x 32, blocks 16 x 16, 4 stored (0 whole), density 0.514>
        """
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) not in (2, 4):
            raise TypeError(  # an IndexError would end an iteration, as if the mask were a sequence without elements
                "mask[...]: wanted mask[queries, keys] or mask[batches, heads, queries, keys], "
                f"got {len(keys)} {'index' if len(keys) == 1 else 'indices'}"
            )
        rows = _range(keys[-2], _Side("queries", self.shape[0], self.block[0]))
        cols = _range(keys[-1], _Side("keys", self.shape[1], self.block[1]))
        if len(keys) == 2:
            return selected(self, [rows], [cols])
        chosen = [_chosen(x, name, n) for x, name, n in zip(keys[:2], ("batch", "head"), self.heads, strict=True)]
        return selected(self, [rows], [cols], (chosen[0], chosen[1]))


def selected(mask: Mask, rows: Ranges, cols: Ranges, patterns: tuple[range, range] | None = None) -> Mask:
    """The mask of some ranges of queries and of keys, one range after the other, of some batches and heads.

    Only the last range of a side may end at the end of the mask inside a block.
    """
    (bq, bk), (R, C), (B, H) = mask.block, mask._grid.counts, mask.heads
    batches, heads = patterns or (range(B), range(H))
    shape = (sum(b - a for a, b in rows), sum(b - a for a, b in cols))
    if shape == mask.shape and (batches, heads) == (range(B), range(H)):
        return mask
    backend, xp = mask._backend, mask._backend.xp
    row, col = _numbers(rows, bq), _numbers(cols, bk)
    pattern = np.add.outer(np.array(batches) * H, np.array(heads)).reshape(-1)
    count = len(pattern) * len(row)
    if not count or not len(col) or not len(mask.indices):
        arrays = (xp.zeros(count + 1, _INT32), xp.zeros(0, _INT32), xp.zeros(0, _INT32), mask.bits[:0])
        return type(mask)(backend, shape, mask.block, (len(batches), len(heads)), *arrays)
    chosen = backend.from_host(np.add.outer(pattern * R, row).reshape(-1))
    starts, ends = mask.indptr[:-1][chosen], mask.indptr[1:][chosen]
    indptr = xp.zeros(count + 1, np.int64)
    indptr[1:] = xp.cumsum(ends - starts, dtype=np.int64)
    total = int(indptr[-1])  # synchronize!
    row_of = backend.expand(indptr, total)
    position = xp.arange(total) + (starts - indptr[:-1])[row_of]
    indices, kinds = mask.indices[position], mask.kinds[position]
    if len(col) < C:
        table = np.full(C, -1, _INT32)  # the new number of each block column; -1 for those that are left out
        table[col] = np.arange(len(col))
        column = backend.from_host(table)[indices]
        kept = xp.flatnonzero(column >= 0)  # synchronize!
        indices, kinds, row_of = column[kept], kinds[kept], row_of[kept]
        indptr = xp.searchsorted(row_of, xp.arange(count + 1))
    # Element masks that no block uses any more are left out.
    used = xp.unique(kinds)  # synchronize!
    used = used[used >= 0]
    if len(used):
        kinds = xp.where(kinds < 0, _INT32.type(FULL), xp.searchsorted(used, kinds).astype(_INT32))
    else:
        kinds = whole_kinds(xp, len(kinds))
    arrays = (indptr.astype(_INT32), indices, kinds, mask.bits[used])
    return type(mask)(backend, shape, mask.block, (len(batches), len(heads)), *arrays)


def stored_columns(mask: MaskBase) -> np.ndarray[Any, Any]:
    """Whether each block column has a stored block in any pattern, on the host. Waits for the GPU."""
    found = np.zeros(mask._grid.counts[1], bool)
    found[mask._backend.to_host(mask.indices)] = True  # synchronize!
    return found


def banded(mask: Mask, place: int, left: int, right: int) -> Mask:
    """What a mask allows of a band: query i, at position ``i + place`` among the keys, sees the keys from `left` before
    its position to `right` after it.
    """
    grid = Grid(*mask.shape, mask.block, mask._backend.name)
    band: Any = type(mask)._from_lines(grid, Line(place - left), Line(place + right + 1))
    return band & mask


def _numbers(ranges: Ranges, block: int) -> np.ndarray[Any, Any]:
    """The numbers of the blocks in ranges of queries or keys."""
    return np.concatenate([np.arange(a // block, -(-b // block)) for a, b in ranges if a < b] or [np.arange(0)])


def _range(key: Any, side: _Side) -> tuple[int, int]:
    """The first position of a slice and the one after its last; ValueError if they are inside a block."""
    what = f"mask[...]: {side.name}"
    if not isinstance(key, slice):
        raise TypeError(f"{what}: wanted a slice such as 0:{side.block}, got {key!r}")
    if key.step not in (None, 1):
        raise ValueError(f"{what}: wanted a slice of neighbours, got the step {key.step!r}")
    try:
        start, stop, _ = key.indices(side.length)
    except TypeError:
        raise TypeError(f"{what}: wanted a slice of integers such as 0:{side.block}, got {key!r}") from None
    stop = max(start, stop)
    if any(x % side.block and x != side.length for x in (start, stop)):
        around = (start // side.block * side.block, min(side.length, -(-stop // side.block) * side.block))
        raise ValueError(
            f"{what}: wanted a slice of whole blocks of {side.block}, got {start}:{stop}. "
            f"Slice {around[0]}:{around[1]}, "
            "build the mask with a block that divides both ends, or go by BlockMask.from_dense(mask.to_dense()[...])"
        )
    return start, stop


def _chosen(key: Any, name: str, count: int) -> range:
    """The patterns that a slice or an integer chooses along the batch or the heads."""
    if isinstance(key, slice):
        if count == 1:  # one pattern serves all
            return range(1)
        found = range(count)[key]
        if not len(found):
            raise IndexError(f"mask[...]: {name}: wanted at least one of {count} patterns, got {key!r}")
        return found
    if isinstance(key, bool) or not isinstance(key, int | np.integer):
        raise TypeError(f"mask[...]: {name}: wanted a slice or an integer, got {key!r}")
    if count == 1:
        return range(1)
    if not -count <= key < count:
        raise IndexError(f"mask[...]: {name}: wanted 0 to {count - 1}, got {key}")
    return range(int(key) % count, int(key) % count + 1)
