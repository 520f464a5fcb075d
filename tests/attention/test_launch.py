"""What attention remembers between calls, on kernels that only write down what they are given.

A launch is the same whether other launches are remembered or none: whatever it depends on is a part of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm import BlockMask
from bsrgemm._attention import heuristics
from bsrgemm._attention import launch as attention_launch
from bsrgemm._attention.call import AttentionCall
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import device, forced_kernel, jit
from bsrgemm.dtypes import BFLOAT16

from ..emulator import emulator
from ..emulator.emulator import Array, put

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
U8 = np.dtype(np.uint8)
SHAPE = (2, 4, 256, 64)


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
    with (
        emulator.emulated(tmp_path, arch="sm_90a"),
        patch.object(jit, "load", lambda spec, arch: Kernel(str(spec), found)),
        patch.object(attention_launch, "counters", lambda count: counters),
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


# --------------------------------------------------------------------------------------- launches that start again
@pytest.mark.parametrize("change", ["usual", "mask", "causal", "lse", "softcap"])
def test_a_launch_that_starts_again_is_the_same(change: str, started: list[Any]) -> None:
    call = usual() if change == "usual" else CHANGES[change]()
    launch = attention_launch.forward(HOST, call)
    assert launch is not None and launch.start() and launch.start()
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
            assert moving.start()
        kept = moving.kept()
        moving.move((16, 32, 48, 64, 0))  # changes nothing about one that is kept
        assert kept.start() and launch.start()
    assert started[2] == started[4] == started[5] == started[1] != started[0] == started[6]
    assert started[3] != started[2]


def test_a_launch_that_moves_takes_the_counters_of_the_stream_it_starts_on(started: list[Any]) -> None:
    launch = attention_launch.forward(HOST, usual())
    assert launch is not None
    moving, others = launch.movable(), put(np.zeros(4096, np.int32))
    moving.move((*(lying(name).data.ptr for name in ROOMS), 0))
    with patch.object(attention_launch, "counters", lambda count: others):
        assert moving.start() and moving.start() and moving.kept().start()
        attention_launch.forward(HOST, usual())
    assert moving.start() and launch.start()
    first, again, twice, kept, fresh, back, old = started
    assert first == back == old != again == twice == kept == fresh


def test_a_launch_takes_the_counters_of_the_stream_it_starts_on(started: list[Any]) -> None:
    launch = attention_launch.forward(HOST, usual())
    assert launch is not None
    others = put(np.zeros(4096, np.int32))
    with patch.object(attention_launch, "counters", lambda count: others):
        assert launch.start()
        packed = launch.argument[1]
        assert launch.argument[0] == others.data.ptr  # the next start on this stream packs nothing
        attention_launch.forward(HOST, usual())
    assert launch.start()
    assert launch.argument[1] is not packed
    first, again, fresh, back = started
    assert first == back != again == fresh


def test_a_launch_does_not_start_on_another_device_or_under_another_kernel(started: list[Any]) -> None:
    launch = attention_launch.forward(HOST, usual())
    assert launch is not None
    with patch.object(attention_launch.cupy.cuda.runtime, "getDevice", lambda: "another"):
        assert not launch.start()
    with forced_kernel.force_kernel("AttentionSm80"):
        assert not launch.start()
    assert len(started) == 1 and launch.start()


def test_a_launch_waits_for_the_lists_of_its_mask(started: list[Any]) -> None:
    launch = attention_launch.forward(HOST, CHANGES["mask"]())
    assert launch is not None and launch.lists is not None
    with patch.object(type(launch.lists), "get", autospec=True) as waited:
        assert launch.start()
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
