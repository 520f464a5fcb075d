"""What a call costs beside its kernel: host time of a launch, cold compile, warm start in a new process, work lists.

Needs a GPU. Bounds: 25 us, 3 s, 100 ms (counted after CuPy's import and context), 2 ms for the work list of 1,000,000
blocks, made on the device once per pattern. Host times of six calls are multiples of that of ``cupy.add(x, x)`` for 512
float64, since hosts differ by a factor of two; all of them allocate their results, as the addition does.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import bsrgemm as bg

from .. import internals, machine, provenance
from ..patterns import uniform
from ..runner import mark
from ..table import Table, writing
from ..timing import Call, add_seconds, host_seconds

_START = """
import time, numpy as np, cupy
cupy.zeros(4).sum().get()
import bsrgemm as bg
A = bg.bsr_array(np.ones((2 * {block},) * 2, np.{dtype}), blocksize=({block}, {block}), device="cuda")
B = cupy.ones((2 * {block}, {N}), np.{dtype})
cupy.cuda.Device().synchronize()
start = time.perf_counter()
(A @ B)
cupy.cuda.Device().synchronize()
print(time.perf_counter() - start)
"""


def first_call(folder: str, dtype: str, block: int, N: int) -> float:
    """Seconds of the first product of a fresh process with this cache folder."""
    env = {**os.environ, "CUPY_CACHE_DIR": folder}
    code = _START.format(dtype=dtype, block=block, N=N)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)


def per_call(dtype: str, block: int, N: int) -> float:
    """Host seconds of one product on a prepared matrix, the GPU being far from busy."""
    import cupy

    A = bg.bsr_array(np.ones((2 * block, 2 * block), dtype), blocksize=(block, block), device="cuda")
    B = cupy.ones((2 * block, N), dtype)
    out = cupy.empty((2 * block, N), dtype)
    return host_seconds(lambda: bg.matmul(A, B, out=out), cupy.cuda.Device().synchronize)


#: Call -> most host time, as a multiple of that of ``cupy.add(x, x)``; None where there is no bound
ADDS = {
    "A @ B, 64 x 64 float16": 1.4,
    "A @ B, 16 operands in turn": None,
    "A @ B, new operands each call": 1.8,
    "A @ x, 3 x 3 float64": 1.4,
    "attention, causal": 1.6,
    "attention_decode": 1.6,
    "sddmm, 64 x 64 float16": 2.0,
}
#: Operands that are remembered, and more than there are addresses and tensor maps that are
_IN_TURN, _NEW_OPERANDS = 16, 1500


def host_calls(xp: Any, device: str, in_turn: int = _IN_TURN, new: int = _NEW_OPERANDS) -> dict[str, Call]:
    """The calls of `ADDS`, on operands so small that only the host's time matters; results are allocated."""

    def matrix(block: int, dtype: str) -> Any:
        return bg.bsr_array(np.ones((2 * block, 2 * block), dtype), blocksize=(block, block), device=device)

    A, blocks = matrix(64, "float16"), matrix(3, "float64")
    B, x = xp.ones((128, 64), np.float16), xp.ones(6)
    few, many = (itertools.cycle(list(xp.ones((count, 128, 64), np.float16))) for count in (in_turn, new))
    q, k, v = (xp.ones((1, 2, 256, 128), np.float16) for _ in range(3))
    store = bg.KVCache(1, 2, 256, 128, dtype=np.float16, device=device)
    store.append(k, v)
    token = xp.ones((1, 2, 1, 128), np.float16)
    X, Y = (xp.ones((128, 128), np.float16) for _ in range(2))
    calls = (
        lambda: A @ B,
        lambda: A @ next(few),
        lambda: A @ next(many),
        lambda: blocks @ x,
        partial(bg.attention, q, k, v, causal=True),
        partial(bg.attention_decode, token, store),
        partial(bg.sddmm, X, Y, A),
    )
    return dict(zip(ADDS, calls, strict=True))


