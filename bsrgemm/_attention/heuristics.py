"""Which kernel serves a problem of attention, with which tile sizes. The functions are pure and need no GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._kernels.element_types import element, tensor_arch
from .._kernels.jit import KernelSpec
from ..dtypes import BFLOAT16, FLOAT16
from . import arguments

#: Head sizes for which the tensor core kernels are compiled; a smaller head is padded with zeros.
DIMS = (64, 80, 96, 128, 192, 256)
#: The same for queries and keys in fp8: multiples of 32 bytes.
_FP8_DIMS = (64, 96, 128, 192, 256)
#: How scores are computed: scale > 0, any scale, softcap. The values are those of cuda/common/attention.cuh.
PLAIN, SIGNED, CAPPED = range(3)
#: Bytes of K and V of the heads whose tiles are computed together, so that they stay in the L2.
_SECTION_BYTES = 16 << 20
_LOG2_E = math.log2(math.e)
#: Fewer rows of queries than this (66 tiles of 128) fill less than half of the multiprocessors of the largest card.
_FEW_ROWS = 66 * 128
_FEW_KEYS = 1024
#: Most keys for AttentionShort.
SHORT_KEYS = 512
#: Columns of a head -> (most tiles of 64 queries, shape of AttentionShort), for more than half of SHORT_KEYS. With one
#: tile for each of 132 multiprocessors, two warpgroups share the keys of a tile; then three CTAs run on each, for one
#: or two rounds; beyond that, a CTA has 128 queries, which read half as much from the L2.
SHORT_SHAPES: dict[int, tuple[tuple[int, tuple[int, int, int, int, int]], ...]] = {
    64: ((132, (1, 2, 4, 2, 64)), (792, (1, 1, 2, 3, 128)), (1056, (2, 1, 4, 2, 64))),
    128: ((132, (1, 2, 4, 1, 64)), (264, (1, 1, 2, 2, 64))),
}
#: The same for fewer keys and heads of 64 columns.
_SHORTER_SHAPES = ((264, (2, 1, 4, 2, 64)),)


@dataclass(frozen=True)
class Problem:
    """The properties of a problem that decide the kernel."""

    arch: str
    dtype: np.dtype[Any]
    out_dtype: np.dtype[Any]
    acc: np.dtype[Any]
    head_dim: int
    value_dim: int
    scores: int
    #: whether the copy engine can read q, k and v, and write the result
    reads: bool
    writes: bool
    #: batches times heads times queries, and keys
    rows: int
    keys: int
    #: a mask of small blocks of which few are stored
    fine: bool = False
    #: operands are bytes of fp8
    fp8: bool = False
    #: queries of a head
    queries: int = 0
    #: every query sees every key: there is no mask, no band, and all sequences have the same length
    full: bool = False


@dataclass(frozen=True)
class AttentionSm90:
    """Attention on Hopper's tensor cores; each of one to three warpgroups computes 64 queries at a time."""

    dtype: str
    out: str
    head_dim: int
    value_dim: int
    scores: int
    #: the copy engine writes the result
    tiles: bool
    consumers: int = 2
    tile_k: int = 128

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
        return self.dtype == "e4m3"

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

    def spec(self) -> KernelSpec:
        shape = (
            ("TILE_Q", self.tile_q),
            ("TILE_K", self.tile_k),
            ("SCORES", self.scores),
            ("STORE_TILES", int(self.tiles)),
            ("STAGES", self.stages),
            ("QUERIES", self.queries),
            ("MMA_TYPE", self.dtype),
            ("MMA_K", 32 if self.fp8 else 16),
        )
        layout = arguments.attention_sm90()
        return KernelSpec("attention_sm90.cu", "attention_sm90", (*_types(self, "f32"), *shape), (layout,))


