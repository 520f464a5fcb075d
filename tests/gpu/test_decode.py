"""`KVCache` and `attention_decode` on the card, against float64 over the keys that each query sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bsrgemm._attention import decode_config, decode_launch
from bsrgemm._attention.decode import attention_decode
from bsrgemm._attention.kv_cache import KVCache
from bsrgemm.dtypes import BFLOAT16

from .repeats import new_stream

pytestmark = pytest.mark.gpu

F16 = np.dtype(np.float16)
Array = np.ndarray[Any, Any]


class Case:
    """A cache on the card whose memory is NaN beyond the lengths, its tokens on the host, and queries."""

    def __init__(
        self,
        rng: np.random.Generator,
        lengths: list[int],
        *,
        dtype: Any = F16,
        heads: int = 2,
        group: int = 4,
        queries: int = 1,
        head_dim: int = 128,
        value_dim: int | None = None,
        capacity: int | None = None,
        page: int | None = None,
    ) -> None:
        import cupy

        B, D, D_v = len(lengths), head_dim, value_dim or head_dim
        self.lengths, self.group = lengths, group
        self.cache = KVCache(
            B, heads, capacity or max(*lengths, 1), D, value_dim=D_v, dtype=dtype, page=page, device="cuda"
        )
        for x in (self.cache.k, self.cache.v):
            x.view(np.uint16)[...] = 0x7FFF  # NaN of both types
        n = max(lengths)
        self.k, self.v = (rng.standard_normal((B, heads, n, d)).astype(dtype) for d in (D, D_v))
        self.cache.append(cupy.asarray(self.k), cupy.asarray(self.v), lengths)
        self.host_q = rng.standard_normal((B, heads * group, queries, D)).astype(dtype)
        self.q = cupy.asarray(self.host_q)

    def check(self, seen: Callable[[int, int, int], Array] | None = None, **how: Any) -> Any:
        """Compare with float64; `seen(b, h, i)` are the keys of query i of query head h, by default all up to it."""
        out, lse = attention_decode(self.q, self.cache, return_lse=True, **how)
        got, got_lse = out.get().astype(np.float64), lse.get()
        dtype = self.cache.dtype
        scale, softcap = how.get("scale", 1 / math.sqrt(self.k.shape[3])), how.get("softcap")
        for b, h, i in np.ndindex(*self.q.shape[:3]):
            place = self.lengths[b] - self.q.shape[2] + i
            keys = np.arange(place + 1) if seen is None else seen(b, h, i)
            if not len(keys):
                assert not got[b, h, i].any() and got_lse[b, h, i] == -np.inf
                continue
            k, v = (x[b, h // self.group, keys].astype(np.float64) for x in (self.k, self.v))
            s = scale * (k @ self.host_q[b, h, i].astype(np.float64))
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            p = np.exp(s - s.max())
            want = p / p.sum() @ v
            # weights and the result are rounded to the element type
            unit = float(ml_dtypes.finfo(dtype).eps)
            bound = unit * (p / p.sum() @ np.abs(v) + np.abs(want)) + 1e-5
            assert (np.abs(got[b, h, i] - want) <= bound).all(), (b, h, i)
            np.testing.assert_allclose(got_lse[b, h, i], s.max() + np.log(p.sum()), atol=1e-4, rtol=1e-5)
        return out


@pytest.mark.sanitizer
@pytest.mark.parametrize("page", [None, 16, 64])
@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
def test_each_sequence_is_seen_to_its_own_length(rng, dtype, page) -> None:
    case = Case(rng, [257, 0, 1, 16, 129], dtype=dtype, page=page, capacity=300)
    case.check()


@pytest.mark.parametrize("value_dim", [None, 64, 128])
@pytest.mark.parametrize("head_dim", decode_config.HEAD_DIMS)
def test_every_head_dim(rng, head_dim, value_dim) -> None:
    case = Case(rng, [77, 300], head_dim=head_dim, value_dim=value_dim, page=32, queries=2)
    case.check()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("group", "queries"), [(1, 1), (3, 5), (8, 4), (16, 1), (20, 3), (2, 16)])
def test_any_number_of_rows_reads_the_same_keys(rng, group, queries, head_dim) -> None:
    Case(rng, [200, 33, 2], group=group, queries=queries, head_dim=head_dim).check()


@pytest.mark.parametrize("length", [8192, 5000, 130001])
@pytest.mark.parametrize("heads", [1, 8])
def test_long_sequences_come_in_pieces(rng, length, heads) -> None:
    case = Case(rng, [length, length // 3], heads=heads, group=1)
    case.check()
    assert max(plan.grid[0] for plan in decode_launch._plans.values()) > 1


@pytest.mark.parametrize("page", [None, 32])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("left", [0, 7, 100, 1000])
def test_a_window_leaves_out_what_lies_before_it(rng, left, queries, page) -> None:
    case = Case(rng, [300, 90, 3], queries=queries, page=page)

    def seen(b: int, h: int, i: int) -> Array:
        place = case.lengths[b] - queries + i
        return np.arange(max(0, place - left), place + 1)

    case.check(seen, window=(left, 0))


@pytest.mark.parametrize("page", [None, 32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("queries", [1, 3])
def test_sparse_decode_reads_the_blocks_that_are_kept(rng, shape, page, queries) -> None:
    import cupy

    block = page or 48
    case = Case(rng, [900, 500, 20], queries=queries, page=page)
    blocks = np.full((*shape, 12), -1, np.int32)
    for numbers in blocks.reshape(-1, 12):
        numbers[:9] = rng.permutation(-(-900 // block))[:9]
        numbers[9] = 2**31 - 1
    kept = blocks.astype(np.int64)

    def seen(b: int, h: int, i: int) -> Array:
        keys = np.arange(case.lengths[b] - queries + i + 1)
        return keys[np.isin(keys // block, kept[b % shape[0], h // 4 % shape[1]])]

    case.check(seen, blocks=cupy.asarray(blocks), block=block)


def test_softcap_and_a_negative_scale(rng) -> None:
    case = Case(rng, [300, 41])
    case.check(softcap=2.0)
    case.check(scale=-0.3)
    case.check(scale=0.0, softcap=30.0)


def test_any_strides_of_q_and_out(rng) -> None:
    import cupy

    case = Case(rng, [100, 77], queries=3)
    want = attention_decode(case.q, case.cache)
    swapped = cupy.ascontiguousarray(case.q.swapaxes(1, 2))
    got = attention_decode(swapped, case.cache, layout="bshd")
    assert (got.swapaxes(1, 2) == want).all()
    wide = cupy.zeros((2, 8, 3, 2 * 128 + 1), F16)
    odd, out = wide[..., 1::2], cupy.full((2, 8, 3, 2 * 128 + 1), 7, F16)
    odd[...] = case.q
    attention_decode(odd, case.cache, out=out[..., 1::2])
    assert (out[..., 1::2] == want).all() and (out[..., ::2] == 7).all()


def test_nan_reaches_the_queries_that_see_it_and_no_others(rng) -> None:
    case = Case(rng, [64, 50], queries=3)
    clean = attention_decode(case.q, case.cache)
    for b, length in enumerate(case.lengths):
        case.cache.v[b, :, length - 2] = np.nan  # the last but one query and the last see it
    got = attention_decode(case.q, case.cache)
    assert (got[:, :, 0] == clean[:, :, 0]).all()
    assert np.isnan(got[:, :, 1:].get()).all()


@pytest.mark.parametrize("page", [None, 16])
def test_the_same_bits_every_time(rng, page) -> None:
    case = Case(rng, [9000, 4001, 100], page=page)
    first, first_lse = attention_decode(case.q, case.cache, return_lse=True)
    for _ in range(200):
        again, lse = attention_decode(case.q, case.cache, return_lse=True)
        assert (again.view(np.uint16) == first.view(np.uint16)).all()
        assert (lse == first_lse).all()


@pytest.mark.sanitizer
def test_numbers_that_a_user_wrote_into_tables_touch_nothing_outside(rng) -> None:
    import cupy

    case = Case(rng, [100, 90], page=16)
    case.cache.table[...] = cupy.asarray(rng.integers(-(2**31), 2**31, case.cache.table.shape).astype(np.int32))
    blocks = cupy.asarray(rng.integers(-(2**31), 2**31, (2, 2, 9)).astype(np.int32))
    attention_decode(case.q, case.cache)
    attention_decode(case.q, case.cache, blocks=blocks)
    for length in (-5, 2**31 - 1):
        case.cache._device_lengths[...] = length
        attention_decode(case.q, case.cache)
    cupy.cuda.get_current_stream().synchronize()


@pytest.mark.sanitizer
@pytest.mark.parametrize("page", [None, 16])
def test_prefill_then_decode_grows_in_place(rng, page) -> None:
    import cupy

    case = Case(rng, [50, 20], page=page, capacity=80)
    k, v = case.cache.k, case.cache.v
    for n in (1, 3, 1):
        new_k, new_v = (rng.standard_normal((2, 2, n, 128)).astype(F16) for _ in range(2))
        case.k, case.v = (np.concatenate([x, np.zeros((2, 2, n, 128), F16)], axis=2) for x in (case.k, case.v))
        for b, length in enumerate(case.lengths):
            case.k[b, :, length : length + n], case.v[b, :, length : length + n] = new_k[b], new_v[b]
        case.cache.append(cupy.asarray(new_k), cupy.asarray(new_v))
        case.lengths = [length + n for length in case.lengths]
        case.check()
    assert case.cache.k is k and case.cache.v is v
    with pytest.raises(ValueError, match="sequence 0 has 55 tokens and cannot take 40 more"):
        case.cache.append(*(cupy.zeros((2, 2, 40, 128), F16) for _ in range(2)))


def test_a_captured_launch_follows_the_lengths(rng) -> None:
    import cupy

    case = Case(rng, [3000, 2000], capacity=3100)
    out = cupy.empty_like(case.q)
    stream = new_stream()
    with stream:
        attention_decode(case.q, case.cache, out=out)  # warm
        stream.begin_capture()
        attention_decode(case.q, case.cache, out=out)
        graph = stream.end_capture()
        case.cache.append(*(cupy.ones((2, 2, 5, 128), F16) for _ in range(2)))
        out[...] = np.nan
        graph.launch()
        got = out.copy()
        want = attention_decode(case.q, case.cache)
    stream.synchronize()
    np.testing.assert_allclose(got.get().astype(np.float32), want.get().astype(np.float32), atol=2e-3)


def test_a_cache_that_the_kernel_cannot_read_is_told() -> None:
    import cupy

    cache = KVCache(1, 1, 16, 72, device="cuda")
    with pytest.raises(ValueError, match="wanted head dims among 64, 80"):
        attention_decode(cupy.zeros((1, 1, 1, 72), F16), cache)
    with pytest.raises(TypeError, match="dtype: does not support dtype float32"):
        KVCache(1, 1, 16, 64, dtype="float32", device="cuda")
    with pytest.raises(TypeError, match="q: a numpy ndarray cannot meet a cache on 'cuda'"):
        attention_decode(np.zeros((1, 1, 1, 72), F16), cache)
