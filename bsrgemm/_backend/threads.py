"""Threads for products on the CPU: the rows of a product are divided among them, and BLAS runs on one thread meanwhile.

NumPy's BLAS calls and SciPy's loops release the interpreter lock, so Python threads are enough. Their number is at most
the number that BLAS may use, which OMP_NUM_THREADS and threadpoolctl set. Each row is summed by a single thread, so
results do not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

#: The product that uses the threads holds this lock.
_taken = threading.Lock()
#: The number of ranges of rows per thread. With several of them a slow thread can take fewer than the others.
_RANGES = 4


@cache
def _blas() -> list[Any]:
    """Return the BLAS libraries that threadpoolctl finds in this process."""
    from threadpoolctl import ThreadpoolController

    return [library for library in ThreadpoolController().lib_controllers if library.user_api == "blas"]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _OneThread:
    """Limits BLAS to one thread while at least one product runs, and restores its threads after the last of them.

    So the number does not change while a product of another thread calls BLAS, which some versions of OpenBLAS do not
    survive. A limit that the program has set from another thread stays.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.products = 0
        self.before: list[int] = []

    def begin(self) -> int:
        """Limit BLAS, and return the number of threads that products may use instead."""
        with self.lock:
            if not self.products:
                self.before = [library.num_threads for library in _blas()]
                for library, threads in zip(_blas(), self.before, strict=True):
                    if threads != 1:
                        _limit(library, 1)
            self.products += 1
            return min(cores(), max(self.before, default=cores()))

    def end(self) -> None:
        """Give BLAS its threads back if no other product runs and nobody else has changed their number."""
        with self.lock:
            self.products -= 1
            if self.products:
                return
            for library, threads in zip(_blas(), self.before, strict=True):
                if threads != 1 and library.num_threads == 1:
                    _limit(library, threads)


def _limit(library: Any, threads: int) -> None:
    """Set the number of threads of a BLAS library, unless threadpoolctl lets another thread decide.

    The first thread that sets a number keeps the right to it (threadpoolctl 3.8), so it is given up at once.
    """
    library.set_num_threads(threads)
    if hasattr(library, "clear_controlling_thread"):
        library.clear_controlling_thread()


_one_thread = _OneThread()


@contextmanager
def _crew() -> Iterator[int]:
    """Yield the number of threads that a product may use: one if another product is using the threads already."""
    count = _one_thread.begin()
    try:
        if not _taken.acquire(blocking=False):
            yield 1
            return
        try:
            yield count
        finally:
            _taken.release()
    finally:
        _one_thread.end()


def share(
    work: Callable[[int, int], None],
    starts: np.ndarray[Any, Any],
    *,
    most: int,
    worthwhile: bool,
    blas: bool,
) -> None:
    """Call ``work(first, last)`` for ranges that together cover all rows, on up to `most` threads if `worthwhile`.

    Row i has ``starts[i + 1] - starts[i]`` units of work, and the ranges have about equal amounts of it. An exception
    in one of the calls is raised here after all threads have ended. If the work calls BLAS (`blas`), BLAS is limited to
    one thread even when the rows are not divided: the threads of BLAS gain little on small products, and on a busy
    machine each of them waits for a core.
    """
    rows = len(starts) - 1
    if not (worthwhile or blas):
        work(0, rows)
        return
    with _crew() as count:
        count = min(count, most, rows) if worthwhile else 1
        if count < 2:
            work(0, rows)
        else:
            _on_threads(work, ranges(starts, count * _RANGES), count)


def ranges(starts: np.ndarray[Any, Any], count: int) -> list[tuple[int, int]]:
    """Divide the rows into at most `count` ranges with about equal amounts of work.

    >>> ranges(np.array([0, 8, 9, 10, 16]), 2)
    [(0, 1), (1, 4)]
    """
    shares = np.linspace(starts[0], starts[-1], count + 1)[1:-1]
    cuts = np.unique([0, *np.searchsorted(starts, shares), len(starts) - 1]).tolist()
    return list(itertools.pairwise(cuts))


def _on_threads(work: Callable[[int, int], None], parts: list[tuple[int, int]], count: int) -> None:
    waiting: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for part in parts:
        waiting.put(part)
    raised: list[BaseException] = []

    def take() -> None:
        try:
            while not raised:
                work(*waiting.get_nowait())
        except queue.Empty:
            pass
        except BaseException as error:
            raised.append(error)

    others = [threading.Thread(target=take, name="bsrgemm") for _ in range(min(count, len(parts)) - 1)]
    for thread in others:
        thread.start()
    take()
    for thread in others:
        thread.join()
    if raised:
        raise raised[0]
