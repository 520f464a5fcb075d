"""C = A B for a block-sparse A on an NVIDIA GPU: how fast and how exact, beside dense cuBLAS and the peers of peers.py.

Effective rate = 2 * stored elements * columns of B / time; ratio = to the rate of dense cuBLAS on random data in the
same run. Medians by CUDA events, L2 flushed, 0.4 s of idling before each timing: a card throttles at its power limit
and remembers what ran before. Dense cuBLAS is timed right before and right after ours, and its mean taken. A result is
checked against float64 before it is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import peers
from harness import Table, has_gpu, machine, time_gpu, time_sustained
from peers import Call

import bsrgemm as bg
from bsrgemm import tuned

Row = dict[str, Any]
IDLE = 0.4
#: Seconds after a sustained run, which the next case is not to feel
COOL = 1.0
#: Seconds of one measurement without the idling; slow calls are repeated less often.
BUDGET = 0.15
#: Elements that are generated or compared in float64 at a time
CHUNK = 1 << 26
#: Largest |C - A B| over the norm of A's row (B is standard normal), by what the product is computed in. Rounding a
#: result of 5.5 standard deviations to 16 bits gives 2.7e-3 or 2.1e-2; a missing 16-column slice of 2000 gives 0.4.
TOLERANCE = {"float16": 5e-3, "bfloat16": 4e-2, "e4m3": 5e-2, "float32": 1e-4, "tf32": 1.5e-2, "float64": 1e-11}


# -------------------------------------------------------------------------------------- patterns
@dataclass(frozen=True)
class Pattern:
    """Where the blocks are: block row i holds the columns indices[indptr[i] : indptr[i + 1]] of `columns`."""

    indptr: np.ndarray[Any, Any]
    indices: np.ndarray[Any, Any]
    columns: int

    @property
    def rows(self) -> int:
        return len(self.indptr) - 1

    @property
    def blocks(self) -> int:
        return len(self.indices)

    @property
    def density(self) -> float:
        return self.blocks / (self.rows * self.columns)


def from_stored(stored: np.ndarray[Any, Any]) -> Pattern:
    """The pattern of a boolean matrix."""
    indptr = np.concatenate([[0], np.cumsum(stored.sum(axis=1))])
    return Pattern(indptr, np.nonzero(stored)[1], stored.shape[1])


def from_lengths(lengths: np.ndarray[Any, Any], columns: int) -> Pattern:
    """Rows of the given lengths at random distinct columns."""
    # The positions of the smallest of random numbers are a random subset.
    order = np.random.default_rng(0).random((len(lengths), columns)).argsort(axis=1).argsort(axis=1)
    return from_stored(order < lengths[:, None])


def even_lengths(rows: int, blocks: int) -> np.ndarray[Any, Any]:
    """So many blocks over the rows, which differ by one at most."""
    return blocks // rows + (np.arange(rows) < blocks % rows)


def uniform(rows: int, columns: int, each: float) -> Pattern:
    """The same number of blocks in every row."""
    return from_lengths(np.full(rows, max(1, round(each))), columns)


def bernoulli(rows: int, columns: int, each: float) -> Pattern:
    """Each block present with the same probability."""
    return from_stored(np.random.default_rng(0).random((rows, columns)) < each / columns)


def zipf_lengths(rows: int, columns: int, blocks: int) -> np.ndarray[Any, Any]:
    """Row lengths scale / rank, at most `columns`, that add up to `blocks` exactly; longest first."""
    ranks = np.arange(1, rows + 1)
    low, high = 0.0, float(rows * columns)
    for _ in range(60):
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(scale / ranks, columns).astype(int).sum() <= blocks else (low, scale)
    lengths = np.minimum(low / ranks, columns).astype(int)
    short = np.flatnonzero(lengths < columns)[: blocks - lengths.sum()]
    lengths[short] += 1
    return lengths


def power_law(rows: int, columns: int, each: float) -> Pattern:
    """Row lengths as 1 / rank, as many blocks as the uniform pattern, rows in random order."""
    lengths = zipf_lengths(rows, columns, rows * max(1, round(each)))
    return from_lengths(np.random.default_rng(1).permutation(lengths), columns)


def one_dense_row(rows: int, columns: int, each: float) -> Pattern:
    """The middle row full, the other blocks spread evenly."""
    lengths = even_lengths(rows - 1, max(0, rows * max(1, round(each)) - columns))
    return from_lengths(np.insert(lengths, rows // 2, columns), columns)


def arrowhead(rows: int, columns: int, each: float) -> Pattern:
    """First row, first column and diagonal."""
    stored = np.eye(rows, columns, dtype=bool)
    stored[0] = stored[:, 0] = True
    return from_stored(stored)


def banded(rows: int, columns: int, each: float) -> Pattern:
    """Consecutive blocks around the diagonal, the same number in every row."""
    width = max(1, round(each))
    first = np.clip(np.arange(rows) * columns // rows - width // 2, 0, columns - width)[:, None]
    at = np.arange(columns)
    return from_stored((first <= at) & (at < first + width))


def block_diagonal(rows: int, columns: int, each: float) -> Pattern:
    """Full squares of blocks along the diagonal."""
    side = max(1, round(each))
    return from_stored(np.arange(rows)[:, None] // side == np.arange(columns) // side)


def half_empty(rows: int, columns: int, each: float) -> Pattern:
    """Every other row empty, the rest with twice as many blocks."""
    lengths = np.where(np.arange(rows) % 2, 0, min(columns, 2 * max(1, round(each))))
    return from_lengths(lengths, columns)


PATTERNS: dict[str, Callable[[int, int, float], Pattern]] = {
    "uniform": uniform,
    "bernoulli": bernoulli,
    "power-law": power_law,
    "one dense row": one_dense_row,
    "arrowhead": arrowhead,
    "banded": banded,
    "block-diagonal": block_diagonal,
    "half empty": half_empty,
}


def pattern_of(kind: str, n: int, block: tuple[int, int], density: float) -> Pattern:
    """The pattern of an n x n matrix."""
    rows, columns = n // block[0], n // block[1]
    return PATTERNS[kind](rows, columns, density * columns)


# ------------------------------------------------------------------------------------------ data
@cache
def _generator() -> Any:
    import cupy

    return cupy.random.default_rng(0)


@cache
def _e4m3_values() -> Any:
    """The 256 values of float8_e4m3fn, by their code."""
    import cupy

    return cupy.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64))


@cache
def _e4m3_sample() -> Any:
    """Codes of standard normal numbers, to draw from."""
    import cupy

    numbers = np.random.default_rng(0).standard_normal(1 << 16).astype(ml_dtypes.float8_e4m3fn)
    return cupy.asarray(numbers.view(np.uint8))


def normal(shape: tuple[int, ...], dtype: str) -> Any:
    """Standard normal numbers on the GPU; "e4m3" gives their codes as uint8."""
    import cupy

    stored = {"bfloat16": ml_dtypes.bfloat16, "e4m3": np.uint8}.get(dtype, dtype)
    drawn = np.float64 if dtype == "float64" else np.float32
    result = cupy.empty(shape, stored)
    flat = result.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        if dtype == "e4m3":
            sample = _e4m3_sample()
            part[...] = sample[_generator().integers(0, sample.size, size=part.size)]
        else:
            part[...] = _generator().standard_normal(part.size, dtype=drawn).astype(stored)
    return result


def widen(x: Any) -> Any:
    """As float64; uint8 are codes of e4m3."""
    if x.dtype == np.uint8:
        return _e4m3_values()[x.astype(np.int64)]
    return (x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x).astype(np.float64)


def sparse_operand(pattern: Pattern, block: tuple[int, int], dtype: str) -> Any:
    """A bsr_array with random blocks in the given places."""
    import cupy

    arrays = (normal((pattern.blocks, *block), dtype), cupy.asarray(pattern.indices), cupy.asarray(pattern.indptr))
    return bg.bsr_array(
        (arrays[0], *(x.astype(np.int32) for x in arrays[1:])),
        shape=(pattern.rows * block[0], pattern.columns * block[1]),
    )


@lru_cache(maxsize=1)
def right_operand(K: int, N: int, dtype: str) -> Any:
    """B, kept for the next case of the same shape. Column-major for e4m3, which the tensor cores want so."""
    return normal((N, K), dtype).T if dtype == "e4m3" else normal((K, N), dtype)


@lru_cache(maxsize=1)
def dense_operand(M: int, K: int, dtype: str) -> Any:
    """A dense random A for cuBLAS: zeros draw less power and would flatter it."""
    return normal((M, K), dtype)


# ----------------------------------------------------------------------------------------- checks
def dense_rows(A: Any, pattern: Pattern, rows: Sequence[int]) -> Any:
    """Some block rows of A as one dense float64 matrix, made without bsrgemm."""
    import cupy

    R, C = A.blocksize
    result = cupy.zeros((len(rows), R, pattern.columns, C), np.float64)
    for place, i in enumerate(rows):
        own = slice(int(pattern.indptr[i]), int(pattern.indptr[i + 1]))
        if own.start == own.stop:
            continue
        result[place][:, cupy.asarray(pattern.indices[own])] = widen(A.data[own]).transpose(1, 0, 2)
    return result.reshape(len(rows) * R, pattern.columns * C)


def ends(pattern: Pattern, R: int) -> list[int]:
    """The block rows to check: at least two, and 128 rows, at either end."""
    each = min(max(2, 128 // R), pattern.rows)
    return sorted({*range(each), *range(pattern.rows - each, pattern.rows)})


def element_rows(blocks: Sequence[int], R: int) -> Any:
    """The rows of elements of some block rows."""
    import cupy

    return cupy.asarray((np.array(blocks)[:, None] * R + np.arange(R)).reshape(-1))


def deviation(rows: Any, B: Any, got: Any) -> float:
    """Largest |got - rows B| over the norm of its row; rows are float64. NaN if anything is."""
    import cupy

    norms = cupy.sqrt((rows * rows).sum(axis=1))
    norms[norms == 0] = 1
    step = max(1, CHUNK // B.shape[0])
    worst = []
    for start in range(0, B.shape[1], step):
        part = slice(start, start + step)
        errors = cupy.abs(rows @ widen(B[:, part]) - widen(got[:, part])).max(axis=1) / norms
        worst.append(float(errors.max()))
    return float(np.max(worst))


def deviation_at_ends(A: Any, pattern: Pattern, B: Any, got: Any) -> float:
    """The deviation of A B in its first and last block rows."""
    blocks = ends(pattern, A.blocksize[0])
    return deviation(dense_rows(A, pattern, blocks), B, got[element_rows(blocks, A.blocksize[0])])


# ------------------------------------------------------------------------------------------ bench
@dataclass
class Bench:
    """The options of a run, and what could not be measured."""

    quick: bool = False
    with_peers: bool = True
    tune_torch: bool = False
    missing: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def seconds(self, call: Call) -> float:
        """Median seconds of a call."""
        once = time_sustained(call, seconds=0)
        repeats = 5 if self.quick else int(min(20, max(5, BUDGET / once)))
        return time_gpu(call, repeats, IDLE)

    def some(self, everything: Sequence[Any], quick: Sequence[Any]) -> Sequence[Any]:
        """What this run takes of a list."""
        return quick if self.quick else everything

    def attempt(self, what: str, where: str, function: Callable[[], Any]) -> Any:
        """The function's result, or None with its reason kept: what is not there must not stop a run."""
        try:
            return function()
        except Exception as error:
            reason = str(error).strip().split("\n")[0][:160]
            self.missing[f"{what}: {type(error).__name__}: {reason}"].append(" ".join(where.split()))
            return None

    def explain(self, table: Table) -> None:
        """Print why there is a "-" where there is one."""
        for reason, cases in self.missing.items():
            more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
            table.note(f"  - {reason} ({cases[0]}{more})")
        self.missing.clear()


