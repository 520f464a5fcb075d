"""`bsrgemm.linalg` beside pyamg: set-up, new numbers and solution of elasticity, on the CPU or on a card.

Times on the CPU are CPU times, the least of three; on a card they are wall-clock times of a device that has finished,
warm kernels, those of pyamg beside it too. The matrix and its near-nullspace lie where the work is done. pyamg works on
the host in any case, with the same smoother and without a threshold for strong connections.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ... import bsr_array, get_array_module, linalg
from .. import machine, provenance
from ..table import Table, writing
from . import problems, whole_job
from .timing import RTOL, timed

#: How often each step is measured; the least counts.
ROUNDS = 3
#: Unknowns of the largest problem that pyamg is given, which needs tens of seconds for it.
_MOST_OF_PYAMG = 1_000_000
#: A cube with more unknowns fills memory, or takes minutes, if it is solved directly.
_MOST_DIRECT = {"cuda": 300_000, "cpu": 10_000}
SMOOTHING = ("chebyshev", {"degree": 2})


def ours(problem: problems.Problem, device: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Measure `smoothed_aggregation`, `refresh` and `cg` on a device; the preconditioner computes in `dtype`."""
    A = bsr_array(problem.A).to_device(device)
    xp = get_array_module(A)
    b, modes = xp.asarray(problem.b), xp.asarray(problem.modes)
    narrow = A.astype(dtype)
    M, setup = timed(lambda: linalg.smoothed_aggregation(narrow, modes, theta=problem.strength), xp, rounds)
    _, refresh = timed(lambda: M.refresh(narrow), xp, rounds)
    steps: list[int] = []
    linalg.cg(A, b, M=M, rtol=RTOL, callback=lambda x: steps.append(1))
    # without a callback, iterations are replayed as a CUDA graph on a card
    (x, info), solution = timed(lambda: linalg.cg(A, b, M=M, rtol=RTOL), xp, rounds)
    left = float(xp.linalg.norm(b - A @ x) / xp.linalg.norm(b))
    return {
        "setup": setup,
        "refresh": refresh,
        "solution": solution,
        "iterations": len(steps),
        "levels": len(M.levels),
        "complexity": round(M.operator_complexity, 3),
        "info": info,
        "residual": left,
    }


def theirs(problem: problems.Problem, rounds: int, wall: bool = False) -> dict[str, Any]:
    """Measure pyamg's hierarchy and its CG on the host, by wall-clock time beside a card."""
    import pyamg
    import scipy.sparse as sp

    A = sp.bsr_matrix((problem.A.data, problem.A.indices, problem.A.indptr), shape=problem.A.shape)
    left: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ml, setup = timed(
            lambda: pyamg.smoothed_aggregation_solver(
                A,
                B=problem.modes,
                strength=None,
                smooth=("jacobi", {"omega": 4 / 3}),
                max_coarse=500,
                presmoother=SMOOTHING,
                postsmoother=SMOOTHING,
            ),
            np,
            rounds,
            wall,
        )

        def solve() -> Any:
            left.clear()
            return ml.solve(problem.b, tol=RTOL, accel="cg", residuals=left)

        _, solution = timed(solve, np, rounds, wall)
    return {"setup": setup, "solution": solution, "iterations": len(left) - 1, "levels": len(ml.levels)}


def has_pyamg() -> bool:
    """Whether the peer can be measured here."""
    try:
        importlib.import_module("pyamg")
    except ImportError:
        return False
    return True


def measure(table: Table, name: str, unknowns: int, device: str, who: Sequence[str], rounds: int) -> None:
    """Add the rows of a problem: ours in float64, ours in float32 under float64, and pyamg's; those of `who`."""
    problem = {"cube": problems.cube, "plate": problems.plate}[name](unknowns)
    runs: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
        "bsrgemm": {
            "bsrgemm": lambda: ours(problem, device, "float64", rounds),
            "bsrgemm, float32 in M": lambda: ours(problem, device, "float32", rounds),
        },
        "pyamg": {"pyamg, host": lambda: theirs(problem, rounds, device == "cuda")},
    }
    for what, run in [pair for library in who for pair in runs[library].items()]:
        row = {"problem": name, "unknowns": problem.A.shape[0], "what": what, "device": device} | run()
        refresh = f"{row['refresh']:.3f}" if "refresh" in row else "-"
        text = f"{row['setup']:>9.3f}{refresh:>10}{row['solution']:>10.3f}{row['iterations']:>7}{row['levels']:>8}"
        table.add(f"{name:<7}{row['unknowns']:>10,}  {what:<22}{text}", **row)


