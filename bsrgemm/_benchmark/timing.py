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

import numpy as np

from .._kernels.timing import IDLE, Call, samples_gpu, time_gpu

__all__ = [
    "IDLE",
    "ROUNDS",
    "Call",
    "Clock",
    "Timing",
    "samples_cpu",
    "samples_gpu",
    "time_cpu",
    "time_gpu",
    "time_sustained",
]

#: Seconds of calls in one timing, and how often a call is repeated at least and at most
_BUDGET, _LEAST, _MOST = 0.15, 5, 20
#: Seconds of a call after which it is timed once: the contents of the L2 do not matter then.
_LONG = 0.1
#: Rounds in which candidates are timed in turn, and those of a quick run. A CPU has other work too, and wants more.
ROUNDS = {"cuda": (2, 1), "cpu": (5, 5)}
#: Calls in a row, and how often, for the host time of a call
_HOST_CALLS, _HOST_ROUNDS = 200, 10


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
        """Seconds of each call, round by round; one that fails is passed to `failed` and left out of all rounds."""
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


def time_sustained(call: Call, seconds: float = 1.0) -> float:
    """Mean seconds of a call, back to back for about `seconds`, without a flush, so that the power limit shows."""
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
    """Host seconds of `cupy.add` on two small arrays into a third: the unit of host times."""
    import cupy

    a, b, out = (cupy.zeros(16, np.float32) for _ in range(3))
    return host_seconds(lambda: cupy.add(a, b, out), cupy.cuda.Device().synchronize)