@dataclass(frozen=True)
class Target:
    """What is to be reached: so much of `of`, which is "cuBLAS", "TFLOP/s" or "float16" (our own rate)."""

    least: float
    of: str = "cuBLAS"

    def __str__(self) -> str:
        unit = {"cuBLAS": "", "TFLOP/s": " TF", "float16": " f16"}[self.of]
        return f"{self.least:.3g}{unit}"

    def reached(self, rate: float, dense: float | None, float16: float | None) -> bool | None:
        """Is it? None where there is nothing to compare with."""
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
    #: run on this kernel, though another would be chosen
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
            with tuned.only(kernel):
                return bg.matmul(A, B, out=out)

        return forced
    if A.dtype == np.uint8:
        return lambda: bg.matmul(A, B, scale_a=1.0, scale_b=1.0, out_dtype=np.float16)
    options = {} if precision is None else {"precision": precision}
    return lambda: bg.matmul(A, B, out=out, **options)


def checked(call: Call, error: Callable[[Any], float], kind: str) -> Call:
    """The call, if its result is right; ValueError otherwise."""
    off = error(call())
    if not off <= TOLERANCE[kind]:
        raise ValueError(f"wrong result: off by {off:.1e}, allowed {TOLERANCE[kind]:.1e}")
    return call


