"""CG with a V-cycle of smoothed aggregation, generic over where the matrices live: NumPy or CuPy.

Matrices are ours, scipy's or cupyx's: the same algorithm with other products. Set-up is from outside: levels with A, P
and R, as pyamg leaves them. All vectors stay where they are, so that on a GPU an iteration is captured once as a CUDA
graph, and replayed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import bsrgemm as bg

from ..internals import replay
from .problems import Problem

#: Steps of the power iteration that finds the largest eigenvalue of D A, to a few percent from below
POWER_STEPS = 15
#: Eigenvalues of a pseudo-inverse that count as zero, over the largest
CUT = 1e-13

#: The largest number of nodes of the coarsest level: at most 600 unknowns, a dense matrix of 3 MB
MOST_COARSE = 100


def built(problem: Problem, most_coarse: int = MOST_COARSE) -> Any:
    """pyamg's hierarchy. The modes go in as they are: rigid bodies need no improvement but near the edges."""
    import pyamg

    np.random.seed(0)  # noqa: NPY002 - where pyamg takes its random vectors from
    return pyamg.smoothed_aggregation_solver(
        problem.A, problem.modes, max_coarse=most_coarse, improve_candidates=None, presmoother=None, postsmoother=None
    )


def multiply(A: Any, x: Any, out: Any, alpha: float = 1.0, beta: float = 0.0) -> None:
    """``out = alpha * (A @ x) + beta * out``, by the library that the matrix is of."""
    if isinstance(A, bg.bsr_array | bg.bsr_matrix):
        bg.matmul(A, x, out=out, alpha=alpha, beta=beta)
        return
    if type(A).__module__.startswith("cupyx."):
        from cupyx import cusparse

        cusparse.spmv(A, x, out, alpha, beta)
        return
    product = A @ x
    if alpha != 1:
        product *= alpha
    if beta == 0:
        out[...] = product
        return
    if beta != 1:
        out *= beta
    out += product


@cache
def fused(function: Callable[..., None], xp: Any) -> Callable[..., None]:
    """A function that works element by element, in one kernel if its arrays are CuPy's."""
    return xp.fuse(function) if hasattr(xp, "fuse") else function


# ------------------------------------------------------------------------------------------ levels
class Level:
    """Matrices and vectors of a level: D inverts the diagonal blocks of A; `rho` is the largest eigenvalue of D A."""

    def __init__(self, A: Any, P: Any, R: Any, D: Any, rho: float | None = None) -> None:
        self.A, self.P, self.R, self.D, self.rho = A, P, R, D, rho
        xp = bg.get_array_module(A)
        self.x, self.r, self.d = (xp.zeros(A.shape[0], A.dtype) for _ in range(3))
        #: what the next level solves for
        self.coarse = xp.zeros(P.shape[1], A.dtype)

    def moved(self, convert: Callable[[Any], Any]) -> Level:
        """The level with other matrices; where they live the eigenvalue is found if it is not known yet."""
        A, P, R, D = (convert(M) for M in (self.A, self.P, self.R, self.D))
        level = Level(A, P, R, D, self.rho)
        if level.rho is None:
            self.rho = level.rho = largest_eigenvalue(level)
        return level

    def residual(self, b: Any, x: Any) -> None:
        """``r = b - A x``"""
        self.r[...] = b
        multiply(self.A, x, self.r, -1.0, 1.0)


def inverse_blocks(A: Any) -> Any:
    """The inverses of the diagonal blocks; pseudo-inverses of singular ones, as of aggregates of few nodes."""
    try:
        return A.inverse_block_diagonal()
    except np.linalg.LinAlgError:
        blocks = np.linalg.pinv(A.block_diagonal(), CUT, hermitian=True)
        return bg.bsr_array((blocks, (np.arange(len(blocks)), np.arange(len(blocks)))), shape=A.shape)


