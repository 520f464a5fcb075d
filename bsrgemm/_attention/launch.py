"""Launches of the attention kernels: choose the kernel for the operands, and pack its argument."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array, Backend
from .._kernels import device, forced_kernel, jit, launching, tensor_map
from .._kernels.movable import MovableArgument
from .._kernels.structs import TENSOR_MAP_BYTES, Patch, Struct
from .._kernels.tensor_map import Layout
from .._kernels.workspace import StreamOrdered, counters, kept_in
from . import arguments, heuristics, mask_tiles
from .call import AttentionCall
from .heuristics import AttentionShort, AttentionSm80, AttentionSm90, AttentionValues
from .mask import BlockMask

_MOST_STRIDE = 2**40
#: Plans that are cached, and sets of operand addresses that are cached for each.
_MOST_PLANS, _MOST_MAPS = 256, 64
#: A block with fewer queries or keys than this is small; a mask with at most this fraction of its blocks is sparse.
_SMALL_BLOCK, _FEW_BLOCKS = 128, 0.5

#: Groups of neighbouring fields of the argument that change from call to call.
_OPERANDS = ("q", "k", "v", "o", "lse")
_LISTS = (
    *("q_bounds", "k_bounds", "sequences", "order", *arguments.MASK_POINTERS, "counters"),
    *("q_scale", "k_scale", "v_scale", "scale", "cap", "value_scale"),
)
_BAND = (
    *("sequence_count", "left", "right", "bottom_right", "tiles", "section", "backwards"),
    *arguments.MASK_SIZES,
)


@dataclass(slots=True)
class Plan:
    """A kernel with its launch shape, for operands of one kind: everything that does not change from call to call."""

    config: heuristics.Attention
    kernel: Any
    threads: tuple[int]
    #: dynamic shared memory of a CTA
    shared_bytes: int
    #: the argument without the fields that change from call to call, and where these are written
    template: bytes
    operands: Patch
    lists: Patch
    band: Patch
    counters: Patch
    #: heads whose tiles are walked together
    section: int
    #: heads of all batches, and query heads of one batch
    all_heads: int
    heads: int
    tiles: int
    #: largest number of CTAs of a launch
    ctas: int
    #: tensor maps by the operands that they describe; None for kernels that take none
    maps: dict[Any, bytes] | None
    #: whether operands are copied first, so that the copy engine can read them
    copied: bool


@dataclass(slots=True)
class Launch:
    """A plan together with its operands and options."""

    plan: Plan
    grid: tuple[int, ...]
    #: the device and the forced kernel for which it was made
    made_for: tuple[Any, Any]
    #: the plans among which its plan was; once these are dropped, it does not start any more
    plans: dict[Any, Plan]
    #: the argument for counters at one address; it is never modified, since threads may share it
    argument: tuple[int, Any]
    #: the lists of the mask, for which a stream may have to wait
    lists: StreamOrdered | None
    #: the tensor maps of q, k, v and the result without their addresses; None for kernels that take none, and for a
    #: result that is not written in tiles
    layouts: tuple[Layout | None, ...] | None
    #: the bits of the mask; None without a mask
    bits: Array | None

    def start(self, operands: tuple[Array | None, ...]) -> bool:
        """Start the kernel on CuPy's current stream; False if the device or the forced kernel is another one.

        The operands are the arrays at whose addresses it is.
        """
        if self.plans is not _plans or self.made_for != (cupy.cuda.runtime.getDevice(), forced_kernel.name):
            return False
        lists = None if self.lists is None else self.lists.get()
        address = counters(2).data.ptr
        argument = self.argument
        if argument[0] != address:
            argument = self.argument = address, self._counting(address)
        plan = self.plan
        launching.start(
            plan.kernel, self.grid, plan.threads, (argument[1],), (*operands, lists, self.bits), plan.shared_bytes
        )
        return True

    def movable(self) -> MovingLaunch:
        """Return a launch for operands and results at any aligned addresses, which differs in nothing else."""
        launch = self.plan, self.grid, self.made_for, self.plans, self.argument, self.lists, self.layouts, self.bits
        return MovingLaunch(*launch)

    def _counting(self, address: int) -> Any:
        """Return the argument with counters at this address."""
        packed = bytearray(self.argument[1].tobytes())
        self.plan.counters.write(packed, address)
        return jit.argument(packed)


class MovingLaunch(Launch):
    """A launch that is moved from address to address and filled in place: see `_kernels.movable`."""

    __slots__ = ("moving",)

    def __init__(self, *launch: Any) -> None:
        super().__init__(*launch)
        maps = [
            (number, number * TENSOR_MAP_BYTES, layout)
            for number, layout in enumerate(self.layouts or ())
            if layout is not None
        ]
        counted, argument = self.argument
        self.moving = MovableArgument(argument.tobytes(), len(_OPERANDS), self.plan.operands, maps)
        self.argument = counted, self.moving.argument

    def move(self, places: tuple[int, int, int, int, int]) -> None:
        """Write the addresses of q, k, v, the result and the logarithms."""
        self.moving.move(places)

    def kept(self) -> Launch:
        """Return a launch for the operands at which this one is."""
        argument = self.argument[0], jit.argument(bytearray(self.moving.packed))
        launch = self.plan, self.grid, self.made_for, self.plans, argument, self.lists, self.layouts, self.bits
        return Launch(*launch)

    def _counting(self, address: int) -> Any:
        self.plan.counters.write(self.moving.packed, address)
        return self.moving.argument


_plans: dict[Any, Plan] = {}
_NO_POINTERS = (0,) * len(arguments.MASK_POINTERS)
_NO_SIZES = (0,) * len(arguments.MASK_SIZES)


def forward(backend: Backend, call: AttentionCall) -> Launch | None:
    """Start attention on CuPy's current stream.

    The result starts the same again. It is None for an empty problem, for sequences of different lengths, for fp8 and
    where operands are copied first: these calls allocate memory of their own. It is None too if the lists of the mask
    are computed in the graph that is being captured.
    """
    q, k, v, out, lse, mask, bounds = call.q, call.k, call.v, call.out, call.lse, call.mask, call.bounds
    if not out.size and (lse is None or not lse.size):
        return None
    keys = k.shape[2]
    if not keys:
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
        return None
    score_mode, factor, cap = heuristics.scores(call.scale, call.softcap, call.fp8)
    places = (q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr)
    plan = _plan_for(call, places, score_mode)
    if plan.copied:
        q, k, v = (readable(x) for x in (q, k, v))
        forward(backend, replace(call, q=q, k=k, v=v))
        return None
    tiles, order, sequence, sequences, q_bounds, k_bounds = plan.tiles, 0, 0, 0, 0, 0
    masked, sizes = _NO_POINTERS, _NO_SIZES
    lists: Any = None
    values = v
    tiled: StreamOrdered | None = None
    if mask is not None:
        tiled = _tiled(backend, mask, plan)
        masked, order, sizes = mask_fields(tiled.get(), mask, plan.heads)
    elif bounds is not None:
        tile_q = plan.config.tile_q
        lists = mask_tiles.sequences(cupy, *bounds, q.shape[2], tile_q, call.right < keys)
        sequence, order = (x.data.ptr for x in lists)
        q_bounds, k_bounds = (x.data.ptr for x in bounds)
        sequences, tiles = len(bounds[0]) - 1, len(lists[0])
    scales = [0 if x is None else x.data.ptr for x in call.scales] if call.fp8 else (0, 0, 0)
    counted = counters(2).data.ptr
    packed = bytearray(plan.template)
    plan.operands.write(packed, *places, 0 if lse is None else lse.data.ptr)
    plan.lists.write(
        packed, q_bounds, k_bounds, sequence, order, *masked, counted, *scales, factor, cap,
        call.value_scale,
    )  # fmt: skip
    plan.band.write(
        packed, sequences, call.left, call.right, call.bottom_right, tiles, plan.section, call.right < keys, *sizes
    )
    if plan.maps is not None:
        k_bounds_array = None if bounds is None else bounds[1]
        values = _by_columns(v, k_bounds_array) if call.fp8 else v
        packed[: 4 * TENSOR_MAP_BYTES] = _maps(plan, q, k, values, out)
    grid = _grid(plan, q.shape, tiles, backwards=call.right < keys)
    argument, bits = jit.argument(packed), None if mask is None else mask.bits
    uses = (q, k, v, values, out, lse, bits, None if tiled is None else tiled.value)
    launching.start(
        plan.kernel, grid, plan.threads, (argument,), (*uses, *(lists or ()), *(bounds or ()), *call.scales),
        plan.shared_bytes,
    )  # fmt: skip
    if bounds is not None or call.fp8 or (tiled is not None and tiled.in_graph):
        return None
    made_for = (cupy.cuda.runtime.getDevice(), forced_kernel.name)
    layouts = None if plan.maps is None else _layouts(plan, q, k, v, out)
    return Launch(plan, grid, made_for, _plans, (counted, argument), tiled, layouts, bits)


def _grid(plan: Plan, shape: tuple[int, ...], tiles: int, *, backwards: bool) -> tuple[int, ...]:
    """The grid of a kernel; CTAs of attention_short_sm90 find their tile by the place in it."""
    if isinstance(plan.config, AttentionShort):
        batches, heads = shape[:2]
        return (heads, batches, tiles) if backwards else (tiles, heads, batches)
    return (min(tiles * plan.all_heads, plan.ctas),)


def _plan_for(call: AttentionCall, places: tuple[int, int, int, int], score_mode: int) -> Plan:
    """The plan for operands of this kind, cached for the next call. The key contains everything that the plan depends
    on.
    """
    q, k, v, out, mask = call.q, call.k, call.v, call.out, call.mask
    fine = mask is not None and _is_fine(mask)
    aligned = (places[0] | places[1] | places[2]) % 16, places[3] % 16
    key = (
        q.dtype, out.dtype, call.acc, q.shape, k.shape, v.shape, q.strides, k.strides, v.strides, out.strides,
        score_mode, fine, aligned, cupy.cuda.runtime.getDevice(), forced_kernel.name, call.bounds is None,
        _is_full(call),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(call, score_mode, fine)
    return plan


def _plan(call: AttentionCall, score_mode: int, fine: bool) -> Plan:
    arch = jit.device_target()
    q, k, v, out = call.q, call.k, call.v, call.out
    problem = heuristics.Problem(
        arch=arch,
        dtype=q.dtype,
        out_dtype=out.dtype,
        acc=call.acc,
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        scores=score_mode,
        reads=all(map(_mappable, (q, k, v))),
        writes=_mappable(out),
        rows=q.size // max(1, q.shape[3]),
        keys=k.shape[2],
        fine=fine,
        fp8=call.fp8,
        queries=q.shape[2],
        full=_is_full(call),
    )
    copied = heuristics.wants_copies(problem)
    config = heuristics.forward(replace(problem, reads=True) if copied else problem, forced_kernel.name)
    kernel = jit.load(config.spec(), arch)
    if config.shared_bytes:
        kernel.max_dynamic_shared_size_bytes = config.shared_bytes
    heads, kv_heads = q.shape[1], k.shape[1]
    all_heads = heads if call.bounds is not None else q.shape[0] * heads
    width = (q.shape[3] + v.shape[3]) * q.itemsize
    section = heuristics.section(all_heads, heads // kv_heads, k.shape[2], width)
    layout, template = _argument(call, config)
    inner = "attention." if layout.name == "AttentionSm90" else ""

    def patch(names: tuple[str, ...]) -> Patch:
        return layout.patch(*(inner + name for name in names))

    return Plan(
        config=config,
        kernel=kernel,
        threads=(config.threads,),
        shared_bytes=config.shared_bytes,
        template=template,
        operands=patch(_OPERANDS),
        lists=patch(_LISTS),
        band=patch(_BAND),
        counters=patch(("counters",)),
        section=section,
        all_heads=all_heads,
        heads=heads,
        tiles=-(-q.shape[2] // config.tile_q),
        # attention_sm80 has a CTA for each tile; CTAs of attention_sm90 stay and claim tiles
        ctas=2**31 - 1 if isinstance(config, AttentionSm80) else device.multiprocessors() * config.ctas,
        maps={} if isinstance(config, AttentionShort | AttentionSm90) else None,
        copied=copied,
    )


def _argument(call: AttentionCall, config: heuristics.Attention) -> tuple[Struct, bytes]:
    """The argument of a kernel, with the fields that do not change from call to call."""
    layout = arguments.attention("f64" if call.acc == np.float64 else "f32")
    batches, heads, queries, head_dim = call.q.shape
    _, kv_heads, keys, value_dim = call.v.shape
    inner = layout.pack(
        **dict.fromkeys((*_OPERANDS, *_LISTS, *_BAND), 0),
        q_strides=strides_of(call.q),
        k_strides=strides_of(call.k),
        v_strides=strides_of(call.v),
        o_strides=strides_of(call.out),
        batches=batches,
        heads=heads,
        group=heads // kv_heads,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        value_dim=value_dim,
    )
    if not isinstance(config, AttentionShort | AttentionSm90):
        return layout, bytes(inner)
    outer, no_map = arguments.attention_sm90(), bytes(TENSOR_MAP_BYTES)
    return outer, bytes(outer.pack(q=no_map, k=no_map, v=no_map, o=no_map, attention=inner))


def strides_of(x: Array) -> bytearray:
    batch, head, row, column = (step // x.itemsize for step in x.strides)
    return arguments.STRIDES.pack(batch=batch, head=head, row=row, column=column)


def _mappable(x: Array) -> bool:
    """Whether the copy engine can read or write this array of four dimensions."""
    steps = [step for step, n in zip(x.strides[:3], x.shape[:3], strict=True) if n > 1]
    contiguous = x.shape[3] == 1 or x.strides[3] == x.itemsize
    return x.data.ptr % 16 == 0 and contiguous and all(0 < s < _MOST_STRIDE and s % 16 == 0 for s in steps)


def _maps(plan: Plan, q: Array, k: Array, v: Array, out: Array) -> bytes:
    """The tensor maps of q, k, v and the result: a copy takes 128 bytes by the rows of a tile.

    A plan belongs to one shape and one set of strides of the operands. `v` may be a temporary copy with other strides,
    which are therefore a part of the key.
    """
    config, maps = plan.config, plan.maps
    assert isinstance(config, AttentionShort | AttentionSm90) and maps is not None
    key = (q.data.ptr, k.data.ptr, v.data.ptr, v.shape, v.strides, out.data.ptr)
    found = maps.get(key)
    if found is None:
        if len(maps) >= _MOST_MAPS:
            maps.clear()
        arrays = zip(_layouts(plan, q, k, v, out), (q, k, v, out), strict=True)
        found = b"".join(bytes(TENSOR_MAP_BYTES) if layout is None else layout.at(x.data.ptr) for layout, x in arrays)
        maps[key] = found
    return found


def _layouts(plan: Plan, q: Array, k: Array, v: Array, out: Array) -> tuple[Layout | None, ...]:
    """The tensor maps of q, k, v and the result without addresses; None for a result that is not written in tiles."""
    config = plan.config
    assert isinstance(config, AttentionShort | AttentionSm90)
    values = _layout_of(v, config.value_dim, config.tile_k) if config.fp8 else _layout_of(v, config.tile_k)
    result = _layout_of(out, 64) if config.tiles else None
    return _layout_of(q, config.tile_q), _layout_of(k, config.tile_k), values, result


def tensor_map_of(x: Array, rows: int) -> bytes:
    """The tensor map of an array: a copy takes `rows` rows of 128 bytes."""
    return _layout_of(x, rows).at(x.data.ptr)


def _layout_of(x: Array, rows: int, width: int = 128) -> Layout:
    """The tensor map of an array without its address: a copy takes `rows` rows of `width` bytes."""
    batches, heads, length, columns = x.shape
    # A dimension of one element is never stepped along, but its stride has to be a multiple of 16 bytes.
    steps = tuple(step if n > 1 else 16 for step, n in zip(x.strides[2::-1], (length, heads, batches), strict=True))
    sizes, box = (columns, length, heads, batches), (width // x.itemsize, rows, 1, 1)
    return Layout(tensor_map.dtype_name(x.dtype), sizes, steps, box, f"{width}B")


def readable(x: Array) -> Array:
    """The array, or a copy that the copy engine can read."""
    if _mappable(x):
        return x
    unit = 16 // x.itemsize
    copy = cupy.empty((*x.shape[:3], -(-x.shape[3] // unit) * unit), x.dtype)[..., : x.shape[3]]
    copy[...] = x
    return copy


def _by_columns(v: Array, bounds: Array | None) -> Array:
    """Values in fp8, transposed so that keys are contiguous; the sequences between `bounds` have gaps between them."""
    config = AttentionValues()
    batches, heads, keys, columns = v.shape
    sequences = 0 if bounds is None else len(bounds) - 1
    room = config.room(keys, sequences)
    values = cupy.empty((batches, heads, columns, room), v.dtype)
    batch, head, row = v.strides[:3]
    packed = arguments.ATTENTION_VALUES.pack(
        v=v.data.ptr, to=values.data.ptr, bounds=0 if bounds is None else bounds.data.ptr, batch=batch, head=head,
        row=row, heads=heads, keys=keys, columns=columns, room=room, sequences=sequences,
    )  # fmt: skip
    launching.run(
        config, config.grid(batches * heads, room, columns), (jit.argument(packed),), uses=(v, values, bounds)
    )
    return values


def _is_full(call: AttentionCall) -> bool:
    """Whether every query sees every key."""
    keys = call.k.shape[2]
    return call.mask is None and call.bounds is None and call.left >= keys and call.right >= keys


def _is_fine(mask: BlockMask) -> bool:
    """Whether large tiles would be mostly empty, judged by numbers that the host knows."""
    return min(mask.block) < _SMALL_BLOCK and share_of_blocks(mask) <= _FEW_BLOCKS


def pointer_of(x: Array | None) -> int:
    """The address of an array; 0 for none."""
    return 0 if x is None else x.data.ptr


def share_of_blocks(mask: BlockMask) -> float:
    """The blocks that a mask stores, of all blocks of its patterns."""
    rows, cols = (-(-n // b) for n, b in zip(mask.shape, mask.block, strict=True))
    return len(mask.indices) / max(1, rows * cols * mask.heads[0] * mask.heads[1])


def _tiled(backend: Backend, mask: BlockMask, plan: Plan) -> StreamOrdered:
    """The lists of the mask by tiles, computed once and cached on the mask."""
    shape = (plan.config.tile_q, plan.config.tile_k)
    return kept_in(mask.__dict__.setdefault("_tiles", {}), shape, lambda: mask_tiles.tiles(backend, mask, *shape))


def mask_fields(found: Any, mask: BlockMask, heads: int) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """The fields of a mask for `heads` query heads: addresses of its lists, that of the order of tiles, and sizes."""
    arrays = (found.first, found.columns, found.parts, found.kinds, mask.bits)
    B, H = mask.heads
    shared = (H, int(B > 1), 0 if H == 1 else heads // H)
    sizes = (len(found.columns), len(mask.bits), *mask.block, found.parts_q, found.parts_k, mask.bits.shape[2])
    return tuple(map(pointer_of, arrays)), found.order.data.ptr, (*sizes, *shared)
