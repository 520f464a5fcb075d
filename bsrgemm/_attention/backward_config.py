"""Which kernel computes the gradients of attention, with which tile sizes. The functions are pure and need no GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._kernels.element_types import element, tensor_arch
from .._kernels.jit import MAX_GRID_YZ, KernelSpec
from ..dtypes import BFLOAT16, FLOAT16
from . import arguments
from .forward import CAPPED, DIMS, SIGNED, has_large_shared

#: What a launch computes: dq, dk and dv, dk alone, dv alone; as cuda/common/attention_backward.cuh numbers them.
OF_QUERIES, OF_KEYS_AND_VALUES, OF_KEYS, OF_VALUES = range(4)
#: The smallest softcap for the kernels for Hopper. They recover the slope of a score from the logarithm of its weight,
#: with an error of about 1e-6 / softcap.
LEAST_SOFTCAP = 0.5
#: Columns that the kernels for Hopper are compiled for.
WIDTHS = (64, 128, 192, 256)


@dataclass(frozen=True)
class BackwardProblem:
    """The properties of a problem that decide the kernel."""

    arch: str
    dtype: np.dtype[Any]
    dout_dtype: np.dtype[Any]
    acc: np.dtype[Any]
    head_dim: int
    value_dim: int
    #: SIGNED or CAPPED
    scores: int
    #: whether sums are made in one order
    ordered: bool = True
    #: query heads of all batches
    heads: int = 1
    #: whether a mask is sparse in blocks of 64 keys
    narrow: bool = False
    #: whether there is a softcap, and it is less than `LEAST_SOFTCAP`
    steep: bool = False


@dataclass(frozen=True)
class BackwardSm80:
    """Gradients by the matrix products of a warp (mma.sync) on Ampere and newer cards; a warp has 16 rows."""

    dtype: str
    head_dim: int
    value_dim: int
    scores: int
    #: a CTA can have 163 KB of shared memory; otherwise it can have 99 KB
    large_shared: bool
    role: int

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.value_dim)

    @property
    def warps(self) -> int:
        if self.widest <= 64 or self.widest > 192:
            return 4
        return 8 if self.widest <= 128 or self.large_shared else 4

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def columns(self) -> int:
        """Queries or keys that the rows of a CTA are combined with at a time."""
        few = self.widest > 128 or (self.widest > 64 and not self.large_shared)
        return 32 if few or self.scores == CAPPED else 64

    @property
    def tile_q(self) -> int:
        return 16 * self.warps if self.role == OF_QUERIES else self.columns

    @property
    def tile_k(self) -> int:
        return self.columns if self.role == OF_QUERIES else 16 * self.warps

    @property
    def stages(self) -> int:
        return 1 if self.widest > 192 and not self.large_shared else 2

    @property
    def ctas(self) -> int:
        """CTAs that run on a multiprocessor at the same time."""
        return 2 if self.widest <= 64 else 1

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: rows, and for each stage columns, statistics and words of a mask."""
        width = 2 * (self.head_dim + self.value_dim)
        statistics = 8 * (2 if self.role == OF_QUERIES else self.columns)
        stage = self.columns * width + statistics + self.tile_q * self.tile_k // 8 + 8
        return _rounded(16 * self.warps * width) + self.stages * _rounded(stage) + 128

    def spec(self) -> KernelSpec:
        shape = (("WARPS", self.warps), ("STAGES", self.stages), ("CTAS", self.ctas))
        layout = arguments.backward("f32")
        defines = (*_types(self, self.dtype, "f32"), *shape)
        return KernelSpec("attention_backward_sm80.cu", "attention_backward_sm80", defines, (layout,))


@dataclass(frozen=True)
class BackwardSimt:
    """Gradients on the plain cores for any head size, dtype and strides; one warp computes one query or one key."""

    dtype: str
    dout: str
    acc: str
    head_dim: int
    value_dim: int
    scores: int
    role: int

    threads = 256
    tile_q, tile_k = 64, 64
    shared_bytes = 0
    ctas = 8

    def spec(self) -> KernelSpec:
        layout = arguments.backward(self.acc)
        defines = _types(self, self.dout, self.acc)
        return KernelSpec("attention_backward_simt.cu", "attention_backward_simt", defines, (layout,))


