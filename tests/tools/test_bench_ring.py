"""The benchmark of attention over several ranks: the model against counts by hand, and one row on one rank."""

from __future__ import annotations

import pytest

from bsrgemm._benchmark.measure.ring import Calibration
from bsrgemm._benchmark.measure.ring_model import Machine, Problem, backward_seconds, forward_seconds, on_paper
from bsrgemm._benchmark.measure.ring_ranks import measured
from bsrgemm.interop.communicator import OneRank


def test_a_step_of_the_model_is_that_of_the_page() -> None:
    problem = Problem(tokens=64, heads=8, kv_heads=2, dim=16, itemsize=2, ranks=4, causal=True)
    machine = Machine(rate=1, backward_rate=1, call=0, bandwidth=1e30, latency=0, link=1, overlap=True)
    found = forward_seconds(machine, problem)
    assert found["step"] == 4 * 8 * 16 * (64 / 4) ** 2 / 2
    assert found["travel"] == problem.step_bytes == 2 * 2 * 16 * 2 * 64 / 4
    assert found["total"] == pytest.approx(4 * found["step"])  # all messages are hidden
    assert backward_seconds(machine, problem)["compute"] == 2.5 * found["compute"]
    slow = Machine(rate=1e9, backward_rate=1e9, call=0, bandwidth=1e30, latency=3, link=1, overlap=False)
    assert forward_seconds(slow, problem)["total"] == pytest.approx(3 * (3 + problem.step_bytes), rel=1e-3)
    window = Problem(tokens=64, heads=8, kv_heads=2, dim=16, itemsize=2, ranks=4, causal=True, left=3)
    assert window.step_bytes == 3 * 2 * 2 * 16 * 2 and window.pairs == 16 * 4


def test_a_million_tokens_hide_their_messages() -> None:
    for row in on_paper():
        if row["left"] is None:
            assert row["travel"] < row["step"] and 7 < row["alone"] / row["forward"] <= 8


def test_a_row_of_one_rank_and_predictions_for_two() -> None:
    comm = OneRank()
    one = [measured(comm, 64, rule, 2) for rule in ("full", "causal", "window")]
    assert all(row["error"] < 1e-5 and row["sent_bytes"] == 0 for row in one)
    two = [{"what": "message", "bytes": n, "seconds": 1e-3 + n * 1e-6} for n in (0, 1000)]
    found = Calibration(one, two)
    row = {"rule": "causal", "tokens": 128, "ranks": 2, "sent_bytes": 500}
    assert found.seconds(row, "backward") == one[1]["backward"] + one[0]["backward"] / 2
    assert found.travel(row, "backward") == pytest.approx(2 * (1e-3 + 500e-6))
    assert all(0 < row["forward"] <= row["forward_clock"] * 1.5 for row in one)
    assert found.seconds({**row, "tokens": 256}, "forward") is None
