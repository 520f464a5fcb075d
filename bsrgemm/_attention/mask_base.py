"""What every mask has: its blocks, its bits, the grid of its blocks, and intervals of keys."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, Self

import numpy as np

from .._backend import registry, structure
from .._backend.base import Array, Backend

Numbers = np.ndarray[Any, Any]
#: From queries to the first key that each sees, and the key after the last.
Interval = Callable[[Numbers], tuple[Numbers, Numbers]]
#: From the first query and key of blocks to numbers; blocks with the same number have the same elements.
Code = Callable[[Numbers, Numbers], Numbers]
#: Masks for the same lengths are made again and again: the host remembers the blocks of so many, with so many rows of
#: blocks at most.
_MOST_REMEMBERED, _MOST_ROWS = 16, 1 << 14
#: Shift of a line that never rises above its least value; it is beyond all lengths, and sums with it fit 64 bits.
FLAT = -(1 << 60)


@dataclass(frozen=True)
class BlockRows:
    """The stored blocks: row r has consecutive columns from ``first[r]`` on, stored at ``starts[r]`` to ``starts[r + 1]
    - 1``.

    The blocks stored at `positions` are allowed in part; `kinds` are the numbers of their masks in `bits`. All other
    blocks are whole. Nobody writes to the arrays: they may be those of several masks.
    """

    first: Numbers
    starts: Numbers
    positions: Numbers
    kinds: Numbers
    bits: Numbers

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the four arrays of a mask."""
        total = int(self.starts[-1])
        return self.starts.shape, (total,), (total,), self.bits.shape

    @cached_property
    def packed(self) -> Numbers:
        """The four arrays of a mask, one behind the other."""
        found = np.empty(sum(map(math.prod, self.shapes)), _INT32)
        indptr, indices, kinds, bits = _cut(found, self.shapes)
        indptr[...], kinds[...], bits[...] = self.starts, FULL, self.bits.view(_INT32)
        shifts = np.repeat((self.first - self.starts[:-1]).astype(_INT32), np.diff(self.starts))
        np.add(np.arange(len(indices), dtype=_INT32), shifts, out=indices)
        kinds[self.positions] = self.kinds
        return found


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


@lru_cache(maxsize=_MOST_REMEMBERED)
def remembered_lines(
    shape: tuple[int, int], block: tuple[int, int], low: Line, high: Line, queries: tuple[int, int] | None
) -> BlockRows:
    """`lines`, computed once."""
    return lines(shape, block, low, high, queries)


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


_LEAST_BLOCK, _MOST_BLOCK = 16, 256
_ALIGNMENTS = ("bottom-right", "top-left")
#: Stored blocks, and the blocks along a side, are counted in 32 bits.
_MOST_STORED = 2**31 - 1
#: More queries or keys than any memory has lists for.
_TOO_LONG = 2**48


class Grid:
    """Checked lengths, block and backend of a mask."""

    def __init__(self, queries: Any, keys: Any, block: Any, device: str | None) -> None:
        keys = queries if keys is None else keys
        self.shape = (_check_length("queries", queries), _check_length("keys", keys))
        sides = (block, block) if isinstance(block, int | np.integer) else _pair(block)
        if sides is None or not all(isinstance(b, int | np.integer) for b in sides):
            raise ValueError(f"block: wanted one or two integers, got {block!r}")
        if not all(_LEAST_BLOCK <= b <= _MOST_BLOCK and b % _LEAST_BLOCK == 0 for b in sides):
            raise ValueError(f"block: wanted multiples of {_LEAST_BLOCK} up to {_MOST_BLOCK}, got {block!r}")
        self.block = (int(sides[0]), int(sides[1]))
        self.backend = registry.by_name(registry.default_device() if device is None else device)
        self.counts = (-(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1]))
        for name, count, side in zip(("queries", "keys"), self.counts, self.block, strict=True):
            if count > _MOST_STORED:
                raise ValueError(
                    f"{name}: {count} blocks of {side} along a side, wanted less than 2**31; take a larger block"
                )

    def offset(self, align: str) -> int:
        """The position of the first query among the keys."""
        if not isinstance(align, str) or align not in _ALIGNMENTS:
            raise ValueError(f"align: wanted 'bottom-right' or 'top-left', got {align!r}")
        return self.shape[1] - self.shape[0] if align == "bottom-right" else 0

    def sizes(self, row: Array, col: Array) -> Array:
        """Number of elements of each block that lie within the lengths."""
        xp, (S_q, S_k), (bq, bk) = self.backend.xp, self.shape, self.block
        rows = self.counts[0]
        height = xp.minimum(bq, S_q - row % max(1, rows) * bq)
        return height * xp.minimum(bk, S_k - col.astype(np.int64) * bk)


