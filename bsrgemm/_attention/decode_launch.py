"""Launch of cuda/decode.cu: choose the variant, divide the keys into pieces, pack the argument."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import device, jit, launching, overlapping, workspace
from .arguments import DECODE
from .call import DecodeCall
from .decode_config import HEAD_DIMS, LEAST_TILES, decode_config, pieces_of
from .kv_cache import TILE, KVCache

_LOG2_E = math.log2(math.e)
_MOST_GRID = 65535
_MOST_FLOAT32 = float(np.finfo(np.float32).max)
_MOST_PLANS = 256


@dataclass(slots=True)
class _Plan:
    """The kernel with its launch shape, for one kind of problem and a rounded number of keys."""

    kernel: Any
    grid: tuple[int, int, int]
    threads: tuple[int]
    shared_bytes: int
    #: tiles of a piece
    tiles: int
    #: counters, and floats for the sums of pieces; 0 if no sequence is divided
    counters: int
    floats: int


@dataclass(slots=True)
class _Prepared:
    """A plan with an argument without pointers, and the argument of the last call."""

    plan: _Plan
    template: bytes
    #: the plans among which the plan was; once these are dropped, it does not start any more
    plans: dict[Any, _Plan]
    #: pointers of the last call, and the argument made from them; it is never modified, since threads may share it
    filled: tuple[tuple[int, ...], Any] | None = None

    def argument(self, *pointers: int) -> Any:
        """The argument with these pointers; that of the last call, if it had the same."""
        filled = self.filled
        if filled is None or filled[0] != pointers:
            packed = bytearray(self.template)
            _WRITE_POINTERS.write(packed, *pointers)
            filled = self.filled = pointers, jit.argument(packed)
        return filled[1]


_plans: dict[Any, _Plan] = {}
#: Arguments without pointers, by the plan and everything else that they depend on.
_templates: dict[Any, bytes] = {}
_POINTERS = ("q", "k", "v", "out", "lse", "lengths", "table", "blocks", "partial", "arrived")
_WRITE_POINTERS = DECODE.patch(*_POINTERS)


def decode(call: DecodeCall) -> None:
    """Start the kernel on CuPy's current stream."""
    q, cache, blocks, out, lse, table = call.q, call.cache, call.blocks, call.out, call.lse, call.cache.table
    if blocks is None:
        longest, total = _lengths(call)
    else:
        longest = blocks.shape[2] * (call.block // TILE)
        total = cache.batch * longest
    prepared = _prepared(call, longest, total)
    plan = prepared.plan
    _memory, partial, arrived = None, 0, 0
    if plan.floats:
        _memory, partial, arrived = workspace.scratch(4 * plan.floats, plan.counters)  # held until the launch returns
    argument = prepared.argument(
        q.data.ptr,
        cache.k.data.ptr,
        cache.v.data.ptr,
        out.data.ptr,
        0 if lse is None else lse.data.ptr,
        cache._device_lengths.data.ptr,
        0 if table is None else table.data.ptr,
        0 if blocks is None else blocks.data.ptr,
        partial,
        arrived,
    )
    uses = (q, cache.k, cache.v, out, lse, cache._device_lengths, table, blocks)
    launching.start(plan.kernel, plan.grid, plan.threads, (argument,), uses, plan.shared_bytes)


def _lengths(call: DecodeCall) -> tuple[int, int]:
    """Rounded numbers of tiles of keys: those of the longest sequence, and those of all sequences together.

    Replays of a captured append let sequences grow up to the capacity.
    """
    cache, seen = call.cache, call.left + call.q.shape[2]
    if cache._captured:
        return _rounded(min(cache.capacity, seen), cache.batch * cache.capacity, cache.batch)
    return _rounded(min(cache._longest, seen), cache._total, cache.batch)


def _prepared(call: DecodeCall, longest: int, total: int) -> _Prepared:
    """The plan of a call and its argument, which are kept with calls of its kind.

    Beside the kind, they depend on the rounded lengths, the width of the table and the device, and on who knows the
    lengths: if it is the GPU alone, sequences of any length are divided into as many pieces as the grid has.
    """
    kept, table, grows = call.prepared, call.cache.table, call.cache._captured and call.blocks is None
    key = (
        longest, total, 0 if table is None else table.shape[1], grows, cupy.cuda.runtime.getDevice(),
        overlapping.thread.active,
    )  # fmt: skip
    found: _Prepared | None = None if kept is None else kept.get(key)
    if found is None or found.plans is not _plans:
        plan = _plan_for(call, longest, total)
        found = _Prepared(plan, _template(call, LEAST_TILES if grows else plan.tiles), _plans)
        if kept is not None:
            if len(kept) >= _MOST_PLANS:
                kept.clear()
            kept[key] = found
    return found


def _template(call: DecodeCall, piece_tiles: int) -> bytes:
    """The argument without pointers, cached for the next call. The key contains everything that it depends on."""
    q, cache, blocks, table = call.q, call.cache, call.blocks, call.cache.table
    lists = None if blocks is None else (blocks.shape, blocks.strides)
    width = 0 if table is None else table.shape[1]
    key = (
        q.shape, q.strides, call.out.strides, lists, call.block, call.left, call.scale, call.softcap, piece_tiles,
        cache.kv_heads, cache.capacity, cache.pages, cache.page, width, q.itemsize,
    )  # fmt: skip
    found = _templates.get(key)
    if found is None:
        if len(_templates) >= _MOST_PLANS:
            _templates.clear()
        found = _templates[key] = _packed(call, piece_tiles, width)
    return found


def _packed(call: DecodeCall, piece_tiles: int, table_width: int) -> bytes:
    q, cache, blocks, out = call.q, call.cache, call.blocks, call.out
    entries, block_strides = (0, (0, 0, 0)) if blocks is None else (blocks.shape[2], _block_strides(blocks))
    cap = inverse_cap = 0.0
    if call.softcap is not None:
        cap, inverse_cap = _float32(call.softcap * _LOG2_E), _float32(1 / (call.softcap * _LOG2_E))
    q_batch, q_head, q_row, q_col = (step // q.itemsize for step in q.strides)
    out_batch, out_head, out_row, out_col = (step // out.itemsize for step in out.strides)
    packed = DECODE.pack(
        **dict.fromkeys(_POINTERS, 0),
        q_batch=q_batch,
        q_head=q_head,
        q_row=q_row,
        q_col=q_col,
        out_batch=out_batch,
        out_head=out_head,
        out_row=out_row,
        out_col=out_col,
        blocks_batch=block_strides[0],
        blocks_head=block_strides[1],
        blocks_entry=block_strides[2],
        kv_heads=cache.kv_heads,
        group=q.shape[1] // cache.kv_heads,
        queries=q.shape[2],
        capacity=cache.capacity,
        pages=cache.pages,
        page=cache.page or cache.capacity,
        table_width=table_width,
        entries=entries,
        block_tiles=(call.block or TILE) // TILE,
        left=call.left,
        piece_tiles=piece_tiles,
        scale=_float32(call.scale * _LOG2_E),
        softcap=cap,
        inverse_softcap=inverse_cap,
    )
    return bytes(packed)


def _plan_for(call: DecodeCall, longest: int, total: int) -> _Plan:
    """The plan for such a problem, cached for the next call. The key contains everything that the plan depends on."""
    q, cache = call.q, call.cache
    rows = q.shape[1] // cache.kv_heads * q.shape[2]
    key = (
        cupy.cuda.runtime.getDevice(), cache.dtype.char, cache.head_dim, cache.value_dim, cache.batch, cache.kv_heads,
        rows, longest, total, overlapping.thread.active,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(cache, rows, longest, total)
    return plan


def _plan(cache: KVCache, rows: int, longest: int, total: int) -> _Plan:
    arch = jit.device_target()
    D, D_v, batch = cache.head_dim, cache.value_dim, cache.batch
    if D not in HEAD_DIMS or D_v not in HEAD_DIMS:
        wanted = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"cache: wanted head dims among {wanted} on a GPU, got {D} for keys, {D_v} for values")
    if arch == "sm_75":
        raise RuntimeError("attention_decode on a GPU needs compute capability 8.0 or newer; the CPU works here")
    config = decode_config(cache.dtype, D, D_v, rows)
    heads = cache.kv_heads * -(-rows // config.rows)
    if max(batch, heads) > _MOST_GRID:
        raise ValueError(
            f"cache: wanted at most {_MOST_GRID} sequences and heads by tiles of rows, got {batch}, {heads}"
        )
    pieces, tiles = pieces_of(longest, total, batch, heads, device.multiprocessors() * config.ctas(arch))
    kernel = jit.load(replace(config.spec(), overlaps=overlapping.thread.active), arch)
    kernel.max_dynamic_shared_size_bytes = config.shared_bytes
    return _Plan(
        kernel,
        (pieces, heads, batch),
        (config.threads,),
        config.shared_bytes,
        tiles,
        counters=batch * heads if pieces > 1 else 0,
        floats=batch * heads * pieces * config.rows * (D_v + 2) if pieces > 1 else 0,
    )


def _block_strides(blocks: Array) -> tuple[int, int, int]:
    """Strides of `blocks` in elements; 0 along a dimension of length 1, where one list serves all."""
    B, H, _ = blocks.shape
    batch, head, entry = (s // blocks.itemsize for s in blocks.strides)
    return batch if B > 1 else 0, head if H > 1 else 0, entry


def _float32(x: float) -> float:
    """x, clamped to the finite range of float32."""
    return max(-_MOST_FLOAT32, min(x, _MOST_FLOAT32))


@lru_cache(maxsize=1024)
def _rounded(longest: int, total: int, batch: int) -> tuple[int, int]:
    """Rounded numbers of tiles of keys: those of the longest sequence, and those of all `batch` sequences together."""
    tiles = _about(-(-longest // TILE))
    return tiles, min(batch * tiles, _about(-(-total // TILE)))


def _about(x: int) -> int:
    """x rounded up to its four leading bits, so that similar lengths share a plan."""
    shift = max(0, x.bit_length() - 4)
    return -(-x >> shift) << shift
