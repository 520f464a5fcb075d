"""The gradients of attention on cards other than Hopper: on the tensor cores since Ampere, and on the CUDA cores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .._kernels import jit
from .._kernels.card import Card
from .._kernels.element_types import element
from .._kernels.kernel import Kernel, host
from .._kernels.launch import Chain, Launch
from . import arguments
from .backward_kernel import (
    OF_KEYS,
    OF_KEYS_AND_VALUES,
    OF_QUERIES,
    OF_VALUES,
    BackwardProblem,
    Gradients,
    Lists,
    places_of,
)  # fmt: skip
from .backward_sm90 import BackwardEnd, Rows, halves
from .call import BackwardCall
from .forward import CAPPED, DIMS, SIGNED, Places, address_writer, has_large_shared

#: Elements of the operands, of the gradient of the result, and the type of the sums, that the CUDA cores multiply.
_KINDS = (
    *(("f16", "f16", "f32"), ("f16", "f32", "f32"), ("bf16", "bf16", "f32"), ("bf16", "f32", "f32")),
    *(("f32", "f32", "f32"), ("f64", "f64", "f64")),
)


class Separate(Gradients):
    """A kernel that computes a part of the gradients: dq by queries, or dk and dv by keys."""

    def prepare(self, call: BackwardCall, card: Card) -> Chain:
        """A launch for the statistics, and then each part."""
        parts = self.parts()
        count, places = places_of(call, parts)
        statistics = {"statistics": (count, 0)}
        launches = [AttentionDelta.launch(call, {**places[0], **statistics}, card)]
        for part, where in zip(parts, places, strict=True):
            lists = Lists(call, part, card)
            template, grid = part.template(call, lists), part.grid(lists, card)
            launches.append(part.launch(call, template, grid, {**where, **statistics}, lists, lists.held))
        return Chain([launch.start for launch in launches], [((*call.q.shape[:3], 2), call.acc)])


@dataclass(frozen=True)
class BackwardSm80(
    Separate,
    source="attention_backward_sm80.cu",
    argument=arguments.backward("f32"),
    needs="sm_80",
    derived="element_o sum tile_q tile_k warps stages ctas",
):
    """Gradients by the matrix products of a warp (mma.sync) on Ampere and newer cards; a warp has 16 rows."""

    element: str
    head_dim: int
    value_dim: int
    scores: int
    role: int
    #: a CTA can have 163 KB of shared memory; otherwise it can have 99 KB
    large_shared: bool = host()

    sum, ordered = "f32", False

    @property
    def element_o(self) -> str:
        """The type of the gradient of the result."""
        return self.element

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
        return 2 if self.widest <= 64 else 1

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: rows, and for each stage columns, statistics and words of a mask."""
        width = 2 * (self.head_dim + self.value_dim)
        statistics = 8 * (2 if self.role == OF_QUERIES else self.columns)
        stage = self.columns * width + statistics + self.tile_q * self.tile_k // 8 + 8
        return _rounded(16 * self.warps * width) + self.stages * _rounded(stage) + 128

    def runs_on(self, arch: str) -> bool:
        return super().runs_on(arch) and self.large_shared == has_large_shared(arch)

    @classmethod
    def serves(cls, problem: BackwardProblem) -> bool:
        return problem.suits_tensor_cores

    @classmethod
    def best(cls, problem: BackwardProblem) -> BackwardSm80:
        name, large = element(problem.dtype), has_large_shared(problem.arch)
        return cls(name, *problem.padded_dims, problem.scores, OF_QUERIES, large)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[BackwardSm80]:
        for name, scores, large in itertools.product(halves(dtypes), (SIGNED, CAPPED), (True, False)):
            for dims in itertools.product(DIMS, DIMS):
                yield from cls(name, *dims, scores, OF_QUERIES, large).parts()

    def parts(self) -> tuple[BackwardSm80, ...]:
        """The sums of dk and dv do not fit 255 registers together beyond 128 columns."""
        keys = (OF_KEYS_AND_VALUES,) if self.widest <= 128 else (OF_KEYS, OF_VALUES)
        return tuple(replace(self, role=role) for role in (OF_QUERIES, *keys))

    def grid(self, lists: Lists, card: Card) -> tuple[int]:
        """A CTA has one tile."""
        return (min(lists.tiles * lists.heads, jit.MAX_GRID_X),)


