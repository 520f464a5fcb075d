"""bench/amg.py and bench/elasticity.py on tiny problems, beside dense cycles and pyamg's own CG."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import bsrgemm as bg
from bsrgemm.homes import Home, by_name

from . import fake_device

pytest.importorskip("pyamg")
skfem = pytest.importorskip("skfem")


@pytest.fixture(autouse=True)
def without_gpu(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("harness"), "has_gpu", lambda: False)


@dataclass
class Tiny:
    """A problem of some hundred unknowns with three levels."""

    amg: types.ModuleType
    bench: types.ModuleType
    problem: Any
    ml: Any

    def hierarchy(self, home: Home | None = None) -> Any:
        name = "cpu" if home is None else home.name
        return self.amg.Hierarchy.of(self.ml.levels).moved(lambda M: M.to_device(name))

    def smoother(self, name: str) -> Any:
        return {
            "jacobi": self.amg.Jacobi(),
            "two sweeps": self.amg.Jacobi(1.2, 2),
            "chebyshev": self.amg.Chebyshev(),
            "degree 3": self.amg.Chebyshev(3, 0.1),
        }[name]


@pytest.fixture(params=["2d", "3d"])
def tiny(request: pytest.FixtureRequest, load: Any) -> Tiny:
    bench = load("elasticity")
    problem = bench.PROBLEMS[request.param]({"2d": 800, "3d": 500}[request.param])
    ml = bench.built(problem, most_coarse=5)
    assert len(ml.levels) >= 3
    return Tiny(load("amg"), bench, problem, ml)


each_smoother = pytest.mark.parametrize("smoother", ["jacobi", "two sweeps", "chebyshev", "degree 3"])


# --------------------------------------------------------------------------------------- hierarchy
def test_the_moved_hierarchy_has_the_matrices_of_pyamg(tiny: Tiny, home: Home) -> None:
    moved = tiny.hierarchy(home)
    assert len(moved.levels) == len(tiny.ml.levels) - 1
    for ours, theirs in zip(moved.levels, tiny.ml.levels, strict=False):
        for name in "APR":
            matrix = getattr(ours, name)
            assert isinstance(matrix, bg.bsr_array) and matrix._home is home
            np.testing.assert_array_equal(home.to_host(matrix.toarray()), getattr(theirs, name).toarray())
    side, modes = tiny.problem.A.blocksize[0], tiny.problem.modes.shape[1]
    finest = moved.levels[0]
    assert finest.A.blocksize == finest.D.blocksize == (side, side)
    assert finest.P.blocksize == (side, modes) and finest.R.blocksize == (modes, side)
    assert all(level.A.blocksize == (modes, modes) for level in moved.levels[1:])
    last = tiny.ml.levels[-1].A.toarray()
    np.testing.assert_allclose(last @ home.to_host(moved.inverse) @ last, last, atol=1e-12 * abs(last).max())


def test_the_largest_eigenvalue_is_found_from_below(tiny: Tiny) -> None:
    for level in tiny.hierarchy().levels:
        exact = np.linalg.eigvals(level.D.toarray() @ level.A.toarray()).real.max()
        assert 0.9 * exact < level.rho <= exact * (1 + 1e-12)


def test_a_singular_diagonal_block_has_its_pseudo_inverse(load: Any) -> None:
    blocks = np.array([[[2.0, 1], [1, 2]], [[4, 0], [0, 0]]])
    D = load("amg").inverse_blocks(bg.bsr_array((blocks, ([0, 1], [0, 1])), shape=(4, 4)))
    np.testing.assert_allclose(D.toarray()[:2, :2], np.linalg.inv(blocks[0]))
    np.testing.assert_allclose(D.toarray()[2:, 2:], [[0.25, 0], [0, 0]])


def test_one_level_is_no_hierarchy(load: Any) -> None:
    with pytest.raises(ValueError, match="wanted at least two, got 1"):
        load("amg").Hierarchy.of([types.SimpleNamespace(A=bg.bsr_array(np.eye(2)))])


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
    inverse = hierarchy.inverse
    for level in reversed(hierarchy.levels):
        A, P, R = (getattr(level, name).toarray() for name in "APR")
        one, smooth = np.eye(len(A)), error_of(smoother, level)
        error = smooth @ (one - P @ inverse @ R @ A) @ smooth
        inverse = np.linalg.solve(A, (one - error).T).T
    return inverse


@each_smoother
def test_a_cycle_is_that_of_dense_matrices(tiny: Tiny, home: Home, smoother: str) -> None:
    host = tiny.hierarchy()
    dense = dense_cycle(host, tiny.smoother(smoother))
    np.testing.assert_allclose(dense, dense.T, atol=1e-9 * abs(dense).max())  # as CG wants it
    b = np.random.default_rng(0).standard_normal(len(dense))
    cycle = tiny.amg.Cycle(tiny.hierarchy(home), tiny.smoother(smoother))
    for _ in range(2):  # nothing is left over from the first
        x = home.to_host(cycle(home.from_host(b)))
        np.testing.assert_allclose(x, dense @ b, atol=1e-9 * abs(dense @ b).max())


def test_an_iteration_has_the_products_that_are_timed(tiny: Tiny) -> None:
    hierarchy = tiny.hierarchy()
    cycle = tiny.amg.Cycle(hierarchy, tiny.amg.Jacobi())
    cycle.multiply.log = calls = []
    tiny.amg.conjugate_gradients(tiny.problem.b, cycle, tol=0.0, most=1)
    for depth, level in enumerate(hierarchy.levels):
        counts = [sum(call.A is getattr(level, name) for call in calls) for name in "ADPR"]
        assert counts == [2 + (depth == 0), 2, 1, 1]
    assert len(calls) == 6 * len(hierarchy.levels) + 1


# ------------------------------------------------------------------------------------------ solver
@each_smoother
def test_cg_converges_and_says_what_is_left(tiny: Tiny, home: Home, smoother: str) -> None:
    A, b = tiny.problem.A, tiny.problem.b
    cycle = tiny.amg.Cycle(tiny.hierarchy(home), tiny.smoother(smoother))
    found = tiny.amg.conjugate_gradients(home.from_host(b), cycle, tol=1e-8)
    x = home.to_host(found.x)
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
    ours = tiny.amg.conjugate_gradients(b, tiny.amg.Cycle(hierarchy, jacobi))
    theirs = tiny.bench.by_pyamg(tiny.ml, hierarchy, jacobi, b)()
    assert ours.iterations == theirs.iterations
    np.testing.assert_allclose(ours.residuals, theirs.residuals, rtol=1e-5)
    assert tiny.bench.apart(ours, theirs) < 1e-5


@each_smoother
def test_matrices_of_scipy_do_the_same(tiny: Tiny, smoother: str) -> None:
    ours = tiny.hierarchy()
    other = ours.moved(tiny.bench.as_scipy)
    assert type(other.levels[0].A) is scipy.sparse.bsr_array
    found = [
        tiny.amg.conjugate_gradients(tiny.problem.b, tiny.amg.Cycle(h, tiny.smoother(smoother))) for h in (ours, other)
    ]
    assert found[0].iterations == found[1].iterations
    np.testing.assert_allclose(found[0].residuals, found[1].residuals, rtol=1e-6)


@pytest.mark.gpu
def test_matrices_of_cupyx_do_the_same(tiny: Tiny) -> None:
    home = by_name("cuda")
    ours, b = tiny.hierarchy(home), home.from_host(tiny.problem.b)
    csr = ours.moved(lambda M: M.tocsr())
    found = [tiny.amg.conjugate_gradients(b, tiny.amg.Cycle(h, tiny.amg.Chebyshev())) for h in (ours, csr)]
    assert found[0].iterations == found[1].iterations
    np.testing.assert_allclose(found[0].residuals, found[1].residuals, rtol=1e-5)


@pytest.mark.parametrize("every", [1, 4])
def test_only_norms_come_to_the_host(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    home = fake_device.install()
    cycle = tiny.amg.Cycle(tiny.hierarchy(home), tiny.amg.Jacobi())
    b = home.from_host(tiny.problem.b)
    once = tiny.amg.conjugate_gradients(b, cycle)
    read: list[str] = []
    for name in ("__float__", "__int__", "__bool__", "get", "item", "tolist"):
        original = getattr(fake_device.ndarray, name)

        def spy(self: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            read.append(name)
            return original(self, *args)

        monkeypatch.setattr(fake_device.ndarray, name, spy)
    product = type(home).spmm

    def unseen(*args: Any, **options: Any) -> None:
        """The fake multiplies on the host: what it reads for that is no concern of the solver's."""
        before = len(read)
        product(*args, **options)
        del read[before:]

    monkeypatch.setattr(type(home), "spmm", unseen)
    found = tiny.amg.conjugate_gradients(b, cycle, every=every)
    made = len(found.residuals) - 1
    assert found.iterations == once.iterations <= made < once.iterations + every and made % every == 0
    assert read == ["__float__"] * (1 + made // every) + ["tolist"]


def test_what_does_not_converge_is_none(tiny: Tiny) -> None:
    cycle = tiny.amg.Cycle(tiny.hierarchy(), tiny.amg.Jacobi())
    found = tiny.amg.conjugate_gradients(tiny.problem.b, cycle, most=3)
    assert found.iterations is None and len(found.residuals) == 4
    bad = tiny.problem.b * np.nan
    found = tiny.amg.conjugate_gradients(bad, cycle)
    assert found.iterations is None and len(found.residuals) == 2


# ---------------------------------------------------------------------------------------- problems
def test_the_cube_is_what_scikit_fem_assembles(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from skfem.models.elasticity import lame_parameters, linear_elasticity

    bench = load("elasticity")
    monkeypatch.setattr(bench, "CELLS", 10)  # several chunks
    problem = bench.cube(81)  # 3 x 3 x 3 cells would be 144
    mesh = skfem.MeshHex.init_tensor(*(np.linspace(0, 1, 3) for _ in range(3)))
    assert problem.A.shape == (54, 54)
    basis = skfem.Basis(mesh, skfem.ElementVector(skfem.ElementHex1()))
    whole = linear_elasticity(*lame_parameters(bench.YOUNG, bench.POISSON)).assemble(basis).toarray()
    free = np.repeat(mesh.p[0] > 0, 3)
    np.testing.assert_allclose(problem.A.toarray(), whole[np.ix_(free, free)], atol=1e-14)
    modes = bench.rigid_modes(mesh.p)
    assert np.linalg.matrix_rank(modes) == 6
    np.testing.assert_allclose(whole @ modes, 0, atol=1e-14)


def test_sizes_are_about_what_was_asked_for(load: Any) -> None:
    bench = load("elasticity")
    for name, size in (("2d", 2000), ("2d", 5000), ("3d", 1500), ("3d", 4000)):
        problem = bench.PROBLEMS[name](size)
        assert abs(problem.A.shape[0] / size - 1) < 0.2
        assert problem.b.shape == (problem.A.shape[0],) and problem.modes.shape[1] == {"2d": 3, "3d": 6}[name]


# ------------------------------------------------------------------------------------------ script
@pytest.fixture
def script(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs bench/elasticity.py, which leaves its file in `tmp_path`; returns the module."""
    bench = load("elasticity")
    monkeypatch.setattr(importlib.import_module("harness"), "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "REPEATS", 1)

    def run(*options: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["elasticity.py", *options])
        bench.main()
        return bench

    run.bench = bench  # type: ignore[attr-defined]
    return run


def test_the_script_prints_a_line_for_each_case(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script("--unknowns", "1000")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["2d", "2d", "3d", "3d"]
    assert len({tuple(k for k, c in enumerate(line) if c == "|") for line in lines[1:]}) == 1  # aligned
    assert not list(tmp_path.iterdir())


def test_the_script_keeps_what_it_is_asked_to(script: Any, tmp_path: Path) -> None:
    script("--unknowns", "1000", "1500", "--problem", "3d", "--smoother", "jacobi", "--every", "3", "--keep")
    rows = json.loads((tmp_path / "elasticity_cpu.json").read_text())["rows"]
    assert [row["unknowns"] for row in rows] == [882, 1344]
    for row in rows:
        assert row["good"] and row["same"] and set(row["peers"]) == {"scipy bsr", "pyamg"}
        assert row["residual"] < 1.1e-8 and row["blocks"][0] == [3, 3] and row["levels"] == len(row["rows"])
        assert row["products"]["A, P, R"] > 0 and all(peer["seconds"] > 0 for peer in row["peers"].values())


def test_a_peer_that_fails_does_not_stop_the_run(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(script.bench, "by_pyamg", broken)
    script("--unknowns", "1000", "--problem", "2d", "--smoother", "jacobi")
    assert "pyamg: RuntimeError: out of order" in capsys.readouterr().out


def test_host_peers_are_left_out_of_large_cases(script: Any, tmp_path: Path) -> None:
    script("--unknowns", "1000", "--problem", "2d", "--host-most", "999", "--keep")
    assert all(row["peers"] == {} for row in json.loads((tmp_path / "elasticity_cpu.json").read_text())["rows"])


def test_a_case_that_does_not_converge_is_wrong(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(script.bench, "MOST_ITERATIONS", 2)
    with pytest.raises(SystemExit, match="wrong: 2d with 1,000 unknowns and jacobi"):
        script("--unknowns", "1000", "--problem", "2d", "--smoother", "jacobi")
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--unknowns", "10"], "--unknowns: wanted at least 1000, got 10"),
        (["--every", "0"], "--every: wanted at least 1, got 0"),
        (["--device", "cuda"], "--device cuda: there is no GPU"),
    ],
)
def test_bad_options_are_told(script: Any, options: list[str], text: str) -> None:
    with pytest.raises(SystemExit, match=text):
        script(*options)


def test_an_unknown_problem_is_told(script: Any, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        script("--problem", "beam")
    assert "invalid choice: 'beam'" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["pyamg", "skfem"])
def test_what_is_missing_is_told(script: Any, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf'{missing} is missing: .* pip install "\.\[solvers\]"'):
        script("--unknowns", "1000")
