"""A row: checked before it is timed, with the reason where there is no number; clocks on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import bench.place
from bench import report
from bench.cases.case import Peer, Ready
from bench.measure import Run
from bench.place import Place


@dataclass
class Case:
    """A sum of some numbers."""

    call: Callable[[], Any] = lambda: 3.0
    peers: dict[str, Callable[[], Peer]] = field(default_factory=dict)
    kind = "float64"
    flops, moved, memory = 2.0, 24.0, 1.0

    def __str__(self) -> str:
        return "a sum"

    def ready(self, place: Place) -> Ready:
        return Ready(self.call, lambda got: abs(got - 3.0), self.peers)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(bench.place, "_DENSE", {"cpu": 16})
    monkeypatch.setattr(bench.place, "_COPIED", {"cpu": 1 << 16})
    return Run(Place("cpu", quick=True))


def test_a_row_has_times_and_a_roof(run: Run) -> None:
    row = run.row(Case())
    assert row["what"] == "a sum" and row["error"] == 0
    assert 0 < row["low"] <= row["seconds"] <= row["high"] and row["count"] == 15 and row["roof"] > 0


def test_a_wrong_result_of_ours_is_not_timed(run: Run) -> None:
    for wrong in (5.0, float("nan")):
        row = run.row(Case(lambda wrong=wrong: wrong))  # type: ignore[misc]
        assert row["wrong"] and "seconds" not in row
        assert (report.status(row) or "").startswith("WRONG")


def test_a_case_that_fails_says_why(run: Run) -> None:
    def broken() -> Any:
        raise ValueError("no such thing\nat all")

    assert run.row(Case(broken))["failed"] == "ValueError: no such thing"
    large = Case()
    large.memory = 1e18
    assert "needs about" in run.row(large)["failed"]


def _raises(error: Exception) -> Callable[[], Peer]:
    def make() -> Peer:
        raise error

    return make


def test_peers_are_left_out_with_the_reason(run: Run) -> None:
    row = run.row(
        Case(
            peers={
                "missing": _raises(ImportError("no module")),
                "other": _raises(NotImplementedError("blocks of 3")),
                "broken": _raises(RuntimeError("status 3")),
                "wrong": lambda: Peer(lambda: 9.0),
                "right": lambda: Peer(lambda: 3.0),
                "own check": lambda: Peer(lambda: 9.0, lambda got: got - 9.0),
                "not judged": lambda: Peer(lambda: 9.0, judged=False),
            }
        )
    )
    peers = row["peers"]
    assert list(run.absent) == ["missing"] and "missing" not in peers
    assert peers["other"] == {"without": "NotImplementedError: blocks of 3"}
    assert peers["broken"] == {"failed": "RuntimeError: status 3"}
    assert peers["wrong"] == {"wrong": 6.0}
    assert all(peers[name]["ratio"] > 0 for name in ("right", "own check", "not judged"))
    assert len(report.remarks([row, row])) == 2  # failed and wrong, each once


def test_no_peers_are_asked_where_none_are_wanted(run: Run) -> None:
    run.with_peers = False
    assert run.row(Case(peers={"x": _raises(AssertionError())}))["peers"] == {}


# ------------------------------------------------------------------------------------------- clocks
def test_calls_are_timed_in_turn_and_one_that_fails_is_left_out_of_all_rounds() -> None:
    order, failed = [], []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}  # type: ignore[misc]

    def late() -> None:
        order.append("late")
        if order.count("late") > 8:
            raise OSError("gone")

    place = Place("cpu", quick=True)
    rounds = place.rounds(calls | {"late": late}, lambda name, error: failed.append(name))
    assert failed == ["late"] and len(rounds) == 3
    assert all(set(found) == {"a", "b"} for found in rounds)
    switches = [one for one, other in zip(order, [None, *order], strict=False) if one != other]
    assert switches[:5] == ["a", "b", "late", "a", "b"]


def test_zeros_stand_for_operands_that_are_not_timed() -> None:
    place = Place("cpu")
    assert not place.blank().draw((3,), "float16").any() and place.draw((3,), "float16").all()
    assert place.blank().draw((2,), "e4m3").dtype == np.uint8 and not place.blank().captures


def test_roofs_are_measured_once_and_absent_where_blas_has_none(run: Run) -> None:
    place = run.place
    first = place.dense_rate("float32")
    assert first and place.dense_rate("float32") == first and place.dense_rate("float16") is None
    assert place.least_seconds("float16", 1.0, 1.0) is None
    assert set(place.roofs()) == {"float32", "copy"}


def test_host_times_count_calls_in_a_row() -> None:
    seen: list[int] = []
    assert 0 < Place("cpu").host_seconds(lambda: seen.append(1)) < 1 and len(seen) == 31
