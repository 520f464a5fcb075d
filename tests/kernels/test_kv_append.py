"""All that is promised of kv_append: new tokens at the ends of the sequences of a cache, in place or page by page.

What the card stores is what a cache on the host stores, bit by bit; memory beyond the lengths is NaN and stays so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

from ..devices import Device
from .products import BF16, F16, few_ctas


@dataclass(frozen=True)
class Case:
    """A cache, and the tokens that come: how many, and how many of them each sequence takes."""

    steps: tuple[tuple[int, Any], ...]
    dims: tuple[int, int] = (64, 64)
    dtype: np.dtype[Any] = F16
    page: int | None = None
    batch: int = 3
    heads: int = 2
    capacity: int = 64

    def __str__(self) -> str:
        tokens = "+".join(str(n) for n, _ in self.steps)
        return f"{tokens}-{self.dims[0]}and{self.dims[1]}-{self.dtype}-page{self.page}"


class Both:
    """The same cache on the device and on the host, full of NaN."""

    def __init__(self, device: Device, case: Case) -> None:
        self.device, self.case = device, case
        how = {"value_dim": case.dims[1], "dtype": case.dtype, "page": case.page}
        sizes = case.batch, case.heads, case.capacity, case.dims[0]
        self.card, self.host = (bg.KVCache(*sizes, **how, device=name) for name in ("cuda", "cpu"))
        for cache in (self.card, self.host):
            for x in (cache.k, cache.v):
                x.view(np.uint16)[...] = 0x7FFF

    def tokens(self, rng: np.random.Generator, n: int) -> list[np.ndarray[Any, Any]]:
        shape = self.case.batch, self.case.heads, n
        return [rng.standard_normal((*shape, d)).astype(self.case.dtype) for d in self.case.dims]

    def append(self, k: Any, v: Any, takes: Any = None, **how: Any) -> None:
        self.card.append(self.device.asarray(k), self.device.asarray(v), takes, **how)
        self.host.append(k, v, takes, **how)
        self.check()

    def check(self) -> None:
        """All memory has the same bits, that beyond the lengths included."""
        assert self.card.lengths.tolist() == self.host.lengths.tolist()
        assert self.device.asnumpy(self.card._device_lengths).tolist() == self.host._device_lengths.tolist()
        if self.host.table is not None:
            np.testing.assert_array_equal(self.device.asnumpy(self.card.table), self.host.table)
        for x, y in ((self.card.k, self.host.k), (self.card.v, self.host.v)):
            np.testing.assert_array_equal(self.device.asnumpy(x.view(np.uint16)), y.view(np.uint16))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(23)


GROWING = ((21, [21, 0, 17]), (1, None), (2, [1, 2, 0]), (20, None), (1, None))
LONG = ((37, None), (1, None), (130, [130, 0, 77]), (2, [1, 2, 0]), (1, None), (60, None))


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "case",
    [
        *(Case(GROWING, *how, page=page) for how in (((64, 64), F16), ((80, 16), BF16), ((9, 5), F16))
          for page in (None, 16)),
        *(pytest.param(Case(LONG, (80, 128), BF16, page, capacity=300), marks=pytest.mark.large)
          for page in (None, 16, 64)),
        pytest.param(Case(((2111, None), (800, None)), page=32, batch=5, capacity=3000), marks=pytest.mark.large),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_follow_those_that_are_there(case: Case, device: Device, rng: np.random.Generator) -> None:
    both = Both(device, case)
    for n, takes in case.steps:
        both.append(*both.tokens(rng, n), takes)


def test_operands_of_any_strides_and_addresses(device: Device, rng: np.random.Generator) -> None:
    """Rows in pieces of 16 bytes and element by element; keys and values side by side; backwards."""
    both = Both(device, Case((), batch=2))
    for columns in (131, 136):
        wide = rng.standard_normal((2, 9, 2, columns)).astype(F16)
        on_card = device.asarray(wide)
        for cut in (slice(0, 64), slice(1, 65), slice(columns - 64, None), slice(64, None, -1), slice(0, 128, 2)):
            for x, cache in ((wide, both.host), (on_card, both.card)):
                part = x[..., cut][..., :64]
                cache.append(part, part[:, ::-1], layout="bshd")
            both.check()
            both.card.reset()
            both.host.reset()


@pytest.mark.races
@pytest.mark.before
@pytest.mark.sanitizer
def test_many_rows_are_shared_by_ctas_that_count_themselves(device: Device, rng: np.random.Generator) -> None:
    both = Both(device, Case((), heads=3, page=16))
    for n in (1, 21, 9):
        both.append(*both.tokens(rng, n))


@pytest.mark.emulated
@pytest.mark.races
@pytest.mark.parametrize("most", [1, 2])
def test_few_ctas_do_all_of_the_work(most: int, device: Device, rng: np.random.Generator) -> None:
    both = Both(device, Case((), heads=3, page=16))
    with few_ctas(most):
        for takes in ([5, 0, 9], None):
            both.append(*both.tokens(rng, 9), takes)


@pytest.mark.emulated
def test_the_table_stays_if_there_is_no_memory_for_counters(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence of one CTA needs none."""
    from bsrgemm._kernels import workspace

    def refuse(*args: Any) -> Any:
        raise MemoryError

    both = Both(device, Case((), page=16))
    with monkeypatch.context() as patched:
        patched.setattr(workspace, "_counters_of", refuse)
        both.append(*both.tokens(rng, 1))
        with pytest.raises(MemoryError):
            both.card.append(*map(device.asarray, both.tokens(rng, 21)))
    both.check()
    both.append(*both.tokens(rng, 21))


