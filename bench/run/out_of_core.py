"""Matrices in panels on Dask: a product that is larger than memory, read from disk, and what a task costs.

``python bench/run/out_of_core.py`` measures three parts. In "threads", a process whose memory is limited by the
operating system multiplies a matrix that is four times as large as what it may take, and loading all of it under the
same limit has to fail. In "distributed", workers with the memory limit of Dask's LocalCluster do the same. In "tasks",
panels are so small that only the cost of their tasks counts. Results are compared with those of SciPy.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dask
import numpy as np
import scipy.sparse
from dask.diagnostics import ProgressBar

import bsrgemm as bg
from bsrgemm._benchmark import provenance
from bsrgemm._benchmark.table import Table
from bsrgemm.interop import dask as panels

#: The matrix: blocks of 32 x 32 float32, 32 of them in each of 64 block rows of a panel, which is 8 MiB.
SIDE, EACH, ROWS, COLUMNS = 32, 32, 64, 4096
PANEL_MIB = SIDE * SIDE * 4 * EACH * ROWS // 2**20
#: Columns of the dense operand
WIDTH = 8
#: The largest difference from SciPy over the size of the result; 1024 products of float32 are added up.
TOLERANCE = 1e-5
#: Address space that malloc reserves ahead of need would add to the limit; large arrays are given back once freed.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
PARTS = ("threads", "distributed", "tasks")


# --------------------------------------------------------------------------------------- the matrix
def arrays(number: int) -> tuple[Any, Any, Any]:
    """The blocks, block columns and row starts of a panel, the same for the same number."""
    rng = np.random.default_rng(number)
    count = EACH * ROWS
    data = np.resize(rng.standard_normal(2**16, dtype=np.float32), (count, SIDE, SIDE))
    places = np.sort(rng.permuted(np.tile(np.arange(COLUMNS // SIDE), (ROWS, 1)), axis=1)[:, :EACH], axis=1)
    return data, places.reshape(-1), np.arange(0, count + 1, EACH)


def panel(number: int) -> Any:
    return bg.bsr_array(arrays(number), shape=(ROWS * SIDE, COLUMNS))


def operand() -> Any:
    return np.random.default_rng(1).standard_normal((COLUMNS, WIDTH), dtype=np.float32)


def write(folder: str, count: int) -> None:
    """Write the matrix panel by panel; no more than one panel for each thread is in memory."""
    made = [dask.delayed(panel, pure=True)(i) for i in range(count)]
    rows = [ROWS * SIDE] * count
    A = panels.from_delayed(made, rows, COLUMNS, blocksize=(SIDE, SIDE), dtype="float32")
    panels.to_panels(A, folder)


def error(y: Any, count: int) -> float:
    """The largest difference from SciPy's product, over the largest element."""
    X, worst, size = operand(), 0.0, 0.0
    for i in range(count):
        want = scipy.sparse.bsr_array(arrays(i), shape=(ROWS * SIDE, COLUMNS)) @ X
        worst = max(worst, float(abs(y[i * ROWS * SIDE : (i + 1) * ROWS * SIDE] - want).max()))
        size = max(size, float(abs(want).max()))
    return worst / size


# ------------------------------------------------------------------------------------- larger than memory
def bytes_of_process() -> tuple[int, int]:
    """Bytes of virtual and of physical memory that this process has now."""
    virtual, physical = Path("/proc/self/statm").read_text().split()[:2]
    return int(virtual) * resource.getpagesize(), int(physical) * resource.getpagesize()


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def limited(folder: str, memory: int, out: str) -> None:
    """Multiply under a limit of `memory` MiB in addition to what Python and its libraries have taken."""
    A, X = panels.from_panels(folder), operand()
    (A.partitions[:4] @ X).compute()  # threads, their stacks and the buffers of BLAS are there
    virtual, physical = bytes_of_process()
    limit = virtual + memory * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    begin = time.perf_counter()
    with ProgressBar():
        y = (A @ X).compute()
    seconds = time.perf_counter() - begin
    taken = peak_mib() - physical / 2**20
    try:
        A.compute()
        whole = "fits"
    except MemoryError:
        whole = "MemoryError"
    np.save(out, y)
    print(json.dumps({"seconds": seconds, "peak_mib": taken, "whole": whole}))


def threads(table: Table, options: argparse.Namespace) -> None:
    count = options.factor * options.memory // PANEL_MIB
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write(folder, count)
        out = f"{folder}/y.npy"
        words = [sys.executable, __file__, "--limited", folder, str(options.memory), out]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | _MALLOC)
        print(done.stdout.rpartition("\n{")[0])  # the progress bar
        found = json.loads(done.stdout.splitlines()[-1])
        add(table, "threads", options.memory, count, found | {"error": error(np.load(out), count)})


