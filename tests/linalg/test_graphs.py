"""Iterations that are replayed as graphs, on a model of stream capture over the fake device."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._products.engine import Prepared
from bsrgemm.linalg import graphs, multigrid
from bsrgemm.linalg.steps import Biconjugate, Conjugate, MinimalResidual

from .. import fake_device
from .problems import hermitian, laplacian, numbers, plate

pytest.importorskip("cupy")


def refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("not in a capture")


class Card:
    """Stream capture over the fake device. A graph calls the function that was captured.

    While it is captured, nothing may come to the host or go to the device, and dense products are refused as CuPy
    refuses cuBLAS. What the function computes is undone afterwards: on a card it is recorded and not run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spoiled: bool = False) -> None:
        self.events: list[str] = []
        self.capturing, self.spoiled, self._monkeypatch = False, spoiled, monkeypatch
        self.captured: Callable[[], None] | None = None
        self.device = 0
        self.runtime = SimpleNamespace(graphLaunch=None, getDevice=lambda: self.device)
        self.home = SimpleNamespace(
            ptr=0, is_capturing=lambda: False, synchronize=lambda: self.events.append("synchronize")
        )
        for kind in (Conjugate, MinimalResidual, Biconjugate):
            monkeypatch.setattr(kind, "__call__", self._iterating(kind.__call__))
        monkeypatch.setattr(fake_device.xp, "cuda", self, raising=False)

    def _iterating(self, call: Any) -> Any:
        def iterate(step: Any) -> None:
            if not self.capturing:
                self.events.append("step")
                return call(step)
            arrays = {name: x for name, x in vars(step).items() if isinstance(x, fake_device.ndarray)}
            before = {name: x._memory.copy() for name, x in arrays.items()}
            with self._refusals():
                call(step)
            for name, x in arrays.items():
                x._memory[...] = before[name]
            self.captured = lambda: call(step)
            return None

        return iterate

    def happened(self) -> list[str]:
        """The events since the last time, each once."""
        found = list(dict.fromkeys(self.events))
        self.events.clear()
        return found

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        with self._monkeypatch.context() as patch:
            for name in ("get", "item", "tolist", "dot", "__bool__", "__int__", "__float__", "__matmul__"):
                patch.setattr(fake_device.ndarray, name, refuse)
            for name in ("asarray", "array", "matmul", "stack", "concatenate", "einsum"):
                patch.setattr(fake_device.xp, name, refuse, raising=False)
            patch.setattr(fake_device.FakeProducts, "multiply_dense", products_without_reads())
            yield

    def get_current_stream(self) -> Any:
        return self.home

    def get_allocator(self) -> Any:
        return None

    @contextlib.contextmanager
    def using_allocator(self, allocator: Any) -> Iterator[None]:
        yield

    def Stream(self, non_blocking: bool) -> Any:
        assert non_blocking
        card = self

        class Stream(contextlib.nullcontext):  # type: ignore[type-arg]
            def begin_capture(self) -> None:
                card.events.append("begin")
                card.capturing = True

            def end_capture(self) -> Any:
                card.events.append("end")
                card.capturing = False
                if card.spoiled:
                    raise RuntimeError("cudaErrorStreamCaptureInvalidated\nand more")
                return Graph(card.events, card.captured)

        return Stream()


class Graph:
    """Computes what was captured, on the same arrays."""

    def __init__(self, events: list[str], function: Any) -> None:
        self._events, self._function = events, function

    def launch(self) -> None:
        self._events.append("launch")
        self._function()


def products_without_reads() -> Any:
    """The fake device fetches a matrix for a product, which a card does not: that read is allowed."""
    get, multiply = fake_device.ndarray.__dict__["get"], fake_device.FakeProducts.multiply_dense
    original = ORIGINAL_GET

    def call(self: Any, product: Any) -> Any:
        fake_device.ndarray.get = original  # type: ignore[method-assign]
        try:
            return multiply(self, product)
        finally:
            fake_device.ndarray.get = get  # type: ignore[method-assign]

    return call


ORIGINAL_GET = fake_device.ndarray.get


@pytest.fixture
def fake() -> Any:
    return fake_device.install()


