"""The work list of a pattern on the GPU: `merged` and `whole` of schedule.py in a few launches of work_list.cu.

Nothing here waits, and the lists are those of schedule.py, number by number.
"""

from __future__ import annotations

import struct

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import jit
from . import configs
from .work_list import Groups, Items, Pattern

#: Of cuda/work_list.cu: `Step`, and `Merge` behind the pattern and in front of the step: pointers, sizes, bits of keys.
_PLACE_SLOTS, _SLOT_KEYS, _COUNT_ENTRIES, _FILL_ENTRIES, _LENGTH_KEYS, _LIST_ITEMS = range(6)
_MERGE, _STEP = struct.Struct("@12P2q8i"), struct.Struct("@q")
#: `Stored` of cuda/coordinates.cuh.
_STORED = struct.Struct("@2P4q")
#: Work lists count in 31 bits; a sort key has one bit more than it may use.
_MOST, _KEY_BITS = 2**31, 63
_INT32 = np.dtype(np.int32)


def stored(pattern: Pattern) -> bytes:
    """A pattern as kernels take it, whose arrays lie in one piece and have one dtype."""
    indices, indptr = pattern.indices, pattern.indptr
    sizes = (len(indptr) - 1, pattern.block_cols, len(indices))
    return _STORED.pack(indices.data.ptr, indptr.data.ptr, *sizes, pattern.transposed)


def merged(pattern: Pattern, per_row: int, per_group: int, order: Array | None = None) -> Groups | None:
    """Groups of `per_group` slots over the union of their columns, or None if there are none or keys too short."""
    rows, cols = pattern.shape
    slots, blocks = rows * per_row, len(pattern.indices)
    groups, count = -(-slots // per_group), blocks * per_row
    places = groups * per_group
    bits = [n.bit_length() for n in (max(blocks - 1, 0), per_group - 1, cols, groups)]
    if not groups or not count or max(places, count, cols + 1) >= _MOST or sum(bits) > _KEY_BITS:
        return None
    config = configs.WorkListKernel(configs.element(pattern.indices.dtype))
    tiles, tile = config.tiles(count + 1)
    keys = cupy.empty(count, np.int64)
    lengths = (places, places, tiles, count, count * per_group, groups + 1)
    place, slots_of, begun, columns, blocks_of, bounds = (cupy.empty(n, _INT32) for n in lengths)
    arrays = (place, slots_of, keys, begun, columns, blocks_of, bounds)
    packed = stored(pattern) + _MERGE.pack(
        *(0 if order is None else order.data.ptr, *(x.data.ptr for x in arrays), 0, 0, 0, 0),
        *(count, tile, per_row, per_group, slots, groups, cols, *bits[:3]),
    )
    _start(config, _PLACE_SLOTS, places, packed)
    _start(config, _SLOT_KEYS, -(-blocks // config.neighbors), packed)
    keys.sort()
    _start(config, _COUNT_ENTRIES, tiles * config.threads, packed)
    _start(config, _FILL_ENTRIES, tiles * config.threads, packed)
    return Groups(bounds[:-1], bounds[1:], columns, blocks_of, slots_of, per_group)


def whole(groups: Groups) -> Items | None:
    """One item per group, or None if there are none."""
    count = groups.count
    if not count:
        return None
    config = configs.WorkListKernel()
    keys, items, number = cupy.empty(count, np.int64), cupy.empty((count, 4), _INT32), cupy.empty(1, _INT32)
    pointers = (x.data.ptr for x in (groups.first, groups.last, items, number))
    packed = bytes(_STORED.size) + _MERGE.pack(
        *(0, 0, 0, keys.data.ptr, 0, 0, 0, 0, *pointers), *(0, 0, 0, 0, 0, count, 0, 0, 0, 0)
    )
    _start(config, _LENGTH_KEYS, count, packed)
    keys.sort()
    _start(config, _LIST_ITEMS, count, packed)
    return Items(items, number, items[:0], 0)


def _start(config: configs.WorkListKernel, step: int, threads: int, packed: bytes) -> None:
    kernel = jit.load(config.spec(), jit.device_target())
    kernel(config.grid(threads), (config.threads,), (jit.argument(packed + _STEP.pack(step)),))
