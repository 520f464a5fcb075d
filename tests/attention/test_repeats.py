"""Attention that is started again: only if nothing that it depends on has changed, and never without its checks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._attention import attention as public
from bsrgemm._attention import repeats
from bsrgemm._attention.call import AttentionCall
from bsrgemm._backend.numpy_backend import HOST

from ..emulator.emulator import Array, put

SHAPE = (2, 4, 64, 32)


class Launch:
    """Tells whether it can be started, and counts how often it was; as one that moves, it notes where to."""

    def __init__(self, works: list[bool]) -> None:
        self.works, self.starts = works, 0
        self.places: list[tuple[int, ...]] = []

    def start(self, operands: tuple[Any, ...]) -> bool:
        assert len(operands) == 5
        self.starts += self.works[0]
        return self.works[0]

    def movable(self) -> Launch:
        return self

    def move(self, places: tuple[int, ...]) -> None:
        self.places.append(places)

    def kept(self) -> Launch:
        return self


class Engine:
    """Keeps the calls that come to it, with a launch for each."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.launches: list[Launch] = []
        self.works = [True]

    def of(self, backend: Any) -> Engine:
        return self

    def forward(self, call: AttentionCall) -> Launch:
        self.calls.append(call)
        self.launches.append(Launch(self.works))
        return self.launches[-1]

    @property
    def starts(self) -> int:
        return sum(launch.starts for launch in self.launches)


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine()
    xp = SimpleNamespace(empty=lambda shape, dtype: put(np.empty(shape, dtype)))
    with (
        patch.object(type(HOST), "xp", xp),
        patch.object(public, "ENGINES", found),
        patch.object(repeats, "_calls", {}),
        patch.object(repeats, "_array_types", {Array}),
    ):
        yield found


#: Memory in which operands that begin at the same address lie.
MEMORY = {name: put(np.ones(8 * 2 * 4 * 64 * 32, np.float16)) for name in ("q", "k", "v", "out")}


def lying(name: str, shape: tuple[int, ...] = SHAPE, dtype: str = "float16", skip: int = 0, pitch: int = 0) -> Array:
    """An array in the memory of an operand, from an element on, whose rows are `pitch` elements apart."""
    whole = (*shape[:-1], pitch or shape[-1])
    flat = MEMORY[name].view(dtype)[skip : skip + int(np.prod(whole))]
    return flat.reshape(whole)[..., : shape[-1]]


def usual(**changes: Any) -> dict[str, Any]:
    return {name: lying(name) for name in MEMORY} | {"causal": True} | changes


MASK = bg.BlockMask.causal(64, block=32, device="cpu")
SHORT = (2, 4, 48, 32)
CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"address of {name}": lambda name=name: usual(**{name: lying(name, skip=32)}) for name in MEMORY},
    **{f"strides of {name}": lambda name=name: usual(**{name: lying(name, pitch=40)}) for name in MEMORY},
    "queries": lambda: usual(q=lying("q", SHORT), out=lying("out", SHORT)),
    "keys": lambda: usual(k=lying("k", SHORT), v=lying("v", SHORT)),
    "dtypes": lambda: usual(**{name: lying(name, dtype="float32") for name in MEMORY}),
    "dtype of out": lambda: usual(out=lying("out", dtype="float32")),
    "causal": lambda: usual(causal=False),
    "window": lambda: usual(window=(5, 0)),
    "scale": lambda: usual(scale=0.5),
    "softcap": lambda: usual(softcap=2.0),
    "layout": lambda: usual(layout="bshd"),
    "align": lambda: usual(align="top-left"),
    "mask": lambda: usual(mask=MASK),
    "lse": lambda: usual(return_lse=True),
}


def fields(call: AttentionCall) -> list[Any]:
    """What an engine is asked for, apart from memory that is allocated for each call."""
    arrays = [(x.ctypes.data, x.shape, x.strides, x.dtype) for x in (call.q, call.k, call.v, call.out)]
    numbers = (call.acc, call.scale, call.softcap, call.left, call.right, call.bottom_right, id(call.mask))
    return [*arrays, *numbers, call.lse is None]


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_is_started_again_only_if_nothing_has_changed(change: str, engine: Engine) -> None:
    bg.attention(**usual())
    out = lying("out")
    assert bg.attention(**usual(out=out)) is out
    assert (len(engine.calls), engine.starts) == (1, 1)
    bg.attention(**CHANGES[change]())
    assert (len(engine.calls), engine.starts) == (2, 1)
    assert fields(engine.calls[1]) != fields(engine.calls[0])
    bg.attention(**usual())
    assert (len(engine.calls), engine.starts, engine.launches[0].starts) == (2, 2, 2)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"mask": MASK}], ids=str)
