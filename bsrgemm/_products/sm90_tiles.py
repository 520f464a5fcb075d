"""The shape of the tiles of gemm_sm90: smaller ones where there are few of them."""

from __future__ import annotations

#: Half of the 132 multiprocessors of an H100 or H200.
FEW_TILES = 66


def tile_shape(rows: int, columns: int, batches: int, row_tile_height: int) -> tuple[int, int, int]:
    """Return the height of row tiles, and the rows and the columns of a tile, for a result of this size.

    The given height is the largest that divides the blocks. A tile of 64 rows has one row tile, so that no columns of
    several ones are merged, and there are twice as many tiles. Microseconds on an H200 for float16, n = 8192, density
    0.22, with equally many blocks in all block rows / with each block drawn alone:

    ===================  ===========  ===========  ===========  =========
    blocks, columns      128 x 128    64 x 256     64 x 128     chosen
    ===================  ===========  ===========  ===========  =========
    64 x 64, 128         21.3 / 33.5  26.6 / 38.0  16.6 / 26.7  64 x 128
    64 x 64, 256         27.0 / 41.2  22.0 / 33.3  26.3 / 28.9  64 x 256
    128 x 128, 128       20.0 / 28.3  25.0 / 35.2  15.9 / 24.1  64 x 128
    128 x 128, 256       18.9 / 28.7  21.1 / 31.0  24.6 / 26.2  128 x 128
    ===================  ===========  ===========  ===========  =========

    Up to 64 columns, tiles of 64 x 64 need no pieces: 64 columns take 16.1 us for 19.3 in tiles of 128 x 64 with blocks
    of 64 x 64, and 15.2 for 18.6 with blocks of 128 x 128, which are equally many in all rows.

    >>> [tile_shape(8192, columns, 1, 64) for columns in (64, 128, 256, 512)]
    [(64, 64, 64), (64, 64, 128), (64, 64, 256), (64, 128, 256)]
    >>> [tile_shape(rows, 256, 1, 128) for rows in (4096, 8192, 16384)]
    [(64, 64, 128), (128, 128, 128), (128, 128, 256)]
    """
    tiles = -(-rows // 128) * -(-columns // 256) * batches
    if columns <= 64 and row_tile_height >= 64 and tiles <= FEW_TILES:
        return 64, 64, 64
    if columns <= 64 or tiles > FEW_TILES:
        return row_tile_height, 128, 64 if columns <= 64 else 128 if columns <= 128 else 256
    if row_tile_height >= 64 and (columns <= 128 or tiles <= FEW_TILES // 2):
        return 64, 64, 128
    return (row_tile_height, 64, 256) if row_tile_height == 64 else (row_tile_height, 128, 128)
