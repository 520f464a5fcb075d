"""The kernels of products and their constants: small frozen dataclasses, whose `spec()` is what the loader compiles."""

from __future__ import annotations

from dataclasses import dataclass

from .._backend.array_kernels import Expand, Segment
from .._kernels.element_types import BYTES, Types, shared_kb
from .._kernels.jit import MAX_GRID_X, MAX_GRID_YZ, KernelSpec
from . import arguments

#: What wgmma calls an element, and how many it takes along K.
_WGMMA = {"f16": ("f16", 16), "bf16": ("bf16", 16), "f32": ("tf32", 8), "e4m3": ("e4m3", 32)}
STORES = ("direct", "rows", "columns")


@dataclass(frozen=True)
class GemmSimt:
    """``A @ B`` on the plain cores: any block, any dtype, any strides."""

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
        """Block rows (of all batches), columns and rows of a block along x, y and z; the kernel loops over the rest."""
        return (
            min(MAX_GRID_X, -(-block_rows // (self.threads // self.lanes))),
            min(MAX_GRID_YZ, -(-N // (self.lanes * self.cols))),
            min(MAX_GRID_YZ, -(-R // self.rows)),
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
                ("ROW_TILE_HEIGHT", self.slot_rows),
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
            (arguments.gemm_sm90(),),
        )

    @property
    def shared_bytes(self) -> int:
        """The struct Shared of the kernel, and what aligns it: 230,912 of 232,448 bytes at most."""
        return 1024 + self.stages * 128 * (self.tile_m + self.tile_n) + 16 * 2048 + 512

    def group(self, K: int) -> int:
        """Column tiles walked together: those of a section, as long as their panels of B fit 20 MB of the L2.

        At K = 8192, 2048 columns cost 3-7 % and 4096 cost 20 %.
        """
        bytes_ = K * self.tile_n * BYTES[self.types.b]
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
            ("ROW_TILE_HEIGHT", self.slot_rows),
            ("ROW_TILES", self.slots),
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
        """The struct Shared of the kernel at most."""
        return self.stages * 128 * (self.slots * self.slot_rows + self.tile_n) + 1024

    def ctas(self, arch: str) -> int:
        """CTAs that share a multiprocessor: kCtas of the kernel."""
        words = self.slots * self.slot_rows * self.tile_n // self.threads * (2 if self.kind == "MMA_F64" else 1)
        light = self.threads < 256 or (words <= 64 and self.kind != "MMA_3XTF32")
        return 2 if light and 2 * (self.shared_bytes + 1024) <= (shared_kb(arch) + 1) * 1024 else 1


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
        """Block rows along x, the rows of a block along y."""
        return min(MAX_GRID_X, -(-block_rows // (self.threads // self.lanes))), min(MAX_GRID_YZ, -(-R // self.rows))


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
    #: x lies together, at a multiple of 16 bytes
    x_adjacent: bool = False
    #: all loads of a lane at once, by predicates; columns a row ahead of their values, if a CTA has many rows
    eager: bool = False
    #: block rows of the same lanes under way at once
    rows_together: int = 1

    #: kLong of the kernel: blocks of a row, or of a piece of a longer one
    long = 256
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
        """CTAs for all rows; where each has many, few rows are dealt to all of them."""
        if self.in_chunks:
            return max(1, min(-(-block_rows // (32 // self.lanes)), self.at_least * multiprocessors))
        return max(1, min(MAX_GRID_X // 2, -(-block_rows // (self.threads // self.lanes * self.rows_together))))


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
    #: CTAs that share a multiprocessor, at least
    at_least: int = 3
    #: blocks that come through shared memory at a time; 0: they are read straight from memory
    chunk: int = 0
    threads: int = 128

    #: kStages of the kernel
    stages = 2

    @property
    def staged(self) -> bool:
        """Do blocks come through shared memory?"""
        return self.chunk > 0

    @property
    def shared_bytes(self) -> int:
        """`Chunk` of cuda/common/chunks.cuh, so many for each warp."""
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
        """Block rows (of all batches) and tiles of columns; staged, CTAs that stay, tiles of columns and batches."""
        warps, tiles = self.threads // 32, min(MAX_GRID_YZ, -(-N // (self.lanes * self.width)))
        if not self.staged:
            return min(MAX_GRID_X, -(-block_rows * batches // warps)), tiles
        return min(self.at_least * multiprocessors, -(-block_rows // warps)), tiles, min(MAX_GRID_YZ, batches)


@dataclass(frozen=True)
class SpmmF64:
    """As `Spmm`, on the tensor cores of float64: 16 `pairs` columns of a warp, `together` instructions under way."""

    index: str
    block_r: int
    block_c: int
    pairs: int
    together: int
    #: CTAs that share a multiprocessor at least
    at_least: int
    #: of eight rows that a warp has at most
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
        """A warp has a block row, or a part of one."""
        warps = block_rows * -(-self.block_r // (8 * min(self.tiles, -(-self.block_r // 8))))
        return (
            min(MAX_GRID_X, -(-warps // (self.threads // 32))),
            min(MAX_GRID_YZ, -(-N // (16 * self.pairs))),
            min(MAX_GRID_YZ, batches),
        )


@dataclass(frozen=True)
class SpgemmSimt:
    """The numeric half of ``BSR @ BSR``: `lanes` threads share a block of the result."""

    types: Types
    lanes: int
    #: R, K and N of small blocks; zeros if the kernel is told when it runs
    block: tuple[int, int, int] = (0, 0, 0)

    threads = 128

    def spec(self) -> KernelSpec:
        sizes = zip(("BLOCK_R", "BLOCK_K", "BLOCK_N"), self.block, strict=True)
        return KernelSpec("spgemm_simt.cu", "spgemm_simt", (*self.types.defines(), ("LANES", self.lanes), *sizes))

    def grid(self, segments: int) -> tuple[int]:
        return (min(MAX_GRID_X, -(-segments // (self.threads // self.lanes))),)


@dataclass(frozen=True)
class BlockProductsSm90:
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
    #: of the lists of blocks
    index: str = "i64"

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
                ("STAGES", self.stages),
            ),
            (arguments.BLOCK_PRODUCTS_SM90,),
        )


@dataclass(frozen=True)
class BlockProductsSm80:
    """As `BlockProductsSm90`, on the tensor cores of any card since Ampere: a tile of `tile_m` x `tile_n` a CTA."""

    element: str
    out: str
    #: how elements are multiplied, as in `GemmSm80`
    kind: str
    sampled: bool
    #: K runs fastest in B
    b_transposed: bool
    tile_m: int
    tile_n: int
    #: columns of a tile that lie together
    part_n: int
    #: of the lists of blocks
    index: str = "i64"

    @property
    def warps(self) -> tuple[int, int]:
        """Below each other and side by side, of up to 64 x 32 each."""
        return -(-self.tile_m // 64), self.tile_n // 32

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    @property
    def stages(self) -> int:
        return 3 if self.tile_m + self.tile_n > 192 else 4

    @property
    def shared_bytes(self) -> int:
        """The struct Shared of the kernel at most."""
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


@dataclass(frozen=True)
class RowMatching:
    """One of the three kernels that find out which rows go well together; `row_bits` reads the index of a matrix."""

    entry: str
    index: str = "i32"

    threads = 256
    window = 512
    side = 64
    #: kNeighbors of cuda/common/coordinates.cuh
    neighbors = 8

    def spec(self) -> KernelSpec:
        return KernelSpec("row_matching.cu", self.entry, (("INDEX", self.index),), (arguments.STORED_PATTERN,))

    def grid(self, blocks: int) -> tuple[int]:
        """Of `row_bits`: a thread for some neighbors."""
        return (min(MAX_GRID_X, -(-blocks // (self.threads * self.neighbors))),)


@dataclass(frozen=True)
class SpgemmPattern:
    """One of the three kernels that find out which blocks meet in ``BSR @ BSR``."""

    entry: str
    index: str

    threads = 128

    def spec(self) -> KernelSpec:
        return KernelSpec("spgemm_pattern.cu", self.entry, (("INDEX", self.index),), (arguments.SPGEMM_PATTERN,))

    def grid(self, rows: int, warps: int) -> tuple[int]:
        """A warp for each block row."""
        return (min(MAX_GRID_X, -(-rows // warps)),)


@dataclass(frozen=True)
class WorkListKernel:
    """Lists of the entries of groups of slots, and of the groups by length, step by step."""

    index: str = "i32"

    threads = 256
    #: kNeighbors of cuda/common/coordinates.cuh
    neighbors = 8

    def spec(self) -> KernelSpec:
        return KernelSpec("work_list.cu", "work_list", (("INDEX", self.index),), (arguments.WORK_LIST,))

    def grid(self, threads: int) -> tuple[int]:
        return (min(MAX_GRID_X, -(-threads // self.threads)),)

    def tiles(self, keys: int) -> tuple[int, int]:
        """CTAs that share so many keys, and keys of each: all CTAs look at what the ones before found."""
        tile = max(4, -(-keys // (1024 * self.threads))) * self.threads
        return -(-keys // tile), tile


Gemm = GemmSm90 | GemmSm80 | GemmSimt | Spmv | SpmvSmall | Spmm | SpmmF64
Config = (
    Gemm
    | SpgemmSimt
    | BlockProductsSm90
    | BlockProductsSm80
    | Segment
    | Expand
    | RowMatching
    | SpgemmPattern
    | WorkListKernel
)
