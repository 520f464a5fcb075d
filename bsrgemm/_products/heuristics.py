"""Which kernel serves which problem, and with which constants: pure functions, no device, no array.

Every config of configs.py that can be returned for the dtypes of bsrgemm is listed by `every_config`, so that all of
them can be compiled ahead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from .._backend.array_kernels import OPERATIONS, Expand, segment
from .._kernels.element_types import BYTES, CUDA_NAMES, Types, element, shared_kb, tensor_arch, types
from ..dtypes import DEVICE_DTYPES, HALF_DTYPES, accumulator_dtype, result_dtype
from .configs import (
    STORES,
    BlockProductsSm80,
    BlockProductsSm90,
    Config,
    Gemm,
    GemmSimt,
    GemmSm80,
    GemmSm90,
    RowMatching,
    SpgemmPattern,
    SpgemmSimt,
    Spmm,
    SpmmF64,
    Spmv,
    SpmvSmall,
    WorkListKernel,
)
from .small_blocks import (
    _DMMA_ROWS,
    _FEW_COLUMNS,
    _MOST_DMMA,
    _MOST_SMALL,
    _USUAL_ROW,
    _ceil_power_of_two,
    spmm_f64,
    spmm_small,
    spmm_staged,
    spmv_small,
)

_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
#: Block sides up to this are compiled into the SpMV kernel: the division by them is then a multiplication.
_SMALL_BLOCK = 8
#: Of the kernels of pairs that have their sizes compiled in, those that are always listed.
_PAIRED = ((1, 1, 1), (2, 2, 2), (2, 2, 3), (3, 2, 3), (3, 3, 3), (6, 3, 6), (6, 6, 6), (10, 10, 10))


def _floor_power_of_two(n: int, most: int) -> int:
    return 1 << (max(1, min(n, most)).bit_length() - 1)


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


def gemm(problem: Problem) -> Gemm:
    """The kernel for a product with dense right-hand sides: in tiles of the tensor cores where they can do it."""
    if _tensor_cores_serve(problem) and not _by_rows(problem):
        if sm90_serves(problem):
            return gemm_sm90(problem)
        if sm80_serves(problem):
            return gemm_sm80(problem)
    return plain(problem)


def plain(problem: Problem) -> GemmSimt | Spmv | SpmvSmall | Spmm | SpmmF64:
    """The kernel for a product on the plain cores, or of float64 by few columns with the tensor cores' help."""
    small = max(problem.R, problem.K) <= _MOST_SMALL and problem.blocks < 2**31
    if _dmma_serves(problem):
        return spmm_f64(problem.types.index, problem.R, problem.K, problem.N)
    if small and problem.N == 1 and problem.batches == 1:
        how = (problem.transposed, problem.aligned, problem.b_order == "F")
        return spmv_small(problem.types, problem.R, problem.K, *how, _row(problem))
    if small and 1 < problem.N <= _FEW_COLUMNS:
        if _staged(problem) and not (problem.R >= _DMMA_ROWS and problem.types.of_one("f64")):
            return spmm_staged(problem.types, problem.R, problem.K, problem.N, shared_kb(problem.arch))
        return spmm_small(problem.types, problem.R, problem.K, problem.N, problem.transposed, problem.b_order == "C")
    return spmm(problem.types, problem.R, problem.K, problem.N, problem.transposed, problem.aligned)


def _row(problem: Problem) -> int:
    """How many blocks most block rows have, at most: a guess, as only the mean is known.

    Where that is nearly an integer it is a grid, with less at its edges; otherwise rows differ.
    """
    mean = problem.blocks / max(1, problem.block_rows)
    near = round(mean)
    row = near if abs(mean - near) <= 0.02 * mean else round(mean + math.sqrt(mean) / 2)
    return max(1, min(row, _USUAL_ROW))


def _by_rows(problem: Problem) -> bool:
    """Are columns so few that reading A is what takes time?

    Tiles of several block rows meet the columns of all of them. On an H200, a GB of blocks in rows of 27 with random
    columns, by 16 columns: 16 x 16 in float32 7.2 ms in tiles, 0.45 so; in float64 16 x 16 3.1 and 0.36, 32 x 32 1.8
    and 0.35, 64 x 64 1.2 and 0.40; by 64 columns 7.2 and 1.3, 3.1 and 0.91, 1.8 and 0.87, 1.2 and 0.84.
    """
    wide = problem.types.of_one("f32") or problem.types.of_one("f64")
    small = max(problem.R, problem.K) <= _MOST_SMALL and problem.blocks < 2**31
    if not wide or not 1 < problem.N <= _FEWER_COLUMNS:
        return False
    return _dmma_serves(problem) or (small and (problem.N <= _FEWEST_COLUMNS or _staged(problem)))


