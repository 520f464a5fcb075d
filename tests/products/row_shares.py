"""What row_shares has to find: long block rows in pieces, and ranges of block rows with about the same work."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from bsrgemm._products.work_list import LongRows

Array = np.ndarray[Any, Any]
#: The fixed cost of a block row, as a number of blocks.
_ROW_COST = 16


def long_rows(indptr: Array, blocks: int, longest: int, piece: int) -> LongRows:
    """The block rows with more than `longest` blocks, in pieces of at most `piece` >= `longest` blocks.

    A row of n > longest blocks has at most n / longest + 1 pieces. A spoiled index pointer may ask for more than all
    rows can have; they are cut off.
    """
    bound = 2 * (blocks // longest)
    pieces, parents = list[tuple[int, ...]](), list[tuple[int, ...]]()
    edges = np.clip(indptr.astype(np.int64), 0, blocks).tolist()
    for row, (first, stop) in enumerate(itertools.pairwise(edges)):
        if stop - first > longest:
            count, before = min(-(-(stop - first) // piece), bound - len(pieces)), len(pieces)
            pieces += [
                (row, at, min(at + piece, stop), k) for k, at in enumerate(range(first, stop, piece)) if k < count
            ]
            parents += [(before, count)] * count
    lists = [np.array(x, np.int32).reshape(-1, n) for x, n in ((pieces, 4), (parents, 2))]
    return LongRows(lists[0], lists[1], np.array([len(pieces)], np.int32), bound)


def shares(indptr: Array, longest: int, count: int) -> Array:
    """The bounds of `count` ranges of neighbouring block rows.

    Lanes wait even for a short row, and rows with more than `longest` blocks are processed in pieces.
    """
    length = np.maximum(np.diff(indptr.astype(np.int64)), 0)
    work = np.cumsum(np.where(length > longest, 0, length) + _ROW_COST)
    found = np.searchsorted(work, np.arange(count + 1) * work[-1] // count)
    found[0], found[-1] = 0, len(length)
    return found
