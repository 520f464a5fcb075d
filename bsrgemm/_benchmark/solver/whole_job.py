"""From block-COO to x at 1e-8: ours where the matrix is, and CG with Jacobi by cupyx or scipy; solves with ILU(0).

The blocks of A come in an order without sense, on the device. pyamg's whole job is its set-up and solution, see
`systems`: its matrix is there already. Times are wall-clock seconds of warm calls.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np

from ... import bsr_array, get_array_module, linalg
from . import problems
from .timing import RTOL, captured, timed


def block_coo(problem: problems.Problem, xp: Any) -> tuple[Any, Any]:
    """The blocks of a problem and their (row, column), mixed, in arrays of a module."""
    A = problem.A
    rows = np.repeat(np.arange(len(A.indptr) - 1), np.diff(A.indptr))
    order = np.random.default_rng(0).permutation(len(rows))
    return xp.asarray(A.data[order]), (xp.asarray(rows[order]), xp.asarray(A.indices[order].astype(rows.dtype)))


def whole(problem: problems.Problem, device: str, rounds: int) -> dict[str, Any]:
    """Measure construction, set-up of multigrid and CG as one call."""
    A = bsr_array(problem.A).to_device(device)
    xp = get_array_module(A)
    coo, b, modes = block_coo(problem, xp), xp.asarray(problem.b), xp.asarray(problem.modes)
    steps: list[int] = []
    linalg.cg(A, b, M=linalg.smoothed_aggregation(A, modes), rtol=RTOL, callback=lambda x: steps.append(1))

    def job() -> Any:
        made = bsr_array(coo, shape=A.shape)
        return linalg.cg(made, b, M=linalg.smoothed_aggregation(made, modes, theta=problem.strength), rtol=RTOL)

    job()
    (x, info), seconds = timed(job, xp, rounds, wall=True)
    return {"seconds": seconds, "iterations": len(steps), "info": info, "residual": _left(xp, A, x, b)}


def with_jacobi(problem: problems.Problem, device: str, rounds: int) -> dict[str, Any]:
    """Measure CG with Jacobi on CSR by the library of the device: cupyx or scipy; the matrix is there already."""
    A = bsr_array(problem.A).to_device(device).tocsr()
    if device == "cuda":
        import cupy as xp
        from cupyx.scipy.sparse import linalg as library
    else:
        xp = np
        from scipy.sparse import linalg as library
    b, inverse = xp.asarray(problem.b), 1 / A.diagonal()
    M = library.LinearOperator(A.shape, matvec=lambda r: inverse * r.ravel(), dtype=A.dtype)
    tolerance = "rtol" if "rtol" in inspect.signature(library.cg).parameters else "tol"  # CuPy before 14
    steps: list[int] = []
    library.cg(A, b, M=M, callback=lambda x: steps.append(1), **{tolerance: RTOL})
    (x, info), seconds = timed(lambda: library.cg(A, b, M=M, **{tolerance: RTOL}), xp, rounds, wall=True)
    return {"seconds": seconds, "iterations": len(steps), "info": int(info), "residual": _left(xp, A, x, b)}


def _left(xp: Any, A: Any, x: Any, b: Any) -> float:
    return float(xp.linalg.norm(b - A @ x) / xp.linalg.norm(b))


def decompositions(problem: problems.Problem, device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Measure solves with ILU(0) and block triangles as multiples of ``A @ x``; on a card also both in CUDA graphs."""
    A = bsr_array(problem.A).to_device(device)
    xp = get_array_module(A)
    b = xp.asarray(problem.b)

    def seconds(function: Any) -> dict[str, float]:
        function()
        taken = {"seconds": timed(function, xp, max(rounds, 10), wall=True)[1]}
        if device == "cuda":
            taken["replayed"] = timed(captured(function, xp), xp, max(rounds, 10), wall=True)[1]
        return taken

    product = seconds(lambda: A @ b)
    found = {}
    for make in (linalg.ilu0, linalg.ic0, linalg.block_ssor):
        M, setup = timed(partial(make, A), xp, 1, wall=True)
        taken = seconds(partial(M.__matmul__, b))
        row = {"setup": setup, "product": product["seconds"], "multiple": taken["seconds"] / product["seconds"]}
        if "replayed" in taken:
            row["multiple_replayed"] = taken["replayed"] / product["replayed"]
        found[make.__name__] = row | taken
    return found


def direct(problem: problems.Problem, device: str, rounds: int) -> dict[str, Any]:
    """Measure a direct solution, ordering and decomposition included: by cuDSS on a card, by SuperLU on the host."""
    A = bsr_array(problem.A).to_device(device)
    xp = get_array_module(A)
    b = xp.asarray(problem.b)
    linalg.spsolve(A, b)
    x, seconds = timed(partial(linalg.spsolve, A, b), xp, rounds, wall=True)
    return {"seconds": seconds, "iterations": None, "info": 0, "residual": _left(xp, A, x, b)}
