"""The kernels of products and their compile-time constants: frozen dataclasses whose `spec()` the loader compiles.

Comments here use NVIDIA's words: a CTA is a thread block, a lane is a thread of a warp. A row tile is a part of a block
row: a block row is cut into row tiles of equal height, and one tile of a tensor-core kernel covers a few of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._backend.array_kernels import Expand, Segment, VectorSteps
from .._kernels.element_types import BYTES, Types, shared_kb
from .._kernels.jit import MAX_GRID_X, MAX_GRID_YZ, KernelSpec
from . import arguments
from .list_configs import RowMatching, SampledTiles, SpgemmPattern, WorkListKernel

#: Element -> (its name in the wgmma instruction, how many of them one instruction takes along K).
_WGMMA = {"f16": ("f16", 16), "bf16": ("bf16", 16), "f32": ("tf32", 8), "e4m3": ("e4m3", 32)}
STORES = ("direct", "rows", "columns")
#: Bytes of shared memory that a CTA can have on Hopper.
_SHARED_BYTES = 232448


#: Bytes of panels of B that stay in the L2 beside what is read of A.
_PANEL_BYTES = 20 << 20


def _column_tiles(section: int, tile_n: int, panel: int) -> int:
    """Return how many column tiles make a section whose panels of B, of so many bytes each, stay in the L2."""
    return max(1, min(section // tile_n, _PANEL_BYTES // panel))


@dataclass(frozen=True)
class GemmSimt:
    """``A @ B`` on the CUDA cores, for any block size, any dtype and any strides."""

    types: Types
    rows: int
    cols: int
    lanes: int
    a_transposed: bool = False

    threads, shared_bytes = 128, 0

    def spec(self) -> KernelSpec:
        shape = (
            ("ROWS", self.rows),
            ("COLS", self.cols),
            ("LANES", self.lanes),
            ("A_TRANSPOSED", int(self.a_transposed)),
        )
        layout = arguments.product(self.types.acc)
        return KernelSpec("gemm_simt.cu", "gemm_simt", (*self.types.defines(), *shape), (layout,))

    def grid(self, block_rows: int, R: int, N: int) -> tuple[int, int, int]:
        """Return the grid: block rows (of all batches) along x, columns of B along y, rows of a block along z.

        The kernel loops over whatever exceeds the largest grid.
        """
        return (
            min(MAX_GRID_X, -(-block_rows // (self.threads // self.lanes))),
            min(MAX_GRID_YZ, -(-N // (self.lanes * self.cols))),
            min(MAX_GRID_YZ, -(-R // self.rows)),
        )


@dataclass(frozen=True)
class GemmSm90:
    """``A @ B`` on Hopper's tensor cores, in tiles of `tile_m` x `tile_n`."""

    types: Types
    row_tile_height: int
    tile_n: int
    depth: int
    tail: int
    a_transposed: bool
    b_transposed: bool
    #: how C is written: "direct", or by the copy engine as tiles of "rows" or "columns"
    store: str
    #: whether one copy brings all slabs of 64 columns of a panel of B
    wide: bool
    #: for row tiles of fewer than 64 rows: whether the part of a block that a step needs is contiguous in memory
    flat: bool
    #: number of columns of B that are processed before the kernel moves on to the next ones
    section: int = 1024
    #: 128, or 64 for products of few tiles, in row tiles of 64 rows
    tile_m: int = 128
    #: for float32: 2 if B is given in two parts of tf32, and A is split likewise
    parts: int = 1

    threads = 384

    @property
    def row_tiles(self) -> int:
        """The number of row tiles of a tile."""
        return self.tile_m // self.row_tile_height

    @property
    def lines(self) -> bool:
        """For A in two parts: whether the part of a block that a step needs has rows of 128 bytes."""
        return self.parts == 2 and not self.flat and self.depth * BYTES[self.types.a] == 128

    @property
    def stages(self) -> int:
        """The number of pipeline stages: as many as fit into shared memory."""
        if self.parts == 2:
            return 4
        return ({256: 4, 128: 6, 64: 8} if self.tile_m == 128 else {256: 4, 128: 8, 64: 8})[self.tile_n]

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
                ("ROW_TILE_HEIGHT", self.row_tile_height),
                ("TILE_N", self.tile_n),
                ("DEPTH", self.depth),
                ("TAIL", self.tail),
                ("A_TRANSPOSED", int(self.a_transposed)),
                ("B_TRANSPOSED", int(self.b_transposed)),
                ("STORE", STORES.index(self.store)),
                ("WIDE", int(self.wide)),
                ("FLAT", int(self.flat)),
                ("STAGES", self.stages),
                *((("TILE_M", self.tile_m),) if self.tile_m != 128 else ()),
                *((("PARTS", self.parts),) if self.parts != 1 else ()),
            ),
            (arguments.gemm_sm90(),),
        )

    @property
    def shared_bytes(self) -> int:
        """The size of the kernel's struct Shared plus its alignment: at most 230,912 of the 232,448 bytes of a CTA."""
        return 1024 + self.stages * 128 * (self.tile_m + self.parts * self.tile_n) + 16 * 2048 + 512

    def group(self, K: int) -> int:
        """Return how many column tiles are processed together, for a B of K rows.

        These are the tiles of one section, or fewer if their panels of B do not fit into 20 MiB of the L2 cache. At
        K = 8192 on an H200, sections of 2048 columns instead of 1024 cost 3-7 %, and sections of 4096 cost 20 %. Where
        not even one panel fits, two share what is read of A: 2.87 instead of 3.10 ms for blocks of 128 x 128 at
        K = 65536 and density 0.02. Row tiles of 64 rows read more of B for each block of A, and lose 8 % by it.
        """
        panel = K * self.tile_n * self.parts * BYTES[self.types.b]
        least = 2 if panel > _PANEL_BYTES and self.row_tile_height == 128 else 1
        return max(least, _column_tiles(self.section, self.tile_n, panel))


