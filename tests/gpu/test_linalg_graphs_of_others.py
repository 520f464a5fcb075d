"""GMRES and batches on a card: iterations as CUDA graphs beside launched ones. With ``-s`` it prints their times."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.linalg import graphs, krylov, restarted

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
    """Calls a method with or without graphs, and keeps the functions that were to be replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graph = True
        self.replays: list[Any] = []
        replay = graphs.Replay

        def kept(*args: Any) -> Any:
            self.replays.append(replay(*args))
            return self.replays[-1]

        for module in (restarted, krylov):
            capturable = module.capturable
            monkeypatch.setattr(module, "capturable", lambda *args, ask=capturable: self.graph and ask(*args))
        for module in (restarted, graphs):
            monkeypatch.setattr(module, "Replay", kept)

    def __call__(self, method: str, A: Any, b: Any, *, graph: bool, **options: Any) -> tuple[Any, Any]:
        self.graph = graph
        self.replays.clear()
        x, info = getattr(linalg, method)(A, b, **options)
        return x.get(), info

    @property
    def captured(self) -> list[bool]:
        """Whether each function has become a graph; none may have been refused."""
        assert [x.refusal for x in self.replays] == [None] * len(self.replays)
        return [x.graph is not None for x in self.replays]


@pytest.fixture
def solve(graphs_on_a_card: None, monkeypatch: pytest.MonkeyPatch) -> Solves:  # noqa: F811
    return Solves(monkeypatch)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let many iterations be expected at any time, so that they are captured and made ahead until the end."""
    monkeypatch.setattr(graphs, "iterations_left", lambda left: np.inf)


def quietly(solve: Solves, *args: Any, **options: Any) -> tuple[Any, Any]:
    """Solve as far as `maxiter` allows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", linalg.SolverWarning)
        return solve(*args, **options)


@pytest.mark.parametrize("kind", PRECONDITIONERS)
@pytest.mark.parametrize("method", ["gmres", "fgmres"])
@pytest.mark.parametrize("columns", [None, 3])
def test_graphs_of_gmres_find_the_bits_of_the_plain_loop(
    solve: Solves, many: None, method: str, kind: str, columns: int | None
) -> None:
    A, modes, b = problem("plate", 3000)
    b, M = several(b, columns), PRECONDITIONERS[kind](A, modes)
    options: dict[str, Any] = {"M": M, "rtol": 1e-9, "restart": 6, "maxiter": 20}
    want, wanted = quietly(solve, method, A, b, graph=False, **options)
    assert not any(solve.captured)
    for repeated in range(3):
        x, info = quietly(solve, method, A, b, graph=True, **options)
        assert info == wanted
        np.testing.assert_array_equal(x, want)
        assert any(solve.captured) and (all(solve.captured) or repeated < 2)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
@pytest.mark.parametrize("method", ["gmres", "fgmres"])
def test_other_dtypes_of_gmres_are_replayed_too(solve: Solves, many: None, method: str, dtype: str) -> None:
    A, modes, b = problem("plate", 3000, dtype)
    M = linalg.smoothed_aggregation(A, modes)
    options = {"M": M, "rtol": 1e-4 if dtype in ("float32", "complex64") else 1e-8, "restart": 5}
    want, wanted = solve(method, A, b, graph=False, **options)
    for _ in range(3):
        x, info = solve(method, A, b, graph=True, **options)
        assert info == wanted == 0
        np.testing.assert_array_equal(x, want)
    assert all(solve.captured)


def batch(dtype: str = "float64", count: int = 5) -> tuple[Any, Any]:
    """A plate on beds of several stiffnesses, and loads."""
    import cupy

    A, _, b = problem("plate", 3000, dtype)
    bed = bg.eye(A.shape[0], blocksize=A.blocksize, dtype=dtype, device="cuda")
    scale = np.dtype(dtype).type
    loads = cupy.asarray(np.random.default_rng(1).standard_normal((count, len(b))).astype(dtype))
    return bg.bsr_batch([A + bed * scale(10.0**-k) for k in range(count)]), loads


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("kind", ["none", "block_jacobi", "multigrid for all"])
@pytest.mark.parametrize("columns", [None, 2])
def test_graphs_of_a_batch_find_the_bits_of_the_plain_loop(
    solve: Solves, many: None, kind: str, dtype: str, columns: int | None
) -> None:
    import cupy

    A, b = batch(dtype)
    if columns is not None:
        b = cupy.stack([b, b[:, ::-1] * b.dtype.type(0.5)], axis=2)
    M = {
        "none": lambda: None,
        "block_jacobi": lambda: linalg.block_jacobi(A),
        "multigrid for all": lambda: linalg.smoothed_aggregation(A[1]),
    }[kind]()
    options = {"M": M, "rtol": 1e-5 if dtype in ("float32", "complex64") else 1e-9, "maxiter": 60}
    want, wanted = quietly(solve, "cg", A, b, graph=False, **options)
    assert not any(solve.captured)
    for _ in range(2):
        x, info = quietly(solve, "cg", A, b, graph=True, **options)
        np.testing.assert_array_equal(info, wanted)
        np.testing.assert_array_equal(x, want)
        assert all(solve.captured)


def test_solves_on_streams_keep_their_memory_apart(solve: Solves) -> None:
    A, modes, b = problem("plate", 3000)
    gmres = partial(solve, "gmres", A, b, M=linalg.smoothed_aggregation(A, modes), rtol=1e-8, restart=5)
    want, _ = gmres(graph=False)
    check_on_streams(partial(gmres, graph=True), want, captured=lambda: any(solve.captured))


def test_new_numbers_in_the_hierarchy_and_the_matrix_are_used(solve: Solves) -> None:
    check_new_numbers(partial(solve, "gmres", graph=True))


def test_times_with_and_without_a_graph(solve: Solves) -> None:
    """A solve with a graph beside one with a launch for each kernel: the times are printed, not judged."""
    cases: list[tuple[str, str, Any, Any, Any]] = []
    for name, unknowns in (("plate", 30_000), ("cube", 30_000), ("cube", 250_000)):
        A, modes, b = problem(name, unknowns)
        M = linalg.smoothed_aggregation(A, modes)
        cases += [(name, method, A, M, b) for method in ("gmres", "fgmres")]
    A, b = batch(count=16)
    cases.append(("batch", "cg", A, linalg.block_jacobi(A), b))
    lines = []
    for name, method, A, M, b in cases:
        call = partial(quietly, solve, method, A, b, M=M, rtol=1e-8, maxiter=200)
        lines.append(f"{name:6} {method:6} {b.size:9,} unknowns: {times(call)}")
    print("\n" + "\n".join(lines))
