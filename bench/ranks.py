"""What each rank of MPI runs for the studies `ranks` and `ring`; rank 0 writes what was found to a file.

``mpiexec -n 2 python -m bench.ranks FILE ring`` is how `studies.ranks` starts it. A time is the least of medians, or of
calls, because other programs may share the cores; the slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.interop import mpi
from bsrgemm.interop.communicator import as_communicator
from bsrgemm.interop.mpi import multigrid

from .solvers import problems

Row = dict[str, Any]
#: Block rows of a rank in the small product, and offsets of its bands: a grid of 20 nodes a line
SMALL_ROWS, SMALL_BANDS = 300, (-20, -1, 0, 1, 20)
#: Medians of which the least counts, and calls of a product at least
ROUNDS, CALLS = 10, 100
#: Bytes of messages
MESSAGES = (8, 1 << 10, 1 << 16, 1 << 20)
#: Attention over ranks: heads, KV heads, columns; name -> options of the call
HEADS, KV_HEADS, DIM = 4, 2, 64
RULES: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window": (255, 0)}}


class Clock:
    """Medians over calls that all ranks make together, the least of some."""

    def __init__(self, comm: Any, device: str) -> None:
        self._comm, self._wait = comm, lambda: None
        if device == "cuda":
            import cupy

            self._wait = lambda: cupy.cuda.get_current_stream().synchronize()

    def __call__(self, call: Callable[[], Any], runs: int) -> float:
        call()
        medians = []
        for _ in range(max(ROUNDS, CALLS // runs)):
            times = np.empty(runs)
            self._comm.barrier()
            for k in range(runs):
                begin = time.perf_counter()
                call()
                self._wait()
                times[k] = time.perf_counter() - begin
            medians.append(float(self._comm.allreduce(np.array(np.median(times)), "max")))
        return min(medians)


def bands(rows: int) -> Any:
    """A banded matrix of 3 x 3 blocks."""
    diagonals = [np.ones(rows - abs(k)) for k in SMALL_BANDS]
    S = scipy.sparse.diags_array(diagonals, offsets=SMALL_BANDS).tocoo()
    data = np.random.default_rng(0).standard_normal((S.nnz, 3, 3))
    return bg.bsr_array((data, (S.row, S.col)), shape=(3 * rows, 3 * rows))


def links(comm: Any, clock: Clock, runs: int) -> list[Row]:
    """Two neighbours exchange messages of some sizes; a sum over all ranks."""
    found = []
    other = comm.rank ^ 1
    for size in MESSAGES if comm.size > 1 else ():
        out, into = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        sends, receives = ({other: out}, {other: into}) if other < comm.size else ({}, {})
        seconds = clock(lambda sends=sends, receives=receives: comm.exchange(sends, receives).wait(), runs)  # type: ignore[misc]
        found.append({"what": f"message of {size:,} B", "ranks": comm.size, "seconds": seconds})
    number = np.zeros(1)
    return [*found, {"what": "a sum", "ranks": comm.size, "seconds": clock(lambda: comm.allreduce(number), runs)}]


def product(comm: Any, clock: Clock, A: Any, name: str, runs: int, device: str) -> Row:
    """``A @ x``: whole, the part of a rank by itself, bytes, and how it differs from that of one rank."""
    D = mpi.partition(A if comm.rank == 0 else None, comm, device=device)
    whole = np.random.default_rng(1).standard_normal(A.shape[1])
    x = D.scatter(D._backend.from_host(whole) if comm.rank == 0 else None)
    y, again = D.gather(D @ x), D.gather(D @ x)
    row: Row = {"what": f"A @ x, {name}, {A.shape[0] // A.blocksize[0]:,} block rows", "ranks": comm.size}
    if y is not None and again is not None:
        want, found = A @ whole, D._backend.to_host(y)
        row["error"] = float(abs(found - want).max() / abs(want).max())
        row["repeats"] = found.tobytes() == D._backend.to_host(again).tobytes()
    panel, everything = D.panel(), D._backend.from_host(whole)
    row |= {"seconds": clock(lambda: D @ x, runs), "local": clock(lambda: panel @ everything, runs)}
    row["exchange"] = clock(lambda: D._halo.fetch(x)[0].wait(), runs)
    row["halo_bytes"] = int(comm.allreduce(np.array(D.halo_bytes(1), np.int64)))
    return row


def solution(comm: Any, problem: Any, device: str) -> list[Row]:
    """Conjugate gradients with each preconditioner: iterations of all ranks and of one process."""
    A = bg.bsr_array(problem.A)
    D = mpi.partition(A if comm.rank == 0 else None, comm, device=device)
    b, modes = (
        D.scatter(D._backend.from_host(x) if comm.rank == 0 else None) for x in (problem.b, problem.modes)
    )  # fmt: skip
    # as small as one process would make it, so that some levels are spread on a small problem too
    multigrid.GATHERED_ROWS = 500 // comm.size
    made: dict[str, Callable[[Any, Any], Any]] = {
        "block Jacobi": lambda A, modes: linalg.block_jacobi(A),
        "Chebyshev": lambda A, modes: linalg.chebyshev(A),
        "multigrid": linalg.smoothed_aggregation,
    }
    rows = []
    for name, make in made.items():
        M, steps = make(D, modes), list[int]()
        x, _ = linalg.cg(D, b, M=M, rtol=1e-8, callback=lambda _, s=steps: s.append(1))  # type: ignore[misc]
        comm.barrier()
        begin = time.perf_counter()
        again, _ = linalg.cg(D, b, M=M, rtol=1e-8)
        seconds = float(comm.allreduce(np.array(time.perf_counter() - begin), "max"))
        bits = int(comm.allreduce(np.array(int(bool((again == x).all()))), "min"))
        row = {"what": f"cg, {A.shape[0]:,} unknowns, {name}", "ranks": comm.size, "seconds": seconds,
               "iterations": len(steps), "repeats": bool(bits)}  # fmt: skip
        found = D.gather(x)
        if found is not None:
            alone: list[int] = []
            N = make(A, problem.modes)
            want, _ = linalg.cg(A, problem.b, M=N, rtol=1e-8, callback=lambda _, s=alone: s.append(1))  # type: ignore[misc]
            row["iterations_of_one"] = len(alone)
            row["error"] = float(abs(D._backend.to_host(found) - want).max() / abs(want).max())
        rows.append(row)
    return rows


def matrices(comm: Any, options: argparse.Namespace) -> list[Row]:
    """Messages, products and conjugate gradients."""
    clock = Clock(comm, options.device)
    few, runs = max(1, options.runs // 300), options.runs
    rows = links(comm, clock, runs)
    rows.append(product(comm, clock, bands(SMALL_ROWS * comm.size), "bands", runs, options.device))
    for size in options.sizes:
        A = bg.bsr_array(problems.cube(size).A)
        rows.append(product(comm, clock, A, "a cube", few, options.device))
    return rows + solution(comm, problems.cube(options.sizes[-1]), options.device)


class _Counted:
    """A communicator that counts the bytes that it sends, and the processor time for which it waits for others."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self.sent, self.waited = 0, 0.0

    def exchange(self, sends: Any, receives: Any) -> Any:
        self.sent += sum(array.nbytes for array in sends.values())
        messages = self._comm.exchange(sends, receives)
        return SimpleNamespace(wait=lambda: self._waiting(messages.wait))

    def allgather(self, array: Any) -> Any:
        return self._waiting(lambda: self._comm.allgather(array))

    def _waiting(self, call: Callable[[], Any]) -> Any:
        begin = time.process_time()
        found = call()
        self.waited += time.process_time() - begin
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def busy(comm: Any, call: Callable[[Any], Any], runs: int) -> float:
    """Processor seconds of a call outside of messages: a rank that waits keeps its processor busy."""
    found = []
    for _ in range(runs):
        counted = _Counted(comm)
        comm.barrier()
        begin = time.process_time()
        call(counted)
        took = time.process_time() - begin - counted.waited
        found.append(float(comm.allreduce(np.array(took), "max")))
    return min(found)


