"""bench/run/elasticity.py and its problems, tiny ones, beside what scikit-fem and pyamg assemble."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from bsrgemm._benchmark import table as table_module
from bsrgemm._benchmark.solver import elasticity, hierarchy, peers
from bsrgemm._benchmark.solver import problems as elasticity_problems

from .. import fake_device
from .test_bench_multigrid import without_gpu  # noqa: F401  (fixtures)

pytest.importorskip("pyamg")
skfem = pytest.importorskip("skfem")


# ---------------------------------------------------------------------------------------- problems
@pytest.fixture(params=[1, 300, 10**6])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench/elasticity_problems.py with chunks of one plane, of some, and of all."""
    bench = elasticity_problems
    monkeypatch.setattr(bench, "PLACES", request.param)
    return bench


def sorted_and_whole(A: scipy.sparse.bsr_array) -> bool:
    """Rows have their blocks in order, and none twice."""
    return all((np.diff(A.indices[i:j]) > 0).all() for i, j in itertools.pairwise(A.indptr))


@pytest.mark.parametrize("cells", [2, 3])
def test_the_cube_is_what_scikit_fem_assembles(chunked: Any, cells: int) -> None:
    from skfem.models.elasticity import lame_parameters, linear_elasticity

    problem = chunked.cube(3 * cells * (cells + 1) ** 2)
    mesh = skfem.MeshHex.init_tensor(*(np.linspace(0, 1, cells + 1) for _ in range(3)))
    basis = skfem.Basis(mesh, skfem.ElementVector(skfem.ElementHex1()))
    whole = linear_elasticity(*lame_parameters(chunked.YOUNG, chunked.POISSON)).assemble(basis).toarray()
    order = np.lexsort(mesh.p[::-1])
    order = order[mesh.p[0][order] > 0]
    assert problem.A.shape == (3 * len(order), 3 * len(order)) and sorted_and_whole(problem.A)
    free = (3 * order[:, None] + np.arange(3)).ravel()
    np.testing.assert_allclose(problem.A.toarray(), whole[np.ix_(free, free)], atol=1e-14)
    assert problem.A.has_canonical_format and problem.A.indices.dtype == np.int32
    np.testing.assert_allclose(problem.modes, chunked.rigid_modes(mesh.p[:, order]), atol=1e-14)
    modes = chunked.rigid_modes(mesh.p)
    assert np.linalg.matrix_rank(modes) == 6
    np.testing.assert_allclose(whole @ modes, 0, atol=1e-14)


@pytest.mark.parametrize("n", [2, 5])
def test_the_plate_is_that_of_pyamg(chunked: Any, n: int) -> None:
    from pyamg.gallery import linear_elasticity

    A, modes = linear_elasticity((n, n), E=chunked.YOUNG, nu=chunked.POISSON, format="bsr")
    problem = chunked.plate(2 * n * n)
    assert problem.A.blocksize == A.blocksize and sorted_and_whole(problem.A)
    np.testing.assert_allclose(problem.A.toarray(), A.toarray(), atol=1e-14)
    np.testing.assert_allclose(problem.modes, modes, atol=1e-14)


