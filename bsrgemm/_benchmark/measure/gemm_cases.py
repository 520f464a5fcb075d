"""One product, its peers and its targets: ours, dense cuBLAS and the others, timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import bsrgemm as bg

from .. import internals, runner
from ..checks.products import (
    TOLERANCE,
    dense_operand,
    deviation,
    deviation_at_ends,
    right_operand,
    sparse_operand,
)
from ..patterns import pattern_of
from ..peers import products as peers
from ..random_data import widen
from ..runner import Row, checked, mark, number
from ..table import Table
from ..timing import Call, time_sustained

#: Seconds back to back for a sustained rate, and the pause after it, so that the next case is not slowed down
SUSTAINED, COOL = 0.5, 0.5


@dataclass
class Bench(runner.Bench):
    """The options of a run, and what could not be measured."""

    tune_torch: bool = False


@dataclass(frozen=True)
class Target:
    """A target: a share of `of`, which is "cuBLAS", "TFLOP/s" or "float16" (our own rate)."""

    least: float
    of: str = "cuBLAS"

    def __str__(self) -> str:
        unit = {"cuBLAS": "", "TFLOP/s": " TF", "float16": " f16"}[self.of]
        return f"{self.least:.3g}{unit}"

    def reached(self, rate: float, dense: float | None, float16: float | None) -> bool | None:
        """Whether the target is reached; None if there is nothing to compare with."""
        base = {"cuBLAS": dense, "TFLOP/s": 1.0, "float16": float16}[self.of]
        return None if base is None else rate >= self.least * base


@dataclass(frozen=True)
class Case:
    """One product of an n x n matrix with n x columns."""

    n: int
    block: tuple[int, int]
    density: float
    columns: int = 8192
    dtype: str = "float16"
    precision: str | None = None
    target: Target | None = None
    pattern: str = "uniform"
    peers: bool = False
    sustained: bool = False
    #: name of the kernel to use, even if the rules would choose another one
    kernel: str | None = None

    @property
    def computed_in(self) -> str:
        return self.precision or self.dtype

    def __str__(self) -> str:
        R, C = self.block
        how = self.kernel or self.pattern
        return f"{self.n:5} {f'{R}x{C}':>7} {self.density:4.2f} {self.columns:5} {self.computed_in:8} {how:9}"


def multiply(A: Any, B: Any, out: Any, precision: str | None = None, kernel: str | None = None) -> Call:
    """Our product as a call."""
    if kernel is not None:

        def forced() -> Any:
            with internals.force_kernel(kernel):
                return bg.matmul(A, B, out=out)

        return forced
    if A.dtype == np.uint8:
        return lambda: bg.matmul(A, B, scale_a=1.0, scale_b=1.0, out_dtype=np.float16)
    options = {} if precision is None else {"precision": precision}
    return lambda: bg.matmul(A, B, out=out, **options)


def dense_call(M: int, K: int, N: int, dtype: str, tf32: bool = False) -> Call:
    """Dense cuBLAS on random operands, its first rows checked."""
    import cupy

    A, B = dense_operand(M, K, dtype), right_operand(K, N, dtype)
    call = peers.dense_cublas(A, B, cupy.empty((M, N), A.dtype), tf32)
    allowed = TOLERANCE["tf32" if tf32 else dtype]
    return checked(call, lambda got: deviation(widen(A[:64]), B, got[:64]), allowed)


def sparse_peers(bench: Bench, case: Case, A: Any, B: Any, ours: Any) -> dict[str, Call]:
    """The calls of those peers that support these blocks and agree with our result."""
    import cupy

    makers: dict[str, Callable[..., Call]] = {
        "cuSPARSE BSR": peers.cusparse_bsr,
        "cuSPARSE ELL": peers.cusparse_ell,
        "torch BSR": partial(peers.torch_bsr, tune=bench.tune_torch and case.sustained),
    }
    # Two rounded results may differ by twice what one may be off.
    scale = 2 * (case.n * A.density) ** 0.5
    some = slice(None, None, 16)
    want = widen(ours[some])

    def agreement(got: Any) -> float:
        return float(cupy.abs(widen(got[some]) - want).max()) / scale

    def made(maker: Callable[..., Call]) -> Call:
        return maker(A, B, cupy.empty_like(ours))

    # cuSPARSE and Triton may take float32 as tf32.
    allowed = TOLERANCE["tf32" if case.dtype == "float32" else case.dtype]
    asked = {name: partial(made, maker) for name, maker in makers.items()} if case.peers else {}
    return bench.prepared(asked, str(case), agreement, allowed)


def case_row(bench: Bench, case: Case) -> Row:
    """Measure one case: ours, dense cuBLAS and the other peers in turn, then the sustained rates."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    n, N = case.n, case.columns
    pattern = pattern_of(case.pattern, n, case.block, case.density)
    A, B = sparse_operand(pattern, case.block, case.dtype), right_operand(n, N, case.dtype)
    row: Row = {
        "n": n, "block": case.block, "density": pattern.density, "columns": N, "dtype": case.dtype,
        "precision": case.precision, "pattern": case.pattern, "kernel": case.kernel,
        "seconds": None, "tflops": None, "dense_tflops": None,
        "ratio": None, "peers": {}, "sustained": None, "dense_sustained": None, "wrong": False,
    }  # fmt: skip
    flops, dense_flops = 2.0 * pattern.blocks * case.block[0] * case.block[1] * N, 2.0 * n * n * N
    call = multiply(A, B, cupy.empty((n, N), A.dtype), case.precision, case.kernel)
    result = bench.attempt("bsrgemm", str(case), call)
    if result is None:
        return row
    row["deviation"] = deviation_at_ends(A, pattern, B, result)
    if not row["deviation"] <= TOLERANCE[case.computed_in]:
        return row | {"wrong": True}
    # cuBLAS multiplies fp8 through another interface: there the ratio is to its float16.
    dense_dtype = "float16" if case.dtype == "e4m3" else case.dtype
    dense = bench.attempt("cuBLAS", str(case), partial(dense_call, n, n, N, dense_dtype, case.precision == "tf32"))
    calls = {"bsrgemm": call} | ({"cuBLAS": dense} if dense else {}) | sparse_peers(bench, case, A, B, result)
    times = bench.interleaved(calls, str(case))
    row["seconds"] = times.pop("bsrgemm")
    row["tflops"] = flops / row["seconds"] / 1e12
    if "cuBLAS" in times:
        row["dense_tflops"] = dense_flops / times.pop("cuBLAS") / 1e12
        row["ratio"] = row["tflops"] / row["dense_tflops"]
    row["peers"] = {name: flops / seconds / 1e12 for name, seconds in times.items()}
    if case.sustained:
        row["sustained"] = flops / time_sustained(call, SUSTAINED) / 1e12
        row["dense_sustained"] = dense_flops / time_sustained(dense, SUSTAINED) / 1e12 if dense else None
        time.sleep(COOL)
    return row


