"""The checked arguments of one attention or one decode, as they are given to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._backend.base import Array
from .kv_cache import KVCache
from .mask import BlockMask


@dataclass(slots=True)
class AttentionCall:
    """Checked arguments of ``out = softmax(scale * q @ k.T) @ v``; arrays are (batch, heads, length, columns), any
    strides.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    #: logarithms of the sums of exp(score), (batch, heads, queries) in `acc`; None if they are not wanted
    lse: Array | None
    #: dtype of the sums
    acc: np.dtype[Any]
    scale: float
    softcap: float | None
    #: the query at position i sees keys ``i - left`` to ``i + right``; `bottom_right`: the last query is at the last
    #: key
    left: int
    right: int
    bottom_right: bool
    mask: BlockMask | None = None
    #: bounds of sequences of different lengths among queries and keys: where each begins, and the end of the last
    bounds: tuple[Array, Array] | None = None
    #: if True, q, k and v are bytes of fp8, and those of a head are multiplied by `scales`, (batch, heads) in float32;
    #: None is 1
    fp8: bool = False
    scales: tuple[Array | None, Array | None, Array | None] = (None, None, None)
    #: factor of the result
    value_scale: float = 1.0
    #: a copy of v in fp8 in which keys are contiguous, for the kernels that read one
    values: Array | None = None


@dataclass(slots=True)
class BackwardCall:
    """Checked arguments of the gradients of an attention; arrays are (batch, heads, length, columns), any strides."""

    q: Array
    k: Array
    v: Array
    #: the result, which is read only without `delta`
    out: Array | None
    dout: Array
    #: logarithms of the sums of exp(score), (batch, heads, queries) in `acc`, and their gradient
    lse: Array
    dlse: Array | None
    #: sums of ``dout * out`` over the columns, (batch, heads, queries) in `acc`; None computes them
    delta: Array | None
    dq: Array
    dk: Array
    dv: Array
    #: dtype of the sums
    acc: np.dtype[Any]
    scale: float
    softcap: float | None
    #: as in `AttentionCall`
    left: int
    right: int
    bottom_right: bool
    mask: BlockMask | None = None
    bounds: tuple[Array, Array] | None = None
    #: whether sums are made in an order that does not change from call to call
    deterministic: bool = True

    @property
    def operands(self) -> dict[str, Array]:
        """The arrays that there are by name, in the order in which launches take them."""
        names = ("q", "k", "v", "dout", "lse", "dq", "dk", "dv", "out", "dlse", "delta")
        found = ((name, getattr(self, name)) for name in names)
        return {name: x for name, x in found if x is not None}


@dataclass(slots=True)
class DecodeCall:
    """Checked arguments of `attention_decode`; `q` and `out` are (batch, heads, n, columns)."""

    q: Array
    cache: KVCache
    out: Array
    lse: Array | None
    scale: float
    softcap: float | None
    #: a query at position i sees no key before ``i - left``
    left: int
    #: numbers of the blocks of keys that are read, (batch or 1, heads or 1, n) of int32; None reads all keys
    blocks: Array | None = None
    #: keys of such a block
    block: int = 0
    #: keys after its own position that a query sees, where it sees all that come before
    right: int = 0

    @property
    def rows(self) -> int:
        """Rows of queries that read the same keys: query heads of a group, times queries."""
        return int(self.q.shape[1] // self.cache.kv_heads * self.q.shape[2])

    @property
    def arrays(self) -> dict[str, Array | None]:
        """The operands of a kernel by name, in their order; None where there is none."""
        cache = self.cache
        return {
            "q": self.q,
            "k": cache.k,
            "v": cache.v,
            "out": self.out,
            "lse": self.lse,
            "lengths": cache._device_lengths,
            "table": cache.table,
            "blocks": self.blocks,
        }


def key_of(operands: tuple[Any, Any, Any], out: Any, window: Any, options: tuple[Any, ...]) -> Any:
    """Return everything that the checks and the launch of a call depend on; None if it cannot be remembered.

    Options of another type are another call: ``causal=1`` equals ``causal=True``, but is refused.
    """
    q, k, v = operands
    kind = type(q)
    if type(k) is not kind or type(v) is not kind:
        return None
    asked = asked_for(kind, out, window, options)
    if asked is None:
        return None
    begins = q.data.ptr % 16, k.data.ptr % 16, v.data.ptr % 16
    return q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype, begins, asked


def key_of_gradients(read: tuple[Any, ...], results: tuple[Any, ...], window: Any, options: tuple[Any, ...]) -> Any:
    """Return everything that the checks and the launches of gradients depend on; None if it cannot be remembered.

    The first array is there; others may be None.
    """
    kind = type(read[0])
    asked = asked_for(kind, None, window, options)
    if asked is None:
        return None
    found: list[Any] = ["gradients", asked]
    for x in (*read, *results):
        if x is None:
            found.append(None)
        elif type(x) is kind:
            found += (x.shape, x.strides, x.dtype, x.data.ptr % 16)
        else:
            return None
    return tuple(found)


def asked_for(kind: Any, out: Any, window: Any, options: tuple[Any, ...]) -> Any:
    """Return what a key has of everything but the operands; None if a call with that cannot be remembered.

    `kind` is the class of the operands. Options of another type are another call, even if they are equal.
    """
    sides = results = None
    if window is not None:
        if type(window) is not tuple:
            return None
        sides = tuple(map(type, window))
    if out is not None:
        if type(out) is not kind:
            return None
        results = (out.shape, out.strides, out.dtype, out.data.ptr % 16)
    return results, window, sides, options, tuple(map(type, options))
