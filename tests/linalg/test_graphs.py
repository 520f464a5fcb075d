"""Iterations of one solve that are replayed as graphs, on a fake card."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.linalg import graphs

from .capture_model import Card, may_be_captured_in_a_capture, told  # noqa: F401  (fixtures)
from .problems import hermitian, laplacian, numbers, plate

pytest.importorskip("cupy")

pytestmark = pytest.mark.fake


PRECONDITIONERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda A: None,
    "matrix": lambda A: A.inverse_block_diagonal(),
    "block_jacobi": linalg.block_jacobi,
    "chebyshev": linalg.chebyshev,
    "ilu0": linalg.ilu0,
    "block_ssor": lambda A: linalg.block_ssor(A, 1.3),
    "V": lambda A: linalg.smoothed_aggregation(A, max_coarse=20),
    "W": lambda A: linalg.smoothed_aggregation(A, max_coarse=20, cycle="W", smoother="jacobi"),
    "float32": lambda A: linalg.smoothed_aggregation(A.astype("float32"), max_coarse=20),
}


@pytest.mark.parametrize("kind", PRECONDITIONERS)
@pytest.mark.parametrize("columns", [None, 3])
def test_a_graph_finds_the_bits_of_the_plain_loop(
    fake: Any, monkeypatch: pytest.MonkeyPatch, kind: str, columns: int | None
) -> None:
    A = plate(5)[0].to_device("cuda")
    b = fake.from_host(numbers(50 if columns is None else (50, columns)))
    M = PRECONDITIONERS[kind](A)
    want, info = linalg.cg(A, b, M=M, rtol=1e-9)
    card = Card(monkeypatch)
    x, replayed = linalg.cg(A, b, M=M, rtol=1e-9)
    assert info == replayed == 0
    np.testing.assert_array_equal(fake.to_host(x), fake.to_host(want))
    # the first iteration is called; the capture waits for it once
    assert card.events[:5] == ["step", "synchronize", "begin", "end", "launch"]
    assert set(card.events[5:]) == {"launch"}


@pytest.mark.parametrize("kind", ["none", "matrix", "chebyshev"])
@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("method", ["minres", "bicgstab"])
def test_graphs_of_other_methods_find_the_bits_of_the_plain_loop(
    fake: Any, monkeypatch: pytest.MonkeyPatch, method: str, kind: str, columns: int | None, dtype: str
) -> None:
    A = plate(5)[0].astype(dtype).to_device("cuda")
    solve, b = getattr(linalg, method), fake.from_host(numbers(50 if columns is None else (50, columns), dtype))
    M = PRECONDITIONERS[kind](A)
    want, info = solve(A, b, M=M, rtol=1e-8)
    card = Card(monkeypatch)
    for events in (["step", "synchronize", "begin", "end", "launch"], ["launch"]):
        x, replayed = solve(A, b, M=M, rtol=1e-8)
        assert info == replayed == 0
        np.testing.assert_array_equal(fake.to_host(x), fake.to_host(want))
        assert card.happened() == events


@pytest.mark.parametrize("maxiter", [1, 2, 5, 6, 7, 23])
@pytest.mark.parametrize("method", ["cg", "minres", "bicgstab"])
def test_x_is_that_of_the_last_iteration(fake: Any, monkeypatch: pytest.MonkeyPatch, method: str, maxiter: int) -> None:
    A, b = laplacian(60, 2).to_device("cuda"), fake.from_host(numbers(120))
    found = []
    for graph in (False, True):
        if graph:
            card = Card(monkeypatch)
        with pytest.warns(linalg.SolverWarning, match=f"not converged after {maxiter} iterations"):
            found.append(getattr(linalg, method)(A, b, rtol=1e-12, maxiter=maxiter))
    assert found[0][1] == found[1][1] == maxiter
    np.testing.assert_array_equal(*(fake.to_host(x) for x, _ in found))
    assert card.events.count("launch") + card.events.count("step") == maxiter


def test_iterations_that_were_made_ahead_leave_nothing(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of four throughout, so that the solution is found in the middle of one."""
    A, b = hermitian(40).to_device("cuda"), fake.from_host(numbers((40, 2)))
    results, ends = [], list[int]()
    for rtol in (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8):
        results.append(fake.to_host(linalg.cg(A, b, rtol=rtol)[0]))
    card = Card(monkeypatch)
    monkeypatch.setattr(graphs, "iterations_left", lambda left: np.inf)
    for rtol, want in zip((1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8), results, strict=True):
        made = card.events.count("launch")
        x, info = linalg.cg(A, b, rtol=rtol)
        assert info == 0
        np.testing.assert_array_equal(fake.to_host(x), want)
        ends.append((card.events.count("launch") - made) % graphs.MOST_AHEAD)
    # one iteration alone, which captures; then three, half of those of the solve before; and otherwise whole batches
    assert ends == [1, 3, 0, 0, 0, 0]