@dataclass(frozen=True)
class ColumnsTf32:
    """A column-major copy of B, rounded to tf32 or in two parts of tf32, for GemmSm90; 64 x 64 elements at a time."""

    parts: int

    threads, side = 256, 64

    def spec(self) -> KernelSpec:
        return KernelSpec("columns_tf32.cu", "columns_tf32", (("PARTS", self.parts),), (arguments.COLUMNS_TF32,))

    def grid(self, rows: int, columns: int, batches: int) -> tuple[int, int, int]:
        """Return the grid: tiles of columns, tiles of rows, batches. The kernel loops over whatever exceeds it."""
        tiles_y = min(MAX_GRID_YZ, -(-rows // self.side))
        return min(MAX_GRID_X, -(-columns // self.side)), tiles_y, min(MAX_GRID_YZ, batches)


@dataclass(frozen=True)
class GemmTurnedSm90:
    """``A @ B`` on Hopper's tensor cores, computed as its transpose, for row tiles of 48, 80, 96 or 160 rows.

    A tile has `row_tiles` row tiles by `tile_n` columns. Elements are 16-bit floats, and the result is only written.
    """

    types: Types
    row_tile_height: int
    row_tiles: int
    tile_n: int
    #: number of columns of A per step; `tail` is that of the last step of a block, or 0 if all steps are equal
    depth: int
    tail: int
    #: whether one copy brings all slabs of 64 columns of a panel of B
    wide: bool
    #: number of slabs of 64 columns of C that a warpgroup has in shared memory while they are stored
    rooms: int
    #: number of columns of B that are processed before the kernel moves on to the next ones
    section: int = 1024

    threads = 384
    #: the row tile heights for which the kernel is compiled
    heights = (160, 96, 80, 48)

    @property
    def tile_m(self) -> int:
        """The number of rows of a tile."""
        return self.row_tiles * self.row_tile_height

    @property
    def line(self) -> int:
        """The number of bytes of a row of A in a stage: `depth` columns, rounded up to 32, 64 or 128 bytes."""
        return next(size for size in (32, 64, 128) if 2 * self.depth <= size)

    @property
    def _stage_bytes(self) -> int:
        return self.line * self.tile_m + 2 * self.depth * self.tile_n

    @property
    def _other_bytes(self) -> int:
        """The size of the slabs of C, of barriers and tiles, and of the alignment."""
        return 2 * self.rooms * 128 * self.row_tile_height + 512 + 1024

    @property
    def stages(self) -> int:
        """The number of pipeline stages: as many as fit into shared memory, but at most 8."""
        return min(8, (_SHARED_BYTES - self._other_bytes) // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """The size of the kernel's struct Shared plus its alignment."""
        return self.stages * self._stage_bytes + self._other_bytes

    def spec(self) -> KernelSpec:
        mma, k = _WGMMA[self.types.a]
        return KernelSpec(
            "gemm_turned_sm90.cu",
            "gemm_turned_sm90",
            (
                ("ELEMENT_A", self.types.a),
                ("ELEMENT_C", self.types.c),
                ("MMA_TYPE", mma),
                ("MMA_K", k),
                ("ROW_TILE_HEIGHT", self.row_tile_height),
                ("ROW_TILES", self.row_tiles),
                ("TILE_N", self.tile_n),
                ("DEPTH", self.depth),
                ("TAIL", self.tail),
                ("WIDE", int(self.wide)),
                ("ROOMS", self.rooms),
                ("STAGES", self.stages),
            ),
            (arguments.gemm_sm90(),),
        )

    def group(self, K: int) -> int:
        """Return how many column tiles are processed together, for a B of K rows (see `GemmSm90.group`)."""
        return _column_tiles(self.section, self.tile_n, K * self.tile_n * BYTES[self.types.b])


@dataclass(frozen=True)
class GemmSm80:
    """``A @ B`` on the tensor cores of any card since Ampere, in tiles of `row_tiles` row tiles by `tile_n` columns."""

    types: Types
    #: how elements are multiplied: "MMA_F16", "MMA_3XTF32", ...
    kind: str
    row_tile_height: int
    #: number of row tiles of a tile
    row_tiles: int
    tile_n: int
    #: number of warps along the rows of a tile, among which its row tiles are divided
    warps_m: int
    threads: int
    stages: int
    a_transposed: bool
    b_transposed: bool

    def spec(self) -> KernelSpec:
        shape = (
            ("MMA", self.kind),
            ("ROW_TILE_HEIGHT", self.row_tile_height),
            ("ROW_TILES", self.row_tiles),
            ("TILE_N", self.tile_n),
            ("WARPS_M", self.warps_m),
            ("THREADS", self.threads),
            ("A_TRANSPOSED", int(self.a_transposed)),
            ("B_TRANSPOSED", int(self.b_transposed)),
            ("STAGES", self.stages),
        )
        names = tuple(d for d in self.types.defines() if d[0] != "INDEX")
        return KernelSpec("gemm_sm80.cu", "gemm_sm80", (*names, *shape), (arguments.gemm_sm80(self.types.acc),))

    @property
    def shared_bytes(self) -> int:
        """An upper bound of the size of the kernel's struct Shared, in bytes."""
        return self.stages * 128 * (self.row_tiles * self.row_tile_height + self.tile_n) + 1024

    def ctas(self, arch: str) -> int:
        """Return the number of CTAs that share a multiprocessor: kCtas of the kernel."""
        words = (
            self.row_tiles * self.row_tile_height * self.tile_n // self.threads * (2 if self.kind == "MMA_F64" else 1)
        )
        light = self.threads < 256 or (self.threads == 256 and words <= 64 and self.kind != "MMA_3XTF32")
        return 2 if light and 2 * (self.shared_bytes + 1024) <= (shared_kb(arch) + 1) * 1024 else 1


@dataclass(frozen=True)
class GemmFew:
    """``A @ B`` for up to 8 columns of 16-bit floats: the warps of a CTA share 16 rows of a block row."""

    types: Types
    #: whether columns of B lie side by side, aligned to 16 bytes
    by_columns: bool
    warps: int = 4
    #: whether A is read before the kernels in front on the stream have ended
    read_ahead: bool = False

    rows, most_columns, chunk = 16, 8, 32

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """The size of the kernel's struct Shared."""
        return 1024 * (1 if self.by_columns else self.warps) + 512 * (self.warps // 2)

    def spec(self) -> KernelSpec:
        shape = (
            ("B_BY_COLUMNS", int(self.by_columns)),
            ("WARPS", self.warps),
            ("READ_AHEAD", int(self.read_ahead)),
        )
        layout = arguments.product(self.types.acc)
        return KernelSpec(
            "gemm_few.cu", "gemm_few", (*self.types.defines(), *shape), (layout,), overlaps=self.read_ahead
        )

    def grid(self, block_rows: int, R: int, batches: int) -> tuple[int, int]:
        """Return the grid: 16 rows each along x, batches along y."""
        return min(MAX_GRID_X, block_rows * (R // self.rows)), min(MAX_GRID_YZ, batches)


@dataclass(frozen=True)
class Spmv:
    """``A @ x`` for one vector x; `lanes` threads share a block row."""

    types: Types
    lanes: int
    rows: int
    block_r: int
    block_c: int
    a_transposed: bool = False
    #: number of columns of a block that a lane reads with one instruction
    vector: int = 1

    threads, shared_bytes = 128, 0

    def spec(self) -> KernelSpec:
        shape = (
            ("LANES", self.lanes),
            ("ROWS", self.rows),
            ("BLOCK_R", self.block_r),
            ("BLOCK_C", self.block_c),
            ("A_TRANSPOSED", int(self.a_transposed)),
            ("VECTOR", self.vector),
        )
        layout = arguments.product(self.types.acc)
        return KernelSpec("spmv.cu", "spmv", (*self.types.defines(), *shape), (layout,))

    def grid(self, block_rows: int, R: int, N: int) -> tuple[int, int]:
        """Return the grid: block rows along x, the rows of a block along y."""
        return min(MAX_GRID_X, -(-block_rows // (self.threads // self.lanes))), min(MAX_GRID_YZ, -(-R // self.rows))


@dataclass(frozen=True)
class SpmvSmall:
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
    at_least: int = 4
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
            ("X_ADJACENT", int(self.x_adjacent)),
            ("EAGER", int(self.eager)),
            ("ROWS_TOGETHER", self.rows_together),
        )
        layouts = (arguments.product(self.types.acc), arguments.LONG_ROWS)
        return KernelSpec("spmv_small.cu", "spmv_small", (*self.types.defines(), *shape), layouts)

    def ctas(self, block_rows: int, multiprocessors: int) -> int:
        """Return the number of CTAs for all block rows.

        With `in_chunks` or `eager` there are only as many as run at the same time, and the block rows are divided among
        them: each has neighbouring ones, or they take turns.
        """
        if self.in_chunks or self.eager:
            return max(1, min(-(-block_rows // (32 // self.lanes)), self.at_least * multiprocessors))
        return max(1, min(MAX_GRID_X // 2, -(-block_rows // (self.threads // self.lanes * self.rows_together))))


@dataclass(frozen=True)
class Spmm:
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
    at_least: int = 3
    #: number of blocks that a warp copies to shared memory at a time; 0 means that blocks are read from global memory
    chunk: int = 0
    threads: int = 128

    #: kStages of the kernel: number of chunks that a warp holds in shared memory
    stages = 2

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

    def spec(self) -> KernelSpec:
        shape = (
            ("BLOCK_R", self.block_r),
            ("BLOCK_C", self.block_c),
            ("LANES", self.lanes),
            ("WIDTH", self.width),
            ("TOGETHER", self.together),
            ("A_TRANSPOSED", int(self.a_transposed)),
            ("CHUNK", self.chunk),
            ("THREADS", self.threads),
            ("CTAS", self.at_least),
        )
        layout = arguments.product(self.types.acc)
        return KernelSpec("spmm.cu", "spmm", (*self.types.defines(), *shape), (layout,))

    def grid(self, block_rows: int, N: int, batches: int, multiprocessors: int) -> tuple[int, ...]:
        """Return the grid.

        Without staging it is block rows (of all batches) and column tiles. With staging it is CTAs that each loop over
        block rows, column tiles, and batches.
        """
        warps, tiles = self.threads // 32, min(MAX_GRID_YZ, -(-N // (self.lanes * self.width)))
        if not self.staged:
            return min(MAX_GRID_X, -(-block_rows * batches // warps)), tiles
        return min(self.at_least * multiprocessors, -(-block_rows // warps)), tiles, min(MAX_GRID_YZ, batches)


@dataclass(frozen=True)
class SpmmF64:
    """``A @ B`` for float64 and few columns, on the tensor cores.

    A warp computes ``16 * pairs`` columns. It loads the operands of `together` instructions before it uses the first.
    """

    index: str
    block_r: int
    block_c: int
    pairs: int
    together: int
    #: least number of CTAs that share a multiprocessor
    at_least: int
    #: largest number of tiles of eight rows that a warp computes
    tiles: int = 2

    threads, shared_bytes = 128, 0

    def spec(self) -> KernelSpec:
        shape = (
            ("INDEX", self.index),
            ("BLOCK_R", self.block_r),
            ("BLOCK_C", self.block_c),
            ("PAIRS", self.pairs),
            ("TILES", self.tiles),
            ("TOGETHER", self.together),
            ("CTAS", self.at_least),
        )
        return KernelSpec("spmm_f64.cu", "spmm_f64", shape, (arguments.product("f64"),))

    def grid(self, block_rows: int, N: int, batches: int) -> tuple[int, int, int]:
        """Return the grid: block rows or parts of them, a warp each, along x; column tiles along y; batches along z."""
        warps = block_rows * -(-self.block_r // (8 * min(self.tiles, -(-self.block_r // 8))))
        return (
            min(MAX_GRID_X, -(-warps // (self.threads // 32))),
            min(MAX_GRID_YZ, -(-N // (16 * self.pairs))),
            min(MAX_GRID_YZ, batches),
        )


@dataclass(frozen=True)
class SpgemmSimt:
    """The numeric phase of ``BSR @ BSR`` on the CUDA cores; `lanes` threads share a block of the result."""

    types: Types
    lanes: int
    #: R, K and N of small blocks, which are compiled in; zeros if the kernel takes the sizes as arguments
    block: tuple[int, int, int] = (0, 0, 0)

    threads = 128

    def spec(self) -> KernelSpec:
        sizes = zip(("BLOCK_R", "BLOCK_K", "BLOCK_N"), self.block, strict=True)
        return KernelSpec("spgemm_simt.cu", "spgemm_simt", (*self.types.defines(), ("LANES", self.lanes), *sizes))

    def grid(self, segments: int) -> tuple[int]:
        return (min(MAX_GRID_X, -(-segments // (self.threads // self.lanes))),)


@dataclass(frozen=True)
class BlockProductsSm90:
    """The blocks of a product of 16-bit floats on Hopper's tensor cores.

    The product is ``BSR @ BSR`` or, if `sampled`, the product of two dense matrices at the blocks of a pattern.
    """

    element: str
    out: str
    sampled: bool
    #: whether K is the contiguous dimension of B
    b_transposed: bool
    tile_m: int
    part_n: int
    #: number of parts of `part_n` columns of a tile; in a sampled product they are neighbours in a block row
    parts: int
    #: index type of the lists of blocks
    index: str = "i64"
    #: number of block rows of a tile of a list (`SampledTiles`), or 0 if there is none
    row_parts: int = 0

    threads = 384

    @property
    def tile_n(self) -> int:
        return self.part_n * self.parts

    @property
    def stages(self) -> int:
        """The number of pipeline stages: as many as fit into 200 KiB of shared memory."""
        return (200 << 10) // (128 * (self.tile_m + self.tile_n))

    @property
    def shared_bytes(self) -> int:
        """The size of the kernel's struct Shared plus its alignment, in bytes."""
        return self.stages * 128 * (self.tile_m + self.tile_n) + (16 << 10) + 1024

    def spec(self) -> KernelSpec:
        mma, k = _WGMMA[self.element]
        return KernelSpec(
            "block_products_sm90.cu",
            "block_products_sm90",
            (
                ("ELEMENT_A", self.element),
                ("ELEMENT_C", self.out),
                ("MMA_TYPE", mma),
                ("MMA_K", k),
                ("INDEX", self.index),
                ("SAMPLED", int(self.sampled)),
                ("B_TRANSPOSED", int(self.b_transposed)),
                ("TILE_M", self.tile_m),
                ("PART_N", self.part_n),
                ("PARTS", self.parts),
                ("ROW_PARTS", self.row_parts),
                ("STAGES", self.stages),
            ),
            (arguments.BLOCK_PRODUCTS_SM90,),
        )


@dataclass(frozen=True)
class BlockProductsSm80:
    """The same products as `BlockProductsSm90`, on the tensor cores of any card since Ampere.

    A CTA computes a tile of `tile_m` x `tile_n`.
    """

    element: str
    out: str
    #: how elements are multiplied, as in `GemmSm80`
    kind: str
    sampled: bool
    #: whether K is the contiguous dimension of B
    b_transposed: bool
    tile_m: int
    tile_n: int
    #: number of columns of a tile that belong to the same block
    part_n: int
    #: index type of the lists of blocks
    index: str = "i64"

    @property
    def warps(self) -> tuple[int, int]:
        """The number of warps along the rows and along the columns of a tile; each computes up to 64 x 32 elements."""
        return -(-self.tile_m // 64), self.tile_n // 32

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    @property
    def stages(self) -> int:
        return 3 if self.tile_m + self.tile_n > 192 else 4

    @property
    def shared_bytes(self) -> int:
        """An upper bound of the size of the kernel's struct Shared, in bytes."""
        return self.stages * 128 * (self.tile_m + self.tile_n) + 1024

    def spec(self) -> KernelSpec:
        return KernelSpec(
            "block_products_sm80.cu",
            "block_products_sm80",
            (
                ("ELEMENT_A", self.element),
                ("ELEMENT_C", self.out),
                ("ACCUMULATOR", "f64" if self.element == "f64" else "f32"),
                ("INDEX", self.index),
                ("MMA", self.kind),
                ("SAMPLED", int(self.sampled)),
                ("ROW_TILE_HEIGHT", self.tile_m),
                ("ROW_TILES", 1),
                ("TILE_N", self.tile_n),
                ("PART_N", self.part_n),
                ("WARPS_M", self.warps[0]),
                ("THREADS", self.threads),
                ("A_TRANSPOSED", 0),
                ("B_TRANSPOSED", int(self.b_transposed)),
                ("STAGES", self.stages),
            ),
            (arguments.BLOCK_PRODUCTS_SM80,),
        )


Gemm = GemmSm90 | GemmTurnedSm90 | GemmSm80 | GemmFew | GemmSimt | Spmv | SpmvSmall | Spmm | SpmmF64
Config = (
    Gemm
    | SpgemmSimt
    | BlockProductsSm90
    | BlockProductsSm80
    | Segment
    | VectorSteps
    | Expand
    | RowMatching
    | SpgemmPattern
    | WorkListKernel
    | SampledTiles
    | ColumnsTf32
)
