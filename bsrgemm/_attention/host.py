"""The engine of attention on the CPU: one sequence after the other, the head groups of each in parallel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array
from .._backend.numpy_backend import HOST
from ..dtypes import FP8_VALUES, accumulator_dtype
from . import host_backward, host_tiles
from .call import AttentionCall, BackwardCall, DecodeCall
from .engine import AttentionEngine
from .host_backward import GroupedBackward
from .host_tiles import Band, GroupedCall

#: A side of the band without a bound: more than any length.
_UNBOUNDED = 2**30


class HostAttention(AttentionEngine):
    """Attention of NumPy arrays."""

    def forward(self, call: AttentionCall) -> None:
        q, k, v = call.q, call.k, call.v
        if call.fp8:
            q, k, v = (_widened(x, scale) for x, scale in zip((q, k, v), call.scales, strict=True))
            v *= np.float32(call.value_scale)
        heads = _grouped(q, k)
        S_q = q.shape[2]
        q, out = (x.reshape(*heads, S_q, x.shape[-1], copy=False) for x in (q, call.out))
        lse = None if call.lse is None else call.lse.reshape(*heads, S_q, copy=False)
        for one in _sequences(call, S_q, k.shape[2]):
            host_tiles.forward(
                GroupedCall(
                    q[..., one.queries, :],
                    k[..., one.keys, :],
                    v[..., one.keys, :],
                    out[..., one.queries, :],
                    None if lse is None else lse[..., one.queries],
                    acc=call.acc,
                    scale=call.scale,
                    softcap=call.softcap,
                    band=one.band,
                    mask=call.mask,
                )
            )
        return None

    def backward(self, call: BackwardCall) -> None:
        """Write the gradients of one sequence after the other."""
        heads = _grouped(call.q, call.k)
        S_q, S_k = call.q.shape[2], call.k.shape[2]
        q, dout, dq = (x.reshape(*heads, S_q, x.shape[-1], copy=False) for x in (call.q, call.dout, call.dq))
        delta = call.delta
        if delta is None:
            assert call.out is not None
            delta = host_backward.delta_of(call.dout, call.out, call.acc)
        if call.dlse is not None:  # it adds p * dlse to the gradient of a score
            delta = delta - call.dlse
        lse, delta = (x.reshape(*heads, S_q, copy=False) for x in (call.lse, delta))
        for one in _sequences(call, S_q, S_k):
            host_backward.backward(
                GroupedBackward(
                    q[..., one.queries, :],
                    call.k[..., one.keys, :],
                    call.v[..., one.keys, :],
                    dout[..., one.queries, :],
                    lse[..., one.queries],
                    delta[..., one.queries],
                    dq[..., one.queries, :],
                    call.dk[..., one.keys, :],
                    call.dv[..., one.keys, :],
                    acc=call.acc,
                    scale=call.scale,
                    softcap=call.softcap,
                    band=one.band,
                    mask=call.mask,
                )
            )

    def decode(self, call: DecodeCall) -> None:
        """Decode one sequence after the other; with blocks also one head and query after the other."""
        cache, out, lse = call.cache, call.out, call.lse
        for b in range(cache.batch):
            k, v = cache.gathered(b)
            sequence = slice(b, b + 1)
            if call.blocks is None:
                sums = None if lse is None else lse[sequence]
                one = replace(call, q=call.q[sequence], out=out[sequence], lse=sums)
                self._attend(one, k[None], v[None], call.left)
            else:
                self._decode_blocks(call, b, k, v)

    def _decode_blocks(self, call: DecodeCall, b: int, k: Array, v: Array) -> None:
        """Decode one sequence with the keys of some blocks."""
        cache, blocks, block, queries = call.cache, call.blocks, call.block, call.q.shape[2]
        assert blocks is not None
        group = call.q.shape[1] // cache.kv_heads
        for h in range(cache.kv_heads):
            numbers = blocks[b % len(blocks), h % blocks.shape[1]].astype(np.int64)
            kept = (numbers[numbers >= 0, None] * block + np.arange(block)).ravel()
            heads = slice(h * group, (h + 1) * group)
            for i in range(queries):
                place = int(cache._lengths[b]) - queries + i
                seen = kept[(kept <= place) & (kept >= place - call.left)]
                where = (slice(b, b + 1), heads, slice(i, i + 1))
                sums = None if call.lse is None else call.lse[where]
                one = replace(call, q=call.q[where], out=call.out[where], lse=sums)
                self._attend(one, k[None, h : h + 1, seen], v[None, h : h + 1, seen], _UNBOUNDED, _UNBOUNDED)

    def _attend(self, call: DecodeCall, k: Array, v: Array, left: int, right: int = 0) -> None:
        acc = accumulator_dtype(call.cache.dtype)
        scale, cap = call.scale, call.softcap
        self.forward(AttentionCall(call.q, k, v, call.out, call.lse, acc, scale, cap, left, right, bottom_right=True))


class _Sequence(NamedTuple):
    """The queries and keys of a sequence, and the band of keys that each query sees."""

    queries: slice
    keys: slice
    band: Band


def _sequences(call: AttentionCall | BackwardCall, S_q: int, S_k: int) -> Iterator[_Sequence]:
    """All sequences of a call: one, or those between the bounds."""
    q_bounds, k_bounds = ([0, S_q], [0, S_k]) if call.bounds is None else (x.tolist() for x in call.bounds)
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(q_bounds), itertools.pairwise(k_bounds), strict=True):
        queries, keys = q1 - q0, k1 - k0
        place = keys - queries if call.bottom_right else 0
        band = Band(max(-queries, place - call.left), min(keys, place + call.right))
        yield _Sequence(slice(q0, q1), slice(k0, k1), band)


def _grouped(q: Array, k: Array) -> tuple[int, int, int]:
    """(batches, heads of K, query heads that read each of them)."""
    return q.shape[0], k.shape[1], q.shape[1] // max(1, k.shape[1])


def _widened(x: Array, scale: Array | None) -> Any:
    """Bytes of fp8 (batch, heads, length, columns) as float32; the numbers of each head are multiplied by its scale."""
    wide = np.take(FP8_VALUES, x)
    return wide if scale is None else wide * scale[:, :, None, None]


ENGINE = HostAttention(HOST)
