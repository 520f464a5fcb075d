"""Temporary memory of launches, and values that a stream may not have computed yet.

A stream runs its launches one after the other. They can therefore share their counters, and take temporary memory from
CuPy's pool, which reuses it only for later work of the same stream. A captured graph can run again at any time, next to
any other work, so that its launches have counters and temporary memory of their own (see graphs.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from . import driver, graphs

#: Number of counters that a stream gets at least: enough for most launches on most cards.
_LEAST_COUNTERS = 1024
#: Streams whose counters are kept; the oldest are dropped first.
_MOST_STREAMS = 1024
#: The most numbers of an answer.
_MOST_ANSWERS = 8


class StreamOrdered:
    """A value that was computed on one stream. Another stream that asks for it waits until it is complete.

    A stream that is being captured cannot wait for work outside of its graph: then the host waits, once. A value
    that is `in_graph` is computed only when the graph runs that is being captured, before what follows in it.
    """

    __slots__ = ("__weakref__", "_event", "in_graph", "value")

    def __init__(self, value: Any, in_graph: bool = False) -> None:
        self.value = value
        self.in_graph = in_graph
        self._event = None if in_graph else cupy.cuda.get_current_stream().record()

    def get(self) -> Any:
        """Return the value, after making CuPy's current stream (not the host, except in a capture) wait for it."""
        event = self._event  # read once: another thread may find the event done at any time
        if event is not None:
            if event.done:
                self._event = None
            elif graphs.is_capturing():
                event.synchronize()
                self._event = None
            else:
                cupy.cuda.get_current_stream().wait_event(event)
        return self.value


Array = Any

#: Counters by the driver's number of the stream: the address of a stream, and the number of a thread, are used again.
_zeroed: dict[tuple[int, int], Array] = {}


def counters(count: int) -> Array:
    """Return at least `count` zeros that no concurrent kernel uses. Kernels must leave them at zero."""
    stream = cupy.cuda.get_current_stream()
    return graphs.capture_of(stream).counters(stream, count) if stream.is_capturing() else _counters_of(stream, count)


def scratch_of(stream: Any, capture: Any, size: int, count: int) -> tuple[Any, int, int]:
    """Return memory of `size` bytes for one launch, its address, and that of at least `count` counters.

    The caller holds the memory until the launch has returned, and says what the stream's capture is, if there is one.
    Memory without an array around it takes the host a quarter of the time.
    """
    if capture is not None:
        memory = capture.malloc(size) if size else None
        found = capture.counters(stream, count) if count else None
    else:
        memory = cupy.cuda.alloc(size) if size else None
        found = _counters_of(stream, count) if count else None
    return memory, 0 if memory is None else memory.ptr, 0 if found is None else found.data.ptr


def scratch(size: int, count: int) -> tuple[Any, int, int]:
    """Return what `scratch_of` returns for CuPy's current stream."""
    stream = cupy.cuda.get_current_stream()
    return scratch_of(stream, graphs.capture_of(stream) if stream.is_capturing() else None, size, count)


def _counters_of(stream: Any, count: int) -> Array:
    """Return the counters of a stream that is not being captured."""
    pointer = stream.ptr
    # The default stream of a device is always the same, and need not be asked for.
    key = (cupy.cuda.runtime.getDevice(), driver.stream_number(pointer) if pointer else 0)
    found = _zeroed.get(key)
    if found is None or len(found) < count:
        if len(_zeroed) >= _MOST_STREAMS:
            _zeroed.pop(next(iter(_zeroed)), None)
        found = _zeroed[key] = cupy.zeros(max(count, _LEAST_COUNTERS), np.int32)
        graphs.make_reserve()
    return found


def kept_in(cache: dict[Any, StreamOrdered], key: Any, make: Callable[[], Any]) -> StreamOrdered:
    """Return the value of a key in a cache, and make it when it is first requested.

    What is made during a capture is computed only when the graph runs, so that nothing else can use it. It is made in
    memory of the graph, and does not come into the cache.
    """
    found = cache.get(key)
    if found is None and graphs.is_capturing():
        with graphs.memory():
            found = StreamOrdered(make(), in_graph=True)
        graphs.keep(found.value)
    elif found is None:
        found = cache.setdefault(key, StreamOrdered(make()))
    return found


class _Answers(threading.local):
    """What each thread has, by the device: numbers in memory of the host that kernels write into, and their address."""

    def __init__(self) -> None:
        self.by_device: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}


_answers = _Answers()


def answer() -> int:
    """Return the address of memory of the host for the integers that a kernel answers with; each thread has its own.

    No copy has to be launched to read them. No other kernel may answer between the launch and `read_answer`.
    """
    return _answer()[0]


def read_answer(count: int, event: Any = None) -> list[int]:
    """Wait for CuPy's current stream, and return the first integers that its last kernel has left in `answer`.

    With an event, which was recorded behind that kernel, what was started later goes on meanwhile.
    """
    (event or cupy.cuda.get_current_stream()).synchronize()  # synchronize!
    found: list[int] = _answer()[1][:count].tolist()
    return found


def _answer() -> tuple[int, np.ndarray[Any, Any]]:
    device = cupy.cuda.runtime.getDevice()
    found = _answers.by_device.get(device)
    if found is None:
        memory = cupy.cuda.alloc_pinned_memory(8 * _MOST_ANSWERS)
        found = memory.ptr, np.frombuffer(memory, np.int64, _MOST_ANSWERS)
        _answers.by_device[device] = found
    return found