# ------------------------------------------------------------------------------------------------- graphs
class Graph:
    """An append of a token for each sequence, and a decode, as a graph."""

    def __init__(self, device: Device, cache: bg.KVCache, takes: Any = None) -> None:
        device.needs("sm_80") if not hasattr(device, "card") else None
        self.device, self.cache, self.takes, cupy = device, cache, takes, device.cupy
        self.k, self.v = (cupy.zeros((cache.batch, cache.kv_heads, 1, 64), cache.dtype) for _ in range(2))
        self.q = cupy.zeros((cache.batch, 4 * cache.kv_heads, 1, 64), cache.dtype)
        self.out = cupy.zeros_like(self.q)
        self.graph = device.captured(self.step)

    def step(self) -> None:
        self.cache.append(self.k, self.v, self.takes)
        bg.attention_decode(self.q, self.cache, out=self.out)

    def replay(self, k: Any, v: Any, q: Any) -> Any:
        for to, x in ((self.k, k), (self.v, v), (self.q, q)):
            to[...] = self.device.asarray(x)
        self.device.synchronize()
        self.graph.launch()
        self.device.synchronize()
        return self.device.asnumpy(self.out).astype(np.float32)


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize(
    ("before", "capacity"), [([0, 0], 40), ([1, 30], 70), pytest.param([1500, 2000], 2100, marks=pytest.mark.large)]
)
def test_a_step_is_replayed_as_if_it_were_called(
    before: list[int], capacity: int, page: int | None, device: Device, rng: np.random.Generator
) -> None:
    both = Both(device, Case((), batch=2, page=page, capacity=capacity))
    if max(before):
        both.append(*both.tokens(rng, max(before)), before)
    graph = Graph(device, both.card)
    assert both.card.lengths.tolist() == before  # the capture appends nothing
    both.card.reserve(capacity)
    queries = [rng.standard_normal(graph.q.shape).astype(F16) for _ in range(20)]
    for q in queries[:18]:
        k, v = both.tokens(rng, 1)
        got = graph.replay(k, v, q)
        both.host.append(k, v)
        want = bg.attention_decode(q, both.host).astype(np.float32)
        np.testing.assert_allclose(got, want, rtol=0, atol=4e-3)
    assert not both.card.refused.any()
    for b in range(2):
        for x, y in zip(both.card.gathered(b), both.host.gathered(b), strict=True):
            np.testing.assert_array_equal(device.asnumpy(x), y)
    k, v = both.tokens(rng, 2)
    both.card.append(device.asarray(k), device.asarray(v))  # outside of the graph
    assert both.card.lengths.tolist() == [n + 20 for n in before]
    graph.replay(k[:, :, :1], v[:, :, :1], queries[18])
    both.host.append(k, v)
    both.host.append(k[:, :, :1], v[:, :, :1])
    called = device.asnumpy(bg.attention_decode(device.asarray(queries[19]), both.card)).astype(np.float32)
    want = bg.attention_decode(queries[19], both.host).astype(np.float32)
    np.testing.assert_allclose(called, want, rtol=0, atol=4e-3)


