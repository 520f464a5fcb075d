"""GMRES with its steps replayed as graphs, on a fake card."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._kernels import graphs as kernel_graphs
from bsrgemm.linalg import graphs, restarted

from .capture_model import Card, may_be_captured_in_a_capture, told  # noqa: F401  (fixtures)
from .problems import laplacian, numbers, plate
from .test_graphs import PRECONDITIONERS

pytest.importorskip("cupy")

pytestmark = pytest.mark.fake

FIRST = ["step", "synchronize", "begin", "end", "launch"]
METHODS = ["gmres", "fgmres"]


def skew(n: int = 8, dtype: str = "float64") -> Any:
    """The matrix of a plate with a part that is not symmetric."""
    A = plate(n)[0].astype(dtype)
    upper = np.triu(A.toarray(), 1) * 0.1
    return bg.bsr_array((A.toarray() + upper - upper.T).astype(dtype), blocksize=(2, 2))


@pytest.mark.parametrize("kind", PRECONDITIONERS)
@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("method", METHODS)
def test_graphs_find_the_bits_of_the_plain_loop(
    fake: Any, monkeypatch: pytest.MonkeyPatch, method: str, kind: str, columns: int | None, dtype: str
) -> None:
    A = skew(dtype=dtype).to_device("cuda")
    b = fake.from_host(numbers(128 if columns is None else (128, columns), dtype))
    M, solve = PRECONDITIONERS[kind](A), getattr(linalg, method)
    want, info = solve(A, b, M=M, rtol=1e-8, restart=7)
    card = Card(monkeypatch)
    for events in (FIRST, None, ["launch"]):  # places that the first solve comes to once are captured by the second
        x, replayed = solve(A, b, M=M, rtol=1e-8, restart=7)
        assert info == replayed == 0
        np.testing.assert_array_equal(fake.to_host(x), fake.to_host(want))
        assert events in (None, card.happened())
        card.events.clear()


def test_a_place_in_the_basis_is_captured_when_it_is_met_again(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products are captured in the second iteration, each place of the basis in the second restart."""
    A, b = skew().to_device("cuda"), fake.from_host(numbers(128))
    card = Card(monkeypatch)
    with pytest.warns(linalg.SolverWarning, match="after 15 iterations"):
        linalg.gmres(A, b, rtol=1e-14, restart=5, maxiter=3)
    capture = ["synchronize", "begin", "end", "launch"]
    first = ["step", "step", *capture, *["step", "launch"] * 3, "step"]
    second = ["launch", *capture] * 5
    assert card.events == [*first, *second, *["launch", "launch"] * 5]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("maxiter", [1, 2, 3])
def test_x_and_info_at_the_end_of_restarts(
    fake: Any, monkeypatch: pytest.MonkeyPatch, method: str, maxiter: int
) -> None:
    A, b = laplacian(60, 2).to_device("cuda"), fake.from_host(numbers((120, 2)))
    found = []
    for graph in (False, True, True):
        if graph:
            Card(monkeypatch)
        with pytest.warns(linalg.SolverWarning, match=f"not converged after {6 * maxiter} iterations"):
            found.append(getattr(linalg, method)(A, b, rtol=1e-12, restart=6, maxiter=maxiter))
    for x, info in found[1:]:
        assert info == found[0][1] == 6 * maxiter
        np.testing.assert_array_equal(fake.to_host(x), fake.to_host(found[0][0]))


