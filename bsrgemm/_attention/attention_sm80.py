"""Attention on cards since Ampere by the matrix products of a warp, and on the CUDA cores of any card."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._kernels.card import tensor_arch
from .._kernels.element_types import element
from .._kernels.kernel import host
from ..dtypes import BFLOAT16, FLOAT16
from . import arguments
from .forward import CAPPED, DIMS, PLAIN, SIGNED, Forward, Problem, has_large_shared


@dataclass(frozen=True)
class AttentionSm80(
    Forward,
    source="attention_sm80.cu",
    argument=arguments.attention("f32"),
    needs="sm_80",
    derived="sum tile_q tile_k warps stages ctas q_in_registers",
):
    """Attention by the matrix products of a warp (mma.sync) on Ampere and newer cards, 128 queries at a time."""

    element: str
    element_o: str
    head_dim: int
    value_dim: int
    scores: int
    #: a CTA can have 163 KB of shared memory; otherwise it can have 99 KB
    large_shared: bool = host(False)

    tile_q, sum, cta_for_each_tile = 128, "f32", True

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
    def q_in_registers(self) -> bool:
        """Whether queries stay in registers: with the sums they may take 128 registers of a thread."""
        return (self.head_dim // 2 + self.value_dim) * 4 // self.warps <= 128

    @property
    def shared_bytes(self) -> int:
        """Size of the struct Shared of the kernel: queries, keys and values, and the description of the tile."""
        return (self.tile_q + self.stages * self.tile_k) * self.widest * 2 + 768

    @property
    def rare(self) -> bool:
        return self.head_dim != self.value_dim or self.element_o != self.element or self.scores != PLAIN

    def runs_on(self, arch: str) -> bool:
        return super().runs_on(arch) and self.large_shared == has_large_shared(arch)

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        fits = problem.reads and all(0 < x <= DIMS[-1] for x in (problem.head_dim, problem.value_dim))
        half = problem.dtype in (FLOAT16, BFLOAT16) and problem.acc == np.float32 and not problem.fp8
        return fits and half and tensor_arch(problem.arch)

    @classmethod
    def best(cls, problem: Problem) -> AttentionSm80:
        D, D_v = (next(d for d in DIMS if d >= x) for x in (problem.head_dim, problem.value_dim))
        names = element(problem.dtype), element(problem.out_dtype)
        return cls(*names, D, D_v, problem.scores, has_large_shared(problem.arch))

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[AttentionSm80]:
        halves = [element(dtype) for dtype in (FLOAT16, BFLOAT16) if dtype in dtypes]
        for dtype, scores, large_shared in itertools.product(halves, (PLAIN, SIGNED, CAPPED), (True, False)):
            for head_dim, value_dim, out in itertools.product(DIMS, DIMS, ("f16", "bf16", "f32")):
                yield cls(dtype, out, head_dim, value_dim, scores, large_shared)


@dataclass(frozen=True)
class AttentionSimt(
    Forward,
    source="attention_simt.cu",
    argument=arguments.attention,
    derived="tile_q tile_k",
):
    """Attention on the CUDA cores for any head size, dtype and strides; one warp computes one query."""

    element: str
    element_o: str
    sum: str
    head_dim: int
    value_dim: int
    scores: int

    threads = 256
    tile_q, tile_k = 128, 128
    shared_bytes = 0
    ctas = 8

    @property
    def acc(self) -> str:
        return self.sum

    @property
    def rare(self) -> bool:
        results = ("f16", "f32") if self.element == "e4m3" else (self.element,)
        return self.head_dim != self.value_dim or self.element_o not in results or self.scores != PLAIN

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        return True

    @classmethod
    def best(cls, problem: Problem) -> AttentionSimt:
        dtype = "e4m3" if problem.fp8 else element(problem.dtype)
        D, D_v = (max(32, -(-x // 32) * 32) for x in (problem.head_dim, problem.value_dim))
        return cls(dtype, element(problem.out_dtype), element(problem.acc), D, D_v, problem.scores)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[AttentionSimt]:
        """Those of a few sizes."""
        for dtype, acc in (("f16", "f32"), ("bf16", "f32"), ("f32", "f32"), ("f64", "f64"), ("e4m3", "f32")):
            if dtype in [*map(element, dtypes), *(["e4m3"] if np.dtype(np.uint8) in dtypes else [])]:
                for scores, width in itertools.product((PLAIN, SIGNED, CAPPED), (32, 64, 256)):
                    yield cls(dtype, "f32" if dtype == "e4m3" else dtype, acc, width, width, scores)