def ring(comm: Any, options: argparse.Namespace) -> list[Row]:
    """Attention, forward and backward: times, bytes, and how it differs from one rank."""
    return [_ring(comm, tokens, rule, options.runs) for tokens in options.sizes for rule in RULES]


def _ring(comm: Any, tokens: int, rule: str, runs: int) -> Row:
    options = RULES[rule]
    shapes = ((1, HEADS, tokens, DIM), (1, KV_HEADS, tokens, DIM), (1, KV_HEADS, tokens, DIM), (1, HEADS, tokens, DIM))
    whole = [np.random.default_rng(i).standard_normal(shape, np.float32) for i, shape in enumerate(shapes)]
    q, k, v, dout = (mpi.zigzag_split(x, comm.rank, comm.size) for x in whole)
    counted = _Counted(comm)
    out, lse = mpi.ring_attention(q, k, v, comm=counted, return_lse=True, **options)
    sent = int(comm.allreduce(np.array(counted.sent), "max"))
    gradients = mpi.ring_attention_backward(dout, q, k, v, out, lse, comm=comm, **options)
    want, pullback = bg.vjp(bg.attention, *whole[:3], **options)
    errors = [
        abs(x - mpi.zigzag_split(y, comm.rank, comm.size)).max() / abs(y).max()
        for x, y in zip((out, *gradients), [want, *pullback(whole[3])], strict=True)
    ]

    def backward(comm: Any) -> Any:
        return mpi.ring_attention_backward(dout, q, k, v, out, lse, comm=comm, **options)

    return {
        "what": f"{rule}, {tokens:,} tokens", "ranks": comm.size, "sent_bytes": sent,
        "seconds": busy(comm, lambda comm: mpi.ring_attention(q, k, v, comm=comm, **options), runs),
        "backward": busy(comm, backward, runs), "error": float(comm.allreduce(np.array(max(errors)), "max")),
    }  # fmt: skip


def main() -> None:
    """Measure on all ranks; rank 0 writes the file."""
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("what", choices=["matrices", "ring"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--runs", type=int, required=True)
    options = parser.parse_args()
    comm = as_communicator(MPI.COMM_WORLD)
    rows = {"matrices": matrices, "ring": ring}[options.what](comm, options)
    if comm.rank == 0:
        options.file.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
