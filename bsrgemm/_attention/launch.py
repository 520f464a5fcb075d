"""From attention on the GPU to a launch: the kernel for the operands, and its argument."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array, AttentionCall, Backend
from .._kernels import jit, tensor_map
from .._kernels.workspace import counters, retain_for_graph
from .._products import measured
from .._products.launch import _multiprocessors
from .._products.matrix_cache import StreamOrdered
from . import heuristics, mask_tiles
from .heuristics import AttentionSm80, AttentionSm90, AttentionValues
from .mask import BlockMask

#: `Attention` of cuda/attention.cuh behind its pointers and strides and in front of its integers: its factors.
_FACTORS = {"f": "3f", "d": "3d"}
_POINTERS = "5P16q13P"
_INTEGERS = "24i"
_MAP_BYTES = 128
#: `Values` of cuda/attention_values.cu.
_VALUES = struct.Struct("@3P3q5i4x")
_MOST_STRIDE = 2**40
#: Kinds of problems remembered, and places of operands of each.
_MOST_PLANS, _MOST_MAPS = 256, 64
#: Blocks of fewer queries or keys than this are small, and no more of them than this are few.
_SMALL_BLOCK, _FEW_BLOCKS = 128, 0.5


@dataclass(slots=True)
class Plan:
    """A kernel with its launch shape, for operands of one kind: all that does not change from call to call."""

    config: heuristics.Attention
    kernel: Any
    layout: struct.Struct
    strides: tuple[int, ...]
    #: batches, heads, heads that share keys, queries, keys, columns
    sizes: tuple[int, ...]
    #: heads of all batches; those walked together
    heads: int
    section: int
    tiles: int
    #: CTAs of a launch at most
    ctas: int
    threads: tuple[int]
    shared_bytes: int
    maps: dict[Any, bytes] | None
    by_columns: bool
    #: operands are to be copied first, so that the copy engine can read them
    copied: bool


_plans: dict[Any, Plan] = {}
_NO_MASK: tuple[int, ...] = (0,) * 5
_NO_INTEGERS: tuple[int, ...] = (0,) * 10


def forward(backend: Backend, call: AttentionCall) -> None:
    """Start attention on CuPy's current stream."""
    q, k, v, out, lse, mask, bounds = call.q, call.k, call.v, call.out, call.lse, call.mask, call.bounds
    if not out.size and (lse is None or not lse.size):
        return
    keys = k.shape[2]
    if not keys:
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
        return
    how, factor, cap = heuristics.scores(call.scale, call.softcap, call.fp8)
    fine = mask is not None and _is_fine(mask)
    places = (q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr)
    key = (
        q.dtype, out.dtype, call.acc, q.shape, k.shape, v.shape, q.strides, k.strides, v.strides, out.strides, how,
        fine, (places[0] | places[1] | places[2]) % 16, places[3] % 16, cupy.cuda.runtime.getDevice(), measured.forced,
        bounds is None,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(call, how, fine)
    if plan.copied:
        q, k, v = retain_for_graph(lambda: tuple(_readable(x) for x in (q, k, v)))
        forward(backend, replace(call, q=q, k=k, v=v))
        return
    tiles, order, sequence, sequences, q_bounds, k_bounds = plan.tiles, 0, 0, 0, 0, 0
    masked, integers = _NO_MASK, _NO_INTEGERS
    lists: Any = None
    if mask is not None:
        masked, order, integers = _mask_tiles(backend, mask, plan)
    elif bounds is not None:
        config = plan.config
        lists = retain_for_graph(
            lambda: mask_tiles.sequences(cupy, *bounds, q.shape[2], config.tile_q, call.right < keys)
        )
        sequence, order = (x.data.ptr for x in lists)
        q_bounds, k_bounds = (x.data.ptr for x in bounds)
        sequences, tiles = len(bounds[0]) - 1, len(lists[0])
    scales = [0 if x is None else x.data.ptr for x in call.scales] if call.fp8 else (0, 0, 0)
    packed = plan.layout.pack(
        *places, 0 if lse is None else lse.data.ptr, *plan.strides,
        q_bounds, k_bounds, sequence, order, *masked, counters(2).data.ptr, *scales,
        factor, cap, call.value_scale,
        *plan.sizes, sequences, call.left, call.right, call.bottom_right, tiles, plan.section, call.right < keys,
        *integers,
    )  # fmt: skip
    if plan.maps is not None:
        values = (
            retain_for_graph(lambda: _by_columns(v, None if bounds is None else bounds[1])) if plan.by_columns else v
        )
        packed = _maps(plan, q, k, values, out) + packed
    grid = (min(tiles * plan.heads, plan.ctas),)
    plan.kernel(grid, plan.threads, (jit.argument(packed),), shared_mem=plan.shared_bytes)


def _plan(call: AttentionCall, how: int, fine: bool) -> Plan:
    arch = jit.device_target()
    q, k, v, out, acc = call.q, call.k, call.v, call.out, call.acc
    reads, rows = all(map(_mappable, (q, k, v))), q.size // max(1, q.shape[3])
    problem = heuristics.Problem(
        *(arch, q.dtype, out.dtype, acc, q.shape[3], v.shape[3], how, reads, _mappable(out), rows, k.shape[2], fine),
        call.fp8,
    )
    copied = heuristics.wants_copies(problem)
    config = heuristics.forward(replace(problem, reads=True) if copied else problem, measured.forced)
    kernel = jit.load(config.spec(), arch)
    if config.shared_bytes:
        kernel.max_dynamic_shared_size_bytes = config.shared_bytes
    hopper = isinstance(config, AttentionSm90)
    before = 4 * _MAP_BYTES if hopper else 0
    fields = f"@{_POINTERS}{_FACTORS[acc.char]}{_INTEGERS}"
    size = struct.calcsize(fields)
    padding = -(before + size) % (64 if before else 8)
    batches, heads, queries, head_dim = q.shape
    _, kv_heads, keys, value_dim = v.shape
    group, total = heads // kv_heads, heads if call.bounds is not None else batches * heads
    # attention_sm80 has a CTA for each tile, the others stay and take the next
    ctas = 2**31 - 1 if isinstance(config, AttentionSm80) else _multiprocessors() * config.ctas
    return Plan(
        config=config,
        kernel=kernel,
        layout=struct.Struct(f"{fields}{padding}x"),
        strides=tuple(step // x.itemsize for x in (q, k, v, out) for step in x.strides),
        sizes=(batches, heads, group, queries, keys, head_dim, value_dim),
        heads=total,
        section=heuristics.section(total, group, keys, (head_dim + value_dim) * q.itemsize),
        tiles=-(-queries // config.tile_q),
        ctas=ctas,
        threads=(config.threads,),
        shared_bytes=config.shared_bytes,
        maps={} if hopper else None,
        by_columns=isinstance(config, AttentionSm90) and config.fp8,
        copied=copied,
    )


def _mappable(x: Array) -> bool:
    """Can the copy engine read or write this array of four dimensions?"""
    steps = [step for step, n in zip(x.strides[:3], x.shape[:3], strict=True) if n > 1]
    contiguous = x.shape[3] == 1 or x.strides[3] == x.itemsize
    return x.data.ptr % 16 == 0 and contiguous and all(0 < s < _MOST_STRIDE and s % 16 == 0 for s in steps)


def _maps(plan: Plan, q: Array, k: Array, v: Array, out: Array) -> bytes:
    """q, k, v and the result as the copy engine sees them: 128 bytes by the rows of a tile at a time."""
    config, maps = plan.config, plan.maps
    assert isinstance(config, AttentionSm90) and maps is not None
    key = (q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr)
    found = maps.get(key)
    if found is None:
        if len(maps) >= _MOST_MAPS:
            maps.clear()
        found = _map(q, config.tile_q) + _map(k, config.tile_k)
        found += _map(v, config.value_dim, config.tile_k) if config.fp8 else _map(v, config.tile_k)
        found += _map(out, 64) if config.tiles else bytes(_MAP_BYTES)
        maps[key] = found
    return found


def _map(x: Array, rows: int, width: int = 128) -> bytes:
    """An array as the copy engine sees it: so many rows of `width` bytes at a time."""
    batches, heads, length, columns = x.shape
    # A step along a dimension of one element is never made, but has to be a multiple of 16.
    steps = [step if n > 1 else 16 for step, n in zip(x.strides[2::-1], (length, heads, batches), strict=True)]
    sizes, box = (columns, length, heads, batches), (width // x.itemsize, rows, 1, 1)
    return tensor_map.encode(x.data.ptr, str(x.dtype), sizes, steps, box, swizzle=f"{width}B").tobytes()


def _readable(x: Array) -> Array:
    """The array, or a copy that the copy engine can read."""
    if _mappable(x):
        return x
    unit = 16 // x.itemsize
    copy = cupy.empty((*x.shape[:3], -(-x.shape[3] // unit) * unit), x.dtype)[..., : x.shape[3]]
    copy[...] = x
    return copy


def _by_columns(v: Array, bounds: Array | None) -> Array:
    """Values of fp8 as the kernel wants them: keys side by side, those of sequences between `bounds` with gaps."""
    config = AttentionValues()
    batches, heads, keys, columns = v.shape
    sequences = 0 if bounds is None else len(bounds) - 1
    room = config.room(keys, sequences)
    values = cupy.empty((batches, heads, columns, room), v.dtype)
    grid = config.grid(batches * heads, room, columns)
    places = (v.data.ptr, values.data.ptr, 0 if bounds is None else bounds.data.ptr)
    packed = _VALUES.pack(*places, *v.strides[:3], heads, keys, columns, room, sequences)
    kernel = jit.load(config.spec(), jit.device_target())
    kernel(grid, (config.threads,), (jit.argument(packed),))
    return values


def _is_fine(mask: BlockMask) -> bool:
    """Would large tiles be mostly empty? Judged by numbers that the host knows."""
    if min(mask.block) >= _SMALL_BLOCK:
        return False
    rows, cols = (-(-n // b) for n, b in zip(mask.shape, mask.block, strict=True))
    return len(mask.indices) <= _FEW_BLOCKS * rows * cols * mask.heads[0] * mask.heads[1]


def _mask_tiles(backend: Backend, mask: BlockMask, plan: Plan) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """The mask by tiles, made once and kept on it: places of its arrays, of the order of tiles, and its sizes."""
    kept = mask.__dict__.setdefault("_tiles", {})
    shape = (plan.config.tile_q, plan.config.tile_k)
    made = kept.get(shape)
    if made is None:
        made = kept[shape] = StreamOrdered(mask_tiles.tiles(backend, mask, *shape))
    found = made.get()
    arrays = (found.first, found.columns, found.parts, found.kinds, mask.bits)
    B, H = mask.heads
    shared = (H, int(B > 1), 0 if H == 1 else plan.sizes[1] // H)
    sizes = (len(found.columns), len(mask.bits), *mask.block, found.parts_q, found.parts_k, mask.bits.shape[2])
    return tuple(x.data.ptr for x in arrays), found.order.data.ptr, (*sizes, *shared)
