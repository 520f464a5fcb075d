"""Graphs of iterations that later solves find again, and the changes after which they are captured anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._kernels import driver
from bsrgemm._products.engine import Prepared
from bsrgemm.linalg import graphs, multigrid

from .. import fake_cupy
from .capture_model import Card, refuse, told  # noqa: F401  (fixtures)
from .problems import numbers, plate

pytest.importorskip("cupy")

pytestmark = pytest.mark.fake


class Problem:
    """A system on a fake card with multigrid, which is changed in one way after the first solve."""

    def __init__(self, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake, self.monkeypatch = fake, monkeypatch
        self.A = plate(8)[0].to_device("cuda")
        self.M: Any = linalg.smoothed_aggregation(self.A, max_coarse=20)
        self.b: Any = fake.from_host(numbers(128))
        self.x0: Any = None
        self.method = "cg"
        self.card: Any = None

    def solve(self) -> Any:
        x, info = getattr(linalg, self.method)(self.A, self.b, self.x0, M=self.M, rtol=1e-9)
        assert info == 0
        return x

    def plain(self) -> Any:
        """The solution without graphs; those that are kept stay."""
        with self.card.without_graphs():
            return self.fake.to_host(self.solve())

    def level(self) -> Any:
        return self.M._levels[1]


@pytest.fixture
def problem(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Problem:
    found = Problem(fake, monkeypatch)
    found.card = Card(monkeypatch)
    return found


FIRST = ["step", "synchronize", "begin", "end", "launch"]


def test_the_next_solve_launches_the_graph_of_the_last_one(problem: Problem) -> None:
    p = problem
    first = p.solve()
    assert p.card.happened() == FIRST
    before = p.fake.to_host(first)
    p.b, p.x0 = p.fake.from_host(numbers(128, seed=3)), p.fake.from_host(numbers(128, seed=4))
    second = p.solve()
    assert p.card.happened() == ["launch"]
    np.testing.assert_array_equal(p.fake.to_host(second), p.plain())
    np.testing.assert_array_equal(p.fake.to_host(first), before, "a solution is not overwritten by the next solve")
    np.testing.assert_array_equal(p.fake.to_host(p.x0), numbers(128, seed=4))


def test_no_more_iterations_are_made_in_vain_than_half_of_those_of_the_last_solve(problem: Problem) -> None:
    p = problem
    p.solve()
    x = p.fake.to_host(p.solve())
    p.x0 = p.fake.from_host(x)
    p.x0[0] += 1e-6
    p.solve()  # a few iterations from here
    p.card.events.clear()
    made = []
    for _ in range(3):
        p.solve()
        made.append(p.card.events.count("launch"))
        p.card.events.clear()
    steps: list[int] = []
    linalg.cg(p.A, p.b, p.x0, M=p.M, rtol=1e-9, callback=lambda x: steps.append(1))
    assert steps and set(made) == {len(steps)} and len(steps) < graphs.MOST_AHEAD


def _columns(p: Problem) -> None:
    p.b = p.fake.from_host(numbers((128, 2)))


def _complex(p: Problem) -> None:
    p.b = p.fake.from_host(numbers(128, "complex128"))


def _data(p: Problem) -> None:
    p.A.data = p.A.data.copy()


def _written(p: Problem) -> None:
    p.A.indices[...] = p.A.indices.copy()


def _pointers_written(p: Problem) -> None:
    p.A.indptr[-1:] = p.A.indptr[-1:].copy()


def _indices(p: Problem) -> None:
    p.A.indices = p.A.indices.copy()


def _indptr(p: Problem) -> None:
    p.A.indptr = p.A.indptr.copy()


def _other_matrix(p: Problem) -> None:
    p.A = p.A.copy()


def _transposed(p: Problem) -> None:
    p.A = p.A.T


def _refreshed(p: Problem) -> None:
    p.A.data *= 2
    p.M.refresh(p.A)


def _other_preconditioner(p: Problem) -> None:
    p.M = linalg.smoothed_aggregation(p.A, max_coarse=20)


def _weaker_preconditioner(p: Problem) -> None:
    p.M = linalg.block_jacobi(p.A)


def _no_preconditioner(p: Problem) -> None:
    p.M = None


def _cycle(p: Problem) -> None:
    p.M._options = multigrid.Options("chebyshev", 2, "W")


def _radius(p: Problem) -> None:
    p.level().smoother.rho *= 1.5


def _degree(p: Problem) -> None:
    p.level().smoother.degree = 3


def _level_data(p: Problem) -> None:
    p.level().A.data = p.level().A.data.copy()


def _prolongator_written(p: Problem) -> None:
    p.level().P.indices[...] = p.level().P.indices.copy()


def _smoother_matrix(p: Problem) -> None:
    p.level().smoother.D = p.level().smoother.D.copy()


def _inverse(p: Problem) -> None:
    p.M._inverse = p.M._inverse.copy()


def _fewer_levels(p: Problem) -> None:
    p.M._levels = p.M._levels[:1]
    p.M._inverse = multigrid._pseudo_inverse(p.M.levels[0].__class__(p.M._levels[0].R @ p.A @ p.M._levels[0].P))


def _stream(p: Problem) -> None:
    fake_cupy.xp.cuda.Stream().use()


def _device(p: Problem) -> None:
    p.monkeypatch.setattr(fake_cupy.xp.cuda.runtime, "getDevice", lambda: 1)


def _minres(p: Problem) -> None:
    p.method = "minres"


CHANGES = [
    _columns, _complex, _data, _written, _pointers_written, _indices, _indptr, _other_matrix, _transposed, _refreshed,
    _other_preconditioner, _weaker_preconditioner, _no_preconditioner, _cycle, _radius, _degree, _level_data,
    _prolongator_written, _smoother_matrix, _inverse, _fewer_levels, _stream, _device, _minres,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_graph_is_captured_again_if_one_thing_has_changed(
    problem: Problem, change: Callable[[Problem], None]
) -> None:
    problem.solve()
    problem.solve()
    assert problem.card.happened() == [*FIRST]
    change(problem)
    want = problem.plain()
    problem.card.happened()
    for events in (FIRST, ["launch"]):  # and it is kept in place of the old one
        np.testing.assert_array_equal(problem.fake.to_host(problem.solve()), want)
        assert problem.card.happened() == events


def test_numbers_that_were_written_in_place_are_read_by_the_old_graph(problem: Problem) -> None:
    x = problem.fake.to_host(problem.solve())
    problem.card.happened()
    problem.A.data *= 1.0625
    found = problem.fake.to_host(problem.solve())
    assert problem.card.happened() == ["launch"]
    np.testing.assert_array_equal(found, problem.plain())
    np.testing.assert_allclose(1.0625 * found, x, atol=1e-6 * abs(x).max())


def test_another_stream_of_the_same_address_has_graphs_of_its_own(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The addresses of streams are used again, and that of the default streams of all threads is one."""
    problem.solve()
    problem.card.happened()
    monkeypatch.setattr(driver, "stream_number", lambda address: address + 1)
    problem.solve()
    assert problem.card.happened() == FIRST


