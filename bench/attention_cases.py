"""The problems that bench/attention.py measures, their operands, and how far a result is from float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from harness import on_gpu

import bsrgemm as bg
from bsrgemm._benchmark import random_data
from bsrgemm._benchmark.attention_check import TOLERANCE, Reference, Seen
from bsrgemm._benchmark.timing import Call
from bsrgemm._kernels import forced_kernel

WINDOW = 2048


@dataclass(frozen=True)
class Target:
    """At least `least` times the rate of `of`: a peer, "best" of them, "float16" (ours), "cF" or "TFLOP/s"."""

    least: float
    of: str

    def reached(self, rate: float, others: dict[str, float | None]) -> bool | None:
        """Is it? None where there is nothing to compare with."""
        there = [x for name, x in others.items() if x is not None and name != "cF"]
        base = {"TFLOP/s": 1.0, "best": max(there, default=None)}.get(self.of, others.get(self.of))
        return None if base is None else rate >= self.least * base


@dataclass(frozen=True)
class Case:
    """One attention; `blocks` is (size, blocks in each block row, a pattern for each head or one for all)."""

    shape: tuple[int, int, int, int]
    causal: bool = False
    window: int | None = None
    blocks: tuple[int, int, bool] | None = None
    kv_heads: int | None = None
    dtype: str = "float16"
    targets: tuple[Target, ...] = ()
    peers: tuple[str, ...] = ("cuDNN", "FA4")
    #: run on this kernel, though another would be chosen
    kernel: str | None = None
    sustained: bool = False

    @property
    def name(self) -> str:
        if self.blocks is not None:
            size, each, per_head = self.blocks
            return f"{each} of {self.shape[2] // size} blocks {size}{' per head' if per_head else ''}"
        if self.window is not None:
            return f"causal window {self.window}"
        kind = "causal" if self.causal else "full"
        return f"{kind}, {self.kv_heads} KV heads" if self.kv_heads else kind

    def __str__(self) -> str:
        return f"{','.join(map(str, self.shape)):15} {self.kernel or self.name:26} {self.dtype:8}"

    @property
    def options(self) -> dict[str, Any]:
        """What `attention` and the peers are told, but for the mask."""
        if self.window is not None:
            return {"causal": True, "window": (self.window - 1, 0)}
        return {"causal": True} if self.causal else {}

    def mask(self) -> bg.BlockMask | None:
        if self.blocks is None:
            return None
        size, each, per_head = self.blocks
        heads = (1, self.shape[1] if per_head else 1)
        return bg.BlockMask.random(self.shape[2], per_row=each, heads=heads, block=size, device=device())

    def seen(self, mask: bg.BlockMask | None) -> Seen:
        """What each query may see, for the check."""
        return Seen(self.shape[1], self.causal, self.window, mask)

    def reference(self, q: Any, k: Any, v: Any, mask: bg.BlockMask | None = None, whole: bool = False) -> Reference:
        """What a few tiles of this case should be, or all of it."""
        return Reference.of(self.seen(mask), q, k, v, whole=whole)

    def pairs(self, mask: bg.BlockMask | None) -> int:
        """SpgemmSimt of query and key that are allowed, over all batches and heads."""
        B, H, S, _ = self.shape
        if mask is not None:
            return mask.allowed * B * H // (mask.heads[0] * mask.heads[1])
        W = min(S, self.window or S)
        return B * H * (S * W - W * (W - 1) // 2 if self.causal or self.window else S * S)

    def on_cpu(self) -> Case:
        """The same, much smaller."""
        B, H, S, D = self.shape
        S = min(512, S // 8)
        blocks = None
        if self.blocks is not None:  # of the same density
            size, each, per_head = self.blocks
            blocks = (16, max(1, size * each * S // 16 // self.shape[2]), per_head)
        return replace(
            self, shape=(min(B, 2), min(H, 4), S, D), window=self.window and 64, blocks=blocks,
            kv_heads=self.kv_heads and 1, peers=("NumPy",),
        )  # fmt: skip


LONG = (1, 16, 16384, 128)
DENSE_PEERS = ("cuDNN", "flash", "FA3", "FA4")
#: Cases with the same operands follow each other.
TABLE = [
    Case(LONG, targets=(Target(1.06, "FA4"), Target(1.14, "cF")), peers=("cuDNN", "flash", "FA3", "FA4", "Flex"),
         sustained=True),
    Case(LONG, causal=True, targets=(Target(1.09, "FA4"), Target(1.15, "cF"), Target(1.22, "cuDNN")), sustained=True),
    Case(LONG, window=WINDOW, targets=(Target(1.14, "FA4"), Target(1.05, "cF")), peers=("FA4", "Flex")),
    Case(LONG, blocks=(128, 26, True), targets=(Target(1.13, "FA4"), Target(1.13, "cF")), peers=("FA4", "Flex")),
    Case(LONG, blocks=(64, 51, False), targets=(Target(1.0, "cF"),), peers=()),
    Case(LONG, targets=(Target(0.50, "cF"),), kernel="AttentionSm80", peers=("flash",)),
    *(Case(LONG, c, dtype="e4m3", targets=(Target(1.4, "float16"),), peers=("float16",)) for c in (False, True)),
    Case((1, 8, 131072, 128), window=WINDOW, targets=(Target(1.13, "FA4"), Target(1.06, "cF")), peers=("FA4",)),
    Case((1, 7, 109632, 128), blocks=(64, 64, False), targets=(Target(560, "TFLOP/s"),), peers=()),
    *(Case((4, 16, 4096, 128), c, targets=(Target(1.08, "best"),), peers=DENSE_PEERS) for c in (False, True)),
    *(Case((16, 16, 1024, 128), c, targets=(Target(1.0, "best"),), peers=DENSE_PEERS) for c in (False, True)),
    *(Case((1, 32, 16384, 64), c, targets=(Target(1.05, "best"),), peers=DENSE_PEERS) for c in (False, True)),
    Case(LONG, causal=True, dtype="bfloat16", targets=(Target(1.22, "cuDNN"),), peers=("cuDNN",)),
    Case((1, 32, 8192, 128), causal=True, kv_heads=8, targets=(Target(1.0, "best"),), peers=("cuDNN", "flash")),
    *(Case((1, 16, 8192, D), causal=True, peers=("cuDNN", "flash")) for D in (80, 96, 192, 256)),
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
#: Of the blocks of 64 keys, so many are read by sparse decode.
DECODE_SHARE = 1 / 16


def normal(shape: tuple[int, ...], dtype: str) -> Any:
    return random_data.normal(shape, dtype, array_module())


def device() -> str:
    return "cuda" if on_gpu() else "cpu"


def array_module() -> Any:
    if not on_gpu():
        return np
    import cupy

    return cupy


def synchronize() -> None:
    if on_gpu():
        array_module().cuda.Device().synchronize()


@lru_cache(maxsize=1)
def operands(B: int, H: int, H_kv: int, S: int, D: int, dtype: str) -> tuple[Any, Any, Any]:
    """q, k and v, kept for the next case of the same shape."""
    return normal((B, H, S, D), dtype), normal((B, H_kv, S, D), dtype), normal((B, H_kv, S, D), dtype)


def case_operands(case: Case) -> tuple[Any, Any, Any]:
    B, H, S, D = case.shape
    return operands(B, H, case.kv_heads or H, S, D, case.dtype)


def attend(q: Any, k: Any, v: Any, mask: bg.BlockMask | None = None, **options: Any) -> Call:
    """Our attention as a call; bytes are fp8, with a result in float16."""
    fp8 = q.dtype == np.uint8
    out = array_module().empty(q.shape, np.float16 if fp8 else q.dtype)
    if fp8:
        options["q_scale"] = 1.0
    return lambda: bg.attention(q, k, v, mask=mask, out=out, **options)


@contextlib.contextmanager
def forced(kernel: str | None) -> Iterator[None]:
    """Inside this block attention runs on that kernel."""
    if kernel is None:
        yield
        return

    with forced_kernel.force_kernel(kernel):
        yield


def checked(call: Call, error: Callable[[Any], float], dtype: str) -> Call:
    """The call, if its result is right; ValueError otherwise."""
    off = error(call())
    if not off <= TOLERANCE[dtype]:
        raise ValueError(f"wrong result: off by {off:.1e}, allowed {TOLERANCE[dtype]:.1e}")
    return call
