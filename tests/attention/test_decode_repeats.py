"""Decodes that are started again: only if nothing that their checks depend on has changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._attention import decode as public
from bsrgemm._attention import decode_repeats
from bsrgemm._attention.call import DecodeCall
from bsrgemm._backend.numpy_backend import HOST

from ..emulator.emulator import Array, put


class Engine:
    """Keeps the calls that come to it."""

    def __init__(self, repeats: bool = True) -> None:
        self.repeats_decode, self.calls = repeats, list[DecodeCall]()

    def of(self, backend: Any) -> Engine:
        return self

    def decode(self, call: DecodeCall) -> None:
        self.calls.append(call)


class Module:
    """NumPy, with arrays that have addresses."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(shape: Any, dtype: Any) -> Array:
        return put(np.empty(shape, dtype))


@pytest.fixture(params=[True])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    found = Engine(request.param)
    with (
        patch.object(type(HOST), "xp", Module()),
        patch.object(public, "ENGINES", found),
        patch.object(decode_repeats, "_kinds", {}),
    ):
        yield found


def cache_of(**changes: Any) -> bg.KVCache:
    sizes = {"batch": 2, "kv_heads": 2, "capacity": 64, "head_dim": 32} | changes
    return bg.KVCache(**sizes, dtype="float16", device="cpu")


ROOMS = {name: put(np.ones(1 << 14, np.float16)) for name in ("q", "out")}


def lying(name: str, shape: tuple[int, ...] = (2, 4, 1, 32), dtype: str = "float16", skip: int = 0) -> Array:
    return ROOMS[name].view(dtype)[skip : skip + int(np.prod(shape))].reshape(shape)


def turned(name: str) -> Array:
    """Other strides at the same address."""
    return lying(name, (4, 2, 1, 32)).swapaxes(0, 1)


def usual(cache: Any, **changes: Any) -> dict[str, Any]:
    return {"q": lying("q"), "cache": cache, "out": lying("out")} | changes


#: One difference each; those that are refused come with the error.
CHANGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "strides of q": lambda cache: usual(cache, q=turned("q")),
    "strides of out": lambda cache: usual(cache, out=turned("out")),
    "queries": lambda cache: usual(cache, q=lying("q", (2, 4, 3, 32)), out=lying("out", (2, 4, 3, 32))),
    "heads": lambda cache: usual(cache, q=lying("q", (2, 2, 1, 32)), out=lying("out", (2, 2, 1, 32))),
    "no out": lambda cache: usual(cache, out=None),
    "window": lambda cache: usual(cache, window=(3, 0)),
    "scale": lambda cache: usual(cache, scale=0.5),
    "softcap": lambda cache: usual(cache, softcap=2.0),
    "lse": lambda cache: usual(cache, return_lse=True),
    "layout": lambda cache: usual(cache, q=lying("q", (2, 1, 4, 32)), out=lying("out", (2, 1, 4, 32)), layout="bshd"),
    "capacity": lambda cache: usual(cache_of(capacity=128)),
    "batch and heads": lambda cache: usual(
        cache_of(batch=4, kv_heads=1), q=lying("q", (4, 4, 1, 32)), out=lying("out", (4, 4, 1, 32))
    ),
    "heads of the cache alone": lambda cache: usual(cache_of(kv_heads=1)),
    "head dim": lambda cache: usual(cache_of(head_dim=16, value_dim=32), q=lying("q", (2, 4, 1, 16))),
    "pages": lambda cache: usual(cache_of(page=16)),
    "number of pages": lambda cache: usual(cache_of(page=16, pages=5)),
    "value dim": lambda cache: usual(cache_of(value_dim=16), out=lying("out", (2, 4, 1, 16))),
}
REFUSED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "out in q": lambda cache: usual(cache, out=lying("q")),
    "out in the keys": lambda cache: usual(cache, out=cache.k.reshape(-1)[:256].reshape(2, 4, 1, 32)),
    "dtype of q": lambda cache: usual(cache, q=lying("q", dtype="int16")),
    "dtype of out": lambda cache: usual(cache, out=lying("out", dtype="int16")),
    "elements of out that share memory": lambda cache: usual(
        cache, out=np.broadcast_to(lying("out")[:1], (2, 4, 1, 32), subok=True)
    ),
    "batch": lambda cache: usual(cache_of(batch=3)),
    "heads of the cache": lambda cache: usual(cache_of(kv_heads=3)),
    "head dim": lambda cache: usual(cache_of(head_dim=16)),
    "no layout": lambda cache: usual(cache, layout="hbsd"),
    "a number for return_lse": lambda cache: usual(cache, return_lse=0),
    "a truth value for scale": lambda cache: usual(cache, scale=True),
    "a window of floats": lambda cache: usual(cache, window=(1.0, 0)),
    "block alone": lambda cache: usual(cache, block=16),
}


def fields(call: DecodeCall) -> list[Any]:
    """What an engine is asked for, apart from memory that is allocated for each call."""
    arrays = [(x.shape, x.strides, x.dtype) for x in (call.q, call.out)]
    numbers = (call.scale, call.softcap, call.left, call.block, call.blocks, id(call.cache))
    there = call.out.data.ptr == ROOMS["out"].data.ptr
    return [*arrays, *numbers, call.q.data.ptr, there, None if call.lse is None else (call.lse.shape, call.lse.dtype)]


