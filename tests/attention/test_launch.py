"""What attention and decode remember between calls, on kernels that only write down what they are given.

A launch is the same whether other launches are remembered or none: whatever it depends on is a part of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm import BlockMask, KVCache
from bsrgemm._attention import decode_launch, heuristics
from bsrgemm._attention import launch as attention_launch
from bsrgemm._attention.call import AttentionCall, DecodeCall
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import device, forced_kernel, jit
from bsrgemm.dtypes import BFLOAT16

from ..emulator import emulator
from ..emulator.emulator import Array, put

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
U8 = np.dtype(np.uint8)
SHAPE = (2, 4, 256, 64)
#: What a launch that starts again names: arrays that only a graph would keep.
OPERANDS = (None,) * 5
#: Temporary memory for the sums of pieces.
PARTIAL = put(np.zeros(1 << 22, F32))


class Kernel:
    """Starts nothing, and keeps its name, its launch and its argument."""

    def __init__(self, name: str, started: list[Any]) -> None:
        self.name, self.started = name, started

    def __call__(self, grid: Any, threads: Any, args: tuple[Any, ...], shared_mem: int = 0) -> None:
        self.started.append((self.name, grid, threads, shared_mem, *(x.tobytes() for x in args)))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Any]]:
    found: list[Any] = []
    counters = put(np.zeros(4096, np.int32))
    pieces = PARTIAL, PARTIAL.data.ptr, counters.data.ptr
    with (
        emulator.emulated(tmp_path, arch="sm_90a"),
        patch.object(jit, "load", lambda spec, arch: Kernel(str(spec), found)),
        patch.object(attention_launch, "counters", lambda count: counters),
        patch.object(decode_launch.workspace, "scratch", lambda size, count: pieces),
    ):
        yield found


#: Memory in which operands that begin at the same place lie.
ROOMS = {name: put(np.ones(4 * 2 * 4 * 256 * 64, F16)) for name in ("q", "k", "v", "out")}


def lying(room: str, shape: tuple[int, ...] = SHAPE, dtype: Any = F16, skip: int = 0, pitch: int = 0) -> Array:
    """An array in the named memory, from element `skip` on, whose rows are `pitch` elements apart."""
    columns = shape[-1]
    whole = (*shape[:-1], pitch or columns)
    flat = ROOMS[room].view(dtype).reshape(-1)[skip : skip + int(np.prod(whole))]
    return flat.reshape(whole)[..., :columns]


def usual(**changes: Any) -> AttentionCall:
    operands = {name: lying(name) for name in ROOMS}
    options = {"lse": None, "acc": F32, "scale": 0.1, "softcap": None, "left": 2**30, "right": 2**30}
    return AttentionCall(**{**operands, **options, "bottom_right": True, **changes})


LSE = put(np.zeros(SHAPE[:3], F32))
#: Each beside what is usual.
CHANGES: dict[str, Callable[[], AttentionCall]] = {
    **{f"place of {x}": lambda x=x: usual(**{x: lying(x, skip=64)}) for x in ROOMS},
    **{f"alignment of {x}": lambda x=x: usual(**{x: lying(x, skip=1)}) for x in ROOMS},
    **{f"strides of {x}": lambda x=x: usual(**{x: lying(x, pitch=72)}) for x in ROOMS},
    "queries": lambda: usual(q=lying("q", (2, 4, 200, 64)), out=lying("out", (2, 4, 200, 64))),
    "keys": lambda: usual(k=lying("k", (2, 4, 200, 64)), v=lying("v", (2, 4, 200, 64))),
    "heads of keys": lambda: usual(k=lying("k", (2, 2, 256, 64)), v=lying("v", (2, 2, 256, 64))),
    "head dim": lambda: usual(q=lying("q", (2, 4, 256, 32)), k=lying("k", (2, 4, 256, 32))),
    "value dim": lambda: usual(v=lying("v", (2, 4, 256, 32)), out=lying("out", (2, 4, 256, 32))),
    "dtype": lambda: usual(**{x: lying(x, dtype=BFLOAT16) for x in ROOMS}),
    "dtype of out": lambda: usual(out=lying("out", dtype=BFLOAT16)),
    "lse": lambda: usual(lse=LSE),
    "scale": lambda: usual(scale=0.2),
    "negative scale": lambda: usual(scale=-0.2),
    "softcap": lambda: usual(softcap=3.0),
    "left": lambda: usual(left=17),
    "causal": lambda: usual(right=0),
    "alignment of the band": lambda: usual(right=0, bottom_right=False),
    "mask": lambda: usual(mask=MASK),
    "mask of small blocks": lambda: usual(mask=FINE),
    "mask for each head": lambda: usual(mask=PER_HEAD),
}


def placed(mask: BlockMask) -> BlockMask:
    """A mask whose bits have an address, as on a card."""
    object.__setattr__(mask, "bits", put(mask.bits))
    return mask


MASK = placed(BlockMask.causal(256, block=128, device="cpu"))
FINE = placed(BlockMask.random(256, block=32, per_row=2, device="cpu", seed=1))
PER_HEAD = placed(BlockMask.random(256, block=128, per_row=1, heads=(1, 4), device="cpu", seed=2))


def launches(started: list[Any], call: AttentionCall) -> list[Any]:
    started.clear()
    attention_launch.forward(HOST, call)
    return list(started)


@pytest.mark.parametrize("change", CHANGES)
def test_attention_is_remembered_for_its_operands_only(change: str, started: list[Any]) -> None:
    calls = [usual(), CHANGES[change](), usual()]
    remembered = [launches(started, call) for call in calls]
    fresh = []
    for call in calls:
        attention_launch._plans.clear()
        fresh.append(launches(started, call))
    assert remembered == fresh
    assert remembered[0] == remembered[2] != remembered[1]


def test_another_kernel_that_is_forced_counts_at_once(started: list[Any]) -> None:
    first = launches(started, usual())
    with forced_kernel.force_kernel("AttentionSm80"):
        forced = launches(started, usual())
    assert "attention_sm80" in forced[0][0] and launches(started, usual()) == first != forced


def test_another_device_has_launches_of_its_own(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heuristics, "SHORT_KEYS", 0)  # a kernel whose CTAs claim tiles
    first = launches(started, usual())
    with (
        patch.object(attention_launch.cupy.cuda.runtime, "getDevice", lambda: "another"),
        patch.object(device, "multiprocessors", lambda: 1),
    ):
        other = launches(started, usual())
    assert other[0][1] != first[0][1]  # fewer CTAs for fewer multiprocessors
    assert launches(started, usual()) == first


def of_sequences(count: int) -> AttentionCall:
    """fp8 attention of 256 tokens in `count` sequences, with operands always at the same addresses."""
    bounds = put(np.linspace(0, 256, count + 1).astype(np.int32))
    operands = {name: lying(name, (1, 4, 256, 64), U8) for name in ("q", "k", "v")}
    out = lying("out", (1, 4, 256, 64))
    return usual(**operands, out=out, bounds=(bounds, bounds), fp8=True)


def test_a_temporary_copy_at_the_same_place_has_the_map_of_its_own_shape(started: list[Any]) -> None:
    """The transposed values of other sequences are longer; CuPy's pool gives them the memory of the last ones."""
    temporary = put(np.zeros(1 << 20, U8))

    def empty(shape: Any, dtype: Any) -> Array:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return temporary[:size].view(dtype).reshape(shape)

    lists = put(np.zeros(64, np.int32))
    sequences = attention_launch.mask_tiles.sequences

    def at_one_place(*args: Any) -> list[Any]:
        found = sequences(*args)
        return [lists[:32][: len(found[0])], lists[32:][: len(found[1])]]

    with (
        patch.object(attention_launch.cupy, "empty", empty),
        patch.object(attention_launch.mask_tiles, "sequences", at_one_place),
    ):
        calls = [of_sequences(1), of_sequences(3), of_sequences(1)]
        remembered = [launches(started, call) for call in calls]
        fresh = []
        for call in calls:
            attention_launch._plans.clear()
            fresh.append(launches(started, call))
    maps = [found[-1][4][2 * 128 : 3 * 128] for found in remembered]
    assert maps == [found[-1][4][2 * 128 : 3 * 128] for found in fresh]
    assert maps[0] == maps[2] != maps[1]


