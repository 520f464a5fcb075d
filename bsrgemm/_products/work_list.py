"""The work list of a pattern for the tensor-core kernels: groups of row tiles, the union of their columns, work items.

A block row is cut into *row tiles* of equal height. A *group* is a few row tiles that one tile of a kernel covers. An
*entry* of a group is a block column that at least one of its row tiles has, with the block of each row tile or -1. An
*item* is a group, or a piece of one. All arrays are int32; the kernels read them as `Schedule` of cuda/common/bsr.cuh.

These functions work with any array module (``backend.xp``) and never wait for the GPU. On the GPU, lists.py does
what they do in fewer launches; here they are its reference implementation and its fallback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._backend.base import Array, Backend

_INT32 = np.dtype(np.int32)
#: A group is cut only if it is longer than a CTA's fair share times this factor, because one round less saves more.
_SLACK = 1.15


@dataclass(frozen=True, slots=True)
class Pattern:
    """The structure of the stored matrix of a product, and whether the product uses its transpose.

    `block_rows` and `block_cols` are those of the stored matrix.
    """

    indices: Array
    indptr: Array
    block_rows: int
    block_cols: int
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of block rows and block columns of the operand, after a transposition if there is one."""
        return (self.block_cols, self.block_rows) if self.transposed else (self.block_rows, self.block_cols)


@dataclass(frozen=True, slots=True)
class Groups:
    """The entries of all groups. Those of group g are from ``first[g]`` up to, and without, ``last[g]``.

    ``columns`` has the block column of each entry, ``blocks`` the `per_group` blocks of each entry (or -1), and
    ``row_tiles`` the `per_group` row tiles of each group (or -1). Every `alike` neighbouring groups have the same
    entries, which begin in ``bounds``.
    """

    bounds: Array
    columns: Array
    blocks: Array
    row_tiles: Array
    per_group: int
    alike: int = 1

    @property
    def count(self) -> int:
        return (len(self.bounds) - 1) * self.alike

    @property
    def first(self) -> Array:
        return self.bounds[:-1].repeat(self.alike)

    @property
    def last(self) -> Array:
        return self.bounds[1:].repeat(self.alike)


@dataclass(frozen=True, slots=True)
class Items:
    """The work items, longest first. A row of `items` is {group, first entry, end of the entries, piece or -1}.

    ``count[0]`` is the number of items. `pieces` is an upper bound of the number of pieces of groups that were split.
    A row of `splits` describes a piece: {first piece of its group, number of pieces of the group, first entry of the
    group, end of its entries}. What is in the rows of items and pieces that there are not, nobody reads.
    """

    items: Array
    count: Array
    splits: Array
    pieces: int


