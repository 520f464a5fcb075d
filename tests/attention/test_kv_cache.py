"""`KVCache` on the host and a fake card, and `attention_decode` on the host against `attention`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsrgemm._attention.attention import attention
from bsrgemm._attention.decode import attention_decode
from bsrgemm._attention.kv_cache import KVCache, _about
from bsrgemm._backend.registry import Backend
from bsrgemm.dtypes import BFLOAT16

from .. import fake_cupy

pytestmark = pytest.mark.fake

Array = np.ndarray[Any, Any]
F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)


def tokens(rng: np.random.Generator, *shape: int, dtype: Any = F16) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def filled(
    rng: np.random.Generator, lengths: list[int], *, capacity: int = 96, dtype: Any = F32, page: int | None = None
) -> KVCache:
    """A cache of two heads, 8 and 4 wide, whose memory beyond the lengths is NaN."""
    cache = KVCache(len(lengths), 2, capacity, 8, value_dim=4, dtype=dtype, page=page, device="cpu")
    cache.k[...] = np.nan
    cache.v[...] = np.nan
    n = max(lengths)
    cache.append(
        tokens(rng, len(lengths), 2, n, 8, dtype=dtype), tokens(rng, len(lengths), 2, n, 4, dtype=dtype), lengths
    )
    return cache


# ------------------------------------------------------------------------------------------ append
@pytest.mark.parametrize("page", [None, 16, 32])
@pytest.mark.parametrize("dtype", [F16, BFLOAT16])
def test_what_is_appended_is_there_in_order(backend: Backend, page: int | None, dtype: Any) -> None:
    rng = np.random.default_rng(1)
    cache = KVCache(3, 2, 70, 8, value_dim=4, dtype=dtype, page=page, device=backend.name)
    expected: list[list[list[Array]]] = [[[], []] for _ in range(3)]
    for n, takes in ((5, None), (30, [30, 0, 17]), (1, None), (4, [1, 2, 3]), (0, None), (20, None)):
        k, v = tokens(rng, 3, 2, n, 8, dtype=dtype), tokens(rng, 3, 2, n, 4, dtype=dtype)
        cache.append(backend.from_host(k), backend.from_host(v), takes)
        for b in range(3):
            kept = n if takes is None else takes[b]
            expected[b][0].append(k[b, :, :kept])
            expected[b][1].append(v[b, :, :kept])
    assert cache.lengths.tolist() == [57, 28, 46]
    assert backend.to_host(cache._device_lengths).tolist() == [57, 28, 46]
    for b in range(3):
        for got, want in zip(cache.gathered(b), expected[b], strict=True):
            np.testing.assert_array_equal(backend.to_host(got), np.concatenate(want, axis=1))


def test_layout_bshd_is_the_same_with_other_axes() -> None:
    rng = np.random.default_rng(2)
    one, two = (KVCache(2, 3, 32, 8, device="cpu") for _ in range(2))
    k, v = tokens(rng, 2, 3, 7, 8), tokens(rng, 2, 3, 7, 8)
    one.append(k, v)
    two.append(k.swapaxes(1, 2), v.swapaxes(1, 2), layout="bshd")
    for b in range(2):
        for x, y in zip(one.gathered(b), two.gathered(b), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("page", [None, 16])
def test_overflow_names_the_sequence_and_writes_nothing(page: int | None) -> None:
    rng = np.random.default_rng(3)
    cache = filled(rng, [90, 95], page=page)
    before = [x.copy() for b in range(2) for x in cache.gathered(b)]
    raw, table = cache.k.copy(), None if cache.table is None else cache.table.copy()
    new = tokens(rng, 2, 2, 4, 8, dtype=F32)
    with pytest.raises(ValueError, match=r"sequence 1 has 95 tokens and cannot take 4 more: the capacity is 96"):
        cache.append(new, new[..., :4])
    assert cache.lengths.tolist() == [90, 95] and cache._device_lengths.tolist() == [90, 95]
    np.testing.assert_array_equal(cache.k, raw)
    if table is not None:
        np.testing.assert_array_equal(cache.table, table)
    for got, want in zip((x for b in range(2) for x in cache.gathered(b)), before, strict=True):
        np.testing.assert_array_equal(got, want)
    cache.append(new, new[..., :4], lengths=[4, 1])
    assert cache.lengths.tolist() == [94, 96]


def test_too_few_pages_are_told_and_nothing_is_written() -> None:
    cache = KVCache(2, 1, 64, 8, page=16, pages=4, device="cpu")
    x = np.ones((2, 1, 40, 8), F16)
    cache.append(x, x, lengths=[40, 0])
    with pytest.raises(ValueError, match=r"2 more pages are needed and 1 of 4 are free; nothing was written"):
        cache.append(x, x, lengths=[0, 17])
    assert cache.lengths.tolist() == [40, 0]
    cache.append(x, x, lengths=[0, 16])
    cache.reset(0)
    cache.append(x, x, lengths=[0, 40])
    assert cache.lengths.tolist() == [0, 56]
    assert sorted(cache.table[1].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("page", [None, 16])
def test_reset_forgets_one_sequence_or_all(backend: Backend, page: int | None) -> None:
    cache = KVCache(2, 1, 32, 8, page=page, device=backend.name)
    x = backend.from_host(np.ones((2, 1, 20, 8), F16))
    cache.append(x, x)
    cache.reset(1)
    assert cache.lengths.tolist() == [20, 0] and backend.to_host(cache._device_lengths).tolist() == [20, 0]
    cache.reset()
    assert cache.lengths.tolist() == [0, 0] and cache._longest == cache._total == 0
    cache.append(x, x)
    assert cache.lengths.tolist() == [20, 20]
    if page is not None:
        used = backend.to_host(cache.table)
        assert sorted(used[used >= 0].tolist()) == [0, 1, 2, 3]


def test_lengths_are_a_copy_and_bytes_are_counted() -> None:
    cache = KVCache(2, 3, 20, 8, value_dim=4, page=16, device="cpu")
    cache.lengths[0] = 9
    assert cache.lengths.tolist() == [0, 0]
    assert cache.nbytes == 4 * 3 * 16 * (8 + 4) * 2 + 2 * 2 * 4
    assert "4 pages of 16" in repr(cache) and cache.device == "cpu"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batch": 0}, ValueError, "batch: wanted an integer from 1 on, got 0"),
        ({"capacity": 2.5}, ValueError, "capacity: wanted an integer"),
        ({"capacity": 2**30}, ValueError, r"capacity: wanted less than 2\*\*30 tokens, got"),
        ({"capacity": 2**29}, ValueError, r"capacity: wanted less than 2\*\*31 tokens of all heads and sequences"),
        ({"page": 24}, ValueError, "page: wanted a power of two from 16 to 256, got 24"),
        ({"page": 512}, ValueError, "page: wanted a power of two"),
        ({"pages": 3}, ValueError, "pages: got 3 without page"),
        ({"dtype": "int8"}, TypeError, "dtype: does not support dtype int8"),
        ({"device": "tpu"}, ValueError, "device: got 'tpu'"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good: dict[str, Any] = {"batch": 2, "kv_heads": 2, "capacity": 32, "head_dim": 8, "device": "cpu"} | change
    with pytest.raises(error, match=message):
        KVCache(**good)


def test_bad_tokens_are_told_before_anything_is_written() -> None:
    cache = KVCache(2, 2, 32, 8, value_dim=4, device="cpu")
    k, v = np.ones((2, 2, 3, 8), F16), np.ones((2, 2, 3, 4), F16)
    for args, error, message in (
        (([1], v), TypeError, "k: a list cannot meet a cache on 'cpu'"),
        ((fake_cupy.backend().from_host(k), v), TypeError, "nothing is moved silently"),
        ((k[0], v), ValueError, r"k: wanted 4 dimensions, \(batch, KV heads, length, head dim\)"),
        ((k.astype(F32), v), TypeError, "k: wanted float16 as the cache has, got float32"),
        ((k, k), ValueError, "v: wanted 2 sequences, 2 KV heads and head dim 4, got 2, 2 and 8"),
        ((k, v[:, :, :2]), ValueError, "v: wanted length 3 as k has, got 2"),
        ((k, v, [1]), ValueError, "lengths: wanted 2 numbers"),
        ((k, v, [1, 4]), ValueError, "lengths: wanted numbers from 0 to 3"),
        ((k, v, [1.0, 2.0]), TypeError, "lengths: wanted integers"),
        ((k, v, 2), TypeError, "lengths: wanted integers on the host, got int"),
    ):
        with pytest.raises(error, match=message):
            cache.append(*args)
    with pytest.raises(ValueError, match="layout: wanted"):
        cache.append(k, v, layout="sbhd")
    for sequence, error in ((2, ValueError), (-1, ValueError), (True, TypeError)):
        with pytest.raises(error, match="sequence: wanted"):
            cache.reset(sequence)
    assert not cache.lengths.any()


# ------------------------------------------------------------------------------------------ decode
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("window", [None, (5, 0), (0, 3), (-1, -1)])
@pytest.mark.parametrize("queries", [1, 3])
def test_decode_is_attention_of_the_last_tokens(page: int | None, window: Any, queries: int) -> None:
    rng = np.random.default_rng(4)
    lengths = [37, 1, 0, 96]
    cache = filled(rng, lengths, page=page)
    q = tokens(rng, 4, 6, queries, 8, dtype=F32)
    out, lse = attention_decode(q, cache, window=window, softcap=3.0, scale=0.4, return_lse=True)
    for b, length in enumerate(lengths):
        k, v = (x[None] for x in cache.gathered(b))
        assert k.shape[2] == length
        want, want_lse = attention(
            q[b : b + 1], k, v, causal=True, window=window, softcap=3.0, scale=0.4, return_lse=True
        )
        np.testing.assert_array_equal(out[b], want[0])
        np.testing.assert_array_equal(lse[b], want_lse[0])
    assert not out[2].any() and np.isneginf(lse[2]).all()


def test_prefill_then_decode_is_causal_attention_over_all() -> None:
    rng = np.random.default_rng(5)
    q, k, v = (tokens(rng, 2, H, 40, 8, dtype=F64) for H in (4, 2, 2))
    want = attention(q, k, v, causal=True)
    for page in (None, 16):
        cache = KVCache(2, 2, 40, 8, dtype=F64, page=page, device="cpu")
        cache.append(k[:, :, :33], v[:, :, :33])
        for first, last in ((33, 34), (34, 38), (38, 40)):
            cache.append(k[:, :, first:last], v[:, :, first:last])
            got = attention_decode(q[:, :, first:last], cache)
            np.testing.assert_allclose(got, want[:, :, first:last], rtol=1e-12, atol=1e-12)


@given(data=st.data())
def test_sparse_decode_sees_the_blocks_that_are_kept_and_no_others(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    page = data.draw(st.sampled_from([None, 16]))
    block = page or data.draw(st.sampled_from([16, 32, 48]))
    queries = data.draw(st.sampled_from([1, 3]))
    window = data.draw(st.sampled_from([None, (20, 0)]))
    lengths = [data.draw(st.integers(0, 96)) for _ in range(2)]
    if not any(lengths):
        lengths[0] = 1
    cache = filled(rng, lengths, page=page, dtype=F64)
    shape = (data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2])))
    count = -(-96 // block)
    blocks = np.full((*shape, count + 1), -1, np.int32)
    for numbers in blocks.reshape(-1, count + 1):
        kept = rng.permutation(count)[: rng.integers(0, count + 1)]
        numbers[: len(kept)] = kept
    blocks[0, 0, -1] = 99  # there is no such block
    q = tokens(rng, 2, 4, queries, 8, dtype=F64)
    out = attention_decode(q, cache, blocks=blocks, block=block, window=window)
    for b in range(2):
        k, v = cache.gathered(b)
        for h in range(4):
            numbers = blocks[b % shape[0], h // 2 % shape[1]]
            for i in range(queries):
                place = lengths[b] - queries + i
                left = 0 if window is None else place - window[0]
                seen = [j for j in range(max(0, left), place + 1) if j // block in numbers]
                s = k[h // 2, seen] @ q[b, h, i] / np.sqrt(8)
                p = np.exp(s - s.max(initial=0))
                want = p / p.sum() @ v[h // 2, seen] if seen else np.zeros(4)
                np.testing.assert_allclose(out[b, h, i], want, rtol=1e-10, atol=1e-12)


def test_decode_writes_into_out_and_takes_both_layouts() -> None:
    rng = np.random.default_rng(6)
    cache = filled(rng, [20, 33], dtype=F16)
    q = tokens(rng, 2, 4, 2, 8)
    want = attention_decode(q, cache)
    wide = np.full((2, 2, 4, 9), 7, F16)
    out = wide[..., 1::2]
    assert attention_decode(q.swapaxes(1, 2), cache, layout="bshd", out=out) is out
    np.testing.assert_array_equal(out.swapaxes(1, 2), want)
    assert (wide[..., ::2] == 7).all()


def test_bad_arguments_of_decode_are_told() -> None:
    cache = filled(np.random.default_rng(7), [5, 6], dtype=F16)
    paged = filled(np.random.default_rng(7), [5, 6], dtype=F16, page=16)
    q = np.ones((2, 4, 1, 8), F16)
    blocks = np.zeros((1, 1, 1), np.int32)
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (q, {"cache": None}, TypeError, "cache: wanted a KVCache, got NoneType"),
        (q[0], {}, ValueError, "q: wanted 4 dimensions"),
        ([q], {}, TypeError, "q: a list cannot meet a cache on 'cpu'"),
        (q.astype(F32), {}, TypeError, "q: wanted float16 as the cache has, got float32"),
        (q[:1], {}, ValueError, "q: wanted a batch of 2 as the cache has, got 1"),
        (q[..., :4], {}, ValueError, "q: wanted head dim 8 as the cache has, got 4"),
        (q[:, :3], {}, ValueError, "q: wanted a multiple of the 2 heads of the cache, got 3 heads"),
        (np.ones((2, 4, 17, 8), F16), {}, ValueError, "q: wanted 1 to 16 queries for each sequence, got 17"),
        (q[:, :, :0], {}, ValueError, "q: wanted 1 to 16 queries for each sequence, got 0"),
        (q, {"layout": "x"}, ValueError, "layout: wanted"),
        (q, {"window": (1,)}, ValueError, "window: wanted"),
        (q, {"scale": float("nan")}, ValueError, "scale: wanted a finite number"),
        (q, {"softcap": 0}, ValueError, "softcap: wanted a finite number above 0"),
        (q, {"return_lse": 1}, TypeError, "return_lse: wanted True or False"),
        (q, {"blocks": blocks}, ValueError, "block: wanted the keys of a block"),
        (q, {"block": 16}, ValueError, "blocks: wanted together with block"),
        (q, {"blocks": blocks, "block": 24}, ValueError, "block: wanted a multiple of 16, got 24"),
        (q, {"blocks": blocks, "block": 32, "cache": paged}, ValueError, "block: wanted 16, a page of the cache"),
        (q, {"blocks": blocks.astype(F32), "block": 16}, TypeError, "blocks: wanted integers, got float32"),
        (q, {"blocks": blocks[0], "block": 16}, ValueError, "blocks: wanted shape"),
        (q, {"blocks": np.zeros((3, 1, 1), np.int32), "block": 16}, ValueError, "blocks: wanted shape"),
        (q, {"out": np.empty((2, 4, 1, 8), F16)}, ValueError, r"out: wanted float16 of shape \(2, 4, 1, 4\)"),
        (q, {"out": q[..., :4]}, ValueError, "out: overlaps q"),
        (q, {"out": cache.v[:1, :1, :8].reshape(2, 4, 1, 4)}, ValueError, "out: overlaps cache"),
        (q, {"out": [1]}, TypeError, "out: wanted a dense array on 'cpu'"),
    ]
    for given_q, how, error, message in cases:
        how = {"cache": cache} | how
        with pytest.raises(error, match=message):
            attention_decode(given_q, **how)


# ------------------------------------------------------------------------------------------ lengths and memory
@given(st.integers(0, 2**27))
def test_lengths_are_rounded_up_by_less_than_an_eighth(x: int) -> None:
    assert x <= _about(x) <= x + x // 8


@pytest.mark.parametrize("call", ["append", "append some", "reset"])
def test_a_cache_that_ran_out_of_memory_is_as_it_was(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy to the device fails once; then the same call works, and no page is lost."""
    rng = np.random.default_rng(5)
    k, v = (rng.standard_normal((2, 1, 40, 8)).astype(np.float32) for _ in range(2))

    def filled() -> KVCache:
        cache = KVCache(2, 1, 64, 8, dtype="float32", page=16, device="cpu")
        cache.append(k[:, :, :20], v[:, :, :20], [20, 5])
        return cache

    def change(cache: KVCache) -> None:
        if call == "reset":
            cache.reset(0)
        else:
            cache.append(k, v, [40, 3] if call == "append some" else None)

    def state(cache: KVCache) -> Any:
        held = [x.tolist() for b in range(2) for x in cache.gathered(b)]
        table, tokens = np.asarray(cache.table), np.asarray(cache._device_lengths)
        return cache.lengths.tolist(), tokens.tolist(), table.tolist(), sorted(cache._free), held

    wanted = filled()
    change(wanted)
    for failing in range(1, 10):
        cache = filled()
        before, requests = state(cache), 0

        def from_host(x: Any, failing: int = failing) -> Any:
            nonlocal requests
            requests += 1
            if requests == failing:
                raise MemoryError
            return x.copy()

        failed = False
        with monkeypatch.context() as patched:
            patched.setattr(cache._backend, "from_host", from_host)
            try:
                change(cache)
            except MemoryError:
                failed = True
        if failed:
            assert state(cache) == before
            change(cache)
        assert state(cache) == state(wanted)
        if not failed:
            assert failing > 1
            return
    raise AssertionError("the call does not end")
