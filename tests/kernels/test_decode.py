"""All that is promised of decode: attention for the last queries of each sequence of a cache, up to its own length.

What of a cache no query may see is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm.dtypes import DEVICE_DTYPES

from ..devices import Device
from .products import BF16, F16

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
Seen = Callable[[int, int, int], np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Case:
    """A cache, and queries at the ends of its sequences."""

    lengths: tuple[int, ...]
    dtype: np.dtype[Any] = F16
    heads: int = 2
    #: query heads for each head of the cache
    group: int = 2
    queries: int = 1
    head_dim: int = 64
    value_dim: int = 0
    page: int | None = None
    capacity: int = 0

    def __str__(self) -> str:
        said = ["+".join(map(str, self.lengths)), str(self.dtype), f"{self.heads}x{self.group}x{self.queries}"]
        said += [f"{self.head_dim}and{self.value_dim or self.head_dim}"]
        return "-".join([*said, *([f"page{self.page}"] if self.page else [])])


class Filled:
    """A case on a device, and its numbers on the host."""

    def __init__(self, device: Device, rng: np.random.Generator, case: Case) -> None:
        self.device, self.case = device, case
        batch, D, D_v, longest = len(case.lengths), case.head_dim, case.value_dim or case.head_dim, max(case.lengths)
        sizes = {"value_dim": D_v, "dtype": case.dtype, "page": case.page}
        self.cache = bg.KVCache(batch, case.heads, case.capacity or max(longest, 1), D, **sizes, device="cuda")
        self.cache._free = rng.permutation(self.cache.pages).tolist()  # pages come in any order
        for x in (self.cache.k, self.cache.v):
            x.view(np.uint16)[...] = 0x7FFF  # NaN of both types
        self.k, self.v = (rng.standard_normal((batch, case.heads, longest, d)).astype(case.dtype) for d in (D, D_v))
        self.cache.append(device.asarray(self.k), device.asarray(self.v), case.lengths)
        q = rng.standard_normal((batch, case.heads * case.group, case.queries, D)).astype(case.dtype)
        self.ask(q)

    def ask(self, q: np.ndarray[Any, Any]) -> None:
        """Take other queries."""
        self.host_q, self.q = q, self.device.asarray(q)

    def check(self, seen: Seen | None = None, lengths: Any = None, **how: Any) -> Any:
        """Decode and compare with float64; `seen(b, h, i)` are the keys of query i of head h, by default all up to it.

        Weights and the result are rounded to the element type.
        """
        case, lengths = self.case, self.case.lengths if lengths is None else lengths
        out, lse = bg.attention_decode(self.q, self.cache, return_lse=True, **how)
        got, got_lse = self.device.asnumpy(out).astype(np.float64), self.device.asnumpy(lse)
        scale, softcap = how.get("scale", 1 / math.sqrt(case.head_dim)), how.get("softcap")
        unit = float(ml_dtypes.finfo(case.dtype).eps)
        for b, h, i in np.ndindex(*self.host_q.shape[:3]):
            place = lengths[b] - self.host_q.shape[2] + i
            keys = np.arange(place + 1) if seen is None else seen(b, h, i)
            if not len(keys):
                assert not got[b, h, i].any() and got_lse[b, h, i] == -np.inf
                continue
            k, v = (x[b, h // case.group, keys].astype(np.float64) for x in (self.k, self.v))
            s = scale * (k @ self.host_q[b, h, i].astype(np.float64))
            s = s if softcap is None else softcap * np.tanh(s / softcap)
            p = np.exp(s - s.max())
            want = p / p.sum() @ v
            bound = unit * (p / p.sum() @ np.abs(v) + np.abs(want)) + 1e-5
            assert (np.abs(got[b, h, i] - want) <= bound).all(), (b, h, i)
            np.testing.assert_allclose(got_lse[b, h, i], s.max() + np.log(p.sum()), atol=1e-4, rtol=1e-5)
        return out

    def up_to(self, *, left: int) -> Seen:
        """The keys that queries see in a window."""

        def seen(b: int, h: int, i: int) -> np.ndarray[Any, Any]:
            place = self.case.lengths[b] - self.case.queries + i
            return np.arange(max(0, place - left), place + 1)

        return seen


def pieces() -> int:
    """Among how many CTAs the keys of a head were divided by the last decode of a new kind."""
    from bsrgemm._attention.decode_kernel import CALLS

    return int(next(x.value.launch for x in reversed(CALLS._found.values()) if hasattr(x.value, "launch")).grid[0])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def cases(*every: Case, large: tuple[Case, ...] = ()) -> Any:
    beyond = [pytest.param(case, marks=pytest.mark.large, id=f"large-{case}") for case in large]
    return pytest.mark.parametrize("case", [*(pytest.param(x, id=str(x)) for x in every), *beyond])


# ------------------------------------------------------------------------------------------------- results
@pytest.mark.sanitizer
@cases(
    *(Case((37, 16), head_dim=D, value_dim=D_v) for D, D_v in ((64, 64), (80, 80), (96, 64), (64, 192), (256, 256))),
    *(Case((0, 1, 15, 16, 17, 64), dtype) for dtype in (F16, BF16)),
    *(Case((0, 16, 64), heads=2, group=group, queries=queries) for group, queries in ((3, 2), (1, 16), (5, 7))),
    *(Case((61, 0, 33), dtype, queries=2, page=page) for dtype, page in ((F16, 16), (BF16, 32))),
    large=(
        *(Case((257, 0, 1, 16, 129), d, 2, 4, 1, 128, page=p, capacity=300) for d in (F16, BF16) for p in (None, 64)),
        *(Case((77, 300), F16, 2, 4, 2, D, D_v, 32) for D in HEAD_DIMS for D_v in (D, 64, 128)),
        *(
            Case((200, 33, 2), group=group, queries=queries, head_dim=D)
            for D in (64, 80, 96, 128, 256)
            for group, queries in ((1, 1), (3, 5), (8, 4), (16, 1), (20, 3), (2, 16))
        ),
        *(Case((n, n // 3), heads=heads, group=1, head_dim=128) for n in (8192, 5000, 130001) for heads in (1, 8)),
    ),
)
def test_each_query_sees_the_keys_up_to_it(case: Case, device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_80")
    Filled(device, rng, case).check()
    assert pieces() > 1 or max(case.lengths) < 5000


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("left", [0, 5, 17, 40])
def test_a_window_leaves_out_what_lies_before_it(
    left: int, page: int | None, device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_80")
    one = Filled(device, rng, Case((50, 3, 20), queries=3, page=page))
    one.check(one.up_to(left=left), window=(left, 0))


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (3, 1)], ids=str)
def test_sparse_decode_reads_the_blocks_that_are_kept(
    shape: tuple[int, int], page: int | None, device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_80")
    block = page or 32
    one = Filled(device, rng, Case((130, 61, 20), queries=2, page=page))
    blocks = np.full((*shape, 9), -1, np.int32)
    for numbers in blocks.reshape(-1, 9):
        numbers[2:5] = rng.permutation(-(-130 // block))[:3]
        numbers[5:7] = -5, 2**31 - 1

    def seen(b: int, h: int, i: int) -> np.ndarray[Any, Any]:
        keys = np.arange(one.case.lengths[b] - 1 + i)
        return keys[np.isin(keys // block, blocks[b % shape[0], h // 2 % shape[1]])]

    one.check(seen, blocks=device.asarray(blocks), block=block)
    strided = device.asarray(np.repeat(blocks, 2, axis=2))[:, :, ::2]
    one.check(seen, blocks=strided, block=block)
    one.check(lambda b, h, i: seen(b, h, i)[seen(b, h, i) >= one.case.lengths[b] - 2 + i - 30],
              blocks=strided, block=block, window=(30, 0))  # fmt: skip


def test_softcap_and_any_scale(device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_80")
    one = Filled(device, rng, Case((50, 3, 20), queries=3))
    one.check(softcap=1.5)
    one.check(scale=-0.3)
    one.check(scale=0.0, softcap=30.0)
    assert bg.attention_decode(one.q, one.cache).shape == one.q.shape  # without logarithms


@pytest.mark.parametrize("page", [None, 16])
def test_pieces_are_joined_by_the_last_one(page: int | None, device: Device, rng: np.random.Generator) -> None:
    """The counters are as they were afterwards: the next launch joins its pieces too."""
    device.needs("sm_80")
    one = Filled(device, rng, Case((600, 31, 0), heads=1, queries=2, page=page, capacity=608))
    for _ in range(2):
        one.check()
    assert pieces() > 1


@pytest.mark.emulated
def test_many_pieces_of_many_heads_and_rows(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pieces than a warp has lanes, tiles of rows in each of two heads, and sequences of which one has no key."""
    from bsrgemm._attention import decode_kernel

    monkeypatch.setattr(decode_kernel, "pieces_of", lambda *args: (37, 1))
    Filled(device, rng, Case((600, 0, 590), group=9, queries=4, capacity=608)).check()
    assert device.card.launches[-1].grid == (37, 4, 3)  # type: ignore[attr-defined]


