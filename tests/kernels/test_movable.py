"""Launches that are moved from address to address: each caller has its own, and what is started is the same."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._kernels import movable, tensor_map
from bsrgemm._kernels.movable import Launches, MovableArgument
from bsrgemm._kernels.structs import Struct, TensorMap, fields

ARGUMENT = Struct("Argument", (*fields(TensorMap(), "a b"), *fields("P", "x y"), *fields("i", "n")))
LAYOUT = tensor_map.Layout("uint8", (64,), (), (64,), "none")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A driver whose maps are the address again and again, and the addresses that it got."""
    seen: list[int] = []

    def driver(target: int, dtype: int, rank: int, pointer: int, *rest: Any) -> int:
        assert target % 64 == 0
        seen.append(pointer)
        ctypes.memmove(target, np.full(16, pointer, np.uint64).tobytes(), 128)
        return 0

    monkeypatch.setattr(tensor_map, "_driver_function", lambda: driver)
    return seen


def packed(x: int, y: int) -> bytearray:
    maps = {name: np.full(16, value, np.uint64).tobytes() for name, value in (("a", x), ("b", y))}
    return ARGUMENT.pack(**maps, x=x, y=y, n=7)


def test_an_argument_has_the_pointers_and_maps_of_its_addresses(written: list[int]) -> None:
    maps = [(0, 0, LAYOUT), (1, 128, LAYOUT)]
    found = MovableArgument(
        bytes(ARGUMENT.pack(a=bytes(128), b=bytes(128), x=1, y=2, n=7)), 2, ARGUMENT.patch("x", "y"), maps
    )
    kept = found.argument
    for places in ((16, 32), (48, 32), (48, 64), (48, 64)):
        found.move(places)
        assert found.argument is kept and kept.tobytes() == bytes(found.packed) == packed(*places)
    assert written == [16, 32, 48, 64]  # a map whose address stays is not encoded again


def test_an_argument_without_maps_or_without_pointers_can_move(written: list[int]) -> None:
    plain = MovableArgument(packed(16, 32), 2, ARGUMENT.patch("x", "y"), ())
    plain.move((48, 64))
    assert ARGUMENT.offsets["x"] == 256 and bytes(plain.packed[256:272]) == np.array([48, 64], np.uint64).tobytes()
    assert bytes(plain.packed[:256]) == bytes(packed(16, 32)[:256]) and not written
    mapped = MovableArgument(packed(16, 32), 2, None, [(1, 0, LAYOUT)])
    mapped.move((48, 64))
    assert bytes(mapped.packed[:8]) == np.uint64(64).tobytes() and bytes(mapped.packed[256:]) == packed(16, 32)[256:]


class Launch:
    """A launch that is kept, or one that moves."""

    def __init__(self, at: Any = None) -> None:
        self.at, self.made = at, list[Launch]()

    def movable(self) -> Launch | None:
        self.made.append(Launch())
        return self.made[-1]

    def move(self, places: Any) -> None:
        if places == "wrong":
            raise ValueError("places")
        self.at = places

    def kept(self) -> Launch:
        return Launch(self.at)


def use(launches: Launches[Any], places: Any) -> Any:
    found = launches.take(places)
    assert found.at == places
    launches.give_back(places, found)
    return found


def test_one_launch_serves_all_new_addresses_and_one_that_come_twice_get_their_own() -> None:
    launches, model = Launches[Any](), Launch()
    assert launches.take(1) is None
    launches.keep(0, model, True)
    assert [use(launches, places) for places in (1, 2, 3)] == model.made * 3 and set(launches.kept) == {0}
    use(launches, 2)
    assert set(launches.kept) == {0, 2} and launches.kept[2].at == 2 and launches.kept[2] is not model.made[0]
    assert len(model.made) == 1


def test_a_launch_that_is_not_aligned_serves_no_other_addresses() -> None:
    launches = Launches[Any]()
    launches.keep(0, Launch(), False)
    assert launches.take(16) is None


def test_a_launch_that_is_in_use_or_has_failed_serves_nobody_else() -> None:
    launches, model = Launches[Any](), Launch()
    launches.keep(0, model, True)
    first, second = launches.take(1), launches.take(2)
    assert first is not second and (first.at, second.at) == (1, 2)
    launches.give_back(1, first)
    with pytest.raises(ValueError):
        launches.take("wrong")
    assert launches.take(3) is not first
    model.movable = lambda: None  # type: ignore[method-assign]
    assert launches.take(4) is None  # the plan of the model was dropped


def test_few_addresses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movable, "MOST_PLACES", 4)
    launches = Launches[Any]()
    launches.keep(-1, Launch(), True)
    for places in range(20):
        use(launches, places // 2)
        assert len(launches.kept) <= 4 and len(launches._came_once) <= 4 and len(launches._spare) == 1


def test_threads_never_have_the_same_launch() -> None:
    launches = Launches[Any]()
    launches.keep(-1, Launch(), True)
    wrong: list[Any] = []

    def work(thread: int) -> None:
        for number in range(2000):
            places = (thread, number)
            found = launches.take(places)
            for _ in range(3):
                if found.at != places:
                    wrong.append(places)
            launches.give_back(places, found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(launches._spare) <= 4
