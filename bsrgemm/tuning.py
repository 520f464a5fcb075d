"""Which kernel serves which problem, and with which constants: pure functions, no device, no array.

A config is a small frozen dataclass; `spec()` is what the loader compiles. Every config that can be returned for
the dtypes of bsrgemm is listed by `every_config`, so that all of them can be compiled ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from .dtypes import BFLOAT16, BOOL, DEVICE_DTYPES, HALF_DTYPES, accumulator_dtype, result_dtype
from .jit import KernelSpec

_CUDA_NAMES = {
    BOOL: "boolean",
    np.dtype("i1"): "i8",
    np.dtype("u1"): "u8",
    np.dtype("i2"): "i16",
    np.dtype("u2"): "u16",
    np.dtype("i4"): "i32",
    np.dtype("u4"): "u32",
    np.dtype("i8"): "i64",
    np.dtype("u8"): "u64",
    np.dtype("f2"): "f16",
    BFLOAT16: "bf16",
    np.dtype("f4"): "f32",
    np.dtype("f8"): "f64",
    np.dtype("c8"): "c64",
    np.dtype("c16"): "c128",
}

#: Bytes of an element.
_BYTES = {name: dtype.itemsize for dtype, name in _CUDA_NAMES.items()} | {"e4m3": 1}
#: What wgmma calls an element, and how many it takes along K.
_WGMMA = {"f16": ("f16", 16), "bf16": ("bf16", 16), "f32": ("tf32", 8), "e4m3": ("e4m3", 32)}
STORES = ("direct", "rows", "columns")

OPERATIONS = {"add": "kAdd", "maximum": "kMaximum", "minimum": "kMinimum", "fmax": "kFmax", "fmin": "kFmin"}

#: The largest grid along x, and along y and z.
_MAX_X, _MAX_YZ = 2**31 - 1, 65535
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)

#: Block sides up to this are compiled into the SpMV kernel: the division by them is then a multiplication.
_SMALL_BLOCK = 8


def element(dtype: np.dtype[Any]) -> str:
    """The name of a dtype in cuda/types.cuh."""
    return _CUDA_NAMES[dtype]


@lru_cache(maxsize=256)
def accumulator(dtype: np.dtype[Any]) -> tuple[str, np.dtype[Any]]:
    """What sums of `dtype` are kept in: its name in cuda/types.cuh and a NumPy dtype of the same bytes.

    Integers are summed modulo 2^32 or 2^64, whose low bits are those of the narrower type.
    """
    dtype = accumulator_dtype(dtype)
    if dtype.kind in "iu":
        dtype = np.dtype(np.uint32 if dtype.itemsize <= 4 else np.uint64)
    return element(dtype), dtype


@cache
def number(acc: str) -> np.dtype[Any]:
    """The NumPy dtype of an accumulator, by its CUDA name."""
    return next(dtype for dtype, name in _CUDA_NAMES.items() if name == acc)


@dataclass(frozen=True)
class Types:
    """Element types of the two operands, the result and the sums, and the index type, by their CUDA names."""

    a: str
    b: str
    c: str
    acc: str
    index: str = "i32"

    def defines(self) -> tuple[tuple[str, str], ...]:
        return (
            ("ELEMENT_A", self.a),
            ("ELEMENT_B", self.b),
            ("ELEMENT_C", self.c),
            ("ACCUMULATOR", self.acc),
            ("INDEX", self.index),
        )


@lru_cache(maxsize=4096)
def types(a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], acc: np.dtype[Any], index: np.dtype[Any]) -> Types:
    return Types(element(a), element(b), element(c), accumulator(acc)[0], element(index))


def scaled(names: Types) -> Types:
    """The same with operands that are bytes of fp8."""
    return replace(names, a="e4m3", b="e4m3")


@dataclass(frozen=True)
class GemmSimt:
    """``A @ B`` on the plain cores: any block, any dtype, any strides."""

    types: Types
    rows: int
    cols: int
    lanes: int
    a_transposed: bool = False

    threads = 128

    def spec(self) -> KernelSpec:
        shape = (
            ("ROWS", self.rows),
            ("COLS", self.cols),
            ("LANES", self.lanes),
            ("A_TRANSPOSED", int(self.a_transposed)),
        )
        return KernelSpec("gemm_simt.cu", "gemm_simt", (*self.types.defines(), *shape))

    def grid(self, block_rows: int, R: int, N: int) -> tuple[int, int, int]:
        """Block rows (of all batches), columns and rows of a block along x, y and z; the kernel loops over the rest."""
        return (
            min(_MAX_X, -(-block_rows // (self.threads // self.lanes))),
            min(_MAX_YZ, -(-N // (self.lanes * self.cols))),
            min(_MAX_YZ, -(-R // self.rows)),
        )


@dataclass(frozen=True)
class GemmSm90:
    """``A @ B`` on Hopper's tensor cores, tiles of 128 x `tile_n`."""

    types: Types
    slot_rows: int
    tile_n: int
    depth: int
    tail: int
    a_transposed: bool
    b_transposed: bool
    #: how C is written: "direct", or as tiles of "rows" or "columns"
    store: str
    #: all slabs of 64 columns of a panel of B in one copy
    wide: bool
    #: small slots: what a step takes of a block is one piece of memory
    flat: bool
    #: columns of B that are walked together
    section: int = 1024

    threads = 384
    tile_m = 128

    @property
    def slots(self) -> int:
        """Slots that share a tile."""
        return self.tile_m // self.slot_rows

    @property
    def stages(self) -> int:
        """As many as fit."""
        return {256: 4, 128: 6, 64: 8}[self.tile_n]

    def spec(self) -> KernelSpec:
        mma, k = _WGMMA[self.types.a]
        return KernelSpec(
            "gemm_sm90.cu",
            "gemm_sm90",
            (
                ("ELEMENT_A", self.types.a),
                ("ELEMENT_C", self.types.c),
                ("MMA_TYPE", mma),
                ("MMA_K", k),
                ("SLOT_ROWS", self.slot_rows),
                ("TILE_N", self.tile_n),
                ("DEPTH", self.depth),
                ("TAIL", self.tail),
                ("A_TRANSPOSED", int(self.a_transposed)),
                ("B_TRANSPOSED", int(self.b_transposed)),
                ("STORE", STORES.index(self.store)),
                ("WIDE", int(self.wide)),
                ("FLAT", int(self.flat)),
                ("STAGES", self.stages),
            ),
        )

    @property
    def shared_bytes(self) -> int:
        """The struct Shared of the kernel, and what aligns it: 230,912 of 232,448 bytes at most."""
        return 1024 + self.stages * 128 * (self.tile_m + self.tile_n) + 16 * 2048 + 512

    def group(self, K: int) -> int:
        """Column tiles walked together: those of a section, as long as their panels of B fit 20 MB of the L2.

        At K = 8192, 2048 columns cost 3-7 % and 4096 cost 20 %.
        """
        bytes_ = K * self.tile_n * _BYTES[self.types.b]
        return max(1, min(self.section // self.tile_n, (20 << 20) // bytes_))


@dataclass(frozen=True)
class GemmSm80:
    """``A @ B`` on the tensor cores of any card since Ampere: tiles of `slots` slots by `tile_n` columns."""

    types: Types
    #: how elements are multiplied: "MMA_F16", "MMA_3XTF32"...
    kind: str
    slot_rows: int
    #: slots that share a tile
    slots: int
    tile_n: int
    #: warps below each other, which divide the slots among them
    warps_m: int
    threads: int
    stages: int
    a_transposed: bool
    b_transposed: bool

    def spec(self) -> KernelSpec:
        shape = (
            ("MMA", self.kind),
            ("SLOT_ROWS", self.slot_rows),
            ("SLOTS", self.slots),
            ("TILE_N", self.tile_n),
            ("WARPS_M", self.warps_m),
            ("THREADS", self.threads),
            ("A_TRANSPOSED", int(self.a_transposed)),
            ("B_TRANSPOSED", int(self.b_transposed)),
            ("STAGES", self.stages),
        )
        names = tuple(d for d in self.types.defines() if d[0] != "INDEX")
        return KernelSpec("gemm_sm80.cu", "gemm_sm80", (*names, *shape))

    @property
    def shared_bytes(self) -> int:
        """The struct Shared of the kernel at most."""
        return self.stages * 128 * (self.slots * self.slot_rows + self.tile_n) + 1024

    def ctas(self, arch: str) -> int:
        """CTAs that share a multiprocessor: kCtas of the kernel."""
        words = self.slots * self.slot_rows * self.tile_n // self.threads * (2 if self.kind == "MMA_F64" else 1)
        light = self.threads < 256 or (words <= 64 and self.kind != "MMA_3XTF32")
        return 2 if light and 2 * (self.shared_bytes + 1024) <= (_shared_kb(arch) + 1) * 1024 else 1


@dataclass(frozen=True)
class Spmv:
    """``A @ x``: lanes share a block row."""

    types: Types
    lanes: int
    rows: int
    block_r: int
    block_c: int
    a_transposed: bool = False
    #: columns of a block that a lane reads at once
    vector: int = 1

    threads = 128

    def spec(self) -> KernelSpec:
        shape = (
            ("LANES", self.lanes),
            ("ROWS", self.rows),
            ("BLOCK_R", self.block_r),
            ("BLOCK_C", self.block_c),
            ("A_TRANSPOSED", int(self.a_transposed)),
            ("VECTOR", self.vector),
        )
        return KernelSpec("spmv.cu", "spmv", (*self.types.defines(), *shape))

    def grid(self, block_rows: int, R: int, N: int) -> tuple[int, int]:
        """Block rows along x, the rows of a block along y."""
        return min(_MAX_X, -(-block_rows // (self.threads // self.lanes))), min(_MAX_YZ, -(-R // self.rows))


@dataclass(frozen=True)
class SpmvSmall:
    """``A @ x``, blocks of up to 16 x 16: `lanes` share a block row, `row_lanes` by `column_lanes` of them a block."""

    types: Types
    block_r: int
    block_c: int
    lanes: int
    row_lanes: int
    column_lanes: int
    #: blocks of a lane under way
    together: int
    #: neighbouring block rows are left to one CTA
    in_chunks: bool
    a_transposed: bool = False
    threads: int = 128
    #: CTAs that share a multiprocessor at least
    at_least: int = 4

    #: kLong of the kernel: blocks of a row, or of a piece of a longer one
    long = 1024

    def spec(self) -> KernelSpec:
        shape = (
            ("BLOCK_R", self.block_r),
            ("BLOCK_C", self.block_c),
            ("LANES", self.lanes),
            ("ROW_LANES", self.row_lanes),
            ("COLUMN_LANES", self.column_lanes),
            ("TOGETHER", self.together),
            ("IN_CHUNKS", int(self.in_chunks)),
            ("A_TRANSPOSED", int(self.a_transposed)),
            ("THREADS", self.threads),
            ("CTAS", self.at_least),
        )
        return KernelSpec("spmv_small.cu", "spmv_small", (*self.types.defines(), *shape))

    def ctas(self, block_rows: int, multiprocessors: int) -> int:
        """CTAs for the rows that are not long."""
        all_rows = -(-block_rows // (self.threads // self.lanes))
        return max(1, min(_MAX_X // 2, min(all_rows, self.at_least * multiprocessors) if self.in_chunks else all_rows))


@dataclass(frozen=True)
class Spmm:
    """``A @ B``, blocks of up to 16 x 16, few columns: a warp has a block row, `lanes` of it `width` columns each."""

    types: Types
    block_r: int
    block_c: int
    lanes: int
    width: int
    #: blocks of a lane under way
    together: int
    a_transposed: bool = False
    #: CTAs that share a multiprocessor at least
    at_least: int = 3

    threads = 128

    def spec(self) -> KernelSpec:
        shape = (
            ("BLOCK_R", self.block_r),
            ("BLOCK_C", self.block_c),
            ("LANES", self.lanes),
            ("WIDTH", self.width),
            ("TOGETHER", self.together),
            ("A_TRANSPOSED", int(self.a_transposed)),
            ("CTAS", self.at_least),
        )
        return KernelSpec("spmm.cu", "spmm", (*self.types.defines(), *shape))

    def grid(self, block_rows: int, R: int, N: int) -> tuple[int, int]:
        """Block rows (of all batches) and columns."""
        return min(_MAX_X, -(-block_rows // (self.threads // 32))), min(_MAX_YZ, -(-N // (self.lanes * self.width)))


@dataclass(frozen=True)
class Pairs:
    """The numeric half of ``BSR @ BSR``."""

    types: Types
    lanes: int

    threads = 128

    def spec(self) -> KernelSpec:
        return KernelSpec("pairs.cu", "pairs", (*self.types.defines(), ("LANES", self.lanes)))

    def grid(self, segments: int) -> tuple[int]:
        return (min(_MAX_X, -(-segments // (self.threads // self.lanes))),)


@dataclass(frozen=True)
class BlocksSm90:
    """Blocks of a product of 16-bit floats on Hopper's tensor cores: ``BSR @ BSR``, or `sampled` of dense matrices."""

    element: str
    out: str
    sampled: bool
    #: K runs fastest in B
    b_transposed: bool
    tile_m: int
    part_n: int
    #: of a tile, side by side
    parts: int

    threads = 384

    @property
    def tile_n(self) -> int:
        return self.part_n * self.parts

    @property
    def stages(self) -> int:
        """As many as fit."""
        return (200 << 10) // (128 * (self.tile_m + self.tile_n))

    @property
    def shared_bytes(self) -> int:
        """The struct Shared of the kernel."""
        return self.stages * 128 * (self.tile_m + self.tile_n) + (16 << 10) + 1024

    def spec(self) -> KernelSpec:
        mma, k = _WGMMA[self.element]
        return KernelSpec(
            "blocks_sm90.cu",
            "blocks_sm90",
            (
                ("ELEMENT_A", self.element),
                ("ELEMENT_C", self.out),
                ("MMA_TYPE", mma),
                ("MMA_K", k),
                ("SAMPLED", int(self.sampled)),
                ("B_TRANSPOSED", int(self.b_transposed)),
                ("TILE_M", self.tile_m),
                ("PART_N", self.part_n),
                ("PARTS", self.parts),
                ("STAGES", self.stages),
            ),
        )


@dataclass(frozen=True)
class Segment:
    """Reductions over segments of rows."""

    element: str
    acc: str
    operation: str
    lanes: int
    columns: int

    threads = 128

    def spec(self) -> KernelSpec:
        return KernelSpec(
            "segment.cu",
            "segment",
            (
                ("ELEMENT_A", self.element),
                ("ACCUMULATOR", self.acc),
                ("OPERATION", self.operation),
                ("LANES", self.lanes),
                ("COLUMNS", self.columns),
            ),
        )

    def grid(self, segments: int) -> tuple[int]:
        return (min(_MAX_X, -(-segments // (self.threads // (self.lanes * self.columns)))),)


@dataclass(frozen=True)
class Expand:
    """Rows of the entries of a compressed index."""

    index: str

    threads = 128
    entries = 8

    def spec(self) -> KernelSpec:
        return KernelSpec("expand.cu", "expand", (("INDEX", self.index),))

    def grid(self, entries: int) -> tuple[int]:
        return (min(_MAX_X, -(-entries // (self.threads * self.entries))),)


@dataclass(frozen=True)
class Match:
    """One of the three kernels that find out which rows go well together."""

    entry: str

    threads = 256
    window = 512
    side = 64

    def spec(self) -> KernelSpec:
        return KernelSpec("match.cu", self.entry, ())


Config = GemmSimt | GemmSm80 | GemmSm90 | Spmv | SpmvSmall | Spmm | Pairs | BlocksSm90 | Segment | Expand | Match


def _floor_power_of_two(n: int, most: int) -> int:
    return 1 << (max(1, min(n, most)).bit_length() - 1)


def _ceil_power_of_two(n: int, most: int) -> int:
    return min(most, 1 << (max(1, n) - 1).bit_length())


@dataclass(frozen=True)
class Problem:
    """What decides the kernel of a product. R, K and the counts describe A as it is used, transposed or not."""

    arch: str
    types: Types
    R: int
    K: int
    N: int
    batches: int
    block_rows: int
    block_cols: int
    blocks: int
    transposed: bool
    #: "C" or "F" for operands whose rows or columns the copy engine can read, otherwise ""
    b_order: str
    c_order: str
    #: C is not read
    overwrite: bool
    #: A's data starts at a multiple of 16 bytes
    aligned: bool
    #: for float32: may its products be rounded to tf32?
    tf32: bool = False


Gemm = GemmSm90 | GemmSm80 | GemmSimt | Spmv | SpmvSmall | Spmm


def gemm(problem: Problem) -> Gemm:
    """The kernel for a product with dense right-hand sides: on the tensor cores where they can do it."""
    if _tensor_cores_serve(problem):
        if sm90_serves(problem):
            return gemm_sm90(problem)
        if sm80_serves(problem):
            return gemm_sm80(problem)
    return plain(problem)


def plain(problem: Problem) -> GemmSimt | Spmv | SpmvSmall | Spmm:
    """The kernel for a product on the plain cores."""
    small = max(problem.R, problem.K) <= _MOST_SMALL and problem.blocks < 2**31
    if small and problem.N == 1 and problem.batches == 1:
        return spmv_small(problem.types, problem.R, problem.K, problem.transposed, problem.aligned)
    if small and 1 < problem.N <= _FEW_COLUMNS:
        return spmm_small(problem.types, problem.R, problem.K, problem.N, problem.transposed, problem.b_order == "C")
    return spmm(problem.types, problem.R, problem.K, problem.N, problem.transposed, problem.aligned)


def candidates(problem: Problem) -> Iterator[Gemm]:
    """What `bsrgemm.tune` tries: `gemm`'s choice first, then its neighbours, then the other kernels that can do it."""
    first = gemm(problem)
    yield first
    if isinstance(first, GemmSm90):
        heights = [h for h in (128, 64) if h <= first.slot_rows] or [first.slot_rows]
        for slot_rows, tile_n, section in itertools.product(heights, (256, 128, 64), (512, 1024, 2048)):
            other = replace(first, slot_rows=slot_rows, tile_n=tile_n, section=section)
            if other != first and tile_n <= section:
                yield other
    if _tensor_cores_serve(problem) and sm80_serves(problem):
        for slot_rows in (128, 64, 32, 16):
            for other80 in _sm80_of(problem, slot_rows):
                if problem.R % slot_rows == 0 and other80 != first:
                    yield other80
    for simple in (plain(problem), spmm(problem.types, problem.R, problem.K, problem.N, problem.transposed)):
        if simple != first:
            yield simple


#: Fewer columns than this are left to the plain cores, unless A has so many elements; a vector always is.
_TENSOR_COLUMNS, _LARGE = 16, 1 << 20
#: A product of so many elements of A by columns of B is worth a copy of B.
_WORTH_A_COPY = 1 << 22


def _tensor_cores_serve(problem: Problem) -> bool:
    """Work lists and tiles are counted in 31 bits; few columns of a small matrix are left to the plain cores."""
    rows, cols = problem.block_rows * problem.R, problem.block_cols * problem.K
    fewest = 2 if problem.blocks * problem.R * problem.K >= _LARGE else _TENSOR_COLUMNS
    slots = problem.blocks * max(1, problem.R // 16)
    return (
        problem.aligned
        and problem.types.a == problem.types.b
        and fewest <= problem.N
        and 0 < slots < 2**28
        and max(rows, cols, problem.blocks * problem.R, problem.blocks * problem.K) < 2**31
        and (rows // 16 + 1) * (problem.N // 64 + 1) * problem.batches < 2**31
    )


@lru_cache(maxsize=1024)
def wants_aligned_rows(problem: Problem) -> bool:
    """Would the tensor cores do this product if only the rows of B began at multiples of 16 bytes, and does that pay?

    >>> names = types(*[np.dtype("float16")] * 3, np.dtype("float32"), np.dtype("int32"))
    >>> sizes = {"R": 64, "K": 64, "batches": 1, "block_rows": 128, "block_cols": 128, "blocks": 3584}
    >>> how = {"transposed": False, "b_order": "", "c_order": "", "overwrite": True, "aligned": True}
    >>> odd = Problem("sm_90a", names, N=101, **sizes, **how)
    >>> [wants_aligned_rows(replace(odd, **x)) for x in ({}, {"b_order": "C"}, {"blocks": 9})]
    [True, False, False]
    """
    work = problem.blocks * problem.R * problem.K * problem.N * problem.batches
    if problem.b_order or problem.N == 1 or work < _WORTH_A_COPY:
        return False
    aligned = replace(problem, b_order="C")
    return _tensor_cores_serve(aligned) and (sm90_serves(aligned) or sm80_serves(aligned))


def sm90_serves(problem: Problem) -> bool:
    """Can gemm_sm90 do this product? It copies B by tiles, and reads across K in 16-bit floats only."""
    names = problem.types
    if problem.arch != "sm_90a" or names.acc != "f32" or not problem.b_order:
        return False
    if names.a in ("f16", "bf16"):
        return names.c in (names.a, "f32") and problem.R % 16 == 0 and problem.K % 16 == 0
    straight = not problem.transposed and problem.b_order == "F" and problem.R % 64 == 0
    if names.a == "e4m3":
        return straight and problem.K % 32 == 0 and names.c in ("f16", "bf16", "f32")
    return straight and names.a == "f32" and problem.tf32 and problem.K % 8 == 0 and names.c == "f32"


#: Half of the multiprocessors of the largest card.
_FEW_TILES = 66


def gemm_sm90(problem: Problem) -> GemmSm90:
    """Slots as high as the block allows: from 64 rows on A needs no registers, from 128 no merging.

    A stage holds 128 bytes of K. Blocks whose K is no multiple of that are walked in equal steps where there are such,
    otherwise in full ones and a tail.
    """
    names, R, K, N = problem.types, problem.R, problem.K, problem.N
    slot_rows = next(h for h in (128, 64, 32, 16) if R % h == 0)
    full = 128 // _BYTES[names.a]
    if slot_rows < 64:
        depth = next(d for d in (64, 32, 16) if K % d == 0)
        tail = 0
    else:
        steps = (full, 3 * full // 4, full // 2) if names.a in ("f16", "bf16") else (full,)
        depth = K if full > K and names.a in ("f16", "bf16") else next((d for d in steps if K % d == 0), full)
        tail = K % depth
    tile_n = 64 if N <= 64 else 128 if N <= 128 else 256
    if tile_n == 256 and -(-problem.block_rows * R // 128) * -(-N // 256) * problem.batches <= _FEW_TILES:
        tile_n = 128  # narrow tiles rather than pieces of wide ones: 265 against 249 TFLOP/s at block 64, N = 256
    pieces = problem.overwrite and names.c in ("f16", "bf16")
    store = {"C": "rows", "F": "columns"}.get(problem.c_order, "direct") if pieces else "direct"
    flat = slot_rows < 64 and (slot_rows == R if problem.transposed else depth == K)
    wide = problem.b_order == "C" and N % 64 == 0
    return GemmSm90(
        names, slot_rows, tile_n, depth, tail, problem.transposed, problem.b_order == "F", store, wide, flat
    )  # fmt: skip


#: Element -> (how it is multiplied, columns of A that one instruction takes).
_MMA = {
    "f16": ("MMA_F16", 16),
    "bf16": ("MMA_BF16", 16),
    "f32": ("MMA_3XTF32", 8),
    "f64": ("MMA_F64", 8),
    "i8": ("MMA_S8", 32),
}


def sm80_serves(problem: Problem) -> bool:
    """Can gemm_sm80 do this product? It copies pieces of 16 bytes."""
    names = problem.types
    if names.a not in _MMA or not problem.b_order or not tensor_arch(problem.arch):
        return False
    results = {"f16": ("f16", "f32"), "bf16": ("bf16", "f32"), "i8": ("i32",)}.get(names.a, (names.a,))
    sums = {"f64": "f64", "i8": "u32"}.get(names.a, "f32")
    line = (problem.R if problem.transposed else problem.K) * _BYTES[names.a]
    return (
        names.c in results
        and names.acc == sums
        and problem.R % 16 == 0
        and problem.K % _MMA[names.a][1] == 0
        and line % 16 == 0
    )


def tensor_arch(arch: str) -> bool:
    """Has the card what gemm_sm80 needs? Those before Ampere have no asynchronous copies."""
    return int("".join(c for c in arch if c.isdigit())) >= 80


def _shared_kb(arch: str) -> int:
    """What a CTA can have of the shared memory; a multiprocessor has 1 KB more."""
    number = int("".join(c for c in arch if c.isdigit()))
    return 163 if number in (80, 87) else 227 if 90 <= number < 120 else 99


def _sm80_tiles(kind: str, slot_rows: int, shared_kb: int) -> Iterator[tuple[int, int, int, int, int]]:
    """{slots, columns, warps below each other, threads, stages} of a tile, the usual one first.

    Measured on an H200 at density .22: rows of one slot win wherever an instruction takes long (tf32 109 against 82
    TFLOP/s at block 32, float64 45 against 33), since no warp waits for the slots of another. 16-bit types want the
    reuse of B by several slots.
    """
    if slot_rows < 64 and kind in ("MMA_TF32", "MMA_F64") and shared_kb > 99:
        yield max(1, 32 // slot_rows), 256, 1, 256, 3 if shared_kb > 163 else 2
    if kind == "MMA_3XTF32" and slot_rows < 128:
        yield 64 // slot_rows, 128, 1, 128, 4 if shared_kb > 99 else 3
    if kind not in ("MMA_3XTF32", "MMA_F64") and shared_kb > 99:
        yield 128 // slot_rows, 256, 2, 256, 4 if shared_kb > 163 else 3
    yield 128 // slot_rows, 128, 2, 256, 3


def _sm80_of(problem: Problem, slot_rows: int) -> list[GemmSm80]:
    """float32 as three products of tf32, which keep its accuracy, unless one will do."""
    kind = "MMA_TF32" if problem.types.a == "f32" and problem.tf32 else _MMA[problem.types.a][0]
    tiles = _sm80_tiles(kind, slot_rows, _shared_kb(problem.arch))
    transposes = (problem.transposed, problem.b_order == "F")
    return [GemmSm80(problem.types, kind, slot_rows, *tile, *transposes) for tile in tiles]


#: Elements of a result that give each multiprocessor of the largest card two wide tiles.
_WIDE = 2 * 132 * 128 * 256


def gemm_sm80(problem: Problem) -> GemmSm80:
    """Wide tiles where there are enough of them."""
    slot_rows = next(h for h in (128, 64, 32, 16) if problem.R % h == 0)
    few = problem.N <= 128 or problem.block_rows * problem.R * problem.N * problem.batches < _WIDE
    return _sm80_of(problem, slot_rows)[-1 if few else 0]


#: Sides of blocks, and columns, that the kernels for small ones take.
_MOST_SMALL, _FEW_COLUMNS = 16, 128
#: Blocks of a row of a mesh of hexahedra, and registers for values that a lane has under way.
_USUAL_ROW, _MOST_WORDS = 27, 36


@lru_cache(maxsize=4096)
def spmv_small(names: Types, R: int, K: int, transposed: bool = False, aligned: bool = False) -> SpmvSmall:
    """The kernel for a product of small blocks with one vector: of 2100 ways on an H200, rules that are near the best.

    A lane takes 16 or 8 bytes of a row of a block, where rows start at multiples of them, otherwise one element, and so
    many rows that it has 24 bytes of a block. The more blocks a lane has under way, the better, as long as registers
    allow: those of a row of 27 at once, or three or four, whichever leaves fewer lanes idle at its end. The smallest
    blocks are left to one large CTA a multiprocessor, whose rows are neighbours: x stays in the L1.
    """
    size, columns = _BYTES[names.a], 1
    if aligned and not transposed:
        columns = next((n for n in (16 // size, 8 // size) if n > 1 and K % n == 0), 1)
    across = K // columns
    fits = [n for n in range(1, R + 1) if R % n == 0 and n * across <= 32 and R // n * columns * size >= 24]
    down = max(fits, default=1)
    lanes = 8 if R * K <= 4 else 16 if down * across <= 7 else 32
    words = R // down * columns * max(1, size // 4)
    side = lanes // (down * across)
    whole = -(-_USUAL_ROW // side)
    if whole <= 6 and whole * words <= _MOST_WORDS:
        together = whole
    else:
        few = [n for n in (4, 3) if n * words <= _MOST_WORDS] or [max(1, min(2, _MOST_WORDS // words))]
        together = min(few, key=lambda n: -(-_USUAL_ROW // (side * n)) * side * n)
    if R * K * size <= 72:
        threads, at_least = 1024 if together * words <= 24 else 768, 1
        return SpmvSmall(names, R, K, lanes, down, across, together, True, transposed, threads, at_least)
    at_least = 4 if R // down * (1 + together * columns) * number(names.acc).itemsize <= 256 else 2
    return SpmvSmall(names, R, K, lanes, down, across, together, False, transposed, 128, at_least)


@lru_cache(maxsize=4096)
def spmm_small(names: Types, R: int, K: int, N: int, transposed: bool = False, aligned: bool = False) -> Spmm:
    """The kernel for a product of small blocks with few columns: 16 bytes of B to a lane, as far as its sums fit.

    Blocks of 4 rows, and of 8 and more, gain by fewer columns a lane (.50 against .54 ms, 1.31 against 1.52).
    """
    words = R * max(1, number(names.acc).itemsize // 4)
    width = 16 // _BYTES[names.b] if aligned else 1
    if R == 4 or R >= 8:
        width = min(width, 2 if _BYTES[names.b] < 8 else 1 if R >= 8 else 2)
    while width > 1 and (N % width or words * width > 48):
        width //= 2
    light = words * width <= 8 and names.acc != "c128"
    together = 4 if K <= 2 and light else 1
    at_least = 8 if light else 3 if words * width < 64 else 2
    return Spmm(names, R, K, _ceil_power_of_two(-(-N // width), 32), width, together, transposed, at_least)


@lru_cache(maxsize=4096)
def spmm(names: Types, R: int, C: int, N: int, transposed: bool = False, aligned: bool = False) -> GemmSimt | Spmv:
    """The kernel for a product with a dense matrix of N columns on the plain cores."""
    if N == 1:
        return spmv(names, R, C, transposed, aligned)
    lanes = _ceil_power_of_two(N, 32)
    wide = names.acc in ("f64", "u64", "c64", "c128")
    rows = _floor_power_of_two(R, 4 if wide else 8)
    # Each B value serves `rows` products, each A value `cols`. 8 x 4 sums fill 32 registers, 64-bit ones 4 x 4.
    cols = _floor_power_of_two(-(-N // lanes), 4) if lanes == 32 and names.acc != "c128" else 1
    return GemmSimt(names, rows, cols, lanes, transposed)


@lru_cache(maxsize=4096)
def spmv(names: Types, R: int, C: int, transposed: bool = False, aligned: bool = False) -> Spmv:
    """The kernel for a product with one vector.

    A lane keeps `rows` sums, of which 8 are enough to read whole small blocks. Narrow blocks leave little to share
    within a row, so that 8 lanes a row keep more rows in flight; from 16 columns on a warp has work in every block. Of
    larger blocks a lane reads 16 bytes at once where they are `aligned`.
    """
    small = R <= _SMALL_BLOCK and C <= _SMALL_BLOCK
    lanes = 8 if C <= 2 else 16 if C < 16 else 32
    rows = R if small else 4 if names.acc == "c128" else 8
    vector = 16 // _BYTES[names.a]
    if small or transposed or not aligned or C % vector:
        vector = 1
    return Spmv(names, lanes, rows, R if small else 0, C if small else 0, transposed, vector)


@lru_cache(maxsize=1024)
def pairs(names: Types, size: int) -> Pairs:
    """The kernel for result blocks of `size` elements: a thread for each, up to a CTA a block."""
    return Pairs(names, _ceil_power_of_two(size, 128))


def blocks_sm90(
    arch: str, a: np.dtype[Any], b: np.dtype[Any], out: np.dtype[Any], R: int, K: int, N: int, order: str | None = None
) -> BlocksSm90 | None:
    """The tensor-core kernel for blocks of R x N, or None if it cannot do them.

    `order` is that of the dense right-hand side of a sampled product, "C" or "F"; None: ``BSR @ BSR``. Tiles are as
    high as the block allows. Sampled, neighbours in a block row fill 256 columns, since they share what they read of
    X; where columns run fastest, a part of them is 64 wide at least.
    """
    names = _CUDA_NAMES[a], _CUDA_NAMES[out]
    if arch != "sm_90a" or a != b or a not in HALF_DTYPES or names[1] not in (names[0], "f32"):
        return None
    if R % 16 or N % 16 or K % 8 or not K:
        return None
    tile_m = 128 if R % 128 == 0 else 64
    if order is None:
        return BlocksSm90(*names, False, False, tile_m, 128 if N % 128 == 0 else 64, 1)
    part_n = next(n for n in (128, 64, 32, 16) if N % n == 0)
    if order == "C" and part_n < 64:
        return None
    return BlocksSm90(*names, True, order == "F", tile_m, part_n, 256 // part_n)


@lru_cache(maxsize=1024)
def segment(dtype: np.dtype[Any], operation: str, average: int, width: int) -> Segment:
    """The kernel for segments of `average` rows of `width`: a warp for long ones, a thread for short ones."""
    lanes = 32 if average >= 32 else 1
    columns = 1 if lanes == 32 else _ceil_power_of_two(width, 32)
    acc = accumulator(dtype)[0] if operation == "add" else _ordered(dtype)
    return Segment(element(dtype), acc, OPERATIONS[operation], lanes, columns)


def _ordered(dtype: np.dtype[Any]) -> str:
    """A type in which the values of `dtype` are compared: its own sign must survive."""
    return "f32" if accumulator_dtype(dtype) != dtype else element(dtype)


def runs_on(config: Config, arch: str) -> bool:
    """Can this kernel be compiled for `arch`?"""
    if isinstance(config, GemmSm80):
        return tensor_arch(arch) and config.shared_bytes <= _shared_kb(arch) * 1024
    return arch == "sm_90a" or not isinstance(config, GemmSm90 | BlocksSm90)


def rare(config: Config) -> bool:
    """Is this left out when kernels are compiled ahead, unless all are asked for?"""
    if isinstance(config, GemmSm90):
        usual = config.depth * _BYTES[config.types.a] == 128 if config.slot_rows >= 64 else config.flat
        few_columns = config.tile_n != 256 or (config.types.a == "f32") != (config.types.c == "f32")
        return not usual or few_columns or config.tail > 0 or config.store == "columns"
    return isinstance(config, GemmSimt | Spmv) and config.types.index == "i64"


def _sm90_configs(dtype: np.dtype[Any]) -> Iterator[GemmSm90]:
    """For 16-bit floats everything, for float32 (tf32) and e4m3 what B in columns leaves."""
    half = dtype in HALF_DTYPES
    name = element(dtype)
    results = ((name, "rows"), (name, "columns"), (name, "direct")) if half else ()
    for c, store in (*results, ("f32", "direct")):
        names = Types(name, name, c, "f32")
        for slot_rows, tile_n, a_transposed, b_transposed in itertools.product(
            (128, 64, 32, 16), (256, 128, 64), (False, True), (False, True)
        ):
            if half and slot_rows < 64:
                steps = [(64, 0), (32, 0), (16, 0)]
            elif half:
                steps = [(64, 0), (48, 0), (32, 0), (16, 0), (64, 16), (64, 32), (64, 48)]
            elif slot_rows >= 64 and b_transposed and not a_transposed:
                steps = [(32, tail) for tail in (0, 8, 16, 24)]
            else:
                continue
            for depth, tail in steps:
                for wide, flat in itertools.product((False, True), (False, True)):
                    if (wide and b_transposed) or (flat and slot_rows >= 64):
                        continue
                    yield GemmSm90(
                        names, slot_rows, tile_n, depth, tail, a_transposed, b_transposed, store, wide, flat
                    )  # fmt: skip


def _sm80_configs(dtype: np.dtype[Any]) -> Iterator[GemmSm80]:
    name = element(dtype)
    kind = _MMA[name][0]
    results = {"f16": ("f16", "f32"), "bf16": ("bf16", "f32"), "i8": ("i32",)}.get(name, (name,))
    sums = {"f64": "f64", "i8": "u32"}.get(name, "f32")
    kinds = (kind, "MMA_TF32") if name == "f32" else (kind,)
    for c, how, slot_rows, a_transposed, b_transposed in itertools.product(
        results, kinds, (128, 64, 32, 16), (False, True), (False, True)
    ):
        tiles = {tile for room in (99, 163, 227) for tile in _sm80_tiles(how, slot_rows, room)}
        for tile in sorted(tiles):
            yield GemmSm80(Types(name, name, c, sums), how, slot_rows, *tile, a_transposed, b_transposed)


def _fp8_configs() -> Iterator[GemmSm90 | GemmSimt | Spmv]:
    """The scaled products, which are asked for by `scale_a` and `scale_b` and not by a dtype."""
    for c in ("f16", "bf16", "f32"):
        names = Types("e4m3", "e4m3", c, "f32")
        for store, slot_rows, tile_n, tail in itertools.product(
            STORES if c != "f32" else ("direct",), (128, 64), (256, 128, 64), (0, 32, 64, 96)
        ):
            yield GemmSm90(names, slot_rows, tile_n, 128, tail, False, True, store, False, False)
        yield spmm(names, 8, 8, 128)
        yield spmm(names, 8, 8, 1)


def _block_configs(dtype: np.dtype[Any]) -> Iterator[BlocksSm90]:
    for out, R, N, order in itertools.product(
        (dtype, np.dtype(np.float32)), (64, 128), (16, 32, 64, 128), (None, "C", "F")
    ):
        config = blocks_sm90("sm_90a", dtype, dtype, out, R, 64, N, order)
        if config is not None and (order is not None or N >= 64):
            yield config


def _small_configs(names: Types) -> Iterator[SpmvSmall | Spmm]:
    """Of the kernels for small blocks, which have their sizes compiled in: all squares, and some others."""
    shapes = [*((n, n) for n in range(1, _MOST_SMALL + 1)), (2, 3), (3, 2), (1, 16), (16, 1), (13, 11), (6, 16)]
    for (R, K), transposed, aligned in itertools.product(shapes, (False, True), (False, True)):
        yield spmv_small(names, R, K, transposed, aligned and not transposed)
        yield spmm_small(names, R, K, 16, transposed, aligned)


def every_config(dtypes: tuple[np.dtype[Any], ...] = DEVICE_DTYPES) -> Iterator[Config]:
    """All configs for operands of equal dtype, promoted results and both index types.

    Transposed products of the plain cores are listed with the int32 indices that they always have. Mixed dtypes and
    `out_dtype` name further element types for the same kernels; they are compiled when met.
    """
    int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
    for index in (int32, int64):
        yield Expand(element(index))
    for entry in ("row_bits", "overlaps", "match_rows"):
        yield Match(entry)
    if np.dtype(np.uint8) in dtypes:
        yield from _fp8_configs()
    for dtype in dtypes:
        result = result_dtype(dtype, dtype)
        for index in (int32, int64):
            names = types(dtype, dtype, result, accumulator_dtype(result), index)
            shapes = {spmm(names, R, 1, N) for R in (1, 2, 4, 8) for N in (2, 4, 8, 16, 32, 64, 128)}
            yield from sorted(shapes, key=repr)
            sides = range(1, _SMALL_BLOCK + 1)
            blocks = {spmv(names, R, C) for R in (*sides, 9) for C in (*sides, 9, 16)}
            yield from sorted(blocks, key=repr)
            aligned = {spmv(names, 9, C, aligned=True) for C in range(1, 17)}
            yield from sorted(aligned - blocks, key=repr)
            yield from _small_configs(names)
            if index == int32:
                for config in (*sorted(shapes, key=repr), *sorted(blocks, key=repr)):
                    yield replace(config, a_transposed=True)
        if dtype in (*HALF_DTYPES, np.dtype(np.float32)):
            yield from _sm90_configs(dtype)
        if element(dtype) in _MMA:
            yield from _sm80_configs(dtype)
        if dtype in HALF_DTYPES:
            yield from _block_configs(dtype)
        names = types(dtype, dtype, result, accumulator_dtype(result), int64)
        for lanes in _POWERS:
            yield pairs(names, lanes)
        for operation in OPERATIONS:
            for columns in _POWERS[:6]:
                yield segment(dtype, operation, 1, columns)
            yield segment(dtype, operation, 32, 1)
