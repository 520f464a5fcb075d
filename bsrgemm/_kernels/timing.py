"""Timing of calls on the GPU with CUDA events. The L2 cache is flushed before each timed call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

#: Size of the array that is read before each timed call, and how often it is read, so that no call finds its operands
#: in the L2 cache. A memset would leave modified lines in the cache, which the timed call would have to write back.
_FLUSH_BYTES, _FLUSHES = 512 << 20, 3


def samples_gpu(call: Callable[[], Any], repeats: int = 20, idle: float = 0.0) -> list[float]:
    """Return the seconds that each of `repeats` calls takes between two events, after `idle` seconds without work.

    The flush before each call takes longer than the host needs to launch the call, so that the time of a slow host is
    not included. This function waits for the GPU.
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


def time_gpu(call: Callable[[], Any], repeats: int = 20, idle: float = 0.0) -> float:
    """Return the median time of a call in seconds, with the L2 cache flushed before each. Waits for the GPU."""
    return statistics.median(samples_gpu(call, repeats, idle))
