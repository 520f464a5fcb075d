"""Sections of bench/attention.py: the table of targets, many small heads, one token on a KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from attention_bench import PEERS, Bench, filled_cache, graphed, verified
from attention_cases import (
    DECODE,
    DECODE_MOST,
    DECODE_SHARE,
    DENSE_PEERS,
    HEADLINE,
    LONG,
    SMALL,
    TABLE,
    Case,
    array_module,
    attend,
    case_operands,
    checked,
    forced,
    normal,
    operands,
)
from harness import Table, on_gpu
from report import Row, mark, number

import bsrgemm as bg
from bsrgemm._benchmark import attention_peers as peers
from bsrgemm._benchmark.attention_check import TOLERANCE, Reference, deviation, exact
from bsrgemm._benchmark.timing import Call, time_sustained

#: Seconds back to back for a sustained rate
SUSTAINED = 0.5


@cache
def _full_cudnn() -> Call:
    """cuDNN without a mask, on operands of its own."""
    q, k, v = (normal(LONG, "float16") for _ in range(3))
    call = peers.cudnn(q, k, v)
    return checked(call, Case(LONG).reference(q, k, v).error, "float16")


def case_row(bench: Bench, case: Case) -> Row:
    """Measure one case: ours, the peers, ours."""
    q, k, v = case_operands(case)
    mask = case.mask()
    flops = 4.0 * case.shape[3] * case.pairs(mask)
    row: Row = {
        "shape": case.shape, "mask": case.name, "dtype": case.dtype, "kernel": case.kernel, "flops": flops,
        "seconds": None, "tflops": None, "peers": {}, "sustained": {}, "targets": [], "wrong": False,
    }  # fmt: skip
    where = str(case)
    with forced(case.kernel):
        call = attend(q, k, v, mask, **case.options)
        result = bench.attempt("bsrgemm", where, call)
        if result is None:
            return row
        reference = case.reference(q, k, v, mask)
        row["deviation"] = reference.error(result)
        if not row["deviation"] <= TOLERANCE[case.dtype]:
            return row | {"wrong": True}

        def make(name: str) -> Call:
            if name == "cF":
                return _full_cudnn()
            if name == "float16":
                return attend(*case_operands(replace(case, dtype="float16")), mask, **case.options)
            options = {**case.options, "mask": mask} if mask is not None else case.options
            return checked(PEERS[name](q, k, v, **options), reference.error, case.dtype)

        names = [*case.peers, *(["cF"] if on_gpu() and any(t.of == "cF" for t in case.targets) else [])]
        others = bench.prepared(names, where, make)
        row["seconds"], times = bench.interleaved(call, others, where)
        if case.sustained and on_gpu() and not bench.quick:
            for name, each in {"bsrgemm": call, **others}.items():
                if name != "cF":
                    row["sustained"][name] = flops / time_sustained(each, SUSTAINED) / 1e12
            time.sleep(SUSTAINED)  # the next case is not to feel it
    row["tflops"] = flops / row["seconds"] / 1e12
    full = 4.0 * LONG[0] * LONG[1] * LONG[2] ** 2 * LONG[3]
    row["peers"] = {
        name: None if seconds is None else (full if name == "cF" else flops) / seconds / 1e12
        for name, seconds in times.items()
    }
    if on_gpu():
        found = [(t.least, t.of, t.reached(row["tflops"], row["peers"])) for t in case.targets]
        row["targets"] = [{"least": a, "of": b, "reached": c} for a, b, c in found]
    return row


def case_text(case: Case, row: Row) -> str:
    """One line for one case."""
    if row["wrong"]:
        return f"{case} | WRONG: off by {row['deviation']:.1e}"
    if row["seconds"] is None:
        return f"{case} | -"
    best = max((x for name, x in row["peers"].items() if x is not None and name != "cF"), default=None)
    digits = 0 if on_gpu() else 4
    shown = ("cuDNN", "flash", "FA4", "cF") if on_gpu() else ("NumPy",)
    line = (
        f"{case} | {row['seconds'] * 1e3:8.3f} {row['tflops']:6.{digits}f} | "
        f"{' '.join(number(row['peers'].get(name), 6, digits) for name in shown)} | "
        f"{number(best and row['tflops'] / best, 5, 2)}"
    )
    if row["peers"].get("Flex"):
        line += f" | Flex {row['peers']['Flex']:.0f}"
    if row["sustained"]:
        line += " | sustained " + ", ".join(f"{name} {x:.0f}" for name, x in row["sustained"].items())
    met = [f"{t['least']:g} {t['of']} {mark(t['reached'])}" for t in row["targets"] if t["reached"] is not None]
    return f"{line} | {', '.join(met)}" if met else line


def section_table(bench: Bench, table: Table) -> None:
    """The table of targets: shapes, masks, head dims, dtypes."""
    cases = bench.cases(bench.some(TABLE, HEADLINE))
    columns = " cuDNN  flash    FA4     cF" if on_gpu() else " NumPy"
    table.note(f"{'B,H,S,D':15} {'mask':26} {'dtype':8} | {'ms':>8} TFLOPS | {columns} | ratio to the best | targets")
    for place, case in enumerate(cases, 1):
        table.progress(f"{place} of {len(cases)}: {case}")
        row = bench.attempt("bench", str(case), partial(case_row, bench, case))
        if row is None:
            table.add(f"{case} | -", what=" ".join(str(case).split()), failed=True)
        else:
            table.add(case_text(case, row), **row)


# ------------------------------------------------------------------------------------------ small
def microseconds(call: Call, bench: Bench) -> tuple[float, float | None]:
    """Of a call with the L2 flushed, and back to back."""
    cold = bench.seconds(call)
    return cold * 1e6, time_sustained(call, 0.02) * 1e6 if on_gpu() else None


def section_small(bench: Bench, table: Table) -> None:
    """Many small heads: microseconds per head by replays of a CUDA graph, L2 flushed / back to back."""
    D, S = 64, 512 if on_gpu() else 64
    table.note(f"(1, H, {S}, {D}), full | microseconds per head, L2 flushed / back to back")
    for H, most in bench.some(SMALL, [SMALL[0], SMALL[-1]]):
        case, label = Case((1, H, S, D)), f"H {H:4}"
        table.progress(label)
        q, k, v = case_operands(case)
        reference = case.reference(q, k, v)
        call = bench.attempt("bsrgemm", label, partial(graphed, attend(q, k, v)))
        if call is None or not verified(bench, table, label, call, reference.error):
            continue

        def make(name: str, q: Any = q, k: Any = k, v: Any = v, reference: Reference = reference) -> Call:
            made = PEERS[name](q, k, v)
            return checked(made if name == "NumPy" else peers.graphed(made), reference.error, "float16")

        others = bench.prepared(DENSE_PEERS, label, make)
        first = microseconds(call, bench)
        times = {name: bench.attempt(name, label, partial(microseconds, x, bench)) for name, x in others.items()}
        again = microseconds(call, bench) if others else first
        ours = [None if a is None or b is None else (a + b) / 2 / H for a, b in zip(first, again, strict=True)]
        theirs = {name: [x and x / H for x in pair] for name, pair in times.items() if pair is not None}
        reached = None if most is None or not on_gpu() or ours[0] is None else ours[0] <= most
        text = " | ".join(f"{name} {number(a, 6, 3)} / {number(b, 6, 3)}" for name, (a, b) in theirs.items())
        bound = "" if reached is None else f" | bound {most:.2f} {mark(reached)}"
        table.add(
            f"{label} | {number(ours[0], 6, 3)} / {number(ours[1], 6, 3)} | {text}{bound}",
            heads=H, length=S, head_dim=D, us_per_head=ours[0], us_per_head_back_to_back=ours[1], peers=theirs,
            bound=most, reached=reached,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------- decode


def chosen_blocks(heads: int, count: int, kept: int) -> np.ndarray[Any, Any]:
    """The blocks that each head reads, (1, heads, kept), sorted."""
    rng = np.random.default_rng(0)
    return np.stack([np.sort(rng.permutation(count)[:kept]) for _ in range(heads)])[None].astype(np.int32)


def decode_error(q: Any, k: Any, v: Any, blocks: Any, size: int, result: Any) -> float:
    """The error in the first and the last head."""
    got, (B, H, _, _), group = peers.as_array(result), q.shape, q.shape[1] // k.shape[1]
    off = []
    for b, h in ((0, 0), (B - 1, H - 1)):
        key = np.arange(k.shape[2])
        seen = np.ones(len(key), bool) if blocks is None else np.isin(key // size, blocks[0, h // group])
        want = exact(q[b, h], k[b, h // group], v[b, h // group], seen[None])
        off.append(deviation(got.reshape(q.shape)[b, h], want))
    return float(np.max(off))


def decode_peers(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Call]]:
    """The peers for one query: as it is, and with the query heads of a group as queries of one head."""
    B, H, _, D = q.shape
    if not on_gpu():
        return {"NumPy": lambda: peers.plain(q, k, v)}
    folded = q.reshape(B, k.shape[1], H // k.shape[1], D)
    return {
        "cuDNN": lambda: peers.graphed(peers.cudnn(q, k, v)),
        "cuDNN folded": lambda: peers.graphed(peers.cudnn(folded, k, v)),
        "flash": lambda: peers.graphed(peers.flash(q, k, v)),
    }


def section_decode(bench: Bench, table: Table) -> None:
    """One query token on a KV cache: replays of a CUDA graph, in one piece, in pages, and a few blocks alone."""
    H, H_kv, D, size = 32, 8, 128, 64
    problems = bench.some(DECODE, DECODE[:4])
    if not on_gpu():
        problems = [(B, 512, page) for B in (1, 2) for page in (None, 64)]
    table.note("B, keys, page: 32 heads on 8 | us, L2 flushed / back to back | TB/s of K and V | peers")
    best: dict[tuple[int, int], float] = {}
    for B, S, page in problems:
        label = f"{B:3} {S:7} {page or '-':>4}        "
        table.progress(label)
        q, (k, v) = normal((B, H, 1, D), "float16"), operands(B, H_kv, H_kv, S, D, "float16")[1:]
        store, out = filled_cache(k, v, page), array_module().empty_like(q)
        dense = partial(bg.attention_decode, q, store, out=out)
        call = bench.attempt("bsrgemm", label, partial(graphed, dense))
        if call is None or not verified(bench, table, label, call, partial(decode_error, q, k, v, None, size)):
            continue
        makers = decode_peers(q, k, v) if page is None and bench.with_peers else {}
        others = {}
        for name, maker in makers.items():

            def make(maker: Callable[[], Call] = maker, q: Any = q, k: Any = k, v: Any = v) -> Call:
                return checked(maker(), partial(decode_error, q, k, v, None, size), "float16")

            others[name] = bench.attempt(name, label, make)
        there = {name: x for name, x in others.items() if x is not None}
        seconds, times = bench.interleaved(call, there, label)
        warm = time_sustained(call, 0.02) * 1e6 if on_gpu() else None
        good = [x for x in times.values() if x is not None]
        if good:
            best[B, S] = min(good) * 1e6
        us, bound = seconds * 1e6, DECODE_MOST.get((B, S), best.get((B, S)))
        reached = None if bound is None or not on_gpu() else us <= bound
        rate = (k.nbytes + v.nbytes) / seconds / 1e12
        text = " ".join(f"{name} {number(x and x * 1e6, 7)}" for name, x in times.items())
        limit = "" if reached is None else f" | bound {bound:.1f} {mark(reached)}"
        table.add(
            f"{label} | {us:8.1f} / {number(warm, 8)} | {rate:6.3f} | {text}{limit}",
            batch=B, keys=S, page=page, us=us, us_back_to_back=warm, tb_per_second=rate,
            peers={name: x and x * 1e6 for name, x in times.items()}, bound=bound, reached=reached,
        )  # fmt: skip
        if S < 131072 and on_gpu():
            continue
        count = S // size
        blocks = chosen_blocks(H_kv, count, max(1, round(count * DECODE_SHARE)))
        label = f"{B:3} {S:7} {page or '-':>4} sparse "
        numbers = array_module().asarray(blocks)
        sparse = partial(bg.attention_decode, q, store, blocks=numbers, block=size, out=out)
        call = bench.attempt("bsrgemm", label, partial(graphed, sparse))
        if call is None or not verified(bench, table, label, call, partial(decode_error, q, k, v, blocks, size)):
            continue
        fewer = bench.seconds(call) * 1e6
        table.add(
            f"{label} | {fewer:8.1f} us for {blocks.shape[2]} of {count} blocks of {size} keys | "
            f"{us / fewer:.1f} x faster than all",
            batch=B, keys=S, page=page, blocks=blocks.shape[2], of_blocks=count, us=fewer, speed_up=us / fewer,
        )  # fmt: skip
