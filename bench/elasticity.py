"""Linear elasticity by CG with a V-cycle (pyamg issue 260): pyamg builds the hierarchy on the host, bsrgemm solves.

2d: a plate of bilinear squares, held along its edges. Blocks of 2 x 2; with 3 rigid-body modes transfers have blocks of
2 x 3 and 3 x 2, coarse matrices 3 x 3. 3d: a cube of trilinear hexahedra, held on one face: 3 x 3, 3 x 6, 6 x 3, 6 x 6.
A line has the time to 1e-8, without set-up and moving, and the share of products with A, P and R in it. Beside it: the
same algorithm with scipy's BSR, on a GPU with cupyx's CSR too, and pyamg's own CG with the same block Jacobi. `apart`
is how far norms of residuals are from those of a peer, relative, at most.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from amg import Call, Chebyshev, Cycle, Hierarchy, Jacobi, Smoother, Solution, conjugate_gradients
from harness import Table, has_gpu, writing
from report import Bench

import bsrgemm as bg

TOLERANCE, MOST_ITERATIONS = 1e-8, 200
#: The hierarchy ends where so many nodes are left: 600 unknowns at most, a dense matrix of 3 MB
MOST_COARSE = 100
#: Fewer unknowns than these leave nothing to coarsen
LEAST_UNKNOWNS = 1000
UNKNOWNS = {"cpu": (20_000,), "cuda": (250_000, 1_000_000, 4_000_000)}
#: Young's modulus and Poisson's ratio
YOUNG, POISSON = 1.0, 0.3
#: Cells whose 64 blocks each are added up at a time: 1 GB
CELLS = 200_000
REPEATS = 5
#: A first call on the host that takes longer than this is not repeated
PATIENCE = 5.0
SMOOTHERS: dict[str, Smoother] = {"jacobi": Jacobi(), "chebyshev": Chebyshev()}


# ---------------------------------------------------------------------------------------- problems
@dataclass(frozen=True)
class Problem:
    """A matrix on the host, the modes that its equations hardly resist, and a load."""

    A: scipy.sparse.bsr_array
    modes: np.ndarray
    b: np.ndarray


def plate(unknowns: int) -> Problem:
    """n x n free nodes inside a frame that is held."""
    from pyamg.gallery import linear_elasticity

    n = round(math.sqrt(unknowns / 2))
    A, modes = linear_elasticity((n, n), E=YOUNG, nu=POISSON, format="bsr")
    b = np.zeros(A.shape[0])
    b[1::2] = -1
    return Problem(A, modes, b)


def cube(unknowns: int) -> Problem:
    """n x n x n cells; the nodes at x = 0 are held, and left out before anything is numbered."""
    import skfem

    n = max(2, round((unknowns / 3) ** (1 / 3) - 2 / 3))  # 3 n (n + 1)^2 unknowns
    mesh = skfem.MeshHex.init_tensor(*(np.linspace(0, 1, n + 1) for _ in range(3)))
    free = mesh.p[0] > 0
    place = (np.cumsum(free) - 1).astype(np.int32)
    side = 3 * int(free.sum())
    blocks = cell_blocks(mesh.p[:, mesh.t[:, 0]])
    A: Any = None
    for first in range(0, mesh.t.shape[1], CELLS):
        nodes = mesh.t[:, first : first + CELLS].T
        row, col = np.broadcast_arrays(nodes[:, :, None], nodes[:, None, :])
        kept = free[row] & free[col]
        data = np.broadcast_to(blocks, (*kept.shape, 3, 3))[kept]
        part = bg.bsr_array((data, (place[row[kept]], place[col[kept]])), shape=(side, side))
        part.sum_duplicates()
        A = part if A is None else A + part
    b = np.zeros(side)
    b[2::3] = -1
    return Problem(as_scipy(A), rigid_modes(mesh.p[:, free]), b)


def cell_blocks(corners: np.ndarray) -> np.ndarray:
    """The stiffness between the 8 corners (3, 8) of a hexahedron, (8, 8, 3, 3). All cells are alike: one is enough."""
    import skfem
    from skfem.models.elasticity import lame_parameters, linear_elasticity

    basis = skfem.Basis(skfem.MeshHex(corners, np.arange(8)[:, None]), skfem.ElementVector(skfem.ElementHex1()))
    K = linear_elasticity(*lame_parameters(YOUNG, POISSON)).assemble(basis).toarray()
    return K.reshape(8, 3, 8, 3).transpose(0, 2, 1, 3)


def rigid_modes(points: np.ndarray) -> np.ndarray:
    """Three shifts of points (3, n) and three turns about their center, (3 n, 6)."""
    x, y, z = points - points.mean(axis=1, keepdims=True)
    modes = np.zeros((x.size, 3, 6))
    modes[:, [0, 1, 2], [0, 1, 2]] = 1
    modes[:, 1, 3], modes[:, 2, 3] = -z, y
    modes[:, 2, 4], modes[:, 0, 4] = -x, z
    modes[:, 0, 5], modes[:, 1, 5] = -y, x
    return modes.reshape(-1, 6)


PROBLEMS: dict[str, Callable[[int], Problem]] = {"2d": plate, "3d": cube}


def built(problem: Problem, most_coarse: int = MOST_COARSE) -> Any:
    """pyamg's hierarchy. The modes go in as they are: rigid bodies need no improvement but near the edges."""
    import pyamg

    np.random.seed(0)  # noqa: NPY002 - where pyamg takes its random vectors from
    return pyamg.smoothed_aggregation_solver(
        problem.A, problem.modes, max_coarse=most_coarse, improve_candidates=None, presmoother=None, postsmoother=None
    )