def test_the_host_reads_once_for_several_iterations(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, b = laplacian(60, 2).to_device("cuda"), fake.from_host(numbers(120))
    card, batches = Card(monkeypatch), list[int]()
    make = graphs.Iterations.make

    def counted(self: Any, left: Any, most: int) -> Any:
        found = make(self, left, most)
        batches.append(len(found))
        return found

    monkeypatch.setattr(graphs.Iterations, "make", counted)
    linalg.cg(A, b, rtol=1e-9)
    made = card.events.count("launch") + card.events.count("step")
    assert sum(batches) == made > 40 and len(batches) < made / 2
    batches.clear()
    linalg.cg(A, b, rtol=1e-9, callback=lambda x: None)
    assert set(batches) == {1}


def test_what_must_be_called_each_time_is_not_captured(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, b = hermitian(40).to_device("cuda"), fake.from_host(numbers(40))
    card, calls = Card(monkeypatch), []

    class Users(linalg.Preconditioner):
        _backend, shape, dtype = fake, A.shape, A.dtype

        def _apply(self, r: Any) -> Any:
            calls.append(1)
            return 0.25 * r

    class Operator:
        shape, dtype = A.shape, A.dtype

        def __matmul__(self, x: Any) -> Any:
            return A @ x

    for options in ({"M": Users()}, {"M": Operator()}, {"callback": lambda x: None}):
        assert linalg.cg(A, b, **options)[1] == 0
    assert linalg.cg(Operator(), b)[1] == 0
    assert graphs.capturable(fake, A, None) and not may_be_captured_in_a_capture(A)
    assert set(card.events) == {"step"} and calls


def test_a_capture_that_fails_leaves_the_plain_loop(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, b = hermitian(40).to_device("cuda"), fake.from_host(numbers(40))
    want = fake.to_host(linalg.cg(A, b, rtol=1e-9)[0])
    for spoiled in (True, False):
        with monkeypatch.context() as patch:
            card = Card(patch, spoiled=spoiled, refused=not spoiled)
            x, info = linalg.cg(A, b, rtol=1e-9)
        assert info == 0
        np.testing.assert_array_equal(fake.to_host(x), want)
        assert card.events[:4] == ["step", "synchronize", "begin", "end"]
        assert set(card.events[4:]) == {"step"} and not card.capturing


def test_breakdowns_inside_of_a_batch_are_told(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = np.diag(np.concatenate([np.linspace(1, 30, 39), [-1e-3]]))
    A, b = bg.bsr_array(dense, blocksize=(2, 2)).to_device("cuda"), fake.from_host(np.ones(40))
    found = []
    for graph in (False, True):
        if graph:
            Card(monkeypatch)
            monkeypatch.setattr(graphs, "iterations_left", lambda left: np.inf)
        with pytest.warns(linalg.SolverWarning, match="A is not positive definite") as said:
            x, info = linalg.cg(A, b, rtol=1e-14)
        found.append((fake.to_host(x), info, str(said[0].message)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:] and found[0][1] == -1


@pytest.mark.parametrize(
    ("left", "want"),
    [
        ([1e6], np.inf),
        ([1e6, 1e5, 1e4], 4),
        ([1e6, 1e5, 1e4, 1e3, 1e2], 2),
        ([1e9, 1e8, 1e7, 1e6, 1e5, 1e4], 4),
        ([1e9, 2e9], np.inf),
        ([np.inf, np.inf], np.inf),
        ([1e3, np.nan], np.inf),
        ([1e3, 1.0], 0),
        ([1e12, 81.0, 27.0, 27.0, 9.0, 3.0], 4 / 3),  # what is long ago does not count
    ],
)
def test_iterations_are_expected_by_the_rate_of_the_last_ones(left: list[float], want: float) -> None:
    assert graphs.iterations_left(left) == pytest.approx(want)


def test_a_solve_of_few_iterations_is_not_captured(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, b = hermitian(40).to_device("cuda"), fake.from_host(numbers(40))
    card = Card(monkeypatch)
    for options in ({"rtol": 0.2}, {"rtol": 1e-9, "maxiter": 4}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", linalg.SolverWarning)
            linalg.cg(A, b, **options)
        assert 1 < len(card.events) <= 4 and set(card.events) == {"step"}
        card.events.clear()
    linalg.cg(A, b, rtol=1e-9)
    assert card.events.count("begin") == 1


def test_an_iteration_works_in_memory_of_its_graph(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bsrgemm._kernels import graphs as kernel_graphs

    A, b = hermitian(40).to_device("cuda"), fake.from_host(numbers(40))
    card = Card(monkeypatch)

    real = kernel_graphs.memory

    @contextlib.contextmanager
    def memory(*uses: Any) -> Iterator[None]:
        card.events += ["memory"] * card.capturing
        with real(*uses):
            yield
        card.events += ["as before"] * card.capturing

    monkeypatch.setattr(kernel_graphs, "memory", memory)
    linalg.cg(A, b, rtol=1e-9)
    assert card.happened() == ["step", "synchronize", "begin", "memory", "as before", "end", "launch"]
