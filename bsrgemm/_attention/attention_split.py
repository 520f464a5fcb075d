"""Attention on Hopper where tiles of queries are few: their keys are split among CTAs, whose sums are added in order.

The heads of a group that share keys are folded into a tile as far as their queries fit, so that keys are read once for
all of them. Which shape a tile has, how many splits, and whether they are worth it, is decided by counting the entries
(tiles of keys) that one CTA walks over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._kernels.card import Card
from .._kernels.tensor_map import Layout
from .attention_sm90 import FP8_DIMS, AttentionSm90, halves, shape_of_tiles
from .call import AttentionCall
from .decode_kernel import pieces_of
from .forward import CAPPED, DIMS, PLAIN, SIGNED, Problem, Splits, layout_of
from .small_blocks import share_of_tiles

#: kMostSplits of the kernel, and the fewest lines whose sums a CTA adds.
_MOST_SPLITS, _JOIN_LINES = 128, 8
#: (warpgroups, keys of a tile) -> us that a CTA takes for an entry, where an H200 has as many CTAs as fit it.
_ENTRY = {(1, 64): 0.61, (1, 128): 1.1, (2, 64): 0.9, (2, 128): 1.7, (3, 128): 1.4}
#: The fewest entries of a split; what one takes beside them, in entries; and us until all sums are added.
_LEAST_ENTRIES, _SPLIT_ENTRIES, _JOIN = 2, 4, 10.0
#: Multiprocessors of the card for which it is decided whether keys are split, and how many rounds of CTAs leave sums at
#: most, for which there is memory.
_MULTIPROCESSORS, _MOST_ROUNDS = 132, 2


class _Tiles(NamedTuple):
    """Tiles of one shape: warpgroups of 64 lines, keys of an entry, heads of a group in a tile, and all tiles."""

    consumers: int
    tile_k: int
    heads: int
    tiles: int

    @property
    def ctas(self) -> int:
        """CTAs that run on a multiprocessor at the same time."""
        return 2 if self.consumers == 1 else 1

    def splits(self, entries: int, multiprocessors: int) -> tuple[int, int]:
        """The splits of a tile with so many entries, and the entries of a split."""
        slots = multiprocessors * self.ctas
        limits = (_MOST_SPLITS, _LEAST_ENTRIES, _SPLIT_ENTRIES)
        return pieces_of(entries, entries * self.tiles, self.tiles, 1, slots, *limits)

    def time(self, each: int, splits: int) -> float:
        """Microseconds of all tiles on an H200, if a split of them has so many entries."""
        rounds = -(-self.tiles * splits // (_MULTIPROCESSORS * self.ctas))
        return rounds * (each + _SPLIT_ENTRIES) * _ENTRY[self.consumers, self.tile_k]


@dataclass(frozen=True)
class AttentionSplit(AttentionSm90, derived="sum tile_q stages queries mma_type mma_k splits_keys"):
    """The same where keys are split. The result is written by the CTAs that add sums, element by element."""

    splits_keys = True

    @property
    def floats(self) -> int:
        return int(self.tile_q * (self.value_dim + 2))

    @property
    def shared_bytes(self) -> int:
        return super().shared_bytes + _JOIN_LINES * _MOST_SPLITS * 4

    @property
    def rare(self) -> bool:
        results = ("f16", "f32") if self.fp8 else (self.element,)
        return self.head_dim != self.value_dim or self.element_o not in results or self.scores != PLAIN

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        return problem.group > 0 and problem.queries > 0 and AttentionSm90.serves(problem) and _pays(problem)

    @classmethod
    def best(cls, problem: Problem) -> AttentionSplit:
        usual, (split, _) = AttentionSm90.best(problem), _both(problem)
        sizes = (usual.head_dim, usual.value_dim, problem.scores)
        return cls(usual.element, usual.element_o, *sizes, False, split.consumers, split.tile_k)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[AttentionSplit]:
        for dtype, how, out in itertools.product(halves(dtypes), (PLAIN, SIGNED, CAPPED), ("f16", "bf16", "f32")):
            for sizes in itertools.product(DIMS, DIMS):
                yield from (cls(dtype, out, *sizes, how, False, *shape) for shape in _shapes(max(sizes)))
        if np.dtype(np.uint8) not in dtypes:
            return
        for how, out in itertools.product((PLAIN, SIGNED, CAPPED), ("f16", "bf16", "f32")):
            for sizes in itertools.product(FP8_DIMS, DIMS):
                yield from (cls("e4m3", out, *sizes, how, False, *shape) for shape in _shapes(max(sizes), True))

    def splits(self, call: AttentionCall, tiles: int, card: Card) -> Splits:
        batches, heads, queries, _ = call.q.shape
        kv_heads, keys = call.k.shape[1:3]
        folded = _folded(group_of(call), queries, self.tile_q)
        slots = batches * kv_heads * -(-heads // kv_heads // folded) * tiles
        found = _Tiles(self.consumers, self.tile_k, folded, slots)
        most, each = found.splits(_entries(keys, self.tile_k, share_of(call)), card.multiprocessors)
        lines = folded * queries if folded > 1 else min(queries, self.tile_q)
        # About as many CTAs add sums as leave some.
        own = -(-slots * lines // (card.multiprocessors * self.ctas * _JOIN_LINES)) * _JOIN_LINES
        return Splits(most, each, folded, lines if folded > 1 else self.tile_q, slots, -(-lines // own), own)

    def grid(self, call: AttentionCall, tiles: int, card: Card) -> tuple[int, ...]:
        found = self.splits(call, tiles, card)
        return (min(found.slots * (found.most + found.joins), card.multiprocessors * self.ctas),)

    def layouts(self, call: AttentionCall) -> tuple[Layout | None, ...]:
        _, *others = super().layouts(call)
        queries, folded = call.q.shape[2], _folded(group_of(call), call.q.shape[2], self.tile_q)
        return layout_of(call.q, queries if folded > 1 else self.tile_q, heads=folded), *others


def group_of(call: AttentionCall) -> int:
    """The query heads that may share a tile; 0 where keys cannot be split."""
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    if call.bounds is not None or not kv_heads or not call.k.shape[2]:
        return 0
    patterns = 1 if call.mask is None else call.mask.heads[1]
    return 1 if call.fp8 or patterns not in (1, kv_heads) else heads // kv_heads


def share_of(call: AttentionCall) -> float:
    """The share of the keys that a tile of 64 queries reads, as far as the host knows."""
    keys = max(1, call.k.shape[2])
    by_band = min(1.0, (call.left + call.right + 64) / keys)
    return by_band if call.mask is None else by_band * share_of_tiles(call.mask)


def _folded(group: int, queries: int, lines: int) -> int:
    """Heads of a group in a tile of so many lines.

    >>> _folded(4, 16, 64), _folded(4, 32, 64), _folded(4, 24, 64), _folded(4, 200, 64)
    (4, 2, 2, 1)
    """
    return max(1, min(group, lines // queries))


def _shapes(most: int, fp8: bool = False) -> tuple[tuple[int, int], ...]:
    """Warpgroups and keys of tiles for heads of up to `most` columns."""
    if most > 128:
        return ((2, 64),)
    return ((1, 64 if fp8 or most > 64 else 128), *([(2, 128)] if most > 64 else []))


def _both(problem: Problem) -> tuple[_Tiles, _Tiles]:
    """The tiles whose keys are split, and those that walk over all keys.

    More lines than a warpgroup has are those of two, if fewer tiles have all of them: each reads all keys.
    """

    def tiles(shape: tuple[int, int], group: int) -> _Tiles:
        lines, heads = 64 * shape[0], problem.rows // problem.queries
        folded = _folded(group, problem.queries, lines)
        return _Tiles(*shape, folded, heads // group * -(-group // folded) * -(-problem.queries // lines))

    most = max(problem.head_dim, problem.value_dim)
    found = [tiles(shape, problem.group) for shape in _shapes(most, problem.fp8)]
    return min(found, key=lambda x: x.tiles), tiles(shape_of_tiles(problem), 1)


def _pays(problem: Problem) -> bool:
    """Whether splits take less time than walks over all keys."""
    split, whole = _both(problem)
    entries, all_entries = (_entries(problem.keys, x.tile_k, problem.share) for x in (split, whole))
    splits, each = split.splits(entries, _MULTIPROCESSORS)
    fits = split.tiles * splits <= _MOST_ROUNDS * split.ctas * _MULTIPROCESSORS
    return fits and split.time(each, splits) + _JOIN < whole.time(all_entries, 1)


def _entries(keys: int, tile_k: int, share: float) -> int:
    """The entries of a tile that reads a share of the keys."""
    return max(1, round(-(-keys // tile_k) * share))