@dataclass(frozen=True)
class BackwardSimt(Separate, source="attention_backward_simt.cu", argument=arguments.backward, derived="tile_q tile_k"):
    """Gradients on the CUDA cores for any head size, dtype and strides; one warp computes one query or one key."""

    element: str
    #: the type of the gradient of the result
    element_o: str
    sum: str
    head_dim: int
    value_dim: int
    scores: int
    role: int

    threads, ctas, shared_bytes = 256, 8, 0
    tile_q, tile_k = 64, 64
    ordered, reads_rows = False, False

    @property
    def rare(self) -> bool:
        return super().rare or self.element != self.element_o

    @classmethod
    def serves(cls, problem: BackwardProblem) -> bool:
        return True

    @classmethod
    def best(cls, problem: BackwardProblem) -> BackwardSimt:
        """A head has columns in multiples of 32."""
        head_dim, value_dim = (max(32, -(-x // 32) * 32) for x in (problem.head_dim, problem.value_dim))
        names = (element(problem.dtype), element(problem.dout_dtype), element(problem.acc))
        return cls(*names, head_dim, value_dim, problem.scores, OF_QUERIES)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[BackwardSimt]:
        """A few sizes only."""
        asked = set(map(element, dtypes))
        for names in (kind for kind in _KINDS if kind[0] in asked):
            for scores, width in itertools.product((SIGNED, CAPPED), (32, 64, 256)):
                yield from cls(*names, width, width, scores, OF_QUERIES).parts()

    def parts(self) -> tuple[BackwardSimt, ...]:
        return tuple(replace(self, role=role) for role in (OF_QUERIES, OF_KEYS_AND_VALUES))

    def grid(self, lists: Lists, card: Card) -> tuple[int]:
        """A CTA walks over several tiles."""
        return (min(lists.tiles * lists.heads, self.ctas * card.multiprocessors),)


@dataclass(frozen=True)
class BackwardFused(
    Rows,
    source="attention_backward_fused.cu",
    needs="sm_80",
    derived="element_o sum value_dim tile_q scores role warps",
):
    """Gradients by the matrix products of a warp in one pass, with sums of dq in any order; a warp has 32 keys."""

    element: str
    head_dim: int
    tile_k: int

    role, warps, threads, ctas = OF_KEYS_AND_VALUES, 8, 256, 1
    scores, ordered, claims = SIGNED, False, True

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: keys, weights and ds, two tiles of queries, descriptions."""
        rows = 4 * (self.tile_k + 2 * self.tile_q) * self.head_dim + 4 * self.tile_q * (self.tile_k + 2)
        return _rounded(rows + 2 * 16 + 76 + 8 * self.warps)

    def runs_on(self, arch: str) -> bool:
        return super().runs_on(arch) and has_large_shared(arch)

    @classmethod
    def serves(cls, problem: BackwardProblem) -> bool:
        return (
            problem.suits_tensor_cores
            and has_large_shared(problem.arch)
            and problem.padded_dims == (128, 128)
            and problem.scores == SIGNED
            and problem.has_few_heads
            and not problem.ordered
        )

    @classmethod
    def best(cls, problem: BackwardProblem) -> BackwardFused:
        return cls(element(problem.dtype), 128, 128)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[BackwardFused]:
        yield from (cls(name, 128, 128) for name in halves(dtypes))

    def last(self) -> BackwardEnd:
        return BackwardEnd(self.element, self.head_dim, self.tile_k, lines=True)


@dataclass(frozen=True)
class AttentionDelta(Kernel, source="attention_delta.cu", argument=arguments.ATTENTION_DELTA):
    """Prepares the gradients: one logarithm and one sum of ``dout * out`` for each query."""

    element_do: str
    element_o: str
    sum: str

    threads = 256

    @property
    def rare(self) -> bool:
        return self.element_do != self.element_o

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[AttentionDelta]:
        asked = set(map(element, dtypes))
        for name, dout, acc in (kind for kind in _KINDS if kind[1] in asked):
            yield from (cls(dout, out, acc) for out in dict.fromkeys((name, acc)))

    @staticmethod
    def grid(rows: int, multiprocessors: int) -> tuple[int]:
        return (max(1, min(-(-rows // 32), 16 * multiprocessors)),)

    @classmethod
    def launch(cls, call: BackwardCall, places: Places, card: Card) -> Launch:
        """What the kernels need of each query, as (batches, heads, queries, 2) where `statistics` are."""
        batches, heads, queries, columns = call.dout.shape
        out = call.dout if call.out is None else call.out
        steps = {
            f"{name}_{axis}": step // x.itemsize
            for name, x in (("dout", call.dout), ("out", out))
            for axis, step in zip(("batch", "head", "row", "column"), x.strides, strict=True)
        }
        names, struct = ("dout", "out", "lse", "dlse", "delta", "to"), arguments.ATTENTION_DELTA
        packed = struct.pack(
            **dict.fromkeys(names, 0), rows=batches * heads * queries, heads=heads, queries=queries, columns=columns,
            **steps,
        )  # fmt: skip
        kernel = cls(element(call.dout.dtype), element(out.dtype), element(call.acc))
        grid = cls.grid(batches * heads * queries, card.multiprocessors)
        places = {"out": places["dout"], **places, "to": places["statistics"]}
        return Launch(kernel, grid, packed, pointers=address_writer(struct, [names], places))


def _rounded(size: int) -> int:
    return -(-size // 128) * 128
