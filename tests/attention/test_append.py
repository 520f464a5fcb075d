"""`KVCache.append` while a graph is captured, on a fake card: a replay calls what was captured again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bsrgemm._attention.kv_cache import APPEND_ENGINES, AppendCall, HostAppend, KVCache
from bsrgemm._backend.registry import by_name

from .. import fake_cupy

pytestmark = pytest.mark.fake

Array = np.ndarray[Any, Any]
F16 = np.dtype(np.float16)


class Capture:
    """Captures appends, which `replay` then does."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with fake_cupy.xp.cuda.Stream() as stream:  # type: ignore[attr-defined]
            stream.begin_capture()
            try:
                yield
            finally:
                self.graphs.append(stream.end_capture())

    def append(self, cache: KVCache, k: Any, v: Any, **how: Any) -> None:
        with self.capturing():
            cache.append(k, v, **how)

    def replay(self) -> None:
        for graph in self.graphs:
            graph.launch()


@pytest.fixture
def card() -> Capture:
    return Capture()


def cache_of(batch: int = 2, capacity: int = 8, **how: Any) -> KVCache:
    return KVCache(batch, 1, capacity, 4, value_dim=2, device="cuda", **how)


def tokens(batch: int, n: int, first: int = 0) -> tuple[Any, Any]:
    """Keys and values in which every element of a token is its number."""
    numbers = np.broadcast_to(first + np.arange(n).reshape(1, 1, n, 1), (batch, 1, n, 4)).astype(F16)
    return fake_cupy.backend().from_host(numbers), fake_cupy.backend().from_host(-numbers[..., :2].copy())


def held(cache: KVCache, sequence: int) -> list[float]:
    """The numbers of the tokens of a sequence, if its keys and values agree."""
    k, v = (fake_cupy.backend().to_host(x) for x in cache.gathered(sequence))
    assert (k == k[..., :1]).all() and (v == -k[..., :2]).all()
    return [float(x) for x in k[0, :, 0]]


def test_a_replay_appends_at_the_end_that_sequences_have_by_then(card: Capture) -> None:
    cache = cache_of()
    cache.append(*tokens(2, 3), lengths=[1, 3])
    k, v = tokens(2, 1, first=10)
    card.append(cache, k, v)
    assert cache.lengths.tolist() == [1, 3]  # nothing is appended during the capture
    card.replay()
    k[...], v[...] = 11, -11
    card.replay()
    assert cache.lengths.tolist() == [3, 5] and cache.refused.tolist() == [0, 0]
    assert held(cache, 0) == [0, 10, 11] and held(cache, 1) == [0, 1, 2, 10, 11]
    cache.append(*tokens(2, 1, first=20))  # outside of a capture, after replays
    card.replay()
    assert held(cache, 0) == [0, 10, 11, 20, 11] and cache.lengths.dtype == np.int64
    assert "sequences of 5 to 7 tokens" in repr(cache)


def test_a_sequence_without_room_takes_none_of_its_tokens_and_counts_them(card: Capture) -> None:
    cache = cache_of(capacity=5)
    cache.append(*tokens(2, 3), lengths=[1, 2])
    card.append(cache, *tokens(2, 2, first=10))
    for _ in range(3):
        card.replay()
    assert cache.lengths.tolist() == [5, 4] and cache.refused.tolist() == [2, 4]
    assert held(cache, 0) == [0, 10, 11, 10, 11] and held(cache, 1) == [0, 1, 10, 11]
    with pytest.raises(ValueError, match="sequence 0 has 5 tokens and cannot take 1 more"):
        cache.append(*tokens(2, 1))
    cache.reset(1)
    assert cache.lengths.tolist() == [5, 0] and cache.refused.tolist() == [2, 0]
    card.replay()
    assert held(cache, 1) == [10, 11] and cache.refused.tolist() == [4, 0]
    cache.reset()
    assert cache.lengths.tolist() == cache.refused.tolist() == [0, 0]


