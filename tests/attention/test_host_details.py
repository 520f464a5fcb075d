"""Dtypes and lists that attention hands to its engines, on the host and on the fake device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import KVCache
from bsrgemm._attention import attention as public
from bsrgemm._attention.engine import ENGINES
from bsrgemm._backend.numpy_backend import HOST

from .. import fake_device


def cache_and_queries() -> tuple[KVCache, Any]:
    rng = np.random.default_rng(3)
    cache = KVCache(2, 2, 64, 8, dtype="float32", device="cpu")
    k, v = (rng.standard_normal((2, 2, 40, 8)).astype(np.float32) for _ in range(2))
    cache.append(k, v)
    return cache, rng.standard_normal((2, 4, 1, 8)).astype(np.float32)


def test_numbers_of_blocks_beyond_the_cache_do_not_overflow() -> None:
    """The largest number of 32 bits times the keys of a block is -16 in 32 bits."""
    cache, q = cache_and_queries()
    want = bg.attention_decode(q, cache, blocks=np.array([[[0, -1]]], np.int32), block=16)
    for number in (2**31 - 1, 2**30, 2**28, 4):
        found = bg.attention_decode(q, cache, blocks=np.array([[[0, number]]], np.int32), block=16)
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_numbers_of_blocks_have_32_bits_and_are_not_copied_without_need(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, q = cache_and_queries()
    seen: list[Any] = []
    engine = type(ENGINES.of(HOST))
    decode = engine.decode

    def note(self: Any, call: Any) -> None:
        seen.append(call.blocks)
        decode(self, call)

    monkeypatch.setattr(engine, "decode", note)
    blocks = np.array([[[1, 0]]], dtype)
    bg.attention_decode(q, cache, blocks=blocks, block=16)
    (given,) = seen
    assert given.dtype == np.int32
    assert np.shares_memory(given, blocks) == (dtype is np.int32)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_bounds_of_sequences_have_32_bits_on_every_device(dtype: Any) -> None:
    fake = fake_device.install()
    given = np.array([0, 3, 7], dtype)
    for backend, bounds in ((HOST, given), (HOST, given.tolist()), (fake, given), (fake, fake.from_host(given))):
        found = public._bounds(backend, bounds, "cu_seqlens_q", 7, "q")
        assert backend.is_dense(found) and found.dtype == np.int32
        np.testing.assert_array_equal(backend.to_host(found), given)


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("lengths", [None, [3, 5], np.array([3, 5], np.uint64)], ids=str)
def test_a_cache_counts_in_64_bits_on_the_host_and_in_32_on_the_device(device: str, page: Any, lengths: Any) -> None:
    backend = fake_device.install() if device == "fake" else HOST
    cache = KVCache(2, 1, 40, 8, page=page, device=device)
    assert cache.dtype == cache.k.dtype == cache.v.dtype == np.float16
    tokens = backend.from_host(np.ones((2, 1, 5, 8), np.float16))
    for count in (0, 1, 2):
        assert cache.lengths.dtype == np.int64 and cache._device_lengths.dtype == np.int32
        want = [5 * count, 5 * count] if lengths is None else [3 * count, 5 * count]
        assert cache.lengths.tolist() == backend.to_host(cache._device_lengths).tolist() == want
        assert (cache._longest, cache._total) == (max(want), sum(want))
        assert (cache.table is None) if page is None else (cache.table.dtype == np.int32)
        cache.append(tokens, tokens, lengths)
