"""The constants of gemm_turned_sm90 for a size of blocks. heuristics.py says when that kernel is chosen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .._kernels.element_types import Types
from .configs import GemmTurnedSm90

#: Height of a row tile -> (row tiles of a tile, columns of a tile, columns of A per step at most, slabs of C in shared
#: memory): for wide tiles, and for narrow ones. On an H200, with blocks of 96 x 96, 160 x 160, 80 x 80 and 48 x 80 at
#: density 0.22, n = 8160 and 8192 columns, wide tiles reach 0.85, 0.89, 0.75 and 0.57 of dense cuBLAS, and narrow ones
#: 0.73, 0.89, 0.62 and 0.50; gemm_sm90 reaches 0.46, 0.49, 0.40 and 0.37.
_TILES = {
    160: ((1, 256, 32, 1), (1, 256, 32, 1)),
    96: ((1, 512, 32, 1), (1, 256, 32, 2)),
    80: ((1, 512, 32, 1), (1, 256, 48, 2)),
    48: ((2, 512, 32, 1), (2, 256, 48, 2)),
}


def turned(names: Types, R: int, K: int, N: int) -> GemmTurnedSm90:
    """Return the config for blocks of R x K and N columns: row tiles are as high as the block size allows.

    Tiles are wide unless that adds more than a tenth to the columns.
    """
    height = next(h for h in _TILES if R % h == 0)
    wide, narrow = (-(-N // tile[1]) * tile[1] for tile in _TILES[height])
    return _config(names, height, K, N % 64 == 0, 10 * wide > 11 * narrow)


def every_turned(names: Types) -> Iterator[GemmTurnedSm90]:
    """Yield all configs that `turned` returns, one for each way in which a block is divided into steps."""
    choices = itertools.product(_TILES, range(16, 97, 16), (False, True), (False, True))
    yield from sorted({_config(names, *each) for each in choices}, key=repr)


def _config(names: Types, height: int, K: int, whole_slabs: bool, narrow: bool) -> GemmTurnedSm90:
    row_tiles, tile_n, most, rooms = _TILES[height][narrow]
    depth = min(most, K)
    return GemmTurnedSm90(names, height, row_tiles, tile_n, depth, K % depth, whole_slabs, rooms)
