"""Linear systems of elasticity: a multigrid cycle on several libraries' matrices, `bsrgemm.linalg` beside pyamg.

Times of solvers on the CPU are CPU times; on a card they are times by the clock, of a device that has finished, and so
are those of pyamg beside it. The least of some calls counts.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm import linalg

from ..data import as_scipy
from ..measure import Row, Run, reason_of
from ..place import Call, Place
from ..report import TIME, Column, Peers, duration, field, three, times
from ..solvers import problems
from ..solvers.amg import Chebyshev, ConjugateGradients, Cycle, Hierarchy, Jacobi, Smoother, Solution, built
from ..solvers.problems import Problem
from ..study import Study

RTOL, MOST_ITERATIONS = 1e-8, 200
SMOOTHERS: dict[str, Smoother] = {"jacobi": Jacobi(), "chebyshev": Chebyshev()}
#: Unknowns of the largest problem that scipy and pyamg are given, which need tens of seconds for it
_MOST_ON_HOST = {"cuda": 1_100_000, "cpu": 50_000}
#: A cube with more unknowns fills memory, or takes minutes, if it is solved directly
_MOST_DIRECT = {"cuda": 300_000, "cpu": 10_000}
_SMOOTHING = ("chebyshev", {"degree": 2})


def unknowns(place: Place) -> tuple[int, ...]:
    """About how many a study solves for."""
    every = (250_000, 1_000_000, 4_000_000) if place.on_gpu else (20_000, 80_000)
    return tuple(place.some(every, (30_000,) if place.on_gpu else (4_000,)))


def timed(call: Call, place: Place, rounds: int = 3, wall: bool = False) -> tuple[Any, float]:
    """What a call returns, and its least time."""
    if place.quick:
        rounds = 1
    clock = time.perf_counter if place.on_gpu or wall else time.process_time
    found, best = None, float("inf")
    for _ in range(rounds):
        place.synchronize()
        start = clock()
        found = call()
        place.synchronize()
        best = min(best, clock() - start)
    return found, best


def system(problem: Problem, place: Place) -> tuple[Any, Any, Any]:
    """A, b and the near-nullspace modes where they are solved."""
    xp = place.xp
    return bg.bsr_array(problem.A).to_device(place.device), xp.asarray(problem.b), xp.asarray(problem.modes)


def residual(A: Any, x: Any, b: Any) -> float:
    """The norm of b - A x over that of b."""
    r = b - A @ x
    return math.sqrt(float(r @ r) / float(b @ b))


def attempted(run: Run, name: str, n: int, who: str, measure: Callable[[], dict[str, Any]]) -> Iterator[Row]:
    """The row with what was measured, or with the reason why there is nothing; none for a missing package."""
    row: Row = {"what": f"{name}, {n:,} unknowns, {who}", "unknowns": n, "who": who}
    try:
        row |= measure()
        if not row.get("residual", 0.0) <= 1.1 * RTOL:
            row |= {"wrong": True, "error": row["residual"] / RTOL}
    except ImportError:
        run.absent[who] = None
        return
    except Exception as error:
        row["failed"] = reason_of(error)
    finally:
        run.place.release()
    yield row


# ------------------------------------------------------------------------ one algorithm, many libraries
def elasticity(run: Run) -> Iterator[Row]:
    """CG with a V-cycle to 1e-8 (pyamg issue 260): pyamg builds the hierarchy on the host, and bsrgemm solves.

    2d: a plate of bilinear squares, with blocks of 2 x 2, 2 x 3 and 3 x 3. 3d: a cube of trilinear hexahedra, held on
    one face: 3 x 3, 3 x 6, 6 x 6. Beside it the same algorithm with the matrices of cupyx or scipy, and pyamg's own CG
    with the same block Jacobi.
    """
    place = run.place
    for size, name in product(unknowns(place), problems.PROBLEMS):
        problem = problems.PROBLEMS[name](size)
        try:
            ml = built(problem)
            host = Hierarchy.of(ml.levels)
            ours = host.moved(lambda M: M.to_device(place.device))
        except ImportError:
            run.absent["pyamg, which makes the hierarchies of elasticity"] = None
            return
        for smoother in place.some(list(SMOOTHERS), ["jacobi"]):
            measure = partial(_cycle, run, problem, ml, host, ours, smoother)
            yield from attempted(run, name, len(problem.b), smoother, measure)


def _cycle(run: Run, problem: Problem, ml: Any, host: Hierarchy, ours: Hierarchy, name: str) -> dict[str, Any]:
    place, smoother = run.place, SMOOTHERS[name]
    b = place.xp.asarray(problem.b)
    cycle = Cycle(ours, smoother)
    solve = ConjugateGradients(cycle)
    solution = solve(b, RTOL, MOST_ITERATIONS)
    row: Row = {"iterations": solution.iterations, "residual": residual(ours.levels[0].A, solution.x, b), "peers": {}}
    row["seconds"] = timed(lambda: solve(b, RTOL, MOST_ITERATIONS), place, 5, wall=True)[1]
    if place.on_gpu:
        row |= {"graph": solution.graph, "refusal": solution.refusal}
        plain = ConjugateGradients(cycle, graph=False)
        plain(b, RTOL, MOST_ITERATIONS)
        row["launched"] = timed(lambda: plain(b, RTOL, MOST_ITERATIONS), place, 3)[1]

    def same(source: Hierarchy, convert: Callable[[Any], Any]) -> Callable[[], Solution]:
        """The same algorithm with other matrices."""
        moved = source.moved(convert)
        theirs = ConjugateGradients(Cycle(moved, smoother))
        right = bg.get_array_module(moved.levels[0].A).asarray(problem.b)
        theirs(right, RTOL, MOST_ITERATIONS)
        return lambda: theirs(right, RTOL, MOST_ITERATIONS)

    peers: dict[str, Callable[[], Callable[[], Solution]]] = {}
    if place.on_gpu:
        peers["cupyx csr"] = lambda: same(ours, _sorted_csr)
    if len(problem.b) <= _MOST_ON_HOST[place.device]:
        peers["scipy bsr"] = lambda: same(host, as_scipy)
        if isinstance(smoother, Jacobi):  # pyamg has no Chebyshev with blocks
            peers["pyamg"] = lambda: _by_pyamg(ml, host, smoother, problem.b)
    for who, make in peers.items() if run.with_peers else ():
        try:
            theirs, seconds = timed(make(), place, 1, wall=True)
            row["peers"][who] = {"seconds": seconds, "ratio": seconds / row["seconds"], "iterations": theirs.iterations}
        except Exception as error:
            row["peers"][who] = {"failed": reason_of(error)}
    return row


def _sorted_csr(M: Any) -> Any:
    """In CSR with sorted rows, as cuSPARSE wants it."""
    csr = M.tocsr()
    csr.sum_duplicates()
    return csr


def _by_pyamg(ml: Any, hierarchy: Hierarchy, smoother: Jacobi, b: np.ndarray[Any, Any]) -> Callable[[], Solution]:
    """pyamg's CG on its own levels, with the weights of our block Jacobi; it makes a few more products."""
    from pyamg.relaxation.smoothing import change_smoothers

    settings = [
        ("block_jacobi", {"omega": smoother.weight(level), "iterations": smoother.sweeps, "withrho": False})
        for level in hierarchy.levels
    ]
    change_smoothers(ml, settings, settings)

    def solve() -> Solution:
        left: list[float] = []
        x, failed = ml.solve(b, tol=RTOL, maxiter=MOST_ITERATIONS, accel="cg", residuals=left, return_info=True)
        return Solution(x, None if failed else len(left) - 1, [float(norm) for norm in left])

    return solve


