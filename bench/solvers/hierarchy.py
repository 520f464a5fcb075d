"""The multigrid hierarchy of a problem, built by pyamg on the host."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from .problems import Problem

#: The largest number of nodes of the coarsest level: at most 600 unknowns, a dense matrix of 3 MB
MOST_COARSE = 100
#: Steps of Arnoldi's iteration for the eigenvalue that scales the smoothing of P; pyamg's 30 take most of its set-up
ARNOLDI_STEPS = 10
#: The largest norm that rounding leaves of a unit vector that lies in the space of the earlier vectors
BREAKDOWN = 1e-10


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
    """Let pyamg find the largest eigenvalue of D A in fewer steps, and faster: it has no option for that."""
    from pyamg.aggregation import smooth

    usual = smooth.approximate_spectral_radius
    smooth.approximate_spectral_radius = spectral_radius
    try:
        yield
    finally:
        smooth.approximate_spectral_radius = usual


def spectral_radius(A: Any) -> float:
    """An estimate of the largest eigenvalue by pyamg's Arnoldi iteration, with products of all vectors at once."""
    steps = min(ARNOLDI_STEPS, A.shape[0])
    H, V = np.zeros((steps + 1, steps)), np.empty((steps + 1, A.shape[0]))
    V[0] = np.random.rand(A.shape[0])  # noqa: NPY002 - as pyamg draws it
    V[0] /= np.linalg.norm(V[0])
    for step in range(steps):
        known, w = V[: step + 1], A @ V[step]
        H[: step + 1, step] = known @ w
        w -= H[: step + 1, step] @ known
        left = H[step + 1, step] = np.linalg.norm(w)
        if left < BREAKDOWN:
            steps = step + 1
            break
        np.divide(w, left, out=V[step + 1])
    return float(abs(np.linalg.eigvals(H[:steps, :steps])).max())