def _dmma_serves(problem: Problem) -> bool:
    """Can spmm_f64 do this product? It counts rows of B in 32 bits."""
    return (
        1 < problem.N <= _FEW_COLUMNS
        and problem.N % 2 == 0
        and problem.types.of_one("f64")
        and problem.R >= _DMMA_ROWS
        and max(problem.R, problem.K) <= _MOST_DMMA
        and problem.blocks < 2**31
        and problem.block_cols * problem.K < 2**32
        and _staged(problem)
    )


def _staged(problem: Problem) -> bool:
    """Can blocks come through shared memory, 16 bytes at a time, and pieces of B and C of as many bytes beside them?"""
    return (
        tensor_arch(problem.arch)
        and (problem.types.of_one("f32") or problem.types.of_one("f64"))
        and problem.aligned
        and not problem.transposed
        and problem.b_order == problem.c_order == "C"
        and max(problem.block_rows, problem.block_cols) < 2**31
    )


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


#: Up to so many columns, a product that reads A once is the fastest; and where it reads A or B less well.
_FEWER_COLUMNS, _FEWEST_COLUMNS = 64, 16
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
    full = 128 // BYTES[names.a]
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
    line = (problem.R if problem.transposed else problem.K) * BYTES[names.a]
    return (
        names.c in results
        and names.acc == sums
        and problem.R % 16 == 0
        and problem.K % _MMA[names.a][1] == 0
        and line % 16 == 0
    )


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
    tiles = _sm80_tiles(kind, slot_rows, shared_kb(problem.arch))
    transposes = (problem.transposed, problem.b_order == "F")
    return [GemmSm80(problem.types, kind, slot_rows, *tile, *transposes) for tile in tiles]


#: Elements of a result that give each multiprocessor of the largest card two wide tiles.
_WIDE = 2 * 132 * 128 * 256


def gemm_sm80(problem: Problem) -> GemmSm80:
    """Wide tiles where there are enough of them."""
    slot_rows = next(h for h in (128, 64, 32, 16) if problem.R % h == 0)
    few = problem.N <= 128 or problem.block_rows * problem.R * problem.N * problem.batches < _WIDE
    return _sm80_of(problem, slot_rows)[-1 if few else 0]


#: Sides of blocks that products of pairs have compiled in.
_COMPILED_SIDE = 10


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
    vector = 16 // BYTES[names.a]
    if small or transposed or not aligned or C % vector:
        vector = 1
    return Spmv(names, lanes, rows, R if small else 0, C if small else 0, transposed, vector)


@lru_cache(maxsize=1024)
def spgemm_simt(names: Types, R: int, K: int, N: int) -> SpgemmSimt:
    """The kernel for result blocks of R x N elements: a thread for each, up to a CTA a block."""
    if max(R, K, N) <= _COMPILED_SIDE:
        return SpgemmSimt(names, R * N, (R, K, N))
    return SpgemmSimt(names, _ceil_power_of_two(R * N, 128))


@dataclass(frozen=True)
class BlockProblem:
    """What decides the kernel for blocks of R x N that are sums of products of R x K and K x N."""

    arch: str
    a: np.dtype[Any]
    b: np.dtype[Any]
    out: np.dtype[Any]
    R: int
    K: int
    N: int
    #: the order of the dense right-hand side of a sampled product, "C" or "F"; None for ``BSR @ BSR``
    order: str | None = None
    #: for float32: may its products be rounded to tf32?
    tf32: bool = False