def unchecked(call: Callable[[], Any]) -> Any:
    """Do a call that must not be checked."""
    with patch.object(public, "check_window", side_effect=AssertionError("it was checked")):
        return call()


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_is_known_by_its_operands_and_options(change: str, engine: Engine) -> None:
    cache = cache_of()
    arguments = [usual(cache), CHANGES[change](cache)]
    for given in arguments:
        bg.attention_decode(**given)
    for given in arguments * 2:
        found = unchecked(lambda given=given: bg.attention_decode(**given))
        assert given["out"] is None or found is given["out"] or found[0] is given["out"]
    first, second, *again = map(fields, engine.calls)
    assert again == [first, second] * 2 and first != second
    kinds = [call.prepared for call in engine.calls]
    assert (
        all(x is kinds[0] for x in kinds[::2]) and all(x is kinds[1] for x in kinds[1::2]) and kinds[0] is not kinds[1]
    )


@pytest.mark.parametrize(
    "sizes",
    [({}, {"page": 16, "pages": 2}), ({"page": 16}, {"page": 16, "pages": 5}), ({"page": 16}, {"page": 32})],
    ids=str,
)
def test_caches_with_other_pages_have_other_kinds(sizes: tuple[dict[str, int], ...], engine: Engine) -> None:
    for changes in sizes * 2:
        bg.attention_decode(lying("q"), cache_of(**changes))
    first, second, third, fourth = (call.prepared for call in engine.calls)
    assert first is third and second is fourth and first is not second


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_refused_is_refused_each_time(change: str, engine: Engine) -> None:
    cache = cache_of()
    for right in ({}, {"return_lse": False}, {"scale": 1.0}, {"window": (1, 0)}):
        bg.attention_decode(**usual(cache, **right))
    done = len(engine.calls)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            bg.attention_decode(**REFUSED[change](cache))
    assert len(engine.calls) == done


def test_lengths_and_addresses_are_those_of_the_call(engine: Engine) -> None:
    cache = cache_of()
    bg.attention_decode(lying("q"), cache)
    token = put(np.ones((2, 2, 1, 32), np.float16))
    cache.append(token, token)
    q = lying("q", skip=7)
    out = unchecked(lambda: bg.attention_decode(q, cache))
    last = engine.calls[-1]
    assert last.q is q and last.out is out and last.cache is cache and cache._longest == 1
    other = cache_of()
    unchecked(lambda: bg.attention_decode(q, other))
    assert engine.calls[-1].cache is other


def test_an_out_at_a_new_address_is_checked_once(engine: Engine) -> None:
    cache, out = cache_of(), lying("out", skip=64)
    for _ in range(2):
        bg.attention_decode(**usual(cache))
    with pytest.raises(AssertionError, match="it was checked"):
        unchecked(lambda: bg.attention_decode(**usual(cache, out=out)))
    bg.attention_decode(**usual(cache, out=out))
    assert unchecked(lambda: bg.attention_decode(**usual(cache, out=out))) is out


def test_options_that_cannot_be_looked_up_are_checked_each_time(engine: Engine) -> None:
    cache = cache_of()
    for _ in range(2):
        bg.attention_decode(**usual(cache, window=[3, 0]))
        bg.attention_decode(**usual(cache, scale=np.array(0.5)))
    assert len(engine.calls) == 4 and all(call.prepared is None for call in engine.calls)


def test_few_kinds_and_few_addresses_are_remembered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_repeats, "_MOST_KINDS", 3)
    monkeypatch.setattr(decode_repeats, "_MOST_PLACES", 2)
    cache = cache_of()
    for number in range(7):
        bg.attention_decode(**usual(cache, scale=1.0 + number))
        assert len(decode_repeats._kinds) == number % 3 + 1
    for number in range(4):
        bg.attention_decode(**usual(cache, out=lying("out", skip=8 * number)))
    assert max(len(kind.apart) for kind in decode_repeats._kinds.values()) == 2


@pytest.mark.parametrize("engine", [False], indirect=True)
def test_an_engine_that_does_not_take_part_gets_every_call_checked(engine: Engine) -> None:
    cache = cache_of()
    for _ in range(3):
        bg.attention_decode(**usual(cache))
    assert not decode_repeats._kinds and all(call.prepared is None for call in engine.calls)


def test_caches_of_equal_sizes_share_their_kinds_and_copies_keep_to_theirs(engine: Engine) -> None:
    first, second = cache_of(), cache_of()
    assert first._sizes is second._sizes is copy.copy(first)._sizes
    others = ({"batch": 3}, {"kv_heads": 1}, {"capacity": 65}, {"head_dim": 16}, {"value_dim": 16}, {"page": 16})
    found = [first, *(cache_of(**sizes) for sizes in others), cache_of(page=16, pages=3)]
    found.append(bg.KVCache(2, 2, 64, 32, dtype="float32", device="cpu"))
    assert len({id(cache._sizes) for cache in found}) == len(found)
    moved = pickle.loads(pickle.dumps(first))
    for cache in (first, second, moved, moved):
        bg.attention_decode(lying("q"), cache)
    kinds = [call.prepared for call in engine.calls]
    assert kinds[0] is kinds[1] and kinds[2] is kinds[3]
