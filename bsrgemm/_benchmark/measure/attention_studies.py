"""Sections of bench/run/attention.py: long sequences, densities, hard inputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..cases.attentions import Attention
from ..checks.attention import TOLERANCE, Reference
from ..random_data import normal
from ..runner import mark
from ..show.bounds import MOST_ERROR
from ..table import Table
from ..timing import Call
from .attention_cases import DENSE_PEERS, WINDOW, Case, attend, attention, operands_of
from .attention_run import Bench


# ------------------------------------------------------------------------------------------- long
def peak_bytes(bench: Bench, call: Call) -> int | None:
    """The most that a call takes from CuPy's memory pool at a time; None on the CPU."""
    return peak_of(call) if bench.on_gpu else None


def peak_of(call: Call) -> int:
    """The same for a call that runs on the GPU."""
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
    H, D, window, size = (8, 128, WINDOW, 128) if bench.on_gpu else (2, 64, 64, 16)
    lengths = bench.some([131072, 262144, 524288], [131072]) if bench.on_gpu else [1024, 2048]
    first = lengths[0]
    dense = dense_causal(bench, table, (1, H, first, D))
    for S in lengths:
        each = max(1, round(0.05 * S / size))
        for problem in (attention((1, H, S, D), window=window), attention((1, H, S, D), blocks=(size, each))):
            label = f"{S:7} {'window ' + str(window) if problem.window else '5 % random blocks':19}"
            table.progress(label)
            bench.attempt("bench", label, partial(long_row, bench, table, problem, label, dense, (S / first) ** 2))


def dense_causal(bench: Bench, table: Table, shape: tuple[int, int, int, int]) -> dict[str, float]:
    """Seconds of dense causal attention, ours and cuDNN's in turn; nothing if our result is wrong."""
    problem, label = attention(shape, causal=True), f"{shape[2]:7} dense causal       "
    operands = operands_of(bench, problem)
    call = attend(*operands, causal=True)
    reference = Reference.of(problem.seen(None), *operands)
    if not bench.verified(table, label, call, reference.error, TOLERANCE["float16"]):
        return {}
    # All scores of the full length would take plain NumPy too long.
    others = bench.peer_calls(("cuDNN",), label, operands, reference, causal=True) if bench.on_gpu else {}
    found = bench.interleaved({"ours": call} | others, label)
    text = " | ".join(f"{name} {x * 1e3:9.2f} ms" for name, x in found.items())
    table.add(f"{label} | {text} | measured", length=shape[2], mask="dense causal", seconds=found)
    return found


