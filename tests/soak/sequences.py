"""Cases of several calls on the same objects, on memory that was freed and taken again, in threads and in graphs.

Everything that a call keeps for the next one (work lists, launches by address, repeated calls) is under suspicion here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm.dtypes import BOOL, accumulator_dtype

from ..strategies import INEXACT, Sample, magnitude, result_dtype, rounding, widened
from .attend import combined, normal
from .case import Case, kind
from .products import expected, problem
from .references import bounds, exact
from .samples import bsr, here, sample, values

_streams: list[Any] = []


def streams(case: Case, count: int) -> list[Any]:
    """As many streams of the card, made once; on the host something that does nothing."""
    if case.place.is_host:
        return [contextlib.nullcontext()] * count
    import cupy

    while len(_streams) < count:
        _streams.append(cupy.cuda.Stream(non_blocking=True))
    return _streams[:count]


def wait(case: Case) -> None:
    """Until all streams have done their work."""
    if not case.place.is_host:
        import cupy

        cupy.cuda.Device().synchronize()


# ------------------------------------------------------------------------------------------- programs
class Program:
    """A matrix whose blocks change between calls, and what it has to be."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.a, self.dtype, self.N, self.spread = problem(case)
        self.A = bsr(case, self.a)
        self.x = values(case, (self.a.shape[1], self.N), self.dtype, self.spread)
        self.X = here(case, self.x)
        self.out = here(case, np.zeros((self.a.shape[0], self.N), result_dtype(self.a.dtype, self.dtype)))
        self.T = self.A.T if case.chance(0.3) else None

    def _with(self, data: Any) -> None:
        self.a = Sample(data, self.a.indices, self.a.indptr, self.a.shape)
        self.T = None  # whether a transpose taken before sees the change is not promised

    def new_values(self) -> None:
        data = values(self.case, self.a.data.shape, self.a.dtype, self.spread)
        self.A.data[...] = here(self.case, data)
        self._with(data)

    def new_array(self) -> None:
        data = values(self.case, self.a.data.shape, self.a.dtype, self.spread)
        self.A.data = here(self.case, data)
        self._with(data)

    def new_operand(self) -> None:
        self.x = values(self.case, self.x.shape, self.dtype, self.spread)
        if self.case.chance(0.7):
            self.X[...] = here(self.case, self.x)
        else:
            self.X = here(self.case, self.x)

    def multiply(self) -> None:
        want, bound = expected(self.a, self.x)
        bg.matmul(self.A, self.X, out=self.out)
        self.case.same("A @ X into out", self.out, want, bound)

    def multiply_turned(self) -> None:
        b = self.a.T
        y = values(self.case, (b.shape[1], self.N), self.dtype, self.spread)
        T = self.A.T if self.T is None else self.T
        self.case.same("A.T @ Y", T @ here(self.case, y), *expected(b, y))

    def column_sums(self) -> None:
        if self.spread == "small":
            bound: Any = 0.0
            if self.a.dtype in INEXACT:
                bound = rounding(self.a.dtype, self.a.weight.sum(0), self.a.layers.sum(0) + 8)
            self.case.same("sum(0)", self.A.sum(axis=0), self.a.dense.sum(0), bound)

    def sort(self) -> None:
        dense, bound = self.a.dense, self.a.bound
        self.A.sort_indices() if self.case.chance(0.5) else self.A.sum_duplicates()
        found = self.case.place.blocks(self.A)
        self.case.same("after sorting", found.dense, dense, bound)
        self.a, self.T = found, None

    def copy(self) -> None:
        self.A = self.A.copy()
        self.T = None

    def sampled(self) -> None:
        if not self.a.is_canonical or self.dtype == BOOL or self.spread != "small":
            return
        x = values(self.case, (self.a.shape[0], 16), self.dtype)
        y = values(self.case, (16, self.a.shape[1]), self.dtype)
        full = widened(x) @ widened(y)
        want = np.where(self.a.layers > 0, full, np.zeros((), full.dtype))
        bound = rounding(self.dtype, magnitude(x) @ magnitude(y), 24) if self.dtype in INEXACT else 0.0
        self.case.same_matrix("sddmm", bg.sddmm(here(self.case, x), here(self.case, y), self.A), want, bound)


