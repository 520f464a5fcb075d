"""The memory of the fake card, beyond what every test asks of it."""

from __future__ import annotations

import ctypes

from ..fake_cupy.memory import POISON, Heap, MemoryPool, Pool


def test_a_pool_of_a_closed_card_hands_out_no_memory_that_is_gone() -> None:
    """Who still has a pool of an earlier card, as a graph that nobody has swept has, may ask it once more."""
    heap = Heap(0)
    own = MemoryPool(heap)
    for pool in (heap.pool, own.pool):
        assert isinstance(pool, Pool)
        freed = [heap.room(64, pool) for _ in range(3)]
        freed.clear()
    heap.close()
    for pool in (heap.pool, own.pool):
        room = heap.room(64, pool)
        assert ctypes.string_at(room, 64) == bytes([POISON]) * 64