def distributed(table: Table, options: argparse.Namespace) -> None:
    from distributed import Client, LocalCluster, progress

    memory = options.worker_memory * options.workers
    count = options.factor * memory // PANEL_MIB
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write(folder, count)
        with (
            LocalCluster(
                n_workers=options.workers,
                threads_per_worker=1,
                memory_limit=f"{options.worker_memory}MiB",
                dashboard_address=None,
            ) as cluster,
            Client(cluster) as client,
        ):
            workers = set(client.run(os.getpid).values())
            begin = time.perf_counter()
            y = (panels.from_panels(folder) @ operand()).persist()
            progress(y, notebook=False)
            y = y.compute()
            seconds = time.perf_counter() - begin
            print()
            stopped = len(workers - set(client.run(os.getpid).values()))
            peak = sum(client.run(peak_mib).values())
        found = {"seconds": seconds, "peak_mib": peak, "stopped": stopped, "error": error(y, count)}
        add(table, "distributed", memory, count, found)


def add(table: Table, what: str, memory: int, count: int, found: dict[str, Any]) -> None:
    size = count * PANEL_MIB
    good = found["error"] < TOLERANCE and found.get("whole") != "fits" and not found.get("stopped")
    table.add(
        f"{what:12} matrix {size:6,} MiB | memory allowed {memory:5,} MiB, most taken {found['peak_mib']:6.0f} MiB | "
        f"{found['seconds']:6.2f} s, {size / found['seconds']:6,.0f} MiB/s | error {found['error']:.1e} "
        f"{'' if good else 'WRONG'}",
        what=what,
        matrix_mib=size,
        memory_mib=memory,
        good=good,
        **found,
    )


# ------------------------------------------------------------------------------------------ tasks
def least(call: Callable[[], Any], runs: int) -> float:
    """Seconds of the fastest run: others are slower because of what else the machine does."""
    call()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def tasks(table: Table, options: argparse.Namespace) -> None:
    """``A @ x`` of panels with one block of 4 x 4 each: a product of 4 panels, and each further panel."""
    few, many = 4, 256
    S, x = bg.eye(4 * many, blocksize=(4, 4)), np.ones(4 * many)
    A = panels.from_bsr(S, 4)
    one = S[:4]
    alone = least(lambda: one @ x, 1000)
    table.add(f"one panel without Dask   {alone * 1e6:8.0f} us", what="task", scheduler="none", seconds=alone)

    def measure(name: str, A: Any, **options: Any) -> None:
        short, long = A[: 4 * few] @ x, A @ x
        assert np.array_equal(long.compute(**options), x)
        seconds = [least(lambda y=y: y.compute(**options), 15) for y in (short, long)]
        each = (seconds[1] - seconds[0]) / (many - few)
        table.add(
            f"{name:12} {few} panels {seconds[0] * 1e3:8.2f} ms, each further panel {each * 1e6:8.0f} us",
            what="task",
            scheduler=name,
            panels=few,
            seconds=seconds[0],
            each=each,
        )

    measure("synchronous", A, scheduler="synchronous")
    measure("threads", A, scheduler="threads")
    from distributed import Client, LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
        measure("distributed", A.persist())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="one of the parts; all by default")
    parser.add_argument("--memory", type=int, default=128, metavar="MIB", help="memory for threads (128)")
    parser.add_argument("--worker-memory", type=int, default=320, metavar="MIB", help="memory of each worker (320)")
    parser.add_argument("--workers", type=int, default=2, help="workers of the cluster (2)")
    parser.add_argument("--factor", type=int, default=4, help="how many times larger the matrix is (4)")
    parser.add_argument("--folder", help="where temporary folders with the panels are made")
    parser.add_argument("--keep", action="store_true", help="write what was measured to bench/results/")
    parser.add_argument("--limited", nargs=3, help=argparse.SUPPRESS)
    provenance.add_option(parser)
    options = parser.parse_args(argv)
    if options.limited:
        folder, memory, out = options.limited
        limited(folder, int(memory), out)
        return 0
    table = Table("dask_cpu", "Matrices in panels on Dask")
    for part in options.part or PARTS:
        {"threads": threads, "distributed": distributed, "tasks": tasks}[part](table, options)
    if options.keep:
        table.write()
    return 0 if all(row.get("good", True) for row in table.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
