"""Conjugate gradients on a card: iterations as a CUDA graph beside launched ones. With ``-s`` it prints their times."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from bsrgemm import linalg
from bsrgemm.linalg import graphs, krylov

from .linalg_graph_cases import (  # noqa: F401  (a fixture)
    PRECONDITIONERS,
    check_new_numbers,
    check_on_streams,
    graphs_on_a_card,
    problem,
    several,
    times,
)

pytestmark = pytest.mark.gpu


class Solves:
    """Calls cg, and says whether iterations were captured, how many were made and how often the host looked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graph, self.made, self.looks = True, 0, 0
        self.replay: Any = None
        capturable, replay, make = krylov.capturable, graphs.Replay, graphs.Iterations.make

        def kept(*args: Any) -> Any:
            self.replay = replay(*args)
            return self.replay

        def counted(some: Any, left: Any, most: int) -> Any:
            found = make(some, left, most)
            self.made, self.looks = self.made + len(found), self.looks + 1
            return found

        monkeypatch.setattr(krylov, "capturable", lambda *args: self.graph and capturable(*args))
        monkeypatch.setattr(graphs, "Replay", kept)
        monkeypatch.setattr(graphs.Iterations, "make", counted)

    def __call__(self, A: Any, b: Any, *, graph: bool, **options: Any) -> tuple[Any, int]:
        self.graph, self.made, self.looks = graph, 0, 0
        x, info = linalg.cg(A, b, **options)
        return x.get(), info


@pytest.fixture
def solve(graphs_on_a_card: None, monkeypatch: pytest.MonkeyPatch) -> Solves:  # noqa: F811
    return Solves(monkeypatch)


@pytest.mark.parametrize("kind", PRECONDITIONERS)
@pytest.mark.parametrize("name", ["plate", "cube"])
@pytest.mark.parametrize("columns", [None, 3])
def test_a_graph_finds_the_bits_of_the_plain_loop(solve: Solves, kind: str, name: str, columns: int | None) -> None:
    A, modes, b = problem(name, 12_000)
    b, M = several(b, columns), PRECONDITIONERS[kind](A, modes)
    x, info = solve(A, b, graph=True, M=M, rtol=1e-8)
    assert solve.replay.refusal is None and solve.replay.graph is not None
    assert solve.looks < solve.made
    want, wanted = solve(A, b, graph=False, M=M, rtol=1e-8)
    assert solve.replay.graph is None and solve.looks == solve.made
    assert info == wanted == 0
    np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
def test_other_dtypes_are_replayed_too(solve: Solves, dtype: str) -> None:
    A, modes, b = problem("plate", 3000, dtype)
    M = linalg.smoothed_aggregation(A, modes)
    rtol = 1e-4 if dtype in ("float32", "complex64") else 1e-8
    (x, info), refusal = solve(A, b, graph=True, M=M, rtol=rtol), solve.replay.refusal
    want, wanted = solve(A, b, graph=False, M=M, rtol=rtol)
    assert info == wanted == 0 and refusal is None
    np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("maxiter", [1, 2, 3, 7, 10])
def test_x_and_info_are_those_of_the_last_iteration(solve: Solves, maxiter: int) -> None:
    A, _, b = problem("plate", 3000)
    found = []
    for graph in (True, False):
        with pytest.warns(linalg.SolverWarning, match=f"not converged after {maxiter} iterations"):
            found.append(solve(A, b, graph=graph, rtol=1e-12, maxiter=maxiter))
    assert found[0][1] == found[1][1] == maxiter
    np.testing.assert_array_equal(found[0][0], found[1][0])


