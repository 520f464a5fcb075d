"""How attention is measured: the options of a run, its peers, CUDA graphs, kernels compiled ahead."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import bsrgemm as bg

from .. import runner
from ..cases.attentions import Attention
from ..checks.attention import TOLERANCE, Reference
from ..peers import attention as peers
from ..random_data import stored_dtype
from ..table import Table
from ..timing import Call
from .attention_cases import HEADLINE, LONG, SMALL, TABLE, WINDOW, Case, attend, attention


@dataclass
class Bench(runner.Bench):
    """The options of a run, and what could not be measured."""

    flex: bool = False

    def cases(self, cases: Sequence[Case]) -> list[Case]:
        """The cases as they are, or those that a CPU has in small."""
        if self.on_gpu:
            return list(cases)
        return [case.on_cpu() for case in cases if case.kernel is None and case.problem.dtype != "e4m3"]

    def makers(self, names: Sequence[str]) -> dict[str, Callable[..., Call]]:
        """The peers among those named that this run measures; on the CPU it is NumPy."""
        if not self.on_gpu:
            return {"NumPy": peers.plain}
        return {name: make for name, make in peers.PEERS.items() if name in names and (self.flex or name != "Flex")}

    def peer_calls(
        self, names: Sequence[str], where: str, operands: tuple[Any, Any, Any], reference: Reference, **options: Any
    ) -> dict[str, Call]:
        """The calls of those peers that are installed and give correct results."""
        makers = {name: partial(make, *operands, **options) for name, make in self.makers(names).items()}
        return self.prepared(makers, where, reference.error, TOLERANCE[_kind_of(operands[0])])


def _kind_of(q: Any) -> str:
    return "e4m3" if q.dtype == np.uint8 else str(q.dtype.name)


def bench_of(options: argparse.Namespace) -> Bench:
    return Bench(options.quick, not options.no_peers, options.device, flex=options.flex)


def filled_cache(bench: runner.Bench, k: Any, v: Any, page: int | None) -> bg.KVCache:
    """A cache with these keys and values."""
    B, H, S, D = k.shape
    store = bg.KVCache(B, H, S, D, dtype=k.dtype, page=page, device=bench.device)
    store.append(k, v)
    return store


#: Memory that is taken during a capture goes back to the pool of its stream, which must not die before the graph.
_streams: list[Any] = []


def graphed(bench: runner.Bench, call: Call) -> Call:
    """Our call as the replay of a CUDA graph on the current stream; itself on the CPU."""
    if not bench.on_gpu:
        return call
    import cupy

    call()
    bench.synchronize()
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


# ------------------------------------------------------------------------------------ compiled ahead
def problems_of(bench: Bench, section: str) -> list[Attention]:
    """Problems that need the same kernels as a section."""
    few, blocks = (1, 2, 256, 128), attention(LONG, blocks=(128, 6))
    found: dict[str, list[Attention]] = {
        "table": [case.problem for case in bench.some(TABLE, HEADLINE) if case.kernel is None],
        "small": [attention((1, H, 512, 64)) for H, _ in SMALL],
        "long": [attention(LONG), attention(LONG, window=WINDOW), blocks],
        "density": [attention(LONG), blocks],
        "accuracy": [attention(LONG), attention(LONG, dtype="bfloat16")],
        "host": [attention(few), attention(few, blocks=(128, 1)), attention(few, blocks=(64, 2))],
    }
    return found.get(section, [])


def compile_ahead(bench: Bench, table: Table, sections: Sequence[str]) -> None:
    """Call each kind of problem once, side by side, so that their kernels are compiled at the same time."""
    if not bench.on_gpu:
        return

    def meet(problem: Attention) -> None:
        shapes = (problem.shape, problem.kv_shape, problem.kv_shape)
        q, k, v = (bench.xp.zeros(shape, stored_dtype(problem.dtype)) for shape in shapes)
        attend(q, k, v, problem.mask(bench.device), **problem.options)()

    def meet_decode() -> None:
        q, k = (bench.xp.zeros((1, *rest, 128), np.float16) for rest in ((32, 1), (8, 8192)))
        bg.attention_decode(q, filled_cache(bench, k, k, None))

    start = time.perf_counter()
    table.progress("compiling")
    wanted = dict.fromkeys(problem for name in sections for problem in problems_of(bench, name))
    calls: dict[str, Call] = {str(problem): partial(meet, problem) for problem in wanted}
    if {"decode", "host"} & set(sections):
        calls["decode"] = meet_decode
    with ThreadPoolExecutor(8) as pool:
        for where, future in [(where, pool.submit(call)) for where, call in calls.items()]:
            bench.attempt("bsrgemm", where, future.result)
    bench.synchronize()
    table.note(f"kernels ready after {time.perf_counter() - start:.1f} s")
