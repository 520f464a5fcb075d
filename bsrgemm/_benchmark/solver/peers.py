"""Other solvers of the same problem, and the time of a call: pyamg on the host, cupyx's matrices on the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .amg import Hierarchy, Jacobi, Solution

TOLERANCE, MOST_ITERATIONS = 1e-8, 200
REPEATS = 5
#: Seconds after which a call on the host is not repeated again
PATIENCE = 2.0


def as_cupyx(A: Any) -> Any:
    """One of our matrices on the GPU, in CSR with sorted rows, as cuSPARSE wants it."""
    csr = A.tocsr()
    csr.sum_duplicates()
    return csr


def by_pyamg(ml: Any, hierarchy: Hierarchy, smoother: Jacobi, b: np.ndarray) -> Callable[[], Solution]:
    """pyamg's CG on its own levels, with the weights of our block Jacobi.

    It makes more products: it takes x = 0 through a full sweep, and computes the residual before and after a cycle.
    pyamg has no Chebyshev with blocks.
    """
    from pyamg.relaxation.smoothing import change_smoothers

    settings = [
        ("block_jacobi", {"omega": smoother.weight(level), "iterations": smoother.sweeps, "withrho": False})
        for level in hierarchy.levels
    ]
    change_smoothers(ml, settings, settings)

    def solve() -> Solution:
        residuals: list[float] = []
        x, failed = ml.solve(
            b, tol=TOLERANCE, maxiter=MOST_ITERATIONS, accel="cg", residuals=residuals, return_info=True
        )
        return Solution(x, None if failed else len(residuals) - 1, [float(norm) for norm in residuals])

    return solve


def synchronize(xp: Any) -> None:
    if xp is not np:
        xp.cuda.Device().synchronize()


class Peer(NamedTuple):
    """What is timed, and where it runs."""

    solve: Callable[[], Solution]
    xp: Any


def timed(call: Callable[[], Any], xp: Any = np, first: bool = True) -> tuple[Any, float]:
    """What a call returns, and its median seconds; `first`: the first one does not count, it compiles and fills.

    On the host it counts if there is no patience for more.
    """
    times: list[float] = []
    for _ in range(REPEATS + first):
        synchronize(xp)
        start = time.perf_counter()
        result = call()
        synchronize(xp)
        times.append(time.perf_counter() - start)
        if xp is np and sum(times) > PATIENCE:
            break
    return result, statistics.median(times[first:] or times)


def timed_peer(ready: Callable[[], Peer]) -> tuple[Solution, float]:
    return timed(*ready())