def test_replays_read_how_many_tokens_each_sequence_takes(card: Capture) -> None:
    cache, backend = cache_of(batch=3), fake_cupy.backend()
    takes = backend.from_host(np.array([0, 1, 2], np.int32))
    card.append(cache, *tokens(3, 2), lengths=takes)
    card.replay()
    takes[...] = backend.from_host(np.array([-1, 7, 0], np.int32))
    card.replay()
    assert [held(cache, b) for b in range(3)] == [[], [0, 0, 1], [0, 1]]
    some, ones = tokens(3, 2), backend.from_host(np.ones(6, np.int32))
    for wrong in ([1, 1, 1], np.ones(3, np.int32), backend.from_host(np.ones(3, np.int64))):
        with pytest.raises(TypeError, match="lengths: wanted int32 on 'cuda' while a graph is captured"):
            card.append(cache, *some, lengths=wrong)
    for numbers in (ones[:2], ones[::2]):
        with pytest.raises(ValueError, match="lengths: wanted 3 numbers side by side"):
            card.append(cache, *some, lengths=numbers)
    assert [len(graph.steps) for graph in card.graphs[1:]] == [0] * 5


def test_pages_are_reserved_for_replays(card: Capture) -> None:
    cache = cache_of(capacity=64, page=16, pages=5)
    cache.append(*tokens(2, 15))
    card.append(cache, *tokens(2, 1, first=50))
    card.replay()
    card.replay()
    assert cache.lengths.tolist() == [16, 16] and cache.refused.tolist() == [1, 1]
    cache.reserve(20)
    cache.reserve(17)  # they have these pages already
    assert (
        fake_cupy.backend().to_host(cache.table).tolist() == [[0, 2, -1, -1], [1, 3, -1, -1]] and len(cache._free) == 1
    )
    for _ in range(3):
        card.replay()
    assert cache.lengths.tolist() == [19, 19] and held(cache, 0) == [*range(15), 50, 50, 50, 50]
    with pytest.raises(ValueError, match="2 more pages are needed and 1 of 5 are free"):
        cache.reserve(33)
    with pytest.raises(ValueError, match="tokens: wanted at most 64, the capacity, got 65"):
        cache.reserve(65)
    with pytest.raises(ValueError, match="tokens: wanted an integer from 1 on, got 0"):
        cache.reserve(0)
    cache.append(*tokens(2, 13))  # within the pages
    assert cache.lengths.tolist() == [32, 32] and len(cache._free) == 1
    cache.reset()
    assert sorted(cache._free) == [0, 1, 2, 3, 4]


def test_a_cache_in_one_piece_needs_no_reserve(card: Capture) -> None:
    cache = cache_of()
    cache.reserve(8)
    assert cache.table is None and cache.lengths.tolist() == [0, 0]


def test_numbers_that_only_the_gpu_knows_are_not_read_in_a_capture(card: Capture) -> None:
    cache = cache_of()
    card.append(cache, *tokens(2, 1))
    for read in (lambda: cache.lengths, lambda: cache.refused, lambda: cache.gathered(0), lambda: repr(cache)):
        with (
            pytest.raises(RuntimeError, match="the lengths are on the GPU and cannot be read while a graph"),
            card.capturing(),
        ):
            read()


def test_what_can_never_fit_is_told_during_the_capture(card: Capture) -> None:
    cache = cache_of()
    with pytest.raises(ValueError, match="k: 9 tokens never fit: the capacity is 8"):
        card.append(cache, *tokens(2, 9))
    card.append(cache, *tokens(2, 0))
    assert not any(graph.steps for graph in card.graphs) and not cache._captured
    assert cache.lengths.tolist() == cache.refused.tolist() == [0, 0]


@pytest.mark.parametrize("length", [-1, 8, 9, 2**31 - 1])
def test_lengths_and_pages_that_a_user_wrote_are_refused(length: int) -> None:
    call = AppendCall(
        *(np.ones((1, 1, 1, 4), F16) for _ in range(2)), *(np.zeros((1, 1, 8, 4), F16) for _ in range(2)),
        np.array([length], np.int32), np.zeros(1, np.int32), 8,
    )  # fmt: skip
    HostAppend().append(call)
    assert call.refused.tolist() == [1] and call.lengths.tolist() == [length] and not call.to_k.any()
    for page in (-1, 1, 2**31 - 1):
        paged = replace(call, lengths=np.zeros(1, np.int32), table=np.array([[page]], np.int32))
        HostAppend().append(paged)
        assert paged.lengths.tolist() == [0] and not call.to_k.any()
    assert call.refused.tolist() == [4]


def test_the_host_is_never_capturing() -> None:
    assert not APPEND_ENGINES.of(by_name("cpu")).is_capturing()
