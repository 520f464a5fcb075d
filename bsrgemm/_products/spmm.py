"""``A @ B`` for small blocks and few columns: on the CUDA cores, and on the tensor cores in float64.

The rules were fitted to measurements on an H200. "In flight" are values that a lane has loaded and not used yet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from .._kernels.card import Card, shared_kb, tensor_arch
from .._kernels.element_types import BYTES, Types, number
from .._kernels.jit import MAX_GRID_X, MAX_GRID_YZ
from . import arguments
from .call import Problem
from .costs import from_l2, memory, missed, operand_bytes, overlapped, rows_of, speed, width, work
from .dense import ByRows, ceil_power_of_two, copied_in_pieces
from .gemm_simt import INDEX, names_of
from .spmv_small import FEW_COLUMNS, MOST_SMALL, SHAPES

#: Bytes of blocks that a warp copies to shared memory at once, by the size of an element. The second number leaves more
#: memory to the L1 cache for B. It is used only for float64 blocks of 65 to 100 bytes by many columns, and was fitted
#: to one benchmark case: 3 x 3 blocks of float64 by 16 columns on an H200.
_CHUNK_BYTES, _FEW_BYTES = {4: 3072, 8: 1600}, 600
#: The least number of rows of a block for which the tensor cores of float64 are faster, and the largest side of a block
#: for which they are used.
DMMA_ROWS, _MOST_DMMA = 6, 128
#: Bytes of shared memory that a CTA has without an explicit request, and that all CTAs of a multiprocessor may use so
#: that the L1 cache, which is in the same memory, keeps enough space for B.
_STATIC_BYTES, _ALL_STAGES = 48 << 10, 208 << 10
#: KiB of shared memory that a CTA has on sm_86, sm_89 and sm_120. A multiprocessor of these cards has two float64
#: units, which few warps keep busy.
_FEW_F64_KB = 99
#: The least number of rows of float32 blocks whose sums do not fit the 96 registers of 20 warps. Compiling found it.
_TALL = 14


@dataclass(frozen=True)
class Spmm(ByRows, source="spmm.cu", argument=arguments.product):
    """``A @ B`` for blocks of up to 16 x 16 and few columns, on the CUDA cores.

    A warp computes a block row. `lanes` neighbouring lanes take `width` columns of B each.
    """

    types: Types
    block_r: int
    block_c: int
    lanes: int
    width: int
    #: number of blocks that a lane loads before it uses the first of them
    together: int
    a_transposed: bool = False
    #: least number of CTAs that share a multiprocessor
    ctas: int = 3
    #: number of blocks that a warp copies to shared memory at a time; 0 means that blocks are read from global memory
    chunk: int = 0
    threads: int = 128

    #: kStages of the kernel: number of chunks that a warp holds in shared memory
    stages = 2

    costs: ClassVar = {
        "memory": 3.32, "t0": 7.34, "t0_staged": 5.58, "miss": 10.6, "l_blk": 3.91, "l_staged": 88.5, "l_k": 68.2,
        "l_kF": 32.8, "l_f_h": 3.78, "l_f_s": 3.04, "l_f_d": 9.38, "l_f_i": 8.44, "l_T": 1.23, "i_blk": 11.6,
        "i_b": 0.104, "i_bF": 3.47, "i_a": 0.786, "i_a_staged": 0.102, "i_f_h": 0.158, "i_f_s": 0.114, "i_f_d": 0.0118,
        "i_f_i": 0.079, "l2": 0.454, "l2_staged": 0.645,
    }  # fmt: skip

    @property
    def staged(self) -> bool:
        """Whether blocks are copied to shared memory first."""
        return self.chunk > 0

    @property
    def shared_bytes(self) -> int:
        """The size of all chunks in bytes: each warp has `stages` structs `Chunk` of cuda/common/chunks.cuh."""
        if not self.staged:
            return 0
        values = -(-self.chunk * self.block_r * self.block_c * BYTES[self.types.a] // 16) * 16 + 16
        return self.threads // 32 * self.stages * -(-(values + self.chunk * BYTES[self.types.index]) // 16) * 16

    def grid(self, problem: Problem, card: Card) -> tuple[int, ...]:
        """Without staging, block rows (of all batches) and column tiles. With staging, CTAs that each loop over block
        rows, column tiles, and batches.
        """
        block_rows, batches, warps = problem.block_rows, problem.batches, self.threads // 32
        tiles = min(MAX_GRID_YZ, -(-problem.N // (self.lanes * self.width)))
        if not self.staged:
            return min(MAX_GRID_X, -(-block_rows * batches // warps)), tiles
        return min(self.ctas * card.multiprocessors, -(-block_rows // warps)), tiles, min(MAX_GRID_YZ, batches)

    def microseconds(self, problem: Problem, card: Card, x: dict[str, float]) -> float:
        """A warp has a block row, whose blocks its groups of lanes share, and lanes * width columns."""
        p, of, kind, size = problem, rows_of(problem), width(problem), BYTES[problem.types.a]
        across, share = p.b_order == "F", 32 // self.lanes
        turns, fma = -(-p.N // (self.lanes * self.width)), p.R * p.K * self.width * work(p)
        warps, resident = p.block_rows * p.batches * turns, self.threads // 32 * self.ctas
        rounds = max(1.0, warps / (card.multiprocessors * resident))
        each = x["l_staged" if self.staged else "l_blk"] / self.together + x["l_f_" + kind] * fma
        each += p.K * (x["l_k"] + (x["l_kF"] if across else 0.0))
        chain = (
            (math.ceil(of.longest / share) + (rounds - 1) * of.mean / share) * each * (x["l_T"] if p.transposed else 1)
        )
        load = x["i_bF" if across else "i_b"] * p.K * self.width * max(1, size // 4)
        read = x["i_a_staged" if self.staged else "i_a"] * p.R * p.K * max(1, size // 4)
        issue = (
            math.ceil(warps / card.multiprocessors / 4)
            * 4
            * of.mean
            / share
            * (x["i_blk"] + load + read + x["i_f_" + kind] * fma)
        )
        lines = min(resident, max(1, warps / card.multiprocessors)) * self.lanes * self.width * share
        miss = 32 * x["miss"] * missed(lines) if across else 0.0
        a, b, c = operand_bytes(p)
        again = turns if a > card.l2_bytes else 1
        busy = overlapped(chain / 1e3, issue / 1e3) / speed(card)
        l2 = x["l2_staged" if self.staged else "l2"] * from_l2(card, p.blocks * p.K * p.N * p.batches * (size + miss))
        return x["t0_staged" if self.staged else "t0"] + overlapped(
            busy, l2, x["memory"] * memory(card, a * again, b, c)
        )

    def runs_on(self, arch: str) -> bool:
        staged = tensor_arch(arch) and self.shared_bytes <= shared_kb(arch) * 1024
        return super().runs_on(arch) and (staged or not self.staged)

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        small = max(problem.R, problem.K) <= MOST_SMALL and problem.blocks < 2**31
        return small and 1 < problem.N <= FEW_COLUMNS and problem.parts == 1

    @classmethod
    def best(cls, problem: Problem) -> Spmm:
        if copied_in_pieces(problem) and not (problem.R >= DMMA_ROWS and problem.types.of_one("f64")):
            return spmm_staged(problem.types, problem.R, problem.K, problem.N, shared_kb(problem.arch))
        return spmm_small(problem.types, problem.R, problem.K, problem.N, problem.transposed, problem.b_order == "C")

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Spmm]:
        for dtype, index in itertools.product(dtypes, INDEX):
            names = names_of(dtype, index)
            for (R, K), transposed, aligned in itertools.product(SHAPES, (False, True), (False, True)):
                yield spmm_small(names, R, K, 16, transposed, aligned)
                tensor = names.of_one("f64") and R >= DMMA_ROWS
                if aligned and not transposed and not tensor and (names.of_one("f32") or names.of_one("f64")):
                    yield from (spmm_staged(names, R, K, N, kilobytes) for N in (4, 16, 64) for kilobytes in (227, 99))


@dataclass(frozen=True)
class SpmmF64(ByRows, source="spmm_f64.cu", argument=arguments.product("f64"), needs="sm_80"):
    """``A @ B`` for float64 and few columns, on the tensor cores.

    A warp computes ``16 * pairs`` columns. It loads the operands of `together` instructions before it uses the first.
    """

    index: str
    block_r: int
    block_c: int
    pairs: int
    together: int
    #: least number of CTAs that share a multiprocessor
    ctas: int
    #: largest number of tiles of eight rows that a warp computes
    tiles: int = 2

    threads, shared_bytes = 128, 0
    acc = "f64"

    costs: ClassVar = {
        "t0": 17.3, "l_blk": 98.1, "l_g": 71.0, "l_m": 12.7, "i_blk": 0.403, "i_s": 5.38, "i_m": 2.3, "l2": 0.896,
    }  # fmt: skip

    def microseconds(self, problem: Problem, card: Card, x: dict[str, float]) -> float:
        """A warp has 8 or 16 rows of a block row and 16 * pairs columns; steps of 4 along K, some of them together."""
        p, of = problem, rows_of(problem)
        high = min(self.tiles, -(-p.R // 8))
        parts, steps, products = -(-p.R // (8 * high)), math.ceil(p.K / 4), high * 2 * self.pairs
        turns = -(-p.N // (16 * self.pairs))
        warps = p.block_rows * p.batches * parts * turns
        rounds = max(1.0, warps / (card.multiprocessors * 4 * self.ctas))
        each = x["l_blk"] + math.ceil(steps / self.together) * x["l_g"] + steps * products * x["l_m"]
        chain = (of.longest + (rounds - 1) * of.mean) * each
        issue = (
            math.ceil(warps / card.multiprocessors / 4)
            * 4
            * of.mean
            * (x["i_blk"] + steps * (x["i_s"] + x["i_m"] * products))
        )
        busy = overlapped(chain / 1e3, issue / 1e3) / speed(card)
        a, b, c = operand_bytes(p)
        l2 = x["l2"] * from_l2(card, p.blocks * p.K * p.N * p.batches * 8 * parts)
        return x["t0"] + overlapped(busy, l2, memory(card, a * (turns if a > card.l2_bytes else 1), b, c))

    def grid(self, problem: Problem, card: Card) -> tuple[int, int, int]:
        """Block rows or parts of them, a warp each, along x; column tiles along y; batches along z."""
        warps = problem.block_rows * -(-self.block_r // (8 * min(self.tiles, -(-self.block_r // 8))))
        return (
            min(MAX_GRID_X, -(-warps // (self.threads // 32))),
            min(MAX_GRID_YZ, -(-problem.N // (16 * self.pairs))),
            min(MAX_GRID_YZ, problem.batches),
        )

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        """It numbers the rows of B with 32 bits."""
        return (
            1 < problem.N <= FEW_COLUMNS
            and problem.N % 2 == 0
            and problem.types.of_one("f64")
            and problem.R >= DMMA_ROWS
            and max(problem.R, problem.K) <= _MOST_DMMA
            and max(problem.blocks, problem.batches) < 2**31
            and problem.block_cols * problem.K < 2**32
            and copied_in_pieces(problem)
        )

    @classmethod
    def best(cls, problem: Problem) -> SpmmF64:
        return spmm_f64(problem.types.index, problem.R, problem.K, problem.N)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[SpmmF64]:
        if np.dtype(np.float64) not in dtypes:
            return
        for index in ("i32", "i64"):
            yield from (spmm_f64(index, n, n, N) for n in (20, 32, 64, 128) for N in (16, 64))
            yield from (spmm_f64(index, R, K, N) for R, K in SHAPES if R >= DMMA_ROWS for N in (16, 64))


@lru_cache(maxsize=4096)
def spmm_small(names: Types, R: int, K: int, N: int, transposed: bool = False, aligned: bool = False) -> Spmm:
    """Return the kernel for a product of small blocks with few columns.

    A lane takes 16 bytes of each row of B, or fewer if its sums would need too many registers. Blocks of 4 rows, and of
    8 rows and more, are faster with fewer columns per lane: 0.50 ms instead of 0.54 ms with 4 rows, and 1.31 ms instead
    of 1.52 ms with 8 rows, in one benchmark case each on an H200.
    """
    words = R * max(1, number(names.acc).itemsize // 4)
    width = 16 // BYTES[names.b] if aligned else 1
    if R == 4 or R >= 8:
        width = min(width, 2 if BYTES[names.b] < 8 else 1 if R >= 8 else 2)
    while width > 1 and (N % width or words * width > 48):
        width //= 2
    light = words * width <= 8 and names.acc != "c128"
    together = 4 if K <= 2 and light else 1
    # Some of the variants with four blocks under way spill a few registers with 8 CTAs. With 5 or 6, which spill none,
    # they are up to 20 % slower on an H200.
    at_least = 8 if light else 3 if words * width < 64 else 2
    return Spmm(names, R, K, ceil_power_of_two(-(-N // width), 32), width, together, transposed, at_least)


def _chunk(bytes_of_block: int, wanted: int, period: int, most: int) -> tuple[int, int]:
    """Return the number of blocks of a chunk, a multiple of `period`, and how many CTAs fit a multiprocessor.

    The CTAs are counted with four warps each, and each warp has two chunks in shared memory.
    """

    def stages(chunk: int) -> int:
        return 4 * 2 * (-(-chunk * bytes_of_block // 16) * 16 + 16 + 8 * chunk)

    chunk = max(period, min(most, wanted // bytes_of_block) // period * period)
    while chunk > period and stages(chunk) > _STATIC_BYTES:
        chunk -= period
    return chunk, _ALL_STAGES // stages(chunk)


@lru_cache(maxsize=4096)
def spmm_staged(names: Types, R: int, K: int, N: int, shared_kb: int = 227) -> Spmm:
    """Return the kernel for a product of small float32 or float64 blocks with few columns, where all is aligned.

    A lane takes 16 bytes of each row of B; it takes fewer of float32 if blocks have 4 rows, or 8 and more, as in
    `spmm_small`. There are as many warps as registers allow: a lane needs registers for its sums, for its values of B
    in flight, and for some more where loops are not unrolled. If its shared memory suffices, one CTA has all warps of a
    multiprocessor, so that its block rows are neighbours and find B in the L1 cache. The smallest blocks have CTAs of
    four warps instead. float64 blocks are copied a few at a time, which leaves more memory to the L1 cache.
    Milliseconds on an H200 for 16 columns and block rows of 27 float64 blocks:

    ======  ===================================  ==============  ====
    blocks  CTAs                                 random columns  mesh
    ======  ===================================  ==============  ====
    3 x 3   as chosen here                       0.42            0.39
    3 x 3   four warps, 28 blocks at a time      0.46            0.38
    4 x 4   as chosen here                       0.57 to 0.65    0.53
    4 x 4   four warps, 28 blocks at a time      0.64            0.57
    ======  ===================================  ==============  ====
    """
    size = BYTES[names.a]
    width = 16 // size
    if R == 4 or R >= 8:
        width = 2
    while N % width:
        width //= 2
    lanes = ceil_power_of_two(-(-N // width), 32)
    block = R * K * size
    together = 2 if block <= 16 else 1
    deep = K if K <= 4 else next(n for n in (4, 3, 5, 7, 2, 1) if K % n == 0)
    words = (R + deep * together) * width * size // 4 + (16 if deep < K else 0) + (16 if R >= 7 else 0)
    # Registers that ptxas needs beyond our count, found by compiling until nothing spilled.
    words += (3 * size if names.index == "i64" else 0) + (12 if K > 8 or (size == 8 and deep < K) else 0)
    if K <= 3 and R <= 4 and words <= 24:
        warps = 32 if words <= 16 or K == 3 else 28
    elif R <= 5 and deep == K and words <= 40:
        # Float64 blocks of 4 and 5 rows by 4 columns need more than the 80 registers of 24 warps on sm_86 and sm_89.
        warps = 28 if words <= 16 else 20 if size == 8 and K == 4 <= R and shared_kb <= _FEW_F64_KB else 24
    else:
        warps = 20 if words <= 56 and R < _TALL else 16 if words <= 72 else 12
    wanted = _FEW_BYTES if size == 8 and 64 < block <= 100 and lanes >= 8 else _CHUNK_BYTES[size]
    chunk, ctas = _chunk(block, wanted, *((4, 28) if lanes >= 8 else (8, 32)))
    config = Spmm(names, R, K, lanes, width, together, ctas=1, chunk=chunk, threads=32 * warps)
    if block > 32 and config.shared_bytes <= shared_kb << 10:
        return config
    return replace(config, threads=128, ctas=min(warps // 4, ctas))


@lru_cache(maxsize=4096)
def spmm_f64(index: str, R: int, K: int, N: int) -> SpmmF64:
    """Return the kernel for a product of float64 blocks of 6 rows and more with few columns, where all is aligned.

    In a sweep over 17 cases on an H200, it was best to have the operands of three or four instructions in flight, if
    registers allow. With 16 columns and 300,000 block rows of 27 blocks, the product takes 1.06 ms with blocks of 6 x 6
    and 1.46 ms with blocks of 8 x 8.
    """
    if N <= 16:
        if R <= 8:
            return SpmmF64(index, R, K, 1, 2 if K == 8 else 3, 6)
        return SpmmF64(index, R, K, 1, 4, 5) if K % 16 == 0 else SpmmF64(index, R, K, 1, 3, 6)
    return SpmmF64(index, R, K, 2, 3, 5 if R > 8 else 8 if index == "i32" else 6)