@dataclass(frozen=True)
class _OnHopper:
    """What the kernels for Hopper share: tiles of queries by keys, and as many columns of all operands. The portable
    kernel in one pass has the same.
    """

    dtype: str
    head_dim: int
    #: keys of a tile: 128 or 64
    tile_k: int

    scores = SIGNED

    @property
    def tile_q(self) -> int:
        """With 64 columns a turn of 64 queries would be too short to hide what comes between its products."""
        return 128 if self.head_dim == 64 and self.tile_k == 128 else 64

    @property
    def pieces(self) -> int:
        """Pieces of 64 queries in a tile: the unit in which dq is added up."""
        return self.tile_q // 64

    @property
    def value_dim(self) -> int:
        return self.head_dim


@dataclass(frozen=True)
class BackwardSm90(_OnHopper):
    """Gradients on Hopper's tensor cores in one pass; `ordered` sums repeat bit by bit."""

    ordered: bool
    scores: int = SIGNED

    role = OF_KEYS_AND_VALUES

    @property
    def groups(self) -> int:
        """Warpgroups that multiply, with 64 keys each. A single one leaves room for a second CTA."""
        return self.tile_k // 64

    @property
    def threads(self) -> int:
        return 128 + 128 * self.groups

    @property
    def ctas(self) -> int:
        """CTAs that run on a multiprocessor at the same time."""
        return 3 - self.groups

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: tiles, statistics, bits of the mask, barriers, descriptions."""
        once = 2 * self.head_dim + 2 * self.tile_k + 4  # of a query, for each slot: dout, ds and a statistic
        row = 2 * (2 * self.head_dim + 4 + self.tile_k // 8) + self.groups * (once + 2 * self.head_dim)
        return 2 * self.tile_k * self.head_dim * 2 + self.tile_q * row + 3072

    def spec(self) -> KernelSpec:
        shape = (("ORDERED", int(self.ordered)), ("MMA_TYPE", self.dtype), ("MMA_K", 16))
        defines = (*_types(self, self.dtype, "f32"), *shape)
        layout = arguments.backward_sm90()
        return KernelSpec("attention_backward_sm90.cu", "attention_backward_sm90", defines, (layout,))


@dataclass(frozen=True)
class BackwardKeysSm90(_OnHopper):
    """dk and dv of wide heads on Hopper's tensor cores: a warpgroup has the sums of one of them."""

    scores: int = SIGNED

    role, threads, ctas = OF_KEYS_AND_VALUES, 384, 1

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: six tiles of 64 rows, the weights, and what is small."""
        return 6 * 64 * self.head_dim * 2 + 64 * 64 * 4 + 5120

    def spec(self) -> KernelSpec:
        shape = (("ORDERED", 0), ("MMA_TYPE", self.dtype), ("MMA_K", 16))
        defines = (*_types(self, self.dtype, "f32"), *shape)
        name = "attention_backward_keys_sm90"
        return KernelSpec(f"{name}.cu", name, defines, (arguments.backward_sm90(),))


@dataclass(frozen=True)
class BackwardQueriesSm90(_OnHopper):
    """dq of wide heads on Hopper's tensor cores: a warpgroup has 64 queries."""

    scores: int = SIGNED

    role, threads, ctas = OF_QUERIES, 384, 1

    @property
    def tile_q(self) -> int:
        return 128

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: 128 rows of q and dout, 128 keys, 64 values, and what is small."""
        return 7 * 64 * self.head_dim * 2 + 1024

    def spec(self) -> KernelSpec:
        shape = (("ORDERED", 0), ("MMA_TYPE", self.dtype), ("MMA_K", 16))
        defines = (*_types(self, self.dtype, "f32"), *shape)
        name = "attention_backward_queries_sm90"
        return KernelSpec(f"{name}.cu", name, defines, (arguments.backward_sm90(),))


@dataclass(frozen=True)
class BackwardFused(_OnHopper):
    """Gradients by the matrix products of a warp in one pass, with sums of dq in any order; a warp has 32 keys."""

    ordered = False
    role, warps, threads, ctas = OF_KEYS_AND_VALUES, 8, 256, 1

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: keys, weights and ds, two tiles of queries, descriptions."""
        rows = 4 * (self.tile_k + 2 * self.tile_q) * self.head_dim + 4 * self.tile_q * (self.tile_k + 2)
        return _rounded(rows + 2 * 16 + 76 + 8 * self.warps)

    def spec(self) -> KernelSpec:
        defines = (*_types(self, self.dtype, "f32"), ("WARPS", self.warps))
        layout = arguments.backward_rows()
        return KernelSpec("attention_backward_fused.cu", "attention_backward_fused", defines, (layout,))


