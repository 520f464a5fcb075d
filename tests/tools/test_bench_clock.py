"""The clocks of the benchmarks on a fake card: what is done before, between and after the calls that are timed."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from bsrgemm._benchmark import timing
from bsrgemm._benchmark.timing import Clock, Timing
from bsrgemm._kernels import timing as gpu_timing


class Card:
    """As much of CuPy as a clock uses. It notes what happens; a call takes `seconds` of the card, which is its own."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0
        self.seconds = iter([1e-3] * 1000)

    def module(self) -> types.ModuleType:
        card = self

        class Event:
            def record(self) -> None:
                card.log.append("event")
                self.at = card.now

            def synchronize(self) -> None:
                card.log.append("wait")

        class Flush:
            def sum(self) -> None:
                card.log.append("flush")

        module: Any = types.ModuleType("cupy")
        module.ones = lambda count, dtype: Flush()
        module.cuda = types.SimpleNamespace(
            Event=Event,
            Device=lambda: types.SimpleNamespace(synchronize=lambda: card.log.append("wait")),
            get_elapsed_time=lambda a, b: (b.at - a.at) * 1e3,
        )
        return module

    def call(self) -> str:
        self.log.append("call")
        self.now += next(self.seconds)
        return "result"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setitem(sys.modules, "cupy", made.module())
    monkeypatch.setattr(gpu_timing.time, "sleep", lambda seconds: made.log.append(f"idle {seconds}"))
    monkeypatch.setattr(gpu_timing, "sleep_on_gpu", lambda nanoseconds: made.log.append("sleep"))
    return made


def test_a_call_is_timed_after_idling_with_the_l2_flushed_and_the_host_hidden(card: Card) -> None:
    assert timing.samples_gpu(card.call, repeats=3) == pytest.approx([1e-3] * 3)
    start = card.log.index("idle 0.3")
    assert "flush" not in card.log[:start] and card.log[start - 1] == "wait"
    assert card.log[start + 1 :] == ["flush", "sleep", "event", "call", "event"] * 3 + ["wait"]


def test_the_card_sleeps_longer_than_the_host_takes_to_launch(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(gpu_timing, "sleep_on_gpu", slept.append)
    monkeypatch.setattr(gpu_timing, "_host_once", lambda call: 180e-6)
    timing.samples_gpu(card.call, repeats=2)
    assert slept == [410_000, 410_000]
    assert all(gpu_timing.sleep_seconds(host) > host for host in (0.0, 1e-5, 1e-3))
    assert gpu_timing.sleep_seconds(1.0) == 5e-3  # a call that waits for the card cannot be hidden


def test_a_time_is_the_median_of_its_samples(card: Card) -> None:
    card.seconds = iter([1.0, 1.0, 1.0, 1.0, 3e-3, 1e-3, 2e-3])
    assert timing.time_gpu(card.call, repeats=3) == pytest.approx(2e-3)


def test_candidates_are_timed_in_turn_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Fake(Clock):
        def samples(self, call: timing.Call) -> list[float]:
            order.append(call())
            return [float(len(order))]

    found = Fake("cuda").interleaved({"ours": lambda: "ours", "peer": lambda: "peer"}, lambda *_: None)
    assert order == ["ours", "peer"] * 2
    assert found == {"ours": Timing.of([1.0, 3.0]), "peer": Timing.of([2.0, 4.0])}


def test_a_candidate_that_fails_is_left_out_of_all_rounds() -> None:
    calls, failed = iter([1, 2, 3, 4, 5]), []

    class Fake(Clock):
        def samples(self, call: timing.Call) -> list[float]:
            if call() == "peer" and next(calls) == 2:
                raise RuntimeError("late")
            return [1.0]

    candidates = {"ours": lambda: "ours", "peer": lambda: "peer"}
    rounds = Fake("cuda").rounds(candidates, lambda name, error: failed.append((name, str(error))))
    assert rounds == [{"ours": [1.0]}, {"ours": [1.0]}] and failed == [("peer", "late")]


def test_long_calls_are_timed_once_and_quick_runs_take_five(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    for once, quick, count in ((0.2, False, 1), (1e-3, True, 5), (1e-3, False, 20), (0.05, False, 5)):
        monkeypatch.setattr(timing, "time_sustained", lambda call, seconds, once=once: once)
        assert len(Clock("cuda", quick).samples(card.call)) == count


def test_host_time_is_the_least_mean_of_calls_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    taken = iter([9.0, 1.0, 1.0, 0.5, 0.5, 2.0, 2.0])

    def call() -> None:
        clock[0] += next(taken)

    assert timing.host_seconds(call, lambda: waits.append(1), count=2, rounds=3) == 0.5
    assert len(waits) == 3  # the card is idle before each row


def test_the_sleeping_kernel_compiles() -> None:
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc
    program = nvrtc.createProgram(gpu_timing._SLEEP_SOURCE, "sleep.cu", [], [])
    nvrtc.compileProgram(program, ("-arch=sm_90a",))
    assert b"sleep_for" in nvrtc.getCUBIN(program)


def test_a_cpu_is_timed_by_its_clock() -> None:
    made = []
    samples = Clock("cpu").samples(lambda: made.append(np.ones(10).sum()))
    assert 5 <= len(samples) <= 20 and min(samples) > 0 and len(made) == len(samples) + 2