def verified(bench: Bench, table: Table, label: str, call: Call, error: Callable[[Any], float]) -> bool:
    """Is a float16 product of ours there and right? If not, its line says so."""
    off = bench.attempt("bsrgemm", label, lambda: error(call()))
    if off is None:
        table.note(f"{label} | -")
    elif not off <= TOLERANCE["float16"]:
        table.add(f"{label} | WRONG: off by {off:.1e}", what=label, wrong=True, deviation=off)
    return off is not None and off <= TOLERANCE["float16"]


def dense_call(M: int, K: int, N: int, dtype: str, tf32: bool = False) -> Call:
    """Dense cuBLAS on random operands, its first rows checked."""
    import cupy

    A, B = dense_operand(M, K, dtype), right_operand(K, N, dtype)
    call = peers.dense_cublas(A, B, cupy.empty((M, N), A.dtype), tf32)
    return checked(call, lambda got: deviation(widen(A[:64]), B, got[:64]), "tf32" if tf32 else dtype)


def peer_rates(bench: Bench, case: Case, A: Any, B: Any, ours: Any, flops: float) -> dict[str, float | None]:
    """TFLOP/s of each peer whose result agrees with ours."""
    import cupy

    tune = bench.tune_torch and case.sustained
    makers: dict[str, Callable[..., Call]] = {
        "cuSPARSE BSR": peers.cusparse_bsr,
        "cuSPARSE ELL": peers.cusparse_ell,
        "torch BSR": partial(peers.torch_bsr, tune=tune),
    }
    # Two rounded results may differ by twice what one may be off.
    scale = 2 * (case.n * A.density) ** 0.5
    # cuSPARSE and Triton may take float32 as tf32.
    kind = "tf32" if case.dtype == "float32" else case.dtype

    def agreement(got: Any) -> float:
        some = slice(None, None, 16)
        return float(cupy.abs(widen(got[some]) - widen(ours[some])).max()) / scale

    def rate(maker: Callable[..., Call]) -> float:
        call = checked(maker(A, B, cupy.empty_like(ours)), agreement, kind)
        return flops / bench.seconds(call) / 1e12

    return {name: bench.attempt(name, str(case), partial(rate, maker)) for name, maker in makers.items()}


