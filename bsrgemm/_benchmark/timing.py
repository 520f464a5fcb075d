"""Seconds of a call on the CPU or on the GPU: one by one with cold caches, or back to back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._kernels.timing import samples_gpu, time_gpu

Call = Callable[[], Any]

__all__ = ["Call", "Timing", "samples_cpu", "samples_gpu", "time_cpu", "time_gpu", "time_sustained"]


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


def time_cpu(call: Call, repeats: int = 7) -> float:
    """Median seconds of a call."""
    return statistics.median(samples_cpu(call, repeats))


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
