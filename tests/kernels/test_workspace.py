"""What launches share, what captured graphs keep, and when they let it go, on a stand-in for CuPy and its driver."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from cupy.cuda import MemoryPointer, UnownedMemory

from bsrgemm._kernels import graphs, launch, workspace
from bsrgemm._kernels.workspace import StreamOrdered

from .. import fake_cupy
from ..emulator.emulator import Array
from .stub_driver import driven


class Room:
    """A piece of memory; whoever needs it holds this object."""

    def __init__(self, address: int) -> None:
        self.address = address


class Pool:
    """A pool of CuPy's: memory that is in use belongs to others as soon as nobody holds the pool."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._rooms: list[Room] = []
        self._free: dict[int, list[int]] = {}

    def malloc(self, size: int) -> Any:
        free = self._free.setdefault(size, [])
        if not free:
            self._rooms.append(self._memory.room(size))
            free.append(self._rooms[-1].address)
        piece = Room(free.pop())
        weakref.finalize(piece, free.append, piece.address)
        return MemoryPointer(UnownedMemory(piece.address, size, piece, 0), 0)


class _Allocated(np.ndarray[Any, Any]):
    """Bytes that hold the allocation they are in."""

    allocation: Any


class Memory:
    """The memory of a card; `cuda` is what `cupy.cuda` has for it."""

    def __init__(self, size: int = 1 << 26) -> None:
        self._bytes = np.zeros(size, np.uint8)
        self._used = -self._bytes.ctypes.data % 256
        #: sizes of what nobody holds any more, by address
        self.freed: dict[int, int] = {}
        self._allocator = self._usual
        self.cuda = SimpleNamespace(
            MemoryPool=lambda: Pool(self),
            MemoryPointer=MemoryPointer,
            UnownedMemory=UnownedMemory,
            using_allocator=self._using,
            alloc=lambda size: self._allocator(size),
        )

    def room(self, size: int) -> Room:
        first, self._used = self._used, self._used + -(-max(1, size) // 256) * 256
        assert self._used <= len(self._bytes), "the memory of this card is too small for the test"
        found = Room(self._bytes.ctypes.data + first)
        weakref.finalize(found, self.freed.__setitem__, found.address, size)
        return found

    def put(self, x: Any) -> Array:
        """An array with these elements, in memory that is allocated as an array of CuPy is now."""
        x = np.asarray(x)
        memory = self._allocator(x.nbytes)
        room = self._at(memory.ptr, x.nbytes).view(_Allocated)
        room.allocation = memory.mem
        out = room.view(x.dtype).reshape(x.shape).view(Array)
        out[...] = x
        return out

    def _usual(self, size: int) -> Any:
        room = self.room(size)
        return MemoryPointer(UnownedMemory(room.address, size, room, 0), 0)

    @contextmanager
    def _using(self, allocator: Any) -> Iterator[None]:
        before, self._allocator = self._allocator, allocator
        try:
            yield
        finally:
            self._allocator = before

    def _at(self, address: int, size: int) -> Any:
        first = address - self._bytes.ctypes.data
        return self._bytes[first : first + size]


class Stream:
    """One that can be captured."""

    def __init__(self, ptr: int) -> None:
        self.ptr, self.capturing = ptr, False

    def is_capturing(self) -> bool:
        return self.capturing

    def record(self) -> Any:
        return SimpleNamespace(done=True)


class Card:
    """CuPy's current stream and device, and its memory."""

    ndarray = Array

    def __init__(self) -> None:
        self.stream, self.device, self.memory = Stream(7), 0, Memory()
        self.cuda = self.memory.cuda
        self.cuda.get_current_stream = lambda: self.stream
        self.cuda.runtime = SimpleNamespace(getDevice=lambda: self.device)
        self.driver: Any = None

    def empty(self, count: int, dtype: Any) -> Any:
        return self.memory.put(np.empty(count, dtype))

    def zeros(self, count: int, dtype: Any) -> Any:
        return self.memory.put(np.zeros(count, dtype))

    def capture(self, graph: int, stream: int = 9) -> Any:
        """Make a stream current that records a graph; that graph's capture."""
        self.stream = Stream(stream)
        self.stream.capturing = True
        self.driver.recording[stream] = graph
        return graphs.current()

    def end(self, stream: int = 7) -> None:
        """Make a stream current that records nothing."""
        self.stream = Stream(stream)


@pytest.fixture
def card() -> Iterator[Card]:
    found = Card()
    with driven(found) as found.driver:
        yield found


def is_held(x: Any) -> Any:
    """A function that tells whether somebody still holds an object."""
    found = weakref.ref(x)
    return lambda: gc.collect() >= 0 and found() is not None


# ------------------------------------------------------------------------------------------------- streams
def test_launches_of_a_stream_share_counters_and_others_have_their_own(card: Card) -> None:
    first = workspace.counters(10)
    assert workspace.counters(20) is first and first.dtype == np.int32 and not first.any()
    larger = workspace.counters(5000)
    assert len(larger) == 5000 and workspace.counters(10) is larger
    card.stream = Stream(8)
    assert not np.shares_memory(workspace.counters(10), larger)


def test_a_stream_at_the_address_of_an_earlier_one_has_counters_of_its_own(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {7: 1}
    monkeypatch.setattr(workspace.driver, "stream_number", lambda address: numbers[address])
    first = workspace.counters(10)
    numbers[7] = 2
    second = workspace.counters(10)
    assert not np.shares_memory(first, second)
    numbers[7] = 1
    assert workspace.counters(10) is first


def test_counters_of_the_oldest_streams_are_dropped(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_MOST_STREAMS", 2)
    first = is_held(workspace.counters(1))
    for stream in (8, 9):
        assert first()
        card.stream = Stream(stream)
        last = workspace.counters(1)
    assert not first() and len(workspace._zeroed) == 2 and workspace.counters(1) is last


def test_scratch_is_new_for_every_launch_and_its_counters_are_those_of_the_stream(card: Card) -> None:
    memory, place, counters = workspace.scratch(40, 20)
    assert place == memory.ptr and counters == workspace.counters(20).data.ptr
    assert workspace.scratch(40, 20)[1:] != (place, counters) and workspace.scratch(40, 20)[2] == counters
    assert workspace.scratch(0, 0) == (None, 0, 0)
    assert workspace.scratch(0, 5000)[2] == workspace.counters(10).data.ptr != counters
    assert not graphs._captures


# ------------------------------------------------------------------------------------------------- captures
def test_launches_of_a_captured_stream_share_counters_of_the_reserve(card: Card) -> None:
    outside = workspace.counters(10)  # makes the reserve, too
    card.capture(1)
    first = workspace.counters(10)
    assert np.shares_memory(first, graphs._reserves[0]._zeros) and not first.any()
    assert workspace.counters(4) is first and workspace.scratch(0, 10)[2] == first.data.ptr
    larger = workspace.counters(100)
    assert len(larger) >= 100 and not np.shares_memory(larger, first)
    card.capture(1, stream=10)  # another stream of the same graph: what it records may run at the same time
    other = workspace.counters(10)
    card.capture(2, stream=11)
    assert not any(np.shares_memory(workspace.counters(10), x) for x in (first, larger, other, outside))
    card.end()
    assert workspace.counters(10) is outside


def test_counters_that_no_reserve_has_are_memory_of_the_graph(card: Card) -> None:
    for device, count in ((0, graphs._RESERVE + 1), (1, 5)):
        card.device = 0
        workspace.counters(1)
        card.device = device
        capture = card.capture(1 + device)
        found = workspace.counters(count)
        assert len(found) == count and found.data.mem.ptr in capture._own and workspace.counters(count) is found
        card.end()


def test_temporary_memory_of_a_graph_serves_its_later_launches_alone(card: Card) -> None:
    card.capture(1)
    memory, place, _ = workspace.scratch(400, 0)
    assert workspace.scratch(400, 0)[1] != place
    del memory
    assert workspace.scratch(400, 0)[1] == place
    card.end()
    assert workspace.scratch(400, 0)[1] != place and not card.memory.freed.get(place)
    card.capture(2)
    assert workspace.scratch(400, 0)[1] != place


def test_arrays_within_a_capture_are_memory_of_the_graph(card: Card) -> None:
    with graphs.memory():
        outside = card.empty(8, np.int32)
    used, capture = card.empty(8, np.int32), card.capture(1)
    with graphs.memory(used):
        inside = card.empty(8, np.int32)
    after = card.empty(8, np.int32)
    assert inside.data.mem.ptr in capture._own and [x is used for x in capture._kept.values()] == [True]
    assert not any(x.data.mem.ptr in capture._own for x in (outside, used, after))


def test_a_launch_keeps_what_it_uses_and_its_arguments(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    kernel: Any = SimpleNamespace(threads=32, shared_bytes=64)

    def function(grid: Any, threads: Any, args: Any, shared_mem: int) -> None:
        started.append((grid, threads, args, shared_mem))

    monkeypatch.setattr(launch, "loaded", lambda given: function)

    def launched() -> list[Any]:
        arrays = [card.empty(8, np.int32) for _ in range(3)]
        launch.run(kernel, (1,), (arrays[0],), uses=(arrays[1], SimpleNamespace(part=arrays[2]), None))
        assert started.pop() == ((1,), (32,), (arrays[0],), 64)
        return [is_held(x) for x in arrays]

    assert [held() for held in launched()] == [False] * 3
    card.capture(1)
    kept = launched()
    card.end()
    assert [held() for held in kept] == [True] * 3
    card.driver.gone.add(1)
    assert graphs.sweep() == 0 and [held() for held in kept] == [False] * 3


def test_arrays_of_the_own_pool_of_a_capture_are_not_kept(card: Card) -> None:
    """A later launch of the graph may have their memory, which stays the graph's."""
    capture = card.capture(1)
    with graphs.memory():
        x = card.empty(8, np.int32)
    graphs.keep(x, x[2:])
    held, place = is_held(x), x.data.ptr
    del x
    assert not capture._kept and not held() and place not in card.memory.freed
    assert workspace.scratch(32, 0)[1] == place


@pytest.mark.parametrize("by", ["the next capture", "sweep"])
def test_all_is_let_go_when_the_graph_is_gone(card: Card, by: str) -> None:
    workspace.counters(1)
    card.capture(1)
    x = card.empty(8, np.int32)
    graphs.keep(x)
    held, borrowed = is_held(x), workspace.counters(10)
    with graphs.memory():
        room = is_held(card.empty(8, np.int32))
    place = workspace.scratch(400, 0)[1]
    del x
    card.end()
    assert graphs.sweep() == 1 and held() and not room() and place not in card.memory.freed
    card.driver.gone.add(1)
    if by == "sweep":
        assert graphs.sweep() == 0
    card.capture(2)
    assert not held() and place in card.memory.freed and set(graphs._captures) == {2}
    assert workspace.counters(10) is borrowed, "the counters came back to the reserve"


def test_a_result_outlives_its_graph(card: Card) -> None:
    """CuPy frees the memory of a pool that nobody holds, even if it is in use."""
    card.capture(1)
    with graphs.memory():
        result, other = card.empty(8, np.int32), card.empty(16, np.int32)
    card.end()
    card.driver.gone.add(1)
    place = other.data.ptr
    del other
    assert graphs.sweep() == 0 and not card.memory.freed
    result[...] = 5
    del result
    gc.collect()
    assert place in card.memory.freed


def test_a_broken_capture_keeps_nothing(card: Card) -> None:
    workspace.counters(1)
    card.driver.broken.add(1)
    card.capture(1)
    x = card.empty(8, np.int32)
    held = is_held(x)
    graphs.keep(x)
    assert workspace.counters(10) is not None
    with graphs.memory(x):
        room = card.empty(8, np.int32)
    del x
    assert not held() and not graphs._captures
    room[...] = 3  # is still there


def test_what_is_made_in_a_capture_is_the_graphs_alone(card: Card) -> None:
    cache: dict[Any, StreamOrdered] = {}
    made: list[int] = []

    def make() -> Any:
        found = card.empty(8, np.int32)
        made.append(found.data.mem.ptr)
        return found

    capture = card.capture(3)
    for _ in range(2):
        found = workspace.kept_in(cache, "lists", make)
        assert found.in_graph and found.get().data.ptr == made[-1]
    assert not cache and len(made) == 2 and set(made) <= capture._own
    card.end()
    found = workspace.kept_in(cache, "lists", make)
    assert not found.in_graph and len(made) == 3 and cache == {"lists": found}
    card.capture(4)
    assert workspace.kept_in(cache, "lists", make) is found and len(made) == 3


# ------------------------------------------------------------------------------- answers
def test_each_thread_and_device_has_memory_for_answers() -> None:
    """Two threads wait for kernels of their own at the same time."""
    with fake_cupy.installed(fake_cupy.Card()):
        mine = workspace.answer()
        with ThreadPoolExecutor(1) as pool:
            assert workspace.answer() == mine != pool.submit(workspace.answer).result()
        (ctypes.c_int64 * 2).from_address(mine)[:] = [7, -1]
        assert workspace.read_answer(2) == [7, -1]
    with fake_cupy.installed(fake_cupy.Card()):
        assert workspace.answer() != mine
