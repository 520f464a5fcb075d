"""Launches of the kernels for the gradients of attention: choose the kernels, and pack their arguments."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array, Backend
from .._kernels import device, forced_kernel, jit
from .._kernels.element_types import element
from .._kernels.launching import contiguous, run
from .._kernels.workspace import StreamOrdered, counters, kept_in
from . import arguments, backward_config, heuristics, mask_tiles, turn_order
from .backward_config import (
    OF_QUERIES,
    AttentionDelta,
    Backward,
    BackwardBegin,
    BackwardEnd,
    BackwardFused,
    BackwardKeysSm90,
    BackwardProblem,
    BackwardQueriesSm90,
    BackwardSimt,
    BackwardSm90,
    TurnOrder,
)  # fmt: skip
from .call import BackwardCall
from .launch import mask_fields, pointer_of, readable, share_of_blocks, strides_of, tensor_map_of
from .mask import BlockMask

#: Operands that the tensor cores read in rows of multiples of 16 bytes, and sums that are read in order.
_ROWS, _SUMS = ("q", "k", "v", "dout"), ("lse", "dlse", "delta")
#: At least so many heads are walked together on Hopper in tiles of 128 keys, even if they do not fit the L2.
_LEAST_SECTION = 2
#: Kernels whose CTAs stay and claim tiles.
_CLAIMING = (BackwardSm90, BackwardKeysSm90, BackwardFused)
#: The share of blocks of 64 keys up to which tiles have as many: with half of the blocks they are 1.8 times as fast as
#: tiles of 128 keys, which are seldom whole then; with all blocks they take 1.3 times as long.
_MANY_BLOCKS = 0.75


def backward(backend: Backend, call: BackwardCall) -> None:
    """Start the kernels that write dq, dk and dv on CuPy's current stream."""
    if not call.q.shape[2] or not call.k.shape[2] or not call.q.size:
        for x in (call.dq, call.dk, call.dv):
            x.fill(0)
        return
    configs = _configs(call)
    # What the kernels cannot read as it is, is copied first.
    names = _SUMS if isinstance(configs[0], BackwardSimt) else (*_SUMS, *_ROWS)
    given = {name: getattr(call, name) for name in names if getattr(call, name) is not None}
    call = replace(call, **{name: readable(x) if name in _ROWS else contiguous(x) for name, x in given.items()})
    if isinstance(configs[0], BackwardSm90 | BackwardFused):
        _fused(backend, call, configs[0])
        return
    if isinstance(configs[0], BackwardKeysSm90):
        _paired(backend, call, configs[0])
        return
    statistics = _statistics(call)
    for config in configs:
        _separate(backend, call, config, statistics)


