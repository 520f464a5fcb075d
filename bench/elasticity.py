"""Linear elasticity by CG with a V-cycle (pyamg issue 260): pyamg builds the hierarchy on the host, bsrgemm solves.

2d: a plate of bilinear squares, held along its edges. Blocks of 2 x 2; with 3 rigid-body modes transfers have blocks of
2 x 3 and 3 x 2, coarse matrices 3 x 3. 3d: a cube of trilinear hexahedra, held on one face: 3 x 3, 3 x 6, 6 x 3, 6 x 6.
dg: a plate of linear triangles that share no nodes (discontinuous Galerkin), 6 unknowns each: 6 x 6, 6 x 3, 3 x 6,
3 x 3. A line has the time to 1e-8, without set-up and moving, and the share of products with A, P and R in it. Beside
it, on a GPU, the same algorithm with cupyx's CSR. When all sizes are done, peers on the host have lines of their own:
the same algorithm with scipy's BSR, and pyamg's own CG with the same block Jacobi; those that are left out say why.
`apart` is how far norms of residuals are from those of a peer, relative, at most. Steps and their seconds go to
standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from amg import Call, Chebyshev, Cycle, Hierarchy, Jacobi, Smoother, Solution, conjugate_gradients
from harness import Table, has_gpu, writing

import bsrgemm as bg

TOLERANCE, MOST_ITERATIONS = 1e-8, 200
#: The hierarchy ends where so many nodes are left: 600 unknowns at most, a dense matrix of 3 MB
MOST_COARSE = 100
#: Fewer unknowns than these leave nothing to coarsen
LEAST_UNKNOWNS = 1000
UNKNOWNS = {"cpu": (20_000,), "cuda": (250_000, 1_000_000, 4_000_000)}
#: Young's modulus and Poisson's ratio
YOUNG, POISSON = 1.0, 0.3
LAME, SHEAR = YOUNG * POISSON / ((1 + POISSON) * (1 - 2 * POISSON)), YOUNG / (2 + 2 * POISSON)
#: What a jump between triangles costs, times (LAME + 2 SHEAR) / length of the edge. With 3 the matrix has negative
#: eigenvalues, with 3.5 it has none; the more it costs the more iterations: with 10 about 30 % more than with 6
PENALTY = 6.0
#: Aggregates of triangles grow along connections of this strength. With 0 iterations grow with the size: 43 and 60 with
#: block Jacobi at 20,000 and 100,000 unknowns, here 40 and 41; with 0.17 aggregates stay too small: 43 and 79
DG_STRENGTH = 0.08
#: Places for blocks that are filled at a time: 0.5 GB of blocks of 3 x 3
PLACES = 6_000_000
#: Steps of Arnoldi's iteration for the eigenvalue that scales the smoothing of P; pyamg's 30 take most of its set-up
ARNOLDI_STEPS = 10
REPEATS = 5
#: Seconds after which a call on the host is not repeated again
PATIENCE = 2.0
#: How much longer a solve on the host may take than one of fewer unknowns lets expect: caches end
SLOWER = 1.5
SMOOTHERS: dict[str, Smoother] = {"jacobi": Jacobi(), "chebyshev": Chebyshev()}


# ---------------------------------------------------------------------------------------- problems
@dataclass(frozen=True)
class Problem:
    """A matrix on the host, the modes that its equations hardly resist, and a load.

    Aggregates grow along connections of at least `strength`, relative to the diagonal.
    """

    A: scipy.sparse.bsr_array
    modes: np.ndarray
    b: np.ndarray
    strength: float = 0.0


def plate(unknowns: int) -> Problem:
    """n x n free nodes inside a frame that is held, numbered along x first: `pyamg.gallery.linear_elasticity`."""
    from pyamg.gallery.elasticity import q12d_local

    n = round(math.sqrt(unknowns / 2))
    K = q12d_local(np.array([[0, 0], [1, 0], [1, 1], [0, 1]]), LAME, SHEAR).reshape(4, 2, 4, 2).transpose(0, 2, 1, 3)
    around = [0, 1, 3, 2]  # pyamg goes around the square
    y, x = np.mgrid[:n, :n].reshape(2, -1)
    b = np.zeros(2 * n * n)
    b[1::2] = -1
    A = grid_matrix(K[np.ix_(around, around)], n + 1, [(1, n + 1)] * 2)
    return Problem(A, rigid_modes(np.stack([x, y])), b)


def cube(unknowns: int) -> Problem:
    """n x n x n cells; the nodes at x = 0 are held, and left out before anything is numbered, along z first."""
    n = max(2, round((unknowns / 3) ** (1 / 3) - 2 / 3))  # 3 n (n + 1)^2 unknowns
    A = grid_matrix(cell_blocks(1 / n), n, [(1, n + 1), (0, n + 1), (0, n + 1)])
    points = np.mgrid[1 : n + 1, : n + 1, : n + 1].reshape(3, -1) / n
    b = np.zeros(A.shape[0])
    b[2::3] = -1
    return Problem(A, rigid_modes(points), b)


def cell_blocks(side: float) -> np.ndarray:
    """The stiffness between the 8 corners of a cube, (8, 8, 3, 3), corners along z first: what scikit-fem makes."""
    import skfem
    from skfem.models.elasticity import lame_parameters, linear_elasticity

    mesh = skfem.MeshHex()  # one cell, whose corners have an order of their own
    order = np.lexsort(mesh.p[::-1])
    basis = skfem.Basis(mesh.scaled(side), skfem.ElementVector(skfem.ElementHex1()))
    K = linear_elasticity(*lame_parameters(YOUNG, POISSON)).assemble(basis).toarray()
    return K.reshape(8, 3, 8, 3).transpose(0, 2, 1, 3)[np.ix_(order, order)]


def grid_matrix(cell: np.ndarray, cells: int, free: list[tuple[int, int]]) -> scipy.sparse.bsr_array:
    """The matrix of a grid of `cells` equal cells along each axis, filled in chunks of planes: nothing is added up.

    Parameters
    ----------
    cell : array, (2^d, 2^d, s, s)
        Blocks between the corners of a cell, the last axis first.
    free : pairs of int, one for each axis
        Where the nodes begin and end that have unknowns; they are numbered along the last axis first.
    """
    sizes = [end - begin for begin, end in free]
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    steps, table = neighbours(cell, len(free))
    blocks = table.reshape(-1, *cell.shape[2:])
    kinds, there = [], []
    for begin, end in free:
        node = np.arange(begin, end)
        kinds.append(np.where(node == 0, 0, np.where(node == cells, 2, 1)))
        beside = node[:, None] + np.arange(-1, 2)
        there.append((beside >= begin) & (beside < end))
    # rows have all combinations of their neighbours along each axis
    lengths = there[0].sum(1)
    for mask in there[1:]:
        lengths = np.multiply.outer(lengths, mask.sum(1))
    indptr = np.zeros(lengths.size + 1, np.int32)  # 2^31 blocks would have 69 GB at least
    np.cumsum(lengths, out=indptr[1:])
    indices, data = np.empty(indptr[-1], np.int32), np.empty((indptr[-1], *cell.shape[2:]))
    shift = (steps @ strides).astype(np.int32)
    planes = max(1, PLACES // (strides[0] * len(steps)))
    for first in range(0, sizes[0], planes):
        some = slice(first, first + planes)
        kind, kept = kinds[0][some], there[0][some]
        for other, mask in zip(kinds[1:], there[1:], strict=True):
            kind = np.add.outer(3 * kind, other).reshape(-1)
            kept = (kept[:, None, :, None] & mask[None, :, None, :]).reshape(len(kind), -1)
        row = np.arange(first * strides[0], first * strides[0] + len(kind), dtype=np.int32)
        place = slice(indptr[row[0]], indptr[row[-1] + 1])
        indices[place] = (row[:, None] + shift)[kept]
        np.take(blocks, (kind[:, None] * len(steps) + np.arange(len(steps)))[kept], axis=0, out=data[place])
    side = lengths.size * cell.shape[2]
    return scipy.sparse.bsr_array((data, indices, indptr), shape=(side, side))


def neighbours(cell: np.ndarray, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps to the neighbours of a node, (3^d, d), and blocks towards them, (3^d, 3^d, s, s): by kind of node, by step.

    On each axis a node is one of three kinds: there are cells above it alone, on both sides, or below it alone.
    """
    corners = list(itertools.product((0, 1), repeat=dims))
    steps = np.array(list(itertools.product((-1, 0, 1), repeat=dims)))
    table = np.zeros((3**dims, 3**dims, *cell.shape[2:]))
    for (k, kind), (s, step), (c, corner) in itertools.product(
        enumerate(itertools.product((0, 1, 2), repeat=dims)), enumerate(steps), enumerate(corners)
    ):
        missing = any((side, at) in ((0, 1), (2, 0)) for side, at in zip(kind, corner, strict=True))
        other = tuple((np.array(corner) + step).tolist())
        if other in corners and not missing:
            table[k, s] += cell[c, corners.index(other)]
    return steps, table