@dataclass(frozen=True)
class AttentionShort:
    """Attention of short sequences on Hopper's tensor cores; a CTA computes one tile of queries."""

    dtype: str
    #: columns of queries, keys and values: 64 or 128
    head_dim: int
    #: a CTA has `row_groups` times 64 queries; a warpgroup has 64 of them and the tiles of keys of one of `shares`
    row_groups: int
    shares: int
    #: tiles of keys, and as many of values, in shared memory
    slots: int
    #: CTAs that run on a multiprocessor at the same time
    ctas: int
    #: keys of a tile
    tile_k: int

    scores = PLAIN
    tiles = False
    fp8 = False

    @property
    def out(self) -> str:
        return self.dtype

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def threads(self) -> int:
        return 128 * self.row_groups * self.shares

    @property
    def tile_q(self) -> int:
        return 64 * self.row_groups

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: tiles and barriers."""
        copies = 2 * self.slots * self.tile_k * self.head_dim * 2
        handed = self.row_groups * (self.shares - 1) * 128 * (self.head_dim // 2 + 4) * 4
        return self.tile_q * self.head_dim * 2 + max(copies, handed) + 1024

    def spec(self) -> KernelSpec:
        shape = (
            ("TILE_Q", self.tile_q),
            ("TILE_K", self.tile_k),
            ("SCORES", self.scores),
            ("SHARES", self.shares),
            ("SLOTS", self.slots),
            ("CTAS", self.ctas),
            ("MMA_TYPE", self.dtype),
            ("MMA_K", 16),
        )
        layout = arguments.attention_sm90()
        return KernelSpec("attention_short_sm90.cu", "attention_short_sm90", (*_types(self, "f32"), *shape), (layout,))


@dataclass(frozen=True)
class AttentionValues:
    """Transposes values in fp8 for AttentionSm90, so that keys are contiguous; 128 keys by 64 columns at a time."""

    dtype = "e4m3"
    threads = 256

    @staticmethod
    def room(keys: int, sequences: int = 0) -> int:
        """Bytes for the keys of a column; sequences of different lengths have gaps between them."""
        return (-(-keys // 16) + sequences) * 16

    @staticmethod
    def grid(heads: int, room: int, columns: int) -> tuple[int, int, int]:
        return heads, -(-room // 128), -(-columns // 64)

    def spec(self) -> KernelSpec:
        return KernelSpec("attention_values.cu", "attention_values", (), (arguments.ATTENTION_VALUES,))


@dataclass(frozen=True)
class AttentionSm80:
    """Attention by the matrix products of a warp (mma.sync) on Ampere and newer cards, 128 queries at a time."""

    dtype: str
    out: str
    head_dim: int
    value_dim: int
    scores: int
    #: a CTA can have 163 KB of shared memory; otherwise it can have 99 KB
    large_shared: bool

    tile_q = 128

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.value_dim)

    @property
    def warps(self) -> int:
        """4 warps of 32 queries; 8 of 16 where the sums of 32 take too many registers or only one CTA fits a
        multiprocessor.
        """
        return 4 if self.widest <= (128 if self.large_shared else 64) else 8

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_k(self) -> int:
        return 64 if self.large_shared or self.widest <= 192 else 32

    @property
    def stages(self) -> int:
        """Tiles of keys or values in shared memory."""
        return 3 if self.large_shared or self.widest <= 128 else 2

    @property
    def ctas(self) -> int:
        """CTAs that run on a multiprocessor at the same time."""
        return 2 if self.warps == 4 else 1

    @property
    def from_registers(self) -> bool:
        """Whether queries stay in registers: with the sums they may take 128 registers of a thread."""
        return (self.head_dim // 2 + self.value_dim) * 4 // self.warps <= 128

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: queries, keys and values, and the description of the tile."""
        return (self.tile_q + self.stages * self.tile_k) * self.widest * 2 + 768

    def spec(self) -> KernelSpec:
        shape = (
            ("TILE_Q", self.tile_q),
            ("TILE_K", self.tile_k),
            ("SCORES", self.scores),
            ("WARPS", self.warps),
            ("STAGES", self.stages),
            ("CTAS", self.ctas),
            ("Q_IN_REGISTERS", int(self.from_registers)),
        )
        layout = arguments.attention("f32")
        return KernelSpec("attention_sm80.cu", "attention_sm80", (*_types(self, "f32"), *shape), (layout,))


@dataclass(frozen=True)
class AttentionSimt:
    """Attention on the plain cores for any head size, dtype and strides; one warp computes one query."""

    dtype: str
    out: str
    acc: str
    head_dim: int
    value_dim: int
    scores: int

    threads = 256
    tile_q, tile_k = 128, 128
    shared_bytes = 0
    ctas = 8

    def spec(self) -> KernelSpec:
        shape = (("TILE_Q", self.tile_q), ("TILE_K", self.tile_k), ("SCORES", self.scores))
        layout = arguments.attention(self.acc)
        return KernelSpec("attention_simt.cu", "attention_simt", (*_types(self, self.acc), *shape), (layout,))


