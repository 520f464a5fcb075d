"""`KVCache.append` on the card: against the host's cache, and replayed as a part of a CUDA graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16

from .repeats import captured, new_stream

pytestmark = pytest.mark.gpu

F16 = np.dtype(np.float16)


def both(batch: int, capacity: int, dims: tuple[int, int] = (64, 64), **how: Any) -> list[bg.KVCache]:
    """The same cache on the card and on the host, full of NaN."""
    caches = [
        bg.KVCache(batch, 2, capacity, dims[0], value_dim=dims[1], device=device, **how) for device in ("cuda", "cpu")
    ]
    for cache in caches:
        for x in (cache.k, cache.v):
            x.view(np.uint16)[...] = 0x7FFF
    return caches


def tokens(rng: np.random.Generator, cache: bg.KVCache, n: int) -> list[Any]:
    shape = (cache.batch, cache.kv_heads, n)
    return [rng.standard_normal((*shape, d)).astype(cache.dtype) for d in (cache.head_dim, cache.value_dim)]


def assert_same(card: bg.KVCache, host: bg.KVCache) -> None:
    """All memory has the same bits, that beyond the lengths included."""
    assert card.lengths.tolist() == host.lengths.tolist()
    assert card._device_lengths.get().tolist() == host._device_lengths.tolist()
    for x, y in ((card.k, host.k), (card.v, host.v)):
        np.testing.assert_array_equal(x.view(np.uint16).get(), y.view(np.uint16))


@pytest.mark.sanitizer
@pytest.mark.parametrize("page", [None, 16, 64])
@pytest.mark.parametrize(("dims", "dtype"), [((64, 64), F16), ((80, 128), BFLOAT16), ((9, 5), F16)], ids=str)
def test_the_card_stores_what_the_host_stores(rng, dims, dtype, page) -> None:
    import cupy

    card, host = both(3, 300, dims, dtype=dtype, page=page)
    for n, takes in ((37, None), (1, None), (130, [130, 0, 77]), (2, [1, 2, 0]), (1, None), (60, None)):
        k, v = tokens(rng, host, n)
        card.append(cupy.asarray(k), cupy.asarray(v), takes)
        host.append(k, v, takes)
        assert_same(card, host)


def test_operands_of_any_strides_and_addresses(rng) -> None:
    import cupy

    card, host = both(2, 64)
    wide = rng.standard_normal((2, 9, 2, 131)).astype(F16)
    on_card = cupy.asarray(wide)
    for cut in (slice(0, 64), slice(1, 65), slice(67, None), slice(64, None, -1), slice(0, 128, 2)):
        for x, cache in ((wide, host), (on_card, card)):
            part = x[..., cut][..., :64]
            cache.append(part, part, layout="bshd")
        assert_same(card, host)
        card.reset()
        host.reset()


def test_a_long_prompt_of_many_sequences(rng) -> None:
    import cupy

    card, host = both(5, 3000, page=32)
    for n in (2111, 800):
        k, v = tokens(rng, host, n)
        card.append(cupy.asarray(k), cupy.asarray(v))
        host.append(k, v)
    assert_same(card, host)


class Graph:
    """An append and a decode of one token for each sequence, as a graph."""

    def __init__(self, cache: bg.KVCache, takes: Any = None) -> None:
        import cupy

        self.cache, self.takes = cache, takes
        self.k, self.v = (cupy.zeros((cache.batch, cache.kv_heads, 1, d), cache.dtype) for d in (64, 64))
        self.q = cupy.zeros((cache.batch, 4 * cache.kv_heads, 1, 64), cache.dtype)
        self.out = cupy.zeros_like(self.q)
        warm = bg.KVCache(cache.batch, cache.kv_heads, 16, 64, dtype=cache.dtype, device="cuda")
        self.stream = new_stream()
        with self.stream:
            warm.append(self.k, self.v)
            bg.attention_decode(self.q, warm, out=self.out)
            self.graph = captured(self.stream, self.step)  # after the stream has done what needs the other cache

    def step(self) -> None:
        self.cache.append(self.k, self.v, self.takes)
        bg.attention_decode(self.q, self.cache, out=self.out)

    def replay(self, k: Any, v: Any, q: Any) -> Any:
        import cupy

        for to, x in ((self.k, k), (self.v, v), (self.q, q)):
            to[...] = cupy.asarray(x)
        cupy.cuda.get_current_stream().synchronize()
        self.graph.launch(self.stream)
        self.stream.synchronize()
        return self.out.get()


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("before", [[0, 0], [1, 30], [1500, 2000]], ids=str)
def test_a_step_is_replayed_as_if_it_were_called(rng, before, page) -> None:
    import cupy

    card, host = both(2, 2100, page=page)
    if max(before):
        k, v = tokens(rng, host, max(before))
        card.append(cupy.asarray(k), cupy.asarray(v), before)
        host.append(k, v, before)
    graph = Graph(card)
    assert card.lengths.tolist() == before  # the capture appends nothing
    card.reserve(2100)
    for _ in range(33):
        k, v = tokens(rng, host, 1)
        q = rng.standard_normal(graph.q.shape).astype(F16)
        got = graph.replay(k, v, q)
        host.append(k, v)
        want = bg.attention_decode(q, host)
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0, atol=4e-3)
    assert not card.refused.any()
    for b in range(2):
        for x, y in zip(card.gathered(b), host.gathered(b), strict=True):
            np.testing.assert_array_equal(x.get(), y)
    k, v = tokens(rng, host, 2)
    card.append(cupy.asarray(k), cupy.asarray(v))  # outside of the graph
    assert card.lengths.tolist() == [n + 35 for n in before]
    q = rng.standard_normal(graph.q.shape).astype(F16)
    graph.replay(k[:, :, :1], v[:, :, :1], q)
    host.append(k, v)
    host.append(k[:, :, :1], v[:, :, :1])
    called = bg.attention_decode(cupy.asarray(q), card)
    np.testing.assert_allclose(
        called.get().astype(np.float32), bg.attention_decode(q, host).astype(np.float32), rtol=0, atol=4e-3
    )


@pytest.mark.sanitizer
def test_no_replay_writes_beyond_the_capacity_or_to_pages_of_others(rng) -> None:
    import cupy

    for page, most in ((None, 20), (16, 16)):
        card, host = both(2, 20, page=page, pages=None if page is None else 4)
        k, v = tokens(rng, host, 14)
        card.append(cupy.asarray(k), cupy.asarray(v), [14, 11])
        graph = Graph(card)
        one, two = tokens(rng, host, 1)
        q = rng.standard_normal(graph.q.shape).astype(F16)
        for _ in range(10):
            graph.replay(one, two, q)
        assert card.lengths.tolist() == [most, min(most, 21)]
        assert card.refused.tolist() == [24 - most, max(0, 21 - most)]
        unused = {0, 1, 2, 3} - set(card.table.get().ravel().tolist()) if page else set()
        for number in unused:
            assert (card.k[number].view(np.uint16) == 0x7FFF).all()
        with pytest.raises(ValueError, match="cannot take 7 more"):
            card.append(*(cupy.zeros((2, 2, 7, 64), F16) for _ in range(2)))
        card.reset(0)
        graph.replay(one, two, q)
        assert card.lengths.tolist()[0] == (0 if page else 1) and card.refused.tolist()[0] == (1 if page else 0)


def test_replays_read_how_many_tokens_each_sequence_takes(rng) -> None:
    import cupy

    card, host = both(3, 40)
    takes = cupy.array([1, 0, 1], np.int32)
    graph = Graph(card, takes)
    q = np.zeros(graph.q.shape, F16)
    for numbers in ([1, 0, 1], [0, 1, 1], [5, -1, 1]):
        takes[...] = cupy.array(numbers, np.int32)
        k, v = tokens(rng, host, 1)
        graph.replay(k, v, q)
        host.append(k, v, np.clip(numbers, 0, 1))
    assert_same(card, host)
    graph.stream.begin_capture()
    try:
        with graph.stream, pytest.raises(TypeError, match="lengths: wanted int32 on 'cuda' while a graph is captured"):
            card.append(graph.k, graph.v, [1, 1, 1])
        with graph.stream, pytest.raises(RuntimeError, match="cannot be read while a graph is captured"):
            card.lengths.tolist()
    finally:
        graph.stream.end_capture()
