"""The multigrid solver of the benchmark beside dense cycles; studies of solvers, ranks, panels and the model."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bench import report, studies
from bench.data import as_scipy
from bench.llama import model
from bench.measure import Run
from bench.place import Place
from bench.solvers import amg, problems
from bench.studies import llama, panels, ranks, solvers

PLACE = Place("cpu", quick=True)


@pytest.fixture(params=["2d", "3d"])
def levels(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("pyamg")
    problem = problems.PROBLEMS[request.param]({"2d": 600, "3d": 500}[request.param])
    found = amg.built(problem, most_coarse=5).levels
    assert len(found) >= 3
    return problem, found


def error_of(smoother: Any, level: Any) -> np.ndarray[Any, Any]:
    """What a smoother makes of an error, as a dense matrix: a polynomial in D A."""
    DA = level.D.toarray() @ level.A.toarray()
    one = np.eye(len(DA))
    if isinstance(smoother, amg.Jacobi):
        return np.linalg.matrix_power(one - smoother.omega / level.rho * DA, smoother.sweeps)
    middle, half = ((smoother.high + sign * smoother.low) / 2 * level.rho for sign in (1, -1))
    before, now = one, (middle * one - DA) / half
    for _ in range(smoother.degree - 1):
        before, now = now, 2 * (middle * one - DA) / half @ now - before
    return now / np.polynomial.Chebyshev.basis(smoother.degree)(middle / half)


@pytest.mark.parametrize(
    "smoother", [amg.Jacobi(), amg.Jacobi(1.2, 2), amg.Chebyshev(), amg.Chebyshev(3, 0.1)], ids=str
)
def test_a_cycle_is_that_of_dense_matrices(levels: Any, smoother: Any) -> None:
    hierarchy = amg.Hierarchy.of(levels[1]).moved(lambda M: M)
    inverse = hierarchy.inverse.toarray()
    for level in reversed(hierarchy.levels):
        A, P, R = (getattr(level, name).toarray() for name in "APR")
        one, smooth = np.eye(len(A)), error_of(smoother, level)
        inverse = np.linalg.solve(A, (one - smooth @ (one - P @ inverse @ R @ A) @ smooth).T).T
    b = np.random.default_rng(0).standard_normal(len(inverse))
    found = amg.Cycle(hierarchy, smoother)(b)
    np.testing.assert_allclose(found, inverse @ b, atol=1e-9 * abs(found).max())


@pytest.mark.parametrize("library", ["bsrgemm", "scipy"])
def test_the_solver_reaches_the_tolerance_with_the_matrices_of_each_library(levels: Any, library: str) -> None:
    problem = levels[0]
    hierarchy = amg.Hierarchy.of(levels[1]).moved(as_scipy if library == "scipy" else lambda M: M)
    solve = amg.ConjugateGradients(amg.Cycle(hierarchy, amg.Jacobi()))
    found = solve(problem.b)
    assert np.linalg.norm(problem.b - problem.A @ found.x) <= 1.1e-8 * np.linalg.norm(problem.b)
    assert found.iterations is not None and len(found.residuals) == found.iterations + 1
    assert solve(problem.b, most=2).iterations is None


def test_one_level_is_no_hierarchy_and_a_singular_block_has_its_pseudo_inverse() -> None:
    with pytest.raises(ValueError, match="wanted at least two, got 1"):
        amg.Hierarchy.of([types.SimpleNamespace(A=bg.bsr_array(np.eye(2)))])
    blocks = np.array([[[2.0, 1], [1, 2]], [[4, 0], [0, 0]]])
    D = amg.inverse_blocks(bg.bsr_array((blocks, ([0, 1], [0, 1])), shape=(4, 4)))
    np.testing.assert_allclose(D.toarray()[:2, :2], np.linalg.inv(blocks[0]))
    np.testing.assert_allclose(D.toarray()[2:, 2:], [[0.25, 0], [0, 0]])


# ------------------------------------------------------------------------------------------ studies
@pytest.mark.parametrize("name", ["elasticity", "solvers", "solver-jobs", "preconditioners"])
def test_studies_of_solvers_reach_the_tolerance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "preconditioners":
        pytest.importorskip("pyamg")
    monkeypatch.setattr(solvers, "unknowns", lambda place: (700,))
    rows = list(studies.ALL[name].rows(Run(PLACE)))
    assert rows and not [row for row in rows if report.status(row)]
    assert all(row["seconds"] > 0 and row.get("residual", 0) <= 1.1e-8 for row in rows)
    assert name != "elasticity" or all({"pyamg", "scipy bsr"} == set(row["peers"]) for row in rows)


def test_a_solution_that_is_off_is_wrong_a_failure_says_why_and_a_missing_package_has_no_row() -> None:
    run = Run(PLACE)
    for off in (1e-3, float("nan")):
        (row,) = solvers.attempted(run, "cube", 8, "a", lambda off=off: {"residual": off})  # type: ignore[misc]
        assert row["wrong"]
    (row,) = solvers.attempted(run, "cube", 8, "a", lambda: {"x": 1 / 0})
    assert "ZeroDivisionError" in row["failed"]
    assert not list(solvers.attempted(run, "cube", 8, "spsolve", lambda: __import__("no_such_package")))
    assert list(run.absent) == ["spsolve"]


def test_the_model_has_the_logits_of_plain_attention() -> None:
    tiny = model.Model(model.TINY, np)
    assert llama.compared(tiny)["error"] <= 1
    attend = bg.attention

    def forgets(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attend(q, k, v, **options | {"window": (3, 0)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bg, "attention", forgets)
        assert llama.compared(tiny)["error"] > 1
        assert [report.status(row) is None for row in studies.ALL["llama"].rows(Run(PLACE))] == [False]
    rows = list(studies.ALL["llama"].rows(Run(PLACE)))
    assert len(rows) == 4 and not [row for row in rows if report.status(row)]


def test_ranks_and_the_ring_agree_with_one_process() -> None:
    pytest.importorskip("mpi4py")
    rows = [*ranks.on_ranks(2, "matrices", (600,), 2), *ranks.on_ranks(2, "ring", (64,), 1)]
    assert not [row for row in rows if row.get("wrong")] and len(rows) == 13
    for row in rows:
        assert row["what"].endswith("2 ranks") and row.get("halo_bytes", 1) > 0


def test_a_difference_from_one_rank_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    text = '[{"what": "cg, 8", "ranks": 2, "error": 1e-3}, {"what": "A @ x", "ranks": 1, "repeats": false}]'
    monkeypatch.setattr(ranks, "mpiexec", lambda: "mpiexec")
    monkeypatch.setattr(ranks.subprocess, "run", lambda command, **_: ranks.Path(command[6]).write_text(text))
    found = ranks.on_ranks(2, "matrices", (8,), 1)
    assert [row["what"] for row in found] == ["cg, 8, 2 ranks", "A @ x, 1 rank"] and all(row["wrong"] for row in found)


def test_tasks_of_dask_are_counted_and_what_does_not_fit_is_judged() -> None:
    pytest.importorskip("dask.array")
    rows = list(panels.tasks(PLACE, distributed=False))
    assert len(rows) == 3 and all(row["seconds"] > 0 for row in rows)
    y = np.concatenate([bg.matmul(panels.panel(i), panels.operand()) for i in range(2)])
    found = {"seconds": 1.0, "peak": 1.0}
    assert report.status(panels._judged("threads", 4, 2, found, y)) is None
    assert "WRONG" in str(report.status(panels._judged("threads", 4, 2, found, y + 1)))
    assert "fits" in str(report.status(panels._judged("threads", 4, 2, found | {"whole": "fits"}, y)))
    assert "stopped" in str(report.status(panels._judged("workers", 4, 2, found | {"stopped": 1}, y)))
