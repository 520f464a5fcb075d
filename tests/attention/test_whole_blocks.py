"""Masks of whole blocks: their kinds are one number in memory, and no kernel reads more than that."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import mask_tiles
from bsrgemm._attention.mask_base import whole_kinds

M = bg.BlockMask
HERE = {"block": 16, "device": "cpu"}
PARTLY = M.causal(96, **HERE)
WHOLE: dict[str, Callable[[], bg.BlockMask]] = {
    "random": lambda: M.random(96, per_row=3, heads=(1, 2), **HERE),
    "block indices": lambda: M.from_block_indices([0, 2, 3], [4, 0, 1], shape=(32, 96), block=16),
    "a BSR matrix": lambda: M.from_bsr(bg.from_dense(np.eye(96), blocksize=(16, 16))),
    "joined": lambda: M.random(96, per_row=2, **HERE) | M.random(96, per_row=2, seed=1, **HERE),
    "inverted": lambda: ~M.random(96, per_row=2, **HERE),
    "a slice of a mask with element masks": lambda: PARTLY[64:, :64],
    "dense": lambda: M.from_dense(np.ones((40, 56), bool), block=16),
}


@pytest.mark.parametrize("name", WHOLE)
def test_kinds_of_whole_blocks_take_the_memory_of_one(name: str) -> None:
    mask = WHOLE[name]()
    count = len(mask.indices)
    assert count > 1 and not len(mask.bits)
    assert mask.kinds.shape == (count,) and mask.kinds.dtype == np.int32 and (mask.kinds == -1).all()
    assert mask.kinds.strides == (0,)
    assert mask.nbytes == mask.indptr.nbytes + mask.indices.nbytes + 4
    dense = mask.to_dense()
    again = M.from_dense(dense, block=mask.block)
    assert mask == again and (~~mask) == mask and mask & mask == mask
    assert mask.allowed == dense.sum()


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_any_number_of_blocks_can_be_whole(count: int) -> None:
    kinds = whole_kinds(np, count)
    assert kinds.shape == (count,) and kinds.dtype == np.int32 and (kinds == -1).all()


def test_long_random_masks_take_4_bytes_a_block_with_their_lists() -> None:
    mask = M.random(131072, per_row=51, device="cpu")
    lists = mask_tiles.tiles(mask._backend, mask, 128, 128)
    assert lists.parts is None
    own = [x for x in (lists.first, lists.columns, lists.kinds, lists.order) if x.strides != (0,)]
    held = {id(x): x.nbytes for x in (*own, mask.indptr, mask.indices)}
    rows = 131072 // 128
    assert sum(held.values()) <= 4 * len(mask.indices) + 8 * rows + 4


def test_no_kind_is_read_whatever_was_written_there() -> None:
    good = M.random(96, per_row=3, **HERE)
    spoiled = M(good._backend, good.shape, good.block, good.heads, good.indptr, good.indices, good.kinds + 8, good.bits)
    for mask in (good, spoiled):
        assert mask_tiles.tiles(mask._backend, mask, *mask.block).parts is None
        assert mask_tiles.by_keys(mask._backend, mask, *mask.block).parts is None
