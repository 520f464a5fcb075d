"""Seconds of a call on the GPU between two CUDA events.

Before each call the card has idled, the L2 cache is flushed by reading, and a kernel that only sleeps hides the host:
it ends after the host has launched the call, so that a slow host is not measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

Call = Callable[[], Any]

#: Seconds of idling before a timing
IDLE = 0.3
#: Bytes read between timings, so that no call finds its operands in the L2. A memset would leave dirty lines there.
_FLUSH_BYTES = 512 << 20
#: The sleeping kernel sleeps for this multiple of the host time of a call plus this many seconds, at most for
#: `_SLEEP_MOST`, which calls that wait for the GPU would exceed.
_SLEEP_TIMES, _SLEEP_MORE, _SLEEP_MOST = 2.0, 50e-6, 5e-3

_SLEEP_SOURCE = r"""
extern "C" __global__ void sleep_for(unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""


def samples_gpu(call: Call, repeats: int = 20, idle: float = IDLE) -> list[float]:
    """Seconds of some calls between two events, after idling, the L2 flushed and the host hidden before each."""
    import cupy

    flush = flushing_array()
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


def flushing_array() -> Any:
    """An array whose sum reads so much memory that nothing else is left in the L2 cache."""
    import cupy

    return cupy.ones(_FLUSH_BYTES // 4, np.float32)


def sleep_seconds(host: float) -> float:
    """How long the card sleeps before a call whose launch takes the host `host` seconds.

    >>> round(sleep_seconds(25e-6) * 1e6), round(sleep_seconds(1.0) * 1e3)
    (100, 5)
    """
    return min(_SLEEP_MOST, _SLEEP_TIMES * host + _SLEEP_MORE)


@cache
def _sleep_kernel(device: int) -> Any:
    import cupy

    return cupy.RawKernel(_SLEEP_SOURCE, "sleep_for")


def sleep_on_gpu(nanoseconds: int) -> None:
    """Keep CuPy's current stream busy for `nanoseconds`, with one thread and no memory traffic."""
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


def time_gpu(call: Call, repeats: int = 20, idle: float = IDLE) -> float:
    """Median seconds of a call on the GPU."""
    return statistics.median(samples_gpu(call, repeats, idle))
