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


@contextmanager
def _crew() -> Iterator[int]:
    """Yield the number of threads that a product may use: one if another product is using the threads already."""
    if not _taken.acquire(blocking=False):
        yield 1
        return
    try:
        before = [library.num_threads for library in _blas()]
        count = min(cores(), max(before, default=cores()))
        if count == 1:
            yield 1
            return
        for library in _blas():
            library.set_num_threads(1)
        try:
            yield count
        finally:
            for library, threads in zip(_blas(), before, strict=True):
                library.set_num_threads(threads)
    finally:
        _taken.release()


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