# ------------------------------------------------------------------------------------ bsrgemm.linalg
def systems(run: Run) -> Iterator[Row]:
    """Set-up of smoothed aggregation, new numbers for it, and CG: in float64, with float32 in M, and by pyamg."""
    place = run.place
    for size, name in product(unknowns(place), ("cube", "plate")):
        problem = {"cube": problems.cube, "plate": problems.plate}[name](size)
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "bsrgemm": partial(_ours, problem, place, "float64"),
            "bsrgemm, float32 in M": partial(_ours, problem, place, "float32"),
        }
        if run.with_peers and len(problem.b) <= _MOST_ON_HOST[place.device]:
            makers["pyamg, on the host"] = partial(_theirs, problem, place)
        for who, measure in makers.items():
            yield from attempted(run, name, len(problem.b), who, measure)


def _ours(problem: Problem, place: Place, dtype: str) -> dict[str, Any]:
    """`smoothed_aggregation`, `refresh` and `cg`; the preconditioner computes in `dtype`."""
    A, b, modes = system(problem, place)
    narrow = A.astype(dtype)
    linalg.smoothed_aggregation(narrow, modes)
    M, setup = timed(lambda: linalg.smoothed_aggregation(narrow, modes), place)
    _, refresh = timed(lambda: M.refresh(narrow), place)
    steps: list[int] = []
    linalg.cg(A, b, M=M, rtol=RTOL, callback=lambda x: steps.append(1))
    # without a callback, iterations are replayed as a CUDA graph on a card
    (x, _), seconds = timed(lambda: linalg.cg(A, b, M=M, rtol=RTOL), place)
    return {"setup": setup, "refresh": refresh, "seconds": seconds, "iterations": len(steps),
            "levels": len(M.levels), "residual": residual(A, x, b)}  # fmt: skip


