"""Masks in which a query sees one interval of keys, worked out on the host by rows of blocks, whatever their backend.

Bounds of intervals climb with the queries, and intervals of neighbouring queries touch: then the blocks that a row of
blocks needs lie side by side, and where those begin that are seen whole follows from its first and last query.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Numbers = np.ndarray[Any, Any]
#: From a query to the first key that it sees and the one behind the last.
Interval = Callable[[Numbers], tuple[Numbers, Numbers]]
#: From the first query and key of blocks to a number; blocks of the same number have the same elements.
Code = Callable[[Numbers, Numbers], Numbers]
#: Shift of a line that never climbs above its least.
FLAT = -(1 << 60)


class BlockRows(NamedTuple):
    """The stored blocks: row r has columns from ``first[r]`` on, and the places ``starts[r]`` to ``starts[r + 1]``.

    Those at `places` are allowed in part and have `kinds`, numbers of `bits`; all others are whole.
    """

    first: Numbers
    starts: Numbers
    places: Numbers
    kinds: Numbers
    bits: Numbers


class Line(NamedTuple):
    """A bound of intervals: at query i ``i + shift``, but no less than `least` (which is not negative)."""

    shift: int
    least: int = 0

    def at(self, query: Numbers, most: int) -> Numbers:
        """The bound of these queries, and no more than `most`."""
        return np.minimum(np.maximum(query + self.shift, self.least), most)


def flat(least: int) -> Line:
    """The same bound for every query."""
    return Line(FLAT, least)


def lines(
    shape: tuple[int, int], block: tuple[int, int], low: Line, high: Line, queries: tuple[int, int] | None = None
) -> BlockRows:
    """Queries, or those from ``queries[0]`` up to ``queries[1]``, see the keys from `low` up to, not including, `high`.

    `low` and `high` must not cross between 0 and the number of keys.
    """
    (S_q, S_k), (bq, bk) = shape, block
    begin, end = (0, S_q) if queries is None else queries
    if not high.least:
        begin = max(begin, 1 - high.shift)
    end = min(end, S_k - low.shift)

    def interval(query: Numbers) -> tuple[Numbers, Numbers]:
        return low.at(query, S_k), high.at(query, S_k)

    def code(top: Numbers, left: Numbers) -> Numbers:
        found = np.zeros(len(top), np.int64)
        for line in (low, high):
            if line.shift > FLAT:
                found = found * (bq + bk + 1) + np.minimum(np.maximum(top - left + line.shift, -bq), bk)
            if line.least:
                found = found * (bk + 1) + np.minimum(np.maximum(line.least - left, 0), bk)
        for bound, first, side in ((begin, top, bq), (end, top, bq), (S_k, left, bk)):
            if bound % side:
                found = found * (side + 1) + np.minimum(np.maximum(bound - first, 0), side)
        return found

    return _stored(shape, block, interval, code, begin, end)


def documents(bounds: Numbers, block: tuple[int, int]) -> BlockRows:
    """A query sees the keys between the same two of the bounds."""
    S, (bq, bk) = int(bounds[-1]), block
    sizes = np.diff(bounds)
    lows, highs = np.repeat(bounds[:-1], sizes), np.repeat(bounds[1:], sizes)

    def interval(query: Numbers) -> tuple[Numbers, Numbers]:
        query = np.minimum(query, S - 1)
        return lows[query], highs[query]

    def code(top: Numbers, left: Numbers) -> Numbers:
        # Beside the diagonal, one document at most has queries and keys of a block, and they make a rectangle.
        before, behind = left + bk <= top, left >= top + bq
        low, high = interval(np.where(before, top, top + bq - 1))
        edge_q = np.minimum(np.maximum(np.where(before, high, low) - top, 0), bq)
        edge_k = np.minimum(np.maximum(np.where(before, low, high) - left, 0), bk)
        rectangle = (edge_q * (bk + 1) + edge_k) * 2 + before
        return np.where(before | behind, rectangle, -1 - np.arange(len(top)))

    return _stored((S, S), block, interval, code, 0, S)


def _stored(
    shape: tuple[int, int], block: tuple[int, int], interval: Interval, code: Code, begin: int, end: int
) -> BlockRows:
    """Queries from `begin` up to `end` see intervals, none of them empty."""
    (S_q, S_k), (bq, bk) = shape, block
    cols = -(-S_k // bk)
    top = np.arange(0, S_q, bq)
    bottom = np.minimum(top + bq, S_q)
    seeing, blind = np.maximum(top, begin), np.minimum(bottom, end)
    (low, least_high), (most_low, high) = interval(seeing), interval(blind - 1)
    first, last = low // bk, -(-high // bk)
    last = np.where(seeing < blind, last, first)
    # Whole blocks are those that all queries of a row see, to the last key.
    whole = np.where((seeing == top) & (blind == bottom), -(-most_low // bk), cols)
    whole = np.minimum(whole, last)
    after = np.minimum(np.maximum(np.where(least_high < S_k, least_high // bk, cols), whole), last)
    starts = np.zeros(len(top) + 1, np.int64)
    np.cumsum(last - first, out=starts[1:])
    # The blocks in part of all rows: those before the whole ones, then those after them.
    lengths = np.concatenate([whole - first, last - after])
    behind = np.cumsum(lengths)
    begins = np.concatenate([first, after])
    row = np.repeat(np.concatenate([np.arange(len(top))] * 2), lengths)
    col = np.arange(len(row)) + np.repeat(begins - behind + lengths, lengths)
    places = col + (starts[:-1] - first)[row]
    numbers = code(row * bq, col * bk)
    distinct = np.sort(numbers)
    distinct = np.concatenate([distinct[:1], distinct[1:][distinct[1:] != distinct[:-1]]])
    kinds = np.searchsorted(distinct, numbers)
    one = np.zeros(len(distinct), np.int64)
    one[kinds] = np.arange(len(kinds))  # some block of each number
    query = (row[one] * bq)[:, None] + np.arange(bq)
    low, high = interval(query)
    left = (col[one] * bk)[:, None]
    inside = (query >= begin) & (query < end)
    low, high = (np.where(inside, np.minimum(np.maximum(x - left, 0), bk), 0) for x in (low, high))
    first_keys = _first_keys(bk)
    bits = first_keys.take(high, axis=0) & ~first_keys.take(low, axis=0)
    chosen, same = distinct_rows(bits)
    return BlockRows(first, starts, places, same[kinds], bits[chosen])


@cache
def _first_keys(bk: int) -> Numbers:
    """Packed, the first 0, 1, ... bk keys of a block."""
    words = -(-bk // 32)
    within = np.clip(np.arange(bk + 1)[:, None] - 32 * np.arange(words), 0, 32).astype(np.uint64)
    return ((np.uint64(1) << within) - np.uint64(1)).astype(np.uint32)


def distinct_rows(rows: Numbers) -> tuple[Numbers, Numbers]:
    """(places of the first of equal rows, for every row the number of that which it equals)."""
    places: dict[bytes, int] = {}
    same = np.array([places.setdefault(row.tobytes(), k) for k, row in enumerate(rows)], np.int64)
    chosen = np.fromiter(places.values(), np.int64, len(places))
    return chosen, np.searchsorted(chosen, same)
