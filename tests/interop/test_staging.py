"""Messages from arrays on a GPU, with models of CuPy and mpi4py that write down what happens in which order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bsrgemm.interop.communicator import MpiCommunicator

EVENTS: list[str] = []


class Device:
    """An array on the GPU: what `exchange` asks of one."""

    def __init__(self, values: Any) -> None:
        self._values = np.array(values, dtype=np.float64)
        self.shape, self.dtype, self.nbytes = self._values.shape, self._values.dtype, self._values.nbytes
        self.flags = SimpleNamespace(c_contiguous=True)

    def get(self, out: Any = None, blocking: bool = True) -> Any:
        EVENTS.append("copy to host")
        if out is None:
            return self._values.copy()
        assert not blocking and type(out) is np.ndarray
        out[...] = self._values
        return out

    def set(self, values: Any, stream: Any) -> None:
        EVENTS.append("copy to device")
        self._values[...] = values

    def reshape(self, *shape: Any) -> Device:
        return self

    def view(self, dtype: Any) -> Device:
        return self


class Request:
    def __init__(self, done: Any) -> None:
        self.done = done

    def Wait(self, status: Any = None) -> None:
        self.done(status)

    @staticmethod
    def Waitall(requests: list[Request]) -> None:
        for request in requests:
            request.Wait()


class Status:
    bytes = 0

    def Get_count(self, _: Any) -> int:
        return self.bytes


class Failure(Exception):
    """What mpi4py raises; 15 stands for a message that is longer than its room."""

    def Get_error_class(self) -> Any:
        return self.args[0]


class Loop:
    """Rank 0 of a world in which it sends to itself."""

    def __init__(self, loses: int = 0) -> None:
        self.sent: list[Any] = []
        self.loses = loses

    def Isend(self, message: Any, rank: int, tag: int) -> Request:
        EVENTS.append("send")
        self.sent.append(message[0])
        return Request(lambda status: None)

    def Irecv(self, message: Any, rank: int, tag: int) -> Request:
        EVENTS.append("receive")

        def done(status: Any) -> None:
            source = self.sent.pop(0)
            if source.nbytes > message[0].nbytes:
                raise Failure(15)
            if isinstance(source, Device):
                message[0]._values[...] = source._values
                status.bytes = source.nbytes - self.loses
            else:
                message[0][...] = source
                status.bytes = source.nbytes - self.loses

        return Request(done)


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Event:
        def __init__(self, **_: Any) -> None:
            pass

        def record(self) -> None:
            EVENTS.append("record")

        def synchronize(self) -> None:
            EVENTS.append("wait for the copy")

    stream = SimpleNamespace(
        synchronize=lambda: EVENTS.append("wait for the stream"), record=lambda: SimpleNamespace(done=False)
    )
    model = SimpleNamespace(
        cuda=SimpleNamespace(Event=Event, get_current_stream=lambda: stream), asarray=lambda x: Device(x)
    )
    monkeypatch.setitem(sys.modules, "cupy", model)
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace(empty_pinned=np.empty))
    EVENTS.clear()
    yield


def communicator(cuda_aware: bool, loses: int = 0) -> Any:
    comm = object.__new__(MpiCommunicator)
    comm._MPI = SimpleNamespace(BYTE=None, Status=Status, Request=Request, Exception=Failure, ERR_TRUNCATE=15)
    comm._mpi, comm.rank, comm.size, comm.cuda_aware, comm._held = Loop(loses), 0, 1, cuda_aware, []
    return comm


def test_arrays_go_through_pinned_memory_and_are_sent_by_wait() -> None:
    """What is queued between `exchange` and `wait` runs while the copy and the message are under way."""
    a, b = Device([1.0, 2.0]), Device([0.0, 0.0])
    under_way = communicator(False).exchange({0: a}, {0: b})
    EVENTS.append("product")
    under_way.wait()
    np.testing.assert_array_equal(b._values, [1, 2])
    assert EVENTS == [
        "receive", "copy to host", "record", "product", "wait for the copy", "send", "copy to device",
    ]  # fmt: skip


def test_pinned_memory_is_kept_until_it_was_copied() -> None:
    comm = communicator(False)
    for _ in range(3):
        comm.exchange({0: Device([1.0])}, {0: Device([0.0])}).wait()
    assert len(comm._held) == 3
    for messages in comm._held:
        messages._copied[0].done = True
    comm.exchange({0: Device([1.0])}, {0: Device([0.0])}).wait()
    assert len(comm._held) == 1


def test_a_library_that_reads_the_card_gets_the_arrays_themselves_after_the_work_before() -> None:
    a, b = Device([1.0, 2.0]), Device([0.0, 0.0])
    under_way = communicator(True).exchange({0: a}, {0: b})
    EVENTS.append("product")
    under_way.wait()
    np.testing.assert_array_equal(b._values, [1, 2])
    assert EVENTS == ["record", "product", "wait for the copy", "receive", "send"]


def test_arrays_on_the_host_are_sent_at_once() -> None:
    a, b = np.array([1.0, 2.0]), np.zeros(2)
    under_way = communicator(False).exchange({0: a}, {0: b})
    assert EVENTS == ["receive", "send"]
    under_way.wait()
    np.testing.assert_array_equal(b, a)


def test_a_message_of_another_length_is_refused() -> None:
    with pytest.raises(RuntimeError, match="wanted 16 bytes from rank 0, which has sent 15"):
        communicator(False, loses=1).exchange({0: np.ones(2)}, {0: np.zeros(2)}).wait()


def test_a_message_that_is_too_long_is_refused_after_all_have_come() -> None:
    comm = communicator(False)
    comm.size = 2
    target = np.zeros(2)
    under_way = comm.exchange({0: np.ones(3), 1: np.ones(2)}, {0: np.zeros(2), 1: target})
    with pytest.raises(RuntimeError, match="wanted 16 bytes from rank 0, which has sent more: it has failed"):
        under_way.wait()
    np.testing.assert_array_equal(target, 1)


def test_another_error_of_the_library_is_raised_as_it_is() -> None:
    comm = communicator(False)
    comm._MPI.ERR_TRUNCATE = 16
    with pytest.raises(Failure):
        comm.exchange({0: np.ones(3)}, {0: np.zeros(2)}).wait()


def test_messages_without_bytes_are_not_sent() -> None:
    communicator(False).exchange({0: np.empty(0)}, {0: np.empty(0)}).wait()
    assert EVENTS == []