def case_row(bench: Bench, case: Case) -> Row:
    """Measure one case: dense cuBLAS, ours, dense cuBLAS, then the peers and the sustained rates."""
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
    flops = 2.0 * pattern.blocks * case.block[0] * case.block[1] * N
    call = multiply(A, B, cupy.empty((n, N), A.dtype), case.precision, case.kernel)
    result = bench.attempt("bsrgemm", str(case), call)
    if result is None:
        return row
    off = deviation_at_ends(A, pattern, B, result)
    row["deviation"] = off
    if not off <= TOLERANCE[case.computed_in]:
        return row | {"wrong": True}
    # cuBLAS multiplies fp8 through another interface: there the ratio is to its float16.
    dense_dtype = "float16" if case.dtype == "e4m3" else case.dtype
    dense = bench.attempt("cuBLAS", str(case), partial(dense_call, n, n, N, dense_dtype, case.precision == "tf32"))
    before = bench.seconds(dense) if dense else None
    row["seconds"] = bench.seconds(call)
    row["tflops"] = flops / row["seconds"] / 1e12
    if dense and before:
        row["dense_tflops"] = 2.0 * n * n * N / ((before + bench.seconds(dense)) / 2) / 1e12
        row["ratio"] = row["tflops"] / row["dense_tflops"]
    if case.peers and bench.with_peers:
        row["peers"] = peer_rates(bench, case, A, B, result, flops)
    if case.sustained:
        row["sustained"] = flops / time_sustained(call) / 1e12
        row["dense_sustained"] = 2.0 * n * n * N / time_sustained(dense) / 1e12 if dense else None
        time.sleep(COOL)
    return row


