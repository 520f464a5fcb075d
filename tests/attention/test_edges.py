"""What attention, decode and masks refuse, and parts of them that no other test passes by."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import BlockMask, KVCache
from bsrgemm._attention import decode as decode_module
from bsrgemm._attention import host_tiles

F16 = np.dtype(np.float16)


# ------------------------------------------------------------------------------------------------ jobs of the host
def test_a_range_of_jobs_is_those_jobs_and_no_others() -> None:
    """Each thread writes the heads that it was given."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, 1, 600, 8)) for _ in range(3))
    want = bg.attention(q, k, v)
    ranges: list[tuple[int, int]] = []
    out = np.full_like(want, 77)

    def share(work: Any, starts: Any, **how: Any) -> None:
        jobs = len(starts) - 1
        assert jobs > 2
        ranges.append((1, jobs - 1))
        work(1, jobs - 1)

    with patch.object(host_tiles.threads, "share", share):
        bg.attention(q, k, v, out=out)
    done = (out != 77).all(axis=3).reshape(-1)
    assert ranges and not done[0] and not done[-1] and done.any()
    np.testing.assert_allclose(out.reshape(-1, 8)[done], want.reshape(-1, 8)[done])
    assert (out.reshape(-1, 8)[~done] == 77).all()


# ------------------------------------------------------------------------------------------------ decode
def filled(**how: Any) -> KVCache:
    cache = KVCache(2, 2, 64, 8, dtype="float32", device="cpu", **how)
    assert cache._longest == cache._total == 0
    k = np.ones((2, 2, 20, 8), np.float32)
    cache.append(k, k)
    assert cache._longest == 20 and cache._total == 40
    return cache


Q = np.ones((2, 4, 1, 8), np.float32)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"block": 16}, ValueError, "blocks: wanted together with block, got None"),
        ({"block": 16.0}, TypeError, "block: wanted an integer, got 16.0"),
        ({"block": True}, TypeError, "block: wanted an integer, got True"),
        ({"block": 8}, ValueError, "block: wanted a multiple of 16, got 8"),
        ({"block": 24}, ValueError, "block: wanted a multiple of 16, got 24"),
        ({"block": None}, ValueError, "block: wanted the keys of a block, since the cache is not paged"),
        ({"blocks": np.zeros((1, 1, 2)), "block": 16}, TypeError, "blocks: wanted integers, got float64"),
        ({"blocks": np.zeros((1, 2), np.int32), "block": 16}, ValueError, "blocks: wanted shape"),
        ({"blocks": np.zeros((3, 1, 2), np.int32), "block": 16}, ValueError, "blocks: wanted shape"),
        ({"blocks": np.zeros((1, 3, 2), np.int32), "block": 16}, ValueError, "blocks: wanted shape"),
        ({"out": np.zeros((2, 4, 1, 7), np.float32)}, ValueError, "out: wanted float32 of shape"),
        ({"out": np.zeros((2, 4, 1, 8))}, ValueError, "out: wanted float32 of shape"),
        ({"out": [1.0]}, TypeError, "out: wanted a dense array on 'cpu', where the cache is, got a list"),
        ({"out": np.broadcast_to(np.float32(0), (2, 4, 1, 8))}, ValueError, "out: array is read-only"),
        ({"layout": "bdhs"}, ValueError, "layout: wanted 'bhsd' or 'bshd'"),
        ({"layout": 3}, ValueError, "layout: wanted 'bhsd' or 'bshd'"),
    ],
    ids=str,
)
def test_decode_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    options = dict(change)
    if "block" in options and "blocks" not in options and "together" not in message:
        options["blocks"] = np.zeros((1, 1, 2), np.int32)
    with pytest.raises(error, match=message):
        bg.attention_decode(Q, filled(), **options)


def test_decode_refuses_a_result_whose_elements_share_memory() -> None:
    out = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (2, 4, 1, 8), (128, 0, 32, 4))
    with pytest.raises(ValueError, match=r"out: elements share memory \(a stride is 0\)"):
        bg.attention_decode(Q, filled(), out=out)
    one = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (2, 4, 1, 8), (128, 32, 0, 4))
    assert bg.attention_decode(Q, filled(), out=one) is one  # a stride along one element is never used


