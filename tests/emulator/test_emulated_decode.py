"""decode.cu as it is, launched as it is, on the CPU, beside attention in float64.

What of a cache no query may see is NaN, and every array ends where reading or writing ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from bsrgemm._attention import decode_launch
from bsrgemm._attention.call import DecodeCall
from bsrgemm._kernels import workspace
from bsrgemm.dtypes import BFLOAT16

from . import emulator
from .emulator import Array, guarded

F16 = np.dtype(np.float16)
#: By how much weights are rounded, of the largest value.
ROUNDING = {F16: 2e-3, BFLOAT16: 1.6e-2}


@pytest.fixture(autouse=True)
def emulated(folder: Path) -> Iterator[None]:
    with emulator.emulated(folder, guarded, arch="sm_80"), patch.object(decode_launch, "_plans", {}):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


class Cache:
    """Keys and values of sequences of some lengths, in one piece each or in pages in any order."""

    def __init__(
        self,
        rng: np.random.Generator,
        lengths: list[int],
        heads: int = 1,
        dims: tuple[int, int] = (64, 64),
        dtype: Any = F16,
        capacity: int = 64,
        page: int = 0,
    ) -> None:
        self.lengths, self.kv_heads, self.capacity, self.page = lengths, heads, capacity, page
        self.batch, self.dtype, (self.head_dim, self.value_dim) = len(lengths), np.dtype(dtype), dims
        self.wide = [
            tuple(rng.standard_normal((heads, n, d)).astype(dtype).astype(np.float64) for d in dims) for n in lengths
        ]
        per = -(-capacity // page) if page else 1
        self.pages = self.batch * per + (3 if page else 0)
        order = rng.permutation(self.pages)[: self.batch * per].reshape(self.batch, per).astype(np.int32)
        self.table = guarded(order) if page else None
        stored = [np.full((self.pages, heads, page or capacity, d), np.nan, dtype) for d in dims]
        for b, both in enumerate(self.wide):
            for x, to in zip(both, stored, strict=True):
                for j in range(x.shape[1]):
                    where = (order[b, j // page], j % page) if page else (b, j)
                    to[where[0], :, where[1]] = x[:, j].astype(dtype)
        self.k, self.v = map(guarded, stored)
        self._device_lengths = guarded(np.array(lengths, np.int32))
        self._longest, self._total, self._captured = max(lengths), sum(lengths), False
        cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0))
        self._backend = SimpleNamespace(xp=SimpleNamespace(cuda=cuda))


def attend(q: Any, k: Any, v: Any, seen: Any, scale: float, softcap: float | None) -> tuple[Any, Any]:
    """The result of one head in float64; a query that sees nothing gets 0 and -inf."""
    scores = scale * (q @ k.T)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = np.where(seen, scores, -np.inf)
    top = np.where(seen.any(axis=1), scores.max(axis=1, initial=-np.inf), 0.0)[:, None]
    weights = np.exp(scores - top)
    total = weights.sum(axis=1)
    with np.errstate(divide="ignore"):
        return weights @ v / np.where(total > 0, total, 1)[:, None], np.log(total) + top[:, 0]


def check(
    rng: np.random.Generator, cache: Cache, group: int = 1, queries: int = 1, left: int | None = None,
    softcap: float | None = None, blocks: Any = None, block: int = 16, q: Array | None = None, out: Array | None = None,
    logarithms: bool = True,
) -> None:  # fmt: skip
    B, H, D, D_v = cache.batch, cache.kv_heads, cache.head_dim, cache.value_dim
    if q is None:
        q = guarded(rng.standard_normal((B, H * group, queries, D)).astype(cache.dtype))
    out = guarded(np.full((B, H * group, queries, D_v), 77, cache.dtype)) if out is None else out
    lse = guarded(np.full((B, H * group, queries), 77, np.float32)) if logarithms else None
    scale, window = 0.3, cache.capacity if left is None else left
    kept = None if blocks is None else guarded(np.asarray(blocks, np.int32))
    decode_launch.decode(DecodeCall(q, cache, out, lse, scale, softcap, window, kept, block))  # type: ignore[arg-type]
    assert not any(counters.any() for counters in workspace._zeroed.values())
    largest = max(np.abs(v).max(initial=1) for _, v in cache.wide)
    for b, (k, v) in enumerate(cache.wide):
        place = cache.lengths[b] - queries + np.arange(queries)[:, None]
        key = np.arange(cache.lengths[b])
        seen = (key <= place) & (key >= place - window)
        for h in range(H * group):
            mine = seen
            if blocks is not None:
                named = blocks[b % len(blocks)][h // group % len(blocks[0])]
                mine = seen & np.isin(key // block, named)
            want, want_lse = attend(
                np.asarray(q[b, h]).astype(np.float64), k[h // group], v[h // group], mine, scale, softcap
            )
            got = np.asarray(out[b, h]).astype(np.float64)
            np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDING[cache.dtype] * largest)
            if lse is not None:
                np.testing.assert_allclose(np.asarray(lse[b, h]), want_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 64), (128, 128), (64, 192), (256, 256)], ids=str)
def test_head_dims(dims, rng) -> None:
    check(rng, Cache(rng, [37, 16], 2, dims), group=2)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
def test_groups_queries_and_sequences_of_every_length(dtype, rng) -> None:
    cache = Cache(rng, [0, 1, 15, 16, 17, 64], 2, dtype=dtype)
    for group, queries in ((1, 1), (3, 2), (1, 16), (5, 7)):  # 1 to 35 rows: tiles of 16 and of 32
        check(rng, cache, group, queries)


def test_windows_and_softcap(rng) -> None:
    cache = Cache(rng, [50, 3, 20], 2)
    for left in (0, 5, 17, 40):
        check(rng, cache, 2, 3, left)
    check(rng, cache, 2, 3, softcap=1.5)
    check(rng, cache, 2, 3, logarithms=False)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_reach_the_queries_that_see_them(bad, rng) -> None:
    cache, queries = Cache(rng, [50, 33], 2), 4
    q = guarded(rng.standard_normal((2, 4, queries, 64)).astype(F16))
    for b, length in enumerate(cache.lengths):
        cache.v[b, :, length - 2, 5] = bad  # seen by the last two queries
    out = guarded(np.full(q.shape, 77, F16))
    decode_launch.decode(DecodeCall(q, cache, out, None, 0.3, None, 64))  # type: ignore[arg-type]
    finite = np.ones(out.shape, bool)
    finite[:, :, 2:, 5] = False
    np.testing.assert_array_equal(np.isfinite(out.astype(np.float64)), finite)
    assert (out != 77).all()


@pytest.mark.parametrize("page", [16, 32])
def test_pages_in_any_order(page, rng) -> None:
    cache = Cache(rng, [61, 0, 33], 2, page=page)
    check(rng, cache, 2, 2)
    check(rng, cache, 2, 2, left=20)


@pytest.mark.parametrize("page", [0, 16])
def test_pieces_are_joined_by_the_last_one(page, rng) -> None:
    cache = Cache(rng, [600, 31, 0], 1, capacity=608, page=page)
    check(rng, cache, 2, 2)
    (plan,) = decode_launch._plans.values()
    assert plan.grid[0] > 1
    check(rng, cache, 2, 2, logarithms=False)  # the counters are as they were


def test_many_pieces_of_many_heads_and_rows(rng) -> None:
    """More pieces than a warp has lanes, tiles of rows in each of two heads, and sequences of which one has no key."""
    cache = Cache(rng, [600, 0, 590], 2, capacity=608)
    with patch.object(decode_launch, "pieces_of", lambda *args: (37, 1)):
        check(rng, cache, 9, 4)
    (plan,) = decode_launch._plans.values()
    assert plan.grid == (37, 4, 3)


def test_rising_scores_in_later_tiles_and_pieces(rng) -> None:
    cache = Cache(rng, [400], 1, capacity=400)
    ramp = np.linspace(0.1, 6, 400)
    k = np.sign(rng.standard_normal(64)) * ramp[:, None]
    cache.k[0, 0] = k.astype(F16)
    cache.wide[0] = (np.asarray(cache.k[0]).astype(np.float64), cache.wide[0][1])
    q = guarded(np.sign(k[None, None, :1]).astype(F16))
    check(rng, cache, q=q)


def test_a_key_that_outweighs_all_others(rng) -> None:
    """Wherever it lies in a tile; some rows of a tile see it as the least of all."""
    cache = Cache(rng, [400], 1, capacity=400)
    for key in (16, 23, 105, 204, 399):
        cache.k[0, 0] = 0
        cache.k[0, 0, key] = 1.5
        cache.wide[0] = (np.asarray(cache.k[0]).astype(np.float64), cache.wide[0][1])
        signs = np.where(np.arange(6) % 4 == 3, -1, 1)
        check(rng, cache, 6, q=guarded(np.broadcast_to(signs[:, None, None], (1, 6, 1, 64)).astype(F16)))


@pytest.mark.parametrize("page", [0, 16])
def test_blocks_that_are_kept(page, rng) -> None:
    cache = Cache(rng, [61, 40], 2, page=page)
    check(rng, cache, 2, 1, blocks=[[[2, 0, -1], [3, 1, 99]], [[-1, -1, 0], [-5, 2, 2**31 - 1]]])
    check(rng, cache, 2, 2, blocks=[[[1, 3]]], left=30)
    check(rng, cache, 2, 1, blocks=[[[1, -1]]], block=32) if not page else None


@pytest.mark.races
def test_more_tiles_than_stages(rng) -> None:
    """Each warp of a CTA has twelve tiles, more than it holds at a time, and copies the next one over the last."""
    cache = Cache(rng, [760, 700], 2, capacity=768)
    check(rng, cache, group=2)


def test_lengths_that_only_the_gpu_knows(rng) -> None:
    for lengths in ([300, 0], [1, 17], [768, 767]):
        cache = Cache(rng, lengths, 2, capacity=768)
        cache._captured, cache._longest, cache._total = True, 0, 0
        check(rng, cache, group=2)


def test_strides_of_queries_and_results(rng) -> None:
    cache = Cache(rng, [30, 18], 2)
    numbers = rng.standard_normal((2, 3, 4, 64)).astype(F16)  # queries in front of heads
    room = guarded(np.full((2, 3, 4, 65), 77, F16))
    check(rng, cache, 2, 3, q=guarded(numbers).swapaxes(1, 2), out=room[..., :64].swapaxes(1, 2))
    assert (room[..., 64] == 77).all()
    odd = guarded(rng.standard_normal((2, 4, 3, 2 * 64 + 1)).astype(F16))[..., 1::2]
    check(rng, cache, 2, 3, q=odd)
    even = guarded(rng.standard_normal((2, 4, 3, 2 * 64)).astype(F16))[..., ::2]
    check(rng, cache, 2, 3, q=even)
    for first, *steps in ((1, 1024, 256, 64), (0, 1025, 256, 64), (0, 1024, 257, 64), (0, 1024, 256, 65)):
        room = guarded(rng.standard_normal(2200).astype(F16))[first:]  # one of them is not a multiple of two elements
        check(
            rng, cache, 2, 3, q=np.lib.stride_tricks.as_strided(room, (2, 4, 3, 64), [2 * n for n in (*steps, 1)], True)
        )


def test_tables_lengths_and_blocks_that_were_spoiled_touch_nothing_outside(rng) -> None:
    for page, bad in ((16, -7), (16, 2**31 - 1), (0, -1), (0, 2**31 - 1)):
        cache = Cache(rng, [64, 64], 2, page=page)
        q = guarded(rng.standard_normal((2, 2, 1, 64)).astype(F16))
        out, lse = guarded(np.full((2, 2, 1, 64), 77, F16)), guarded(np.zeros((2, 2, 1), np.float32))
        if page:
            assert cache.table is not None
            cache.table[0, 1] = bad
        else:
            cache._device_lengths[0] = bad  # as if it were 0, or the capacity
        decode_launch.decode(DecodeCall(q, cache, out, lse, 0.1, None, 64))  # type: ignore[arg-type]
        assert np.isfinite(out[1].astype(np.float64)).all() and (out[1] != 77).any()
        if not page and bad < 0:
            assert (out[0] == 0).all() and np.isneginf(lse[0]).all()
