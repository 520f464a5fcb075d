"""From a decode on the GPU to a launch of cuda/decode.cu: the variant, the split, the argument."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._backend.base import Array
from .._kernels import jit
from .._kernels.jit import KernelSpec
from .._products import configs
from ..dtypes import BFLOAT16, FLOAT16
from .decode import _TILE
from .kv_cache import KVCache

#: Head dims of the kernel.
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
#: `Decode` of cuda/decode.cu.
_ARGUMENT = struct.Struct("@10P11q11i3f")
_LOG2_E = math.log2(math.e)
#: kMostPieces of the kernel; a piece has at least 128 keys.
_MOST_PIECES, _LEAST_TILES = 128, 8
#: What a CTA costs beside its tiles, in tiles: its start, the first copies, joining its sums to the others'.
_CTA_TILES = 4
#: Shared memory that every card since Ampere has for a CTA.
_SHARED_BYTES = 99 << 10
_MOST_GRID = 65535
_MOST_FLOAT32 = float(np.finfo(np.float32).max)
_MOST_PLANS = 256


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
        return self.warps * _TILE * (self.head_dim + self.value_dim) * 2

    @property
    def _query_bytes(self) -> int:
        return self.rows * self.head_dim * 2 if self.shared_q else 128

    def ctas(self, arch: str) -> int:
        """CTAs that share a multiprocessor."""
        return 2 if 2 * (self.shared_bytes + 1024) <= (configs.shared_kb(arch) + 1) * 1024 else 1

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
        )


def decode_config(dtype: np.dtype[Any], head_dim: int, value_dim: int, rows: int) -> Decode:
    """The kernel for so many rows (query heads of a group by queries) that read the same keys."""
    wide = rows > 16 and max(head_dim, value_dim) <= 128  # sums of 32 rows of more would not fit the registers
    return Decode(configs.element(dtype), head_dim, value_dim, 32 if wide else 16)


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
    return configs.tensor_arch(arch)


def rare(config: Decode) -> bool:
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


class _Plan:
    """The kernel with its launch shape, for one kind of problem and about so many keys."""

    __slots__ = ("counters", "floats", "grid", "kernel", "shared_bytes", "threads", "tiles", "workspace")

    def __init__(self, dtype: Any, D: int, D_v: int, B: int, H: int, rows: int, longest: int, total: int) -> None:
        from .._kernels import workspace
        from .._products import launch

        arch = jit.device_target()
        if arch == "sm_75":
            raise RuntimeError("attention_decode on a GPU needs compute capability 8.0 or newer; the CPU works here")
        config = decode_config(dtype, D, D_v, rows)
        heads = H * -(-rows // config.rows)
        if max(B, heads) > _MOST_GRID:
            raise ValueError(
                f"cache: wanted at most {_MOST_GRID} sequences and heads by tiles of rows, got {B}, {heads}"
            )
        slots = launch._multiprocessors() * config.ctas(arch)
        pieces, self.tiles = pieces_of(longest, total, B, heads, slots)
        self.kernel = jit.load(config.spec(), arch)
        self.kernel.max_dynamic_shared_size_bytes = self.shared_bytes = config.shared_bytes
        self.grid, self.threads = (pieces, heads, B), (config.threads,)
        self.counters, self.workspace = B * heads if pieces > 1 else 0, workspace
        self.floats = B * heads * pieces * config.rows * (D_v + 2) if pieces > 1 else 0


_plans: dict[Any, _Plan] = {}


def _on_device(
    q: Array, cache: KVCache, blocks: Any, block: int, left: int, scale: float, softcap: Any, out: Array, lse: Any
) -> None:
    """Start the kernel on CuPy's current stream."""
    xp = cache._backend.xp
    B, H_q, S_q, D = q.shape
    H, capacity, table = cache.kv_heads, cache.capacity, cache.table
    block_tiles = block // _TILE
    if blocks is None:
        entries, block_strides = 0, (0, 0, 0)
        longest = _about(-(-min(cache._longest, left + S_q) // _TILE))
        total = min(B * longest, _about(-(-cache._total // _TILE)))
    else:
        entries, block_strides = blocks.shape[2], _block_strides(blocks)
        longest = entries * block_tiles
        total = B * longest
    key = (xp.cuda.runtime.getDevice(), cache.dtype.char, D, cache.value_dim, B, H, H_q * S_q, longest, total)
    plan = _plans.get(key) or _new_plan(key, cache, H_q // H * S_q, longest, total)
    partial = plan.workspace.temporary(plan.floats, np.float32) if plan.floats else None
    size = q.itemsize
    q_batch, q_head, q_row, q_col = q.strides
    out_batch, out_head, out_row, out_col = out.strides
    cap = inverse_cap = 0.0
    if softcap is not None:
        cap, inverse_cap = _float32(softcap * _LOG2_E), _float32(1 / (softcap * _LOG2_E))
    packed = _ARGUMENT.pack(
        q.data.ptr,
        cache.k.data.ptr,
        cache.v.data.ptr,
        out.data.ptr,
        0 if lse is None else lse.data.ptr,
        cache._device_lengths.data.ptr,
        0 if table is None else table.data.ptr,
        0 if blocks is None else blocks.data.ptr,
        0 if partial is None else partial.data.ptr,
        plan.workspace.counters(plan.counters).data.ptr if plan.counters else 0,
        q_batch // size,
        q_head // size,
        q_row // size,
        q_col // size,
        out_batch // size,
        out_head // size,
        out_row // size,
        out_col // size,
        *block_strides,
        H,
        H_q // H,
        S_q,
        capacity,
        cache.pages,
        cache.page or capacity,
        0 if table is None else table.shape[1],
        entries,
        block_tiles,
        left,
        plan.tiles,
        _float32(scale * _LOG2_E),
        cap,
        inverse_cap,
    )
    plan.kernel(plan.grid, plan.threads, (jit.argument(packed),), shared_mem=plan.shared_bytes)


def _new_plan(key: Any, cache: KVCache, rows: int, longest: int, total: int) -> _Plan:
    D, D_v = cache.head_dim, cache.value_dim
    if D not in HEAD_DIMS or D_v not in HEAD_DIMS:
        wanted = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"cache: wanted head dims among {wanted} on a GPU, got {D} for keys, {D_v} for values")
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    plan = _plans[key] = _Plan(cache.dtype, D, D_v, cache.batch, cache.kv_heads, rows, longest, total)
    return plan


def _block_strides(blocks: Array) -> tuple[int, int, int]:
    """In elements; one list for all stands still."""
    B, H, _ = blocks.shape
    batch, head, entry = (s // blocks.itemsize for s in blocks.strides)
    return batch if B > 1 else 0, head if H > 1 else 0, entry


def _float32(x: float) -> float:
    """x, or the largest number that a float32 can hold."""
    return max(-_MOST_FLOAT32, min(x, _MOST_FLOAT32))


def _about(x: int) -> int:
    """x rounded up to four leading bits: lengths that are about the same share a plan."""
    shift = max(0, x.bit_length() - 4)
    return -(-x >> shift) << shift
