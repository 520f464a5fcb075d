"""How bench/attention.py measures: the options of a run, CUDA graphs, kernels compiled ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import report
from attention_cases import (
    HEADLINE,
    LONG,
    SMALL,
    TABLE,
    WINDOW,
    Case,
    array_module,
    attend,
    device,
    synchronize,
)
from harness import Table, on_gpu

import bsrgemm as bg
from bsrgemm._benchmark import attention_peers as peers
from bsrgemm._benchmark.attention_check import TOLERANCE
from bsrgemm._benchmark.timing import Call, time_cpu, time_gpu, time_sustained

#: Seconds of idling before a timing, and of one measurement without it; slow calls are repeated less often.
IDLE, IDLE_QUICK, BUDGET = 0.3, 0.2, 0.1
PEERS: dict[str, Callable[..., Call]] = {
    "cuDNN": peers.cudnn,
    "flash": peers.flash,
    "FA3": peers.fa3,
    "FA4": peers.fa4,
    "Flex": peers.flex,
    "NumPy": peers.plain,
}


@dataclass
class Bench(report.Bench):
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
        if on_gpu():
            return list(cases)
        return [case.on_cpu() for case in cases if case.kernel is None and case.dtype != "e4m3"]

    def prepared(self, names: Sequence[str], where: str, make: Callable[[str], Call]) -> dict[str, Call]:
        """The calls of those peers that can be had."""
        made = {name: self.attempt(name, where, partial(make, name)) for name in self.wanted(names)}
        return {name: call for name, call in made.items() if call is not None}

    def interleaved(self, ours: Call, others: dict[str, Call], where: str) -> tuple[float, dict[str, float | None]]:
        """Seconds of ours, timed before and after the others, and theirs."""
        before = self.seconds(ours)
        times = {name: self.attempt(name, where, partial(self.seconds, call)) for name, call in others.items()}
        return ((before + self.seconds(ours)) / 2 if times else before), times


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


def filled_cache(k: Any, v: Any, page: int | None) -> bg.KVCache:
    """A cache with these keys and values."""
    B, H, S, D = k.shape
    store = bg.KVCache(B, H, S, D, dtype=k.dtype, page=page, device=device())
    store.append(k, v)
    return store


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
    """SpgemmPattern each kind of problem once, side by side, so that their kernels are compiled at the same time."""
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
        (B, H, S, D), stored = case.shape, {"bfloat16": ml_dtypes.bfloat16, "e4m3": np.uint8}
        dtype = stored.get(case.dtype, case.dtype)
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