@dataclass(frozen=True)
class BackwardBegin(_OnHopper):
    """Prepares BackwardSm90, BackwardFused, or BackwardKeysSm90 and BackwardQueriesSm90. `out` is the dtype of
    attention's result; if not `ordered`, the sums of dq are set to 0.
    """

    out: str
    ordered: bool

    role, threads = OF_QUERIES, 256

    def spec(self) -> KernelSpec:
        defines = (*_types(self, self.dtype, "f32"), ("ELEMENT_R", self.out), ("ORDERED", int(self.ordered)))
        layout = arguments.backward_rows()
        return KernelSpec("attention_backward_begin.cu", "attention_backward_begin", defines, (layout,))


@dataclass(frozen=True)
class BackwardEnd(_OnHopper):
    """Rounds the sums of BackwardSm90 to dq, or with `lines` those of BackwardFused.

    Rows that are not finite are computed again, for which the scores matter.
    """

    lines: bool = False
    scores: int = SIGNED

    role, threads = OF_QUERIES, 256

    def spec(self) -> KernelSpec:
        layout = arguments.backward_rows()
        defines = (*_types(self, self.dtype, "f32"), ("LINES", int(self.lines)))
        return KernelSpec("attention_backward_end.cu", "attention_backward_end", defines, (layout,))


@dataclass(frozen=True)
class TurnOrder:
    """Orders the entries of a mask by tiles of keys for BackwardSm90 in one order, so that few additions wait. The
    kernel is the same for both dtypes.
    """

    dtype: str

    threads = 256
    #: kMost and kWalkers of the kernel: tiles of queries of a pattern, and tiles of keys that are under way
    most, walkers = 2048, 512

    def spec(self) -> KernelSpec:
        return KernelSpec("turn_order.cu", "turn_order", (), (arguments.TURN_ORDER,))


