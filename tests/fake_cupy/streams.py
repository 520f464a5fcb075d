"""Streams of the fake card: work is done at once, or when the graph runs that is being captured."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

#: What a captured graph does, step by step. It knows addresses and keeps no array.
Step = Callable[[], None]


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for an error of CUDA."""


class Graph:
    """`cupy.cuda.Graph`. `kept` is what somebody made the graph keep."""

    def __init__(self, steps: list[Step], kept: list[Any]) -> None:
        self.steps, self.kept = steps, kept

    def launch(self, stream: Any = None) -> None:
        with _Uncaptured():
            for step in self.steps:
                step()

    def upload(self, stream: Any = None) -> None:
        pass


class Event:
    """`cupy.cuda.Event`, which has always happened."""

    done = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ptr = 0

    def record(self, stream: Any = None) -> None:
        pass

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
        self.steps: list[Step] | None = None
        self.kept: list[Any] = []
        #: the number of the capture that the stream is in, 0 for none
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
        if self.is_capturing():
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing")

    def is_capturing(self) -> bool:
        return self.steps is not None

    def begin_capture(self, mode: Any = None) -> None:
        if self.ptr == 0:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: the null stream cannot be captured")
        self.steps, self.kept, self.capture = [], [], next(self._captures)

    def end_capture(self) -> Graph:
        if self.steps is None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is not being captured")
        found = Graph(self.steps, self.kept)
        self.steps, self.kept, self.capture = None, [], 0
        return found

    def record(self, event: Any = None) -> Event:
        return event or Event()

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


class _Uncaptured(contextlib.AbstractContextManager[None]):
    """Inside, this thread does its work at once, also in a capture."""

    def __enter__(self) -> None:
        self._before, _threads.at_once = _threads.at_once, True

    def __exit__(self, *_: Any) -> None:
        _threads.at_once = self._before


def at_once() -> contextlib.AbstractContextManager[None]:
    """Inside, this thread does its work at once, also in a capture."""
    return _Uncaptured()


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
    return None if _threads.at_once else _threads.current.steps


def do(step: Step) -> None:
    """Do a step now, or make it a part of the graph that is being captured."""
    steps = captured_steps()
    if steps is None:
        step()
    else:
        steps.append(step)


def wait(what: str) -> None:
    """Wait for the current stream, which nobody can while it is being captured."""
    if captured_steps() is not None:
        raise CUDARuntimeError(f"cudaErrorStreamCaptureUnsupported: {what} waits for a stream that is being captured")
