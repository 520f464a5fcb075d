"""What each rank of MPI runs for the studies `ranks` and `ring`; rank 0 writes what was found to a file.

``mpiexec -n 2 python -m bench.ranks FILE ring`` is how `studies.ranks` starts it. A time is the least of medians, or of
calls, because other programs may share the cores; the slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
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
    """Medians over calls that all ranks make together, the least of some; with `off` a call is made once, in time 0."""

    def __init__(self, comm: Any, device: str, off: bool) -> None:
        self._comm, self._wait, self._off = comm, lambda: None, off
        if device == "cuda":
            import cupy

            self._wait = lambda: cupy.cuda.get_current_stream().synchronize()

    def __call__(self, call: Callable[[], Any], runs: int) -> float:
        call()
        if self._off:
            return 0.0
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


# --------------------------------------------------------------------------------------- a matrix
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
    diagonals = [np.ones(rows - abs(k)) for k in SMALL_BANDS]
    S = scipy.sparse.diags_array(diagonals, offsets=SMALL_BANDS).tocoo()
    data = np.random.default_rng(0).standard_normal((S.nnz, 3, 3))
    return bg.bsr_array((data, (S.row, S.col)), shape=(3 * rows, 3 * rows))


def least_bytes(A: Any, D: Any) -> int:
    """The bytes that a rank cannot do without: distinct columns of its rows that others have, by the whole pattern."""
    R = A.blocksize[0]
    first, last = D.rows.start // R, D.rows.stop // R
    needed = np.zeros(A.shape[1] // R, bool)
    needed[A.indices[A.indptr[first] : A.indptr[last]]] = True
    needed[first:last] = False
    return int(needed.sum()) * R * A.dtype.itemsize


def links(comm: Any, clock: Clock, runs: int) -> list[Row]:
    """Two neighbours exchange messages of some sizes; a sum over all ranks."""
    if comm.size == 1:
        return []
    other = comm.rank ^ 1
    found = []
    for size in MESSAGES:
        out, into = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        sends, receives = ({other: out}, {other: into}) if other < comm.size else ({}, {})
        seconds = clock(partial(_sent, comm, sends, receives), runs)
        found.append({"what": f"message of {size:,} B", "ranks": comm.size, "seconds": seconds})
    number = np.zeros(1)
    seconds = clock(lambda: comm.allreduce(number), runs)
    return [*found, {"what": "sum over all ranks", "ranks": comm.size, "seconds": seconds}]


def _sent(comm: Any, sends: Any, receives: Any) -> None:
    comm.exchange(sends, receives).wait()


def product(comm: Any, clock: Clock, A: Any, name: str, runs: int, device: str) -> Row:
    """``A @ x``: whole, the part of a rank by itself, bytes, and how it differs from that of one rank.

    "hidden" is the share of an exchange that does not lengthen the product, by the time of one without messages;
    "slow_hidden" is the same for messages that come when half of the interior product has passed.
    """
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
    row["seconds"] = clock(lambda: D @ x, runs)
    row["local"] = clock(lambda: panel @ everything, runs)
    sums = comm.allreduce(np.array([D.halo_bytes(1), least_bytes(A, D)], np.int64))
    row["halo_bytes"], row["least_bytes"] = (int(v) for v in sums)
    if comm.size > 1:
        silent, slow = with_messages(D, None), with_messages(D, clock(lambda: D.interior @ x, runs) / 2)
        without = clock(lambda: silent @ x, runs)
        for key, matrix in (("hidden", D), ("slow_hidden", slow)):
            seconds = clock(lambda matrix=matrix: matrix @ x, runs)  # type: ignore[misc]
            exchange = clock(lambda matrix=matrix: matrix._halo.fetch(x)[0].wait(), runs)  # type: ignore[misc]
            row[key] = min(1.0, max(0.0, 1 - (seconds - without) / exchange)) if exchange else None
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
    clock = Clock(comm, options.device, options.equality)
    few, runs = max(1, options.runs // 300), options.runs
    rows = [] if options.equality else links(comm, clock, runs)
    rows.append(product(comm, clock, bands(SMALL_ROWS * comm.size), "bands", runs, options.device))
    for size in options.sizes:
        A = bg.bsr_array(problems.cube(size).A)
        rows.append(product(comm, clock, A, "a cube", few, options.device))
    return rows + solution(comm, problems.cube(options.sizes[-1]), options.device)


# -------------------------------------------------------------------------------------- attention
class _Counted:
    """A communicator that counts the bytes that it sends, and the processor time for which it waits for others."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self.sent, self.waited = 0, 0.0

    def exchange(self, sends: Any, receives: Any) -> Any:
        self.sent += sum(array.nbytes for array in sends.values())
        return _CountedMessages(self, self._comm.exchange(sends, receives))

    def allgather(self, array: Any) -> Any:
        return self.waiting(lambda: self._comm.allgather(array))

    def waiting(self, call: Callable[[], Any]) -> Any:
        begin = time.process_time()
        found = call()
        self.waited += time.process_time() - begin
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


class _CountedMessages:
    def __init__(self, comm: _Counted, messages: Any) -> None:
        self._comm, self._messages = comm, messages

    def wait(self) -> None:
        self._comm.waiting(self._messages.wait)


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
    parser.add_argument("--equality", action="store_true", help="no times are wanted")
    options = parser.parse_args()
    comm = as_communicator(MPI.COMM_WORLD)
    rows = {"matrices": matrices, "ring": ring}[options.what](comm, options)
    if comm.rank == 0:
        options.file.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