# ------------------------------------------------------------------------------------------------- decode
def cache_of(batch: int = 2, kv_heads: int = 2, head_dim: int = 64, value_dim: int = 64, tokens: int = 500) -> KVCache:
    """A cache with `tokens` tokens in each sequence, whose arrays have addresses."""
    cache = KVCache(batch, kv_heads, 4096, head_dim, value_dim=value_dim, dtype="float16", device="cpu")
    for name in ("k", "v", "_device_lengths"):
        setattr(cache, name, put(getattr(cache, name)))
    cache._lengths[:] = tokens
    cache._longest, cache._total = tokens, batch * tokens
    return cache


CACHE = cache_of()


def decoding(cache: KVCache = CACHE, heads: int = 4, queries: int = 1, **changes: Any) -> DecodeCall:
    q = put(np.ones((cache.batch, heads, queries, cache.head_dim), F16))
    out = put(np.ones((cache.batch, heads, queries, cache.value_dim), F16))
    options = {"lse": None, "scale": 0.1, "softcap": None, "left": 4096}
    return DecodeCall(**{"q": q, "cache": cache, "out": out, **options, **changes})


BLOCKS = put(np.arange(8, dtype=np.int32).reshape(1, 1, 8))
DECODES: dict[str, Callable[[], DecodeCall]] = {
    "queries": lambda: decoding(queries=5),
    "heads": lambda: decoding(heads=64),
    "batch": lambda: decoding(cache_of(batch=3)),
    "heads of the cache": lambda: decoding(cache_of(kv_heads=4)),
    "head dim": lambda: decoding(cache_of(head_dim=128)),
    "value dim": lambda: decoding(cache_of(value_dim=128)),
    "tokens": lambda: decoding(cache_of(tokens=4000)),
    "left": lambda: decoding(left=31),
    "scale": lambda: decoding(scale=0.7),
    "softcap": lambda: decoding(softcap=2.0),
    "blocks": lambda: decoding(blocks=BLOCKS, block=32),
    "size of blocks": lambda: decoding(blocks=BLOCKS, block=64),
}