def largest_eigenvalue(level: Level, steps: int = POWER_STEPS) -> float:
    """The largest eigenvalue of D A, from below: power iteration with Rayleigh quotients of its symmetric form."""
    xp = bg.get_array_module(level.A)
    v = xp.asarray(np.random.default_rng(0).standard_normal(level.A.shape[0]).astype(level.A.dtype))
    found = 0.0
    for _ in range(steps):
        u = level.A @ v
        w = level.D @ u
        found = u.dot(w) / v.dot(u)
        v = w / xp.sqrt(w.dot(w))
    return float(found)  # synchronize!


@dataclass
class Hierarchy:
    """Levels from the finest on, and the inverse of the coarsest matrix: of all blocks, for the same products."""

    levels: list[Level]
    inverse: Any

    @classmethod
    def of(cls, levels: Sequence[Any]) -> Hierarchy:
        """From levels with A, P and R on the host, the last with A alone: those of pyamg, whose arrays it shares."""
        if len(levels) < 2:
            raise ValueError(f"levels: wanted at least two, got {len(levels)}")
        found = []
        for level, below in itertools.pairwise(levels):
            fine, coarse = level.A.blocksize[0], below.A.blocksize[0]
            A = bg.bsr_array(level.A)
            P = bg.bsr_array(level.P, blocksize=(fine, coarse))
            R = bg.bsr_array(level.R, blocksize=(coarse, fine))
            found.append(Level(A, P, R, inverse_blocks(A)))
        last = levels[-1].A
        inverse = np.linalg.pinv(last.toarray(), CUT, hermitian=True)
        return cls(found, bg.bsr_array(inverse, blocksize=last.blocksize))

    def moved(self, convert: Callable[[Any], Any]) -> Hierarchy:
        """The same with every matrix converted: to the GPU, or to another library's format."""
        return Hierarchy([level.moved(convert) for level in self.levels], convert(self.inverse))


# --------------------------------------------------------------------------------------- smoothers
#: (level, b, x, zero) -> improves x of ``A x = b``; `zero`: x counts as zeros, whatever it holds
Smoother = Callable[..., None]


@dataclass(frozen=True)
class Jacobi:
    """``x += omega / rho * D (b - A x)``, some sweeps."""

    omega: float = 4 / 3
    sweeps: int = 1

    def weight(self, level: Level) -> float:
        assert level.rho is not None
        return self.omega / level.rho

    def __call__(self, level: Level, b: Any, x: Any, zero: bool = False) -> None:
        weight = self.weight(level)
        for sweep in range(self.sweeps):
            if zero and sweep == 0:
                multiply(level.D, b, x, weight)
                continue
            level.residual(b, x)
            multiply(level.D, level.r, x, weight, 1.0)


@dataclass(frozen=True)
class Chebyshev:
    """The polynomial in D A of this degree that is smallest on eigenvalues from `low` to `high` times rho."""

    degree: int = 2
    low: float = 0.15
    high: float = 1.1

    def __call__(self, level: Level, b: Any, x: Any, zero: bool = False) -> None:
        assert level.rho is not None
        middle, half = ((self.high + sign * self.low) / 2 * level.rho for sign in (1, -1))
        r, d = level.r, level.d
        if zero:
            r[...] = b
        else:
            level.residual(b, x)
        multiply(level.D, r, d, 1 / middle)
        if zero:
            x[...] = d
        else:
            x += d
        step = half / middle
        for _ in range(self.degree - 1):
            multiply(level.A, d, r, -1.0, 1.0)
            step, before = 1 / (2 * middle / half - step), step
            multiply(level.D, r, d, 2 * step / half, step * before)
            x += d


# -------------------------------------------------------------------------------- cycle and solver
class Cycle:
    """One V-cycle from x = 0: a symmetric preconditioner, since it smooths in the same way before and after."""

    def __init__(self, hierarchy: Hierarchy, smoother: Smoother) -> None:
        self.hierarchy, self.smoother = hierarchy, smoother
        inverse = hierarchy.inverse
        #: what the coarsest level finds
        self.coarsest = bg.get_array_module(inverse).zeros(inverse.shape[0], inverse.dtype)

    def __call__(self, b: Any) -> Any:
        """An approximate solution of ``A x = b``: a vector of the finest level, which the next call overwrites."""
        return self._solve(0, b)

    def _solve(self, depth: int, b: Any) -> Any:
        if depth == len(self.hierarchy.levels):
            multiply(self.hierarchy.inverse, b, self.coarsest)
            return self.coarsest
        level = self.hierarchy.levels[depth]
        x = level.x
        self.smoother(level, b, x, zero=True)
        level.residual(b, x)
        multiply(level.R, level.r, level.coarse)
        multiply(level.P, self._solve(depth + 1, level.coarse), x, 1.0, 1.0)
        self.smoother(level, b, x)
        return x