def measure_jobs(table: Table, name: str, unknowns: int, device: str, rounds: int) -> None:
    """Add the rows of whole jobs, from block-COO to x, and of solves with incomplete decompositions."""
    problem = {"cube": problems.cube, "plate": problems.plate}[name](unknowns)
    n = problem.A.shape[0]
    library = "cupyx" if device == "cuda" else "scipy"
    runs = {"bsrgemm, block-COO to x": whole_job.whole, f"{library} cg, Jacobi": whole_job.with_jacobi}
    if n <= _MOST_DIRECT[device]:
        runs["bsrgemm, spsolve"] = whole_job.direct
    for what, run in runs.items():
        try:
            row = run(problem, device, rounds)
        except ImportError as error:
            print(f"{name:<7}{n:>10,}  {what} was left out: {error}")
            continue
        row |= {"problem": name, "unknowns": n, "what": what, "device": device, "rate": n / row["seconds"]}
        text = f"{row['seconds']:>9.3f} s{row['rate']:>14,.0f} unknowns a second{row['iterations'] or '-':>7}"
        table.add(f"{name:<7}{n:>10,}  {what:<24}{text}", **row)
    for what, numbers in whole_job.decompositions(problem, device, rounds).items():
        text = f"{numbers['seconds'] * 1e3:>9.3f} ms{numbers['multiple']:>9.2f} times A @ x"
        if "replayed" in numbers:
            text += f", as graphs {numbers['replayed'] * 1e3:.3f} ms, {numbers['multiple_replayed']:.2f} times"
        table.add(f"{name:<7}{n:>10,}  {what:<24}{text}", problem=name, unknowns=n, what=what, device=device, **numbers)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", choices=["cube", "plate"], action="append", help="both by default")
    parser.add_argument("--unknowns", type=int, nargs="+", help="sizes; for a card 0.25, 1 and 4 million by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="where ours is; a card by default if there is one")
    parser.add_argument("--who", choices=["bsrgemm", "pyamg"], action="append", help="both by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="times that each step is measured; the least counts")
    parser.add_argument("--jobs", action="store_true", help="whole jobs and incomplete decompositions instead")
    parser.add_argument("--keep", action="store_true", help="write what was measured to bench/results/")
    parser.add_argument("--merge", action="store_true", help="with --keep: leave other rows of that file as they are")
    provenance.add_option(parser)
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if machine.has_gpu() else "cpu")
    sizes = options.unknowns or ([250_000, 1_000_000, 4_000_000] if device == "cuda" else [30_000, 120_000])
    if options.jobs:
        with provenance.recording() as launched:
            table = Table(f"solver_jobs_{device}", "Linear systems: from block-COO to x", launched)
            table.merge = options.merge
            with writing(table, options.keep):
                for name in options.problem or ["cube"]:
                    for unknowns in sizes:
                        measure_jobs(table, name, unknowns, device, options.rounds)
        return
    with provenance.recording() as launched:
        table = Table(f"solvers_{device}", "Linear systems: smoothed aggregation and CG", launched)
        table.note(f"{'':<41}{'set-up, s':>9}{'refresh':>10}{'solution':>10}{'steps':>7}{'levels':>8}")
        table.merge = options.merge
        who = options.who or ["bsrgemm", "pyamg"]
        if "pyamg" in who and not has_pyamg():
            table.note("pyamg is not installed: it is left out")
            who.remove("pyamg")
        with writing(table, options.keep):
            for name in options.problem or ["cube", "plate"]:
                for unknowns in sizes:
                    few = [library for library in who if library != "pyamg" or unknowns <= _MOST_OF_PYAMG]
                    measure(table, name, unknowns, device, few, options.rounds)