def test_decode_refuses_more_keys_than_it_counts() -> None:
    blocks = np.zeros((1, 1, 3), np.int32)
    with patch.object(decode_module, "_MOST_STEPS", 6):
        with pytest.raises(ValueError, match=r"fewer than 2\*\*34 keys in all, got 3 blocks of 32"):
            bg.attention_decode(Q, filled(), blocks=blocks, block=32)
        bg.attention_decode(Q, filled(), blocks=blocks, block=16)


def test_decode_refuses_a_page_of_another_size() -> None:
    with pytest.raises(ValueError, match="block: wanted 32, a page of the cache, got 16"):
        bg.attention_decode(Q, filled(page=32), blocks=np.zeros((1, 1, 1), np.int32), block=16)


def test_the_engine_of_a_card_starts_its_launches() -> None:
    pytest.importorskip("cupy")
    from bsrgemm._attention import cuda

    started: list[Any] = []
    with (
        patch.object(type(cuda.ENGINE.backend), "recording", lambda self, call: nullcontext()),
        patch.object(cuda.choose, "forward", lambda *args: started.append(args)),
        patch.object(cuda.decode_kernel, "decode", lambda *args: started.append(args)),
    ):
        cuda.ENGINE.forward("attention")  # type: ignore[arg-type]
        cuda.ENGINE.decode("decode")  # type: ignore[arg-type]
    assert started == [(cuda.ENGINE.backend, "attention"), ("decode",)]


# ------------------------------------------------------------------------------------------------ masks
def test_the_first_tokens_are_seen_by_all_and_see_all() -> None:
    found = BlockMask.global_tokens(5, tokens=2, block=16, device="cpu").to_dense()
    want = np.zeros((5, 5), bool)
    want[:2] = want[:, :2] = True
    np.testing.assert_array_equal(found.reshape(5, 5), want)
    everything = BlockMask.global_tokens(5, tokens=9, block=16, device="cpu").to_dense()
    assert everything.all()
    for wrong in (-1, True, [5], [-1], [0.5]):
        with pytest.raises(ValueError, match="tokens: wanted"):
            BlockMask.global_tokens(5, tokens=wrong, block=16, device="cpu")


@pytest.mark.parametrize("heads", [(1,), (1, 2, 3), (0, 1), (1, 0)], ids=str)
def test_patterns_are_counted_in_batches_and_heads(heads: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="heads: wanted"):
        BlockMask.random(32, block=16, per_row=1, heads=heads, device="cpu", seed=0)


def test_block_indices_are_integers_in_one_dimension() -> None:
    indptr = np.array([0, 1, 2])
    make = BlockMask.from_block_indices
    good = make(indptr, np.array([0, 1]), shape=(32, 32), block=16)
    np.testing.assert_array_equal(good.to_dense().reshape(32, 32), np.kron(np.eye(2), np.ones((16, 16))).astype(bool))
    for wrong in (np.array([[0, 1]]), np.array([0.5, 1.0])):
        with pytest.raises(ValueError, match="indices: wanted integers in one dimension"):
            make(indptr, wrong, shape=(32, 32), block=16)
    for wrong in (np.array([0, 1]), np.array([0.0, 1.0, 2.0]), indptr[None]):
        with pytest.raises(ValueError, match="indptr: wanted 3 integers"):
            make(wrong, np.array([0, 1]), shape=(32, 32), block=16)
    for wrong in (np.array([1, 1, 2]), np.array([0, 1, 1]), np.array([0, 3, 2])):
        with pytest.raises(ValueError, match="indptr: wanted numbers that climb from 0 to 2"):
            make(wrong, np.array([0, 1]), shape=(32, 32), block=16)
    for wrong in (np.array([0, 2]), np.array([-1, 1])):
        with pytest.raises(ValueError, match="indices: wanted block columns from 0 to 1"):
            make(indptr, wrong, shape=(32, 32), block=16)


