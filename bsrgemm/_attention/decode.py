"""``out[i] = sum_j softmax_j(scale * q[i] . k[j]) v[j]`` for the last 1 to 16 queries of the sequences of a `KVCache`.

It checks the arguments and allocates the output; the engine of the backend (`host` or `cuda`) does the work.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .._backend.base import Array
from .._backend.registry import target
from ..dtypes import accumulator_dtype
from .call import DecodeCall
from .checks import check_window, checked_flag, checked_number, delivered, host_array
from .engine import ENGINES
from .kv_cache import TILE, KVCache, dense_of

_LAYOUTS = {"bhsd": "(batch, heads, queries, head dim)", "bshd": "(batch, queries, heads, head dim)"}
_MOST_QUERIES = 16
#: The kernel counts tiles of keys up to this number.
_MOST_STEPS = 2**30


def attention_decode(
    q: Any,
    cache: KVCache,
    *,
    blocks: Any = None,
    block: int | None = None,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Array | None = None,
) -> Any:
    """``softmax(scale * q @ k.T) @ v`` for the last tokens of each sequence of a cache.

    Append the keys and values of the new tokens first. Query i of S_q is at position ``length - S_q + i`` of its
    sequence and sees the keys up to that position: this is causal attention, aligned bottom-right.

    Parameters
    ----------
    q : array (batch, H_q, S_q, head dim)
        Queries of the cache's dtype, on the cache's device, of any strides; S_q is 1 to 16. `H_q` is a multiple of the
        cache's heads: query head h reads head ``h // (H_q // H_kv)``.
    cache : KVCache
        Keys and values; each sequence is read up to its own length.
    blocks : array of integers (batch or 1, H_kv or 1, n), or nested lists, optional
        Sparse decode: the numbers of the blocks of keys that are read, each once and in any order. If there are fewer
        than n, the rest is -1 or any number without a block. Block j is keys ``j * block`` to ``(j + 1) * block - 1``
        of a sequence. An array of int32 is read where it is; other integers are converted in each call, and lists are
        copied to the device in each call.
    block : int, optional
        Keys of a block, a multiple of 16. With a paged cache it is the size of a page, which is then the default.
    window : (left, right), optional
        A query at position i sees no key before ``i - left``; -1 means no bound. `right` changes nothing, since no
        query sees keys after its own position.
    scale : float, optional
        Factor of the scores; ``1 / sqrt(head dim)`` by default.
    softcap : float, optional
        Scores s become ``softcap * tanh(s / softcap)``.
    layout : {"bhsd", "bshd"}
        Order of the dimensions of `q` and the result: as above, or with the queries before the heads.
    return_lse : bool
        If True, also return the natural logarithms of the sums of ``exp(score)``.
    out : array, optional
        Array for the result, of any strides and any library; it must not overlap `q` or the cache.

    Returns
    -------
    out : array
        An array like `q` with the head dim of the values.
    lse : array (batch, H_q, S_q)
        float32; on the CPU float64 for a cache of float64. Returned only with `return_lse`.

    Raises
    ------
    TypeError
        If `cache` is not a KVCache, an array is on another device than the cache, or a dtype is not the one expected.
    ValueError
        If shapes do not fit together, an option is out of range, `out` overlaps an operand, or, on a GPU, a head dim is
        not supported.
    RuntimeError
        If the GPU is older than compute capability 8.0.

    Notes
    -----
    A query that sees no key gets 0, and -inf in `lse`. Memory beyond the length of a sequence, outside the window or in
    blocks that are not listed may hold anything: it does not affect the result.

    On a GPU the head dims are 64, 80, 96, 128, 192 or 256. The keys of a head are divided among several CTAs, whose
    sums are added in a fixed order: there is one launch, and the result has the same bits every time. How the keys are
    divided depends on the lengths, or on the capacity once an `append` was captured in a CUDA graph. The kernel runs on
    CuPy's current stream, and the call does not wait for it. A call whose operands have the shapes, strides and
    dtypes of an earlier one, with a cache of the same sizes, is not checked again, except for an `out` at an address
    that is new.

    Examples
    --------
    >>> import bsrgemm as bg
    >>> import numpy as np
    >>> cache = bg.KVCache(1, 2, 64, 8, value_dim=1, dtype="float32", device="cpu")
    >>> k, v = np.ones((1, 2, 32, 8), np.float32), np.arange(64, dtype=np.float32).reshape(1, 2, 32, 1)
    >>> cache.append(k, v)
    >>> q = np.ones((1, 4, 1, 8), np.float32)  # two query heads for each head of the cache
    >>> bg.attention_decode(q, cache)[0, :, 0, 0]
    array([15.5, 15.5, 47.5, 47.5], dtype=float32)
    >>> bg.attention_decode(q, cache, window=(1, 0))[0, :, 0, 0]
    array([30.5, 30.5, 62.5, 62.5], dtype=float32)
    >>> bg.attention_decode(q, cache, blocks=[[[0]]], block=16)[0, :, 0, 0]
    array([ 7.5,  7.5, 39.5, 39.5], dtype=float32)
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache: wanted a KVCache, got {type(cache).__name__}")
    backend, given = cache._backend, out
    if not backend.is_dense(q):
        q = dense_of(backend, q, "q")
    if out is not None and not backend.is_dense(out):
        out = target(backend, out, "out", ", where the cache is")
    engine, key = ENGINES.of(backend), None
    if blocks is block is None:
        key = engine.decode_key(q, cache, out, window, (scale, softcap, layout, return_lse))
        known: _Known | None = None if key is None else engine.decodes.get(key)
        if known is not None and (found := known.again(q, cache, out)) is not None:
            return delivered(found, given)
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ValueError(f"layout: wanted 'bhsd' or 'bshd', got {layout!r}")
    if q.ndim != 4:
        raise ValueError(f"q: wanted 4 dimensions, {_LAYOUTS[layout]} for layout {layout!r}, got shape {q.shape}")
    if q.dtype != cache.dtype:
        raise TypeError(f"q: wanted {cache.dtype} as the cache has, got {q.dtype}")
    q4 = q if layout == "bhsd" else q.swapaxes(1, 2)
    B, H_q, S_q, D = q4.shape
    if cache.batch != B:
        raise ValueError(f"q: wanted a batch of {cache.batch} as the cache has, got {B}")
    if cache.head_dim != D:
        raise ValueError(f"q: wanted head dim {cache.head_dim} as the cache has, got {D}")
    if H_q % cache.kv_heads or not H_q:
        raise ValueError(f"q: wanted a multiple of the {cache.kv_heads} heads of the cache, got {H_q} heads")
    if not 1 <= S_q <= _MOST_QUERIES:
        raise ValueError(f"q: wanted 1 to {_MOST_QUERIES} queries for each sequence, got {S_q}; attention takes more")
    left = check_window(window)[0]
    left = cache.capacity if left < 0 else min(left, cache.capacity)
    acc = accumulator_dtype(cache.dtype)
    # Equal scales have equal bytes: -0.0 becomes 0.0.
    factor = 1 / math.sqrt(D) if scale is None else checked_number(scale, "scale", acc) + 0.0
    cap = None if softcap is None else checked_number(softcap, "softcap", acc, positive=True)
    if blocks is not None or block is not None:
        blocks, block = _check_blocks(blocks, block, cache)
        if blocks.dtype != np.int32:
            with backend.recording(blocks):
                blocks = _in_32_bits(backend.xp, blocks)
    shape = (*q.shape[:-1], cache.value_dim)
    result = backend.xp.empty(shape, cache.dtype) if out is None else _check_out(out, shape, q, cache)
    out4 = result if layout == "bhsd" else result.swapaxes(1, 2)
    lse = backend.xp.empty((B, H_q, S_q), acc) if checked_flag(return_lse, "return_lse") else None
    sums = None if lse is None else (lse.shape, lse.dtype)
    launch = engine.decode(DecodeCall(q4, cache, out4, lse, factor, cap, left, blocks, block or 0))
    if key is not None:
        engine.decodes.remember(key, _Known(shape, sums, launch, None if out is None else _reach_of(out, q, cache)))
    return delivered(result if lse is None else (result, lse), given)


