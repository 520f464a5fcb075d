"""Attention of few queries over many keys: the kernel of decode, which divides the keys of a head among CTAs.

The tiles of the other kernels walk over all keys alone, each of 1 to 64 queries of one head: few tiles leave most of a
card idle, and query heads that share keys read them again. Here all queries of a group read them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from .._backend.base import Array
from .._kernels.card import Card, tensor_arch
from .._kernels.jit import MAX_GRID_YZ
from .._kernels.launch import Launch
from ..dtypes import HALF_DTYPES
from .attention_sm90 import SHORT_KEYS
from .call import AttentionCall, DecodeCall
from .decode_kernel import HEAD_DIMS, Decode
from .forward import Forward, Problem
from .kv_cache import KVCache

#: With 32 rows and heads of 128 columns, 64 keys of a head take this kernel some 5 ns on all of an H200, and
#: attention_sm90 .6 us on one multiprocessor, of which each has two tiles of 64 queries: the most heads of keys in all
#: batches times tiles of rows, if the latter are several; most tiles of rows; and then more keys than this.
_MOST_HEADS_BY_TILES, _MOST_TILES, _MANY_KEYS = 64, 8, 1024
#: The kernel counts keys, and lines of all heads, in 32 bits.
_MOST_KEYS, _MOST_LINES = 2**30, 2**31


@dataclass(slots=True)
class GivenKeys:
    """What a launch of decode asks of a cache, for keys and values of an attention; names are those of `KVCache`."""

    k: Array
    v: Array
    batch: int
    kv_heads: int
    capacity: int
    #: lines from a head to the next one
    page: int

    _captured, _device_lengths, table = False, None, None

    @property
    def pages(self) -> int:
        return self.batch

    @property
    def _longest(self) -> int:
        return self.capacity

    @property
    def _total(self) -> int:
        return self.batch * self.capacity


@dataclass(frozen=True)
class AttentionFew(Forward, needs="sm_80"):
    """A decode of keys and values of the same length; `Decode` is what is compiled, and lists its variants."""

    decode: Decode

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        sizes = (problem.head_dim, problem.value_dim)
        if not problem.reads or problem.dtype not in HALF_DTYPES or problem.out_dtype != problem.dtype:
            return False
        if not problem.few or problem.acc != np.float32 or not tensor_arch(problem.arch):
            return False
        if any(x not in HEAD_DIMS for x in sizes) or problem.keys <= SHORT_KEYS // 2:
            return False
        tiles, heads = -(-problem.few // cls.best(problem).decode.rows), problem.rows // problem.few
        if tiles == 1:
            return True
        return tiles <= _MOST_TILES and tiles * heads <= _MOST_HEADS_BY_TILES and problem.keys > _MANY_KEYS

    @classmethod
    def best(cls, problem: Problem) -> AttentionFew:
        return cls(Decode.of(problem.dtype, problem.head_dim, problem.value_dim, problem.few))

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[AttentionFew]:
        yield from ()

    def prepare(self, call: AttentionCall, card: Card) -> Launch:
        batch, kv_heads, keys, _ = call.k.shape
        lines = lines_of_a_head(call.k, call.v)
        given = cast(KVCache, GivenKeys(call.k, call.v, batch, kv_heads, keys, lines))
        queries = call.q.shape[2]
        right = queries if call.right >= queries + keys else call.right
        left = min(call.left, keys)
        asked = DecodeCall(call.q, given, call.out, call.lse, call.scale, call.softcap, left, right=right)
        return self.decode.prepare(asked, card)


def few_rows(call: AttentionCall) -> int:
    """Rows of queries that read the same keys, if a decode can compute the call; otherwise 0."""
    batches, heads, queries, _ = call.q.shape
    _, kv_heads, keys, _ = call.k.shape
    if call.mask is not None or call.bounds is not None or call.fp8 or not kv_heads:
        return 0
    # Wherever queries are, those that see so far see all keys.
    reach = queries + keys
    bands = call.right == 0 or call.left >= reach
    placed = call.right >= reach or call.bottom_right or queries == keys
    lines = lines_of_a_head(call.k, call.v)
    counted = keys < _MOST_KEYS and batches * kv_heads * lines < _MOST_LINES
    fits = batches <= MAX_GRID_YZ and heads <= MAX_GRID_YZ
    return heads // kv_heads * queries if bands and placed and lines and counted and fits else 0


def lines_of_a_head(k: Array, v: Array) -> int:
    """Lines from a head to the next one, if K and V both lie like those of a cache; otherwise 0."""
    batches, heads, keys, _ = k.shape
    found = set()
    for x in (k, v):
        line = x.shape[3] * x.itemsize
        if not line or (keys > 1 and x.strides[2] != line) or (x.shape[3] > 1 and x.strides[3] != x.itemsize):
            return 0
        steps = [x.strides[1]] * (heads > 1) + [x.strides[0] // heads] * (batches > 1)
        if any(step % line or step != steps[0] for step in steps) or (batches > 1 and x.strides[0] % heads):
            return 0
        found |= {step // line for step in steps}
    lines = found.pop() if found else keys
    return 0 if found or lines < keys else lines
