"""Linear elasticity by CG with a V-cycle (pyamg issue 260): pyamg builds the hierarchy on the host, bsrgemm solves.

2d: a plate of bilinear squares, held along its edges. Blocks of 2 x 2; with 3 rigid-body modes transfers have blocks of
2 x 3 and 3 x 2, coarse matrices 3 x 3. 3d: a cube of trilinear hexahedra, held on one face: 3 x 3, 3 x 6, 6 x 3, 6 x 6.
dg: a plate of linear triangles that share no nodes (discontinuous Galerkin), 6 unknowns each: 6 x 6, 6 x 3, 3 x 6,
3 x 3. A line has the time to 1e-8, without set-up and moving, and the share of products with A, P and R in it. On a GPU
iterations are replayed as a CUDA graph, which the first solve captures and which is not timed; `no graph` is the time
with a launch for each kernel. Beside it stands the same algorithm with cupyx's CSR, captured too if CuPy lets it. When
all sizes are done, peers on the host have lines of their own: the same algorithm with scipy's BSR, and pyamg's own CG
with the same block Jacobi; those that are left out say why. `apart` is how far norms of residuals are from those of a
peer, relative, at most. Steps and their seconds go to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import bsrgemm as bg

from .. import machine, provenance
from ..cases.small_blocks import as_scipy
from ..table import Table, writing
from . import peers
from .amg import Call, Chebyshev, ConjugateGradients, Cycle, Hierarchy, Jacobi, Replay, Smoother, Solution
from .hierarchy import built
from .problems import PROBLEMS, Problem

#: Fewer unknowns than these leave nothing to coarsen
LEAST_UNKNOWNS = 1000
UNKNOWNS = {"cpu": (20_000,), "cuda": (250_000, 1_000_000, 4_000_000)}
#: The factor by which a solve on the host may exceed an estimate from fewer unknowns, which fit into caches
SLOWER = 1.5
SMOOTHERS: dict[str, Smoother] = {"jacobi": Jacobi(), "chebyshev": Chebyshev()}


def products_of(solve: ConjugateGradients) -> dict[str, list[Call]]:
    """The products of an iteration: with A, P and R, and with all inverses too. The next solve begins anew."""
    cycle, calls = solve.iteration.cycle, list[Call]()
    cycle.multiply.log = calls
    solve.iteration()
    cycle.multiply.log = None
    hierarchy = cycle.hierarchy
    inverses = {id(hierarchy.inverse), *(id(level.D) for level in hierarchy.levels)}
    return {"A, P, R": [call for call in calls if id(call.A) not in inverses], "A, P, R, D": calls}


def seconds_of_products(solve: ConjugateGradients, iterations: int) -> dict[str, float]:
    """Seconds of the products of so many iterations and nothing else, replayed as the iterations are."""
    multiply, xp = solve.iteration.cycle.multiply, solve.iteration.xp

    def again(some: list[Call]) -> Callable[[], None]:
        def once() -> None:
            for call in some:
                multiply(*call)

        replay = Replay(once, xp)

        def all_iterations() -> None:
            for _ in range(iterations):
                replay()

        return all_iterations

    with np.errstate(all="ignore"):  # sums that are accumulated would grow without bounds
        return {kind: peers.timed(again(some), xp)[1] for kind, some in products_of(solve).items()}


def apart(a: Solution, b: Solution) -> float:
    """The largest difference of two histories of residuals, relative."""
    pairs = zip(a.residuals, b.residuals, strict=False)
    return max(abs(x - y) / x for x, y in pairs)


@dataclass
class Run:
    """What was asked for, where results go, and the time since the start."""

    table: Table
    device: str = "cpu"
    keep: bool = False
    every: int = 1
    host_most: int = 1_000_000
    seconds: float = math.inf
    wrong: list[str] = field(default_factory=list)
    #: (problem, smoother, peer) -> seconds for an unknown on the host, of the largest case so far
    paces: dict[tuple[str, str, str], float] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    @property
    def gone(self) -> float:
        return time.perf_counter() - self.start

    def say(self, text: str) -> None:
        """Print a line of progress with the time since the start, at once, in case the run is killed later."""
        sys.stdout.flush()
        print(f"{self.gone:7.1f} s  {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def step(self, text: str, into: dict[str, float] | None = None, name: str = "") -> Iterator[None]:
        """Say what a step took when it ends, and note it."""
        start = time.perf_counter()
        yield
        taken = time.perf_counter() - start
        if into is not None:
            into[name] = taken
        self.say(f"{text}: {taken:.2f} s")

    def write(self) -> None:
        """Write the file with the results so far, and report that among the steps."""
        if self.keep:
            with contextlib.redirect_stdout(sys.stderr):
                self.table.write("not finished")
            sys.stderr.flush()


@dataclass
class Case:
    """A problem that was built on the host, and the seconds of its steps."""

    name: str
    problem: Problem
    ml: Any
    host: Hierarchy
    seconds: dict[str, float]

    @classmethod
    def made(cls, name: str, unknowns: int, run: Run) -> Case:
        seconds: dict[str, float] = {}
        about = f"{name}, {unknowns:,} unknowns"
        with run.step(f"{about}: assembly", seconds, "assembly"):
            problem = PROBLEMS[name](unknowns)
        with run.step(f"{about}: hierarchy by pyamg", seconds, "set_up"):
            ml = built(problem)
        with run.step(f"{about}: inverses of blocks", seconds, "inverses"):
            host = Hierarchy.of(ml.levels)
        return cls(name, problem, ml, host, seconds)

    def moved(self, run: Run) -> Hierarchy:
        """The hierarchy on the device of the solver, where the largest eigenvalues are computed."""
        device, spent = run.device, 0.0

        def move(M: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            there = M.to_device(device)
            peers.synchronize(bg.get_array_module(there))
            spent += time.perf_counter() - start
            return there

        with run.step(f"{self.about}: moving and largest eigenvalues", self.seconds, "eigenvalues"):
            ours = self.host.moved(move)
        self.seconds["moving"] = spent
        self.seconds["eigenvalues"] -= spent
        return ours

    @property
    def about(self) -> str:
        return f"{self.name}, {len(self.problem.b):,} unknowns"

    def same(self, source: Hierarchy, convert: Callable[[Any], Any], smoother: Smoother, every: int) -> peers.Peer:
        """The same algorithm with other matrices."""
        hierarchy = source.moved(convert)
        xp = bg.get_array_module(hierarchy.levels[0].A)
        solve, b = ConjugateGradients(Cycle(hierarchy, smoother)), xp.asarray(self.problem.b)
        return peers.Peer(lambda: solve(b, peers.TOLERANCE, peers.MOST_ITERATIONS, every), xp)

    def host_peers(self, smoother: Smoother, every: int) -> dict[str, Callable[[], peers.Peer]]:
        """The peers on the host; a call prepares each of them."""
        found: dict[str, Callable[[], peers.Peer]] = {}
        if isinstance(smoother, Jacobi):
            found["pyamg"] = lambda: peers.Peer(peers.by_pyamg(self.ml, self.host, smoother, self.problem.b), np)
        found["scipy bsr"] = lambda: self.same(self.host, as_scipy, smoother, every)
        return found


@dataclass
class Line:
    """One case with one smoother: what our solver found, and what is kept of it."""

    case: Case
    smoother: str
    solution: Solution
    seconds: float
    row: dict[str, Any]

    @property
    def about(self) -> str:
        return about(self.case, self.smoother)

    def compare(self, peer: str, ready: Callable[[], peers.Peer], run: Run) -> None:
        """Time a peer; the row gets its results, or the reason why there are none."""
        try:
            with run.step(f"{self.case.about}, {self.smoother}: {peer}, all its repeats"):
                theirs, taken = peers.timed_peer(ready)
        except Exception as error:  # a missing package must not stop a run
            self.row["left_out"][peer] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
            run.say(f"{self.case.about}, {self.smoother}: {peer} failed, {self.row['left_out'][peer]}")
            return
        self.row["left_out"].pop(peer, None)
        found = self.row["peers"]
        found[peer] = {
            "seconds": taken, "iterations": theirs.iterations, "apart": apart(self.solution, theirs),
            "residual": theirs.residuals[-1] / theirs.residuals[0], "graph": theirs.graph, "refusal": theirs.refusal,
        }  # fmt: skip
        self.row["same"] = all(it["iterations"] == self.solution.iterations for it in found.values())
        run.say(
            f"{self.case.about}, {self.smoother}: {peer} {theirs.iterations} iterations, {taken * 1e3:.1f} ms, "
            f"{taken / self.seconds:.2f} times ours"
        )


def about(case: Case, smoother: str) -> str:
    """How a line begins."""
    return f"{case.name:7} {len(case.problem.b):9,} {len(case.ml.levels):6} {smoother:9}"


def measure(case: Case, ours: Hierarchy, name: str, run: Run) -> Line | None:
    """Our solver with one smoother, and cupyx beside it on a GPU; None if its solution is wrong."""
    smoother, A, every = SMOOTHERS[name], ours.levels[0].A, run.every
    xp = bg.get_array_module(A)
    b, cycle = xp.asarray(case.problem.b), Cycle(ours, smoother)
    solve = ConjugateGradients(cycle)
    with run.step(f"{case.about}, {name}: first solve"):
        solution = solve(b, peers.TOLERANCE, peers.MOST_ITERATIONS, every)
        r = b - A @ solution.x
        residual = float(xp.sqrt(r.dot(r) / b.dot(b)))
    row = first_row(case, name, solution, residual) | {"every": every}
    if solution.iterations is None or not residual <= 1.1 * peers.TOLERANCE:
        run.table.add(f"{about(case, name)} | WRONG: residual {residual:.1e}, not timed", **row, good=False)
        run.wrong.append(f"{case.about}, {name}")
        return None
    with run.step(f"{case.about}, {name}: repeats, and products alone"):
        _, seconds = peers.timed(lambda: solve(b, peers.TOLERANCE, peers.MOST_ITERATIONS, every), xp, first=False)
        row |= {"good": True, "seconds": seconds, "products": seconds_of_products(solve, len(solution.residuals) - 1)}
        if xp is not np:
            plain = ConjugateGradients(cycle, graph=False)
            _, taken = peers.timed(lambda: plain(b, peers.TOLERANCE, peers.MOST_ITERATIONS, every), xp)
            row["seconds_without_graph"] = taken
    run.say(f"{case.about}, {name}: ours {solution.iterations} iterations, {seconds * 1e3:.1f} ms")
    waiting = {} if xp is np else {"cupyx csr": "not reached"}
    row |= {
        "peers": {}, "same": True, "left_out": waiting | {"pyamg": "not reached", "scipy bsr": "not reached"},
    }  # fmt: skip
    line = Line(case, name, replace(solution, x=None), seconds, row)
    run.table.keep(row)
    if xp is not np:
        line.compare("cupyx csr", lambda: case.same(ours, peers.as_cupyx, smoother, every), run)
    run.table.note(line_text(line, beside(xp is not np)))
    return line


def first_row(case: Case, smoother: str, solution: Solution, residual: float) -> dict[str, Any]:
    """The fields of a row that are known after the first solve."""
    return {
        "problem": case.name, "unknowns": len(case.problem.b), "levels": len(case.ml.levels), "smoother": smoother,
        "blocks": [list(level.A.blocksize) for level in case.host.levels],
        "rows": [level.A.shape[0] for level in case.host.levels] + [case.host.inverse.shape[0]],
        "iterations": solution.iterations, "residual": residual, "residuals": solution.residuals,
        "graph": solution.graph, "refusal": solution.refusal,
        **{f"{what}_seconds": seconds for what, seconds in case.seconds.items()}, "versions": versions(),
    }  # fmt: skip


def line_text(line: Line, names: tuple[str, ...]) -> str:
    """The printed line of our solver."""
    row, seconds, case = line.row, line.seconds, line.case
    launched = row.get("seconds_without_graph")
    column = "" if launched is None else f" {launched * 1e3:9.1f} ms |"
    cells, off = peers_of(row, seconds, names)
    return (
        f"{line.about} | {row['iterations']:4} {seconds * 1e3:9.1f} ms |{column} "
        f"{row['products']['A, P, R'] / seconds:8.0%} |{cells} "
        f"{row['residual']:8.1e} | {off} | {case.seconds['assembly']:6.1f} s | {case.seconds['set_up']:6.1f} s | "
        f"{case.seconds['moving']:6.2f} s"
    )


def compare_with_host(line: Line, run: Run) -> None:
    """The peers on the host beside a line, unless there are too many unknowns or there is too little time."""
    left_out, size = line.row["left_out"], line.row["unknowns"]
    asked = line.case.host_peers(SMOOTHERS[line.smoother], run.every)
    for peer, ready in asked.items():
        key = (line.case.name, line.smoother, peer)
        expected = SLOWER * run.paces.get(key, 0.0) * size
        if run.gone + expected > run.seconds:
            left_out[peer] = f"--seconds {run.seconds:g}: {run.gone:.0f} s are gone, and {expected:.0f} s are expected"
            run.say(f"{line.case.about}, {line.smoother}: {peer} left out, {left_out[peer]}")
            continue
        line.compare(peer, ready, run)
        if peer in line.row["peers"]:
            run.paces[key] = line.row["peers"][peer]["seconds"] / size
    cells, off = peers_of(line.row, line.seconds, HOST_PEERS)
    residual = line.row["peers"].get("pyamg", {}).get("residual")
    run.table.note(
        f"{line.about} | {line.row['iterations']:4} {line.seconds * 1e3:9.1f} ms |{cells} "
        f"{'-' if residual is None else f'{residual:.1e}':>8} | {off}"
    )


HOST_PEERS = ("scipy bsr", "pyamg")


def beside(on_gpu: bool) -> tuple[str, ...]:
    """The peers that have a column beside our solver."""
    return ("cupyx csr",) if on_gpu else ()


def peers_of(row: dict[str, Any], ours: float, names: tuple[str, ...]) -> tuple[str, str]:
    """Cells of peers, and how far they are apart from us at most."""
    there = [row["peers"][name]["apart"] for name in names if name in row["peers"]]
    cells = "".join(f" {cell(row['peers'].get(name), ours):>26} |" for name in names)
    return cells, f"{f'{max(there):.0e}' if there else '-':>5}"


def cell(peer: dict[str, Any] | None, ours: float) -> str:
    """Iterations, time, and time over ours."""
    if peer is None:
        return "-"
    return f"{peer['iterations'] or '-'} {peer['seconds'] * 1e3:9.1f} ms {peer['seconds'] / ours:6.2f} x"


def headings(on_gpu: bool) -> tuple[str, str]:
    """The headings above lines of our solver, and above lines of the peers on the host."""
    start = f"{'problem':7} {'unknowns':>9} {'levels':>6} {'smoother':9} | {'iterations, ours':>17} |"
    ours, host = ("".join(f" {peer:>26} |" for peer in names) for names in (beside(on_gpu), HOST_PEERS))
    launched = f" {'no graph':>12} |" if on_gpu else ""
    return (
        f"{start}{launched} {'products':>8} |{ours} residual | apart | assembly | {'set-up':>8} | {'moving':>8}",
        f"{start}{host} {'pyamg to':>8} | apart",
    )


def left_out(rows: list[dict[str, Any]]) -> list[str]:
    """Why there is a "-" where there is one, or no graph."""
    cases: dict[str, list[str]] = {}
    for row in rows:
        solvers = {"ours": row, **row.get("peers", {})}
        refused = {name: f"no graph, {it['refusal']}" for name, it in solvers.items() if it["refusal"] is not None}
        for name, reason in (row.get("left_out", {}) | refused).items():
            cases.setdefault(f"{name}: {reason}", []).append(f"{row['problem']} {row['unknowns']:,} {row['smoother']}")
    return [f"  - {reason} ({', '.join(some)})" for reason, some in cases.items()]


def versions() -> dict[str, str]:
    import pyamg
    import skfem

    return {"pyamg": pyamg.__version__, "scikit-fem": skfem.__version__}


def solved(name: str, size: int, smoothers: list[str], run: Run) -> list[Line]:
    """Our solver for one case, whose file is written; the lines that peers on the host may stand beside."""
    case = Case.made(name, size, run)
    ours = case.moved(run)
    found = []
    for smoother in smoothers:
        line = measure(case, ours, smoother, run)
        if line is not None:
            left_out = line.row["left_out"]
            if size > run.host_most:
                left_out |= dict.fromkeys(HOST_PEERS, f"more unknowns than --host-most {run.host_most:,}")
            else:
                found.append(line)
            if not isinstance(SMOOTHERS[smoother], Jacobi):
                left_out["pyamg"] = "has no smoother like that with blocks"
        run.write()
    return found


def solve_all(sizes: list[int], problems: list[str], smoothers: list[str], run: Run) -> list[Line]:
    """Our solver for all cases, the smallest first. What fails does not stop the others."""
    lines = []
    for size, name in itertools.product(sorted(sizes), problems):
        try:
            lines += solved(name, size, smoothers, run)
        except Exception as error:
            traceback.print_exc()
            run.wrong.append(f"{name}, about {size:,} unknowns: {type(error).__name__}: {error}".split("\n")[0])
        free_device_memory(run.device)
    return lines


def free_device_memory(device: str) -> None:
    if device == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options that were given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if machine.has_gpu() else "cpu")
    parser.add_argument("--problem", choices=list(PROBLEMS), nargs="+", default=list(PROBLEMS))
    parser.add_argument("--smoother", choices=list(SMOOTHERS), nargs="+", default=list(SMOOTHERS))
    sizes = "about so many; by default 20,000, on a GPU up to 4,000,000"
    parser.add_argument("--unknowns", type=int, nargs="+", metavar="N", help=sizes)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="test the residual every N iterations")
    most = "with more unknowns scipy and pyamg do not run"
    parser.add_argument("--host-most", type=int, default=1_000_000, metavar="N", help=most)
    late = "scipy and pyamg do not begin what would end later than that, from the start"
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S", help=late)
    parser.add_argument("--keep", action="store_true", help="write what was measured to bench/results/")
    parser.add_argument("--merge", action="store_true", help="with --keep: leave other rows of that file as they are")
    provenance.add_option(parser)
    options = parser.parse_args(argv)
    for size in options.unknowns or ():
        if size < LEAST_UNKNOWNS:
            raise SystemExit(f"--unknowns: wanted at least {LEAST_UNKNOWNS}, got {size}")
    if options.every < 1:
        raise SystemExit(f"--every: wanted at least 1, got {options.every}")
    if options.device == "cuda" and not machine.has_gpu():
        raise SystemExit("--device cuda: there is no GPU that CuPy can use; --device cpu runs here")
    try:
        versions()
    except ImportError as error:
        raise SystemExit(
            f'{error.name} is missing: pyamg builds the hierarchy, scikit-fem the matrix. pip install ".[solvers]"'
        ) from None
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    options = arguments(argv)
    with provenance.recording() as launched:
        table = Table(f"elasticity_{options.device}", f"Elasticity to {peers.TOLERANCE:.0e}", launched)
        table.merge = options.merge
        run = Run(table, options.device, options.keep, options.every, options.host_most, options.seconds)
        with writing(table, options.keep):
            run_all(options, run)
    if run.wrong:
        raise SystemExit(f"wrong: {', '.join(run.wrong)}")


def run_all(options: argparse.Namespace, run: Run) -> None:
    """All sizes on the device, then the peers on the host."""
    ours, host = headings(options.device == "cuda")
    run.table.note(ours)
    sizes = options.unknowns or list(UNKNOWNS[options.device])
    lines = solve_all(sizes, options.problem, options.smoother, run)
    if lines:
        run.table.note(host)
    for line in sorted(lines, key=lambda it: options.smoother.index(it.smoother)):
        compare_with_host(line, run)
        run.write()
    for reason in left_out(run.table.rows):
        run.table.note(reason)
