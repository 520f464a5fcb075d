"""From a product on the GPU to a launch: the kernel for the operands, and its argument.

A call on a prepared matrix finds the kernel and its argument by where the operands lie, fills in alpha, beta and
scratch memory where they are others than last time, and starts it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import jit, tensor_map, workspace
from . import configs, heuristics, measured, work_list
from .matrix_cache import MatrixCache, StreamOrdered

#: Of `Product` in cuda/bsr.cuh behind alpha and beta: pointers, sizes, strides, block sides and the flag.
_PRODUCT = "6P11q3i"
#: `Schedule` of cuda/bsr.cuh: the work list, then scratch memory (counters and room for pieces).
_WORK_LIST = "6P"
_SCRATCH = struct.Struct("@3P")
#: `LongRows` of cuda/spmv_small.cu.
_LONG = struct.Struct("@6P")
#: alpha and beta.
_NUMBERS = {"f": "2f", "d": "2d", "F": "4f", "D": "4d", "I": "2I", "L": "2Q", "Q": "2Q", "?": "2?"}
#: Of A, that it stays in the L2 beside panels of B: 1 % at low densities, if it fits.
_KEPT_BYTES = 20 << 20
#: Of a tensor map, in bytes; from a row to the next, which kernels for few columns count in 32 bits.
_MOST_STRIDE, _MOST_PITCH = 2**40, 2**32
_MAP_BYTES = 128


@dataclass(slots=True)
class Plan:
    """A kernel with its launch shape and work list, for one matrix and one kind of right-hand side."""

    config: configs.Gemm
    kernel: Any
    grid: tuple[int, ...]
    threads: tuple[int]
    layout: struct.Struct
    #: alpha and beta: their dtype, and how and where they are packed
    number: np.dtype[Any]
    factors: struct.Struct
    factors_at: int
    #: of the index: indices, indptr, places; then sizes: block rows, block columns, blocks, N, batches
    pointers: tuple[int, ...]
    sizes: tuple[int, ...]
    sides: tuple[int, int]
    #: arrays behind the pointers
    kept: Any
    tensor: Tensor | None = None
    #: of spmv_small: rows that are too long for it
    long: Long | None = None
    shared_bytes: int = 0


@dataclass(slots=True)
class Long:
    """What spmv_small needs for long rows and for the shares of its CTAs."""

    pointers: tuple[int, ...]
    #: elements of sums, and counters
    scratch: tuple[int, int]


@dataclass(slots=True)
class Tensor:
    """What the tensor-core kernels need beyond a plan."""

    config: configs.GemmSm90 | configs.GemmSm80
    #: of the work list: items, splits, count, columns, blocks, slots
    pointers: tuple[int, ...]
    #: floats and counts for groups that come in pieces
    scratch: tuple[int, int]
    #: column tiles walked together, items or -1, and whether A stays in the L2
    walk: tuple[int, int, bool]
    #: of gemm_sm90: A as the copy engine sees it; gemm_sm80 takes no maps
    map_a: bytes | None
    #: where the argument has the pointers of scratch memory
    scratch_at: int = 0


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
        room = None
        counters = pieces = 0
        tensor, long = plan.tensor, plan.long
        if tensor is not None and tensor.map_a is not None:
            floats, counts = tensor.scratch
            room = workspace.temporary(floats, np.float32) if floats else None
            counters = workspace.counters(2 + counts).data.ptr
        elif long is not None and long.scratch[1]:  # otherwise no row can be long
            elements, counts = long.scratch
            room = workspace.temporary(elements, plan.number)
            counters = workspace.counters(counts).data.ptr
        if room is not None:
            pieces = room.data.ptr
        if type(alpha) is type(beta) is int:
            values = (alpha, beta, counters, pieces)
            filled = self.filled
            if filled is None or filled[0] != values:
                filled = self.filled = values, self._arguments(plan, *values)
            arguments = filled[1]
        else:
            arguments = self._arguments(plan, alpha, beta, counters, pieces)
        plan.kernel(plan.grid, plan.threads, arguments, shared_mem=plan.shared_bytes)

    def _arguments(self, plan: Plan, alpha: Any, beta: Any, counters: int, pieces: int) -> tuple[Any, ...]:
        packed = bytearray(self.template)
        plan.factors.pack_into(packed, plan.factors_at, *_words(plan.number, alpha, beta))
        if plan.tensor is not None and plan.tensor.map_a is not None:
            _SCRATCH.pack_into(packed, plan.tensor.scratch_at, counters, pieces, counters + 8)
        if plan.long is None:
            return (jit.argument(packed),)
        return jit.argument(packed), jit.argument(_LONG.pack(*plan.long.pointers, pieces, counters))


def product(
    prepared: MatrixCache,
    shape: tuple[int, int],
    B: Array,
    out: Array,
    acc: np.dtype[Any],
    alpha: Any,
    beta: Any,
    *,
    transposed: bool = False,
    tf32: bool = False,
    fp8: bool = False,
    config: configs.Gemm | None = None,
    copies: bool = False,
) -> Launch | None:
    """Start ``out = alpha * A @ B + beta * out`` on CuPy's current stream, with A of `shape` or its transpose.

    `config` asks for one kernel among the `heuristics.candidates`. `copies`: B may be copied if that pays. Returns what
    starts the same once more, unless B was copied.
    """
    overwrite = beta == 0
    key = (
        shape, B.data.ptr, B.shape, B.strides, B.dtype, out.data.ptr, out.strides, out.dtype, acc, overwrite,
        transposed, tf32, fp8, config, copies, measured.forced,
    )  # fmt: skip
    launch = prepared.launches.get(key)
    plan = None if launch is None else launch.plan()
    if launch is None or plan is None:
        b_order = _order(B)
        if copies and not b_order:
            readable = with_aligned_rows(prepared, shape, B, out, acc, transposed=transposed, tf32=tf32)
            if readable is not B:
                product(
                    prepared, shape, readable, out, acc, alpha, beta, transposed=transposed, tf32=tf32, fp8=fp8,
                    config=config,
                )  # fmt: skip
                return None
        made, template = _launch(prepared, shape, B, b_order, out, acc, overwrite, transposed, tf32, fp8, config)
        launch = Launch(ref(made), template)
        prepared.remember(key, launch)
        plan = made.get()
    launch.start(plan, alpha, beta)
    return launch


def _launch(
    prepared: MatrixCache,
    shape: tuple[int, int],
    B: Array,
    b_order: str,
    out: Array,
    acc: np.dtype[Any],
    overwrite: bool,
    transposed: bool,
    tf32: bool,
    fp8: bool,
    config: configs.Gemm | None,
) -> tuple[StreamOrdered, bytes]:
    """The plan for such operands, and its argument for these."""
    batches = B.shape[0] if B.ndim == 3 else 1
    key = (
        shape, B.dtype, out.dtype, acc, B.shape[-1], batches, b_order, _order(out), overwrite, transposed, tf32, fp8,
        config, measured.forced,
    )  # fmt: skip
    made = prepared.plan(key, lambda: _plan(prepared, problem_of(prepared, *key[:-2]), config))
    plan: Plan = made.value
    b_size, c_size = B.itemsize, out.itemsize
    b_strides, c_strides = B.strides, out.strides
    numbers = (
        *_words(plan.number, 0, 0),
        prepared.pointer,
        *plan.pointers,
        B.data.ptr,
        out.data.ptr,
        *plan.sizes,
        b_strides[-2] // b_size,
        b_strides[-1] // b_size,
        b_strides[0] // b_size if batches > 1 else 0,
        c_strides[-2] // c_size,
        c_strides[-1] // c_size,
        c_strides[0] // c_size if batches > 1 else 0,
        *plan.sides,
        not overwrite,
    )
    tensor = plan.tensor
    if tensor is None:
        return made, plan.layout.pack(*numbers)
    if tensor.map_a is None:
        return made, plan.layout.pack(*numbers, *tensor.pointers, 0, 0, 0)
    maps = tensor.map_a + _operand_maps(tensor, B, out)
    return made, maps + plan.layout.pack(*numbers, *tensor.pointers, 0, 0, 0, *tensor.walk)


def problem_of(
    prepared: MatrixCache,
    shape: tuple[int, int],
    b: np.dtype[Any],
    c: np.dtype[Any],
    acc: np.dtype[Any],
    N: int,
    batches: int = 1,
    b_order: str = "C",
    c_order: str = "C",
    overwrite: bool = True,
    transposed: bool = False,
    tf32: bool = False,
    fp8: bool = False,
) -> heuristics.Problem:
    """What decides the kernel, of a matrix of `shape` and operands of such dtypes and layouts."""
    data = prepared.source[0]
    sides, counts = data.shape[1:], (shape[0] // data.shape[1], shape[1] // data.shape[2])
    if transposed:
        sides, counts = sides[::-1], counts[::-1]
    index = np.dtype(np.int32) if transposed else prepared.indices_dtype
    names = configs.types(data.dtype, b, c, acc, index)
    if fp8:
        names = configs.scaled(names)
    return heuristics.Problem(
        jit.device_target(), names, sides[0], sides[1], N, batches, counts[0], counts[1], prepared.blocks, transposed,
        b_order, c_order, overwrite, prepared.pointer % 16 == 0, tf32,
    )  # fmt: skip


def _plan(prepared: MatrixCache, problem: heuristics.Problem, wanted: configs.Gemm | None) -> Plan:
    config = wanted or measured.choice(problem) or heuristics.gemm(problem)
    block_cols = problem.block_rows if problem.transposed else problem.block_cols
    kernel = jit.load(config.spec(), problem.arch)
    number = configs.number(problem.types.acc)
    factors = struct.Struct(f"@{_NUMBERS[number.char]}")
    product_format = f"{factors.format}{_PRODUCT}"
    schedule_format = f"{product_format}{_WORK_LIST}{_SCRATCH.format[1:]}"
    factors_at = 0
    sizes = (problem.block_rows, problem.block_cols, problem.blocks, problem.N, problem.batches)
    long = None
    if isinstance(config, configs.GemmSm90 | configs.GemmSm80):
        tensor, ctas, kept = _tensor(prepared, problem, config, block_cols)
        if tensor.map_a is None:
            layout = _packing(schedule_format, 0, 8)
        else:
            factors_at = 3 * _MAP_BYTES
            layout = _packing(f"{schedule_format}3i", factors_at, 64)
            tensor.scratch_at = factors_at + struct.calcsize(f"{product_format}{_WORK_LIST}")
        grid: tuple[int, ...] = (ctas,)
        pointers: tuple[int, ...] = (0, 0, 0)
    else:
        tensor = None
        kept = prepared.index(block_cols, problem.transposed)
        pointers = tuple(0 if x is None else x.data.ptr for x in kept)
        layout = _packing(product_format, 0, 16)
        if isinstance(config, configs.SpmvSmall):
            long, grid, rows = _long(prepared, problem, config, block_cols)
            kept = (*kept, rows)
        elif isinstance(config, configs.Spmm):
            grid = config.grid(problem.block_rows, problem.N, problem.batches, _multiprocessors())
        elif isinstance(config, configs.SpmmF64):
            grid = config.grid(problem.block_rows, problem.N, problem.batches)
        else:
            grid = config.grid(problem.block_rows * problem.batches, problem.R, problem.N)
    sides = (problem.R, problem.K)
    if config.shared_bytes:
        kernel.max_dynamic_shared_size_bytes = config.shared_bytes
    return Plan(
        config, kernel, grid, (config.threads,), layout, number, factors, factors_at, pointers, sizes, sides, kept,
        tensor, long, config.shared_bytes,
    )  # fmt: skip


def _long(
    prepared: MatrixCache, problem: heuristics.Problem, config: configs.SpmvSmall, block_cols: int
) -> tuple[Long, tuple[int], Any]:
    """Long rows, shares of CTAs, and the grid."""
    rows = prepared.long_rows(block_cols, problem.transposed, config.long)
    ctas = config.ctas(problem.block_rows, _multiprocessors())
    bounds = _shares(prepared, block_cols, problem.transposed, config.long, ctas) if config.in_chunks else None
    pointers = tuple(0 if x is None else x.data.ptr for x in (rows.pieces, rows.parents, rows.count, bounds))
    return Long(pointers, (rows.bound * problem.R, rows.bound)), (ctas,), (rows, bounds)


def _shares(prepared: MatrixCache, block_cols: int, transposed: bool, longest: int, count: int) -> Array:
    """Where `count` shares of neighbouring block rows begin, and where the last one ends; made once for a pattern."""
    indptr = prepared.index(block_cols, transposed)[1]
    key = ("shares", block_cols, transposed, longest, count)
    return prepared._remember(key, lambda: work_list.shares(prepared._backend, indptr, longest, count))


def _packing(fields: str, before: int, alignment: int) -> struct.Struct:
    """How a struct with these fields is packed behind `before` bytes, so that it all ends aligned."""
    return struct.Struct(f"{fields}{-(before + struct.calcsize(fields)) % alignment}x")


def _tensor(
    prepared: MatrixCache, problem: heuristics.Problem, config: configs.GemmSm90 | configs.GemmSm80, block_cols: int
) -> tuple[Tensor, int, Any]:
    """Work list and launch of a tensor-core kernel."""
    pattern = prepared.pattern(block_cols, problem.transposed)
    groups = prepared.groups(pattern, problem.R // config.slot_rows, config.slots)
    column_tiles = -(-problem.N // config.tile_n) * problem.batches
    multiprocessors = _multiprocessors()
    tiles = groups.count * column_tiles
    if isinstance(config, configs.GemmSm80):
        items = prepared.items(pattern, groups)
        ctas = min(tiles, multiprocessors * config.ctas(problem.arch))
    else:
        items = prepared.items(pattern, groups, problem.K, column_tiles, multiprocessors)
        # As few CTAs as finish in the same number of rounds: the rest would only draw power.
        ctas = multiprocessors if items.pieces else -(-tiles // -(-tiles // multiprocessors))
    arrays = (items.items, items.splits, items.count, groups.columns, groups.blocks, groups.slots)
    pointers = tuple(x.data.ptr for x in arrays)
    if isinstance(config, configs.GemmSm80):
        return Tensor(config, pointers, (0, 0), (0, 0, False), None), ctas, arrays
    tiles_of_pieces = items.pieces * column_tiles
    scratch = (tiles_of_pieces * config.tile_m * config.tile_n, tiles_of_pieces * 2)
    walk = (
        config.group(problem.block_cols * problem.K),
        -1 if items.pieces else groups.count,
        prepared.source[0].nbytes <= _KEPT_BYTES,
    )
    map_a = _block_map(prepared, config)
    return Tensor(config, pointers, scratch, walk, map_a), ctas, arrays


def _block_map(prepared: MatrixCache, config: configs.GemmSm90) -> bytes:
    """How the copy engine sees A's blocks: one below the other, those of small slots as lines of 128 bytes."""
    data = prepared.source[0]
    blocks, rows, cols = data.shape
    if config.slot_rows < 64:
        if not config.flat:
            return bytes(_MAP_BYTES)
        dims, box = (64, data.size // 64), (64, config.slot_rows * config.depth // 64)
        return tensor_map.encode(prepared.pointer, str(data.dtype), dims, (128,), box, swizzle="128B").tobytes()
    box = (64, config.depth) if config.a_transposed else (128 // data.itemsize, config.slot_rows)
    dims, strides = (cols, blocks * rows), (cols * data.itemsize,)
    return tensor_map.encode(prepared.pointer, str(data.dtype), dims, strides, box, swizzle="128B").tobytes()


def _operand_maps(tensor: Tensor, B: Array, out: Array) -> bytes:
    """How the copy engine sees B and, where it is written in tiles, the result."""
    config = tensor.config
    assert isinstance(config, configs.GemmSm90)
    if config.b_transposed:
        row = 2 * config.depth if config.slot_rows < 64 else 128
        found = _map(B, True, (row // B.itemsize, config.tile_n, 1), f"{row}B")
    else:
        found = _map(B, False, (64, config.depth, config.tile_n // 64 if config.wide else 1), "128B", config.wide)
    if config.store == "rows":
        return found + _map(out, False, (64, 16, 1), "128B")
    if config.store == "columns":
        return found + _map(out, True, (16, 64, 1), "32B")
    return found + bytes(_MAP_BYTES)


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


def _order(x: Array) -> str:
    """ "C" or "F" for matrices that the copy engine can read along rows or columns, otherwise nothing."""
    strides = x.strides
    if x.data.ptr % 16 or (len(strides) == 3 and x.shape[0] > 1 and not 0 < strides[0] < _MOST_STRIDE):
        return ""
    if len(strides) == 3 and strides[0] % 16:
        return ""
    size = x.itemsize
    row, col = strides[-2:]
    rows, cols = x.shape[-2:]
    if cols == 1 and row == size:
        return "F"  # nobody asks where a second column is
    if col == size and row % 16 == 0 and size * cols <= row < _MOST_PITCH:
        return "C"
    if row == size and col % 16 == 0 and size * rows <= col < _MOST_PITCH:
        return "F"
    return ""


def with_aligned_rows(
    prepared: MatrixCache,
    shape: tuple[int, int],
    B: Array,
    out: Array,
    acc: np.dtype[Any],
    *,
    transposed: bool = False,
    tf32: bool = False,
) -> Array:
    """B, which the tensor cores cannot read, or a copy whose rows begin at multiples of 16 bytes, if it pays."""
    batches = B.shape[0] if B.ndim == 3 else 1
    problem = problem_of(
        prepared, shape, B.dtype, out.dtype, acc, B.shape[-1], batches, "", _order(out), True, transposed, tf32
    )
    if not heuristics.wants_aligned_rows(problem):
        return B
    unit = 16 // B.itemsize
    wide = (*B.shape[:-1], -(-B.shape[-1] // unit) * unit)
    copy = workspace.retain_for_graph(lambda: cupy.empty(wide, B.dtype))[..., : B.shape[-1]]
    copy[...] = B
    return copy


def wants_columns(B: Array) -> bool:
    """Would the tensor cores read these bytes of fp8, if only they were column-major? They cannot read across K."""
    return jit.device_target() == "sm_90a" and _order(B) != "F" and B.shape[-1] > 1


@cache
def _multiprocessors() -> int:
    """Of CuPy's current device; all devices of one architecture count alike."""
    return int(cupy.cuda.Device().attributes["MultiProcessorCount"])


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
