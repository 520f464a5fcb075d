"""Element masks of blocks as bits: key j of query i of a block is bit ``j % 32`` of word ``[i, j // 32]``.

The functions are pure, over the array module `xp`; lines that wait for the GPU are marked ``# synchronize!``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .._backend.base import Array
from .mask_intervals import distinct_rows

#: Kind of a block in which every element is allowed.
FULL = -1
#: Kind of a block that allows nothing. A complete mask has no such blocks.
NOTHING = -2


def no_bits(xp: Any, block: tuple[int, int]) -> Array:
    return xp.zeros((0, block[0], -(-block[1] // 32)), np.uint32)


def whole_kinds(xp: Any, count: int) -> Array:
    """Kinds of `count` whole blocks. All of them are one number in memory, which is why they are not to be written."""
    one = xp.full(min(count, 1), FULL, np.int32)
    return one if count <= 1 else xp.broadcast_to(one, (count,))


def with_whole(xp: Any, bits: Array) -> Array:
    """`bits` after a first element mask that allows everything."""
    return xp.concatenate([xp.full((1, *bits.shape[1:]), 0xFFFFFFFF, np.uint32), bits])


def inside_of(xp: Any, shape: tuple[int, int], block: tuple[int, int]) -> Array:
    """Four element masks of what lies within the lengths: blocks not at an end, at the end of keys, of queries, of
    both.
    """
    (S_q, S_k), (bq, bk) = shape, block
    inside = xp.ones((4, bq, bk), bool)
    inside[2:, S_q % bq or bq :] = False
    inside[1::2, :, S_k % bk or bk :] = False
    return pack(xp, inside)


def pack(xp: Any, masks: Array) -> Array:
    """Pack booleans (n, bq, bk) into words of 32 bits, (n, bq, ceil(bk / 32))."""
    n, bq, bk = masks.shape
    words = -(-bk // 32)
    padded = xp.zeros((n, bq, words * 32), np.uint32)
    padded[..., :bk] = masks
    return (padded.reshape(n, bq, words, 32) << xp.arange(32, dtype=np.uint32)).sum(axis=3, dtype=np.uint32)


def unpack(xp: Any, bits: Array, bk: int) -> Array:
    n, bq, words = bits.shape
    return (bits[..., None] >> xp.arange(32, dtype=np.uint32) & np.uint32(1)).reshape(n, bq, words * 32)[..., :bk] != 0


def counts_of(xp: Any, bits: Array) -> Array:
    """Number of elements that each mask allows."""
    table = xp.asarray(_ones_of_16_bits())
    halves = xp.ascontiguousarray(bits).view(np.uint16)
    return table[halves].sum(axis=(1, 2), dtype=np.int64)


@cache
def _ones_of_16_bits() -> np.ndarray[Any, Any]:
    return np.bitwise_count(np.arange(1 << 16))


def mixed(x: Array) -> Array:
    """A hash of 64-bit numbers that is the same on every device."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def distinct(xp: Any, bits: Array) -> tuple[Array, Array]:
    """(indices of distinct element masks, for every mask the number of the distinct mask that it equals).

    On the GPU masks are compared by a hash; then the result is compared with the masks themselves.
    """
    if xp is np:
        return distinct_rows(bits)
    if not len(bits):
        return xp.zeros(0, np.int64), xp.zeros(0, np.int64)
    rows = bits.reshape(len(bits), -1)
    for seed in range(1, 100):
        weights = mixed(xp.arange(rows.shape[1], dtype=np.uint64) + np.uint64(seed << 32)) | np.uint64(1)
        hashes = (rows.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
        _, chosen, same = xp.unique(hashes, return_index=True, return_inverse=True)  # synchronize!
        same = same.reshape(-1)
        if bool((rows == rows[chosen[same]]).all()):  # synchronize!
            return chosen, same
    raise AssertionError("a hundred hashes in a row collided")
