"""The problems that bench/attention.py measures, their operands, and how far a result is from float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import attention_peers as peers
import numpy as np
import random_data
from attention_peers import Call
from harness import on_gpu
from random_data import widen

import bsrgemm as bg

#: Largest error of an element over max(1, its size). Rounding costs 5e-4 and 4e-3, rounding the weights as much again.
#: Weights of fp8 are rounded by up to a sixteenth, and where a query sees few keys nothing averages that out.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "e4m3": 2e-1}
#: Queries of a tile that is checked
CHECKED = 32
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

    def pairs(self, mask: bg.BlockMask | None) -> int:
        """Pairs of query and key that are allowed, over all batches and heads."""
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
DENSE_PEERS = ("cuDNN", "flash", "FA4")
#: Cases with the same operands follow each other.
TABLE = [
    Case(LONG, targets=(Target(1.06, "FA4"), Target(1.14, "cF")), peers=("cuDNN", "flash", "FA4", "Flex"),
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


@cache
def _generator() -> np.random.Generator:
    return np.random.default_rng(0)


def normal(shape: tuple[int, ...], dtype: str) -> Any:
    """Standard normal numbers."""
    if on_gpu():
        return random_data.normal(shape, dtype)
    return _generator().standard_normal(shape, np.float32).astype(np.dtype(dtype))


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
    from bsrgemm import tuned

    with tuned.only(kernel):
        yield


def seen_by(case: Case, mask: bg.BlockMask | None, b: int, h: int, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which keys some queries of one head may see, (rows, keys): made without bsrgemm's own masks of elements."""
    S = case.shape[2]
    key = np.arange(S)
    seen = np.ones((len(rows), S), bool)
    if case.causal or case.window is not None:
        seen &= key <= rows[:, None]
    if case.window is not None:
        seen &= key > rows[:, None] - case.window
    if mask is not None:
        (B, H), (bq, bk) = mask.heads, mask.block
        pattern = b % B * H + h // (case.shape[1] // H)
        first, indices = (x if isinstance(x, np.ndarray) else x.get() for x in (mask.indptr, mask.indices))
        for place, row in enumerate(pattern * -(-S // bq) + rows // bq):
            stored = np.zeros(-(-S // bk), bool)
            stored[indices[first[row] : first[row + 1]]] = True
            seen[place] &= stored[key // bk]
    return seen


def exact(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """softmax(q k^T / sqrt(D)) v in float64, for some queries of one head."""
    xp = array_module()
    scores = widen(q) @ widen(k).T / q.shape[-1] ** 0.5
    scores = xp.where(xp.asarray(seen), scores, -np.inf)
    weights = xp.exp(scores - xp.maximum(scores.max(axis=1, keepdims=True), np.finfo(np.float64).min))
    total = weights.sum(axis=1, keepdims=True)
    return weights @ widen(v) / xp.where(total == 0, 1, total)


def deviation(got: Any, want: Any) -> float:
    """Largest error of an element over max(1, its size). NaN if anything is."""
    xp = array_module()
    return float((xp.abs(widen(got) - want) / xp.maximum(xp.abs(want), 1)).max())


def checked_tiles(S: int) -> list[slice]:
    """Queries at both ends, and across the middle."""
    each = min(CHECKED, S)
    starts = sorted({0, max(0, S // 2 - each // 2), S - each})
    return [slice(start, start + each) for start in starts]


@dataclass
class Reference:
    """What a few tiles of a case should be, in float64, made once for ours and all peers."""

    tiles: list[slice]
    heads: list[tuple[int, int]]
    values: list[Any]

    @classmethod
    def of(cls, case: Case, q: Any, k: Any, v: Any, mask: bg.BlockMask | None) -> Reference:
        B, H, S, _ = case.shape
        group = H // k.shape[1]
        found = cls(checked_tiles(S), sorted({(0, 0), (B - 1, H - 1)}), [])
        rows = np.concatenate([np.arange(tile.start, tile.stop) for tile in found.tiles])
        for b, h in found.heads:
            seen = seen_by(case, mask, b, h, rows)
            found.values.append(exact(found.picked(q[b, h]), k[b, h // group], v[b, h // group], seen))
        return found

    def picked(self, x: Any) -> Any:
        """The rows of the tiles, in float64."""
        return array_module().concatenate([widen(x[tile]) for tile in self.tiles])

    def error(self, result: Any) -> float:
        got = peers.as_array(result)
        pairs = zip(self.heads, self.values, strict=True)
        return float(np.max([deviation(self.picked(got[b, h]), want) for (b, h), want in pairs]))


def checked(call: Call, error: Callable[[Any], float], dtype: str) -> Call:
    """The call, if its result is right; ValueError otherwise."""
    off = error(call())
    if not off <= TOLERANCE[dtype]:
        raise ValueError(f"wrong result: off by {off:.1e}, allowed {TOLERANCE[dtype]:.1e}")
    return call