_STEPS = (
    *(Program.new_values, Program.new_array, Program.new_operand, Program.multiply, Program.multiply),
    *(Program.multiply, Program.multiply_turned, Program.column_sums, Program.sort, Program.copy, Program.sampled),
)


@kind("sequence.program", 10)
def program(case: Case) -> None:
    state = Program(case)
    state.multiply()
    for _ in range(case.number_from(2, 7)):
        case.pick(_STEPS)(state)
    state.multiply()


@kind("sequence.reuse", 6)
def reuse(case: Case) -> None:
    """Operands are freed, and others of the same sizes take their memory."""
    a, dtype, N, spread = problem(case, messy=False)
    result = result_dtype(a.dtype, dtype)
    rows, cols = len(a.indptr) - 1, a.shape[1] // a.blocksize[1]
    for _ in range(3):
        places = np.sort(case.rng.choice(rows * cols, len(a.data), replace=False))
        row, col = np.divmod(places, cols)
        indptr = np.searchsorted(row, np.arange(rows + 1)).astype(a.indptr.dtype)
        data = values(case, a.data.shape, a.dtype, spread)
        b = Sample(data, col.astype(a.indices.dtype), indptr, a.shape)
        x = values(case, (a.shape[1], N), dtype, spread)
        A, X, out = case.place.bsr(b), here(case, x), here(case, np.zeros((a.shape[0], N), result))
        want, bound = expected(b, x)
        for _ in range(2):
            bg.matmul(A, X, out=out)
        case.same("matmul on memory of others", out, want, bound)
        case.same("A @ X on memory of others", A @ X, want, bound)
        del A, X, out


@kind("sequence.reuse_attention", 4)
def reuse_attention(case: Case) -> None:
    """As `reuse`, for attention: masks and operands change under the same addresses."""
    dtype, D, D_v = case.pick(case.pool.heads)
    S, block, masked = case.pick((17, 64, 100)), case.pick(case.pool.mask_blocks), case.chance(0.6)
    for _ in range(3):
        q, k, v = (normal(case, (1, 2, S, d), dtype) for d in (D, D, D_v))
        found, allowed = combined(case, S, S, block) if masked else (None, np.ones((S, S), bool))
        there = [here(case, x) for x in (q, k, v)]
        want = exact(q, k, v, allowed, None, None)
        off = bounds(want, dtype, accumulator_dtype(dtype), D, not case.place.is_host)[0]
        own = np.finfo(np.float16).eps * 8 * np.abs(want.out) + 1e-5 if dtype.itemsize == 2 else 2e-7 * np.abs(want.out)
        for _ in range(2):
            case.same("attention on memory of others", bg.attention(*there, mask=found), want.out, off + own)
        change = normal(case, v.shape, dtype)
        there[2][...] = here(case, change)
        want = exact(q, k, change, allowed, None, None)
        off = bounds(want, dtype, accumulator_dtype(dtype), D, not case.place.is_host)[0]
        own = np.finfo(np.float16).eps * 8 * np.abs(want.out) + 1e-5 if dtype.itemsize == 2 else 2e-7 * np.abs(want.out)
        case.same("attention after a change of v", bg.attention(*there, mask=found), want.out, off + own)
        del there, found


# -------------------------------------------------------------------------------------------- threads
@kind("sequence.threads", 3)
def threads(case: Case) -> None:
    """Threads, each on a stream of its own, multiply with one matrix and attend with one mask that all share."""
    a, dtype, N, spread = problem(case)
    A = bsr(case, a)
    heads = case.pick(case.pool.heads)
    shared, allowed = combined(case, 64, 64, case.pick(case.pool.mask_blocks))
    wait(case)
    work: list[Callable[[Case], None]] = [
        lambda own: _thread_product(own, a, A, values(own, (a.shape[1], N), dtype, spread)),
        lambda own: _thread_attention(own, heads, shared, allowed),
        lambda own: _thread_product(own, *_own_matrix(own, a), values(own, (a.shape[1], N), dtype, spread)),
    ]
    errors: list[BaseException] = []
    children = [case.child(i) for i in range(case.threads)]

    def run(own: Case, stream: Any, start: threading.Barrier) -> None:
        try:
            start.wait(60)
            with stream:
                for _ in range(3):
                    own.pick(work)(own)
                if not case.place.is_host:
                    stream.synchronize()
        except BaseException as error:  # reported by the thread that waits
            errors.append(error)

    barrier = threading.Barrier(case.threads)
    made = [
        threading.Thread(target=run, args=(own, stream, barrier))
        for own, stream in zip(children, streams(case, case.threads), strict=True)
    ]
    for thread in made:
        thread.start()
    for thread in made:
        thread.join()
    case.checks += sum(own.checks for own in children)
    if errors:
        raise errors[0]