@pytest.mark.parametrize("method", METHODS)
def test_vectors_that_were_made_ahead_leave_nothing(fake: Any, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Batches of four throughout, so that the solution is found in the middle of one."""
    A, b = skew().to_device("cuda"), fake.from_host(numbers((128, 2)))
    M, solve = linalg.block_jacobi(A), getattr(linalg, method)
    tolerances = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
    results = [fake.to_host(solve(A, b, M=M, rtol=rtol, restart=30)[0]) for rtol in tolerances]
    card = Card(monkeypatch)
    monkeypatch.setattr(graphs, "iterations_left", lambda left: np.inf)
    for rtol, want in zip(tolerances, results, strict=True):
        x, info = solve(A, b, M=M, rtol=rtol, restart=30)
        assert info == 0
        np.testing.assert_array_equal(fake.to_host(x), want)
    assert "launch" in card.events


def test_the_host_reads_once_for_several_iterations(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, b = skew().to_device("cuda"), fake.from_host(numbers(128))
    batches, extend = list[int](), restarted._Arnoldi.extend

    def counted(self: Any, *args: Any) -> Any:
        found = extend(self, *args)
        batches.append(len(found))
        return found

    monkeypatch.setattr(restarted._Arnoldi, "extend", counted)
    Card(monkeypatch)
    linalg.gmres(A, b, rtol=1e-9)
    made = sum(batches)
    assert made > 40 and len(batches) < made / 2 and max(batches) == graphs.MOST_AHEAD
    batches.clear()
    linalg.gmres(A, b, rtol=1e-9, callback=lambda x: None)
    assert set(batches) == {1}


def test_what_must_be_called_each_time_is_not_captured(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, b = skew().to_device("cuda"), fake.from_host(numbers(128))
    card = Card(monkeypatch)

    class Operator:
        shape, dtype = A.shape, A.dtype

        def __matmul__(self, x: Any) -> Any:
            return A @ x

    same = fake.to_host(linalg.gmres(A, b, restart=64)[0])
    assert "launch" in card.happened()
    np.testing.assert_array_equal(fake.to_host(linalg.gmres(A, b, restart=65)[0]), same)  # one cycle is enough for both
    for options in ({"callback": lambda x: None}, {"callback": print, "callback_type": "x"}):
        assert linalg.gmres(A, b, **options)[1] == 0
        assert linalg.fgmres(A, b, **options)[1] == 0
    assert linalg.gmres(Operator(), b)[1] == 0
    assert graphs.capturable(fake, A, None) and not may_be_captured_in_a_capture(A)
    assert set(card.events) == {"step"}


def test_a_capture_that_fails_leaves_the_plain_loop(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, b = skew().to_device("cuda"), fake.from_host(numbers(128))
    want = fake.to_host(linalg.gmres(A, b, rtol=1e-9)[0])
    for spoiled in (True, False):
        with monkeypatch.context() as patch:
            card = Card(patch, spoiled=spoiled, refused=not spoiled)
            x, info = linalg.gmres(A, b, rtol=1e-9)
        assert info == 0
        np.testing.assert_array_equal(fake.to_host(x), want)
        assert "launch" not in card.events and "begin" in card.events and not card.capturing


def test_numbers_that_are_not_finite_are_told(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = laplacian(60, 2).toarray()
    dense[100, 100] = np.inf
    A, b = bg.bsr_array(dense, blocksize=(2, 2)).to_device("cuda"), fake.from_host(numbers(120))
    Card(monkeypatch)
    monkeypatch.setattr(graphs, "iterations_left", lambda left: np.inf)
    for _ in range(2):
        with pytest.warns(linalg.SolverWarning, match="NaN or infinity has appeared"):
            assert linalg.gmres(A, b, rtol=1e-12, restart=5)[1] == -1


def test_methods_and_changed_operands_do_not_share_graphs(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, b = skew().to_device("cuda"), fake.from_host(numbers(128))
    M = linalg.smoothed_aggregation(A, max_coarse=20)
    card = Card(monkeypatch)
    for change in ("nothing", "method", "refresh"):
        solve = linalg.fgmres if change == "method" else linalg.gmres
        if change == "refresh":
            A.data *= 2
            M.refresh(A)
        assert solve(A, b, M=M, rtol=1e-9)[1] == 0
        assert card.happened() == FIRST
    A.data *= 1.0625  # read by the old graph, in its place
    x, info = linalg.gmres(A, b, M=M, rtol=1e-9)
    assert info == 0 and "step" not in card.happened()
    np.testing.assert_allclose(fake.to_host(A @ x), numbers(128), atol=1e-7)


@pytest.mark.parametrize("owner", ["M", "A"])
def test_graphs_and_vectors_end_with_their_preconditioner_or_matrix(
    fake: Any, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    A, b = skew().to_device("cuda"), fake.from_host(numbers(128))
    M = linalg.block_jacobi(A) if owner == "M" else None
    Card(monkeypatch)
    gc.collect()
    gc.disable()
    try:
        linalg.gmres(A, b, M=M, rtol=1e-9)
        (kept,) = graphs._graphs.values()
        vector, alive = weakref.ref(kept.arrays["basis"][0]._memory), weakref.ref(A)
        del kept
        if owner == "M":
            del M
        else:
            del A
        kernel_graphs.sweep()
        assert not graphs._graphs and vector() is None
        assert owner == "M" or alive() is None
    finally:
        gc.enable()


def test_a_solve_without_graphs_leaves_no_vectors(fake: Any) -> None:
    """Vectors are free when the solver returns, not when the garbage collector runs."""
    A, b = skew().to_device("cuda"), fake.from_host(numbers(128))
    made, vector = [], restarted.Space._vector

    def counted(self: Any) -> Any:
        found = vector(self)
        made.append(weakref.ref(found._memory))
        return found

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.setattr(restarted.Space, "_vector", counted)
            linalg.gmres(A, b)
        assert made and all(x() is None for x in made)
    finally:
        gc.enable()
