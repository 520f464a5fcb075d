"""A mask by the tiles of a kernel: which tiles of keys each tile of queries needs, and which of their elements it sees.

The functions are pure, over ``backend.xp``. Nothing waits for the GPU; therefore arrays are as long as the number of
entries could be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array, Backend
from .mask import BlockMask
from .mask_base import FULL, NOTHING

_INT32 = np.dtype(np.int32)
#: Tiles and entries are numbered in int32.
_MOST = 2**31


class Tiles(NamedTuple):
    """The entries of the tiles of queries of all patterns; `order` lists the tiles with most entries first.

    `first` has one number more than there are tiles of queries. An entry has a tile of keys in `columns`. Its number in
    `parts` is -1 if all of the tile is seen; otherwise row ``parts[e]`` of ``kinds.reshape(-1, parts_q * parts_k)`` has
    the kinds of the blocks that it touches. `parts` is None if all of every tile is seen.
    """

    first: Array
    columns: Array
    parts: Array | None
    kinds: Array
    order: Array
    parts_q: int
    parts_k: int


def tiles(backend: Backend, mask: BlockMask, tile_q: int, tile_k: int) -> Tiles:
    """The entries of a mask for tiles of `tile_q` queries by `tile_k` keys; ValueError if int32 cannot count them."""
    xp = backend.xp
    per_pattern = -(-mask.shape[0] // tile_q)
    _check_numbers(mask, tile_q, tile_k, "queries", mask.heads[0] * mask.heads[1] * per_pattern)
    if mask.block == (tile_q, tile_k):
        parts = None  # no kind is read then: there is only one in memory, see `whole_kinds`
        if len(mask.bits):
            parts = xp.where(mask.kinds == FULL, _INT32.type(-1), xp.arange(len(mask.kinds), dtype=_INT32))
        return Tiles(mask.indptr, mask.indices, parts, mask.kinds, _order(xp, mask.indptr, per_pattern), 1, 1)
    (S_q, S_k), (bq, bk) = mask.shape, mask.block
    per_row = -(-S_k // tile_k)
    count = mask.heads[0] * mask.heads[1] * per_pattern
    block_rows = -(-S_q // bq)
    row = backend.expand(mask.indptr, len(mask.indices)).astype(np.int64)
    pattern, row = row // max(1, block_rows), row % max(1, block_rows)
    col = mask.indices.astype(np.int64)
    # Every block, combined with every tile that it touches.
    tile_row, in_rows = _touched(xp, row, bq, tile_q, S_q)
    tile_col, in_cols = _touched(xp, col, bk, tile_k, S_k)
    rows, cols = tile_row[:, :, None], tile_col[:, None, :]
    key = (pattern[:, None, None] * per_pattern + rows) * per_row + cols
    touching = _both(in_rows, in_cols)
    key = (key if touching is None else xp.where(touching, key, count * per_row)).reshape(-1)
    parts_q, parts_k = _spanned(tile_q, bq), _spanned(tile_k, bk)
    inside = _inside(row[:, None, None], rows, tile_q, bq) * parts_k + _inside(col[:, None, None], cols, tile_k, bk)
    kind = xp.broadcast_to(mask.kinds[:, None, None], inside.shape)
    sorting = xp.argsort(key, kind="stable")
    key, inside, kind = key[sorting], inside.reshape(-1)[sorting], kind.reshape(-1)[sorting]
    fresh = xp.ones(len(key), bool)
    fresh[1:] = key[1:] != key[:-1]
    entry = xp.cumsum(fresh, dtype=np.int64) - 1
    size = parts_q * parts_k
    number = xp.arange(len(key), dtype=np.int64)
    position = entry * size + inside
    if touching is None:
        stored = xp.full(len(key) * size, NOTHING, _INT32)
        stored[position] = kind
    else:  # pairs of a block and a tile that do not touch are discarded: each writes to its own index after the end
        stored = xp.full(len(key) * (size + 1), NOTHING, _INT32)
        stored[xp.where(key < count * per_row, position, len(key) * size + number)] = kind
        stored = stored[: len(key) * size]
    keys = key[xp.minimum(xp.searchsorted(entry, number), len(key) - 1)]
    tile_row, tile_col = keys // per_row % max(1, per_pattern), keys % max(1, per_row)
    wanted = _blocks_in(xp, tile_row, tile_q, bq, S_q) * _blocks_in(xp, tile_col, tile_k, bk, S_k)
    whole = (stored.reshape(-1, size) == FULL).sum(axis=1) == wanted
    parts = xp.where(whole, -1, number).astype(_INT32)
    starts = xp.searchsorted(key, xp.arange(count + 1, dtype=np.int64) * per_row)
    entries = xp.concatenate([entry, entry[-1:] + 1]) if len(key) else xp.zeros(1, np.int64)
    first = entries[starts].astype(_INT32)
    return Tiles(first, tile_col.astype(_INT32), parts, stored, _order(xp, first, per_pattern), parts_q, parts_k)


def _check_numbers(mask: BlockMask, tile_q: int, tile_k: int, side: str, tiles_of_side: int) -> None:
    """ValueError if the tiles of a side, or the entries that a mask could have, are too many for numbers of 31 bits."""
    bq, bk = mask.block
    entries = len(mask.indices) * _spanned(bq, tile_q) * _spanned(bk, tile_k)
    for what, count in ((f"tiles of {side}", tiles_of_side), ("pairs of a block and a tile", entries)):
        if count >= _MOST:
            raise ValueError(
                f"mask: {len(mask.indices)} blocks of {bq} x {bk} in {mask.heads[0] * mask.heads[1]} patterns have "
                f"{count} {what} of {tile_q} x {tile_k}, wanted less than 2**31; attend to a part of the queries at a "
                "time, with mask[q0:q1, :], or share patterns among heads"
            )


def by_keys(backend: Backend, mask: BlockMask, tile_q: int, tile_k: int) -> Tiles:
    """The entries of `tiles`, listed by tiles of keys: `columns` are tiles of queries, in increasing order."""
    xp = backend.xp
    rows, cols = -(-mask.shape[0] // tile_q), -(-mask.shape[1] // tile_k)
    count = mask.heads[0] * mask.heads[1]
    _check_numbers(mask, tile_q, tile_k, "keys", count * cols)
    found = tiles(backend, mask, tile_q, tile_k)
    number = xp.arange(len(found.columns), dtype=np.int64)
    row = xp.searchsorted(found.first, number, side="right") - 1
    key = (row // max(1, rows) * cols + found.columns) * rows + row % max(1, rows)
    # What follows the last entry goes to the end.
    key = xp.where(number < found.first[-1], key, count * rows * cols)
    sorting = xp.argsort(key, kind="stable")
    key = key[sorting]
    first = xp.searchsorted(key, xp.arange(count * cols + 1, dtype=np.int64) * rows).astype(_INT32)
    columns, parts = (key % max(1, rows)).astype(_INT32), None if found.parts is None else found.parts[sorting]
    return found._replace(first=first, columns=columns, parts=parts, order=_order(xp, first, cols))


def most_tiles(total: int, sequences: int, tile: int) -> int:
    """The number of tiles that so many sequences with `total` rows could have."""
    return total // tile + sequences


def sequences(xp: Any, q_bounds: Array, k_bounds: Array, total: int, tile_q: int, causal: bool) -> tuple[Array, Array]:
    """(sequence, tile of queries) of all tiles of sequences of different lengths, those with most keys first.

    The arrays are as long as the number of tiles could be with `total` queries in the sequences between `q_bounds`. The
    sequence is -1 after the last tile.
    """
    count = len(q_bounds) - 1
    queries, keys = (xp.diff(x.astype(np.int64)) for x in (q_bounds, k_bounds))
    ends = xp.cumsum(-(-queries // tile_q))
    number = xp.arange(most_tiles(total, count, tile_q), dtype=np.int64)
    sequence = xp.searchsorted(ends, number, side="right")
    there = sequence < count
    sequence = xp.minimum(sequence, count - 1)
    tile = number - ends[sequence] + -(-queries // tile_q)[sequence]
    length = keys[sequence]
    if causal:
        length = xp.minimum(length, length - queries[sequence] + (tile + 1) * tile_q)
    order = xp.argsort(xp.where(there, -length, 1), kind="stable")
    return xp.where(there, sequence, -1)[order].astype(_INT32), tile[order].astype(_INT32)


def sequences_by_keys(
    xp: Any, k_bounds: Array, q_bounds: Array, total: int, tile_k: int, backwards: bool
) -> tuple[Array, Array]:
    """(sequence, tile of keys) of all tiles of sequences of different lengths, those with most queries first; the tiles
    of one sequence from the first to the last, or `backwards`.
    """
    sequence, tile = sequences(xp, k_bounds, q_bounds, total, tile_k, causal=False)
    if not backwards:
        return sequence, tile
    count = -(-xp.diff(k_bounds.astype(np.int64)) // tile_k)
    return sequence, xp.where(sequence < 0, 0, count[sequence] - 1 - tile).astype(_INT32)


def _order(xp: Any, first: Array, per_pattern: int) -> Array:
    """The tiles of queries of each pattern, those with most entries first."""
    length = (first[1:] - first[:-1]).reshape(-1, max(1, per_pattern))
    return xp.argsort(-length, axis=1, kind="stable").astype(_INT32)


def _spanned(length: int, block: int) -> int:
    """The largest number of blocks that a tile of `length` touches."""
    if length % block == 0:
        return length // block
    return 1 if block % length == 0 else -(-(length - 1) // block) + 1


def _touched(xp: Any, number: Array, block: int, tile: int, total: int) -> tuple[Array, Array | None]:
    """(tiles that each block touches, whether there is such a tile), both of shape (blocks, most tiles of a block).

    The second is None if each block is in one tile.
    """
    if tile % block == 0:
        return (number // (tile // block))[:, None], None
    first = number * block // tile
    found = first[:, None] + xp.arange(_spanned(block, tile), dtype=np.int64)
    return found, found * tile < xp.minimum((number + 1) * block, total)[:, None]


def _inside(number: Array, tile_number: Array, tile: int, block: int) -> Array:
    """The number of a block, counted from the first that its tile touches."""
    return number % (tile // block) if tile % block == 0 else number - tile_number * tile // block


def _both(in_rows: Array | None, in_cols: Array | None) -> Array | None:
    """Whether a block touches a tile, of shape (blocks, tiles along the queries, tiles along the keys).

    It is None if each block is in one tile along both.
    """
    if in_rows is None:
        return None if in_cols is None else in_cols[:, None, :]
    return in_rows[:, :, None] if in_cols is None else in_rows[:, :, None] & in_cols[:, None, :]


def _blocks_in(xp: Any, tile_number: Array, tile: int, block: int, total: int) -> Array:
    """The number of blocks that a tile touches."""
    if tile % block == 0:
        in_tile = tile // block
        return xp.minimum(in_tile, -(-total // block) - tile_number * in_tile)
    first = tile_number * tile
    return (xp.minimum(first + tile, total) - 1) // block - first // block + 1
