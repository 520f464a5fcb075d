"""Configs of the kernels that read patterns and make the lists from which the kernels of products work."""

from __future__ import annotations

from dataclasses import dataclass

from .._kernels.jit import MAX_GRID_X, KernelSpec
from . import arguments


@dataclass(frozen=True)
class RowMatching:
    """One of the three kernels that find row tiles with many block columns in common.

    Only `row_bits` reads the index arrays of a matrix, so only this kernel depends on the index type.
    """

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
        """Return the grid of `row_bits`, in which a thread reads `neighbors` consecutive blocks."""
        return (min(MAX_GRID_X, -(-blocks // (self.threads * self.neighbors))),)


@dataclass(frozen=True)
class SpgemmPattern:
    """One of the kernels that find the pairs of blocks which ``BSR @ BSR`` multiplies."""

    entry: str
    index: str

    threads = 128
    entries = ("list_at_once", "count_pairs", "list_pairs", "pack_columns")

    def spec(self) -> KernelSpec:
        return KernelSpec("spgemm_pattern.cu", self.entry, (("INDEX", self.index),), (arguments.SPGEMM_PATTERN,))

    def grid(self, rows: int, warps: int) -> tuple[int]:
        """Return the grid, in which each block row has a warp."""
        return (min(MAX_GRID_X, -(-rows // warps)),)


@dataclass(frozen=True)
class WorkListKernel:
    """The kernel that builds a work list step by step: the entries of each group of row tiles, and groups by length."""

    index: str = "i32"

    threads = 256
    #: kNeighbors of cuda/common/coordinates.cuh
    neighbors = 8

    def spec(self) -> KernelSpec:
        return KernelSpec("work_list.cu", "work_list", (("INDEX", self.index),), (arguments.WORK_LIST,))

    def grid(self, threads: int) -> tuple[int]:
        return (min(MAX_GRID_X, -(-threads // self.threads)),)

    def tiles(self, keys: int) -> tuple[int, int]:
        """Return the number of CTAs that share `keys` keys, and the number of keys of each.

        There are at most 1024 CTAs, because every CTA reads what all CTAs before it have counted.
        """
        tile = max(4, -(-keys // (1024 * self.threads))) * self.threads
        return -(-keys // tile), tile


@dataclass(frozen=True)
class SampledTiles:
    """The kernel that lists tiles of `group` block rows by `wide` block columns for a sampled product.

    A tile is a record of block rows, block columns, and the stored block where each row and column meet, or -1. Each
    CTA lists the tiles of a window of `rows` block rows and `columns` block columns.
    """

    group: int
    wide: int
    index: str = "i32"

    rows = 64
    columns = 512
    #: size of the kernel's struct Window in bytes
    shared_bytes = rows * columns * 4 + rows * columns // 8 + 4

    @property
    def threads(self) -> int:
        """The number of threads: a warp for each group of the window."""
        return 32 * self.rows // self.group

    @property
    def record(self) -> int:
        """The number of int32 numbers of a tile."""
        return self.group + self.wide + self.group * self.wide

    def spec(self) -> KernelSpec:
        constants = (("INDEX", self.index), ("GROUP", self.group), ("WIDE", self.wide))
        return KernelSpec("sampled_tiles.cu", "sampled_tiles", constants, (arguments.SAMPLED_TILES,))

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.rows), -(-columns // self.columns)

    def capacity(self, blocks: int, rows: int, columns: int) -> int:
        """Return the largest possible number of tiles: one of each group may have fewer than `wide` blocks."""
        down, across = self.grid(rows, columns)
        return blocks // self.wide + down * across * (self.rows // self.group)