def block_products_sm90(problem: BlockProblem) -> BlockProductsSm90 | None:
    """Hopper's kernel for blocks of a product, or None if it cannot make them.

    Tiles are as high as the block allows. In a sampled product, neighbours in a block row fill 256 columns, since they
    share what they read of X; where columns run fastest, a part of them is 32 wide at least: with parts of 16, whose
    rows have 32 bytes in shared memory, a call took 8.5 ms, and 3.7 ms with a copy of Y.
    """
    a, order, N = problem.a, problem.order, problem.N
    names = CUDA_NAMES[a], CUDA_NAMES[problem.out]
    if problem.arch != "sm_90a" or a != problem.b or a not in HALF_DTYPES or names[1] not in (names[0], "f32"):
        return None
    if problem.R % 16 or N % 16 or problem.K % 8 or not problem.K:
        return None
    tile_m = 128 if problem.R % 128 == 0 else 64
    if order is None:
        return BlockProductsSm90(*names, False, False, tile_m, 128 if N % 128 == 0 else 64, 1)
    part_n = next(n for n in (128, 64, 32, 16) if N % n == 0)
    if order == "C" and part_n < 32:
        return None
    return BlockProductsSm90(*names, True, order == "F", tile_m, part_n, 256 // part_n)


def block_products_sm80(problem: BlockProblem) -> BlockProductsSm80 | None:
    """The same since Ampere, for all floats; float32 by three products of tf32, as accurate, or by one."""
    a, R, N = problem.a, problem.R, problem.N
    name, to = CUDA_NAMES[a], CUDA_NAMES[problem.out]
    if not tensor_arch(problem.arch) or a != problem.b or name not in _MMA or name == "i8" or to not in (name, "f32"):
        return None
    if R % 16 or N % 16 or problem.K * a.itemsize % 16 or not problem.K or (name == "f64" and to != "f64"):
        return None
    kind = "MMA_TF32" if name == "f32" and problem.tf32 else _MMA[name][0]
    tile_m, part_n = (next(n for n in (128, 64, 32, 16) if side % n == 0) for side in (R, N))
    if problem.order is not None:
        return BlockProductsSm80(name, to, kind, True, problem.order == "F", tile_m, 128, part_n)
    tile_n = max(part_n, 32, 128 // a.itemsize)
    return BlockProductsSm80(name, to, kind, False, False, tile_m, tile_n, tile_n)


def runs_on(config: Config, arch: str) -> bool:
    """Can this kernel be compiled for `arch`?"""
    if isinstance(config, GemmSm80) or (isinstance(config, Spmm) and config.staged):
        return tensor_arch(arch) and config.shared_bytes <= shared_kb(arch) * 1024
    if isinstance(config, SpmmF64 | BlockProductsSm80):
        return tensor_arch(arch)
    return arch == "sm_90a" or not isinstance(config, GemmSm90 | BlockProductsSm90)


def skip_ahead_of_time(config: Config) -> bool:
    """Is this left out when kernels are compiled ahead, unless all are asked for?"""
    if isinstance(config, GemmSm90):
        usual = config.depth * BYTES[config.types.a] == 128 if config.slot_rows >= 64 else config.flat
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


def _block_configs(dtype: np.dtype[Any]) -> Iterator[BlockProductsSm90 | BlockProductsSm80]:
    """Of both kernels; the lists of sampled blocks come in either index type."""
    orders = (None, "C", "F")
    for R, N, order in itertools.product((16, 32, 64, 128), (16, 32, 64, 128), orders):
        for tf32 in (False, True) if dtype == np.float32 else (False,):
            config = block_products_sm80(BlockProblem("sm_80", dtype, dtype, dtype, R, 64, N, order, tf32))
            if config is not None:
                yield config if order is None else replace(config, index="i32")
    for out, R, N, order in itertools.product((dtype, np.dtype(np.float32)), (64, 128), (16, 32, 64, 128), orders):
        wide = block_products_sm90(BlockProblem("sm_90a", dtype, dtype, out, R, 64, N, order))
        if wide is not None and (order is not None or N >= 64):
            yield wide
            if order is not None:
                yield replace(wide, index="i32")


def _small_configs(names: Types) -> Iterator[SpmvSmall | Spmm | SpmmF64]:
    """Of the kernels for small blocks, which have their sizes compiled in: all squares, and some others."""
    if names.of_one("f64"):
        yield from (spmm_f64(names.index, n, n, N) for n in (20, 32, 64, 128) for N in (16, 64))
    shapes = [*((n, n) for n in range(1, _MOST_SMALL + 1)), (2, 3), (3, 2), (1, 16), (16, 1), (13, 11), (6, 16)]
    for (R, K), transposed, aligned in itertools.product(shapes, (False, True), (False, True)):
        yield spmv_small(names, R, K, transposed, aligned and not transposed)
        if aligned and not transposed:
            yield from (spmv_small(names, R, K, False, True, True, row) for row in (1, 2, 4, 9, _USUAL_ROW))
        yield spmm_small(names, R, K, 16, transposed, aligned)
        if aligned and not transposed and names.of_one("f64") and R >= _DMMA_ROWS:
            yield from (spmm_f64(names.index, R, K, N) for N in (16, 64))
        elif aligned and not transposed and (names.of_one("f32") or names.of_one("f64")):
            yield from (spmm_staged(names, R, K, N, room) for N in (4, 16, 64) for room in (227, 99))


def every_config(dtypes: tuple[np.dtype[Any], ...] = DEVICE_DTYPES) -> Iterator[Config]:
    """All configs for operands of equal dtype, promoted results and both index types.

    Transposed products of the plain cores are listed with the int32 indices that they always have. Mixed dtypes and
    `out_dtype` name further element types for the same kernels; they are compiled when met.
    """
    int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
    for index in (int32, int64):
        yield Expand(element(index))
        yield from (SpgemmPattern(entry, element(index)) for entry in ("count_pairs", "list_pairs", "pack_columns"))
        yield from (RowMatching("row_bits", element(index)), WorkListKernel(element(index)))
    yield from map(RowMatching, ("overlaps", "match_rows"))
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
            yield from _block_configs(dtype)
        for index in (int32, int64):
            names = types(dtype, dtype, result, accumulator_dtype(result), index)
            yield from (SpgemmSimt(names, lanes) for lanes in _POWERS)
            yield from (spgemm_simt(names, *block) for block in _PAIRED)
        for operation in OPERATIONS:
            for columns in _POWERS[:6]:
                yield segment(dtype, operation, 1, columns)
            yield segment(dtype, operation, 32, 1)
