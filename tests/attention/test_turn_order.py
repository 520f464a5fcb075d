"""In which order tiles of queries pass by a tile of keys: when the rule asks for it, and what the reference does."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._attention import mask_tiles
from bsrgemm._attention.backward_sm90 import BackwardSm90, TurnOrder
from bsrgemm._backend.registry import host
from bsrgemm._kernels.card import Card

from .turn_orders import turns_of

FAR = 1 << 30
CARD = Card("sm_90a", 132)


def call_of(mask: Any, left: int = FAR, right: int = FAR) -> Any:
    return SimpleNamespace(mask=mask, left=left, right=right, k=np.zeros((1, 1, 1024, 64), np.float16))


def test_sums_in_one_order_on_a_mask_without_a_band_are_put_in_turn() -> None:
    mask = bg.BlockMask.random(1024, per_row=2, block=128)
    in_order, any_order = (BackwardSm90("f16", 128, 128, ordered) for ordered in (True, False))
    assert in_order.walkers(call_of(mask), 2, CARD) == 66
    assert BackwardSm90("f16", 128, 64, True).walkers(call_of(mask), 2, CARD) == 132
    assert in_order.walkers(call_of(mask), 500, CARD) == 1
    assert not any_order.walkers(call_of(mask), 2, CARD)
    assert not in_order.walkers(call_of(None), 2, CARD)
    for band in ({"left": 1023}, {"right": 0}):
        assert not in_order.walkers(call_of(mask, **band), 2, CARD)
    assert in_order.walkers(call_of(mask, 1024, 1024), 2, CARD) == 66


def test_masks_of_many_blocks_and_of_many_tiles_keep_the_order_of_the_queries() -> None:
    assert TurnOrder.pays(bg.BlockMask.random(1024, per_row=6, block=128), 64)
    assert not TurnOrder.pays(bg.BlockMask.random(1024, per_row=7, block=128), 64)
    long = bg.BlockMask.random(TurnOrder.most * 64, 1024, per_row=1, block=128)
    assert TurnOrder.pays(long, 64) and not TurnOrder.pays(long, 32)


def test_the_reference_moves_entries_within_their_tile_and_lets_free_tiles_pass_first() -> None:
    mask = bg.BlockMask.random(1024, 512, per_row=2, heads=(1, 2), seed=3, block=128)
    found = mask_tiles.by_keys(host(), mask, 64, 128)
    first, columns = np.asarray(found.first), np.asarray(found.columns)
    order = turns_of(first, columns, 4, 16, 2)
    for low, high in pairwise(first):
        assert sorted(order[low:high]) == list(range(low, high))
    for pattern in range(2):  # nobody is before the tile of keys that is claimed first
        last = first[4 * pattern + 3], first[4 * pattern + 4]
        assert list(order[slice(*last)]) == list(range(*last))
    # Two tiles of keys, computed at the same time. The second one waits for tiles 0 and 1 of the queries.
    assert list(turns_of(np.array([0, 4, 6]), np.array([0, 1, 2, 3, 0, 1]), 2, 4, 2)) == [2, 3, 0, 1, 4, 5]
