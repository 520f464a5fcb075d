"""``A @ B`` on Hopper's tensor cores as its transpose (swap-AB), for blocks whose rows do not fill tiles of 64 rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .._kernels import tensor_map
from .._kernels.element_types import BYTES, Types, element
from .._kernels.kernel import host
from .._kernels.tensor_map import Layout
from ..dtypes import HALF_DTYPES
from . import arguments
from .call import Problem
from .dense import matrix_map
from .gemm_sm90 import GemmSm90, WorkListSm90, column_tiles_of
from .operand import Kind

#: Height of a row tile -> (row tiles of a tile, columns of a tile, columns of A per step at most, slabs of C in shared
#: memory): for wide tiles, and for narrow ones. On an H200, with blocks of 96 x 96, 160 x 160, 80 x 80 and 48 x 80 at
#: density 0.22, n = 8160 and 8192 columns, wide tiles reach 0.85, 0.89, 0.75 and 0.57 of dense cuBLAS, and narrow ones
#: 0.73, 0.89, 0.62 and 0.50; gemm_sm90 reaches 0.46, 0.49, 0.40 and 0.37.
_TILES = {
    160: ((1, 256, 32, 1), (1, 256, 32, 1)),
    96: ((1, 512, 32, 1), (1, 256, 32, 2)),
    80: ((1, 512, 32, 1), (1, 256, 48, 2)),
    48: ((2, 512, 32, 1), (2, 256, 48, 2)),
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
    section: int = host(1024)

    threads = 384
    reached = (0.8, 0.9)
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

    def group(self, K: int) -> int:
        """Return how many column tiles are processed together, for a B of K rows (see `GemmSm90.group`)."""
        return column_tiles_of(self.section, self.tile_n, K * self.tile_n * BYTES[self.types.b])

    @property
    def rare(self) -> bool:
        return not self.wide

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        names = problem.types
        return (
            GemmSm90.serves(problem)
            and names.a in ("f16", "bf16")
            and names.c == names.a
            and not problem.transposed
            and problem.overwrite
            and problem.b_order == problem.c_order == "C"
            and problem.R % 64 != 0
            and any(problem.R % height == 0 for height in cls.heights)
        )

    @classmethod
    def best(cls, problem: Problem) -> GemmTurnedSm90:
        """Row tiles are as high as the block size allows. Tiles are wide unless that adds a tenth to the columns."""
        height = next(h for h in _TILES if problem.R % h == 0)
        wide, narrow = (-(-problem.N // tile[1]) * tile[1] for tile in _TILES[height])
        return cls._of(problem.types, height, problem.K, problem.N % 64 == 0, 10 * wide > 11 * narrow)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[GemmTurnedSm90]:
        """One for each way in which a block is divided into steps."""
        for name in (element(d) for d in dtypes if d in HALF_DTYPES):
            choices = itertools.product(_TILES, range(16, 97, 16), (False, True), (False, True))
            yield from sorted({cls._of(Types(name, name, name, "f32"), *each) for each in choices}, key=repr)

    @classmethod
    def _of(cls, names: Types, height: int, K: int, whole_slabs: bool, narrow: bool) -> GemmTurnedSm90:
        row_tiles, tile_n, most, rooms = _TILES[height][narrow]
        depth = min(most, K)
        return cls(names, height, row_tiles, tile_n, depth, K % depth, whole_slabs, rooms)

    def block_map(self, call: Kind) -> bytes:
        data = call.operand.source[0]
        blocks, rows, cols = data.shape
        dims, strides, box = (
            (cols, blocks * rows),
            (cols * data.itemsize,),
            (self.line // data.itemsize, self.row_tile_height),
        )
        return Layout(tensor_map.dtype_name(data.dtype), dims, strides, box, f"{self.line}B").at(call.operand.pointer)

    def operand_maps(self, call: Kind) -> tuple[Layout, Layout]:
        box = (64, 16, self.tile_n // 64 if self.wide else 1)
        found = matrix_map(call.B, False, box, "128B", self.wide)
        return found, matrix_map(call.out, False, (64, self.row_tile_height, 1), "128B")
