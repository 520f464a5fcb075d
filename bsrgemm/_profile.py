"""One kernel under NVIDIA Nsight Compute, its figures read: ``python -m bsrgemm profile gemm --block 64``.

The command starts ncu, which starts the command again with ``--inside``: random operands, a few calls that compile and
plan, then one call between cudaProfilerStart and cudaProfilerStop, which is all that ncu looks at.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__
from ._info import cuda_problem

#: The options of each case and what they are unless given; a window of 0 is none.
CASES: dict[str, dict[str, Any]] = {
    "gemm": {"size": 8192, "block": 64, "density": 0.22, "columns": 8192, "dtype": "float16"},
    "spmv": {"size": 65536, "block": 16, "density": 0.01, "dtype": "float32"},
    "attention": {"size": 16384, "heads": 16, "head_dim": 128, "dtype": "float16", "causal": False, "window": 0,
                  "block": 128, "density": 1.0},
    "decode": {"size": 131072, "heads": 32, "head_dim": 128, "dtype": "float16", "window": 0},
}  # fmt: skip
#: The kernels of each case; what else a call launches is not looked at.
KERNELS = {"gemm": "^(gemm_|spmv)", "spmv": "^spmv", "attention": "^attention_s", "decode": "^decode"}
DTYPES = ("float16", "bfloat16", "float32", "float64", "e4m3")
_NOT_TAKEN = {"spmv": ("e4m3",), "decode": ("float32", "float64", "e4m3")}
#: Figure: metric of ncu, factor. They are there since sm_75, the last two on cards with DRAM of their own. One that ncu
#: does not know is "n/a", since it has a suffix; without one it would be an error.
METRICS = {
    "duration_us": ("gpu__time_duration.sum", 1e6),
    "clock_ghz": ("gpc__cycles_elapsed.avg.per_second", 1e-9),
    "sm_pct": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct", 1.0),
    "l2_pct": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "dram_pct": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "dram_gbs": ("dram__bytes.sum.per_second", 1e-9),
}
#: ncu's own lists of what differs between cards: names of the tensor pipe, reasons of stalls; and the launch.
SECTIONS = ("ComputeWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats")
_OF_SECTIONS = {
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1.0),
    "most_occupancy_pct": ("sm__maximum_warps_per_active_cycle_pct", 1.0),
    "registers": ("launch__registers_per_thread", 1.0),
    "blocks_by_registers": ("launch__occupancy_limit_registers", 1.0),
    "static_kib": ("launch__shared_mem_per_block_static", 1 / 1024),
    "dynamic_kib": ("launch__shared_mem_per_block_dynamic", 1 / 1024),
    "blocks_by_shared": ("launch__occupancy_limit_shared_mem", 1.0),
}
#: The tensor pipe: its busy cycles, or else its instructions; of all cycles, or else of those of busy SMs.
_TENSOR = [
    re.compile(rf"sm__{what}\.avg\.pct_of_peak_sustained_{of}")
    for what in (r"pipe_tensor\w*_cycles_active\w*", r"inst_executed_pipe_tensor\w*")
    for of in ("elapsed", "active")
]
_STALL = re.compile(r"smsp__average_warps?(?:_latency)?_issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio")
_UNIT = re.compile(r"([numKMGT]?)(?:second|s|byte|[hH]z)")
_FACTORS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
#: What a warp waits for.
STALLS = {
    "barrier": "the other warps of its block",
    "gmma": "products of its warp group (wgmma)",
    "lg_throttle": "room in the queue of loads and stores",
    "long_scoreboard": "global memory or the L2",
    "math_pipe_throttle": "a busy pipe: tensor cores or arithmetic",
    "membar": "a memory fence",
    "mio_throttle": "room in the queue to shared memory",
    "no_instruction": "instructions that are not in their cache",
    "not_selected": "its turn: there are warps enough",
    "short_scoreboard": "shared memory or special functions",
    "wait": "the fixed latency of its last instruction",
}
#: ncu's rule of thumb: what reaches so many percent of its peak is the limit; if nothing does, waiting is.
_BUSY = 60
#: Figure: words for a value from so much on.
_WORDS: dict[str, tuple[tuple[float, str], ...]] = {
    "tensor_pct": ((80, "the limit, or close to it"), (_BUSY, "tensor cores are busy"),
                   (1, "tensor cores wait, for operands or for other work"), (0, "no tensor cores in use")),
    "sm_pct": ((80, "a pipe of the SM is the limit, or close to it"), (_BUSY, "the SM is busy"),
               (0, "the SM's pipes have time to spare")),
    "l2_hit_pct": ((80, "most reads end in the L2"), (50, "a good part of the reads goes on to DRAM"),
                   (0, "most reads go on to DRAM")),
    "l2_pct": ((80, "the limit, or close to it"), (_BUSY, "the L2 is busy"), (0, "the L2 has bandwidth to spare")),
    "dram_pct": ((80, "the limit, or close to it"), (_BUSY, "DRAM is busy"), (0, "DRAM has bandwidth to spare")),
    "filled_pct": ((80, "as many warps as fit"), (0, "fewer warps than fit: few blocks, or of uneven length")),
}  # fmt: skip
_WHERE = ("Grid Size", "Block Size", "CC")
_PERCENT = {
    "tensor pipe": "tensor_pct",
    "SM throughput": "sm_pct",
    "L2 hit rate": "l2_hit_pct",
    "L2 throughput": "l2_pct",
    "DRAM throughput": "dram_pct",
}
_MOST_STALLS, _LAST_LINES, _WARM_UPS, _SECONDS_TO_STOP = 4, 10, 3, 10.0
_SHARING = 4  # query heads of a decode on the same keys, as in bench/
_TOKENS_AT_ONCE = 8192
_NO_COUNTERS = """ncu may not read the GPU's counters (ERR_NVGPUCTRPERM). Either run this command as root (in a
container that was started with --cap-add=SYS_ADMIN), or let every user read them: put the line
  options nvidia NVreg_RestrictProfilingToAdminUsers=0
