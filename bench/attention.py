"""Masked attention, softmax(scale q k^T) v: how fast and how exact, beside the peers of attention_peers.py.

Rate = 4 * head dim * pairs of query and key that are allowed / time (so half of it for causal). Medians by CUDA events,
L2 flushed, 0.3 s of idling before each timing: a card throttles at its power limit and remembers what ran before. Ours
is timed before and after the peers, and the mean taken; cF is cuDNN without a mask at (1, 16, 16384, 128), timed in
between. A result is checked against float64 in a few tiles of queries before it is timed. Without a GPU the same runs
on the CPU, smaller, beside plain NumPy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import attention_peers as peers
import gemm
import numpy as np
from attention_peers import Call
from gemm import Row, mark, number, widen
from harness import Table, has_gpu, machine, time_cpu, time_gpu, time_sustained

import bsrgemm as bg

#: Seconds of idling before a timing, and of one measurement without it; slow calls are repeated less often.
IDLE, IDLE_QUICK, BUDGET = 0.3, 0.2, 0.1
#: Seconds back to back for a sustained rate
SUSTAINED = 0.5
#: Largest error of an element over max(1, its size). Rounding costs 5e-4 and 4e-3, rounding the weights as much again.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}
#: Queries of a tile that is checked
CHECKED = 32
WINDOW = 2048
PEERS: dict[str, Callable[..., Call]] = {
    "cuDNN": peers.cudnn,
    "flash": peers.flash,
    "FA4": peers.fa4,
    "Flex": peers.flex,
    "NumPy": peers.plain,
}


# ------------------------------------------------------------------------------------------ cases
@dataclass(frozen=True)
class Target:
    """At least `least` times the rate of `of`: a peer, "best" of them, "cF" or "TFLOP/s"."""

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


# ------------------------------------------------------------------------------------------- data
@cache
def on_gpu() -> bool:
    return has_gpu()


@cache
def _generator() -> np.random.Generator:
    return np.random.default_rng(0)


def normal(shape: tuple[int, ...], dtype: str) -> Any:
    """Standard normal numbers."""
    if on_gpu():
        return gemm.normal(shape, dtype)
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
    """Our attention as a call."""
    out = array_module().empty_like(q)
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


# ----------------------------------------------------------------------------------------- checks
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


# ------------------------------------------------------------------------------------------ bench
@dataclass
class Bench(gemm.Bench):
    """The options of a run, and what could not be measured."""

    flex: bool = False

    def seconds(self, call: Call) -> float:
        """Median seconds of a call."""
        if not on_gpu():
            return time_cpu(call, 3)
        once = time_sustained(call, seconds=0)
        repeats = 5 if self.quick else int(min(20, max(5, BUDGET / once)))
        return time_gpu(call, repeats, IDLE_QUICK if self.quick else IDLE)

    def wanted(self, names: Sequence[str]) -> list[str]:
        """The peers that this run asks, of those named."""
        if not self.with_peers:
            return []
        if not on_gpu():
            return ["NumPy"]
        return [name for name in names if name != "Flex" or self.flex]

    def cases(self, cases: Sequence[Case]) -> list[Case]:
        return list(cases) if on_gpu() else [case.on_cpu() for case in cases if case.kernel is None]

    def prepared(self, names: Sequence[str], where: str, make: Callable[[str], Call]) -> dict[str, Call]:
        """The calls of those peers that can be had."""
        made = {name: self.attempt(name, where, partial(make, name)) for name in self.wanted(names)}
        return {name: call for name, call in made.items() if call is not None}

    def interleaved(self, ours: Call, others: dict[str, Call], where: str) -> tuple[float, dict[str, float | None]]:
        """Seconds of ours, timed before and after the others, and theirs."""
        before = self.seconds(ours)
        times = {name: self.attempt(name, where, partial(self.seconds, call)) for name, call in others.items()}
        return ((before + self.seconds(ours)) / 2 if times else before), times

    def explain(self, table: Table) -> None:
        # Square brackets would be taken for markup.
        cleaned = {key.translate({91: "(", 93: ")"}): cases for key, cases in self.missing.items()}
        self.missing.clear()
        self.missing.update(cleaned)
        super().explain(table)


def verified(
    bench: Bench, table: Table, label: str, call: Call, error: Callable[[Any], float], dtype: str = "float16"
) -> bool:
    """Is a result of ours there and right? If not, its line says so."""
    off = bench.attempt("bsrgemm", label, lambda: error(call()))
    if off is None:
        table.add(f"{label} | -", what=label.strip(), failed=True)
    elif not off <= TOLERANCE[dtype]:
        table.add(f"{label} | WRONG: off by {off:.1e}", what=label.strip(), wrong=True, deviation=off)
    return off is not None and off <= TOLERANCE[dtype]


#: Memory that is taken during a capture goes back to the pool of its stream, which must not die before the graph.
_streams: list[Any] = []


def graphed(call: Call) -> Call:
    """Our call as the replay of a CUDA graph on the current stream; itself on the CPU."""
    if not on_gpu():
        return call
    import cupy

    call()
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        result = call()
        stream.synchronize()
        stream.begin_capture()
        try:
            call()
        finally:
            graph = stream.end_capture()

    def replay() -> Any:
        graph.launch()
        return result

    _streams.append(stream)
    return replay


def compile_ahead(bench: Bench, table: Table, sections: Sequence[str]) -> None:
    """Meet each kind of problem once, side by side, so that their kernels are compiled at the same time."""
    few = (1, 2, 256, 128)
    cases = {
        "table": [case for case in bench.some(TABLE, HEADLINE) if case.kernel is None],
        "small": [Case((1, H, 512, 64)) for H, _ in SMALL],
        "long": [Case(LONG), Case(LONG, window=WINDOW), Case(LONG, blocks=(128, 6, False))],
        "density": [Case(LONG), Case(LONG, blocks=(128, 6, False))],
        "accuracy": [Case(LONG), Case(LONG, dtype="bfloat16")],
        "host": [Case(few), Case(few, blocks=(128, 1, False)), Case(few, blocks=(64, 2, False))],
    }

    def meet(case: Case) -> None:
        (B, H, S, D), dtype = case.shape, gemm.ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype
        kv = (B, case.kv_heads or H, S, D)
        q, k, v = (array_module().zeros(shape, dtype) for shape in (case.shape, kv, kv))
        attend(q, k, v, case.mask(), **case.options)()

    def meet_decode() -> None:
        q, k = (array_module().zeros((1, *rest, 128), np.float16) for rest in ((32, 1), (8, 8192)))
        bg.attention_decode(q, filled_cache(k, k, None))

    start = time.perf_counter()
    table.progress("compiling")
    with ThreadPoolExecutor(8) as pool:
        wanted = dict.fromkeys(case for name in sections for case in cases.get(name, ()))
        calls = {str(case): partial(meet, case) for case in wanted}
        if {"decode", "host"} & set(sections):
            calls["decode"] = meet_decode
        for where, future in [(where, pool.submit(call)) for where, call in calls.items()]:
            bench.attempt("bsrgemm", where, future.result)
    synchronize()
    table.note(f"kernels ready after {time.perf_counter() - start:.1f} s")


# ------------------------------------------------------------------------------------------ table
@cache
def _full_cudnn() -> Call:
    """cuDNN without a mask, on operands of its own."""
    q, k, v = (normal(LONG, "float16") for _ in range(3))
    call = peers.cudnn(q, k, v)
    return checked(call, Reference.of(Case(LONG), q, k, v, None).error, "float16")


def case_row(bench: Bench, case: Case) -> Row:
    """Measure one case: ours, the peers, ours."""
    q, k, v = case_operands(case)
    mask = case.mask()
    flops = 4.0 * case.shape[3] * case.pairs(mask)
    row: Row = {
        "shape": case.shape, "mask": case.name, "dtype": case.dtype, "kernel": case.kernel, "flops": flops,
        "seconds": None, "tflops": None, "peers": {}, "sustained": {}, "targets": [], "wrong": False,
    }  # fmt: skip
    where = str(case)
    with forced(case.kernel):
        call = attend(q, k, v, mask, **case.options)
        result = bench.attempt("bsrgemm", where, call)
        if result is None:
            return row
        reference = Reference.of(case, q, k, v, mask)
        row["deviation"] = reference.error(result)
        if not row["deviation"] <= TOLERANCE[case.dtype]:
            return row | {"wrong": True}

        def make(name: str) -> Call:
            if name == "cF":
                return _full_cudnn()
            options = {**case.options, "mask": mask} if mask is not None else case.options
            return checked(PEERS[name](q, k, v, **options), reference.error, case.dtype)

        names = [*case.peers, *(["cF"] if on_gpu() and any(t.of == "cF" for t in case.targets) else [])]
        others = bench.prepared(names, where, make)
        row["seconds"], times = bench.interleaved(call, others, where)
        if case.sustained and on_gpu() and not bench.quick:
            for name, each in {"bsrgemm": call, **others}.items():
                if name != "cF":
                    row["sustained"][name] = flops / time_sustained(each, SUSTAINED) / 1e12
            time.sleep(SUSTAINED)  # the next case is not to feel it
    row["tflops"] = flops / row["seconds"] / 1e12
    full = 4.0 * LONG[0] * LONG[1] * LONG[2] ** 2 * LONG[3]
    row["peers"] = {
        name: None if seconds is None else (full if name == "cF" else flops) / seconds / 1e12
        for name, seconds in times.items()
    }
    if on_gpu():
        found = [(t.least, t.of, t.reached(row["tflops"], row["peers"])) for t in case.targets]
        row["targets"] = [{"least": a, "of": b, "reached": c} for a, b, c in found]
    return row


def case_text(case: Case, row: Row) -> str:
    """One line for one case."""
    if row["wrong"]:
        return f"{case} | WRONG: off by {row['deviation']:.1e}"
    if row["seconds"] is None:
        return f"{case} | -"
    best = max((x for name, x in row["peers"].items() if x is not None and name != "cF"), default=None)
    digits = 0 if on_gpu() else 4
    shown = ("cuDNN", "flash", "FA4", "cF") if on_gpu() else ("NumPy",)
    line = (
        f"{case} | {row['seconds'] * 1e3:8.3f} {row['tflops']:6.{digits}f} | "
        f"{' '.join(number(row['peers'].get(name), 6, digits) for name in shown)} | "
        f"{number(best and row['tflops'] / best, 5, 2)}"
    )
    if row["peers"].get("Flex"):
        line += f" | Flex {row['peers']['Flex']:.0f}"
    if row["sustained"]:
        line += " | sustained " + ", ".join(f"{name} {x:.0f}" for name, x in row["sustained"].items())
    met = [f"{t['least']:g} {t['of']} {mark(t['reached'])}" for t in row["targets"] if t["reached"] is not None]
    return f"{line} | {', '.join(met)}" if met else line


def section_table(bench: Bench, table: Table) -> None:
    """The table of targets: shapes, masks, head dims, dtypes."""
    cases = bench.cases(bench.some(TABLE, HEADLINE))
    columns = " cuDNN  flash    FA4     cF" if on_gpu() else " NumPy"
    table.note(f"{'B,H,S,D':15} {'mask':26} {'dtype':8} | {'ms':>8} TFLOPS | {columns} | ratio to the best | targets")
    for place, case in enumerate(cases, 1):
        table.progress(f"{place} of {len(cases)}: {case}")
        row = bench.attempt("bench", str(case), partial(case_row, bench, case))
        if row is None:
            table.note(f"{case} | -")
        else:
            table.add(case_text(case, row), **row)


# ------------------------------------------------------------------------------------------ small
def microseconds(call: Call, bench: Bench) -> tuple[float, float | None]:
    """Of a call with the L2 flushed, and back to back."""
    cold = bench.seconds(call)
    return cold * 1e6, time_sustained(call, 0.02) * 1e6 if on_gpu() else None


def section_small(bench: Bench, table: Table) -> None:
    """Many small heads: microseconds per head by replays of a CUDA graph, L2 flushed / back to back."""
    D, S = 64, 512 if on_gpu() else 64
    table.note(f"(1, H, {S}, {D}), full | microseconds per head, L2 flushed / back to back")
    for H, most in bench.some(SMALL, [SMALL[0], SMALL[-1]]):
        case, label = Case((1, H, S, D)), f"H {H:4}"
        table.progress(label)
        q, k, v = case_operands(case)
        reference = Reference.of(case, q, k, v, None)
        call = bench.attempt("bsrgemm", label, partial(graphed, attend(q, k, v)))
        if call is None or not verified(bench, table, label, call, reference.error):
            continue

        def make(name: str, q: Any = q, k: Any = k, v: Any = v, reference: Reference = reference) -> Call:
            made = PEERS[name](q, k, v)
            return checked(made if name == "NumPy" else peers.graphed(made), reference.error, "float16")

        others = bench.prepared(DENSE_PEERS, label, make)
        first = microseconds(call, bench)
        times = {name: bench.attempt(name, label, partial(microseconds, x, bench)) for name, x in others.items()}
        again = microseconds(call, bench) if others else first
        ours = [None if a is None or b is None else (a + b) / 2 / H for a, b in zip(first, again, strict=True)]
        theirs = {name: [x and x / H for x in pair] for name, pair in times.items() if pair is not None}
        reached = None if most is None or not on_gpu() or ours[0] is None else ours[0] <= most
        text = " | ".join(f"{name} {number(a, 6, 3)} / {number(b, 6, 3)}" for name, (a, b) in theirs.items())
        bound = "" if reached is None else f" | bound {most:.2f} {mark(reached)}"
        table.add(
            f"{label} | {number(ours[0], 6, 3)} / {number(ours[1], 6, 3)} | {text}{bound}",
            heads=H, length=S, head_dim=D, us_per_head=ours[0], us_per_head_back_to_back=ours[1], peers=theirs,
            bound=most, reached=reached,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------- decode
def filled_cache(k: Any, v: Any, page: int | None) -> bg.KVCache:
    """A cache with these keys and values."""
    B, H, S, D = k.shape
    store = bg.KVCache(B, H, S, D, dtype=k.dtype, page=page, device=device())
    store.append(k, v)
    return store


def chosen_blocks(heads: int, count: int, kept: int) -> np.ndarray[Any, Any]:
    """The blocks that each head reads, (1, heads, kept), sorted."""
    rng = np.random.default_rng(0)
    return np.stack([np.sort(rng.permutation(count)[:kept]) for _ in range(heads)])[None].astype(np.int32)


def decode_error(q: Any, k: Any, v: Any, blocks: Any, size: int, result: Any) -> float:
    """The error in the first and the last head."""
    got, (B, H, _, _), group = peers.as_array(result), q.shape, q.shape[1] // k.shape[1]
    off = []
    for b, h in ((0, 0), (B - 1, H - 1)):
        key = np.arange(k.shape[2])
        seen = np.ones(len(key), bool) if blocks is None else np.isin(key // size, blocks[0, h // group])
        want = exact(q[b, h], k[b, h // group], v[b, h // group], seen[None])
        off.append(deviation(got.reshape(q.shape)[b, h], want))
    return float(np.max(off))


def decode_peers(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Call]]:
    """The peers for one query: as it is, and with the query heads of a group as queries of one head."""
    B, H, _, D = q.shape
    if not on_gpu():
        return {"NumPy": lambda: peers.plain(q, k, v)}
    folded = q.reshape(B, k.shape[1], H // k.shape[1], D)
    return {
        "cuDNN": lambda: peers.graphed(peers.cudnn(q, k, v)),
        "cuDNN folded": lambda: peers.graphed(peers.cudnn(folded, k, v)),
        "flash": lambda: peers.graphed(peers.flash(q, k, v)),
    }


def section_decode(bench: Bench, table: Table) -> None:
    """One query token on a KV cache: replays of a CUDA graph, in one piece, in pages, and a few blocks alone."""
    H, H_kv, D, size = 32, 8, 128, 64
    problems = bench.some(DECODE, DECODE[:4])
    if not on_gpu():
        problems = [(B, 512, page) for B in (1, 2) for page in (None, 64)]
    table.note("B, keys, page: 32 heads on 8 | us, L2 flushed / back to back | TB/s of K and V | peers")
    best: dict[tuple[int, int], float] = {}
    for B, S, page in problems:
        label = f"{B:3} {S:7} {page or '-':>4}        "
        table.progress(label)
        q, (k, v) = normal((B, H, 1, D), "float16"), operands(B, H_kv, H_kv, S, D, "float16")[1:]
        store, out = filled_cache(k, v, page), array_module().empty_like(q)
        dense = partial(bg.attention_decode, q, store, out=out)
        call = bench.attempt("bsrgemm", label, partial(graphed, dense))
        if call is None or not verified(bench, table, label, call, partial(decode_error, q, k, v, None, size)):
            continue
        makers = decode_peers(q, k, v) if page is None and bench.with_peers else {}
        others = {}
        for name, maker in makers.items():

            def make(maker: Callable[[], Call] = maker, q: Any = q, k: Any = k, v: Any = v) -> Call:
                return checked(maker(), partial(decode_error, q, k, v, None, size), "float16")

            others[name] = bench.attempt(name, label, make)
        there = {name: x for name, x in others.items() if x is not None}
        seconds, times = bench.interleaved(call, there, label)
        warm = time_sustained(call, 0.02) * 1e6 if on_gpu() else None
        good = [x for x in times.values() if x is not None]
        if good:
            best[B, S] = min(good) * 1e6
        us, bound = seconds * 1e6, DECODE_MOST.get((B, S), best.get((B, S)))
        reached = None if bound is None or not on_gpu() else us <= bound
        rate = (k.nbytes + v.nbytes) / seconds / 1e12
        text = " ".join(f"{name} {number(x and x * 1e6, 7)}" for name, x in times.items())
        limit = "" if reached is None else f" | bound {bound:.1f} {mark(reached)}"
        table.add(
            f"{label} | {us:8.1f} / {number(warm, 8)} | {rate:6.3f} | {text}{limit}",
            batch=B, keys=S, page=page, us=us, us_back_to_back=warm, tb_per_second=rate,
            peers={name: x and x * 1e6 for name, x in times.items()}, bound=bound, reached=reached,
        )  # fmt: skip
        if S < 131072 and on_gpu():
            continue
        count = S // size
        blocks = chosen_blocks(H_kv, count, max(1, round(count * DECODE_SHARE)))
        label = f"{B:3} {S:7} {page or '-':>4} sparse "
        numbers = array_module().asarray(blocks)
        sparse = partial(bg.attention_decode, q, store, blocks=numbers, block=size, out=out)
        call = bench.attempt("bsrgemm", label, partial(graphed, sparse))
        if call is None or not verified(bench, table, label, call, partial(decode_error, q, k, v, blocks, size)):
            continue
        fewer = bench.seconds(call) * 1e6
        table.add(
            f"{label} | {fewer:8.1f} us for {blocks.shape[2]} of {count} blocks of {size} keys | "
            f"{us / fewer:.1f} x faster than all",
            batch=B, keys=S, page=page, blocks=blocks.shape[2], of_blocks=count, us=fewer, speed_up=us / fewer,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------- long
def peak_bytes(call: Call) -> int | None:
    """The most that a call takes from CuPy's memory pool at a time; None on the CPU."""
    if not on_gpu():
        return None
    import cupy

    class Peak(cupy.cuda.MemoryHook):
        name = "Peak"
        now = most = 0

        def malloc_postprocess(self, **about: int) -> None:
            self.now += about["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **about: int) -> None:
            self.now -= about["mem_size"]

    hook = Peak()
    with hook:
        call()
    cupy.cuda.Device().synchronize()
    return hook.most


def section_long(bench: Bench, table: Table) -> None:
    """Long sequences: time and memory of sparse masks, and how much faster they are than dense causal."""
    H, D, window, size = (8, 128, WINDOW, 128) if on_gpu() else (2, 64, 64, 16)
    lengths = bench.some([131072, 262144, 524288], [131072]) if on_gpu() else [1024, 2048]
    first = lengths[0]
    case = Case((1, H, first, D), causal=True)
    label = f"{first:7} dense causal       "
    q, k, v = case_operands(case)
    call = attend(q, k, v, causal=True)
    reference = Reference.of(case, q, k, v, None)
    dense: dict[str, float] = {}
    if verified(bench, table, label, call, reference.error):

        def make(name: str) -> Call:
            return checked(PEERS[name](q, k, v, causal=True), reference.error, "float16")

        # All scores of the full length would not fit the time of plain NumPy.
        names = ["cuDNN"] if on_gpu() else []
        seconds, times = bench.interleaved(call, bench.prepared(names, label, make) if names else {}, label)
        dense = {"ours": seconds} | {name: x for name, x in times.items() if x is not None}
        text = " | ".join(f"{name} {x * 1e3:9.2f} ms" for name, x in dense.items())
        table.add(f"{label} | {text} | measured", length=first, mask="dense causal", seconds=dense)
    for S in lengths:
        each = max(1, round(0.05 * S / size))
        for case in (Case((1, H, S, D), window=window), Case((1, H, S, D), blocks=(size, each, False))):
            label = f"{S:7} {'window ' + str(window) if case.window else '5 % random blocks':19}"
            table.progress(label)
            bench.attempt("bench", label, partial(long_row, bench, table, case, label, dense, (S / first) ** 2))


def long_row(bench: Bench, table: Table, case: Case, label: str, dense: dict[str, float], factor: float) -> None:
    q, k, v = case_operands(case)
    mask = case.mask()
    call = attend(q, k, v, mask, **case.options)
    peak = bench.attempt("bsrgemm", label, partial(peak_bytes, call))  # the first call, which lists the mask's tiles
    if not verified(bench, table, label, call, Reference.of(case, q, k, v, mask).error):
        return
    seconds = bench.seconds(call)
    held = 0 if mask is None else mask.nbytes
    rate = 4.0 * case.shape[3] * case.pairs(mask) / seconds / 1e12
    speed_up = {name: x * factor / seconds for name, x in dense.items()}
    how = "measured" if factor == 1 else f"computed, {factor:g} x its time at the first length"
    text = ", ".join(f"{x:.1f} x {name}" for name, x in speed_up.items())
    extra = "-" if peak is None else f"{(peak + held) / 1e6:.2f}"
    table.add(
        f"{label} | {seconds * 1e3:9.2f} ms {rate:7.{1 if on_gpu() else 4}f} TFLOP/s | extra memory {extra} MB | "
        f"dense causal: {text} ({how})",
        length=case.shape[2], mask=case.name, seconds=seconds, tflops=rate, peak_bytes=peak, mask_bytes=held,
        speed_up=speed_up, dense_computed=factor != 1,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- density
def line_fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(slope, value at 0) of the line closest to the points.

    >>> [round(number, 9) for number in line_fit([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])]
    [2.0, 1.0]
    """
    slope, start = np.polyfit(x, y, 1)
    return float(slope), float(start)


def section_density(bench: Bench, table: Table) -> None:
    """Time by density of random blocks, against density times the time of dense attention."""
    shape, size = ((1, 8, 32768, 128), 128) if on_gpu() else ((1, 2, 512, 64), 16)
    densities = bench.some([0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0], [0.05, 0.2, 1.0])
    q, k, v = case_operands(Case(shape))
    full = attend(q, k, v)
    if not verified(bench, table, "full", full, Reference.of(Case(shape), q, k, v, None).error):
        return
    before = bench.seconds(full)
    found = []
    for density in densities:
        case = Case(shape, blocks=(size, max(1, round(density * shape[2] / size)), False))
        mask = case.mask()
        assert mask is not None
        label = f"{mask.density:6.4f}"
        table.progress(label)
        call = attend(q, k, v, mask)
        if not verified(bench, table, label, call, Reference.of(case, q, k, v, mask).error):
            continue
        seconds, after = bench.seconds(call), bench.seconds(full)
        dense, before = (before + after) / 2, after
        found.append((mask.density * dense, seconds))
        table.add(
            f"{label} | {seconds * 1e3:8.3f} ms | density x full {mask.density * dense * 1e3:8.3f} ms | "
            f"ratio {seconds / (mask.density * dense):6.3f}",
            shape=shape, block=size, density=mask.density, seconds=seconds, full_seconds=dense,
            ratio=seconds / (mask.density * dense),
        )  # fmt: skip
    if len(found) > 1:
        slope, start = line_fit(*zip(*found, strict=True))
        table.add(
            f"fit | {slope:.3f} x density x full + {start * 1e6:.1f} us", shape=shape, slope=slope, start_seconds=start
        )


# --------------------------------------------------------------------------------------- accuracy
def hard_inputs(kind: str, shape: tuple[int, int, int, int], dtype: str) -> tuple[Any, Any, Any]:
    """q, k and v whose scores do what `kind` says."""
    xp, (_, _, S, D) = array_module(), shape
    q, k, v = (normal(shape, dtype) for _ in range(3))
    side = xp.asarray(np.where(np.arange(D) % 3, 1.0, -1.0).astype(np.float32))

    def along(steps: Any) -> Any:
        """Keys in one direction, key j `steps[j]` far."""
        return xp.asarray(np.asarray(steps, np.float32))[:, None] * side

    if kind == "rising ramp":  # a score of 11.3 for each unit at head dim 128: 0 to 30, with noise
        q[...] = (side + 0.3 * q.astype(np.float32)).astype(q.dtype)
        k[...] = along(np.linspace(0, 30 / D**0.5, S)).astype(k.dtype)
    elif kind == "one huge key":
        k[:, :, -1] = 60
    elif kind == "scores to 1e4":
        far = (1e4 / D**0.5) ** 0.5
        q[...] = (far * side).astype(q.dtype)
        k[...] = along(np.random.default_rng(0).permutation(np.linspace(-far, far, S))).astype(k.dtype)
    elif kind == "constant rows":
        q[...], k[...] = 1, 0.5
    return q, k, v


HARD = ("plain", "rising ramp", "one huge key", "scores to 1e4", "constant rows")


def section_accuracy(bench: Bench, table: Table) -> None:
    """Error against float64 and time, on inputs that are hard for an online softmax."""
    shape = (1, 16, 8192, 128) if on_gpu() else (1, 2, 256, 64)
    table.note("largest error over max(1, size), time over that of the plain inputs")
    plain: dict[str, float] = {}
    kinds = [(kind, "float16") for kind in bench.some(HARD, HARD[:3])]
    for kind, dtype in [*kinds, ("plain", "bfloat16")]:
        label, case = f"{kind:14} {dtype:8}", Case(shape, dtype=dtype)
        table.progress(label)
        q, k, v = hard_inputs(kind, shape, dtype)
        reference = Reference.of(case, q, k, v, None)
        calls = {"bsrgemm": attend(q, k, v)}
        calls |= bench.prepared(DENSE_PEERS, label, lambda name, x=(q, k, v): PEERS[name](*x))
        found: dict[str, dict[str, float]] = {}
        for name, call in calls.items():

            def measure(call: Call = call, reference: Reference = reference) -> dict[str, float]:
                return {"error": reference.error(call()), "seconds": bench.seconds(call)}

            row = bench.attempt(name, label, measure)
            if row is not None:
                if kind == "plain" and dtype == "float16":
                    plain[name] = row["seconds"]
                found[name] = row | {"slower": row["seconds"] / plain.get(name, row["seconds"])}
        if "bsrgemm" not in found:
            table.add(f"{label} | -", what=label.strip(), failed=True)
            continue
        ours, others = found["bsrgemm"]["error"], [x["error"] for name, x in found.items() if name != "bsrgemm"]
        # Within what rounding allows, or no more than twice as far off as the best of the others.
        good = ours <= max(TOLERANCE[dtype], 2 * min(others, default=0.0))
        text = " | ".join(f"{name} {x['error']:.1e} x{x['slower']:.2f}" for name, x in found.items())
        table.add(
            f"{label} | {text} | {'good' if good else 'WRONG'}",
            inputs=kind, dtype=dtype, shape=shape, errors=found, good=good,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------- host
def host_seconds(call: Call, count: int = 200) -> float:
    """Host seconds of one call, the GPU being far from busy."""
    best = float("inf")
    call()
    for _ in range(10):
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def section_host(bench: Bench, table: Table) -> None:
    """What a call costs beside its kernel, and what masks cost before it."""
    S, D = 256, 128
    q, k, v = operands(1, 2, 2, S, D, "float16")
    store = filled_cache(k, v, None)
    token = array_module().empty((1, 2, 1, D), q.dtype)
    token[...] = q[:, :, :1]
    calls = {
        "attention, causal": attend(q, k, v, causal=True),
        "attention, window": attend(q, k, v, window=(100, 0)),
        "attention, mask": attend(q, k, v, bg.BlockMask.random(S, per_row=1)),
        "attention, mask of 64-blocks": attend(q, k, v, bg.BlockMask.random(S, per_row=2, block=64)),
        "attention_decode": partial(bg.attention_decode, token, store, out=array_module().empty_like(token)),
    }
    for name, call in calls.items():
        seconds = bench.attempt("bsrgemm", name, partial(host_seconds, call, 200 if on_gpu() else 2))
        if seconds is None:
            continue
        reached = seconds <= 25e-6 if on_gpu() else None
        table.add(
            f"{name:32} {seconds * 1e6:9.1f} us of the host{f' | bound 25 {mark(reached)}' if on_gpu() else ''}",
            what=name, seconds=seconds, bound=25e-6, reached=reached,
        )  # fmt: skip
    M, long, middle = bg.BlockMask, 524288, 16384
    masks: dict[str, tuple[Callable[[], bg.BlockMask], float | None, int | None]] = {
        "window 2048 at 524288": (lambda: M.window(long, left=WINDOW - 1, right=0), 1e-3, 10**6),
        "causal at 16384": (lambda: M.causal(middle), None, None),
        "random, 16 heads at 16384": (lambda: M.random(middle, per_row=26, heads=(1, 16)), None, None),
        "random 64-blocks at 16384": (lambda: M.random(middle, per_row=51, block=64), None, None),
        "window | sinks at 131072": (
            lambda: M.window(131072, left=WINDOW - 1, right=0) | M.sinks(131072, count=64),
            None,
            None,
        ),
    }
    for name, (build, most, most_bytes) in masks.items():
        measured = bench.attempt("bsrgemm", name, partial(mask_cost, build))
        if measured is None:
            continue
        seconds, listing, size = measured
        bounded = on_gpu() and most is not None and most_bytes is not None
        reached = seconds + listing <= most and size <= most_bytes if bounded else None
        bound = "" if reached is None else f" | bound 1 ms, 1 MB {mark(reached)}"
        table.add(
            f"{name:32} {seconds * 1e3:9.3f} ms to make, {listing * 1e3:9.3f} ms to list its tiles, "
            f"{size / 1e6:.3f} MB{bound}",
            what=name, make_seconds=seconds, list_seconds=listing, nbytes=size, reached=reached,
        )  # fmt: skip


def mask_cost(build: Callable[[], bg.BlockMask]) -> tuple[float, float, int]:
    """Least seconds to make a mask, and to list it for tiles of 128 x 128, and its bytes."""
    from bsrgemm import mask_tiles

    mask = build()
    made = partial(mask_tiles.tiles, mask._home, mask, 128, 128)
    found = []
    for call in (build, made):
        call()
        best = float("inf")
        for _ in range(5 if on_gpu() else 2):
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            best = min(best, time.perf_counter() - start)
        found.append(best)
    return found[0], found[1], mask.nbytes


# ------------------------------------------------------------------------------------------- main
SECTIONS: dict[str, tuple[str, Callable[[Bench, Table], None]]] = {
    "table": ("Attention, TFLOP/s", section_table),
    "small": ("Attention of many small heads", section_small),
    "decode": ("Attention of one token on a KV cache", section_decode),
    "long": ("Attention on long sequences", section_long),
    "density": ("Attention by density of random blocks", section_density),
    "accuracy": ("Attention on hard inputs", section_accuracy),
    "host": ("Cost of a call and of a mask", section_host),
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", choices=[*SECTIONS, "all"], default="table", help="default: table")
    parser.add_argument("--quick", action="store_true", help="a subset, 5 repeats; bench/results/ is left alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to this file")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--flex", action="store_true", help="also FlexAttention, which torch compiles (minutes)")
    return parser.parse_args(argv)


def main() -> None:
    options = arguments()
    start = time.perf_counter()
    bench = Bench(options.quick, not options.no_peers, flex=options.flex)
    names = list(SECTIONS) if options.section == "all" else [options.section]
    written: dict[str, list[Row]] = {}
    interrupted = False
    for name in names:
        title, section = SECTIONS[name]
        table = Table(f"attention_{name}_{device()}", title)
        written[name] = table.rows
        try:
            if on_gpu() and name == names[0]:
                compile_ahead(bench, table, names)
            section(bench, table)
        except KeyboardInterrupt:
            interrupted = True
        bench.explain(table)
        if on_gpu() and not options.quick and not interrupted:
            table.write()
        if options.json:  # after each section: a run that is cut short leaves what it has
            about = {"machine": machine() | {"peers": peers.versions()}}
            options.json.write_text(json.dumps(about | written, indent=1) + "\n")
        if interrupted:
            raise SystemExit("interrupted")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
