"""Matrices in panels on Dask: a product that is larger than memory, read from disk, and what a task costs.

A process whose memory is limited multiplies a matrix that is four times as large as that, and loading all of it has to
fail; so do workers of a LocalCluster. Then panels are so small that only the cost of their tasks counts.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

import bsrgemm as bg

from ..machine import ROOT
from ..measure import Row, Run, reason_of
from ..place import Place
from ..report import TIME, error, field, three
from ..study import Study

#: The matrix: blocks of 32 x 32 float32, 32 of them in each of 64 block rows of a panel, which is 8 MiB
SIDE, EACH, ROWS, COLUMNS = 32, 32, 64, 4096
PANEL_MIB = SIDE * SIDE * 4 * EACH * ROWS // 2**20
#: Columns of the dense operand, and how many times as large as memory the matrix is
WIDTH, FACTOR = 8, 4
#: The largest difference from SciPy over the size of the result; 1024 products of float32 are added up
TOLERANCE = 1e-5
#: Address space that malloc reserves ahead of need would add to the limit; large arrays are given back once freed
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
#: What a process with a limit runs
_LIMITED = "import sys; from bench.studies.panels import limited; limited(sys.argv[1], int(sys.argv[2]), sys.argv[3])"


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
    import dask

    from bsrgemm.interop import dask as panels

    made = [dask.delayed(panel, pure=True)(i) for i in range(count)]
    A = panels.from_delayed(made, [ROWS * SIDE] * count, COLUMNS, blocksize=(SIDE, SIDE), dtype="float32")
    panels.to_panels(A, folder)


def off(y: Any, count: int) -> float:
    """The largest difference from SciPy's product, over the largest element."""
    X, worst, size = operand(), 0.0, 0.0
    for i in range(count):
        want = scipy.sparse.bsr_array(arrays(i), shape=(ROWS * SIDE, COLUMNS)) @ X
        worst = max(worst, float(abs(y[i * ROWS * SIDE : (i + 1) * ROWS * SIDE] - want).max()))
        size = max(size, float(abs(want).max()))
    return worst / size


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def limited(folder: str, memory: int, out: str) -> None:
    """Multiply under a limit of `memory` MiB in addition to what Python and its libraries have taken."""
    from bsrgemm.interop import dask as panels

    A, X = panels.from_panels(folder), operand()
    (A.partitions[:4] @ X).compute()  # threads, their stacks and the buffers of BLAS are there
    virtual, physical = (int(x) * resource.getpagesize() for x in Path("/proc/self/statm").read_text().split()[:2])
    limit = virtual + memory * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    begin = time.perf_counter()
    y = (A @ X).compute()
    seconds = time.perf_counter() - begin
    taken = peak_mib() - physical / 2**20
    try:
        A.compute()
        whole = "fits"
    except MemoryError:
        whole = "MemoryError"
    np.save(out, y)
    print(json.dumps({"seconds": seconds, "peak": taken, "whole": whole}))


def by_threads(memory: int, folder: str | None = None) -> Row:
    """A process with `memory` MiB."""
    count = FACTOR * memory // PANEL_MIB
    with tempfile.TemporaryDirectory(dir=folder) as panels:
        write(panels, count)
        out = f"{panels}/y.npy"
        words = [sys.executable, "-c", _LIMITED, panels, str(memory), out]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | _MALLOC, cwd=ROOT)
        return _judged("threads", memory, count, json.loads(done.stdout.splitlines()[-1]), np.load(out))


def by_workers(memory: int, workers: int, folder: str | None = None) -> Row:
    """Workers with `memory` MiB each."""
    from distributed import Client, LocalCluster

    from bsrgemm.interop import dask as panels

    count = FACTOR * memory * workers // PANEL_MIB
    options = {"n_workers": workers, "threads_per_worker": 1, "memory_limit": f"{memory}MiB", "dashboard_address": None}
    with tempfile.TemporaryDirectory(dir=folder) as path:
        write(path, count)
        with LocalCluster(**options) as cluster, Client(cluster) as client:
            before = set(client.run(os.getpid).values())
            begin = time.perf_counter()
            y = (panels.from_panels(path) @ operand()).compute()
            seconds = time.perf_counter() - begin
            stopped = len(before - set(client.run(os.getpid).values()))
            peak = sum(client.run(peak_mib).values())
    return _judged("workers", memory * workers, count, {"seconds": seconds, "peak": peak, "stopped": stopped}, y)


def _judged(who: str, memory: int, count: int, found: Row, y: Any) -> Row:
    size = count * PANEL_MIB
    row = {"what": f"{size:,} MiB from disk by {who}, {memory:,} MiB of memory", "memory": memory,
           "rate": size / found["seconds"], "error": off(y, count) / TOLERANCE} | found  # fmt: skip
    if found.get("whole") == "fits":
        return row | {"failed": "all of the matrix fits under the limit"}
    if found.get("stopped"):
        return row | {"failed": f"{found['stopped']} workers were stopped"}
    return row | ({} if row["error"] <= 1 else {"wrong": True})


def tasks(place: Place, distributed: bool) -> Iterator[Row]:
    """``A @ x`` of panels with one block of 4 x 4 each: a product of 4 panels, and each further panel."""
    from bsrgemm.interop import dask as panels

    few, many = 4, 256
    S, x = bg.eye(4 * many, blocksize=(4, 4)), np.ones(4 * many)
    A = panels.from_bsr(S, 4)
    one = S[:4]
    yield {"what": "one panel without Dask", "seconds": place.waited_seconds(lambda: one @ x, 1000)}

    def measured(name: str, A: Any, **options: Any) -> Row:
        short, long = A[: 4 * few] @ x, A @ x
        assert np.array_equal(long.compute(**options), x)
        seconds = [place.waited_seconds(lambda y=y: y.compute(**options), 15) for y in (short, long)]  # type: ignore[misc]
        return {
            "what": f"{few} panels, {name}",
            "seconds": seconds[0],
            "each": (seconds[1] - seconds[0]) / (many - few),
        }

    for scheduler in ("synchronous", "threads"):
        yield measured(scheduler, A, scheduler=scheduler)
    if distributed:
        from distributed import Client, LocalCluster

        with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
            yield measured("distributed", A.persist())


def on_dask(run: Run) -> Iterator[Row]:
    """All of it; a quick run has threads alone."""
    quick = run.place.quick
    yield by_threads(64 if quick else 128)
    if not quick:
        try:
            yield by_workers(320, 2)
        except ImportError as reason:
            yield {"what": "workers of a cluster", "failed": reason_of(reason)}
    yield from tasks(run.place, not quick)


STUDIES = (
    Study(
        "panels", "matrices in panels on Dask: larger than memory, and the cost of a task", on_dask,
        (TIME, field("MiB a second", "rate", three), field("most taken, MiB", "peak", lambda x: f"{x:.0f}"),
         field("each further panel, us", "each", lambda x: f"{x * 1e6:.0f}"),
         field("error over allowed", "error", error)), devices=("cpu",),
    ),
)  # fmt: skip
