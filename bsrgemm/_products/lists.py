"""Kernels that read patterns and make the lists from which the kernels of products work. None waits for the GPU.

`single`, `merged`, `items` and `row_shares` do what work_list.py does, in a few launches and with the same results;
`matched` finds row tiles with many block columns in common; `listed` makes tiles of blocks that need not be neighbours,
for sampled products.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import jit
from .._kernels.element_types import element
from .._kernels.jit import MAX_GRID_X
from .._kernels.kernel import Kernel, host
from .._kernels.launch import address, run
from . import arguments
from .arguments import STORED_PATTERN, WORK_LIST
from .work_list import Groups, Items, LongRows, Pattern, Share

#: Sizes of work lists must be smaller than the first number, and a sort key may use 63 of its 64 bits.
_MOST, _KEY_BITS = 2**31, 63
_INT32 = np.dtype(np.int32)
#: Zeros for all fields of the argument; a step fills in those that it reads.
_UNUSED = {"stored": bytes(STORED_PATTERN.size), **dict.fromkeys((name for name, _ in WORK_LIST.fields[1:]), 0)}
_STEPS = WORK_LIST.patch("step", "last_step")
#: The largest size, in bytes, of the table with one bit for each row tile and block column that is searched for row
#: tiles with common columns. If the table would be larger, neighbouring row tiles share a group.
_MOST_PATTERN_BYTES = 64 << 20
#: A null pointer, which means that row tiles are in their original order.
_NO_ORDER = np.uintp(0)


@dataclass(frozen=True)
class RowMatching(Kernel, source="row_matching.cu", argument=arguments.STORED_PATTERN):
    """One of the three kernels that find row tiles with many block columns in common.

    Only `row_bits` reads the index arrays of a matrix, so only this kernel depends on the index type.
    """

    entry: str = host("")
    index: str = "i32"

    threads = 256
    window = 512
    side = 64
    #: kNeighbors of cuda/common/coordinates.cuh
    neighbors = 8

    def grid(self, blocks: int) -> tuple[int]:
        """Return the grid of `row_bits`, in which a thread reads `neighbors` consecutive blocks."""
        return (min(MAX_GRID_X, -(-blocks // (self.threads * self.neighbors))),)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[RowMatching]:
        yield from (cls("row_bits", index) for index in ("i32", "i64"))
        yield from map(cls, ("overlaps", "match_rows"))


def tiles(count: int, threads: int) -> tuple[int, int]:
    """Return the number of CTAs that share so many numbers, and how many each has.

    There are at most 1024 CTAs, because every CTA reads what all CTAs before it have counted.
    """
    tile = max(4, -(-count // (1024 * threads))) * threads
    return -(-count // tile), tile


@dataclass(frozen=True)
class WorkListKernel(Kernel, source="work_list.cu", argument=arguments.WORK_LIST):
    """The kernel that builds a work list step by step: the entries of each group of row tiles, and items by length."""

    index: str = "i32"
    #: number of keys that one CTA sorts in shared memory, a power of two
    sorts: int = host(0)

    threads = 256
    #: the largest number of items that one CTA lists and sorts; more are left to several CTAs and CuPy
    most_sorted = 4096
    #: kNeighbors of cuda/common/coordinates.cuh
    neighbors = 8

    @property
    def shared_bytes(self) -> int:
        """The size of the keys that are sorted."""
        return 8 * self.sorts

    def grid(self, threads: int) -> tuple[int]:
        return (min(MAX_GRID_X, -(-threads // self.threads)),)

    def tiles(self, keys: int) -> tuple[int, int]:
        """Return the number of CTAs that share `keys` keys, or groups, and the number of them that each has."""
        return tiles(keys, self.threads)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[WorkListKernel]:
        yield from map(cls, ("i32", "i64"))


@dataclass(frozen=True)
class SampledTiles(Kernel, source="sampled_tiles.cu", argument=arguments.SAMPLED_TILES, needs="sm_90a"):
    """The kernel that lists tiles of `group` block rows by `wide` block columns for a sampled product.

    A tile is a record of block rows, block columns, and the stored block where each row and column meet, or -1. Each
    CTA lists the tiles of a window of `rows` block rows and `columns` block columns: 8192 columns of the matrix.
    """

    group: int
    wide: int
    index: str = "i32"

    rows = 64

    @property
    def columns(self) -> int:
        return 32 * self.wide

    @property
    def shared_bytes(self) -> int:
        """The size of the kernel's struct Window in bytes: numbers and bits of blocks, and the lowest row of tiles."""
        most = self.rows * self.columns // self.wide + self.rows // self.group
        return self.rows * self.columns * 4 + self.rows * self.columns // 8 + 12 + self.rows * 4 + -(-most // 4) * 4

    @property
    def threads(self) -> int:
        """The number of threads: a warp for each group of the window."""
        return 32 * self.rows // self.group

    @property
    def record(self) -> int:
        """The number of int32 numbers of a tile."""
        return self.group + self.wide + self.group * self.wide

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.rows), -(-columns // self.columns)

    def capacity(self, blocks: int, rows: int, columns: int) -> int:
        """Return the largest possible number of tiles: one of each group may have fewer than `wide` blocks."""
        down, across = self.grid(rows, columns)
        return blocks // self.wide + down * across * (self.rows // self.group)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[SampledTiles]:
        for index, group, wide in itertools.product(("i32", "i64"), (2, 4, 8), (2, 4, 8, 16)):
            yield cls(group, wide, index)


@dataclass(frozen=True)
class RowShares(Kernel, source="row_shares.cu", argument=arguments.ROW_SHARES):
    """The kernel that cuts long block rows into pieces and divides all block rows into ranges of equal work."""

    index: str = "i32"

    threads = 256

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[RowShares]:
        yield from map(cls, ("i32", "i64"))


#: The kernels that make lists.
LISTS: tuple[type[Kernel], ...] = (RowMatching, WorkListKernel, RowShares, SampledTiles)


class Step(IntEnum):
    """The steps of cuda/work_list.cu, in their order."""

    PLACE_ROW_TILES = 0
    ROW_TILE_KEYS = 1
    COUNT_ENTRIES = 2
    FILL_ENTRIES = 3
    ROW_ENTRIES = 4
    COLUMN_KEYS = 5
    COLUMN_ENTRIES = 6
    SUM_LENGTHS = 7
    COUNT_ITEMS = 8
    ITEM_KEYS = 9
    SORT_KEYS = 10
    LIST_ITEMS = 11


def stored(pattern: Pattern) -> bytearray:
    """Return the packed struct of a pattern, whose index arrays must be contiguous and have the same dtype."""
    indices, indptr = pattern.indices, pattern.indptr
    return STORED_PATTERN.pack(
        indices=indices.data.ptr,
        indptr=indptr.data.ptr,
        rows=len(indptr) - 1,
        columns=pattern.block_cols,
        blocks=len(indices),
        transposed=pattern.transposed,
    )


def single(pattern: Pattern, per_row: int) -> Groups | None:
    """Return groups of one row tile, of which a block row has `per_row`.

    The result is None if there are no groups or no blocks, or if there are too many for a sort key.
    """
    rows, cols = pattern.shape
    count, groups = len(pattern.indices), rows * per_row
    if not count or not groups or max(rows + 1, cols + 1, groups, count) >= _MOST:
        return None
    config = WorkListKernel(element(pattern.indices.dtype))
    columns, blocks, bounds, row_tiles = (cupy.empty(n, _INT32) for n in (count, count, rows + 1, groups))
    keys, place = (cupy.empty(count, np.int64), cupy.empty(count, _INT32)) if pattern.transposed else (None, None)
    argument = WORK_LIST.pack(**_UNUSED | {
        "stored": stored(pattern),
        "place": address(place),
        "row_tiles": row_tiles.data.ptr,
        "keys": address(keys),
        "columns": columns.data.ptr,
        "blocks": blocks.data.ptr,
        "bounds": bounds.data.ptr,
        "count": count,
        "groups": groups,
        "block_cols": cols,
    })  # fmt: skip
    uses = (pattern, keys, place, columns, blocks, bounds, row_tiles)
    most = max(count, rows + 1, groups)
    if keys is None:
        _start(config, Step.ROW_ENTRIES, most, argument, uses)
    else:
        _start(config, Step.COLUMN_KEYS, -(-count // config.neighbors), argument, uses)
        keys.sort()
        _start(config, Step.COLUMN_ENTRIES, most, argument, uses)
    return Groups(bounds, columns, blocks, row_tiles, 1, per_row)


def merged(pattern: Pattern, per_row: int, per_group: int, order: Array | None = None) -> Groups | None:
    """Return groups of `per_group` row tiles, with an entry for each block column that one of the row tiles has.

    The result is None if there are no groups or no blocks, or if the sizes exceed the bits of a sort key.
    """
    rows, cols = pattern.shape
    row_tiles, blocks = rows * per_row, len(pattern.indices)
    groups, count = -(-row_tiles // per_group), blocks * per_row
    places = groups * per_group
    bits = [n.bit_length() for n in (max(blocks - 1, 0), per_group - 1, cols, groups)]
    if not groups or not count or max(places, count, cols + 1) >= _MOST or sum(bits) > _KEY_BITS:
        return None
    config = WorkListKernel(element(pattern.indices.dtype))
    ctas, tile = config.tiles(count + 1)
    keys = cupy.empty(count, np.int64)
    lengths = (places, places, ctas, count, count * per_group, groups + 1)
    place, row_tiles_of, begun, columns, blocks_of, bounds = (cupy.empty(n, _INT32) for n in lengths)
    argument = WORK_LIST.pack(**_UNUSED | {
        "stored": stored(pattern),
        "order": address(order),
        "place": place.data.ptr,
        "row_tiles": row_tiles_of.data.ptr,
        "keys": keys.data.ptr,
        "begun": begun.data.ptr,
        "columns": columns.data.ptr,
        "blocks": blocks_of.data.ptr,
        "bounds": bounds.data.ptr,
        "count": count,
        "tile": tile,
        "per_row": per_row,
        "per_group": per_group,
        "all_row_tiles": row_tiles,
        "groups": groups,
        "block_cols": cols,
        "block_bits": bits[0],
        "member_bits": bits[1],
        "column_bits": bits[2],
    })  # fmt: skip
    uses = (pattern, order, keys, place, row_tiles_of, begun, columns, blocks_of, bounds)
    _start(config, Step.PLACE_ROW_TILES, places, argument, uses)
    _start(config, Step.ROW_TILE_KEYS, -(-blocks // config.neighbors), argument, uses)
    keys.sort()
    _start(config, Step.COUNT_ENTRIES, ctas * config.threads, argument, uses)
    _start(config, Step.FILL_ENTRIES, ctas * config.threads, argument, uses)
    return Groups(bounds, columns, blocks_of, row_tiles_of, per_group)


def items(groups: Groups, share: Share | None = None) -> Items | None:
    """Return one item per group, or with `share` several for a group that is longer than a CTA's fair share.

    The result is None if there are no groups. Few items take one launch of one CTA, others a few launches and a sort.
    """
    most = 0 if share is None else share.most_pieces
    count = groups.count + most
    if not groups.count or count >= _MOST:
        return None
    config = WorkListKernel()
    few = count <= config.most_sorted
    ctas, tile = (1, groups.count) if few else config.tiles(groups.count)
    first = Step.SUM_LENGTHS if most else Step.ITEM_KEYS
    keys, found, unsorted = cupy.empty(count + 2 * ctas, np.int64), *(cupy.empty((count, 4), _INT32) for _ in range(2))
    splits, number = cupy.empty((most, 4), _INT32) if most else found[:0], cupy.empty(1, _INT32)
    lengths = keys.data.ptr + 8 * count
    argument = WORK_LIST.pack(**_UNUSED | {
        "keys": keys.data.ptr,
        "bounds": groups.bounds.data.ptr,
        "lengths": lengths,
        "begun_items": lengths + 8 * ctas,
        "unsorted": unsorted.data.ptr,
        "items": found.data.ptr,
        "splits": splits.data.ptr,
        "item_count": number.data.ptr,
        "count": count,
        "tile": tile,
        "fair": 0 if share is None else share.fair,
        "groups": groups.count,
        "alike": groups.alike,
        "least_entries": 0 if share is None else share.least_entries,
        "most_pieces": most,
    })  # fmt: skip
    uses = (keys, unsorted, found, splits, number, groups)
    threads = ctas * config.threads
    if few:
        sorting = WorkListKernel(sorts=max(2, 1 << (count - 1).bit_length()))
        _start(sorting, first, threads, argument, uses, to=Step.LIST_ITEMS)
    else:
        for step in range(first, Step.SORT_KEYS):
            _start(config, step, threads, argument, uses)
        keys[:count].sort()
        _start(config, Step.LIST_ITEMS, count, argument, uses)
    return Items(found, number, splits, most)


def _start(
    config: WorkListKernel, step: int, threads: int, argument: bytearray, uses: Any, to: int | None = None
) -> None:
    """Do a step with so many threads, or the steps from there to `to` with one CTA."""
    packed = bytearray(argument)
    _STEPS.write(packed, step, step if to is None else to)
    run(config, config.grid(threads), (jit.argument(packed),), uses=uses)


def row_shares(indptr: Array, blocks: int, longest: int, piece: int, count: int) -> tuple[LongRows, Array | None]:
    """Return the rows with more than `longest` blocks, in pieces of at most `piece` >= `longest` blocks, and shares.

    The latter are the bounds of `count` ranges of neighbouring block rows with about the same work, increasing even if
    `indptr` is invalid; None if `count` is 0. A block row costs 16 blocks more than it has, because lanes wait even for
    a short one; the blocks of long rows do not count. There are block rows.
    """
    rows, most = len(indptr) - 1, 2 * (blocks // longest)
    kernel = RowShares(element(indptr.dtype))
    ctas, tile = tiles(rows, kernel.threads)
    counted, bounds = cupy.empty(2 * ctas, np.int64), cupy.empty(count + 1, np.int64) if count else None
    pieces, parents, number = (cupy.empty(shape, _INT32) for shape in ((most, 4), (most, 2), (1,)))
    found = LongRows(pieces, parents, number, most)
    uses = (indptr, counted, bounds, found)
    for lists in (False, True):
        packed = arguments.ROW_SHARES.pack(
            indptr=indptr.data.ptr,
            counted=counted.data.ptr,
            worked=counted.data.ptr + 8 * ctas,
            pieces=found.pieces.data.ptr,
            parents=found.parents.data.ptr,
            count=found.count.data.ptr,
            bounds=address(bounds),
            rows=rows,
            blocks=blocks,
            tile=tile,
            longest=longest,
            piece=piece,
            most_pieces=most,
            shares=count,
            lists=lists,
        )
        run(kernel, (ctas,), (jit.argument(packed),), uses=uses)
    return found, bounds


def matched(pattern: Pattern, per_row: int, per_group: int) -> Array | None:
    """Return an order of the row tiles in which those of a group have many block columns in common.

    The result is None if the row tiles should stay in their original order. Row tiles are joined to pairs, then pairs
    to pairs of pairs, and so on, until a group is full.
    """
    rows, cols = pattern.shape
    padded = -(-rows * per_row // per_group) * per_group
    words = -(-cols // 32)
    if padded <= per_group or padded * words * 4 > _MOST_PATTERN_BYTES or not len(pattern.indices):
        return None
    window, side = RowMatching.window, RowMatching.side
    config = RowMatching("row_bits", element(pattern.indices.dtype))
    bits = cupy.zeros((padded, words), np.uint32)
    packed = jit.argument(stored(pattern))
    run(config, config.grid(len(pattern.indices)), (packed, bits, np.int32(per_row), np.int32(words)), uses=(pattern,))
    order: Any = _NO_ORDER
    nodes, members = min(window, padded), 1
    overlap = cupy.empty((-(-padded // nodes), nodes, nodes), np.uint16)  # each later round needs a quarter of this
    while members < per_group:
        all_nodes = padded // members
        windows, tiles = -(-all_nodes // nodes), -(-nodes // side)
        counts = (np.int32(nodes), np.int32(all_nodes))
        run(RowMatching("overlaps"), (tiles, tiles, windows), (bits, overlap, *counts, np.int32(words)))
        merged = cupy.empty((all_nodes // 2, words), np.uint32)
        new_order = cupy.empty(padded, np.int32)
        args = (overlap, bits, merged, order, new_order, *counts, np.int32(members), np.int32(words))
        run(RowMatching("match_rows"), (windows,), args, threads=window)
        bits, order = merged, new_order
        nodes, members = nodes // 2, members * 2
    return order


@dataclass(frozen=True, slots=True)
class TileList:
    """The tiles of a pattern: `tiles` has a row of numbers for each.

    A row has the block rows of a tile, its block columns, and for each of its rows the blocks in these columns. All
    are -1 where there is none. `order` has the numbers of these rows in the order in which tiles are computed.
    ``counts[0]`` is the number of tiles. For each window, those of the first block rows first, `counts` has the number
    of its tiles and the place in `order` of the first of them.
    """

    tiles: Array
    order: Array
    counts: Array


def listed(indices: Array, indptr: Array, columns: int, row_parts: int, parts: int) -> TileList:
    """Return the tiles of `row_parts` block rows by `parts` blocks of a pattern with so many block columns."""
    kernel = SampledTiles(row_parts, parts, element(indices.dtype))
    rows, blocks = len(indptr) - 1, len(indices)
    capacity = kernel.capacity(blocks, rows, columns)
    down, across = kernel.grid(rows, columns)
    found = TileList(
        cupy.empty((capacity, kernel.record), _INT32),
        cupy.empty(capacity, _INT32),
        cupy.zeros(1 + 2 * down * across, _INT32),
    )
    argument = arguments.SAMPLED_TILES.pack(
        indices=indices.data.ptr, indptr=indptr.data.ptr, tiles=found.tiles.data.ptr, order=found.order.data.ptr,
        counts=found.counts.data.ptr, rows=rows, columns=columns, blocks=blocks, capacity=capacity,
    )  # fmt: skip
    uses = (indices, indptr, found.tiles, found.order, found.counts)
    run(kernel, kernel.grid(rows, columns), (jit.argument(argument),), uses=uses)
    return found