def test_operands_at_new_addresses_are_started_at_once(options: dict[str, Any], engine: Engine) -> None:
    options = {name: copy.copy(x) for name, x in options.items()}  # a mask without calls
    calls = [{name: lying(name, skip=skip) for name in ("q", "k", "v")} for skip in (0, 64, 8, 64)]
    kept = []  # memory that is in use is not allocated again
    for operands in calls:
        kept.append(bg.attention(**operands, **options))
        out, lse = kept[-1] if "return_lse" in options else (kept[-1], None)
        assert out.shape == SHAPE and out.dtype == np.float16 and (lse is None or lse.shape == SHAPE[:3])
    first, *_ = engine.launches
    assert len(engine.calls) == 1 and engine.starts == 3 and len(first.places) == 3
    for operands, results, places in zip(calls[1:], kept[1:], first.places, strict=True):
        arrays = [*operands.values(), *(results if isinstance(results, tuple) else [results])]
        assert places == (*(x.data.ptr for x in arrays), *([] if "return_lse" in options else [0]))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_operands_that_are_not_aligned_are_checked(name: str, engine: Engine) -> None:
    aligned = {name: lying(name) for name in ("q", "k", "v")}
    odd = aligned | {name: lying(name, skip=4)}
    for operands in (odd, odd, aligned, odd, aligned):
        bg.attention(**operands)
    first = [x.q.ctypes.data % 16 or x.k.ctypes.data % 16 or x.v.ctypes.data % 16 for x in engine.calls]
    assert first == [8, 8, 0, 8] and engine.starts == 1


def test_calls_of_a_mask_belong_to_that_mask(engine: Engine) -> None:
    masks = [copy.copy(MASK), bg.BlockMask.window(64, left=7, right=0, block=32, device="cpu")]
    for mask in (*masks, *masks):
        bg.attention(**usual(mask=mask))
    assert [id(call.mask) for call in engine.calls] == [id(mask) for mask in masks] and engine.starts == 2
    assert not repeats._calls


@pytest.mark.parametrize(
    "options",
    [{"causal": 1}, {"return_lse": 0}, {"scale": True}, {"window": (True, 0)}, {"window": (1.0, 0)}, {"softcap": "1"}],
    ids=str,
)
def test_options_that_only_equal_right_ones_are_refused_each_time(options: dict[str, Any], engine: Engine) -> None:
    right = {"causal": True, "return_lse": False, "scale": 1.0, "window": (1, 0), "softcap": 1.0}
    for name in options:
        bg.attention(**usual(**{name: right[name]}))
    with pytest.raises(TypeError):
        bg.attention(**usual(**options))


def test_a_launch_that_cannot_start_is_made_anew(engine: Engine) -> None:
    bg.attention(**usual())
    engine.works[0] = False
    bg.attention(**usual())
    assert len(engine.calls) == 2 and engine.starts == 0


def test_options_that_cannot_be_looked_up_are_checked_each_time(engine: Engine) -> None:
    for _ in range(2):
        bg.attention(**usual(window=[3, 0]))
        bg.attention(**usual(scale=np.array(0.5)))
    assert len(engine.calls) == 4


def test_few_calls_and_few_results_are_remembered(engine: Engine) -> None:
    for count in (*range(1, 65), 1, 2):
        bg.attention(**usual(out=lying("out", skip=32 * len(engine.calls))))
        (repeat,) = repeats._calls.values()
        assert len(repeat.launches.kept) == count
    repeats._calls.clear()
    for count in (*range(1, 65), 1, 2):
        bg.attention(**usual(scale=1.0 + len(engine.calls)))
        assert len(repeats._calls) == count


BOUNDS = np.array([0, 24, 64])
#: Options of calls that allocate memory of their own, and the dtype of their operands.
NEVER: dict[str, tuple[str, dict[str, Any]]] = {
    "cu_seqlens": ("float16", {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS}),
    "q_scale": ("uint8", {"q_scale": 1.0}),
    "k_scale": ("uint8", {"k_scale": 1.0}),
    "v_scale": ("uint8", {"v_scale": 1.0}),
    "out_dtype": ("float16", {"out_dtype": "float32"}),
}


@pytest.mark.parametrize("option", NEVER)
def test_calls_that_cannot_start_again_are_not_looked_up(option: str, engine: Engine) -> None:
    dtype, options = NEVER[option]
    shape = (64, 4, 32) if option == "cu_seqlens" else SHAPE
    operands = {name: lying(name, shape, dtype) for name in ("q", "k", "v")}
    with patch.object(public.repeats, "lookup", side_effect=AssertionError("it was looked up")):
        for _ in range(2):
            bg.attention(**operands, **options)
    assert len(engine.calls) == 2 and not repeats._calls


def test_arrays_of_the_host_are_not_remembered() -> None:
    q = np.ones((1, 1, 4, 8))
    for _ in range(3):
        bg.attention(q, q, q, out=np.empty_like(q))
    assert not repeats._calls


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_a_copy_of_a_mask_has_lists_and_calls_of_its_own(copied: Callable[[Any], Any], engine: Engine) -> None:
    mask = copy.copy(MASK)
    bg.attention(**usual(mask=mask))
    mask.__dict__["_tiles"] = {(64, 64): object()}
    other = copied(mask)
    assert not {"_tiles", "_calls"} & set(vars(other)) and {"_tiles", "_calls"} <= set(vars(mask))
    assert other._backend is mask._backend and np.array_equal(other.bits, mask.bits)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_masks_and_caches_work_as_they_do(copied: Callable[[Any], Any]) -> None:
    q = np.random.default_rng(0).standard_normal((1, 2, 64, 16)).astype(np.float16)
    assert np.array_equal(bg.attention(q, q, q, mask=copied(MASK)), bg.attention(q, q, q, mask=MASK))
    cache = bg.KVCache(1, 2, 64, 16, dtype="float16", device="cpu")
    cache.append(q, q)
    token = q[:, :, :1]
    assert np.array_equal(bg.attention_decode(token, copied(cache)), bg.attention_decode(token, cache))