def _theirs(problem: Problem, place: Place) -> dict[str, Any]:
    """pyamg's hierarchy and its CG, with the same smoother and without a threshold for strong connections."""
    import pyamg
    import scipy.sparse

    A = scipy.sparse.bsr_matrix((problem.A.data, problem.A.indices, problem.A.indptr), shape=problem.A.shape)
    smooth = ("jacobi", {"omega": 4 / 3})
    left: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = partial(pyamg.smoothed_aggregation_solver, A, B=problem.modes, strength=None, smooth=smooth,
                       max_coarse=500, presmoother=_SMOOTHING, postsmoother=_SMOOTHING)  # fmt: skip
        ml, setup = timed(make, place, 1)

        def solve() -> Any:
            left.clear()
            return ml.solve(problem.b, tol=RTOL, accel="cg", residuals=left)

        x, seconds = timed(solve, place, 1)
    return {"setup": setup, "seconds": seconds, "iterations": len(left) - 1, "levels": len(ml.levels),
            "residual": residual(problem.A, x, problem.b)}  # fmt: skip


def jobs(run: Run) -> Iterator[Row]:
    """From block-COO, in an order without sense, to x at 1e-8; by the library of the device with Jacobi; directly."""
    place = run.place
    for problem in map(problems.cube, unknowns(place)):
        n = len(problem.b)
        makers: dict[str, Callable[[], dict[str, Any]]] = {"bsrgemm, block-COO to x": partial(_whole, problem, place)}
        if run.with_peers:
            library = "cupyx" if place.on_gpu else "scipy"
            makers[f"{library} cg, Jacobi"] = partial(_with_jacobi, problem, place)
        if n <= _MOST_DIRECT[place.device]:
            makers["bsrgemm, spsolve"] = partial(_direct, problem, place)
        for who, measure in makers.items():
            yield from attempted(run, "cube", n, who, measure)


def _whole(problem: Problem, place: Place) -> dict[str, Any]:
    """Construction, set-up of multigrid and CG as one call."""
    A, b, modes = system(problem, place)
    host = problem.A
    rows = np.repeat(np.arange(len(host.indptr) - 1), np.diff(host.indptr))
    order = np.random.default_rng(0).permutation(len(rows))
    blocks, i, j = map(place.xp.asarray, (host.data[order], rows[order], host.indices[order].astype(rows.dtype)))
    steps: list[int] = []
    linalg.cg(A, b, M=linalg.smoothed_aggregation(A, modes), rtol=RTOL, callback=lambda x: steps.append(1))

    def job() -> Any:
        made = bg.bsr_array((blocks, (i, j)), shape=A.shape)
        return linalg.cg(made, b, M=linalg.smoothed_aggregation(made, modes), rtol=RTOL)

    job()
    (x, _), seconds = timed(job, place, wall=True)
    return {"seconds": seconds, "iterations": len(steps), "residual": residual(A, x, b)}