@pytest.mark.parametrize("change", DECODES)
def test_decode_is_remembered_for_its_operands_only(change: str, started: list[Any]) -> None:
    common = decoding()
    calls = [common, DECODES[change](), replace(common)]

    def launched(call: DecodeCall) -> Any:
        started.clear()
        decode_launch.decode(call)
        return list(started)

    remembered = [launched(call) for call in calls]
    fresh = []
    for call in calls:
        decode_launch._plans.clear()
        fresh.append(launched(call))
    assert remembered == fresh
    assert remembered[0] == remembered[2] != remembered[1]


def paged(width: int) -> KVCache:
    cache = cache_of()
    cache.table = put(np.zeros((2, width), np.int32))
    return cache


#: Calls that differ in what calls of one kind may differ in: addresses, lengths, the table of pages.
SAME_KIND: dict[str, Callable[[], DecodeCall]] = {
    "addresses": decoding,
    "another cache": lambda: decoding(cache_of()),
    "tokens": lambda: decoding(cache_of(tokens=4000)),
    "few tokens": lambda: decoding(cache_of(tokens=1)),
    "a table": lambda: decoding(paged(3)),
    "a wider table": lambda: decoding(paged(5)),
}


@pytest.mark.parametrize("change", SAME_KIND)
def test_decodes_of_one_kind_share_what_is_prepared_and_start_the_same(change: str, started: list[Any]) -> None:
    common, prepared = decoding(), {}  # type: ignore[var-annotated]
    calls = [common, common, SAME_KIND[change](), common]
    for call in calls:
        decode_launch.decode(replace(call, prepared=prepared))
    for call in calls:
        decode_launch.decode(call)
    assert started[:4] == started[4:] and started[0] == started[1] == started[3] != started[2]
    with patch.multiple(decode_launch, _plan_for=None, _template=None):
        decode_launch.decode(replace(common, prepared=prepared))
    assert started[-1] == started[0]
    with patch.object(decode_launch, "_plans", {}):  # as for another card: nothing of this one is started
        decode_launch.decode(replace(common, prepared=prepared))
        assert len(decode_launch._plans) == 1
    with patch.object(decode_launch, "_MOST_PLANS", 1):
        decode_launch.decode(replace(decoding(cache_of(tokens=90)), prepared=prepared))
    assert len(prepared) == 1


def test_another_device_has_decodes_of_its_own(started: list[Any]) -> None:
    prepared: dict[Any, Any] = {}
    for number in (0, 1, 0):
        with patch.object(decode_launch.cupy.cuda.runtime, "getDevice", lambda number=number: number):
            decode_launch.decode(decoding(prepared=prepared))
    assert len(prepared) == 2


# --------------------------------------------------------------------------------------- launches that start again
@pytest.mark.parametrize("change", ["usual", "mask", "causal", "lse", "softcap"])
def test_a_launch_that_starts_again_is_the_same(change: str, started: list[Any]) -> None:
    call = usual() if change == "usual" else CHANGES[change]()
    launch = attention_launch.forward(HOST, call)
    assert launch is not None and launch.start(OPERANDS) and launch.start(OPERANDS)
    assert started[0] == started[1] == started[2]


