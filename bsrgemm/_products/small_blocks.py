"""Rules for blocks of up to 16 x 16: of how many lanes, blocks under way and CTAs each kernel is made, and why."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from .._kernels.element_types import BYTES, Types, number
from .configs import Spmm, SpmmF64, SpmvSmall

#: Sides of blocks, and columns, that the kernels for small ones take.
_MOST_SMALL, _FEW_COLUMNS = 16, 128
#: Blocks of a row of a mesh of hexahedra, and registers for values that a lane has under way.
_USUAL_ROW, _MOST_WORDS = 27, 36
#: Rows of up to so many blocks have few lanes, if blocks have no more than so many bytes.
_SHORT_ROW, _HEAVY_BYTES = 14, 648
#: Blocks of so many bytes are limited by instructions, or nearly so; registers for what a lane has under way of these.
_SMALLEST_BYTES, _LIGHT_BYTES, _EAGER_WORDS = 100, 144, 68


def _ceil_power_of_two(n: int, most: int) -> int:
    return min(most, 1 << (max(1, n) - 1).bit_length())


@lru_cache(maxsize=4096)
def spmv_small(
    names: Types,
    R: int,
    K: int,
    transposed: bool = False,
    aligned: bool = False,
    x_adjacent: bool = False,
    row: int = _USUAL_ROW,
) -> SpmvSmall:
    """The kernel for a product of small blocks with one vector: of some thousand ways on an H200, rules near the best.

    `row` is how many blocks most rows have, at most.

    A lane takes 16 or 8 bytes of a row of a block, where rows start at multiples of them, otherwise one element, and so
    many rows that it has 24 bytes of a block. The more blocks a lane has under way, the better, as long as registers
    allow: those of a row at once, or three or four, whichever leaves fewer lanes idle at its end. Of blocks of
    up to 6 x 6 a lane takes more rows where that leaves fewer lanes without work.
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
    """Blocks of little more than 100 bytes gain by more CTAs: of three blocks a lane has 8 bytes of half the rows."""
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
    """Rows of one or two blocks, or few more small ones: a lane has whole rows of blocks.

    What a lane has under way of one row of blocks lies together. Where that is little, it has two or four of these at
    once: 48 bytes in all are enough. Share of a copy's bandwidth on an H200, lanes for columns and lanes for rows: 3 x
    3 blocks on the diagonal .63 and .83 in float64, .43 and .70 in float32, 2 x 3 .56 and .89, .36 and .81.
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
    threads = next((n for room, n in ((44, 1024), (60, 768)) if words <= room), 512)
    return SpmvSmall(names, R, K, _ceil_power_of_two(R, 8), R, 1, row, True, False, threads, 1, True, True, rows)


def _spmv_whole(
    names: Types, R: int, K: int, row: int, transposed: bool, aligned: bool, x_adjacent: bool
) -> SpmvSmall:  # fmt: skip
    """Of short rows, and of blocks whose limit is instructions: so few lanes that each has several blocks of a row.

    All blocks of a row are asked for at once, up to seven by a lane. It has 16 to 24 bytes of a block, 8 of each row;
    up to 48, 16 of each row, of large blocks and where there is one in a row. One CTA a multiprocessor has neighbouring
    rows, so that x stays in the L1, and as many threads as registers allow.
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
    # Of a block: values, x, its column and, eager, that of one of the next row; what else an address takes.
    eager = x_adjacent and not transposed and names.index == "i32" and names.a != "boolean"
    columns_ahead = 2 if eager else 6 if transposed or names.index == "i64" else 4
    each = R // down * columns * max(1, size // 4) + columns * max(1, BYTES[names.b] // 4) + columns_ahead
    sums = R // down * max(1, number(names.acc).itemsize // 4)
    limit = max(1, min(7 if size >= 8 or R * K == 1 else 6, (_EAGER_WORDS - sums) // each))
    lanes = next(n for n in (1, 2, 4, 8, 16, 32) if n >= down * across)
    while lanes < 32 and -(-row // (lanes // (down * across))) > limit:
        lanes *= 2
    whole = -(-row // (lanes // (down * across)))
    together = -(-whole // -(-whole // limit))
    rows = 2 if row == 1 and eager and names.of_one("f32") and R // down * columns <= 6 else 1
    # Registers that ptxas needs beyond our count, found by compiling until nothing spilled.
    words = together * each + (2 if sums <= 6 else 3) * sums
    words = rows * words + (14 if columns * size > 8 else 3 if down > 1 else 0)
    if names.acc == "c128":
        words = rows * (together * each * 3 // 2 + 4 * sums)
    threads = next((n for room, n in ((43, 1024), (62, 768), (72, 640), (100, 512)) if words <= room), 256)
    if R * K == 1 and threads == 768:  # 72 registers leave room for 28 warps; 26 were the fastest, 896 threads not
        threads = 832
    return SpmvSmall(names, R, K, lanes, down, across, together, True, transposed, threads, 1, x_adjacent, eager, rows)


@lru_cache(maxsize=4096)
def spmm_small(names: Types, R: int, K: int, N: int, transposed: bool = False, aligned: bool = False) -> Spmm:
    """The kernel for a product of small blocks with few columns: 16 bytes of B to a lane, as far as its sums fit.

    Blocks of 4 rows, and of 8 and more, gain by fewer columns a lane (.50 against .54 ms, 1.31 against 1.52).
    """
    words = R * max(1, number(names.acc).itemsize // 4)
    width = 16 // BYTES[names.b] if aligned else 1
    if R == 4 or R >= 8:
        width = min(width, 2 if BYTES[names.b] < 8 else 1 if R >= 8 else 2)
    while width > 1 and (N % width or words * width > 48):
        width //= 2
    light = words * width <= 8 and names.acc != "c128"
    together = 4 if K <= 2 and light else 1
    at_least = 8 if light else 3 if words * width < 64 else 2
    return Spmm(names, R, K, _ceil_power_of_two(-(-N // width), 32), width, together, transposed, at_least)


#: Bytes of blocks that a warp has brought at once, by the size of an element; fewer where B gains most by the L1.
_CHUNK_BYTES, _FEW_BYTES = {4: 3072, 8: 1600}, 600
#: Rows of blocks from which the tensor cores of float64 pay, and rows and columns up to which they are asked.
_DMMA_ROWS, _MOST_DMMA = 6, 128
#: Shared memory of a CTA that needs no asking for, and of a multiprocessor beside an L1 for B.
_STATIC_BYTES, _ALL_STAGES = 48 << 10, 208 << 10


def _chunk(bytes_of_block: int, wanted: int, period: int, most: int) -> tuple[int, int]:
    """Blocks of a chunk, a multiple of the period, and how many CTAs have room: four warps of two chunks each."""

    def stages(chunk: int) -> int:
        return 4 * 2 * (-(-chunk * bytes_of_block // 16) * 16 + 16 + 8 * chunk)

    chunk = max(period, min(most, wanted // bytes_of_block) // period * period)
    while chunk > period and stages(chunk) > _STATIC_BYTES:
        chunk -= period
    return chunk, _ALL_STAGES // stages(chunk)


@lru_cache(maxsize=4096)
def spmm_staged(names: Types, R: int, K: int, N: int, shared_kb: int = 227) -> Spmm:
    """The kernel for a product of small float32 or float64 blocks with few columns, where all is aligned.

    16 bytes of B to a lane, fewer of float32 at 4 rows and from 8 on, as in `spmm_small`. As many warps as registers
    allow: for sums, for what a lane has asked for of B, and some more where loops are not unrolled. One CTA has them
    all, if a CTA may have that much shared memory, so that its rows are neighbours and find B in the L1; not so the
    smallest blocks. float64 blocks come few at a time, to leave room for that. Timed on an H200, 16 columns, rows of
    27 blocks with random columns, and those of a mesh: 0.42 and 0.39 ms at 3 x 3 in float64, 0.57 (to 0.65 in other
    runs) and 0.53 at 4 x 4 (CTAs of four warps, 28 blocks at a time: 0.46 and 0.38, 0.64 and 0.57).
    """
    size = BYTES[names.a]
    width = 16 // size
    if R == 4 or R >= 8:
        width = 2
    while N % width:
        width //= 2
    lanes = _ceil_power_of_two(-(-N // width), 32)
    block = R * K * size
    together = 2 if block <= 16 else 1
    deep = K if K <= 4 else next(n for n in (4, 3, 5, 7, 2, 1) if K % n == 0)
    words = (R + deep * together) * width * size // 4 + (16 if deep < K else 0) + (16 if R >= 7 else 0)
    # Registers that ptxas needs beyond our count, found by compiling until nothing spilled.
    words += (3 * size if names.index == "i64" else 0) + (12 if K > 8 or (size == 8 and deep < K) else 0)
    if K <= 3 and R <= 4 and words <= 24:
        warps = 32 if words <= 16 or K == 3 else 28
    elif R <= 5 and deep == K and words <= 40:
        warps = 28 if words <= 16 else 24
    else:
        warps = 20 if words <= 56 else 16 if words <= 72 else 12
    wanted = _FEW_BYTES if size == 8 and 64 < block <= 100 and lanes >= 8 else _CHUNK_BYTES[size]
    chunk, room = _chunk(block, wanted, *((4, 28) if lanes >= 8 else (8, 32)))
    config = Spmm(names, R, K, lanes, width, together, at_least=1, chunk=chunk, threads=32 * warps)
    if block > 32 and config.shared_bytes <= shared_kb << 10:
        return config
    return replace(config, threads=128, at_least=min(warps // 4, room))


@lru_cache(maxsize=4096)
def spmm_f64(index: str, R: int, K: int, N: int) -> SpmmF64:
    """The kernel for a product of float64 blocks of 6 rows and more with few columns, where all is aligned.

    By a sweep over 17 cases on an H200: three or four instructions under way, if registers allow. 16 columns, 300,000
    rows of 27 blocks: 1.06 ms at 6 x 6, 1.46 at 8 x 8.
    """
    if N <= 16:
        if R <= 8:
            return SpmmF64(index, R, K, 1, 2 if K == 8 else 3, 6)
        return SpmmF64(index, R, K, 1, 4, 5) if K % 16 == 0 else SpmmF64(index, R, K, 1, 3, 6)
    return SpmmF64(index, R, K, 2, 3, 5 if R > 8 else 8 if index == "i32" else 6)
