"""Which kernel multiplies, and behind which preparations: a preparation is a kernel that holds a kernel.

Preparations come in one order, each at most once: the matrix is filled up; operands are copied; a complex product is
made a real one; operands of the real one are copied. The choice is the shortest predicted time of all that can be put
together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from .._kernels.card import Card
from .._kernels.kernel import Kernel
from . import tuned
from .call import Problem
from .choice import DENSE, plain, variants
from .copied import copied, copies_of, panel_width
from .dense import Dense, Holder, Tiled
from .filled import Filled, filled
from .real_views import RealViews

#: Preparations around each other, each with the product that is asked of it, the outermost first.
Way = tuple[tuple[Holder, Problem], ...]


def options(problem: Problem, copies: bool = True) -> Iterator[Dense]:
    """Yield everything that can compute a product: kernels as they are, and kernels behind preparations."""
    for way, inner in _ways(problem) if copies else [((), problem)]:
        yield from (_held(way, kernel) for kernel in _serving(way, inner))


def _ways(problem: Problem) -> Iterator[tuple[Way, Problem]]:
    """Yield how operands can be prepared, and the product that a kernel computes then; first not at all."""
    starts: list[tuple[Way, Problem]] = [((), problem)]
    if Filled.serves(problem):
        starts.append((((Filled(None), problem),), filled(problem)))
    for start in starts:
        for way, inner in _with_copies(*start):
            yield way, inner
            if RealViews.serves(inner) and inner.b_order == problem.b_order:  # which copies B itself
                views = RealViews(None)
                yield from _with_copies((*way, (views, inner)), views.inner(inner))


def _with_copies(way: Way, problem: Problem) -> Iterator[tuple[Way, Problem]]:
    yield way, problem
    for copy in copies_of(problem):
        if panel_width(problem, copy):
            yield (*way, (copy, problem)), copied(problem, copy)


def _serving(way: Way, problem: Problem) -> Iterator[Dense]:
    """The kernels for a product that was prepared; only tensor cores are worth a filled matrix."""
    is_filled = bool(way) and isinstance(way[0][0], Filled)
    for kernel in DENSE:
        if is_filled and not issubclass(kernel, Tiled):
            continue
        if kernel.reads(problem):
            yield kernel.best(problem)


def _held(way: Way, kernel: Dense) -> Dense:
    for holder, _ in reversed(way):
        kernel = replace(holder, kernel=kernel)
    return kernel


def _around(way: Way, inner: Problem, card: Card) -> float:
    """Seconds of all preparations."""
    total = 0.0
    for holder, problem in reversed(way):
        total += holder.around(problem, inner, card)
        inner = problem
    return total


def compiled_for(problem: Problem, card: Card) -> Dense:
    """Return the kernel that multiplies where nothing is forced or tuned; those that copy are few."""
    return innermost(fastest(problem, card, True))


def innermost(kernel: Any) -> Dense:
    """The kernel that multiplies, behind all preparations."""
    while isinstance(kernel, Holder):
        kernel = kernel.kernel
    assert isinstance(kernel, Dense)
    return kernel


def choose(problem: Problem, card: Card, copies: bool = True) -> Dense:
    """Return the kernel for a product: the forced one, the one that `tune` has stored, or the fastest by prediction.

    With `copies` it may be a preparation, which copies an operand for another kernel.
    """
    forced = Kernel.forced
    if forced is None:
        stored = tuned.stored(problem)
        return fastest(problem, card, copies) if stored is None else stored
    for kernel in (*variants(problem), *options(problem, copies)):
        if type(innermost(kernel)).__name__ == forced:
            return kernel
    raise ValueError(f"{forced} cannot multiply this: {problem}")


@lru_cache(maxsize=4096)
def fastest(problem: Problem, card: Card, copies: bool) -> Dense:
    """The option with the shortest predicted time, the first one of equals."""
    if not copies:
        return plain(problem, card)
    best, least = None, math.inf
    for way, inner in _ways(problem):
        around = _around(way, inner, card)
        if around >= least:  # whatever it holds, the product is slower
            continue
        for kernel in _serving(way, inner):
            seconds = kernel.seconds(inner, card) + around
            if best is None or seconds < least:
                best, least = _held(way, kernel), seconds
    if best is None:
        raise ValueError(f"no kernel can multiply this: {problem}")
    return best
