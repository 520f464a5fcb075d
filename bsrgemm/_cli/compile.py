"""``python -m bsrgemm compile --arch sm_90a``: fill the kernel cache ahead of time, without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from .._environment import cuda_problem
from .._kernel_index import every as every_kernel
from .._kernels import disk_cache, jit
from ..dtypes import DEVICE_DTYPES
from .common_kernels import COMMON_DTYPES, common_kernels

#: The dtypes of `specs`, and of --kernel, unless others are asked for: those that numerical code multiplies.
DEFAULT_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
#: NVRTC releases the GIL: two threads on two cores build 1.5 times as fast as one. One compilation uses one core.
_MOST_THREADS = 8
_SECONDS_BETWEEN_LINES = 5.0
#: Seconds of one core that a kernel takes, measured once with NVRTC 12.9; all others take _USUAL_SECONDS.
_SECONDS = {
    "attention_backward_fused": 1.6, "attention_backward_sm80": 1.3, "attention_backward_sm90": 1.6,
    "attention_backward_keys_sm90": 1.6, "attention_backward_queries_sm90": 1.0, "attention_short_sm90": 0.9,
    "attention_sm80": 2.4, "attention_sm90": 2.4,
    "block_products_sm80": 0.5, "block_products_sm90": 0.8, "decode": 1.3, "gemm_sm80": 2.2, "gemm_sm90": 0.8,
    "gemm_turned_sm90": 1.0,
}  # fmt: skip
_USUAL_SECONDS = 0.3
#: The share of its time that a thread works while others compile too.
_EFFICIENCY = 0.75
#: What --list shows of kernels for every target: one of each generation that has kernels of its own.
_GENERATIONS = ("sm_75", "sm_80", "sm_90a")

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
        If True, include what is rarely needed: int64 index arrays, and other `rare` kernels.
    arch : str, optional
        Keep only the kernels that can be compiled for this target.

    Returns
    -------
    list of KernelSpec
    """
    found: dict[jit.KernelSpec, None] = {}
    for kernel in every_kernel(tuple(dtype for dtype in DEVICE_DTYPES if str(dtype) in dtypes)):
        if (every or not kernel.rare) and (arch is None or kernel.runs_on(arch)):
            spec = kernel.spec()
            if kernels is None or spec.entry in kernels:
                found[spec] = None
    return list(found)


def common_specs(arch: str, dtypes: Collection[str] = COMMON_DTYPES) -> list[jit.KernelSpec]:
    """The kernels for `A @ x`, `A @ B`, steps of solvers, attention and decode in common sizes on `arch`, each once."""
    chosen = [dtype for dtype in DEVICE_DTYPES if str(dtype) in dtypes]
    return list(dict.fromkeys(kernel.spec() for kernel in common_kernels(arch, chosen)))


def estimate(jobs: Collection[Job], threads: int) -> float:
    """The seconds that these kernels take about, if none is in the cache.

    >>> estimate([], 2)
    0.0
    """
    seconds = sum((_SECONDS.get(spec.entry, _USUAL_SECONDS) for _, spec in jobs), 0.0)
    return seconds if threads == 1 else seconds / (threads * _EFFICIENCY)


def _threads() -> int:
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _duration(seconds: float) -> str:
    """
    >>> _duration(1.2), _duration(75), _duration(4000)
    ('about 5 seconds', 'about 75 seconds', 'about 67 minutes')
    """
    if seconds < 120:
        return f"about {max(5, round(seconds / 5) * 5)} seconds"
    return f"about {round(seconds / 60)} minutes"


def kernel_names() -> list[str]:
    """The names of all kernels."""
    return list(dict.fromkeys(spec.entry for spec in specs(("float16", "float64", "uint8"))))


def build_all(jobs: Collection[Job], step: Callable[[Summary], None], threads: int | None = None) -> Summary:
    """Compile every job into the cache and call `step` after each; an interrupt lets running compilations finish."""
    threads = threads or _threads()
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
    if not report.stored:
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
            "Compiles the kernels that A @ x, A @ B, solvers, attention and decode meet in common sizes, by default of "
            f"{', '.join(COMMON_DTYPES)}. --kernel compiles all usual variants of some kernels, --all every variant. "
            "What is missing is compiled on first use."
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
    parser.add_argument("--all", action="store_true", help="every variant, of every dtype unless --dtype is given")
    parser.add_argument("--list", action="store_true", help="only list the kernels")
    parser.set_defaults(command=lambda args: _compile(args, parser))


def _compile(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        archs = list(_GENERATIONS) if args.list and args.arch is None else _archs(args.arch)
        jobs = [(arch, spec) for arch in archs for spec in _wanted(args, arch)]
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    if args.list:  # outside of `try`: a closed pipe is an OSError too, and ends the command quietly
        listed = dict.fromkeys(spec for _, spec in jobs)
        for spec in listed:
            print(spec)
        alone = "those with sm90 in their name, attention_values, most of attention_backward_begin and _end"
        print(f"{len(listed)} kernels; {alone} for sm_90a alone")
        return 0
    threads = _threads()
    expected = f"{_duration(estimate(jobs, threads))} with {threads} thread{'s' if threads > 1 else ''}"
    print(
        f"{len(jobs)} kernels for {', '.join(archs)} with NVRTC {jit.nvrtc_version()}, "
        f"{expected} if none is in the cache",
        flush=True,
    )
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


def _wanted(args: argparse.Namespace, arch: str) -> list[jit.KernelSpec]:
    """The kernels that the options ask for on `arch`: the common ones, some kernels, or all."""
    if args.all:
        dtypes = _dtypes(args.dtype, tuple(str(dtype) for dtype in DEVICE_DTYPES))
        common = [s for s in common_specs(arch, dtypes) if args.kernel is None or s.entry in args.kernel]
        return list(dict.fromkeys([*common, *specs(dtypes, args.kernel, every=True, arch=arch)]))
    if args.kernel:
        return specs(_dtypes(args.dtype, DEFAULT_DTYPES), args.kernel, arch=arch)
    return common_specs(arch, _dtypes(args.dtype, COMMON_DTYPES))


def _dtypes(names: list[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    known = tuple(str(dtype) for dtype in DEVICE_DTYPES)
    if names is None:
        return default
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
    for name in names:
        try:
            jit.check_arch(name)
        except ValueError as error:
            raise ValueError(f"--arch: {error}") from error
    return list(dict.fromkeys(names))