def _own_matrix(own: Case, a: Sample) -> tuple[Sample, Any]:
    rows, cols = len(a.indptr) - 1, a.shape[1] // a.blocksize[1]
    b = sample(own, a.dtype, a.blocksize, (rows, cols), most=16)
    return b, own.place.bsr(b)


def _thread_product(own: Case, a: Sample, A: Any, x: np.ndarray[Any, Any]) -> None:
    X = here(own, x)
    want, bound = expected(a, x)
    own.same("A @ X in a thread", A @ X, want, bound)
    out = here(own, np.zeros((a.shape[0], x.shape[1]), result_dtype(a.dtype, x.dtype)))
    bg.matmul(A, X, out=out)
    own.same("matmul(out) in a thread", out, want, bound)


def _thread_attention(own: Case, heads: Any, mask: Any, allowed: np.ndarray[Any, Any]) -> None:
    dtype, D, D_v = heads
    q, k, v = (normal(own, (1, 2, 64, d), dtype) for d in (D, D, D_v))
    want = exact(q, k, v, allowed, None, None)
    off = bounds(want, dtype, accumulator_dtype(dtype), D, not own.place.is_host)[0]
    own_rounding = (8 * np.finfo(np.float16).eps if dtype.itemsize == 2 else 2e-7) * np.abs(want.out) + 1e-5
    there = [here(own, x) for x in (q, k, v)]
    own.same("attention in a thread", bg.attention(*there, mask=mask), want.out, off + own_rounding)


# --------------------------------------------------------------------------------------------- graphs
@kind("sequence.graph", 1.5, card=True)
def graph(case: Case) -> None:
    """A graph of a product and an attention is captured once and replayed after all values have changed."""
    a, dtype, N, spread = problem(case)
    A = bsr(case, a)
    x = values(case, (a.shape[1], N), dtype, spread)
    X, out = here(case, x), here(case, np.zeros((a.shape[0], N), result_dtype(a.dtype, dtype)))
    head, D, D_v = case.pick(case.pool.heads)
    found, allowed = combined(case, 64, 64, case.pick(case.pool.mask_blocks))
    q, k, v = (normal(case, (1, 2, 64, d), head) for d in (D, D, D_v))
    there = [here(case, y) for y in (q, k, v)]
    seen = here(case, np.zeros((1, 2, 64, D_v), head))
    stream = streams(case, 1)[0]
    wait(case)
    with stream:

        def work() -> None:
            bg.matmul(A, X, out=out)
            bg.attention(*there, mask=found, out=seen)

        work()
        stream.synchronize()
        stream.begin_capture()
        try:
            work()
        finally:
            replay = stream.end_capture()
        for _ in range(2):
            data = values(case, a.data.shape, a.dtype, spread)
            x = values(case, x.shape, dtype, spread)
            q = normal(case, q.shape, head)
            for target, new in ((A.data, data), (X, x), (there[0], q)):
                target[...] = here(case, new)
            replay.launch(stream)
            stream.synchronize()
            b = Sample(data, a.indices, a.indptr, a.shape)
            case.same("the product of a graph", out, *expected(b, x))
            want = exact(q, k, v, allowed, None, None)
            off = bounds(want, head, accumulator_dtype(head), D, True)[0]
            own = (8 * np.finfo(np.float16).eps if head.itemsize == 2 else 2e-7) * np.abs(want.out) + 1e-5
            case.same("the attention of a graph", seen, want.out, off + own)