@pytest.mark.parametrize("axis", ["heads", "batch"])
def test_stacked_masks_keep_the_patterns_of_batches(axis: str) -> None:
    masks = [BlockMask.random(40, block=16, per_row=1, heads=(3, 2), device="cpu", seed=s) for s in (1, 2)]
    found = BlockMask.stack(masks, axis=axis).to_dense()
    want = np.concatenate([x.to_dense() for x in masks], axis=1 if axis == "heads" else 0)
    np.testing.assert_array_equal(found, want)
    with pytest.raises(
        ValueError, match=r"masks: wanted masks with \(3, 2\) patterns, as the first has, got one with \(2, 2\)"
    ):
        BlockMask.stack([masks[0], BlockMask.random(40, block=16, per_row=1, heads=(2, 2), device="cpu", seed=1)])
    with pytest.raises(ValueError, match="axis: wanted 'heads' or 'batch', got 'rows'"):
        BlockMask.stack(masks, axis="rows")
    with pytest.raises(ValueError, match="masks: wanted at least one"):
        BlockMask.stack([])


def test_a_whole_block_has_all_elements() -> None:
    mask = BlockMask.full(32, block=16, device="cpu")
    elements = mask.elements(int(mask.kinds[0]))
    assert elements.shape == (16, 16) and elements.dtype == bool and elements.all()


def test_masks_on_two_devices_are_not_joined() -> None:
    one, other = (BlockMask.full(32, block=16, device="cpu") for _ in range(2))
    object.__setattr__(other, "_backend", SimpleNamespace(name="elsewhere"))
    with pytest.raises(TypeError, match="masks"):
        BlockMask.stack([one, other])


#: Each way to make a mask, without telling the size of a block.
MADE: dict[str, Any] = {
    "full": lambda: BlockMask.full(300, device="cpu"),
    "causal": lambda: BlockMask.causal(300, device="cpu"),
    "window": lambda: BlockMask.window(300, left=5, device="cpu"),
    "sinks": lambda: BlockMask.sinks(300, count=5, device="cpu"),
    "prefix": lambda: BlockMask.prefix(300, length=5, device="cpu"),
    "global tokens": lambda: BlockMask.global_tokens(300, tokens=[5], device="cpu"),
    "documents": lambda: BlockMask.documents(np.array([0, 100, 300]), device="cpu"),
    "dilated": lambda: BlockMask.dilated(300, count=3, dilation=7, device="cpu"),
    "random": lambda: BlockMask.random(300, per_row=1, device="cpu"),
    "from dense": lambda: BlockMask.from_dense(np.ones((300, 300), bool)),
    "from block indices": lambda: BlockMask.from_block_indices(
        np.array([0, 1, 1, 2]), np.array([2, 0]), shape=(300, 300)
    ),
}


@pytest.mark.parametrize("how", MADE)
def test_blocks_are_128_x_128_unless_told_otherwise(how: str) -> None:
    mask = MADE[how]()
    assert mask.block == (128, 128) and mask.heads == (1, 1) and mask.shape == (300, 300)


def test_a_random_mask_has_seed_0_and_a_window_is_open_unless_told_otherwise() -> None:
    one, other = (BlockMask.random(300, per_row=1, block=16, device="cpu", **x) for x in ({}, {"seed": 0}))
    np.testing.assert_array_equal(one.to_dense(), other.to_dense())
    assert BlockMask.window(50, block=16, device="cpu").to_dense().all()
    i, j = np.indices((50, 50))
    for sides, want in (
        ({"left": 3}, j >= i - 3),
        ({"right": 0}, j <= i),
        ({"left": 0, "right": 2}, (i <= j) & (j <= i + 2)),
    ):
        found = BlockMask.window(50, block=16, device="cpu", **sides).to_dense().reshape(50, 50)
        np.testing.assert_array_equal(found, want)


def test_a_mask_from_booleans_stores_no_block_for_what_lies_beyond_its_edge() -> None:
    allowed = np.zeros((20, 20), bool)
    assert not len(BlockMask.from_dense(allowed, block=16).indices)
    allowed[17, 3] = True
    mask = BlockMask.from_dense(allowed, block=16)
    assert mask.indices.tolist() == [0] and mask.indptr.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(mask.to_dense().reshape(20, 20), allowed)
