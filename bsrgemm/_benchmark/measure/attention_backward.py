"""Gradients of attention: TFLOP/s beside cuDNN, FlashAttention-2 and -4 and cuDNN's block-sparse attention.

The rate counts 10 operations for each pair of a query and a key that it sees and each column: five products. All
kernels of a call are timed, those that prepare it included. Ours runs in the default order, which repeats bit by bit,
and with ``deterministic=False``; peers run as they are, FlashAttention-4 in both ways.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import machine, provenance
from ..table import Table, writing
from ..timing import Call, Clock
from . import attention_backward_accuracy as accuracy
from . import attention_backward_whole as whole
from .attention_backward_cases import CASES, PEERS, Case, Operands, operands, ours, portable, portable_any_order


def worst(x: Operands, case: Case, got: Sequence[Any]) -> float:
    """The largest difference to float64 in dq of some queries and in dk and dv of some keys, over the largest value."""
    import cupy

    found, S, rng = 0.0, case.length, np.random.default_rng(1)
    places = np.sort(rng.choice(S, min(S, 64), replace=False))
    batch, kv = case.batch - 1, case.kv_heads - 1
    group = case.heads // case.kv_heads
    k, v = (y[batch, kv].astype(np.float64) for y in (x.k, x.v))
    mask: Any = x.options.get("mask")
    at, key = cupy.asarray(places)[:, None], cupy.arange(S)[None]

    def seen(head: int, rows: Any, columns: Any) -> Any:
        if case.blocks is not None:
            block = case.blocks[0]
            per = S // block
            allowed = cupy.zeros((per, per), bool)
            indptr = mask.indptr[head * per : (head + 1) * per + 1].get()
            for r in range(per):
                allowed[r, mask.indices[indptr[r] : indptr[r + 1]]] = True
            return allowed[rows // block, columns // block]
        near = columns <= rows if case.causal or case.window is not None else columns >= 0
        return near & (columns >= rows - case.window) if case.window is not None else near + 0 * rows.astype(bool)

    dk = dv = 0
    scale = case.columns**-0.5
    for head in range(kv * group, (kv + 1) * group):
        q, dout, out = (y[batch, head].astype(np.float64) for y in (x.q, x.dout, x.out))
        lse = x.lse[batch, head].astype(np.float64)[:, None]
        delta = (dout * out).sum(axis=1)[:, None]

        def pair(
            rows: Any, columns: Any, sees: Any, q: Any = q, dout: Any = dout, lse: Any = lse, delta: Any = delta
        ) -> Any:
            scores, slopes = scale * q[rows] @ k[columns].T, 1.0
            if case.softcap is not None:
                bent = cupy.tanh(scores / case.softcap)
                scores, slopes = case.softcap * bent, 1 - bent * bent
            p = cupy.where(sees, cupy.exp(scores - lse[rows]), 0)
            return p, p * (dout[rows] @ v[columns].T - delta[rows]) * slopes

        _, ds = pair(places, slice(None), seen(head, at, key))
        found = max(found, _difference(got[0][batch, head][places], scale * ds @ k))
        p, ds = pair(slice(None), places, seen(head, key.T, at.T))
        dk, dv = dk + scale * ds.T @ q, dv + p.T @ dout
    return max(found, _difference(got[1][batch, kv][places], dk), _difference(got[2][batch, kv][places], dv))


def _difference(x: Any, y: Any) -> float:
    return float(abs(x.astype(np.float64) - y).max() / abs(y).max())


def measure(table: Table, case: Case, clock: Clock, wanted: Sequence[str] | None) -> None:
    """Add the row of a case."""
    x = operands(case)
    flops = 10 * case.pairs(x.options.get("mask")) * case.columns
    calls: dict[str, Call] = {
        "bsrgemm": ours(x),
        "bsrgemm, any order": ours(x, False),
        "bsrgemm, portable": portable(x),
    }
    if case.columns == 128 and case.window is None and case.softcap is None:
        calls["bsrgemm, portable, any order"] = portable_any_order(x)
    error = {name: worst(x, case, call()) for name, call in calls.items()}
    missing = {}
    for name, make in PEERS.items():
        try:
            calls[name] = make(x, case)
        except Exception as reason:
            missing[name] = f"{type(reason).__name__}: {reason}"[:200]
    calls = {name: call for name, call in calls.items() if wanted is None or name in wanted}

    def failed(name: str, reason: Exception) -> None:
        missing[name] = f"{type(reason).__name__}: {reason}"[:200]

    times = clock.interleaved(calls, failed)
    rates = {name: flops / t.seconds / 1e12 for name, t in times.items()}
    text = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    shown = f"{max(error.values()):.1e}"
    table.add(f"{case.name:<20} error {shown}  {text}", case=case.name, error=error, rates=rates, missing=missing,
              spread={name: t.spread for name, t in times.items()})  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="part of the name of a case; with --keep, other rows stay")
    parser.add_argument("--only", nargs="+", help="names of candidates; all by default")
    parser.add_argument("--accuracy", action="store_true", help="errors on hard inputs instead of rates")
    parser.add_argument("--whole", action="store_true", help="both passes, memory and single kernels instead of rates")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--keep", action="store_true", help="write what was measured to bench/results/")
    provenance.add_option(parser)
    options = parser.parse_args(argv)
    if not machine.has_gpu():
        parser.exit(0, "no CUDA device: the gradients of attention are measured on a card only\n")
    if options.accuracy:
        with provenance.recording() as launched:
            table = Table("attention_backward_accuracy_cuda", "Errors of the gradients of attention", launched)
            with writing(table, options.keep):
                accuracy.run(table, options.quick)
        return
    clock = Clock("cuda", quick=options.quick)
    if options.whole:
        with provenance.recording() as launched:
            table = Table("attention_backward_whole_cuda", "Forward and backward pass of attention", launched)
            table.merge = bool(options.case)
            with writing(table, options.keep):
                whole.run(table, clock, options.case)
        return
    with provenance.recording() as launched:
        table = Table("attention_backward_cuda", "Gradients of attention, TFLOP/s", launched)
        table.merge = bool(options.case)
        with writing(table, options.keep):
            for case in CASES:
                if not options.case or any(part in case.name for part in options.case):
                    measure(table, case, clock, options.only)