def measure_calls(table: Table) -> None:
    """Host times of the calls of `ADDS` beside that of an addition that allocates its result."""
    import cupy

    one, synchronize = cupy.ones(512), cupy.cuda.Device().synchronize
    for name, call in host_calls(cupy, "cuda").items():
        call()  # kernels are compiled, and what a second call remembers is remembered, before anything is timed
        seconds, unit = host_seconds(call, synchronize), host_seconds(lambda: cupy.add(one, one), synchronize)
        adds, most = seconds / unit, ADDS[name]
        reached = None if most is None else adds <= most
        wanted = "" if most is None else f" | wanted {most} {mark(reached)}"
        table.add(
            f"{name:30} {seconds * 1e6:8.1f} us = {adds:.2f} x cupy.add(x, x){wanted}",
            what=name, host_seconds=seconds, add_seconds=unit, adds=adds, most_adds=most, reached=reached,
        )  # fmt: skip


def work_list(per_group: int) -> float:
    """Seconds to group the rows of a pattern with 1,000,000 blocks and to build its work list."""
    import cupy

    side, per_row = 4096, 244
    pattern = uniform(side, side, per_row)
    indices, indptr = (cupy.asarray(x.astype(np.int32)) for x in (pattern.indices, pattern.indptr))
    make = internals.work_list_maker(indices, indptr, side, per_group)
    best = float("inf")
    for _ in range(10):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        make()
        cupy.cuda.Device().synchronize()
        best = min(best, time.perf_counter() - start)
    return best


#: Most seconds
CALL, COLD, WARM, WORK_LIST = 25e-6, 3.0, 0.1, 2e-3
#: (kernel, dtype, block, columns)
CASES = (
    ("spmv", "float32", 3, 1),
    ("gemm_simt", "float32", 3, 64),
    ("gemm_sm80", "float32", 32, 64),
    ("gemm_sm90", "float16", 64, 64),
)


def measure(table: Table) -> None:
    """Kernel by kernel, then the work lists; six calls come before all."""
    measure_calls(table)

    def add(what: str, shown: str, seconds: float, bound: float, **values: Any) -> None:
        reached = seconds <= bound
        table.add(f"{what} {shown} | {mark(reached)}", **values, bound=bound, reached=reached)

    unit = add_seconds()
    for kernel, dtype, block, N in CASES:
        seconds = per_call(dtype, block, N)
        us = f"{seconds * 1e6:8.1f} us = {seconds / unit:.1f} x cupy.add"
        kept: dict[str, Any] = {"kernel": kernel, "call_seconds": seconds, "add_seconds": unit, "adds": seconds / unit}
        add(f"{kernel:10} host time of a call   ", us, seconds, CALL, **kept)
        with tempfile.TemporaryDirectory() as folder:
            cold = first_call(folder, dtype, block, N)
            warm = min(first_call(folder, dtype, block, N) for _ in range(3))
        ms = f"{cold * 1e3:8.1f} ms"
        add(f"{kernel:10} first call, cold cache", ms, cold, COLD, kernel=kernel, cold_seconds=cold)
        ms = f"{warm * 1e3:8.1f} ms"
        add(f"{kernel:10} first call, warm cache", ms, warm, WARM, kernel=kernel, warm_seconds=warm)
    for block, per_group in ((128, 1), (64, 2), (32, 4), (16, 8)):
        seconds = work_list(per_group)
        what, ms = f"work list of 999,424 blocks, block {block:3}", f"{seconds * 1e3:8.2f} ms"
        add(what, ms, seconds, WORK_LIST, block=block, prepare_seconds=seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    provenance.add_option(parser)
    quick = "host times of six calls alone, in less than a minute; bench/results/ is left alone"
    parser.add_argument("--quick", action="store_true", help=quick)
    options = parser.parse_args(argv)
    if not machine.has_gpu():
        raise SystemExit("bench/run/overhead.py measures launches: it needs a GPU")
    with provenance.recording(by_load=True) as launched:
        table = Table("overhead_cuda", "Cost of a call", launched)
        with writing(table, keep=not options.quick):
            (measure_calls if options.quick else measure)(table)