def rigid_modes(points: np.ndarray) -> np.ndarray:
    """Shifts of points (d, n), and turns about their center: one in a plane, (2 n, 3), three in space, (3 n, 6)."""
    dims = len(points)
    centered = points - points.mean(axis=1, keepdims=True)
    planes = [(0, 1)] if dims == 2 else [(1, 2), (2, 0), (0, 1)]
    modes = np.zeros((points.shape[1], dims, dims + len(planes)))
    modes[:, range(dims), range(dims)] = 1
    for turn, (a, b) in enumerate(planes, dims):
        modes[:, a, turn], modes[:, b, turn] = -centered[b], centered[a]
    return modes.reshape(-1, modes.shape[2])


# -------------------------------------------------------------------------- discontinuous Galerkin
#: Corners of the two triangles of a square, as (x, y)
TRIANGLES = np.array([[(0, 0), (1, 0), (0, 1)], [(1, 0), (0, 1), (1, 1)]])
#: For each of the two, by column: the square (x, y), from its own, of a neighbour; None is the triangle itself.
#: A neighbour is always the other one of its square
BESIDE = ([(0, -1), (-1, 0), None, (0, 0)], [(0, 0), None, (1, 0), (0, 1)])


def triangles(unknowns: int) -> Problem:
    """n x n squares, numbered along x first, each cut in two triangles of their own 3 nodes; the edges are held weakly.

    Symmetric interior penalty: the mean traction works on a jump, and a jump costs. A block has 3 nodes x 2
    displacements.
    """
    n = max(2, round(math.sqrt(unknowns / 12)))
    there, table = triangle_blocks()
    kind = np.ones(n, np.int32)
    kind[[0, -1]] = 0, 2
    kinds = np.add.outer(3 * kind, kind).reshape(-1)
    kept = there.reshape(9, -1)[kinds]
    shift = [
        t if step is None else 2 * (step[0] + n * step[1]) + 1 - t for t, steps in enumerate(BESIDE) for step in steps
    ]
    squares = np.arange(n * n, dtype=np.int32)
    indices = (2 * squares[:, None] + np.array(shift, np.int32))[kept]
    indptr = np.zeros(2 * n * n + 1, np.int32)
    np.cumsum(kept.reshape(-1, 4).sum(1), out=indptr[1:])
    data = table.reshape(-1, 6, 6)[(8 * kinds[:, None] + np.arange(8, dtype=np.int32))[kept]]
    A = scipy.sparse.bsr_array((data, indices, indptr), shape=(12 * n * n, 12 * n * n))
    corner = np.stack([squares % n, squares // n], 1)
    points = (corner[:, None, None] + TRIANGLES).reshape(-1, 2).T
    b = np.zeros(A.shape[0])
    b[1::2] = -1
    return Problem(A, rigid_modes(points), b, DG_STRENGTH)


def triangle_blocks() -> tuple[np.ndarray, np.ndarray]:
    """By kind of square along y and x, triangle and column: whether it is there, and its block, (3, 3, 2, 4, 6, 6).

    A square is one of three kinds on each axis: the first, inside, or the last.
    """
    there, table = np.ones((3, 3, 2, 4), bool), np.zeros((3, 3, 2, 4, 6, 6))
    for t, steps in enumerate(BESIDE):
        corners, own = TRIANGLES[t], steps.index(None)
        grads, stresses = gradients(corners)
        table[:, :, t, own] = np.einsum("aij,bij->ab", stresses, grads) / 2  # the area
        for (y, x), (column, step) in itertools.product(np.ndindex(3, 3), enumerate(steps)):
            if step is None:
                continue
            other = TRIANGLES[1 - t] + step
            ends = np.array([point for point in corners if (point == other).all(1).any()])
            if (x, step[0]) in ((0, -1), (2, 1)) or (y, step[1]) in ((0, -1), (2, 1)):
                there[y, x, t, column] = False
                table[y, x, t, own] += edge_matrix([corners], ends)
                continue
            both = edge_matrix([corners, other], ends)
            table[y, x, t, own] += both[:6, :6]
            table[y, x, t, column] = both[:6, 6:]
    return there, table


def gradients(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the 6 displacements of a triangle: gradients and stresses (plane strain), both (6, 2, 2)."""
    slopes = np.linalg.inv(np.column_stack([np.ones(3), corners]))[1:].T
    grads = np.einsum("ni,ck->ncki", slopes, np.eye(2)).reshape(6, 2, 2)
    shears = SHEAR * (grads + grads.transpose(0, 2, 1))
    return grads, shears + LAME * np.einsum("aii,jk->ajk", grads, np.eye(2))


def edge_matrix(sides: list[np.ndarray], ends: np.ndarray) -> np.ndarray:
    """What an edge adds to the triangles at its sides: two, (12, 12), or one that is held there, (6, 6)."""
    along = ends[1] - ends[0]
    length = math.hypot(*along)
    normal = np.array([along[1], -along[0]]) / length
    if normal @ (sides[0].mean(0) - ends[0]) > 0:
        normal = -normal  # out of the first
    jumps, tractions = [], []
    for sign, corners in zip((1, -1), sides, strict=False):
        values = (corners == ends[:, None]).all(2)  # at the ends, of each node's function
        jumps.append(sign * np.einsum("en,ck->eknc", values, np.eye(2)).reshape(2, 2, 6))
        tractions.append(gradients(corners)[1] @ normal / len(sides))
    jump, traction = np.concatenate(jumps, 2), np.concatenate(tractions)
    work = traction @ jump.sum(0) * length / 2
    mass = np.array([[2, 1], [1, 2]]) / 6  # over the length
    cost = PENALTY * (LAME + 2 * SHEAR) * np.einsum("eka,ef,fkb->ab", jump, mass, jump)
    return cost - work - work.T


# --------------------------------------------------------------------------------------- hierarchy
PROBLEMS: dict[str, Callable[[int], Problem]] = {"2d": plate, "3d": cube, "dg": triangles}


def built(problem: Problem, most_coarse: int = MOST_COARSE) -> Any:
    """pyamg's hierarchy. The modes go in as they are: rigid bodies need no improvement but near the edges."""
    import pyamg

    np.random.seed(0)  # noqa: NPY002 - where pyamg takes its random vectors from
    with short_arnoldi(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Having less target vectors")  # triangles have 6 unknowns, and 3 modes
        return pyamg.smoothed_aggregation_solver(
            problem.A, problem.modes, strength=("symmetric", {"theta": problem.strength}), max_coarse=most_coarse,
            improve_candidates=None, presmoother=None, postsmoother=None,
        )  # fmt: skip


@contextlib.contextmanager
def short_arnoldi() -> Iterator[None]:
    """Let pyamg find the largest eigenvalue of D A in fewer steps: it has no option for that."""
    from pyamg.aggregation import smooth

    usual = smooth.approximate_spectral_radius
    smooth.approximate_spectral_radius = partial(usual, maxiter=ARNOLDI_STEPS, restart=0)
    try:
        yield
    finally:
        smooth.approximate_spectral_radius = usual


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
        """A line for whoever waits, with the time since the start; it is there even if the run is killed."""
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
        """The file with what is there so far; that it was written is told where the steps are."""
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
        """The hierarchy where it is solved; the largest eigenvalues are found there."""
        device, spent = run.device, 0.0

        def move(M: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            there = M.to_device(device)
            synchronize(bg.get_array_module(there))
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

    def same(self, source: Hierarchy, convert: Callable[[Any], Any], smoother: Smoother, every: int) -> Peer:
        """The same algorithm with other matrices."""
        hierarchy = source.moved(convert)
        xp = bg.get_array_module(hierarchy.levels[0].A)
        cycle, b = Cycle(hierarchy, smoother), xp.asarray(self.problem.b)
        return Peer(lambda: conjugate_gradients(b, cycle, TOLERANCE, MOST_ITERATIONS, every), xp)

    def host_peers(self, smoother: Smoother, every: int) -> dict[str, Callable[[], Peer]]:
        """What solves the same on the host, each to be made ready by a call."""
        found: dict[str, Callable[[], Peer]] = {}
        if isinstance(smoother, Jacobi):
            found["pyamg"] = lambda: Peer(by_pyamg(self.ml, self.host, smoother, self.problem.b), np)
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

    def compare(self, peer: str, ready: Callable[[], Peer], run: Run) -> None:
        """Time a peer; what it found stands in the row, or why it found nothing."""
        try:
            with run.step(f"{self.case.about}, {self.smoother}: {peer}, all its repeats"):
                theirs, taken = timed_peer(ready)
        except Exception as error:  # what is not there must not stop a run
            self.row["left_out"][peer] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
            run.say(f"{self.case.about}, {self.smoother}: {peer} failed, {self.row['left_out'][peer]}")
            return
        self.row["left_out"].pop(peer, None)
        peers = self.row["peers"]
        peers[peer] = {
            "seconds": taken, "iterations": theirs.iterations, "apart": apart(self.solution, theirs),
            "residual": theirs.residuals[-1] / theirs.residuals[0],
        }  # fmt: skip
        self.row["same"] = all(it["iterations"] == self.solution.iterations for it in peers.values())
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
    with run.step(f"{case.about}, {name}: first solve"):
        solution = conjugate_gradients(b, cycle, TOLERANCE, MOST_ITERATIONS, every)
        r = b - A @ solution.x
        residual = float(xp.sqrt(r.dot(r) / b.dot(b)))
    row: dict[str, Any] = {
        "problem": case.name, "unknowns": len(b), "levels": len(case.ml.levels), "smoother": name, "every": every,
        "blocks": [list(level.A.blocksize) for level in case.host.levels],
        "rows": [level.A.shape[0] for level in case.host.levels] + [len(case.host.inverse)],
        "iterations": solution.iterations, "residual": residual, "residuals": solution.residuals,
        **{f"{what}_seconds": seconds for what, seconds in case.seconds.items()}, "versions": versions(),
    }  # fmt: skip
    if solution.iterations is None or not residual <= 1.1 * TOLERANCE:
        run.table.add(f"{about(case, name)} | WRONG: residual {residual:.1e}, not timed", **row, good=False)
        run.wrong.append(f"{case.about}, {name}")
        return None
    with run.step(f"{case.about}, {name}: repeats, and products alone"):
        _, seconds = timed(lambda: conjugate_gradients(b, cycle, TOLERANCE, MOST_ITERATIONS, every), xp, first=False)
        inside = seconds_of_products(cycle, b, len(solution.residuals) - 1)
    run.say(f"{case.about}, {name}: ours {solution.iterations} iterations, {seconds * 1e3:.1f} ms")
    waiting = {} if xp is np else {"cupyx csr": "not reached"}
    row |= {
        "good": True, "seconds": seconds, "products": inside, "peers": {}, "same": True,
        "left_out": waiting | {"pyamg": "not reached", "scipy bsr": "not reached"},
    }  # fmt: skip
    line = Line(case, name, replace(solution, x=None), seconds, row)
    run.table.rows.append(row)
    if xp is not np:
        line.compare("cupyx csr", lambda: case.same(ours, lambda M: M.tocsr(), smoother, every), run)
    cells, off = peers_of(row, seconds, beside(xp is not np))
    run.table.note(
        f"{line.about} | {solution.iterations:4} {seconds * 1e3:9.1f} ms | {inside['A, P, R'] / seconds:8.0%} |{cells} "
        f"{residual:8.1e} | {off} | {case.seconds['assembly']:6.1f} s | {case.seconds['set_up']:6.1f} s | "
        f"{case.seconds['moving']:6.2f} s"
    )
    return line


def compare_with_host(line: Line, run: Run) -> None:
    """The peers on the host beside a line, unless there are too many unknowns or there is too little time."""
    left_out, size = line.row["left_out"], line.row["unknowns"]
    peers = line.case.host_peers(SMOOTHERS[line.smoother], run.every)
    for peer, ready in peers.items():
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
    """Of lines of our solver, and of lines of the peers on the host."""
    start = f"{'problem':7} {'unknowns':>9} {'levels':>6} {'smoother':9} | {'iterations, ours':>17} |"
    ours, host = ("".join(f" {peer:>26} |" for peer in names) for names in (beside(on_gpu), HOST_PEERS))
    return (
        f"{start} {'products':>8} |{ours} residual | apart | assembly | {'set-up':>8} | {'moving':>8}",
        f"{start}{host} {'pyamg to':>8} | apart",
    )


def left_out(rows: list[dict[str, Any]]) -> list[str]:
    """Why there is a "-" where there is one."""
    cases: dict[str, list[str]] = {}
    for row in rows:
        for peer, reason in row.get("left_out", {}).items():
            cases.setdefault(f"{peer}: {reason}", []).append(f"{row['problem']} {row['unknowns']:,} {row['smoother']}")
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
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S",
        help="scipy and pyamg do not begin what would end later than that, from the start",
    )  # fmt: skip
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
    ours, host = headings(options.device == "cuda")
    run = Run(table, options.device, options.keep, options.every, options.host_most, options.seconds)
    sizes = options.unknowns or list(UNKNOWNS[options.device])
    with writing(table, options.keep):
        table.note(ours)
        lines = solve_all(sizes, options.problem, options.smoother, run)
        if lines:
            table.note(host)
        for line in sorted(lines, key=lambda it: options.smoother.index(it.smoother)):
            compare_with_host(line, run)
            run.write()
        for reason in left_out(table.rows):
            table.note(reason)
    if run.wrong:
        raise SystemExit(f"wrong: {', '.join(run.wrong)}")


if __name__ == "__main__":
    main()
