"""What a captured CUDA graph needs lives as long as the graph.

A capture has a memory pool of its own. What is allocated within `memory` while CuPy's current stream is captured comes
from there: pieces that are free again serve later launches of the same graph, and nobody else. What was there before
(operands, lists, masks) is kept by `keep`, at every launch. When the graph and all that was instantiated from it are
gone, the driver gives a signal; the next capture, or `sweep`, lets everything go.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np

from . import driver

#: Number of counters that all captures on a device share: enough for some hundreds of captures.
_RESERVE = 1 << 18


class Capture:
    """The graph that a stream records, and everything that lives as long as it."""

    def __init__(self, gone: driver.Signal | None) -> None:
        self.gone = gone
        self._pool = cupy.cuda.MemoryPool()
        self._kept: dict[int, Any] = {}
        #: addresses of allocations of the pool, which stay the graph's when their arrays are dropped
        self._own: set[int] = set()
        #: by the address of the stream, whose number cannot be asked for in a capture: the counters of its launches
        self._counters: dict[int, Any] = {}
        self._borrowed: list[tuple[Reserve, Any]] = []
        self._unshared: list[Any] = []

    def keep(self, *objects: Any) -> None:
        """Keep objects as long as the graph. Arrays in memory of its own pool need not be kept."""
        for x in objects:
            memory = getattr(x.data, "mem", None) if type(x) is cupy.ndarray else None
            if memory is None or memory.ptr not in self._own:
                self._kept[id(x)] = x

    def malloc(self, size: int) -> Any:
        """Allocate memory that is the graph's: what is free again is used by later launches of the graph alone.

        What is in use keeps the pool, since CuPy frees all memory of a pool that nobody holds: a result may be needed
        when the graph is gone.
        """
        found = self._pool.malloc(size)
        self._own.add(found.mem.ptr)
        memory = cupy.cuda.UnownedMemory(found.ptr, size, (found, self._pool), found.mem.device_id)
        return cupy.cuda.MemoryPointer(memory, 0)

    def counters(self, stream: Any, count: int) -> Any:
        """Return at least `count` zeros for the launches that this stream records.

        They were zeroed before the capture, since zeroing them now would become a part of the graph. Without a reserve
        they are zeroed whenever the graph runs.
        """
        key = stream.ptr
        found = self._counters.get(key)
        if found is None or len(found) < count:
            reserve = _reserves.get(cupy.cuda.runtime.getDevice())
            found = None if reserve is None else reserve.take(count)
            if reserve is not None and found is not None:
                self._borrowed.append((reserve, found))  # smaller ones may be in use by earlier launches
            else:
                with cupy.cuda.using_allocator(self.malloc):
                    found = cupy.zeros(count, np.int32)
                    self._unshared.append(found)
            self._counters[key] = found
        return found

    def give_back(self) -> None:
        """Let other captures have the counters, when the graph is gone."""
        for reserve, found in self._borrowed:
            reserve.free.append(found)


class Reserve:
    """Zeros that captures on a device take. Kernels leave them at zero, so that others can have them later."""

    def __init__(self) -> None:
        self._zeros, self._used = cupy.zeros(_RESERVE, np.int32), 0
        self.free: list[Any] = []
        self._taking = threading.Lock()

    def take(self, count: int) -> Any:
        """Return zeros that no other launch has, or None if there are not enough."""
        with self._taking:
            for i, found in enumerate(self.free):
                if len(found) >= count:
                    return self.free.pop(i)
            first, end = self._used, self._used + -(-count // 32) * 32
            if end > len(self._zeros):
                return None
            self._used = end
            return self._zeros[first:end]


#: Captures whose graphs are there, by the driver's number of them.
_captures: dict[int, Capture] = {}
_sweeping = threading.Lock()
_reserves: dict[int, Reserve] = {}


def is_capturing() -> bool:
    """Tell whether the work of CuPy's current stream becomes a part of a graph instead of being done now."""
    return bool(cupy.cuda.get_current_stream().is_capturing())


def current() -> Capture | None:
    """Return the capture that CuPy's current stream is in, or None: then work is done now."""
    stream = cupy.cuda.get_current_stream()
    return capture_of(stream) if stream.is_capturing() else None


def capture_of(stream: Any) -> Capture:
    """Return the capture of a stream that is being captured."""
    number, graph = driver.recorded(stream.ptr)
    found = _captures.get(number)
    if found is None:
        sweep()
        found = Capture(driver.Signal(graph) if graph else None)
        if graph:  # otherwise an earlier error has ended the capture, and nothing will run
            found = _captures.setdefault(number, found)
    return found


def keep(*objects: Any) -> None:
    """Keep what a launch reads or writes as long as the graph, if one is being captured."""
    capture = current()
    if capture is not None:
        capture.keep(*objects)


@contextlib.contextmanager
def memory(*uses: Any) -> Iterator[None]:
    """If a graph is being captured, it keeps `uses`, and owns what this thread allocates within this context."""
    capture = current()
    if capture is None:
        yield
    else:
        capture.keep(*uses)
        with cupy.cuda.using_allocator(capture.malloc):
            yield


def sweep() -> int:
    """Let go what graphs kept that are gone; return how many graphs are left."""
    with _sweeping:
        for number, capture in list(_captures.items()):
            if capture.gone is not None and capture.gone.given():
                del _captures[number]
                capture.give_back()
        return len(_captures)


def make_reserve() -> None:
    """Prepare counters for the captures of the current device; done by the first launch that needs counters."""
    device = cupy.cuda.runtime.getDevice()
    if device not in _reserves:
        _reserves[device] = Reserve()