Attention = AttentionShort | AttentionSm90 | AttentionSm80 | AttentionSimt


def forward(problem: Problem, wanted: str | None = None) -> Attention:
    """The kernel for a problem: the best one, or the one whose class is named `wanted` if that is a class of attention.

    >>> half = np.dtype("float16")
    >>> problem = Problem("sm_90a", half, half, np.dtype("float32"), 80, 80, PLAIN, True, True, 10**5, 4096)
    >>> type(forward(problem)).__name__, type(forward(problem, "AttentionSm80")).__name__
    ('AttentionSm90', 'AttentionSm80')
    """
    for config in candidates(problem):
        if wanted is None or not wanted.startswith("Attention") or type(config).__name__ == wanted:
            return config
    raise ValueError(f"{wanted} cannot compute this attention: {problem}")


def candidates(problem: Problem) -> Iterator[Attention]:
    """The kernels that can serve a problem, the best first."""
    dtype, out = "e4m3" if problem.fp8 else element(problem.dtype), element(problem.out_dtype)
    sizes = (problem.head_dim, problem.value_dim)
    fits = problem.reads and all(0 < x <= DIMS[-1] for x in sizes)
    if fits and problem.fp8 and problem.arch == "sm_90a":
        D, D_v = (next(d for d in dims if d >= x) for dims, x in zip((_FP8_DIMS, DIMS), sizes, strict=True))
        tiles = problem.writes and out in ("f16", "bf16")
        yield AttentionSm90("e4m3", out, D, D_v, problem.scores, tiles, *_fp8_shape(problem, D, D_v))
    if fits and problem.dtype in (FLOAT16, BFLOAT16) and problem.acc == np.float32:
        D, D_v = (next(d for d in DIMS if d >= x) for x in sizes)
        if problem.arch == "sm_90a":
            tiles = problem.writes and dtype == out
            short = _short_shape(problem) if tiles and problem.scores == PLAIN else None
            if short is not None:
                yield AttentionShort(dtype, D, *short)
            yield AttentionSm90(dtype, out, D, D_v, problem.scores, tiles, *_sm90_shape(problem, max(D, D_v)))
        if tensor_arch(problem.arch):
            yield AttentionSm80(dtype, out, D, D_v, problem.scores, large_shared=has_large_shared(problem.arch))
    D, D_v = (max(32, -(-x // 32) * 32) for x in sizes)
    yield AttentionSimt(dtype, out, element(problem.acc), D, D_v, problem.scores)


def wants_copies(problem: Problem) -> bool:
    """Whether these fp8 operands could use the tensor cores after a copy to other strides."""
    fits = all(0 < x <= DIMS[-1] for x in (problem.head_dim, problem.value_dim))
    return problem.fp8 and not problem.reads and fits and problem.arch == "sm_90a"


def _short_shape(problem: Problem) -> tuple[int, int, int, int, int] | None:
    """The shape of AttentionShort, or None where nothing shorter than attention_sm90 was measured (bench/NOTES.md)."""
    if not problem.full or problem.head_dim != problem.value_dim or problem.keys > SHORT_KEYS:
        return None
    shapes = SHORT_SHAPES.get(problem.head_dim, ())
    if problem.keys <= SHORT_KEYS // 2:
        shapes = _SHORTER_SHAPES if problem.head_dim == 64 else ()
    tiles = problem.rows // max(1, problem.queries) * -(-problem.queries // 64)
    return next((shape for most, shape in shapes if tiles <= most), None)


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


def section(heads: int, group: int, keys: int, width: int) -> int:
    """Heads whose tiles are computed together: as many as fit the L2 with their keys and values.

    >>> section(heads=16, group=1, keys=16384, width=2 * 256)
    2
    """
    return max(1, min(heads, _SECTION_BYTES * group // max(1, keys * width)))


def scores(scale: float, softcap: float | None, fp8: bool = False) -> tuple[int, float, float]:
    """How the scores are computed (PLAIN, SIGNED or CAPPED), and the two factors that the kernel needs for it."""
    if softcap is not None:
        return CAPPED, 2 * scale * _LOG2_E / softcap, softcap * _LOG2_E
    factor = scale * _LOG2_E
    if fp8:  # the kernel applies the factors of heads and clamps the product
        return (PLAIN if factor > 0 else SIGNED), factor, 0.0
    # The score of a hidden key is the lowest float: after scaling it must stay finite, and far below all other scores.
    return (PLAIN if 1e-30 < factor <= 1 else SIGNED), factor, 0.0


def every_config() -> Iterator[Attention | AttentionValues]:
    """Every config that `forward` can return (AttentionSimt at a few sizes only), and AttentionValues."""
    yield AttentionValues()
    for dtype, (head_dim, short) in itertools.product(("f16", "bf16"), SHORT_SHAPES.items()):
        for _, tile in short:
            yield AttentionShort(dtype, head_dim, *tile)
    for dtype, scores, tiles in itertools.product(("f16", "bf16"), (PLAIN, SIGNED, CAPPED), (True, False)):
        for head_dim, value_dim in itertools.product(DIMS, DIMS):
            most = max(head_dim, value_dim)
            for out in (dtype,) if tiles else ("f16", "bf16", "f32"):
                large = 3 if most <= 64 and scores == PLAIN and tiles else 2
                shapes = ((2, 64),) if most > 128 else ((large, 128), (1, 64 if most > 64 else 128))
                for shape in shapes:
                    yield AttentionSm90(dtype, out, head_dim, value_dim, scores, tiles, *shape)
    for scores, out in itertools.product((PLAIN, SIGNED, CAPPED), ("f16", "bf16", "f32")):
        for head_dim, value_dim in itertools.product(_FP8_DIMS, DIMS):
            most = max(head_dim, value_dim)
            few: tuple[tuple[int, int], ...] = ((1, 64),) if most <= 128 else ()
            wide = (3 if most <= 64 else 2), 64 if most > 128 else 128
            for tiles in (True, False) if out != "f32" else (False,):
                for shape in (wide, *few):
                    yield AttentionSm90("e4m3", out, head_dim, value_dim, scores, tiles, *shape)
    for dtype, scores, large_shared in itertools.product(("f16", "bf16"), (PLAIN, SIGNED, CAPPED), (True, False)):
        for head_dim, value_dim, out in itertools.product(DIMS, DIMS, ("f16", "bf16", "f32")):
            yield AttentionSm80(dtype, out, head_dim, value_dim, scores, large_shared)
    for dtype, acc in (("f16", "f32"), ("bf16", "f32"), ("f32", "f32"), ("f64", "f64"), ("e4m3", "f32")):
        for scores, width in itertools.product((PLAIN, SIGNED, CAPPED), (32, 64, 256)):
            yield AttentionSimt(dtype, "f32" if dtype == "e4m3" else dtype, acc, width, width, scores)


def has_large_shared(arch: str) -> bool:
    """Whether a CTA has 163 KB. Blackwell has, but the compiler runs out of registers for the larger tiles there."""
    return arch in ("sm_80", "sm_87", "sm_90", "sm_90a")


def runs_on(config: Attention | AttentionValues, arch: str) -> bool:
    """Whether this kernel can be compiled for `arch`."""
    if isinstance(config, AttentionSm80):
        return tensor_arch(arch) and config.large_shared == has_large_shared(arch)
    return arch == "sm_90a" or not isinstance(config, AttentionShort | AttentionSm90 | AttentionValues)


def skip_ahead_of_time(config: Attention | AttentionValues) -> bool:
    """Whether this kernel is needed so rarely that it is not compiled ahead of time."""
    if isinstance(config, AttentionValues):
        return False
    results = ("f16", "f32") if config.dtype == "e4m3" else (config.dtype,)
    usual = config.head_dim == config.value_dim and config.out in results and config.scores == PLAIN
    return not usual or (isinstance(config, AttentionSm90) and not config.tiles and config.out != "f32")


def _types(config: Attention, acc: str) -> tuple[tuple[str, str | int], ...]:
    return (
        ("ELEMENT", config.dtype),
        ("ELEMENT_O", config.out),
        ("SUM", acc),
        ("HEAD_DIM", config.head_dim),
        ("VALUE_DIM", config.value_dim),
    )