class _Known(NamedTuple):
    """What is known of a kind of decode after its arguments were checked: what its results are, and its launch."""

    #: shape of the result
    shape: tuple[int, ...]
    #: shape of the logarithms of the sums, and their dtype; None if they are not wanted
    sums: tuple[tuple[int, ...], np.dtype[Any]] | None
    launch: Any
    #: bytes from the address to the first and behind the last byte of `out`, q, keys and values; None without `out`
    reach: tuple[tuple[int, int], ...] | None

    def again(self, q: Array, cache: KVCache, out: Array | None) -> Any:
        """Start the decode; None if `out` may overlap an operand, which the usual way has to check."""
        backend = cache._backend
        result = backend.empty(self.shape, cache.dtype) if out is None else out
        lse = None if self.sums is None else backend.empty(*self.sums)
        arrays = (q, cache.k, cache.v, result, lse, cache._device_lengths, cache.table)
        may_overlap = None if out is None else lambda: self._meet(out.data.ptr, q, cache)
        if not self.launch.start([x for x in arrays if x is not None], may_overlap=may_overlap):
            return None
        return result if lse is None else (result, lse)

    def _meet(self, out: int, q: Array, cache: KVCache) -> bool:
        """Whether the bytes from the first to the last one of `out`, at this address, meet those of an operand."""
        assert self.reach is not None
        (low, high), (first, last), keys, values = self.reach
        low, high, at = out + low, out + high, q.data.ptr
        if at + first < high and low < at + last:
            return True
        at, v = cache.k.data.ptr, cache.v.data.ptr
        return (at + keys[0] < high and low < at + keys[1]) or (v + values[0] < high and low < v + values[1])


