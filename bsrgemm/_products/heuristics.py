"""The rules that choose a kernel and its constants for a product. They are pure functions without device or arrays.

`every_config` lists the configs of configs.py that these rules return for the dtypes of bsrgemm, so that kernels can be
compiled ahead of time. "CUDA cores" are the ordinary cores of a GPU, as opposed to its tensor cores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from .._backend.array_kernels import OPERATIONS, Expand, segment, vector_steps_of
from .._kernels.element_types import BYTES, CUDA_NAMES, Types, element, shared_kb, tensor_arch, types
from ..dtypes import DEVICE_DTYPES, HALF_DTYPES, accumulator_dtype, result_dtype
from .configs import (
    STORES,
    BlockProductsSm80,
    BlockProductsSm90,
    ColumnsTf32,
    Config,
    Gemm,
    GemmFew,
    GemmSimt,
    GemmSm80,
    GemmSm90,
    GemmTurnedSm90,
    RowMatching,
    SampledTiles,
    SpgemmPattern,
    SpgemmSimt,
    Spmm,
    SpmmF64,
    Spmv,
    SpmvSmall,
    WorkListKernel,
)
from .sm80_tiles import sm80_tiles
from .sm90_tiles import FEW_TILES, tile_shape
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
from .turned import every_turned, turned

_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
#: Blocks whose sides are at most this have their size compiled into the kernel spmv, so that the compiler replaces
#: divisions by the size with multiplications.
_SMALL_BLOCK = 8
#: Block sizes (R, K, N) for which `every_config` lists spgemm_simt with compiled-in sizes.
_PAIRED = ((1, 1, 1), (2, 2, 2), (2, 2, 3), (3, 2, 3), (3, 3, 3), (6, 3, 6), (6, 6, 6), (10, 10, 10))


def _floor_power_of_two(n: int, most: int) -> int:
    return 1 << (max(1, min(n, most)).bit_length() - 1)


@dataclass(frozen=True)
class Problem:
    """The properties of a product that decide its kernel.

    If the product is with the transpose of a stored matrix, R, K and the counts are those of the transpose.
    """

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
    #: "C" or "F" for operands whose rows or columns the copy engine can read, otherwise "" (see `order_of`)
    b_order: str
    c_order: str
    #: whether C is only written, because beta is 0
    overwrite: bool
    #: whether the data of A starts at a multiple of 16 bytes
    aligned: bool
    #: for float32: whether factors may be rounded to tf32
    tf32: bool = False
    #: for float32: 2 if B is given in two parts of tf32, for Hopper's tensor cores
    parts: int = 1


def gemm(problem: Problem) -> Gemm:
    """Return the kernel for a product with a dense right-hand side: a tensor-core kernel if one can compute it."""
    if problem.parts == 2:
        return gemm_sm90(problem)  # no other kernel reads B in parts
    if few_serves(problem):
        return gemm_few(problem)
    if tensor_cores_serve(problem) and not by_rows(problem):
        if turned_serves(problem) and _many_turned_tiles(problem):
            return gemm_turned_sm90(problem)
        if sm90_serves(problem):
            return gemm_sm90(problem)
        if sm80_serves(problem):
            return gemm_sm80(problem)
    return plain(problem)


def plain(problem: Problem) -> GemmSimt | Spmv | SpmvSmall | Spmm | SpmmF64:
    """Return the kernel without a work list: one for the CUDA cores, or spmm_f64 for float64 and few columns."""
    small = max(problem.R, problem.K) <= _MOST_SMALL and problem.blocks < 2**31
    if _dmma_serves(problem):
        return spmm_f64(problem.types.index, problem.R, problem.K, problem.N)
    if small and problem.N == 1 and problem.batches == 1:
        options = (problem.transposed, problem.aligned, problem.b_order == "F")
        return spmv_small(problem.types, problem.R, problem.K, *options, _row(problem))
    if small and 1 < problem.N <= _FEW_COLUMNS:
        if _staged(problem) and not (problem.R >= _DMMA_ROWS and problem.types.of_one("f64")):
            return spmm_staged(problem.types, problem.R, problem.K, problem.N, shared_kb(problem.arch))
        return spmm_small(problem.types, problem.R, problem.K, problem.N, problem.transposed, problem.b_order == "C")
    return spmm(problem.types, problem.R, problem.K, problem.N, problem.transposed, problem.aligned)


def _row(problem: Problem) -> int:
    """Return a guess of the number of blocks that most block rows do not exceed; only the mean is known.

    A mean close to an integer suggests a grid, whose rows have fewer blocks at its edges; the guess is that integer.
    Otherwise block rows differ in length, and the guess is larger than the mean. It is 27 at most.
    """
    mean = problem.blocks / max(1, problem.block_rows)
    near = round(mean)
    row = near if abs(mean - near) <= 0.02 * mean else round(mean + math.sqrt(mean) / 2)
    return max(1, min(row, _USUAL_ROW))


def by_rows(problem: Problem) -> bool:
    """Return whether there are so few columns that the product should be computed one block row at a time.

    With few columns, reading A takes most of the time. The tiles of the tensor-core kernels have several block rows and
    are processed over the block columns of all of them, most of which each block row does not have. Milliseconds on an
    H200, for 1 GB of blocks, 27 in each block row, at random block columns (in tiles / by block rows):

    ===============  ===========  ===========
    blocks           16 columns   64 columns
    ===============  ===========  ===========
    float32 16 x 16  7.2 / 0.45   7.2 / 1.3
    float64 16 x 16  3.1 / 0.36   3.1 / 0.91
    float64 32 x 32  1.8 / 0.35   1.8 / 0.87
    float64 64 x 64  1.2 / 0.40   1.2 / 0.84
    ===============  ===========  ===========
    """
    wide = problem.types.of_one("f32") or problem.types.of_one("f64")
    small = max(problem.R, problem.K) <= _MOST_SMALL and problem.blocks < 2**31
    if not wide or not 1 < problem.N <= _FEWER_COLUMNS:
        return False
    return _dmma_serves(problem) or (small and (problem.N <= _FEWEST_COLUMNS or _staged(problem)))


def _dmma_serves(problem: Problem) -> bool:
    """Return whether spmm_f64 can compute this product. It numbers the rows of B with 32 bits."""
    return (
        1 < problem.N <= _FEW_COLUMNS
        and problem.N % 2 == 0
        and problem.types.of_one("f64")
        and problem.R >= _DMMA_ROWS
        and max(problem.R, problem.K) <= _MOST_DMMA
        and max(problem.blocks, problem.batches) < 2**31
        and problem.block_cols * problem.K < 2**32
        and _staged(problem)
    )


#: The number of block rows that warps may look at after the last one: three steps of the largest grid.
_ROWS_AHEAD = 2**20


def _staged(problem: Problem) -> bool:
    """Return whether blocks can be copied to shared memory in pieces of 16 bytes, and B and C be accessed likewise."""
    return (
        tensor_arch(problem.arch)
        and (problem.types.of_one("f32") or problem.types.of_one("f64"))
        and problem.aligned
        and not problem.transposed
        and problem.b_order == problem.c_order == "C"
        and max(problem.block_rows + _ROWS_AHEAD, problem.block_cols) < 2**31
    )


def candidates(problem: Problem) -> Iterator[Gemm]:
    """Yield the kernels that `bsrgemm.tune` measures.

    The choice of `gemm` comes first, then the same kernel with other constants, then the other kernels that can
    compute the product.
    """
    first = gemm(problem)
    yield first
    if isinstance(first, GemmSm90):
        heights = [h for h in (128, 64) if problem.R % h == 0] or [first.row_tile_height]
        for row_tile_height, tile_n, section in itertools.product(heights, (256, 128, 64), (512, 1024, 2048)):
            other = replace(first, row_tile_height=row_tile_height, tile_n=tile_n, section=section, tile_m=128)
            if other != first and tile_n <= section:
                yield other
        low = (replace(first, row_tile_height=64, tile_n=n, tile_m=64) for n in (256, 128, 64) if heights[-1] == 64)
        yield from (other for other in low if other != first)
    if tensor_cores_serve(problem) and sm80_serves(problem):
        for row_tile_height in (128, 64, 32, 16):
            for other80 in _sm80_of(problem, row_tile_height):
                if problem.R % row_tile_height == 0 and other80 != first:
                    yield other80
    if tensor_cores_serve(problem):
        if turned_serves(problem) and not isinstance(first, GemmTurnedSm90):
            yield gemm_turned_sm90(problem)
        if sm90_serves(problem) and not isinstance(first, GemmSm90):
            yield gemm_sm90(problem)
    for simple in (plain(problem), spmm(problem.types, problem.R, problem.K, problem.N, problem.transposed)):
        if simple != first:
            yield simple


#: Up to the first number of columns, a product that is computed one block row at a time is the fastest. The second
#: number applies to operands that `_staged` refuses, which are read less efficiently.
_FEWER_COLUMNS, _FEWEST_COLUMNS = 64, 16
#: Products with fewer columns than the first number run on the CUDA cores, unless A has at least as many elements as
#: the second number. A product with one vector always runs on the CUDA cores.
_TENSOR_COLUMNS, _LARGE = 16, 1 << 20


def tensor_cores_serve(problem: Problem) -> bool:
    """Return whether the sizes of a product suit the tensor-core kernels.

    They number entries of work lists and tiles with 31 bits. Few columns of a small matrix are left to the CUDA cores.
    """
    rows, cols = problem.block_rows * problem.R, problem.block_cols * problem.K
    fewest = 2 if problem.blocks * problem.R * problem.K >= _LARGE else _TENSOR_COLUMNS
    row_tiles = problem.blocks * max(1, problem.R // 16)
    return (
        problem.aligned
        and problem.types.a == problem.types.b
        and fewest <= problem.N
        and 0 < row_tiles < 2**28
        and max(rows, cols, problem.blocks * problem.R, problem.blocks * problem.K) < 2**31
        and (rows // 16 + 1) * (problem.N // 64 + 1) * problem.batches < 2**31
    )


def few_serves(problem: Problem) -> bool:
    """Return whether gemm_few can compute this product of 16-bit floats. It counts in blocks and chunks by 31 bits."""
    names = problem.types
    return (
        0 < problem.N <= GemmFew.most_columns
        and names.a == names.b
        and names.a in ("f16", "bf16")
        and names.c in (names.a, "f32")
        and names.acc == "f32"
        and tensor_arch(problem.arch)
        and not problem.transposed
        and problem.aligned
        and problem.R % GemmFew.rows == 0
        and problem.K % GemmFew.chunk == 0
        and max(problem.R * problem.K, problem.blocks * (problem.K // GemmFew.chunk)) < 2**31
    )


#: gemm_few has 8 warps where it has at most so many tiles of 16 rows: two CTAs for each of 132 multiprocessors.
_FEW_ROW_TILES = 2 * 2 * FEW_TILES


def gemm_few(problem: Problem) -> GemmFew:
    """Return the config of gemm_few for a product."""
    row_tiles = problem.block_rows * (problem.R // GemmFew.rows) * problem.batches
    return GemmFew(problem.types, problem.b_order == "F", 8 if row_tiles <= _FEW_ROW_TILES else 4)


def sm90_serves(problem: Problem) -> bool:
    """Return whether gemm_sm90 can compute this product.

    It reads B with the copy engine. Only for 16-bit floats can it read operands whose contiguous dimension is not K.
    """
    names = problem.types
    if problem.arch != "sm_90a" or names.acc != "f32" or not problem.b_order:
        return False
    if names.a in ("f16", "bf16"):
        return names.c in (names.a, "f32") and problem.R % 16 == 0 and problem.K % 16 == 0
    straight = not problem.transposed and problem.b_order == "F"
    if names.a == "e4m3":
        return straight and problem.R % 64 == 0 and problem.K % 32 == 0 and names.c in ("f16", "bf16", "f32")
    tf32 = (problem.tf32 or problem.parts == 2) and names.a == names.c == "f32"
    return straight and tf32 and problem.R % 16 == 0 and problem.K % 8 == 0


def gemm_sm90(problem: Problem) -> GemmSm90:
    """Return the config of gemm_sm90 for a product.

    Row tiles are as high as the block size allows. From 64 rows on, A is not passed through registers. With 128 rows,
    a tile has one row tile, so that no block columns of several row tiles have to be merged. A stage of the pipeline
    holds 128 bytes along K. A block whose K is not a multiple of that is processed in equal shorter steps if possible,
    otherwise in full steps and a shorter last one, the tail. Float32 in two parts always passes A through registers.
    """
    names, R, K, N = problem.types, problem.R, problem.K, problem.N
    row_tile_height = next(h for h in (128, 64, 32, 16) if R % h == 0 and (problem.parts == 1 or h < 64))
    full = 128 // BYTES[names.a]
    if row_tile_height < 64:
        depth = next(d for d in (full, full // 2, full // 4) if K % d == 0)
        tail = 0
    else:
        steps = (full, 3 * full // 4, full // 2) if names.a in ("f16", "bf16") else (full,)
        depth = K if full > K and names.a in ("f16", "bf16") else next((d for d in steps if K % d == 0), full)
        tail = K % depth
    tile_m, tile_n = 128, 128
    if problem.parts == 1:
        row_tile_height, tile_m, tile_n = tile_shape(problem.block_rows * R, N, problem.batches, row_tile_height)
    pieces = problem.overwrite and names.c in ("f16", "bf16")
    store = {"C": "rows", "F": "columns"}.get(problem.c_order, "direct") if pieces else "direct"
    flat = row_tile_height < 64 and (row_tile_height == R if problem.transposed else depth == K)
    wide = problem.b_order == "C" and N % 64 == 0
    return GemmSm90(
        names, row_tile_height, tile_n, depth, tail, problem.transposed, problem.b_order == "F", store, wide, flat,
        tile_m=tile_m, parts=problem.parts,
    )  # fmt: skip


def turned_serves(problem: Problem) -> bool:
    """Return whether gemm_turned_sm90 can compute this product, whose blocks do not fill row tiles of 64 rows."""
    names = problem.types
    return (
        sm90_serves(problem)
        and names.a in ("f16", "bf16")
        and names.c == names.a
        and not problem.transposed
        and problem.overwrite
        and problem.b_order == problem.c_order == "C"
        and problem.R % 64 != 0
        and any(problem.R % height == 0 for height in GemmTurnedSm90.heights)
    )


def gemm_turned_sm90(problem: Problem) -> GemmTurnedSm90:
    """Return the config of gemm_turned_sm90 for a product."""
    return turned(problem.types, problem.R, problem.K, problem.N)


def _many_turned_tiles(problem: Problem) -> bool:
    """Return whether gemm_turned_sm90 has more than two tiles for each of the 132 multiprocessors of an H200.

    It was compared with gemm_sm90 for large products only; smaller ones stay with gemm_sm90, and so do those with few
    columns.
    """
    config = gemm_turned_sm90(problem)
    rows, columns = -(-problem.block_rows * problem.R // config.tile_m), -(-problem.N // config.tile_n)
    return problem.N > 128 and rows * columns * problem.batches > 2 * 2 * FEW_TILES


#: Element -> (how it is multiplied, number of columns of A that one instruction takes).
_MMA = {
    "f16": ("MMA_F16", 16),
    "bf16": ("MMA_BF16", 16),
    "f32": ("MMA_3XTF32", 8),
    "f64": ("MMA_F64", 8),
    "i8": ("MMA_S8", 32),
}


def sm80_serves(problem: Problem) -> bool:
    """Return whether gemm_sm80 can compute this product. It copies its operands in pieces of 16 bytes."""
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


def _sm80_of(problem: Problem, row_tile_height: int) -> list[GemmSm80]:
    """Return the configs of gemm_sm80 with this height of row tiles, the preferred one first.

    A product of float32 numbers is computed as three products of tf32 numbers, which keep the accuracy of float32,
    or as one if the caller allows tf32.
    """
    kind = "MMA_TF32" if problem.types.a == "f32" and problem.tf32 else _MMA[problem.types.a][0]
    tiles = sm80_tiles(kind, row_tile_height, shared_kb(problem.arch))
    transposes = (problem.transposed, problem.b_order == "F")
    return [GemmSm80(problem.types, kind, row_tile_height, *tile, *transposes) for tile in tiles]


#: Number of elements of a result that has two tiles of 128 x 256 for each of the 132 multiprocessors of an H200.
_WIDE = 2 * 132 * 128 * 256


def gemm_sm80(problem: Problem) -> GemmSm80:
    """Return the config of gemm_sm80 for a product: wide tiles if there are enough of them, otherwise narrow ones."""
    row_tile_height = next(h for h in (128, 64, 32, 16) if problem.R % h == 0)
    few = problem.N <= 128 or problem.block_rows * problem.R * problem.N * problem.batches < _WIDE
    return _sm80_of(problem, row_tile_height)[-1 if few else 0]


#: Blocks whose sides are at most this have their sizes compiled into spgemm_simt.
_COMPILED_SIDE = 10


@lru_cache(maxsize=4096)
def spmm(names: Types, R: int, C: int, N: int, transposed: bool = False, aligned: bool = False) -> GemmSimt | Spmv:
    """Return the kernel for a product with a dense matrix of N columns on the CUDA cores, for blocks of any size."""
    if N == 1:
        return spmv(names, R, C, transposed, aligned)
    lanes = _ceil_power_of_two(N, 32)
    wide = names.acc in ("f64", "u64", "c64", "c128")
    rows = _floor_power_of_two(R, 4 if wide else 8)
    # A value of B is used in `rows` products, a value of A in `cols`. 8 x 4 sums of 32 bits take 32 registers, as do
    # 4 x 4 sums of 64 bits.
    cols = _floor_power_of_two(-(-N // lanes), 4) if lanes == 32 and names.acc != "c128" else 1
    return GemmSimt(names, rows, cols, lanes, transposed)


@lru_cache(maxsize=4096)
def spmv(names: Types, R: int, C: int, transposed: bool = False, aligned: bool = False) -> Spmv:
    """Return the kernel for a product with one vector, for blocks of any size.

    A lane keeps `rows` sums; 8 are enough to read a small block in one pass. A narrow block gives work to few lanes,
    so that only 8 lanes share a block row and a warp processes more block rows at once. From 16 columns on, every block
    has work for a whole warp. A lane reads 16 bytes of a larger block at once if the blocks are `aligned`.
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
    """Return the config of spgemm_simt for result blocks of R x N elements.

    A block has as many threads as elements, up to the 128 threads of a CTA.
    """
    if max(R, K, N) <= _COMPILED_SIDE:
        return SpgemmSimt(names, R * N, (R, K, N))
    return SpgemmSimt(names, _ceil_power_of_two(R * N, 128))


