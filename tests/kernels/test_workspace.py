"""What launches share and what graphs keep, on a stand-in for CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._kernels import workspace

from ..emulator.emulator import put


class Stream:
    """One that can be in a capture, which has a number."""

    def __init__(self, ptr: int) -> None:
        self.ptr, self.capture = ptr, 0

    def is_capturing(self) -> bool:
        return self.capture > 0


class Card:
    """A current stream, and the allocator that was asked for each array."""

    def __init__(self) -> None:
        self.stream, self.pool = Stream(7), "usual"
        self.arrays: list[tuple[str, Any]] = []
        self.cuda = SimpleNamespace(
            get_current_stream=lambda: self.stream,
            runtime=SimpleNamespace(getDevice=lambda: 0),
            MemoryPool=lambda: SimpleNamespace(malloc="own"),
            using_allocator=self.using,
            alloc=lambda size: self.empty(size, np.uint8).data,
        )

    @contextmanager
    def using(self, pool: str) -> Iterator[None]:
        self.pool = pool
        yield
        self.pool = "usual"

    def empty(self, count: int, dtype: Any) -> Any:
        self.arrays.append((self.pool, put(np.empty(count, dtype))))
        return self.arrays[-1][1]

    def zeros(self, count: int, dtype: Any) -> Any:
        self.arrays.append((self.pool, put(np.zeros(count, dtype))))
        return self.arrays[-1][1]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    found = Card()
    monkeypatch.setattr(workspace, "cupy", found)
    for name, value in (("_zeroed", {}), ("_reserves", {}), ("_captures", {}), ("_held", [])):
        monkeypatch.setattr(workspace, name, value)
    monkeypatch.setattr(workspace, "_capture_number", lambda pointer: found.stream.capture)
    return found


def test_launches_of_a_stream_share_counters_and_others_have_their_own(card) -> None:
    first = workspace.counters(10)
    assert workspace.counters(20) is first and not first.any()
    larger = workspace.counters(5000)
    assert len(larger) >= 5000 and workspace.counters(10) is larger
    card.stream = Stream(8)
    assert not np.shares_memory(workspace.counters(10), larger)


def test_room_is_new_for_every_launch_outside_of_a_capture(card) -> None:
    assert workspace.temporary(10, np.float64) is not workspace.temporary(10, np.float64)
    assert not workspace._held and {pool for pool, _ in card.arrays} == {"usual"}


def test_pieces_get_room_and_counters_as_if_these_were_asked_for_one_by_one(card) -> None:
    room, place, counters = workspace.for_pieces(10, 20)
    assert place == room.ptr and card.arrays[0][1].ctypes.data == place and card.arrays[0][1].nbytes == 40
    assert counters == workspace.counters(20).data.ptr and workspace.for_pieces(10, 20)[1] != place
    more = workspace.for_pieces(10, 5000)[2]
    assert len(workspace.counters(10)) >= 5000 and workspace.counters(10).data.ptr == more != counters
    card.stream = Stream(8)
    assert workspace.for_pieces(10, 20)[2] != more
    card.stream.capture = 1
    room, place, counters = workspace.for_pieces(10, 20)
    assert room.nbytes >= 40 and room is workspace.temporary(10, np.float32) and place == room.data.ptr
    assert counters == workspace.counters(20).data.ptr and [kept for _, kept in workspace._held] == [room]


def test_a_capture_has_memory_of_its_own_and_keeps_it(card) -> None:
    outside = workspace.counters(10)  # makes the reserve, too
    card.stream.capture = 1
    counters, room = workspace.counters(10), workspace.temporary(10, np.float64)
    assert not np.shares_memory(counters, outside) and not counters.any()
    assert room.nbytes >= 80 and card.arrays[-1][0] == "own"
    assert workspace.temporary(5, np.float64) is room and workspace.counters(4) is counters
    larger = workspace.temporary(100, np.float64)
    assert larger.nbytes >= 800 and not np.shares_memory(larger, room)
    assert all(kept is wanted for (_, kept), wanted in zip(workspace._held, (room, larger), strict=True))
    card.stream.capture = 2
    assert not np.shares_memory(workspace.temporary(10, np.float64), larger)
    assert not np.shares_memory(workspace.counters(10), counters)
    card.stream.capture = 0
    assert workspace.counters(10) is outside


def test_counters_that_the_reserve_does_not_have_are_made(card) -> None:
    workspace.counters(1)
    card.stream.capture = 1
    many = workspace.counters(workspace._RESERVE + 1)
    assert len(many) == workspace._RESERVE + 1 and card.arrays[-1][0] == "own" and card.arrays[-1][1] is many


def test_streams_within_one_capture_share_nothing(card) -> None:
    card.stream.capture = 1
    room, counters = workspace.temporary(10, np.float64), workspace.counters(10)
    card.stream = Stream(8)
    card.stream.capture = 1
    assert not np.shares_memory(workspace.temporary(10, np.float64), room)
    assert not np.shares_memory(workspace.counters(10), counters)


@pytest.mark.parametrize("ask", [None, lambda *_: 1], ids=["no driver", "an error"])
def test_without_the_word_of_a_driver_every_launch_counts_as_a_capture(ask, monkeypatch) -> None:
    monkeypatch.setattr(workspace, "_capture_info", lambda: ask)
    assert workspace._capture_number(7) != workspace._capture_number(7)


def test_what_is_made_in_a_capture_is_kept_for_the_graph_alone(card: Card) -> None:
    card.stream.record = lambda: SimpleNamespace(done=True)  # type: ignore[attr-defined]
    cache: dict[Any, workspace.StreamOrdered] = {}
    made = []

    def make() -> Any:
        made.append(card.empty(8, np.int32))
        return made[-1]

    card.stream.capture = 3
    for _ in range(2):
        found = workspace.kept_in(cache, "lists", make)
        assert found.in_graph and found.get() is made[-1]
    assert not cache and len(made) == 2 and [pool for pool, _ in card.arrays] == ["own", "own"]
    assert all(any(x is array for x in held_values()) for array in made)
    card.stream.capture = 0
    found = workspace.kept_in(cache, "lists", make)
    assert not found.in_graph and len(made) == 3 and cache == {"lists": found}
    card.stream.capture = 4
    assert workspace.kept_in(cache, "lists", make) is found and len(made) == 3


def held_values() -> list[Any]:
    """What is kept for graphs, with the pools that it came from or without."""
    return [x[1] if isinstance(x, tuple) else x for x in workspace._held]