def turn(p: Any, z: Any, rz: Any, before: Any) -> None:
    """The next direction."""
    p *= rz / before
    p += z


def advance(x: Any, r: Any, p: Any, q: Any, rz: Any, pq: Any) -> None:
    """Step along p to the x that is nearest to the solution in the norm of A; q is A p."""
    x += rz / pq * p
    r -= rz / pq * q


class Iteration:
    """An iteration of CG. Its vectors, and the numbers between two iterations, stay where they are."""

    def __init__(self, cycle: Cycle) -> None:
        self.cycle = cycle
        self.A = cycle.hierarchy.levels[0].A
        self.xp = xp = bg.get_array_module(self.A)
        self.x, self.r, self.p, self.q, self.work = (xp.zeros(self.A.shape[0], self.A.dtype) for _ in range(5))
        #: products of vectors: r z of this iteration and of the one before, p q, and r r
        self.rz, self.before, self.pq, self.rr = (xp.zeros((), self.A.dtype) for _ in range(4))
        self.turn, self.advance = fused(turn, xp), fused(advance, xp)

    def begin(self, b: Any) -> None:
        """Start from x = 0. With an infinite previous r z the first direction has no part of an earlier one."""
        self.x.fill(0)
        self.p.fill(0)
        self.rz.fill(math.inf)
        self.r[...] = b
        self._dot(self.r, self.r, self.rr)

    def __call__(self) -> None:
        z = self.cycle(self.r)
        self.before[...] = self.rz
        self._dot(self.r, z, self.rz)
        self.turn(self.p, z, self.rz, self.before)
        multiply(self.A, self.p, self.q)
        self._dot(self.p, self.q, self.pq)
        self.advance(self.x, self.r, self.p, self.q, self.rz, self.pq)
        self._dot(self.r, self.r, self.rr)

    def _dot(self, u: Any, v: Any, out: Any) -> None:
        """``out = u v``, without cuBLAS: CuPy does not capture it. A ReductionKernel has one CTA for all of it."""
        self.xp.multiply(u, v, out=self.work)
        self.xp.sum(self.work, out=out)


@dataclass(frozen=True)
class Solution:
    """The result of CG: x, the first iteration below the tolerance, norms of residuals, and whether it was replayed."""

    x: Any
    iterations: int | None
    residuals: list[float]
    graph: bool = False
    refusal: str | None = None


class ConjugateGradients:
    """CG with a cycle. Its first solve captures an iteration, unless `graph` is False; all others replay it."""

    def __init__(self, cycle: Cycle, graph: bool = True) -> None:
        self.iteration = Iteration(cycle)
        self.iterate = replay(self.iteration, self.iteration.xp, graph)

    def __call__(self, b: Any, tol: float = 1e-8, most: int = 200) -> Solution:
        """Solve ``A x = b`` from x = 0 until the residual's norm, which the host reads, is below `tol` times b's."""
        state = self.iteration
        squares = state.xp.zeros(most + 1, b.dtype)
        state.begin(b)
        squares[0] = state.rr
        enough = tol * math.sqrt(float(state.rr))  # synchronize!
        for done in range(1, most + 1):
            self.iterate()
            squares[done] = state.rr
            if not enough <= math.sqrt(float(state.rr)) < math.inf:  # synchronize!
                break
        residuals = [math.sqrt(square) for square in squares[: done + 1].tolist()]
        iterations = next((k for k, norm in enumerate(residuals) if norm < enough), None)
        return Solution(state.x.copy(), iterations, residuals, self.iterate.graph is not None, self.iterate.refusal)
