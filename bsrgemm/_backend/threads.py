"""Threads of the host: rows of a product are shared out among them, and BLAS keeps to one thread meanwhile.

NumPy's BLAS calls and SciPy's loops let go of the interpreter, so threads of Python are enough. There are as many as
BLAS may use: OMP_NUM_THREADS, threadpoolctl and the like are heeded. A row is summed by one thread, whichever it is, so
results do not depend on their number.
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

#: Held by the product that has the threads.
_taken = threading.Lock()
#: Ranges of rows for each thread: a slow one takes fewer.
_RANGES = 4


@cache
def _blas() -> list[Any]:
    """The BLAS libraries of this process, as threadpoolctl knows them."""
    from threadpoolctl import ThreadpoolController

    return [library for library in ThreadpoolController().lib_controllers if library.user_api == "blas"]


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _crew() -> Iterator[int]:
    """How many threads a product may use now. One beside another product, which has them all."""
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
    """Call ``work(first, last)`` for ranges that together are all rows, on up to `most` threads if it is `worthwhile`.

    ``starts[i]`` is where the work of row i begins: ranges have about equal shares of it. What a call raises is raised
    here when all threads have ended. Work that calls BLAS (`blas`) has it at one thread in any case, unless there is
    but one row or one thread: BLAS's own threads gain little on small products, and on a busy machine each of them
    waits for a core.
    """
    rows = len(starts) - 1
    if rows < 2 or most < 2 or not (worthwhile or blas):
        work(0, rows)
        return
    with _crew() as count:
        count = min(count, most) if worthwhile else 1
        if count == 1:
            work(0, rows)
        else:
            _on_threads(work, ranges(starts, count * _RANGES), count)


def ranges(starts: np.ndarray[Any, Any], count: int) -> list[tuple[int, int]]:
    """Up to so many ranges of rows with about equal work.

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