into a file of /etc/modprobe.d and reboot"""


# --------------------------------------------------------------------------------------- the case
@dataclass(frozen=True)
class Case:
    """What is run: a size x size matrix of square blocks, or attention over `size` keys."""

    name: str
    size: int
    dtype: str
    block: int = 1
    density: float = 1.0
    columns: int = 1
    heads: int = 1
    head_dim: int = 1
    causal: bool = False
    window: int = 0

    @property
    def kv_heads(self) -> int:
        return self.heads // _SHARING if self.heads % _SHARING == 0 else self.heads

    @property
    def per_row(self) -> int:
        """Blocks of a block row."""
        return max(1, round(self.density * (self.size // self.block)))

    @property
    def nbytes(self) -> int:
        """Bytes of the operands and the result, which is float16 for fp8."""
        item = {"float64": 8, "float32": 4, "e4m3": 1}.get(self.dtype, 2)
        if self.name == "decode":
            return 2 * self.kv_heads * self.size * self.head_dim * item
        if self.name == "attention":
            return self.heads * self.size * self.head_dim * (3 * item + max(item, 2))
        return self.size * (self.per_row * self.block * item + self.columns * (item + max(item, 2)))

    def arguments(self) -> list[str]:
        """The command line that asks for it."""
        found = [self.name]
        for option in CASES[self.name]:
            value = getattr(self, option)
            if value:
                found += [_flag(option)] if value is True else [_flag(option), str(value)]
        return found


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def case_of(name: str, given: dict[str, Any]) -> Case:
    """The case with these options, None where one was not given; ValueError for what cannot be."""
    given = {option: value for option, value in given.items() if value is not None}
    for option, value in given.items():
        if option not in CASES[name]:
            raise ValueError(f"{_flag(option)}: {name} only has {', '.join(map(_flag, CASES[name]))}")
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{_flag(option)}: wanted a number from 1 on, got {value}")
    case = Case(name, **{**CASES[name], **given})
    if not 0 < case.density <= 1:
        raise ValueError(f"--density: wanted a number above 0 and up to 1, got {case.density}")
    if case.dtype in _NOT_TAKEN.get(name, ()):
        raise ValueError(f"--dtype: {name} does not take {case.dtype}")
    if name in ("gemm", "spmv") and case.size % case.block:
        raise ValueError(f"--size: wanted a multiple of the block, {case.block}, got {case.size}")
    return case


def prepare(case: Case, device: str = "cuda") -> Callable[[], Any]:
    """The call, on random operands that are in their place."""
    from .attention import attention
    from .benchmark.random_data import normal, stored_dtype
    from .bsr import bsr_array
    from .decode import attention_decode
    from .homes import by_name
    from .kvcache import KVCache
    from .mask import BlockMask
    from .matmul import matmul

    xp, H, S, D = by_name(device).xp, case.heads, case.size, case.head_dim

    def draw(*shape: int) -> Any:
        return normal(shape, case.dtype, xp)

    options: dict[str, Any] = {"window": (case.window - 1, 0)} if case.window else {}
    if case.name == "decode":
        cache = KVCache(1, case.kv_heads, S, D, dtype=stored_dtype(case.dtype), device=device)
        for start in range(0, S, _TOKENS_AT_ONCE):
            tokens = (1, case.kv_heads, min(_TOKENS_AT_ONCE, S - start), D)
            cache.append(draw(*tokens), draw(*tokens))
        token = draw(1, H, 1, D)
        return lambda: attention_decode(token, cache, **options)
    fp8 = case.dtype == "e4m3"
    if case.name == "attention":
        q, k, v = draw(1, H, S, D), draw(1, H, S, D), draw(1, H, S, D)
        if fp8:
            options |= {"q_scale": 1.0, "out_dtype": np.float16}
        if case.density < 1:
            options["mask"] = BlockMask.random(S, per_row=case.per_row, block=case.block, device=device)
        return lambda: attention(q, k, v, causal=case.causal, **options)
    rows, each = S // case.block, case.per_row
    strips = np.arange(each + 1) * rows // each  # a block at random in each strip: distinct, and sorted
    columns = strips[:-1] + np.random.default_rng(0).random((rows, each)) * np.diff(strips)
    indices, indptr = (xp.asarray(x.astype(np.int32)) for x in (columns.reshape(-1), np.arange(rows + 1) * each))
    A = bsr_array((draw(rows * each, case.block, case.block), indices, indptr), shape=(S, S))
    if case.name == "spmv":
        x = draw(S)
        return lambda: A @ x
    if fp8:  # B as tensor cores read it: nothing is copied beside the product
        B = draw(case.columns, S).T
        return lambda: matmul(A, B, scale_a=1.0, scale_b=1.0, out_dtype=np.float16)
    B = draw(S, case.columns)
    return lambda: A @ B


def _inside(case: Case) -> int:
    """What ncu runs."""
    import cupy
    import cupyx.profiler

    call = prepare(case)
    for _ in range(_WARM_UPS):
        call()
    cupy.cuda.Device().synchronize()
    with cupyx.profiler.profile():
        call()
        cupy.cuda.Device().synchronize()
    return 0


# -------------------------------------------------------------------------------------------- ncu
def ncu_command(case: Case, ncu: str, kernel: str, keep: str | None = None) -> list[str]:
    """The command line of ncu."""
    export = ["--export", keep, "--force-overwrite"] if keep else []
    return [
        *(ncu, "--target-processes", "all", "--profile-from-start", "off", "--kernel-name", f"regex:{kernel}"),
        *(x for section in SECTIONS for x in ("--section", section)),
        *("--metrics", ",".join(name for name, _ in METRICS.values()), "--apply-rules", "no"),
        *("--csv", "--page", "raw", *export),
        *(sys.executable, "-m", "bsrgemm", "profile", *case.arguments(), "--inside"),
    ]


@dataclass(frozen=True)
class Launch:
    """A launch that ncu measured; metrics in seconds, bytes and Hz, None where ncu has no number."""

    kernel: str
    where: dict[str, str]
    metrics: dict[str, float | None]

    @property
    def seconds(self) -> float:
        return self.metrics.get(METRICS["duration_us"][0]) or 0.0


def parse(output: str) -> list[Launch]:
    """The launches in what ``ncu --csv --page raw`` printed, longest first, whatever was printed around them."""
    lines = (line for line in output.splitlines() if line.startswith('"'))
    rows = [row for line in lines for row in csv.reader([line])]  # one by one: a quote left open ends with its line
    start = next((i for i, row in enumerate(rows) if row[0] == "ID" and "Kernel Name" in row), len(rows))
    header = rows[start] if start < len(rows) else []
    units, found = [""] * len(header), []
    for row in rows[start + 1 :]:
        if len(row) == len(header) and not row[0]:
            units = row
        elif len(row) == len(header):
            cells = dict(zip(header, row, strict=True))
            metrics = {n: number(x, u) for n, x, u in zip(header, row, units, strict=True) if "__" in n}
            where: dict[str, str] = {name: cells[name] for name in _WHERE if name in cells}
            found.append(Launch(cells["Kernel Name"].partition("(")[0], where, metrics))
    return sorted(found, key=lambda launch: -launch.seconds)


def number(text: str, unit: str = "") -> float | None:
    """A value of ncu without the prefix of its unit, None for "n/a" and the like.

    >>> number("1,234.50", "Kbyte/block"), number("2", "byte/us"), number("(!) n/a", "%")
    (1234500.0, 2000000.0, None)
    """
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    up, down = (_FACTORS[match[1]] if (match := _UNIT.fullmatch(x)) else 1.0 for x in f"{unit}/".split("/")[:2])
    return value * up / down if math.isfinite(value) else None


def failure(status: int, output: str, kernel: str) -> str | None:
    """Why ncu has nothing to show; None if it has."""
    if "ERR_NVGPUCTRPERM" in output:
        return _NO_COUNTERS
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith(("==PROF==", '"'))]
    ended = f"ncu ended with status {status}; the last lines:\n  " + "\n  ".join(lines[-_LAST_LINES:])
    if "application returned an error code" in output:
        return f"the profiled process failed, and {ended}"
    if parse(output):
        return None
    if "==ERROR==" not in output and (status == 0 or "No kernels were profiled" in output):
        return f"--kernel: no kernel of the call matches {kernel!r}"
    return ended


# ---------------------------------------------------------------------------------------- figures
def figures(metrics: dict[str, float | None]) -> dict[str, Any]:
    """The figures of a launch, None where they are not known; stalls in percent of a warp's time, longest first."""
    known = {name: value for name, value in metrics.items() if value is not None}
    found: dict[str, Any] = {
        name: known[metric] * factor if metric in known else None
        for name, (metric, factor) in (METRICS | _OF_SECTIONS).items()
    }
    static, dynamic = found.pop("static_kib"), found.pop("dynamic_kib")
    found["shared_kib"] = None if static is None and dynamic is None else (static or 0.0) + (dynamic or 0.0)
    pipes = ([value for name, value in known.items() if pattern.fullmatch(name)] for pattern in _TENSOR)
    found["tensor_pct"] = next((max(values) for values in pipes if values), None)
    matches = ((_STALL.fullmatch(name), value) for name, value in known.items())
    cycles = {match[1]: value for match, value in matches if match and not match[1].endswith("_not_issued")}
    whole = sum(cycles.values())  # "selected" is no wait, but part of a warp's time
    waits = sorted(cycles.items(), key=lambda item: -item[1])
    found["stalls"] = {name: 100 * value / whole for name, value in waits if value > 0 and name != "selected"}
    return found


