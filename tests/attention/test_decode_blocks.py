"""`attention_decode(blocks=)` takes integers of any width, and lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bsrgemm import KVCache, attention_decode
from bsrgemm._attention import decode

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INTEGERS = [np.dtype(c) for c in "bBhHiIlL"]


def problem(where: str) -> tuple[Any, Any, KVCache]:
    """Queries and a cache of two sequences with two heads, and how arrays come there."""
    rng = np.random.default_rng(4)
    xp: Any = np
    if where == "cuda":
        import cupy as xp
    dtype = "float16" if where == "cuda" else "float32"
    q, k, v = (xp.asarray(rng.standard_normal((2, h, n, 64)).astype(dtype)) for h, n in ((4, 1), (2, 160), (2, 160)))
    cache = KVCache(2, 2, 160, 64, dtype=dtype, device=where)
    cache.append(k, v)
    return xp, q, cache


def bits(x: Any) -> bytes:
    return bytes((x if isinstance(x, np.ndarray) else x.get()).tobytes())


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("where", DEVICES)
def test_all_integers_read_the_same_blocks(where: str, dtype: Any) -> None:
    xp, q, cache = problem(where)
    blocks = np.array([[[4, 0, 9], [7, 2, 3]], [[1, 2, 3], [9, 8, 120]]])
    want = attention_decode(q, cache, blocks=xp.asarray(blocks.astype(np.int32)), block=16)
    wide = xp.asarray(blocks.astype(dtype))
    assert bits(attention_decode(q, cache, blocks=wide, block=16)) == bits(want)
    assert bits(attention_decode(q, cache, blocks=wide[:, ::-1], block=16)) != bits(want)
    assert wide.dtype == dtype and bits(wide) == bits(blocks.astype(dtype)), "the argument is left as it was"


@pytest.mark.parametrize("where", DEVICES)
def test_numbers_that_int32_cannot_hold_have_no_block(where: str) -> None:
    xp, q, cache = problem(where)
    want = attention_decode(q, cache, blocks=xp.asarray(np.array([[[2, -1, -1, -1, -1]]], np.int32)), block=16)
    for far in (np.array([2, 2**32, 2**32 + 1, -(2**32), -(2**63)]), np.array([2] + [2**64 - 1] * 4, np.uint64)):
        assert bits(attention_decode(q, cache, blocks=xp.asarray(far[None, None]), block=16)) == bits(want)


@pytest.mark.parametrize("where", DEVICES)
def test_lists_read_the_same_blocks(where: str) -> None:
    xp, q, cache = problem(where)
    for listed in ([[[4, 0, 9]]], [[(1, 2)], [(3, -1)]], (([5], [2**40]),), [[[]]]):
        array = xp.asarray(np.clip(np.array(listed, np.int64), -1, 99).astype(np.int32))
        want = attention_decode(q, cache, blocks=array, block=16)
        assert bits(attention_decode(q, cache, blocks=listed, block=16)) == bits(want)


def test_other_lists_are_told() -> None:
    _, q, cache = problem("cpu")
    for blocks, error, message in (
        ([[[1, 2], [3]]], ValueError, "blocks: wanted nested lists of integers, all of one length"),
        ([[[0.5]]], TypeError, "blocks: wanted integers, got float64"),
        ([[[True]]], TypeError, "blocks: wanted integers, got bool"),
        ([[["a"]]], TypeError, "blocks: wanted integers, got <U1"),
        ([1, 2], ValueError, r"blocks: wanted shape \(2 or 1, 2 or 1, n\), got \(2,\)"),
        (np.ones((1, 1, 1), bool), TypeError, "blocks: wanted integers, got bool"),
    ):
        with pytest.raises(error, match=rf"^{message}"):
            attention_decode(q, cache, blocks=blocks, block=16)


class Bounded(np.ndarray[Any, Any]):
    """Numbers that are never compared with one that their dtype does not have."""

    def __gt__(self, other: Any) -> Any:
        assert other <= np.iinfo(self.dtype).max, f"{other} is no {self.dtype}"
        return np.asarray(self) > other

    def __lt__(self, other: Any) -> Any:
        assert other >= np.iinfo(self.dtype).min, f"{other} is no {self.dtype}"
        return np.asarray(self) < other


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_compared_with_numbers_of_their_dtype(dtype: Any) -> None:
    """NumPy 2.2.0 ends the process at ``x[:, ::-1] > 2**31`` if x has 8 bits."""
    numbers = np.array([[4, 0, 9], [7, 2, 120]]).astype(dtype)
    assert bits(decode._in_32_bits(np, numbers[:, ::-1].view(Bounded))) == bits(numbers[:, ::-1].astype(np.int32))