def test_batches_end_in_the_right_iteration(solve: Solves, monkeypatch: pytest.MonkeyPatch) -> None:
    A, modes, b = problem("cube", 12_000)
    M = linalg.smoothed_aggregation(A, modes)
    monkeypatch.setattr(graphs, "iterations_left", lambda left: np.inf)
    for rtol in (1e-3, 1e-4, 1e-5, 1e-6, 1e-7):
        x, info = solve(A, b, graph=True, M=M, rtol=rtol)
        want, wanted = solve(A, b, graph=False, M=M, rtol=rtol)
        assert info == wanted == 0
        np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("make", [linalg.ilu0, linalg.ic0, linalg.block_ssor])
def test_decompositions_are_captured(solve: Solves, make: Any) -> None:
    A, _, b = problem("plate", 3000)
    x, info = solve(A, b, graph=True, M=make(A), rtol=1e-8)
    assert info == 0 and solve.replay.graph is not None
    want, _ = solve(A, b, graph=False, M=make(A), rtol=1e-8)
    np.testing.assert_array_equal(x, want)


def test_a_preconditioner_that_cannot_be_captured_is_called(solve: Solves) -> None:
    A, _, b = problem("plate", 3000)

    class Users(linalg.Preconditioner):
        _backend, shape, dtype = A._backend, A.shape, A.dtype

        def _apply(self, r: Any) -> Any:
            return 0.5 * r

    x, info = solve(A, b, graph=True, M=Users(), rtol=1e-8)
    want, _ = solve(A, b, graph=False, M=Users(), rtol=1e-8)
    assert info == 0 and solve.replay.graph is None
    np.testing.assert_array_equal(x, want)


def test_a_capture_that_fails_leaves_the_plain_loop(solve: Solves, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS is refused by CuPy in a capture; on the next solve nothing of that is left."""
    A, modes, b = problem("plate", 3000)
    M = linalg.smoothed_aggregation(A, modes)
    want, _ = solve(A, b, graph=False, M=M, rtol=1e-8)
    inverse = M._inverse
    with monkeypatch.context() as patch:
        patch.setattr(M, "_inverse", inverse.toarray())
        x, info = solve(A, b, graph=True, M=M, rtol=1e-8)
        assert info == 0 and solve.replay.graph is None and solve.replay.refusal.startswith("NotImplementedError")
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-7 * abs(want).max())
    x, info = solve(A, b, graph=True, M=M, rtol=1e-8)
    assert solve.replay.graph is not None
    np.testing.assert_array_equal(x, want)


def test_solves_on_streams_and_after_each_other_keep_their_memory_apart(solve: Solves) -> None:
    import cupy

    A, modes, b = problem("cube", 12_000)
    M = linalg.smoothed_aggregation(A, modes)
    want, _ = solve(A, b, graph=False, M=M, rtol=1e-8)
    pool = cupy.get_default_memory_pool()
    solve(A, b, graph=True, M=M, rtol=1e-8)
    used = pool.used_bytes()
    again = partial(solve, A, b, graph=True, M=M, rtol=1e-8)
    check_on_streams(again, want, captured=lambda: solve.replay.graph is not None)
    solve.replay = None
    assert pool.used_bytes() <= used + (1 << 20), "a solve leaves no memory of its graph"


def test_new_numbers_in_the_hierarchy_and_the_matrix_are_used(solve: Solves) -> None:
    check_new_numbers(partial(solve, graph=True))


def converge(solve: Solves, A: Any, b: Any, **options: Any) -> None:
    _, info = solve(A, b, **options)
    assert info == 0


def test_times_with_and_without_a_graph(solve: Solves) -> None:
    """A solve with a graph beside one with a launch for each kernel: the times are printed, not judged."""
    lines = []
    for name, unknowns in (("plate", 30_000), ("cube", 30_000), ("cube", 250_000)):
        A, modes, b = problem(name, unknowns)
        taken = times(partial(converge, solve, A, b, M=linalg.smoothed_aggregation(A, modes), rtol=1e-8))
        lines.append(f"{name:6} {len(b):9,} unknowns, {solve.made:3} iterations: {taken}")
    print("\n" + "\n".join(lines))