def limit(f: dict[str, Any]) -> str:
    """What limits the kernel, in one line."""
    # The SM's throughput is that of its busiest pipe: the tensor cores, if they are as busy.
    units = {"tensor_pct": "the tensor cores", "l2_pct": "the L2", "dram_pct": "DRAM", "sm_pct": "the SM's pipes"}
    shares = {name: round(f[name]) for name in units if f[name] is not None}
    if not shares:
        return "unknown: ncu has no figure of any unit"
    top = max(shares, key=lambda name: shares[name])
    if shares[top] >= _BUSY:
        return f"{units[top]}: {shares[top]} % of the peak"
    waits = f" for {_longest_wait(f)}" if f["stalls"] else ""
    return f"waiting{waits}: the busiest unit, {units[top]}, reaches {shares[top]} % of its peak"


def readings(f: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and meaning of each figure."""

    def text(name: str, form: str, unknown: str = "-") -> str:
        return unknown if f[name] is None else form.format(f[name])

    def words(name: str) -> str:
        return "" if f[name] is None else next((said for least, said in _WORDS[name] if f[name] >= least), "")

    def blocks(name: str, other: str) -> str:
        tighter = f[name] is not None and f[other] is not None and f[name] < f[other]
        return text(name, "room for {:.0f} blocks on an SM", "") + (", the tighter limit" if tighter else "")

    known = f["occupancy_pct"] is not None and f["most_occupancy_pct"]
    f = {**f, "filled_pct": 100 * f["occupancy_pct"] / f["most_occupancy_pct"] if known else None}
    stalls = [f"{name} {part:.0f} %" for name, part in f["stalls"].items()][:_MOST_STALLS]
    more = {"dram_pct": text("dram_gbs", ", {:,.0f} GB/s", "")}
    clock = text("clock_ghz", " at {:.2f} GHz", "")
    occupancy = text("occupancy_pct", "{:.1f} %") + text("most_occupancy_pct", " of {:.1f} %", "")
    return [
        ("duration", text("duration_us", "{:,.1f} us"), f"caches flushed, clock set by ncu{clock}: no benchmark"),
        *((title, text(name, "{:.1f} %") + more.get(name, ""), words(name)) for title, name in _PERCENT.items()),
        ("occupancy", occupancy, words("filled_pct")),
        ("registers", text("registers", "{:.0f} a thread"), blocks("blocks_by_registers", "blocks_by_shared")),
        ("shared memory", text("shared_kib", "{:.1f} KiB a block"), blocks("blocks_by_shared", "blocks_by_registers")),
        ("stalls", ", ".join(stalls) or "-", f"a warp waits for {_longest_wait(f)}" if stalls else ""),
    ]


def _longest_wait(f: dict[str, Any]) -> str:
    reason = next(iter(f["stalls"]), "")
    return STALLS.get(reason, reason)


def show(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """A table: with rich on a terminal, otherwise aligned text."""
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
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--heads", type=int, help=f"query heads; {_SHARING} of a decode share their keys")
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--causal", action="store_true", default=None)
    parser.add_argument("--window", type=int, help="keys that a query sees: its own and those in front of it")
    parser.add_argument("--kernel", metavar="REGEX", help="kernels to look at; the longest launch is shown")
    parser.add_argument("--json", metavar="FILE", help="also write the figures, and all metrics, to a file")
    parser.add_argument("--keep", metavar="REPORT", help="also keep ncu's report, for its own window")
    parser.add_argument("--ncu", metavar="PATH", default="ncu", help="the program, if it is not on PATH")
    parser.add_argument("--dry-run", action="store_true", help="only print the command line of ncu")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(command=lambda args: _profile(args, parser))


def _profile(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    kernel = KERNELS[args.case] if args.kernel is None else args.kernel
    try:
        options = {option for case in CASES.values() for option in case}
        case = case_of(args.case, {option: getattr(args, option) for option in sorted(options)})
        if args.inside:
            return _inside(case)
        if args.dry_run:
            print(shlex.join(ncu_command(case, args.ncu, kernel, args.keep)))
            return 0
        for file in (args.json, args.keep):
            if file is not None and not Path(file).absolute().parent.is_dir():
                raise ValueError(f"{file}: there is no folder {Path(file).parent}")
        command = ncu_command(case, _ready(case, args.ncu), kernel, args.keep)
        print(f"{' '.join(case.arguments())}: ncu runs it several times", flush=True)
        status, output = _run(command)
        problem = failure(status, output, kernel)
        if problem is not None:
            raise ValueError(problem)
        longest, *others = parse(output)
        found = figures(longest.metrics)
        rows = readings(found)
        if args.json:
            content = {
                "bsrgemm": __version__,
                "case": dict(name=case.name, **{option: getattr(case, option) for option in CASES[case.name]}),
                "kernel": longest.kernel,
                "launch": longest.where,
                "figures": found,
                "readings": {name: {"value": value, "reading": reading} for name, value, reading in rows},
                "limit": limit(found),
                "metrics": longest.metrics,
            }
            Path(args.json).write_text(json.dumps(content, indent=1) + "\n")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    show(", ".join([longest.kernel, *(f"{name} {value}" for name, value in longest.where.items())]), rows)
    print(f"limited by {limit(found)}")
    for launch in others:
        print(f"shorter: {launch.kernel}, {launch.seconds * 1e6:,.1f} us")
    if status:
        print(f"ncu ended with status {status}: figures may be missing", file=sys.stderr)
    return 0


def _ready(case: Case, ncu: str) -> str:
    """Where ncu is; ValueError where the case cannot be profiled."""
    problem = cuda_problem()
    if problem is not None:
        raise ValueError(f"profiling needs a GPU; missing {problem}")
    found = shutil.which(ncu)
    if found is None:
        raise ValueError(
            f"--ncu: there is no program {ncu!r}. It is NVIDIA Nsight Compute, which comes with the CUDA toolkit or "
            "by itself from developer.nvidia.com/nsight-compute; --ncu PATH says where it is"
        )
    import cupy

    free = cupy.cuda.runtime.memGetInfo()[0]
    if case.nbytes > free:
        need, have = (f"{n / 2**30:,.1f} GiB" for n in (case.nbytes, free))
        raise ValueError(f"--size: operands and result take {need}, and {have} of the GPU's memory are free")
    return found


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Exit status and output of ncu. On an interrupt it has time to give the clocks of the card back."""
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