@pytest.mark.parametrize("kernel", ["AttentionSm90", "AttentionSm80", "AttentionSimt"])
@pytest.mark.parametrize("change", [{}, {"lse": LSE}, {"mask": MASK}, {"out": lying("out", dtype=BFLOAT16)}], ids=str)
def test_a_launch_that_is_moved_is_that_of_its_operands(change: Any, kernel: str, started: list[Any]) -> None:
    there = {name: lying(name, skip=64 * (n + 1)) for n, name in enumerate(ROOMS)}
    if "out" in change:
        there["out"] = lying("out", skip=256, dtype=BFLOAT16)
    if "lse" in change:
        there["lse"] = put(np.zeros(SHAPE[:3], F32))
    with forced_kernel.force_kernel(kernel):
        launch, other = (attention_launch.forward(HOST, usual(**(change | x))) for x in ({}, there))
        assert launch is not None and other is not None
        lse = there.get("lse")
        places = (*(there[name].data.ptr for name in ("q", "k", "v", "out")), 0 if lse is None else lse.data.ptr)
        moving = launch.movable()
        for at in (places, (16, 32, 48, 64, 0), places):
            moving.move(at)
            assert moving.start(OPERANDS)
        kept = moving.kept()
        moving.move((16, 32, 48, 64, 0))  # changes nothing about one that is kept
        assert kept.start(OPERANDS) and launch.start(OPERANDS)
    assert started[2] == started[4] == started[5] == started[1] != started[0] == started[6]
    assert started[3] != started[2]


def test_a_launch_that_moves_takes_the_counters_of_the_stream_it_starts_on(started: list[Any]) -> None:
    launch = attention_launch.forward(HOST, usual())
    assert launch is not None
    moving, others = launch.movable(), put(np.zeros(4096, np.int32))
    moving.move((*(lying(name).data.ptr for name in ROOMS), 0))
    with patch.object(attention_launch, "counters", lambda count: others):
        assert moving.start(OPERANDS) and moving.start(OPERANDS) and moving.kept().start(OPERANDS)
        attention_launch.forward(HOST, usual())
    assert moving.start(OPERANDS) and launch.start(OPERANDS)
    first, again, twice, kept, fresh, back, old = started
    assert first == back == old != again == twice == kept == fresh


def test_a_launch_takes_the_counters_of_the_stream_it_starts_on(started: list[Any]) -> None:
    launch = attention_launch.forward(HOST, usual())
    assert launch is not None
    others = put(np.zeros(4096, np.int32))
    with patch.object(attention_launch, "counters", lambda count: others):
        assert launch.start(OPERANDS)
        packed = launch.argument[1]
        assert launch.argument[0] == others.data.ptr  # the next start on this stream packs nothing
        attention_launch.forward(HOST, usual())
    assert launch.start(OPERANDS)
    assert launch.argument[1] is not packed
    first, again, fresh, back = started
    assert first == back != again == fresh


def test_a_launch_does_not_start_on_another_device_or_under_another_kernel(started: list[Any]) -> None:
    launch = attention_launch.forward(HOST, usual())
    assert launch is not None
    with patch.object(attention_launch.cupy.cuda.runtime, "getDevice", lambda: "another"):
        assert not launch.start(OPERANDS)
    with forced_kernel.force_kernel("AttentionSm80"):
        assert not launch.start(OPERANDS)
    assert len(started) == 1 and launch.start(OPERANDS)


def test_a_launch_waits_for_the_lists_of_its_mask(started: list[Any]) -> None:
    launch = attention_launch.forward(HOST, CHANGES["mask"]())
    assert launch is not None and launch.lists is not None
    with patch.object(type(launch.lists), "get", autospec=True) as waited:
        assert launch.start(OPERANDS)
    waited.assert_called_once_with(launch.lists)


def test_sequences_and_copies_are_launched_anew(started: list[Any]) -> None:
    assert attention_launch.forward(HOST, of_sequences(2)) is None


# ------------------------------------------------------------------------------------------------- details
def test_what_the_copy_engine_cannot_read_is_copied(started: list[Any]) -> None:
    fits = lying("q")
    assert attention_launch.readable(fits) is fits
    values = np.arange(2 * 4 * 5 * 37, dtype=F16).reshape(2, 4, 5, 37)
    for x in (put(values), put(values)[..., ::-1], put(values)[:, ::2], put(values.astype(U8))):
        copy = attention_launch.readable(x)
        np.testing.assert_array_equal(copy, x)
        assert copy.dtype == x.dtype and attention_launch._mappable(copy) and not attention_launch._mappable(x)
        pitch = 40 if x.itemsize == 2 else 48  # a row begins at a multiple of 16 bytes
        assert copy.strides[2] == pitch * x.itemsize


