"""Compile-time constants of cuda/decode.cu and cuda/kv_append.cu: which variant serves a problem, how CTAs share it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._kernels.element_types import element, shared_kb, tensor_arch
from .._kernels.jit import KernelSpec
from ..dtypes import BFLOAT16, FLOAT16
from .arguments import DECODE, KV_APPEND
from .kv_cache import TILE

#: Head dims that the kernel supports.
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
#: kMostPieces of the kernel, and the fewest tiles of a piece (128 keys).
_MOST_PIECES, LEAST_TILES = 128, 8
#: Cost of a CTA besides its tiles, in tiles: its start, the first copies, and adding its sums to those of other CTAs.
_CTA_TILES = 4
#: The largest grid along its second dimension.
_MOST_GRID = 65535
#: Shared memory in bytes that every card since Ampere offers to a CTA.
_SHARED_BYTES = 99 << 10


@dataclass(frozen=True)
class Decode:
    """Attention at the end of a cache: each warp multiplies `rows` rows of queries with tiles of 16 keys of its own."""

    element: str
    head_dim: int
    value_dim: int
    rows: int

    @property
    def warps(self) -> int:
        """Four warps, or two where a stage for four would be so large that only two stages fit."""
        return 4 if self.head_dim + self.value_dim <= 256 else 2

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_q(self) -> bool:
        """Whether Q stays in shared memory, because its fragments and the sums take too many registers."""
        return self.rows > 16 or self.head_dim // 4 + self.value_dim // 2 > 160

    @property
    def stages(self) -> int:
        """As many stages as fit 99 KB: 64 to 96 KB of K and V in flight; two CTAs fit a multiprocessor of 228 KB."""
        return (_SHARED_BYTES - self._query_bytes) // self._stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel."""
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
        """CTAs that run on a multiprocessor at the same time."""
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


@dataclass(frozen=True)
class KvAppend:
    """Copies new tokens to the ends of the sequences of a cache: each warp copies rows of keys and values."""

    element: str

    threads, warps = 256, 8

    def grid(self, rows: int, batch: int, multiprocessors: int) -> tuple[int, int]:
        """CTAs for the `rows` rows (heads times tokens) of each of `batch` sequences; the kernel loops over the rest.

        >>> KvAppend("f16").grid(8, 1, 132), KvAppend("f16").grid(65536, 1, 132), KvAppend("f16").grid(65536, 600, 132)
        ((1, 1), (1056, 1), (2, 600))
        """
        most = max(1, -(-self.warps * multiprocessors // batch))
        return min(-(-rows // self.warps), most), min(batch, _MOST_GRID)

    def spec(self) -> KernelSpec:
        return KernelSpec("kv_append.cu", "kv_append", (("ELEMENT", self.element),), (KV_APPEND,))


def decode_config(dtype: np.dtype[Any], head_dim: int, value_dim: int, rows: int) -> Decode:
    """The kernel for `rows` rows (query heads of a group times queries) that read the same keys."""
    wide = rows > 16 and max(head_dim, value_dim) <= 128  # the sums of 32 wider rows do not fit the registers
    return Decode(element(dtype), head_dim, value_dim, 32 if wide else 16)


def every_decode_config() -> Iterator[Decode | KvAppend]:
    """Every config that `decode_config` can return, and those that append tokens."""
    for dtype in (FLOAT16, BFLOAT16):
        yield KvAppend(element(dtype))
        for head_dim in HEAD_DIMS:
            for value_dim in HEAD_DIMS:
                yield decode_config(dtype, head_dim, value_dim, 1)
                if max(head_dim, value_dim) <= 128:
                    yield decode_config(dtype, head_dim, value_dim, 17)


def runs_on(config: Decode | KvAppend, arch: str) -> bool:
    """Whether this kernel can be compiled for `arch`."""
    return isinstance(config, KvAppend) or tensor_arch(arch)


def skip_ahead_of_time(config: Decode | KvAppend) -> bool:
    """Whether this kernel is needed so rarely that it is not compiled ahead of time."""
    return isinstance(config, Decode) and config.head_dim != config.value_dim


def pieces_of(longest: int, total: int, batch: int, heads: int, slots: int) -> tuple[int, int]:
    """(pieces of the longest sequence, tiles of a piece) for the shortest time if `slots` CTAs run at the same time.

    `longest` is the number of tiles of keys of the longest of `batch` sequences, `total` that of all sequences
    together; each sequence is read by `heads` CTAs for each piece.

    >>> pieces_of(512, 512, 1, 8, 264), pieces_of(8192, 8192, 1, 8, 264), pieces_of(512, 32 * 512, 32, 8, 264)
    ((32, 16), (33, 249), (1, 512))
    """
    best = (math.inf, 1, max(1, longest))
    for pieces in range(1, max(1, min(_MOST_PIECES, longest // LEAST_TILES)) + 1):
        tiles = max(1, -(-longest // pieces))
        rounds = -(-heads * max(batch, -(-total // tiles)) // slots)
        best = min(best, (rounds * (tiles + _CTA_TILES), pieces, tiles))
    return best[1], best[2]


def _family(every, runs, rare):
    class Wrapped:
        def __init__(self, config):
            self.config = config

        def __getattr__(self, name):
            return getattr(self.config, name)

        @property
        def rare(self):
            return rare(self.config)

        def runs_on(self, arch):
            return runs(self.config, arch)

        def spec(self):
            return self.config.spec()

    class Family:
        @classmethod
        def every(cls, dtypes):
            yield from map(Wrapped, every())

    return (Family,)


DECODE_KERNELS = _family(every_decode_config, runs_on, skip_ahead_of_time)
