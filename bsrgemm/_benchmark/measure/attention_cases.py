"""The problems that bench/run/attention.py measures, with their peers and targets, and their operands."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

import bsrgemm as bg

from .. import internals, random_data
from ..cases.attentions import Attention
from ..runner import Bench
from ..timing import Call

WINDOW = 2048


@dataclass(frozen=True)
class Target:
    """At least `least` times the rate of `of`: a peer, "best" of them, "float16" (ours), "cF" or "TFLOP/s"."""

    least: float
    of: str

    def reached(self, rate: float, others: dict[str, float | None]) -> bool | None:
        """Whether the target is reached; None if there is nothing to compare with."""
        there = [x for name, x in others.items() if x is not None and name != "cF"]
        base = {"TFLOP/s": 1.0, "best": max(there, default=None)}.get(self.of, others.get(self.of))
        return None if base is None else rate >= self.least * base


@dataclass(frozen=True)
class Case:
    """One line of the table: a problem, its peers and its targets."""

    problem: Attention
    targets: tuple[Target, ...] = ()
    peers: tuple[str, ...] = ("cuDNN", "FA4")
    #: name of the kernel to use, even if the rules would choose another one
    kernel: str | None = None
    sustained: bool = False

    @property
    def name(self) -> str:
        """The mask in words."""
        problem = self.problem
        if problem.blocks is not None:
            return f"{problem.mask_name}{' per head' if problem.per_head else ''}"
        if problem.window is not None:
            return f"causal {problem.mask_name}"
        return f"{problem.mask_name}, {problem.kv_heads} KV heads" if problem.kv_heads else problem.mask_name

    def __str__(self) -> str:
        shape = ",".join(map(str, self.problem.shape))
        return f"{shape:15} {self.kernel or self.name:26} {self.problem.dtype:8}"

    def on_cpu(self) -> Case:
        """The same, much smaller."""
        problem = self.problem
        B, H, S, D = problem.shape
        S = min(512, S // 8)
        blocks = None
        if problem.blocks is not None:  # of the same density
            size, each = problem.blocks
            blocks = (16, max(1, size * each * S // 16 // problem.length))
        small = replace(
            problem, batch=min(B, 2), heads=min(H, 4), length=S, head_dim=D, window=problem.window and 64,
            blocks=blocks, kv_heads=problem.kv_heads and 1,
        )  # fmt: skip
        return replace(self, problem=small, peers=("NumPy",))


def attention(shape: tuple[int, int, int, int], causal: bool = False, **options: Any) -> Attention:
    """The problem of a shape."""
    return Attention(*shape, causal=causal, **options)


LONG = (1, 16, 16384, 128)
DENSE_PEERS = ("cuDNN", "flash", "FA3", "FA4")
#: Cases with the same operands follow each other.
TABLE = [
    Case(attention(LONG), (Target(1.06, "FA4"), Target(1.14, "cF")), ("cuDNN", "flash", "FA3", "FA4", "Flex"),
         sustained=True),
    Case(attention(LONG, True), (Target(1.09, "FA4"), Target(1.15, "cF"), Target(1.22, "cuDNN")), sustained=True),
    Case(attention(LONG, window=WINDOW), (Target(1.14, "FA4"), Target(1.05, "cF")), ("FA4", "Flex")),
    Case(attention(LONG, blocks=(128, 26), per_head=True), (Target(1.13, "FA4"), Target(1.13, "cF")),
         ("FA4", "cuDNN BSA", "Flex")),
    Case(attention(LONG, blocks=(64, 51)), (Target(1.0, "cF"),), ("cuDNN BSA",)),
    Case(attention(LONG), (Target(0.50, "cF"),), ("flash",), kernel="AttentionSm80"),
    *(Case(attention(LONG, c, dtype="e4m3"), (Target(1.4, "float16"),), ("float16",)) for c in (False, True)),
    Case(attention((1, 8, 131072, 128), window=WINDOW), (Target(1.13, "FA4"), Target(1.06, "cF")), ("FA4",)),
    Case(attention((1, 7, 109632, 128), blocks=(64, 64)), (Target(560, "TFLOP/s"),), ("cuDNN BSA",)),
    *(Case(attention((4, 16, 4096, 128), c), (Target(1.08, "best"),), DENSE_PEERS) for c in (False, True)),
    *(Case(attention((16, 16, 1024, 128), c), (Target(1.0, "best"),), DENSE_PEERS) for c in (False, True)),
    *(Case(attention((1, 32, 16384, 64), c), (Target(1.05, "best"),), DENSE_PEERS) for c in (False, True)),
    Case(attention(LONG, True, dtype="bfloat16"), (Target(1.22, "cuDNN"),), ("cuDNN", "FA4")),
    Case(attention((1, 32, 8192, 128), True, kv_heads=8), (Target(1.0, "best"),), ("cuDNN", "flash", "FA4")),
    *(Case(attention((1, 16, 8192, D), True), peers=("cuDNN", "flash")) for D in (80, 96, 192, 256)),
]  # fmt: skip
HEADLINE = TABLE[:6]
#: (heads, most microseconds per head), at length 512 and head dim 64
SMALL = [(8, 0.80), (16, None), (32, 0.25), (64, None), (96, 0.20), (128, 0.18)]
#: (sequences, length, tokens of a page)
DECODE = [
    (1, 8192, None), (1, 131072, None), (32, 8192, None),
    (1, 8192, 64), (1, 131072, 64), (32, 8192, 64),
]  # fmt: skip
#: Most microseconds, by (sequences, length); elsewhere cuDNN's time of the run is the bound.
DECODE_MOST = {(1, 8192): 10.0}
#: The share of the blocks of 64 keys that sparse decode reads.
DECODE_SHARE = 1 / 16


@lru_cache(maxsize=1)
def operands(bench_xp: Any, q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: str) -> tuple[Any, Any, Any]:
    """q, k and v, cached for the next case of the same shape."""
    q, k, v = (random_data.normal(shape, dtype, bench_xp) for shape in (q_shape, kv_shape, kv_shape))
    return q, k, v


def operands_of(bench: Bench, problem: Attention) -> tuple[Any, Any, Any]:
    """q, k and v of a problem."""
    return operands(bench.xp, problem.shape, problem.kv_shape, problem.dtype)


def attend(q: Any, k: Any, v: Any, mask: bg.BlockMask | None = None, **options: Any) -> Call:
    """Our attention as a call; bytes are fp8, with a result in float16."""
    fp8 = q.dtype == np.uint8
    out = random_data.module_of(q).empty(q.shape, np.float16 if fp8 else q.dtype)
    if fp8:
        options["q_scale"] = 1.0
    return partial(bg.attention, q, k, v, mask=mask, out=out, **options)


def forced(kernel: str | None) -> contextlib.AbstractContextManager[Any]:
    """Inside this block attention runs on that kernel."""
    return contextlib.nullcontext() if kernel is None else internals.force_kernel(kernel)