def _reach_of(out: Array, q: Array, cache: KVCache) -> tuple[tuple[int, int], ...]:
    """What `_Known.reach` says of these arrays."""
    backend = cache._backend
    extents = ((backend.address(x), backend.extent(x)) for x in (out, q, cache.k, cache.v))
    return tuple((first - at, last - at) for at, (first, last) in extents)


# ------------------------------------------------------------------------------------------------- checks
def _check_blocks(blocks: Any, block: Any, cache: KVCache) -> tuple[Array, int]:
    """The numbers of the blocks that are read, and the keys of a block, if they fit the cache."""
    if blocks is None:
        raise ValueError("blocks: wanted together with block, got None")
    if block is None:
        if cache.page is None:
            raise ValueError("block: wanted the keys of a block, since the cache is not paged; got None")
        block = cache.page
    if isinstance(block, bool) or not isinstance(block, int | np.integer):
        raise TypeError(f"block: wanted an integer, got {block!r}")
    if block < TILE or block % TILE:
        raise ValueError(f"block: wanted a multiple of {TILE}, got {block}")
    if cache.page not in (None, block):
        raise ValueError(f"block: wanted {cache.page}, a page of the cache, got {block}")
    if isinstance(blocks, list | tuple):
        blocks = cache._backend.from_host(_listed(blocks))
    blocks = dense_of(cache._backend, blocks, "blocks")
    if blocks.dtype.kind not in "iu":
        raise TypeError(f"blocks: wanted integers, got {blocks.dtype}")
    B, H = cache.batch, cache.kv_heads
    if blocks.ndim != 3 or blocks.shape[0] not in (1, B) or blocks.shape[1] not in (1, H):
        raise ValueError(f"blocks: wanted shape ({B} or 1, {H} or 1, n), got {blocks.shape}")
    if blocks.shape[2] * (block // TILE) >= _MOST_STEPS:
        raise ValueError(f"blocks: wanted fewer than 2**34 keys in all, got {blocks.shape[2]} blocks of {block}")
    return blocks, int(block)


def _listed(blocks: Any) -> Array:
    """Return nested lists of numbers as an array of int32."""
    numbers = host_array("blocks", blocks, "nested lists of integers, all of one length")
    if not numbers.size:
        return numbers.astype(np.int32)
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"blocks: wanted integers, got {numbers.dtype}")
    return _in_32_bits(np, numbers)


def _in_32_bits(xp: Any, blocks: Array) -> Array:
    """Return block numbers in int32; a number that does not fit has no block, as -1 has none."""
    outside = blocks < 0
    most = np.iinfo(np.int32).max
    if np.iinfo(blocks.dtype).max > most:  # NumPy 2.2 can crash where it compares with a number outside of the dtype
        outside |= blocks > most
    return xp.where(outside, np.int32(-1), blocks.astype(np.int32))


def _check_out(out: Any, shape: tuple[int, ...], q: Array, cache: KVCache) -> Array:
    backend = cache._backend
    out = target(backend, out, "out", ", where the cache is")
    if out.shape != shape or out.dtype != cache.dtype:
        raise ValueError(f"out: wanted {cache.dtype} of shape {shape}, got {out.dtype} of shape {out.shape}")
    name = _overlapped(out, q, cache)
    if name is not None:
        raise ValueError(f"out: overlaps {name}")
    return out


def _overlapped(out: Array, q: Array, cache: KVCache) -> str | None:
    """Return the name of an operand that `out` overlaps, or None."""
    operands = (("q", q), ("cache", cache.k), ("cache", cache.v))
    return next((name for name, x in operands if cache._backend.overlap(out, x)), None)
