"""The kernel of decode and its constants: which variant serves a problem, and how keys are split among CTAs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._kernels.element_types import element, shared_kb, tensor_arch
from .._kernels.jit import KernelSpec
from ..dtypes import BFLOAT16, FLOAT16
from .arguments import DECODE

#: Keys of a tile of the kernel; pages and blocks are made of whole tiles.
TILE = 16
#: Head dims of the kernel.
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
#: kMostPieces of the kernel; a piece has at least 128 keys.
_MOST_PIECES, _LEAST_TILES = 128, 8
#: What a CTA costs beside its tiles, in tiles: its start, the first copies, joining its sums to the others'.
_CTA_TILES = 4
#: Shared memory that every card since Ampere has for a CTA.
_SHARED_BYTES = 99 << 10


@dataclass(frozen=True)
class Decode:
    """Attention at the end of a cache: `rows` rows of queries by tiles of 16 keys, for each warp on its own."""

    element: str
    head_dim: int
    value_dim: int
    rows: int

    @property
    def warps(self) -> int:
        """Two where a stage of four would leave room for two stages."""
        return 4 if self.head_dim + self.value_dim <= 256 else 2

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_q(self) -> bool:
        """Do the fragments of Q, beside the sums, take too many registers?"""
        return self.rows > 16 or self.head_dim // 4 + self.value_dim // 2 > 160

    @property
    def stages(self) -> int:
        """As many as fit 99 KB: 64 to 96 KB of K and V in flight, and two CTAs on a multiprocessor of 228 KB."""
        return (_SHARED_BYTES - self._query_bytes) // self._stage_bytes

    @property
    def shared_bytes(self) -> int:
        """The struct Shared of the kernel."""
        ends = self.warps * self.rows * (self.value_dim + 10) * 4
        join = self.rows * (_MOST_PIECES + 2) * 4
        return -(-max(self.stages * self._stage_bytes, ends, join) // 128) * 128 + self._query_bytes

    @property
    def _stage_bytes(self) -> int:
        return self.warps * TILE * (self.head_dim + self.value_dim) * 2

    @property
    def _query_bytes(self) -> int:
        return self.rows * self.head_dim * 2 if self.shared_q else 128

    def ctas(self, arch: str) -> int:
        """CTAs that share a multiprocessor."""
        return 2 if 2 * (self.shared_bytes + 1024) <= (shared_kb(arch) + 1) * 1024 else 1

    def spec(self) -> KernelSpec:
        return KernelSpec(
            "decode.cu",
            "decode",
            (
                ("ELEMENT", self.element),
                ("HEAD_DIM", self.head_dim),
                ("VALUE_DIM", self.value_dim),
                ("ROWS", self.rows),
                ("WARPS", self.warps),
                ("STAGES", self.stages),
                ("SHARED_Q", int(self.shared_q)),
            ),
            (DECODE,),
        )


def decode_config(dtype: np.dtype[Any], head_dim: int, value_dim: int, rows: int) -> Decode:
    """The kernel for so many rows (query heads of a group by queries) that read the same keys."""
    wide = rows > 16 and max(head_dim, value_dim) <= 128  # sums of 32 rows of more would not fit the registers
    return Decode(element(dtype), head_dim, value_dim, 32 if wide else 16)


def every_decode_config() -> Iterator[Decode]:
    """Every config that `decode_config` can return."""
    for dtype in (FLOAT16, BFLOAT16):
        for head_dim in HEAD_DIMS:
            for value_dim in HEAD_DIMS:
                yield decode_config(dtype, head_dim, value_dim, 1)
                if max(head_dim, value_dim) <= 128:
                    yield decode_config(dtype, head_dim, value_dim, 17)


def runs_on(config: Decode, arch: str) -> bool:
    """Can this kernel be compiled for `arch`?"""
    return tensor_arch(arch)


def skip_ahead_of_time(config: Decode) -> bool:
    """Is this kernel met so rarely that compiling it ahead is a waste?"""
    return config.head_dim != config.value_dim


def pieces_of(longest: int, total: int, batch: int, heads: int, slots: int) -> tuple[int, int]:
    """(pieces of the longest sequence, tiles of a piece), such that `slots` CTAs side by side are soonest done.

    `longest` and `total` are tiles of keys, of the longest of `batch` sequences and of all; each comes `heads` times.

    >>> pieces_of(512, 512, 1, 8, 264), pieces_of(8192, 8192, 1, 8, 264), pieces_of(512, 32 * 512, 32, 8, 264)
    ((32, 16), (33, 249), (1, 512))
    """
    best = (math.inf, 1, max(1, longest))
    for pieces in range(1, max(1, min(_MOST_PIECES, longest // _LEAST_TILES)) + 1):
        tiles = max(1, -(-longest // pieces))
        rounds = -(-heads * max(batch, -(-total // tiles)) // slots)
        best = min(best, (rounds * (tiles + _CTA_TILES), pieces, tiles))
    return best[1], best[2]
