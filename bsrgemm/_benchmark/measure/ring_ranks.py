"""What each rank runs for the benchmark of attention over several ranks; rank 0 writes what was found to a file.

``mpiexec -n 2 python -m bsrgemm._benchmark.measure.ring_ranks FILE`` is how `ring` starts it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm.interop import mpi
from bsrgemm.interop.communicator import as_communicator

from .scale_ranks import Clock, links

HEADS, KV_HEADS, DIM = 4, 2, 64
#: name: options of the call
RULES: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window": (255, 0)}}


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


def busy(comm: Any, call: Callable[[Any], Any], runs: int) -> tuple[float, float]:
    """Seconds of a call: of the processor outside of messages, and by the clock; least of some calls, slowest rank.

    A rank that waits for another one keeps its processor busy, and other programs may hold up either.
    """
    found = []
    for _ in range(runs):
        counted = _Counted(comm)
        comm.barrier()
        begin, clock = time.process_time(), time.perf_counter()
        call(counted)
        took = time.process_time() - begin - counted.waited, time.perf_counter() - clock
        found.append(comm.allreduce(np.array(took), "max"))
    least = np.min(found, axis=0)
    return float(least[0]), float(least[1])


def measured(comm: Any, tokens: int, rule: str, runs: int) -> dict[str, Any]:
    """One problem, forward and backward: times, bytes, and how it differs from one rank."""
    options = RULES[rule]
    shapes = ((1, HEADS, tokens, DIM), (1, KV_HEADS, tokens, DIM), (1, KV_HEADS, tokens, DIM), (1, HEADS, tokens, DIM))
    whole = [np.random.default_rng(i).standard_normal(shape, np.float32) for i, shape in enumerate(shapes)]
    q, k, v, dout = (mpi.zigzag_split(x, comm.rank, comm.size) for x in whole)
    counted = _Counted(comm)
    out, lse = mpi.ring_attention(q, k, v, comm=counted, return_lse=True, **options)
    sent = int(comm.allreduce(np.array(counted.sent), "max"))
    gradients = mpi.ring_attention_backward(dout, q, k, v, out, lse, comm=comm, **options)
    want, pullback = bg.vjp(bg.attention, *whole[:3], **options)
    wanted = [want, *pullback(whole[3])]
    errors = [
        abs(x - mpi.zigzag_split(y, comm.rank, comm.size)).max() / abs(y).max()
        for x, y in zip((out, *gradients), wanted, strict=True)
    ]
    forward = busy(comm, lambda comm: mpi.ring_attention(q, k, v, comm=comm, **options), runs)
    backward = busy(comm, lambda comm: mpi.ring_attention_backward(dout, q, k, v, out, lse, comm=comm, **options), runs)
    return {
        "what": "attention",
        "rule": rule,
        "tokens": tokens,
        "ranks": comm.size,
        "sent_bytes": sent,
        "error": float(comm.allreduce(np.array(max(errors)), "max")),
        "forward": forward[0],
        "backward": backward[0],
        "forward_clock": forward[1],
        "backward_clock": backward[1],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure on all ranks; rank 0 writes the rows."""
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--runs", type=int, required=True)
    options = parser.parse_args(argv)
    comm = as_communicator(MPI.COMM_WORLD)
    rows = links(comm, Clock(comm, "cpu", off=False), 20)
    for tokens in options.tokens:
        for rule in RULES:
            rows.append(measured(comm, tokens, rule, options.runs))
    if comm.rank == 0:
        options.path.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
