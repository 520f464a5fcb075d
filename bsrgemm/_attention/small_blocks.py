"""Masks of small blocks on Hopper: whether their keys are gathered, by counting the work of random blocks."""

from __future__ import annotations

from math import gcd

from .forward import share_of_blocks
from .mask import BlockMask

#: Keys of a piece -> TFLOP/s of all pairs that are multiplied, for heads of 128 columns on an H200 (bench/NOTES.md):
#: of gathered tiles, and of tiles of 64 x 64 with keys side by side of which a part is seen.
_RATES = {16: (405, 409), 32: (490, 410), 64: (590, 444)}
#: The same of tiles of 64 x 64 that are seen as a whole. Tiles of 128 x 128 are faster only with nearly all blocks.
_WHOLE = 621


def piece_of(mask: BlockMask) -> int:
    """Keys of the pieces of which tiles are gathered for a mask, or 0 if tiles of keys side by side are faster.

    Where blocks have masks of elements the pattern is mostly a band, most of whose tiles are whole, or needs bits of
    every tile, which the warps that gather would have to make.
    """
    if len(mask.bits):
        return 0
    (bq, bk), share = mask.block, share_of_blocks(mask)
    piece, blocks = gcd(bk, 64), _touched(bq) * _touched(bk)
    rate, rate_in_part = _RATES[piece]
    whole = share**blocks
    side_by_side = whole / _WHOLE + (_multiplied(share, blocks) - whole) / rate_in_part
    return piece if _multiplied(share, _touched(bq)) / rate < side_by_side else 0


def _touched(block: int) -> float:
    """Blocks that a tile of 64 touches along a side, on average.

    >>> _touched(16), _touched(128), round(_touched(96), 2)
    (4.0, 1.0, 1.33)
    """
    return (64 + block - gcd(64, block)) / block


def _multiplied(share: float, blocks: float) -> float:
    """The share of tiles that see anything, if a tile touches so many blocks, each of which is stored or not by chance.

    >>> round(_multiplied(0.2, 4), 3)
    0.59
    """
    return 1 - (1 - share) ** blocks
