"""From a product on the GPU to a launch: the kernel for the operands, and its argument.

A call finds the kernel and its argument on the `MatrixCache` of its matrix, by where the operands lie, fills in alpha,
beta and scratch memory where they are others than last time, and starts it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import device, element_types, forced_kernel, jit, tensor_map, workspace
from .._kernels.structs import TENSOR_MAP_BYTES, Patch, Struct
from .._kernels.workspace import StreamOrdered
from . import arguments, heuristics, measured
from .call import ProductCall
from .configs import Gemm, GemmSm80, GemmSm90, Spmm, SpmmF64, SpmvSmall
from .heuristics import Problem
from .matrix_cache import MatrixCache, matrix_cache_of
from .operand_order import order_of
from .work_list import Share

#: Keep A in the L2 beside panels of B when it has at most so many bytes: worth 1 % at low densities.
_KEPT_BYTES = 20 << 20
#: Fields of `Product` that are of the operands, and those of scratch memory in `Schedule`.
_OPERANDS = ("b", "c"), ("b_row", "b_col", "b_batch", "c_row", "c_col", "c_batch")
_SCRATCH = ("counters", "partial", "arrived")


@dataclass(slots=True)
class Plan:
    """A kernel with its launch shape and work list, for one matrix and one kind of right-hand side."""

    config: Gemm
    kernel: Any
    grid: tuple[int, ...]
    threads: tuple[int]
    #: the argument without operands, factors and scratch memory, and where these are written
    template: bytes
    factors: Patch
    pointers: Patch
    strides: Patch
    #: the dtype of alpha and beta
    number: np.dtype[Any]
    #: arrays behind the pointers of the argument
    kept: Any
    #: what gemm_sm90 takes of memory for groups that come in pieces
    scratch: Scratch | None = None
    #: what spmv_small takes for rows that are too long for it
    long: LongRows | None = None

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.config.shared_bytes


@dataclass(slots=True)
class Scratch:
    """Scratch memory of gemm_sm90, whose argument also has tensor maps of the operands."""

    #: floats for sums of pieces, and counters that they take
    floats: int
    counts: int
    #: where the pointers are written
    pointers: Patch


@dataclass(slots=True)
class LongRows:
    """What spmv_small needs for long rows and for the shares of its CTAs: its second argument."""

    #: without scratch memory
    template: bytes
    pointers: Patch
    #: elements of sums, and counters that they take
    elements: int
    counts: int


@dataclass(slots=True)
class Launch:
    """A plan for operands in one place."""

    #: the plan, while the matrix remembers it
    made: ref[StreamOrdered]
    #: its argument without alpha, beta and scratch memory, which each call has of its own
    template: bytes
    #: what was filled in for an earlier call (alpha, beta, counters, pieces), and the arguments with it
    filled: tuple[tuple[int, int, int, int], tuple[np.ndarray[Any, Any], ...]] | None = None

    def plan(self) -> Plan | None:
        """The plan, while the matrix remembers it."""
        made = self.made()
        return None if made is None else made.get()

    def start(self, plan: Plan, alpha: Any, beta: Any) -> None:
        """Start the kernel with these factors on CuPy's current stream.

        Threads share arguments, so these are made anew and never written to again. Only integers are looked up: those
        that are equal have equal bytes, which zeros with signs have not.
        """
        temporary = None
        counters = pieces = 0
        scratch, long = plan.scratch, plan.long
        if scratch is not None:
            temporary = workspace.temporary(scratch.floats, np.float32) if scratch.floats else None
            counters = workspace.counters(2 + scratch.counts).data.ptr
        elif long is not None and long.counts:  # otherwise no row can be long
            temporary = workspace.temporary(long.elements, plan.number)
            counters = workspace.counters(long.counts).data.ptr
        if temporary is not None:
            pieces = temporary.data.ptr
        if type(alpha) is type(beta) is int:
            values = (alpha, beta, counters, pieces)
            filled = self.filled
            if filled is None or filled[0] != values:
                filled = self.filled = values, self._arguments(plan, *values)
            packed = filled[1]
        else:
            packed = self._arguments(plan, alpha, beta, counters, pieces)
        plan.kernel(plan.grid, plan.threads, packed, shared_mem=plan.config.shared_bytes)

    def _arguments(self, plan: Plan, alpha: Any, beta: Any, counters: int, pieces: int) -> tuple[Any, ...]:
        packed = bytearray(self.template)
        plan.factors.write(packed, *_words(plan.number, alpha, beta))
        if plan.scratch is not None:
            plan.scratch.pointers.write(packed, counters, pieces, counters + 8)
        if plan.long is None:
            return (jit.argument(packed),)
        long = bytearray(plan.long.template)
        plan.long.pointers.write(long, pieces, counters)
        return jit.argument(packed), jit.argument(long)


def product(call: ProductCall) -> Launch | None:
    """Start a product on CuPy's current stream; returns what starts the same once more, unless B was copied."""
    cache = matrix_cache_of(call.matrix)
    B, out = call.B, call.out
    key = (
        call.matrix._shape, B.data.ptr, B.shape, B.strides, B.dtype, out.data.ptr, out.shape, out.strides, out.dtype,
        call.acc, call.beta == 0, call.transposed, call.tf32, call.fp8, call.config, call.may_copy, forced_kernel.name,
    )  # fmt: skip
    launch = cache.launches.get(key)
    plan = None if launch is None else launch.plan()
    if launch is None or plan is None:
        orders = order_of(B), order_of(out)
        if call.may_copy and not call.fp8 and not orders[0]:
            readable = _with_aligned_rows(cache, call, orders[1])
            if readable is not B:
                product(replace(call, B=readable, may_copy=False))
                return None
        made = cache.plan(_plan_key(call, orders), lambda: _plan(cache, call, orders))
        launch = Launch(ref(made), _template(made.value, call))
        cache.remember(key, launch)
        plan = made.get()
    launch.start(plan, call.alpha, call.beta)
    return launch


