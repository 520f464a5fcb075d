"""Seconds of a call on the CPU or on the GPU: one call at a time with cold caches, or back to back.

Every GPU time is taken in the same way. The card idles for 0.3 s, because it throttles at its power limit and remembers
what ran before. Before each call the L2 is flushed by reading 512 MB, and a kernel that only sleeps keeps the card busy
until the host has launched the call: hosts differ by a factor of two, kernels do not. Two events around the call give
its time, and the median of several calls is kept. Candidates that are compared are timed in turn, in several rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Call = Callable[[], Any]

#: Seconds of idling before a timing
IDLE = 0.3
#: Bytes read between timings, so that no call finds its operands in the L2. A memset would leave dirty lines there.
_FLUSH_BYTES = 512 << 20
#: The sleeping kernel sleeps so many times the host time of a call, and so many seconds more; at most `_SLEEP_MOST`,
#: which calls that wait for the GPU would exceed.
_SLEEP_TIMES, _SLEEP_MORE, _SLEEP_MOST = 2.0, 50e-6, 5e-3
#: Seconds of calls in one timing, and how often a call is repeated at least and at most
_BUDGET, _LEAST, _MOST = 0.15, 5, 20
#: Seconds of a call after which it is timed once: it does not feel what is in the L2.
_LONG = 0.1
#: Rounds in which candidates are timed in turn, and those of a quick run. A CPU has other work too, and wants more.
ROUNDS = {"cuda": (2, 1), "cpu": (5, 5)}
#: Calls in a row, and how often, for the host time of a call
_HOST_CALLS, _HOST_ROUNDS = 200, 10

_SLEEP_SOURCE = r"""
extern "C" __global__ void sleep_for(unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of some seconds."""

    seconds: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """
        >>> Timing.of([3.0, 1.0, 2.0, 5.0, 4.0])
        Timing(seconds=3.0, low=2.0, high=4.0, count=5)
        """
        low, middle, high = np.percentile(samples, (25, 50, 75))
        return cls(float(middle), float(low), float(high), len(samples))

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, over the median."""
        return (self.high - self.low) / 2 / self.seconds if self.seconds else 0.0


# ------------------------------------------------------------------------------------------- samples
def samples_cpu(call: Call, repeats: int = 7) -> list[float]:
    """Seconds of some calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def samples_gpu(call: Call, repeats: int = 20, idle: float = IDLE) -> list[float]:
    """Seconds of some calls between two events, after idling, the L2 flushed and the host hidden before each."""
    import cupy

    flush = cupy.ones(_FLUSH_BYTES // 4, np.float32)
    nanoseconds = round(sleep_seconds(_host_once(call)) * 1e9)
    cupy.cuda.Device().synchronize()
    time.sleep(idle)
    events = []
    for _ in range(repeats):
        flush.sum()
        sleep_on_gpu(nanoseconds)
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        stop.record()
        events.append((start, stop))
    cupy.cuda.Device().synchronize()
    return [cupy.cuda.get_elapsed_time(a, b) / 1e3 for a, b in events]


def sleep_seconds(host: float) -> float:
    """How long the card sleeps before a call whose launch takes the host so many seconds.

    >>> round(sleep_seconds(25e-6) * 1e6), round(sleep_seconds(1.0) * 1e3)
    (100, 5)
    """
    return min(_SLEEP_MOST, _SLEEP_TIMES * host + _SLEEP_MORE)


@cache
def _sleep_kernel(device: int) -> Any:
    import cupy

    return cupy.RawKernel(_SLEEP_SOURCE, "sleep_for")


def sleep_on_gpu(nanoseconds: int) -> None:
    """Keep CuPy's current stream busy for so long, with one thread and no memory traffic."""
    import cupy

    _sleep_kernel(cupy.cuda.runtime.getDevice())((1,), (1,), (np.uint64(nanoseconds),))


def _host_once(call: Call) -> float:
    """Seconds that the host needs to launch a call: the least of three, after one that may compile."""
    import cupy

    call()
    least = float("inf")
    for _ in range(3):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - start)
    return least


