"""``A @ B`` on Hopper's tensor cores as its transpose (swap-AB), for blocks that do not fill tiles of 64 rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from .._kernels import tensor_map
from .._kernels.card import Card
from .._kernels.element_types import BYTES, Types, element
from .._kernels.kernel import host
from .._kernels.tensor_map import Layout
from ..dtypes import HALF_DTYPES
from . import arguments
from .call import Problem
from .costs import from_l2, memory, operand_bytes, overlapped, rows_of
from .dense import matrix_map, tensor_cores_serve
from .gemm_sm90 import WorkListSm90, column_tiles_of
from .operand import Kind

#: Height of a row tile -> (row tiles of a tile, columns of a tile, columns of A per step at most, slabs of C in shared
#: memory): for wide tiles, and for narrow ones. Registers hold 192 sums of a thread, and the work
#: list has groups of 1, 2, 4 or 8 row tiles. On an H200, with blocks of 96 x 96, 160 x 160, 80 x 80 and 48 x 80 at
#: density 0.22, n = 8160 and 8192 columns, wide tiles reach 0.85, 0.89, 0.75 and 0.57 of dense cuBLAS, and narrow ones
#: 0.73, 0.89, 0.62 and 0.50; gemm_sm90 reaches 0.46, 0.49, 0.40 and 0.37.
_TILES = {
    160: ((1, 256, 32, 1), (1, 256, 32, 1)),
    128: ((1, 256, 48, 1), (1, 256, 48, 1)),
    120: ((1, 384, 32, 1), (1, 256, 48, 1)),
    104: ((1, 384, 32, 1), (1, 256, 48, 2)),
    96: ((1, 512, 32, 1), (1, 256, 32, 2)),
    80: ((1, 512, 32, 1), (1, 256, 48, 2)),
    72: ((1, 512, 32, 1), (1, 256, 48, 2)),
    64: ((1, 512, 32, 1), (1, 256, 48, 2)),
    56: ((2, 384, 32, 1), (2, 256, 48, 2)),
    48: ((2, 512, 32, 1), (2, 256, 48, 2)),
    40: ((2, 512, 32, 1), (2, 256, 48, 2)),
    32: ((2, 512, 32, 1), (2, 256, 48, 2)),
    24: ((4, 384, 32, 1), (4, 256, 48, 2)),
    16: ((4, 512, 32, 1), (8, 256, 48, 2)),
    8: ((8, 512, 32, 1), (8, 256, 48, 2)),
}
#: Bytes of shared memory that a CTA can have on Hopper.
_SHARED_BYTES = 232448


@dataclass(frozen=True)
class GemmTurnedSm90(
    WorkListSm90,
    source="gemm_turned_sm90.cu",
    argument=arguments.gemm_sm90(),
    needs="sm_90a",
    types="a c",
    derived="mma_type mma_k stages",
):
    """``A @ B`` on Hopper's tensor cores, computed as its transpose, for row tiles of 8 n rows.

    A tile has `row_tiles` row tiles by `tile_n` columns. Elements are 16-bit floats, and the result is only written.
    """

    types: Types
    row_tile_height: int
    row_tiles: int
    tile_n: int
    #: number of columns of A per step, a multiple of 16; `tail` is that of the last step of a block, or 0 if all steps
    #: are equal
    depth: int
    tail: int
    #: whether one copy brings all slabs of 64 columns of a panel of B
    wide: bool
    #: number of slabs of 64 columns of C that a warpgroup has in shared memory while they are stored
    rooms: int
    #: whether row tiles or steps reach beyond a block
    cut: bool
    #: number of columns of B that are processed before the kernel moves on to the next ones
    section: int = host(1024)

    threads = 384
    reads_lines = True
    #: the row tile heights for which the kernel is compiled
    heights = tuple(_TILES)

    costs: ClassVar = {
        "t0": 8.89, "lat": 492.0, "lat_k": 2.2, "rate": 2.78, "rows": 2.33, "l2sm": 232.0, "l2": 0.309, "cut": 9.68,
        "cut_share": 0.564,
    }  # fmt: skip

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
        return 2 * self.rooms * 128 * (-(-self.row_tile_height // 16) * 16) + 512 + 1024

    @property
    def stages(self) -> int:
        """The number of pipeline stages: as many as fit into shared memory, but at most 8."""
        return min(8, (_SHARED_BYTES - self._other_bytes) // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """The size of the kernel's struct Shared plus its alignment."""
        return self.stages * self._stage_bytes + self._other_bytes

    def microseconds(self, problem: Problem, card: Card, x: dict[str, float]) -> float:
        """All warpgroups multiply all row tiles that have a block; panels of B come from the L2."""
        p, of = problem, rows_of(problem)
        per_row = -(-p.R // self.row_tile_height)
        rows = -(-self.row_tiles // per_row)
        used = self.row_tiles * (of.mean / max(of.union(rows), 1e-9) if rows > 1 else 1)
        depth = min(self.depth, -(-p.K // 16) * 16)
        flops = used * (self.row_tile_height + x["rows"]) * self.tile_n * depth / x["rate"] / 1e3
        step = overlapped(x["lat"] + x["lat_k"] * depth / 16, flops, self.tile_n * depth * 2 / x["l2sm"])
        chain, read, cut = self.chain(p, card, step, x)
        both = overlapped(chain, x["l2"] * from_l2(card, read), memory(card, *operand_bytes(p)))
        return x["t0"] + (x["cut"] if cut else 0) + both

    def group(self, K: int) -> int:
        """Return how many column tiles are processed together, for a B of K rows (see `GemmSm90.group`)."""
        return column_tiles_of(self.section, self.tile_n, K * self.tile_n * BYTES[self.types.b])

    @property
    def rare(self) -> bool:
        return self.cut or not self.wide

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        """Lines of blocks are multiples of 16 bytes, as TMA reads them."""
        names, height = problem.types, row_tile_height(problem.R)
        return (
            problem.arch == "sm_90a"
            and names.a in ("f16", "bf16")
            and names.c == names.a
            and names.acc == "f32"
            and problem.parts == 1
            and tensor_cores_serve(problem)
            and not problem.transposed
            and problem.overwrite
            and problem.b_order == problem.c_order == "C"
            and problem.R % 64 != 0
            and problem.lines % 8 == 0
            and problem.block_rows * -(-problem.R // height) * height < 2**31
            and (problem.batches == 1 or not cls.best(problem).cut)
        )

    @classmethod
    def best(cls, problem: Problem) -> GemmTurnedSm90:
        """Row tiles are as high as the block size allows. Tiles are wide unless that adds a tenth to the columns."""
        height = row_tile_height(problem.R)
        wide, narrow = (-(-problem.N // tile[1]) * tile[1] for tile in _TILES[height])
        cut = problem.R % height != 0 or problem.K % 16 != 0
        return cls._of(problem.types, height, problem.K, problem.N % 64 == 0, 10 * wide > 11 * narrow, cut)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[GemmTurnedSm90]:
        """One for each way in which a block is divided into steps."""
        for name in (element(d) for d in dtypes if d in HALF_DTYPES):
            choices = itertools.product(_TILES, range(16, 97, 16), (False, True), (False, True), (False, True))
            yield from sorted({cls._of(Types(name, name, name, "f32"), *each) for each in choices}, key=repr)

    @classmethod
    def _of(cls, names: Types, height: int, K: int, whole_slabs: bool, narrow: bool, cut: bool) -> GemmTurnedSm90:
        row_tiles, tile_n, most, rooms = _TILES[height][narrow]
        deep = -(-K // 16) * 16
        depth = min(most, deep)
        return cls(names, height, row_tiles, tile_n, depth, deep % depth, whole_slabs, rooms, cut)

    def block_map(self, call: Kind) -> Layout:
        data, problem = call.blocks, call.problem
        blocks, rows, cols = data.shape
        box, pitch = (self.line // data.itemsize, self.row_tile_height), problem.lines * data.itemsize
        return Layout(tensor_map.dtype_name(data.dtype), (cols, blocks * rows), (pitch,), box, f"{self.line}B")

    def operand_maps(self, call: Kind) -> tuple[Layout, Layout]:
        box, height = (64, 16, self.tile_n // 64 if self.wide else 1), self.row_tile_height
        if not self.cut:
            return matrix_map(call.B, False, box, "128B", self.wide), matrix_map(
                call.out, False, (64, height, 1), "128B"
            )
        B, out, problem = call.B, call.out, call.problem
        return (
            panels_map(B, problem.K, box, self.wide),
            panels_map(out, problem.R, (64, height, 1), False),
        )


def row_tile_height(R: int) -> int:
    """The height of row tiles: one that adds few rows to the blocks, where 12 more rows of each tile count too.

    >>> [row_tile_height(R) for R in (48, 96, 240, 24, 40, 100, 120, 50, 3, 200)]
    [48, 96, 120, 24, 40, 104, 120, 56, 8, 104]
    """
    return min(_TILES, key=lambda height: -(-R // height) * (height + 12))


def panels_map(x: Any, rows: int, box: tuple[int, int, int], slabs: bool) -> Layout:
    """Return the tensor map of a row-major matrix whose rows belong to block rows of `rows` each.

    A box that reaches beyond a block row reads zeros there, and writes nothing. With `slabs`, one box has several slabs
    of 64 columns. The dimensions are columns, rows of a block row, slabs, block rows.
    """
    high, columns = x.shape[-2:]
    pitch, size = x.strides[-2], x.itemsize
    width, count, slab = (64, columns // 64, 64 * size) if slabs else (columns, 1, pitch)
    dims, pitches = (width, rows, count, high // rows), (pitch, slab, rows * pitch)
    return Layout(tensor_map.dtype_name(x.dtype), dims, pitches, (*box, 1), "128B")
