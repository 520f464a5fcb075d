"""The multigrid solver of the benchmarks on tiny problems, beside dense cycles and pyamg's own solver."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import bsrgemm as bg
from bsrgemm._backend.registry import Backend, by_name
from bsrgemm._benchmark import machine
from bsrgemm._benchmark.solver import amg, elasticity, hierarchy, peers
from bsrgemm._products.call import ProductCall
from bsrgemm._products.engine import ENGINES

from .. import fake_device

pytest.importorskip("pyamg")


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)


@dataclass
class Tiny:
    """A problem of some hundred unknowns with three levels."""

    amg: types.ModuleType
    bench: types.ModuleType
    problem: Any
    ml: Any

    def hierarchy(self, backend: Backend | None = None) -> Any:
        name = "cpu" if backend is None else backend.name
        return self.amg.Hierarchy.of(self.ml.levels).moved(lambda M: M.to_device(name))

    def smoother(self, name: str) -> Any:
        return {
            "jacobi": self.amg.Jacobi(),
            "two sweeps": self.amg.Jacobi(1.2, 2),
            "chebyshev": self.amg.Chebyshev(),
            "degree 3": self.amg.Chebyshev(3, 0.1),
        }[name]

    def solve(self, b: Any, hierarchy: Any, smoother: str, **options: Any) -> Any:
        return self.amg.ConjugateGradients(self.amg.Cycle(hierarchy, self.smoother(smoother)))(b, **options)


@pytest.fixture(params=["2d", "3d", "dg"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    bench = elasticity
    problem = bench.PROBLEMS[request.param]({"2d": 800, "3d": 500, "dg": 600}[request.param])
    ml = bench.built(problem, most_coarse=5)
    assert len(ml.levels) >= 3
    return Tiny(amg, bench, problem, ml)


each_smoother = pytest.mark.parametrize("smoother", ["jacobi", "two sweeps", "chebyshev", "degree 3"])


# --------------------------------------------------------------------------------------- hierarchy
def test_the_moved_hierarchy_has_the_matrices_of_pyamg(tiny: Tiny, backend: Backend) -> None:
    moved = tiny.hierarchy(backend)
    assert len(moved.levels) == len(tiny.ml.levels) - 1
    for ours, theirs in zip(moved.levels, tiny.ml.levels, strict=False):
        for name in "APR":
            matrix = getattr(ours, name)
            assert isinstance(matrix, bg.bsr_array) and matrix._backend is backend
            np.testing.assert_array_equal(backend.to_host(matrix.toarray()), getattr(theirs, name).toarray())
    side, modes = tiny.problem.A.blocksize[0], tiny.problem.modes.shape[1]
    finest = moved.levels[0]
    assert finest.A.blocksize == finest.D.blocksize == (side, side)
    assert finest.P.blocksize == (side, modes) and finest.R.blocksize == (modes, side)
    assert all(level.A.blocksize == (modes, modes) for level in moved.levels[1:])
    last = tiny.ml.levels[-1].A.toarray()
    np.testing.assert_allclose(
        last @ backend.to_host(moved.inverse.toarray()) @ last, last, atol=1e-12 * abs(last).max()
    )


def test_the_largest_eigenvalue_is_found_from_below(tiny: Tiny) -> None:
    for level in tiny.hierarchy().levels:
        exact = np.linalg.eigvals(level.D.toarray() @ level.A.toarray()).real.max()
        assert 0.9 * exact < level.rho <= exact * (1 + 1e-12)


def test_a_singular_diagonal_block_has_its_pseudo_inverse() -> None:
    blocks = np.array([[[2.0, 1], [1, 2]], [[4, 0], [0, 0]]])
    D = amg.inverse_blocks(bg.bsr_array((blocks, ([0, 1], [0, 1])), shape=(4, 4)))
    np.testing.assert_allclose(D.toarray()[:2, :2], np.linalg.inv(blocks[0]))
    np.testing.assert_allclose(D.toarray()[2:, 2:], [[0.25, 0], [0, 0]])


def test_one_level_is_no_hierarchy() -> None:
    with pytest.raises(ValueError, match="wanted at least two, got 1"):
        amg.Hierarchy.of([types.SimpleNamespace(A=bg.bsr_array(np.eye(2)))])


def test_the_eigenvalue_of_the_set_up_is_that_of_pyamg(tiny: Tiny) -> None:
    from pyamg.util.linalg import approximate_spectral_radius

    for level in tiny.ml.levels:
        found = []
        for radius in (hierarchy.spectral_radius, lambda A: approximate_spectral_radius(A, maxiter=10, restart=0)):
            np.random.seed(1)  # noqa: NPY002 - where pyamg takes its random vectors from
            found.append(radius(level.A.copy()))
        assert found[0] == pytest.approx(found[1], rel=1e-10)


# ------------------------------------------------------------------------------------------- cycle
def error_of(smoother: Any, level: Any) -> np.ndarray:
    """What a smoother makes of an error, as a dense matrix: a polynomial in D A."""
    DA = level.D.toarray() @ level.A.toarray()
    one = np.eye(len(DA))
    if hasattr(smoother, "omega"):
        return np.linalg.matrix_power(one - smoother.omega / level.rho * DA, smoother.sweeps)
    middle, half = (smoother.high + smoother.low) / 2 * level.rho, (smoother.high - smoother.low) / 2 * level.rho
    before, now = one, (middle * one - DA) / half
    for _ in range(smoother.degree - 1):
        before, now = now, 2 * (middle * one - DA) / half @ now - before
    return now / np.polynomial.Chebyshev.basis(smoother.degree)(middle / half)


def dense_cycle(hierarchy: Any, smoother: Any) -> np.ndarray:
    """The V-cycle as a dense matrix."""
    inverse = hierarchy.inverse.toarray()
    for level in reversed(hierarchy.levels):
        A, P, R = (getattr(level, name).toarray() for name in "APR")
        one, smooth = np.eye(len(A)), error_of(smoother, level)
        error = smooth @ (one - P @ inverse @ R @ A) @ smooth
        inverse = np.linalg.solve(A, (one - error).T).T
    return inverse


@each_smoother
def test_a_cycle_is_that_of_dense_matrices(tiny: Tiny, backend: Backend, smoother: str) -> None:
    host = tiny.hierarchy()
    dense = dense_cycle(host, tiny.smoother(smoother))
    np.testing.assert_allclose(dense, dense.T, atol=1e-9 * abs(dense).max())  # as CG wants it
    b = np.random.default_rng(0).standard_normal(len(dense))
    cycle = tiny.amg.Cycle(tiny.hierarchy(backend), tiny.smoother(smoother))
    for _ in range(2):  # nothing is left over from the first
        x = backend.to_host(cycle(backend.from_host(b)))
        np.testing.assert_allclose(x, dense @ b, atol=1e-9 * abs(dense @ b).max())


def test_an_iteration_has_the_products_that_are_timed(tiny: Tiny) -> None:
    hierarchy = tiny.hierarchy()
    solve = tiny.amg.ConjugateGradients(tiny.amg.Cycle(hierarchy, tiny.amg.Jacobi()))
    solve(tiny.problem.b, most=1)
    products = tiny.bench.products_of(solve)
    some, calls = products["A, P, R"], products["A, P, R, D"]
    for depth, level in enumerate(hierarchy.levels):
        counts = [sum(call.A is getattr(level, name) for call in calls) for name in "ADPR"]
        assert counts == [2 + (depth == 0), 2, 1, 1]
    assert sum(call.A is hierarchy.inverse for call in calls) == 1
    assert len(calls) == 6 * len(hierarchy.levels) + 2 and len(some) == 4 * len(hierarchy.levels) + 1
    solve(tiny.problem.b)
    assert len(calls) == 6 * len(hierarchy.levels) + 2


# ------------------------------------------------------------------------------------------ solver
@each_smoother
def test_cg_converges_and_says_what_is_left(tiny: Tiny, backend: Backend, smoother: str) -> None:
    A, b = tiny.problem.A, tiny.problem.b
    found = tiny.solve(backend.from_host(b), tiny.hierarchy(backend), smoother, tol=1e-8)
    x = backend.to_host(found.x)
    assert found.iterations == len(found.residuals) - 1 < 40
    assert found.residuals[0] == pytest.approx(np.linalg.norm(b))
    assert found.residuals[-1] == pytest.approx(np.linalg.norm(b - A @ x), rel=1e-5)
    assert found.residuals[-1] < 1e-8 * np.linalg.norm(b) <= found.residuals[-2]
    exact = scipy.sparse.linalg.spsolve(A.tocsc(), b)
    np.testing.assert_allclose(x, exact, atol=1e-5 * abs(exact).max())


@pytest.mark.parametrize("smoother", ["jacobi", "two sweeps"])
def test_cg_takes_the_iterations_of_pyamg(tiny: Tiny, smoother: str) -> None:
    hierarchy, b = tiny.hierarchy(), tiny.problem.b
    jacobi = tiny.smoother(smoother)
    ours = tiny.solve(b, hierarchy, smoother)
    theirs = peers.by_pyamg(tiny.ml, hierarchy, jacobi, b)()
    assert ours.iterations == theirs.iterations
    np.testing.assert_allclose(ours.residuals, theirs.residuals, rtol=1e-5)
    assert tiny.bench.apart(ours, theirs) < 1e-5


@each_smoother
def test_matrices_of_scipy_do_the_same(tiny: Tiny, smoother: str) -> None:
    ours = tiny.hierarchy()
    other = ours.moved(tiny.bench.as_scipy)
    assert type(other.levels[0].A) is scipy.sparse.bsr_array
    found = [tiny.solve(tiny.problem.b, hierarchy, smoother) for hierarchy in (ours, other)]
    assert found[0].iterations == found[1].iterations
    np.testing.assert_allclose(found[0].residuals, found[1].residuals, rtol=1e-6)


@pytest.mark.gpu
def test_matrices_of_cupyx_do_the_same(tiny: Tiny) -> None:
    backend = by_name("cuda")
    ours, b = tiny.hierarchy(backend), backend.from_host(tiny.problem.b)
    csr = ours.moved(peers.as_cupyx)
    found = [tiny.solve(b, hierarchy, "chebyshev") for hierarchy in (ours, csr)]
    assert found[0].iterations == found[1].iterations
    np.testing.assert_allclose(found[0].residuals, found[1].residuals, rtol=1e-5)


@pytest.mark.parametrize("every", [1, 4])
def test_only_norms_come_to_the_host(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    backend = fake_device.install()
    solve = tiny.amg.ConjugateGradients(tiny.amg.Cycle(tiny.hierarchy(backend), tiny.amg.Jacobi()))
    b = backend.from_host(tiny.problem.b)
    once = solve(b)
    read: list[str] = []
    for name in ("__float__", "__int__", "__bool__", "get", "item", "tolist"):
        original = getattr(fake_device.ndarray, name)

        def spy(self: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            read.append(name)
            return original(self, *args)

        monkeypatch.setattr(fake_device.ndarray, name, spy)
    engine = ENGINES.of(backend)
    product = engine.multiply_dense

    def unseen(call: ProductCall) -> None:
        """The fake multiplies on the host: what it reads for that is no concern of the solver's."""
        before = len(read)
        product(call)
        del read[before:]

    monkeypatch.setattr(engine, "multiply_dense", unseen)
    found = solve(b, every=every)
    made = len(found.residuals) - 1
    assert found.iterations == once.iterations <= made < once.iterations + every and made % every == 0
    assert read == ["__float__"] * (1 + made // every) + ["tolist"]


def test_what_does_not_converge_is_none(tiny: Tiny) -> None:
    solve = tiny.amg.ConjugateGradients(tiny.amg.Cycle(tiny.hierarchy(), tiny.amg.Jacobi()))
    found = solve(tiny.problem.b, most=3)
    assert found.iterations is None and len(found.residuals) == 4
    found = solve(tiny.problem.b * np.nan)
    assert found.iterations is None and len(found.residuals) == 2


def test_nothing_is_left_over_of_a_solve(tiny: Tiny, backend: Backend) -> None:
    hierarchy, b = tiny.hierarchy(backend), backend.from_host(tiny.problem.b)
    solve = tiny.amg.ConjugateGradients(tiny.amg.Cycle(hierarchy, tiny.amg.Chebyshev()))
    first = solve(b)
    kept = backend.to_host(first.x)
    solve(b * np.nan, most=2)
    again = solve(b)
    assert again.residuals == first.residuals
    np.testing.assert_array_equal(backend.to_host(again.x), kept)
    np.testing.assert_array_equal(backend.to_host(first.x), kept)


# ------------------------------------------------------------------------------------------ graphs
class FakeCuda:
    """What `Replay` asks of cupy.cuda. A graph repeats what was captured; `spoiled`: a capture ends with an error."""

    def __init__(self, replayed: Callable[[], None], spoiled: bool = False) -> None:
        self.replayed, self.spoiled = replayed, spoiled
        self.events: list[str] = []
        self.capturing = False
        self.allocators: list[Any] = []
        self.xp = types.SimpleNamespace(cuda=self)
        pytest.importorskip("cupy")  # which the memory of captured products is taken from

    def get_current_stream(self) -> Any:
        return types.SimpleNamespace(synchronize=lambda: self.events.append("synchronize"))

    @contextlib.contextmanager
    def using_allocator(self, allocator: Any) -> Iterator[None]:
        self.allocators.append(allocator)
        try:
            yield
        finally:
            self.allocators.pop()

    def get_allocator(self) -> Any:
        return object()

    def Stream(self, non_blocking: bool) -> Any:
        assert non_blocking, "work of others on the default stream would spoil the capture"
        stream: Any = contextlib.nullcontext()
        stream.begin_capture, stream.end_capture = self._begin, self._end
        return stream

    def _begin(self) -> None:
        assert self.allocators, "temporary arrays of a graph would be in everybody's pool"
        self.capturing = True
        self.events.append("begin")

    def _end(self) -> Any:
        self.capturing = False
        self.events.append("end")
        if self.spoiled:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")
        return types.SimpleNamespace(launch=self._launch)

    def _launch(self) -> None:
        self.events.append("launch")
        self.replayed()


def test_the_second_call_is_captured_and_replayed_from_then_on() -> None:
    made: list[str] = []
    cuda = FakeCuda(lambda: made.append("replayed"))
    replay = amg.Replay(lambda: made.append("captured" if cuda.capturing else "called"), cuda.xp)
    for _ in range(3):
        replay()
    assert made == ["called", "captured", "replayed", "replayed"]
    assert cuda.events == ["synchronize", "begin", "end", "launch", "launch"] and not cuda.allocators
    assert replay.graph is not None and replay.refusal is None


@pytest.mark.parametrize("spoiled", [False, True])
def test_what_cannot_be_captured_is_called(spoiled: bool) -> None:
    made: list[str] = []
    cuda = FakeCuda(lambda: made.append("replayed"), spoiled)

    def function() -> None:
        if cuda.capturing:
            raise NotImplementedError("cuSPARSE is not captured\nat all")
        made.append("called")

    replay = amg.Replay(function, cuda.xp)
    for _ in range(3):
        replay()
    assert made == ["called"] * 3 and cuda.events == ["synchronize", "begin", "end"] and not cuda.allocators
    assert replay.graph is None and replay.refusal == "NotImplementedError: cuSPARSE is not captured"


def test_a_capture_that_was_spoiled_is_refused() -> None:
    cuda = FakeCuda(lambda: None, spoiled=True)
    replay = amg.Replay(lambda: None, cuda.xp)
    for _ in range(3):
        replay()
    assert cuda.events == ["synchronize", "begin", "end"]
    assert replay.graph is None and replay.refusal == "RuntimeError: cudaErrorStreamCaptureInvalidated"


def test_a_mistake_in_a_capture_is_no_refusal() -> None:
    cuda = FakeCuda(lambda: None)

    def function() -> None:
        if cuda.capturing:
            raise ValueError("a mistake")

    replay = amg.Replay(function, cuda.xp)
    replay()
    with pytest.raises(ValueError, match="a mistake"):
        replay()
    assert cuda.events == ["synchronize", "begin", "end"] and not cuda.allocators


def test_nothing_is_captured_on_the_host_or_if_not_wanted() -> None:
    cuda = FakeCuda(lambda: None)
    for options in ({"xp": np}, {"xp": cuda.xp, "wanted": False}):
        made: list[str] = []
        replay = amg.Replay(partial(made.append, "called"), **options)
        for _ in range(3):
            replay()
        assert made == ["called"] * 3 and not cuda.events
        assert replay.graph is None and replay.refusal is None


def replaying(tiny: Tiny, refused: bool) -> tuple[Any, FakeCuda]:
    """A solver on the host, whose iterations are replayed by a fake; capturing one changes no vector, as on a GPU."""
    solve = tiny.amg.ConjugateGradients(tiny.amg.Cycle(tiny.hierarchy(), tiny.amg.Jacobi()))
    cuda = FakeCuda(solve.iteration)

    def iterate() -> None:
        if not cuda.capturing:
            solve.iteration()
        elif refused:
            raise NotImplementedError("cuSPARSE is not captured")

    solve.iterate = tiny.amg.Replay(iterate, cuda.xp)
    return solve, cuda


def test_replayed_iterations_find_the_same(tiny: Tiny) -> None:
    plain = tiny.solve(tiny.problem.b, tiny.hierarchy(), "jacobi")
    assert not plain.graph and plain.refusal is None
    solve, cuda = replaying(tiny, refused=False)
    for launches in (plain.iterations - 1, 2 * plain.iterations - 1):
        found = solve(tiny.problem.b)
        assert found.graph and found.refusal is None
        assert found.iterations == plain.iterations and found.residuals == plain.residuals
        assert cuda.events.count("launch") == launches and cuda.events.count("begin") == 1


def test_iterations_that_cannot_be_captured_find_the_same_and_say_so(tiny: Tiny) -> None:
    plain = tiny.solve(tiny.problem.b, tiny.hierarchy(), "jacobi")
    solve, cuda = replaying(tiny, refused=True)
    for _ in range(2):
        found = solve(tiny.problem.b)
        assert not found.graph and found.refusal == "NotImplementedError: cuSPARSE is not captured"
        assert found.iterations == plain.iterations and found.residuals == plain.residuals
    assert cuda.events == ["synchronize", "begin", "end"]
