"""Arguments of masks, attention, caches and merges that are wrong in unusual ways: each is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import mask_base
from bsrgemm.dtypes import FLOAT8

M = bg.BlockMask
HERE = {"block": 16, "device": "cpu"}
MASK = M.causal(48, **HERE)
RAGGED = [[0], [1, 2]]
Q = np.zeros((1, 2, 4, 8), np.float32)
OUT, LSE = bg.attention(Q, Q, Q, return_lse=True)
DENSE = np.ones((48, 48), bool)


def cache() -> bg.KVCache:
    return bg.KVCache(2, 1, 64, 8, dtype="float32", device="cpu")


def tokens() -> np.ndarray[Any, Any]:
    return np.zeros((2, 1, 2, 8), np.float32)


CASES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: M.causal(8, block=16.0), ValueError, "block: wanted one or two integers, got 16.0"),
    (lambda: M.causal(8, block=None), ValueError, "block: wanted one or two integers, got None"),
    (lambda: M.causal(8, align=np.array(["a", "b"]), **HERE), ValueError, "align: wanted 'bottom-right' or 'top-left'"),
    (lambda: M.documents(np.array([0, 5, 3], np.uint64), **HERE), ValueError, "wanted bounds that climb from 0"),
    (lambda: M.documents(RAGGED, **HERE), ValueError, "cu_seqlens: wanted the bounds of documents"),
    (lambda: M.global_tokens(8, tokens=RAGGED, **HERE), ValueError, "tokens: wanted a number or places from 0 to 7"),
    (lambda: M.random(8, per_row=1, heads=3, **HERE), ValueError, "heads: wanted two integers"),
    (lambda: M.random(8, per_row=1, seed=None, **HERE), ValueError, "seed: wanted an integer, got None"),
    (lambda: M.random(8, per_row=1, seed=1.5, **HERE), ValueError, "seed: wanted an integer, got 1.5"),
    (lambda: M.from_dense(np.ones((0, 1, 3, 3), bool)), ValueError, "allowed: wanted at least one batch and one head"),
    (
        lambda: M.from_bsr(bg.from_dense(np.eye(8), blocksize=(4, 4))),
        ValueError,
        "A: block: wanted multiples of 16 up to 256, got (4, 4); A.tobsr(blocksize=...) converts it",
    ),
    (lambda: M.from_block_indices([0, 1], [0], shape=16, block=16), ValueError, "shape: wanted two integers"),
    (lambda: M.from_block_indices([0, 1], [0], shape=(16,) * 3, block=16), ValueError, "shape: wanted two integers"),
    (lambda: M.from_block_indices([0, 1], RAGGED, shape=(16, 16)), ValueError, "indices: wanted integers in one"),
    (lambda: M.stack(3), TypeError, "masks: wanted a list or tuple of BlockMask, got int"),
    (lambda: M.stack(x for x in [MASK]), TypeError, "masks: wanted a list or tuple of BlockMask, got generator"),
    (lambda: M.stack([MASK, 3]), TypeError, "masks[1]: wanted a BlockMask, got int"),
    (lambda: M.stack([3, MASK]), TypeError, "masks[0]: wanted a BlockMask, got int"),
    (lambda: M.stack([MASK] * 2) & M.stack([MASK] * 3), ValueError, "&: masks with 1 x 2 and with 1 x 3 patterns"),
    (lambda: MASK | DENSE, TypeError, "|: wanted a BlockMask, got numpy ndarray; BlockMask.from_dense makes one"),
    (lambda: MASK & DENSE, TypeError, "&: wanted a BlockMask, got numpy ndarray; BlockMask.from_dense makes one"),
    (lambda: DENSE | MASK, TypeError, "|: wanted a BlockMask, got numpy ndarray; BlockMask.from_dense makes one"),
    (lambda: DENSE & MASK, TypeError, "&: wanted a BlockMask, got numpy ndarray; BlockMask.from_dense makes one"),
    (lambda: MASK[1.0:, :], TypeError, "mask[...]: queries: wanted a slice of integers such as 0:16"),
    (lambda: MASK[:, "a":], TypeError, "mask[...]: keys: wanted a slice of integers such as 0:16"),
    (lambda: MASK.elements("a"), TypeError, "kind: wanted an integer"),
    (lambda: MASK.elements(0.0), TypeError, "kind: wanted an integer"),
    (lambda: MASK.elements(1), IndexError, "kind: wanted -1, or the number of one of 1 element masks, got 1"),
    (lambda: MASK.plot(head="a"), TypeError, "head: wanted an integer, got 'a'"),
    (lambda: M.stack([MASK] * 2).plot(head=1.0), TypeError, "head: wanted an integer, got 1.0"),
    (
        lambda: bg.attention(*[Q.astype(FLOAT8)] * 3),
        TypeError,
        "q: does not support dtype float8_e4m3fn without a scale; q_scale=1.0 says that q, k, v are fp8",
    ),
    (
        lambda: bg.attention(Q[0], Q[0], Q[0], cu_seqlens_q=RAGGED, cu_seqlens_k=[0, 2]),
        ValueError,
        "cu_seqlens_q: wanted the bounds of sequences in one dimension, got [[0], [1, 2]]",
    ),
    (lambda: cache().append(tokens(), tokens(), RAGGED), ValueError, "lengths: wanted 2 numbers, one per sequence"),
    (lambda: cache().append([1], tokens()), TypeError, "k: a list cannot meet a cache on 'cpu': wanted a"),
    (lambda: bg.attention_decode(None, cache()), TypeError, "q: a NoneType cannot meet a cache on 'cpu'"),
    (lambda: bg.merge_states(np.array(1.0), np.array(1.0)), TypeError, "outs: wanted a sequence of arrays, got numpy"),
    (lambda: bg.merge_states({"a": OUT}, [LSE]), TypeError, "outs: wanted a sequence of arrays, got a dict"),
    (lambda: bg.merge_states([OUT], [None]), TypeError, "lses[0]: wanted a dense array on 'cpu', where outs[0] is"),
    (lambda: bg.attention(Q, Q, Q, out_dtype="foo"), TypeError, "out_dtype: wanted a dtype, such as np.float32 or its"),
    (lambda: bg.merge_states([OUT], [LSE], out_dtype="foo"), TypeError, "out_dtype: wanted a dtype, such as"),
    (lambda: bg.KVCache(1, 1, 1, 1, dtype="foo", device="cpu"), TypeError, "dtype: wanted a dtype, such as np.float32"),
    (lambda: bg.vjp(bg.attention, Q, Q, Q, return_lse=1), TypeError, "return_lse: wanted True or False, got 1"),
]


@pytest.mark.parametrize(("call", "error", "text"), CASES, ids=[f"{i}: {case[2][:40]}" for i, case in enumerate(CASES)])
def test_bad_input_is_refused_by_name(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def test_no_element_mask_is_counted_from_the_end() -> None:
    mask = M.window(64, left=20, right=3, **HERE)
    assert len(mask.bits) > 2
    with pytest.raises(IndexError, match="kind: wanted -1"):
        mask.elements(-2)


def test_a_mask_differs_from_an_array() -> None:
    assert MASK != DENSE
    assert DENSE != MASK


@pytest.mark.parametrize("far", [2**62, 2**63, 10**30], ids=["2**62", "2**63", "10**30"])
def test_numbers_beyond_64_bits_are_far_beyond_all_lengths(far: int) -> None:
    full, causal = M.full(40, 56, **HERE), M.causal(40, 56, **HERE)
    assert M.window(40, 56, left=far, right=far, **HERE) == full
    assert M.window(40, 56, left=far, right=0, **HERE) == causal
    assert M.sinks(40, 56, count=far, **HERE) == full
    assert M.prefix(40, 56, length=far, **HERE) == full
    assert M.dilated(40, 56, count=far, dilation=1, **HERE) == causal
    diagonal = M.window(40, 56, left=0, right=0, **HERE)
    assert M.dilated(40, 56, count=3, dilation=far, **HERE) == diagonal
    assert M.dilated(40, 56, count=far, dilation=far, **HERE) == diagonal


def test_more_blocks_than_32_bits_count_are_refused_before_memory_is_taken() -> None:
    tokens = 2**24
    for make in (
        lambda: M.full(tokens, block=16, device="cpu"),
        lambda: M.random(tokens, per_row=2**12, block=16, device="cpu"),
    ):
        with pytest.raises(ValueError, match=r"block: \d+ blocks of 16 x 16 would be stored, wanted less than 2\*\*31"):
            make()


def test_combinations_count_their_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_base, "_MOST_STORED", len(MASK.indices))
    assert MASK & MASK == MASK
    several = M.from_dense(np.zeros((1, 2, 48, 48), bool), block=16)
    empty = M.from_dense(~DENSE, block=16)
    for make in (lambda: MASK | several, lambda: MASK & several, lambda: ~empty):
        with pytest.raises(ValueError, match="would be stored"):
            make()


def test_bounds_of_sequences_may_be_a_range() -> None:
    x = np.random.default_rng(0).standard_normal((6, 1, 4))
    bounds = range(0, 7, 3)
    found = bg.attention(x, x, x, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    assert np.array_equal(found, bg.attention(x, x, x, cu_seqlens_q=[0, 3, 6], cu_seqlens_k=[0, 3, 6]))