def test_rising_scores_in_later_tiles_and_pieces(device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_80")
    one = Filled(device, rng, Case((400,), heads=1, group=1))
    one.k[0, 0] = (np.sign(rng.standard_normal(64)) * np.linspace(0.1, 6, 400)[:, None]).astype(F16)
    one.cache.k[0, 0] = device.asarray(one.k[0, 0])
    one.ask(np.sign(one.k[:, :, :1]))
    one.check(scale=0.3)


def test_a_key_that_outweighs_all_others(device: Device, rng: np.random.Generator) -> None:
    """Wherever it lies in a tile; some rows of a tile see it as the least of all."""
    device.needs("sm_80")
    one = Filled(device, rng, Case((400,), heads=1, group=6))
    signs = np.where(np.arange(6) % 4 == 3, -1, 1)
    one.ask(np.broadcast_to(signs[:, None, None], (1, 6, 1, 64)).astype(F16))
    for key in (16, 23, 105, 204, 399):
        one.k[0, 0] = 0
        one.k[0, 0, key] = 1.5
        one.cache.k[0, 0] = device.asarray(one.k[0, 0])
        one.check(scale=0.3)


@pytest.mark.races
@pytest.mark.before
@pytest.mark.sanitizer
def test_more_tiles_than_stages(device: Device, rng: np.random.Generator) -> None:
    """Each warp of a CTA has twelve tiles, more than it holds at a time, and copies the next one over the last."""
    device.needs("sm_80")
    Filled(device, rng, Case((760, 700), capacity=768)).check()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_reach_the_queries_that_see_them(
    bad: float, device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_80")
    one = Filled(device, rng, Case((50, 33), queries=4))
    clean = device.asnumpy(bg.attention_decode(one.q, one.cache))
    for b, length in enumerate(one.case.lengths):
        one.cache.v[b, :, length - 2, 5] = bad  # seen by the last two queries
    got = device.asnumpy(bg.attention_decode(one.q, one.cache)).astype(np.float64)
    finite = np.ones(got.shape, bool)
    finite[:, :, 2:, 5] = False
    np.testing.assert_array_equal(np.isfinite(got), finite)
    np.testing.assert_array_equal(got[finite], clean[finite])


# ------------------------------------------------------------------------------------------------- operands
def _lying(room: Any, first: int, batch: int, head: int, row: int, column: int) -> Any:
    """Two batches of four heads with three rows of 64 elements that are so many elements apart, from the first on."""
    x = room[first : first + 2 * batch].reshape(2, batch)[:, : 4 * head].reshape(2, 4, head)[:, :, : 3 * row]
    return x.reshape(2, 4, 3, row)[..., ::column][..., :64]


def test_a_query_whose_scores_are_all_minus_infinity_has_no_softmax(device: Device) -> None:
    """As on the CPU; where it sees one more key, that one counts."""
    k = np.full((2, 1, 20, 64), -np.inf, F16)
    k[1, :, 7] = 1
    found = []
    for where in ("cpu", "cuda"):
        cache = bg.KVCache(2, 1, 64, 64, dtype=F16, device=where)
        tokens = [x if where == "cpu" else device.asarray(x) for x in (k, np.ones_like(k), np.ones((2, 3, 1, 64), F16))]
        cache.append(*tokens[:2])
        out = bg.attention_decode(tokens[2], cache)
        found.append(out if where == "cpu" else device.asnumpy(out))
    assert np.isnan(found[1][0]).all() and (found[1][1] == 1).all()
    np.testing.assert_array_equal(*found)


def test_strides_of_queries_and_results(device: Device, rng: np.random.Generator) -> None:
    """Rows begin at even and odd elements, and lie together or apart; nothing is written between results."""
    device.needs("sm_80")
    one, cupy = Filled(device, rng, Case((30, 18), queries=3)), device.cupy
    want = one.check()
    turned = cupy.ascontiguousarray(one.q.swapaxes(1, 2))
    np.testing.assert_array_equal(
        bg.attention_decode(turned, one.cache, layout="bshd").swapaxes(1, 2).get(), want.get()
    )
    for steps in ((1, 1024, 256, 64, 1), (0, 1025, 256, 64, 1), (0, 1028, 257, 64, 1), (0, 1040, 260, 65, 1),
                  (1, 2064, 516, 129, 2), (0, 2048, 512, 128, 2)):  # fmt: skip
        room, to = (cupy.full(5000, 77, F16) for _ in range(2))
        q, out = _lying(room, *steps), _lying(to, *steps)
        q[...] = one.q
        assert bg.attention_decode(q, one.cache, out=out) is out
        np.testing.assert_array_equal(out.get(), want.get())
        assert int((to == 77).sum()) == to.size - out.size


def test_tables_lengths_and_blocks_that_were_spoiled_touch_nothing_outside(
    device: Device, rng: np.random.Generator
) -> None:
    device.needs("sm_80")
    for page, bad in ((16, -7), (16, 2**31 - 1), (None, -1), (None, 2**31 - 1)):
        one = Filled(device, rng, Case((64, 64), group=1, page=page))
        if page:
            one.cache.table[0, 1] = bad
        else:
            one.cache._device_lengths[0] = bad  # as if it were 0, or the capacity
        unharmed = device.bystanders()
        out, lse = (device.asnumpy(x) for x in bg.attention_decode(one.q, one.cache, return_lse=True))
        assert unharmed() and np.isfinite(out[1].astype(float)).all()
        if not page and bad < 0:
            assert (out[0] == 0).all() and np.isneginf(lse[0]).all()
    one = Filled(device, rng, Case((100, 90), page=16))
    one.cache.table[...] = device.asarray(rng.integers(-(2**31), 2**31, one.cache.table.shape).astype(np.int32))
    blocks = device.asarray(rng.integers(-(2**31), 2**31, (2, 2, 9)).astype(np.int32))
    bg.attention_decode(one.q, one.cache)
    bg.attention_decode(one.q, one.cache, blocks=blocks)
    device.synchronize()


@pytest.mark.large
@pytest.mark.parametrize("page", [None, 16])
def test_results_repeat_bit_by_bit(page: int | None, device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_80")
    one = Filled(device, rng, Case((9000, 4001, 100), head_dim=128, group=4, page=page))
    first, first_lse = bg.attention_decode(one.q, one.cache, return_lse=True)
    for _ in range(200):
        again, lse = bg.attention_decode(one.q, one.cache, return_lse=True)
        assert bool((again.view(np.uint16) == first.view(np.uint16)).all()) and bool((lse == first_lse).all())


# ------------------------------------------------------------------------------------------------- lengths
@pytest.mark.parametrize("page", [None, 16])
def test_prefill_then_decode_grows_in_place(page: int | None, device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_80")
    one = Filled(device, rng, Case((50, 20), page=page, capacity=80))
    k, v, lengths = one.cache.k, one.cache.v, one.case.lengths
    for n in (1, 3, 1):
        new = [rng.standard_normal((2, 2, n, 64)).astype(F16) for _ in range(2)]
        one.k, one.v = (np.concatenate([x, np.zeros_like(y)], axis=2) for x, y in zip((one.k, one.v), new, strict=True))
        for b, length in enumerate(lengths):
            one.k[b, :, length : length + n], one.v[b, :, length : length + n] = new[0][b], new[1][b]
        one.cache.append(*map(device.asarray, new))
        lengths = tuple(length + n for length in lengths)
        one.check(lengths=lengths)
    assert one.cache.k is k and one.cache.v is v


@pytest.mark.parametrize("before", [(300,), (1,)], ids=str)
def test_lengths_that_only_the_gpu_knows(before: tuple[int, ...], device: Device, rng: np.random.Generator) -> None:
    """A captured append grows the sequences in each replay; the launch is divided by the capacity."""
    device.needs("sm_80")
    one = Filled(device, rng, Case(before, heads=1, capacity=768))
    token = device.asarray(np.ones((1, 1, 1, 64), F16))
    graph = device.captured(lambda: one.cache.append(token, token))
    for _ in range(2):
        graph.launch()
    device.synchronize()
    one.k, one.v = (np.concatenate([x, np.ones((1, 1, 2, 64), F16)], axis=2) for x in (one.k, one.v))
    for b, length in enumerate(before):
        one.k[b, :, length : length + 2] = one.v[b, :, length : length + 2] = 1
    one.check(lengths=[n + 2 for n in before])
    assert pieces() > 1


def test_a_captured_decode_follows_the_lengths(device: Device, rng: np.random.Generator) -> None:
    device.needs("sm_80")
    one = Filled(device, rng, Case((300, 200), capacity=310))
    out = device.cupy.empty_like(one.q)
    bg.attention_decode(one.q, one.cache, out=out)
    graph = device.captured(lambda: bg.attention_decode(one.q, one.cache, out=out))
    one.cache.append(*(device.asarray(np.ones((2, 2, 5, 64), F16)) for _ in range(2)))
    out[...] = np.nan
    device.synchronize()
    graph.launch()
    device.synchronize()
    want = device.asnumpy(bg.attention_decode(one.q, one.cache))
    np.testing.assert_allclose(device.asnumpy(out).astype(float), want.astype(float), atol=2e-3)


# ------------------------------------------------------------------------------------------------- refusals
def test_what_the_kernel_cannot_read_is_told(device: Device) -> None:
    cupy = device.cupy
    for dims in ((72, 64), (64, 72)):
        cache = bg.KVCache(1, 1, 16, dims[0], value_dim=dims[1], device="cuda")
        with pytest.raises(ValueError, match=rf"wanted head dims among 64, 80, .* got {dims[0]} for keys, {dims[1]}"):
            bg.attention_decode(cupy.zeros((1, 1, 1, dims[0]), F16), cache)
    with pytest.raises(TypeError, match="dtype: does not support dtype float32"):
        bg.KVCache(1, 1, 16, 64, dtype="float32", device="cuda")
    with pytest.raises(TypeError, match="q: a numpy ndarray cannot meet a cache on 'cuda'"):
        bg.attention_decode(np.zeros((1, 1, 1, 72), F16), cache)
    cache = bg.KVCache(65536, 1, 1, 64, device="cuda")
    with pytest.raises(ValueError, match="wanted at most 65535 sequences and heads by tiles of rows, got 65536, 1"):
        bg.attention_decode(cupy.zeros((65536, 1, 1, 64), F16), cache)


@pytest.mark.emulated
def test_older_cards_are_refused(device: Device) -> None:
    device.needs("sm_75")
    cache = bg.KVCache(1, 1, 16, 64, device="cuda")
    with pytest.raises(RuntimeError, match=r"needs compute capability 8\.0 or newer"):
        bg.attention_decode(device.cupy.zeros((1, 1, 1, 64), F16), cache)


# ------------------------------------------------------------------------------------------------- choices
def test_configs_fit_every_card_and_are_all_listed() -> None:
    pytest.importorskip("cupy")
    from bsrgemm._attention.decode_kernel import Decode

    every = set(Decode.every(DEVICE_DTYPES))
    assert len(every) == 2 * (36 + 16) and set(Decode.every([np.dtype("f4"), F16])) < every
    for kernel in every:
        assert kernel.shared_bytes <= 99 << 10 and kernel.stages >= 2
        assert kernel.ctas("sm_90a") == 2 and kernel.ctas("sm_89") == 1
        assert kernel.runs_on("sm_80") and not kernel.runs_on("sm_75")
        assert kernel.rare == (kernel.head_dim != kernel.value_dim)
    for rows in (1, 16, 17, 64):
        assert Decode.of(F16, 256, 64, rows) in every and Decode.of(F16, 128, 80, rows) in every
    overlapping = replace(next(iter(every)), overlaps=True)
    assert overlapping.spec().overlaps and overlapping not in every


@given(st.integers(0, 10**5), st.integers(1, 64), st.integers(1, 64), st.sampled_from([1, 40, 132, 264]))
def test_pieces_cover_the_longest_sequence(longest: int, batch: int, heads: int, slots: int) -> None:
    pytest.importorskip("cupy")
    from bsrgemm._attention.decode_kernel import pieces_of

    count, tiles = pieces_of(longest, longest * batch, batch, heads, slots)
    assert 1 <= count <= 128 and tiles >= 1 and count * tiles >= longest
    assert count == 1 or tiles >= 8


@pytest.mark.emulated
@pytest.mark.parametrize(("batch", "heads"), [(24, 2), (2, 24)])
def test_few_heads_of_many_sequences_have_other_pieces_than_many_heads_of_few(
    batch: int, heads: int, device: Device
) -> None:
    from bsrgemm._attention.arguments import DECODE
    from bsrgemm._attention.decode_kernel import Decode, pieces_of

    from ..fake_cupy import Policy

    device.needs("sm_90a")
    device.becomes(132)  # type: ignore[attr-defined]
    card = device.card  # type: ignore[attr-defined]
    card.policy = Policy.RECORD
    cache = bg.KVCache(batch, heads, 4096, 64, device="cuda")
    cache._set_lengths(np.full(batch, 4096))
    q = device.cupy.zeros((batch, 2 * heads, 1, 64), F16)
    bg.attention_decode(q, cache)
    kernel, slots = Decode.of(F16, 64, 64, 2), 132 * Decode.of(F16, 64, 64, 2).ctas("sm_90a")
    count, tiles = pieces_of(256, batch * 256, batch, heads, slots)
    (launch,) = card.launches
    assert launch.grid == (count, heads, batch) and launch.shared_bytes == kernel.shared_bytes > 0
    assert int(np.frombuffer(launch.arguments[0], np.int32, 1, DECODE.offsets["piece_tiles"])[0]) == tiles
    assert count != pieces_of(256, batch * 256, heads, batch, slots)[0]
    cache._set_lengths(np.full(batch, 60))  # one piece each, without counters and temporary memory
    bg.attention_decode(q, cache)
    assert card.launches[-1].grid[0] == 1
    partial = np.frombuffer(card.launches[-1].arguments[0], np.int64, 2, DECODE.offsets["partial"])
    assert not partial.any()
