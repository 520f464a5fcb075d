"""bench/run/scale.py on tiny problems, and its cost model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bsrgemm._benchmark import table
from bsrgemm._benchmark.measure import scale
from bsrgemm._benchmark.measure.scale_model import (
    Machine,
    Panel,
    halo_seconds,
    iteration_seconds,
    on_paper,
    product_seconds,
)

MACHINE = Machine(bandwidth=1e9, call=1e-5, latency=2e-6, reduce=3e-6, link=1e8, overlap=True)


def test_the_model_adds_what_follows_and_hides_what_overlaps() -> None:
    panel = Panel(matrix_bytes=9e5, vector_bytes=1e5, halo_bytes=1e3, messages=2)
    assert halo_seconds(MACHINE, panel) == pytest.approx(2 * 2e-6 + 1e-5)
    assert product_seconds(MACHINE, panel) == pytest.approx(1e-5 + 1e-3)
    one_after_the_other = Machine(**(MACHINE.__dict__ | {"overlap": False}))
    assert product_seconds(one_after_the_other, panel) == pytest.approx(1e-5 + 1e-3 + 1.4e-5)
    long = Panel(9e5, 1e5, 1e6, 2)
    assert product_seconds(MACHINE, long) == pytest.approx(1e-5 + halo_seconds(MACHINE, long))
    assert iteration_seconds(MACHINE, panel) > product_seconds(MACHINE, panel) + 3 * MACHINE.reduce


def test_a_terabyte_on_paper_is_bound_by_memory() -> None:
    for row in on_paper():
        assert row["halo"] < row["local"] < row["product"] < row["iteration"] < 0.05


def test_the_hidden_share_is_what_messages_do_not_add_to_a_product() -> None:
    row = {"exchange": 4.0, "silent": 10.0}
    assert scale.hidden(row | {"seconds": 14.0}) == 0 == scale.hidden(row | {"seconds": 15.0})
    assert scale.hidden(row | {"seconds": 11.0}) == pytest.approx(0.75)
    assert scale.hidden(row | {"seconds": 9.0}) == 1


def test_the_machine_is_found_again_from_times_of_the_model() -> None:
    true = Machine(2e9, 3e-5, 2e-5, 1e-5, 1e9, False)

    def product(size: int, ranks: int) -> dict[str, Any]:
        row = {"what": "product", "columns": 1, "ranks": ranks, "panel_bytes": size, "vector_bytes": size // 10,
               "most_halo_bytes": 0, "messages": 0}  # fmt: skip
        return row | {"seconds": scale.predicted(true, row)}

    one = [product(size, 1) for size in (10_000, 100_000, 10_000_000)]
    two: list[dict[str, Any]] = [
        {"what": "message", "bytes": size, "seconds": 2e-5 + size / 1e9} for size in (0, 1000, 10**6)
    ]
    found = scale.calibrated(one, [*two, {"what": "sum", "seconds": 1e-5}])
    for name, value in true.__dict__.items():
        assert getattr(found, name) == pytest.approx(value)


@pytest.mark.long
def test_the_script_measures_and_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    scale.main(["--unknowns", "600", "2000", "--runs", "20", "--keep"])
    rows = json.loads((tmp_path / "scale_mpi_cpu.json").read_text())["rows"]
    products = [row for row in rows if row["what"] == "product"]
    assert {row["ranks"] for row in products} == {1, 2, 4}
    for row in products:
        assert row["error"] < 1e-13 and row["repeats"] and row["halo_bytes"] == row["least_bytes"]
    for row in (row for row in rows if row["what"] == "cg"):
        assert row["info"] == 0 and row["repeats"] and row["difference"] < 1e-4
        assert abs(row["iterations"] - row["iterations_of_one"]) <= (2 if row["preconditioner"] == "multigrid" else 0)
    assert {"model", "above", "on paper", "message", "sum"} <= {row["what"] for row in rows}