def check_count(name: str, n: Any, least: int = 0) -> int:
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < least:
        raise ValueError(f"{name}: wanted an integer from {least} on, got {n!r}")
    return int(n)


def _check_length(name: str, n: Any) -> int:
    if check_count(name, n) >= _TOO_LONG:
        raise ValueError(f"{name}: wanted less than 2**48, got {n}")
    return int(n)


def check_heads(heads: Any) -> tuple[int, int]:
    sides = _pair(heads)
    if sides is None:
        raise ValueError(f"heads: wanted two integers, the numbers of batches and heads, got {heads!r}")
    return check_count("heads", sides[0], 1), check_count("heads", sides[1], 1)


def check_shape(shape: Any) -> tuple[int, int]:
    """The numbers of queries and keys."""
    sides = _pair(shape)
    if sides is None:
        raise ValueError(f"shape: wanted two integers, the numbers of queries and keys, got {shape!r}")
    return _check_length("shape", sides[0]), _check_length("shape", sides[1])


def check_stored(count: int, block: tuple[int, int]) -> None:
    """ValueError if there are more stored blocks than `indptr` can count."""
    if count > _MOST_STORED:
        raise ValueError(
            f"block: {count} blocks of {block[0]} x {block[1]} would be stored, wanted less than 2**31; "
            "take a larger block"
        )


def _pair(sides: Any) -> tuple[Any, Any] | None:
    """The two elements of a sequence; None if `sides` is anything else."""
    try:
        first, second = sides
    except (TypeError, ValueError):
        return None
    return first, second


_INT32 = np.dtype(np.int32)


class Limits(NamedTuple):
    """The largest sizes that the host computes, because a few small calls on the host take less time than on a GPU.

    `words` is the number of words and combinations of element masks, `blocks` the number of blocks that are listed.
    """

    words: int
    blocks: int


