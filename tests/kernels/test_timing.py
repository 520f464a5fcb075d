"""How a call on a card is timed, on a stand-in for CuPy whose clock is counted by hand."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bsrgemm._kernels import timing


class Card:
    """Notes what happens in order; the host's clock goes on by `launch` seconds in each call."""

    def __init__(self, launch: float) -> None:
        self.done: list[Any] = []
        self.launch, self.now, self.events = launch, 0.0, 0
        card = self

        class Event:
            def __init__(self) -> None:
                card.events += 1
                self.number = card.events

            def record(self) -> None:
                card.done.append(("record", self.number))

        class Flush:
            def __init__(self, count: int, dtype: Any) -> None:
                self.nbytes = count * np.dtype(dtype).itemsize

            def sum(self) -> None:
                card.done.append(("read", self.nbytes))

        class Device:
            def synchronize(self) -> None:
                card.done.append("wait")

        def kernel(grid: Any, threads: Any, args: Any) -> None:
            assert grid == (1,) and threads == (1,) and type(args[0]) is np.uint64
            card.done.append(("sleep", int(args[0])))

        self.ones = Flush
        self.RawKernel = lambda source, name: kernel
        self.cuda = SimpleNamespace(
            Device=Device,
            Event=Event,
            get_elapsed_time=lambda a, b: 1000.0 * a.number + b.number,
            runtime=SimpleNamespace(getDevice=lambda: 0),
        )

    def call(self) -> None:
        self.done.append("call")
        self.now += self.launch


def timed(card: Card, monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[list[float], list[float]]:
    slept: list[float] = []
    monkeypatch.setitem(sys.modules, "cupy", card)
    monkeypatch.setattr(timing, "time", SimpleNamespace(sleep=slept.append, perf_counter=lambda: card.now))
    timing._sleep_kernel.cache_clear()
    try:
        return timing.samples_gpu(card.call, **how), slept
    finally:
        timing._sleep_kernel.cache_clear()


def test_each_call_is_timed_after_a_flush_and_a_sleep_that_hides_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(100e-6)
    seconds, slept = timed(card, monkeypatch, repeats=3, idle=0.7)
    assert slept == [0.7]
    assert seconds == [(1000.0 * a + a + 1) / 1e3 for a in (1, 3, 5)]
    before = ["call", *["wait", "call"] * 3, "wait"]  # one that may compile, three that are timed on the host
    sleep = ("sleep", 250_000)  # twice the host's time and 50 us more
    one = [[("read", 512 << 20), sleep, ("record", n), "call", ("record", n + 1)] for n in (1, 3, 5)]
    assert card.done == [*before, *one[0], *one[1], *one[2], "wait"]


def test_a_call_that_waits_for_the_card_is_not_hidden_for_longer_than_5_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(1.0)
    timed(card, monkeypatch, repeats=1)
    assert [x for x in card.done if x[0] == "sleep"] == [("sleep", 5_000_000)]


def test_the_host_is_as_fast_as_in_its_best_of_three_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(0.0)
    durations = iter([9.0, 3e-3, 1e-4, 2e-3])

    def call() -> None:
        card.now += next(durations)

    monkeypatch.setitem(sys.modules, "cupy", card)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: card.now))
    assert timing._host_once(call) == pytest.approx(1e-4)


def test_the_time_of_a_call_is_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(timing, "samples_gpu", lambda *args: asked.append(args) or [5.0, 1.0, 2.0])
    assert timing.time_gpu(print) == 2.0 and timing.time_gpu(print, 7, 0.1) == 2.0
    assert asked == [(print, 20, timing.IDLE), (print, 7, 0.1)] and timing.IDLE == 0.3


def test_a_call_is_timed_twenty_times_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, slept = timed(Card(0.0), monkeypatch)
    assert len(seconds) == 20 and slept == [timing.IDLE]


@pytest.mark.parametrize("host, want", [(0.0, 50e-6), (25e-6, 100e-6), (1e-3, 2.05e-3), (2.475e-3, 5e-3), (1.0, 5e-3)])
def test_the_sleep_is_longer_than_the_host_and_bounded(host: float, want: float) -> None:
    assert timing.sleep_seconds(host) == pytest.approx(want)