@dataclass(frozen=True)
class AttentionDelta:
    """Prepares the gradients: one logarithm and one sum of ``dout * out`` for each query."""

    dtype: str
    out: str
    acc: str

    threads = 256

    @staticmethod
    def grid(rows: int, multiprocessors: int) -> tuple[int]:
        return (max(1, min(-(-rows // 32), 16 * multiprocessors)),)

    def spec(self) -> KernelSpec:
        defines = (("ELEMENT_DO", self.dtype), ("ELEMENT_O", self.out), ("SUM", self.acc))
        return KernelSpec("attention_delta.cu", "attention_delta", defines, (arguments.ATTENTION_DELTA,))


Backward = BackwardSm90 | BackwardKeysSm90 | BackwardQueriesSm90 | BackwardFused | BackwardSm80 | BackwardSimt
Config = Backward | BackwardBegin | BackwardEnd | TurnOrder | AttentionDelta


#: Tiles of keys that no kernel reaches: nothing is cut.
NOTHING_CUT = (2**31 - 1, 1)
#: The most shares of a tile of keys, and of all tiles for each CTA, which bounds the memory for their sums (128 KB
#: each); the fewest turns of one, and what a share costs beside its turns, in turns: K and V are copied again, and sums
#: pass through memory.
_MOST_SHARES, _MOST_OF_CTA, _LEAST_TURNS, _COST_OF_SHARE = 8, 4, 4, 4.0
#: The share of the estimated time below which tiles are cut.
_WORTHWHILE = 0.95


def cut(tiles: int, ctas: int, turns: float, longest: float = 1.0, of: int = 0) -> tuple[int, int]:
    """From which tile of keys on tiles are cut, and into how many shares, so that all CTAs end at about the same time.

    Tiles with as many turns each (`longest` is 1) go to CTAs in rounds: those of a last round that is not full are cut.
    If some are longer, these are claimed first in any order, so that CTAs end at about the same time unless tiles are
    few; then all are cut. In order they are claimed last, and as many as there are CTAs are cut.

    Parameters
    ----------
    tiles : int
        Tiles of keys of all heads, which `ctas` CTAs claim.
    turns : float
        Tiles of queries that see one of them, on average.
    longest : float
        The most turns of a tile, over the average.
    of : int
        If it is not 0, sums are made in order, and the number of shares divides it: query heads of a head of keys.

    Examples
    --------
    Of 2,048 tiles, 15 rounds of 132 leave 68; in sevenths they take four sevenths of a round.

    >>> cut(2048, 132, 256.0), cut(264, 132, 128.0) == NOTHING_CUT, cut(68, 132, 4.0) == NOTHING_CUT
    ((1980, 7), True, True)

    Causal, eight query heads to one of two heads of keys:

    >>> cut(64, 132, 256.0, 2.0), cut(64, 132, 256.0, 2.0, of=8), cut(64, 132, 256.0, 2.0, of=1) == NOTHING_CUT
    ((0, 5), (0, 8), True)
    """
    even = longest == 1
    rest = tiles % ctas if even else min(tiles, ctas) if of else tiles
    if not rest or (not even and not of and tiles >= 2 * ctas):
        return NOTHING_CUT
    most = min(_MOST_SHARES, int(turns / _LEAST_TURNS), _MOST_OF_CTA * ctas // rest)

    def rounds(shares: int) -> float:
        """Estimated time, in that of an average tile."""
        extra = _COST_OF_SHARE / turns if shares > 1 else 0.0
        if even:
            return -(-rest * shares // ctas) * (1 / shares + extra)
        # When the last CTA ends after the average one; in order, the longest tiles are claimed last. These factors fit
        # the times of the table of cuts in bench/NOTES.md.
        late = 0.1 + 0.6 * (longest - 1) if of else 0.2
        return max(longest / shares + extra, (tiles + rest * shares * extra) / ctas + late / shares)

    possible = [shares for shares in range(1, most + 1) if not of or of % shares == 0]
    best = min(possible, key=rounds, default=1)
    return (tiles - rest, best) if rounds(best) < _WORTHWHILE * rounds(1) else NOTHING_CUT


def candidates(problem: BackwardProblem) -> Iterator[tuple[Backward, ...]]:
    """The kernels that can compute the gradients, the best first; each as the launches that it takes."""
    dtype, sizes = element(problem.dtype), (problem.head_dim, problem.value_dim)
    narrow = problem.dtype in (FLOAT16, BFLOAT16) and problem.dout_dtype == problem.dtype
    if narrow and all(0 < x <= DIMS[-1] for x in sizes) and tensor_arch(problem.arch):
        D, D_v = (next(d for d in DIMS if d >= x) for x in sizes)
        large = has_large_shared(problem.arch)
        few = problem.heads <= MAX_GRID_YZ  # BackwardBegin has a row of its grid for each head
        if problem.arch == "sm_90a" and few and not problem.steep:
            width = next(width for width in WIDTHS if width >= max(D, D_v))
            if width > 128:
                shape = (dtype, width, 64, problem.scores)
                yield (BackwardKeysSm90(*shape), BackwardQueriesSm90(*shape))
            else:
                # A softcap takes registers, which 128 queries do not leave (see `_OnHopper.tile_q`).
                few_keys = problem.narrow or (width == 64 and problem.scores == CAPPED)
                yield (BackwardSm90(dtype, width, 64 if few_keys else 128, problem.ordered, problem.scores),)
        if large and D == D_v == 128 and problem.scores == SIGNED and few and not problem.ordered:
            yield (BackwardFused(dtype, 128, 128),)
        yield tuple(BackwardSm80(dtype, D, D_v, problem.scores, large, role) for role in _roles(max(D, D_v)))
    D, D_v = (max(32, -(-x // 32) * 32) for x in sizes)
    dout, acc = element(problem.dout_dtype), element(problem.acc)
    yield tuple(
        BackwardSimt(dtype, dout, acc, D, D_v, problem.scores, role) for role in (OF_QUERIES, OF_KEYS_AND_VALUES)
    )


def backward(problem: BackwardProblem, wanted: str | None = None) -> tuple[Backward, ...]:
    """The launches for a problem: those of the best kernel, or of the one whose class is named `wanted`.

    >>> half = np.dtype("float16")
    >>> problem = BackwardProblem("sm_90a", half, half, np.dtype("float32"), 128, 128, SIGNED)
    >>> [type(config).__name__ for config in backward(problem)]
    ['BackwardSm90']
    >>> [config.role for config in backward(problem, "BackwardSm80")]
    [0, 1]
    """
    for configs in candidates(problem):
        if wanted is None or not wanted.startswith("Backward") or type(configs[0]).__name__ == wanted:
            return configs
    raise ValueError(f"{wanted} cannot compute these gradients: {problem}")


def every_backward_config() -> Iterator[Config]:
    """Every config that `backward` can return (BackwardSimt at a few sizes only), and those that go with them."""
    for dtype, width in itertools.product(("f16", "bf16"), (x for x in WIDTHS if x > 128)):
        for scores in (SIGNED, CAPPED):
            yield BackwardKeysSm90(dtype, width, 64, scores)
            yield BackwardQueriesSm90(dtype, width, 64, scores)
        for out in (dtype, "f32"):
            yield BackwardBegin(dtype, width, 64, out, True)
    yield from (TurnOrder(dtype) for dtype in ("f16", "bf16"))
    narrow = [x for x in WIDTHS if x <= 128]
    for dtype, (width, tile_k) in itertools.product(("f16", "bf16"), itertools.product(narrow, (128, 64))):
        for scores in (SIGNED, CAPPED):
            if scores == SIGNED or (width, tile_k) != (64, 128):
                yield BackwardEnd(dtype, width, tile_k, scores=scores)
        for ordered in (True, False):
            for scores in (SIGNED, CAPPED):
                if scores == SIGNED or (width, tile_k) != (64, 128):
                    yield BackwardSm90(dtype, width, tile_k, ordered, scores)
            for out in (dtype, "f32"):
                yield BackwardBegin(dtype, width, tile_k, out, ordered)
    for dtype in ("f16", "bf16"):
        yield BackwardFused(dtype, 128, 128)
        yield BackwardEnd(dtype, 128, 128, lines=True)
    for dtype, scores, large in itertools.product(("f16", "bf16"), (SIGNED, CAPPED), (True, False)):
        for D, D_v in itertools.product(DIMS, DIMS):
            for role in _roles(max(D, D_v)):
                yield BackwardSm80(dtype, D, D_v, scores, large, role)
    kinds = (
        *(("f16", "f16", "f32"), ("f16", "f32", "f32"), ("bf16", "bf16", "f32"), ("bf16", "f32", "f32")),
        *(("f32", "f32", "f32"), ("f64", "f64", "f64")),
    )
    for dtype, dout, acc in kinds:
        for out in dict.fromkeys((dtype, acc)):
            yield AttentionDelta(dout, out, acc)
        for scores, width, role in itertools.product((SIGNED, CAPPED), (32, 64, 256), (OF_QUERIES, OF_KEYS_AND_VALUES)):
            yield BackwardSimt(dtype, dout, acc, width, width, scores, role)


def runs_on(config: Config, arch: str) -> bool:
    """Whether this kernel can be compiled for `arch`."""
    if isinstance(config, BackwardSm80):
        return tensor_arch(arch) and config.large_shared == has_large_shared(arch)
    if isinstance(config, BackwardFused) or _goes_with_fused(config):
        return tensor_arch(arch) and has_large_shared(arch)
    hopper = BackwardSm90 | BackwardKeysSm90 | BackwardQueriesSm90 | BackwardBegin | BackwardEnd | TurnOrder
    return arch == "sm_90a" or not isinstance(config, hopper)


def _goes_with_fused(config: Config) -> bool:
    """Whether BackwardFused is launched with this kernel."""
    if isinstance(config, BackwardBegin):
        return (config.head_dim, config.tile_k, config.ordered) == (128, 128, False)
    return isinstance(config, BackwardEnd) and config.lines


def skip_ahead_of_time(config: Config) -> bool:
    """Whether this kernel is needed so rarely that it is not compiled ahead of time."""
    if isinstance(config, AttentionDelta | BackwardBegin):
        return config.dtype != config.out
    if isinstance(config, TurnOrder):
        return False
    same = not isinstance(config, BackwardSimt) or config.dtype == config.dout
    return config.head_dim != config.value_dim or config.scores == CAPPED or not same


def _roles(widest: int) -> tuple[int, ...]:
    """The launches that take the place of one backward pass: the sums of dk and dv do not fit 255 registers together
    beyond 128 columns.
    """
    return (OF_QUERIES, OF_KEYS_AND_VALUES) if widest <= 128 else (OF_QUERIES, OF_KEYS, OF_VALUES)


def _rounded(size: int) -> int:
    return -(-size // 128) * 128


def _types(config: Backward | BackwardBegin | BackwardEnd, dout: str, acc: str) -> tuple[tuple[str, str | int], ...]:
    return (
        ("ELEMENT", config.dtype),
        ("ELEMENT_O", dout),
        ("SUM", acc),
        ("HEAD_DIM", config.head_dim),
        ("VALUE_DIM", config.value_dim),
        ("TILE_Q", config.tile_q),
        ("TILE_K", config.tile_k),
        ("SCORES", config.scores),
        ("ROLE", config.role),
    )


from .decode_config import _family

BACKWARD = _family(every_backward_config, runs_on, skip_ahead_of_time)
