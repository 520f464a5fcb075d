"""The kernels of `attention_decode` and `KVCache.append`: their constants, how CTAs share the work, their launches.

All that is known of kinds of both calls is in `CALLS`: launches, and decodes whose arguments were checked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import graphs, overlapping, workspace
from .._kernels.card import Card, card, shared_kb, tensor_arch
from .._kernels.element_types import element
from .._kernels.kernel import Kernel, host
from .._kernels.launch import Calls, Launch, Scratch
from ..dtypes import HALF_DTYPES
from .arguments import DECODE, KV_APPEND
from .call import DecodeCall, asked_for
from .kv_cache import TILE, AppendCall, AppendEngine, KVCache, rounded_tiles

#: Head dims that the kernel supports.
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
#: kMostPieces of the kernel, and the fewest tiles of a piece (128 keys).
_MOST_PIECES, LEAST_TILES = 128, 8
#: Cost of a CTA besides its tiles, in tiles: its start, the first copies, and adding its sums to those of other CTAs.
_CTA_TILES = 4
#: The largest grid along its second and third dimension.
_MOST_GRID = 65535
#: Shared memory in bytes that every card since Ampere offers to a CTA.
_SHARED_BYTES = 99 << 10
_LOG2_E = math.log2(math.e)
_MOST_FLOAT32 = float(np.finfo(np.float32).max)
#: The layout of a plain call, which is recognised by the very objects that are its defaults.
_LAYOUT = "bhsd"

#: Lengths are a part of the kind of a decode: a server with many batches meets more kinds than a matrix does.
CALLS = Calls(most=512)


# -------------------------------------------------------------------------------------------------- decode
@dataclass(frozen=True)
class Decode(Kernel, source="decode.cu", argument=DECODE, needs="sm_80", derived="warps stages shared_q"):
    """Attention at the end of a cache: each warp multiplies `rows` rows of queries with tiles of 16 keys of its own."""

    element: str
    head_dim: int
    value_dim: int
    rows: int
    overlaps: bool = host(False)

    @classmethod
    def of(cls, dtype: np.dtype[Any], head_dim: int, value_dim: int, rows: int, overlaps: bool = False) -> Decode:
        """The kernel for `rows` rows (query heads of a group times queries) that read the same keys."""
        wide = rows > 16 and max(head_dim, value_dim) <= 128  # the sums of 32 wider rows do not fit the registers
        return cls(element(dtype), head_dim, value_dim, 32 if wide else 16, overlaps)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Decode]:
        for dtype in (x for x in dtypes if x in HALF_DTYPES):
            for head_dim in HEAD_DIMS:
                for value_dim in HEAD_DIMS:
                    rows = (1, 17) if max(head_dim, value_dim) <= 128 else (1,)
                    yield from (cls.of(dtype, head_dim, value_dim, n) for n in rows)

    @property
    def rare(self) -> bool:
        return self.head_dim != self.value_dim

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

    def prepare(self, call: DecodeCall, card: Card) -> Launch:
        """The launch for decodes of this kind, of caches with similar lengths.

        If the GPU alone knows the lengths, sequences of any length are divided into as many pieces as the grid has.
        """
        cache, batch = call.cache, call.cache.batch
        heads = cache.kv_heads * -(-call.rows // self.rows)
        if max(batch, heads) > _MOST_GRID:
            raise ValueError(
                f"cache: wanted at most {_MOST_GRID} sequences and heads by tiles of rows, got {batch}, {heads}"
            )
        longest, total = _tiles_of(call)
        slots = card.multiprocessors * self.ctas(card.arch)
        pieces, tiles = pieces_of(longest, total, batch, heads, slots)
        divided = batch * heads if pieces > 1 else 0
        floats = divided * pieces * self.rows * (self.value_dim + 2)
        grows = cache._captured and call.blocks is None
        return Launch(
            self,
            (pieces, heads, batch),
            _packed(call, LEAST_TILES if grows else tiles),
            pointers=_writer(call.arrays),
            scratch=Scratch(4 * floats, divided, DECODE.patch("partial", "arrived").write) if divided else None,
        )


def decode(call: DecodeCall) -> Launch:
    """Start the kernel on CuPy's current stream; return its launch."""
    launch: Launch = CALLS.made(_kind_of_decode(call), lambda: _prepared(call))
    launch.start(operands(call))
    return launch


