"""One call under NVIDIA Nsight Compute, its figures read: ``python -m bsrgemm profile gemm --block 64``.

The command starts ncu, which starts the command again with ``--inside``: the operands of a problem of `bench`, a few
calls that compile and plan, then one call between cudaProfilerStart and cudaProfilerStop, which is all that ncu sees.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._environment import cuda_problem
from .._version import __version__

if TYPE_CHECKING:
    from .._benchmark.cases.problem import Problem
    from .._benchmark.show.ncu import Launch

# --------------------------------------------------------------------------------------- the case
#: The options of each case with their defaults; None means that the option is off by default.
CASES: dict[str, dict[str, Any]] = {
    "gemm": {"size": 8192, "block": 64, "density": 0.22, "columns": 8192, "dtype": "float16"},
    "spmv": {"size": 65536, "block": 16, "density": 0.01, "dtype": "float32"},
    "attention": {"size": 16384, "heads": 16, "head_dim": 128, "dtype": "float16", "causal": False, "window": None,
                  "block": 128, "density": 1.0},
    "decode": {"size": 131072, "heads": 32, "head_dim": 128, "dtype": "float16", "page": None},
}  # fmt: skip
#: The kernels of each case; other kernels that a call launches are ignored.
KERNELS = {"gemm": "^(gemm_|spm)", "spmv": "^spmv", "attention": "^attention_s", "decode": "^decode"}
_DTYPES = ("float16", "bfloat16", "e4m3", "tf32", "float32", "float64")
_NOT_TAKEN = {"spmv": ("e4m3", "tf32"), "attention": ("tf32",), "decode": ("e4m3", "tf32", "float32", "float64")}
_PAGES = (16, 32, 64, 128, 256)  # those of KVCache
_SHARING = 4  # query heads of a decode that share a KV head, as in bench


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def options_of(case: str, given: dict[str, Any]) -> dict[str, Any]:
    """All options of a case, from those that were given, None where not; ValueError for what it does not take."""
    given = {option: value for option, value in given.items() if value is not None}
    for option, value in given.items():
        if option not in CASES[case]:
            raise ValueError(f"{_flag(option)}: {case} only has {', '.join(map(_flag, CASES[case]))}")
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{_flag(option)}: wanted a number from 1 on, got {value}")
    options = CASES[case] | given
    if not 0 < options.get("density", 1) <= 1:
        raise ValueError(f"--density: wanted a number above 0 and up to 1, got {options['density']}")
    if options["dtype"] in _NOT_TAKEN.get(case, ()):
        raise ValueError(f"--dtype: {case} does not take {options['dtype']}")
    if case in ("gemm", "spmv") and options["size"] % options["block"]:
        raise ValueError(f"--size: wanted a multiple of the block, {options['block']}, got {options['size']}")
    return options


def arguments(case: str, options: dict[str, Any]) -> list[str]:
    """The command line that asks for it, every option spelled out."""
    found = [case]
    for option, value in options.items():
        if value:
            found += [_flag(option)] if value is True else [_flag(option), str(value)]
    return found


def problem_of(case: str, options: Mapping[str, Any]) -> Problem:
    """The problem of `bench` that has these options, all of which are given; nothing is allocated yet."""
    from .._benchmark.cases.attentions import Attention, Decode
    from .._benchmark.cases.products import Product

    size, dtype = options["size"], options["dtype"]
    if case in ("gemm", "spmv"):
        stored, precision = ("float32", "tf32") if dtype == "tf32" else (dtype, None)
        block, columns = options["block"], options.get("columns", 1)
        return Product(case, size, (block, block), options["density"], columns, stored, precision)
    heads, head_dim = options["heads"], options["head_dim"]
    if case == "decode":
        kv_heads = heads // _SHARING if heads % _SHARING == 0 else heads
        return Decode(1, size, heads, kv_heads, head_dim, options["page"], dtype)
    density, block = options["density"], options["block"]
    blocks = (block, max(1, round(density * size / block))) if density < 1 else None
    return Attention(1, heads, size, head_dim, options["causal"], options["window"], blocks, dtype=dtype)


# ------------------------------------------------------------------------------------ two processes
_WARM_UPS, _SECONDS_TO_STOP = 3, 10.0


def _inside(problem: Problem) -> int:
    """What ncu runs."""
    import cupyx.profiler

    from .._benchmark.place import place_of

    place = place_of("cuda")
    call = problem.ready(place, place.normal).call
    for _ in range(_WARM_UPS):
        call()
    place.synchronize()
    with cupyx.profiler.profile():
        call()
        place.synchronize()
    return 0


def _program(ncu: str, problem: Problem) -> str:
    """Where ncu is; ValueError where the problem cannot be profiled."""
    missing = cuda_problem()
    if missing is not None:
        raise ValueError(f"profiling needs a GPU; missing {missing}")
    found = shutil.which(ncu)
    if found is None:
        raise ValueError(
            f"--ncu: there is no program {ncu!r}. It is NVIDIA Nsight Compute, which comes with the CUDA toolkit or "
            "by itself from developer.nvidia.com/nsight-compute; --ncu PATH says where it is"
        )
    from .._benchmark.place import place_of

    needed, free = problem.memory, place_of("cuda").free_bytes()
    if needed > free:
        raise ValueError(
            f"--size: {problem} needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on the GPU"
        )
    return found


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Exit status and output of ncu. On an interrupt it has time to reset the clocks of the card."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    numbers = {**os.environ, "LC_ALL": "C.UTF-8"}  # written as 1,234.5
    process = subprocess.Popen(command, **pipes, text=True, errors="replace", env=numbers, start_new_session=True)
    try:
        output, errors = process.communicate()
    except KeyboardInterrupt:
        print("interrupted: ncu is being stopped", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_SECONDS_TO_STOP)
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, f"{errors}\n{output}"


# ---------------------------------------------------------------------------------------- results
def _write(path: Path, words: Sequence[str], problem: Problem, launch: Launch) -> None:
    from .._benchmark.show import ncu

    found = ncu.figures(launch.metrics)
    content = {
        "bsrgemm": __version__,
        "command": shlex.join(["python", "-m", "bsrgemm", *words]),
        "case": {"group": problem.group, "name": str(problem), **problem.parameters()},
        "kernel": launch.kernel,
        "launch": launch.where,
        "figures": found,
        "readings": {name: {"value": value, "reading": reading} for name, value, reading in ncu.readings(found)},
        "limit": ncu.limit(found),
        "metrics": launch.metrics,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _print(launch: Launch, shorter: Sequence[Launch]) -> None:
    from .._benchmark.show import ncu

    found = ncu.figures(launch.metrics)
    _table(str(launch), ncu.readings(found))
    print(f"limited by {ncu.limit(found)}")
    for other in shorter:
        print(f"shorter: {other.kernel}, {other.seconds * 1e6:,.1f} us")


def _table(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """With rich on a terminal, otherwise aligned text."""
    with contextlib.suppress(ImportError):
        from rich.console import Console
        from rich.table import Table

        console = Console()
        if console.is_terminal:
            table = Table("figure", "value", "reading", title=title, title_justify="left")
            for row in rows:
                table.add_row(*row)
            console.print(table)
            return
    print(title)
    wide = [max(len(row[k]) for row in rows) for k in range(2)]
    for name, value, reading in rows:
        print(f"{name:<{wide[0]}}  {value:<{wide[1]}}  {reading}".rstrip())


# ----------------------------------------------------------------------------------- command line
def add_command(commands: Any) -> None:
    """Add `profile` to the command line."""
    parser = commands.add_parser(
        "profile",
        help="one kernel under Nsight Compute: what limits it",
        description="Runs one call on random operands under NVIDIA Nsight Compute (ncu) and reads its figures.",
    )
    parser.add_argument("case", choices=tuple(CASES), help="A @ B, A @ x, attention or attention_decode")
    parser.add_argument("--size", type=int, help="rows and columns of A; queries and keys; keys of the cache")
    parser.add_argument("--block", type=int, help="rows and columns of a block of A, or of attention's mask")
    parser.add_argument("--density", type=float, help="share of the blocks that are there; attention: 1 is no mask")
    parser.add_argument("--columns", type=int, help="columns of B")
    parser.add_argument("--dtype", choices=_DTYPES)
    parser.add_argument("--heads", type=int, help=f"query heads; {_SHARING} of a decode share their keys")
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--causal", action="store_true", default=None)
    parser.add_argument("--window", type=int, help="keys that a query sees: its own and those in front of it")
    parser.add_argument("--page", type=int, choices=_PAGES, help="tokens of a page of decode's cache, if it has pages")
    parser.add_argument("--kernel", metavar="REGEX", help="kernels to look at; the longest launch is shown")
    parser.add_argument("--json", metavar="FILE", help="also write the figures, and all metrics, to a file")
    parser.add_argument("--keep", metavar="REPORT", help="also keep ncu's report, for its own window")
    parser.add_argument("--ncu", metavar="PATH", default="ncu", help="the program, if it is not on PATH")
    parser.add_argument("--dry-run", action="store_true", help="only print the command line of ncu")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(command=lambda args: _profile(parser, args))


def _profile(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from .._benchmark.show import ncu

    every = {option: getattr(args, option) for options in CASES.values() for option in options}
    try:
        options = options_of(args.case, every)
    except ValueError as error:
        parser.error(str(error))
    try:
        problem = problem_of(args.case, options)
    except ValueError as error:
        parser.error(str(error))
    if args.inside:
        return _inside(problem)
    words = ["profile", *arguments(args.case, options)]
    child = [sys.executable, "-m", "bsrgemm", *words, "--inside"]
    kernel = KERNELS[args.case] if args.kernel is None else args.kernel
    if args.dry_run:
        print(shlex.join(ncu.command_line(args.ncu, kernel, child, args.keep)))
        return 0
    try:
        for file in (args.json, args.keep):
            if file is not None and not Path(file).absolute().parent.is_dir():
                raise ValueError(f"{file}: there is no folder {Path(file).parent}")
        command = ncu.command_line(_program(args.ncu, problem), kernel, child, args.keep)
        print(f"{' '.join(words[1:])}: ncu runs it several times", flush=True)
        status, output = _run(command)
        reason = ncu.failure(status, output, kernel)
        if reason is not None:
            raise ValueError(reason)
        launch, *shorter = ncu.parse(output)
        if args.json:
            _write(Path(args.json), words, problem, launch)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    _print(launch, shorter)
    if status:
        print(f"ncu ended with status {status}: figures may be missing", file=sys.stderr)
    return 0