class MaskBase(ABC):
    """The arrays of a mask; `BlockMask` says what they hold."""

    def __init__(
        self,
        backend: Backend,
        shape: tuple[int, int],
        block: tuple[int, int],
        heads: tuple[int, int],
        indptr: Array,
        indices: Array,
        kinds: Array,
        bits: Array,
    ) -> None:
        """Wrap arrays without checks; the class methods build masks from checked arguments."""
        self._backend = backend
        self.shape, self.block, self.heads = shape, block, heads
        self.indptr, self.indices, self.kinds, self.bits = indptr, indices, kinds, bits

    @classmethod
    @abstractmethod
    def _limits(cls) -> Limits:
        """The largest sizes that the host computes."""

    @property
    def _grid(self) -> Grid:
        return Grid(self.shape[0], self.shape[1], self.block, self._backend.name)

    def _rows(self) -> Array:
        """The block row of every stored block, counted through all patterns."""
        return self._backend.expand(self.indptr.astype(np.int64), len(self.indices))

    def _keys(self) -> Array:
        """``block row * block columns + block column`` of every stored block, in ascending order."""
        return structure.block_keys(self._backend, self.indices, self.indptr, self._grid.counts[1])

    @classmethod
    def _from_lines(cls, grid: Grid, low: Line, high: Line, queries: tuple[int, int] | None = None) -> Self:
        """Queries ``queries[0]`` to ``queries[1] - 1``, or all, see keys `low` to `high` - 1."""
        make = remembered_lines if grid.counts[0] <= _MOST_ROWS else lines
        return cls._from_rows(grid, make(grid.shape, grid.block, low, high, queries))

    @classmethod
    def _from_rows(cls, grid: Grid, stored: BlockRows) -> Self:
        """A mask from rows of blocks that the host has computed. Nothing waits for the GPU."""
        backend, xp = grid.backend, grid.backend.xp
        total = int(stored.starts[-1])
        check_stored(total, grid.block)
        if total <= cls._limits().blocks:
            own = stored.packed.copy() if backend is registry.host() else backend.from_host(stored.packed)
            indptr, indices, kinds, bits = _cut(own, stored.shapes)
            return cls(backend, grid.shape, grid.block, (1, 1), indptr, indices, kinds, bits.view(np.uint32))
        shifts = stored.first - stored.starts[:-1]
        arrays = (stored.starts, shifts, stored.positions, stored.kinds, stored.bits.view(_INT32))
        moved = backend.from_host(np.concatenate([x.reshape(-1) for x in arrays], dtype=_INT32, casting="unsafe"))
        indptr, shifts, positions, some, bits = _cut(moved, [x.shape for x in arrays])
        indices = xp.arange(total, dtype=_INT32) + shifts[backend.expand(indptr, total)]
        kinds = xp.full(total, FULL, _INT32)
        kinds[positions] = some
        return cls(backend, grid.shape, grid.block, (1, 1), indptr, indices, kinds, bits.view(np.uint32))

    @classmethod
    def _from_whole(cls, grid: Grid, heads: tuple[int, int], indptr: Array, indices: Array) -> Self:
        """A mask of whole blocks, which may come in any order and several times."""
        xp, (rows, cols) = grid.backend.xp, grid.counts
        key = xp.unique(structure.block_keys(grid.backend, indices, indptr, cols))  # synchronize!
        check_stored(len(key), grid.block)
        indices, indptr = structure.keys_to_index(grid.backend, key, heads[0] * heads[1] * rows, cols, _INT32)
        kinds = whole_kinds(xp, len(key))
        return cls(grid.backend, grid.shape, grid.block, heads, indptr, indices, kinds, no_bits(xp, grid.block))

    @classmethod
    def _from_masks(cls, grid: Grid, heads: tuple[int, int], key: Array, bits: Array) -> Self:
        """A mask of blocks whose keys (see `_keys`) ascend; each block has an element mask in `bits`."""
        code = grid.backend.xp.arange(len(bits))
        return cls._from_codes(grid, heads, key, code, max(1, len(bits)), [bits], lambda xp, code, bits: bits[code])

    @classmethod
    def _from_codes(
        cls,
        grid: Grid,
        heads: tuple[int, int],
        key: Array,
        code: Array,
        bound: int,
        sources: Sequence[Array],
        elements: Callable[..., Array],
    ) -> Self:
        """A mask of blocks whose keys (see `_keys`) ascend; blocks with the same code have the same element mask.

        Codes are below `bound`. ``elements(xp, codes, *sources)`` computes the element masks of codes; elements that it
        allows beyond the last query or key are cleared. Blocks that allow nothing are left out, and equal masks are
        stored once.
        """
        backend, xp = grid.backend, grid.backend.xp
        (S_q, S_k), (bq, bk), (rows, cols) = grid.shape, grid.block, grid.counts
        if S_k % bk:
            code = code + (key % cols == cols - 1) * bound
        if S_q % bq:
            code = code + (key % (rows * cols) >= (rows - 1) * cols) * (2 * bound)
        few = 4 * bound + sum(x.size for x in sources) <= cls._limits().words
        at = np if few else xp
        if few:
            flags = xp.zeros(4 * bound, np.uint32)
            flags[code] = 1
            moved = backend.to_host(xp.concatenate([flags, *(x.reshape(-1) for x in sources)]))  # synchronize!
            flags, *parts = np.split(moved, np.cumsum([4 * bound, *(x.size for x in sources)])[:-1])
            used = np.flatnonzero(flags)
            sources = [part.reshape(x.shape) for part, x in zip(parts, sources, strict=True)]
        else:
            used, code = xp.unique(code, return_inverse=True)  # synchronize!
        inside = inside_of(at, grid.shape, grid.block)
        bits = elements(at, used % bound, *sources) & inside[used // bound]
        counts = counts_of(at, bits)
        whole = counts == counts_of(at, inside)[used // bound]
        part = at.flatnonzero((counts > 0) & ~whole)  # synchronize!
        table = at.where(whole, FULL, NOTHING).astype(_INT32)
        chosen, table[part] = distinct(at, bits[part])
        bits = bits[part[chosen]]
        dropped = bool((table == NOTHING).any())  # synchronize!
        if few:
            kinds_of = np.zeros(4 * bound, _INT32)
            kinds_of[used] = table
            table, bits = backend.from_host(kinds_of), backend.from_host(bits)
        kinds = table[code.reshape(-1)]
        if dropped:
            kept = xp.flatnonzero(kinds != NOTHING)  # synchronize!
            key, kinds = key[kept], kinds[kept]
        check_stored(len(key), grid.block)
        if not len(bits):
            kinds = whole_kinds(xp, len(key))
        indices, indptr = structure.keys_to_index(backend, key, heads[0] * heads[1] * rows, cols, _INT32)
        return cls(backend, grid.shape, grid.block, heads, indptr, indices, kinds, bits)


def _cut(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Split a flat array into arrays of these shapes, which follow each other in it."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = [flat[end - n : end] for n, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    return [x if len(shape) == 1 else x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)]
