"""Every allocation of every call of the soak fails once: an error, operands unharmed, the next call right, no leak."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bsrgemm import BlockMask

from ..soak.calls import CALLS, DTYPES, Operands, Pair, sample
from ..strategies import FLAVOURS, Place

PLACE = Place("cuda")


class Allocator:
    """In the place of CuPy's; fails at the request of a number since it was armed, 0 for none."""

    def __init__(self) -> None:
        import cupy

        self.error, self.pool = cupy.cuda.memory.OutOfMemoryError, cupy.cuda.MemoryPool()
        self.requests, self.failing, self.lost = 0, 0, False

    def arm(self, number: int) -> None:
        self.requests, self.failing, self.lost = 0, number, False

    def malloc(self, size: int) -> Any:
        self.requests += 1
        if self.requests == self.failing:
            raise self.error(1, 0, 0)
        return self.pool.malloc(size)

    def unraisable(self, _: Any) -> None:
        self.lost = True  # on its way up, by code in C++ that cannot raise


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    import cupy

    found = Allocator()
    monkeypatch.setattr(sys, "unraisablehook", found.unraisable)
    with cupy.cuda.using_allocator(found.malloc):
        yield found


def frozen(x: Any) -> Any:
    """The values of arrays, matrices and masks on the host, to be compared bit by bit."""
    if isinstance(x, tuple | list):
        return [frozen(item) for item in x]
    if isinstance(x, FLAVOURS):
        return [x.shape, x.blocksize, frozen(x.toarray())]  # a call may sort blocks, which changes no value
    if isinstance(x, BlockMask):
        return [x.shape, x.block, x.heads, frozen(x.to_dense())]
    x = x.get() if hasattr(x, "get") else x
    return [x.shape, x.dtype.str, x.tobytes()] if isinstance(x, np.ndarray) else repr(x)


def exhaust(
    allocator: Any,
    made: Callable[[], tuple[list[Any], Callable[[], Any]]],
    live: Callable[[], int],
    changes: bool = False,
) -> int:
    """Let every allocation of a call fail; AssertionError says what went wrong. Returns how many there are.

    Of calls that change an operand and then read it, the first may have succeeded: the next call has other operands.
    """
    want = None
    for _ in range(2):  # what all calls share (counters, plans, kernels) is there before anything is counted
        operands, run = made()
        want = frozen(run())
        del operands, run
    gc.collect()
    base = live()
    for number in range(1, 10_000):
        operands, run = made()
        before, result = frozen(operands), None
        allocator.arm(number)
        with suppress(MemoryError, SystemError):  # the second: an error of C++ that Python found after the call
            result = run()
        failed, lost = allocator.requests >= number, allocator.lost
        allocator.arm(0)
        if lost:  # CuPy sorted with memory that it did not get: nothing here could know
            continue
        if result is not None:
            assert frozen(result) == want, f"request {number} fails: no error, and the result is wrong"
        else:
            if changes:
                operands, run = made()
            assert frozen(operands) == before, f"request {number} fails: an operand has changed"
            assert frozen(run()) == want, f"request {number} fails: the next call is wrong"
        del operands, run, result
        gc.collect()
        assert live() == base, f"request {number} fails: {live() - base} bytes are leaked"
        if not failed:
            return number - 1
    raise AssertionError("the call does not end")


#: Calls that change A and then read it.
CHANGES = ("assembled", "assigned", "changed(", "imul(", "isub(", "itruediv(", "new_values")


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_that_runs_out_of_memory_does_no_harm(name: str, allocator: Allocator) -> None:
    def made() -> tuple[list[Any], Callable[[], Any]]:
        o = operands(able[0])
        state = o.rng.bit_generator.state

        def run() -> Any:
            o.rng.bit_generator.state = state
            return [frozen(got) for got, *_ in CALLS[name].run(o)]

        return [o.A, o.B, o.X], run

    def operands(dtype: np.dtype[Any]) -> Operands:
        rng = np.random.default_rng(1)
        A, B = (Pair(PLACE, sample(rng, dtype, (4, 4), (7, 7), False)) for _ in range(2))
        return Operands(PLACE, rng, A, B)

    dtypes = (np.dtype(np.float16), np.dtype(np.float32), *DTYPES)
    able = [dtype for dtype in dtypes if CALLS[name].able(operands(dtype))]
    if not able:
        pytest.skip("this call is for matrices on the host")
    exhaust(allocator, made, lambda: int(allocator.pool.used_bytes()), changes=name.startswith(CHANGES))


@pytest.mark.parametrize("fault", ["none", "harms", "leaks", "forgets", "swallows"])
def test_every_harm_of_a_failed_allocation_is_seen(fault: str) -> None:
    used, poisoned, allocator = [0], [False], Allocator.__new__(Allocator)
    allocator.error, allocator.pool = lambda *_: MemoryError(), SimpleNamespace(malloc=lambda size: size)
    allocator.arm(0)

    def made() -> tuple[list[Any], Callable[[], Any]]:
        x = np.arange(4.0)

        def run() -> Any:
            x[0] += fault == "harms"
            try:
                for _ in range(3):
                    allocator.malloc(1)
            except MemoryError:
                used[0] += fault == "leaks"
                poisoned[0] = fault == "forgets"
                if fault != "swallows":
                    raise
                return x
            return x * (1 if poisoned[0] else 2)

        return [x], run

    if fault == "none":
        assert exhaust(allocator, made, lambda: used[0]) == 3
        return
    wanted = {"harms": "has changed", "leaks": "leaked", "forgets": "next call is wrong", "swallows": "result is wrong"}
    with pytest.raises(AssertionError, match=wanted[fault]):
        exhaust(allocator, made, lambda: used[0])
