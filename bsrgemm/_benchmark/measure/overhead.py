"""What a call costs beside its kernel: host time of a launch, cold compile, warm start in a new process, work lists.

Needs a GPU. Bounds: 25 us, 3 s, 100 ms (counted after CuPy's import and context), 2 ms for the work list of 1,000,000
blocks, made on the device once per pattern.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import bsrgemm as bg

from .. import internals, machine, provenance
from ..patterns import uniform
from ..runner import mark
from ..table import Table, writing
from ..timing import add_seconds, host_seconds

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
    """Kernel by kernel, then the work lists."""

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
    parser.parse_args(argv)
    if not machine.has_gpu():
        raise SystemExit("bench/run/overhead.py measures launches: it needs a GPU")
    with provenance.recording(by_load=True) as launched:
        table = Table("overhead_cuda", "Cost of a call", launched)
        with writing(table):
            measure(table)