def case_text(case: Case, row: Row, reached: bool | None = None) -> str:
    """One line for one case."""
    if row["wrong"]:
        return f"{case} | WRONG: off by {row['deviation']:.1e}"
    seconds = row["seconds"]
    line = (
        f"{case} | {number(seconds and seconds * 1e3, 8, 3)} {number(row['tflops'], 6)} | "
        f"{number(row['dense_tflops'], 6)} {number(row['ratio'], 5, 3)} | {case.target or ''!s:>7} {mark(reached):3}"
    )
    if case.peers:
        shown = [row["peers"].get(name) for name in ("cuSPARSE BSR", "cuSPARSE ELL", "torch BSR")]
        line += " | " + " ".join(number(rate, 6) for rate in shown)
    if row["sustained"]:
        line += f" | sustained {row['sustained']:.1f} of {number(row['dense_sustained'], 1)}"
    return line


CASE_HEADER = (
    f"{'n':>5} {'block':>7} {'dens':4} {'N':>5} {'dtype':8} {'pattern':9} | {'ms':>8} {'TFLOPS':>6} | "
    f"{'cuBLAS':>6} ratio | {'target':>7} {'':3} | cuSPARSE BSR, ELL, torch"
)


def headline(pattern: str) -> list[Case]:
    """The four cases of the headline; only equal rows suit Blocked-ELL."""
    targets = {128: 0.94, 64: 0.78, 32: 0.50, 16: 0.35}
    equal = pattern == "uniform"
    return [
        Case(8192, (b, b), 0.22, target=Target(t), pattern=pattern, peers=equal, sustained=equal)
        for b, t in targets.items()
    ]


#: Cases with the same dense operands follow each other.
TABLE = [
    *headline("uniform"),
    *headline("bernoulli"),
    Case(8192, (64, 64), 0.50, target=Target(0.80), peers=True),
    Case(8192, (64, 64), 0.10, target=Target(0.68), peers=True),
    Case(8192, (64, 64), 0.05, target=Target(0.53), peers=True),
    Case(8192, (128, 128), 1.0, target=Target(0.98)),
    Case(8192, (128, 128), 0.22, dtype="e4m3", target=Target(1.5, "float16")),
    Case(8192, (128, 128), 0.22, target=Target(0.45), kernel="GemmSm80"),
    Case(8192, (256, 128), 0.22),
    Case(8192, (128, 64), 0.22),
    Case(8160, (96, 96), 0.22, target=Target(0.70)),
    Case(8160, (48, 80), 0.22, target=Target(0.50)),
    Case(8160, (80, 80), 0.22, target=Target(0.55)),
    Case(8160, (160, 160), 0.22, target=Target(0.75)),
    Case(8192, (64, 64), 0.22, columns=256, target=Target(350, "TFLOP/s"), peers=True),
    Case(16384, (128, 128), 0.10, columns=16384, target=Target(0.90), peers=True),
    Case(8192, (64, 64), 0.22, dtype="bfloat16", target=Target(0.78), peers=True),
    Case(8192, (32, 32), 0.22, dtype="float32", precision="tf32", target=Target(150, "TFLOP/s"), peers=True),
    Case(8192, (32, 32), 0.22, dtype="float32", target=Target(60, "TFLOP/s")),
    Case(4096, (32, 32), 0.22, columns=4096, dtype="float64", target=Target(45, "TFLOP/s"), peers=True),
]


def run_cases(bench: Bench, table: Table, cases: Sequence[Case]) -> None:
    """Measure and print cases one by one."""
    table.note(CASE_HEADER)
    float16 = None
    for place, case in enumerate(cases, 1):
        table.progress(f"{place} of {len(cases)}: {case}")
        row = bench.attempt("bench", str(case), partial(case_row, bench, case))
        if row is None:
            table.add(f"{case} | -", what=" ".join(str(case).split()), failed=True)
            continue
        reached = None
        if case.target and row["tflops"]:
            reached = case.target.reached(row["tflops"], row["dense_tflops"], float16)
            row |= {"target": case.target.least, "target_of": case.target.of, "reached": reached}
        if case == TABLE[0]:
            float16 = row["tflops"]
        table.add(case_text(case, row, reached), **row)