def long_row(
    bench: Bench, table: Table, problem: Attention, label: str, dense: dict[str, float], factor: float
) -> None:  # fmt: skip
    """One mask; `factor` is how much longer dense attention takes here than at the first length, by computation."""
    q, k, v = operands_of(bench, problem)
    mask = problem.mask(bench.device)
    call = attend(q, k, v, mask, **problem.options)
    # the first call, which lists the mask's tiles
    peak = bench.attempt("bsrgemm", label, partial(peak_bytes, bench, call))
    if not bench.verified(table, label, call, Reference.of(problem.seen(mask), q, k, v).error, TOLERANCE["float16"]):
        return
    seconds = bench.seconds(call)
    held = 0 if mask is None else mask.nbytes
    rate = problem.flops / seconds / 1e12
    speed_up = {name: x * factor / seconds for name, x in dense.items()}
    how = "measured" if factor == 1 else f"computed, {factor:g} x its time at the first length"
    text = ", ".join(f"{x:.1f} x {name}" for name, x in speed_up.items())
    extra = "-" if peak is None else f"{(peak + held) / 1e6:.2f}"
    table.add(
        f"{label} | {seconds * 1e3:9.2f} ms {rate:7.{1 if bench.on_gpu else 4}f} TFLOP/s | extra memory {extra} MB | "
        f"dense causal: {text} ({how})",
        length=problem.length, mask=Case(problem).name, seconds=seconds, tflops=rate, peak_bytes=peak,
        mask_bytes=held, speed_up=speed_up, dense_computed=factor != 1,
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
    """Time by density of random blocks, against density times the time of dense attention, both timed in turn."""
    shape, size = ((1, 8, 32768, 128), 128) if bench.on_gpu else ((1, 2, 512, 64), 16)
    densities = bench.some([0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0], [0.05, 0.2, 1.0])
    problem = attention(shape)
    q, k, v = operands_of(bench, problem)
    full, allowed = attend(q, k, v), TOLERANCE["float16"]
    if not bench.verified(table, "full", full, Reference.of(problem.seen(None), q, k, v).error, allowed):
        return
    found = []
    for density in densities:
        masked = attention(shape, blocks=(size, max(1, round(density * shape[2] / size))))
        mask = masked.mask(bench.device)
        assert mask is not None
        label, call = f"{mask.density:6.4f}", attend(q, k, v, mask)
        if not bench.verified(table, label, call, Reference.of(masked.seen(mask), q, k, v).error, allowed):
            continue
        times = bench.interleaved({"masked": call, "full": full}, label)
        seconds, share = times["masked"], mask.density * times["full"]
        found.append((share, seconds))
        table.add(
            f"{label} | {seconds * 1e3:8.3f} ms | density x full {share * 1e3:8.3f} ms | ratio {seconds / share:6.3f}",
            shape=shape, block=size, density=mask.density, seconds=seconds, full_seconds=times["full"],
            ratio=seconds / share,
        )  # fmt: skip
    if len(found) > 1:
        slope, start = line_fit(*zip(*found, strict=True))
        table.add(
            f"fit | {slope:.3f} x density x full + {start * 1e6:.1f} us", shape=shape, slope=slope, start_seconds=start
        )


# --------------------------------------------------------------------------------------- accuracy
def hard_inputs(xp: Any, kind: str, shape: tuple[int, int, int, int], dtype: str) -> tuple[Any, Any, Any]:
    """q, k and v whose scores do what `kind` says."""
    _, _, S, D = shape
    q, k, v = (normal(shape, dtype, xp) for _ in range(3))
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


#: The largest error of one draw moves by 10 % from draw to draw.
_DRAWS = 4
HARD = ("plain", "rising ramp", "one huge key", "scores to 1e4", "constant rows")


def section_accuracy(bench: Bench, table: Table) -> None:
    """Error against float64 and time, on inputs that are hard for an online softmax."""
    shape = (1, 16, 8192, 128) if bench.on_gpu else (1, 2, 256, 64)
    table.note(f"largest error over max(1, size), mean of {_DRAWS} draws; time over that of the plain inputs")
    plain: dict[str, float] = {}
    kinds = [(kind, "float16") for kind in bench.some(HARD, HARD[:3])]
    for kind, dtype in [*kinds, ("plain", "bfloat16")]:
        accuracy_line(bench, table, attention(shape, dtype=dtype), kind, plain)


def accuracy_line(bench: Bench, table: Table, problem: Attention, kind: str, plain: dict[str, float]) -> None:
    """One kind of inputs; `plain` keeps the times of the first, which are plain."""
    label = f"{kind:14} {problem.dtype:8}"
    table.progress(label)
    every: list[dict[str, float]] = []
    calls: dict[str, Call] = {}
    for _ in range(_DRAWS if bench.on_gpu else 1):
        q, k, v = hard_inputs(bench.xp, kind, problem.shape, problem.dtype)
        # of all queries: the largest of a few errors would be a matter of luck
        reference = Reference.of(problem.seen(None), q, k, v, whole=True)
        others = {name: partial(make, q, k, v) for name, make in bench.makers(DENSE_PEERS).items()}
        calls = {"bsrgemm": attend(q, k, v)} | bench.prepared(others, label, reference.error, float("inf"))
        every.append({name: reference.error(call()) for name, call in calls.items()})
    errors = {name: float(np.mean([each[name] for each in every])) for name in calls}
    times = bench.interleaved(calls, label)
    found: dict[str, dict[str, float]] = {}
    for name, seconds in times.items():
        if not plain.get(name):
            plain[name] = seconds
        found[name] = {"error": errors[name], "seconds": seconds, "slower": seconds / plain[name]}
    ours, theirs = found["bsrgemm"]["error"], [x["error"] for name, x in found.items() if name != "bsrgemm"]
    good, best = ours <= TOLERANCE[problem.dtype], min(theirs, default=None)
    reached = None if best is None else ours <= MOST_ERROR * best
    text = " | ".join(f"{name} {x['error']:.1e} x{x['slower']:.2f}" for name, x in found.items())
    table.add(
        f"{label} | {text} | {'good' if good else 'WRONG'} | at most {MOST_ERROR} of the best {mark(reached)}",
        inputs=kind, dtype=problem.dtype, shape=problem.shape, errors=found, good=good, reached=reached,
        draws=len(every),
    )  # fmt: skip