# ------------------------------------------------------------------------------------------- clocks
@dataclass(frozen=True)
class Clock:
    """How the calls of one run are timed, on the GPU ("cuda") or on the CPU ("cpu")."""

    device: str
    quick: bool = False
    idle: float = IDLE

    def samples(self, call: Call) -> list[float]:
        """Seconds of several calls."""
        if self.device == "cpu":
            start = time.perf_counter()
            call()
            return samples_cpu(call, repeats_for(time.perf_counter() - start))
        once = time_sustained(call, seconds=0)
        return [once] if once > _LONG else samples_gpu(call, _LEAST if self.quick else repeats_for(once), self.idle)

    def seconds(self, call: Call) -> float:
        """Median seconds of a call."""
        return statistics.median(self.samples(call))

    def rounds(
        self, calls: Mapping[str, Call], failed: Callable[[str, Exception], None]
    ) -> list[dict[str, list[float]]]:
        """Seconds of each call, round by round; one that fails is told to `failed` and left out of all rounds."""
        left, found = dict(calls), list[dict[str, list[float]]]()
        for _ in range(ROUNDS[self.device][self.quick]):
            found.append({})
            for name, call in list(left.items()):
                try:
                    found[-1][name] = self.samples(call)
                except Exception as error:
                    failed(name, error)
                    del left[name]
        return [{name: times for name, times in each.items() if name in left} for each in found]

    def interleaved(self, calls: Mapping[str, Call], failed: Callable[[str, Exception], None]) -> dict[str, Timing]:
        """The timing of each call over all rounds, those that fail left out."""
        rounds = self.rounds(calls, failed)
        return {name: Timing.of([x for each in rounds for x in each[name]]) for name in rounds[0]}


def repeats_for(once: float) -> int:
    """How often a call that takes so many seconds is repeated.

    >>> repeats_for(1e-3), repeats_for(0.01), repeats_for(1.0)
    (20, 15, 5)
    """
    return int(min(_MOST, max(_LEAST, _BUDGET / max(once, 1e-9))))


def time_cpu(call: Call, repeats: int = 7) -> float:
    """Median seconds of a call on the host."""
    return statistics.median(samples_cpu(call, repeats))


def time_gpu(call: Call, repeats: int = 20, idle: float = IDLE) -> float:
    """Median seconds of a call on the GPU."""
    return statistics.median(samples_gpu(call, repeats, idle))


def time_sustained(call: Call, seconds: float = 1.0) -> float:
    """Mean seconds of a call, back to back for about so many seconds, nothing flushed: what the power limit leaves."""
    import cupy

    start, middle, stop = cupy.cuda.Event(), cupy.cuda.Event(), cupy.cuda.Event()
    call()
    start.record()
    call()
    middle.record()
    middle.synchronize()
    count = max(1, round(seconds * 1e3 / max(cupy.cuda.get_elapsed_time(start, middle), 1e-3)))
    middle.record()
    for _ in range(count):
        call()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(middle, stop) / 1e3 / count


# --------------------------------------------------------------------------------------- host time
def host_seconds(
    call: Call, synchronize: Callable[[], None], count: int = _HOST_CALLS, rounds: int = _HOST_ROUNDS
) -> float:
    """Least mean host seconds of a call, some in a row, the GPU being far from busy."""
    call()
    least = float("inf")
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        least = min(least, (time.perf_counter() - start) / count)
    return least


def add_seconds() -> float:
    """Host seconds of `cupy.add` on two small arrays into a third: the unit in which host times are told."""
    import cupy

    a, b, out = (cupy.zeros(16, np.float32) for _ in range(3))
    return host_seconds(lambda: cupy.add(a, b, out), cupy.cuda.Device().synchronize)