@pytest.mark.sanitizer
@pytest.mark.parametrize(("page", "most"), [(None, 20), (16, 16)])
def test_no_replay_writes_beyond_the_capacity_or_to_pages_of_others(
    page: int | None, most: int, device: Device, rng: np.random.Generator
) -> None:
    both = Both(device, Case((), batch=2, page=page, capacity=20))
    card = both.card
    card.append(*map(device.asarray, both.tokens(rng, 14)), [14, 11])
    graph = Graph(device, card)
    one, two = both.tokens(rng, 1)
    q = rng.standard_normal(graph.q.shape).astype(F16)
    for _ in range(10):
        graph.replay(one, two, q)
    assert card.lengths.tolist() == [most, min(most, 21)]
    assert card.refused.tolist() == [24 - most, max(0, 21 - most)]
    if page:
        for number in {0, 1, 2, 3} - set(device.asnumpy(card.table).ravel().tolist()):
            assert bool((card.k[number].view(np.uint16) == 0x7FFF).all())
    with pytest.raises(ValueError, match="cannot take 7 more"):
        card.append(*map(device.asarray, both.tokens(rng, 7)))
    card.reset(0)
    graph.replay(one, two, q)
    assert card.lengths.tolist()[0] == (0 if page else 1) and card.refused.tolist()[0] == (1 if page else 0)


def test_replays_read_how_many_tokens_each_sequence_takes(device: Device, rng: np.random.Generator) -> None:
    both = Both(device, Case(()))
    takes = device.asarray(np.array([1, 0, 1], np.int32))
    graph = Graph(device, both.card, takes)
    q = np.zeros(graph.q.shape, F16)
    for numbers in ([1, 0, 1], [0, 1, 1], [5, -1, 1]):
        takes[...] = device.asarray(np.array(numbers, np.int32))
        k, v = both.tokens(rng, 1)
        graph.replay(k, v, q)
        both.host.append(k, v, np.clip(numbers, 0, 1))
    both.check()

    def wrong() -> None:
        with pytest.raises(TypeError, match="lengths: wanted int32 on 'cuda' while a graph is captured"):
            both.card.append(graph.k, graph.v, [1, 1, 1])
        with pytest.raises(RuntimeError, match="cannot be read while a graph is captured"):
            both.card.lengths.tolist()

    device.captured(wrong)


@pytest.mark.sanitizer
@pytest.mark.parametrize("page", [None, 16])
def test_lengths_and_pages_that_were_spoiled_are_not_written_to(
    page: int | None, device: Device, rng: np.random.Generator
) -> None:
    """A sequence that is longer than there is room, or whose page is not there, takes nothing and counts its tokens."""
    both = Both(device, Case((), batch=6, page=page))
    tokens = [device.asarray(x) for x in both.tokens(rng, 4)]
    lengths = np.array([60, 61, 64, 65, -1, 2**31 - 1], np.int32)
    both.card.reserve(64)
    graph = device.captured(lambda: both.card.append(*tokens))
    unharmed = device.bystanders()
    both.card._device_lengths[...] = device.asarray(lengths)
    device.synchronize()
    graph.launch()
    device.synchronize()
    assert both.card.refused.tolist() == [0, 4, 4, 4, 4, 4]
    assert device.asnumpy(both.card._device_lengths).tolist() == [64, *lengths[1:].tolist()]
    if page:
        both.card._device_refused[...] = 0
        both.card._device_lengths[...] = 14
        table = device.asnumpy(both.card.table)
        table[:3, 1] = -1, both.card.pages, 2**31 - 1
        both.card.table[...] = device.asarray(table)
        device.synchronize()
        graph.launch()
        device.synchronize()
        assert both.card.refused.tolist() == [4, 4, 4, 0, 0, 0]
    assert unharmed()


# ------------------------------------------------------------------------------------------------- choices
@pytest.mark.parametrize(
    ("rows", "batch", "want"),
    [(1, 1, (1, 1)), (8, 1, (1, 1)), (9, 1, (2, 1)), (80000, 1, (1056, 1)), (80000, 1000, (2, 1000))],
)
def test_ctas_of_an_append(rows: int, batch: int, want: tuple[int, int]) -> None:
    pytest.importorskip("cupy")
    from bsrgemm._attention.decode_kernel import KvAppend

    assert KvAppend("f16").grid(rows, batch, 132) == want
    assert KvAppend("f16").grid(rows, 70000, 132)[1] == 65535
    assert set(KvAppend.every([F16, BF16, np.dtype("f4")])) == {KvAppend("f16"), KvAppend("bf16")}
    assert KvAppend("f16").runs_on("sm_75") and not KvAppend("f16").rare
