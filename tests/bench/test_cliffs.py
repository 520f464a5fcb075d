"""The sweep over the whole surface: its cells are drawn without a card, and small ones are measured on the CPU."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bench.place
from bench import cliffs
from bench.cliffs_cells import FRIENDLY, Cell, ProductCell, SampledCell, SparseCell
from bench.cliffs_draw import KINDS, PARTS, draw
from bench.data import normal
from bench.measure import Run
from bench.place import Place

from ..devices import Device


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings of a few calls, and roofs of a small product and a small copy."""
    for name, value in {
        "_LEAST": 2, "_MOST": 2, "ROUNDS": {"cpu": (1, 1)}, "_DENSE": {"cpu": 64}, "_COPIED": {"cpu": 1 << 16}
    }.items():  # fmt: skip
        monkeypatch.setattr(bench.place, name, value)


def test_a_cell_depends_on_its_seed_and_its_number_alone() -> None:
    cells = draw(1, 300, list(PARTS))
    assert cells == draw(1, 400, list(PARTS))[:300] and cells != draw(2, 300, list(PARTS))
    assert str(draw(1, 1, ["products"])[0]) == ("float16 8 x 8, 2048 x 8192, uniform 0.02, 64 columns, A @ B")


def test_cells_cover_the_surface_within_their_bounds() -> None:
    cells = draw(1, 1000, list(PARTS))
    assert Counter(cell.part for cell in cells).keys() == PARTS.keys()
    assert Counter(cell.kind for cell in cells).keys() == set(KINDS)
    assert len({str(cell) for cell in cells}) > 990
    assert all(cell.flops > 0 and cell.moved > 0 and cell.work > 0 and cell.memory <= 9e9 for cell in cells)


def test_a_sweep_measures_small_cells_on_the_cpu(
    quickly: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "cliffs.json"
    words = ["--device", "cpu", "--seed", "3", "--cells", "12", "--json", str(written)]
    assert cliffs.main(words) == 0
    rows = json.loads(written.read_text())["rows"]
    assert [row["number"] for row in rows] == list(range(12)) and {row["part"] for row in rows} >= {"products", "sddmm"}
    assert all(row["error"] <= 1 and row["slower"] > 0 and row["best"] in row["peers"] for row in rows)
    said = capsys.readouterr().out
    assert "cells slower by more than" in said and "than friendly" in said and "12 cells, 0 without a result" in said


def test_products_are_drawn_by_block_and_columns(tmp_path: Path) -> None:
    picture, cell = tmp_path / "cliffs.png", {"block": (17, 256), "columns": 4096}
    cliffs.heat_map([{"part": "products", "kind": "float16", "case": cell, "slower": 1.5}], picture)
    assert picture.stat().st_size > 10_000
    with pytest.raises(ValueError, match="no products to draw"):
        cliffs.heat_map([{"part": "decode"}], picture)


def test_a_cell_that_fails_is_reported_and_does_not_stop_the_sweep(quickly: None) -> None:
    good = ProductCell(kind="float64", block=(3, 4), shape=(9, 8), density=0.5, columns=2)
    bad = ProductCell(kind="float64", block=(3, 4), shape=(9, 7), density=0.5, columns=2)  # no whole blocks
    rows = list(cliffs.rows(Run(Place("cpu", quick=True)), [Cell("products", x, x.friend()) for x in (bad, good)]))
    assert "failed" in rows[0] and "slower" not in rows[0]
    assert rows[1]["slower"] > 0 and len(cliffs.worst(rows)) == 2
    assert [line[:2] for line in cliffs.shares(rows)[1:3]] == [["all", "1"], ["products", "1"]]


def test_the_time_of_a_friend_counts_by_the_share_of_its_work() -> None:
    case = ProductCell(kind="float32", block=(16, 16), shape=(64, 64), density=0.5, columns=5)
    cell = Cell("products", case, case.friend())
    assert case.friend().columns == 8 and 5 / 8 <= cell.work < 1
    row = cliffs.finished(cell, {"peers": {FRIENDLY: {"ratio": 1.0}, "other": {"ratio": 0.5 + cell.work}, "x": {}}})
    assert row["best"] == FRIENDLY and row["slower"] == 1 / cell.work


@pytest.mark.parametrize("part", ["sddmm", "sparse"])
def test_every_way_to_compute_blocks_is_forced_and_is_right(part: str, device: Device) -> None:
    device.needs("sm_90")
    cupy = device.cupy
    place: Any = SimpleNamespace(xp=cupy, on_gpu=True, draw=lambda shape, kind: cupy.asarray(normal(shape, kind, np)))
    of: Any = {"kind": "float32", "block": (4, 3), "shape": (16, 9), "density": 0.5}
    case = SampledCell(**of, inner=5) if part == "sddmm" else SparseCell(**of)
    ready = cliffs.Forced(part, case, case).ready(place)
    kernel = {
        "SampledDense": "gemm", "SparseDense": "take_blocks", "BlockProducts": "block_products", "SpgemmSimt": "simt"
    }  # fmt: skip
    assert len(ready.peers) == 3
    for name, make in ready.peers.items():
        with device.kernels() as kernels:
            assert ready.error(make().call()) <= 1
        assert any(kernel[name] in launched for launched in kernels)


def test_every_kernel_of_a_product_is_forced_and_is_right(device: Device) -> None:
    device.needs("sm_90")
    cupy = device.cupy
    place: Any = SimpleNamespace(xp=cupy, on_gpu=True, draw=lambda shape, kind: cupy.asarray(normal(shape, kind, np)))
    case = ProductCell(kind="float64", block=(4, 3), shape=(16, 9), density=0.5, columns=2, side="B @ A")
    cell = cliffs.Forced("products", case, case)
    ready = cell.ready(place)
    assert cell.problem["transposed"] and (cell.problem["R"], cell.problem["K"], cell.problem["N"]) == (3, 4, 2)
    calls = {name: make().call for name, make in ready.peers.items()}
    assert len(calls) > 1 and all(ready.error(call()) <= 1 for call in calls.values())
    timed = cell.timed({"peers": {next(iter(calls)): {"seconds": 2e-6, "ratio": 1.0}}})
    assert timed[0]["us"] == 2 and timed[0]["fields"]["types"]["a"] == "f64" and "failed" in timed[1]
    json.dumps([cell.problem, timed])