@dataclass(frozen=True)
class BlockProblem:
    """The properties that decide the kernel for result blocks of R x N, each a sum of products of R x K and K x N."""

    arch: str
    a: np.dtype[Any]
    b: np.dtype[Any]
    out: np.dtype[Any]
    R: int
    K: int
    N: int
    #: the order of the dense right-hand side of a sampled product, "C" or "F"; None for ``BSR @ BSR``
    order: str | None = None
    #: for float32: whether factors may be rounded to tf32
    tf32: bool = False


def block_products_sm90(problem: BlockProblem) -> BlockProductsSm90 | None:
    """Return Hopper's kernel for the blocks of a product, or None if it cannot compute them.

    Tiles are as high as the block size allows. In a sampled product, a tile covers neighbouring blocks of a block row,
    256 columns in all, since they share what is read of X. With a row-major Y, the number of columns of a block must
    be a multiple of 32. On an H200, a sampled product of X and Y of 8192 x 8192 with blocks of 16 columns took 8.5 ms
    with a row-major Y, whose tiles have rows of 32 bytes in shared memory, and 3.7 ms including a column-major copy
    of Y.
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
    """Return the kernel for the blocks of a product on any card since Ampere, or None if it cannot compute them.

    It multiplies all float types. A product of float32 numbers is computed as three products of tf32 numbers, which
    keep the accuracy of float32, or as one if the caller allows tf32.
    """
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
    """Return whether this kernel can be compiled for `arch`."""
    if isinstance(config, GemmSm80) or (isinstance(config, Spmm) and config.staged):
        return tensor_arch(arch) and config.shared_bytes <= shared_kb(arch) * 1024
    if isinstance(config, SpmmF64 | BlockProductsSm80 | GemmFew):
        return tensor_arch(arch)
    return arch == "sm_90a" or not isinstance(config, GemmSm90 | GemmTurnedSm90 | BlockProductsSm90 | SampledTiles)


def skip_ahead_of_time(config: Config) -> bool:
    """Return whether this kernel is left out when kernels are compiled ahead of time, unless all are requested."""
    if isinstance(config, GemmSm90):
        usual = config.depth * BYTES[config.types.a] == 128 if config.row_tile_height >= 64 else config.flat
        narrow = config.tile_n != 256 and config.tile_m == 128 and config.parts == 1
        widened = (config.types.a == "f32") != (config.types.c == "f32")
        return not usual or narrow or widened or config.tail > 0 or config.store == "columns"
    if isinstance(config, GemmTurnedSm90):
        return not config.wide
    return isinstance(config, GemmSimt | Spmv | GemmFew) and config.types.index == "i64"


def _sm90_configs(dtype: np.dtype[Any]) -> Iterator[GemmSm90]:
    """Yield the configs of gemm_sm90: all layouts for 16-bit floats, only a column-major B for float32 (tf32)."""
    half = dtype in HALF_DTYPES
    name = element(dtype)
    results = ((name, "rows"), (name, "columns"), (name, "direct")) if half else ()
    for c, store in (*results, ("f32", "direct")):
        names = Types(name, name, c, "f32")
        for row_tile_height, tile_n, a_transposed, b_transposed in itertools.product(
            (128, 64, 32, 16), (256, 128, 64), (False, True), (False, True)
        ):
            if half and row_tile_height < 64:
                steps = [(64, 0), (32, 0), (16, 0)]
            elif half:
                steps = [(64, 0), (48, 0), (32, 0), (16, 0), (64, 16), (64, 32), (64, 48)]
            elif a_transposed or not b_transposed:
                continue
            elif row_tile_height < 64:
                steps = [(32, 0), (16, 0), (8, 0)]
            else:
                steps = [(32, tail) for tail in (0, 8, 16, 24)]
            for depth, tail in steps:
                for wide, flat in itertools.product((False, True), (False, True)):
                    if (wide and b_transposed) or (flat and row_tile_height >= 64):
                        continue
                    config = GemmSm90(
                        names, row_tile_height, tile_n, depth, tail, a_transposed, b_transposed, store, wide, flat
                    )  # fmt: skip
                    yield config
                    if row_tile_height == 64:
                        yield replace(config, tile_m=64)
                    if not half and row_tile_height < 64 and tile_n == 128:
                        yield replace(config, parts=2)


def _sm80_configs(dtype: np.dtype[Any]) -> Iterator[GemmSm80]:
    name = element(dtype)
    kind = _MMA[name][0]
    results = {"f16": ("f16", "f32"), "bf16": ("bf16", "f32"), "i8": ("i32",)}.get(name, (name,))
    sums = {"f64": "f64", "i8": "u32"}.get(name, "f32")
    kinds = (kind, "MMA_TF32") if name == "f32" else (kind,)
    for c, mma, row_tile_height, a_transposed, b_transposed in itertools.product(
        results, kinds, (128, 64, 32, 16), (False, True), (False, True)
    ):
        tiles = {tile for kilobytes in (99, 163, 227) for tile in sm80_tiles(mma, row_tile_height, kilobytes)}
        for tile in sorted(tiles):
            yield GemmSm80(Types(name, name, c, sums), mma, row_tile_height, *tile, a_transposed, b_transposed)


def _fp8_configs() -> Iterator[GemmSm90 | GemmSimt | Spmv]:
    """Yield the configs of fp8 products, which a user requests by `scale_a` and `scale_b` and not by a dtype."""
    for c in ("f16", "bf16", "f32"):
        names = Types("e4m3", "e4m3", c, "f32")
        for store, row_tile_height, tile_n, tail in itertools.product(
            STORES if c != "f32" else ("direct",), (128, 64), (256, 128, 64), (0, 32, 64, 96)
        ):
            config = GemmSm90(names, row_tile_height, tile_n, 128, tail, False, True, store, False, False)
            yield config
            if row_tile_height == 64:
                yield replace(config, tile_m=64)
        yield spmm(names, 8, 8, 128)
        yield spmm(names, 8, 8, 1)


def _block_configs(dtype: np.dtype[Any]) -> Iterator[BlockProductsSm90 | BlockProductsSm80]:
    """Yield the configs of both kernels for blocks of a product; sampled products can have either index type."""
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
                yield from (replace(wide, tile_m=128, row_parts=n, index="i32") for n in (2, 4, 8) if R == 64)


def _small_configs(names: Types) -> Iterator[SpmvSmall | Spmm | SpmmF64]:
    """Yield configs of the kernels for small blocks, whose sizes are compiled in: all squares, and some rectangles."""
    if names.of_one("f64"):
        yield from (spmm_f64(names.index, n, n, N) for n in (20, 32, 64, 128) for N in (16, 64))
    shapes = [*((n, n) for n in range(1, _MOST_SMALL + 1)), (2, 3), (3, 2), (1, 16), (16, 1), (13, 11), (6, 16)]
    for (R, K), transposed, aligned in itertools.product(shapes, (False, True), (False, True)):
        yield spmv_small(names, R, K, transposed, aligned and not transposed)
        if aligned and not transposed:
            yield from (spmv_small(names, R, K, False, True, True, row) for row in (1, 2, 4, 9, _USUAL_ROW))
        if aligned and transposed and names.index == "i32":
            yield from (spmv_small(names, R, K, True, False, True, row) for row in (1, 2, 4, 9, _USUAL_ROW))
        yield spmm_small(names, R, K, 16, transposed, aligned)
        if aligned and not transposed and names.of_one("f64") and R >= _DMMA_ROWS:
            yield from (spmm_f64(names.index, R, K, N) for N in (16, 64))
        elif aligned and not transposed and (names.of_one("f32") or names.of_one("f64")):
            yield from (spmm_staged(names, R, K, N, kilobytes) for N in (4, 16, 64) for kilobytes in (227, 99))


def every_config(dtypes: tuple[np.dtype[Any], ...] = DEVICE_DTYPES) -> Iterator[Config]:
    """Yield all configs for operands of equal dtype, results of the promoted dtype and both index types.

    Transposed products on the CUDA cores always have int32 indices and are listed only with these. Mixed dtypes and
    `out_dtype` lead to the same kernels with other element types, which are compiled when they are first used.
    """
    int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
    for index in (int32, int64):
        yield Expand(element(index))
        yield from (SpgemmPattern(entry, element(index)) for entry in SpgemmPattern.entries)
        yield from (RowMatching("row_bits", element(index)), WorkListKernel(element(index)))
        yield from (SampledTiles(g, w, element(index)) for g, w in itertools.product((2, 4, 8), (2, 4, 8, 16)))
    yield from map(RowMatching, ("overlaps", "match_rows"))
    yield from map(ColumnsTf32, (1, 2))
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
        if dtype in HALF_DTYPES:
            half = element(dtype)
            for numbers, c, by_columns in itertools.product(("i32", "i64"), (half, "f32"), (False, True)):
                for warps, read_ahead in itertools.product((4, 8), (False, True)):
                    yield GemmFew(Types(half, half, c, "f32", numbers), by_columns, warps, read_ahead)
        if dtype in (*HALF_DTYPES, np.dtype(np.float32)):
            yield from _sm90_configs(dtype)
        if dtype in HALF_DTYPES:
            yield from every_turned(Types(element(dtype), element(dtype), element(dtype), "f32"))
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
        yield from vector_steps_of(dtype)
