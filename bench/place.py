"""The machine on which something is measured: NumPy on the CPU or CuPy on its current GPU, its clocks and its roofs.

The card idles for 0.3 s before a timing, because it throttles at its power limit and remembers what ran before. Before
each call the L2 is flushed by reading, and a kernel that only sleeps keeps the card busy until the host has launched
the call. Two events around the call give its time. Candidates that are compared are timed in turn, in several rounds.
"""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bsrgemm._kernels.timing import IDLE, Call, samples_gpu

from . import data, machine

#: Seconds of calls in one timing, and how often a call is repeated at least and at most
_BUDGET, _LEAST, _MOST = 0.15, 5, 20
#: Seconds of a call after which it is timed once: the contents of the L2 do not matter then
_LONG = 0.1
#: Rounds in which candidates are timed in turn, and those of a quick run. A CPU has other work too, and wants more.
ROUNDS = {"cuda": (2, 1), "cpu": (5, 3)}
#: Seconds back to back for a sustained rate, and the pause after it, so that the next case is not slowed down
SUSTAINED, COOL = 0.5, 0.5
#: Calls in a row, and how often, for the host time of a call
HOST_CALLS, HOST_ROUNDS = 200, 10
#: Bytes that are copied to find the bandwidth, and the side of the dense product that stands for a kind of number
_COPIED = {"cpu": 256 << 20, "cuda": 2 << 30}
_DENSE = {"cpu": 1024, "cuda": 8192}


