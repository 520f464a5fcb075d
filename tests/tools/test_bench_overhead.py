"""bench/run/overhead.py: six calls are timed as multiples of an addition, and a quick run writes no file."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bsrgemm._benchmark import machine
from bsrgemm._benchmark import table as tables
from bsrgemm._benchmark.measure import overhead


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The calls run on the CPU, and each takes 3 us; an addition takes 2 us."""
    calls: list[Any] = []
    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ones=np.ones, add=np.add, cuda=cuda))  # type: ignore[arg-type]
    host_calls = overhead.host_calls
    monkeypatch.setattr(overhead, "host_calls", lambda xp, device: host_calls(np, "cpu", 2, 3))

    def seconds(call: Any, synchronize: Any) -> float:
        result = call()
        calls.append(result)
        return 2e-6 if isinstance(result, np.ndarray) and result.shape == (512,) else 3e-6

    monkeypatch.setattr(overhead, "host_seconds", seconds)
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "describe", dict)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return calls


def test_six_calls_are_multiples_of_an_addition_of_512_numbers(timed: list[Any]) -> None:
    table = tables.Table("overhead_cuda", "Cost of a call")
    overhead.measure_calls(table)
    assert [row["what"] for row in table.rows] == list(overhead.ADDS) and len(table.rows) == 7
    for row in table.rows:
        assert row["adds"] == pytest.approx(1.5) and row["add_seconds"] == 2e-6
        most = overhead.ADDS[row["what"]]
        assert row["most_adds"] == most and row["reached"] == (None if most is None else most >= 1.5)
    shapes = [x.shape for x in timed[::2]]
    assert shapes == [(128, 64), (128, 64), (128, 64), (6,), (1, 2, 256, 128), (1, 2, 1, 128), (128, 128)]
    assert all(x.shape == (512,) and x.dtype == np.float64 for x in timed[1::2])


@pytest.mark.parametrize("name, count", [("A @ B, 16 operands in turn", 2), ("A @ B, new operands each call", 3)])
def test_operands_that_are_new_are_other_arrays(name: str, count: int) -> None:
    calls = overhead.host_calls(np, "cpu", 2, 3)
    seen: list[int] = []

    class Matrix:
        def __matmul__(self, other: Any) -> None:
            seen.append(other.ctypes.data)

    new = calls[name]
    cell = next(c for c in new.__closure__ if hasattr(c.cell_contents, "blocksize"))  # type: ignore[attr-defined]
    cell.cell_contents = Matrix()
    for _ in range(count + 1):
        new()
    assert len(set(seen)) == count and seen[count] == seen[0]


def test_a_quick_run_is_of_these_calls_and_leaves_the_results_alone(timed: list[Any], tmp_path: Path) -> None:
    overhead.main(["--quick"])
    assert len(timed) == 14 and not list(tmp_path.iterdir())


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        overhead.main(["--quick"])
