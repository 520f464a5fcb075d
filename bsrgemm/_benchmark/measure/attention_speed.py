"""Sections of bench/run/attention.py: the table of masks and shapes, and many small heads."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from ..checks.attention import TOLERANCE, Reference
from ..peers import attention as peers
from ..random_data import normal
from ..runner import Row, checked, mark, number
from ..show.headline import HEADLINE_ROWS
from ..table import Table
from ..timing import Call, time_sustained
from .attention_cases import (
    DENSE_PEERS,
    HEADLINE,
    LONG,
    SMALL,
    TABLE,
    Case,
    attend,
    attention,
    forced,
    operands_of,
)
from .attention_run import Bench, graphed

#: Seconds back to back for a sustained rate
SUSTAINED = 0.5
#: Columns of a printed line
_SHOWN = {"cuda": ("cuDNN", "flash", "FA4", "cuDNN BSA", "cF"), "cpu": ("NumPy",)}


@lru_cache(maxsize=1)
def _full_cudnn() -> Call:
    """cuDNN without a mask, on operands of its own."""
    q, k, v = (normal(LONG, "float16") for _ in range(3))
    reference = Reference.of(attention(LONG).seen(None), q, k, v)
    return checked(peers.cudnn(q, k, v), reference.error, TOLERANCE["float16"])


def other_calls(bench: Bench, case: Case, operands: tuple[Any, Any, Any], mask: Any) -> dict[str, Call]:
    """The peers of a case, ours in float16 beside fp8, and cF where a target is a multiple of it."""
    problem, where = case.problem, str(case)
    reference = Reference.of(problem.seen(mask), *operands)
    options = problem.options | ({} if mask is None else {"mask": mask})
    found = bench.peer_calls(case.peers, where, operands, reference, **options)
    if bench.on_gpu and bench.with_peers:
        if "float16" in case.peers:
            wider = operands_of(bench, replace(problem, dtype="float16"))
            found["float16"] = attend(*wider, mask, **problem.options)
        if any(target.of == "cF" for target in case.targets):
            full = bench.attempt("cF", where, _full_cudnn)
            found |= {} if full is None else {"cF": full}
    return found


def case_row(bench: Bench, case: Case) -> Row:
    """Measure one case: ours and the peers in turn."""
    problem, where = case.problem, str(case)
    q, k, v = operands_of(bench, problem)
    mask = problem.mask(bench.device)
    row: Row = {
        "shape": problem.shape, "mask": case.name, "dtype": problem.dtype, "kernel": case.kernel,
        "flops": problem.flops, "seconds": None, "tflops": None, "peers": {}, "sustained": {}, "targets": [],
        "wrong": False,
    }  # fmt: skip
    with forced(case.kernel):
        call = attend(q, k, v, mask, **problem.options)
        result = bench.attempt("bsrgemm", where, call)
        if result is None:
            return row
        row["deviation"] = Reference.of(problem.seen(mask), q, k, v).error(result)
        if not row["deviation"] <= TOLERANCE[problem.dtype]:
            return row | {"wrong": True}
        calls = {"bsrgemm": call} | other_calls(bench, case, (q, k, v), mask)
        times = bench.interleaved(calls, where)
        if case.sustained and bench.on_gpu and not bench.quick:
            shown = [name for name in calls if name != "cF"]
            row["sustained"] = {name: problem.flops / time_sustained(calls[name], SUSTAINED) / 1e12 for name in shown}
            time.sleep(SUSTAINED)  # so that the next case is not slowed down by it
    row["seconds"] = times.pop("bsrgemm")
    row["tflops"] = problem.flops / row["seconds"] / 1e12
    full = attention(LONG).flops
    row["peers"] = {name: (full if name == "cF" else problem.flops) / taken / 1e12 for name, taken in times.items()}
    if bench.on_gpu:
        found = [(t.least, t.of, t.reached(row["tflops"], row["peers"])) for t in case.targets]
        row["targets"] = [{"least": a, "of": b, "reached": c} for a, b, c in found]
    return row


def case_text(case: Case, row: Row, device: str) -> str:
    """One line for one case."""
    if row["wrong"]:
        return f"{case} | WRONG: off by {row['deviation']:.1e}"
    if row["seconds"] is None:
        return f"{case} | -"
    best = max((x for name, x in row["peers"].items() if name != "cF"), default=None)
    digits = 0 if device == "cuda" else 4
    line = (
        f"{case} | {row['seconds'] * 1e3:8.3f} {row['tflops']:6.{digits}f} | "
        f"{' '.join(number(row['peers'].get(name), max(6, len(name)), digits) for name in _SHOWN[device])} | "
        f"{number(best and row['tflops'] / best, 5, 2)}"
    )
    if row["peers"].get("Flex"):
        line += f" | Flex {row['peers']['Flex']:.0f}"
    if row["sustained"]:
        line += " | sustained " + ", ".join(f"{name} {x:.0f}" for name, x in row["sustained"].items())
    met = [f"{t['least']:g} {t['of']} {mark(t['reached'])}" for t in row["targets"] if t["reached"] is not None]
    return f"{line} | {', '.join(met)}" if met else line


def section_table(bench: Bench, table: Table) -> None:
    """Shapes, masks, head dims and dtypes."""
    cases = bench.cases(TABLE[: HEADLINE_ROWS["attention"]] if bench.headline else bench.some(TABLE, HEADLINE))
    columns = " ".join(f"{name:>6}" for name in _SHOWN[bench.device])
    table.note(f"{'B,H,S,D':15} {'mask':26} {'dtype':8} | {'ms':>8} TFLOPS | {columns} | ratio to the best | targets")
    for place, case in enumerate(cases, 1):
        table.progress(f"{place} of {len(cases)}: {case}")
        row = bench.attempt("bench", str(case), partial(case_row, bench, case))
        if row is None:
            table.add(f"{case} | -", what=" ".join(str(case).split()), failed=True)
        else:
            table.add(case_text(case, row, bench.device), **row)


# ------------------------------------------------------------------------------------------ small
def section_small(bench: Bench, table: Table) -> None:
    """Many small heads: microseconds per head by replays of a CUDA graph, L2 flushed / back to back."""
    S = 512 if bench.on_gpu else 64
    table.note(f"(1, H, {S}, 64), full | microseconds per head, L2 flushed / back to back")
    for H, most in bench.some(SMALL, [SMALL[0], SMALL[-1]]):
        small_line(bench, table, (1, H, S, 64), most)


def small_line(bench: Bench, table: Table, shape: tuple[int, int, int, int], most: float | None) -> None:
    """One number of heads: ours and the peers in turn, all as replays."""
    (_, H, S, D), problem, label = shape, attention(shape), f"H {shape[1]:4}"
    operands = operands_of(bench, problem)
    reference = Reference.of(problem.seen(None), *operands)
    call = bench.attempt("bsrgemm", label, partial(graphed, bench, attend(*operands)))
    if call is None or not bench.verified(table, label, call, reference.error, TOLERANCE["float16"]):
        return

    def replayed(make: Any) -> Call:
        made: Call = make(*operands)
        return peers.graphed(made) if bench.on_gpu else made

    makers = {name: partial(replayed, make) for name, make in bench.makers(DENSE_PEERS).items()}
    calls = {"bsrgemm": call} | bench.prepared(makers, label, reference.error, TOLERANCE["float16"])
    times = bench.interleaved(calls, label)
    found = {
        name: (taken * 1e6 / H, time_sustained(calls[name], 0.02) * 1e6 / H if bench.on_gpu else None)
        for name, taken in times.items()
    }
    ours = found.pop("bsrgemm")
    reached = None if most is None or not bench.on_gpu else ours[0] <= most
    text = " | ".join(f"{name} {number(a, 6, 3)} / {number(b, 6, 3)}" for name, (a, b) in found.items())
    bound = "" if reached is None else f" | bound {most:.2f} {mark(reached)}"
    table.add(
        f"{label} | {number(ours[0], 6, 3)} / {number(ours[1], 6, 3)} | {text}{bound}",
        heads=H, length=S, head_dim=D, us_per_head=ours[0], us_per_head_back_to_back=ours[1], peers=found,
        bound=most, reached=reached,
    )  # fmt: skip
