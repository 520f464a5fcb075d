"""Streams of the fake card: work is done at once, or when the graph runs that is being captured."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from weakref import WeakValueDictionary

#: What a captured graph does, step by step. It knows addresses and keeps no array.
Step = Callable[[], None]


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for an error of CUDA."""


class Graph:
    """`cupy.cuda.Graph`, and what somebody made the driver keep as long as it: see `driver.UserObject`."""

    #: by the number by which the driver knows a graph
    by_number: ClassVar[WeakValueDictionary[int, Graph]] = WeakValueDictionary()
    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.objects: list[Any] = []
        self.number = next(self._numbers)
        self.by_number[self.number] = self

    def launch(self, stream: Any = None) -> None:
        with at_once():
            for step in self.steps:
                step()

    def upload(self, stream: Any = None) -> None:
        pass


class Event:
    """`cupy.cuda.Event`, which has always happened: at a time in milliseconds of the host."""

    done = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ptr, self.time = 0, 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter() * 1e3

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream:
    """`cupy.cuda.Stream`."""

    null: Stream
    ptds: Stream
    _addresses = itertools.count(0x1000, 16)
    _captures = itertools.count(1)

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, **_: Any) -> None:
        self.ptr = 0 if null else 2 if ptds else next(self._addresses)
        #: the graph that is being captured, and the number of the capture, 0 for none
        self.graph: Graph | None = None
        self.capture = 0
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(_threads.current)
        _threads.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        _threads.current = self._before.pop()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)

    @property
    def done(self) -> bool:
        return True

    def use(self) -> Stream:
        _threads.current = self
        return self

    def synchronize(self) -> None:
        for heard in _listening:
            heard.append("Stream.synchronize")
        if self.is_capturing():
            raise _waiting("Stream.synchronize")

    def is_capturing(self) -> bool:
        return self.graph is not None

    def begin_capture(self, mode: Any = None) -> None:
        if self.ptr == 0:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: the null stream cannot be captured")
        self.graph, self.capture = Graph(), next(self._captures)

    def end_capture(self) -> Graph:
        found, self.graph, self.capture = self.graph, None, 0
        if found is None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is not being captured")
        return found

    def record(self, event: Any = None) -> Event:
        found = event or Event()
        found.record(self)
        return found

    def wait_event(self, event: Any) -> None:
        pass


class _Threads(threading.local):
    """In each thread, the current stream and whether work is done at once all the same."""

    current: Stream
    at_once = False

    def __init__(self) -> None:
        self.current = Stream.null


Stream.null, Stream.ptds = Stream(null=True), Stream(ptds=True)
_threads = _Threads()


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Inside, this thread does its work at once, also in a capture."""
    before, _threads.at_once = _threads.at_once, True
    try:
        yield
    finally:
        _threads.at_once = before


def current() -> Stream:
    """The current stream of this thread."""
    return _threads.current


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Inside, this thread begins on the null stream; afterwards it is on the stream that it was on."""
    before, _threads.current = _threads.current, Stream.null
    try:
        yield
    finally:
        _threads.current = before


def captured_steps() -> list[Step] | None:
    """The steps of the graph that is being captured on the current stream; None if work is done at once."""
    graph = None if _threads.at_once else _threads.current.graph
    return None if graph is None else graph.steps


def do(step: Step) -> None:
    """Do a step now, or make it a part of the graph that is being captured."""
    steps = captured_steps()
    if steps is None:
        step()
    else:
        steps.append(step)


#: Lists to which each wait for the card is added.
_listening: list[list[str]] = []


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Inside, what waits for the card is added to a list."""
    heard: list[str] = []
    _listening.append(heard)
    try:
        yield heard
    finally:
        _listening.remove(heard)


def wait(what: str) -> None:
    """Wait for the current stream, which nobody can while it is being captured."""
    for heard in _listening:
        heard.append(what)
    if captured_steps() is not None:
        raise _waiting(what)


def _waiting(what: str) -> CUDARuntimeError:
    return CUDARuntimeError(f"cudaErrorStreamCaptureUnsupported: {what} waits for a stream that is being captured")
