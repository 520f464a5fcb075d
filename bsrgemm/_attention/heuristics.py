"""From a problem of attention to the kernel that serves it: a pure function, testable anywhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._kernels.element_types import element, shared_kb, tensor_arch
from .._kernels.jit import KernelSpec
from ..dtypes import BFLOAT16, FLOAT16
from . import arguments

#: Head sizes that the kernels for tensor cores are compiled for; others are filled up with zeros.
_DIMS = (64, 80, 96, 128, 192, 256)
#: Of queries and keys in fp8: steps of 32 bytes.
_FP8_DIMS = (64, 96, 128, 192, 256)
#: How scores are made: scale > 0, any scale, softcap. As in cuda/attention.cuh.
PLAIN, SIGNED, CAPPED = range(3)
#: Of K and V, for the heads that are walked together: a part of the L2.
_SECTION_BYTES = 16 << 20
_LOG2_E = math.log2(math.e)
#: Queries that are fewer than half of the multiprocessors of the largest card times 128.
_FEW_ROWS = 66 * 128
_FEW_KEYS = 1024


@dataclass(frozen=True)
class Problem:
    """What decides the kernel."""

    arch: str
    dtype: np.dtype[Any]
    out_dtype: np.dtype[Any]
    acc: np.dtype[Any]
    head_dim: int
    value_dim: int
    scores: int
    #: the copy engine can read q, k and v, and write the result
    reads: bool
    writes: bool
    #: batches by heads by queries, and keys
    rows: int
    keys: int
    #: a mask of small blocks, few of which are there
    fine: bool = False
    #: operands are bytes of fp8
    fp8: bool = False


@dataclass(frozen=True)
class AttentionSm90:
    """Attention on Hopper's tensor cores, 64 queries for each of one to three warpgroups at a time."""

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
        """CTAs that share a multiprocessor."""
        return 2 if self.consumers == 1 else 1

    @property
    def fp8(self) -> bool:
        return self.dtype == "e4m3"

    @property
    def stages(self) -> int:
        """Tiles of keys, and of values, under way."""
        return 4 if max(self.head_dim, self.value_dim) <= 64 and self.consumers > 1 else 2

    @property
    def queries(self) -> int:
        """Tiles of queries under way: as many as fit."""
        return 1 if max(self.head_dim, self.value_dim) > 192 else 2

    @property
    def slab_columns(self) -> int:
        """Columns of q and k that are copied together: 128 bytes."""
        return 128 if self.fp8 else 64

    @property
    def shared_bytes(self) -> int:
        """The struct Shared of the kernel: tiles, bits of the mask, barriers."""
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
class AttentionValues:
    """Values of fp8 as AttentionSm90 wants them: keys side by side, 128 keys by 64 columns at a time."""

    dtype = "e4m3"
    threads = 256

    @staticmethod
    def room(keys: int, sequences: int = 0) -> int:
        """Bytes for the keys of a column, those of sequences of different lengths with gaps between them."""
        return (-(-keys // 16) + sequences) * 16

    @staticmethod
    def grid(heads: int, room: int, columns: int) -> tuple[int, int, int]:
        return heads, -(-room // 128), -(-columns // 64)

    def spec(self) -> KernelSpec:
        return KernelSpec("attention_values.cu", "attention_values", (), (arguments.ATTENTION_VALUES,))


@dataclass(frozen=True)
class AttentionSm80:
    """Attention by the matrix products of a warp, on Ampere and newer cards, 128 queries at a time."""

    dtype: str
    out: str
    head_dim: int
    value_dim: int
    scores: int
    #: a CTA can have 163 KB of shared memory; otherwise 99 KB
    roomy: bool

    tile_q = 128

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.value_dim)

    @property
    def warps(self) -> int:
        """4 of 32 queries; 8 of 16 where the sums of 32 need too many registers, or one CTA has the multiprocessor."""
        return 4 if self.widest <= (128 if self.roomy else 64) else 8

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_k(self) -> int:
        return 64 if self.roomy or self.widest <= 192 else 32

    @property
    def stages(self) -> int:
        """Tiles of keys or values in shared memory."""
        return 3 if self.roomy or self.widest <= 128 else 2

    @property
    def ctas(self) -> int:
        """Of a multiprocessor."""
        return 2 if self.warps == 4 else 1

    @property
    def from_registers(self) -> bool:
        """Are queries kept there? Beside the sums they may take 128 of a thread."""
        return (self.head_dim // 2 + self.value_dim) * 4 // self.warps <= 128

    @property
    def shared_bytes(self) -> int:
        """The struct Shared of the kernel: queries, keys and values, the tile."""
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
    """Attention on the plain cores: any head size, dtype and strides, a warp for each query."""

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


Attention = AttentionSm90 | AttentionSm80 | AttentionSimt


def forward(problem: Problem, wanted: str | None = None) -> Attention:
    """The kernel for a problem: the best one, or the one whose class is called `wanted` if that is one of attention.

    >>> half = np.dtype("float16")
    >>> problem = Problem("sm_90a", half, half, np.dtype("float32"), 80, 80, PLAIN, True, True, 10**5, 4096)
    >>> type(forward(problem)).__name__, type(forward(problem, "AttentionSm80")).__name__
    ('AttentionSm90', 'AttentionSm80')
    """
    for config in candidates(problem):
        if wanted is None or not wanted.startswith("Attention") or type(config).__name__ == wanted:
            return config
    raise ValueError(f"wanted {wanted}, which cannot serve {problem}")


def candidates(problem: Problem) -> Iterator[Attention]:
    """The kernels that can serve a problem, the best first."""
    dtype, out = "e4m3" if problem.fp8 else element(problem.dtype), element(problem.out_dtype)
    sizes = (problem.head_dim, problem.value_dim)
    fits = problem.reads and all(0 < x <= _DIMS[-1] for x in sizes)
    if fits and problem.fp8 and problem.arch == "sm_90a":
        D, D_v = (next(d for d in dims if d >= x) for dims, x in zip((_FP8_DIMS, _DIMS), sizes, strict=True))
        tiles = problem.writes and out in ("f16", "bf16")
        yield AttentionSm90("e4m3", out, D, D_v, problem.scores, tiles, *_fp8_shape(problem, D, D_v))
    if fits and problem.dtype in (FLOAT16, BFLOAT16) and problem.acc == np.float32:
        D, D_v = (next(d for d in _DIMS if d >= x) for x in sizes)
        if problem.arch == "sm_90a":
            tiles = problem.writes and dtype == out
            yield AttentionSm90(dtype, out, D, D_v, problem.scores, tiles, *_sm90_shape(problem, max(D, D_v)))
        if tensor_arch(problem.arch):
            yield AttentionSm80(dtype, out, D, D_v, problem.scores, roomy=_roomy(problem.arch))
    D, D_v = (max(32, -(-x // 32) * 32) for x in sizes)
    yield AttentionSimt(dtype, out, element(problem.acc), D, D_v, problem.scores)


def wants_copies(problem: Problem) -> bool:
    """Would the tensor cores take these bytes of fp8, if only their strides were others?"""
    fits = all(0 < x <= _DIMS[-1] for x in (problem.head_dim, problem.value_dim))
    return problem.fp8 and not problem.reads and fits and problem.arch == "sm_90a"


def _sm90_shape(problem: Problem, most: int) -> tuple[int, int]:
    """(warpgroups, keys of a tile) for heads of up to `most` columns.

    Two warpgroups fill the tensor cores at 128 columns; at 64 the exponentials take as long as the products, and three
    overlap them better (594 against 485 TFLOP/s on an H200). One, with two CTAs on a multiprocessor, is for masks of
    small blocks, for too few tiles of more, and for heads of 64 with so few keys that a tile hardly gets going. Three
    have registers for the plain way only.
    """
    if most > 128:
        return 2, 64
    if problem.fine or problem.rows < _FEW_ROWS or (most <= 64 and problem.keys <= _FEW_KEYS):
        return 1, 64 if most > 64 else 128
    plain = problem.scores == PLAIN and problem.writes and problem.out_dtype == problem.dtype
    return (3 if most <= 64 and plain else 2), 128


def _fp8_shape(problem: Problem, head_dim: int, value_dim: int) -> tuple[int, int]:
    """The same for fp8."""
    most = max(head_dim, value_dim)
    if most > 128:
        return 2, 64
    if problem.fine or problem.rows < _FEW_ROWS:
        return 1, 64
    return (3 if most <= 64 else 2), 128


def section(heads: int, group: int, keys: int, width: int) -> int:
    """Heads whose tiles are walked together: as many as share the L2 with their keys and values.

    >>> section(heads=16, group=1, keys=16384, width=2 * 256)
    2
    """
    return max(1, min(heads, _SECTION_BYTES * group // max(1, keys * width)))


def scores(scale: float, softcap: float | None, fp8: bool = False) -> tuple[int, float, float]:
    """How the scores are made, and the two factors that the kernel wants for it."""
    if softcap is not None:
        return CAPPED, 2 * scale * _LOG2_E / softcap, softcap * _LOG2_E
    factor = scale * _LOG2_E
    if fp8:  # the kernel knows the factors of heads, and keeps within bounds
        return (PLAIN if factor > 0 else SIGNED), factor, 0.0
    # A score that is hidden, the lowest float, must stay finite, and far below others, when it is scaled.
    return (PLAIN if 1e-30 < factor <= 1 else SIGNED), factor, 0.0


def every_config() -> Iterator[Attention | AttentionValues]:
    """All that `forward` can return, the plain kernel at a few sizes, and what goes before fp8."""
    yield AttentionValues()
    for dtype, how, tiles in itertools.product(("f16", "bf16"), (PLAIN, SIGNED, CAPPED), (True, False)):
        for head_dim, value_dim in itertools.product(_DIMS, _DIMS):
            most = max(head_dim, value_dim)
            for out in (dtype,) if tiles else ("f16", "bf16", "f32"):
                large = 3 if most <= 64 and how == PLAIN and tiles else 2
                shapes = ((2, 64),) if most > 128 else ((large, 128), (1, 64 if most > 64 else 128))
                for shape in shapes:
                    yield AttentionSm90(dtype, out, head_dim, value_dim, how, tiles, *shape)
    for how, out in itertools.product((PLAIN, SIGNED, CAPPED), ("f16", "bf16", "f32")):
        for head_dim, value_dim in itertools.product(_FP8_DIMS, _DIMS):
            most = max(head_dim, value_dim)
            few: tuple[tuple[int, int], ...] = ((1, 64),) if most <= 128 else ()
            wide = (3 if most <= 64 else 2), 64 if most > 128 else 128
            for tiles in (True, False) if out != "f32" else (False,):
                for shape in (wide, *few):
                    yield AttentionSm90("e4m3", out, head_dim, value_dim, how, tiles, *shape)
    for dtype, how, roomy in itertools.product(("f16", "bf16"), (PLAIN, SIGNED, CAPPED), (True, False)):
        for head_dim, value_dim, out in itertools.product(_DIMS, _DIMS, ("f16", "bf16", "f32")):
            yield AttentionSm80(dtype, out, head_dim, value_dim, how, roomy)
    for dtype, acc in (("f16", "f32"), ("bf16", "f32"), ("f32", "f32"), ("f64", "f64"), ("e4m3", "f32")):
        for how, width in itertools.product((PLAIN, SIGNED, CAPPED), (32, 64, 256)):
            yield AttentionSimt(dtype, "f32" if dtype == "e4m3" else dtype, acc, width, width, how)


def _roomy(arch: str) -> bool:
    """Has a CTA 163 KB? Blackwell has, but its compiler no registers for the tiles that go with it."""
    return shared_kb(arch) > 99 and arch in ("sm_80", "sm_87", "sm_90", "sm_90a")


def runs_on(config: Attention | AttentionValues, arch: str) -> bool:
    """Can this kernel be compiled for `arch`?"""
    if isinstance(config, AttentionSm80):
        return tensor_arch(arch) and config.roomy == _roomy(arch)
    return arch == "sm_90a" or not isinstance(config, AttentionSm90 | AttentionValues)


def skip_ahead_of_time(config: Attention | AttentionValues) -> bool:
    """Is this kernel met so rarely that compiling it ahead is a waste?"""
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