def decode_key(q: Any, cache: KVCache, out: Any, window: Any, options: tuple[Any, ...]) -> Any:
    """Return the key in `CALLS` for the arguments of `attention_decode`; None if such a call is always checked.

    All that is checked follows from the key, but whether `out` overlaps an operand. Options of another type are another
    call: ``return_lse=1`` equals ``return_lse=True``, but is refused.
    """
    kind, asked = type(cache.k), None
    scale, softcap, layout, lse = options
    if type(q) is not kind:
        return None
    if not (out is window is scale is softcap is None and layout is _LAYOUT and lse is False):
        asked = asked_for(kind, out, window, options)
        if asked is None:
            return None
    return ("checked", asked, q.shape, q.strides, q.dtype, *_state_of(cache))


def _kind_of_decode(call: DecodeCall) -> tuple[Any, ...]:
    """Return everything that the launch of a checked decode depends on."""
    q, out, blocks = call.q, call.out, call.blocks
    return (
        "decode", q.shape, q.strides, out.strides, call.lse is None, call.scale, call.softcap, call.left, call.block,
        None if blocks is None else (blocks.shape, blocks.strides), *_state_of(call.cache),
    )  # fmt: skip


def _state_of(cache: KVCache) -> tuple[Any, ...]:
    """Return what a decode depends on beside its arguments: its cache, the device, and whether launches overlap.

    The kernel does not depend on the alignment of any operand: it looks at addresses itself.
    """
    table, captured = cache.table, cache._captured
    width, lengths = 0 if table is None else table.shape[1], None if captured else cache._tiles
    return cache._sizes, lengths, width, cupy.cuda.runtime.getDevice(), overlapping.thread.active


def _prepared(call: DecodeCall) -> Launch:
    cache, described = call.cache, card()
    D, D_v = cache.head_dim, cache.value_dim
    if D not in HEAD_DIMS or D_v not in HEAD_DIMS:
        wanted = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"cache: wanted head dims among {wanted} on a GPU, got {D} for keys, {D_v} for values")
    if not tensor_arch(described.arch):
        raise RuntimeError("attention_decode on a GPU needs compute capability 8.0 or newer; the CPU works here")
    return Decode.of(cache.dtype, D, D_v, call.rows, overlapping.thread.active).prepare(call, described)


