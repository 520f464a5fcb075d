"""Section of bench/run/attention.py: the host time of a call, and what masks cost before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import bsrgemm as bg

from .. import internals
from ..runner import mark
from ..table import Table
from ..timing import Call, add_seconds, host_seconds
from .attention_cases import WINDOW, attend, attention, operands_of
from .attention_run import Bench, filled_cache

#: Most seconds of the host for a call, and for making and listing a long window, and the bytes of that mask
MOST_CALL, MOST_MASK, MOST_MASK_BYTES = 25e-6, 1e-3, 10**6


def section_host(bench: Bench, table: Table) -> None:
    """What a call costs beside its kernel, and what masks cost before it."""
    unit = add_seconds() if bench.on_gpu else None
    for name, call in host_calls(bench).items():
        count = {} if bench.on_gpu else {"count": 2, "rounds": 2}
        seconds = bench.attempt("bsrgemm", name, partial(host_seconds, call, bench.synchronize, **count))
        if seconds is None:
            continue
        reached = seconds <= MOST_CALL if bench.on_gpu else None
        adds = None if unit is None else seconds / unit
        beside = "" if adds is None else f" = {adds:.1f} x cupy.add | bound 25 {mark(reached)}"
        table.add(
            f"{name:32} {seconds * 1e6:9.1f} us of the host{beside}",
            what=name, seconds=seconds, add_seconds=unit, adds=adds, bound=MOST_CALL, reached=reached,
        )  # fmt: skip
    for name, (build, bounded) in masks().items():
        mask_line(bench, table, name, build, bounded)


def host_calls(bench: Bench) -> dict[str, Call]:
    """Calls on small operands, which leave the GPU far from busy."""
    S, problem = 256, attention((1, 2, 256, 128))
    q, k, v = operands_of(bench, problem)
    token = bench.xp.empty((1, 2, 1, 128), q.dtype)
    token[...] = q[:, :, :1]
    store = filled_cache(bench, k, v, None)
    return {
        "attention, causal": attend(q, k, v, causal=True),
        "attention, window": attend(q, k, v, window=(100, 0)),
        "attention, mask": attend(q, k, v, bg.BlockMask.random(S, per_row=1, device=bench.device)),
        "attention, mask of 64-blocks": attend(
            q, k, v, bg.BlockMask.random(S, per_row=2, block=64, device=bench.device)
        ),
        "attention_decode": partial(bg.attention_decode, token, store, out=bench.xp.empty_like(token)),
    }


def masks() -> dict[str, tuple[Callable[[], bg.BlockMask], bool]]:
    """Masks to be made, and whether there are bounds for them."""
    M, long, middle = bg.BlockMask, 524288, 16384
    return {
        "window 2048 at 524288": (lambda: M.window(long, left=WINDOW - 1, right=0), True),
        "causal at 16384": (lambda: M.causal(middle), False),
        "random, 16 heads at 16384": (lambda: M.random(middle, per_row=26, heads=(1, 16)), False),
        "random 64-blocks at 16384": (lambda: M.random(middle, per_row=51, block=64), False),
        "window | sinks at 131072": (
            lambda: M.window(131072, left=WINDOW - 1, right=0) | M.sinks(131072, count=64),
            False,
        ),
    }


def mask_line(bench: Bench, table: Table, name: str, build: Callable[[], bg.BlockMask], bounded: bool) -> None:
    """Least seconds to make a mask and to list its tiles, and its bytes."""

    def measure() -> tuple[float, float, int]:
        mask = build()
        return least_seconds(bench, build), least_seconds(bench, internals.mask_listing(mask)), mask.nbytes

    found = bench.attempt("bsrgemm", name, measure)
    if found is None:
        return
    seconds, listing, size = found
    reached = seconds + listing <= MOST_MASK and size <= MOST_MASK_BYTES if bounded and bench.on_gpu else None
    bound = "" if reached is None else f" | bound 1 ms, 1 MB {mark(reached)}"
    table.add(
        f"{name:32} {seconds * 1e3:9.3f} ms to make, {listing * 1e3:9.3f} ms to list its tiles, "
        f"{size / 1e6:.3f} MB{bound}",
        what=name, make_seconds=seconds, list_seconds=listing, nbytes=size, reached=reached,
    )  # fmt: skip


def least_seconds(bench: Bench, call: Call) -> float:
    """Least seconds of a call, the GPU waited for."""
    call()
    least = float("inf")
    for _ in range(5 if bench.on_gpu else 2):
        bench.synchronize()
        start = time.perf_counter()
        call()
        bench.synchronize()
        least = min(least, time.perf_counter() - start)
    return least
