"""Problems for tests of iterations as CUDA graphs on a card, and what holds for graphs of every method."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bench.solvers.problems import cube, plate
from bsrgemm import linalg
from bsrgemm.bsr import bsr_array

from .repeats import bystanders, intact, new_stream

PRECONDITIONERS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda A, modes: None,
    "matrix": lambda A, modes: A.inverse_block_diagonal(),
    "block_jacobi": lambda A, modes: linalg.block_jacobi(A),
    "chebyshev": lambda A, modes: linalg.chebyshev(A),
    "V-cycle": lambda A, modes: linalg.smoothed_aggregation(A, modes),
    "W-cycle": lambda A, modes: linalg.smoothed_aggregation(A, modes, cycle="W", smoother="jacobi"),
    "float32": lambda A, modes: linalg.smoothed_aggregation(A.astype("float32"), modes),
}


def problem(name: str, unknowns: int, dtype: str = "float64") -> tuple[Any, Any, Any]:
    """A matrix on the card, its near-nullspace modes and a load."""
    import cupy

    made = {"plate": plate, "cube": cube}[name](unknowns)
    A = bsr_array(made.A).astype(dtype).to_device("cuda")
    return A, cupy.asarray(made.modes.astype(dtype)), cupy.asarray(made.b.astype(dtype))


@pytest.fixture
def graphs_on_a_card() -> None:
    import cupy

    if not hasattr(cupy.cuda.runtime, "graphLaunch"):
        pytest.skip("only on a card: CUDA graphs")


def several(b: Any, columns: int | None) -> Any:
    """A load, or three of them as columns."""
    import cupy

    if columns is None:
        return b
    return cupy.stack([b, cupy.asarray(np.random.default_rng(0).standard_normal(len(b))), b * 1e-3], axis=1)


def check_on_streams(solve: Callable[[], tuple[Any, int]], want: Any, captured: Callable[[], bool]) -> None:
    """Solves on streams and after each other have the wanted bits, and write to no arrays that were made between."""
    import cupy

    for stream in (new_stream(), cupy.cuda.Stream.null, cupy.cuda.Stream.ptds):
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            for _ in range(3):
                others = bystanders(8 << k for k in range(4, 18))
                x, info = solve()
                assert info == 0 and captured()
                np.testing.assert_array_equal(x, want)
                assert intact(others)
            stream.synchronize()


def check_new_numbers(solve: Callable[..., tuple[Any, int]]) -> None:
    """A matrix and its hierarchy with twice the values have half the solution."""
    A, modes, b = problem("plate", 3000)
    M = linalg.smoothed_aggregation(A, modes)
    x, _ = solve(A, b, M=M, rtol=1e-10)
    A.data *= 2
    M.refresh(A)
    y, info = solve(A, b, M=M, rtol=1e-10)
    assert info == 0
    np.testing.assert_allclose(2 * y, x, rtol=1e-6, atol=1e-8 * abs(x).max())


def times(solve: Callable[..., Any]) -> str:
    """The best of four solves with a graph, of which the first captures it, and without one, as a text."""
    import cupy

    taken = {}
    for graph in (True, False):
        found = []
        for _ in range(4):
            cupy.cuda.get_current_stream().synchronize()
            start = time.perf_counter()
            solve(graph=graph)
            found.append(time.perf_counter() - start)
        taken[graph] = min(found)
    return f"graph {taken[True] * 1e3:8.2f} ms, plain {taken[False] * 1e3:8.2f} ms, {taken[False] / taken[True]:.2f} x"
