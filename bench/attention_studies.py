"""Sections of bench/attention.py: long sequences, densities, hard inputs, what a call and a mask cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from attention_bench import PEERS, Bench, filled_cache, verified
from attention_cases import (
    DENSE_PEERS,
    WINDOW,
    Case,
    array_module,
    attend,
    case_operands,
    checked,
    normal,
    operands,
    synchronize,
)
from harness import Table, on_gpu
from report import mark
from table_rows import MOST_ERROR

import bsrgemm as bg
from bsrgemm._benchmark.attention_check import TOLERANCE, Reference
from bsrgemm._benchmark.timing import Call


# ------------------------------------------------------------------------------------------- long
def peak_bytes(call: Call) -> int | None:
    """The most that a call takes from CuPy's memory pool at a time; None on the CPU."""
    if not on_gpu():
        return None
    import cupy

    class Peak(cupy.cuda.MemoryHook):
        name = "Peak"
        now = most = 0

        def malloc_postprocess(self, **about: int) -> None:
            self.now += about["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **about: int) -> None:
            self.now -= about["mem_size"]

    hook = Peak()
    with hook:
        call()
    cupy.cuda.Device().synchronize()
    return hook.most


def section_long(bench: Bench, table: Table) -> None:
    """Long sequences: time and memory of sparse masks, and how much faster they are than dense causal."""
    H, D, window, size = (8, 128, WINDOW, 128) if on_gpu() else (2, 64, 64, 16)
    lengths = bench.some([131072, 262144, 524288], [131072]) if on_gpu() else [1024, 2048]
    first = lengths[0]
    case = Case((1, H, first, D), causal=True)
    label = f"{first:7} dense causal       "
    q, k, v = case_operands(case)
    call = attend(q, k, v, causal=True)
    reference = case.reference(q, k, v)
    dense: dict[str, float] = {}
    if verified(bench, table, label, call, reference.error):

        def make(name: str) -> Call:
            return checked(PEERS[name](q, k, v, causal=True), reference.error, "float16")

        # All scores of the full length would not fit the time of plain NumPy.
        names = ["cuDNN"] if on_gpu() else []
        seconds, times = bench.interleaved(call, bench.prepared(names, label, make) if names else {}, label)
        dense = {"ours": seconds} | {name: x for name, x in times.items() if x is not None}
        text = " | ".join(f"{name} {x * 1e3:9.2f} ms" for name, x in dense.items())
        table.add(f"{label} | {text} | measured", length=first, mask="dense causal", seconds=dense)
    for S in lengths:
        each = max(1, round(0.05 * S / size))
        for case in (Case((1, H, S, D), window=window), Case((1, H, S, D), blocks=(size, each, False))):
            label = f"{S:7} {'window ' + str(window) if case.window else '5 % random blocks':19}"
            table.progress(label)
            bench.attempt("bench", label, partial(long_row, bench, table, case, label, dense, (S / first) ** 2))


def long_row(bench: Bench, table: Table, case: Case, label: str, dense: dict[str, float], factor: float) -> None:
    q, k, v = case_operands(case)
    mask = case.mask()
    call = attend(q, k, v, mask, **case.options)
    peak = bench.attempt("bsrgemm", label, partial(peak_bytes, call))  # the first call, which lists the mask's tiles
    if not verified(bench, table, label, call, case.reference(q, k, v, mask).error):
        return
    seconds = bench.seconds(call)
    held = 0 if mask is None else mask.nbytes
    rate = 4.0 * case.shape[3] * case.pairs(mask) / seconds / 1e12
    speed_up = {name: x * factor / seconds for name, x in dense.items()}
    how = "measured" if factor == 1 else f"computed, {factor:g} x its time at the first length"
    text = ", ".join(f"{x:.1f} x {name}" for name, x in speed_up.items())
    extra = "-" if peak is None else f"{(peak + held) / 1e6:.2f}"
    table.add(
        f"{label} | {seconds * 1e3:9.2f} ms {rate:7.{1 if on_gpu() else 4}f} TFLOP/s | extra memory {extra} MB | "
        f"dense causal: {text} ({how})",
        length=case.shape[2], mask=case.name, seconds=seconds, tflops=rate, peak_bytes=peak, mask_bytes=held,
        speed_up=speed_up, dense_computed=factor != 1,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- density
def line_fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(slope, value at 0) of the line closest to the points.

    >>> [round(number, 9) for number in line_fit([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])]
    [2.0, 1.0]
    """
    slope, start = np.polyfit(x, y, 1)
    return float(slope), float(start)


def section_density(bench: Bench, table: Table) -> None:
    """Time by density of random blocks, against density times the time of dense attention."""
    shape, size = ((1, 8, 32768, 128), 128) if on_gpu() else ((1, 2, 512, 64), 16)
    densities = bench.some([0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0], [0.05, 0.2, 1.0])
    q, k, v = case_operands(Case(shape))
    full = attend(q, k, v)
    if not verified(bench, table, "full", full, Case(shape).reference(q, k, v).error):
        return
    before = bench.seconds(full)
    found = []
    for density in densities:
        case = Case(shape, blocks=(size, max(1, round(density * shape[2] / size)), False))
        mask = case.mask()
        assert mask is not None
        label = f"{mask.density:6.4f}"
        table.progress(label)
        call = attend(q, k, v, mask)
        if not verified(bench, table, label, call, case.reference(q, k, v, mask).error):
            continue
        seconds, after = bench.seconds(call), bench.seconds(full)
        dense, before = (before + after) / 2, after
        found.append((mask.density * dense, seconds))
        table.add(
            f"{label} | {seconds * 1e3:8.3f} ms | density x full {mask.density * dense * 1e3:8.3f} ms | "
            f"ratio {seconds / (mask.density * dense):6.3f}",
            shape=shape, block=size, density=mask.density, seconds=seconds, full_seconds=dense,
            ratio=seconds / (mask.density * dense),
        )  # fmt: skip
    if len(found) > 1:
        slope, start = line_fit(*zip(*found, strict=True))
        table.add(
            f"fit | {slope:.3f} x density x full + {start * 1e6:.1f} us", shape=shape, slope=slope, start_seconds=start
        )


# --------------------------------------------------------------------------------------- accuracy
def hard_inputs(kind: str, shape: tuple[int, int, int, int], dtype: str) -> tuple[Any, Any, Any]:
    """q, k and v whose scores do what `kind` says."""
    xp, (_, _, S, D) = array_module(), shape
    q, k, v = (normal(shape, dtype) for _ in range(3))
    side = xp.asarray(np.where(np.arange(D) % 3, 1.0, -1.0).astype(np.float32))

    def along(steps: Any) -> Any:
        """Keys in one direction, key j `steps[j]` far."""
        return xp.asarray(np.asarray(steps, np.float32))[:, None] * side

    if kind == "rising ramp":  # a score of 11.3 for each unit at head dim 128: 0 to 30, with noise
        q[...] = (side + 0.3 * q.astype(np.float32)).astype(q.dtype)
        k[...] = along(np.linspace(0, 30 / D**0.5, S)).astype(k.dtype)
    elif kind == "one huge key":
        k[:, :, -1] = 60
    elif kind == "scores to 1e4":
        far = (1e4 / D**0.5) ** 0.5
        q[...] = (far * side).astype(q.dtype)
        k[...] = along(np.random.default_rng(0).permutation(np.linspace(-far, far, S))).astype(k.dtype)
    elif kind == "constant rows":
        q[...], k[...] = 1, 0.5
    return q, k, v


HARD = ("plain", "rising ramp", "one huge key", "scores to 1e4", "constant rows")


def section_accuracy(bench: Bench, table: Table) -> None:
    """Error against float64 and time, on inputs that are hard for an online softmax."""
    shape = (1, 16, 8192, 128) if on_gpu() else (1, 2, 256, 64)
    table.note("largest error over max(1, size), time over that of the plain inputs")
    plain: dict[str, float] = {}
    kinds = [(kind, "float16") for kind in bench.some(HARD, HARD[:3])]
    for kind, dtype in [*kinds, ("plain", "bfloat16")]:
        label, case = f"{kind:14} {dtype:8}", Case(shape, dtype=dtype)
        table.progress(label)
        q, k, v = hard_inputs(kind, shape, dtype)
        # of all queries: the largest of a few errors would be a matter of luck
        reference = case.reference(q, k, v, whole=True)
        calls = {"bsrgemm": attend(q, k, v)}
        calls |= bench.prepared(DENSE_PEERS, label, lambda name, x=(q, k, v): PEERS[name](*x))
        found: dict[str, dict[str, float]] = {}
        for name, call in calls.items():

            def measure(call: Call = call, reference: Reference = reference) -> dict[str, float]:
                return {"error": reference.error(call()), "seconds": bench.seconds(call)}

            row = bench.attempt(name, label, measure)
            if row is not None:
                if kind == "plain" and dtype == "float16":
                    plain[name] = row["seconds"]
                found[name] = row | {"slower": row["seconds"] / plain.get(name, row["seconds"])}
        if "bsrgemm" not in found:
            table.add(f"{label} | -", what=label.strip(), failed=True)
            continue
        ours, others = found["bsrgemm"]["error"], [x["error"] for name, x in found.items() if name != "bsrgemm"]
        good, best = ours <= TOLERANCE[dtype], min(others, default=None)
        reached = None if best is None else ours <= MOST_ERROR * best
        text = " | ".join(f"{name} {x['error']:.1e} x{x['slower']:.2f}" for name, x in found.items())
        table.add(
            f"{label} | {text} | {'good' if good else 'WRONG'} | at most {MOST_ERROR} of the best {mark(reached)}",
            inputs=kind, dtype=dtype, shape=shape, errors=found, good=good, reached=reached,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------- host
def host_seconds(call: Call, count: int = 200) -> float:
    """Host seconds of one call, the GPU being far from busy."""
    best = float("inf")
    call()
    for _ in range(10 if on_gpu() else 2):
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def section_host(bench: Bench, table: Table) -> None:
    """What a call costs beside its kernel, and what masks cost before it."""
    S, D = 256, 128
    q, k, v = operands(1, 2, 2, S, D, "float16")
    store = filled_cache(k, v, None)
    token = array_module().empty((1, 2, 1, D), q.dtype)
    token[...] = q[:, :, :1]
    calls = {
        "attention, causal": attend(q, k, v, causal=True),
        "attention, window": attend(q, k, v, window=(100, 0)),
        "attention, mask": attend(q, k, v, bg.BlockMask.random(S, per_row=1)),
        "attention, mask of 64-blocks": attend(q, k, v, bg.BlockMask.random(S, per_row=2, block=64)),
        "attention_decode": partial(bg.attention_decode, token, store, out=array_module().empty_like(token)),
    }
    for name, call in calls.items():
        seconds = bench.attempt("bsrgemm", name, partial(host_seconds, call, 200 if on_gpu() else 2))
        if seconds is None:
            continue
        reached = seconds <= 25e-6 if on_gpu() else None
        table.add(
            f"{name:32} {seconds * 1e6:9.1f} us of the host{f' | bound 25 {mark(reached)}' if on_gpu() else ''}",
            what=name, seconds=seconds, bound=25e-6, reached=reached,
        )  # fmt: skip
    M, long, middle = bg.BlockMask, 524288, 16384
    masks: dict[str, tuple[Callable[[], bg.BlockMask], float | None, int | None]] = {
        "window 2048 at 524288": (lambda: M.window(long, left=WINDOW - 1, right=0), 1e-3, 10**6),
        "causal at 16384": (lambda: M.causal(middle), None, None),
        "random, 16 heads at 16384": (lambda: M.random(middle, per_row=26, heads=(1, 16)), None, None),
        "random 64-blocks at 16384": (lambda: M.random(middle, per_row=51, block=64), None, None),
        "window | sinks at 131072": (
            lambda: M.window(131072, left=WINDOW - 1, right=0) | M.sinks(131072, count=64),
            None,
            None,
        ),
    }
    for name, (build, most, most_bytes) in masks.items():
        measured = bench.attempt("bsrgemm", name, partial(mask_cost, build))
        if measured is None:
            continue
        seconds, listing, size = measured
        bounded = on_gpu() and most is not None and most_bytes is not None
        reached = seconds + listing <= most and size <= most_bytes if bounded else None
        bound = "" if reached is None else f" | bound 1 ms, 1 MB {mark(reached)}"
        table.add(
            f"{name:32} {seconds * 1e3:9.3f} ms to make, {listing * 1e3:9.3f} ms to list its tiles, "
            f"{size / 1e6:.3f} MB{bound}",
            what=name, make_seconds=seconds, list_seconds=listing, nbytes=size, reached=reached,
        )  # fmt: skip


def mask_cost(build: Callable[[], bg.BlockMask]) -> tuple[float, float, int]:
    """Least seconds to make a mask, and to list it for tiles of 128 x 128, and its bytes."""
    from bsrgemm._attention import mask_tiles

    mask = build()
    made = partial(mask_tiles.tiles, mask._backend, mask, 128, 128)
    found = []
    for call in (build, made):
        call()
        best = float("inf")
        for _ in range(5 if on_gpu() else 2):
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            best = min(best, time.perf_counter() - start)
        found.append(best)
    return found[0], found[1], mask.nbytes