def quartiles(samples: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of some seconds.

    >>> quartiles([3.0, 1.0, 2.0, 5.0, 4.0])
    {'seconds': 3.0, 'low': 2.0, 'high': 4.0, 'count': 5}
    """
    low, middle, high = (float(x) for x in np.percentile(samples, (25, 50, 75)))
    return {"seconds": middle, "low": low, "high": high, "count": len(samples)}


def repeats_for(once: float) -> int:
    """How often a call that takes so many seconds is repeated.

    >>> repeats_for(1e-3), repeats_for(0.01), repeats_for(1.0)
    (20, 15, 5)
    """
    return int(min(_MOST, max(_LEAST, _BUDGET / max(once, 1e-9))))


class Place:
    """Arrays, clocks and roofs of "cpu", or of CuPy's current GPU, "cuda"; by default the GPU if there is one."""

    def __init__(self, device: str | None = None, quick: bool = False, idle: float = IDLE) -> None:
        self.device = device or ("cuda" if machine.has_gpu() else "cpu")
        self.quick, self.idle = quick, idle
        self.on_gpu = self.captures = self.device == "cuda"
        if self.on_gpu:
            import cupy

            self.xp: Any = cupy
        else:
            self.xp = np
        #: what operands are filled with
        self.draw: Callable[[tuple[int, ...], str], Any] = lambda shape, kind: data.normal(shape, kind, self.xp)
        self._roofs: dict[str, float | None] = {}

    def blank(self) -> Place:
        """The same with operands of zeros and without graphs, for calls that compile side by side and are not timed."""
        found = copy.copy(self)
        found.captures = False
        found.draw = lambda shape, kind: self.xp.zeros(shape, data.stored_dtype(kind))
        return found

    def some(self, everything: Sequence[Any], quick: Sequence[Any]) -> Sequence[Any]:
        """The part of a list that this run takes."""
        return quick if self.quick else everything

    # ------------------------------------------------------------------------------------- memory
    def synchronize(self) -> None:
        """Wait for all work; raises where something went wrong."""
        if self.on_gpu:
            self.xp.cuda.Device().synchronize()

    def release(self) -> None:
        """Free the memory that CuPy has cached."""
        if self.on_gpu:
            self.xp.get_default_memory_pool().free_all_blocks()

    def free_bytes(self) -> int:
        """Memory that operands may take."""
        if not self.on_gpu:
            return _available_bytes()
        free, _ = self.xp.cuda.runtime.memGetInfo()
        return int(free) + int(self.xp.get_default_memory_pool().free_bytes())

    def peak_bytes(self, call: Call) -> int | None:
        """The most that a call takes from CuPy's memory pool at a time; None on the CPU."""
        if not self.on_gpu:
            return None

        class Peak(self.xp.cuda.MemoryHook):  # type: ignore[name-defined]
            name = "Peak"
            now = most = 0

            def malloc_postprocess(self, **about: int) -> None:
                self.now += about["mem_size"]
                self.most = max(self.most, self.now)

            def free_postprocess(self, **about: int) -> None:
                self.now -= about["mem_size"]

        hook = Peak()
        with hook:
            call()
        self.synchronize()
        return int(hook.most)

    # ------------------------------------------------------------------------------------- clocks
    def samples(self, call: Call) -> list[float]:
        """Seconds of several calls."""
        if not self.on_gpu:
            call()
            start = time.perf_counter()
            call()
            repeats = repeats_for(time.perf_counter() - start)
            return [_clocked(call) for _ in range(_LEAST if self.quick else repeats)]
        once = self.sustained(call, 0)
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

    def sustained(self, call: Call, seconds: float = SUSTAINED) -> float:
        """Mean seconds of calls back to back for about `seconds`, nothing flushed, so that the power limit shows."""
        start, middle, stop = (self.xp.cuda.Event() for _ in range(3))
        call()
        start.record()
        call()
        middle.record()
        middle.synchronize()
        once = self.xp.cuda.get_elapsed_time(start, middle) / 1e3
        count = max(1, round(seconds / max(once, 1e-6)))
        middle.record()
        for _ in range(count):
            call()
        stop.record()
        stop.synchronize()
        if seconds:
            time.sleep(COOL)
        return float(self.xp.cuda.get_elapsed_time(middle, stop)) / 1e3 / count

    def host_seconds(self, call: Call) -> float:
        """Least mean host seconds of a call, many in a row, the GPU being far from busy."""
        call()
        least = float("inf")
        count, rounds = (HOST_CALLS, HOST_ROUNDS) if self.on_gpu else (10, 3)
        for _ in range(rounds):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            least = min(least, (time.perf_counter() - start) / count)
        return least

    def waited_seconds(self, call: Call, rounds: int) -> float:
        """Least seconds of a call with all its work on the GPU, after one that does not count."""

        def whole() -> None:
            call()
            self.synchronize()

        whole()
        return min(_clocked(whole) for _ in range(rounds))

    def captured(self, call: Call) -> Call:
        """A call as the replay of a CUDA graph on the current stream; itself on the CPU."""
        if not self.captures:
            return call
        call()
        self.synchronize()
        stream = self.xp.cuda.Stream(non_blocking=True)
        with stream:
            result = call()
            stream.synchronize()
            stream.begin_capture()
            try:
                call()
            finally:
                graph = stream.end_capture()

        def replay(kept: Any = stream) -> Any:  # memory of the capture goes back to the pool of its stream
            graph.launch(self.xp.cuda.get_current_stream())
            return result

        return replay

    # -------------------------------------------------------------------------------------- roofs
    def copy_rate(self) -> float | None:
        """Bytes read and written in a second by a plain copy."""

        def measure() -> float:
            source = self.xp.ones(_COPIED[self.device] // (4 if self.quick else 1) // 8, np.float64)
            target = self.xp.empty_like(source)
            return 2 * source.nbytes / self.seconds(lambda: self.xp.copyto(target, source))

        return self._kept("copy", measure)

    def dense_rate(self, kind: str) -> float | None:
        """Operations in a second of a dense product of this kind of number; None where BLAS has none."""
        from .peers.products import dense

        def measure() -> float | None:
            if kind == "e4m3" or (not self.on_gpu and kind not in ("float32", "float64")):
                return None
            side = _DENSE[self.device]
            A, B = (self.draw((side, side), kind) for _ in range(2))
            return 2.0 * side**3 / self.seconds(dense(A, B, self.xp.empty_like(A), kind == "tf32"))

        return self._kept(kind, measure)

    def _kept(self, name: str, measure: Callable[[], float | None]) -> float | None:
        if name not in self._roofs:
            try:
                self._roofs[name] = measure()
            except Exception:  # without memory or BLAS there is no such roof
                self._roofs[name] = None
        return self._roofs[name]

    def least_seconds(self, kind: str, flops: float, moved: float) -> float | None:
        """What the roofs allow: the larger of the time to compute and the time to move."""
        rate, bandwidth = self.dense_rate(kind), self.copy_rate()
        return None if rate is None or bandwidth is None else max(flops / rate, moved / bandwidth)

    def roofs(self) -> dict[str, float]:
        """Those that have been measured so far: "copy" in bytes a second, kinds of numbers in operations a second."""
        return {name: rate for name, rate in self._roofs.items() if rate}


def _clocked(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _available_bytes() -> int:
    """What the kernel would give, and what a container's limit leaves."""
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, IndexError, ValueError):
        found = [int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10]
    with contextlib.suppress(OSError, ValueError):  # "max" instead of a number means no limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found.append(limit - used)
    return max(0, min(found))
