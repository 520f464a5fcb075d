"""Tiles of blocks that need not be neighbours, for sampled products of small blocks on Hopper's tensor cores.

A tile of the tensor cores has 128 rows and 256 columns. Small blocks fill it only if block rows with common block
columns share it. cuda/sampled_tiles.cu looks for them, once for each pattern, and never waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import jit
from .._kernels.element_types import element
from .._kernels.jit import MAX_GRID_YZ
from .._kernels.launching import run
from .arguments import SAMPLED_TILES
from .configs import BlockProductsSm90
from .heuristics import BlockProblem
from .list_configs import SampledTiles

#: By the number of rows of a block, the least part of all blocks that must be stored. On an H200 a random pattern of so
#: many blocks took as long with tiles of one block row. Patterns with similar block rows gain more.
_LEAST_DENSITY = {64: 0.06, 32: 0.02, 16: 0.02}
_SIDES = (16, 32, 64, 128)
#: The least number of stored elements. Fewer make too few tiles for all multiprocessors.
_LEAST_ELEMENTS = 1 << 19
#: By the number of rows of a block, the least number of columns of X.
_LEAST_DEPTH = {64: 512, 32: 64, 16: 64}
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class TileList:
    """The tiles of a pattern: `tiles` has a row of numbers for each.

    A row has the block rows of a tile, its block columns, and for each of its rows the blocks in these columns. All
    are -1 where there is none. ``counts[0]`` is the number of tiles. For each `SampledTiles.rows` block rows, `counts`
    has the number of their tiles and the row of `tiles` with the first of them.
    """

    tiles: Array
    counts: Array


def config_of(
    config: BlockProductsSm90, problem: BlockProblem, blocks: int, shape: tuple[int, int]
) -> BlockProductsSm90 | None:
    """Return the kernel that takes its tiles from a list, or None where tiles of one block row are as good.

    `config` is the kernel without a list, and `shape` the number of block rows and block columns of the pattern.
    """
    R, N = problem.R, problem.N
    if R not in _LEAST_DENSITY or N not in _SIDES or -(-shape[1] // SampledTiles.columns) > MAX_GRID_YZ:
        return None
    if blocks * R * N < _LEAST_ELEMENTS or _LEAST_DEPTH[R] > problem.K:
        return None
    if blocks < _LEAST_DENSITY[R] * shape[0] * shape[1]:
        return None
    return replace(config, tile_m=128, row_parts=128 // R, index="i32")


def listed(indices: Array, indptr: Array, columns: int, config: BlockProductsSm90) -> TileList:
    """Return the tiles of a pattern with so many block columns for this kernel, without waiting for the GPU."""
    kernel = SampledTiles(config.row_parts, config.parts, element(indices.dtype))
    rows, blocks = len(indptr) - 1, len(indices)
    capacity = kernel.capacity(blocks, rows, columns)
    windows = kernel.grid(rows, columns)[0]
    found = TileList(cupy.empty((capacity, kernel.record), _INT32), cupy.zeros(1 + 2 * windows, _INT32))
    argument = SAMPLED_TILES.pack(
        indices=indices.data.ptr, indptr=indptr.data.ptr, tiles=found.tiles.data.ptr, counts=found.counts.data.ptr,
        rows=rows, columns=columns, blocks=blocks, capacity=capacity,
    )  # fmt: skip
    uses = (indices, indptr, found.tiles, found.counts)
    run(kernel, kernel.grid(rows, columns), (jit.argument(argument),), uses=uses, shared_bytes=kernel.shared_bytes)
    return found
