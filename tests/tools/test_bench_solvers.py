"""bench/run/solvers.py on tiny problems: what is measured, shown and written."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bsrgemm._benchmark import table
from bsrgemm._benchmark.solver import problems, systems, timing, whole_job

pytest.importorskip("pyamg")


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "ROUNDS", 1)


def test_rows_have_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    systems.main(["--unknowns", "2500", "--problem", "cube", "--device", "cpu", "--keep"])
    found = json.loads((tmp_path / "solvers_cpu.json").read_text())
    whole, narrow, peer = found["rows"]
    assert [row["what"] for row in found["rows"]] == ["bsrgemm", "bsrgemm, float32 in M", "pyamg, host"]
    for row in (whole, narrow):
        assert row["info"] == 0 and row["residual"] <= 1.01 * systems.RTOL
        assert row["levels"] > 1 and 1 < row["complexity"] < 2
        assert min(row["setup"], row["refresh"], row["solution"]) > 0
    assert abs(whole["iterations"] - narrow["iterations"]) <= 1
    assert whole["iterations"] <= 1.2 * peer["iterations"] + 1
    said = capsys.readouterr().out
    assert said.count("cube") == 3 and f"{whole['setup']:.3f}" in said


def test_the_least_of_some_times_counts() -> None:
    times = iter([0.03, 0.001, 0.02])

    def work() -> int:
        import time

        end = time.process_time() + next(times)
        while time.process_time() < end:
            pass
        return 7

    import numpy as np

    found, best = systems.timed(work, np, rounds=3)
    assert found == 7 and best < 0.015


def test_rows_of_two_runs_can_go_into_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyamg may be measured at another time, since it needs no card."""
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    words = ["--unknowns", "800", "--problem", "plate", "--device", "cpu", "--rounds", "1", "--keep", "--merge"]
    for who in ("pyamg", "bsrgemm", "pyamg"):
        systems.main([*words, "--who", who])
    rows = json.loads((tmp_path / "solvers_cpu.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["pyamg, host", "bsrgemm", "bsrgemm, float32 in M"]


def test_pyamg_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    systems.main(["--unknowns", "800", "--problem", "plate", "--device", "cpu", "--who", "bsrgemm"])
    assert "pyamg" not in capsys.readouterr().out.replace("beside pyamg", "")
    assert problems.plate(800).A.blocksize == (2, 2)


def test_beside_a_card_pyamg_is_timed_by_the_clock_on_the_wall() -> None:
    """Threads of BLAS add up in CPU time, also those that wait; so the clocks are made up."""
    ticks = SimpleNamespace(process_time=count(0, 1).__next__, perf_counter=count(0, 5).__next__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "time", ticks)
        assert systems.timed(lambda: "done", np, 3) == ("done", 1)
        assert systems.timed(lambda: "done", np, 3, wall=True) == ("done", 5)
    asked: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(systems, "theirs", lambda problem, rounds, wall: asked.append(wall) or 1 / 0)
        for device in ("cuda", "cpu"):
            with pytest.raises(ZeroDivisionError):
                systems.measure(table.Table("solvers_test", "", []), "plate", 800, device, ["pyamg"], 1)
    assert asked == [True, False]


def test_whole_jobs_and_decompositions_are_rows_of_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    systems.main(["--jobs", "--unknowns", "2500", "--device", "cpu", "--rounds", "1", "--keep"])
    rows = json.loads((tmp_path / "solver_jobs_cpu.json").read_text())["rows"]
    ours, peer, direct, *others = rows
    assert [row["what"] for row in rows][:3] == ["bsrgemm, block-COO to x", "scipy cg, Jacobi", "bsrgemm, spsolve"]
    assert direct["iterations"] is None and direct["residual"] < 1e-11
    for row in (ours, peer, direct):
        assert row["info"] == 0 and row["residual"] <= 1.01 * systems.RTOL
        assert row["rate"] == pytest.approx(row["unknowns"] / row["seconds"])
    assert ours["iterations"] < 25 < peer["iterations"]
    assert [row["what"] for row in others] == ["ilu0", "ic0", "block_ssor"]
    assert all(row["multiple"] == pytest.approx(row["seconds"] / row["product"]) for row in others)


def test_a_direct_solver_that_is_missing_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: Any) -> None:
        raise ImportError("A: spsolve on the GPU needs cuDSS")

    monkeypatch.setattr(whole_job, "direct", missing)
    monkeypatch.setattr(whole_job, "decompositions", lambda *_: {})
    found = table.Table("solver_jobs_test", "")
    systems.measure_jobs(found, "cube", 800, "cpu", 1)
    assert [row["what"] for row in found.rows] == ["bsrgemm, block-COO to x", "scipy cg, Jacobi"]
    assert "bsrgemm, spsolve was left out: A: spsolve on the GPU needs cuDSS" in capsys.readouterr().out
