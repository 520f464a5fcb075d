"""The multigrid solver of the benchmarks on a card: iterations replayed as a CUDA graph, beside launched ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from bench.solvers import amg

from .repeats import bystanders, intact

pytestmark = pytest.mark.gpu

#: Nodes along a side
SIDE = 60


def levels(block: int, count: int = 3) -> list[SimpleNamespace]:
    """Poisson's equation for `block` unknowns a node that see each other, by smoothed aggregates of 3 x 3 nodes."""
    rng = np.random.default_rng(block)
    mixed = rng.standard_normal((block, block))
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=(-1, 0, 1), shape=(SIDE, SIDE))
    whole = scipy.sparse.kronsum(line, line)
    A = scipy.sparse.kron(whole, mixed @ mixed.T + block * np.eye(block), format="bsr")
    found = []
    side = SIDE
    for _ in range(count - 1):
        place = np.arange(side) // 3
        pieces = scipy.sparse.csr_array((np.ones(side), (np.arange(side), place)))
        T = scipy.sparse.kron(scipy.sparse.kron(pieces, pieces), np.eye(block), format="bsr")
        scaled = scipy.sparse.diags_array(2 / 3 / A.diagonal()) @ A
        P = (T - scaled @ T).tobsr((block, block))
        R = P.T.tobsr((block, block))
        found.append(SimpleNamespace(A=A, P=P, R=R))
        A, side = (R @ A @ P).tobsr((block, block)), place[-1] + 1
    return [*found, SimpleNamespace(A=A)]


def solver(block: int, smoother: str, **options: Any) -> Any:
    hierarchy = amg.Hierarchy.of(levels(block)).moved(lambda M: M.to_device("cuda"))
    return amg.ConjugateGradients(amg.Cycle(hierarchy, getattr(amg, smoother)()), **options)


def right_sides(block: int, count: int = 2) -> list[Any]:
    import cupy

    return [cupy.asarray(np.random.default_rng(k).standard_normal(SIDE**2 * block)) for k in range(count)]


@pytest.mark.parametrize("block", [2, 3, 6])
@pytest.mark.parametrize("smoother", ["Jacobi", "Chebyshev"])
def test_a_graph_finds_what_launches_find(block: int, smoother: str) -> None:
    replayed, launched = (solver(block, smoother, graph=graph) for graph in (True, False))
    for b in right_sides(block):
        found, want = replayed(b), launched(b)
        assert found.refusal is None and found.graph and not want.graph
        assert found.iterations == want.iterations == len(found.residuals) - 1 < 60
        np.testing.assert_allclose(found.residuals, want.residuals, rtol=1e-12)
        np.testing.assert_allclose(found.x.get(), want.x.get(), rtol=1e-9, atol=1e-12)
        r = b - replayed.iteration.A @ found.x
        assert float((r * r).sum()) ** 0.5 == pytest.approx(found.residuals[-1], rel=1e-4)


def test_a_graph_keeps_its_memory_to_itself() -> None:
    """Arrays that are made after the capture lie elsewhere, and those of before may go."""
    import cupy

    solve, (b, _) = solver(3, "Chebyshev"), right_sides(3)
    want = solve(b)
    assert want.graph
    cupy.get_default_memory_pool().free_all_blocks()
    others = bystanders(8 << k for k in range(4, 18) for _ in range(8))
    found = solve(b)
    np.testing.assert_allclose(found.residuals, want.residuals, rtol=1e-12)
    assert intact(others)


def test_cupyx_finds_the_same_and_says_whether_it_was_captured() -> None:
    ours, (b, _) = solver(3, "Jacobi"), right_sides(3)

    def sorted_csr(M: Any) -> Any:
        csr = M.tocsr()
        csr.sum_duplicates()
        return csr

    theirs = amg.ConjugateGradients(amg.Cycle(ours.iteration.cycle.hierarchy.moved(sorted_csr), amg.Jacobi()))
    for _ in range(2):
        found, want = theirs(b), ours(b)
        assert found.graph == (found.refusal is None)
        assert found.iterations == want.iterations
        np.testing.assert_allclose(found.residuals, want.residuals, rtol=1e-6)
