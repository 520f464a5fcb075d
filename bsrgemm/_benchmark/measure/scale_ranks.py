"""What each rank runs for the benchmark of several ranks; rank 0 writes what was found to a file.

``mpiexec -n 2 python -m bsrgemm._benchmark.measure.scale_ranks FILE`` is how `scale` starts it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.interop import mpi
from bsrgemm.interop.communicator import as_communicator
from bsrgemm.interop.mpi import multigrid

from ..solver import problems

#: Block rows of a rank in the small product, and offsets of its bands: a grid of 20 nodes a line.
SMALL_ROWS, SMALL_BANDS = 300, (-20, -1, 0, 1, 20)
#: Medians of which the least counts: other programs may share the cores.
ROUNDS = 10
#: Calls of a product at least: those of large matrices are preempted more often, so that fewer make a median.
CALLS = 100
#: Bytes of messages by which latency and bandwidth are found.
MESSAGES = (8, 1 << 10, 1 << 16, 1 << 20)


class Clock:
    """Medians over calls that all ranks make together, the least of some; the slowest rank counts.

    With `off` a call is made once, and its time is 0.
    """

    def __init__(self, comm: Any, device: str, off: bool) -> None:
        self._comm, self._wait, self._off = comm, lambda: None, off
        if device == "cuda":
            import cupy

            self._wait = lambda: cupy.cuda.get_current_stream().synchronize()

    def __call__(self, call: Callable[[], Any], runs: int) -> float:
        if self._off:
            call()
            return 0.0
        medians = []
        for _ in range(max(ROUNDS, CALLS // runs)):
            times = np.empty(runs)
            call()
            self._comm.barrier()
            for k in range(runs):
                begin = time.perf_counter()
                call()
                self._wait()
                times[k] = time.perf_counter() - begin
            medians.append(float(self._comm.allreduce(np.array(np.median(times)), "max")))
        return min(medians)


class _Slow:
    """A message that has not come before some time after its start, as over a network that needs no core."""

    def __init__(self, real: Any, delay: float) -> None:
        self._real, self._end = real, time.perf_counter() + delay

    def wait(self) -> None:
        self._real.wait()
        while time.perf_counter() < self._end:
            pass


class Delayed:
    """A communicator whose messages take longer; with a delay of None none are sent, and ghosts are anything."""

    def __init__(self, comm: Any, delay: float | None) -> None:
        self._comm, self._delay = comm, delay

    def exchange(self, sends: Any, receives: Any) -> Any:
        if self._delay is None:
            return self._comm.exchange({}, {})
        return _Slow(self._comm.exchange(sends, receives), self._delay)


def with_messages(D: Any, delay: float | None) -> Any:
    """The matrix with messages that take longer, or with none."""
    found = object.__new__(type(D))
    found.__dict__.update(D.__dict__)
    found._halo = replace(D._halo, comm=Delayed(D.comm, delay))
    return found


def bands(rows: int) -> Any:
    """A banded matrix of 3 x 3 blocks."""
    bands = [np.ones(rows - abs(k)) for k in SMALL_BANDS]
    S = scipy.sparse.diags_array(bands, offsets=SMALL_BANDS).tocoo()
    data = np.random.default_rng(0).standard_normal((S.nnz, 3, 3))
    return bg.bsr_array((data, (S.row, S.col)), shape=(3 * rows, 3 * rows))


def least_bytes(A: Any, D: Any, columns: int) -> int:
    """The bytes that a rank cannot do without: distinct columns of its rows that others have, by the whole pattern."""
    R = A.blocksize[0]
    first, last = D.rows.start // R, D.rows.stop // R
    needed = np.zeros(A.shape[1] // R, bool)
    needed[A.indices[A.indptr[first] : A.indptr[last]]] = True
    needed[first:last] = False
    return int(needed.sum()) * R * A.dtype.itemsize * columns


def _sent(comm: Any, sends: Any, receives: Any) -> None:
    comm.exchange(sends, receives).wait()


def links(comm: Any, clock: Clock, runs: int) -> list[dict[str, Any]]:
    """Two neighbours exchange messages of some sizes; a sum over all ranks."""
    if comm.size == 1:
        return []
    other = comm.rank ^ 1
    found = []
    for size in MESSAGES:
        out, into = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        sends, receives = ({other: out}, {other: into}) if other < comm.size else ({}, {})
        seconds = clock(partial(_sent, comm, sends, receives), runs)
        found.append({"what": "message", "bytes": size, "seconds": seconds})
    number = np.zeros(1)
    found.append({"what": "sum", "seconds": clock(lambda: comm.allreduce(number), runs)})
    return found


def product(comm: Any, clock: Clock, A: Any, name: str, columns: int, runs: int, device: str) -> dict[str, Any]:
    """One product: whole, its parts, its bytes, and how it differs from that of one rank."""
    D = mpi.partition(A if comm.rank == 0 else None, comm, device=device)
    shape: Any = A.shape[1] if columns == 1 else (A.shape[1], columns)
    whole = np.random.default_rng(1).standard_normal(shape)
    x = D.scatter(D._backend.from_host(whole) if comm.rank == 0 else None)
    y = D.gather(D @ x)
    again = D.gather(D @ x)
    row = {"what": "product", "matrix": name, "ranks": comm.size, "block_rows": A.shape[0] // A.blocksize[0],
           "columns": columns, "device": device}  # fmt: skip
    if y is not None and again is not None:
        want, found = A @ whole, D._backend.to_host(y)
        row["error"] = float(abs(found - want).max() / abs(want).max())
        row["repeats"] = found.tobytes() == D._backend.to_host(again).tobytes()
    panel, everything = D.panel(), D._backend.from_host(whole)
    ghosts = D._backend.xp.zeros((D._ghost.shape[1], *x.shape[1:]), x.dtype)
    row["seconds"] = clock(lambda: D @ x, runs)
    row["local"] = clock(lambda: panel @ everything, runs)
    row["interior"] = clock(lambda: D.interior @ x, runs)
    row["ghost"] = clock(lambda: bg.matmul(D._ghost, ghosts), runs) if D._halo.count else 0.0
    row["exchange"] = clock(lambda: D._halo.fetch(x)[0].wait(), runs)
    silent = with_messages(D, None)
    row["silent"] = clock(lambda: silent @ x, runs)
    slow = with_messages(D, row["interior"] / 2)
    row["slow"] = clock(lambda: slow @ x, runs)
    row["slow_exchange"] = clock(lambda: slow._halo.fetch(x)[0].wait(), runs)
    least = least_bytes(A, D, columns)
    sums = comm.allreduce(np.array([D.halo_bytes(columns), least], np.int64))
    row["halo_bytes"], row["least_bytes"] = (int(v) for v in sums)
    most = comm.allreduce(np.array([D.halo_bytes(columns), panel.nbytes, len(D._halo.receives)], np.int64), "max")
    row["most_halo_bytes"], row["panel_bytes"], row["messages"] = (int(v) for v in most)
    row["vector_bytes"] = int(comm.allreduce(np.array(2 * x.nbytes, np.int64), "max"))
    return row


def solution(comm: Any, problem: Any, name: str, device: str) -> list[dict[str, Any]]:
    """Conjugate gradients with each preconditioner: iterations of all ranks and of one process."""
    A = bg.bsr_array(problem.A)
    D = mpi.partition(A if comm.rank == 0 else None, comm, device=device)
    b = D.scatter(D._backend.from_host(problem.b) if comm.rank == 0 else None)
    modes = D.scatter(D._backend.from_host(problem.modes) if comm.rank == 0 else None)
    # as small as one process would make it, so that some levels are spread on a small problem too
    multigrid.GATHERED_ROWS = 500 // comm.size
    made: dict[str, Callable[[Any, Any], Any]] = {
        "block Jacobi": lambda A, modes: linalg.block_jacobi(A),
        "Chebyshev": lambda A, modes: linalg.chebyshev(A),
        "multigrid": lambda A, modes: linalg.smoothed_aggregation(A, modes),
    }
    rows = []
    for preconditioner, make in made.items():
        M = make(D, modes)
        steps: list[int] = []
        x, info = linalg.cg(D, b, M=M, rtol=1e-8, callback=lambda _, s=steps: s.append(1))  # type: ignore[misc]
        comm.barrier()
        begin = time.perf_counter()
        again, _ = linalg.cg(D, b, M=M, rtol=1e-8)
        seconds = float(comm.allreduce(np.array(time.perf_counter() - begin), "max"))
        bits = int(comm.allreduce(np.array(int(bool((again == x).all()))), "min"))
        found = D.gather(x)
        row = {"what": "cg", "matrix": name, "ranks": comm.size, "unknowns": A.shape[0], "device": device,
               "preconditioner": preconditioner, "iterations": len(steps), "info": info, "seconds": seconds,
               "repeats": bool(bits)}  # fmt: skip
        if found is not None:
            alone: list[int] = []
            N = make(A, problem.modes)
            want, _ = linalg.cg(A, problem.b, M=N, rtol=1e-8, callback=lambda _, s=alone: s.append(1))  # type: ignore[misc]
            row["iterations_of_one"] = len(alone)
            row["difference"] = float(abs(D._backend.to_host(found) - want).max() / abs(want).max())
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure on all ranks; rank 0 writes the file."""
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--unknowns", type=int, nargs="+", default=[3_000, 9_000, 24_000])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--equality", action="store_true", help="no times are wanted")
    options = parser.parse_args(argv)
    comm = as_communicator(MPI.COMM_WORLD)
    clock = Clock(comm, options.device, options.equality)
    few, runs = max(1, options.runs // 300), options.runs
    rows = [] if options.equality else links(comm, clock, runs)
    rows.append(product(comm, clock, bands(SMALL_ROWS * comm.size), "bands", 1, runs, options.device))
    for unknowns in options.unknowns:
        A = bg.bsr_array(problems.cube(unknowns).A)
        for columns in (1,) if unknowns == options.unknowns[-1] else (1, 8):
            rows.append(product(comm, clock, A, "cube", columns, few, options.device))
    rows += solution(comm, problems.cube(options.unknowns[-1]), "cube", options.device)
    if comm.rank == 0:
        options.file.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