def test_solves_at_the_same_time_do_not_share_arrays(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second solve begins while the first one has the graph."""
    want = problem.plain()
    problem.solve()
    problem.card.happened()
    make, results = graphs.Iterations.make, list[Any]()

    def interrupted(some: Any, left: Any, most: int) -> Any:
        if not results:
            results.append(None)
            results[0] = problem.fake.to_host(problem.solve())
        return make(some, left, most)

    monkeypatch.setattr(graphs.Iterations, "make", interrupted)
    results.append(problem.fake.to_host(problem.solve()))
    for x in results:
        np.testing.assert_array_equal(x, want)
    assert problem.card.happened() == FIRST


def test_a_solve_that_fails_drops_its_graph(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    problem.solve()
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "iterations_left", refuse)
        with pytest.raises(NotImplementedError):
            problem.solve()
    assert not graphs._graphs
    problem.card.happened()
    problem.solve()
    assert problem.card.happened() == FIRST


def test_solves_without_a_graph_leave_that_of_others(problem: Problem) -> None:
    problem.solve()
    problem.card.happened()
    linalg.cg(problem.A, problem.b, M=problem.M, rtol=1e-9, callback=lambda x: None)
    assert problem.card.happened() == ["step"]
    problem.solve()
    assert problem.card.happened() == ["launch"]


@pytest.mark.parametrize("owner", ["M", "A"])
def test_a_graph_ends_with_its_preconditioner_or_its_matrix(problem: Problem, owner: str) -> None:
    """It keeps no matrix alive: memory is free as soon as the user drops what it belongs to."""
    if owner == "A":
        problem.M = None
    problem.solve()
    (kept,) = graphs._graphs.values()
    alive = [weakref.ref(x) for x in (problem.A, problem.M) if x is not None]
    arrays = weakref.ref(kept)
    gc.disable()
    try:
        del kept
        if owner == "M":
            problem.M = None
            assert alive[1]() is None
        else:
            problem.A = None
        assert not graphs._graphs and arrays() is None
        problem.A = None
        assert alive[0]() is None
    finally:
        gc.enable()


def test_another_shape_of_the_same_arrays_is_another_state() -> None:
    A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    state = Prepared(A)
    assert state.holds_for(A)
    A._shape = (4, 8)
    assert not state.holds_for(A)
    A._shape = (4, 4)
    assert state.holds_for(A)
    A.data.shape = (2, 1, 4)
    assert not state.holds_for(A)


def test_another_choice_of_kernels_is_another_state() -> None:
    """On a card, a graph has the launches of the kernels that were chosen when it was captured."""
    from bsrgemm._kernels.kernel import force_kernel
    from bsrgemm._kernels.launch import Calls
    from bsrgemm._products.operand import PreparedLaunches

    A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    state = PreparedLaunches(A)
    assert state.holds_for(A)
    with force_kernel("Spmm"):
        assert not state.holds_for(A)
    with bg.overlapping():
        assert not state.holds_for(A)
    assert state.holds_for(A)
    A._memo = SimpleNamespace(calls=Calls())
    state = PreparedLaunches(A)
    assert state.holds_for(A) and PreparedLaunches(A.T).holds_for(A.T)
    A._memo.calls.clear()  # as `tune` does
    assert not state.holds_for(A) and PreparedLaunches(A).holds_for(A)
