"""Dtypes and lists that attention hands to its engines, on the host and on a fake card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import KVCache
from bsrgemm._attention import checks, host_tiles, mask_tiles
from bsrgemm._attention.engine import ENGINES
from bsrgemm._backend.numpy_backend import HOST

from .. import fake_cupy

pytestmark = pytest.mark.fake


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
    fake = fake_cupy.backend()
    given = np.array([0, 3, 7], dtype)
    for backend, bounds in ((HOST, given), (HOST, given.tolist()), (fake, given), (fake, fake.from_host(given))):
        found = checks._bounds(backend, bounds, "cu_seqlens_q", 7, "q")
        assert backend.is_dense(found) and found.dtype == np.int32
        np.testing.assert_array_equal(backend.to_host(found), given)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("lengths", [None, [3, 5], np.array([3, 5], np.uint64)], ids=str)
def test_a_cache_counts_in_64_bits_on_the_host_and_in_32_on_the_device(device: str, page: Any, lengths: Any) -> None:
    backend = fake_cupy.backend() if device == "cuda" else HOST
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


# ------------------------------------------------------------------------------------------------- windows
def asked(monkeypatch: pytest.MonkeyPatch, name: str, call: Any) -> Any:
    """What the engine of the host is asked for."""
    seen: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(type(ENGINES.of(HOST)), name, lambda self, given: seen.append(given))
        call()
    return seen[0]


@pytest.mark.parametrize(
    "window, causal, want",
    [
        (None, False, (2**30, 2**30)),
        (None, True, (2**30, 0)),
        ((-1, -1), False, (2**30, 2**30)),
        ((0, 0), False, (0, 0)),
        ((1, 2), False, (1, 2)),
        ((7, 9), True, (7, 0)),
        ((2**30 - 1, 2**30), False, (2**30 - 1, 2**30)),
        ((2**40, 2**35), False, (2**30, 2**30)),
    ],
)
def test_a_band_is_at_most_as_wide_as_32_bits_can_add(
    window: Any, causal: bool, want: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    q = np.ones((1, 1, 4, 8))
    call = asked(monkeypatch, "forward", lambda: bg.attention(q, q, q, window=window, causal=causal))
    assert (call.left, call.right) == want


@pytest.mark.parametrize("left, want", [(-1, 64), (0, 0), (1, 1), (63, 63), (64, 64), (65, 64), (2**40, 64)])
def test_a_query_of_decode_looks_back_as_far_as_the_capacity(
    left: int, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, q = cache_and_queries()
    call = asked(monkeypatch, "decode", lambda: bg.attention_decode(q, cache, window=(left, 0)))
    assert call.left == want


# ------------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("before", [True, False])
def test_a_result_may_lie_directly_beside_an_operand(name: str, before: bool) -> None:
    rng = np.random.default_rng(2)
    operands = {x: rng.standard_normal((1, 1, 4, 8)) for x in ("q", "k", "v")}
    want = bg.attention(**operands)
    memory = np.zeros((2, 1, 1, 4, 8))
    memory[int(not before)] = operands[name]
    out = memory[int(before)]
    bg.attention(**operands | {name: memory[int(not before)]}, out=out)
    np.testing.assert_array_equal(out, want)
    flat = memory.reshape(-1)
    overlapping = (flat[31:63] if before else flat[1:33]).reshape(1, 1, 4, 8)
    with pytest.raises(ValueError, match=f"out: overlaps {name}"):
        bg.attention(**operands | {name: memory[int(not before)]}, out=overlapping)


@pytest.mark.parametrize("before", [True, False])
def test_a_result_of_decode_may_lie_directly_beside_the_queries(before: bool) -> None:
    cache, q = cache_and_queries()
    memory = np.zeros((2, *q.shape), np.float32)
    memory[int(not before)] = q
    want = bg.attention_decode(q, cache)
    bg.attention_decode(memory[int(not before)], cache, out=memory[int(before)])
    np.testing.assert_array_equal(memory[int(before)], want)
    flat = memory.reshape(-1)
    overlapping = (flat[63:127] if before else flat[1:65]).reshape(q.shape)
    with pytest.raises(ValueError, match="out: overlaps q"):
        bg.attention_decode(memory[int(not before)], cache, out=overlapping)


def test_a_stride_of_0_along_one_element_is_never_used() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 3, 4, 8)) for _ in range(3))
    out = np.lib.stride_tricks.as_strided(np.zeros(96), (1, 3, 4, 8), (0, 256, 64, 8))
    assert bg.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, bg.attention(q, k, v))
    for strides in ((0, 0, 64, 8), (0, 256, 0, 8), (0, 256, 64, 0)):
        wrong = np.lib.stride_tricks.as_strided(np.zeros(96), (1, 3, 4, 8), strides)
        with pytest.raises(ValueError, match="out: elements share memory"):
            bg.attention(q, k, v, out=wrong)


@pytest.mark.parametrize("axis", range(4))
def test_a_stride_of_0_along_two_elements_is_refused(axis: int) -> None:
    shape, strides = (2, 2, 2, 2), [32, 16, 8, 4]
    strides[axis] = 0
    out = np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), shape, strides)
    q = np.ones(shape, np.float32)
    with pytest.raises(ValueError, match=r"out: elements share memory \(a stride is 0\)"):
        bg.attention(q, q, q, out=out)
    cache = KVCache(2, 2, 16, 2, dtype="float32", device="cpu")
    cache.append(q, q)
    with pytest.raises(ValueError, match=r"out: elements share memory \(a stride is 0\)"):
        bg.attention_decode(q, cache, out=out)


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.inf, np.nan])
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_every_scale_of_a_head_is_finite_and_above_0(name: str, wrong: float) -> None:
    q = np.ones((1, 2, 4, 8), np.uint8)
    for scales in (np.array([1, wrong], np.float32), np.array([[wrong, 1]], np.float32)):
        with pytest.raises(ValueError, match=f"{name}: wanted finite numbers above 0"):
            bg.attention(q, q, q, **{name: scales})
    with pytest.raises(ValueError, match=f"{name}: wanted a finite number above 0"):
        bg.attention(q, q, q, **{name: wrong})


# ------------------------------------------------------------------------------------------------- tiles of masks
@pytest.mark.parametrize(
    "length, block, want",
    [
        *[(128, 16, 8), (128, 64, 2), (128, 128, 1), (64, 128, 1), (64, 256, 1), (192, 96, 2), (16, 256, 1)],
        *[(128, 48, 4), (64, 48, 3), (48, 64, 2), (128, 80, 3), (128, 96, 3), (64, 96, 2), (128, 112, 3)],
        *[(128, 240, 2), (192, 128, 3), (192, 80, 4), (96, 64, 3), (65, 64, 2), (66, 64, 3), (33, 16, 3)],
    ],
)
def test_a_tile_has_a_place_for_every_block_that_it_may_touch(length: int, block: int, want: int) -> None:
    assert mask_tiles._spanned(length, block) == want
    touched = [(first + length - 1) // block - first // block + 1 for first in range(0, 64 * length, length)]
    assert max(touched) <= want


# ------------------------------------------------------------------------------------------------- classes of arrays
class Own(np.ndarray[Any, Any]):
    """A user's class of arrays."""


