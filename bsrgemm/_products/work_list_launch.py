"""Work lists on the GPU: `merged` and `whole` of work_list.py in a few launches of cuda/work_list.cu.

Nothing here waits for the GPU. The lists are identical to those of work_list.py.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import jit
from .._kernels.element_types import element
from .._kernels.launching import run
from .arguments import STORED_PATTERN, WORK_LIST
from .configs import WorkListKernel
from .work_list import Groups, Items, Pattern

#: Sizes of work lists must be smaller than the first number, and a sort key may use 63 of its 64 bits.
_MOST, _KEY_BITS = 2**31, 63
_INT32 = np.dtype(np.int32)
#: Zeros for all fields of the argument; a step fills in those that it reads.
_UNUSED = dict.fromkeys((name for name, _ in WORK_LIST.fields[1:]), 0)


class Step(IntEnum):
    """The steps of cuda/work_list.cu, in their order. Each launch does one of them."""

    PLACE_ROW_TILES = 0
    ROW_TILE_KEYS = 1
    COUNT_ENTRIES = 2
    FILL_ENTRIES = 3
    LENGTH_KEYS = 4
    LIST_ITEMS = 5


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
    tiles, tile = config.tiles(count + 1)
    keys = cupy.empty(count, np.int64)
    lengths = (places, places, tiles, count, count * per_group, groups + 1)
    place, row_tiles_of, begun, columns, blocks_of, bounds = (cupy.empty(n, _INT32) for n in lengths)
    argument = _UNUSED | {
        "stored": stored(pattern),
        "order": 0 if order is None else order.data.ptr,
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
    }
    uses = (pattern, order, keys, place, row_tiles_of, begun, columns, blocks_of, bounds)
    _start(config, Step.PLACE_ROW_TILES, places, argument, uses)
    _start(config, Step.ROW_TILE_KEYS, -(-blocks // config.neighbors), argument, uses)
    keys.sort()
    _start(config, Step.COUNT_ENTRIES, tiles * config.threads, argument, uses)
    _start(config, Step.FILL_ENTRIES, tiles * config.threads, argument, uses)
    return Groups(bounds[:-1], bounds[1:], columns, blocks_of, row_tiles_of, per_group)


def whole(groups: Groups) -> Items | None:
    """Return one item per group, or None if there are no groups."""
    count = groups.count
    if not count:
        return None
    config = WorkListKernel()
    keys, items, number = cupy.empty(count, np.int64), cupy.empty((count, 4), _INT32), cupy.empty(1, _INT32)
    argument = _UNUSED | {
        "stored": bytes(STORED_PATTERN.size),
        "keys": keys.data.ptr,
        "first": groups.first.data.ptr,
        "last": groups.last.data.ptr,
        "items": items.data.ptr,
        "item_count": number.data.ptr,
        "groups": count,
    }
    uses = (keys, items, number, groups)
    _start(config, Step.LENGTH_KEYS, count, argument, uses)
    keys.sort()
    _start(config, Step.LIST_ITEMS, count, argument, uses)
    return Items(items, number, items[:0], 0)


def _start(config: WorkListKernel, step: Step, threads: int, argument: dict[str, object], uses: Any) -> None:
    packed = WORK_LIST.pack(**argument | {"step": step})
    run(config, config.grid(threads), (jit.argument(packed),), uses=uses)
