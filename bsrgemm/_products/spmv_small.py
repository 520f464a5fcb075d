"""``A @ x`` for one vector x and blocks of up to 16 x 16: how lanes share block rows, and how many loads are in flight.

The rules were fitted to measurements on an H200. "In flight" are values that a lane has loaded and not used yet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from .._kernels import element_types
from .._kernels.card import Card
from .._kernels.element_types import BYTES, Types, number
from .._kernels.jit import MAX_GRID_X
from .._kernels.launch import Launch, Scratch, address
from . import arguments
from .call import Problem
from .costs import memory, operand_bytes, overlapped, rows_of, speed
from .dense import Dense, ceil_power_of_two
from .gemm_simt import INDEX, names_of
from .operand import Kind

#: The largest block side, and the largest number of columns of B, of the kernels for small blocks.
MOST_SMALL, FEW_COLUMNS = 16, 1 << 16
#: Number of blocks in a block row of a mesh of hexahedra, and number of registers for values that a lane has in flight.
USUAL_ROW, _MOST_WORDS = 27, 36
#: Block rows of at most so many blocks are shared by few lanes, if a block has at most so many bytes.
_SHORT_ROW, _HEAVY_BYTES = 14, 648
#: Blocks of at most the first number of bytes are limited by instructions instead of memory, and blocks of at most the
#: second number nearly so. The third is the number of registers for what a lane has in flight of the smallest ones.
_SMALLEST_BYTES, _LIGHT_BYTES, _EAGER_WORDS = 100, 144, 68


#: Threads of a CTA that were measured to be faster than those of the rule, by the block and the threads of the rule.
#: 1 x 1 blocks of float64, 300,000 block rows of 27 blocks, on an H200: 832 threads (26 warps) take about 30 us, 768
#: threads about 31 us. Registers would allow 896 threads, which are not faster.
_MEASURED_THREADS = {(1, 1, 768): 832}
#: Sizes of blocks whose variants are listed.
SHAPES = (*((n, n) for n in range(1, MOST_SMALL + 1)), (2, 3), (3, 2), (1, 16), (16, 1), (13, 11), (6, 16))


@dataclass(frozen=True)
class SpmvSmall(
    Dense,
    source="spmv_small.cu",
    argument=lambda acc: (arguments.product(acc), arguments.LONG_ROWS),
):
    """``A @ x`` for one vector x and blocks of up to 16 x 16.

    `lanes` threads share a block row. A group of `row_lanes` by `column_lanes` of them shares a block.
    """

    types: Types
    block_r: int
    block_c: int
    lanes: int
    row_lanes: int
    column_lanes: int
    #: number of blocks that a lane loads before it uses the first of them
    together: int
    #: whether each CTA processes a range of neighbouring block rows
    in_chunks: bool
    a_transposed: bool = False
    threads: int = 128
    #: least number of CTAs that share a multiprocessor
    ctas: int = 4
    #: whether x is contiguous and starts at a multiple of 16 bytes
    x_adjacent: bool = False
    #: whether a lane issues all its loads at once, with predicates; where a CTA has many rows, in chunks or in turns,
    #: it also loads the column indices of a row before it needs the values of that row
    eager: bool = False
    #: number of block rows that the same lanes process at once
    rows_together: int = 1

    #: kLong of the kernel: a block row with more blocks than this is cut into pieces, of so many blocks each
    long, piece = 256, 512
    shared_bytes = 0

    costs: ClassVar = {
        "t0": 7.2, "l_small": 1.0,
    }  # fmt: skip

    def grid(self, problem: Problem, card: Card) -> tuple[int]:
        """The CTAs for all block rows.

        With `in_chunks` or `eager` there are only as many as run at the same time, and the block rows are divided among
        them: each has neighbouring ones, or they take turns.
        """
        block_rows = problem.block_rows
        if self.in_chunks or self.eager:
            return (max(1, min(-(-block_rows // (32 // self.lanes)), self.ctas * card.multiprocessors)),)
        rows = self.threads // self.lanes * self.rows_together
        return (max(1, min(MAX_GRID_X // 2, -(-block_rows // rows))),)

    def microseconds(self, problem: Problem, card: Card, x: dict[str, float]) -> float:
        """Some lanes share a row; rows of usual length are hidden by the reading of A."""
        chain = rows_of(problem).longest / self.lanes * x["l_small"] * problem.R / 1e3 / speed(card)
        return x["t0"] + overlapped(chain, memory(card, *operand_bytes(problem)))

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        small = max(problem.R, problem.K) <= MOST_SMALL and problem.blocks < 2**31
        return small and problem.N == 1 and problem.batches == 1 and problem.parts == 1

    @classmethod
    def best(cls, problem: Problem) -> SpmvSmall:
        options = (problem.transposed, problem.aligned, problem.b_order == "F")
        return spmv_small(problem.types, problem.R, problem.K, *options, _row(problem))

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[SpmvSmall]:
        for dtype, index in itertools.product(dtypes, INDEX):
            names = names_of(dtype, index)
            for (R, K), transposed, aligned in itertools.product(SHAPES, (False, True), (False, True)):
                yield spmv_small(names, R, K, transposed, aligned and not transposed)
                if aligned and not transposed:
                    yield from (spmv_small(names, R, K, False, True, True, row) for row in (1, 2, 4, 9, USUAL_ROW))
                if aligned and transposed and names.index == "i32":
                    yield from (spmv_small(names, R, K, True, False, True, row) for row in (1, 2, 4, 9, USUAL_ROW))

    def prepare(self, call: Kind, card: Card) -> Launch:
        problem, operand = call.problem, call.operand
        where = (call.stored_columns, problem.transposed)
        index, grid = operand.index(*where), self.grid(problem, card)
        rows, bounds = operand.row_shares(*where, self.long, self.piece, grid[0] if self.in_chunks else 0)
        long = arguments.LONG_ROWS.pack(
            pieces=rows.pieces.data.ptr,
            parents=rows.parents.data.ptr,
            count=rows.count.data.ptr,
            bounds=address(bounds),
            partial=0,
            arrived=0,
        )
        scratch = None
        if rows.bound:  # otherwise no block row can be long
            pointers, first = arguments.LONG_ROWS.patch("partial", "arrived"), arguments.product(self.acc).size
            size = rows.bound * problem.R * element_types.number(self.acc).itemsize
            scratch = Scratch(size, rows.bound, lambda to, memory, zeros: pointers.write(to[first:], memory, zeros))
        return self.launch(call, grid, index, behind=bytes(long), scratch=scratch, holds=(rows, bounds))


def _row(problem: Problem) -> int:
    """Return a guess of the number of blocks that most block rows do not exceed; only the mean is known.

    A mean close to an integer suggests a grid, whose rows have fewer blocks at its edges; the guess is that integer.
    Otherwise block rows differ in length, and the guess is larger than the mean. It is 27 at most.
    """
    mean = problem.blocks / max(1, problem.block_rows)
    near = round(mean)
    row = near if abs(mean - near) <= 0.02 * mean else round(mean + math.sqrt(mean) / 2)
    return max(1, min(row, USUAL_ROW))


@lru_cache(maxsize=4096)
def spmv_small(
    names: Types,
    R: int,
    K: int,
    transposed: bool = False,
    aligned: bool = False,
    x_adjacent: bool = False,
    row: int = USUAL_ROW,
) -> SpmvSmall:
    """Return the kernel for a product of small blocks with one vector.

    `row` is the number of blocks that most block rows do not exceed. The rules are close to the best of some thousand
    variants that were measured on an H200.

    A lane reads 16 or 8 bytes of a row of a block at once if the rows start at such multiples, otherwise one element.
    It takes as many rows of the block as give it at least 24 bytes. The more blocks a lane has in flight, the better,
    as far as registers allow: it loads all its blocks of a block row at once, or three or four, whichever leaves fewer
    lanes idle at the end of the block row. In blocks of up to 6 x 6, a lane takes more rows of the block if that leaves
    fewer lanes without work.
    """
    size, columns = BYTES[names.a], 1
    if R * K * size <= _SMALLEST_BYTES or row <= (_SHORT_ROW if R * K * size <= _HEAVY_BYTES else 4):
        by_rows = _spmv_by_rows(names, R, K, row) if aligned and x_adjacent and not transposed else None
        if by_rows is not None:
            return by_rows
        return _spmv_whole(names, R, K, row, transposed, aligned, x_adjacent)
    light = _spmv_light(names, R, K, x_adjacent) if aligned and not transposed else None
    if light is not None:
        return light
    if aligned and not transposed:
        columns = next((n for n in (16 // size, 8 // size) if n > 1 and K % n == 0), 1)
    across = K // columns
    fits = [n for n in range(R, 0, -1) if R % n == 0 and n * across <= 32 and R // n * columns * size >= 24] or [1]

    def words_of(down: int) -> int:
        return R // down * columns * max(1, size // 4)

    def lanes_of(down: int) -> int:
        return 16 if down * across <= 7 and words_of(down) < 24 and 16 % (down * across) <= 1 else 32

    def idle(down: int) -> int:
        return lanes_of(down) % (down * across) * 32 // lanes_of(down)

    down = fits[0]
    if R * K <= 36 and idle(down) > 3:
        down = min(fits, key=idle)
    lanes, words = lanes_of(down), words_of(down)
    side = lanes // (down * across)
    whole = -(-row // side)
    if whole <= 6 and whole * words <= _MOST_WORDS:
        together = whole
    else:
        few = [n for n in (4, 3) if n * words <= _MOST_WORDS] or [max(1, min(2, _MOST_WORDS // words))]
        together = min(few, key=lambda n: -(-row // (side * n)) * side * n)
    at_least = 4 if R // down * (1 + together * columns) * number(names.acc).itemsize <= 256 else 2
    return SpmvSmall(names, R, K, lanes, down, across, together, False, transposed, 128, at_least, x_adjacent)


def _spmv_light(names: Types, R: int, K: int, x_adjacent: bool) -> SpmvSmall | None:
    """Return the kernel for blocks of more than 100 and at most 144 bytes, or None if it does not apply.

    Such blocks gain from more CTAs on a multiprocessor. A lane has three blocks in flight. It reads 8 bytes of each
    row that it takes of a block: half of the rows if their number is even, otherwise all.
    """
    size = BYTES[names.a]
    if not _SMALLEST_BYTES < R * K * size <= _LIGHT_BYTES or size > 8 or names.index != "i32":
        return None
    columns, down = 1 if K % (8 // size) else 8 // size, 1 + (R % 2 == 0)
    if R // down * columns * max(1, size // 4) > 6:
        return None
    across = K // columns
    lanes = 32 if 16 % (down * across) > 1 else 16
    return SpmvSmall(names, R, K, lanes, down, across, 3, False, False, 128, 8, x_adjacent)


def _spmv_by_rows(names: Types, R: int, K: int, row: int) -> SpmvSmall | None:
    """Return the kernel for block rows of one or two blocks, or of a few more small ones, or None if it does not apply.

    A lane takes whole rows of blocks, each of which is contiguous in memory. If these are few bytes, it processes two
    or four block rows at once; 48 bytes in flight are enough. Fraction of the bandwidth of a device-to-device copy on
    an H200, for one block in each block row, if the lanes share the columns of a block or its rows:

    =============  =======  ====
    blocks         columns  rows
    =============  =======  ====
    float64 3 x 3  0.63     0.83
    float32 3 x 3  0.43     0.70
    float64 2 x 3  0.56     0.89
    float32 2 x 3  0.36     0.81
    =============  =======  ====
    """
    size = BYTES[names.a]
    under_way = row * K * size
    if max(R, K) > 8 or K < 3 or not (names.of_one("f32") or names.of_one("f64")) or names.index != "i32":
        return None
    if not (under_way <= 64 and (row <= 2 or size == 4)) and not (row == 2 and K * size >= 56):
        return None
    if K % 4 == 0 and under_way < 32:
        return None
    rows = 1 if row > 2 or under_way >= 48 else 2 if under_way >= 16 else 4
    words = rows * (row * (K * size // 2 + 3) + 3 * size // 4 + 1)
    threads = next((n for most, n in ((44, 1024), (60, 768)) if words <= most), 512)
    return SpmvSmall(names, R, K, ceil_power_of_two(R, 8), R, 1, row, True, False, threads, 1, True, True, rows)


def _spmv_whole(
    names: Types, R: int, K: int, row: int, transposed: bool, aligned: bool, x_adjacent: bool
) -> SpmvSmall:  # fmt: skip
    """Return the kernel for short block rows, and for blocks that are limited by instructions instead of memory.

    So few lanes share a block row that each has several of its blocks. A lane loads all its blocks of a block row at
    once, up to seven. It reads 16 to 24 bytes of a block, 8 from each row of the block; for large blocks, and for block
    rows of one block, it reads up to 48 bytes, 16 from each row. A multiprocessor has one CTA with as many threads as
    registers allow. It processes neighbouring block rows, so that x stays in the L1 cache, or takes turns with the
    others in a product with the transpose.
    """
    size, bytes_of_block = BYTES[names.a], R * K * BYTES[names.a]
    much = row == 1 or bytes_of_block > _HEAVY_BYTES
    columns = max(1, (16 if much else 8) // size) if aligned and not transposed else 1
    while columns > 1 and (K % columns or R * columns > 48):
        columns //= 2
    across = K // columns
    shares = [n for n in range(1, R + 1) if R % n == 0 and n * across <= 32 and R // n * columns * size >= 16] or [1]
    small = (n for n in shares if R // n * columns * size <= (48 if much else 24))
    down = 1 if bytes_of_block <= _SMALLEST_BYTES and row > 1 else next(small, shares[-1])
    # Registers for each block in flight: its values, its part of x, its column index, and either (eager) the column
    # index of a block of the next block row or the computation of addresses.
    eager = x_adjacent and names.index == "i32" and names.a != "boolean"
    columns_ahead = 2 + transposed if eager else 6 if transposed or names.index == "i64" else 4
    each = R // down * columns * max(1, size // 4) + columns * max(1, BYTES[names.b] // 4) + columns_ahead
    sums = R // down * max(1, number(names.acc).itemsize // 4)
    limit = max(1, min(7 if size >= 8 or R * K == 1 else 6, (_EAGER_WORDS - sums) // each))
    lanes = next(n for n in (1, 2, 4, 8, 16, 32) if n >= down * across)
    # In a product with the transpose, twice as many blocks as fit are no reason for more lanes: what counts is how many
    # are in flight, since neighbouring blocks of a row lie far apart.
    while lanes < 32 and -(-row // (lanes // (down * across))) > limit * (1 + (eager and transposed)):
        lanes *= 2
    whole = -(-row // (lanes // (down * across)))
    together = min(whole, limit) if eager and transposed else -(-whole // -(-whole // limit))
    rows = 2 if row == 1 and eager and names.of_one("f32") and R // down * columns <= 6 else 1
    # Registers that ptxas needs beyond our count, found by compiling until nothing spilled.
    words = together * each + (2 if sums <= 6 else 3) * sums
    words = rows * words + (14 if columns * size > 8 else 3 if down > 1 else 0)
    words += (5 if size >= 4 else 13) if eager and transposed else 0
    if names.acc == "c128":
        words = rows * (together * each * 3 // 2 + 4 * sums)
    threads = next((n for most, n in ((43, 1024), (62, 768), (72, 640), (100, 512)) if words <= most), 256)
    if not transposed:
        threads = _MEASURED_THREADS.get((R, K, threads), threads)
    # CTAs take turns in a product with the transpose: rows that are computed at the same time have blocks in the same
    # lines of memory, which the L2 then has for all of them.
    chunks = not (eager and transposed)
    return SpmvSmall(
        names, R, K, lanes, down, across, together, chunks, transposed, threads, 1, x_adjacent, eager, rows
    )
