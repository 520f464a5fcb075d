"""Seconds of a call on the CPU or on the GPU: one by one with cold caches, or back to back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Call = Callable[[], Any]

#: Read between timings, so that no case finds its operands in the L2 cache. A memset would leave dirty lines there.
_FLUSH_BYTES, _FLUSHES = 512 << 20, 3


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


def samples_cpu(call: Call, repeats: int = 7) -> list[float]:
    """Seconds of some calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def samples_gpu(call: Call, repeats: int = 20, idle: float = 0.0) -> list[float]:
    """Seconds of some calls between two events, L2 flushed before each.

    The flush is long enough for the host to have launched the call before it ends: a slow host is not to be measured.
    """
    import cupy

    flush = cupy.ones(_FLUSH_BYTES // 4, np.float32)
    for _ in range(3):
        call()
    cupy.cuda.Device().synchronize()
    time.sleep(idle)
    events = []
    for _ in range(repeats):
        for _ in range(_FLUSHES):
            flush.sum()
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        stop.record()
        events.append((start, stop))
    cupy.cuda.Device().synchronize()
    return [cupy.cuda.get_elapsed_time(a, b) / 1e3 for a, b in events]


def time_cpu(call: Call, repeats: int = 7) -> float:
    """Median seconds of a call."""
    return statistics.median(samples_cpu(call, repeats))


def time_gpu(call: Call, repeats: int = 20, idle: float = 0.0) -> float:
    """Median seconds of a call, L2 flushed."""
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
