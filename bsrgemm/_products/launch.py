"""Launches of products on the GPU: this module chooses the kernel of a product and packs its argument.

Both are stored on the `MatrixCache` of the matrix, under a key with the addresses of the operands. A repeated call
finds them there, fills in alpha, beta and temporary memory if they differ from the last call, and starts the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import device, element_types, forced_kernel, graphs, jit, launching, overlapping, tensor_map, workspace
from .._kernels.movable import MovableArgument
from .._kernels.structs import TENSOR_MAP_BYTES, Patch, Struct
from .._kernels.tensor_map import Layout
from .._kernels.workspace import StreamOrdered
from . import arguments, copies, heuristics, measured
from .call import ProductCall
from .configs import ColumnsTf32, Gemm, GemmFew, GemmSm80, GemmSm90, GemmTurnedSm90, Spmm, SpmmF64, SpmvSmall
from .heuristics import Problem
from .matrix_cache import MatrixCache, matrix_cache_of
from .operand_order import order_of
from .work_list import Share

#: Keep A in the L2 cache, next to panels of B, if it has at most so many bytes. On an H200 this saves 1 % of the time
#: at densities of 0.05 and 0.10.
_KEPT_BYTES = 20 << 20
#: Fields of `Product` that describe the operands (pointers and strides), and fields of `Schedule` that point to
#: temporary memory.
_OPERANDS = ("b", "c"), ("b_row", "b_col", "b_batch", "c_row", "c_col", "c_batch")
_SCRATCH = ("counters", "partial", "arrived")


@dataclass(slots=True)
class Plan:
    """A kernel with its grid and work list, for one matrix and one kind of right-hand side."""

    config: Gemm
    kernel: Any
    grid: tuple[int, ...]
    threads: tuple[int]
    #: dynamic shared memory of a CTA
    shared_bytes: int
    #: the argument without operands, factors and temporary memory, and the writers for factors and operands
    template: bytes
    factors: Patch
    pointers: Patch
    strides: Patch
    #: the dtype of alpha and beta
    number: np.dtype[Any]
    #: arrays to which the pointers of the argument point, so that they stay alive
    arrays: Any
    #: the temporary memory of gemm_sm90 for groups that are cut into pieces
    scratch: Scratch | None = None
    #: the second argument of spmv_small, for block rows that are cut into pieces
    long: LongRows | None = None


@dataclass(slots=True)
class Scratch:
    """The temporary memory of gemm_sm90."""

    #: number of floats for the sums of pieces, and number of counters for the pieces
    floats: int
    counts: int
    #: the writer for the pointers to this memory
    pointers: Patch


@dataclass(slots=True)
class LongRows:
    """The second argument of spmv_small: pieces of long block rows, and the range of block rows of each CTA."""

    #: the argument without temporary memory, and the writer for the pointers to that memory
    template: bytes
    pointers: Patch
    #: number of elements for the sums of pieces, and number of counters for the pieces
    elements: int
    counts: int


@dataclass(slots=True)
class Launch:
    """A plan together with the addresses and strides of its operands."""

    #: a weak reference to the plan, which the matrix owns
    owned: ref[StreamOrdered]
    #: the argument of the plan with any alpha, beta and temporary memory, which differ between calls
    template: bytes | bytearray
    #: the tensor maps of B and of the result without their addresses; None for a map that the kernel does not read
    maps: tuple[Layout | None, Layout | None]
    #: alpha, beta, counters and pieces of the last call with integer factors, and the arguments made from them
    filled: tuple[tuple[int, int, int, int], tuple[Any, ...]] | None = None

    def plan(self) -> Plan | None:
        """Return the plan, or None if the matrix no longer stores it."""
        plan = self.owned()
        return None if plan is None else plan.get()

    def movable(self) -> MovingLaunch | None:
        """Return a launch for B and a result at any aligned addresses, or None if the matrix does not store the plan.

        It differs from this one in nothing else.
        """
        plan = self.plan()
        return None if plan is None else MovingLaunch(self, plan)

    def start(self, plan: Plan, operands: tuple[Array, Array], alpha: Any, beta: Any) -> None:
        """Start the kernel with these factors on CuPy's current stream; `operands` are B and the result.

        Threads can share the arguments of a launch, so arguments are never modified after they were created. Arguments
        of an earlier call are reused only if the factors are integers: equal integers have equal bytes, but the floats
        0.0 and -0.0 are equal and have different bytes.
        """
        _memory, pieces, counters = None, 0, 0  # the memory is held until the launch has returned
        scratch, long = plan.scratch, plan.long
        if scratch is not None:
            _memory, pieces, counters = workspace.scratch(4 * scratch.floats, 2 + scratch.counts)
        elif long is not None and long.counts:  # without counters, no block row can be long
            _memory, pieces, counters = workspace.scratch(long.elements * plan.number.itemsize, long.counts)
        if type(alpha) is type(beta) is int:
            values = (alpha, beta, counters, pieces)
            filled = self.filled
            if filled is None or filled[0] != values:
                filled = self.filled = values, self._arguments(plan, *values)
            packed = filled[1]
        else:
            packed = self._arguments(plan, alpha, beta, counters, pieces)
        launching.start(plan.kernel, plan.grid, plan.threads, packed, (plan, *operands), plan.shared_bytes)

    def _arguments(self, plan: Plan, alpha: Any, beta: Any, counters: int, pieces: int) -> tuple[Any, ...]:
        packed = bytearray(self.template)
        _fill(plan, packed, alpha, beta, counters, pieces)
        return jit.argument(packed), *_long_argument(plan, counters, pieces)


class MovingLaunch(Launch):
    """A launch that is moved from address to address and filled in place: see `_kernels.movable`."""

    __slots__ = ("argument",)

    def __init__(self, model: Launch, plan: Plan) -> None:
        maps = [(n, (n + 1) * TENSOR_MAP_BYTES, layout) for n, layout in enumerate(model.maps) if layout is not None]
        self.argument = MovableArgument(model.template, 2, plan.pointers, maps)
        super().__init__(model.owned, model.template, model.maps)

    def move(self, places: tuple[int, int]) -> None:
        """Write the addresses of B and of the result."""
        self.argument.move(places)

    def kept(self) -> Launch:
        """Return a launch for the operands at which this one is."""
        return Launch(self.owned, bytes(self.argument.packed), self.maps)

    def _arguments(self, plan: Plan, alpha: Any, beta: Any, counters: int, pieces: int) -> tuple[Any, ...]:
        self.filled = None  # what it describes is overwritten
        _fill(plan, self.argument.packed, alpha, beta, counters, pieces)
        return self.argument.argument, *_long_argument(plan, counters, pieces)


def _fill(plan: Plan, packed: bytearray | memoryview, alpha: Any, beta: Any, counters: int, pieces: int) -> None:
    """Write the factors and the temporary memory of a call into an argument."""
    plan.factors.write(packed, *_words(plan.number, alpha, beta))
    if plan.scratch is not None:
        plan.scratch.pointers.write(packed, counters, pieces, counters + 8)


def _long_argument(plan: Plan, counters: int, pieces: int) -> tuple[Any, ...]:
    """Return the second argument of spmv_small; nothing for other kernels."""
    if plan.long is None:
        return ()
    long = bytearray(plan.long.template)
    plan.long.pointers.write(long, pieces, counters)
    return (jit.argument(long),)


def product(call: ProductCall) -> Launch | None:
    """Start a product on CuPy's current stream.

    The result is a `Launch` that can start the same product again, or None if B had to be copied.
    """
    cache = matrix_cache_of(call.matrix)
    B, out = call.B, call.out
    key = (
        call.matrix._shape, B.data.ptr, B.shape, B.strides, B.dtype, out.data.ptr, out.shape, out.strides, out.dtype,
        call.acc, call.beta == 0, call.transposed, call.tf32, call.parts, call.fp8, call.config, call.may_copy,
        forced_kernel.name, overlapping.thread.active,
        cupy.cuda.runtime.getDevice(),
    )  # fmt: skip
    launch = cache.launches.get(key)
    plan = None if launch is None else launch.plan()
    if launch is None or plan is None:
        orders = order_of(B), order_of(out)
        if call.may_copy and not call.fp8 and _by_copies(cache, call, orders):
            return None
        stored = cache.plan(_plan_key(call, orders), lambda: _plan(cache, call, orders))
        maps = _operand_maps(stored.value.config, B, out)
        launch = Launch(ref(stored), _template(stored.value, call, maps), maps)
        cache.remember(key, launch)
        plan = stored.get()
    launch.start(plan, (B, out), call.alpha, call.beta)
    return launch


def _plan_key(call: ProductCall, orders: tuple[str, str]) -> tuple[Any, ...]:
    """Return the key of a plan: everything on which it depends except the arrays of the matrix, which owns the plan."""
    return (
        call.matrix._shape, call.B.dtype, call.out.dtype, call.acc, call.columns, call.batches, orders, call.beta == 0,
        call.transposed, call.tf32, call.parts, call.fp8, call.config, forced_kernel.name, overlapping.thread.active,
        cupy.cuda.runtime.getDevice(),
    )  # fmt: skip


def _template(plan: Plan, call: ProductCall, maps: tuple[Layout | None, Layout | None]) -> bytearray:
    """Return the argument of a plan with the operands of a call filled in."""
    B, out, batches = call.B, call.out, call.batches
    packed = bytearray(plan.template)
    steps = []
    for x in (B, out):
        size, strides = x.itemsize, x.strides
        steps += [strides[-2] // size, strides[-1] // size, strides[0] // size if batches > 1 else 0]
    plan.strides.write(packed, *steps)
    b, c = B.data.ptr, out.data.ptr
    if maps[0] is not None:
        packed[TENSOR_MAP_BYTES : 2 * TENSOR_MAP_BYTES] = maps[0].at(b)
    if maps[1] is not None:
        packed[2 * TENSOR_MAP_BYTES : 3 * TENSOR_MAP_BYTES] = maps[1].at(c)
    plan.pointers.write(packed, b, c)
    return packed


def problem_of(cache: MatrixCache, call: ProductCall, orders: tuple[str, str] = ("C", "C")) -> Problem:
    """Return the properties of a call that decide its kernel; `orders` are those of B and of the result."""
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
        parts=call.parts,
    )


def _plan(cache: MatrixCache, call: ProductCall, orders: tuple[str, str]) -> Plan:
    problem = problem_of(cache, call, orders)
    config = call.config or measured.choice(problem) or heuristics.gemm(problem)
    if isinstance(config, GemmFew) and _reads_ahead(cache, problem):
        config = replace(config, read_ahead=True)
    kernel = jit.load(config.spec(), problem.arch)
    if config.shared_bytes:
        kernel.max_dynamic_shared_size_bytes = config.shared_bytes
    if isinstance(config, GemmSm90 | GemmTurnedSm90):
        return _plan_sm90(cache, problem, config, kernel)
    if isinstance(config, GemmSm80):
        return _plan_sm80(cache, problem, config, kernel)
    return _plan_plain(cache, problem, config, kernel)


def _reads_ahead(cache: MatrixCache, problem: Problem) -> bool:
    """Return whether A may be read before the kernels in front have ended; one of these may still make a copy of it."""
    return overlapping.thread.active and overlapping.can_overlap(problem.arch) and cache.whole is not None


def _plan_plain(cache: MatrixCache, problem: Problem, config: Gemm, kernel: Any) -> Plan:
    """Plan a kernel without a work list, which reads the index arrays of the matrix or of its transpose."""
    block_cols = _stored_columns(problem)
    arrays: tuple[Any, ...] = cache.index(block_cols, problem.transposed)
    long, grid = None, _grid(config, problem)
    if isinstance(config, SpmvSmall):
        long, rows = _long_rows(cache, problem, config, grid[0])
        arrays = (*arrays, rows)
    layout = arguments.product(problem.types.acc)
    pointers = tuple(0 if x is None else x.data.ptr for x in arrays[:3])
    template = _product_fields(cache, problem, pointers)
    return _filled_plan(cache, config, kernel, grid, layout, layout.pack(**template), arrays, long=long)


def _plan_sm80(cache: MatrixCache, problem: Problem, config: GemmSm80, kernel: Any) -> Plan:
    """Plan gemm_sm80, which takes groups of row tiles from a work list, for any card since Ampere."""
    pattern = cache.pattern(_stored_columns(problem), problem.transposed)
    shape = (problem.R // config.row_tile_height, config.row_tiles)
    groups, items = cache.groups(pattern, *shape), cache.whole_items(pattern, *shape)
    tiles = groups.count * -(-problem.N // config.tile_n) * problem.batches
    grid = (min(tiles, device.multiprocessors() * config.ctas(problem.arch)),)
    arrays = (items.items, items.splits, items.count, groups.columns, groups.blocks, groups.row_tiles)
    layout = arguments.gemm_sm80(problem.types.acc)
    template = layout.pack(product=_product(cache, problem), schedule=_schedule(arrays))
    return _filled_plan(cache, config, kernel, grid, layout, template, arrays)


def _plan_sm90(cache: MatrixCache, problem: Problem, config: GemmSm90 | GemmTurnedSm90, kernel: Any) -> Plan:
    """Plan a kernel for Hopper, which takes groups of row tiles from a work list; long groups are cut into pieces."""
    pattern = cache.pattern(_stored_columns(problem), problem.transposed)
    shape = (problem.R // config.row_tile_height, config.row_tiles)
    multiprocessors = device.multiprocessors()
    column_tiles = -(-problem.N // config.tile_n) * problem.batches
    groups = cache.groups(pattern, *shape)
    items = cache.split_items(pattern, *shape, Share(problem.K, column_tiles, multiprocessors))
    tiles = groups.count * column_tiles
    # Launch as few CTAs as finish in the same number of rounds; more would only consume power.
    grid = (multiprocessors if items.pieces else -(-tiles // -(-tiles // multiprocessors)),)
    arrays = (items.items, items.splits, items.count, groups.columns, groups.blocks, groups.row_tiles)
    layout = arguments.gemm_sm90()
    template = layout.pack(
        a=_block_map(cache, config),
        b=bytes(TENSOR_MAP_BYTES),
        c=bytes(TENSOR_MAP_BYTES),
        product=_product(cache, problem),
        schedule=_schedule(arrays),
        group=config.group(problem.block_cols * problem.K),
        count=-1 if items.pieces else groups.count,
        keep_a=cache.source[0].nbytes <= _KEPT_BYTES,
        groups=groups.count,
        entries=len(groups.columns),
    )
    piece_tiles = items.pieces * column_tiles
    pointers = layout.patch(*(f"schedule.{name}" for name in _SCRATCH))
    # Two warpgroups have room for 64 x 64 sums each, even if one of them joins those of both.
    sums = max(config.tile_m * config.tile_n, 2 * 64 * 64)
    scratch = Scratch(piece_tiles * sums, piece_tiles * 2, pointers)
    return _filled_plan(cache, config, kernel, grid, layout, template, arrays, scratch=scratch)


def _filled_plan(
    cache: MatrixCache,
    config: Gemm,
    kernel: Any,
    grid: tuple[int, ...],
    layout: Struct,
    template: bytearray,
    arrays: Any,
    **more: Any,
) -> Plan:
    inner = "product." if layout.name != "Product" else ""

    def patch(names: tuple[str, ...]) -> Patch:
        return layout.patch(*(inner + name for name in names))

    return Plan(
        config=config,
        kernel=kernel,
        grid=grid,
        threads=(config.threads,),
        shared_bytes=config.shared_bytes,
        template=bytes(template),
        factors=patch(("alpha", "beta")),
        pointers=patch(_OPERANDS[0]),
        strides=patch(_OPERANDS[1]),
        number=element_types.number(_acc_of(config)),
        arrays=(cache.arrays, arrays),
        **more,
    )


def _acc_of(config: Gemm) -> str:
    return "f64" if isinstance(config, SpmmF64) else config.types.acc


def _stored_columns(problem: Problem) -> int:
    """Return the number of block columns of the matrix as it is stored."""
    return problem.block_rows if problem.transposed else problem.block_cols


def _product_fields(cache: MatrixCache, problem: Problem, index: tuple[int, ...] = (0, 0, 0)) -> dict[str, Any]:
    """Return the fields of `Product`, with zeros for the operands and the factors."""
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
    """Return the packed work list of a plan, without temporary memory."""
    names = ("items", "splits", "count", "columns", "blocks", "row_tiles")
    pointers = {name: x.data.ptr for name, x in zip(names, lists, strict=True)}
    return arguments.SCHEDULE.pack(**pointers, **dict.fromkeys(_SCRATCH, 0))


def _grid(config: Gemm, problem: Problem) -> tuple[int, ...]:
    """Return the grid of a kernel without a work list."""
    if isinstance(config, SpmvSmall):
        return (config.ctas(problem.block_rows, device.multiprocessors()),)
    if isinstance(config, Spmm):
        return config.grid(problem.block_rows, problem.N, problem.batches, device.multiprocessors())
    if isinstance(config, SpmmF64):
        return config.grid(problem.block_rows, problem.N, problem.batches)
    if isinstance(config, GemmFew):
        return config.grid(problem.block_rows, problem.R, problem.batches)
    assert not isinstance(config, GemmSm90 | GemmTurnedSm90 | GemmSm80)
    return config.grid(problem.block_rows * problem.batches, problem.R, problem.N)


def _long_rows(cache: MatrixCache, problem: Problem, config: SpmvSmall, ctas: int) -> tuple[LongRows, Any]:
    """Return the second argument of spmv_small, and the arrays to which it points."""
    where = (_stored_columns(problem), problem.transposed, config.long)
    rows = cache.long_rows(*where, config.piece)
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


def _block_map(cache: MatrixCache, config: GemmSm90 | GemmTurnedSm90) -> bytes:
    """Return the tensor map of A's blocks, which are stacked along their rows.

    For row tiles of fewer than 64 rows, the blocks are lines of 128 bytes if `config.flat`; otherwise the copy engine
    does not read them, and the map is empty.
    """
    data = cache.source[0]
    blocks, rows, cols = data.shape
    name, height = tensor_map.dtype_name(data.dtype), config.row_tile_height
    dims, strides, box, swizzle = (cols, blocks * rows), (cols * data.itemsize,), (128 // data.itemsize, height), "128B"
    if isinstance(config, GemmTurnedSm90):
        box, swizzle = (config.line // data.itemsize, height), f"{config.line}B"
    elif height < 64 and not config.lines:
        if not config.flat:
            return bytes(TENSOR_MAP_BYTES)
        line = 128 // data.itemsize
        dims, strides, box = (line, data.size // line), (128,), (line, height * config.depth // line)
    elif config.a_transposed:
        box = (64, config.depth)
    return Layout(name, dims, strides, box, swizzle).at(cache.pointer)


def _operand_maps(config: Gemm, B: Array, out: Array) -> tuple[Layout | None, Layout | None]:
    """Return the tensor maps of B and of the result; the latter is None if the result is not written in tiles."""
    if isinstance(config, GemmTurnedSm90):
        found = _map(B, False, (64, 16, config.tile_n // 64 if config.wide else 1), "128B", config.wide)
        return found, _map(out, False, (64, config.row_tile_height, 1), "128B")
    if not isinstance(config, GemmSm90):
        return None, None
    if config.b_transposed:
        row = B.itemsize * config.depth if config.row_tile_height < 64 else 128
        found = _map(B, True, (row // B.itemsize, config.tile_n, config.parts), f"{row}B", parts=config.parts)
    else:
        found = _map(B, False, (64, config.depth, config.tile_n // 64 if config.wide else 1), "128B", config.wide)
    if config.store == "rows":
        return found, _map(out, False, (64, 16, 1), "128B")
    if config.store == "columns":
        return found, _map(out, True, (16, 64, 1), "32B")
    return found, None


def _map(
    x: Array, columns: bool, box: tuple[int, int, int], swizzle: str, slabs: bool = False, parts: int = 1
) -> Layout:
    """Return the tensor map, in four dimensions, of a batch of row-major or column-major matrices.

    With `slabs`, a row-major matrix is divided into slabs of 64 columns, so that one copy can bring several of them.
    With two `parts`, the second part of a column-major matrix lies behind the first, and one copy brings both.
    """
    rows, cols = x.shape[-2:]
    dims, pitch = ((rows, cols), x.strides[-1]) if columns else ((cols, rows), x.strides[-2])
    count, slab_pitch = 1, pitch
    if slabs:
        dims, count, slab_pitch = (64, rows), cols // 64, 64 * x.itemsize
    elif parts == 2:
        count, slab_pitch = 2, cols * pitch
    batches, batch_pitch = (x.shape[0], x.strides[0]) if x.ndim == 3 and x.shape[0] > 1 else (1, pitch)
    pitches = (pitch, slab_pitch, batch_pitch)
    return Layout(tensor_map.dtype_name(x.dtype), (*dims, count, batches), pitches, (*box, 1), swizzle)


def _by_copies(cache: MatrixCache, call: ProductCall, orders: tuple[str, str]) -> bool:
    """Start the product with a copy of B, or with copies of its panels, if that is faster; tell whether it was started.

    Without memory for panels it is started with B itself, and the next call tries again.
    """
    width, parts = _column_panel(cache, call, orders), copies.column_parts(call.tf32)
    if width:
        room = _room(parts * call.B[..., :width].size, call.B.dtype)
        if room is None:
            product(replace(call, may_copy=False))
            return True
        for first in range(0, call.columns, width):  # one panel is copied after the other
            B, out = (x[..., first : first + width] for x in (call.B, call.out))
            product(replace(call, B=_columns_tf32(B, parts, room), out=out, parts=parts, may_copy=False))
        return True
    if orders[0]:
        return False
    readable = _with_aligned_rows(cache, call, orders[1])
    if readable is call.B:
        return False
    product(replace(call, B=readable, may_copy=False))
    return True


def _column_panel(cache: MatrixCache, call: ProductCall, orders: tuple[str, str]) -> int:
    """Return how many columns of B are copied at a time for a product in float32; 0 if B is not copied by columns."""
    if (
        call.acc != np.float32
        or call.B.dtype != np.float32
        or call.config is not None
        or forced_kernel.name is not None
    ):
        return 0
    problem = problem_of(cache, call, orders)
    width = copies.column_panel(problem)
    return width if width and measured.choice(problem) is None else 0


def _room(size: int, dtype: np.dtype[Any]) -> Array | None:
    """Return memory for a copy, or None if there is not enough: the product is then computed without the copy.

    During a capture it raises: a product that was not prepared would be prepared anew whenever the graph runs.
    """
    try:
        return cupy.empty(size, dtype)
    except MemoryError:
        if graphs.is_capturing():
            raise
        return None


def _columns_tf32(B: Array, parts: int, room: Array) -> Array:
    """Copy B to `room` column by column and return the copy: rounded to tf32, or the first of two parts of tf32.

    The second part lies behind the first.
    """
    batches = B.shape[0] if B.ndim == 3 else 1
    rows, columns = B.shape[-2:]
    copy = room[: parts * B.size].reshape(*B.shape[:-2], parts, columns, rows)
    steps = [step // B.itemsize for step in B.strides]
    packed = arguments.COLUMNS_TF32.pack(
        **{"from": B.data.ptr}, to=copy.data.ptr, batch=steps[0] if B.ndim == 3 else 0, row=steps[-2],
        column=steps[-1], rows=rows, columns=columns, batches=batches,
    )  # fmt: skip
    config = ColumnsTf32(parts)
    kernel = jit.load(config.spec(), jit.device_target())
    launching.start(kernel, config.grid(rows, columns, batches), (config.threads,), (jit.argument(packed),), (B, copy))
    return copy[..., 0, :, :].swapaxes(-1, -2)


def _with_aligned_rows(cache: MatrixCache, call: ProductCall, c_order: str) -> Array:
    """Return a copy of B whose rows start at multiples of 16 bytes if the product is faster with it, otherwise B.

    The tensor cores cannot read B itself.
    """
    B = call.B
    problem = replace(problem_of(cache, call, ("", c_order)), overwrite=True)
    few = forced_kernel.name in (None, "GemmFew") and heuristics.few_serves(problem)
    if few or not copies.wants_aligned_rows(problem):
        return B
    unit = 16 // B.itemsize
    padded = (*B.shape[:-1], -(-B.shape[-1] // unit) * unit)
    copy = cupy.empty(padded, B.dtype)[..., : B.shape[-1]]
    copy[...] = B
    return copy


def wants_columns(B: Array) -> bool:
    """Return whether the tensor cores need a column-major copy of this fp8 matrix; they read fp8 only along K."""
    return jit.device_target() == "sm_90a" and order_of(B) != "F" and B.shape[-1] > 1


def _words(number: np.dtype[Any], alpha: Any, beta: Any) -> tuple[Any, ...]:
    """Return the numbers that are packed for alpha and beta; negative integers wrap around as sums do."""
    kind = number.kind
    if kind == "f":
        return alpha, beta
    if kind == "c":
        return alpha.real, alpha.imag, beta.real, beta.imag
    if kind == "u":
        wrap = 1 << 8 * number.itemsize
        return int(alpha) % wrap, int(beta) % wrap
    return bool(alpha), bool(beta)
