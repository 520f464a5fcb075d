"""The kernels that bench/run/gemm.py will ask for, compiled side by side into the cache before anything is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np

from ..._kernels import element_types, jit
from ..._products import configs, heuristics
from ...dtypes import accumulator_dtype
from ..table import Table
from .gemm_cases import TABLE, Bench, Case
from .gemm_sections import COLUMNS, CROSSOVERS, DENSITIES, ERROR_SIDE, PATTERN_DENSITY, SIDE, SIZES


def problem_of(case: Case, arch: str) -> heuristics.Problem:
    """The properties of a case that decide its kernel."""
    fp8 = case.dtype == "e4m3"
    dtype = np.dtype({"bfloat16": ml_dtypes.bfloat16, "e4m3": np.uint8}.get(case.dtype, case.dtype))
    result = np.dtype(np.float16) if fp8 else dtype
    names = element_types.types(dtype, dtype, result, accumulator_dtype(result), np.dtype(np.int32))
    rows, columns = case.n // case.block[0], case.n // case.block[1]
    return heuristics.Problem(
        arch, element_types.scaled(names) if fp8 else names, *case.block, case.columns, 1, rows, columns,
        rows * max(1, round(case.density * columns)), False, "F" if fp8 else "C", "C", True, True,
        case.precision == "tf32",
    )  # fmt: skip


def cases_of(section: str) -> list[Case]:
    """The cases of a section, or some that want the same kernels."""
    if section == "table":
        return TABLE
    if section == "size":
        return [Case(n, (b, b), d, columns=N) for n, d, N in SIZES for b in (128, 64)]
    if section == "density":
        return [Case(SIDE, (b, b), d) for b, _ in CROSSOVERS for d in DENSITIES]
    if section == "columns":
        return [Case(SIDE, (b, b), PATTERN_DENSITY, columns=N) for b in (128, 64) for N in COLUMNS]
    if section == "error":
        kinds = [("float16", None), ("bfloat16", None), ("float32", None), ("float32", "tf32"), ("float64", None)]
        blocks = {"float16": (128, 64, 32, 16), "bfloat16": (128, 64)}
        return [
            Case(ERROR_SIDE, (b, b), PATTERN_DENSITY, ERROR_SIDE, dtype, precision)
            for dtype, precision in kinds
            for b in blocks.get(dtype, (32,))
        ]
    return [Case(SIDE, (b, b), PATTERN_DENSITY) for b in (128, 64)]


def problems(section: str, arch: str) -> Iterator[tuple[Case, heuristics.Problem]]:
    """The problems of a section, each with the case it stands for."""
    for case in cases_of(section):
        problem = problem_of(case, arch)
        yield case, problem
        if section == "patterns":  # A.T @ B, B @ A, a batch of right-hand sides
            yield case, replace(problem, transposed=True)
            yield case, replace(problem, transposed=True, b_order="F", c_order="F")
            yield case, replace(problem, N=problem.N // 4, batches=4)


def specs(sections: Sequence[str], arch: str) -> list[jit.KernelSpec]:
    """The kernels of some sections, each once."""
    found = {configs.RowMatching(entry).spec(): None for entry in ("row_bits", "overlaps", "match_rows")}
    for section in sections:
        for case, problem in problems(section, arch):
            config: configs.Gemm | None = heuristics.gemm(problem)
            if case.kernel is not None:
                config = next((c for c in heuristics.candidates(problem) if type(c).__name__ == case.kernel), None)
            if config is not None:
                found[config.spec()] = None
    return list(found)


def compile_ahead(bench: Bench, table: Table, sections: Sequence[str]) -> None:
    """Fill the cache; nothing is loaded or run, and a kernel that cannot be built fails again where it is needed."""
    start = time.perf_counter()
    table.progress("compiling")
    arch = jit.device_target()
    wanted = bench.attempt("compiling", "ahead", partial(specs, sections, arch)) or []
    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
        for spec, future in [(spec, pool.submit(jit.build, spec, arch)) for spec in wanted]:
            bench.attempt("compiling", str(spec), future.result)
    table.note(f"{len(wanted)} kernels ready after {time.perf_counter() - start:.1f} s")
