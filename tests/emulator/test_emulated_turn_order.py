"""turn_order on the CPU, against the order in plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsrgemm._attention import turn_order
from bsrgemm._attention.backward_config import TurnOrder
from bsrgemm._attention.mask_tiles import Tiles

from ..attention.turn_orders import turns_of
from . import emulator
from .emulator import put


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    with emulator.emulated(folder, emulator.guarded, arch="sm_90a"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(23)


def lists(rng: np.random.Generator, patterns: int, tiles: int, rows: int, density: float, parts: bool = True) -> Tiles:
    """The entries of random patterns by tiles of keys."""
    there = rng.random((patterns * tiles, rows)) < density
    first = np.concatenate([[0], np.cumsum(there.sum(1))]).astype(np.int32)
    columns = np.nonzero(there)[1].astype(np.int32)
    numbers = put(rng.integers(-1, 99, len(columns)).astype(np.int32)) if parts else None
    return Tiles(put(first), put(columns), numbers, np.zeros(1, np.int32), np.zeros(1, np.int32), 1, 1)


@pytest.mark.parametrize(
    ("patterns", "tiles", "rows", "density", "walkers"),
    [(3, 20, 40, 0.3, 6), (1, 9, 300, 0.7, 4), (2, 7, 5, 0.1, 66), (1, 3, 700, 1.0, 1), (1, 1, 1, 1.0, 132)],
)
@pytest.mark.parametrize("parts", [True, False])
def test_the_order_is_that_of_the_reference(patterns, tiles, rows, density, walkers, parts, rng) -> None:
    found = lists(rng, patterns, tiles, rows, density, parts)
    got = turn_order.in_turn(found, TurnOrder("f16"), tiles, rows, walkers)
    order = turns_of(np.asarray(found.first), np.asarray(found.columns), tiles, rows, walkers)
    assert (np.asarray(got.columns) == np.asarray(found.columns)[order]).all()
    assert (got.parts is None) if not parts else (np.asarray(got.parts) == np.asarray(found.parts)[order]).all()


def test_more_walkers_than_there_is_room_for_are_as_many_as_there_is_room_for(rng) -> None:
    found = lists(rng, 1, 600, 20, 0.3)
    got, want = (turn_order.in_turn(found, TurnOrder("bf16"), 600, 20, n) for n in (5000, TurnOrder.walkers))
    assert (np.asarray(got.columns) == np.asarray(want.columns)).all()


@pytest.mark.parametrize("spoiled", ["first", "columns"])
@pytest.mark.parametrize("value", [-7, 10**9])
def test_lists_that_a_user_has_spoiled_stay_inside(spoiled: str, value: int, rng: Any) -> None:
    """`emulator.guarded` ends the process at the first access outside of an array."""
    found = lists(rng, 2, 6, 30, 0.5)
    getattr(found, spoiled)[3:8] = value
    got = turn_order.in_turn(found, TurnOrder("f16"), 6, 30, 4)
    assert len(got.columns) == len(found.columns)


def test_a_tile_with_more_entries_than_there_is_room_for_keeps_the_others(rng) -> None:
    """Only a user can write so many: a pattern with more tiles of queries is not put in turn."""
    rows, count = 40, TurnOrder.most + 50
    columns = rng.integers(0, rows, count).astype(np.int32)
    found = lists(rng, 1, 1, rows, 1)._replace(first=put(np.array([0, count], np.int32)), columns=put(columns))
    got = turn_order.in_turn(found._replace(parts=put(np.arange(count, dtype=np.int32))), TurnOrder("f16"), 1, rows, 1)
    assert (np.asarray(got.columns)[TurnOrder.most :] == columns[TurnOrder.most :]).all()
    assert sorted(np.asarray(got.parts).tolist()) == list(range(count))
