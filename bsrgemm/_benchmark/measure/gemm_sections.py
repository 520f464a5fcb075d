"""The sections of bench/run/gemm.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import bsrgemm as bg

from ..checks.products import (
    TOLERANCE,
    dense_rows,
    deviation,
    deviation_at_ends,
    element_rows,
    ends,
    right_operand,
    sparse_operand,
)
from ..patterns import PATTERNS, even_lengths, from_lengths, pattern_of
from ..peers import products as peers
from ..random_data import normal, widen
from ..runner import Sections, mark, number
from ..show.figures import crossing_of
from ..show.headline import HEADLINE_ROWS as ROWS_SHOWN
from ..table import Table
from ..timing import Call
from .gemm_cases import TABLE, Bench, Case, dense_call, multiply, run_cases

#: Rows and columns of A where a section does not vary them, and where errors are measured
SIDE, ERROR_SIDE = 8192, 2048
#: (n, density, columns of B); the larger, the sparser, so that all operands fit
SIZES = [(4096, 0.22, 4096), (16384, 0.10, 16384), (32768, 0.05, 8192), (65536, 0.02, 8192)]
DENSITIES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0)
#: Blocks, and the density up to which sparse is to beat dense
CROSSOVERS = [(128, 0.92), (64, 0.75), (32, 0.50), (16, 0.33)]
#: A block size is not measured further once sparse takes this many times as long as dense.
HOPELESS = 1.25
COLUMNS = [1 << k for k in range(16)]
PATTERN_DENSITY = 0.22


def section_table(bench: Bench, table: Table) -> None:
    """The table of targets: block sizes, densities, dtypes."""
    one_of_each = [case for case in TABLE if case.sustained or case.dtype != "float16"]
    run_cases(bench, table, TABLE[: ROWS_SHOWN["gemm"]] if bench.headline else bench.some(TABLE, one_of_each))


def section_size(bench: Bench, table: Table) -> None:
    """Sizes, one density each."""
    shapes = bench.some(SIZES, SIZES[:1])
    run_cases(bench, table, [Case(n, (b, b), d, columns=N) for n, d, N in shapes for b in (128, 64)])


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """The first density at which the time ratio reaches 1, between two points; None if it does not.

    >>> crossing([(0.2, 0.5), (0.4, 0.9), (0.6, 1.3)]), crossing([(0.2, 1.1), (0.4, 1.3)])
    (0.45, 0.2)
    """
    return points[0][0] if points and points[0][1] >= 1 else crossing_of(points)


def density_ratios(bench: Bench, table: Table, block: int, densities: Sequence[float]) -> list[tuple[float, float]]:
    """Our time over that of dense cuBLAS at each density; both are timed in turn."""
    import cupy

    n, found = SIDE, []
    dense = dense_call(n, n, n, "float16")
    for density in densities:
        table.progress(f"blocks {block}, density {density}")
        pattern = pattern_of("uniform", n, (block, block), density)
        A, B = sparse_operand(pattern, (block, block), "float16"), right_operand(n, n, "float16")
        label, call = f"{block:4} {pattern.density:6.4f}", multiply(A, B, cupy.empty((n, n), np.float16))
        if not bench.verified(table, label, call, partial(deviation_at_ends, A, pattern, B), TOLERANCE["float16"]):
            continue
        times = bench.interleaved({"bsrgemm": call, "cuBLAS": dense}, label)
        seconds, reference = times["bsrgemm"], times["cuBLAS"]
        ratio = seconds / reference
        found.append((pattern.density, ratio))
        table.add(
            f"{label} | {seconds * 1e3:8.3f} ms | cuBLAS {reference * 1e3:8.3f} ms | "
            f"time ratio {ratio:6.3f}",
            block=block, density=pattern.density, seconds=seconds, dense_seconds=reference, ratio=ratio,
        )  # fmt: skip
        if ratio > HOPELESS:
            break
    return found


def section_density(bench: Bench, table: Table) -> None:
    """Densities, and the one below which sparse beats dense."""
    densities = bench.some(DENSITIES, [0.1, 0.4, 0.7, 1.0])
    for block, target in bench.some(CROSSOVERS, CROSSOVERS[:2]):
        found = density_ratios(bench, table, block, densities)
        if not found:
            continue
        at = crossing(found)
        reached = at is None or at >= target
        text = f"below {at:.3f}" if at else "at every density measured"
        table.add(
            f"{block:4} sparse beats dense {text} | target {target} {mark(reached)}",
            block=block, crossover=at, target=target, reached=reached,
        )  # fmt: skip


def section_columns(bench: Bench, table: Table) -> None:
    """Columns of B, from a vector to 32768."""
    import cupy

    n = SIDE
    counts = bench.some(COLUMNS, [1, 16, 256, 4096])
    everything = normal((n, max(counts)), "float16")
    for block in (64, 128):
        pattern = pattern_of("uniform", n, (block, block), PATTERN_DENSITY)
        A = sparse_operand(pattern, (block, block), "float16")
        stored = A.data.nbytes + A.indices.nbytes + A.indptr.nbytes
        for N in counts:
            table.progress(f"blocks {block}, {N} columns")
            B, out = cupy.ascontiguousarray(everything[:, :N]), cupy.empty((n, N), np.float16)
            label, call = f"{block:4} {N:6}", multiply(A, B, out)
            if not bench.verified(table, label, call, partial(deviation_at_ends, A, pattern, B), TOLERANCE["float16"]):
                continue
            seconds = bench.seconds(call)
            rate, bandwidth = 2 * A.nnz * N / seconds / 1e12, (stored + B.nbytes + out.nbytes) / seconds / 1e9
            table.add(
                f"{label} | {seconds * 1e3:8.4f} ms | {rate:7.2f} TFLOP/s | {bandwidth:7.1f} GB/s",
                block=block, columns=N, seconds=seconds, tflops=rate, gbps=bandwidth,
            )  # fmt: skip


def compare(bench: Bench, table: Table, label: str, ours: Call, base: Call, target: float | None) -> None:
    """One line: the rate of `ours` relative to that of `base`, which does the same work."""
    times = bench.interleaved({"ours": ours, "base": base}, label)
    seconds, reference = times["ours"], times["base"]
    relative = reference / seconds
    reached = None if target is None else relative >= target
    table.add(
        f"{label} | {seconds * 1e3:8.3f} ms | relative rate {relative:6.3f} | {target or ''!s:>4} {mark(reached)}",
        what=label.strip(), seconds=seconds, base_seconds=reference, relative=relative, target=target,
        reached=reached,
    )  # fmt: skip


def compare_patterns(bench: Bench, table: Table, block: int, kinds: Sequence[str]) -> None:
    """Each pattern against a uniform one with as many blocks."""
    import cupy

    n, size = SIDE, (block, block)
    B, out = right_operand(n, n, "float16"), cupy.empty((n, n), np.float16)
    for kind in kinds:
        pattern = pattern_of(kind, n, size, PATTERN_DENSITY)
        label = f"{f'{block}x{block} {kind}, {pattern.blocks} blocks':38}"
        table.progress(label)
        even = from_lengths(even_lengths(pattern.rows, pattern.blocks), pattern.columns)
        A, E = sparse_operand(pattern, size, "float16"), sparse_operand(even, size, "float16")
        call, base = multiply(A, B, out), multiply(E, B, out)
        if bench.verified(table, label, call, partial(deviation_at_ends, A, pattern, B), TOLERANCE["float16"]):
            target = {"power-law": 0.8}.get(kind)
            bench.attempt("bench", label, partial(compare, bench, table, label, call, base, target))


def compare_products(bench: Bench, table: Table, block: int) -> None:
    """A.T @ B, B @ A and a batch of right-hand sides against A @ B, all of the same work."""
    import cupy

    n, size, batch = SIDE, (block, block), 4
    pattern = pattern_of("uniform", n, size, PATTERN_DENSITY)
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
        if bench.verified(table, label, call, error, TOLERANCE["float16"]):
            bench.attempt("bench", label, partial(compare, bench, table, label, call, base, target))


def section_patterns(bench: Bench, table: Table) -> None:
    """Uneven patterns against even ones with as many blocks; transposed and batched products against A @ B."""
    few = ["power-law", "arrowhead"]
    kinds = {128: bench.some(list(PATTERNS), few), 64: [*few, "one dense row", "half empty"]}
    for block in bench.some([128, 64], [128]):
        compare_patterns(bench, table, block, kinds[block])
        compare_products(bench, table, block)


def relative_error(got: Any, exact: Any, size: Any) -> float:
    """max |got - exact| / (|A| |B|), elements without products left out."""
    error = abs(got - exact)
    return float((error[size > 0] / size[size > 0]).max())


def error_pair(block: int, dtype: str, precision: str | None) -> tuple[float, float]:
    """Our error and that of dense cuBLAS on the same operands."""
    import cupy

    n = ERROR_SIDE
    pattern = pattern_of("uniform", n, (block, block), PATTERN_DENSITY)
    A, B = sparse_operand(pattern, (block, block), dtype), normal((n, n), dtype)
    dense = dense_rows(A, pattern, range(pattern.rows))
    ours = multiply(A, B, cupy.empty((n, n), A.dtype), precision)()
    filled = dense.astype(np.float32).astype(A.dtype) if dtype == "bfloat16" else dense.astype(A.dtype)
    theirs = peers.dense_cublas(filled, B, cupy.empty((n, n), A.dtype), precision == "tf32")()
    if dtype == "float64":  # needs more digits than the GPU has, so only a few rows are checked
        a, b = dense[:32].get().astype(np.longdouble), B.get().astype(np.longdouble)
        exact, size = a @ b, np.abs(a) @ np.abs(b)
        ours, theirs = (x[:32].get().astype(np.longdouble) for x in (ours, theirs))
        return relative_error(ours, exact, size), relative_error(theirs, exact, size)
    wide = widen(B)
    exact, size = dense @ wide, cupy.abs(dense) @ cupy.abs(wide)
    return relative_error(widen(ours), exact, size), relative_error(widen(theirs), exact, size)


def section_error(bench: Bench, table: Table) -> None:
    """Error against float64 (float64 against long double), beside cuBLAS's own."""
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
            table.add(f"{where} | -", what=where.strip(), failed=True)
            continue
        ours, theirs = pair
        # Both may be exact: 0 is within any multiple of 0.
        ratio, kept = (ours / theirs if theirs else None), ours <= limit * theirs
        table.add(
            f"{where} | {ours:.2e} | cuBLAS {theirs:.2e} | ratio {number(ratio, 5, 2)} | limit {limit} {mark(kept)}",
            block=block, dtype=dtype, precision=precision, error=ours, dense_error=theirs, ratio=ratio, limit=limit,
            reached=kept,
        )  # fmt: skip


#: The most important sections first, in case a run is stopped early.
SECTIONS: Sections = {
    "table": ("A @ B, effective TFLOP/s", section_table),
    "density": ("A @ B by density, 8192 x 8192 times 8192 x 8192, float16", section_density),
    "patterns": ("A @ B by pattern, 8192 x 8192 times 8192 x 8192, density .22, float16", section_patterns),
    "error": ("A @ B, max |C - exact| / (|A| |B|), 2048 x 2048 times 2048 x 2048, density .22", section_error),
    "columns": ("A @ B by columns of B, 8192 x 8192, density .22, float16", section_columns),
    "size": ("A @ B by size, effective TFLOP/s", section_size),
}