def _plan_key(call: ProductCall, orders: tuple[str, str]) -> tuple[Any, ...]:
    """Everything that a plan depends on beside the matrix, on whose cache it is kept."""
    return (
        call.matrix._shape, call.B.dtype, call.out.dtype, call.acc, call.columns, call.batches, orders, call.beta == 0,
        call.transposed, call.tf32, call.fp8, call.config, forced_kernel.name,
    )  # fmt: skip


def _template(plan: Plan, call: ProductCall) -> bytes:
    """The argument of a plan for the operands of a call."""
    B, out, batches = call.B, call.out, call.batches
    packed = bytearray(plan.template)
    if isinstance(plan.config, GemmSm90):
        packed[TENSOR_MAP_BYTES : 3 * TENSOR_MAP_BYTES] = _operand_maps(plan.config, B, out)
    plan.pointers.write(packed, B.data.ptr, out.data.ptr)
    steps = []
    for x in (B, out):
        size, strides = x.itemsize, x.strides
        steps += [strides[-2] // size, strides[-1] // size, strides[0] // size if batches > 1 else 0]
    plan.strides.write(packed, *steps)
    return bytes(packed)


def problem_of(cache: MatrixCache, call: ProductCall, orders: tuple[str, str] = ("C", "C")) -> Problem:
    """What decides the kernel of a call, whose B and result are read and written in these orders."""
    data, shape, transposed = cache.source[0], call.matrix._shape, call.transposed
    sides, counts = data.shape[1:], (shape[0] // data.shape[1], shape[1] // data.shape[2])
    if transposed:
        sides, counts = sides[::-1], counts[::-1]
    index = np.dtype(np.int32) if transposed else cache.indices_dtype
    names = element_types.types(data.dtype, call.B.dtype, call.out.dtype, call.acc, index)
    return Problem(
        arch=jit.device_target(),
        types=element_types.scaled(names) if call.fp8 else names,
        R=sides[0],
        K=sides[1],
        N=call.columns,
        batches=call.batches,
        block_rows=counts[0],
        block_cols=counts[1],
        blocks=cache.blocks,
        transposed=transposed,
        b_order=orders[0],
        c_order=orders[1],
        overwrite=bool(call.beta == 0),
        aligned=cache.pointer % 16 == 0,
        tf32=call.tf32,
    )


def _plan(cache: MatrixCache, call: ProductCall, orders: tuple[str, str]) -> Plan:
    problem = problem_of(cache, call, orders)
    config = call.config or measured.choice(problem) or heuristics.gemm(problem)
    kernel = jit.load(config.spec(), problem.arch)
    if config.shared_bytes:
        kernel.max_dynamic_shared_size_bytes = config.shared_bytes
    if isinstance(config, GemmSm90):
        return _plan_sm90(cache, problem, config, kernel)
    if isinstance(config, GemmSm80):
        return _plan_sm80(cache, problem, config, kernel)
    return _plan_plain(cache, problem, config, kernel)


def _plan_plain(cache: MatrixCache, problem: Problem, config: Gemm, kernel: Any) -> Plan:
    """A kernel that walks over the index as it is stored, or over that of the transpose."""
    block_cols = _stored_columns(problem)
    kept: tuple[Any, ...] = cache.index(block_cols, problem.transposed)
    long, grid = None, _grid(config, problem)
    if isinstance(config, SpmvSmall):
        long, rows = _long_rows(cache, problem, config, grid[0])
        kept = (*kept, rows)
    layout = arguments.product(problem.types.acc)
    pointers = tuple(0 if x is None else x.data.ptr for x in kept[:3])
    template = _product_fields(cache, problem, pointers)
    return _filled_plan(config, kernel, grid, layout, layout.pack(**template), kept, long=long)


def _plan_sm80(cache: MatrixCache, problem: Problem, config: GemmSm80, kernel: Any) -> Plan:
    """Tiles of row tiles on the tensor cores of any card since Ampere, by a work list."""
    pattern = cache.pattern(_stored_columns(problem), problem.transposed)
    shape = (problem.R // config.slot_rows, config.slots)
    groups, items = cache.groups(pattern, *shape), cache.whole_items(pattern, *shape)
    tiles = groups.count * -(-problem.N // config.tile_n) * problem.batches
    grid = (min(tiles, device.multiprocessors() * config.ctas(problem.arch)),)
    kept = (items.items, items.splits, items.count, groups.columns, groups.blocks, groups.slots)
    layout = arguments.gemm_sm80(problem.types.acc)
    template = layout.pack(product=_product(cache, problem), schedule=_schedule(kept))
    return _filled_plan(config, kernel, grid, layout, template, kept)


def _plan_sm90(cache: MatrixCache, problem: Problem, config: GemmSm90, kernel: Any) -> Plan:
    """Tiles of row tiles on Hopper's tensor cores, by a work list whose long groups come in pieces."""
    pattern = cache.pattern(_stored_columns(problem), problem.transposed)
    shape = (problem.R // config.slot_rows, config.slots)
    multiprocessors = device.multiprocessors()
    column_tiles = -(-problem.N // config.tile_n) * problem.batches
    groups = cache.groups(pattern, *shape)
    items = cache.split_items(pattern, *shape, Share(problem.K, column_tiles, multiprocessors))
    tiles = groups.count * column_tiles
    # As few CTAs as finish in the same number of rounds: the rest would only draw power.
    grid = (multiprocessors if items.pieces else -(-tiles // -(-tiles // multiprocessors)),)
    kept = (items.items, items.splits, items.count, groups.columns, groups.blocks, groups.slots)
    layout = arguments.gemm_sm90()
    template = layout.pack(
        a=_block_map(cache, config),
        b=bytes(TENSOR_MAP_BYTES),
        c=bytes(TENSOR_MAP_BYTES),
        product=_product(cache, problem),
        schedule=_schedule(kept),
        group=config.group(problem.block_cols * problem.K),
        count=-1 if items.pieces else groups.count,
        keep_a=cache.source[0].nbytes <= _KEPT_BYTES,
    )
    piece_tiles = items.pieces * column_tiles
    pointers = layout.patch(*(f"schedule.{name}" for name in _SCRATCH))
    scratch = Scratch(piece_tiles * config.tile_m * config.tile_n, piece_tiles * 2, pointers)
    return _filled_plan(config, kernel, grid, layout, template, kept, scratch=scratch)


def _filled_plan(
    config: Gemm, kernel: Any, grid: tuple[int, ...], layout: Struct, template: bytearray, kept: Any, **more: Any
) -> Plan:
    inner = "product." if layout.name != "Product" else ""

    def patch(names: tuple[str, ...]) -> Patch:
        return layout.patch(*(inner + name for name in names))

    return Plan(
        config=config,
        kernel=kernel,
        grid=grid,
        threads=(config.threads,),
        template=bytes(template),
        factors=patch(("alpha", "beta")),
        pointers=patch(_OPERANDS[0]),
        strides=patch(_OPERANDS[1]),
        number=element_types.number(_acc_of(config)),
        kept=kept,
        **more,
    )


def _acc_of(config: Gemm) -> str:
    return "f64" if isinstance(config, SpmmF64) else config.types.acc


def _stored_columns(problem: Problem) -> int:
    """Block columns of the matrix as it is stored."""
    return problem.block_rows if problem.transposed else problem.block_cols


def _product_fields(cache: MatrixCache, problem: Problem, index: tuple[int, ...] = (0, 0, 0)) -> dict[str, Any]:
    """The fields of `Product` without the operands and the factors."""
    return {
        **dict.fromkeys(("alpha", "beta", *_OPERANDS[0], *_OPERANDS[1]), 0),
        "data": cache.pointer,
        "indices": index[0],
        "indptr": index[1],
        "places": index[2],
        "block_rows": problem.block_rows,
        "block_cols": problem.block_cols,
        "blocks": problem.blocks,
        "N": problem.N,
        "batches": problem.batches,
        "R": problem.R,
        "K": problem.K,
        "read_c": not problem.overwrite,
    }


def _product(cache: MatrixCache, problem: Problem) -> bytearray:
    return arguments.product(problem.types.acc).pack(**_product_fields(cache, problem))


def _schedule(lists: tuple[Array, ...]) -> bytearray:
    """The work list of a plan, without scratch memory."""
    names = ("items", "splits", "count", "columns", "blocks", "row_tiles")
    pointers = {name: x.data.ptr for name, x in zip(names, lists, strict=True)}
    return arguments.SCHEDULE.pack(**pointers, **dict.fromkeys(_SCRATCH, 0))


def _grid(config: Gemm, problem: Problem) -> tuple[int, ...]:
    """The launch shape of a kernel without a work list."""
    if isinstance(config, SpmvSmall):
        return (config.ctas(problem.block_rows, device.multiprocessors()),)
    if isinstance(config, Spmm):
        return config.grid(problem.block_rows, problem.N, problem.batches, device.multiprocessors())
    if isinstance(config, SpmmF64):
        return config.grid(problem.block_rows, problem.N, problem.batches)
    assert not isinstance(config, GemmSm90 | GemmSm80)
    return config.grid(problem.block_rows * problem.batches, problem.R, problem.N)


def _long_rows(cache: MatrixCache, problem: Problem, config: SpmvSmall, ctas: int) -> tuple[LongRows, Any]:
    """Long rows and the shares of CTAs, and the arrays behind them."""
    where = (_stored_columns(problem), problem.transposed, config.long)
    rows = cache.long_rows(*where)
    bounds = cache.shares(*where, ctas) if config.in_chunks else None
    template = arguments.LONG_ROWS.pack(
        pieces=rows.pieces.data.ptr,
        parents=rows.parents.data.ptr,
        count=rows.count.data.ptr,
        bounds=0 if bounds is None else bounds.data.ptr,
        partial=0,
        arrived=0,
    )
    pointers = arguments.LONG_ROWS.patch("partial", "arrived")
    return LongRows(bytes(template), pointers, rows.bound * problem.R, rows.bound), (rows, bounds)


def _block_map(cache: MatrixCache, config: GemmSm90) -> bytes:
    """How the copy engine sees A's blocks: one below the other, those of low row tiles as lines of 128 bytes."""
    data = cache.source[0]
    blocks, rows, cols = data.shape
    if config.slot_rows < 64:
        if not config.flat:
            return bytes(TENSOR_MAP_BYTES)
        dims, box = (64, data.size // 64), (64, config.slot_rows * config.depth // 64)
        return tensor_map.encode(cache.pointer, str(data.dtype), dims, (128,), box, swizzle="128B").tobytes()
    box = (64, config.depth) if config.a_transposed else (128 // data.itemsize, config.slot_rows)
    dims, strides = (cols, blocks * rows), (cols * data.itemsize,)
    return tensor_map.encode(cache.pointer, str(data.dtype), dims, strides, box, swizzle="128B").tobytes()


def _operand_maps(config: GemmSm90, B: Array, out: Array) -> bytes:
    """How the copy engine sees B and, where it is written in tiles, the result."""
    if config.b_transposed:
        row = 2 * config.depth if config.slot_rows < 64 else 128
        found = _map(B, True, (row // B.itemsize, config.tile_n, 1), f"{row}B")
    else:
        found = _map(B, False, (64, config.depth, config.tile_n // 64 if config.wide else 1), "128B", config.wide)
    if config.store == "rows":
        return found + _map(out, False, (64, 16, 1), "128B")
    if config.store == "columns":
        return found + _map(out, True, (16, 64, 1), "32B")
    return found + bytes(TENSOR_MAP_BYTES)


def _map(x: Array, columns: bool, box: tuple[int, int, int], swizzle: str, slabs: bool = False) -> bytes:
    """A batch of matrices read along rows or columns, or as slabs of 64 columns side by side: four dimensions."""
    rows, cols = x.shape[-2:]
    dims, pitch = ((rows, cols), x.strides[-1]) if columns else ((cols, rows), x.strides[-2])
    count, slab_pitch = 1, pitch
    if slabs:
        dims, count, slab_pitch = (64, rows), cols // 64, 64 * x.itemsize
    batches, batch_pitch = (x.shape[0], x.strides[0]) if x.ndim == 3 and x.shape[0] > 1 else (1, pitch)
    return tensor_map.encode(
        *(x.data.ptr, str(x.dtype), (*dims, count, batches), (pitch, slab_pitch, batch_pitch), (*box, 1)),
        swizzle=swizzle,
    ).tobytes()


def _with_aligned_rows(cache: MatrixCache, call: ProductCall, c_order: str) -> Array:
    """B, which the tensor cores cannot read, or a copy whose rows begin at multiples of 16 bytes, if it pays."""
    B = call.B
    problem = replace(problem_of(cache, call, ("", c_order)), overwrite=True)
    if not heuristics.wants_aligned_rows(problem):
        return B
    unit = 16 // B.itemsize
    padded = (*B.shape[:-1], -(-B.shape[-1] // unit) * unit)
    copy = workspace.retain_for_graph(lambda: cupy.empty(padded, B.dtype))[..., : B.shape[-1]]
    copy[...] = B
    return copy


def wants_columns(B: Array) -> bool:
    """Would the tensor cores read these bytes of fp8, if only they were column-major? They cannot read across K."""
    return jit.device_target() == "sm_90a" and order_of(B) != "F" and B.shape[-1] > 1


def _words(number: np.dtype[Any], alpha: Any, beta: Any) -> tuple[Any, ...]:
    """The numbers that are packed for alpha and beta; negative integers wrap as the sums do."""
    kind = number.kind
    if kind == "f":
        return alpha, beta
    if kind == "c":
        return alpha.real, alpha.imag, beta.real, beta.imag
    if kind == "u":
        wrap = 1 << 8 * number.itemsize
        return int(alpha) % wrap, int(beta) % wrap
    return bool(alpha), bool(beta)