# ------------------------------------------------------------------------------------------- peers
def as_scipy(A: Any) -> scipy.sparse.bsr_array:
    """One of our matrices on the host, in the same arrays."""
    return scipy.sparse.bsr_array((A.data, A.indices, A.indptr), shape=A.shape)


def by_pyamg(ml: Any, hierarchy: Hierarchy, smoother: Jacobi, b: np.ndarray) -> Callable[[], Solution]:
    """pyamg's CG on its own levels, with the weights of our block Jacobi.

    It makes more products: it takes x = 0 through a full sweep, and computes the residual before and behind a cycle.
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


# ------------------------------------------------------------------------------------- measurement
def synchronize(xp: Any) -> None:
    if xp is not np:
        xp.cuda.Device().synchronize()


class Peer(NamedTuple):
    """What is timed, and where it runs."""

    solve: Callable[[], Solution]
    xp: Any


def timed(call: Callable[[], Any], xp: Any = np, first: bool = True) -> tuple[Any, float]:
    """What a call returns, and its median seconds; `first`: the first one does not count, it compiles and fills."""
    times = []
    for _ in range(REPEATS + first):
        synchronize(xp)
        start = time.perf_counter()
        result = call()
        synchronize(xp)
        times.append(time.perf_counter() - start)
        if xp is np and times[0] > PATIENCE:
            return result, times[0]
    return result, statistics.median(times[first:])


def timed_peer(ready: Callable[[], Peer]) -> tuple[Solution, float]:
    return timed(*ready())


def seconds_of_products(cycle: Cycle, b: Any, iterations: int) -> dict[str, float]:
    """Seconds of the products of so many iterations and nothing else: with A, P and R, and with D too."""
    calls: list[Call] = []
    cycle.multiply.log = calls
    conjugate_gradients(b, cycle, tol=0.0, most=1)  # one cycle and one product with A, as every iteration has
    cycle.multiply.log = None
    inverses = {id(level.D) for level in cycle.hierarchy.levels}
    kinds = {"A, P, R": [call for call in calls if id(call.A) not in inverses], "A, P, R, D": calls}

    def again(some: list[Call]) -> Callable[[], None]:
        def call() -> None:
            for _ in range(iterations):
                for product in some:
                    cycle.multiply(*product)

        return call

    with np.errstate(all="ignore"):  # what accumulates grows without bounds
        return {kind: timed(again(some), bg.get_array_module(b))[1] for kind, some in kinds.items()}


def apart(a: Solution, b: Solution) -> float:
    """The largest difference of two histories of residuals, relative."""
    pairs = zip(a.residuals, b.residuals, strict=False)
    return max(abs(x - y) / x for x, y in pairs)


@dataclass
class Case:
    """A problem that was built, here and where it is solved."""

    name: str
    problem: Problem
    ml: Any
    host: Hierarchy
    ours: Hierarchy
    seconds: dict[str, float]

    @classmethod
    def made(cls, name: str, unknowns: int, device: str, table: Table) -> Case:
        table.progress(f"{name}, {unknowns:,} unknowns: assembly")
        marks = [time.perf_counter()]
        problem = PROBLEMS[name](unknowns)
        marks.append(time.perf_counter())
        table.progress(f"{name}, {unknowns:,} unknowns: hierarchy")
        ml = built(problem)
        marks.append(time.perf_counter())
        host = Hierarchy.of(ml.levels)
        ours = host.moved(lambda M: M.to_device(device))
        synchronize(bg.get_array_module(ours.levels[0].A))
        marks.append(time.perf_counter())
        steps = np.diff(marks).tolist()
        return cls(name, problem, ml, host, ours, dict(zip(("assembly", "set_up", "moving"), steps, strict=True)))

    def peers(self, smoother: Smoother, every: int, with_host: bool) -> dict[str, Callable[[], Peer]]:
        """What solves the same elsewhere, each to be made ready by a call."""

        def same(source: Hierarchy, convert: Callable[[Any], Any]) -> Peer:
            hierarchy = source.moved(convert)
            xp = bg.get_array_module(hierarchy.levels[0].A)
            cycle, b = Cycle(hierarchy, smoother), xp.asarray(self.problem.b)
            return Peer(lambda: conjugate_gradients(b, cycle, TOLERANCE, MOST_ITERATIONS, every), xp)

        found: dict[str, Callable[[], Peer]] = {}
        if bg.get_array_module(self.ours.levels[0].A) is not np:
            found["cupyx csr"] = lambda: same(self.ours, lambda M: M.tocsr())
        if with_host:
            found["scipy bsr"] = lambda: same(self.host, as_scipy)
            if isinstance(smoother, Jacobi):
                found["pyamg"] = lambda: Peer(by_pyamg(self.ml, self.host, smoother, self.problem.b), np)
        return found


def measure(case: Case, name: str, every: int, with_host: bool, table: Table, bench: Bench) -> bool:
    """A line: one case with one smoother. Is it right?"""
    smoother, A = SMOOTHERS[name], case.ours.levels[0].A
    xp = bg.get_array_module(A)
    b, cycle = xp.asarray(case.problem.b), Cycle(case.ours, smoother)
    about = f"{case.name:7} {len(b):9,} {len(case.ml.levels):6} {name:9}"
    table.progress(about)
    solution = conjugate_gradients(b, cycle, TOLERANCE, MOST_ITERATIONS, every)
    r = b - A @ solution.x
    residual = float(xp.sqrt(r.dot(r) / b.dot(b)))
    row = {
        "problem": case.name, "unknowns": len(b), "levels": len(case.ml.levels), "smoother": name, "every": every,
        "blocks": [list(level.A.blocksize) for level in case.host.levels],
        "rows": [level.A.shape[0] for level in case.host.levels] + [len(case.host.inverse)],
        "iterations": solution.iterations, "residual": residual, "residuals": solution.residuals,
        **{f"{what}_seconds": seconds for what, seconds in case.seconds.items()}, "versions": versions(),
    }  # fmt: skip
    if solution.iterations is None or not residual <= 1.1 * TOLERANCE:
        table.add(f"{about} | WRONG: residual {residual:.1e}, not timed", **row, good=False)
        return False
    _, seconds = timed(lambda: conjugate_gradients(b, cycle, TOLERANCE, MOST_ITERATIONS, every), xp, first=False)
    inside = seconds_of_products(cycle, b, len(solution.residuals) - 1)
    peers: dict[str, dict[str, Any]] = {}
    for peer, ready in case.peers(smoother, every, with_host).items():
        table.progress(f"{about} {peer}")
        found = bench.attempt(peer, about, partial(timed_peer, ready))
        if found is not None:
            theirs, taken = found
            peers[peer] = {
                "seconds": taken, "iterations": theirs.iterations, "apart": apart(solution, theirs),
                "residual": theirs.residuals[-1] / theirs.residuals[0],
            }  # fmt: skip
    cells = "".join(f" {cell(peers.get(peer), seconds):>25} |" for peer in columns(xp is not np))
    off = max((it["apart"] for it in peers.values()), default=0.0)
    table.add(
        f"{about} | {solution.iterations:4} {seconds * 1e3:9.1f} ms | {inside['A, P, R'] / seconds:8.0%} |{cells} "
        f"{residual:8.1e} | {off:5.0e} | {case.seconds['set_up']:6.1f} s | {case.seconds['moving']:6.2f} s",
        **row, good=True, seconds=seconds, products=inside, peers=peers,
        same=all(it["iterations"] == solution.iterations for it in peers.values()),
    )  # fmt: skip
    return True


def cell(peer: dict[str, Any] | None, ours: float) -> str:
    """Iterations, time, and time over ours."""
    if peer is None:
        return "-"
    return f"{peer['iterations'] or '-'} {peer['seconds'] * 1e3:9.1f} ms {peer['seconds'] / ours:5.2f} x"


def columns(on_gpu: bool) -> list[str]:
    """The peers that have a column."""
    return [*(["cupyx csr"] if on_gpu else []), "scipy bsr", "pyamg"]


def heading(on_gpu: bool) -> str:
    peers = "".join(f" {peer:>25} |" for peer in columns(on_gpu))
    return (
        f"{'problem':7} {'unknowns':>9} {'levels':>6} {'smoother':9} | {'iterations, ours':>17} | {'products':>8} |"
        f"{peers} residual | apart | {'set-up':>8} | {'moving':>8}"
    )


def versions() -> dict[str, str]:
    import pyamg
    import skfem

    return {"pyamg": pyamg.__version__, "scikit-fem": skfem.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--problem", choices=list(PROBLEMS), nargs="+", default=list(PROBLEMS))
    parser.add_argument("--smoother", choices=list(SMOOTHERS), nargs="+", default=list(SMOOTHERS))
    parser.add_argument(
        "--unknowns",
        type=int,
        nargs="+",
        metavar="N",
        help="about so many; by default 20,000, on a GPU up to 4,000,000",
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="test the residual every N iterations")
    parser.add_argument(
        "--host-most", type=int, default=1_000_000, metavar="N", help="with more unknowns scipy and pyamg do not run"
    )
    parser.add_argument("--keep", action="store_true", help="write what was measured to bench/results/")
    options = parser.parse_args()
    for size in options.unknowns or ():
        if size < LEAST_UNKNOWNS:
            raise SystemExit(f"--unknowns: wanted at least {LEAST_UNKNOWNS}, got {size}")
    if options.every < 1:
        raise SystemExit(f"--every: wanted at least 1, got {options.every}")
    if options.device == "cuda" and not has_gpu():
        raise SystemExit("--device cuda: there is no GPU that CuPy can use; --device cpu runs here")
    try:
        versions()
    except ImportError as error:
        raise SystemExit(
            f'{error.name} is missing: pyamg builds the hierarchy, scikit-fem the matrix. pip install ".[solvers]"'
        ) from None
    table = Table(f"elasticity_{options.device}", f"Elasticity to {TOLERANCE:.0e}")
    table.note(heading(options.device == "cuda"))
    wrong, bench = [], Bench()
    with writing(table, options.keep):
        for name in options.problem:
            for size in options.unknowns or UNKNOWNS[options.device]:
                case = Case.made(name, size, options.device, table)
                for smoother in options.smoother:
                    if not measure(case, smoother, options.every, size <= options.host_most, table, bench):
                        wrong.append(f"{name} with {size:,} unknowns and {smoother}")
        bench.explain(table)
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