# ------------------------------------------------------------------------------------------- text
def number(value: float | None, width: int, digits: int = 1) -> str:
    """A right-aligned number, or "-"."""
    return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"


def mark(reached: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[reached]


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


# --------------------------------------------------------------------------------------- sections
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
    Case(8160, (96, 96), 0.22),
    Case(8160, (48, 80), 0.22),
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
            table.note(f"{case} | -")
            continue
        reached = None
        if case.target and row["tflops"]:
            reached = case.target.reached(row["tflops"], row["dense_tflops"], float16)
            row |= {"target": case.target.least, "target_of": case.target.of, "reached": reached}
        if case == TABLE[0]:
            float16 = row["tflops"]
        table.add(case_text(case, row, reached), **row)


def section_table(bench: Bench) -> Table:
    """The table of targets: block sizes, densities, dtypes."""
    table = Table("gemm_table_cuda", "A @ B, effective TFLOP/s")
    one_of_each = [case for case in TABLE if case.sustained or case.dtype != "float16"]
    run_cases(bench, table, bench.some(TABLE, one_of_each))
    return table


def section_size(bench: Bench) -> Table:
    """Sizes; the larger, the sparser, so that all operands fit."""
    table = Table("gemm_size_cuda", "A @ B by size, effective TFLOP/s")
    shapes = [(4096, 0.22, 4096), (8192, 0.22, 8192), (16384, 0.10, 16384), (32768, 0.05, 8192), (65536, 0.02, 8192)]
    shapes = list(bench.some(shapes, shapes[:2]))
    run_cases(bench, table, [Case(n, (b, b), d, columns=N) for n, d, N in shapes for b in (128, 64)])
    return table


def crossing(densities: Sequence[float], ratios: Sequence[float]) -> float | None:
    """The first density at which the time ratio reaches 1, by linear interpolation; None if it does not.

    >>> crossing([0.2, 0.4, 0.6], [0.5, 0.9, 1.3])
    0.45
    """
    if ratios and ratios[0] >= 1:
        return densities[0]
    for d0, d1, r0, r1 in zip(densities, densities[1:], ratios, ratios[1:], strict=False):
        if r0 < 1 <= r1:
            return round(d0 + (d1 - d0) * (1 - r0) / (r1 - r0), 6)
    return None


def density_ratios(bench: Bench, table: Table, block: int, densities: Sequence[float]) -> list[tuple[float, float]]:
    """Our time over that of dense cuBLAS at each density; every timing of ours lies between two of cuBLAS."""
    import cupy

    n, found = 8192, []
    dense = dense_call(n, n, n, "float16")
    before = bench.seconds(dense)
    for density in densities:
        table.progress(f"blocks {block}, density {density}")
        pattern = pattern_of("uniform", n, (block, block), density)
        A, B = sparse_operand(pattern, (block, block), "float16"), right_operand(n, n, "float16")
        label, call = f"{block:4} {pattern.density:6.4f}", multiply(A, B, cupy.empty((n, n), np.float16))
        if not verified(bench, table, label, call, partial(deviation_at_ends, A, pattern, B)):
            continue
        seconds, after = bench.seconds(call), bench.seconds(dense)
        reference, before = (before + after) / 2, after
        ratio = seconds / reference
        found.append((pattern.density, ratio))
        table.add(
            f"{label} | {seconds * 1e3:8.3f} ms | cuBLAS {reference * 1e3:8.3f} ms | "
            f"time ratio {ratio:6.3f}",
            block=block, density=pattern.density, seconds=seconds, dense_seconds=reference, ratio=ratio,
        )  # fmt: skip
    return found


def section_density(bench: Bench) -> Table:
    """Densities, and the one below which sparse beats dense."""
    table = Table("gemm_density_cuda", "A @ B by density, 8192 x 8192 times 8192 x 8192, float16")
    densities = bench.some([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0], [0.1, 0.4, 0.7, 1.0])
    for block, target in bench.some([(128, 0.92), (64, 0.75), (32, 0.50), (16, 0.33)], [(128, 0.92), (64, 0.75)]):
        found = density_ratios(bench, table, block, densities)
        if not found:
            continue
        at = crossing(*zip(*found, strict=True))
        reached = at is None or at >= target
        text = f"below {at:.3f}" if at else "at every density measured"
        table.add(
            f"{block:4} sparse beats dense {text} | target {target} {mark(reached)}",
            block=block, crossover=at, target=target, reached=reached,
        )  # fmt: skip
    return table


def section_columns(bench: Bench) -> Table:
    """Columns of B, from a vector to 32768."""
    import cupy

    table = Table("gemm_columns_cuda", "A @ B by columns of B, 8192 x 8192, density .22, float16")
    n = 8192
    counts = bench.some([1 << k for k in range(16)], [1, 16, 256, 4096])
    everything = normal((n, max(counts)), "float16")
    for block in (64, 128):
        pattern = pattern_of("uniform", n, (block, block), 0.22)
        A = sparse_operand(pattern, (block, block), "float16")
        stored = A.data.nbytes + A.indices.nbytes + A.indptr.nbytes
        for N in counts:
            table.progress(f"blocks {block}, {N} columns")
            B, out = cupy.ascontiguousarray(everything[:, :N]), cupy.empty((n, N), np.float16)
            label, call = f"{block:4} {N:6}", multiply(A, B, out)
            if not verified(bench, table, label, call, partial(deviation_at_ends, A, pattern, B)):
                continue
            seconds = bench.seconds(call)
            rate, bandwidth = 2 * A.nnz * N / seconds / 1e12, (stored + B.nbytes + out.nbytes) / seconds / 1e9
            table.add(
                f"{label} | {seconds * 1e3:8.4f} ms | {rate:7.2f} TFLOP/s | {bandwidth:7.1f} GB/s",
                block=block, columns=N, seconds=seconds, tflops=rate, gbps=bandwidth,
            )  # fmt: skip
    return table


def compare(bench: Bench, table: Table, label: str, ours: Call, base: Call, target: float | None) -> None:
    """One line: the rate of `ours` relative to that of `base`, which does the same work."""
    before, seconds, after = bench.seconds(base), bench.seconds(ours), bench.seconds(base)
    relative = (before + after) / 2 / seconds
    reached = None if target is None else relative >= target
    table.add(
        f"{label} | {seconds * 1e3:8.3f} ms | relative rate {relative:6.3f} | {target or ''!s:>4} {mark(reached)}",
        what=label.strip(), seconds=seconds, base_seconds=(before + after) / 2, relative=relative, target=target,
        reached=reached,
    )  # fmt: skip


def compare_patterns(bench: Bench, table: Table, block: int, kinds: Sequence[str]) -> None:
    """Each pattern against a uniform one with as many blocks."""
    import cupy

    n, size = 8192, (block, block)
    B, out = right_operand(n, n, "float16"), cupy.empty((n, n), np.float16)
    for kind in kinds:
        pattern = pattern_of(kind, n, size, 0.22)
        label = f"{f'{block}x{block} {kind}, {pattern.blocks} blocks':38}"
        table.progress(label)
        even = from_lengths(even_lengths(pattern.rows, pattern.blocks), pattern.columns)
        A, E = sparse_operand(pattern, size, "float16"), sparse_operand(even, size, "float16")
        call, base = multiply(A, B, out), multiply(E, B, out)
        if verified(bench, table, label, call, partial(deviation_at_ends, A, pattern, B)):
            compare(bench, table, label, call, base, {"power-law": 0.8}.get(kind))


def compare_products(bench: Bench, table: Table, block: int) -> None:
    """A.T @ B, B @ A and a batch of right-hand sides against A @ B, all of the same work."""
    import cupy

    n, size, batch = 8192, (block, block), 4
    pattern = pattern_of("uniform", n, size, 0.22)
    A, B, out = sparse_operand(pattern, size, "float16"), right_operand(n, n, "float16"), cupy.empty((n, n), np.float16)
    base = multiply(A, B, out)
    blocks = ends(pattern, block)
    first = element_rows(blocks, block)
    rows = dense_rows(A, pattern, blocks)
    columns = cupy.ascontiguousarray(dense_rows(A, pattern, range(pattern.rows)).T[first])
    stacked = cupy.ascontiguousarray(B.reshape(n, batch, -1).transpose(1, 0, 2))
    products = cupy.empty((batch, n, n // batch), np.float16)
    candidates: list[tuple[str, Call, Callable[[Any], float], float | None]] = [
        ("A.T @ B", lambda: bg.matmul(A.T, B, out=out), lambda got: deviation(columns, B, got[first]), 0.85),
        ("B @ A", lambda: bg.matmul(B, A, out=out), lambda got: deviation(columns, B.T, got.T[first]), 0.85),
        (
            f"A @ B, B of {stacked.shape}",
            lambda: bg.matmul(A, stacked, out=products),
            lambda got: float(np.max([deviation(rows, stacked[k], got[k][first]) for k in (0, batch - 1)])),
            None,
        ),
    ]
    for name, call, error, target in candidates:
        label = f"{f'{block}x{block} {name}':38}"
        table.progress(label)
        if verified(bench, table, label, call, error):
            compare(bench, table, label, call, base, target)


def section_patterns(bench: Bench) -> Table:
    """Uneven patterns against even ones with as many blocks; transposed and batched products against A @ B."""
    table = Table("gemm_patterns_cuda", "A @ B by pattern, 8192 x 8192 times 8192 x 8192, density .22, float16")
    for block in bench.some([128, 64], [128]):
        compare_patterns(bench, table, block, bench.some(list(PATTERNS), ["power-law", "arrowhead"]))
        compare_products(bench, table, block)
    return table


def relative_error(got: Any, exact: Any, size: Any) -> float:
    """max |got - exact| / (|A| |B|), elements without products left out."""
    error = abs(got - exact)
    return float((error[size > 0] / size[size > 0]).max())


def error_pair(block: int, dtype: str, precision: str | None) -> tuple[float, float]:
    """Our error and that of dense cuBLAS on the same operands."""
    import cupy

    n = 2048
    pattern = pattern_of("uniform", n, (block, block), 0.22)
    A, B = sparse_operand(pattern, (block, block), dtype), normal((n, n), dtype)
    dense = dense_rows(A, pattern, range(pattern.rows))
    ours = multiply(A, B, cupy.empty((n, n), A.dtype), precision)()
    filled = dense.astype(np.float32).astype(A.dtype) if dtype == "bfloat16" else dense.astype(A.dtype)
    theirs = peers.dense_cublas(filled, B, cupy.empty((n, n), A.dtype), precision == "tf32")()
    if dtype == "float64":  # wants more digits than the GPU has, and so only a few rows
        a, b = dense[:32].get().astype(np.longdouble), B.get().astype(np.longdouble)
        exact, size = a @ b, np.abs(a) @ np.abs(b)
        ours, theirs = (x[:32].get().astype(np.longdouble) for x in (ours, theirs))
        return relative_error(ours, exact, size), relative_error(theirs, exact, size)
    wide = widen(B)
    exact, size = dense @ wide, cupy.abs(dense) @ cupy.abs(wide)
    return relative_error(widen(ours), exact, size), relative_error(widen(theirs), exact, size)


def section_error(bench: Bench) -> Table:
    """Error against float64 (float64 against long double), beside cuBLAS's own."""
    table = Table("gemm_error_cuda", "A @ B, max |C - exact| / (|A| |B|), 2048 x 2048 times 2048 x 2048, density .22")
    cases: list[tuple[int, str, str | None, float]] = [
        *((b, "float16", None, 1.5) for b in (128, 64, 32, 16)),
        *((b, "bfloat16", None, 1.5) for b in (128, 64)),
        *(
            (32, dtype, precision, 2.0)
            for dtype, precision in (("float32", None), ("float32", "tf32"), ("float64", None))
        ),
    ]
    for block, dtype, precision, limit in cases:
        where = f"{f'{block}x{block}':>7} {precision or dtype:8}"
        table.progress(where)
        pair = bench.attempt("bsrgemm", where, partial(error_pair, block, dtype, precision))
        if pair is None:
            table.note(f"{where} | -")
            continue
        ours, theirs = pair
        # Both may be exact: 0 is within any multiple of 0.
        ratio, kept = (ours / theirs if theirs else None), ours <= limit * theirs
        table.add(
            f"{where} | {ours:.2e} | cuBLAS {theirs:.2e} | ratio {number(ratio, 5, 2)} | limit {limit} {mark(kept)}",
            block=block, dtype=dtype, precision=precision, error=ours, dense_error=theirs, ratio=ratio, limit=limit,
            reached=kept,
        )  # fmt: skip
    return table


SECTIONS: dict[str, Callable[[Bench], Table]] = {
    "table": section_table,
    "density": section_density,
    "size": section_size,
    "columns": section_columns,
    "patterns": section_patterns,
    "error": section_error,
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", choices=[*SECTIONS, "all"], default="table", help="default: table")
    parser.add_argument("--quick", action="store_true", help="a subset, 5 repeats; bench/results/ is left alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to this file")
    parser.add_argument("--no-peers", action="store_true", help="only dense cuBLAS beside ours")
    parser.add_argument("--tune-torch", action="store_true", help="tune torch for the headline cases (minutes)")
    return parser.parse_args(argv)


def main() -> None:
    options = arguments()
    if not has_gpu():
        raise SystemExit("bench/gemm.py measures tensor cores: it needs a GPU; bench/matmul.py runs anywhere")
    bench = Bench(options.quick, not options.no_peers, options.tune_torch)
    written: dict[str, list[Row]] = {}
    for name in SECTIONS if options.section == "all" else [options.section]:
        table = SECTIONS[name](bench)
        bench.explain(table)
        written[name] = table.rows
        if not options.quick:
            table.write()
        if options.json:  # after each section: a run that is cut short leaves what it has
            options.json.write_text(json.dumps({"machine": machine(), **written}, indent=1) + "\n")


if __name__ == "__main__":
    main()
