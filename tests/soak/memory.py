"""Out of memory at every allocation of a call: an error, operands unharmed, the next call right, nothing leaked.

An allocator that fails at the k-th request is tried for k = 1, 2, ... until the call makes fewer requests than that.
It takes the place of CuPy's.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from bsrgemm import BlockMask, KVCache
from bsrgemm._array.base import BsrBase

from ..strategies import Place
from .memory_calls import CALLS, Maker


class Allocator:
    """Counts the requests for memory since `arm`, and fails at one of them."""

    def __init__(self, error: Callable[[], MemoryError] = lambda: MemoryError("the allocator fails here")) -> None:
        self.requests, self.failing = 0, 0
        #: did the library below lose the error on its way up, as code in C++ that cannot raise does?
        self.lost, self.losses = False, 0
        self._error = error

    def arm(self, number: int) -> None:
        """Fail at the request of this number from now on; 0: at none."""
        self.requests, self.failing, self.lost = 0, number, False

    def request(self) -> None:
        self.requests += 1
        if self.requests == self.failing:
            raise self._error()

    @property
    def failed(self) -> bool:
        return bool(self.failing) and self.requests >= self.failing

    def live(self) -> int:
        """How much memory is in use; each kind of allocator has its own count."""
        raise NotImplementedError


class CupyAllocator(Allocator):
    """In the place of CuPy's allocator, with a pool of its own."""

    def __init__(self) -> None:
        import cupy

        super().__init__(lambda: cupy.cuda.memory.OutOfMemoryError(1, 0, 0))
        self._pool = cupy.cuda.MemoryPool()
        cupy.cuda.set_allocator(self._malloc)
        sys.unraisablehook = self._unraisable

    def _unraisable(self, what: Any) -> None:
        self.lost = True

    def _malloc(self, size: int) -> Any:
        self.request()
        return self._pool.malloc(size)

    def live(self) -> int:
        return int(self._pool.used_bytes())


# ------------------------------------------------------------------------------------------- snapshots
def frozen(place: Place, x: Any) -> Any:
    """The values of arrays, matrices, masks and caches on the host, to be compared bit by bit."""
    if isinstance(x, tuple | list):
        return [frozen(place, item) for item in x]
    if isinstance(x, BsrBase):
        # A call may sort the blocks of an operand, which changes no value.
        return [x.shape, x.blocksize, frozen(place, x.toarray())]
    if isinstance(x, BlockMask):
        return [x.shape, x.block, x.heads, frozen(place, x.to_dense())]
    if isinstance(x, KVCache):
        held = [frozen(place, x.gathered(b)) for b in range(x.batch)]
        return [x.lengths.tolist(), frozen(place, x._device_lengths), len(x._free), _table(place, x), held]
    if place.backend.is_dense(x):
        host = np.ascontiguousarray(place.backend.to_host(x))
        return [host.shape, host.dtype.str, host.tobytes()]
    return repr(x)


def _table(place: Place, cache: KVCache) -> Any:
    """The pages of a cache as the device has them, for the tokens that there are."""
    if cache.table is None or cache.page is None:
        return None
    table = place.backend.to_host(cache.table)
    return [table[b, : -(-int(n) // cache.page)].tolist() for b, n in enumerate(cache.lengths)]


# ------------------------------------------------------------------------------------------------ calls
def exhaust(place: Place, allocator: Allocator, name: str) -> int:
    """Let every allocation of a call fail; AssertionError says what went wrong. Returns how many there are."""
    maker = Maker(place, name)
    want = None
    for _ in range(2):  # what all calls share (counters, plans, kernels) is there before anything is counted
        operands, run = CALLS[name](maker)
        want = frozen(place, run())
        del operands, run
    gc.collect()
    gc.freeze()  # later collections look at what is new only
    base = allocator.live()
    for number in range(1, 10_000):
        operands, run = CALLS[name](maker)
        if _attempt(place, allocator, operands, run, number, want):
            return number - 1
        del operands, run
        if allocator.live() != base:  # perhaps a cycle of references that nobody has collected yet
            gc.collect()
        left = allocator.live() - base
        assert not left, f"request {number} fails: {left} bytes are leaked"
    raise AssertionError("the call does not end")


def _attempt(
    place: Place, allocator: Allocator, operands: list[Any], run: Callable[[], Any], number: int, want: Any
) -> bool:
    """Fail at one request; True if the call makes fewer."""
    before = frozen(place, operands)
    allocator.arm(number)
    result = error = None
    try:
        result = run()
    except MemoryError as found:
        error = found.with_traceback(None)
    except SystemError:  # an error of C++ that Python found after the call
        allocator.lost = True
    finally:
        failed, lost = allocator.failed, allocator.lost
        allocator.arm(0)
    allocator.losses += lost
    if lost:  # CuPy sorted with memory that it did not get: nothing here could know
        return False
    if not failed:
        assert frozen(place, result) == want, "the call is wrong without a failure"
        return True
    if error is None:  # the call found another way
        assert frozen(place, result) == want, f"request {number} fails: no error, and the result is wrong"
        return False
    assert frozen(place, operands) == before, f"request {number} fails: an operand has changed"
    assert frozen(place, run()) == want, f"request {number} fails: the next call is wrong"
    return False


def main(place: Place, names: Iterable[str] = ()) -> int:
    """Run all calls and print a line for each; 1 if one of them is wrong."""
    if place.is_host:
        print("--out-of-memory: wanted a GPU (--backend cupy), or --stand-in for a rehearsal")
        return 2
    allocator = CupyAllocator()
    wrong = 0
    for name in names or CALLS:
        try:
            print(f"ok    {name}: {exhaust(place, allocator, name)} allocations", flush=True)
        except Exception as error:
            wrong += 1
            print(f"WRONG {name}: {type(error).__name__}: {error}", flush=True)
    lost = f"; {allocator.losses} errors were lost inside CuPy and could not be judged" if allocator.losses else ""
    print(f"{len(list(names or CALLS))} calls, {wrong} wrong{lost}")
    return 1 if wrong else 0
