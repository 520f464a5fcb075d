"""Masks in which query i sees the keys ``low(i) <= j < high(i)``, computed on the host by rows of blocks.

It is assumed that both bounds ascend with i, and that the intervals of neighbouring queries touch. Then the stored
blocks of a block row are contiguous, and its first and last query decide which of them are seen whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Numbers = np.ndarray[Any, Any]
#: From queries to the first key that each sees, and the key after the last.
Interval = Callable[[Numbers], tuple[Numbers, Numbers]]
#: From the first query and key of blocks to numbers; blocks with the same number have the same elements.
Code = Callable[[Numbers, Numbers], Numbers]
#: Shift of a line that never rises above its least value; it is beyond all lengths, and sums with it fit 64 bits.
FLAT = -(1 << 60)


class BlockRows(NamedTuple):
    """The stored blocks: row r has consecutive columns from ``first[r]`` on, stored at ``starts[r]`` to ``starts[r + 1]
    - 1``.

    The blocks stored at `positions` are allowed in part; `kinds` are the numbers of their masks in `bits`. All other
    blocks are whole.
    """

    first: Numbers
    starts: Numbers
    positions: Numbers
    kinds: Numbers
    bits: Numbers


class Line(NamedTuple):
    """A bound of intervals: ``max(i + shift, least)`` at query i, where `least` is not negative."""

    shift: int
    least: int = 0

    def clamped(self) -> Line:
        """The same bound in numbers of 64 bits."""
        return Line(max(FLAT, min(self.shift, -FLAT)), min(self.least, -FLAT))

    def at(self, query: Numbers, most: int) -> Numbers:
        """The bound at these queries, clamped to at most `most`."""
        return np.minimum(np.maximum(query + self.shift, self.least), most)


def flat(least: int) -> Line:
    """The same bound for every query."""
    return Line(FLAT, least)


def lines(
    shape: tuple[int, int], block: tuple[int, int], low: Line, high: Line, queries: tuple[int, int] | None = None
) -> BlockRows:
    """Queries ``queries[0]`` to ``queries[1] - 1``, or all, see the keys from `low` up to, not including, `high`.

    `low` and `high` must not cross between 0 and the number of keys.
    """
    (S_q, S_k), (bq, bk) = shape, block
    low, high = low.clamped(), high.clamped()
    begin, end = (0, S_q) if queries is None else queries
    if not high.least:
        begin = max(begin, 1 - high.shift)
    end = min(end, S_k - low.shift)

    def interval(query: Numbers) -> tuple[Numbers, Numbers]:
        return low.at(query, S_k), high.at(query, S_k)

    def code(top: Numbers, left: Numbers) -> Numbers:
        """Where each bound cuts a block, clamped to the sides of the block, as the digits of one number.

        A digit that is the same for all blocks is left out.
        """
        digits, place = [], top - left
        for bound in (low, high):
            if bound.shift > FLAT:
                digits.append((place + bound.shift, -bq, bk))
            if bound.least > 0:
                digits.append((bound.least - left, 0, bk))
        if begin > 0:
            digits.append((begin - top, 0, bq))
        if end < -(-S_q // bq) * bq:
            digits.append((end - top, 0, bq))
        if S_k % bk:
            digits.append((S_k - left, 0, bk))
        found = np.zeros_like(top)
        for digit, least, most in digits:
            np.maximum(digit, least, out=digit)
            np.minimum(digit, most, out=digit)
            found *= most - least + 1
            found += digit
        return found

    return _stored(shape, block, interval, code, begin, end)


def documents(bounds: Numbers, block: tuple[int, int]) -> BlockRows:
    """A query sees the keys between the same two bounds."""
    S, (bq, bk) = int(bounds[-1]), block
    sizes = np.diff(bounds)
    lows, highs = np.repeat(bounds[:-1], sizes), np.repeat(bounds[1:], sizes)

    def interval(query: Numbers) -> tuple[Numbers, Numbers]:
        query = np.minimum(query, S - 1)
        return lows[query], highs[query]

    def code(top: Numbers, left: Numbers) -> Numbers:
        # A block beside the diagonal has queries and keys of at most one common document, and these form a rectangle.
        before, after = left + bk <= top, left >= top + bq
        low, high = interval(np.where(before, top, top + bq - 1))
        edge_q = np.minimum(np.maximum(np.where(before, high, low) - top, 0), bq)
        edge_k = np.minimum(np.maximum(np.where(before, low, high) - left, 0), bk)
        rectangle = (edge_q * (bk + 1) + edge_k) * 2 + before
        return np.where(before | after, rectangle, -1 - np.arange(len(top)))

    return _stored((S, S), block, interval, code, 0, S)


def _stored(
    shape: tuple[int, int], block: tuple[int, int], interval: Interval, code: Code, begin: int, end: int
) -> BlockRows:
    """The blocks if queries `begin` to `end` - 1 see intervals, none of which is empty."""
    (S_q, S_k), (bq, bk) = shape, block
    cols = -(-S_k // bk)
    top = np.arange(0, S_q, bq)
    bottom = np.minimum(top + bq, S_q)
    seeing, blind = np.maximum(top, begin), np.minimum(bottom, end)
    (low, least_high), (most_low, high) = interval(seeing), interval(blind - 1)
    first, last = low // bk, -(-high // bk)
    last = np.where(seeing < blind, last, first)
    # Whole blocks are those of which all queries of the row see all keys.
    whole = np.where((seeing == top) & (blind == bottom), -(-most_low // bk), cols)
    whole = np.minimum(whole, last)
    after = np.minimum(np.maximum(np.where(least_high < S_k, least_high // bk, cols), whole), last)
    starts = np.zeros(len(top) + 1, np.int64)
    np.cumsum(last - first, out=starts[1:])
    # The blocks allowed in part: first those before the whole blocks of all rows, then those after them.
    lengths = np.concatenate([whole - first, last - after])
    ends = np.cumsum(lengths)
    begins = np.concatenate([first, after])
    part = np.repeat(np.arange(len(lengths)), lengths)
    row = np.concatenate([np.arange(len(top))] * 2)[part]
    col = np.arange(len(part)) + (begins - ends + lengths)[part]
    positions = col + (starts[:-1] - first)[row]
    numbers = code(row * bq, col * bk)
    distinct = np.sort(numbers)
    distinct = np.concatenate([distinct[:1], distinct[1:][distinct[1:] != distinct[:-1]]])
    kinds = np.searchsorted(distinct, numbers)
    one = np.zeros(len(distinct), np.int64)
    one[kinds] = np.arange(len(kinds))  # any block of each number
    query = (row[one] * bq)[:, None] + np.arange(bq)
    low, high = interval(query)
    left = (col[one] * bk)[:, None]
    inside = (query >= begin) & (query < end)
    low, high = (np.where(inside, np.minimum(np.maximum(x - left, 0), bk), 0) for x in (low, high))
    first_keys = _first_keys(bk)
    bits = first_keys.take(high, axis=0) & ~first_keys.take(low, axis=0)
    chosen, same = distinct_rows(bits)
    return BlockRows(first, starts, positions, same[kinds], bits[chosen])


@cache
def _first_keys(bk: int) -> Numbers:
    """Packed element masks of the first 0, 1, ... bk keys of a block."""
    words = -(-bk // 32)
    within = np.clip(np.arange(bk + 1)[:, None] - 32 * np.arange(words), 0, 32).astype(np.uint64)
    return ((np.uint64(1) << within) - np.uint64(1)).astype(np.uint32)


def distinct_rows(rows: Numbers) -> tuple[Numbers, Numbers]:
    """(index of the first of each set of equal rows, for every row the number of its set)."""
    firsts: dict[bytes, int] = {}
    same = np.array([firsts.setdefault(row.tobytes(), k) for k, row in enumerate(rows)], np.int64)
    chosen = np.fromiter(firsts.values(), np.int64, len(firsts))
    return chosen, np.searchsorted(chosen, same)
