"""The work list of a pattern for the tensor-core kernels: groups of rows, the union of their columns, items to do.

Written over ``backend.xp`` and without a wait, so that a product on the GPU can make it on its first call. There
work_list_launch.py does what `merged` and `whole` do, in fewer launches; they stay what it is held against. All arrays
are int32. `Schedule` of cuda/common/bsr.cuh is what the kernels see of it.

A block row is cut into *slots* of equal height; a *group* is a few slots that one tile of a kernel covers; an *entry*
is a block column that at least one of them has, with the block of each slot or -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array, Backend

_INT32 = np.dtype(np.int32)
#: An item is not cut shorter than so many columns of A: writing and adding up a tile of sums costs as much as these.
_LEAST_COLUMNS = 512
#: Items may be so much longer than a CTA's fair share before they are cut: one round less is worth it.
_SLACK = 1.15


@dataclass(frozen=True, slots=True)
class Pattern:
    """The structure of A, or of its transpose, as seen by a product."""

    indices: Array
    indptr: Array
    block_rows: int
    block_cols: int
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Block rows and block columns of the operand as it is used."""
        return (self.block_cols, self.block_rows) if self.transposed else (self.block_rows, self.block_cols)


@dataclass(frozen=True, slots=True)
class Groups:
    """Entries of all groups: group g has those from ``first[g]`` up to ``last[g]``."""

    first: Array
    last: Array
    columns: Array
    blocks: Array
    slots: Array
    per_group: int

    @property
    def count(self) -> int:
        return len(self.first)


@dataclass(frozen=True, slots=True)
class Items:
    """What is to be done, longest first: rows {group, first entry, behind the last, piece or -1}.

    `pieces` bounds the number of pieces of groups that were split; `splits` tells of each piece {first piece of its
    group, pieces of it, first entry of the group, behind its last}.
    """

    items: Array
    count: Array
    splits: Array
    pieces: int


class Share(NamedTuple):
    """What the fair share of a CTA follows from."""

    #: columns of a block
    K: int
    #: tiles side by side that the result has
    column_tiles: int
    ctas: int

    @property
    def most_pieces(self) -> int:
        """Pieces that `split` makes of groups it cuts, at most: each is longer than half of a CTA's fair share."""
        return 2 * self.ctas // self.column_tiles + 2


def coordinates(backend: Backend, pattern: Pattern) -> tuple[Array, Array]:
    """(row, column) of every stored block in the operand as it is used; -1 for what lies outside the matrix."""
    xp = backend.xp
    indices, indptr = pattern.indices, pattern.indptr
    rows = backend.expand(indptr, len(indices))
    place = xp.arange(len(indices), dtype=indptr.dtype)
    stored = (place >= indptr[0]) & (place < indptr[-1]) & (indices >= 0) & (indices < pattern.block_cols)
    rows = xp.where(stored, rows, -1).astype(_INT32)
    cols = xp.where(stored, indices, -1).astype(_INT32)
    return (cols, rows) if pattern.transposed else (rows, cols)


def single(backend: Backend, pattern: Pattern, per_row: int) -> Groups:
    """Groups of one slot: each of the `per_row` slots of a block row walks over the row's own blocks."""
    xp = backend.xp
    rows, _ = pattern.shape
    if pattern.transposed:
        row, col = coordinates(backend, pattern)
        order = xp.argsort(row, kind="stable")
        bounds = xp.searchsorted(row[order], xp.arange(rows + 1, dtype=_INT32)).astype(_INT32)
        columns, blocks = col[order], order.astype(_INT32)
    else:
        stored = len(pattern.indices)
        columns = pattern.indices.astype(_INT32, copy=False)
        inside = (columns >= 0) & (columns < pattern.block_cols)
        columns = xp.where(inside, columns, pattern.block_cols).astype(_INT32)
        blocks = xp.arange(stored, dtype=_INT32)
        bounds = xp.clip(pattern.indptr, 0, stored).astype(_INT32)
    first, last = bounds[:-1], bounds[1:]
    if per_row > 1:
        first, last = xp.repeat(first, per_row), xp.repeat(last, per_row)
    return Groups(first, last, columns, blocks, xp.arange(rows * per_row, dtype=_INT32), 1)