def triangles_by_scikit_fem(bench: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The matrix of n x n squares, each cut in two, by symmetric interior penalty, and where the nodes are."""
    from skfem.helpers import ddot, dot, eye, jump, mul, sym_grad, trace

    y, x = np.mgrid[: n + 1, : n + 1].reshape(2, -1)
    low = np.flatnonzero((x < n) & (y < n))
    corners = low[:, None, None] + np.array([[0, 1, n + 1], [1, n + 1, n + 2]])
    mesh = skfem.MeshTri(np.stack([x, y]).astype(float), corners.reshape(-1, 3).T)
    element = skfem.ElementVector(skfem.ElementDG(skfem.ElementTriP1()))
    cost = bench.PENALTY * (bench.LAME + 2 * bench.SHEAR)

    def stress(u: Any) -> Any:
        return bench.LAME * eye(trace(sym_grad(u)), 2) + 2 * bench.SHEAR * sym_grad(u)

    @skfem.BilinearForm
    def inside(u: Any, v: Any, w: Any) -> Any:
        return ddot(stress(u), sym_grad(v))

    @skfem.BilinearForm
    def between(u: Any, v: Any, w: Any) -> Any:
        a, b = jump(w, u, v)
        return cost / w.h * dot(a, b) - (dot(mul(stress(u), w.n), b) + dot(mul(stress(v), w.n), a)) / 2

    @skfem.BilinearForm
    def held(u: Any, v: Any, w: Any) -> Any:
        return cost / w.h * dot(u, v) - dot(mul(stress(u), w.n), v) - dot(mul(stress(v), w.n), u)

    basis = skfem.Basis(mesh, element)
    sides = [skfem.InteriorFacetBasis(mesh, element, side=side) for side in (0, 1)]
    A = inside.assemble(basis) + skfem.asm(between, sides, sides) + held.assemble(skfem.FacetBasis(mesh, element))
    order = basis.element_dofs.T.reshape(-1)
    return A.toarray()[np.ix_(order, order)], basis.doflocs[:, order[::2]]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_triangles_are_what_scikit_fem_assembles(n: int) -> None:
    bench = elasticity_problems
    problem = bench.triangles(12 * n * n)
    whole, points = triangles_by_scikit_fem(bench, n)
    assert problem.A.blocksize == (6, 6) and problem.A.indices.dtype == np.int32 and sorted_and_whole(problem.A)
    assert np.diff(problem.A.indptr).max() == 4 and len(problem.A.indices) == 2 * n * n * 4 - 4 * n
    np.testing.assert_allclose(problem.A.toarray(), whole, atol=1e-14)
    np.testing.assert_allclose(problem.modes, bench.rigid_modes(points), atol=1e-14)
    assert np.linalg.eigvalsh(whole)[0] > 0


def test_only_triangles_that_are_held_resist_a_rigid_motion() -> None:
    problem = elasticity_problems.triangles(12 * 25)
    force = abs(problem.A @ problem.modes).reshape(5, 5, 2, -1).max(-1)
    assert force[1:, 1:, 0].max() < 1e-13 and force[:-1, :-1, 1].max() < 1e-13
    assert force[0, :, 0].min() > 0.1 and force[:, -1, 1].min() > 0.1
    assert np.linalg.matrix_rank(problem.modes) == 3


def test_set_up_leaves_pyamg_as_it_was() -> None:
    from pyamg.aggregation import smooth

    usual = smooth.approximate_spectral_radius
    with hierarchy.short_arnoldi():
        assert smooth.approximate_spectral_radius is not usual
        P = smooth.jacobi_prolongation_smoother(*(scipy.sparse.csr_array(np.eye(4) + 1) for _ in range(3)), None)
    assert smooth.approximate_spectral_radius is usual
    np.testing.assert_allclose(
        P.toarray(), smooth.jacobi_prolongation_smoother(*(scipy.sparse.csr_array(np.eye(4) + 1),) * 3, None).toarray()
    )


def test_sizes_are_about_what_was_asked_for() -> None:
    bench = elasticity
    for name, size in (("2d", 2000), ("2d", 5000), ("3d", 1500), ("3d", 4000), ("dg", 1500), ("dg", 5000)):
        problem = bench.PROBLEMS[name](size)
        assert abs(problem.A.shape[0] / size - 1) < 0.2
        assert problem.b.shape == (problem.A.shape[0],) and problem.modes.shape[1] == {"2d": 3, "3d": 6, "dg": 3}[name]


# ------------------------------------------------------------------------------------------ script
@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs bench/elasticity.py, which leaves its file in `tmp_path`; returns the module."""
    bench = elasticity
    monkeypatch.setattr(table_module, "RESULTS", tmp_path)
    monkeypatch.setattr(peers, "REPEATS", 1)

    def run(*options: str) -> Any:
        bench.main(options)
        return bench

    run.bench = bench  # type: ignore[attr-defined]
    return run


def test_the_script_prints_a_line_for_each_case(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script("--unknowns", "1000")
    out, steps = capsys.readouterr()
    lines = out.splitlines()
    problems = ["2d", "3d", "dg"]
    first = ["problem", *sorted(2 * problems), "problem", *problems, *problems, "-"]
    assert [line.split()[0] for line in lines[1:]] == first
    for part in (lines[1:8], lines[8:15]):
        assert len({tuple(k for k, c in enumerate(line) if c == "|") for line in part}) == 1  # aligned
    assert lines[-1].startswith("  - pyamg: has no smoother like that with blocks (2d 968 chebyshev, ")
    assert all(re.match(r" +[0-9.]+ s  (2d|3d|dg), ", line) for line in steps.splitlines())
    assert re.search(r"2d, 1,000 unknowns: assembly: [0-9.]+ s\n", steps)
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

    monkeypatch.setattr(peers, "by_pyamg", broken)
    script("--unknowns", "1000", "--problem", "2d", "--smoother", "jacobi")
    assert "pyamg: RuntimeError: out of order" in capsys.readouterr().out


def test_a_line_of_a_device_has_a_column_for_cupyx(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    bench = elasticity
    monkeypatch.setattr(peers, "REPEATS", 1)
    monkeypatch.setattr(peers, "synchronize", lambda xp: None)
    table = bench.Table("elasticity_fake", "Elasticity")
    run = bench.Run(table, device=fake_device.install().name)
    ours, host = bench.headings(True)
    table.note(ours)
    (line,) = bench.solved("2d", 1000, ["jacobi"], run)
    table.note(host)
    bench.compare_with_host(line, run)
    (row,) = table.rows
    assert set(row["peers"]) == {"scipy bsr", "pyamg"} and row["good"] and row["same"]
    assert "csr_array" in row["left_out"]["cupyx csr"]  # it does not know the fake's arrays
    assert row["seconds_without_graph"] > 0 and not row["graph"] and row["refusal"] is None
    lines = capsys.readouterr().out.splitlines()[1:]
    assert all(name in lines[0] and name not in lines[2] for name in ("cupyx csr", "no graph"))
    for part in (lines[:2], lines[2:]):
        assert len({tuple(k for k, c in enumerate(line) if c == "|") for line in part}) == 1  # aligned


def test_who_ran_without_a_graph_is_told() -> None:
    about = {"problem": "2d", "smoother": "jacobi", "left_out": {"pyamg": "not reached"}}
    cupyx = {"refusal": "NotImplementedError: not captured"}
    rows = [about | {"unknowns": size, "refusal": None, "peers": {"cupyx csr": cupyx}} for size in (968, 2048)]
    rows.append({"problem": "3d", "unknowns": 882, "smoother": "jacobi", "refusal": "RuntimeError: spoiled"})
    assert elasticity.left_out(rows) == [
        "  - pyamg: not reached (2d 968 jacobi, 2d 2,048 jacobi)",
        "  - cupyx csr: no graph, NotImplementedError: not captured (2d 968 jacobi, 2d 2,048 jacobi)",
        "  - ours: no graph, RuntimeError: spoiled (3d 882 jacobi)",
    ]


def rows_of(where: Path) -> list[dict[str, Any]]:
    return json.loads((where / "elasticity_cpu.json").read_text())["rows"]


def test_host_peers_are_left_out_of_large_cases(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script("--unknowns", "1000", "--problem", "2d", "--host-most", "999", "--smoother", "jacobi", "--keep")
    (row,) = rows_of(tmp_path)
    assert row["peers"] == {} and row["left_out"] == dict.fromkeys(
        ("pyamg", "scipy bsr"), "more unknowns than --host-most 999"
    )
    assert "  - pyamg: more unknowns than --host-most 999 (2d 968 jacobi)" in capsys.readouterr().out


def test_host_peers_are_left_out_when_time_is_up(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script("--unknowns", "1000", "--problem", "2d", "--smoother", "jacobi", "--seconds", "0", "--keep")
    (row,) = rows_of(tmp_path)
    assert row["good"] and row["peers"] == {} and set(row["left_out"]) == {"pyamg", "scipy bsr"}
    assert "  - pyamg: --seconds 0: " in capsys.readouterr().out


def test_a_larger_case_is_left_out_by_what_a_smaller_one_took(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script.bench, "SLOWER", 1e9)
    options = ("--problem", "2d", "--smoother", "jacobi", "--seconds", "600", "--keep")
    script("--unknowns", "1500", "1000", *options)
    small, large = rows_of(tmp_path)
    assert small["unknowns"] < large["unknowns"]
    assert set(small["peers"]) == set(large["left_out"]) == {"pyamg", "scipy bsr"}
    assert small["left_out"] == large["peers"] == {}


def test_the_file_is_there_before_the_run_ends(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = []

    def spy(line: Any, run: Any) -> None:
        found.append(json.loads((tmp_path / "elasticity_cpu.json").read_text()))

    monkeypatch.setattr(script.bench, "compare_with_host", spy)
    script("--unknowns", "1000", "--problem", "2d", "--smoother", "jacobi", "--keep")
    (before,) = found
    assert before["cut"] == "not finished"
    assert before["rows"][0]["left_out"] == {"pyamg": "not reached", "scipy bsr": "not reached"}
    assert "cut" not in json.loads((tmp_path / "elasticity_cpu.json").read_text())


def test_a_case_that_fails_does_not_stop_the_others(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_: int) -> Any:
        raise MemoryError("too large")

    monkeypatch.setitem(script.bench.PROBLEMS, "2d", broken)
    with pytest.raises(SystemExit, match="wrong: 2d, about 1,000 unknowns: MemoryError: too large"):
        script("--unknowns", "1000", "--smoother", "jacobi", "--keep")
    rows = rows_of(tmp_path)
    assert [row["problem"] for row in rows] == ["3d", "dg"]
    assert all(row["good"] and set(row["peers"]) == {"pyamg", "scipy bsr"} for row in rows)


@pytest.mark.parametrize(("took", "calls"), [(0.0, 3), (0.6, 2), (5.0, 1)])
def test_what_takes_long_on_the_host_is_not_repeated(monkeypatch: pytest.MonkeyPatch, took: float, calls: int) -> None:
    monkeypatch.setattr(peers, "REPEATS", 2)
    monkeypatch.setattr(peers, "PATIENCE", 1.0)
    now, made = [0.0], []
    monkeypatch.setattr(peers.time, "perf_counter", lambda: now[0])

    def call() -> None:
        made.append(1)
        now[0] += took

    assert peers.timed(call)[1] == pytest.approx(took) and len(made) == calls


def test_a_case_that_does_not_converge_is_wrong(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(peers, "MOST_ITERATIONS", 2)
    with pytest.raises(SystemExit, match="wrong: 2d, 968 unknowns, jacobi"):
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