def _tiles_of(call: DecodeCall) -> tuple[int, int]:
    """Rounded numbers of tiles of keys: those of the longest sequence, and those of all sequences together.

    Replays of a captured append let sequences grow up to the capacity.
    """
    cache, seen = call.cache, call.left + call.q.shape[2]
    if call.blocks is not None:
        longest = call.blocks.shape[2] * (call.block // TILE)
        return longest, cache.batch * longest
    if cache._captured:
        return rounded_tiles(min(cache.capacity, seen), cache.batch * cache.capacity, cache.batch)
    return rounded_tiles(min(cache._longest, seen), cache._total, cache.batch)


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


def _packed(call: DecodeCall, piece_tiles: int) -> bytearray:
    q, cache, blocks, out = call.q, call.cache, call.blocks, call.out
    cap = inverse_cap = 0.0
    if call.softcap is not None:
        cap, inverse_cap = _float32(call.softcap * _LOG2_E), _float32(1 / (call.softcap * _LOG2_E))
    return DECODE.pack(
        **dict.fromkeys((*call.arrays, "partial", "arrived"), 0),
        **_strides("q", q),
        **_strides("out", out),
        **dict(zip(("blocks_batch", "blocks_head", "blocks_entry"), _block_strides(blocks), strict=True)),
        kv_heads=cache.kv_heads,
        group=q.shape[1] // cache.kv_heads,
        queries=q.shape[2],
        capacity=cache.capacity,
        pages=cache.pages,
        page=cache.page or cache.capacity,
        table_width=_width(cache.table),
        entries=0 if blocks is None else blocks.shape[2],
        block_tiles=(call.block or TILE) // TILE,
        left=call.left,
        right=call.right,
        piece_tiles=piece_tiles,
        scale=_float32(call.scale * _LOG2_E),
        softcap=cap,
        inverse_softcap=inverse_cap,
    )


def _block_strides(blocks: Array | None) -> tuple[int, int, int]:
    """Strides of `blocks` in elements; 0 along a dimension of length 1, where one list serves all."""
    if blocks is None:
        return 0, 0, 0
    B, H, _ = blocks.shape
    batch, head, entry = (s // blocks.itemsize for s in blocks.strides)
    return batch if B > 1 else 0, head if H > 1 else 0, entry


def _float32(x: float) -> float:
    """x, clamped to the finite range of float32."""
    return max(-_MOST_FLOAT32, min(x, _MOST_FLOAT32))


# -------------------------------------------------------------------------------------------------- append
@dataclass(frozen=True)
class KvAppend(Kernel, source="kv_append.cu", argument=KV_APPEND):
    """Copies new tokens to the ends of the sequences of a cache: each warp copies rows of keys and values."""

    element: str
    overlaps: bool = host(False)

    threads, warps = 256, 8

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[KvAppend]:
        yield from (cls(element(dtype)) for dtype in dtypes if dtype in HALF_DTYPES)

    def grid(self, rows: int, batch: int, multiprocessors: int) -> tuple[int, int]:
        """CTAs for the `rows` rows (heads times tokens) of each of `batch` sequences; the kernel loops over the rest.

        >>> KvAppend("f16").grid(8, 1, 132), KvAppend("f16").grid(65536, 1, 132), KvAppend("f16").grid(65536, 600, 132)
        ((1, 1), (1056, 1), (2, 600))
        """
        most = max(1, -(-self.warps * multiprocessors // batch))
        return min(-(-rows // self.warps), most), min(batch, _MOST_GRID)

    def prepare(self, call: AppendCall, card: Card) -> Launch:
        """The launch for appends of this kind."""
        batch, heads, tokens, key_dim = call.k.shape
        grid = self.grid(heads * tokens, batch, card.multiprocessors)
        packed = KV_APPEND.pack(
            **dict.fromkeys((*call.arrays, "arrived"), 0),
            **_strides("k", call.k),
            **_strides("v", call.v),
            batch=batch,
            heads=heads,
            tokens=tokens,
            key_dim=key_dim,
            value_dim=call.v.shape[3],
            capacity=call.capacity,
            pages=len(call.to_k),
            page=call.to_k.shape[2],
            table_width=_width(call.table),
            wide=int(_is_wide(call.k) and _is_wide(call.v)),
        )
        write_arrived = KV_APPEND.patch("arrived").write
        return Launch(
            self,
            grid,
            packed,
            pointers=_writer(call.arrays),
            scratch=Scratch(0, batch, lambda to, _, arrived: write_arrived(to, arrived)) if grid[0] > 1 else None,
        )


class CudaAppend(AppendEngine):
    """Appends to caches in memory of CuPy; the kernel runs on the current stream."""

    def is_capturing(self) -> bool:
        return graphs.is_capturing()

    def append(self, call: AppendCall) -> None:
        launch: Launch = CALLS.made(_kind_of_append(call), lambda: _prepared_append(call))
        if call.table is not None and call.new_table is not None:
            if launch.grid[0] > 1:
                workspace.counters(len(call.lengths))  # if there is no memory for them, the table has not changed yet
            call.table[...] = call.new_table
        launch.start(operands(call))


def _prepared_append(call: AppendCall) -> Launch:
    return KvAppend(element(call.to_k.dtype), overlapping.thread.active).prepare(call, card())


def _kind_of_append(call: AppendCall) -> tuple[Any, ...]:
    """Return everything that the launch of an append depends on."""
    k, v = call.k, call.v
    return (
        "append", k.shape, k.strides, v.shape, v.strides, (k.data.ptr | v.data.ptr) % 16 == 0, call.to_k.dtype,
        call.to_k.shape, call.capacity, _width(call.table), call.table is None, call.takes is None,
        cupy.cuda.runtime.getDevice(), overlapping.thread.active,
    )  # fmt: skip


def _is_wide(x: Array) -> bool:
    """Return whether the rows of keys or values can be read and written in pieces of 16 bytes."""
    steps = [step for step, n in zip(x.strides[:3], x.shape[:3], strict=True) if n > 1]
    return x.strides[3] == x.itemsize and not np.bitwise_or.reduce([x.data.ptr, x.shape[3] * x.itemsize, *steps]) % 16


# -------------------------------------------------------------------------------------------------- both
def operands(call: DecodeCall | AppendCall) -> list[Array]:
    """What a launch is started with: the operands that there are, in the order of their addresses in the struct."""
    return [x for x in call.arrays.values() if x is not None]


def _writer(arrays: dict[str, Array | None]) -> Callable[..., None]:
    """What writes the addresses of the operands that there are, with which both structs begin, and 0 for the others."""
    write = struct.Struct("=" + "".join("8x" if x is None else "Q" for x in arrays.values())).pack_into
    return lambda to, *addresses: write(to, 0, *addresses)


def _strides(name: str, x: Array) -> dict[str, int]:
    axes = ("batch", "head", "row", "col")
    return {f"{name}_{axis}": step // x.itemsize for axis, step in zip(axes, x.strides, strict=True)}


def _width(table: Array | None) -> int:
    """Pages of a sequence; 0 without a table."""
    return 0 if table is None else int(table.shape[1])


#: All kernels of this room that are no attention over given keys.
DECODE_KERNELS = (Decode, KvAppend)
ENGINE = CudaAppend()
