"""In which order tiles of queries pass by a tile of keys, for gradients whose sums are made in one order.

On Hopper the tiles of keys of a random mask wait for each other: each adds to dQ of a tile of queries when those that
were claimed before it have done so. cuda/turn_order.cu finds an order in which few of them wait, once for each mask,
and never waits for the host.
"""

from __future__ import annotations

import cupy

from .._kernels import jit
from .._kernels.launching import run
from . import arguments
from .backward_config import TurnOrder
from .launch import pointer_of, share_of_blocks
from .mask import BlockMask
from .mask_tiles import Tiles

#: The share of blocks up to which the order matters: of more blocks, the tiles of keys follow each other anyway.
_LARGEST_SHARE = 0.75


def is_worthwhile(mask: BlockMask, tile_q: int) -> bool:
    """Whether to order the entries of a mask by `in_turn`, judged by numbers that the host knows."""
    return -(-mask.shape[0] // tile_q) <= TurnOrder.most and share_of_blocks(mask) <= _LARGEST_SHARE


def in_turn(found: Tiles, config: TurnOrder, tiles: int, rows: int, walkers: int) -> Tiles:
    """Return the entries of `mask_tiles.by_keys` in an order in which few additions wait for others.

    A pattern has `tiles` tiles of keys and `rows` tiles of queries, and about `walkers` of its tiles of keys are
    computed at the same time.
    """
    columns = cupy.empty_like(found.columns)
    parts = None if found.parts is None else cupy.empty_like(found.parts)
    packed = arguments.TURN_ORDER.pack(
        first=found.first.data.ptr, columns=found.columns.data.ptr, parts=pointer_of(found.parts),
        to_columns=columns.data.ptr, to_parts=pointer_of(parts), tiles=tiles, rows=rows, entries=len(columns),
        walkers=max(1, min(walkers, config.walkers)),
    )  # fmt: skip
    grid = ((len(found.first) - 1) // max(1, tiles),)
    run(config, grid, (jit.argument(packed),), uses=(found, columns, parts))
    return found._replace(columns=columns, parts=parts)
