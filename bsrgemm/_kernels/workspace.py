"""Temporary memory of launches and how long it lives, and values that a stream may not have computed yet.

A stream runs its launches one after the other. They can therefore share their counters, and take temporary memory from
CuPy's pool, which reuses it only for later work of the same stream. A captured graph can run again at any time, next to
any other work. Its launches therefore have memory of their own, shared by the launches of one stream within one
capture. That memory is never freed, because CUDA does not report when a graph is destroyed. Only a caller that keeps
its graph to itself can do better: see `owned_graph`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import cupy
import numpy as np

#: Number of counters that a stream gets at least: enough for most launches on most cards.
_LEAST_COUNTERS = 1024
#: Number of counters that all captures on a device share: enough for some hundreds of captures.
_RESERVE = 1 << 18
_FLOAT32 = np.dtype(np.float32)
#: The pointer that stands for CUDA's per-thread default stream.
PER_THREAD = 2


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
            elif is_capturing():
                event.synchronize()
                self._event = None
            else:
                cupy.cuda.get_current_stream().wait_event(event)
        return self.value


@dataclass
class _Capture:
    """The memory that the launches of a stream share within one capture."""

    counters: Array | None = None
    memory: Array | None = None


Array = Any

_zeroed: dict[tuple[int, int, int], Array] = {}
#: For each device: an array of zeros for captured launches, and how many of its elements are in use.
_reserves: dict[int, list[Any]] = {}
_reserving = threading.Lock()
_captures: dict[tuple[int, int, int], _Capture] = {}
_held: list[Any] = []
_fresh = itertools.count(-1, -1)


class _Owner(threading.local):
    """In each thread, the stream that owns the graph that is being captured and what it holds; None in all others."""

    stream: Any = None
    held: Any = None


_owner = _Owner()


@contextlib.contextmanager
def owned_graph(stream: Any, held: list[Any]) -> Iterator[None]:
    """Let launches that this thread captures take counters and temporary memory as launches of `stream` do.

    The caller launches the graph on that stream alone, keeps what is allocated meanwhile as long as the graph, and has
    made the same launches on the stream before, so that their counters are there. What else the graph needs is added
    to `held`: counters, which the stream may replace by more of them, and work lists that are made meanwhile.
    """
    _owner.stream, _owner.held = stream, held
    try:
        yield
    finally:
        _owner.stream = _owner.held = None


def _current_stream() -> Any:
    owner = _owner.stream
    return cupy.cuda.get_current_stream() if owner is None else owner


def counters(count: int) -> Array:
    """Return at least `count` zeros that no concurrent kernel uses. Kernels must leave them at zero.

    Counters for captures come from a reserve that was zeroed in advance, because zeroing them during the capture would
    become a part of the graph.
    """
    stream = _current_stream()
    if not stream.is_capturing():
        return _counters_of(stream, count)
    device = cupy.cuda.runtime.getDevice()
    capture = _capture_of(device, stream)
    if capture.counters is None or len(capture.counters) < count:
        capture.counters = _reserved(device, count)
    return capture.counters


def _counters_of(stream: Any, count: int) -> Array:
    """Return the counters of a stream that is not being captured."""
    device, pointer = cupy.cuda.runtime.getDevice(), stream.ptr
    key = (device, pointer, threading.get_ident() if pointer == PER_THREAD else 0)
    found, owned = _zeroed.get(key), _owner.stream is not None
    if found is None or len(found) < count:
        if owned:
            raise RuntimeError("counters cannot be zeroed in a capture")
        found = _zeroed[key] = cupy.zeros(max(count, _LEAST_COUNTERS), np.int32)
        if device not in _reserves:
            _reserves[device] = [cupy.zeros(_RESERVE, np.int32), 0]
    if owned:
        _owner.held.append(found)
    return found


def temporary(count: int, dtype: Any) -> Array:
    """Return uninitialised memory of at least `count` elements for one launch."""
    stream = _current_stream()
    if not stream.is_capturing():
        return cupy.empty(count, dtype)
    capture = _capture_of(cupy.cuda.runtime.getDevice(), stream)
    wanted = count * np.dtype(dtype).itemsize
    if capture.memory is None or len(capture.memory) < wanted:
        capture.memory = retain_for_graph(lambda: cupy.empty(wanted, np.uint8))
    return capture.memory


def for_pieces(floats: int, count: int) -> tuple[Any, int, int]:
    """Return `temporary` memory of `floats` float32 for one launch, its address, and the address of `counters`.

    The caller holds the memory until the launch has returned. CuPy is asked only once for the stream and whether it is
    being captured, and for memory without an array around it, which takes the host a quarter of the time.
    """
    stream = _current_stream()
    if stream.is_capturing():
        array = temporary(floats, _FLOAT32)
        return array, array.data.ptr, counters(count).data.ptr
    memory = cupy.cuda.alloc(floats * _FLOAT32.itemsize)
    return memory, memory.ptr, _counters_of(stream, count).data.ptr


def retain_for_graph(make: Callable[[], Any]) -> Any:
    """Return what `make` returns. During a capture, all memory that `make` allocates is kept for the graph."""
    if not _current_stream().is_capturing():
        return make()
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        found = make()
    _held.append((pool, found))
    return found


def is_capturing() -> bool:
    """Tell whether the work of CuPy's current stream becomes a part of a graph instead of being done now."""
    return bool(cupy.cuda.get_current_stream().is_capturing())


def keep_for_graph(x: Any) -> None:
    """Keep an object, with the memory that it will allocate, if a graph is being captured."""
    if is_capturing():
        (_held if _owner.stream is None else _owner.held).append(x)


def kept_in(cache: dict[Any, StreamOrdered], key: Any, make: Callable[[], Any]) -> StreamOrdered:
    """Return the value of a key in a cache, and make it when it is first requested.

    What is made during a capture is computed only when the graph runs, so that nothing else can use it. It is kept for
    the graph, and does not come into the cache.
    """
    found = cache.get(key)
    if found is None and is_capturing():
        found = StreamOrdered(retain_for_graph(make), in_graph=True)
        keep_for_graph(found.value)
    elif found is None:
        found = cache.setdefault(key, StreamOrdered(make()))
    return found


def _reserved(device: int, count: int) -> Array:
    with _reserving:
        reserve, used = _reserves.get(device, (None, 0))
        end = used + -(-count // 32) * 32
        if reserve is not None and end <= len(reserve):
            _reserves[device][1] = end
            return reserve[used:end]
    found: Array = retain_for_graph(lambda: cupy.zeros(count, np.int32))
    return found


def _capture_of(device: int, stream: Any) -> _Capture:
    return _captures.setdefault((device, stream.ptr, _capture_number(stream.ptr)), _Capture())


def _capture_number(pointer: int) -> int:
    """Return the driver's id of the capture that a stream is in, or a new number each time if the driver has no id."""
    ask = _capture_info()
    number = ctypes.c_uint64()
    status = ctypes.c_int()
    if ask is None or ask(pointer, ctypes.byref(status), ctypes.byref(number), None, None, None):
        return next(_fresh)
    return number.value


@cache
def _capture_info() -> Any:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (AttributeError, OSError):
        return None
    address = ctypes.c_void_p
    function.argtypes = [address, address, address, address, address, address]
    return function
