"""Attention on Hopper's tensor cores: the kernel for any length, the one for short sequences, and values in fp8."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels import jit
from .._kernels.card import Card
from .._kernels.element_types import element
from .._kernels.kernel import Kernel, host
from .._kernels.launch import run
from .._kernels.tensor_map import Layout
from ..dtypes import BFLOAT16, FLOAT16
from . import arguments
from .call import AttentionCall
from .forward import CAPPED, DIMS, PLAIN, SIGNED, Forward, Problem, layout_of

#: The same for queries and keys in fp8: multiples of 32 bytes.
_FP8_DIMS = (64, 96, 128, 192, 256)
#: Fewer rows of queries than this (66 tiles of 128) fill less than half of the multiprocessors of the largest card.
_FEW_ROWS = 66 * 128
_FEW_KEYS = 1024
#: Keys of a piece that AttentionGathered can take.
PIECES = (16, 32, 64)
#: Most keys for AttentionShort.
SHORT_KEYS = 512
#: Columns of a head -> (most tiles of 64 queries, shape of AttentionShort), for more than half of SHORT_KEYS. With one
#: tile for each of 132 multiprocessors, two warpgroups share the keys of a tile; then three CTAs run on each, for one
#: or two rounds; beyond that, a CTA has 128 queries, which read half as much from the L2.
SHORT_SHAPES: dict[int, tuple[tuple[int, tuple[int, int, int, int, int]], ...]] = {
    64: ((132, (64, 2, 4, 2, 64)), (792, (64, 1, 2, 3, 128)), (1056, (128, 1, 4, 2, 64))),
    128: ((132, (64, 2, 4, 1, 64)), (264, (64, 1, 2, 2, 64))),
}
#: Columns of a head -> (most keys, shape of AttentionShort), for any number of tiles, and causal or with a window, too.
#: With one tile of keys, more CTAs have more bytes under way; longer sequences read theirs once for 128 queries.
SHORTER_SHAPES: dict[int, tuple[tuple[int, tuple[int, int, int, int, int]], ...]] = {
    64: ((64, (64, 1, 1, 5, 64)), (SHORT_KEYS // 2, (128, 1, 4, 2, 64))),
    128: ((64, (64, 1, 1, 4, 64)), (SHORT_KEYS // 2, (128, 1, 2, 2, 64))),
}


@dataclass(frozen=True)
class AttentionSm90(
    Forward,
    source="attention_sm90.cu",
    argument=arguments.attention_sm90(),
    needs="sm_90a",
    derived="sum tile_q stages queries mma_type mma_k",
):
    """Attention on Hopper's tensor cores; each of one to three warpgroups computes 64 queries at a time."""

    element: str
    element_o: str
    head_dim: int
    value_dim: int
    scores: int
    #: TMA writes the result
    store_tiles: bool
    consumers: int = host(2)
    tile_k: int = 128

    sum = "f32"

    @property
    def mma_type(self) -> str:
        """The name of the element in the wgmma instruction."""
        return self.element

    @property
    def mma_k(self) -> int:
        """How many elements an instruction takes along the columns of a head."""
        return 32 if self.fp8 else 16

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def tile_q(self) -> int:
        return 64 * self.consumers

    @property
    def ctas(self) -> int:
        """CTAs that run on a multiprocessor at the same time."""
        return 2 if self.consumers == 1 else 1

    @property
    def fp8(self) -> bool:
        return self.element == "e4m3"

    @property
    def stages(self) -> int:
        """Tiles of keys, and as many of values, in shared memory."""
        return 4 if max(self.head_dim, self.value_dim) <= 64 and self.consumers > 1 else 2

    @property
    def queries(self) -> int:
        """Tiles of queries in shared memory: as many as fit."""
        return 1 if max(self.head_dim, self.value_dim) > 192 else 2

    @property
    def slab_columns(self) -> int:
        """Columns of q and k in 128 bytes, which are copied together."""
        return 128 if self.fp8 else 64

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: tiles, bits of the mask, barriers."""
        q, out = -(-self.head_dim // self.slab_columns) * 128, -(-self.value_dim // 64) * 128
        v = self.value_dim if self.fp8 else out
        tiles = self.queries * self.tile_q * max(q, out) + self.stages * self.tile_k * (q + v)
        kept = self.tile_q * self.value_dim * 4 if self.fp8 and self.value_dim <= 128 else 0
        return tiles + self.stages * self.tile_q * self.tile_k // 8 + kept + 2048

    @property
    def rare(self) -> bool:
        results = ("f16", "f32") if self.fp8 else (self.element,)
        usual = self.head_dim == self.value_dim and self.element_o in results and self.scores == PLAIN
        return not usual or (not self.store_tiles and self.element_o != "f32")

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        sizes = (problem.head_dim, problem.value_dim)
        if problem.arch != "sm_90a" or not problem.reads or not all(0 < x <= DIMS[-1] for x in sizes):
            return False
        return problem.fp8 or (problem.dtype in (FLOAT16, BFLOAT16) and problem.acc == np.float32)

    @classmethod
    def best(cls, problem: Problem) -> AttentionSm90:
        out, sizes = element(problem.out_dtype), (problem.head_dim, problem.value_dim)
        if problem.fp8:
            D, D_v = (next(d for d in dims if d >= x) for dims, x in zip((_FP8_DIMS, DIMS), sizes, strict=True))
            tiles = problem.writes and out in ("f16", "bf16")
            return cls("e4m3", out, D, D_v, problem.scores, tiles, *_fp8_shape(problem, D, D_v))
        name, (D, D_v) = element(problem.dtype), (next(d for d in DIMS if d >= x) for x in sizes)
        tiles = problem.writes and name == out
        return cls(name, out, D, D_v, problem.scores, tiles, *_sm90_shape(problem, max(D, D_v)))

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[AttentionSm90]:
        for dtype, scores, tiles in itertools.product(_halves(dtypes), (PLAIN, SIGNED, CAPPED), (True, False)):
            for head_dim, value_dim in itertools.product(DIMS, DIMS):
                most = max(head_dim, value_dim)
                for out in (dtype,) if tiles else ("f16", "bf16", "f32"):
                    large = 3 if most <= 64 and scores == PLAIN and tiles else 2
                    shapes = ((2, 64),) if most > 128 else ((large, 128), (1, 64 if most > 64 else 128))
                    for shape in shapes:
                        yield cls(dtype, out, head_dim, value_dim, scores, tiles, *shape)
        if np.dtype(np.uint8) not in dtypes:
            return
        for scores, out in itertools.product((PLAIN, SIGNED, CAPPED), ("f16", "bf16", "f32")):
            for head_dim, value_dim in itertools.product(_FP8_DIMS, DIMS):
                most = max(head_dim, value_dim)
                few: tuple[tuple[int, int], ...] = ((1, 64),) if most <= 128 else ()
                wide = (3 if most <= 64 else 2), 64 if most > 128 else 128
                for tiles in (True, False) if out != "f32" else (False,):
                    for shape in (wide, *few):
                        yield cls("e4m3", out, head_dim, value_dim, scores, tiles, *shape)

    def layouts(self, call: AttentionCall) -> tuple[Layout | None, ...]:
        values = call.v if call.values is None else call.values
        of_values = layout_of(values, self.value_dim, self.tile_k) if self.fp8 else layout_of(values, self.tile_k)
        result = layout_of(call.out, 64) if self.store_tiles else None
        return layout_of(call.q, self.tile_q), layout_of(call.k, self.tile_k), of_values, result


@dataclass(frozen=True)
class AttentionGathered(AttentionSm90):
    """The same for masks of small blocks: tiles of 64 queries, and of 64 keys gathered from pieces that these see."""

    consumers: int = host(1)
    tile_k: int = 64
    #: keys of a piece, which is in one block: 16, 32 or 64
    piece: int = 16

    @property
    def entry_keys(self) -> int:
        return self.piece

    @property
    def rare(self) -> bool:
        return self.scores != PLAIN

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        usual = (
            problem.writes and problem.dtype == problem.out_dtype and max(problem.head_dim, problem.value_dim) <= 128
        )
        return problem.piece > 0 and usual and not problem.fp8 and AttentionSm90.serves(problem)

    @classmethod
    def best(cls, problem: Problem) -> AttentionGathered:
        name, D = element(problem.dtype), next(d for d in DIMS if d >= max(problem.head_dim, problem.value_dim))
        return cls(name, name, D, D, problem.scores, True, piece=problem.piece)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[AttentionGathered]:
        sizes = [D for D in DIMS if D <= 128]
        for dtype, D, how, piece in itertools.product(_halves(dtypes), sizes, (PLAIN, SIGNED, CAPPED), PIECES):
            yield cls(dtype, dtype, D, D, how, True, piece=piece)

    def layouts(self, call: AttentionCall) -> tuple[Layout | None, ...]:
        keys = (layout_of(x, self.piece) for x in (call.k, call.v))
        return layout_of(call.q, self.tile_q), *keys, layout_of(call.out, 64)


@dataclass(frozen=True)
class AttentionShort(
    Forward,
    source="attention_short_sm90.cu",
    argument=arguments.attention_sm90(),
    needs="sm_90a",
    derived="element_o sum value_dim scores mma_type mma_k",
):
    """Attention of short sequences on Hopper's tensor cores; a CTA computes one tile of queries."""

    element: str
    #: columns of queries, keys and values: 64 or 128
    head_dim: int
    #: queries of a CTA; a warpgroup has 64 of them and the tiles of keys of one of `shares`
    tile_q: int
    shares: int
    #: tiles of keys, and as many of values, in shared memory
    slots: int
    #: CTAs that run on a multiprocessor at the same time
    ctas: int
    #: keys of a tile
    tile_k: int

    scores, sum, mma_k = PLAIN, "f32", 16

    @property
    def mma_type(self) -> str:
        """The name of the element in the wgmma instruction."""
        return self.element

    @property
    def element_o(self) -> str:
        return self.element

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def threads(self) -> int:
        return 128 * self.row_groups * self.shares

    @property
    def row_groups(self) -> int:
        """Warpgroups along the queries of a tile."""
        return self.tile_q // 64

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: tiles and barriers."""
        copies = 2 * self.slots * self.tile_k * self.head_dim * 2
        handed = self.row_groups * (self.shares - 1) * 128 * (self.head_dim // 2 + 4) * 4
        return self.tile_q * self.head_dim * 2 + max(copies, handed) + 1024

    @property
    def rare(self) -> bool:
        return False

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        usual = problem.writes and problem.dtype == problem.out_dtype and problem.scores == PLAIN
        return AttentionSm90.serves(problem) and not problem.fp8 and usual and _short_shape(problem) is not None

    @classmethod
    def best(cls, problem: Problem) -> AttentionShort:
        shape = _short_shape(problem)
        assert shape is not None
        return cls(element(problem.dtype), next(d for d in DIMS if d >= problem.head_dim), *shape)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[AttentionShort]:
        for dtype, head_dim in itertools.product(_halves(dtypes), SHORT_SHAPES):
            tiles = (tile for _, tile in (*SHORT_SHAPES[head_dim], *SHORTER_SHAPES[head_dim]))
            yield from (cls(dtype, head_dim, *tile) for tile in dict.fromkeys(tiles))

    def grid(self, call: AttentionCall, tiles: int, card: Card) -> tuple[int, ...]:
        """CTAs find their tile by the place in the grid."""
        batches, heads = call.q.shape[:2]
        return (heads, batches, tiles) if call.right < call.k.shape[2] else (tiles, heads, batches)

    def layouts(self, call: AttentionCall) -> tuple[Layout | None, ...]:
        keys = (layout_of(x, self.tile_k) for x in (call.k, call.v))
        return layout_of(call.q, self.tile_q), *keys, None


@dataclass(frozen=True)
class AttentionValues(Kernel, source="attention_values.cu", argument=arguments.ATTENTION_VALUES, needs="sm_90a"):
    """Transposes values in fp8 for AttentionSm90, so that keys are contiguous; 128 keys by 64 columns at a time."""

    threads = 256

    @staticmethod
    def room(keys: int, sequences: int = 0) -> int:
        """Bytes for the keys of a column; sequences of different lengths have gaps between them."""
        return (-(-keys // 16) + sequences) * 16

    @staticmethod
    def grid(heads: int, room: int, columns: int) -> tuple[int, int]:
        return heads * -(-room // 128), -(-columns // 64)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[AttentionValues]:
        if np.dtype(np.uint8) in dtypes:
            yield cls()


def by_columns(v: Array, bounds: Array | None) -> Array:
    """Values in fp8, transposed so that keys are contiguous; the sequences between `bounds` have gaps between them."""
    kernel = AttentionValues()
    batches, heads, keys, columns = v.shape
    sequences = 0 if bounds is None else len(bounds) - 1
    room = kernel.room(keys, sequences)
    values = cupy.empty((batches, heads, columns, room), v.dtype)
    batch, head, row = v.strides[:3]
    packed = arguments.ATTENTION_VALUES.pack(
        v=v.data.ptr, to=values.data.ptr, bounds=0 if bounds is None else bounds.data.ptr, batch=batch, head=head,
        row=row, heads=heads, keys=keys, columns=columns, room=room, sequences=sequences,
    )  # fmt: skip
    run(kernel, kernel.grid(batches * heads, room, columns), (jit.argument(packed),), uses=(v, values, bounds))
    return values


def _halves(dtypes: Any) -> list[str]:
    return [element(dtype) for dtype in (FLOAT16, BFLOAT16) if dtype in dtypes]


def _short_shape(problem: Problem) -> tuple[int, int, int, int, int] | None:
    """The shape of AttentionShort, or None where nothing shorter than attention_sm90 was measured (bench/NOTES.md)."""
    heads = problem.rows // max(1, problem.queries)
    if not problem.alike or problem.head_dim != problem.value_dim:
        return None
    if max(heads, -(-problem.queries // 64)) > jit.MAX_GRID_YZ:
        return None
    if problem.keys <= SHORT_KEYS // 2:
        shorter = SHORTER_SHAPES.get(problem.head_dim, ())
        return next((shape for most, shape in shorter if problem.keys <= most), None)
    if not problem.full or problem.keys > SHORT_KEYS:
        return None
    tiles = heads * -(-problem.queries // 64)
    return next((shape for most, shape in SHORT_SHAPES.get(problem.head_dim, ()) if tiles <= most), None)


def _sm90_shape(problem: Problem, most: int) -> tuple[int, int]:
    """(warpgroups, keys of a tile) for heads of up to `most` columns.

    Two warpgroups keep the tensor cores busy at 128 columns. At 64 columns the exponentials take as long as the
    products, and three warpgroups overlap them better (594 against 485 TFLOP/s on an H200). One warpgroup, with two
    CTAs on a multiprocessor, is for masks of small blocks, for problems with too few large tiles, and for heads of 64
    columns with so few keys that the start of a tile dominates. Three warpgroups have enough registers only for PLAIN
    scores.
    """
    if most > 128:
        return 2, 64
    if problem.fine or problem.rows < _FEW_ROWS or (most <= 64 and problem.keys <= _FEW_KEYS):
        return 1, 64 if most > 64 else 128
    plain = problem.scores == PLAIN and problem.writes and problem.out_dtype == problem.dtype
    return (3 if most <= 64 and plain else 2), 128


def _fp8_shape(problem: Problem, head_dim: int, value_dim: int) -> tuple[int, int]:
    """(warpgroups, keys of a tile) for fp8."""
    most = max(head_dim, value_dim)
    if most > 128:
        return 2, 64
    if problem.fine or problem.rows < _FEW_ROWS:
        return 1, 64
    return (3 if most <= 64 else 2), 128
