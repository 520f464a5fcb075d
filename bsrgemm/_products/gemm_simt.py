"""The kernels of ``A @ B`` for any block size, dtype and strides on the CUDA cores, and the one for few columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from .._kernels import overlapping
from .._kernels.card import Card, tensor_arch
from .._kernels.element_types import BYTES, Types, element, types
from .._kernels.jit import MAX_GRID_X, MAX_GRID_YZ
from .._kernels.launch import Launch
from ..dtypes import HALF_DTYPES, accumulator_dtype, result_dtype
from . import arguments
from .call import Problem
from .costs import REGISTERS, from_l2, memory, missed, operand_bytes, overlapped, rows_of, speed, width, work
from .dense import ByRows, ceil_power_of_two, floor_power_of_two
from .gemm_sm90 import FEW_TILES
from .operand import Kind

#: Blocks whose sides are at most this have their size compiled into the kernel spmv, so that the compiler replaces
#: divisions by the size with multiplications.
_SMALL_BLOCK = 8
#: The dtypes of index arrays.
INDEX: tuple[np.dtype[Any], ...] = (np.dtype(np.int32), np.dtype(np.int64))


def names_of(dtype: np.dtype[Any], index: np.dtype[Any]) -> Types:
    """The types of a product of operands of one dtype, with a result of the promoted dtype."""
    result = result_dtype(dtype, dtype)
    return types(dtype, dtype, result, accumulator_dtype(result), index)


@dataclass(frozen=True)
class GemmSimt(ByRows, source="gemm_simt.cu", argument=arguments.product):
    """``A @ B`` on the CUDA cores, for any block size, any dtype and any strides."""

    types: Types
    rows: int
    cols: int
    lanes: int
    a_transposed: bool = False

    threads, shared_bytes = 128, 0

    costs: ClassVar = {
        "memory": 5.45, "t0": 4.01, "l0": 57.4, "l_F": 0.991, "miss": 25.4, "l_b": 0.443, "l_a": 3.21, "l_f": 5.97,
        "l_blk": 337.0, "l_T": 1.42, "i_blk": 27.9, "i_a": 0.0841, "i_b_h": 0.101, "i_b_s": 1.61, "i_b_d": 5.62,
        "i_b_i": 0.0359, "i_bF_h": 7.33, "i_bF_s": 11.1, "i_bF_d": 24.3, "i_bF_i": 7.03, "i_f_h": 1.15, "i_f_s": 0.609,
        "i_f_d": 0.00913, "i_f_i": 1.59, "l2": 0.0375,
    }  # fmt: skip

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        return problem.N != 1 and problem.parts == 1

    @classmethod
    def best(cls, problem: Problem) -> GemmSimt:
        return cls._for(problem.types, problem.R, problem.N, problem.transposed)

    @classmethod
    def _for(cls, names: Types, R: int, N: int, transposed: bool = False) -> GemmSimt:
        lanes = ceil_power_of_two(N, 32)
        wide = names.acc in ("f64", "u64", "c64", "c128")
        rows = floor_power_of_two(R, 4 if wide else 8)
        # A value of B is used in `rows` products, a value of A in `cols`. 8 x 4 sums of 32 bits take 32 registers, as
        # do 4 x 4 sums of 64 bits.
        cols = floor_power_of_two(-(-N // lanes), 4) if lanes == 32 and names.acc != "c128" else 1
        return cls(names, rows, cols, lanes, transposed)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[GemmSimt]:
        for dtype, index in itertools.product(dtypes, INDEX):
            names = names_of(dtype, index)
            found = {cls._for(names, R, N) for R in (1, 2, 4, 8) for N in (2, 4, 8, 16, 32, 64, 128)}
            for each in sorted(found, key=repr):
                yield each
                if index == np.int32:
                    yield replace(each, a_transposed=True)
        if np.dtype(np.uint8) in dtypes:
            yield from (cls._for(Types("e4m3", "e4m3", c, "f32"), 8, 128) for c in ("f16", "bf16", "f32"))

    @property
    def rare(self) -> bool:
        return self.types.index == "i64"

    def microseconds(self, problem: Problem, card: Card, x: dict[str, float]) -> float:
        """A thread has rows x cols sums, and each k waits for its loads: the chain is the longest row times K."""
        p, of, kind, size = problem, rows_of(problem), width(problem), BYTES[problem.types.a]
        across, per_cta = p.b_order == "F", self.threads // self.lanes
        ctas = -(-p.block_rows * p.batches // per_cta) * -(-p.N // (self.lanes * self.cols)) * -(-p.R // self.rows)
        sums, wide = self.rows * self.cols, 2 if kind == "d" else 1
        resident = max(2, min(16, REGISTERS // (128 * (48 + int(1.3 * sums * wide * work(p))))))
        rounds = max(1.0, ctas / (card.multiprocessors * resident))
        each = (
            x["l0"] * (x["l_F"] if across else 1)
            + x["l_b"] * self.cols
            + x["l_a"] * self.rows
            + x["l_f"] * sums * work(p)
        )
        chain = (of.longest + (rounds - 1) * of.mean) * (x["l_blk"] + p.K * each * (x["l_T"] if p.transposed else 1))
        load = x[("i_bF_" if across else "i_b_") + kind]
        issued = x["i_blk"] + p.K * (x["i_a"] * self.rows + load * self.cols + x["i_f_" + kind] * sums * work(p))
        issue = of.mean * issued * -(-ctas // card.multiprocessors) * 4
        lines = min(resident, max(1, ctas / card.multiprocessors)) * 4 * min(p.N, 32 * self.cols)
        miss = missed(lines) if across else 0.0
        l2 = ctas * per_cta * of.mean * p.K * self.lanes * self.cols * (size + 32 * x["miss"] * miss)
        busy = overlapped(chain / 1e3, issue / 1e3) / speed(card)
        return x["t0"] + overlapped(busy, x["l2"] * from_l2(card, l2), x["memory"] * memory(card, *operand_bytes(p)))

    def grid(self, problem: Problem, card: Card) -> tuple[int, int, int]:
        """Block rows (of all batches) along x, columns of B along y, rows of a block along z.

        The kernel loops over whatever exceeds the largest grid.
        """
        block_rows = problem.block_rows * problem.batches
        return (
            min(MAX_GRID_X, -(-block_rows // (self.threads // self.lanes))),
            min(MAX_GRID_YZ, -(-problem.N // (self.lanes * self.cols))),
            min(MAX_GRID_YZ, -(-problem.R // self.rows)),
        )


@dataclass(frozen=True)
class Spmv(ByRows, source="spmv.cu", argument=arguments.product):
    """``A @ x`` for one vector x, for blocks of any size; `lanes` threads share a block row."""

    types: Types
    lanes: int
    rows: int
    block_r: int
    block_c: int
    a_transposed: bool = False
    #: number of columns of a block that a lane reads with one instruction
    vector: int = 1

    threads, shared_bytes = 128, 0

    costs: ClassVar = {
        "t0": 9.0, "half": 1.0, "l_blk": 73.0, "l_k": 86.0,
    }  # fmt: skip

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        return problem.N == 1 and problem.parts == 1

    @classmethod
    def best(cls, problem: Problem) -> Spmv:
        return cls._for(problem.types, problem.R, problem.K, problem.transposed, problem.aligned)

    @classmethod
    def variants(cls, problem: Problem) -> Iterator[Spmv]:
        yield cls.best(problem)
        plain = cls._for(problem.types, problem.R, problem.K, problem.transposed)
        if plain != cls.best(problem):
            yield plain

    @classmethod
    def _for(cls, names: Types, R: int, C: int, transposed: bool = False, aligned: bool = False) -> Spmv:
        """The constants for blocks of R x C.

        A lane keeps `rows` sums; 8 are enough to read a small block in one pass. A narrow block gives work to few
        lanes, so that only 8 lanes share a block row and a warp processes more block rows at once. From 16 columns on,
        every block has work for a whole warp. A lane reads 16 bytes of a larger block at once if blocks are `aligned`.
        """
        small = R <= _SMALL_BLOCK and C <= _SMALL_BLOCK
        lanes = 8 if C <= 2 else 16 if C < 16 else 32
        rows = R if small else 4 if names.acc == "c128" else 8
        vector = 16 // BYTES[names.a]
        if small or transposed or not aligned or C % vector:
            vector = 1
        return cls(names, lanes, rows, R if small else 0, C if small else 0, transposed, vector)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Spmv]:
        sides = range(1, _SMALL_BLOCK + 1)
        for dtype, index in itertools.product(dtypes, INDEX):
            names = names_of(dtype, index)
            blocks = {cls._for(names, R, C) for R in (*sides, 9) for C in (*sides, 9, 16)}
            aligned = {cls._for(names, 9, C, aligned=True) for C in range(1, 17)}
            yield from sorted(blocks | aligned, key=repr)
            if index == np.int32:
                yield from (replace(each, a_transposed=True) for each in sorted(blocks, key=repr))
        if np.dtype(np.uint8) in dtypes:
            yield from (cls._for(Types("e4m3", "e4m3", c, "f32"), 8, 8) for c in ("f16", "bf16", "f32"))

    @property
    def rare(self) -> bool:
        return self.types.index == "i64"

    def microseconds(self, problem: Problem, card: Card, x: dict[str, float]) -> float:
        """The longest row is walked by some lanes, and all of A is read."""
        each = x["l_blk"] + problem.K * min(self.rows, problem.R) / self.lanes / self.vector * x["l_k"] * work(problem)
        chain = rows_of(problem).longest * each * (x["half"] if width(problem) == "h" else 1) / 1e3 / speed(card)
        return x["t0"] + overlapped(chain, memory(card, *operand_bytes(problem)))

    def grid(self, problem: Problem, card: Card) -> tuple[int, int]:
        """Block rows along x, the rows of a block along y."""
        block_rows = problem.block_rows * problem.batches
        rows = min(MAX_GRID_YZ, -(-problem.R // self.rows))
        return min(MAX_GRID_X, -(-block_rows // (self.threads // self.lanes))), rows


@dataclass(frozen=True)
class GemmFew(ByRows, source="gemm_few.cu", argument=arguments.product, needs="sm_80"):
    """``A @ B`` for up to 8 columns of 16-bit floats: the warps of a CTA share 16 rows of a block row."""

    types: Types
    #: whether columns of B lie side by side, aligned to 16 bytes
    b_by_columns: bool
    warps: int = 4
    #: whether A is read before the kernels in front on the stream have ended
    read_ahead: bool = False

    rows, most_columns, chunk = 16, 8, 32
    #: It has 8 warps where it has at most so many tiles of 16 rows: two CTAs for each of 132 multiprocessors.
    _few_tiles = 2 * 2 * FEW_TILES

    costs: ClassVar = {
        "t0": 5.44, "l_c": 78.7,
    }  # fmt: skip

    def microseconds(self, problem: Problem, card: Card, x: dict[str, float]) -> float:
        """The warps of a CTA share the longest row."""
        chain = x["l_c"] * rows_of(problem).longest * problem.K / self.warps / 32 / 1e3 / speed(card)
        return x["t0"] + chain + memory(card, *operand_bytes(problem))

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """The size of the kernel's struct Shared."""
        return 1024 * (1 if self.b_by_columns else self.warps) + 512 * (self.warps // 2)

    @property
    def overlaps(self) -> bool:
        return self.read_ahead

    @property
    def rare(self) -> bool:
        return self.types.index == "i64"

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        """It counts in blocks and chunks by 31 bits."""
        names = problem.types
        return (
            0 < problem.N <= cls.most_columns
            and names.a == names.b
            and names.a in ("f16", "bf16")
            and names.c in (names.a, "f32")
            and names.acc == "f32"
            and tensor_arch(problem.arch)
            and not problem.transposed
            and problem.aligned
            and problem.R % cls.rows == 0
            and problem.K % cls.chunk == 0
            and max(problem.R * problem.K, problem.blocks * (problem.K // cls.chunk)) < 2**31
        )

    @classmethod
    def best(cls, problem: Problem) -> GemmFew:
        row_tiles = problem.block_rows * (problem.R // cls.rows) * problem.batches
        return cls(problem.types, problem.b_order == "F", 8 if row_tiles <= cls._few_tiles else 4)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[GemmFew]:
        for dtype in (d for d in dtypes if d in HALF_DTYPES):
            half = element(dtype)
            for index, c, by_columns in itertools.product(("i32", "i64"), (half, "f32"), (False, True)):
                for warps, read_ahead in itertools.product((4, 8), (False, True)):
                    yield cls(Types(half, half, c, "f32", index), by_columns, warps, read_ahead)

    def grid(self, problem: Problem, card: Card) -> tuple[int, int]:
        """16 rows each along x, batches along y."""
        row_tiles = problem.block_rows * (problem.R // self.rows)
        return min(MAX_GRID_X, row_tiles), min(MAX_GRID_YZ, problem.batches)

    def prepare(self, call: Kind, card: Card) -> Launch:
        # A may be read before the kernels in front have ended, unless one of these still makes a copy of it.
        as_stored = call.operand.whole is not None and not call.copied
        ahead = overlapping.thread.active and overlapping.can_overlap(card.arch) and as_stored
        ready = replace(self, read_ahead=True) if ahead else self
        return super(GemmFew, ready).prepare(call, card)