def described(
    strides: tuple[int, ...] = (4096, 1024, 128, 2), shape: tuple[int, ...] = (2, 4, 8, 64), ptr: int = 256
) -> Any:
    return SimpleNamespace(shape=shape, strides=strides, itemsize=2, data=SimpleNamespace(ptr=ptr))


def test_the_copy_engine_reads_contiguous_rows_at_multiples_of_16_bytes() -> None:
    fits = attention_launch._mappable
    assert fits(described()) and fits(described(ptr=16)) and not fits(described(ptr=8)) and not fits(described(ptr=257))
    apart = (4096, 1024, 128, 4)
    assert not fits(described(apart)) and fits(described(apart, (2, 4, 8, 1)))


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize(
    "step, works",
    [(16, True), (2**40 - 16, True), (0, False), (-16, False), (8, False), (24, False), (2**40, False), (2**41, False)],
)
def test_the_copy_engine_takes_steps_of_16_bytes_below_2_to_the_40(axis: int, step: int, works: bool) -> None:
    strides, shape = [4096, 1024, 128, 2], [2, 4, 8, 64]
    strides[axis] = step
    assert attention_launch._mappable(described(tuple(strides))) is works
    shape[axis] = 1
    assert attention_launch._mappable(described(tuple(strides), tuple(shape)))  # no step is made


@pytest.mark.parametrize(
    "block, stored, fine",
    [
        *[((64, 64), 48, True), ((64, 64), 49, False), ((64, 64), 0, True)],
        *[((128, 128), 0, False), ((64, 128), 24, True), ((64, 128), 25, False), ((128, 64), 24, True)],
        *[((256, 112), 9, True), ((256, 112), 10, False), ((256, 128), 1, False)],
    ],
)
def test_a_mask_of_small_blocks_is_fine_if_half_of_them_are_stored_at_most(
    block: tuple[int, int], stored: int, fine: bool
) -> None:
    """The mask is 250 x 250 in 2 x 3 patterns."""
    mask = SimpleNamespace(block=block, shape=(250, 250), indices=range(stored), heads=(2, 3))
    assert attention_launch._is_fine(mask) is fine  # type: ignore[arg-type]


def test_nothing_is_launched_for_nothing(started: list[Any]) -> None:
    none = {"v": lying("v", (2, 4, 256, 0)), "out": lying("out", (2, 4, 256, 0))}
    assert not launches(started, usual(**none))
    assert launches(started, usual(**none, lse=LSE))  # the logarithms are wanted
    empty = {"q": lying("q", (2, 4, 0, 64)), "out": lying("out", (2, 4, 0, 64))}
    assert not launches(started, usual(**empty)) and not launches(started, usual(**empty, lse=LSE[:, :, :0]))


def test_without_keys_the_result_is_0_and_its_logarithms_are_minus_infinity(started: list[Any]) -> None:
    out, lse = put(np.ones(SHAPE, F16)), put(np.ones(SHAPE[:3], F32))
    keys = {name: lying(name, (2, 4, 0, 64)) for name in ("k", "v")}
    assert not launches(started, usual(**keys, out=out, lse=lse))
    assert not out.any() and np.isneginf(lse).all()
    out[...] = 1
    assert not launches(started, usual(**keys, out=out)) and not out.any()


@pytest.mark.parametrize("kernel", ["AttentionSm90", "AttentionSm80", "AttentionSimt"])
def test_a_kernel_is_allowed_the_shared_memory_that_it_is_launched_with(kernel: str, started: list[Any]) -> None:
    with forced_kernel.force_kernel(kernel):
        launches(started, usual())
    (plan,) = attention_launch._plans.values()
    allowed = getattr(plan.kernel, "max_dynamic_shared_size_bytes", 0)
    assert allowed == plan.shared_bytes == started[0][3] and (allowed > 0) == (kernel != "AttentionSimt")


def test_decode_is_allowed_the_shared_memory_that_it_is_launched_with(started: list[Any]) -> None:
    decode_launch.decode(decoding())
    (plan,) = decode_launch._plans.values()
    assert plan.kernel.max_dynamic_shared_size_bytes == plan.shared_bytes == started[0][3] > 0
