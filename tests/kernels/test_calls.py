"""A repeated call launches what a fresh one would, whatever happened before it.

Calls are made with what earlier ones have left behind and without it. The kernels, their grids and every byte of their
arguments must be the same; so must be refusals.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import bsrgemm as bg
from bsrgemm._kernels.kernel import force_kernel
from bsrgemm._kernels.launch import Calls

from .. import devices
from .products import BF16, F16, F32, Case, matrix

#: Where an operand begins in its memory, in bytes: at one place, at another, and where 16 bytes cannot be read at once.
PLACES = st.sampled_from([0, 0, 0, 256, 64, 16, 8, 2])
#: Elements between the rows of an operand.
GAPS = st.sampled_from([0, 0, 8, 1])
#: Lengths of queries and of keys, columns of q and k, and columns of v.
SIZES = st.sampled_from([(40, 50, 64, 64), (40, 50, 64, 64), (40, 70, 64, 64), (30, 50, 64, 64), (40, 50, 32, 40)])
OPTIONS: list[dict[str, Any]] = [
    *({}, {}, {"causal": True}, {"window": (5, 3)}, {"window": (5, 3), "align": "top-left"}, {"return_lse": True}),
    *({"scale": 0.5}, {"scale": -0.5}, {"scale": 1}, {"scale": True}, {"softcap": 2.0}, {"causal": 1}),
    *({"window": [5, 3]}, {"window": (5.0, 3)}, {"softcap": "1"}, {"layout": "bshd"}, {"scale": np.array(0.5)}),
]
#: Options of gradients, which have no `return_lse`.
OF_GRADIENTS: list[dict[str, Any]] = [
    *(x for x in OPTIONS if "return_lse" not in x),
    *({"deterministic": False}, {"deterministic": False, "causal": True}, {"deterministic": 0}),
    *({"scale": 0.0}, {"scale": -0.0}),
]
#: Memory for operands and results.
ROOMS = ("q", "k", "v", "out", "B", "C", "X", "Y", "dout", "sums", "dq", "dk", "dv")


@contextlib.contextmanager
def nothing_is_remembered() -> Iterator[None]:
    with patch.object(Calls, "get", lambda *_: None), patch.object(Calls, "remember", lambda *_: None):
        yield


#: Kernels that compute lists, which belong to a matrix, a mask or a call that is remembered.
LISTS = {"expand", "segment", "list_pairs", "count_pairs"}


class Launches(list[Any]):
    """The launches of a card; an address in memory that moves is replaced by a digest of what is there."""

    def __init__(self, heap: Any, still: set[int]) -> None:
        super().__init__()
        self._heap, self._still = heap, still

    def append(self, launched: Any) -> None:
        if launched.entry not in LISTS:
            super().append(replace(launched, arguments=tuple(map(self._without_addresses, launched.arguments))))

    def _without_addresses(self, packed: bytes) -> bytes:
        words = np.frombuffer(packed[: len(packed) // 8 * 8], np.uint64).copy()
        live = sorted(self._heap._live - self._still)
        for n, word in enumerate(words.tolist()):
            at = bisect_right(live, word) - 1
            if at >= 0:
                first, size = self._heap._pages[live[at]]
                end = first + size - mmap.PAGESIZE
                if live[at] <= word < end:
                    words[n] = zlib.crc32(ctypes.string_at(word, end - word))
        return words.tobytes() + packed[len(words) * 8 :]


class RepeatedCalls(RuleBasedStateMachine):
    """Matrices, masks and memory for operands on an emulated card, and calls with them in any order."""

    def __init__(self) -> None:
        super().__init__()
        self._open = contextlib.ExitStack()
        self.device: Any = self._open.enter_context(devices.opened("emulator"))

    def teardown(self) -> None:
        self._open.close()

    @initialize(arch=st.sampled_from(["sm_75", "sm_80", "sm_90a"]))
    def prepare(self, arch: str) -> None:
        self.device.needs(arch)
        rng = np.random.default_rng(3)
        cupy = self.device.cupy
        self.numbers = [self.device.card.number, self.device.card.number + 1_000_000]
        self.rooms = {name: cupy.zeros(1 << 17, np.uint8) for name in ROOMS}
        for room in self.rooms.values():
            room[...] = self.device.asarray(rng.integers(0, 60, 1 << 17).astype(np.uint8))  # finite as any dtype
        still = {room.data.mem.ptr for room in self.rooms.values()}
        self.device.card.launches = Launches(self.device.card.heap, still)
        self.matrices = [matrix(rng, Case(F16, (16, 16), 40), unique=True) for _ in range(2)]
        self.A = [x.on(self.device) for x in self.matrices]
        for A in self.A:
            A.sort_indices()  # as those of samples are
        self.masks = [None, *(self.mask(n) for n in range(2))]
        self.samples = [bg.sddmm(*self.factors(F16, 0, 0, 48), A) for A in self.A]

    def mask(self, which: int) -> Any:
        per_row = {"per_row": 1, "block": 16, "seed": which, "device": "cuda"}
        return bg.BlockMask.random(40, 50, heads=(1, which + 1), **per_row)

    def lying(self, room: str, shape: tuple[int, ...], dtype: Any, begin: int, gap: int = 0) -> Any:
        """An array in the named memory."""
        whole = (*shape[:-1], shape[-1] + gap)
        begin = -(-begin // dtype.itemsize) * dtype.itemsize
        flat = self.rooms[room][begin:].view(dtype)[: int(np.prod(whole))]
        return flat.reshape(whole)[..., : shape[-1]]

    def factors(self, dtype: Any, x: int, y: int, K: int) -> tuple[Any, Any]:
        rows, cols = self.matrices[0].shape
        return self.lying("X", (rows, K), dtype, x), self.lying("Y", (K, cols), dtype, y)

    # ------------------------------------------------------------------------------------------------ comparison
    def launched(self, call: Callable[[], Any]) -> tuple[list[Any], Any]:
        before = len(self.device.card.launches)
        try:
            call()
        except (TypeError, ValueError) as error:
            return [], (type(error), str(error))
        return self.device.card.launches[before:], None

    def compare(self, call: Callable[[], Any], kernel: str | None) -> None:
        with force_kernel(kernel) if kernel else contextlib.nullcontext():
            with nothing_is_remembered():
                self.launched(call)  # makes the lists of matrices and masks that are new
            got = self.launched(call), self.launched(call)
            with nothing_is_remembered():
                want = self.launched(call)
        assert got[0] == want and got[1] == want

    def capture(self, call: Callable[[], Any], out: Any) -> None:
        """What a graph computes is what the call does, and what the call needs later is not in the graph."""
        out[...] = 0
        call()
        want = out.get()
        graph = self.device.captured(call)
        for _ in range(2):
            out[...] = 0
            graph.launch()
            np.testing.assert_array_equal(out.get().view(np.uint8), want.view(np.uint8))

    # ------------------------------------------------------------------------------------------------ what happens
    @rule(which=st.integers(0, 1), what=st.sampled_from(["data", "indices", "values"]))
    def assign(self, which: int, what: str) -> None:
        A = self.A[which]
        if what == "values":
            A.data[...] = A.data * 2
        elif what == "data":
            A.data = A.data * 2
        else:
            A.indices = A.indices.copy()
        self.samples[which] = bg.sddmm(*self.factors(F16, 0, 0, 48), A)

    @rule(which=st.integers(0, 1))
    def another_mask(self, which: int) -> None:
        self.masks[which + 1] = self.mask(which)

    @rule()
    def another_device(self) -> None:
        card = self.device.card
        self.numbers.reverse()
        card.number = card.heap.device_id = self.numbers[0]
        card.multiprocessors = 2 + self.numbers[0] % 2

    # ------------------------------------------------------------------------------------------------ calls
    @rule(
        which=st.integers(0, 1),
        N=st.sampled_from([40, 40, 1, 3]),
        place=PLACES,
        gap=GAPS,
        dtype=st.sampled_from([F16, F16, F32]),
        side=st.sampled_from(["left", "transposed", "right"]),
        kernel=st.sampled_from([None, None, None, "GemmSimt", "GemmSm80"]),
    )
    def product(self, which: int, N: int, place: int, gap: int, dtype: Any, side: str, kernel: str | None) -> None:
        A = self.A[which]
        if side == "right":
            B = self.lying("B", (N, A.shape[0]), dtype, place, gap)
            self.compare(lambda: B @ A, kernel)
        else:
            B = self.lying("B", (A.shape[side == "left"], N), dtype, place, gap)
            self.compare(lambda: (A if side == "left" else A.T) @ B, kernel)

    @rule(
        which=st.integers(0, 1),
        places=st.tuples(PLACES, PLACES),
        gaps=st.tuples(GAPS, GAPS),
        into=st.sampled_from(["C", "C", "C", "B"]),
        factors=st.sampled_from([(1, 0), (1, 0), (1.0, 0.0), (2, 0), (1, 1), (-0.0, 1), (0.5, -1)]),
        kernel=st.sampled_from([None, None, None, "GemmSimt"]),
        captured=st.booleans(),
    )
    def matmul(
        self, which: int, places: Any, gaps: Any, into: str, factors: Any, kernel: str | None, captured: bool
    ) -> None:
        A = self.A[which]
        B = self.lying("B", (A.shape[1], 40), F16, places[0], gaps[0])
        out = self.lying(into, (A.shape[0], 40), F16, places[1], gaps[1])
        alpha, beta = factors

        def call() -> Any:
            return bg.matmul(A, B, out=out, alpha=alpha, beta=beta)

        self.compare(call, kernel)
        if captured and into == "C":
            self.capture(call, out)

    @rule(which=st.integers(0, 1), x=PLACES, y=PLACES, K=st.sampled_from([48, 40]), into=st.booleans())
    def sampled(self, which: int, x: int, y: int, K: int, into: bool) -> None:
        X, Y = self.factors(F16, x, y, K)
        out = self.samples[which] if into else None
        assert self.launched(lambda: bg.sddmm(X, Y, self.A[which], out=out))[1] is None
        self.compare(lambda: bg.sddmm(X, Y, self.A[which], out=out), None)

    @rule(
        sizes=SIZES,
        places=st.tuples(PLACES, PLACES, PLACES, PLACES),
        gaps=st.tuples(GAPS, GAPS, GAPS, GAPS),
        dtype=st.sampled_from([F16, F16, BF16, F32]),
        heads=st.sampled_from([2, 2, 1]),
        options=st.sampled_from(OPTIONS),
        mask=st.sampled_from([0, 0, 1, 2]),
        into=st.sampled_from([None, "out", "out", "out", "q"]),
        kernel=st.sampled_from([None, None, None, "AttentionSimt", "AttentionSm80", "AttentionSm90"]),
        captured=st.booleans(),
    )
    def attention(
        self, sizes: Any, places: Any, gaps: Any, dtype: Any, heads: int, options: Any, mask: int, into: Any,
        kernel: str | None, captured: bool,
    ) -> None:  # fmt: skip
        S_q, S_k, D, D_v = sizes
        shapes = ((1, 2, S_q, D), (1, heads, S_k, D), (1, heads, S_k, D_v), (1, 2, S_q, D_v))
        names = ("q", "k", "v", into or "out")
        q, k, v, out = (
            self.lying(n, s, dtype, at, gap) for n, s, at, gap in zip(names, shapes, places, gaps, strict=True)
        )
        if options.get("layout") == "bshd":
            q, k, v, out = (x.swapaxes(1, 2) for x in (q, k, v, out))
        more = {**options, **({} if mask == 0 else {"mask": self.masks[mask]})}
        where = {} if into is None else {"out": out}

        def call() -> Any:
            return bg.attention(q, k, v, **where, **more)

        self.compare(call, kernel)
        if captured and into == "out" and self.launched(call)[1] is None:
            self.capture(call, out)

    @rule(
        sizes=SIZES,
        places=st.tuples(*[PLACES] * 4),
        gaps=st.tuples(*[GAPS] * 4),
        dtype=st.sampled_from([F16, F16, BF16, F32]),
        heads=st.sampled_from([2, 2, 1]),
        options=st.sampled_from(OF_GRADIENTS),
        mask=st.sampled_from([0, 0, 1, 2]),
        into=st.sampled_from([(), (), ("dq", "dk", "dv"), ("dq", "dk", "dv"), ("dv",), ("q", "dk"), ("dk", "dk")]),
        known=st.sampled_from([("out",), ("out",), ("out", "dlse"), ("delta",), ("out", "delta", "dlse"), ()]),
        at=st.integers(0, 2),
        kernel=st.sampled_from([None, None, None, "BackwardSimt", "BackwardSm80", "BackwardSm90"]),
        captured=st.booleans(),
    )
    def gradients(
        self, sizes: Any, places: Any, gaps: Any, dtype: Any, heads: int, options: Any, mask: int, into: Any,
        known: Any, at: int, kernel: str | None, captured: bool,
    ) -> None:  # fmt: skip
        S_q, S_k, D, D_v = sizes
        shapes = {"q": (1, 2, S_q, D), "k": (1, heads, S_k, D), "v": (1, heads, S_k, D_v), "dout": (1, 2, S_q, D_v)}
        given = zip(shapes.items(), places, gaps, strict=True)
        q, k, v, dout = (self.lying(name, shape, dtype, begin, gap) for (name, shape), begin, gap in given)
        # The logarithms, their gradients and sums follow each other, now at one place, now at another.
        sums = self.lying("sums", (3, 1, 2, S_q + at % 2), F32, 256 * at)[..., :S_q]
        arrays = {"lse": sums[0], "dlse": sums[1], "delta": sums[2], "out": self.lying("out", shapes["dout"], dtype, 0)}
        results = dict(zip(("dq", "dk", "dv"), into, strict=False)) if len(into) > 1 else {name: name for name in into}
        where = {n: self.lying(room, shapes[n[1]], dtype, places[0], gaps[0]) for n, room in results.items()}
        if options.get("layout") == "bshd":
            q, k, v, dout, arrays["out"] = (x.swapaxes(1, 2) for x in (q, k, v, dout, arrays["out"]))
            where = {name: x.swapaxes(1, 2) for name, x in where.items()}
        out, lse = (arrays[name] if name in ("lse", *known) else None for name in ("out", "lse"))
        more = {**options, **where, **({} if mask == 0 else {"mask": self.masks[mask]})}
        more |= {name: arrays[name] for name in ("delta", "dlse") if name in known}

        def call() -> Any:
            return bg.attention_backward(dout, q, k, v, out, lse, **more)

        self.compare(call, kernel)
        repeats = captured and into[-1:] == ("dv",) and "deterministic" not in options
        if repeats and self.launched(call)[1] is None:
            self.capture(call, where["dv"])


TestRepeatedCalls = RepeatedCalls.TestCase
TestRepeatedCalls.settings = settings(stateful_step_count=20, max_examples=12, deadline=None)


def test_calls_of_one_kind_are_prepared_once() -> None:
    """At new addresses, for other results and with other factors: what is remembered is used."""
    with devices.opened("emulator") as device:
        A = matrix(np.random.default_rng(3), Case(F16, (16, 16), 40), unique=True).on(device)
        A.sort_indices()
        q = device.asarray(np.ones((1, 2, 40, 64), F16))
        lse = device.asarray(np.ones((1, 2, 40), F32))
        mask = bg.BlockMask.random(40, 40, per_row=1, block=16, device="cuda")
        B, few, X = (device.asarray(np.ones(shape, F16)) for shape in ((A.shape[1], 40), (A.shape[1], 24), (96, 24)))
        Y = device.asarray(np.ones((24, A.shape[1]), F16))
        samples = bg.sddmm(X, Y, A)
        calls: dict[str, Callable[[], Any]] = {
            "product": lambda: A @ B.copy(),
            "matmul": lambda: bg.matmul(A, few.copy(), out=few.repeat(2, axis=0)[: A.shape[0]], alpha=3),
            "sampled": lambda: bg.sddmm(X.copy(), Y.copy(), A, out=samples),
            "attention": lambda: bg.attention(q.copy(), q.copy(), q.copy(), causal=True),
            "mask": lambda: bg.attention(q.copy(), q.copy(), q.copy(), mask=mask, return_lse=True),
            "gradients": lambda: bg.attention_backward(q.copy(), q.copy(), q, q, q, lse.copy(), causal=True),
            "gradients of a mask": lambda: bg.attention_backward(q, q, q, q, q.copy(), lse, mask=mask, dq=q.copy()),
        }
        for name, call in calls.items():
            with device.kernels() as kernels:
                call()
                assert kernels, name
                kernels.clear()
                call(), call()
            assert not kernels, name
