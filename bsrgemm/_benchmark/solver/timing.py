"""The clock of the benchmarks of solvers, and how exact their solutions are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

RTOL = 1e-8


def timed(function: Callable[[], Any], xp: Any, rounds: int, wall: bool = False) -> tuple[Any, float]:
    """Return what a function returns, and the least time of some calls, on the host their CPU time unless `wall`."""
    on_card = hasattr(xp, "cuda")
    clock = time.perf_counter if on_card or wall else time.process_time
    found, best = None, float("inf")
    for _ in range(rounds):
        if on_card:
            xp.cuda.get_current_stream().synchronize()
        start = clock()
        found = function()
        if on_card:
            xp.cuda.get_current_stream().synchronize()
        best = min(best, clock() - start)
    return found, best


def captured(function: Callable[[], Any], xp: Any) -> Callable[[], None]:
    """Return a function that replays the launches of a call, which is warm and waits for nothing, as a CUDA graph."""
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.get_current_stream().synchronize()
    with stream:
        function()
        stream.synchronize()
        stream.begin_capture()
        result = function()
        graph = stream.end_capture()

    def replay(kept: Any = (result, stream)) -> None:
        graph.launch(xp.cuda.get_current_stream())

    return replay
