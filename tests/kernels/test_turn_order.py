"""All that is promised of turn_order: the order in which entries pass by their tile of keys, as in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._attention.backward_sm90 import TurnOrder
from bsrgemm._attention.mask_tiles import Tiles

from ..attention.turn_orders import turns_of
from ..devices import Device


@pytest.fixture(autouse=True)
def hopper(device: Device) -> None:
    device.needs("sm_90a")


class Lists:
    """The entries of random patterns by tiles of keys, on the host and, in `tiles`, on a device."""

    def __init__(self, device: Device, there: np.ndarray[Any, Any], rng: np.random.Generator, parts: bool = True):
        self.first = np.concatenate([[0], np.cumsum(there.sum(1))]).astype(np.int32)
        self.columns = np.nonzero(there)[1].astype(np.int32)
        self.parts = rng.integers(-1, 99, len(self.columns)).astype(np.int32) if parts else None
        self.tiles = self.on(device)

    def on(self, device: Device) -> Tiles:
        arrays = [None if x is None else device.asarray(x) for x in (self.first, self.columns, self.parts)]
        return Tiles(*arrays, *(device.asarray(np.zeros(1, np.int32)) for _ in range(2)), 1, 1)


def lists(device: Device, rng: np.random.Generator, tiles: int, rows: int, density: float, parts: bool = True) -> Lists:
    return Lists(device, rng.random((tiles, rows)) < density, rng, parts)


@pytest.mark.before
@pytest.mark.parametrize(
    ("patterns", "tiles", "rows", "density", "walkers"),
    [(3, 20, 40, 0.3, 6), (1, 9, 300, 0.7, 4), (2, 7, 5, 0.1, 66), (1, 3, 700, 1.0, 1), (1, 1, 1, 1.0, 132)],
)
@pytest.mark.parametrize("parts", [True, False])
def test_the_order_is_that_of_the_reference(
    patterns: int, tiles: int, rows: int, density: float, walkers: int, parts: bool, device: Device,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    found = lists(device, rng, patterns * tiles, rows, density, parts)
    got = TurnOrder().in_turn(found.tiles, tiles, rows, walkers)
    order = turns_of(found.first, found.columns, tiles, rows, walkers)
    np.testing.assert_array_equal(device.asnumpy(got.columns), found.columns[order])
    if found.parts is None:
        assert got.parts is None
    else:
        np.testing.assert_array_equal(device.asnumpy(got.parts), found.parts[order])


def test_more_walkers_than_there_is_room_for_are_as_many_as_there_is_room_for(
    device: Device, rng: np.random.Generator
) -> None:
    found = lists(device, rng, 600, 20, 0.3).tiles
    got, want = (TurnOrder().in_turn(found, 600, 20, n) for n in (5000, TurnOrder.most_walkers))
    np.testing.assert_array_equal(device.asnumpy(got.columns), device.asnumpy(want.columns))


@pytest.mark.before
@pytest.mark.sanitizer
@pytest.mark.parametrize("spoiled", ["first", "columns"])
@pytest.mark.parametrize("value", [-7, 10**9])
def test_lists_that_a_user_has_spoiled_stay_inside(
    spoiled: str, value: int, device: Device, rng: np.random.Generator
) -> None:
    """No foreign memory is touched."""
    found = lists(device, rng, 12, 30, 0.5)
    getattr(found.tiles, spoiled)[3:8] = value
    got = TurnOrder().in_turn(found.tiles, 6, 30, 4)
    assert len(got.columns) == len(found.columns)
    device.synchronize()


def test_a_tile_with_more_entries_than_there_is_room_for_keeps_the_others(
    device: Device, rng: np.random.Generator
) -> None:
    """Only a user can write so many: a pattern with more tiles of queries is not put in turn."""
    rows, count = 40, TurnOrder.most + 50
    found = lists(device, rng, 1, rows, 1)
    found.first, found.columns = np.array([0, count], np.int32), rng.integers(0, rows, count).astype(np.int32)
    found.parts = np.arange(count, dtype=np.int32)
    got = TurnOrder().in_turn(found.on(device), 1, rows, 1)
    np.testing.assert_array_equal(device.asnumpy(got.columns)[TurnOrder.most :], found.columns[TurnOrder.most :])
    assert sorted(device.asnumpy(got.parts).tolist()) == list(range(count))
