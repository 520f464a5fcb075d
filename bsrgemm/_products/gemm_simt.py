"""The kernels of ``A @ B`` for any block size, dtype and strides on the CUDA cores, and the one for few columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._kernels import overlapping
from .._kernels.card import Card, tensor_arch
from .._kernels.element_types import BYTES, Types, element, types
from .._kernels.jit import MAX_GRID_X, MAX_GRID_YZ
from .._kernels.launch import Launch
from ..dtypes import HALF_DTYPES, accumulator_dtype, result_dtype
from . import arguments
from .call import Problem
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
    reached = (0.4, 0.3)

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
    reached = (0.7, 0.3)

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
    reached = (0.6, 0.6)
    #: It has 8 warps where it has at most so many tiles of 16 rows: two CTAs for each of 132 multiprocessors.
    _few_tiles = 2 * 2 * FEW_TILES

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
        ahead = overlapping.thread.active and overlapping.can_overlap(card.arch) and call.operand.whole is not None
        ready = replace(self, read_ahead=True) if ahead else self
        return super(GemmFew, ready).prepare(call, card)