def _configs(call: BackwardCall) -> tuple[Backward, ...]:
    """The launches for these operands."""
    mode, _, _ = heuristics.scores(call.scale, call.softcap)
    problem = BackwardProblem(
        arch=jit.device_target(),
        dtype=call.q.dtype,
        dout_dtype=call.dout.dtype,
        acc=call.acc,
        head_dim=call.q.shape[3],
        value_dim=call.v.shape[3],
        # No score is compared with others here, so that the sign of the scale does not matter.
        scores=heuristics.CAPPED if mode == heuristics.CAPPED else heuristics.SIGNED,
        # In a window nobody waits for the turn of an addition, and the first one can store.
        ordered=call.deterministic or (call.mask is None and call.left + call.right < call.k.shape[2] // 2),
        heads=call.q.shape[0] * call.q.shape[1],
        narrow=call.mask is not None and _is_narrow(call.mask),
        steep=call.softcap is not None and call.softcap < backward_config.LEAST_SOFTCAP,
    )
    return backward_config.backward(problem, forced_kernel.name)


def _is_narrow(mask: BlockMask) -> bool:
    """Whether blocks of 64 keys are to be tiles, judged by numbers that the host knows."""
    return mask.block[1] == 64 and share_of_blocks(mask) <= _MANY_BLOCKS


# --------------------------------------------------------------------------------- dq by queries, dk and dv by keys
def _statistics(call: BackwardCall) -> Array:
    """What the kernels need of each query: (batches, heads, queries, 2)."""
    batches, heads, queries, columns = call.dout.shape
    found = cupy.empty((batches, heads, queries, 2), call.acc)
    out = call.dout if call.out is None else call.out
    config = AttentionDelta(element(call.dout.dtype), element(out.dtype), element(call.acc))
    steps = {
        f"{name}_{axis}": step // x.itemsize
        for name, x in (("dout", call.dout), ("out", out))
        for axis, step in zip(("batch", "head", "row", "column"), x.strides, strict=True)
    }
    packed = arguments.ATTENTION_DELTA.pack(
        dout=call.dout.data.ptr, out=out.data.ptr, lse=call.lse.data.ptr, dlse=pointer_of(call.dlse),
        delta=pointer_of(call.delta), to=found.data.ptr, rows=batches * heads * queries, heads=heads, queries=queries,
        columns=columns, **steps,
    )  # fmt: skip
    grid = config.grid(batches * heads * queries, device.multiprocessors())
    run(config, grid, (jit.argument(packed),), uses=(*_arrays(call), found))
    return found


def _separate(backend: Backend, call: BackwardCall, config: Backward, statistics: Array) -> None:
    """Start one of the kernels that each compute a part of the gradients."""
    lists = _Lists(backend, call, config)
    packed = _packed(call, lists, element(call.acc), statistics=statistics.data.ptr)
    # A CTA of the tensor-core kernel has one tile; those of the plain one walk over several.
    most = device.multiprocessors() * config.ctas if isinstance(config, BackwardSimt) else 2**31 - 1
    uses = (*_arrays(call), statistics, *lists.held)
    grid = (min(lists.tiles * lists.heads, most),)
    run(config, grid, (jit.argument(packed),), uses=uses, shared_bytes=config.shared_bytes)


# ------------------------------------------------------------------------------------------------ all in one pass
def _fused(backend: Backend, call: BackwardCall, config: BackwardSm90 | BackwardFused) -> None:
    """Start three kernels: statistics and zeros, the products, dq in its dtype."""
    batches, heads, queries = call.q.shape[:3]
    tile_q = config.tile_q
    tiles = -(-queries // tile_q) if call.bounds is None else queries // tile_q + len(call.bounds[0])
    padded = tiles * config.pieces
    all_pieces = batches * heads * padded
    # For each piece of 64 queries: its sums, two statistics of each query, and a counter.
    sizes = (64 * config.head_dim, 64, 64, 1)
    count = -(-all_pieces * sum(sizes) // 4) * 4
    memory = cupy.empty(count, np.float32)
    ends = np.cumsum((0, *sizes[:-1])) * all_pieces * 4
    sums, logarithms, deltas, turns = (memory.data.ptr + int(end) for end in ends)
    on_hopper = isinstance(config, BackwardSm90)
    by_queries = BackwardEnd(config.dtype, config.head_dim, config.tile_k, not on_hopper, config.scores)
    own, rows = _Lists(backend, call, config), _Lists(backend, call, by_queries)
    # For each share of a tile that is cut the sums of dk and dv.
    size = own.cut * own.shares * 2 * config.tile_k * config.head_dim
    partials = cupy.empty(size, np.float32) if size else None
    masked = call.mask is not None
    out = call.dout if call.out is None else call.out

    def packed(lists: _Lists) -> bytearray:
        return arguments.backward_rows().pack(
            backward=_packed(call, lists, "f32", statistics=0), out=pointer_of(call.out), lse=call.lse.data.ptr,
            dlse=pointer_of(call.dlse), delta=pointer_of(call.delta), out_strides=strides_of(out),
            logarithms=logarithms, deltas=deltas, sums=sums, turns=turns,
            row_first=rows.fields["first"] if masked else 0,
            row_columns=rows.fields["columns"] if masked else 0, partials=pointer_of(partials), padded=padded,
            whole=own.whole, shares=own.shares,
        )  # fmt: skip

    of_queries = (jit.argument(packed(rows)),)
    uses = (*_arrays(call), memory, partials, *own.held, *rows.held)
    begin = BackwardBegin(config.dtype, config.head_dim, config.tile_k, element(out.dtype), config.ordered)
    run(begin, (padded, batches * heads), of_queries, uses=uses)
    grid = (min(own.tiles * own.heads + own.cut * (own.shares - 1), config.ctas * device.multiprocessors()),)
    if on_hopper:
        maps = {name: tensor_map_of(x, tile_q) for name, x in (("q", call.q), ("dout", call.dout))}
        maps |= {name: tensor_map_of(x, config.tile_k) for name, x in (("k", call.k), ("v", call.v))}
        argument = arguments.backward_sm90().pack(**maps, rows=packed(own))
    else:
        argument = packed(own)
    run(config, grid, (jit.argument(argument),), uses=uses, shared_bytes=config.shared_bytes)
    run(by_queries, (rows.tiles * rows.heads * config.pieces,), of_queries, uses=uses)


def _paired(backend: Backend, call: BackwardCall, keys: BackwardKeysSm90) -> None:
    """Start the three kernels for wide heads on Hopper: statistics, dk and dv, dq."""
    queries = BackwardQueriesSm90(keys.dtype, keys.head_dim, keys.tile_k, keys.scores)
    batches, heads, rows = call.q.shape[:3]
    pieces = -(-rows // 64) if call.bounds is None else rows // 64 + len(call.bounds[0])
    # Two statistics of each query and a counter, which nobody reads here, for each piece of 64 queries.
    all_pieces = batches * heads * pieces
    memory = cupy.empty(-(-all_pieces * 129 // 4) * 4, np.float32)
    logarithms, deltas, turns = (memory.data.ptr + 4 * all_pieces * i for i in (0, 64, 128))
    out = call.dout if call.out is None else call.out

    def packed(lists: _Lists) -> bytearray:
        return arguments.backward_rows().pack(
            backward=_packed(call, lists, "f32", statistics=0), out=pointer_of(call.out), lse=call.lse.data.ptr,
            dlse=pointer_of(call.dlse), delta=pointer_of(call.delta), out_strides=strides_of(out),
            logarithms=logarithms, deltas=deltas, sums=0, turns=turns, row_first=0, row_columns=0, partials=0,
            padded=pieces, whole=lists.whole, shares=lists.shares,
        )  # fmt: skip

    by_keys, by_queries = _Lists(backend, call, keys), _Lists(backend, call, queries)
    begin = BackwardBegin(keys.dtype, keys.head_dim, keys.tile_k, element(out.dtype), True)
    uses = (*_arrays(call), memory, *by_keys.held, *by_queries.held)
    run(begin, (pieces, batches * heads), (jit.argument(packed(by_queries)),), uses=uses)
    for config, lists in ((keys, by_keys), (queries, by_queries)):
        maps = {name: tensor_map_of(x, config.tile_q) for name, x in (("q", call.q), ("dout", call.dout))}
        maps |= {name: tensor_map_of(x, config.tile_k) for name, x in (("k", call.k), ("v", call.v))}
        # CTAs of the first kernel stay and claim tiles; one of the second has one tile.
        most = device.multiprocessors() if config is keys else 2**31 - 1
        grid = (min(lists.tiles * lists.heads, most),)
        argument = jit.argument(arguments.backward_sm90().pack(**maps, rows=packed(lists)))
        run(config, grid, (argument,), uses=uses, shared_bytes=config.shared_bytes)


# ----------------------------------------------------------------------------------------------------- arguments
class _Lists:
    """The tiles that a kernel walks over: their number, and the fields of the argument that describe them."""

    def __init__(self, backend: Backend, call: BackwardCall, config: Backward | BackwardEnd) -> None:
        mask, bounds = call.mask, call.bounds
        by_queries = config.role == OF_QUERIES
        batches, heads, queries, _ = call.q.shape
        kv_heads, keys = call.k.shape[1:3]
        own = heads if by_queries else kv_heads
        self.heads = own if bounds is not None else batches * own
        self.tiles = -(-queries // config.tile_q) if by_queries else -(-keys // config.tile_k)
        names = ("q_bounds", "k_bounds", "sequences", "sequence_count", "order", "counters")
        self.fields: dict[str, int] = dict.fromkeys((*names, *arguments.MASK_POINTERS, *arguments.MASK_SIZES), 0)
        ordered = isinstance(config, BackwardSm90) and config.ordered
        section = self._section(call, config)
        #: kept as long as the launch needs them
        self.held: tuple[Any, ...] = ()
        if mask is not None:
            found = _tiled(backend, mask, config, _walkers(call, config, section)).get()
            self.held = (found, mask.bits)
            pointers, order, sizes = mask_fields(found, mask, heads)
            self.fields |= dict(zip(arguments.MASK_POINTERS, pointers, strict=True))
            self.fields |= dict(zip(arguments.MASK_SIZES, sizes, strict=True))
            # In one order, tiles of keys are claimed one after the other.
            self.fields["order"] = 0 if ordered else order
        elif bounds is not None:
            self.held = _sequences(call, config)
            self.fields["sequences"], self.fields["order"] = (x.data.ptr for x in self.held)
            self.fields["q_bounds"], self.fields["k_bounds"] = (x.data.ptr for x in bounds)
            self.fields["sequence_count"], self.tiles = len(bounds[0]) - 1, len(self.held[0])
        #: tiles of keys from number `whole` of the walk on are cut into `shares`: so many
        self.whole, self.shares = self._cut(call, config)
        self.cut = max(0, self.tiles * self.heads - self.whole)
        if isinstance(config, _CLAIMING):
            self.fields["counters"] = counters(2 + self.cut).data.ptr  # one for each tile of keys that is cut
        backwards = call.right < keys if by_queries else ordered
        self.fields |= {"tiles": self.tiles, "section": section, "backwards": backwards}

    def _cut(self, call: BackwardCall, config: Backward | BackwardEnd) -> tuple[int, int]:
        """From which tile of keys on tiles are cut, and into how many shares."""
        if not isinstance(config, BackwardSm90) or call.bounds is not None:
            return backward_config.NOTHING_CUT
        (_, heads, queries, _), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
        # `longest` is the most turns of a tile over the average: twice as many if causal, and somewhat more in a window
        # and under a mask.
        group, longest = heads // kv_heads, 1.0
        if call.mask is not None:
            patterns = call.mask.heads[0] * call.mask.heads[1]
            turns, longest = self.fields["entries"] / (self.tiles * patterns), 1.2
        elif call.left + call.right + config.tile_k < queries:
            turns, longest = (call.left + call.right + config.tile_k) / config.tile_q, 1.1
        elif min(call.left, call.right) < keys:
            turns, longest = queries / config.tile_q / 2, 2.0
        else:
            turns = queries / config.tile_q
        # In order, a share waits for others of its query head, unless these take as long: shares have whole heads.
        of = group if config.ordered and longest > 1 else 0
        places = config.ctas * device.multiprocessors()
        return backward_config.cut(self.tiles * self.heads, places, turns * group, longest, of)

    def _section(self, call: BackwardCall, config: Backward | BackwardEnd) -> int:
        """Heads whose tiles are walked together."""
        (_, heads, queries, _), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
        group, width = heads // kv_heads, (call.q.shape[3] + call.v.shape[3]) * call.q.itemsize
        if config.role == OF_QUERIES:
            return heuristics.section(self.heads, group, keys, width)
        section = heuristics.section(self.heads, 1, queries * group, width)
        if isinstance(config, _CLAIMING):
            section = min(self.heads, max(_LEAST_SECTION if config.tile_k == 128 else 1, section))
        return section


def _walkers(call: BackwardCall, config: Backward | BackwardEnd, section: int) -> int:
    """How many tiles of keys of a pattern are computed at the same time, or 0 if the order of their entries is that of
    the queries.
    """
    if not isinstance(config, BackwardSm90) or not config.ordered or call.mask is None:
        return 0
    # A kernel finds the entries outside of a band by the order of the queries.
    banded = min(call.left, call.right) < call.k.shape[2]
    if banded or not turn_order.is_worthwhile(call.mask, config.tile_q):
        return 0
    return max(1, device.multiprocessors() * config.ctas // section)


def _packed(call: BackwardCall, lists: _Lists, acc: str, statistics: int) -> bytearray:
    """The argument `Backward` of a kernel."""
    q, k, v = call.q, call.k, call.v
    batches, heads, queries, head_dim = q.shape
    _, kv_heads, keys, value_dim = v.shape
    _, factor, cap = heuristics.scores(call.scale, call.softcap)
    attention = arguments.attention(acc).pack(
        q=q.data.ptr, k=k.data.ptr, v=v.data.ptr, o=0, lse=0, q_strides=strides_of(q), k_strides=strides_of(k),
        v_strides=strides_of(v), o_strides=bytes(arguments.STRIDES.size), q_scale=0, k_scale=0, v_scale=0, scale=factor,
        cap=cap, value_scale=1.0, batches=batches, heads=heads, group=heads // kv_heads, queries=queries, keys=keys,
        head_dim=head_dim, value_dim=value_dim, left=call.left, right=call.right, bottom_right=call.bottom_right,
        **lists.fields,
    )  # fmt: skip
    return arguments.backward(acc).pack(
        attention=attention, dout=call.dout.data.ptr, statistics=statistics, dq=call.dq.data.ptr, dk=call.dk.data.ptr,
        dv=call.dv.data.ptr, dout_strides=strides_of(call.dout), dq_strides=strides_of(call.dq),
        dk_strides=strides_of(call.dk), dv_strides=strides_of(call.dv), factor=call.scale,
        inverse_cap=0.0 if call.softcap is None else min(1 / cap, 1e38),  # more does not fit into float32
    )  # fmt: skip


def _sequences(call: BackwardCall, config: Backward | BackwardEnd) -> tuple[Array, Array]:
    """The tiles of sequences of different lengths, those with most keys or most queries first."""
    assert call.bounds is not None
    q_bounds, k_bounds = call.bounds
    if config.role == OF_QUERIES:
        causal = call.right < call.k.shape[2]
        return mask_tiles.sequences(cupy, q_bounds, k_bounds, call.q.shape[2], config.tile_q, causal)
    return mask_tiles.sequences_by_keys(
        cupy, k_bounds, q_bounds, call.k.shape[2], config.tile_k, isinstance(config, BackwardSm90 | BackwardKeysSm90)
    )


def _tiled(backend: Backend, mask: BlockMask, config: Backward | BackwardEnd, walkers: int) -> StreamOrdered:
    """The lists of the mask by tiles of queries or of keys, computed once and cached on the mask. If so many `walkers`
    are given, the entries of a tile of keys are in an order in which few additions wait.
    """
    by_queries = config.role == OF_QUERIES
    shape = (config.tile_q, config.tile_k)
    key = shape if by_queries else (*shape, "by keys", walkers)

    def make() -> mask_tiles.Tiles:
        lists = mask_tiles.tiles(backend, mask, *shape) if by_queries else mask_tiles.by_keys(backend, mask, *shape)
        if walkers:
            rows, tiles = (-(-n // size) for n, size in zip(mask.shape, shape, strict=True))
            lists = turn_order.in_turn(lists, TurnOrder(config.dtype), tiles, rows, walkers)
        return lists

    return kept_in(mask.__dict__.setdefault("_tiles", {}), key, make)


def _arrays(call: BackwardCall) -> list[Any]:
    """What a call reads and writes."""
    return [getattr(call, field.name) for field in fields(call)]
