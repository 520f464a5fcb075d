"""The rules that choose the constants of the kernels for blocks of up to 16 x 16: lanes, loads in flight, CTAs.

The rules were fitted to measurements on an H200. "In flight" are values that a lane has loaded and not used yet.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from .._kernels.element_types import BYTES, Types, number
from .configs import Spmm, SpmmF64, SpmvSmall

#: The largest block side, and the largest number of columns of B, of the kernels for small blocks.
_MOST_SMALL, _FEW_COLUMNS = 16, 128
#: Number of blocks in a block row of a mesh of hexahedra, and number of registers for values that a lane has in flight.
_USUAL_ROW, _MOST_WORDS = 27, 36
#: Block rows of at most so many blocks are shared by few lanes, if a block has at most so many bytes.
_SHORT_ROW, _HEAVY_BYTES = 14, 648
#: Blocks of at most the first number of bytes are limited by instructions instead of memory, and blocks of at most the
#: second number nearly so. The third is the number of registers for what a lane has in flight of the smallest ones.
_SMALLEST_BYTES, _LIGHT_BYTES, _EAGER_WORDS = 100, 144, 68


#: Threads of a CTA that were measured to be faster than those of the rule, by the block and the threads of the rule.
#: 1 x 1 blocks of float64, 300,000 block rows of 27 blocks, on an H200: 832 threads (26 warps) take about 30 us, 768
#: threads about 31 us. Registers would allow 896 threads, which are not faster.
_MEASURED_THREADS = {(1, 1, 768): 832}


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
    return SpmvSmall(names, R, K, _ceil_power_of_two(R, 8), R, 1, row, True, False, threads, 1, True, True, rows)


def _spmv_whole(
    names: Types, R: int, K: int, row: int, transposed: bool, aligned: bool, x_adjacent: bool
) -> SpmvSmall:  # fmt: skip
    """Return the kernel for short block rows, and for blocks that are limited by instructions instead of memory.

    So few lanes share a block row that each has several of its blocks. A lane loads all its blocks of a block row at
    once, up to seven. It reads 16 to 24 bytes of a block, 8 from each row of the block; for large blocks, and for block
    rows of one block, it reads up to 48 bytes, 16 from each row. A multiprocessor has one CTA with as many threads as
    registers allow. It processes neighbouring block rows, so that x stays in the L1 cache, or takes turns with the others
    in a product with the transpose.
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
    return Spmm(names, R, K, _ceil_power_of_two(-(-N // width), 32), width, together, transposed, at_least)


#: Bytes of blocks that a warp copies to shared memory at once, by the size of an element. The second number leaves more
#: memory to the L1 cache for B. It is used only for float64 blocks of 65 to 100 bytes by many columns, and was fitted
#: to one benchmark case: 3 x 3 blocks of float64 by 16 columns on an H200.
_CHUNK_BYTES, _FEW_BYTES = {4: 3072, 8: 1600}, 600
#: The least number of rows of a block for which the tensor cores of float64 are faster, and the largest side of a block
#: for which they are used.
_DMMA_ROWS, _MOST_DMMA = 6, 128
#: Bytes of shared memory that a CTA has without an explicit request, and that all CTAs of a multiprocessor may use so
#: that the L1 cache, which is in the same memory, keeps enough space for B.
_STATIC_BYTES, _ALL_STAGES = 48 << 10, 208 << 10
#: KiB of shared memory that a CTA has on sm_86, sm_89 and sm_120. A multiprocessor of these cards has two float64
#: units, which few warps keep busy.
_FEW_F64_KB = 99
#: The least number of rows of float32 blocks whose sums do not fit the 96 registers of 20 warps. Compiling found it.
_TALL = 14


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
        # Float64 blocks of 4 and 5 rows by 4 columns need more than the 80 registers of 24 warps on sm_86 and sm_89.
        warps = 28 if words <= 16 else 20 if size == 8 and K == 4 <= R and shared_kb <= _FEW_F64_KB else 24
    else:
        warps = 20 if words <= 56 and R < _TALL else 16 if words <= 72 else 12
    wanted = _FEW_BYTES if size == 8 and 64 < block <= 100 and lanes >= 8 else _CHUNK_BYTES[size]
    chunk, ctas = _chunk(block, wanted, *((4, 28) if lanes >= 8 else (8, 32)))
    config = Spmm(names, R, K, lanes, width, together, at_least=1, chunk=chunk, threads=32 * warps)
    if block > 32 and config.shared_bytes <= shared_kb << 10:
        return config
    return replace(config, threads=128, at_least=min(warps // 4, ctas))


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