def merged(backend: Backend, pattern: Pattern, per_row: int, per_group: int, order: Array | None = None) -> Groups:
    """Groups of `per_group` slots over the union of their columns, a column's duplicates in entries of their own.

    `order` is a permutation of the slots, padded to a multiple of `per_group`; without it neighbours share a group.
    """
    xp = backend.xp
    rows, cols = pattern.shape
    slots = rows * per_row
    groups = -(-slots // per_group)
    if order is None:
        order = xp.arange(groups * per_group, dtype=_INT32)
    row, col = coordinates(backend, pattern)
    block = xp.arange(len(row), dtype=np.int64)
    slot = row.astype(np.int64)
    if per_row > 1:
        sub = xp.arange(per_row, dtype=np.int64)
        slot = xp.where(slot[:, None] < 0, -1, slot[:, None] * per_row + sub).reshape(-1)
        col, block = xp.repeat(col, per_row), xp.repeat(block, per_row)
    place = xp.empty(groups * per_group, np.int64)
    place[order] = xp.arange(groups * per_group, dtype=np.int64)
    place = xp.where(slot < 0, groups * per_group, place[slot])
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
    slots_of = xp.where(order < slots, order, -1).astype(_INT32)
    return Groups(bounds[:-1], bounds[1:], columns, blocks, slots_of, per_group)


def whole(backend: Backend, groups: Groups) -> Items:
    """One item per group."""
    xp = backend.xp
    group = xp.argsort(groups.first - groups.last, kind="stable").astype(_INT32)
    items = xp.stack([group, groups.first[group], groups.last[group], xp.full(groups.count, -1, _INT32)], axis=1)
    return Items(xp.ascontiguousarray(items), xp.full(1, groups.count, _INT32), items[:0], 0)


def may_split(groups: Groups, pattern: Pattern, share: Share) -> bool:
    """Could a group be longer than its fair share? Judged by sizes alone; duplicates may make one longer still."""
    _, cols = pattern.shape
    entries = len(groups.blocks) // groups.per_group**2  # at least: every slot has every entry
    if groups.per_group == 1:
        entries *= groups.count // max(1, pattern.shape[0])
    fair = max(-(-_LEAST_COLUMNS // share.K), int(entries * share.column_tiles / share.ctas * _SLACK))
    return share.most_pieces > 2 and cols > fair


def split(backend: Backend, groups: Groups, share: Share) -> Items:
    """Items of at most a CTA's fair share of all entries, so that one long row does not keep one CTA busy alone."""
    xp = backend.xp
    first = groups.first.astype(np.int64)
    length = xp.maximum(groups.last - first, 0)  # index arrays that were spoiled may run backwards
    total = length.sum()
    entries = xp.ceil(total * (share.column_tiles / share.ctas * _SLACK)).astype(np.int64)
    pieces = xp.maximum(-(-length // xp.maximum(-(-_LEAST_COLUMNS // share.K), entries)), 1)
    most = share.most_pieces
    cut = xp.where(pieces > 1, pieces, 0)
    behind, cut_behind = xp.cumsum(pieces), xp.cumsum(cut)
    bound = groups.count + most
    number = xp.arange(bound, dtype=np.int64)
    group = xp.minimum(xp.searchsorted(behind, number, side="right"), groups.count - 1)
    within = number - (behind - pieces)[group]
    count = xp.minimum(behind[-1:], bound)
    start = first[group] + within * length[group] // pieces[group]
    stop = first[group] + (within + 1) * length[group] // pieces[group]
    is_item = number < count
    piece = (cut_behind - cut)[group] + within
    is_piece = is_item & (pieces[group] > 1)
    longest = xp.argsort(xp.where(is_item, start - stop, 1), kind="stable")
    items = xp.stack([group, start, stop, xp.where(is_piece, piece, -1)], axis=1).astype(_INT32)
    record = xp.stack([piece - within, pieces[group], first[group], first[group] + length[group]], axis=1)
    splits = xp.zeros((most + 1, 4), _INT32)
    splits[xp.where(is_piece, piece, most)] = record.astype(_INT32)
    return Items(xp.ascontiguousarray(items[longest]), count.astype(_INT32), splits, most)


@dataclass(frozen=True, slots=True)
class LongRows:
    """Pieces of the block rows with more than so many blocks: {row, first, behind the last, number within the row}.

    `parents` has {first piece of its row, pieces of it}. There are ``count[0]`` pieces, and room for `bound`.
    """

    pieces: Array
    parents: Array
    count: Array
    bound: int


#: What a row costs beside its blocks, in blocks.
_ROW_COST = 16


def long_rows(backend: Backend, indptr: Array, blocks: int, longest: int) -> LongRows:
    """The block rows with more than `longest` blocks, in pieces of at most so many."""
    xp = backend.xp
    bound = 2 * (blocks // longest)  # a row of n > longest blocks has at most n / longest + 1 pieces
    rows = len(indptr) - 1
    number = xp.arange(bound, dtype=np.int64)
    start = xp.clip(indptr.astype(np.int64), 0, blocks)
    length = xp.maximum(start[1:] - start[:-1], 0)
    behind = xp.minimum(xp.cumsum(xp.where(length > longest, -(-length // longest), 0)), bound)
    count = xp.diff(behind, prepend=behind[:1] * 0)
    row = xp.minimum(xp.searchsorted(behind, number, side="right"), rows - 1)
    within = number - (behind - count)[row]
    first = start[:-1][row] + within * longest
    pieces = xp.stack([row, first, xp.minimum(first + longest, start[1:][row]), within], axis=1)
    parents = xp.stack([number - within, count[row]], axis=1)
    lists = [xp.ascontiguousarray(x.astype(_INT32)) for x in (pieces, parents, behind[-1:])]
    return LongRows(lists[0], lists[1], lists[2], bound)


def shares(backend: Backend, indptr: Array, longest: int, count: int) -> Array:
    """Where shares of neighbouring rows with about as much work each begin: in order, whatever `indptr` holds.

    A row costs as much as its blocks and some more: its lanes wait for it, however short it is. One of more than
    `longest` blocks is left to others.
    """
    xp, rows = backend.xp, len(indptr) - 1
    length = xp.maximum(indptr[1:] - indptr[:-1], 0)
    work = xp.cumsum(xp.where(length > longest, 0, length) + _ROW_COST, dtype=np.int64)
    wanted = xp.arange(count + 1, dtype=np.int64) * work[-1] // count
    found = xp.searchsorted(work, wanted).astype(np.int64, copy=False)
    found[0], found[-1] = 0, rows
    return found


def describe(groups: Groups, items: Items) -> dict[str, Any]:
    """Numbers for people: waits for the GPU."""
    blocks = groups.blocks.reshape(-1, groups.per_group)
    used = int((groups.last - groups.first).sum())
    return {
        "groups": groups.count,
        "entries": used,
        "filled": float((blocks[:used] >= 0).mean()) if used else 1.0,
        "items": int(items.count[0]),
    }
