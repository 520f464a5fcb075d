"""``python -m bsrgemm compile --arch sm_90a``: fill the kernel cache ahead of time, without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._attention import decode_config
from .._attention import heuristics as attention_heuristics
from .._environment import cuda_problem
from .._kernels import disk_cache, element_types, jit
from .._products import heuristics
from ..dtypes import DEVICE_DTYPES

#: The dtypes that are compiled unless --all or --dtype asks for others: those that numerical code multiplies.
DEFAULT_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
#: NVRTC releases the GIL: two threads on two cores build 1.5 times as fast as one. One compilation uses one core.
_MOST_THREADS = 8
_SECONDS_BETWEEN_LINES = 5.0

Job = tuple[str, jit.KernelSpec]


@dataclass
class Summary:
    """The outcome of a run."""

    built: int = 0
    cached: int = 0
    errors: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def done(self) -> int:
        return self.built + self.cached + len(self.errors)


def specs(
    dtypes: Collection[str] = DEFAULT_DTYPES,
    kernels: Collection[str] | None = None,
    *,
    every: bool = False,
    arch: str | None = None,
) -> list[jit.KernelSpec]:
    """The kernels that products and attention can ask for (on `arch`, or on any), each once.

    Parameters
    ----------
    dtypes, kernels : collection of str, optional
        Names of the element types and kernels to keep; by default all kernels for `DEFAULT_DTYPES`.
    every : bool
        If True, include what is rarely needed: int64 index arrays, and the kernels that `skip_ahead_of_time` leaves
        out.
    arch : str, optional
        Keep only the kernels that can be compiled for this target.

    Returns
    -------
    list of KernelSpec
    """
    chosen = tuple(dtype for dtype in DEVICE_DTYPES if str(dtype) in dtypes)
    elements = {element_types.element(dtype) for dtype in chosen}
    if "u8" in elements:  # bytes may be fp8
        elements.add("e4m3")
    families: tuple[tuple[Any, Iterator[Any]], ...] = (
        (heuristics, heuristics.every_config(chosen)),
        (attention_heuristics, (c for c in attention_heuristics.every_config() if c.dtype in elements)),
        (decode_config, (c for c in decode_config.every_decode_config() if c.element in elements)),
    )
    found: dict[jit.KernelSpec, None] = {}
    for family, members in families:
        for config in members:
            if (every or not family.skip_ahead_of_time(config)) and (arch is None or family.runs_on(config, arch)):
                spec = config.spec()
                if kernels is None or spec.entry in kernels:
                    found[spec] = None
    return list(found)


def kernel_names() -> list[str]:
    """The names of all kernels."""
    return list(dict.fromkeys(spec.entry for spec in specs(("float16", "float32", "uint8"))))


def build_all(jobs: Collection[Job], step: Callable[[Summary], None], threads: int | None = None) -> Summary:
    """Compile every job into the cache and call `step` after each; an interrupt lets running compilations finish."""
    threads = threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    summary = Summary()
    pool = ThreadPoolExecutor(threads)
    futures: dict[Future[bool], Job] = {}
    try:
        for job in jobs:
            futures[pool.submit(_build, job)] = job
        for future in as_completed(futures):
            try:
                if future.result():
                    summary.cached += 1
                else:
                    summary.built += 1
            except jit.CompileError as error:
                summary.errors.append(str(error))
            step(summary)
    except KeyboardInterrupt:
        summary.interrupted = True
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return summary


def _build(job: Job) -> bool:
    """Compile a kernel unless the cache has it; return whether it had. OSError if the cache cannot be written."""
    arch, spec = job
    report = jit.build_report(spec, arch)
    if Path(report.path).parent != disk_cache.folder():
        raise OSError(f"{disk_cache.folder()} cannot be written; set CUPY_CACHE_DIR to a folder that can")
    return report.cached


# ------------------------------------------------------------------------------------ progress
@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Summary], None]]:
    """A progress bar by rich on a terminal, otherwise a line every few seconds."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _Lines(total)
        return
    console = Console()
    if not console.is_terminal:
        yield _Lines(total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("kernels", total=total)
        yield lambda summary: bar.update(task, completed=summary.done)


class _Lines:
    def __init__(self, total: int) -> None:
        self.total = total
        self.last = time.perf_counter()

    def __call__(self, summary: Summary) -> None:
        now = time.perf_counter()
        if now - self.last >= _SECONDS_BETWEEN_LINES:
            self.last = now
            print(f"{summary.done} of {self.total} kernels", flush=True)


# --------------------------------------------------------------------------------- command line
def add_command(commands: Any) -> None:
    """Add `compile` to the command line."""
    parser = commands.add_parser(
        "compile",
        help="compile kernels ahead into the cache; no GPU needed",
        description=(
            f"Compiles what products can ask for, by default of {', '.join(DEFAULT_DTYPES)} and with int32 "
            "indices. Products of mixed dtypes are compiled on first use."
        ),
    )
    parser.add_argument("--arch", action="append", help="target, such as sm_90a; default: this machine's GPU")
    parser.add_argument("--dtype", nargs="+", action="extend", help="only these element types")
    kernels = kernel_names()
    parser.add_argument(
        "--kernel",
        nargs="+",
        action="extend",
        choices=kernels,
        metavar="KERNEL",
        help=f"only these of {', '.join(kernels)}",
    )
    parser.add_argument("--all", action="store_true", help="every dtype, and int64 indices too")
    parser.add_argument("--list", action="store_true", help="only list the kernels")
    parser.set_defaults(command=lambda args: _compile(args, parser))


def _compile(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        wanted = specs(_dtypes(args.dtype, args.all), args.kernel, every=args.all)
        if args.list:
            for spec in wanted:
                print(spec)
            print(f"{len(wanted)} kernels; gemm_sm90, attention_sm90 and attention_values for sm_90a alone")
            return 0
        archs = _archs(args.arch)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    chosen = (_dtypes(args.dtype, args.all), args.kernel)
    jobs = [(arch, spec) for arch in archs for spec in specs(*chosen, every=args.all, arch=arch)]
    print(f"{len(jobs)} kernels for {', '.join(archs)} with NVRTC {jit.nvrtc_version()}", flush=True)
    start = time.perf_counter()
    try:
        with _progress(len(jobs)) as step:
            summary = build_all(jobs, step)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    seconds = time.perf_counter() - start
    for text in summary.errors:
        print(text, file=sys.stderr)
    failed = f", {len(summary.errors)} failed" if summary.errors else ""
    stopped = f", stopped with {len(jobs) - summary.done} left" if summary.interrupted else ""
    counts = f"{summary.built} built, {summary.cached} cached{failed}{stopped}"
    print(f"{counts} in {seconds:.1f} s: {disk_cache.folder()}")
    if summary.interrupted:
        raise KeyboardInterrupt
    return 1 if summary.errors else 0


def _dtypes(names: list[str] | None, everything: bool) -> tuple[str, ...]:
    known = tuple(str(dtype) for dtype in DEVICE_DTYPES)
    if names is None:
        return known if everything else DEFAULT_DTYPES
    for name in names:
        if name not in known:
            raise ValueError(f"--dtype: got {name!r}, wanted one of {', '.join(known)}")
    return tuple(names)


def _archs(names: list[str] | None) -> list[str]:
    if names is None:
        problem = cuda_problem()
        if problem is not None:
            raise ValueError(
                f"--arch: wanted a target such as sm_90a, since no GPU can be asked for its own: missing {problem}"
            )
        return [jit.device_target()]
    known = jit.supported_archs()
    for name in names:
        match = re.fullmatch(r"sm_(\d+)[af]?", name)
        if match is None or int(match[1]) not in known:
            targets = ", ".join(f"sm_{number}" for number in known)
            raise ValueError(f"--arch: got {name!r}, wanted one of {targets}, or one of these with an a")
    return list(dict.fromkeys(names))
