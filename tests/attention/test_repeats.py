"""Calls of attention that are made again on copies of masks and caches."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

COPIES = pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])


@COPIES
def test_a_copy_of_a_mask_has_lists_and_calls_of_its_own(copied: Callable[[Any], Any]) -> None:
    mask = bg.BlockMask.causal(64, block=32, device="cpu")
    mask.__dict__["_tiles"], mask.__dict__["_calls"] = {(64, 64): object()}, object()
    other = copied(mask)
    assert not {"_tiles", "_calls"} & set(vars(other)) and {"_tiles", "_calls"} <= set(vars(mask))
    assert other._backend is mask._backend and np.array_equal(other.bits, mask.bits)


@COPIES
def test_copies_of_masks_and_caches_work_as_they_do(copied: Callable[[Any], Any]) -> None:
    q = np.random.default_rng(0).standard_normal((1, 2, 64, 16)).astype(np.float16)
    mask = bg.BlockMask.causal(64, block=32, device="cpu")
    assert np.array_equal(bg.attention(q, q, q, mask=copied(mask)), bg.attention(q, q, q, mask=mask))
    cache = bg.KVCache(1, 2, 64, 16, dtype="float16", device="cpu")
    cache.append(q, q)
    token = q[:, :, :1]
    assert np.array_equal(bg.attention_decode(token, copied(cache)), bg.attention_decode(token, cache))