class Share(NamedTuple):
    """The sizes that determine the fair share of a CTA: all work divided by the number of CTAs."""

    #: number of columns of a block
    K: int
    #: number of column tiles of the result, over all batches
    column_tiles: int
    ctas: int
    #: a group with at most so many columns of A is never cut, because writing and adding the sums of a piece costs as
    #: much as multiplying so many columns
    least_columns: int = 512

    @property
    def most_pieces(self) -> int:
        """An upper bound of the number of pieces that `split` makes; each exceeds half of a CTA's fair share."""
        return 2 * self.ctas // self.column_tiles + 2

    @property
    def fair(self) -> float:
        """The share of all entries beyond which a group is cut."""
        return self.column_tiles / self.ctas * _SLACK

    @property
    def least_entries(self) -> int:
        """The number of entries up to which a group is never cut."""
        return -(-self.least_columns // self.K)


def coordinates(backend: Backend, pattern: Pattern) -> tuple[Array, Array]:
    """Return the block row and block column of every stored block in the operand, which may be a transpose.

    Both are -1 for a block that lies outside the matrix.
    """
    xp = backend.xp
    indices, indptr = pattern.indices, pattern.indptr
    rows = backend.expand(indptr, len(indices))
    place = xp.arange(len(indices), dtype=indptr.dtype)
    stored = (place >= indptr[0]) & (place < indptr[-1]) & (indices >= 0) & (indices < pattern.block_cols)
    rows = xp.where(stored, rows, -1).astype(_INT32)
    cols = xp.where(stored, indices, -1).astype(_INT32)
    return (cols, rows) if pattern.transposed else (rows, cols)


def single(backend: Backend, pattern: Pattern, per_row: int) -> Groups:
    """Return groups of one row tile. Each of the `per_row` row tiles of a block row has all blocks of that row."""
    xp = backend.xp
    rows, _ = pattern.shape
    if pattern.transposed:
        row, col = coordinates(backend, pattern)
        order = xp.argsort(row, kind="stable")
        bounds = xp.searchsorted(row[order], xp.arange(rows + 1, dtype=_INT32)).astype(_INT32)
        columns, blocks = col[order], order.astype(_INT32)
    else:
        stored = len(pattern.indices)
        inside = (pattern.indices >= 0) & (pattern.indices < pattern.block_cols)
        columns = xp.where(inside, pattern.indices, pattern.block_cols).astype(_INT32)
        blocks = xp.arange(stored, dtype=_INT32)
        bounds = xp.clip(pattern.indptr, 0, stored).astype(_INT32)
    return Groups(bounds, columns, blocks, xp.arange(rows * per_row, dtype=_INT32), 1, per_row)


def merged(backend: Backend, pattern: Pattern, per_row: int, per_group: int, order: Array | None = None) -> Groups:
    """Return groups of `per_group` row tiles, with an entry for each block column that one of the row tiles has.

    A block that is stored twice has two entries. `order` is a permutation of the row tiles, padded to a multiple of
    `per_group`; without it, neighbouring row tiles share a group.
    """
    xp = backend.xp
    rows, cols = pattern.shape
    row_tiles = rows * per_row
    groups = -(-row_tiles // per_group)
    if order is None:
        order = xp.arange(groups * per_group, dtype=_INT32)
    row, col = coordinates(backend, pattern)
    block = xp.arange(len(row), dtype=np.int64)
    row_tile = row.astype(np.int64)
    if per_row > 1:
        sub = xp.arange(per_row, dtype=np.int64)
        row_tile = xp.where(row_tile[:, None] < 0, -1, row_tile[:, None] * per_row + sub).reshape(-1)
        col, block = xp.repeat(col, per_row), xp.repeat(block, per_row)
    place = xp.empty(groups * per_group, np.int64)
    place[order] = xp.arange(groups * per_group, dtype=np.int64)
    place = xp.where(row_tile < 0, groups * per_group, place[row_tile])
    key = (place // per_group * (cols + 1) + xp.where(col < 0, cols, col)) * per_group + place % per_group
    sorting = xp.argsort(key, kind="stable")
    key = key[sorting]
    entry_key = key // per_group
    fresh = xp.ones(len(key), bool)
    fresh[1:] = (entry_key[1:] != entry_key[:-1]) | (key[1:] == key[:-1])
    entry = xp.cumsum(fresh, dtype=np.int64) - 1
    columns = xp.full(len(key), cols, _INT32)
    columns[entry] = (entry_key % (cols + 1)).astype(_INT32)
    blocks = xp.full(len(key) * per_group, -1, _INT32)
    blocks[entry * per_group + key % per_group] = block[sorting].astype(_INT32)
    starts = xp.searchsorted(key, xp.arange(groups + 1, dtype=np.int64) * ((cols + 1) * per_group))
    counts = xp.concatenate([entry, entry[-1:] + 1]) if len(key) else xp.zeros(1, np.int64)
    bounds = counts[starts].astype(_INT32)
    row_tiles_of = xp.where(order < row_tiles, order, -1).astype(_INT32)
    return Groups(bounds, columns, blocks, row_tiles_of, per_group)


def whole(backend: Backend, groups: Groups) -> Items:
    """Return one item per group."""
    xp = backend.xp
    first, last = groups.first, groups.last
    group = xp.argsort(first - last, kind="stable").astype(_INT32)
    items = xp.stack([group, first[group], last[group], xp.full(groups.count, -1, _INT32)], axis=1)
    return Items(xp.ascontiguousarray(items), xp.full(1, groups.count, _INT32), items[:0], 0)


def may_split(groups: Groups, pattern: Pattern, share: Share) -> bool:
    """Return whether a group could be longer than a CTA's fair share, judged by sizes alone.

    Duplicate blocks, which can make a group even longer, are not taken into account.
    """
    _, cols = pattern.shape
    entries = len(groups.blocks) // groups.per_group**2  # a lower bound, reached if every row tile has every entry
    if groups.per_group == 1:
        entries *= groups.count // max(1, pattern.shape[0])
    fair = max(share.least_entries, int(entries * share.column_tiles / share.ctas * _SLACK))
    return share.most_pieces > 2 and cols > fair


def split(backend: Backend, groups: Groups, share: Share) -> Items:
    """Return items of at most about a CTA's fair share, so that no CTA works on one long group after all others."""
    xp = backend.xp
    first = groups.first.astype(np.int64)
    length = xp.maximum(groups.last - first, 0)  # invalid index arrays can make this negative
    total = length.sum()
    entries = xp.ceil(total * share.fair).astype(np.int64)
    pieces = xp.maximum(-(-length // xp.maximum(share.least_entries, entries)), 1)
    most = share.most_pieces
    cut = xp.where(pieces > 1, pieces, 0)
    ends, cut_ends = xp.cumsum(pieces), xp.cumsum(cut)
    bound = groups.count + most
    number = xp.arange(bound, dtype=np.int64)
    group = xp.minimum(xp.searchsorted(ends, number, side="right"), groups.count - 1)
    within = number - (ends - pieces)[group]
    count = xp.minimum(ends[-1:], bound)
    start = first[group] + within * length[group] // pieces[group]
    stop = first[group] + (within + 1) * length[group] // pieces[group]
    is_item = number < count
    piece = (cut_ends - cut)[group] + within
    is_piece = is_item & (pieces[group] > 1)
    longest = xp.argsort(xp.where(is_item, start - stop, 1), kind="stable")
    items = xp.stack([group, start, stop, xp.where(is_piece, piece, -1)], axis=1).astype(_INT32)
    record = xp.stack([piece - within, pieces[group], first[group], first[group] + length[group]], axis=1)
    splits = xp.zeros((most + 1, 4), _INT32)
    splits[xp.where(is_piece, piece, most)] = record.astype(_INT32)
    return Items(xp.ascontiguousarray(items[longest]), count.astype(_INT32), splits, most)


@dataclass(frozen=True, slots=True)
class LongRows:
    """The pieces of long block rows. A row of `pieces` is {block row, first block, end, number within the block row}.

    A row of `parents` is {first piece of the block row, number of pieces of the block row}. There are ``count[0]``
    pieces; the arrays have `bound` rows.
    """

    pieces: Array
    parents: Array
    count: Array
    bound: int