def test_operands_of_a_users_class_are_computed_with_as_plain_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.ones((1, 1, 4, 8)).view(Own)
    call = asked(monkeypatch, "forward", lambda: bg.attention(q, q, q))
    assert type(call.q) is type(call.k) is type(call.v) is type(call.out) is np.ndarray
    assert type(bg.attention(q, q, q)) is np.ndarray


# ------------------------------------------------------------------------------------------------- limits of a cache
def test_a_sequence_of_a_cache_has_fewer_than_2_to_the_30_tokens() -> None:
    cache = KVCache(1, 1, 2**30 - 1, 1, page=256, pages=1, device="cpu")
    assert cache.capacity == 2**30 - 1 and cache.table.shape == (1, 2**22)
    with pytest.raises(ValueError, match=r"capacity: wanted less than 2\*\*30 tokens, got 1073741824"):
        KVCache(1, 1, 2**30, 1, page=256, pages=1, device="cpu")


def test_a_cache_has_fewer_than_2_to_the_31_tokens_in_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    xp = SimpleNamespace(empty=lambda shape, dtype: shape, zeros=np.zeros)
    monkeypatch.setattr(type(HOST), "xp", xp)
    assert KVCache(1, 2**23 - 1, 256, 8, page=256, pages=1, device="cpu").k == (1, 2**23 - 1, 256, 8)
    with pytest.raises(ValueError, match=r"wanted less than 2\*\*31 tokens .* got 2147483648"):
        KVCache(1, 2**23, 256, 8, page=256, pages=1, device="cpu")
    assert KVCache(2, 2**22 - 1, 256, 8, device="cpu").k == (2, 2**22 - 1, 256, 8)
    with pytest.raises(ValueError, match=r"wanted less than 2\*\*31 tokens .* got 2147483648"):
        KVCache(2, 2**22, 256, 8, device="cpu")


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
def test_a_page_is_a_power_of_two_from_16_to_256(page: int) -> None:
    assert KVCache(1, 1, 300, 8, page=page, device="cpu").pages == -(-300 // page)
    for wrong in (8, 15, 17, 48, 255, 512):
        with pytest.raises(ValueError, match="page: wanted a power of two from 16 to 256"):
            KVCache(1, 1, 300, 8, page=wrong, device="cpu")


def test_decode_counts_keys_up_to_2_to_the_34(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, q = cache_and_queries()
    for block, most in ((16, 2**30), (64, 2**28)):
        blocks = np.broadcast_to(np.int32(0), (1, 1, most))
        call = asked(
            monkeypatch, "decode", lambda b=blocks, n=block: bg.attention_decode(q, cache, blocks=b[..., 1:], block=n)
        )
        assert call.block == block and call.blocks.shape == (1, 1, most - 1)
        with pytest.raises(ValueError, match=r"blocks: wanted fewer than 2\*\*34 keys in all"):
            bg.attention_decode(q, cache, blocks=blocks, block=block)


def test_decode_takes_1_to_16_queries() -> None:
    cache, _ = cache_and_queries()
    for queries in (1, 16):
        q = np.ones((2, 4, queries, 8), np.float32)
        assert bg.attention_decode(q, cache).shape == q.shape
    with pytest.raises(ValueError, match="q: wanted 1 to 16 queries for each sequence, got 17"):
        bg.attention_decode(np.ones((2, 4, 17, 8), np.float32), cache)


# ------------------------------------------------------------------------------------------------- what BLAS reads
def strided(shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0) -> Any:
    """Numbers in float32 at these steps of bytes, from a byte on."""
    memory = np.random.default_rng(1).integers(0, 100, 4096).astype(np.uint8)
    return np.ndarray(shape, np.float32, memory.data, first, strides)


@pytest.mark.parametrize(
    "strides, first, direct",
    [
        *[((512, 256, 16, 4), 0, True), ((512, 256, 32, 4), 0, True), ((0, 0, 16, 4), 0, True)],
        *[((512, 256, 16, 8), 0, False), ((512, 256, 64, 8), 0, False), ((512, 256, 64, -4), 64, False)],
        *[((512, 256, -16, 4), 256, False), ((512, 256, 0, 4), 0, False), ((512, 256, 12, 4), 0, False)],
        *[((512, 256, 18, 4), 0, False), ((512, 256, 4, 16), 0, False), ((512, 256, 16, 4), 2, False)],
    ],
)
def test_rows_that_blas_cannot_read_are_copied(strides: tuple[int, ...], first: int, direct: bool) -> None:
    x = strided((2, 2, 8, 4), strides, first)
    chunk = host_tiles.Chunk([slice(2, 7)], [], 5)
    found = host_tiles.gathered(x, chunk, np.dtype(np.float32))
    np.testing.assert_array_equal(found.copy().view(np.uint32), x[:, :, 2:7].copy().view(np.uint32))
    assert np.shares_memory(found, x) == direct and (direct or found.flags.c_contiguous)
    assert found.flags.aligned and found.strides[3] == 4 and found.strides[2] >= 16
    wide = host_tiles.gathered(x, chunk, np.dtype(np.float64))
    assert wide.dtype == np.float64 and wide.flags.c_contiguous
    several = host_tiles.gathered(x, host_tiles.Chunk([slice(0, 1), slice(3, 5)], [], 3), np.dtype(np.float32))
    np.testing.assert_array_equal(several.view(np.uint32), x[:, :, [0, 3, 4]].copy().view(np.uint32))