def _with_jacobi(problem: Problem, place: Place) -> dict[str, Any]:
    """CG with Jacobi on CSR by cupyx or scipy; the matrix is there already."""
    A = bg.bsr_array(problem.A).to_device(place.device).tocsr()
    if place.on_gpu:
        from cupyx.scipy.sparse import linalg as library
    else:
        from scipy.sparse import linalg as library
    b, inverse = place.xp.asarray(problem.b), 1 / A.diagonal()
    M = library.LinearOperator(A.shape, matvec=lambda r: inverse * r.ravel(), dtype=A.dtype)
    steps: list[int] = []
    library.cg(A, b, M=M, rtol=RTOL, callback=lambda x: steps.append(1))
    (x, _), seconds = timed(lambda: library.cg(A, b, M=M, rtol=RTOL), place, wall=True)
    return {"seconds": seconds, "iterations": len(steps), "residual": residual(A, x, b)}


def _direct(problem: Problem, place: Place) -> dict[str, Any]:
    """Ordering, decomposition and solution: by cuDSS on a card, by SuperLU on the host."""
    A, b, _ = system(problem, place)
    linalg.spsolve(A, b)
    x, seconds = timed(partial(linalg.spsolve, A, b), place, wall=True)
    return {"seconds": seconds, "residual": residual(A, x, b)}


def preconditioners(run: Run) -> Iterator[Row]:
    """Solves with ILU(0), IC(0) and SSOR, colour by colour, beside ``A @ x``; on a card also both in CUDA graphs."""
    place = run.place
    for problem in map(problems.cube, unknowns(place)):
        A, b, _ = system(problem, place)
        for make in (linalg.ilu0, linalg.ic0, linalg.block_ssor):
            yield from attempted(run, "cube", len(b), make.__name__, partial(_apply, make, A, b, place))


def _apply(make: Callable[[Any], Any], A: Any, b: Any, place: Place) -> dict[str, Any]:
    M, setup = timed(partial(make, A), place, 1, wall=True)
    seconds, beside = (place.waited_seconds(call, 10) for call in (lambda: M @ b, lambda: A @ b))
    row = {"setup": setup, "seconds": seconds, "multiple": seconds / beside}
    if place.on_gpu:
        replayed, beside = (
            place.waited_seconds(place.captured(call), 10) for call in (lambda: M @ b, lambda: A @ b)
        )  # fmt: skip
        row |= {"replayed": replayed, "multiple_replayed": replayed / beside}
    return row


_ITERATIONS = field("iterations", "iterations", str)
_RATE = Column("unknowns a second", lambda row: three(row["unknowns"] / row["seconds"]) if row.get("seconds") else "")
STUDIES: tuple[Study, ...] = (
    Study("elasticity", "CG with a V-cycle of smoothed aggregation to 1e-8, on the matrices of several libraries",
          elasticity, (TIME, _ITERATIONS, field("without a graph", "launched", duration), Peers())),
    Study("solvers", "set-up of smoothed aggregation by bg.linalg, new numbers for it, and CG to 1e-8", systems,
          (field("set-up", "setup", duration), field("refresh", "refresh", duration),
           field("solution", "seconds", duration), _ITERATIONS)),
    Study("solver-jobs", "whole jobs, elasticity of a cube: from block-COO to x at 1e-8", jobs,
          (TIME, _RATE, _ITERATIONS)),
    Study("preconditioners", "M @ r of incomplete decompositions and SSOR, beside A @ x", preconditioners,
          (field("set-up", "setup", duration), TIME, field("times A @ x", "multiple", times),
           field("in a graph", "replayed", duration), field("times A @ x in a graph", "multiple_replayed", times))),
)  # fmt: skip
