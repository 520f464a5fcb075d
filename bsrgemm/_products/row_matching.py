"""Launches of cuda/row_matching.cu, which finds row tiles with many block columns in common."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import jit
from .._kernels.element_types import element
from .._kernels.launching import run
from . import work_list_launch
from .configs import RowMatching
from .work_list import Pattern

#: The largest size, in bytes, of the table with one bit for each row tile and block column that is searched for row
#: tiles with common columns. If the table would be larger, neighbouring row tiles share a group.
_MOST_PATTERN_BYTES = 64 << 20
#: A null pointer, which means that row tiles are in their original order.
_NO_ORDER = np.uintp(0)


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
    stored = jit.argument(work_list_launch.stored(pattern))
    run(config, config.grid(len(pattern.indices)), (stored, bits, np.int32(per_row), np.int32(words)), uses=(pattern,))
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
