"""Attention of a few queries at the end of a `KVCache`: checks, output; then NumPy or the kernel of cuda/decode.cu."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import jit, tuning
from .attention import _check_window, _flag, _number, attention
from .dtypes import BFLOAT16, FLOAT16, accumulator_dtype
from .home import Array
from .homes import host
from .jit import KernelSpec
from .kvcache import KVCache, dense_of

_LAYOUTS = {"bhsd": "(batch, heads, queries, head dim)", "bshd": "(batch, queries, heads, head dim)"}
_MOST_QUERIES = 16
#: Head dims of the kernel.
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
#: Keys of a tile; pages and blocks are made of whole tiles.
_TILE = 16
#: `Decode` of cuda/decode.cu.
_ARGUMENT = struct.Struct("@10P11q11i3f")
_ARGUMENT_TYPE = np.dtype([("opaque", "<u8", (_ARGUMENT.size // 8,))])
_LOG2_E = math.log2(math.e)
#: kMostPieces of the kernel; a piece has at least 128 keys.
_MOST_PIECES, _LEAST_TILES = 128, 8
#: What a CTA costs beside its tiles, in tiles: its start, the first copies, joining its sums to the others'.
_CTA_TILES = 4
#: Shared memory that every card since Ampere has for a CTA.
_SHARED_BYTES = 99 << 10
_MOST_STEPS, _MOST_GRID = 2**30, 65535
_MOST_FLOAT32 = float(np.finfo(np.float32).max)
_MOST_PLANS = 256


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

    Append the keys and values of the new tokens first. Query i of S_q is at place ``length - S_q + i`` of its
    sequence and sees the keys up to there: causal attention, aligned bottom-right.

    Parameters
    ----------
    q : array (batch, H_q, S_q, head dim)
        Queries of the cache's dtype, where the cache is, of any strides; 1 to 16 for each sequence. `H_q` is a
        multiple of the cache's heads: query head h reads head ``h // (H_q // H_kv)``.
    cache : KVCache
        Keys and values; each sequence is seen to its own length.
    blocks : array of int32 (batch or 1, H_kv or 1, n), optional
        Sparse decode: the numbers of the blocks of keys that are read, each once and in any order; -1, or any number
        without a block, where there are fewer than n. Block j is keys ``j * block`` to ``(j + 1) * block - 1`` of a
        sequence.
    block : int, optional
        Keys of a block, a multiple of 16; with a paged cache that of a page, which is then the default.
    window : (left, right), optional
        A query at place i sees no key in front of ``i - left``; -1 is without bound. `right` changes nothing, since
        no query sees beyond its own place.
    scale : float, optional
        Factor of the scores; ``1 / sqrt(head dim)`` by default.
    softcap : float, optional
        Scores s become ``softcap * tanh(s / softcap)``.
    layout : {"bhsd", "bshd"}
        Order of the dimensions of `q` and the result: as above, or with the queries before the heads.
    return_lse : bool
        Also return the natural logarithms of the sums of ``exp(score)``.
    out : array, optional
        Where to write, of any strides; must not overlap `q` or the cache.

    Returns
    -------
    out : array
        Like `q`, with the head dim of the values.
    lse : array (batch, H_q, S_q)
        In float32, on the CPU float64 for a cache of float64. Only with `return_lse`.

    Notes
    -----
    A query that sees no key gets 0, and -inf in `lse`. What the memory holds beyond a sequence's length, outside the
    window or in other blocks is not looked at, whatever it is.

    On a GPU the head dims are 64, 80, 96, 128, 192 or 256, and the keys of a head are shared among several CTAs, whose
    sums are joined in a fixed order: one launch, the same bits every time.

    Examples
    --------
    >>> import numpy as np
    >>> from bsrgemm.decode import attention_decode
    >>> from bsrgemm.kvcache import KVCache
    >>> cache = KVCache(1, 2, 64, 8, value_dim=1, dtype="float32", device="cpu")
    >>> k, v = np.ones((1, 2, 32, 8), np.float32), np.arange(64, dtype=np.float32).reshape(1, 2, 32, 1)
    >>> cache.append(k, v)
    >>> q = np.ones((1, 4, 1, 8), np.float32)  # two query heads for each head of the cache
    >>> attention_decode(q, cache)[0, :, 0, 0]
    array([15.5, 15.5, 47.5, 47.5], dtype=float32)
    >>> attention_decode(q, cache, window=(1, 0))[0, :, 0, 0]
    array([30.5, 30.5, 62.5, 62.5], dtype=float32)
    >>> attention_decode(q, cache, blocks=np.array([[[0]]], np.int32), block=16)[0, :, 0, 0]
    array([ 7.5,  7.5, 39.5, 39.5], dtype=float32)
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache: wanted a KVCache, got {type(cache).__name__}")
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ValueError(f"layout: wanted 'bhsd' or 'bshd', got {layout!r}")
    home = cache._home
    q = dense_of(home, q, "q")
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
    left = _check_window(window)[0]
    left = cache.capacity if left < 0 else min(left, cache.capacity)
    acc = accumulator_dtype(cache.dtype)
    factor = 1 / math.sqrt(D) if scale is None else _number(scale, "scale", acc)
    cap = None if softcap is None else _number(softcap, "softcap", acc, positive=True)
    if blocks is not None or block is not None:
        blocks, block = _check_blocks(blocks, block, cache)
    shape = (*q.shape[:-1], cache.value_dim)
    result = home.xp.empty(shape, cache.dtype) if out is None else _check_out(out, shape, q, cache)
    out4 = result if layout == "bhsd" else result.swapaxes(1, 2)
    lse = home.xp.empty((B, H_q, S_q), acc) if _flag(return_lse, "return_lse") else None
    if home.name == "cuda":
        _on_device(q4, cache, blocks, block or _TILE, left, factor, cap, out4, lse)
    elif home is host():
        _on_host(q4, cache, blocks, block or 0, left, factor, cap, out4, lse)
    else:
        raise TypeError(f"cache: wanted one on 'cpu' or 'cuda', got {home.name!r}")
    return result if lse is None else (result, lse)


# ------------------------------------------------------------------------------------------------- checks
def _check_blocks(blocks: Any, block: Any, cache: KVCache) -> tuple[Array, int]:
    """The numbers and the size of the blocks that are read."""
    if blocks is None:
        raise ValueError("blocks: wanted together with block, got None")
    if block is None:
        if cache.page is None:
            raise ValueError("block: wanted the keys of a block, since the cache is not paged; got None")
        block = cache.page
    if isinstance(block, bool) or not isinstance(block, int | np.integer):
        raise TypeError(f"block: wanted an integer, got {block!r}")
    if block < _TILE or block % _TILE:
        raise ValueError(f"block: wanted a multiple of {_TILE}, got {block}")
    if cache.page not in (None, block):
        raise ValueError(f"block: wanted {cache.page}, a page of the cache, got {block}")
    blocks = dense_of(cache._home, blocks, "blocks")
    if blocks.dtype != np.int32:
        raise TypeError(f"blocks: wanted int32, got {blocks.dtype}")
    B, H = cache.batch, cache.kv_heads
    if blocks.ndim != 3 or blocks.shape[0] not in (1, B) or blocks.shape[1] not in (1, H):
        raise ValueError(f"blocks: wanted shape ({B} or 1, {H} or 1, n), got {blocks.shape}")
    if blocks.shape[2] * (block // _TILE) >= _MOST_STEPS:
        raise ValueError(f"blocks: wanted fewer than 2**34 keys in all, got {blocks.shape[2]} blocks of {block}")
    return blocks, int(block)


def _check_out(out: Any, shape: tuple[int, ...], q: Array, cache: KVCache) -> Array:
    home = cache._home
    if not home.is_dense(out):
        raise TypeError(f"out: wanted an array on {home.name!r} as the cache is, got {type(out).__name__}")
    if out.shape != shape or out.dtype != cache.dtype:
        raise ValueError(f"out: wanted {cache.dtype} of shape {shape}, got {out.dtype} of shape {out.shape}")
    if not getattr(out.flags, "writeable", True):
        raise ValueError("out: array is read-only")
    if any(s == 0 and n > 1 for s, n in zip(out.strides, out.shape, strict=True)):
        raise ValueError("out: elements share memory (a stride is 0)")
    first, last = home.extent(out)
    for name, x in (("q", q), ("cache", cache.k), ("cache", cache.v)):
        start, stop = home.extent(x)
        if start < last and first < stop:
            raise ValueError(f"out: overlaps {name}")
    return out


# ------------------------------------------------------------------------------------------------- on the host
def _on_host(
    q: Array, cache: KVCache, blocks: Any, block: int, left: int, scale: float, softcap: Any, out: Array, lse: Any
) -> None:
    """One sequence after the other; with blocks also one head and query after the other."""
    H, group, queries = cache.kv_heads, q.shape[1] // cache.kv_heads, q.shape[2]
    how: dict[str, Any] = {"scale": scale, "softcap": softcap, "return_lse": True}
    for b in range(cache.batch):
        k, v = cache.gathered(b)
        if blocks is None:
            window = (left, 0)
            _, sums = attention(q[b : b + 1], k[None], v[None], window=window, out=out[b : b + 1], **how)
            if lse is not None:
                lse[b] = sums[0]
            continue
        for h in range(H):
            numbers = blocks[b % len(blocks), h % blocks.shape[1]].astype(np.int64)
            numbers = numbers[(numbers >= 0) & (numbers * block < cache.capacity)]
            kept = (numbers[:, None] * block + np.arange(block)).ravel()
            heads = slice(h * group, (h + 1) * group)
            for i in range(queries):
                place = int(cache._lengths[b]) - queries + i
                seen = kept[(kept <= place) & (kept >= place - left)]
                where = (slice(b, b + 1), heads, slice(i, i + 1))
                _, sums = attention(q[where], k[None, h : h + 1, seen], v[None, h : h + 1, seen], out=out[where], **how)
                if lse is not None:
                    lse[where] = sums


# ------------------------------------------------------------------------------------------------- the kernel
@dataclass(frozen=True)
class Decode:
    """Attention at the end of a cache: `rows` rows of queries by tiles of 16 keys, for each warp on its own."""

    element: str
    head_dim: int
    value_dim: int
    rows: int

    @property
    def warps(self) -> int:
        """Two where a stage of four would leave room for two stages."""
        return 4 if self.head_dim + self.value_dim <= 256 else 2

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_q(self) -> bool:
        """Do the fragments of Q, beside the sums, take too many registers?"""
        return self.rows > 16 or self.head_dim // 4 + self.value_dim // 2 > 160

    @property
    def stages(self) -> int:
        """As many as fit 99 KB: 64 to 96 KB of K and V in flight, and two CTAs on a multiprocessor of 228 KB."""
        return (_SHARED_BYTES - self._query_bytes) // self._stage_bytes

    @property
    def shared_bytes(self) -> int:
        """The struct Shared of the kernel."""
        ends = self.warps * self.rows * (self.value_dim + 10) * 4
        join = self.rows * (_MOST_PIECES + 2) * 4
        return -(-max(self.stages * self._stage_bytes, ends, join) // 128) * 128 + self._query_bytes

    @property
    def _stage_bytes(self) -> int:
        return self.warps * _TILE * (self.head_dim + self.value_dim) * 2

    @property
    def _query_bytes(self) -> int:
        return self.rows * self.head_dim * 2 if self.shared_q else 128

    def ctas(self, arch: str) -> int:
        """CTAs that share a multiprocessor."""
        return 2 if 2 * (self.shared_bytes + 1024) <= (tuning._shared_kb(arch) + 1) * 1024 else 1

    def spec(self) -> KernelSpec:
        return KernelSpec(
            "decode.cu",
            "decode",
            (
                ("ELEMENT", self.element),
                ("HEAD_DIM", self.head_dim),
                ("VALUE_DIM", self.value_dim),
                ("ROWS", self.rows),
                ("WARPS", self.warps),
                ("STAGES", self.stages),
                ("SHARED_Q", int(self.shared_q)),
            ),
        )


def decode_config(dtype: np.dtype[Any], head_dim: int, value_dim: int, rows: int) -> Decode:
    """The kernel for so many rows (query heads of a group by queries) that read the same keys."""
    wide = rows > 16 and max(head_dim, value_dim) <= 128  # sums of 32 rows of more would not fit the registers
    return Decode(tuning.element(dtype), head_dim, value_dim, 32 if wide else 16)


def every_decode_config() -> Iterator[Decode]:
    """Every config that `decode_config` can return."""
    for dtype in (FLOAT16, BFLOAT16):
        for head_dim in HEAD_DIMS:
            for value_dim in HEAD_DIMS:
                yield decode_config(dtype, head_dim, value_dim, 1)
                if max(head_dim, value_dim) <= 128:
                    yield decode_config(dtype, head_dim, value_dim, 17)


def runs_on(config: Decode, arch: str) -> bool:
    """Can this kernel be compiled for `arch`?"""
    return tuning.tensor_arch(arch)


def rare(config: Decode) -> bool:
    """Is this kernel met so rarely that compiling it ahead is a waste?"""
    return config.head_dim != config.value_dim


def pieces_of(longest: int, total: int, batch: int, heads: int, slots: int) -> tuple[int, int]:
    """(pieces of the longest sequence, tiles of a piece), such that `slots` CTAs side by side are soonest done.

    `longest` and `total` are tiles of keys, of the longest of `batch` sequences and of all; each comes `heads` times.

    >>> pieces_of(512, 512, 1, 8, 264), pieces_of(8192, 8192, 1, 8, 264), pieces_of(512, 32 * 512, 32, 8, 264)
    ((32, 16), (33, 249), (1, 512))
    """
    best = (math.inf, 1, max(1, longest))
    for pieces in range(1, max(1, min(_MOST_PIECES, longest // _LEAST_TILES)) + 1):
        tiles = max(1, -(-longest // pieces))
        rounds = -(-heads * max(batch, -(-total // tiles)) // slots)
        best = min(best, (rounds * (tiles + _CTA_TILES), pieces, tiles))
    return best[1], best[2]


class _Plan:
    """The kernel with its launch shape, for one kind of problem and about so many keys."""

    __slots__ = ("counters", "floats", "grid", "kernel", "shared_bytes", "threads", "tiles", "zeros")

    def __init__(self, dtype: Any, D: int, D_v: int, B: int, H: int, rows: int, longest: int, total: int) -> None:
        from . import launch

        arch = jit.device_target()
        if arch == "sm_75":
            raise RuntimeError("attention_decode on a GPU needs compute capability 8.0 or newer; the CPU works here")
        config = decode_config(dtype, D, D_v, rows)
        heads = H * -(-rows // config.rows)
        if max(B, heads) > _MOST_GRID:
            raise ValueError(
                f"cache: wanted at most {_MOST_GRID} sequences and heads by tiles of rows, got {B}, {heads}"
            )
        slots = launch._multiprocessors() * config.ctas(arch)
        pieces, self.tiles = pieces_of(longest, total, B, heads, slots)
        self.kernel = jit.load(config.spec(), arch)
        self.kernel.max_dynamic_shared_size_bytes = self.shared_bytes = config.shared_bytes
        self.grid, self.threads = (pieces, heads, B), (config.threads,)
        self.counters, self.zeros = B * heads if pieces > 1 else 0, launch._counters
        self.floats = B * heads * pieces * config.rows * (D_v + 2) if pieces > 1 else 0


_plans: dict[Any, _Plan] = {}


def _on_device(
    q: Array, cache: KVCache, blocks: Any, block: int, left: int, scale: float, softcap: Any, out: Array, lse: Any
) -> None:
    """Start the kernel on CuPy's current stream."""
    xp = cache._home.xp
    B, H_q, S_q, D = q.shape
    H, capacity, table = cache.kv_heads, cache.capacity, cache.table
    block_tiles = block // _TILE
    if blocks is None:
        entries, block_strides = 0, (0, 0, 0)
        longest = _about(-(-min(cache._longest, left + S_q) // _TILE))
        total = min(B * longest, _about(-(-cache._total // _TILE)))
    else:
        entries, block_strides = blocks.shape[2], _block_strides(blocks)
        longest = entries * block_tiles
        total = B * longest
    key = (xp.cuda.runtime.getDevice(), cache.dtype.char, D, cache.value_dim, B, H, H_q * S_q, longest, total)
    plan = _plans.get(key) or _new_plan(key, cache, H_q // H * S_q, longest, total)
    partial = xp.empty(plan.floats, np.float32) if plan.floats else None
    size = q.itemsize
    q_batch, q_head, q_row, q_col = q.strides
    out_batch, out_head, out_row, out_col = out.strides
    cap = inverse_cap = 0.0
    if softcap is not None:
        cap, inverse_cap = _float32(softcap * _LOG2_E), _float32(1 / (softcap * _LOG2_E))
    packed = _ARGUMENT.pack(
        q.data.ptr,
        cache.k.data.ptr,
        cache.v.data.ptr,
        out.data.ptr,
        0 if lse is None else lse.data.ptr,
        cache._device_lengths.data.ptr,
        0 if table is None else table.data.ptr,
        0 if blocks is None else blocks.data.ptr,
        0 if partial is None else partial.data.ptr,
        plan.zeros(plan.counters).data.ptr if plan.counters else 0,
        q_batch // size,
        q_head // size,
        q_row // size,
        q_col // size,
        out_batch // size,
        out_head // size,
        out_row // size,
        out_col // size,
        *block_strides,
        H,
        H_q // H,
        S_q,
        capacity,
        cache.pages,
        cache.page or capacity,
        0 if table is None else table.shape[1],
        entries,
        block_tiles,
        left,
        plan.tiles,
        _float32(scale * _LOG2_E),
        cap,
        inverse_cap,
    )
    argument = np.frombuffer(packed, _ARGUMENT_TYPE)
    plan.kernel(plan.grid, plan.threads, (argument,), shared_mem=plan.shared_bytes)


def _new_plan(key: Any, cache: KVCache, rows: int, longest: int, total: int) -> _Plan:
    D, D_v = cache.head_dim, cache.value_dim
    if D not in HEAD_DIMS or D_v not in HEAD_DIMS:
        wanted = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"cache: wanted head dims among {wanted} on a GPU, got {D} for keys, {D_v} for values")
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    plan = _plans[key] = _Plan(cache.dtype, D, D_v, cache.batch, cache.kv_heads, rows, longest, total)
    return plan


def _block_strides(blocks: Array) -> tuple[int, int, int]:
    """In elements; one list for all stands still."""
    B, H, _ = blocks.shape
    batch, head, entry = (s // blocks.itemsize for s in blocks.strides)
    return batch if B > 1 else 0, head if H > 1 else 0, entry


def _float32(x: float) -> float:
    """x, or the largest number that a float32 can hold."""
    return max(-_MOST_FLOAT32, min(x, _MOST_FLOAT32))


def _about(x: int) -> int:
    """x rounded up to four leading bits: lengths that are about the same share a plan."""
    shift = max(0, x.bit_length() - 4)
    return -(-x >> shift) << shift
