"""What decode and append remember: after any sequence of calls, the same is launched as if nothing were remembered.

A state machine draws calls on a fake card that notes launches. Each call is made twice: with what the calls before it
left in `CALLS`, and with `Calls` that are new. Kernel, grid, threads, shared memory and every byte of the argument are
the same, but for addresses of memory that each call allocates for itself; so is the error of a call that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._attention import cuda, decode_kernel
from bsrgemm._attention.arguments import DECODE, KV_APPEND
from bsrgemm._attention.kv_cache import AppendCall
from bsrgemm._kernels.launch import Calls

from ..fake_cupy import Card, Policy, installed

F16 = np.dtype(np.float16)
#: Few kinds are kept, so that they are forgotten too.
MOST = 16
#: Sizes of caches: any two differ in one thing or in several.
CACHES: tuple[dict[str, Any], ...] = (
    {},
    {"kv_heads": 4},
    {"batch": 3},
    {"capacity": 2048},
    {"value_dim": 128},
    {"head_dim": 128},
    {"page": 16},
    {"page": 32},
    {"page": 16, "pages": 150},
    {"dtype": "bfloat16"},
    {"head_dim": 72},
)
_OPTIONS = ("return_lse", "scale", "softcap", "window", "layout")
#: What a decode, and an append, may have that the usual one has not.
DECODES: dict[str, tuple[Any, ...]] = {
    "return_lse": (True, False, 0, 1),
    "scale": (1.0, 1, True, 0.0, -0.0, np.float32(0.3), np.array(0.3)),
    "softcap": (2.0, 2, 3.0),
    "window": ((40, 0), (41, 0), (40.0, 0), [40, 0], (-1, 0)),
    "layout": ("bshd", "hbsd"),
    "cache": (-2, -3),
    "group": (1, 10),
    "queries": (2,),
    "at": (8, 1, *range(4096, 4176, 8)),  # more addresses than a launch keeps arguments for
    "lying": ("turned", "gaps"),
    "out": ("apart", "in q", "in k", "turned", "gaps"),
    "dtype": ("int16",),
    "blocks": ((3, 1), (60, 1), (3, 2), (30, 2)),
    "overlapping": (True,),
}
APPENDS: dict[str, tuple[Any, ...]] = {
    "cache": (-2, -3),
    "tokens": (2, 130, 700),
    "at": (8, 1),
    "lying": ("turned", "gaps"),
    "some": (True,),
    "overlapping": (True,),
}


def several(changes: dict[str, tuple[Any, ...]]) -> Any:
    """A call with none, one or two of these changes, and the same with all values of one of them; all of it twice."""
    some = st.lists(st.sampled_from([(name, x) for name, values in changes.items() for x in values]), max_size=2)
    return st.builds(
        lambda base, name: [base, *(base | {name: value} for value in changes[name])] * 2,
        some.map(dict),
        st.sampled_from(list(changes)),
    )


@contextmanager
def remembering(calls: Calls) -> Iterator[None]:
    """Inside, decode and append remember their calls there."""
    with patch.object(decode_kernel, "CALLS", calls), patch.object(cuda.CudaAttention, "decodes", calls):
        yield


def masked(packed: bytes, layout: Any, names: tuple[str, ...]) -> bytes:
    """An argument without some of its addresses."""
    found = bytearray(packed)
    for name in names:
        found[layout.offsets[name] : layout.offsets[name] + 8] = bytes(8)
    return bytes(found)


class Sequences(RuleBasedStateMachine):
    """Calls of one process."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.card = Card("sm_90a", 132, policy=Policy.RECORD)
        self.cupy: Any = self.stack.enter_context(installed(self.card))
        self.calls = Calls(MOST)
        self.stack.enter_context(remembering(self.calls))
        append = decode_kernel.CudaAppend.append
        self.stack.enter_context(
            patch.object(decode_kernel.CudaAppend, "append", lambda engine, call: self._append(append, engine, call))
        )
        self.streams = [self.cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        self.stream: Any = None
        self.graphs: list[Any] = []
        self.numbers = self.cupy.zeros((1, 1, 120), np.int32)
        self.takes = self.cupy.ones(8, np.int32)
        #: memory in which queries and results lie, and memory in which tokens do
        self.room, self.many = self.cupy.zeros(1 << 17, np.uint16), self.cupy.zeros(1 << 21, np.uint16)
        self.caches: list[bg.KVCache] = []

    def teardown(self) -> None:
        if self.stream is not None and self.stream.is_capturing():
            self.stream.end_capture()
        self.graphs.clear()
        self.caches.clear()
        self.stack.close()

    # ------------------------------------------------------------------------------------------ both ways
    def _launched(self, act: Callable[[], Any], layout: Any, hidden: tuple[str, ...]) -> tuple[Any, ...]:
        """What an act launches, or how it is refused."""
        self.card.launches.clear()
        refused = None
        try:
            act()
        except (TypeError, ValueError, RuntimeError) as error:
            refused = type(error), str(error)
        return refused, [
            (x.spec, x.grid, x.threads, x.shared_bytes, *(masked(y, layout, hidden) for y in x.arguments))
            for x in self.card.launches
        ]

    def _both(self, act: Callable[[], Any], layout: Any, hidden: tuple[str, ...]) -> None:
        with remembering(Calls()):
            want = self._launched(act, layout, hidden)
        got = self._launched(act, layout, hidden)
        assert got == want

    def _append(self, append: Any, engine: Any, call: AppendCall) -> None:
        """The engine's append, both ways."""
        self._both(lambda: append(engine, call), KV_APPEND, ("arrived",))

    def _around(self, changes: dict[str, Any]) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(self.stream or nullcontext())
        stack.enter_context(bg.overlapping() if "overlapping" in changes else nullcontext())
        return stack

    @staticmethod
    def _lying(room: Any, shape: tuple[int, ...], dtype: Any, at: int, how: str = "") -> Any:
        """An array in memory that several share, at element `at`."""
        if how == "turned":
            return Sequences._lying(room, (shape[0], shape[2], shape[1], shape[3]), dtype, at).swapaxes(1, 2)
        gap = 2 if how == "gaps" else 1
        count = int(np.prod(shape)) * gap
        return room[at : at + count].view(dtype).reshape(*shape[:-1], shape[-1] * gap)[..., ::gap]

    # ------------------------------------------------------------------------------------------ steps
    @initialize()
    def begin(self) -> None:
        self.new_cache({})

    @rule(changes=st.sampled_from(CACHES))
    def new_cache(self, changes: dict[str, Any]) -> None:
        if self.stream is None or not self.stream.is_capturing():
            sizes = {"batch": 2, "kv_heads": 2, "capacity": 1024, "head_dim": 64, **changes}
            self.caches = [*self.caches[-3:], bg.KVCache(**sizes, device="cuda")]

    @rule(calls=several(DECODES))
    def decode(self, calls: list[dict[str, Any]]) -> None:
        """Decodes that differ from the usual one in few things: with a key that lacks one, they are mistaken for it."""
        for changes in calls:
            how = {"cache": -1, "group": 2, "queries": 1, "at": 0, "lying": "", "out": None, "dtype": None} | changes
            cache = self.caches[how["cache"] % len(self.caches)]
            given = {name: x for name, x in changes.items() if name in _OPTIONS}
            shape = (cache.batch, cache.kv_heads * how["group"], how["queries"], cache.head_dim)
            if given.get("layout") == "bshd":
                shape = (shape[0], shape[2], shape[1], shape[3])
            q = self._lying(self.room, shape, how["dtype"] or cache.dtype, how["at"], how["lying"])
            result = (*shape[:3], cache.value_dim)
            if how["out"] == "in k":
                given["out"] = cache.k.reshape(-1)[: int(np.prod(result))].reshape(result)
            elif how["out"] is not None:
                begin, lying = {"in q": (how["at"], ""), "apart": (1 << 16, "")}.get(how["out"], (1 << 16, how["out"]))
                given["out"] = self._lying(self.room, result, cache.dtype, begin, lying)
            if "blocks" in changes:
                count, step = changes["blocks"]
                given |= {"blocks": self.numbers[:, :, ::step][:, :, :count], "block": cache.page or 32}
            own = ("partial", "arrived", "lse", *(() if "out" in given else ("out",)))
            with self._around(changes):
                self._both(partial(bg.attention_decode, q, cache, **given), DECODE, own)

    @rule(calls=several(APPENDS))
    def append(self, calls: list[dict[str, Any]]) -> None:
        for changes in calls:
            how = {"cache": -1, "tokens": 1, "at": 0, "lying": "", "some": False} | changes
            cache = self.caches[how["cache"] % len(self.caches)]
            if cache._captured:
                continue  # the card, which runs nothing here, would be asked for the lengths
            capturing = self.stream is not None and self.stream.is_capturing()
            takes: Any = None if not how["some"] else self.takes[: cache.batch] if capturing else [1] * cache.batch
            shape, dims = (cache.batch, cache.kv_heads, how["tokens"]), (cache.head_dim, cache.value_dim)
            k, v = (self._lying(self.many, (*shape, d), cache.dtype, how["at"], how["lying"]) for d in dims)
            with self._around(changes):
                try:
                    cache.append(k, v, takes)
                except ValueError as error:
                    assert "cannot take" in str(error) or "more pages" in str(error) or "never fit" in str(error)
                    if not capturing:
                        cache.reset()

    @precondition(lambda self: self.stream is None or not self.stream.is_capturing())
    @rule(number=st.sampled_from([None, 0, 1]))
    def go_to_another_stream(self, number: int | None) -> None:
        self.stream = None if number is None else self.streams[number]

    @precondition(lambda self: self.stream is not None and not self.stream.is_capturing())
    @rule()
    def begin_capture(self) -> None:
        self.stream.begin_capture()

    @precondition(lambda self: self.stream is not None and self.stream.is_capturing())
    @rule(drop=st.booleans())
    def end_capture(self, drop: bool) -> None:
        self.graphs.append(self.stream.end_capture())
        if drop:
            self.graphs.clear()

    @precondition(lambda self: self.graphs)
    @rule()
    def replay(self) -> None:
        self.graphs[-1].launch()

    @rule(which=st.integers(0, 3))
    def reset(self, which: int) -> None:
        if self.stream is None or not self.stream.is_capturing():
            self.caches[which % len(self.caches)].reset()

    @invariant()
    def few_kinds_are_kept(self) -> None:
        assert len(self.calls._found) <= MOST


Sequences.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestSequences = Sequences.TestCase


@pytest.mark.parametrize(
    ("step", "name"), [*(("decode", name) for name in DECODES), *(("append", name) for name in APPENDS)]
)
def test_calls_that_differ_in_one_thing_are_not_mistaken_for_each_other(step: str, name: str) -> None:
    """What the state machine draws at random, once for everything that a call may have."""
    machine = Sequences()
    try:
        machine.begin()
        for changes in ({"page": 16}, {"kv_heads": 4}, {}):
            machine.new_cache(changes)
        values = (DECODES if step == "decode" else APPENDS)[name]
        getattr(machine, step)([{}, *({name: value} for value in values)] * 2)
    finally:
        machine.teardown()
