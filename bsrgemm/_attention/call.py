"""One object for one attention or decode: what has been checked and an engine carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._backend.base import Array
from .kv_cache import KVCache
from .mask import BlockMask


@dataclass(slots=True)
class AttentionCall:
    """``out = softmax(scale * q @ k.T) @ v``, checked; all arrays (batch, heads, length, columns) of any strides."""

    q: Array
    k: Array
    v: Array
    out: Array
    #: the logarithms of the sums, (batch, heads, queries) in `acc`
    lse: Array | None
    #: the dtype in which everything is computed
    acc: np.dtype[Any]
    scale: float
    softcap: float | None
    #: the query at place i sees keys ``i - left`` to ``i + right``; `bottom_right`: the last one is at the last key
    left: int
    right: int
    bottom_right: bool
    mask: BlockMask | None = None
    #: where sequences of different lengths begin among queries and keys, and the end of the last
    bounds: tuple[Array, Array] | None = None
    #: q, k and v are bytes of fp8; those of a head are multiplied by these, (batch, heads) in float32, where given
    fp8: bool = False
    scales: tuple[Array | None, Array | None, Array | None] = (None, None, None)
    #: a factor of the result
    value_scale: float = 1.0


@dataclass(slots=True)
class DecodeCall:
    """Attention of the last queries of a cache's sequences, checked; `q` and `out` are (batch, heads, n, columns)."""

    q: Array
    cache: KVCache
    out: Array
    lse: Array | None
    scale: float
    softcap: float | None
    #: a query at place i sees no key before ``i - left``
    left: int
    #: numbers of the blocks of keys that are read, (batch or 1, heads or 1, n) of int32; None reads all
    blocks: Array | None = None
    #: keys of such a block
    block: int = 0