@pytest.fixture(autouse=True)
def told() -> Any:
    """A solver that fails must be expected to. Graphs of this model hold their operands, so they are dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", linalg.SolverWarning)
        yield
    graphs._graphs.clear()


PRECONDITIONERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda A: None,
    "matrix": lambda A: A.inverse_block_diagonal(),
    "block_jacobi": linalg.block_jacobi,
    "chebyshev": linalg.chebyshev,
    "V": lambda A: linalg.smoothed_aggregation(A, max_coarse=20),
    "W": lambda A: linalg.smoothed_aggregation(A, max_coarse=20, cycle="W", smoother="jacobi"),
    "float32": lambda A: linalg.smoothed_aggregation(A.astype("float32"), max_coarse=20),
}


@pytest.mark.parametrize("kind", PRECONDITIONERS)
@pytest.mark.parametrize("columns", [None, 3])
def test_a_graph_finds_the_bits_of_the_plain_loop(
    fake: Any, monkeypatch: pytest.MonkeyPatch, kind: str, columns: int | None
) -> None:
    A = plate(8)[0].to_device("fake")
    b = fake.from_host(numbers(128 if columns is None else (128, columns)))
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
    A = plate(8)[0].astype(dtype).to_device("fake")
    solve, b = getattr(linalg, method), fake.from_host(numbers(128 if columns is None else (128, columns), dtype))
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
    A, b = laplacian(60, 2).to_device("fake"), fake.from_host(numbers(120))
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
    A, b = hermitian(40).to_device("fake"), fake.from_host(numbers((40, 2)))
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
    A, b = laplacian(60, 2).to_device("fake"), fake.from_host(numbers(120))
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
    A, b = hermitian(40).to_device("fake"), fake.from_host(numbers(40))
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

    for options in ({"M": Users()}, {"M": linalg.ilu0(A)}, {"M": Operator()}, {"callback": lambda x: None}):
        assert linalg.cg(A, b, **options)[1] == 0
    assert linalg.cg(Operator(), b)[1] == 0
    monkeypatch.setattr(card.home, "is_capturing", lambda: True)
    assert linalg.cg(A, b)[1] == 0
    assert set(card.events) == {"step"} and calls


def test_a_capture_that_fails_leaves_the_plain_loop(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, b = hermitian(40).to_device("fake"), fake.from_host(numbers(40))
    want = fake.to_host(linalg.cg(A, b, rtol=1e-9)[0])
    for spoiled in (True, False):
        with monkeypatch.context() as patch:
            card = Card(patch, spoiled=spoiled)
            if not spoiled:  # CuPy refuses a call inside
                patch.setattr(card, "_refusals", lambda: contextlib.nullcontext(refuse()))
            x, info = linalg.cg(A, b, rtol=1e-9)
        assert info == 0
        np.testing.assert_array_equal(fake.to_host(x), want)
        assert card.events[:4] == ["step", "synchronize", "begin", "end"]
        assert set(card.events[4:]) == {"step"} and not card.capturing


def test_breakdowns_inside_of_a_batch_are_told(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = np.diag(np.concatenate([np.linspace(1, 30, 39), [-1e-3]]))
    A, b = bg.bsr_array(dense, blocksize=(2, 2)).to_device("fake"), fake.from_host(np.ones(40))
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
    A, b = hermitian(40).to_device("fake"), fake.from_host(numbers(40))
    card = Card(monkeypatch)
    for options in ({"rtol": 0.2}, {"rtol": 1e-9, "maxiter": 4}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", linalg.SolverWarning)
            linalg.cg(A, b, **options)
        assert 1 < len(card.events) <= 4 and set(card.events) == {"step"}
        card.events.clear()
    linalg.cg(A, b, rtol=1e-9)
    assert card.events.count("begin") == 1


def test_a_graph_keeps_the_memory_that_it_works_in() -> None:
    from bsrgemm._kernels import workspace

    current: list[str] = ["capture"]

    class Home:
        def __enter__(self) -> None:
            current.append("home")

        def __exit__(self, *_: Any) -> None:
            current.pop()

    allocators: list[Any] = []

    @contextlib.contextmanager
    def using_allocator(allocate: Any) -> Iterator[None]:
        allocators.append(allocate)
        yield

    home, held = Home(), list[Any]()
    cuda = SimpleNamespace(get_allocator=lambda: lambda size: (current[-1], size), using_allocator=using_allocator)
    with graphs._memory_of(cuda, home, held):
        assert workspace._current_stream() is home and workspace._owner.held is held
        assert allocators[0](64) == ("home", 64)
    assert held == [("home", 64)] and current == ["capture"]
    assert workspace._owner.stream is workspace._owner.held is None


def test_captured_launches_of_an_owner_share_the_counters_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    from bsrgemm._kernels import workspace

    home = SimpleNamespace(ptr=7, is_capturing=lambda: False)
    cuda = SimpleNamespace(get_current_stream=lambda: home, runtime=SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setattr(workspace, "cupy", SimpleNamespace(zeros=np.zeros, empty=np.empty, cuda=cuda))
    for name in ("_zeroed", "_reserves", "_captures"):
        monkeypatch.setattr(workspace, name, {})
    before = workspace.counters(3)
    capture = SimpleNamespace(ptr=8, is_capturing=lambda: True)
    monkeypatch.setattr(cuda, "get_current_stream", lambda: capture)
    held, mine = len(workspace._held), list[Any]()
    with workspace.owned_graph(home, mine):
        assert workspace.counters(3) is before
        assert len(workspace.temporary(5, np.float32)) == 5
        assert workspace.retain_for_graph(lambda: "made") == "made"
        workspace.keep_for_graph("work lists")
        with pytest.raises(RuntimeError, match="counters cannot be zeroed in a capture"):
            workspace.counters(10**6)
    assert len(workspace._held) == held and not workspace._captures
    assert mine[0] is before and mine[1:] == ["work lists"], "what the stream replaces, and what is made meanwhile"


# -------------------------------------------------------------------------------- graphs between solves
class Problem:
    """A system on the fake device with multigrid, which is changed in one way after the first solve."""

    def __init__(self, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake, self.monkeypatch = fake, monkeypatch
        self.A = plate(8)[0].to_device("fake")
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
        with self.monkeypatch.context() as patch:
            patch.setattr(self.card.home, "is_capturing", lambda: True)
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
    p.card.home.ptr = 1234


def _device(p: Problem) -> None:
    p.card.device = 1


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


def test_the_default_stream_of_a_thread_has_graphs_of_its_own(problem: Problem) -> None:
    problem.card.home.ptr = 2  # the default stream of each thread has this pointer
    problem.solve()
    problem.card.happened()
    thread = threading.Thread(target=problem.solve)
    thread.start()
    thread.join()
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
    kept.captured.graph = problem.card.captured = None  # those of this model hold the operands
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


def test_plans_that_a_matrix_has_dropped_are_noticed() -> None:
    """On a card, launches read work lists that belong to the plans of a matrix."""
    from bsrgemm._kernels import forced_kernel
    from bsrgemm._products.matrix_cache import PreparedLaunches

    class Plan:
        pass

    def cache(*names: str) -> Any:
        return SimpleNamespace(plans={name: Plan() for name in names}, wide={})

    A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    assert PreparedLaunches(A).holds_for(A)
    A._matrix_cache = cache("one", "two")
    real = A._matrix_cache.wide[2] = SimpleNamespace(_matrix_cache=cache("three"))
    state = PreparedLaunches(A)
    A._matrix_cache.plans["another"] = Plan()
    assert state.holds_for(A)
    with forced_kernel.force_kernel("Spmm"):
        assert not state.holds_for(A)
    assert state.holds_for(A)
    real._matrix_cache.plans["three"] = Plan()
    assert not state.holds_for(A)
    state = PreparedLaunches(A)
    kept = A._matrix_cache.plans.pop("one")
    assert not state.holds_for(A)
    A._matrix_cache.plans["one"] = kept
    assert state.holds_for(A)
    plans = state.plans()
    assert plans is not None and len(plans) == 4
    A._matrix_cache.plans.clear()
    del kept
    assert not state.holds_for(A) and state.plans() == plans, "who has taken them may go on"
    del plans
    assert state.plans() is None
    A._matrix_cache = None
    assert not state.holds_for(A)
